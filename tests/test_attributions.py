"""``attribute`` of a folder: which layers, heads and sites carry dW_Q's error; and ``inspect --details all``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import planted_folders
import pytest
import torch
from browsers import Open
from builders import some
from command_line import Run
from planted_folders import CAUSAL, SCALE, D, coarse_scores, healthy, noisy_dq
from rich.cells import cell_len
from torch import Tensor

import attn_diag
from attn_diag import Capture, InputError
from attn_diag.analyses.attribution.of_captures import attribute_captures
from attn_diag.captures.selection import Selection
from attn_diag.reference import AttentionHead, reference_head
from attn_diag.reports import html_document
from attn_diag.reports.error_map import finding
from attn_diag.reports.renderers import page as page_of
from attn_diag.results.attribution import Attribution
from attn_diag.results.attributions import Attributions, ErrorMap, HeadError, side_by_side
from attn_diag.results.wording import percent

ROWS = 64


def capture(kernels: Any, *, layer: int, **given: Any) -> Capture:
    return planted_folders.capture(kernels, layer=layer, rows=ROWS, **given)


def grown(layer: int, head: int, factor: float, **given: Any) -> Capture:
    """A coarse kernel of two heads, one of which has ``factor`` times the scores, and so the larger error."""
    made = capture([coarse_scores] * 2, layer=layer, **given)
    tensors = {name: tensor[...].clone() for name, tensor in made.tensors.items()}
    tensors["w_q"][head * D : (head + 1) * D] *= factor
    tensors["q"][:, head] *= factor
    outputs = coarse_scores(head_of(tensors, head))
    for name in ("o", "dq", "dk", "dv"):
        tensors[name][0, head] = outputs[name].bfloat16()
    return Capture.from_tensors(tensors, causal="top-left", scale=SCALE, layer=layer, step=given.get("step"))


def head_of(tensors: dict[str, Tensor], head: int, batch: int = 0) -> AttentionHead:
    q, k, v, do = (tensors[n][batch, head].double() for n in ("q", "k", "v", "do"))
    return AttentionHead(q, k, v, do, scale=SCALE, masking=CAUSAL)


def without(made: Capture, *names: str) -> Capture:
    return replace(made, tensors={n: t for n, t in made.tensors.items() if n not in names})


@cache
def model() -> tuple[Capture, ...]:
    """Two layers of two heads; a power of two makes layer 3's head 1 the culprit and keeps q = x w_q^T exact."""
    return capture([healthy] * 2, layer=0, step=500), grown(3, 1, 16.0, step=500)


@cache
def found() -> Attributions:
    return attribute_captures(model(), device="cpu")


def only(maps: tuple[ErrorMap, ...]) -> ErrorMap:
    (one,) = maps
    return one


def dw_q_errors(made: Capture) -> tuple[dict[int, float], float]:
    """By head, ||error of dW_Q||; and that of the whole layer's dW_Q as one matrix."""
    tensors = {name: tensor[...] for name, tensor in made.tensors.items()}
    errors = []
    for head in range(len(tensors["dq"][0])):
        exact = some(reference_head(head_of(tensors, head)).dq)
        errors.append((tensors["dq"][0, head].double() - exact).T @ tensors["x"][0].double())
    return {head: float(e.norm()) for head, e in enumerate(errors)}, float(torch.cat(errors).norm())


def test_squares_of_heads_add_up_to_the_whole_dw_qs() -> None:
    """Against dW_Q of every layer as one matrix, worked out directly."""
    one, layers = only(found().maps), [dw_q_errors(made) for made in model()]
    whole = sum(layer**2 for _, layer in layers)
    assert sum(some(h.share) for h in one.heads) == pytest.approx(1.0, abs=1e-12)
    for made, (heads, _) in zip(model(), layers, strict=True):
        for head, error in heads.items():
            entry = next(h for h in one.heads if (h.layer, h.head) == (made.metadata.layer, head))
            assert entry.captured
            assert some(entry.share) == pytest.approx(error**2 / whole, rel=1e-6)
            assert some(entry.relative) * some(entry.norm) == pytest.approx(error, rel=1e-6)


