"""What the result dataclasses share: a number in JSON, and what produced the numbers. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import WithJsonSchema

Number = Annotated[
    float,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]
"""A float; where it is not finite it is a string in JSON."""


@dataclass(frozen=True)
class Tool:
    """What produced the numbers."""

    version: str
    """Version of attn-diag."""
    python: str
    """Version of Python."""
    torch: str
    """Version of torch."""
    triton: str | None
    """Version of triton; null where it is not installed."""
    device: str
    """The device on which the float64 reference and the emulations ran."""
    backend: str
    """cpu, or the GPU's compute capability, such as sm90."""
    hardware: str | None = None
    """What ``selftest --hardware`` once measured on this device, in a line; null: it was never run there."""
