"""Comparisons: false alarms on unbiased redraws, planted biases found, degrees of freedom, matching, the command."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from builders import some
from command_line import Run
from diffed_runs import diagnosed, entries, heads_of, with_heads
from torch import Tensor

import attn_diag
from attn_diag.analyses.comparison.diff import compare
from attn_diag.analyses.inspection import inspect as inspection
from attn_diag.reports.diff_groups import changed_heads
from attn_diag.reports.renderers import page
from attn_diag.results import wording
from attn_diag.results.comparison import Comparison
from attn_diag.results.diagnosis import Diagnosis, Verdict
from attn_diag.statistics import sizes
from attn_diag.statistics.welch import Estimated

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("healthy", ["bf16", "bf16:stochastic"])
def test_a_planted_truncation_became_biased_and_its_removal_cures(healthy: str) -> None:
    before, after = diagnosed(healthy, 5, heads=60), diagnosed("bf16:toward-zero", heads=60)
    assert all("became-biased" in e.outcomes for e in entries(before, after, 0.01))
    assert all("cured" in e.outcomes for e in entries(after, before, 0.01))
    other = diagnosed("bf16:toward-zero", seed=1, heads=60)
    assert not any({"became-biased", "cured"} & set(e.outcomes) for e in entries(after, other, 0.01))


def test_the_opposite_direction_is_reversed() -> None:
    (found,) = compare(diagnosed("bf16:up", heads=1), diagnosed("bf16:down", heads=1)).entries
    assert found.outcomes[0] == "bias-reversed"


@pytest.mark.parametrize("rounding", ["bf16", "bf16:toward-zero"])
def test_equal_to_itself(rounding: str, tmp_path: Path) -> None:
    diagnosis = diagnosed(rounding, heads=8, rows=256)
    saved = tmp_path / "a.json"
    saved.write_text(diagnosis.to_json())
    for found in (attn_diag.diff(diagnosis, diagnosis), attn_diag.diff(saved, diagnosis)):
        assert found.identical
        assert not found.outcomes
        assert {m.difference for e in found.entries for m in e.means} == {0.0}
        assert {s.ratio for e in found.entries for s in e.sizes} <= {1.0, None}
        assert "Nothing changed: every figure of 8 heads is the same." in found.report()
    assert not attn_diag.diff(diagnosis, diagnosed("bf16:up", heads=8, rows=256)).identical


def test_same_inputs_are_told_from_others() -> None:
    one = diagnosed("bf16", heads=8, rows=256)
    shared = compare(one, diagnosed("bf16:up", heads=8, rows=256))
    assert {e.same_inputs for e in shared.entries} == {True}
    assert "ran on the same inputs" in " ".join(shared.notes)
    other = compare(one, diagnosed("bf16", heads=8, rows=256, seed=9))
    assert {e.same_inputs for e in other.entries} == {False}
    assert "different inputs" in " ".join(other.notes)


def shortened(value: Any, digits: int) -> Any:
    """As an HTML report writes numbers."""
    if isinstance(value, dict):
        return {key: shortened(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


@pytest.mark.parametrize("digits", [4, 6, 17])
def test_shortened_numbers_are_no_change(digits: int) -> None:
    full = diagnosed("bf16:toward-zero", heads=8, rows=256)
    short = Diagnosis.from_json(json.dumps(shortened(json.loads(full.to_json()), digits)))
    for found in (compare(full, short), compare(short, full)):
        assert found.identical
        assert not found.outcomes
        assert {e.same_inputs for e in found.entries} == {True}
    other = compare(short, diagnosed("bf16:toward-zero", heads=8, rows=256, seed=9))
    assert not other.identical
    assert {e.same_inputs for e in other.entries} == {False}


def test_sameness() -> None:
    assert wording.same(0.123456789, 0.1235)
    assert wording.same(1.00049, 1.0)
    assert not wording.same(0.123456789, 0.1236)
    assert not wording.same(0.123456789012, 0.123457789012)
    assert not wording.same(1e-300, 0.0)
    assert not wording.same(math.inf, 1.0)
    assert wording.same(math.nan, math.nan)
    assert not wording.same(None, 0.0)


def test_a_label_alone_is_no_cure() -> None:
    biased = diagnosed("bf16:toward-zero", heads=1)
    words = Verdict(("clean",), "seen", ("why",), ("what to do",))
    clean = with_heads(biased, [dataclasses.replace(head, verdict=words) for head in heads_of(biased)])
    for a, b, note in ((biased, clean, "not called a cure"), (clean, biased, "not called a new bias")):
        entry = compare(a, b).entries[0]
        assert entry.outcomes == ("relabelled",)
        assert note in entry.notes[0]


def test_a_wrong_row_is_no_matter_of_chance() -> None:
    """A row of zeros: too few rows carry it for a test of the size."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 96, 32, generator=make).bfloat16() for _ in range(3))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    sound, one, many = o, o.clone(), o.clone()
    one[:, :, 60] = 0
    many[:, :, 0] = -9 * many[:, :, 0]
    found = [attn_diag.inspect(q, k, v, o=x, causal=True) for x in (sound, one, many)]
    assert [d.summary.labels for d in found] == [{"clean": 1}, {"wrong": 1}, {"wrong": 1}]
    for (a, b), outcome, verdict in (((0, 1), "grew", "FAIL"), ((1, 0), "shrank", "BETTER")):
        changed = compare(found[a], found[b])
        assert changed.entries[0].outcomes == (outcome,)
        assert changed.report().startswith(f"{verdict}: head 0")


