"""Who makes the attention call that is running: a module, read off the stack; in a compiled graph, the order of calls.

A compiled graph has no modules any more. Each of its calls stands at its own place in generated code, so that a place
that comes again begins another run of the graph; the n-th call of a run is that of the n-th attention module below the
one that was compiled, or, where there are not as many, the n-th layer.
"""

from __future__ import annotations

import dis
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import nn
from torch.fx import GraphModule

from attn_diag.watching.live.flex_graphs import FORWARD
from attn_diag.watching.live.frames import (
    AUTOGRAD,
    CALLER_OF_GRAPHS,
    CUDA_GRAPHS,
    GRAPH,
    MAX_FRAMES,
    METHOD,
    Site,
    classified,
    kinds,
)
from attn_diag.watching.live.kernels import is_forward
from attn_diag.watching.live.linear_layers import clean

_ATTENTION = re.compile("atten|attn", re.IGNORECASE)
_CALL = nn.Module._call_impl.__code__
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")


class Caller(NamedTuple):
    """Who makes a call."""

    owner: nn.Module | None
    """The innermost module, of the model where there is one, that runs."""
    site: Site | None
    """Where in compiled code the call stands; None in eager code."""
    differentiated: bool
    """Whether it is the forward of an autograd function, where gradients are off although they will come."""
    foreign: bool
    """Whether a module runs, but none of the model's."""
    module: nn.Module | None = None
    """Whose call it is, where a compiled graph says it."""
    pooled: bool = False
    """Whether what is allocated now is a CUDA graph's: torch forbids that anything of ours stays there."""


class MadeBy(NamedTuple):
    """Who made a call, and when, as far as it is known while it runs."""

    caller: Caller
    recomputing: bool
    """Whether a backward pass runs it once more."""
    gradients: bool
    """Whether autograd may ask for gradients of it."""


@dataclass
class _Run:
    """One run of the compiled code of a module."""

    number: int
    index: int = 0
    sites: set[Site] = field(default_factory=set)


