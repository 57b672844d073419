"""Captures of ranks that share sequences: their rows in order, beside other ranks with other sequences and heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_ranks import HK, HQ, RUN, B, D, T, of_heads, of_items, whole_batch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.joined import RowsSource
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.watching.live.rings import Order, positions

LAYOUTS = ("BHTD", "BTHD")


def of_rows(tensors: dict[str, Tensor], rows: Tensor, layout: str) -> dict[str, Tensor]:
    """What a rank has of these rows under a causal mask: all keys up to its last one."""
    axis = 2 if layout == "BHTD" else 1
    found: dict[str, Tensor] = {"q_positions": rows}
    for name, tensor in tensors.items():
        if name in ("k", "v"):
            found[name] = tensor.narrow(axis, 0, int(rows.max()) + 1)
        elif name == "w_q":
            found[name] = tensor
        elif name != "mask":
            along = {"x": 1, "lse": 2, "delta": 2}.get(name, axis)
            found[{"dk": "own_dk", "dv": "own_dv"}.get(name, name)] = tensor.index_select(along, rows)
    return found


def ranks_of(tensors: dict[str, Tensor], order: Order, layout: str, sharing: int = 2, first: int = 0) -> list[Capture]:
    ranks = range(first, first + sharing)
    extra = RUN | {"world_size": "8", "sequence_ranks": ",".join(map(str, ranks))}
    found = []
    for place, rank in enumerate(ranks):
        rows = positions(order, place, sharing, T // sharing)
        found.append(
            Capture.from_tensors(
                of_rows(tensors, rows, layout), layout=layout, causal="top-left", layer=2, step=500, rank=rank,
                extra=extra,
            )
        )  # fmt: skip
    return found


def require_equal(merged: Capture, tensors: dict[str, Tensor]) -> None:
    assert set(merged.tensors) == set(tensors) - {"mask"}
    for name, source in merged.tensors.items():
        assert torch.equal(source[...], tensors[name]), name
    for batch in range(merged.batch):
        for head in range(merged.q_heads):
            whole = Capture.from_tensors(tensors, layout=merged.metadata.layout)
            for name in ("q", "o", "dq", "do", "lse"):
                mine, yours = (c.read(name, batch, head) for c in (merged, whole))
                assert mine is not None
                assert yours is not None
                assert torch.equal(mine, yours), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("sharing", [2, 4])
def test_rows_in_order_are_the_whole(sharing: int, order: Order, layout: str) -> None:
    tensors = whole_batch(layout)
    (merged,), _ = merged_over_ranks(ranks_of(tensors, order, layout, sharing))
    assert (merged.q_length, merged.k_length) == (T, T)
    require_equal(merged, tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_ranks_with_other_sequences_and_heads(layout: str) -> None:
    tensors = whole_batch(layout)
    captures = []
    for item in range(2):
        for part in range(2):
            items = of_items(tensors, slice(item * B // 2, (item + 1) * B // 2))
            some = of_heads(items, part, 2, layout)
            rings = ranks_of(some, "zigzag", layout, first=4 * item + 2 * part)
            captures += [replace(c, metadata=replace(c.metadata, head_offset=part * HQ // 2)) for c in rings]
    (merged,), said = merged_over_ranks(captures)
    assert not said
    assert (merged.batch, merged.q_heads, merged.kv_heads, merged.head_dim) == (B, HQ, HK, D)
    require_equal(merged, tensors)


def test_without_some_rows_there_is_no_dk() -> None:
    tensors = whole_batch()
    captures = ranks_of(tensors, "zigzag", "BHTD", 4)
    (merged,), said = merged_over_ranks([captures[0], captures[2]])
    assert "ranks 1, 3" in said[0]
    assert merged.q_length == T // 2
    assert not {"dk", "dv", "own_dk"} & set(merged.tensors)
    rows = merged.tensors["q_positions"][...]
    assert torch.equal(merged.tensors["o"][...], tensors["o"][:, :, rows])


def test_ranks_with_the_same_rows_or_other_keys_are_left_apart() -> None:
    one, other = ranks_of(whole_batch(), "zigzag", "BHTD")
    same = replace(one, metadata=replace(one.metadata, rank=1))
    merged, said = merged_over_ranks([one, same])
    assert len(merged) == 2
    assert any("two ranks have the same rows" in words for words in said)
    lacking = replace(other, tensors={n: t for n, t in other.tensors.items() if n != "lse"})
    merged, said = merged_over_ranks([one, lacking])
    assert len(merged) == 2
    assert any("only some ranks have lse" in words for words in said)


def test_rows_are_read_at_any_index() -> None:
    whole = torch.arange(2 * 3 * 6 * 2).reshape(2, 3, 6, 2)
    rows = torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5])
    source = RowsSource(tuple(whole[:, :, r] for r in rows), 2, torch.cat(rows).argsort())
    assert source.shape == tuple(whole.shape)
    for index in (
        ...,
        1,
        (1, 2),
        (1, slice(1, 3)),
        (0, 1, 4),
        (1, 2, slice(2, 5), 1),
        (slice(None), 1, slice(None), 0),
    ):
        assert torch.equal(source[index], whole[index]), index
