"""Which heads' errors stand out at one check: more than rounding leaves in a well-rounded kernel, grown or not.

The limits are those of question 1 of a verdict (``head.quality``): an error of O, dQ, dK or dV, as one number a head,
above ``GROUP_LIMIT`` times the expected one, or that of a row above what one normal number of a thousand million
exceeds. No more is said by it: roundings may be that coarse, and a mean that was taken for granted another. What stands
out is looked at again, see ``second_looks``.
"""

from __future__ import annotations

import numpy as np

from attn_diag.head.outlying import GROUP_LIMIT, quantile
from attn_diag.watching.monitoring.record import MEASURED, LayerCheck, Values


def standing_out(layer: LayerCheck) -> dict[str, Values]:
    """Of each quantity how many times its limit the error is, [Hq]; 0 where it is not known. Above 1 it stands out."""
    found = {}
    for name in MEASURED:
        unknown = np.zeros(layer.heads)
        whole, row = (layer.values.get(f"{name}{of}_factor", unknown) for of in ("", "_row"))
        found[name] = np.nan_to_num(np.fmax(whole / GROUP_LIMIT, row / quantile(1)), posinf=np.inf)
    return found


def same_as(scores: dict[str, Values], head: int) -> Values:
    """Bool [Hq]: the head, and those that stand out at least half as far, in the quantity in which it does most."""
    name = max(MEASURED, key=lambda one: float(scores[one][head]))
    score = scores[name]
    with np.errstate(invalid="ignore"):
        found: Values = (score > 1) & (2 * score >= score[head])
    found[head] = True
    return found
