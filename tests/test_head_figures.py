"""A head's figures against a direct computation in float64: dense, row by row, nothing shared but ``round_to``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import SHARED, first_head, inspected, rounded_dq, rounded_inputs, some, stored, true_o
from torch import Tensor

import attn_diag
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.head.figure_sums import UlpCounts
from attn_diag.results.diagnosis import HeadDiagnosis, HeadFigures
from attn_diag.results.figures import PredictedError, RowStrip

# S - m at and above which P_bar rounds to 1 in BF16: the middle between 1 and the number before it.
UNIT = math.log(1 - 2**-9)


@dataclass
class Sequence:
    """One head of one sequence, dense: the rows that can be used and all that the figures are about, [n, …]."""

    rows: Tensor
    scores: Tensor
    do: Tensor | None
    o: Tensor | None
    out: Tensor
    dq: Tensor | None
    true_dq: Tensor | None
    probs_k: Tensor
    scale: float
    x: Tensor | None = None

    @property
    def contributions(self) -> Tensor:
        return some(self.do) * (some(self.o) - self.out)

    @property
    def predicted_dq(self) -> Tensor:
        return -self.scale * self.contributions.sum(1, keepdim=True) * self.probs_k


def sequence(
    q: Tensor, k: Tensor, v: Tensor, *, do: Tensor | None = None, o: Tensor | None = None, dq: Tensor | None = None,
    x: Tensor | None = None, mask: Tensor | None = None, causal: bool = True, scale: float | None = None,
) -> Sequence:  # fmt: skip
    """From the tensors of one head [T, D], as they are stored."""
    given = [None if t is None else t.double() for t in (q, k, v, do, o, dq)]
    q, k, v, do, o, dq = given  # type: ignore[assignment]
    alpha = q.shape[1] ** -0.5 if scale is None else scale
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if causal:
        seen &= torch.ones_like(seen).tril()
    if mask is not None:
        seen &= mask
    bad_keys = ~(k.isfinite().all(1) & v.isfinite().all(1))
    usable = q.isfinite().all(1) & seen.any(1) & ~(seen & bad_keys).any(1)
    for tensor in (do, o, dq):
        if tensor is not None:
            usable &= tensor.isfinite().all(1)
    rows = usable.nonzero()[:, 0]
    k, v = k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)
    scores = (alpha * q[rows] @ k.T).masked_fill(~seen[rows], -math.inf)
    probs = scores.softmax(1)
    out = probs @ v
    pick = [None if t is None else t[rows] for t in (do, o, dq, None if x is None else x.double())]
    true_dq = None
    if do is not None:
        dprobs = do[rows] @ v.T
        true_dq = alpha * (probs * (dprobs - (do[rows] * out).sum(1, keepdim=True))) @ k
    return Sequence(rows, scores, pick[0], pick[1], out, pick[2], true_dq, probs @ k, alpha, pick[3])


def groups(first: tuple[int, ...], count: int) -> list[slice]:
    return [slice(a, b) for a, b in zip(first, [*first[1:], count], strict=False)]


def multiplicities(one: Sequence) -> tuple[Tensor, Tensor]:
    """By "exact" and "unit", [n]."""
    top = one.scores.amax(1, keepdim=True)
    rounded = attn_diag.round_to(one.scores, "bf16")
    exact = (rounded == rounded.amax(1, keepdim=True)).sum(1)
    return exact, (one.scores - top >= UNIT).sum(1)


def check_rows(figures: HeadFigures, truth: list[Sequence]) -> None:
    """The runs name every analysed row, in order."""
    runs = figures.rows
    named = [
        (batch, row + i)
        for part, batch, row in zip(groups(runs.first, runs.rows), runs.batch, runs.row, strict=True)
        for i in range(part.stop - part.start)
    ]
    assert named == [(batch, row) for batch, one in enumerate(truth) for row in one.rows.tolist()]
    assert runs.total == len(runs.first)


def check_strip(figures: HeadFigures, truth: list[Sequence]) -> None:
    strip = figures.strip
    found = [torch.cat(column) for column in zip(*map(multiplicities, truth), strict=True)]
    count = len(found[0])
    assert len(strip.first_rows) == min(count, 512)
    sizes = {part.stop - part.start for part in groups(strip.first_rows, count)}
    assert not sizes or max(sizes) - min(sizes) <= 1
    for shown, true in zip((strip.exact, strip.unit), found, strict=True):
        assert list(shown) == [int(true[part].max()) for part in groups(strip.first_rows, count)]


def check_positions(figures: HeadFigures, truth: list[Sequence]) -> None:
    pairs, start = [], 0
    for one in truth:
        unit = one.scores - one.scores.amax(1, keepdim=True) >= UNIT
        several = unit & (unit.sum(1, keepdim=True) > 1)
        pairs += [(start + row, key) for row, key in several.nonzero().tolist()]
        start += len(one.rows)
    shown = figures.unit_positions
    assert shown.total == len(pairs)
    listed = list(zip(shown.rows, shown.keys, strict=True))
    assert len(listed) == len(set(listed)) <= 512
    if len(pairs) <= 512:
        assert listed == pairs
    else:
        assert len(listed) == 512
        assert set(listed) <= set(pairs)
        assert list(shown.rows) == sorted(shown.rows)


def check_histogram(figures: HeadFigures, truth: list[Sequence]) -> None:
    if any(one.o is None for one in truth):
        assert figures.o_error is None
        return
    errors = []
    for one in truth:
        exponent = torch.frexp(one.out.abs().clamp(min=2.0**-126))[1] - 1
        errors.append(((some(one.o) - one.out) / 2.0 ** (exponent.double() - 7)).flatten())
    error = torch.cat(errors).numpy()
    if not len(error):
        assert figures.o_error is None
        return
    shown = some(figures.o_error)
    assert sum(shown.counts) + shown.below + shown.above == len(error)
    assert 1 <= len(shown.counts) <= 64
    assert max(shown.below, shown.above) <= 1e-2 * len(error)
    edges = shown.lowest + shown.width * np.arange(len(shown.counts) + 1)
    # One bin is centred on 0, or would be.
    assert (shown.lowest / shown.width - 0.5) % 1 == pytest.approx(0, abs=1e-9)
    # Means of few equal V lie on edges exactly: such an element may be counted on either side.
    counted = shown.below + np.cumsum([0, *shown.counts])
    assert ((error[:, None] < edges - 1e-9).sum(0) <= counted).all()
    assert ((error[:, None] < edges + 1e-9).sum(0) >= counted).all()


def check_alignment(figures: HeadFigures, truth: list[Sequence]) -> None:
    if any(one.o is None or one.do is None for one in truth):
        assert figures.alignment is None
        return
    parts = torch.cat([one.contributions for one in truth])
    shown = some(figures.alignment)
    positive, nonzero = (parts > 0).sum(0).tolist(), (parts != 0).sum(0).tolist()
    assert list(shown.aligned) == [p / n if n else None for p, n in zip(positive, nonzero, strict=True)]
    terms = sum(float((one.do.abs() * one.o.abs()).sum()) for one in truth if one.do is not None and one.o is not None)
    assert shown.contribution == pytest.approx(parts.sum(0).tolist(), rel=0, abs=1e-12 * terms)


def check_gradient(shown: PredictedError, parts: list[slice], true: dict[str, Tensor | None]) -> None:
    for name, tensor in true.items():
        got = getattr(shown, name)
        if tensor is None:
            assert got is None
        else:
            wanted = [float(tensor[part].norm()) for part in parts]
            assert list(got) == pytest.approx(wanted, rel=1e-9, abs=1e-12 * float(tensor.norm())), name


def check_dq(figures: HeadFigures, truth: list[Sequence]) -> None:
    first = truth[0]
    if first.true_dq is None or (first.o is None and first.dq is None):
        assert figures.dq is None
        return
    shown = some(figures.dq)
    count = sum(len(one.rows) for one in truth)
    assert len(shown.first) == min(count, 128)
    observed = None if first.dq is None else torch.cat([one.dq - one.true_dq for one in truth])  # type: ignore[operator]
    predicted = None if first.o is None else torch.cat([one.predicted_dq for one in truth])
    reference = torch.cat([one.true_dq for one in truth if one.true_dq is not None])
    true = {"observed": observed, "predicted": predicted, "reference": reference}
    check_gradient(shown, groups(shown.first, count), true)


def check_dw_q(figures: HeadFigures, truth: list[Sequence]) -> None:
    if truth[0].x is None:
        assert figures.dw_q is None
        return

    def projected(rows: list[Tensor]) -> Tensor:
        return torch.stack([t.T @ one.x for t, one in zip(rows, truth, strict=True) if one.x is not None]).sum(0)

    reference = [one.true_dq for one in truth if one.true_dq is not None]
    observed = [one.dq - one.true_dq for one in truth if one.dq is not None and one.true_dq is not None]
    predicted = [one.predicted_dq for one in truth]
    shown, features = some(figures.dw_q), truth[0].probs_k.shape[1]
    assert shown.first == tuple(range(features))
    rows = {"observed": observed, "predicted": predicted, "reference": reference}
    check_gradient(shown, groups(shown.first, features), {name: projected(part) for name, part in rows.items()})


def check_max_logit(figures: HeadFigures, truth: list[Sequence]) -> None:
    largest = [float(one.scores.max()) for one in truth if len(one.rows)]
    if not largest:
        assert figures.max_logit is None
    else:
        assert figures.max_logit == pytest.approx(max(largest), rel=1e-12)


CHECKS: dict[str, Callable[[HeadFigures, list[Sequence]], None]] = {
    "rows": check_rows,
    "strip": check_strip,
    "positions": check_positions,
    "histogram": check_histogram,
    "alignment": check_alignment,
    "dq": check_dq,
    "dw_q": check_dw_q,
    "max_logit": check_max_logit,
}


def check_all(head: HeadDiagnosis, truth: list[Sequence]) -> None:
    for check in CHECKS.values():
        check(some(head.figures), truth)


def truth_of(capture: attn_diag.Capture, name: str, head: int) -> list[Sequence]:
    def read(what: str, index: int, batch: int) -> Tensor | None:
        return capture.read(what, batch, index)

    kv = head // (capture.q_heads // capture.kv_heads)
    result = []
    for batch in range(capture.batch):
        q, k, v = (some(read(what, index, batch)) for what, index in (("q", head), ("k", kv), ("v", kv)))
        result.append(
            sequence(
                q, k, v, do=read("do", head, batch), o=read(capture.key(name, "o"), head, batch),
                dq=read(capture.key(name, "dq"), head, batch), scale=capture.scale,
                x=capture.tensors["x"][batch] if "x" in capture.tensors else None,
                causal=capture.metadata.causal != "none",
            )
        )  # fmt: skip
    return result


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", SHARED)
def test_figures_of_every_shared_capture(name: str, device: str) -> None:
    capture = stored(name)
    diagnosis = inspected(name) if device == "cpu" else inspect_captures([capture], device=device)
    for observation in diagnosis.captures[0].observations:
        assert observation.pooled.figures is None
        for head in observation.heads[:-1]:
            check_all(head, truth_of(capture, observation.name, some(head.head) - capture.metadata.head_offset))


@pytest.mark.parametrize("name", SHARED)
def test_figures_agree_with_what_else_is_reported(name: str) -> None:
    """Norms by group make the relative errors, and contributions delta's error."""
    capture = stored(name)
    for observation in inspected(name).captures[0].observations:
        for head in observation.heads[:-1]:
            figures = some(head.figures)
            for figure, error in ((figures.dq, head.propagation.dq), (figures.dw_q, head.propagation.dw_q)):
                assert (figure is None) == (error is None)
                if figure is None or error is None:
                    continue
                parts = figure.predicted, figure.observed, figure.reference
                predicted, observed, size = (math.hypot(*some(part)) for part in parts)
                assert predicted / size == pytest.approx(error.predicted_relative_error, rel=1e-12)
                assert observed / size == pytest.approx(error.relative_error, rel=1e-12)
            if head.delta_source == "from_o":
                # delta's error is a difference of sums that are larger by far: 2**-53 of those, a few times over.
                true = truth_of(capture, observation.name, (head.head or 0) - capture.metadata.head_offset)[0]
                terms = float((some(true.do).abs() * true.out.abs()).sum())
                total = some(head.bias.delta).cumulative_sum
                assert sum(some(figures.alignment).contribution) == pytest.approx(total, rel=0, abs=1e-12 * terms)


