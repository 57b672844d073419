"""What the difference of two O's consists of, exactly.

    O_b - O_a = [R_a(in_b) - R_a(in_a)] + [R_b(in_b) - R_a(in_b)] + [(O_b - R_b(in_b)) - (O_a - R_a(in_a))]
                 came in with q, k, v       another semantics          rounding and schedule

R_x is attention in float64 as run x computes it: its scale, mask, window, sink and softcap, stated or found. Where run
b lacks keys that run a's mask shows, R_a(in_b) is not known, and all but rounding is of semantics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.head.counterfactual import NoiseCollector
from attn_diag.reference import AttentionHead, FloatFormat, Masking, RowBlock, reference_rows
from attn_diag.reference.fused import reference_of


@dataclass(frozen=True)
class HeadSemantics:
    """What one head of one run computes, apart from its inputs and its rounding."""

    bias: Tensor
    """What is added to the scaled scores, -inf where a key is hidden, [n, T]."""
    scale: float
    """alpha."""
    softcap: float | None = None
    """c; None for none."""
    sink: float | None = None
    """The logit of a sink; None for none."""

    @classmethod
    def stated(cls, rows: RunRows) -> HeadSemantics:
        """What the capture says."""
        return cls(rows.bias, rows.scale, rows.softcap, rows.sink)

    def of_rows(self, rows: Tensor) -> HeadSemantics:
        """Of these rows alone."""
        return replace(self, bias=self.bias[rows])

    @property
    def visible(self) -> Tensor:
        """Which keys a row sees, bool [n, T]."""
        return self.bias > -torch.inf


def heads_of(semantics: HeadSemantics, inputs: RunRows) -> list[tuple[Tensor, AttentionHead]]:
    """These semantics on these inputs: rows [m], and their head."""
    return [
        (
            rows,
            AttentionHead(
                inputs.q[rows], k, v, None, semantics.scale, Masking(mask=semantics.bias[rows]), semantics.softcap,
                semantics.sink,
            ),
        )
        for rows, k, v in inputs.blocks
    ]  # fmt: skip


def evaluate(semantics: HeadSemantics, inputs: RunRows) -> Tensor:
    """O in float64, [n, Dv]; NaN in rows that see a key which these inputs lack."""
    out = inputs.o.new_zeros(inputs.o.shape)
    for rows, head in heads_of(semantics, inputs):
        out[rows] = reference_of(head, key_gradients=False).out
    lacking = (semantics.visible & ~inputs.known).any(1)
    return out.masked_fill_(lacking[:, None], torch.nan)


Blocks = list[tuple[Tensor, AttentionHead, RowBlock]]


def blocks_of(semantics: HeadSemantics, inputs: RunRows) -> Blocks:
    """Every intermediate of few rows: rows [m], their head, and a block that holds all of them."""
    found = []
    for rows, head in heads_of(semantics, inputs):
        found.append((rows, head, reference_rows(head, torch.arange(len(rows), device=rows.device))))
    return found


def out_of_few(semantics: HeadSemantics, inputs: RunRows) -> Tensor:
    """As ``evaluate``, of few rows: faster."""
    out = inputs.o.new_zeros(inputs.o.shape)
    for rows, _, block in blocks_of(semantics, inputs):
        out[rows] = block.out
    lacking = (semantics.visible & ~inputs.known).any(1)
    return out.masked_fill_(lacking[:, None], torch.nan)


def expected_square(semantics: HeadSemantics, inputs: RunRows, fmt: FloatFormat, out: FloatFormat) -> Tensor:
    """By row the squared error that one rounding at each site of a well-rounded kernel gives O, [n]."""
    found = inputs.o.new_zeros(len(inputs.o))
    for rows, head, block in blocks_of(semantics, inputs):
        noise = NoiseCollector(head, fmt, out)
        noise.add(block)
        found[rows] = noise.variance["o"].sum(1)
    return found


PARTS = ("inputs", "semantics", "rounding")


@dataclass
class LayerSums:
    """Sums over the heads and features of a layer, one entry a token."""

    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    """By name, [tokens of a sequence] of every sequence."""

    def add(self, name: str, by_token: Tensor, sequence: int, tokens: Tensor) -> None:
        """Add one head's entries, [n], to those of its sequence's tokens."""
        held = self.sums.setdefault(name, [])
        while len(held) <= sequence:
            held.append(torch.zeros(0, dtype=torch.float64))
        need = int(tokens.max()) + 1
        if len(held[sequence]) < need:
            held[sequence] = torch.cat([held[sequence], torch.zeros(need - len(held[sequence]), dtype=torch.float64)])
        held[sequence].index_add_(0, tokens.cpu(), by_token.cpu())

    def __getitem__(self, name: str) -> Tensor:
        """All tokens of all sequences, one after the other."""
        return torch.cat(self.sums[name]) if name in self.sums else torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class SplitHead:
    """The three parts of one head; each [n, Dv]."""

    parts: dict[str, Tensor]
    """By name, as ``PARTS``; they add up to O_b - O_a."""
    errors: tuple[Tensor, Tensor]
    """O - R of each run on its own inputs, R as its capture states it."""
    reference: Tensor
    """R_a(in_a)."""
    usable: Tensor
    """Rows that can be compared, bool [n]."""


def split_head(a: RunRows, b: RunRows, semantics: tuple[HeadSemantics, HeadSemantics]) -> SplitHead:
    """Split the difference of one head."""
    own_a, own_b = evaluate(semantics[0], a), evaluate(semantics[1], b)
    stated = [
        own if _same(found, HeadSemantics.stated(rows)) else evaluate(HeadSemantics.stated(rows), rows)
        for own, found, rows in zip((own_a, own_b), semantics, (a, b), strict=True)
    ]
    same = _same(*semantics)
    crossed = own_b if same else evaluate(semantics[0], b)
    lacking = own_a.isfinite() & own_b.isfinite() & ~crossed.isfinite()
    crossed = torch.where(lacking, own_a, crossed)
    rounding = (b.o - own_b) - (a.o - own_a)
    parts = {"inputs": crossed - own_a, "semantics": own_b - crossed, "rounding": rounding}
    usable = torch.stack([part.isfinite().all(1) for part in parts.values()]).all(0)
    return SplitHead(parts, (a.o - stated[0], b.o - stated[1]), own_a, usable)


def _same(a: HeadSemantics, b: HeadSemantics) -> bool:
    return a.scale == b.scale and a.softcap == b.softcap and a.sink == b.sink and torch.equal(a.bias, b.bias)


def add_head(sums: LayerSums, found: SplitHead, a: RunRows, b: RunRows, sequence: int) -> None:
    """Add one head to the sums of its layer."""
    use, tokens = found.usable, a.tokens[found.usable]
    if not len(tokens):
        return
    difference, sign = (b.o - a.o)[use], found.reference[use].sign()

    def add(name: str, values: Tensor) -> None:
        sums.add(name, values.sum(1), sequence, tokens)

    add("difference", difference.square())
    add("reference", found.reference[use].square())
    add("size", found.reference[use].abs())
    for name in PARTS:
        part = found.parts[name][use]
        add(f"{name}.square", part.square())
        add(f"{name}.along", part * difference)
        add(f"{name}.away", part * sign)
    for name, error in zip(("train", "rollout"), found.errors, strict=True):
        add(f"{name}.error", error[use].square())
    for name in "qkv":
        one, other = getattr(a, name)[use], getattr(b, name)[use]
        add(f"{name}.difference", (other - one).square())
        add(f"{name}.reference", one.square())


def both_streams(
    a: Sequence[tuple[Tensor, Tensor]], b: Sequence[tuple[Tensor, Tensor]], length: int
) -> tuple[Tensor, Tensor] | None:
    """x of both runs, [T, C] each, NaN in rows of tokens that not both have; None where there is no other row.

    Args:
        a: Tokens [n] and x [n, C] of the calls of one run.
        b: Those of the other.
        length: T.
    """
    if not a or not b:
        return None
    one, other = (_by_token(rows, length) for rows in (a, b))
    if one.shape[1] != other.shape[1]:
        return None
    lacking = one.isnan() | other.isnan()
    return None if bool(lacking.all()) else (one.masked_fill(lacking, torch.nan), other.masked_fill(lacking, torch.nan))


def _by_token(rows: Sequence[tuple[Tensor, Tensor]], length: int) -> Tensor:
    found = rows[0][1].new_full((length, rows[0][1].shape[1]), torch.nan)
    for tokens, x in rows:
        inside = (tokens >= 0) & (tokens < length)
        found[tokens[inside]] = x[inside]
    return found
