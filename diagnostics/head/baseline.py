"""The recipe of a head: named, recognised by the bits of O, or assumed; and who runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.head import recipe_search as search
from attn_diag.head.flaws import find_flaw
from attn_diag.head.identification import IdentifiedHead
from attn_diag.head.machine import backend_name
from attn_diag.head.recipe_rows import spread_rows
from attn_diag.head.scale_fit import ScaleFit
from attn_diag.kernels import (
    RECIPES,
    EmulatedHead,
    Recipe,
    RecipeNotSupportedError,
    check_supported,
    emulate_head,
    preset,
)
from attn_diag.reference import AttentionHead, format_of, reference_rows, round_nearest_even

Engine = Literal["emulation", "triton"]

DEFAULT_RECIPE = "fa2"
_INPUT_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def require_known(engine: str, recipes: Sequence[str | Recipe]) -> Engine:
    """The engine of that name. Raises InputError for an engine or a preset that does not exist."""
    if engine not in ("emulation", "triton"):
        raise InputError(f"engine must be emulation or triton, got {engine!r}")
    for name in recipes:
        if isinstance(name, str) and name not in RECIPES:
            raise InputError(f"no recipe {name!r}; known: {', '.join(RECIPES)}")
    return "emulation" if engine == "emulation" else "triton"


def select_recipes(
    capture: Capture, wanted: Sequence[str | Recipe], engine: Engine, *, needed: bool
) -> dict[str, Recipe]:
    """The recipes to run, by the name of the observation they become; the default one where one is ``needed``.

    Raises InputError for inputs that no recipe covers, and for recipes that the engine cannot run.
    """
    dtype = capture.tensors["q"].dtype
    chosen: dict[str, Recipe] = {}
    for item in list(wanted) or ([DEFAULT_RECIPE] if needed else []):
        if dtype not in _INPUT_FORMATS:
            named = str(dtype).removeprefix("torch.")
            raise InputError(
                f"{capture.source}: recipes are run for bfloat16 and float16 inputs, q is {named}; "
                "capture an observation (o) to inspect this input"
            )
        fmt: Any = _INPUT_FORMATS[dtype]
        recipe = preset(item, fmt, capture.head_dim) if isinstance(item, str) else item.for_input(fmt)
        try:
            _check(engine, recipe)
        except RecipeNotSupportedError as error:
            raise InputError(str(error)) from None
        chosen[f"{recipe.name} ({'emulated' if engine == 'emulation' else engine})"] = recipe
    return chosen


def run_recipe(engine: Engine, recipe: Recipe, head: AttentionHead) -> EmulatedHead:
    """What the recipe returns for one head. Raises InputError where the engine cannot run it here."""
    if engine == "emulation":
        return emulate_head(recipe, head)
    from attn_diag.kernels.backend import BackendError
    from attn_diag.kernels.triton_head import run_head

    try:
        return run_head(recipe, head)
    except (BackendError, ValueError) as error:
        raise InputError(f"--engine triton: {error}") from None


def engine_backend(engine: Engine, device: torch.device) -> str:
    """What a report calls the origin of the numbers."""
    if engine == "emulation":
        return f"emulation on {backend_name(device)}"
    from attn_diag.kernels.backend import describe_backend

    return describe_backend(device)


def _check(engine: Engine, recipe: Recipe) -> None:
    if engine == "emulation":
        check_supported(recipe)
        return
    from attn_diag.kernels.attention import check_kernels_support

    check_kernels_support(recipe)


# Rows that are compared: as many as have so many scores together, and at least so many.
_SCORES, _ROWS = 2**18, 48
# Two well-rounded kernels of 16 bits differ by up to 1.2 such roundings of O, the presets below 16 bits by 5 and more:
# all but SageAttention's where scores hardly differ, which rounds q and k alone (1.0 to 1.8; N(0,1) times 0.02 to 2).
# A kernel that casts less than they do may be further off them, and is as near to the rounded truth: the presets below
# 16 bits, but the one named, are 1.5 (kv-int8) to 580 roundings off it (N(0,1) times 0.02 to 10, and other inputs).
_NEAR = 1.3


@dataclass(frozen=True)
class Recognised:
    """The known recipe that fits a captured O best."""

    recipe: Recipe
    """The recipe."""
    agreement: float | None
    """The fraction of compared elements that it reproduces bit for bit; None where it was stated, not recognised."""
    name: str
    """The names of all recipes that fit as well."""
    flaw: str = ""
    """Where its O is not the recipe's, in words; empty: nowhere."""
    cut_off: bool = False
    """Whether the agreement is that of sums of products as a Hopper tensor core makes them, not of fp32 sums."""

    @property
    def words(self) -> str:
        """The name, how its products are summed, and where O is not as it says."""
        named = f"{self.name} with a tensor core's sums" if self.cut_off else self.name
        return f"{named}, but {self.flaw}" if self.flaw else named


