"""``quant``: planted faults of fake quantisers are named, sound ones are not accused, and the figures are right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from fake_quantisers import inputs, plain_int4, weight
from safetensors.torch import save_file
from torch import Tensor

import attn_diag
from attn_diag import InputError, Quant, Quantizer
from attn_diag.kernels.quantizers import parse_field

Fault = tuple[str, Callable[[Tensor], Tensor], str]


def made(name: str, **changes: object) -> Callable[[Tensor], Tensor]:
    return lambda w: attn_diag.quantize(w, name, **changes).values  # type: ignore[arg-type]


def zero_point_off(name: str, by: int) -> Callable[[Tensor], Tensor]:
    def wrong(w: Tensor) -> Tensor:
        found = attn_diag.quantize(w, name)
        return found.values - by * found.scale.repeat_interleave(w.shape[1] // found.scale.shape[1], 1)

    return wrong


def stale(name: str, factor: float) -> Callable[[Tensor], Tensor]:
    def wrong(w: Tensor) -> Tensor:
        own = w.abs().amax(1, keepdim=True) if name == "int8" else w.abs().max()
        return attn_diag.quantize(w, name, amax=own * factor).values

    return wrong


# What is declared, what was done, and the words that must name it.
FAULTS: dict[str, Fault] = {
    "one group shared too widely": ("int4", made("int4", block="128"), "blocks of 128"),
    "one scale for the tensor": ("fp8-row", made("fp8"), "the rules of fp8"),
    "floor instead of nearest": ("int4", made("int4", elements="int4:down"), "elements rounded down"),
    "truncated FP4": ("mxfp4", made("mxfp4", elements="e2m1:toward-zero"), "elements rounded toward-zero"),
    "half the range": ("int4", made("int4-half-range"), "the rules of int4-half-range"),
    "half the range in other groups": (
        "int4",
        made("int4-half-range", block="128"),
        "the rules of int4-half-range, bl",
    ),
    "zero point one too high": ("int4-asymmetric", zero_point_off("int4-asymmetric", 1), "the zero point off by +1"),
    "zero point one too low": ("int8-asymmetric", zero_point_off("int8-asymmetric", -1), "the zero point off by -1"),
    "amax stale and small": ("fp8", stale("fp8", 0.6), "an amax 0.6 times the data's"),
    "amax stale and large": ("fp8", stale("fp8", 1.7), "an amax 1.7 times the data's"),
    "rows' amax stale and small": ("int8", stale("int8", 0.8), "an amax 0.8 times the data's"),
    "rows' amax stale and large": ("int8", stale("int8", 1.3), "an amax 1.3 times the data's"),
    "scale rounded up": ("mxfp4", made("mxfp4", scale="e8m0:up"), "scales rounded to e8m0:up"),
    "scale in BF16": ("int4", made("int4", scale="bf16"), "scales rounded to bf16"),
    "blocks of 32 for 16": ("nvfp4", made("nvfp4", block="32"), "blocks of 32"),
    "another scale to multiply by": (
        "fp8-row",
        lambda w: made("fp8-row")(w) * 1.02,
        "values multiplied by 1.02 afterwards",
    ),
    "E5M2 for E4M3": ("fp8", made("fp8", elements="e5m2"), "elements in e5m2"),
    "E5M2 in E4M3's scale": ("fp8", made("fp8", elements="e5m2", target=448.0), "elements in e5m2"),
    "INT3 for INT4": ("int4", made("int4", elements="int3"), "elements in int3"),
    "blocks of outputs": (
        "int4",
        lambda w: made("int4")(w.T.contiguous()).T.contiguous(),
        "blocks of 32 down the columns",
    ),
    "BF16 first": ("mxfp8", lambda w: made("mxfp8")(w.bfloat16().float()), "w rounded to bf16 first"),
    "scale in E5M2": ("int4", made("int4", scale="e5m2"), "scales rounded to e5m2"),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_named(name: str, seed: int) -> None:
    declared, quantised, said = FAULTS[name]
    w = weight(seed)
    found = attn_diag.quant(w, declared, observed=quantised(w))
    assert found.outcome == "fail"
    assert f"but with {said}" in found.headline
    assert found.matches[0].equal >= 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int4", "int8", "int4-asymmetric", "fp8", "fp8-blocks", "mxfp8", "mxfp4", "nvfp4"])
def test_sound_ones_pass_in_any_arithmetic(name: str, dtype: torch.dtype) -> None:
    w = weight(3).to(dtype)
    for arithmetic in ("exact", "fp32", "fp32-reciprocal"):
        values = attn_diag.quantize(w, name, arithmetic=arithmetic).values.to(dtype)
        found = attn_diag.quant(w, name, observed=values)
        assert found.outcome == "pass", found.headline
        assert f"the values are {name}'s" in found.headline


def test_one_written_by_hand_passes() -> None:
    w = weight(4)
    assert attn_diag.quant(w, "int4", observed=plain_int4(w)).outcome == "pass"
    assert attn_diag.quant(w, "int4", observed=plain_int4(w).bfloat16()).outcome == "pass"


def test_one_in_bf16_arithmetic_is_named_and_passes_with_such_scales() -> None:
    """As torchao's quantize_affine and dequantize_affine compute where the weight is BF16."""
    w = weight(4).bfloat16()
    groups = w.view(len(w), -1, 32)
    scale = (groups.abs().amax(-1, keepdim=True).float() / 7.5).bfloat16()
    values = ((groups * (1 / scale)).round().clamp(-8, 7) * scale).view(w.shape)
    found = attn_diag.quant(w, "int4-half-range", observed=values)
    assert found.outcome == "fail"
    assert "but with scales and arithmetic in bf16: 100.00 %" in found.headline
    declared = attn_diag.quantizer("int4-half-range", scale="bf16")
    assert attn_diag.quant(w, declared, observed=values).outcome == "pass"
    # Drawn rounding on the same grid is neither.
    drawn = attn_diag.quantize(w, declared, elements="int4:stochastic").values.to(w.dtype)
    assert attn_diag.quant(w, declared, observed=drawn).outcome == "fail"


