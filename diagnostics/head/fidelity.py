"""Whether an emulated recipe errs as a captured kernel does, and how both compare with a well-rounded kernel.

Compared are sizes (the interval of the paired ratio), the errors themselves, means (paired, beside the standard error
that any statement about the mean has) and, of LSE, what fp32 arithmetic may differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.counterfactual import Counterfactuals, covers
from attn_diag.head.emulated_together import joins, outputs_together
from attn_diag.head.open import OpenHead
from attn_diag.head.quality import AS_GOOD
from attn_diag.head.stacks import on_host
from attn_diag.kernels import emulate_head, stackable
from attn_diag.kernels.formats import parse
from attn_diag.reference import ulp
from attn_diag.reference.heads import stacked
from attn_diag.results.estimates import BiasEstimate
from attn_diag.results.wording import number, percent
from attn_diag.statistics.arrays import Array, dense
from attn_diag.statistics.means import BiasCase, SignedErrors, estimate_biases
from attn_diag.statistics.ratios import RatioCase, RatioEstimate, paired_ratios

# Means further apart than so many standard errors of the recipe's own are not the same.
_APART = 3.0
_LEVEL = 0.01
# A difference from the recipe's result with this part of the recipe's squared error is as large as parts that are named
# as causes (0.05). Genuine kernels, and kernels with other fp32 sums: up to 0.006 of dQ's; one site more: from 0.07 on.
_REST = 0.05


@dataclass(frozen=True)
class Fidelity:
    """A captured kernel beside an emulated recipe and a well-rounded kernel."""

    differences: Mapping[str, str]
    """In what they differ, in words, by quantity (o, lse, delta, dq); one that is absent does not, or is not known."""
    well_rounded: Mapping[str, RatioEstimate]
    """Of o and dq: the captured kernel's error over a well-rounded kernel's; the recipe's where none was captured."""


def differences(head: OpenHead) -> Mapping[str, str]:
    """Run the head's recipe once, and compare; see ``Fidelity``."""
    return _differences([head], [_captured(head)], _emulated([head]))[0]


def fidelities(heads: Sequence[OpenHead]) -> list[Fidelity]:
    """Run the recipe of several heads once, and well-rounded ones, and compare.

    Heads on a GPU are of one shape, and run together.
    """
    others = [Counterfactuals(h.truth.head, h.truth.out_format, h.formats, key_gradients=False) for h in heads]
    if len(heads) > 1 and joins(heads[0].truth.head.q.device):
        Counterfactuals.run_together(others)
    captured, emulated = [_captured(head) for head in heads], _emulated(heads)
    different = _differences(heads, captured, emulated)
    outputs = [one or other for one, other in zip(captured, emulated, strict=True)]
    return list(map(Fidelity, different, _beside_well_rounded(heads, outputs, others)))


def _captured(head: OpenHead) -> dict[str, Tensor]:
    """What the kernel returned, with the delta that follows from its O."""
    captured = dict(head.outputs) if head.observation is not None else {}
    # What rowsum(dO o O) errs by is no other delta's error.
    recipe = head.baseline.recipe
    in_fp32 = parse(recipe.delta) is None and parse(recipe.delta_products) is None
    made_from_o = recipe.delta_from == "rounded-o" and in_fp32
    if "o" in captured and head.truth.head.do is not None and "delta" not in captured and made_from_o:
        captured["delta"] = (head.truth.head.do * captured["o"]).sum(1)
    return captured


def _emulated(heads: Sequence[OpenHead]) -> list[dict[str, Tensor]]:
    """What the recipe returns."""
    recipe = heads[0].baseline.recipe
    if len(heads) > 1 and joins(heads[0].truth.head.q.device) and stackable(recipe):
        (stack,) = outputs_together([recipe], [head.truth.head for head in heads])
        return [{name: values[i].double() for name, values in stack.items()} for i in range(len(heads))]
    made = [emulate_head(recipe, head.truth.head, key_gradients=False) for head in heads]
    return [{n: t.double() for n in ("o", "lse", "delta", "dq") if (t := getattr(one, n)) is not None} for one in made]


def _exact(head: OpenHead) -> dict[str, Tensor | None]:
    reference = head.truth.reference
    return {"o": reference.out, "delta": reference.delta, "dq": reference.dq}


@dataclass(frozen=True)
class _Pair:
    """A quantity of a head, [n] or [n, D], of a captured kernel and of its recipe."""

    head: OpenHead
    name: str
    captured: Tensor
    emulated: Tensor
    exact: Tensor

    @property
    def clustered(self) -> bool:
        """Whether rows of one argmax key err alike: delta's do not."""
        return self.exact.ndim == 2


