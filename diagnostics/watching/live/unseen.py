"""Which attention modules took part in a step without being seen, and what makes them seen: said once, by name.

A compiled graph tells nobody which modules it holds, and a hook in one would change it. What a module's query
projection tells after a step is its gradient: a new one, that is not zero, has come through attention.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from attn_diag.watching.live import flex_graphs, intercept, rwkv_operators
from attn_diag.watching.live.class_code import calls_linear, is_linear, kernels, mentions, names, recurs
from attn_diag.watching.live.linear_calls import operator_of
from attn_diag.watching.live.linear_layers import FUSED_NAMES, QUERY_NAMES, is_run_compiled
from attn_diag.watching.live.places import CallPlaces, is_attention_by_name
from attn_diag.watching.live.untraced import has_compiled

# So many steps of an optimizer that may be another model's without any attention call are worth a word.
_BLIND = 3
# In so many steps gradients are looked for: where an output projection begins with zeros, the first brings none.
_STEPS = 3
_MOST_NAMES = 6
# What a user is told where nothing can be seen, by whoever watches.
UNSEEN = "no attention call was seen"
REPLAYED = (
    "be replayed from a CUDA graph that was recorded before (make the capture or Monitor before the first step, or "
    "call torch._dynamo.reset() after it)"
)
NOTHING = (
    f"{UNSEEN}. It may be the model's own products and softmax (have its function of q, k and v seen: "
    f"@attn_diag.observe), {REPLAYED}, be plain products and softmax, or a "
    "Triton kernel, inside a compiled graph (torch.compiler.disable leaves them out), run on the fast path of "
    "nn.TransformerEncoder or nn.MultiheadAttention in eval mode (torch.backends.mha.set_fastpath_enabled(False)), "
    "call a kernel that is not known here, or be another model's than the one that was given (a copy's, say)"
)
FLEX = (
    "FlexAttention in a compiled graph is not seen that was compiled before the capture or Monitor was made: make it "
    "before the first step, or call torch._dynamo.reset() after it"
)
IN_EAGER = (
    "in eager code it calls no attention function or operator that is known. Have the function of q, k and v that it "
    "calls seen (code inside a forward has to become one): @attn_diag.observe"
)
LINEAR = "it calls {} (linear attention): attn_diag.capture_linear captures that"
RECURRENCE = "it calls {}: a recurrence that is neither captured nor judged here"
OWN_RECURRENCE = (
    "it has decays, and calls no function that is known: its own linear attention, if it is that. Once that is a "
    "function with an operator's arguments (not Mamba-1's), attn_diag.capture_linear or Monitor sees it: "
    "functions={operator: function}"
)
FUSED_SCAN = " (not mamba_ssm's mamba_split_conv1d_scan_combined, which a training step calls where it is installed)"
OUTSIDE = ", outside of compiled graphs"
UNKNOWN = (
    "it calls {}: not known here. If that is softmax attention of q, k and v and nothing else, have it seen: "
    "@attn_diag.observe"
)
OWN_IN_GRAPH = (
    "in a compiled graph it is no operator that is known. Have the function of q, k and v that it calls seen, outside "
    "of the graph (not with fullgraph=True): @torch.compiler.disable above @attn_diag.observe"
)
EAGER_IN_GRAPH = (
    "transformers' eager attention is no operator of a compiled graph. Before the model is compiled: "
    'model.set_attn_implementation("sdpa")'
)
MATH_IN_GRAPH = (
    "in a compiled graph SDPA is seen where a fused kernel does it, not where it became matrix products (a mask that "
    "needs a gradient, dropout on a CPU, a size that no kernel takes). Before the model is compiled"
)
NO_SDPA_IN_GRAPH = (
    "transformers' eager attention is no operator of a compiled graph. Before blocks are compiled (block.compile() for "
    "each, instead of the whole model)"
)
MULTI_HEAD_IN_GRAPH = (
    "in a compiled graph nn.MultiheadAttention is seen where a fused kernel does it, not where it returns its weights "
    "(nor on a CPU with dropout): call it with need_weights=False"
)
IN_A_FUNCTION = (
    "gradients are left out of attention that an autograd function calls in its forward, as its backward does not go "
    "through that call; torch.utils.checkpoint.checkpoint(..., use_reentrant=False) around attention is seen with them"
)
LOST = (
    "no gradient came to {} from an attention call whose O has one, though it needs one: it may be detached in the "
    "call, the call's own backward return None for it, or gradients of other tensors alone be asked for "
    "(torch.autograd.grad, backward(inputs=...))"
)
# Engines that keep keys where no call names them: what of theirs is met, and what is not.
ENGINES = {
    "vllm": "vLLM's unified_attention_with_output is given the new keys alone: choose its FLASH_ATTN or "
    "TRITON_ATTN backend, whose kernels are met",
    "sglang": "SGLang's RadixAttention is given the new keys alone: choose its fa3 backend, whose kernel is met "
    "(of its triton backend decoding alone)",
    "flashinfer": "of FlashInfer its wrappers' run() is met where it is called by that name (not run_return_lse, nor "
    "where it was taken from the wrapper before), and single_prefill_with_kv_cache and single_decode_with_kv_cache; "
    "not its MLA, nor functions of one backend",
}
# Who calls SDPA, or chooses between it and others by a table.
_CALLS_SDPA = frozenset({"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS", "multi_head_attention_forward"})
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A module that has one of these of its own may attend, though its class is called otherwise; in_proj is Mamba's, too.
_QUERIES = frozenset(QUERY_NAMES + FUSED_NAMES + ("r_proj", "receptance"))  # the last ones are RWKV's
_PROJECTIONS = _QUERIES - {"in_proj"}
_ATTENDS = _CALLS_SDPA | {
    "softmax", "_softmax", "Softmax", "eager_attention_forward", "flex_attention", "flash_attn_func",
}  # fmt: skip


def _leaving_out(name: str, why: str) -> str:
    """Why, and how a module's class is left out of what is compiled."""
    return (
        f'{why}, not with fullgraph=True: kind = type(model.get_submodule("{name}")); '
        "kind.forward = torch.compiler.disable(kind.forward)"
    )


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A module that attends, as far as its class says."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]
    """Its query projection's, or, where that has no gradients, all of its own that have."""