def test_one_in_float64_passes() -> None:
    w = weight(4)
    values = plain_int4(w.double()).float()
    assert float((values == attn_diag.quantize(w, "int4").values).double().mean()) < 0.99
    assert attn_diag.quant(w, "int4", observed=values).outcome == "pass"


def test_one_row_with_a_stale_amax_is_told() -> None:
    w = weight(4)
    w[5, 9] = 4 * w[5].abs().max()  # it alone is clipped, in 1 of 16,384 values
    amax = w.abs().amax(1, keepdim=True)
    amax[5] /= 2
    found = attn_diag.quant(w, "fp8-row", observed=attn_diag.quantize(w, "fp8-row", amax=amax).values)
    assert found.outcome == "fail"
    assert "all but 1 of 16384 values are fp8-row's; these (in row 5)" in found.headline


def test_values_on_every_second_number_are_not_called_drawn() -> None:
    w = weight(2)
    w[:, ::37] *= 8
    blocks = w.view(64, -1, 32)
    nearest = torch.exp2(blocks.abs().amax(-1, keepdim=True).log2().round() - 2)
    down = torch.exp2(blocks.abs().amax(-1, keepdim=True).log2().floor() - 2)
    # Where the scale is twice the declared one: the codes of E2M1 are twice as far apart.
    ups = (nearest > down).expand_as(blocks).reshape(w.shape)
    values = torch.where(ups, made("mxfp4", scale="e8m0:up")(w), made("mxfp4")(w))
    found = attn_diag.quant(w, "mxfp4", observed=values)
    assert found.outcome == "fail"
    assert "stochastic" not in found.headline


def test_torchaos_own_fake_quantiser() -> None:
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    w, size = weight(5), (1, 32)
    scale, zero = primitives.choose_qparams_affine(w, primitives.MappingType.SYMMETRIC, size, torch.int8, -8, 7)
    codes = primitives.quantize_affine(w, size, scale, zero, torch.int8, -8, 7)
    values = primitives.dequantize_affine(codes, size, scale, zero, torch.int8, -8, 7)
    assert attn_diag.quant(w, "int4-half-range", observed=values).outcome == "pass"
    said = attn_diag.quant(w, "int4", observed=values)
    assert "but with the rules of int4-half-range" in said.headline
    assert said.next is not None
    assert "--quantizer int4-half-range" in said.next


def test_an_undeclared_one_is_found_out() -> None:
    w = weight(6)
    found = attn_diag.quant(w, observed=made("int4-half-range", block="64")(w))
    assert found.outcome == "pass"
    assert "int4-half-range block=64" in found.headline


def test_blocks_down_the_columns_are_found_out() -> None:
    w = weight(7)
    found = attn_diag.quant(w, "int4", observed=attn_diag.quantize(w.T.contiguous(), "int4").values.T)
    assert found.outcome == "fail"
    assert "with blocks of 32 down the columns: 100.00 %" in found.headline


