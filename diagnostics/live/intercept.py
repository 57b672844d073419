"""Replaces the attention functions while somebody listens, and puts them back: nothing stays behind.

A function is replaced under every name that loaded modules have for it, ``from … import`` included. Inside a compiled
graph, or when nobody wants the call, the replacement only passes it on. Where one attention function calls another
(nn.MultiheadAttention calls scaled_dot_product_attention) the innermost is the one that is told of.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol

import torch

from attn_diag.live.sites import Fields, Function, Namespace, Site, bind, functions, inside, namespaces
from attn_diag.live.tap import Tap


class Observer(Protocol):
    """What a watch is to the interception."""

    def expects(self) -> Any | None:
        """A token if the call that is about to run is wanted, else None."""
        ...

    def counts(self) -> None:
        """A call has run, wanted or not."""
        ...

    def sees(self, token: Any, fields: Fields, result: Any) -> None:
        """A wanted call has run."""
        ...

    def failed(self, error: Exception) -> None:
        """Something of ours went wrong; the training loop must not notice."""
        ...


_lock = threading.RLock()
_observers: list[Observer] = []
_wrappers: dict[Function, Function] = {}
_replaced: list[tuple[Namespace, str, Function]] = []
_modules_seen = 0
_thread = threading.local()


def install(observer: Observer) -> None:
    """Begin to tell ``observer`` of calls."""
    with _lock:
        _observers.append(observer)
        _replace()


def remove(observer: Observer) -> None:
    """Stop telling it; the last one leaves every function as it was."""
    with _lock:
        if observer in _observers:
            _observers.remove(observer)
        if not _observers:
            _restore()


def refresh() -> None:
    """Look for attention functions again if modules were imported since."""
    with _lock:
        if _observers and len(sys.modules) != _modules_seen:
            _replace()


def _replace() -> None:
    global _modules_seen
    ours = set(_wrappers.values())
    for site, function in functions():
        if function not in ours and function not in _wrappers:
            _wrappers[function] = _wrapper(site, function)
    for space in namespaces():
        for name, value in list(space.items()):
            if (wrapper := _wrapper_of(value)) is not None:
                _replaced.append((space, name, value))
                space[name] = wrapper
    _modules_seen = len(sys.modules)


def _wrapper_of(value: Any) -> Function | None:
    # Other callables may do anything when they are hashed: a Triton kernel compiles its cache key.
    if not isinstance(value, (FunctionType, BuiltinFunctionType)):
        return None
    found = _wrappers.get(value)
    if found is None and isinstance(value, FunctionType):
        # torch.compile(flex_attention) is a function of its own around the one we know.
        inner = vars(value).get("_torchdynamo_orig_callable")
        if inner is not None and inner in _wrappers:
            found = _wrappers[value] = _wrapper(_site_of(inner), value)
    return found


def _site_of(function: Function) -> Site:
    site: Site = vars(_wrappers[function])["site"]
    return site


def _restore() -> None:
    originals = {wrapper: function for function, wrapper in _wrappers.items()}
    for space, name, function in reversed(_replaced):
        if space.get(name) in originals:
            space[name] = function
    _replaced.clear()
    # A module that was imported meanwhile may have taken a wrapper along.
    for space in namespaces():
        for name, value in list(space.items()):
            if isinstance(value, FunctionType) and value in originals:
                space[name] = originals[value]


def _wrapper(site: Site, function: Function) -> Function:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _observers:
            return function(*args, **kwargs)
        return _run(site, function, args, kwargs)

    vars(observed)["site"] = site
    return observed


def _run(site: Site, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observers = tuple(_observers)
    tokens = [_guarded(observer, observer.expects) for observer in observers]
    before = getattr(_thread, "calls", 0)
    tap = Tap()
    if site.tapped and any(token is not None for token in tokens):
        with tap, inside(site, function, args, kwargs):
            result = function(*args, **kwargs)
    else:
        result = function(*args, **kwargs)
    if getattr(_thread, "calls", 0) != before:
        return result  # an inner attention function was told of
    fields: Fields | None = None
    for observer, token in zip(observers, tokens, strict=True):
        if token is None:
            continue
        if fields is None:
            fields = _guarded(observer, _read, site, function, args, kwargs, result, tap)
        if fields is None:
            return result
        _guarded(observer, observer.sees, token, fields, result)
    _thread.calls = before + 1
    for observer in observers:
        _guarded(observer, observer.counts)
    return result


def _read(
    site: Site, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tap: Tap
) -> Fields | None:
    with torch.no_grad():
        return site.read(bind(function, site, args, kwargs), result, tap)


def _guarded(observer: Observer, what: Callable[..., Any], *args: Any) -> Any:
    try:
        return what(*args)
    except Exception as error:
        observer.failed(error)
        return None