def test_more_of_a_wrong_error_is_no_matter_of_chance_on_the_same_inputs() -> None:
    """A row is off by a fifth, then nine times too large, or another one is; on other inputs nothing is called OK."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 96, 32, generator=make).bfloat16() for _ in range(3))
    other = torch.randn(1, 1, 96, 32, generator=make).bfloat16()

    def found(query: Tensor, by: float, rows: slice = slice(60, 61)) -> Diagnosis:
        o = torch.nn.functional.scaled_dot_product_attention(query, k, v, is_causal=True)
        o[:, :, rows] *= 1 + by
        return attn_diag.inspect(query, k, v, o=o, causal=True)

    little, much, elsewhere = found(q, 0.2), found(q, 8.0), found(q, 8.0, slice(2, 3))
    assert [d.summary.labels for d in (little, much, elsewhere)] == [{"wrong": 1}] * 3
    for b in (much, elsewhere):
        assert compare(little, b).entries[0].outcomes == ("grew",)
        assert compare(little, b).report().startswith("FAIL: head 0: errors grew (O ")
        assert compare(b, little).report().startswith("BETTER: head 0: errors shrank (O ")
    assert compare(little, found(q, 0.25)).report().startswith("UNDECIDED: Not tested in 1 head, wrong in both")
    on_other = compare(little, found(other, 8.0))
    assert on_other.entries[0].outcomes == ()
    assert on_other.report().startswith("UNDECIDED: Not tested in 1 head, wrong in both")


def test_a_quantity_that_became_wrong_beside_another_is_told() -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 96, 32, generator=make).bfloat16() for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
    dq, dk, dv = (g.clone() for g in torch.autograd.grad(o, leaves, do))
    dk[:, :, 40] *= 9

    def found(out: Tensor) -> Diagnosis:
        return attn_diag.inspect(q, k, v, o=out, do=do, dq=dq, dk=dk, dv=dv, causal=True)

    o = o.detach()
    worse = o.clone()
    worse[:, :, 60] *= 3
    changed = compare(found(o), found(worse))
    assert changed.entries[0].a_labels[0] == changed.entries[0].b_labels[0] == "wrong"
    assert changed.report().startswith("FAIL: head 0: errors grew (O "), changed.report()


def renamed(diagnosis: Diagnosis, source: str, observation: str = "observed", **metadata: str) -> Diagnosis:
    (capture,) = diagnosis.captures
    (seen,) = capture.observations
    seen, metadata = dataclasses.replace(seen, name=observation), capture.metadata | metadata
    capture = dataclasses.replace(capture, source=source, metadata=metadata, observations=(seen,))
    return dataclasses.replace(diagnosis, captures=(capture,))


def together(*parts: Diagnosis) -> Diagnosis:
    return dataclasses.replace(parts[0], captures=tuple(c for p in parts for c in p.captures))


def test_matching() -> None:
    one, other = diagnosed("bf16", heads=1), diagnosed("bf16:toward-zero", heads=1)
    alone = compare(renamed(one, "x.safetensors", "flash"), renamed(other, "y.safetensors", "paper"))
    assert alone.matched_by == (
        "the only capture of each",
        "observation flash of A with paper of B, the only ones left",
    )
    a = together(renamed(one, "run1/a.safetensors"), renamed(other, "run1/b.safetensors"), renamed(one, "run1/c.pt"))
    b = together(renamed(other, "run2/b.pt"), renamed(one, "run2/a.pt"), renamed(one, "run2/d.pt"))
    by_name = compare(a, b)
    assert [(e.a_source, e.b_source) for e in by_name.entries] == [
        ("run1/a.safetensors", "run2/a.pt"),
        ("run1/b.safetensors", "run2/b.pt"),
    ]
    assert not by_name.outcomes
    assert [(u.side, u.what) for u in by_name.unmatched] == [("A", "run1/c.pt"), ("B", "run2/d.pt")]
    a = together(renamed(one, "p", layer="1", step="9"), renamed(other, "q", layer="2", step="9"))
    b = together(renamed(other, "r", layer="2", step="9"), renamed(one, "s", layer="1", step="9"))
    by_layer = compare(a, b)
    assert by_layer.matched_by == ("captures by layer, step and rank",)
    assert not by_layer.outcomes
    twice = together(renamed(one, "x/a.pt"), renamed(one, "y/a.pt"), renamed(one, "b.pt"))
    assert len(compare(twice, twice).entries) == 1
    with pytest.raises(attn_diag.InputError, match="nothing to compare"):
        compare(together(renamed(one, "p"), renamed(one, "q")), together(renamed(one, "r"), renamed(one, "s")))


def run_of(steps: dict[int, str], *, layer: str = "3", seed: int = 100) -> Diagnosis:
    """A head's diagnoses at several steps, of inputs of their own; its O rounded as stated."""
    made = []
    for step, rounding in steps.items():
        one = diagnosed(rounding, seed=seed + step, heads=1, rows=192)
        heads = [dataclasses.replace(h, layer=int(layer)) for h in heads_of(one)]
        made.append(renamed(with_heads(one, heads), f"step{step}_layer{layer}", step=str(step), layer=layer))
    return together(*made)


