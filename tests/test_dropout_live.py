"""Dropout of plain torch attention, met where it runs: which probabilities were kept, and the verdict on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dropout_functions as dropouts
import pytest
import torch
from builders import labels_of
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import attn_diag
from attn_diag import Capture
from attn_diag.captures.loading import load


def inspected(capture: Capture) -> set[str]:
    return labels_of(attn_diag.inspect_captures([capture], device="cpu").captures[0])


def only(folder: Path) -> Capture:
    (path,) = folder.rglob("*.safetensors")
    return load(path)


def of_sdpa(p: float, dtype: torch.dtype, folder: Path, seed: int, **options: Any) -> Capture:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, 64, 32, generator=g).to(dtype).requires_grad_() for _ in range(3))
    do = torch.randn(2, 2, 64, 32, generator=g).to(dtype)
    torch.manual_seed(seed)
    with attn_diag.capture(None, folder):
        torch.autograd.backward(scaled_dot_product_attention(q, k, v, dropout_p=p, **options), do)
    return only(folder)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_sdpa_with_dropout_is_captured_and_right(p: float, causal: bool, tmp_path: Path) -> None:
    capture = of_sdpa(p, torch.float32, tmp_path, 1, is_causal=causal)
    assert capture.metadata.dropout_p == p
    seen = torch.ones(64, 64).tril().bool() if causal else torch.ones(64, 64).bool()
    kept = capture.tensors["dropout_mask"][...]
    assert abs(float(kept[..., seen].double().mean()) - (1 - p)) < 0.03
    assert {"o", "dq", "dk", "dv"} <= set(capture.observations["observed"])
    labels = inspected(capture)
    assert not labels & {"wrong", "lossy"}


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_sdpa_in_bf16_is_right(p: float, tmp_path: Path) -> None:
    labels = inspected(of_sdpa(p, torch.bfloat16, tmp_path, 2))
    assert not labels & {"wrong", "lossy"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_of_a_call_that_the_backward_makes_again_it_is_said_that_the_forward_may_have_had_another(
    reentrant: bool, tmp_path: Path
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.attend, x, use_reentrant=reentrant)
            return found

        def attend(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(x, x, x, dropout_p=0.25)

    model, x = Model(), torch.randn(1, 2, 32, 16, requires_grad=True)
    with attn_diag.capture(model, tmp_path):
        model(x).sum().backward()
    assert ("whether the forward had the same is not seen" in str(only(tmp_path).metadata.notes)) is reentrant


def test_a_forgotten_factor_in_the_backward_is_wrong(tmp_path: Path) -> None:
    capture = of_sdpa(0.25, torch.float32, tmp_path, 3)
    dv = capture.tensors["dv"][...] * 0.75
    tensors = {**{n: t[...] for n, t in capture.tensors.items()}, "dv": dv}
    assert "wrong" in inspected(Capture.from_tensors(tensors, dropout_p=0.25))


def llama() -> Any:
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.25,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def test_transformers_eager_attention_is_captured_in_training_alone(tmp_path: Path) -> None:
    model, ids = llama().train(), torch.randint(0, 64, (2, 32))
    with attn_diag.capture(model, tmp_path / "train"):
        model(ids, labels=ids).loss.backward()
    capture = only(tmp_path / "train")
    assert capture.metadata.dropout_p == 0.25
    assert not inspected(capture) & {"wrong", "lossy"}
    with attn_diag.capture(model.eval(), tmp_path / "eval"), torch.no_grad():
        model(ids)
    assert "dropout_mask" not in only(tmp_path / "eval").tensors


@pytest.mark.parametrize("weights", [False, True])
def test_multi_head_attention_is_captured(weights: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(32, 2, dropout=0.25, batch_first=True), torch.randn(2, 24, 32)
    with attn_diag.capture(layer, tmp_path):
        layer(x, x, x, need_weights=weights)[0].square().sum().backward()
    capture = only(tmp_path)
    assert capture.metadata.dropout_p == 0.25
    assert not inspected(capture) & {"wrong", "lossy"}


def test_what_is_drawn_is_what_it_is_without_us(tmp_path: Path) -> None:
    model, ids = llama().train(), torch.randint(0, 64, (1, 32))

    def loss() -> Tensor:
        torch.manual_seed(5)
        found: Tensor = model(ids, labels=ids).loss
        return found

    alone = loss()
    with attn_diag.capture(model, tmp_path):
        watched = loss()
    assert torch.equal(alone, watched)


@pytest.mark.parametrize("fault", ["none", "mask forgotten", "factor twice"])
def test_the_monitor_measures_what_the_backward_makes_of_the_mask(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """dQ's error is the rounding of plain torch, or what a wrong mask or factor makes of dP."""
    monkeypatch.setattr(torch.nn.functional, "dropout", dropouts.with_backward(fault))
    model, ids = llama().bfloat16().train(), torch.randint(0, 64, (2, 32))
    with attn_diag.Monitor(model, every=1) as monitor:
        model(ids, labels=ids).loss.backward()
        monitor.end_step()
    (check,) = monitor.history
    values = check.layers[0].values
    assert values["measured"].tolist() == [1.0] * 4
    low, high = (0.0, 0.02) if fault == "none" else (0.2, 3.0)
    assert all(low < share < high for share in values["dq_share"].tolist()), values["dq_share"]
