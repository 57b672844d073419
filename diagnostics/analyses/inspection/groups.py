"""Query heads that share a key head, and what measuring them yields."""

from __future__ import annotations

from dataclasses import dataclass, field

from attn_diag.head.gradient_sums import GradientSums
from attn_diag.head.measure import HeadMeasurement
from attn_diag.head.quality import QuantitySample
from attn_diag.head.read import NonFiniteCensus
from attn_diag.statistics.means import SignedErrors


@dataclass(frozen=True)
class HeadGroup:
    """Query heads (of those selected) that share a key head, in one sequence."""

    kv_head: int
    batch: int
    heads: list[int]


@dataclass(frozen=True)
class KeyGradient:
    """dK or dV of one key head and sequence."""

    sums: GradientSums
    """Sizes of the error and of its predicted parts."""
    errors: SignedErrors
    """Signed errors."""
    sample: QuantitySample | None
    """Beside a well-rounded kernel's; None for formats without a published recipe."""


@dataclass
class GroupMeasurement:
    """What measuring a group yields, by observation."""

    group: HeadGroup
    parts: dict[str, list[HeadMeasurement]] = field(default_factory=dict)
    key_sums: dict[str, dict[str, KeyGradient]] = field(default_factory=dict)
    broken_keys: dict[str, dict[str, int]] = field(default_factory=dict)
    """observation -> dk or dv -> keys with NaN or Inf in it."""
    census: NonFiniteCensus = field(default_factory=NonFiniteCensus)
