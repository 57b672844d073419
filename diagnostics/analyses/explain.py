"""``attn_diag.explain``: a diagnosis of one head, in words.

Each paragraph says only what the diagnosis holds; what is None is said to be unknown.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePath

from attn_diag.analyses.verdicts.means import beyond_reference, excuse
from attn_diag.analyses.verdicts.verdict import DQ_ERROR_ABOVE, NOISY_ABOVE, ROUNDS_ELSEWHERE_ABOVE
from attn_diag.errors import InputError
from attn_diag.results.diagnosis import (
    BiasEstimate,
    CaptureDiagnosis,
    Diagnosis,
    GradientError,
    HeadDiagnosis,
    ObservationDiagnosis,
)
from attn_diag.results.explanation import Explanation, Paragraph
from attn_diag.results.wording import SYMBOLS, percent, plural, source_argument
from attn_diag.statistics.means import MIN_SEQUENCES, PRIMARY

_Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]
# So many heads are named where the one asked for does not exist.
_NAMED = 12


def explain(
    diagnosis: Diagnosis, head: int | None = None, layer: int | None = None, observation: str | None = None
) -> Explanation:
    """Say in plain English what was found for one head, and what was not.

    Made of the diagnosis alone: the same diagnosis gives the same words. Of several entries that fit (other captures,
    observations) the worst is explained: by label, then by dQ's error.

    Args:
        diagnosis: The diagnosis.
        head, layer: The model's numbers; None: any.
        observation: Its name; None: any.

    Raises:
        InputError: Nothing fits; it names what exists.
    """
    entries = diagnosis.ranked()
    fitting = [
        (capture, made, entry)
        for capture, made, entry in entries
        if head in (None, entry.head) and layer in (None, entry.layer) and observation in (None, made.name)
    ]
    if not fitting:
        raise InputError(_missing(entries, head, layer, observation))
    capture, made, entry = fitting[0]
    assert entry.head is not None
    return Explanation(
        source=capture.source,
        observation=made.name,
        layer=entry.layer,
        batch=entry.batch,
        head=entry.head,
        labels=None if entry.verdict is None else entry.verdict.labels,
        others=len(fitting) - 1,
        paragraphs=tuple(paragraphs(diagnosis, capture, made, entry, others=len(fitting) - 1)),
    )


def _missing(entries: list[_Entry], head: int | None, layer: int | None, observation: str | None) -> str:
    asked = {"head": head, "layer": layer, "observation": observation}
    wanted = ", ".join(f"{name} {value!r}" for name, value in asked.items() if value is not None)
    if not entries:
        return "the diagnosis holds no head: inspect a capture first"
    places = sorted({(-1 if h.layer is None else h.layer, h.head or 0, made.name) for _, made, h in entries})
    named = [f"{'' if at < 0 else f'layer {at} '}head {number} ({name})" for at, number, name in places]
    more = f", … ({len(named)} in all)" if len(named) > _NAMED else ""
    return f"the diagnosis holds no {wanted}; it holds {', '.join(named[:_NAMED])}{more}"


_TESTED = {
    "delta": "delta",
    "delta_excess": "delta beyond correct rounding",
    "o_excess": "O beyond correct rounding",
    "o_away_excess": "the magnitude of O beyond correct rounding",
}
_OUTPUTS = {
    "o": "O",
    "lse": "LSE",
    "delta": "delta",
    "dq": "dQ",
    "dk": "dK",
    "dv": "dV",
    "dkv": "dKV",
    "dsinks": "dSink",
    "dmask": "dMask",
    "dq_pre": "dQ before RoPE",
}
_PARTS = {"delta": "delta", "lse": "the LSE", "ds_cast": "the cast of dS", "dq_cast": "the cast of dQ"}
# A part of an error below this is not worth a word.
_NO_PART = 0.005
# From this part of delta's squared error in five rows on, those rows are named.
_FEW_ROWS = 0.25
# Conditioning from which a head's dQ is called a small difference; ordinary heads of GPT-2 have 6 to 8.
_ILL_ABOVE = 20.0


def paragraphs(
    diagnosis: Diagnosis,
    capture: CaptureDiagnosis,
    observation: ObservationDiagnosis,
    head: HeadDiagnosis,
    *,
    others: int = 0,
) -> Iterator[Paragraph]:
    """In the order in which one would ask."""
    yield Paragraph("What was measured", " ".join(_measured(capture, observation, head, others)))
    if head.verdict is None:
        yield Paragraph("No verdict", " ".join(_no_verdict(capture)))
        return
    if head.certificate is not None and not head.certificate.held:
        yield Paragraph("No verdict", " ".join((*head.verdict.reasons, *head.verdict.suggestions)))
        return
    sequences = capture.shape["B"] if head.batch is None else 1
    yield Paragraph("Is the error larger than it must be?", " ".join(_size(head)))
    yield Paragraph("Is it biased?", " ".join(_bias(head, diagnosis.family.level, sequences)))
    yield Paragraph("What in the data triggers it?", " ".join(_trigger(observation, head)))
    yield Paragraph("What reaches the gradients?", " ".join(_gradients(head)))
    yield Paragraph("What is not known", " ".join(_unknown(observation, head)))
    yield Paragraph("What to do next", " ".join(_next(capture, observation, head)))


def _measured(
    capture: CaptureDiagnosis, observation: ObservationDiagnosis, head: HeadDiagnosis, others: int
) -> Iterator[str]:
    where = f"Head {head.head}" if head.layer is None else f"Head {head.head} of layer {head.layer}"
    module = f" ({capture.metadata['module']})" if capture.metadata.get("module") else ""
    step = f" at step {capture.metadata['step']}" if capture.metadata.get("step") else ""
    source = "tensors in memory" if capture.source == "memory" else PurePath(capture.source).name
    sequences = capture.shape["B"] if head.batch is None else 1
    yield (
        f"{where}{module}{step}, observation {observation.name!r} of {source}: {head.rows_all} query rows of "
        f"{plural(sequences, 'sequence')}."
    )
    if others:
        yield f"The worst of {others + 1} entries that fit what was asked for."
    outputs = [words for name, words in _OUTPUTS.items() if name in observation.outputs]
    listed = f"{', '.join(outputs[:-1])} and {outputs[-1]}" if len(outputs) > 1 else "".join(outputs or ["results"])
    whose = "Its" if observation.emulated else "The kernel's"
    if observation.emulated:
        yield f"Not a captured kernel but an emulation of a recipe was run ({observation.backend})."
    yield (
        f"{whose} {listed} {'was' if len(outputs) == 1 else 'were'} compared with a reference: the same attention in "
        "float64 on the same inputs, taken as exact. Every error is observed minus reference, with its sign; an ulp is "
        "the spacing of neighbouring numbers of the output's format at the true value."
    )
    if head.delta_source is not None:
        made = "as it was captured" if head.delta_source == "captured" else "from this O"
        yield (
            "delta is the row sum of dO times O, one number per query row, which the backward subtracts from dP in "
            f"dS = P (dP - delta), P the probabilities and dP = dO V^T; here it is taken {made}."
        )
    left_out = {
        "no visible key": head.rows_fully_masked,
        "NaN or Inf": head.rows_nonfinite,
        "scores beyond float64": head.rows_unknown,
    }
    if any(left_out.values()):
        yield f"Rows left out: {', '.join(f'{n} with {why}' for why, n in left_out.items() if n)}."


def _no_verdict(capture: CaptureDiagnosis) -> Iterator[str]:
    message = capture.assumptions.message
    yield f"What was assumed of the capture does not hold, so its numbers mean nothing: {message.rstrip('.')}."
    yield "Correct the metadata (causal, scale, layout, window, mask) and inspect again."


def _size(head: HeadDiagnosis) -> Iterator[str]:
    assert head.verdict is not None
    if any(q.answer != "stated" for q in head.quantities):
        yield from _beside_well_rounded(head)
        return
    if head.quantities:
        yield "Not asked: no published kernel's recipe covers this format, so there is no well-rounded kernel to ask."
        yield f"What was captured is no further from the truth than rounding can make it: {_distances(head)}."
        return
    noise = head.noise_factor
    low_high = head.noise_factor_ci95
    between = "" if low_high is None else f" (95 % interval {low_high[0]:.3g} to {low_high[1]:.3g})"
    if noise is None:
        yield "Not judged: it is measured on delta, which needs dO and O."
        return
    yield (
        "No published kernel's recipe covers this format, so there is no well-rounded kernel to compare with. "
        "Rounding O once, to the format in which it is returned, already moves delta by a known amount, the noise "
        f"floor. The noise factor is the rms of delta's error over that floor: {noise:.3g}{between}."
    )
    passes = f"up to {NOISY_ABOVE:g} passes for correct rounding"
    if noise <= NOISY_ABOVE:
        answer = "Not in the finite rows" if head.rows_nonfinite else "No"
        yield f"{answer}: {passes}, and a perfect kernel with this output format would leave about 1."
    elif "lossy" in head.verdict.labels:
        yield f"Yes: {passes}, and it leaves about 1; the kernel rounds something else coarsely."
    else:
        yield f"Not known: {passes}, but the float64 reference is not sharp enough here to blame the kernel for more."


def _distances(head: HeadDiagnosis) -> str:
    known = [f"{SYMBOLS[q.quantity]} is {percent(q.relative_error)} off" for q in head.quantities if q.relative_error]
    return ", ".join(known) or "nothing is off"


def _beside_well_rounded(head: HeadDiagnosis) -> Iterator[str]:
    """Each judged quantity's answer, the gravest first, and how a factor is to be read."""
    declared = next((q.declared for q in head.quantities if q.declared is not None), None)
    if declared is not None:
        yield f"The yardstick is {declared}, which it is declared to be, on the same inputs: about 1 is sound."
    elif any(q.factor is not None for q in head.quantities):
        yield (
            "The yardstick is a well-rounded kernel: the published recipe of this format, run on the same inputs. A "
            "factor is the error over that kernel's, about 1 for a sound one."
        )
    graver = [q for q in head.quantities if q.answer in ("nonfinite", "wrong", "lossy", "undecided")]
    bad = [q for q in graver if q.answer != "undecided"]
    answer = "Yes" if bad else "Not decided" if graver else "Not in the finite rows" if head.rows_nonfinite else "No"
    yield f"{answer}: {' '.join(q.words for q in (bad or graver or head.quantities))}"
    if bad and (others := [q for q in graver if q not in bad]):
        yield " ".join(q.words for q in others)
    dq = None if head.propagation.dq is None else head.propagation.dq.known_error
    if not graver and dq is not None and dq > DQ_ERROR_ABOVE:
        yield f"Yet dQ is {percent(dq)} off, see below: this head makes much of a small error."


