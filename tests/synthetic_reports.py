"""Made-up diagnoses of any size, with every figure filled: for tests and benchmarks of the reports only."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from attn_diag.results.diagnosis import (
    Assumptions,
    Bias,
    BiasEstimate,
    CaptureDiagnosis,
    Diagnosis,
    Drift,
    Family,
    GradientError,
    HeadDiagnosis,
    Label,
    ObservationDiagnosis,
    Propagation,
    RepeatCount,
    RoundingBias,
    RowMaxima,
    Summary,
    Swamped,
    Tool,
    TopRow,
    Verdict,
)
from attn_diag.results.figures import (
    Alignment,
    HeadFigures,
    PredictedError,
    RowRuns,
    RowStrip,
    UlpHistogram,
    UnitPositions,
)

ROWS = 1024


def synthetic(layers: int = 12, heads: int = 12, *, observations: int = 1, seed: int = 0) -> Diagnosis:
    """One capture a layer, as the live capture writes them; heads of layers 1 to 3 are worse."""
    rng = random.Random(seed)
    captures = tuple(_capture(rng, layer, heads, observations) for layer in range(layers))
    labels = [
        label for c in captures for o in c.observations for h in o.heads if h.verdict for label in h.verdict.labels
    ]
    counts = {label: labels.count(label) for label in sorted(set(labels))}
    total = layers * heads * observations
    sentence = f"{total} heads judged: " + ", ".join(f"{n} {label}" for label, n in counts.items())
    tool = Tool("0.1.0", "3.12", "2.13.0", None, "synthetic", "cpu")
    return Diagnosis(tool, Family(4 * total, 0.01), captures, Summary(f"{sentence}.", counts))


def _capture(rng: random.Random, layer: int, heads: int, observations: int) -> CaptureDiagnosis:
    metadata = {"causal": "top-left", "scale": "0.125", "dtype": "bfloat16", "step": "500", "layer": str(layer)}
    names = ["observed", *(f"recipe {i}" for i in range(1, observations))]
    return CaptureDiagnosis(
        source=f"captures/step_000500_layer_{layer:02d}.safetensors",
        metadata=metadata,
        shape={"B": 1, "Hq": heads, "Hk": heads, "Tq": ROWS, "Tk": ROWS, "D": 64},
        assumptions=Assumptions(True, (), (), "hold: O agrees within 0.0014 (sampled rows)"),
        nonfinite=(),
        observations=tuple(
            ObservationDiagnosis(
                name, "cudnn", 0.9998, "captured on NVIDIA H200", False, ("dq", "o"),
                tuple(_head(rng, layer, head) for head in range(heads)), (),
            )
            for name in names
        ),
    )  # fmt: skip


def _head(rng: random.Random, layer: int, head: int) -> HeadDiagnosis:
    bad = layer in (1, 2, 3) and rng.random() < 0.4
    noise = rng.lognormvariate(0.1, 0.1) * (6 if bad and rng.random() < 0.5 else 1)
    conditioning = rng.lognormvariate(2, 0.4) * (9 if bad else 1)
    error = 0.001 * noise * conditioning * rng.lognormvariate(0, 0.3)
    # One of three bad heads walks away from zero.
    trend = rng.choice((-0.4, 0.4)) if bad and rng.random() < 0.3 else 0.0
    labels: list[Label] = []
    if trend:
        labels.append("biased")
    if noise > 2:
        labels.append("lossy")
    elif error > 0.02:
        labels.append("ill_conditioned")
    labels = labels or ["clean"]
    fraction = min(rng.lognormvariate(-4, 1), 0.9)
    count = RepeatCount(round(ROWS * fraction), ROWS - 1, round(ROWS * fraction) / ROWS, rng.randint(1, 5))
    estimates = {name: _estimate(rng, trend if "delta" in name else 0.0)
                 for name in ("o", "o_excess", "o_away_excess", "lse", "delta", "delta_excess", "dq")}  # fmt: skip
    gradient = GradientError(
        error, 0.95 * error, 0.2, {"delta": 0.9, "ds_cast": 0.1}, 0.01, noise, None, None, None, None
    )
    reasons = (
        f"dQ is {100 * error:.3g}% off (noise factor {noise:.3g}).",
        "No significant mean error (this sequence only).",
        f"Repeated row maxima in {count.rows} of {ROWS - 1} eligible rows (input format).",
    )
    return HeadDiagnosis(
        layer=layer, batch=0, head=head, rows_all=ROWS, rows_fully_masked=0, rows_nonfinite=0,
        row_maxima=RowMaxima(count, count, count, count), swamped=Swamped(3, 900),
        bias=Bias(**estimates), rounding_bias=RoundingBias(_estimate(rng, 0), _estimate(rng, 0)),
        delta_source="from_o", delta_rounding=None, noise_factor=noise, conditioning=conditioning,
        propagation=Propagation(dq=gradient, dw_q=gradient),
        top_rows=tuple(TopRow(0, head, rng.randrange(ROWS), rng.gauss(0, 1e-7), rng.random() / 20) for _ in range(5)),
        attribution=None,
        verdict=Verdict(tuple(labels), "significant" if trend else "seen" if labels != ["clean"] else "none", reasons,
                        ("Keep O (or delta) in fp32 for the backward, or bound the logits (QK-norm, QK-clip).",)),
        figures=_figures(rng, error),
    )  # fmt: skip


def _estimate(rng: random.Random, trend: float) -> BiasEstimate:
    total, walk = 0.0, []
    for _ in range(512):
        total += rng.gauss(trend, 1) * 1e-7
        walk.append(total)
    p = 1e-5 if trend else rng.random()
    return BiasEstimate(
        n=ROWS, n_clusters=ROWS, n_eff=rng.uniform(20, 300), mean=total / ROWS, mean_ulp=total * 1e4, rms=1e-7,
        standard_error=3e-9 * rng.random(), t=rng.gauss(20 * trend, 1), p_value=p, p_adjusted=p,
        ci95=(total / ROWS - 6e-9, total / ROWS + 6e-9), positive_fraction=rng.random(), cumulative_sum=total,
        drift=Drift(range(0, ROWS, 2), walk), drift_band99=2.807 * math.sqrt(512) * 1e-7,
        drift_outside=bool(trend), minimum_detectable=rng.random() * 1e-8, reference_bound=1e-18,
    )  # fmt: skip


def _figures(rng: random.Random, error: float) -> HeadFigures:
    exact = tuple(1 + (rng.random() < 0.1) + (rng.random() < 0.02) for _ in range(512))
    unit_rows = sorted(rng.randrange(ROWS) for _ in range(512))
    histogram = tuple(round(20000 * math.exp(-0.5 * ((i - 32) / 8) ** 2) * rng.uniform(0.9, 1.1)) for i in range(64))
    return HeadFigures(
        rows=RowRuns((0,), (0,), (0,), ROWS, 1),
        strip=RowStrip(tuple(range(0, ROWS, 2)), exact, exact),
        unit_positions=UnitPositions(tuple(unit_rows), tuple(rng.randint(0, r) for r in unit_rows), 1200),
        o_error=UlpHistogram(-1.008, 0.0315, histogram, 3, 5),
        alignment=Alignment(
            tuple(rng.gauss(0.5, 0.03) for _ in range(64)),
            tuple(rng.gauss(0, 1e-7) for _ in range(64)),
        ),
        dq=_predicted(rng, 128, ROWS // 128, error),
        dw_q=_predicted(rng, 64, 1, error),
        max_logit=rng.lognormvariate(3, 0.5),
    )  # fmt: skip


def _predicted(rng: random.Random, groups: int, size: int, error: float) -> PredictedError:
    reference = [rng.lognormvariate(-12, 0.5) for _ in range(groups)]
    predicted = [error * r * rng.lognormvariate(0, 0.2) for r in reference]
    observed = [p * rng.lognormvariate(0.02, 0.05) for p in predicted]
    return PredictedError(tuple(range(0, groups * size, size)), tuple(observed), tuple(predicted), tuple(reference))


def planted_run(layers: int, heads: int, steps: Sequence[int], planted: dict[int, tuple[int, Label]]) -> Diagnosis:
    """Clean heads at every step, but for layers that from a step on have a label in all heads."""
    rng = random.Random(1)
    base = synthetic(1, 1)
    captures = []
    for step in steps:
        for layer in range(layers):
            first, label = planted.get(layer, (0, "clean"))
            found: Label = label if step >= first else "clean"
            made = _capture(rng, layer, heads, 1)
            [seen] = made.observations
            kept = tuple(replace(head, verdict=_verdict(found)) for head in seen.heads)
            captures.append(
                replace(
                    made,
                    source=f"run/step{step:06d}_layer{layer:02d}.safetensors",
                    metadata=made.metadata | {"step": str(step)},
                    observations=(replace(seen, heads=kept),),
                )
            )
    return Diagnosis(base.tool, base.family, tuple(captures), base.summary)


def _verdict(label: Label) -> Verdict:
    evidence: Literal["none", "seen"] = "none" if label == "clean" else "seen"
    return Verdict((label,), evidence, (f"It was planted to be {label}.",), ("Nothing.",))
