"""gpt-oss of transformers runs: its sinks are captured with their gradient, judged, and monitored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import HEADS, Tiny, captured, healthy, transformers_model, written
from torch import Tensor, nn

import attn_diag
from attn_diag.captures.capture import Capture

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def gpt_oss(dtype: torch.dtype = torch.float32, implementation: str = "eager") -> Tiny:
    tiny = transformers_model("gpt_oss", implementation)
    tiny.model.to(dtype)
    return tiny


def sinks_of(tiny: Tiny, capture: Capture) -> nn.Parameter:
    found: Any = tiny.model.get_submodule(capture.metadata.extra["module"])
    parameter: nn.Parameter = found.sinks
    return parameter


@pytest.mark.parametrize("how", ["fp32", "autocast", "bf16"])
def test_gpt_oss_is_captured_and_never_wrong(how: str, tmp_path: Path) -> None:
    tiny = gpt_oss(torch.bfloat16 if how == "bf16" else torch.float32)
    captures = captured(tiny, tmp_path / "c", autocast=how == "autocast")
    assert len(captures) == 2
    for capture in captures:
        parameter = sinks_of(tiny, capture)
        assert capture.format_version == "1.1"
        assert torch.equal(capture.tensors["sinks"][...], parameter.detach())
        assert parameter.grad is not None
        assert torch.equal(capture.tensors["dsinks"][...], parameter.grad)
    for diagnosis in attn_diag.inspect_captures(captures, device="cpu").captures:
        assert diagnosis.assumptions.ok
        for head in diagnosis.observations[0].heads:
            assert head.verdict is not None
            # Eager gpt-oss rounds P (in pure BF16 scores, softmax and gradients too) where a fused kernel does not.
            assert set(head.verdict.labels) <= {"undecided", "clean"} | (set() if how == "fp32" else {"lossy"})
            answers = {q.quantity: q.answer for q in head.quantities}
            assert answers["dsinks"] == "good"


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dropped": (lambda s: torch.full_like(s, -1e4), "no sink (the sink dropped)"),
    "another head's": (lambda s: s.roll(1), "the sink of head"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_does_otherwise_is_wrong_by_name(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt_oss import modeling_gpt_oss

    change, words = FAULTS[fault]
    original = modeling_gpt_oss.eager_attention_forward

    class Changed:
        def __init__(self, module: Any) -> None:
            self.sinks = change(module.sinks)
            self.num_key_value_groups, self.training = module.num_key_value_groups, True

    def wrong(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
    ) -> Any:
        kwargs.pop("s_aux")
        made: Any = Changed(module)
        return original(made, query, key, value, attention_mask, scaling, **kwargs)

    tiny = gpt_oss()
    # Larger sinks than a model has at its start.
    with torch.no_grad():
        for name, parameter in tiny.model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 3, HEADS))
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", wrong)
    captures = captured(tiny, tmp_path / "c", autocast=True)
    found = attn_diag.inspect_captures(captures, device="cpu")
    for diagnosis in found.captures:
        heads = diagnosis.observations[0].heads
        assert any(h.verdict and "wrong" in h.verdict.labels for h in heads)
        assert any(words in p.words for h in heads for q in h.quantities for p in q.patterns)


def test_of_a_part_of_the_batch_there_is_no_gradient_of_the_sinks(tmp_path: Path) -> None:
    (first, _) = captured(gpt_oss(), tmp_path / "c", batch=[0], heads=[2])
    assert tuple(first.tensors["sinks"].shape) == (2,)
    assert "dsinks" not in first.tensors


def test_calls_that_share_sinks_in_one_backward_have_no_gradient_of_their_own(tmp_path: Path) -> None:
    tiny = gpt_oss()
    with attn_diag.capture(tiny.model, tmp_path / "c", batch=None, calls=[0, 1]) as recorder:
        loss = tiny.loss(tiny.model) + tiny.loss(tiny.model)
        torch.autograd.backward(loss)
    captures = written(recorder)
    assert len(captures) == 4
    assert all("sinks" in c.tensors and "dsinks" not in c.tensors for c in captures)


def test_without_a_gradient_of_the_sinks_the_others_come(tmp_path: Path) -> None:
    tiny = gpt_oss()
    for name, parameter in tiny.model.named_parameters():
        parameter.requires_grad_(not name.endswith("sinks"))
    for capture in captured(tiny, tmp_path / "c"):
        assert "dsinks" not in capture.tensors
        assert {"sinks", "dq", "dk", "dv"} <= capture.tensors.keys()


@pytest.mark.parametrize("autocast", [True, False])
def test_a_short_healthy_training_raises_no_alarm(autocast: bool) -> None:
    """200 steps of a model of width 96 on real tokens, by hand: none either, in autocast and in pure BF16."""
    monitor = healthy(gpt_oss(torch.float32 if autocast else torch.bfloat16), 12, autocast=autocast)
    assert monitor.metrics()["attn/step"] == 10


def fused_by_hand(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float, **_: Any) -> Any:
    """O and its LSE as FlexAttention on a GPU rounds them; gpt-oss has no score_mod."""
    from torch.nn.attention.flex_attention import create_mask

    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).float() for t in (k, v))
    seen = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
    scores = (q.float() @ k.mT * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).to(q.dtype), SimpleNamespace(lse=scores.logsumexp(-1))


@pytest.fixture
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers multiplies O by the sinks' part behind FlexAttention, made of its LSE, and refuses to on a CPU,
    whose FlexAttention has none: its own code with another kernel in it, and without the question for the device."""
    from transformers.integrations import flex_attention as flex

    asks, there = 'query.device.type != "cpu"', dict(vars(flex))
    source = inspect.getsource(flex.flex_attention_forward)
    assert asks in source
    exec(source.replace(asks, "True"), there)
    monkeypatch.setattr(flex.flex_attention_forward, "__code__", there["flex_attention_forward"].__code__)
    monkeypatch.setattr(flex, "compile_friendly_flex_attention", fused_by_hand)


def judge(captures: list[Capture], allowed: set[str]) -> None:
    assert len(captures) == 2
    assert all({"sinks", "dsinks", "dq", "dk", "dv"} <= c.tensors.keys() for c in captures)
    for diagnosis in attn_diag.inspect_captures(captures, device="cpu").captures:
        assert diagnosis.assumptions.ok
        for head in diagnosis.observations[0].heads:
            assert head.verdict is not None
            assert set(head.verdict.labels) <= allowed
            assert {q.quantity: q.answer for q in head.quantities}["dsinks"] == "good"


@pytest.mark.usefixtures("flex_on_a_cpu")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers 5.17 of torch's block masks
@pytest.mark.parametrize("how", ["fp32", "bf16"])
def test_flex_attention_of_gpt_oss_is_captured_monitored_and_never_wrong(how: str, tmp_path: Path) -> None:
    tiny = gpt_oss(torch.bfloat16 if how == "bf16" else torch.float32, "flex_attention")
    # It rounds the LSE, and the sinks' part, to O's format.
    judge(captured(tiny, tmp_path / "c"), {"clean", "undecided"} | ({"lossy", "biased"} if how == "bf16" else set()))
    healthy(tiny, 6, autocast=False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_of_gpt_oss_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options, layers = tiny_models._MORE["gpt_oss"]
    wide = options | {"head_dim": 16}  # the least that its kernels take
    monkeypatch.setitem(tiny_models._MORE, "gpt_oss", (family, wide, layers))
    tiny = gpt_oss(torch.bfloat16, "flex_attention")
    tiny.model.cuda()
    judge(captured(tiny, tmp_path / "c"), {"clean", "undecided", "lossy", "biased"})
