"""Which quantiser made these values: the declared one, those that differ from it in one thing or two, or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from torch import Tensor

from attn_diag.kernels.elements import Integers
from attn_diag.kernels.formats import Mode
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import PRESETS, Arithmetic, Quantizer, name_changed, quantizer, scale_rounding
from attn_diag.results.quant import QuantizerMatch
from attn_diag.results.wording import between
from attn_diag.testing.quantizing.blocks import only_ties
from attn_diag.testing.quantizing.changes import ARITHMETICS, EXTREME, blocks_of, changes
from attn_diag.testing.quantizing.own_format import CASTS, computed_in, orders
from attn_diag.testing.quantizing.possible import (
    DECLARED,
    SAME,
    PossibleQuantizer,
    is_drawn,
    looks_drawn,
    share_of,
)
from attn_diag.testing.quantizing.scales import read_scales, readable
from attn_diag.work import Progress, part_of, silent

# Rows of w on which quantisers are tried whose blocks lie within a row.
_ROWS = 128
_PAIRS_OF = 4
# Ties may be so many of the values: of weights in BF16 one in fifty, not more.
_TIED = 0.98
_KEPT = 4
# Of so many sets of candidates at most, one after the other.
_ATTEMPTS = 6
# Of so many blocks a scale may have the other sign: where the largest number is as far from 0 as the smallest.
_TURNED = 0.1
# Blocks whose scales are read off the values, where no rule gives them.
_OWN_BLOCKS = ("tensor", "row", "128", "64", "32")


def identify(
    w: Tensor, observed: Tensor, declared: Quantizer | None, progress: Progress = silent, *, amax: Tensor | None = None
) -> tuple[list[QuantizerMatch], PossibleQuantizer | None]:
    """The declared quantiser and those that come nearest, best first, and the one that made the values, if one did.

    Args:
        w: The weight, [R, C].
        observed: What became of it, of its shape.
        declared: The quantiser that should have done it; None: any preset may have.
        progress: Called with (done, total) after each candidate.
        amax: What the declared one's scales are made of, for each block; None: w's own.
    """
    starts = _presets() if declared is None else _as_declared(declared, w, amax)
    tried: dict[str, tuple[float, PossibleQuantizer]] = {}
    attempts = count()

    def attempt(candidates: Sequence[PossibleQuantizer]) -> float:
        listen = part_of(progress, next(attempts), _ATTEMPTS) or silent
        for number, candidate in enumerate(candidates):
            listen(number, len(candidates))
            if candidate.words not in tried:
                rows = slice(None) if _looks_beyond_rows(candidate) else slice(_ROWS)
                share = share_of(candidate, w[rows], observed[rows])
                if share >= SAME and rows.stop is not None and len(w) > _ROWS:
                    share = share_of(candidate, w, observed)
                if is_drawn(candidate) and candidate not in starts:
                    # Whatever else lies on this grid fits it too.
                    share = min(share, SAME) if looks_drawn(candidate, w[rows], observed[rows]) else 0.0
                tried[candidate.words] = share, candidate
        return max((share for share, _ in tried.values()), default=0.0)

    def best(most: int) -> list[PossibleQuantizer]:
        return [c for _, c in sorted(tried.values(), key=lambda found: -found[0])[:most]]

    def tied() -> PossibleQuantizer | None:
        """The best one so far, if ties alone keep it from having made the values."""
        share, one = max(tried.values(), key=lambda found: found[0])
        return one if _TIED <= share < SAME and only_ties(one, w, observed) else None

    found = attempt(starts)
    by_ties = tied()
    if found < 1 and by_ties is None:
        bases, meant = best(_PAIRS_OF if declared is None else 1), list[PossibleQuantizer]()
        if declared is not None:
            # A fault hides which order of computing in 16 bits is the program's.
            bases += [one for one in starts if one.own_format and one not in bases]
            # Of as many bits, as somebody may have meant it.
            alike = _as_many_bits(declared.elements.partition(":")[0])
            meant = [c for c in _presets(declared.block) if c.by.elements.partition(":")[0] in alike]
            bases += [] if amax is None else [PossibleQuantizer(declared, "scales of the weight's own amax")]
            attempt([one for one in bases if one.words not in tried])
            attempt(meant)
        found = attempt([c for base in bases for c in changes(base, w, observed)])
        by_ties = tied()
        if found < SAME and by_ties is None:
            signed = [tried[EXTREME][1]] if EXTREME in tried else []  # beside it scales may be in 16 bits
            again = {c.words: c for c in (*best(_PAIRS_OF), *meant, *signed)}
            wider = attempt([c for base in again.values() for c in changes(base, w, observed, alone=False)])
            by_ties = tied()
            if wider < SAME and by_ties is None:
                attempt(list(_of_own_scales([*starts[:1], *bases, *meant], w, observed)))
    # Of those that made the values, before one whose number was made to fit them one that needs none.
    order = sorted(tried.values(), key=lambda found: (found[0] < SAME, found[0] >= SAME and found[1].fitted, -found[0]))
    share, winner = order[0]
    shown = [one for one in order if one[0] >= SAME or not one[1].at_fault][:_KEPT]
    if declared is not None:
        own = max((tried[c.words] for c in starts), key=lambda found: found[0])
        if own[0] >= SAME and (share < 1 or only_ties(own[1], w, observed)):
            winner = own[1]  # nothing else explains the rest, or ties do
        if own not in shown:
            shown = [*shown[: _KEPT - 1], own]
    matches = [QuantizerMatch(c.by.name, c.words, part) for part, c in shown]
    return matches, winner if share >= SAME else by_ties


def _of_own_scales(bases: Sequence[PossibleQuantizer], w: Tensor, observed: Tensor) -> Iterator[PossibleQuantizer]:
    """The first grid, the coarsest blocks before, on which each block's values lie at some scale of its own."""
    known = set[tuple[str, str, str, bool]]()
    for base in (one for one in bases if not one.by.tensor_scale):
        plain = "mean" if base.by.scale_of == "mean" else "amax"
        kinds = [(block, plain) for block in dict.fromkeys((*_OWN_BLOCKS, base.by.block))]
        if base.by.symmetric and isinstance(base.by.parsed_elements, Integers):
            kinds.append((base.by.block, "extreme"))
        for block, of in kinds:
            narrow = base.by.narrow and of != "extreme"
            fields: dict[str, Any] = {"block": block, "scale_of": of, "narrow": narrow, "target": None}
            by = replace(base.by, arithmetic="exact", scale="fp32", **fields)
            if not readable(by) or (found := (by.elements, block, of, narrow)) in known:
                continue
            known.add(found)
            rows = slice(None) if _looks_beyond_rows(PossibleQuantizer(by, "")) else slice(_ROWS)
            if of == "extreme" and _fitting(replace(by, scale_of="amax"), w[rows], observed[rows]):
                continue  # no sign is needed
            if one := _fitting(by, w[rows], observed[rows]):
                yield _named(base, one, w, observed)
                return


