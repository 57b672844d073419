"""benchmarks/failing_run/accumulation.py: planted bias, size, coherence and momentum are told apart; its page.

Every check is also given something wrong, and must reject it.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from step_captures import true_delta_error, true_probs
from torch import Tensor

import attn_diag
from attn_diag import Capture, InputError, PaperFigures
from attn_diag.reports import gallery_document
from attn_diag.reports.charts import Gallery
from attn_diag.statistics.sums import band_p_value, flat_band

sys.path.append(str(Path(__file__).parent.parent / "benchmarks" / "failing_run"))
import accumulation
import accumulation_page
from accumulation import Accumulation, captures_of, figures_of, largest_error
from accumulation_verdict import LEVEL, Window, judge

T, D, HEADS, HEAD, LAYER, FIRST, STEPS = 40, 16, 2, 1, 3, 10, 12
C = HEADS * D
SCALE = D**-0.5  # that of true_probs
BETA = 0.9


@dataclass(frozen=True)
class Plant:
    """Errors of O in ulp: ``size`` times N(0, 1); ``bias`` towards dO's sign; ``coherent`` the same times x's sign.

    ``flip``: every second step the other way round.
    """

    size: float = 0.0
    bias: float = 0.0
    coherent: float = 0.0
    flip: bool = False


# One ulp towards dO moves delta by some 11 of its noise floors, so these two are no larger than rounding.
PLANTS = {
    "none": Plant(),
    "size": Plant(size=6.0),
    "bias": Plant(bias=0.1),
    "coherence": Plant(coherent=0.1),
    "bias, signs alternate": Plant(bias=0.1, flip=True),
    "coherence, signs alternate": Plant(coherent=0.1, flip=True),
}
FOUND = {
    "none": set[str](),
    "size": {"size"},
    "bias": {"bias"},
    "coherence": {"coherence within steps", "coherence across steps"},
    "bias, signs alternate": set[str](),
    "coherence, signs alternate": {"coherence within steps"},
}


def planted(step: int, plant: Plant) -> Capture:
    """Keys share one direction, and x another with a random sign a row: the atoms differ in size and sign alone.

    O is BF16, so that its noise floor is that of one rounding; dQ is BF16 too, with delta's error in it.
    """
    fixed, generator = torch.Generator().manual_seed(7), torch.Generator().manual_seed(step)
    w_q = torch.randn(HEADS * D, C, generator=fixed) + 0.01 * torch.randn(HEADS * D, C, generator=generator)
    of_x, of_k = torch.randn(C, generator=fixed), torch.randn(D, generator=fixed)
    sign = torch.randint(0, 2, (1, T, 1), generator=generator) * 2.0 - 1
    x = (sign * of_x + 0.1 * torch.randn(1, T, C, generator=generator)).bfloat16()
    k = (of_k + 0.1 * torch.randn(1, HEADS, T, D, generator=generator)).bfloat16()
    v, do = (torch.randn(1, HEADS, T, D, generator=generator).bfloat16() for _ in range(2))
    q = (x.float() @ w_q.T).bfloat16().view(1, T, HEADS, D).transpose(1, 2).contiguous()
    probs = true_probs(q, k)
    truth = probs @ v.double()
    ulp = torch.exp2(truth.abs().log2().floor() - 7)
    turn = -1.0 if plant.flip and step % 2 else 1.0
    off = plant.size * torch.randn(truth.shape, generator=generator).double()
    off = off + turn * do.double().sign() * (plant.bias + plant.coherent * sign[:, None].double())
    o = (truth + off * ulp).bfloat16()
    delta = (do.double() * o.double()).sum(-1, keepdim=True)
    dq = (SCALE * (probs * (do.double() @ v.double().mT - delta)) @ k.double()).bfloat16()
    tensors = {"q": q, "k": k, "v": v, "do": do, "o": o, "dq": dq, "x": x, "w_q": w_q}
    return Capture.from_tensors(
        tensors, causal="top-left", scale=SCALE, step=step, layer=LAYER, extra={"run": "A_seed0"}
    )


def series(plant: Plant) -> list[Capture]:
    return [planted(FIRST + i, plant) for i in range(STEPS)]


def errors_of(captures: list[Capture], head: int = HEAD) -> list[Tensor]:
    """E of each step, written down directly: sum over rows of -alpha Delta_delta_t (P K)_t (x) x_t."""
    found = []
    for c in captures:
        q, k = c.tensors["q"][...], c.tensors["k"][...]
        pk = (true_probs(q, k) @ k.double())[0, head]
        found.append((-SCALE * true_delta_error(c)[0, head, :, None] * pk).T @ c.tensors["x"][0].double())
    return found


def references_of(captures: list[Capture], head: int = HEAD) -> list[Tensor]:
    """dW_Q by float64 autograd."""
    found = []
    for c in captures:
        q, k, v, do = (c.tensors[n][...].double() for n in ("q", "k", "v", "do"))
        q.requires_grad_()
        scores = SCALE * (q @ k.mT)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
        (dq,) = torch.autograd.grad(out, q, do)
        found.append(dq[0, head].T @ c.tensors["x"][0].double())
    return found


def running(of: list[Tensor]) -> list[Tensor]:
    """Adam's first moment before each step, of the gradients ``of``."""
    found = [torch.zeros_like(of[0])]
    for x in of[:-1]:
        found.append(BETA * found[-1] + (1 - BETA) * x)
    return found


