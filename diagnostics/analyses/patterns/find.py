"""From an evidence to patterns: the places first, then how each of them came about, if anything fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attn_diag.analyses.patterns.backward import of_gradient
from attn_diag.analyses.patterns.by_tiles import in_tiles, of_tile
from attn_diag.analyses.patterns.evidence import EXPLAINS, LEAVES, Evidence, Fit, Guess, row_limit
from attn_diag.analyses.patterns.forward import of_out, of_zeros
from attn_diag.analyses.patterns.lines import Group
from attn_diag.analyses.patterns.numbers import factors, in_words, named
from attn_diag.analyses.patterns.places import Place, find_elements, find_place, in_sentence, row_ranges
from attn_diag.analyses.patterns.rowwise import of_delta, of_lse
from attn_diag.head.counterfactual import FORMATS
from attn_diag.kernels.formats import Mode, parse, round_to
from attn_diag.reference import reference_rows, ulp
from attn_diag.results.quality import Pattern
from attn_diag.results.wording import percent, singular

# Guesses are compared on so many rows, spread over those in question.
_SAMPLE = 64
# What is said of all of them must explain this part of the error of those that are furthest off, where it lies.
_OF_FURTHEST = 0.5
# A guess is named only if the next one leaves so many times its squared error.
_BEATS = 2.0
# Where nothing is fitted, so much of the squared error that is explained is no chance, whatever is left.
_MOST = 0.9
# Two that leave as little as each other.
_SAME = 1.1
# More numbers than these were fitted row by row.
_FEW_NUMBERS = 4
# Of few rows, more of them where all are coarse, a guess must leave no more than a well-rounded kernel.
_FEW_ROWS, _MANY_ROWS, _CLOSE = 3, 16, 1.25
_MOST_SCORES = 2**27
# So many kinds of guesses are made; by chance one is taken with probability exp(-_NATS) at most.
_GUESSES, _NATS = 100, 7.0
# A factor, a single number, explains so many.
_MORE_THAN_ONE = 2.0
# What O must show of it is so many times its last rounding.
_CLEARLY = 6.0
Guesses = Callable[[Evidence, Tensor], Iterator[Guess]]
_OPEN = ("factors", "unrelated", "off")


def find_patterns(evidence: Evidence) -> list[Pattern]:
    """Where and how a quantity is wrong; the first says all of it, the others a part each.

    Args:
        evidence: The quantity. Where no row stands out, as of a lossy kernel, only what explains all rows is named.

    Returns:
        None where all that can be said is that it is off.
    """
    lossy = not bool((evidence.outlying & evidence.usable).any()) and not bool(evidence.features.any())
    if not lossy and (words := find_elements(evidence)) is not None:
        return [Pattern("elements", words, 1.0)]
    place = find_place(evidence)
    found = _ways(evidence, place)
    groups, fits = _told(evidence, [g for g, _ in found]), [f for _, f in found]
    if lossy and (len(groups) > 1 or groups[0].kind in _OPEN or _rounds_another_way(evidence)):
        return []
    groups = [_named_factor(evidence, group) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: -_weight(evidence, groups[i], place.features))
    parts = [_pattern(evidence, groups[i], fits[i], place.rows, place.features) for i in order]
    sentence = in_sentence(evidence, place, groups)
    if evidence.is_gradient:
        sentence = sentence.replace("unrelated to the true ones", "unrelated to the gradient")
    whole = replace(parts[0], words=sentence)
    if len(parts) == 1:
        return [whole]
    return [replace(whole, kind=parts[0].kind), *parts]


def _ways(evidence: Evidence, place: Place) -> list[tuple[Group, Fit | None]]:
    """The groups of a place, and how each came about: all in one way where one explains them all."""
    if place.features is not None:
        return [(group, None) for group in place.groups]
    if len(place.groups) > 1:
        lines = torch.cat([group.lines for group in place.groups]).sort().values
        whole, fit = _how(evidence, Group(lines, "off", "are off"))
        if fit is not None and fit.remaining <= LEAVES:
            return [(whole, fit)]
    found = _absorbed(evidence, [_how(evidence, group) for group in place.groups])
    if not bool(evidence.outlying.any()):
        return found
    how = partial(_how, guesses=of_tile)
    return [one for group, fit in found for one in ([(group, fit)] if fit else in_tiles(evidence, group, how))]


def _told(evidence: Evidence, groups: Sequence[Group]) -> list[Group]:
    """The groups, factors only where coarse scores do not make them.

    dQ of a row that two keys share is a multiple of the true one, however coarse its scores are. So the errors must be
    more numbers than one, or the factor that of more rows than share one by chance, or O have other scores.
    """

    def told(group: Group) -> Group:
        if group.factor is None or group.factor <= 0 or evidence.quantity != "dq":
            return group
        rows = group.lines[:: -(-len(group.lines) // _SAMPLE)]
        shown = _shared(evidence, group.lines, group.factor) or _not_of_scores(evidence, group.lines, group.factor)
        if shown or evidence.dimensions(rows, any_factor=False) >= _MORE_THAN_ONE:
            return group
        off = percent(abs(group.factor - 1), ".2g")
        return replace(group, kind="off", predicate=f"are {off} off", prediction=None, factor=None)

    return [told(group) for group in groups]


def _shared(evidence: Evidence, lines: Tensor, factor: float) -> bool:
    """Whether more of the rows that show so large a factor have it than would where every row has one of its own."""
    from scipy.special import bdtrc

    limit = row_limit(evidence.truth.shape[1]) * evidence.noise
    size = evidence.truth.square().sum(1)
    within = 2 * (limit / size.clamp(min=1e-300)).sqrt() / abs(factor - 1)
    shows = evidence.clear & (within < 1)
    fits = shows & ((evidence.observed - factor * evidence.truth).square().sum(1) <= limit * max(1.0, factor**2))
    having = int(fits[lines].sum())
    if having < _FEW_ROWS:
        return False
    by_chance = bdtrc(having - 2, int(shows.sum()) - 1, float(within[shows].mean()))
    return bool(by_chance < math.exp(-_NATS))


def _not_of_scores(evidence: Evidence, lines: Tensor, factor: float) -> bool:
    """Whether O of the row that is furthest off shows that its P is not what such a factor takes.

    Of a row with P of its top key near 1 dQ is as many times too large as the rest of P is, at least, and O - V of the
    top key with it.
    """
    out = evidence.captured[0].get("o") if evidence.captured else None
    if out is None:
        return False
    row = lines[evidence.error[lines].square().sum(1).argmax()][None]
    block = reference_rows(replace(evidence.heads[0], do=None), row)
    away = block.out - evidence.heads[0].v[block.top_key]
    size = float(away.norm())
    moved = abs(float(((out[row] - block.out) * away).sum())) / size if size else 0.0
    takes, noise = abs(factor - 1) * size, float(ulp(block.out, evidence.fmt).max()) / math.sqrt(12)
    return takes > _CLEARLY * noise and 2 * moved < takes


def _rounds_another_way(evidence: Evidence) -> bool:
    """Whether a directed rounding of the truth leaves as little of the error as any pattern may.

    Truncation shrinks every number alike, as a smaller scale or a factor does where one key has nearly all of P.
    """
    if evidence.fmt.name not in FORMATS:
        return False
    rows = evidence.usable.nonzero()[:, 0]
    fits = []
    for mode in (Mode.TOWARD_ZERO, Mode.UP, Mode.DOWN):
        rounded = round_to(evidence.truth[rows], parse(f"{evidence.fmt.name}:{mode}"))
        # The kernel's own noise comes before its last rounding.
        fits.append(evidence.fit(rows, rounded))
    return any(fit.holds or fit.left < fit.before / _BEATS for fit in fits)


def _guesses(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    yield from _moved_features(evidence, rows)
    by_name = {"o": of_out, "lse": of_lse, "delta": of_delta}
    yield from by_name.get(evidence.quantity, of_gradient)(evidence, rows)


def _by_no_chance(evidence: Evidence, guess: Guess, fit: Fit, numbers: float) -> bool:
    """Whether the best of so many guesses would hardly leave as little of an error of so many ``numbers``."""
    few = len(guess.prediction) < _FEW_ROWS or (evidence.coarse and len(guess.prediction) < _MANY_ROWS)
    if few and fit.remaining > _CLOSE and fit.explained < EXPLAINS:
        return False
    left = max(fit.left, 1e-12 * fit.before)
    return (numbers - guess.fitted) / 2 * math.log(fit.before / left) > math.log(_GUESSES * guess.tried) + _NATS


def _moved_features(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Each row's features moved round by so many."""
    truth, observed = evidence.truth[rows], evidence.observed[rows]
    moved = [truth.roll(s, 1) for s in range(1, truth.shape[1])]
    if moved:
        left = torch.stack([(observed - m).square().sum() for m in moved])
        best = int(left.argmin())
        shift = best + 1 if 2 * (best + 1) <= len(moved) + 1 else best - len(moved)
        way = "on" if shift > 0 else "back"
        words = f"have their features moved {way} by {abs(shift)} (round the end)"
        yield Guess("features", words, moved[best], 1)


