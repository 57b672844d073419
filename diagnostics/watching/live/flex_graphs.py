"""Inside a compiled graph FlexAttention is code that inductor writes: an operator of ours stands behind each of it.

``prepare`` has inductor put them there when it compiles. They take a microsecond while nobody listens and change no
number: nothing in the graph depends on what they do. A graph that was compiled before keeps what it is.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx import _pytree as fx_pytree
from torch.library import Library, register_fake
from torch.utils import _pytree as pytree

from attn_diag.watching.live.inductor_pass import behind

NAMESPACE, FORWARD, BACKWARD = "attn_diag", "flex_forward", "flex_backward"
# An operator that changes something is never taken out of a graph: theirs is a token of no elements. Of the tensors no
# order of axes is asked, as for that inductor would copy them.
_FORWARD = (
    "(Tensor(a!) token, Tensor q, Tensor k, Tensor v, Tensor o, Tensor? lse, Tensor? blocks, Tensor[] tensors, "
    "SymInt[] numbers, float scale, str about) -> ()"
)
_BACKWARD = (
    "(Tensor(a!) token, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, "
    "Tensor? dq, Tensor? dk, Tensor? dv, bool of_lse) -> ()"
)
# Which argument of the first is a text: in JSON, what else is to be known of the call.
_ABOUT = 10
_USED_IN = "torch.nn.attention.flex_attention"
_PASS = "post_grad_custom_pre_pass"
_log = logging.getLogger("attn_diag")

CHECKPOINTED = (
    "FlexAttention's backward is not seen in a compiled graph that checkpoints it: nothing can be read there without "
    "other bits. Compile the blocks inside the checkpoint (block.compile()) instead of the model around it"
)
Told = Callable[[tuple[Any, ...]], None]
_told: tuple[Told, Told] | None = None
_library: Any = None
# Who wants graphs prepared; what inductor had before, and has now.
_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_before: Any = None
_ours: Any = None


def prepare(holder: object) -> None:
    """Have FlexAttention seen in what is compiled from now on, while ``holder`` lives or until ``leave``."""
    global _before, _ours
    if holder not in _holders:
        _holders.add(holder)
        weakref.finalize(holder, _restore).atexit = False
    # Inductor takes a second to load, and whoever uses FlexAttention has loaded this.
    if _holders and _ours is None and _USED_IN in sys.modules:
        _define()
        config = _inductor()
        _before = getattr(config, _PASS)
        _ours = behind(_before, mark, __file__)
        setattr(config, _PASS, _ours)


def leave(holder: object) -> None:
    """Have nothing prepared for it any more; the last one gives inductor back the pass that it had."""
    _holders.discard(holder)
    _restore()


def _restore() -> None:
    global _before, _ours
    # One that dies may still be counted, but is not met.
    if _ours is None or any(True for _ in _holders):
        return
    config = _inductor()
    if getattr(config, _PASS) is _ours:
        setattr(config, _PASS, _before)
    _before = _ours = None


def listen(forward: Told | None, backward: Told | None) -> None:
    """Tell of every call from now on: of the operators' arguments, in order. None: tell nobody."""
    global _told
    _told = None if forward is None or backward is None else (forward, backward)


def blind() -> bool:
    """Whether a graph with FlexAttention is loaded in which none of our operators stands."""
    cached = sys.modules.get("torch._inductor.codecache")
    loaded = list(getattr(getattr(cached, "PyCodeCache", None), "modules", ()))
    return any(_is_blind(str(path)) for module in loaded if (path := getattr(module, "__file__", None)))


@cache
def _is_blind(path: str) -> bool:
    try:
        code = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    # Of the wrapper around kernels alone: it is what names our operators.
    return "def call(" in code and "flex_attention" in code and f"{NAMESPACE}.flex_" not in code


def _define() -> None:
    global _library
    if _library is not None:
        return
    library: Any = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for number, (name, schema) in enumerate(((FORWARD, _FORWARD), (BACKWARD, _BACKWARD))):
        library.define(name + schema, tags=(torch.Tag.flexible_layout,))
        library.impl(name, _teller(number), "CompositeExplicitAutograd")
        register_fake(f"{NAMESPACE}::{name}", lambda *_args: None, lib=library)
    _library = library


