"""A trace of dtypes changes nothing, keeps nothing alive, and knows its own thread."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from autocast_models import BF16, TimeMix, promoted
from builders import some
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from attn_diag import DtypeDrift, trace_dtypes
from attn_diag.watching.drift.history import _LONGEST_PATH
from attn_diag.watching.drift.trace import active_trace


@pytest.fixture
def model() -> TimeMix:
    torch.manual_seed(0)
    return TimeMix()


def test_a_transformer_encoder_trains_the_same() -> None:
    """nn.MultiheadAttention is one operation here: not looked into, and not taken for an attention call."""
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True), torch.randn(2, 16, 64)
    with torch.autocast("cpu", BF16):
        plain = layer(x)
        with trace_dtypes() as trace:
            assert torch.equal(layer(x), plain)
    assert trace.result().attention_calls == 0
    assert any("No attention call was recognised" in sentence for sentence in trace.result().summary)


def test_values_and_gradients_are_not_touched(model: TimeMix) -> None:
    x = torch.randn(2, 8, 64)

    def step() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", BF16):
            out = checkpoint(lambda y: F.scaled_dot_product_attention(*model(y)), x, use_reentrant=False)
            out.float().square().mean().backward()
        return [out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain = step()
    with trace_dtypes() as trace:
        traced = step()
    assert len(plain) == 6
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    assert trace.findings[0].operation == "Tensor.addcmul"


def test_nothing_stays_behind_after_an_exception(model: TimeMix) -> None:
    def fails() -> None:
        with trace_dtypes() as trace:
            assert active_trace() is trace
            model(torch.randn(2, 8, 64))
            raise RuntimeError("of the user's")

    before = dict(vars(model.k_a)), torch._dynamo.eval_frame._stance.stance
    with pytest.raises(RuntimeError, match="of the user's"):
        fails()
    assert torch.overrides._get_current_function_mode() is None  # type: ignore[no-untyped-call]
    assert active_trace() is None
    assert (dict(vars(model.k_a)), torch._dynamo.eval_frame._stance.stance) == before


def test_no_tensor_is_kept_alive() -> None:
    with trace_dtypes() as trace:
        y = promoted()
        gone = weakref.ref(y)
        del y
        gc.collect()
        assert gone() is None
    assert len(trace.findings) == 1


def test_a_tensor_at_a_dead_ones_address_has_no_history() -> None:
    with trace_dtypes() as trace:
        made = [promoted() for _ in range(100)]
    addresses = set(map(id, made))
    assert all(trace.path(x) for x in made)
    made.clear()
    later = [x for x in [torch.ones(4) for _ in range(200)] if id(x) in addresses]
    assert later, "no address was used again: the test shows nothing"
    assert not any(trace.path(x) for x in later)


def test_a_recurrence_keeps_its_origin_and_a_bounded_history() -> None:
    with trace_dtypes() as trace:
        state = promoted()
        for _ in range(10 * _LONGEST_PATH):
            state = state + 1
    path = trace.path(state)
    assert len(path) <= _LONGEST_PATH + 1
    assert path[0].operation == "Tensor.mul"
    assert some(trace.cause(state)).operation == "Tensor.mul"


def test_other_threads_are_left_alone() -> None:
    seen = []

    def work() -> None:
        seen.append(active_trace())
        promoted()

    with trace_dtypes() as trace:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [None]
    assert trace.result().operations == 0
    assert "No operation of torch was seen" in trace.result().summary[0]


def test_traces_that_overlap_in_two_threads() -> None:
    """Each sees its own thread; the first to begin ends first, and compiled code is eager until the other ends."""
    began, ended = threading.Event(), threading.Event()
    found: list[DtypeDrift] = []

    def work() -> None:
        with trace_dtypes() as inner:
            began.set()
            ended.wait(60)
            promoted()
        found.append(inner.result())

    thread = threading.Thread(target=work)
    with trace_dtypes() as outer:
        thread.start()
        assert began.wait(60)
        torch.cat([torch.ones(4, dtype=BF16), torch.ones(4)])
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    ended.set()
    thread.join()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert [e.operation for e in outer.findings] == ["cat"]
    assert [e.operation for e in found[0].findings] == ["Tensor.mul"]


def test_an_optimizer_step_of_many_tensors() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(300)]
    for p in parameters:
        p.grad = torch.ones(2)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    with trace_dtypes() as trace:
        optimizer.step()
    assert trace.findings == ()
    assert trace.result().operations < 10 * len(parameters)


def test_generators_are_seen_while_they_run_inside() -> None:
    def batches() -> Iterator[Tensor]:
        for _ in range(3):
            yield promoted()

    source = batches()
    next(source)
    with trace_dtypes() as trace:
        next(source)
    next(source)
    assert [e.count for e in trace.findings] == [1]


def test_nested_traces_both_see() -> None:
    with trace_dtypes() as outer:
        with trace_dtypes() as inner:
            promoted()
        assert active_trace() is outer
    assert len(inner.findings) == len(outer.findings) == 1