def write_moments(folder: Path, first: list[Tensor], head: int = HEAD) -> Path:
    """Moments of every step: ``first`` [D, C] in one head's rows, noise in the others; the second is 4 everywhere."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    for i, x in enumerate(first):
        whole = torch.randn(C, C, generator=generator) * (float(x.norm()) or 1.0)
        whole[head * D : (head + 1) * D] = x
        step = FIRST + i
        stated = {"step": str(step), "layer": str(LAYER)}
        tensors = {"exp_avg": whole.float(), "exp_avg_sq": torch.full((C, C), 4.0)}
        save_file(tensors, folder / f"step{step:06d}_layer{LAYER:02d}.safetensors", stated)
    return folder


def mixed(captures: list[Capture]) -> list[Tensor]:
    return [a + 0.5 * b for a, b in zip(running(errors_of(captures)), running(references_of(captures)), strict=True)]


@cache
def analysed(name: str) -> Accumulation:
    """One plant's analysis, without momentum."""
    return accumulation.accumulation(series(PLANTS[name]), Path("none"), layer=LAYER, head=HEAD, device="cpu")


@pytest.fixture(scope="module")
def with_momentum(tmp_path_factory: pytest.TempPathFactory) -> Accumulation:
    """Coherent errors, and a momentum made of them and of half the true gradients."""
    captures = series(PLANTS["coherence"])
    folder = write_moments(tmp_path_factory.mktemp("moments") / "m", mixed(captures))
    return accumulation.accumulation(captures, folder, layer=LAYER, head=HEAD, device="cpu")


# --- Numbers against direct float64 computations ---


def cosines_of(a: list[Tensor], b: list[Tensor]) -> list[float]:
    return [float((x * y).sum() / (x.norm() * y.norm())) for x, y in zip(a, b, strict=True)]


