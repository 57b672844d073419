"""One head of a failing run, step by step: the error of its dW_Q beside the gradient, the weight and Adam's momentum.

``accumulation`` has the notation: E, G, W, M.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from attn_diag import Capture, InputError
from attn_diag.analyses.inspection.capture_job import CaptureJob, Runs
from attn_diag.analyses.inspection.inspect import DEFAULT_LEVEL
from attn_diag.captures.selection import Selection
from attn_diag.head.propagation import add_parts
from attn_diag.results.diagnosis import BiasEstimate, HeadDiagnosis

# Adam's beta_1 in train.py.
BETA_1 = 0.9
# Singular values listed.
_LISTED = 4


@dataclass(frozen=True)
class Matrices:
    """One head at one step; all [D, C] float64 on the CPU.

    ``error``: E. ``full``: observed dW_Q - G, from the dQ captured; None without it. ``momentum``, ``square``: Adam's
    moments; None without their file.
    """

    error: Tensor
    full: Tensor | None
    reference: Tensor
    weight: Tensor
    momentum: Tensor | None
    square: Tensor | None

    @cached_property
    def weight_directions(self) -> tuple[Tensor, Tensor]:
        return first_directions(self.weight)

    @cached_property
    def momentum_directions(self) -> tuple[Tensor, Tensor] | None:
        """None where there is no momentum, or none yet."""
        return None if self.momentum is None or not bool(self.momentum.any()) else first_directions(self.momentum)


@dataclass(frozen=True)
class Spectrum:
    """``norm``: Frobenius; ``singular``: the largest singular values; ``first_share``: of norm^2, the first one's."""

    norm: float
    singular: tuple[float, ...]
    first_share: float | None


@dataclass(frozen=True)
class Alignment:
    """How one matrix X lies to the weight and the momentum before its step; cosines, None where one of them is zero.

    Signed, of whole matrices (Frobenius): ``weight`` <X, W>, ``past_change`` <X, W - W_first>, ``momentum`` <X, M>,
    ``adam`` <X, M / (sqrt(V) + 1e-8)>, ``top`` <X, u v^T> with u, v the first singular vectors of W: to first order
    -``top`` is what descent along X does to W's spectral norm. |cosine| of first singular directions, on the side of
    q's features and of x: ``left_weight``, ``right_weight``, ``left_momentum``, ``right_momentum``. ``previous``:
    signed, with X of the step before. ``running``: of the past steps' X, beta_1-weighted as Adam does, with M.
    ``momentum_share``: of ||M||^2, what lies along the first singular direction u v^T of that running sum.
    """

    weight: float | None
    past_change: float | None
    momentum: float | None
    adam: float | None
    top: float | None
    left_weight: float | None
    right_weight: float | None
    left_momentum: float | None
    right_momentum: float | None
    previous: float | None
    running: float | None
    momentum_share: float | None


@dataclass(frozen=True)
class StepRow:
    """One step of the head. ``error``, ``full``, ``reference``: E, the whole error, G, of one sequence.

    ``share`` = ||E|| / ||G||, ``full_share`` likewise; ``over_floor``: the whole error of dQ over what one correct
    rounding of O would cause through delta. ``coherence`` of the rows' atoms, its null's 95 % quantile. ``delta_*``: of
    delta's mean error over the rows, clustered; ``delta_mean_sigma`` in units of its noise floor. ``o_misfit``: ||O -
    reference|| / ||reference|| where that is so large (5 %) that an inspection would doubt the metadata, else None.
    """

    step: int
    noise_factor: float | None
    max_logit: float | None
    delta_mean: float | None
    delta_standard_error: float | None
    delta_t: float | None
    delta_p: float | None
    delta_mean_sigma: float | None
    spectral_norm: float
    coherence: float | None
    coherence_null95: float | None
    over_floor: float | None
    share: float | None
    full_share: float | None
    error: Spectrum
    full: Spectrum | None
    reference: Spectrum
    momentum: Spectrum | None
    error_alignment: Alignment
    full_alignment: Alignment | None
    reference_alignment: Alignment
    o_misfit: float | None