def _bias(head: HeadDiagnosis, level: float, sequences: int) -> Iterator[str]:
    assert head.verdict is not None
    tests = {n: e for n in PRIMARY if (e := getattr(head.bias, n)) is not None and e.p_adjusted is not None}
    blurred = [n for n, e in tests.items() if beyond_reference(e)]
    found = [n for n, e in tests.items() if n not in blurred and (e.p_adjusted or 0.0) <= level]
    excused = {n: excuse(n, tests[n], head.rounding_bias, level) for n in found}
    natural = {n: why for n, why in excused.items() if why is not None}
    guilty = [n for n in found if n not in natural]
    if not tests:
        yield "Not tested: there is no output whose mean error could be tested."
        return
    chance = "the chance of such a mean without bias, corrected (Benjamini-Hochberg) for all tests of the run"
    if guilty:
        listed = "; ".join(_mean(n, tests[n]) for n in guilty)
        yield f"Yes. Bias is a mean error that differs from zero beyond chance; found at level {level:g} in: {listed}."
        yield f"(Adjusted p: {chance}.)"
    elif "undecided" not in head.verdict.labels:
        yield "No bias, a mean error that differs from zero beyond chance, was found: adjusted p is above"
        yield f"{level:g} in {len(tests) - len(natural)} tests ({chance})."
    for name, why in natural.items():
        yield (
            f"The mean error of {_TESTED[name]}, {tests[name].mean:.2g}, differs from zero too, but {why}: no fault of "
            "the kernel."
        )
    if blurred:
        names = ", ".join(_TESTED[n] for n in blurred)
        yield f"Undecided for {names}: the float64 reference's own error may matter beside the mean."
    yield from (r for r in head.verdict.reasons if r.startswith(("The mean of", "O is bit-identical")))
    clear = tests.get("delta") or tests.get("o_excess")
    if not guilty and clear is not None and clear.minimum_detectable is not None and clear.mean is not None:
        name = "delta" if "delta" in tests else "O"
        yield (
            f"The mean error of {name} is {clear.mean:.2g}; one of {clear.minimum_detectable:.2g} would have been "
            "found in four of five such captures, a smaller one may be there."
        )
    if sequences < MIN_SEQUENCES:
        yield f"This holds for the query rows of {'this sequence' if sequences == 1 else 'these sequences'} only."