def expectations() -> dict[str, tuple[Callable[[Accumulation], Any], Any, Any]]:
    """By name: how to read a series of numbers, what it must be, and what a mistake would make of it."""
    captures = series(PLANTS["coherence"])
    e, g, other = errors_of(captures), references_of(captures), errors_of(captures, head=0)
    w = [c.tensors["w_q"][HEAD * D :].double() for c in captures]
    w_other = [c.tensors["w_q"][:D].double() for c in captures]
    m, past = mixed(captures), running(e)
    of_dq = [c.tensors["dq"][0, HEAD].double().T @ c.tensors["x"][0].double() for c in captures]
    full = [observed - true for observed, true in zip(of_dq, g, strict=True)]
    u, v = zip(*((left[:, 0], right[0]) for left, _, right in map(torch.linalg.svd, w)), strict=True)
    top = [torch.outer(a, b) for a, b in zip(u, v, strict=True)]
    moved = [x - w[0] for x in w]
    flat = torch.stack([x.reshape(-1) for x in e])

    def step(read: Callable[[Any], Any], skip: int = 0) -> Callable[[Accumulation], Any]:
        return lambda found: [read(row) for row in found.steps[skip:]]

    def norms(of: list[Tensor]) -> list[float]:
        return [float(x.norm()) for x in of]

    def first_share(of: list[Tensor]) -> list[float]:
        return [float(torch.linalg.matrix_norm(x, 2) ** 2 / x.norm() ** 2) for x in of]

    def along(of: list[Tensor], momenta: list[Tensor]) -> list[float]:
        found = []
        for x, y in zip(of, momenta, strict=True):
            left, _, right = torch.linalg.svd(x)
            found.append(float((left[:, 0] @ y @ right[0]) ** 2 / y.norm() ** 2))
        return found

    return {
        "norm of E": (step(lambda r: r.error.norm), norms(e), norms(other)),
        "norm of the whole error": (step(lambda r: r.full.norm), norms(full), norms(e)),
        "norm of dW_Q": (step(lambda r: r.reference.norm), norms(g), norms(references_of(captures, 0))),
        "first share": (step(lambda r: r.error.first_share), first_share(e), first_share(g)),
        "spectral norm": (
            step(lambda r: r.spectral_norm),
            [float(torch.linalg.matrix_norm(x, 2)) for x in w],
            [float(torch.linalg.matrix_norm(x, 2)) for x in w_other],
        ),
        "with the weight": (
            step(lambda r: r.error_alignment.weight), cosines_of(e, w), cosines_of([-x for x in e], w),
        ),
        "with its change": (
            step(lambda r: r.error_alignment.past_change, 1), cosines_of(e[1:], moved[1:]), cosines_of(e[1:], w[1:]),
        ),
        "with its first direction": (step(lambda r: r.error_alignment.top), cosines_of(e, top), cosines_of(e, w)),
        "with the momentum": (
            step(lambda r: r.error_alignment.momentum, 1), cosines_of(e[1:], m[1:]), cosines_of(e[:-1], m[1:]),
        ),
        "dW_Q with the momentum": (
            step(lambda r: r.reference_alignment.momentum, 1), cosines_of(g[1:], m[1:]), cosines_of(e[1:], m[1:]),
        ),
        "the past with the momentum": (
            step(lambda r: r.error_alignment.running, 1), cosines_of(past[1:], m[1:]), cosines_of(e[1:], m[1:]),
        ),
        "momentum's share": (
            step(lambda r: r.error_alignment.momentum_share, 1), along(past[1:], m[1:]), first_share(m[1:]),
        ),
        "with the step before": (
            step(lambda r: r.error_alignment.previous, 1), cosines_of(e[1:], e[:-1]), cosines_of(e[1:], g[:-1]),
        ),
        "coherence across steps": (
            lambda found: found.over_steps.windows[0].error.coherence,
            float(flat.sum(0).square().sum() / flat.square().sum()),
            float(flat.sum(0).norm() / flat.norm()),
        ),
        "sum with the weight's change": (
            lambda found: found.over_steps.windows[0].change,
            cosines_of([torch.stack(e).sum(0)], [w[-1] - w[0]])[0],
            cosines_of([torch.stack(e).sum(0)], [w[0] - w[-1]])[0],
        ),
    }  # fmt: skip


EXPECTATIONS = expectations()


@pytest.mark.parametrize("name", EXPECTATIONS)
def test_numbers_are_those_written_down_directly(with_momentum: Accumulation, name: str) -> None:
    read, expected, mistake = EXPECTATIONS[name]
    # dQ is kept in fp32, and so are momentum and weight.
    assert read(with_momentum) == pytest.approx(expected, rel=2e-4, abs=2e-6)
    assert read(with_momentum) != pytest.approx(mistake, rel=2e-4, abs=2e-6)


# --- The verdict ---


def answers(found: Accumulation) -> set[str]:
    return {finding.name for finding in found.verdict.findings if finding.holds}


@pytest.mark.parametrize("name", PLANTS)
def test_verdict_names_what_was_planted(name: str) -> None:
    assert answers(analysed(name)) == FOUND[name]


