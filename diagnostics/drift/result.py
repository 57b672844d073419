"""What ``trace_dtypes`` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.drift.source import SourceLine

Kind = Literal["widened", "narrowed", "policy"]


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation was given: what the user calls it (None: an unnamed intermediate), dtype, shape."""

    name: str | None
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name or 'an intermediate'} ({self.dtype}, {list(self.shape)})"


@dataclass(frozen=True)
class DtypeEvent:
    """One operation whose result has another dtype than some operand, or than autocast's.

    ``kind``: "widened": operands of several dtypes, and the wider one won, unasked; "narrowed": the result is narrower
    than the regime's dtype; "policy": autocast (or the operation itself) computes this in another dtype on purpose.
    ``regime``: autocast's dtype where the call stood, or None outside. ``count``: how often this line did it.
    """

    kind: Kind
    operation: str
    result: str
    regime: str | None
    operands: tuple[Operand, ...]
    source: SourceLine | None
    count: int = 1

    def sentence(self) -> str:
        """One line of prose."""
        given = ", ".join(map(str, self.operands))
        where = "" if self.source is None else f"{self.source}: {self.source.text}\n    "
        return f"{where}{self.operation}({given}) gives {self.result}"

    def fix(self) -> str:
        """What to do about it, in words."""
        if self.kind != "widened":
            return ""
        wide = [o for o in self.operands if o.dtype == self.result]
        narrow = [o for o in self.operands if o.dtype != self.result]
        dtype = narrow[0].dtype if narrow else self.regime or "the others' dtype"
        names = ", ".join(o.name or "the wide operand" for o in wide)
        return f"Cast {names} to {dtype} before (such as {names.split(',')[0]}.to({narrow[0].name or 'x'}.dtype))."