def _mean(name: str, e: BiasEstimate) -> str:
    unit = "noise floors" if name.startswith("delta") else "ulp"
    relative = "" if e.mean_ulp is None else f" ({e.mean_ulp:+.2g} {unit})"
    return f"{_TESTED[name]} {e.mean:+.3g}{relative}, adjusted p {e.p_adjusted:.2g}"


def _trigger(observation: ObservationDiagnosis, head: HeadDiagnosis) -> Iterator[str]:
    exact = head.row_maxima.exact
    if exact.rows:
        yield (
            f"Repeated maxima: in {exact.rows} of {exact.rows_eligible} rows that could, the largest score occurs more "
            f"than once (up to {exact.max_multiplicity} times) when scores are rounded to the input's format. That "
            "can make several probabilities exactly 1, the published trigger of biased rounding; a count does not "
            "show that it did."
        )
        as_run = head.row_maxima.as_run
        if as_run is not None and as_run.rows != exact.rows:
            yield f"With scores as recipe {observation.recipe} rounds them there are {as_run.rows} such rows."
    else:
        yield "No row has a repeated maximum, so the published trigger of biased rounding is absent."
    if head.conditioning is None:
        known = head.delta_source is not None
        yield f"Conditioning is not known {'where the true dQ is 0' if known else 'without dO'}."
    else:
        yield (
            f"Conditioning, the size of delta's term in dQ over dQ itself, is {head.conditioning:.3g}: were every "
            f"delta off by 0.1 %, dQ would be off by {percent(1e-3 * head.conditioning)}."
        )
        if head.conditioning > _ILL_ABOVE:
            yield (
                "So dQ is a small difference of large terms (rows that put nearly all weight on one key are the usual "
                "reason)."
            )
    top = sum(row.share for row in head.top_rows)
    if head.top_rows and top >= _FEW_ROWS:
        rows = ", ".join(f"{row.row} ({percent(row.share, '.0f')})" for row in head.top_rows)
        yield f"The error sits in few rows: of delta's squared error, {percent(top, '.0f')} is in rows {rows}."
    if head.swamped is not None and head.swamped.rows:
        yield (
            f"{head.swamped.rows} rows of O equal V of their top key exactly though they should not: the other keys "
            "were rounded away. That is a count, not a cause."
        )