def recognise(capture: Capture, observation: str, batch: int, head: int) -> Recognised | None:
    """The published kernel of an observation, from a few rows of one head: the shallow end of ``identify``'s search.

    On the CPU, whatever the device of the rest: so few rows take a GPU longer to launch than a CPU to compute.

    Args:
        capture: The capture.
        observation: One of its observations.
        batch: Index of the batch item.
        head: Index of the head in the capture.

    Returns:
        None where no known recipe fits, or where none covers the formats of inputs and O.
    """
    device = torch.device("cpu")
    subject = search.read_subject(capture, observation, batch, head, device)
    if subject is None:
        return None
    q_length, k_length = capture.lengths(batch)
    rows = compared_rows(q_length, k_length, device)
    recipes, nearest = search.known(subject), math.inf
    # Kernels with fp32 scores first: a match among them is never mistaken for one with coarse scores.
    for fine in (True, False):
        trials = search.first_trials(subject, [r for r in recipes if (r.scores == "fp32") == fine], rows)
        if fine and not search.fits(subject, trials[0]):
            trials = search.ranked([*trials, *search.split_trials(subject, rows)], subject.head_dim)
        nearest = min(nearest, *(_distance(t.out, subject.observed[rows]) for t in trials))
        if fit := search.fitting(subject, trials, rows)[0]:
            return recognised_as(subject, fit, trials, rows)
    if nearest >= _NEAR:
        truth = reference_rows(replace(subject.inputs.head, do=None), rows).out
        rounded = round_nearest_even(truth, format_of(subject.observed.dtype))
        nearest = min(nearest, _distance(rounded, subject.observed[rows]))
    return _below_16_bits(subject, rows, scores_alone=nearest < _NEAR)


def recognise_low_bit(capture: Capture, observation: str, batch: int, head: int) -> Recognised | None:
    """The published kernel below 16 bits whose bits a head's O has, in a few rows; None: it has none's; on the CPU."""
    device = torch.device("cpu")
    subject = search.read_subject(capture, observation, batch, head, device)
    return None if subject is None else _below_16_bits(subject, compared_rows(*capture.lengths(batch), device))


def _below_16_bits(subject: search.SearchedHead, rows: Tensor, *, scores_alone: bool = False) -> Recognised | None:
    narrow, _ = search.low_bit_trials(subject, rows, scores_alone=scores_alone)
    for trial in narrow[:1]:
        if trial.match.agreement >= search.threshold(subject.fmt, trial.match.equal.numel(), trial.recipe):
            return Recognised(trial.recipe, trial.match.agreement, trial.recipe.name)
    return None


def has_bits(recipe: Recipe, capture: Capture, observation: str, batch: int, head: int) -> bool:
    """Whether a head's O has a recipe's bits, in as many elements of a few rows as the right one has; on the CPU."""
    return rows_with_bits(recipe, capture, observation, batch, head) is not None


def rows_with_bits(
    recipe: Recipe, capture: Capture, observation: str, batch: int, head: int, also: Sequence[int] = ()
) -> tuple[float, Tensor, Tensor] | None:
    """How much of a few rows of O has a recipe's bits, these rows, int64 [R], and the recipe's O there, [R, D].

    None: it has fewer than of the right one. ``also``: other rows that are run, and not counted.
    """
    device = torch.device("cpu")
    subject = search.read_subject(capture, observation, batch, head, device)
    if subject is None:
        return None
    counted = compared_rows(*capture.lengths(batch), device)
    rows = torch.unique(torch.cat([counted, torch.tensor(also, dtype=counted.dtype)]))
    (trial,) = subject.run([recipe], rows)
    same = trial.match.equal.reshape(len(rows), -1)[torch.isin(rows, counted)]
    found = float(same.double().mean())
    return (found, rows, trial.out) if found >= search.threshold(subject.fmt, same.numel(), recipe) else None


