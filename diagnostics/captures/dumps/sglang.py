"""SGLang's dumper: one file a tensor, whose name says of which step, rank and layer it is.

Followed: ``python/sglang/srt/debug_utils/dumper.py`` of sgl-project/sglang (``_Dumper.dump``, ``_dump_single``,
``_NonIntrusiveDumper``), in both of its shapes:

- 2025: ``sglang_dump_<time>/forward_pass_id=1___rank=0___name=attn_q___dump_index=7___layer_id=2.pt``, the bare tensor;
- 2026: ``dump_<time>/step=0___rank=0___dump_index=7___name=attn_q___recompute_status=disabled___layer_id=2.pt``,
  ``{"value": tensor, "meta": {…, "world_size": 2}}``; a gradient is ``name=grad__attn_q``, without the layer where
  only ``set_ctx`` stated it. Its hooks on whole models name ``non_intrusive__model.layers.2.self_attn.attn.inputs.0``,
  ``.1``, ``.2`` (q, k and v) and ``.output``.

Tensors have tokens first, [T, H, D] or [T, H * D]. Several requests packed into one forward pass, or keys in the KV
cache, show only in ``seq_lens`` and ``positions``, which are looked at where they were dumped. Ranks hold other heads
under tensor parallelism, whose offset no dump states: the converted files carry no ``run``, and are never merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.dumps.call import DumpedCall
from attn_diag.captures.dumps.names import Leaf, ambiguous, choose, refuse_packed, require_matching
from attn_diag.captures.dumps.scalars import shown
from attn_diag.captures.files import named_errors
from attn_diag.captures.pickles import unpickle
from attn_diag.errors import InputError

_LAYER = re.compile(r"(?:^|[._])layers?[._]?(\d+)")
# SGLang's module of attention, RadixAttention, as the hooks on whole models name it.
_RADIX = re.compile(r"\.attn(?:_mha)?\.(inputs\.0|inputs\.1|inputs\.2|output)$")
_HOOKED = "non_intrusive__"
_OF_RADIX = {"inputs.0": "q", "inputs.1": "k", "inputs.2": "v", "output": "o"}
_NO_CONTEXT = ("name", "dump_index", "recompute_status", "step", "forward_pass_id", "rank", "layer_id")
_LENGTHS = ("seq_lens", "extend_seq_lens")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class DumpFile:
    """A file of the dumper, by what its name says."""

    path: Path
    """The file."""
    name: str
    """What the caller called the tensor."""
    step: int
    """Number of the forward pass."""
    rank: int
    """Rank of the process."""
    index: int
    """Place in the order of the dump."""
    layer: int | None
    """The layer; None where it is not stated."""
    context: tuple[tuple[str, str], ...]
    """Tags of the caller's own."""

    @property
    def call(self) -> tuple[str, ...]:
        """What the tensors of one layer in one forward pass have in common."""
        tags = [f"{key}{value}" for key, value in self.context]
        layer = [] if self.layer is None else [f"layer{self.layer:02d}"]
        return (f"step{self.step:06d}", f"rank{self.rank}", *layer, *tags)

    def read(self) -> Tensor:
        """The tensor. Raises InputError for other values, and for a pickle that would run code."""
        content = self.content()
        value = content["value"] if isinstance(content, dict) and "value" in content else content
        if not isinstance(value, Tensor):
            raise InputError(f"{self.path}: expected a tensor, got {type(value).__name__}")
        return value.detach()

    def content(self) -> Any:
        """What the file holds: a tensor, or a dict of the value and what is said about it."""
        with named_errors(self.path):
            return unpickle(self.path)


def parse(path: Path) -> DumpFile | None:
    """What a file's name says; None for files that are not the dumper's, and for a recomputation's repetition."""
    tags: dict[str, str] = {}
    last = ""
    for part in path.name.removesuffix(".pt").split("___"):
        key, equals, value = part.partition("=")
        if equals and key.isidentifier():
            tags[key], last = value, key
        elif last:  # a value that holds the separator itself
            tags[last] += f"___{part}"
    step, rank, index = (tags.get(k, "") for k in ("step", "rank", "dump_index"))
    step = tags.get("forward_pass_id", step)
    if path.suffix != ".pt" or "name" not in tags or not all(n.isdecimal() for n in (step, rank, index)):
        return None
    if tags.get("recompute_status") == "recompute":
        return None
    found = _LAYER.search(tags["name"])
    layer = tags.get("layer_id") or (found and found[1])
    context = tuple((key, value) for key, value in tags.items() if key not in _NO_CONTEXT)
    number = int(layer) if layer and layer.isdecimal() else None
    return DumpFile(path, tags["name"], int(step), int(rank), int(index), number, context)


def groups_of(path: Path) -> list[list[DumpFile]]:
    """The files below ``path``, those of one forward pass on one rank together."""
    groups: dict[tuple[Path, int, int], list[DumpFile]] = {}
    for file in sorted(path.rglob("*.pt")):
        if (parsed := parse(file)) is not None:
            groups.setdefault((file.parent, parsed.step, parsed.rank), []).append(parsed)
    return [sorted(files, key=lambda f: f.index) for files in groups.values()]


