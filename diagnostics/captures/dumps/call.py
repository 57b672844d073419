"""One attention call of a dump, and every capture that it may be: shapes, layouts, masking and LSE bases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast, get_args

from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.dumps.names import require_known
from attn_diag.captures.loading import require_held
from attn_diag.captures.metadata import Causal, Layout, LseBase, Metadata
from attn_diag.errors import InputError

_HEADS_AND_ROWS = ("lse", "delta")


@dataclass(frozen=True)
class Wanted:
    """What the user says of a dump; None where the dump, or a check, shall tell."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the dump (names, or patterns such as "layers.*.query") by their name in capture format 1."""
    layout: str | None = None
    """As in ``Metadata``; so are the five that follow."""
    causal: str | None = None
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    lse_base: str | None = None
    layer: int | None = None
    """Only the calls of this layer; of a dump that states no layers, the layer of its only call."""
    head_dim: int | None = None
    """D of q and k, where heads and features share one axis."""

    def __post_init__(self) -> None:
        # Refuses values that cannot be, once, before any dump is read.
        Metadata().override(**self.stated)
        require_known(self.names)
        if self.head_dim is not None and self.head_dim < 1:
            raise InputError(f"the head dimension must be 1 or more, got {self.head_dim}")

    @property
    def stated(self) -> dict[str, Any]:
        """What replaces the dump's metadata."""
        keys = ("layout", "causal", "scale", "window", "softcap", "lse_base")
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


@dataclass(frozen=True)
class DumpedCall:
    """One attention call as a dump holds it."""

    name: str
    """Of the file to be written, without suffix."""
    source: str
    """Where it was found."""
    tensors: Mapping[str, Tensor]
    """As dumped, by their names in capture format 1."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that the dump states."""
    layouts: tuple[Layout, ...] = get_args(Layout)
    """What the layout may be, the most likely first."""
    causals: tuple[Causal, ...] = get_args(Causal)
    """What the causal alignment may be, likewise."""
    lse_bases: tuple[LseBase, ...] = get_args(LseBase)
    """What the base of LSE may be, likewise."""
    notes: tuple[str, ...] = ()
    """Where the tensors come from, and what was taken for granted."""

    def readings(self, wanted: Wanted) -> Readings:
        """The call as every capture that it may be. Raises InputError where the tensors do not fit each other."""
        stated = {**self.stated, **wanted.stated}
        layouts = (stated.pop("layout"),) if "layout" in stated else self.layouts
        causals = _causals_of(stated.pop("causal")) if "causal" in stated else self.causals
        bases = (stated.pop("lse_base"),) if "lse_base" in stated else self.lse_bases
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors.values()}
        found: list[Capture] = []
        errors: list[InputError] = []
        for layout in layouts:
            try:
                tensors, reshaped = _shaped(self.tensors, layout, wanted.head_dim)
                metadata = Metadata(layout=layout, causal=causals[0], lse_base=bases[0], **stated)
                capture = Capture(tensors, metadata, self.source, tuple(reshaped))
                require_held(capture, sum(storages.values()))
                found.append(capture)
            except InputError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        # Where q and k are equally long, the two alignments are one.
        readings = [
            replace(c, metadata=replace(c.metadata, causal=causal))
            for c, causal in product(found, causals)
            if not (causal == "bottom-right" and "top-left" in causals and c.q_length == c.k_length)
        ]
        return Readings(
            readings,
            bases,
            layout_open=len(found) > 1,
            causal_open=len(causals) > 1,
            layout_by_shape=len(found) == 1 and len(layouts) > 1,
        )


@dataclass(frozen=True)
class Readings:
    """What a call may be: captures that differ in layout and causal alignment, and the bases that its LSE may have."""

    captures: list[Capture]
    """At least one; the most likely first."""
    bases: tuple[LseBase, ...]
    """Likewise."""
    layout_open: bool
    """Whether they differ in layout."""
    causal_open: bool
    """Whether the dump leaves the causal alignment open."""
    layout_by_shape: bool
    """Whether the shapes alone have ruled out the other layouts."""


