"""The baseline file of ``check``: what was measured and accepted of every subject, device and set of versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict

from attn_diag.results.base import Result


@dataclass(frozen=True)
class SequenceMean:
    """A mean over sequences, in the unit of what it is a mean of."""

    mean: float
    """The mean."""
    standard_error: float | None
    """Its standard error; null where there is one sequence only."""
    degrees_of_freedom: float | None
    """Degrees of freedom of the standard error; null likewise."""


@dataclass(frozen=True)
class BaselineSize:
    """The size of one quantity's error, beside that of the yardstick on the same input."""

    error: float
    """The kernel's error, an rms over sequences."""
    yardstick: float
    """The yardstick's error, likewise."""
    log_ratio: SequenceMean
    """ln(error / yardstick) over sequences; see ``testing.regression.figures.ErrorSize``."""


@dataclass(frozen=True)
class BaselineCase:
    """What was accepted of one case of the suite."""

    inputs_fingerprint: str
    """Hash of the inputs."""
    fingerprint: str
    """Hash of what the kernel returned."""
    outputs: tuple[str, ...]
    """Which outputs it returned."""
    deterministic: bool | None
    """Whether a second run returned the same bits; null: it was not run twice."""
    biases: dict[str, SequenceMean] = field(default_factory=dict)
    """Mean signed errors by the name of their test."""
    sizes: dict[str, BaselineSize] = field(default_factory=dict)
    """Sizes of errors by quantity."""


@dataclass(frozen=True)
class BaselineEntry:
    """One kernel on one device."""

    subject: str
    """The kernel's name and what it computes."""
    device: str
    """The device, in words."""
    versions: str
    """Versions of what ran it, in words."""
    seed: int
    """Seed of the suite's inputs."""
    exact: bool
    """Whether equal bits are demanded of whoever compares."""
    recipe: str | None
    """The published recipe whose O agrees in most elements, on the case "normal" or the first: where a search for a
    culprit starts."""
    agreement: float | None
    """The fraction of O's elements that it reproduces."""
    cases: dict[str, BaselineCase]
    """What was accepted, by case."""

    @property
    def key(self) -> str:
        """What the entry is kept by."""
        return " | ".join((self.subject, self.device, self.versions))


@dataclass(frozen=True, repr=False)
class BaselineFile(Result):
    """A whole baseline file."""

    entries: dict[str, BaselineEntry] = field(default_factory=dict)
    """Entries by their key: subject, device and versions."""
    schema: Literal["attn-diag-baseline"] = "attn-diag-baseline"
    schema_version: Literal[1] = 1
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings", extra="forbid")
