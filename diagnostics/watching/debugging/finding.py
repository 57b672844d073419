"""What a breakpoint found: the call, its tensors and its diagnosis."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from attn_diag.captures.capture import Capture
from attn_diag.results.base import shown_at_prompt
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.watching.live.call import CallPlace


@dataclass(frozen=True, repr=False)
class Finding:
    """An attention call for which a condition of ``break_if`` held. Printed, it takes at most 25 lines.

    ``reasons``: which conditions, in words. ``place``: step, layer, module, call. ``judged``: on what. ``capture``: a
    copy of the call's tensors as they were then (``capture.save(path)`` keeps it for the command line), None where they
    do not fit each other. ``diagnosis``: None where attn-diag cannot analyse the call; ``refused`` says why. ``also``:
    other calls that were found before the program could be stopped. ``disarm()``: the breakpoint stops no more.
    """

    reasons: tuple[str, ...]
    place: CallPlace
    judged: str
    kernel: str
    capture: Capture | None
    diagnosis: Diagnosis | None
    refused: str | None = None
    also: tuple[Finding, ...] = ()
    schema: ClassVar[str] = "attn-diag-finding"
    disarm: Callable[[], None] = field(default=lambda: None, compare=False)

    def __str__(self) -> str:
        return str(shown_at_prompt(self))

    def __repr__(self) -> str:
        p = self.place
        return f"<Finding: {'; '.join(self.reasons)}; layer {p.layer}, call {p.call} of step {p.step}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
