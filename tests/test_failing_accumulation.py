"""benchmarks/failing_run/accumulation.py: planted bias, size and coherence are told apart; its section of the page."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import accumulation
import numpy as np
import pytest
import torch
from accumulation import Accumulation, captures_of, figures_of, gradient_error, judge, largest_error
from failing_record import one_thread  # noqa: F401  (a fixture)
from step_captures import true_delta_error, true_probs
from torch import Tensor

import attn_diag
from attn_diag import Capture, InputError
from attn_diag.statistics.sums import band_p_value, flat_band

T, D, HEADS, HEAD, LAYER, FIRST, STEPS = 40, 16, 2, 1, 3, 10, 12
C = HEADS * D
SCALE = D**-0.5  # that of true_probs


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
    "none": (Plant(), set[str]()),
    "size": (Plant(size=6.0), {"size"}),
    "bias": (Plant(bias=0.1), {"bias"}),
    "coherence": (Plant(coherent=0.1), {"coherence within steps", "coherence across steps"}),
    "bias, signs alternate": (Plant(bias=0.1, flip=True), set()),
    "coherence, signs alternate": (Plant(coherent=0.1, flip=True), {"coherence within steps"}),
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


def series(name: str) -> list[Capture]:
    return [planted(FIRST + i, PLANTS[name][0]) for i in range(STEPS)]


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


@cache
def analysed(name: str) -> Accumulation:
    """One plant's analysis."""
    return accumulation.accumulation(series(name), layer=LAYER, head=HEAD, device="cpu")


def answers(found: Accumulation) -> set[str]:
    return {name for name, holds in judge(found.windows[0]).items() if holds}


def test_errors_and_gradients_are_those_written_down_directly() -> None:
    captures = series("coherence")[:3]
    read = [gradient_error(c, HEAD, torch.device("cpu"))[:2] for c in captures]
    for head, holds in ((HEAD, True), (1 - HEAD, False)):
        for i, of in enumerate((errors_of, references_of)):
            expected = of(captures, head)
            same = [
                torch.allclose(found[i], true, rtol=2e-4, atol=1e-5) for found, true in zip(read, expected, strict=True)
            ]
            assert all(same) is holds


def test_steps_and_sums_are_those_written_down_directly() -> None:
    captures, found = series("coherence"), analysed("coherence")
    e, g = (torch.stack(of(captures)) for of in (errors_of, references_of))
    shares = (e.flatten(1).norm(dim=1) / g.flatten(1).norm(dim=1)).tolist()
    assert [step.share for step in found.steps] == pytest.approx(shares, rel=2e-4)
    assert [step.step for step in found.steps] == list(range(FIRST, FIRST + STEPS))
    tests = {test.name: test.statistic for test in found.windows[0].tests}
    assert tests["coherence across steps"] == pytest.approx(float(e.sum(0).square().sum() / e.square().sum()), rel=2e-4)
    unit = e / e.flatten(1).norm(dim=1)[:, None, None]
    equal = float(unit.sum(0).square().sum() / STEPS)
    assert tests["coherence across steps, equal weights"] == pytest.approx(equal, rel=2e-4)
    assert tests["coherence across steps"] != pytest.approx(equal, rel=2e-4)


@pytest.mark.parametrize("name", PLANTS)
def test_verdict_names_what_was_planted(name: str) -> None:
    assert answers(analysed(name)) == PLANTS[name][1]


def test_correlated_steps_leave_bias_undecided() -> None:
    window = analysed("bias").windows[0]
    assert judge(window)["bias"] is True
    assert judge(replace(window, correlated=True))["bias"] is None
    assert judge(replace(analysed("none").windows[0], correlated=True))["bias"] is False


def test_thirds_are_a_family_of_their_own() -> None:
    windows = analysed("coherence").windows
    assert [(w.first, w.last) for w in windows] == [(10, 21), (10, 13), (14, 17), (18, 21)]
    raw = [t.p_value for w in windows[1:] for t in w.tests if t.p_value is not None]
    smallest = min(raw)
    adjusted = [t.p_adjusted for w in windows[1:] for t in w.tests if t.p_value == smallest]
    assert adjusted == [pytest.approx(min(1.0, smallest * len(raw)))] * len(adjusted)
    whole = [t.p_value for t in windows[0].tests if t.p_value is not None]
    first = min(windows[0].tests, key=lambda t: t.p_value or 1.0)
    assert first.p_adjusted == pytest.approx(min(whole) * len(whole))


