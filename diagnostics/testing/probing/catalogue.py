"""The probes by name, in the order of the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attn_diag.errors import InputError
from attn_diag.testing.probing import inputs, invariance


@dataclass(frozen=True)
class Probe:
    """``build`` makes the inputs of a comparison with the reference, ``pair`` those of two calls that must agree."""

    name: str
    shows: str
    build: inputs.Builder | None = None
    pair: invariance.PairBuilder | None = None


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
        Probe("repeat", "the same call twice", pair=invariance.repeat),
        Probe("batch", "a head alone and among others", pair=invariance.batch),
        Probe("length", "128 more rows and keys that no old row sees", pair=invariance.length),
        Probe("sign", "-V gives -O", pair=invariance.sign),
        Probe("power-of-two", "16 V gives 16 O", pair=invariance.power_of_two),
    )
}


def choose(names: Iterable[str] | None) -> list[Probe]:
    """These probes in the catalogue's order; all for None. InputError for unknown names, for a str, and for none."""
    if names is None:
        return list(PROBES.values())
    if isinstance(names, str):
        raise InputError(f"probes must be a list of names, got the string {names!r}; pass [{names!r}]")
    names = list(names)
    if unknown := [name for name in names if name not in PROBES]:
        raise InputError(f"no probe {', '.join(map(repr, unknown))}; known: {', '.join(PROBES)}")
    if not names:
        raise InputError(f"probes must name at least one; known: {', '.join(PROBES)}")
    return [probe for name, probe in PROBES.items() if name in names]
