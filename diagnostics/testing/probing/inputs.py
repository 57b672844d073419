"""What the probes feed a kernel: inputs whose answer is known, or that stress one step of it.

Every builder draws independent heads [B, H, T, D]; they are the clusters of the tests. Wherever O's bias is tested its
true values lie anywhere between two numbers of the output format, as often near the upper as near the lower one, so
that correct rounding has no bias of its own and a defect far below a spacing moves the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.reference import format_of, round_nearest_even, ulp
from attn_diag.testing.stated import Stated

# V = e_j is asked in so many calls at most; beyond, neighbouring keys share a feature.
_MAX_COLUMN_CALLS = 8
# Keys that see a maximum of their own in any tile of at least that many keys.
_NORMALISER_BLOCK, _TAIL_BLOCK = 16, 64


@dataclass(frozen=True)
class Draw:
    """What a builder needs to know."""

    batch: int
    heads: int
    length: int
    """T, of rows and keys."""
    head_dim: int
    dtype: torch.dtype
    """The kernel's."""
    stated: Stated
    """What the kernel is said to compute."""
    generator: torch.Generator
    """On the CPU, so that inputs do not depend on devices."""

    @property
    def scale(self) -> float:
        """alpha."""
        return self.stated.scale

    @cached_property
    def seen(self) -> Tensor:
        """Which keys each row sees, bool [T, T]: those from one to another."""
        hidden = self.stated.masking.hidden(torch.arange(self.length), slice(0, self.length))
        return torch.ones(self.length, self.length, dtype=torch.bool) if hidden is None else ~hidden

    @property
    def first(self) -> Tensor:
        """The first key that each row sees, [T]."""
        return self.seen.long().argmax(1)

    def normal(self, length: int | None = None) -> Tensor:
        """N(0,1), [B, H, T, D], fp32."""
        return torch.randn((self.batch, self.heads, length or self.length, self.head_dim), generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform on [0, 1), [B, H, *shape], fp32."""
        return torch.rand((self.batch, self.heads, *shape), generator=self.generator)

    def visible_key(self) -> Tensor:
        """For every row one of the keys that it sees, [B, H, T]."""
        count = self.seen.sum(1)
        return self.first + (self.uniform(self.length) * count).long().clamp(max=count - 1)


@dataclass(frozen=True)
class ProbeCase:
    """Inputs of a probe in the kernel's dtype, on the CPU."""

    q: Tensor
    """[B, H, T, D]."""
    k: Tensor
    """[B, H, T, D]."""
    values: tuple[Tensor, ...]
    """One or more V for the same q and k, [B, H, T, D] each."""
    predicted: Tensor | None = None
    """[2, T]: relative error of O's rows where l sums P_bar before its cast and P_bar V takes it after; with a cast to
    nearest, and with one that truncates."""


Builder = Callable[[Draw], ProbeCase]


def normal(draw: Draw) -> ProbeCase:
    """q, k, v from N(0,1)."""
    return _case(draw, draw.normal(), draw.normal(), draw.normal())


def ones(draw: Draw) -> ProbeCase:
    """V == 1: O is 1.

    Below 1 the spacing is half of that above: of unbiased noise in P beyond a quarter of a spacing, nearest-even
    keeps more of what is below, and the mean falls. A bias here alone is such a noise, or a normaliser's.
    """
    return _case(draw, draw.normal(), draw.normal(), torch.ones_like(draw.normal()))


def unit_vectors(draw: Draw) -> ProbeCase:
    """V = e_j: a column of O is a column of P. Key j shows in feature j // c of call j mod c, c = ceil(T / D)."""
    keys = torch.arange(draw.length)
    share = -(-draw.length // draw.head_dim)
    calls = min(share, _MAX_COLUMN_CALLS)
    q, k = draw.normal(), draw.normal()
    values = []
    for call in range(calls):
        one_hot = torch.nn.functional.one_hot(keys // share, draw.head_dim) * (keys % share % calls == call)[:, None]
        values.append(one_hot.float().expand_as(q))
    return _case(draw, q, k, *values)


def ramp(draw: Draw) -> ProbeCase:
    """V grows linearly with the key index, with a slope of its own in every feature."""
    slope = 1 + torch.arange(draw.head_dim) / draw.head_dim
    rise = torch.arange(1, draw.length + 1)[:, None] / draw.length * slope
    return _case(draw, draw.normal(), draw.normal(), rise.expand_as(draw.normal()))


def constant_rows(draw: Draw) -> ProbeCase:
    """All keys equal: P is uniform, every P_bar 1, O the mean of the visible V."""
    q = draw.normal()
    return _case(draw, q, draw.normal(1).expand_as(q), draw.normal())


def one_hot_rows(draw: Draw) -> ProbeCase:
    """Every row's own random key leads by tens: O is that key's V."""
    k = draw.normal()
    return _case(draw, _pick(k, draw.visible_key()) * _for_score(draw, 80.0), k, draw.normal())


def duplicate_keys(draw: Draw) -> ProbeCase:
    """Keys come in equal pairs anywhere in the row; the largest score is tied ("pair" inputs).

    The others' few per cent move O by many spacings off the mean of two V, which is a tie of its rounding.
    """
    k = draw.normal()
    order = torch.rand(draw.length, generator=draw.generator).argsort()
    half = draw.length // 2
    k[:, :, order[half : 2 * half]] = k[:, :, order[:half]]
    key = draw.visible_key()
    if not bool(draw.seen.all()):  # the pair's other key must be visible too
        keys, other = torch.arange(draw.length), torch.arange(draw.length)
        other[order[:half]], other[order[half : 2 * half]] = order[half : 2 * half].clone(), order[:half].clone()
        # Of pairs that the row sees whole, the one that ends last at or before the key; else its first key, untied.
        ends = torch.where(draw.seen & draw.seen[:, other] & (other < keys), keys, draw.first[:, None])
        key = ends.cummax(1).values.expand(*key.shape[:2], -1, -1).gather(3, key[..., None])[..., 0]
    return _case(draw, _pick(k, key) * _for_score(draw, math.log(draw.length) + 2.5), k, draw.normal())


def sinks(draw: Draw) -> ProbeCase:
    """The first key takes about nine tenths of every row."""
    q, k = draw.normal(), draw.normal()
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, :, 0] = 0.0
    k[:, :, 0, 0] = (math.log(draw.length) + 3) / (4 * draw.scale)
    return _case(draw, q, k, draw.normal())


def long_tails(draw: Draw) -> ProbeCase:
    """One key in 64 leads by 4 to 8 and has V = 0: O is what the many small P of the others carry."""
    q, k = draw.normal() / 2, draw.normal()
    top = torch.arange(draw.length) % _TAIL_BLOCK == 0
    k[..., 0] = 0.0
    k[:, :, top] = 0.0
    k[:, :, top, 0] = 1 / draw.scale
    q[..., 0] = 4 + 4 * draw.uniform(draw.length)
    v = (1 + draw.uniform(draw.length, draw.head_dim)) * (~top)[:, None]
    return _case(draw, q, k, v)


def outliers(draw: Draw) -> ProbeCase:
    """q, k, v from N(0,1) + N(0,100) Bernoulli(0.001) (FlashAttention-3, arXiv 2407.08608, section 4.3)."""

    def drawn() -> Tensor:
        rare = draw.uniform(draw.length, draw.head_dim) < 0.001
        return draw.normal() + 10 * draw.normal() * rare

    return _case(draw, drawn(), drawn(), drawn())


def large_logits(draw: Draw) -> ProbeCase:
    """q and k from N(0, 4.5^2): scores up to about 80, of which a few share a row's mass, as late in training.

    A coarse score is off by up to half a spacing of a number that large, and P by as much, relatively.
    """
    # Whatever alpha is, alpha q k has the standard deviation 4.5^2.
    size = 4.5 * (draw.scale * math.sqrt(draw.head_dim)) ** -0.5
    return _case(draw, size * draw.normal(), size * draw.normal(), draw.normal())


def normaliser_up(draw: Draw) -> ProbeCase:
    """Below the maximum every P_bar is one x that its cast makes larger; V near a constant."""
    return _normaliser(draw, 1)


def normaliser_down(draw: Draw) -> ProbeCase:
    """Below the maximum every P_bar is one x that its cast makes smaller; V near a constant."""
    return _normaliser(draw, -1)


def _normaliser(draw: Draw, sign: int) -> ProbeCase:
    """Weights that a cast moves all one way, times a V that shows a shift of less than half a spacing.

    With V = c, where c has the output's format, O = c hides every normaliser that is off by less than half a spacing.
    So a feature's V takes c or the number above c, with a probability of its own: O then lies anywhere between the
    two. m keys have the maximum and n the score -g below it: l in fp32 and P_bar cast to q's format give
    O (n cast(x) + m) / (n x + m), x = exp(-g). The first key of every 16 is among the m, so that every tile
    knows the maximum from its first keys on, whatever the order of tiles; others join at random, by row. Truncated, x
    becomes its cast where that is smaller, else the number below it (x lies in (0.5, 1), where the spacing is half).
    """
    a, b, x, cast = cast_gap(draw.dtype, draw.scale, sign)
    feature = torch.arange(draw.length) % draw.head_dim
    q = a * torch.nn.functional.one_hot(feature, draw.head_dim)
    first = torch.arange(draw.length)[:, None] % _NORMALISER_BLOCK == 0
    top = first | (torch.rand(draw.length, draw.head_dim, generator=draw.generator) < 1 / 32)
    k = b * top
    base = 1 + (draw.uniform(1, draw.head_dim) * 2**7).floor() / 2**7
    spacing = float(ulp(torch.ones(1, dtype=torch.float64), format_of(draw.dtype)))
    upper = draw.uniform(draw.length, draw.head_dim) < draw.uniform(1, draw.head_dim)
    count = draw.seen.sum(1).double()
    m = (top.T[feature] & draw.seen).sum(1).double()
    below = cast if cast < x else cast - spacing / 2
    weights = torch.tensor([cast, below], dtype=torch.float64)[:, None]
    predicted = ((count - m) * weights + m) / ((count - m) * x + m) - 1
    shape = draw.normal()
    return _case(draw, q.expand_as(shape), k.expand_as(shape), base + spacing * upper, predicted=predicted)


@cache
def cast_gap(dtype: torch.dtype, scale: float, sign: int) -> tuple[float, float, float, float]:
    """(a, b, x, cast x): a b scale = g, x = exp(-g) in (0.5, 1), whose cast to ``dtype`` errs far to ``sign``'s side.

    a and b are BF16 and FP16 numbers, so that the score is exact. Of the x at 0.6 to 0.8 of the way from a number of
    the format to the midpoint (a kernel's exp must not carry it past), the one with the largest relative error.
    """
    mantissa = 1 + torch.arange(128, dtype=torch.float64) / 128
    base = mantissa[:, None] * mantissa
    exponents = 2.0 ** torch.arange(-6 - math.ceil(math.log2(scale)), 2 - math.floor(math.log2(scale))).double()
    products = base * exponents[:, None, None]
    x = (-scale * products).exp()
    fmt = format_of(dtype)
    cast = round_nearest_even(x.flatten(), fmt).view_as(x)
    error = sign * (cast - x)
    way = error / (ulp(x.flatten(), fmt).view_as(x) / 2)
    suitable = (way > 0.6) & (way < 0.8) & (x > 0.5) & (x < 0.97)
    best = int(torch.where(suitable, error / x, -1.0).argmax())
    e, i, j = (int(n) for n in torch.unravel_index(torch.tensor(best), x.shape))
    return float(mantissa[i]), float(mantissa[j] * exponents[e]), float(x[e, i, j]), float(cast[e, i, j])


def _pick(k: Tensor, key: Tensor) -> Tensor:
    """k's rows ``key`` [B, H, T], [B, H, T, D]."""
    return k.gather(2, key[..., None].expand(*key.shape, k.shape[-1]))


def _for_score(draw: Draw, score: float) -> float:
    """What multiplies a key of N(0,1) to make a query whose score with it is about ``score``."""
    return score / (draw.scale * draw.head_dim)


def cast_inputs(draw: Draw, *tensors: Tensor) -> tuple[Tensor, ...]:
    """In the kernel's dtype. Raises InputError where that overflows: the scale asks for larger q or k than it has."""
    cast = tuple(x.to(draw.dtype).contiguous() for x in tensors)
    if not all(bool(x.isfinite().all()) for x in cast):
        fmt = format_of(draw.dtype)
        largest = max(float(x.abs().max()) for x in tensors)
        raise InputError(
            f"its scores need q, k and v within {fmt.largest:g}, the largest {str(draw.dtype).removeprefix('torch.')}, "
            f"got {largest:.3g} with scale {draw.scale:g}; pass a larger scale, another dtype, or leave this probe out"
        )
    return cast


def _case(draw: Draw, q: Tensor, k: Tensor, *values: Tensor, predicted: Tensor | None = None) -> ProbeCase:
    q, k, *values_cast = cast_inputs(draw, q, k, *values)
    return ProbeCase(q, k, tuple(values_cast), predicted)
