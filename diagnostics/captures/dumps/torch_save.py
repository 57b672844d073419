"""Plain ``torch.save`` files: dicts of tensors, nested as people nest them, and lists of such dicts or of tensors.

Tensors are told by their names (``names.role_of``), calls by the numbers on the way to a tensor: ``layers.3.q``,
``[3]["q"]``, ``{"q": [t0, t1, …]}`` and ``layer3_q`` are all of call 3. Where numbers do not tell calls apart, the
dict that a tensor lies in does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from attn_diag.captures.dumps.call import DumpedCall
from attn_diag.captures.dumps.names import Leaf, ambiguous, choose, refuse_packed, require_matching, role_of
from attn_diag.captures.dumps.scalars import scalar
from attn_diag.captures.files import named_errors
from attn_diag.captures.loading import dense, require_regular_file
from attn_diag.captures.metadata import refuse_unsupported
from attn_diag.captures.pickles import Odd, unpickle
from attn_diag.errors import InputError

SUFFIXES = (".pt", ".pth")
# Numbers of layers and steps; longer ones are none.
_LAYER = re.compile(r"(?:^|[._])(?:layers?|blocks?|h)[._]?(\d{1,9})(?!\d)")
_STEP = re.compile(r"(?:^|[._])(?:steps?|iter(?:ation)?)[._]?(\d{1,9})(?!\d)")
_PLACE = re.compile(r"(?!.*(?:step|iter|call|rank|batch|sample|seq))(?:.*\.)?(\d{1,9})", re.IGNORECASE)
_NUMBERED = re.compile(r"(.*[a-z])_?(\d+)", re.IGNORECASE)
_LISTED = 8
# Letters of a call's numbers in the name of its file.
_LONGEST = 80
_BY_POSITION = ("q", "k", "v", "o")
# What may be shared by all calls of a file.
_SHARED = ("mask", "q_positions")
_SCALARS = {
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "causal": ("causal", "is_causal"),
    "window": ("window", "window_size", "sliding_window"),
    "softcap": ("softcap", "soft_cap", "logits_soft_cap"),
    "layer": ("layer", "layer_idx", "layer_id"),
    "step": ("step", "iteration"),
    "layout": ("layout",),
    "lse_base": ("lse_base",),
    "head_offset": ("head_offset",),
}


@dataclass(frozen=True)
class _Scalar:
    """A number or word that a dump states: one of ``_SCALARS``, in the dict at ``folder``."""

    key: str
    value: Any
    folder: tuple[str, ...]

    def is_of(self, leaf: Leaf, others: list[Leaf]) -> bool:
        """Whether it describes the call of ``leaf`` (its q) rather than one of ``others``."""
        if self._is_above(leaf):
            return True
        numbers = _numbers(self.folder)
        return numbers == leaf.call[: len(numbers)] and not any(self._is_above(other) for other in others)

    def _is_above(self, leaf: Leaf) -> bool:
        return tuple(leaf.path.split("."))[: len(self.folder)] == self.folder


def read_calls(path: Path, name: str, names: Mapping[str, str]) -> Iterator[DumpedCall]:
    """The attention calls in a file.

    Args:
        path: The file.
        name: What the names of the files to be written begin with.
        names: As ``Wanted.names``.

    Raises:
        InputError: The pickle would run code, or q, k and v cannot be told.
    """
    require_regular_file(path)
    with named_errors(path):
        content = unpickle(path)
        leaves, scalars = _walk(content)
        calls = _calls(leaves, names)
        for call, chosen in calls.items():
            others = [roles["q"] for key, roles in calls.items() if key != call]
            stated = _stated([scalar for scalar in scalars if scalar.is_of(chosen["q"], others)])
            yield _dumped(path, name, call, chosen, stated, [] if others else leaves)


def _dumped(
    path: Path,
    name: str,
    call: tuple[str, ...],
    chosen: Mapping[str, Leaf],
    stated: dict[str, Any],
    leaves: list[Leaf],
) -> DumpedCall:
    """``leaves``: all that the file holds, where this is its only call."""
    where = ".".join(call)
    of_q = chosen["q"].path
    notes = [f"converted from torch.save file {path.name}"]
    notes += [", ".join(f"{role} from {leaf.path}" for role, leaf in chosen.items() if role != leaf.path)]
    notes += [f"{key} stated by the file" for key in stated]
    for key, pattern in (("layer", _LAYER), ("step", _STEP)):
        if key not in stated and (found := pattern.search(of_q)) is not None:
            stated[key] = int(found[1])
    if "layer" not in stated and len(call) == 1 and (place := _PLACE.fullmatch(call[0])) is not None:
        stated["layer"] = int(place[1])
        notes.append(f"layer={place[1]} assumed: the call's number in the file")
    used = {leaf.path for leaf in chosen.values()}
    if left := [leaf.path for leaf in leaves if leaf.path not in used]:
        more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
        notes.append(f"left out: {', '.join(left[:_LISTED])}{more}")
    return DumpedCall(
        name=name if leaves else f"{name}_{re.sub(r'[^A-Za-z0-9._-]', '_', where)[:_LONGEST] or 'call'}",
        source=str(path) if leaves else f"{path}[{where}]",
        tensors={role: leaf.read() for role, leaf in chosen.items()},
        stated=stated,
        notes=tuple(note for note in notes if note),
    )


def _walk(content: object) -> tuple[list[Leaf], list[_Scalar]]:
    """Every tensor in ``content``, and the numbers and words that describe calls."""
    leaves: list[Leaf] = []
    scalars: list[_Scalar] = []

    def visit(value: object, parts: tuple[str, ...]) -> None:
        small = not isinstance(value, Tensor) or value.numel() <= 2
        stated = small and not isinstance(value, Odd | dict | None) and _is_scalar(parts)
        if isinstance(value, Tensor | Odd):
            if not stated:
                leaves.append(_leaf(value, parts))
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item, (*parts, *_split(str(key))))
        elif isinstance(value, list | tuple) and not _is_scalar(parts):
            names = _positions(value) if not any(role_of(part) for part in parts) else None
            for number, item in enumerate(value):
                visit(item, (*parts, names[number] if names else str(number)))
        elif value and parts:  # dropout_p=0.0 asks for nothing
            refuse_unsupported(parts[-1])
        if stated:
            key = next(key for key, aliases in _SCALARS.items() if parts[-1].lower() in aliases)
            scalars.append(_Scalar(key, value, parts[:-1]))

    visit(content, ())
    return leaves, scalars


def _split(key: str) -> list[str]:
    """A dict key as steps of a path: at dots, and before the number of "q_3"."""
    steps: list[str] = []
    for part in key.split("."):
        numbered = _NUMBERED.fullmatch(part)
        exact = numbered is not None and (role_of(numbered[1]) or ("", False))[1]
        steps += [numbered[1], numbered[2]] if numbered is not None and exact else [part]
    return steps


def _is_scalar(parts: tuple[str, ...]) -> bool:
    return bool(parts) and any(parts[-1].lower() in aliases for aliases in _SCALARS.values())


def _positions(items: list[Any] | tuple[Any, ...]) -> tuple[str, ...] | None:
    """The names of the tensors of (q, k, v) and (q, k, v, o); None for other sequences."""
    fits = len(items) in (3, 4) and all(isinstance(t, Tensor) and t.ndim >= 2 for t in items)
    return _BY_POSITION if fits else None


def _leaf(value: Tensor | Odd, parts: tuple[str, ...]) -> Leaf:
    path = ".".join(parts) or "tensor"
    name = next((part for part in reversed(parts) if not part.isdecimal()), "")
    refuse_packed(name)
    return Leaf(path, name, _numbers(parts), partial(dense, value, path))


def _numbers(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The steps of a path that hold a number: what tells calls apart."""
    found: list[str] = []
    for before, part in zip(("", *parts), parts, strict=False):
        if part.isdecimal():
            found.append(part if not before or before.isdecimal() or role_of(before) else f"{before}.{part}")
        elif stem := re.match(r".*\d", part, re.DOTALL):
            found.append(stem[0])
    return tuple(found)


