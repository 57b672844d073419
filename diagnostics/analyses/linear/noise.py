"""Linear attention's errors: what they are held against besides a well-rounded kernel's, and their course."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.linear import LinearRun, Place
from attn_diag.reference import format_of, round_nearest_even
from attn_diag.results.linear import ChunkError
from attn_diag.results.quality import Answer
from attn_diag.results.wording import plural
from attn_diag.statistics.drift import FLAT_BAND_99
from attn_diag.statistics.mean_tests import mean_test, two_way

_NEAR, _CHUNK, _BLOCK = 17, 64, 16
# Steps of a point of O's error along the sequence.
_CURVE = 64
_FEWEST = 8
# A row stands out beyond so many times what the kernel leaves about it; one number a row needs more.
_ROW_LIMIT, _NUMBER_LIMIT = 8.0, 16.0
# How likely two errors agree by chance if that is to prove anything: some fifty sites are tried.
_AGREE = 1e-3


def cancelled(run: LinearRun, name: str, place: Place) -> Tensor | float:
    """The variance of a decay's gradient as kernels make it, from terms x o dx that cancel over a chunk; else 0.

    dg_t is the sum over the steps from t on of q o dq - k o dk (and a o da, b o db), each rounded to the format.

    Args:
        run: The capture's.
        name: The quantity.
        place: Where its head is in its tensor.
    """
    if name not in ("dg", "ddt"):
        return 0.0
    tensors, reference = run.capture.tensors, run.reference.values
    head, count = place[2], tensors["v"].shape[2]
    terms = []
    for x in ("q", "k", "a", "b"):
        if x in tensors and f"d{x}" in reference:
            own = head * tensors[x].shape[2] // count
            terms.append((tensors[x].to(run.device)[:, :, own].double() * reference[f"d{x}"][:, :, own]).square())
    total = torch.stack(terms).sum(0)
    by_channel = reference[name].ndim == 4
    total = total if by_channel else total.sum(2, keepdim=True)
    # Sums over the next steps, as many as a chunk has.
    steps = total.shape[1]
    ahead = torch.nn.functional.pad(total, (0, 0, 1, _CHUNK)).cumsum(1)
    found = (ahead[:, _CHUNK : _CHUNK + steps] - ahead[:, :steps]) * 4.0 ** -format_of(tensors["q"].dtype).precision / 3
    return found if by_channel else found[..., 0]


def with_rounded_decays(run: LinearRun, cause: str) -> LinearRun:
    """The call with its decays (``decay_step``), their logarithms, or both in the inputs' format, step by step."""
    capture = run.capture
    g, dtype = capture.tensors["g"].double(), capture.tensors["q"].dtype
    g = g if cause == "decay_step" else g.to(dtype).double()
    g = (g if cause == "log_decay_step" else g.exp().to(dtype).double().log()).float()
    names = ("do", "dfinal_state", "cu_seqlens")
    kept = capture.inputs | {n: capture.tensors[n] for n in names if n in capture.tensors}
    return LinearRun(replace(capture, tensors=kept | {"g": g}), run.device)


