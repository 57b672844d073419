"""What is trained: the arms, that is which attention a run trains with, and the model around it, alike in all arms.

``arm("A")`` is one of ``ARMS``; ``arm("A+fp32-scores")`` is that one with what `attn-diag what-if` calls "fp32-scores".

The kernel of the failures, as far as its output shows it (the stored capture failing_step500_L2H7: O agrees bit for
bit in more than 99.9 % of elements with the preset "bf16-forward"), takes all keys at once: one maximum, one row sum
and one P_bar V per row, each rounded once. Its backward is FlashAttention-2's: fp32 scores, delta from the rounded O.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_diag import attention
from attn_diag.analyses.mitigation.mitigations import plans
from attn_diag.kernels import preset
from attn_diag.kernels.recipe import BACKWARD, Recipe, SoftmaxRule

# Keys of one range: l and O_bar are rounded after each. 2**20 is all of them at once, as the failing kernel did; 512 is
# the published code of Qiu & Yao (arXiv 2510.04212), 128 a FlashAttention-2 tile.
KEY_RANGE = 2**20

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

_FA2 = preset("fa2")


@dataclass(frozen=True)
class Arm:
    """Causal attention with the named roundings. ``forward`` None: torch SDPA's FLASH backend, both ways."""

    words: str
    forward: Recipe | None = None
    backward: Recipe = _FA2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [B, H, T, D] -> O [B, H, T, D]."""
        # Both by the names that a capture or a monitor puts itself in place of.
        if self.forward is None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attention(q, k, v, causal="top-left", recipe=self.forward, backward_recipe=self.backward)


_BASE = preset("bf16-forward")
_A = replace(_BASE, schedule=replace(_BASE.schedule, key_tile=KEY_RANGE))
_FP32_SCORES = replace(_A, name="bf16-accumulators", scores="fp32", difference="fp32")
_STABILISED = replace(_A, name="stabilised-beta2", softmax=SoftmaxRule("stabilised", beta=2.0))

ARMS = {
    "healthy": Arm("O rounded once, at the end: torch SDPA, FLASH backend"),
    "fa2": Arm("the same by the recipe's kernels: O rounded once", _FA2),
    "A": Arm("S, S-m, O_bar, l and O rounded to BF16", _A),
    "B": Arm("as A, with S and S-m in fp32: O_bar, l and O rounded", _FP32_SCORES),
    "B-fp32-accumulator": Arm("as B, with O_bar in fp32: l and O rounded", replace(_FP32_SCORES, accumulator="fp32")),
    "B-fp32-row-sum": Arm("as B, with l in fp32: O_bar and O rounded", replace(_FP32_SCORES, row_sum="fp32")),
    "stabilised": Arm("as A, a repeated maximum multiplied by beta = 2, l without a lower limit", _STABILISED),
    "qiu2025": Arm("the published code, forward and backward", preset("qiu2025"), preset("qiu2025")),
    "qiu2025-stabilised": Arm(
        "the published mitigation, forward and backward", preset("qiu2025-stabilised"), preset("qiu2025-stabilised")
    ),
}


def arm(name: str) -> Arm:
    """The arm of that name: a key of ``ARMS``, or "KEY+MITIGATION". KeyError names what there is."""
    key, _, mitigation = name.partition("+")
    if key not in ARMS:
        raise KeyError(f"no arm {key!r}; there are {', '.join(ARMS)}")
    base = ARMS[key]
    if not mitigation:
        return base
    recipe = whole(base)
    # What a scaled score of 1 is among the stored ones, in heads of 64 features.
    unit = 8.0 if recipe.alpha == "in-exponent" else 1.0
    found = {plan.name: plan for plan in plans(recipe, head_dim=64, keys=1024, score_unit=unit)}
    if mitigation not in found:
        raise KeyError(f"no mitigation {mitigation!r} of {key}; there are {', '.join(found)}")
    changed = found[mitigation].recipes[0]
    words = f"{base.words}; {found[mitigation].description}"
    return Arm(words, changed, changed)


def whole(base: Arm) -> Recipe:
    """An arm's forward and backward as one recipe, which is what a diagnosis asks for. KeyError where it has none."""
    if base.forward is None:
        raise KeyError(f"no recipe: {base.words}")
    return replace(base.forward, **{site: getattr(base.backward, site) for site in BACKWARD})


# What stands between the attentions, as functions of tensors: compiled, one graph serves all blocks, and the modules,
# on which captures and monitors put their hooks, stay as they are.


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """Layer norm of x [B, T, C], rounded to BF16 as the product that follows would have it."""
    return functional.layer_norm(x, weight.shape, weight).bfloat16()


def feed_forward(x: Tensor, attended: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Both residual additions of a block and the layers between them; x, attended [B, T, C]."""
    x = x + attended
    hidden = functional.linear(functional.layer_norm(x, norm.shape, norm), up)
    return x + functional.linear(functional.gelu(hidden), down)


def loss_of(x: Tensor, norm: Tensor, vocabulary: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats; x [B, T, C], vocabulary [V, C], targets int64 [B, T]."""
    logits = functional.linear(functional.layer_norm(x, norm.shape, norm), vocabulary)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        out: Tensor = self.c_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """The weights that ``feed_forward`` computes with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=False)
        self.attn = Attention(width, heads, attend)
        self.ln_2 = nn.LayerNorm(width, bias=False)
        self.mlp = FeedForward(width)
        self.normed, self.feed_forward = normed, feed_forward

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attn(self.normed(x, self.ln_1.weight))
        return self.feed_forward(x, attended, self.ln_2.weight, self.mlp.c_fc.weight, self.mlp.c_proj.weight)


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, attend: Attend) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads, attend) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> [B, T, C], before the last norm."""
        x: Tensor = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return x


class GPT(nn.Module):
    """GPT-2 without biases and dropout; names and initialisation as in nanoGPT."""

    loss_of: Callable[..., Tensor]

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, attend: Attend) -> None:
        super().__init__()
        self.transformer = Transformer(vocabulary, context, layers, heads, width, attend)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.loss_of = loss_of
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # Each of the 2 * layers residual branches adds its variance to the stream.
                shrink = math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(weight, std=0.02 / shrink)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of ``targets`` [B, T] after ``tokens`` [B, T], both int64."""
        return self.loss_of(self.transformer(tokens), self.transformer.ln_f.weight, self.lm_head.weight, targets)

    def compile_all_but_attention(self) -> None:
        """Have torch.compile fuse what stands between the attentions."""
        self.loss_of = torch.compile(loss_of, dynamic=False)
        fused = {f.__name__: torch.compile(f, dynamic=False) for f in (normed, feed_forward)}
        for block in self.modules():
            if isinstance(block, Block):
                block.normed, block.feed_forward = fused["normed"], fused["feed_forward"]
