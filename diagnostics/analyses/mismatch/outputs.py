"""Output projections as captures hold them: by call what every rank gave to their sum, and what all of them got."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.sums import ASKED, BIAS, BY, DTYPE, OUTPUT, PART, RANKS, TOTAL, TURNED, W_O
from attn_diag.results.wording import listed, plural

# Enough to tell what a product's rounding makes.
_MOST_ROWS = 1024
NOT_CAPTURED = "the parts were not captured: under tensor parallelism use attn_diag.capture(..., sums=True)"
_NOT_FOUND = (
    "no module with a weight took O as it was: something lies between (a gate, an exchange of heads), or it is compiled"
)
_NOT_SEEN = (
    "its sum over ranks is none of torch.distributed's that runs with the projection or a hook on it, or is made in "
    "several steps: give what each rank gives, and the sum, to attn_diag.reduction_of"
)


@dataclass(frozen=True)
class ProjectionCall:
    """The output projection of one call of attention."""

    captures: tuple[Capture, ...]
    """Of the ranks whose parts are added up, by rank; one where nothing is."""
    device: torch.device

    @property
    def layer(self) -> int:
        """The layer's number."""
        return self.captures[0].metadata.layer or 0

    @property
    def call(self) -> tuple[int, int]:
        """The step, and which call of the layer in it."""
        m = self.captures[0].metadata
        stated = m.extra.get("call", "0")
        return m.step or 0, int(stated) if stated.isdecimal() else 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whose parts are added up; one where nothing is."""
        stated = self.captures[0].metadata.extra.get(RANKS, "")
        return tuple(int(rank) for rank in stated.split(",")) if stated else (self.captures[0].metadata.rank or 0,)

    @property
    def is_sum(self) -> bool:
        """Whether anything is added up."""
        return PART in self.captures[0].tensors

    @property
    def by(self) -> str:
        """What adds up."""
        return self.captures[0].metadata.extra.get(BY, "")

    @property
    def returns(self) -> str:
        """The dtype in which the projection returns it."""
        return self.captures[0].metadata.extra.get(DTYPE, "")

    @property
    def biased(self) -> bool:
        """Whether the projection adds a bias."""
        return BIAS in self.captures[0].metadata.extra

    def part(self, number: int) -> Tensor:
        """What a rank gave, [B, T, C]; of one rank alone what it made."""
        name = PART if self.is_sum else OUTPUT
        return self.captures[number].tensors[name][...].to(self.device)

    def _whole(self, name: str, number: int) -> Tensor | None:
        """What a rank got; where every rank got some of the rows, all of them."""
        first = self.captures[number].tensors.get(name)
        if first is None:
            return None
        rows = self.captures[0].tensors[PART if self.is_sum else OUTPUT].shape[1]
        if first.shape[1] == rows:
            return first[...].to(self.device)
        every = [c.tensors[name][...] for c in self.captures if name in c.tensors]
        found = torch.cat(every, 1)
        return found.to(self.device) if found.shape[1] == rows else None

    def as_it_lay(self, t: Tensor) -> Tensor:
        """[B, T, C] in the order that it had in memory, of which pieces are added up in one order."""
        return t.transpose(0, 1) if TURNED in self.captures[0].metadata.extra else t

    @cached_property
    def total(self) -> Tensor:
        """The sum, [B, T, C], as the first rank got it; of one rank alone what it made."""
        found = self._whole(TOTAL, 0) if self.is_sum else self.part(0)
        assert found is not None
        return found

    @property
    def others(self) -> Iterator[tuple[int, Tensor]]:
        """Ranks that hold another sum than the first one, and that."""
        if self.is_sum and self.captures[0].tensors[TOTAL].shape == self.captures[0].tensors[PART].shape:
            for number, rank in enumerate(self.ranks[1:], 1):
                found = self._whole(TOTAL, number)
                if found is not None and not torch.equal(found, self.total):
                    yield rank, found

    @cached_property
    def output(self) -> Tensor:
        """What the projection returned, [B, T, C] float64."""
        found = self._whole(OUTPUT, 0)
        return (self.total if found is None else found).double()

    @cached_property
    def exact(self) -> Tensor:
        """The parts added up exactly, [B, T, C] float64."""
        found = self.part(0).to(torch.float64, copy=True)
        for number in range(1, len(self.captures)):
            found += self.part(number).double()
        return found

    @cached_property
    def rows(self) -> Tensor:
        """The rows of which products are made in float64, spread over T; int64."""
        count = self.captures[0].tensors[PART if self.is_sum else OUTPUT].shape[1]
        return torch.linspace(0, count - 1, min(count, _MOST_ROWS), device=self.device).long()

    @cached_property
    def weight(self) -> Tensor | None:
        """The columns of all ranks side by side, [C, D * all heads]; None where these are not all there."""
        ordered = sorted(self.captures, key=lambda c: c.metadata.head_offset)
        if any(W_O not in c.tensors for c in ordered):
            return None
        return torch.cat([c.tensors[W_O][...].to(self.device) for c in ordered], 1)

    def with_weight(self, weight: Tensor) -> Tensor | None:
        """O times another run's ``weight``, [B, ``rows``, C] float64; None where these do not fit."""
        found: Tensor | None = None
        start = 0
        for number in sorted(range(len(self.captures)), key=lambda i: self.captures[i].metadata.head_offset):
            factors = self._factors(number)
            if factors is None:
                return None
            own = weight[:, start : start + factors[1].shape[1]].double()
            start += own.shape[1]
            if own.shape != factors[1].shape:
                return None
            found = factors[0] @ own.T if found is None else found + factors[0] @ own.T
        return found if start == weight.shape[1] else None

    def _factors(self, number: int) -> tuple[Tensor, Tensor] | None:
        """O [B, ``rows``, N] and the weight [C, N] of a rank, float64; None where these are not all there."""
        capture = self.captures[number]
        weight, o = capture.tensors.get(W_O), capture.tensors.get("o")
        if weight is None or o is None:
            return None
        own = o[...].to(self.device)
        every = (own.transpose(1, 2) if capture.metadata.layout == "BHTD" else own).flatten(2)
        if own.shape[2] > 1 == self.part(number).shape[1]:
            every = own.reshape(own.shape[0], 1, -1)  # query heads of one token, as the rows of their key head
        if every.shape[2] != weight.shape[1] or every.shape[:2] != self.part(number).shape[:2]:
            return None
        return every[:, self.rows].double(), weight[...].to(self.device).double()

    def product(self, number: int) -> Tensor | None:
        """O times the weight of a rank, [B, ``rows``, C] float64; None where these are not all there."""
        factors = self._factors(number)
        return None if factors is None else factors[0] @ factors[1].T

    def product_size(self, number: int) -> float:
        """The norm of the lengths that are multiplied for it: what its error in fp32 is in proportion to."""
        factors = self._factors(number)
        return 0.0 if factors is None else float(factors[0].norm() * factors[1].norm())

    @cached_property
    def products(self) -> Tensor | None:
        """Those of all ranks, added up."""
        found: Tensor | None = None
        for number in range(len(self.captures)):
            one = self.product(number)
            if one is None:
                return None
            found = one if found is None else found + one
        return found


