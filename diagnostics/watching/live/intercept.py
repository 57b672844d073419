"""Meets attention where it runs while somebody listens, and leaves everything as it was.

Operators are met in torch's dispatcher (``operators``), on the steps that somebody looks at. A function without an
operator of its own is replaced under every name that loaded modules have for it, ``from … import`` included; inside a
compiled graph, or when nobody wants the call, the replacement only passes it on. Where one attention function calls
another (nn.MultiheadAttention calls scaled_dot_product_attention) the innermost is the one that is told of.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from attn_diag.watching.live import flex_graphs
from attn_diag.watching.live.backlog import Backlog, Thread
from attn_diag.watching.live.cuda_graphs import GraphRecordings
from attn_diag.watching.live.flex_calls import FlexCall, flex_backward
from attn_diag.watching.live.functions import COMPILED, Namespace, attention_functions, namespaces_with
from attn_diag.watching.live.imports import ImportWatch
from attn_diag.watching.live.observer import Observer, sequences_of
from attn_diag.watching.live.operator_calls import OperatorBackward, OperatorCall
from attn_diag.watching.live.operators import OperatorOverrides
from attn_diag.watching.live.overwritten import HeldByOperators, as_given, of_operator
from attn_diag.watching.live.places import MadeBy
from attn_diag.watching.live.rings import RingBackward, is_traced
from attn_diag.watching.live.sites import (
    FLEX,
    REGISTERED,
    SDPA,
    TRANSFORMERS,
    AttentionSite,
    Fields,
    Function,
    bind,
    inside,
)
from attn_diag.watching.live.stream_capture import in_cuda_graph
from attn_diag.watching.live.tap import Tap


@dataclass(frozen=True)
class _Pair:
    site: AttentionSite | None
    original: Function
    wrapper: Function


_lock = threading.RLock()
_observers: list[Observer] = []
# Those that have functions replaced; those that look at this step.
_of_functions: list[Observer] = []
_looking: list[Observer] = []
# By identity: hashing or comparing whatever lies in other people's modules would run their code.
_wrappers: dict[int, _Pair] = {}
_replaced: list[tuple[Namespace, str, _Pair]] = []
_modules_seen = 0
_thread = Thread()
_imports = ImportWatch(lambda: refresh(imported=True), _observers)
flex_calls = 0  # of FlexAttention, or of what may be it


def _in_child() -> None:
    """A forked child (a DataLoader's worker) has none of the parent's threads, and locks that they will never open."""
    global _lock
    _lock = threading.RLock()
    _of_functions.clear()
    _looking.clear()
    backlog.drop()
    while _observers:
        _observers.pop().forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def install(observer: Observer, *, functions: bool = True) -> None:
    """Begin to tell ``observer`` of calls.

    Args:
        observer: Who is told.
        functions: Also of functions without an operator that a graph may hold; one that calls them is compiled anew.
    """
    with _lock:
        backlog.forget()
        _observers.append(observer)
        backlog.begin()
        flex_graphs.prepare(observer)
        recordings.install()
        _imports.begin()
        try:
            if functions:
                _of_functions.append(observer)
            _replace()
        except BaseException:
            remove(observer)
            raise


def remove(observer: Observer) -> None:
    """Stop telling it; the last one leaves every function and operator as it was."""
    with _lock:
        backlog.forget()
        for those in (_observers, _of_functions):
            if observer in those:
                those.remove(observer)
        flex_graphs.leave(observer)
        look(observer, wanted=False)
        if not _of_functions:
            _restore()
            if _observers:
                _replace()
        if not _observers:
            recordings.remove()
            _imports.end()


def look(observer: Observer, *, wanted: bool) -> None:
    """Have operators met from now on, or no more, as far as ``observer`` is concerned."""
    with _lock:
        if wanted and observer not in _looking:
            _looking.append(observer)
        elif not wanted and observer in _looking:
            _looking.remove(observer)
        meet_operators()
        backlog.begin()


def meet_operators() -> None:
    """Have operators met where somebody looks, or what runs is recorded."""
    with _lock:
        if _looking or recordings.running:
            _overrides.install()
            flex_graphs.listen(_flex_forward, _flex_backward)
        else:
            _overrides.remove()
            flex_graphs.listen(None, None)


def tell_of_warm_ups() -> None:
    """Tell of what ran while torch warmed up CUDA graphs."""
    recordings.tell_of_warm_ups()


def looks(observer: Observer) -> bool:
    """Whether it has operators met now."""
    return observer in _looking


def refresh(*, imported: bool = False) -> None:
    """Look for attention functions again if modules were imported since; ``imported``: one was, perhaps once more."""
    # Who imports does not wait for another thread that looks: that one may wait for this very import.
    known = len(sys.modules) == _modules_seen and not imported
    if known or not _observers or not _lock.acquire(blocking=not imported):
        return
    try:
        _replace()
        # FlexAttention, or what registers operators, may be among what was imported.
        for observer in _observers:
            flex_graphs.prepare(observer)
        meet_operators()
    finally:
        _lock.release()


def _replace() -> None:
    global _modules_seen
    _modules_seen = len(sys.modules)
    ours = {id(pair.wrapper) for pair in _wrappers.values()}
    for function, wrapper in _overrides.functions():
        _wrappers.setdefault(id(function), _Pair(None, function, wrapper))
    if _of_functions:
        for site, function in attention_functions():
            if id(function) not in ours:
                _wrap(site, function)
    for space in namespaces_with(_wrappers, compiled=True) if _wrappers else ():
        for name, value in list(space.items()):
            if (pair := _pair_of(value)) is not None:
                _replaced.append((space, name, pair))
                space[name] = pair.wrapper


def _wrap(site: AttentionSite, function: Function) -> _Pair:
    if id(function) not in _wrappers:
        _wrappers[id(function)] = _Pair(site, function, _wrapper(site, function))
    return _wrappers[id(function)]


def _pair_of(value: Any) -> _Pair | None:
    """Of a known function; torch.compile(flex_attention) is a function of its own around one."""
    found = _wrappers.get(id(value))
    if found is None and type(value) is FunctionType:
        inner = _wrappers.get(id(vars(value).get(COMPILED)))
        found = None if inner is None or inner.site is None else _wrap(inner.site, value)
    return found


def _restore() -> None:
    for space, name, pair in reversed(_replaced):
        if space.get(name) is pair.wrapper:
            space[name] = pair.original
    _replaced.clear()
    # A module that was imported meanwhile may have taken a wrapper along.
    ours = {id(pair.wrapper): pair for pair in _wrappers.values()}
    for space in namespaces_with(ours):
        for name, value in list(space.items()):
            if id(value) in ours:
                space[name] = ours[id(value)].original
    _wrappers.clear()


def _wrapper(site: AttentionSite, function: Function) -> Function:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return passed_on(site, function, args, kwargs)

    return observed


def passed_on(site: AttentionSite, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of the user's own, and tell of it."""
    if not _observers or in_cuda_graph() or _in_ring() or is_traced(site, (*args, *kwargs.values())):
        return function(*args, **kwargs)
    if isinstance(site, RingBackward):
        return _run_ring_backward(site, function, args, kwargs)
    return _run(site, function, args, kwargs)


def _in_ring() -> bool:
    """Whether what runs is a hop of a ring attention, which alone is told of."""
    return _thread.hops is not None


def _tell_late(made_by: MadeBy, read: Callable[[], Fields]) -> list[tuple[Observer, Any]]:
    met = _met(made_by=made_by)
    _tell(met, read, None)
    return met


def _met(
    module: str = "", made_by: MadeBy | None = None, operator: OperatorCall | None = None
) -> list[tuple[Observer, Any]]:
    backlog.tell()  # it came before
    met = ((observer, observer.meets(module, made_by, operator)) for observer in tuple(_observers))
    return [(observer, one) for observer, one in met if one is not None]


def _run(site: AttentionSite, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    global flex_calls
    flex_calls += site in (FLEX, TRANSFORMERS, REGISTERED)
    met, before, outer = _met(), _thread.calls, (_thread.tap, _thread.site)
    tap = Tap()
    _thread.tap, _thread.site = tap if site.over_operator else None, site
    if site.ring:
        # Hops hold their keys: not of a ring that nobody wants.
        _thread.hops = tap.hops if any(one.wanted for _, one in met) else deque(maxlen=0)
    try:
        wanted = any(one.wanted for _, one in met)
        if site.holds:
            tap.held.begin(function, met, lambda: bind(function, site, args, kwargs), site.holds)
        drops = wanted and site.drops is not None and site.drops(bind(function, site, args, kwargs)) > 0
        if not site.tapped and not drops:
            result = function(*args, **kwargs)
        else:
            products = tap.products() if wanted else nullcontext()
            with products, inside(function, args, kwargs) if site.tapped else nullcontext():
                result = function(*args, **kwargs)
    finally:
        _thread.tap, _thread.site = outer
        if site.ring:
            _thread.hops = None
    if tap.operator is not None:
        tap.operator.sequences = sequences_of(met)
    if _thread.calls == before:  # no inner attention function was told of
        _tell(met, lambda: _read(site, function, args, kwargs, result, tap), result)
        if site is SDPA:
            backlog.learn(sys._getframe(), met, tap.operator)
    elif site.around:
        site.around()
    return result


def _late(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """SDPA has run, and no operator that is recorded did."""
    _tell(_met(), lambda: _read(SDPA, SDPA.read, args, kwargs, result, Tap()), result)


def _run_ring_backward(site: RingBackward, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hop's backward is given the merged O and LSE, and returns its part of the gradients."""
    hops: list[OperatorBackward] | deque[OperatorBackward] = [] if _looking else deque(maxlen=0)
    _thread.hops = hops
    try:
        result = function(*args, **kwargs)
    finally:
        _thread.hops = None
    backlog.tell()
    for observer in tuple(_looking):
        try:
            back = site.back(bind(function, site, args, kwargs), result, list(hops))
        except Exception as error:  # never an exception in somebody's training
            observer.failed(error)
            continue
        observer.went_back(back)
    return result


def _tell(met: list[tuple[Observer, Any]], read: Callable[[], Fields | None], result: Any) -> None:
    wanting = [(observer, one) for observer, one in met if one.wanted]
    if wanting:
        try:
            fields = read()
        except Exception as error:  # never an exception in somebody's training
            for observer, _ in wanting:
                observer.failed(error)
            return
        if fields is None:
            return
        for observer, one in wanting:
            observer.sees(one, {**fields, "notes": [*fields.get("notes", ())]}, result)
    _thread.calls = _thread.calls + 1
    for observer, one in met:
        observer.counts(one)


def _composite(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _looking or _in_ring() or in_cuda_graph():
        return original(*args, **kwargs)
    return _run(SDPA, original, args, kwargs)


def _forward(call: OperatorCall) -> None:
    """A fused operator has run: within a function or the composite operator, which know more, or alone."""
    if (hops := _thread.hops) is not None:
        hops.append(call)
    elif (tap := _thread.tap) is not None:
        tap.operator = call
    elif call.is_cuda and recordings.takes():
        recordings.forward(call)
    elif _looking and not (call.is_cuda and in_cuda_graph()):
        backlog.learn(sys._getframe(), _ran(call), call)


def _ran(call: OperatorCall, made_by: MadeBy | None = None) -> list[tuple[Observer, Any]]:
    met = _met(call.module, made_by, call)
    call.sequences = sequences_of(met)
    _tell(met, lambda: {**of_operator(call), "operator": call}, None)
    return met


def _backward(back: OperatorBackward) -> None:
    if (hops := _thread.hops) is not None:
        hops.append(back)
    elif back.is_cuda and recordings.takes():
        recordings.backward(back)
    else:
        _went_back(back)


def _went_back(back: OperatorBackward) -> None:
    backlog.tell()
    for observer in tuple(_looking):
        observer.went_back(back)


def _flex_forward(args: tuple[Any, ...]) -> None:
    global flex_calls
    flex_calls += 1
    # A function around a compiled FlexAttention alone knows whether somebody uses the LSE that it gives.
    if _thread.site is None:
        _forward(FlexCall(args))


def _flex_backward(args: tuple[Any, ...]) -> None:
    _backward(flex_backward(args))


backlog = Backlog(_thread, _observers, _looking, _tell_late, _went_back)
_overrides = OperatorOverrides(_composite, _late, _forward, _backward, backlog, HeldByOperators(_looking))
recordings = GraphRecordings(_observers, _looking, meet_operators, _ran, _went_back)


def _read(
    site: AttentionSite, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tap: Tap
) -> Fields | None:
    with torch.no_grad():
        given = bind(function, site, args, kwargs)
        found = as_given(lambda a: site.read(a, result, tap), given, tap.held, function)
    return found and found | {"began": tap.began}