HEALTHY = dict.fromkeys(range(0, 800, 100), "bf16")


def test_a_difference_that_comes_has_its_onset() -> None:
    coarse = HEALTHY | dict.fromkeys(range(300, 800, 100), "e8m4")
    found = compare(run_of(HEALTHY), run_of(coarse))
    trend = next(t for t in found.trends if t.name == "o_factor")
    assert trend.steps == tuple(HEALTHY)
    assert trend.beyond == (False,) * 3 + (True,) * 5
    assert (trend.onset, trend.outcome) == (300, "since")
    assert trend.values[:3] == pytest.approx([1, 1, 1])
    assert "they differ from step 300 on in L3H0" in found.summary
    assert found.trends[0].outcome == "since", "the clearest first"
    assert wording.head_names([(3, 1), (3, 0), (None, 4), (7, 2), (3, 3)]) == "H4, L3H0-1, L3H3, L7H2"
    shown = found.report(100)
    assert "Over the steps" in shown
    assert "step 300 on" in shown
    assert Comparison.from_json(found.to_json()) == found
    jsonschema.validate(json.loads(found.to_json()), Comparison.json_schema())


def test_a_difference_that_goes_again_has_none() -> None:
    for steps in (HEALTHY | dict.fromkeys((200, 300), "e8m4"), HEALTHY):
        found = compare(run_of(HEALTHY), run_of(steps))
        assert {t.onset for t in found.trends} == {None}
        assert not {t.outcome for t in found.trends} - {"none"}
    assert "Over the steps" not in found.report(100)


