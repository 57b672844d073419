"""Probes of a unit that adds products: its parameters follow from what it returns, never from its name.

Every probe is one sum of a few signed products of known exponents, written here as numbers; the rest are zeros. The
unit is any callable ``dot(a, b, c)``: a [M, K] and b [K, N] in a 16-bit dtype, c [M, N] fp32 -> a @ b + c in fp32.

Method: FPRev (arXiv 2411.00442) for the order, MMA-Sim (arXiv 2511.10909) for bits and roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attn_diag.kernels.accumulation import TensorCore, tensor_core_matmul
from attn_diag.kernels.formats import Mode
from attn_diag.results.hardware import Rounding, Subnormals, SumProfile

Dot = Callable[[Tensor, Tensor, Tensor], Tensor]
Operands = Literal["bf16", "fp16"]
DTYPES: dict[Operands, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Products in a probe; blocks of more than half as many are not told apart.
_LENGTH = 64
# Largest product. Operands of products down to 2**-28 are then normal in FP16 (2**-14).
_BIG = 14
_SMALLEST = -28
# Probes of one call: its result is read on the diagonal.
_BATCH = 64
# Fractions of a unit in the last place; ulp of an even number, then of an odd one.
_FRACTIONS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
_ROUNDINGS: dict[Rounding, Callable[[Tensor], Tensor]] = {
    "toward-zero": torch.trunc,
    "nearest-even": torch.round,
    "nearest-away": lambda x: torch.copysign((x.abs() + 0.5).floor(), x),
    "down": torch.floor,
    "up": torch.ceil,
}
_MODES: dict[Rounding, Mode] = {
    "toward-zero": Mode.TOWARD_ZERO, "nearest-even": Mode.NEAREST_EVEN, "down": Mode.DOWN, "up": Mode.UP,
}  # fmt: skip


@dataclass(frozen=True)
class SumProbe:
    """One sum: products by position (each a number whose significand has a few bits), and the accumulator."""

    products: dict[int, float]
    accumulator: float = 0.0


def rounding_of(steps: Tensor, rounded: Tensor) -> Rounding | None:
    """The rounding that makes ``rounded`` of ``steps`` (float64, in units of the last place); None if none does."""
    return next((name for name, function in _ROUNDINGS.items() if torch.equal(function(steps), rounded)), None)


def profile_sums(
    dot: Dot, operands: Operands, *, instruction: str, device: torch.device, sums: int = 2**17
) -> SumProfile:
    """Measure how a unit adds products, and compare random sums with the model of it.

    Args:
        dot: The unit.
        operands: The format of its operands.
        instruction: What the profile calls it.
        device: Where it runs.
        sums: How many random sums (about) are compared.
    """
    unit = _Unit(dot, operands, device)
    notes: list[str] = []
    exact = _products_exact(unit)
    if not exact:
        notes.append("products are rounded before they are added")
    block = _block(unit)
    bits = alignment = result = None
    if block is None:
        notes.append("no length of blocks explains which small terms a large one swallows")
    elif block < 4:
        notes.append(f"sums of {block} at a time: the probes of bits and roundings need blocks of at least 4")
    else:
        bits = _fraction_bits(unit, notes)
        if bits is not None:
            alignment = _alignment(unit, bits)
            result = _result(unit) if bits >= 23 else None
            if alignment is None:
                notes.append("no known rounding explains what becomes of a term's last bits")
            if result is None:
                notes.append("no known rounding explains the last bit of the sum")
            if not _exponents_added(unit, bits):
                notes.append("terms are aligned by the products' own exponents, not by the sums of their operands'")
    subnormals = _subnormals(unit)
    if subnormals is None:
        notes.append("some subnormals are kept and others flushed")
    core = None if notes else _core(block, bits, alignment, result, subnormals)
    count, mismatches = (0, None) if core is None else _verify(unit, core, sums)
    if core is None and not notes:
        notes.append("there is no model of these roundings to compare with")
    if mismatches:
        notes.append(f"the model misses {mismatches} of {count} random sums")
    return SumProfile(
        operands=operands, instruction=instruction, block=block, fraction_bits=bits, alignment=alignment,
        result=result, subnormals=subnormals, products_exact=exact, sums=count, mismatches=mismatches,
        fits=mismatches == 0, notes=tuple(notes),
    )  # fmt: skip


class _Unit:
    """A ``dot`` with the dtype and device of its operands."""

    def __init__(self, dot: Dot, operands: Operands, device: torch.device) -> None:
        self.dot, self.operands, self.device = dot, operands, device
        self.dtype = DTYPES[operands]

    def matmul(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """``a`` @ ``b`` + ``c`` of tensors that the unit's formats hold exactly; fp32 on the unit's device."""
        a, b = (x.to(self.device, self.dtype) for x in (a, b))
        return self.dot(a, b, c.to(self.device, torch.float32))

    def run(self, probes: Sequence[SumProbe]) -> Tensor:
        """What each probe's sum comes out as, [P] float64."""
        results = []
        for start in range(0, len(probes), _BATCH):
            batch = probes[start : start + _BATCH]
            products = torch.zeros(len(batch), _LENGTH, dtype=torch.float64)
            for row, probe in zip(products, batch, strict=True):
                for position, value in probe.products.items():
                    row[position] = value
            # Half of the exponent goes into each operand, the significand into the first.
            significand, exponent = torch.frexp(products)
            half = exponent.div(2, rounding_mode="floor")
            a = torch.ldexp(significand, exponent - half)
            b = torch.where(products == 0, 0.0, torch.ldexp(torch.ones_like(a), half))
            c = torch.tensor([[p.accumulator] for p in batch], dtype=torch.float64).expand(-1, len(batch))
            results.append(self.matmul(a, b.T, c).diagonal().double().cpu())
        return torch.cat(results)


