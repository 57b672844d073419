"""Layers of one shape are measured as one: the figures are those of each alone, and the operations hardly more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from attn_diag import Monitor
from attn_diag.watching.monitoring import measuring as measuring_module
from attn_diag.watching.monitoring import metrics as metrics_module
from attn_diag.watching.monitoring import sample as sample_module
from attn_diag.watching.monitoring import stacks as stacks_module
from attn_diag.watching.monitoring.rows import TEMPORARIES, measure_rows
from attn_diag.watching.monitoring.sample import Sample
from attn_diag.watching.monitoring.stacks import Key

WIDTH, HEADS, DIM = 300, 4, 16
KINDS = ("plain", "gqa", "plain", "turned", "masked", "gqa", "masked by head", "masked", "turned", "masked by head")


class Attention(nn.Module):
    """One layer of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, keys = kind, (2 if kind == "gqa" else HEADS) * DIM
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, size) for size in (HEADS * DIM, keys, keys))
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for of in (self.q_proj, self.k_proj, self.v_proj))
        if self.kind == "turned":
            q = torch.cat([-q[..., DIM // 2 :], q[..., : DIM // 2]], -1)
        mask, rows = None, x.shape[1]
        if self.kind == "masked":
            mask = torch.randn(len(x), 1, rows, rows)
        elif self.kind == "masked by head":
            mask = torch.randn(1, HEADS, rows, rows) > -1
        o = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=self.kind == "gqa"
        )
        y: Tensor = x + self.out(o.transpose(1, 2).flatten(2))
        return y


class Train:
    """Steps of a model of such layers."""

    def __init__(self, kinds: Sequence[str]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*map(Attention, kinds))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._step = 0

    def step(self, rows: int = 40) -> None:
        x = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(self._step))
        self._step += 1
        torch.autograd.backward(self.model(x).square().mean())
        self._optimizer.step()
        self._optimizer.zero_grad()


def figures(kinds: Sequence[str] = KINDS, rows: int = 1024) -> list[list[Mapping[str, Any]]]:
    """Of two checks, layer by layer."""
    train = Train(kinds)
    with Monitor(train.model, every=1, sequences=2, rows=rows) as monitor:
        for _ in range(2):
            train.step()
    return [[layer.values for layer in check.layers] for check in monitor.history]


def assert_same(found: list[list[Mapping[str, Any]]], expected: list[list[Mapping[str, Any]]]) -> None:
    assert [len(check) for check in found] == [len(check) for check in expected] == [len(KINDS)] * 2
    for check, each in zip(found, expected, strict=True):
        for number, (layer, alone) in enumerate(zip(check, each, strict=True)):
            for name, values in layer.items():
                # A product of another shape may add up in another order.
                one, other = torch.tensor(values), torch.tensor(alone[name])
                assert torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True), (number, name)


def one_by_one(samples: Mapping[Key, Sample], past: Mapping[Key, Tensor]) -> Iterator[tuple[list[Key], int]]:  # noqa: ARG001
    for key in list(samples):
        yield [key], TEMPORARIES


@pytest.mark.parametrize("rows", [1024, 7])
def test_stacked_layers_have_the_figures_of_each_alone(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = [], Sample.stacked

    def stacked(samples: Sequence[Sample]) -> Sample:
        sizes.append(len(samples))
        return real(samples)

    monkeypatch.setattr(Sample, "stacked", stacked)
    found = figures(rows=rows)
    assert sizes == [2] * 5 * 2
    monkeypatch.setattr(measuring_module, "stacks", one_by_one)
    alone = figures(rows=rows)
    assert sizes[10:] == [1] * 10 * 2
    assert_same(found, alone)
    assert not math.isnan(found[1][2]["past_z"][0])
    assert not math.isnan(found[1][1]["coherence"][0])


def test_a_large_w_q_is_looked_at_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures()
    monkeypatch.setattr(sample_module, "_SMALL_WEIGHT", 0)
    assert_same(figures(), found)


def test_a_stack_is_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = [], Sample.stacked

    def stacked(samples: Sequence[Sample]) -> Sample:
        sizes.append(len(samples))
        return real(samples)

    found = figures()
    monkeypatch.setattr(Sample, "stacked", stacked)
    # Key heads: of four a layer, and of two.
    monkeypatch.setattr(stacks_module, "heads_at_once", lambda *_: HEADS)
    assert_same(figures(), found)
    assert sorted(sizes) == [1] * 8 * 2 + [2] * 2


def test_what_fails_for_some_layers_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = measure_rows

    def fails(sample: Sample, *others: Any) -> Any:
        if sample.k.shape[1] < sample.q.shape[1]:
            raise RuntimeError("of ours")
        return real(sample, *others)

    monkeypatch.setattr(metrics_module, "measure_rows", fails)
    assert [len(check) for check in figures()] == [8] * 2
    assert "RuntimeError: of ours" in caplog.text


class Operations(TorchDispatchMode):
    """Counts what runs; views among it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(layers: int) -> int:
    """So many more has a step that is looked at."""
    train, counts = Train(["plain"] * layers), list[int]()
    with Monitor(train.model, every=2):
        for _ in range(3):
            with Operations() as operations:
                train.step()
            counts.append(operations.count)
    return counts[2] - counts[1]


def test_a_layer_more_is_a_few_operations_more(monkeypatch: pytest.MonkeyPatch) -> None:
    one, twelve = operations(1), operations(12)
    # Copies of q, k, v, o, LSE, dO, x and w_q, with the views that they are of.
    assert twelve - one <= 11 * 60
    monkeypatch.setattr(measuring_module, "stacks", one_by_one)
    assert operations(12) - one > 11 * 300
