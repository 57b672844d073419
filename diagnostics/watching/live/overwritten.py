"""What an attention function was given, held while it runs: some write into it, in torch's sight or behind its back.

What is overwritten is told as it was given: a copy takes its place. A call that puts its own keys into a cache is no
such case: what it left there is what it attends to. Which of the two it is, O says.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.lent import Lent, written_words
from attn_diag.errors import InputError
from attn_diag.head.output_fit import out_fit
from attn_diag.watching.live.axes import is_batched
from attn_diag.watching.live.call import AttentionCall, CallPlace
from attn_diag.watching.live.kernels import FusedOperator
from attn_diag.watching.live.operator_calls import OperatorCall
from attn_diag.watching.live.stream_capture import in_cuda_graph
from attn_diag.watching.live.whole_copies import unrepeated

Fields = dict[str, Any]
Given = Mapping[str, Any]
# One rounding that a function makes of its input beforehand leaves less.
_CLEARLY = 0.5
_CACHE = ("k", "v")
_LEFT_OUT = "the gradient of {} is left out: what autograd has is that of what the call left there"


class Held:
    """Arguments of one call, and copies of them.

    Attributes:
        lent: Whether the call may write into what it is given, held or not.
    """

    def __init__(self) -> None:
        self.lent = False
        self._lent = Lent()
        self._of: dict[str, tuple[Tensor, Tensor, int]] = {}
        self._looked = False

    def begin(
        self, function: Any, met: Iterable[tuple[Any, Any]], bound: Callable[[], Given], names: Sequence[str]
    ) -> None:
        """Hold arguments of a call that is about to run, where somebody wants it.

        Those who may not wait for a device do so until one call of the function was seen to write into nothing.

        Args:
            function: What runs.
            met: Who is told of it, and what each wants.
            bound: Its arguments.
            names: Which of them.
        """
        self.lent = True
        wanting = [observer for observer, one in met if one.wanted]
        if not wanting:
            return
        try:
            given = bound()
            if any(observer.may_wait for observer in wanting) or not (_on_device(given, names) and _is_sound(function)):
                self.hold(given, names)
        except Exception:  # out of memory, or arguments that the function refuses: it runs all the same
            self._of.clear()

    def hold(self, given: Given, names: Iterable[str]) -> None:
        """Copy these, where they are plain tensors."""
        for name in names:
            t = given.get(name)
            if type(t) is Tensor and t.layout is torch.strided and not (t.is_nested or is_batched(t)):
                once = unrepeated(t.detach())
                copy = once.clone()
                self._lent.out(name, copy, once)
                self._of[name] = t, copy.expand(t.shape), _version(t)

    def __bool__(self) -> bool:
        return bool(self._of)

    @property
    def written(self) -> dict[str, str]:
        """What holds other bits now, and how many; waits for the device."""
        if not self._looked:
            self._looked = True
            self._lent.look()
        return self._lent.written

    def without_freed(self, given: Given) -> Given:
        """Arguments, with copies of those whose memory the call has let go of, which are not looked at."""
        freed = [name for name, (own, copy, _) in self._of.items() if own.shape != copy.shape or _is_freed(own)]
        copies = self.as_given(freed)
        for name in freed:
            del self._of[name]
            self._lent.forget(name)
        return {**given, **copies} if freed else given

    @property
    def overwritten(self) -> bool:
        """Whether any is; of a device's what torch knows, as nobody waits for that."""
        on_device = any(own.device.type != "cpu" for own, _, _ in self._of.values())
        return any(_version(own) != was for own, _, was in self._of.values()) if on_device else bool(self.written)

    def as_given(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The copies of what is overwritten."""
        return {name: self._of[name][1] for name in (self.written if names is None else names) if name in self._of}

    def seen_by_torch(self, t: Tensor) -> bool:
        """Whether this is one of those that are overwritten, so that autograd knows of it."""
        ours = (self._of[name] for name in self.written)
        return any(t is own and _version(own) != version for own, _, version in ours)

    def is_o(self, name: str, o: Any) -> bool:
        """Whether O lies where this argument was."""
        own = self._of[name][0]
        return isinstance(o, Tensor) and o.device == own.device and o.data_ptr() == own.data_ptr()


@dataclass(frozen=True)
class _Reading:
    """A call as it was given, as it was left, or with the cache that it has written to."""

    fields: Fields
    error: float
    fits: bool

    @classmethod
    def of(cls, found: Fields) -> _Reading:
        known = {field.name for field in fields(AttentionCall)}
        stated: dict[str, Any] = {
            name: x.detach() if isinstance(x, Tensor) else x for name, x in found.items() if name in known
        }
        try:
            capture = AttentionCall(CallPlace(0, 0, None, 0, False), **stated).capture()
            fit = out_fit(capture, "observed", found["q"].device)
        except (InputError, RuntimeError):
            fit = None
        return cls(found, math.inf if fit is None else fit.error, fit is not None and fit.ok)


# Functions and operators of which a call was held, and wrote into nothing.
_sound = weakref.WeakSet[Any]()


def _version(t: Tensor) -> int:
    """How often torch has seen it written into; tensors of inference mode do not count that."""
    return 0 if t.is_inference() else t._version


def _is_freed(t: Tensor) -> bool:
    """Whether its storage is smaller than it is (``untyped_storage().resize_(0)``): to read it ends the process."""
    last = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    try:
        return t.numel() > 0 and t.untyped_storage().nbytes() < (last + 1) * t.element_size()
    except NotImplementedError:  # torch.func's tensors show none
        return False


def _on_device(given: Given, names: Iterable[str]) -> bool:
    return any(isinstance(t := given.get(name), Tensor) and t.device.type != "cpu" for name in names)


def _is_sound(function: Any) -> bool:
    try:
        return function in _sound
    except TypeError:  # not every callable can be remembered
        return False


def as_given(read: Callable[[Given], Fields | None], given: Given, held: Held, function: Any) -> Fields | None:
    """A call that has run.

    Args:
        read: Tells what it was from its arguments.
        given: These, as they are now.
        held: As they were.
        function: What ran; or the operator.

    Returns:
        Its fields; of what it has written into as it was given, with a note, and ``written`` where that is still its
        caller's. Refused where O is the attention of what it left there.
    """
    given = held.without_freed(given)
    found = read(given)
    if found is None or not (held.lent or held):
        return found
    found |= {"lent": True}
    if not held:
        return found
    if not (written := held.written):
        with suppress(TypeError):
            _sound.add(function)
        return found
    before = read({**given, **held.as_given()})
    assert before is not None
    before |= {"lent": True}
    changed = {name for name in ("q", *_CACHE, "mask") if _differ(found.get(name), before.get(name))}
    words = f"{_name(function)} {written_words(written).removeprefix('it ')}"
    left, was = _Reading.of(found), _Reading.of(before)
    rows = [_rows(found[name], before[name]) for name in _CACHE] if changed == {*_CACHE} else []
    # Of two tokens that are alike v may be the same, k is turned by its place.
    if rows and not bool((rows[1] & ~rows[0]).any()) and _is_cache(rows[0], left, was):
        count = int(rows[0].any(0).sum())
        return found | {"notes": [f"the call has put {count} of k's and v's keys there itself, as into a cache"]}
    o_there = any(held.is_o(name, found["o"]) for name in written)
    told: Fields = {} if o_there else {"written": words}
    if left.fits and not was.fits and left.error < _CLEARLY * was.error:
        names = " and ".join(written)
        why = f"{words}, and O is the attention of what it left in {names}, not of what it was given"
        return before | {"graph": found.get("graph", {}), "refused": found.get("refused") or why, **told}
    where = "O lies in the memory of an input" if o_there else words
    notes = [f"{where}: held is what it was given"]
    graph = dict(found.get("graph", {}))
    for name, (tensor, _) in list(graph.items()):
        if name != "do" and tensor.requires_grad and held.seen_by_torch(tensor):
            del graph[name]
            notes.append(_LEFT_OUT.format(name.removeprefix("d")))
    return before | {"graph": graph, "notes": notes, **told}


def _is_cache(rows: Tensor, left: _Reading, was: _Reading) -> bool:
    """Whether these keys, [B, Tk], of k and v alike were put there by the call; all of them if O says so."""
    return (left.fits and not was.fits) or (left.fits == was.fits and not bool(rows.all()))


def _name(function: Any) -> str:
    if isinstance(function, FusedOperator):
        return function.name
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{name}"


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and bool(_changed(a, b).any())


def _changed(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """Which keys of which sequence differ, [B, Tk]."""
    return _changed(a, b).any(3).any(1)


class HeldByOperators:
    """What operators that somebody has declared are given, held while they run.

    Args:
        looking: Those who look at this step.
    """

    def __init__(self, looking: Sequence[Any]) -> None:
        self._looking = looking

    def hold(self, operator: FusedOperator, named: Given, names: Sequence[str]) -> Held | None:
        """Copy these arguments, by our names; None where nothing is to be held.

        Args:
            operator: What is about to run.
            named: Its arguments by our names.
            names: Which.
        """
        if not self._looking or in_cuda_graph():
            return None
        waits = "do" in names or any(observer.may_wait for observer in self._looking)
        if not waits and _on_device(named, names) and _is_sound(operator):
            return None
        held = Held()
        held.hold(named, names)
        return held


def of_operator(call: OperatorCall) -> Fields:
    """The fields of an operator's call; of what it has written into as it was given."""
    if call.held is None:
        return call.fields()
    given = {name: call.given.get(name) for name in OPERANDS}

    def read(now: Given) -> Fields:
        return call.given_instead({id(given[n]): now[n] for n in OPERANDS if now[n] is not given[n]}).fields()

    held, call.held = call.held, None  # the copies are not kept for longer
    found = as_given(read, given, held, call.operator)
    assert found is not None
    return found


DO_OVERWRITTEN = "its backward writes into dO, which its caller still needs; dO is held as it was given"
OPERANDS = ("q", "k", "v", "mask")