def test_the_culprit_and_its_site_are_named() -> None:
    one = only(found().maps)
    assert (one.quantity, one.step, one.carry_most) == ("dw_q", 500, 1)
    top = one.heads[0]
    assert (top.layer, top.head, top.site, top.reason) == (3, 1, "scores", "")
    assert some(top.site_share) > 0.5
    # Sites over all heads: the sums of the heads' own.
    scores = next(s.share for s in one.sites if s.site == "scores")
    own = [
        some(entry.share) * site.effects["dw_q"].share
        for entry in one.heads
        for result in found().results
        for h in result.heads
        for site in h.sites
        if (h.layer, h.head, site.site) == (entry.layer, entry.head, "scores")
    ]
    assert scores == pytest.approx(sum(own))
    assert sum(s.share for s in one.sites) + one.not_attributed == pytest.approx(1.0, abs=1e-6)
    assert one.not_attributed == 0


UNNAMED: dict[str, tuple[Callable[[], Capture], str]] = {
    "a dQ that is not the recipe's": (
        lambda: capture([healthy, noisy_dq(0.4)], layer=3),
        "captured dQ errs otherwise than",
    ),
    "NaN in dQ": (lambda: changed("dq", 0.0), "NaN or Inf in 1 of its rows"),
    "an O that no recipe makes": (lambda: changed("o", 0.01), "No recipe that is known here made this O"),
}


def changed(name: str, noise: float) -> Capture:
    """A healthy layer in which one output of head 1 has noise of this size; NaN in one row for none."""
    made = capture([healthy] * 2, layer=3)
    tensors = {n: tensor[...].clone() for n, tensor in made.tensors.items()}
    factors = 1 + noise * torch.randn(ROWS, D, generator=torch.Generator().manual_seed(5))
    if not noise:
        factors[9] = torch.nan
    tensors[name][0, 1] = (tensors[name][0, 1].float() * factors).bfloat16()
    return Capture.from_tensors(tensors, causal="top-left", scale=SCALE, layer=3)


@pytest.mark.parametrize("name", UNNAMED)
def test_no_site_is_named_of_a_head_that_no_recipe_explains(name: str) -> None:
    make, reason = UNNAMED[name]
    made = attribute_captures([capture([healthy] * 2, layer=0), make()], device="cpu")
    one = only(made.maps)
    odd = next(h for h in one.heads if (h.layer, h.head) == (3, 1))
    assert odd.site is None
    assert reason in odd.reason
    if name == "NaN in dQ":
        # Every row is part of dW_Q: nothing is known of its error, and no part of the sum is.
        assert (odd.relative, odd.share, one.not_attributed) == (None, None, 0)
    else:
        # What it errs by was captured all the same.
        assert one.not_attributed == pytest.approx(some(odd.share))
    assert [h.site is None for h in one.heads].count(True) == 1
    report = made.report(80)
    assert report.startswith("UNKNOWN ")
    assert "Not attributed: L3H1" in report


def said(made: Attributions) -> str:
    """The finding."""
    return " ".join(made.report(width=200).partition("Next:")[0].split())


def test_a_layer_that_was_captured_twice_counts_once() -> None:
    twice, once = [replace(found(), results=found().results * n).results for n in (2, 1)]
    renamed = [*once, *(replace(one, source=f"copies/{one.source}.2") for one in twice[2:])]
    copied, single = only(side_by_side(renamed)), only(found().maps)
    assert copied.heads == single.heads
    assert copied.relative == single.relative
    assert any("holds the same numbers as" in note for note in copied.notes)
    # Another kernel on the same inputs is no copy.
    other = replace(once[0], source="other", heads=tuple(replace(h, recipe="other") for h in once[0].heads))
    both = only(side_by_side([*once, other]))
    assert len(both.heads) == 6
    assert any("has the inputs of" in note for note in both.notes)


