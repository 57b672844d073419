"""What is checked: a callable, torch's SDPA by backend, or a recipe that is emulated; its outputs, checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.baseline import require_known
from attn_diag.head.machine import backend_name
from attn_diag.kernels import PRESETS, Recipe, RecipeNotSupportedError, check_supported, emulate_head, preset
from attn_diag.reference import AttentionHead, Masking
from attn_diag.testing.regression.cases import CaseInputs
from attn_diag.work import map_in_order

# fn(q, k, v) -> o, or (o, lse, ...); [B, H, T, D].
Attention = Callable[[Tensor, Tensor, Tensor], Any]
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SDPA = ("flash", "efficient", "cudnn", "math")
_GRADIENTS = ("dq", "dk", "dv")


class MisfitError(Exception):
    """What came back is not the attention asked for; the message says what was expected and what came."""


class NoGradientError(MisfitError):
    """Autograd has no gradients to give: a kernel of the forward alone."""


@dataclass(frozen=True)
class CheckedKernel:
    """A named attention and where it runs. ``run(case)``: outputs by name, on the CPU, beside notes."""

    name: str
    backend: str
    run: Callable[[CaseInputs], tuple[dict[str, Tensor], list[str]]]
    # The masks and scales that it computes, where it is not told which: those of the suite.
    fixed: bool = False


def subject_of(
    target: Attention | str | Recipe, name: str | None, *, dtype: torch.dtype, head_dim: int, device: torch.device,
    backward: bool | None,
) -> CheckedKernel:  # fmt: skip
    """What to check. Raises InputError for what is none of a callable, ``sdpa``, ``sdpa:BACKEND`` and a recipe."""
    if isinstance(target, str) and target.partition(":")[0] == "sdpa":
        return _sdpa(target, name, device, backward)
    if isinstance(target, str | Recipe):
        if isinstance(target, str) and target not in PRESETS:
            known = ", ".join(["sdpa", *(f"sdpa:{b}" for b in SDPA), *PRESETS])
            raise InputError(f"no kernel {target!r}; known: {known}, or pass a callable fn(q, k, v) -> o")
        require_known("emulation", [target])
        recipe = preset(target, DTYPES[dtype], head_dim) if isinstance(target, str) else target.for_input(DTYPES[dtype])
        try:
            check_supported(recipe)
        except RecipeNotSupportedError as error:
            raise InputError(str(error)) from None
        run = _Emulated(recipe, device, with_gradients=backward is not False)
        return CheckedKernel(name or recipe.name, f"emulation on {backend_name(device)}", run)
    if not callable(target):
        raise InputError(f"expected a callable fn(q, k, v), a recipe or a name, got {type(target).__name__}")
    own = str(getattr(target, "__name__", type(target).__name__))
    wrapped = _Called(lambda q, k, v, _: target(q, k, v), device, backward)
    return CheckedKernel(name or ("fn" if own == "<lambda>" else own), backend_name(device), wrapped, fixed=True)


def _sdpa(target: str, name: str | None, device: torch.device, backward: bool | None) -> CheckedKernel:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _, _, backend = target.partition(":")
    known = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    if target != "sdpa" and backend not in known:
        raise InputError(f"no SDPA backend {backend!r}; known: {', '.join(known)}")

    def fn(q: Tensor, k: Tensor, v: Tensor, case: CaseInputs) -> Tensor:
        if case.causal == "bottom-right" and q.shape[2] != k.shape[2]:
            raise InputError(f"{case.name}: torch's is_causal is top-left, and Tq and Tk differ; leave it out")
        with sdpa_kernel([known[backend]]) if backend else nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal != "none", scale=case.scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    return CheckedKernel(name or target, backend_name(device), _Called(fn, device, backward))


@dataclass
class _Called:
    """Calls a function on copies of a case's inputs, with autograd where it is differentiable."""

    fn: Callable[[Tensor, Tensor, Tensor, CaseInputs], Any]
    device: torch.device
    backward: bool | None
    notes: list[str] = field(default_factory=list)

    def __call__(self, case: CaseInputs) -> tuple[dict[str, Tensor], list[str]]:
        notes: list[str] = []
        wanted = self.backward is not False and case.do is not None
        if wanted:
            try:
                return self._run(case, with_gradients=True), notes
            except NoGradientError as error:
                if self.backward:
                    raise
                notes.append(f"no gradients were checked: {error}")
        return self._run(case, with_gradients=False), notes

    def _run(self, case: CaseInputs, *, with_gradients: bool) -> dict[str, Tensor]:
        originals = (case.q, case.k, case.v)
        copies = [x.to(self.device, copy=True).requires_grad_(with_gradients) for x in originals]
        with _reported("raised"), torch.set_grad_enabled(with_gradients):
            found = self.fn(copies[0], copies[1], copies[2], case)
        o = found[0] if isinstance(found, tuple | list) and found else found
        rest = found[1:] if isinstance(found, tuple | list) else ()
        outputs = {"o": self._checked(o, case)}
        if rest and isinstance(rest[0], Tensor) and rest[0].shape == case.q.shape[:3] and rest[0].is_floating_point():
            outputs["lse"] = rest[0].detach().float().cpu()
        if with_gradients:
            assert case.do is not None
            if not o.requires_grad:
                raise NoGradientError(
                    "what it returns does not depend on q, k, v for autograd (it is not differentiable)"
                )
            with _reported("raised in its backward"):
                grads = torch.autograd.grad(o, copies, case.do.to(self.device, o.dtype), allow_unused=True)
            missing = [n for n, g in zip(_GRADIENTS, grads, strict=True) if g is None]
            if missing:
                raise MisfitError(f"autograd gives no {', '.join(missing)}")
            outputs |= {n: g.detach().cpu() for n, g in zip(_GRADIENTS, grads, strict=True)}
        for n, x, copy in zip(("q", "k", "v"), originals, copies, strict=True):
            if not torch.equal(_bits(x), _bits(copy.detach().cpu())):
                raise MisfitError(f"it changed its input {n} in place, which its caller's backward needs unchanged")
        return outputs

    def _checked(self, o: Any, case: CaseInputs) -> Tensor:
        if not isinstance(o, Tensor):
            raise MisfitError(f"it must return a tensor o, or a tuple that starts with it, got {type(o).__name__}")
        expected = [*case.q.shape[:3], case.v.shape[3]]
        if list(o.shape) != expected:
            raise MisfitError(f"it must return o of shape [B, H, T, D] {expected}, got {list(o.shape)}")
        if o.dtype not in (case.q.dtype, torch.float32):
            raise MisfitError(f"it must return o in {case.q.dtype} or torch.float32, got {o.dtype}")
        return o.detach().cpu()


