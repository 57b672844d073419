"""How the parts of an output projection are added up over ranks: what this rank gave, and what it got.

The output projection of an attention call is the module with a weight whose input is that call's O, bit for bit. While
it runs, with the hooks that were put on it before (DTensor's RowwiseParallel has its all-reduce in one), torch's
collectives are seen as operators: the first sum over ranks is its sum. Nothing else is exchanged, and no bit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from attn_diag.captures.sums import BIAS, BY, DTYPE, MODULE, OUTPUT, PART, RANKS, TOTAL, TURNED, W_O
from attn_diag.watching.live.call import AttentionCall, Part
from attn_diag.watching.live.linear_layers import clean, is_run_compiled, own_weight, unhooked

# Tensors that run collectives when they are unwrapped, which is left to them.
_UNWRAPPED = ("DTensor", "AsyncCollectiveTensor")
_ALL_REDUCE, _SCATTER = "all-reduce", "reduce-scatter"
# Of every operator that adds up over ranks: what it is, and whether it writes into what it is given.
_SUMS = {
    "c10d::allreduce_": (_ALL_REDUCE, True),
    "c10d::_reduce_scatter_base_": (_SCATTER, True),
    "_c10d_functional::all_reduce": (_ALL_REDUCE, False),
    "_c10d_functional::all_reduce_": (_ALL_REDUCE, False),
    "_c10d_functional::reduce_scatter_tensor": (_SCATTER, False),
}
# Which of an in-place operator's arguments says whether it runs beside what comes next.
_ASYNC = 4
_WAIT = "_c10d_functional::wait_tensor"

_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)

Take = Callable[[AttentionCall, dict[str, Tensor], dict[str, str]], None]


def clones(call: AttentionCall, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of what is kept of a call's output projection: the same items of the batch; and all of its weight."""
    items = part.items(call)
    return {
        name: t.clone() if name == W_O or len(items) == t.shape[0] else t[items].contiguous()
        for name, t in tensors.items()
    }


@dataclass
class _SeenSum:
    """One sum over ranks."""

    how: str
    part: Tensor
    """A copy of what was given."""
    ranks: tuple[int, ...]
    backend: str
    arriving: Tensor
    """Where the result comes."""
    total: Tensor | None = None
    """A copy of the result, once it is there."""

    def arrived(self) -> None:
        """Keep the result, before somebody writes over it."""
        if self.total is None:
            self.total = self.arriving.detach().clone()


class _Reductions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the first sum over ranks; passes all operators on as they came."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: _SeenSum | None = None
        self._several = False
        self._failed: Exception | None = None
        self._functional = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have compiled code run as it would."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ in _UNWRAPPED for kind in types):
            return NotImplemented
        name = func.name().partition(".")[0]
        seen = self._guarded(self._before, name, args)
        result = func(*args, **(kwargs or {}))
        self._guarded(self._behind, name, args, seen, result)
        return result

    def _guarded(self, what: Callable[..., Any], *args: Any) -> Any:
        """What fails here is told of behind the module, and not raised in it."""
        try:
            return what(*args)
        except Exception as error:
            self._failed = error
            return None

    def _before(self, name: str, args: Sequence[Any]) -> _SeenSum | None:
        if self.found is not None and not self._functional:
            self.found.arrived()  # who calls another operator has waited
        how, in_place = _SUMS.get(name, ("", False))
        seen = _read(how, args, in_place=in_place) if how else None
        self._several |= seen is not None and self.found is not None
        return seen if self.found is None else None

    def _behind(self, name: str, args: Sequence[Any], seen: _SeenSum | None, result: Any) -> None:
        found = self.found
        if seen is not None:
            self.found, self._functional = seen, not _SUMS[name][1]
            if self._functional:
                seen.arriving = result
        elif found is not None and name == _WAIT and args[0].data_ptr() == found.arriving.data_ptr():
            found.arrived()

    def settle(self) -> _SeenSum | None:
        """The sum with its result; None: there was none, or several, one after the other. Raises what failed."""
        if self._failed is not None:
            raise self._failed
        if self.found is not None and self.found.total is None:
            if self._functional:
                torch.ops._c10d_functional.wait_tensor(self.found.arriving)
            self.found.arrived()
        return None if self._several else self.found


def _read(how: str, args: Sequence[Any], *, in_place: bool) -> _SeenSum | None:
    """What is known of a sum before it runs; None: it is no sum of numbers over several ranks."""
    if in_place:
        (into, given), (group, op) = (args[0] * 2, args[1:3]) if how == _ALL_REDUCE else (args[:2], args[2:4])
        group = distributed.ProcessGroup.unbox(group)
        # Of one that runs beside what comes next, nobody sees when it is over; left out it is its default, True.
        is_sum = op.op() == distributed.ReduceOp.SUM and len(args) > _ASYNC and not args[_ASYNC]
    else:
        resolve: Any = distributed.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        into, given, is_sum = args[0], args[0], args[1] == "sum"
        group = resolve(args[-1]) if isinstance(args[-1], str) else args[-1]
    ranks = tuple(distributed.get_process_group_ranks(group))
    if not is_sum or len(ranks) < 2 or not given.is_floating_point():
        return None
    return _SeenSum(how, given.detach().clone(), ranks, distributed.get_backend(group), into)


@dataclass
class _Running:
    """An output projection that runs."""

    call: AttentionCall
    module: nn.Module
    mode: Any
    """``_Reductions``."""
    rows: int
    """T of its input."""
    turned: bool
    """Whether that has the axes [T, B]."""


