"""The figures that ``inspect`` reports on real captures, against values computed independently in float64."""

from __future__ import annotations

from functools import cache

import pytest
from builders import inspected, some, stored

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.results.diagnosis import Diagnosis, ObservationDiagnosis

# capture:observation -> exact, window, unit; O mean, rms; delta mean, rms; dQ error, predicted, unexplained;
# dW_Q error, predicted (None where x was not captured). Pooled over rows and heads.
FIGURES: dict[str, tuple[float | None, ...]] = {
    "gpt2_step731_L2H4:observed": (0, 0, 0, 1.82001e-6, 8.87999e-4, 5.69051e-10, 4.64971e-8, 0.0803785, 0.0731764, 0.270261, 0.104261, 0.114752),
    "gpt2_step637_L2H6:observed": (0.0351562, 9.76562e-4, 3.90625e-3, 2.33824e-6, 6.56365e-4, -1.92177e-9, 2.69105e-8, 7.30722e-3, 6.83602e-3, 0.314547, 0.0131635, 0.0132654),
    "pair_T256:flash": (0.240234, 0.240234, 0.242188, 4.23608e-6, 1.77553e-3, 1.48069e-7, 2.50924e-4, 0.0384385, 0.03815, 0.0984256, None, None),
    "kernels_pair_T512:paper": (0.24902, 0.24512, 0.24512, 3.8712e-6, 5.2518e-3, -2.1376e-6, 2.8948e-3, 0.82503, 0.72889, 0.43076, None, None),
    "kernels_pair_T512:stable": (0.24902, 0.24512, 0.24512, 5.2291e-4, 4.6756e-3, -3.4056e-4, 2.3918e-3, 0.70733, 0.59277, 0.50361, None, None),
    "kernels_pair_T512:flash": (0.24902, 0.24512, 0.24512, 6.8514e-6, 1.942e-3, -1.4069e-5, 2.5848e-4, 0.051257, 0.050953, 0.082023, None, None),
    "kernels_gauss_T512:flash": (0.017578, 1.9531e-3, 1.9531e-3, 5.6299e-7, 3.1632e-4, -3.326e-7, 2.5104e-5, 2.4584e-3, 7.5234e-4, 0.95891, None, None),
    "failing_step500_L2H7:observed": (0.0605469, 0, 1.95312e-3, 7.44852e-6, 4.64896e-3, 8.45533e-9, 5.39441e-7, 0.148049, 0.143394, 0.131222, 0.0717228, 0.0691963),
}  # fmt: skip
NAMES = (
    "exact", "window", "unit", "O mean", "O rms", "delta mean", "delta rms",
    "dQ error", "dQ predicted", "dQ unexplained", "dW_Q error", "dW_Q predicted",
)  # fmt: skip

PRODUCTION = [
    "gpt2_step731_L2H4:observed", "gpt2_step637_L2H6:observed", "gqa_T200:observed", "pair_T256:flash", "pair_T256:cudnn",
    "pair_T256:efficient", "kernels_pair_T512:flash", "kernels_pair_T512:flex", "kernels_gauss_T512:flash",
    "kernels_gauss_T512:flex",
]  # fmt: skip
FAILING = "failing_step500_L2H7:observed"


@cache
def diagnose(name: str) -> Diagnosis:
    # Through the JSON text, because that is what users read.
    return Diagnosis.from_json(inspected(name).to_json())


def observation(key: str) -> ObservationDiagnosis:
    capture, _, name = key.partition(":")
    return next(o for o in diagnose(capture).captures[0].observations if o.name == name)


@pytest.mark.parametrize("key", FIGURES)
def test_figures_agree_to_four_digits(key: str) -> None:
    head = observation(key).pooled
    assert head.head is None
    o, delta, dq, dw_q = some(head.bias.o), some(head.bias.delta), some(head.propagation.dq), head.propagation.dw_q
    got = (
        head.row_maxima.exact.fraction, head.row_maxima.window.fraction, head.row_maxima.unit.fraction,
        o.mean, o.rms, delta.mean, delta.rms,
        dq.relative_error, dq.predicted_relative_error, dq.unexplained_fraction,
        dw_q.relative_error if dw_q else None, dw_q.predicted_relative_error if dw_q else None,
    )  # fmt: skip
    for name, value, expected in zip(NAMES, got, FIGURES[key], strict=True):
        wanted = None if expected is None else pytest.approx(expected, rel=5e-5, abs=0)
        assert value == wanted, f"{name}: expected {expected}, got {value}"


@pytest.mark.parametrize("key", [k for k in PRODUCTION if k != "pair_T256:efficient"] + [FAILING])
def test_casts_explain_nearly_all_of_dq(key: str) -> None:
    dq = some(observation(key).pooled.propagation.dq)
    assert some(dq.unexplained_with_casts) <= 0.03


