"""Which quantities of a head were asked about, and why the others were not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from attn_diag.analyses.verdicts.quality import CAPTURED, batch_items
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.results.quality import NO_GRADIENT, Quantity, QuantityVerdict
from attn_diag.results.wording import SYMBOLS

_GRADIENTS: tuple[Quantity, ...] = ("dq", "dk", "dv", "dkv")
_NO_KEY = "rows to which the mask leaves no key have a gradient"


def of_heads(
    found: dict[int, list[QuantityVerdict]], measured: Mapping[int, Sequence[HeadMeasurement]]
) -> tuple[dict[int, list[QuantityVerdict]], bool]:
    """What was asked of heads, and whether no gradient comes to any: dO is zero, of which every backward makes zeros.

    Args:
        found: Of each head its quantities.
        measured: Of each head its sequences.
    """
    made = [q for quantities in found.values() for q in quantities if q.quantity in _GRADIENTS]
    with_do = [p.with_gradient for parts in measured.values() for p in parts]
    none = bool(with_do) and all(rows is not None and not rows.any() for rows in with_do)
    if not none or not all(q.answer == "good" and q.relative_error is None for q in made):
        return found, False
    return {head: [q for q in own if q.quantity not in _GRADIENTS] for head, own in found.items()}, True


def not_judged(
    judged: Collection[str],
    *,
    captured: Collection[str],
    with_do: bool,
    idle: bool = False,
    covered: bool = True,
    of_a_rank: bool = False,
    absorbed: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> tuple[str, ...]:
    """The quantities of ``CAPTURED`` that are not among ``judged``, or not in each sequence, with the reason.

    Args:
        judged: Names of quantities.
        captured: Those that the observation holds.
        with_do: Whether dO was captured.
        idle: Whether it is zero everywhere.
        covered: Whether there is a published recipe for the inputs' format.
        of_a_rank: Whether dK and dV are those of one rank's keys, summed over rows that other ranks have.
        absorbed: Of outputs the batch items in which rows without keys make an unknown part; see ``captures.absorbed``.
    """
    # A gradient of both uses of one latent stands in for dK and dV, and is missed by nobody.
    spared = ("dk", "dv") if "dkv" in captured else ("dkv",)
    missing = [n for n in CAPTURED if n not in judged and (n not in spared or n in captured)]

    def why(name: str) -> str:
        if name not in ("o", "lse") and not with_do:
            return "no dO"
        if idle and name in _GRADIENTS and name in captured:
            return NO_GRADIENT
        if name in ("dk", "dv") and of_a_rank:
            return "summed over the rows of other ranks: give their files too"
        if name in absorbed:
            return _NO_KEY
        if name not in captured:
            return "not captured"
        return "not compared" if covered else "no well-rounded kernel of this format to compare with"

    said = [f"{SYMBOLS[name]} ({why(name)})" for name in missing]
    said += [
        f"{SYMBOLS[n]} of {batch_items(absorbed[n])} ({_NO_KEY})" for n in CAPTURED if n in judged and n in absorbed
    ]
    return tuple(said)
