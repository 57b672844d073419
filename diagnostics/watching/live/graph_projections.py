"""The query projection inside a compiled graph: found among the matrix products that the graph calls.

A graph has no modules, and its buffers are written over. So the inputs of products are copied when they run, until an
attention call says which of them made its q: the one whose second factor is the weight of a linear layer of the
attention module, and whose output is q, as of a layer that runs eagerly. From then on that place in the graph's code is
known, and the others are left alone. In the backward, the product with the same weight has the gradient at the
projection's output as its first factor; where the gradient of x is not needed, the product with x has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attn_diag.watching.live.held_products import HeldProducts, MadeWithProduct, Reads
from attn_diag.watching.live.linear_layers import ROWS, CapturedProjection, is_linear, own_weight, search
from attn_diag.watching.live.pending import Pending
from attn_diag.watching.live.places import attention_calls
from attn_diag.watching.live.products import Product
from attn_diag.watching.live.slices import Slice, same_norms
from attn_diag.watching.live.untraced import passed_by

_KEPT = 12
# Of so many before those all is forgotten but whose they are.
_KEPT_NAMES = 64
# What a forward did not keep is computed anew, and may be rounded otherwise: BF16 changes it by less than this.
_SAME = 0.02
# So many rows of a gradient are compared: those of a prompt, that has no loss, are zero.
_SPREAD = 64
_Site = tuple[int, int]


@dataclass(frozen=True)
class _MakesQ:
    """What a place in a graph's code makes a q with."""

    layer: str
    """Its name below the attention module's."""
    slice: Slice
    exact: bool
    keeps_norms: bool
    """Whether q's rows are as long as those of the layer's output."""


class _Factor(NamedTuple):
    """A factor [N, C] of a product, that may have been freed since."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    address: int

    @classmethod
    def of(cls, t: Tensor) -> _Factor:
        return cls(t.shape, t.stride(), t.dtype, t.data_ptr())


@dataclass(frozen=True, eq=False)
class _Ran:
    """A product that may have made the next q; what is copied stays as it was."""

    site: _Site
    rows: int
    """M."""
    x: Tensor
    """[M, C], copied; empty where it has been forgotten."""
    factor: _Factor
    weight: Tensor
    """The first ``ROWS`` rows of b^T, copied."""
    y: Tensor | None
    """The first ``ROWS`` rows of the output, copied; None where the place is known."""


@dataclass(frozen=True, eq=False)
class FoundProjection:
    """The projection that made a q."""

    projection: CapturedProjection
    x: Tensor
    """[B, T, C], a copy."""
    w_q: Tensor | None
    keeps_norms: bool


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A call that waits for the gradient at its projection's output."""

    module: str
    pending: Pending
    projection: CapturedProjection
    keeps_norms: bool
    rows: int
    """B * T."""
    x: Tensor
    """The first ``ROWS`` rows of x."""
    tried: list[tuple[str, _Site]] = field(default_factory=list)
    """Places without the gradient."""


