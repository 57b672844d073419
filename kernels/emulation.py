"""What a kernel with a given recipe would return, computed with vectorised torch on any device.

Between rounding sites arithmetic is fp32 (products of 16-bit operands are exact in it) or float64, as the recipe says;
a rounding site is a rounding to its format and back. Not modelled: the order of additions inside one tile's sums
(but see ``Recipe.accumulation``), and the hardware exp2's last bit (on CUDA torch's exp2 is the hardware's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby

import torch
from torch import Tensor

from attn_diag.kernels.emulation_backward import KeyGradients, backward_rows
from attn_diag.kernels.emulation_block import Block, masked_scores, round_scores, softmax_key
from attn_diag.kernels.emulation_forward import ForwardRows, RangeTrace, forward_rows
from attn_diag.kernels.emulation_operands import LOG2_E, HeadLike, Operands, Rounder, working_dtype
from attn_diag.kernels.emulation_ranges import launches
from attn_diag.kernels.formats import STORED, Format, Mode
from attn_diag.kernels.quantizers import parse_quantizer
from attn_diag.kernels.recipe import Recipe

# Scores of the rows worked on at once, in elements; on a CPU fewer with several recipes, whose tensors are all held.
_CPU_ELEMENTS, _CPU_ELEMENTS_OF_SEVERAL, _MOST_CUDA_ELEMENTS = 2**20, 2**18, 2**25
_MIN_BLOCK_ROWS = 16
# On a CPU query blocks of fewer rows come together: torch's operations on 32 take as long as on 128.
_SMALL_BLOCK = 128
# Whole blocks of keys, from the first, with a scale of P_bar each, or that a tensor core adds at a time (16 or 32).
_SCALED_KEYS = 128
NO_BLOCK = 2**20
"""Rows of a query block that is none: rows asked for visit the key ranges that some of them see."""

# As in attn_diag.reference.attention: a first call from several threads may be given a low-accuracy MKL function.
for _function in (torch.exp, torch.exp2, torch.log, torch.tanh):
    _function(torch.ones(1))
    _function(torch.ones(1, dtype=torch.float64))


Place = tuple[int, Tensor, slice]
# Query rows, and what each recipe returns for them.
Done = tuple[Tensor, list["EmulatedRows"]]
# ``map``, or something like it that keeps the order.
Runner = Callable[[Callable[[Place], list[Done]], Sequence[Place]], Iterable[list[Done]]]


class RecipeNotSupportedError(ValueError):
    """The recipe has a rounding site or rule that cannot be run; the message names it."""


@dataclass
class EmulatedHead:
    """What the emulated kernel returns for one head; a format that torch lacks is held in the arithmetic's dtype."""

    o: Tensor
    """[Tq, Dv], in the recipe's format."""
    lse: Tensor
    """L, [Tq], in the recipe's arithmetic."""
    delta: Tensor | None = None
    """[Tq], in the recipe's arithmetic; None without dO, as all that follows."""
    dq: Tensor | None = None
    """[Tq, D], in the recipe's dq format."""
    dk: Tensor | None = None
    """[Tk, D], in the dq format; None too where it was not asked for."""
    dv: Tensor | None = None
    """[Tk, Dv], likewise."""
    dsink: Tensor | None = None
    """[], the gradient of the sink's logit; None without one, and without dO."""


@dataclass
class EmulatedRows:
    """What one recipe returns for R query rows, in its arithmetic's dtype."""

    unrounded: Tensor
    """O before its last rounding, [R, Dv]."""
    out: Tensor
    """O, [R, Dv]."""
    lse: Tensor
    """L, [R]."""
    delta: Tensor | None
    """[R]; None without dO."""
    dq: Tensor | None
    """[R, D]; None without dO."""


@dataclass
class RowTrace:
    """One query row on its way through the key ranges; float64."""

    ranges: list[RangeTrace]
    """In the recipe's order."""
    unrounded: Tensor
    """O before its last rounding, [Dv]."""
    out: Tensor
    """O, [Dv]."""
    lse: float
    """L."""
    factor: float = 1.0
    """1 / (1 - p) of dropout: what O_bar is multiplied by before it is divided."""


