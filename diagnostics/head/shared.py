"""Which rows and keys the sequences of a capture have in common: copies of each other, prompts that they share.

Of a row with the same q, under the same mask, and the same k and v before it, every kernel returns the same O: its
error says nothing new. Rows that look at the same keys share the rounding of these keys' V. Both are found by hashing
what was captured: 64 bits a row, a sum of the numbers' bits times random numbers, modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.reference import Masking

Ints = npt.NDArray[np.int64]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SharedRows:
    """What one head of one sequence has in common with the sequences before it."""

    repeated: npt.NDArray[np.bool_]
    """[Tq], rows that some earlier sequence has too."""
    keys: Ints
    """[Tk], a number for each key; keys that follow the same keys, and are the same, have the same one: sequence * Tk +
    key of the first of them."""
    source: int | None
    """The sequence that has most of the repeated rows; None where there are none."""


def shared_rows(capture: Capture, batches: Sequence[int], head: int) -> dict[int, SharedRows]:
    """What the sequences share in one query head, by batch item.

    Without causal masking (or a window) a row sees all keys, so that rows are alike only where whole sequences of keys
    are. A row is only compared with rows at its own position.
    """
    kv_head, c = head // (capture.q_heads // capture.kv_heads), capture
    rows, prefixes = [], []
    stops = _last_keys(c)
    masked = "mask" in c.tensors and len(c.tensors["mask"].shape) == 4 and c.tensors["mask"].shape[0] > 1
    for batch in batches:
        keys = _hash(c.read("k", batch, kv_head), 1) + _hash(c.read("v", batch, kv_head), 2)
        for name in ("k_descale", "v_descale"):
            if name in c.tensors:
                keys = keys + _mixed(c.descale(name[0], batch, kv_head))
        prefix = ((keys + 1) * _weights(len(keys), 3)).cumsum(0)
        row = _hash(c.read("q", batch, head), 4) + _mixed(c.descale("q", batch, head))
        if masked:
            row = row + _hash_mask(c, batch, head, stops)
        before = torch.cat([prefix.new_zeros(1), prefix])[stops]
        rows.append(((row * _weights(1, 6) + before) * _weights(len(row), 7)).numpy())
        prefixes.append(prefix.numpy())
    return _compared(batches, np.stack(rows), np.stack(prefixes))


def _compared(batches: Sequence[int], rows: Ints, prefixes: Ints) -> dict[int, SharedRows]:
    """From hashes of rows [B, Tq] and of the keys up to each key [B, Tk]."""
    firsts = _first_alike(rows) // rows.shape[1]
    keys = _first_alike(prefixes)
    found = {}
    for i, batch in enumerate(batches):
        repeated = firsts[i] < i
        source = batches[int(np.bincount(firsts[i][repeated]).argmax())] if repeated.any() else None
        found[batch] = SharedRows(repeated, keys[i], source)
    return found


def _first_alike(hashes: Ints) -> Ints:
    """Of every hash, the flat index of the first that equals it."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return np.asarray(first[inverse]).reshape(hashes.shape)


def _last_keys(capture: Capture) -> Tensor:
    """How many keys, from the first on, each row may see, [Tq]."""
    positions = capture.tensors.get("q_positions")
    masking = Masking(
        causal=capture.metadata.causal,
        window=capture.metadata.window,
        positions=None if positions is None else positions[...],
    )
    right = masking.reach[1]
    where = masking.row_positions(capture.q_length, capture.k_length, torch.device("cpu"))
    if right is None:
        return torch.full_like(where, capture.k_length)
    return (where + right + 1).clamp(0, capture.k_length)


def _hash_mask(capture: Capture, batch: int, head: int, stops: Tensor) -> Tensor:
    """A hash of each row of a sequence's own mask, as far as the row may see, [Tq] or [1]."""
    found = capture.mask(batch, head)
    assert found is not None
    mask = found[0].float() if found[0].dtype.itemsize == 1 else found[0]
    bits = mask.double().cpu().contiguous().view(torch.int64).expand(-1, capture.k_length)
    sums = (bits * _weights(capture.k_length, 5)).cumsum(1)
    sums = torch.cat([sums.new_zeros(len(sums), 1), sums], 1).expand(len(stops), -1)
    return sums.gather(1, stops[:, None])[:, 0]


def _hash(values: Tensor | None, seed: int) -> Tensor:
    """A hash of each row of [n, D], int64 [n] on the CPU; sums and products wrap around."""
    assert values is not None
    bits = values.contiguous().view(_BITS[values.dtype.itemsize]).to(torch.int64)
    return (bits * _weights(bits.shape[1], seed).to(bits.device)).sum(1).cpu()


def _mixed(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64).view(torch.int64)


def _weights(count: int, seed: int) -> Tensor:
    """Random odd numbers, the same ones every time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1