class GraphProjections:
    """Finds them; to be told of every product that runs."""

    def __init__(self) -> None:
        self._recent: deque[_Ran] = deque(maxlen=_KEPT)
        self._older: deque[_Ran] = deque(maxlen=_KEPT_NAMES)
        # None: the place makes none.
        self._places: dict[_Site, _MakesQ | None] = {}
        self._verified: set[tuple[_Site, int]] = set()
        # By name of the attention module; None: the place has not its gradient.
        self._gradients: dict[tuple[str, _Site], Reads | None] = {}
        self._waiting: list[_Waiting] = []
        self._codes: dict[int, CodeType] = {}
        self._attends: dict[int, bool] = {}
        self.products = HeldProducts()

    def passes(self, spot: _Site, a: Tensor, b: Tensor, frame: FrameType | None) -> bool:
        """Whether a product that has run at a place is of no interest, or has been taken."""
        products = self.products
        if products.to_come and products.takes(spot, a, b):
            return not self._waiting
        return not self._waiting and products.passes(spot, a, b, frame)

    def passed(self) -> None:
        """A call was recorded: what ran before it is of no interest, but for what makes a q."""
        if self._recent:
            if self.products.all_known:
                self.products.idle.update(ran.site for ran in self._recent if self._places.get(ran.site) is None)
            self.forget()
        self.products.held.clear()

    def made_with(self, module: nn.Module, name: str) -> MadeWithProduct | None:
        """The one known place that makes the q of a module's calls.

        None also where it is not known in which one place of the backward the gradient at its output is.
        """
        layers = {id(layer): layer for layer in module.modules()}
        found = [(site, layers[number]) for site, number in self._verified if number in layers]
        if len(found) != 1 or (made := self._places.get(found[0][0])) is None:
            return None
        site, layer = found[0]
        gradients = [(at, reads) for (one, at), reads in self._gradients.items() if one == name and reads is not None]
        if not made.exact and len(gradients) != 1:
            return None
        projection = CapturedProjection(layer, made.slice, made.exact)
        gradient = None if made.exact else gradients[0]
        return MadeWithProduct(projection, self.products, site, self._recent, gradient)

    def ran(self, product: Product) -> None:
        """Note a product."""
        if product.site is None:
            self._take_gradient(product, None)
            return
        code, at = product.site
        self._codes.setdefault(id(code), code)  # no other code gets its number
        site = id(code), at
        self.products.takes(site, product.a, product.b)
        self._take_gradient(product, site)
        known = self._places.get(site, ...)
        if known is None or (known is ... and not self._goes_forward(code)):
            self.products.idle.add(site)
            return
        y = product.y[:ROWS].clone() if known is ... else None
        factor = product.b.T
        if len(self._recent) == _KEPT:
            oldest = self._recent[0]
            self._older.append(replace(oldest, x=oldest.x.new_empty(0)))
        x = product.a.clone()
        self._recent.append(_Ran(site, len(x), x, _Factor.of(factor), factor[:ROWS].clone(), y))

    @torch.no_grad()
    def find(self, module: nn.Module, q: Tensor) -> FoundProjection | None:
        """Find the projection of ``module`` that made ``q`` [B, H, T, D]."""
        batch, _, rows, _ = q.shape
        self._take_held()
        near = [ran for ran in reversed(self._recent) if ran.rows == batch * rows]
        for ran in near:
            if (found := self._known(ran, module, q)) is not None:
                return found
        if not near or not bool(q[:1, :, :ROWS].any()):
            return None  # zeros are everybody's
        layers = [(name, layer) for name, layer in module.named_modules() if is_linear(layer)]
        new = [(ran, ran.y[None, :rows]) for ran in near if ran.y is not None]
        likely = [(name, layer, ran, y) for ran, y in new for name, layer in layers if _multiplies(ran, layer)]
        projection = search([(one, one[0], one[3]) for one in likely], q)
        sites = [ran.site for ran in near]
        self._dismiss(ran for ran, _ in new if sites.count(ran.site) == 1)
        if projection is None:
            return None
        name, layer, ran, y = projection.layer
        keeps_norms = projection.exact or same_norms(projection.slice.of(y), q[:1, :, :ROWS])
        made = _MakesQ(name, projection.slice, projection.exact, keeps_norms)
        # A place where several products are made is never sure.
        if sites.count(ran.site) == 1:
            self._places[ran.site] = made
            self._verified.add((ran.site, id(layer)))
        return _found(ran, layer, made, q)

    @torch.no_grad()
    def maker(self, modules: Iterable[nn.Module], q: Tensor, *, among_others: bool) -> nn.Module | None:
        """Which of several modules made ``q`` [B, H, T, D]: whose projection gives that, or rows as long.

        Args:
            modules: Those.
            q: Of the call that has run.
            among_others: Whether the graph may hold modules that are not among these: a copy of one has its values too.
        """
        batch, _, rows, _ = q.shape
        self._take_held()
        near = [ran for ran in (*reversed(self._recent), *reversed(self._older)) if ran.rows == batch * rows]
        if not near or not bool(q[:1, :, :ROWS].any()):
            return None
        modules = list(modules)
        for alike in (_is,) if among_others else (_is, _multiplies):
            if found := [module for module in modules if self._makes(module, near, q, alike)]:
                return found[0] if len(found) == 1 else None
        return None

    def _take_held(self) -> None:
        """Look at what was held for a call that is not recorded after all."""
        for site, (x, b) in self.products.held.items():
            self._recent.append(_Ran(site, len(x), x, _Factor.of(b.T), b.T[:ROWS].clone(), None))
        self.products.held.clear()

    def _makes(self, module: nn.Module, near: list[_Ran], q: Tensor, alike: Callable[[_Ran, nn.Module], bool]) -> bool:
        """Whether one of these products made ``q`` with a weight of the module's."""
        made = [(ran, layer) for ran in near if (layer := self._layer_of(ran, module)) is not None]
        if any(alike(ran, layer) for ran, layer in made):  # a region may be the code of several modules
            return True
        layers = [layer for layer in module.modules() if is_linear(layer)]
        for ran in near:
            if ran.y is None or not any(alike(ran, layer) for layer in layers):
                continue
            y = ran.y[None, : q.shape[2]]
            found = search([(y, "", y)], q)
            if found is not None and (found.exact or same_norms(found.slice.of(y), q[:1, :, :ROWS])):
                return True
        return False

    def follow(self, pending: Pending, found: FoundProjection, module: str) -> None:
        """Have the gradient at the projection's output too, where q is not just that output without a bias."""
        if found.projection.exact:
            pending.copy_dq = found.projection.biased
            return
        pending.wait_for_projection(found.projection.slice)
        x = found.x.flatten(0, 1)
        first = x[:ROWS].clone()  # the whole would wait for the backward too
        self._waiting.append(_Waiting(module, pending, found.projection, found.keeps_norms, len(x), first))

    def forget(self) -> None:
        """Let go of the products that ran: attention did, or nobody wants them."""
        self._recent.clear()
        self._older.clear()
        self.products.held.clear()

    def attention_goes_back(self) -> None:
        """What the layers above wait for would have come by now."""
        self._dismiss(self._recent)
        self.forget()
        for one in [one for one in self._waiting if one.pending.call.dq is not None]:
            self._waiting.remove(one)
            one.pending.projection_arrived(None)

    def step_ended(self) -> None:
        """Wait for no gradients any more. What ran may belong to the next step: some begin with an attention call."""
        self._waiting.clear()
        self.products.to_come.clear()

    def _goes_forward(self, code: CodeType) -> bool:
        """Whether the code is a forward's: what a backward multiplies is large, and would be copied in vain."""
        if torch._C._current_graph_task_id() == -1:
            return True
        if id(code) not in self._attends:
            self._attends[id(code)] = attention_calls(code) > 0
        return self._attends[id(code)]

    def _known(self, ran: _Ran, module: nn.Module, q: Tensor) -> FoundProjection | None:
        """The projection in ``module`` of a place that is known."""
        layer, made = self._layer_of(ran, module), self._places.get(ran.site)
        return None if layer is None or made is None else _found(ran, layer, made, q)

    def _layer_of(self, ran: _Ran, module: nn.Module) -> nn.Module | None:
        """The layer in ``module`` that makes a q, at a place that is known."""
        if (made := self._places.get(ran.site)) is None:
            return None
        layer: nn.Module | None = dict(module.named_modules()).get(made.layer)
        if layer is None or not is_linear(layer):
            return None
        if (ran.site, id(layer)) not in self._verified:
            # Blocks that are compiled one by one share their code.
            if not _multiplies(ran, layer):
                return None
            self._verified.add((ran.site, id(layer)))
        return layer

    def _dismiss(self, those: Iterable[_Ran]) -> None:
        """Look at these places no more, unless they make a q."""
        for ran in those:
            self._places.setdefault(ran.site, None)

    def _take_gradient(self, product: Product, site: _Site | None) -> None:
        for one in tuple(self._waiting):
            if one.pending.call.dq is None:
                continue
            place = None if site is None else (one.module, site)
            if place is not None and place in self._gradients:
                reads = self._gradients[place]
            elif (reads := _reads(product, one)) is None:
                if place is not None:
                    one.tried.append(place)
            elif place is not None and place not in one.tried:
                self._gradients |= dict.fromkeys(one.tried) | {place: reads}
            if reads is not None:
                self._waiting.remove(one)
                one.pending.projection_arrived(reads(product.a, product.b))


