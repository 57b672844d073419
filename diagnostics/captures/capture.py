"""A capture: what went into one attention call and what came out of it, in memory or in a file (format 1)."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from attn_diag.captures.files import write_atomically
from attn_diag.captures.hardware import stored_profile
from attn_diag.captures.metadata import Metadata, refuse_unsupported
from attn_diag.captures.tensors import as_tensor
from attn_diag.errors import InputError
from attn_diag.printing import printable
from attn_diag.reference import format_of
from attn_diag.results.wording import plural

OBSERVED = ("o", "lse", "delta", "dq", "dk", "dv", "dq_pre")
DEFAULT_OBSERVATION = "observed"
INPUTS = ("q", "k", "v", "do", "x", "w_q", "mask", "q_positions", "q_descale", "k_descale", "v_descale")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, *FP8)


class TensorSource(Protocol):
    """A tensor that may still lie in a file: its shape and dtype are known, its parts are read by indexing."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        ...

    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(frozen=True, repr=False)
class Capture:
    """Inputs and observations of one attention layer.

    Raises InputError where tensors are missing, contradict each other, or are of a kind that is not supported.
    """

    tensors: Mapping[str, TensorSource]
    """Tensors, or lazy sources of them, by their names in capture format 1.

    ``q k v`` are required, [B, H, T, D] (or [B, T, H, D] with ``metadata.layout`` "BTHD"), k and v with Hk heads, Hq a
    multiple of Hk; FP8 ones need ``q_descale``, ``k_descale`` and ``v_descale``, [B, heads] or one number each. ``do``
    like o; ``x`` [B, Tq, C]; ``w_q`` [D * heads, C]; ``mask`` broadcastable to [B, H, Tq, Tk]; ``q_positions`` [Tq]
    (where other ranks have other rows, ``own_dk`` and ``own_dv`` are the sums of the rank's own keys, [B, Hk, Tq, D]).
    ``o dq dk dv`` are laid out like the inputs, so is ``dq_pre``, the gradient of the query projection's output (before
    RoPE and QK-norm); ``lse delta`` are [B, Hq, Tq] in either layout. A bare output belongs to the observation
    "observed", "flash.o" to "flash".
    """
    metadata: Metadata = field(default_factory=Metadata)
    """What it says about itself."""
    source: str = "memory"
    """Its file, or "memory"."""
    assumed: tuple[str, ...] = ()
    """What it does not state and was assumed, and how it was put together."""

    def __post_init__(self) -> None:
        _require_valid(self)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any], **metadata: Any) -> Capture:
        """A capture in memory.

        Where ``selftest --hardware`` has measured the GPU that q is on, its note becomes part of the metadata.

        Args:
            tensors: By name, as ``Capture.tensors``, of torch, NumPy or JAX; None is left out.
            **metadata: The fields of ``Metadata``.
        """
        given = {name: as_tensor(name, t).detach() for name, t in tensors.items() if t is not None}
        if "q" in given and "hardware" not in metadata:
            profile = stored_profile(given["q"].device)
            metadata["hardware"] = None if profile is None else profile.note()
        return cls(given, Metadata(**metadata))

    def __repr__(self) -> str:
        m, q = self.metadata, self.tensors["q"]
        parts = [f"{name} {value}" for name in ("step", "layer") if (value := getattr(m, name)) is not None]
        parts += [m.extra["module"]] if m.extra.get("module") else []
        parts += [f"call {m.extra['call']}"] if m.extra.get("call", "0") != "0" else []
        parts += [f"rank {m.rank}"] if m.rank else []
        parts += [f"q {m.layout} {list(q.shape)} {_short(q.dtype)}", " ".join(n for n in self.tensors if n != "q")]
        return printable(f"<Capture {', '.join(parts)}; {self.source}>")

    @property
    def batch(self) -> int:
        """B, the number of sequences."""
        return self.tensors["q"].shape[0]

    @property
    def q_heads(self) -> int:
        """Hq, the number of query heads."""
        return self.tensors["q"].shape[self._head_axis]

    @property
    def kv_heads(self) -> int:
        """Hk, the number of key and value heads."""
        return self.tensors["k"].shape[self._head_axis]

    @property
    def q_length(self) -> int:
        """Tq, the number of query rows."""
        return self.tensors["q"].shape[3 - self._head_axis]

    @property
    def k_length(self) -> int:
        """Tk, the number of keys."""
        return self.tensors["k"].shape[3 - self._head_axis]

    @property
    def head_dim(self) -> int:
        """D of q and k."""
        return self.tensors["q"].shape[3]

    @property
    def scale(self) -> float:
        """alpha: as stated, else 1/sqrt(D)."""
        return self.metadata.scale if self.metadata.scale is not None else self.head_dim**-0.5

    @property
    def observations(self) -> dict[str, tuple[str, ...]]:
        """The names of the observations, in a stable order, each with the outputs it holds."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            observation, _, output = name.rpartition(".")
            if output in OBSERVED:
                found.setdefault(observation or DEFAULT_OBSERVATION, []).append(output)
        return {name: tuple(sorted(outputs)) for name, outputs in sorted(found.items())}

    def key(self, observation: str, output: str) -> str:
        """The tensor name of an observation's output."""
        bare = observation == DEFAULT_OBSERVATION and output in self.tensors
        return output if bare else f"{observation}.{output}"

    def read(self, name: str, batch: int, head: int) -> Tensor | None:
        """One head of a tensor as stored.

        Args:
            name: As in ``tensors``; see ``key`` for an observation's output.
            batch: Index of the batch item.
            head: Index of the head in the capture (for k, v, dk and dv that of the key head).

        Returns:
            [T, D] ([T] for lse and delta); None where the capture lacks it.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if name.rpartition(".")[2] in ("lse", "delta") or self._head_axis == 1:
            return tensor[batch, head]
        return tensor[batch, :, head]

    def descale(self, name: str, batch: int, head: int) -> float:
        """The factor by which stored FP8 values of q, k or v are multiplied; 1 where none is stated."""
        factor = self.tensors.get(f"{name}_descale")
        if factor is None:
            return 1.0
        values = factor[...].double()
        return float(values if values.numel() == 1 else values[batch, head])

    def mask(self, batch: int, head: int) -> tuple[Tensor, tuple[int, int]] | None:
        """The mask of one head as stored, [Tq or 1, Tk or 1], and which (batch, head) of the tensor it is.

        A mask that all sequences or heads share is their number 0. None where there is no mask.
        """
        mask = self.tensors.get("mask")
        if mask is None:
            return None
        lead = (1,) * (4 - len(mask.shape)) + tuple(mask.shape)
        index = (batch if lead[0] > 1 else 0, head if lead[1] > 1 else 0)
        part = mask[index[4 - len(mask.shape) :]] if len(mask.shape) > 2 else mask[...]
        return part, index

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the capture as safetensors, complete or not at all, and return its path.

        Raises:
            InputError: The folder cannot be written, or the disk is full.
        """
        target = Path(path)
        tensors = {name: tensor[...].contiguous().cpu() for name, tensor in self.tensors.items()}
        # safetensors refuses tensors that share memory, as views of one buffer or k passed as v do.
        storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
        for name, tensor in tensors.items():
            if storages.count(tensor.untyped_storage().data_ptr()) > 1:
                tensors[name] = tensor.clone()
        try:
            write_atomically(target, lambda temporary: save_file(tensors, temporary, self.metadata.to_text()))
        except (SafetensorError, UnicodeEncodeError) as error:  # its own, also for a full disk; a name not in UTF-8
            raise InputError(f"cannot write {target}: {error}") from None
        return target

    @property
    def _head_axis(self) -> int:
        return 1 if self.metadata.layout == "BHTD" else 2


