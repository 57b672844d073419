"""What ``selftest`` returns: the checks of an installation's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool


@dataclass(frozen=True)
class InstallationCheck:
    """``figure``, in ``unit``, of ``cases`` cases; it passes where that is at most ``limit``."""

    name: str
    figure: Number
    unit: str
    limit: Number
    cases: int

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.figure <= self.limit


@dataclass(frozen=True, repr=False)
class Installation(Result):
    """What ``selftest`` found: every check with its figure and limit. ``seconds``: how long it took."""

    tool: Tool
    checks: tuple[InstallationCheck, ...]
    passed: bool
    seconds: Number
    schema: Literal["attn-diag-selftest"] = "attn-diag-selftest"
    schema_version: Literal[1] = 1
