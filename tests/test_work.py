"""What an inspection does to the process that it runs in, and gives back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import attn_diag
from attn_diag.errors import InputError
from attn_diag.work import full_collections_later

OWN = (600, 9, 8)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*OWN)
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_full_collections_wait_until_the_last_block_ends_and_then_come_as_before() -> None:
    full = list[int]()
    gc.callbacks.append(lambda phase, info: full.append(info["generation"]) if phase == "start" else None)
    try:
        with full_collections_later(), full_collections_later():
            kept = [[] for _ in range(400_000)]  # type: ignore[var-annotated]
        assert gc.get_threshold() == OWN
        assert 2 not in full
        del full[:]
        kept += [[] for _ in range(400_000)]
        assert 2 in full
    finally:
        gc.callbacks.pop()


@pytest.mark.parametrize("fails", [False, True])
def test_an_inspection_leaves_garbage_collection_as_it_was(fails: bool) -> None:
    gc.disable()
    q, k, v = torch.randn(3, 1, 1, 8, 16).bfloat16()
    during = list[tuple[int, int, int]]()
    gc.callbacks.append(lambda *_: during.append(gc.get_threshold()))
    try:
        if fails:
            with pytest.raises(InputError):
                attn_diag.inspect(q, k, v, o=q[..., :3])
        else:
            attn_diag.inspect(q, k, v, o=v)
    finally:
        gc.callbacks.pop()
    assert (gc.get_threshold(), gc.isenabled(), during) == (OWN, False, [])


def test_collections_that_are_switched_off_stay_so_and_thresholds_set_meanwhile_stand() -> None:
    gc.set_threshold(0)
    with full_collections_later():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
    with full_collections_later():
        gc.set_threshold(*OWN)
    assert gc.get_threshold() == OWN