def _shaped(dumped: Mapping[str, Tensor], layout: Layout, head_dim: int | None) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors with the axes of capture format 1 under ``layout``, and what was done to get there."""
    tensors, said = dict(dumped), list[str]()
    for name in ("q", "k", "v"):
        if name in tensors:
            heads = tensors["k"].shape[2] if name == "v" and "k" in tensors and tensors["k"].ndim == 4 else None
            tensors[name], done = _four_axes(name, tensors[name], layout, head_dim, heads)
            said += [done] if done else []
    if not {"q", "k", "v"} <= tensors.keys():
        return tensors, said  # Capture says what is missing
    heads_axis = 1 if layout == "BHTD" else 2
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    batch, heads, rows, features = q.shape[0], q.shape[heads_axis], q.shape[3 - heads_axis], v.shape[3]
    like = {"o": (*q.shape[:3], features), "do": (*q.shape[:3], features)}
    like |= {"dq": tuple(q.shape), "dq_pre": tuple(q.shape), "dk": tuple(k.shape), "dv": tuple(v.shape)}
    for name, tensor in tensors.items():
        base, words = name.rpartition(".")[2], None
        if base in like:
            tensors[name], words = _as_expected(name, tensor, like[base], heads_axis)
        elif base in _HEADS_AND_ROWS:
            tensors[name], words = _as_rows(name, tensor, (batch, heads, rows))
        elif name == "x" and tensor.ndim == 2:
            tensors[name], words = tensor[None], f"x {list(tensor.shape)}: batch axis added"
        said += [words] if words else []
    return tensors, said


def _four_axes(
    name: str, tensor: Tensor, layout: Layout, head_dim: int | None, heads: int | None
) -> tuple[Tensor, str | None]:
    """q, k or v with four axes. ``heads``: of v, which may have features of its own, where k's are known."""
    shape = list(tensor.shape)
    if tensor.ndim == 4:
        return tensor, None
    together = head_dim is not None and shape[-1] != head_dim
    if tensor.ndim == 3 and not together:
        return tensor[None], f"{name} {shape}: batch axis added"
    if tensor.ndim not in (2, 3):
        raise InputError(f"{name} must have 2 to 4 axes, got shape {shape}")
    if head_dim is None:
        raise InputError(
            f"{name} has shape {shape}, heads and features in one axis; say the features of a head with --head-dim"
        )
    width = shape[-1] // heads if heads is not None and layout == "BTHD" else head_dim
    if shape[-1] % width:
        raise InputError(f"{name} has {shape[-1]} features, which heads of {width} do not divide; correct --head-dim")
    if layout == "BHTD":
        raise InputError(f"{name} has shape {shape}, heads and features in one axis: its layout is BTHD")
    split = tensor.reshape(*shape[:-1], -1, width)
    return (split if split.ndim == 4 else split[None]), f"{name} {shape}: split into heads of {width}"


def _as_expected(name: str, tensor: Tensor, expected: tuple[int, ...], heads_axis: int) -> tuple[Tensor, str | None]:
    """A tensor laid out like q or k, [B, H, T, D] or [B, T, H, D]: as it is, with axes added, swapped or split."""
    if tuple(tensor.shape) == expected:
        return tensor, None
    heads, features = expected[heads_axis], expected[3]
    for reading, words in _readings(tensor, heads, features):
        for swapped in (False, True):
            candidate = reading.transpose(1, 2) if swapped else reading
            if tuple(candidate.shape) == expected:
                done = " and ".join([*words, *(["heads and time swapped"] if swapped else [])])
                return candidate, f"{name} {list(tensor.shape)}: {done}"
    raise InputError(
        f"{name} must have shape {list(expected)} (or the same in another order), got {list(tensor.shape)}"
    )


def _readings(tensor: Tensor, heads: int, features: int) -> Iterator[tuple[Tensor, list[str]]]:
    """``tensor`` with four axes: a batch axis added, the heads split from the features, or both."""
    if tensor.ndim == 4:
        yield tensor, []
    if tensor.ndim == 3:
        yield tensor[None], ["batch axis added"]
    if tensor.ndim in (2, 3) and tensor.shape[-1] == heads * features:
        split = tensor.reshape(*tensor.shape[:-1], heads, features)
        added = ["batch axis added"] if split.ndim == 3 else []
        yield (split[None] if split.ndim == 3 else split), ["split into heads", *added]


def _as_rows(name: str, tensor: Tensor, expected: tuple[int, int, int]) -> tuple[Tensor, str | None]:
    """LSE or delta as [B, H, T]."""
    if tuple(tensor.shape) == expected:
        return tensor, None
    bare = tensor.squeeze(-1) if tensor.ndim == 4 else tensor
    choices = [(bare, "last axis dropped"), (bare[None], "batch axis added")]
    if bare.ndim == 3:
        choices.append((bare.transpose(1, 2), "heads and time swapped"))
    if bare.ndim == 2:
        choices.append((bare.T[None], "batch axis added, heads and time swapped"))
        if bare.shape[0] == expected[0] * expected[1]:
            choices.append((bare.reshape(*expected[:2], -1), "batch and heads split"))
    for candidate, words in choices:
        if tuple(candidate.shape) == expected:
            return candidate, f"{name} {list(tensor.shape)}: {words}"
    raise InputError(f"{name} must have shape [B, H, T] = {list(expected)}, got {list(tensor.shape)}")


def _causals_of(stated: object) -> tuple[Causal, ...]:
    """What a dump's own ``causal`` may mean: True leaves the alignment open. Raises InputError for other values."""
    if isinstance(stated, bool):
        return ("top-left", "bottom-right") if stated else ("none",)
    if stated in get_args(Causal):
        return (cast("Causal", stated),)
    raise InputError(f"causal must be true, false or one of {', '.join(get_args(Causal))}, got {stated!r}")
