"""The partial results of a ring's hops in a capture: what they are called, and which keys each of them saw."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from attn_diag.captures.sources import TensorSource
from attn_diag.errors import InputError

_NAME = re.compile(r"hop\d+_(o|lse|dq|dk|dv)")
_RUN = re.compile(r"(\d+)(?:-(\d+))?(?: by (\d+))?")


def hop_name(number: int, output: str) -> str:
    """What a hop's o, lse, dq, dk or dv is called."""
    return f"hop{number}_{output}"


def is_of_hop(name: str) -> bool:
    """Whether a tensor is the partial result of a hop."""
    return _NAME.fullmatch(name) is not None


def without_hops(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """What is left without the partial results."""
    return {name: tensor for name, tensor in tensors.items() if not is_of_hop(name)}


def hop_keys(stated: str) -> list[tuple[int, Tensor]]:
    """Whose keys the hops of a ring saw, and which of the sequence, from the metadata's "hops".

    Args:
        stated: Such as "rank 1: 12-23; rank 0: 0-11": runs of keys, or every n-th ("1-23 by 2").

    Returns:
        Of every hop the rank, and the places of its keys, int64.

    Raises:
        InputError: It says something else.
    """
    found = []
    for hop in stated.split(";"):
        rank, _, keys = hop.strip().partition(": ")
        runs = [_RUN.fullmatch(run.strip()) for run in keys.split(",")]
        if not re.fullmatch(r"rank \d+", rank) or not all(runs):
            raise InputError(f'expected hops such as "rank 1: 12-23; rank 0: 0-11", got {stated!r}')
        ranges = [[int(n) if n else None for n in run.groups()] for run in runs if run is not None]
        at = [torch.arange(a or 0, (a or 0 if b is None else b) + 1, step or 1) for a, b, step in ranges]
        found.append((int(rank.removeprefix("rank ")), torch.cat(at)))
    return found