def _found(ran: _Ran, layer: nn.Module, made: _MakesQ, q: Tensor) -> FoundProjection:
    projection = CapturedProjection(layer, made.slice, made.exact)
    x = ran.x.reshape(q.shape[0], q.shape[2], -1)
    return FoundProjection(projection, x, projection.weight(ran.factor.shape[0]), made.keeps_norms)


def _is(ran: _Ran, layer: nn.Module) -> bool:
    """Whether a product's second factor is the weight of a layer."""
    weight = own_weight(layer)
    return weight is not None and type(weight) is Tensor and ran.factor == _Factor.of(weight)


def _multiplies(ran: _Ran, layer: nn.Module) -> bool:
    """Whether a product's second factor is the weight of a layer, or has its values, as a cast of it."""
    weight = own_weight(layer)
    if weight is None or type(weight) is not Tensor:
        return False
    return _same(ran.factor, weight, ran.weight)


def _same(factor: _Factor, weight: Tensor, first: Tensor) -> bool:
    """Whether a factor that began with these rows is a weight, or a cast of it; the usual case asks no device."""
    if factor == _Factor.of(weight):
        return True
    alike = factor.shape == weight.shape and first.device == weight.device
    return alike and torch.equal(first, weight[:ROWS].to(first.dtype))


@torch.no_grad()
def _reads(product: Product, one: _Waiting) -> Reads | None:
    """Tell where in a product the gradient is that a call waits for; None: it has nothing to do with it."""
    weight = own_weight(one.projection.layer)
    if weight is None:
        return None
    a, b = product.a, product.b
    m, (n, c) = one.rows, weight.shape
    if (a.shape, b.shape) == ((m, n), (n, c)) and _same(_Factor.of(b), weight, b[:ROWS]) and _fits(a, one, by_x=False):
        return lambda a, b: a  # noqa: ARG005 - as the others
    if (a.shape, b.shape) == ((n, m), (m, c)) and _near(b[:ROWS], one.x) and _fits(a.T, one, by_x=True):
        return lambda a, b: a.T  # noqa: ARG005 - as the others
    if (a.shape, b.shape) == ((c, m), (m, n)) and _near(a.T[:ROWS], one.x) and _fits(b, one, by_x=True):
        return lambda a, b: b  # noqa: ARG005 - as the others
    return None


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one.double() - other.double()).norm() < _SAME * other.double().norm())


def _fits(gradient: Tensor, one: _Waiting, *, by_x: bool) -> bool:
    """Whether a gradient [M, N] may be that of a call's projection: k and v have the same x, but not q's norms."""
    if not one.keeps_norms:
        return not by_x
    dq = one.pending.call.dq
    assert dq is not None
    rows = dq.shape[2]
    at = torch.linspace(0, len(gradient) - 1, min(_SPREAD, len(gradient)), device=dq.device).long()
    part = one.projection.slice.of(gradient[at][None])[0].transpose(0, 1)
    return same_norms(part, dq[at // rows, :, at % rows])


for _ours in (GraphProjections.passes, GraphProjections.passed):
    passed_by(_ours.__code__)
