"""A plain attention in float64 with last roundings, in which defects are planted, and what is made of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.analyses.patterns.find import find_patterns
from attn_diag.analyses.patterns.gather import HeadTruths
from attn_diag.analyses.verdicts.quality import judge_quantity
from attn_diag.head.counterfactual import run_counterfactual
from attn_diag.head.quality import LOSSY, sample
from attn_diag.head.read import HeadInputs
from attn_diag.reference import AttentionHead, Masking, format_of, round_nearest_even
from attn_diag.results.quality import Pattern, Quantity

BF16 = format_of(torch.bfloat16)
FAMILIES = ("gaussian", "peaked", "low rank")


def inputs(family: str = "gaussian", seed: int = 0, rows: int = 192, width: int = 32, **more: Any) -> AttentionHead:
    """A head of BF16 numbers; ``more`` goes to AttentionHead."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v, do = (normal(rows, width) for _ in range(4))
    if family == "peaked":
        q, k = 3 * q, 3 * k
    if family == "low rank":
        q, k = normal(rows, 4) @ normal(4, width) / 2, normal(rows, 4) @ normal(4, width) / 2
        v = normal(rows, 3) @ normal(3, width)
    q, k, v, do = (t.bfloat16().double() for t in (q, k, v, do))
    return AttentionHead(q, k, v, do, **({"scale": width**-0.5, "masking": Masking("top-left")} | more))


@dataclass
class Steps:
    """The intermediates of a head, [Tq, Tk]; a defect changes some before the outputs are made."""

    head: AttentionHead
    """The head."""
    scale: float = 0.0
    """alpha in the scores."""
    visible: Tensor = field(default_factory=lambda: torch.empty(0))
    """bool."""

    def __post_init__(self) -> None:
        head = self.head
        self.scale = self.scale or head.scale
        if not self.visible.numel():
            added = torch.zeros(len(head.q), len(head.k), dtype=torch.float64)
            head.apply_mask(added, torch.arange(len(head.q)), slice(0, len(head.k)))
            self.visible = added > -torch.inf
        scores = (head.q @ head.k.T * self.scale).masked_fill(~self.visible, -torch.inf)
        self.m = scores.amax(1, keepdim=True)
        self.p_bar = (scores - self.m).exp().nan_to_num(0.0)
        self.l = self.p_bar.sum(1, keepdim=True)
        self.p = self.p_bar.bfloat16().double() / self.l
        self.o = self.p @ head.v
        assert head.do is not None
        self.do = head.do
        self.delta = (self.do * rounded(self.o)).sum(1, keepdim=True)
        self.dp = self.do @ head.v.T
        self.ds = (self.p_bar / self.l * (self.dp - self.delta)).bfloat16().double()

    def outputs(self) -> dict[str, Tensor]:
        """As a kernel returns them."""
        alpha, head = self.head.scale, self.head
        found = {
            "o": self.o,
            "dq": alpha * self.ds @ head.k,
            "dk": alpha * self.ds.T @ head.q,
            "dv": self.p.T @ self.do,
        }
        plain = {"lse": (self.m + self.l.log())[:, 0], "delta": self.delta[:, 0]}
        return {name: rounded(t) for name, t in found.items()} | plain


def rounded(values: Tensor) -> Tensor:
    return round_nearest_even(values, BF16)


def named(
    head: AttentionHead,
    quantity: Quantity,
    observed: Tensor,
    others: tuple[tuple[str, Callable[[], AttentionHead]], ...] = (),
) -> tuple[Pattern | None, str]:
    """The pattern named, and the verdict's answer."""
    evidence, answer = evidence_of(head, quantity, observed, others)
    if answer == "good":
        return None, answer
    found = find_patterns(evidence)
    return (found[0] if found else None), answer


def evidence_of(
    head: AttentionHead,
    quantity: Quantity,
    observed: Tensor,
    others: tuple[tuple[str, Callable[[], AttentionHead]], ...] = (),
) -> tuple[Evidence, str]:
    """What the patterns are found in, with what stands out, and the verdict's answer."""
    unusable = torch.zeros(len(head.q), dtype=torch.bool)
    one = HeadInputs(head, unusable, torch.zeros(0, dtype=torch.int64), BF16)
    truths = HeadTruths.of([one], {}, ["head 0"])
    fmt = format_of(torch.float32) if quantity in ("lse", "delta") else BF16
    evidence = truths.evidence(quantity, observed, fmt, others=others)
    if quantity in ("lse", "delta"):
        off = evidence.error[:, 0].square() > 25 * evidence.noise
        return replace(evidence, outlying=off), "wrong" if bool(off.any()) else "good"
    kept = (evidence.usable & observed.isfinite().all(1)).nonzero()[:, 0]
    broken = int(evidence.usable.sum()) - len(kept)
    clean = observed.nan_to_num(0.0, 0.0, 0.0)
    outputs = run_counterfactual(head, BF16, {})
    seen = sample(clean, evidence.truth, outputs[quantity], evidence.variance, BF16, kept)
    verdict = judge_quantity(quantity, [seen], [0], broken)
    answer = verdict.answer
    if answer == "undecided" and (verdict.factor or 0) <= LOSSY:
        answer = "good"
    outlying = torch.zeros(len(evidence.truth), dtype=torch.bool)
    outlying[torch.from_numpy(seen.rows[seen.outlying])] = True
    outlying |= ~observed.isfinite().all(1)
    features = torch.from_numpy(seen.bad_features > 0)
    return replace(evidence, outlying=outlying, features=features), answer
