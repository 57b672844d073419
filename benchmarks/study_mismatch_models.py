"""Trained models of Hugging Face's classes: how far decoding from a cache differs from the training forward, and why.

Small GPT-2, Llama and Qwen3 models learn the bytes of this repository. The trainer's forward runs SDPA's flash
attention or FlexAttention (on a GPU) in BF16; the engine decodes the same tokens with SDPA from a dynamic or a static
cache, or with splits of the keys that are merged in fp32 (as paged decoding does). The difference of the sampled
tokens' log-probabilities is explained, and both repairs that are offered without a fault are done and measured: the
trainer's own kernel over all rows at every decoded token, and FP16 in both.

    python benchmarks/study_mismatch_models.py --device cuda --json benchmarks/results/mismatch_models_h100.json
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mismatch_runs
import torch
from measuring import made_by, options_of, save
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_diag
from attn_diag.analyses.mismatch.repairs import FP16, SAME_KERNEL
from attn_diag.captures.capture import Capture

ROOT = Path(__file__).parent.parent
MODELS = ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM")
TRAINERS = ("flash", "flex")
ENGINES = ("dynamic", "static", "split")
LAYERS, WIDTH, HEADS, BATCH, PROMPT, LENGTH, SPLIT = 4, 256, 4, 4, 64, 160, 32
_WHOLE, _SPLIT = "attn-diag-whole", "attn-diag-split"


def model_of(name: str) -> Any:
    """A randomly initialised one, in fp32."""
    import transformers

    plain: dict[str, Any] = {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH,
        "num_key_value_heads": 2, "head_dim": WIDTH // HEADS,
    }  # fmt: skip
    if name.startswith("GPT2"):
        plain = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        plain |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made = getattr(transformers, name)
    torch.manual_seed(0)
    return made(made.config_class(vocab_size=256, max_position_embeddings=512, **plain))


def bytes_of_the_repository() -> Tensor:
    """Its Python sources, one byte a token."""
    files = sorted([*ROOT.glob("diagnostics/**/*.py"), *ROOT.glob("kernels/*.py"), *ROOT.glob("reference/*.py")])
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def trained(name: str, tokens: Tensor, device: str, steps: int) -> tuple[Any, float]:
    """A model after ``steps`` of BF16 autocast, in BF16, and its last loss."""
    model = model_of(name).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (16,), generator=generator)
        ids = torch.stack([tokens[i : i + LENGTH] for i in starts.tolist()]).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.bfloat16().eval(), float(loss.detach())


def _attend(kernel: Callable[..., Tensor], module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, scaling: float,
            **__: Any) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls; all rows of a causal sequence, of which the last ones are asked for."""
    earlier: list[Tensor] | None = getattr(module, "earlier_queries", None)
    rows = q.shape[2]
    if earlier is not None:
        earlier.append(q)
        q = torch.cat(earlier, 2)
    return kernel(q, k, v, scaling)[:, :, -rows:].transpose(1, 2).contiguous(), None


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


_compiled: dict[str, Any] = {}


def _flex(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if q.dtype == torch.float64:  # in which the shares are computed
        return _flash(q, k, v, scale)
    if "flex" not in _compiled:
        _compiled["flex"] = torch.compile(flex_attention, dynamic=False)
    # One shape for every length: rows and keys behind the last are hidden, which changes no bit of the others.
    rows, room = q.shape[2], LENGTH
    q, k, v = (nn.functional.pad(t, (0, 0, 0, room - t.shape[2])) for t in (q, k, v))
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, room, room, device=q.device)  # noqa: ARG005
    found: Tensor = _compiled["flex"](q, k, v, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return found[:, :, :rows]


def _splits(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any) -> Any:
    module.planted = mismatch_runs.Kernel(split=SPLIT)  # type: ignore[assignment]
    with torch.device(q.device):
        return mismatch_runs.attend(module, q, k, v, mask, scaling)


def _registered(trainer: str) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_WHOLE, partial(_attend, _flash if trainer == "flash" else _flex))
    AttentionInterface.register(_SPLIT, _splits)
    for name in (_WHOLE, _SPLIT):
        AttentionMaskInterface.register(name, partial(sdpa_mask, allow_is_causal_skip=False))


@contextmanager
def _remembering(model: Any) -> Iterator[None]:
    """Attention keeps its earlier queries, to run the trainer's kernel on all rows again."""
    layers = [m for m in model.modules() if hasattr(m, "is_causal") and hasattr(m, "layer_idx")]
    for layer in layers:
        layer.earlier_queries = []
    try:
        yield
    finally:
        for layer in layers:
            del layer.earlier_queries


@torch.no_grad()
def train_forward(model: Any, ids: Tensor) -> Tensor:
    """What enters the LM head, [B, T, C]."""
    model.set_attn_implementation(_WHOLE)
    found: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return found


