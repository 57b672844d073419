"""``quant``: the straight-through gradient of a fake quantiser, in all and in its rows, columns and blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fake_quantisers import inputs, plain_int4, weight
from torch import Tensor
from torch.nn import functional

import attn_diag
from attn_diag import InputError


class TestStraightThrough:
    @pytest.mark.parametrize("name", ["int4", "int8-asymmetric", "mxfp4", "nvfp4", "fp8"])
    def test_is_right_where_nothing_is_clipped(self, name: str) -> None:
        x, dy = inputs()
        found = attn_diag.quant(weight(1), name, x=x, dy=dy).gradient
        assert found is not None
        assert found.right, found

    def test_a_clipped_part_does_not_move(self) -> None:
        """An amax of a quarter of the data's: the gradient of what it clips is for nothing, unless left out."""
        x, dy = inputs()
        w = weight(2)
        amax = w.abs().amax() / 4

        def fake(kind: str) -> Callable[[Tensor], Tensor]:
            return lambda t: attn_diag.fake_quantize(t, "int8", block="tensor", amax=amax, gradient=kind)  # type: ignore[arg-type]

        by = attn_diag.quantizer("int8", block="tensor")
        passed, cut = (
            attn_diag.quant(w, by, observed=fake(kind), x=x, dy=dy).gradient for kind in ("straight-through", "clipped")
        )
        assert passed is not None
        assert cut is not None
        g = dy.double().T @ x.double()
        beyond = w.abs() > amax
        assert passed.gain == pytest.approx(1 - float(g[beyond].square().sum() / g.square().sum()), abs=0.02)
        assert not passed.right
        assert cut.right, cut

    def test_a_wrong_gradient_is_seen(self) -> None:
        """Of a function of one's own, twice too large; and none at all."""
        x, dy = inputs()
        w = weight(3)

        def twice(t: Tensor) -> Tensor:
            return plain_int4(t).detach() + 2 * (t - t.detach())

        by_hand = attn_diag.quant(w, "int4", observed=twice, x=x, dy=dy)
        assert by_hand.gradient is not None
        assert by_hand.gradient.gain == pytest.approx(0.5, abs=0.02)
        assert by_hand.outcome == "fail"
        assert "int4's, but where nothing is clipped its gradient is 1.99 times that of" in by_hand.headline

        none = attn_diag.quant(w, "int4", observed=lambda t: plain_int4(t).detach() + 0 * t, x=x, dy=dy)
        assert none.outcome == "fail"
        assert "no gradient of it arrives at w" in none.headline
        assert none.to_json()

    @pytest.mark.parametrize("part", [1.0, 0.7, 0.5])
    def test_elements_at_the_end_of_the_grid_are_no_fault(self, part: float) -> None:
        """A dither takes them across the end, of which the gradient that is masked there knows nothing."""
        x, dy = inputs()
        w = weight(2)
        amax = part * w.abs().amax(1, keepdim=True)
        by = attn_diag.quantizer("int4", block="row")

        def fake(factor: float) -> Callable[[Tensor], Tensor]:
            def made(t: Tensor) -> Tensor:
                passed = attn_diag.fake_quantize(t, by, amax=amax, gradient="clipped")
                return factor * passed + (1 - factor) * passed.detach()

            return made

        right, off = (attn_diag.quant(w, by, observed=fake(f), x=x, dy=dy, amax=amax) for f in (1.0, -1.0))
        assert right.outcome == "pass"
        assert right.gradient is not None
        assert right.gradient.right
        assert off.outcome == "fail"
        assert "its gradient is -1 times" in off.headline

    def test_it_needs_x(self) -> None:
        _, dy = inputs()
        with pytest.raises(InputError, match="give x too"):
            attn_diag.quant(weight(1), "int4", dy=dy)
        with pytest.raises(InputError, match=r"dy must be finite, \[96, 64\]"):
            attn_diag.quant(weight(1), "int4", x=inputs()[0], dy=dy[:, :5])


