"""Layers that are measured as one: on a GPU the number of operations, not their size, is what takes time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from attn_diag.watching.monitoring.rows import TEMPORARIES, heads_at_once
from attn_diag.watching.monitoring.sample import Sample

# A layer's number and its module's name.
Key = tuple[int, str | None]
_MOST_TEMPORARIES = 2**30
_Of = TypeVar("_Of")


def alike(those: Iterable[_Of], likeness: Callable[[_Of], object]) -> list[list[_Of]]:
    """Those of equal likeness together, in order."""
    found: dict[object, list[_Of]] = defaultdict(list)
    for one in those:
        found[likeness(one)].append(one)
    return list(found.values())


def kind(tensor: Tensor | None) -> object:
    """What tensors that are stacked have in common."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def stacks(samples: Mapping[Key, Sample], past: Mapping[Key, Tensor]) -> Iterator[tuple[list[Key], int]]:
    """Layers to be measured together, and how many bytes of temporaries that may take."""
    for keys in alike(samples, lambda key: (samples[key].likeness, kind(past.get(key)))):
        first = samples[keys[0]]
        temporaries = _temporaries(first.q.device)
        many = max(1, heads_at_once(first, temporaries) // first.k.shape[1])
        for start in range(0, len(keys), many):
            yield keys[start : start + many], temporaries


def _temporaries(device: torch.device) -> int:
    """Bytes for what a measurement at the end of a step computes: no more than the step itself has given back.

    So a run needs no more memory than without, but for what is sampled. At least 64 MB, at most 1 GiB.
    """
    if device.type != "cuda":
        return TEMPORARIES
    given_back = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    # A measurement takes up to 2.5 times what it counts.
    return max(TEMPORARIES, min(given_back // 4, _MOST_TEMPORARIES))
