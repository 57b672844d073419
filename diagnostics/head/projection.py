"""How dW_Q follows from dQ in a capture: directly where q = x w_q^T, else pulled back through what lies between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.documents import Document
from attn_diag.head.other_documents import joined
from attn_diag.head.pullback.fit import KINDS, Kind, MapFit, Verified, bias_alone, measure
from attn_diag.head.pullback.jacobian import Formats, MapRows, Pullback
from attn_diag.head.pullback.rotation import ALL_ROWS, half_ulp_square
from attn_diag.head.read import read_float64
from attn_diag.reference import FloatFormat, Rows, format_of
from attn_diag.results.wording import percent

# q = x w_q^T in BF16 leaves about half a percent; RoPE, QK-norm or a bias in between leaves of the order of 1.
_TOLERANCE = 0.05
# Heads that what they share is measured on; all heads are tested.
_MEASURED_HEADS = 8
# Heads whose map is kept while their documents are gone through.
_KEPT_HEADS = 8


@dataclass(frozen=True)
class HeadProjection:
    """One head of one sequence: dW_Q = sum over rows of pull(dQ)_t (x) x_t, and its errors likewise.

    ``x`` [Tq, C] float64; ``pullback`` None where q = x w_q^T.
    """

    x: Tensor
    pullback: Pullback | None = None
    first: int = 0
    """Of a document among others: which of ``pullback``'s rows is its first."""

    def pull(self, errors: Tensor, rows: Rows = ALL_ROWS) -> Tensor:
        """``errors`` of dQ, [n, D] float64 of the given ``rows``, as errors of the projection's output."""
        if self.pullback is None:
            return errors
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self.x))
            return self.pullback(errors, slice(self.first + start, self.first + stop))
        places = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        return self.pullback(errors, places + self.first)


