"""Attention functions without an operator of their own, and the names under which loaded modules have them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from attn_diag.watching.live.jagged_calls import JAGGED
from attn_diag.watching.live.kernels import operators
from attn_diag.watching.live.methods import method_spaces, methods
from attn_diag.watching.live.rings import RING_HOMES, TORCH_RING, ring_functions
from attn_diag.watching.live.sites import (
    EAGER,
    FLASH_ATTN,
    FLEX,
    MULTI_HEAD,
    PATCHED,
    REGISTERED,
    TRANSFORMERS,
    AttentionSite,
    Function,
)

Namespace = dict[str, Any]
# What torch.compile leaves on a function that it makes of another: that one.
COMPILED = "_torchdynamo_orig_callable"
_FLASH_ATTN_NAMES = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func")
# Versions that register operators are met by those.
_FLASH_ATTN = (
    ("flash_attn.flash_attn_interface", "flash_attn::_flash_attn_forward"),
    ("flash_attn_interface", "flash_attn_3::fwd"),
)
_NESTED = "torch.nested._internal.ops"
_IMPLEMENTATIONS = "transformers.modeling_utils"
_TORCH_HOMES = ("torch.nn.functional", "torch.nn.attention.flex_attention", _NESTED, TORCH_RING)


def attention_functions() -> Iterator[tuple[AttentionSite, Function]]:
    """Every attention function that is loaded now."""
    from torch.nn import functional

    # The builtin is met as an operator; somebody may have put another function in its place.
    sdpa = functional.scaled_dot_product_attention
    # Not that of context_parallel: it ends in a ring, and is only put back where it is found as it was left.
    if sdpa is not torch._C._nn.scaled_dot_product_attention and getattr(sdpa, "__module__", "") != TORCH_RING:
        yield PATCHED, sdpa
    yield from ring_functions(sys.modules)
    yield MULTI_HEAD, functional.multi_head_attention_forward
    yield from methods()
    unregistered = [module for module, name in _FLASH_ATTN if not torch._C._dispatch_has_kernel(name)]
    for module, site, names in (
        ("torch.nn.attention.flex_attention", FLEX, ("flex_attention",)),
        (_NESTED, JAGGED, ("jagged_scaled_dot_product_attention",)),
        *((module, FLASH_ATTN, _FLASH_ATTN_NAMES) for module in unregistered),
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
            yield TRANSFORMERS if _theirs(function) else REGISTERED, function


def may_have_functions(module: str) -> bool:
    """Whether a module of this name, loaded or not, may have attention functions."""
    if module.startswith("transformers."):
        return module == _IMPLEMENTATIONS or ".modeling_" in module
    known = (*_TORCH_HOMES, *(home for home, _ in _FLASH_ATTN), *RING_HOMES)
    return module in known or any(o.is_function and o.name.partition(":")[0] == module for o in operators())


def _theirs(function: Function) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("transformers.")


def _transformers_implementations() -> Namespace:
    """AttentionInterface's table of implementations by name.

    Their names stay what they are, so that AttentionMaskInterface goes on making the mask that each expects.
    """
    loaded = sys.modules.get(_IMPLEMENTATIONS)
    table: Namespace = getattr(getattr(loaded, "AttentionInterface", None), "_global_mapping", {})
    return table


def namespaces() -> Iterator[Namespace]:
    """Every place where user code may have one of the functions by name."""
    yield _transformers_implementations()
    yield from method_spaces()
    for name, module in list(sys.modules.items()):
        inside_torch = name == "torch" or name.startswith("torch.")
        if not inside_torch or name in _TORCH_HOMES:
            space = getattr(module, "__dict__", None)
            if isinstance(space, dict):
                yield space


def namespaces_with(known: Mapping[int, object], *, compiled: bool = False) -> Iterator[Namespace]:
    """Those of ``namespaces`` that have a value with one of these ids; of two hundred thousand, few have.

    Args:
        known: By id; more may be added between one namespace and the next.
        compiled: Also those with a function that torch.compile made of another (``COMPILED``).
    """
    for space in namespaces():
        values = list(space.values())
        functions = [value for value in values if compiled and type(value) is FunctionType]
        if not known.keys().isdisjoint(map(id, values)) or any(hasattr(f, COMPILED) for f in functions):
            yield space
