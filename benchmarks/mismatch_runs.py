"""Two runs of one tiny Llama on the same tokens, a trainer's forward and an engine's decoding, with planted faults.

Both compute attention as FlashAttention-2 rounds it; the engine splits the keys and merges the splits through their LSE
in fp32. What the engine's kernel is told, and its capture states, is not always what it computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import quantizer

LAYERS, HEADS, KV_HEADS, WIDTH, HEAD_DIM, VOCABULARY, WINDOW = 3, 4, 2, 256, 32, 97, 24
BATCH, LENGTH, PROMPT = 2, 64, 44
FAULTS = ("sink", "scale", "window", "position", "weights", "merge", "norm", "softcap")
UNSEEN = (
    "qk-norm", "rope-base", "late-keys", "late-cache", "other-cache", "other-heads", "stale", "stale-mlp", "mlp-norm",
    "late-window", "temperature",
)  # fmt: skip
"""Faults that the analysis was not made for: to be named rightly, or said to be unnamed."""
LAYOUTS = ("dynamic", "static", "chunked", "alone")
"""A cache that lets old keys go, one of a fixed size, prefill in two chunks, and each sequence by itself."""
_NAME = "attn-diag-planted"
_SPLIT = 8
_SOFTCAP = 20.0


@dataclass
class Kernel:
    """What a run's attention computes beside what it is told."""

    split: int | None = None
    """Keys of a split; None: one."""
    lse: torch.dtype = torch.float32
    """What the splits' LSE is kept in."""
    scale: float = 1.0
    """What the scale is multiplied by."""
    sinks: bool = True
    """Whether sinks are obeyed."""
    window: int = 0
    """What is added to the window that the mask states."""
    softcap: bool = True
    """Whether a softcap is obeyed."""
    other_softcap: float | None = None
    """The softcap where none is stated."""
    late: str = ""
    """Of what (k, kv) each place of the cache holds what belongs to the one before it."""
    borrows: Kernel | None = None
    """Whose keys and values are read instead of its own."""
    swapped: bool = False
    """Whether query heads find their key heads in turn (h mod Hk) instead of in groups."""
    cold: float = 0.0
    """How much the scale grows from each row's key to the next, by the row's place."""
    seen: tuple[Tensor, Tensor] | None = None
    """The keys and values of the last call."""

    def called(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, sinks: Tensor | None, softcap: float | None
    ) -> Tensor:
        """As the call itself, of k and v [B, Hk, Tk, D]."""
        self.seen = k, v
        if self.borrows is not None and self.borrows.seen is not None:
            k, v = self.borrows.seen
        if self.late:
            k = torch.cat([k[:, :, :1], k[:, :, :-1]], 2)
        if self.late == "kv":
            v = torch.cat([v[:, :, :1], v[:, :, :-1]], 2)
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat(1, group, 1, 1) if self.swapped else t.repeat_interleave(group, 1) for t in (k, v))
        cap = self.other_softcap or (softcap if self.softcap else None)
        return self(q, k, v, bias, scale, sinks, cap)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, sinks: Tensor | None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """O [B, Hq, Tq, D] of q [B, Hq, Tq, D], k and v [B, Hq, Tk, D], bias [B, 1, Tq, Tk]."""
        if self.window:
            seen = bias == 0
            # A row sees its own key, the last one that it sees, and so many before it.
            last = seen.shape[-1] - 1 - seen.flip(-1).int().argmax(-1, keepdim=True)
            first = seen.int().argmax(-1, keepdim=True)
            place = torch.arange(seen.shape[-1])
            moved = torch.where(first > 0, first - self.window, first)
            moved = torch.where(
                (first == 0) & (last - first + 1 > WINDOW + self.window), last - WINDOW - self.window + 1, moved
            )
            bias = torch.where((place >= moved) & (place <= last), 0.0, -torch.inf)
        scores = (q.float() @ k.float().transpose(2, 3)) * (scale * self.scale)
        if self.cold:
            scores = scores * (1 + self.cold * (bias == 0).sum(-1, keepdim=True))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + bias
        parts = []
        width = self.split or scores.shape[-1]
        for begin in range(0, scores.shape[-1], width):
            part = scores[..., begin : begin + width]
            top = part.amax(-1, keepdim=True)
            safe = top.masked_fill(top == -torch.inf, 0.0)
            unnormalised = (part - safe).exp()
            total = unnormalised.sum(-1, keepdim=True)
            o = (unnormalised.to(q.dtype).float() @ v[..., begin : begin + width, :].float()) / total.clamp(min=1e-30)
            lse = (safe + total.log()).to(self.lse if self.split else torch.float32).float()
            parts.append((o, lse))
        lse = torch.stack([lse for _, lse in parts])
        # A sink belongs to the sum of all splits, like one more of them.
        whole = lse.logsumexp(0)
        if sinks is not None and self.sinks:
            whole = torch.logaddexp(whole, sinks.float()[None, :, None, None].expand_as(whole))
        return sum((one - whole).exp() * o for o, one in parts).to(q.dtype)  # type: ignore[union-attr]


