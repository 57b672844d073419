"""Recognising captured kernels by running the published ones on a GPU: milliseconds, where emulation takes seconds.

The kernels make all rows of many heads at once, with the tensor core's own sums, which long rows need; of the rows that
``recognise`` compares the bits are counted. Where the captured kernel multiplies by other instructions, which add up in
another order, those that come near are emulated with such sums on a few rows. What that does not settle is emulated as
ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.baseline import Recognised, compared_rows, recognised_as
from attn_diag.head.emulated_together import alike, in_parts, outputs_together
from attn_diag.head.identification import IdentifiedHead, judge, rows_compared
from attn_diag.head.read import HeadTensors
from attn_diag.head.recipe_rows import spread_rows
from attn_diag.head.recipe_search import (
    EMULATED_KEYS,
    MISSED_BY_SUMS,
    SearchedHead,
    Trial,
    first_trials,
    fits,
    fitting,
    known,
    ranked,
    read_subject,
    splits,
    threshold,
)
from attn_diag.kernels import Recipe, RecipeNotSupportedError
from attn_diag.kernels.backend import compiles_for, launching_on

# A kernel is compiled in a second or two when it is first called, and kept on disk; fewer scores are emulated as fast.
WORTH = 2**23
# One row in so many: then kernels make only the blocks of 64 or 128 rows that hold those asked for.
_FEW_OF = 256
# Independent splits of the keys leave a sum each: where these are more numbers, such a recipe is left out.
_SUMS_OF_SPLITS = 2**28

Place = tuple[Capture, str, int, int]


def worth_kernels(places: Sequence[Place], device: torch.device) -> bool:
    """Whether these heads of one shape (each with its observation) are recognised sooner by kernels than by emulation.

    Args:
        places: Capture, observation, batch item and head.
        device: Where the rest is computed.
    """
    if not compiles_for(device) or not places:
        return False
    q_length, k_length = places[0][0].lengths(places[0][2])
    return len(places) * q_length * k_length >= WORTH


class LookedAt(NamedTuple):
    """What running kernels tells of an observation."""

    recognised: Recognised | None
    """What made it; None: none of them."""
    settled: bool
    """Whether emulations would tell no more: it is recognised, or a published kernel comes near, with keys so many that
    emulated sums are no nearer to the captured kernel's than these."""


def recognise_by_kernels(
    places: Sequence[Place], device: torch.device, known: Sequence[HeadTensors | None] | None = None
) -> list[LookedAt]:
    """The published kernels with fp32 scores that made these observations.

    Args:
        places: Capture, observation, batch item and head; of one shape and masking.
        device: A GPU.
        known: What is read of each already.

    Returns:
        One for each place.
    """
    read = known or [None] * len(places)
    opened = [read_subject(*place, device, tensors) for place, tensors in zip(places, read, strict=True)]
    unknown = LookedAt(None, settled=False)
    subjects = [subject for subject in opened if subject is not None]
    if not subjects:
        return [unknown] * len(places)
    recipes = _let_run(subjects, compared_rows(*places[0][0].lengths(places[0][2]), subjects[0].observed.device))
    return [unknown if subject is None else _recognise(subject, recipes) for subject in opened]


def identify_by_kernels(places: Sequence[Place], device: torch.device) -> list[IdentifiedHead | None]:
    """``identify_head`` of heads that a published kernel made, by running the published ones on all that are alike.

    Schedules and mixtures that none of them has are not looked for. Backwards are told apart by emulating dQ.

    Args:
        places: Capture, observation, batch item and head.
        device: Where float64 is computed.

    Returns:
        None where none of them fits, or has O but for a flaw, where they do not take the inputs or memory does not
        suffice, and where emulation is as fast: the whole search may know more.
    """
    groups: dict[object, list[int]] = {}
    for i, (capture, _, batch, _) in enumerate(places):
        m = capture.metadata
        if not capture.is_plain or m.dropout_p:
            continue
        shapes = capture.lengths(batch), capture.head_dim, capture.tensors["v"].shape[-1], capture.tensors["q"].dtype
        kind = *shapes, m.causal, m.window, m.softcap, capture.scale, "do" in capture.tensors
        groups.setdefault(kind, []).append(i)
    found: list[IdentifiedHead | None] = [None] * len(places)
    for alike_ones in groups.values():
        some = [places[i] for i in alike_ones]
        if worth_kernels(some, device):
            with suppress(torch.OutOfMemoryError):
                for i, known_one in zip(alike_ones, in_parts(partial(_identified, device), some), strict=True):
                    found[i] = known_one
    return found


