"""O, and LSE and gradients with it, of q, k or v held in a format below 16 bits: a cache in FP8, keys in INT4."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.head.low_bit_inputs import NAMES, Held, find_held, held, out_of
from attn_diag.head.low_bit_probs import CastProbs
from attn_diag.head.quality import AS_GOOD, LOSSY
from attn_diag.reference.fused import reference_of
from attn_diag.results.quality import PROBS, Pattern
from attn_diag.results.wording import number, together

_SAMPLE = 64
# O of so many rows is made at once.
_ROWS = 256
# O is compared with what is not dropped out, and of so many scores and numbers: a search makes hundreds of versions.
_MOST_SCORES, _MOST_NUMBERS = 2**27, 2**20
# The search is made on so many heads of an observation that show nothing, or what others showed; that is tried on all.
_MOST_ASKED = 3
# So much of the squared error it explains, at least: P_bar may be in 8 bits as well.
_EXPLAINED = 0.5
# More ways that cannot be told apart are said by their formats alone.
_FEW = 2


class HeldOperands:
    """What heads of one capture show, by observation."""

    def __init__(self) -> None:
        self._found, self._asked = defaultdict[str, list[list[Held]]](list), Counter[str]()
        self._told = dict[tuple[str, int, int, str], Pattern | None]()

    def pattern(
        self, observation: str, batch: int, head: int, evidence: Callable[[], Evidence], quantity: str, factor: float,
        of_all: Callable[[], Mapping[str, float]],
    ) -> Pattern | None:  # fmt: skip
        """What O was made of, or of LSE or a gradient what O shows; None where nothing shows.

        Args:
            observation, batch, head: Whose.
            evidence: O, LSE or a gradient that is lossy, or wrong.
            quantity: Which.
            factor: Its error over a well-rounded kernel's.
            of_all: As of ``find_held``.
        """
        key = observation, batch, head, quantity
        if key not in self._told:
            self._told[key] = self._pattern(observation, evidence(), factor, of_all)
        return self._told[key]

    def known(self, observation: str, evidence: Evidence, factor: float) -> Pattern | None:
        """What other quantities or heads showed, where it leaves no more than a well-rounded kernel; None: nothing."""
        if not self._found[observation]:
            return None
        found = [one for alike in self._found[observation] if (one := _told(evidence, alike, factor)) is not None]
        return min((one for one in found if _remaining(one) <= AS_GOOD), key=_remaining, default=None)

    def _pattern(
        self, observation: str, evidence: Evidence, factor: float, of_all: Callable[[], Mapping[str, float]]
    ) -> Pattern | None:
        head = evidence.heads[0]
        large = len(head.q) * len(head.k) > _MOST_SCORES or max(head.k.numel(), head.q.numel()) > _MOST_NUMBERS
        if large or any(one.dropout is not None for one in evidence.heads):
            return None
        known, asked = self._found[observation], self._asked[observation]
        found = [pattern for alike in known if (pattern := _told(evidence, alike, factor)) is not None]
        best = min(found, key=_remaining, default=None)
        if evidence.quantity != "o" or asked >= _MOST_ASKED or (best is not None and _remaining(best) <= LOSSY):
            return best
        rows = evidence.usable.nonzero()[:, 0]
        rows = rows[torch.linspace(0, len(rows) - 1, min(_SAMPLE, len(rows)), device=rows.device).long()]
        noise = float(evidence.error[rows].square().sum()) * (LOSSY / factor) ** 2
        alike = find_held(
            head, evidence.observed[rows], rows, evidence.dimensions(rows), noise,
            widened=evidence.fmt.name if evidence.fmt.name in ("bf16", "fp16") else "fp32",
            any_scale=not asked or bool(known), of_all=of_all(),
        )  # fmt: skip
        own = _told(evidence, alike, factor) if alike else None
        if own is None or _formats(alike) in map(_formats, known):
            self._asked[observation] += 1
        if own is None:
            return best
        known.append(alike)
        return min([*found, own], key=_remaining)


def _remaining(pattern: Pattern) -> float:
    return pattern.remaining or 0.0


def _formats(alike: Sequence[Held]) -> str:
    return _in_words(alike[0], scales=False)


def _told(evidence: Evidence, alike: Sequence[Held], factor: float) -> Pattern | None:
    """The pattern, where these formats explain the quantity; V is not in LSE."""
    unseen = {"o": (), "lse": ("v", PROBS)}.get(evidence.quantity, (PROBS,))
    alike = [{name: one for name, one in formats.items() if name not in unseen} for formats in alike]
    rows = evidence.usable.nonzero()[:, 0]
    left = float((evidence.observed - _made(evidence, alike[0]))[rows].square().sum())
    explained = 1 - left / max(float(evidence.error[rows].square().sum()), 1e-300)
    if not explained >= _EXPLAINED:
        return None
    remaining = factor * math.sqrt(1 - explained)
    given = f"what {held_words(alike)} {'give' if len(alike[0]) > 1 else 'gives'}"
    words = f"all {evidence.unit} are {given}, and but for that as good as a well-rounded kernel's"
    if remaining > AS_GOOD:
        words = (
            f"all {evidence.unit} are near {given}, {number(remaining)} times a well-rounded kernel's error off that"
        )
    formats = {name: one.format for name, one in alike[0].items()}
    return Pattern("operands", words, explained, remaining, formats=formats)


def _made(evidence: Evidence, formats: Held) -> Tensor:
    """The quantity that heads give whose q, k and v were held so."""
    if PROBS in formats and evidence.quantity == "o":
        head = replace(evidence.heads[0], do=None)
        rows = torch.arange(len(head.q), device=head.q.device)
        return torch.cat([out_of(head, rows[i : i + _ROWS], formats) for i in range(0, len(rows), _ROWS)])
    found = [getattr(reference_of(held(one, formats)), _FIELDS[evidence.quantity]) for one in evidence.heads]
    return torch.stack(found).sum(0).reshape(evidence.observed.shape)


_FIELDS = {"o": "out", "lse": "lse", "dq": "dq", "dk": "dk", "dv": "dv"}


def held_words(alike: Sequence[Held]) -> str:
    """ "k and v held in FP8 (E4M3, scale 1)"."""
    every = list(dict.fromkeys(_in_words(one, scales=True) for one in alike))
    if len(every) > _FEW:
        every = list(dict.fromkeys(_in_words(one, scales=False) for one in alike))
    return " or ".join(every)


def _in_words(formats: Held, *, scales: bool) -> str:
    by_words = defaultdict[str, list[str]](list)
    cast = list[str]()
    for name in sorted(formats, key=(*NAMES, PROBS).index):
        one = formats[name]
        words = one.words if scales else one.format
        if isinstance(one, CastProbs):
            cast = [f"{one.symbol} cast to {words}"]
        else:
            by_words[words].append(name)
    return together([*(f"{together(names)} held in {words}" for words, names in by_words.items()), *cast])
