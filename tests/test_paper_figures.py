"""The paper's figures from captures: numbers against direct float64 computations, planted truths, calibration."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from builders import some
from scipy import stats
from step_captures import C, D, Plant, planted, series, trained, true_delta_error, true_probs
from step_captures import T as ROW_COUNT
from torch import Tensor

import attn_diag
import attn_diag.analyses.paper.atoms
from attn_diag import Capture, InputError, PaperFigures, paper_figures
from attn_diag.analyses.paper.atoms import Directions, random_cosine95
from attn_diag.analyses.paper.rows import sign_bound
from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.statistics.drift import FLAT_BAND_99
from attn_diag.statistics.mean_tests import mean_test
from attn_diag.statistics.sums import accumulate, flat_band, sign_coherence
from attn_diag.statistics.welch import degrees_of_freedom

pytestmark = pytest.mark.slow

Array = npt.NDArray[np.float64]
STEPS = 6


@pytest.fixture(scope="module")
def unbiased() -> list[Capture]:
    return series(STEPS)


@pytest.fixture(scope="module")
def found(unbiased: list[Capture]) -> PaperFigures:
    return paper_figures(unbiased, device="cpu")


# Every figure against a direct computation. A mutant must miss it.

Numbers = Callable[[PaperFigures], npt.ArrayLike]


def total(c: Capture, delta_error: Tensor, *, scale: float | None = None) -> Tensor:
    """sum_t -alpha Delta_delta_t (PK)_t (x) x_t of the one head and sequence."""
    pk = true_probs(c.tensors["q"][...], c.tensors["k"][...], c.metadata.window) @ c.tensors["k"][...].double()
    alpha = c.scale if scale is None else scale
    return ((-alpha * delta_error[0, 0])[:, None] * pk[0, 0]).T @ c.tensors["x"][0].double()


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def expectations(captures: Sequence[Capture]) -> dict[str, tuple[Numbers, npt.ArrayLike, npt.ArrayLike]]:
    """By name: how to read a number of a figure, what it must be, and what a mistake would make of it."""
    errors = [true_delta_error(c) for c in captures]
    means = np.array([float(e.mean()) for e in errors])
    sums = [total(c, e) for c, e in zip(captures, errors, strict=True)]
    singular = [torch.linalg.svdvals(m) for m in sums]
    weight = captures[0].tensors["w_q"][...].double().numpy()
    flat = torch.stack([m.flatten() for m in sums])
    coherence = float(flat.sum(0).square().sum() / flat.square().sum())
    lead = [torch.linalg.svd(m)[0][:, 0] for m in sums]
    se = np.array([float(e.std()) / e.numel() ** 0.5 for e in errors])
    satterthwaite = (se**2).sum() ** 2 / (se**4 / (ROW_COUNT - 1)).sum()
    band = float(stats.t.ppf(1 - 0.01 / 4, satterthwaite)) * np.sqrt((se**2).sum())
    return {
        "3 spectral": (lambda f: f.spectral_norms.heads[0].spectral, np.full(STEPS, np.linalg.norm(weight, 2)),
                       np.full(STEPS, np.linalg.norm(weight, "fro"))),
        "4 norm": (lambda f: [s.norm for s in f.atoms.steps], [float(m.norm()) for m in sums],
                   [float(total(c, e, scale=1.0).norm()) for c, e in zip(captures, errors, strict=True)]),
        "4 first share": (lambda f: [s.first_share for s in f.atoms.steps],
                          [float(s[0] ** 2 / s.square().sum()) for s in singular],
                          [float(s[0] / s.sum()) for s in singular]),
        "4 cosine": (lambda f: f.atoms.over_steps.cosines[0][1], cosine(sums[0], sums[1]), -cosine(sums[0], sums[1])),
        "4 left": (lambda f: f.atoms.over_steps.left[0][2], abs(cosine(lead[0], lead[2])), 0.5),
        "4 coherence": (lambda f: f.atoms.over_steps.coherence, coherence, coherence / STEPS),
        "5a means": (lambda f: f.delta_steps.total.means, means, -means),
        "5a sums": (lambda f: f.delta_steps.total.sums, np.cumsum(means), means),
        # O is stored in float64, so that delta's excess is its error, and its rows are taken as independent.
        "5a band": (lambda f: f.delta_steps.excess.band99, band, FLAT_BAND_99 * se.sum()),
        "5a errors": (lambda f: f.delta_steps.excess.standard_errors, se, se * ROW_COUNT**0.5),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["3 spectral", "4 norm", "4 first share", "4 cosine", "4 left", "4 coherence",
                                  "5a means", "5a sums", "5a band", "5a errors"])  # fmt: skip
def test_numbers_are_those_of_a_direct_computation(name: str, unbiased: list[Capture], found: PaperFigures) -> None:
    read, expected, mistaken = expectations(unbiased)[name]
    np.testing.assert_allclose(np.array(read(found)), np.array(expected), rtol=1e-5)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(np.array(read(found)), np.array(mistaken), rtol=1e-5)


def test_rows_and_their_cosines(unbiased: list[Capture], found: PaperFigures) -> None:
    atoms = some(found.atoms)
    assert {r.step for r in atoms.rows} == set(range(10, 10 + STEPS))
    captures = {c.metadata.step: c for c in unbiased}
    pk, x = [], []
    for r in atoms.rows:
        c = captures[r.step]
        probs = true_probs(c.tensors["q"][...], c.tensors["k"][...])
        pk.append((probs @ c.tensors["k"][...].double())[r.batch, 0, r.row])
        x.append(c.tensors["x"][r.batch, r.row].double())
        error = true_delta_error(c)[0, 0]
        weights = error.square() * (probs @ c.tensors["k"][...].double())[0, 0].square().sum(1)
        weights = weights * c.tensors["x"][0].double().square().sum(1)
        assert r.weight == pytest.approx(float(weights[r.row] / weights.sum()))
        largest = weights.topk(sum(s.step == r.step for s in atoms.rows)).indices.tolist()
        assert r.row in largest
    one = np.array([[abs(cosine(a, b)) for b in pk] for a in pk])
    two = np.array([[abs(cosine(a, b)) for b in x] for a in x])
    np.testing.assert_allclose(np.array(atoms.probs_k.cosines), one, atol=1e-5)
    np.testing.assert_allclose(np.array(some(atoms.x).cosines), two, atol=1e-5)
    np.testing.assert_allclose(np.array(some(atoms.atoms).cosines), one * two, atol=1e-5)
    assert not np.allclose(np.array(some(atoms.atoms).cosines), one, atol=1e-5)


def test_features_of_the_worst_row(unbiased: list[Capture], found: PaperFigures) -> None:
    f = some(found.features)
    c = next(c for c in unbiased if c.metadata.step == f.step)
    error = true_delta_error(c)[0, 0]
    assert f.row == int(error.abs().argmax())
    assert f.delta_error == pytest.approx(float(error[f.row]), rel=1e-6)
    assert f.share == pytest.approx(float(error[f.row] ** 2 / error.square().sum()), rel=1e-6)
    do = c.tensors["do"][0, 0].double()
    truth = (true_probs(c.tensors["q"][...], c.tensors["k"][...]) @ c.tensors["v"][...].double())[0, 0]
    product = do * (c.tensors["o"][0, 0] - truth)
    np.testing.assert_allclose(f.product, product[f.row].numpy(), rtol=1e-6, atol=1e-16)
    assert sum(f.product) == pytest.approx(f.delta_error, rel=1e-6)
    np.testing.assert_allclose(f.contribution, product.sum(0).numpy(), rtol=1e-6, atol=1e-14)
    assert sum(f.contribution) == pytest.approx(float(error.sum()), rel=1e-6)
    np.testing.assert_allclose(np.array(f.aligned), (product > 0).double().mean(0).numpy())
    # Planted along dO: every feature of a row has the sign of the row's error.
    assert f.alignment == pytest.approx(abs(float(product[f.row].sum())) / float(product[f.row].norm()), rel=1e-6)


def test_trigger_counts_are_those_of_repeated_maxima() -> None:
    captures = [planted(step, Plant(ties=ties, heads=2)) for step, ties in ((3, 0), (5, 4), (9, 12))]
    found = some(paper_figures(captures, head=1, device="cpu").triggers)
    assert found.steps == (3, 5, 9)
    assert found.head.rows == (40, 40, 40)
    assert found.head == found.layer  # head 1 alone was looked at
    both = some(paper_figures(captures, device="cpu").triggers)
    for name in ("exact", "window", "unit"):
        counts = [
            [
                int((repeats.multiplicity > 1).sum())
                for h in range(2)
                if (repeats := attn_diag.repeated_maxima(c, 0, h)[name]) is not None
            ]
            for c in captures
        ]
        assert list(getattr(found.head, name)) == [n[1] for n in counts]
        assert list(getattr(both.layer, name)) == [sum(n) for n in counts]
        assert list(getattr(found.head, name)) != [n[0] for n in counts], "another head's counts would pass"
    assert found.head.exact[0] < found.head.exact[2]


# Planted truths.


def test_a_planted_bias_leaves_the_band_and_adds_up_over_steps() -> None:
    found = paper_figures(series(8, Plant(bias=0.7)), device="cpu")
    a = some(found.delta_steps).total
    assert a.outside
    assert some(a.p_over_steps) < 1e-3
    assert a.sums[-1] == pytest.approx(8 * 0.7e-4, rel=0.3)
    over = some(some(found.atoms).over_steps)
    assert over.p_value < 0.05
    assert over.coherence > over.null95
    assert np.min(over.left) > 0.99
    assert np.min(over.right) > 0.99


def test_without_a_bias_the_sum_stays_inside(found: PaperFigures) -> None:
    assert not some(found.delta_steps).total.outside
    # Directions are alike nonetheless: that alone adds nothing up.
    assert np.min(some(some(found.atoms).over_steps).left) > 0.95


def test_a_planted_direction_is_found_and_random_ones_are_not(found: PaperFigures) -> None:
    alike = some(found.atoms)
    for s in map(some, (alike.probs_k, alike.x)):
        assert np.min(s.cosines) > 0.9
        assert some(s.mean_square) > 0.9 > some(s.random99)
    apart = some(paper_figures(series(STEPS, Plant(alike=False)), device="cpu").atoms)
    for s, size in ((some(apart.probs_k), D), (some(apart.x), C)):
        assert s.random == pytest.approx(1 / size)
        assert some(s.mean_square) < some(s.random99)
        assert some(s.first_share) < 0.3
    over = some(apart.over_steps)
    off = np.array(over.left)[~np.eye(STEPS, dtype=bool)]
    assert (off < over.left_random95).mean() > 0.8
    assert over.left_random95 == pytest.approx(random_cosine95(D))


# Calibration, over many seeds at once.

ROWS = 30


@cache
def walks(seeds: int, steps: int, bias: float = 0.0) -> tuple[Array, Array, Array]:
    """Means, standard errors and degrees of freedom [seeds, steps] of steps of unequal noise, by ``mean_test``."""
    rng = np.random.default_rng(3)
    scale = np.exp(rng.normal(size=(1, steps, 1)))
    errors = scale * (bias + rng.standard_t(6, size=(seeds, steps, ROWS)))
    test = mean_test(errors, np.ones_like(errors), 0.01)
    return test.mean, test.standard_error, test.df


BANDS: dict[str, Callable[[Array, Array], Array]] = {
    "ours": flat_band,
    # Pointwise at the end, not simultaneous.
    "mutant: 1.96": lambda se, _: 1.96 * np.sqrt(np.square(se).sum(-1)),
    "mutant: half the variance": lambda se, _: FLAT_BAND_99 * np.sqrt(np.square(se).sum(-1) / 2),
}


@pytest.mark.parametrize("steps", [2, 10, 100])
@pytest.mark.parametrize("name", BANDS)
def test_unbiased_sums_stay_inside_at_the_stated_rate(name: str, steps: int) -> None:
    seeds = 20_000 if steps < 100 else 4_000
    mean, se, df = walks(seeds, steps)
    left = int((np.abs(np.cumsum(mean, -1)).max(-1) > BANDS[name](se, df)).sum())
    holds = stats.binomtest(left, seeds, 0.01, alternative="greater").pvalue > 1e-3
    assert holds == (name == "ours"), left / seeds


def test_the_band_is_not_idle() -> None:
    """It is left in about 0.8 % of cases with 100 steps, and nearly always where a bias has added up."""
    mean, se, df = walks(4_000, 100)
    rate = (np.abs(np.cumsum(mean, -1)).max(-1) > flat_band(se, df)).mean()
    assert 0.004 < rate < 0.012
    mean, se, df = walks(500, 100, bias=0.25)
    assert (np.abs(np.cumsum(mean, -1)).max(-1) > flat_band(se, df)).mean() > 0.9
    # Adding standard errors instead of variances would never alarm.
    mutant = FLAT_BAND_99 * se.sum(-1)
    assert (np.abs(np.cumsum(mean, -1)).max(-1) > mutant).mean() < 0.1


def test_few_degrees_of_freedom_widen_the_band() -> None:
    """Two steps of three rows: the normal point would alarm far too often, Student's does not."""
    rng = np.random.default_rng(5)
    errors = rng.normal(size=(40_000, 2, 3))
    test = mean_test(errors, np.ones_like(errors), 0.01)
    path = np.abs(np.cumsum(test.mean, -1)).max(-1)
    assert (path > flat_band(test.standard_error, test.df)).mean() < 0.0125
    assert (path > flat_band(test.standard_error, np.full_like(test.df, 1e9))).mean() > 0.02


