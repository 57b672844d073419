"""One streamed pass over a head, and what its observers leave for every observation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.head.coarse import TruncatedInputs, noise_collector
from attn_diag.head.counterfactual import Counterfactuals, NoiseCollector, covers, take_noise
from attn_diag.head.declared import DeclaredKernel
from attn_diag.head.projection import HeadProjection
from attn_diag.head.propagation import BackwardCollector, ForwardErrors, take_backward
from attn_diag.head.read import HeadInputs
from attn_diag.head.row_maxima import collector_of, take_maxima
from attn_diag.head.truth import HeadTruth, head_truth
from attn_diag.kernels import Recipe
from attn_diag.reference import (
    BoundCollector,
    FloatFormat,
    HeadBounds,
    HeadReference,
    RowBlock,
    format_of,
)
from attn_diag.reference.fused import FusedHeads, batches, fuses

# Inputs in FP8 are taken as a 16-bit kernel's: of outputs in BF16, as they are.
BF16 = format_of(torch.bfloat16)


@dataclass
class ObservedHead:
    """What one kernel returned for one head."""

    name: str
    """The observation's."""
    outputs: dict[str, Tensor]
    """o, lse, delta and dq in float64, as far as they are known."""
    formats: dict[str, FloatFormat]
    """The formats in which ``outputs`` were stored."""
    recipe: Recipe | None = None
    """The recipe that made it, where it is known."""
    want_keys: bool = False
    """Whether dK or dV were captured too, so that their predictions are wanted."""
    assumed_lse: Tensor | None = None
    """What the backward was fed, [Tq], where LSE was not captured but follows from the recipe."""
    declared: Recipe | None = None
    """The recipe below 16 bits that the kernel is declared to be."""
    finite: frozenset[str] = frozenset()
    """Names of ``outputs`` that are known to be finite."""


class StreamedHead:
    """One pass over a head, and what its observers leave, by observation.

    delta's error needs O_ref of a row before its dS can be cast; both happen block by block.
    """

    truth: HeadTruth
    """The pass's, once it was made."""
    bounds: HeadBounds
    """How far its reference may be off; ``stream_heads`` tells."""

    def __init__(self, inputs: HeadInputs, observed: list[ObservedHead], projection: HeadProjection | None) -> None:
        """Set up the observers; ``stream_heads`` makes the pass."""
        self.inputs, self.observed, self.projection = inputs, observed, projection
        # Observations without a recipe share one collector: only "as_run" depends on it.
        recipes = {seen.name if seen.recipe else "": seen.recipe for seen in observed}
        self._collectors = {key: collector_of(inputs, recipe) for key, recipe in recipes.items()}
        self.maxima = {seen.name: self._collectors[seen.name if seen.recipe else ""] for seen in observed}
        self.errors: dict[str, ForwardErrors] = {}
        self.backward: dict[str, BackwardCollector] = {}
        for seen in observed:
            if (delta := _observed_delta(inputs, seen)) is None:
                continue
            lse = seen.outputs.get("lse", seen.assumed_lse)
            errors = self.errors[seen.name] = ForwardErrors(
                # NaN in one row's outputs must not reach the sums over rows.
                delta=delta.nan_to_num(0.0, 0.0, 0.0),
                delta_error=torch.zeros_like(delta),
                lse=None if lse is None else lse.nan_to_num(0.0, 0.0, 0.0),
                lse_error=None if lse is None else torch.zeros_like(lse),
                cast=inputs.input_format,
                dq=seen.outputs.get("dq"),
            )
            self.backward[seen.name] = BackwardCollector(
                inputs.head, errors, want_casts="dq" in seen.outputs or seen.want_keys, want_keys=seen.want_keys
            )
        self.collected = BoundCollector(inputs.head)
        """What its bounds need."""
        self.visible = torch.zeros(len(inputs.head.q), dtype=torch.int64, device=inputs.head.q.device)
        """How many keys each row sees, [Tq]."""
        stored = next((seen.formats for seen in observed), {})
        want_keys = self.want_keys
        fmt, known = inputs.input_format, next((seen.declared for seen in observed if seen.declared), None)
        if known is not None and not covers(fmt):
            fmt = BF16
        self.compared = covers(fmt)
        """Whether there is a recipe to compare with."""
        self.noise = noise_collector(inputs.head, fmt, stored, want_keys=want_keys)
        others = Counterfactuals if self.compared else TruncatedInputs
        self.counterfactuals = others(inputs.head, fmt, stored, key_gradients=want_keys)
        self._variances: dict[str, dict[str, Tensor]] = {}
        self._nearest: dict[str, DeclaredKernel] = {}
        self._declared = (
            None if known is None else DeclaredKernel(known, inputs.head, fmt, stored, key_gradients=want_keys)
        )

    def stream(self) -> None:
        """Make the pass."""
        self.truth = head_truth(
            self.inputs,
            self.projection,
            self._observe,
            # All but "as_run" is the same in each of them.
            maxima=next(iter(self._collectors.values())),
            key_gradients=self.want_keys,
            gradient_sums=True,
        )

    @property
    def want_keys(self) -> bool:
        """Whether dK and dV are wanted."""
        return any(seen.want_keys for seen in self.observed)

    @property
    def looks_at_scores(self) -> bool:
        """Whether the pass needs single scores, which the kernels do not keep: to find NaN and Inf, or FP8's noise."""
        return self.inputs.marks_rows or type(self.noise) is not NoiseCollector

    def declared(self, seen: ObservedHead) -> DeclaredKernel | None:
        """What an observation is declared to be; None: nothing."""
        if self._declared is None or seen.declared is None:
            return None
        if seen.name not in self._nearest:
            known = seen.outputs.get("o")
            self._nearest[seen.name] = self._declared if known is None else self._declared.nearest(known)
        return self._nearest[seen.name]

    def variance(self, seen: ObservedHead) -> dict[str, Tensor]:
        """The expected squared errors of what an observation is held against, see ``NoiseCollector``."""
        if seen.name not in self._variances:
            found, declared = self.noise.finished(self.truth.reference, seen.formats), self.declared(seen)
            self._variances[seen.name] = found if declared is None else declared.variance(found)
        return self._variances[seen.name]

    def take(self, fused: FusedHeads, i: int, reference: HeadReference, products: Tensor | None) -> None:
        """Take all of head ``i`` of the kernels, not blocks: its reference, and ``products`` (P_bar o slope) K.

        What its row maxima and its bounds need is taken already.
        """
        maxima, every = next(iter(self._collectors.values())), (slice(None),)
        self.truth = HeadTruth(self.inputs, reference, maxima, products, every, self.projection)
        self.visible = fused.forward.visible[i]
        for errors in self.errors.values():
            assert reference.delta is not None
            errors.delta_error = errors.delta - reference.delta
            if errors.lse is not None:
                errors.lse_error = (errors.lse - reference.lse).masked_fill_(reference.fully_masked, 0.0)

    def _observe(self, block: RowBlock) -> None:
        self.collected.add(block)
        self.visible[block.rows] = (block.scores > -torch.inf).sum(1)
        self.noise.add(block)
        for collector in self._collectors.values():
            collector.add(block)
        for name, backward in self.backward.items():
            errors = self.errors[name]
            assert block.delta is not None
            errors.delta_error[block.rows] = errors.delta[block.rows] - block.delta
            if errors.lse is not None and errors.lse_error is not None:
                difference = errors.lse[block.rows] - block.lse
                errors.lse_error[block.rows] = difference.masked_fill_(block.fully_masked, 0.0)
            backward.add(block)


