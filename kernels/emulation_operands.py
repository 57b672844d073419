"""A head's q, k, v and dO as a recipe multiplies them: as given, or smoothed, rotated and quantised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attn_diag.kernels.accumulation import HOPPER, HOPPER_FP16_SUMS, HOPPER_K8, TensorCore, matmul
from attn_diag.kernels.elements import CodeBook, Integers
from attn_diag.kernels.formats import STORED, Rounding, base, parse, round_to, site_seed
from attn_diag.kernels.quantize import quantize, spread
from attn_diag.kernels.quantizers import NO_QUANTIZER, Quantizer, parse_quantizer
from attn_diag.kernels.recipe import Recipe

LOG2_E = 1.4426950408889634
# What q k^T depends on, besides whether alpha is "in-q"; and scaled scores.
OF_PRODUCT = (
    "input", "arithmetic", "accumulation", "mma_k", "quantize_q", "quantize_k", "smooth_q", "smooth_k", "rotation",
    "seed",
)  # fmt: skip
OF_SCORES = (*OF_PRODUCT, "alpha")
# Of v as it is multiplied with P_bar, besides the arithmetic.
OF_VALUES = ("quantize_v", "smooth_v", "seed")
_FIELDS = {"q": "quantize_q", "k": "quantize_k", "v": "quantize_v", "do": "quantize_do"}
_FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Factor:
    """values * scale is the operand; ``scale`` is constant along the contracted axis, None for 1."""

    values: Tensor
    """[T, D]: codes where there is a scale."""
    scale: Tensor | None = None
    """[T, 1] for q and k, [1, D] for v."""
    elements: str = ""
    """The codes' format: "int", e4m3 or e5m2; empty: 16 bits, or what no single instruction multiplies."""

    def rows(self, index: Tensor | slice) -> Factor:
        """Some of the rows."""
        scale = self.scale
        part = scale[index] if scale is not None and len(scale) == len(self.values) and len(scale) > 1 else scale
        return Factor(self.values[..., index, :], part, self.elements)

    @property
    def whole(self) -> Tensor:
        """values * scale."""
        return self.values if self.scale is None else self.values * self.scale


class Rounder:
    """A recipe's rounding sites as one function, for rows from ``row`` on; ``heads``: see ``round_to``."""

    def __init__(self, recipe: Recipe, row: int, heads: int = 0) -> None:
        self._recipe, self._row, self._heads = recipe, row, heads

    def __call__(self, site: str, x: Tensor, key: int = 0, step: str = "") -> Tensor:
        """``x`` as the recipe rounds it at ``site``; ``key`` and ``step`` tell random draws apart."""
        rounding = parse(getattr(self._recipe, site))
        if rounding is None:
            return x
        return round_to(x, rounding, site_seed(self._recipe.seed, site + step, self._row, key), self._heads)


class DropoutLike(Protocol):
    """Which probabilities are kept, bool [Tq, Tk], and 1 / (1 - p), by which they are multiplied."""

    @property
    def kept(self) -> Tensor: ...  # noqa: D102 - described above
    @property
    def factor(self) -> float: ...  # noqa: D102


class HeadLike(Protocol):
    """What is emulated: one head, tensors of any float dtype whose values fp32 can hold exactly.

    q [Tq, D], k [Tk, D], v [Tk, Dv], do [Tq, Dv] or None. ``sink``: a logit of the softmax's denominator, or None.
    ``dropout``: or None.     ``visible_span`` and ``apply_mask`` as in
    ``attn_diag.reference.AttentionHead``.
    """

    @property
    def q(self) -> Tensor: ...  # noqa: D102 - described above, as the rest
    @property
    def k(self) -> Tensor: ...  # noqa: D102
    @property
    def v(self) -> Tensor: ...  # noqa: D102
    @property
    def do(self) -> Tensor | None: ...  # noqa: D102
    @property
    def scale(self) -> float: ...  # noqa: D102
    @property
    def softcap(self) -> float | None: ...  # noqa: D102
    @property
    def sink(self) -> float | None: ...  # noqa: D102
    @property
    def dropout(self) -> DropoutLike | None: ...  # noqa: D102
    def visible_span(self, rows: slice | Tensor) -> slice: ...  # noqa: D102
    def apply_mask(self, scores: Tensor, rows: slice | Tensor, keys: slice, unit: float = 1.0) -> None: ...  # noqa: D102


