"""The signed error that a tie or swamping must give, in closed form, beside the measured one.

With the n keys whose cast P_bar is 1 (*unit* keys), A = their sum of V, R = sum of the others' cast P_bar V:

    a recipe that rounds O_bar:   base = A          r = R                      O_bar = base + r, error of O divided by l
    one that rounds O only:       base = A / n      r = (R - (l - n) A/n) / l  O     = base + r   (an identity)

    swamped  base is a number of the format and r does not move it:       error = -r
    tie      base lies half-way between two neighbours, and r decides:    error = sign(r) spacing / 2 - r,
             to even where r = 0
    else     ordinary rounding: nothing is predicted, 0

The mechanism is that of Qiu & Yao (arXiv 2510.04212, section 3.3); the form for recipes that round O only is ours: it
needs the rest's contrast with the unit keys' mean of V, not the rest itself. l is the recipe's own. Recipes of several
key ranges round O_bar once per range; here it is rounded once, at the end. Softcapped and biased scores are rounded
once, after both; P_bar is relative to the row's final maximum, whatever the softmax rule's stale ones were. Under
dropout A and R are sums of what is kept, l is not, and O is multiplied by 1 / (1 - p): hardly ever a number of the
format times that is one too, so that in O alone little is tied or swamped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_diag.analyses.microscopy.walk import require_walkable, rounds_accumulator, rounds_numerator
from attn_diag.captures.absorbed import WithoutAbsorbedRows
from attn_diag.captures.capture import Capture
from attn_diag.captures.selection import select_place
from attn_diag.errors import InputError
from attn_diag.head.baseline import DEFAULT_RECIPE, Baseline, observation_with_o, require_known
from attn_diag.head.machine import pick_device
from attn_diag.head.open import OpenCapture, OpenHead
from attn_diag.head.read import HeadInputs
from attn_diag.head.row_maxima import site_format
from attn_diag.kernels import Recipe, emulate_head, preset, score_rounding
from attn_diag.kernels.emulation_softmax import own_maximum
from attn_diag.kernels.formats import Format, Mode, Rounding, parse, round_to
from attn_diag.reference import AttentionHead, FloatFormat, RowBlock, format_of, row_blocks
from attn_diag.results.microscope import ClosedForm, ClosedFormRows, ClosedFormTotals, Explained
from attn_diag.results.wording import percent


@dataclass(frozen=True)
class MicroscopeSubject:
    """One head of one sequence, with the O to explain."""

    opened: OpenHead
    """The head, and the recipe that is followed."""
    out: Tensor
    """O, [Tq, Dv] float64: as captured, or as the recipe makes it where none was."""
    out_format: FloatFormat
    """The format of O."""

    @property
    def recipe(self) -> Recipe:
        """The recipe that is followed."""
        return self.opened.baseline.recipe

    @property
    def inputs(self) -> HeadInputs:
        """The head's inputs."""
        return self.opened.inputs


def subject_of(
    source: Capture | AttentionHead,
    *,
    recipe: str | Recipe | None = None,
    observation: str | None = None,
    observed: Tensor | None = None,
    batch: int = 0,
    head: int | None = None,
    device: str = "auto",
) -> MicroscopeSubject:
    """The subject of a capture, or of a head with an observed O; arguments and errors as ``microscope`` has them."""
    if isinstance(source, AttentionHead):
        return _of_head(source, recipe, observed)
    where, source = pick_device(device), WithoutAbsorbedRows.of(source).capture
    batch, index = select_place(source, batch, head)
    opened = OpenCapture(source, where, [batch], [index])
    return of_open_head(opened.open_head(observation_with_o(source, observation), recipe, batch, index))


def of_open_head(opened: OpenHead) -> MicroscopeSubject:
    """The subject of a head: the O to explain is the captured one, else what the recipe makes.

    Raises:
        InputError: The recipe cannot be followed.
    """
    recipe = opened.baseline.recipe
    require_walkable(recipe)
    if "o" in opened.outputs:
        return MicroscopeSubject(opened, opened.outputs["o"], opened.formats["o"])
    out = emulate_head(recipe, replace(opened.inputs.head, do=None)).o.double()
    return MicroscopeSubject(opened, out, site_format(recipe.out) or format_of(torch.float32))