@pytest.mark.parametrize("values", ["noise", "shuffled"])
def test_what_no_quantizer_made_is_said(values: str) -> None:
    w = weight(7)
    observed = {
        "noise": w + 1e-3 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1)),
        "shuffled": attn_diag.quantize(w, "int4").values.roll(1, 0),
    }[values]
    found = attn_diag.quant(w, "int4", observed=observed)
    assert found.outcome == "fail"
    assert "nor one that is near it" in found.headline
    assert attn_diag.quant(w, observed=observed).outcome == "undecided"


@pytest.mark.parametrize(("dim", "where"), [(0, "row 3"), (1, "columns 32-63")], ids=["row", "columns"])
def test_where_some_scales_are_wrong_the_place_is_said(dim: int, where: str) -> None:
    w = weight(7)
    observed = attn_diag.quantize(w, "int4", block="32").values
    observed.narrow(dim, 3 if dim == 0 else 32, 1 if dim == 0 else 32).mul_(0.75)
    found = attn_diag.quant(w, attn_diag.quantizer("int4", block="32"), observed=observed)
    assert found.outcome == "fail"
    assert f"what differs is all in {where}" in found.headline
    assert where in (found.next or "")


def test_no_other_quantizer_is_called_near_that_has_few_of_the_values() -> None:
    w = weight(7)
    found = attn_diag.quant(w, "int4", observed=attn_diag.quantize(w, "int4").values.roll(1, 0))
    assert "the nearest" not in found.headline
    assert "what differs" not in found.headline


class TestDithering:
    by = attn_diag.quantizer("int4", elements="int4:stochastic")

    def test_unbiased_dithering_is_accused_at_most_at_the_level(self) -> None:
        alarms, runs = 0, 60
        for seed in range(runs):
            w = weight(100 + seed, 32, 128)
            found = attn_diag.quant(
                w, self.by, observed=made("int4", elements="int4:stochastic", seed=seed)(w), level=0.05
            )
            assert found.headline.startswith(("the values are", "dithered values are biased"))
            alarms += found.outcome == "fail"
        # 0.05 * 60 = 3; more than 9 has a probability of 0.1 %.
        assert alarms <= 9

    def test_biased_dithering_is(self) -> None:
        """Up with a probability that is too large by a twentieth."""
        w = weight(8, 256, 512)
        found = attn_diag.quantize(w, "int4")
        scale = found.scale.repeat_interleave(32, 1)
        steps = w / scale
        draws = torch.rand(w.shape, generator=torch.Generator().manual_seed(2)) - 0.05
        values = (steps.floor() + (draws < steps - steps.floor())).clamp(-7, 7) * scale
        said = attn_diag.quant(w, self.by, observed=values)
        assert said.outcome == "fail"
        assert "dithered values are biased: their mean error is +" in said.headline