def working_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype in which the recipe computes between its rounding sites."""
    return torch.float64 if recipe.arithmetic == "fp64" else torch.float32


class PreparedOperands:
    """Makes every operand once for all recipes that agree in how."""

    def __init__(self, given: dict[str, Tensor], scale: float) -> None:
        """``given``: q, k, v and perhaps do of a head, in the recipes' working dtype; ``scale``: alpha."""
        self._given, self._scale = given, scale
        self._found: dict[tuple[object, ...], Factor] = {}
        self._made: dict[tuple[object, ...], Tensor] = {}

    def get(self, recipe: Recipe, name: str) -> Factor:
        """``name`` (q, k, v, do) as the recipe multiplies it, after smoothing, rotation, scale and quantisation."""
        fields = (*OF_SCORES, "quantize_v", "smooth_v", "quantize_do", "schedule")
        key = name, *(getattr(recipe, field) for field in fields)
        if key not in self._found:
            by = parse_quantizer(getattr(recipe, _FIELDS[name]))
            x = self.unquantized(recipe, name)
            self._found[key] = Factor(x) if by is None else _quantized(x, by, recipe.seed, columns=name in ("v", "do"))
        return self._found[key]

    def unscaled(self, recipe: Recipe, name: str) -> Tensor:
        """q or k as quantised, in the unit of the given ones."""
        whole = self.get(recipe, name).whole
        if name == "q" and recipe.alpha == "in-q":
            whole = whole / (self._scale * LOG2_E)
        return _rotated(whole) if recipe.rotation == "hadamard" else whole

    def scores(self, recipe: Recipe, rows: Tensor, keys: slice) -> Tensor:
        """q k^T, [R, K]; with alpha "in-q" times alpha log2(e)."""
        q, k = self.get(recipe, "q").rows(rows), self.get(recipe, "k").rows(keys)
        found = multiply(recipe, q, Factor(k.values.mT, None if k.scale is None else k.scale.T, k.elements))
        if recipe.smooth_q != "none":
            means = _stored(recipe, self._once(recipe, "means"))[rows // recipe.schedule.query_block]
            found = found + _stored(recipe, matmul(means, self._once(recipe, "k")[keys].T, "exact"))
        return found

    def shift(self, recipe: Recipe, rows: Tensor) -> Tensor:
        """What smoothing k took off every scaled score of a row, and so off L: alpha q . mean(k), [R]."""
        k = self._given["k"]
        return (self._given["q"][rows] @ (k - _smoothed(recipe, k)).mean(0)) * self._scale

    def mean_value(self) -> Tensor:
        """What smoothing v takes off every value, and so off O: [Dv]."""
        return self._given["v"].mean(0)

    def _once(self, recipe: Recipe, name: str) -> Tensor:
        """k before it is quantised, or the "means" of q's blocks: every step of a recipe asks for them."""
        fields = ("input", "arithmetic", "smooth_q", "smooth_k", "rotation", "alpha", "schedule")
        key = name, *(getattr(recipe, field) for field in fields)
        if key not in self._made:
            self._made[key] = self._block_means(recipe) if name == "means" else self.unquantized(recipe, name)
        return self._made[key]

    def unquantized(self, recipe: Recipe, name: str) -> Tensor:
        """``name`` (q, k, v, do) after smoothing, rotation and scale, before it is quantised."""
        x = self._given[name]
        if name == "k" and recipe.smooth_k != "none":
            x = _smoothed(recipe, x)
        if name == "q" and recipe.alpha == "in-q":
            x = x * torch.tensor(self._scale * LOG2_E, dtype=x.dtype, device=x.device)
        if name in ("q", "k") and recipe.rotation == "hadamard":
            x = _rotated(x)
        if name == "v" and recipe.smooth_v != "none":
            x = x - self.mean_value()
        if name == "q" and recipe.smooth_q != "none":
            blocks = torch.arange(len(x), device=x.device) // recipe.schedule.query_block
            x = _stored(recipe, x - self._once(recipe, "means")[blocks])
        return x

    def _block_means(self, recipe: Recipe) -> Tensor:
        """The mean of every query block of q, [blocks, D]."""
        q = self._given["q"]
        if recipe.alpha == "in-q":
            q = q * torch.tensor(self._scale * LOG2_E, dtype=q.dtype, device=q.device)
        if recipe.rotation == "hadamard":
            q = _rotated(q)
        size = recipe.schedule.query_block
        if recipe.smooth_q == "rounded-block-mean":
            # The last block is filled up with zeros.
            return torch.stack([block.sum(0) / size for block in torch.split(q, size)])
        return torch.stack([block.mean(0) for block in torch.split(q, size)])


class Operands:
    """A head's tensors in the two precisions that recipes compute in."""

    def __init__(self, head: HeadLike) -> None:
        self.head = head
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}
        self._prepared: dict[torch.dtype, PreparedOperands] = {}
        mask = getattr(getattr(head, "masking", None), "mask", None)
        self.has_bias = mask is not None and mask.dtype != torch.bool

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        """q, k, v or do in fp32 or float64."""
        key = name, dtype
        if key not in self._tensors:
            self._tensors[key] = getattr(self.head, name).to(dtype)
        return self._tensors[key]

    def prepared(self, recipe: Recipe) -> PreparedOperands:
        """q, k, v and dO as recipes of this arithmetic multiply them."""
        dtype = working_dtype(recipe)
        if dtype not in self._prepared:
            names = ("q", "k", "v") if self.head.do is None else ("q", "k", "v", "do")
            self._prepared[dtype] = PreparedOperands({n: self.get(n, dtype) for n in names}, self.head.scale)
        return self._prepared[dtype]

    def factor(self, recipe: Recipe) -> float:
        """What S - m is multiplied by in the exponent: ``unit`` where the recipe leaves it there, else 1."""
        return self.unit(recipe) if self.in_exponent(recipe) else 1.0

    def unit(self, recipe: Recipe) -> float:
        """What makes scaled scores of q k^T: alpha, or ln 2 where q holds alpha log2(e)."""
        return 1 / LOG2_E if recipe.alpha == "in-q" else self.head.scale

    def in_exponent(self, recipe: Recipe) -> bool:
        """Whether the scale waits for the exponent. Softcap and additive masks apply to scaled scores."""
        return recipe.alpha in ("in-exponent", "in-q") and self.head.softcap is None and not self.has_bias


