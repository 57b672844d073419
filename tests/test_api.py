"""The Python face: tensors in, a Diagnosis out; its repr, and how consoles and notebooks show it."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from builders import first_head, rounded_dq, rounded_inputs, some
from rich.console import Console

import attn_diag
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.selection import Selection
from attn_diag.results.diagnosis import HeadDiagnosis


def tensors(heads: int = 2, rows: int = 48, **sizes: Any) -> dict[str, Any]:
    """BF16 inputs and outputs that are correct to one rounding."""
    given = rounded_inputs(heads, rows, **sizes)
    return given | {"dq": rounded_dq(given)}


def test_inspect_at_a_breakpoint() -> None:
    diagnosis = attn_diag.inspect(**tensors(), causal=True)
    text = repr(diagnosis)
    assert len(text.splitlines()) <= 25
    assert "Of 2 heads 1 is undecided" in " ".join(text.split())
    pooled = diagnosis.captures[0].observations[0].pooled
    assert pooled.rows_all == 96
    assert any("bit-identical to correct rounding" in reason for reason in some(pooled.verdict).reasons)
    assert "biased" not in diagnosis.labels


@pytest.mark.parametrize("rows", [slice(3, 4), slice(None)], ids=["one key", "all keys"])
def test_a_sequence_with_nan_in_its_keys_leaves_the_others_judged(rows: slice) -> None:
    given = tensors(heads=1)
    two: dict[str, Any] = {name: torch.cat([x, x.flip(2)]) for name, x in given.items() if isinstance(x, torch.Tensor)}
    made = [torch.zeros_like(two["k"]), torch.zeros_like(two["v"])]
    two["k"][0, 0, rows, 2] = torch.nan
    head = first_head(attn_diag.inspect(**two, dk=made[0], dv=made[1], causal=True))
    assert {q.quantity: q.answer for q in head.quantities}.keys() == {"o", "dq", "dk", "dv"}


def test_correct_rounding_has_no_excess_and_no_test_of_it() -> None:
    head = first_head(attn_diag.inspect(**tensors(), causal=True))
    excess = some(head.bias.o_excess)
    assert (excess.mean, excess.p_value) == (0, None)
    assert some(head.bias.delta_excess).p_value is None
    assert some(head.rounding_bias.o).mean == some(head.bias.o).mean


def test_quantities_without_their_tensor_are_null() -> None:
    given = tensors()
    head = first_head(attn_diag.inspect(**{name: given[name] for name in "qkvo"}, causal=True))
    assert head.bias.o is not None
    assert {head.noise_factor, head.conditioning, head.delta_source} == {None}
    assert {head.bias.delta, head.bias.lse, head.propagation.dq} == {None}


def test_without_observation_a_recipe_is_emulated_and_said_to_be() -> None:
    given = tensors()
    diagnosis = attn_diag.inspect(
        given["q"], given["k"], given["v"], do=given["do"], causal=True, recipes=["fa2", "qiu2025"], device="cpu"
    )
    fa2, qiu = diagnosis.captures[0].observations
    assert fa2.emulated
    assert fa2.backend == "emulation on cpu"
    assert "fa2 (emulated)" in diagnosis.report()
    assert some(fa2.pooled.noise_factor) < 2 < some(qiu.pooled.noise_factor)
    assert qiu.pooled.row_maxima.as_run is not None
    default = attn_diag.inspect(given["q"], given["k"], given["v"])
    assert [o.name for o in default.captures[0].observations] == ["fa2 (emulated)"]


def test_planted_bias_along_do_is_found_through_excess() -> None:
    given = tensors(rows=1024, heads=1, d=64)
    away = torch.randint(0, 200, given["o"].shape, generator=torch.Generator().manual_seed(1)) == 0
    step = torch.where(given["do"] > 0, 1, -1) * torch.where(given["o"] > 0, 1, -1)
    bits = given["o"].view(torch.int16)
    # One element in 200 moved by one ulp along dO: a bias of 0.005 ulp.
    given["o"] = torch.where(away, bits + step.short(), bits).view(torch.bfloat16)
    pooled = attn_diag.inspect(**given, causal=True).captures[0].observations[0].pooled
    verdict = some(pooled.verdict)
    assert "biased" in verdict.labels
    assert verdict.evidence == "significant"
    assert some(some(pooled.bias.delta_excess).p_adjusted) < 1e-6


def test_family_counts_every_primary_test_once() -> None:
    diagnosis = attn_diag.inspect(**tensors(heads=3), causal=True)
    heads = diagnosis.captures[0].observations[0].heads
    counted = [
        e
        for h in heads
        for e in (h.bias.delta, h.bias.delta_excess, h.bias.o_excess, h.bias.o_away_excess)
        if e and e.p_value is not None
    ]
    assert diagnosis.family.size == len(counted) == 4
    raw, adjusted = [e.p_value for e in counted], [e.p_adjusted for e in counted]
    assert all(a is not None and p is not None and a >= p for a, p in zip(adjusted, raw, strict=True))


def test_eight_sequences_are_the_clusters() -> None:
    few, many = (first_head(attn_diag.inspect(**tensors(batch=b, rows=16), causal=True)) for b in (7, 8))
    given = tensors(batch=7, rows=16)
    scores = (given["q"].double() @ given["k"].double().mT).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    assert some(few.bias.delta).n_clusters == sum(len(sequence.unique()) for sequence in scores[:, 0].argmax(-1))
    assert some(many.bias.delta).n_clusters == 8
    assert few.batch is None
    # Eight clusters never have more than eight effective terms: sequences are not to be called too few for that.
    assert "undecided" not in some(many.verdict).labels


def test_grouped_heads_and_selection() -> None:
    capture = attn_diag.Capture.from_tensors(tensors(heads=4, kv_heads=2), causal="top-left", head_offset=8)
    diagnosis = inspect_captures([capture], selection=Selection(heads=frozenset({9, 11})))
    assert [h.head for h in diagnosis.captures[0].observations[0].heads] == [9, 11, None]
    with pytest.raises(attn_diag.InputError, match="no head 3; the capture has 8 to 11"):
        inspect_captures([capture], selection=Selection(heads=frozenset({3})))


def test_nan_made_by_the_kernel_is_a_label_of_its_own() -> None:
    given = tensors()
    given["o"][0, 0, 7] = math.inf
    head = first_head(attn_diag.inspect(**given, causal=True))
    verdict = some(head.verdict)
    assert verdict.labels == ("nonfinite",)
    assert verdict.reasons[0] == "O holds NaN or Inf: rows 0-6 are right; row 7 holds NaN or Inf; rows 8-47 are right."


def test_rich_and_notebook_faces() -> None:
    diagnosis = attn_diag.inspect(**tensors(), causal=True)
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(diagnosis)
    assert "Of 2 heads 1 is undecided" in " ".join(console.export_text().split())
    assert "<table>" in diagnosis._repr_html_()


def test_captured_delta_is_preferred_and_its_own_rounding_reported() -> None:
    given = tensors()
    exact = (given["do"].double() * given["o"].double()).sum(-1)
    head = first_head(attn_diag.inspect(**given, delta=exact.float(), causal=True))
    assert head.delta_source == "captured"
    assert some(head.delta_rounding).rms == pytest.approx(
        float((exact.float().double() - exact)[0, 0].square().mean().sqrt())
    )


def test_ambiguous_causal_is_refused() -> None:
    given = tensors()
    with pytest.raises(attn_diag.InputError, match="ambiguous"):
        attn_diag.inspect(given["q"][:, :, :10], given["k"], given["v"], causal=True)


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        attn_diag.inspect(**tensors(heads=4), causal=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_recipe_run_on_all_nan_queries_is_undecided_too() -> None:
    """delta comes with an emulated recipe, and there is no row to compare it on."""
    q, k, v, do = (torch.randn(1, 1, 16, 16).bfloat16() for _ in range(4))
    found = attn_diag.inspect(torch.full_like(q, torch.nan), k, v, do=do, device="cpu")
    assert found.labels == {"undecided"}


def sink(rounding: str, rows: int = 128) -> HeadDiagnosis:
    """A head in which one key takes nearly everything in every row, its O rounded as stated."""
    generator = torch.Generator().manual_seed(11)
    q, k, v, do = (torch.randn(1, 1, n, 32, generator=generator) for n in (rows, 128, 128, rows))
    q[..., 0], k[..., 0], k[:, :, 0] = 4.0, 0.0, 0.0
    k[:, :, 0, 0] = 12.0
    q, k, v, do = (x.bfloat16() for x in (q, k, v, do))
    probs = (q.double() @ k.double().mT / 32**0.5).softmax(-1)
    assert (probs.argmax(-1) == 0).all()
    o = attn_diag.round_to(probs @ v.double(), rounding).bfloat16()
    return first_head(attn_diag.inspect(q, k, v, o=o, do=do, causal=False))


def test_an_attention_sink_is_judged_by_rows_and_features() -> None:
    """All rows have one argmax key, and so would be one cluster."""
    right, wrong = sink("bf16"), sink("bf16:toward-zero")
    assert "biased" not in some(right.verdict).labels
    assert set(some(wrong.verdict).labels) == {"lossy", "biased"}
    assert some(right.bias.delta).n_clusters == 32, "features"
    assert some(wrong.bias.o_away_excess).n_clusters == 128, "rows"


def test_a_single_row_is_no_sample() -> None:
    found = sink("bf16:toward-zero", rows=1)
    verdict = some(found.verdict)
    assert "undecided" in verdict.labels
    assert any("a single row" in reason for reason in verdict.reasons)
