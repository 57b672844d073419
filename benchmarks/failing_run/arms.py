"""The arms of the experiment: which attention a run trains with. All else, weights and data too, is the same.

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

import attn_diag
from attn_diag.kernels.recipe import Recipe, SoftmaxRule, preset

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
        # Called by their public names, where a capture or a monitor can see them.
        if self.forward is None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attn_diag.attention(
            q, k, v, causal="top-left", recipe=self.forward, backward_recipe=self.backward
        )  # fmt: skip


_BASE = preset("bf16-forward")
_A = replace(_BASE, schedule=replace(_BASE.schedule, key_tile=KEY_RANGE))
_FP32_SCORES = replace(_A, name="bf16-accumulators", scores="fp32", difference="fp32")
_FP32_ACCUMULATORS = replace(_A, name="bf16-scores-all-keys", accumulator="fp32", row_sum="fp32")


def _stabilised(beta: float) -> Recipe:
    return replace(_A, name=f"stabilised-beta{beta:g}", softmax=SoftmaxRule("stabilised", beta=beta))


ARMS = {
    "healthy": Arm("O rounded once, at the end: torch SDPA, FLASH backend"),
    "fa2": Arm("the same by the recipe's kernels: O rounded once", _FA2),
    "A": Arm("S, S-m, O_bar, l and O rounded to BF16", _A),
    "A-fp32-accumulators": Arm("as A, with O_bar and l in fp32: S, S-m and O rounded", _FP32_ACCUMULATORS),
    "A-delta-fp32": Arm("as A, with delta from O before its last rounding", _A, preset("delta-fp32")),
    "A-delta-from-dp": Arm("as A, with delta = rowsum(P o dP)", _A, preset("delta-from-dp")),
    "B": Arm("as A, with S and S-m in fp32: O_bar, l and O rounded", _FP32_SCORES),
    "B-fp32-accumulator": Arm("as B, with O_bar in fp32: l and O rounded", replace(_FP32_SCORES, accumulator="fp32")),
    "B-fp32-row-sum": Arm("as B, with l in fp32: O_bar and O rounded", replace(_FP32_SCORES, row_sum="fp32")),
    "stabilised": Arm("as A, a repeated maximum multiplied by beta = 2, l without a lower limit", _stabilised(2)),
    "stabilised-beta4": Arm("as A, a repeated maximum multiplied by beta = 4", _stabilised(4)),
    "stabilised-beta8": Arm("as A, a repeated maximum multiplied by beta = 8", _stabilised(8)),
    "qiu2025": Arm("the published code, forward and backward", preset("qiu2025"), preset("qiu2025")),
    "qiu2025-stabilised": Arm(
        "the published mitigation, forward and backward", preset("qiu2025-stabilised"), preset("qiu2025-stabilised")
    ),
}