class _Passing(torch.autograd.Function):
    """Values forward, so many times each element's gradient backward."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, values: Tensor, times: Tensor) -> Tensor:
        del w
        ctx.save_for_backward(times)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("times", [0.0, -1.0, 2.0, 1.1])
@pytest.mark.parametrize(
    ("where", "place"),
    [((5,), "row 5"), ((slice(None), 7), "column 7"), ((5, slice(32, 64)), "row 5, columns 32-63")],
    ids=["row", "column", "block"],
)
def test_a_gradient_that_is_wrong_in_one_place(where: Any, place: str, times: float, dtype: torch.dtype) -> None:
    """The whole gain moves by a 64th of it at most."""
    torch.manual_seed(0)
    w, x, dy = torch.randn(64, 256).to(dtype), torch.randn(128, 256), torch.randn(128, 64)
    factors = torch.ones(64, 256)

    def fake(weight: Tensor) -> Tensor:
        values = attn_diag.fake_quantize(weight.detach(), "int4", block="32")
        return _Passing.apply(weight, values, factors.to(weight.dtype))  # type: ignore[no-any-return,no-untyped-call]

    by = attn_diag.quantizer("int4", block="32")
    assert attn_diag.quant(w, by, observed=fake, x=x, dy=dy).outcome == "pass"
    factors[where] = times
    found = attn_diag.quant(w, by, observed=fake, x=x, dy=dy)
    assert found.outcome == "fail"
    assert f"but in {place} its gradient is {times:.3g} times dyᵀ x" in found.headline
    assert "elsewhere 1" in found.headline


@pytest.mark.parametrize(
    ("where", "place"),
    [("zeros", "elements that become 0"), ("half the rows", "32 of 64 rows"), ("some", "30 % of the elements")],
)
def test_where_a_gradient_is_lost(where: str, place: str) -> None:
    torch.manual_seed(1)
    w, x, dy = 0.02 * torch.randn(64, 256), torch.randn(96, 256), torch.randn(96, 64)

    def fake(weight: Tensor) -> Tensor:
        values = attn_diag.fake_quantize(weight.detach(), "int4")
        kept = {
            "zeros": values != 0,
            "half the rows": (torch.arange(64) % 2 == 1)[:, None].expand(64, 256),
            "some": torch.rand(64, 256, generator=torch.Generator().manual_seed(2)) > 0.3,
        }[where]
        return _Passing.apply(weight, values, kept.float())  # type: ignore[no-any-return,no-untyped-call]

    found = attn_diag.quant(w, "int4", observed=fake, x=x, dy=dy)
    assert found.outcome == "fail"
    assert found.gradient is not None
    if where == "some":
        assert re.search(
            r"in (29|30|31)(\.\d)? % of the elements its gradient is 0 where nothing is clipped$", found.headline
        )
    else:
        assert f"in {place} its gradient is 0 times dyᵀ x where nothing is clipped" in found.headline


@pytest.mark.parametrize("block", ["row", "tensor"])
def test_a_gradient_that_underflows_in_the_cast_back(block: str) -> None:
    """Autograd gives x.to(fp8).to(fp32) a gradient in FP8 without a scale: torchao 0.18 (Float8FakeQuantizer)."""
    torch.manual_seed(0)
    w, x, dy = 0.02 * torch.randn(64, 256), torch.randn(96, 256), torch.randn(96, 64)
    x *= 10.0  # so that along dyᵀ x the gain is 1: it is the large gradients that carry it

    def fake(weight: Tensor, *, detached: bool = False) -> Tensor:
        size = weight.detach().abs()
        scale = (size.amax(1, keepdim=True) if block == "row" else size.amax()) / 448
        steps = weight / scale
        if detached:
            return (steps + (steps.to(torch.float8_e4m3fn).to(weight.dtype) - steps).detach()) * scale
        return steps.to(torch.float8_e4m3fn).to(weight.dtype) * scale

    by = attn_diag.quantizer("fp8", block=block)
    found = attn_diag.quant(w, by, observed=fake, x=x, dy=dy)
    assert found.outcome == "fail"
    assert "of the elements its gradient is 0 where nothing is clipped, mostly the smaller ones" in found.headline
    assert "needs a scale of its own" in str(found.next)
    assert attn_diag.quant(w, by, observed=partial(fake, detached=True), x=x, dy=dy).outcome == "pass"


def test_a_gradient_that_pruned_weights_do_not_get_is_no_fault() -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(96, 256), torch.randn(96, 64)
    kept = torch.rand(64, 256) > 0.5
    w = 0.02 * torch.randn(64, 256) * kept

    def fake(weight: Tensor) -> Tensor:
        return attn_diag.fake_quantize(weight * kept, "int4")

    assert attn_diag.quant(w, "int4", observed=fake, x=x, dy=dy).outcome == "pass"


class TestClamped:
    """Fake quantisers whose mask is a clamp's own gradient: hardtanh's is 0 at its limits, torch.clamp's since 2.14."""

    @staticmethod
    def fake(bits: int, group: int, clamp: Callable[[Tensor, float, float], Tensor]) -> Callable[[Tensor], Tensor]:
        high = 2.0 ** (bits - 1) - 1

        def made(t: Tensor) -> Tensor:
            blocks = t.reshape(len(t), -1, group)
            scale = blocks.detach().abs().amax(-1, keepdim=True) / high
            codes = blocks / scale
            return (clamp(codes + (codes.round() - codes).detach(), -high, high) * scale).reshape(t.shape)

        return made

    @pytest.mark.parametrize("seed", range(4))
    def test_what_is_lost_at_the_ends_of_the_grid_is_named(self, seed: int) -> None:
        x, dy = inputs()
        found = attn_diag.quant(weight(seed), "int4", observed=self.fake(4, 32, functional.hardtanh), x=x, dy=dy)
        assert found.outcome == "fail"
        assert found.gradient is not None
        assert "in elements that become the grid's first or last number its gradient is 0 times" in found.headline
        assert found.next is not None
        assert "torch.clamp has no gradient at its own limits" in found.next

    def test_of_a_row_of_eight_bits_they_are_too_few(self) -> None:
        x, dy = inputs()
        found = attn_diag.quant(weight(1), "int8", observed=self.fake(8, 256, functional.hardtanh), x=x, dy=dy)
        assert found.outcome == "pass"

    @pytest.mark.parametrize("factor", [0.0, 0.9, -1.0])
    def test_it_is_not_named_where_more_is_wrong(self, factor: float) -> None:
        """Half of the other elements' gradients are multiplied."""
        x, dy = inputs()
        other = torch.rand(64, 256, generator=torch.Generator().manual_seed(3)) < 0.5

        def fake(t: Tensor) -> Tensor:
            y = self.fake(4, 32, functional.hardtanh)(t)
            return torch.where(other, factor * y + (1 - factor) * y.detach(), y)

        found = attn_diag.quant(weight(2), "int4", observed=fake, x=x, dy=dy)
        assert found.outcome == "fail"
        assert "first or last number" not in found.headline + (found.next or "")


