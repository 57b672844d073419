"""What a kernel of linear attention rounds otherwise than a well-rounded one: in which chunks, at which sites.

A kernel may be sound and have 0.7 times a well-rounded kernel's error, or 1.2 times. What released kernels are known to
do otherwise, in their sources, is emulated: all of it in chunks of each size, and from the best of these is taken away
again what changes nothing. Only the bits decide: an emulation whose error is half another one is none.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.linear.noise import stands_out
from attn_diag.head.linear import LinearRun, Place, recipe_name
from attn_diag.head.quality import AS_GOOD, LOSSY
from attn_diag.kernels.linear_recipe import CHOICES, LinearFormat, LinearRecipe
from attn_diag.results.linear import LinearQuantity
from attn_diag.results.wording import percent, together

# Below this a kernel has less error than a well-rounded one.
FINER = 0.9
# What an emulation must make of the squared error: its bits are there. And one that rounds at the end alone, as other
# fine kernels nearly do.
_EXPLAINS, _ALL = 0.5, 0.9
# What a choice must make of it to be named, and how many standard errors from nothing.
_MATTERS, _SURE = 0.1, 3.0
# No released kernel has so many times a well-rounded one's error (19 times is the most that was seen).
_MOST = 64.0
# So small a part of the format's unit roundoff is fp32's own rounding, not the format's.
FP32 = 2.0**-6
# Rows that are counted together, as they share the state's error; fewer where there are few.
_BLOCK, _GROUPS = 16, 8
# Mamba-2's layers call their kernel with it.
_LONGEST = 256


class Choices:
    """Emulated kernels of one capture, each made once."""

    def __init__(self, run: LinearRun) -> None:
        self._run = run
        self._made: dict[LinearRecipe, dict[str, Tensor]] = {}
        self._known = run.released()

    def named(self, q: LinearQuantity, observed: Tensor, place: Place) -> LinearQuantity:
        """The quantity, with what makes its error another than a well-rounded kernel's where that is known.

        Args:
            q: As it was judged.
            observed: The head's, as it was captured.
            place: Where the head is in the quantity's tensor.
        """
        # Coarse sums are known by their size alone, and a factor may be what operands that are cut off make; what the
        # bits tell goes before.
        by_size = q.cause in ("decay_sums", "factor")
        if q.factor is None or q.relative_error is None or self._run.format is None or not (q.cause is None or by_size):
            return q
        if q.relative_error <= FP32 * self._run.unit:
            return q
        finer = q.answer == "good" and q.factor < FINER
        if not finer and not (q.answer in ("undecided", "lossy", "wrong") and AS_GOOD < q.factor < _MOST):
            return q
        found = self._of(q.quantity, observed.double(), place, wrong=q.answer == "wrong")
        if found is None and (by_size or q.answer == "wrong"):
            return q
        if found is None:
            unknown = "; its bits do not tell why" if finer else ""
            return replace(q, words=f"{q.words.removesuffix('.')}{unknown}.")
        name, words, explained = found
        if q.cause == "factor" and q.explained is not None and q.explained > explained:
            return q
        judged = q.words.removesuffix(".")
        for otherwise in (", as with ", ", which no rounding makes", ": it is "):
            judged = judged.partition(otherwise)[0]
        said = f"{judged}, as {words}: that makes {percent(explained)} of its squared error."
        # What roundings make to the bit is not wrong, however large.
        answer = q.answer if q.answer != "wrong" else "lossy" if q.factor > LOSSY else "undecided"
        return replace(q, answer=answer, words=said, cause=name, explained=explained)

    def _of(self, name: str, observed: Tensor, place: Place, *, wrong: bool) -> tuple[str, str, float] | None:
        true = self._run.reference.values[name][place]
        total, own = float((observed - true).square().sum()), self._run.recipe
        width = observed.shape[-1] if observed.ndim == 3 else 1

        def missed(recipe: LinearRecipe) -> Tensor:
            rows = (observed - self._outputs(recipe)[name][place]).square().reshape(-1, width).sum(1)
            block = min(_BLOCK, -(-len(rows) // _GROUPS))
            return torch.nn.functional.pad(rows, (0, -len(rows) % block)).reshape(-1, block).sum(1) / total

        def worse(one: LinearRecipe, other: LinearRecipe) -> bool:
            """Whether one misses more of the squared error than the other, and that is no chance."""
            more = missed(one) - missed(other)
            apart, noise = float(more.sum()), float(more.var()) * len(more) if len(more) > 1 else math.inf
            return apart > max(_MATTERS, _SURE * math.sqrt(noise))

        chunks = [*self._run.chunks, *([_LONGEST] if self._run.chunks[-1] == _LONGEST // 2 else [])]
        sets: list[tuple[int, dict[str, LinearFormat]]] = [(chunk, {}) for chunk in self._run.chunks]
        sets += [(chunk, known) for known in self._known for chunk in chunks] + [(own.chunk, {"operands": "fp32"})]
        tried = [(replace(own, chunk=chunk, **changed), changed) for chunk, changed in sets]
        best, used = min(tried, key=lambda one: float(missed(one[0]).sum()))
        for site in list(used):
            without = replace(best, **{site: getattr(own, site)})
            if not worse(without, best):
                best, used = without, {s: to for s, to in used.items() if s != site}
        errors = (observed - true, self._outputs(best)[name][place] - true)
        off, made = (x.square().reshape(-1, width).sum(1) for x in errors)
        if wrong and stands_out(off, made, width).any():
            return None  # these roundings leave less in some rows
        error, explained = float(made.sum()), 1 - float(missed(best).sum())
        if explained < (_ALL if "operands" in used else _EXPLAINS) or not FINER**2 <= total / error <= AS_GOOD**2:
            return None
        told = all(worse(replace(best, chunk=chunk), best) for chunk in chunks if chunk != best.chunk)
        words = [f"{CHOICES[site]}{' (in TF32)' if to == 'tf32' else ''}" for site, to in used.items()]
        said = [f"in chunks of {best.chunk}"] if told else []
        said += [f"where {together(words)}"] if words else []
        named = recipe_name(best, self._run)
        return (named if told else named.partition(",")[2], " ".join(said), explained) if said else None

    def _outputs(self, recipe: LinearRecipe) -> dict[str, Tensor]:
        if recipe not in self._made:
            self._made[recipe] = self._run.emulated(recipe)
        return self._made[recipe]
