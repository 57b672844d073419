"""What a capture says about itself: layout, scale, masking, provenance (capture formats 1 and 1.1)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Literal, get_args

from attn_diag.errors import InputError

FORMAT = "attn-diag-capture"
FORMAT_VERSION = "1"
# Written only where there is what a reader of version 1 would not understand: packed sequences, sinks, ALiBi, dropout.
PACKED_VERSION = "1.1"

Layout = Literal["BHTD", "BTHD"]
Causal = Literal["none", "top-left", "bottom-right"]
LseBase = Literal["e", "2"]
LseSink = Literal["included", "excluded"]
AlibiOrigin = Literal["row", "first-key", "last-key"]

# Keys of version 1.1 that are written only where they say something else.
_UNSAID = {"lse_sink": "included", "alibi_origin": "row"}
# Positions are 64-bit integers; their differences with a window must be too.
_WIDEST = 2**62

_DROPOUT = (
    "expected which probabilities were kept as a tensor 'dropout_mask', bool [B, Hq, Tq, Tk], beside q, and "
    "dropout_p in the metadata; or capture with dropout 0 (model.eval() or dropout_p=0.0)"
)
_SINKS = "expected a tensor 'sinks' of logits, [Hq], beside q; one number for all heads is softmax_offset"
_ALIBI = "expected ALiBi's slopes as a tensor 'alibi_slopes', [Hq], beside q; a bias that is written out is 'mask'"
_PACKED = "expected a tensor of integers, [documents + 1], beside q"
_REFUSED = {
    **dict.fromkeys(("dropout", "dropout_p", "dropout_mask"), _DROPOUT),
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink", "dsinks"), _SINKS),
    **dict.fromkeys(("alibi", "alibi_slopes"), _ALIBI),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _PACKED),
}


def refuse_unsupported(name: str, *, stated: bool = True) -> None:
    """Raise InputError if ``name`` is a tensor or metadata key of a feature that would make every figure wrong."""
    if stated and name in _REFUSED:
        raise InputError(f"'{name}': {_REFUSED[name]}")


@dataclass(frozen=True)
class Metadata:
    """Metadata of a capture. Raises InputError on impossible values."""

    layout: Layout = "BHTD"
    """Order of the axes."""
    causal: Causal = "none"
    """Whether, and how, the causal mask is aligned where Tq differs from Tk."""
    scale: float | None = None
    """alpha; None: 1/sqrt(D)."""
    window: tuple[int, int] | None = None
    """(left, right), inclusive, -1 unlimited."""
    softcap: float | None = None
    """c of S = c tanh(alpha q.k / c)."""
    lse_base: LseBase = "e"
    """Base of the captured LSE's logarithm."""
    softmax_offset: float | None = None
    """A sink's logit, the same for all heads: 0 is the off-by-one softmax; None: none, or the tensor ``sinks``."""
    lse_sink: LseSink = "included"
    """Whether the captured LSE has the sink in it, as FlashAttention's has, or is that of the keys alone."""
    alibi_origin: AlibiOrigin = "row"
    """Where the bias of ``alibi_slopes`` is counted from: "row": -slope |position(t) - j|; "first-key": slope j, as
    flash_attn 2 has it under causality without a left window, its LSE too, and BLOOM; "last-key": slope (j - Tk + 1),
    as MPT."""
    dropout_p: float | None = None
    """How many probabilities were dropped in the mean; which, ``dropout_mask`` says. None or 0: none."""
    layer: int | None = None
    """The model's number of the layer."""
    head_offset: int = 0
    """The model's number of the capture's first head."""
    step: int | None = None
    """Training step."""
    rank: int | None = None
    """Rank of the process that wrote it."""
    kernel: str | None = None
    """What computed the outputs."""
    declared: str | None = None
    """The published recipe below 16 bits (fa3-fp8, sage2, …) that it is meant to be, and is held against."""
    device: str | None = None
    """On what."""
    torch: str | None = None
    """Version of torch."""
    hardware: str | None = None
    """The note of what ``selftest --hardware`` measured (JSON)."""
    notes: str | None = None
    """Anything else, for people."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Keys that this version does not know."""

    def __post_init__(self) -> None:
        for name, allowed in (("layout", Layout), ("causal", Causal), ("lse_base", LseBase),
                              ("lse_sink", LseSink), ("alibi_origin", AlibiOrigin)):  # fmt: skip
            if getattr(self, name) not in get_args(allowed):
                raise InputError(f"{name} must be one of {', '.join(get_args(allowed))}, got {getattr(self, name)!r}")
        # Numbers of NumPy and torch are kept as Python's, which compare, hash and are written as these.
        for name in ("scale", "softcap", "softmax_offset", "dropout_p"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_number(name, getattr(self, name)))
        if self.window is not None:
            object.__setattr__(self, "window", as_window(self.window))
        # Errors of dQ carry the square of scale; times anything it must stay a number other than 0.
        if self.scale is not None and not 0 < self.scale * self.scale < math.inf:
            raise InputError(
                f"scale must be a finite number other than 0, and so its square, got {self.scale}; 1/sqrt(D) is usual"
            )
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise InputError(f"softcap must be a finite number above 0, got {self.softcap}; leave it out for none")
        if self.softmax_offset is not None and not math.isfinite(self.softmax_offset):
            raise InputError(
                f"softmax_offset must be a finite logit, got {self.softmax_offset}; 0 is the off-by-one softmax, "
                "leave it out for none"
            )
        if self.dropout_p is not None and not 0 <= self.dropout_p < 1:
            raise InputError(f"dropout_p must be at least 0 and below 1, got {self.dropout_p}; leave it out for none")
        if self.head_offset < 0:
            raise InputError(f"head_offset must be 0 or more, got {self.head_offset}")

    @classmethod
    def parse(cls, text: Mapping[str, str]) -> Metadata:
        """From the str -> str metadata of a file. Raises InputError naming the key that cannot be read."""
        if text.get("format", FORMAT) != FORMAT:
            raise InputError(f"metadata says format={text['format']!r}; expected {FORMAT!r}")
        version = text.get("format_version", FORMAT_VERSION)
        if version not in (FORMAT_VERSION, PACKED_VERSION):
            raise InputError(
                f"capture format version {version!r} is not known to this version of attn-diag, which reads "
                f"{FORMAT_VERSION} and {PACKED_VERSION}; if a newer one wrote the file, upgrade attn-diag"
            )
        # Of a kind that a newer version has every figure would be of another function.
        if "format" in text and (kind := text.get("kind", "").strip()):
            raise InputError(
                f"metadata says kind={kind!r}; expected kind=linear (linear attention), or no kind (softmax attention)"
            )
        values: dict[str, Any] = {}
        extra: dict[str, str] = {}
        for key, value in text.items():
            if key in ("format", "format_version"):
                continue
            stated = value.strip().lower() not in ("", "0", "0.0", "none", "false")
            if key not in _PARSERS or (key == "dropout_p" and not stated):
                refuse_unsupported(key, stated=stated)
                extra[key] = value
                continue
            parse, meant = _PARSERS[key]
            try:
                values[key] = parse(value)
            except ValueError:
                raise InputError(f"metadata {key}={value!r} cannot be read as {meant}") from None
        return cls(**values, extra=extra)

    def to_text(self, version: str = FORMAT_VERSION) -> dict[str, str]:
        """The str -> str metadata that ``parse`` reads back to an equal object.

        Args:
            version: Of the capture format.

        Returns:
            Text by key.
        """
        text = {"format": FORMAT, "format_version": version, **self.extra}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "extra" or value is None or value == _UNSAID.get(item.name):
                continue
            text[item.name] = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        # Half a surrogate pair, as a dump's names may hold it, cannot be written.
        return {_writable(key): _writable(value) for key, value in text.items()}

    def override(self, **options: Any) -> Metadata:
        """With those options that are not None put in place."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


def _writable(text: str) -> str:
    """``text`` with an escape for what has no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def as_number(name: str, value: Any) -> float:
    """``value`` as Python's float. Raises InputError where it is no number, or a bool."""
    try:
        number = None if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = None
    if number is None:
        raise InputError(f"{name} must be a number, got {value!r}")
    return number


