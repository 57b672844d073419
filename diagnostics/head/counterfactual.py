"""What a well-rounded kernel returns for a head, and how far it may be off, element by element.

The yardstick of every verdict: the published recipe of the inputs' format (fa2) on the same head, and the variance that
one nearest-even rounding at each of its sites gives. With eps^2 = E[(RN(x) - x)^2 / x^2] over a binade, sites apart:

    var O     = eps^2 P^2 V^2 + ulp(O)^2 / 12                       the cast of P_bar, the last rounding
    var delta = dO^2 var O
    var dQ    = alpha^2 (var delta (P K)^2 + eps^2 dS^2 K^2) + ulp(dQ)^2 / 12
    var dK    = alpha^2 (var delta P^2 + eps^2 dS^2)^T Q^2 + ulp(dK)^2 / 12
    var dV    = eps^2 (P^2)^T dO^2 + ulp(dV)^2 / 12

(squares elementwise). Production kernels leave 0.5 to 1.0 times its root mean square on every input measured. Keys that
are the same in k and v (a token again, where nothing tells positions apart) have the same P and dS, and so the same
rounding: of n that a row sees, P^2 and dS^2 count n times in O and dQ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from attn_diag.head.coarser import coarser
from attn_diag.head.cut_off import CUT_OFF
from attn_diag.head.from_lse import made_by
from attn_diag.head.propagation import sloped
from attn_diag.head.shared import rows_differ
from attn_diag.head.unfused import ROUNDED_DROPOUT
from attn_diag.kernels import PRESETS, EmulatedHead, Recipe, emulate_head, preset
from attn_diag.reference import AttentionHead, FloatFormat, HeadReference, RowBlock, ulp
from attn_diag.reference.fused import FusedHeads
from attn_diag.reference.fused_products import KeyProduct, RowProduct, TileWeight
from attn_diag.reference.heads import stacked

RECIPE = "fa2"
# Recipes that round as well; where a head's errors lean on few elements, the one that is furthest off is the yardstick.
ALTERNATIVES = (RECIPE, "cudnn", "flex")
# And one for heads with a sink, at which m starts: where it lies above the scores, no row's largest P_bar is exactly 1.
SINK_FIRST = "sink-first"
# Those whose dS multiplies the cast P: torch's, which casts alpha dS, and one that multiplies by alpha afterwards.
FROM_CAST_P = ("efficient", "efficient:after-product")
# Formats to which the backward alone may cast P and dS as they are: the smallest become 0, and so rows of dV and dK.
CASTS = ("e5m2", "e4m3")
# What the backward alone may round to the inputs' format on the way to dS, by the recipe's fields.
BACKWARD = {"rounded-delta": ("delta",), "rounded-products": ("delta_products", "delta"), "rounded-dprobs": ("dprobs",)}
FORMATS = ("bf16", "fp16")
# An fp32 score is off by about half a unit in its last place, and so by this times its size; P relatively as much.
_FP32_SCORE = 2.0**-23
_TENSOR_CORE_SCORES = 2**19


def covers(fmt: FloatFormat) -> bool:
    """Whether there is a published recipe for inputs of this format."""
    return fmt.name in FORMATS


def run_counterfactual(
    head: AttentionHead,
    fmt: FloatFormat,
    stored: Mapping[str, FloatFormat],
    *,
    recipe: str = RECIPE,
    tensor_core: bool = False,
    draw: int | None = None,
    key_gradients: bool = True,
) -> dict[str, Tensor]:
    """What a well-rounded kernel returns for one query head.

    Args:
        head: The head.
        fmt: The inputs' format, one of ``FORMATS``.
        stored: The formats in which the kernel under test returned o, dq, dk and dv; the inputs' for others.
        recipe: Which published recipe, one of ``FROM_CAST_P``, of ``unfused.ways``, of ``FROM_LSE`` (both also
            ``FUSED``), of ``coarser``'s, ``CASTS``, ``BACKWARD``, ``CUT_OFF``, ``ROUNDED_DROPOUT``, ``SUMMED``, of
            ``LOW_SUMS`` or ``SINK_FIRST``.
        tensor_core: Whether sums are truncated as NVIDIA's tensor cores do it, which takes fifty times as long.
        draw: See ``coarser``.
        key_gradients: Whether dK and dV are wanted.

    Returns:
        o, lse and, with dO, delta, dq, dk and dv by name; float64.
    """
    if (found := made_by(head, fmt, recipe, stored.get("o", fmt))) is not None:
        return found
    chosen = _published(recipe, fmt.name, head.q.shape[1])
    if chosen is None:
        head, chosen = coarser(head, fmt.name, recipe, draw)
    if tensor_core:
        chosen = replace(chosen, accumulation="nvidia-tensor-core")
    return returned_by(chosen, head, fmt, stored, key_gradients=key_gradients)


def returned_by(
    recipe: Recipe,
    head: AttentionHead,
    fmt: FloatFormat,
    stored: Mapping[str, FloatFormat],
    *,
    key_gradients: bool = True,
) -> dict[str, Tensor]:
    """What a recipe returns for one query head in the formats of the kernel under test; as ``run_counterfactual``."""
    recipe = _stored_as(recipe, fmt, stored)
    # Kernels take the maximum before the scale: with a negative one of -q it is the maximum.
    sign = -1 if head.scale < 0 else 1
    return _outputs_of(emulate_head(recipe, _positive(head), key_gradients=key_gradients), sign)


@cache  # Making a recipe takes a third as long as running it on a head of T = 256.
def _published(recipe: str, fmt: str, head_dim: int) -> Recipe | None:
    """A published recipe by its name here; None for one that is none."""
    if recipe == ROUNDED_DROPOUT:
        return preset("efficient", fmt, head_dim)
    changed: dict[str, Any] = {"sink_joins": "first"} if recipe == SINK_FIRST else dict(CUT_OFF.get(recipe, {}))
    changed |= dict.fromkeys(("backward_probs", "dscores"), recipe) if recipe in CASTS else {}
    changed |= dict.fromkeys(BACKWARD.get(recipe, ()), fmt)
    name, _, alpha = (RECIPE if changed else recipe).partition(":")
    if name not in PRESETS:
        return None
    changed |= {"dropout_factor": "fp32"} | ({"alpha_in_backward": alpha} if alpha else {})
    return replace(preset(name, fmt, head_dim), **changed)


def _stored_as(recipe: Recipe, fmt: FloatFormat, stored: Mapping[str, FloatFormat]) -> Recipe:
    """The recipe with outputs in the formats of the kernel under test."""
    gradients = next((stored[n] for n in ("dq", "dk", "dv") if n in stored), fmt)
    out = stored.get("o", fmt).name
    known = (*FORMATS, "fp32")
    out = out if out in known else recipe.out
    dq = gradients.name if gradients.name in known else recipe.dq
    return recipe if (out, dq) == (recipe.out, recipe.dq) else replace(recipe, out=out, dq=dq)


def _positive(head: AttentionHead) -> AttentionHead:
    """The head with a scale that is not negative."""
    return replace(head, q=-head.q, scale=-head.scale) if head.scale < 0 else head


def _outputs_of(found: EmulatedHead, sign: int) -> dict[str, Tensor]:
    outputs = {name: getattr(found, name) for name in ("o", "lse", "delta", "dq", "dk", "dv")}
    outputs = {name: tensor.double() for name, tensor in outputs.items() if tensor is not None}
    return outputs | {"dq": sign * outputs["dq"]} if "dq" in outputs else outputs


class Counterfactuals:
    """What well-rounded kernels return for one query head; each is run when it is first asked for."""

    def __init__(
        self, head: AttentionHead, fmt: FloatFormat, stored: Mapping[str, FloatFormat], *, key_gradients: bool,
        gradients: bool = True,
    ) -> None:  # fmt: skip
        self._run = partial(run_counterfactual, fmt=fmt, stored=stored, key_gradients=key_gradients)
        self.head, self.fmt, self._stored = head, fmt, stored
        # Without gradients O is all that is asked of other recipes than the first.
        self._others_head = head if gradients else replace(head, do=None)
        self._beside: Sequence[ref[Counterfactuals]] = ()
        self._found: dict[tuple[str, bool, int | None], dict[str, Tensor]] = {}
        self.scores = len(head.q) * len(head.k)
        """How many scores there are."""
        self.alternatives = ALTERNATIVES if head.sink is None else (*ALTERNATIVES, SINK_FIRST)
        """Recipes that round as well, ``RECIPE`` first."""
        self.drops = head.dropout is not None
        """Whether ``ROUNDED_DROPOUT`` differs from the published recipe."""
        self.alpha_exact = math.frexp(head.scale)[0] == 0.5
        """Whether multiplying by alpha rounds nothing."""
        self.small = self.scores <= _TENSOR_CORE_SCORES
        """Whether the tensor core's sums take a second or two at most."""

    @staticmethod
    def run_together(several: Sequence[Counterfactuals]) -> None:
        """Of heads on CUDA, of one shape: let the kernels run all of them once one is asked for."""
        # Weak: they would hold each other, and all that was found, until a garbage collection.
        refs = [ref(one) for one in several]
        for one in several:
            one._beside = refs

    def outputs(self, recipe: str = RECIPE, *, tensor_core: bool = False, draw: int | None = None) -> dict[str, Tensor]:
        """As ``run_counterfactual``."""
        key = recipe, tensor_core, draw
        if key not in self._found and self._beside and not tensor_core:
            self._run_kernels(recipe)
        if key not in self._found:
            head = self.head if key == (RECIPE, False, None) else self._others_head
            self._found[key] = self._run(head, recipe=recipe, tensor_core=tensor_core, draw=draw)
        return self._found[key]

    def _run_kernels(self, recipe: str) -> None:
        """Run a published recipe on all of ``run_together`` by its own kernels; nothing where they lack a mask or so.

        Their sums are the tensor core's, as a captured kernel's are.
        """
        chosen = _published(recipe, self.fmt.name, self.head.q.shape[1])
        if chosen is None:
            return
        from attn_diag.kernels.backend import BackendError
        from attn_diag.kernels.triton_head import run_stack

        beside = [one for of in self._beside if (one := of()) is not None]
        try:
            made = run_stack(_stored_as(chosen, self.fmt, self._stored), [_positive(one.head) for one in beside])
        except (BackendError, ValueError):  # a mask or a head dimension that they lack: emulated
            return
        found = _outputs_of(made, -1 if self.head.scale < 0 else 1)
        for one, *tensors in zip(beside, *(t.unbind() for t in found.values()), strict=True):
            one._found[recipe, False, None] = dict(zip(found, tensors, strict=True))