@dataclass
class Engine:
    """A model, with a kernel for every layer."""

    model: Any
    kernels: list[Kernel]
    hidden: Tensor | None = None
    """What entered the LM head in its run, [B, T, C]."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls; the mask is additive or bool, [B or 1, 1, Tq, Tk]."""
    kernel: Kernel = module.planted  # type: ignore[assignment]
    sinks = kwargs.get("s_aux")
    rows, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, rows, keys, dtype=torch.bool).tril(keys - rows)
    mask = attention_mask[..., :keys]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    o = kernel.called(query, key, value, bias, scaling, sinks, kwargs.get("softcap"))
    return o.transpose(1, 2).contiguous(), None


def _registered() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, partial(sdpa_mask, allow_is_causal_skip=False))


def tiny_llama(seed: int, *, dtype: torch.dtype = torch.bfloat16, layers: int = LAYERS) -> Any:
    """A Mistral of three layers with a window, scores of unit size, and a sink a head."""
    import transformers

    _registered()
    config = transformers.MistralConfig(  # type: ignore[call-arg]
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, intermediate_size=2 * WIDTH, max_position_embeddings=128,
        sliding_window=WINDOW, attn_implementation=_NAME,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.MistralForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                # Scores of a trained model's size, not of a fresh one's.
                projection.weight.mul_(0.125 / projection.weight.std() * 0.9)
            layer.self_attn.sinks = nn.Parameter(torch.randn(HEADS, generator=generator) * 0.5 + 1.0)
            for projection in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(2.5)
        model.lm_head.weight.mul_(4.0)
    return model.to(dtype)


def engines(
    seed: int, fault: str | None, layer: int, *, dtype: torch.dtype = torch.bfloat16, layers: int = LAYERS
) -> tuple[Engine, Engine]:
    """The trainer and the engine, which has a fault in one layer.

    Args:
        seed: Of the weights.
        fault: One of ``FAULTS`` or ``UNSEEN``; None: none.
        layer: Where.
        dtype: Of the models.
        layers: How many there are.
    """
    model = tiny_llama(seed, dtype=dtype, layers=layers)
    if fault == "weights":
        _quantize(model.model.layers[layer], "128")
    other = copy.deepcopy(model)
    if fault == "weights":
        other = tiny_llama(seed, dtype=dtype, layers=layers)
        _quantize(other.model.layers[layer], "32")
    kernels = [Kernel(split=_SPLIT) for _ in range(layers)]
    capped = fault == "softcap" and seed % 2 == 1
    changes: dict[str, dict[str, Any]] = {
        "sink": {"sinks": False}, "scale": {"scale": 1.01}, "window": {"window": -1}, "merge": {"lse": torch.bfloat16},
        "softcap": {"softcap": False} if capped else {"other_softcap": _SOFTCAP}, "late-keys": {"late": "k"},
        "late-cache": {"late": "kv"}, "other-cache": {"borrows": kernels[layer - 1]}, "other-heads": {"swapped": True},
        "late-window": {"window": 1}, "temperature": {"cold": 0.002},
    }  # fmt: skip
    for name, value in changes.get(fault or "", {}).items():
        setattr(kernels[layer], name, value)
    result = Engine(model, [Kernel() for _ in range(layers)]), Engine(other, kernels)
    for engine in result:
        for number, (block, kernel) in enumerate(zip(engine.model.model.layers, engine.kernels, strict=True)):
            block.self_attn.planted = kernel
            cap = _SOFTCAP if capped and number == layer else None
            block.self_attn.forward = partial(block.self_attn.forward, s_aux=block.self_attn.sinks, softcap=cap)
    _change_model(other, fault, layer, seed)
    return result


def _change_model(model: Any, fault: str | None, layer: int, seed: int) -> None:
    """Plant a fault that is none of the kernel's."""
    block = model.model.layers[layer]
    attention = block.self_attn
    if fault == "position":
        attention.forward = partial(_late, attention.forward, model.model.rotary_emb)
    elif fault == "rope-base":
        attention.forward = partial(_other_base, attention.forward, copy.deepcopy(model.model.rotary_emb))
    elif fault in ("norm", "mlp-norm"):
        norm = block.input_layernorm if fault == "norm" else block.post_attention_layernorm
        # What matters is epsilon beside the mean square of what enters the norm: 1e-5 where that is 4e-4, as it is
        # behind a fresh embedding.
        norm.variance_epsilon = 0.025 * _mean_square(model, norm, tokens_of(seed))
    elif fault == "qk-norm":
        attention.q_proj.register_forward_hook(_normed)
    elif fault in ("stale", "stale-mlp"):
        old = [attention.q_proj, attention.k_proj, attention.v_proj] if fault == "stale" else [block.mlp.up_proj]
        generator = torch.Generator().manual_seed(seed + 2)
        with torch.no_grad():
            for projection in old:
                w = projection.weight
                w.add_((torch.randn(w.shape, generator=generator) * w.float().std() * 0.05).to(w.dtype))


def _mean_square(model: Any, norm: nn.Module, ids: Tensor) -> float:
    found: list[float] = []
    hook = norm.register_forward_pre_hook(lambda _, args: found.append(float(args[0].float().square().mean())))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    hook.remove()
    return found[0]


def _normed(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Another epsilon of the norm of each query: as QK-norm's, of a query whose norm has just been made 1."""
    del module, args
    heads = out.float().reshape(*out.shape[:-1], HEADS, HEAD_DIM)
    square = heads.square().mean(-1, keepdim=True)
    normed: Tensor = (heads * (square / (square + 0.03)).sqrt()).flatten(-2).to(out.dtype)
    return normed


def _other_base(forward: Callable[..., Any], rotary: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """A forward with RoPE of base 12,000 where the model has 10,000."""
    pairs = torch.arange(0, HEAD_DIM, 2, dtype=torch.float)
    rotary.inv_freq = 12000.0 ** (-pairs / HEAD_DIM)
    kwargs["position_embeddings"] = rotary(hidden_states, kwargs["position_ids"])
    return forward(hidden_states, **kwargs)


def _quantize(layer: Any, block: str) -> None:
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(layer.self_attn, name).weight
            weight.copy_(quantize(weight.float(), quantizer("int4", block=block)).values)


def _late(forward: Callable[..., Any], rotary: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Any:
    """A forward whose query and new key are one position late while decoding, as with a length for a last index."""
    if hidden_states.shape[1] == 1:
        past = kwargs["past_key_values"]
        position = torch.full((1, 1), past.get_seq_length() if past is not None else 0)
        # The cache of this layer does not hold the token yet.
        at = kwargs.get("position_ids")
        position = (position if at is None else at[:1]) + 1
        kwargs["position_embeddings"] = rotary(hidden_states, position)
    return forward(hidden_states, **kwargs)


def tokens_of(seed: int) -> Tensor:
    """The tokens, [B, T]."""
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + seed))


def train_forward(engine: Engine, ids: Tensor) -> Tensor:
    """What enters the LM head in one forward, [B, T, C]."""
    with torch.no_grad():
        return _hidden(engine.model, ids, use_cache=False)


def _hidden(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    found: Tensor = model.model(input_ids=ids, **inputs).last_hidden_state
    return found


def rollout(engine: Engine, ids: Tensor, layout: str) -> Tensor:
    """The same tokens by prefill and decoding; as ``train_forward``."""
    from transformers import DynamicCache, StaticCache

    if layout == "alone":
        return torch.cat([rollout(engine, one[None], "dynamic") for one in ids])
    model = engine.model
    if layout == "static":
        cache: Any = StaticCache(config=model.config, max_cache_len=LENGTH + 3)
    else:
        cache = DynamicCache(config=model.config)
    ends = (
        [PROMPT, *range(PROMPT + 1, LENGTH + 1)]
        if layout != "chunked"
        else [17, PROMPT, *range(PROMPT + 1, LENGTH + 1)]
    )
    found, begin = [], 0
    with torch.no_grad():
        for end in ends:
            at = torch.arange(begin, end)[None]
            found.append(_hidden(model, ids[:, begin:end], position_ids=at, past_key_values=cache, use_cache=True))
            begin = end
    return torch.cat(found, 1)


@contextmanager
def captured(engine: Engine, folder: Path) -> Iterator[list[Capture]]:
    """Captures of what the engine runs meanwhile: the list is filled at the end."""
    found: list[Capture] = []
    with ExitStack() as stack:
        recorder = stack.enter_context(attn_diag.capture(engine.model, folder, batch=None, calls=None))
        yield found
    found += [attn_diag.load(path) for path in sorted(recorder.written)]


def both_runs(
    seed: int,
    fault: str | None,
    layer: int,
    layout: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = LAYERS,
) -> tuple[list[Capture], list[Capture], tuple[Tensor, Tensor], tuple[Engine, Engine]]:
    """Captures of train and of rollout, the log-probabilities [B, T - 1] of the tokens in both, and the models."""
    train, other = engines(seed, fault, layer, dtype=dtype, layers=layers)
    ids = tokens_of(seed)
    with captured(train, folder / "train") as a:
        train.hidden = train_forward(train, ids)
    with captured(other, folder / "rollout") as b:
        other.hidden = rollout(other, ids, layout)
    return a, b, (logprobs(train, ids), logprobs(other, ids)), (train, other)


def logprobs(engine: Engine, ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens after the first, float64 [B, T - 1]."""
    # Logits in fp32, as trainers and engines that care about them have the last product.
    assert engine.hidden is not None
    logits = engine.hidden.float() @ engine.model.lm_head.weight.detach().float().T
    every: Tensor = logits[:, :-1].double().log_softmax(-1)
    return every.gather(2, ids[:, 1:, None])[..., 0]
