"""Whether an emulated recipe errs as a captured kernel does, and how both compare with a well-rounded kernel.

Compared are sizes (the interval of the paired ratio), the errors themselves, means (paired, beside the standard error
that any statement about the mean has) and, of LSE, what fp32 arithmetic may differ by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attn_diag.head.counterfactual import ALTERNATIVES, Counterfactuals, covers
from attn_diag.head.open import OpenHead
from attn_diag.head.quality import AS_GOOD
from attn_diag.head.together import joins, outputs_together
from attn_diag.kernels import EmulatedHead, emulate_head, stackable
from attn_diag.kernels.formats import parse
from attn_diag.reference import ulp
from attn_diag.results.wording import number, percent
from attn_diag.statistics.means import BiasCase, SignedErrors, estimate_biases
from attn_diag.statistics.ratios import RatioEstimate, paired_ratio

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


def fidelity(head: OpenHead) -> Fidelity:
    """Run the head's recipe once, and well-rounded ones, and compare."""
    return fidelities([head])[0]


def fidelities(heads: Sequence[OpenHead]) -> list[Fidelity]:
    """The same of several heads of one recipe; those on a GPU are of one shape, and run together."""
    others = [Counterfactuals(h.truth.head, h.truth.out_format, h.formats, key_gradients=False) for h in heads]
    recipe, together = heads[0].baseline.recipe, len(heads) > 1 and joins(heads[0].truth.head.q.device)
    if together:
        Counterfactuals.run_together(others)
    if together and stackable(recipe):
        (stack,) = outputs_together([recipe], [head.truth.head for head in heads])
        made = [{name: values[i].double() for name, values in stack.items()} for i in range(len(heads))]
    else:
        made = [_outputs_of(emulate_head(recipe, head.truth.head, key_gradients=False)) for head in heads]
    return [_compared(*each) for each in zip(heads, made, others, strict=True)]


def _outputs_of(made: EmulatedHead) -> dict[str, Tensor]:
    return {n: t.double() for n in ("o", "lse", "delta", "dq") if (t := getattr(made, n)) is not None}


def _compared(head: OpenHead, emulated: Mapping[str, Tensor], others: Counterfactuals) -> Fidelity:
    """One head, beside what its recipe and well-rounded ones make."""
    truth, reference = head.truth, head.truth.reference
    # What rowsum(dO o O) errs by is no other delta's error.
    recipe = head.baseline.recipe
    in_fp32 = parse(recipe.delta) is None and parse(recipe.delta_products) is None
    made_from_o = recipe.delta_from == "rounded-o" and in_fp32
    captured = dict(head.outputs) if head.observation is not None else {}
    if "o" in captured and truth.head.do is not None and "delta" not in captured and made_from_o:
        captured["delta"] = (truth.head.do * captured["o"]).sum(1)
    known = {"o": reference.out, "delta": reference.delta, "dq": reference.dq}
    keys = truth.clusters
    found: dict[str, str] = {}
    for name, exact in known.items():
        if exact is None or name not in captured or name not in emulated:
            continue
        unit = ulp(exact, truth.out_format).mean() if name != "delta" else truth.noise_floor
        assert unit is not None
        words = _apart(captured[name], emulated[name], exact, unit, _usable(truth.usable, captured[name]), keys)
        if words:
            found[name] = words
    for name, rows in _nonfinite(captured, emulated, truth.usable).items():
        found[name] = ", ".join(filter(None, (f"it has NaN or Inf in {rows} of its rows", found.get(name))))
    if "lse" in captured and (words := _other_lse(head, captured["lse"], emulated["lse"])):
        found["lse"] = words
    return Fidelity(found, _beside_well_rounded(head, captured or emulated, known, others))


def _usable(rows: Tensor, values: Tensor) -> Tensor:
    return rows & (values.isfinite() if values.ndim == 1 else values.isfinite().all(1))