@dataclass
class _Emulated:
    """Runs a recipe head by head."""

    recipe: Recipe
    device: torch.device
    with_gradients: bool

    def __call__(self, case: CaseInputs) -> tuple[dict[str, Tensor], list[str]]:
        return emulate(self.recipe, case, self.device, with_gradients=self.with_gradients), []


def emulate(
    recipe: Recipe, case: CaseInputs, device: torch.device, *, with_gradients: bool = True, sequences: int | None = None
) -> dict[str, Tensor]:
    """o, lse and, with dO, dq, dk and dv of a recipe on (the first ``sequences`` of) a case, on the CPU."""
    batch, heads = case.q.shape[:2]
    batch = batch if sequences is None else min(batch, sequences)
    group = heads // case.k.shape[1]
    do = case.do if with_gradients else None

    def one(place: tuple[int, int]) -> dict[str, Tensor]:
        b, h = place
        q, k, v = (x.to(device).double() for x in (case.q[b, h], case.k[b, h // group], case.v[b, h // group]))
        head_do = None if do is None else do[b, h].to(device).double()
        found = emulate_head(recipe, AttentionHead(q, k, v, head_do, case.scale, Masking(causal=case.causal)))
        names = ("o", "lse", *_GRADIENTS) if do is not None else ("o", "lse")
        return {n: getattr(found, n).cpu() for n in names}

    places = [(b, h) for b in range(batch) for h in range(heads)]
    each = list(map_in_order(one, places, parallel=device.type == "cpu"))
    stacked = {n: torch.stack([e[n] for e in each]) for n in each[0]}
    outputs = {n: x.view(batch, heads, *x.shape[1:]) for n, x in stacked.items()}
    if group > 1 and do is not None:
        # Query heads that share a key head add their gradients, rounded once more.
        for n in ("dk", "dv"):
            x = outputs[n]
            outputs[n] = x.double().view(batch, heads // group, group, *x.shape[2:]).sum(2).to(x.dtype)
    return {n: x.float() if n == "lse" else x for n, x in outputs.items()}


class _reported:  # noqa: N801 - reads as a statement
    """Turns an exception inside into a MisfitError with its type and first line."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, InputError | MisfitError):
            first = (str(error).strip().splitlines() or ["no message"])[0]
            raise MisfitError(f"it {self.what}: {type(error).__name__}: {first}") from error


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)
