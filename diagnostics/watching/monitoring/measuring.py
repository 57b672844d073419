"""The samples of one check become figures: layers that are alike together, with earlier directions, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_diag.watching.monitoring.figures import HeadMetrics, HeadSums
from attn_diag.watching.monitoring.metrics import head_sums
from attn_diag.watching.monitoring.reduction import LayerKey, Reduction, device_of
from attn_diag.watching.monitoring.sample import Sample
from attn_diag.watching.monitoring.stacks import Key, alike, kind, stacks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Weight of the newest check in the average of directions: about the last ten count.
_NEWEST = 0.1


class Measuring:
    """What measures a model's layers, check after check.

    Args:
        group: Ranks to add up over; None: all.
        warn: Is told in words what is left out.
    """

    def __init__(self, group: ProcessGroup | None, warn: Callable[[str], None]) -> None:
        self._past, self._warn = _PastDirections(), warn
        self._reduction = None if _alone(group) else Reduction(group)

    def forget(self) -> None:
        """Let go of what earlier checks left."""
        self._past.clear()

    def measure(
        self, samples: Mapping[Key, Sample], guarded: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    ) -> list[tuple[list[Key], HeadMetrics]]:
        """The figures, on the device. A collective: all ranks call it at every check, with the layers that they saw.

        Args:
            samples: Of the layers.
            guarded: Keeps failures from the caller; None: nothing is measured here.
        """
        done, left = dict[Key, HeadSums](), dict(samples)
        if guarded is not None:
            for keys, temporaries in stacks(left, self._past):
                # What fails here must not keep this rank from the collective.
                those = [left.pop(key) for key in keys]
                done |= guarded(self._summed)(keys, those, temporaries) or {}
        if self._reduction is not None:
            done = self._reduced(self._reduction, done)
        found: list[tuple[list[Key], HeadMetrics]] = []
        for keys in alike(
            done, lambda key: (kind(done[key].sums), kind(done[key].sketches), kind(self._past.get(key)))
        ):
            sums = HeadSums.joined([done[key] for key in keys])
            found.append((keys, sums.metrics(self._past.of(keys))))
            if sums.sketches is not None:
                self._past.remember(keys, sums.sketches[0])
        return found

    def _summed(self, keys: list[Key], those: list[Sample], temporaries: int) -> dict[Key, HeadSums]:
        alone = self._reduction is None
        sums = head_sums(Sample.stacked(those), self._past.of(keys), alone=alone, temporaries=temporaries)
        return dict(zip(keys, sums.split(len(keys)), strict=True))

    def _reduced(self, reduction: Reduction, done: dict[Key, HeadSums]) -> dict[Key, HeadSums]:
        names = {LayerKey.of(*key, sums): key for key, sums in done.items()}
        found = reduction.reduce({name: done[key] for name, key in names.items()}, device_of(done))
        if reduction.unknown:
            self._warn(f"layers that no rank had at the first check are left out: {sorted(reduction.unknown)}")
        return {names.get(name, (name.layer, name.module or None)): sums for name, sums in found.items()}


class _PastDirections(dict[Key, Tensor]):
    """Which way each layer's predicted errors of dW_Q pointed of late: averages of unit errors, [Hq, D, c]."""

    def of(self, keys: Sequence[Key]) -> Tensor | None:
        """Those of layers that all have one or have none, [L * Hq, D, c]."""
        past = [self[key] for key in keys if key in self]
        return torch.cat(past) if past else None

    def remember(self, keys: Sequence[Key], error: Tensor) -> None:
        """Average a check's ``error``, [L * Hq, D, c]."""
        length = torch.linalg.vector_norm(error, dim=(1, 2), keepdim=True)
        direction = torch.where((length > 0) & (length < torch.inf), error / length, 0.0)
        past = self.of(keys)
        if past is not None and past.shape == direction.shape:
            direction = past.lerp_(direction, _NEWEST)
        self.update(zip(keys, direction.chunk(len(keys)), strict=True))


def _alone(group: ProcessGroup | None) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    return torch.distributed.get_world_size(group) < 2
