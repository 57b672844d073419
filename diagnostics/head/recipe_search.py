"""The search behind ``identify`` and ``inspect``: emulate recipes on some rows of one head and count equal bits.

Elements of one row share their scores and P, so that all uncertainties are clustered by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.bit_matches import Match
from attn_diag.head.read import HeadInputs, HeadTensors, NonFiniteCensus, inputs_of
from attn_diag.head.recipe_candidates import (
    families,
    known_name,
    known_recipes,
    low_bit_recipes,
    mixtures,
    schedules,
    sink_first,
    split_recipes,
    variants,
)
from attn_diag.head.recipe_rows import in_one_tile, seeing_few, spread_rows
from attn_diag.kernels import Recipe, RecipeNotSupportedError, Schedule, check_supported, emulate_rows_of_several
from attn_diag.kernels.emulation import NO_BLOCK
from attn_diag.kernels.emulation_operands import HeadLike
from attn_diag.kernels.formats import Format, base
from attn_diag.kernels.quantizers import NO_QUANTIZER
from attn_diag.work import map_in_order

# Recipes are shared out over threads from so many rows on. With fewer, operations are so short that threads wait for
# Python's lock: six recipes on 256 rows of 1,024 keys took 1.4 times as long on two threads as on one.
_SHARED_ROWS = 512

FORMATS: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LEVEL = 0.01  # of "told apart"
# The right schedule misses at most 0.2 % of BF16 outputs on N(0,1) (H200): the order of additions and the tensor cores'
# truncation, which are not modelled, now and then move O across a rounding boundary.
_MISSED_BF16 = 0.002
# At most so many does the right recipe miss on long rows, where fp32 sums stand for the tensor core's: 0.3 to 1.4 % of
# 1,024 to 16,384 keys in BF16, 4.5 to 7.8 % of 8,192 keys in FP16 (H100); with sums cut off as there flash, cuDNN and
# this project's kernels miss at most 0.33 % in BF16.
MISSED_BY_SUMS: dict[Format, float] = {"bf16": 0.03, "fp16": 0.12}
# Sums as a tensor core makes them take seconds of more keys, and emulations of all recipes a minute of a CPU's core.
EMULATED_KEYS = 2**15
# So many scores of each such recipe are run with those sums, in so many rows at least: on a CPU they take twenty times
# as long.
_TENSOR_CORE_SCORES, _TENSOR_CORE_ROWS, _ONE_ROW_IN = {"cpu": 2**15, "cuda": 2**18}, 8, 8
_LATE_ROWS = 8  # where all of them speak against a recipe, the p-value is 2^-8
# FlashAttention-2 splits keys where its blocks of 64 query rows, of all heads, are fewer than 1.6 times the GPU's
# multiprocessors, of which none has 160. Late rows show how many splits there are; so many recipes are then compared.
_SPLITTING_ROWS, _SPLITS = 64 * 256, 2
# Of kernels below 16 bits, where an operand's code now and then turns with the last bit of a division.
_MISSED_LOW_BIT = 0.01
_MANTISSA: dict[Format, int] = {"bf16": 7, "fp16": 10}  # 2^p boundaries an octave: the same error crosses as many
# Families of rounding sites that are tried in every schedule: the best in two schedules, and always fp32 scores.
_FAMILIES = 2
# The final comparison takes at least so many recipes of the coarse search, and all that are as good as the best at
# this level; around so many of the leaders the other exponentials and row sums are tried.
_FINALISTS, _COARSE_LEVEL, _LEADERS = 8, 1e-3, 4


@dataclass(frozen=True)
class Trial:
    """A recipe that was run on the compared rows: what it returned ([R, Dv], the recipe's format) and how it fits.

    ``cut_off``: it was run with sums of products as a Hopper tensor core makes them, whatever the recipe says.
    """

    recipe: Recipe
    out: Tensor
    match: Match
    cut_off: bool = False


@dataclass
class SearchedHead:
    """One head of an observation, to be compared: ``observed`` [Tq, Dv] as stored, on the device of the inputs."""

    inputs: HeadInputs
    observed: Tensor
    fmt: Format
    diagonal: bool
    step: Callable[[], None] = field(default=lambda: None)
    made: Callable[[Recipe, Tensor], Tensor] | None = None
    """O of some rows by a recipe's own kernel, [R, Dv] on this device; None: recipes are emulated on chosen rows."""
    made_dq: Callable[[Sequence[Recipe]], list[Tensor]] | None = None
    """dQ of some recipes, [Tq, D] in their format, of many heads at once; None: this head is emulated by itself."""

    @property
    def head_dim(self) -> int:
        """D of q and k."""
        return self.inputs.head.q.shape[1]

    def run(self, recipes: Collection[Recipe], rows: Tensor, *, cut_off: bool = False) -> list[Trial]:
        """Every recipe on ``rows`` (int64 [R], ascending), in the order given; ``cut_off``: see ``Trial``."""
        expected, head = self.observed[rows], replace(self.inputs.head, do=None)
        if self.made is not None and not cut_off:
            outs = [self.made(recipe, rows) for recipe in recipes]
            # What follows counts bits of a few rows, which takes a GPU longer to launch than a CPU to do.
            equal = (torch.stack(outs) == expected).cpu() if outs else ()
            return [Trial(r, out, Match(same)) for r, out, same in zip(recipes, outs, equal, strict=True)]

        def made(some: Sequence[Recipe]) -> list[Trial]:
            runs = [replace(recipe, accumulation="nvidia-tensor-core") if cut_off else recipe for recipe in some]
            outs = emulate_rows_of_several([_in_one_block(run) for run in runs], head, rows)
            return [Trial(r, out, Match(out == expected), cut_off) for r, out in zip(some, outs, strict=True)]

        trials, every = list[Trial](), list(recipes)
        parallel = rows.device.type == "cpu" and len(rows) >= _SHARED_ROWS and torch.get_num_threads() > 1
        for done in map_in_order(made, [[recipe] for recipe in every] if parallel else [every], parallel=parallel):
            trials += done
            for _ in done:
                self.step()
        return trials


def read_subject(
    capture: Capture, observation: str, batch: int, head: int, device: torch.device, known: HeadTensors | None = None
) -> SearchedHead | None:
    """One head of an observation, ``known`` if it is read; None where O is missing, or no recipe covers a format."""
    fmt, key = FORMATS.get(capture.tensors["q"].dtype), capture.key(observation, "o")
    observed = capture.read(key, batch, head)
    if fmt is None or observed is None or observed.dtype != capture.tensors["q"].dtype:
        return None
    # Chosen rows do not tell which query block each was in.
    diagonal = capture.metadata.causal != "none" and "q_positions" not in capture.tensors
    tensors = known or HeadTensors(capture, [(batch, head)], device)
    inputs, out = inputs_of(tensors, batch, head, NonFiniteCensus()), tensors.read(key, batch, head)
    assert out is not None
    return SearchedHead(inputs, out[0].to(observed.dtype), fmt, diagonal)


def known(subject: SearchedHead) -> list[Recipe]:
    """The presets that can be told for this subject."""
    recipes, keys = known_recipes(subject.fmt, subject.head_dim), len(subject.inputs.head.k)
    # A split that holds all keys is none.
    recipes = tuple(r for r in recipes if r.schedule.split_keys is None or r.schedule.split_keys < keys)
    return [r for r in recipes if subject.diagonal or r.schedule.order != "diagonal-first"]


def splits(subject: SearchedHead) -> list[Recipe]:
    """FlashAttention-2 with its keys split in every way, where it might split them."""
    (q_length, width), k_length = subject.inputs.head.q.shape, len(subject.inputs.head.k)
    return split_recipes(subject.fmt, width, k_length) if q_length < _SPLITTING_ROWS else []


def split_trials(subject: SearchedHead, rows: Tensor) -> list[Trial]:
    """Those of ``splits`` on ``rows`` that have most of the last rows' bits; of very many keys none."""
    if len(subject.inputs.head.k) > EMULATED_KEYS:
        return []
    best = ranked(subject.run(splits(subject), rows[-_LATE_ROWS:]), subject.head_dim)[:_SPLITS]
    return subject.run([t.recipe for t in best], rows)


def threshold(fmt: Format, elements: int, recipe: Recipe | None = None) -> float:
    """The agreement from which a recipe fits: what the right one has, less a standard error of so many elements."""
    missed = _MISSED_BF16 * 2.0 ** (_MANTISSA[fmt] - _MANTISSA["bf16"])
    if recipe is not None and recipe.quantized:
        missed = _MISSED_LOW_BIT
    return 1 - missed - math.sqrt(missed * (1 - missed) / elements)


def ranked(trials: list[Trial], head_dim: int) -> list[Trial]:
    """The highest agreement first; of equals the published kernels, then those with fp32 scores."""
    return sorted(
        trials,
        key=lambda t: (-t.match.agreement, known_name(t.recipe, head_dim) is None, t.recipe.scores != "fp32"),
    )


def first_trials(subject: SearchedHead, recipes: Sequence[Recipe], rows: Tensor) -> list[Trial]:
    """The recipes on ``rows``, best first, without those of another order of keys that a few rows rule out.

    Where every query block has an order of its own, a recipe takes as long as several: such a one is run on a few rows
    of one late block first, beside the best without, and left out where it misses many of their bits and is told apart:
    unless that one is right there alone, where a kernel may have gone another way.
    """
    own = [r for r in recipes if r.schedule.order == "diagonal-first"]
    trials = ranked(subject.run([r for r in recipes if r not in own], rows), subject.head_dim)
    if trials and own:
        length, size = len(subject.observed), own[0].schedule.query_block
        start = max(0, length // size - 1) * size  # of the last whole block
        late = start + spread_rows(min(size, length - start), _LATE_ROWS, rows.device)
        right, *tried = subject.run([trials[0].recipe, *own], late)
        alike = right.match.agreement <= trials[0].match.agreement + MISSED_BY_SUMS[subject.fmt]
        missing = [t for t in tried if alike and t.match.agreement < 1 - 2 * MISSED_BY_SUMS[subject.fmt]]
        told_apart = [t.recipe for t in missing if right.match.compare(t.match).p_value <= LEVEL]
        own = [r for r in own if r not in told_apart]
    places = {recipe: place for place, recipe in enumerate(recipes)}
    found = sorted([*trials, *subject.run(own, rows)], key=lambda t: places[t.recipe])
    return ranked(found, subject.head_dim)


def fitting(subject: SearchedHead, trials: list[Trial], rows: Tensor) -> tuple[list[Trial], Tensor]:
    """The trials on ``rows`` if the best of them fits; else those near it with a tensor core's sums, if one fits so.

    Args:
        subject: The head.
        trials: Best first.
        rows: Query rows that they were run on, int64 [R].

    Returns:
        Trials, best first, none where nothing fits; and the rows on which these were run.
    """

    if fits(subject, trials[0]):
        return trials, rows
    near = [t for t in trials if 1 - t.match.agreement <= MISSED_BY_SUMS[subject.fmt]]
    if not near:
        return [], rows
    most = _TENSOR_CORE_SCORES[rows.device.type] // len(subject.inputs.head.k)
    some = _missed_and_spread(near[0].match, max(_TENSOR_CORE_ROWS, most))
    again = ranked(subject.run([t.recipe for t in near], rows[some], cut_off=True), subject.head_dim)
    before = next(t for t in near if t.recipe == again[0].recipe).match.equal[some]
    # What these sums do not cure has another reason.
    better = int(again[0].match.equal.sum()) > int(before.sum())
    again = _built_otherwise(subject, again, rows[some])
    return (again, rows[some]) if better and fits(subject, again[0]) else ([], rows)


def _built_otherwise(subject: SearchedHead, trials: list[Trial], rows: Tensor) -> list[Trial]:
    """Trials with a tensor core's sums, best first, with the other exponent where that is told apart as the better.

    One kernel is built with either: PyTorch compiles FlashAttention-2 with products and differences apart.
    """
    other: dict[str, Any] = {"exp2-fma": "exp2-scaled", "exp2-scaled": "exp2-fma"}
    missing = [t for t in trials if not t.match.equal.all() and t.recipe.exp in other]
    changed = subject.run([replace(t.recipe, exp=other[t.recipe.exp]) for t in missing], rows, cut_off=True)
    for trial, new in zip(missing, changed, strict=True):
        if new.match.agreement > trial.match.agreement and new.match.compare(trial.match).p_value <= LEVEL:
            trials = [new if t is trial else t for t in trials]
    return ranked(trials, subject.head_dim)


def fits(subject: SearchedHead, best: Trial) -> bool:
    """Whether the best of some trials has as many of the observed bits as the right recipe would."""
    match = counted(best, best)
    return match.agreement >= threshold(subject.fmt, match.equal.numel())


def _missed_and_spread(match: Match, count: int) -> Tensor:
    """Indices of ``count`` rows (or all), ascending: half of them those that are missed most, the others spread."""
    missed = (~match.equal).sum(1).argsort(descending=True, stable=True)[: count // 2]
    left = torch.ones(len(match.equal), dtype=torch.bool, device=missed.device)
    left[missed] = False
    rest = left.nonzero()[:, 0]
    return torch.cat([missed, rest[spread_rows(len(rest), count - len(missed), missed.device)]]).sort().values


def counted(trial: Trial, best: Trial) -> Match:
    """A trial in the rows that count: with a tensor core's sums all but the eighth of them that the best misses most.

    Where a rounding of P_bar at a heavy key falls to the other side, as of one long row in ten, a quarter of the row's
    elements move; a wrong recipe misses some in every row.
    """
    if not best.cut_off:
        return trial.match
    equal = best.match.equal
    order = equal.sum(1).argsort(descending=True, stable=True)
    return Match(trial.match.equal[order[: len(equal) - len(equal) // _ONE_ROW_IN]])


def search(subject: SearchedHead, coarse_rows: Tensor, final_rows: Tensor) -> tuple[list[Trial], Tensor, int]:
    """The finalists, best first, the rows on which they were compared, and how many recipes were tried altogether.

    First the presets' rounding sites, with sums in fp32, then with a tensor core's; where none of them fits, kernels
    below 16 bits, then every mixture of the former. Rows are the final ones, or some of them.
    """
    d = subject.head_dim
    found = families(subject.fmt, d)
    if subject.inputs.head.sink is not None:
        found = *found, *map(sink_first, found)
    trials, tried = _tried(subject, coarse_rows, final_rows, found, [r for r in found if r.scores == "fp32"])
    fit, compared = fitting(subject, trials, final_rows)
    if fit:
        return fit, compared, tried
    best = trials[0].match
    narrow, tried_narrow = low_bit_trials(subject, final_rows)
    tried += tried_narrow
    if narrow and narrow[0].match.agreement >= threshold(subject.fmt, best.equal.numel(), narrow[0].recipe):
        return ranked([*narrow, *trials], d), final_rows, tried
    more, tried_more = _tried(subject, coarse_rows, final_rows, mixtures(subject.fmt, d), [])
    known_already = {t.recipe for t in trials}
    return ranked([*trials, *(t for t in more if t.recipe not in known_already)], d), final_rows, tried + tried_more


def ruled_out(subject: SearchedHead, coarse_rows: Tensor) -> bool:
    """Whether ``search`` would find nothing that fits: on a few rows no recipe comes near the bits of O.

    These are rows that see one tile of any schedule, which tell most in the least time, or else ``coarse_rows``.
    """
    rows = in_one_tile(subject.inputs, subject.observed)
    rows = rows if len(rows) else coarse_rows
    trials, _, _ = search(subject, rows, rows)
    return trials[0].match.agreement < 1 - 2 * MISSED_BY_SUMS[subject.fmt]


def low_bit_trials(subject: SearchedHead, rows: Tensor, *, scores_alone: bool = False) -> tuple[list[Trial], int]:
    """Kernels below 16 bits on ``rows``, best first, where a few do not rule them out; and how many were tried.

    ``scores_alone``: only those that round q and k, and nothing else, below 16 bits.
    Their scales are those of all rows of q: where only chosen ones were captured, none.
    """
    if subject.inputs.head.masking.positions is not None:
        return [], 0
    recipes = [r for r in low_bit_recipes(subject.fmt, subject.head_dim) if _runs(r, subject.inputs.head)]
    if scores_alone:
        recipes = [r for r in recipes if r.quantize_v == NO_QUANTIZER and base(r.probs) in FORMATS.values()]
    elements = len(rows) * subject.observed.shape[1]

    def may_fit(trial: Trial) -> bool:
        """Whether what it misses on the few rows is no more than it may miss on all."""
        missed = int((~trial.match.equal).sum())
        return 1 - missed / elements >= threshold(subject.fmt, elements, trial.recipe)

    fit = [t.recipe for t in subject.run(recipes, seeing_few(subject.inputs.head, rows)) if may_fit(t)]
    return ranked(subject.run(fit, rows), subject.head_dim), len(recipes)


def _runs(recipe: Recipe, head: HeadLike) -> bool:
    try:
        check_supported(recipe, head)
    except RecipeNotSupportedError:
        return False
    return True


def _tried(
    subject: SearchedHead, coarse_rows: Tensor, final_rows: Tensor, found: Sequence[Recipe], always: Sequence[Recipe]
) -> tuple[list[Trial], int]:
    """Every schedule on a few rows, with the rounding sites that look best in two of them, and those of ``always``, and
    what is nearer; the leaders, and the presets, on more rows; then other exponentials and row sums around them."""
    d = subject.head_dim
    trials = first_trials(subject, _coarse(subject, coarse_rows, found, always), coarse_rows)
    if not always or not fits(subject, trials[0]):  # what is published says enough
        trials = _climbed(subject, trials, coarse_rows, found)
    tried, best = dict.fromkeys(t.recipe for t in trials), trials[0].match
    leaders = [t.recipe for t in trials[:_FINALISTS]]
    leaders += [t.recipe for t in trials[_FINALISTS:] if best.compare(t.match).p_value > _COARSE_LEVEL]
    chosen = dict.fromkeys([*known(subject), *leaders])
    final = first_trials(subject, list(chosen), final_rows)
    tried |= chosen
    others = [v for t in final[:_LEADERS] for v in variants(t.recipe)]
    others = [v for v in dict.fromkeys(others) if v not in chosen]
    return ranked([*final, *subject.run(others, final_rows)], d), len(tried | dict.fromkeys(others))


def _climbed(subject: SearchedHead, trials: list[Trial], rows: Tensor, found: Sequence[Recipe]) -> list[Trial]:
    """Trials on ``rows``, best first, with those that change one thing of the leaders, until none of them is better.

    That is their rounding sites, their schedule, or their exponential and row sum: of kernels that add up in 16 bits
    each shows only where the others are nearly right. Around the best all are tried that may have the same bits.
    """
    every, best = schedules(len(subject.inputs.head.k), diagonal=False, every_tile=True), -1.0
    while best < trials[0].match.agreement:
        best, known_already = trials[0].match.agreement, {t.recipe for t in trials}
        near = dict[Recipe, None]()
        for recipe in (t.recipe for t in trials[:_LEADERS]):
            near |= dict.fromkeys(_with(r, recipe.schedule, recipe.exp) for r in found)
            near |= dict.fromkeys([*(_with(recipe, schedule, recipe.exp) for schedule in every), *variants(recipe)])
        new = [recipe for recipe in near if recipe not in known_already]
        trials = ranked([*trials, *subject.run(new, rows)], subject.head_dim)
    return trials


def _coarse(subject: SearchedHead, rows: Tensor, found: Sequence[Recipe], always: Sequence[Recipe]) -> list[Recipe]:
    every = schedules(len(subject.inputs.head.k), diagonal=subject.diagonal)
    # Rounding sites show in any schedule, most with few ranges.
    probes = {recipe: [_with(recipe, s, recipe.exp) for s in (every[0], recipe.schedule)] for recipe in found}
    agreement = {r: max(t.match.agreement for t in subject.run(probes[r], rows)) for r in found}
    best = sorted(found, key=lambda r: -agreement[r])[:_FAMILIES]
    chosen = [r for r in found if r in best or r in always]
    return [_with(recipe, s, recipe.exp) for recipe in chosen for s in every]


# A recipe checks all that it states, which takes as long as running it on a few rows; every head's search asks for
# nearly the same two thousand.
_KEPT = 4096


@lru_cache(_KEPT)
def _with(recipe: Recipe, schedule: Schedule, exp: Any) -> Recipe:
    return replace(recipe, schedule=schedule, exp=exp)


@lru_cache(_KEPT)
def _in_one_block(recipe: Recipe) -> Recipe:
    """The recipe for any rows at once, which is faster, where the order of keys does not depend on their block."""
    if recipe.schedule.order == "diagonal-first" or recipe.smooth_q != "none":
        return recipe
    return replace(recipe, schedule=replace(recipe.schedule, query_block=NO_BLOCK))