def test_captures_that_do_not_state_their_layer_are_told_apart() -> None:
    files = [replace(capture([healthy] * 2, layer=n), source=f"{n}.pt") for n in (0, 3)]
    unstated = [replace(one, metadata=replace(one.metadata, layer=None)) for one in files]
    made = attribute_captures(unstated, device="cpu")
    assert "of 4 heads" in said(made) or "all 4 heads" in said(made)
    assert "sequences" not in said(made)
    assert ".pt the largest" in said(made)
    assert any("do not state their layer" in message for message in made.warnings)


def test_no_site_is_named_of_a_head_without_an_error() -> None:
    made = capture([healthy] * 2, layer=0)
    tensors = {name: tensor[...].clone() for name, tensor in made.tensors.items()}
    for name in ("do", "dq", "dk", "dv"):
        tensors[name][:, 1] = 0
    one = attribute_captures([Capture.from_tensors(tensors, causal="top-left", scale=SCALE, layer=0)], device="cpu")
    idle = only(one.maps).heads[1]
    assert (idle.head, idle.share, idle.site, idle.open) == (1, 0.0, None, False)
    assert one.report().startswith("NORMAL")
    assert not any("Not attributed" in line for line in one.report().splitlines())


def test_a_head_of_unknown_recipe_and_gradient_has_no_part() -> None:
    made = attribute_captures(
        [capture([healthy] * 2, layer=0), without(changed("o", 0.01), "dq", "dk", "dv")], device="cpu"
    )
    one = only(made.maps)
    last = one.heads[-1]
    assert (last.layer, last.head, last.share, last.relative, last.site) == (3, 1, None, None, None)
    assert [h.captured for h in one.heads[:-1] if h.layer == 3] == [False]
    assert len(one.known) == 3
    report = " ".join(made.report().split())
    assert "3 heads of layers 0, 3 whose error is known" in report
    assert "(error not known)" in report
    assert "The errors of 1 head are those of the emulated recipe" in report


def test_heads_are_compared_by_the_deepest_quantity_that_is_known() -> None:
    layers = [
        capture([healthy], layer=0),
        without(capture([healthy], layer=1), "x", "w_q"),
        without(capture([healthy], layer=2), "do", "dq", "dk", "dv"),
    ]
    made = attribute_captures(layers, device="cpu")
    assert {one.quantity: one.heads[0].layer for one in made.maps} == {"dw_q": 0, "dq": 1, "o": 2}
    assert any("x or w_q was not captured" in note for one in made.maps for note in one.notes)
    # The deepest leads.
    assert made.report().startswith("NORMAL 3 captures: dW_Q of L0H0 is ")


def test_without_an_o_no_recipe_is_taken_for_the_kernels() -> None:
    made = attribute_captures([without(c, "o", "dq", "dk", "dv") for c in model()], device="cpu")
    assert {h.site for h in only(made.maps).heads} == {None}
    asked = attribute_captures([without(c, "o", "dq", "dk", "dv") for c in model()], recipe="bf16-scores", device="cpu")
    assert only(asked.maps).heads[0].site == "scores"
    # That recipe's dQ beside another kernel's is no attribution.
    other = attribute_captures([capture([healthy] * 2, layer=0)], recipe="bf16-scores", device="cpu")
    assert {h.site for h in only(other.maps).heads} == {None}


def test_steps_and_sequences_are_apart() -> None:
    captures = [capture([healthy], layer=0, step=step, batch=2) for step in (100, 200)]
    made = attribute_captures(captures, device="cpu")
    assert [one.step for one in made.maps] == [100, 200]
    assert [sorted(some(h.batch) for h in one.heads) for one in made.maps] == [[0, 1], [0, 1]]
    assert "2 sequences of 1 head" in made.report().replace("\n", " ")
    assert "step by step" in made.report()


