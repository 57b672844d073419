"""A capture of linear attention (format 1.1, ``kind=linear``): what went into one call of an operator and came out.

A safetensors file with metadata ``format=attn-diag-capture``, ``format_version=1.1``, ``kind=linear``, ``operator`` (a
name of ``attn_diag.reference.LINEAR_OPERATORS``) and, where they are not the operator's own, ``scale``, ``l2norm`` and
``normalize`` (1 or 0). Tensors are those of flash-linear-attention's call, [B, T, H, D] or [B, T, H].
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from attn_diag.captures.files import write_atomically
from attn_diag.captures.loading import find_captures, read_file
from attn_diag.captures.metadata import Metadata
from attn_diag.captures.places import place
from attn_diag.captures.sources import DEFAULT_OBSERVATION, FLOATS
from attn_diag.captures.tensors import as_tensor
from attn_diag.errors import InputError
from attn_diag.reference.linear import LINEAR_OPERATORS, OF_HEADS, LinearCall, LinearOperator

KIND = "linear"
VERSION = "1.1"
LINEAR_OUTPUTS = ("o", "final_state")
# Other names of the same arguments, by the operator ("": all).
ALIASES = {
    "": {
        "gk": "g", "dht": "dfinal_state", "dh0": "dinitial_state", "ht": "final_state", "h0": "initial_state",
        "query": "q", "key": "k", "value": "v",
    },
    "rwkv7": {"r": "q", "w": "g", "dr": "dq", "dw": "dg"},
    "mamba2": {"C": "q", "B": "k", "x": "v", "dC": "dq", "dB": "dk", "dx": "dv", "hidden_states": "v"},
}  # fmt: skip
# What mamba_ssm's and Hugging Face's Mamba-2 call an initial state: theirs are [V, K], the last one too.
VALUES_FIRST = "initial_states"
_OPTIONS = ("scale", "l2norm", "normalize", "operator", "kind")


@dataclass(frozen=True)
class LinearCapture:
    """One call of an operator of linear attention.

    Raises InputError where tensors are missing or contradict each other, or the operator is not known.
    """

    operator: str
    """Its name, such as "kda"."""
    tensors: Mapping[str, Tensor]
    """Its arguments by name; ``do`` like o, ``dfinal_state`` like the state, ``cu_seqlens`` [N + 1] of packed
    sequences; and what was observed: ``o``, ``final_state``, ``dq`` and other gradients, of another kernel
    ``flash.o``."""
    scale: float | None = None
    """Of o; None: the operator's own."""
    l2norm: bool = False
    """Whether the operator normalises q and k itself (fla's ``use_qk_l2norm_in_kernel``)."""
    normalize: bool = False
    """Whether o is divided by q . sum k (fla's ``normalize`` of linear_attn)."""
    metadata: Metadata = field(default_factory=Metadata)
    """Layer, step, kernel and the like."""
    source: str = "memory"
    """Its file."""

    def __post_init__(self) -> None:
        if self.operator not in LINEAR_OPERATORS:
            raise InputError(f"operator must be one of {', '.join(LINEAR_OPERATORS)}, got {self.operator!r}")
        known = ALIASES[""] | ALIASES.get(self.operator, {})
        named: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            observation, dot, base = name.rpartition(".")
            named[f"{observation}{dot}{known.get(base, base)}"] = tensor
        object.__setattr__(self, "tensors", named)
        _Checked(self).check()

    @classmethod
    def from_tensors(cls, operator: str, tensors: Mapping[str, Any], **options: Any) -> LinearCapture:
        """A capture in memory.

        Args:
            operator: Its name.
            tensors: By name, of torch, NumPy or JAX; None is left out.
            **options: ``scale``, ``l2norm``, ``normalize``, and the fields of ``Metadata``.
        """
        given = {name: as_tensor(name, t).detach() for name, t in tensors.items() if t is not None}
        own = {name: options.pop(name) for name in ("scale", "l2norm", "normalize") if name in options}
        return cls(operator, given, metadata=Metadata(**options), **own)

    @property
    def setting(self) -> LinearOperator:
        """What the operator's arguments mean."""
        return LINEAR_OPERATORS[self.operator]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The operator's tensors, an initial state too."""
        names = (*self.setting.arguments, *self.setting.optional, "initial_state")
        return {name: self.tensors[name] for name in names if name in self.tensors}

    @property
    def call(self) -> LinearCall:
        """The call for ``linear_reference``."""
        starts = self.tensors.get("cu_seqlens")
        return LinearCall(
            self.setting, self.inputs, self.scale, self.l2norm, self.normalize,
            None if starts is None else [int(i) for i in starts],
        )  # fmt: skip

    @property
    def observations(self) -> dict[str, dict[str, Tensor]]:
        """Observed tensors by observation and output."""
        outputs = {*LINEAR_OUTPUTS, *(f"d{name}" for name in self.inputs)}
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            observation, _, output = name.rpartition(".")
            if output in outputs:
                found.setdefault(observation or DEFAULT_OBSERVATION, {})[output] = tensor
        return found

    def observation(self, name: str | None) -> tuple[str, dict[str, Tensor]]:
        """One observation, by default the only one: its name and tensors.

        Raises:
            InputError: There is none of that name, or ``name`` is None and there are several.
        """
        named = self.observations
        if not named:
            raise InputError(f"{self.source}: nothing that the operator returned was captured (o, dq, …)")
        if name is None and len(named) == 1:
            name = next(iter(named))
        if name not in named:
            raise InputError(f"{self.source}: name one of its observations: {', '.join(named)} (got {name})")
        return name, named[name]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as safetensors, complete or not at all, and return its path."""
        target, text = place(path), self.metadata.to_text(VERSION)
        for unused in ("layout", "causal", "lse_base", "scale"):
            text.pop(unused, None)
        text |= {"kind": KIND, "operator": self.operator}
        text |= {name: "1" for name in ("l2norm", "normalize") if getattr(self, name)}
        text |= {} if self.scale is None else {"scale": repr(self.scale)}
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        write_atomically(target, lambda temporary: save_file(tensors, temporary, text))
        return target


def is_linear(text: Mapping[str, str]) -> bool:
    """Whether a file's metadata are of a capture of linear attention."""
    return text.get("kind", "").strip().lower() == KIND


