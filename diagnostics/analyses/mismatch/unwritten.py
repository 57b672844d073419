"""Rows of O that are zero in one run alone, as if never written: no kernel, however coarse, makes them."""

from __future__ import annotations

from collections.abc import Sequence

from attn_diag.analyses.mismatch.layers import HeadOfBoth
from attn_diag.results.wording import plural

# What underflows is small beside the head's other rows.
_OF_USUAL = 0.25


def unwritten_rows(heads: Sequence[HeadOfBoth], side: int) -> str | None:
    """Where they are, in words after "O is"; None: there are none.

    Args:
        heads: Of a layer.
        side: The run: 0 train, 1 rollout.
    """
    found: list[tuple[int, int]] = []
    for head in heads:
        own, other = head.rows[side].o, head.rows[1 - side].o.norm(dim=1).nan_to_num()
        usual = other[other > 0].median() if bool((other > 0).any()) else other.new_tensor(float("inf"))
        zero = (own == 0).all(1) & (other > _OF_USUAL * usual) & head.semantics[side].visible.any(1)
        found += [(int(token), head.head) for token in head.rows[side].tokens[zero]]
    if not found:
        return None
    token, index = found[0]
    more = "" if len(found) == 1 else f" (the first of {plural(len(found), 'row')})"
    return f"zero at token {token} in head {index}{more}, as if never written, where the other run's is not"
