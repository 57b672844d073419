"""The kernel, the head, or neither: what follows from all kernels' verdicts on one capture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from torch import Tensor

from attn_diag.captures.apart import ITEM
from attn_diag.captures.capture import Capture
from attn_diag.captures.linear import LinearCapture
from attn_diag.head.recipe_candidates import describe_schedule
from attn_diag.kernels import PRESETS, preset
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.heads import severity
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.replay import Cause, Help, ReplayedCapture, ReplayedKernel, ReplayedQuantity
from attn_diag.results.wording import EVERY_SYMBOL, SYMBOLS, listed, percent, runs_of, together

Excuse = Callable[[str, Sequence[QuantityVerdict], Mapping[str, Tensor]], dict[str, str]]
# A kernel helps where it leaves half of the error or less.
_HELPS = 2.0
_NAMED = 4
# torch's SDPA on a CPU has a true bias of up to 0.01 ulp of O, away from zero, from its exp (``testing.regression``).
_BIASED_KERNELS = {("sdpa:flash", "cpu"): "torch's SDPA on a CPU, whose exp leans away from zero"}
_BIASED_KERNELS["sdpa", "cpu"] = _BIASED_KERNELS["sdpa:flash", "cpu"]


@dataclass
class Judge:
    """Turns what ``inspect`` found of all kernels together into each one's verdict."""

    diagnosis: Diagnosis
    rows: int
    """Tq."""
    excuse: Excuse

    def of(self, name: str, outputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fields of ReplayedKernel."""
        (capture,) = self.diagnosis.captures
        found = next((o for o in capture.observations if o.name == name), None)
        if found is None:
            return {}
        heads = [head for head in found.heads if head.head is not None and head.verdict is not None]
        labels = [label for h in sorted(heads, key=severity) if h.verdict for label in h.verdict.labels]
        worst = found.pooled.quantities
        excused = self.excuse(name, worst, outputs)
        findings = [f for f in self.diagnosis.findings if name in f.observations]
        recipe = None if found.recipe is None else found.recipe.partition(" or ")[0]
        fmt: Any = {"bfloat16": "bf16", "float16": "fp16"}.get(capture.metadata["dtype"])
        known = recipe in PRESETS and fmt is not None
        return {
            "labels": tuple(dict.fromkeys(labels)),
            "quantities": tuple(_quantity(q, excused.get(q.quantity)) for q in worst),
            "recipe": found.recipe,
            "agreement": found.agreement,
            "schedule": describe_schedule(preset(str(recipe), fmt, capture.shape["D"]).schedule) if known else None,
            "finding": findings[0] if findings else None,
            "biased": any(self._leans(f.biased_mean, f.biased_by) for f in findings),
            "bias_excused": _BIASED_KERNELS.get((name, self.diagnosis.tool.backend)),
            "dq_errors": {
                h.head: error
                for h in heads
                if h.head is not None and (d := h.propagation.dq) is not None and (error := d.known_error) is not None
            },
        }

    def _leans(self, name: str | None, mean: float | None) -> bool:
        """Whether a mean adds up, over the rows, to more than the random walk of correct rounding."""
        rows = self.rows if name in ("delta", "delta_excess") else 12 * self.rows
        return mean is not None and abs(mean) > 1 / sqrt(rows)


def _quantity(found: QuantityVerdict, excused: str | None) -> ReplayedQuantity:
    return ReplayedQuantity(found.quantity, found.answer, found.factor, found.relative_error, found.words, excused)


def answer(
    capture: Capture | LinearCapture, kernels: Sequence[ReplayedKernel], asked_for: Collection[str] = ()
) -> ReplayedCapture:
    """What follows from all kernels together.

    Args:
        capture: What they were called with.
        kernels: What came of each.
        asked_for: Those that were named, not taken because they are installed: these are at fault also where they are
            merely too coarse, and what was captured is not.
    """
    judged = [k for k in kernels if k.judged]
    culprits = [k for k in judged if k.faults]
    sound = [k for k in judged if not k.faults]
    captured = [k for k in kernels if k.captured]
    fragile = [k for k in sound if "ill_conditioned" in k.labels]
    asked = [k for k in captured if k.judged] or sound
    cause: Cause
    if _to_blame(culprits, captured, asked_for) and not _all_overflow(culprits, sound):
        cause = "kernel"
    elif captured and all(k.outcome == "other-function" for k in captured):
        cause = "metadata"
    elif _all_overflow(culprits, sound) or any(k in asked for k in fragile):
        cause = "head"
    elif not asked or all(k.captured for k in judged) or any("undecided" in k.labels for k in asked if k.captured):
        cause = "undecided"
    else:
        cause = "pass"
    right = [k for k in sound if culprits and any(_right_in(k, bad.faults) for bad in culprits)]
    error, helps = _helps(fragile, sound)
    made = ReplayedCapture(
        source=capture.source,
        shape=_shape(capture),
        dtype=str(capture.tensors["q"].dtype).removeprefix("torch."),
        cause=cause,
        culprits=tuple(k.name for k in culprits),
        right=tuple(k.name for k in right),
        fragile=tuple(k.name for k in fragile),
        dq_error=error,
        helps=helps,
        words="",
        kernels=tuple(kernels),
        operator=capture.operator if isinstance(capture, LinearCapture) else None,
    )  # fmt: skip
    return replace(made, words=_words(made, capture.metadata.declared, asked_for))


def _shape(capture: Capture | LinearCapture) -> dict[str, int]:
    if isinstance(capture, LinearCapture):
        (b, t, _, k), (_, _, h, v) = capture.tensors["q"].shape, capture.tensors["v"].shape
        return {"B": b, "T": t, "H": h, "K": k, "V": v}
    item = capture.metadata.extra.get(ITEM)
    return {"item": int(item), **capture.sizes()} if item else capture.sizes()


def _to_blame(
    culprits: Sequence[ReplayedKernel], captured: Sequence[ReplayedKernel], asked_for: Collection[str]
) -> bool:
    """Whether a kernel answers the question of a capture: not one that nobody ran or named, and is merely coarse."""
    grave = {q.quantity for k in culprits for q in k.quantities if q.at_fault and q.answer in ("wrong", "nonfinite")}
    sound = any(k.judged and not k.faults for k in captured)
    return bool(grave) or any(k.captured or k.name in asked_for for k in culprits) or (bool(culprits) and not sound)


def _all_overflow(culprits: Sequence[ReplayedKernel], sound: Sequence[ReplayedKernel]) -> bool:
    """Whether every kernel of several returns NaN or Inf: then it is the numbers that they are given."""
    broken = [{q.quantity for q in k.quantities if q.answer == "nonfinite"} for k in culprits]
    return not sound and len(culprits) > 1 and all(broken) and bool(set.intersection(*broken))


def _right_in(kernel: ReplayedKernel, faults: Sequence[str]) -> bool:
    """Whether a kernel is as good as a well-rounded one in all of these quantities."""
    good = {q.quantity for q in kernel.quantities if q.answer == "good"}
    return "biased" not in kernel.labels if faults == ("bias",) else set(faults) <= good


def _helps(fragile: Sequence[ReplayedKernel], sound: Sequence[ReplayedKernel]) -> tuple[float | None, tuple[Help, ...]]:
    """The largest error of dQ in a fragile head, and kernels that have far less there, the best first."""
    # What was captured comes first; recipes are asked only where nothing else is there.
    worst = next((k for k in fragile if k.dq_errors), None)
    if worst is None:
        return None, ()
    head, error = max(worst.dq_errors.items(), key=lambda one: one[1])
    found = []
    for kernel in sound:
        own = kernel.dq_errors.get(head)
        if own and error >= _HELPS * own and any(q.quantity == "dq" for q in kernel.quantities):
            found.append(Help(kernel.name, own, error / own))
    return error, tuple(sorted(found, key=lambda one: one.dq_error))


def _words(found: ReplayedCapture, declared: str | None, asked_for: Collection[str]) -> str:
    by_name = {k.name: k for k in found.kernels}
    heads = found.shape["H" if found.operator else "Hq"]
    said = []
    if found.cause == "kernel":
        said += [
            fault_words(by_name[name], heads, forward_first=found.operator is not None)
            for name in found.culprits[:_NAMED]
        ]
        if left := found.culprits[_NAMED:]:
            said.append(f"At fault too: {listed(left, _NAMED)}.")
        said.append(
            f"Right there: {listed(found.right, _NAMED)}."
            if found.right
            else "No other kernel was run that is right there; the well-rounded recipe is."
        )
    elif found.cause == "metadata":
        captured = next(k for k in found.kernels if k.captured)
        fitting = [k.name for k in found.kernels if k.judged]
        said.append(f"what was captured is not the attention that the capture states: {captured.message}")
        if fitting:
            said.append(f"Replayed as stated, {listed(fitting, _NAMED)} compute it.")
    elif found.cause == "head" and not found.fragile and found.culprits:
        said.append(f"every kernel returns NaN or Inf here ({listed(found.culprits, _NAMED)}): look at the inputs.")
    if found.fragile:
        off = "O is over 2 %" if found.operator else f"dQ is {percent(found.dq_error)}"
        alike = f"{'The head is fragile too: ' if said else ''}{off} off, and well-rounded "
        alike += (
            f"kernels are off by as much ({listed(found.fragile, _NAMED)}): these inputs amplify ordinary rounding."
        )
        said.append(alike)
        said += [f"What would help: {'; '.join(map(_help_words, found.helps[:_NAMED]))}."] if found.helps else []
    elif found.cause == "undecided":
        unsure = [k.name for k in found.kernels if "undecided" in k.labels]
        said.append(
            f"neither passed nor faulted: {listed(unsure, _NAMED)}."
            if unsure
            else "nothing was compared: no other kernel could be run on it."
            if any(k.judged for k in found.kernels)
            else "no kernel's outputs could be judged."
        )
    good = [k.name for k in found.kernels if k.judged and not k.faults and "undecided" not in k.labels]
    if found.cause == "pass" or (found.cause == "undecided" and good):
        yardstick = "a well-rounded kernel" if declared is None else f"the declared {declared} allows"
        said.append(f"{'As' if said else 'as'} good as {yardstick}: {listed(good, _NAMED)}.")
    if found.cause in ("pass", "undecided") or (found.cause == "head" and found.fragile):
        said += [
            f"Not as good: {fault_words(by_name[name], heads, forward_first=found.operator is not None)}"
            for name in found.culprits[:_NAMED]
        ]
    refused = [k for k in found.kernels if k.name in asked_for and k.outcome == "refused"]
    said += [f"Not compared: {k.name}, which refused: {(k.message or '').rstrip('.')}." for k in refused[:_NAMED]]
    said += [f"Nor {listed([k.name for k in refused[_NAMED:]], _NAMED)}."] if refused[_NAMED:] else []
    return " ".join(said)


def fault_words(kernel: ReplayedKernel, heads: int, *, forward_first: bool = False) -> str:
    """What is wrong with a kernel, where, and what is right beside it; why, of its output that is furthest off.

    ``forward_first``: of O or the last state where one of them is wrong: gradients come from what the forward left.
    """
    who = f"{kernel.name} ({kernel.version})" if kernel.captured and kernel.version else kernel.name
    if kernel.faults == ("bias",):
        words = "" if kernel.finding is None else f": {kernel.finding.words.rstrip('.')}"
        return f"{who} is biased{words}."
    bad = [q for q in kernel.quantities if q.at_fault]
    kinds = {"nonfinite": "NaN or Inf", "wrong": "wrong", "lossy": "too coarse"}
    said = []
    for answer_, kind in kinds.items():
        if names := [EVERY_SYMBOL[q.quantity] for q in bad if q.answer == answer_]:
            said.append(f"{together(names)} {'is' if len(names) == 1 else 'are'} {kind}")
    good = [EVERY_SYMBOL[q.quantity] for q in kernel.quantities if q.answer == "good"]
    if good and good[0] not in SYMBOLS.values():
        good[0] = f"{good[0][:1].upper()}{good[0][1:]}"
    beside = f" {together(good)} {'is' if len(good) == 1 else 'are'} right." if good else ""
    later = {q.quantity for q in bad if forward_first and q.quantity not in ("o", "final_state")}
    gravest = min(bad, key=lambda q: (list(kinds).index(q.answer), q.quantity in later, -(q.factor or 0.0)))
    return f"{who}: {' and '.join(said)}{_where(kernel, heads)}: {gravest.words.rstrip('.')}.{beside}"


def _where(kernel: ReplayedKernel, heads: int) -> str:
    """The heads of its finding."""
    if kernel.finding is None or heads == 1:
        return ""
    found = sorted({head for place in kernel.finding.places for head in place.heads})
    whole = "both" if heads == 2 else f"all {heads}"
    return f" in {whole} heads" if len(found) == heads else f" in {runs_of('head', found)}"


def _help_words(found: Help) -> str:
    return f"{found.name} leaves {percent(found.dq_error)} (1/{round(found.times_less)})"
