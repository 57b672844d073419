"""What O's bits say of scales and roundings, said of LSE and of the gradients that follow from O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from attn_diag.analyses.verdicts.words import without_too_few
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.head.quality import LOSSY, QuantitySample
from attn_diag.head.unfused import OF_BACKWARD, WORDS
from attn_diag.results.quality import Pattern, Quantity, QuantityVerdict

# A change of q or k, in words.
_OF_SCORES = re.compile(r"\b[qk]\b")


def known_by_bits(
    sample: QuantitySample, quantity: Quantity, coarse: str | None, parts: Sequence[HeadMeasurement]
) -> QuantitySample:
    """The sample with what O's bits show as O's site, whatever else leaves an error like it.

    Attention that is not fused is then no gradient's site either; what a backward makes P of still is. dV, which
    plain torch casts as a fused kernel of the same scores does, has the site of the head's other outputs.

    Args:
        sample: Of O or of a gradient.
        quantity: Which.
        coarse: What the recipe rounds that has O's bits, in words (``coarse_words``); None: nothing, or none has them.
        parts: Of the head in each sequence.
    """
    if sample.site in ("scores", "normalised") and quantity == "dv":
        sites = (p.quality[q].site for q in ("o", "dq") for p in parts if q in p.quality)
        # Fused kernels drop a P out before or after its cast.
        alone, others = ("scores", {"scores"}) if sample.site == "scores" else (None, {"scores", "dropout_factor"})
        sample = replace(sample, site=next((s for s in sites if s in WORDS.keys() - others), alone))
    if coarse is None or (quantity != "o" and (sample.site not in WORDS or sample.site in OF_BACKWARD)):
        return sample
    return replace(sample, site=coarse if quantity == "o" else None)


def with_scales(verdict: QuantityVerdict, parts: Sequence[HeadMeasurement]) -> QuantityVerdict:
    """LSE's verdict, with what L itself shows of k's mean in a head's sequences ``parts``, else with O's bits.

    Where k alone is quantised otherwise, L may show it first.
    """
    own = next((p.effects["lse"].scales for p in parts if "lse" in p.effects and p.effects["lse"].scales), "")
    if verdict.quantity == "lse" and own and verdict.answer != "nonfinite":
        pattern = Pattern("scale", f"as where {own}")
        words = f"{verdict.words.removesuffix('.')}, {pattern.words}."
        return replace(verdict, words=words, patterns=(pattern, *verdict.patterns))
    scales = next((p.quality["o"].scales for p in parts if "o" in p.quality and p.quality["o"].scales), "")
    if verdict.quantity != "lse" or verdict.answer not in ("wrong", "lossy") or not _OF_SCORES.search(scales):
        return verdict
    pattern = Pattern("scale", f"O has the bits of a kernel where {scales}")
    return replace(verdict, words=f"{verdict.words} {pattern.words}.", patterns=(*verdict.patterns, pattern))


def with_proven_scale(found: Sequence[QuantityVerdict]) -> list[QuantityVerdict]:
    """The head's verdicts, ``lossy`` where the bits of O prove a scale or rounding that the declared recipe has not.

    The recipe is then what the kernel would give without it on these inputs, not one of many sound kernels: a factor
    needs no interval, however few rows carry it.

    Args:
        found: Those of one head.
    """
    proven = next((p for v in found if v.quantity == "o" for p in v.patterns if p.kind == "scale"), None)
    if proven is None:
        return list(found)

    def judged(v: QuantityVerdict) -> QuantityVerdict:
        follows = v.quantity == "o" or (v.quantity == "lse" and bool(_OF_SCORES.search(proven.words)))
        follows |= any(p.kind == "forward" for p in v.patterns)
        if v.answer != "undecided" or (v.factor or 0.0) <= LOSSY or not follows:
            return v
        patterns = (proven, *(p for p in v.patterns if p != proven))
        words = without_too_few(v.words.removesuffix("."))
        words = f"{words}; the bits of O prove the cause, so that no interval is needed."
        return replace(v, answer="lossy", words=words, patterns=patterns, factor_ci95=None)

    return [judged(v) for v in found]