def _teller(number: int) -> Callable[..., None]:
    def tell(*args: Any) -> None:
        if _told is not None:
            _told[number](args)

    return tell


def _inductor() -> Any:
    return importlib.import_module("torch._inductor.config")


def mark(graph: Graph) -> None:
    """Put our operators behind FlexAttention's nodes; where one of them is not what we know, it stays alone."""
    try:
        _unname_regions(graph)
        forwards = [node for node in graph.nodes if _calls(node, "flex_attention")]
        backwards = [node for node in graph.nodes if _calls(node, "flex_attention_backward")]
        if not (forwards or backwards) or not _for_python():
            return
        named = len({_path(node)[0] for node in forwards}) == 1
        if forwards and backwards:
            # It makes again what its forward, which was told of, did not keep. With one more that reads dO, inductor
            # made delta, in the kernel that casts dO, from what dO was before the cast: other bits (H200, torch 2.11).
            _log.warning(CHECKPOINTED)
            return
        for node in forwards:
            _put(graph, node, partial(_put_forward, named=named))
        for node in backwards:
            _put(graph, node, _put_backward)
    except Exception as error:  # never an exception in somebody's compilation
        _log.warning("FlexAttention will not be seen in a graph: %s", error)


def _put(graph: Graph, node: Node, put: Callable[[_Insertion, Node], None]) -> None:
    made = _Insertion(graph, node)
    try:
        put(made, node)
    except Exception:
        made.undo()
        raise


def _for_python() -> bool:
    """Not what leaves Python: it must run without us."""
    virtualized = importlib.import_module("torch._inductor.virtualized")
    exported = bool(getattr(virtualized.V, "aot_compilation", False))
    return not (exported or _inductor().cpp_wrapper)


def _calls(node: Node, name: str) -> bool:
    return node.op == "call_function" and node.target is getattr(torch.ops.higher_order, name, node)


def _unname_regions(graph: Graph) -> None:
    """A region that is compiled once for several modules bears the name of one of them."""
    owner: Any = graph.owning_module
    for node in graph.nodes:
        if _calls(node, "invoke_subgraph"):
            given: Any = node.args[0]
            for inner in owner.get_submodule(given.target).graph.nodes:
                if inner.target is _operator(FORWARD):
                    inner.update_arg(_ABOUT, json.dumps(json.loads(inner.args[_ABOUT]) | {"module": ""}))


