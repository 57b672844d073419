"""What is probed: a callable, or a recipe that is emulated; its outputs, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.baseline import require_known
from attn_diag.head.machine import backend_name
from attn_diag.kernels import Recipe, RecipeNotSupportedError, check_supported, emulate_head, preset
from attn_diag.reference import AttentionHead, Masking
from attn_diag.work import map_in_order

# What is probed: fn(q, k, v) -> o, (o, lse) or (o, ...), [B, H, T, D].
Attention = Callable[[Tensor, Tensor, Tensor], Any]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Output:
    """o [B, H, T, D], and L [B, H, T] (natural logarithm) where it came too."""

    o: Tensor
    lse: Tensor | None


@dataclass(frozen=True)
class ProbedKernel:
    """A named attention and where it runs. ``backend``: what a report calls the origin of the numbers.

    ``emulated``: it is a recipe.
    """

    name: str
    backend: str
    fn: Attention
    device: torch.device
    emulated: bool = False

    def __call__(self, probe: str, inputs: tuple[Tensor, Tensor, Tensor]) -> Output:
        """O on inputs [B, H, T, D], given as copies. Raises InputError, naming the probe, for what is no such O."""
        copies = [x.to(self.device, copy=True) for x in inputs]
        where = f"probe '{probe}': {self.name}"
        try:
            with torch.no_grad():
                found = self.fn(*copies)
        except (InputError, KeyboardInterrupt):
            raise
        except Exception as error:
            shape = list(inputs[0].shape)
            raise InputError(
                f"{where} raised {type(error).__name__} on q, k, v {shape} {inputs[0].dtype}: {_first_line(error)}; "
                "leave this probe out or choose another shape if fn does not cover it"
            ) from error
        rest = found[1:] if isinstance(found, tuple | list) and found else ()
        o = found[0] if isinstance(found, tuple | list) and found else found
        self._check(where, o, inputs[2])
        lse = rest[0] if rest and _is_lse(rest[0], inputs[0]) else None
        return Output(o.detach(), lse)

    def _check(self, where: str, o: Any, v: Tensor) -> None:
        if not isinstance(o, Tensor):
            raise InputError(f"{where} must return a tensor o, or a tuple that starts with it, got {type(o).__name__}")
        if o.shape != v.shape:
            raise InputError(f"{where} must return o of shape [B, H, T, D] {list(v.shape)}, got {list(o.shape)}")
        if o.dtype not in (v.dtype, torch.float32):
            raise InputError(f"{where} must return o in {v.dtype} or torch.float32, got {o.dtype}")
        if o.device.type != self.device.type:
            raise InputError(f"{where} must return o on {self.device}, got {o.device}; pass device='{o.device.type}'")


def subject_of(
    fn: Attention | str | Recipe, name: str | None, *, dtype: torch.dtype, head_dim: int, scale: float,
    masking: Masking, device: torch.device,
) -> ProbedKernel:  # fmt: skip
    """What to probe: ``fn`` itself, or a recipe by name or value, emulated head by head.

    Raises InputError for what is neither, for unknown or incomplete recipes, and for a recipe's dtype that is not
    BF16 or FP16.
    """
    if callable(fn):
        own = str(getattr(fn, "__name__", type(fn).__name__))
        return ProbedKernel(name or ("fn" if own == "<lambda>" else own), backend_name(device), fn, device)
    if not isinstance(fn, str | Recipe):
        raise InputError(f"fn must be a callable fn(q, k, v), or a recipe or its name, got {type(fn).__name__}")
    require_known("emulation", [fn])
    if dtype not in (torch.bfloat16, torch.float16):
        raise InputError(f"recipes are run for bfloat16 and float16 inputs, got {_plain(dtype)}")
    recipe = preset(fn, DTYPES[dtype], head_dim) if isinstance(fn, str) else fn.for_input(DTYPES[dtype])
    try:
        check_supported(recipe)
    except RecipeNotSupportedError as error:
        raise InputError(str(error)) from None
    backend = f"emulation on {backend_name(device)}"
    return ProbedKernel(name or recipe.name, backend, _emulated(recipe, scale, masking), device, emulated=True)


def _emulated(recipe: Recipe, scale: float, masking: Masking) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        def one(place: tuple[int, int]) -> tuple[Tensor, Tensor]:
            head = AttentionHead(q[place].double(), k[place].double(), v[place].double(), None, scale, masking)
            found = emulate_head(recipe, head, key_gradients=False)
            # A format that torch lacks comes in the recipe's arithmetic, which may be float64.
            out = found.o.float() if found.o.dtype == torch.float64 else found.o
            return out, found.lse

        places = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[1])]
        outs, lses = zip(*map_in_order(one, places, parallel=q.device.type == "cpu"), strict=True)
        return torch.stack(outs).view(*q.shape[:2], *outs[0].shape), torch.stack(lses).view(*q.shape[:3])

    return run


def _is_lse(x: Any, q: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == q.shape[:3] and x.is_floating_point()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
