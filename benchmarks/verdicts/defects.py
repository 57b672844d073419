"""All planted defects, and a call on which each can act.

defect = DEFECTS["missing_tile"]
inputs = draw("peaked", "odd")
if defect.applies(inputs):
    planted, healthy = defect.run(inputs), defect.healthy(inputs)
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from verdicts.backward_defects import BACKWARD
from verdicts.forward_defects import FORWARD
from verdicts.inputs import SETTINGS, Inputs, draw
from verdicts.kernels import Hook, Kernel, Outputs, attend
from verdicts.planting import Defect

DEFECTS: dict[str, Defect] = {defect.name: defect for defect in (*FORWARD, *BACKWARD)}
# The first that a defect can act on is its home; the plain ones come first.
_HOMES = ("plain", "odd", "full", "odd_full", "d72", "gqa", "window", "softcap", "batch", "padded", "padded_full",
          "long_keys", "empty_rows")  # fmt: skip


@cache
def _features(setting: str) -> frozenset[str]:
    return draw("gaussian", setting).features


def home(defect: Defect) -> str:
    """The setting, of ``SETTINGS``, in which a defect is planted unless told otherwise."""
    for setting in _HOMES:
        if defect.needs <= _features(setting):
            return setting
    raise LookupError(f"{defect.name} needs {', '.join(sorted(defect.needs))}; none of {len(SETTINGS)} settings has it")


def other_roundings(inputs: Inputs, count: int) -> list[Outputs]:
    """What a healthy kernel returns whose casts of P̄, O, P and dS are stochastic, so many times: its expected noise."""
    hooks: dict[str, Hook] = {}
    for name in ("probs_stochastic", "out_stochastic", "bwd_probs_stochastic", "ds_stochastic"):
        hooks |= DEFECTS[name].hooks
    return [attend(replace(inputs, seed=seed), Kernel(), hooks) for seed in range(count)]