def test_a_difference_that_grows_is_said_to() -> None:
    """Three bits, one after the other: the error doubles twice."""
    steps = dict(zip(HEALTHY, ("bf16", "bf16", "e8m6", "e8m6", "e8m5", "e8m5", "e8m4", "e8m4"), strict=True))
    trend = next(t for t in compare(run_of(HEALTHY), run_of(steps)).trends if t.name == "o_factor")
    assert (trend.outcome, trend.onset) == ("grows", 200)
    assert some(trend.tau) > 0.8
    assert some(trend.p_adjusted) <= 0.01
    back = next(t for t in compare(run_of(steps), run_of(HEALTHY)).trends if t.name == "o_factor")
    assert back.outcome == "shrinks"


def test_heads_matched_by_layer_alone_are_called_as_in_b(captures: Path) -> None:
    healthy, failing = (captures / f"{name}.safetensors" for name in ("gpt2_step637_L2H6", "failing_step500_L2H7"))
    found = attn_diag.diff(healthy, failing, match=("layer",))
    (entry,) = found.entries
    assert (entry.layer, entry.head, entry.b_step) == (2, 7, 500)
    assert "It is compared with L2H6 of A." in entry.notes
    assert f"attn-diag inspect {failing} --head 7" in " ".join(found.report().split())


def test_matching_by_layer_and_head_across_steps() -> None:
    before, after = run_of({0: "bf16"}), run_of({500: "e8m4"})
    (entry,) = compare(before, after, by=("layer", "head")).entries
    assert (entry.a_step, entry.b_step, entry.same_inputs) == (0, 500, False)
    assert "grew" in entry.outcomes
    later = run_of({s: "bf16" if s < 600 else "e8m4" for s in range(400, 900, 100)})
    found = compare(before, later, by=("layer", "head"))
    assert [(e.a_step, e.b_step) for e in found.entries] == [(0, s) for s in range(400, 900, 100)]
    assert "the one step of A with each of the other's" in found.matched_by
    assert next(t for t in found.trends if t.name == "o_factor").onset == 600
    turned = compare(later, before, by=("layer", "head"))
    assert next(t for t in turned.trends if t.name == "o_factor").steps == tuple(range(400, 900, 100))
    two, others = run_of({0: "bf16", 100: "bf16"}), run_of({500: "e8m4", 600: "e8m4"})
    ordered = compare(two, others, by=("layer", "head"))
    assert [(e.a_step, e.b_step) for e in ordered.entries] == [(0, 500), (100, 600)]
    assert not ordered.trends, "two steps are no trend"
    some_common = compare(run_of({0: "bf16", 100: "bf16"}), run_of({100: "e8m4", 200: "e8m4"}), by=("layer", "head"))
    assert [(e.a_step, e.b_step) for e in some_common.entries] == [(100, 100)]
    assert {u.reason for u in some_common.unmatched} == {"this step is not there"}
    with pytest.raises(attn_diag.InputError, match="cannot be matched by 'haed'; known: layer, head, batch, step"):
        compare(two, others, by=("haed",))
    with pytest.raises(attn_diag.InputError, match="--match layer,head matches across steps"):
        compare(two, others)
    with pytest.raises(attn_diag.InputError, match="at several steps in both, at none of them in both"):
        compare(two, run_of({500: "bf16", 600: "bf16", 700: "bf16"}), by=("layer", "head"))


def test_factors_are_compared_by_their_own_intervals() -> None:
    """Where sizes of one head alone say nothing, the ratio to a well-rounded kernel on the same inputs does."""
    fine, coarse = (diagnosed(r, heads=4, rows=256) for r in ("bf16", "e8m6"))
    changes = [{s.name: s for s in e.sizes} for e in compare(fine, coarse).entries if e.head is not None]
    assert all(c["o_factor"].outcome == "grew" for c in changes)
    assert all(some(c["o_factor"].low) < 1 < some(c["o_factor"].high) < some(c["o_factor"].ratio) for c in changes)
    # Up to 1.1 a factor is as good as can be.
    one = sizes.Sizes({"o_factor": 1.0}, {}, {"o_factor": Estimated(0.0, 0.0, 50.0)})
    other = sizes.Sizes({"o_factor": 1.09}, {}, {"o_factor": Estimated(math.log(1.09), 0.0, 50.0)})
    assert sizes.size_changes(one, other, 0.01)[0].outcome == "none"
    third = sizes.Sizes({"o_factor": 1.11}, {}, {"o_factor": Estimated(math.log(1.11), 0.0, 50.0)})
    assert sizes.size_changes(one, third, 0.01)[0].outcome == "grew"