def _how(evidence: Evidence, group: Group, guesses: Guesses = _guesses) -> tuple[Group, Fit | None]:
    """The group with the way in which its rows came about, if one fits and no other does; and how well it fits."""
    head = evidence.heads[0]
    if group.kind == "zeros" and evidence.quantity == "o" and (words := of_zeros(evidence, group.lines)) is not None:
        fit = evidence.fit(group.lines, torch.zeros_like(evidence.truth[group.lines]))
        return Group(group.lines, "mask", words), fit
    if group.kind not in _OPEN or len(head.q) * len(head.k) > _MOST_SCORES:
        return group, None
    lines = group.lines
    rows = lines[torch.linspace(0, len(lines) - 1, min(_SAMPLE, len(lines)), device=lines.device).long()]
    if group.kind == "unrelated" and len(group.lines) < len(rows):
        return group, None
    found, numbers = [], evidence.dimensions(rows)
    if float(evidence.error[rows].square().sum()) <= float(evidence.noise[rows].sum()):
        return group, None  # what is off is in rows between these
    for guess in guesses(evidence, rows):
        if not bool(guess.prediction.isfinite().all()):
            continue
        fit = evidence.fit(rows, guess.prediction)
        # Of rows that are next to zero, any small prediction leaves little.
        insight = fit.left < min(0.9 * fit.before, 0.5 * float(evidence.observed[rows].square().sum()))
        if insight and _by_no_chance(evidence, guess, fit, numbers):
            found.append((guess, fit))
            shown = (guess.kind, guess.words) in evidence.shown and fit.remaining <= LEAVES
            if shown and (best := _choose(found)) is not None and best[0] is guess:
                break
    chosen = _choose(found)
    if chosen is None:
        return group, None
    guess, fit = chosen
    if not _explains_the_furthest(evidence, lines, guess):
        return group, None
    evidence.shown.add((guess.kind, guess.words))
    words = guess.words if fit.holds else guess.words.replace("are what", "are near what", 1)
    return Group(group.lines, guess.kind, words), fit


