"""``attn_diag.assert_unbiased``: does the signed error of any tensor have a mean, beyond one correct rounding?

    excess = observed - RN(reference)        RN: one rounding to observed's dtype, nearest, ties to even

Two means are tested: of the excess ("upward") and of excess times the reference's sign ("away from zero", which a
truncating cast moves although numbers of both signs leave the first at zero). p-values are adjusted by Holm (Scand. J.
Stat. 6 (1979) 65); where the reference has one sign only, the two are one.

The null hypothesis: the excess has mean zero, and is independent between clusters. So says a kernel that rounds
correctly (every excess is zero), and one whose inner errors have mean zero. Clusters, unless given:

- the leading indices (all before the last two) where there are at least 8, as the heads of [B, H, T, D];
- else the rows (all indices but the last): the elements of a row may share an error, as of a row sum;
- and beside either, the features (the last index) where there are at least 8: the rows may share an error too, as of a
  weight's or a value's rounding. Two-way clustering, ``statistics.means.two_way``. Where nothing is shared that makes
  the smallest detectable bias larger: 1.02 times with 128 features, 1.1 with 40, 1.3 with 16, 1.7 with 8.

L or delta, [B, H, T], have their heads for rows and their positions for features; ``.unsqueeze(-1)`` makes rows of the
positions. What spans both ways, such as one wrong scale for a whole tensor of few heads, is no noise but a bias, and is
found as one. How far the reference lies from a representable number is taken as random: where many rows are copies of
one another, give labels as clusters. The estimator is ``statistics.means.estimate_biases``; its docstring has the
sources.

Measured by ``tests/test_unbiased.py`` (with 4,000 redraws instead of its 500), where errors are independent, shared by
rows, features or heads, or rounded stochastically: alarms of 3.8 to 4.9 % at level 5 %, and 0.5 to 1.0 % at 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.signed_errors import by_feature, of_elements
from attn_diag.printing import printable
from attn_diag.reference import format_of, round_nearest_even, ulp
from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.statistics.means import MIN_SEQUENCES, BiasCase, estimate_biases, holm

Clusters = Tensor | np.ndarray | Sequence[int]

_SHOWN = 3  # heads and rows in a failure's text


@dataclass(frozen=True)
class TensorBias(BiasEstimate):
    """The mean excess of a tensor. ``minimum_detectable`` is for the test as made: at ``level`` / number of tests."""

    away: BiasEstimate | None = None
    """The mean of the excess times the reference's sign; None where that has one sign only."""
    level: float = 0.01
    """Chance of a false alarm."""
    spacing: float = math.nan
    """Mean ulp of the reference."""
    clustered_by: str = ""
    """What the clusters are, in words."""
    largest: tuple[str, ...] = field(default=(), repr=False)
    """Where the excess is largest, in lines of text."""

    @property
    def directions(self) -> dict[str, BiasEstimate]:
        """The estimates by the direction in which they count."""
        return {"upward": self} if self.away is None else {"upward": self, "away from zero": self.away}

    @property
    def biased(self) -> tuple[str, ...]:
        """The directions whose adjusted p-value is at most ``level``."""
        found = {name: e.p_adjusted for name, e in self.directions.items()}
        return tuple(name for name, p in found.items() if p is not None and p <= self.level)

    @property
    def minimum_detectable_ulp(self) -> float | None:
        """The mean, in ulp, that is found with 80 % power in either direction; None where nothing was tested."""
        known = [e.minimum_detectable for e in self.directions.values() if e.minimum_detectable is not None]
        return max(known) / self.spacing if known else None


def assert_unbiased(
    observed: Tensor,
    reference: Tensor,
    *,
    clusters: Clusters | None = None,
    level: float = 0.01,
    name: str = "tensor",
) -> TensorBias:
    """Raise AssertionError if ``observed`` is biased against ``reference`` beyond one correct rounding.

        found = attn_diag.assert_unbiased(layer_norm(x), layer_norm(x.double()), name="layer norm")
        assert found.minimum_detectable_ulp < 0.05         # an unbiased kernel must not pass for want of data

    Args:
        observed: [n] or [..., T, D], any floating dtype below float64 (bfloat16, float16, float32, float8_e4m3fn,
            float8_e5m2), any device.
        reference: The same mathematics on the same inputs: the same shape, float64 or float32, of more precision than
            ``observed``. Its own error counts as observed's; that of float32 is below 2^-16 ulp of BF16 an operation.
        clusters: Labels (integers) of what may share an error, of the shape of observed's first dimensions: [B], [B, H]
            or [B, H, T] for [B, H, T, D]. They replace the leading indices or rows of the module's docstring.
        level: Probability of a false alarm on an unbiased tensor.
        name: What messages call the tensor.

    Returns:
        The estimate. One that is not biased says with ``minimum_detectable_ulp`` what it would have found.

    Raises:
        AssertionError: A mean differs from zero at ``level`` (the text says where and how much), or observed is not
            finite where the rounded reference is.
        InputError: Shapes, dtypes, labels or the level cannot be used, the reference holds NaN, or there are fewer than
            two clusters.
    """
    __tracebackhide__ = True
    name = printable(name)
    found = tensor_bias(observed, reference, clusters=clusters, level=level, name=name)
    if found.biased:
        raise AssertionError(_failure(found, observed, name))
    return found