class Moments:
    """Adam's moments of a layer's query rows, from files; only one head's rows are read."""

    def __init__(self, folder: Path, layer: int) -> None:
        self.folder, self.layer, self.missing = folder, layer, list[int]()

    def read(self, step: int, rows: slice) -> tuple[Tensor | None, Tensor | None]:
        """``exp_avg`` and ``exp_avg_sq``, [D, C] float64; None, and the step noted, where there is no file.

        Raises InputError for a file of another step or layer.
        """
        path = self.folder / f"step{step:06d}_layer{self.layer:02d}.safetensors"
        if not path.exists():
            self.missing.append(step)
            return None, None
        with safe_open(path, framework="pt") as file:
            stated = file.metadata() or {}
            wanted = {"step": str(step), "layer": str(self.layer)}
            if any(stated.get(name, value) != value for name, value in wanted.items()):
                raise InputError(f"{path.name} states {stated}, expected {wanted}")
            first, second = (file.get_slice(name)[rows].double() for name in ("exp_avg", "exp_avg_sq"))
        return first, second


class HeadSteps:
    """Reads one head step by step; ``estimates``: delta's mean error at each."""

    def __init__(self, layer: int, head: int, moments: Moments, device: torch.device) -> None:
        self.layer, self.head, self.moments, self.device = layer, head, moments, device

    def read(self, capture: Capture) -> tuple[Matrices, HeadDiagnosis, float | None]:
        """The head's matrices, its inspection, and O's misfit where it is doubtful.

        Raises InputError where dW_Q or delta's part of its error does not follow from the capture.
        """
        selection = Selection(heads=frozenset({self.head}))
        job = CaptureJob(capture, selection, Runs((), "emulation", {}), self.device, DEFAULT_LEVEL)
        for _ in job.run():
            pass
        if len(job.entries) != 1:
            raise InputError(f"{capture.source}: one observation is expected, got {', '.join(job.entries)}")
        ((name, measured),) = job.measured.items()
        ((local, parts),) = measured.items()
        projected = [part.dw_q for part in parts if part.dw_q is not None]
        if len(projected) < len(parts):
            raise InputError(f"{capture.source}: no dW_Q: {'; '.join(job.notes)}")
        total = add_parts(projected)
        error = total.parts["delta"]
        if error is None:
            raise InputError(f"{capture.source}: delta's error is not known: capture O and dO")
        d, m = capture.head_dim, capture.metadata
        assert m.step is not None
        weight = capture.tensors["w_q"][...]
        own = local * d if len(weight) == capture.q_heads * d else self.head * d
        first, second = self.moments.read(m.step, slice(self.head * d, (self.head + 1) * d))
        matrices = Matrices(
            error=error.cpu(),
            full=None if total.observed is None else (total.observed - total.reference).cpu(),
            reference=total.reference.cpu(),
            weight=weight[own : own + d].double(),
            momentum=first,
            square=second,
        )
        misfits = [check.relative_error for check in job.assumptions.checks if not check.ok]
        return matrices, job.entries[name][0].diagnosis, max(misfits, default=None)