def moved_strip(strip: RowStrip) -> RowStrip:
    return replace(strip, first_rows=(0, *(row + 1 for row in strip.first_rows[1:])))


# What a bug could make of a figure, by the check that must see it and what is wrong.
MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rows: off by one": ("rows", lambda runs: replace(runs, row=tuple(row + 1 for row in runs.row))),
    "strip: the definitions swapped": ("strip", lambda strip: replace(strip, exact=strip.unit, unit=strip.exact)),
    "strip: groups moved by a row": ("strip", moved_strip),
    "positions: keys moved": ("unit_positions", lambda p: replace(p, keys=tuple(key + 1 for key in p.keys))),
    "positions: one lost": ("unit_positions", lambda p: replace(p, rows=p.rows[1:], keys=p.keys[1:])),
    "histogram: signs turned": ("o_error", lambda h: replace(h, counts=h.counts[::-1])),
    "histogram: half a bin off": ("o_error", lambda h: replace(h, lowest=h.lowest + h.width / 2)),
    "histogram: the tails lost": ("o_error", lambda h: replace(h, below=0, above=0)),
    "alignment: signs turned": ("alignment", lambda a: replace(a, aligned=tuple(1 - (x or 0.0) for x in a.aligned))),
    "alignment: contributions turned": (
        "alignment",
        lambda a: replace(a, contribution=tuple(-c for c in a.contribution)),
    ),
    "dq: observed for predicted": ("dq", lambda dq: replace(dq, predicted=dq.observed)),
    "dq: squares for norms": ("dq", lambda dq: replace(dq, predicted=tuple(p * p for p in dq.predicted))),
    "dw_q: features turned": ("dw_q", lambda dw_q: replace(dw_q, observed=dw_q.observed[::-1])),
    "max_logit: of magnitudes": ("max_logit", lambda largest: largest * 1.001),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_checks_reject(mutant: str) -> None:
    figures = some(first_head(inspected("gpt2_step637_L2H6")).figures)
    truth = truth_of(stored("gpt2_step637_L2H6"), "observed", 0)
    check, (field, change) = CHECKS[mutant.partition(":")[0]], MUTANTS[mutant]
    check(figures, truth)
    with pytest.raises(AssertionError):
        check(replace(figures, **{field: change(getattr(figures, field))}), truth)


