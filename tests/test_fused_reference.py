"""The fused float64 kernels, interpreted or on a GPU, against the streamed reference, dense products and the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from bench_certificate import FAMILIES, checked_rows, moved
from builders import some
from test_reference import CASES, TOLERANCE, Case, additive, make_head
from torch import Tensor
from triton.runtime.errors import TritonError

import attn_diag.kernels.triton_interpreter  # noqa: F401  # mended: the reference imports no kernels
from attn_diag.reference import (
    Alibi,
    AttentionHead,
    BoundCollector,
    Dropout,
    HeadBounds,
    HeadReference,
    Masking,
    fused_inputs,
    fused_launches,
    reference_head,
    reference_rows,
    round_nearest_even,
    row_blocks,
)
from attn_diag.reference.certify import check_rows
from attn_diag.reference.fused import KEPT_SCORES, SWITCH, FusedHeads, fuses
from attn_diag.reference.fused_inputs import dealt_over
from attn_diag.reference.fused_products import FusedRows, KeyProduct, TileWeight, Weight
from attn_diag.reference.heads import batches
from attn_diag.reference.rounding import format_of
from attn_diag.reference.triton_attention import forward_kernel

pytestmark = pytest.mark.slow

OUTPUTS = ("row_max", "row_sum", "unnormalised_out", "out", "lse", "delta", "dq", "dk", "dv", "dsink")


def wide() -> AttentionHead:
    """More features than one product takes at once, another number of V's."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, do = (torch.randn(24, d, generator=generator).double() for d in (200, 200, 130, 130))
    return AttentionHead(q, k, v, do, 0.07, Masking("top-left"))


def alibi(origin: Any, causal: Any = "top-left") -> AttentionHead:
    return replace(make_head(Case(63, 63, 16, Masking())), masking=Masking(causal, alibi=Alibi(0.25, origin)))


# What is larger only takes longer.
SHOWN = {name: case for name, case in CASES.items() if name not in ("square-333", "longer-queries")}
HEADS: dict[str, Callable[[], AttentionHead]] = {name: partial(make_head, case) for name, case in SHOWN.items()}
HEADS |= {
    "sink": lambda: replace(make_head(CASES["square-63"]), sink=0.7),
    "sink-without-keys": lambda: replace(make_head(Case(63, 40, 16, Masking("bottom-right"))), sink=-1.5),
    "alibi": lambda: alibi("row"),
    "alibi-first-key": lambda: alibi("first-key"),
    "alibi-last-key": lambda: alibi("last-key", "none"),
    "bf16-mask": lambda: make_head(Case(63, 77, 32, Masking(mask=additive(63, 77).bfloat16()))),
    "expanded-rows": lambda: make_head(Case(40, 77, 16, Masking(mask=additive(40, 77)[3].expand(40, 77)))),
    "expanded-keys": lambda: make_head(Case(40, 50, 16, Masking(mask=(additive(40, 50)[:, 1:2] > 0).expand(40, 50)))),
    "wide": wide,
    "one-row": lambda: make_head(Case(1, 77, 16, Masking("bottom-right"))),
}


def on(device: str, head: AttentionHead) -> AttentionHead:
    masking, placed = head.masking, moved(head, device)
    return replace(placed, sink=head.sink, masking=replace(masking, mask=placed.masking.mask))


def apart(one: Tensor, other: Tensor) -> float:
    """Normwise; infinite values must be the same ones."""
    one, other = one.cpu(), other.cpu()
    assert torch.equal(one.isfinite(), other.isfinite())
    assert not one.isnan().any()
    one, other = (t.masked_fill(~t.isfinite(), 0.0) for t in (one, other))
    return float((one - other).norm() / max(float(other.norm()), 1e-300))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.usefixtures("poisoned")
def test_fused_heads_are_the_streamed_ones(name: str, device: str) -> None:
    head = HEADS[name]()
    (found,) = FusedHeads([on(device, head)]).references()
    true = reference_head(head)
    for output in OUTPUTS:
        if (expected := getattr(true, output)) is not None:
            assert apart(getattr(found, output), expected) < TOLERANCE, output