@pytest.mark.parametrize("name", [name for name in PLANTS if FOUND[name]])
def test_verdict_differs_where_another_cause_was_planted(name: str) -> None:
    others = [other for other in PLANTS if FOUND[other] != FOUND[name]]
    assert all(answers(analysed(other)) != FOUND[name] for other in others)


def test_verdict_says_so_about_the_paper() -> None:
    assert "these steps do not show one" in analysed("size").verdict.sentence
    assert "there is one" in analysed("bias").verdict.sentence


def test_correlated_steps_leave_bias_undecided() -> None:
    w = analysed("bias").over_steps.windows[0]
    assert w.delta is not None
    over = analysed("bias").over_steps

    def with_lag(lag: float) -> Any:
        assert w.delta is not None
        changed = replace(w, delta=replace(w.delta, lag1=lag, lag1_limit=0.5))
        return judge(replace(over, windows=(changed,))).findings[0]

    assert not with_lag(0.6).holds
    assert "undecided" in with_lag(0.6).sentence
    assert with_lag(0.4).holds


def window_tests(w: Window) -> dict[str, float | None]:
    return {test.name: test.p_adjusted for test in w.tests}


def test_thirds_are_a_family_of_their_own() -> None:
    windows = analysed("coherence").over_steps.windows
    assert [(w.first, w.last) for w in windows] == [(10, 21), (10, 13), (14, 17), (18, 21)]
    raw = [t.p_value for w in windows[1:] for t in w.tests if t.p_value is not None]
    smallest = min(raw)
    adjusted = [t.p_adjusted for w in windows[1:] for t in w.tests if t.p_value == smallest]
    assert adjusted == [pytest.approx(min(1.0, smallest * len(raw)))] * len(adjusted)
    assert window_tests(windows[0]) != window_tests(windows[1])


def alignment(found: Accumulation, name: str) -> float | None:
    tested = {y.name: y.error.p_value for y in found.over_steps.windows[0].alignments}
    return tested[name]


def test_a_momentum_made_of_the_errors_is_found_and_a_random_one_is_not(
    with_momentum: Accumulation, tmp_path: Path
) -> None:
    p = alignment(with_momentum, "momentum")
    assert p is not None
    assert p < LEVEL
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(D, C, generator=generator) for _ in range(STEPS)]
    folder = write_moments(tmp_path / "m", noise)
    found = accumulation.accumulation(series(PLANTS["coherence"]), folder, layer=LAYER, head=HEAD, device="cpu")
    p = alignment(found, "momentum")
    assert p is not None
    assert p > LEVEL
    assert alignment(analysed("coherence"), "momentum") is None


def test_first_directions_are_alike_where_planted_and_as_random_ones_elsewhere() -> None:
    together = analysed("coherence").over_steps.windows[0].error
    assert together.rank_1 > 0.9
    assert together.left_random == pytest.approx(1 / D)
    assert together.right_random == pytest.approx(1 / C)
    assert together.rank_1_random == pytest.approx(1 / (D * C))
    # Of equal first directions but alternating signs nothing is left: it is the signs that decide.
    alternating = analysed("coherence, signs alternate").over_steps.windows[0].error
    assert alternating.rank_1 > 0.9
    assert alternating.coherence < 0.2 < 0.9 * STEPS < together.coherence


def test_p_value_of_a_running_sum_is_one_percent_at_its_band() -> None:
    generator = np.random.default_rng(0)
    errors, df = generator.uniform(1, 3, 20), generator.integers(4, 30, 20).astype(float)
    band = float(flat_band(errors, df))
    assert band_p_value(band, errors, df) == pytest.approx(0.01)
    assert band_p_value(band, errors, df) != pytest.approx(band_p_value(band, errors, np.full(20, 1e9)))
    assert band_p_value(0.0, errors, df) == 1.0
    assert band_p_value(1.0, np.zeros(3), np.full(3, 5.0)) == 0.0


# --- Files ---