def tensors(batch: int = 1, heads: int = 1, kv_heads: int = 1, length: int = 48, d: int = 16) -> dict[str, Tensor]:
    """BF16 inputs with pairs of equal keys, and an O and dQ that nearly fit."""
    given = rounded_inputs(heads, length, batch=batch, kv_heads=kv_heads, d=d, seed=length)
    given["k"][:, :, 1::2] = given["k"][:, :, : length - 1 : 2]
    given["o"] = true_o(given["q"], given["k"], given["v"]).bfloat16()
    return given | {"dq": rounded_dq(given)}


def direct(given: dict[str, Tensor], head: int, mask: Tensor | None = None) -> list[Sequence]:
    kv_head = head * given["k"].shape[1] // given["q"].shape[1]

    def of(batch: int) -> Sequence:
        rest: dict[str, Any] = {name: given[name][batch, head] for name in ("do", "o", "dq") if name in given}
        q, k, v = given["q"][batch, head], given["k"][batch, kv_head], given["v"][batch, kv_head]
        return sequence(q, k, v, mask=mask, **rest)

    return [of(batch) for batch in range(len(given["q"]))]


def assert_all_heads(given: dict[str, Tensor], mask: Tensor | None = None) -> list[HeadDiagnosis]:
    diagnosis = attn_diag.inspect(**given, mask=mask, causal=True, device="cpu")  # type: ignore[arg-type]
    heads = diagnosis.captures[0].observations[0].heads
    assert attn_diag.Diagnosis.from_json(diagnosis.to_json()) == diagnosis
    for number, head in enumerate(heads[:-1]):
        check_all(head, direct(given, number, mask))
    return list(heads[:-1])


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="one head"),
        pytest.param({"batch": 3, "heads": 4, "kv_heads": 2, "length": 37}, id="batch of grouped heads"),
        pytest.param({"batch": 2, "length": 700}, id="more rows than groups"),
        pytest.param({"length": 1}, id="one row"),
        pytest.param({"length": 129}, id="one row more than groups of dQ"),
    ],
)
def test_shapes(shape: dict[str, int]) -> None:
    assert_all_heads(tensors(**shape))