def compared_rows(q_length: int, k_length: int, device: torch.device) -> Tensor:
    """The rows by which a kernel is recognised, int64 [R]."""
    return spread_rows(q_length, max(_ROWS, _SCORES // k_length), device)


def recognised_as(
    subject: search.SearchedHead, fit: Sequence[search.Trial], trials: Sequence[search.Trial], rows: Tensor
) -> Recognised:
    """What is recognised where ``fit`` of the ``trials`` on these rows fits, both best first."""
    best = fit[0]
    names = [t.recipe.name for t in fit if best.match.compare(t.match).p_value > search.LEVEL]
    with_fp32_sums = next(t for t in trials if replace(t.recipe, exp=best.recipe.exp) == best.recipe)
    flaw = find_flaw(subject, with_fp32_sums, rows, misses_many=best.cut_off)
    words = "" if flaw is None else flaw.words
    return Recognised(best.recipe, best.match.agreement, " or ".join(dict.fromkeys(names)), words, best.cut_off)


def _distance(out: Tensor, observed: Tensor) -> float:
    """Root mean square of the difference, in roundings to the format of ``observed``: half its epsilon / sqrt(12)."""
    x, y = out.double(), observed.double()
    return float((x - y).norm() / (y.norm() * torch.finfo(observed.dtype).eps / 2 / math.sqrt(12)))


@dataclass(frozen=True)
class Baseline:
    """The recipe that a head is taken to be made by."""

    recipe: Recipe
    """The recipe."""
    name: str
    """Its name, or the names of all recipes that fit as well."""
    origin: Literal["given", "recognised", "assumed"]
    """Where it comes from."""
    agreement: float | None = None
    """Where it was recognised, the fraction of the compared elements of O that it reproduces bit for bit."""
    flaw: str = ""
    """Where it was recognised, where O is not the recipe's, in words; empty: nowhere."""
    unfit: str = ""
    """Where an O was captured that no recipe has, that in a sentence; empty: there is a recipe, or no O."""
    by_kernel: bool = False
    """Whether those elements are compared with what the recipe's Triton kernel returns, not its emulation."""

    @property
    def caution(self) -> str:
        """Why what follows from the recipe is not about the captured kernel; empty: it is, or none was captured."""
        if self.flaw:
            return f"O is {self.name}'s, but {self.flaw}: no rounding of that recipe makes this."
        return self.unfit

    @property
    def words(self) -> str:
        """For a report."""
        if self.origin == "recognised" and self.agreement is not None:
            # Never rounded up: 100 % is said of every bit alone.
            share = math.floor(1e4 * self.agreement) / 100
            how = "recognised by its Triton kernel" if self.by_kernel else "recognised"
            known = f"{self.name}, {how} ({share:g} % of sampled elements of O bit-equal)"
            return f"{known}, but {self.flaw}" if self.flaw else known
        reason = "as asked for" if self.origin == "given" else "assumed: no captured O was recognised"
        return f"{self.name}, {reason}"


def find_baseline(
    capture: Capture, wanted: str | Recipe | None, found: IdentifiedHead | None, scale: ScaleFit | None = None,
    not_fused: str = "",
) -> Baseline:  # fmt: skip
    """The recipe ``wanted``, else the one ``found`` by the bits of O, else fa2.

    Args:
        capture: The capture.
        wanted: A recipe, or its name.
        found: What the search for the captured O's recipe ended with.
        scale: Another scale that this O fits.
        not_fused: What attention stores that is not fused and has this O's bits, in words; empty: none is known.

    Raises:
        InputError: The recipe does not exist, or no recipe covers the inputs.
    """
    if wanted is None and found is not None and found.recipe is not None:
        flaw = "" if found.flaw is None else found.flaw.words
        agreement = found.best.match.agreement
        return Baseline(found.recipe, found.name, "recognised", agreement, flaw, by_kernel=found.by_kernel)
    chosen = DEFAULT_RECIPE if wanted is None else wanted
    require_known("emulation", [chosen])
    (recipe,) = select_recipes(capture, [chosen], "emulation", needed=True).values()
    unfit = ""
    if wanted is None and found is not None:
        nearest = found.nearest if scale is None else f"{found.nearest}; {scale.words}"
        why = f" (nearest: {nearest})"
        if found.loop:
            why = f": its bits are those of {found.loop}, where {recipe.name} keeps fp32"
        elif not_fused:
            fused = f"and {recipe.name} is a fused kernel's"
            why = f": its bits are those of attention that is not fused ({not_fused}), {fused}"
        unfit = f"No recipe that is known here made this O{why}."
    return Baseline(recipe, recipe.name, "assumed" if wanted is None else "given", unfit=unfit)


def observation_with_o(capture: Capture, wanted: str | None) -> str | None:
    """The observation asked for, else the first that has an O; None where none has. Raises InputError."""
    with_o = [name for name, outputs in capture.observations.items() if "o" in outputs]
    if wanted is None:
        return with_o[0] if with_o else None
    if wanted not in with_o:
        known = ", ".join(with_o) or "none"
        raise InputError(f"{capture.source}: no observation {wanted!r} with an O; there are: {known}")
    return wanted
