"""A state or decays in 16 bits behind an error that is no larger than a well-rounded kernel's: their bits tell.

How far off a kernel is beside the yardstick tells little where chunks and roundings differ anyway. But a kernel whose
state is rounded between chunks has all the bits of that: of kernels that round as well-rounded and released ones do, in
chunks of each size, none comes as near to what was observed as the one with that site too. What the site makes of the
error is then known, and what the kernel would leave without it: its own counterfactual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from torch import Tensor

from attn_diag.analyses.linear.causes import SITE_EXPLAINS, Causes
from attn_diag.analyses.linear.choices import FINER, FP32
from attn_diag.analyses.linear.noise import block_of, by_chance, with_rounded_decays
from attn_diag.analyses.linear.words import CAUSES, Cause
from attn_diag.head.linear import LinearRun, Place
from attn_diag.head.quality import LOSSY
from attn_diag.kernels.linear_recipe import GRADIENT_SITES, LinearFormat, LinearRecipe
from attn_diag.results.linear import LinearQuantity
from attn_diag.results.wording import number, percent

# The coefficient of a site's own change in what a kernel without it leaves unexplained.
_ONE = (0.75, 1.33)
# Of the kernels that are nearest without the site, so many are tried with it.
_NEAREST = 2
_ASKED = ("o", "final_state")
_Kernel = tuple[LinearRecipe, str]


class Bits:
    """Emulated forwards of one capture, each made once."""

    def __init__(self, run: LinearRun, causes: Causes) -> None:
        self._run, self._causes = run, causes
        self._made: dict[_Kernel, dict[str, Tensor]] = {}
        self._stepwise: dict[str, LinearRun] = {}

    def named(self, q: LinearQuantity, observed: Tensor, place: Place) -> LinearQuantity:
        """The quantity, with a coarse site that its bits prove.

        ``lossy`` where it makes the error 1.25 times what the same kernel would leave without it; a kernel with fp32
        operands that is finer than a well-rounded one all the same is named alone.

        Args:
            q: As it was judged.
            observed: The head's, as it was captured.
            place: Where the head is in the quantity's tensor.
        """
        asked = q.quantity in _ASKED and q.factor is not None and self._run.format is not None
        if not asked or q.answer not in ("good", "undecided", "lossy") or (q.answer == "lossy" and q.cause):
            return q
        if q.relative_error is None or q.relative_error <= FP32 * self._run.unit:
            return q
        true = self._run.reference.values[q.quantity][place]
        assert q.factor is not None
        cause, finer = self._proven(q.quantity, observed.double(), true, place) or (None, True)
        if cause is None and q.quantity == "final_state":
            cause = self._causes.stored(observed, true, inf)
        if cause is None or cause.explained < SITE_EXPLAINS:
            return q
        left = (1 - min(cause.explained, 1.0)) ** 0.5
        if q.factor * left > LOSSY:
            return q  # more than a sound kernel leaves is another cause's, of which the site may have a part by chance
        said = q.words.removesuffix(".").partition(", as with ")[0].partition(": it is ")[0]
        said = f"{said}, as with {cause.words}: that explains {percent(cause.explained)} of it"
        answer = q.answer
        if q.factor >= FINER or not finer:
            answer = "lossy" if left <= 1 / LOSSY else "undecided"
            said += f"; without that it would be {number(q.factor * left)} times"
        return replace(q, answer=answer, words=f"{said}.", cause=cause.name, explained=cause.explained)

    def _proven(self, name: str, observed: Tensor, true: Tensor, place: Place) -> tuple[Cause, bool] | None:
        """The site, and whether it is that of a kernel that is finer than a well-rounded one (fp32 operands)."""
        total = float((observed - true).square().sum())

        def missed(kernel: _Kernel) -> float:
            return float((observed - self._outputs(kernel)[name][place]).square().sum())

        sound = self._sound()
        if any(missed((recipe, "")) < (1 - LOSSY**-2) * SITE_EXPLAINS * total for recipe in sound):
            return None  # its bits are a kernel's without such a site
        sites = [site for site in self._sites() if self._reaches(site, name, place, total)]
        if not sites:
            return None
        sound.sort(key=lambda recipe: missed((recipe, "")))
        least = missed((sound[0], ""))
        like = [r for r in sound if replace(r, chunk=sound[0].chunk) == sound[0]]
        tried = [(r, site) for r in dict.fromkeys([*sound[:_NEAREST], *like]) for site in sites]
        best = min(tried, key=missed, default=None)
        if best is None or least - missed(best) < SITE_EXPLAINS * total:
            return None
        (recipe, site), plain = best, self._outputs((best[0], ""))[name][place]
        change, left = self._outputs(best)[name][place] - plain, observed - plain
        size = float(change.square().sum())
        if not size or not _ONE[0] < float((left * change).sum()) / size < _ONE[1]:
            return None
        if by_chance(left, change, block_of(name)):
            return None
        words = CAUSES[site] if site.endswith("_step") else f"{CAUSES[site]} (chunks of {recipe.chunk})"
        return Cause(site, min(1.0, (least - missed(best)) / total), words), recipe.operands == "fp32"

    def _sound(self) -> list[LinearRecipe]:
        """Forwards without a coarse site, the likelier first: released ones, a well-rounded kernel's, finer ones."""
        run, fmt = self._run, self._run.format
        assert fmt is not None
        sets: list[dict[str, LinearFormat]] = [
            {s: f for s, f in known.items() if s not in GRADIENT_SITES} for known in run.released()
        ]
        sets += [{}, {"operands": "fp32"}, {"operands": "fp32", "inter": fmt}]
        chunks = sorted(run.chunks, key=lambda c: c != run.recipe.chunk)
        return list(dict.fromkeys(replace(run.recipe, chunk=c, **known) for known in sets for c in chunks))

    def _reaches(self, site: str, name: str, place: Place, total: float) -> bool:
        """Whether the site changes so much at all, in the shortest chunks."""
        recipe = replace(self._run.recipe, chunk=self._run.chunks[0])
        change = (self._outputs((recipe, site))[name] - self._outputs((recipe, ""))[name])[place]
        return float(change.square().sum()) > _ONE[0] * SITE_EXPLAINS * total

    def _sites(self) -> Iterator[str]:
        yield "state"
        if self._run.has_site("decay"):
            yield "decay"
        if "g" in self._run.capture.tensors:
            yield "decay_step"

    def _outputs(self, kernel: _Kernel) -> dict[str, Tensor]:
        if kernel not in self._made:
            recipe, site = kernel
            run, fmt = self._run, self._run.format
            assert fmt is not None
            if site == "decay_step":
                run = self._stepwise.setdefault(site, with_rounded_decays(run, site))
            elif site:
                recipe = replace(recipe, **{site: fmt})  # type: ignore[arg-type]
            self._made[kernel] = run.emulated(recipe, forward=True)
        return self._made[kernel]