def check_supported(recipe: Recipe, head: HeadLike | None = None) -> None:
    """Raise RecipeNotSupportedError, naming the site, unless ``emulate_head`` can run the recipe, on any or a head."""
    wrong = recipe.softmax.missing()
    if head is not None and head.sink is not None and recipe.smooth_k != "none":
        wrong.append("smooth_k, which moves the scores, beside a sink")
    if head is not None and recipe.smooth_v != "none" and (head.sink is not None or head.dropout is not None):
        wrong.append("smooth_v, which needs probabilities that add up to 1, beside a sink or dropout")
    if head is not None and recipe.rotation == "hadamard" and head.q.shape[1] & (head.q.shape[1] - 1):
        wrong.append(f"rotation=hadamard of a head dimension of {head.q.shape[1]}, which is no power of two")
    if recipe.exp == "polynomial" and recipe.exp_degree is None:
        wrong.append("exp=polynomial without exp_degree")
    if recipe.exp == "exp2" and recipe.alpha != "in-q":
        wrong.append("exp=exp2 without alpha=in-q")
    by = parse_quantizer(recipe.quantize_probs)
    if by is not None and (by.block == "tensor" or by.block_shape((2, 2))[0] > 1):
        wrong.append(f"quantize_probs={recipe.quantize_probs} in blocks of several rows")
    if wrong:
        raise RecipeNotSupportedError(f"recipe {recipe.name}: {', '.join(wrong)}")


def score_rounding(recipe: Recipe, scale: float) -> Callable[[Tensor], Tensor]:
    """The recipe's rounding of the scores as a monotonic function of the exact S = alpha q.k (float64 -> its dtype)."""
    rounder = Rounder(recipe, 0)

    def rounded(scores: Tensor) -> Tensor:
        products = scores * LOG2_E if recipe.alpha == "in-q" else scores / scale
        return round_scores(recipe, products.to(working_dtype(recipe)), scale, rounder)

    return rounded


def emulate_head(recipe: Recipe, head: HeadLike, *, key_gradients: bool = True) -> EmulatedHead:
    """Run the recipe on one head, forward and (where dO is given) backward; dK and dV with ``key_gradients``.

    Raises RecipeNotSupportedError where the recipe is not complete.
    """
    check_supported(recipe, head)
    parts: list[EmulatedRows] = []
    sums: KeyGradients | None = None
    sums_wanted = key_gradients and head.do is not None
    operands, end = Operands(head), 0
    rounder = Rounder(recipe, 0)
    for start, rows, keys in places_of([recipe], head, whole=sums_wanted):
        block = Block(operands, rows, keys)
        if sums is None and sums_wanted:
            sums = KeyGradients(recipe, block)
        elif sums is not None and start != end:
            sums.end_query_block(Rounder(recipe, end))
        end = start
        parts += _run_block([recipe], block, [sums])[1]
    if sums is not None:
        sums.end_query_block(Rounder(recipe, end))

    def joined(tensors: list[Tensor], fmt: Format = "fp32") -> Tensor:
        return _stored(torch.cat(tensors), fmt)

    dtype = working_dtype(recipe)
    if not parts:
        empty = head.q.new_zeros(0, head.v.shape[1], dtype=dtype)
        return EmulatedHead(_stored(empty, recipe.out), empty.new_zeros(0))
    result = EmulatedHead(joined([p.out for p in parts], recipe.out), joined([p.lse for p in parts]))
    if head.do is not None:
        result.delta = joined([p.delta for p in parts if p.delta is not None])
        if head.sink is not None:
            result.dsink = -(torch.exp(head.sink - result.lse) * result.delta).sum()
        result.dq = joined([p.dq for p in parts if p.dq is not None], recipe.dq)
        if sums is not None:
            result.dk = _stored(rounder("dq", sums.dk, step="dk"), recipe.dq)
            result.dv = _stored(rounder("dq", sums.dv, step="dv"), recipe.dq)
    return result


def emulate_blocks(recipes: Sequence[Recipe], head: HeadLike, run: Runner = map) -> Iterator[Done]:
    """Run several recipes of one schedule side by side: (rows [R], one EmulatedRows a recipe), block by block.

    Products of the inputs, scores, softmax and forwards that recipes share are computed once.

    Args:
        recipes: Recipes with one query block.
        head: The head.
        run: ``run(work, blocks)``, as ``map``, perhaps on several cores.

    Raises:
        ValueError: The schedules' query blocks differ.
        RecipeNotSupportedError: A recipe is not complete.
    """
    for recipe in recipes:
        check_supported(recipe, head)
    if len({recipe.schedule.query_block for recipe in recipes}) > 1:
        raise ValueError("recipes that are emulated side by side need one query_block")
    for done in run(partial(run_place, recipes, Operands(head)), list(places_of(recipes, head))):
        yield from done


def run_place(recipes: Sequence[Recipe], operands: Operands, place: Place) -> list[Done]:
    """All recipes on some rows, without dK and dV; by halves of them where memory does not suffice."""
    start, rows, keys = place
    try:
        return [_run_block(recipes, Block(operands, rows, keys), [None] * len(recipes))]
    except torch.OutOfMemoryError:
        if len(rows) <= _MIN_BLOCK_ROWS:
            raise
    torch.cuda.empty_cache()  # here, as the error holds what the attempt has made
    return [done for half in rows.chunk(2) for done in run_place(recipes, operands, (start, half, keys))]


