"""A cache in pages in the Triton kernels: every sequence as with contiguous keys, bit for bit; on a GPU or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from kernel_inputs import head_of
from planted_pages import drawn
from tiny_models import written
from torch import Tensor, nn
from torch.library import opcheck

import attn_diag
from attn_diag.kernels import Schedule, emulate_head, preset
from attn_diag.kernels.attention import attention
from attn_diag.kernels.backend import BackendError

FA2 = preset("fa2")
SPLIT = replace(FA2, schedule=Schedule(key_tile=16, split_keys=32))


@dataclass(frozen=True)
class Pool:
    """Pages that hold NaN wherever no sequence has a key, and what sequences read of them."""

    q: Tensor
    """[B, Hq, Tq, D]."""
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor

    def run(self, **more: Any) -> tuple[Tensor, Any]:
        given: dict[str, Any] = {"page_table": self.table, "cache_seqlens": self.lengths, "instrument": "rows", **more}
        return attention(self.q, self.k, self.v, **given)  # type: ignore[no-any-return]

    def contiguous(self, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, Hq, Tq, D], k and v [1, Hk, keys, D] of one sequence."""
        n = int(self.lengths[b])
        keys, values = (t[self.table[b].long()].flatten(0, 1)[:n].transpose(0, 1)[None] for t in (self.k, self.v))
        return self.q[b : b + 1], keys, values


def pool(device: str, *, size: int = 16, rows: int = 3, lengths: tuple[int, ...] = (40, 0, 21), dim: int = 16,
         heads: int = 2, kv_heads: int = 1) -> Pool:  # fmt: skip
    g = torch.Generator().manual_seed(0)
    width = -(-max(lengths) // size) + 1
    pages = len(lengths) * width + 3
    table = torch.randperm(pages, generator=g)[: len(lengths) * width].view(len(lengths), width)
    k, v = (torch.full((pages, size, kv_heads, dim), torch.nan).bfloat16() for _ in "kv")
    for row, n in zip(table.tolist(), lengths, strict=True):
        for start in range(0, n, size):
            here = min(size, n - start)
            for t in (k, v):
                t[row[start // size], :here] = torch.randn(here, kv_heads, dim, generator=g).bfloat16()
    q = torch.randn(len(lengths), heads, rows, dim, generator=g).bfloat16()
    table, counts = table.int(), torch.tensor(lengths, dtype=torch.int32)
    return Pool(*(t.to(device) for t in (q, k, v, table, counts)))


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"recipe": preset("qiu2025")},
    "causal": {"causal": "bottom-right", "window": (20, -1), "softcap": 2.0},
    "splits": {"causal": "bottom-right", "recipe": SPLIT},
}


def check(cache: Pool, **more: Any) -> None:
    """O, L, the row statistics and multiplicities of every sequence have the bits of contiguous keys."""
    out, dump = cache.run(**more)
    rows, slopes = cache.q.shape[2], more.pop("alibi_slopes", None)
    for b, n in enumerate(cache.lengths.tolist()):
        mine = slice(b * rows, (b + 1) * rows)
        if not n:
            assert not out[b].any()
            continue
        more |= {} if slopes is None else {"alibi_slopes": slopes[b]}
        alone, one = attention(*cache.contiguous(b), instrument="rows", **more)
        assert torch.equal(out[b], alone[0])
        assert torch.equal(dump.lse[:, :, mine], one.lse)
        assert torch.equal(dump.row_sum[:, :, mine], one.row_sum)
        assert torch.equal(dump.multiplicity("exact")[:, :, mine], one.multiplicity("exact"))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_sequence_has_the_bits_of_contiguous_keys(name: str, device: str) -> None:
    check(pool(device), **OPTIONS[name])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("size", [7, 64, 256])
def test_pages_of_any_size(size: int, device: str) -> None:
    check(pool(device, size=size, rows=1, lengths=(40, 9)), causal="bottom-right")


@pytest.mark.usefixtures("poisoned")
def test_pages_with_heads_before_keys(device: str) -> None:
    cache = pool(device, size=128, rows=2, lengths=(140, 9), kv_heads=2, heads=4)
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (cache.k, cache.v))
    check(replace(cache, k=k, v=v), causal="bottom-right")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["full", "causal", "splits"])