def as_window(window: Any) -> tuple[int, int]:
    """(left, right) as Python's integers. Raises InputError for others, such as one number, as models state theirs."""
    if not isinstance(window, bool) and isinstance(window, Integral) and int(window) > 0:
        keys = f"{window} keys, a row's own among them, are ({int(window) - 1}, 0) under a causal mask"
        raise InputError(f"window must be (left, right), got {window}: {keys}")
    try:
        sides = [] if isinstance(window, str | bytes | Set | Mapping) else [int(operator.index(n)) for n in window]
    except TypeError:
        sides = []
    if len(sides) != 2 or min(sides) < -1:
        raise InputError(f"window must be 'left,right', two integers, each >= 0 or -1 for unlimited, got {window!r}")
    if max(sides) > _WIDEST:
        raise InputError(f"window must be 'left,right', each at most {_WIDEST}, got {window!r}; -1 is unlimited")
    return sides[0], sides[1]


def parse_window(text: str) -> tuple[int, int]:
    """'left,right' as two integers. Raises ValueError."""
    left, right = text.split(",")
    return int(left), int(right)


# How a key's text is read, and what it should have been where that fails.
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    **dict.fromkeys(("scale", "softcap", "softmax_offset", "dropout_p"), (float, "a number")),
    "window": (parse_window, "'left,right'"),
    **dict.fromkeys(("layer", "head_offset", "step", "rank"), (int, "an integer")),
    **dict.fromkeys(("layout", "causal", "lse_base", "lse_sink", "alibi_origin"), (str, "text")),
    **dict.fromkeys(("kernel", "declared", "device", "torch", "hardware", "notes"), (str, "text")),
}
KEYS = frozenset(_PARSERS)
