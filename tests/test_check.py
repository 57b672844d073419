"""``attn_diag.check`` on real kernels, planted regressions, healthy ones over 100 seeds, kernels that misbehave."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from scipy import stats
from torch import Tensor

import attn_diag
from attn_diag.errors import InputError
from attn_diag.kernels import Recipe
from attn_diag.results.baseline import BaselineCase, BaselineSize, SequenceMean
from attn_diag.results.check import CheckedCase, CheckReport
from attn_diag.results.wording import SYMBOLS
from attn_diag.statistics.means import holm
from attn_diag.testing import suspects
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.regression import cases as suite
from attn_diag.testing.regression import judge
from attn_diag.testing.regression.figures import Measured, measure_case
from attn_diag.testing.stated import Stated
from attn_diag.testing.target import emulate

pytestmark = pytest.mark.slow

FA2 = attn_diag.preset("fa2")
CASES = ["normal", "pairs"]
CPU = torch.device("cpu")


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def kinds(found: CheckReport) -> set[str]:
    return {f.kind for f in found.failures}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fa2's, on two cases."""
    path = tmp_path_factory.mktemp("check") / "baseline.json"
    assert attn_diag.check("fa2", baseline=path, save=True, cases=CASES, device="cpu").saved == "saved"
    return path


PLANTED = {
    "truncating cast": (replace(FA2, out="bf16:toward-zero"), False, "bias", "the last cast of O truncates"),
    "l in BF16": (replace(FA2, row_sum="bf16"), False, "growth", "the row sum l in BF16"),
    "keys reversed": (
        replace(FA2, schedule=replace(FA2.schedule, order="ascending")), True, "bits", "keys in reversed order",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "exact", "kind", "named"), PLANTED.values(), ids=PLANTED)
def test_a_planted_regression_fails_and_is_named(
    baseline: Path, recipe: Recipe, exact: bool, kind: str, named: str
) -> None:
    found = attn_diag.check(recipe, name="fa2", baseline=baseline, cases=CASES, exact=exact, device="cpu")
    assert not found.passed
    assert kind in kinds(found)
    assert {f.case for f in found.failures} == set(CASES)
    for failure in found.failures:
        quantity = SYMBOLS["o" if failure.quantity == "delta" else failure.quantity]
        assert some(failure.suspect).startswith(
            f"{named} (recipe fa2 so changed has 100 % of {quantity}'s elements bit"
        )
        # Where O is off says nothing of a gradient.
        assert ("batch item" in failure.message) == (failure.quantity in ("o", "delta"))
        assert failure.look_closer is not None
    assert named in found.report(80)


def test_the_unplanted_kernel_passes_bit_for_bit(baseline: Path) -> None:
    found = attn_diag.check("fa2", baseline=baseline, cases=CASES, exact=True, device="cpu")
    assert found.passed
    assert [c.same_bits for c in found.cases] == [True, True]
    assert found.tests == 0  # equal bits cannot differ
    assert CheckReport.from_json(found.to_json()) == found


def test_reversed_keys_pass_where_bits_are_not_demanded(baseline: Path) -> None:
    recipe = PLANTED["keys reversed"][0]
    found = attn_diag.check(recipe, name="fa2", baseline=baseline, cases=CASES, device="cpu")
    assert found.passed
    assert found.tests == 12
    assert any("differ in their bits" in note for note in found.notes)


def test_a_truncating_cast_fails_without_a_baseline_too() -> None:
    found = attn_diag.check(PLANTED["truncating cast"][0], cases=CASES, backward=False, device="cpu")
    assert kinds(found) == {"bias", "lossy"}
    assert all("the last cast of O truncates" in (f.suspect or "") for f in found.failures)


def test_a_change_that_is_not_known_is_not_named() -> None:
    def off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v) * 1.01

    found = attn_diag.check(off, cases=["normal"], device="cpu")
    assert kinds(found) == {"bias", "lossy", "wrong"}
    assert all(f.suspect is None for f in found.failures)
    assert "no single change" in found.report(80)


