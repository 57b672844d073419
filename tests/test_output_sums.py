"""Output projections that ranks add up: captured on two and four processes, named, and faults told from rounding."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from command_line import Programs
from tiny_models import tokens, transformers_model
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

import attn_diag
from attn_diag.analyses.mismatch.outputs import ProjectionCall, projections_of
from attn_diag.analyses.mismatch.reduced import judged
from attn_diag.analyses.mismatch.sums import IN_FP32, SAME_WEIGHTS, ComparedSums, with_sums
from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.reports.mismatch import mismatch_document
from attn_diag.results.mismatch import Mismatch

RANKS, HEADS, DIM, LENGTH = 4, 4, 8, 40
WIDTH = HEADS * DIM
CPU = torch.device("cpu")
AddUp = Callable[[Sequence[Tensor]], Tensor]


def once(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([p.float() for p in parts]).sum(0).to(parts[0].dtype)


def in_turn(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def in_any_order(parts: Sequence[Tensor]) -> Tensor:
    """Another order for every element, as no ring or tree has it."""
    order = torch.rand(len(parts), *parts[0].shape, generator=torch.Generator().manual_seed(5)).argsort(0)
    return in_turn([torch.stack(list(parts)).gather(0, at[None])[0] for at in order])


def captures(
    seed: int = 0, add_up: AddUp = once, give: Callable[[int, Tensor], Tensor] | None = None, *, ranks: int = RANKS,
    dtype: torch.dtype = torch.bfloat16, step: int = 0, bias: bool = False, returns: torch.dtype | None = None,
) -> list[Capture]:  # fmt: skip
    """What ``ranks`` capture of one call, with weights that all seeds have."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM, generator=generator).to(dtype) for _ in range(3))
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)).to(dtype)
    added = torch.linspace(-3, 3, WIDTH).to(dtype) / ranks if bias else torch.zeros(WIDTH, dtype=dtype)
    heads, found, parts = HEADS // ranks, [], []
    for rank in range(ranks):
        own = slice(rank * heads, (rank + 1) * heads)
        columns = weight[:, own.start * DIM : own.stop * DIM].contiguous()
        part = functional.linear(o[:, own].transpose(1, 2).flatten(2), columns, added)
        parts.append(part if give is None else give(rank, part))
        tensors = {"q": q[:, own], "k": k[:, own], "v": v[:, own], "o": o[:, own], "w_o": columns}
        extra = {"run": "a", "call": "0", "world_size": str(ranks), "sum_dtype": str(returns or dtype)[6:]}
        said = {"causal": "top-left", "layer": 0, "step": step, "rank": rank, "head_offset": own.start}
        found.append((tensors, said, extra | ({"sum_bias": "yes"} if bias else {})))
    if ranks == 1:
        return [Capture.from_tensors(t | {"sum_output": parts[0]}, **s, extra=e) for t, s, e in found]
    total = add_up(parts)
    shared = {"sum_ranks": ",".join(map(str, range(ranks))), "sum_by": "all-reduce by hand"}
    return [
        Capture.from_tensors(t | {"sum_part": p, "sum_total": total}, **s, extra=e | shared)
        for p, (t, s, e) in zip(parts, found, strict=True)
    ]