class Unseen:
    """Says what of a model's attention is not seen.

    Args:
        model: Whose; None: nobody's.
        places: Who was met.
        warn: Tells the user, of the same thing only once.

    Attributes:
        passed: Whether a forward pass of the model has come to its end.
        failed: Whether a call was met that could not be recorded; its own warning says why.
    """

    def __init__(self, model: nn.Module | None, places: CallPlaces, warn: Callable[[str], None]) -> None:
        self._model, self._places, self._warn = model, places, warn
        self._blind_steps = self._judged = 0
        self._said = self._blind = False
        self.passed = self.failed = False
        self._handled = 0
        self._flex_calls: int | None = intercept.flex_calls
        # Gradients that were there before the first step: where each is, and its version.
        self._before: dict[int, tuple[StorageWeakRef, int]] = {}

    def begin(self) -> None:
        """Note which gradients are there already, and which exception is being handled."""
        self._handled = id(sys.exc_info()[1])
        for parameter in () if self._model is None else self._model.parameters():
            if (gradient := _own_gradient(parameter)) is not None:
                self._before[id(parameter)] = _state(gradient)

    def step_ends(self, *, seen: bool) -> None:
        """Of FlexAttention, after the first step in which it was looked for.

        Args:
            seen: Whether there was any call until now: a graph that is loaded may be another model's.
        """
        self.passed = True
        if self._flex_calls is not None:
            if not seen and self._flex_calls == intercept.flex_calls and flex_graphs.blind() and self._names_flex():
                self._said = True
                self._warn(FLEX)
            self._flex_calls = None

    def _names_flex(self) -> bool:
        """Whether FlexAttention may be the model's: a module's code or configuration names it."""
        if self._model is None:
            return True
        modules = list(self._model.modules())
        chosen = {getattr(getattr(m, "config", None), "_attn_implementation", None) for m in modules}
        forwards = [vars(kind).get("forward") for kind in {type(m) for m in modules}]
        codes = [f.__code__ for f in map(inspect.unwrap, filter(None, forwards)) if isinstance(f, FunctionType)]
        return "flex_attention" in chosen or any("flex" in name.lower() for code in codes for name in names(code))

    def optimizer_stepped(self, seen: bool, ours: bool) -> None:
        """Judge a step in which attention was looked for; the gradients are still there.

        Args:
            seen: Whether there was any call until now.
            ours: Whether the optimizer is known to be the model's.
        """
        self.step_ends(seen=seen)
        if not seen:
            self._blind_steps += 1
            if ours or self._blind_steps == _BLIND:
                self.nothing()
        elif not self._said and self._judged < _STEPS:
            self._judged += 1
            for word in self._words():
                self._said = True
                self._warn(word)
            self._places.met.clear()
            self._places.most.clear()

    def at_end(self) -> None:
        """Say, at the end, that no call was seen, unless the first forward pass was ended by an exception."""
        raised = sys.exc_info()[1]
        if self.passed or raised is None or id(raised) == self._handled:
            self.nothing()

    def nothing(self) -> None:
        """Say that no call was seen."""
        if not self._blind and not self.failed:
            self._blind = True
            engines = [words for name, words in ENGINES.items() if name in sys.modules]
            # Modules that trained unseen say which of the reasons it is, but for graphs that are replayed.
            if own := self._words():
                own += [f"It may also {REPLAYED}"] * torch.cuda.is_available()
            self._warn(". ".join([UNSEEN if own else NOTHING, *engines, *own]))

    def _words(self) -> list[str]:
        """Of each class of modules that trained without being met, what there is to say."""
        if self._model is None:
            return []
        candidates = self._candidates()
        if self._unmet(candidates):  # to look at gradients is to wait for a GPU
            candidates = [one for one in candidates if self._trained(one)]
        unmet = self._unmet(candidates)
        kinds = sorted({type(one.module).__name__ for one in unmet})
        return [self._word([one for one in unmet if type(one.module).__name__ == kind]) for kind in kinds]

    def _word(self, unmet: list[_Candidate]) -> str:
        names = ", ".join(one.name for one in unmet[:_MOST_NAMES])
        more = f" and {len(unmet) - _MOST_NAMES} more" if len(unmet) > _MOST_NAMES else ""
        known = sum(self._seen_of(root, unmet) for root in self._places.most)
        seen = f"seen in {known} alone of these, the graph does not say which" if known else "not seen in these"
        kind = type(unmet[0].module).__name__
        return f"attention is {seen}, which train: {names}{more} ({kind}); {self._advice(unmet[0])}"

    def _advice(self, one: _Candidate) -> str:
        unknown, compiled = _unknown(one.module), self._compiled(one)
        met = [path for path in unknown.values() if "rwkv7" in path.lower() and rwkv_operators.is_loaded()]
        if linear := met + [path for name, path in unknown.items() if operator_of(name) is not None]:
            fused = any("split_conv1d_scan" in name for name in _mentioned(one.module))
            words = LINEAR.format(", ".join(sorted(linear)))
            return words + FUSED_SCAN * fused + OUTSIDE * compiled
        if unmet := [path for path in unknown.values() if recurs(path)]:
            return RECURRENCE.format(", ".join(sorted(unmet)))
        if not compiled:
            own = OWN_RECURRENCE if _decays(one.module) and not _mentioned(one.module) & _ATTENDS else IN_EAGER
            if mentions(type(one.module)) & _CALLS_SDPA and has_compiled():
                own = f"{own}; or, if what is compiled runs it, {_leaving_out(one.name, MATH_IN_GRAPH)}"
            return UNKNOWN.format(", ".join(sorted(unknown.values()))) if unknown else own
        if isinstance(one.module, nn.MultiheadAttention):
            return MULTI_HEAD_IN_GRAPH
        config = getattr(one.module, "config", None)
        if getattr(config, "_attn_implementation", None) == "eager":
            sdpa = getattr(self._model, "_supports_sdpa", True)
            return EAGER_IN_GRAPH if sdpa else _leaving_out(one.name, NO_SDPA_IN_GRAPH)
        calls_sdpa = mentions(type(one.module)) & _CALLS_SDPA
        return _leaving_out(one.name, MATH_IN_GRAPH) if calls_sdpa else OWN_IN_GRAPH

    def _compiled(self, one: _Candidate) -> bool:
        """Whether it runs in a compiled graph, as far as is known."""
        assert self._model is not None
        if is_run_compiled(self._model):
            return True
        above = [m for m in self._model.modules() if any(below is one.module for below in m.modules())]
        return any(id(m) in self._places.compiled or is_run_compiled(m) for m in above)

    # Who ran, and who was met.

    def _candidates(self) -> list[_Candidate]:
        assert self._model is not None
        met = {type(m) for m in self._model.modules() if id(m) in self._places.met}
        every = [(name, m) for name, m in self._model.named_modules() if not isinstance(m, _LISTS)]
        named = [(name, m) for name, m in every if is_attention_by_name(m) or _projects(m) or is_linear(type(m))]
        # The calls of a graph that holds one of them are that one's.
        for root in (m for m in self._model.modules() if id(m) in self._places.most):
            inside = {m for _, m in named}.intersection(root.modules())
            met |= {type(m) for m in inside} if len(inside) == 1 else set()
        owners: dict[int, int] = {}
        for _, module in named:
            for parameter in module.parameters():
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        found: list[_Candidate] = []
        for name, module in named:
            queries = list(_queries(module))
            attends = queries and (_mentioned(module) & _ATTENDS or _unknown(module) or _decays(module))
            if not (type(module) in met or is_linear(type(module)) or attends):
                continue
            weights = list(module.parameters())
            # A weight that two modules share says nothing of either.
            within = sum(any(below is module for below in other.modules()) for _, other in named)
            own = [p for p in queries or weights if p.requires_grad] or [p for p in weights if p.requires_grad]
            own = [p for p in own if owners[id(p)] <= within]
            if not weights:  # the projections are of the module around it, which tells
                continue
            found.append(_Candidate(self._places.name_of(module) or name, module, own))
        inner = {id(one.module) for one in found}
        return [one for one in found if not any(id(m) in inner for m in one.module.modules() if m is not one.module)]

    def _trained(self, one: _Candidate) -> bool:
        """Whether a gradient has come, that is not zero."""
        for parameter in one.parameters:
            if (gradient := _own_gradient(parameter)) is None:
                continue
            before = self._before.get(id(parameter))
            if before is not None and not before[0].expired():  # type: ignore[no-untyped-call]
                now = _state(gradient)
                if (now[0].cdata, now[1]) == (before[0].cdata, before[1]):
                    continue
            if bool(gradient.any()):
                return True
        return False

    def _unmet(self, ran: list[_Candidate]) -> list[_Candidate]:
        """Those of ``ran`` that were not met, as far as that is known."""
        assert self._model is not None
        met, parents = self._places.met, _parents(self._model)
        unmet = [
            one
            for one in ran
            if id(parents.get(id(one.module))) not in met and not any(id(m) in met for m in one.module.modules())
        ]
        # A graph that makes as many calls as it has modules makes those of all.
        for root, calls in self._places.most.items():
            if len(below := self._below(root, unmet)) <= calls:
                unmet = [one for one in unmet if one not in below]
        return unmet

    def _seen_of(self, root: int, unmet: list[_Candidate]) -> int:
        return self._places.most[root] if self._below(root, unmet) else 0

    def _below(self, root: int, those: list[_Candidate]) -> list[_Candidate]:
        """Those in a compiled module whose calls its graph may have made."""
        assert self._model is not None
        top = next((m for m in self._model.modules() if id(m) == root), None)
        inside = set() if top is None else {id(m) for m in top.modules()}
        return [one for one in those if id(one.module) in inside and not calls_linear(one.module)]