def test_heads_that_carry_the_error_are_told_with_all_their_sequences() -> None:
    captures = [capture([kernel], layer=layer, batch=4) for layer, kernel in enumerate([healthy, noisy_dq(0.5)])]
    one = only(attribute_captures(captures, device="cpu").maps)
    # Of its four some suffice for 90 %, as they are named by their head alone.
    words = finding(replace(one, carry_most=2))
    whole = sum(some(h.share) for h in one.heads if h.layer == 1)
    assert words.startswith(f"L1H0 carries {percent(whole, '.0f')} of dW_Q's squared error over 8 sequences of 2 heads")


def test_an_older_document_without_norms_has_no_parts() -> None:
    document = json.loads(found().results[0].to_json())
    for head in document["heads"]:
        del head["norms"]
    del document["step"]
    older = Attribution.from_json(json.dumps(document))
    assert {h.share for h in only(side_by_side([older])).heads} == {None}


def test_progress_counts_heads() -> None:
    seen: list[tuple[int, int]] = []
    attribute_captures(model(), device="cpu", progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {4}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (4, 4)


def test_the_first_line_is_the_finding() -> None:
    first = " ".join(found().report(80).split("Next:")[0].split())
    assert first.startswith("COARSE 2 captures: L3H1 carries ")
    assert "of dW_Q's squared error over 4 heads of layers 0, 3; the rounding of the scores S" in first


def test_a_coarse_head_is_not_hidden_by_a_larger_error() -> None:
    """The larger error is a healthy kernel's on a head with a large gradient, or at another step."""
    large = capture([healthy], layer=1, step=500)
    tensors = {n: 16 * t[...] if n in ("do", "dq", "dk", "dv") else t[...] for n, t in large.tensors.items()}
    large = Capture.from_tensors(tensors, causal="top-left", scale=SCALE, layer=1, step=500)
    made = attribute_captures([large, capture([coarse_scores], layer=2, step=500)], device="cpu")
    first = " ".join(made.report().split("Next:")[0].split())
    assert first.startswith("COARSE 2 captures: L1H0 carries ")
    assert "; coarse roundings: L2H0 " in first
    fragile = planted_folders.capture([healthy], layer=1, step=700, rows=ROWS, v_mean=30.0)
    made = attribute_captures([fragile, capture([coarse_scores], layer=2, step=500)], device="cpu")
    assert made.report().startswith("COARSE 2 captures: step 500: dW_Q of L2H0 is ")


@pytest.mark.parametrize("heads", [1, 4], ids=["a head", "a layer"])
def test_a_coarse_head_does_not_take_the_next_command_from_what_no_rounding_explains(
    heads: int, tmp_path: Path
) -> None:
    of_layer = changed("dq", 0.5) if heads == 1 else capture([noisy_dq(0.5)] * heads, layer=3)
    made = [capture([coarse_scores], layer=0), of_layer]
    for one in made:
        one.save(tmp_path / f"{one.metadata.layer}.safetensors")
    found = attribute_captures([attn_diag.load(tmp_path / f"{i}.safetensors") for i in (0, 3)], device="cpu")
    first, _, following = " ".join(found.report(width=200).splitlines()[:6]).partition("Next: ")
    assert first.startswith("COARSE ")
    assert ("L3H1 carries " if heads == 1 else "L3H0-3 carry ") in first
    largest = found.maps[0].heads[0].head
    assert following.startswith(f"attn-diag inspect {tmp_path}/3.safetensors --head {largest} ")


def test_lines_fit_the_terminal() -> None:
    made = attribute_captures([*model(), changed("o", 0.01)], device="cpu")
    for width in (80, 120):
        assert max(map(cell_len, made.report(width).splitlines())) <= width


def test_one_that_cannot_be_attributed_is_left_out_and_told() -> None:
    wrong = capture(planted_folders.unmasked, layer=6)
    told: list[InputError] = []
    made = attribute_captures([model()[0], wrong], device="cpu", skip=told.append)
    assert len(made.results) == len(told) == len(made.unreadable) == 1
    report = " ".join(made.report().split())
    assert report.startswith("UNKNOWN ")
    assert "(1 capture not attributed in full)" in report
    with pytest.raises(InputError, match="metadata"):
        attribute_captures([model()[0], wrong], device="cpu")


def test_a_head_that_cannot_be_attributed_does_not_take_the_others_with_it() -> None:
    told: list[InputError] = []
    whole = capture([coarse_scores] * 2, layer=6)
    q = whole.tensors["q"][...].clone()
    q[:, 1] = torch.inf
    partly = replace(whole, tensors={**whole.tensors, "q": q})
    made = attribute_captures([model()[0], partly], device="cpu", skip=told.append)
    assert [[head.head for head in one.heads] for one in made.results] == [[0, 1], [0]]
    (problem,) = told
    assert str(problem).endswith("(head 1; the others are attributed)")
    assert made.unreadable == (str(problem),)
    alone = attribute_captures([partly], selection=Selection(heads=frozenset({0})), device="cpu")
    assert made.results[1].heads == alone.results[0].heads
    assert not made.report().startswith("NORMAL")
    with pytest.raises(InputError, match="no row is finite"):
        attribute_captures([model()[0], partly], device="cpu")


def test_a_head_of_a_wrong_o_does_not_take_the_others_with_it() -> None:
    whole = capture([healthy] * 3, layer=0)
    o = whole.tensors["o"][...].clone()
    o[:, 0] = o[:, 2]
    wrong = replace(whole, tensors={**whole.tensors, "o": o})
    (made,) = attribute_captures([wrong], selection=Selection(heads=frozenset({1})), device="cpu").results
    (expected,) = attribute_captures([whole], selection=Selection(heads=frozenset({1})), device="cpu").results
    assert made.heads == expected.heads
    # Of a kernel that is not known: the other head's error is not looked for in this one.
    q, k, v = (whole.tensors[n][...] for n in "qkv")
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    o[:, 1] = plain[:, 1]
    assert not attn_diag.identify(wrong, head=1, device="cpu").report().startswith("FAIL")
    told: list[InputError] = []
    found = attribute_captures([model()[0], wrong], device="cpu", skip=told.append)
    assert [[head.head for head in one.heads] for one in found.results] == [[0, 1], [1, 2]]
    assert "head 0: O of 'observed' is 1" in str(told[0])
    with pytest.raises(InputError, match="head 0: O of 'observed' is 1"):
        attribute_captures([wrong], selection=Selection(heads=frozenset({0})), device="cpu")


def test_a_folder_on_the_command_line(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "step_500"
    folder.mkdir()
    for made in model():
        made.save(folder / f"layer{made.metadata.layer}.safetensors")
    page, file = tmp_path / "map.html", tmp_path / "map.json"
    done = run("attribute", folder, "--html", page, "--json", file)
    assert done.code == 0, done.err
    assert done.out.startswith("COARSE step_500: L3H1 carries ")
    document = json.loads(file.read_text())
    jsonschema.Draft202012Validator(Attributions.json_schema()).validate(document)
    again = Attributions.from_json(file.read_text())
    assert again.maps == only_maps(again)
    assert again.maps[0].heads[0].site == "scores"
    text = page.read_text()
    assert "L3H1 carries" in text
    assert '"names":[["' in text
    # One capture stays one answer, and has a page too.
    one = run("attribute", folder / "layer3.safetensors", "--html", page, "--json", file)
    assert one.code == 0, one.err
    assert json.loads(file.read_text())["schema"] == "attn-diag-attribution"
    assert "L3H1 carries" in page.read_text()


def only_maps(made: Attributions) -> tuple[ErrorMap, ...]:
    """What the JSON's own results give."""
    return side_by_side(made.results)


def test_details_of_all_heads() -> None:
    diagnosis = attn_diag.inspect_captures(list(model()), device="cpu", details="all")
    heads = [h for _, _, h in diagnosis.entries()]
    assert all(h.attribution is not None for h in heads)
    assert "L3H1 carries" in " ".join(diagnosis.report().split())
    page = html_document(diagnosis)
    assert '<th scope="col">site</th>' in page
    assert 'id="attn-diag-apart"' in page
    assert {row["attribution.guilty.dw_q"] for row in diagnosis.to_rows()} >= {"scores"}
    # Of one head there is nothing to compare.
    one = attn_diag.inspect_captures(list(model()), device="cpu", details=1)
    assert 'id="attn-diag-apart"' not in html_document(one)


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("width", [1280, 400])
def test_the_map_in_a_browser(width: int, tmp_path: Path, open_page: Open) -> None:
    """Every cell has its site, a click on a site's name hides its heads, and nothing is cut off."""
    diagnosis = attn_diag.inspect_captures(list(model()), device="cpu", details="all")
    for name, text in (("map", page_of(found())), ("diagnosis", html_document(diagnosis))):
        file = tmp_path / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        page = open_page(file, width=width)
        figure = page.locator('figure[data-chart^="dw_q-part"]')
        figure.scroll_into_view_if_needed()
        figure.locator("svg").wait_for()
        texts, cells = figure.locator("svg text"), figure.locator("svg path[fill^=rgb]:not([fill-opacity='0'])")
        shown = [_cell(head) for head in only(found().maps).heads]
        before, drawn = texts.all_text_contents(), cells.count()
        # The legend is drawn last.
        assert all(before.count(cell) == 1 + shown.count(cell) for cell in shown), before
        texts.filter(has_text=shown[0]).last.click()
        page.wait_for_timeout(500)
        assert cells.count() == drawn - shown.count(shown[0])
        # A cell that is left leads to its head.
        cells.first.click(position={"x": 3, "y": 3})
        page.wait_for_timeout(300)
        if name == "map":
            assert page.locator("tr:target td").first.inner_text().startswith("L")
        else:
            assert page.evaluate("location.hash").startswith("#c")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), name


def _cell(head: HeadError) -> str:
    return f"{head.site}{'' if some(head.site_share) >= 0.5 else ' …'}"


@pytest.mark.parametrize("wrong", ["some", "-1", "1.5"])
def test_details_are_a_number_or_all(wrong: str, run: Run) -> None:
    done = run("inspect", "--example", "--details", wrong)
    assert done.code == 2
    assert "all" in done.err


def test_what_float64_leaves_is_no_error() -> None:
    """V the same for all keys: O is V, dQ is 0; and dO of 0."""
    made = planted_folders.capture([healthy] * 2, layer=0, rows=ROWS)
    tensors = {name: tensor[...].clone() for name, tensor in made.tensors.items()}
    tensors["v"][:] = tensors["o"][:] = 1.0
    for name in ("dq", "dk", "dv"):
        del tensors[name]
    tensors["dq"] = torch.zeros_like(tensors["q"])
    tensors["do"][:, 1] = 0
    one = attribute_captures([Capture.from_tensors(tensors, causal="top-left", scale=SCALE, layer=0)], device="cpu")
    constant, idle = one.results[0].heads
    assert constant.totals.keys() == {"o", "delta"}
    assert constant.totals["o"].captured == idle.totals["dq"].captured == 0
    assert any("float64 does not resolve the true dQ" in note for note in constant.notes)
    assert all(
        h.reasons == ("No rounding changes anything here: there is no error to attribute.",) for h in (constant, idle)
    )
    assert one.results[0].report().startswith("NOTHING")
    assert {h.site for m in one.maps for h in m.heads} == {None}