def _differences(
    heads: Sequence[OpenHead], captured: Sequence[Mapping[str, Tensor]], emulated: Sequence[Mapping[str, Tensor]]
) -> list[dict[str, str]]:
    """In what the two differ that is certain, by quantity."""
    pairs = [
        (i, _Pair(head, name, own[name], made[name], exact))
        for i, (head, own, made) in enumerate(zip(heads, captured, emulated, strict=True))
        for name, exact in _exact(head).items()
        if exact is not None and name in own and name in made
    ]
    keys = on_host([head.truth.clusters for head in heads])
    summed = _summed([pair for _, pair in pairs])
    clusters = [dense(keys[i][one.rows]) for (i, _), one in zip(pairs, summed, strict=True)]
    ratios = paired_ratios(
        [
            RatioCase(one.squares[0], one.squares[1], labels if pair.clustered else None)
            for (_, pair), one, labels in zip(pairs, summed, clusters, strict=True)
        ]
    )
    widths = [pair.exact[0].numel() for _, pair in pairs]
    cases = [
        BiasCase(SignedErrors.of_sums(sums, width), labels, with_drift=False)
        for one, width, labels in zip(summed, widths, clusters, strict=True)
        for sums in one.signed
    ]
    means = iter(estimate_biases(cases, _LEVEL))
    found: list[dict[str, str]] = [{} for _ in heads]
    for (i, pair), one, ratio, *of in zip(pairs, summed, ratios, means, means, means, strict=True):
        words = [f"it has NaN or Inf in {one.lost} of its rows"] if one.lost else []
        if len(one.signed[0]):
            words += _said(one.squares, ratio, *of, clustered=pair.clustered)
        if words:
            found[i][pair.name] = ", ".join(words)
    for head, own, made, words_of in zip(heads, captured, emulated, found, strict=True):
        if "lse" in own and (other := _other_lse(head, own["lse"], made["lse"])):
            words_of["lse"] = other
    return found


@dataclass(frozen=True)
class _Summed:
    """Sums over the features of a pair's rows that count: of the captured kernel's error, of the recipe's, and of the
    difference between both."""

    rows: npt.NDArray[np.bool_]
    """[Tq], those that count."""
    lost: int
    """Rows in which the captured kernel returned no numbers, where the recipe does."""
    squares: Array
    """[3, n]"""
    signed: Array
    """[3, n], away from zero, in ulp (of delta: upwards, in noise floors)."""


def _summed(pairs: Sequence[_Pair]) -> list[_Summed]:
    """The sums of each pair; on a GPU those of one shape at once."""
    found: dict[int, _Summed] = {}
    for places in _alike([pair.exact for pair in pairs]):
        some = [pairs[i] for i in places]
        exact, one, other = (
            stacked([getattr(pair, n) for pair in some]).reshape(len(some), len(some[0].exact), -1)
            for n in ("exact", "captured", "emulated")
        )
        usable = stacked([pair.head.truth.usable for pair in some])
        finite = one.isfinite().all(2)
        rows, lost = usable & finite, (usable & ~finite & other.isfinite().all(2)).sum(1)
        # NaN in a row that does not count is none.
        one, other = (torch.where(rows[..., None], x - exact, 0.0) for x in (one, other))
        away = _away(some, exact)
        errors = one, other, one - other
        sums = [x.square().sum(2) for x in errors] + [(x * away).sum(2) for x in errors]
        # A GPU is waited for once.
        of_all = torch.stack([*sums, rows.double(), lost.double()[:, None].expand_as(rows)], 1).cpu().numpy()
        for i, (*numbers, known, gone) in zip(places, of_all, strict=True):
            counted = np.array(numbers)[:, known > 0]
            found[i] = _Summed(known > 0, int(gone[0]), counted[:3], counted[3:])
    return [found[i] for i in range(len(pairs))]


def _away(pairs: Sequence[_Pair], exact: Tensor) -> Tensor:
    """What errors are multiplied by, [m, n, D]: the sign of the true value over the mean ulp; of delta 1 over each
    row's noise floor."""
    if pairs[0].clustered:
        scale = ulp(exact, pairs[0].head.truth.out_format).mean((1, 2), keepdim=True)
        return torch.where(scale > 0, exact.sign() / scale, 0.0)
    floors = [floor for pair in pairs if (floor := pair.head.truth.noise_floor) is not None]
    scale = stacked(floors)[..., None]
    return torch.where(scale > 0, 1 / scale, 0.0)


