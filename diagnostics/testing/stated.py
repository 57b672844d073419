"""What a kernel is said to compute: softmax(alpha Q K^T) V of which scores, and of which keys."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from attn_diag.captures.given import Array
from attn_diag.captures.metadata import Causal, Metadata, as_number, as_window
from attn_diag.errors import InputError
from attn_diag.reference import Masking
from attn_diag.results.wording import function_words, number
from attn_diag.testing.case_inputs import CaseInputs

# One a head, in fp32; of a case's slopes also [B, H].
Numbers = tuple[float, ...] | Tensor | None

_UNLIMITED = (-1, -1)
# What is stated of every head alone.
PER_HEAD = ("alibi_slopes", "sinks")
# What a kernel may be said to have besides causality and a scale.
LIMITS = ("window", "softcap", *PER_HEAD)
# As users give it: a list, an array or a tensor.
PerHead = Sequence[float] | Array | None
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
    @property
    def alibi_slopes(self) -> Numbers: ...  # noqa: D102
    @property
    def sinks(self) -> Numbers: ...  # noqa: D102


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
    alibi_slopes: tuple[float, ...] | None = None
    """ALiBi's, one a head: -slope |t - j| is added to the scores."""
    sinks: tuple[float, ...] | None = None
    """Logits of attention sinks, one a head."""

    @classmethod
    def of(
        cls, causal: bool | str, scale: float | None, head_dim: int, window: Sequence[int] | None = None,
        softcap: float | None = None, alibi_slopes: PerHead = None, sinks: PerHead = None, *,
        heads: int | None = None,
    ) -> Stated:  # fmt: skip
        """What a user says of a kernel.

        Args:
            causal: "none", "top-left" or "bottom-right"; False and True for the first two.
            scale: alpha; None: 1/sqrt(head_dim).
            head_dim: D.
            window: (left, right), inclusive; None, or -1 for both: no window.
            softcap: c; None, or 0 as kernels have it: no cap.
            alibi_slopes, sinks: One a head; None: none.
            heads: How many there are, where something else says so.

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
        slopes, logits = (_of_heads(n, x) for n, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)))
        for name, found in (("alibi_slopes", slopes), ("sinks", logits)):
            if found is not None and len(found) != (heads := heads or len(found)):
                raise InputError(f"{name} must be {heads} finite numbers, one a head of the call, got {len(found)}")
        return cls(held.causal, alpha, held.window, held.softcap, slopes, logits)

    @property
    def heads(self) -> int | None:
        """How many query heads a call must have; None: any."""
        numbers = self.alibi_slopes or self.sinks
        return None if numbers is None else len(numbers)

    @property
    def masking(self) -> Masking:
        """Of a head without ALiBi."""
        return Masking(self.causal, self.window)

    def case(self, name: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None = None, **more: Any) -> CaseInputs:
        """A call, with ``more`` fields of ``CaseInputs``."""
        told = ((n, getattr(self, n)) for n in PER_HEAD)
        more = {n: torch.tensor(x, dtype=torch.float32) for n, x in told if x is not None} | more
        return CaseInputs(name, q, k, v, do, self.scale, self.causal, window=self.window, softcap=self.softcap, **more)


def fitting(shape: tuple[int, int, int, int], *numbers: PerHead) -> tuple[int, int, int, int]:
    """[B, H, T, D] with as many heads as numbers are stated of, where any are."""
    known = [_of_heads(name, given) for name, given in zip(PER_HEAD, numbers, strict=True)]
    return shape[0], next((len(x) for x in known if x), shape[1]), *shape[2:]


def sees_ahead(said: Said) -> bool:
    """Whether a row sees keys later than its own."""
    return Masking(said.causal, said.window).reach[1] != 0


def hides_appended(said: Said) -> bool:
    """Whether appended keys can count for nothing: unseen, or with a score of -300, which no small cap raises."""
    raised = min(_first(said.alibi_slopes) or [0.0]) < 0
    return not sees_ahead(said) or (not raised and (said.softcap is None or said.softcap >= HIDING_CAP))


def same_function(one: Said, other: Said, told: Collection[str] = ()) -> bool:
    """Whether both are one function of q, k and v, but for what each call is ``told``, and numbers of heads that
    ``other`` does not state."""
    numbers = [(_first(getattr(one, n)), _first(getattr(other, n))) for n in PER_HEAD if n not in told]
    return (
        (one.causal, one.window, one.softcap) == (other.causal, other.window, other.softcap)
        and math.isclose(one.scale, other.scale, rel_tol=1e-6)
        and all(a == b for a, b in numbers if b is not None)
    )


def stated_words(said: Said) -> str:
    """The function in words: "causal top-left, window 64,0, scale 0.125"."""
    each = (_first(getattr(said, n)) for n in PER_HEAD)
    return function_words(said.causal, said.scale, said.window, said.softcap, *each)


def _first(numbers: Numbers) -> list[float] | None:
    """One a head; of a batch whose items differ those of the first."""
    if isinstance(numbers, Tensor):
        return numbers.view(-1, numbers.shape[-1])[0].tolist()
    return None if numbers is None else list(numbers)


def _of_heads(name: str, given: PerHead) -> tuple[float, ...] | None:
    """One finite number of fp32 a head. Raises InputError for others."""
    if given is None:
        return None
    try:
        listed: Any = given.tolist() if hasattr(given, "tolist") else given
        found = [] if isinstance(listed, str | bytes) else [as_number(name, x) for x in listed]
    except (TypeError, InputError, RuntimeError):
        found = []
    held = torch.tensor(found, dtype=torch.float64).float()
    if not found or not bool(held.isfinite().all()):
        shown = f"{given.dtype} of shape {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
        wrong = "" if not found else f" (the first that is none: {number(found[int((~held.isfinite()).nonzero()[0])])})"
        raise InputError(f"{name} must be finite numbers of fp32, one a head, such as [0.5, 0.25], got {shown}{wrong}")
    return tuple(held.tolist())
