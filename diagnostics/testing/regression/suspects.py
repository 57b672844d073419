"""Which single change of a recipe makes these bits: the culprit's name in a failure.

A failing case's O (or dQ, where the gradients alone are off) is compared with published recipes and with each of them
changed in one place. A change is named where it has 99 % of the elements bit for bit, or as many as the unchanged
recipe had of the baseline's O (whose exp or sums no recipe here may model), and the unchanged one has fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.kernels import PRESETS, Recipe, RecipeNotSupportedError, Schedule, preset
from attn_diag.kernels.formats import base
from attn_diag.kernels.recipe import Order
from attn_diag.results.wording import SYMBOLS, share
from attn_diag.testing.regression.cases import CaseInputs
from attn_diag.testing.regression.subject import DTYPES, emulate

# Elements that the right recipe has: what is not modelled moves up to 0.2 % of BF16 outputs (``identification``).
AGREEMENT = 0.99
# Sequences that are emulated, and by how much a fraction of their elements may fall short of the baseline's: those are
# 2 of 16 sequences of other inputs.
_SEQUENCES, _SHORT = 2, 0.02
# A baseline that no published recipe has so much of is not modelled at all: nothing can be said of what changed in it.
_MODELLED = 0.9
_PUBLISHED = ("fa2", "cudnn", "efficient", "flex", "lowp-row-sum")
_Change = Callable[[Recipe], Recipe]


@dataclass(frozen=True)
class Lookalike:
    """A recipe and the fraction of elements that it has bit for bit."""

    recipe: Recipe
    agreement: float


def published(dtype: torch.dtype, head_dim: int) -> list[Recipe]:
    """What an unchanged kernel may be: presets, and one that takes all keys at once."""
    found = [preset(name, DTYPES[dtype], head_dim) for name in _PUBLISHED]
    whole = replace(found[1], name="cudnn, all keys at once", schedule=Schedule(key_tile=2**20))
    return [*found, whole]


def by_name(name: str, dtype: torch.dtype, head_dim: int) -> Recipe | None:
    """One of ``published``, or any preset."""
    known = {r.name: r for r in published(dtype, head_dim)}
    if name not in known and name in PRESETS:
        return preset(name, DTYPES[dtype], head_dim)
    return known.get(name)


def closest(case: CaseInputs, observed: Tensor, recipes: Sequence[Recipe], device: torch.device) -> Lookalike:
    """Of ``recipes`` the one that has most elements of O ([B, H, T, D]); the first of equals."""
    return max((Lookalike(r, _agreement(r, case, observed, "o", device)) for r in recipes), key=lambda a: a.agreement)


def suspect(
    case: CaseInputs, observed: dict[str, Tensor], output: str, unchanged: Sequence[Recipe], expected: float | None,
    device: torch.device, only: str | None = None,
) -> tuple[str, str] | None:  # fmt: skip
    """The one change that makes the bits of ``output`` ("o" or "dq"), in words, and that with what speaks for it.

    None where no single change does. ``unchanged``: recipes that the kernel may have had; ``expected``: the agreement
    of the baseline's O with its own; ``only``: try this change alone.
    """
    seen = observed[output]
    if seen.dtype != case.q.dtype or (expected is not None and expected < _MODELLED):
        return None
    plain = max(_agreement(r, case, seen, output, device) for r in unchanged)
    enough = AGREEMENT if expected is None else min(AGREEMENT, expected - _SHORT)
    best: tuple[float, str, str] | None = None
    for recipe in unchanged:
        for words, changed in changes(recipe, case.k.shape[2], backward=output != "o"):
            if only is not None and words != only:
                continue
            agreement = _agreement(changed, case, seen, output, device)
            if best is None or agreement > best[0]:
                best = agreement, words, recipe.name
    # A change that leaves over half of the difference unexplained is none.
    if best is None or best[0] < enough or 1 - best[0] > (1 - plain) / 2:
        return None
    shares = f"{share(best[0])} of {SYMBOLS[output]}'s elements bit for bit, unchanged {share(plain)}"
    return best[1], f"{best[1]} (recipe {best[2]} so changed has {shares})"


def changes(recipe: Recipe, keys: int, *, backward: bool = False) -> Iterator[tuple[str, Recipe]]:
    """Every change of one place, in words; those that change nothing are left out."""
    low = recipe.input
    for words, change in _backward(low).items() if backward else _forward(low, keys).items():
        changed = change(recipe)
        if replace(changed, name=recipe.name, summary=recipe.summary) != recipe:
            yield words, changed


def _forward(low: str, keys: int) -> dict[str, _Change]:
    name = base(low).upper()
    zero = f"{low}:toward-zero"
    found: dict[str, _Change] = {
        "the last cast of O truncates": lambda r: replace(r, out=zero),
        "the last cast of O rounds up": lambda r: replace(r, out=f"{low}:up"),
        "the last cast of O rounds down": lambda r: replace(r, out=f"{low}:down"),
        "keys in reversed order": _reversed,
        f"the row sum l in {name}": lambda r: replace(r, row_sum=low),
        "l sums the cast P̄": lambda r: replace(r, row_sum_of="cast-probs"),
        "l sums P̄ before its cast": lambda r: replace(r, row_sum_of="fp32-probs"),
        "the cast of P̄ truncates": lambda r: replace(r, probs=zero),
        "P̄ is not cast": lambda r: replace(r, probs="fp32"),
        f"the scores S in {name}": lambda r: replace(r, scores=low, alpha="before-rounding", exp="exact"),
        f"S - m in {name}": lambda r: replace(r, difference=low, exp="exact"),
        f"the row maximum in {name}": lambda r: replace(r, row_max=low),
        f"the accumulator of O in {name}": lambda r: replace(r, accumulator=low),
        f"P̄V of every tile in {name}": lambda r: replace(r, range_pv=low),
        "O is cast before the division by l": lambda r: replace(r, division="after-last-cast"),
        "a degree-3 polynomial for exp2": lambda r: replace(r, exp="polynomial", exp_degree=3),
        "the diagonal tile first": lambda r: _scheduled(r, order="diagonal-first"),
    }
    for width in (32, 64, 128, 256):
        if width < keys:
            found[f"tiles of {width} keys"] = lambda r, width=width: _scheduled(r, key_tile=width)  # type: ignore[misc]
    found["all keys in one tile"] = lambda r: _scheduled(r, key_tile=2**20)
    return found


def _backward(low: str) -> dict[str, _Change]:
    name = base(low).upper()
    return {
        "the last cast of the gradients truncates": lambda r: replace(r, dq=f"{low}:toward-zero"),
        "the cast of dS truncates": lambda r: replace(r, dscores=f"{low}:toward-zero"),
        f"delta in {name}": lambda r: replace(r, delta=low),
        f"the products dO∘O of delta in {name}": lambda r: replace(r, delta_products=low),
        "delta from O before its cast": lambda r: replace(r, delta_from="fp32-o"),
        "delta = rowsum(P∘dP)": lambda r: replace(r, delta_from="dp"),
        f"dP in {name}": lambda r: replace(r, dprobs=low),
        f"the gradients' accumulator in {name}": lambda r: replace(r, gradient_accumulator=low),
        "dS from the cast P": lambda r: replace(r, dscores_from="cast-probs"),
        "alpha before the cast of dS": lambda r: replace(r, alpha_in_backward="before-cast"),
    }


def _reversed(recipe: Recipe) -> Recipe:
    order: Order = "ascending" if recipe.schedule.order == "descending" else "descending"
    return replace(recipe, schedule=replace(recipe.schedule, order=order))


def _scheduled(recipe: Recipe, **changes: object) -> Recipe:
    return replace(recipe, schedule=replace(recipe.schedule, **changes))  # type: ignore[arg-type]


def _agreement(recipe: Recipe, case: CaseInputs, observed: Tensor, output: str, device: torch.device) -> float:
    try:
        made = emulate(recipe, case, device, with_gradients=output != "o", sequences=_SEQUENCES)[output]
    except RecipeNotSupportedError:
        return 0.0
    return float((made == observed[: len(made)]).double().mean())