def test_heads_without_a_verdict_are_not_compared() -> None:
    diagnosis = diagnosed("bf16", heads=8, rows=256)
    heads = [dataclasses.replace(h, verdict=None) if h.head == 3 else h for h in heads_of(diagnosis)]
    found = compare(diagnosis, with_heads(diagnosis, heads))
    assert [e.head for e in found.entries] == [0, 1, 2, 4, 5, 6, 7]
    assert [(u.side, u.reason.partition(":")[0]) for u in found.unmatched] == [("B", "no verdict there")]


def test_json_and_schema() -> None:
    found = compare(diagnosed("bf16", heads=8, rows=256), diagnosed("bf16:up", heads=8, rows=256))
    document = json.loads(found.to_json())
    jsonschema.Draft202012Validator(Comparison.json_schema()).validate(document)
    assert (document["schema"], document["schema_version"]) == ("attn-diag-comparison", 1)
    assert Comparison.from_json(found.to_json()) == found


@pytest.mark.parametrize("width", [60, 80, 120])
def test_report(width: int) -> None:
    found = compare(diagnosed("bf16", heads=8, rows=256), diagnosed("bf16:toward-zero", heads=8, rows=256))
    text = found.report(width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for needed in ("Of 8 heads: 8 became biased", "same inputs", "Welch's test", "Benjamini-Hochberg", "adjusted p ="):
        assert needed in flat, needed
    assert "…" not in text
    assert flat.startswith("FAIL: all 8 heads: now lossy and biased (mean error of"), flat[:80]
    rows = [line for line in text.splitlines() if line.startswith("all 8")]
    assert len(rows) == 1, "heads that changed alike have one row"
    single = [m.p_adjusted for e in found.entries if e.head is not None for m in e.means]
    assert rows[0].endswith(f"{min(p for p in single if p is not None):.2g}")


def cells_and_rows(text: str) -> tuple[list[str], list[str]]:
    """Where the cells of the tables of verdicts lead to, and the addresses of the rows that there are."""
    return re.findall(r'<td class="\w+(?: few)?"><a href="#([^"]+)"', text), re.findall(r'<tr id="([^"]+)">', text)


def test_page(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(diagnosed("bf16", heads=8, rows=256), diagnosed("bf16:toward-zero", heads=8, rows=256))
    text = page(found)
    assert '<h1 dir="auto">FAIL: all 8 heads: now lossy and biased (mean error of' in text
    assert [text.count(f'<td class="{label}">') for label in ("clean", "lossy")] == [8, 8]
    cells, rows = cells_and_rows(text)
    assert len(cells) == 16
    assert len(rows) == 8
    assert {*cells} == {*rows}
    data = re.search(r'id="attn-diag-gallery">(.*?)</script>', text)
    assert data is not None
    maps = {chart["name"]: chart["map"] for section in json.loads(data[1]) for chart in section}
    assert {*maps} >= {"factor-a", "factor-b", "noise_factor-a", "noise_factor-b"}
    for name in {name[:-2] for name in maps}:
        assert maps[f"{name}-a"]["ends"] == maps[f"{name}-b"]["ends"], "other colours in A and B"
    for entry in found.entries:
        worst = max((some(s.b) for s in entry.sizes if s.name == "o_factor"), default=0.0)
        assert entry.head is None or maps["factor-b"]["values"][0][entry.head] == worst
    # Of more heads than are listed, cells lead to the last row.
    monkeypatch.setattr("attn_diag.reports.diff_page._LISTED", 3)
    cells, rows = cells_and_rows(page(found))
    assert len(rows) == 3
    assert {*cells} == {*rows}


def test_page_of_many_steps_of_one_layer() -> None:
    text = page(compare(run_of(HEALTHY), run_of(HEALTHY | dict.fromkeys(range(300, 800, 100), "e8m4"))))
    assert '<thead><tr><th scope="col">step</th>' in text
    assert "Over the steps" in text
    assert page(compare(diagnosed("bf16", heads=1), diagnosed("bf16", heads=1))).count("<tr id=") == 1


def test_heads_that_changed_alike_are_one_group() -> None:
    """Over layers and steps, with their onset; those of all heads together are told only where they alone changed."""
    coarse = HEALTHY | dict.fromkeys(range(300, 800, 100), "e8m4")
    found = compare(run_of(HEALTHY), run_of(coarse))
    changed = [e for e in found.entries if {*e.outcomes} - {"relabelled"}]
    (group,) = changed_heads(found, changed)
    assert group.place == f"layer 3, head {changed[0].head or 0}, from step 300 on"
    assert group.change == "now lossy"
    assert len(group.entries) == 5
    text = " ".join(found.report(80).split())
    factor = next(size for size in group.entries[0].sizes if size.name == "o_factor")
    now, before = wording.times(factor.b), wording.times(factor.a)
    said = f"now lossy (O {now} times a well-rounded kernel's error, was {before})"
    assert text.startswith(f"FAIL: {group.place}: {said}. Of 8 heads")
    pooled = [e for e in found.entries if e.head is None] or [dataclasses.replace(e, head=None) for e in changed]
    (alone,) = changed_heads(found, pooled[:1])
    assert "its heads taken together" in alone.place
    back = compare(run_of(coarse), run_of(HEALTHY))
    assert back.report(80).startswith(f"BETTER: {group.place}: no longer lossy")


def test_command(tmp_path: Path, run: Run) -> None:
    healthy, broken = tmp_path / "healthy.json", tmp_path / "broken.json"
    healthy.write_text(diagnosed("bf16", heads=8, rows=256).to_json())
    broken.write_text(diagnosed("bf16:toward-zero", heads=8, rows=256).to_json())
    done = run("diff", healthy, broken, "--fail-on", "became-biased", "--json", tmp_path / "out.json", "--plain")
    assert done.code == 1, done.err
    assert "summary      Of 8 heads: 8 became biased" in done.out
    assert done.out.isascii()
    assert json.loads((tmp_path / "out.json").read_text())["counts"]["became-biased"] == 8
    assert run("diff", broken, healthy, "--fail-on", "became-biased,bias-grew,unmatched").code == 0
    assert run("diff", healthy, healthy, "--fail-on", "became-biased,cured,grew,shrank,relabelled").code == 0
    unknown = run("diff", healthy, broken, "--fail-on", "worse")
    assert (unknown.code, unknown.out) == (2, "")
    assert "known: became-biased" in unknown.err
    assert run("diff", healthy, broken, "--level", 2).code == 2
    missing = run("diff", healthy, tmp_path / "nothing.json")
    assert missing.code == 2
    assert "nothing.json: no such file" in missing.err


def test_two_kernels_of_one_capture(captures: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    inspected: list[object] = []
    inspect = inspection.inspect_captures

    def counted(*captures: Any, **options: Any) -> Diagnosis:
        inspected.append(captures)
        return inspect(*captures, **options)

    monkeypatch.setattr(inspection, "inspect_captures", counted)
    path = captures / "kernels_pair_T512.safetensors"
    chosen = ("--a-observation", "flash", "--b-observation", "stable")
    file = tmp_path / "page.html"
    done = run("diff", path, path, *chosen, "--fail-on", "became-biased", "--html", file)
    assert done.code == 1, done.err
    text = file.read_text()
    assert "<h3><bdi>A: kernels_pair_T512.safetensors, flash</bdi></h3>" in text
    assert "<h3><bdi>B: kernels_pair_T512.safetensors, stable</bdi></h3>" in text
    assert "1 became biased, 2 with larger errors" in done.out
    flat = " ".join(done.out.split())
    assert "observation flash, 2 heads judged: 2 ill_conditioned." in flat
    assert "observation stable, 2 heads judged: 2 lossy, 1 biased." in flat
    wrong = run("diff", path, path, "--a-observation", "nope")
    assert wrong.code == 2
    assert "no observation 'nope'; it has flash, flex, paper, stable" in wrong.err
    assert len(inspected) == 1, "the file once, and not for a name that it lacks"
