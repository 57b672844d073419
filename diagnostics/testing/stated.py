"""What a kernel is said to compute: softmax(alpha Q K^T) V of which scores, and of which keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from torch import Tensor

from attn_diag.captures.metadata import Causal, Metadata, as_number, as_window
from attn_diag.errors import InputError
from attn_diag.reference import Masking
from attn_diag.results.wording import function_words
from attn_diag.testing.case_inputs import CaseInputs

_UNLIMITED = (-1, -1)
HIDING_CAP = 30.0
"""exp(-2 c) of such a cap c is 0 beside 1 in fp32."""


class Said(Protocol):
    """Where that is said: by a user, or in a case."""

    @property
    def causal(self) -> Causal: ...  # noqa: D102
    @property
    def scale(self) -> float: ...  # noqa: D102
    @property
    def window(self) -> tuple[int, int] | None: ...  # noqa: D102
    @property
    def softcap(self) -> float | None: ...  # noqa: D102


@dataclass(frozen=True)
class Stated:
    """What the calls of one run have in common."""

    causal: Causal
    """What is masked."""
    scale: float
    """alpha."""
    window: tuple[int, int] | None = None
    """(left, right), inclusive, -1 unlimited."""
    softcap: float | None = None
    """c of S = c tanh(alpha q.k / c)."""

    @classmethod
    def of(
        cls, causal: bool | str, scale: float | None, head_dim: int, window: Sequence[int] | None = None,
        softcap: float | None = None,
    ) -> Stated:  # fmt: skip
        """What a user says of a kernel.

        Args:
            causal: "none", "top-left" or "bottom-right"; False and True for the first two.
            scale: alpha; None: 1/sqrt(head_dim).
            head_dim: D.
            window: (left, right), inclusive; None, or -1 for both: no window.
            softcap: c; None, or 0 as kernels have it: no cap.

        Raises:
            InputError: One of them is none of these.
        """
        named = causal if isinstance(causal, str) else ("top-left" if causal else "none")
        if named not in get_args(Causal):
            raise InputError(f"causal must be none, top-left or bottom-right (or a bool), got {causal!r}")
        alpha = head_dim**-0.5 if scale is None else as_number("scale", scale)
        if not (math.isfinite(alpha) and alpha > 0):
            raise InputError(f"scale must be a positive number, got {scale}")
        band = None if window is None else as_window(window)
        cap = None if softcap is None else as_number("softcap", softcap)
        held = Metadata(causal=named, window=None if band == _UNLIMITED else band, softcap=cap or None)  # type: ignore[arg-type]
        return cls(held.causal, alpha, held.window, held.softcap)

    @property
    def masking(self) -> Masking:
        """Of a head without ALiBi."""
        return Masking(self.causal, self.window)

    def case(self, name: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None = None, **more: Any) -> CaseInputs:
        """A call, with ``more`` fields of ``CaseInputs``."""
        return CaseInputs(name, q, k, v, do, self.scale, self.causal, window=self.window, softcap=self.softcap, **more)


def sees_ahead(said: Said) -> bool:
    """Whether a row sees keys later than its own."""
    return Masking(said.causal, said.window).reach[1] != 0


def hides_appended(said: Said) -> bool:
    """Whether appended keys can count for nothing: unseen, or with a score of -300, which no small cap raises."""
    return not sees_ahead(said) or said.softcap is None or said.softcap >= HIDING_CAP


def same_function(one: Said, other: Said) -> bool:
    """Whether both are one function of q, k and v."""
    return (one.causal, one.window, one.softcap) == (other.causal, other.window, other.softcap) and math.isclose(
        one.scale, other.scale, rel_tol=1e-6
    )


def stated_words(said: Said) -> str:
    """The function in words: "causal top-left, window 64,0, scale 0.125"."""
    return function_words(said.causal, said.scale, said.window, said.softcap)