def _apart(captured: Tensor, emulated: Tensor, exact: Tensor, unit: Tensor, rows: Tensor, keys: Tensor) -> str:
    """In what two sets of errors differ; empty: in nothing that is certain."""
    known = rows.cpu().numpy()
    if not known.any():
        return ""
    clusters = np.unique(keys.cpu().numpy()[known], return_inverse=True)[1]
    # By row, so that a GPU is waited for once. NaN in a row that does not count is none.
    matrix = exact.reshape(len(exact), -1)
    one, other = (torch.where(rows[:, None], x.reshape(matrix.shape) - matrix, 0.0) for x in (captured, emulated))
    away = matrix.sign() if exact.ndim == 2 else torch.ones_like(matrix)
    scale = unit[:, None] if unit.ndim else unit
    away = torch.where(scale > 0, away / scale, 0.0)
    errors = one, other, one - other
    sums = [x.square().sum(1) for x in errors] + [(x * away).sum(1) for x in errors]
    a, b, difference, *signed = torch.stack(sums).cpu().numpy()[:, known]
    said = []
    ratio = paired_ratio(a, b, clusters if exact.ndim == 2 else None)
    if ratio is not None and (ratio.low > AS_GOOD or ratio.high < 1 / AS_GOOD):
        said.append(f"its error is {number(ratio.factor)} times the recipe's")
    elif ratio is None and bool(a.any()) != bool(b.any()):
        said.append("its error is not the recipe's")
    rest, whole = float(difference.sum()), float(b.sum())
    if not said and rest > _REST * whole:
        part = rest / max(float(a.sum()), 1e-300)
        said.append(f"{percent(min(part, 1.0), '.0f')} of its squared error is not the recipe's")
    mine, theirs, apart = estimate_biases([_case(rows, matrix.shape[1], clusters) for rows in signed], _LEVEL)
    p_value, error = apart.p_value, theirs.standard_error
    moved = (mine.mean or 0.0) - (theirs.mean or 0.0)
    if p_value is not None and p_value <= _LEVEL and error is not None and abs(moved) > _APART * error:
        name = "noise floors" if exact.ndim == 1 else "ulp away from zero"
        said.append(f"its mean is {mine.mean or 0.0:+.2g} {name}, the recipe's {theirs.mean or 0.0:+.2g}")
    return ", ".join(said)


def _case(sums: np.ndarray, count: int, clusters: np.ndarray) -> BiasCase:
    """Signed errors of which the sums by row are known."""
    errors = SignedErrors(
        total=sums, square=float(np.square(sums).sum()), positive=int((sums > 0).sum()),
        nonzero=int((sums != 0).sum()), unit_total=float(sums.sum()), unit_scale=1.0, count=count,
    )  # fmt: skip
    return BiasCase(errors, clusters, with_drift=False)


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
    head: OpenHead, outputs: Mapping[str, Tensor], known: Mapping[str, Tensor | None], others: Counterfactuals
) -> dict[str, RatioEstimate]:
    truth = head.truth
    if not covers(truth.out_format):
        return {}
    found: dict[str, RatioEstimate] = {}
    for name in ("o", "dq"):
        exact = known[name]
        if exact is None or name not in outputs:
            continue
        rows = _usable(truth.usable, outputs[name])
        error = (outputs[name] - exact)[rows].square().sum(1).cpu().numpy()
        fmt = head.formats.get(name, truth.out_format)
        floor = (ulp(exact[rows], fmt).square().sum(1) / 12).cpu().numpy()
        clusters = np.unique(truth.clusters[rows].cpu().numpy(), return_inverse=True)[1] if name == "o" else None
        best: RatioEstimate | None = None
        for recipe in ALTERNATIVES:
            theirs = (others.outputs(recipe)[name] - exact)[rows].square().sum(1).cpu().numpy()
            ratio = paired_ratio(error, theirs if theirs.sum() > floor.sum() else floor, clusters)
            best = ratio if best is None or (ratio is not None and ratio.factor < best.factor) else best
            if best is None or best.high <= AS_GOOD:
                break
        if best is not None:
            found[name] = best
    return found


def _nonfinite(captured: Mapping[str, Tensor], emulated: Mapping[str, Tensor], usable: Tensor) -> dict[str, int]:
    """By quantity, in how many rows the captured kernel returned no numbers where the recipe does; they are left out
    of all else. Those in which it does not are not there."""
    names = [name for name in ("o", "delta", "dq") if name in captured and name in emulated]
    if not names:
        return {}
    lost = [(usable & ~_usable(usable, captured[n]) & _usable(usable, emulated[n])).sum() for n in names]
    # A GPU is waited for once.
    return {name: count for name, count in zip(names, torch.stack(lost).tolist(), strict=True) if count}