def _of_head(head: AttentionHead, recipe: str | Recipe | None, observed: Tensor | None) -> MicroscopeSubject:
    if isinstance(recipe, str):
        require_known("emulation", [recipe])
    known = recipe if isinstance(recipe, Recipe) else preset(recipe or DEFAULT_RECIPE, "bf16", head.q.shape[1])
    shape = [len(head.q), head.v.shape[1]]
    if observed is not None and list(observed.shape) != shape:
        raise InputError(f"observed must have shape [Tq, Dv] = {shape}, got {list(observed.shape)}")
    none = torch.zeros(len(head.q), dtype=torch.bool, device=head.q.device)
    fmt = site_format(known.input) or format_of(torch.float32)
    return of_open_head(
        OpenHead(
            source="memory",
            layer=None,
            batch=0,
            head=0,
            observation=None if observed is None else "observed",
            outputs={} if observed is None else {"o": observed.double().to(head.q.device)},
            formats={} if observed is None else {"o": format_of(observed.dtype)},
            baseline=Baseline(known, known.name, "assumed" if recipe is None else "given"),
            inputs=HeadInputs(head, none, none.new_empty(0, dtype=torch.int64), fmt),
        )
    )


CLASSES: tuple[str, ...] = ("tie", "swamped", "ordinary")


@dataclass(frozen=True)
class Prediction:
    """For a block: unit keys [R], and per element [R, Dv]: tie and swamped marks, base, residual r, error of O, and O
    as the recipe has it before the rounding."""

    unit_keys: Tensor
    tie: Tensor
    swamped: Tensor
    base: Tensor
    residual: Tensor
    error: Tensor
    unrounded: Tensor


def closed_form(
    source: Capture | AttentionHead,
    *,
    recipe: str | Recipe | None = None,
    observation: str | None = None,
    observed: Tensor | None = None,
    batch: int = 0,
    head: int | None = None,
    device: str = "auto",
) -> ClosedForm:
    """Predict the signed error of every row of one head in closed form, beside the measured one.

    Streams over row blocks.

    Args:
        source: A capture, or one head (float64).
        recipe: A name or a Recipe; None: what the O is recognised as, else fa2.
        observation: None: the first with an O.
        observed: O [Tq, Dv] of a head, where there is one; without an observed O the recipe's own is explained.
        batch: Index of the batch item.
        head: The model's number of the head; None: the capture's first.
        device: auto, cpu or cuda.

    Raises:
        InputError: As ``inspect`` does.
    """
    return explain(
        subject_of(
            source, recipe=recipe, observation=observation, observed=observed, batch=batch, head=head, device=device
        )
    )


def explain(subject: MicroscopeSubject) -> ClosedForm:
    """The closed form of a subject."""
    sums, head, opened = _Sums(subject.recipe), subject.inputs.head, subject.opened
    # Where dQ is known the forward is enough.
    for block in row_blocks(head if opened.measured is None else replace(head, do=None)):
        if opened.measured is not None and (dq := opened.measured.reference.dq) is not None:
            block.dq = dq[block.rows]
        sums.add(subject, block, predict_block(subject.recipe, head, block))
    return ClosedForm(
        opened.source, opened.observation, opened.layer, opened.batch, opened.head, sums.totals(), sums.by_row()
    )