def test_p_value_of_a_running_sum_is_one_percent_at_its_band() -> None:
    generator = np.random.default_rng(0)
    errors, df = generator.uniform(1, 3, 20), generator.integers(4, 30, 20).astype(float)
    band = float(flat_band(errors, df))
    assert band_p_value(band, errors, df) == pytest.approx(0.01)
    assert band_p_value(band, errors, df) != pytest.approx(band_p_value(band, errors, np.full(20, 1e9)))
    assert band_p_value(0.0, errors, df) == 1.0
    assert band_p_value(1.0, np.zeros(3), np.full(3, 5.0)) == 0.0


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


def test_a_step_without_an_error_is_left_out_and_said() -> None:
    captures = series("none")[:5]
    broken = dict(captures[3].tensors) | {"do": torch.zeros(1, HEADS, T, D).bfloat16()}
    captures[3] = Capture(broken, captures[3].metadata)
    found = accumulation.accumulation(captures, layer=LAYER, head=HEAD, device="cpu")
    assert [row.step for row in found.steps] == [10, 11, 12, 14]
    assert any("Left out" in note and "13" in note for note in found.notes)
    assert any("gaps before 14" in note for note in found.notes)


@pytest.mark.parametrize("large", [0, 1])
def test_the_head_with_the_largest_error_is_chosen_and_stands_among_all(large: int) -> None:
    captures = []
    for one, other in zip(series("none")[:4], series("size")[:4], strict=True):
        tensors = {name: t[...].clone() for name, t in one.tensors.items()}
        for name in ("o", "dq"):
            tensors[name][:, large] = other.tensors[name][:, large]
        captures.append(Capture(tensors, one.metadata))
    head, words = largest_error(captures, "cpu")
    assert head == large
    assert "of 2 heads" in words
    other_head = figures_of(captures, LAYER, 1 - large, "cpu")
    assert other_head.chosen.head == 1 - large
    alone = attn_diag.paper_figures(captures, layer=LAYER, head=1 - large, device="cpu")
    assert other_head.delta_steps is not None
    assert alone.delta_steps is not None
    assert other_head.delta_steps.total == alone.delta_steps.total
    assert [h.head for h in other_head.delta_steps.heads] == [0, 1] != [h.head for h in alone.delta_steps.heads]


def test_the_command_writes_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "captures").mkdir()
    for c in series("coherence"):
        c.save(tmp_path / "captures" / f"step{c.metadata.step:06d}.safetensors")
    out = tmp_path / "accumulation.json"
    command = ["accumulation.py", str(tmp_path / "captures"), "--layer", str(LAYER), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "--device", "cpu"])
    accumulation.main()
    assert str(tmp_path) not in out.read_text()
    found = Accumulation.from_json(out.read_text())
    assert (found.head, found.run) == (found.figures.chosen.head, "A_seed0")
    assert answers(found) == PLANTS["coherence"][1]
    rows = [replace(found.steps[0], noise_factor=float("inf")), *found.steps[1:]]
    section = accumulation.section(replace(found, steps=tuple(rows)), "arm A, seed 0")
    noise, *figures = section.charts
    assert noise.series[0].y == (None, *(row.noise_factor for row in found.steps[1:]))
    assert {c.name for c in figures} == set(accumulation.FIGURES)
    assert f"arm A, seed 0, layer {LAYER}, head {found.head} ({found.chosen})" in section.paragraphs[0]
    assert "bias: no; size: no; coherence within steps: yes; coherence across steps: yes" in section.paragraphs[0]
    assert [line[0] for line in section.table[1:]] == list(accumulation.TESTS)
    with pytest.raises(InputError, match="Field required"):
        Accumulation.from_json(json.dumps({"layer": 1}))
