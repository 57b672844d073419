"""Tiny models of several kinds, each with a batch and a loss: what the tests of ``attn_diag.watching.live`` run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from builders import some
from torch import Tensor, nn
from torch.nn import functional

import attn_diag
from attn_diag.watching.live.recorder import Recorder

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 2, 20, 32, 4, 61


@dataclass(frozen=True)
class Tiny:
    """``loss(model)`` runs a forward; ``attentions`` are the dotted names of the modules that call attention."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    attentions: tuple[str, ...]


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def padding() -> Tensor:
    """[B, T], 1 where there is a token: the second sequence is shorter, padded on its right."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -6:] = 0
    return mask


# What transformers calls it -> (configuration, name of a layer's attention with its number left open).
_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
_ROTARY = _SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", _ROTARY, "model.layers.{}.self_attn"),
    "mistral": ("Mistral", _ROTARY | {"sliding_window": 7}, "model.layers.{}.self_attn"),
    "qwen3": ("Qwen3", _ROTARY | {"head_dim": 8}, "model.layers.{}.self_attn"),
    "gpt_neox": (
        "GPTNeoX",
        _SHAPE | {"intermediate_size": 48, "max_position_embeddings": 64, "rotary_pct": 0.5},
        "gpt_neox.layers.{}.attention",
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "transformer.h.{}.attn",
    ),
    "bert": (
        "Bert",
        _SHAPE | {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "bert.encoder.layer.{}.attention.self",
    ),
}  # fmt: skip
# Of which fewer tests are run.
_MORE: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma": ("Gemma", _ROTARY | {"head_dim": 8}, "model.layers.{}.self_attn"),
    "gemma2": (
        "Gemma2",
        _ROTARY
        | {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
        "model.layers.{}.self_attn",
    ),
    "olmo": ("Olmo", _ROTARY, "model.layers.{}.self_attn"),
    "phi": ("Phi", _ROTARY, "model.layers.{}.self_attn"),
    "gpt_oss": (
        "GptOss",
        _ROTARY | {"head_dim": 8, "sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1},
        "model.layers.{}.self_attn",
    ),
    "deepseek_v3": (  # MLA: q and k of 16 features, v of 12
        "DeepseekV3",
        _ROTARY
        | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 12, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        "model.layers.{}.self_attn",
    ),
    "bloom": ("Bloom", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS}
              | {"hidden_dropout": 0.0, "attention_dropout": 0.0}, "transformer.h.{}.self_attention"),
    "mpt": ("Mpt", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 64},
            "transformer.blocks.{}.attn"),
    "albert": (
        "Albert",
        _SHAPE | {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "albert.encoder.albert_layer_groups.0.albert_layers.0.attention",
    ),
}  # fmt: skip


def transformers_model(kind: str, implementation: str, *, padded: bool = False) -> Tiny:
    """A randomly initialised model of two layers. ``implementation``: sdpa, eager, or a registered name."""
    import transformers

    family, options, name = (TRANSFORMERS | _MORE)[kind]
    config = getattr(transformers, f"{family}Config")(**options, attn_implementation=implementation)
    head = "ForMaskedLM" if kind in ("bert", "albert") else "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{family}{head}")(config)
    # Ordinary initialisations leave biases zero and scores all alike.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)

    def loss(run: nn.Module) -> Tensor:
        device = next(run.parameters()).device
        ids, mask = tokens().to(device), padding().to(device) if padded else None
        labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
        result: Tensor = run(input_ids=ids, attention_mask=mask, labels=labels).loss
        return result

    return Tiny(model, loss, tuple(name.format(layer) for layer in range(2)))


class CausalSelfAttention(nn.Module):
    """nanoGPT's, with the function in a variable of this module's."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        result: Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class NanoGPT(nn.Module):
    """``checkpointing``: None, or what torch.utils.checkpoint calls use_reentrant."""

    def __init__(self, checkpointing: bool | None, layers: int) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        result: Tensor = self.head(x)
        return result


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def nano_gpt(checkpointing: bool | None = None, layers: int = 2) -> Tiny:
    torch.manual_seed(0)

    def loss(run: nn.Module) -> Tensor:
        return next_token_loss(run, tokens().to(next(run.parameters()).device))

    return Tiny(NanoGPT(checkpointing, layers), loss, tuple(f"h.{layer}.attn" for layer in range(layers)))


