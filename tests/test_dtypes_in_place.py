"""Wider values that are rounded into a tensor of 16 bits in place: a recurrent state, told from an ordinary cast."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from autocast_models import BF16
from builders import some
from torch import Tensor

from attn_diag import DtypeDrift, trace_dtypes

STEPS = 5

Step = Callable[[Tensor, Tensor, Tensor], object]


def by_copy(state: Tensor, decay: Tensor, update: Tensor) -> None:
    wide = state.float()
    state.copy_(wide * decay + update)


def by_copy_of_a_cast(state: Tensor, decay: Tensor, update: Tensor) -> None:
    """As transformers' selective_state_update has it."""
    wide = state * decay + update.to(BF16)
    state.copy_(wide.to(state.dtype))


def by_head_with_a_cast(state: Tensor, decay: Tensor, update: Tensor) -> None:
    for head in range(2):
        state[head].copy_((state[head] * decay[head] + update[head]).to(BF16))


def by_head(state: Tensor, decay: Tensor, update: Tensor) -> None:
    for head in range(2):
        state[head] = state[head].float() * decay[head] + update[head]


# Each reads the state, and rounds what it makes of it in fp32 back into the state.
UPDATES: dict[str, tuple[Step, str, int]] = {
    "+=": (lambda state, _, update: state.__iadd__(update), "Tensor.add_", STEPS),
    "mul_": (lambda state, decay, _: state.mul_(decay), "Tensor.mul_", STEPS),
    "addcmul_": (lambda state, decay, update: state.addcmul_(decay, update), "Tensor.addcmul_", STEPS),
    "a part": (lambda state, _, update: state[0].add_(update[0]), "Tensor.add_", STEPS),
    "a detached one": (lambda state, _, update: state.detach().add_(update), "Tensor.add_", STEPS),
    "an operator": (lambda state, _, update: torch.ops.aten.add_.Tensor(state, update), "aten.add_.Tensor", STEPS),
    "out=": (lambda state, _, update: torch.add(state, update, out=state), "add", STEPS),
    "copy_": (by_copy, "Tensor.copy_", STEPS),
    "copy_ of a cast": (by_copy_of_a_cast, "Tensor.copy_", STEPS),
    "copies of a cast": (by_head_with_a_cast, "Tensor.copy_", 2 * STEPS),
    "promoted": (lambda state, decay, update: state.copy_(state * decay + update), "Tensor.copy_", STEPS),
    "setitem": (by_head, "Tensor.__setitem__", 2 * STEPS),
    "out= of a cast": (lambda state, _, update: torch.add(state.float(), update, out=state), "add", STEPS),
}


@pytest.mark.parametrize("case", UPDATES)
def test_a_state_that_is_updated_in_place(case: str) -> None:
    update, operation, count = UPDATES[case]
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        state, decay = torch.zeros(2, 4, 4, dtype=BF16), torch.full((2, 4, 1), 0.9)
        for _ in range(STEPS):
            update(state, decay, torch.randn(2, 4, 4))
    found = trace.result()
    (event,) = found.rounded
    assert (event.kind, event.operation, event.result, event.count) == ("narrowed", operation, "bfloat16", count)
    assert (event.severity, event.regime) == ("elsewhere", "bfloat16")
    assert {o.dtype for o in event.operands} <= {"float32", "bfloat16"}
    lines, start = inspect.getsourcelines(update)
    assert some(event.source).line in range(start, start + len(lines))
    if case != "a detached one":  # it has another name, or none
        assert some(event.written).name == "state"
        assert some(event.written).shape == (2, 4, 4)
        assert event.fix == "Keep state in float32, and cast it where it is read."
        assert found.summary[0].startswith(f"state is bfloat16, and {operation} at test_dtypes_in_place.py:")
    assert f"float32 values in place {count} times: each result is rounded to bfloat16." in found.summary[0]
    report = found.report(200)
    assert "Rounded in place" in report
    assert report.splitlines()[0] == "NOTHING the traced block: no attention call was seen; 1 place rounds in place"
    assert "Wider values are rounded in place into" in report.splitlines()[1]
    assert DtypeDrift.from_json(found.to_json()) == found


def test_attributes_and_parts_of_several_lines_are_named() -> None:
    class Cell(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(4, 4, dtype=BF16))
            self.state: Tensor

        def forward(self, x: Tensor) -> None:
            self.state[1:] += x

    cell = Cell()
    with trace_dtypes() as trace:
        for _ in range(3):
            cell(torch.randn(3, 4))
    assert [(some(e.written).name, e.operation, e.count) for e in trace.findings] == [("self.state", "Tensor.add_", 3)]


def test_a_line_that_casts_one_tensor_and_updates_another() -> None:
    def store(into: Tensor, x: Tensor) -> None:
        into.copy_(x)

    with trace_dtypes() as trace:
        output, state = torch.zeros(4, dtype=BF16), torch.zeros(4, dtype=BF16)
        for _ in range(3):
            store(output, torch.ones(4))
            store(state, state * torch.full((4,), 0.9) + 1)
    (event,) = trace.result().rounded
    (cast,) = [e for e in trace.result().by_design if e.written]
    assert (event.count, cast.count) == (3, 3)


# What is a cast: counted among those that the code asks for, as with .to(bfloat16).


def output_at_the_end(half: Tensor, wide: Tensor) -> None:
    half.copy_(wide.cumsum(0))


def output_row_by_row(half: Tensor, wide: Tensor) -> None:
    state = torch.zeros(4)
    for t in range(len(wide)):
        state = 0.9 * state + wide[t]
        half[t] = state


def cache_that_is_read(half: Tensor, wide: Tensor) -> None:
    for t in range(1, len(wide)):
        scores = half[:t].float() @ wide[t]
        half[t] = wide[t] + scores.softmax(0).sum()