class Follower:
    """One kind of matrix X over the steps: the step before, and the beta_1-weighted sum of the past."""

    def __init__(self) -> None:
        self.previous: Tensor | None = None
        self.running: Tensor | None = None

    def add(self, x: Tensor, m: Matrices, first_weight: Tensor) -> Alignment:
        left, right = first_directions(x)
        w_left, w_right = m.weight_directions
        running = share = left_momentum = right_momentum = momentum = adam = None
        if m.momentum is not None and m.square is not None and m.momentum_directions is not None:
            m_left, m_right = m.momentum_directions
            left_momentum, right_momentum = absolute(left, m_left), absolute(right, m_right)
            momentum = cosine(x, m.momentum)
            adam = cosine(x, m.momentum / (m.square.sqrt() + 1e-8))
            if self.running is not None:
                running = cosine(self.running, m.momentum)
                past_left, past_right = first_directions(self.running)
                share = float((past_left @ m.momentum @ past_right).square() / m.momentum.square().sum())
        found = Alignment(
            weight=cosine(x, m.weight),
            past_change=cosine(x, m.weight - first_weight),
            momentum=momentum,
            adam=adam,
            top=cosine(x, torch.outer(w_left, w_right)),
            left_weight=absolute(left, w_left),
            right_weight=absolute(right, w_right),
            left_momentum=left_momentum,
            right_momentum=right_momentum,
            previous=None if self.previous is None else cosine(x, self.previous),
            running=running,
            momentum_share=share,
        )
        self.previous = x
        past = torch.zeros_like(x) if self.running is None else self.running
        self.running = BETA_1 * past + (1 - BETA_1) * x
        return found


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Signed, of two tensors of one shape; None where one of them is zero."""
    norms = float(a.norm() * b.norm())
    return float((a * b).sum()) / norms if norms else None


def absolute(a: Tensor, b: Tensor) -> float | None:
    found = cosine(a, b)
    return None if found is None else abs(found)


def first_directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """First left and right singular vectors of ``x`` [D, C]."""
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u[:, 0], v[0]


def spectrum(x: Tensor) -> Spectrum:
    values = torch.linalg.svdvals(x)
    whole = float(values.square().sum())
    share = float(values[0].square()) / whole if whole else None
    return Spectrum(whole**0.5, tuple(values[:_LISTED].tolist()), share)


@dataclass
class Series:
    """All steps of the head, as they are read: rows, E, G, delta's estimates and W; numbers of steps ``left_out``."""

    rows: list[StepRow] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)
    deltas: list[BiasEstimate] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)

    def add(self, row: StepRow, m: Matrices, delta: BiasEstimate) -> None:
        """One more step."""
        self.rows.append(row)
        self.errors.append(m.error)
        self.references.append(m.reference)
        self.deltas.append(delta)
        self.weights.append(m.weight)


def follow(reader: HeadSteps, captures: Sequence[Capture]) -> Iterator[tuple[StepRow, Matrices, BiasEstimate] | int]:
    """Step by step: its row, matrices and delta's estimate; of a step that has no error at all, its number."""
    errors, fulls, references = Follower(), Follower(), Follower()
    first_weight: Tensor | None = None
    for capture in captures:
        m, head, misfit = reader.read(capture)
        step, delta, dw_q = capture.metadata.step, head.bias.delta, head.propagation.dw_q
        assert step is not None
        kept = [t for t in (m.error, m.full, m.reference, m.weight, m.momentum, m.square) if t is not None]
        sound = all(bool(t.isfinite().all()) for t in kept) and bool(m.error.any()) and bool(m.reference.any())
        if not sound or delta is None or dw_q is None:
            yield step
            continue
        first_weight = m.weight if first_weight is None else first_weight
        error, reference = spectrum(m.error), spectrum(m.reference)
        full = None if m.full is None else spectrum(m.full)
        yield (
            StepRow(
                step=step,
                noise_factor=head.noise_factor,
                max_logit=None if head.figures is None else head.figures.max_logit,
                delta_mean=delta.mean,
                delta_standard_error=delta.standard_error,
                delta_t=delta.t,
                delta_p=delta.p_value,
                delta_mean_sigma=delta.mean_ulp,
                spectral_norm=float(torch.linalg.matrix_norm(m.weight, 2)),
                coherence=dw_q.coherence,
                coherence_null95=dw_q.coherence_null95,
                over_floor=None if head.propagation.dq is None else head.propagation.dq.over_noise_floor,
                share=error.norm / reference.norm,
                full_share=None if full is None else full.norm / reference.norm,
                error=error,
                full=full,
                reference=reference,
                momentum=None if m.momentum is None else spectrum(m.momentum),
                error_alignment=errors.add(m.error, m, first_weight),
                full_alignment=None if m.full is None else fulls.add(m.full, m, first_weight),
                reference_alignment=references.add(m.reference, m, first_weight),
                o_misfit=misfit,
            ),
            m,
            delta,
        )