def _identified(device: torch.device, places: Sequence[Place]) -> list[IdentifiedHead | None]:
    """Those of one shape and masking."""
    from triton.runtime.errors import TritonError

    from attn_diag.kernels.backend import BackendError

    opened = [read_subject(*place, device) for place in places]
    subjects = [subject for subject in opened if subject is not None and not subject.inputs.marks_rows]
    if not subjects:
        return [None] * len(places)
    rows = _spread(*places[0][0].lengths(places[0][2]), subjects[0].observed.device)
    recipes, gradients = _let_run(subjects, rows), _Gradients(subjects)
    for i, subject in enumerate(subjects):
        subject.made_dq = partial(gradients.of, i) if gradients.possible else None
    found: list[IdentifiedHead | None] = []
    for place, read in zip(places, opened, strict=True):
        known = None
        if read is not None and read.made is not None:
            with suppress(RecipeNotSupportedError, BackendError, TritonError, ValueError):
                known = _identify(place, read, recipes)
        found.append(known)
    for subject in subjects:
        subject.made_dq = None  # so that what was found does not hold every dQ
    return found


def _identify(place: Place, subject: SearchedHead, recipes: _Runnable) -> IdentifiedHead | None:
    """One of them."""
    capture, observation, batch, head = place
    good = ~subject.inputs.unusable & subject.observed.isfinite().all(1)
    rows = good.nonzero()[:, 0]
    if not len(rows):
        return None
    rows = rows[_spread(len(rows), len(subject.inputs.head.k), rows.device)]
    tried, trials, rows = _fitting(subject, recipes, rows)
    if not trials:
        return None
    least = threshold(subject.fmt, trials[0].match.equal.numel(), trials[0].recipe)
    found = IdentifiedHead(subject, len(rows), trials, len(tried), least, None)
    judge(capture, observation, batch, head, found, rows)
    return found if found.recipe is not None and found.flaw is None else None


def _spread(rows: int, keys: int, device: torch.device) -> Tensor:
    """Which of so many rows are compared, of a head with so many keys."""
    return spread_rows(rows, rows_compared(keys), device)


class _Gradients:
    """dQ of some heads by recipe, emulated on all of them when the first asks."""

    def __init__(self, subjects: Sequence[SearchedHead]) -> None:
        self._heads = [subject.inputs.head for subject in subjects]
        self._found: dict[Recipe, Tensor] = {}
        self.possible = alike(self._heads[0]) is not None and self._heads[0].do is not None
        """Whether they can be."""

    def of(self, i: int, recipes: Sequence[Recipe]) -> list[Tensor]:
        """dQ of head ``i``, [Tq, D]: numbers of each recipe's format in its arithmetic's dtype."""
        by_block: dict[int, list[Recipe]] = {}
        for recipe in recipes:
            if recipe not in self._found:
                by_block.setdefault(recipe.schedule.query_block, []).append(recipe)
        for some in by_block.values():
            for recipe, made in zip(some, outputs_together(some, self._heads), strict=True):
                self._found[recipe] = made["dq"]
        return [self._found[recipe][i] for recipe in recipes]


# Recipes and shapes whose kernels this process has compiled, or found on disk.
_COMPILED = set[object]()


class _Made(NamedTuple):
    """What a recipe's kernel has made of some heads."""

    outs: list[Tensor]
    """O of each, [Tq, Dv] as the kernel stores it."""
    there: Tensor | None
    """Which rows it has made, bool [Tq]; None: all."""