def test_a_gradient_through_the_scale_is_no_fault_of_the_elements_that_make_it() -> None:
    torch.manual_seed(0)
    w, x, dy = torch.randn(64, 256), torch.randn(128, 256), torch.randn(128, 64)

    def fake(weight: Tensor) -> Tensor:
        blocks = weight.reshape(64, -1, 32)
        scale = blocks.abs().amax(-1, keepdim=True) / 7
        codes = blocks / scale
        return ((codes + (codes.round() - codes).detach()) * scale).reshape(64, 256)

    found = attn_diag.quant(w, "int4", observed=fake, x=x, dy=dy)
    assert found.gradient is not None
    assert (found.outcome, found.gradient.apart) == ("pass", None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["noise", "constant", "weighed"])
def test_a_gradient_that_is_right_along_dy_x_alone(kind: str, seed: int) -> None:
    """What lies across dyᵀ x moves no gain: four times as much of noise fails, an estimator's weights are told."""
    torch.manual_seed(seed)
    w, x, dy = 0.02 * torch.randn(64, 256), torch.randn(96, 256), torch.randn(96, 64)
    gradient = dy.T @ x
    added = {"noise": torch.randn(64, 256), "constant": torch.ones(64, 256)}.get(kind, torch.zeros(64, 256))
    factors = 1 + 4 * gradient.std() * added / gradient
    if kind == "weighed":
        factors = torch.where(w > 0, 1.2, 0.8)

    def fake(weight: Tensor) -> Tensor:
        values = attn_diag.fake_quantize(weight.detach(), "int4")
        return _Passing.apply(weight, values, factors)  # type: ignore[no-any-return,no-untyped-call]

    found = attn_diag.quant(w, "int4", observed=fake, x=x, dy=dy)
    assert found.gradient is not None
    if kind == "weighed":
        assert found.outcome == "pass"
        assert found.gradient.off == pytest.approx(0.2, rel=1e-3)
        assert "its gradient is 20 % off dyᵀ x" in found.notes[-1]
    else:
        assert found.outcome == "fail"
        assert "of dyᵀ x its gradient has the other sign" in found.headline


@pytest.mark.parametrize("side", ["below", "above"])
def test_a_mask_of_what_is_clipped_has_two_sides(side: str) -> None:
    w, (x, dy) = weight(2), inputs()
    amax, by = float(w.abs().amax()) / 3, attn_diag.quantizer("int8", block="tensor")
    kept = w < amax if side == "below" else w > -amax

    def fake(weight: Tensor) -> Tensor:
        values = attn_diag.fake_quantize(weight.detach(), by, amax=amax)
        return _Passing.apply(weight, values, kept.float())  # type: ignore[no-any-return,no-untyped-call]

    found = attn_diag.quant(w, by, observed=fake, x=x, dy=dy, amax=amax)
    other = "above" if side == "below" else "below"
    assert found.outcome == "fail"
    assert f"of what is clipped its gradient reaches what lies {side} and not what lies {other}" in found.headline


def test_what_a_quantiser_clips_of_its_own_is_no_wrong_gradient() -> None:
    """Even weights, many of which lie next to the grid's end, and gradients of a few rows."""
    for seed in range(3):
        torch.manual_seed(seed)
        w, x, dy = torch.rand(64, 256) / 8 - 1 / 16, torch.randn(64, 256), torch.eye(64)
        for name in ("int4-half-range", "nvfp4"):
            observed = partial(attn_diag.fake_quantize, by=name, gradient="clipped")
            found = attn_diag.quant(w, name, observed=observed, x=x, dy=dy)
            assert found.outcome == "pass", found.headline


def test_crumbs_of_scales_gradients_are_no_place() -> None:
    """Nothing arrives but through the scales, as of torchao 0.18's Float8FakeQuantizer."""
    torch.manual_seed(0)
    w, x, dy = 0.02 * torch.randn(64, 256), torch.randn(96, 256), torch.randn(96, 64)

    def fake(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(1, keepdim=True) / 448
        return (weight / scale).detach().to(torch.float8_e4m3fn).to(weight.dtype) * scale

    found = attn_diag.quant(w, "fp8-row", observed=fake, x=x, dy=dy)
    assert found.outcome == "fail"
    assert "where nothing is clipped its gradient is" in found.headline
    assert "columns" not in found.headline