def test_what_makes_no_kernel_worse_is_not_named_as_the_cause() -> None:
    """The bits are those of an uncast P_bar, but for small numbers, which are lost: these are the fault."""

    def without_small_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.float(), k.float(), v.float()
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).bfloat16()
        return o.masked_fill(o.abs() < 2e-3, 0)

    found = attn_diag.check(without_small_numbers, causal=True, cases=["normal"], backward=False, device="cpu")
    assert kinds(found) == {"wrong"}
    assert all(f.suspect is None for f in found.failures)


def truncated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own attention in fp32, cast to BF16 by dropping bits."""
    wide = sdpa(q.float(), k.float(), v.float())
    return (wide.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def test_torch_sdpa_on_the_cpu_forward_and_backward(tmp_path: Path) -> None:
    path = tmp_path / "sdpa.json"
    cases = ["pairs"]
    saved = attn_diag.check("sdpa", baseline=path, save=True, cases=cases, device="cpu")
    (note,) = saved.notes
    assert "as documented of torch's SDPA on a CPU" in note, "its true bias is within the margin, dV's error is known"
    for case in saved.cases:
        assert {"o", "delta", "dq", "dk", "dv"} <= set(case.sizes)
        # From its exp, whose P_bar at the maximum is not 1: real, and no reason to fail.
        bias = case.biases["o_away_excess"]
        assert 4 * some(bias.standard_error) < bias.mean < bias.accepted[1]
    assert attn_diag.check(sdpa, name="sdpa", baseline=path, cases=cases, exact=True, device="cpu").passed
    found = attn_diag.check(truncated, name="sdpa", baseline=path, cases=cases, backward=False, device="cpu")
    assert "fit" in kinds(found), "it returns no gradients any more"
    found = attn_diag.check(truncated, cases=cases, device="cpu")
    assert kinds(found) == {"bias", "lossy"}


SEEDS, LEVEL, SEQUENCES = 100, 0.01, 8


def small(seed: int) -> CaseInputs:
    case = suite.draw("normal", seed, dtype=torch.bfloat16, head_dim=16, stated=Stated("none", 0.25), length=64)
    cut = {n: x[:SEQUENCES] for n in ("q", "k", "v", "do") if (x := getattr(case, n)) is not None}
    return replace(case, **cut)


@pytest.fixture(scope="module")
def healthy() -> list[Measured]:
    """fa2 in 64-key tiles, against fa2, on every seed."""
    recipe = replace(FA2, schedule=replace(FA2.schedule, key_tile=32))
    found = []
    for seed in range(SEEDS):
        case = small(seed)
        made, yardstick = (emulate(r, case, CPU, with_gradients=False) for r in (recipe, FA2))
        found.append(measure_case(case, made, yardstick, FA2, "cpu"))
    return found


def alarms(runs: list[Measured], known: list[Measured] | None) -> int:
    """Runs that fail anything, by the rules of ``check``."""
    count = 0
    for i, run in enumerate(runs):
        before = None if known is None else entry(known[i])
        biases = judge.biases_of(run, 64, before, same_key=True, same_inputs=False)
        case = CheckedCase("normal", (), "", biases=biases, sizes=judge.sizes_of(run, before, same_inputs=False))
        (case,), _ = judge.adjusted([case])
        count += bool(judge.failures_of(case, LEVEL))
    return count


def entry(run: Measured) -> BaselineCase:
    sizes = {n: BaselineSize(s.error, s.yardstick, s.log_ratio) for n, s in run.sizes.items()}
    return BaselineCase("", "", (), True, run.biases, sizes)


def surer(run: Measured, factor: float) -> Measured:
    """The same with standard errors that are too small, as rows taken for independent would give."""

    def less(mean: SequenceMean) -> SequenceMean:
        return replace(mean, standard_error=some(mean.standard_error) / factor)

    return replace(run, biases={n: less(m) for n, m in run.biases.items()})


def test_100_seeds_without_a_false_alarm_beyond_the_level(healthy: list[Measured]) -> None:
    others = healthy[1:] + healthy[:1]
    # At the level itself more alarms have a chance of 0.1 %.
    most = int(stats.binom.ppf(0.999, SEEDS, LEVEL))
    assert most == 5
    assert alarms(healthy, None) <= most
    assert alarms(healthy, others) <= most
    # With standard errors a third of the true ones the same rules alarm: the test could fail.
    assert alarms([surer(r, 3) for r in healthy], [surer(r, 3) for r in others]) > most


def test_p_values_are_those_of_student_and_welch() -> None:
    one, other = SequenceMean(0.3, 0.1, 15.0), SequenceMean(0.1, 0.05, 15.0)
    assert judge.beyond(one, (-0.1, 0.1)) == pytest.approx(2 * stats.t.sf(2, 15))
    assert judge.beyond(one, (-0.1, 0.4)) == 1
    expected = stats.ttest_ind_from_stats(0.3, 0.4, 16, 0.1, 0.2, 16, equal_var=False).pvalue
    assert judge.welch(one, other) == pytest.approx(expected)
    assert judge.welch(one, other, 0.25) == 1
    assert judge.welch(SequenceMean(0.0, None, None), SequenceMean(0.0, 0.0, 15.0)) == 1
    assert judge.welch(SequenceMean(0.1, 0.0, 15.0), SequenceMean(0.0, 0.0, 15.0)) == 0
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def noisy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One number up or down, at random, in one of 50 elements: below the budget, and other bits every time."""
    o = sdpa(q, k, v)
    step = (torch.rand(o.shape) < 0.02).to(torch.int16) * (2 * torch.randint(0, 2, o.shape, dtype=torch.int16) - 1)
    return (o.view(torch.int16) + step * (o != 0)).view(o.dtype)


