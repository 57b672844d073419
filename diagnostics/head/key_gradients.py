"""dK and dV of key heads, summed over the query heads that share them: errors, and beside a well-rounded kernel's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attn_diag.captures.latent import of_latent
from attn_diag.head.beside import beside_well_rounded
from attn_diag.head.block_sums import made_in_blocks
from attn_diag.head.counterfactual import Counterfactuals
from attn_diag.head.declared import DeclaredKernel, beside_declared
from attn_diag.head.gradient_sums import GradientSums
from attn_diag.head.judging import with_sums
from attn_diag.head.propagation import BackwardCollector, GradientParts, KeyShare, key_parts
from attn_diag.head.quality import QuantitySample, samples
from attn_diag.head.shown_ways import ShownOfHead
from attn_diag.head.signed_errors import each_of_elements
from attn_diag.head.stacks import numbers
from attn_diag.head.truncated_inputs import TruncatedInputs
from attn_diag.reference import FloatFormat, HeadReference, round_nearest_even, ulp
from attn_diag.statistics.mean_tests import effective
from attn_diag.statistics.means import SignedErrors
from attn_diag.statistics.ratios import Carriers


@dataclass
class KeyTerms:
    """What a query head adds to dK and dV of its key head: predictions, and what a well-rounded kernel leaves."""

    backward: BackwardCollector | None
    """Predictions from the captured O and LSE; None without an O or delta."""
    counterfactuals: Counterfactuals | TruncatedInputs | DeclaredKernel
    """What a well-rounded kernel returns, or one that is what it is declared to be."""
    variance: dict[str, Tensor]
    """dk [Tk, D] and dv [Tk, Dv]: their expected squared errors."""
    by_delta: Tensor
    """What every query row adds to the sum of dk's variance through its delta, [Tq]."""
    delta_errors: tuple[Tensor, Tensor] | None
    """delta's errors over their noise, [Tq]: observed and the counterfactual's; None where delta is not known."""
    shown: ShownOfHead | None
    """What the first head of the capture shows."""
    out: Tensor | None = None
    """O as it was captured, [Tq, Dv]."""


@dataclass(frozen=True)
class KeyHead:
    """A key head: what an observation holds of its gradients, and the query heads that make them."""

    batch: int
    """Index of the batch item."""
    observed: Mapping[str, Tensor]
    """dk [Tk, D], dv [Tk, Dv] and dkv, as far as captured and finite, in float64."""
    formats: Mapping[str, FloatFormat]
    """Their formats."""
    references: Sequence[HeadReference]
    """The query heads' references."""
    terms: Sequence[KeyTerms]
    """What the query heads add."""

    @property
    def kind(self) -> object:
        """What heads agree in that can be side by side."""
        return (
            tuple((name, tensor.shape, self.formats[name]) for name, tensor in self.observed.items()),
            *((type(t.counterfactuals), t.backward and tuple(t.backward.wanted.items())) for t in self.terms),
            *(t.delta_errors is None for t in self.terms),
        )


@dataclass(frozen=True)
class KeyGradient:
    """dK or dV of one key head and sequence."""

    batch: int
    """Index of the batch item."""
    sums: GradientSums
    """Sizes of the error and of its predicted parts."""
    errors: SignedErrors
    """Signed errors."""
    sample: QuantitySample
    """Beside a well-rounded kernel's."""


def key_gradients(heads: Sequence[KeyHead]) -> list[dict[str, KeyGradient]]:
    """Errors of dK and dV of some key heads, by name, of those that are alike side by side."""
    alike: dict[object, list[int]] = {}
    for i, head in enumerate(heads):
        alike.setdefault(head.kind, []).append(i)
    found: list[dict[str, KeyGradient]] = [{} for _ in heads]
    for places in alike.values():
        some = [heads[i] for i in places]
        for name, gradients in _gradients(some).items():
            for i, gradient in zip(places, gradients, strict=True):
                found[i][name] = gradient
    return found


def _gradients(heads: Sequence[KeyHead]) -> dict[str, list[KeyGradient]]:
    """Of heads that are alike."""
    first, found = heads[0], dict[str, list[KeyGradient]]()
    shares = [
        KeyShare.stacked([KeyShare.of(head.references[i], head.terms[i].backward) for head in heads])
        for i in range(len(first.terms))
    ]
    observed = {name: torch.stack([head.observed[name] for head in heads]) for name in first.observed}
    for name, parts in key_parts(shares, observed, first.formats).items():
        if parts.observed is None:
            continue
        fmt = first.formats[name]
        errors, spacings = parts.observed - parts.reference, ulp(parts.reference, fmt)
        signed = each_of_elements(errors, spacings.sum((1, 2)).tolist())
        sums = GradientSums.each(parts, [None] * len(heads))
        beside = key_quality(name, parts, [head.terms for head in heads], fmt)
        batches = [head.batch for head in heads]
        found[name] = [KeyGradient(*of_head) for of_head in zip(batches, sums, signed, beside, strict=True)]
    return found


