"""The arrangements: other ways to make one call, and which parts of the outputs must then agree."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.invariance import layouts
from attn_diag.testing.invariance.ruling import REPEATS, SAME_CALL, Change, calls_again
from attn_diag.testing.stated import HIDING_CAP, hides_appended, sees_ahead
from attn_diag.testing.target import Place, Target

# What must not matter is made so much larger than what matters; no power of two, which a scale may absorb.
LOUD = 37.0
# Padded lengths are multiples of a tile of every kernel we know.
TILE = 128
# The score of a key that must not count: exp(-300) is 0 in fp32.
_HIDDEN_SCORE = -300.0
_PLACES = "where fewer rows stand among the keys is not stated (a causal mask, top-left or bottom-right, does)"
_OF_HEADS = "every head has a slope or a sink of its own"

# (quantity, tensor) -> the part that is compared, in the order of the other call; None: not compared.
Part = Callable[[str, Tensor], Tensor | None]


def whole(_: str, x: Tensor) -> Tensor:
    """All of it."""
    return x


@dataclass(frozen=True)
class Path:
    """One way to make the call."""

    name: str
    """In a few words."""
    inputs: CaseInputs
    """What the kernel is called with."""
    align: Part = whole
    """Of this call's outputs."""
    select: Part = whole
    """Of the outputs of the call that it is compared with."""
    against: CaseInputs | None = None
    """The inputs of that call; None: the one that all begin with."""
    terms: int = 1
    """How many numbers each of dk and dv's compared ones is the sum of, which a kernel may round one by one."""
    target: Target | None = None
    """What is called, where that is not the kernel as it was given."""
    place: Place = layouts.as_it_is
    """Where the inputs are put."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """What the call runs in."""
    gradients: bool = True
    """Whether its gradients are asked for, where the inputs have a dO; False: it runs without autograd."""
    before: CaseInputs | None = None
    """A call that is made before it."""
    after: CaseInputs | None = None
    """A call that is made after it, before its outputs are looked at."""
    further: tuple[CaseInputs, ...] = ()
    """Calls whose gradients are added to its own; then nothing else is compared."""


@dataclass(frozen=True)
class Setting:
    """What arrangements are made of."""

    base: CaseInputs
    """The call that all begin with; as many key heads as query heads."""
    target: Target
    """The kernel."""
    options: Callable[[str, int], Target] | None
    """(option, value) -> the kernel with that option; None where it has no option that is known."""
    generator: torch.Generator
    """For what replaces what must not matter."""
    repeats: int = REPEATS
    """How often the same call is made again."""

    def changed(self, change: Callable[[Tensor], Tensor], also: Tensor | None = None) -> CaseInputs:
        """The call with every tensor changed alike; ``also``: with this dO."""
        b = self.base
        do = None if b.do is None else change(b.do)
        return replace(b, q=change(b.q), k=change(b.k), v=change(b.v), do=do if also is None else also)

    def loud(self, like: Tensor) -> Tensor:
        """Other numbers, larger ones."""
        drawn = torch.randn(like.shape, generator=self.generator)
        return (LOUD * drawn).to(like.dtype)


@dataclass(frozen=True)
class Arrangement(Change):
    """One thing that should not matter, and how a call shows it."""

    paths: Callable[[Setting], list[Path] | str]
    """The ways to make the call; or why there are none."""


def _of_rows(change: Callable[[Tensor], Tensor]) -> Part:
    """Only what has a row for every query."""
    return lambda name, x: None if name in ("dk", "dv") else change(x)


def _every(change: Callable[[Tensor], Tensor]) -> Part:
    return lambda _, x: change(x)


def _uninitialised(s: Setting) -> list[Path] | str:
    if s.target.recipe is not None:
        return "an emulation writes all of its memory"
    return [Path("new memory holds NaN", s.base, around=filled_memory)]


@contextmanager
def filled_memory() -> Iterator[None]:
    """Every tensor that torch makes without writing to it holds NaN."""
    mode, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _again(s: Setting) -> list[Path]:
    return [Path(name, s.base) for name in calls_again(s.repeats)]


def _other_calls(s: Setting) -> list[Path]:
    other = s.changed(s.loud)
    more = TILE - s.base.q.shape[2] % TILE
    longer = s.changed(lambda x: s.loud(torch.nn.functional.pad(x, [0, 0, 0, more])))
    return [
        Path("after one of large numbers", s.base, before=other),
        Path(f"after one of {s.base.q.shape[2] + more} rows", s.base, before=longer),
        Path("its outputs kept during another", s.base, after=other),
    ]


def _future(s: Setting) -> list[Path] | str:
    if sees_ahead(s.base):
        return "every row sees every key" if s.base.window is None else "rows see keys later than their own"
    length, found = s.base.q.shape[2], []
    # Amid a tile, behind the last one's first rows, and where one begins: a mask may be wrong there alone.
    edge = length // 2 // TILE * TILE or next((n for n in (64, 32, 16) if n < length), length - 1)
    for cut in dict.fromkeys((length // 2, length - 1, edge)):
        later = torch.arange(length)[:, None] >= cut
        # Rows after the cut give the keys before it a gradient, which may differ: theirs is none.
        do = None if s.base.do is None else s.base.do.masked_fill(later, 0.0)
        first = replace(s.base, do=do)
        new = s.changed(lambda x, later=later: torch.where(later, s.loud(x), x), do)  # type: ignore[misc]
        part = _every(lambda x, cut=cut: x[:, :, :cut])  # type: ignore[misc]
        found.append(Path(f"tokens from {cut} on", new, part, part, first))
    return found


def _other_items(s: Setting) -> list[Path] | str:
    if s.base.q.shape[0] < 2:
        return "there is one batch item"
    found = []
    for kept in (0, s.base.q.shape[0] - 1):
        part = _every(lambda x, kept=kept: x[kept : kept + 1])  # type: ignore[misc]
        for words, fill in (("large", s.loud), ("NaN", lambda x: torch.full_like(x, torch.nan))):

            def changed(x: Tensor, kept: int = kept, fill: Callable[[Tensor], Tensor] = fill) -> Tensor:
                return torch.cat([fill(x[:kept]), x[kept : kept + 1], fill(x[kept + 1 :])])

            found.append(Path(f"all but item {kept} are {words}", s.changed(changed), part, part))
    return found


def _other_heads(s: Setting) -> list[Path] | str:
    if s.base.q.shape[1] < 2:
        return "there is one head"
    first = _every(lambda x: x[:, :1])
    return [Path("others are large", s.changed(lambda x: torch.cat([x[:, :1], s.loud(x[:, 1:])], 1)), first, first)]


def _gqa(s: Setting) -> list[Path] | str:
    heads, found = s.base.q.shape[1], []
    for kept in sorted({heads // 2, 1} - {0, heads}, reverse=True):
        group = heads // kept
        few = replace(s.base, k=s.base.k[:, :kept], v=s.base.v[:, :kept])
        many = replace(few, k=few.k.repeat_interleave(group, 1), v=few.v.repeat_interleave(group, 1))

        def select(name: str, x: Tensor, kept: int = kept, group: int = group) -> Tensor:
            # Query heads that share a key head add their gradients.
            return x.double().view(len(x), kept, group, *x.shape[2:]).sum(2) if name in ("dk", "dv") else x

        found.append(
            Path(f"{kept} key {'head' if kept == 1 else 'heads'} for {heads}", few, whole, select, many, group)
        )
    return found or "there is one head"


def _memory(s: Setting) -> list[Path] | str:
    if s.target.recipe is not None:
        return "an emulation has no memory layout"
    return [Path("NaN behind every tensor", s.base, place=layouts.before_nan)]


def _padding(s: Setting) -> list[Path] | str:
    length, base = s.base.q.shape[2], s.base
    if not hides_appended(base):
        return f"no score hides a key below a softcap of {HIDING_CAP:g}, or with slopes below 0"
    more = TILE - length % TILE
    if sees_ahead(base):
        # Rows are such that they do not see keys with one large number.
        q, k = base.q.clone(), base.k.clone()
        q[..., 0], k[..., 0] = 4.0, 0.0
        base = replace(base, q=q, k=k)

    def padded(loud: bool) -> CaseInputs:
        def longer(x: Tensor) -> Tensor:
            new = torch.zeros_like(x[:, :, :1]).expand(-1, -1, more, -1)
            return torch.cat([x, s.loud(new) if loud else new], 2)

        k = longer(base.k)
        if sees_ahead(base):
            k[:, :, length:] = 0.0
            k[:, :, length:, 0] = _HIDDEN_SCORE / (4 * base.scale)
        q = longer(base.q)
        if sees_ahead(base):
            q[..., 0] = 4.0
        zeros = torch.zeros_like(base.q[:, :, :1]).expand(-1, -1, more, -1)
        do = None if base.do is None else torch.cat([base.do, zeros], 2)
        return replace(base, q=q, k=k, v=longer(base.v), do=do)

    part = _every(lambda x: x[:, :, :length])
    return [
        Path(f"{words}, to {length + more}", padded(loud), part, whole, base)
        for words, loud in (("zeros", False), ("large numbers", True))
    ]


def _permuted_heads(s: Setting) -> list[Path] | str:
    if s.base.q.shape[1] < 2:
        return "there is one head"
    if s.base.heads_differ:
        return _OF_HEADS
    return [Path("in reverse", s.changed(lambda x: x.flip(1)), _every(lambda x: x.flip(1)))]


def _permuted_items(s: Setting) -> list[Path] | str:
    if s.base.q.shape[0] < 2:
        return "there is one batch item"
    return [Path("in reverse", s.changed(lambda x: x.flip(0)), _every(lambda x: x.flip(0)))]


def _position(s: Setting) -> list[Path] | str:
    if (count := s.base.q.shape[0]) < 2:
        return "there is one batch item"
    copies = s.changed(lambda x: x[:1].repeat(count, 1, 1, 1))
    return [Path(f"item 0 in all {count} places", copies, whole, _every(lambda x: x[:1].expand(count, *x.shape[1:])))]


def _batch_size(s: Setting) -> list[Path]:
    count, heads = s.base.q.shape[:2]
    found = []
    if count > 1:
        found.append(Path("1 item", s.changed(lambda x: x[:1]), whole, _every(lambda x: x[:1])))
    twice: Callable[[Tensor], Tensor] = lambda x: torch.cat([x, x.flip(0)])  # noqa: E731 - used for both calls
    found.append(Path(f"{2 * count} items", s.changed(twice), whole, _every(twice)))
    if heads > 1 and not s.base.heads_differ:
        found.append(Path("1 item, 1 head", s.changed(lambda x: x[:1, :1]), whole, _every(lambda x: x[:1, :1])))
    return found


def _solo_row(s: Setting) -> list[Path] | str:
    if s.base.causal == "top-left":
        return "a single row sees the first key alone (mask top-left)"
    if s.base.needs_places:
        return _PLACES
    return [_chunk(s, row, row + 1, f"row {row} with its keys") for row in _places(s.base.q.shape[2])]


def _chunks(s: Setting) -> list[Path] | str:
    if s.base.needs_places:
        return _PLACES
    length = s.base.q.shape[2]
    half = length // 2
    found = [_chunk(s, 0, half, f"rows 0-{half - 1}")]
    if s.base.causal != "top-left":
        found.append(_chunk(s, half, length, f"rows {half}-{length - 1}"))
    return found


def _chunk(s: Setting, start: int, stop: int, words: str) -> Path:
    """Some rows, with the keys that they see."""
    base, keys = s.base, s.base.k.shape[2] if sees_ahead(s.base) else stop
    do = None if base.do is None else base.do[:, :, start:stop]
    inputs = replace(base, q=base.q[:, :, start:stop], k=base.k[:, :, :keys], v=base.v[:, :, :keys], do=do)
    return Path(words, inputs, _of_rows(lambda x: x), _of_rows(lambda x: x[:, :, start:stop]))


def _places(length: int) -> Sequence[int]:
    return list(dict.fromkeys((0, length // 2, length - 1)))


def _strides(s: Setting) -> list[Path] | str:
    if s.target.recipe is not None:
        return "an emulation has no memory layout"
    found = [Path(name, s.base, place=place) for name, place in layouts.PLACES.items()]
    if s.base.do is not None:
        # As the backward of a sum makes it.
        ones = replace(s.base, do=torch.ones_like(s.base.do))
        found.append(Path("dO one number, all strides 0", ones, against=ones, place=layouts.one_number))
    return found


def _parts(s: Setting) -> list[Path] | str:
    if s.base.do is None:
        return "no gradients are compared"
    do, length = s.base.do, s.base.q.shape[2]
    late = torch.arange(length)[:, None] >= length // 2
    early, later = (replace(s.base, do=do.masked_fill(hidden, 0.0)) for hidden in (late, ~late))
    return [Path("of the first and the second half", early, further=(later,), terms=2)]


def _without_autograd(s: Setting) -> list[Path] | str:
    if s.target.recipe is not None:
        return "an emulation knows no autograd"
    if s.base.do is None:
        return "no gradients are compared"
    return [Path("torch.no_grad()", s.base, gradients=False)]


def _splits(s: Setting) -> list[Path] | str:
    if s.options is None:
        return "no option num_splits"
    return [Path(f"num_splits = {n}", s.base, target=s.options("num_splits", n)) for n in (1, 2, 4)]


def _compiled(s: Setting) -> list[Path] | str:
    if (fn := s.target.fn) is None:
        return "an emulation is not compiled"

    def compiled(q: Tensor, k: Tensor, v: Tensor, case: CaseInputs) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._dynamo.reset()
            return torch.compile(lambda q, k, v: fn(q, k, v, case), dynamic=False)(q, k, v)

    return [Path("torch.compile", s.base, target=replace(s.target, fn=compiled))]


# What moves the work and not what an output depends on: a kernel may choose its order of adding by it, if it says so.
MOVES = ("run-to-run", "head-order", "batch-position", "item-order", "batch-size")
# The likeliest cause first: what the same call changes differs everywhere.
ARRANGEMENTS = {
    a.name: a
    for a in (
        Arrangement(SAME_CALL.name, SAME_CALL.shows, SAME_CALL.fault, SAME_CALL.promise, _again),
        Arrangement("other-calls", "calls before and after it", "keeps something from call to call", "bits",
                    _other_calls),
        Arrangement("uninitialised", "what memory holds that was never written", "uses memory that it never wrote",
                    "rounding", _uninitialised),
        Arrangement("future-token", "tokens that come later", "lets later tokens change earlier rows", "bits", _future),
        Arrangement("other-items", "the other batch items' contents", "lets batch items change each other", "bits",
                    _other_items),
        Arrangement("other-heads", "the other heads' contents", "lets heads change each other", "bits", _other_heads),
        Arrangement("gqa", "fewer key heads, instead of repeated ones",
                    "maps query heads to the wrong key heads, or adds up dK and dV over the wrong ones",
                    "rounding", _gqa),
        Arrangement("strides", "how the tensors lie in memory", "misreads a layout", "rounding", _strides),
        Arrangement("memory", "what lies behind the tensors", "reads beyond its tensors", "rounding", _memory),
        Arrangement("padding", "more rows and keys that no old row sees", "lets padding count", "rounding", _padding),
        Arrangement("head-order", "the order of the heads", "treats heads by their place", "bits", _permuted_heads),
        Arrangement("batch-position", "the place in the batch", "treats batch items by their place", "bits", _position),
        Arrangement("item-order", "the order of the batch items", "treats batch items by their place", "bits",
                    _permuted_items),
        Arrangement("batch-size", "how many items and heads there are", "depends on the batch size", "bits",
                    _batch_size),
        Arrangement("solo-row", "a row alone", "treats a row alone in another way", "rounding", _solo_row),
        Arrangement("prefill", "rows in chunks", "treats a chunk of the rows in another way", "rounding", _chunks),
        Arrangement("accumulation", "gradients of parts of the rows, added up", "makes other gradients of a part of dO",
                    "rounding", _parts),
        Arrangement("no-grad", "a call without autograd", "computes something else without autograd", "rounding",
                    _without_autograd),
        Arrangement("splits", "the number of splits of the keys", "loses something between splits", "rounding",
                    _splits),
        Arrangement("compiled", "torch.compile instead of eager", "is miscompiled", "rounding", _compiled),
    )
}  # fmt: skip