@dataclass
class NoiseCollector:
    """Gathers, block by block, the variances of a well-rounded kernel's errors; without the last roundings."""

    head: AttentionHead
    """The head."""
    fmt: FloatFormat
    """The format of P's and dS's casts."""
    out: FloatFormat
    """O's."""
    want_keys: bool = False
    """Whether dK and dV are wanted."""

    def __post_init__(self) -> None:
        self._relative = 2.0 ** (-2 * self.fmt.precision) / 24  # E[1/x^2] = 1/2 over [1, 2)
        self._smallest = (self.fmt.smallest_normal * 2.0**-self.fmt.precision) ** 2 / 12
        # Kernels may cast alpha dS instead of dS: below the normal numbers that is coarser.
        self._smallest_dscore = self._smallest / min(self.head.scale, 1.0) ** 2

    # What follows is made where blocks come: the kernels bring their own.
    @cached_property
    def variance(self) -> dict[str, Tensor]:
        """o [Tq, Dv] (with its last rounding), delta [Tq], dq [Tq, D], dk [Tk, D], dv [Tk, Dv]; row_sum [Tq]: ln l's of
        a kernel that sums the cast P_bar."""
        head, new = self.head, self.head.q.new_zeros
        found = {"o": new(len(head.q), head.v.shape[1]), "row_sum": new(len(head.q))}
        if head.do is not None:
            found |= {"delta": new(len(head.q)), "dq": new(head.q.shape)}
            found |= {"dk": new(head.k.shape), "dv": new(head.v.shape)} if self.want_keys else {}
        return found

    @cached_property
    def same_keys(self) -> Tensor | None:
        """See the function of this name."""
        return same_keys(self.head)

    @cached_property
    def by_delta(self) -> Tensor:
        """What every query row adds to the sum of dk's variance through its delta, [Tq]: all keys share that error."""
        return self.head.q.new_zeros(len(self.head.q))

    @cached_property
    def _v2(self) -> Tensor:
        return self.head.v.square()

    @cached_property
    def _k2(self) -> Tensor:
        return self.head.k.square()

    @cached_property
    def _do2(self) -> Tensor:
        assert self.head.do is not None
        return self.head.do.square()

    @cached_property
    def _q2(self) -> Tensor:
        return self.head.q.square() * self.head.scale**2

    def add(self, block: RowBlock) -> None:
        """Take one block of the reference."""
        rows, keys, inverse = block.rows, block.keys, block.inverse_row_sum
        visible = block.unnormalised_probs.sign()  # P_bar is never negative
        scores = (_FP32_SCORE * block.row_max.masked_fill(block.fully_masked, 0.0)).square()
        relative = (self._relative + scores)[:, None]
        squares = block.probs.square()
        times = None if self.same_keys is None else together(self.same_keys[keys], visible)

        def counted(values: Tensor) -> Tensor:
            return values if times is None else values * times

        self.variance["row_sum"][rows] = counted(squares).sum(1) * self._relative
        probs = squares * relative + visible * (self._smallest * inverse.square())[:, None]
        probs = self.head.drop(self.head.drop(probs, rows, keys), rows, keys)
        o = counted(probs) @ self._v2[keys] + ulp(block.out, self.out).square() / 12
        self.variance["o"][rows] = o
        if block.unnormalised_dscores is None:
            return
        delta = (self._do2[rows] * o).sum(1)
        self.variance["delta"][rows] = delta
        dscores = block.dscores
        assert dscores is not None
        dscores = dscores.square_().mul_(relative).add_(visible, alpha=self._smallest_dscore)
        products = block.probs_k
        if products is None:
            products = sloped(block, block.unnormalised_probs) @ self.head.k[keys]
        dq = delta[:, None] * (products * inverse[:, None]).square() + counted(dscores) @ self._k2[keys]
        self.variance["dq"][rows] = dq * self.head.scale**2
        if self.want_keys:
            by_delta = sloped(block, sloped(block, squares)) * delta[:, None]
            self.variance["dk"][keys] += (dscores + by_delta).T @ self._q2[rows]
            self.variance["dv"][keys] += probs.T @ self._do2[rows]
            self.by_delta[rows] = by_delta.sum(1) * self._q2[rows].sum(1)

    def finished(self, reference: HeadReference, stored: Mapping[str, FloatFormat]) -> dict[str, Tensor]:
        """The variances with the gradients' last roundings to their formats (``stored``; else the inputs')."""
        return each_finished([self], [reference], stored)[0]