def normed_once(half: Tensor, wide: Tensor) -> None:
    for _ in range(len(wide)):
        x = half * 2
        x.copy_(x.float() / x.float().square().mean().sqrt())


def master_weights(half: Tensor, wide: Tensor) -> None:
    master = half.float()
    for _ in range(3):
        master += wide
        half.copy_(master)


def cast_master_weights(half: Tensor, wide: Tensor) -> None:
    master = half.float()
    for _ in range(3):
        master += wide
        half[:] = master
        half.copy_(master.to(half.dtype))


def into_out(half: Tensor, wide: Tensor) -> None:
    for _ in range(3):
        torch.mul(wide, wide, out=half)


def loaded(_: Tensor, wide: Tensor) -> None:
    layer = torch.nn.Linear(4, 4, bias=False, dtype=BF16)
    layer.load_state_dict({"weight": wide})


CASTS = [
    output_at_the_end,
    output_row_by_row,
    cache_that_is_read,
    normed_once,
    master_weights,
    cast_master_weights,
    into_out,
    loaded,
]


@pytest.mark.parametrize("work", CASTS)
def test_a_copy_into_16_bits_is_a_cast(work: Callable[[Tensor, Tensor], None]) -> None:
    with trace_dtypes() as trace:
        work(torch.ones(4, 4, dtype=BF16), torch.randn(4, 4))
    found = trace.result()
    assert found.findings == ()
    assert [e.kind for e in found.by_design if e.written] == ["cast"]
    assert "in place" not in " ".join(found.summary)


QUIET: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a slice": lambda cache, x: cache.__setitem__(slice(2, 6), x),
    "index_copy_": lambda cache, x: cache.index_copy_(0, torch.arange(4), x),
    "index_put_": lambda cache, x: cache.index_put_((torch.arange(4),), x),
    "scatter_": lambda cache, x: cache.scatter_(0, torch.zeros(1, 4, dtype=torch.long), x),
    "added in 16 bits": lambda cache, x: cache[:4].add_(x),
    "scaled by a number": lambda cache, _: cache.mul_(torch.tensor(0.9)),
}


@pytest.mark.parametrize("write", QUIET.values(), ids=QUIET)
def test_a_cache_in_16_bits_that_is_given_16_bits_is_nothing(write: Callable[[Tensor, Tensor], object]) -> None:
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        cache = torch.zeros(8, 4, dtype=BF16)
        for _ in range(3):
            write(cache, torch.randn(4, 4).to(BF16))
    found = trace.result()
    assert found.findings == ()
    assert [e.operation for e in found.by_design] == ["Tensor.to"]


def test_weights_that_are_quantised_in_place_are_not_said_to_be_rounded_from_wider_ones() -> None:
    with trace_dtypes() as trace:
        w = torch.ones(4, 4, dtype=BF16)
        for _ in range(3):
            w.copy_(w.to(torch.float8_e4m3fn).to(BF16))
    assert trace.findings == ()
    assert [e.operation for e in trace.result().by_design] == ["Tensor.to", "Tensor.to"]


def test_float64_into_float32_is_no_finding() -> None:
    with trace_dtypes() as trace:
        total = torch.zeros(4)
        for _ in range(3):
            total += torch.ones(4, dtype=torch.float64)
    assert trace.findings == ()


def test_a_running_loss_in_16_bits() -> None:
    """Of 0-dimensional tensors alone the dtypes count, as they do in a promotion."""
    with trace_dtypes() as trace:
        total = torch.zeros((), dtype=BF16)
        for _ in range(3):
            total += torch.ones(4).mean()
    assert [(some(e.written).name, e.count) for e in trace.findings] == [("total", 3)]


def test_gradients_and_values_are_the_same_and_an_outer_trace_sees_no_more() -> None:
    def work() -> Tensor:
        state, x = torch.zeros(4, 4, dtype=BF16), torch.ones(4, 4, requires_grad=True)
        for t in range(3):
            state = state.clone()
            state[t] += x[t] / 3
        return torch.autograd.grad(state.float().sum(), x)[0]

    plain = work()
    with trace_dtypes() as outer:
        assert torch.equal(work(), plain)
    with trace_dtypes() as around, trace_dtypes():
        assert torch.equal(work(), plain)
    assert around.result().operations == outer.result().operations


def test_inside_vmap_nothing_fails() -> None:
    def inner(x: Tensor) -> Tensor:
        state = x.clone()
        state += torch.ones(4)
        return state.copy_(state * torch.ones(4))

    with trace_dtypes() as trace:
        torch.func.vmap(inner)(torch.ones(2, 4, dtype=BF16))
    assert [e.operation for e in trace.findings] == ["Tensor.add_", "Tensor.mul"]


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype:UserWarning"
)  # said once a process
def test_sparse_and_nested_tensors_do_not_fail() -> None:
    sparse = torch.eye(4, dtype=BF16).to_sparse()
    parts = [torch.ones(2, dtype=BF16), torch.ones(3, dtype=BF16)]
    nested = torch.nested.nested_tensor(parts)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with trace_dtypes() as trace:
        sparse.to(torch.float32)
        nested.to(torch.float32)
        jagged.to(torch.float32)
    assert [e.kind for e in trace.result().by_design] == ["cast"] * 3


def test_without_attention_no_sentence_speaks_of_one_that_was_seen() -> None:
    with trace_dtypes() as trace:
        torch.ones(4, dtype=BF16) * torch.ones(4)
    found = trace.result()
    assert (
        found.summary[0]
        == "1 operation promotes silently: usual where a residual stream or a recurrent state is float32."
    )
    assert "if there is an attention" in found.summary[1]
    assert "reaching no attention call" not in found.report()