def _explains_the_furthest(evidence: Evidence, lines: Tensor, chosen: Guess) -> bool:
    """Whether what explains a sample explains the rows that are furthest off, too: few of many may have all the error.

    Args:
        evidence: The quantity.
        lines: The rows in question.
        chosen: What explains the sample.
    """
    if len(lines) <= _SAMPLE:
        return True  # which was all of them
    furthest = lines[evidence.error[lines].square().sum(1).topk(_SAMPLE).indices.sort().values]
    for guess in _guesses(evidence, furthest):
        # Numbers that are fitted may be others; a part that is missing is the same one.
        if guess.kind == chosen.kind and (guess.kind != "part" or guess.words == chosen.words):
            fit = evidence.fit(furthest, guess.prediction)
            if fit.remaining <= LEAVES or fit.explained >= _OF_FURTHEST:
                return True
    return False


def _absorbed(evidence: Evidence, found: Sequence[tuple[Group, Fit | None]]) -> list[tuple[Group, Fit | None]]:
    """The groups without those that the way found for a larger one explains too (a zero that must be there)."""
    kept = list(found)
    for group, fit in found:
        if fit is None:
            continue
        for other, theirs in found:
            if theirs is not None or other is group or not 0 < len(other.lines) <= min(_SAMPLE, len(group.lines) / 4):
                continue
            for guess in _guesses(evidence, other.lines):
                if (guess.kind, guess.words) == (group.kind, group.predicate):
                    same = evidence.fit(other.lines, guess.prediction)
                    if bool((same.by_row <= row_limit(evidence.truth.shape[1])).all()):
                        lines = torch.cat([group.lines, other.lines]).sort().values
                        group = replace(group, lines=lines)
                        kept = [(g, f) for g, f in kept if g is not other and f is not fit] + [(group, fit)]
                    break
    return kept


