"""The gradients of one attention call, heard on its way back: hooks on autograd's graph that change nothing."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from attn_diag.watching.live.axes import heads_as_sequences, is_batched
from attn_diag.watching.live.call import AttentionCall
from attn_diag.watching.live.gradients_to_come import GradientToCome
from attn_diag.watching.live.hops import RingHops
from attn_diag.watching.live.linear_layers import CapturedProjection
from attn_diag.watching.live.operator_calls import OperatorBackward, OperatorCall, cut
from attn_diag.watching.live.overwritten import DO_OVERWRITTEN, Held
from attn_diag.watching.live.sites import Graph, LayOut
from attn_diag.watching.live.slices import Slice
from attn_diag.watching.live.untraced import backward_is_compiled, passed_by, untraced

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]

_MAX_STEPS = 6
_NODES = ("ScaledDotProductFlash", "ScaledDotProductEfficient", "ScaledDotProductCudnn", "ScaledDotProductFused")
_PASSING = ("Slice", "Transpose", "Permute", "View", "UnsafeView", "ToCopy", "Clone", "Alias", "Unsqueeze", "Squeeze")

TOTALS = "gradients are the tensors' own: totals, where q, k or v is used elsewhere too"
COMPILED_BACKWARD = "gradients are left out: compiled autograd runs the backward, and no fused operator is in it"


class Hook:
    """A hook that stays on this module: in a copy or a pickle of the model it is a function that does nothing."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:
        """Do what the hook is for, where it was put; nothing of it belongs in a graph that is traced."""
        return None if torch.compiler.is_compiling() else untraced(self._run, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # nullcontext().__exit__(*anything) is None: whoever unpickles the model needs nothing of ours.
        return getattr, (contextlib.nullcontext(), "__exit__")


passed_by(Hook.__call__.__code__)


class Pending:
    """A call that waits for its gradients.

    Args:
        call: gets them as they come.
        guarded: keeps the failures of a hook from the training loop.
        finished: called with this when all have come.

    Attributes:
        copy_dq: dQ is the gradient at the projection too (a bias alone lies between).
        lost: which of q, k and v need a gradient and got none in a step in which O did.
    """

    def __init__(self, call: AttentionCall, guarded: Guard, finished: Callable[[Pending], None]) -> None:
        self.call, self._guarded, self._finished = call, guarded, finished
        self._missing: set[str] = set()
        self._handles: list[Any] = []
        self.copy_dq, self.lost = False, ""
        self._kept: list[StorageWeakRef] = []
        self._version = 0
        self._last_row: Tensor | None = None
        self._slice: Slice | None = None
        self._spoilt: set[str] = set()
        self._forward: object | None = None
        self._to_come: GradientToCome | None = None
        self._do = Held()

    def follow_projection(self, y: Tensor, projection: CapturedProjection) -> None:
        """Have the gradient at the projection's output too, where q is not just that output without a bias."""
        if projection.exact:
            self.copy_dq = projection.biased
            return
        if not y.requires_grad or backward_is_compiled():
            return
        self._missing.add("dq_pre")
        batch, _, rows, _ = self.call.q.shape

        def arrived(grad: Tensor) -> None:
            self.call.dq_pre = projection.slice.of(grad.detach().reshape(batch, rows, -1))
            self._arrived("dq_pre")

        self._handles.append(y.register_hook(self._guarded(arrived)))  # type: ignore[no-untyped-call]

    def wait_for_projection(self, part: Slice) -> None:
        """Wait for ``projection_arrived``; q is this part of the projection's output."""
        self._missing.add("dq_pre")
        self._slice = part

    def projection_arrived(self, gradient: Tensor | None) -> None:
        """Take the gradient [B * T, N] at the projection's output; None: it is not to be had."""
        if gradient is not None and self._slice is not None:
            batch, _, rows, _ = self.call.q.shape
            self.call.dq_pre = self._slice.of(gradient.detach().reshape(batch, rows, -1))
        self._arrived("dq_pre")

    def follow(self, o: Tensor, graph: Graph, within: OperatorCall | None = None, began: int = 0) -> None:
        """Hook the kernel's own autograd node; where there is none, the tensors.

        Args:
            o: what the call returned.
            graph: where its gradients arrive.
            within: the fused operator that did it, if one did.
            began: the number of the call's first node of autograd, see ``Tap``.
        """
        if backward_is_compiled():
            if within is not None:
                self.follow_operator(within)
            else:
                self.call.notes.append(COMPILED_BACKWARD)
            return
        node = _attention_node(o)
        if node is not None:
            self._missing.add("kernel")
            self._handles.append(node.register_hook(self._guarded(self._from_node)))
            self._follow_tensors({name: graph[name] for name in graph.keys() & {"dmask"}}, began)
            return
        self._follow_tensors(graph, began)

    def _follow_tensors(self, graph: Graph, began: int) -> None:
        for name, (tensor, lay_out) in graph.items():
            if tensor.requires_grad:
                uses = uses_of(graph, tensor, began) if name in _INPUTS else []
                # Of MLA's latent, which is v and a part of k: its gradient is the sum of both.
                if (
                    name in _INPUTS
                    and not uses
                    and any(made_of(graph[other][0], tensor) for other in _INPUTS if other != name and other in graph)
                ):
                    continue
                if name in _OF and not _alone(tensor, name, self):
                    continue  # several calls of one backward: the gradient is of all of them
                self._missing.add(name)
                take = self._taker(name, lay_out)
                if uses:
                    parts = Parts(len(uses), take)
                    for node, index in uses:
                        self._handles.append(node.register_hook(self._guarded(partial(parts.add, index))))
                    continue
                if name in _INPUTS and TOTALS not in self.call.notes:
                    self.call.notes.append(TOTALS)
                self._handles.append(tensor.register_hook(self._guarded(take)))  # type: ignore[no-untyped-call]

    def follow_operator(self, operator: OperatorCall, *, reused: bool = False) -> None:
        """Wait for the operator's backward.

        Args:
            operator: what ran.
            reused: whether a graph may put something else where o and lse were, as it does with the parts of a ring.
        """
        self._missing.add("kernel")
        self._forward = operator.record
        if operator.to_come is not None and self.call.x is not None:
            self.wait_for_projection(operator.to_come.through)
            operator.to_come.waiting.append(self)
            self._to_come = operator.to_come
        # Of one that was recorded it is known which backward is its; one that is not may be told by its values.
        tensors = [t for t in (operator.o, operator.lse) if t is not None and self._forward is None]
        # Their identities are needed, and nothing of ours keeps them alive.
        self._kept = [StorageWeakRef(t.untyped_storage()) for t in tensors if not reused]  # type: ignore[no-untyped-call]
        self._version = operator.o._version
        self._last_row = operator.o[..., -1, :].clone()

    @property
    def waits_for_operator(self) -> bool:
        """Whether an operator's backward is to bring the gradients."""
        return self._last_row is not None

    def kept_by(self, back: OperatorBackward) -> bool:
        """Whether a backward was given this forward's own o or LSE (a graph may copy one of them)."""
        if back.forward is not None:
            return back.forward is self._forward
        if back.o._version != self._version:
            return False  # something was added to O in its place, as a ring may do to the first of its parts
        own = {t.untyped_storage()._cdata for t in (back.o, back.lse) if t is not None}
        return any(kept.cdata in own and not kept.expired() for kept in self._kept)  # type: ignore[no-untyped-call]

    def looks_like(self, back: OperatorBackward) -> bool:
        """Whether a backward was given what this forward returned, in another place: made again, or copied."""
        row = self._last_row
        if row is None or back.forward is not None:
            return False
        # Of what was recorded there are the first sequences alone.
        o = back.o if self._forward is None else back.o[: len(row)]
        return o.shape[:2] + o.shape[3:] == row.shape and torch.equal(o[..., -1, :], row)

    def from_operator(self, back: OperatorBackward) -> None:
        """Take the gradients from the operator's backward."""
        self._kept, self._last_row = [], None
        if back.forward is not None:
            self.call.copied |= {"do", "dq", "dk", "dv"}
        self.call.hops = RingHops.backward(back.hops) if back.hops else None
        self.call.notes += back.notes
        self._take(back.do, back.gradients)

    def give_up(self) -> None:
        """Wait no longer, as the step is over."""
        self._unhook()
        if self._to_come is not None:
            self._to_come.leave(self)
        # A gradient at the projection that never came (a frozen model) does not take the others along.
        if self.call.do is not None and self._missing:
            self.lost += "".join(sorted(name[-1] for name in self._missing.intersection(_INPUTS)))
            self._missing.clear()
            self._finished(self)

    def _from_node(self, grads: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
        self._take(outputs[0], grads)

    def _take(self, do: Tensor | None, grads: Sequence[Tensor | None]) -> None:
        c = self.call
        if do is not None and is_batched(do):
            c.notes.append(BATCHED)
            do, grads = None, [None for _ in grads]
        c.do = _trimmed(do, c.o)
        c.dq, c.dk, c.dv = (_trimmed(g, like) for g, like in zip(grads, (c.q, c.k, c.v), strict=False))
        if self._slice is not None and self._forward is None:
            # A graph writes over its buffers before what is waited for comes.
            c.do, c.dq, c.dk, c.dv = (None if t is None else t.clone() for t in (c.do, c.dq, c.dk, c.dv))
        if self.copy_dq:
            c.dq_pre = c.dq
        self._arrived("kernel")

    def _taker(self, name: str, lay_out: LayOut) -> Any:
        # Behind a cast of autocast a gradient comes widened; it has only the bits of what the kernel saw.
        given: Tensor = getattr(self.call, _OF.get(name, name[-1]))
        dtype = given.dtype

        def arrived(grad: Tensor | None) -> None:
            if name in self._spoilt or grad is None or is_batched(grad):
                self.lost += name[-1] if grad is None and name in _INPUTS else ""
                self._arrived(name)
                return
            grad = grad.detach()
            if name == "do" and self.call.lent:
                self._do.hold({name: grad}, [name])
                grad = self._do.as_given([name]).get(name, grad)
            setattr(self.call, name, lay_out(grad).to(dtype))
            if name == "dq" and self.copy_dq:
                self.call.dq_pre = self.call.dq
            self._arrived(name)

        return arrived

    def _arrived(self, name: str) -> None:
        self._missing.discard(name)
        if not self._missing:
            self._unhook()
            self.call.notes += [DO_OVERWRITTEN] if self._do.overwritten else []
            self._do = Held()
            self._finished(self)

    def waits_for(self, name: str) -> bool:
        """Whether this gradient has not come yet."""
        return name in self._missing

    def spoil(self, name: str) -> None:
        """Do without this gradient, which another call shares."""
        self._spoilt.add(name)

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


BATCHED = "gradients are left out: torch.vmap hides an axis of theirs"
# What a gradient is of, where its last letter does not say it.
_OF = {"dsinks": "sinks", "dmask": "mask"}
# A parameter that calls may share (sinks, a bias) by its identity -> who waits for its gradient.
_waiting: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()


def _alone(tensor: Tensor, name: str, pending: Pending) -> bool:
    """Whether no other call waits for the gradient of the same tensor; if one does, it gets none of it either."""
    other = _waiting.get(id(tensor))
    if other is not None and other.waits_for(name):
        other.spoil(name)
        return False
    _waiting[id(tensor)] = pending
    return True


def _trimmed(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """A gradient without the kernel's padding of D, of the sequences of which there are copies."""
    if grad is None:
        return None
    grad = grad.detach() if grad.requires_grad else grad
    grad = heads_as_sequences(grad) if grad.shape[1] > like.shape[1] == 1 else grad
    batch = like.shape[0]
    return cut(grad if grad.shape[0] == batch else grad[:batch], like.shape[-1])


def _attention_node(o: Tensor) -> Any | None:
    """Find the fused operator's autograd node behind ``o``, past the views and casts that a call may add; or None."""
    node: Any = o.grad_fn
    for _ in range(_MAX_STEPS):
        if node is None:
            return None
        name: str = node.name()
        if any(part in name for part in _NODES):
            return node
        if not name.startswith(_PASSING):
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def made_of(made: Tensor, tensor: Tensor) -> bool:
    """Whether one tensor was made of another, or is it, as far as the nearest nodes of autograd's graph say."""
    if made is tensor:
        return True
    waiting, seen = [made.grad_fn], 0
    while waiting and seen < _NEAREST:
        node, seen = waiting.pop(0), seen + 1
        for before, number in node.next_functions if node is not None else ():
            if before is None:
                continue
            if _is_of(tensor, before, number):
                return True
            waiting.append(before)
    return False


class Parts:
    """Adds up what the places that use an input send to it, as they come, and hands on the sum.

    Args:
        count: So many come.
        take: Given their sum.
    """

    def __init__(self, count: int, take: Callable[[Tensor | None], None]) -> None:
        self._missing, self._take = count, take
        self._sum: Tensor | None = None

    def add(self, index: int, grads: Sequence[Tensor | None], _: object) -> None:
        """Add one of a node's gradients; None is none."""
        part, self._missing = grads[index], self._missing - 1
        if part is not None:
            self._sum = part if self._sum is None else self._sum + part
        if not self._missing:
            self._take(self._sum)


def uses_of(graph: Graph, tensor: Tensor, began: int = 0) -> list[tuple[Any, int]]:
    """The nodes of autograd's graph, and which of their gradients, by which the call alone sends them to an input.

    Empty: where is not found. What comes to the input itself is the sum over everything that uses it, other calls too.

    Args:
        graph: Where the call's gradients arrive.
        tensor: The input.
        began: The number of the call's first node: a mask that was made of v before is not the call's.
    """
    ends = [graph[name][0].grad_fn for name in _INPUTS if name in graph]
    waiting, seen, found = [graph["do"][0].grad_fn], set[Any](), list[tuple[Any, int]]()
    while waiting:
        node = waiting.pop(0)
        if node is None or node in seen or node._sequence_nr() < began or any(node is end for end in ends):
            continue
        if len(seen) == _MOST_NODES:
            return []
        seen.add(node)
        for index, (before, number) in enumerate(node.next_functions):
            if _is_of(tensor, before, number):
                found.append((node, index))
            else:
                waiting.append(before)
    return found


def _is_of(tensor: Tensor, node: Any, number: int) -> bool:
    """Whether an edge of autograd's graph leads to this tensor."""
    if node is None:
        return False
    if tensor.grad_fn is None:
        return getattr(node, "variable", None) is tensor
    return node is tensor.grad_fn and number == tensor.output_nr


# Gradients of inputs, by the names of a graph; and so many of autograd's nodes are looked at.
_INPUTS, _NEAREST = ("dq", "dk", "dv"), 32
# Of a call that is not fused: nodes between its output and its inputs, a mask's among them.
_MOST_NODES = 128