def read_calls(files: Sequence[DumpFile], prefix: str, names: Mapping[str, str]) -> Iterator[DumpedCall]:
    """The attention calls of one forward pass.

    Args:
        files: Its files on one rank, see ``groups_of``.
        prefix: What the names of the files to be written begin with.
        names: As ``Wanted.names``.

    Raises:
        InputError: Requests are packed, or q, k and v cannot be told.
    """
    where = f"{files[0].path.parent}: step {files[0].step}, rank {files[0].rank}"
    _refuse_packed(files)
    by_call = _by_call(files)
    try:
        chosen = {call: choose(_leaves(members), names) for call, members in by_call.items()}
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    calls = {call: roles for call, roles in chosen.items() if {"q", "k", "v"} <= roles.keys()}
    if not calls:
        raise InputError(f"{where}: {ambiguous('cannot tell which tensors are q, k and v', _leaves(files))}")
    # Gradients whose layer the dump does not state: they are the only layer's, or nobody knows whose.
    adrift = {r: leaf for call, roles in chosen.items() if call not in calls for r, leaf in roles.items()}
    for call, roles in calls.items():
        left = [leaf.path for role, leaf in adrift.items() if role not in roles]
        members = by_call[call]
        if len(calls) == 1:
            roles = {**adrift, **roles}
            members = list(files)
        note = f"left out, of no known layer: {', '.join(left)}" if left and len(calls) > 1 else ""
        yield from _occurrences(where, prefix, members, roles, note)


def holds_call(files: Sequence[DumpFile], names: Mapping[str, str]) -> bool:
    """Whether there is an attention call in this forward pass, or something that cannot be told apart from one."""
    try:
        return any({"q", "k", "v"} <= choose(_leaves(members), names).keys() for members in _by_call(files).values())
    except InputError:
        return True


def _by_call(files: Sequence[DumpFile]) -> dict[tuple[str, ...], list[DumpFile]]:
    found: dict[tuple[str, ...], list[DumpFile]] = {}
    for file in files:
        found.setdefault(file.call, []).append(file)
    return found


def _leaves(files: Sequence[DumpFile]) -> list[Leaf]:
    """One leaf for every name."""
    first: dict[str, DumpFile] = {}
    for file in files:
        first.setdefault(file.name, file)
    return [Leaf(name, _last_part(name), file.call, file.read) for name, file in first.items()]


def _last_part(name: str) -> str:
    """The part of a dump's name that says what it is: "q" for "model.layers.0.self_attn.attn.inputs.0"."""
    gradient = "grad__" if name.startswith("grad__") else ""
    radix = _RADIX.search(name)
    if radix is not None:
        return gradient + _OF_RADIX[radix[1]]
    # Of other modules, the hooks' names say only that it is an input or an output.
    return "" if _HOOKED in name else gradient + name.removeprefix("grad__").rpartition(".")[2]


def _occurrences(
    where: str, prefix: str, files: Sequence[DumpFile], roles: Mapping[str, Leaf], note: str
) -> Iterator[DumpedCall]:
    """The calls of a group in which every name may occur several times, in the order of the forward pass."""
    found = {role: [file for file in files if file.name == leaf.path] for role, leaf in roles.items()}
    counts = {role: len(members) for role, members in found.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{roles[role].path} {count} times" for role, count in counts.items())
        raise InputError(f"{where}: cannot tell which belong to one call: {listed}; dump them with layer_id")
    number = counts["q"]
    for call in range(number):
        # The backward pass runs through the calls from the last to the first.
        of_call = {r: m[number - 1 - call if m[0].name.startswith("grad__") else call] for r, m in found.items()}
        first = of_call["q"]
        content = first.content()
        meta = content.get("meta") if isinstance(content, dict) else None
        size = meta.get("world_size") if isinstance(meta, dict) else None
        notes = ["converted from SGLang's dumper"]
        notes.append(", ".join(f"{role} from {file.path.name}" for role, file in of_call.items()))
        notes += ["tokens taken as one sequence"]
        if number > 1:
            notes.append(f"call {call} of {number} in this forward pass, by the order of the dump")
        extra = {"world_size": str(size)} if isinstance(size, int) and 0 < size < 2**31 else {}
        yield DumpedCall(
            name="_".join([*prefix.split(), *first.call, *([f"call{call}"] if number > 1 else [])]),
            source=f"{where}, {first.name}",
            tensors={role: file.read() for role, file in of_call.items()},
            stated={"layer": first.layer, "step": first.step, "rank": first.rank, "extra": extra},
            layouts=("BTHD",),
            causals=("top-left", "none", "bottom-right"),
            notes=(*notes, *([note] if note else [])),
        )


def _refuse_packed(files: Sequence[DumpFile]) -> None:
    """Raise InputError where the dump says that its tokens are not one whole sequence."""
    for file in files:
        last = file.name.rpartition(".")[2]
        if last in _LENGTHS and (count := file.read().numel()) > 1:
            raise InputError(
                f"{file.path}: packed (varlen) sequences are not supported: {count} requests in one forward pass; "
                "dump one request at a time"
            )
        if last == "positions":
            positions = file.read().flatten()
            if positions.dtype not in _INTEGERS:
                raise InputError(f"{file.path}: positions must be integers, got {shown(positions)}")
            if not torch.equal(positions, torch.arange(len(positions)).to(positions.dtype)):
                raise InputError(
                    f"{file.path}: the positions are not 0, 1, 2, …: several packed requests, or keys in the KV cache "
                    "that the dump does not hold; dump the prefill of one request with the prefix cache off"
                )
        if last.startswith("cu_seqlens") and file.read().numel() > 2:
            refuse_packed(last)


def require_matches(groups: Sequence[Sequence[DumpFile]], names: Mapping[str, str]) -> None:
    """Raise InputError for a mapping that no tensor of the whole dump matches."""
    require_matching(_leaves([file for files in groups for file in files]), names)
