"""Captures shared out over several processes: each measures its own, and all tests stay one family."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch

from attn_diag.errors import InputError

_Item = TypeVar("_Item")


def _through_torch(own: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


@dataclass(frozen=True)
class Ranks:
    """The processes that share a piece of work; by default this one alone."""

    rank: int = 0
    count: int = 1
    exchange: Callable[[Any], list[Any]] = _through_torch
    """Given what this one has, what every one has, in their order; all call it."""

    def gather(self, own: Sequence[_Item]) -> list[list[_Item]]:
        """What every rank has, in the ranks' order; every rank must call it, and all get it."""
        return [list(own)] if self.count == 1 else self.exchange(list(own))

    def share(self, costs: Sequence[float]) -> list[int]:
        """Which items this rank does: the dearest first, each to whom has least to do; the same on every rank."""
        return self._shares(costs)[self.rank]

    def idle_devices(self, costs: Sequence[float]) -> list[torch.device]:
        """The GPUs of ranks without an item, for rank 0, which has the dearest one; none of another machine's."""
        local = os.environ.get("LOCAL_WORLD_SIZE") == str(self.count)
        if self.rank or not local or torch.cuda.device_count() < self.count:
            return []
        return [torch.device("cuda", rank) for rank, share in enumerate(self._shares(costs)) if not share]

    def _shares(self, costs: Sequence[float]) -> list[list[int]]:
        load, shares = [0.0] * self.count, [list[int]() for _ in range(self.count)]
        for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
            rank = load.index(min(load))
            load[rank] += costs[item]
            shares[rank].append(item)
        return [sorted(share) for share in shares]

    def in_order(self, own: Sequence[_Item], places: Sequence[int]) -> list[_Item]:
        """The items of all ranks in the order of their ``places``, of which each rank gives its own."""
        pairs = chain.from_iterable(self.gather(list(zip(places, own, strict=True))))
        return [item for _, item in sorted(pairs, key=lambda pair: pair[0])]


@contextmanager
def ranks_of_torchrun() -> Iterator[Ranks]:
    """The processes that torchrun started, joined for as long as the block runs; without torchrun this one alone.

    They talk through gloo; each uses the CUDA device of its local rank.

    Raises:
        InputError: ``RANK``, ``WORLD_SIZE`` or ``LOCAL_RANK`` is no number, or the processes do not find each other.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or torch.distributed.is_initialized():
        yield Ranks()
        return
    try:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.distributed.init_process_group("gloo")
    except (KeyError, ValueError, RuntimeError) as error:
        raise InputError(
            f"WORLD_SIZE is set, but no group of processes comes about ({error}); expected "
            "torchrun --nproc-per-node N -m attn_diag inspect …, or unset it"
        ) from None
    try:
        yield Ranks(rank, count)
    finally:
        torch.distributed.destroy_process_group()