def _alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of those that are computed at once: of one shape on a GPU, each by itself on a CPU, whose cache holds
    one."""
    groups: dict[object, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.shape if tensor.is_cuda else i, []).append(i)
    return list(groups.values())


def _said(
    squares: Array,
    ratio: RatioEstimate | None,
    mine: BiasEstimate,
    theirs: BiasEstimate,
    apart: BiasEstimate,
    *,
    clustered: bool,
) -> list[str]:
    """In what two sets of errors differ; nothing where nothing is certain."""
    a, b, difference = squares
    said = []
    if ratio is not None and (ratio.low > AS_GOOD or ratio.high < 1 / AS_GOOD):
        said.append(f"its error is {number(ratio.factor)} times the recipe's")
    elif ratio is None and bool(a.any()) != bool(b.any()):
        said.append("its error is not the recipe's")
    rest, whole = float(difference.sum()), float(b.sum())
    if not said and rest > _REST * whole:
        part = rest / max(float(a.sum()), 1e-300)
        said.append(f"{percent(min(part, 1.0), '.0f')} of its squared error is not the recipe's")
    p_value, error = apart.p_value, theirs.standard_error
    moved = (mine.mean or 0.0) - (theirs.mean or 0.0)
    if p_value is not None and p_value <= _LEVEL and error is not None and abs(moved) > _APART * error:
        name = "ulp away from zero" if clustered else "noise floors"
        said.append(f"its mean is {mine.mean or 0.0:+.2g} {name}, the recipe's {theirs.mean or 0.0:+.2g}")
    return said


def _other_lse(head: OpenHead, captured: Tensor, emulated: Tensor) -> str:
    """Whether two LSE are further apart than fp32 sums, truncated once every 16 products, and one rounding can be.

    Scores that the recipe rounds coarsely carry that into L: those are not compared.
    """
    inputs, recipe = head.truth.head, head.baseline.recipe
    if recipe.scores != "fp32" or recipe.row_max != "fp32" or recipe.row_sum != "fp32" or recipe.difference != "fp32":
        return ""
    rows = head.truth.usable & captured.isfinite() & emulated.isfinite()
    largest = inputs.scale * inputs.q.norm(dim=1) * inputs.k.norm(dim=1).max()
    sums = (inputs.q.shape[1] + len(inputs.k)) / 16 + 2
    budget = sums * 2.0**-23 * (1 + largest)
    apart = (captured - emulated).abs()
    if not bool((apart > budget)[rows].any()):
        return ""
    return f"it is up to {number(float(apart[rows].max()))} from the recipe's"


def _beside_well_rounded(
    heads: Sequence[OpenHead], outputs: Sequence[Mapping[str, Tensor]], others: Sequence[Counterfactuals]
) -> list[dict[str, RatioEstimate]]:
    """Of each head's o and dq, the error over that of the published recipe that comes nearest to it."""
    found: list[dict[str, RatioEstimate]] = [{} for _ in heads]
    for name in ("o", "dq"):
        known = [i for i, h in enumerate(heads) if covers(h.truth.out_format) and _exact(h)[name] is not None]
        known = [i for i in known if name in outputs[i]]
        some = [(heads[i], outputs[i][name], others[i]) for i in known]
        for i, ratio in zip(known, _nearest(name, some) if some else (), strict=True):
            if ratio is not None:
                found[i][name] = ratio
    return found


def _nearest(name: str, some: Sequence[tuple[OpenHead, Tensor, Counterfactuals]]) -> list[RatioEstimate | None]:
    """The same of one quantity of some heads, of which it is known."""
    heads, outputs, others = zip(*some, strict=True)
    exact = [tensor for head in heads if (tensor := _exact(head)[name]) is not None]
    fmt = heads[0].formats.get(name, heads[0].truth.out_format)
    errors, floors = _squares(outputs, exact), _by_row(lambda one: ulp(one, fmt).square() / 12, exact)
    usable, keys = (on_host([getattr(head.truth, n) for head in heads]) for n in ("usable", "clusters"))
    rows = [one & np.isfinite(error) for one, error in zip(usable, errors, strict=True)]
    labels = [dense(of[own]) if name == "o" else None for of, own in zip(keys, rows, strict=True)]
    best: list[RatioEstimate | None] = [None] * len(heads)
    left = list(range(len(heads)))
    for recipe in others[0].alternatives:
        theirs = _squares([others[i].outputs(recipe)[name] for i in left], [exact[i] for i in left])
        cases = [
            RatioCase(errors[i][rows[i]], max(floors[i][rows[i]], own[rows[i]], key=np.sum), labels[i])
            for i, own in zip(left, theirs, strict=True)
        ]
        for i, ratio in zip(left, paired_ratios(cases), strict=True):
            known = best[i]
            best[i] = ratio if known is None or (ratio is not None and ratio.factor < known.factor) else known
        left = [i for i in left if (known := best[i]) is not None and known.high > AS_GOOD]
    return best


def _squares(observed: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Array]:
    """Squared errors by row, [n] each."""
    return _by_row(lambda one, other: (one - other).square_(), observed, exact)


def _by_row(work: Callable[..., Tensor], *tensors: Sequence[Tensor]) -> list[Array]:
    """Sums by row, [n] each, of what ``work`` makes of [n, D]; on a GPU of those of one shape at once."""
    found: dict[int, Array] = {}
    for places in _alike(tensors[0]):
        made = work(*(stacked([of[i] for i in places]) for of in tensors))
        found |= zip(places, made.sum(2).cpu().numpy(), strict=True)
    return [found[i] for i in range(len(tensors[0]))]
