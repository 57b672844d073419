"""Context parallelism on two processes: a rank's rows are judged with all keys, merged ranks as the unsharded model."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from builders import some
from command_line import Programs
from torch import Tensor, distributed, nn
from torch.nn import functional

import attn_diag
from attn_diag.analyses.mismatch.rings import ring_merges, with_rings
from attn_diag.captures.capture import Capture
from attn_diag.results.diagnosis import HeadDiagnosis
from attn_diag.watching.live.query_projections import NO_LAYER
from attn_diag.watching.live.rings import Order, positions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore"),
]
BATCH, LENGTH, HEADS, DIM, LAYERS, STEPS = 2, 24, 2, 8, 2, 2
WIDTH = HEADS * DIM
# What a run is called -> whether it is causal, and in which order the ranks have the rows.
RINGS: dict[str, tuple[bool, Order]] = {
    "torch's": (True, "contiguous"),
    "torch's, balanced": (True, "zigzag"),
    "torch's, not causal": (False, "contiguous"),
    "observed": (True, "striped"),
    "ring_flash_attn's": (True, "striped"),
}
Function: Any = torch.autograd.Function
CPU: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class TorchRing(Function):  # type: ignore[misc]
    """torch's own ring, with the operators of the CPU, for which its dispatcher has no entry."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        o, lse = _attention._templated_ring_attention(
            some(distributed.group.WORLD), 2, CPU, q, k, v, is_causal=causal, dropout_p=0.0, scale=None
        )
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        q, k, v, o, lse = ctx.saved_tensors
        found = _attention._templated_ring_attention_backward(
            some(distributed.group.WORLD), 2, CPU_BACKWARD, grad_out=do, grad_out_name="grad_out", query=q, key=k,
            value=v, out=o, logsumexp=lse, is_causal=ctx.causal, dropout_p=0.0, scale=None,
        )  # fmt: skip
        return *found, None