def linear_among(paths: Iterable[Path]) -> tuple[list[Path], int]:
    """Which files among paths are captures of linear attention, and how many others there are.

    Args:
        paths: Files, and directories of them; what cannot be read counts as another, for its reader to complain of.
    """
    linear: list[Path] = []
    others = 0
    for path in paths:
        try:
            files = find_captures([path])
        except InputError:
            others += 1
            continue
        for file in files:
            try:
                mine = file.suffix == ".safetensors" and is_linear(read_file(file)[1])
            except InputError:
                mine = False
            linear += [file] if mine else []
            others += not mine
    return linear, others


def load_linear(path: str | os.PathLike[str]) -> LinearCapture:
    """Open a capture of linear attention.

    Args:
        path: A file of capture format 1.1 with ``kind=linear``; also s3://, gs://, hf://.

    Returns:
        The capture; its tensors are as they were stored.

    Raises:
        InputError: The file is missing or damaged, is another capture, or its tensors do not fit each other.
    """
    sources, text = read_file(place(path))
    if not is_linear(text):
        raise InputError(f"{path}: not a capture of linear attention: expected metadata kind=linear and operator=…")
    if "operator" not in text:
        raise InputError(f"{path}: metadata 'operator' is missing: one of {', '.join(LINEAR_OPERATORS)}")
    try:
        scale = float(text["scale"]) if "scale" in text else None
    except ValueError:
        raise InputError(f"{path}: metadata scale={text['scale']!r} cannot be read as a number") from None
    switches = {name: text.get(name, "0").strip().lower() in ("1", "true") for name in ("l2norm", "normalize")}
    rest = {name: value for name, value in text.items() if name not in (*_OPTIONS, "use_qk_l2norm_in_kernel")}
    switches["l2norm"] |= text.get("use_qk_l2norm_in_kernel", "0").strip().lower() in ("1", "true")
    tensors = {name: source[...] for name, source in sources.items()}
    try:
        metadata = Metadata.parse(rest)
        return LinearCapture(text["operator"], tensors, scale, metadata=metadata, source=str(path), **switches)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