def near(rows: Tensor) -> Tensor:
    """Of each row the mean of those about it, or its own where that is more."""
    padded = torch.nn.functional.pad(rows[None, None], (_NEAR // 2, _NEAR // 2), mode="replicate")
    return torch.maximum(rows, torch.nn.functional.avg_pool1d(padded, _NEAR, 1)[0, 0])


def mean_away(excess: npt.NDArray[np.float64], block: int) -> tuple[float | None, float | None]:
    """The mean of errors away from zero over their root mean square, and its p-value (not adjusted).

    Args:
        excess: [rows, features]; what they share is clustered both ways.
        block: Rows whose errors share the state's.
    """
    rows, features = excess.shape
    blocks = np.arange(rows) // block
    if features < _FEWEST or blocks[-1] + 1 < _FEWEST or not excess.any():
        return None, None
    by_block = np.stack([np.bincount(blocks, column) for column in excess.T], 1)
    counts = np.bincount(blocks).astype(np.float64)
    one = mean_test(by_block.sum(1), counts * features, 0.01)
    other = mean_test(by_block.sum(0), np.full(features, float(rows)), 0.01)
    cells = np.array(
        [np.square(by_block).sum(), (by_block * counts[:, None]).sum(), np.square(counts).sum() * features]
    )
    test = two_way(one, other, cells, excess.size, 0.01)
    p = float(test.p_value)
    return float(test.mean) / float(np.sqrt(np.square(excess).mean())), p if math.isfinite(p) else None


def block_of(name: str) -> int:
    """Steps whose errors of a quantity hang together: a decay's gradient sums over its chunk."""
    return _CHUNK if name in ("dg", "ddt") else _BLOCK


def by_chance(error: Tensor, other: Tensor, block: int) -> bool:
    """Whether two errors of a head may agree by chance, as few numbers do, or many that are made of few.

    Their product has a mean of zero then: a t-test, features its clusters (of numbers a step, blocks of steps).

    Args:
        error: [rows, D], or [N, K, D].
        other: Likewise.
        block: Steps that share an error.
    """
    products = (error * other).flatten(0, -2) if error.ndim == 3 else (error * other).reshape(-1, 1)
    if products.shape[1] >= _FEWEST:
        sums = products.sum(0)
        sizes = torch.full_like(sums, len(products))
    else:
        index = torch.arange(len(products), device=products.device) // block
        sums = products.new_zeros(int(index[-1]) + 1).index_add_(0, index, products.sum(1))
        sizes = torch.bincount(index).double() * products.shape[1]
    if len(sums) < 2:
        return True
    return not float(mean_test(sums.cpu().numpy(), sizes.cpu().numpy(), 0.01).p_value) < _AGREE


def stands_out(squares: Tensor, yard: Tensor, width: int) -> Tensor:
    """Which rows are far beyond what a kernel leaves in those about them.

    Args:
        squares: [rows], of errors.
        yard: [rows], those of the kernel that they are held against.
        width: Numbers in a row.
    """
    limit = _ROW_LIMIT if width > 1 else _NUMBER_LIMIT
    return squares > limit**2 * near(yard)


def unusable(symbol: str, observed: Tensor, known: Tensor, sound: Sequence[Tensor]) -> tuple[Answer, str] | None:
    """The answer and its words where numbers are not finite, or the truth is not known; None: all are.

    Args:
        symbol: The quantity's name at the start of a sentence.
        observed: A head's.
        known: Where float64 knows the truth.
        sound: What well-rounded kernels return.
    """
    broken = int((~observed.isfinite() & known).sum())
    overflown = max((int((~x.isfinite()).sum()) for x in sound), default=0)
    if broken > 2 * overflown:
        return "nonfinite", f"{symbol} holds NaN or Inf in {plural(broken, 'element')} where the reference is finite."
    if broken or overflown:
        many = f"{symbol} holds NaN or Inf in {plural(broken, 'element')}, a well-rounded kernel's in {overflown}"
        return "undecided", f"{many}: the state leaves the range of fp32."
    if not known.all():
        return "undecided", f"{symbol}: float64 does not know the truth, the state grows too large."
    return None


def along(
    run: LinearRun, head: int, o: Tensor | None, sound: Tensor | None
) -> tuple[float | None, tuple[ChunkError, ...]]:
    """How far the running sum of O's errors gets from zero over its 99 % band, and O's error along the sequence.

    Args:
        run: The capture's.
        head: Its index.
        o: All heads'; None: not captured.
        sound: A well-rounded kernel's; None: not compared.
    """
    if o is None:
        return None, ()
    fmt, o = format_of(o.dtype), o.to(run.device)[:, :, head].double()
    true = run.reference.values["o"][:, :, head]
    error = o - true
    if not error.isfinite().all():
        return None, ()
    excess, sequences = o - round_nearest_even(true, fmt), run.capture.call.sequences
    walk = torch.cat([excess[b, steps].sum(1) for b, steps in sequences])
    band = FLAT_BAND_99 * float(walk.square().sum().sqrt())
    b, steps = max(sequences, key=lambda s: s[1].stop - s[1].start)
    other = None if sound is None else (sound[:, :, head] - true)[b, steps]
    points = []
    for start in range(0, steps.stop - steps.start, _CURVE):
        part = slice(start, start + _CURVE)
        size = float(true[b, steps][part].norm())
        points.append(
            ChunkError(
                start,
                float(error[b, steps][part].norm()) / size if size else None,
                float(other[part].norm()) / size if size and other is not None else None,
            )
        )
    return (float(walk.cumsum(0).abs().max()) / band if band else 0.0), tuple(points)
