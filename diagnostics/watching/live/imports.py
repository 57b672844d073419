"""Tells of modules with attention functions, or that register operators, as they are imported while somebody watches.

Libraries import kernels when these are first called: transformers flash_attn, torch its jagged tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from attn_diag.watching.live.functions import may_have_functions
from attn_diag.watching.live.kernels import operators

# Packages that register operators with torch, and a module of torch's own.
_REGISTERING = (
    "flash_attn", "flash_attn_interface", "flash_attn_3", "vllm", "vllm_flash_attn", "sgl_kernel", "xformers",
)  # fmt: skip
_VARLEN = "torch.nn.attention.varlen"


class ImportWatch(MetaPathFinder):
    """Between ``begin`` and ``end`` calls ``told`` behind each such import."""

    def __init__(self, told: Callable[[], object]) -> None:
        self._told = told

    def begin(self) -> None:
        """Stand in front of what finds modules; once."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Be gone."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the others find; with a loader that tells when it has run the module."""
        always = may_have_functions(fullname) or any(o.needs == fullname for o in operators())
        if not always and fullname.partition(".")[0] not in _REGISTERING and fullname != _VARLEN:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    self._tell_behind(spec.loader, always=always)
                return spec
        return None

    def _tell_behind(self, loader: Loader, *, always: bool) -> None:
        """Tell once the loader, which is one module's, has run it; not ``always``: if it has registered operators."""
        run, before = loader.exec_module, _registered()

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            if always or _registered() > before:
                self._told()

        loader.exec_module = exec_module  # type: ignore[method-assign]


def _registered() -> int:
    """How many of the known operators there are."""
    return sum(torch._C._dispatch_has_kernel(o.name) for o in operators() if not o.is_function)
