"""Linear attention captured: is it the mathematics, as good as a well-rounded kernel, biased, fragile?

The counterfactual is an emulated chunked kernel that rounds as flash-linear-attention's healthy ones do (operands of
products in the inputs' format, sums and the state in fp32), with chunks of 16 to 128: of these the one that is
furthest off. What no kernel of the format leaves is three times the error of one that also rounds its state, decays and
sums to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_diag.analyses.linear.bits import Bits
from attn_diag.analyses.linear.causes import Beside, Causes
from attn_diag.analyses.linear.choices import FP32, Choices
from attn_diag.analyses.linear.findings import adjusted, all_zero, capital, findings_of, sentence_of, stated
from attn_diag.analyses.linear.noise import along, cancelled, mean_away, stands_out, unusable
from attn_diag.analyses.linear.words import Cause
from attn_diag.captures.linear import LINEAR_OUTPUTS, LinearCapture, load_linear
from attn_diag.captures.loading import find_captures
from attn_diag.errors import InputError
from attn_diag.head.linear import STATES, LinearRun, Place
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.head.quality import AS_GOOD, BEYOND, LOSSY
from attn_diag.reference import FloatFormat, format_of, round_nearest_even, ulp
from attn_diag.reference.linear import OF_HEADS
from attn_diag.results.diagnosis import Label
from attn_diag.results.linear import (
    LinearDiagnosedCapture,
    LinearDiagnosis,
    LinearHead,
    LinearObservation,
    LinearQuantity,
)
from attn_diag.results.wording import LINEAR_SYMBOLS, number, percent, ranges, times
from attn_diag.statistics.means import require_level
from attn_diag.statistics.ratios import MIN_GROUPS, RatioEstimate, paired_ratio

# Steps whose errors are counted together, as they share the state's; and rows of a state.
_BLOCK, _STATE_BLOCK = 16, 2
# A well-rounded kernel's own error from which a head is called fragile.
_FRAGILE = 0.02
# A site that explains so much of an error proves that the error is no accident.
_PROOF = 0.5
# A mean of which a well-rounded kernel has so much is the inputs', not the kernel's.
_SHARED = 0.5
# Without a site that makes it a factor is lossy above this only: the decay's gradient of fla's RWKV-7 has 1.86.
_UNNAMED = 2.0


def inspect_linear(
    source: LinearCapture | str | Path | Sequence[LinearCapture | str | Path] | None = None,
    *,
    operator: str | None = None,
    level: float = 0.01,
    device: str = "auto",
    **given: Any,
) -> LinearDiagnosis:
    """Diagnose calls of linear attention.

    Args:
        source: A LinearCapture, a capture's file, a folder of them, or a list of these; None where tensors are given.
        operator: Of tensors that are given by name: rwkv7, gated_delta_rule, kda, gla, simple_gla, mamba2, …
        level: Significance of the tests of means, after Benjamini-Hochberg.
        device: auto, cpu or cuda.
        **given: The call's tensors by fla's names ([B, T, H, D]), what it returned (``o``, ``final_state``), ``do`` and
            its gradients (``dq``, …), and ``scale``, ``l2norm``, ``normalize`` and the fields of ``Metadata``.

    Raises:
        InputError: Tensors do not fit each other, the operator is not known, or nothing was captured that it returned.
    """
    if source is None:
        if operator is None:
            raise InputError("name the operator (operator='kda') whose tensors these are, or a capture")
        tensors = {name: given.pop(name) for name in list(given) if hasattr(given[name], "shape")}
        captures = [LinearCapture.from_tensors(operator, tensors, **given)]
    elif operator is not None or given:
        raise InputError("a capture states its operator and tensors itself; give one or the other")
    else:
        listed = [source] if isinstance(source, LinearCapture | str | Path) else list(source)
        captures = []
        for one in listed:
            captures += [one] if isinstance(one, LinearCapture) else map(load_linear, find_captures([one]))
    return inspect_linear_captures(captures, level=level, device=device, explained=True)


def inspect_linear_captures(
    captures: Iterable[LinearCapture],
    *,
    level: float = 0.01,
    device: str = "auto",
    heads: Callable[[int], bool] | None = None,
    progress: Callable[[int, int], object] | None = None,
    unreadable: Sequence[str] = (),
    explained: bool = False,
) -> LinearDiagnosis:
    """Diagnose captures; the tests of all their means are adjusted together.

    Args:
        captures: The captures.
        level, device: As for ``inspect_linear``.
        heads: Which of the model's heads to look at; None: all.
        progress: Called with (done, total) after every head.
        unreadable: Inputs that could not be read, for the result.
        explained: Also look for what makes an error smaller than a well-rounded kernel's, which takes as long again.

    Raises:
        InputError: A capture has nothing that an operator returned.
    """
    require_level(level)
    where = pick_device(device)
    chosen = list(captures)
    for capture in chosen:
        if not capture.observations:
            why = "nothing to judge: add what the operator returned (o, final_state, dq, …)"
            raise InputError(f"{capture.source}: {why}")
    jobs = [_Job(capture, where, heads, explained) for capture in chosen]
    done, total = 0, sum(len(job.heads) * len(job.capture.observations) for job in jobs)
    found = []
    for job in jobs:
        observations = []
        for name, outputs in job.capture.observations.items():
            entries = []
            for head in job.heads:
                entries.append(job.judged(head, outputs))
                done += 1
                if progress is not None:
                    progress(done, total)
            observations.append(LinearObservation(name, tuple(outputs), tuple(entries)))
        found.append(job.diagnosed(observations))
    found, tests = adjusted(found, level)
    findings = findings_of(found)
    sentence, tool = sentence_of(findings, found), describe_tool(where)
    return LinearDiagnosis(tool, sentence, findings, tuple(found), tests, level, tuple(unreadable))


# Told by an output's own numbers.
_CERTAIN = ("handed_back", "sign", "zero", "transposed")


@dataclass
class _Job:
    """One capture, its reference and the emulated kernels."""

    capture: LinearCapture
    device: torch.device
    wanted: Callable[[int], bool] | None
    explained: bool

    def __post_init__(self) -> None:
        self.run = LinearRun(self.capture, self.device)
        self.causes = Causes(self.run)
        self.choices = Choices(self.run) if self.explained else None
        self.bits = Bits(self.run, self.causes) if self.explained else None
        tensors = self.capture.tensors
        self.count = tensors["v"].shape[2]
        offset = self.capture.metadata.head_offset
        self.heads = [h for h in range(self.count) if self.wanted is None or self.wanted(h + offset)]
        if not self.heads:
            raise InputError(f"{self.capture.source}: no such head: it has {offset} to {offset + self.count - 1}")
        self.reference = self.run.reference
        self.compared = self.run.format is not None
        self.others: list[dict[str, Tensor]] = []
        self.coarse: dict[str, Tensor] = {}
        self.beside: Beside = {}
        self.only: frozenset[str] | None = None
        self.backward = False
        self.unknown = False
        if self.compared:
            recipe, fmt = self.run.recipe, self.run.format
            assert fmt is not None
            self.others = [self.run.emulated(replace(recipe, chunk=chunk)) for chunk in self.run.chunks]
            self.coarse = self.run.emulated(replace(recipe, state=fmt, decay=fmt, accumulator=fmt, decay_sums=fmt))

    def judged(self, head: int, outputs: Mapping[str, Tensor]) -> LinearHead:
        quantities: list[LinearQuantity] = []
        forward = [name for name in LINEAR_OUTPUTS if name in outputs]
        known = [n for n in outputs if n not in forward and n in self.reference.values]
        there = [(n, p) for n in known if (p := self.run.place(n, head)) is not None]
        self.causes.gradients = {n: (outputs[n].to(self.device)[p].double(), p) for n, p in there}
        for name in [*forward, *(n for n in outputs if n not in forward)]:
            place = self.run.place(name, head)
            if name in self.reference.values and place is not None:
                wrong = [q.cause for q in quantities if q.quantity in forward and q.answer == "wrong"]
                # A backward of its own may be wrong where the forward is right.
                self.only = frozenset(c for c in wrong if c) if wrong and name not in forward else None
                sound = any(q.quantity == "o" and q.answer == "good" for q in quantities)
                self.backward = sound and name not in forward and not wrong
                self.unknown = name != "o" and any(
                    q.quantity == "o" and q.answer in ("wrong", "lossy") and q.cause is None for q in quantities
                )
                alike = [n for n in outputs if n != name and (n in forward) == (name in forward)]
                others = alike if self.only is None else []
                places = [(n, p) for n in others if (p := self.run.place(n, head)) is not None]
                self.beside = {n: (outputs[n].to(self.device)[p].double(), p) for n, p in places}
                found = self._quantity(name, outputs[name], place)
                if self.choices is not None and self.bits is not None:
                    head_of = outputs[name].to(self.device)[place]
                    found = self.choices.named(self.bits.named(found, head_of, place), head_of, place)
                quantities.append(found)
        broken_forward = [q for q in quantities if q.quantity in ("o", "final_state") and q.answer == "wrong"]
        labels, reasons = list[Label](), list[str]()
        for answer in ("nonfinite", "wrong", "lossy", "undecided"):
            own = [q for q in quantities if q.answer == answer]
            if own and (answer != "undecided" or not labels):
                labels.append(answer)
                reasons += [q.words for q in own]
        if broken_forward and len(reasons) > len(broken_forward):
            reasons.append("Gradients come from what the forward left: look at the forward first.")
        drift, chunks = along(self.run, head, outputs.get("o"), self.others[-1]["o"] if self.compared else None)
        amplification = None
        if self.compared:
            off = self._error(self.others[-1]["o"], "o", head)
            amplification = off / self.run.unit
            if off > _FRAGILE and not {"nonfinite", "wrong", "lossy"} & {*labels}:
                labels.insert(0, "ill_conditioned")
                reasons.insert(
                    0, f"A well-rounded kernel's O is {percent(off)} off on this head too: the inputs make it so."
                )
        norms = torch.cat([n[head] for n in self.reference.norms])
        shrink = -float(norms.clamp(min=1e-300).log().mean())
        return LinearHead(
            head=head + self.capture.metadata.head_offset,
            labels=tuple(labels) or ("clean",),
            reasons=tuple(reasons),
            quantities=tuple(quantities),
            largest_step=float(norms.max()),
            memory=math.log(2) / shrink if shrink > 1e-9 else math.inf,
            amplification=amplification,
            drift=drift,
            chunks=chunks,
        )

    def _error(self, found: Tensor, name: str, head: int) -> float:
        place = self.run.place(name, head)
        assert place is not None
        true = self.reference.values[name][place]
        size = float(true.norm())
        return float((found[place] - true).norm()) / size if size else 0.0

    def _rows(self, x: Tensor) -> Tensor:
        """A head's tensor as [rows, D]: steps of all sequences, or the rows of states."""
        return x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x.reshape(-1, 1)

    def _quantity(self, name: str, tensor: Tensor, place: Place) -> LinearQuantity:
        symbol = capital(LINEAR_SYMBOLS.get(name, name))
        head = tensor.to(self.device)[place]
        observed, true = head.double(), self.reference.values[name][place]
        known = self.reference.bounds[name][place].isfinite()
        if (without := unusable(symbol, observed, known, [o[name][place] for o in self.others])) is not None:
            return stated(name, *without)
        if (zero := all_zero(name, symbol, head, true, [o[name][place] for o in self.others])) is not None:
            return zero
        size = float(true.norm())
        error = float((observed - true).norm())
        relative = error / size if size else None
        fmt = format_of(tensor.dtype)
        if not self.compared or name[1:] in OF_HEADS:
            why = "inputs of this format have no published way to round" if not self.compared else "one number a head"
            return replace(
                stated(name, "stated", f"{symbol} is {percent(relative)} off ({why})."), relative_error=relative
            )
        squares = self._rows((observed - true).square()).sum(1)
        noise = [self._rows((o[name][place] - true).square()) for o in self.others]
        least = self._rows(ulp(true, fmt).square() / 12)
        largest = max([*noise, least], key=lambda rows: float(rows.sum()))
        yard = largest.sum(1)
        # What a sound kernel may have besides: no accusation, but no acquittal either.
        allowed = yard + self._rows(torch.zeros_like(true) + cancelled(self.run, name, place)).sum(1)
        # Where a row is one number, the emulated one may happen to be all but exact: half an ulp is any kernel's.
        one = 3.0 * least[:, 0] if least.shape[1] == 1 else torch.zeros_like(allowed)
        coarse = torch.maximum(self._rows((self.coarse[name][place] - true).square()).sum(1), allowed).maximum(one)
        blocks = np.arange(len(squares)) // (_STATE_BLOCK if name in STATES else _BLOCK)
        ratio = paired_ratio(squares.cpu().numpy(), yard.cpu().numpy(), blocks)
        if name in STATES and ratio is not None:
            # Rows of a state may all be multiples of one (the same key in every step): its columns are not.
            columns = self._rows((observed - true).square()).sum(0)
            other = paired_ratio(columns.cpu().numpy(), largest.sum(0).cpu().numpy())
            ratio = ratio if other is None else min(ratio, other, key=lambda r: r.low)
        mean = self._mean(observed, true, fmt, place) if name == "o" else (None, None)
        found = LinearQuantity(
            name, "good", "", relative, math.sqrt(float(yard.sum())) / size if size else None,
            None if ratio is None else ratio.factor, None if ratio is None else (ratio.low, ratio.high),
            None, None, *mean, )  # fmt: skip
        return self._answered(found, symbol, ratio, squares, allowed, coarse, head, place)

    def _mean(
        self, observed: Tensor, true: Tensor, fmt: FloatFormat, place: Place
    ) -> tuple[float | None, float | None]:
        """As ``mean_away``; p is 1 where a well-rounded kernel has half of it too, as of keys that repeat."""
        exact, sign = round_nearest_even(true, fmt), true.sign()
        mean, p = mean_away(self._rows((observed - exact) * sign).cpu().numpy(), _BLOCK)
        for other in self.others:
            excess = (other["o"][place] - exact) * sign
            size = float((observed - exact).square().mean().sqrt())
            if mean and size and float(excess.mean()) / size / mean > _SHARED:
                return mean, None if p is None else 1.0
        return mean, p

    def _sure(self, cause: Cause | None) -> Cause | None:
        """What nobody can be wrong about, where O is off and nobody knows why: all else comes from that."""
        return cause if cause is None or not self.unknown or cause.name in _CERTAIN else None

    def _answered(
        self, found: LinearQuantity, symbol: str, ratio: RatioEstimate | None, squares: Tensor, allowed: Tensor,
        coarse: Tensor, observed: Tensor, place: Place,
    ) -> LinearQuantity:  # fmt: skip
        name, relative = found.quantity, found.relative_error
        outlying = stands_out(squares, torch.maximum(coarse, allowed), self._rows(observed).shape[1])
        rest = paired_ratio(squares[~outlying].cpu().numpy(), allowed[~outlying].cpu().numpy())
        beyond = float(squares.sum()) > BEYOND**2 * float(coarse.sum())
        localised = bool(outlying.any()) and rest is not None and rest.factor <= LOSSY
        if beyond or localised:
            cause = self.causes.of_wrong(name, observed, place, self.beside, self.only, backward=self.backward)
            if cause is None and not beyond:
                cause = self.causes.of_small(name, observed, place, self.beside, float(allowed.sum()))
            cause = self._sure(cause)
            if cause is not None and cause.is_rounding:
                left = (1 - cause.explained) * float(squares.sum())
                sound = left <= BEYOND**2 * float(coarse.sum()) or self.causes.as_stepwise(name, left, place)
                if sound:
                    made = f"{cause.words} explains {percent(cause.explained)} of the squared error"
                    found = replace(found, answer="lossy", words=f"{symbol} is {percent(relative)} off: {made}.")
                    return _named(found, cause)
                cause = None  # it is there, and what is left is no rounding's
            if cause is None and not localised and self.causes.as_stepwise(name, float(squares.sum()), place):
                said = f"{symbol} is {percent(relative)} off, as far as with the state in 16 bits after every step"
                return replace(found, answer="lossy", words=f"{said}; no single site explains it.")
            said = f"{symbol} is {percent(relative)} off, which no rounding makes"
            if cause is not None:
                said += f": {cause.words}, which explains {percent(cause.explained)} of the squared error"
            elif localised:
                lines = "rows" if name in STATES else "steps"
                said += f": {lines} {ranges(outlying.nonzero()[:, 0].tolist())}, all else is right"
            else:
                factor = math.sqrt(float(squares.sum() / coarse.sum()))
                said += f": {times(factor)} times what a kernel all in 16 bits leaves"
            return _named(replace(found, answer="wrong", words=f"{said}."), cause)
        if relative is not None and relative <= FP32 * self.run.unit:
            return replace(found, words=f"{symbol} is {percent(relative)} off: no more than fp32 sums leave.")
        if ratio is None:
            return replace(
                found, answer="undecided" if relative else "good", words=f"{symbol} has too few rows to compare."
            )
        interval = f"{number(ratio.factor)} ({number(ratio.low)} to {number(ratio.high)})"
        said = f"{symbol} has {interval} times a well-rounded kernel's error"
        beside = paired_ratio(squares.cpu().numpy(), allowed.cpu().numpy()) or ratio
        # Of what cancelling terms may leave no bits are sought: sums along the sequence look alike by chance.
        too_large, beyond_terms = (r.factor > AS_GOOD and r.high > LOSSY for r in (ratio, beside))
        cause = self.causes.of_lossy(name, observed, place, float(allowed.sum()), beyond_terms) if too_large else None
        if cause is None and too_large:
            cause = self.causes.of_small(name, observed, place, self.beside, float(allowed.sum()))
        cause = self._sure(cause)
        if cause is not None and cause.is_rounding:
            said += f", as with {cause.words}: that explains {percent(cause.explained)} of it"
        elif cause is not None:
            said += f": {cause.words}, which explains {percent(cause.explained)} of it"
        beyond_allowed = beside.factor > LOSSY if cause else beside.low > _UNNAMED
        beyond_doubt = ratio.low > (LOSSY if cause else _UNNAMED) and ratio.groups >= MIN_GROUPS
        # A site that is found among the bits needs no further proof that the factor is no accident.
        proven = ratio.factor > LOSSY and cause is not None and cause.explained > _PROOF
        if beyond_allowed and (beyond_doubt or proven):
            rounding = cause is None or cause.is_rounding
            return _named(replace(found, answer="lossy" if rounding else "wrong", words=f"{said}."), cause)
        if ratio.high <= AS_GOOD or ratio.factor <= AS_GOOD:
            return replace(found, words=f"{said}.")
        return _named(replace(found, answer="undecided", words=f"{said}."), cause)

    def diagnosed(self, observations: Sequence[LinearObservation]) -> LinearDiagnosedCapture:
        capture = self.capture
        (b, t, few, k), v = capture.tensors["q"].shape, capture.tensors["v"].shape[3]
        missing = [] if self.run.has_gradients else ["gradients (no do was captured)"]
        seen = {name for o in observations for name in o.outputs}
        missing += [name for name in self.reference.values if name not in seen]
        size, bound = float(self.reference.values["o"].square().mean().sqrt()), float(self.reference.bounds["o"].max())
        text = capture.metadata.to_text("1.1")
        text = {key: value for key, value in text.items() if key not in ("layout", "causal", "lse_base", "format")}
        return LinearDiagnosedCapture(
            source=capture.source,
            operator=capture.operator,
            metadata=text | {"dtype": str(capture.tensors["q"].dtype).removeprefix("torch.")},
            shape={"B": b, "T": t, "H": self.count, "Hk": few, "K": k, "V": v, "N": len(capture.call.sequences)},
            not_judged=tuple(missing),
            reference_bound=bound / size if size else 0.0,
            observations=tuple(observations),
        )


def _named(found: LinearQuantity, cause: Cause | None) -> LinearQuantity:
    return found if cause is None else replace(found, cause=cause.name, explained=cause.explained)
