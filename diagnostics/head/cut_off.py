"""Kernels that multiply an fp32 P or dS: the tensor core cuts it off to TF32's 10 bits, where Triton is not told else.

q, k, v and dO of 16 bits are exact in TF32; only what a kernel makes of them is cut. P is cut under the maximum of its
own key range, so that the tile shows in O's bits, and through delta in the gradients'. A cast to FP16 that truncates
leaves the same bits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_diag.head.fp32_in_bf16 import EXPLAINED
from attn_diag.kernels import Schedule
from attn_diag.reference import FloatFormat, round_nearest_even

SITES = {
    name: f"{what} is cut off to 10 bits, as fp32 numbers in Triton's tl.dot (TF32) or by a cast to FP16 that truncates"
    for name, what in (("cut-off-probs", "P"), ("cut-off-dscores", "dS"))
}
"""In words, by name: in O and dV, in dQ and dK."""
_TILES = (16, 32, 64, 128, 2**20)
_CUT = "tf32:toward-zero"
_BACKWARD = {"backward_probs": _CUT, "dscores": _CUT}
# Whether P V takes P in fp32 too, or casts it as published kernels do; whether dS holds alpha when it is cut. With exp
# P_bar is exactly 1 at the maximum, as with exp2 of a difference: of a fused multiply-add it may lie below, and be cut.
CUT_OFF: dict[str, dict[str, Any]] = {
    f"cut-off:{part}:{tile}:{alpha}": {
        **probs, **_BACKWARD, "exp": "exact", "schedule": Schedule(key_tile=tile), "alpha_in_backward": alpha
    }
    for part, probs in (("both", {"probs": _CUT}), ("backward", {}))
    for tile in _TILES
    for alpha in ("after-product", "before-cast")
}  # fmt: skip
"""Fields of a published recipe by the name of such a kernel here."""
# A wrong way that has each of so many elements by the toss of a coin has three quarters of them in 4e-5 of all cases.
_FEWEST = 64


def ways(quantity: str, *, alpha_exact: bool) -> list[str]:
    """Names of ``CUT_OFF`` that leave different bits of a quantity; ``alpha_exact``: alpha is a power of two."""
    one_alpha = alpha_exact or quantity in ("o", "dv")
    found = [way for way in CUT_OFF if way.endswith("after-product") or not one_alpha]
    return [way for way in found if quantity in ("dq", "dk") or way.split(":")[1] == "both"]


def site(quantity: str) -> str:
    """Which of ``SITES`` a quantity shows."""
    return "cut-off-dscores" if quantity in ("dq", "dk") else "cut-off-probs"


def makes(made: Tensor, observed: Tensor, truth: Tensor, fmt: FloatFormat) -> bool:
    """Whether a way makes a tensor: it leaves a quarter at most, squared, of what the truth times any factor leaves.

    A cut makes P, and so all of a row, 0.99965 times what it was, and so does many another fault; what P's single
    elements lose beside that is the cut's own.

    Args:
        made: What the way returns, [n, D].
        observed: What a kernel returned.
        truth: What is true.
        fmt: The format in which it was stored.
    """
    factor = (observed * truth).sum() / truth.square().sum().clamp(min=1e-300)
    beside, left = observed - round_nearest_even(factor * truth, fmt), observed - made
    return int((beside != 0).sum()) >= _FEWEST and bool(left.square().sum() <= EXPLAINED * beside.square().sum())
