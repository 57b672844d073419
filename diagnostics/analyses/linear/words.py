"""What an error of linear attention can be called: faults, rounding sites and what needs no emulation, in words."""

from __future__ import annotations

from dataclasses import dataclass

from attn_diag.kernels.linear_faults import LINEAR_FAULTS, OF_GRADIENTS
from attn_diag.kernels.linear_recipe import LINEAR_SITES

STEPWISE = {
    "decay_step": "each step's decay in the inputs' format",
    "log_decay_step": "each step's log decay in the inputs' format",
    "decay_steps": "each step's log decay, and the decay made of it, in the inputs' format",
    "state_step": "the state in the inputs' format after every step",
}
CAUSES: dict[str, str] = {
    **dict(LINEAR_FAULTS.items()),
    **{name: f"{words} in the inputs' format" for name, words in LINEAR_SITES.items()},
    **STEPWISE,
    "handed_back": "its numbers in the inputs' format when they are handed back",
    "lost_write": "what one step writes does not reach the state",
    "lost_decay": "the decay of one step is not applied to the state",
    "transposed": "it is transposed ([V, K] for [K, V])",
    "of_another_head": "it is that of another head",
    "of_another_sequence": "each sequence has that of another",
    "of_another_step": "each step has that of the step before or after it",
    "of_another_gradient": "it is another gradient",
    "of_decay_itself": "it is the gradient of the decay, not of its logarithm",
    "not_summed": "it is not summed over the steps from each on",
    "without_beta": "it is not multiplied by beta",
    "zero": "it is zero",
    "sign": "its sign is turned",
    "factor": "it is multiplied by a number",
}
"""Every cause that can be named, in words."""
# With one boundary alone, they are one step's.
ONE_STEP: dict[str, str] = {"boundary_write": "lost_write", "boundary_decay": "lost_decay"}


def in_words(cause: str, *, backward: bool) -> str:
    """A cause in words.

    Args:
        cause: A key of ``CAUSES``.
        backward: Of a gradient behind a forward that is right: what the fault says is so of the backward alone.
    """
    alone = backward and cause in (*LINEAR_FAULTS, *ONE_STEP.values()) and cause not in OF_GRADIENTS
    return f"in the backward alone, {CAUSES[cause]}" if alone else CAUSES[cause]


@dataclass(frozen=True)
class Cause:
    """What explains an error."""

    name: str
    """A key of ``CAUSES``."""
    explained: float
    """Part of the squared error."""
    words: str
    """In words, with the chunk where one was tried."""

    @property
    def is_rounding(self) -> bool:
        """Whether it is a rounding site, not wrong mathematics."""
        return self.name in LINEAR_SITES or self.name in STEPWISE or self.name == "handed_back"
