"""dK and dV of a key head, which several query heads make: whose they are where not all of these are at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn_diag.captures.sources import KEYED
from attn_diag.results.quality import Quantity, QuantityVerdict
from attn_diag.results.wording import SYMBOLS, runs_of, together

_AT_FAULT = ("nonfinite", "wrong", "lossy")


def with_others_faults(
    quantities: Mapping[int, Sequence[QuantityVerdict]], group: int, offset: int
) -> dict[int, list[QuantityVerdict]]:
    """Each query head's verdicts; dK and dV are stated only of one whose O and dQ are good, beside one of the same key
    head of which something is at fault.

    Args:
        quantities: By query head.
        group: How many query heads a key head has.
        offset: Of the first one in the model.
    """
    own = {head: [q for q in found if q.quantity not in KEYED] for head, found in quantities.items()}
    faults = {head: [q.quantity for q in found if q.answer in _AT_FAULT] for head, found in own.items()}

    def judged(head: int, found: QuantityVerdict) -> QuantityVerdict:
        others = [h for h in faults if h // group == head // group and faults[h]]
        good: set[Quantity] = {q.quantity for q in own[head] if q.answer == "good"}
        if faults[head] or not others or not {"o", "dq"} <= good:
            return found
        if found.quantity not in KEYED or found.answer not in _AT_FAULT:
            return found
        names = together([SYMBOLS[name] for name in dict.fromkeys(name for h in others for name in faults[h])])
        whose = f"{runs_of('head', [h + offset for h in others])}, at fault in {names}"
        words = f"{SYMBOLS[found.quantity]} is off as a sum with {whose}: O and dQ of this head are right."
        return QuantityVerdict(found.quantity, "stated", words, relative_error=found.relative_error, rows=found.rows)

    return {head: [judged(head, q) for q in found] for head, found in quantities.items()}
