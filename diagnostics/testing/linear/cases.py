"""The suite of ``check_linear``: an operator's inputs by name, drawn from a seed on the CPU; and those of captures."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from attn_diag.captures.linear import LinearCapture
from attn_diag.errors import InputError
from attn_diag.reference.linear import LINEAR_OPERATORS
from attn_diag.testing.case_inputs import fingerprint
from attn_diag.testing.linear.calls import IN_KERNEL, How, InKernel
from attn_diag.testing.linear.function import LinearFunction
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded
from attn_diag.testing.names import choose_names
from attn_diag.testing.target import MisfitError

# Two sequences, off every chunk, so that the last of each is not full.
SHAPE = (2, 200, 2, 32)
# T of a function that takes whole chunks alone.
WHOLE_CHUNKS = 256
# Lengths of packed sequences: of one step, of a chunk exactly, of all but one step of it, and the rest.
_PACKED = (1, 64, 63, 72)
_STATE_SIZE = 0.3


@dataclass(frozen=True)
class LinearCase:
    """A case of the suite."""

    kind: str
    """Of ``linear_inputs``."""
    decays: bool = False
    """It is about decays: only for operators that are given them."""
    state: bool = False
    """With an initial state, and a gradient of the last."""
    packed: bool = False
    """Sequences of several lengths in one, each with a state."""
    shared: bool = False
    """Two heads of v to each of two of q and k."""
    length: int | None = None
    """T, where it is not the suite's."""
    norm: float | None = None
    """About how long q and k are, where the function is to normalise them; None: it is not."""
    scale: float | None = None
    """Of o, where it is not the operator's own."""
    wide: bool = False
    """Twice as many features in v as in k."""
    skip: bool = False
    """With D, for operators that have it."""
    in_kernel: bool = False
    """The function makes the gates itself."""
    defaults: bool = False
    """Nothing is given that it has a default for."""


CASES: dict[str, LinearCase] = {
    "normal": LinearCase("normal"),
    "long": LinearCase(LONG, decays=True),
    "no-decay": LinearCase("no_decay", decays=True),
    "strong-decay": LinearCase("tiny_decay", decays=True),
    "peaked": LinearCase("peaked"),
    "repeated": LinearCase("repeated"),
    "initial-state": LinearCase(LONG, state=True),
    "packed": LinearCase(LONG, state=True, packed=True),
    "shared-heads": LinearCase(LONG, shared=True),
    "short": LinearCase(LONG, state=True, length=5),
    "packed-alone": LinearCase(LONG, packed=True),
    "wide-values": LinearCase(LONG, wide=True),
    "scale": LinearCase("normal", scale=0.3),
    "defaults": LinearCase("normal", defaults=True),
    "l2norm": LinearCase(LONG, norm=1.0),
    # Where the 1e-6 that is added to a row's square counts.
    "l2norm-eps": LinearCase(LONG, norm=2e-3),
    "gates-in-kernel": LinearCase("normal", in_kernel=True),
    "skip": LinearCase(LONG, skip=True),
}
"""By name; the first are about numbers, the last about how a call is made, which a function may not take."""
# What a function may refuse and still be one of the operator.
MAY_REFUSE = tuple(CASES)[tuple(CASES).index("initial-state") :]
# Whose functions normalise q and k on request.
_NORMALISING = ("delta_rule", "gated_delta_rule", "kda")
# Whose functions have fewer heads of q and k than of v; others may read what is not there.
_SHARING = ("gated_delta_rule", "kda", "mamba2")
# Of a row's norm, in powers of two, about the case's.
_NORMS = 3.0


def choose(names: Iterable[str] | None, operator: str) -> list[str]:
    """These cases in the suite's order; for None all of the operator. Raises InputError for unknown ones."""
    if names is not None:
        return choose_names("case", names, CASES)
    setting = LINEAR_OPERATORS[operator]
    taken = (*setting.arguments, *setting.optional)
    return [
        name for name, case in CASES.items()
        if ("g" in taken or not case.decays) and ("D" in taken or not case.skip)
        and (case.norm is None or operator in _NORMALISING) and (not case.in_kernel or operator in IN_KERNEL)
        and (not case.shared or operator in _SHARING)
    ]  # fmt: skip