def key_quality(
    name: str, parts: GradientParts, terms: Sequence[Sequence[KeyTerms]], fmt: FloatFormat
) -> list[QuantitySample]:
    """dK or dV of N key heads beside a well-rounded kernel's, which rounds every query head's part and then adds.

    Args:
        name: dk, dv, or dkv of a latent that k and v share.
        parts: The gradients with their predictions, [N, Tk, D] each.
        terms: Of the query heads that share each key head.
        fmt: The format in which they were stored.
    """
    assert parts.observed is not None

    def total(outputs: Sequence[dict[str, Tensor]]) -> Tensor:
        return round_nearest_even(torch.stack([one(found.get) for found in outputs]).sum(0), fmt)

    def one(of: Callable[[str], Tensor | None]) -> Tensor:
        """The gradient, or of a shared latent the sum of both."""
        values = [x for n in (("dk", "dv") if name == "dkv" else (name,)) if (x := of(n)) is not None]
        return values[0] if name != "dkv" else of_latent(values[0], values[1])

    def summed(of: Callable[[KeyTerms], Tensor]) -> Tensor:
        """Over the query heads, [N, Tk, D]."""
        return torch.stack([torch.stack([of(t) for t in same]) for same in zip(*terms, strict=True)]).sum(0)

    variance = summed(lambda t: one(t.variance.get))
    if name == "dkv":  # each of both is rounded, and their sum
        variance = variance + ulp(parts.reference, fmt).square() / 12
    with_casts = all(t.backward is not None and t.backward.dk_cast is not None for t in terms[0])
    fed = summed(lambda t: round_nearest_even(_cast_of(t, one), fmt)) if with_casts else None
    rows = torch.arange(variance.shape[1], device=variance.device)
    carriers: list[Carriers | None] = [None] * len(terms)
    if name in ("dk", "dkv"):
        carriers = _shared_deltas(terms, variance.sum((1, 2)))
    firsts: list[QuantitySample | None] = [None] * len(terms)
    noise = variance + ulp(parts.reference, fmt).square() / 12 if len(terms[0]) > 1 else variance
    if not any(isinstance(t.counterfactuals, DeclaredKernel) for of_head in terms for t in of_head):
        other = round_nearest_even(summed(lambda t: one(_usual(t).get)), fmt)
        made = samples(
            parts.observed, parts.reference, other, noise, fmt, rows.expand(len(terms), -1), len(rows),
            fed=fed, clusters=[None] * len(terms), directions=[None] * len(terms),
        )  # fmt: skip
        made = [x if own is None else replace(x, carriers=own) for x, own in zip(made, carriers, strict=True)]
        QuantitySample.find_ratios(made)
        firsts[:] = made
    found = []
    for h, (of_head, first) in enumerate(zip(terms, firsts, strict=True)):
        observed, reference, own_fed = parts.observed[h], parts.reference[h], None if fed is None else fed[h]
        declared = [t.counterfactuals for t in of_head if isinstance(t.counterfactuals, DeclaredKernel)]
        if declared:
            lse_known = all(t.backward is not None and t.backward.dv_lse is not None for t in of_head)
            found.append(
                beside_declared(
                    observed, reference, total, declared, variance=variance[h], fmt=fmt, rows=rows, fed=own_fed,
                    from_lse=own_fed if name == "dv" and lse_known else None,
                )
            )  # fmt: skip
            continue
        others = [t.counterfactuals for t in of_head if not isinstance(t.counterfactuals, DeclaredKernel)]
        shown, collectors = of_head[0].shown, [t.backward for t in of_head if t.backward is not None]
        beside = partial(
            beside_well_rounded, name, observed, reference, total, others, variance=noise[h], fmt=fmt, rows=rows,
            fed=own_fed, carriers=carriers[h], first=first, shown=shown, outs=[t.out for t in of_head],
        )  # fmt: skip
        if name == "dkv" or own_fed is None:
            found.append(beside())
            continue
        in_blocks = partial(made_in_blocks, name, observed, own_fed, collectors, total, fmt)
        found.append(with_sums(name, beside, in_blocks, shown))
    return found


def _usual(terms: KeyTerms) -> dict[str, Tensor]:
    """What the usual counterfactual returns."""
    assert isinstance(terms.counterfactuals, Counterfactuals | TruncatedInputs)
    return terms.counterfactuals.outputs()


def _cast_of(terms: KeyTerms, one: Callable[[Callable[[str], Tensor | None]], Tensor]) -> Tensor:
    def get(name: str) -> Tensor | None:
        found: Tensor | None = getattr(terms.backward, f"{name}_cast")
        return found

    return one(get)


def _shared_deltas(terms: Sequence[Sequence[KeyTerms]], totals: Tensor) -> list[Carriers | None]:
    """What all keys of dK share: the query rows' errors of delta, in units of its noise.

    Args:
        terms: Of the query heads, of N key heads.
        totals: The sums of dK's variances, [N].
    """
    # What every query row adds to that sum through its delta.
    shares = torch.stack([torch.cat([t.by_delta for t in of_head]) for of_head in terms])
    known = all(t.delta_errors is not None for of_head in terms for t in of_head)
    dots = [totals, shares.sum(1)]
    if known:
        pairs = [[t.delta_errors for t in of_head if t.delta_errors is not None] for of_head in terms]
        one, other = (
            shares.sqrt() * torch.stack([torch.cat([pair[i] for pair in of_head]) for of_head in pairs])
            for i in range(2)
        )
        dots += [one.square().sum(1), other.square().sum(1), (one * other).sum(1)]
    found: list[Carriers | None] = []
    for weights, (total, share, *products) in zip(shares.sqrt().cpu().numpy(), numbers(*dots), strict=True):
        if not total or not weights.any():
            found.append(None)
            continue
        correlation = 0.0
        if products:
            size = (products[0] * products[1]) ** 0.5
            correlation = products[2] / size if size else 0.0
        found.append(Carriers(float(effective(weights)), min(share / total, 1.0), correlation))
    return found