def _fitting(by: Quantizer, w: Tensor, observed: Tensor) -> PossibleQuantizer | None:
    """With the scales that are read off the values, if these are its own then."""
    scale = read_scales(w, observed, by)
    if float((scale * quantize(w.double(), by).scale < 0).double().mean()) > _TURNED:
        return None
    return next((one for one in _in_any_format(by, w, scale) if share_of(one, w, observed) >= SAME), None)


def _in_any_format(by: Quantizer, w: Tensor, scale: Tensor) -> Iterator[PossibleQuantizer]:
    """With these scales, and with such in w's 16-bit format, in which the rest is computed too."""
    yield PossibleQuantizer(by, "", amax=scale * by.mapped)
    if own := computed_in(w, by):
        stored, kept = scale.to(CASTS[own]).double() * by.mapped, replace(by, scale=own)
        for order, rest in orders(by).items():
            yield PossibleQuantizer(kept, f", in {own} arithmetic{rest}", amax=stored, own_format=order)


def _named(base: PossibleQuantizer, found: PossibleQuantizer, w: Tensor, observed: Tensor) -> PossibleQuantizer:
    """With how far its scales are from the data's amax."""
    by = replace(found.by, scale="fp32")
    scale = read_scales(w, observed, by)
    whole = next(one for one in _in_any_format(by, w, scale) if one.words == found.words)
    same_of, changed = base.by.scale_of == by.scale_of, dict[str, str]()
    own = quantize(w.double(), replace(by, target=base.by.target if same_of else None)).scale.double()
    part = (scale / own)[own != 0].abs()
    off = between(f"{float(part.min()):.3g}", f"{float(part.max()):.3g}")
    words = f"scales that are {off} times those of the weight's own amax"
    if base.by.block != by.block:
        words = f"blocks of {by.block} and {words}" if by.block.isdigit() else f"a scale for each {by.block}, {words}"
        changed["block"] = by.block
    if not same_of:
        words, changed = f"{EXTREME}, {words}", changed | {"scale_of": by.scale_of}
    name = name_changed(base.by.name, changed)
    return replace(whole, by=replace(whole.by, name=name), words=words + found.words)