@pytest.mark.parametrize("present", [(), ("o",), ("do",), ("do", "o"), ("do", "dq"), ("o", "do", "dq")], ids=",".join)
def test_what_a_capture_lacks_has_no_figure(present: tuple[str, ...]) -> None:
    """Without any output a recipe is run; then its O is the one that is drawn."""
    given = tensors()
    given = {name: given[name] for name in ("q", "k", "v", *present)}
    if {"o", "dq"} & set(present):
        assert_all_heads(given)
        return
    figures = some(first_head(attn_diag.inspect(**given, causal=True, device="cpu")).figures)  # type: ignore[arg-type]
    assert figures.o_error is not None
    assert (figures.alignment is None) == (figures.dq is None) == ("do" not in present)


def test_rows_that_see_no_key_are_named_as_left_out() -> None:
    mask = torch.ones(48, 48, dtype=torch.bool)
    mask[5:8] = False
    mask[20] = False
    (head,) = assert_all_heads(tensors(), mask)
    rows = some(head.figures).rows
    assert (head.rows_all, head.rows_fully_masked) == (44, 4)
    assert (rows.first, rows.row) == ((0, 5, 17), (0, 8, 21))


@pytest.mark.parametrize("tensor", ["q", "k", "v", "do", "o", "dq"])
def test_rows_with_nan_are_named_as_left_out(tensor: str) -> None:
    given = tensors(batch=2, heads=2, kv_heads=1)
    given[tensor][1, 0, 30, 3] = math.nan
    heads = assert_all_heads(given)
    # A key is seen by itself and every later row, in both query heads that share it.
    lost = 18 if tensor in "kv" else 1
    assert heads[0].rows_nonfinite == lost
    assert some(heads[0].figures).rows.rows == 96 - lost


