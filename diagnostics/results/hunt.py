"""What ``hunt`` returns: the cases that a kernel gets wrong, by what they have in common, and the smallest of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.wording import plural

Dtype = Literal["bf16", "fp16", "fp32"]
Source = Literal["captured", "normal", "integers"]
Fault = Literal["crashed", "timed-out", "nonfinite", "wrong", "raised", "lossy"]

# The gravest first.
FAULTS: tuple[Fault, ...] = ("crashed", "timed-out", "nonfinite", "wrong", "raised", "lossy")


@dataclass(frozen=True)
class Variant:
    """One case: a capture with some of its sizes, its mask, strides or values changed."""

    batch: int
    """B."""
    key_heads: int
    """Hk."""
    group: int
    """Query heads for each key head: Hq = Hk * group."""
    rows: int
    """Tq."""
    keys: int
    """Tk."""
    head_dim: int
    """D."""
    causal: Literal["none", "top-left", "bottom-right"]
    """The mask."""
    dtype: Dtype = "bf16"
    """The inputs' format."""
    layout: str = "contiguous"
    """How the tensors lie in memory; "transposed of k": that one alone does, the others are contiguous."""
    source: Source = "captured"
    """Whether q, k, v and dO are the capture's (filled up with normal numbers of its size), normal or whole numbers."""
    values: str = "plain"
    """What is done to them: plain (nothing), "hot row", "repeated keys", …"""

    @property
    def words(self) -> str:
        """The case in a line: "1 head, T=65, D=72, causal"."""
        heads = plural(self.key_heads * self.group, "head")
        if self.group > 1:
            heads += f" on {plural(self.key_heads, 'key head')}"
        said = [] if self.batch == 1 else [f"B={self.batch}"]
        said += [heads, f"T={self.rows}" if self.rows == self.keys else f"Tq={self.rows}, Tk={self.keys}"]
        said += [f"D={self.head_dim}"]
        if self.causal != "none":
            said.append("causal" if self.rows == self.keys else f"causal {self.causal}")
        said += [x for x in (self.dtype, self.layout, self.values) if x not in ("bf16", "contiguous", "plain")]
        return ", ".join(said)


@dataclass(frozen=True)
class TriedLevel:
    """One step of an axis, with all else as in the first case."""

    level: str
    """The value."""
    outcome: Literal["passed", "refused", "failed", "not-run"]
    """passed: nothing wrong. refused: the kernel does not take it. failed: see ``faults``. not-run: the time was up, or
    levels beside it crashed or hung."""
    faults: dict[str, Fault]
    """By output (o, lse, dq, dk, dv; forward or backward where that ended early), what is wrong."""
    message: str | None = None
    """What the kernel said, or how its process ended; null: nothing."""


@dataclass(frozen=True)
class HuntedAxis:
    """All levels of one axis that were tried by themselves."""

    name: str
    """head size, group, length, …"""
    levels: tuple[TriedLevel, ...]
    """In order."""


@dataclass(frozen=True)
class Condition:
    """What must be so for a kernel to fail."""

    axis: str
    """Which axis."""
    failing: tuple[str, ...]
    """Its levels that fail (with all other conditions)."""
    passing: tuple[str, ...]
    """Its levels that do not."""
    law: str | None
    """What the failing ones, and no others, have in common: "D mod 16 = 8"; null: nothing that was thought of."""

    @property
    def words(self) -> str:
        """Such as "head sizes 72, 88, 104 (D mod 16 = 8)"."""
        name = self.axis
        if len(self.failing) > 1:
            name = {"batch": "batch sizes", "values": "values", "mask": "masks"}.get(name, f"{name}s")
        most = 8
        listed = ", ".join(self.failing[:most])
        if len(self.failing) > most:
            listed += f" and {len(self.failing) - most} more"
        return f"{name} {listed}" + (f" ({self.law})" if self.law else "")


@dataclass(frozen=True)
class HuntFinding:
    """One thing that a kernel has wrong."""

    fault: Fault
    """The gravest of its outputs."""
    outputs: dict[str, Fault]
    """By output, what is wrong."""
    conditions: tuple[Condition, ...]
    """When: all of these together; none: in the first case already."""
    smallest: Variant
    """The smallest case that fails so."""
    relative_errors: dict[str, Number]
    """By output, ||error|| / ||reference|| there."""
    details: str
    """What was found in it, in words with numbers."""
    alone: bool | None
    """Whether it fails in a process of its own too; false: only after other calls, or by chance; null: not asked."""
    words: str
    """All of it in a sentence."""
    capture: str | None = None
    """The file with that case, and what the kernel returned; null: not saved."""
    script: str | None = None
    """The script that runs it; null: not saved."""


@dataclass(frozen=True)
class HuntedKernel:
    """One kernel on one capture's variants."""

    name: str
    """Under which it is asked for."""
    version: str | None
    """Of the package that it comes in; null: not known."""
    backend: str
    """Where it ran."""
    capture: str
    """What was changed."""
    first: Variant | None
    """The case that all others are changes of; null: none that the kernel takes was found."""
    cases: int
    """Cases that were judged."""
    refused: int
    """Cases that the kernel did not take."""
    not_run: int
    """Cases that were left out because the time was up."""
    seconds: Number
    """How long it took."""
    findings: tuple[HuntFinding, ...]
    """The gravest first."""
    axes: tuple[HuntedAxis, ...]
    """Each axis by itself."""
    refusals: tuple[str, ...]
    """What the kernel does not take, in words."""
    documented: tuple[str, ...]
    """Errors that are known of it, or of a published kernel, and are no finding."""
    words: str
    """The answer in a sentence or more."""


@dataclass(frozen=True, repr=False)
class Hunt(Result):
    """The result of ``attn_diag.hunt``."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    kernels: tuple[HuntedKernel, ...]
    """One entry a kernel and capture."""
    limit_s: Number
    """How long each case had, in seconds."""
    budget_s: Number
    """How long each hunt had, in seconds."""
    folder: str | None
    """Where captures and scripts are; null: none were saved."""
    unreadable: tuple[str, ...] = ()
    """Inputs that could not be read, and why."""
    schema: Literal["attn-diag-hunt"] = "attn-diag-hunt"
    schema_version: Literal[1] = 1

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences."""
        return tuple(f"{k.name}: {f.words}" for k in self.kernels for f in k.findings)

    @property
    def passed(self) -> bool:
        """Whether nothing was found, and something was judged."""
        return not self.findings and any(k.cases for k in self.kernels)
