"""The oracle against mpmath's plain arithmetic, exact results at midpoints, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
from builders import visible_pairs
from mpmath import mp, mpf
from torch import Tensor

from attn_diag.reference import AttentionHead, FloatFormat, Masking, round_nearest_even
from attn_diag.reference.exact import Enclosure, IntegerMatrix, round_dyadic, scaled
from attn_diag.reference.oracle import HeadOracle, OracleLimitError, OracleRow
from attn_diag.reference.rational import RowRationals
from attn_diag.reference.rounding import BF16, E4M3, E5M2, FP16, FP32, FP64

T, D = 24, 6


def additive() -> Tensor:
    mask = torch.randn(T, T, generator=torch.Generator().manual_seed(3))
    mask[:, ::5] = -torch.inf
    mask[7] = -torch.inf
    return mask


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "odd-scale": {"scale": 0.3},
    "float32-inputs": {"dtype": torch.float32},
    "float64-inputs": {"dtype": torch.float64},
    "window": {"masking": Masking("bottom-right", window=(5, 2))},
    "bool-mask": {"masking": Masking(mask=additive() > -0.5)},
    "additive-mask": {"masking": Masking(mask=additive())},
    "positions": {"masking": Masking("top-left", positions=torch.arange(T).flip(0))},
    "softcap": {"softcap": 1.5},
    "softcap-and-mask": {"softcap": 1.5, "masking": Masking(mask=additive())},
    "large-logits": {"factor": 100.0},
}


def make_head(
    dtype: torch.dtype = torch.bfloat16, scale: float = 0.25, factor: float = 1.0, seed: int = 0, **options: Any
) -> AttentionHead:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype).double() for _ in range(4))
    return AttentionHead(q * factor, k, v, do, scale, options.pop("masking", Masking("top-left")), **options)


def plain(head: AttentionHead, t: int, mutant: str = "") -> dict[str, Any]:
    """Attention of one row as the formulas have it, in mpmath with 400 digits of slack."""
    with mp.workprec(1500):
        q, k, v, do = ([[mpf(x) for x in row] for row in m.tolist()] for m in (head.q, head.k, head.v, head.do))  # type: ignore[union-attr]
        keys = visible_pairs(head.masking, T, len(head.k))[t].nonzero()[:, 0].tolist()
        alpha, cap = mpf(head.scale), head.softcap
        mask = head.masking.mask
        additive = mask is not None and mask.dtype != torch.bool
        s, slope = [], []
        for j in keys:
            x = alpha * sum(a * b for a, b in zip(q[t], k[j], strict=True))
            extra = mpf(float(mask[t, j])) if additive and mask is not None else mpf(0)
            if mutant == "mask-before-softcap":
                x, extra = x + extra, mpf(0)
            tanh = mp.tanh(x / mpf(cap)) if cap else mpf(0)
            slope.append(1 - tanh**2)
            s.append((mpf(cap) * tanh if cap else x) + extra)
        if not keys:
            return {"out": [0.0] * D, "lse": -math.inf, "delta": 0.0, "dq": [0.0] * D}
        m = max(s)
        weights = [mp.exp(x - m) for x in s]
        total = sum(weights)
        p = [w / total for w in weights]
        out = [sum(p[i] * v[j][d] for i, j in enumerate(keys)) for d in range(D)]
        dp = [sum(a * b for a, b in zip(do[t], v[j], strict=True)) for j in keys]
        delta = sum(a * b for a, b in zip(do[t], out, strict=True))
        sign = -1 if mutant == "sign-of-ds" else 1
        ds = [sign * p[i] * (dp[i] - delta) * slope[i] for i in range(len(keys))]
        factor = mpf(1) if mutant == "no-alpha" else alpha
        dq = [factor * sum(ds[i] * k[j][d] for i, j in enumerate(keys)) for d in range(D)]
        lse = m + mp.log(total) + (mpf(2) ** -60 if mutant == "lse-off-by-2**-60" else 0)
        return {"scores": s, "row_max": m, "row_sum": total, "probs": p, "dprobs": dp, "dscores": ds} | {
            "out": out, "lse": lse, "delta": delta, "dq": dq,
        }  # fmt: skip


def compare(head: AttentionHead, mutant: str = "") -> None:
    oracle = HeadOracle(head)
    for t in range(0, T, 3):
        row, expected = oracle.row(t), plain(head, t, mutant)
        for name, want in expected.items():
            got = getattr(row, name)()
            # mpmath rounds to the nearest float64, once.
            values = [float(x) for x in want] if isinstance(want, list) else float(want)
            if name in ("dq", "dscores") and isinstance(values, list):
                # Exact zeros (one key) come out of 1500 bits as 1e-450.
                values = [0.0 if abs(x) < 1e-300 else x for x in values]
            assert got == values, f"row {t}: {name}"


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_every_quantity_is_the_correctly_rounded_one(options: dict[str, Any]) -> None:
    compare(make_head(**options))


@pytest.mark.parametrize(
    ("case", "mutant"),
    [
        ("causal", "sign-of-ds"),
        ("causal", "no-alpha"),
        ("softcap-and-mask", "mask-before-softcap"),
        ("causal", "lse-off-by-2**-60"),
    ],
)
def test_that_comparison_rejects(case: str, mutant: str) -> None:
    if mutant == "lse-off-by-2**-60":
        # Too small for float64: only the enclosure tells.
        row, expected = HeadOracle(make_head()).row(20), plain(make_head(), 20, mutant)["lse"]
        ends = row.lse_ends(128)[0]
        with mp.workprec(1500):
            assert not mpf(ends.low) <= expected * mpf(2) ** -ends.exponent <= mpf(ends.high)
        return
    with pytest.raises(AssertionError, match="row"):
        compare(make_head(**CASES[case]), mutant)


def contains(outer: Enclosure, inner: Enclosure) -> bool:
    e = min(outer.exponent, inner.exponent)
    low, high = (x << (outer.exponent - e) for x in (outer.low, outer.high))
    return low <= inner.low << (inner.exponent - e) and inner.high << (inner.exponent - e) <= high


@pytest.mark.parametrize("options", [CASES["causal"], CASES["softcap-and-mask"], CASES["large-logits"]])
def test_enclosures_hold_what_more_bits_find(options: dict[str, Any]) -> None:
    oracle = HeadOracle(make_head(**options))
    rows = [oracle.row(t) for t in (1, 12, 23)]
    for row in rows:
        for name in ("out", "lse", "delta", "dq"):
            coarse, fine = row.ends(name, 64), row.ends(name, 600)
            assert all(contains(a, b) for a, b in zip(coarse, fine, strict=True)), name
    # Without the margins they would not.
    row = rows[-1]
    row._evaluations[64] = replace(row._at(64), slack=0)
    row._ends.clear()
    assert not all(contains(a, b) for a, b in zip(row.out_ends(64), row.out_ends(600), strict=True))


def midpoint_rows() -> dict[str, tuple[OracleRow, str, list[float]]]:
    """Rows whose true value is a rational midpoint of BF16 (1 + 2**-8, even neighbour 1), or rational otherwise."""
    tie = 1 + 2.0**-8
    zeros = torch.zeros(4, 2, dtype=torch.float64)
    v = torch.tensor([[tie, 1.0], [tie, 1.0], [tie, 1 + 2.0**-7], [tie, 1 + 2.0**-7]], dtype=torch.float64)
    k = torch.tensor([[1.0, 2.0], [-1.0, 3.0], [1.0, 2.0], [-1.0, 3.0]], dtype=torch.float64)
    ones, free = torch.ones_like(zeros), Masking()
    plain = AttentionHead(ones, k, v, ones, 0.5, free)
    capped = replace(plain, softcap=2.0)
    equal = AttentionHead(zeros, k, v, ones, 0.5, free)
    # dO.V = 2 tie everywhere in the first feature alone.
    one_sided = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
    return {
        "O, constant V": (HeadOracle(plain, max_bits=128).row(0), "out", [1.0, 1.0]),
        "O, constant V, softcap": (HeadOracle(capped, max_bits=128).row(0), "out", [1.0, 1.0]),
        "O, equal scores": (HeadOracle(equal, max_bits=128).row(0), "out", [1.0, 1.0]),
        "delta": (HeadOracle(replace(plain, do=one_sided), max_bits=128).row(0), "delta", [1.0]),
        "dQ, equal dP": (HeadOracle(replace(plain, do=one_sided), max_bits=128).row(0), "dq", [0.0, 0.0]),
        "dQ, equal dP, softcap": (HeadOracle(replace(capped, do=one_sided), max_bits=128).row(0), "dq", [0.0, 0.0]),
        "dQ, constant K": (HeadOracle(replace(plain, k=ones), max_bits=128).row(0), "dq", [0.0, 0.0]),
    }


@pytest.mark.parametrize("name", midpoint_rows())
def test_rational_values_at_midpoints_end_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, output, expected = midpoint_rows()[name]
    got = getattr(row, output)(BF16)
    assert (got if isinstance(got, list) else [got]) == expected
    # Unrecognised they would not end.
    again = midpoint_rows()[name][0]
    for method in ("out", "delta", "dq"):
        monkeypatch.setattr(RowRationals, method, lambda *_: None)
    with pytest.raises(OracleLimitError, match="too close to a midpoint of bf16"):
        getattr(again, output)(BF16)


def test_rational_gradient_of_tied_keys_by_hand() -> None:
    """All S equal: dQ = alpha cov(dP, K) over the keys, here a midpoint of BF16."""
    v = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    k = torch.tensor([[1 + 2.0**-8], [-1 - 2.0**-8]], dtype=torch.float64)
    head = AttentionHead(torch.zeros(1, 1, dtype=torch.float64), k, v, torch.ones(1, 1, dtype=torch.float64), 1.0)
    row = HeadOracle(head, max_bits=128).row(0)
    assert row.dq(BF16) == [1.0]
    assert row.dq() == [1 + 2.0**-8]
    assert row.exact("dq", 0) == 1 + Fraction(1, 256)
    assert row.lse() == math.log(2)
    assert row.probs(BF16) == [0.5, 0.5]


def test_one_key_is_exact_and_two_are_not() -> None:
    oracle = HeadOracle(make_head())
    assert oracle.row(0).out() == make_head().v[0].tolist()
    assert oracle.row(0).dq() == [0.0] * D
    assert oracle.row(0).exact("lse", 0) is not None
    assert oracle.row(1).exact("lse", 0) is None
    assert oracle.row(1).exact("out", 0) is None
    assert oracle.row(1).exact("dq", 0) is None


def test_row_without_keys() -> None:
    row = HeadOracle(make_head(masking=Masking(mask=additive()))).row(7)
    assert (row.out(), row.lse(), row.delta(), row.dq()) == ([0.0] * D, -math.inf, 0.0, [0.0] * D)
    assert (row.row_sum(), row.row_max(), row.scores(), row.dscores()) == (0.0, -math.inf, [], [])


def test_what_the_oracle_refuses() -> None:
    head = make_head()
    with pytest.raises(ValueError, match="between 64 and 32768 bits, got 63"):
        HeadOracle(head, bits=63)
    for t in (-1, T):
        with pytest.raises(IndexError, match=f"between 0 and {T - 1}, got {t}"):
            HeadOracle(head).row(t)
    with pytest.raises(ValueError, match="finite"):
        HeadOracle(replace(head, k=head.k * math.nan))
    with pytest.raises(ValueError, match="no dO"):
        HeadOracle(replace(head, do=None)).row(3).dq()


DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64)


def exact_dot(x: Tensor, y: Tensor) -> Fraction:
    total, exponent = IntegerMatrix.of(x[None]).times(IntegerMatrix.of(y[None]))
    return scaled(total[0], exponent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_dot_products(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    exact = torch.float32 if dtype.itemsize == 1 else torch.float64  # FP8 has no direct conversion to float64
    x, y = (
        (torch.randn(200, generator=generator, dtype=torch.float64) * 8).to(dtype).to(exact).double() for _ in range(2)
    )
    assert exact_dot(x, y) == sum(Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist(), strict=True))


def test_exact_dot_where_float64_cancels() -> None:
    x = torch.tensor([2.0**600, 1.0, -(2.0**600)], dtype=torch.float64)
    y = torch.tensor([2.0**400, 2.0**-1074, 2.0**400], dtype=torch.float64)
    assert exact_dot(x, y) == Fraction(1, 2**1074)
    # What a sum that rounds says, term by term (a BLAS may add in another order, and sum() compensates from 3.12 on).
    assert reduce(add, (a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))) == 0.0


@pytest.mark.parametrize("bits", [5, 40, 300])
def test_weighted_sums_by_limbs(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    matrix = IntegerMatrix.of(torch.randn(50, 3, generator=generator).bfloat16().double())
    weights = [((-1) ** i) * (3**i % 2**bits) for i in range(50)]
    expected = [sum(w * int(m) for w, m in zip(weights, matrix.array[:, d], strict=True)) for d in range(3)]
    assert matrix.combine(weights) == expected


FORMATS = (BF16, FP16, FP32, E4M3, E5M2)


def adversarial(fmt: FloatFormat) -> Tensor:
    """Random numbers of all sizes, midpoints of the format, their neighbours, and the ends of its range."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(2000, generator=generator, dtype=torch.float64)
    random *= 2.0 ** torch.randint(fmt.min_exponent - fmt.precision - 3, 20, (2000,), generator=generator).double()
    grid = round_nearest_even(random, fmt)
    spacing = 2.0 ** (torch.frexp(grid)[1].double() - 1).clamp(min=fmt.min_exponent) * 2.0**-fmt.precision
    ties = grid + spacing / 2
    ends = torch.tensor(
        [0.0, fmt.largest, fmt.largest * (1 + 2.0**-20), fmt.smallest_normal, 1e300], dtype=torch.float64
    )
    everything = torch.cat([random, ties, ties.nextafter(ties + 1), ties.nextafter(ties - 1), ends])
    everything = everything[everything.isfinite()]  # infinity is no integer times a power of two
    return torch.cat([everything, -everything])


