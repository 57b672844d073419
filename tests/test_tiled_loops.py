"""FlashAttention-2 written out in plain torch: what such a loop keeps in 16 bits is told by ``inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import attn_diag
from attn_diag.reports.opening import next_command
from attn_diag.results.quality import QuantityVerdict


def inputs(dtype: torch.dtype, seed: int, t: int = 160, d: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, t, d, generator=generator).to(dtype) for _ in range(4)]


def loop(
    q: Tensor, k: Tensor, v: Tensor, *, wide_scores: bool, wide_max: bool, wide_sum: bool, wide_out: bool,
    causal: bool = False, rows: int = 32, tile: int = 32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O and L as a student's FlashAttention-2 makes them; what is not ``wide`` has q's dtype."""
    t, d = q.shape[-2:]
    kept = {True: torch.float32, False: q.dtype}
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1], dtype=kept[wide_sum])
    for i in range(0, t, rows):
        some = slice(i, i + rows)
        o = torch.zeros(q[..., some, :].shape, dtype=kept[wide_out])
        total, m = (
            torch.full((*o.shape[:-1], 1), x, dtype=kept[w]) for x, w in ((0.0, wide_sum), (-torch.inf, wide_max))
        )
        for j in range(0, min(t, i + rows) if causal else t, tile):
            keys = slice(j, j + tile)
            operands = q[..., some, :], k[..., keys, :].mT
            s = torch.matmul(*(x.float() if wide_scores else x for x in operands)) * d**-0.5
            if causal:
                places = torch.arange(t)
                s = s.masked_fill(places[some, None] < places[None, keys], -torch.inf)
            largest = torch.maximum(m, s.amax(-1, keepdim=True).to(m.dtype))
            p, rescale = (s - largest).exp(), (m - largest).exp()
            total = (rescale * total + p.sum(-1, keepdim=True)).to(total.dtype)
            o = (rescale * o + p.to(v.dtype) @ v[..., keys, :]).to(o.dtype)
            m = largest
        out[..., some, :] = (o / total).to(out.dtype)
        lse[..., some] = (m + total.log())[..., 0]
    return out, lse


def judged(q: Tensor, k: Tensor, v: Tensor, **outputs: Any) -> list[dict[str, QuantityVerdict]]:
    found = attn_diag.inspect(q, k, v, device="cpu", **outputs)
    heads = found.captures[0].observations[0].heads
    return [{one.quantity: one for one in head.quantities} for head in heads if head.head is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("wide", "causal", "said"),
    [
        ((), False, "scores, row sum, PV of a range, O's accumulator"),
        ((), True, "scores, row sum, PV of a range, O's accumulator"),
        (("wide_scores", "wide_max", "wide_sum"), False, "PV of a range, O's accumulator"),
        (("wide_scores",), True, "maximum, row sum, PV of a range, O's accumulator"),
        (("wide_max", "wide_sum", "wide_out"), False, "scores, PV of a range"),
    ],
    ids=["all", "all, causal", "O", "m, l and O", "S"],
)
def test_what_a_loop_keeps_in_16_bits_is_named(
    dtype: torch.dtype, wide: tuple[str, ...], causal: bool, said: str
) -> None:
    q, k, v, _ = inputs(dtype, 5)
    chosen = {name: name in wide for name in ("wide_scores", "wide_max", "wide_sum", "wide_out")}
    o, _ = loop(q, k, v, causal=causal, **chosen)
    fmt = "BF16" if dtype == torch.bfloat16 else "FP16"
    for head in judged(q, k, v, o=o, causal=causal):
        assert head["o"].answer == "lossy"
        assert head["o"].site == f"{said} in {fmt}"


