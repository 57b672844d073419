"""The exhaustive check of benchmarks/bench_rounding.py, on few inputs, and that it sees wrong roundings."""

from __future__ import annotations

from functools import partial
from typing import Any

import bench_rounding as bench
import numpy as np
import numpy.typing as npt
import pytest
import torch

from attn_diag.kernels.formats import Mode, Rounding, round_to
from attn_diag.kernels.rounding_numpy import round_array


def wrong_numpy(x: npt.NDArray[np.float32], rounding: Rounding) -> npt.NDArray[Any]:
    """One input is wrong: a NaN that became a number."""
    rounded = round_array(x, rounding)
    rounded[x.view(np.uint32) == 0x7F800001] = np.inf
    return rounded


def test_numpy_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FORMATS", {"e4m3": bench.FORMATS["e4m3"]})
    sound = bench.numpy_part(0x7F7FF000, 0x7F801000, 1).values()
    # Four modes, and the cast of ml_dtypes.
    assert [c.implementation for c in sound].count("numpy") == 4
    assert [(c.inputs, c.mismatches, c.nan_inputs) for c in sound] == [(0x2000, 0, 0xFFF)] * 5
    monkeypatch.setattr(bench, "round_array", wrong_numpy)
    for count in bench.numpy_part(0x7F7FF000, 0x7F801000, 1).values():
        if count.implementation == "ml_dtypes":
            continue
        assert (count.mismatches, count.nan_mismatches, count.first_mismatches) == (1, 1, ["0x7f800001"])


def test_device_part_counts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    # Zeros, subnormals, E4M3's ties and overflow, infinities and NaN, of both signs.
    half = np.r_[0:100, 0x3A800000:0x3A800100, 0x43E7FF00:0x43E80100, 0x7F7FFFF0:0x7F800010]
    words = torch.from_numpy(np.concatenate([half, half + 2**31])).to(device)
    tables = {"e4m3": bench.table_of("e4m3", device)}
    counts: dict[str, bench.Count] = {}
    bench.run_chunk(words, tables, counts, partial(bench.device_roundings, True))
    assert sorted({c.implementation for c in counts.values()}) == ["device cast", "reference", "torch", "triton"]
    assert {(c.inputs, c.mismatches, c.nan_inputs) for c in counts.values()} == {(len(words), 0, 30)}
    # 464 is a tie that goes to 448; the 255 numbers after it, the largest ones and infinity make NaN in torch.
    assert counts["device cast e4m3 nearest-even"].left_out == 2 * (255 + 17)

    monkeypatch.setattr(bench, "round_to", lambda x, r: round_to(x, Rounding(r.format, Mode.TOWARD_ZERO)))
    wrong: dict[str, bench.Count] = {}
    bench.run_chunk(words, tables, wrong, partial(bench.device_roundings, False))
    assert wrong["torch e4m3 toward-zero"].mismatches == 0
    assert wrong["torch e4m3 nearest-even"].mismatches > 100
    assert wrong["torch e4m3 nearest-even"].nan_mismatches == 0
    assert len(wrong["torch e4m3 nearest-even"].first_mismatches) == 4