@torch.no_grad()
def decoded(model: Any, ids: Tensor, engine: str) -> Tensor:
    """The same by a prefill and one token after the other; ``engine``: one of ``ENGINES``, or "whole"."""
    from transformers import DynamicCache, StaticCache

    model.set_attn_implementation({"split": _SPLIT, "whole": _WHOLE}.get(engine, "sdpa"))
    static = engine == "static"
    cache: Any = StaticCache(config=model.config, max_cache_len=LENGTH) if static else DynamicCache(config=model.config)
    found, begin = [], 0
    for end in (PROMPT, *range(PROMPT + 1, LENGTH + 1)):
        at = torch.arange(begin, end, device=ids.device)[None]
        inputs = {"position_ids": at.expand(len(ids), -1), "past_key_values": cache, "use_cache": True}
        found.append(model.base_model(input_ids=ids[:, begin:end], **inputs).last_hidden_state)
        begin = end
    return torch.cat(found, 1)


def logprobs(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Of the tokens after the first, float64 [B, T - 1]; logits in fp32."""
    logits = hidden.float() @ model.get_output_embeddings().weight.detach().float().T
    every: Tensor = logits[:, :-1].double().log_softmax(-1)
    return every.gather(2, ids[:, 1:, None])[..., 0]


def captured(model: Any, folder: Path, run: Callable[[], Tensor]) -> tuple[Tensor, list[Capture]]:
    """What ``run`` returned, and its captures."""
    with attn_diag.capture(model, folder, batch=None, calls=None) as recorder:
        hidden = run()
    return hidden, [attn_diag.load(path) for path in sorted(recorder.written)]


def apart(model: Any, ids: Tensor, engine: str) -> float:
    """The rms difference of the sampled tokens' log-probabilities."""
    ours = logprobs(model, train_forward(model, ids), ids)
    if engine == "whole":
        with _remembering(model):
            theirs = decoded(model, ids, engine)
    else:
        theirs = decoded(model, ids, engine)
    return _rms(logprobs(model, theirs, ids) - ours)


def _rms(difference: Tensor) -> float:
    return math.sqrt(float(difference[:, PROMPT - 1 :].square().mean()))


def case(model: Any, ids: Tensor, engine: str) -> dict[str, Any]:
    """One pair of runs: what explains their difference, and what is left once each repair is done."""
    with tempfile.TemporaryDirectory() as folder:
        a = captured(model, Path(folder) / "train", lambda: train_forward(model, ids))
        b = captured(model, Path(folder) / "rollout", lambda: decoded(model, ids, engine))
        assert a[1]
        assert b[1]
        given = tuple(logprobs(model, hidden, ids).cpu() for hidden in (a[0], b[0]))
        mask = torch.zeros(given[0].shape)
        mask[:, PROMPT - 1 :] = 1
        model.set_attn_implementation(_WHOLE)
        found = attn_diag.explain_logprobs(
            model,
            ids,
            a[1],
            b[1],
            logprobs=(given[0], given[1]),
            mask=mask,
            hidden=(a[0], b[0]),
            device=ids.device.type,
        )
    assert found.logprobs is not None
    shares = {f"{s.layer}:{s.place}": round(s.share, 4) for s in found.logprobs.shares}
    repairs = []
    for repair in found.repairs:
        if repair.what == SAME_KERNEL:
            left = apart(model, ids, "whole")
        elif repair.what == FP16:
            # Of the weights in BF16, as the captured model had them.
            left = apart(model.half(), ids, engine)
            model.bfloat16()
        else:
            continue
        repairs.append({"repair": repair.what, "predicted": repair.left, "done": left})
    return {
        "rms": _rms(given[1] - given[0]), "explained": found.logprobs.predicted, "headline": found.headline,
        "shares": shares, "causes": [f"{c.layer}: {c.kind}: {c.words}" for c in found.causes], "repairs": repairs,
    }  # fmt: skip


def main() -> None:
    parser = options_of(__doc__, device="cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    options = parser.parse_args()
    tokens = bytes_of_the_repository()
    ids = torch.stack([tokens[i * 7919 : i * 7919 + LENGTH] for i in range(BATCH)]).to(options.device)
    result: dict[str, Any] = made_by(options.device)
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    for name in options.models:
        model, loss = trained(name, tokens, options.device, options.steps)
        print(f"{name}: loss {loss:.3f}", flush=True)
        for trainer in TRAINERS if options.device == "cuda" else TRAINERS[:1]:
            _registered(trainer)
            for engine in ENGINES:
                started = time.monotonic()
                with sdpa_kernel(backends, set_priority=True):
                    found = case(model, ids, engine)
                found["seconds"] = round(time.monotonic() - started, 1)
                result[f"{name}, {trainer}, {engine}"] = {"loss": round(loss, 3), **found}
                print(f"  {trainer}, {engine}: {found}", flush=True)
                save(result, options.json)


if __name__ == "__main__":
    main()
