"""Decoding from a cache in pages: sequences of their own, read as a file or a call has them, and faults by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from planted_pages import FAULTS, SIZE, Cache, drawn, planted
from safetensors import safe_open
from torch import Tensor

import attn_diag
from attn_diag.captures.apart import alone
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.errors import InputError
from attn_diag.head.read import read_head

CPU = torch.device("cpu")


def found(*captures: Capture) -> list[Any]:
    return [c.observations for c in attn_diag.inspect_captures(captures, device="cpu").captures]


def healthy(*captures: Capture) -> None:
    for diagnosis in attn_diag.inspect_captures(captures, device="cpu").captures:
        assert diagnosis.assumptions.ok
        for head in diagnosis.observations[0].heads:
            if head.verdict is not None:
                assert {"wrong", "lossy", "biased"}.isdisjoint(head.verdict.labels)
            assert not any(q.patterns for q in head.quantities)


def single(cache: Cache, outputs: dict[str, Tensor], b: int) -> Capture:
    """One sequence with contiguous keys."""
    k, v = (x[cache.table[b]].flatten(0, 1)[: cache.lengths[b]].transpose(0, 1)[None] for x in (cache.k, cache.v))
    own = {"q": cache.q[b : b + 1], "k": k, "v": v, **{n: t[b : b + 1] for n, t in outputs.items()}}
    return Capture.from_tensors(own, causal="bottom-right")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_sequence_is_read_as_if_its_keys_were_contiguous(rows: int) -> None:
    cache = drawn(rows=rows, lengths=(37, 90, 5, 64))
    outputs = cache.outputs()
    c = cache.capture(outputs)
    assert [c.lengths(b) for b in range(4)] == [(rows, n) for n in cache.lengths]
    assert c.in_text()["cache"] == "5 to 90 keys in pages of 16; 14"
    for b in range(4):
        one = single(cache, outputs, b)
        apart = alone(c, b)
        for h in range(4):
            mine, its, whole = (read_head(x, i, h, CPU).head for x, i in ((c, b), (apart, 0), (one, 0)))
            for name in ("q", "k", "v"):
                assert torch.equal(getattr(mine, name), getattr(whole, name))
                assert torch.equal(getattr(its, name), getattr(whole, name))
            for name in ("o", "lse"):
                assert torch.equal(some(c.read(name, b, h)), some(one.read(name, 0, h)))
    healthy(c)


def test_every_way_of_giving_it_is_one() -> None:
    cache = drawn(rows=2, lengths=(37, 90, 5))
    t, outputs = cache.tensors(), cache.outputs()
    expected = found(cache.capture(outputs))
    bthd = {n: x.transpose(1, 2) for n, x in (("q", t["q"]), ("o", outputs["o"]))}
    turned = {**t, **bthd, "lse": outputs["lse"]}
    assert found(Capture.from_tensors(turned, causal="bottom-right", layout="BTHD")) == expected
    packed = {**t, "q": bthd["q"].flatten(0, 1), "o": bthd["o"].flatten(0, 1)}
    packed |= {"lse": outputs["lse"].transpose(0, 1).flatten(1), "cu_seqlens_q": torch.tensor([0, 2, 4, 6])}
    aliases = {"block_table": packed.pop("page_table"), "seqused_k": packed.pop("cache_seqlens")}
    assert found(Capture.from_tensors({**packed, **aliases}, causal="bottom-right")) == expected
    rest: dict[str, Any] = {n: x for n, x in t.items() if n not in "qkv"} | outputs
    door = attn_diag.inspect(t["q"], t["k"], t["v"], causal="bottom-right", device="cpu", **rest)
    assert [c.observations for c in door.captures] == expected
    with pytest.raises(InputError, match="causal=True is ambiguous"):
        attn_diag.inspect(t["q"], t["k"], t["v"], causal=True, device="cpu", **rest)
    # Decoding: q [B, H, D], LSE [B, H].
    cache = drawn(lengths=(37, 90, 5))
    t, outputs = cache.tensors(), cache.outputs()
    short = {**t, "q": t["q"][:, :, 0], "o": outputs["o"][:, :, 0], "lse": outputs["lse"][:, :, 0]}
    assert found(Capture.from_tensors(short, causal="bottom-right")) == found(cache.capture(outputs))


def test_a_cache_that_is_filled_in_part() -> None:
    cache = drawn(lengths=(37, 90, 5))
    k, v = (torch.full((3, 2, 100, 32), torch.nan).bfloat16() for _ in "kv")
    for b, n in enumerate(cache.lengths):
        for mine, pages in ((k, cache.k), (v, cache.v)):
            mine[b, :, :n] = pages[cache.table[b]].flatten(0, 1)[:n].transpose(0, 1)
    outputs, lengths = cache.outputs(), torch.tensor(cache.lengths)
    c = Capture.from_tensors({"q": cache.q, "k": k, "v": v, "cache_seqlens": lengths, **outputs}, causal="bottom-right")
    assert found(c) == found(cache.capture(outputs))


def test_files_hold_the_pages(tmp_path: Path) -> None:
    cache = drawn(rows=2, lengths=(37, 90, 5))
    c = cache.capture(cache.outputs())
    path = c.save(tmp_path / "a.safetensors")
    with safe_open(path, "pt") as file:
        assert file.metadata()["format_version"] == "1.1"
        assert torch.equal(file.get_tensor("k"), cache.k)
        assert "cu_seqlens_k" not in file.keys()  # noqa: SIM118
    assert found(load(path)) == found(c)
    assert load(load(path).save(tmp_path / "b.safetensors")).documents == c.documents


def test_shared_and_repeated_pages_and_empty_sequences_are_healthy() -> None:
    cache = drawn(rows=2, lengths=(64, 90, 48, 70))
    table = [list(pages) for pages in cache.table]
    table[1][:4] = table[0]  # a prefix
    table[2] = [table[2][0]] * 3
    table[3] = []
    cache = replace(cache, table=table, lengths=[64, 90, 48, 0])
    c = cache.capture(cache.outputs())
    assert c.batch == 3
    assert "1 of 4 documents are empty and left out (number 3)" in c.assumed
    healthy(c)


@pytest.mark.parametrize("which", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_in_eight_bits_beside_a_wider_q(which: torch.dtype) -> None:
    cache = drawn(lengths=(37, 90, 50))
    narrow = {"k": cache.k.to(which), "v": cache.v.to(which)}
    factors = {n: torch.rand(3, 2, generator=torch.Generator().manual_seed(1)) + 0.5 for n in narrow}
    wide = {n: x.double() for n, x in narrow.items()}
    for b, pages in enumerate(cache.table):
        for n, x in wide.items():
            x[pages] *= factors[n][b].double()[:, None]
    outputs = replace(cache, k=wide["k"], v=wide["v"]).outputs()
    c = cache.capture({**outputs, **narrow, "k_descale": factors["k"], "v_descale": factors["v"]})
    healthy(c)
    with pytest.raises(InputError, match=r"k is float8_.* without descale factors"):
        cache.capture(narrow)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no lengths": ({"cache_seqlens": None}, "'cache_seqlens' is missing"),
    "too long": ({"cache_seqlens": torch.tensor([37, 2000, 5])}, r"cache_seqlens\[1\] is 2000; page_table has room"),
    "negative": ({"cache_seqlens": torch.tensor([37, -1, 5])}, r"cache_seqlens\[1\] is -1"),
    "no keys": ({"cache_seqlens": torch.tensor([0, 0, 0])}, "cache_seqlens are all 0"),
    "other batch": ({"cache_seqlens": torch.tensor([37, 90])}, r"cache_seqlens must have shape \[3\]"),
    "floats": ({"cache_seqlens": torch.ones(3)}, "cache_seqlens must be integers"),
    "no page": ({"page_table": torch.full((3, 7), -1)}, r"page_table\[0, 0\] is -1, and sequence 0 has 37 keys"),
    "beyond": ({"page_table": torch.full((3, 7), 60)}, "expected a page from 0 to 59"),
    "one axis": ({"page_table": torch.zeros(3, dtype=torch.int32)}, "page_table must have shape"),
    "gradients": ({"dk": torch.zeros(60, SIZE, 2, 32), "do": 1}, "gradients of a cache are not supported"),
    "mask": ({"mask": torch.zeros(1, 90)}, "mask: not supported beside page_table"),
    "v of other pages": ({"v": torch.zeros(50, SIZE, 2, 32).bfloat16()}, "k and v in pages must have shape"),
    "o transposed": (
        {"o": torch.zeros(3, 1, 4, 32)},
        r"o must be laid out as q, \[B, H, T, D\] = \[3, 4, 1, 32\], got",
    ),
    "two names": ({"block_table": torch.zeros(3, 7)}, "'block_table' and 'page_table' are one thing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    cache = drawn(lengths=(37, 90, 5))
    more, words = REFUSED[case]
    more = {n: cache.q if n == "do" else x for n, x in more.items()}
    with pytest.raises(InputError, match=words):
        cache.capture({**cache.outputs(), **more})


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_wrong_by_name(fault: str, rows: int) -> None:
    """40 seeds each with one row and with four, by hand: all named."""
    captures, words = planted(fault, seed=7 + rows, rows=rows)
    heads = attn_diag.inspect_captures(captures, device="cpu").captures[0].observations[0].heads
    for head in heads:
        if head.verdict is not None:
            assert "wrong" in head.verdict.labels
            assert any(words in p.words for q in head.quantities for p in q.patterns)


def test_replay_takes_each_sequence_by_itself() -> None:
    cache = drawn(rows=2, lengths=(37, 90))
    answer = attn_diag.replay(cache.capture(cache.outputs()), against="fa2")
    assert [c.shape["Tk"] for c in answer.captures] == [37, 90]
    assert [c.shape["item"] for c in answer.captures] == [0, 1]
    assert all(c.cause != "kernel" for c in answer.captures)
    many = drawn(lengths=(16,) * 9)
    with pytest.raises(InputError, match=r"9 packed or paged sequences.*--batch 0-3"):
        attn_diag.replay(many.capture(many.outputs()), against="fa2")


def test_check_refuses_it_by_name() -> None:
    cache = drawn(rows=2, lengths=(37, 90))
    with pytest.raises(InputError, match="check knows no page_table"):
        attn_diag.check("fa2", captures=[cache.capture(cache.outputs())])


def test_ranks_with_other_heads_become_one_and_with_other_sequences_do_not() -> None:
    def ranked(t: dict[str, Tensor], rank: int, **metadata: Any) -> Capture:
        extra = {"run": "a", "module": "attn", "call": "0"}
        return Capture.from_tensors(t, causal="bottom-right", layer=0, step=1, rank=rank, extra=extra, **metadata)

    cache = drawn(rows=2, lengths=(37, 90))
    t, outputs, halves = cache.tensors(), cache.outputs(), list[Capture]()
    for rank, part in enumerate((slice(0, 2), slice(2, 4))):
        own = {**t, "q": t["q"][:, part], **{n: x[:, part] for n, x in outputs.items()}}
        own |= {n: t[n][:, :, rank : rank + 1] for n in ("k", "v")}
        halves.append(ranked(own, rank, head_offset=2 * rank))
    (whole,), _ = merged_over_ranks(halves)
    assert found(whole) == found(cache.capture(outputs, layer=0))
    others = [drawn(seed, lengths=(37, 90)) for seed in (1, 2)]
    left, said = merged_over_ranks([ranked({**c.tensors(), **c.outputs()}, r) for r, c in enumerate(others)])
    assert len(left) == 2
    assert any("page_table" in words or "cache_seqlens" in words for words in said), said
