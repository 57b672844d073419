"""The tensors of a variant: a capture's, cut or filled up to other sizes, or drawn; then cast."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.results.hunt import Variant
from attn_diag.results.wording import number
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.hunting.layouts import TENSORS, fitted
from attn_diag.testing.regression.cases import case_of_capture
from attn_diag.testing.target import Target

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()}
# Scores of a late training run: a row's mass is on few keys.
_LARGE_LOGIT = 80.0

Change = Callable[[dict[str, Tensor], float, torch.Generator], None]


def _hot_row(x: dict[str, Tensor], scale: float, generator: torch.Generator) -> None:
    del scale, generator
    x["q"][:, :, x["q"].shape[2] // 2] *= 64


def _hot_key(x: dict[str, Tensor], scale: float, generator: torch.Generator) -> None:
    del scale, generator
    x["k"][:, :, x["k"].shape[2] // 3] *= 32


def _large_logits(x: dict[str, Tensor], scale: float, generator: torch.Generator) -> None:
    del generator
    group = x["q"].shape[1] // x["k"].shape[1]
    scores = x["q"] @ x["k"].repeat_interleave(group, 1).mT * scale
    largest = max(float(scores.abs().max()), 1e-30)
    x["q"] *= 2.0 ** round(math.log2(_LARGE_LOGIT / largest))


def _repeated_keys(x: dict[str, Tensor], scale: float, generator: torch.Generator) -> None:
    del scale, generator
    count = x["k"].shape[2] // 2
    x["k"][:, :, 1 : 2 * count : 2] = x["k"][:, :, 0 : 2 * count : 2].clone()


def _equal_keys(x: dict[str, Tensor], scale: float, generator: torch.Generator) -> None:
    del scale, generator
    x["k"][:] = x["k"][:, :, :1].clone()


def _outliers(x: dict[str, Tensor], scale: float, generator: torch.Generator) -> None:
    del scale
    for tensor in x.values():
        tensor[torch.rand(tensor.shape, generator=generator) < 0.002] *= 32


def _one_gradient(x: dict[str, Tensor], scale: float, generator: torch.Generator) -> None:
    del scale, generator
    x["do"][:, :, :-1] = 0


def _large_gradient(x: dict[str, Tensor], scale: float, generator: torch.Generator) -> None:
    del scale, generator
    x["do"] *= 2.0**8


def _zero_queries(x: dict[str, Tensor], scale: float, generator: torch.Generator) -> None:
    del scale, generator
    x["q"][:] = 0


CHANGES: dict[str, Change] = {
    "hot row": _hot_row,
    "hot key": _hot_key,
    "large logits": _large_logits,
    "repeated keys": _repeated_keys,
    "equal keys": _equal_keys,
    "outliers": _outliers,
    "one dO row": _one_gradient,
    "large dO": _large_gradient,
    "zero q": _zero_queries,
}
"""By ``Variant.values``: what is done to the tensors, in place."""


@dataclass(frozen=True)
class Material:
    """What variants are made of."""

    capture: Capture
    case: CaseInputs
    heads: int | None = None
    """How many query heads a variant must have; None: any."""

    @classmethod
    def of(cls, capture: Capture) -> Material:
        """Raises InputError for a capture whose mask, or chosen rows, say nothing of other lengths."""
        case = case_of_capture(capture)
        if odd := [n for n, x in (("mask", case.mask), ("q_positions", case.positions)) if x is not None]:
            raise InputError(f"{capture.source}: a hunt changes lengths, which its {' and '.join(odd)} cannot follow")
        if case.q.dtype not in _NAMES:
            raise InputError(f"{capture.source}: a hunt needs inputs in {', '.join(TORCH)}, got {case.q.dtype}")
        return cls(capture, case)

    def of_kernel(self, name: str, device: torch.device) -> Material:
        """For a kernel; a function that has slopes or sinks of its own may have others for another number of heads."""
        case = self.case
        if case.alibi_slopes is None and case.sinks is None:
            return self
        with suppress(InputError):  # which the worker's call tells
            target = Target.of(name, dtype=case.q.dtype, head_dim=case.q.shape[3], device=device)
            return replace(self, heads=case.q.shape[1]) if target.own_numbers(case) else self
        return self

    @property
    def as_captured(self) -> Variant:
        """The capture itself."""
        q, k = self.case.q, self.case.k
        return Variant(
            batch=q.shape[0], key_heads=k.shape[1], group=q.shape[1] // k.shape[1], rows=q.shape[2], keys=k.shape[2],
            head_dim=q.shape[3], causal=self.case.causal, dtype=_NAMES[q.dtype],  # type: ignore[arg-type]
        )  # fmt: skip

    def build(self, variant: Variant) -> CaseInputs:
        """The inputs of a variant, contiguous. Raises InputError where its numbers do not fit its format."""
        case, (b, hk, d) = self.case, (variant.batch, variant.key_heads, variant.head_dim)
        if self.heads not in (None, hk * variant.group):
            raise InputError(f"its slopes or sinks are its own, one a head: of {self.heads} heads alone")
        hq, dv = hk * variant.group, case.v.shape[3] if d == case.q.shape[3] else d
        shapes = {"q": (b, hq, variant.rows, d), "k": (b, hk, variant.keys, d), "v": (b, hk, variant.keys, dv)}
        shapes["do"] = (b, hq, variant.rows, dv)
        # The usual scale goes with the head size; another is the user's.
        usual = math.isclose(case.scale, case.q.shape[3] ** -0.5, rel_tol=1e-6)
        scale = d**-0.5 if usual else case.scale
        tensors = {n: self._drawn(n, shapes[n], variant) for n in TENSORS}
        generator = torch.Generator().manual_seed(0)
        if variant.values != "plain":
            CHANGES[variant.values](tensors, scale, generator)
        tensors = fitted(variant.layout, tensors)
        cast = {n: x.to(TORCH[variant.dtype]) for n, x in tensors.items()}
        if broken := [n for n, x in cast.items() if not bool(x.isfinite().all())]:
            largest = number(float(max(tensors[n].abs().max() for n in broken)))
            raise InputError(f"{variant.dtype} cannot hold {', '.join(broken)}, up to {largest}")
        q, k, v, do = (cast[n] for n in TENSORS)
        return CaseInputs(
            variant.words, q, k, v, do, scale, variant.causal, window=case.window, softcap=case.softcap,
            alibi_slopes=self._slopes(b, hq), alibi_origin=case.alibi_origin,
            sinks=None if case.sinks is None else case.sinks[torch.arange(hq) % len(case.sinks)],
            dropout_mask=self._kept((b, hq, variant.rows, variant.keys)), dropout_p=case.dropout_p,
        )  # fmt: skip

    def _slopes(self, batch: int, heads: int) -> Tensor | None:
        """Those of the capture's first sequence; heads beyond its own have them again."""
        slopes = self.case.alibi_slopes
        return None if slopes is None else slopes[0, torch.arange(heads) % slopes.shape[1]].repeat(batch, 1)

    def _kept(self, shape: tuple[int, ...]) -> Tensor | None:
        """Which probabilities are kept: the capture's, and beyond it as many in the mean."""
        given, p = self.case.dropout_mask, self.case.dropout_p
        if given is None or p is None:
            return None
        generator = torch.Generator().manual_seed(zlib.crc32(b"dropout 0"))
        found = torch.rand(shape, generator=generator) >= p
        common = _common(given.shape, shape)
        found[common] = given[common]
        return found

    def _drawn(self, name: str, shape: tuple[int, ...], variant: Variant) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} 0".encode()))
        if variant.source == "integers":
            return torch.randint(-2, 3, shape, generator=generator).float()
        drawn = torch.randn(shape, generator=generator)
        given = getattr(self.case, name)
        if variant.source == "normal" or given is None:
            return drawn
        given = given.float()
        common = _common(given.shape, shape)
        drawn *= float(given.square().mean().sqrt())
        drawn[common] = given[common]
        return drawn


def _common(have: Sequence[int], want: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, min(pair)) for pair in zip(have, want, strict=True))
