"""A recipe: what an attention kernel rounds, to which format, and in which order it visits the keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from attn_diag.kernels.formats import Format, base, parse
from attn_diag.kernels.quantizers import NO_QUANTIZER, parse_quantizer

if TYPE_CHECKING:
    from rich.table import Table

Order = Literal["ascending", "descending", "diagonal-first"]


@dataclass(frozen=True)
class Schedule:
    """Ordered key ranges for each block of query rows."""

    query_block: int = 128
    """Query rows of a block."""
    key_tile: int = 128
    """Keys of a range (a tile)."""
    order: Order = "ascending"
    """ "diagonal-first": the last visible tile, then the others ascending."""
    split_keys: int | None = None
    """Split-KV: splits of so many keys have their own maximum and sum, and are merged in fp32 through L."""

    def ranges(self, keys: slice) -> Iterator[list[slice]]:
        """For visible keys [start, stop): one ordered list of key ranges for every split; tiles start at multiples."""
        if keys.start == keys.stop:
            return
        split = self.split_keys or keys.stop
        for begin in range(keys.start - keys.start % split, keys.stop, split):
            start, stop = max(begin, keys.start), min(begin + split, keys.stop)
            first = start - start % self.key_tile
            tiles = [slice(max(t, start), min(t + self.key_tile, stop)) for t in range(first, stop, self.key_tile)]
            if self.order == "descending":
                tiles.reverse()
            elif self.order == "diagonal-first":
                tiles = tiles[-1:] + tiles[:-1]
            yield tiles

    def __str__(self) -> str:
        split = f", splits of {self.split_keys} keys" if self.split_keys else ""
        return f"{self.query_block} rows x {self.key_tile} keys, {self.order}{split}"


@dataclass(frozen=True)
class SoftmaxRule:
    """How the subtracted maximum is chosen. Thresholds are in units of the stored scores."""

    kind: Literal["safe", "stabilised", "stale"] = "safe"
    """ "safe": the running maximum; "stabilised": Qiu & Yao, arXiv 2510.04212, section 4; "stale": FlashAttention-4,
    arXiv 2603.05451."""
    beta: float | None = None
    """Stabilised: where the maximum r is repeated, beta * r if r > 0 and 0 if r < 0 is subtracted."""
    epsilon: float = 1e-3
    """Stabilised: a score within this of the maximum repeats it."""
    threshold: float | None = None
    """Stale: the old maximum is kept while the new one exceeds it by no more than this."""

    def missing(self) -> list[str]:
        """What the rule needs and does not have, in words."""
        needed = {"stabilised": "beta", "stale": "threshold"}.get(self.kind)
        return [f"softmax={self.kind} without {needed}"] if needed and getattr(self, needed) is None else []

    def __str__(self) -> str:
        if self.kind == "stabilised":
            return f"stabilised (beta {self.beta}, epsilon {self.epsilon})"
        return self.kind if self.kind == "safe" else f"stale (threshold {self.threshold})"


# The fields of a recipe that hold a format, in the order of the computation.
FORMATS = (
    "input", "scores", "difference", "row_max", "probs", "dropout_factor", "row_sum", "pv_sums", "range_pv",
    "accumulator", "out",
    "delta_products", "delta", "backward_probs", "dprobs", "dscores", "gradient_accumulator", "dq",
)  # fmt: skip
# The fields that hold a quantiser, as ``kernels.quantizers.parse_quantizer`` reads it.
QUANTIZERS = (
    "quantize_q", "quantize_k", "quantize_v", "quantize_probs", "quantize_do", "quantize_backward_probs",
    "quantize_dscores",
)  # fmt: skip
# What is done to q, k and v before; each is undone by "none".
SMOOTHING = ("smooth_q", "smooth_k", "smooth_v", "rotation")
# The fields that the forward does not depend on.
BACKWARD = (
    "delta_from", "delta_products", "delta", "backward_scores", "backward_probs", "dprobs", "dscores_from",
    "dscores", "alpha_in_backward", "gradient_accumulator", "dq", "quantize_do", "quantize_backward_probs",
    "quantize_dscores", "backward_operands",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Every rounding site of an attention kernel, forward and backward, and its schedule.

    Formats name what a quantity is rounded to where it arises, nearest-even unless they say otherwise ("bf16",
    "e8m11:toward-zero", see ``attn_diag.kernels.formats``); "fp32" is the arithmetic's own.
    """

    name: str
    """Its name, such as fa2."""
    summary: str
    """What kernel it describes, in a line."""
    input: Format = "bf16"
    """q, k, v and dO."""
    scores: Format = "fp32"
    """S."""
    quantize_q: str = NO_QUANTIZER
    """q for S, such as "int8 block=128rows"; blocks of rows begin at the head's first row."""
    quantize_k: str = NO_QUANTIZER
    """k for S."""
    smooth_q: Literal["none", "block-mean", "rounded-block-mean"] = "none"
    """ "block-mean": of every query block q's mean is taken off before it is quantised; its product with the smoothed
    k joins S in fp32 (SageAttention 2, arXiv 2411.10958); "rounded-block-mean": what is left of q, the mean and that
    product are rounded to ``input``, and the last block is filled up with zeros (SageAttention 3)."""
    smooth_k: Literal["none", "mean", "rounded-mean"] = "none"
    """k's mean over the keys is taken off before it is quantised, which softmax does not see; "rounded-mean": the mean
    and what is left of k are rounded to ``input`` (SageAttention 1)."""
    rotation: Literal["none", "hadamard"] = "none"
    """q and k are multiplied by a Hadamard matrix over sqrt(D) before they are quantised."""
    alpha: Literal["before-rounding", "after-rounding", "in-exponent", "in-q"] = "in-exponent"
    """Where the scale enters: before S is rounded, after (S is rounded again), as a factor in the exponent, or, with
    log2(e), into q before it is quantised."""
    difference: Format = "fp32"
    """S - m, where ``exp`` is "exact" or "exp2"; the others scale both first, or in one fused multiply-add."""
    row_max: Format = "fp32"
    """m."""
    exp: Literal["exact", "exp2-fma", "exp2-scaled", "exp2", "polynomial"] = "exp2-fma"
    """ "exp2-fma": exp2 of a fused multiply-add; "exp2-scaled": of S times log2(e), and alpha, less m times that, both
    rounded (cuDNN, CUTLASS); "exp2": of the difference (alpha "in-q"); "polynomial": exp2 by one in the fraction
    (FlashAttention-4)."""
    exp_degree: int | None = None
    """The polynomial's degree."""
    rescaling: Literal["difference", "fused"] = "difference"
    """How the exponent of what old sums are multiplied by is made, beside "exp2-fma" and "polynomial": of m - m', which
    is exactly 0 where the maximum stays, or by one fused multiply-add too."""
    probs: Format = "bf16"
    """P_bar, cast for P_bar V."""
    probs_scale: float = 1.0
    """P_bar is cast after multiplication by this; O_bar is divided by it again."""
    dropout_factor: Format = "fp32"
    """1 / (1 - p) of dropout. Where it is rounded it multiplies the cast P_bar, and for dV the cast P, which are
    rounded again; else it waits for the sums."""
    quantize_probs: str = NO_QUANTIZER
    """P_bar in blocks along a row's keys, after ``probs`` and ``probs_scale``; blocks begin at a key range's first."""
    quantize_v: str = NO_QUANTIZER
    """v for P_bar V."""
    smooth_v: Literal["none", "mean"] = "none"
    """v's mean over the keys is taken off before it is quantised, and added to O (SageAttention 2, ``smooth_v``)."""
    row_sum_of: Literal["fp32-probs", "cast-probs"] = "fp32-probs"
    """Whether l adds the fp32 P_bar or the cast one."""
    row_sum: Format = "fp32"
    """l."""
    row_sum_clamp: float | None = None
    """The least that a key range adds to l."""
    sink_joins: Literal["last", "first"] = "last"
    """Where an attention sink s joins: "last": l, after the last range; "first": m starts at s and l at 1, so that
    P_bar is cast under a maximum that may be s (vLLM's Triton kernel).
    gpt-oss's casts no P_bar: its bits do not tell the two apart."""
    pv_sums: Format = "fp32"
    """The tensor core's own sums of P_bar V, every instruction's; with other accumulation every key range's."""
    pv_levels: Literal["one", "two"] = "one"
    """ "one": a tensor core adds P_bar V into O_bar itself; "two": into 0, and every range's sum is added outside in
    fp32."""
    range_pv: Format = "fp32"
    """P_bar V over one key range."""
    accumulator: Format = "fp32"
    """O_bar between key ranges."""
    accumulation: Literal["fp32-nearest", "exact", "nvidia-tensor-core"] = "fp32-nearest"
    """How sums of products are made, see ``attn_diag.kernels.accumulation.matmul``; with "nvidia-tensor-core" exp2 is a
    GPU's, too (``attn_diag.kernels.hardware_exp2``)."""
    mma_k: Literal[8, 16] = 16
    """With accumulation "nvidia-tensor-core": how many products of 16-bit operands an instruction adds."""
    division: Literal["before-last-cast", "after-last-cast"] = "before-last-cast"
    """ "after-last-cast": O_bar is rounded to ``out`` before it is divided by l."""
    out: Format = "bf16"
    """O."""
    lse_from: Literal["unrounded-l", "rounded-l"] = "unrounded-l"
    """Which l L is made from."""
    delta_from: Literal["rounded-o", "fp32-o", "dp"] = "rounded-o"
    """rowsum(dO o O) from O after or before its last rounding, or rowsum(P o dP)."""
    delta_products: Format = "fp32"
    """dO o O before it is summed."""
    delta: Format = "fp32"
    """delta."""
    backward_scores: Literal["fp32", "as-forward"] = "fp32"
    """The scores from which the backward recomputes P."""
    backward_probs: Format = "bf16"
    """P, cast for dV and, where ``dscores_from`` says so, for dS."""
    dprobs: Format = "fp32"
    """dP."""
    dscores_from: Literal["fp32-probs", "cast-probs"] = "fp32-probs"
    """Which P is multiplied by dP - delta."""
    dscores: Format = "bf16"
    """dS."""
    alpha_in_backward: Literal["after-product", "before-cast"] = "after-product"
    """alpha times dS K, or dS holds alpha when it is cast."""
    quantize_do: str = NO_QUANTIZER
    """dO for dV."""
    quantize_backward_probs: str = NO_QUANTIZER
    """P for dV, after its cast."""
    quantize_dscores: str = NO_QUANTIZER
    """dS, after its cast, in blocks of rows by keys."""
    backward_operands: Literal["given", "quantized"] = "given"
    """Whether dQ and dK are products with q and k as they were given, or as the forward quantised them."""
    gradient_accumulator: Format = "fp32"
    """Every range's contribution to dQ, dK, dV, and their sums."""
    dq: Format = "bf16"
    """dQ, dK and dV."""
    arithmetic: Literal["fp32", "fp64"] = "fp32"
    """The precision between the sites; "fp64" with "fp32" at every site is the exact recipe."""
    seed: int = 0
    """Starts random roundings."""
    softmax: SoftmaxRule = field(default_factory=SoftmaxRule)
    """How the subtracted maximum is chosen."""
    schedule: Schedule = field(default_factory=Schedule)
    """In which order the keys are visited."""
    json: str = field(init=False, repr=False, compare=False)
    """One line of JSON, read back by ``from_json``."""
    forward_json: str = field(init=False, repr=False, compare=False)
    """What of it the forward depends on."""

    def sites(self) -> dict[str, str]:
        """Field by field in words, in the order of the computation."""
        shown = [f.name for f in fields(self) if f.init and f.name not in ("name", "summary")]
        return {name.replace("_", " "): str(getattr(self, name)) for name in shown if getattr(self, name) is not None}

    def table(self) -> Table:
        """The recipe as a rich table."""
        from rich.table import Table

        table = Table("site", "format or rule", title=f"{self.name}: {self.summary}", title_justify="left")
        for site, value in self.sites().items():
            table.add_row(site, value)
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __post_init__(self) -> None:
        values = [getattr(self, name) for name in _given()]
        try:
            texts = _checked(*values)
        except TypeError:  # a value without a hash, which fits nowhere
            texts = _checked.__wrapped__(*values)
        # Kept, not computed when asked for: torch.compile can read an attribute, but not trace asdict.
        for name, text in zip(("json", "forward_json"), texts, strict=True):
            object.__setattr__(self, name, text)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The recipe whose ``json`` this is."""
        values = json.loads(text)
        return Recipe(
            **values | {"softmax": SoftmaxRule(**values["softmax"]), "schedule": Schedule(**values["schedule"])}
        )

    @property
    def quantized(self) -> tuple[str, ...]:
        """The fields of ``QUANTIZERS`` that quantise something."""
        return tuple(name for name in QUANTIZERS if getattr(self, name) != NO_QUANTIZER)

    @property
    def subtracts_maximum(self) -> bool:
        """Whether m is the maximum of the stored scores itself, neither moved by a rule or a sink nor rounded."""
        keys_alone = self.softmax.kind == "safe" and self.sink_joins == "last"
        return keys_alone and self.row_max in ("fp32", self.scores)

    @property
    def keeps_sums(self) -> bool:
        """Whether a key range that a row does not see leaves its l and O_bar as they are."""
        return self.rescaling == "difference" and self.row_sum_clamp is None

    def for_input(self, input_format: Format) -> Recipe:
        """The same recipe for another 16-bit input format: what was BF16 becomes ``input_format``."""
        changes: dict[str, Any] = {"input": input_format}
        for name in FORMATS:
            text = getattr(self, name)
            if base(text) == self.input:
                changes[name] = input_format + text.removeprefix(self.input)
        return replace(self, **changes)


@cache
def _choices() -> dict[str, tuple[str | int, ...]]:
    """The fields of a recipe that name one of several ways, and these."""
    hints = get_type_hints(Recipe)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


@cache
def _given() -> tuple[str, ...]:
    """The fields that a recipe is made of."""
    return tuple(f.name for f in fields(Recipe) if f.init)


@lru_cache(maxsize=4096, typed=True)  # of the same recipes again and again, each in a fifth of a millisecond
def _checked(*values: Any) -> tuple[str, str]:
    """``json`` and ``forward_json`` of a recipe with these fields, in order; ValueError says which one does not fit."""
    given = dict(zip(_given(), values, strict=True))
    for names, read in ((FORMATS, parse), (QUANTIZERS, parse_quantizer)):
        for name in names:
            try:
                read(given[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    for name, choices in _choices().items():
        if given[name] not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {given[name]!r}")
    forward = {name: value for name, value in given.items() if name not in ("name", "summary", *BACKWARD)}
    return json.dumps(given, default=asdict), json.dumps(forward, default=asdict)