def projections_of(
    captures: Iterable[Capture], run: str, device: torch.device
) -> tuple[list[ProjectionCall], list[str]]:
    """The output projections that a run's captures hold, and why those of others are not told.

    Args:
        captures: Of all ranks, as they were written.
        run: What it is called.
        device: Where they are put.
    """
    calls: dict[object, list[Capture]] = {}
    for capture in captures:
        m = capture.metadata
        key = m.layer, m.step, *(m.extra.get(name) for name in ("run", "stage", "module", "call"))
        calls.setdefault(key, []).append(capture)
    found: list[ProjectionCall] = []
    why: dict[str, set[int]] = {}
    for group in calls.values():
        shared = len({c.metadata.head_offset for c in group}) > 1 and len({c.metadata.rank for c in group}) > 1
        by_ranks: dict[str, list[Capture]] = {}
        for capture in group:
            by_ranks.setdefault(capture.metadata.extra.get(RANKS, f"rank {capture.metadata.rank}"), []).append(capture)
        for members in by_ranks.values():
            said = _missing(members, shared=shared)
            if said is None:
                members.sort(key=lambda c: c.metadata.rank or 0)
                found.append(ProjectionCall(tuple(members), device))
            elif said:
                why.setdefault(said, set()).add(members[0].metadata.layer or 0)
    notes = [
        f"{run}: how the output {'projection of layer' if len(layers) == 1 else 'projections of layers'} "
        f"{listed([str(n) for n in sorted(layers)], 6)} {'is' if len(layers) == 1 else 'are'} added up is not told: "
        f"{said}."
        for said, layers in why.items()
    ]  # fmt: skip
    found.sort(key=lambda call: (call.layer, *call.call, call.ranks))
    return found, notes


def _missing(members: Sequence[Capture], *, shared: bool) -> str | None:
    """Why the output projection of these ranks is not told of; empty: nothing is said; None: it is."""
    first = members[0]
    ranks = [int(rank) for rank in first.metadata.extra.get(RANKS, "").split(",") if rank]
    if "sequence_ranks" in first.metadata.extra:
        return ""
    if not ranks:
        if OUTPUT not in first.tensors:
            return (_NOT_FOUND if ASKED in first.metadata.extra else NOT_CAPTURED) if shared else ""
        return _NOT_SEEN if shared else None
    there = {capture.metadata.rank for capture in members}
    if absent := [rank for rank in ranks if rank not in there]:
        return f"the captures of {plural(len(absent), 'rank')} {listed([str(rank) for rank in absent], 8)} are missing"
    if len(members) > len(ranks):
        return "several captures say that they are of the same rank"
    if any(PART not in c.tensors or TOTAL not in c.tensors for c in members):
        return NOT_CAPTURED
    given, got = ([tuple(c.tensors[name].shape) for c in members] for name in (PART, TOTAL))
    scattered = sum(shape[1] for shape in got) == given[0][1]
    if len(set(given)) > 1 or not (scattered or set(got) == {given[0]}):
        shapes = [listed([str(list(shape)) for shape in those], 8) for those in (given, got)]
        return f"what the ranks give, {shapes[0]}, does not fit what they get, {shapes[1]}"
    return None
