"""``attn_diag.probe``: signed defects of any attention callable, on inputs with known answers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.kernels import Recipe
from attn_diag.reference import format_of, ulp
from attn_diag.results.probe import Label, LseTest, ProbeAssumptions, ProbeFinding, ProbeReport, SignedTest
from attn_diag.results.wording import runs, together
from attn_diag.statistics.means import adjust, require_level
from attn_diag.statistics.welch import confidence
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.next_command import USUAL_SHAPE, Again
from attn_diag.testing.other_function import OtherFunction, as_counted, fit_of, origin_words
from attn_diag.testing.probing import inputs, verdict
from attn_diag.testing.probing.catalogue import PROBES, Pair, Probe, choose
from attn_diag.testing.probing.gradients import gradient_look, with_gradients
from attn_diag.testing.probing.head_errors import HeadErrors, lse_test, measure_case, signed_tests
from attn_diag.testing.probing.inputs import Builder, Draw, ProbeCase
from attn_diag.testing.probing.outcome import ProbeOutcome, outcome_of
from attn_diag.testing.probing.search import Suspect, found_suspect, limit_suspect
from attn_diag.testing.stated import HIDING_CAP, PerHead, Stated, fitting, hides_appended
from attn_diag.testing.target import DTYPES, Attention, MisfitError, Target
from attn_diag.work import Progress

_Inputs = TypeVar("_Inputs", ProbeCase, Pair)
_Test = TypeVar("_Test", SignedTest, LseTest)

DEFAULT_SHAPE = USUAL_SHAPE
# Independent heads: at least so many are drawn, in as many calls as that takes (t with 15 degrees of freedom).
MIN_HEADS = 16
# exp(-2 c) of a smaller cap c is no small weight: where scores of tens end at c or -c, all others are one such number,
# whose cast errs to one side, as in the normaliser's probes.
_LEADING_CAP = 5.0
_OF_CASTS = ("normaliser-down", "normaliser-up")
# With ALiBi or sinks one head alone has the first one's; and where the bias alone is left of the scores, all rows have
# the same P, beside a sink all keys the same P_bar, whose casts do not average out: l and what multiplies V then differ
# as they do in the normaliser's probes.
_OF_LIKE_HEADS = ("batch", "constant-rows", *_OF_CASTS)
# A softcap is looked for in so many of the probes that are furthest off.
_SEARCHED = 3
_SMALLEST = {"length T": 16, "head dimension D": 8}


def probe(
    fn: Attention | str | Recipe,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shape: Sequence[int] | None = None,
    causal: bool | str = "none",
    window: Sequence[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: PerHead = None,
    sinks: PerHead = None,
    scale: float | None = None,
    device: str = "auto",
    level: float = 0.01,
    seed: int = 0,
    probes: Sequence[str] | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> ProbeReport:
    """Run an attention on inputs whose answer is known, and report its signed defects with their uncertainty.

    Where O has no fault, fn is called once more for its gradients (``gradients.gradient_look``).

        attn_diag.probe(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v))

    Args:
        fn: fn(q, k, v) -> o, (o, lse) or (o, ...), all [B, H, T, D], o in the inputs' dtype or in fp32, lse [B, H, T]
            in natural logarithm. It is assumed to compute softmax(scale Q K^T) V; that is checked. What else
            ``attn_diag.check`` takes by name serves too; a recipe is emulated, which needs no GPU.
        dtype: torch.bfloat16, torch.float16 or torch.float32 (not for recipes).
        shape: B, H, T, D of a call; by default 4, 4, 384, 64, with as many heads as there are slopes or sinks. Where
            B H < 16, several are made, so that 16 heads are independent. (The probe "length" calls fn with
            T + 128 rows and keys, "batch" with one head, and with 2 B.)
        causal: What fn masks: "none" or False; "top-left", "bottom-right" or True (the same, for Tq = Tk).
        window: (left, right): of row t it sees the keys t - left to t + right alone; -1: all on that side.
        softcap: c, where its scores are c tanh(alpha q.k / c). The normaliser's probes are left out, "one-hot" below a
            cap of 5, and "length" below one of 30 without a causal mask.
        alibi_slopes: Of a kernel with ALiBi, one slope a head: what it adds to the score of query i and key j is
            -slope |i - j|. A recipe, and a function with a parameter of that name, is given them; another function has
            slopes of its own, which must be these. The probes "batch", "constant-rows" and the normaliser's are left
            out.
        sinks: Likewise of a kernel with attention sinks, one logit a head, which joins the softmax's sum. The same
            probes are left out.
        scale: What fn multiplies scores by; by default 1/sqrt(D).
        device: auto, cpu or cuda.
        level: Of the tests after Benjamini-Hochberg.
        seed: Of the inputs.
        probes: Names out of ``attn_diag.testing.probing.catalogue.PROBES``; by default all, and the gradients.
            float32 has no cast of P_bar for the normaliser's.
        name: What the report calls fn.
        progress: Called with (done, total) after each probe.

    Raises:
        InputError: Options cannot be used; fn raises, returns another shape, dtype or device, or changes an input (or,
            in its backward, dO or O) in place; or the scale needs inputs beyond the dtype's range (the message names
            the probe).
    """
    where = pick_device(device)
    shape = shape or fitting(DEFAULT_SHAPE, alibi_slopes, sinks)
    _require_usable(dtype, shape, level)
    batch, heads, length, dim = shape
    stated = Stated.of(causal, scale, dim, window, softcap, alibi_slopes, sinks, heads=heads)
    target = Target.of(fn, name, dtype=dtype, head_dim=dim, device=where)
    draw = Draw(batch, heads, length, dim, dtype, stated, torch.Generator().manual_seed(seed))
    chosen = _suited(choose(probes), draw, by_name=probes is not None)
    run = _Run(target, draw, rounds=-(-MIN_HEADS // (batch * heads)), level=level, seed=seed)
    assumptions, other = run.check_assumptions()
    findings: list[ProbeFinding] = []
    # Of another function every figure would be about the difference of the two.
    for number, item in enumerate(chosen if other is None else []):
        # A probe's inputs do not depend on which others run.
        draw.generator.manual_seed(zlib.crc32(f"{seed} {item.name}".encode()))
        findings.append(run.accuracy(item) if item.build is not None else run.invariance(item))
        if progress is not None:
            progress(number + 1, len(chosen))
    judged, family = _judge(findings, level)
    outcome = run.outcome(judged, other, named=isinstance(fn, str))
    gradients = None
    if outcome.outcome == "ok" and probes is None:
        look = gradient_look(run.normal_call()[0], target, draw)
        outcome, gradients = with_gradients(outcome, look), look.words
    return ProbeReport(
        tool=describe_tool(where),
        source=target.name,
        backend=target.backend,
        dtype=DTYPES[dtype],
        out_dtype=run.out_dtype,
        shape=(batch, heads, length, dim),
        rounds=run.rounds,
        heads=run.rounds * batch * heads,
        seed=seed,
        level=level,
        assumptions=assumptions,
        findings=judged,
        family_size=family,
        summary=(
            *verdict.summarise(judged, assumptions, level, target.name, emulated=target.recipe is not None),
            *(f"{words}." for words in origin_words(run.counted.values())),
        ),
        outcome=outcome.outcome,
        suspect=outcome.suspect,
        certainty=outcome.certainty,
        evidence=outcome.evidence,
        normal=outcome.normal,
        next=outcome.next,
        gradients=gradients,
    )


@dataclass
class _Run:
    target: Target
    draw: Draw
    rounds: int
    level: float
    seed: int
    out_dtype: str = field(default="")
    counted: dict[str, CaseInputs] = field(default_factory=dict)
    """By how LSE counts ALiBi's bias: a case."""

    def check_assumptions(self) -> tuple[ProbeAssumptions, OtherFunction | None]:
        """On N(0,1) inputs: does fn compute what it is assumed to, and if not, what else?"""
        given, seen = self.normal_call()
        self.out_dtype = DTYPES[seen.dtype]
        stated, other = fit_of(given, seen, self.target, self.target.device)
        error = None if stated is None or not math.isfinite(stated) else stated
        said = self.draw.stated
        found = ProbeAssumptions(
            said.scale, said.causal, error, other is None and error is not None, window=said.window,
            softcap=said.softcap, alibi_slopes=said.alibi_slopes, sinks=said.sinks,
        )  # fmt: skip
        return (found, None) if other is None else (replace(found, fits=other.fits, words=other.words), other)

    def normal_call(self) -> tuple[CaseInputs, Tensor]:
        """The inputs of the probe "normal", and O."""
        return self.call_of("normal", inputs.normal)

    def call_of(self, name: str, build: Builder | None) -> tuple[CaseInputs, Tensor]:
        """Inputs drawn as a probe's, and O."""
        assert build is not None
        self.draw.generator.manual_seed(zlib.crc32(f"{self.seed} assumptions".encode()))
        case = _built(name, build, self.draw)
        given = self.draw.stated.case(name, case.q, case.k, case.values[0])
        return given, self._call(name, given.q, given.k, given.v)[0]

    def outcome(self, findings: tuple[ProbeFinding, ...], other: OtherFunction | None, *, named: bool) -> ProbeOutcome:
        """OK or not; where not, the suspect, which is searched for if the findings do not name it."""
        d = self.draw
        fine = next(t for t, name in DTYPES.items() if name == self.out_dtype)
        unit = 2.0 ** (format_of(fine).precision - format_of(d.dtype).precision)
        shape = (d.batch, d.heads, d.length, d.head_dim)
        asked = Again(self.target.name if named else None, DTYPES[d.dtype], d.stated, shape)

        def search(of_l: bool) -> Suspect | None:
            given, seen = self.normal_call()
            found = found_suspect(given, seen, self.target, of_l=of_l)
            if found is None and not of_l:
                # Scores of N(0,1) hardly show a softcap.
                large = sorted((f for f in findings if "too-large" in f.labels), key=lambda f: -(f.of_budget or 0.0))
                calls = (self.call_of(f.name, PROBES[f.name].build) for f in large[:_SEARCHED])
                found = next((s for call in calls if (s := limit_suspect(*call, self.target.device))), None)
            return found

        return outcome_of(findings, other, asked, unit, search)

    def accuracy(self, item: Probe) -> ProbeFinding:
        """One probe against the reference; its verdict comes with the others'."""
        assert item.build is not None
        measured: list[HeadErrors] = []
        for _ in range(self.rounds):
            case = _built(item.name, item.build, self.draw)
            outputs = [self._call(item.name, case.q, case.k, v) for v in case.values]
            given = self.draw.stated.case(item.name, case.q, case.k, case.values[0])
            given = as_counted(given, dict(zip(("o", "lse"), outputs[0], strict=True)), self.target.device)
            self.counted[given.alibi_origin] = given
            measured += measure_case(case, outputs, given, self.target.device)
        size = sum(h.size for h in measured)
        predicted = [sum(p) / size for p in zip(*(h.predicted for h in measured if h.predicted), strict=True) if size]
        tests = signed_tests(measured, self.level)
        excess, interval = tests[0].excess, confidence(tests[0].excess, self.level)
        mean_size = size / excess.n if excess.n else 0.0
        lse = [h.lse for h in measured if h.lse is not None]
        of_lse = lse_test(lse, self.level) if len(lse) == len(measured) else None
        return ProbeFinding(
            name=item.name,
            shows=item.shows,
            kind="accuracy",
            labels=(),
            words="",
            elements=sum(h.elements for h in measured),
            differing=sum(h.differing for h in measured),
            nonfinite=sum(h.nonfinite for h in measured),
            max_error_ulp=max(h.max_error_ulp for h in measured),
            of_budget=max(h.of_budget for h in measured),
            relative=(excess.mean or 0.0) / mean_size if mean_size else None,
            relative_ci=(interval[0] / mean_size, interval[1] / mean_size) if interval and mean_size else None,
            predicted=predicted[0] if predicted else None,
            predicted_truncated=predicted[1] if predicted else None,
            tests=tests,
            lse=of_lse,
            nonfinite_rows=runs(sorted(frozenset().union(*(h.nonfinite_rows for h in measured)))),
        )

    def invariance(self, item: Probe) -> ProbeFinding:
        """Two calls that must agree."""
        assert item.pair is not None
        pair = _built(item.name, item.pair, self.draw)
        o = [self._call(item.name, *given)[0] for given in (pair.first, pair.second)]
        first, second = pair.align(o[0].double(), o[1].double())
        finite = first.isfinite() & second.isfinite()
        broken = (~finite).any(3).flatten(0, 1).any(0).nonzero()[:, 0].tolist()
        # What is NaN in both calls is not finite, but the same.
        differs = (first != second) & ~(first.isnan() & second.isnan())
        distance = (second - first)[finite].abs() / ulp(first[finite], format_of(o[0].dtype))
        found = ProbeFinding(
            name=item.name,
            shows=item.shows,
            kind="invariance",
            labels=("not-invariant" if bool(differs.any()) else "exact",),
            words="",
            elements=first.numel(),
            differing=int(differs.sum()),
            nonfinite=int((~finite).sum()),
            max_error_ulp=float(distance.max()) if distance.numel() else None,
            nonfinite_rows=runs(broken),
        )
        labels: tuple[Label, ...] = ("nonfinite", "broken") if found.nonfinite else ()
        found = replace(found, labels=labels + found.labels if found.differing or not labels else labels)
        return replace(found, words=verdict.invariance_words(found))

    def _call(self, probe_name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """O, and L where it came too, on the target's device. Raises InputError, naming the probe, for no such O."""
        where = f"probe '{probe_name}': {self.target.name}"
        given = self.draw.stated.case(probe_name, q, k, v)
        try:
            found = self.target.call(given)
            found.require_untouched()
        except MisfitError as error:
            advice = "; leave this probe out or choose another shape if fn does not cover it"
            raise InputError(error.of(where) + (advice if error.__cause__ is not None else "")) from error
        outputs, device = found.outputs, self.target.device
        o, lse = outputs["o"], outputs.get("lse")
        if self.target.recipe is not None:
            # A format that torch lacks comes in the recipe's arithmetic, which may be float64.
            o, lse = (o.float() if o.dtype == torch.float64 else o).to(device), outputs["lse"].to(device)
        elif o.device.type != device.type:
            raise InputError(f"{where} must return o on {device}, got {o.device}; pass device='{o.device.type}'")
        return o, lse


def _built(name: str, build: Callable[[Draw], _Inputs], draw: Draw) -> _Inputs:
    """The inputs of that probe; its InputError names it."""
    try:
        return build(draw)
    except InputError as error:
        raise InputError(f"probe '{name}': {error}") from None


def _judge(findings: Sequence[ProbeFinding], level: float) -> tuple[tuple[ProbeFinding, ...], int]:
    """Labels and words, after Benjamini-Hochberg over every p-value of the run; and how many there were."""
    every: list[SignedTest | LseTest] = [t for f in findings for t in f.tests]
    every += [f.lse for f in findings if f.lse is not None]
    adjusted = zip(every, adjust([t.p_value for t in every]), strict=True)
    by_test = {id(t): p for t, p in adjusted if p is not None}

    def decided(test: _Test) -> _Test:
        p_value = by_test.get(id(test))
        return test if p_value is None else replace(test, p_adjusted=p_value, biased=p_value <= level)

    judged = []
    for found in findings:
        if found.kind == "accuracy":
            tests = tuple(decided(t) for t in found.tests)
            of_lse = None if found.lse is None else decided(found.lse)
            found = replace(found, tests=tests, lse=of_lse)
            found = replace(found, labels=_accuracy_labels(found))
            found = replace(found, words=verdict.accuracy_words(found, level))
        judged.append(found)
    return tuple(judged), len(by_test)


def _accuracy_labels(found: ProbeFinding) -> tuple[Label, ...]:
    lse = found.lse
    nonfinite = found.nonfinite > 0 or (lse is not None and lse.nonfinite > 0)
    wrong: dict[Label, bool] = {
        "nonfinite": nonfinite,
        "broken": nonfinite,
        "too-large": (found.of_budget or 0.0) > 1,
        "lse-too-large": lse is not None and lse.of_budget > 1,
        "biased": any(t.biased for t in found.tests),
        "lse-biased": lse is not None and lse.biased,
    }
    labels = tuple(label for label, holds in wrong.items() if holds)
    return labels or ("within-rounding" if found.differing else "exact",)


def _require_usable(dtype: torch.dtype, shape: Sequence[int], level: float) -> None:
    """Raise InputError for options that cannot be used."""
    if dtype not in DTYPES:
        raise InputError(f"dtype must be torch.bfloat16, torch.float16 or torch.float32, got {dtype}")
    if not isinstance(shape, Sequence) or len(shape) != 4 or any(not isinstance(n, int) or n < 1 for n in shape):
        raise InputError(f"shape must be four positive integers B, H, T, D, got {shape}")
    for (what, least), got in zip(_SMALLEST.items(), shape[2:], strict=True):
        if got < least:
            raise InputError(f"the {what} must be at least {least}, got {got}")
    require_level(level)


def _suited(chosen: list[Probe], draw: Draw, *, by_name: bool) -> list[Probe]:
    """Those of the probes that tell something of such a kernel. Raises InputError for others, asked for ``by_name``."""
    stated = draw.stated
    cap = stated.softcap or math.inf
    left_out = {
        "of a kernel with alibi_slopes": _OF_LIKE_HEADS if stated.alibi_slopes else (),
        "of a kernel with sinks": _OF_LIKE_HEADS if stated.sinks else (),
        "of float32: they show a mismatch that the cast of P makes": _OF_CASTS if draw.dtype.itemsize > 2 else (),
        "of capped scores, which are not those whose cast errs": _OF_CASTS if stated.softcap else (),
        f"below a softcap of {HIDING_CAP:g}, where no score hides a key": () if hides_appended(stated) else ("length",),
        f"below a softcap of {_LEADING_CAP:g}, where no key leads": ("one-hot",) if cap < _LEADING_CAP else (),
    }
    for words, names in left_out.items():
        found = [item.name for item in chosen if item.name in names]
        if by_name and found:
            raise InputError(f"{together(found)} {'is no probe' if len(found) == 1 else 'are no probes'} {words}")
        chosen = [item for item in chosen if item.name not in names]
    return chosen