def test_no_usable_row() -> None:
    given = tensors()
    given |= {name: torch.full_like(given[name], math.nan) for name in ("q", "o")}
    (head,) = assert_all_heads(given)
    assert head.rows_all == 0
    assert some(head.verdict).labels == ("undecided",)
    figures = some(head.figures)
    assert figures.strip.first_rows == ()
    assert (figures.o_error, figures.max_logit) == (None, None)


def test_an_emulated_recipe_has_figures_of_its_own() -> None:
    from attn_diag.kernels import emulate_head, preset
    from attn_diag.reference import AttentionHead, Masking

    given = tensors(length=96, d=32)
    two = attn_diag.inspect(**given, causal=True, recipes=["qiu2025"], device="cpu").captures[0].observations  # type: ignore[arg-type]
    q, k, v, do = (given[name][0, 0].double() for name in ("q", "k", "v", "do"))
    run = emulate_head(preset("qiu2025", "bf16", 32), AttentionHead(q, k, v, do, 32**-0.5, Masking("top-left")))
    check_all(two[0].heads[0], direct(given, 0))
    emulated = {**given, "o": run.o[None, None], "dq": some(run.dq)[None, None]}
    figures = some(two[1].heads[0].figures)
    for name in ("strip", "positions", "histogram", "alignment"):
        CHECKS[name](figures, direct(emulated, 0))
    with pytest.raises(AssertionError):
        check_histogram(figures, direct(given, 0))


def test_positions_beyond_512_are_spread_over_the_rows() -> None:
    given = tensors(length=600)
    (head,) = assert_all_heads(given)
    shown = some(head.figures).unit_positions
    assert shown.total > 600
    halves = sum(row < 300 for row in shown.rows) / len(shown.rows)
    assert 0.4 < halves < 0.6