@dataclass(frozen=True)
class _Checked:
    """The shapes of a capture's tensors, checked."""

    capture: LinearCapture

    def check(self) -> None:
        capture, tensors = self.capture, self.capture.tensors
        for name in capture.setting.arguments:
            if name not in tensors:
                have = ", ".join(sorted(tensors)) or "no tensors"
                raise InputError(
                    f"tensor {name!r} is missing: {capture.operator} needs {self._needs()}; this has {have}"
                )
        if "g" in tensors and "g_gamma" in tensors:
            raise InputError("g and g_gamma are two decays; give one of them")
        if "g" in tensors and "g" not in (*capture.setting.arguments, *capture.setting.optional):
            raise InputError(f"{capture.operator} has no decay g; name the operator that has one (simple_gla, gla, …)")
        for name, tensor in tensors.items():
            if name != "cu_seqlens" and tensor.dtype not in FLOATS:
                raise InputError(f"{name} has dtype {tensor.dtype}; expected floating point")
            if name != "cu_seqlens" and 0 in tensor.shape:
                raise InputError(f"{name} is empty: shape {list(tensor.shape)}")
        scale = capture.scale
        if scale is not None and not 0 < abs(scale) < math.inf:
            raise InputError(f"scale must be a finite number other than 0, got {scale}")
        if capture.normalize and (capture.operator != "linear_attn" or "dfinal_state" in tensors):
            raise InputError("normalize is linear_attn's alone, and without a gradient of the last state")
        self._shapes()

    def _needs(self) -> str:
        return ", ".join((*self.capture.setting.arguments, *(f"[{n}]" for n in self.capture.setting.optional)))

    def _shapes(self) -> None:
        tensors = self.capture.tensors
        for name in "qkv":
            if tensors[name].ndim != 4:
                raise InputError(f"{name} must have shape [B, T, H, D], got {list(tensors[name].shape)}")
        q, v = tensors["q"], tensors["v"]
        (b, t, few, k), heads, values = q.shape, v.shape[2], v.shape[3]
        if heads % few:
            raise InputError(f"v has {heads} heads, which must be a multiple of q's and k's {few}")
        sequences = self._sequences(b, t)
        state, step = (sequences, heads, k, values), (b, t, heads)
        wanted: dict[str, tuple[tuple[int, ...], ...]] = {
            "q": ((b, t, few, k),), "k": ((b, t, few, k),), "v": ((b, t, heads, values),),
            "a": ((b, t, few, k), (b, t, heads, k)), "b": ((b, t, few, k), (b, t, heads, k)),
            "g": (step, (*step, k)), "beta": (step,), "dt": (step,),
            "initial_state": (state,), "final_state": (state,), "o": ((b, t, heads, values),),
        }  # fmt: skip
        wanted |= dict.fromkeys(OF_HEADS, ((heads,),))
        for name, tensor in tensors.items():
            base = name.rpartition(".")[2]
            shapes = wanted.get(base)
            if shapes is None and base[:1] == "d" and base[1:] in wanted:
                one = tensors.get(base[1:])
                shapes = (
                    (tuple(one.shape),) if one is not None and base[1:] in self.capture.inputs else wanted[base[1:]]
                )
            if shapes is not None and tuple(tensor.shape) not in shapes:
                expected = " or ".join(str(list(shape)) for shape in shapes)
                raise InputError(f"{name} must have shape {expected}, got {list(tensor.shape)}")

    def _sequences(self, batch: int, length: int) -> int:
        starts = self.capture.tensors.get("cu_seqlens")
        if starts is None:
            return batch
        if starts.dtype.is_floating_point or starts.dtype == torch.bool or starts.ndim != 1 or len(starts) < 2:
            raise InputError("cu_seqlens must be integers, [sequences + 1]")
        if batch != 1:
            raise InputError(f"with cu_seqlens the batch must be 1, got {batch}: lay the sequences one after the other")
        listed = [int(i) for i in starts]
        if listed[0] != 0 or listed[-1] != length or listed != sorted(listed):
            raise InputError(f"cu_seqlens must rise from 0 to T = {length}, got {listed[:4]} … {listed[-1]}")
        return len(listed) - 1
