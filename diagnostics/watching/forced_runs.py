"""A copy of a transformers model that is run on the same tokens again and again, with values put in place of its own.

What can be put: what enters a layer's attention (x), its q, k and v, its O, and what enters the LM head. What the model
had there before is kept, which is its answer to everything that was put below.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attn_diag.errors import InputError
from attn_diag.watching.live.linear_layers import is_linear

_NAMES = ("module", "query", "key", "value")
# Transformers' own kernels that take 16 bits alone, or that no compiler makes for float64.
_NARROW = ("flash_attention", "flex_attention", "paged|")
_OF = {"query": "q", "key": "k", "value": "v"}


@dataclass(frozen=True)
class LayerTargets:
    """What one layer is given in place of its own; None, and NaN in a row: its own stays."""

    x: Tensor | None = None
    """What enters attention, [B, T, C]."""
    q: Tensor | None = None
    """[B, Hq, T, D]."""
    k: Tensor | None = None
    """[B, Hq, T, D]: of each query head the key head that it reads."""
    v: Tensor | None = None
    """[B, Hq, T, Dv], likewise."""
    added: Tensor | None = None
    """What is added to O, [B, Hq, T, Dv]; NaN in a row: nothing."""
    o: Tensor | None = None
    """[B, Hq, T, Dv]."""
    output: Tensor | None = None
    """What is added to what the output projection returns, [B, T, C]; NaN in a row: nothing."""


@dataclass
class SeenRun:
    """What the model computed by itself in one run, at every place before anything was put there."""

    x: dict[int, Tensor] = field(default_factory=dict)
    """By layer, [B, T, C]."""
    calls: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By layer q, k, v, o; [B, H, T, D] each."""
    head: Tensor | None = None
    """What enters the LM head, [B, T, C]; None: the model has none that it names."""
    logprobs: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Of token t + 1 after those up to t, float64 [B, T - 1]."""


class ForcedModel:
    """The copy.

    Args:
        model: A Hugging Face transformers model for causal language modelling.
        input_ids: Its tokens, [B, T].
        dtype: What the copy computes in; None: as the model does. Where the model's attention is a kernel of
            transformers' that cannot, eager attention computes it.
        inputs: More of its inputs.
    """

    def __init__(
        self, model: nn.Module, input_ids: Tensor, dtype: torch.dtype | None, inputs: Mapping[str, Any]
    ) -> None:
        made: Any = copy.deepcopy(model).eval()
        for module in made.modules():
            # A wrapper that a framework put there (accelerate) holds the original, and would run that one's modules.
            if hasattr(vars(module).get("forward"), "__wrapped__"):
                del module.forward
        self._model = made if dtype is None else made.to(dtype)
        if dtype is not None and _is_narrow(_implementation(made)):
            made.set_attn_implementation("eager")
        self._dtype = dtype
        self._ids, self._inputs = input_ids, dict(inputs)
        self._layers: dict[int, int] = {}

    def run(self, targets: Mapping[int, LayerTargets] | None = None, head: Tensor | None = None) -> SeenRun:
        """One forward with these values put, by layer, and before the LM head [B, T, C]."""
        seen = SeenRun()
        with torch.no_grad(), self._seeing(seen, targets or {}, head):
            logits = self._model(input_ids=self._ids, use_cache=False, **self._inputs).logits
        every = logits[:, :-1].double().log_softmax(-1)
        seen.logprobs = every.gather(2, self._ids[:, 1:, None].to(logits.device))[..., 0].cpu()
        return seen

    @contextmanager
    def _seeing(self, seen: SeenRun, targets: Mapping[int, LayerTargets], head: Tensor | None) -> Iterator[None]:
        entered: dict[int, Tensor] = {}
        attended: list[nn.Module] = []  # whose O comes next

        def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = kwargs.get("hidden_states") if not args else args[0]
            if not isinstance(given, Tensor):
                return None
            entered[id(module)] = given
            target = targets.get(self._layers.get(id(module), -1))
            if target is None or target.x is None:
                return None
            put = _put(given, target.x)
            return ((put, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": put})

        def attend(original: Callable[..., Any], module: nn.Module, layer: int, args: Any, kwargs: Any) -> Any:
            self._layers[id(module)] = layer
            attended[:] = [module]
            if id(module) in entered:
                seen.x[layer] = entered[id(module)]
            try:
                return _call(original, seen, layer, targets.get(layer, LayerTargets()), (module, *args), kwargs)
            except Exception as error:
                if self._dtype is None:
                    raise
                raise InputError(
                    f"the model's attention, {_implementation(self._model)!r}, failed in {self._dtype}, in which its "
                    f"shares are computed ({type(error).__name__}); make it take that, or call "
                    "model.set_attn_implementation('eager') on a model with the same weights, and give that one"
                ) from error

        def projected(product: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            del args
            if not attended or product not in set(attended[0].modules()):
                return None
            target = targets.get(self._layers[id(attended.pop())], LayerTargets()).output
            return None if target is None else result + target.nan_to_num(0.0).to(result)

        def last(module: nn.Module, args: tuple[Any, ...]) -> Any:
            del module
            seen.head = args[0]
            return None if head is None else (_put(args[0], head), *args[1:])

        with ExitStack() as stack:
            for module in self._model.modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    hook = module.register_forward_pre_hook(entering, with_kwargs=True)
                    stack.callback(hook.remove)
                elif is_linear(module):
                    stack.callback(module.register_forward_hook(projected).remove)
            get_head = getattr(self._model, "get_output_embeddings", lambda: None)
            if (product := get_head()) is not None:
                stack.callback(product.register_forward_pre_hook(last).remove)
            stack.enter_context(_attending(self._model, attend))
            yield


def _put(free: Tensor, target: Tensor) -> Tensor:
    """The target where it has a value."""
    wanted = target.to(free)
    return torch.where(wanted.isnan(), free, wanted)


def _of_key_heads(target: Tensor, heads: int) -> Tensor:
    return target[:, :: target.shape[1] // heads if heads < target.shape[1] else 1]


def _call(
    attend: Callable[..., Any], seen: SeenRun, layer: int, target: LayerTargets, args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """One call of attention: args are the module, q, k and v (any of them by name)."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    seen.calls[layer] = {short: given[name] for name, short in _OF.items()}
    for name, short in _OF.items():
        if (wanted := getattr(target, short)) is not None:
            given[name] = _put(given[name], _of_key_heads(wanted, given[name].shape[1]))
    result = attend(*(given.pop(name) for name in _NAMES), *args[len(_NAMES) :], **given)
    # transformers' O is [B, T, H, D].
    out = result[0] if isinstance(result, tuple) else result
    seen.calls[layer]["o"] = out.transpose(1, 2)
    if target.added is not None:
        out = out + target.added.nan_to_num(0.0).transpose(1, 2).to(out)
    if target.o is not None:
        out = _put(out, target.o.transpose(1, 2)).contiguous()
    return (out, *result[1:]) if isinstance(result, tuple) else out


def _implementation(model: nn.Module) -> str:
    """Which attention it runs. Raises InputError for a model that is none of transformers'."""
    name: str | None = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name is None:
        raise InputError(f"model must be one of Hugging Face transformers, got {type(model).__name__}")
    return name


def _is_narrow(name: str) -> bool:
    """Whether it is a kernel of transformers' that float64 is not for; those of a hub have a slash in their names."""
    return "/" in name or name.startswith(_NARROW)


@contextmanager
def _attending(model: nn.Module, attend: Callable[..., Any]) -> Iterator[None]:
    """Have a transformers model's attention go through ``attend`` meanwhile."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = _implementation(model)
    home: Any = ALL_ATTENTION_FUNCTIONS._global_mapping
    if name == "eager":
        home, name = vars(sys.modules[type(model).__module__]), "eager_attention_forward"
    original = home[name]
    ours = {id(module) for module in model.modules()}

    def through(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(module, "layer_idx", None)
        if layer is None or id(module) not in ours:
            return original(module, *args, **kwargs)
        return attend(original, module, layer, args, kwargs)

    home[name] = through
    try:
        yield
    finally:
        home[name] = original