def _as_declared(by: Quantizer, w: Tensor, amax: Tensor | None) -> list[PossibleQuantizer]:
    """In any arithmetic, with any rule for ties: that is no other quantiser."""
    own = computed_in(w, by)
    others = [(a, words) for a, words in ARITHMETICS.items() if a != by.arithmetic]
    in_own = own != "" and (own == by.scale or (amax is not None and _are_in(own, by, amax)))
    return [
        PossibleQuantizer(by, DECLARED, amax=amax),
        *(PossibleQuantizer(replace(by, arithmetic=a), f"{DECLARED}, {words}", amax=amax) for a, words in others),
        *(
            PossibleQuantizer(replace(by, arithmetic=a, ties=ties), f"{DECLARED}, {words}", amax=amax)
            for a, ties, words in _other_ties(by)
        ),
        *(
            PossibleQuantizer(
                replace(by, scale=own), f"{DECLARED}, in {own} arithmetic{rest}", amax=amax, own_format=order
            )
            for order, rest in (orders(by).items() if in_own else ())
        ),
    ]


def _are_in(own: str, by: Quantizer, amax: Tensor) -> bool:
    """Whether scales that are made of ``amax`` are numbers of this 16-bit format, so that it may have computed them."""
    scale = amax.double() / by.mapped
    return by.scale == "fp32" and bool(((scale.to(CASTS[own]) / scale - 1).abs().nan_to_num() <= 2.0**-20).all())


def _other_ties(by: Quantizer) -> Iterator[tuple[Arithmetic, Literal["even", "away"], str]]:
    """The other rule for integers halfway between two, in arithmetic that makes such."""
    elements = by.parsed_elements
    if isinstance(elements, Integers) and elements.mode is Mode.NEAREST_EVEN:
        other: Literal["even", "away"] = "even" if by.ties == "away" else "away"
        words = "to even" if other == "even" else "away from zero"
        for a in dict.fromkeys((by.arithmetic, "fp32")):
            yield a, other, f"{'in fp32 arithmetic ' if a != by.arithmetic else ''}with ties rounded {words}"


def _as_many_bits(elements: str) -> set[str]:
    """The elements that somebody may have meant by these; of four bits also bitsandbytes' types."""
    four = {"int4", "e2m1", "nf4", "bnb-fp4"}
    return {elements} | (four - {"int4", "e2m1"} if elements in four else set())


def _presets(block: str = "") -> list[PossibleQuantizer]:
    """All, and those with blocks of their own also with these."""
    found = [PossibleQuantizer(by, f"the rules of {name}") for name, by in PRESETS.items()]
    for by in PRESETS.values() if block else ():
        if by.block != block and scale_rounding(by.scale) is None and not by.tensor_scale:
            other = quantizer(by, block=block)
            found.append(PossibleQuantizer(other, f"the rules of {by.name}, {blocks_of(block)}"))
    return found


def _looks_beyond_rows(candidate: PossibleQuantizer) -> bool:
    by = candidate.by
    wide = candidate.mistake is not None and candidate.mistake.beyond_rows
    return wide or by.tensor_scale or by.block in ("tensor", "column") or "x" in by.block