def tensor_bias(
    observed: Tensor, reference: Tensor, *, clusters: Clusters | None = None, level: float = 0.01, name: str = "tensor"
) -> TensorBias:
    """What ``assert_unbiased`` judges, without a judgement on means."""
    _validate(observed, reference, level, name)
    rows = observed.shape[:-1] if observed.ndim > 1 else observed.shape
    truth = reference.detach().to(observed.device, torch.float64).reshape(math.prod(rows), -1)
    excess, spacing = _excess(observed.detach().double().reshape(truth.shape), truth, observed, name)
    keys, words = _clusters(clusters, rows, truth.shape[1], name)
    signs = truth.sign()
    values = {"upward": excess}
    if bool((signs > 0).any()) and bool((signs < 0).any()):
        values["away"] = excess * signs
    tests = {
        direction: _estimate(v, float(spacing.sum()), keys, level / len(values)) for direction, v in values.items()
    }
    adjusted = dict(zip(tests, holm([t.p_value for t in tests.values()]), strict=True))
    estimates = {direction: replace(t, p_adjusted=adjusted[direction]) for direction, t in tests.items()}
    known = {direction: p for direction, p in adjusted.items() if p is not None}
    worst = min(known, key=lambda direction: known[direction], default="upward")
    return TensorBias(
        **{f.name: getattr(estimates["upward"], f.name) for f in fields(BiasEstimate)},
        away=estimates.get("away"),
        level=level,
        spacing=float(spacing.mean()),
        clustered_by=words,
        largest=_largest(values[worst], spacing, rows),
    )


def _validate(observed: Tensor, reference: Tensor, level: float, name: str) -> None:
    for what, given in (("observed", observed), ("reference", reference)):
        if not isinstance(given, Tensor):
            raise InputError(f"{name}: {what} must be a torch tensor, got {type(given).__name__}; use torch.as_tensor")
    if observed.shape != reference.shape:
        raise InputError(
            f"{name}: observed and reference must have one shape, got {list(observed.shape)} and "
            f"{list(reference.shape)}; nothing is broadcast"
        )
    if not observed.numel() or not observed.ndim:
        raise InputError(f"{name}: expected [n] or [..., T, D] with elements, got shape {list(observed.shape)}")
    try:
        coarse = format_of(observed.dtype).precision
    except KeyError:
        coarse = 64
    fine = {torch.float32: 23, torch.float64: 52}.get(reference.dtype, 0)
    if coarse >= fine:
        raise InputError(
            f"{name}: reference must be float64 or float32 and more precise than observed, got observed "
            f"{_dtype(observed)} and reference {_dtype(reference)}; compute the reference in float64"
        )
    if not 0 < level < 1:
        raise InputError(f"{name}: level must lie between 0 and 1, got {level}")
    missing = reference.isnan()
    if bool(missing.any()):
        raise InputError(
            f"{name}: reference has {int(missing.sum())} NaN, the first at {_first(missing)}; leave such rows out"
        )