def test_a_few_rows_of_a_group_have_the_bits_of_many(name: str, device: str) -> None:
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, h, n, 16, generator=g).bfloat16().to(device) for h, n in ((6, 40), (2, 70), (2, 70)))
    options = {"causal": "bottom-right", "instrument": "rows", **OPTIONS[name]}
    options |= {
        "alibi_slopes": torch.rand(2, 6, generator=g).to(device),
        "sinks": torch.randn(6, generator=g).to(device),
    }
    out, dump = attention(q, k, v, **options)
    few, one = attention(q[:, :, -3:], k, v, **options)
    assert torch.equal(few, out[:, :, -3:])
    assert torch.equal(one.lse, dump.lse[:, :, -3:])
    assert torch.equal(one.row_sum, dump.row_sum[:, :, -3:])


@pytest.mark.usefixtures("poisoned")
def test_with_sinks_and_slopes(device: str) -> None:
    cache = pool(device)
    slopes = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)).to(device)
    check(cache, causal="bottom-right", alibi_slopes=slopes)
    cache = pool(device, lengths=(40, 0, 50))  # two splits each
    check(cache, causal="bottom-right", sinks=torch.tensor([0.5, -2.0], device=device), recipe=SPLIT)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "size", "name"), [(64, 16, "causal"), (128, 64, "causal"), (128, 256, "splits")])
def test_long_caches(dim: int, size: int, name: str, device: str) -> None:
    split = replace(FA2, schedule=Schedule(key_tile=64, split_keys=512))
    more = {**OPTIONS[name], **({"recipe": split} if name == "splits" else {})}
    cache = pool(device, size=size, rows=5, lengths=(3000, 1, 777, 0, 2048), dim=dim, heads=16, kv_heads=2)
    check(cache, **more)
    out, _ = cache.run(**more)
    # With the tensor core's own sums: those of a processor's library depend on its number of threads.
    recipe = replace(more.get("recipe", preset("fa2", head_dim=dim)), accumulation="nvidia-tensor-core")
    q, k, v = cache.contiguous(0)
    same = [emulate_head(recipe, head_of(q, k, v, h, more)).o == out[0, h].cpu() for h in range(16)]
    assert float(torch.stack(same).float().mean()) > 0.998


def test_layouts_and_caches_without_a_table(device: str) -> None:
    cache = pool(device, lengths=(40, 9, 21))
    paged: dict[str, Any] = {"page_table": cache.table, "cache_seqlens": cache.lengths}
    out, _ = cache.run(causal="bottom-right")
    tokens = attention(cache.q.transpose(1, 2), cache.k, cache.v, causal="bottom-right", layout="BTHD", **paged)
    assert torch.equal(tokens, out.transpose(1, 2))
    borders = torch.tensor([0, 3, 6, 9], device=device)
    packed = cache.q.transpose(1, 2).flatten(0, 1)  # [total, H, D]
    for given, layout in ((packed, "BTHD"), (packed[None], "BTHD"), (packed.transpose(0, 1)[None], "BHTD")):
        found = attention(given, cache.k, cache.v, causal="bottom-right", layout=layout, cu_seqlens_q=borders, **paged)  # type: ignore[call-overload]
        assert found.shape == given.shape
        found = found.transpose(1, 2) if layout == "BHTD" else found
        assert torch.equal(found.reshape(3, 3, 2, 16), tokens)
    keys, values = (t[cache.table.long()].flatten(1, 2) for t in (cache.k, cache.v))  # [B, Tk, Hk, D]
    for swap in (False, True):
        q, k, v = (t.transpose(1, 2) if swap else t for t in (cache.q, keys.transpose(1, 2), values.transpose(1, 2)))
        layout = "BTHD" if swap else "BHTD"
        found = attention(q, k, v, causal="bottom-right", layout=layout, cache_seqlens=cache.lengths)  # type: ignore[call-overload]
        assert torch.equal(found, tokens if swap else out)


def test_a_dump_of_pages_is_inspected(device: str) -> None:
    cache = pool(device, rows=8, lengths=(40, 60))
    q = cache.q.transpose(1, 2)
    paged: dict[str, Any] = {"page_table": cache.table, "cache_seqlens": cache.lengths, "layout": "BTHD"}
    _, dump = attention(q, cache.k, cache.v, causal="bottom-right", instrument="rows", **paged)
    for wrong in (False, True):
        if wrong:
            dump.page_table = some(dump.page_table).roll(1, 0)
            dump.cache_seqlens = torch.tensor([40, 40], dtype=torch.int32)
        found = attn_diag.inspect(q, cache.k, cache.v, dump=dump, layout="BTHD", device="cpu")
        (observation,) = found.captures[0].observations
        labels = {label for head in observation.heads for label in some(head.verdict).labels}
        assert ("wrong" in labels) == wrong


