"""What the hops of a ring and their merges add to the errors of O, dQ, dK and dV, from captures that hold the hops.

    O  - O_true  = [O - merge of the hops' O, L]  +  [that merge - O_true]
    dQ - dQ_true = [dQ - sum of the hops' dQ]  +  [that sum - dQ of the captured O, L]  +  [that - dQ_true]
                    how they are put together      each hop's own rounding                 what came from the forward

all in float64; dK and dV as dQ, where the captures of all ranks are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.hops import OfHead, Put, PutTogether, RankHops
from attn_diag.analyses.mismatch.merges import EXACT, OTHER, HopPart, SharedBits, Way, sums_of
from attn_diag.captures.capture import Capture
from attn_diag.head.quality import LOSSY
from attn_diag.results.mismatch import CauseKind, MismatchCause, MismatchLabel, RingMerge, RunName
from attn_diag.results.wording import SYMBOLS, listed, percent, plural, times

# Enough to tell: key heads of all sequences, with all their query heads.
_HEADS = 2
# A hop is off where it is so many times as far off as rounding at every site leaves it, and as the others are.
_HOP_OFF = 2.0
# Of what is put together in fp32 to fp32, by whatever formula, nothing is said.
_FP32 = 16 * 2.0**-24
# Without a yardstick (fp32) what is no rounding's.
_WRONG = 1e-3
_OUTPUTS = ("o", "dq", "dk", "dv")
# Causes that are found without the hops.
_GUESSED = ("coarse", "merge", "unnamed-o")


def ring_merges(captures: Iterable[Capture], run: RunName, device: torch.device) -> list[RingMerge]:
    """Every merge of every rank's hops.

    Args:
        captures: A run's, as the ranks wrote them; those without hops are passed over.
        run: Which run it is.
        device: Where float64 is computed.
    """
    calls: dict[object, list[RankHops]] = {}
    for capture in captures:
        if (rank := RankHops.of(capture, device)) is not None:
            calls.setdefault(rank.call, []).append(rank)
    found: list[RingMerge] = []
    for ranks in calls.values():
        found += _of_call(sorted(ranks, key=lambda one: one.rank), run)
    return found


def _of_call(ranks: Sequence[RankHops], run: RunName) -> Iterator[RingMerge]:
    found: dict[tuple[int, str], _Sums] = {}
    whole = len(ranks) == ranks[0].sharing
    for item, key_head in ranks[0].some_heads(_HEADS):
        of_keys: dict[tuple[int, str], _KeySum] = {}
        for rank in ranks:
            heads = [rank.head(item, head) for head in rank.query_heads(key_head)]
            for head in heads:
                for name in rank.row_outputs:
                    found.setdefault((rank.rank, name), _Sums(name)).add(*head.put_together(name))
            for name in rank.key_outputs if whole else ():
                for number, (source, _) in enumerate(rank.hops):
                    sums = of_keys.setdefault((source, name), _KeySum())
                    sums.add(rank, heads, number, name, item, key_head)
        by_rank = {rank.rank: rank for rank in ranks}
        for (source, name), added in of_keys.items():
            found.setdefault((source, name), _Sums(name)).add(
                *added.put_together(by_rank[source], name, item, key_head)
            )
    for of_rank, name in sorted(found, key=lambda one: (_OUTPUTS.index(one[1]), one[0])):
        yield found[of_rank, name].result(run, ranks[0].layer, of_rank)


@dataclass
class _KeySum:
    """What all ranks add to dK or dV of one rank's keys."""

    parts: list[tuple[int, HopPart]] = field(default_factory=list)
    fed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    truth: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def add(self, rank: RankHops, heads: Sequence[OfHead], number: int, name: str, item: int, key_head: int) -> None:
        values = rank.tensor(number, name, item, key_head)
        rows = torch.arange(len(values), device=values.device)
        found = [head.of_keys(number, name) for head in heads]
        fed, truth = (torch.stack(those).sum(0) for those in ([f for f, _, _ in found], [t for _, t, _ in found]))
        self.parts.append((number, HopPart(rows, values, dtype=rank.dtype(number, name))))
        self.fed.append((rows, fed))
        self.truth.append((rows, truth))
        self.noise.append(sum(one[2] for one in found))
        self.sources.append(rank.rank)

    def put_together(self, owner: RankHops, name: str, item: int, key_head: int) -> Put:
        order = sorted(range(len(self.parts)), key=lambda i: self.parts[i][0])
        parts = [self.parts[i][1] for i in order]
        result, out = owner.own(name, item, key_head)
        fed, truth, merged = (torch.zeros_like(result, dtype=torch.float64) for _ in range(3))
        for rows, one in self.fed:
            fed[rows] += one
        for rows, one in self.truth:
            truth[rows] += one
        for part in parts:
            merged[part.rows] += part.values.double()
        errors = [float((self.parts[i][1].values.double() - self.fed[i][1]).square().sum()) for i in order]
        sizes = [float(self.fed[i][1].square().sum()) for i in order]
        noise, sources = [self.noise[i] for i in order], [self.sources[i] for i in order]
        put = PutTogether(result.double(), truth, merged, fed, errors, noise, sizes, sources)
        return put, parts, list(sums_of(parts, len(result), out)), out