def the_call(given: Sequence[Capture]) -> ProjectionCall:
    (call,), notes = projections_of(given, "rollout", CPU)
    assert not notes
    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["BF16", "FP16", "FP32"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("add_up", [once, in_turn, in_any_order])
def test_no_order_and_no_format_of_its_own_is_a_fault(add_up: AddUp, bias: bool, dtype: torch.dtype) -> None:
    for seed in range(8):
        found = judged(the_call(captures(seed, add_up, dtype=dtype, bias=bias)), [])
        assert not found.faults, found.faults
    if add_up is not in_any_order and dtype != torch.float32:
        name = "BF16" if dtype == torch.bfloat16 else "FP16"
        assert found.how.words.startswith("in fp32, cast once" if add_up is once else f"in {name} after each addition")


def without(rank: int) -> AddUp:
    return lambda parts: once([p for i, p in enumerate(parts) if i != rank])


def one_row_without(parts: Sequence[Tensor]) -> Tensor:
    total = once(parts)
    total[:, 3] = without(2)(parts)[:, 3]
    return total


def test_a_layer_that_multiplies_by_few_bits_of_its_weight_is_healthy() -> None:
    """Ternary weights, as a BitLinear's: all ranks' parts are a third off what the weight says."""
    given = captures()
    for c in given:
        weight = c.tensors["w_o"][...]
        c.tensors["w_o"] = weight + 0.6 * weight.abs().mean() * torch.randn(  # type: ignore[index]
            weight.shape, generator=torch.Generator().manual_seed(3)
        ).to(weight)
    call = the_call(given)
    off = [float((call.part(i).double() - some(call.product(i))).norm() / call.part(i).double().norm()) for i in (0, 1)]
    assert min(off) > 0.3
    assert not judged(call, []).faults


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_projection_that_begins_with_zeros_is_healthy(dtype: torch.dtype) -> None:
    given = captures(dtype=dtype, give=lambda _, p: torch.zeros_like(p))
    for c in given:
        c.tensors["w_o"] = torch.zeros_like(c.tensors["w_o"][...])  # type: ignore[index]
    assert not judged(the_call(given), []).faults


older = captures(7)
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "dropped": ({"add_up": without(1)}, "the sum is without rank 1's part", "semantics"),
    "two dropped": (
        {"add_up": lambda p: once(p[2:])}, "the sum is without rank 0's part and without rank 1's part", "semantics",
    ),
    "one for another": (
        {"add_up": lambda p: once([p[0], p[0], p[2], p[3]])},
        "the sum is with rank 0's part twice and without rank 1's part", "semantics",
    ),
    "twice": ({"add_up": lambda p: once([*p, p[3]])}, "the sum is with rank 3's part twice", "semantics"),
    "a row": ({"add_up": one_row_without}, "the sum is without rank 2's part (in 2.5 % of its rows)", "semantics"),
    "stale": (
        {"add_up": lambda p: once([p[0], p[1], older[2].tensors["sum_part"][...], p[3]]), "step": 1},
        "the sum has rank 2's part of step 0 in place of its own", "semantics",
    ),
    "anything": (
        {"add_up": lambda p: once([p[0], p[1].flip(-1), p[2], p[3]])},
        "the sum has something else in place of rank 1's part", "semantics",
    ),
    "a factor": (
        {"add_up": lambda p: once(p) * 1.02}, "the sum is no sum of its parts in any order and format", "unnamed",
    ),
    "BF16 sums of FP32": (
        {"add_up": lambda p: once([x.bfloat16() for x in p]).float(), "dtype": torch.float32},
        "the sum of float32 parts is one of parts cast to BF16 first, and added up in BF16", "rounding",
    ),
    "zeros": ({"give": lambda r, p: p * 0 if r == 2 else p}, "rank 2 gives zeros", "semantics"),
    "doubled": (
        {"give": lambda r, p: p * 2 if r == 0 else p}, "rank 0 gives 2 times its O times its weight", "semantics",
    ),
    "stale part": (
        {"give": lambda r, p: older[3].tensors["sum_part"][...] if r == 3 else p, "step": 1},
        "rank 3 gives its part of step 0 again", "semantics",
    ),
    "coarse part": (
        {"give": lambda r, p: p.to(torch.float8_e4m3fn).to(p.dtype) if r == 1 else p},
        "what rank 1 gives is further from its O times its weight than rounding and the other ranks'", "unnamed",
    ),
    "BF16 parts of FP16": (
        {"give": lambda r, p: p.bfloat16(), "dtype": torch.float16},  # noqa: ARG005
        "what the ranks give is cast to BF16 before it is added up, of float16 O", "rounding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", CASES)
def test_what_no_rounding_makes_is_named(fault: str) -> None:
    given, words, label = CASES[fault]
    found = judged(the_call(captures(**given)), [the_call(older)])
    assert [(f.words, f.label) for f in found.faults] == [(words, label)]


def with_weights(weights: Sequence[Tensor], given: Sequence[Capture]) -> list[Capture]:
    """The same call with other columns of the output projection."""
    parts = [
        functional.linear(c.tensors["o"][...].transpose(1, 2).flatten(2), w)
        for c, w in zip(given, weights, strict=True)
    ]
    names = {"sum_total": once(parts)} if len(parts) > 1 else {}
    part = "sum_part" if names else "sum_output"
    return [
        replace(c, tensors={**c.tensors, **names, "w_o": w, part: p})
        for c, w, p in zip(given, weights, parts, strict=True)
    ]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("swapped", [True, False], ids=["columns of other ranks", "older"])
def test_other_weights_of_the_output_projection_are_a_cause(swapped: bool, ranks: int) -> None:
    """They had been rounding, as what came in with an O that is the same in every bit."""
    given = captures(ranks=ranks)
    whole = torch.cat([c.tensors["w_o"][...] for c in given], 1)
    wrong = whole.roll(DIM, 1) if swapped else (whole * 1.02).bfloat16()
    found = attn_diag.mismatch(captures(ranks=1), with_weights([w.contiguous() for w in wrong.chunk(ranks, 1)], given))
    (cause,) = found.causes
    assert (cause.layer, cause.kind, cause.place, found.place) == (0, "weights", "output", "output")
    assert cause.words.startswith("other weights of the output projection (")
    (output,) = found.outputs
    parts = {part.name: part for part in output.parts}
    assert parts["inputs"].size == 0
    assert parts["weights"].share > 0.9
    assert sum(part.share for part in output.parts) == pytest.approx(1)
    repair = next(r for r in found.repairs if r.what == SAME_WEIGHTS)
    assert repair.removes > 0.9
    assert not any(r.measure == "O" for r in found.repairs)
    assert "weights" in found.report(120)
    assert Mismatch.from_json(found.to_json()) == found


def test_weights_that_an_adapter_makes_up_for_are_no_cause() -> None:
    """One run has merged what the other adds besides; or keeps in FP32 what the other has in BF16."""
    given = captures()
    low_rank = torch.linspace(-1, 1, WIDTH)[:, None] * torch.linspace(1, 2, DIM)
    changed = [(c.tensors["w_o"][...] + 0.3 * low_rank).bfloat16() for c in given]
    merged = [replace(c, tensors={**c.tensors, "w_o": w}) for c, w in zip(given, changed, strict=True)]
    found = attn_diag.mismatch(captures(ranks=1), merged)
    assert not found.causes
    assert any("something makes up for them" in note for note in found.notes)
    (one,) = captures(ranks=1)
    wide = replace(one, tensors={**one.tensors, "w_o": one.tensors["w_o"][...].float() * (1 + 2.0**-10)})
    assert not attn_diag.mismatch([wide], given).causes


def test_a_multiplier_of_the_layer_is_healthy_where_both_runs_have_it() -> None:
    def quarter(_: int, p: Tensor) -> Tensor:
        return p * 0.25

    assert not attn_diag.mismatch(captures(ranks=1, give=quarter), captures(give=quarter)).causes
    found = attn_diag.mismatch(captures(ranks=1), captures(give=quarter))
    assert ["every rank gives 0.25 times its O times its weight" in cause.words for cause in found.causes] == [True]


def test_a_bias_on_one_rank_alone_is_healthy() -> None:
    """Its part is larger, and so is what rounding leaves of it."""
    added = 30 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()

    def give(rank: int, p: Tensor) -> Tensor:
        return p + added if rank == 0 else p

    given = captures(give=give)
    first = given[0].metadata
    given[0] = replace(given[0], metadata=replace(first, extra={**first.extra, "sum_bias": "yes"}))
    assert not judged(the_call(given), []).faults


def test_numbers_that_are_not_finite_are_a_cause() -> None:
    """They had been "bit for bit the same"."""
    given = captures(give=lambda rank, p: p * torch.nan if rank == 1 else p)
    found = attn_diag.mismatch(captures(ranks=1), given)
    assert [c.words for c in found.causes] == [
        "rollout's output projection: NaN or infinity comes from rank 1, whose O and weight are finite"
    ]


def test_float64_and_a_sum_in_another_dtype_are_judged() -> None:
    def exactly(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([p.to(torch.promote_types(p.dtype, torch.float32)) for p in parts]).sum(0)

    for dtype in (torch.float64, torch.bfloat16):
        assert not judged(the_call(captures(add_up=exactly, dtype=dtype)), []).faults
    assert judged(the_call(captures(add_up=lambda p: exactly(p[1:]), dtype=torch.float64)), []).faults


def test_parts_of_other_shapes_are_told() -> None:
    given = captures()
    given[1] = replace(given[1], tensors={**given[1].tensors, "sum_part": given[1].tensors["sum_part"][...][:, 1:]})
    calls, (note,) = projections_of(given, "rollout", CPU)
    assert not calls
    assert "[1, 39, 32]" in note


def test_ranks_that_get_other_sums_are_told() -> None:
    given = captures(add_up=in_turn)
    other = without(0)([c.tensors["sum_part"][...] for c in given])
    given[2] = replace(given[2], tensors={**given[2].tensors, "sum_total": other})
    (fault,) = judged(the_call(given), []).faults
    assert fault.words == "the sum that rank 2 gets is without rank 0's part"


def test_the_report_names_the_order_its_share_and_the_repair() -> None:
    found = attn_diag.mismatch(captures(ranks=1), captures(add_up=in_turn))
    assert found.outcome == "rounding"
    assert not found.causes
    (output,) = found.outputs
    assert sum(p.share for p in output.parts) == pytest.approx(1)
    of_sum = next(p for p in output.parts if p.name == "sum")
    assert 0.1 < of_sum.share < 1
    one, shared = found.sums
    assert (one.ranks, shared.ranks, shared.within) == ((0,), (0, 1, 2, 3), True)
    assert shared.error > 1.2 * shared.in_fp32
    repair = next(r for r in found.repairs if r.what == IN_FP32)
    # Done: the same run with the parts added up in fp32.
    done = attn_diag.mismatch(captures(ranks=1), captures(add_up=once)).outputs[0]
    assert repair.left == pytest.approx(done.difference, rel=1e-6)
    text = found.report(120)
    assert "rollout adds up what ranks 0-3 give, in bfloat16 (all-reduce by hand): in BF16 after each addition" in text
    assert "train adds nothing up" in text
    assert "in BF16 after each addition" in mismatch_document(found)
    assert Mismatch.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["sums"][1]["by"] == "all-reduce by hand"


def test_parts_that_were_not_captured_are_asked_for() -> None:
    given = captures(add_up=in_turn)
    bare = [replace(c, tensors={n: t for n, t in c.tensors.items() if n[:3] != "sum"}) for c in given]
    bare = [replace(c, metadata=replace(c.metadata, extra={**c.metadata.extra, "sum_ranks": ""})) for c in bare]
    for one, words in (
        (given[:3], "the captures of 1 rank 3 are missing"),
        (bare, "the parts were not captured: under tensor parallelism use attn_diag.capture(..., sums=True)"),
    ):
        calls, notes = projections_of(one, "rollout", CPU)
        assert not calls
        assert words in notes[0]
    with pytest.raises(InputError, match="found in a model"):
        attn_diag.capture(None, "nowhere", sums=True)


class Raising(nn.Linear):
    """Fails once."""

    error: BaseException | None = ValueError("out of luck")

    def forward(self, x: Tensor) -> Tensor:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().forward(x)


class Plain(nn.Module):
    """Attention with an output projection that fails once."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Raising(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = x.view(*x.shape[:-1], -1, DIM).transpose(1, 2)
        found: Tensor = self.dense(functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))
        return found


def test_a_projection_that_is_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C, of which hooks are not told."""
    model, x = Plain(), torch.randn(2, 6, WIDTH)
    model.dense.error = KeyboardInterrupt()
    with (
        attn_diag.capture(model, tmp_path / "one", batch=None, calls=None, sums=True),
        pytest.raises(KeyboardInterrupt),
    ):
        model(x)
    assert _get_current_dispatch_mode() is None
    model.dense.error = KeyboardInterrupt()
    with attn_diag.capture(model, tmp_path / "two", batch=None, calls=None, sums=True):
        with pytest.raises(KeyboardInterrupt):
            model(x)
        y = model(2 * x)
    first, second = (attn_diag.load(path) for path in sorted((tmp_path / "two").glob("*.safetensors")))
    assert "sum_output" not in first.tensors
    assert torch.equal(second.tensors["sum_output"][...], y.detach())


def test_a_projection_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    model, x = Plain(), torch.randn(2, 6, WIDTH)
    with attn_diag.capture(model, tmp_path, batch=(1,), calls=None, sums=True):
        with pytest.raises(ValueError, match="out of luck"):
            model(x)
        assert _get_current_dispatch_mode() is None
        y = model(x)
    names = {name for path in tmp_path.glob("*.safetensors") for name in attn_diag.load(path).tensors}
    assert {"sum_output", "w_o"} <= names
    kept = [c for c in map(attn_diag.load, tmp_path.glob("*.safetensors")) if "sum_output" in c.tensors]
    assert all(torch.equal(c.tensors["sum_output"][...], y[1:].detach()) for c in kept)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_a_wrong_sum_makes_of_the_next_layer_is_no_cause_of_its_own() -> None:
    found = attn_diag.mismatch(captures(ranks=1), captures(add_up=without(1)))
    (cause,) = found.causes
    assert (cause.kind, cause.place, cause.side) == ("sum", "output", "rollout")
    behind = replace(cause, layer=1, kind="unnamed-input", place="stream")
    later = replace(behind, layer=2)
    sums = ComparedSums(causes=[cause])
    assert with_sums([behind, later], sums, [0, 1, 2]) == [cause, later]
    assert "x of layer 1 differs" in sums.notes[0]


class Rows(nn.Module):
    """An output projection that does its all-reduce itself, as Megatron's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.steps = nn.Parameter(weight), 1

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y = functional.linear(x, self.weight)
        for _ in range(self.steps):
            distributed.all_reduce(y)
        return y, None


class Attention(nn.Module):
    """Rows first, [T, B, C], as Megatron's."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        weights = [torch.randn(WIDTH, WIDTH).bfloat16() / WIDTH**0.5 for _ in range(4)]
        self.qkv = nn.ParameterList([w.chunk(ranks)[rank] for w in weights[:3]])
        self.dense = Rows(weights[3].chunk(ranks, 1)[rank].contiguous())

    def forward(self, x: Tensor) -> Tensor:
        made = (functional.linear(x, w) for w in self.qkv)
        q, k, v = (y.view(*y.shape[:-1], -1, DIM).permute(1, 2, 0, 3) for y in made)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.dense(o.permute(2, 0, 1, 3).flatten(2))[0]
        return found


def one_rank(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, parallel

    distributed.init_process_group("gloo")
    model = Attention(distributed.get_rank(), distributed.get_world_size())
    x = torch.randn(24, 2, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = model(x)
    with attn_diag.capture(model, folder, batch=None, calls=None, sums=True):
        assert torch.equal(model(x), plain)
    model.dense.steps = 2
    with attn_diag.capture(model, folder / "twice", batch=None, calls=None, sums=True):
        model(x)
    scattered = Scattered().bfloat16()
    plan: dict[str, Any] = {"dense": parallel.RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1))}
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    parallel.parallelize_module(scattered, mesh, plan)
    with attn_diag.capture(scattered, folder / "uneven", batch=None, calls=None, sums=True):
        scattered(x[:5].transpose(0, 1))
    distributed.destroy_process_group()


class Scattered(nn.Module):
    """A rank's heads, and an output projection whose sum leaves every rank some of the rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        own = x.chunk(distributed.get_world_size(), -1)[distributed.get_rank()]
        q = own.view(*own.shape[:-1], -1, DIM).transpose(1, 2)
        o = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        found: Tensor = self.dense(o.transpose(1, 2).flatten(2))
        return found


class Shares(nn.Module):
    """A linear layer in two halves of its input, added up as BF16 ranks do."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = whole.weight

    def forward(self, x: Tensor) -> Tensor:
        return in_turn(self.parts(x))

    def parts(self, x: Tensor) -> list[Tensor]:
        halves = zip(x.chunk(4, -1), self.weight.chunk(4, 1), strict=True)
        return [functional.linear(one, w.contiguous()) for one, w in halves]


def spread(captures: Sequence[Capture]) -> list[Capture]:
    """Of a run whose output projections are ``Shares``, what four ranks would have captured."""
    found = []
    for c in captures:
        t, m = {name: source[...] for name, source in c.tensors.items()}, c.metadata
        group = 4 // c.kv_heads
        for rank, w in enumerate(t["w_o"].chunk(4, 1)):
            own, keys = slice(rank, rank + 1), slice(rank // group, rank // group + 1)
            if t["o"].shape[2] > 1 == t["sum_output"].shape[1]:
                shape = c.batch, 4, 1, t["o"].shape[3]  # query heads as the rows of their key head
                t["q"], t["o"] = t["q"].reshape(shape), t["o"].reshape(shape)
            part = functional.linear(t["o"][:, own].transpose(1, 2).flatten(2), w.contiguous())
            tensors = {"q": t["q"][:, own], "k": t["k"][:, keys], "v": t["v"][:, keys], "o": t["o"][:, own]}
            tensors |= {"w_o": w.contiguous(), "sum_part": part, "sum_total": t["sum_output"]}
            tensors |= {"x": t["x"]} if "x" in t else {}
            extra = {"sum_ranks": "0,1,2,3", "sum_by": "all-reduce by hand", "world_size": "4"}
            said = replace(m, rank=rank, head_offset=rank, extra={**m.extra, **extra})
            found.append(replace(c, tensors=tensors, metadata=said))
    return found


@pytest.mark.slow
def test_sums_have_their_share_of_the_difference_of_logprobs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    captured, logs = [], []
    hidden: list[Any] = []
    for name in ("train", "rollout"):
        tiny = transformers_model("llama", "sdpa")
        model: Any = tiny.model.to(torch.bfloat16)
        if name == "rollout":
            for layer in model.model.layers:
                layer.self_attn.o_proj = Shares(layer.self_attn.o_proj)
        head = model.get_output_embeddings()
        with (
            torch.no_grad(),
            attn_diag.capture(model, tmp_path / name, batch=None, calls=None, sums=True),
            kept_input(head, hidden),
        ):
            every = model(input_ids=tokens(), use_cache=False).logits[:, :-1].double().log_softmax(-1)
        logs.append(every.gather(2, tokens()[:, 1:, None])[..., 0].numpy())
        captured.append([attn_diag.load(path) for path in sorted((tmp_path / name).glob("*.safetensors"))])
        if name == "train":
            trainer = model
    found = attn_diag.explain_logprobs(
        trainer, tokens(), captured[0], spread(captured[1]), logprobs=(logs[0], logs[1]), hidden=(hidden[0], hidden[1])
    )
    assert not found.causes
    assert all(s.way.startswith("in BF16 after each addition") for s in found.sums if len(s.ranks) > 1)
    split = found.logprobs
    assert split is not None
    assert split.predicted is not None
    assert split.predicted > 0.9
    sums = [s for s in split.shares if s.place == "sum"]
    assert [s.layer for s in sums] == [0, 1]
    assert all(s.rms > 0 for s in sums)
    named = sum(s.share for s in split.shares if s.place != "rest")
    assert named == pytest.approx(1, abs=0.1)
    repair = next(r for r in found.repairs if r.what == IN_FP32)
    assert (repair.measure, repair.layers) == ("log-probability", (0, 1))


@contextlib.contextmanager
def kept_input(module: nn.Module, held: list[Tensor]) -> Iterator[None]:
    hook = module.register_forward_pre_hook(lambda _, args: held.append(args[0].detach()))
    yield
    hook.remove()


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
def test_four_ranks_of_a_module_that_adds_up_itself(tmp_path: Path, programs: Programs) -> None:
    programs.ranks(__file__, tmp_path, count=4)
    captures = [attn_diag.load(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    # Nothing but the sum tells whose heads these are.
    assert [c.metadata.head_offset for c in captures] == [0, 1, 2, 3]
    (call,), notes = projections_of(captures, "rollout", CPU)
    assert not notes
    assert call.part(0).shape == (2, 24, WIDTH)
    found = judged(call, [])
    assert not found.faults
    assert found.how.words.startswith("in BF16 after each addition")
    assert call.by == "all-reduce by gloo"
    # Neither of two sums, one after the other, is the projection's.
    twice = [attn_diag.load(path) for path in sorted((tmp_path / "twice").glob("*.safetensors"))]
    assert len(twice) == 4
    assert not any("sum_part" in c.tensors for c in twice)
    # Of five rows two ranks get two, one gets one, and one gets none.
    uneven = [attn_diag.load(path) for path in sorted((tmp_path / "uneven").glob("*.safetensors"))]
    assert [c.tensors["sum_total"].shape[1] for c in uneven] == [2, 2, 1, 0]
    (call,), notes = projections_of(uneven, "rollout", CPU)
    assert not notes
    assert call.total.shape == call.part(0).shape == (2, 5, WIDTH)
    assert not judged(call, []).faults


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
