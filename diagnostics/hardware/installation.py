"""Checks of this installation's numbers on this machine against independent ones, in a few seconds on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from attn_diag.diagnosis import Number, Tool
from attn_diag.kernels import formats
from attn_diag.kernels.accumulation import tensor_core_matmul
from attn_diag.provenance import describe_tool
from attn_diag.reference import AttentionHead, FloatFormat, Masking, format_of, reference_head, round_nearest_even
from attn_diag.result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_UNIT = 2.0**-53  # of float64
_DIGITS = 50


@dataclass(frozen=True)
class Check:
    """``figure``, in ``unit``, of ``cases`` cases; it passes where that is at most ``limit``."""

    name: str
    figure: Number
    unit: str
    limit: Number
    cases: int

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.figure <= self.limit


@dataclass(frozen=True, repr=False)
class Installation(Result):
    """What ``selftest`` found: every check with its figure and limit. ``seconds``: how long it took."""

    tool: Tool
    checks: tuple[Check, ...]
    passed: bool
    seconds: Number
    schema: Literal["attn-diag-selftest"] = "attn-diag-selftest"
    schema_version: Literal[1] = 1

    def renderables(self) -> Iterator[RenderableType]:
        """The report, piece by piece, for a rich console."""
        from attn_diag.reports.selftest import installation_renderables

        yield from installation_renderables(self)


def check_installation() -> Installation:
    """Run all checks; never raises for a check that fails."""
    started = time.monotonic()
    checks = tuple(check for group in GROUPS for check in group())
    return Installation(
        tool=describe_tool(torch.device("cpu")),
        checks=checks,
        passed=all(check.passed for check in checks),
        seconds=time.monotonic() - started,
    )


def rounding_checks(
    reference: Callable[[Tensor, FloatFormat], Tensor] = round_nearest_even,
    site: Callable[[Tensor, formats.Rounding | None], Tensor] = formats.round_to,
) -> Iterator[Check]:
    """Both rounding functions, and torch's own cast from fp32, against tables of all numbers of each format."""
    for name, dtype in _FORMATS.items():
        table, even = _all_numbers(name)
        x, expected = _between(table, even, format_of(dtype))
        wrong = _different(reference(x, format_of(dtype)), expected) + _different(
            site(x, formats.parse(name)), expected
        )
        yield Check(f"float64 to {name}, nearest-even", wrong, "wrong", 0, 2 * len(x))
        single = x.float()
        exact = (single.double() == x) & expected.isfinite() & (expected.abs() < format_of(dtype).largest)
        wrong = _different(single.to(dtype).double()[exact], expected[exact])
        yield Check(f"torch's cast of fp32 to {name}", wrong, "wrong", 0, int(exact.sum()))


def function_checks(
    exp: Callable[[Tensor], Tensor] = torch.exp, log: Callable[[Tensor], Tensor] = torch.log
) -> Iterator[Check]:
    """float64's exp and log against mpmath, on arguments that attention meets.

    Limit: 2 ulp. The references' bounds count on no more.
    """
    import mpmath

    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(600, generator=generator, dtype=torch.float64)
    arguments = {
        "exp": (exp, mpmath.exp, torch.cat([-700 * uniform, -uniform, -(2.0 ** (-60 * uniform))])),
        "log": (log, mpmath.log, torch.cat([1 + uniform * 1e5, 1 + 2.0 ** (-50 * uniform), uniform + 1e-300])),
    }
    with mpmath.workdps(_DIGITS):
        for name, (function, truth, x) in arguments.items():
            worst = 0.0
            for value, got in zip(x.tolist(), function(x).tolist(), strict=True):
                true = truth(mpmath.mpf(value))
                error = abs(mpmath.mpf(got) - true) / math.ulp(float(true))
                worst = max(worst, float(error)) if error == error else math.nan
            yield Check(f"float64 {name}, largest error", worst, "ulp", 2.0, len(x))


def attention_checks(reference: Callable[[AttentionHead], object] = reference_head) -> Iterator[Check]:
    """The float64 reference of a small causal head against mpmath; errors in units of an a-priori bound.

    Bound of S: (D + 2) u sum |alpha q k|; a relative error e of every exp(S - m) moves O by at most 2 e max |V|, and L
    by e; sums over T keys add T u (Higham, Accuracy and Stability, section 3.1).
    """
    generator = torch.Generator().manual_seed(0)
    length, dim = 12, 8
    q, k, v, do = (torch.randn(length, dim, generator=generator).bfloat16().double() for _ in range(4))
    q *= 4
    scale = dim**-0.5
    o, lse, dq = _exact_attention(q, k, v, do, scale)
    found = reference(AttentionHead(q, k, v, do, scale, Masking("top-left")))
    scores = scale * q.abs() @ k.abs().T
    relative = (2 * (dim + 2) * float(scores.max()) + length + 8) * _UNIT
    slope = float((do.abs() @ v.abs().T).max())
    bounds = {
        "out": 2 * relative * float(v.abs().max()),
        "lse": relative * (1 + float(lse.abs().max())),
        "dq": 8 * relative * scale * slope * float(k.abs().max()),
    }
    for name, truth in (("out", o), ("lse", lse), ("dq", dq)):
        error = float((getattr(found, name) - truth).abs().max())
        yield Check(f"reference {name} of a causal head", error / bounds[name], "of its bound", 1.0, truth.numel())