def _choose(found: Sequence[tuple[Guess, Fit]]) -> tuple[Guess, Fit] | None:
    """The guess that fits and beats all others clearly."""
    # A number of its own in each row fits noise too: it is looked at last.
    for most in (_FEW_NUMBERS, 10**9):
        known = [(guess, fit) for guess, fit in found if guess.freedom <= most]
        if not known:
            continue
        least = min(fit.left for _, fit in known)
        guess, fit = min((f for f in known if f[1].left <= _SAME * least), key=lambda item: item[0].freedom)
        if not (fit.holds or _but_for_rounding(guess, fit)) or (
            guess.freedom > _FEW_NUMBERS and fit.remaining > LEAVES
        ):
            continue
        rivals = [
            (g, f)
            for g, f in known
            if g.kind != guess.kind and g.freedom <= guess.freedom and f.left < _BEATS * fit.left
        ]
        if all(_alike(guess, other, fit) for other, _ in rivals):
            return guess, fit
        return None
    return None


def _but_for_rounding(guess: Guess, fit: Fit) -> bool:
    """Whether nothing was fitted, and yet most is explained: behind it the kernel may be as coarse as it likes."""
    return not (guess.freedom or guess.fitted) and fit.explained >= _MOST


def _alike(one: Guess, other: Guess, fit: Fit) -> bool:
    """Whether two guesses say the same of these rows."""
    return float((one.prediction - other.prediction).square().sum()) <= 0.05 * fit.noise


def _named_factor(evidence: Evidence, group: Group) -> Group:
    """A constant factor by its name, if it is a known one."""
    if group.factor is None:
        return group
    if "sign" in group.predicate:
        return replace(group, kind="sign")
    head = evidence.heads[0]
    dropped = 0.0 if head.dropout is None else head.dropout.p
    known = factors(head.scale, scaled=evidence.quantity in ("dq", "dk"), dropped=dropped)
    name = named(group.factor, known, 2e-3)
    if name is None:
        return group
    return replace(group, predicate=f"{group.predicate} ({name})")


def _weight(evidence: Evidence, group: Group, features: Tensor | None) -> float:
    error = evidence.error.nan_to_num(0.0, 0.0, 0.0).square()
    return float(error[group.lines].sum() if features is None else error[:, group.lines].sum())


def _pattern(evidence: Evidence, group: Group, fit: Fit | None, rows: Tensor, features: Tensor | None) -> Pattern:
    lines, where = group.lines, features is None
    error = evidence.error.nan_to_num(0.0, 0.0, 0.0).square()
    total = float(error[evidence.usable].sum())
    inside = float(error[lines].sum() if where else error[rows][:, lines].sum())
    share = inside / total if total else None
    if fit is None and where and group.prediction is not None and group.kind != "zeros":
        fit = evidence.fit(lines, group.prediction)
    if fit is not None and share is not None:
        share *= fit.explained
    unit = evidence.unit if where else "features"
    count = evidence.truth.shape[0 if where else 1]
    subject = in_words(lines.tolist(), count, unit)
    one = len(lines) == 1 or subject.startswith("every ")
    return Pattern(
        group.kind,
        f"{subject} {singular(group.predicate) if one else group.predicate}",
        share,
        _rest(evidence, rows, features) if fit is None else fit.remaining,
        row_ranges(lines if where else rows),
        () if where else row_ranges(lines),
    )


def _rest(evidence: Evidence, rows: Tensor, features: Tensor | None) -> float | None:
    """The factor over a well-rounded kernel's expected error of all that is not in the place; None for nothing."""
    kept = evidence.usable.clone()
    if features is None:
        kept[rows] = False
        if not bool(kept.any()):
            return None
        return math.sqrt(float(evidence.error[kept].square().sum()) / max(float(evidence.noise[kept].sum()), 1e-300))
    columns = torch.ones_like(evidence.features)
    columns[features] = False
    noise = float(evidence.variance[kept][:, columns].sum())
    return math.sqrt(float(evidence.error[kept][:, columns].square().sum()) / max(noise, 1e-300))
