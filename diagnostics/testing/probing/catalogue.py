"""The probes by name, in the order of the report; among them those of two calls whose results must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.testing.names import choose_names
from attn_diag.testing.probing import inputs
from attn_diag.testing.probing.inputs import Draw, cast_inputs
from attn_diag.testing.stated import sees_ahead

# Keys and rows appended by ``length``: a whole tile of every kernel we know.
_APPENDED = 128
# The score of a key that must not count: exp(-300) is 0 in fp32.
_HIDDEN_SCORE = -300.0
_POWER = 16.0

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Pair:
    """Two calls that must agree."""

    first: Inputs
    """q, k, v of one call."""
    second: Inputs
    """q, k, v of the other."""
    align: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Of the two O, in float64, what must be equal."""


PairBuilder = Callable[[Draw], Pair]


def repeat(draw: Draw) -> Pair:
    """The same call twice."""
    inputs = cast_inputs(draw, draw.normal(), draw.normal(), draw.normal())
    return Pair(inputs, inputs, lambda first, second: (first, second))


def batch(draw: Draw) -> Pair:
    """One head of one sequence alone, and among others."""
    parts = cast_inputs(draw, *(torch.cat([draw.normal(), draw.normal()]) for _ in range(3)))
    alone = tuple(x[:1, :1].contiguous() for x in parts)
    return Pair(parts, alone, lambda first, second: (first[:1, :1], second))


def length(draw: Draw) -> Pair:
    """128 more rows and keys, which no old row sees: causally later, or with scores of -300."""
    total = draw.length + _APPENDED
    q, k, v = (draw.normal(total) for _ in range(3))
    if sees_ahead(draw.stated):
        q[..., 0], k[..., 0] = 4.0, 0.0
        k[:, :, draw.length :] = 0.0
        k[:, :, draw.length :, 0] = _HIDDEN_SCORE / (4 * draw.scale)
    longer = cast_inputs(draw, q, k, v)
    shorter = tuple(x[:, :, : draw.length].contiguous() for x in longer)
    return Pair(shorter, longer, lambda first, second: (first, second[:, :, : draw.length]))


def sign(draw: Draw) -> Pair:
    """-V gives -O."""
    q, k, v = cast_inputs(draw, draw.normal(), draw.normal(), draw.normal())
    return Pair((q, k, v), (q, k, -v), lambda first, second: (first, -second))


def power_of_two(draw: Draw) -> Pair:
    """16 V gives 16 O. V lies between 1/2 and 3/2, so that O is not subnormal and does not overflow."""
    q, k, v = cast_inputs(draw, draw.normal(), draw.normal(), 0.5 + draw.uniform(draw.length, draw.head_dim))
    return Pair((q, k, v), (q, k, v * _POWER), lambda first, second: (first * _POWER, second))


@dataclass(frozen=True)
class Probe:
    """One probe: a comparison with the reference, or of two calls."""

    name: str
    shows: str
    """What it shows, in the report's words."""
    build: inputs.Builder | None = None
    """Makes the inputs of a comparison with the reference."""
    pair: PairBuilder | None = None
    """Makes those of two calls that must agree."""


PROBES = {
    probe.name: probe
    for probe in (
        Probe("normal", "N(0,1): ordinary rows", inputs.normal),
        Probe("ones", "V = 1: O is 1", inputs.ones),
        Probe("unit-vectors", "V = e_j: O is P, its rows sum to 1", inputs.unit_vectors),
        Probe("ramp", "V linear in the key index: are keys weighted by where they stand", inputs.ramp),
        Probe("constant-rows", "equal scores: O is the mean of V", inputs.constant_rows),
        Probe("one-hot", "one key leads by tens: O is its V", inputs.one_hot_rows),
        Probe("duplicates", "two keys tie for the maximum", inputs.duplicate_keys),
        Probe("sinks", "the first key takes nine tenths", inputs.sinks),
        Probe("tails", "many small P beside large ones with V = 0: their mass is O", inputs.long_tails),
        Probe("outliers", "N(0,1) + N(0,100) in one of 1000 elements of q, k, v", inputs.outliers),
        Probe("normaliser-down", "every cast of P̄ rounds down: does l match what multiplies V", inputs.normaliser_down),
        Probe("normaliser-up", "every cast of P̄ rounds up: likewise", inputs.normaliser_up),
        Probe("repeat", "the same call twice", pair=repeat),
        Probe("batch", "a head alone and among others", pair=batch),
        Probe("length", "128 more rows and keys that no old row sees", pair=length),
        Probe("sign", "-V gives -O", pair=sign),
        Probe("power-of-two", "16 V gives 16 O", pair=power_of_two),
    )
}


def choose(names: Iterable[str] | None) -> list[Probe]:
    """These probes in the catalogue's order; all for None. InputError for unknown names, for a str, and for none."""
    chosen = choose_names("probe", names, PROBES)
    if not chosen:
        raise InputError(f"probes must name at least one; known: {', '.join(PROBES)}")
    return [PROBES[name] for name in chosen]