@pytest.mark.parametrize("key", [*PRODUCTION, FAILING])
def test_shares_and_rest_make_the_whole(key: str) -> None:
    """<part, error>/<error, error> over all parts misses 1 by no more than what is left, as Cauchy-Schwarz says."""
    dq = some(observation(key).pooled.propagation.dq)
    total = sum(share for share in some(dq.shares).values() if share is not None)
    assert total == pytest.approx(1.0, abs=(dq.unexplained_with_casts or 0.0) + 1e-12)


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        *((key, 0.9, 1.5) for key in PRODUCTION),
        *((f"kernels_{inputs}_T512:paper", 2.5, 100) for inputs in ("gauss", "pair")),
        (FAILING, 9, 12),
    ],
)
def test_noise_factor(key: str, low: float, high: float) -> None:
    factor = some(observation(key).pooled.noise_factor)
    assert low <= factor <= high


def test_gpt2_head_is_ill_conditioned_and_nothing_else() -> None:
    head = observation("gpt2_step731_L2H4:observed").heads[0]
    verdict = some(head.verdict)
    assert verdict.labels == ("ill_conditioned",)
    assert head.conditioning == pytest.approx(91, rel=0.01)
    reasons = " ".join(verdict.reasons)
    for words in (
        "dQ is 8.04 % off",
        "a well-rounded kernel's is 8.04 % off as well",
        "O and dQ are as good as a well-rounded kernel's",
        "No row has a repeated maximum",
        "through delta",
        "this sequence only",
    ):
        assert words in reasons
    assert some(head.swamped).rows == 16


def test_failing_capture_is_lossy_but_not_biased() -> None:
    verdict = some(observation(FAILING).heads[0].verdict)
    assert "lossy" in verdict.labels
    assert not {"wrong", "biased", "clean"} & set(verdict.labels)
    assert "O has 6.83 (6.02 to 7.75) times a well-rounded kernel's error" in verdict.reasons[0]


def test_published_mitigation_replaces_one_bias_by_another() -> None:
    stable, paper = (observation(f"kernels_pair_T512:{name}").pooled for name in ("stable", "paper"))
    assert "biased" in some(stable.verdict).labels
    assert "biased" not in some(paper.verdict).labels
    # -4.60 with rows as clusters, the independent figure; rows with one argmax key are a little less than independent.
    assert some(stable.bias.delta).t == pytest.approx(-4.54, abs=0.05)


@pytest.mark.parametrize(
    ("key", "recipe"),
    [
        ("gpt2_step637_L2H6:observed", "cudnn"),
        ("gqa_T200:observed", "cudnn"),
        ("kernels_gauss_T512:flash", "fa2"),
        ("kernels_gauss_T512:flex", "flex"),
        ("kernels_pair_T512:stable", "qiu2025-stabilised"),
        (FAILING, "bf16-forward"),
    ],
)
def test_recipe_is_recognised(key: str, recipe: str) -> None:
    found = observation(key)
    assert found.recipe == recipe
    assert some(found.agreement) > 0.997


@pytest.mark.parametrize("key", ["pair_T256:efficient", "kernels_pair_T512:paper", "kernels_pair_T512:stable"])
def test_backward_that_rounds_elsewhere_is_said_to(key: str) -> None:
    verdict = some(observation(key).pooled.verdict)
    assert "this backward rounds elsewhere" in " ".join(verdict.reasons)


def test_key_gradients_of_grouped_heads_are_per_key_head() -> None:
    result = observation("gqa_T200:observed")
    assert [k.query_heads for k in result.kv_heads] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all(h.propagation.dk is None for h in result.heads if h.head is not None)
    for kv in result.kv_heads:
        assert some(kv.bias.dk).p_value is None
        assert some(kv.propagation.dk).relative_error == pytest.approx(0.003, rel=0.1)


def test_delta_explains_dk() -> None:
    for kv in observation("pair_T256:flash").kv_heads:
        dk = some(kv.propagation.dk)
        assert some(dk.unexplained_fraction) < 0.2
        assert some(dk.unexplained_with_casts) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2_step731_L2H4", "failing_step500_L2H7", "gqa_T200", "pair_T256"])
def test_cuda_gives_the_same_figures(name: str) -> None:
    capture = stored(name)
    cpu, cuda = (inspect_captures([capture], device=d) for d in ("cpu", "cuda"))
    for a, b in zip(cpu.captures[0].observations, cuda.captures[0].observations, strict=True):
        one, other = a.pooled, b.pooled
        assert one.noise_factor == pytest.approx(other.noise_factor, rel=1e-6)
        assert one.conditioning == pytest.approx(other.conditioning, rel=1e-6)
        for gradient in ("dq", "dw_q", "dk"):
            x, y = getattr(one.propagation, gradient), getattr(other.propagation, gradient)
            assert (x is None) == (y is None)
            if x is not None:
                for figure in ("relative_error", "predicted_relative_error", "unexplained_fraction", "coherence"):
                    assert getattr(x, figure) == pytest.approx(getattr(y, figure), rel=1e-6), f"{gradient} {figure}"
        for quantity in ("o", "delta", "dq"):
            x, y = getattr(one.bias, quantity), getattr(other.bias, quantity)
            assert x.rms == pytest.approx(y.rms, rel=1e-6)
            assert x.mean == pytest.approx(y.mean, rel=1e-6, abs=1e-9 * x.rms)
        assert one.row_maxima == other.row_maxima
