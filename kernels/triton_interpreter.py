"""Triton's interpreter: whether the kernels run in it, and its faults that would stop them, mended.

Modules of kernels import this; it holds for the whole process, the reference's kernels included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def _take_bounds_of_arrays(interpreter: Any) -> None:
    """Loop bounds are taken by int() of one-element arrays, which numpy 2.4 refuses; fixed in 3.7."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_with_item(tensor: Any, scope: object) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_item


def _make_bits_of_comparisons(interpreter: Any) -> None:
    """A comparison's result says that it is of its operands' type; spread over a mask it becomes that, and 3.9 then
    refuses to load or store by it."""
    builder = interpreter.InterpreterBuilder

    def mended(compare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, left, right: interpreter.TensorHandle(compare(self, left, right).data.astype(bool), tl.int1)

    for name in [name for name in dir(builder) if name.startswith(("create_icmp", "create_fcmp"))]:
        setattr(builder, name, mended(getattr(builder, name)))


if INTERPRETED.value:
    from triton.runtime import interpreter

    if triton.__version__.startswith("3.6"):
        _take_bounds_of_arrays(interpreter)
    elif not triton.__version__.startswith(("3.7", "3.8")):
        _make_bits_of_comparisons(interpreter)
