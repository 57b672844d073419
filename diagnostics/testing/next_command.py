"""The same command, or the same call in Python, with other options: what a report says to run next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attn_diag.testing.stated import PER_HEAD, Stated

# What a run has by default, and its commands need not say.
USUAL_SHAPE = (4, 4, 384, 64)
_BY_DEFAULT = ("--causal none", "--window -1,-1", "--softcap 0")
_TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Again:
    """What a run was asked for."""

    target: str | None
    """What the command line calls the kernel; None for a callable."""
    dtype: str
    """The inputs' format: bf16, fp16, fp32."""
    stated: Stated
    """What the kernel is said to compute."""
    shape: tuple[int, int, int, int] = USUAL_SHAPE
    """[B, H, T, D] of one call."""
    check_length: int | None = None
    """T of check's inputs, where it is another than by default."""

    def command(self, name: str, also: Sequence[str] = ()) -> str:
        """A command, or the call in Python, about the same kernel and inputs, with further options."""
        said, given = self.stated, {option.split()[0] for option in also}
        own = {
            "--dtype": "" if self.dtype == "bf16" else self.dtype,
            "--causal": "" if said.causal == "none" else said.causal,
            "--scale": "" if math.isclose(said.scale, self.shape[3] ** -0.5) else f"{said.scale:.9g}",
            "--window": "" if said.window is None else "{},{}".format(*said.window),
            "--softcap": "" if said.softcap is None else f"{said.softcap:.9g}",
            "--alibi-slopes": listed_numbers(said.alibi_slopes or ()),
            "--sinks": listed_numbers(said.sinks or ()),
        }
        if name == "check":
            own["--head-dim"] = "" if self.shape[3] == USUAL_SHAPE[3] else str(self.shape[3])
            hunts = "--hunt" in given  # it tries lengths of its own
            own["--length"] = "" if self.check_length is None or hunts else str(self.check_length)
        elif self.shape != USUAL_SHAPE:
            own["--shape"] = ",".join(map(str, self.shape))
        options = [f"{option} {value}" for option, value in own.items() if value and option not in given]
        also = [option for option in also if option not in _BY_DEFAULT]
        if self.target is not None:
            return " ".join(["attn-diag", name, self.target, *options, *also])
        return f"attn_diag.{name}(fn{''.join(map(_keyword, [*options, *also]))})"


def listed_numbers(numbers: Sequence[float]) -> str:
    """As an option takes one number a head."""
    return ",".join(str(np.float32(x)) for x in numbers)


def _keyword(option: str) -> str:
    """An option of the command as a keyword of the function."""
    name, _, value = option.removeprefix("--").partition(" ")
    name = name.replace("-", "_")
    if name == "dtype":
        return f", dtype=torch.{_TORCH[value]}"
    if name in ("shape", "window"):
        return f", {name}=({value.replace(',', ', ')})"
    if name in PER_HEAD:
        return f", {name}=[{value.replace(',', ', ')}]"
    if name in ("probes", "only", "allow", "cases"):
        return f", {name}={value.split(',')!r}"
    if name == "out":
        return f", folder={value!r}"
    return f", {name}={value!r}" if name in ("causal", "declared") else f", {name}={value}"