def of_kernel(q: Tensor, k: Tensor, v: Tensor, *coarse: str, causal: bool, tile: int) -> Tensor:
    """O of a kernel on tensor cores, which hand sums over in fp32; of what is ``coarse``, kept in q's dtype."""
    t, d = q.shape[-2:]
    m, total = (torch.full((*q.shape[:-1], 1), x) for x in (-torch.inf, 0.0))
    o = torch.zeros(q.shape)

    def kept(name: str, x: Tensor) -> Tensor:
        return x.to(q.dtype).float() if name in coarse else x

    for j in range(0, t, tile):
        s = kept("S", q.float() @ k[..., j : j + tile, :].float().mT * d**-0.5)
        if causal:
            s = s.masked_fill(torch.arange(t)[:, None] < torch.arange(j, min(j + tile, t)), -torch.inf)
        largest = torch.maximum(m, kept("m", s.amax(-1, keepdim=True)))
        p, rescale = kept("S - m", s - largest).exp(), (m - largest).exp()
        total = kept("l", rescale * total + p.sum(-1, keepdim=True))
        o = kept("O", rescale * o + p.to(v.dtype).float() @ v[..., j : j + tile, :].float())
        m = largest
    if "1 / l" in coarse:
        return (o * kept("1 / l", 1 / total)).to(q.dtype)
    return (o / kept("last l", total)).to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("coarse", "said"),
    [
        (("O",), "O's accumulator"),
        (("m",), "maximum"),
        (("S - m",), "S - m"),
        (("last l",), "row sum"),
        (("1 / l",), "1 / row sum"),
        (("m", "l", "O"), "maximum, row sum, O's accumulator"),
        (("S", "O"), "scores, O's accumulator"),
        ((), None),
    ],
)
def test_what_a_kernel_keeps_in_16_bits_is_named(dtype: torch.dtype, coarse: tuple[str, ...], said: str | None) -> None:
    """These had no name: a recipe rounds the accumulator twice a tile, and plain torch P V."""
    q, k, v, _ = inputs(dtype, 9, d=128)
    q, causal = (q, False) if coarse == ("S - m",) else (4 * q, len(coarse) % 2 == 1)
    o = of_kernel(q, k, v, *coarse, causal=causal, tile=64)
    fmt = "BF16" if dtype == torch.bfloat16 else "FP16"
    for head in judged(q, k, v, o=o, causal=causal):
        assert (head["o"].answer == "good") == (said is None)
        assert head["o"].site == (said and f"{said} in {fmt}")


@pytest.mark.parametrize("coarse", [("O",), ("last l",), ("1 / l",)])
def test_identify_accuses_no_rows_of_a_kernel_that_rounds_once_a_tile(coarse: tuple[str, ...]) -> None:
    """'rounds otherwise in rows 77-127, too many in one place to be chance', against a recipe that rounds twice."""
    q, k, v, _ = inputs(torch.bfloat16, 80, t=128)
    found = attn_diag.identify(q, k, v, o=of_kernel(q, k, v, *coarse, causal=True, tile=64), causal=True, device="cpu")
    said = {"O": "O's accumulator", "last l": "row sum", "1 / l": "1 / row sum"}[coarse[0]]
    loop = f"a loop over 64-key tiles, ascending, with {said} in BF16"
    assert (found.outcome, found.flaw, found.loop) == ("unnamed", None, loop)
    assert found.verdict.startswith(f"No recipe known here, but {loop}, has these bits.")


def test_attribute_and_what_if_know_the_loop_that_inspect_names() -> None:
    """They called the nearest recipe, with 91 % of the bits."""
    q, k, v, do = inputs(torch.bfloat16, 80, t=128)
    call: Any = {"o": of_kernel(q, k, v, "O", causal=True, tile=64), "do": do, "causal": True, "device": "cpu"}
    said = "its bits are those of a loop over 64-key tiles, ascending, with O's accumulator in BF16, where fa2 keeps"
    for head in attn_diag.attribute(q, k, v, **call).heads:
        assert said in head.unfit
        assert head.reasons[0].startswith(head.unfit)
    assert said in attn_diag.what_if(q, k, v, only=["uncast-ds"], **call).unfit


def test_what_is_next_is_no_command_that_does_not_know_the_loop(tmp_path: Path) -> None:
    q, k, v, _ = inputs(torch.bfloat16, 9, t=256)
    tensors = {"q": q, "k": k, "v": v, "o": of_kernel(q, k, v, "O", causal=True, tile=64)}
    save_file(tensors, tmp_path / "loop.safetensors")
    found = attn_diag.inspect(tmp_path / "loop.safetensors", causal="top-left", device="cpu")
    command = next_command(found)
    assert command.said.startswith("attn-diag replay ")
    assert command.purpose == "make O's accumulator in fp32; or see which kernels do better on these inputs"


def test_an_undecided_head_whose_rounding_is_known_is_told_what_to_do() -> None:
    q, k, v, _ = inputs(torch.bfloat16, 0, t=512)
    o = of_kernel(q, k, v, "1 / l", causal=True, tile=128)
    found = attn_diag.inspect(q, k, v, o=o, causal=True, device="cpu")
    for verdict in (one.verdict for one in found.captures[0].observations[0].heads if one.head is not None):
        assert verdict is not None
        assert verdict.labels == ("undecided",)
        assert verdict.suggestions[0].startswith("The rounding is known, and named with the head")


def test_another_heads_error_is_not() -> None:
    q, k, v, _ = inputs(torch.bfloat16, 6)
    o, _ = loop(q, k, v, wide_scores=True, wide_max=True, wide_sum=True, wide_out=False)
    generator = torch.Generator().manual_seed(0)
    truth = (q.double() @ k.double().mT / 8).softmax(-1) @ v.double()
    o[:, 1] = (truth * (1 + 0.004 * torch.randn(1, 2, 160, 1, generator=generator)))[:, 1].to(o.dtype)
    first, second = judged(q, k, v, o=o)
    assert first["o"].site is not None
    assert (second["o"].answer, second["o"].site) == ("lossy", None)


