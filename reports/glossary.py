"""The words of the reports, each explained once: for the page's glossary, and docs/words.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    """A word and what it means, for a reader who has not read the paper."""

    key: str
    """Its address in a page."""
    name: str
    words: str
    """The explanation, in whole sentences."""
    also: tuple[str, ...] = ()
    """Other spellings by which a text means it."""
    alone: bool = False
    """Whether its name means it only where nothing stands beside it: a label, the heading of a column."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Everything that means it within a sentence."""
        return self.also if self.alone else (self.name, *self.also)


GROUPS: dict[str, tuple[Word, ...]] = {
    "Verdicts": (
        Word(
            "nonfinite",
            "NaN or Inf",
            "An output holds NaN or Inf where the mathematics is finite. The kernel, or what was captured of it, "
            "is broken there.",
            ("nonfinite", "not finite"),
        ),
        Word(
            "wrong",
            "wrong",
            "An output is off by more than any rounding could make: another mask, scale or layout, rows or keys "
            "left out, or a bug. Not a question of precision.",
            alone=True,
        ),
        Word(
            "unjudged",
            "mask or scale not as stated",
            "The output does not fit the mask, scale or layout that the capture states, but it fits others, or nothing "
            "at all could be compared. No verdict is given until that is corrected.",
        ),
        Word(
            "lossy",
            "lossy",
            "An output has more than 1.25 times the error of a well-rounded kernel: something inside is rounded "
            "more coarsely than it has to be.",
        ),
        Word(
            "biased",
            "biased",
            "The errors do not average out: their mean differs from zero by more than chance makes, and by more "
            "than correct rounding gives on these inputs. Such errors add up over rows and steps.",
            ("bias",),
        ),
        Word(
            "ill_conditioned",
            "ill-conditioned",
            "dQ is over 2 % off, and that of a well-rounded kernel on the same inputs is as far off: the head is "
            "fragile, the kernel is not to blame.",
            ("ill_conditioned",),
        ),
        Word(
            "undecided",
            "undecided",
            "There is too little data to say more: the output is neither clearly as good as a well-rounded "
            "kernel's nor clearly worse. No finding.",
        ),
        Word(
            "clean",
            "clean",
            "Everything that was captured is as good as a well-rounded kernel's, and no bias was found. Nothing "
            "is said of what was not captured.",
            alone=True,
        ),
    ),
    "Attention and its gradients": (
        Word(
            "scores",
            "scores",
            "S = scale · Q Kᵀ, masked: how well each query matches each key, before the softmax.",
            (
                "logit",
                "logits",
                "max logit",
            ),
        ),
        Word(
            "p_bar",
            "P̄",
            "exp(S − m), the weights before they are divided by their sum; m is the largest score of the row, so "
            "the weight of the best key is 1. Kernels round P̄ to 16 or 8 bits before they multiply it with V.",
        ),
        Word(
            "row_sum",
            "row sum",
            "l, the sum of P̄ over a row's keys, by which the output is divided at the end.",
            (
                "normaliser",
                "denominator",
            ),
        ),
        Word(
            "row_maximum",
            "row maximum",
            "m, the largest score of a query row. It is repeated where several keys share it: then several "
            "weights are exactly 1, which in coarse formats can give the errors of many rows one sign.",
            (
                "repeated maxima",
                "repeated maximum",
                "row maxima",
            ),
        ),
        Word(
            "lse",
            "LSE",
            "m + ln l, the log-sum-exp of a row's scores. The forward pass saves it, the backward pass makes the "
            "weights P of it again.",
        ),
        Word(
            "d_o",
            "dO",
            "The gradient that comes into the attention from above, with respect to its output O.",
        ),
        Word(
            "delta",
            "delta",
            "The sum of dO · O over the features of a row. The backward pass subtracts it from every dP, so an "
            "error of the stored O enters the gradients through it. It is how rounding of the forward pass "
            "reaches training.",
            (
                "delta's",
                "Δdelta",
            ),
        ),
        Word(
            "d_s",
            "dS",
            "P · (dP − delta): the gradient of the scores. Kernels round it to 16 bits before they multiply it "
            "with K and Q.",
            ("dP",),
        ),
        Word(
            "d_q",
            "dQ",
            "The gradient of the queries; dK and dV are those of keys and values. Training uses them to change "
            "the weights.",
            (
                "dK",
                "dV",
            ),
        ),
        Word(
            "dw_q",
            "dW_Q",
            "The gradient of the query projection's weights: dQ summed over all rows, each with its input. An "
            "error that has one direction in many rows survives this sum.",
        ),
        Word(
            "argmax_key",
            "top key",
            "The key with a row's largest score. Rows that share it often share its rounding error too, so they "
            "count as one group in a test.",
            (
                "argmax key",
                "argmax keys",
            ),
        ),
    ),
    "Errors and yardsticks": (
        Word(
            "error",
            "signed error",
            "What the kernel returned minus the float64 reference on the same inputs, with its sign: positive is "
            "too large.",
        ),
        Word(
            "reference",
            "float64 reference",
            "The same mathematics computed in 64 bits from the kernel's own inputs, with a proven bound on its "
            "own error.",
            (
                "reference ±",
                "reference's own error",
            ),
        ),
        Word(
            "ulp",
            "ulp",
            "The distance between neighbouring numbers of a format at a given size. One correct rounding is off "
            "by half of it at most.",
            ("ulps",),
        ),
        Word(
            "excess",
            "excess",
            "The error beyond what one correct rounding of the exact result makes. A kernel that rounds once, "
            "correctly, at the end has none.",
            ("beyond correct rounding",),
        ),
        Word(
            "counterfactual",
            "well-rounded kernel",
            "A counterfactual: the published recipe of this format (FlashAttention-2's) run on the same inputs. "
            "It shows what error these inputs leave to a good kernel.",
            (
                "counterfactual",
                "well-rounded",
                "well-rounded kernels",
            ),
        ),
        Word(
            "factor",
            "factor",
            "The error's root mean square over that of a well-rounded kernel on the same inputs. About 1 is as "
            "good; above 1.25 is lossy. Production kernels measure 0.93 to 1.07.",
            ("× well-rounded",),
        ),
        Word(
            "noise_floor",
            "noise floor",
            "The error of delta that one correct rounding of O makes in a row: no kernel that returns O in this "
            "format has less.",
            (
                "noise floors",
                "floors",
            ),
        ),
        Word(
            "noise_factor",
            "noise factor",
            "delta's error over the noise floor, root mean squares over the rows. 0.98 to 1.9 on production "
            "kernels in 16 bits (9 to 38 in FP32, whose sums round too); more means that something besides O's last "
            "rounding is coarse.",
        ),
        Word(
            "conditioning",
            "conditioning",
            "How much a relative error of delta grows on its way into dQ. 6 to 8 is ordinary; near one-hot rows "
            "it reaches 100, and then even correct rounding spoils dQ.",
        ),
        Word(
            "coherence",
            "coherence",
            "Whether the rows' errors point in one direction in the gradient. Around 0 they cancel; above the "
            "value for random signs they add up.",
        ),
        Word(
            "cancellation",
            "cancellation",
            "The length of the summed errors over the sum of their lengths: 1 if all point in one direction, near"
            " 0 if they cancel.",
        ),
        Word(
            "participation",
            "participation",
            "How many rows in effect carry the error.",
        ),
        Word(
            "swamped",
            "swamped",
            "The output equals one value of V exactly because all smaller contributions were lost in rounding.",
        ),
    ),
    "Chance": (
        Word(
            "p_value",
            "adjusted p",
            "How often chance alone would show a mean this large if the kernel were unbiased, made stricter for "
            "the number of tests in the run. Small values, below 0.01, speak for a bias.",
            (
                "adjusted p-value",
                "p-value",
                "p-values",
                "smallest p",
            ),
        ),
        Word(
            "family",
            "Benjamini-Hochberg family",
            "All primary tests of a run, adjusted together: many tests find something by chance, and the "
            "adjustment keeps the share of false findings at the level.",
        ),
        Word(
            "interval",
            "95 % interval",
            "The range in which the true value lies with 95 % confidence.",
        ),
        Word(
            "band",
            "99 % band",
            "A running sum of unbiased errors stays inside with probability 99 %.",
        ),
        Word(
            "n_eff",
            "n_eff",
            "How many independent rows, or groups of rows, in effect carry a test. Below 4 no test of a mean is "
            "decided.",
        ),
        Word(
            "detectable",
            "detectable",
            "The smallest mean that the test would find in four of five cases. A smaller bias may be there unseen.",
        ),
        Word(
            "t",
            "t",
            "The mean over its standard error: beyond about 3 in size, chance is unlikely.",
            alone=True,
        ),
    ),
    "Where an error comes from": (
        Word(
            "recipe",
            "recipe",
            "A list of what a kernel rounds, to which format and when, which can be run on the same inputs.",
            ("recipes",),
        ),
        Word(
            "site",
            "rounding site",
            "One place in a kernel where a number is rounded: the scores, P̄, the row sum, O, dS, …",
            (
                "rounding sites",
                "site",
            ),
        ),
        Word(
            "emulated",
            "emulated",
            "Computed by attn-diag as a recipe says, not captured from a kernel.",
            ("emulation",),
        ),
        Word(
            "observation",
            "observation",
            "What one kernel returned for these inputs: O, and what else was captured.",
            ("observations",),
        ),
        Word(
            "unexplained",
            "unexplained",
            "The part of a gradient's error that its known causes (delta, LSE, casts) do not make.",
        ),
        Word(
            "shapley",
            "Shapley",
            "A fair division of an error among several roundings: each one's mean effect over all orders in which"
            " they could be repaired.",
            ("Shapley shares",),
        ),
        Word(
            "sham",
            "sham",
            "A repair of a rounding that reaches nothing, as a control: it must not change the error.",
        ),
        Word(
            "bit_equal",
            "bit-equal",
            "The same in every bit. A recipe that reproduces nearly all elements so is how the kernel rounds.",
            (
                "bit-identical",
                "bit for bit",
            ),
        ),
        Word(
            "tile",
            "tile",
            "The block of keys that a kernel takes at a time; partial results of tiles are added in their order.",
            (
                "tiles",
                "key range",
            ),
        ),
    ),
}
"""The terms under their headings."""
TERMS = tuple(term for terms in GROUPS.values() for term in terms)


def document() -> str:
    """docs/words.md: the same in Markdown."""
    parts = ["# Words", "What the reports' words mean. Written from `reports/glossary.py`, which the pages show too."]
    for heading, terms in GROUPS.items():
        parts += [f"## {heading}", "\n".join(f"- **{term.name}**: {term.words}" for term in terms)]
    return "\n\n".join(parts) + "\n"