def predict_block(recipe: Recipe, head: AttentionHead, block: RowBlock) -> Prediction:
    """The closed form for a block of rows of the float64 reference."""
    values = head.v[block.keys]
    probs, cast, row_max = _recipe_probs(recipe, head.scale, block.scores, block.sink)
    row_sum = (probs if recipe.row_sum_of == "fp32-probs" else cast).sum(1, keepdim=True)
    row_sum = row_sum.clamp_(min=recipe.row_sum_clamp or 0.0)
    if block.sink is not None:
        row_sum += (block.sink - row_max).exp()
    row_sum = round_to(row_sum, parse(recipe.row_sum))
    factor = 1.0
    if head.dropout is not None:
        cast, factor = cast * head.dropout.kept[block.rows, block.keys], head.dropout.factor
    unit = cast == 1.0
    top = unit.double() @ values
    rest = cast.masked_fill(unit, 0.0) @ values
    count = unit.sum(1, keepdim=True).double()
    inverse = torch.where(row_sum > 0, 1 / row_sum, 0.0)
    # O_bar is multiplied by 1 / (1 - p) behind its own roundings, and before all others.
    late = factor if rounds_accumulator(recipe) else 1.0
    top, rest = top * (factor / late), rest * (factor / late)
    if rounds_numerator(recipe):
        base, residual, divisor, reach = top, rest, torch.ones_like(count), inverse * late
    else:
        divisor, reach = count.clamp(min=1.0), torch.ones_like(inverse)
        base = top / divisor
        residual = (rest - (row_sum - count) * base) * inverse
    unrounded = (base + residual) * reach
    rounding = _rounding(recipe)
    if rounding is None:
        nothing = torch.zeros_like(base, dtype=torch.bool)
        return Prediction(count[:, 0].long(), nothing, nothing, base, residual, torch.zeros_like(base), unrounded)
    below = round_to(base, Rounding(rounding.format, Mode.DOWN))
    above = round_to(base, Rounding(rounding.format, Mode.UP))
    middle = (below + above) / 2
    known = count > 0
    # base may be a quotient; times n both sides are exact: a few bits each.
    representable = known & (below == above) & (below * divisor == top)
    swamped = representable & (residual != 0) & (round_to(base + residual, rounding) == base)
    tie = known & (below < above) & (middle * divisor == top) & (residual.abs() <= (above - below) / 2)
    even = round_to(middle, rounding)
    goes = torch.where(residual > 0, above, torch.where(residual < 0, below, even))
    error = torch.where(tie, goes - base - residual, torch.where(swamped, -residual, 0.0)) * reach
    return Prediction(count[:, 0].long(), tie, swamped, base, residual, error, unrounded)