class Captures(list[Capture]):
    """A list that reads well at a prompt: one line a capture, at most 25 lines of 80 columns."""

    def __repr__(self) -> str:
        if not self:
            return "0 captures: nothing was captured yet"
        lines = [_one_line(repr(capture)) for capture in self[:_LISTED]]
        if len(self) > _LISTED:
            lines.append(f"… and {len(self) - _LISTED} more")
        lines.append("attn_diag.inspect_captures(…) judges them; [i].save(path) keeps one.")
        return "\n".join([f"{plural(len(self), 'capture')}:", *lines])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


_LISTED, _WIDTH = 20, 80


def _one_line(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _require_valid(c: Capture) -> None:
    """Raise InputError where the tensors of a capture do not fit each other, before any of them is read."""
    for name in c.tensors:
        observation, dot, output = name.rpartition(".")
        refuse_unsupported(output)
        if (
            output in OBSERVED
            and dot
            and (not observation or (observation == DEFAULT_OBSERVATION and output in c.tensors))
        ):
            raise InputError(f"{name!r} names no observation of its own; call it 'flash.{output}', or {output!r} alone")
    for name in ("q", "k", "v"):
        if name not in c.tensors:
            have = ", ".join(sorted(c.tensors)) or "no tensors"
            raise InputError(f"tensor '{name}' is missing: a capture needs q, k and v; this one has {have}")
    for name, tensor in c.tensors.items():
        _check_dtype(name, tensor.dtype)
    _check_input_dtypes(c)
    _check_inputs(c)
    _check_outputs(c)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    base = name.rpartition(".")[2]
    if base == "q_positions":
        if dtype.is_floating_point or dtype == torch.bool:
            raise InputError(f"q_positions must be integers, got {_short(dtype)}")
    elif base in INPUTS + OBSERVED and dtype not in FLOATS and not (base == "mask" and dtype == torch.bool):
        raise InputError(
            f"{name} has dtype {_short(dtype)}; expected floating point ({', '.join(map(_short, FLOATS))})"
        )


def _check_input_dtypes(c: Capture) -> None:
    dtypes = {name: c.tensors[name].dtype for name in ("q", "k", "v")}
    if len(set(dtypes.values())) > 1 and not all(dtype in FP8 for dtype in dtypes.values()):
        listed = ", ".join(f"{name} {_short(dtype)}" for name, dtype in dtypes.items())
        common = max(set(dtypes.values()), key=list(dtypes.values()).count)
        odd = [name for name, dtype in dtypes.items() if dtype != common]
        # BF16 beside FP16 is neither's promotion: an operation on both gives FP32.
        wider = len(odd) == 1 and {common, dtypes[odd[0]]} != {torch.bfloat16, torch.float16}
        wider = wider and format_of(dtypes[odd[0]]).precision > format_of(common).precision
        hint = f": {odd[0]} was silently promoted, look at the last operation that made it" if wider else ""
        raise InputError(f"q, k and v must have one dtype, got {listed}{hint}")
    for name, dtype in dtypes.items():
        if dtype in FP8 and f"{name}_descale" not in c.tensors:
            raise InputError(
                f"{name} is {_short(dtype)} without descale factors: add '{name}_descale' ([B, heads] or one number)"
            )


def _check_inputs(c: Capture) -> None:
    layout = c.metadata.layout
    for name in ("q", "k", "v"):
        shape = tuple(c.tensors[name].shape)
        if len(shape) != 4:
            raise InputError(f"{name} must have shape [{', '.join(layout)}], got {list(shape)}; add the missing axes")
        if 0 in shape:
            raise InputError(f"{name} is empty: shape {list(shape)}")
    _expect(c, "k", [c.batch, c.kv_heads, c.k_length, c.head_dim], "the B and D of q")
    _expect(c, "v", [c.batch, c.kv_heads, c.k_length, c.tensors["v"].shape[3]], "the B, H and T of k")
    if c.q_heads % c.kv_heads:
        raise InputError(f"q has {c.q_heads} heads and k has {c.kv_heads}: the first must be a multiple of the second")
    _expect(c, "do", [c.batch, c.q_heads, c.q_length, c.tensors["v"].shape[3]], "that of o")
    x = c.tensors.get("x")
    if x is not None and (len(x.shape) != 3 or tuple(x.shape[:2]) != (c.batch, c.q_length)):
        raise InputError(f"x must have shape [B, T, C] = [{c.batch}, {c.q_length}, C], got {list(x.shape)}")
    _check_w_q(c, None if x is None else x.shape[2])
    if (positions := c.tensors.get("q_positions")) is not None and tuple(positions.shape) != (c.q_length,):
        raise InputError(f"q_positions must have shape [{c.q_length}], one per query row, got {list(positions.shape)}")
    if (mask := c.tensors.get("mask")) is not None:
        full = (c.batch, c.q_heads, c.q_length, c.k_length)
        broadcasts = all(n in (1, m) for n, m in zip(mask.shape[::-1], full[::-1], strict=False))
        if not 2 <= len(mask.shape) <= 4 or not broadcasts:
            raise InputError(f"mask must broadcast to [B, H, Tq, Tk] = {list(full)}, got {list(mask.shape)}")
    for name in ("q", "k", "v"):
        if (factor := c.tensors.get(f"{name}_descale")) is not None:
            heads = c.q_heads if name == "q" else c.kv_heads
            if tuple(factor.shape) not in ((), (1,), (c.batch, heads)):
                raise InputError(f"{name}_descale must be one number or [{c.batch}, {heads}], got {list(factor.shape)}")


def _check_w_q(c: Capture, channels: int | None) -> None:
    w_q = c.tensors.get("w_q")
    if w_q is None:
        return
    if len(w_q.shape) != 2 or w_q.shape[0] % c.head_dim or (channels and w_q.shape[1] != channels):
        raise InputError(f"w_q must have shape [D * heads, C] with D = {c.head_dim}, got {list(w_q.shape)}")
    own, whole = c.q_heads * c.head_dim, (c.metadata.head_offset + c.q_heads) * c.head_dim
    if w_q.shape[0] != own and w_q.shape[0] < whole:
        raise InputError(
            f"w_q must have D * heads = {own} rows for this capture's {c.q_heads} heads, or those of the whole "
            f"model (at least {whole} with head_offset {c.metadata.head_offset}), got {w_q.shape[0]}; "
            "correct it or leave it out"
        )


def _check_outputs(c: Capture) -> None:
    dv = c.tensors["v"].shape[3]
    shapes = {
        "o": [c.batch, c.q_heads, c.q_length, dv],
        "dq": [c.batch, c.q_heads, c.q_length, c.head_dim],
        "dq_pre": [c.batch, c.q_heads, c.q_length, c.head_dim],
        "dk": [c.batch, c.kv_heads, c.k_length, c.head_dim],
        "dv": [c.batch, c.kv_heads, c.k_length, dv],
    }
    rows = [c.batch, c.q_heads, c.q_length]
    for name, tensor in c.tensors.items():
        output = name.rpartition(".")[2]
        if output in ("lse", "delta"):
            if list(tensor.shape) != rows:
                raise InputError(f"{name} must have shape [B, H, T] = {rows}, got {list(tensor.shape)}")
        elif output in shapes:
            _expect(c, name, shapes[output], "that of q, or of k for dk and dv")
    gradients = {name.rpartition(".")[2] for name in c.tensors} & {"dq", "dk", "dv"}
    if gradients and "do" not in c.tensors:
        raise InputError("gradients (dq, dk or dv) are there but 'do' is missing: the reference backward needs dO")


def _expect(c: Capture, name: str, bhtd: list[int], why: str) -> None:
    if name not in c.tensors:
        return
    layout = c.metadata.layout
    expected = bhtd if layout == "BHTD" else [bhtd[0], bhtd[2], bhtd[1], bhtd[3]]
    if list(c.tensors[name].shape) != expected:
        raise InputError(
            f"{name} must have shape [{', '.join(layout)}] = {expected} ({why}), got {list(c.tensors[name].shape)}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
