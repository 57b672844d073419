"""Query heads that share a key head, and what measuring them yields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from attn_diag.captures.capture import Capture
from attn_diag.head.key_gradients import KeyGradient
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.head.read import HeadTensors, NonFiniteCensus
from attn_diag.head.streaming import StreamedHead, stream_heads
from attn_diag.results.hardware import summary_of

# So many elements of q are measured at once; on a CPU more of them would leave its cache.
_ELEMENTS = {"cuda": 2**23, "cpu": 2**17}
# On CUDA each takes about 40 numbers in float64, and about as many again while it is measured: as many as half of the
# free memory holds, up to these, cost hardly more launches than few do.
_MOST_ELEMENTS, _BYTES = 2**24, 80 * 8
# On a CPU heads up to this size (T * D) leave other cores to others; each takes about 30 float64 tensors of it.
_ONE_CORE_ELEMENTS = 2**20


def takes_one_core(capture: Capture) -> bool:
    """Whether several such captures, each on a core of its own, are done sooner than one on all."""
    return capture.q_length * capture.head_dim <= _ONE_CORE_ELEMENTS


@dataclass(frozen=True)
class HeadGroup:
    """Query heads (of those selected) that share a key head, in one sequence."""

    kv_head: int
    batch: int
    heads: list[int]


def together(groups: Sequence[HeadGroup], capture: Capture, device: torch.device) -> list[Sequence[HeadGroup]]:
    """The groups whose heads are measured side by side; on a CPU as many sets of them as there are threads, or more."""
    count = max(1, _heads_at_once(capture, device) // (capture.q_heads // capture.kv_heads))
    if device.type == "cpu":
        # One set alone would have all threads in each small operation, which takes longer than on one.
        count = max(1, min(count, -(-len(groups) // torch.get_num_threads())))
    return [groups[i : i + count] for i in range(0, len(groups), count)]


def made_at_once(
    count: int,
    open_heads: Callable[[slice], list[StreamedHead]],
    measure: Callable[[Sequence[StreamedHead], slice], list[list[HeadMeasurement]]],
    capture: Capture,
    device: torch.device,
) -> Iterator[tuple[StreamedHead, list[HeadMeasurement]]]:
    """Opens heads, makes their passes and measures them, as many of them side by side as fit.

    Args:
        count: How many there are.
        open_heads: What opens some of them; it is told which.
        measure: What measures these, likewise.
        capture: Where they are.
        device: Where they are computed.
    """
    step = _heads_at_once(capture, device, _elements_that_fit(device))
    for i in range(0, count, step):
        passes = open_heads(slice(i, i + step))
        stream_heads(passes)
        found = measure(passes, slice(i, i + step))
        while passes:
            yield passes.pop(0), found.pop(0)


def jobs_at_once(capture: Capture, device: torch.device) -> int:
    """How many captures of this shape are measured together; on a CPU one, as more would leave its cache."""
    if device.type == "cpu":
        return 1
    return max(1, _heads_at_once(capture, device, _elements_that_fit(device)) // (capture.q_heads * capture.batch))


def key_heads_at_once(capture: Capture, device: torch.device) -> int:
    """Of how many query heads the gradients of k and v are judged together, which hold what was made of them."""
    return 1 if device.type == "cpu" else _heads_at_once(capture, device) // 2


def jobs_recognised(capture: Capture, device: torch.device) -> int:
    """How many captures of this shape are recognised together, by a head of each; on a CPU one."""
    return 1 if device.type == "cpu" else _heads_at_once(capture, device)


def read_together(
    capture: Capture, device: torch.device, batches: Sequence[int], heads: Sequence[int], observations: Sequence[str]
) -> HeadTensors | None:
    """The tensors of these heads and observations, where they are all measured at once; None: where they are not."""
    places = [(batch, head) for batch in batches for head in heads]
    if device.type == "cpu" or len(places) > _heads_at_once(capture, device):
        return None
    outputs = [capture.key(name, output) for name in observations for output in ("o", "lse", "delta", "dq")]
    return HeadTensors(capture, places, device, ("q", "k", "v", "do", *outputs))


def _elements_that_fit(device: torch.device) -> int | None:
    """How many elements of q the free memory of a GPU holds; None: not asked."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    return min(_MOST_ELEMENTS, max(_ELEMENTS["cuda"] // 8, free // (2 * _BYTES)))


def _heads_at_once(capture: Capture, device: torch.device, elements: int | None = None) -> int:
    """``elements``: so many of q at once; None: as many as are few on the device."""
    of_head = max(capture.q_length, capture.k_length) * capture.head_dim
    return max(1, (elements or _ELEMENTS["cuda" if device.type == "cuda" else "cpu"]) // max(of_head, 1))


@dataclass
class GroupMeasurement:
    """What measuring a group yields, by observation."""

    group: HeadGroup
    parts: dict[str, list[HeadMeasurement]] = field(default_factory=dict)
    key_sums: dict[str, dict[str, KeyGradient]] = field(default_factory=dict)
    broken_keys: dict[str, dict[str, int]] = field(default_factory=dict)
    """observation -> dk or dv -> keys with NaN or Inf in it."""
    census: NonFiniteCensus = field(default_factory=NonFiniteCensus)


def dq_error(part: HeadMeasurement) -> float:
    """How far dQ is off, or is predicted to be; by which ``severity`` ranks heads of one verdict."""
    found = None if part.dq is None else part.dq.result()
    error = (found.relative_error or found.predicted_relative_error or 0.0) if found else 0.0
    return math.inf if math.isnan(error) else error


def captured_backend(capture: Capture) -> str:
    """Where a capture was made, in words."""
    m = capture.metadata
    summary = summary_of(m.hardware) if m.hardware else None
    where = f"captured on {m.device}" if m.device else "captured, device not stated"
    return where if summary is None else f"{where} ({summary})"
