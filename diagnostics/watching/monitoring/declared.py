"""Attention that is declared to run below 16 bits, under the monitor: a call is judged as ``inspect`` judges a capture.

Sixteen draws of the declared recipe cost more than a training step, so of each layer some heads are looked at, in two
checks on end, which an alarm takes; then the next ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from attn_diag.errors import InputError
from attn_diag.watching.live.call import AttentionCall, Part
from attn_diag.watching.monitoring.record import LayerCheck
from attn_diag.watching.monitoring.stacks import Key
from attn_diag.watching.monitoring.whole_heads import WholeHeads

# Scores of a layer that are looked at in one check: two heads of 256 rows; one group of heads at least.
_MOST = 2**17


class DeclaredLayers:
    """The calls of a model whose attention is declared to be a recipe below 16 bits.

    Args:
        recipe: Its name.
        sequences: How many of a batch are looked at.
        level: Significance of the tests of means in one check.
    """

    def __init__(self, recipe: str, sequences: int, level: float) -> None:
        self._recipe, self._sequences, self._level, self._checks = recipe, sequences, level, 0

    def sample(self, call: AttentionCall) -> WholeHeads:
        """Copy the heads of a call whose turn it is."""
        (heads, rows), groups = call.q.shape[1:3], call.k.shape[1]
        group = heads // groups
        few = max(1, min(groups, _MOST // (rows * call.k.shape[2] * group)))
        first = min(self._checks // 2 % -(-groups // few) * few, groups - few)
        part = Part(range(first * group, (first + few) * group), range(self._sequences))
        return WholeHeads.of(call, part, declared=self._recipe)

    def judge(self, samples: Mapping[Key, WholeHeads]) -> tuple[list[LayerCheck], list[str]]:
        """What the samples of one check show, and why others show nothing."""
        self._checks += 1
        found, unknown = [], []
        for key, sample in samples.items():
            try:
                # Each alone, so that one that cannot be judged does not cost the others; the level is shared out.
                found.append(sample.judge(key, self._level / len(samples)))
            except InputError as error:
                unknown.append(str(error))
        return found, unknown
