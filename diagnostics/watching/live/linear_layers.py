"""The query projection of an attention module: found by watching which linear layer's output q came from."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attn_diag.watching.live.axes import is_batched
from attn_diag.watching.live.slices import Slice, same_norms, same_sizes, slices
from attn_diag.watching.live.untraced import backward_is_compiled, passed_by, untraced

QUERY_NAMES = (
    "q_proj", "query", "wq", "to_q", "q", "q_lin", "c_q", "q_a_proj", "q_b_proj", "query_proj", "linear_q",
)  # fmt: skip
FUSED_NAMES = ("c_attn", "qkv", "qkv_proj", "wqkv", "in_proj", "query_key_value", "w_pack", "attn_qkv", "to_qkv")
# Of a sequence, so many are compared.
ROWS = 8
FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_KEPT = 12


@dataclass(frozen=True)
class CapturedProjection:
    """A linear layer that makes a q."""

    layer: Any
    """A Linear, or transformers' Conv1D."""
    slice: Slice
    """The columns that are q."""
    exact: bool
    """Whether q is exactly its output (nothing in between)."""

    def weight(self, width: int) -> Tensor | None:
        """Return w_q [Hq * D, C] of the heads that ran; None where this rank holds less, as FSDP may leave it.

        Args:
            width: Columns of the layer's output.
        """
        weight = own_weight(self.layer)
        # Tensor parallelism multiplies by what FSDP would gather first.
        if weight is None or (hasattr(self.layer.weight, "to_local") and width not in weight.shape):
            return None
        rows = self.slice.columns(weight.shape[0], weight.device)
        own: Tensor = weight[rows]
        return own

    @property
    def biased(self) -> bool:
        """Whether it adds a bias."""
        return getattr(self.layer, "bias", None) is not None


# No text of its tensors in a message.
@dataclass(eq=False, repr=False)
class _Seen:
    layer: nn.Module
    name: str
    x: Tensor
    y: Tensor


