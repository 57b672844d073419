"""Other ways to make one call of linear attention, and which parts of the outputs must then agree."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.captures.linear import LinearCapture
from attn_diag.reference.linear import OF_HEADS
from attn_diag.testing.invariance import layouts
from attn_diag.testing.invariance.arrangements import LOUD, TILE, filled_memory
from attn_diag.testing.invariance.ruling import REPEATS, SAME_CALL, Change, calls_again
from attn_diag.testing.linear.function import LinearFunction
from attn_diag.testing.target import MisfitError, Place

Outputs = dict[str, Tensor]
# (quantity, tensor) -> the part that is compared, in the order of the other call; None: not compared.
Part = Callable[[str, Tensor], Tensor | None]
STATES = ("final_state", "initial_state")
_SIZES = (16, 32, 64, 128)


def _whole(_: str, x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class LinearPath:
    """One way to make the call."""

    name: str
    """In a few words."""
    capture: LinearCapture
    """What the function is called with."""
    align: Part = _whole
    """Of this call's outputs."""
    select: Part = _whole
    """Of the outputs of the call that it is compared with."""
    against: LinearCapture | None = None
    """The inputs of that call; None: the one that all begin with."""
    function: LinearFunction | None = None
    """What is called, where that is not the function as it was given."""
    place: Place = layouts.as_it_is
    """Where the inputs are put."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """What the call runs in."""
    gradients: bool = True
    """Whether its gradients are asked for."""
    before: LinearCapture | None = None
    """A call that is made before it."""
    steps: tuple[int, ...] = ()
    """Instead of one call so many, of these lengths, each from the state that the one before left."""


@dataclass(frozen=True)
class LinearSetting:
    """What arrangements are made of."""

    base: LinearCapture
    """The call that all begin with."""
    function: LinearFunction
    """What is called."""
    recurrent: LinearFunction | None
    """Another function of the operator, for the same mathematics."""
    generator: torch.Generator
    """For what replaces what must not matter."""
    repeats: int = REPEATS
    """How often the same call is made again."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, T, H."""
        b, t, h, _ = self.base.tensors["v"].shape
        return b, t, h

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> LinearCapture:
        """The call with every tensor changed but those of one number a head."""
        tensors = {n: x if n in OF_HEADS else change(n, x) for n, x in self.base.tensors.items()}
        return replace(self.base, tensors=tensors)

    def loud(self, name: str, x: Tensor) -> Tensor:
        """Other numbers; larger ones where that keeps the state finite."""
        drawn = torch.randn(x.shape, generator=self.generator)
        if name in ("g", "dt", "beta", "a", "b", "k"):
            return x[torch.randperm(len(x), generator=self.generator)].flip(1) if x.ndim > 1 else x
        return (LOUD * drawn).to(x.dtype)


@dataclass(frozen=True)
class LinearArrangement(Change):
    """One thing that should not matter, and how a call shows it."""

    paths: Callable[[LinearSetting], list[LinearPath] | str]
    """The ways to make the call; or why there are none."""


def _items(keep: Callable[[Tensor], Tensor]) -> Part:
    """The batch items; what is summed over them is not compared."""
    return lambda name, x: None if name.removeprefix("d") in OF_HEADS else keep(x)


def _rows(stop: int) -> Part:
    """The first steps, of what has steps."""

    def part(name: str, x: Tensor) -> Tensor | None:
        own = name.removeprefix("d")
        return None if own in STATES or own in OF_HEADS else x[:, :stop]

    return part


def _again(s: LinearSetting) -> list[LinearPath]:
    return [LinearPath(name, s.base) for name in calls_again(s.repeats)]


def _other_calls(s: LinearSetting) -> list[LinearPath]:
    return [LinearPath("after one of other numbers", s.base, before=s.changed(s.loud))]


def _uninitialised(s: LinearSetting) -> list[LinearPath] | str:
    if s.function.fn is None:
        return "an emulation writes all of its memory"
    return [LinearPath("new memory holds NaN", s.base, around=filled_memory)]