def test_captures_with_pages_run_on_the_kernels(device: str) -> None:
    tensors: dict[str, Any] = {**drawn(rows=3, lengths=(37, 5)).tensors()}
    q, k, v = (tensors.pop(name).to(device) for name in "qkv")
    found = attn_diag.inspect(q, k, v, causal="bottom-right", engine="triton", device=device, **tensors)
    (observation,) = found.captures[0].observations
    assert observation.name == "fa2 (triton)"
    assert {some(head.verdict).labels for head in observation.heads} == {("clean",)}


class Decoder(nn.Module):
    def __init__(self, cache: Pool) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, q: Tensor) -> Tensor:
        return replace(self.cache, q=q).run(causal="bottom-right", instrument="none")  # type: ignore[return-value]


def test_it_is_met_live(device: str, tmp_path: Path) -> None:
    cache = pool(device)
    model = Decoder(cache)
    with attn_diag.capture(model, tmp_path, batch=None) as recorder, torch.no_grad():
        out = model(cache.q)
    assert not recorder.dropped
    (c,) = written(recorder)
    assert [c.lengths(b) for b in range(2)] == [(3, 40), (3, 21)]
    assert torch.equal(some(c.read("o", 1, 1)), out[2, 1].cpu())


def test_opcheck_and_one_graph(device: str) -> None:
    cache = pool(device, lengths=(9, 20), rows=2)
    q = cache.q.transpose(0, 1).flatten(1, 2)[None]
    borders = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    arguments = (FA2.json, FA2.json, "bottom-right", -1, -1, 0.25, None, "none", 0)
    given = (q, cache.k.transpose(1, 2), cache.v.transpose(1, 2), None, 0, *arguments, None, None, borders, None,
             cache.table, cache.lengths)  # fmt: skip
    opcheck(torch.ops.attn_diag.attention_forward.default, given, test_utils=("test_schema", "test_faketensor"))

    def work(q: Tensor, lengths: Tensor) -> Tensor:
        return replace(cache, q=q * 2, lengths=lengths).run(causal="bottom-right", instrument="none")  # type: ignore[return-value]

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(cache.q, cache.lengths), work(cache.q, cache.lengths))


def test_what_cannot_be_is_refused(device: str) -> None:
    cache = pool(device, lengths=(9, 20))
    q, k, v = cache.q, cache.k, cache.v
    paged: dict[str, Any] = {"page_table": cache.table, "cache_seqlens": cache.lengths}
    refused: dict[str, dict[str, Any]] = {
        "page_table needs cache_seqlens": {"cache_seqlens": None},
        "both say how many keys": {"cu_seqlens_k": cache.lengths},
        r"page_table must have shape \[2, pages of a sequence\], got \[1, 3\]": {"page_table": cache.table[:1]},
        r"cache_seqlens must have shape \[2\], one length a sequence, got \[1\]": {"cache_seqlens": cache.lengths[:1]},
        "instrument='full' is not there for a cache in pages": {"instrument": "full"},
        "without a page_table k and v need one item a sequence, 2, got 9": {"page_table": None},
    }
    for message, change in refused.items():
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, **{**paged, **change})
    with pytest.raises(TypeError, match="cache_seqlens must be int32"):
        attention(q, k, v, **{**paged, "cache_seqlens": cache.lengths.float()})
    with pytest.raises(BackendError, match="page_table must be where q is"):
        attention(q, k, v, **{**paged, "page_table": cache.table.to("meta")})
    with pytest.raises(ValueError, match="a cache needs q"):
        attention(q[0], k, v, **paged)
    with pytest.raises(ValueError, match="no gradients here"):
        attention(q.clone().requires_grad_(), k, v, **paged)
    if device == "cpu":
        with pytest.raises(ValueError, match="cache_seqlens must be 0 to 48"):
            attention(q, k, v, **{**paged, "cache_seqlens": cache.lengths + 40})
        with pytest.raises(ValueError, match="page_table must name pages from 0 to 8"):
            attention(q, k, v, **{**paged, "page_table": cache.table + 9})
