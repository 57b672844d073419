"""Which rows and keys the sequences of a capture have in common: copies of each other, prompts that they share.

Of a row with the same q, under the same mask, and the same k and v before it, every kernel returns the same O: its
error says nothing new. Rows that look at the same keys share the rounding of these keys' V. Both are found by hashing
what was captured: 64 bits a row, a sum of the numbers' bits times random numbers, modulo 2^64. So are rows of one
sequence that have the same q and dO (the same token again, where nothing tells positions apart).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.stacks import on_host
from attn_diag.reference import AttentionHead, Masking
from attn_diag.reference.heads import stacked

Ints = npt.NDArray[np.int64]

_CPU = torch.device("cpu")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SharedRows:
    """What one head of one sequence has in common with the sequences before it."""

    repeated: npt.NDArray[np.bool_]
    """[Tq], rows that some earlier sequence has too."""
    keys: Ints
    """[Tk], a number for each key; keys that follow the same keys, and are the same, have the same one: that of the
    first of them, sequence * Tk (of the longest sequence) + key."""
    source: int | None
    """The sequence that has most of the repeated rows; None where there are none."""


def shared_rows(capture: Capture, batches: Sequence[int], head: int) -> dict[int, SharedRows]:
    """What the sequences share in one query head, by batch item.

    Without causal masking (or a window) a row sees all keys, so that rows are alike only where whole sequences of keys
    are. A row is only compared with rows at its own position.
    """
    kv_head, c = head // (capture.q_heads // capture.kv_heads), capture
    rows, prefixes = [], []
    length = c.k_length
    masked = "mask" in c.tensors and len(c.tensors["mask"].shape) == 4 and c.tensors["mask"].shape[0] > 1
    for batch in batches:
        stops = _last_keys(c, batch)
        keys = hash_rows(c.read("k", batch, kv_head), 1).cpu() + hash_rows(c.read("v", batch, kv_head), 2).cpu()
        for name in ("k_descale", "v_descale"):
            if name in c.tensors:
                keys = keys + _mixed(c.descale(name[0], batch, kv_head))
        prefix = ((keys + 1) * _weights(length, 3)[: len(keys)]).cumsum(0)
        row = hash_rows(c.read("q", batch, head), 4).cpu() + _mixed(c.descale("q", batch, head))
        row = row + _mixed(c.alibi_slope(batch, head) or 0.0)
        if masked:
            row = row + _hash_mask(c, batch, head, stops)
        if (dropout := c.dropout(batch, head)) is not None:
            row = row + hash_rows(dropout.kept, 8).cpu()
        before = torch.cat([prefix.new_zeros(1), prefix])[stops]
        rows.append(((row * _weights(1, 6) + before) * _weights(c.q_length, 7)[: len(row)]).numpy())
        prefixes.append(prefix.numpy())
    return _compared(batches, rows, prefixes, length)


def rows_alike(heads: Sequence[AttentionHead]) -> list[Ints]:
    """Of every row of each head of one sequence the first of its rows that has the same q and dO, [Tq].

    Where they see the same keys their errors are one number; where not, they are taken for one all the same.
    """
    found: dict[int, Ints] = {}
    alike: dict[object, list[int]] = {}
    for i, head in enumerate(heads):
        alike.setdefault((head.q.shape, head.do is None), []).append(i)
    for places in alike.values():
        hashes, do = hash_rows(stacked([heads[i].q for i in places]), 4), [heads[i].do for i in places]
        if do[0] is not None:
            hashes = hashes + hash_rows(stacked([t for t in do if t is not None]), 9)
        apart = _all_apart(hashes)
        found |= dict.fromkeys(places, np.arange(hashes.shape[1]))
        if some := [n for n, one in enumerate(apart) if not one]:
            for n, rows in zip(some, on_host([hashes[n] for n in some]), strict=True):
                found[places[n]] = _first_alike([rows])[0][1]
    return [found[i] for i in range(len(heads))]


def rows_differ(values: Sequence[Tensor]) -> list[bool]:
    """Whether no two of some rows are the same in all of several tensors; [H, n, D] each, of H heads on one device.

    False says that two have the same hash: they may differ all the same.
    """
    # -0 is 0.
    return _all_apart(torch.stack([hash_rows(t + 0.0, seed) for seed, t in enumerate(values)]).sum(0))


def _all_apart(hashes: Tensor) -> list[bool]:
    """Whether no two hashes of a head are the same; [H, n]."""
    ordered = hashes.sort(1).values
    found: list[bool] = (ordered[:, 1:] != ordered[:, :-1]).all(1).tolist()
    return found


def _compared(
    batches: Sequence[int], rows: Sequence[Ints], prefixes: Sequence[Ints], length: int
) -> dict[int, SharedRows]:
    """From each sequence's hashes of rows [Tq] and of the keys up to each key [Tk]; Tk is ``length`` at most."""
    firsts = _first_alike(rows)
    keys = _first_alike(prefixes)
    found = {}
    for i, batch in enumerate(batches):
        repeated = firsts[i][0] < i
        source = batches[int(np.bincount(firsts[i][0][repeated]).argmax())] if repeated.any() else None
        found[batch] = SharedRows(repeated, keys[i][0] * length + keys[i][1], source)
    return found