@pytest.mark.parametrize("df", [1.3, 4.0, 39.0, 1e4])
def test_degrees_of_freedom_are_read_back(df: float) -> None:
    half = float(stats.t.ppf(0.975, df)) * 0.2
    estimate = BiasEstimate(n=5, mean=1.0, rms=1.0, standard_error=0.2, ci95=(1 - half, 1 + half))
    assert degrees_of_freedom(estimate) == pytest.approx(df, rel=1e-6)


@pytest.mark.parametrize("size", [1, 5, 12])
def test_the_bound_on_alignment_is_one(size: int) -> None:
    """Against all 2^n signs; a mutant that forgets the second tail is below the truth."""
    generator = torch.Generator().manual_seed(size)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * size).view(-1, size)
    mutant_fails = False
    for _ in range(50):
        p = torch.randn(size, generator=generator, dtype=torch.float64)
        truth = float(((signs @ p.abs()).abs() >= p.sum().abs() * (1 - 1e-12)).double().mean())
        hoeffding = 2 * float(torch.exp(-(p.sum() ** 2) / (2 * p.square().sum())))
        bound = sign_bound(p)
        assert truth * (1 - 1e-9) <= bound <= min(1.0, hoeffding) * (1 + 1e-6)
        mutant_fails |= bound / 2 < truth * (1 - 1e-9)
    assert mutant_fails
    assert sign_bound(torch.ones(size)) == pytest.approx(2 / 2**size, rel=1e-3)