def transformer_encoder() -> Tiny:
    """torch's own, in training mode, with a padding mask."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(BATCH, LENGTH, WIDTH)

    def loss(run: nn.Module) -> Tensor:
        result: Tensor = run(x, src_key_padding_mask=padding() == 0).square().mean()
        return result

    return Tiny(model, loss, ("layers.0.self_attn", "layers.1.self_attn"))


def steps(tiny: Tiny, count: int = 1) -> None:
    """Plain steps of training."""
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        torch.autograd.backward(tiny.loss(tiny.model))
        optimizer.step()


def train(tiny: Tiny, around: Any, *, autocast: bool = False) -> list[Tensor]:
    """Three steps of two micro-batches, evaluation in between: losses and, at last, gradients and parameters."""
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-3)
    bits: list[Tensor] = []
    device = next(tiny.model.parameters()).device
    with around:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    loss = tiny.loss(tiny.model)
                torch.autograd.backward(loss)
                bits.append(loss.detach())
            with torch.no_grad():
                tiny.model.eval()
                bits.append(tiny.loss(tiny.model))
                tiny.model.train()
            optimizer.step()
    gradients = [p.grad.clone() for p in tiny.model.parameters() if p.grad is not None]
    return [*bits, *gradients, *(p.detach().clone() for p in tiny.model.parameters())]


def train_watched(
    tiny: Tiny,
    loss: Callable[[int], Tensor],
    folder: Path | None,
    *,
    count: int,
    micro_batches: int,
    steps: set[int],
    every: int,
) -> tuple[list[Tensor], Any]:
    """Losses of all micro-batches and gradients of all steps; and what captured them, with a monitor beside it.

    Args:
        tiny: The model.
        loss: Of one micro-batch; it is given how many tensors there are so far.
        folder: Where to capture; None: nobody watches.
        count: Steps of training.
        micro_batches: In each of them.
        steps: Those that are captured.
        every: Of the monitor.
    """
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-3)
    parameters = list(tiny.model.parameters())
    bits: list[Tensor] = []
    recorder = None
    if folder is not None:
        recorder = attn_diag.capture(tiny.model, folder, steps=steps, batch=(1,), calls=None).start()
        monitor = attn_diag.Monitor(tiny.model, every=every)
    for _ in range(count):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            value = loss(len(bits))
            torch.autograd.backward(value)
            bits.append(value.detach().clone())
            for parameter in parameters:  # a CUDA graph's own memory, which its next replay overwrites
                parameter.grad = some(parameter.grad).clone()
        optimizer.step()
        bits += [some(p.grad).clone() for p in parameters]
    if recorder is not None:
        recorder.close()
        monitor.close()
        assert [check.step for check in monitor.history] == list(range(0, count, every))
        seen = {layer.module for check in monitor.history for layer in check.layers}
        assert seen == set(tiny.attentions), seen
    return bits, recorder


def hooks_of(model: nn.Module) -> list[str]:
    """Where hooks are registered in a model."""
    return [
        f"{name}.{key}"
        for name, part in model.named_modules()
        for key, value in vars(part).items()
        if "hooks" in key and value
    ]


def written(recorder: Recorder) -> list[attn_diag.Capture]:
    """The captures that it wrote, by step, layer, call and rank."""
    return [attn_diag.load(path) for path in sorted(recorder.written)]


def captured(
    tiny: Tiny, folder: Path, *, autocast: bool = False, steps: int = 1, **options: Any
) -> list[attn_diag.Capture]:
    """The files of a short training run, in order of step and layer."""
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.0)
    device = next(tiny.model.parameters()).device.type
    with attn_diag.capture(tiny.model, folder, **{"batch": None, **options}) as recorder:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = tiny.loss(tiny.model)
            torch.autograd.backward(loss)
            optimizer.step()
    assert not recorder.dropped
    return written(recorder)


def healthy(tiny: Tiny, steps: int, *, autocast: bool = True) -> attn_diag.Monitor:
    """The monitor of a short training, which raises no alarm."""
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-3)
    with attn_diag.Monitor(tiny.model, every=2, sequences=2) as monitor:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = tiny.loss(tiny.model)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.metrics(wait=True)["attn/nonfinite_rate/max"] == 0
    assert not monitor.alarms
    return monitor


def only(recorder: Recorder) -> attn_diag.Capture:
    """The one capture that it wrote, of the one call that it saw."""
    assert not recorder.dropped
    (capture,) = written(recorder)
    return capture


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
