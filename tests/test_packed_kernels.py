"""Packed sequences in the Triton kernels: every document as if it were alone, bit for bit; on a GPU or interpreted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from builders import some
from torch import Tensor
from torch.library import opcheck

import attn_diag
from attn_diag.kernels import Recipe, Schedule, preset
from attn_diag.kernels.attention import attention
from attn_diag.kernels.backend import BackendError
from attn_diag.kernels.triton_sequences import Sequences
from attn_diag.reference import AttentionHead, Masking, format_of, reference_head, round_nearest_even

# Interpreted, numpy says so where inputs hold infinities; a GPU does not.
quiet = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN)( slice)? encountered:RuntimeWarning")

FA2 = preset("fa2")
# Queries and keys of every document: none of either, one token, whole and broken tiles.
LENGTHS = [(20, 66), (0, 5), (7, 0), (1, 1), (0, 0), (70, 70)]
# Rows behind the last document.
BEHIND = (9, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "top-left": {"causal": "top-left"},
    "bottom-right": {"causal": "bottom-right"},
    "window": {"window": (9, 3)},
    "causal window": {"causal": "bottom-right", "window": (12, -1)},
    "softcap": {"causal": "top-left", "softcap": 2.0},
}
RECIPES: dict[str, Recipe] = {
    **{name: preset(name) for name in ("cudnn", "qiu2025", "efficient", "delta-fp32", "delta-from-dp")},
    "diagonal-first": replace(FA2, schedule=Schedule(order="diagonal-first", query_block=64, key_tile=64)),
    "gradients in BF16": replace(preset("qiu2025"), schedule=Schedule(query_block=128, key_tile=64)),
}


class Packed:
    """q, k, v and dO of some documents in one tensor, [1, H, total, D], with rows behind the last."""

    def __init__(self, lengths: list[tuple[int, int]], device: str, *, dim: int = 16, heads: int = 1, k_heads: int = 1,
                 dtype: torch.dtype = torch.bfloat16) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        self.lengths = lengths
        sums = torch.tensor([(0, 0), *lengths]).cumsum(0).T.int()
        self.cu_q, self.cu_k = (cu.contiguous().to(device) for cu in sums)
        total, k_total = (int(cu[-1]) + more for cu, more in zip(sums, BEHIND, strict=True))

        def normal(heads: int, rows: int) -> Tensor:
            return torch.randn(1, heads, rows, dim, generator=generator).to(device, dtype)

        self.q, self.do = normal(heads, total), normal(heads, total)
        self.k, self.v = normal(k_heads, k_total), normal(k_heads, k_total)
        self.slopes = (torch.rand(len(lengths), heads, generator=generator) / 4).to(device)
        self.sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])[:heads].to(device)

    def rows(self, document: int) -> tuple[slice, slice]:
        """Of q and of k."""
        (t, s) = (slice(*cu[document : document + 2].tolist()) for cu in (self.cu_q, self.cu_k))
        return t, s

    def run(self, **more: Any) -> list[Tensor]:
        """O, L, dQ, dK, dV (dSinks) of all documents together."""
        return run((self.q, self.k, self.v), self.do, cu_seqlens_q=self.cu_q, cu_seqlens_k=self.cu_k, **more)

    def alone(self, document: int, **more: Any) -> list[Tensor]:
        """The same of one document."""
        t, s = self.rows(document)
        if more.get("alibi_slopes") is not None:
            more["alibi_slopes"] = self.slopes[document]
        return run((self.q[:, :, t], self.k[:, :, s], self.v[:, :, s]), self.do[:, :, t], **more)


def run(tensors: tuple[Tensor, ...], do: Tensor, **more: Any) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out, dump = attention(*leaves, instrument="rows", **more)
    return [out.detach(), dump.lse, *torch.autograd.grad(out, leaves, do)]


def check(packed: Packed, **more: Any) -> None:
    """Each document has the bits that it has alone; there is nothing where there are no rows or keys."""
    o, lse, *gradients = packed.run(**more)
    for i, (rows, keys) in enumerate(packed.lengths):
        t, s = packed.rows(i)
        parts = [o[:, :, t], lse[:, :, t], gradients[0][:, :, t], gradients[1][:, :, s], gradients[2][:, :, s]]
        if rows and keys:
            for name, mine, theirs in zip(("o", "lse", "dq", "dk", "dv"), parts, packed.alone(i, **more), strict=True):
                assert torch.equal(mine, theirs), (name, i)
        else:
            assert all(not x.any() for x in (parts[0], *parts[2:]))
    for tensor, cu in zip((o, *gradients), (packed.cu_q, packed.cu_q, packed.cu_k, packed.cu_k), strict=True):
        assert not tensor[:, :, int(cu[-1]) :].any()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_document_has_the_bits_that_it_has_alone(name: str, device: str) -> None:
    check(Packed(LENGTHS, device), **OPTIONS[name])


@pytest.mark.usefixtures("poisoned")
def test_decoding_with_heads_of_a_group_side_by_side(device: str) -> None:
    few = [(1, 66), (0, 5), (3, 70)]
    check(Packed(few, device, heads=4, k_heads=2), causal="bottom-right")


@pytest.mark.usefixtures("poisoned")
def test_with_slopes_and_sinks(device: str) -> None:
    packed = Packed(LENGTHS, device, heads=2)
    check(packed, causal="bottom-right", alibi_slopes=packed.slopes)
    # These are not divided by the scale first. Interpreted, a number read from behind them overflows,
    # which is an error.
    slopes = torch.cat([packed.slopes, torch.full_like(packed.slopes[:1], 3e38)])[:-1]
    packed.run(causal="bottom-right", alibi_slopes=slopes, recipe=replace(FA2, alpha="after-rounding"))
    short = Packed(LENGTHS[:3], device, heads=2)
    t, _ = short.rows(0)
    for mine, theirs in zip(*(f(sinks=short.sinks)[:3] for f in (short.run, partial(short.alone, 0))), strict=True):
        assert torch.equal(mine[:, :, t], theirs)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe(name: str, device: str) -> None:
    check(Packed([(70, 70), (3, 3), (40, 130)], device), causal="top-left", recipe=RECIPES[name])


MIXED = [(1500, 1500), (0, 3), (1, 1), (333, 333), (64, 64), (5, 0), (128, 700), (1023, 1025), (2, 129), (256, 256)]


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("dim", "name"),
    [(64, name) for name in OPTIONS] + [(128, "full"), (128, "window"), (80, "bottom-right"), (256, "top-left")],
)
def test_long_documents(name: str, dim: int, device: str) -> None:
    packed = Packed(MIXED, device, dim=dim, heads=4, k_heads=2)
    check(packed, **OPTIONS[name])
    check(packed, alibi_slopes=packed.slopes, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", RECIPES)
def test_long_documents_of_every_recipe(name: str, device: str) -> None:
    check(Packed(MIXED, device, dim=64, heads=2), causal="bottom-right", recipe=RECIPES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_documents(dtype: torch.dtype, device: str) -> None:
    lengths = torch.randint(0, 90, (1500,), generator=torch.Generator().manual_seed(1)).tolist()
    packed = Packed([(n, n) for n in lengths], device, dim=64, dtype=dtype)
    o, _, *gradients = packed.run(causal="top-left")
    for i in range(0, 1500, 37):
        t, _ = packed.rows(i)
        if lengths[i]:
            found = packed.alone(i, causal="top-left")
            assert all(torch.equal(a[:, :, t], b) for a, b in zip((o, *gradients), (found[0], *found[2:]), strict=True))


def test_more_documents_than_are_read_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequences, "_at_once", 4)
    packed = Packed([(1, 1)] * 11, device)
    out = attention(packed.q, packed.k, packed.v, cu_seqlens_q=packed.cu_q)
    assert torch.equal(out[:, :, :11], packed.v[:, :, :11])


@quiet
@pytest.mark.parametrize(
    ("dim", "bad", "name"),
    [(16, torch.nan, "full"), (16, torch.inf, "bottom-right"), (16, torch.nan, "window")]
    + [
        pytest.param(dim, bad, name, marks=pytest.mark.gpu)
        for dim, bad in ((64, torch.nan), (128, torch.inf))
        for name in ("full", "window", "softcap")
    ],
)
def test_what_a_neighbour_holds_changes_no_bit(name: str, bad: float, dim: int, device: str) -> None:
    lengths = LENGTHS if dim == 16 else MIXED
    packed = Packed(lengths, device, dim=dim)
    before = packed.run(**OPTIONS[name])
    for i in (0, len(lengths) - 1):
        spoilt = Packed(lengths, device, dim=dim)
        t, s = packed.rows(i)
        for tensor, kept in ((spoilt.q, t), (spoilt.do, t), (spoilt.k, s), (spoilt.v, s)):
            whole = tensor.clone()
            tensor.fill_(bad)
            tensor[:, :, kept] = whole[:, :, kept]
        after = spoilt.run(**OPTIONS[name])
        for mine, theirs, kept in zip(before, after, (t, t, t, s, s), strict=True):
            assert torch.equal(mine[:, :, kept], theirs[:, :, kept])


def test_gradients_agree_with_float64(device: str) -> None:
    packed = Packed([(40, 40), (21, 33)], device)
    o, _, *gradients = packed.run(causal="bottom-right")
    for i in range(2):
        t, s = packed.rows(i)
        q, k, v, do = (
            x[0, 0, at].cpu().double()
            for x, at in ((packed.q, t), (packed.k, s), (packed.v, s), (packed.do, t))
        )  # fmt: skip
        truth = reference_head(AttentionHead(q, k, v, do, 16**-0.5, Masking("bottom-right")))
        for x, at, exact in zip((o, *gradients), (t, t, s, s), (truth.out, truth.dq, truth.dk, truth.dv), strict=True):
            rounding = round_nearest_even(some(exact), format_of(torch.bfloat16)) - some(exact)
            # P, dS and O are rounded once each on the way, the result at the end.
            assert (x[0, 0, at].cpu().double() - some(exact)).norm() <= 4 * rounding.norm()


def test_layouts_of_varlen_functions(device: str) -> None:
    packed = Packed([(40, 40), (9, 9)], device, heads=2)
    borders = {"cu_seqlens_q": packed.cu_q, "cu_seqlens_k": packed.cu_k}
    q, k, v = (t.detach().requires_grad_() for t in (packed.q, packed.k, packed.v))
    out = attention(q, k, v, causal="top-left", **borders)
    tokens = attention(*(t[0].transpose(0, 1) for t in (q, k, v)), causal="top-left", **borders)  # [total, H, D]
    assert torch.equal(tokens, out[0].transpose(0, 1))
    again = attention(*(t.transpose(1, 2) for t in (q, k, v)), causal="top-left", layout="BTHD", **borders)
    assert torch.equal(again, out.transpose(1, 2))
    a, b = (torch.autograd.grad(o.float().square().sum(), q)[0] for o in (out, tokens))
    assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["fa2", "qiu2025"])
def test_a_dump_of_documents_is_that_of_each(recipe: str, device: str) -> None:
    packed = Packed(LENGTHS, device)
    more: dict[str, Any] = {"causal": "bottom-right", "recipe": recipe, "instrument": "full"}
    borders = {"cu_seqlens_q": packed.cu_q, "cu_seqlens_k": packed.cu_k}
    q = packed.q.requires_grad_()
    out, dump = attention(q, packed.k, packed.v, **borders, **more)
    out.backward(packed.do)
    total, k_total = q.shape[2], packed.k.shape[2]
    seen = dump.visible.view(1, total, k_total)
    assert not seen[:, int(packed.cu_q[-1]) :].any()
    for i, (rows, keys) in enumerate(LENGTHS):
        t, s = packed.rows(i)
        assert int(seen[:, t].sum()) == int(seen[:, t, s].sum())
        if not rows or not keys:
            continue
        alone = q[:, :, t].detach().requires_grad_()
        o, one = attention(alone, packed.k[:, :, s], packed.v[:, :, s], **more)
        o.backward(packed.do[:, :, t])
        for name in ("scores", "probs"):
            mine = getattr(dump, name).view(1, total, k_total)[:, t, s]
            assert torch.equal(mine.reshape(-1, keys), getattr(one, name)), name
        for name in ("dprobs", "dscores"):
            mine, theirs = getattr(dump, name).view(1, total, k_total)[:, t, s].reshape(-1, keys), getattr(one, name)
            assert torch.equal(mine[one.visible], theirs[one.visible]), name
        for name in ("row_max", "row_sum", "delta"):
            assert torch.equal(getattr(dump, name)[:, :, t], getattr(one, name)), name
        # A sum over the features, of two kernels: the compiler may fuse O's last product into it in one of them.
        assert torch.allclose(dump.out_rounding[:, :, t], one.out_rounding, rtol=0, atol=1e-6)
        for definition in ("exact", "as_run", "window", "unit"):
            assert torch.equal(dump.multiplicity(definition)[:, :, t], one.multiplicity(definition))


@pytest.mark.parametrize("tokens", [False, True])
def test_a_dump_of_documents_is_inspected(tokens: bool, device: str) -> None:
    packed = Packed([(40, 40), (1, 1), (9, 30)], device)
    q, k, v, do = ((t[0].transpose(0, 1) if tokens else t) for t in (packed.q, packed.k, packed.v, packed.do))
    more: dict[str, Any] = {"cu_seqlens_q": packed.cu_q, "cu_seqlens_k": packed.cu_k, "alibi_slopes": packed.slopes}
    _, dump = attention(q, k, v, causal="bottom-right", instrument="rows", **more)

    def answers() -> set[str]:
        (observation,) = attn_diag.inspect(q, k, v, do=do, dump=dump, device="cpu").captures[0].observations
        return {label for head in observation.heads for label in some(head.verdict).labels}

    assert answers() == {"clean"}
    # Without the bias, or with the borders elsewhere, it is another attention.
    for name, other in (("alibi_slopes", None), ("cu_seqlens_k", packed.cu_k - (packed.cu_k == 40).int())):
        setattr(dump, name, other)
        assert "wrong" in answers()
        setattr(dump, name, more[name])


def test_opcheck_and_one_graph(device: str) -> None:
    packed = Packed([(5, 5), (3, 2)], device)
    q, k, v = (t.requires_grad_() for t in (packed.q, packed.k, packed.v))
    arguments = (FA2.json, FA2.json, "top-left", -1, -1, 0.25, None, "none", 0)
    sequences = (packed.slopes, packed.cu_q, packed.cu_k)
    # Under compilation it runs below.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    given: tuple[Any, ...] = (q, k, v, None, 0, *arguments, packed.sinks, *sequences)
    opcheck(torch.ops.attn_diag.attention_forward.default, given, test_utils=tests)
    lse = torch.ones(q.shape[:3], device=device)
    given = (*(t.detach() for t in (q, k, v, q)), lse, packed.do, None, 0, *arguments, *sequences)
    opcheck(torch.ops.attn_diag.attention_backward.default, given, test_utils=tests)

    def work(q: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return attention(q * 2, k, v, causal="top-left", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    found = [f(q, packed.cu_q, packed.cu_k) for f in (compiled, work)]
    assert torch.equal(*found)
    assert torch.equal(*(torch.autograd.grad(o.float().square().sum(), q)[0] for o in found))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_host_synchronisation(device: str) -> None:
    packed = Packed(MIXED, device, dim=64)
    packed.run(causal="top-left", alibi_slopes=packed.slopes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed.run(causal="top-left", alibi_slopes=packed.slopes)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_cannot_be_is_refused(device: str) -> None:
    packed = Packed([(20, 20), (9, 5)], device)
    q, k, v, cu_q, cu_k = packed.q, packed.k, packed.v, packed.cu_q, packed.cu_k
    with pytest.raises(ValueError, match="packed q, k and v must have shape"):
        attention(*(t.repeat(2, 1, 1, 1) for t in (q, k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    with pytest.raises(ValueError, match=r"must have shape \[documents \+ 1\], got cu_seqlens_q \[3\]"):
        attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k[:2])
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32"):
        attention(q, k, v, cu_seqlens_q=cu_q.float(), cu_seqlens_k=cu_k)
    with pytest.raises(ValueError, match="cu_seqlens_k needs cu_seqlens_q"):
        attention(q, k, v, cu_seqlens_k=cu_k)
    with pytest.raises(BackendError, match="cu_seqlens_k must be where q is"):
        attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k.to("meta"))
    with pytest.raises(ValueError, match=r"packed: \[documents, Hq\]\) = \[2, 1\]"):
        attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, alibi_slopes=packed.slopes.repeat(2, 1))
    if device == "cpu":
        with pytest.raises(ValueError, match="cu_seqlens_k must begin at 0, not fall, and end at 28"):
            attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k + 10)
