"""Rows of the same sequences from several ranks (context parallelism), put in the order of the sequence.

Each rank's capture has its own query rows, where they are (``q_positions``), and all keys that they may see, in the
sequence's order. dK and dV of its own keys are sums over the rows of all ranks ("own_dk", "own_dv"): once all rows are
there they are judged as any capture's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attn_diag.captures.joined import RowsSource, equal_bits
from attn_diag.captures.sinks import summed
from attn_diag.captures.sources import TensorSource
from attn_diag.errors import InputError

_OWN = {"own_dk": "dk", "own_dv": "dv"}


def joined_rows(
    members: Sequence[Mapping[str, TensorSource]], layout: str, sharing: int
) -> tuple[dict[str, TensorSource], bool]:
    """One capture's tensors from those of ranks that share sequences.

    Args:
        members: Of each rank, by name.
        layout: "BHTD" or "BTHD".
        sharing: How many ranks share the sequences.

    Returns:
        The tensors, and whether all ranks are there. Only then there are dK and dV.

    Raises:
        InputError: They are not rows of the same sequences.
    """
    names = list(members[0])
    for member in members[1:]:
        if odd := set(names) ^ set(member):
            raise InputError(f"only some ranks have {min(odd)}")
    if "q_positions" not in names:
        raise InputError("q_positions are missing: they say which rows a rank has")
    positions = torch.cat([member["q_positions"][...] for member in members])
    order = positions.argsort()
    placed = positions[order]
    if bool((placed.diff() == 0).any()):
        raise InputError("two ranks have the same rows")
    axis = 2 if layout == "BHTD" else 1
    longest = max(members, key=lambda member: member["k"].shape[axis])
    _require_same_keys(members, longest, axis)
    keys = longest["k"].shape[axis]
    whole = len(members) == sharing and len(placed) == keys
    tensors: dict[str, TensorSource] = {}
    for name in names:
        sources = tuple(member[name] for member in members)
        if name in ("k", "v"):
            tensors[name] = longest[name]
        elif name in _OWN:
            if whole:
                tensors[_OWN[name]] = RowsSource(sources, axis, order)
        elif name.rpartition(".")[2] == "dsinks":
            if whole:
                tensors[name] = summed(sources)
        elif name in ("w_q", "sinks", "alibi_slopes"):
            if not all(equal_bits(sources[0][...], source[...]) for source in sources[1:]):
                raise InputError(f"{name} differs between ranks that hold other rows of the same sequences")
            tensors[name] = sources[0]
        elif name == "q_positions":
            if not whole:
                tensors[name] = placed
        elif name.rpartition(".")[2] in ("q", "o", "do", "dq", "dq_pre"):
            tensors[name] = RowsSource(sources, axis, order)
        elif name.rpartition(".")[2] in ("lse", "delta"):
            tensors[name] = RowsSource(sources, 2, order)
        elif name == "x":
            tensors[name] = RowsSource(sources, 1, order)
        else:
            raise InputError(f"nobody knows how the {name} of several ranks belong together")
    return tensors, whole


def _require_same_keys(
    members: Sequence[Mapping[str, TensorSource]], longest: Mapping[str, TensorSource], axis: int
) -> None:
    for name in ("k", "v"):
        for member in members:
            for item in range(longest[name].shape[0]):
                some = member[name][item]
                if not equal_bits(some, longest[name][item].narrow(axis - 1, 0, some.shape[axis - 1])):
                    raise InputError(f"the ranks saw other values of {name}: keys changed on their way")