class TestFigures:
    def test_errors_parts_and_output_are_what_they_say(self) -> None:
        w = weight(9).double()
        x = torch.randn(3, 50, 256, generator=torch.Generator().manual_seed(1)) + 0.5
        by = attn_diag.quantizer("int4", target=8.0)  # amax clips
        made = attn_diag.quantize(w, by)
        error = made.values - w
        found = attn_diag.quant(w, by, x=x)
        assert found.outcome == "undecided"
        assert found.error == pytest.approx(float(error.norm() / w.norm()), rel=1e-12)
        assert found.mean.mean == pytest.approx(float(error.mean() / w.square().mean().sqrt()), rel=1e-9)
        clipped, dead, grid = found.parts
        assert clipped.elements == int(made.clipped.sum()) > 0
        assert dead.elements == int(((made.values == 0) & (w != 0)).sum())
        assert clipped.elements + dead.elements + grid.elements == w.numel()
        assert clipped.of_square + dead.of_square + grid.of_square == pytest.approx(1, rel=1e-9)
        away = float((error * w.sign()).sum() / w.abs().sum())
        assert clipped.away + dead.away + grid.away == pytest.approx(away, rel=1e-9)
        assert dead.away < 0
        rows = x.double().reshape(-1, 256)
        y, off = rows @ w.T, rows @ error.T
        assert found.output is not None
        assert found.output.rows == 150
        assert found.output.error == pytest.approx(float(off.norm() / y.norm()), rel=1e-9)
        shift = off.mean(0)
        assert found.output.constant == pytest.approx(float(shift.square().mean() / off.square().mean()), rel=1e-9)
        assert found.output.worst_channel == int(shift.abs().argmax())

    def test_the_standard_error_is_that_of_blocks(self) -> None:
        """Over many weights the mean scatters as it says."""
        z = []
        for seed in range(200):
            w = torch.rand(16, 128, generator=torch.Generator().manual_seed(seed)) - 0.5
            mean = attn_diag.quant(w, "int8", level=0.05).mean
            assert mean.standard_error is not None
            z.append(mean.mean / mean.standard_error)
        assert 0.85 < float(torch.tensor(z).square().mean().sqrt()) < 1.2

    def test_alternatives_are_what_they_would_leave(self) -> None:
        w = weight(10)
        found = attn_diag.quant(w, "mxfp4")
        by_words = {a.words: a for a in found.alternatives}
        assert by_words["as it is"].error == pytest.approx(found.error, rel=1e-9)
        for words, changes in {
            "blocks of 16": {"block": "16"},
            "blocks of 128": {"block": "128"},
            "scales rounded up from amax over the largest number": {"scale": "e8m0:up", "target": None},
        }.items():
            error = attn_diag.quantize(w.double(), "mxfp4", **changes).values - w  # type: ignore[arg-type]
            assert by_words[words].error == pytest.approx(float(error.norm() / w.double().norm()), rel=1e-6)
        assert abs(by_words["stochastic rounding"].away) < abs(by_words["as it is"].away)

    def test_weights_of_zeros_and_of_one_row(self) -> None:
        zeros = attn_diag.quant(torch.zeros(4, 64), "int4", observed=torch.zeros(4, 64))
        assert (zeros.outcome, zeros.error) == ("pass", 0.0)
        assert zeros.mean.p_value is None
        assert attn_diag.quant(torch.randn(1, 8), "int4").mean.p_value is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"w": torch.nn.Linear(4, 2)}, r"w must be a tensor \[out, in\], got Linear; give a layer's weight"),
        ({"w": torch.zeros(3)}, r"w must be \[out, in\] in float64, fp32, BF16 or FP16, got \[3\]"),
        ({"w": torch.full((2, 4), math.nan)}, "w holds NaN or Inf"),
        ({"by": None}, "neither a quantizer nor observed values"),
        ({"observed": torch.zeros(4, 2)}, r"floats of its shape \[2, 4\], got \[4, 2\]"),
        ({"observed": torch.zeros(2, 4, dtype=torch.int8)}, "multiply codes by their scales first"),
        ({"observed": torch.zeros(4, 2)}, "and lay them as w lies"),
        ({"observed": torch.zeros(2, 4), "engine": torch.full((2, 4), torch.nan)}, "engine must be .* finite"),
        ({"x": torch.zeros(5, 3)}, r"x must be \[N, in\] with in = 4"),
        ({"by": "int5"}, "unknown quantizer 'int5'"),
        ({"by": torch.zeros(2, 4)}, "got Tensor: what it made is observed="),
        ({"level": 0}, "level must lie between 0 and 1"),
    ],
)
def test_what_cannot_be_says_so(options: dict[str, object], said: str) -> None:
    given = {"w": torch.randn(2, 4), "by": "int4", **options}
    with pytest.raises(InputError, match=said):
        attn_diag.quant(**given)  # type: ignore[arg-type]


class TestEngine:
    def test_groups_of_32_beside_128_are_named(self) -> None:
        w, x = weight(4), inputs()[0]
        trainer = attn_diag.quantizer("int4", block="128")
        for engine in (attn_diag.quantize(w, "int4").values, "int4"):
            found = attn_diag.quant(w, trainer, observed=attn_diag.quantize(w, trainer).values, x=x, engine=engine)
            assert found.outcome == "fail"
            assert found.engine is not None
            assert "32" in f"{found.engine.quantizer} {found.engine.words}" or found.engine.quantizer == "int4"
            assert "the engine runs other weights" in found.headline
            assert found.engine.output == pytest.approx(found.engine.difference, rel=0.3)

    def test_the_same_weights_pass(self) -> None:
        w = weight(5)
        values = attn_diag.quantize(w, "int4").values
        found = attn_diag.quant(w, "int4", observed=values, engine=values)
        assert found.outcome == "pass"
        assert found.engine is not None
        assert found.engine.same


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_clipped_at_a_tie_is_not_called_wrapped(bits: int) -> None:
    """As torch.ao and torchao have it: s = amax / (2^(bits - 1) - 1/2), codes clipped to -2^(bits - 1) and one less."""
    half = 2 ** (bits - 1)
    for seed in range(3):
        w = weight(seed)
        scale = w.abs().amax(1) / (half - 0.5)
        made = torch.fake_quantize_per_channel_affine(w, scale, torch.zeros(64, dtype=torch.int32), 0, -half, half - 1)

        found = attn_diag.quant(w, attn_diag.quantizer(f"int{bits}", block="row"), observed=made)
        assert found.outcome == "fail"
        assert "wrap" not in found.headline
        assert f"the rules of int{bits}-half-range" in found.headline