@dataclass
class _Sums:
    """Sums over heads."""

    name: str
    squares: dict[str, float] = field(default_factory=dict)
    hops: list[list[float]] = field(default_factory=list)
    sources: Sequence[int] = ()
    agreement: SharedBits = field(default_factory=SharedBits)

    def add(self, found: PutTogether, parts: Sequence[HopPart], ways: list[Way], out: torch.dtype) -> None:
        plain = next(way.result for way in ways if way.kind == EXACT).double()
        for name, of in (
            ("truth", found.truth),
            ("error", found.result - found.truth),
            ("merge", found.result - found.merged),
            ("plain", plain - found.merged),
            ("hops", found.merged - found.fed),
            ("forward", found.fed - found.truth),
        ):
            self.squares[name] = self.squares.get(name, 0.0) + float(of.square().sum())
        lists = zip(found.errors, found.noise, found.sizes, strict=True)
        new = [list(one) for one in lists]
        self.hops = [[a + b for a, b in zip(*two, strict=True)] for two in zip(self.hops or new, new, strict=True)]
        self.sources = found.sources
        self.agreement.add(found.result.float(), ways, parts, out)

    def result(self, run: RunName, layer: int, rank: int) -> RingMerge:
        size = self.squares["truth"] or 1.0
        relative = {name: math.sqrt(square / size) for name, square in self.squares.items()}
        plain = self.squares["plain"]
        factors = [math.sqrt(error / noise) if noise else None for error, noise, _ in self.hops]
        off = [math.sqrt(error / of) if of else 0.0 for error, _, of in self.hops]
        worst = max(range(len(off)), key=lambda i: off[i] if factors[i] is None else factors[i] or 0.0)
        factor = factors[worst]
        # What all hops are is the kernel's, and no hop's.
        others = [one for i, one in enumerate(off if factor is None else [f or 0.0 for f in factors]) if i != worst]
        usual = max(_WRONG if factor is None else _HOP_OFF, _HOP_OFF * median(others)) if others else math.inf
        bad = (off[worst] if factor is None else factor) > usual
        return RingMerge(
            run=run, layer=layer, rank=rank, output=self.name, hops=len(self.hops), error=relative["error"],  # type: ignore[arg-type]
            from_merge=relative["merge"], from_hops=relative["hops"],
            from_forward=None if self.name == "o" else relative["forward"],
            merge_factor=math.sqrt(self.squares["merge"] / plain) if plain else None,
            way=self.agreement.words, agreement=self.agreement.share, worst_hop=worst,
            worst_hop_rank=self.sources[worst], worst_hop_error=off[worst], worst_hop_factor=factor, hop_is_off=bad,
        )  # fmt: skip


def with_rings(causes: Sequence[MismatchCause], merges: Sequence[RingMerge]) -> list[MismatchCause]:
    """All causes by layer; what the hops show of a run's O stands for what was guessed of it without them."""
    groups: dict[tuple[int, RunName, str], list[RingMerge]] = {}
    for one in merges:
        groups.setdefault((one.layer, one.run, one.output), []).append(one)
    found = {key: [*_off_hops(ranks), *_coarse_merges(ranks)] for key, ranks in groups.items()}
    shown = {(layer, run) for (layer, run, output), those in found.items() if output == "o" and those}
    kept = [c for c in causes if c.kind not in _GUESSED or (c.layer, c.side) not in shown]
    return sorted([*kept, *(cause for those in found.values() for cause in those)], key=lambda cause: cause.layer)


def _off_hops(ranks: Sequence[RingMerge]) -> Iterator[MismatchCause]:
    for one in [r for r in ranks if r.hop_is_off]:
        whose = f"rank {one.worst_hop_rank}'s {'keys' if one.output in ('o', 'dq') else 'rows'}"
        by = (
            f"{percent(one.worst_hop_error)} off"
            if one.worst_hop_factor is None
            else f"{times(one.worst_hop_factor)} times as far from float64 as its roundings leave it"
        )
        words = f"{one.run}'s {SYMBOLS[one.output]} of rank {one.rank} for {whose} (hop {one.worst_hop}) is {by}"
        yield _cause("hop", "unnamed", words, one, one.from_hops)


def _coarse_merges(ranks: Sequence[RingMerge]) -> Iterator[MismatchCause]:
    beyond = [r for r in ranks if r.hops > 1 and (r.merge_factor or 0.0) > LOSSY and r.from_merge > _FP32]
    coarse = [r for r in beyond if not r.way.startswith(EXACT)]
    for way in dict.fromkeys(r.way for r in coarse):
        those = [r for r in coarse if r.way == way]
        most = max(those, key=lambda r: r.merge_factor or 0.0)
        how = way if way.startswith(OTHER) else f"with {way}"
        how = how if way else "in a way that was not tried (no format or order has its bits)"
        at = f"rank{'s' if len(those) > 1 else ''} {listed([str(r.rank) for r in those], 8)}"
        words = (
            f"{most.run} puts {SYMBOLS[most.output]} of {plural(most.hops, 'hop')} together {how} ({at}): "
            f"{times(most.merge_factor)} times the error of doing that in fp32 with one cast at the end"
        )
        label: MismatchLabel = "unnamed" if not way else "semantics" if way.startswith(OTHER) else "rounding"
        yield _cause("ring", label, words, most, most.from_merge)


def _cause(kind: CauseKind, label: MismatchLabel, words: str, of: RingMerge, part: float) -> MismatchCause:
    explained = min(1.0, (part / of.error) ** 2) if of.error else None
    return MismatchCause(of.layer, kind, label, of.run, words, "fitted", explained, "")
