"""What an attention call's q was made with, wherever its projection runs: x, w_q and the gradient at its output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attn_diag.watching.live import products
from attn_diag.watching.live.call import AttentionCall
from attn_diag.watching.live.graph_projections import GraphProjections
from attn_diag.watching.live.linear_layers import MadeWith, MadeWithLayer, Projections, in_codes
from attn_diag.watching.live.observer import Met
from attn_diag.watching.live.pending import Pending
from attn_diag.watching.live.untraced import passed_by

SHARDED = "w_q is left out: the weight is sharded over ranks while attention runs"
STORED_OTHERWISE = "w_q is left out: the projection stores no numbers of 16 bits or more from which it could be read"
NO_PROJECTION = "x and w_q are left out: no matrix product of the compiled code was found that makes q"
NO_LAYER = "x and w_q are left out: no linear layer was found that makes q"
# Loaded once something is compiled that inductor, or what is built on AOTAutograd, runs.
_COMPILER = "torch._functorch.aot_autograd"


class QueryProjections:
    """Finds them by hooks on layers that run eagerly, and among the matrix products of compiled graphs.

    Args:
        model: Whose; None: nobody's.
        guarded: Keeps our failures from the training loop.

    Attributes:
        in_layers: Those that run eagerly.
    """

    def __init__(self, model: nn.Module | None, guarded: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._model, self._guarded = model, guarded
        self.in_layers, self._in_graphs = Projections(), GraphProjections()
        self._told = guarded(self._in_graphs.ran)
        self._compiled = self._wanted = False

    def watch(self, *, whole: bool) -> None:
        """Begin; ``whole``: the model is compiled, so that its layers are left alone."""
        self._compiled = whole or _COMPILER in sys.modules
        if self._model is not None and not whole:
            self.in_layers.watch(self._model, self._guarded)

    def look(self, *, wanted: bool) -> None:
        """Look from now on, or no more."""
        self.in_layers.recording = self.in_layers.watching and wanted
        self._wanted = wanted and self._model is not None
        if not wanted:
            self._in_graphs.forget()
        products.listen(self._told, self._in_graphs.passes, wanted=self._wanted and self._compiled)

    def graph_runs(self) -> None:
        """A compiled graph has made a call: there are such."""
        if not self._compiled:
            self._compiled = True
            products.listen(self._told, self._in_graphs.passes, wanted=self._wanted)

    def forget(self) -> None:
        """Let go of what ran before an attention call, or after the last one."""
        self.in_layers.forget()
        self._in_graphs.forget()

    def goes_back(self) -> None:
        """The backward of an attention call is over."""
        self._in_graphs.attention_goes_back()

    def step_ended(self) -> None:
        """Let go of the step's layers; a graph may be running that belongs to the next step."""
        self._in_graphs.step_ended()
        self.in_layers.forget()
        self.in_layers.settle()

    def close(self) -> None:
        """Remove every hook."""
        products.listen(self._told, self._in_graphs.passes, wanted=False)
        self.in_layers.close()
        self._in_graphs.step_ended()
        self._in_graphs.forget()

    def learned(self, met: Met, module: nn.Module | None) -> tuple[bool, MadeWith | None]:
        """Whether it is known what makes the q of calls like this one, and what does.

        Args:
            met: The call.
            module: Whose it is, where it has a name.
        """
        name, compiled = met.place.module, met.caller.site is not None
        if self._model is None or (not compiled and not self.in_layers.watching):
            return True, None
        if compiled:
            made = None if module is None else self._in_graphs.made_with(module, name or "")
            return made is not None, made
        if name is None or name not in self.in_layers.known:
            return False, None
        found = self.in_layers.known[name]
        return True, None if found is None else MadeWithLayer(found, self.in_layers)

    def passed(self) -> None:
        """A call was recorded, which took what it needs."""
        self.in_layers.recent.clear()
        self._in_graphs.passed()

    def unknown(self) -> None:
        """A call is wanted of which it is not known what makes its q: look at every product."""
        self._in_graphs.products.idle.clear()
        self._in_graphs.products.all_known = False

    def maker(self, modules: list[nn.Module], q: Tensor, *, among_others: bool) -> nn.Module | None:
        """Which of several attention modules made ``q`` [B, H, T, D] in a graph, where its products tell.

        ``among_others``: the graph may hold other modules.
        """
        return self._in_graphs.maker(modules, q, among_others=among_others)

    def take(
        self,
        call: AttentionCall,
        pending: Pending | None,
        known: tuple[Tensor, Tensor | None, bool] | None,
        module: nn.Module | None,
        *,
        compiled: bool,
    ) -> None:
        """Give a call x and w_q, and have the gradient at the projection's output follow.

        Args:
            call: What has run.
            pending: Its backward; None: there is none to come.
            known: What the attention function says itself: x, w_q, and whether a bias is added.
            module: The attention module, where it has a name.
            compiled: Whether it ran in a compiled graph.
        """
        name = call.place.module
        if known is not None and (self._model is not None or not call.copied):
            x, weight, biased = known
            # A copy is one of what the product saw.
            call.x, call.x_dtype = x.detach(), x.dtype if call.copied else call.q.dtype
            call.w_q = None if weight is None else weight.detach()
            call.notes += [SHARDED] if weight is None else []
            if pending is not None:
                pending.copy_dq = biased
        elif name is not None and (found := self.in_layers.find(name, call.q)) is not None:
            projection, x, y = found
            call.x, call.x_dtype, call.w_q = x.detach(), y.dtype, projection.weight(y.shape[-1])
            if call.w_q is None:
                call.notes.append(STORED_OTHERWISE if in_codes(projection.layer) else SHARDED)
            if pending is not None:
                pending.follow_projection(y, projection)
        elif name is not None and module is not None and (in_graph := self._in_graphs.find(module, call.q)) is not None:
            call.x, call.x_dtype, call.w_q = in_graph.x, in_graph.x.dtype, in_graph.w_q
            if pending is not None:
                self._in_graphs.follow(pending, in_graph, name)
        elif compiled and self._model is not None:
            call.notes.append(NO_PROJECTION)
        elif self._model is not None and name is not None and self.in_layers.watching:
            call.notes.append(NO_LAYER)


passed_by(QueryProjections.passed.__code__)
