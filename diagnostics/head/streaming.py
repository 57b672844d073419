"""One streamed pass over a head, and what its observers leave for every observation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attn_diag.head.counterfactual import (
    Counterfactuals,
    NoiseCollector,
    ask_noise,
    covers,
    each_finished,
    each_same_keys,
)
from attn_diag.head.declared import DeclaredKernel
from attn_diag.head.fused_backward import ask_backward
from attn_diag.head.no_recipe import noise_collector
from attn_diag.head.projection import HeadProjection
from attn_diag.head.propagation import BackwardCollector, ForwardErrors
from attn_diag.head.read import HeadInputs
from attn_diag.head.row_maxima import collector_of, take_maxima
from attn_diag.head.shown_ways import ShownOfHead
from attn_diag.head.truncated_inputs import TruncatedInputs
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
from attn_diag.reference.fused import FusedHeads, fuses
from attn_diag.reference.fused_products import Cast, TileProduct, TileWeight
from attn_diag.reference.heads import batches, stacked

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

    def __init__(
        self, inputs: HeadInputs, observed: list[ObservedHead], projection: HeadProjection | None,
        shown: Callable[[str], ShownOfHead | None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Set up the observers; ``stream_heads`` makes the pass. ``shown``: of an observation, by the first head."""
        self.inputs, self.observed, self.projection, self.shown = inputs, observed, projection, shown
        # Observations without a recipe share one collector: only "as_run" depends on it.
        recipes = {seen.name if seen.recipe else "": seen.recipe for seen in observed}
        self._collectors = {key: collector_of(inputs, recipe) for key, recipe in recipes.items()}
        self.maxima = {seen.name: self._collectors[seen.name if seen.recipe else ""] for seen in observed}
        self.errors: dict[str, ForwardErrors] = {}
        self.backward: dict[str, BackwardCollector] = {}
        self.collected = BoundCollector(inputs.head)
        """What its bounds need."""
        stored = next((seen.formats for seen in observed), {})
        want_keys = self.want_keys
        fmt, known = inputs.input_format, next((seen.declared for seen in observed if seen.declared), None)
        if known is not None and not covers(fmt):
            fmt = BF16
        self.compared = covers(fmt)
        """Whether there is a recipe to compare with."""
        self.noise = noise_collector(inputs.head, fmt, stored, want_keys=want_keys)
        gradients = want_keys or any("dq" in seen.outputs for seen in observed)
        self.counterfactuals = (
            Counterfactuals(inputs.head, fmt, stored, key_gradients=want_keys, gradients=gradients)
            if self.compared
            else TruncatedInputs(inputs.head, fmt, stored, key_gradients=want_keys)
        )
        self._variances: dict[str, dict[str, Tensor]] = {}
        self._nearest: dict[str, DeclaredKernel] = {}
        self._declared = (
            None if known is None else DeclaredKernel(known, inputs.head, fmt, stored, key_gradients=want_keys)
        )

    @cached_property
    def visible(self) -> Tensor:
        """How many keys each row sees, [Tq]."""
        return torch.zeros(len(self.inputs.head.q), dtype=torch.int64, device=self.inputs.head.q.device)

    def stream(self) -> None:
        """Make the pass."""
        for seen in self.observed:
            if (fed := fed_of([self], seen.name)) is not None:
                errors = ForwardErrors(
                    delta=fed.delta[0],
                    delta_error=torch.zeros_like(fed.delta[0]),
                    lse=None if fed.lse is None else fed.lse[0],
                    lse_error=None if fed.lse is None else torch.zeros_like(fed.lse[0]),
                    cast=self.inputs.input_format,
                    dq=seen.outputs.get("dq"),
                )
                self._follow(seen, errors).begin()
        self.truth = head_truth(
            self.inputs,
            self.projection,
            self._observe,
            # All but "as_run" is the same in each of them.
            maxima=next(iter(self._collectors.values())),
            key_gradients=self.want_keys,
            gradient_sums=True,
        )

    def observation(self, name: str) -> ObservedHead:
        """One of its observations."""
        return next(seen for seen in self.observed if seen.name == name)

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
        return self.each_variance([self], [seen])[0]

    @staticmethod
    def each_variance(passes: Sequence[StreamedHead], seen: Sequence[ObservedHead]) -> list[dict[str, Tensor]]:
        """The same of one observation of several heads of one shape, captured alike."""
        alike: dict[FloatFormat, list[int]] = {}
        for i, (one, own) in enumerate(zip(passes, seen, strict=True)):
            if own.name not in one._variances:
                alike.setdefault(one.noise.fmt, []).append(i)
        for places in alike.values():
            some = [passes[i] for i in places]
            references = [one.truth.reference for one in some]
            found = each_finished([one.noise for one in some], references, seen[places[0]].formats)
            for i, one, variance in zip(places, some, found, strict=True):
                declared = one.declared(seen[i])
                one._variances[seen[i].name] = variance if declared is None else declared.variance(variance)
        return [one._variances[own.name] for one, own in zip(passes, seen, strict=True)]

    def _follow(self, seen: ObservedHead, errors: ForwardErrors) -> BackwardCollector:
        """What follows these errors of the forward into the gradients."""
        self.errors[seen.name] = errors
        found = self.backward[seen.name] = BackwardCollector(
            self.inputs.head, errors, want_casts="dq" in seen.outputs or seen.want_keys, want_keys=seen.want_keys
        )
        return found

    @staticmethod
    def take(passes: Sequence[StreamedHead], fused: FusedHeads, references: Sequence[HeadReference]) -> None:
        """Take all of the heads of the kernels, not blocks.

        What their row maxima and their bounds need is taken already.
        """
        found, every = fused.forward, (slice(None),)
        products = None if fused.products is None else fused.products.unbind()
        probs_k = None if fused.probs_k is None else fused.probs_k.unbind()
        for i, (one, inverse, visible) in enumerate(zip(passes, fused.inverse, found.visible, strict=True)):
            maxima = next(iter(one._collectors.values()))
            of_head = None if products is None else products[i]
            one.truth = HeadTruth(one.inputs, references[i], maxima, of_head, every, one.projection)
            one.truth.top_prob, one.visible = inverse, visible
            if probs_k is not None:
                one.truth.probs_k = probs_k[i]

    @staticmethod
    def follow(passes: Sequence[StreamedHead], fused: FusedHeads) -> None:
        """Begin to follow the forward's errors of every observation into the gradients."""
        for seen in passes[0].observed:
            if (fed := fed_of(passes, seen.name)) is None or fused.delta is None:
                continue
            delta_error, lse, lse_error = fed.delta - fused.delta, fed.lse, None
            if lse is not None:
                lse_error = (lse - fused.lse).masked_fill_(fused.forward.row_max == -torch.inf, 0.0)
            for i, one in enumerate(passes):
                own = one.observation(seen.name)
                errors = ForwardErrors(
                    delta=fed.delta[i],
                    delta_error=delta_error[i],
                    lse=None if lse is None else lse[i],
                    lse_error=None if lse_error is None else lse_error[i],
                    cast=one.inputs.input_format,
                    dq=own.outputs.get("dq"),
                )
                one._follow(own, errors)

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
    for one, same_keys in zip(passes, each_same_keys([one.inputs.head for one in passes]), strict=True):
        one.noise.same_keys = same_keys
        wants = [(s.name, s.want_keys, s.assumed_lse is None, frozenset(s.outputs)) for s in one.observed]
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
    """Make the passes of some heads in a few launches: what is asked for first is made together."""
    with torch.no_grad():
        fused = FusedHeads([one.inputs.head for one in passes])
        fused.compile_ahead(_products(passes[0], variances=fused.narrow is None))
        take_noise = ask_noise([one.noise for one in passes], fused)
        fused.ask_gradient()
        StreamedHead.follow(passes, fused)
        take_backward = [ask_backward([one.backward[name] for one in passes], fused) for name in passes[0].backward]
        if passes[0].want_keys:
            fused.ask_key_gradients()
        rest = [take() for take in (take_noise, *take_backward)]
        references = fused.references(key_gradients=passes[0].want_keys)
        others = [one.counterfactuals for one in passes]
        Counterfactuals.run_together([one for one in others if isinstance(one, Counterfactuals)])
        for name in passes[0]._collectors:
            take_maxima([one._collectors[name] for one in passes], fused)
        BoundCollector.take([one.collected for one in passes], fused)
        StreamedHead.take(passes, fused, references)
        for finish in rest:
            finish()


