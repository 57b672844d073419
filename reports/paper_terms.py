"""The words of the paper's figures that no other report uses, for the glossary of their page."""

from __future__ import annotations

from attn_diag.reports.glossary import GROUPS, Word

_TERMS = (
    Word(
        "atom",
        "rank-1 atom",
        "What one query row adds to the error of dW_Q through delta: the row's error of delta, times the keys weighted "
        "by its probabilities, (PK)_t, times the input of the projection, x_t. A matrix of rank 1.",
        ("rank-1 atoms", "atoms", "atom"),
    ),
    Word(
        "spectral_norm", "spectral norm", "The largest factor by which a matrix stretches a vector.", ("norms of W_Q",)
    ),
    Word("w_q", "W_Q", "The weights that make the queries of the input x: q = x · W_Qᵀ. dW_Q is their gradient."),
    Word(
        "singular_direction",
        "singular direction",
        "The first is the direction that a matrix stretches most; what it holds is its part of the squared norm.",
        ("singular directions", "first direction"),
    ),
    Word("o_bar", "Ō", "The sum of P̄ times V over a row's keys, before it is divided by the row sum.", ("Ō's",)),
)

WORDS = GROUPS | {"In the paper's figures": _TERMS}
"""All words of a page of them."""
