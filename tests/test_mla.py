"""MLA: V and O have other features than Q and K, in captures, analyses, and DeepSeek-V3 of transformers live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import some
from tiny_models import Tiny, healthy, transformers_model, written
from torch import Tensor, nn
from torch.nn import functional

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.results.diagnosis import HeadDiagnosis

SIZES = {"192/128": (192, 128, 2), "absorbed 576/512": (576, 512, 1), "wider values": (24, 40, 2)}


def call(sizes: str, *, rows: int = 96, scale: float | None = None) -> dict[str, Tensor]:
    """A causal call of torch's, with gradients, in BF16."""
    d, dv, kv_heads = SIZES[sizes]
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (2, d), "k": (kv_heads, d), "v": (kv_heads, dv), "do": (2, dv)}
    t = {n: torch.randn(1, h, rows, f, generator=generator).bfloat16() for n, (h, f) in shapes.items()}
    q, k, v = (t[name].requires_grad_() for name in "qkv")
    gqa = kv_heads == 1
    t["o"] = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa, scale=scale)
    gradients = torch.autograd.grad(t["o"], (q, k, v), t["do"])
    return {name: x.detach() for name, x in {**t, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}.items()}


def heads_of(t: dict[str, Tensor]) -> tuple[HeadDiagnosis, ...]:
    capture = Capture.from_tensors(t, causal="top-left")
    return attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads


@pytest.mark.parametrize("sizes", SIZES)
def test_every_quantity_is_good_and_each_analysis_runs(sizes: str, tmp_path: Path) -> None:
    t = call(sizes, rows=64)
    capture = Capture.from_tensors(t, causal="top-left")
    d, dv, _ = SIZES[sizes]
    assert capture.sizes()["D"] == d
    assert capture.sizes()["Dv"] == dv
    file = capture.save(tmp_path / "mla.safetensors")
    found = attn_diag.inspect(file)
    assert found.captures[0].shape["Dv"] == dv
    for head in found.captures[0].observations[0].heads:
        answers = {q.quantity: q.answer for q in head.quantities}
        # torch's SDPA on a CPU adds dK and dV tile by tile in BF16.
        assert answers["o"] == answers["dq"] == "good"
        assert not {"wrong", "biased"} & set(some(head.verdict).labels)
    if sizes != "192/128":
        return
    for analyse in (attn_diag.identify, attn_diag.attribute, attn_diag.what_if, attn_diag.microscope):
        assert analyse(file).report()


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "v's last features dropped": ("o", lambda x: x.index_fill(3, torch.arange(96, 128), 0), "features"),
    "dv of another head": ("dv", lambda x: x.flip(1), "head"),
    "dk without its rope features": ("dk", lambda x: x.index_fill(3, torch.arange(128, 192), 0), "features"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str) -> None:
    t = call("192/128")
    output, change, word = FAULTS[fault]
    heads = heads_of({**t, output: change(t[output])})
    assert all("wrong" in some(head.verdict).labels for head in heads)
    words = [p.words for head in heads for q in head.quantities if q.quantity == output for p in q.patterns]
    assert any(word in w for w in words), words


def test_an_absorbed_call_has_the_scale_of_the_unabsorbed_one() -> None:
    t = call("absorbed 576/512", scale=192**-0.5, rows=32)
    found = attn_diag.inspect_captures([Capture.from_tensors(t, causal="top-left")], device="cpu")
    assert found.captures[0].assumptions.ok is False
    assert "(1/sqrt(192)) fits" in str(found.captures[0].assumptions.message)


def test_another_length_of_values_is_refused() -> None:
    t = call("192/128")
    with pytest.raises(attn_diag.InputError, match=r"o must have shape \[B, H, T, D\] = \[1, 2, 96, 128\]"):
        Capture.from_tensors({**t, "o": t["q"]})


def deepseek(dtype: torch.dtype, implementation: str) -> Tiny:
    pytest.importorskip("transformers")
    tiny = transformers_model("deepseek_v3", implementation)
    tiny.model.to(dtype)
    return tiny


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_deepseek_is_captured_and_never_wrong(implementation: str, tmp_path: Path) -> None:
    tiny = deepseek(torch.bfloat16, implementation)
    with attn_diag.capture(tiny.model, tmp_path, batch=None) as recorder:
        torch.autograd.backward(tiny.loss(tiny.model))
    captures = written(recorder)
    assert not recorder.dropped
    assert [(c.head_dim, c.value_dim) for c in captures] == [(16, 12)] * 2
    for diagnosis in attn_diag.inspect_captures(captures, device="cpu").captures:
        assert diagnosis.assumptions.ok
        for head in diagnosis.observations[0].heads:
            # Eager rounds scores and P to BF16, torch's SDPA on a CPU adds dK and dV in it.
            assert set(some(head.verdict).labels) <= {"clean", "undecided", "lossy"}


def test_a_short_healthy_training_raises_no_alarm() -> None:
    """200 steps of a model of width 64 on a Markov chain, by hand: none either, in autocast and in pure BF16."""
    assert healthy(deepseek(torch.float32, "sdpa"), 10).metrics()["attn/step"] == 8


@pytest.mark.parametrize("way", ["v of k", "k of v", "apart"])
def test_a_latent_that_k_and_v_share_is_never_accused(way: str, tmp_path: Path) -> None:
    class Absorbed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(32, 2 * 24), nn.Linear(32, 24)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (2, 24)).transpose(1, 2)
            latent = self.kv(x)[:, None]
            k, v = latent, latent[..., :16]
            if way == "k of v":
                k = torch.cat([v, latent[..., 16:]], -1)
            elif way == "apart":
                k, v = latent.view_as(latent), latent[..., :16]
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.2)

    torch.manual_seed(0)
    model, x = Absorbed().bfloat16(), torch.randn(2, 64, 32).bfloat16()
    with attn_diag.capture(model, tmp_path, batch=None) as recorder:
        torch.autograd.backward(model(x).float().square().sum())
    (capture,) = written(recorder)
    # Each use's own gradient, not the sum that arrives at the latent.
    assert {"dk", "dv"} <= capture.tensors.keys()
    for head in attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads:
        assert "wrong" not in some(head.verdict).labels
