"""``check``'s case "arrangements": what a call may not depend on is a failure, a schedule by the batch size is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import invariance_kernels as kernels
import pytest
import torch
from builders import some
from torch import Tensor

import attn_diag
from attn_diag.errors import InputError
from attn_diag.results.check import CheckReport
from attn_diag.testing.regression.cases import NAMES

pytestmark = pytest.mark.slow


def kinds(found: CheckReport) -> set[str]:
    return {f.kind for f in found.failures}


class _EnoughError(Exception):
    pass


def cases_of(kernel: str) -> int:
    """How many a check of all cases has, seen at its first."""
    counts = []

    def progress(_: int, total: int) -> None:
        counts.append(total)
        raise _EnoughError

    with pytest.raises(_EnoughError):
        attn_diag.check(kernel, backward=False, device="cpu", progress=progress)
    return counts[0]


ARRANGED: dict[str, tuple[Any, str, str | None]] = {
    "key heads interleaved": (kernels.interleaved_key_heads, "none", "gqa"),
    "later tokens change a scale": (kernels.future_scale, "top-left", "future-token"),
    "memory never written": (kernels.unwritten_keys, "none", "uninitialised"),
    "a schedule by the batch size": (kernels.batch_split, "none", None),
    "sound": (kernels.plain_causal, "top-left", None),
}


@pytest.mark.parametrize(("kernel", "causal", "named"), ARRANGED.values(), ids=ARRANGED)
def test_what_a_call_depends_on_fails_but_no_schedule(kernel: Any, causal: str, named: str | None) -> None:
    found = attn_diag.check(kernel, causal=causal, cases=["arrangements"], device="cpu")
    assert found.passed == (named is None)
    assert {p.arrangement for p in found.arrangements} >= {"gqa", "future-token", "uninitialised", "batch-size"}
    if named is not None:
        assert kinds(found) == {"invariance"}
        assert found.report().startswith(f"FAIL {kernel.__name__} (certain): {named}, ")
        assert f"only=['{named}']" in some(found.failures[0].look_closer)
    elif kernel is kernels.batch_split:
        assert "other bits, by rounding alone, in batch-size" in found.notes[0]


def without_the_last_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys behind the last whole tile of 64 are lost, which padding to whole tiles brings back."""
    whole = k.shape[2] - k.shape[2] % 64
    return kernels.plain_causal(q, k[:, :, :whole], v[:, :, :whole])


def test_what_is_wrong_by_itself_is_no_arrangements_fault() -> None:
    found = attn_diag.check(without_the_last_tile, causal="top-left", cases=["arrangements"], device="cpu")
    told = " ".join(found.report().split())
    assert "(certain): the call itself: it never sees keys 128-172 of 173" in told


def off_behind_the_first_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O of every head but the first is 1 % too large, which no arrangement of the same heads moves."""
    o = kernels.plain_causal(q, k, v)
    return torch.cat([o[:, :1], (o[:, 1:].float() * 1.01).to(o.dtype)], 1)


def test_heads_that_the_other_cases_lack_are_held_to_the_first() -> None:
    found = attn_diag.check(
        off_behind_the_first_head, causal="top-left", cases=["normal", "arrangements"], device="cpu", backward=False
    )
    (failure,) = found.failures
    assert failure.kind == "invariance"
    assert re.search(r"of 2 sequences with 4 heads and 173 rows: O has [3-9]\.\d* times a well-", failure.message)


def whole_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Other lengths than whole tiles are refused."""
    if k.shape[2] % 64:
        raise ValueError("T must be a multiple of 64")
    return kernels.plain(q, k, v)


def test_a_kernel_that_refuses_a_length_is_asked_with_the_suites() -> None:
    found = attn_diag.check(whole_tiles, cases=["arrangements"], device="cpu", backward=False)
    assert found.passed, found.report()
    assert found.cases[0].shape == (2, 4, 192, 64)
    assert "T must be a multiple of 64" in found.notes[0]
    assert found.notes[0].endswith("; made with 192 rows instead")


def test_arrangements_are_of_kernels_that_are_run(tmp_path: Path) -> None:
    assert cases_of("fa2") + 1 == cases_of("sdpa") == len(NAMES) + 1
    broken = attn_diag.check(kernels.plain_causal, cases=["arrangements"], device="cpu")
    assert kinds(broken) == {"fit"}
    assert "a causal mask" in broken.failures[0].message or "top-left" in broken.failures[0].message
    path = tmp_path / "baseline.json"
    with pytest.raises(InputError, match="besides arrangements"):
        attn_diag.check(kernels.plain, cases=["arrangements"], baseline=path, save=True, device="cpu")
    saved = attn_diag.check(kernels.plain, cases=["ones", "arrangements"], baseline=path, save=True, device="cpu")
    assert saved.saved == "saved"
    again = attn_diag.check(kernels.plain, cases=["ones", "arrangements"], baseline=path, exact=True, device="cpu")
    assert again.passed, again.report()
    leaking = attn_diag.check(
        kernels.interleaved_key_heads, cases=["ones", "arrangements"], baseline=path, update=True, device="cpu"
    )
    assert leaking.saved is None, "what is broken is no baseline"