def test_equal_keys_keep_sixteen_positions_a_row() -> None:
    """And count all of them."""
    given = tensors(length=40)
    given["k"] = given["k"][:, :, :1].expand_as(given["k"]).contiguous()
    del given["o"], given["dq"]
    figures = some(first_head(attn_diag.inspect(**given, causal=True, device="cpu")).figures)  # type: ignore[arg-type]
    assert figures.unit_positions.total == sum(range(2, 41))
    assert max(figures.unit_positions.rows.count(row) for row in range(40)) == 16
    assert figures.strip.unit == tuple(range(1, 41))


@pytest.mark.parametrize("scale", [0.3, 40.0, 1e5, 1e200], ids=str)
def test_histogram_suits_errors_of_any_size(scale: float) -> None:
    errors = scale * torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shown = some(UlpCounts.of(errors.clone()).histogram())
    assert sum(shown.counts) + shown.below + shown.above == 20_000
    if scale < 1e100:
        assert 20 <= len(shown.counts) <= 64
        middles = shown.lowest + shown.width * (torch.arange(len(shown.counts)) + 0.5)
        spread = float((torch.tensor(shown.counts) * middles.square()).sum() / sum(shown.counts)) ** 0.5
        inside = errors[(errors > shown.lowest) & (errors < shown.lowest + shown.width * len(shown.counts))]
        assert len(inside) >= 0.98 * 20_000
        assert spread == pytest.approx(float(inside.square().mean().sqrt()), rel=0.01)


@pytest.mark.parametrize("sizes", [(0.3, 0.3), (0.3, 200.0), (1e4, 5.0), (1e60, 0.3)], ids=str)
def test_sequences_join_as_if_they_were_one(sizes: tuple[float, float]) -> None:
    """Bins of different widths nest: joined counts are those of all elements in the wider bins."""
    generator = torch.Generator().manual_seed(2)
    parts = [size * torch.randn(5_000, dtype=torch.float64, generator=generator) for size in sizes]
    counts = [UlpCounts.of(part.clone()) for part in parts]
    joined = UlpCounts.join(counts)
    width = 3**joined.level / 32
    everything = torch.cat(parts) / width
    fits = everything.abs() <= 2048.5
    wanted = torch.bincount(everything[fits].round().long() - joined.first, minlength=len(joined.counts))
    assert wanted.tolist() == joined.counts.tolist()
    widest = max(range(2), key=lambda i: counts[i].level)
    part, other = counts[widest], counts[1 - widest]
    for wrong in (replace(part, level=part.level + 1), replace(part, first=part.first + 1)):
        found = UlpCounts.join([wrong, other])
        seen = found.level, found.first, found.counts.tolist()
        assert seen != (joined.level, joined.first, wanted.tolist()), "a wrong width or place is seen"


def test_an_error_of_zero_is_in_the_middle_of_a_bin() -> None:
    """Of errors that are symmetric about 0 the histogram is too."""
    errors = torch.linspace(-3, 3, 101, dtype=torch.float64)
    shown = some(UlpCounts.of(torch.cat([errors, torch.zeros(50, dtype=torch.float64)])).histogram())
    assert shown.counts == shown.counts[::-1]
    assert shown.counts[len(shown.counts) // 2] >= 51


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"softcap": 3.0}, id="softcap"),
        pytest.param({"window": (7, 0)}, id="window"),
        pytest.param({"mask": torch.linspace(-3, 2, 48).expand(48, 48)}, id="additive mask"),
    ],
)
def test_options_of_attention_reach_the_figures(options: dict[str, Any]) -> None:
    """Norms by group make the relative errors that are reported, which other tests hold against the oracle."""
    given: dict[str, Any] = {**tensors(), "causal": True}
    plain, head = (first_head(attn_diag.inspect(**given, **more, device="cpu")) for more in ({}, options))
    for entry in (plain, head):
        dq = some(some(entry.figures).dq)
        ratio = math.hypot(*some(dq.predicted)) / math.hypot(*dq.reference)
        assert ratio == pytest.approx(some(entry.propagation.dq).predicted_relative_error, rel=1e-12)
    assert plain.figures != head.figures
