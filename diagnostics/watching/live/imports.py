"""Tells of modules with attention functions, or that register operators, as they are imported while somebody watches.

Libraries import kernels when these are first called: transformers flash_attn, torch its jagged tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from attn_diag.watching.live.functions import may_have_functions
from attn_diag.watching.live.kernels import operators
from attn_diag.watching.live.observer import Observer

# Packages that register operators with torch, and a module of torch's own.
_REGISTERING = (
    "flash_attn", "flash_attn_interface", "flash_attn_3", "vllm", "vllm_flash_attn", "sgl_kernel", "xformers",
)  # fmt: skip
_VARLEN = "torch.nn.attention.varlen"


class ImportWatch(MetaPathFinder):
    """Between ``begin`` and ``end`` calls ``told`` behind each such import; ``observers`` hear what that raises."""

    def __init__(self, told: Callable[[], object], observers: Sequence[Observer]) -> None:
        self._told, self._observers = told, observers

    def begin(self) -> None:
        """Stand in front of what finds modules; once."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Be gone; from another list, as a thread that goes through this one would miss the next finder."""
        if self in sys.meta_path:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the others find; with a loader that tells when it has run the module."""
        always = may_have_functions(fullname) or any(o.needs == fullname for o in operators())
        if not always and fullname.partition(".")[0] not in _REGISTERING and fullname != _VARLEN:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    # Not another attribute of the loader, which may be many modules' (a zip file's), or take none.
                    spec.loader = _Telling(spec.loader, self, always=always)  # type: ignore[assignment]
                return spec
        return None

    def tell(self) -> None:
        """A module has been run; nothing of ours is raised in somebody's import."""
        try:
            self._told()
        except Exception as error:
            for observer in tuple(self._observers):
                observer.failed(error)


class _Telling:
    """A loader until it has run the module, which gets the loader itself before, as ``importlib.util.LazyLoader`` does.

    Args:
        loader: It.
        watch: Who is told once it has.
        always: Whether to tell of any module; else of one that has registered operators.
    """

    def __init__(self, loader: Any, watch: ImportWatch, *, always: bool) -> None:
        self._loader, self._watch, self._always = loader, watch, always

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._loader,)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module."""
        for holder, name in ((getattr(module, "__spec__", None), "loader"), (module, "__loader__")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        before = _registered()
        self._loader.exec_module(module)
        if self._always or _registered() > before:
            self._watch.tell()


def _itself(loader: Any) -> Any:
    return loader


def _registered() -> int:
    """How many of the known operators there are."""
    return sum(torch._C._dispatch_has_kernel(o.name) for o in operators() if not o.is_function)