class _Insertion:
    """New nodes behind ``node``."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph, self._last, self._made = graph, node, list[Node]()

    def call(self, target: Any, args: tuple[Any, ...], value: Any) -> Node:
        with self._graph.inserting_after(self._last):
            made = self._graph.call_function(target, args)
        made.meta["val"] = value
        self._last = made
        self._made.append(made)
        return made

    def result(self, of: Node, index: int) -> Node | None:
        values = of.meta.get("val")
        value = None if values is None or index >= len(values) else values[index]
        return None if value is None else self.call(operator.getitem, (of, index), value)

    def token(self, like: Node) -> Node:
        fake = like.meta["val"]
        with fake.fake_mode:
            value = torch.empty([0], dtype=torch.uint8, device=fake.device)
        token = self.call(torch.ops.aten.empty.memory_format, ([0],), value)
        token.kwargs = {"dtype": torch.uint8, "device": fake.device}
        return token

    def undo(self) -> None:
        while self._made:
            self._graph.erase_node(self._made.pop())


def _put_forward(made: _Insertion, node: Node, *, named: bool) -> None:
    given: Any = node.args
    q, k, v, score_graph, block_mask, scale, options, score_others, mask_others, *_ = given
    o = made.result(node, 0)
    lse = made.result(node, 1) if options.get("OUTPUT_LOGSUMEXP") else None
    # The kernel of FlashAttention has it in base e.
    unit = 1.0 if options.get("BACKEND") == "FLASH" else math.log(2)
    functions = [_written(node, score_graph, score_others), _written(node, block_mask[-1], mask_others)]
    others = [*score_others] * bool(functions[0]) + [*mask_others] * bool(functions[1])
    tensors = [other for other in others if _is_tensor(other)]
    numbers = [other for other in others if not _is_tensor(other)]
    blocks = block_mask[2] if functions[1] else None
    module = _path(node)[1] if named else ""
    about = {"module": module, "lse_unit": unit, "score_mod": functions[0], "mask_mod": functions[1]}
    args = (made.token(q), q, k, v, o, lse, blocks, tensors, numbers, scale, json.dumps(about))
    made.call(_operator(FORWARD), args, None)


def _put_backward(made: _Insertion, node: Node) -> None:
    given: Any = node.args
    q, k, v, o, lse, do, of_lse, *_ = given
    gradients = tuple(made.result(node, number) for number in range(3))
    differentiated = isinstance(of_lse, Node) and not _is_zero(of_lse)
    made.call(_operator(BACKWARD), (made.token(q), q, k, v, o, lse, do, *gradients, differentiated), None)


def _is_zero(node: Node) -> bool:
    if str(node.target) == "aten.full.default":
        return bool(node.args[1] == 0)
    return str(node.target).startswith(("aten.zeros", "aten.new_zeros"))


def _operator(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_TRIVIAL = ("aten.new_ones.default", "aten.ones.default", "aten.full.default")
# What the code of a graph may name besides its own variables.
_KNOWN = {
    "torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan, "NoneType": type(None),
    "pytree": pytree, "fx_pytree": fx_pytree,
}  # fmt: skip
# torch.vmap would take inductor's own cast an element at a time.
_CAST, _BATCHED_CAST = "torch.ops.prims.convert_element_type.default(", "torch.ops.aten.to.dtype("


def _written(node: Node, of: Any, others: Sequence[Any]) -> dict[str, str] | None:
    """A score_mod's or mask_mod's graph as code, which a graph read from disk can hold, and what it captured.

    None: it leaves scores as they are, or hides none. Without code it cannot be written so.
    """
    owner: Any = node.graph.owning_module
    graph: Graph = owner.get_submodule(of.target).graph
    made: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    made = made[0] if isinstance(made, (tuple, list)) else made
    first = next(iter(graph.nodes))
    if made is first or (isinstance(made, Node) and str(made.target) in _TRIVIAL):
        return None
    code = graph.python_code("self")
    alone = not any(n.op == "get_attr" for n in graph.nodes) and code.globals.keys() <= _KNOWN.keys()
    captured = "".join("t" if _is_tensor(other) else "n" for other in others)
    return {"code": code.src if alone else "", "captured": captured}


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def read_function(
    written: Mapping[str, str], tensors: Iterator[Any], numbers: Iterator[int]
) -> Callable[..., Any] | None:
    """The score_mod or mask_mod that was written so; None where it could not be.

    Args:
        written: It.
        tensors: Those that it captured come next here.
        numbers: Likewise.
    """
    others = [next(tensors if kind == "t" else numbers) for kind in written["captured"]]
    if not written["code"]:
        return None
    space: dict[str, Any] = dict(_KNOWN)
    # Inductor's own code stands in the same file, and is run too.
    exec(written["code"].replace(_CAST, _BATCHED_CAST), space)

    def call(*args: Any) -> Any:
        made = space["forward"](None, *args, *others)
        return made[0] if isinstance(made, (tuple, list)) else made

    return call


def _path(node: Node) -> tuple[str, str]:
    """Where the innermost module of a node begins (a variable of the compiled code), and its name from there on."""
    stack = node.meta.get("nn_module_stack") or {}
    whole = str(list(stack.values())[-1][0]) if stack else ""
    root, bracket, rest = whole.partition("]") if whole[1:2] == "[" else whole.partition(".")
    parts = rest.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").split(".")
    return root + bracket, ".".join(part for part in parts if part and part != "_modules")