class CallPlaces:
    """Names the modules of a model, and numbers the calls that they make in a step.

    Args:
        model: The model; None: all there is.

    Attributes:
        met: identities of modules that made calls, where it is known which.
        most: where only the order of calls tells: how many a run of what was compiled made at most.
        compiled: identities of what was compiled.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._any = model is None
        self._names: dict[int, str] = {}
        self._modules: dict[int, nn.Module] = {}
        self._by_name: dict[str | None, nn.Module] = {}
        self._layers: dict[Any, int] = {}
        self._counts: dict[tuple[Any, bool], int] = defaultdict(int)
        self._ran = defaultdict[tuple[Site | None, bool], int](int)
        self._runs: dict[tuple[Any, bool], _Run] = {}
        self._attentions: dict[int, list[nn.Module]] = {}
        self._unnamed: set[int] = set()
        self._calls: dict[int, int] = {}
        self._no_modules: set[int] = set()
        self._code: dict[int, CodeType] = {}
        self._told_by: dict[tuple[int, Site], nn.Module] = {}
        self.met: set[int | None] = set()
        self.most: dict[int, int] = {}
        self.compiled: set[int] = set()
        self._model = model

    def read(self) -> None:
        """Take the names of the model's modules."""
        if self._model is not None:
            for name, module in self._model.named_modules():
                self._names[id(module)] = clean(name)
                self._modules[id(module)] = module
            self._by_name = {self._names[number]: module for number, module in self._modules.items()}

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers seen so far."""
        return sorted(self._layers.values())

    @property
    def most_calls(self) -> int:
        """How often the module that was called most often was called in this step."""
        return max((*self._counts.values(), *(run.number + 1 for run in self._runs.values())), default=0)

    def step_ended(self) -> None:
        """Count anew."""
        for (owner, recomputing), run in self._runs.items():
            self._over(owner, run, recomputing=recomputing)
        self._counts.clear()
        self._ran.clear()
        self._runs.clear()

    def caller(self, module: str = "") -> Caller:
        """Read off the stack who makes the call that is running.

        Args:
            module: Its name from the compiled module on, where a graph says it.
        """
        frame: FrameType | None = sys._getframe().f_back
        site: list[tuple[int, int]] = []
        compiled = differentiated = foreign = pooled = False
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            number = id(frame.f_code)
            kind = kinds.get(number)
            if kind is None:
                kind = classified(frame)
            if kind & GRAPH:
                compiled = True
                self._code.setdefault(number, frame.f_code)
                site.append((number, frame.f_lasti))
            elif kind & (CALLER_OF_GRAPHS | CUDA_GRAPHS):
                compiled = True
                pooled |= bool(kind & CUDA_GRAPHS)
            if kind & AUTOGRAD:
                # Without gradients the function runs too, and autograd has no use for it.
                differentiated |= bool(getattr(frame.f_locals.get("ctx"), "next_functions", True))
            # Before Python 3.13 a look at a frame's variables keeps them alive: not those of training loops.
            elif kind & METHOD and number not in self._no_modules:
                owner = frame.f_locals.get("self")
                if not isinstance(owner, nn.Module):
                    self._no_modules.add(number)
                elif isinstance(owner, GraphModule) and compiled:
                    pass  # the graph itself
                elif (own := self._own(owner)) is not None and (not foreign or self._passes(frame)):
                    stated = self._below(own, module)
                    at = tuple(site) if compiled else None
                    return Caller(own, at, differentiated, foreign=False, module=stated, pooled=pooled)
                else:
                    foreign = True
            frame = frame.f_back
        stated = self._below(self._model, module)
        return Caller(None, tuple(site) if compiled else None, differentiated, foreign, stated, pooled)

    def _passes(self, frame: FrameType | None) -> bool:
        """Whether a forward pass of the model runs in a frame, or below it.

        What else calls another model's, as generate() does with an assistant's, makes none of this model's calls.
        """
        while frame is not None:
            if frame.f_code is _CALL or frame.f_code.co_name == "forward":
                module = frame.f_locals.get("self")
                if isinstance(module, nn.Module) and self._own(module) is not None:
                    return True
            frame = frame.f_back
        return False

    def seen_from_here(self, caller: Caller) -> Caller:
        """A caller that another watch has read, perhaps of a model that is not this one's."""
        if caller.owner is None or (own := self._own(caller.owner)) is caller.owner:
            return caller
        return caller._replace(owner=own, foreign=own is None)

    def _below(self, module: nn.Module | None, name: str) -> nn.Module | None:
        """The module of that name in another; None where it has none, or it is not the model's."""
        if module is None or not name:
            return None
        try:
            found = module.get_submodule(name)
        except AttributeError:
            return None
        return found if self._any or id(found) in self._modules else None

    def _own(self, module: nn.Module) -> nn.Module | None:
        # Of an OptimizedModule; getattr() takes microseconds where there is none.
        inner = vars(module).get("_modules", {}).get("_orig_mod", module)
        if self._any:
            return inner if isinstance(inner, nn.Module) else module
        # A compiled object that was given is the module in it: both bear its name.
        return next((self._modules[id(m)] for m in (inner, module) if id(m) in self._modules), None)

    def of(self, caller: Caller, *, recomputing: bool) -> tuple[str | None, int, int]:
        """The call's module by name, its layer's number, and how many calls that module made before in this step."""
        known = caller.owner if caller.site is None else caller.module
        if caller.site is None or known is not None:
            # The first call of a graph was counted before it was known whose it is.
            before = max(self._counts[_key(known), recomputing], self._ran[caller.site, recomputing])
            return self._names.get(id(known)), self._layer(known), before
        key = (_key(caller.owner), recomputing)
        # Whose calls they are where a graph makes fewer than it has modules, and no projection tells, no order does.
        if caller.site and 0 < self._calls_in(caller.site[0][0]) != len(self._within(caller.owner)):
            self._unnamed.add(id(self._root(caller.owner)))
        run = self._run(key, caller)
        within = self._within(caller.owner)
        if run.index < len(within):
            module = within[run.index]
            return self._names.get(id(module)), self._layer(module), run.number
        # What is not named has numbers above those of its fellows that are.
        name, root = self._names.get(id(caller.owner)), id(self._root(caller.owner))
        first = next((len(self._attentions[of]) for of, _ in self._told_by if of == root), 0)
        return name, self._numbered((key[0], run.index), first + run.index), run.number

    def told_by(self, caller: Caller, find: Callable[[list[nn.Module]], nn.Module | None]) -> Caller:
        """The caller with its module, where a graph makes fewer or more calls than it has attention modules.

        Their order tells nothing then: some are no operators in it (or it is one part of several), or are one module's.

        Args:
            caller: As read off the stack.
            find: Tells which of several attention modules makes the call that has run.
        """
        root = self._root(caller.owner)
        if not caller.site or caller.module is not None or root is None:
            return caller
        key = id(root), caller.site
        if key not in self._told_by:
            attentions, code = self._attentions_of(root), caller.site[0][0]
            # What another watch has read off the stack it has named too.
            if code not in self._code or self._calls_in(code) == len(attentions):
                return caller
            if (found := find(attentions)) is None:
                return caller
            self._told_by[key] = found
            self._unnamed.add(id(root))
        return caller._replace(module=self._told_by[key])

    def name_of(self, module: nn.Module) -> str | None:
        """The name of a module of the model's."""
        return self._names.get(id(module))

    def named(self, name: str | None) -> nn.Module | None:
        """The model's module of that name."""
        return self._by_name.get(name)

    def by_order(self, caller: Caller) -> bool:
        """Whether nothing but the order of its calls tells a layer from another."""
        return caller.site is not None and caller.module is None and len(self._within(caller.owner)) != 1

    def crowded(self, caller: Caller) -> bool:
        """Whether a compiled graph makes more calls than it has attention modules, so that a module makes several."""
        if not caller.site:
            return caller.site is not None
        return self._calls_in(caller.site[0][0]) > len(self._within(caller.owner))

    def count(self, caller: Caller, *, recomputing: bool) -> None:
        """Note that the call is over."""
        root = id(self._root(caller.owner))
        if caller.site is not None:
            self.compiled.add(root)
            self._ran[caller.site, recomputing] += caller.site != ()
        if caller.site is None or caller.module is not None:
            known = _key(caller.owner if caller.site is None else caller.module)
            self._counts[known, recomputing] += 1
            self.met.add(known)
            return
        key = (_key(caller.owner), recomputing)
        before, run = self._runs.get(key), self._run(key, caller)
        if before is not None and before is not run:
            self._over(key[0], before, recomputing=recomputing)
        self._runs[key] = run
        run.sites.add(caller.site)
        run.index += 1
        # Also of what is made again: a reentrant checkpoint's first run has no gradients, and does not count.
        self.most[root] = max(run.index, self.most.get(root, 0))

    def _run(self, key: tuple[Any, bool], caller: Caller) -> _Run:
        """The run that the call belongs to: of the graph as it is compiled now."""
        assert caller.site is not None
        run = self._runs.get(key)
        if run is None:
            return _Run(0)
        whole = len(self._within(caller.owner))
        again = (bool(caller.site) and caller.site in run.sites) or run.index == whole > 0
        return _Run(run.number + 1) if again else run

    def _calls_in(self, code: int) -> int:
        """How many attention calls the code of a graph makes; 0 where another watch has read it."""
        if code not in self._calls and code in self._code:
            self._calls[code] = attention_calls(self._code[code])
        return self._calls.get(code, 0)

    def _over(self, owner: Any, run: _Run, *, recomputing: bool) -> None:
        root = id(self._model) if owner is None else owner
        if not recomputing and run.index != len(self._attentions.get(root, ())):
            self._unnamed.add(root)

    def _root(self, owner: nn.Module | None) -> nn.Module | None:
        return owner if owner is not None else self._model

    def _within(self, owner: nn.Module | None) -> list[nn.Module]:
        """The attention modules that a compiled one holds, in the order in which it has them."""
        root = self._root(owner)
        return [] if root is None or id(root) in self._unnamed else self._attentions_of(root)

    def _attentions_of(self, root: nn.Module) -> list[nn.Module]:
        if id(root) not in self._attentions:
            found = [m for m in root.modules() if is_attention_by_name(m)]
            inner = [m for m in found if not any(other is not m and other in found for other in m.modules())]
            self._attentions[id(root)] = inner
        return self._attentions[id(root)]

    def _layer(self, owner: nn.Module | None) -> int:
        if (known := self._layers.get(_key(owner))) is not None:
            return known
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self._names.get(id(owner), ""))
        stated = getattr(owner, "layer_idx", None)
        # Zamba2's shared blocks state -1.
        if not isinstance(stated, int) or stated < 0:
            stated = int(number[1]) if number else len(self._layers)
        return self._numbered(_key(owner), stated)

    def _numbered(self, key: Any, wanted: int) -> int:
        if key not in self._layers:
            taken = set(self._layers.values())
            self._layers[key] = wanted if wanted not in taken else max(taken) + 1
        return self._layers[key]


def is_attention_by_name(module: nn.Module) -> bool:
    """Whether its class is called so."""
    return _ATTENTION.search(type(module).__name__) is not None


def attention_calls(code: CodeType) -> int:
    """How many attention calls the code of a graph makes."""
    named = (str(step.argval) for step in dis.get_instructions(code) if step.opname in _LOADS)
    return sum(is_forward(name) or name.startswith(FORWARD) for name in named)


def _key(owner: nn.Module | None) -> int | None:
    return None if owner is None else id(owner)
