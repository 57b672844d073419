"""Rows that a finite additive mask hides wholly, as in left-padded batches: they neither blind nor alarm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_operators import replaced
from test_monitor_metrics import head_metrics, made_call
from test_monitor_wrong import QUANTITIES, Layer, Two, trained
from tiny_models import tokens
from torch import Tensor, nn
from torch.nn import functional

from attn_diag import Monitor
from attn_diag.reference import absorbed_rows

FEWER = 12
LOWEST = torch.finfo(torch.bfloat16).min


def left_padded(length: int, value: float) -> Tensor:
    """The first rows of the first of two sequences see no key."""
    mask = torch.zeros(2, 1, length, length, dtype=torch.bfloat16)
    mask = mask.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), value)
    mask[0, ..., :FEWER] = value
    return mask


def test_rows_are_absorbed_where_fp32_does_not_hold_a_score_beside_what_every_visible_key_is_given() -> None:
    mask = torch.tensor([[-1e9, 0.0], [-1e9, -1e5], [-1e6, -torch.inf], [-torch.inf, -torch.inf], [torch.nan, -1e9]])
    assert absorbed_rows(mask, None).flatten().tolist() == [False, False, True, False, False]
    assert absorbed_rows(torch.tensor([[-65504.0], [-1e4]]).half(), None).flatten().tolist() == [True, False]
    beside = torch.tensor([[False, True]] * 5)
    assert absorbed_rows(mask, beside).flatten().tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("value", [LOWEST, -1e9, -1e6])
def test_their_figures_are_those_of_rows_that_see_no_key(value: float) -> None:
    call = made_call(mask=left_padded(63, value)[:1])
    found, without = (head_metrics(replace(call, mask=left_padded(63, v)[:1])) for v in (value, -torch.inf))
    for name in ("entropy", "noise_factor", "o_factor", "o_row_factor", "unity_defect", "dq_share", "conditioning"):
        torch.testing.assert_close(getattr(found, name), getattr(without, name), rtol=1e-9, atol=0)


class Padded(nn.Module):
    """SDPA in two layers, on left-padded tokens that are all in the loss."""

    def __init__(self, value: float) -> None:
        super().__init__()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = left_padded(q.shape[2], value)[: len(q)]
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        self.inner = Two(attend)
        self.inner.layers[0] = Layer(attend)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.inner(ids)
        return result


def test_an_o_that_is_wrong_alarms_beside_them_and_a_sound_one_does_not() -> None:
    monitor = trained(Padded(-1e9), steps=11)
    assert not monitor.alarms
    for layer in monitor.history[0].layers:
        for name in ("o_factor", "dq_factor"):
            assert ((layer.values[name] > 0.3) & (layer.values[name] < 2)).all(), name
    with replaced("O a tenth too large", "cpu"):
        wrong = [alarm for alarm in trained(Padded(-1e9), steps=3).alarms if alarm.kind == "wrong"]
    assert [alarm.layer for alarm in wrong] == [0, 1]
    assert all("all rows are 1.1 times the true ones" in alarm.reason for alarm in wrong)


class AnotherHeads(torch.autograd.Function):
    """A gradient that is another head's."""

    @staticmethod
    def forward(_: Any, v: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(_: Any, *given: Any) -> Any:
        return given[0].roll(1, 1) * 1.5


@pytest.mark.parametrize("wrong", [False, True])
def test_dv_of_transformers_eager_attention_is_held_against_o_in_left_padded_batches(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    eager = llama.eager_attention_forward

    def eager_attention_forward(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *given: Any, **options: Any) -> Any:
        value = AnotherHeads.apply(v) if wrong else v  # type: ignore[no-untyped-call]
        return eager(module, q, k, value, *given, **options)

    monkeypatch.setattr(llama, "eager_attention_forward", eager_attention_forward)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = llama.LlamaConfig(vocab_size=61, num_key_value_heads=2, attn_implementation="eager", **sizes)
    model = llama.LlamaForCausalLM(config).bfloat16().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(model, every=2) as monitor:
        for step in range(4):
            ids = tokens(step)
            seen = torch.ones_like(ids)
            seen[0, :FEWER] = 0
            # The last padded row's prediction is in the loss: it has a gradient.
            loss = model(input_ids=ids, attention_mask=seen, labels=ids.masked_fill(seen == 0, -100)).loss
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    found = [(alarm.layer, alarm.reason[:3]) for alarm in monitor.alarms]
    assert found == ([(0, "dV "), (1, "dV ")] if wrong else [])
    for layer in monitor.history[0].layers:
        for name in QUANTITIES:
            values = layer.values[f"{name}_factor"]
            assert (values > (50 if wrong and name == "dv" else 0.2)).all(), name
            assert wrong or (values < 2).all(), name