def _recipe_probs(recipe: Recipe, scale: float, exact: Tensor, sink: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """P_bar [R, K] as the recipe has it before and after its cast, float64, and the row's final maximum [R, 1]."""
    scores = score_rounding(recipe, scale)(exact).double()
    if recipe.alpha == "in-exponent":
        scores = scores * scale
    scores = scores.masked_fill(exact == -torch.inf, -torch.inf)
    row_max = own_maximum(recipe, scores) if scores.shape[1] else scores.new_full((len(scores), 1), -torch.inf)
    if sink is not None and recipe.sink_joins == "first":
        row_max = row_max.clamp(min=sink)
    row_max = round_to(row_max, parse(recipe.row_max)).masked_fill(row_max == -torch.inf, 0.0)
    difference = scores - row_max
    if recipe.exp == "exact":
        difference = round_to(difference, parse(recipe.difference))
    probs = difference.exp()
    cast = round_to(probs * recipe.probs_scale, parse(recipe.probs)) / recipe.probs_scale
    return probs, cast, row_max


def _rounding(recipe: Recipe) -> Rounding | None:
    """The rounding that the closed form is about: the coarsest of O_bar's, else that of O; nearest-even only."""
    names: list[Format] = [recipe.range_pv, recipe.accumulator]
    if recipe.division == "after-last-cast" or not rounds_numerator(recipe):
        names.append(recipe.out)
    found = [rounding for rounding in map(parse, names) if rounding is not None]
    if not found:
        return None
    coarsest = min(found, key=lambda rounding: rounding.format.mantissa_bits)
    return coarsest if coarsest.mode is Mode.NEAREST_EVEN else None


@dataclass
class _Pairs:
    """Sums over pairs (predicted, measured)."""

    n: int = 0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Of both, of their squares, and of their products."""

    def add(self, predicted: Tensor, measured: Tensor) -> None:
        self.n += predicted.numel()
        terms = predicted, measured, predicted.square(), measured.square(), predicted * measured
        self.sums = tuple(total + float(part.sum()) for total, part in zip(self.sums, terms, strict=True))

    def result(self) -> Explained:
        n, (p, m, pp, mm, pm) = max(self.n, 1), self.sums
        spread = (pp - p**2 / n) * (mm - m**2 / n)
        return Explained(
            n=self.n,
            predicted_sum=p,
            measured_sum=m,
            predicted_rms=math.sqrt(pp / n),
            measured_rms=math.sqrt(mm / n),
            correlation=(pm - p * m / n) / math.sqrt(spread) if spread > 0 else None,
            projection=pm / mm if mm else None,
            share=(2 * pm - pp) / mm if mm else None,
        )


@dataclass
class _Sums:
    """What is kept of the stream."""

    recipe: Recipe
    o: _Pairs = field(default_factory=_Pairs)
    delta: _Pairs = field(default_factory=_Pairs)
    before: _Pairs = field(default_factory=_Pairs)
    elements: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    energy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    dq_energy: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    columns: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, subject: MicroscopeSubject, block: RowBlock, found: Prediction) -> None:
        head = subject.inputs.head
        subject.inputs.mark_rows(block)
        reference, observed = block.out, subject.out[block.rows]
        usable = ~(subject.inputs.unusable[block.rows] | block.fully_masked) & observed.isfinite().all(1)
        predicted, measured = found.error[usable], (observed - reference)[usable]
        self.o.add(predicted, measured)
        self.before.add((found.unrounded - reference)[usable], measured)
        tie, swamped = found.tie[usable], found.swamped[usable]
        for name, mark in zip(CLASSES, (tie, swamped, ~(tie | swamped)), strict=True):
            self.elements[name] += int(mark.sum())
            self.energy[name] += float(measured[mark].square().sum())
        rows = torch.arange(len(head.q), device=usable.device)[block.rows][usable]
        kept = {"row": rows, "unit_keys": found.unit_keys[usable], "tied": tie.sum(1), "swamped": swamped.sum(1),
                "predicted_o": predicted.sum(1), "measured_o": measured.sum(1)}  # fmt: skip
        if head.do is not None:
            assert block.dq is not None
            do = head.do[block.rows][usable]
            deltas = (do * predicted).sum(1), (do * measured).sum(1)
            self.delta.add(*deltas)
            kept |= {"predicted_delta": deltas[0], "measured_delta": deltas[1]}
            size = (block.probs @ head.k[block.keys])[usable].square().sum(1) * head.scale**2
            for i, delta in enumerate(deltas):
                self.dq_energy[i] += float((delta.square() * size).sum())
            self.dq_energy[2] += float(block.dq[usable].square().sum())
        for name, values in kept.items():
            self.columns.setdefault(name, []).append(values.cpu())

    def by_row(self) -> ClosedFormRows:
        names = ClosedFormRows.__dataclass_fields__
        joined = {n: tuple(torch.cat(self.columns[n]).tolist()) if n in self.columns else () for n in names}
        return ClosedFormRows(**joined)

    def totals(self) -> ClosedFormTotals:
        rows = dict.fromkeys(CLASSES, 0)
        for tied, swamped in zip(self.columns.get("tied", []), self.columns.get("swamped", []), strict=True):
            rows["tie"] += int((tied > 0).sum())
            rows["swamped"] += int(((tied == 0) & (swamped > 0)).sum())
            rows["ordinary"] += int(((tied == 0) & (swamped == 0)).sum())
        rounding, numerator = _rounding(self.recipe), rounds_numerator(self.recipe)
        *dq, norm = self.dq_energy
        by_delta = [math.sqrt(e / norm) if norm else None for e in dq] if self.delta.n else [None, None]
        total = sum(self.energy.values())
        sites = self.recipe.range_pv, self.recipe.accumulator, self.recipe.out
        result = ClosedFormTotals(
            recipe=self.recipe.name,
            site="O_bar" if numerator else "O",
            format=next((text for text in sites if rounding is not None and parse(text) == rounding), None),
            rows=rows,
            elements=self.elements,
            error_share={name: energy / total if total else 0.0 for name, energy in self.energy.items()},
            o=self.o.result(),
            delta=self.delta.result() if self.delta.n else None,
            before=self.before.result(),
            dq_predicted=by_delta[0],
            dq_measured=by_delta[1],
            statement="",
        )
        return replace(result, statement=_statement(result))


def _statement(t: ClosedFormTotals) -> str:
    """What the totals mean, in words."""
    if t.format is None:
        return "The recipe rounds neither O_bar nor O to nearest even: the closed form has nothing to say."
    said = t.elements["tie"] + t.elements["swamped"]
    count = max(t.o.n, 1)
    share = t.o.share
    if share is None:
        return "O is equal to the reference: there is no error to explain."
    covered = t.error_share["tie"] + t.error_share["swamped"]
    text = (
        f"Ties and swamping of {t.site} cover {percent(said / count, '.1f')} of the elements, which carry "
        f"{percent(covered, '.1f')} of O's squared error; the closed form explains {percent(share, '.1f')} of the whole"
    )
    if share >= 0.5:
        text += ": most of this head's error in O is of this kind."
    elif (t.before.share or 0.0) > 0.5:
        text += f". What was lost before that rounding (scores, P_bar, l) explains {percent(t.before.share, '.1f')}."
    else:
        text += ": most of it is ordinary rounding."
    if t.site == "O":
        text += " Under this recipe all of these are single correct roundings of O: the data decide their sign."
    return text
