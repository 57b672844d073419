"""The arms of the experiment: which attention a run trains with. All else, weights and data too, is the same.

``arm("A")`` is one of ``ARMS``; ``arm("A+fp32-scores")`` is that one with what `attn-diag what-if` calls "fp32-scores".

The kernel of the failures, as far as its output shows it (the stored capture failing_step500_L2H7: O agrees bit for
bit in more than 99.9 % of elements with the preset "bf16-forward"), takes all keys at once: one maximum, one row sum
and one P_bar V per row, each rounded once. Its backward is FlashAttention-2's: fp32 scores, delta from the rounded O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_diag import attention
from attn_diag.analyses.mitigation.mitigations import plans
from attn_diag.kernels.recipe import BACKWARD, Recipe, SoftmaxRule, preset

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
    if base.forward is None:
        raise KeyError(f"arm {key} has no recipe to change; {name!r} cannot be made")
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
    """An arm's forward and backward as one recipe, which is what a diagnosis asks for."""
    assert base.forward is not None
    return replace(base.forward, **{site: getattr(base.backward, site) for site in BACKWARD})