def emulate_rows(recipe: Recipe, head: HeadLike, rows: Tensor) -> Tensor:
    """O of the query rows ``rows`` ([R] indices) alone, [R, Dv] in the recipe's format, as ``emulate_head`` has them.

    (Random roundings draw other numbers.) Raises RecipeNotSupportedError where the recipe is not complete.
    """
    return emulate_rows_of_several([recipe], head, rows)[0]


def emulate_rows_of_several(recipes: Sequence[Recipe], head: HeadLike, rows: Tensor) -> list[Tensor]:
    """``emulate_rows`` of several recipes side by side: scores, softmax and products that they share are made once."""
    return [out for out, _ in emulate_forwards(recipes, head, rows)]


def emulate_forwards(recipes: Sequence[Recipe], head: HeadLike, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """O as of ``emulate_rows_of_several``, and L as of ``emulate_lse``."""
    out = [head.q.new_empty(len(rows), head.v.shape[1], dtype=working_dtype(recipe)) for recipe in recipes]
    lse = [head.q.new_empty(len(rows), dtype=working_dtype(recipe)) for recipe in recipes]
    for i, mine, made in _forwards(recipes, head, rows):
        out[i][mine], lse[i][mine] = made.out, made.lse
    return [(_stored(o, recipe.out), each) for o, each, recipe in zip(out, lse, recipes, strict=True)]


def emulate_lse(recipe: Recipe, head: HeadLike, rows: Tensor) -> Tensor:
    """L of the query rows ``rows`` ([R] indices) alone, [R], in the recipe's arithmetic; else as ``emulate_rows``."""
    found = head.q.new_empty(len(rows), dtype=working_dtype(recipe))
    for _, mine, made in _forwards([recipe], head, rows):
        found[mine] = made.lse
    return found


def _forwards(recipes: Sequence[Recipe], head: HeadLike, rows: Tensor) -> Iterator[tuple[int, Tensor, ForwardRows]]:
    """(Number of the recipe, places in ``rows``, forward of these) until every recipe has all rows."""
    for recipe in recipes:
        check_supported(recipe, head)
    # Those with one softmax follow each other, so that no more need be held than the scores and what they share.
    order = sorted(range(len(recipes)), key=lambda i: (recipes[i].schedule.query_block, str(softmax_key(recipes[i]))))
    with torch.no_grad(), _plain_arithmetic(head):
        operands, chunk = Operands(head), len(rows) if len(recipes) == 1 else _rows_at_once(head, len(recipes))
        for size, some in groupby(order, key=lambda i: recipes[i].schedule.query_block):
            alike = [list(group) for _, group in groupby(some, key=lambda i: softmax_key(recipes[i]))]
            blocks = rows // size
            for number in torch.unique(blocks).tolist():
                keys = _block_keys(head, number, size)
                for mine in torch.split((blocks == number).nonzero()[:, 0], chunk):
                    seen = _seen_keys(head, rows[mine], keys) if size >= NO_BLOCK else keys
                    block = Block(operands, rows[mine], seen)
                    for group in alike:
                        for i in group:
                            yield i, mine, forward_rows(recipes[i], block)
                        block.keep_scores()


def block_scores(recipe: Recipe, head: HeadLike) -> Iterator[tuple[Tensor, Tensor, float]]:
    """The scores as the recipe stores them, key range by key range: (rows [R], scores [R, K], factor in the exponent).

    Scores are -inf where masked, in the recipe's arithmetic, and not to be changed.
    """
    with torch.no_grad(), _plain_arithmetic(head):
        operands = Operands(head)
        for _, rows, keys in places_of([recipe], head):
            block = Block(operands, rows, keys)
            for tiles in recipe.schedule.ranges(keys):
                for tile in tiles:
                    yield rows, masked_scores(recipe, block, tile), operands.factor(recipe)


def trace_row(recipe: Recipe, head: HeadLike, row: int) -> RowTrace:
    """One query row of the forward, range by range. Raises IndexError for a row that is not there."""
    check_supported(recipe, head)
    if not 0 <= row < len(head.q):
        raise IndexError(f"row must lie between 0 and {len(head.q) - 1}, got {row}")
    ranges: list[RangeTrace] = []
    size = recipe.schedule.query_block
    with _plain_arithmetic(head):
        rows = torch.tensor([row], device=head.q.device)
        found = forward_rows(recipe, Block(Operands(head), rows, _block_keys(head, row // size, size)), ranges)
    factor = 1.0 if head.dropout is None else head.dropout.factor
    return RowTrace(ranges, found.unrounded[0].double(), found.out[0].double(), float(found.lse), factor)


def _plain_arithmetic(head: HeadLike) -> torch.autocast:
    return torch.autocast(head.q.device.type, enabled=False)


def _block_keys(head: HeadLike, number: int, size: int) -> slice:
    """The keys that any row of a query block may see."""
    return head.visible_span(slice(number * size, min((number + 1) * size, len(head.q))))


def _seen_keys(head: HeadLike, rows: Tensor, keys: slice) -> slice:
    """Those of ``keys`` that some of the rows may see, and before them as many as the scales of P_bar ask for."""
    span = head.visible_span(slice(int(rows.min()), int(rows.max()) + 1))
    return slice(span.start - (span.start - keys.start) % _SCALED_KEYS, span.stop)


def _rows_at_once(head: HeadLike, recipes: int, heads: int = 1) -> int:
    """Query rows worked on together: recipes side by side keep several [R, Tk] tensors each."""
    on_cpu = _CPU_ELEMENTS if recipes == 1 else _CPU_ELEMENTS_OF_SEVERAL
    budget = _on_cuda(head.q.device, recipes) if head.q.is_cuda else on_cpu
    return max(_MIN_BLOCK_ROWS, budget // max(len(head.k) * heads, 1))


@cache
def _on_cuda(device: torch.device, recipes: int) -> int:
    """Scores of rows worked on together on a GPU: so many that ten fp32 tensors a recipe fill half of its memory.

    Of its whole memory, not what is free, as random roundings depend on the rows that are taken together.
    """
    return min(_MOST_CUDA_ELEMENTS, torch.cuda.get_device_properties(device).total_memory // (80 * max(recipes, 1)))


def places_of(recipes: Sequence[Recipe], head: HeadLike, heads: int = 1, *, whole: bool = False) -> Iterator[Place]:
    """(start of the query block, rows [R], keys that the query block sees) of every block, in the order of the rows.

    Rows of several query blocks come together where that changes nothing, on a CPU of small ones, unless ``whole``
    blocks are wanted.
    """
    size = recipes[0].schedule.query_block
    chunk = _rows_at_once(head, len(recipes), heads)
    if not whole and all(in_any_block(recipe, head) for recipe in recipes):
        together = chunk if launches(head.q) else _SMALL_BLOCK
        size = max(size, together - together % size)
    for start in range(0, len(head.q), size):
        stop = min(start + size, len(head.q))
        keys = _block_keys(head, start // size, size)
        for first in range(start, stop, chunk):
            yield start, torch.arange(first, min(first + chunk, stop), device=head.q.device), keys


def in_any_block(recipe: Recipe, head: HeadLike) -> bool:
    """Whether a row does not depend on its query block, but for random draws: keys that it does not see add nothing."""
    ordered = recipe.schedule.order != "diagonal-first" and not (recipe.schedule.split_keys and head.sink is not None)
    # A tensor core adds so many products at a time, counted from the first key that the block sees.
    summed = recipe.accumulation == "nvidia-tensor-core" and len(head.q) > 0
    counted = summed and head.visible_span(slice(len(head.q) - 1, None)).start > 0
    return ordered and not counted and recipe.smooth_q == "none" and not recipe.quantized


def _run_block(
    recipes: Sequence[Recipe], block: Block, gradients: Sequence[KeyGradients | None]
) -> tuple[Tensor, list[EmulatedRows]]:
    """All recipes on one block of rows."""
    forwards: dict[str, ForwardRows] = {}
    # Threads of a pool have grad mode and autocast of their own.
    with torch.no_grad(), _plain_arithmetic(block.head):
        results = [_rows_of(r, block, forwards, g) for r, g in zip(recipes, gradients, strict=True)]
    return block.rows, results


def _rows_of(
    recipe: Recipe, block: Block, forwards: dict[str, ForwardRows], gradients: KeyGradients | None
) -> EmulatedRows:
    key = recipe.forward_json
    if key not in forwards:
        forwards[key] = forward_rows(recipe, block)
    forward = forwards[key]
    if block.head.do is None:
        return EmulatedRows(forward.unrounded, forward.out, forward.lse, None, None)
    backward = backward_rows(recipe, block, forward, gradients)
    return EmulatedRows(forward.unrounded, forward.out, forward.lse, backward.delta, backward.dq)


def _stored(x: Tensor, fmt: Format) -> Tensor:
    """In the format's own dtype where torch has one that holds it."""
    # "bf16:toward-zero" fits as well; a random sign leaves the format.
    name, _, mode = fmt.partition(":")
    dtype = None if mode == Mode.RANDOM_SIGN else STORED.get(name)
    return x if dtype is None or fmt in ("fp32", "fp64") else x.to(dtype)