class _Runs:
    """O of some heads by recipe, run on all of them when it, or further rows of it, are first asked for."""

    def __init__(self, subjects: Sequence[SearchedHead], rows: Tensor) -> None:
        self._heads = [replace(subject.inputs.head, do=None) for subject in subjects]
        # Only where the rows compared are few, so that no kernel is compiled for a few of fewer rows as well.
        self._long = _FEW_OF * len(rows) <= len(self._heads[0].q)
        self._found: dict[Recipe, _Made] = {}

    def out(self, i: int, recipe: Recipe, rows: Tensor) -> Tensor:
        """These rows of O of head ``i``, [R, Dv] as the kernel stores it."""
        known = self._found.get(recipe)
        missing = rows if known is None else rows[:0] if known.there is None else rows[~known.there[rows]]
        if len(missing):
            self._run(recipe, missing)
        return self._found[recipe].outs[i][rows]

    def compile(self, recipes: Sequence[Recipe], rows: Tensor) -> None:
        """Run recipes whose kernels are not compiled yet, each by a thread: most of that is ptxas, a process apart."""
        head = self._heads[0]
        if (key := (tuple(recipes), head.q.shape, head.k.shape, head.v.shape)) in _COMPILED:
            return
        _COMPILED.add(key)

        def attempt(recipe: Recipe) -> None:
            # A thread begins on the first GPU. Whoever asks for the recipe meets the same error.
            with suppress(Exception), launching_on(head.q.device):
                self._run(recipe, rows)

        # The first one sets up what Triton keeps of the kernel on this device.
        for first in recipes[:1]:
            attempt(first)
        with ThreadPoolExecutor(max(1, len(recipes))) as pool:
            list(pool.map(attempt, dict.fromkeys(recipes[1:])))

    def _run(self, recipe: Recipe, rows: Tensor) -> None:
        from attn_diag.kernels.triton_head import run_heads

        # A kernel makes a block of rows for each; of a million rows those asked for are in one block in a hundred.
        length = len(self._heads[0].q)
        few = self._long and _FEW_OF * len(rows) <= length
        outs = [made.o for made in run_heads(recipe, self._heads, rows if few else None)]
        known = self._found.get(recipe)
        if known is not None and known.there is not None and few:
            for out, more in zip(known.outs, outs, strict=True):
                out[rows] = more[rows]
            known.there[rows] = True
            return
        there = torch.zeros(length, dtype=torch.bool, device=rows.device) if few else None
        self._found[recipe] = _Made(outs, there if there is None else there.index_fill_(0, rows, value=True))


class _Runnable(NamedTuple):
    """What is run."""

    published: list[Recipe]
    """The published recipes."""
    splits: list[Recipe]
    """FlashAttention-2 with its keys split, where none of them fits."""


def _let_run(subjects: Sequence[SearchedHead], rows: Tensor) -> _Runnable:
    """What is run on these heads; the published kernels are compiled, and make O of these rows, and of others asked."""
    runs, recipes = _Runs(subjects, rows), _runnable(subjects[0], len(subjects))
    for i, subject in enumerate(subjects):
        subject.made = partial(runs.out, i)
    runs.compile(recipes.published, rows)
    return recipes


def _runnable(subject: SearchedHead, beside: int) -> _Runnable:
    """Of so many heads, which are run together."""
    (q_length, _), (k_length, width) = subject.inputs.head.q.shape, subject.inputs.head.v.shape

    def held(recipe: Recipe) -> bool:
        split = recipe.schedule.split_keys
        return split is None or -(-k_length // split) * q_length * width * beside <= _SUMS_OF_SPLITS

    # A kernel's products are added by the instructions of this GPU; and a power of two in S rounds nothing.
    same: dict[str, Any] = {"mma_k": 16}
    if math.frexp(subject.inputs.head.scale)[0] == 0.5:
        same["alpha"] = "in-exponent"
    published = {replace(r, **same): r for r in reversed(known(subject)) if r.scores == "fp32"}
    return _Runnable(list(filter(held, reversed(published.values()))), list(filter(held, splits(subject))))


def _fitting(subject: SearchedHead, recipes: _Runnable, rows: Tensor) -> tuple[list[Trial], list[Trial], Tensor]:
    """Trials of recipes on these rows, best first; and those that fit, with their rows, as of ``fitting``."""
    trials = first_trials(subject, recipes.published, rows)
    if not fits(subject, trials[0]):
        trials = ranked([*trials, *subject.run(recipes.splits, rows)], subject.head_dim)
    if not fits(subject, trials[0]) and _too_long(subject):
        return trials, [], rows
    return trials, *fitting(subject, trials, rows)


def _too_long(subject: SearchedHead) -> bool:
    return len(subject.inputs.head.k) > EMULATED_KEYS


def _recognise(subject: SearchedHead, recipes: _Runnable) -> LookedAt:
    """One of them."""
    from triton.runtime.errors import TritonError

    from attn_diag.kernels.backend import BackendError

    rows = compared_rows(len(subject.inputs.head.q), len(subject.inputs.head.k), subject.observed.device)
    try:
        trials, fit, _ = _fitting(subject, recipes, rows)
    except (RecipeNotSupportedError, BackendError, TritonError, ValueError):
        # A mask, dropout or a head dimension that they lack, or that does not fit this GPU.
        return LookedAt(None, settled=False)
    if fit:
        return LookedAt(recognised_as(subject, fit, trials, rows), settled=True)
    near = 1 - trials[0].match.agreement <= MISSED_BY_SUMS[subject.fmt]
    return LookedAt(None, settled=near and _too_long(subject))