def _gradients(head: HeadDiagnosis) -> Iterator[str]:
    dq, dw_q = head.propagation.dq, head.propagation.dw_q
    if dq is None or dq.known_error is None:
        if head.delta_source is None:
            yield "Nothing can be said of dQ and dW_Q: that needs dO."
        else:
            yield "The true dQ is 0, as of rows that see a single key: no error is a part of it."
        return
    yield (
        "An error of delta in a row moves that row of dQ by -alpha P K times it (alpha the softmax scale, P K the keys "
        "weighted by the probabilities)."
    )
    yield from _gradient("dQ", dq)
    if dq.over_noise_floor is not None:
        yield (
            f"By this way alone, one correct rounding of O would make an error of dQ, too; the observed one is "
            f"{dq.over_noise_floor:.3g} times that."
        )
    if dw_q is not None and dw_q.relative_error is not None:
        yield "dW_Q is the sum over rows of dQ times x, so row errors may cancel in it or add up."
        yield from _gradient("dW_Q", dw_q)
        if dw_q.coherence is not None and dw_q.coherence_null95 is not None:
            coherent = dw_q.coherence > dw_q.coherence_null95
            yield (
                f"delta's contributions of the rows add up {'more' if coherent else 'no more'} than with random signs "
                f"(coherence {dw_q.coherence:.3g}, random signs stay below {dw_q.coherence_null95:.3g} in 95 %)."
            )


