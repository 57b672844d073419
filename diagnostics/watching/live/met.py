"""A call that a watch has met."""

from __future__ import annotations

from typing import NamedTuple

from attn_diag.watching.live.call import CallPlace
from attn_diag.watching.live.pipeline import Stage
from attn_diag.watching.live.places import Caller

DRAWN_AGAIN = (
    "the backward made this call again (checkpointing, use_reentrant=True) and drew its dropout: whether the forward "
    "had the same is not seen"
)


class Met(NamedTuple):
    """A call that is about to run, or has run, and counts."""

    place: CallPlace
    caller: Caller
    recomputing: bool
    """Whether a backward pass runs it once more."""
    wanted: bool
    """Whether the listener is to be told."""
    stage: Stage | None = None
    """Of a pipeline, where there is one."""