def test_a_kernel_that_is_not_deterministic_does_not_flake(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "noisy.json"
    attn_diag.check(noisy, baseline=path, save=True, cases=["normal"], backward=False, device="cpu")
    for seed in (0, 0, 1):
        found = attn_diag.check(noisy, baseline=path, cases=["normal"], seed=seed, backward=False, device="cpu")
        assert found.passed
        assert found.cases[0].deterministic is False
        assert any("two runs on the same inputs differ" in note for note in found.notes)
    demanded = attn_diag.check(noisy, baseline=path, cases=["normal"], exact=True, backward=False, device="cpu")
    assert kinds(demanded) == {"determinism"}


def raising(*_: Tensor) -> Tensor:
    raise RuntimeError("no kernel image\nsecond line")


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        o = sdpa(q, k, v)
        k.mul_(0.5)
    return o


def one_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = sdpa(q, k, v).detach().clone()
    o[3, 0, 5, 7] = torch.nan
    return o


MISFITS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], object], str]] = {
    "raises": (raising, r"it raised RuntimeError on q, k, v \[16, 1, 192, 64\] torch.bfloat16: no kernel image"),
    "wrong shape": (lambda q, k, v: sdpa(q, k, v)[:, :, 1:], r"of shape \[B, H, T, D\] \[16, 1, 192, 64\], got"),
    "wrong dtype": (lambda q, k, v: sdpa(q, k, v).half(), "in torch.bfloat16 or torch.float32, got torch.float16"),
    "no tensor": (lambda *_: "o", "must return a tensor o"),
    "nothing": (lambda *_: (), "must return a tensor o"),
    "NaN": (one_nan, r"1 of 196608 elements of o are NaN or Inf, first at \[3, 0, 5, 7\]"),
    "in place": (
        in_place,
        r"it writes into its input k \([\d.]+ (% )?of its 196608 elements, first at \[\d+, \d+, \d+, \d+\]\), which",
    ),
    "another scale": (lambda q, k, v: sdpa(q * 2, k, v), "% off softmax"),
}


