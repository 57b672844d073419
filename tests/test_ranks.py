"""Captures of several ranks, merged: the same figures as one capture of the whole batch, read head by head."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from command_line import Run
from torch import Tensor

from attn_diag import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.captures.joined import JoinedSource
from attn_diag.captures.loading import find_captures, load
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.captures.sources import TensorSource

B, HQ, HK, T, D, C = 8, 4, 2, 40, 16, 24
SCALE = 0.25
RUN = {"run": "1a2b3c4d", "module": "h.2.attn", "call": "0", "world_size": "4"}


def whole_batch(layout: str = "BHTD") -> dict[str, Tensor]:
    """A whole batch with every tensor a capture may have: float64 mathematics on BF16 inputs, rounded once."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(B, T, C, generator=generator).bfloat16()
    w_q = torch.randn(HQ * D, C, generator=generator).bfloat16()
    q = (x.double() @ w_q.double().mT).view(B, T, HQ, D).transpose(1, 2).bfloat16()
    k, v = (torch.randn(B, HK, T, D, generator=generator).bfloat16() for _ in range(2))
    do = torch.randn(B, HQ, T, D, generator=generator).bfloat16()
    mask = torch.rand(B, 1, T, T, generator=generator) > 0.3
    mask |= torch.eye(T, dtype=torch.bool)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wide = [leaves[0], *(t.repeat_interleave(HQ // HK, 1) for t in leaves[1:])]
    scores = (SCALE * wide[0] @ wide[1].mT).masked_fill(~mask, -math.inf)
    o = scores.softmax(-1) @ wide[2]
    dq, dk, dv = torch.autograd.grad(o, leaves, do.double())
    tensors = {"q": q, "k": k, "v": v, "do": do, "o": o, "dq": dq, "dk": dk, "dv": dv}
    tensors = {name: t.detach().bfloat16() for name, t in tensors.items()}
    if layout == "BTHD":
        tensors = {name: t.transpose(1, 2).contiguous() for name, t in tensors.items()}
    lse = scores.detach().logsumexp(-1).float()
    delta = (o.detach().bfloat16().double() * do.double()).sum(-1).float()
    return {**tensors, "lse": lse, "delta": delta, "x": x, "w_q": w_q, "mask": mask}


def of_items(tensors: dict[str, Tensor], items: slice) -> dict[str, Tensor]:
    return {name: t if name == "w_q" else t[items] for name, t in tensors.items()}


def of_heads(tensors: dict[str, Tensor], part: int, parts: int, layout: str) -> dict[str, Tensor]:
    """What one of ``parts`` tensor-parallel ranks holds."""
    axis = 1 if layout == "BHTD" else 2
    cut = {}
    for name, tensor in tensors.items():
        along = {"x": None, "mask": None, "w_q": 0, "lse": 1, "delta": 1}.get(name, axis)
        cut[name] = tensor if along is None else tensor.chunk(parts, along)[part].contiguous()
    return cut


def write(folder: Path, rank: int, tensors: dict[str, Tensor], layout: str = "BHTD", **metadata: Any) -> Path:
    extra = RUN | metadata.pop("extra", {})
    stated = {"layout": layout, "scale": SCALE, "layer": 2, "step": 500, "rank": rank, "extra": extra} | metadata
    return Capture.from_tensors(tensors, **stated).save(folder / f"step000500_layer02_call0_rank{rank}.safetensors")


def read(folder: Path) -> list[Capture]:
    return [load(path) for path in find_captures([folder])]


def data_parallel(folder: Path, tensors: dict[str, Tensor], layout: str = "BHTD") -> list[Path]:
    """Four ranks with one, three, two and two of the eight batch items."""
    cuts = (slice(0, 1), slice(1, 4), slice(4, 6), slice(6, 8))
    return [write(folder, rank, of_items(tensors, cut), layout) for rank, cut in enumerate(cuts)]


def figures(captures: list[Capture], **options: Any) -> dict[str, Any]:
    """All numbers of an inspection, as JSON; not what names files and ranks."""
    document: dict[str, Any] = json.loads(inspect_captures(captures, device="cpu", **options).to_json())
    for capture in document["captures"]:
        for key in ("source", "metadata"):
            del capture[key]
        del capture["assumptions"]["defaults"]
    del document["summary"]["sentence"], document["summary"]["warnings"]
    return document


def one_capture(tensors: dict[str, Tensor], layout: str = "BHTD") -> Capture:
    return Capture.from_tensors(tensors, layout=layout, scale=SCALE, layer=2, step=500)


@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
def test_data_parallel_ranks_give_the_figures_of_the_whole_batch(tmp_path: Path, layout: str) -> None:
    tensors = whole_batch(layout)
    merged = [load(path) for path in data_parallel(tmp_path, tensors, layout)]
    expected = figures([one_capture(tensors, layout)])
    assert figures(merged) == expected
    assert expected["captures"][0]["shape"]["B"] == B
    # With eight sequences or more the tests cluster by sequence, which files of their own cannot.
    heads = expected["captures"][0]["observations"][0]["heads"]
    assert heads[0]["bias"]["delta"]["n_clusters"] == B
    assert heads[0]["propagation"]["dw_q"] is not None
    assert expected["captures"][0]["observations"][0]["kv_heads"][0]["bias"]["dk"] is not None
    assert len(figures(merged, merge_ranks=False)["captures"]) == 4


def neighbour(self: JoinedSource, position: int) -> tuple[TensorSource, int]:
    """The batch item before the one asked for."""
    return honest_find(self, position - 1)


def first_part(self: JoinedSource, position: int) -> tuple[TensorSource, int]:
    """Always the first rank's file."""
    part = self.parts[0]
    return part, position % part.shape[self.axis]


honest_find = JoinedSource._find


@pytest.mark.parametrize("wrong", [neighbour, first_part])
def test_a_wrong_dispatch_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    tensors = whole_batch()
    merged = [load(path) for path in data_parallel(tmp_path, tensors)]
    monkeypatch.setattr(JoinedSource, "_find", wrong)
    assert figures(merged) != figures([one_capture(tensors)])


@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
@pytest.mark.parametrize("whole_w_q", [False, True])
def test_tensor_parallel_ranks_give_the_figures_of_all_heads(tmp_path: Path, layout: str, whole_w_q: bool) -> None:
    tensors = whole_batch(layout)
    for rank in range(2):
        held = of_heads(tensors, rank, 2, layout) | ({"w_q": tensors["w_q"]} if whole_w_q else {})
        write(tmp_path, rank, held, layout, head_offset=2 * rank, extra={"world_size": "2"})
    merged = read(tmp_path)
    assert figures(merged) == figures([one_capture(tensors, layout)])
    (capture,), said = merged_over_ranks(merged)
    assert not said
    assert capture.assumed[-1] == "heads of ranks 0, 1 put together in this order"
    # The other way round the heads are others.
    swapped = [replace(c, metadata=replace(c.metadata, head_offset=2 - c.metadata.head_offset)) for c in merged]
    assert figures(swapped) != figures([one_capture(tensors, layout)])


def test_data_parallel_and_tensor_parallel_together(tmp_path: Path) -> None:
    tensors = whole_batch()
    for rank in range(4):
        held = of_heads(of_items(tensors, slice(0, 4) if rank < 2 else slice(4, 8)), rank % 2, 2, "BHTD")
        write(tmp_path, rank, held, head_offset=2 * (rank % 2))
    merged = read(tmp_path)
    assert figures(merged) == figures([one_capture(tensors)])


@dataclass
class Recorded:
    """A tensor of a rank that notes what is read of it."""

    source: TensorSource
    rank: int
    name: str
    reads: list[tuple[int, str, Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def __getitem__(self, index: Any) -> Tensor:
        self.reads.append((self.rank, self.name, index))
        return self.source[index]


def test_reading_stays_head_by_head(tmp_path: Path) -> None:
    tensors = whole_batch()
    reads: list[tuple[int, str, Any]] = []
    recorded = []
    for rank, path in enumerate(data_parallel(tmp_path, tensors)):
        file = load(path)
        sources = {name: Recorded(t, rank, name, reads) for name, t in file.tensors.items()}
        recorded.append(replace(file, tensors=sources))
    (merged,), _ = merged_over_ranks(recorded)
    # To merge, only what must be the same on all ranks is read, and one sequence of what must not.
    assert {name for _, name, _ in reads} == {"w_q", "x"}
    assert {index for _, name, index in reads if name == "x"} == {0}
    reads.clear()
    assert torch.equal(some(merged.read("o", 5, 3)), tensors["o"][5, 3])
    found = some(merged.mask(6, 1))
    assert torch.equal(found[0], tensors["mask"][6, :1][0])
    assert reads == [(2, "o", (1, 3)), (3, "mask", (0, 0))]


def test_joined_source_reads_as_the_joined_tensor() -> None:
    whole = torch.randn(5, 3, 4)
    joined = JoinedSource((whole[:2], whole[2:3], whole[3:]), 0)
    assert (joined.shape, joined.dtype) == ((5, 3, 4), torch.float32)
    for index in (..., 0, 2, 4, -1, (3,), (1, 2), (4, slice(1, 3)), slice(1, 4), (slice(None), 2), (..., 1)):
        assert torch.equal(joined[index], whole[index]), index
    with pytest.raises(IndexError, match="index 5 of axis 0 with 5 places"):
        joined[5]


def test_saved_merged_capture_is_the_whole_batch(tmp_path: Path) -> None:
    tensors = whole_batch()
    (merged,), _ = merged_over_ranks([load(path) for path in data_parallel(tmp_path, tensors)])
    again = load(merged.save(tmp_path / "whole.safetensors"))
    assert all(torch.equal(again.tensors[name][...], tensor) for name, tensor in tensors.items())
    assert (again.metadata.rank, again.metadata.extra["ranks"]) == (None, "0,1,2,3")
    # It is no longer a file of one rank.
    assert merged_over_ranks([again, again])[0] == [again, again]


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    tensors = whole_batch()
    paths = data_parallel(tmp_path, tensors)
    paths[1].unlink()
    captures = read(tmp_path)
    (merged,), said = merged_over_ranks(captures)
    assert merged.batch == 5
    assert said == [f"{paths[0]} (and ranks 2, 3): rank 1 of 4 missing; the others are used"]
    assert merged.assumed == ("batch items of ranks 0, 2, 3 put together in this order, rank 1 missing",)
    diagnosis = inspect_captures(captures, device="cpu")
    assert diagnosis.summary.warnings == tuple(said)
    assert "rank 1 of 4 missing" in diagnosis.report(width=300)
    (alone,), said = merged_over_ranks([captures[0]])
    assert (alone.assumed, said) == (("rank 0 alone, of 4",), [])


def cut_rows(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    short = {name: t[:, :, :30] for name, t in whole.items() if name not in ("x", "w_q", "mask")}
    return {**short, "x": whole["x"][:, :30], "w_q": whole["w_q"], "mask": whole["mask"][:, :, :30, :30]}


def without_delta(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in whole.items() if name != "delta"}


ODD: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any], str]] = {
    "length": (cut_rows, {}, "q has shape [2, 4, 30, 16], not [1, 4, 40, 16]"),
    "tensors": (without_delta, {}, "only rank 0 has delta"),
    "dtype": (lambda w: {**w, "lse": w["lse"].double()}, {}, "lse is torch.float64, not torch.float32"),
    "causal": (lambda w: w, {"causal": "top-left"}, "causal is top-left, not none"),
    "scale": (lambda w: w, {"scale": 0.5}, "scale is 0.5, not 0.25"),
}


@pytest.mark.parametrize(("change", "metadata", "why"), ODD.values(), ids=ODD)
def test_a_rank_that_differs_is_kept_apart(
    tmp_path: Path, change: Callable[..., dict[str, Tensor]], metadata: dict[str, Any], why: str
) -> None:
    tensors = whole_batch()
    data_parallel(tmp_path, tensors)
    path = write(tmp_path, 3, change(of_items(tensors, slice(6, 8))), **metadata)
    captures, said = merged_over_ranks(read(tmp_path))
    assert [c.batch for c in captures] == [6, 2]
    assert said == [f"{path}: not merged with ranks 0, 1, 2: {why}"]


def test_other_weights_are_not_merged(tmp_path: Path) -> None:
    tensors = whole_batch()
    data_parallel(tmp_path, tensors)
    write(tmp_path, 2, of_items(tensors, slice(4, 6)) | {"w_q": torch.ones_like(tensors["w_q"])})
    captures, (said,) = merged_over_ranks(read(tmp_path))
    assert len(captures) == 4
    assert "not merged: w_q of rank 2 differs from that of rank 0, though both say head_offset 0" in said


def test_a_missing_tensor_parallel_rank_in_the_middle(tmp_path: Path) -> None:
    tensors = whole_batch()
    for rank in (0, 3):
        held = of_heads({n: t for n, t in tensors.items() if n[0] != "w"}, 0, 2, "BHTD")
        write(tmp_path, rank, held, head_offset=2 * rank)
    captures, said = merged_over_ranks(read(tmp_path))
    assert len(captures) == 2
    assert "ranks 1, 2 of 4 missing" in said[0]
    assert "with 2 heads each start at heads 0, 6; expected 0, 2: a rank between them is missing" in said[1]


def test_tensor_parallel_ranks_with_other_sequences(tmp_path: Path) -> None:
    tensors = whole_batch()
    write(tmp_path, 0, of_heads(tensors, 0, 2, "BHTD"))
    write(tmp_path, 1, of_heads({**tensors, "x": tensors["x"].flip(0)}, 1, 2, "BHTD"), head_offset=2)
    captures, said = merged_over_ranks(read(tmp_path))
    assert len(captures) == 2
    assert "x differs between ranks that hold different heads of the same sequences" in said[-1]


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    captures = [load(path) for path in data_parallel(tmp_path, whole_batch())]
    results, (said,) = merged_over_ranks([*captures, captures[1]])
    assert len(results) == 5
    assert "not merged: several say rank 1" in said


@pytest.mark.parametrize("other", [{"extra": {"call": "1"}}, {"extra": {"module": "h.3.attn"}}, {"step": 501}])
def test_other_calls_are_not_merged(tmp_path: Path, other: dict[str, Any]) -> None:
    tensors = of_items(whole_batch(), slice(0, 2))
    write(tmp_path, 0, tensors)
    write(tmp_path, 1, tensors, **other)
    assert len(merged_over_ranks(read(tmp_path))[0]) == 2


def test_without_run_nothing_is_merged(tmp_path: Path) -> None:
    captures = [load(path) for path in data_parallel(tmp_path, whole_batch())]
    bare = [replace(c, metadata=replace(c.metadata, extra={"world_size": "4"})) for c in captures]
    assert merged_over_ranks(bare) == (bare, [])
    assert len(merged_over_ranks(captures)[0]) == 1


def test_masks_that_sequences_share(tmp_path: Path) -> None:
    tensors = {name: t for name, t in whole_batch().items() if name in ("q", "k", "v")}
    masks = [torch.rand(1, 1, T, T, generator=torch.Generator().manual_seed(s)) > 0.5 for s in (1, 2)]

    def merged(*of_rank: Tensor) -> tuple[list[Capture], list[str]]:
        for rank, (items, mask) in enumerate(zip((slice(0, 2), slice(2, 5)), of_rank, strict=True)):
            write(tmp_path, rank, of_items(tensors, items) | {"mask": mask}, extra={"world_size": "2"})
        return merged_over_ranks(read(tmp_path))

    (capture,), _ = merged(masks[0], masks[0])
    assert tuple(capture.tensors["mask"].shape) == (1, 1, T, T)
    (capture,), _ = merged(*masks)
    assert tuple(capture.tensors["mask"].shape) == (5, 1, T, T)
    for item in range(5):
        found = some(capture.mask(item, 3))
        assert torch.equal(found[0], masks[item >= 2][0, 0])
    captures, (said,) = merged(masks[0][0, 0], masks[1][0, 0])
    assert len(captures) == 2
    assert f"mask differs between the ranks and has no batch axis ([{T}, {T}])" in said


def test_what_each_rank_says_of_itself_is_kept(tmp_path: Path) -> None:
    tensors = whole_batch()
    for rank in range(2):
        items = slice(2 * rank, 2 * rank + 2)
        said: dict[str, Any] = {"device": f"GPU {rank}", "extra": {"batch_items": str(rank), "world_size": "2"}}
        write(tmp_path, rank, of_items(tensors, items), **said)
    (capture,), _ = merged_over_ranks(read(tmp_path))
    assert capture.metadata.device == "GPU 0, GPU 1"
    assert capture.metadata.extra["batch_items"] == "rank 0: 0; rank 1: 1"
    assert capture.metadata.extra["module"] == "h.2.attn"


def test_on_the_command_line(tmp_path: Path, run: Run) -> None:
    data_parallel(tmp_path, whole_batch())

    def captures(*options: str) -> list[dict[str, Any]]:
        done = run("inspect", tmp_path, "--json", "-", *options)
        assert not done.code
        found: list[dict[str, Any]] = json.loads(done.out)["captures"]
        return found

    (merged,) = captures()
    assert (merged["shape"]["B"], merged["metadata"]["ranks"]) == (B, "0,1,2,3")
    assert merged["source"].endswith("rank0.safetensors (and ranks 1, 2, 3)")
    assert [c["shape"]["B"] for c in captures("--no-merge-ranks")] == [1, 3, 2, 2]


def test_ranks_that_saw_the_same_sequences_are_not_put_together(tmp_path: Path) -> None:
    tensors = whole_batch()
    files = [load(path) for path in data_parallel(tmp_path, tensors)]
    first = files[0].tensors["x"][0]
    same = [replace(c, tensors={**c.tensors, "x": first.expand(c.batch, *first.shape).clone()}) for c in files]
    merged, complaints = merged_over_ranks(same)
    assert len(merged) == len(files)
    assert "state head_offset" in str(complaints)


@pytest.mark.parametrize(("item", "said"), [(0, "rank 0 alone: "), (3, "batch item 2 of rank 1 alone: ")])
def test_a_wrong_sequence_is_named_as_its_rank_counts(tmp_path: Path, item: int, said: str) -> None:
    tensors = whole_batch()
    tensors["dq"][item] *= 1.1
    data_parallel(tmp_path, tensors)
    found = inspect_captures(read(tmp_path), device="cpu")
    wrong = [q for _, _, h in found.entries() for q in h.quantities if q.answer == "wrong"]
    rank = {0: "0", 3: "1"}[item]
    assert [(q.quantity, q.ranks) for q in wrong] == [("dq", (rank,))] * HQ
    assert all(said in q.words for q in wrong)
    text = " ".join(found.report(100).split())
    assert f"on rank {rank} alone; not found in the same heads on ranks" in text
    assert "judge each rank by itself, which shows where and how: attn-diag inspect" in text
