"""What a chunked kernel of linear attention rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LinearFormat = Literal["bf16", "fp16", "tf32", "fp32"]


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
    log_steps: LinearFormat = "fp32"
    """Of the decays' logarithms, before they are summed."""
    log_decay: LinearFormat = "fp32"
    """Of the sums themselves."""
    elementwise: LinearFormat = "fp32"
    """Of products of two elements within a chunk, before they are decayed and summed (where channels decay apart)."""
    solved: LinearFormat = "fp32"
    """Of the scores that the triangular inverse is made of (and, with a and b, of those that it multiplies)."""
    inverse: LinearFormat | None = None
    """Of the triangular inverse (UT transform); None: as operands."""
    joined: LinearFormat = "fp32"
    """Of operands of products that put the triangular inverse together out of blocks of 16 steps."""
    applied: LinearFormat | None = None
    """Of operands of products of the triangular inverse and scores, and of its gradient (with a and b); None: fp32, and
    as operands."""
    stored: LinearFormat | None = None
    """Of what kernels hand each other between products (w, u and the new values of a delta rule); None: as operands."""
    accumulator: LinearFormat = "fp32"
    """Of every matrix product's result."""
    score_gradients: LinearFormat | None = None
    """Of gradients of decayed scores as a decay's gradient takes them, one number a step; None: as operands."""
    decay_sums: LinearFormat = "fp32"
    """Of states and their gradients, their products and the sums of these: the gradient of a chunk's whole decay."""
    decay_terms: LinearFormat | None = None
    """Of these without the sums; None: as decay_sums."""
    closing: LinearFormat | None = None
    """Of decayed keys that the gradient of a chunk's whole decay multiplies with gradients that were not rounded; None:
    it is the sum of what its steps have (with a and b)."""
    decayed: LinearFormat | None = None
    """Of gradients and values that the gradients of q and k multiply with decays, one number a step, as operands;
    None: as operands; fp32: the product is multiplied instead."""
    state_gradient: LinearFormat | None = None
    """Of q times its decays, which the gradient of the state multiplies with that of o; None: the gradient of o times
    its decays is the operand."""
    score_operands: LinearFormat | None = None
    """Of q and k times decays of every channel, in products of blocks of 16 steps within a chunk (with a and b of whole
    chunks, decays counted from the middle step); None: no products."""
    score_weights: LinearFormat | None = None
    """Of the scores that the gradient of v takes; None: as operands."""
    shared_scores: LinearFormat | None = None
    """Of gradients of decayed scores that heads with the same q and k add up first, one number a step, as operands of
    the gradients of q and k; None: each head's is an operand."""
    stepped: LinearFormat | None = None
    """Of values times their steps (Mamba-2's dt); fp32: scores and keys are multiplied instead, and rounded then."""
    new_values: LinearFormat | None = None
    """Of a delta rule's new values as they are written to the state, decayed where there is one decay a step; None: as
    stored."""
    parts: LinearFormat = "fp32"
    """Of the parts of a gradient that several kernels make, before they are added up (where there is a beta)."""
    beta_keys: LinearFormat = "fp32"
    """Of beta times k, before decays multiply it for w."""
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
GRADIENT_SITES = (
    "score_gradients", "decay_sums", "decay_terms", "closing", "decayed", "state_gradient", "score_weights", "parts",
    "shared_scores",
)  # fmt: skip
"""The sites that a backward alone has."""
Choice = dict[str, LinearFormat | None]
# What released kernels (flash-linear-attention 0.6.0; mamba_ssm 2.3.2 of Mamba-2) round otherwise than a well-rounded
# kernel does, by operator, as their sources have it; None: the inputs' format. Several where an operator has several
# kernels: RWKV-7's with safe_gate is another.
RELEASED: dict[str, tuple[Choice, ...]] = {
    "delta_rule": ({"parts": None},),
    "gated_delta_rule": (
        {
            "new_values": "fp32", "decayed": "fp32", "state_gradient": "tf32", "parts": None, "decay_sums": None,
            "joined": "tf32", "beta_keys": None,
        },
    ),
    "kda": ({"parts": None, "decay_sums": None, "score_operands": "tf32", "joined": "tf32", "beta_keys": None},),
    "gla": ({"score_weights": "fp32", "score_operands": "tf32"},),
    "simple_gla": ({"decayed": "fp32", "state_gradient": None},),
    "retention": ({"decayed": "fp32", "state_gradient": None},),
    "mamba2": ({"stepped": "fp32", "decayed": "fp32", "score_gradients": "fp32", "shared_scores": None},),
    "rwkv7": (
        {
            "elementwise": None, "solved": None, "log_steps": "tf32", "applied": "tf32", "new_values": "tf32",
            "parts": None, "decay_terms": None, "closing": None,
        },
        {
            "score_operands": "tf32", "joined": "fp16", "log_steps": "tf32", "applied": "tf32", "new_values": "tf32",
            "parts": None, "decay_terms": None, "closing": None,
        },
    ),
}  # fmt: skip
CHOICES: dict[str, str] = {
    "operands": "products take operands that were not rounded",
    "decayed": "decays multiply products of gradients instead of their operands",
    "state_gradient": "decays multiply q instead of dO in the state's gradient",
    "score_operands": "scores within a chunk are products of decayed q and k",
    "score_weights": "dV takes scores that were not rounded",
    "shared_scores": "gradients of scores are added up over heads that share q and k before they are rounded",
    "stepped": "dt multiplies scores and keys instead of values",
    "new_values": "new values are written to the state before they are rounded",
    "score_gradients": "the decay's gradient takes scores' gradients that were not rounded",
    "parts": "parts of gradients are rounded before they are added up",
    "decay_sums": "the sums over the state that the decay's gradient takes are rounded",
    "decay_terms": "the products of states and their gradients that the decay's gradient sums are rounded",
    "closing": "keys at a chunk's end and gradients in its steps, which cancel in the decay's, are rounded apart",
    "log_steps": "the logarithms of the decays are cut off before they are summed",
    "joined": "the triangular inverse is put together by products of rounded blocks",
    "applied": "products of the triangular inverse and scores take rounded operands",
    "beta_keys": "beta times k is rounded before decays multiply it",
    "elementwise": "products of two elements within a chunk are rounded",
    "solved": "the scores that the triangular inverse is made of are rounded",
}
"""What released kernels do there, in words."""
