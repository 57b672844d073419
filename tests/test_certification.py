"""What the certificate does in a diagnosis: tests withheld, a wrong reference named, ``--certify`` and its errors."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from operator import mul
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from builders import SHARED, inspected, some
from command_line import Run
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag import Capture, InputError, load
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.analyses.verdicts.means import beyond_reference
from attn_diag.captures.selection import Ranges
from attn_diag.cli.inspect import inspect as command
from attn_diag.head.certification import Certify, RoundedBound, pool_certificates, rounding_of_products
from attn_diag.reference import UNIT, BoundCollector, HeadBounds, HeadReference, format_of, round_nearest_even, ulp
from attn_diag.reference import attention as forward
from attn_diag.reference.oracle import DEFAULT_BITS
from attn_diag.reports.words import certificate_words
from attn_diag.results.diagnosis import BiasEstimate, Certificate, Diagnosis, HeadDiagnosis
from attn_diag.results.embedded import embedded_diagnosis
from attn_diag.statistics.means import PRIMARY

T, D = 64, 16
ORIGINAL_BOUNDS = BoundCollector.each


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """A causal call whose O is torch's own, in ``dtype``, from float64 arithmetic."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, T, D, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4))
    o = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True).to(dtype)
    return {"q": q, "k": k, "v": v, "do": do, "o": o}


def heads(diagnosis: Diagnosis) -> Iterator[HeadDiagnosis]:
    for capture in diagnosis.captures:
        for observation in capture.observations:
            yield from observation.heads


def estimates(head: HeadDiagnosis) -> list[BiasEstimate]:
    """Its primary estimates that have a p-value."""
    found = [getattr(head.bias, name) for name in PRIMARY]
    return [e for e in found if e is not None and e.p_value is not None]


# Verdicts that the reference is not sharp enough for.


def is_withheld(diagnosis: Diagnosis) -> bool:
    """Whether no mean was judged, for the reason that the reference's own error may be what is seen."""
    return diagnosis.family.size == 0 and all(
        head.verdict is not None
        and head.verdict.labels == ("undecided",)
        and head.verdict.evidence == "none"
        and "float64 reference is not sharp enough" in head.verdict.reasons[0]
        and all(e.p_adjusted is None for e in estimates(head))
        for head in heads(diagnosis)
    )