def _products(passed: StreamedHead, *, variances: bool) -> list[list[TileProduct]]:
    """The products that a head, and those like it, take of the kernels, in the order in which they are asked for: those
    of query rows at once, then those of keys, once for each order of cast and alpha that may be met; ``variances`` or
    not."""
    dscores, sloped, probs = TileWeight("dscores"), TileWeight("sloped"), TileWeight("probs")
    probs_squared, dscores_squared = TileWeight("probs_squared"), TileWeight("dscores_squared")
    rows = [TileProduct("rows", probs_squared, "v")] if variances else []
    if passed.inputs.head.do is None:
        return [rows]
    rows += [TileProduct("rows", dscores_squared, "k")] if variances else []
    rows += [TileProduct("rows", dscores, "keys", summed=True)]
    rows += [TileProduct("rows", sloped, "keys")] if variances else []
    fed = [seen for seen in passed.observed if {"o", "delta"} & seen.outputs.keys()]
    cast: Cast = "fp16" if passed.inputs.input_format.name == "fp16" else "bf16"
    orders = (False,) if math.frexp(passed.inputs.head.scale)[0] == 0.5 else (False, True)
    casts = [TileWeight("dscores_cast", cast, first) for first in orders]
    for seen in fed:
        if "dq" in seen.outputs or seen.want_keys:
            rows += [TileProduct("rows", one, "keys") for one in casts]
    if not passed.want_keys:
        return [rows]
    found = [rows]
    for of_dscores in casts:
        keys = [TileProduct("keys", dscores, "q"), TileProduct("keys", probs, "do")]
        if variances:
            keys += [TileProduct("keys", dscores_squared, "q"), TileProduct("keys", probs_squared, "do")]
        for seen in (s for s in fed if s.want_keys):
            keys += [TileProduct("keys", of_dscores, "q"), TileProduct("keys", TileWeight("probs_cast", cast), "do")]
            keys += [TileProduct("keys", sloped, "q")]
            if "lse" in seen.outputs or seen.assumed_lse is not None:
                keys += [TileProduct("keys", dscores, "q"), TileProduct("keys", sloped, "q")]
                keys += [TileProduct("keys", probs, "do")]
        found.append(keys)
    return found


@dataclass(frozen=True)
class _Fed:
    """What the backward of one observation of H heads was fed, [H, Tq] each, with 0 for NaN and Inf."""

    delta: Tensor
    lse: Tensor | None


def fed_of(passes: Sequence[StreamedHead], name: str) -> _Fed | None:
    """What an observation's backward was fed: LSE as far as it is known, and delta.

    delta as captured, else rowsum(dO o O_obs) in float64; None where it is not known, or dO is not.
    """
    every = [one.observation(name) for one in passes]
    do, outputs = [one.inputs.head.do for one in passes], every[0].outputs
    if do[0] is None or not {"delta", "o"} & outputs.keys():
        return None
    if "delta" in outputs:
        delta = stacked([seen.outputs["delta"] for seen in every])
    else:
        delta = (stacked([t for t in do if t is not None]) * stacked([seen.outputs["o"] for seen in every])).sum(2)
    known = [t for seen in every if (t := seen.outputs.get("lse", seen.assumed_lse)) is not None]
    # NaN in one row's outputs must not reach the sums over rows.
    return _Fed(delta.nan_to_num(0.0, 0.0, 0.0), stacked(known).nan_to_num(0.0, 0.0, 0.0) if known else None)