@dataclass(frozen=True)
class Projection:
    """Whether dW_Q follows from dQ, and how. ``note``: why not, or what lies between; None for nothing."""

    note: str | None
    _reader: _Reader | None = None
    _fits: dict[int, MapFit] = field(default_factory=dict)
    _documents: tuple[Document, ...] | None = None
    _pullbacks: dict[int, Pullback] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether dW_Q follows."""
        return self._reader is not None

    def head(self, batch: int, head: int) -> HeadProjection | None:
        """Of one of the heads and batch items that were looked at; None where dW_Q does not follow."""
        if self._reader is None:
            return None
        own = None if self._documents is None else self._documents[batch].rows
        item = batch if own is None else 0
        x, fit = self._reader.x(item), self._fits.get(item)
        x, first = (x, 0) if own is None else (x[own], own.start)
        if fit is None:
            return HeadProjection(x)
        pullback = fit.shared or self._pullbacks.get(head) or fit.of_head(self._reader.rows(item, head))
        if own is not None and fit.shared is None:
            # Of all documents at once, and these follow each other.
            if len(self._pullbacks) >= _KEPT_HEADS:
                self._pullbacks.clear()
            self._pullbacks[head] = pullback
        return HeadProjection(x, pullback, first)


def find_projection(capture: Capture, batches: Sequence[int], heads: Sequence[int], device: torch.device) -> Projection:
    """Look at what lies between the projection and the attention in these heads and batch items.

    q = x w_q^T, or that plus a bias, is seen in the forward alone. RoPE and QK-norm need dq and ``dq_pre`` of some
    observation: they are a property of the model, whatever kernel was observed. Of packed documents, many of which are
    too short to show it, all rows are looked at together.
    """
    if capture.documents is None:
        return _find(capture, batches, heads, device)
    return replace(_find(joined(capture), [0], heads, device), _documents=capture.documents)


def _find(capture: Capture, batches: Sequence[int], heads: Sequence[int], device: torch.device) -> Projection:
    if "x" not in capture.tensors or "w_q" not in capture.tensors:
        return Projection("dW_Q: not computed, x or w_q was not captured")
    reader = _Reader(capture, device)
    search = _Search(reader, batches, heads)
    misfit = reader.misfit(batches, heads)
    plain = misfit <= _TOLERANCE
    if plain and (reader.observation is None or search.same_gradient()):
        return Projection(None, reader)
    tried = []
    for kind in KINDS if reader.observation is not None else (None,):
        if kind is not None and kind.rotated and capture.head_dim < 2:  # a pair takes two
            continue
        found = search.try_kind(kind)
        if found.holds:
            return Projection(found.note, reader, found.fits)
        tried.append(found.failure)
    if plain:
        gap = f"q is x w_q^T (up to {percent(misfit, '.1f')}), but dq_pre is not dq"
    else:
        gap = f"q is not x w_q^T (off by {percent(misfit, '.0f')}): RoPE, QK-norm or a bias lies between"
    hint = "" if reader.observation is not None else "; capture dq_pre (and dq) to see through RoPE and QK-norm"
    return Projection(f"dW_Q: not computed, {gap}; tried: {'; '.join(tried)}{hint}")


class _Reader:
    """Reads the heads of a capture with all that the projection is about."""

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self._capture, self._device = capture, device
        self._weight = capture.tensors["w_q"][...].to(device).double()
        d = capture.head_dim
        self._first = 0 if len(self._weight) == capture.q_heads * d else capture.metadata.head_offset * d
        both = [name for name, outputs in capture.observations.items() if {"dq", "dq_pre"} <= set(outputs)]
        self.observation = both[0] if both else None
        self._working = format_of(capture.tensors["q"].dtype)
        pre = None if self.observation is None else capture.tensors[capture.key(self.observation, "dq_pre")]
        self.formats = Formats(self._working, self._working if pre is None else format_of(pre.dtype))
        self._last: tuple[int, Tensor] | None = None

    def x(self, batch: int) -> Tensor:
        """x of one sequence, [Tq, C] float64; the heads of a sequence share it."""
        last = self._last  # another thread may replace it
        if last is None or last[0] != batch:
            self._last = last = batch, self._capture.read_x(batch).to(self._device).double()
        return last[1]

    def number(self, head: int) -> int:
        """The model's number of a head."""
        return head + self._capture.metadata.head_offset

    def weight(self, head: int) -> Tensor:
        """w_q of one head, [D, C] float64."""
        d = self._capture.head_dim
        return self._weight[self._first + head * d : self._first + (head + 1) * d]

    def misfit(self, batches: Iterable[int], heads: Sequence[int]) -> float:
        """||q - x w_q^T|| / ||q|| over these heads and batch items; infinite where q is 0."""
        wrong, right = 0.0, 0.0
        for batch in batches:
            x = self.x(batch)
            for head in heads:
                q = self._read("q", batch, head)
                projected = x @ self.weight(head).T
                finite = q.isfinite().all(1) & projected.isfinite().all(1)
                wrong += float((q - projected)[finite].square().sum())
                right += float(q[finite].square().sum())
        return math.sqrt(wrong / right) if right else math.inf

    def rows(self, batch: int, head: int) -> MapRows:
        """One head of one sequence."""
        x, w, tensors = self.x(batch), self.weight(head), self._capture.tensors
        found = {"q": self._read("q", batch, head), "y": x @ w.T}
        found["y_variance"] = _product_variance(x, w, self._working, (tensors["x"].dtype, tensors["w_q"].dtype))
        if self.observation is not None:
            for output in ("dq", "dq_pre"):
                found[output] = self._read(self._capture.key(self.observation, output), batch, head)
        usable = torch.stack([t.isfinite().all(1) for t in found.values()]).all(0)
        return MapRows(usable=usable, **{name: t.where(usable[:, None], 0.0) for name, t in found.items()})

    def _read(self, name: str, batch: int, head: int) -> Tensor:
        tensor = read_float64(self._capture, name, batch, head, self._device)
        assert tensor is not None
        return tensor


# Sums of K products in fp32: sqrt(K) u per term (Higham & Mary, SIAM J. Sci. Comput. 41, 2019), and four times that
# because tensor cores truncate: measured on an H200, -190 u at K = 4096 and -28 u at K = 1024.
_SUM_ERROR = 4.0


def _product_variance(x: Tensor, w: Tensor, working: FloatFormat, given: tuple[torch.dtype, torch.dtype]) -> Tensor:
    """Squares of the largest errors of x w^T in the model, before its result is rounded; [T, D].

    ``x`` [T, C], ``w`` [D, C] float64; ``given``: their dtypes in the capture. Where one is wider than the working
    format, autocast may have rounded it.
    """
    unit = torch.finfo(torch.float64 if working.name == "fp64" else torch.float32).eps / 2
    variance = (x.abs() @ w.abs().T).mul_(_SUM_ERROR * math.sqrt(x.shape[1]) * unit).square_()
    if format_of(given[0]).precision > working.precision:
        variance += half_ulp_square(x, working) @ w.square().T
    if format_of(given[1]).precision > working.precision:
        variance += x.square() @ half_ulp_square(w, working).T
    return variance