def multiply(recipe: Recipe, a: Factor, b: Factor) -> Tensor:
    """``a @ b`` as the recipe's hardware adds, times both scales."""
    if a.scale is None and a.elements == "" and b.elements != "":
        b = Factor(b.whole)
    elif b.scale is None and b.elements == "" and a.elements != "":
        a = Factor(a.whole)
    model, operands = recipe.accumulation, recipe.input
    if a.elements == b.elements == "int":
        model = "exact"  # INT32 sums
    elif a.elements == b.elements and a.elements in _FP8:
        operands = a.elements
    core = core_of(recipe) if operands == recipe.input else None
    found = matmul(a.values, b.values, model, operands=operands, core=core)
    for scale in (a.scale, b.scale):
        found = found if scale is None else found * scale
    return found


def values_product(recipe: Recipe, cast: Tensor, v: Factor, accumulator: Tensor | None = None) -> Tensor:
    """P_bar V of one key range in the unit of the codes: cast P_bar [R, K], v [K, Dv] (its scale is left out)."""
    elements = base(recipe.probs) if recipe.quantize_probs == NO_QUANTIZER else ""
    operands = recipe.input
    if elements in _FP8 and v.elements == elements:
        operands = elements
    elif elements in STORED:
        operands = elements if elements in ("bf16", "fp16") else recipe.input
    # Of sums in another format than its own.
    core = HOPPER_FP16_SUMS if base(recipe.pv_sums) == "fp16" else core_of(recipe) if operands not in _FP8 else None
    return matmul(cast, v.values, recipe.accumulation, accumulator, operands=operands, core=core)


def core_of(recipe: Recipe) -> TensorCore:
    """The tensor core that adds products of 16-bit operands."""
    return HOPPER_K8 if recipe.mma_k == 8 else HOPPER


def _quantized(x: Tensor, by: Quantizer, seed: int, *, columns: bool) -> Factor:
    """Codes and a scale where that is constant along the contracted axis (``columns``: the first), else the values."""
    found = quantize(x, by, seed=seed)
    rows, width = by.block_shape((len(x), x.shape[1]))
    constant = rows >= len(x) if columns else width >= x.shape[1]
    elements = by.parsed_elements
    if not (constant and by.plain) or isinstance(elements, CodeBook):
        return Factor(found.values.to(x.dtype))
    every = spread(found.scale, (len(x), x.shape[1]), by)
    scale = every[:1] if columns else every[:, :1]
    name = "int" if isinstance(elements, Integers) else _name(elements)
    return Factor(found.codes.to(x.dtype), scale.to(x.dtype), name)


def _name(elements: Rounding) -> str:
    return next((name for name in _FP8 if parse(name) == Rounding(elements.format)), "")


def _stored(recipe: Recipe, x: Tensor) -> Tensor:
    """What smoothing q makes on its way to the kernel, as it is kept."""
    rounded = recipe.smooth_q == "rounded-block-mean" and recipe.arithmetic != "fp64"
    return round_to(x, parse(recipe.input)) if rounded else x


def _smoothed(recipe: Recipe, k: Tensor) -> Tensor:
    mean = k.mean(0, keepdim=True)
    if recipe.smooth_k == "mean" or recipe.arithmetic == "fp64":
        return k - mean
    fmt = parse(recipe.input)
    return round_to(k - round_to(mean, fmt), fmt)


def _rotated(x: Tensor) -> Tensor:
    """x H / sqrt(D) with Sylvester's H, which is its own inverse. Raises ValueError unless D is a power of two."""
    width = x.shape[1]
    if width & (width - 1):
        raise ValueError(f"a Hadamard rotation needs a head dimension that is a power of two, got {width}")
    matrix = x.new_ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ matrix / math.sqrt(width)
