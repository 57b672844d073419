"""What a watch is to the interception of calls, and a call that it has met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from attn_diag.watching.live.call import CallPlace
from attn_diag.watching.live.linear_layers import MadeWith
from attn_diag.watching.live.operator_calls import OperatorBackward, OperatorCall
from attn_diag.watching.live.pipeline import Stage
from attn_diag.watching.live.places import Caller, MadeBy
from attn_diag.watching.live.sites import Fields

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


class Products(Protocol):
    """Products that may make a q."""

    def passed(self) -> None:
        """A call was recorded, which took what it needs of what ran before it."""
        ...

    def unknown(self) -> None:
        """A call is wanted of which it is not known what makes its q."""
        ...


class Observer(Protocol):
    """What a watch is to the interception. Nothing here raises."""

    @property
    def sequences(self) -> int | None:
        """So many sequences, the first of a batch, are all that it looks at; None: it looks at every one."""
        ...

    @property
    def step(self) -> int:
        """The number of the current step."""
        ...

    @property
    def projections(self) -> Products:
        """What makes the q of calls."""
        ...

    @property
    def may_be_late(self) -> bool:
        """Whether it may be told of calls later, with copies of their tensors."""
        ...

    @property
    def may_wait(self) -> bool:
        """Whether a call that it wants may wait for the device."""
        ...

    def would_want(self, place: CallPlace) -> bool:
        """Whether it wants the call that is about to run there. May raise what a user's function raises."""
        ...

    def learns(self, met: Any) -> tuple[bool, MadeWith | None] | None:
        """Whether it knows what makes the q of calls like this one, and what does; None: another may be another kind.

        (Where nothing that is kept makes it, that is known too.)
        """
        ...

    def made_by(self, module: str = "") -> MadeBy | None:
        """Who makes the call that is running, if it may be of interest; ``module`` as of ``meets``."""
        ...

    def meets(
        self, module: str = "", made_by: MadeBy | None = None, operator: OperatorCall | None = None
    ) -> Any | None:
        """The call that is about to run, if it counts; its ``wanted`` says whether to be told of it.

        Args:
            module: Who makes it, from the compiled module on, where a graph says it.
            made_by: Who made it when it was recorded, where it is not what runs now.
            operator: The fused operator that has run, where nothing but that is known.
        """
        ...

    def counts(self, met: Any) -> None:
        """A call has run, wanted or not."""
        ...

    def sees(self, met: Any, fields: Fields, result: Any) -> None:
        """A wanted call has run."""
        ...

    def went_back(self, back: OperatorBackward) -> None:
        """A fused operator's backward has run."""
        ...

    def failed(self, error: Exception) -> None:
        """A call could not be read."""
        ...

    def forked(self) -> None:
        """This is a forked child now: be gone, without waiting for a lock."""
        ...


def sequences_of(met: Sequence[tuple[Observer, Any]]) -> int | None:
    """So many sequences, the first, are all that those look at who want the call; None: every one."""
    wanted = [observer.sequences for observer, one in met if one.wanted]
    return None if None in wanted else max((n for n in wanted if n is not None), default=None)