def sum_checks(
    matmul: Callable[[Tensor, Tensor], Tensor] = tensor_core_matmul,
    exact: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Iterator[Check]:
    """Sums whose results are known: a Hopper tensor core's, and float64 ones of BF16 products, exact here."""
    known = [
        ([1.0, 2.0**-24], 1.0),
        ([1.0, -(2.0**-25)], 1 - 2.0**-24),
        ([1.0, -(2.0**-26)], 1.0),
        ([1.0] + [2.0**-25] * 4, 1 + 2.0**-23),
        ([1.0, -1.0, 2.0**-26], 0.0),
    ]
    wrong = sum(
        float(matmul(torch.tensor([terms], dtype=torch.float64), torch.ones(len(terms), 1).double())) != value
        for terms, value in known
    )
    yield Check("tensor-core sums that an H200 returned", wrong, "wrong", 0, len(known))
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(40, 64, generator=generator).bfloat16().double() for _ in range(2))
    a, b = (torch.where(x.abs() < 2.0**-8, 0.0, x) for x in (a, b))  # so that no sum needs more than 53 bits
    got = exact(a, b.T).tolist()
    wrong = sum(
        Fraction(value) != sum((Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True)), Fraction(0))
        for row, results in zip(a.tolist(), got, strict=True)
        for column, value in zip(b.tolist(), results, strict=True)
    )
    yield Check("float64 products of BF16 matrices", wrong, "wrong", 0, 1600)


GROUPS: tuple[Callable[[], Iterator[Check]], ...] = (rounding_checks, function_checks, attention_checks, sum_checks)


def _different(found: Tensor, expected: Tensor) -> int:
    """Zeros of the other sign count."""
    return int(((found != expected) | (found.signbit() != expected.signbit())).sum())


def _all_numbers(name: str) -> tuple[Tensor, Tensor]:
    """Every finite number >= 0 of a format in order, and whether its last bit is 0; counted up, not computed."""
    exponent_bits, mantissa_bits = {"bf16": (8, 7), "fp16": (5, 10), "e4m3": (4, 3), "e5m2": (5, 2)}[name]
    patterns = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = patterns >> mantissa_bits, patterns & (2**mantissa_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    significand = np.where(exponent == 0, mantissa, mantissa + 2**mantissa_bits).astype(np.float64)
    values = np.ldexp(significand, np.maximum(exponent, 1) - bias - mantissa_bits)
    finite = patterns < len(patterns) - 1 if name == "e4m3" else exponent < 2**exponent_bits - 1
    return torch.from_numpy(values[finite]), torch.from_numpy((patterns % 2 == 0)[finite])


def _between(table: Tensor, even: Tensor, fmt: FloatFormat) -> tuple[Tensor, Tensor]:
    """Numbers, ties and what lies next to ties, of either sign, with the nearest number of the table (or overflow)."""
    low, high = table[:-1], table[1:]
    ties = (low + high) / 2
    below, above = (torch.nextafter(ties, ties.new_tensor(to)) for to in (0.0, torch.inf))
    # Above the last number by half a spacing: the tie goes to infinity, or to the largest where there is none.
    edge = 1.5 * table[-1] - 0.5 * table[-2]
    limit = table[-1] if fmt.saturates else edge.new_tensor(torch.inf)
    x = torch.cat([table, ties, below, above, torch.stack([edge, torch.nextafter(edge, edge * 0)])])
    expected = torch.cat([table, torch.where(even[:-1], low, high), low, high, torch.stack([limit, table[-1]])])
    return torch.cat([x, -x]), torch.cat([expected, -expected])


def _exact_attention(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """O, L and dQ of a causal head by mpmath, rounded to float64 at the end."""
    import mpmath

    rows = []
    with mpmath.workdps(_DIGITS):
        alpha = mpmath.mpf(scale)
        for t in range(len(q)):
            keys = range(t + 1)
            scores = [alpha * mpmath.fdot(q[t].tolist(), k[i].tolist()) for i in keys]
            weights = [mpmath.exp(s) for s in scores]
            total = mpmath.fsum(weights)
            probs = [w / total for w in weights]
            out = [mpmath.fdot(probs, [float(v[i, d]) for i in keys]) for d in range(v.shape[1])]
            dprobs = [mpmath.fdot(do[t].tolist(), v[i].tolist()) for i in keys]
            delta = mpmath.fdot(probs, dprobs)
            dscores = [p * (dp - delta) for p, dp in zip(probs, dprobs, strict=True)]
            dq = [alpha * mpmath.fdot(dscores, [float(k[i, d]) for i in keys]) for d in range(q.shape[1])]
            rows.append(([float(x) for x in out], float(mpmath.log(total)), [float(x) for x in dq]))
    o, lse, grads = zip(*rows, strict=True)
    return tuple(torch.tensor(x, dtype=torch.float64) for x in (o, lse, grads))  # type: ignore[return-value]