def _first_alike(hashes: Sequence[Ints]) -> list[tuple[Ints, Ints]]:
    """Of every hash of every sequence, the first that equals it: its sequence, and its place in there."""
    sizes = [len(one) for one in hashes]
    _, first, inverse = np.unique(np.concatenate(hashes), return_index=True, return_inverse=True)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    place = np.concatenate([np.arange(size) for size in sizes])
    found, ends = first[inverse], np.cumsum(sizes)[:-1]
    return list(zip(np.split(owner[found], ends), np.split(place[found], ends), strict=True))


def _last_keys(capture: Capture, batch: int) -> Tensor:
    """How many keys, from the first on, each row of a sequence may see, [Tq]."""
    masking = Masking(
        causal=capture.metadata.causal,
        window=capture.metadata.window,
        positions=capture.q_positions(batch),
    )
    right, (q_length, k_length) = masking.reach[1], capture.lengths(batch)
    where = masking.row_positions(q_length, k_length, torch.device("cpu"))
    if right is None:
        return torch.full_like(where, k_length)
    return (where + right + 1).clamp(0, k_length)


def _hash_mask(capture: Capture, batch: int, head: int, stops: Tensor) -> Tensor:
    """A hash of each row of a sequence's own mask, as far as the row may see, [Tq] or [1]."""
    found = capture.mask(batch, head)
    assert found is not None
    mask = found[0].float() if found[0].dtype.itemsize == 1 else found[0]
    bits = mask.double().cpu().contiguous().view(torch.int64).expand(-1, capture.lengths(batch)[1])
    sums = (bits * _weights(capture.k_length, 5)[: bits.shape[1]]).cumsum(1)
    sums = torch.cat([sums.new_zeros(len(sums), 1), sums], 1).expand(len(stops), -1)
    return sums.gather(1, stops[:, None])[:, 0]


def hash_rows(values: Tensor | None, seed: int) -> Tensor:
    """A hash of each row of [..., n, D], int64 [..., n] on its device; sums and products wrap around."""
    assert values is not None
    bits = values.contiguous().view(_BITS[values.dtype.itemsize]).to(torch.int64)
    if values.dtype.itemsize == 8:
        # Numbers that 16 bits hold end in 45 zeros, and so would every product.
        bits = bits ^ (bits >> 32)
    return (bits * _weights(bits.shape[-1], seed, bits.device)).sum(-1)


def _mixed(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64).view(torch.int64)


@lru_cache(maxsize=32)
def _weights(count: int, seed: int, device: torch.device = _CPU) -> Tensor:
    """Random odd numbers, the same ones every time; not to be changed."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1).to(device)