@dataclass(frozen=True)
class _Tried:
    """A kind of map: its fits by batch item, and the head that agrees worst (the first that fails, if one does)."""

    fits: dict[int, MapFit]
    words: str
    worst: Verified | None
    where: str

    @property
    def holds(self) -> bool:
        return self.worst is not None and self.worst.holds

    @property
    def note(self) -> str:
        assert self.worst is not None
        found = f"dW_Q: between projection and attention: {self.words}, "
        if self.worst.backward is None:
            return f"{found}seen in the forward ({self.worst.forward})"
        return f"{found}verified on dq_pre: {self.worst.backward}, and on q: {self.worst.forward}"

    @property
    def failure(self) -> str:
        if self.worst is None:
            return f"{self.words}: {self.where}"
        which, agreement = self.worst.worst
        return f"{self.words} ({which} of {self.where}: {agreement})"


class _Search:
    """Tries kinds of maps on some heads and batch items."""

    def __init__(self, reader: _Reader, batches: Sequence[int], heads: Sequence[int]) -> None:
        self._reader, self._batches, self._heads = reader, batches, heads
        # Of one batch item: the heads that what they share is measured on.
        self._sample: tuple[int, dict[int, MapRows]] | None = None

    def same_gradient(self) -> bool:
        """Whether dq_pre is dq in every head."""
        plain, places = self._bias_alone(), product(self._batches, self._heads)
        found = (plain.verify(self._rows(batch, head), self._reader.formats) for batch, head in places)
        return all(verified.backward is None or verified.backward.holds for verified in found)

    def try_kind(self, kind: Kind | None) -> _Tried:
        """Measure, then test every head; None: a bias, without dq_pre. Stops at the first head that fails."""
        fits: dict[int, MapFit] = {}
        worst: tuple[Verified, str] | None = None
        words = ""
        for batch in self._batches:
            fit = self._bias_alone() if kind is None else self._measure(kind, batch)
            if fit is None:
                assert kind is not None
                reason = f"no head of batch item {batch} has the {kind.min_rows} rows it takes, and a gradient"
                return _Tried({}, kind.words, None, reason)
            fits[batch], words = fit, fit.words
            for head in self._heads:
                found = fit.verify(self._rows(batch, head), self._reader.formats)
                of_batch = f", batch item {batch}" if len(self._batches) > 1 else ""
                place = f"head {self._reader.number(head)}{of_batch}"
                if worst is None or found.worst[1].ratio > worst[0].worst[1].ratio:
                    worst = found, place
                if not found.holds:
                    return _Tried(fits, fit.kind.words, found, place)
        assert worst is not None
        return _Tried(fits, words, *worst)

    def _bias_alone(self) -> MapFit:
        weight = self._reader.weight(self._heads[0])
        return bias_alone(len(weight), weight.device)

    def _measure(self, kind: Kind, batch: int) -> MapFit | None:
        """What the heads share; None where no head has rows enough."""
        if self._sample is None or self._sample[0] != batch:
            self._sample = batch, self._first_with_gradient(batch)
        sample = [rows for rows in self._sample[1].values() if int(rows.usable.sum()) >= kind.min_rows]
        return measure(kind, sample, self._reader.formats) if sample else None

    def _first_with_gradient(self, batch: int) -> dict[int, MapRows]:
        found: dict[int, MapRows] = {}
        for head in self._heads:
            rows = self._reader.rows(batch, head)
            assert rows.dq is not None
            assert rows.dq_pre is not None
            if bool(rows.dq.any()) and bool(rows.dq_pre.any()):
                found[head] = rows
            if len(found) == _MEASURED_HEADS:
                break
        return found

    def _rows(self, batch: int, head: int) -> MapRows:
        known = self._sample[1] if self._sample is not None and self._sample[0] == batch else {}
        return known[head] if head in known else self._reader.rows(batch, head)
