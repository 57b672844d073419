"""dW_Q behind RoPE, QK-norm or a bias: layers with autograd, whose true Jacobian pulls the true errors back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from builders import some
from torch import Tensor
from torch.nn import functional

import attn_diag
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.selection import Selection
from attn_diag.head.projection import HeadProjection, Projection, find_projection
from attn_diag.head.pullback.jacobian import Pullback
from attn_diag.head.pullback.rotation import Pairs, Rotation
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.reference import reference_head, round_nearest_even
from attn_diag.reference.rounding import BF16
from attn_diag.results.diagnosis import HeadDiagnosis

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    """The queries of an attention layer as a model computes them, element by element in its own format."""

    d: int = 32
    heads: int = 4
    kv_heads: int = 2
    batch: int = 2
    length: int = 96
    channels: int = 64
    layout: Literal["half", "interleaved"] | None = None
    rotated: int = 32
    """How many of the d features turn, in pairs (i, i + rotated/2) or (2i, 2i + 1)."""
    base: float = 1e4
    offset: int = 0
    rope_factor: float = 1.0
    bias: float = 0.0
    norm: Literal["rms", "layer"] | None = None
    wide_norm: bool = False
    epsilon: float = 1e-6
    factor: float = 1.0
    by_head: bool = False
    """Every head turns at its own speed."""
    bent: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def queries(self, y: Tensor) -> Tensor:
        """[B, T, heads * D] to [B, H, T, D], in y's dtype."""
        generator = torch.Generator().manual_seed(1000 + self.seed)
        bias = self.bias * torch.randn(self.heads * self.d, generator=generator)
        weight = 0.5 + torch.rand(self.d, generator=generator)
        z = y + bias.to(self.dtype).to(y.dtype) if self.bias else y
        z = z + self.bent * torch.tanh(z) if self.bent else z
        if self.wide_norm:
            z = functional.rms_norm(z, (self.heads * self.d,), eps=self.epsilon)
        z = z.view(self.batch, self.length, self.heads, self.d).transpose(1, 2)
        weight = weight.to(self.dtype).to(y.dtype)
        if self.norm == "rms":
            z = functional.rms_norm(z, (self.d,), eps=self.epsilon) * weight
        elif self.norm == "layer":
            z = functional.layer_norm(z, (self.d,), weight, (weight - 1).flip(0), self.epsilon)
        z = z if self.layout is None else self._turn(z)
        return z * self.factor if self.factor != 1 else z

    def _turn(self, z: Tensor) -> Tensor:
        frequency = self.base ** (-torch.arange(0, self.rotated, 2, dtype=torch.float64) / self.rotated)
        speed = torch.arange(1, self.heads + 1) if self.by_head else torch.ones(1)
        angle = speed[:, None, None] * (torch.arange(self.length) + self.offset)[:, None] * frequency
        cos, sin = (self.rope_factor * f(angle).to(z.dtype) for f in (torch.cos, torch.sin))
        turning, rest = z[..., : self.rotated], z[..., self.rotated :]
        if self.layout == "half":
            a, b = turning.chunk(2, -1)
            turned = turning * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)
        else:
            a, b = turning[..., ::2], turning[..., 1::2]
            across = torch.stack([-b, a], -1).flatten(-2)
            turned = turning * cos.repeat_interleave(2, -1) + across * sin.repeat_interleave(2, -1)
        return torch.cat([turned, rest], -1)


@dataclass(frozen=True)
class Run:
    """What was captured of a layer, and ``pull``: J^T of any errors of dQ, [B, H, T, D] float64, by autograd."""

    layer: Layer
    tensors: dict[str, Tensor]
    pull: Callable[[Tensor], Tensor]

    def capture(self, **changed: Any) -> attn_diag.Capture:
        return attn_diag.Capture.from_tensors({**self.tensors, **changed}, causal="top-left")

    def find(self, **changed: Any) -> Projection:
        capture = self.capture(**changed)
        return find_projection(capture, range(capture.batch), range(capture.q_heads), CPU)

    def of_head(self, batch: int = 0, head: int = 0) -> HeadProjection:
        return some(self.find().head(batch, head))


