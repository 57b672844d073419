"""Replaces the attention functions while somebody listens, and puts them back: nothing stays behind.

A function is replaced under every name that loaded modules have for it, ``from … import`` included. Inside a compiled
graph, or when nobody wants the call, the replacement only passes it on. Where one attention function calls another
(nn.MultiheadAttention calls scaled_dot_product_attention) the innermost is the one that is told of.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any, Protocol

import torch

from attn_diag.watching.live.sites import (
    EAGER,
    FLASH_ATTN,
    FLEX,
    MULTI_HEAD,
    OWN,
    SDPA,
    TRANSFORMERS,
    AttentionSite,
    Fields,
    Function,
    bind,
    inside,
)
from attn_diag.watching.live.tap import Tap

Namespace = dict[str, Any]
_FLASH_ATTN_NAMES = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func")
_TORCH_HOMES = ("torch.nn.functional", "torch.nn.attention.flex_attention")


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

    def guarded(self, what: Callable[..., Any]) -> Callable[..., Any]:
        """``what``, with its failures kept from the training loop."""
        ...

    def forked(self) -> None:
        """This is a forked child now: be gone, without waiting for a lock."""
        ...


@dataclass(frozen=True)
class _Pair:
    site: AttentionSite
    original: Function
    wrapper: Function


_lock = threading.RLock()
_observers: list[Observer] = []
# By identity: hashing or comparing whatever lies in other people's modules would run their code.
_wrappers: dict[int, _Pair] = {}
_replaced: list[tuple[Namespace, str, _Pair]] = []
_modules_seen = 0
_thread = threading.local()


def _in_child() -> None:
    """A forked child (a DataLoader's worker) has none of the parent's threads, and locks that they will never open."""
    global _lock
    _lock = threading.RLock()
    while _observers:
        _observers.pop().forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def install(observer: Observer) -> None:
    """Begin to tell ``observer`` of calls."""
    with _lock:
        _observers.append(observer)
        try:
            _replace()
        except BaseException:
            remove(observer)
            raise


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
    ours = {id(pair.wrapper) for pair in _wrappers.values()}
    for site, function in _functions():
        if id(function) not in ours:
            _wrap(site, function)
    for space in _namespaces():
        for name, value in list(space.items()):
            if (pair := _pair_of(value)) is not None:
                _replaced.append((space, name, pair))
                space[name] = pair.wrapper
    _modules_seen = len(sys.modules)


def _wrap(site: AttentionSite, function: Function) -> _Pair:
    if id(function) not in _wrappers:
        _wrappers[id(function)] = _Pair(site, function, _wrapper(site, function))
    return _wrappers[id(function)]


def _pair_of(value: Any) -> _Pair | None:
    """Of a known function; torch.compile(flex_attention) is a function of its own around one."""
    found = _wrappers.get(id(value))
    if found is None and type(value) is FunctionType:
        inner = _wrappers.get(id(vars(value).get("_torchdynamo_orig_callable")))
        found = None if inner is None else _wrap(inner.site, value)
    return found


def _restore() -> None:
    for space, name, pair in reversed(_replaced):
        if space.get(name) is pair.wrapper:
            space[name] = pair.original
    _replaced.clear()
    # A module that was imported meanwhile may have taken a wrapper along.
    ours = {id(pair.wrapper): pair for pair in _wrappers.values()}
    for space in _namespaces():
        for name, value in list(space.items()):
            if id(value) in ours:
                space[name] = ours[id(value)].original
    _wrappers.clear()


def _wrapper(site: AttentionSite, function: Function) -> Function:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _observers or _in_cuda_graph():
            return function(*args, **kwargs)
        called = function
        if site is SDPA and torch.overrides.has_torch_function((*args, *kwargs.values())):
            called = _as_it_was(function)
        return _run(site, called, args, kwargs)

    return observed


def _as_it_was(function: Function) -> Function:
    """``function`` with every name meaning it again while it runs.

    Tensor subclasses and torch-function modes are told of the builtin, and some ask whether it *is*
    torch.nn.functional.scaled_dot_product_attention: torch.nn.attention.bias attends to everything if it is not.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            replaced = [(space, name, pair) for space, name, pair in _replaced if space.get(name) is pair.wrapper]
            for space, name, pair in replaced:
                space[name] = pair.original
            try:
                return function(*args, **kwargs)
            finally:
                for space, name, pair in replaced:
                    if space.get(name) is pair.original:
                        space[name] = pair.wrapper

    return called


def _in_cuda_graph() -> bool:
    """Whether a CUDA graph is being recorded: what we add would be recorded too, and replayed."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _run(site: AttentionSite, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observers = tuple(_observers)
    tokens = [observer.guarded(observer.expects)() for observer in observers]
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
            fields = observer.guarded(_read)(site, function, args, kwargs, result, tap)
        if fields is None:
            return result
        observer.guarded(observer.sees)(token, fields, result)
    _thread.calls = before + 1
    for observer in observers:
        observer.guarded(observer.counts)()
    return result


def _read(
    site: AttentionSite, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tap: Tap
) -> Fields | None:
    with torch.no_grad():
        return site.read(bind(function, site, args, kwargs), result, tap)


def _functions() -> Iterator[tuple[AttentionSite, Function]]:
    """Every attention function that is loaded now."""
    from torch.nn import functional

    # Ours is imported when it is first used: by then the call would be over.
    with suppress(ImportError):
        import_module("attn_diag.kernels.attention")
    yield SDPA, functional.scaled_dot_product_attention
    yield MULTI_HEAD, functional.multi_head_attention_forward
    for module, site, names in (
        ("attn_diag.kernels.attention", OWN, ("attention",)),
        ("torch.nn.attention.flex_attention", FLEX, ("flex_attention",)),
        ("flash_attn.flash_attn_interface", FLASH_ATTN, _FLASH_ATTN_NAMES),
        ("flash_attn_interface", FLASH_ATTN, _FLASH_ATTN_NAMES),
    ):
        loaded = sys.modules.get(module)
        for name in names:
            if (function := getattr(loaded, name, None)) is not None:
                yield site, function
    for name, loaded in list(sys.modules.items()):
        if name.startswith("transformers.") and (eager := vars(loaded).get("eager_attention_forward")) is not None:
            yield EAGER, eager
    for key, function in _transformers_implementations().items():
        # sdpa ends in scaled_dot_product_attention, which knows more.
        if key != "sdpa" and callable(function):
            yield TRANSFORMERS, function


def _transformers_implementations() -> Namespace:
    """AttentionInterface's table of implementations by name.

    Their names stay what they are, so that AttentionMaskInterface goes on making the mask that each expects.
    """
    loaded = sys.modules.get("transformers.modeling_utils")
    table: Namespace = getattr(getattr(loaded, "AttentionInterface", None), "_global_mapping", {})
    return table


def _namespaces() -> Iterator[Namespace]:
    """Every place where user code may have one of the functions by name."""
    yield _transformers_implementations()
    for name, module in list(sys.modules.items()):
        inside_torch = name == "torch" or name.startswith("torch.")
        if not inside_torch or name in _TORCH_HOMES:
            space = getattr(module, "__dict__", None)
            if isinstance(space, dict):
                yield space
