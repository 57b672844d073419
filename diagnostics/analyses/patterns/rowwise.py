"""How LSE or delta, one number a row, may have come about."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.numbers import named
from attn_diag.analyses.patterns.of_mistake import mistaken
from attn_diag.analyses.patterns.of_sink import other_sinks
from attn_diag.analyses.patterns.readings import (
    first_features,
    other_documents,
    other_heads,
    other_masks,
    other_softcap,
)
from attn_diag.reference import reference_rows
from attn_diag.results.wording import signed


def of_lse(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Guesses for some rows of LSE.

    Args:
        evidence: LSE, [Tq, 1].
        rows: Which n rows.
    """
    head, reference = replace(evidence.heads[0], do=None), evidence.references[0]
    row_max, log_sum = reference.row_max[rows, None], reference.row_sum.log()[rows, None]
    base = math.log2(math.e)
    yield Guess("formula", "hold the row maximum alone", row_max)
    yield Guess("formula", "hold ln l alone", log_sum)
    yield Guess("formula", "hold m - ln l", row_max - log_sum)
    yield Guess("formula", "hold l", log_sum.exp())
    yield Guess("base", "are in base 2", (row_max + log_sum) * base)
    yield Guess("base", "add log2 l to m", row_max + log_sum * base)
    yield Guess("base", "add ln l to m log2(e)", row_max * base + log_sum)
    yield Guess("base", "add log2 l to m ln 2", row_max / base + log_sum * base)
    yield Guess("base", "add ln 2 ln l to m, as where ln stands for log2 of l", row_max + log_sum / base)
    yield Guess("scale", "hold m without the scale, plus ln l", row_max / head.scale + log_sum)
    yield Guess("scale", "have the scale twice in m", row_max * head.scale + log_sum)
    for words, scale in {"no scale": 1.0, "the scale applied twice": head.scale**2}.items():
        if abs(scale - head.scale) > 1e-9:
            block = reference_rows(replace(head, scale=scale), rows)
            yield Guess("scale", f"are what {words} gives", block.lse[:, None])
    for reading in (
        *other_masks(head), *other_softcap(head), *first_features(head), *other_heads(evidence),
        *other_documents(evidence), *other_sinks(evidence), *mistaken(evidence),
    ):  # fmt: skip
        block = reference_rows(replace(reading.head, do=None), rows)
        yield Guess(reading.kind, f"are what {reading.words} gives", block.lse[:, None])
    offset = float(evidence.error[rows].median())
    known = {"ln 2": math.log(2), "-ln 2": -math.log(2), "ln of the number of keys": math.log(len(head.k))}
    known |= {"-ln of the number of keys": -math.log(len(head.k)), "ln of the scale": math.log(abs(head.scale) or 1.0)}
    name = named(offset, known, 1e-3)
    words = f"are off by {signed(offset, 3)}{f' ({name})' if name else ''}"
    if len(rows) > 1:
        yield Guess("offset", words, evidence.truth[rows] + offset, 1)


def of_delta(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Guesses for some rows of a captured delta.

    Args:
        evidence: delta, [Tq, 1].
        rows: Which n rows.
    """
    head, reference = evidence.heads[0], evidence.references[0]
    assert head.do is not None
    out, do = reference.out, head.do

    def product(one: Tensor, other: Tensor) -> Tensor:
        return (one * other).sum(1, keepdim=True)[rows]

    yield Guess("formula", "are made of O before its division by the row sum", product(do, reference.unnormalised_out))
    yield Guess("formula", "hold rowsum(dO)", do.sum(1, keepdim=True)[rows])
    yield Guess("formula", "hold rowsum(O)", out.sum(1, keepdim=True)[rows])
    yield Guess("formula", "hold rowsum(dO^2)", product(do, do))
    yield Guess("formula", "are made with O of the next row", product(do, out.roll(-1, 0)))
    yield Guess("formula", "are made with O of the row before", product(do, out.roll(1, 0)))
    yield Guess("formula", "lack the LSE: they are delta - L", evidence.truth[rows] - reference.lse[rows, None])
    half = torch.arange(do.shape[1], device=do.device) < do.shape[1] // 2
    yield Guess("formula", "sum the first half of the features alone", product(do * half, out))
    yield Guess("formula", "sum the second half of the features alone", product(do * ~half, out))
    for reading in (*other_masks(head), *other_heads(evidence), *other_sinks(evidence), *mistaken(evidence)):
        delta = reference_rows(reading.head, rows).delta
        if delta is not None:
            yield Guess(reading.kind, f"are what {reading.words} gives", delta[:, None])