def _gradient(name: str, error: GradientError) -> Iterator[str]:
    predicted = error.predicted_relative_error
    alone = "" if predicted is None else f"the error of delta alone would put it {percent(predicted)} off"
    if error.relative_error is None:
        yield f"The kernel's {name} was not captured; {alone}."
        return
    size = f"{name} is {percent(error.relative_error)} off (norm of its error over the norm of the true {name})"
    yield f"{size}; {alone}." if alone else f"{size}."
    shares = {_PARTS[n]: s for n, s in (error.shares or {}).items() if n in _PARTS and s is not None}
    told = [f"{part} {percent(s)}" for part, s in sorted(shares.items(), key=lambda i: -i[1]) if abs(s) >= _NO_PART]
    if told:
        rest = error.unexplained_with_casts
        unexplained = "" if rest is None else f" Left unexplained: {percent(rest)} of the error's norm"
        if rest is not None:
            unexplained += ", so this backward rounds elsewhere too." if rest > ROUNDS_ELSEWHERE_ABOVE else "."
        yield f"Parts of its squared error: {', '.join(told)}.{unexplained}"


def _unknown(observation: ObservationDiagnosis, head: HeadDiagnosis) -> Iterator[str]:
    missing = []
    if head.delta_source is None:
        missing.append("delta's error, the noise factor and all gradients (dO was not captured, or O was not)")
    elif head.propagation.dq is not None and not any(q.quantity == "dq" for q in head.quantities):
        missing.append("the error of the kernel's own dQ (not captured; delta's prediction leaves its casts out)")
    if "lse" not in observation.outputs and not observation.emulated:
        missing.append("the error of the LSE (not captured)")
    if missing:
        yield f"Not measured: {'; '.join(missing)}."
    for note in head.propagation.notes:
        yield f"{note.rstrip('.')}."
    if not any(q.site for q in head.quantities):
        yield "Which rounding inside the kernel makes the error: an inspection sees only what comes out."
    yield "Whether training suffers: this is one capture, and neither bias nor size in one proves or excludes it."
    if head.certificate is None:
        yield "The reference's error is bounded by proof; its rows were not recomputed in higher precision (certify)."


def _next(capture: CaptureDiagnosis, observation: ObservationDiagnosis, head: HeadDiagnosis) -> Iterator[str]:
    assert head.verdict is not None
    yield from head.verdict.suggestions
    harmful = set(head.verdict.labels) & {"biased", "lossy", "ill_conditioned"}
    if not harmful:
        return
    if capture.source == "memory":
        yield "Save the capture (capture.save(path)) for the commands that look further:"
        source = "path"
    else:
        source = source_argument(capture.source)
    name = "" if observation.name == "observed" else f" --observation {shlex.quote(observation.name)}"
    yield (
        f"attn-diag attribute {source}{name} --head {head.head} says which rounding makes it, "
        f"attn-diag what-if {source}{name} --head {head.head} what would remove it."
    )