def each_finished(
    collectors: Sequence[NoiseCollector], references: Sequence[HeadReference], stored: Mapping[str, FloatFormat]
) -> list[dict[str, Tensor]]:
    """``NoiseCollector.finished`` of several heads of one shape and format."""
    found = [dict(one.variance) for one in collectors]
    for name in (n for n in ("dq", "dk", "dv") if n in found[0]):
        fmt, true = stored.get(name, collectors[0].fmt), stacked([getattr(r, name) for r in references])
        for one, values in zip(found, stacked([f[name] for f in found]) + ulp(true, fmt).square() / 12, strict=True):
            one[name] = values
    return found


def same_keys(head: AttentionHead) -> Tensor | None:
    """A number for each key, the same for keys that share the rounding of P and dS, int64 [Tk]; None: no two do."""
    return each_same_keys([head])[0]


def each_same_keys(heads: Sequence[AttentionHead]) -> list[Tensor | None]:
    """The same of several heads: those of one shape are looked at together."""
    found: list[Tensor | None] = [None] * len(heads)
    alike: dict[object, list[int]] = {}
    for i, head in enumerate(heads):
        biased = head.masking.mask is not None and head.masking.mask.dtype != torch.bool
        if not biased and head.masking.alibi is None and head.dropout is None:
            alike.setdefault((head.k.shape, head.v.shape), []).append(i)
    for places in alike.values():
        differ = rows_differ([stacked([getattr(heads[i], name) for i in places]) for name in ("k", "v")])
        for i in (i for i, apart in zip(places, differ, strict=True) if not apart):  # comparing them takes far longer
            numbers = torch.unique(torch.cat([heads[i].k, heads[i].v], 1), dim=0, return_inverse=True)[1]
            found[i] = None if int(numbers.max()) + 1 == len(numbers) else numbers
    return found


