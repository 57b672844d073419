"""What ``selftest`` returns: the checks of an installation's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool


@dataclass(frozen=True)
class InstallationCheck:
    """One figure and what it may be at most."""

    name: str
    """What is checked."""
    figure: Number
    """What was found."""
    unit: str
    """Its unit: wrong (a count), ulp, of its bound."""
    limit: Number
    """The largest figure that passes."""
    cases: int
    """How many cases it comes from."""

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.figure <= self.limit


@dataclass(frozen=True, repr=False)
class Installation(Result):
    """What ``selftest`` found."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    checks: tuple[InstallationCheck, ...]
    """Every check."""
    passed: bool
    """Whether all of them passed."""
    seconds: Number
    """How long it took."""
    schema: Literal["attn-diag-selftest"] = "attn-diag-selftest"
    schema_version: Literal[1] = 1