@pytest.mark.parametrize("seed", range(3))
def test_a_rule_goes_before_an_amax_that_was_fitted(seed: int) -> None:
    """As torchao quantises a layer's BF16 weights to INT8: amax over 127.5, in BF16, fits 0.997 times amax as well."""
    w = weight(seed).bfloat16()
    scale = (w.abs().amax(1, keepdim=True) / 127.5).bfloat16().float()
    values = ((w.float() / scale).round().clamp(-128, 127) * scale).bfloat16()
    found = attn_diag.quant(w, "int8", observed=values)
    assert "but with the rules of int8-half-range, scales rounded to bf16" in found.headline
    assert "--quantizer int8-half-range --set scale=bf16" in str(found.next)
    assert attn_diag.quant(w, observed=values).outcome == "pass"


def test_values_may_be_in_fp8() -> None:
    w = weight(6)
    values = w.to(torch.float8_e4m3fn)
    assert attn_diag.quant(w, "int4", observed=values).outcome == "fail"


@pytest.mark.parametrize("least", [0.0, 2.0**-6])
def test_nvfp4_without_its_tensors_scale_is_named(least: float) -> None:
    """Of small weights torchao's scales are all the least one: mxfp4 with one scale for the tensor makes the same."""
    w = 0.02 * torch.randn(64, 256, generator=torch.Generator().manual_seed(4))
    values = attn_diag.quantize(w, "nvfp4", tensor_scale=False, least_scale=least).values
    found = attn_diag.quant(w, "nvfp4", observed=values)
    assert "but without the tensor's scale" in found.headline
    assert "--quantizer nvfp4 --set tensor_scale=False" in str(found.next)


@pytest.mark.parametrize("fmt", [torch.bfloat16, torch.float16], ids=str)
def test_values_in_16_bits_are_named(fmt: torch.dtype) -> None:
    """Of a weight in fp32, kept as fp32."""
    w = weight(5)
    found = attn_diag.quant(w, "int8", observed=attn_diag.quantize(w, "int8").values.to(fmt).float())
    assert f"but with values rounded to {'bf16' if fmt == torch.bfloat16 else 'fp16'}" in found.headline


def test_draws_do_not_go_with_data_of_the_same_seed() -> None:
    """Weights made with seed 0, dithered with seed 0."""
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    found = attn_diag.quantize(w, "int4", elements="int4:stochastic")
    away = (found.values - w) * w.sign()
    assert abs(float(away.mean())) < 4 * float(away.std()) / 128


