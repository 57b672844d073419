"""The smallest case that fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from attn_diag.results.hunt import Fault, Variant
from attn_diag.testing.hunting.layouts import restricted
from attn_diag.testing.hunting.run import Runner, same

_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 256, 257, 384)
_HEAD_SIZES = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 104, 112, 128, 136, 160, 192)
# Tries that a crash or a hang is worth; each costs a process or the limit.
_TRIES: dict[Fault, int] = {"crashed": 8, "timed-out": 6}
_MOST_TRIES = 120


def shrink(runner: Runner, variant: Variant, output: str, fault: Fault) -> Variant:
    """A case as small and plain as any that was tried, in which the output is wrong in the same way.

    Every kind of step is tried until none helps: fewer batch items and heads, plainer memory, values and mask, shorter,
    fewer features. Of sizes the smallest that fails is taken, as what fails at 65 rows may not fail at 32. A mask of
    the kernel's own stays: without it every case would fail, whatever the kernel does.
    """
    left = _TRIES.get(fault, _MOST_TRIES)
    changed = True
    while changed:
        changed = False
        for steps in (_counts, partial(_plainer, fixed=runner.judge.fixed), _shorter, _narrower):
            for smaller in steps(variant):
                if left <= 0 or runner.too_late:
                    return variant
                left -= smaller not in runner.known
                if same(runner.verdict(smaller), output, fault):
                    variant, changed = smaller, True
                    break
    return variant


def _counts(v: Variant) -> Iterator[Variant]:
    if v.batch > 1 and v.key_heads * v.group > 1:
        yield replace(v, batch=1, key_heads=1, group=1)
    if v.batch > 1 or v.key_heads > 1:
        yield replace(v, batch=1, key_heads=1)
    for name in ("batch", "key_heads", "group"):
        for size in range(1, getattr(v, name)):
            yield replace(v, **{name: size})  # type: ignore[arg-type]


def _plainer(v: Variant, *, fixed: bool) -> Iterator[Variant]:
    if v.layout != "contiguous":
        yield replace(v, layout="contiguous")
        for layout in restricted(v.layout):
            yield replace(v, layout=layout)
    if v.values != "plain":
        yield replace(v, values="plain")
    for source in ("integers", "normal")[: {"captured": 2, "normal": 1}.get(v.source, 0)]:
        yield replace(v, source=source)  # type: ignore[arg-type]
    if v.causal != "none" and not fixed:
        yield replace(v, causal="none")
    if v.causal == "bottom-right" and v.rows == v.keys:
        yield replace(v, causal="top-left")
    if v.dtype != "bf16":
        yield replace(v, dtype="bf16")


def _shorter(v: Variant) -> Iterator[Variant]:
    for size in _SIZES:
        if size < min(v.rows, v.keys) or (size == min(v.rows, v.keys) and v.rows != v.keys):
            yield replace(v, rows=size, keys=size)
    if v.rows != v.keys:
        for name in ("rows", "keys"):
            yield from (replace(v, **{name: size}) for size in _SIZES if size < getattr(v, name))  # type: ignore[arg-type]


def _narrower(v: Variant) -> Iterator[Variant]:
    yield from (replace(v, head_dim=size) for size in _HEAD_SIZES if size < v.head_dim)
