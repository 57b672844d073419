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
from attn_diag.head.declared_beside import PART, BesideRecipe
from attn_diag.head.declared_factors import CLIPPED, CLIPPED_VALUES, FACTOR, FACTOR_OF_SUMS, FactorSearch, beyond_chance
from attn_diag.head.declared_noise import directions_of, dithered, drawn_noise, smoothed_variance
from attn_diag.head.declared_scales import ScaleSearch
from attn_diag.head.quality import AS_GOOD, BEYOND, LOSSY, Drawn, QuantitySample, sample
from attn_diag.kernels import LOW_BIT, Recipe, RecipeNotSupportedError, check_supported, preset
from attn_diag.kernels.emulation_operands import Operands
from attn_diag.kernels.quantizers import NO_QUANTIZER, parse_quantizer
from attn_diag.kernels.recipe import BACKWARD
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


def is_undeclared(capture: Capture, found: Recognised) -> bool:
    """Whether a kernel works below 16 bits, and the capture declares none."""
    return capture.metadata.declared is None and found.recipe.name in LOW_BIT


def undeclared_words(capture: Capture, found: Recognised | None) -> tuple[str, ...]:
    """What is said of a capture whose O has the bits of a recipe below 16 bits that it does not declare."""
    if found is None or not is_undeclared(capture, found):
        return ()
    name = found.recipe.name
    equal = f"{share(found.agreement)} of " if found.agreement is not None else ""
    said = f"O has {equal}the bits of {name}, a kernel below 16 bits, and was held against one of 16"
    return (f"{said}: if that is what it is meant to be, declare it (--declared {name}).",)


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

    def scales_of(self, out: Tensor, lse: Tensor | None = None) -> ScaleSearch:
        """What tells which scales made O [Tq, Dv] and L [Tq]."""
        noise = drawn_noise([self.draw(n)["o"] for n in range(DRAWS)])
        beside = BesideRecipe(self.recipe, self._head, out, self.outputs()["o"], noise, lse)
        return ScaleSearch(beside.in_own_tiles() if self.recipe.quantized else beside)

    def factors_of(self, out: Tensor, lse: Tensor | None, rows: Tensor) -> FactorSearch:
        """What tells by what O [Tq, Dv] and L [Tq] are multiplied, looked at in these rows."""
        made = self.outputs(tensor_core=self.hardware)
        draws = [self.draw(n) for n in range(DRAWS)]
        sums_known = self.hardware or self.recipe.accumulation != "nvidia-tensor-core"
        return FactorSearch(
            head=self._head,
            out=out - made["o"],
            noise=drawn_noise([d["o"] for d in draws]),
            lse=None if lse is None else (lse - made["lse"], drawn_noise([d["lse"] for d in draws])),
            rows=rows,
            limit=FACTOR if sums_known else FACTOR_OF_SUMS,
            blocks={
                "q": _shared_rows(self.recipe.quantize_q, self._head.q),
                "k": _shared_rows(self.recipe.quantize_k, self._head.k),
            },
            smoothed=self.recipe.smooth_k != "none",
        )

    def said_of_lse(self, lse: Tensor) -> str:
        """In words, what was made of k's mean in L [Tq] otherwise than stated; empty: nothing that L shows."""
        if self.recipe.smooth_k == "none":
            return ""
        rows = lse.isfinite().nonzero()[:, 0]
        shift = Operands(replace(self._head, do=None)).prepared(self.recipe).shift(self.recipe, rows).double()
        off, size = (lse - self.outputs()["lse"])[rows], float(shift.square().sum())
        said = {1: "the mean that is taken off k is not added back to it", -1: "k's mean is added to it twice"}
        for times, words in said.items():
            if float((off + times * shift).square().sum()) <= PART**2 * size:
                return words
        return ""

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


def _shared_rows(text: str, x: Tensor) -> int | None:
    """So many rows of x [T, D] share a quantiser's scales; None: all, or one has several."""
    by = parse_quantizer(text)
    rows = 1 if by is None else by.block_shape((len(x), x.shape[1]))[0]
    return rows if 1 < rows < len(x) else None


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
    from_lse: Tensor | None = None,
) -> QuantitySample:
    """Compare one quantity with what the declared recipe returns for it.

    Args:
        observed, reference, total, variance, fmt, rows, fed, clusters: As of ``beside_well_rounded``.
        declared: Of the query heads that make it.
        from_lse: dV as a backward of 16 bits makes it from the captured L; None: it is not dV, or unknown.
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
    plain = (total([d.in_16_bits.outputs() for d in declared]) - reference)[rows].square().sum()
    beyond = 0.0
    if from_lse is not None and not set(declared[0].recipe.quantized) & set(BACKWARD):
        # A kernel may return another L than its backward takes.
        size = float(reference[rows].square().sum())
        # Rows whose L is too small have a P above 1, which rounds by as much more.
        parts = [
            float((observed - true)[rows].square().sum()) / max(float(true[rows].square().sum()), size)
            for true in (from_lse, reference)
        ]
        beyond = math.sqrt(min(parts) * size / float(plain)) if float(plain) and size else 0.0
    return replace(
        chosen,
        declared=declared[0].recipe.name,
        in_16_bits=float(plain),
        beyond_backward=beyond if beyond > _BACKWARD else 0.0,
    )


# Two dV that are made from one L in 16 bits differ by sqrt(2) of what one errs by.
_BACKWARD = math.sqrt(2) * LOSSY**2


def with_scale_faults(
    found: QuantitySample, observed: Tensor, lse: Tensor | None, declared: DeclaredKernel, rows: Tensor
) -> QuantitySample:
    """O of one head beside what it is declared to be, with the scales or roundings that are not the recipe's.

    Args:
        found: Of ``beside_declared``.
        observed: O, [Tq, Dv].
        lse: L, [Tq]; None where it was not captured.
        declared: What the head is declared to be.
        rows: Those that are compared.
    """
    ratio = found.ratio()
    lossy = ratio is not None and ratio.low > LOSSY
    suspect = lossy or bool(found.outlying.any())
    factors = declared.factors_of(observed, lse, rows).named(suspect=suspect)
    search = declared.scales_of(observed, lse)
    # What is clipped, or rounded toward zero, is smaller on average, which looks like a factor.
    other = search.culprit(thorough=bool(factors.words) or suspect or not search.as_declared())
    known = factors.words and factors.throughout and search.explained_by(factors)
    if other is None or (known and search.with_factors(factors) < other.left):
        less = CLIPPED if factors.smaller else CLIPPED_VALUES if factors.out < 1 else ""
        return replace(found, factors=factors.words + ("" if known else less))
    if lossy or not factors.words:
        return replace(found, scales=other.words)
    return replace(found, factors=other.words)


def mean_is_the_recipes(sums: npt.NDArray[np.float64]) -> bool:
    """Whether an observed mean is as near the declared recipe's as another sound kernel's.

    Args:
        sums: Of ``mean_sums.mean_sums``: observed, the recipe's, and those of draws of it.
    """
    # The difference of two kernels has twice the variance of one, as a stochastic draw has.
    return not beyond_chance(float(sums[0] - sums[1]), float(np.std(sums[2:], ddof=1)), len(sums) - 2)