class Projections:
    """Watches the linear layers of a model: at first all of them, then those that made a q; without a model none.

    Attributes:
        recording: Whether what runs is held.
        watching: Whether there is a model.
        recent: What has run since the last attention call, the newest last.
        known: What makes the q of the modules that were seen.
    """

    def __init__(self) -> None:
        self.recording = self.watching = False
        self._names: dict[nn.Module, str] = {}
        self._handles: dict[nn.Module, Any] = {}
        self.recent: deque[_Seen] = deque(maxlen=_KEPT)
        self.known: dict[str, CapturedProjection | None] = {}

    def watch(self, model: nn.Module, guarded: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Begin."""
        self.watching = True
        left_out = unhooked(model)
        self._names = {
            layer: clean(name) for name, layer in model.named_modules() if is_linear(layer) and layer not in left_out
        }
        self._handles = {layer: layer.register_forward_hook(guarded(self._ran)) for layer in self._names}

    def _ran(self, layer: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        if self.recording and args and isinstance(args[0], Tensor) and isinstance(y, Tensor) and not is_batched(y):
            self.recent.append(_Seen(layer, self._names[layer], args[0], y))

    def settle(self) -> None:
        """Leave all other layers alone, now that every attention has been seen once."""
        kept = {found.layer for found in self.known.values() if found is not None}
        if kept:
            for layer in list(self._handles):
                if layer not in kept:
                    self._handles.pop(layer).remove()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.forget()

    def forget(self) -> None:
        """Let go of the activations that are held."""
        self.recent.clear()

    def made_in(self, module: str) -> list[Tensor]:
        """What the linear layers of ``module`` have just made, the newest first."""
        prefix = f"{owner}." if (owner := self.around(module)) else ""
        return [seen.y for seen in reversed(self.recent) if seen.name.startswith(prefix)]

    def find(self, module: str, q: Tensor) -> tuple[CapturedProjection, Tensor, Tensor] | None:
        """Find the projection that made ``q`` [B, H, T, D] in ``module``, its input [B, T, C], and its own output."""
        batch, _, rows, _ = q.shape
        if not q.numel():
            return None  # a batch of nothing, from which nothing is learned
        prefix = f"{owner}." if (owner := self.around(module)) else ""
        near = [s for s in reversed(self.recent) if s.name.startswith(prefix) and s.y.numel() % (batch * rows) == 0]
        if module not in self.known:
            there = [(s.layer, s.name, y[:1, :ROWS]) for s in near if (y := by_rows(s.y, batch, rows)) is not None]
            self.known[module] = search(there, q)
        found = self.known[module]
        if found is None:
            return None
        seen = next((s for s in near if s.layer is found.layer), None)
        if seen is None:
            return None
        with suppress(ValueError):  # another thread's newer ones have pushed it out
            self.recent.remove(seen)
        x = by_rows(_whole(seen.x.detach()), batch, rows)
        return None if x is None else (found, x, seen.y)

    def around(self, module: str) -> str:
        """The name of a module, or of the next one around it that has linear layers; as it is where none is watched."""
        owner = module if self._names else ""
        while owner and not any(name.startswith(f"{owner}.") for name in self._names.values()):
            owner = owner.rpartition(".")[0]
        return owner if self._names else module


class MadeWith:
    """The linear layer that makes the q of a place.

    Args:
        projection: That.

    Attributes:
        layer: Likewise.
        biased: Whether it adds a bias.
        through: Which columns of its output q is made of, where something lies between; None: they are q.
    """

    __slots__ = ("_address", "_projection", "_rows", "_weight", "biased", "layer", "through")

    def __init__(self, projection: CapturedProjection) -> None:
        self.layer, self.biased, self._projection = projection.layer, projection.biased, projection
        self.through = None if projection.exact else projection.slice
        self._weight: Tensor | None = None
        self._rows: Tensor | None = None
        self._address = 0

    def ran(self) -> tuple[Tensor, Tensor | None, int, torch.dtype, bool] | None:
        """Its newest input and output, columns of that, its dtype, and whether the input is our own copy.

        The output only where a layer made it. None: it has not run. Nobody else is to ask again.
        """
        raise NotImplementedError

    def hands_over(self, y: Tensor | None, to_come: Callable[[Tensor], None]) -> bool:
        """Whether ``to_come`` is called with the gradient at the output ``y`` that ``ran`` has just told of."""
        raise NotImplementedError

    def goes_back(self, to_come: Callable[[Tensor], None]) -> None:
        """The backward of the call that ``to_come`` belongs to has run: the gradient comes next."""

    def serves(self, place: object) -> None:
        """Note a place whose q it makes."""

    def weight(self, width: int) -> Tensor | None:
        """The rows of its weight that make q, as they are now; ``width``: columns of its output."""
        weight = self.layer._parameters.get("weight")
        address = 0 if weight is None else weight.data_ptr()
        if weight is None or weight is not self._weight or address != self._address:
            self._rows, own = untraced(self._projection.weight, width), untraced(own_weight, self.layer)
            self._weight = None
            # Rows that are chosen one by one are a copy, which does not change with the weight.
            if weight is not None and own is not None and self._rows is not None:
                same = self._rows.data_ptr() == own.data_ptr() == address
                self._weight, self._address = weight if same else None, address
        return self._rows


class MadeWithLayer(MadeWith):
    """One that runs eagerly."""

    __slots__ = ("_layers",)

    def __init__(self, projection: CapturedProjection, layers: Projections) -> None:
        super().__init__(projection)
        self._layers = layers

    def ran(self) -> tuple[Tensor, Tensor | None, int, torch.dtype, bool] | None:
        """See ``MadeWith``."""
        for seen in reversed(self._layers.recent):
            if seen.layer is self.layer:
                return seen.x, seen.y, seen.y.shape[-1], seen.y.dtype, False
        return None

    def hands_over(self, y: Tensor | None, to_come: Any) -> bool:
        """See ``MadeWith``."""
        if y is None or not y.requires_grad or untraced(backward_is_compiled):
            return False
        to_come.handle = untraced(y.register_hook, to_come)
        return True


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made it, or compiled it in place."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def unhooked(model: nn.Module) -> set[nn.Module]:
    """Modules that get no hook: it would take inference off its fast path, or have a compiled part compiled anew."""
    closed = [m for m in model.modules() if isinstance(m, FAST_PATHS) or (m is not model and is_compiled(m))]
    return {inner for module in closed for inner in module.modules()}


def is_run_compiled(model: nn.Module) -> bool:
    """Whether it is compiled, or torch.compile made another module of it that is in use; looks through all objects."""
    if is_compiled(model) or "torch._dynamo" not in sys.modules:
        return is_compiled(model)
    held = (holder for holder in gc.get_referrers(model) if type(holder) is dict)
    return any(holder.get("_orig_mod") is model for holder in held)


def first_head(module: nn.Module, q: Tensor) -> int:
    """The number of q's first head in the whole model: tensor parallelism gives each rank some of them.

    Args:
        module: The attention module, whose projections' weights say how they are sharded.
        q: What ran, [B, Hq, T, D].
    """
    if "torch.distributed.tensor" not in sys.modules:
        return 0  # there are no DTensors then
    own = q.shape[1] * q.shape[3]
    for layer in module.modules():
        if not is_linear(layer):
            continue
        weight: Any = layer.weight
        if not hasattr(weight, "to_local") or type(layer).__name__.startswith("FSDP"):
            continue
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mine, first = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        if mine[0] % own == 0 and mine[0] < weight.shape[0]:
            return first[0] * q.shape[1] // mine[0]
    return 0


def _whole(t: Any) -> Any:
    """The tensor that every rank has of a replicated DTensor; any other as it is."""
    if hasattr(t, "to_local") and all(placement.is_replicate() for placement in t.placements):
        return t.to_local()
    return t


def clean(name: str) -> str:
    """Strip from a module's name what DDP, FSDP, checkpointing and compilation put in between."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPING)


_WRAPPING = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def own_weight(layer: nn.Module) -> Tensor | None:
    """The weight [N, C] that this rank has of a linear layer; None where it is none, or is known by its codes alone."""
    weight: Any = layer.weight.detach()  # type: ignore[operator]
    weight = weight.to_local() if hasattr(weight, "to_local") else weight
    wrapped: bool = is_traceable_wrapper_subclass(weight)
    if wrapped:  # torchao's codes and scales, say: the numbers that they stand for
        with suppress(NotImplementedError, RuntimeError):
            weight = weight.dequantize()
    if weight.dim() != 2 or _in_codes(weight):
        return None
    # transformers' Conv1D keeps its weight as [C, N].
    return weight.T if _is_conv1d(layer) else weight  # type: ignore[no-any-return]


def in_codes(layer: nn.Module) -> bool:
    """Whether the weight is stored in a form from which its numbers cannot be read."""
    return not hasattr(layer.weight, "to_local") and _in_codes(layer.weight.detach())


def _in_codes(weight: Tensor) -> bool:
    """Integers, FP8 without the scales that the layer keeps elsewhere, or no plain tensor at all."""
    return type(weight) is not Tensor or not weight.is_floating_point() or weight.dtype.itemsize < 2


def is_linear(layer: nn.Module) -> bool:
    """Whether it multiplies by a weight: a Linear, or transformers' Conv1D."""
    return isinstance(layer, nn.Linear) or _is_conv1d(layer)


def _is_conv1d(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def by_rows(t: Tensor, batch: int, rows: int) -> Tensor | None:
    """[B, T, N] of [B, T, N] or [B * T, N]; None where it is neither."""
    if t.dim() == 2 and t.shape[0] == batch * rows:
        return t.reshape(batch, rows, -1)
    return t if t.dim() == 3 and tuple(t.shape[:2]) == (batch, rows) else None


@torch.no_grad()
def search(near: Sequence[tuple[Any, str, Tensor]], q: Tensor) -> CapturedProjection | None:
    """Tell the projection by equal values; else by equal norms of rows, which rotations keep; else by usual names.

    Args:
        near: Linear layers (or what stands for one), the newest first: each with its name and the first rows of its
            output, [1, R, N], ``ROWS`` or all there are.
        q: What attention was given, [B, H, T, D].
    """
    heads, dim = q.shape[1], q.shape[3]
    # Usual names first: at initialisation several projections may be zero, and equal.
    ordered = sorted(near, key=lambda one: one[1].rpartition(".")[2].lower() not in QUERY_NAMES + FUSED_NAMES)
    candidates = [(layer, name, y, part) for layer, name, y in ordered for part in slices(y.shape[-1], heads, dim)]
    wanted = q[:1, :, :ROWS]
    # Each comparison waits for the device: the usual case needs one.
    for layer, _, y, part in candidates:
        if torch.equal(part.of(y).to(q.dtype), wanted):
            return CapturedProjection(layer, part, exact=True)
    for layer, _, y, part in candidates:
        if same_norms(part.of(y), wanted):
            return CapturedProjection(layer, part, exact=False)
    for layer, name, y in ordered:
        last, times = name.rpartition(".")[2].lower(), y.shape[-1] / (heads * dim)
        if (last in QUERY_NAMES and times in (1, 2)) or (last in FUSED_NAMES and times > 1):
            fits = {part: same_sizes(part.of(y), wanted) for part in slices(y.shape[-1], heads, dim)}
            best = max(fits, key=lambda part: fits[part])
            # A gate may be beside q in ways that are not known.
            if fits[best] or last in FUSED_NAMES or times == 1:
                return CapturedProjection(layer, best, exact=False)
    return None


for _ours in (MadeWith.weight, MadeWith.goes_back, MadeWithLayer.ran, MadeWithLayer.hands_over):
    passed_by(_ours.__code__)
