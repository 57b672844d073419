"""A kernel that is declared to work below 16 bits: what its recipe returns for a head, and how far it may be off.

The yardstick is the declared recipe instead of the 16-bit one (``counterfactual``). What it may be off by, element by
element, is drawn: the recipe is run ``DRAWS`` times with every quantiser and cast rounding stochastically. Over all
positions between two numbers that has twice the variance of rounding to nearest, so half of it is taken. The draws also
say what rows share. All rows have the rounding errors of one k and one v, so that two sound kernels with other scales
may differ by more than their rows, taken as independent, tell: with e_n the draws' errors, tr^2 / ||C||^2 of their
covariance C, from the products e_n . e_m, is the number of independent directions that an error has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.counterfactual import Counterfactuals, returned_by
from attn_diag.head.declared_scales import ScaleSearch, stale_words
from attn_diag.head.quality import AS_GOOD, BEYOND, LOSSY, Drawn, QuantitySample, sample
from attn_diag.kernels import LOW_BIT, Recipe, RecipeNotSupportedError, check_supported, preset
from attn_diag.kernels.formats import Mode, base, parse
from attn_diag.kernels.quantizers import NO_QUANTIZER, parse_quantizer
from attn_diag.kernels.recipe import BACKWARD, FORMATS, QUANTIZERS
from attn_diag.reference import AttentionHead, FloatFormat
from attn_diag.results.wording import share
from attn_diag.statistics.ratios import Carriers

if TYPE_CHECKING:
    from attn_diag.captures.capture import Capture
    from attn_diag.head.baseline import Recognised

DRAWS = 16
# Heads with more scores are held against the recipe with fp32 sums: a tensor core's take fifteen times as long.
_TENSOR_CORE_SCORES = 2**22
# The coarsest recipe: beyond its error nothing is rounding.
_COARSEST = "mxfp4-attention"
_EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2}


def declared_recipe(capture: Capture) -> Recipe | None:
    """The recipe that a capture declares; None where it declares none.

    What was captured in FP8 is not quantised again.

    Raises:
        InputError: There is no such recipe below 16 bits.
    """
    name = capture.metadata.declared
    if name is None:
        return None
    require_declarable(name, f"{capture.source}: declared")
    input_format = {torch.float16: "fp16"}.get(capture.tensors["q"].dtype, "bf16")
    recipe = preset(name, input_format, capture.head_dim)
    stored = {
        f"quantize_{name}": NO_QUANTIZER for name in ("q", "k", "v") if capture.tensors[name].dtype in _EIGHT_BITS
    }
    return replace(recipe, **stored)  # type: ignore[arg-type]


def require_declarable(name: str | None, called: str = "declared") -> None:
    """Raise InputError where ``name``, which messages call ``called``, is no recipe below 16 bits; None is fine."""
    if name is not None and name not in LOW_BIT:
        raise InputError(
            f"{called} must be a recipe below 16 bits ({', '.join(LOW_BIT)}), got {name!r}; a kernel of 16 bits is "
            "held against the best of its format without that"
        )


def undeclared_words(capture: Capture, found: Recognised | None) -> tuple[str, ...]:
    """What is said of a capture whose O has the bits of a recipe below 16 bits that it does not declare."""
    if found is None or capture.metadata.declared is not None or found.recipe.name not in LOW_BIT:
        return ()
    name = found.recipe.name
    equal = f"{share(found.agreement)} of " if found.agreement is not None else ""
    said = f"O has {equal}the bits of {name}, a kernel below 16 bits, and was held against one of 16"
    return (f"{said}: if that is what it is meant to be, declare it (--declared {name}).",)


def dithered(recipe: Recipe, draw: int) -> Recipe:
    """The recipe with every quantiser and cast rounding stochastically, but for the last ones, and fp32 sums."""
    changes: dict[str, str] = {}
    for name in FORMATS:
        rounding = parse(getattr(recipe, name))
        if rounding is not None and rounding.mode is Mode.NEAREST_EVEN and name not in ("input", "out", "dq"):
            changes[name] = f"{base(getattr(recipe, name))}:{Mode.STOCHASTIC}"
    for name in QUANTIZERS:
        text = getattr(recipe, name)
        by = parse_quantizer(text)
        if by is not None:
            changes[name] = f"{text} elements={base(by.elements)}:{Mode.STOCHASTIC} ties=even"
    return replace(recipe, seed=draw + 1, accumulation="fp32-nearest", **changes)  # type: ignore[arg-type]


class DeclaredKernel:
    """What a declared recipe returns for one query head; everything is run when it is first asked for."""

    def __init__(
        self,
        recipe: Recipe,
        head: AttentionHead,
        fmt: FloatFormat,
        stored: Mapping[str, FloatFormat],
        *,
        key_gradients: bool,
    ) -> None:
        """``fmt``: the 16-bit format of the inputs, or of the outputs of FP8 ones; the rest as of ``Counterfactuals``.

        Raises InputError where the recipe cannot be run on this head.
        """
        try:
            check_supported(recipe, head)
        except RecipeNotSupportedError as error:
            raise InputError(f"the declared recipe cannot be run on this head: {error}") from None
        self.recipe, self._head, self._fmt, self._stored, self._keys = recipe, head, fmt, stored, key_gradients
        self.in_16_bits = Counterfactuals(head, fmt, stored, key_gradients=key_gradients)
        """A well-rounded kernel of 16 bits."""
        self.hardware = recipe.accumulation == "nvidia-tensor-core" and self.in_16_bits.scores <= _TENSOR_CORE_SCORES
        """Whether it has a tensor core's own sums, and these take seconds at most."""
        self._found: dict[tuple[str, int | bool], dict[str, Tensor]] = {}

    def nearest(self, out: Tensor) -> DeclaredKernel:
        """This kernel, or with scales of powers of two where O [Tq, Dv] has those."""
        recipe = self.scales_of(out).powers_of_two() if self.recipe.quantized else None
        if recipe is None:
            return self
        found = copy(self)
        found.recipe, found._found = recipe, {}
        return found

    def scales_of(self, out: Tensor) -> ScaleSearch:
        """What tells which scales made O [Tq, Dv]."""
        return ScaleSearch(self.recipe, self._head, out, drawn_noise([self.draw(n)["o"] for n in range(DRAWS)]))

    def outputs(self, *, tensor_core: bool = False) -> dict[str, Tensor]:
        """As of ``run_counterfactual``."""
        sums = "nvidia-tensor-core" if tensor_core else "fp32-nearest"
        return self._run(("sums", tensor_core), replace(self.recipe, accumulation=sums))  # type: ignore[arg-type]

    def draw(self, number: int) -> dict[str, Tensor]:
        """The same of one of the draws."""
        return self._run(("draw", number), dithered(self.recipe, number))

    def coarsest(self) -> dict[str, Tensor]:
        """The same of the coarsest recipe that there is."""
        recipe = preset(_COARSEST, self.recipe.input, self._head.q.shape[1])
        return self._run(("coarsest", 0), recipe)

    def _run(self, key: tuple[str, int | bool], recipe: Recipe) -> dict[str, Tensor]:
        if key not in self._found:
            self._found[key] = returned_by(recipe, self._head, self._fmt, self._stored, key_gradients=self._keys)
        return self._found[key]

    def variance(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The variances ``like`` (a 16-bit kernel's), or where they are larger those of the draws; with lse, [Tq]."""
        found = dict(like)
        for name in ("o", "delta", "lse", "dq", "dk", "dv"):
            if name in self.draw(0):
                drawn = smoothed_variance(drawn_noise([self.draw(n)[name] for n in range(DRAWS)]))
                found[name] = torch.maximum(found[name], drawn) if name in found else drawn
        return found


def drawn_noise(draws: Sequence[Tensor]) -> Tensor:
    """[N, n, D] or [N, n] fp32: what each draw is off their mean, so that its square is the noise's in the mean."""
    every = torch.stack([d.float() for d in draws])
    # Half of the variance of stochastic roundings; N - 1 of N for the mean.
    return (every - every.mean(0)) * math.sqrt(len(draws) / (2 * (len(draws) - 1)))


def smoothed_variance(noise: Tensor) -> Tensor:
    """The noise's variance, [n, D] or [n] float64: that of an element, or what its row and feature have on average."""
    variance = noise.double().square().mean(0)
    if variance.ndim == 1:
        return variance
    shared: Tensor = variance.mean(1, keepdim=True) * variance.mean(0) / variance.mean().clamp(min=1e-300)
    return torch.maximum(variance, shared)


def directions_of(noise: Tensor) -> Tensor:
    """tr^2 / ||C||^2 of the covariance of noise [N, m, w] over w, at least 1: [m]."""
    products = torch.einsum("amw,bmw->mab", noise.double(), noise.double())
    count = len(noise)
    trace = products.diagonal(dim1=1, dim2=2)
    # Of a != b: the products of the traces, and the squares whose mean is ||C||^2.
    traces = (trace.sum(1).square() - trace.square().sum(1)) / (count * (count - 1))
    square = (products.square().sum((1, 2)) - trace.square().sum(1)) / (count * (count - 1))
    # Draws about their own mean have a product of -tr / (N - 1) each.
    square = square - traces / (count - 1) ** 2
    found: Tensor = traces / square.clamp(min=1e-300)
    return found.clamp(1.0, noise.shape[2])


def beside_declared(
    observed: Tensor,
    reference: Tensor,
    total: Callable[[Sequence[dict[str, Tensor]]], Tensor],
    declared: Sequence[DeclaredKernel],
    *,
    variance: Tensor,
    fmt: FloatFormat,
    rows: Tensor,
    fed: Tensor | None,
    clusters: npt.NDArray[np.int64] | None = None,
    by_scale: Callable[[], tuple[Tensor, Tensor]] | None = None,
    lse_apart: Callable[[dict[str, Tensor]], Tensor] | None = None,
    from_lse: Tensor | None = None,
) -> QuantitySample:
    """Compare one quantity with what the declared recipe returns for it.

    Args:
        observed, reference, total, variance, fmt, rows, fed, clusters: As of ``beside_well_rounded``.
        declared: Of the query heads that make it.
        by_scale: Of O, its derivative and L's by the logarithm of alpha; None: wrong factors are not looked for.
        from_lse: dV as a backward of 16 bits makes it from the captured L; None: it is not dV, or unknown.
        lse_apart: What the captured L is off that of a recipe's outputs, [T]; None: L was not captured.
    """
    noise = drawn_noise([total([d.draw(n) for d in declared]) for n in range(DRAWS)])
    variance = torch.maximum(variance, smoothed_variance(noise))
    kept = noise[:, rows]
    drawn = Drawn(
        DRAWS,
        lambda some: directions_of(noise[:, some]),
        lambda some: directions_of(kept[:, :, some].transpose(1, 2)),
    )
    free = float(directions_of(kept.reshape(DRAWS, 1, -1))[0]) if len(rows) else 1.0

    def against(outputs: Sequence[dict[str, Tensor]]) -> QuantitySample:
        made = total(outputs)
        own, theirs = (observed - reference)[rows].flatten(), (made - reference)[rows].flatten()
        size = float(own.square().sum() * theirs.square().sum()) ** 0.5
        alike = float(own @ theirs) / size if size else 1.0
        # What both have in common is no uncertainty of their ratio.
        carriers = Carriers(free / max(1 - alike**2, 1e-9), 1.0, 0.0)
        return sample(
            observed, reference, made, variance, fmt, rows,
            fed=fed, clusters=clusters, carriers=carriers, directions=drawn,
        )  # fmt: skip

    chosen = against([d.outputs() for d in declared])
    found = chosen.ratio()
    if found is not None and found.high > AS_GOOD and all(d.hardware for d in declared):
        chosen = against([d.outputs(tensor_core=True) for d in declared])
        found = chosen.ratio()
    if found is not None and found.low > BEYOND:
        most = [float((total([d.coarsest() for d in declared]) - reference)[rows].square().sum())]
        most += [float(chosen.counterfactual.sum()), float(chosen.expected.sum())]
        most += [] if fed is None else [float((fed - reference)[rows].square().sum())]
        chosen = replace(chosen, ceiling=BEYOND**2 * max(most))
    if by_scale is not None:
        hardware = all(d.hardware for d in declared)
        made = total([d.outputs(tensor_core=hardware) for d in declared])
        limit = _FACTOR if hardware or declared[0].recipe.accumulation != "nvidia-tensor-core" else _FACTOR_OF_SUMS
        of_out, of_lse = by_scale()
        parts = [((observed - made)[rows], reference[rows], of_out[rows], kept)]
        if lse_apart is not None:
            noise_of_lse = drawn_noise([declared[0].draw(n)["lse"] for n in range(DRAWS)])[:, rows]
            apart = lse_apart(declared[0].outputs(tensor_core=hardware))[rows]
            parts.append((apart, torch.zeros_like(apart), of_lse[rows], noise_of_lse))
        lossy = found is not None and found.low > LOSSY
        stale = declared[0].scales_of(observed).stale() if lossy or chosen.outlying.any() else {}
        # What is clipped is smaller on average, which looks like a factor.
        factors = "" if stale else wrong_factors(parts, limit)
        chosen = replace(chosen, factors=factors, scales=stale_words(stale) if stale else "")
    plain = (total([d.in_16_bits.outputs() for d in declared]) - reference)[rows].square().sum()
    beyond = 0.0
    if from_lse is not None and not set(declared[0].recipe.quantized) & set(BACKWARD):
        # A kernel may return another L than its backward takes.
        least = min(float((observed - true)[rows].square().sum()) for true in (from_lse, reference))
        beyond = math.sqrt(least / float(plain)) if float(plain) else 0.0
    return replace(
        chosen,
        declared=declared[0].recipe.name,
        in_16_bits=float(plain),
        beyond_backward=beyond if beyond > _BACKWARD else 0.0,
    )


# Two dV that are made from one L in 16 bits differ by sqrt(2) of what one errs by.
_BACKWARD = math.sqrt(2) * LOSSY**2
# A softmax scale in BF16 is up to 0.4 % off. Where a tensor core's sums are too many to be followed, they are up to 7 %
# too small (benchmarks/bench_fp8_products.py).
_FACTOR, _FACTOR_OF_SUMS = 0.02, 0.15


def wrong_factors(parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], limit: float) -> str:
    """What O or its scores are multiplied by that they should not be, in words; empty: nothing.

    A descale factor that is x too large makes O, or the scores, 1 + x times as large: a small error beside the
    format's, but one that all elements share. Both x are fitted by least squares, and are named where they leave no
    more than the difference of two sound kernels, also in the worst row. They are fitted to first order: beside a large
    x one below its square is not named.

    Args:
        parts: Of O, and of L: what it is off the recipe's [n, D] or [n], what a factor of 1 + x adds to it over x, its
            derivative by the logarithm of alpha, and ``drawn_noise``, in whose units they are weighed.
        limit: What is no wrong factor yet.
    """
    units = [float(noise.double().square().mean().sqrt()) or 1.0 for *_, noise in parts]
    apart, *shape = (
        torch.cat([part[i].double().flatten() / unit for part, unit in zip(parts, units, strict=True)])
        for i in range(3)
    )
    noise = torch.cat([part[3].double().flatten(1) / unit for part, unit in zip(parts, units, strict=True)], 1)
    shapes = torch.stack(shape, 1)
    gram = shapes.T @ shapes
    if float(torch.linalg.det(gram)) <= 1e-9 * float(gram.diagonal().prod()):
        return ""
    fit = torch.linalg.solve(gram, shapes.T)
    found = fit @ apart
    # Another fault (a mask, a key left out) has a part that looks like a factor, and leaves more than noise.
    left = apart - shapes @ found
    if float(left.square().mean()) > 2 * LOSSY**2 or _has_another_row(left, apart, parts[0], units[0]):
        return ""
    # The difference of two kernels has twice the variance of one.
    deviations = math.sqrt(2) * (fit @ noise.T).std(1)
    said = []
    of_v = "a descale factor of v that is wrong, or casts of P_bar that all round one way"
    of_qk = "a descale factor of q or k, or the softmax scale, that is wrong"
    names = ("it is", of_v), ("its scores are", of_qk)
    for (subject, culprit), factor, deviation in zip(names, found.tolist(), deviations.tolist(), strict=True):
        limit_here = max(limit, float(found.abs().max()) ** 2)
        if abs(factor) > limit_here and _apart(factor, deviation, len(noise)):
            about = "about " if abs(factor) > _FIRST_ORDER else ""
            said.append(f"{subject} multiplied by {about}{1 + factor:.3g} throughout, as by {culprit}")
    return "; ".join(said)


# Factors that are further from 1 are fitted to first order only.
_FIRST_ORDER = 0.1
# A row that is off by more than three times its noise, which factors leave by two thirds of its square, has something
# else: 0.86 to 1.0 measured of masks and keys left out, up to 0.45 of factors up to 1.5 (study_declared.py's kernels).
_ROW_OFF, _ROW_LEFT = 3.0, 2 / 3


def _has_another_row(left: Tensor, apart: Tensor, out: tuple[Tensor, Tensor, Tensor, Tensor], unit: float) -> bool:
    """Whether the worst row of O is off by something that is no factor: ``left`` of ``apart``, in units."""
    shape = out[0].shape
    variance = out[3].double().square().mean((0, 2)) / unit**2
    variance = variance.clamp(min=float(variance.mean()) / 100)
    worst, whole = (float((x[: out[0].numel()].view(shape).square().mean(1) / variance).max()) for x in (left, apart))
    return worst > max(_ROW_OFF**2, _ROW_LEFT * whole)


def _apart(difference: float, deviation: float, draws: int) -> bool:
    """Whether a difference is beyond the chance of ``_MEANS_APART``, its standard deviation known from draws."""
    from scipy.special import stdtr

    return bool(2 * stdtr(draws - 1, -abs(difference) / max(deviation, 1e-300)) <= _MEANS_APART)


# So rarely may a sound kernel's mean be as far from the recipe's: of ten thousand.
_MEANS_APART = 1e-4


def mean_sums(
    runs: Sequence[dict[str, Tensor]], out: Tensor | None, delta: Tensor | None, reference: Tensor, rows: Tensor
) -> dict[str, npt.NDArray[np.float64]]:
    """Sums of O, of O away from zero and of delta: observed, and of every run, [1 + N] each by test."""
    sign = reference[rows].sign()
    found: dict[str, npt.NDArray[np.float64]] = {}
    if out is not None:
        every = [x[rows] for x in (out, *(run["o"] for run in runs))]
        found["o_excess"] = np.array([float(x.sum()) for x in every])
        found["o_away_excess"] = np.array([float((x * sign).sum()) for x in every])
    if delta is not None and "delta" in runs[0]:
        sums = np.array([float(x[rows].sum()) for x in (delta, *(run["delta"] for run in runs))])
        found |= {"delta": sums, "delta_excess": sums}
    return found


def mean_is_the_recipes(sums: npt.NDArray[np.float64]) -> bool:
    """Whether an observed mean is as near the declared recipe's as another sound kernel's.

    Args:
        sums: Of ``mean_sums``: observed, the recipe's, and those of draws of it.
    """
    # The difference of two kernels has twice the variance of one, as a stochastic draw has.
    return not _apart(float(sums[0] - sums[1]), float(np.std(sums[2:], ddof=1)), len(sums) - 2)