def stream_heads(passes: Sequence[StreamedHead]) -> None:
    """Make these passes: heads of one shape and masking together, by the kernels, where they can."""
    alike: dict[tuple[bool, object], list[StreamedHead]] = {}
    for one in passes:
        wants = [(n, c.dq_cast is None, c.dk_delta is None, c.dk_lse is None) for n, c in one.backward.items()]
        formats = one.noise.fmt, one.noise.out, one.inputs.input_format
        # The kernels count every key by itself.
        streamed = one.looks_at_scores or one.noise.same_keys is not None
        alike.setdefault((streamed, (one.want_keys, tuple(wants), formats)), []).append(one)
    for (streamed, _), some in alike.items():
        for batch in batches([one.inputs.head for one in some]):
            found = [some[i] for i in batch]
            if not streamed and fuses([one.inputs.head for one in found]):
                _fuse(found)
            else:
                for one in found:
                    one.stream()
            bounds = BoundCollector.each([one.collected for one in found], [one.truth.reference for one in found])
            for one, of_head in zip(found, bounds, strict=True):
                one.bounds = of_head


def _fuse(passes: Sequence[StreamedHead]) -> None:
    """Make the passes of some heads in a few launches."""
    with torch.no_grad():
        fused = FusedHeads([one.inputs.head for one in passes])
        references = fused.references(key_gradients=passes[0].want_keys)
        products = None if fused.do is None else fused.rows("sloped", fused.k)
        take_noise([one.noise for one in passes], fused, products)
        others = [one.counterfactuals for one in passes if isinstance(one.counterfactuals, Counterfactuals)]
        for other in others:
            other.beside = others
        for name in passes[0]._collectors:
            take_maxima([one._collectors[name] for one in passes], fused)
        BoundCollector.take([one.collected for one in passes], fused)
        for i, (one, reference) in enumerate(zip(passes, references, strict=True)):
            one.take(fused, i, reference, None if products is None else products[i])
        for name in passes[0].backward:
            take_backward([one.backward[name] for one in passes], fused)


def _observed_delta(inputs: HeadInputs, seen: ObservedHead) -> Tensor | None:
    """delta as captured, else rowsum(dO o O_obs) in float64, [Tq]; None where it is not known, or dO is not."""
    if inputs.head.do is None or not {"delta", "o"} & seen.outputs.keys():
        return None
    return seen.outputs["delta"] if "delta" in seen.outputs else (inputs.head.do * seen.outputs["o"]).sum(1)