def _excess(seen: Tensor, truth: Tensor, observed: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Excess and spacing, both float64 [rows, D]; equal infinities have neither."""
    fmt = format_of(observed.dtype)
    rounded = round_nearest_even(truth, fmt)
    excess = torch.where(seen == rounded, 0.0, seen - rounded)
    broken = ~excess.isfinite()
    if bool(broken.any()):
        first = tuple(int(i) for i in np.unravel_index(int(broken.flatten().nonzero()[0]), observed.shape))
        raise AssertionError(
            f"{name}: observed is not finite where the reference rounded to {_dtype(observed)} is, or the other way "
            f"round, in {int(broken.sum())} of {broken.numel()} elements; the first is {list(first)}: "
            f"{seen.flatten()[broken.flatten()][0]:g} instead of {rounded.flatten()[broken.flatten()][0]:g}"
        )
    return excess, torch.where(truth.isfinite(), ulp(truth, fmt), 0.0)


def _clusters(given: Clusters | None, rows: Sequence[int], features: int, name: str) -> tuple[Tensor, str]:
    """A label for every row, from 0 without gaps, and what the clusters are, in words."""
    count, leading = math.prod(rows), rows[:-1]
    if given is not None:
        labels = torch.as_tensor(given).detach().cpu()
        if labels.is_floating_point() or labels.is_complex() or tuple(labels.shape) != tuple(rows[: labels.ndim]):
            raise InputError(
                f"{name}: clusters must be integers of the shape of observed's first dimensions, one of "
                f"{', '.join(str(list(rows[: i + 1])) for i in range(len(rows)))}, got {_dtype(labels)} "
                f"{list(labels.shape)}"
            )
        unique, keys = torch.unique(labels, return_inverse=True)
        keys = keys.reshape(-1).repeat_interleave(count // labels.numel())
        number, words = len(unique), "given clusters"
    elif math.prod(leading) >= MIN_SEQUENCES:
        number, words = math.prod(leading), "heads (leading indices)"
        keys = torch.arange(number).repeat_interleave(rows[-1])
    else:
        number, words = count, "rows" if features > 1 else "elements"
        keys = torch.arange(count)
    by_feature = features >= MIN_SEQUENCES
    if number < 2 and not (by_feature and given is None):
        raise InputError(f"{name}: a mean can be tested from two clusters on, got {number} ({words})")
    return keys, f"{number:,} {words}" + (f" and {features:,} features" if by_feature else "")


def _estimate(values: Tensor, spacing: float, keys: Tensor, level: float) -> BiasEstimate:
    errors = of_elements(values, spacing)
    if values.shape[1] >= MIN_SEQUENCES:
        errors = by_feature(errors, values, keys.to(values.device))
    return estimate_biases([BiasCase(errors, keys.numpy(), with_drift=False, attention=False)], level)[0]


def _largest(values: Tensor, spacing: Tensor, rows: Sequence[int]) -> tuple[str, ...]:
    """The leading indices and rows whose summed excess is largest, each with its mean in ulp."""
    lines = []
    total, unit = values.sum(1), spacing.sum(1)
    groups = [("rows" if values.shape[1] > 1 else "elements", rows)]
    if math.prod(rows[:-1]) > 1:
        groups.insert(0, ("heads", rows[:-1]))
    for what, shape in groups:
        sums, units = (x.reshape(math.prod(shape), -1).sum(1) for x in (total, unit))
        picked = sums.abs().topk(min(_SHOWN, len(sums))).indices.tolist()
        shown = [
            f"{[int(i) for i in np.unravel_index(at, shape)]} {float(sums[at] / units[at]):+.3g} ulp"
            for at in picked
            if float(sums[at])
        ]
        lines.append(f"{what}, largest first: {', '.join(shown)}")
    return tuple(lines)


def _failure(found: TensorBias, observed: Tensor, name: str) -> str:
    lines = [f"{name} is biased: its excess over one correct rounding has a mean (level {found.level:g})"]
    for direction, estimate in found.directions.items():
        lines.append(f"  {direction:14}  {_numbers(estimate, found.spacing)}")
        if direction in found.biased:
            lines[-1] += "  <- biased"
    n_eff = "–" if found.n_eff is None else f"{found.n_eff:.3g}"
    lines += [
        f"  {found.n:,} elements of {_dtype(observed)} {list(observed.shape)}; mean ulp {found.spacing:.3g}",
        f"  clusters: {found.clustered_by}; n_eff {n_eff}; p after Holm",
        *(f"  {line}" for line in found.largest),
    ]
    if (detectable := found.minimum_detectable_ulp) is not None:
        lines.append(f"  (a bias of {detectable:.2g} ulp is found here with 80 % power)")
    return "\n".join(lines)


def _numbers(estimate: BiasEstimate, spacing: float) -> str:
    mean = f"{estimate.mean_ulp or 0.0:+.3g} ulp"
    if estimate.ci95 is None or estimate.t is None or estimate.p_adjusted is None:
        return f"{mean}, not tested: every excess is zero"
    low, high = (bound / spacing for bound in estimate.ci95)
    p = "p < 1e-300" if estimate.p_adjusted < 1e-300 else f"p = {estimate.p_adjusted:.2g}"
    return f"{mean}, 95 % [{low:+.3g}, {high:+.3g}], t = {estimate.t:.3g}, {p}"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _first(mask: Tensor) -> list[int]:
    return [int(i) for i in mask.nonzero()[0]]
