"""Repeated row maxima against a brute-force count, and swamped elements."""

from __future__ import annotations

import pytest
import torch
from builders import some, stored
from torch import Tensor

import attn_diag
from attn_diag.head.row_maxima import MAX_POSITIONS, WINDOW, RowMaximaCollector, swamped_elements
from attn_diag.kernels import preset, score_rounding
from attn_diag.reference import AttentionHead, Masking, reference_head
from attn_diag.reference.rounding import BF16, FP16, FloatFormat, round_nearest_even


def head_with_ties(tq: int = 90, tk: int = 130, d: int = 16, spread: float = 1.0) -> AttentionHead:
    """Keys in identical groups, so that exact ties and near ties abound."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, d, generator=generator).bfloat16().double() for n in (tq, tk, tk))
    k[1::3] = k[:-1:3][: len(k[1::3])]
    return AttentionHead(q * spread, k, v, None, d**-0.5, Masking("bottom-right"))


def brute_force(head: AttentionHead, fmt: FloatFormat) -> dict[str, Tensor]:
    scores = head.scale * head.q @ head.k.T
    for t in range(len(scores)):
        scores[t, t + len(head.k) - len(head.q) + 1 :] = -torch.inf
    counts: dict[str, list[int]] = {"exact": [], "window": [], "unit": [], "as_run": []}
    as_run = some(score_rounding(preset("qiu2025"), head.scale))
    for row in scores:
        seen = row[row > -torch.inf]
        top = seen.max()
        nearest = round_nearest_even(seen, fmt)
        counts["exact"].append(int((nearest == nearest.max()).sum()))
        counts["window"].append(int((top - seen <= WINDOW).sum()))
        probs = round_nearest_even((seen - top).exp(), fmt)
        counts["unit"].append(int((probs == 1).sum()))
        run = as_run(seen)
        counts["as_run"].append(int((run == run.max()).sum()))
    return {name: torch.tensor(c) for name, c in counts.items()}


def collect(head: AttentionHead, fmt: FloatFormat, block_rows: int | None = None) -> RowMaximaCollector:
    rounding = score_rounding(preset("qiu2025"), head.scale)
    collector = RowMaximaCollector(len(head.q), head.q.device, fmt, rounding, BF16)
    reference_head(head, collector.add, block_rows=block_rows)
    return collector


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda f: f.name)
@pytest.mark.parametrize("spread", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("block_rows", [11, 1000])
def test_multiplicities_equal_a_brute_force_count(fmt: FloatFormat, spread: float, block_rows: int) -> None:
    head = head_with_ties(spread=spread)
    collector, expected = collect(head, fmt, block_rows), brute_force(head, fmt)
    for definition, counts in expected.items():
        found = some(collector.repeats(definition))
        assert found.multiplicity.tolist() == counts.tolist(), definition
    assert (expected["exact"] > 1).any()


def test_positions_are_where_the_maxima_lie() -> None:
    head = head_with_ties()
    collector = collect(head, BF16)
    found = some(collector.repeats("exact"))
    scores = head.scale * head.q @ head.k.T
    for row in found.multiplicity.gt(1).nonzero()[:, 0].tolist():
        keys = found.keys[found.rows == row]
        assert len(keys) == min(int(found.multiplicity[row]), MAX_POSITIONS)
        tied = round_nearest_even(scores[row, keys], BF16)
        assert (tied == tied[0]).all()
        assert collector.top_key[row] in keys
    sign, exponent = found.values(head.v)
    assert torch.equal(sign, head.v[found.keys].sign())
    mantissa = head.v[found.keys].abs() / 2.0**exponent
    assert ((mantissa >= 1) & (mantissa < 2)).all()


def test_all_equal_scores_keep_few_positions() -> None:
    head = head_with_ties(spread=0.0)
    found = some(collect(head, BF16).repeats("exact"))
    assert found.multiplicity.max() == len(head.k)
    assert torch.bincount(found.rows).max() == MAX_POSITIONS


def test_swamped_elements() -> None:
    v = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=torch.float64)
    truth = torch.tensor([[1.0, 2.001], [4.1, 8.0]], dtype=torch.float64)
    out = torch.tensor([[1.0, 2.0], [4.125, 8.0]], dtype=torch.float64)
    found = swamped_elements(out, truth, v)
    assert found.tolist() == [[False, True], [False, False]]


def test_row_by_row_from_a_capture() -> None:
    capture = stored("kernels_pair_T512")
    found = attn_diag.repeated_maxima(capture, head=1, recipe=preset("qiu2025"))
    counted = attn_diag.inspect_captures([capture]).captures[0].observations[0].heads[1].row_maxima
    for definition in ("exact", "window", "unit"):
        repeats, count = some(found[definition]), getattr(counted, definition)
        assert int((repeats.multiplicity > 1).sum()) == count.rows
        assert int(repeats.multiplicity.max()) == count.max_multiplicity
    assert found["as_run"] is not None
    assert attn_diag.repeated_maxima(capture)["as_run"] is None