def test_random_signs_are_coherent_beyond_the_null_in_5_percent() -> None:
    rng = np.random.default_rng(1)
    p = []
    for _ in range(400):
        matrices = rng.normal(size=(12, 1)) * rng.normal(size=(1, 6)) + 0.3 * rng.normal(size=(12, 6))
        p.append(sign_coherence(matrices @ matrices.T, draws=199)[2])
    assert stats.binomtest(int((np.array(p) <= 0.05).sum()), 400, 0.05).pvalue > 1e-3
    together = np.abs(rng.normal(size=(12, 1))) * rng.normal(size=(1, 6))
    assert sign_coherence(together @ together.T, draws=199)[2] < 0.02


@pytest.mark.parametrize(("rows", "size"), [(12, 64), (100, 3), (100, 16)])
def test_random_directions_exceed_their_null_in_1_percent(rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    high, draws = 0, 1500
    for _ in range(draws):
        found = Directions.of(torch.randn(rows, size, generator=generator, dtype=torch.float64))
        s = found.similarity(torch.zeros(1, 1))
        high += some(s.mean_square) > some(s.random99)
    assert stats.binomtest(high, draws, 0.01).pvalue > 1e-3, high / draws


def test_a_common_mean_is_no_random_direction() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(200, 16, generator=generator, dtype=torch.float64) + 0.3
    s = Directions.of(rows).similarity(torch.zeros(1, 1))
    assert some(s.mean_square) > some(s.random99)


def test_correlated_steps_are_named() -> None:
    """Steps that share their errors leave the band too often, and lag1 says so; independent ones are named in 5 %."""

    def named(means: Array) -> bool:
        estimates = [BiasEstimate(n=9, mean=float(m), rms=1.0, standard_error=1.0, ci95=(m - 2, m + 2)) for m in means]
        a = some(accumulate(estimates))
        return abs(some(a.lag1)) > some(a.lag1_limit)

    rng = np.random.default_rng(0)
    free = rng.normal(size=(300, 60))
    assert stats.binomtest(sum(map(named, free)), 300, 0.05, alternative="greater").pvalue > 1e-3
    shared = [np.convolve(values, np.ones(4) / 2, "valid") for values in free]
    assert np.mean([named(values) for values in shared]) > 0.95


# Many steps, layers, ranks, and what is missing.


def test_a_series_is_one_head_of_one_run() -> None:
    of_layers = [*series(3, layer=1), *series(2, Plant(step_seed=3), layer=2)]
    mixed = [*of_layers, planted(11, Plant(), layer=1, extra={"run": "b"})]
    found = paper_figures(mixed, layer=1, device="cpu")
    assert found.chosen.layer == 1
    other = found.chosen.run == "b"
    assert found.chosen.steps == ((11,) if other else (10, 11, 12))
    assert any("other runs" in note for note in found.notes)
    both = paper_figures(of_layers, device="cpu")
    assert [(h.layer, h.steps) for h in some(both.spectral_norms).heads] == [(1, (10, 11, 12)), (2, (10, 11))]


def test_captures_without_a_step_are_never_mixed() -> None:
    loud, quiet = planted(None, Plant(bias=5.0)), planted(None, Plant(step_seed=1))
    found = paper_figures([quiet, loud, planted(3, Plant(step_seed=2))], device="cpu")
    assert found.chosen.steps == ()
    assert any("2 more captures of this head" in note for note in found.notes)
    assert some(found.atoms) == paper_figures(loud, device="cpu").atoms
    assert found.atoms != paper_figures(quiet, device="cpu").atoms


def test_ranks_of_a_step_are_one_capture() -> None:
    def of_rank(rank: int, step: int) -> Capture:
        return planted(step, Plant(step_seed=rank + 2 * step), rank=rank, extra={"run": "r"})

    ranks = [of_rank(rank, step) for step in (1, 2) for rank in (0, 1)]
    found = paper_figures(ranks, device="cpu")
    assert found.captures == 2
    assert found.chosen.steps == (1, 2)
    means = [float(torch.cat([true_delta_error(of_rank(r, s)) for r in (0, 1)]).mean()) for s in (1, 2)]
    np.testing.assert_allclose(some(found.delta_steps).total.means, means, rtol=1e-6)
    assert some(found.features).rows == 80


def test_the_worst_head_is_chosen_and_said() -> None:
    quiet, loud = planted(4, Plant(heads=2)), planted(5, Plant(heads=2, bias=5.0))
    found = paper_figures([quiet, loud], device="cpu")
    assert found.chosen.step == 5
    assert "worst of 2 heads" in found.chosen.reason
    assert paper_figures([quiet, loud], head=0, device="cpu").chosen.head == 0


def test_all_heads_drifts_are_given_beside_the_chosen_one() -> None:
    captures = series(8, Plant(heads=3, bias=0.7))
    found = some(paper_figures(captures, device="cpu").delta_steps)
    assert [h.head for h in found.heads] == [0, 1, 2]
    for h in found.heads:
        one = some(paper_figures(captures, head=h.head, device="cpu").delta_steps)
        assert h.extreme == pytest.approx(max(one.total.sums, key=abs) / one.total.band99)
        assert (abs(h.extreme) > 1) == one.total.outside


def drop(c: Capture, *names: str) -> Capture:
    return replace(c, tensors={n: t for n, t in c.tensors.items() if n not in names})


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        (("w_q",), {"spectral_norms"}),
        (("do",), {"atoms", "delta_rows", "delta_steps", "features"}),
        (("o",), {"atoms", "features"}),
    ],
)
def test_what_is_missing_is_named_with_the_reason(without: tuple[str, ...], missing: set[str]) -> None:
    captures = [drop(c, *without) for c in series(2)]
    found = paper_figures(captures, device="cpu")
    assert set(found.missing) == missing
    assert all(found.missing.values())
    one = paper_figures(captures[0], device="cpu")
    assert set(one.missing) == missing | {"delta_steps", "triggers"}
    assert "step 10 alone" in one.missing["triggers"]


