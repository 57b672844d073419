"""What is kept of one observation of one head and sequence once it is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_diag.head.figure_sums import FigureSums
from attn_diag.head.gradient_sums import GradientSums
from attn_diag.head.key_gradients import KeyTerms
from attn_diag.head.propagation import GradientParts
from attn_diag.head.quality import QuantitySample
from attn_diag.head.row_effect import RowEffect
from attn_diag.head.sink_gradients import SinkTerms
from attn_diag.results.diagnosis import Certificate, DeltaRounding
from attn_diag.statistics.means import SignedErrors

CutOff = Literal["", "operands", "probs"]


@dataclass(frozen=True)
class RepeatSums:
    """Rows with a repeated maximum by one definition, and the largest multiplicity; adds over heads."""

    rows: int
    largest: int


@dataclass
class HeadMeasurement:
    """One observation of one head and sequence, reduced to what is linear in T."""

    batch: int
    """Index of the batch item."""
    head: int
    """Index of the head in the capture."""
    rows: npt.NDArray[np.int64]
    """[n], the usable ones: finite, with at least one key."""
    rows_fully_masked: int
    """Rows without a key."""
    rows_unknown: int
    """Rows whose truth float64 cannot tell."""
    rows_nonfinite: int
    """Rows left out because of NaN or Inf in what goes in or comes out."""
    rows_eligible: int
    """Usable rows with several keys."""
    repeats: dict[str, RepeatSums | None]
    """Repeated row maxima, by definition."""
    figures: FigureSums
    """Sums for the figures."""
    tested: npt.NDArray[np.int64]
    """[m], those of ``rows`` that no earlier sequence has too."""
    top_key: npt.NDArray[np.int64]
    """[m], the argmax key of each of ``tested``: of which key it is (``SharedRows.keys``); without that its index."""
    alike: npt.NDArray[np.int64]
    """[m], of each of ``tested`` the first row with the same q and dO: see ``rows_alike``."""
    with_gradient: npt.NDArray[np.bool_] | None = None
    """[m], where dO is not 0; None without dO."""
    repeated: int = 0
    """Usable rows that are left out because an earlier sequence has them too."""
    source: int | None = None
    """The sequence that has most of these."""
    nearly_uniform: bool = False
    """Whether attention is: in half of the rows the mean of exp(S - m) over the visible keys is at least 1/2."""
    swamped: tuple[int, int] | None = None
    """Rows wholly swamped, and swamped elements, of the eligible rows; None without an O."""
    bit_identical: bool | None = None
    """Whether O is RN(O_ref); None without an O or rows."""
    in_doubt: int = 0
    """Elements of RN(O_ref) that the reference's error could change."""
    broken_outputs: dict[str, int] = field(default_factory=dict)
    """Rows of each output with NaN or Inf where the truth is known; only outputs with some."""
    finite_beside_nan: int = 0
    """Rows of a captured O that is finite though q holds NaN there, or a key it sees NaN (or v Inf)."""
    without_keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of o and dq, rows that see no key: with NaN or Inf, and with other numbers than 0; only outputs with some."""
    errors: dict[str, SignedErrors] = field(default_factory=dict)
    """By quantity; arrays follow ``tested``, where dO matters those ``with_gradient`` alone."""
    reference_bounds: dict[str, float] = field(default_factory=dict)
    """What the reference's own error can have added to the sum of each of ``errors``."""
    certificate: Certificate | None = None
    """The oracle's comparison with the reference, where it was asked for."""
    delta_source: str | None = None
    """captured, or from_o; None: neither."""
    delta_rounding: DeltaRounding | None = None
    """The rounding of a captured delta itself; None unless O was captured too."""
    noise: npt.NDArray[np.float64] | None = None
    """delta's squared error over its noise floor's, by row with a gradient."""
    conditioning: tuple[float, float] | None = None
    """||alpha diag(delta) P K||^2 and ||dQ||^2; None without dO."""
    dq: GradientSums | None = None
    """None where it cannot be known."""
    dw_q: GradientParts | None = None
    """None where it cannot be known."""
    atoms: tuple[Tensor, Tensor] | None = None
    """The factors of dW_Q's rank-1 atoms of delta's error: its part of dQ, pulled back, and x."""
    keys: KeyTerms | None = None
    """What is kept of the backward for dK and dV."""
    quality: dict[str, QuantitySample] = field(default_factory=dict)
    """O and dQ beside a well-rounded kernel's."""
    sink: SinkTerms | None = None
    """Of its sink's gradient; None without one."""
    effects: dict[str, RowEffect] = field(default_factory=dict)
    """LSE and a captured delta, by what their errors make of dQ."""
    mean_sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """By test, observed and of what it is held against, see the function of this name."""
    cut_off: CutOff = ""
    """What of its products was cut off to TF32, by O's errors; empty: nothing, or it is not known."""