@cache
def run_layer(layer: Layer, *, do_of: Callable[[Tensor], Tensor] = lambda do: do) -> Run:
    """A training step of the layer in its dtype, attention by torch's SDPA."""
    n, generator = layer, torch.Generator().manual_seed(layer.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, w_q = draw(n.batch, n.length, n.channels), draw(n.heads * n.d, n.channels) / math.sqrt(n.channels)
    k, v = (draw(n.batch, n.kv_heads, n.length, n.d).to(n.dtype) for _ in range(2))
    do = do_of(draw(n.batch, n.heads, n.length, n.d)).to(n.dtype)
    return run_on(layer, x.to(n.dtype), w_q.to(n.dtype), k, v, do)


def run_on(layer: Layer, x: Tensor, w_q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Run:
    """The same on given tensors; ``w_q`` may be wider, as under autocast."""
    n = layer
    y = (x @ w_q.to(n.dtype).T).requires_grad_()
    q = layer.queries(y)
    q.retain_grad()
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.autograd.backward(o, do)
    exact_y = (x.double() @ w_q.double().T).requires_grad_()
    exact_q = layer.queries(exact_y)

    def heads_of(flat: Tensor) -> Tensor:
        return flat.view(n.batch, n.length, n.heads, n.d).transpose(1, 2)

    def pull(errors: Tensor) -> Tensor:
        return heads_of(torch.autograd.grad(exact_q, exact_y, errors, retain_graph=True)[0])

    given = {"q": q.detach(), "k": k, "v": v, "o": o.detach(), "do": do, "dq": some(q.grad)}
    return Run(layer, {**given, "dq_pre": heads_of(some(y.grad)).contiguous(), "x": x, "w_q": w_q}, pull)


LLAMA = Layer(layout="half")
QWEN3 = Layer(layout="half", norm="rms")
CASES = {
    "llama": (LLAMA, "a rotary embedding (rotate-half)"),
    "gptj": (Layer(layout="interleaved"), "a rotary embedding (interleaved)"),
    "neox": (Layer(layout="half", rotated=8, bias=1.0), "a rotary embedding (rotate-half, 8 of 32 features)"),
    "glm": (Layer(layout="interleaved", rotated=16), "a rotary embedding (interleaved)"),
    "qwen2": (Layer(layout="half", bias=2.0), "a rotary embedding (rotate-half)"),
    "yarn": (Layer(layout="half", rope_factor=1.25, rotated=16, base=5e5), "16 of 32 features) and a factor of 1.2"),
    "packed": (Layer(layout="half", offset=5000), "a rotary embedding (rotate-half)"),
    "qwen3": (QWEN3, "QK-norm (RMSNorm) and a rotary embedding (rotate-half)"),
    "cohere": (Layer(layout="interleaved", norm="layer"), "QK-norm (LayerNorm) and a rotary embedding (interleaved)"),
    "vit": (Layer(norm="layer"), "QK-norm (LayerNorm),"),
    "gpt2": (Layer(bias=1.0), "at most a bias,"),
    "opt": (Layer(bias=1.0, factor=0.125), "at most a bias and a factor of 0.125"),
    "llama-one-head": (replace(LLAMA, heads=1, kv_heads=1, batch=1), "a rotary embedding (rotate-half)"),
    "qwen3-one-head": (replace(QWEN3, heads=1, kv_heads=1, batch=1), "QK-norm (RMSNorm) and a rotary embedding"),
    "llama-fp16": (replace(LLAMA, dtype=torch.float16), "a rotary embedding (rotate-half)"),
}
# R is measured from BF16 numbers, and the model's own cosines are BF16: every atom is turned by some 0.4 %, and no more
# would a norm change by if all turned alike. (They turn at random: measured are 0.02 %.)
NORMS = 4e-3


def dw_q_truth(run: Run) -> list[tuple[float, float, float]]:
    """Of every head: dW_Q's relative error, the part that delta predicts, and the coherence of its atoms."""
    capture, n = run.capture(), run.layer
    reference, error, by_delta = (torch.zeros(n.batch, n.heads, n.length, n.d).double() for _ in range(3))
    for batch in range(n.batch):
        for head in range(n.heads):
            inputs = read_head(capture, batch, head, CPU, NonFiniteCensus()).head
            found = reference_head(inputs)
            probs = torch.zeros_like(inputs.q @ inputs.k.T)
            reference_head(inputs, lambda b, p=probs: p[b.rows, b.keys].copy_(b.probs))  # type: ignore[misc]
            delta = (some(inputs.do) * run.tensors["o"][batch, head].double()).sum(1)
            reference[batch, head] = some(found.dq)
            error[batch, head] = run.tensors["dq"][batch, head].double() - reference[batch, head]
            by_delta[batch, head] = -inputs.scale * (delta - some(found.delta))[:, None] * (probs @ inputs.k)
    x = run.tensors["x"].double()
    size, off, predicted = (torch.einsum("bhtd,btc->hdc", run.pull(e), x) for e in (reference, error, by_delta))
    squares = (run.pull(by_delta).square().sum(-1) * x.square().sum(-1)[:, None]).sum((0, 2))
    return [
        (
            float(off[h].norm() / size[h].norm()),
            float(predicted[h].norm() / size[h].norm()),
            float(predicted[h].square().sum() / squares[h]),
        )
        for h in range(n.heads)
    ]


def heads_of(capture: attn_diag.Capture, **selection: Any) -> list[HeadDiagnosis]:
    found = inspect_captures([capture], selection=Selection(**selection), device="cpu")
    return [h for h in found.captures[0].observations[0].heads if h.head is not None]


def figures(head: HeadDiagnosis) -> tuple[float | None, ...]:
    """What ``dw_q_truth`` gives, as reported."""
    found = head.propagation.dw_q
    assert found is not None, head.propagation.notes
    return found.relative_error, found.predicted_relative_error, found.coherence


@pytest.mark.parametrize("case", CASES)
def test_errors_of_dw_q_are_those_of_autograd(case: str) -> None:
    layer, words = CASES[case]
    run = run_layer(layer)
    for head, expected in zip(heads_of(run.capture()), dw_q_truth(run), strict=True):
        assert words in head.propagation.notes[0]
        assert figures(head) == pytest.approx(expected, rel=NORMS)
        error = some(head.propagation.dw_q)
        assert None not in (error.shares, error.unexplained_with_casts)


def rows_off(run: Run, pull: Callable[[Tensor], Tensor], head: int = 0) -> float:
    """How far a head of sequence 0 is pulled back off the truth: random errors, relative norm."""
    n = run.layer
    errors = torch.randn(n.batch, n.heads, n.length, n.d, generator=torch.Generator().manual_seed(7)).double()
    expected = run.pull(errors)[0, head]
    return float((pull(errors[0, head]) - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("wrong", [lambda e: e, lambda e: e.flip(0)], ids=["not-pulled-back", "rows-exchanged"])
def test_norms_see_errors_that_are_not_pulled_back(
    case: str, wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_layer(CASES[case][0])
    right = HeadProjection.pull
    # Half of the rows: a factor alone, as OPT's, would cancel.
    monkeypatch.setattr(
        HeadProjection,
        "pull",
        lambda self, e, rows=slice(None): torch.cat([right(self, e, rows)[:48], wrong(e)[48:]]),
    )
    found = [figures(head) for head in heads_of(run.capture())]
    assert any(got != pytest.approx(truth, rel=NORMS) for got, truth in zip(found, dw_q_truth(run), strict=True))


@pytest.mark.parametrize("norm", [None, "rms"])
@pytest.mark.parametrize("name", ["gpt2_step731_L2H4", "failing_step500_L2H7"])
def test_real_inputs_behind_a_rotary_embedding(captures: Path, name: str, norm: Literal["rms"] | None) -> None:
    """x, w_q, k, v and dO of trained heads, whose rows differ in size by orders of magnitude."""
    stored = attn_diag.load(captures / f"{name}.safetensors").tensors
    x, w_q, k, v, do = (stored[tensor][...] for tensor in ("x", "w_q", "k", "v", "do"))
    layer = Layer(64, 1, 1, 1, len(x[0]), x.shape[2], "half", rotated=64, norm=norm)
    run = run_on(layer, x, w_q, k, v, do)
    (head,) = heads_of(run.capture())
    assert figures(head) == pytest.approx(dw_q_truth(run)[0], rel=NORMS)


@pytest.mark.parametrize("case", CASES)
def test_rows_are_pulled_back_by_the_transposed_jacobian(case: str) -> None:
    run = run_layer(CASES[case][0])
    assert rows_off(run, run.of_head().pull) < 0.01


def other_layout(p: Pullback) -> Pullback:
    rotation = some(p.rotation)
    return replace(p, rotation=replace(rotation, pairs=replace(rotation.pairs, layout="interleaved")))


def turned_forward(p: Pullback) -> Pullback:
    return replace(p, rotation=some(p.rotation).inverse())


MUTANTS: dict[str, tuple[Layer, Callable[[Pullback], Pullback]]] = {
    "R-for-its-transpose": (LLAMA, turned_forward),
    "other-layout": (LLAMA, other_layout),
    "not-turned": (LLAMA, lambda p: replace(p, rotation=None)),
    "no-weight": (QWEN3, lambda p: replace(p, gain=torch.ones_like(p.gain))),
    "not-off-u": (QWEN3, lambda p: replace(p, unit=torch.zeros_like(p.unit))),
    "not-over-s": (QWEN3, lambda p: replace(p, size=torch.ones_like(p.size))),
    "not-centred": (Layer(norm="layer"), lambda p: replace(p, norm="rms")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_jacobian_is_seen(mutant: str) -> None:
    layer, change = MUTANTS[mutant]
    run = run_layer(layer)
    right = some(run.of_head().pullback)
    assert rows_off(run, change(right)) > 0.03


EXACT = ("llama", "gptj", "neox", "qwen2", "yarn", "qwen3", "cohere", "vit", "gpt2", "opt", "qwen3-one-head")


@pytest.mark.parametrize("case", EXACT)
def test_in_float64_nothing_is_left(case: str) -> None:
    """The norm's epsilon is neglected, so it is 0 here. Least squares over u and u^2 lose a few of 16 digits."""
    run = run_layer(replace(CASES[case][0], dtype=torch.float64, epsilon=0.0))
    assert rows_off(run, run.of_head().pull) < 1e-11


def agreements(note: str | None) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"([\d.e-]+) % off, ([\d.e-]+) % allowed", note or "")]


@pytest.mark.parametrize("case", ["llama", "gptj", "neox", "qwen2", "qwen3", "cohere", "llama-fp16"])
def test_the_allowance_is_of_the_size_of_the_roundings(case: str) -> None:
    """Every rounding that a model may do counts with half an ulp. Uniform ones are sqrt(3) smaller, so that errors near
    the allowance would mean roundings left out; and those that this model spares make up less than another factor 3."""
    found = agreements(run_layer(CASES[case][0]).find().note)
    assert len(found) == 2
    for off, allowed in found:
        assert allowed / (3 * math.sqrt(3)) < off < allowed


@pytest.mark.parametrize("seed", range(12))
def test_true_maps_are_not_refused(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    d = pick(16, 64, 80)
    norm = pick(None, "rms", "layer")
    heads = pick(1, 2, 6)
    layer = Layer(
        d=d, heads=heads, kv_heads=1, batch=pick(1, 3), length=pick(48, 131), channels=pick(24, 200), norm=norm,
        layout=pick("half", "interleaved"), rotated=d, base=pick(1e2, 1e6), seed=seed,
        bias=0.0 if norm else pick(0.0, 0.1, 5.0), dtype=pick(torch.bfloat16, torch.float16),
    )  # fmt: skip
    found = run_layer(layer).find()
    assert found.known, found.note


def other_layers(run: Run) -> Tensor:
    return run_layer(replace(run.layer, seed=1)).tensors["dq_pre"]


def coarse(run: Run) -> Tensor:
    """dq_pre rounded to five bits less."""
    dq_pre = run.tensors["dq_pre"].double()
    return round_nearest_even(dq_pre, replace(BF16, precision=2)).bfloat16()


def with_the_part_along_y(run: Run) -> Tensor:
    """The gradient that forgets that the norm's divisor depends on y."""
    n = run.layer
    size = (run.tensors["x"].double() @ run.tensors["w_q"].double().T).view(n.batch, n.length, n.heads, n.d)
    size = size.square().mean(-1).sqrt().transpose(1, 2)[..., None]
    y = (run.tensors["x"].double() @ run.tensors["w_q"].double().T).view(n.batch, n.length, n.heads, n.d)
    return (run.tensors["dq_pre"].double() + 0.1 * y.transpose(1, 2) / size).bfloat16()


GRADIENTS: dict[str, tuple[Layer, Callable[[Run], Tensor]]] = {
    "another-layers": (LLAMA, other_layers),
    "another-layers-one-head": (replace(LLAMA, heads=1, kv_heads=1, batch=1), other_layers),
    "another-layers-normed": (QWEN3, other_layers),
    "another-layers-bias": (Layer(bias=1.0), other_layers),
    "another-layers-plain": (Layer(), other_layers),
    "three-percent-larger": (LLAMA, lambda run: run.tensors["dq_pre"] * 1.03),
    "three-percent-larger-normed": (QWEN3, lambda run: run.tensors["dq_pre"] * 1.03),
    "rounded-coarsely": (LLAMA, coarse),
    "shifted-by-a-row": (LLAMA, lambda run: run.tensors["dq_pre"].roll(1, 2)),
    "heads-exchanged": (LLAMA, lambda run: run.tensors["dq_pre"].flip(1)),
    "dq-itself": (LLAMA, lambda run: run.tensors["dq"]),
    "not-off-u": (QWEN3, with_the_part_along_y),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_a_wrong_dq_pre_is_refused(case: str) -> None:
    layer, wrong = GRADIENTS[case]
    run = run_layer(layer)
    assert run.find().known
    found = run.find(dq_pre=wrong(run))
    assert not found.known
    assert found.head(0, 0) is None
    assert "tried: at most a bias" in some(found.note)
    assert "allowed" in some(found.note)


BEYOND = {
    "nonlinear": replace(LLAMA, bent=0.3),
    "nonlinear-one-head": replace(LLAMA, bent=0.3, heads=1, kv_heads=1, batch=1),
    "rotation-by-head": replace(LLAMA, by_head=True),
    "rotation-by-head-normed": replace(QWEN3, by_head=True),
    "norm-over-all-heads": replace(LLAMA, wide_norm=True),
    "bias-before-the-norm": replace(QWEN3, bias=1.0),
}


@pytest.mark.parametrize("case", BEYOND)
def test_a_map_of_another_kind_is_refused(case: str) -> None:
    found = run_layer(BEYOND[case]).find()
    assert not found.known
    assert "q is not x w_q^T" in some(found.note)
    assert some(found.note).count("allowed") == 6


@pytest.mark.parametrize("first", [0, 6])
def test_the_reason_reaches_the_report_with_the_models_number_of_the_head(first: int) -> None:
    tensors = run_layer(replace(LLAMA, bent=0.3)).tensors
    for head in heads_of(attn_diag.Capture.from_tensors(tensors, causal="top-left", head_offset=first)):
        assert head.propagation.dw_q is None
        assert f"; tried: at most a bias (backward of head {first}" in head.propagation.notes[0]


def test_a_bias_needs_no_dq_pre() -> None:
    run = run_layer(Layer(bias=1.0))
    with_it, without = run.find(), run.find(dq_pre=None)
    assert with_it.known
    assert without.known
    assert "at most a bias, seen in the forward" in some(without.note)
    assert rows_off(run, without.head(0, 0).pull) == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ["llama", "qwen3", "opt", "vit"])
def test_anything_else_does(case: str) -> None:
    found = run_layer(CASES[case][0]).find(dq_pre=None)
    assert not found.known
    assert some(found.note).endswith("capture dq_pre (and dq) to see through RoPE and QK-norm")


def test_a_bias_that_hides_x_proves_nothing() -> None:
    """q's roundings are as large as y: with any other x the rows would be as constant."""
    run = run_layer(Layer(bias=400.0))
    assert not run.find(dq_pre=None).known


def test_dq_pre_is_heard_where_q_alone_fits() -> None:
    """A norm of weight 1 on y of nearly unit length moves q by less than 5 %, but its gradient by a whole direction."""
    layer = Layer(d=256, rotated=0, heads=1, kv_heads=1, norm="rms", channels=512)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 96, 512, generator=generator)
    w_q = torch.randn(256, 512, generator=generator) / math.sqrt(512)
    x = (x / (x @ w_q.T).square().mean(-1, keepdim=True).sqrt() * (1 + 0.03 * x[..., :1].tanh())).bfloat16()
    w_q = w_q.bfloat16()
    y = (x @ w_q.T).requires_grad_()
    q = functional.rms_norm(y, (layer.d,), eps=1e-6).view(2, 96, 1, 256).transpose(1, 2)
    dq = torch.randn(q.shape, generator=generator).bfloat16()
    torch.autograd.backward(q, dq)
    given = {"q": q.detach(), "k": dq, "v": dq, "do": dq, "x": x, "w_q": w_q, "dq": dq}
    dq_pre = some(y.grad).view(2, 96, 1, 256).transpose(1, 2)

    def note(**more: Tensor) -> str | None:
        found = find_projection(attn_diag.Capture.from_tensors({**given, **more}), [0, 1], [0], CPU)
        assert found.known
        return found.note

    assert note() is None
    assert note(dq_pre=dq) is None
    assert "QK-norm (RMSNorm)" in (note(dq_pre=dq_pre) or "")


@pytest.mark.parametrize("layer", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_one_head_of_several_may_be_selected(layer: Layer) -> None:
    run = run_layer(layer)
    (head,) = heads_of(run.capture(), heads=frozenset({2}))
    assert some(head.propagation.dw_q).relative_error == pytest.approx(dw_q_truth(run)[2][0], rel=NORMS)


def test_layout_offset_and_named_observation() -> None:
    run = run_layer(LLAMA)
    swapped = {n: t.transpose(1, 2).contiguous() for n, t in run.tensors.items() if n not in ("x", "w_q")}
    named = {n if n in ("q", "k", "v", "do") else f"flash.{n}": t for n, t in swapped.items()}
    whole = torch.cat([torch.zeros(2 * LLAMA.d, LLAMA.channels).bfloat16(), run.tensors["w_q"]])
    capture = attn_diag.Capture.from_tensors(
        {**named, "x": run.tensors["x"], "w_q": whole}, causal="top-left", layout="BTHD", head_offset=2
    )
    assert [h.propagation.dw_q for h in heads_of(capture)] == [h.propagation.dw_q for h in heads_of(run.capture())]


@pytest.mark.parametrize("layer", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_chosen_query_rows(layer: Layer) -> None:
    run, rows = run_layer(layer), torch.arange(40, 90, 2)
    chosen = {n: t[:, :, rows] if n not in ("x", "w_q", "k", "v") else t for n, t in run.tensors.items()}
    chosen |= {"x": run.tensors["x"][:, rows], "q_positions": rows}
    projection = find_projection(attn_diag.Capture.from_tensors(chosen, causal="top-left"), [0, 1], range(4), CPU)
    head = projection.head(0, 0)
    assert head is not None, projection.note
    errors = torch.zeros(2, 4, 96, 32).double()
    errors[0, 0, rows] = torch.randn(len(rows), 32, generator=torch.Generator().manual_seed(1)).double()
    expected = run.pull(errors)[0, 0, rows]
    assert float((head.pull(errors[0, 0, rows]) - expected).norm() / expected.norm()) < 0.01
    # Some of the captured rows, as where others hold NaN.
    assert torch.equal(head.pull(errors[0, 0, rows][5:9], torch.arange(5, 9)), head.pull(errors[0, 0, rows])[5:9])


@pytest.mark.parametrize("layer", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_rows_without_a_gradient_or_with_nan(layer: Layer) -> None:
    """A prompt that the loss leaves out has no gradient; a NaN takes its row out."""
    run = run_layer(layer, do_of=lambda do: do * (torch.arange(96) >= 40)[:, None])
    assert not run.tensors["dq"][:, :, :40].any()
    for name in ("q", "dq"):
        broken = run.tensors[name].clone()
        broken[0, 1, 70, 3] = math.nan
        assert run.find(**{name: broken}).known
        for head in heads_of(run.capture(**{name: broken})):
            assert math.isfinite(some(some(head.propagation.dw_q).relative_error))


@pytest.mark.parametrize("layer", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("value", [math.nan, 0.0], ids=["nan", "zero"])
def test_a_head_without_anything(layer: Layer, value: float) -> None:
    """One that is all NaN says nothing against the others; nor one that is 0 throughout."""
    run, changed = run_layer(layer), {}
    for name in ("q", "dq", "dq_pre"):
        changed[name] = run.tensors[name].clone()
        changed[name][:, 0] = value
    weight = run.tensors["w_q"].clone()
    weight[: layer.d] *= 1 if math.isnan(value) else 0
    found = run.find(**changed, w_q=weight)
    assert found.known, found.note
    assert rows_off(run, some(found.head(0, 1)).pull, head=1) < 0.01


def test_padding_whose_input_is_zero() -> None:
    """There y is 0, and the Jacobian of its norm is 1/sqrt(epsilon) large; with x = 0 it does not reach dW_Q."""
    run = run_layer(QWEN3)
    x = run.tensors["x"].clone()
    x[:, :7] = 0
    q, dq_pre = run.tensors["q"].clone(), run.tensors["dq_pre"].clone()
    q[:, :, :7], dq_pre[:, :, :7] = 0, 1000 * run.tensors["dq"][:, :, :7]
    assert run.find(x=x, q=q, dq_pre=dq_pre).known
    x[0, 0, 0] = 1.0  # y is no longer 0, and q and dq_pre do not follow from it
    assert not run.find(x=x, q=q, dq_pre=dq_pre).known


def test_few_rows_are_said_to_be_few() -> None:
    found = run_layer(replace(QWEN3, length=12)).find()
    assert not found.known
    assert "QK-norm (RMSNorm): no head of batch item 0 has the 16 rows it takes" in (found.note or "")


def test_attribution_and_what_if_pull_back_too() -> None:
    run = run_layer(replace(QWEN3, batch=1, heads=1, kv_heads=1))
    capture = run.capture()
    (head,) = heads_of(capture)
    expected = pytest.approx(some(head.propagation.dw_q).relative_error, rel=1e-12)
    attributed = attn_diag.attribute(capture, recipe="fa2", device="cpu").heads[0]
    assert attributed.totals["dw_q"].captured == expected
    assert "verified on dq_pre" in attributed.notes[0]
    tried = attn_diag.what_if(capture, recipe="fa2", only=["uncast-ds"], device="cpu")
    assert some(tried.observed).dw_q == expected
    emulated = inspect_captures([run.capture(o=None, dq=None, dq_pre=None)], recipes=["fa2"], device="cpu")
    assert emulated.captures[0].observations[0].heads[0].propagation.dw_q is None  # nothing to see the map by
    assert tried.baseline.errors.dw_q == pytest.approx(attributed.totals["dw_q"].error, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["llama", "cohere"])
def test_the_gpu_finds_the_same(case: str) -> None:
    run = run_layer(CASES[case][0])
    capture, places = run.capture(), (range(2), range(4))
    on_gpu, on_cpu = (some(find_projection(capture, *places, torch.device(d)).head(0, 0)) for d in ("cuda", "cpu"))
    errors = torch.randn(96, 32, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(on_gpu.pull(errors.cuda()).cpu(), on_cpu.pull(errors), rtol=1e-9, atol=1e-12)


def test_dq_pre_must_be_shaped_like_q() -> None:
    run = run_layer(LLAMA)
    with pytest.raises(attn_diag.InputError, match="dq_pre must have shape"):
        run.capture(dq_pre=run.tensors["dq_pre"][:, :2])


def test_angles_are_those_of_the_data_and_their_variance_is_right() -> None:
    """Planted noise of known variance in 400 draws: the spread of the measured angles is the one stated."""
    generator = torch.Generator().manual_seed(3)
    pairs = Pairs("rotate-half", 8, 8)
    source = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    angle = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angle), angle)
    exact = Rotation(pairs, turn.conj().resolve_conj(), torch.zeros(5, 4), torch.ones(5, 4, dtype=torch.bool))
    target = [exact.back(s) for s in source]
    noise = torch.full((5, 8), 1e-4, dtype=torch.float64)
    found = []
    for _ in range(400):
        noisy = [t + noise.sqrt() * torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in target]
        found.append(Rotation.measure(pairs, list(source), noisy, [noise, noise]))
    off = torch.stack([(f.turn / turn).angle() for f in found])
    stated = torch.stack([f.variance for f in found]).mean(0)
    # The variance of 400 draws is known to a factor of 1 +- sqrt(2 / 400) = 0.07; the worst of 20 to some 3 times that.
    assert (off.square().mean(0) / stated).sub(1).abs().max() < 0.25
    assert (off.square().mean(0) / (2 * stated)).sub(1).abs().max() > 0.25
