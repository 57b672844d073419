"""A finite O of inputs that hold NaN, which is not made of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attn_diag.head.measurement import HeadMeasurement
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.wording import plural

_CAUSES = (
    "which no attention in floating point makes of these inputs: q, k or v were written into after O was made (by a "
    "kernel that writes into its inputs or outside its buffers, or because their memory was freed too early), a mask "
    "that hides these keys is not stated, or the kernel loses NaN (as integers do)."
)


def with_finite_rows(found: Sequence[QuantityVerdict], parts: Sequence[HeadMeasurement]) -> list[QuantityVerdict]:
    """The head's verdicts, O wrong where rows of it are finite that NaN would be in any attention on these inputs.

    A NaN in q, or in k of one key that is seen, makes the row sum NaN and with it all of O's row; one in v its feature,
    as an Inf in v does whatever its weight (0 times Inf is NaN). Torch's five kernels for a GPU do so in 396 of 396.

    Args:
        found: Those of one head of a capture.
        parts: Its sequences.
    """
    if not (rows := sum(part.finite_beside_nan for part in parts)):
        return list(found)
    words = f"O is finite in {plural(rows, 'row')} whose own q, or a key that it sees, holds NaN (or v Inf), {_CAUSES}"
    own = next((v for v in found if v.quantity == "o"), QuantityVerdict("o", "good", ""))
    if own.answer in ("wrong", "nonfinite"):
        told = replace(own, words=f"{own.words} {words}")
    else:
        told = replace(own, answer="wrong", words=words, patterns=())
    return [told, *(v for v in found if v.quantity != "o")]