def noisy(size: float) -> dict[str, Any]:
    found = inputs()
    noise = torch.randn(found["o"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return found | {"o": found["o"] + size * noise}


@pytest.mark.parametrize("size", [0.0, 1e-15])
def test_no_verdict_on_means_below_the_references_own_error(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = attn_diag.inspect(**noisy(size), causal=True)
    assert sum(len(estimates(head)) for head in heads(diagnosis)) > 4
    assert is_withheld(diagnosis)
    # One that judges whatever it sees is found out.
    monkeypatch.setattr("attn_diag.analyses.verdicts.means.REFERENCE_BELOW", math.inf)
    assert not is_withheld(attn_diag.inspect(**noisy(size), causal=True))


def test_elements_halfway_between_two_numbers_are_the_reason_where_they_are() -> None:
    """Dropout 0.2 multiplies by 1.25: of rows that keep one key that is a tie of BF16 in many features."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 256, 64, generator=generator).bfloat16() for _ in range(3))
    kept = torch.rand(1, 1, 256, 256, generator=generator) >= 0.2
    scores = (q.float() @ k.float().mT / 64**0.5).masked_fill(~torch.ones(256, 256, dtype=torch.bool).tril(), -math.inf)
    o = ((scores.softmax(-1) * kept * 1.25) @ v.float()).bfloat16()
    given = {"q": q, "k": k, "v": v, "o": o, "dropout_mask": kept}
    capture = Capture.from_tensors(given, causal="top-left", dropout_p=0.2)
    verdict = some(attn_diag.inspect(capture, device="cpu").captures[0].observations[0].heads[0].verdict)
    (reason,) = [r for r in verdict.reasons if "standard error of" in r]
    assert "elements of O lie halfway between two numbers of its format" in reason
    assert "sharp enough" not in reason


def test_larger_errors_of_the_same_kernel_are_judged() -> None:
    diagnosis = attn_diag.inspect(**noisy(1e-9), causal=True)
    assert diagnosis.family.size > 4
    assert not any("sharp enough" in r for h in heads(diagnosis) if h.verdict for r in h.verdict.reasons)


@pytest.mark.parametrize(
    ("bound", "error", "expected"),
    [(1e-2, 1.0, False), (1.01e-2, 1.0, True), (math.inf, 1.0, True), (0.0, 1e-300, False), (None, 1.0, False)],
)
def test_one_per_cent_of_the_standard_error(bound: float | None, error: float, expected: bool) -> None:
    assert beyond_reference(BiasEstimate(standard_error=error, reference_bound=bound)) is expected


def test_nothing_is_withheld_on_real_captures() -> None:
    """Measured: bounds of at most 3.7e-9 of the standard error. A reference in fp32 would not do."""
    ratios = []
    for name in SHARED:
        for head in heads(inspected(name)):
            for estimate in estimates(head):
                assert not beyond_reference(estimate)
                ratios.append(some(estimate.reference_bound) / some(estimate.standard_error))
    assert len(ratios) > 100
    assert max(ratios) < 1e-8
    assert max(ratios) * 2.0**29 > 1e-2


def truth_of(given: dict[str, Any], mask: Tensor | None = None) -> Tensor:
    q, k, v = (given[name].double() for name in ("q", "k", "v"))
    mask = torch.full((T, T), -math.inf).triu(1) if mask is None else mask
    return scaled_dot_product_attention(q, k, v, attn_mask=mask.double())


def test_an_error_that_is_the_same_everywhere_is_judged() -> None:
    """V = 1.5, and O one spacing too large in every element: the standard error is 0."""
    given = inputs(torch.bfloat16)
    given["v"] = torch.full_like(given["v"], 1.5)
    given["o"] = torch.full_like(given["o"], 1.5 + 2.0**-7)
    (head, *_) = heads(attn_diag.inspect(**given, causal=True))
    assert some(head.bias.o_excess).standard_error == pytest.approx(0, abs=1e-15)
    assert "biased" in some(head.verdict).labels


@pytest.mark.parametrize("huge", [1e16, float(torch.finfo(torch.float32).max)])
@pytest.mark.parametrize(("mode", "label"), [("toward-zero", "biased"), ("nearest-even", "clean")])
def test_rows_whose_truth_float64_cannot_tell_are_left_out(huge: float, mode: str, label: str) -> None:
    """The first rows see all their keys at ``huge``, beside which no score is left."""
    mask = torch.full((T, T), -math.inf).triu(1)
    mask[:3, :3] += huge
    diagnosis = certified(mask, mode)
    for head in heads(diagnosis):
        assert label in some(head.verdict).labels, head.verdict
        assert (head.rows_unknown, head.rows_all) == ((3, T - 3) if head.head is not None else (6, 2 * T - 6))
    assert "beyond float64" in diagnosis.report()


@pytest.mark.parametrize("low", [-1e16, float(torch.finfo(torch.float32).min)])
def test_rows_of_left_padding_count_as_rows_without_keys(low: float) -> None:
    """As Hugging Face's additive masks have it: the first rows see all their keys at ``low``."""
    mask = torch.full((T, T), -math.inf).triu(1)
    mask[:3, :3] += low
    mask[3:, :3] = low
    for head in heads(certified(mask, "toward-zero")):
        assert "biased" in some(head.verdict).labels, head.verdict
        assert (head.rows_unknown, head.rows_fully_masked) == (0, 3 if head.head is not None else 6)


def certified(mask: Tensor, mode: str) -> Diagnosis:
    given = inputs(torch.bfloat16)
    del given["do"]
    given["o"] = attn_diag.round_to(truth_of(given, mask), f"bf16:{mode}").bfloat16()
    diagnosis = attn_diag.inspect(**given, mask=mask, certify=6)
    for head in heads(diagnosis):
        certificate = some(head.certificate)
        assert certificate.held
        assert certificate.worst_ratio["o"] > 1e-4, "rows without a bound certify nothing"
    return diagnosis


def test_roundings_in_doubt_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32's own spacing is so near float64's errors that a few of many roundings are not certain."""
    given = inputs(torch.float32)
    given["o"] = truth_of(given).float()

    def reasons() -> tuple[str, ...]:
        return some(next(heads(attn_diag.inspect(**given, causal=True))).verdict).reasons

    def wide(collectors: list[BoundCollector], references: list[HeadReference]) -> list[HeadBounds]:
        found = ORIGINAL_BOUNDS(collectors, references)
        for of_head in found:
            of_head.out *= 1e4
        return found

    assert reasons().count("O is bit-identical to correct rounding.") == 1
    monkeypatch.setattr(BoundCollector, "each", staticmethod(wide))
    assert any("as far as float64 can tell" in reason for reason in reasons()), reasons()


def half_as_careful(truth: Tensor, error: Tensor, ulps: Tensor, bound: Tensor) -> RoundedBound:
    doubtful = ulps / 2 - error.abs() <= bound / 2
    return RoundedBound(1, torch.where(doubtful, ulps + 2 * bound, 0.0), truth.abs() <= bound)


def never_doubtful(*_: Tensor) -> RoundedBound:
    return RoundedBound(1, None, None)


def rounds_within(bound_of: Callable[..., RoundedBound]) -> bool:
    """Whether RN(x) moves no further than said, nor x changes its sign, wherever x may really lie."""
    generator = torch.Generator().manual_seed(0)
    fmt = format_of(torch.bfloat16)
    anchors = torch.randint(0x3F00, 0x4100, (5000,), generator=generator, dtype=torch.int16).view(torch.bfloat16)
    anchors[::4] = 2.0  # the spacing changes here
    spacing = ulp(anchors.double(), fmt)
    offset = torch.randint(-4, 5, (5000,), generator=generator) / 8 * spacing
    bound = spacing * 4.0 ** -torch.randint(0, 12, (5000,), generator=generator)
    truth = (anchors.double() + offset + (torch.rand(5000, generator=generator) * 3 - 1.5) * bound)[:, None]
    truth[::9] *= 1e-6
    bound = bound[:, None]
    rounded = round_nearest_even(truth, fmt)
    said = bound_of(truth, rounded - truth, ulp(truth, fmt), bound)
    moved = torch.zeros_like(truth) if said.moved is None else said.moved
    unsigned = torch.zeros_like(truth, dtype=torch.bool) if said.unsigned is None else said.unsigned
    for part in (-1.0, -0.6, 0.3, 1.0):
        true = truth + part * bound * (1 - 2.0**-40)
        if not ((round_nearest_even(true, fmt) - rounded).abs() <= moved).all():
            return False
        if not ((true.sign() == truth.sign()) | unsigned).all():
            return False
    # Nor may it say that much everywhere.
    return 0.2 < float((moved > 0).double().mean()) < 0.8


def test_how_far_a_correct_rounding_can_move() -> None:
    assert rounds_within(RoundedBound.of)
    assert not rounds_within(half_as_careful)
    assert not rounds_within(never_doubtful)


def test_sums_of_what_can_move() -> None:
    moved, unsigned = torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([[True, False], [False, False]])
    # Two heads: the sums of one know nothing of the other's.
    found = RoundedBound(2, torch.stack([moved, 2 * moved]), torch.stack([unsigned, ~unsigned]))
    excess = torch.tensor([[-3.0, 1.0], [5.0, 0.0]]).expand(2, 2, 2)
    of_heads = ([3.0, 6.0], found.sums()), ([7.0, 14.0], found.sums(excess)), ([6.0, 12.0], found.turned(excess))
    for expected, sums in of_heads:
        assert sums.tolist() == pytest.approx(expected, rel=1e-5)
        assert (sums > expected).all()
    assert found.counts == [2, 2]
    nothing = never_doubtful()
    assert nothing.counts == [0]
    for none in (nothing.sums(), nothing.sums(excess[:1]), nothing.turned(excess[:1])):
        assert none.tolist() == [0]


def test_rounding_of_row_sums_is_within_its_bound() -> None:
    """Rows that cancel: the error of rowsum(l o r) against exact sums, and a bound that forgets the terms' size."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(50, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    right[:, 32:], left[:, 32:] = right[:, :32], -left[:, :32] * (1 + 1e-9)
    errors = [
        abs(float(Fraction(computed) - sum(map(mul, map(Fraction, x.tolist()), map(Fraction, y.tolist())))))
        for x, y, computed in zip(left, right, (left * right).sum(1).tolist(), strict=True)
    ]
    assert 0 < sum(errors) <= rounding_of_products(left[None], right[None])[0]
    assert sum(errors) > 65 * UNIT * float((left * right).sum(1).abs().sum())


# A reference that is wrong.


def tiny_bounds(collectors: list[BoundCollector], references: list[HeadReference]) -> list[HeadBounds]:
    found = ORIGINAL_BOUNDS(collectors, references)
    return [HeadBounds(of_head.out / 1e6, of_head.lse, of_head.delta, of_head.dq) for of_head in found]


def product_in_fp32(weights: Tensor, values: Tensor) -> Tensor:
    return (weights.float() @ values.float()).double()


WRONG: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "reference": (forward, "product_in_parts", product_in_fp32),
    "bound": (BoundCollector, "each", staticmethod(tiny_bounds)),
}


def blames_the_reference(head: HeadDiagnosis) -> bool:
    verdict, certificate = some(head.verdict), some(head.certificate)
    return (
        not certificate.held
        and certificate.worst_ratio["o"] > 1
        and (verdict.labels, verdict.evidence) == (("undecided",), "none")
        and verdict.reasons[0].startswith("THE REFERENCE IS WRONG HERE")
        and "Report the capture" in verdict.suggestions[0]
        and "THE BOUND IS VIOLATED" in (certificate_words(head) or "")
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reference_is_named_and_nothing_concluded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(torch.bfloat16)
    sound = attn_diag.inspect(**tensors, causal=True, certify=6)
    assert not any(blames_the_reference(head) for head in heads(sound))
    assert not sound.summary.warnings
    monkeypatch.setattr(*WRONG[name])
    wrong = attn_diag.inspect(**tensors, causal=True, certify=6)
    assert all(blames_the_reference(head) for head in heads(wrong))
    # Its p-values must not sharpen the tests of other heads either.
    assert (sound.family.size > 0, wrong.family.size) == (True, 0)
    assert len(wrong.summary.warnings) == 2
    assert "H1: THE REFERENCE IS WRONG HERE" in wrong.summary.warnings[1]


# Certified rows.


def masked_rows() -> Tensor:
    mask = torch.randn(T, T, generator=torch.Generator().manual_seed(2))
    mask[5] = -torch.inf
    return mask


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (9, 0)},
    "softcap": {"softcap": 2.0},
    "mask": {"mask": masked_rows()},
    "bool mask": {"mask": masked_rows() > 0.0, "causal": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_certified_in_any_call(name: str) -> None:
    tensors = inputs(torch.bfloat16)
    tensors["q"][0, 1, 7, 2] = torch.nan
    options = {"recipes": ["fa2"], **CALLS[name]}
    del tensors["o"]
    certified = [h.certificate for h in heads(attn_diag.inspect(**tensors, **options, certify=10))]
    assert [c.rows for c in certified if c is not None] == [10, 10, 20]
    assert all(c is not None and c.held and set(c.worst_ratio) == {"o", "lse", "delta", "dq"} for c in certified)
    assert all(0 < ratio <= 1 for c in certified if c is not None for ratio in c.worst_ratio.values())


def test_what_is_certified_of_a_sink_is_said() -> None:
    certified = attn_diag.inspect(**inputs(torch.bfloat16), causal=True, sinks=torch.tensor([0.5, -1.0]), certify=1)
    assert ", dSink 0." in (certificate_words(next(heads(certified))) or "")


def test_grouped_query_heads_are_certified(captures: Path) -> None:
    diagnosis = inspect_captures([load(captures / "gqa_T200.safetensors")], device="cpu", certify=2)
    found = [head.certificate for head in heads(diagnosis)]
    assert [c.rows for c in found if c is not None] == [2] * 8 + [16]
    assert all(c is not None and c.held for c in found)


def test_which_rows_are_certified() -> None:
    """Half of the count spread evenly, half where the bound of O is largest; rows by number; never unusable ones."""
    out = torch.zeros(40, 3, dtype=torch.float64)
    out[[17, 23, 30]] = torch.tensor([[3.0], [2.0], [9.0]], dtype=torch.float64)
    bounds = HeadBounds(out, out[:, 0], None, None)
    usable = torch.ones(40, dtype=torch.bool)
    usable[30] = False
    assert Certify(4).choose(bounds, usable) == [0, 17, 23, 39]
    assert Certify(2, frozenset({3, 30})).choose(bounds, usable) == [0, 3, 17]
    assert Certify(0, Ranges.parse("rows", "5-7")).choose(bounds, usable) == [5, 6, 7]
    assert Certify(1000).choose(bounds, usable) == [t for t in range(40) if t != 30]


def test_rows_that_cannot_be_used_certify_nothing() -> None:
    tensors = inputs(torch.bfloat16)
    del tensors["o"]
    only = Certify(rows=frozenset({5}))
    head = next(heads(attn_diag.inspect(**tensors, mask=masked_rows(), certify=only)))
    assert head.certificate == Certificate(0, 128, {}, True)
    assert "nothing" in (certificate_words(head) or "")


def test_pooled_certificates() -> None:
    parts = [Certificate(3, 128, {"o": 0.1, "lse": 0.5}, True), None, Certificate(4, 128, {"o": 2.0}, False)]
    assert pool_certificates(parts) == Certificate(7, 128, {"o": 2.0, "lse": 0.5}, False)
    assert pool_certificates([None]) is None


# The command line.


def test_certify_on_the_command_line(run: Run, tmp_path: Path) -> None:
    target, page = tmp_path / "out.json", tmp_path / "out.html"
    code, out, _ = run(
        "inspect",
        "--example",
        "--certify",
        8,
        "--certify-rows",
        "0,100-101",
        "--json",
        target,
        "--html",
        page,
        "--json-full",
    )
    assert code == 0
    line = "rows recomputed in mpmath (128 bits): every error of the float64 reference is within its bound"
    assert line in " ".join(out.split())
    assert "the reference's own error has moved these means by at most: " in " ".join(out.split())
    shown = Diagnosis.from_json(embedded_diagnosis(page.read_text()))
    assert [h.certificate is not None and h.certificate.held for _, _, h in shown.entries()] == [True]
    document = json.loads(target.read_text())
    validator = jsonschema.Draft202012Validator(attn_diag.json_schema())
    validator.validate(document)
    head = document["captures"][0]["observations"][0]["heads"][0]
    assert 8 <= head["certificate"]["rows"] <= 11
    assert head["certificate"]["held"] is True
    assert all(0 < ratio <= 1 for ratio in head["certificate"]["worst_ratio"].values())
    assert 0 < head["bias"]["delta"]["reference_bound"] < 1e-8 * head["bias"]["delta"]["standard_error"]
    # The schema is not satisfied by anything.
    head["certificate"]["held"] = "perhaps"
    assert not validator.is_valid(document)


def test_without_certify_there_is_no_certificate(run: Run) -> None:
    code, out, _ = run("inspect", "--example", "--certify", 0, "--json", "-", "--json-full")
    assert code == 0
    head = json.loads(out)["captures"][0]["observations"][0]["heads"][0]
    assert head["certificate"] is None
    assert head["bias"]["o_excess"]["reference_bound"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--certify", "-1"), "the number of rows to certify must be 0 or more, got -1"),
        (("--certify", "many"), "Invalid value for '--certify'"),
        (("--certify", "1", "--certify-bits", "53"), "must lie between 64 and 32768 bits, got 53"),
        (("--certify", "1", "--certify-bits", "99999"), "must lie between 64 and 32768 bits, got 99999"),
        (("--certify-rows", "3,205"), "no row 205 to certify; the capture has rows 0 to 204"),
        (("--certify-rows", "10-99999999999"), "no row 205 to certify; the capture has rows 0 to 204"),
        (("--certify-rows", "last"), "--certify-rows takes numbers and ranges such as 0,3-5, got 'last'"),
    ],
)
def test_what_cannot_be_certified_is_exit_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("inspect", "--example", *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_what_cannot_be_certified_in_python() -> None:
    for wrong in (1.5, "3", True):
        with pytest.raises(InputError, match=r"a number of rows or attn_diag.Certify"):
            attn_diag.inspect(**inputs(torch.bfloat16), causal=True, certify=wrong)  # type: ignore[arg-type]
    assert attn_diag.Certify is Certify
    for row in (T, -1):
        with pytest.raises(InputError, match=f"no row {row} to certify; the capture has rows 0 to {T - 1}"):
            attn_diag.inspect(**inputs(torch.bfloat16), causal=True, certify=Certify(rows=frozenset({row})))


def test_one_default_precision() -> None:
    of_command = inspect.signature(command).parameters["certify_bits"].annotation.__metadata__[0]
    assert Certify(1).bits == DEFAULT_BITS
    assert of_command.help.endswith(f"(default {DEFAULT_BITS}).")


def test_an_oracle_that_cannot_tell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of zero beside an irrational truth: no precision decides it; here all that there is are 128 bits."""
    monkeypatch.setattr("attn_diag.reference.certify.MAX_BITS", 128)
    monkeypatch.setattr("attn_diag.reference.certify.OracleRow.ends", lambda row, *_: row.out_ends(8))
    with pytest.raises(InputError, match="--certify: row 0: 128 bits cannot tell whether out is within its bound"):
        attn_diag.inspect(**inputs(torch.bfloat16), causal=False, certify=Certify(rows=frozenset({0})))