@pytest.mark.parametrize(("fn", "words"), MISFITS.values(), ids=MISFITS)
def test_a_kernel_that_is_no_attention_fails_and_is_not_saved(
    tmp_path: Path, fn: Callable[[Tensor, Tensor, Tensor], object], words: str
) -> None:
    path = tmp_path / "b.json"
    found = attn_diag.check(fn, cases=["normal"], device="cpu", baseline=path, save=True)
    assert [f.kind for f in found.failures] == ["nonfinite" if fn is one_nan else "fit"]
    assert not found.cases[0].biases
    assert re.search(words, found.failures[0].message)
    assert not path.exists()


class Coarse(torch.autograd.Function):
    """BF16 scores in the forward alone; everything else is as good as fp32 sums make it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = masked(q.float() @ k.float().mT / 8).bfloat16().float()
        lse = scores.logsumexp(-1, keepdim=True)
        o = ((scores - lse).exp().bfloat16().float() @ v.float()).bfloat16()
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q, k, v, o, lse = (x.float() for x in ctx.saved_tensors)
        do = gradients[0].float()
        probs = masked(q @ k.mT / 8).sub(lse).exp()
        ds = (probs * (do @ v.mT - (do * o).sum(-1, keepdim=True))).bfloat16().float()
        return tuple(x.bfloat16() for x in (ds @ k / 8, ds.mT @ q / 8, probs.bfloat16().float().mT @ do))


def masked(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


@pytest.mark.parametrize("case", ["normal", "large-logits", suite.REAL_HEAD])
def test_coarse_scores_are_found_without_a_baseline(case: str) -> None:
    found = attn_diag.check(Coarse.apply, cases=[case], causal=True, device="cpu")
    bad = {f.quantity: f for f in found.failures if f.kind in ("lossy", "wrong")}
    assert "o" in bad
    assert some(bad["o"].factor) > (1.25 if case == "normal" else 4)
    assert {q.quantity for q in found.cases[0].quantities} == {"o", "dq", "dk", "dv"}
    healthy = attn_diag.check("fa2", cases=[case], causal=True, device="cpu")
    assert healthy.passed
    assert not healthy.notes


@pytest.mark.parametrize(("head_dim", "dtype"), [(32, torch.bfloat16), (128, torch.float16)])
def test_the_real_head_has_any_head_dimension_and_scale(head_dim: int, dtype: torch.dtype) -> None:
    case = suite.draw(suite.REAL_HEAD, 0, dtype=dtype, head_dim=head_dim, stated=Stated("top-left", 0.3))
    own = suite.draw(suite.REAL_HEAD, 1, dtype=torch.bfloat16, head_dim=64, stated=Stated("top-left", 0.125))
    scores, expected = (c.q.double() @ c.k.double().mT * c.scale for c in (case, own))
    assert expected.abs().max() > 35
    # Its scores live in few directions: half of the features lose a tenth of them, a rotation nothing but bits.
    assert float((scores - expected).norm() / expected.norm()) < (0.1 if head_dim < 64 else 0.005)


def second_call(bad: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    calls = 0

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        o = sdpa(q, k, v)
        return o if calls % 2 else bad(o)

    return kernel


def few_rows_off(o: Tensor) -> Tensor:
    return torch.cat([o[:, :, :5] * 1.02, o[:, :, 5:]], 2)


@pytest.mark.parametrize(
    ("bad", "kind"), [(torch.rand_like, "fit"), (few_rows_off, "wrong"), (lambda o: o * torch.nan, "nonfinite")]
)
def test_a_second_run_that_differs_is_judged_too(bad: Callable[[Tensor], Tensor], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    found = attn_diag.check(second_call(bad), cases=["normal"], backward=False, device="cpu", baseline=path, save=True)
    assert [c.name for c in found.cases] == ["normal", "normal, second run"]
    assert kind in kinds(found)
    assert {f.case for f in found.failures} == {"normal, second run"}
    assert not path.exists(), "what is broken is no baseline"
    assert CheckReport.from_json(found.to_json()) == found


def test_a_suspect_explains_the_quantity_that_failed() -> None:
    # On one-hot rows O is a row of V whatever the scores: any change reproduces it, and none is named for that.
    found = attn_diag.check(replace(FA2, scores="bf16"), cases=["one-hot"], device="cpu")
    (failure,) = found.failures
    assert failure.quantity == "dv"
    assert some(failure.suspect).startswith("the scores S in BF16 (recipe fa2 so changed has 100 % of dV's elements")


def test_other_tiles_are_no_suspect_of_wrong_rows() -> None:
    """Tiles of 64 keys have every bit of O but those of the row that is wrong: they do not make it wrong."""
    q, k, v = (torch.randn(1, 1, 192, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    case = CaseInputs("normal", q, k, v, None, 0.125, "top-left")
    o = emulate(replace(FA2, schedule=replace(FA2.schedule, key_tile=64)), case, CPU)["o"]
    assert suspects.suspects(case, {"o": o}, ["o"], [FA2], None, CPU)["o"][0] == "tiles of 64 keys"
    o[0, 0, 63] = o[0, 0, 64]
    assert suspects.suspects(case, {"o": o}, ["o"], [FA2], None, CPU) == {}


def test_a_documented_error_is_excused_by_its_bits_alone() -> None:
    torch_cpu = attn_diag.check("sdpa", cases=["ones"], causal=True, device="cpu")
    assert torch_cpu.passed
    assert "torch's SDPA on a CPU" in torch_cpu.cases[0].documented["dv"]
    assert some(next(q for q in torch_cpu.cases[0].quantities if q.quantity == "dv").factor) > 1.25
    # As coarse, in another way.
    coarse = attn_diag.check(replace(FA2, probs="bf16:toward-zero"), cases=["ones"], causal=True, device="cpu")
    assert "lossy" in kinds(coarse)
    assert not coarse.cases[0].documented


def test_a_kernel_without_gradients() -> None:
    def forward_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q.detach(), k.detach(), v.detach())

    found = attn_diag.check(forward_only, cases=["normal"], device="cpu")
    assert found.passed
    assert found.cases[0].outputs == ("o",)
    assert any("not differentiable" in note for note in found.notes)
    demanded = attn_diag.check(forward_only, cases=["normal"], backward=True, device="cpu")
    assert kinds(demanded) == {"fit"}


def test_a_backward_that_truncates_is_named(baseline: Path) -> None:
    recipe = replace(FA2, dscores="bf16:toward-zero", dq="bf16:toward-zero")
    found = attn_diag.check(recipe, name="fa2", baseline=baseline, cases=["normal"], device="cpu")
    assert {f.quantity for f in found.failures} == {"dq", "dk", "dv"}
    recipe = replace(FA2, dq="bf16:toward-zero")
    single = attn_diag.check(recipe, name="fa2", baseline=baseline, cases=["normal"], device="cpu")
    assert all("the last cast of the gradients truncates" in (f.suspect or "") for f in single.failures)
    assert not single.passed


def test_stored_observations_are_judged_and_not_run(tmp_path: Path) -> None:
    case = suite.draw("normal", 0, dtype=torch.bfloat16, head_dim=64, stated=Stated("none", 0.125))
    good, bad = (emulate(r, case, CPU) for r in (FA2, PLANTED["truncating cast"][0]))
    inputs = {"q": case.q, "k": case.k, "v": case.v, "do": case.do}
    captures = [
        attn_diag.Capture.from_tensors({**inputs, **{f"{n}.{o}": x for o, x in made.items()}})
        for n, made in (("good", good), ("bad", bad))
    ]
    found = attn_diag.check(captures[0], device="cpu")
    assert found.passed
    assert found.cases[0].deterministic is None
    assert kinds(attn_diag.check(captures[1], device="cpu")) == {"bias", "lossy"}
    with pytest.raises(InputError, match="name the one observation"):
        attn_diag.check(captures, device="cpu")
    path = tmp_path / "stored.json"
    attn_diag.check(captures[0], baseline=path, save=True, name="kernel", device="cpu")
    again = attn_diag.check(captures[1], baseline=path, name="kernel", exact=True, device="cpu")
    assert kinds(again) >= {"bits", "bias"}


def test_an_error_of_the_same_size_is_no_explanation() -> None:
    """torch's CPU kernel adds dK in BF16, four tiles of 64 rows: as far off as where dS multiplies the cast P."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(4, 1, 256, 64, generator=generator).bfloat16() for _ in range(4))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    o = sdpa(*inputs)
    dq, dk, dv = torch.autograd.grad(o, inputs, do)
    found = attn_diag.inspect(q, k, v, o=o.detach(), do=do, dq=dq, dk=dk, dv=dv, device="cpu")
    by_name = {found.quantity: found for found in found.captures[0].observations[0].pooled.quantities}
    for name in ("dk", "dv"):
        assert by_name[name].answer == "lossy"
        # Three more roundings, of a quarter, half and three quarters of the sum: sqrt(1 + (4 - 1) / 4).
        assert some(by_name[name].factor) == pytest.approx(1.75**0.5, rel=0.02)
        # Its bits show these sums, and not the cast P.
        assert by_name[name].site == "gradient_accumulator"