class TestCommand:
    @pytest.fixture
    def layer(self, tmp_path: Path) -> Path:
        w, file = weight(11), tmp_path / "layer.safetensors"
        save_file({"w": w, "observed": made("int4", block="128")(w), "x": torch.randn(20, 256)}, file)
        return file

    def test_it_names_the_fault_and_fails(self, layer: Path, run: Run, tmp_path: Path) -> None:
        document, page = tmp_path / "q.json", tmp_path / "q.html"
        done = run("quant", layer, "--quantizer", "int4", "--json", document, "--html", page, "--device", "cpu")
        assert done.code == 1, done.err
        assert "".join(done.out.split()).startswith(f"FAIL{layer}"), done.out  # a long path is broken anywhere
        assert "not int4, which gives" in done.out
        assert max(map(len, done.out.splitlines())) <= 80
        found = Quant.from_json(document.read_text())
        assert json.loads(found.to_json()) == json.loads(document.read_text())
        assert "blocks of 128" in page.read_text()
        # What it says to run next is right.
        assert found.next is not None
        options = found.next.partition(": ")[2].split()
        again = run("quant", layer, *options, "--plain", "--device", "cpu")
        assert again.code == 0, again.err
        assert again.out.startswith("OK ")

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("int4-asymmetric", {"zero_point": "float", "block": "64"}),
            ("int8", {"scale_of": "mean"}),
            ("mxfp4", {"target": None, "scale": "e8m0:up"}),
            ("int4", {"target": 7.5, "narrow": False, "ties": "away", "arithmetic": "fp32"}),
            ("nvfp4", {"tensor_scale": False, "least_scale": 2.0**-6}),
        ],
    )
    def test_a_declaration_is_read_as_it_is_printed(self, name: str, changes: dict[str, Any]) -> None:
        by = attn_diag.quantizer(name, **changes)
        base, *fields = by.name.split()
        assert attn_diag.quantizer(base, **dict(map(parse_field, fields))) == by

    def test_without_a_declaration(self, layer: Path, run: Run) -> None:
        done = run("quant", layer, "--device", "cpu")
        assert done.code == 0
        assert "the values are int4 block=128's" in done.out.replace("\n", " ")

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (("--weight", "weight"), "has no tensor 'weight', but observed, w, x"),
            (("--set", "block=64"), "name it with --quantizer"),
            (("--quantizer", "int4", "--set", "block"), "field=value"),
            (("--quantizer", "int4", "--set", "target=wide"), "target is a number, got 'wide'"),
            (("--quantizer", "int4", "--set", "narrow=perhaps"), "narrow is true or false"),
            (("--quantizer", "int4", "--set", "group=64"), "a quantizer has no group"),
        ],
    )
    def test_what_cannot_be_says_so(self, layer: Path, run: Run, options: tuple[str, ...], said: str) -> None:
        done = run("quant", layer, *options)
        assert done.code == 2
        assert said in done.err

    def test_a_file_that_is_none(self, tmp_path: Path, run: Run) -> None:
        (tmp_path / "no.safetensors").write_bytes(b"no")
        for name in ("no.safetensors", "missing.safetensors"):
            done = run("quant", tmp_path / name)
            assert done.code == 2
            assert "cannot be read as safetensors" in done.err


def test_a_declared_object_is_a_name_too() -> None:
    own = Quantizer("mine", "e2m1", "32", "e8m0:down", 4.0)
    w = weight(12)
    assert attn_diag.quant(w, own, observed=made("mxfp4")(w)).headline == "the values are mine's"


def test_how_far_it_is_is_told() -> None:
    w, told = torch.randn(16, 64), list[tuple[int, int]]()
    values = attn_diag.quantize(w, "int8").values
    attn_diag.quant(w, "int4", observed=values, x=w, dy=torch.randn(16, 16), progress=lambda *at: told.append(at))
    assert told == sorted(told)
    assert {at[1] for at in told} == {300}
    assert [any(low <= done < low + 100 for done, _ in told) for low in (0, 100, 200)] == [True] * 3


@pytest.mark.parametrize("rule", ["truncated", "e5m2", "drawn"])
def test_what_no_known_rule_makes_is_not_called_drawn_for_lying_on_the_grid(rule: str) -> None:
    """A cut amax of 6.99… and numbers of E5M2 lie next to w on the grid, as all draws do; but not as often on the far
    side."""
    w = torch.randn(32, 512, generator=torch.Generator().manual_seed(1))
    blocks = w.view(32, 4, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / 7
    made = {
        "truncated": (torch.trunc(blocks / scale) * scale).view_as(w),
        "e5m2": (w / (w.abs().amax() / 448)).to(torch.float8_e5m2).float() * (w.abs().amax() / 448),
        "drawn": attn_diag.quantize(w, attn_diag.quantizer("int4", block="128", elements="int4:stochastic")).values,
    }[rule]
    said = attn_diag.quant(w, observed=made).report(100)
    assert ("stochastic" in said.partition("quantised weight")[0]) == (rule == "drawn"), said
    assert "dithered values are biased" not in said


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("fp8-row", 448)])
def test_a_division_in_bf16_is_named_and_passes_with_such_scales(name: str, largest: int) -> None:
    """As quanto computes where the weight is BF16; float elements have none of torchao's reciprocals either."""
    w = weight(4).bfloat16()
    scale = w.abs().amax(1, keepdim=True) / largest
    codes = (w / scale).round().clamp(-127, 127) if name == "int8" else (w / scale).to(torch.float8_e4m3fn).to(w.dtype)
    found = attn_diag.quant(w, name, observed=codes * scale)
    assert found.outcome == "fail"
    assert "but with scales and arithmetic in bf16, dividing: 100.00 %" in found.headline
    declared = attn_diag.quantizer(name, scale="bf16")
    assert attn_diag.quant(w, declared, observed=codes * scale).outcome == "pass"