def test_captures_are_ordered_and_of_one_layer(tmp_path: Path) -> None:
    for step in (12, 10, 11):
        planted(step, Plant()).save(tmp_path / f"{50 - step}.safetensors")
    found = captures_of(tmp_path, LAYER)
    assert [c.metadata.step for c in found] == [10, 11, 12]
    assert str(tmp_path) not in "".join(c.source for c in found)
    assert [c.metadata.step for c in captures_of(tmp_path, LAYER, until=12)] == [10, 11]
    with pytest.raises(InputError, match=f"layer {LAYER + 1}"):
        captures_of(tmp_path, LAYER + 1)
    planted(11, Plant(size=1.0)).save(tmp_path / "again.safetensors")
    with pytest.raises(InputError, match="several captures of step 11"):
        captures_of(tmp_path, LAYER)


def test_missing_moments_are_noted_and_those_of_another_step_refused(tmp_path: Path) -> None:
    captures = series(PLANTS["none"])[:4]
    folder = write_moments(tmp_path / "m", running(errors_of(captures)))
    (folder / f"step{FIRST + 2:06d}_layer{LAYER:02d}.safetensors").unlink()
    found = accumulation.accumulation(captures, folder, layer=LAYER, head=HEAD, device="cpu")
    assert [row.momentum is None for row in found.steps] == [False, False, True, False]
    assert any("No momentum of 1 steps" in note for note in found.notes)
    (folder / f"step{FIRST + 1:06d}_layer{LAYER:02d}.safetensors").rename(
        folder / f"step{FIRST + 2:06d}_layer{LAYER:02d}.safetensors"
    )
    with pytest.raises(InputError, match="states"):
        accumulation.accumulation(captures, folder, layer=LAYER, head=HEAD, device="cpu")


def test_a_step_that_is_not_finite_is_left_out_and_said() -> None:
    captures = series(PLANTS["none"])[:5]
    broken = dict(captures[3].tensors) | {"w_q": torch.full((C, C), torch.inf)}
    captures[3] = Capture(broken, captures[3].metadata)
    found = accumulation.accumulation(captures, Path("none"), layer=LAYER, head=HEAD, device="cpu")
    assert [row.step for row in found.steps] == [10, 11, 12, 14]
    assert any("Left out" in note and "13" in note for note in found.notes)
    assert any("gaps before 14" in note for note in found.notes)