class OutputSums:
    """Watches the modules with a weight of a model.

    Args:
        take: Told of a call's output projection: tensors to be kept (the model's own, or copies), and what is said.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._handles: list[Any] = []
        self._names: dict[nn.Module, str] = {}
        self._expected: tuple[AttentionCall, Tensor] | None = None
        self._running: _Running | None = None

    def watch(self, model: nn.Module, guarded: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Begin. Compiled modules are left alone: a hook would have them compiled anew."""
        if is_run_compiled(model):
            return
        left_out = unhooked(model)
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if module in left_out or not isinstance(weight, Tensor) or weight.dim() != 2:
                continue
            self._names[module] = clean(name)
            self._handles.append(module.register_forward_pre_hook(guarded(self._begins)))
            self._handles.append(module.register_forward_hook(guarded(self._ended), always_call=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._abandon()
        self._expected = None

    def expect(self, call: AttentionCall) -> None:
        """A call that is kept has run: what takes its O next is its output projection."""
        self._abandon()
        self._expected = call, call.o.detach()

    def _abandon(self) -> None:
        """Leave a projection that Ctrl-C ended, of which no hook is told."""
        running, self._running = self._running, None
        current: Any = _get_current_dispatch_mode()
        if running is not None and current is running.mode:
            current.__exit__(None, None, None)

    def _begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._running is not None and module is self._running.module:
            self._abandon()
        if self._expected is None or self._running is not None or not args:
            return
        if self._expected[1].is_cuda and _capturing():
            return  # a comparison would end the recording of a CUDA graph
        call, o = self._expected
        x = _local(args[0])
        axes = None if x is None else _axes(x, o)
        if axes is None:
            return
        self._expected = None
        self._running = _Running(call, module, _Reductions(), *axes)
        self._running.mode.__enter__()

    def _ended(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:  # noqa: ARG002 - a hook's
        running = self._running
        if running is None or module is not running.module:
            return
        self._running = None
        running.mode.__exit__(None, None, None)
        seen = running.mode.settle()
        y = _local(result[0] if isinstance(result, tuple) else result)
        if y is None:
            return  # it raised
        output = _by_sequence(y, running, 1)
        weight = _weight(module)
        tensors = {} if weight is None else {W_O: weight}
        said = {DTYPE: str(y.dtype)[6:], MODULE: self._names[module]}
        if isinstance(getattr(module, "bias", None), Tensor):
            said[BIAS] = "yes"
        if running.turned:
            said[TURNED] = "yes"
        if seen is not None and seen.total is not None:
            count = len(seen.ranks)
            part, total = _by_sequence(seen.part, running, count), _by_sequence(seen.total, running, 1)
            if part is None or total is None:
                return
            if seen.how == _SCATTER and total.shape[1] * count > part.shape[1]:
                before = seen.ranks.index(distributed.get_rank()) * total.shape[1]
                total = total[:, : max(0, part.shape[1] - before)]  # without the zeros that fill it up
            tensors |= {PART: part, TOTAL: total}
            said |= {RANKS: ",".join(map(str, seen.ranks)), BY: f"{seen.how} by {seen.backend}"}
            if output is not None and output.dtype == total.dtype and torch.equal(output, total):
                output = None
        if output is not None:
            tensors[OUTPUT] = output
        self._take(running.call, tensors, said)


def _local(t: Any) -> Tensor | None:
    """This rank's tensor, detached, and complete; None: it is none."""
    if not isinstance(t, Tensor):
        return None
    t = t.detach()
    local: Any = t.to_local() if hasattr(t, "to_local") else t
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def _axes(x: Tensor, o: Tensor) -> tuple[int, bool] | None:
    """How many rows a sequence has in a module's input that is O [B, H, T, D], and whether its axes are [T, B].

    Of one new token, query heads may have been given to attention as the rows of their key head. None: it is no O.
    """
    batch, heads, rows, dim = o.shape
    if x.numel() != o.numel() or x.dtype != o.dtype:
        return None
    if rows > 1 and x.shape[-1] == heads * rows * dim:
        return (1, False) if torch.equal(x.reshape(batch, -1), o.reshape(batch, -1)) else None
    if x.shape[-1] != heads * dim:
        return None
    straight = x.dim() != 3 or tuple(x.shape[:2]) == (batch, rows)
    for turned in [False, True] if straight else [True]:
        flat = o.permute(2, 0, 1, 3) if turned else o.transpose(1, 2)
        if torch.equal(x.reshape(-1, heads * dim), flat.reshape(-1, heads * dim)):
            return rows, turned
    return None


def _by_sequence(t: Tensor, running: _Running, ranks: int) -> Tensor | None:
    """[B, T, C] of what has the rows of the module's input, or a rank's share of them; None where that is not seen.

    Args:
        t: The tensor.
        running: Whose.
        ranks: Of what is to be scattered along T, so many pieces may lie side by side on the first axis.
    """
    batch, rows = running.call.q.shape[0], running.rows
    if t.dim() == 2:
        t = t.view(rows, batch, -1) if running.turned and len(t) == batch * rows else t
        t = t.view(batch, -1, t.shape[-1]) if t.dim() == 2 and len(t) % batch == 0 else t
    if t.dim() != 3:
        return None
    if running.turned:
        return t.transpose(0, 1)
    if t.shape[0] == ranks * batch and t.shape[1] == -(-rows // ranks) and ranks > 1:
        # Where they do not divide the rows, zeros follow the last one.
        return t.view(ranks, batch, t.shape[1], -1).transpose(0, 1).reshape(batch, ranks * t.shape[1], -1)[:, :rows]
    return t if t.shape[0] == batch else None


def _weight(module: nn.Module) -> Tensor | None:
    """[C, N] of this rank; None where it is no plain matrix."""
    with suppress(Exception):  # what a module calls its weight is its own matter
        weight = own_weight(module)
        if weight is not None and weight.is_floating_point() and weight.dtype.itemsize > 1:
            return weight
    return None