@pytest.mark.parametrize(
    "name", ["square-63", "window-both-ways", "wide", "expanded-rows", "sink-without-keys", "one-row"]
)
@pytest.mark.usefixtures("poisoned")
def test_launches_dealt_out_over_devices_make_the_same_bits(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = torch.cuda.device_count() if device == "cuda" else 3
    if count == 1:
        pytest.skip("needs two CUDA devices")
    # A CPU's first device is the one without a number.
    devices = [torch.device(device, i) for i in range(device == "cpu", count)]
    monkeypatch.setattr(fused_inputs, "_WORTH_DEALING", 0)
    head = on(device, HEADS[name]())
    (alone,) = FusedHeads([head]).references()
    ran, run = list[torch.device](), FusedHeads._run

    def seen(self: FusedHeads, *arguments: Any) -> None:
        ran.append(arguments[4])
        run(self, *arguments)

    monkeypatch.setattr(FusedHeads, "_run", seen)
    with dealt_over(devices):
        fused = FusedHeads([head])
        (dealt,) = fused.references()
        high, once = (one.scores_above(*rows_near(one)) for one in (fused, FusedHeads([head])))
    assert len(set(ran)) == min(count, -(-max(len(head.q), len(head.k)) // 32))
    for output in OUTPUTS:
        if (expected := getattr(alone, output)) is not None:
            assert torch.equal(getattr(dealt, output), expected), output
    assert torch.equal(high.counts, once.counts)


def rows_near(fused: FusedHeads, below: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Every other row of the first head, all of the others: what is ``below`` the maximum at most."""
    tops = fused.forward.row_max
    chosen = tops > -math.inf
    chosen[0, ::2] = False
    heads, rows = chosen.nonzero(as_tuple=True)
    return tops[heads, rows] - below, heads, rows


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.usefixtures("poisoned")
def test_scores_near_the_maximum_are_those_of_the_blocks(name: str, device: str) -> None:
    """Of two heads of one launch; in the second one all keys are the first one, so that not all of them are kept."""
    first = on(device, HEADS[name]())
    second = replace(first, q=first.q.flip(0), k=first.k[:1].expand_as(first.k).contiguous())
    fused = FusedHeads([first, second])
    thresholds, heads, rows = rows_near(fused)
    found = fused.scores_above(thresholds, heads, rows)
    blocks = [next(row_blocks(h, block_rows=len(h.q))) for h in (first, second)]
    for i, (threshold, h, row) in enumerate(zip(thresholds.tolist(), heads.tolist(), rows.tolist(), strict=True)):
        scores = blocks[h].scores[row]
        expected = (scores > threshold).nonzero()[:, 0]
        assert found.counts[i] == len(expected) > 0
        kept = expected[:KEPT_SCORES]
        assert found.keys[i, : len(kept)].tolist() == (kept + blocks[h].keys.start).tolist()
        torch.testing.assert_close(found.scores[i, : len(kept)], scores[kept], rtol=1e-13, atol=1e-13)


def test_heads_of_one_launch_are_those_of_launches_of_their_own(device: str) -> None:
    """Two query heads of one key head, one with other values, and one with other keys; bit for bit."""
    first, other = (on(device, make_head(Case(40, 50, 16, Masking("bottom-right")), seed)) for seed in (0, 1))
    second = replace(first, q=first.q.flip(0), do=some(first.do).flip(1))
    heads = [first, second, replace(first, v=first.v + 1), other]
    together = FusedHeads(heads)
    assert len(together.k) == 3
    for found, head in zip(together.references(), heads, strict=True):
        (alone,) = FusedHeads([head]).references()
        for output in OUTPUTS[:-1]:
            assert torch.equal(getattr(found, output), getattr(alone, output)), output


def test_what_the_rows_tell_beside_their_outputs(device: str) -> None:
    """Equal maxima in two tiles, a maximum that rises, rows that see one key or end in the middle."""
    head = make_head(Case(4, 96, 16, Masking("top-left", positions=torch.tensor([95, 0, 95, 69]))))
    head.k[:, 0], head.q[:, 1:], head.q[:, 0] = 0.0, 0.0, 1.0
    head.k[[10, 40, 70, 71, 80], 0] = torch.tensor([1.0, 3.0, 5.0, 5.0, 4.0], dtype=torch.float64)
    head.q[2] = -head.q[2]
    rows = FusedHeads([on(device, head)]).forward
    assert rows.top_key[0].tolist() == [70, 0, 0, 40]
    assert rows.visible[0].tolist() == [96, 1, 96, 70]
    assert rows.second_max[0].tolist() == [5 * head.scale, -math.inf, 0.0, head.scale]
    assert rows.rises[0].tolist() == [2, 0, 0, 1]


@pytest.mark.parametrize("name", ["square-63", "sink", "softcap", "window"])
def test_sums_that_the_bounds_need_are_those_of_the_blocks(name: str, device: str) -> None:
    head = HEADS[name]()
    fused = FusedHeads([on(device, head)])
    block = next(row_blocks(head, gradient_sums=True, block_rows=len(head.q)))
    squares, size = block.unnormalised_probs.square(), some(block.gradient_sums)
    sloped = squares if block.slope is None else squares * block.slope.square()
    expected = [squares.sum(1), sloped.sum(1), size[1]]
    found = [fused.forward.squares, fused.sloped_squares, fused.gradient_sums[1]]
    for one, other in zip(found, expected, strict=True):
        assert apart(one[0], other) < TOLERANCE
    # What cancels: relative to what was added.
    assert float((fused.gradient_sums[0][0].cpu() - size[0]).abs().max()) < TOLERANCE * float(size[1].max()) * 100


# Products.


def dense(head: AttentionHead, weight: Weight, a: Tensor, b: Tensor, c: Tensor, *, alpha_first: bool) -> Tensor:
    """W, [Tq, Tk], by torch."""
    block = reference_rows(head, torch.arange(len(head.q)))
    p = block.unnormalised_probs
    sloped = p if block.slope is None else p * block.slope
    dscores, seen = some(block.unnormalised_dscores), (p > 0).double()
    fmt = format_of(torch.bfloat16)
    a, b, c = a[:, None], b[:, None], c[:, None]

    def cast(values: Tensor) -> Tensor:
        return round_nearest_even(values.float().double(), fmt)

    moved_by = a * (dscores - b * sloped)
    rounded = cast(moved_by * head.scale) if alpha_first else cast(moved_by) * head.scale
    found = {
        "probs": p, "sloped": sloped, "dscores": dscores, "probs_squared": a * p.square() + b * seen,
        "dscores_squared": a * dscores.square() + b * seen + c * sloped.square(), "probs_cast": cast(a * p),
        "dscores_cast": rounded,
    }[weight]  # fmt: skip
    full = p.new_zeros(len(head.q), len(head.k))
    full[:, block.keys] = found
    return full


@pytest.mark.parametrize("alpha_first", [False, True])
@pytest.mark.parametrize("weight", get_args(Weight))
@pytest.mark.parametrize("name", ["softcap-window", "bool"])
def test_products_are_those_of_dense_weights(name: str, weight: Weight, alpha_first: bool, device: str) -> None:
    if alpha_first and weight != "dscores_cast":
        pytest.skip("alpha is cast with dS alone")
    head = HEADS[name]()
    generator = torch.Generator().manual_seed(5)
    numbers = torch.rand(3, len(head.q), generator=generator, dtype=torch.float64)
    x = torch.randn(len(head.k), 24, generator=generator, dtype=torch.float64)
    y = torch.randn(len(head.q), 40, generator=generator, dtype=torch.float64)
    fused = FusedHeads([on(device, head)])
    a, b, c = (n[None].to(device) for n in numbers)
    chosen = TileWeight(weight, "bf16" if "cast" in weight else "none", alpha_first)
    w = dense(head, weight, *numbers, alpha_first=alpha_first)
    # Another last bit of exp takes a cast over a midpoint: one in millions of elements, and as much as a unit of it.
    tolerance = 1e-4 if "cast" in weight and device != "cpu" else TOLERANCE
    assert apart(fused.rows(chosen, x[None].to(device), a, b, c)[0], w @ x) < tolerance
    assert apart(fused.keys(chosen, y[None].to(device), a, b, c)[0], w.T @ y) < tolerance


@pytest.mark.parametrize("widths", [(16, 16), (24, 40), (80, 80), (160, 24)])
def test_products_made_together_are_those_made_alone(widths: tuple[int, int], device: str) -> None:
    """Of query rows and of keys; features in parts are taken one by one."""
    width, value_width = widths
    head = make_head(Case(40, 50, width, Masking("bottom-right")))
    v, do = (torch.randn(n, value_width, dtype=torch.float64) for n in (50, 40))
    head = on(device, replace(head, v=v, do=do))
    fused, alone = FusedHeads([head]), FusedHeads([head])
    a, b, c = torch.rand(3, 1, 40, dtype=torch.float64, device=device)
    v2, k2 = fused.v.square(), fused.k.square()
    asked: list[tuple[TileWeight, Tensor | None, list[Tensor]]] = [
        (TileWeight("probs_squared"), v2, [a, b]), (TileWeight("dscores"), None, []),
        (TileWeight("dscores_squared"), k2, [b, c, a]), (TileWeight("sloped"), None, []),
        (TileWeight("dscores_cast", "bf16"), None, [a, b]), (TileWeight("dscores_cast", "bf16", True), None, [b, a]),
    ]  # fmt: skip
    together = [fused.ask(weight, x, *numbers) for weight, x, numbers in asked]
    for one, (weight, x, numbers) in zip(together, asked, strict=True):
        assert torch.equal(fused.take(one), alone.rows(weight, x, *numbers)), weight
    assert not torch.equal(fused.take(together[4]), fused.take(together[5]))
    given, q2, do2 = some(fused.do), fused.q.square(), some(fused.do).square()
    of_keys: list[tuple[TileWeight, Tensor, list[Tensor]]] = [
        (TileWeight("probs"), given, []), (TileWeight("dscores"), fused.q, []),
        (TileWeight("dscores_squared"), q2, [b, c, a]), (TileWeight("probs_squared"), do2, [a, b]),
        (TileWeight("dscores_cast", "bf16"), fused.q, [a, b]), (TileWeight("sloped"), 2 * fused.q, []),
        (TileWeight("dscores"), -fused.q, []),
    ]  # fmt: skip
    products = [fused.ask_keys(weight, y, *numbers) for weight, y, numbers in of_keys]
    for product, (weight, y, numbers) in zip(products, of_keys, strict=True):
        assert torch.equal(fused.take_keys(product), alone.keys(weight, y, *numbers)), weight


VARIED: dict[str, dict[str, Any]] = {
    "plain": {}, "softcap": {"softcap": 2.0}, "no-gradient": {"do": None}, "tiny": {"size": 2.0**-30},
    "window": {"masking": Masking("top-left", window=(9, 0))}, "alibi": {"masking": Masking(alibi=Alibi(0.25, "row"))},
    "mask": {"masking": Masking(mask=additive(40, 50))},
    "scattered": {"masking": Masking("top-left", (9, 0), positions=torch.arange(40).flip(0))},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("widths", [(16, 16), (24, 40), (80, 64)])
def test_variances_of_bf16_parts_are_those_of_float64(
    name: str, widths: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two query heads of one key head; rows whose dO is small or 0, features and keys of other sizes."""
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", 0)
    options = dict(VARIED[name])
    size, width, value_width = options.pop("size", 1.0), *widths
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (
        torch.randn(n, d, generator=generator).bfloat16().double()
        for n, d in ((40, width), (50, width), (50, value_width), (40, value_width))
    )
    do *= size
    do[3:6], do[7] = do[3:6] * 2.0**-40, 0.0
    v[:, 3], v[:, 5], k[:, 2] = v[:, 3] * 2.0**-30, 0.0, k[:, 2] * 2.0**-20
    first = on(device, AttentionHead(q, k, v, do, 0.3, options.pop("masking", Masking("bottom-right"))))
    first = replace(first, **options)
    fused = FusedHeads([first, replace(first, q=first.q.flip(0))])
    a, of_out, of_dq, of_delta = torch.rand(4, 2, 40, generator=generator, dtype=torch.float64).to(device)
    of_dq, of_delta = of_dq * size**2, of_delta * size**2
    top, numbers = fused.finite_max, (a, of_out, of_dq)
    found = some(fused.variances(top, fused.delta, *numbers))
    expected = [fused.rows(TileWeight("probs_squared"), fused.v.square(), a, of_out)]
    if first.do is not None:
        expected += [fused.rows(TileWeight("dscores_squared"), fused.k.square(), a, of_dq, torch.zeros_like(a))]
        found += fused.key_variances(top, some(fused.delta), *numbers, of_delta)
        expected += [fused.keys(TileWeight("dscores_squared"), fused.q.square(), a, of_dq, of_delta)]
        expected += [fused.keys(TileWeight("probs_squared"), some(fused.do).square(), a, of_out)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=0.0)
    # What one BF16 number does not hold, and scores whose last bits fp32 loses, are made in float64.
    delta, numbers = None if fused.delta is None else fused.delta[:1], (a[:1], of_out[:1], of_dq[:1])
    assert FusedHeads([replace(first, k=first.k + 2.0**-12)]).variances(top[:1], delta, *numbers) is None
    large = FusedHeads([replace(first, scale=2.0**10, softcap=None)])
    assert large.variances(large.finite_max, delta, *numbers) is None


@pytest.mark.parametrize("low", [-50.0, -100.0, -400.0])
def test_variances_of_keys_that_hardly_count_are_held(low: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys whose P^2 or P fp32 does not hold, in any row; the last rows' dO is 0, and b all that their keys have."""
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", 0)
    generator = torch.Generator().manual_seed(4)
    q, k, v, do = (torch.randn(n, 16, generator=generator).bfloat16().double() for n in (40, 50, 50, 40))
    q[:, 0], k[:, 0], do[30:] = 1.0, 0.0, 0.0
    k[:25, 0] = 4 * low
    head = on(device, AttentionHead(q, k, v, do, 0.25, Masking("bottom-right")))
    fused = FusedHeads([head])
    square, least = fused.inverse.square(), 2.0**-272
    a, of_out, of_dq = square * 2.0**-20, square * least, torch.full_like(square, least)
    of_delta = square * 2.0**-20 * some(fused.do).square().sum(2)
    given = fused.finite_max, some(fused.delta), a, of_out, of_dq
    assert fused.variances(*given) is not None
    expected = (
        fused.keys(TileWeight("dscores_squared"), fused.q.square(), a, of_dq, of_delta),
        fused.keys(TileWeight("probs_squared"), some(fused.do).square(), a, of_out),
    )
    # q.k, S, m and (S - m) log2(e) are rounded to fp32; P is squared.
    tolerance = 2e-5 - 2 * 4 * low * 2.0**-24
    for one, other in zip(fused.key_variances(*given, of_delta), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=0.0)


def in_bf16(head: AttentionHead) -> AttentionHead:
    q, k, v, do = (t.bfloat16().double() for t in (head.q, head.k, head.v, some(head.do)))
    return replace(head, q=q, k=k, v=v, do=do)


def of_widths(width: int, value_width: int) -> AttentionHead:
    generator = torch.Generator().manual_seed(width)
    q, k, v, do = (
        torch.randn(n, d, generator=generator).double()
        for n, d in ((150, width), (170, width), (170, value_width), (150, value_width))
    )
    return AttentionHead(q, k, v, do, 0.11, Masking("bottom-right"))


GLUON = {name: make for name, make in HEADS.items() if make().q.shape[1] in (16, 32, 64)}
GLUON |= {
    f"widths-{a}-{b}": partial(of_widths, a, b)
    for a, b in ((16, 16), (64, 64), (80, 48), (128, 128), (128, 64), (32, 112))
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GLUON)
@pytest.mark.usefixtures("poisoned")
def test_products_in_gluon_are_those_in_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two query heads of one key head: in Triton they are tested above."""
    head = on("cuda", in_bf16(GLUON[name]()))
    heads = [head, replace(head, q=head.q.flip(0))]
    generator = torch.Generator().manual_seed(5)
    a, b, c, times = torch.rand(4, 2, len(head.q), generator=generator, dtype=torch.float64).cuda()

    def made(worth: float) -> tuple[FusedHeads, list[Tensor]]:
        monkeypatch.setattr(fused_inputs, "WORTH_NARROW", worth)
        fused = FusedHeads(heads)
        found: list[Any] = []
        for weight in get_args(Weight):
            chosen = TileWeight(weight, "bf16" if "cast" in weight else "none", alpha_first=weight == "dscores_cast")
            found.append(fused.ask(chosen, None, a, b, c))
            found += [fused.ask_keys(chosen, some(y), a, b, c, times=times) for y in (fused.q, fused.do)]
        taken = [fused.take_keys(x) if isinstance(x, KeyProduct) else fused.take(x) for x in found]
        every = [getattr(one, output) for one in fused.references() for output in ("dq", "dk", "dv")]
        return fused, [*taken, *every, fused.gradient_sums[1]]

    (fused, found), (_, expected) = made(0), made(math.inf)
    assert fused._in_gluon
    for one, other in zip(found, expected, strict=True):
        # What q and dO are times comes at another place; and a cast's last bits may lie elsewhere, see above.
        assert apart(one, other) < 1e-4
    of_gradients = slice(-7, None)
    for one, other in zip(found[of_gradients], expected[of_gradients], strict=True):
        assert apart(one, other) < TOLERANCE
    # Tiles of 32 keys or 64: of one tile the same bits.
    if len(head.k) <= 32:
        assert torch.equal(found[0], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", GLUON)
@pytest.mark.usefixtures("poisoned")
def test_the_forward_in_gluon_is_that_in_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second key that has the largest score."""
    head = on("cuda", in_bf16(GLUON[name]()))
    head.k[1] = head.k[0]
    heads = [head, replace(head, q=head.q.flip(0))]

    def made(worth: float) -> dict[str, Tensor]:
        monkeypatch.setattr(fused_inputs, "WORTH_NARROW", worth)
        fused = FusedHeads(heads)
        assert fused._in_gluon == (worth == 0)
        return vars(fused.forward)

    for of_one, of_other in zip(made(0).items(), made(math.inf).values(), strict=True):
        output, found = of_one
        if output in ("row_sum", "squares"):  # each of four threads sums its own
            assert torch.allclose(found, of_other, rtol=1e-15 * math.sqrt(len(head.k)), atol=0.0)
        else:
            assert torch.equal(found, of_other), output


def test_what_gluon_does_not_compile_is_made_in_triton(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its language changes from one Triton to the next."""
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", math.inf)
    head = on(device, in_bf16(make_head(CASES["square-63"])))
    (expected,) = FusedHeads([head]).references()
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", 0)
    monkeypatch.setattr(fused_launches, "has_gluon", lambda: True)
    refused, tried = list[Exception](), list[str]()
    monkeypatch.setattr(fused_launches, "_REFUSED", refused)

    def failing(*_: object, **__: object) -> None:
        tried.append("gluon")
        raise TritonError

    for name in ("_forward_in_gluon", "_rows_in_gluon", "_keys_in_gluon"):
        monkeypatch.setattr(FusedHeads, name, failing)
    fused = FusedHeads([head])
    (found,) = fused.references()
    assert tried == ["gluon"]
    assert len(refused) == 1
    assert not fused._in_gluon
    refused.clear()
    # More than one launch makes.
    products = [fused.ask(TileWeight("dscores")) for _ in range(3)]
    of_keys = [fused.ask_keys(TileWeight("probs"), some(fused.do)) for _ in range(3)]
    assert torch.equal(fused.take(products[2]), fused.take(products[0]))
    refused.clear()
    assert torch.equal(fused.take_keys(of_keys[2]), fused.take_keys(of_keys[0]))
    assert tried == ["gluon"] * 3
    for output in ("dq", "dk", "dv"):
        assert torch.equal(getattr(found, output), getattr(expected, output))


@pytest.mark.parametrize("wrong", [{}, {"rows": 1e-6}, {"rows": math.nan}, {"products": 1e-6}, {"products": math.nan}])
def test_what_another_gluon_makes_is_looked_at_once(
    wrong: dict[str, float], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Triton with which it was not tested; here the numbers are Triton's, off by so much."""
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", math.inf)
    head = on(device, in_bf16(make_head(CASES["square-63"])))
    (expected,) = FusedHeads([head]).references(key_gradients=False)
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", 0)
    monkeypatch.setattr(fused_launches, "has_gluon", lambda: True)
    monkeypatch.setattr(fused_launches, "_TESTED", "none")
    refused, looked = list[Exception](), set[str]()
    monkeypatch.setattr(fused_launches, "_REFUSED", refused)
    monkeypatch.setattr(fused_launches, "_LOOKED_AT", looked)

    def forward(self: FusedHeads, *, details: bool) -> FusedRows:
        found = self._launch_forward(forward_kernel, self.q, self._tiling("forward", self.v.shape[2], details=details))
        return replace(found, unnormalised_out=found.unnormalised_out * (1 + wrong.get("rows", 0.0)))

    def given(self: FusedHeads, products: Any, *fed: Any) -> None:
        self._rows_in_triton(products, *fed)
        for one in products:
            one.found *= 1 + wrong.get("products", 0.0)

    monkeypatch.setattr(FusedHeads, "_forward_in_gluon", forward)
    monkeypatch.setattr(FusedHeads, "_rows_in_gluon", given)
    for _ in range(2):
        (found,) = FusedHeads([head]).references(key_gradients=False)
        assert torch.equal(found.unnormalised_out, expected.unnormalised_out)
        assert torch.equal(some(found.dq), some(expected.dq))
    assert len(refused) == len(wrong)
    assert looked == {"rows", "products"} - ({"rows", "products"} if "rows" in wrong else set(wrong))


@pytest.mark.parametrize(("value", "rounded"), [(1 + 2.0**-8, 1.0), (1 + 3 * 2.0**-8, 1 + 2.0**-6), (1.5, 1.5)])
def test_casts_break_ties_to_even(value: float, rounded: float, device: str) -> None:
    head = on(device, make_head(Case(2, 2, 16, Masking("top-left"))))
    ones, a = torch.ones(1, 2, 16, dtype=torch.float64, device=device), head.q.new_full((1, 2), value)
    assert FusedHeads([head]).rows(TileWeight("probs_cast", "bf16"), ones, a)[0, 0].tolist() == [rounded] * 16


# The certificate.


def certified(head: AttentionHead) -> tuple[HeadReference, HeadBounds]:
    fused, collector = FusedHeads([head]), BoundCollector(head)
    (reference,) = fused.references(key_gradients=False)
    BoundCollector.take([collector], fused)
    return reference, collector.bounds(reference)


def held(name: str, count: int, device: str, compute: Callable[[AttentionHead], Any] = certified) -> bool:
    rows = [row for _, row, _ in checked_rows(name, count, compute, device)]
    return all(row.held and all(math.isfinite(x.bound) for x in row.outputs.values()) for row in rows)


SMALL = [name for name in FAMILIES if "1024" not in name and "4096" not in name]


@pytest.mark.parametrize("name", SMALL)
def test_certificate_of_the_kernels_is_never_violated(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("compiled kernels are tested below")
    assert held(name, 12, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("worth", [0, math.inf])
@pytest.mark.parametrize("name", FAMILIES)
def test_certificate_of_the_kernels_is_never_violated_on_a_gpu(
    name: str, worth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Gluon, where all numbers are BF16's, and in Triton."""
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", worth)
    assert held(name, 40, "cuda")


def rising(tiles: int = 8) -> AttentionHead:
    """Every tile of keys raises the maximum of every row, by scores that round."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, do = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (8, 32 * tiles, 32 * tiles, 8))
    q[:, 0], k[:, 0] = 1.0, torch.linspace(0, 9, 32 * tiles).double() * 4
    return AttentionHead(q, k, v, do, 1 / 3, Masking())


def test_factors_by_which_a_rising_maximum_rescales_are_counted(device: str) -> None:
    head = on(device, rising())
    assert FusedHeads([head]).forward.rises.float().mean() >= 5
    _, bounds = certified(head)
    fused, collector = FusedHeads([head]), BoundCollector(head)
    object.__setattr__(fused.forward, "rises", torch.zeros_like(fused.forward.rises))
    (reference,) = fused.references(key_gradients=False)
    BoundCollector.take([collector], fused)
    without = collector.bounds(reference)
    assert bool((bounds.lse > without.lse + 5 * 5 * 2.0**-53).all())


def test_tiles_that_a_row_sum_loses_are_counted(device: str) -> None:
    """One key has P_bar = 1; every later tile adds less than half a unit in the last place, and is lost."""
    tiles = 40
    q, k = (torch.zeros(n, 16, dtype=torch.float64) for n in (1, 32 * tiles))
    q[0, 0], k[32:, 0] = 1.0, -40.25
    seen = torch.ones(1, 32 * tiles, dtype=torch.bool)
    seen[0, 1:32] = False
    head = AttentionHead(q, k, k.clone(), torch.ones(1, 16, dtype=torch.float64), 1.0, Masking(mask=seen))
    reference, bounds = certified(on(device, head))
    assert float(reference.row_sum) == 1.0
    (row,) = check_rows(head, reference, bounds, [0])
    assert row.held
    assert row.outputs["lse"].error > 30 * 2.0**-53


@pytest.mark.parametrize("output", ["unnormalised_out", "row_sum", "dq", "delta"])
def test_a_kernel_that_is_off_by_a_little_is_found(output: str, device: str) -> None:
    def off(head: AttentionHead) -> tuple[HeadReference, HeadBounds]:
        reference, bounds = certified(head)
        return replace(reference, **{output: getattr(reference, output) * (1 + 2.0**-36)}), bounds

    assert not held("bf16, T = 64", 10, device, off)


# Which heads.


def test_heads_on_a_cpu_are_streamed() -> None:
    assert not fuses([make_head(CASES["square-63"])] * 2000)


@pytest.mark.gpu
def test_heads_on_a_gpu_are_fused_from_a_number_of_scores_on_and_never_with_dropout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    head = on("cuda", make_head(CASES["square-333"]))
    assert [fuses([head] * n) for n in (1, 37, 38)] == [False, False, True]
    kept = torch.ones(333, 333, dtype=torch.bool, device="cuda")
    assert not fuses([replace(head, dropout=Dropout(kept, 0.1))] * 40)
    monkeypatch.setenv(SWITCH, "0")
    assert not fuses([head] * 38)


def test_heads_that_differ_in_what_a_launch_shares_are_not_batched() -> None:
    head = make_head(CASES["square-63"])
    others = [
        head, replace(head, q=head.q + 1), replace(head, scale=0.5), replace(head, softcap=3.0),
        replace(head, sink=1.0),
        replace(head, masking=Masking("bottom-right")), replace(head, masking=Masking("top-left", alibi=Alibi(0.5))),
        replace(head, masking=Masking("top-left", mask=torch.ones(63, 63, dtype=torch.bool))),
        make_head(CASES["unmasked"]),
    ]  # fmt: skip
    assert batches(others) == [[0, 1], *([i] for i in range(2, len(others)))]
    slopes = [replace(head, masking=Masking("top-left", alibi=Alibi(slope))) for slope in (0.5, 0.25)]
    assert batches(slopes) == [[0, 1]]
    assert all(a != b for a, b in pairwise([s.masking.alibi for s in slopes]))
