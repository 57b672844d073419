"""A quantity judged rank by rank: one rank's kernel that is worse is lost among many that are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attn_diag.analyses.verdicts.quality import judge_quantity, worst
from attn_diag.captures.metadata import Metadata
from attn_diag.head.quality import QuantitySample
from attn_diag.results.quality import QuantityVerdict

_GRAVE = ("nonfinite", "wrong", "lossy")


def judge_ranks(
    verdict: QuantityVerdict, samples: Sequence[QuantitySample], batches: Sequence[int], metadata: Metadata, summed: int
) -> QuantityVerdict:
    """The verdict, or that of the worst rank where only some of several ranks are at fault; it says which.

    Args:
        verdict: Of all sequences.
        samples: One a sequence.
        batches: The batch item of each; ``metadata`` says which rank each comes from, if the capture was merged.
        metadata: Of the capture.
        summed: See ``judge_quantity``.
    """
    owners = metadata.extra.get("rank_of_items", "").split(",")
    if len(set(owners)) < 2 or len(samples) != len(batches) or verdict.answer == "nonfinite":
        return verdict
    places: dict[str, list[int]] = {}
    for place, batch in enumerate(batches):
        places.setdefault(owners[batch], []).append(place)
    alone = {
        rank: judge_quantity(verdict.quantity, [samples[i] for i in own], [batches[i] for i in own], summed=summed)
        for rank, own in places.items()
    }
    bad = {rank: found for rank, found in alone.items() if found.answer in _GRAVE}
    if not bad or len(bad) == len(alone):
        return verdict
    named = f"rank {', '.join(bad)} alone"
    if verdict.answer in _GRAVE:
        return replace(verdict, words=f"{named}: {verdict.words}", ranks=tuple(bad))
    found = worst(list(bad.values()))
    return replace(found, words=f"{named}: {found.words}", ranks=tuple(bad))