def test_captures_are_inputs_too() -> None:
    case = suite.draw("normal", 5, dtype=torch.bfloat16, head_dim=64, stated=Stated("none", 0.125))
    one = attn_diag.Capture.from_tensors({"q": case.q[:1], "k": case.k[:1], "v": case.v[:1]})
    found = attn_diag.check("sdpa", cases=["normal"], captures=[one], backward=False, device="cpu")
    assert found.passed
    assert [c.name for c in found.cases] == ["normal", "memory"]
    assert not found.cases[1].biases  # one sequence: nothing to be tested by
    odd = attn_diag.check("sdpa", cases=[], captures=[replace(one, source="\udcff.pt")], backward=False, device="cpu")
    assert odd.cases[0].name == "?.pt"
    assert CheckReport.from_json(odd.to_json()) == odd
    causal = attn_diag.Capture.from_tensors({"q": case.q[:1], "k": case.k[:1], "v": case.v[:1]}, causal="top-left")
    with pytest.raises(InputError, match="was made with causal top-left"):
        attn_diag.check(sdpa, captures=[causal], device="cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cases": ["nothing"]}, "no case 'nothing'"),
        ({"cases": "normal"}, "must be a list"),
        ({"cases": []}, "at least one"),
        ({"level": 0.0}, "level must lie"),
        ({"save": True}, "need the baseline file"),
        ({"dtype": torch.float64}, "dtype must be one of bfloat16, float16"),
        ({"causal": "sideways"}, "causal must be none"),
        ({"observation": "flash"}, "a kernel is run instead"),
        ({"head_dim": 4}, "at least 8"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        attn_diag.check("fa2", device="cpu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["nothing", "sdpa:nothing", 3])
def test_targets_that_are_no_kernel(target: object) -> None:
    with pytest.raises(InputError, match=r"no kernel|no SDPA backend|expected a callable"):
        attn_diag.check(target, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", suite.BUILDERS)
def test_cases_have_16_independent_sequences_and_draws_of_their_own(name: str) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 32, "stated": Stated("top-left", 32**-0.5)}
    draws = [suite.draw(name, seed, **options) for seed in (0, 0, 1)]
    assert draws[0].q.shape == (16, 1, 192, 32)
    assert draws[0].fingerprint == draws[1].fingerprint != draws[2].fingerprint
    assert len({bytes(x.view(torch.uint8).numpy().tobytes()) for x in some(draws[0].do)}) == 16