def together(alike: Tensor, visible: Tensor) -> Tensor:
    """How many keys of its number a row sees, itself included, for each row and key, [n, Tk]; ``visible`` likewise."""
    counts = visible.new_zeros(len(visible), int(alike.max()) + 1).index_add_(1, alike, visible)
    return counts[:, alike]


def ask_noise(collectors: Sequence[NoiseCollector], fused: FusedHeads) -> Callable[[], Callable[[], None]]:
    """Ask the kernels for what every head's collector gathers of blocks; the formulas are those of ``add``.

    Args:
        collectors: Of the heads of ``fused``, in their order, of the same formats.
        fused: The heads.

    Returns:
        What takes that of query rows and asks for that of keys; it returns what lets the collectors take all.
    """
    first, inverse, found = collectors[0], fused.inverse, fused.forward
    top = fused.finite_max
    square = inverse.square()
    relative = square * (first._relative + (_FP32_SCORE * top).square())
    smallest, least = square * first._smallest, torch.full_like(square, first._smallest_dscore)
    probs_squared, dscores_squared = TileWeight("probs_squared"), TileWeight("dscores_squared")
    made, asked = fused.variances(top, fused.delta, relative, smallest, least), list[RowProduct]()
    if made is None:
        asked = [fused.ask(probs_squared, fused.v.square(), relative, smallest)]
        if fused.do is not None:
            asked += [fused.ask(dscores_squared, fused.k.square(), relative, least, torch.zeros_like(least))]

    def take() -> Callable[[], None]:
        out, *of_dq = made or [fused.take(one) for one in asked]
        out += ulp(fused.out, first.out).square() / 12
        variance = {"row_sum": found.squares * square * first._relative, "o": out}
        by_delta, of_keys = torch.zeros_like(inverse), dict[str, KeyProduct]()
        if fused.do is not None and fused.probs_k is not None:
            do2, scale2 = fused.do.square(), first.head.scale**2
            delta, through = (do2 * out).sum(2), fused.probs_k
            variance |= {"delta": delta, "dq": (of_dq[0] + delta[..., None] * through.square()) * scale2}
            if first.want_keys:
                q2, by_dscores = fused.q.square() * scale2, square * delta
                by_delta = fused.sloped_squares * by_dscores * q2.sum(2)
                if made is None or fused.delta is None:
                    of_keys["dk"] = fused.ask_keys(dscores_squared, q2, relative, least, by_dscores)
                    of_keys["dv"] = fused.ask_keys(probs_squared, do2, relative, smallest)
                else:
                    dk, dv = fused.key_variances(top, fused.delta, relative, smallest, least, by_dscores)
                    variance |= {"dk": dk * scale2, "dv": dv}

        def finish() -> None:
            every = variance | {name: fused.take_keys(one) for name, one in of_keys.items()}
            for i, collector in enumerate(collectors):
                collector.variance = {name: values[i] for name, values in every.items()}
                collector.by_delta = by_delta[i]

        return finish

    return take
