"""Which recipe made one head's O: the whole search, judged; its backward by dQ, and where its O is not the recipe's.

What ``identify`` reports and what every analysis of a captured kernel follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head import recipe_search as search
from attn_diag.head.bit_matches import Match
from attn_diag.head.flaws import Flaw, find_flaw
from attn_diag.head.recipe_candidates import ALL_KEYS, describe_schedule, family_name, known_name, same_forward
from attn_diag.head.recipe_rows import choose_rows, spread_rows, usable_rows
from attn_diag.head.recipe_search import LEVEL, SearchedHead, Trial
from attn_diag.kernels import PRESETS, Recipe, Schedule, emulate_head, preset
from attn_diag.kernels.recipe import BACKWARD
from attn_diag.results.identification import BackwardMatch, HardwareMatch
from attn_diag.results.wording import share
from attn_diag.work import map_in_order

Outcome = Literal["identified", "ambiguous", "unnamed", "flawed", "unknown"]

# Rows that are compared: as many as have so many scores together, and at least so many.
_FINAL_SCORES, _FINAL_ROWS = 2**20, 128
_COARSE_ROWS = 64
# dQ needs whole heads; above so many scores it is not looked at.
_BACKWARD_SCORES = 2**22
_MOST_OF_DQ = 2 / 3
# Up to so many scores, over all heads of a sequence, presets not told apart are run with the tensor core's sums.
_HARDWARE_SCORES = 2**20
# Rows in which the best recipe is looked at for what it does not explain: all that have so many scores together.
_WHOLE_SCORES = 2**24


@dataclass
class IdentifiedHead:
    """What the search found for one head of an observation."""

    subject: SearchedHead
    """The head."""
    rows: int
    """Query rows on which recipes were compared."""
    trials: list[Trial]
    """The recipes that reached the last comparison, best first."""
    tried: int
    """How many were run."""
    threshold: float
    """The agreement from which a recipe fits."""
    flaw: Flaw | None
    """What the best recipe does not explain although it has the bits of everything else, or would have to."""
    as_good: list[Trial] = field(default_factory=list)
    """The recipes that fit and are not told apart from the best."""
    names: list[str] = field(default_factory=list)
    """The presets among them, best first."""
    outcome: Outcome = "unknown"
    """See ``results.identification.Identification``."""
    backward: tuple[BackwardMatch, ...] = ()
    """Presets with one forward told apart by dQ."""
    hardware: tuple[HardwareMatch, ...] = ()
    """Presets told apart by a tensor core's sums."""
    note: str = ""
    """Why dQ told nothing, where it might have."""
    loop: str = ""
    """A loop of a kernel of one's own that has O's bits, in words (``tiled_loops``); empty: none, or nobody looked."""
    recipe: Recipe | None = None
    """The recipe, forward and backward, that is taken to have made it; None where nothing fits."""
    name: str = ""
    """What it is called."""

    @property
    def best(self) -> Trial:
        """The trial with the highest agreement."""
        return self.trials[0]

    @property
    def by_kernel(self) -> bool:
        """Whether bits are compared with what the recipes' own kernels return, not with emulations."""
        return self.subject.made is not None and not self.best.cut_off

    @property
    def nearest(self) -> str:
        """The best in words, with its agreement."""
        recipe = self.best.recipe
        return (
            f"the roundings of {family_name(recipe, self.subject.head_dim)}, {describe_schedule(recipe.schedule)}, "
            f"with {share(self.best.match.agreement)} of O's bits"
        )


def identify_head(
    capture: Capture,
    observation: str,
    batch: int,
    head: int,
    device: torch.device,
    *,
    rows: int | None = None,
    step: Callable[[], None] = lambda: None,
) -> IdentifiedHead | None:
    """Search for the recipe of one head, and judge what was found.

    Args:
        capture: The capture.
        observation: One of its observations.
        batch: Index of the batch item.
        head: Index of the head in the capture.
        device: Where recipes are emulated.
        rows: So many query rows are compared at the end; None: as many as have 2^20 scores together, at least 128.
        step: Called after each recipe.

    Returns:
        None where no recipe covers the formats of inputs and O, and where no row can be compared.
    """
    subject = search.read_subject(capture, observation, batch, head, device)
    if subject is None:
        return None
    subject.step = step
    coarse, final = _chosen(subject, rows)
    if not len(final):
        return None
    trials, compared, tried = search.search(subject, coarse, final)
    sampled, flaw = _flaws(subject, trials[0], compared, rows)
    judge = _Judge(capture, observation, batch, head, subject, device)
    elements = trials[0].match.equal.numel()
    least = search.threshold(subject.fmt, elements, trials[0].recipe)
    # What the right recipe may miss too is set aside, not held against the kernel.
    broken = None if flaw is None or flaw.chance else flaw
    found = IdentifiedHead(subject, len(compared), trials, tried, least, broken)
    judge.choose(found, sampled)
    return found


