"""The microscope: exact additions, the walk of one element, the closed form, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import jsonschema
import pytest
import torch
from builders import some
from command_line import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

import attn_diag
from attn_diag.analyses.microscopy.closed_form import predict_block
from attn_diag.analyses.microscopy.walk import exponent_factor, walk_element
from attn_diag.errors import InputError
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.kernels import Recipe, Schedule, emulate_head, preset
from attn_diag.reference import AttentionHead, format_of, reference_rows, round_nearest_even
from attn_diag.results.microscope import Microscope

pytestmark = pytest.mark.slow

# The golden example: a tie of two BF16 numbers, and a residual of 1815 * 2**-21 = 121 * 2**-12 * 15 * 2**-9.
TIED = [-2.40625, -2.296875]
RESIDUAL = -1815 * 2.0**-21
FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
ALL_KEYS = Schedule(key_tile=2**20)


def golden_head(*, residual: bool) -> AttentionHead:
    """One row whose P_bar is 1, 1 and, with the residual, 121 * 2**-12 once cast to BF16."""
    scores = [0.0, 0.0, math.log(121 / 4096)][: 3 if residual else 2]
    values = [*TIED, -15 * 2.0**-9][: len(scores)]
    q, k, v = torch.ones(1, 1), torch.tensor(scores)[:, None], torch.tensor(values)[:, None]
    return AttentionHead(q.double(), k.double(), v.double(), None, 1.0)


def golden_recipe() -> Recipe:
    """O_bar is rounded to BF16 once, nothing after it."""
    return replace(preset("cudnn"), name="o-bar", accumulator="bf16", out="fp32", schedule=ALL_KEYS)


def test_golden_example_with_its_residual() -> None:
    found = attn_diag.examine_addition([*TIED, RESIDUAL])
    assert found.exact == -4.703990459442139
    assert (found.rounded, found.error) == (-4.71875, -0.014759540557861328)
    assert (found.tie, found.direction, found.from_tie) == ("broken", "away from zero", RESIDUAL)
    assert (found.exponent, found.carry, found.kept) == (2, 1, "1.0010110")
    assert (found.guard, found.round_bit, found.sticky) == (1, 0, 1)
    assert (found.toward_zero, found.away, found.ulp) == (-4.6875, -4.71875, 0.03125)
    assert [o.aligned for o in found.operands] == [
        "0.1001101|0000000000000000", "0.1001001|1000000000000000", "0.0000000|0000011100010111"
    ]  # fmt: skip
    assert found.exact_aligned == "1.0010110|1000011100010111"
    without = some(found.without_residual)
    assert (without.rounded, without.tie) == (-4.6875, True)
    text = " ".join(found.report(80).split())
    assert "a tie of the main operands, broken by the residual" in text
    assert "rounds to -4.6875, a tie, to even" in text


def test_golden_example_without_its_residual() -> None:
    found = attn_diag.examine_addition(TIED)
    assert (found.exact, found.tie, found.sticky) == (-4.703125, "exact", 0)
    assert (found.rounded, found.direction, found.error) == (-4.6875, "toward zero", 0.015625)
    assert found.without_residual is None


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "tie-alone"])
def test_golden_example_through_the_microscope(residual: bool) -> None:
    head, recipe = golden_head(residual=residual), golden_recipe()
    found = attn_diag.microscope(head, row=0, feature=0, recipe=recipe)
    addition = some(found.addition)
    assert found.bit_equal
    site = found.sites[some(found.decisive)]
    assert (site.name, site.step) == ("accumulator", "addition")
    assert [t.unit for t in found.terms] == [True, True, False][: len(found.terms)]
    assert found.curve.points[-1].rounding_error == site.error
    if residual:
        assert (site.before, site.after, site.error) == (-4.703990459442139, -4.71875, -0.014759540557861328)
        assert addition.tie == "broken"
        assert some(addition.without_residual).rounded == -4.6875
    else:
        assert (site.before, site.after, site.error) == (-4.703125, -4.6875, 0.015625)
        assert addition.tie == "exact"
    # The closed form: error / l, with l in float64 here and in fp32 in the walk.
    assert found.element.kind == "tie"
    assert found.element.predicted_error == pytest.approx(site.contribution, rel=2.0**-22)
    assert some(found.closed_form).rows == {"tie": 1, "swamped": 0, "ordinary": 0}


# Whole numbers times one power of two: sums that float64 holds exactly.
terms = st.lists(st.integers(-(2**30), 2**30), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(terms, st.integers(-160, 100), st.sampled_from(list(FORMATS)))
def test_examined_rounding_is_nearest_even(numbers: list[int], power: int, name: str) -> None:
    found = attn_diag.examine_addition([n * 2.0**power for n in numbers], name)
    exact = math.fsum(numbers) * 2.0**power
    expected = float(round_nearest_even(torch.tensor(exact, dtype=torch.float64), format_of(FORMATS[name])))
    assert found.rounded == expected
    assert found.exact == exact
    if math.isfinite(expected):
        assert found.error == float(Fraction(expected) - Fraction(exact))
        # The bits tell the same story as the value.
        odd = found.kept.endswith("1")
        up = found.guard and (found.round_bit or found.sticky or odd)
        assert found.rounded == (found.away if up else found.toward_zero)
        assert found.tie != "exact" or (found.guard, found.round_bit, found.sticky) == (1, 0, 0)


def test_cancellation_overflow_and_subnormals() -> None:
    assert attn_diag.examine_addition([3.5, -3.25]).carry == -3
    assert attn_diag.examine_addition([3.3e38, 1e38]).rounded == math.inf
    assert attn_diag.examine_addition([448.0, 30.0], "e4m3").rounded == 448.0
    tiny = attn_diag.examine_addition([2.0**-133, 2.0**-134])
    assert (tiny.tie, tiny.rounded, tiny.exponent) == ("exact", 2.0**-132, -126)
    assert attn_diag.examine_addition([1.0, -1.0]).rounded == 0.0


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "one or more finite numbers"),
        ([1.0, math.nan], {}, "one or more finite numbers"),
        ([1.0], {"fmt": "bf17"}, "no format 'bf17'; known: bf16"),
        ([1.0], {"labels": ["a", "b"]}, "labels must have one entry for each of the 1 terms, got 2"),
        ([1e308, 1e308], {}, "beyond the range of float64"),
    ],
)
def test_additions_that_cannot_be_examined(values: list[float], options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attn_diag.examine_addition(values, **options)  # type: ignore[arg-type]


SPLIT = replace(preset("fa2"), name="split", schedule=Schedule(key_tile=64, split_keys=128))
PER_RANGE = replace(preset("qiu2025"), name="ranges", schedule=Schedule(key_tile=64))
WALKS = {
    "bf16-forward": ("failing_step500_L2H7", preset("bf16-forward")),
    "cudnn": ("gpt2_step731_L2H4", preset("cudnn")),
    "qiu2025": ("kernels_pair_T512", preset("qiu2025")),
    "stabilised": ("kernels_pair_T512", preset("qiu2025-stabilised")),
    "ranges": ("kernels_pair_T512", PER_RANGE),
    "split": ("kernels_pair_T512", SPLIT),
    "diagonal": ("pair_T256", replace(preset("fa2"), schedule=Schedule(order="diagonal-first", key_tile=32))),
    "tensor-core": ("pair_T256", replace(preset("fa2"), accumulation="nvidia-tensor-core")),
    "tensor-core-ranges": ("pair_T256", replace(PER_RANGE, accumulation="nvidia-tensor-core")),
    # In fp32 the order of q.k's sum moves a rescale of 1 by an ulp, and rounding toward zero makes a spacing of that.
    "toward-zero": (
        "pair_T256",
        replace(preset("fa2"), accumulator="bf16:toward-zero", arithmetic="fp64", exp="exact"),
    ),
    "float64": ("pair_T256", replace(PER_RANGE, arithmetic="fp64", accumulation="exact")),
    "last-cast": ("pair_T256", replace(preset("fa2"), division="after-last-cast")),
    "e4m3-probs": ("pair_T256", replace(preset("fa2"), probs="e4m3", probs_scale=256.0)),
}


@pytest.mark.parametrize("name", WALKS)
def test_the_walk_is_the_emulation_bit_for_bit(name: str, captures: Path) -> None:
    file, recipe = WALKS[name]
    capture = attn_diag.load(captures / f"{file}.safetensors")
    head = replace(read_head(capture, 0, 0, torch.device("cpu"), NonFiniteCensus()).head, do=None)
    emulated = emulate_head(recipe, head).o.double()
    generator = torch.Generator().manual_seed(0)
    for row in torch.randint(1, len(head.q), (5,), generator=generator).tolist():
        trace = attn_diag.kernels.trace_row(recipe, head, row)
        for feature in (0, 17, 63):
            walk = walk_element(recipe, trace, head.v[:, feature], exponent_factor(recipe, head))
            assert walk.out == emulated[row, feature]


def test_contributions_account_for_the_roundings(captures: Path) -> None:
    # With fp64 arithmetic nothing but the sites moves O: walked - (sum of terms) / l is their contributions.
    recipe = replace(PER_RANGE, arithmetic="fp64", accumulation="exact", row_max="fp32", row_sum="fp32")
    capture = attn_diag.load(captures / "pair_T256.safetensors")
    head = replace(read_head(capture, 0, 0, torch.device("cpu"), NonFiniteCensus()).head, do=None)
    unrounded = replace(recipe, range_pv="fp32", accumulator="fp32", out="fp32")
    for row in (100, 255):
        factor = exponent_factor(recipe, head)
        walk = walk_element(recipe, attn_diag.kernels.trace_row(recipe, head, row), head.v[:, 5], factor)
        smooth = walk_element(unrounded, attn_diag.kernels.trace_row(unrounded, head, row), head.v[:, 5], factor)
        assert len(walk.sites) >= 6
        assert not smooth.sites
        # A few dozen float64 operations on numbers of about 1.
        assert walk.out - smooth.out == pytest.approx(sum(s.contribution for s in walk.sites), abs=1e-13)


def test_operands_of_the_decisive_rounding_sum_to_what_is_rounded(captures: Path) -> None:
    capture = attn_diag.load(captures / "kernels_pair_T512.safetensors")
    for observation in ("paper", "flash"):
        found = attn_diag.microscope(capture, observation=observation, whole_head=False)
        addition, site = some(found.addition), found.sites[some(found.decisive)]
        assert (addition.exact, addition.rounded) == (site.before, site.after)
        assert abs(site.contribution) == max(abs(s.contribution) for s in found.sites)
        assert found.before_sum == pytest.approx(
            found.walked - found.reference - sum(s.contribution for s in found.sites), abs=1e-15
        )


def test_a_tied_element_of_a_production_kernel(captures: Path) -> None:
    # FlashAttention rounds O only: two keys at P_bar = 1 whose V have a mean half-way between neighbours.
    capture = attn_diag.load(captures / "kernels_pair_T512.safetensors")
    head = read_head(capture, 0, 0, torch.device("cpu"), NonFiniteCensus()).head
    predicted = predict_block(preset("fa2"), head, reference_rows(head, torch.arange(512)))
    down = (predicted.tie & (predicted.residual < 0)).nonzero()[:2].tolist()
    up = (predicted.tie & (predicted.residual > 0)).nonzero()[:2].tolist()
    for (row, feature), above in [*((at, False) for at in down), *((at, True) for at in up)]:
        found = attn_diag.microscope(capture, row=row, feature=feature, observation="flash", whole_head=False)
        addition = some(found.addition)
        assert (found.element.kind, addition.tie) == ("tie", "broken")
        assert (addition.rounded > addition.exact) == above
        assert addition.rounded == found.observed
        assert some(addition.without_residual).tie
        # The prediction starts from float64 P_bar V, the walk from fp32's: a few dozen roundings to fp32.
        assert found.element.predicted_error == pytest.approx(addition.error, abs=64 * 2.0**-24)


def test_by_default_the_largest_excess_is_looked_at(captures: Path) -> None:
    capture = attn_diag.load(captures / "gpt2_step731_L2H4.safetensors")
    found = attn_diag.microscope(capture, whole_head=False)
    inputs = read_head(capture, 0, 0, torch.device("cpu"), NonFiniteCensus())
    reference = reference_rows(inputs.head, torch.arange(1024)).out
    observed = some(capture.read("o", 0, 0))
    excess = (observed.double() - round_nearest_even(reference, format_of(torch.bfloat16))).abs()
    assert abs(found.excess) == excess.max()
    assert excess[found.row, found.feature] == excess.max()
    assert found.observed == observed[found.row, found.feature]
    # One of the two alone is free.
    assert attn_diag.microscope(capture, row=found.row, whole_head=False).feature == found.feature
    assert attn_diag.microscope(capture, feature=found.feature, whole_head=False).row == found.row


def test_prefix_errors_end_at_the_whole_sum(captures: Path) -> None:
    capture = attn_diag.load(captures / "failing_step500_L2H7.safetensors")
    found = attn_diag.microscope(capture, row=1000, feature=3, recipe="bf16-forward")
    points = found.curve.points
    assert len(points) <= 512
    assert sum(point.unit for point in points) == found.curve.unit_keys
    assert points[-1].position == found.keys == 1001
    # One range: the last point is the rounding of the whole sum.
    (site,) = [s for s in found.sites if s.name == "accumulator"]
    lost_in_fp32 = 1001 * 2.0**-24 * sum(abs(t.product) for t in found.terms) * 2
    assert points[-1].rounding_error == pytest.approx(site.error, abs=lost_in_fp32)


@pytest.mark.parametrize("site", ["O", "O_bar"])
def test_closed_form_is_exact_where_it_speaks(site: str, captures: Path) -> None:
    # Float64 arithmetic and one range: the only rounding after the cast of P_bar is the one that is predicted.
    exact = replace(preset("fa2"), arithmetic="fp64", accumulation="exact", exp="exact", schedule=ALL_KEYS)
    rounded = exact if site == "O" else replace(exact, accumulator="bf16", out="fp64")
    smooth = replace(exact, out="fp64")
    capture = attn_diag.load(captures / "pair_T256.safetensors")
    head = replace(read_head(capture, 0, 0, torch.device("cpu"), NonFiniteCensus()).head, do=None)
    error = emulate_head(rounded, head).o.double() - emulate_head(smooth, head).o.double()
    found = predict_block(rounded, head, reference_rows(head, torch.arange(256)))
    assert found.tie.sum() > 100
    assert found.swamped.sum() > 100
    for mark in (found.tie, found.swamped):
        assert found.error[mark].abs().max() > 1e-4
        # Float64 rounding of sums of at most 256 terms of about 1.
        assert (found.error[mark] - error[mark]).abs().max() < 1e-13
    assert not found.error[~(found.tie | found.swamped)].any()


def test_swamped_and_tied_rows() -> None:
    # Row 0: one key at P_bar = 1 and one at 2**-20: O = V_top exactly. Row 1: a tie that the rest breaks downward.
    v = torch.tensor([[1.0], [3.0], [1.0 + 2.0**-7], [-2.0]], dtype=torch.float64)
    far, low = -200.0, -20 * math.log(2)
    k = torch.tensor([[0.0, 0.0], [low, far], [far, 0.0], [far, low]], dtype=torch.float64)
    head = AttentionHead(torch.eye(2, dtype=torch.float64), k, v, None, 1.0)
    recipe = replace(preset("cudnn"), exp="exact", arithmetic="fp64", accumulation="exact", schedule=ALL_KEYS)
    found = predict_block(recipe, head, reference_rows(head, torch.arange(2)))
    assert found.unit_keys.tolist() == [1, 2]
    assert found.swamped[:, 0].tolist() == [True, False]
    assert found.tie[:, 0].tolist() == [False, True]
    small = 2.0**-20
    assert float(found.error[0, 0]) == pytest.approx(1.0 - (1.0 + 3.0 * small) / (1 + small), rel=1e-9)
    # Half-way is 1 + 2**-8; the rest (-2) pulls below, so O rounds down to 1.
    o = (2 + 2.0**-7 - 2 * small) / (2 + small)
    assert float(found.error[1, 0]) == pytest.approx(1.0 - o, rel=1e-9)


def test_closed_form_explains_most_of_tied_keys_and_says_when_it_does_not(captures: Path) -> None:
    pair = attn_diag.load(captures / "kernels_pair_T512.safetensors")
    flash = attn_diag.closed_form(pair, observation="flash")
    assert some(flash.totals.o.share) > 0.6
    assert flash.totals.delta is not None
    assert "most of this head's error in O is of this kind" in flash.totals.statement
    measured = sum(flash.by_row.measured_o)
    assert measured == pytest.approx(flash.totals.o.measured_sum, abs=1e-9)
    assert sum(flash.totals.rows.values()) == len(flash.by_row.row) == 512
    failing = attn_diag.closed_form(attn_diag.load(captures / "failing_step500_L2H7.safetensors"))
    assert some(failing.totals.o.share) < 0.01
    assert "lost before that rounding" in failing.totals.statement
    assert failing.totals.dq_measured == pytest.approx(0.143394, rel=1e-4)  # as in the captures' README
    assert failing.report()
    assert type(failing).from_json(failing.to_json()) == failing


def test_command_writes_json_and_a_report(run: Run, captures: Path) -> None:
    file = captures / "gqa_T200.safetensors"
    code, out, _ = run("microscope", file, "--head", 5, "--row", 150, "--feature", 7, "--json", "-")
    assert code == 0
    found = Microscope.from_json(out)
    jsonschema.validate(json.loads(out), Microscope.json_schema())
    assert (found.head, found.row, found.feature, found.bit_equal) == (5, 150, 7, True)
    code, report, _ = run("microscope", file, "--head", 5, "--row", 150, "--feature", 7)
    assert code == 0
    for piece in ("O[150, 7] of H5", "rounding of the sum", "Prefix error", "Closed form"):
        assert piece in report
    assert max(map(cell_len, found.report(80).splitlines())) <= 80


def test_command_on_the_example(run: Run) -> None:
    code, out, _ = run("microscope", "--example", "--recipe", "qiu2025", "--json", "-")
    assert code == 0
    found = Microscope.from_json(out)
    assert (found.recipe, found.recipe_reason) == ("qiu2025", "qiu2025, as asked for")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--row", "200"], "row must lie between 0 and 199, got 200"),
        (["--feature", "-1"], "feature must lie between 0 and 63, got -1"),
        (["--head", "8"], "no head 8; the capture has 0 to 7"),
        (["--head", "0,1"], "this command looks at one head, got --head 0,1"),
        (["--recipe", "fa9"], "no recipe 'fa9'; known: fa2"),
        (["--observation", "flash"], "no observation 'flash' with an O; there are: observed"),
    ],
)
def test_what_is_not_there_is_named(arguments: list[str], message: str, run: Run, captures: Path) -> None:
    code, _, err = run("microscope", captures / "gqa_T200.safetensors", *arguments)
    assert code == 2
    assert message in err


def test_overflow_is_shown_not_raised() -> None:
    values = torch.tensor([[60000.0], [60000.0]], dtype=torch.float64)
    ones = torch.ones(2, 1, dtype=torch.float64)
    head = AttentionHead(ones[:1], ones, values, None, 1.0)
    recipe = replace(preset("cudnn", "fp16"), accumulator="fp16")
    found = attn_diag.microscope(head, row=0, feature=0, recipe=recipe)
    assert found.walked == found.emulated == math.inf
    (site,) = [s for s in found.sites if s.name == "accumulator"]
    assert (site.before, site.after) == (120000.0, math.inf)
    assert some(found.addition).rounded == math.inf
    assert "inf" in found.report(80)
    assert json.loads(found.to_json())["walked"] == "Infinity"


def test_rows_that_cannot_be_walked() -> None:
    head = golden_head(residual=True)
    masked = replace(head, masking=replace(head.masking, mask=torch.zeros(1, 3, dtype=torch.bool)))
    with pytest.raises(InputError, match="row 0 sees no key"):
        attn_diag.microscope(masked, row=0, feature=0)
    with pytest.raises(InputError, match="nothing can be looked at"):
        attn_diag.microscope(masked)
    random = replace(golden_recipe(), accumulator="bf16:stochastic")
    with pytest.raises(InputError, match="rounds accumulator at random"):
        attn_diag.microscope(head, row=0, feature=0, recipe=random)
    with pytest.raises(InputError, match=r"observed must have shape \[Tq, Dv\] = \[1, 1\], got \[2, 1\]"):
        attn_diag.microscope(head, row=0, feature=0, observed=torch.zeros(2, 1))


def test_metadata_that_contradict_the_captured_o_are_refused(captures: Path) -> None:
    wrong = attn_diag.load(captures / "pair_T256.safetensors", causal="none")
    with pytest.raises(InputError, match="correct the metadata"):
        attn_diag.microscope(wrong, row=100, feature=3)


def test_a_rounding_is_not_called_decisive_where_more_was_lost_before_the_sum(captures: Path) -> None:
    found = attn_diag.microscope(attn_diag.load(captures / "failing_step500_L2H7.safetensors"), row=891, feature=61)
    assert abs(found.before_sum) > 100 * abs(found.sites[some(found.decisive)].contribution)
    text = " ".join(found.report().split())
    assert "Largest rounding of the sum (more was lost before)" in text
    assert "decisive rounding" not in text
    assert "120 others with a swamped feature" in text


def test_a_notebook_shows_the_report_and_a_prompt_one_line(captures: Path) -> None:
    found = attn_diag.microscope(attn_diag.load(captures / "gqa_T200.safetensors"), row=150, feature=7)
    assert "gqa_T200.safetensors: print(r.report())" in repr(found)
    assert len(repr(found).splitlines()) == 1
    assert found._repr_html_().startswith("<pre>gqa_T200.safetensors: H0, O[150, 7]: off by")
