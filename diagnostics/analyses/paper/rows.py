"""One head of one sequence as the figures need it: P K, delta's error, x and O's error, row by row, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.projection import HeadProjection, Projection, find_projection
from attn_diag.head.read import HeadInputs, NonFiniteCensus, read_float64, read_head
from attn_diag.head.truth import head_truth
from attn_diag.reference import BoundCollector


@dataclass(frozen=True)
class HeadRows:
    """The rows of one sequence that are finite and see a key: ``rows`` [n] int64; all else float64, row by row.

    ``probs_k`` [n, D]: (P K)_t, with softcap P o (1 - (S/c)^2) K; ``delta_error`` [n] = observed - reference; ``do``,
    ``o_error`` [n, Dv], None where O was not captured; ``x`` [n, C]; ``left`` [n, D]: delta's error of dQ,
    -alpha Delta_delta_t (P K)_t, pulled back to the projection's output, so that its outer products with x add up to
    the error of dW_Q; None where that does not follow.
    """

    batch: int
    rows: Tensor
    probs_k: Tensor
    delta_error: Tensor
    do: Tensor
    o_error: Tensor | None
    x: Tensor | None
    left: Tensor | None


class HeadReader:
    """Reads head ``head`` (counted within the capture) of every sequence, one at a time."""

    def __init__(self, capture: Capture, observation: str, head: int, device: torch.device) -> None:
        self._capture, self._observation, self._head, self._device = capture, observation, head, device
        self._projection: Projection = find_projection(capture, range(capture.batch), [head], device)

    @property
    def note(self) -> str | None:
        """Why dW_Q does not follow from dQ, or what lies between them; None for nothing."""
        return self._projection.note

    def __iter__(self) -> Iterator[HeadRows]:
        for batch in range(self._capture.batch):
            yield self._read(batch)

    def _read(self, batch: int) -> HeadRows:
        c = self._capture
        inputs = read_head(c, batch, self._head, self._device, NonFiniteCensus())
        head = inputs.head
        assert head.do is not None
        bounds = BoundCollector(head)
        truth = head_truth(inputs, self._projection.head(batch, self._head), bounds.add, gradient_sums=True)
        reference, probs_k, projection = truth.reference, truth.probs_k, truth.projection
        assert reference.delta is not None
        assert probs_k is not None
        out, delta = self._observed("o", batch), self._observed("delta", batch)
        if delta is None:
            assert out is not None, "delta's error was measured, so delta or O is there"
            delta = (head.do * out).sum(1)
        usable = _usable(inputs, out, delta)
        usable &= ~reference.fully_masked & bounds.bounds(reference).known_rows
        rows = usable.nonzero()[:, 0]
        delta_error = (delta - reference.delta)[rows]
        x, left = self._x(batch, projection), None
        if projection is not None:
            error = probs_k[rows] * (-head.scale * delta_error)[:, None]
            left = projection.pull(error, rows)
        return HeadRows(
            batch=batch,
            rows=rows,
            probs_k=probs_k[rows],
            delta_error=delta_error,
            do=head.do[rows],
            o_error=None if out is None else (out - reference.out)[rows],
            x=None if x is None else x[rows],
            left=left,
        )

    def _x(self, batch: int, projection: HeadProjection | None) -> Tensor | None:
        if projection is not None:
            return projection.x
        found = self._capture.tensors.get("x")
        return None if found is None else found[batch].to(self._device).double().nan_to_num(0.0, 0.0, 0.0)

    def _observed(self, output: str, batch: int) -> Tensor | None:
        c = self._capture
        return read_float64(c, c.key(self._observation, output), batch, self._head, self._device)


def _usable(inputs: HeadInputs, out: Tensor | None, delta: Tensor) -> Tensor:
    usable = ~inputs.unusable & delta.isfinite()
    return usable if out is None else usable & out.isfinite().all(1)