# --- The command and the page ---


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes."""
    folder = tmp_path_factory.mktemp("command")
    captures = series(PLANTS["coherence"])
    (folder / "captures").mkdir()
    for c in captures:
        c.save(folder / "captures" / f"step{c.metadata.step:06d}.safetensors")
    moments = write_moments(folder / "m", running(errors_of(captures)))
    out = folder / "accumulation.json"
    arguments = ["accumulation.py", str(folder / "captures"), str(moments), "--layer", str(LAYER), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*arguments, "--device", "cpu"])
        accumulation.main()
    assert str(folder) not in out.read_text()
    (folder / "accumulation.json.xz").write_bytes(lzma.compress(out.read_bytes()))
    found = accumulation_page.read(folder / "accumulation.json.xz")
    assert found == json.loads(out.read_text())
    return found


@pytest.mark.parametrize("large", [0, 1])
def test_the_head_with_the_largest_error_is_chosen_and_stands_among_all(large: int) -> None:
    captures = []
    for one, other in zip(series(PLANTS["none"])[:4], series(PLANTS["size"])[:4], strict=True):
        tensors = {name: t[...].clone() for name, t in one.tensors.items()}
        for name in ("o", "dq"):
            tensors[name][:, large] = other.tensors[name][:, large]
        captures.append(Capture(tensors, one.metadata))
    head, words = largest_error(captures, "cpu")
    assert head == large
    assert "of 2 heads" in words
    other_head = figures_of(captures, LAYER, 1 - large, "cpu", None)
    assert other_head.chosen.head == 1 - large
    alone = attn_diag.paper_figures(captures, layer=LAYER, head=1 - large, device="cpu")
    assert other_head.delta_steps is not None
    assert alone.delta_steps is not None
    assert other_head.delta_steps.total == alone.delta_steps.total
    assert other_head.atoms == alone.atoms
    assert [h.head for h in other_head.delta_steps.heads] == [0, 1] != [h.head for h in alone.delta_steps.heads]
    assert other_head.triggers is not None
    assert set(other_head.triggers.layer.rows) == {HEADS * T} != set(other_head.triggers.head.rows)


def test_the_command_takes_a_head_and_keeps_its_figures(document: dict[str, Any]) -> None:
    figures = PaperFigures.from_json(json.dumps(document["figures"]))
    assert document["head"] == figures.chosen.head
    assert document["run"] == "A_seed0"
    assert len(document["steps"]) == len(figures.chosen.steps) == STEPS
    assert {finding["name"] for finding in document["verdict"]["findings"] if finding["holds"]} == FOUND["coherence"]


def test_the_page_draws_the_document(document: dict[str, Any]) -> None:
    sections = accumulation_page.sections(document)
    charts = {chart.name: chart for section in sections for chart in section.charts}
    assert len(charts) == sum(len(section.charts) for section in sections)
    assert {"figure-3-steps", "figure-4-steps", "figure-5a-total", "figure-6", "figure-13-head"} <= set(charts)
    shares = charts["accumulation-share"].series[0].y
    assert shares == tuple(row["share"] for row in document["steps"])
    assert shares != tuple(row["full_share"] for row in document["steps"])
    cells = charts["accumulation-cosines-error"].map
    assert cells is not None
    assert len(cells.values) == STEPS
    (band,) = charts["accumulation-momentum"].bands
    assert (-band.low, band.high) == (document["chance"]["matrix"],) * 2
    verdict = document["verdict"]
    assert sections[0].paragraphs[0] == verdict["sentence"]
    assert len(sections[0].table) == 1 + len(verdict["family"])
    assert "<svg" not in (page := gallery_document(Gallery("title", "lead", tuple(sections))))
    assert "Adam&#39;s momentum" in page


def test_what_is_not_finite_or_not_known_is_a_gap(document: dict[str, Any]) -> None:
    rows = [dict(row) for row in document["steps"]]
    rows[2] |= {"noise_factor": "Infinity", "share": None, "full": None, "full_alignment": None, "momentum": None}
    sections = accumulation_page.sections(document | {"steps": rows})
    charts = {chart.name: chart for section in sections for chart in section.charts}
    assert charts["accumulation-noise"].series[0].y[2] is None
    assert charts["accumulation-noise"].series[0].y[1] is not None
    assert charts["accumulation-share"].series[0].y[2] is None
    gallery_document(Gallery("title", "lead", tuple(sections)))


@pytest.mark.parametrize("wrong", [{"schema": "attn-diag-diagnosis"}, {"schema_version": 1}, {"schema_version": 3}])
def test_another_document_is_refused(document: dict[str, Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected attn-diag-accumulation"):
        accumulation_page.sections(document | wrong)


def test_the_page_says_whose_steps_they_are(document: dict[str, Any]) -> None:
    def captions(run: str | None) -> set[str]:
        return {c.caption for s in accumulation_page.sections(document, run) for c in s.charts if "accum" in c.name}

    where = f"layer {LAYER}, head {document['head']}"
    assert all(f"arm A, seed 0, {where}" in caption.replace("Arm", "arm") for caption in captions("arm A, seed 0"))
    assert all(f"un A_seed0, {where}" in caption for caption in captions(None))


def test_the_papers_figures_say_how_their_head_was_chosen(document: dict[str, Any]) -> None:
    chosen = document["figures"]["chosen"] | {"reason": "as asked for; shown where it is worst"}
    asked = document | {"figures": document["figures"] | {"chosen": chosen}}
    lead = next(s for s in accumulation_page.sections(asked) if s.title.startswith("The paper's")).paragraphs[0]
    assert f"{document['chosen']}; shown where it is worst" in lead
    assert "as asked for" not in lead


def test_a_walk_that_does_not_end_at_o_is_not_drawn(document: dict[str, Any]) -> None:
    def charts(as_observed: bool) -> int:
        figures = document["figures"] | {"prefix": document["figures"]["prefix"] | {"as_observed": as_observed}}
        return sum(len(s.charts) for s in accumulation_page.sections(document | {"figures": figures}))

    assert charts(as_observed=False) < charts(as_observed=True)


def test_the_document_is_the_result(with_momentum: Accumulation) -> None:
    found = json.loads(with_momentum.to_json())
    assert found["steps"][3]["step"] == with_momentum.steps[3].step
    assert set(found) == set(asdict(with_momentum))