def hops(group: Any, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Of every second row a rank: whose keys come, the first row that sees any of them, and what it may see of them."""
    place, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    gathered = []
    for own in (k, v):
        gathered.append([torch.empty_like(own) for _ in range(ranks)])
        distributed.all_gather(gathered[-1], own.contiguous(), group=group)
    for number in range(ranks):
        source = (place - number) % ranks
        first = int(source > place)
        keys, values = (t[source][:, :, : k.shape[2] - first] for t in gathered)
        yield source, first, keys, values


def stripes_forward(q: Tensor, k: Tensor, v: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """A ring as one may write it: one hop a rank, whose parts are merged by their LSE."""
    o, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    for _, first, keys, values in hops(group, k, v):
        part, part_lse = CPU(q[:, :, first:], keys, values, 0.0, True)
        total = torch.logaddexp(lse[:, :, first:], part_lse)
        old, new = ((t - total).exp()[..., None] for t in (lse[:, :, first:], part_lse))
        o[:, :, first:] = o[:, :, first:] * old + part * new
        lse[:, :, first:] = total
    return o, lse


def stripes_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.zeros_like(q)
    totals = torch.zeros(distributed.get_world_size(group), 2, *k.shape)
    for source, first, keys, values in hops(group, k, v):
        do_, q_, o_, lse_ = (t[:, :, first:].contiguous() for t in (do, q, o, lse))
        part, *of_keys = CPU_BACKWARD(do_, q_, keys, values, o_, lse_, 0.0, True)
        dq[:, :, first:] += part
        totals[source, :, :, :, : keys.shape[2]] += torch.stack(of_keys)
    distributed.all_reduce(totals, group=group)
    dk, dv = totals[distributed.get_rank(group)]
    return dq, dk, dv


class Stripes(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        o, lse = stripes_forward(q, k, v, group)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.group = group
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, *_: Any) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        return *stripes_backward(do, q, k, v, o, lse, ctx.group), None


@attn_diag.observe(causal=True, ring="striped")
def stripes(q: Tensor, k: Tensor, v: Tensor, group: Any = None) -> tuple[Tensor, Tensor]:
    o, lse = Stripes.apply(q, k, v, group)
    return o, lse


def stripe_flash_attn_forward(
    process_group: Any, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool = True, **_: Any
) -> tuple[Tensor, Tensor]:
    """As in ring_flash_attn 0.1.8: [B, T, H, D]."""
    assert causal
    assert softmax_scale == q.shape[-1] ** -0.5
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o, lse = stripes_forward(q, k, v, process_group)
    return o.transpose(1, 2), lse


def stripe_flash_attn_backward(
    process_group: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    do, q, k, v, o = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    return tuple(t.transpose(1, 2) for t in stripes_backward(do, q, k, v, o, softmax_lse, process_group))


PACKAGE: Any = ModuleType("ring_flash_attn.stripe_flash_attn")
PACKAGE.__dict__.update({f.__name__: f for f in (stripe_flash_attn_forward, stripe_flash_attn_backward)})


class Packaged(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        o, lse = PACKAGE.stripe_flash_attn_forward(None, q, k, v, softmax_scale=scale, causal=True)
        ctx.save_for_backward(q, k, v, o, lse)
        result: Tensor = o
        return result

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        scale = do.shape[-1] ** -0.5
        return PACKAGE.stripe_flash_attn_backward(None, do, *ctx.saved_tensors, softmax_scale=scale, causal=True)


class Exchange(Function):  # type: ignore[misc]
    """[B, H, T / ranks, D] of all heads into [B, H / ranks, T, D] of all rows (``rows``), or back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, rows: bool) -> Tensor:
        ctx.rows, ranks = rows, distributed.get_world_size()
        split, join = (1, 2) if rows else (2, 1)
        parts = torch.stack(t.chunk(ranks, split))
        found = torch.empty_like(parts)
        distributed.all_to_all_single(found, parts)
        return torch.cat(found.unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Exchange.apply(gradient, not ctx.rows), None


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (Exchange.apply(t, True) for t in (q, k, v))
    result: Tensor = Exchange.apply(functional.scaled_dot_product_attention(q, k, v, is_causal=True), False)
    return result


class Attention(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.run = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), run

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        result: Tensor = self.out(self.run(q, k, v).transpose(1, 2).flatten(2))
        return result


class Model(nn.Module):
    """Attention that is sure to move things: its rows and keys differ much."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(run) for _ in range(LAYERS))
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(1.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, target = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator)
    return x, target


def train(model: nn.Module, rows: Tensor, around: contextlib.AbstractContextManager[Any]) -> list[Tensor]:
    """``rows`` of the batch, and what is left afterwards; the gradients of the ranks are added up."""
    x, target = (t[:, rows] for t in batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with around:
        for _ in range(STEPS):
            loss = (model(x) - target).square().sum() / BATCH
            torch.autograd.backward(loss)
            for p in model.parameters():
                if distributed.is_initialized():
                    distributed.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses + [p.detach().clone() for p in model.parameters()]


def whole(causal: bool) -> Any:
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def ring(how: str) -> Any:
    if how == "ulysses":
        return ulysses
    if how == "observed":
        return lambda q, k, v: stripes(q, k, v)[0]
    if how == "ring_flash_attn's":
        return lambda q, k, v: Packaged.apply(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    if how == "unknown":
        return lambda q, k, v: Stripes.apply(q, k, v, None)[0]
    return lambda q, k, v: TorchRing.apply(q, k, v, RINGS[how][0])


def one_rank(folder: Path) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    distributed.init_process_group("gloo")
    sys.modules[PACKAGE.__name__] = PACKAGE
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for how in (*RINGS, "unknown", "ulysses"):
        order = RINGS[how][1] if how in RINGS else "contiguous" if how == "ulysses" else "striped"
        _attention._cp_options.enable_load_balance = order == "zigzag"
        rows = positions(order, rank, ranks, LENGTH // ranks)
        bits = []
        for watched in (False, True):
            model = Model(ring(how))
            around: Any = contextlib.nullcontext()
            if watched:
                around = attn_diag.capture(model, folder / how, batch=None, calls=None, hops=True)
            bits.append(train(model, rows, around))
        assert all(map(torch.equal, *bits)), f"another run with {how}"
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """What two processes captured, and one of the whole model; that no bit changed they have checked themselves."""
    folder = tmp_path_factory.mktemp("context_parallel")
    programs.ranks(__file__, folder)
    for causal in (True, False):
        model = Model(whole(causal))
        train(model, torch.arange(LENGTH), attn_diag.capture(model, folder / f"whole {causal}", batch=None))
    return folder


def captures(folder: Path) -> list[Capture]:
    return [attn_diag.load(path) for path in sorted(folder.glob("*.safetensors"))]


def heads(those: list[Capture]) -> dict[tuple[Any, int | None, int | None], HeadDiagnosis]:
    found = attn_diag.inspect_captures(those)
    every = ((c.metadata["step"], h) for c in found.captures for h in c.observations[0].heads)
    return {(step, h.layer, h.head): h for step, h in every if h.head is not None}


# What some fp32 roundings of inputs, scores, products and sums make (one is 2**-24).
ROUNDINGS = 16 * 2.0**-24


def allowed(head: HeadDiagnosis) -> float:
    """Of a gradient's relative error: delta's roundings come in as often as the conditioning says."""
    return ROUNDINGS * (1 + some(head.conditioning))


@pytest.mark.parametrize("how", [*RINGS, "ulysses"])
def test_merged_ranks_are_the_unsharded_model(how: str, folder: Path) -> None:
    causal = how not in RINGS or RINGS[how][0]
    expected, found = heads(captures(folder / f"whole {causal}")), heads(captures(folder / how))
    assert expected.keys() == found.keys()
    assert len(expected) == STEPS * LAYERS * HEADS
    for key, one in expected.items():
        other = found[key]
        assert (other.rows_all, other.not_judged) == (one.rows_all, one.not_judged)
        assert other.row_maxima.window.fraction == one.row_maxima.window.fraction, key
        assert other.conditioning == pytest.approx(one.conditioning, rel=ROUNDINGS), key
        for quantity in ("dq", "dk", "dv", *(("dw_q",) if how in RINGS else ())):
            error = some(some(getattr(other.propagation, quantity)).relative_error)
            assert error < allowed(other), (key, quantity)


@pytest.mark.parametrize("how", RINGS)
def test_a_rank_alone_is_judged_with_all_keys_that_its_rows_see(how: str, folder: Path) -> None:
    for capture in captures(folder / how):
        (found,) = attn_diag.inspect_captures([capture]).captures
        assert found.assumptions.ok
        for head in found.observations[0].heads:
            assert some(some(head.propagation.dq).relative_error) < allowed(head)
            assert head.propagation.dk is None
            assert any("dK (summed over the rows of other ranks" in words for words in head.not_judged)


@pytest.mark.parametrize("how", RINGS)
def test_hops_add_up_to_the_whole(how: str, folder: Path) -> None:
    """In fp32, as all of these rings do it; "observed" has a backward of its own that nobody sees."""
    first = [c for c in captures(folder / how) if c.metadata.step == 0]
    found = ring_merges(first, "train", torch.device("cpu"))
    outputs = ("o",) if how == "observed" else ("o", "dq", "dk", "dv")
    assert {(m.layer, m.rank, m.output) for m in found} == set(product(range(LAYERS), range(2), outputs))
    for merge in found:
        assert merge.way == "in fp32, cast once"
        assert not merge.hop_is_off
        assert max(merge.error, merge.from_merge, merge.from_hops) < 3 * ROUNDINGS
    assert not with_rings([], found)


@pytest.mark.parametrize("how", RINGS)
def test_files_name_rows_and_hops(how: str, folder: Path) -> None:
    causal, order = RINGS[how]
    found = captures(folder / how)
    assert len(found) == 2 * STEPS * LAYERS
    for capture in found:
        m, rank = capture.metadata, some(capture.metadata.rank)
        assert m.extra["module"] == f"layers.{m.layer}"
        assert (m.extra["call"], m.extra["sequence_ranks"]) == ("0", "0,1")
        assert m.causal == ("top-left" if causal else "none")
        rows = positions(order, rank, 2, LENGTH // 2)
        assert torch.equal(capture.tensors["q_positions"][...], rows)
        assert capture.k_length == (int(rows.max()) + 1 if causal else LENGTH)
        assert m.extra["hops"].startswith(f"rank {rank}: ")
    told = {c.metadata.extra["hops"] for c in found if c.metadata.rank == 1}
    assert told == {
        {
            "contiguous": "rank 1: 12-23; rank 0: 0-11",
            "zigzag": "rank 1: 6-17; rank 0: 0-5",
            "striped": "rank 1: 1-23 by 2; rank 0: 0-22 by 2",
        }[order]
    }


def test_ulysses_numbers_heads_for_the_whole_model(folder: Path) -> None:
    for capture in captures(folder / "ulysses"):
        m = capture.metadata
        assert (m.head_offset, capture.q_heads, capture.q_length) == (some(m.rank) * HEADS // 2, HEADS // 2, LENGTH)
        assert m.notes == NO_LAYER  # what is exchanged between ranks is no layer's output


def test_rows_in_another_place_are_found_out(folder: Path) -> None:
    """That the captures agree with float64 is because of the rows that they name."""
    capture = captures(folder / "torch's, balanced")[0]
    others = positions("contiguous", 0, 2, LENGTH // 2)
    wrong = replace(capture, tensors={**capture.tensors, "q_positions": others})
    (found,) = attn_diag.inspect_captures([wrong]).captures
    assert not found.assumptions.ok


def test_a_missing_rank_leaves_its_rows_out(folder: Path) -> None:
    first = [c for c in captures(folder / "torch's, balanced") if c.metadata.rank == 0]
    found = attn_diag.inspect_captures(first)
    assert all("rank 0 alone, of 2" in " ".join(c.assumptions.defaults) for c in found.captures)


def test_keys_that_changed_on_their_way_are_told_of(folder: Path) -> None:
    one, other = [c for c in captures(folder / "torch's, balanced") if (c.metadata.layer, c.metadata.step) == (0, 0)]
    k = other.tensors["k"][...].clone()
    k[0, 1, 3, 2] += 1
    found = attn_diag.inspect_captures([one, replace(other, tensors={**other.tensors, "k": k})])
    assert len(found.captures) == 2
    assert "keys changed on their way" in " ".join(found.summary.warnings)


def test_hops_of_a_ring_that_nobody_knows_are_right_for_their_own_keys(folder: Path) -> None:
    found = captures(folder / "unknown")
    names = {(c.metadata.layer, c.metadata.extra["module"], c.metadata.extra["call"]) for c in found}
    assert names == {(n, f"layers.{n}", call) for n in range(LAYERS) for call in "01"}
    for capture in found:
        assert "dq" not in capture.tensors
        (diagnosis,) = attn_diag.inspect_captures([capture]).captures
        assert diagnosis.assumptions.ok


class Halves(Function):  # type: ignore[misc]
    """Two hops on one rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [CPU(q, a, b) for a, b in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)]
        (one, one_lse), (other, other_lse) = parts
        o = one - torch.sigmoid(other_lse - one_lse)[..., None] * (one - other)
        lse = torch.logaddexp(one_lse, other_lse)
        ctx.save_for_backward(q, k, v, o, lse)
        result: Tensor = o
        return result

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        halves = zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)
        (dq, *one), (more, *other) = (CPU_BACKWARD(do, q, a, b, o, lse, 0.0, False) for a, b in halves)
        return dq + more, *(torch.cat(pair, 2) for pair in zip(one, other, strict=True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
def test_in_a_graph_no_hop_gets_the_gradients_of_the_merged_o(tmp_path: Path) -> None:
    """Inductor puts the merged O where that of the first hop was."""
    model = Model(Halves.apply)
    model.compile(backend="inductor", fullgraph=True)
    train(model, torch.arange(LENGTH), attn_diag.capture(model, tmp_path, batch=None, calls=None))
    found = captures(tmp_path)
    assert len(found) == STEPS * LAYERS * 2
    assert all(c.k_length == LENGTH // 2 and "dq" not in c.tensors for c in found)


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
