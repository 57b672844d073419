"""From the heads that make a quantity, and what stands out in it, to an ``Evidence``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, row_limit
from attn_diag.head.counterfactual import NoiseCollector
from attn_diag.head.mistakes import Mistake
from attn_diag.head.no_recipe import coarsest, noise_collector
from attn_diag.head.other_sinks import OtherSink
from attn_diag.head.quality import LOSSY
from attn_diag.head.read import HeadInputs
from attn_diag.reference import AttentionHead, FloatFormat, HeadReference, RowBlock, reference_head
from attn_diag.results.quality import Quantity

# fp32 arithmetic leaves about so much of L.
_LSE_NOISE = 2.0**-22


@dataclass(frozen=True)
class HeadTruths:
    """What is true of the query heads that share a key head, and a well-rounded kernel's noise there."""

    inputs: Sequence[HeadInputs]
    """The heads."""
    references: tuple[HeadReference, ...]
    """With dK and dV where there is dO."""
    variances: tuple[dict[str, Tensor], ...]
    """See ``NoiseCollector``."""
    names: tuple[str, ...]
    """What the heads are called."""

    @classmethod
    def of(cls, inputs: Sequence[HeadInputs], stored: Mapping[str, FloatFormat], names: Sequence[str]) -> HeadTruths:
        """Stream the reference of each head once more.

        Args:
            inputs: The heads.
            stored: The formats in which the kernel under test returned o, dq, dk and dv.
            names: What they are called.
        """
        references, variances = [], []
        for one in inputs:
            noise = noise_collector(one.head, one.input_format, stored, want_keys=one.head.do is not None)

            def see(block: RowBlock, one: HeadInputs = one, noise: NoiseCollector = noise) -> None:
                one.mark_rows(block)
                noise.add(block)

            reference = reference_head(one.head, see)
            references.append(reference)
            variances.append(noise.finished(reference, stored))
        return cls(inputs, tuple(references), tuple(variances), tuple(names))

    def evidence(
        self,
        quantity: Quantity,
        observed: Tensor,
        fmt: FloatFormat,
        outlying: Collection[int] = (),
        features: Collection[int] = (),
        *,
        others: Sequence[tuple[str, Callable[[], AttentionHead]]] = (),
        key_heads: Mapping[str, str] = MappingProxyType({}),
        captured: Sequence[Mapping[str, Tensor]] = (),
        cuts: Sequence[tuple[str, Callable[[], AttentionHead | None]]] = (),
        sinks: Sequence[Sequence[OtherSink]] = (),
        mistakes: Sequence[Sequence[Mistake]] = (),
    ) -> Evidence:
        """What is known of one quantity.

        Args:
            quantity: Its name.
            observed: What the kernel returned, [n, D] or [n], float64.
            fmt: The format in which it was stored.
            outlying: Rows that stand out.
            features: Features that do.
            others: Other heads of the capture.
            key_heads: By the heads' names and theirs, what their key head is called.
            captured: o and lse of each head as the kernel returned them; kept where one of them is off.
            cuts: The head in documents that are cut in another way.
            sinks: Of each head, the sinks that a faulty kernel may have given it.
            mistakes: Likewise other mistakes: in its ALiBi slope, in its dropout.
        """
        by_key = quantity in ("dk", "dv")
        heads = range(len(self.inputs)) if by_key else range(1)
        references = tuple(self.references[h] for h in heads)
        true = {"o": "out"}.get(quantity, quantity)
        truth = torch.stack([getattr(r, true) for r in references]).sum(0)
        if quantity == "lse":
            variance = (_LSE_NOISE * (1 + truth.abs())).square() + self.variances[0].get("lse", 0.0)
        else:
            variance = torch.stack([self.variances[h][quantity] for h in heads]).sum(0)
        truth, variance, observed = (t[:, None] if t.ndim == 1 else t for t in (truth, variance, observed))
        usable = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
        if not by_key:
            usable = ~self.inputs[0].unusable & ~references[0].fully_masked
        return Evidence(
            quantity, observed, truth.nan_to_num(0.0, 0.0, 0.0), variance.nan_to_num(0.0, 0.0, 0.0), fmt, usable,
            _marked(truth[:, 0], outlying), _marked(truth[0], features),
            tuple(self.inputs[h].head for h in heads), references, tuple(self.names[h] for h in heads),
            self._tensors(heads), [captured[h] for h in heads] if self._forward_off(heads, captured) else (), others,
            key_heads, cuts, [sinks[h] for h in heads] if sinks else (),
            [mistakes[h] for h in heads] if mistakes else (),
        )  # fmt: skip

    def _forward_off(self, heads: Sequence[int], captured: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether O or LSE of one of the heads, as returned, is worse than a well-rounded kernel's."""
        for h in heads if captured else ():
            inputs, reference, variance = self.inputs[h], self.references[h], self.variances[h]["o"]
            usable = ~inputs.unusable & ~reference.fully_masked
            if "o" in captured[h]:
                error = (captured[h]["o"] - reference.out)[usable].square().sum(1)
                noise = variance[usable].sum(1)
                if bool((error > row_limit(variance.shape[1]) * noise).any()) or error.sum() > LOSSY**2 * noise.sum():
                    return True
            if "lse" in captured[h]:
                # Against P's own cast, which is off by 2^-(p + 2) in the mean.
                coarse = 2.0 ** -(coarsest(inputs.head, inputs.input_format, {}).precision + 4)
                if bool(((captured[h]["lse"] - reference.lse)[usable].abs() > coarse).any()):
                    return True
        return False

    def _tensors(self, heads: Sequence[int]) -> dict[str, Tensor]:
        """The true tensors of a head by name; of several heads the sums of their dK and dV."""
        if len(heads) > 1:
            sums = {"dK": [self.references[h].dk for h in heads], "dV": [self.references[h].dv for h in heads]}
            return {name: torch.stack([t for t in of if t is not None]).sum(0) for name, of in sums.items()}
        head, reference = self.inputs[heads[0]].head, self.references[heads[0]]
        found = {
            "Q": head.q, "K": head.k, "V": head.v, "dO": head.do, "O": reference.out,
            "dQ": reference.dq, "dK": reference.dk, "dV": reference.dv,
        }  # fmt: skip
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def _marked(like: Tensor, members: Collection[int]) -> Tensor:
    """bool, as long as ``like`` and where it is: true at the members."""
    marked = torch.zeros_like(like, dtype=torch.bool)
    marked[torch.as_tensor(sorted(members), dtype=torch.int64, device=like.device)] = True
    return marked