def _products_exact(unit: _Unit) -> bool:
    """Random significands, one product a sum: fp32 holds it without rounding."""
    generator = torch.Generator().manual_seed(0)
    a, b = (1 + torch.rand(64, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = (x.to(torch.float32).to(unit.dtype).double() for x in (a, b))
    got = unit.matmul(a, b.T, torch.zeros(64, 64))
    return torch.equal(got.double().cpu(), a @ b.T)


def _block(unit: _Unit) -> int | None:
    """2**14 at s and its negative at s + 1 swallow 2**-28 (or round it to more) wherever that is added by then.

    With blocks of n these are the positions before the end of the block that holds s + 1.
    """
    swallowed = []
    for s in range(_LENGTH - 1):
        places = [j for j in range(_LENGTH) if j not in (s, s + 1)]
        big = 2.0**_BIG
        found = unit.run([SumProbe({s: big, s + 1: -big, j: 2.0**_SMALLEST}) for j in places])
        lost = (found != 2.0**_SMALLEST).tolist()
        swallowed.append([j for j, gone in zip(places, lost, strict=True) if gone])
    for n in range(1, _LENGTH // 2 + 1):
        ends = [-(-(s + 2) // n) * n for s in range(_LENGTH - 1)]
        if all(
            gone == [j for j in range(min(end, _LENGTH)) if j not in (s, s + 1)]
            for s, (gone, end) in enumerate(zip(swallowed, ends, strict=True))
        ):
            return n
    return None


def _fraction_bits(unit: _Unit, notes: list[str]) -> int | None:
    """The most bits by which a term may lie below the largest exponent and be kept exactly."""
    big = 2.0**_BIG
    depths = range(1, _BIG - _SMALLEST + 1)
    small = [2.0 ** (_BIG - n) for n in depths]
    as_product = unit.run([SumProbe({0: big, 1: -big, 2: x}) for x in small])
    as_accumulator = unit.run([SumProbe({0: big, 1: -big}, x) for x in small])
    beside_accumulator = unit.run([SumProbe({0: -big, 1: x}, big) for x in small])
    counts = {_leading(found.tolist(), small) for found in (as_product, as_accumulator, beside_accumulator)}
    if len(counts) > 1:
        notes.append(f"products and the running sum keep different numbers of bits: {sorted(counts)}")
        return None
    bits = counts.pop()
    if bits in (0, len(small)):
        notes.append("no number of bits was found at which small terms are cut off")
        return None
    return bits


def _leading(found: list[float], expected: list[float]) -> int:
    """How many of the first are equal."""
    return next((i for i, (x, y) in enumerate(zip(found, expected, strict=True)) if x != y), len(found))


def _alignment(unit: _Unit, bits: int) -> Rounding | None:
    """Terms of a few quarters of the last bit kept, of either sign, as product and as accumulator."""
    big, quantum = 2.0**_BIG, 2.0 ** (_BIG - bits)
    steps = torch.tensor([sign * f for f in _FRACTIONS for sign in (1, -1)], dtype=torch.float64)
    terms = (steps * quantum).tolist()
    as_product = unit.run([SumProbe({0: big, 1: -big, 2: x}) for x in terms])
    as_accumulator = unit.run([SumProbe({0: big, 1: -big}, x) for x in terms])
    found = {rounding_of(steps, results / quantum) for results in (as_product, as_accumulator)}
    return found.pop() if len(found) == 1 else None


def _result(unit: _Unit) -> Rounding | None:
    """Three products of 2**14 and an accumulator of as much sum to 2**16, whose ulp is 2**-7.

    Quarters of it are added exactly: they lie 23 bits below 2**14.
    """
    big, ulp = 2.0**_BIG, 2.0 ** (_BIG + 2 - 23)
    rests = [sign * fraction for fraction in _FRACTIONS for sign in (1, -1)]
    larges = [math.copysign(big, rest) for rest in rests]
    probes = [SumProbe({0: x, 1: x, 2: x, 3: rest * ulp}, x) for x, rest in zip(larges, rests, strict=True)]
    steps = torch.tensor([math.copysign(2**23, rest) + rest for rest in rests], dtype=torch.float64)
    return rounding_of(steps, unit.run(probes) / ulp)


def _exponents_added(unit: _Unit, bits: int) -> bool:
    """1.5 * 1.5 = 2.25 counts as exponent 0, not 1: what 1 keeps beside it, it keeps."""
    exponent, side = _BIG - bits, 1.5 * 2.0 ** (_BIG // 2)
    half = exponent // 2
    a = torch.tensor([[side, -side, 2.0 ** (exponent - half)]], dtype=torch.float64)
    b = torch.tensor([[side], [side], [2.0**half]], dtype=torch.float64)
    return float(unit.matmul(a, b, torch.zeros(1, 1))) == 2.0**exponent


def _subnormals(unit: _Unit) -> Subnormals | None:
    """Operands (the smallest one times 1), and running sums and results of 2**-140."""
    operand, factor = {"bf16": (2.0**-133, 2.0**40), "fp16": (2.0**-24, 1.0)}[unit.operands]
    a = torch.tensor([[operand] + [0.0] * 15], dtype=torch.float64)
    b = torch.tensor([[factor] + [0.0] * 15], dtype=torch.float64).T
    zero = torch.zeros(1, 1)
    kept = [
        float(unit.matmul(a, b, zero)) == operand * factor,
        float(unit.matmul(b.T, a.T, zero)) == operand * factor,
        float(unit.matmul(0 * a, b, zero + 2.0**-140)) == 2.0**-140,
    ]
    if len(set(kept)) > 1:
        return None
    return "kept" if kept[0] else "flushed"


def _core(
    block: int | None, bits: int | None, alignment: Rounding | None, result: Rounding | None, subnormals: str | None
) -> TensorCore | None:
    if block is None or bits is None or alignment not in _MODES or result not in _MODES or subnormals is None:
        return None
    return TensorCore(block, bits, _MODES[alignment], _MODES[result], subnormals == "kept")


def _verify(unit: _Unit, core: TensorCore, sums: int) -> tuple[int, int]:
    """Random sums of several kinds against the model: (compared, with other bits)."""
    kinds = ("unit", "positive", "wide", "cancelling", "subnormal", "accumulators")
    size = max(8, round((sums / len(kinds)) ** 0.5))
    generator = torch.Generator().manual_seed(1)
    compared = missed = 0
    for kind in kinds:
        a, b, c = _random(kind, unit, size, generator)
        got = unit.matmul(a, b, c)
        a, b, c = (x.to(unit.device) for x in (a, b, c))
        expected = tensor_core_matmul(a, b, c, core, operands=unit.operands).float()
        compared += got.numel()
        missed += int(((got != expected) & ~(got.isnan() & expected.isnan())).sum())
    return compared, missed


def _random(kind: str, unit: _Unit, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """a [size, K], b [K, size] in the unit's format, c [size, size] in fp32; held in float64."""
    length = 5 * 16
    spread = {"wide": 12, "subnormal": 8}.get(kind, 3)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        exponents = torch.randint(-spread, spread // 3 + 1, shape, generator=generator)
        return torch.ldexp(values.abs() if kind == "positive" else values, exponents).float().to(unit.dtype).double()

    a, b, c = draw(size, length), draw(length, size), torch.zeros(size, size, dtype=torch.float64)
    if kind == "subnormal":
        low = {"bf16": 2.0**-126, "fp16": 2.0**-16}[unit.operands]
        a = (a * low).float().to(unit.dtype).double()
    if kind == "cancelling":
        half = length // 2
        a[:, half:] = -a[:, :half]
        b[half:] = b[:half]
        b[half:] += (torch.rand(half, size, generator=generator) < 0.05) * b[half:]
    if kind == "accumulators":
        exponents = torch.randint(-30, 11, (size, size), generator=generator)
        c = torch.ldexp(torch.randn(size, size, generator=generator), exponents).double()
    return a, b, c
