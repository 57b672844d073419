"""What a chunked kernel of linear attention rounds, and what it may get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LinearFormat = Literal["bf16", "fp16", "fp32"]
LinearFault = Literal[
    "no_inter_chunk", "boundary_write", "boundary_decay", "no_initial_state", "initial_state_transposed",
    "initial_state_of_another", "sequences_run_on", "no_last_gradient", "no_decay_gradient",
    "no_decay_gradient_of_states",
]  # fmt: skip

LINEAR_FAULTS: dict[LinearFault, str] = {
    "no_inter_chunk": "the inter-chunk term is missing: nothing of the state before its chunk reaches a step",
    "boundary_write": "a chunk boundary is off by one: the last step of each chunk is not written to the state",
    "boundary_decay": "a chunk boundary is off by one: the decay of each chunk's last step is not applied to the state",
    "no_initial_state": "the initial state is not used",
    "initial_state_transposed": "the initial state is used transposed ([V, K] for [K, V])",
    "initial_state_of_another": "each sequence starts from the initial state of the one before it",
    "sequences_run_on": "packed sequences are not told apart: each goes on from the state that the one before left",
    "no_last_gradient": "the gradient of the last state is ignored",
    "no_decay_gradient": "the gradient of the decay is dropped: it is zero",
    "no_decay_gradient_of_states": "the gradient of the decay lacks what reaches it through the states between chunks",
}
"""What a kernel may get wrong, in words."""


@dataclass(frozen=True)
class LinearRecipe:
    """The rounding sites of a chunked kernel. Its sums are fp32's; gradients have their inputs' formats."""

    operands: LinearFormat = "bf16"
    """Of every matrix product: q, k, v scaled by decays, scores, and gradients."""
    inter: LinearFormat | None = None
    """Of the products with the state, and of those that write into it; None: as operands."""
    state: LinearFormat = "fp32"
    """Of the state (and its gradient) that is carried from chunk to chunk."""
    decay: LinearFormat = "fp32"
    """Of exponentials of the decays' sums."""
    log_decay: LinearFormat = "fp32"
    """Of the sums themselves."""
    elementwise: LinearFormat = "fp32"
    """Of products of two elements within a chunk, before they are decayed and summed (where channels decay apart)."""
    solved: LinearFormat = "fp32"
    """Of the scores that the triangular inverse is made of (and, with a and b, of those that it multiplies)."""
    inverse: LinearFormat | None = None
    """Of the triangular inverse (UT transform); None: as operands."""
    stored: LinearFormat | None = None
    """Of what kernels hand each other between products (w, u and the new values of a delta rule); None: as operands."""
    accumulator: LinearFormat = "fp32"
    """Of every matrix product's result."""
    score_gradients: LinearFormat | None = None
    """Of gradients of decayed scores as a decay's gradient takes them, one number a step; None: as operands."""
    decay_sums: LinearFormat = "fp32"
    """Of states and their gradients, their products and the sums of these: the gradient of a chunk's whole decay."""
    normalizer: LinearFormat = "fp32"
    """Of the running sum of k that linear_attn divides by."""
    out: LinearFormat = "bf16"
    """Of o."""
    gradients: LinearFormat | None = None
    """Of gradients as they are handed back; None: as their inputs."""
    chunk: int = 64
    """Steps in a chunk; 1: a recurrent kernel's."""


LINEAR_SITES: dict[str, str] = {
    "state": "the state between chunks",
    "decay": "the decays",
    "log_decay": "the logarithms of the decays",
    "elementwise": "products of two elements within a chunk",
    "solved": "the scores that the triangular inverse is made of",
    "accumulator": "the products' sums",
    "normalizer": "the normaliser's running sum",
    "decay_sums": "the sums over the state that the decay's gradient takes",
}
"""The sites that well-rounded kernels keep in fp32, in words."""
GRADIENT_SITES = ("score_gradients", "decay_sums")
"""The sites that a backward alone has."""