def _folder(leaf: Leaf) -> tuple[str, ...]:
    """The dict that a tensor lies in."""
    parts = leaf.path.split(".")
    place = len(parts) - 1 - parts[::-1].index(leaf.name) if leaf.name in parts else len(parts) - 1
    return (*parts[:place], *parts[place + 1 :])


def _calls(leaves: list[Leaf], names: Mapping[str, str]) -> dict[tuple[str, ...], dict[str, Leaf]]:
    """The tensors of every call. Raises InputError where none has q, k and v, or two tensors claim one place."""
    require_matching(leaves, names)
    try:
        calls = _grouped(leaves, names, lambda leaf: leaf.call)
    except InputError as by_number:
        try:
            calls = _grouped(leaves, names, _folder)
        except InputError:
            raise by_number from None
    if not calls:
        raise ambiguous("cannot tell which tensors are q, k and v", leaves)
    return calls


def _grouped(
    leaves: list[Leaf], names: Mapping[str, str], key: Callable[[Leaf], tuple[str, ...]]
) -> dict[tuple[str, ...], dict[str, Leaf]]:
    groups: dict[tuple[str, ...], list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(key(leaf), []).append(leaf)
    chosen = {call: choose(members, names) for call, members in groups.items()}
    calls = {call: roles for call, roles in chosen.items() if {"q", "k", "v"} <= roles.keys()}
    for call, roles in chosen.items():
        if call not in calls and "q" in roles:
            raise ambiguous(f"q is there without k or v ({'.'.join(call) or 'at the top'})", list(roles.values()))
        for own_call, own in calls.items():
            above = call == own_call[: len(call)]
            own.update({r: leaf for r, leaf in roles.items() if above and r in _SHARED and r not in own})
    return calls


def _stated(scalars: list[_Scalar]) -> dict[str, Any]:
    """Metadata keywords from what a file states. Raises InputError for values that cannot be read."""
    stated: dict[str, Any] = {}
    for one in sorted(scalars, key=lambda s: len(s.folder)):
        stated[one.key] = scalar(one.key, one.value, ".".join((*one.folder, one.key)))
    return {key: value for key, value in stated.items() if value is not None}