def nothing_fits(capture: Capture, observation: str, batch: int, head: int, device: torch.device) -> bool:
    """Whether ``identify_head`` of this head would find nothing that fits, as far as few rows tell (``ruled_out``)."""
    subject = search.read_subject(capture, observation, batch, head, device)
    if subject is None:
        return True
    coarse, _ = _chosen(subject, None)
    return not len(coarse) or search.ruled_out(subject, coarse)


def _chosen(subject: search.SearchedHead, rows: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for a coarse search, and for the final comparison so many."""
    many = rows or rows_compared(len(subject.inputs.head.k))
    return choose_rows(subject.inputs, subject.observed, min(_COARSE_ROWS, many), many)


def judge(capture: Capture, observation: str, batch: int, head: int, found: IdentifiedHead, rows: Tensor) -> None:
    """Complete what a search found that ran the recipes' own kernels (``SearchedHead.made``) on these rows."""
    sampled, flaw = _flaws(found.subject, found.best, rows, None)
    found.flaw = None if flaw is None or flaw.chance else flaw
    device = found.subject.observed.device
    _Judge(capture, observation, batch, head, found.subject, device).choose(found, sampled)


def _flaws(
    subject: SearchedHead, best: Trial, compared: torch.Tensor, rows: int | None
) -> tuple[Flaw | None, Flaw | None]:
    """What the best recipe does not explain: in the rows compared, and in as many as can be looked at."""
    if best.recipe.quantized:
        return None, None  # what it misses is codes that turned
    length, keys = len(subject.observed), len(subject.inputs.head.k)
    count = rows or min(length, _WHOLE_SCORES // keys)
    found = find_flaw(subject, best, compared, misses_many=best.cut_off)
    if count <= len(compared):
        return found, found
    every, _ = usable_rows(subject.inputs, subject.observed, spread_rows(length, count, compared.device))
    of_all = find_flaw(subject, subject.run([best.recipe], every)[0], every, misses_many=best.cut_off)
    return found, of_all or found


@dataclass
class _Judge:
    """From ranked trials to a recipe."""

    capture: Capture
    observation: str
    batch: int
    head: int
    subject: SearchedHead
    device: torch.device

    def choose(self, found: IdentifiedHead, flaw: Flaw | None) -> None:
        """Complete what was found; ``flaw``: in the rows compared."""
        d, best = self.capture.head_dim, found.best
        good, threshold = [search.counted(t, best) for t in found.trials], found.threshold
        broken = found.flaw is not None
        if flaw is not None:
            if best.match.agreement < threshold and not flaw.leaves_most:
                return
            # Whole rows or whole features are kept: a matrix again.
            good = [Match(t.match.equal[flaw.kept.any(1)][:, flaw.kept.any(0)]) for t in found.trials]
            threshold = search.threshold(self.subject.fmt, max(good[0].equal.numel(), 1))
        first = good[0]
        found.as_good = [
            t
            for t, m in zip(found.trials, good, strict=True)
            if m.agreement >= threshold and (m is first or first.compare(m).p_value > LEVEL)
        ]
        if not found.as_good:
            return
        named = (known_name(t.recipe, d) for t in found.as_good)
        found.names = list(dict.fromkeys(name for name in named if name is not None))
        recipes = {n: next(t.recipe for t in found.as_good if known_name(t.recipe, d) == n) for n in found.names}
        self._by_backward(found, recipes, broken=broken)
        if not broken:
            self._by_hardware(found, recipes)
        found.outcome = (
            "flawed" if broken
            else "unnamed" if not found.names
            else "identified" if len(found.names) == 1
            else "ambiguous"
        )  # fmt: skip

    def _by_backward(self, found: IdentifiedHead, recipes: dict[str, Recipe], *, broken: bool) -> None:
        """Keep the names whose backward agrees best with the captured dQ, and give the recipe the best of all.

        Presets with one forward may differ there; and a kernel may have one preset's forward and another's backward.
        """
        c, fmt, d = self.capture, self.subject.fmt, self.capture.head_dim
        ways: dict[tuple[object, ...], list[Recipe]] = {}
        for name in found.names:
            for recipe in same_forward(name, fmt, d):
                ways.setdefault(_backward_of(recipe), []).append(replace(recipe, schedule=recipes[name].schedule))
        found.recipe, found.name = found.as_good[0].recipe, " or ".join(found.names)
        if not found.names:
            found.recipe = _plainest(found.as_good, d)
            roundings = family_name(found.recipe, d)
            found.name = f"the roundings of {roundings}, {describe_schedule(found.recipe.schedule)}"
        dq = c.read(c.key(self.observation, "dq"), self.batch, self.head)
        unread = dq is None or dq.dtype != c.tensors["q"].dtype
        if unread or math.prod(c.lengths(self.batch)) > _BACKWARD_SCORES:
            self._named(found, recipes)
            if len(ways) > 1:
                why = "dQ was not captured" if unread else "the head is too long to compare dQ"
                found.note = f"{why}: presets that differ in the backward only go by the first's name"
            return
        assert dq is not None
        observed = dq.to(self.device)
        good = ~self.subject.inputs.unusable & observed.isfinite().all(1)
        if broken and found.flaw is not None:
            good[list(found.flaw.rows)] = False
        head = self.subject.inputs.head

        def match(recipe: Recipe) -> Match:
            emulated = emulate_head(recipe, head, key_gradients=False).dq
            assert emulated is not None
            return Match((emulated == observed)[good])

        def matches_of(recipes: Sequence[Recipe]) -> list[Match]:
            if (made := self.subject.made_dq) is None:
                return list(map_in_order(match, recipes, parallel=parallel))
            equal = torch.stack([dq == observed for dq in made(recipes)])[:, good].cpu()
            return [Match(same) for same in equal]

        parallel = self.device.type == "cpu"
        if len(ways) > 1:
            firsts = [of_way[0] for of_way in ways.values()]
            matches = dict(zip(ways, matches_of(firsts), strict=True))
            order = sorted(ways, key=lambda way: -matches[way].agreement)
            best = matches[order[0]]
            p_values = {way: best.compare(matches[way]).p_value for way in order}
            found.backward = tuple(
                BackwardMatch(
                    " or ".join(dict.fromkeys(r.name for r in ways[way])),
                    matches[way].agreement,
                    None if way == order[0] else p_values[way],
                    way != order[0] and p_values[way] <= LEVEL,
                )
                for way in order
            )
            kept = [way for way in order if way == order[0] or p_values[way] > LEVEL]
            left = [r.name for way in kept for r in ways[way]]
            # What fits through the forward alone keeps its name, where its backward is as good as any.
            found.names = [n for n in found.names if n in left] or list(dict.fromkeys(left))
        self._named(found, recipes)
        own = found.recipe
        others: dict[tuple[object, ...], Recipe] = {}
        for preset_ in (preset(n, fmt, d) for n in PRESETS):
            others.setdefault(_backward_of(preset_), preset_)
        others.pop(_backward_of(own), None)
        ports = {p.name: replace(own, **{site: getattr(p, site) for site in BACKWARD}) for p in others.values()}
        tried = [own, *ports.values()]
        scored = matches_of(tried)
        top = max(range(len(tried)), key=lambda i: scored[i].agreement)
        # The right backward has 79 % of dQ's bits and more (H200), others up to 55 %: a minority says nothing.
        most = scored[top].agreement > _MOST_OF_DQ
        if top and most and scored[top].compare(scored[0]).p_value <= LEVEL:
            found.recipe, found.name = tried[top], f"{found.name} with the backward of {list(ports)[top - 1]}"

    def _named(self, found: IdentifiedHead, recipes: dict[str, Recipe]) -> None:
        """The recipe of the first name, with that preset's backward."""
        if not found.names:
            return
        name = found.names[0]
        own = preset(name, self.subject.fmt, self.capture.head_dim)
        made = recipes.get(name) or next(iter(recipes.values()))
        backward = {site: getattr(own, site) for site in (*BACKWARD, "lse_from", "row_sum_clamp")}
        found.recipe, found.name = replace(made, name=name, summary=own.summary, **backward), " or ".join(found.names)

    def _by_hardware(self, found: IdentifiedHead, recipes: dict[str, Recipe]) -> None:
        """Keep the names that hold under the tensor core's own sums: its truncation moves the last few elements.

        Where some have every observed bit, they alone are left.
        """
        c, names = self.capture, found.names
        scores = math.prod(c.lengths(self.batch))
        if len(names) < 2 or scores > _HARDWARE_SCORES or self.subject.made is not None:
            return  # kernels have their own sums
        heads = dict.fromkeys([self.head, *range(c.q_heads)])
        subjects = [
            search.read_subject(c, self.observation, self.batch, head, self.device)
            for head in list(heads)[: max(1, _HARDWARE_SCORES // scores)]
        ]

        def match(name: str) -> HardwareMatch:
            missed, elements = 0, 0
            for subject in subjects:
                assert subject is not None
                exact = replace(recipes[name], accumulation="nvidia-tensor-core")
                out = emulate_head(exact, replace(subject.inputs.head, do=None)).o
                good = ~subject.inputs.unusable & subject.observed.isfinite().all(1)
                missed += int((out != subject.observed)[good].sum())
                elements += int(good.sum()) * out.shape[1]
            return HardwareMatch(name, missed, elements)

        known = [name for name in names if name in recipes]
        parallel = self.device.type == "cpu"
        found.hardware = tuple(sorted(map_in_order(match, known, parallel=parallel), key=lambda m: m.missed))
        complete = [m.recipe for m in found.hardware if not m.missed]
        found.names = complete or names
        suffix = found.name.partition(" with the backward of ")
        chosen = found.hardware[0].recipe if found.hardware else found.names[0]
        if chosen in recipes and found.recipe is not None and chosen != found.recipe.name:
            found.recipe = replace(recipes[chosen], name=chosen, **{s: getattr(found.recipe, s) for s in BACKWARD})
        found.name = " or ".join(found.names) + "".join(suffix[1:])


def _backward_of(recipe: Recipe) -> tuple[object, ...]:
    again = recipe.scores if recipe.backward_scores == "as-forward" else "fp32"
    return again, *(getattr(recipe, site) for site in BACKWARD)


def _plainest(as_good: Sequence[Trial], head_dim: int) -> Recipe:
    """The best, with all keys at once where its order of keys is not told apart from that one."""
    best = as_good[0].recipe
    roundings, whole = family_name(best, head_dim), describe_schedule(Schedule(key_tile=ALL_KEYS))
    alike = (t.recipe for t in as_good if family_name(t.recipe, head_dim) == roundings)
    return next((recipe for recipe in alike if describe_schedule(recipe.schedule) == whole), best)


def rows_compared(k_length: int) -> int:
    """How many rows are compared where nothing else is asked for."""
    return max(_FINAL_ROWS, _FINAL_SCORES // k_length)


def why_not_compared(capture: Capture, observation: str) -> str:
    """Why an observation's bits cannot be compared."""
    dtype, key = capture.tensors["q"].dtype, capture.key(observation, "o")
    if key not in capture.tensors:
        return f"observation '{observation}' has no o: bits of O are what is compared, capture it too"
    if dtype not in search.FORMATS:
        named = str(dtype).removeprefix("torch.")
        return f"recipes are known for bfloat16 and float16 inputs, q is {named}: there is nothing to identify"
    if capture.tensors[key].dtype == dtype:
        return f"no row of '{observation}' can be compared: each has NaN or Inf or is fully masked"
    got, expected = (str(t).removeprefix("torch.") for t in (capture.tensors[key].dtype, dtype))
    return (
        f"{key} is {got} and q is {expected}: save O as the kernel returned it, if that was in {expected}; of one that "
        f"returns {got} no bits are compared, and inspect says what its errors show"
    )