def _parents(model: nn.Module) -> dict[int, nn.Module]:
    """Of each module the one that holds it, past lists of modules."""
    found: dict[int, nn.Module] = {}

    def note(holder: nn.Module, module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                note(holder, child)
            elif id(child) not in found:
                found[id(child)] = holder
                note(child, child)

    note(model, model)
    return found


def _queries(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a query projection, whatever class it has (an adapter's, say)."""
    for name, child in module.named_modules():
        if name.rpartition(".")[2].lower() in _QUERIES:
            yield from child.parameters()
    for name in ("in_proj_weight", "q_proj_weight"):
        if isinstance(parameter := getattr(module, name, None), nn.Parameter):
            yield parameter


def _projects(module: nn.Module) -> bool:
    """Whether it has a query projection of its own, whatever its class is called."""
    return any(name.lower() in _PROJECTIONS for name, _ in module.named_children())


def _own_gradient(parameter: nn.Parameter) -> Tensor | None:
    """What this rank has of its gradient."""
    gradient: Any = parameter.grad
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    plain = isinstance(gradient, Tensor) and gradient.layout == torch.strided and not gradient.is_meta
    return gradient if plain and gradient.numel() else None


def _state(gradient: Tensor) -> tuple[StorageWeakRef, int]:
    return StorageWeakRef(gradient.untyped_storage()), gradient._version  # type: ignore[no-untyped-call]


def _unknown(module: nn.Module) -> dict[str, str]:
    """Functions of q, k and v that its code calls, by name, with where they are; not those that are known."""
    return {name: path for name, path in kernels(module).items() if name not in _ATTENDS | _CALLS_SDPA}


def _decays(module: nn.Module) -> bool:
    """Whether its code has decays, as linear attention without a function of its own has, or a scan as a method."""
    return any("decay" in name or name == "selective_scan" for name in _mentioned(module))


def _mentioned(module: nn.Module) -> frozenset[str]:
    """Names in the code of a module's class, and of the modules in it: a softmax, or attention, may be one of these."""
    return frozenset().union(*(mentions(kind) for kind in {type(m) for m in module.modules()}))