def _dyadic(value: float) -> tuple[int, int]:
    n, d = value.as_integer_ratio()
    return n, 1 - d.bit_length()


def mismatches(fmt: FloatFormat, rounding: Callable[[int, int, FloatFormat], float]) -> int:
    values = adversarial(fmt)
    expected = round_nearest_even(values, fmt).tolist()
    return sum(rounding(*_dyadic(x), fmt) != y for x, y in zip(values.tolist(), expected, strict=True))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_integers_round_as_floats_do(fmt: FloatFormat) -> None:
    assert mismatches(fmt, round_dyadic) == 0
    assert mismatches(fmt, lambda m, e, f: math.nextafter(round_dyadic(m, e, f), math.inf)) > 0


def test_rounding_to_float64_is_pythons() -> None:
    for i in range(500):
        x = Fraction(3**i, 7 ** (i // 2) * 2**i)
        assert round_dyadic(x.numerator << 400, -400, FP64) == float(x.numerator)
        enclosure = Enclosure(x.numerator, x.numerator, -i)
        assert enclosure.rounded(FP64) == float(Fraction(x.numerator, 2**i))
    assert round_dyadic((1 << 54) + 2, -1128, FP64) == math.ldexp(1, -1074)
    assert round_dyadic(1, 1024, FP64) == math.inf