def draw(name: str, operator: str, seed: int, *, dtype: torch.dtype, shape: Sequence[int] = SHAPE) -> LinearCapture:
    """A case's inputs, and dO; every (seed, name) has draws of its own.

    Args:
        name: One of ``CASES``.
        operator: Whose arguments.
        seed: Where the draws start.
        dtype: Of q, k, v and what else a training run keeps in its inputs' format.
        shape: B, T, H, D, with D that of q, k and v.
    """
    case = CASES[name]
    b, t, h, d = shape
    t = sum(_PACKED) if case.packed else case.length or t
    b = 1 if case.packed else b
    own = zlib.crc32(f"{name} {seed}".encode())
    make = torch.Generator().manual_seed(own)
    h, values = 4 if case.shared else h, 2 * d if case.wide else d
    drawn = linear_inputs(operator, (b, t, h, d, values), own, kind=case.kind)
    if case.shared:
        drawn |= {x: drawn[x][:, :, ::2] for x in ("q", "k")}
    if case.norm is not None:
        for x in ("q", "k"):
            sizes = case.norm * torch.exp2((torch.rand(b, t, h, 1, generator=make) * 2 - 1) * _NORMS)
            drawn[x] = drawn[x] / drawn[x].norm(dim=-1, keepdim=True) * sizes
    tensors: dict[str, Tensor] = rounded(drawn, dtype)
    tensors["do"] = torch.randn(b, t, h, values, generator=make).to(dtype)
    if case.state:
        count = len(_PACKED) if case.packed else b
        tensors["initial_state"] = torch.randn(count, h, d, values, generator=make) * _STATE_SIZE
        tensors["dfinal_state"] = torch.randn(count, h, d, values, generator=make)
    if case.packed:
        tensors["cu_seqlens"] = torch.tensor([0, *_PACKED]).cumsum(0).to(torch.int32)
    if case.skip:
        tensors["D"] = torch.randn(h, generator=make)
    if (made := how(name, operator, seed, shape).in_kernel) is not None:
        tensors |= made.gates()
    return LinearCapture(operator, tensors, case.scale, l2norm=case.norm is not None, source=name)


def how(name: str, operator: str, seed: int, shape: Sequence[int] = SHAPE) -> How:
    """How a case's function is called, beside its tensors.

    Args:
        name, operator, seed, shape: As for ``draw``.
    """
    case, made = CASES[name], None
    if case.in_kernel:
        b, t, h, d = shape
        make = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed} gates".encode()))
        made = InKernel.draw(operator, (b, t, h, d), make)
    return How(made, case.defaults)


def usable_length(
    function: LinearFunction, operator: str, dtype: torch.dtype, head_dim: int, seed: int
) -> tuple[int, list[str]]:
    """T of the suite, and a note: whole chunks where the function raises on others and not on these.

    Args:
        function: What is asked.
        operator, dtype, seed: As for ``draw``.
        head_dim: D.
    """
    said = []
    for length in (SHAPE[1], WHOLE_CHUNKS):
        try:
            shape = (1, length, SHAPE[2], head_dim)
            function.run(draw("normal", operator, seed, dtype=dtype, shape=shape), gradients=False)
        except MisfitError as error:
            said.append(str(error))
            continue
        note = f"T is {length} in place of {SHAPE[1]}, which the function does not take: {said[0]}" if said else ""
        return length, [note] if note else []
    return SHAPE[1], []


def of_captures(captures: Sequence[LinearCapture], operator: str) -> list[LinearCapture]:
    """The inputs of captures, named by their files (by their paths where several files have one name).

    Raises:
        InputError: One is of another operator.
    """
    names = [Path(c.source).name for c in captures]
    if len(set(names)) < len(names):
        names = [c.source for c in captures]
    for capture in captures:
        if capture.operator != operator:
            raise InputError(f"{capture.source} is of {capture.operator}, and the function of {operator}: leave it out")
    return [replace(inputs_alone(c), source=name) for name, c in zip(names, captures, strict=True)]


def inputs_alone(capture: LinearCapture) -> LinearCapture:
    """A capture without what its kernels returned."""
    kept = {*capture.inputs, "do", "dfinal_state", "cu_seqlens"}
    return replace(capture, tensors={name: x for name, x in capture.tensors.items() if name in kept})


def with_outputs(capture: LinearCapture, outputs: dict[str, Tensor]) -> LinearCapture:
    """A capture of the call with what was returned; no gradient of a last state that did not come."""
    tensors = dict(capture.tensors)
    if "final_state" not in outputs:
        tensors.pop("dfinal_state", None)
    return replace(capture, tensors={**tensors, **outputs})


def fingerprint_of(capture: LinearCapture) -> str:
    """SHA-256 of the inputs' bits, shapes and dtypes, of the operator, its scale and switches."""
    also = f"{capture.operator} {capture.call.used_scale!r} {capture.l2norm} {capture.normalize}"
    return fingerprint(dict(capture.tensors), also)