def _future(s: LinearSetting) -> list[LinearPath]:
    length, found = s.sizes[1], []
    kept = {n: x for n, x in s.base.tensors.items() if n != "dfinal_state"}
    for cut in dict.fromkeys((length // 2, length - 1)):

        def later(name: str, x: Tensor, cut: int = cut) -> Tensor:
            # Later rows give earlier keys a gradient, which may differ: theirs is none.
            own = torch.zeros_like(x) if name == "do" else s.loud(name, x)
            return x if name in STATES else torch.cat([x[:, :cut], own[:, cut:]], 1)

        first = {
            n: torch.cat([x[:, :cut], torch.zeros_like(x[:, cut:])], 1) if n == "do" else x for n, x in kept.items()
        }
        new = {n: x if n in OF_HEADS else later(n, x) for n, x in kept.items()}
        against, other = replace(s.base, tensors=first), replace(s.base, tensors=new)
        found.append(LinearPath(f"tokens from {cut} on", other, _rows(cut), _rows(cut), against))
    return found


def _other_items(s: LinearSetting) -> list[LinearPath] | str:
    count = s.sizes[0]
    if count < 2:
        return "there is one batch item"
    found = []
    for kept in (0, count - 1):

        def changed(name: str, x: Tensor, kept: int = kept) -> Tensor:
            other = s.loud(name, x)
            return torch.cat([other[:kept], x[kept : kept + 1], other[kept + 1 :]])

        part = _items(lambda x, kept=kept: x[kept : kept + 1])  # type: ignore[misc]
        found.append(LinearPath(f"all but item {kept} are others", s.changed(changed), part, part))
    return found


def _by_heads(name: str, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A change along the heads, which are the second dimension of states."""
    own = name.removeprefix("d")
    dim = 0 if own in OF_HEADS else 1 if own in STATES else 2
    return change(x.movedim(dim, 0)).movedim(0, dim)


def _other_heads(s: LinearSetting) -> list[LinearPath] | str:
    if s.sizes[2] < 2:
        return "there is one head"

    def changed(name: str, x: Tensor) -> Tensor:
        other = s.loud(name, x).movedim(1 if name in STATES or name == "dfinal_state" else 2, 0)
        return _by_heads(name, x, lambda y: torch.cat([y[:1], other[1:]]))

    part: Part = lambda name, x: _by_heads(name, x, lambda y: y[:1])  # noqa: E731 - used for both calls
    return [LinearPath("others are others", s.changed(changed), part, part)]


def _head_order(s: LinearSetting) -> list[LinearPath] | str:
    if s.sizes[2] < 2:
        return "there is one head"
    if s.base.operator == "retention" and "g_gamma" not in s.base.tensors:
        return "the decay is that of the head's place"
    flipped = {n: _by_heads(n, x, lambda y: y.flip(0)) for n, x in s.base.tensors.items()}
    part: Part = lambda name, x: _by_heads(name, x, lambda y: y.flip(0))  # noqa: E731 - one expression
    return [LinearPath("in reverse", replace(s.base, tensors=flipped), part)]


def _item_order(s: LinearSetting) -> list[LinearPath] | str:
    if s.sizes[0] < 2:
        return "there is one batch item"
    return [
        LinearPath("in reverse", s.changed(lambda _, x: x.flip(0)), _items(lambda x: x.flip(0)), _items(lambda x: x))
    ]


def _batch_size(s: LinearSetting) -> list[LinearPath]:
    count, found = s.sizes[0], []
    if count > 1:
        first = _items(lambda x: x[:1])
        found.append(LinearPath("1 item", s.changed(lambda _, x: x[:1]), first, first))
    twice: Callable[[Tensor], Tensor] = lambda x: torch.cat([x, x.flip(0)])  # noqa: E731 - used for both calls
    found.append(LinearPath(f"{2 * count} items", s.changed(lambda _, x: twice(x)), _items(lambda x: x), _items(twice)))
    return found


def _shared(s: LinearSetting) -> list[LinearPath] | str:
    heads = s.sizes[2]
    if heads < 2:
        return "there is one head"
    if s.base.operator in ("rwkv7", "dplr", "iplr"):
        return "a and b are given a head"
    # Each key head twice: of one alone no mapping would be wrong.
    few = {
        n: x if n in ("q", "k") else _by_heads(n, x, lambda y: torch.cat([y, y.flip(0)]))
        for n, x in s.base.tensors.items()
    }
    many = {n: x.repeat_interleave(2, 2) if n in ("q", "k") else x for n, x in few.items()}

    def select(name: str, x: Tensor) -> Tensor:
        # Heads that share a key head add their gradients.
        return x.double().view(*x.shape[:2], -1, 2, x.shape[3]).sum(3) if name in ("dq", "dk") else x

    one, other = replace(s.base, tensors=few), replace(s.base, tensors=many)
    return [LinearPath(f"{heads} key heads for {2 * heads}", one, _whole, select, other)]


def _strides(s: LinearSetting) -> list[LinearPath] | str:
    if s.function.fn is None:
        return "an emulation has no memory layout"
    return [LinearPath(name, s.base, place=place) for name, place in layouts.PLACES.items()]


def _memory(s: LinearSetting) -> list[LinearPath] | str:
    if s.function.fn is None:
        return "an emulation has no memory layout"
    return [LinearPath("NaN behind every tensor", s.base, place=layouts.before_nan)]


def _padding(s: LinearSetting) -> list[LinearPath]:
    length = s.sizes[1]
    more = TILE - length % TILE
    kept = {n: x for n, x in s.base.tensors.items() if n != "dfinal_state"}

    def longer(name: str, x: Tensor) -> Tensor:
        if name in STATES or name in OF_HEADS:
            return x
        new = torch.zeros_like(x[:, :1]).expand(-1, more, *x.shape[2:])
        return torch.cat([x, new], 1)

    padded = replace(s.base, tensors={n: longer(n, x) for n, x in kept.items()})
    return [
        LinearPath(f"zeros, to {length + more}", padded, _rows(length), _rows(length), replace(s.base, tensors=kept))
    ]


def _packed(s: LinearSetting) -> list[LinearPath] | str:
    if not s.function.takes_packed:
        return "no argument cu_seqlens"
    count, length, _ = s.sizes
    # The items one after the other, each with its own state.
    ends = torch.arange(count + 1, dtype=torch.int32) * length

    def joined(name: str, x: Tensor) -> Tensor:
        own = name.removeprefix("d")
        return x if own in STATES or own in OF_HEADS else x.flatten(0, 1)[None]

    tensors = {n: joined(n, x) for n, x in s.base.tensors.items()}
    packed = replace(s.base, tensors={**tensors, "cu_seqlens": ends})
    return [LinearPath(f"{count} sequences in one", packed, _whole, joined)]


def _chunk_size(s: LinearSetting) -> list[LinearPath] | str:
    if s.function.fn is not None and s.function.chunk_option is None:
        return "no option chunk_size"
    return [LinearPath(f"in chunks of {n}", s.base, function=s.function.with_chunk(n)) for n in _SIZES]


def _handed_on(s: LinearSetting, lengths: tuple[int, ...], words: str) -> list[LinearPath] | str:
    if not s.function.takes("initial_state"):
        return "no initial state can be given"
    part: Part = lambda name, x: x if name in ("o", "final_state") else None  # noqa: E731 - used for both calls
    return [LinearPath(words, s.base, part, part, gradients=False, steps=lengths)]


def _prefill(s: LinearSetting) -> list[LinearPath] | str:
    length = s.sizes[1]
    first = length // 2 + 1
    return _handed_on(s, (first, length - first), f"steps 0-{first - 1}, then the rest")


def _solo_row(s: LinearSetting) -> list[LinearPath] | str:
    return _handed_on(s, (1,) * s.sizes[1], "every step by itself, as in decoding")


def _recurrent(s: LinearSetting) -> list[LinearPath] | str:
    if s.recurrent is None:
        return "no other function was named (--recurrent)"
    return [LinearPath(s.recurrent.name, s.base, function=s.recurrent)]


def _without_autograd(s: LinearSetting) -> list[LinearPath] | str:
    if s.function.fn is None or "do" not in s.base.tensors:
        return "no gradients are compared"
    return [LinearPath("torch.no_grad()", s.base, gradients=False)]


def _compiled(s: LinearSetting) -> list[LinearPath] | str:
    if (fn := s.function.fn) is None:
        return "an emulation is not compiled"

    def compiled(*args: object, **given: object) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._dynamo.reset()
            return torch.compile(fn, dynamic=False)(*args, **given)

    compiled.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
    return [LinearPath("torch.compile", s.base, function=replace(s.function, fn=compiled))]


def handed_on(function: LinearFunction, path: LinearPath) -> tuple[Outputs, Mapping[str, str]]:
    """o and the last state of calls that follow each other."""
    outs, start, state = [], 0, path.capture.tensors.get("initial_state")
    for length in path.steps:
        tensors = {
            n: x if n in OF_HEADS else x[:, start : start + length]
            for n, x in path.capture.inputs.items()
            if n not in STATES
        }
        tensors |= {} if state is None else {"initial_state": state}
        found, _ = function.run(replace(path.capture, tensors=tensors), gradients=False)
        if "final_state" not in found:
            raise MisfitError("it returns no last state, which the next call begins with")
        outs.append(found["o"])
        state, start = found["final_state"].float(), start + length
    assert state is not None
    return {"o": torch.cat(outs, 1), "final_state": state}, {}


# The likeliest cause first: what the same call changes differs everywhere.
LINEAR_ARRANGEMENTS = {
    a.name: a
    for a in (
        LinearArrangement(SAME_CALL.name, SAME_CALL.shows, SAME_CALL.fault, SAME_CALL.promise, _again),
        LinearArrangement("other-calls", "calls before it", "keeps something from call to call", "bits", _other_calls),
        LinearArrangement("uninitialised", "what memory holds that was never written", "uses memory it never wrote",
                          "rounding", _uninitialised),
        LinearArrangement("future-token", "tokens that come later", "lets later tokens change earlier rows", "bits",
                          _future),
        LinearArrangement("other-items", "the other batch items' contents", "lets batch items change each other",
                          "bits", _other_items),
        LinearArrangement("other-heads", "the other heads' contents", "lets heads change each other", "bits",
                          _other_heads),
        LinearArrangement("gqa", "fewer key heads, instead of repeated ones", "maps heads to the wrong key heads",
                          "rounding", _shared),
        LinearArrangement("strides", "how the tensors lie in memory", "misreads a layout", "rounding", _strides),
        LinearArrangement("memory", "what lies behind the tensors", "reads beyond its tensors", "rounding", _memory),
        LinearArrangement("padding", "more steps behind the last", "lets padding count", "rounding", _padding),
        LinearArrangement("head-order", "the order of the heads", "treats heads by their place", "bits", _head_order),
        LinearArrangement("item-order", "the order of the batch items", "treats batch items by their place", "bits",
                          _item_order),
        LinearArrangement("batch-size", "how many items there are", "depends on the batch size", "bits", _batch_size),
        LinearArrangement("packed", "sequences in one, instead of a batch", "lets packed sequences change each other",
                          "rounding", _packed),
        LinearArrangement("chunk-size", "the size of the chunks", "computes something else in other chunks", "rounding",
                          _chunk_size),
        # Before those that are called without autograd themselves.
        LinearArrangement("no-grad", "a call without autograd", "computes something else without autograd", "rounding",
                          _without_autograd),
        LinearArrangement("prefill", "two calls, the state handed on", "does not go on from a state as it left it",
                          "rounding", _prefill),
        LinearArrangement("solo-row", "a call a step, the state handed on", "decodes something else than it trains",
                          "rounding", _solo_row),
        LinearArrangement("recurrent", "the operator's other function", "is not the other function's mathematics",
                          "rounding", _recurrent),
        LinearArrangement("compiled", "torch.compile instead of eager", "is miscompiled", "rounding", _compiled),
    )
}  # fmt: skip