def test_what_cannot_be_drawn_is_an_error(unbiased: list[Capture]) -> None:
    with pytest.raises(InputError, match="no capture states layer 4"):
        paper_figures(unbiased, layer=4)
    with pytest.raises(InputError, match="no head 3"):
        paper_figures(unbiased[0], head=3)
    wrong = replace(unbiased[0], metadata=replace(unbiased[0].metadata, causal="none"))
    with pytest.raises(InputError):
        paper_figures(wrong)


def test_captures_that_do_not_fit_are_named(unbiased: list[Capture]) -> None:
    other = drop(unbiased[0], "o")
    found = paper_figures([other, *unbiased[1:]], observation="observed", device="cpu")
    assert found.captures == STEPS - 1
    assert any("no observation 'observed'" in note for note in found.notes)


@pytest.mark.usefixtures("fresh_heap")
@pytest.mark.parametrize("mutant", [False, True], ids=["ours", "mutant: keeps views"])
def test_no_step_stays_in_memory(mutant: bool, unbiased: list[Capture], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each step of the second pass little more is kept than [D, C] numbers and the rows shown."""
    if mutant:
        monkeypatch.setattr(attn_diag.analyses.paper.atoms, "_kept", lambda rows: rows)
    held: dict[int, int] = {}

    def progress(done: int, _: int) -> None:
        # Not isinstance: it would wake lazy objects of torch's.
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        held[done] = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    found = paper_figures(unbiased, device="cpu", progress=progress)
    grown = [held[n + 1] - held[n] for n in range(STEPS + 2, 2 * STEPS)]
    shown = len(some(found.atoms).rows) // STEPS
    budget = 8 * (D * C + shown * (D + C))
    assert len(grown) >= STEPS - 2
    # The step that is shown keeps its sample too: once.
    assert (sum(step > budget for step in grown) <= 1) != mutant, (grown, budget)


# A model in training, real captures, and the way back from JSON.


def test_a_tiny_model_in_training(tmp_path: Path) -> None:
    weights = trained(tmp_path / "steps")
    captures = [attn_diag.load(p) for p in sorted((tmp_path / "steps").glob("*.safetensors"))]
    found = paper_figures(captures, layer=0, device="cpu")
    assert found.chosen.steps == (0, 1, 2, 3)
    assert set(found.missing) == set()
    d = captures[0].head_dim
    for h in some(found.spectral_norms).heads:
        own = [np.linalg.norm(w[h.head * d : (h.head + 1) * d].double().numpy(), 2) for w in weights]
        stored = captures[0].tensors["w_q"].dtype
        np.testing.assert_allclose(h.spectral, own, rtol=0 if stored == torch.float64 else 2**-7)
        assert h.spectral[0] != pytest.approx(h.spectral[-1], rel=1e-6), "weights change in training"
    assert PaperFigures.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("name", "delta_mean", "dw_q"),
    [("failing_step500_L2H7", 8.45533e-9, 0.0691963), ("gpt2_step637_L2H6", -1.92177e-9, 0.0132654),
     ("gpt2_step731_L2H4", 5.69051e-10, 0.114752)],
)  # fmt: skip
def test_real_captures_agree_with_figures_computed_elsewhere(
    name: str, delta_mean: float, dw_q: float, captures: Path
) -> None:
    capture = attn_diag.load(captures / f"{name}.safetensors")
    found = paper_figures(capture, device="cpu")
    rows = some(found.delta_rows)
    assert rows.sums[-1] / capture.q_length == pytest.approx(delta_mean, rel=1e-5)
    assert not rows.outside
    (step,) = some(found.atoms).steps
    whole = attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].pooled.propagation.dw_q
    assert some(whole).predicted_relative_error == pytest.approx(dw_q, rel=1e-5)
    reference = step.norm / dw_q
    truth = torch.linalg.norm(_true_dw_q(capture))
    assert reference == pytest.approx(float(truth), rel=1e-5)


def _true_dw_q(c: Capture) -> Tensor:
    q, k, v, do = (c.tensors[n][0, 0].double() for n in ("q", "k", "v", "do"))
    scores = c.scale * (q @ k.T)
    p = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(1, keepdim=True))
    return (c.scale * ds @ k).T @ c.tensors["x"][0].double()