@pytest.mark.parametrize("shows", ["nothing", "zeros", "another"])
def test_a_first_head_that_does_not_show_it_hides_no_rounding(shows: str) -> None:
    """Its O was that of a well-rounded kernel, had no recipe's bits, or another one's, and no other head was asked."""
    q, k, v, _ = inputs(torch.float16, 5)
    if shows == "nothing":
        q[:, 0], v[:, 0] = 0, 1
    o, _ = loop(q, k, v, wide_scores=True, wide_max=True, wide_sum=True, wide_out=False)
    if shows == "zeros":
        o[:, 0] = 0
    if shows == "another":
        o[:, 0] = loop(q, k, v, wide_scores=False, wide_max=True, wide_sum=True, wide_out=True)[0][:, 0]
    first, second = judged(q, k, v, o=o)
    told = {"nothing": ("good", None), "zeros": ("wrong", None), "another": ("lossy", "scores, PV of a range in FP16")}
    assert (first["o"].answer, first["o"].site) == told[shows]
    assert second["o"].site == "PV of a range, O's accumulator in FP16"


def test_a_backwards_own_l_stays_named_beside_it() -> None:
    """O's own rounding took the name of dQ's, dK's and dV's away."""
    q, k, v, do = inputs(torch.bfloat16, 7)
    o, lse = loop(q, k, v, wide_scores=True, wide_max=True, wide_sum=True, wide_out=False)
    p = (q.float() @ k.float().mT / 8 - lse[..., None].to(q.dtype).float()).exp()
    delta = (do.float() * o.float()).sum(-1, keepdim=True)
    ds = (p * (do.float() @ v.float().mT - delta)).to(q.dtype).float()
    dq, dk, dv = ds @ k.float() / 8, ds.mT @ q.float() / 8, p.to(q.dtype).float().mT @ do.float()
    for head in judged(q, k, v, o=o, do=do, dq=dq.to(q.dtype), dk=dk.to(q.dtype), dv=dv.to(q.dtype)):
        assert head["o"].site == "PV of a range, O's accumulator in BF16"
        assert {name: head[name].site for name in ("dq", "dk", "dv")} == {"dq": "lse", "dk": "lse", "dv": "lse"}


def backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor, o: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """In plain torch, each step in the operands' dtype."""
    p = (q @ k.mT * q.shape[-1] ** -0.5 - lse[..., None]).exp().to(q.dtype)
    ds = (p * (do @ v.mT - (do * o).sum(-1, keepdim=True))).to(q.dtype)
    return {"dq": ds @ k * q.shape[-1] ** -0.5, "dk": ds.mT @ q * q.shape[-1] ** -0.5, "dv": p.mT @ do, "do": do}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_its_backward_makes_p_of_is_named(dtype: torch.dtype) -> None:
    """L is off by what l is, too, which took the name away from most."""
    q, k, v, do = inputs(dtype, 8)
    o, lse = loop(q, k, v, wide_scores=False, wide_max=False, wide_sum=False, wide_out=False)
    found = backward(q, k, v, do, o, lse)
    for head in judged(q, k, v, o=o, **found):
        assert {name: head[name].site for name in ("dq", "dk", "dv")} == dict.fromkeys(("dq", "dk", "dv"), "lse_steps")
    found["dq"][:, :, 77] *= 0.8
    for head in judged(q, k, v, o=o, **found):
        assert head["dq"].site is None
        assert head["dk"].site == "lse_steps"


def test_a_key_that_its_rounded_l_puts_off_is_not_wrong() -> None:
    """'dV is 0.236 % off, which no rounding makes' was said of one key of a head of large scores."""
    generator = torch.Generator().manual_seed(571)
    q, k, v, do = ((x * torch.randn(1, 2, 256, 64, generator=generator)).half() for x in (4, 1, 1, 1))
    narrow = dict.fromkeys(("wide_scores", "wide_max", "wide_sum", "wide_out"), False)
    o, lse = loop(q, k, v, causal=True, rows=64, tile=64, **narrow)
    later = torch.ones(256, 256, dtype=torch.bool).triu(1)
    p = ((q @ k.mT / 8).masked_fill(later, -torch.inf) - lse[..., None]).exp()
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    found = {"do": do, "dq": ds @ k / 8, "dk": ds.mT @ q / 8, "dv": p.mT @ do}
    for head in judged(q, k, v, o=o, causal=True, **found):
        assert {one.answer for one in head.values()} == {"lossy"}
