"""Packed (varlen) sequences: documents one after the other along one axis, each a sequence of its own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import rounded_inputs, some, true_o
from safetensors import safe_open
from torch import Tensor

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.captures.stored import StoredFile
from attn_diag.errors import InputError
from attn_diag.head.other_documents import seen_in_out
from attn_diag.head.read import read_head
from attn_diag.head.shared import shared_rows
from attn_diag.reference import BoundCollector, reference_head
from attn_diag.reference.certify import check_rows

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LENGTHS = (24, 7, 40, 1)


def document(rows: int, seed: int, *, causal: bool = True, heads: int = 4, kv_heads: int = 2) -> dict[str, Tensor]:
    """One document's tensors, [1, H, rows, D], its outputs one rounding away from the truth."""
    given = rounded_inputs(heads, rows, kv_heads=kv_heads, seed=seed, causal=causal)
    q, k, v = (given[n].double().requires_grad_() for n in "qkv")
    gradients = torch.autograd.grad(true_o(q, k, v, causal=causal), (q, k, v), given["do"].double())
    scores = (q @ k.repeat_interleave(heads // kv_heads, 1).mT * q.shape[-1] ** -0.5).detach()
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    named = {n: g.bfloat16() for n, g in zip(("dq", "dk", "dv"), gradients, strict=True)}
    return given | named | {"lse": scores.logsumexp(-1).float()}


def documents(lengths: tuple[int, ...] = LENGTHS, **more: Any) -> list[dict[str, Tensor]]:
    return [document(rows, seed, **more) for seed, rows in enumerate(lengths)]


def borders(lengths: tuple[int, ...] | list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def packed(of: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The documents side by side, with their borders."""
    tensors = {n: torch.cat([d[n] for d in of], 2) for n in of[0]}
    return tensors | {"cu_seqlens_q": (ends := borders([d["q"].shape[2] for d in of])), "cu_seqlens_k": ends}


def tokens_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As flash_attn's varlen functions have them: [total, H, D], LSE [H, total]."""
    turned = {n: t[0].transpose(0, 1) if t.dim() == 4 else t[0] for n, t in tensors.items() if t.dim() > 1}
    return turned | {n: t for n, t in tensors.items() if t.dim() == 1}


def capture(tensors: dict[str, Tensor], **metadata: Any) -> Capture:
    return Capture.from_tensors(tensors, **{"causal": "top-left", **metadata})


def found(*captures: Capture, **more: Any) -> list[Any]:
    """The observations' diagnoses, capture by capture."""
    return [c.observations for c in attn_diag.inspect_captures(captures, device="cpu", **more).captures]


@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_a_document_is_read_as_if_it_were_alone(causal: str) -> None:
    of = documents(causal=causal != "none")
    whole = packed(of)
    layouts = {
        "BHTD": capture(whole, causal=causal),
        "BTHD": capture({n: t.transpose(1, 2) if t.dim() == 4 else t for n, t in whole.items()},
                        causal=causal, layout="BTHD"),
        "THD": capture(tokens_first(whole), causal=causal),
    }  # fmt: skip
    for name, c in layouts.items():
        assert (c.batch, c.q_length, c.k_length) == (4, 40, 40), name
        assert [c.lengths(b) for b in range(4)] == [(n, n) for n in LENGTHS]
        for b, own in enumerate(of):
            alone = capture(own, causal=causal)
            for head in range(4):
                for n in ("q", "do", "o", "dq", "lse"):
                    assert torch.equal(some(c.read(n, b, head)), some(alone.read(n, 0, head))), (name, n)
                for n in ("k", "v", "dk", "dv"):
                    assert torch.equal(some(c.read(n, b, head // 2)), some(alone.read(n, 0, head // 2))), (name, n)
                one, other = (reference_head(read_head(x, i, head, CPU).head) for x, i in ((c, b), (alone, 0)))
                for n in ("out", "lse", "delta", "dq", "dk", "dv"):
                    assert torch.equal(some(getattr(one, n)), some(getattr(other, n)))


def test_the_reference_of_a_document_is_the_oracles() -> None:
    c = capture(packed(documents()))
    for batch in range(c.batch):
        inputs = read_head(c, batch, 3, CPU)
        bounds = BoundCollector(inputs.head)
        reference = reference_head(inputs.head, bounds.add, key_gradients=False, gradient_sums=True)
        rows = [0, c.lengths(batch)[0] - 1]
        assert all(row.held for row in check_rows(inputs.head, reference, bounds.bounds(reference), rows))
    certified = attn_diag.inspect_captures([c], device="cpu", certify=attn_diag.Certify(count=8))
    assert all(some(h.certificate).held for h in certified.captures[0].observations[0].heads)


def test_lengths_of_keys_of_their_own() -> None:
    """Of each document the last queries alone, under either alignment."""
    of, kept = documents((9, 16, 5)), (3, 16, 2)
    for causal, rows in (("bottom-right", slice(-1, None, None)), ("top-left", slice(0, None))):
        cut = [{n: t[:, :, t.shape[2] - k :] if causal == "bottom-right" and n in ("q", "do", "o", "dq", "lse")
                else t[:, :, :k] if n in ("q", "do", "o", "dq", "lse") else t for n, t in d.items()}
               for d, k in zip(of, kept, strict=True)]  # fmt: skip
        tensors = {n: torch.cat([d[n] for d in cut], 2) for n in ("q", "k", "v", "do", "o", "dq", "lse")}
        tensors |= {"cu_seqlens_q": borders(kept), "cu_seqlens_k": borders((9, 16, 5))}
        c = capture(tensors, causal=causal)
        assert [c.lengths(b) for b in range(3)] == [(3, 9), (16, 16), (2, 5)], rows
        assert all(o.heads[0].verdict.labels == ("clean",) or "wrong" not in o.heads[0].verdict.labels
                   for o in found(c)[0])  # fmt: skip
        assumed = attn_diag.inspect_captures([c], device="cpu").captures[0].assumptions
        assert assumed.ok
    # Under the other alignment O does not fit.
    other = replace(c, metadata=replace(c.metadata, causal="bottom-right"))
    assert attn_diag.inspect_captures([other], device="cpu").captures[0].assumptions.ok is False


def test_packed_documents_of_one_length_are_the_batch_itself() -> None:
    of = documents((24,) * 9)
    batch = capture({n: torch.cat([d[n] for d in of]) for n in of[0]})
    both = [attn_diag.inspect_captures([c], device="cpu", details=2) for c in (batch, capture(packed(of)))]
    one, other = (b.captures[0] for b in both)
    assert one.observations == other.observations
    assert (one.assumptions, one.shape, one.nonfinite) == (other.assumptions, other.shape, other.nonfinite)
    assert other.metadata["documents"] == "9 of 24 rows"
    assert "documents: 9 of 24 rows; Hq=4 Hk=2 T=24" in both[1].report()


def test_documents_of_several_lengths_are_each_what_they_are_alone() -> None:
    of = documents((24, 17, 40, 33))
    whole = capture(packed(of))
    (apart,) = found(whole)
    for b, own in enumerate(of):
        (alone,) = found(capture(own))
        selected = attn_diag.inspect_captures(
            [whole], device="cpu", selection=attn_diag.Selection(batches=frozenset({b}))
        )
        here = selected.captures[0].observations
        for mine, its in zip(here[0].heads, alone[0].heads, strict=True):
            assert _anywhere(mine) == _anywhere(its)
    assert apart[0].heads[0].rows_all == 24 + 17 + 40 + 33
    (turned,) = found(capture(tokens_first(packed(of))))
    assert turned == apart


def _anywhere(head: Any) -> Any:
    """What was found of a head, without the number of its sequence."""
    quantities = tuple(replace(q, largest_at=q.largest_at and q.largest_at[1:]) for q in head.quantities)
    rows = tuple(replace(row, batch=0) for row in head.top_rows)
    figures = head.figures
    if figures is not None:
        figures = replace(figures, rows=replace(figures.rows, batch=(0,) * len(figures.rows.batch)))
    return replace(head, batch=None, top_rows=rows, quantities=quantities, figures=figures)


def test_copies_among_documents_and_prompts_that_they_share_count_once() -> None:
    of = documents((24, 40, 24, 30))
    of[2] = of[0]
    for n in ("q", "k", "v"):
        of[3][n][:, :, :10] = of[1][n][:, :, :10]
    c = capture({n: t for n, t in packed(of).items() if n in ("q", "k", "v", "cu_seqlens_q")})
    shared = shared_rows(c, range(4), head=2)
    assert [int(shared[b].repeated.sum()) for b in range(4)] == [0, 0, 24, 10]
    assert (shared[2].source, shared[3].source) == (0, 1)
    assert shared[2].keys.tolist() == list(range(24))
    assert shared[3].keys.tolist() == [*range(40, 50), *range(130, 150)]
    of = documents((24, 40, 24, 30))
    of[2] = of[0]
    (o,) = found(capture(packed(of)))
    assert any("2 of 4 sequences are copies" in reason for reason in some(o[0].heads[0].verdict).reasons)


def test_dw_q_of_documents_is_that_of_the_batch() -> None:
    of = documents((24,) * 3)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(64, 32, generator=generator).bfloat16()
    for d in of:
        d["x"] = torch.randn(1, 24, 32, generator=generator).bfloat16()
        d["q"] = (d["x"].double() @ w.double().T / 6).bfloat16().view(1, 24, 4, 16).transpose(1, 2)
        q, k, v = (d[n].double().requires_grad_() for n in "qkv")
        d["o"] = (o := true_o(q, k, v)).bfloat16()
        d["dq"] = torch.autograd.grad(o, q, d["do"].double())[0].bfloat16()
        for n in ("dk", "dv", "lse"):
            del d[n]
    x = torch.cat([d.pop("x") for d in of])
    w_q = (w.double() / 6).bfloat16()
    batch = capture({n: torch.cat([d[n] for d in of]) for n in of[0]} | {"x": x, "w_q": w_q})
    row = capture(tokens_first(packed(of)) | {"x": x.reshape(72, 32), "w_q": w_q})
    assert found(batch) == found(row)
    assert found(row)[0][0].heads[0].propagation.dw_q is not None


def test_masks_scales_and_positions_are_each_documents_own() -> None:
    lengths = (5, 9)
    of = documents(lengths, causal=False)
    whole = {n: t for n, t in packed(of).items() if n not in ("o", "lse", "dq", "dk", "dv")}
    mask = torch.randn(4, 14, 14, generator=torch.Generator().manual_seed(1)) > 0
    keys = torch.arange(14) % 3 > 0
    factors = torch.rand(2, 4, generator=torch.Generator().manual_seed(2)) + 0.5
    eighths = {n: whole[n].to(torch.float8_e4m3fn) for n in "qkv"}
    more = {"q_descale": factors, "k_descale": factors[:, :2], "v_descale": torch.tensor(2.0)}
    c = capture(whole | eighths | more | {"mask": mask, "q_positions": torch.cat([torch.arange(5), torch.arange(9)])})
    start = 0
    for b, n in enumerate(lengths):
        part = slice(start, start + n)
        assert torch.equal(some(c.mask(b, 3))[0], mask[3, part, part])
        assert c.descale("q", b, 1) == float(factors[b, 1])
        assert some(c.q_positions(b)).tolist() == list(range(n))
        shared = replace(c, tensors={**c.tensors, "mask": keys[None, :]})
        assert torch.equal(some(shared.mask(b, 3))[0], keys[None, part])
        start += n


def test_identify_attribute_what_if_and_microscope_take_documents_apart() -> None:
    of = documents((64, 96))
    whole, alone = capture(packed(of)), capture(of[1])
    for function in (attn_diag.identify, attn_diag.microscope):
        mine, its = (function(c, device="cpu", batch=b).to_dict() for c, b in ((whole, 1), (alone, 0)))
        for d in (mine, its):
            d.pop("batch", None)
            d.get("shape", {}).pop("B", None)
        assert mine == its
    attributions = [
        attn_diag.attribute(c, device="cpu", selection=attn_diag.Selection(batches=frozenset({b})))
        for c, b in ((whole, 1), (alone, 0))
    ]
    assert [replace(h, batch=None) for h in attributions[0].heads] == list(attributions[1].heads)
    changes = [attn_diag.what_if(c, device="cpu", batch=b, only=["stochastic-o"]) for c, b in ((whole, 1), (alone, 0))]
    assert [c.candidates for c in changes[:1]] == [c.candidates for c in changes[1:]]


def test_the_python_door() -> None:
    of = documents()
    whole = packed(of)
    expected = found(capture(whole))
    q, k, v, *_ = (tokens_first(whole)[n] for n in ("q", "k", "v"))
    rest: dict[str, Any] = {n: t for n, t in tokens_first(whole).items() if n not in ("q", "k", "v")}
    ends = rest.pop("cu_seqlens_k")
    assert [c.observations for c in attn_diag.inspect(q, k, v, causal=True, device="cpu", **rest).captures] == expected
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    del rest["cu_seqlens_q"]
    for given in (positions, positions[None], positions.numpy().astype(np.int32)):
        by_position = attn_diag.inspect(q, k, v, causal=True, position_ids=given, device="cpu", **rest)
        assert [c.observations for c in by_position.captures] == expected
    with pytest.raises(InputError, match="causal=True is ambiguous"):
        attn_diag.inspect(q, k, v, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends // 2, device="cpu", **rest)


@pytest.mark.parametrize("kind", ["safetensors", "pt", "npz"])
def test_files(kind: str, tmp_path: Path) -> None:
    whole = packed(documents())
    c, path = capture(whole), tmp_path / f"a.{kind}"
    if kind == "safetensors":
        c.save(path)
        with safe_open(path, "pt") as file:
            assert file.metadata()["format_version"] == "1.1"
    elif kind == "pt":
        torch.save({**whole, "causal": "top-left"}, path)
    else:
        wide: dict[str, Any] = {n: t.float().numpy() if t.is_floating_point() else t.numpy() for n, t in whole.items()}
        np.savez(path, causal="top-left", **wide)
        c = capture({n: t.float() if t.is_floating_point() else t for n, t in whole.items()})
    opened = load(path)
    assert opened.documents == c.documents
    assert [opened.observations, found(opened)] == [c.observations, found(c)]


def test_a_file_without_documents_stays_version_1(tmp_path: Path) -> None:
    own = document(24, 0)
    path = capture(own).save(tmp_path / "a.safetensors")
    with safe_open(path, "pt") as file:
        assert file.metadata()["format_version"] == "1"
    assert load(path).documents is None


def test_only_the_rows_of_a_document_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, counts, before = packed(documents()), list[int](), StoredFile.read

    def read(file: StoredFile, start: int, count: int) -> Tensor:
        counts.append(count)
        return before(file, start, count)

    for layout, tensors, heads in (("BHTD", whole, 1), ("BTHD", tokens_first(whole), 4)):
        c = load(capture(tensors).save(tmp_path / f"{layout}.safetensors"))
        with monkeypatch.context() as counted:
            counted.setattr(StoredFile, "read", read)
            assert torch.equal(some(c.read("q", 1, 2)), whole["q"][0, 2, 24:31])
        assert sum(counts) == 7 * heads * 16 * 2
        counts.clear()


def test_empty_documents_and_padding_are_left_out_and_told() -> None:
    whole = packed(documents((9, 12)))
    padded = {n: torch.cat([t, t[:, :, :3] * torch.nan], 2) for n, t in whole.items() if t.dim() > 2}
    ends = torch.tensor([0, 0, 9, 9, 21, 21, 21])
    c = capture({**padded, "cu_seqlens": ends})
    assert c.batch == 2
    assert c.assumed == (
        "4 of 6 documents are empty and left out (number 0, 2, 4, 5)",
        "3 query rows after the last document are padding, left out",
        "3 keys after the last document are padding, left out",
    )
    assert found(c) == found(capture(whole))
    assert replace(c, source="again").assumed == c.assumed


WRONG: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "floats": ({"cu_seqlens": torch.tensor([0.0, 21.0])}, "cu_seqlens_q must be integers, got float32"),
    "lengths": ({"cu_seqlens": torch.tensor([9, 12])}, "cu_seqlens_q must begin with 0, got [9, 12]"),
    "order": ({"cu_seqlens": torch.tensor([0, 12, 9, 21])}, "cu_seqlens_q must not decrease, got [0, 12, 9, 21]"),
    "beyond": ({"cu_seqlens": torch.tensor([0, 9, 22])}, "cu_seqlens_q ends at 22, but there are 21 query rows"),
    "keys": (
        {"cu_seqlens_q": torch.tensor([0, 9, 21]), "cu_seqlens_k": torch.tensor([0, 9, 22])},
        "cu_seqlens_k ends at 22, but there are 21 keys",
    ),
    "as many": (
        {"cu_seqlens_q": torch.tensor([0, 9, 21]), "cu_seqlens_k": torch.tensor([0, 21])},
        "cu_seqlens_q has 2 documents and cu_seqlens_k has 1; expected as many",
    ),
    "no q": ({"cu_seqlens_k": torch.tensor([0, 21])}, "cu_seqlens_q is missing"),
    "axes": ({"cu_seqlens": torch.tensor([[0, 9, 21]])}, "cu_seqlens_q must have shape [documents + 1], got [1, 3]"),
    "empty": ({"cu_seqlens": torch.tensor([0, 0, 0])}, "no document has query rows and keys"),
    "positions": (
        {"position_ids": torch.tensor([0, 1, 2, 0, *range(5, 22)])},
        "position_ids must count 0, 1, 2, … and begin again at 0 with every document, got [0, 1, 2, 0, 5, ",
    ),
    "other lengths": ({"cu_seqlens": torch.tensor([0, 21]), "o": torch.ones(1, 4, 20, 16)}, "o must have shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_borders_that_cannot_be(case: str) -> None:
    changes, message = WRONG[case]
    tensors = {n: t for n, t in packed(documents((9, 12))).items() if not n.startswith("cu_")}
    with pytest.raises(InputError) as refused:
        capture({**tensors, **changes})  # type: ignore[dict-item]
    assert message in str(refused.value)


def test_a_batch_with_borders_is_refused() -> None:
    two = {n: torch.cat([t, t]) for n, t in document(9, 0).items()}
    with pytest.raises(InputError, match="of a batch of 1, got q \\[2, 4, 9, 16\\]"):
        capture({**two, "cu_seqlens": torch.tensor([0, 9])})


@pytest.mark.parametrize("how", ["list", "metadata"])
def test_borders_that_are_no_tensor_are_refused(how: str, tmp_path: Path) -> None:
    extra: Any = {"list": {"cu_seqlens": [0, 9]}, "metadata": {"metadata": {"cu_seqlens": "0,9"}}}[how]
    torch.save({**document(9, 0), **extra}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="'cu_seqlens': expected a tensor of integers"):
        load(tmp_path / "a.pt")


def test_position_ids_that_do_not_restart_change_nothing() -> None:
    own = document(9, 0)
    for positions in (torch.arange(9), torch.arange(9)[None] + 4):
        assert capture({**own, "position_ids": positions}).documents is None


def ranked(of: list[dict[str, Tensor]], rank: int, **more: Any) -> Capture:
    extra = {"run": "r", "world_size": "2", "call": "0"}
    metadata = {"rank": rank, "layer": 0, "step": 1, "extra": extra, **more}
    return capture(packed(of), **metadata)


def test_data_parallel_ranks_are_put_one_after_the_other() -> None:
    of = documents((24, 7, 40, 12, 30))
    merged, said = merged_over_ranks([ranked(of[:3], 0), ranked(of[3:], 1)])
    assert not said
    assert len(merged) == 1
    assert merged[0].metadata.extra["rank_of_items"] == "0,0,0,1,1"
    (mine,), (whole,) = found(merged[0]), found(capture(packed(of), layer=0, step=1))
    assert replace(mine[0], heads=()) == replace(whole[0], heads=())
    for one, other in zip(mine[0].heads, whole[0].heads, strict=True):
        assert (one.bias, one.propagation.dq) == (other.bias, other.propagation.dq)


def test_padding_between_ranks_is_not_merged() -> None:
    of = documents((24, 7, 40))
    first = ranked(of[:2], 0)
    ends = torch.tensor([0, 24, 30])
    first = replace(first, tensors={**first.tensors, "cu_seqlens_q": ends, "cu_seqlens_k": ends})
    merged, said = merged_over_ranks([first, ranked(of[2:], 1)])
    assert len(merged) == 2
    assert "cu_seqlens_q: padding behind a rank's last document" in said[0]


def test_tensor_parallel_ranks_are_put_side_by_side() -> None:
    of = documents((24, 7), kv_heads=4)
    halves = [[{n: t[:, r * 2 : r * 2 + 2] for n, t in d.items()} for d in of] for r in range(2)]
    merged, said = merged_over_ranks([ranked(half, r, head_offset=2 * r) for r, half in enumerate(halves)])
    assert not said
    (mine,), (whole,) = found(merged[0]), found(capture(packed(of), layer=0, step=1))
    assert [h.bias for h in mine[0].heads] == [h.bias for h in whole[0].heads]
    other = replace(ranked(halves[1], 1, head_offset=2), tensors={**ranked(halves[1], 1, head_offset=2).tensors,
                    "cu_seqlens_q": borders((25, 6)), "cu_seqlens_k": borders((25, 6))})  # fmt: skip
    merged, said = merged_over_ranks([ranked(halves[0], 0), other])
    assert len(merged) == 2
    assert "cu_seqlens_k differs" in said[0] or "cu_seqlens_q differs" in said[0]


def computed(inputs: dict[str, Tensor], lengths: list[int], *, causal: bool) -> dict[str, Tensor]:
    """O and LSE of a kernel that sees documents of these lengths, one rounding away from the truth."""
    parts = []
    for q, k, v in zip(*(torch.split(inputs[n].double(), lengths, 2) for n in "qkv"), strict=True):
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        parts.append((true_o(q, k, v, causal=causal).bfloat16(), scores.logsumexp(-1).float()))
    return {n: torch.cat(of, 2) for n, of in zip(("o", "lse"), zip(*parts, strict=True), strict=True)}


def drawn(seed: int, total: int = 128) -> tuple[random.Random, list[int]]:
    """Lengths of three to five documents."""
    numbers = random.Random(seed)
    ends = [0, *sorted(numbers.sample(range(8, total, 8), numbers.randint(2, 4))), total]
    return numbers, [stop - start for start, stop in pairwise(ends)]


def off_by_one(seed: int) -> list[int]:
    numbers, lengths = drawn(seed)
    border, by = numbers.randrange(len(lengths) - 1), numbers.choice((-1, 1))
    lengths[border] += by
    lengths[border + 1] -= by
    return lengths


# The lengths that the kernel sees, and what is said of the worst document's O and of O as a whole.
FAULTS: dict[str, tuple[Callable[[int], list[int]], str, str]] = {
    "healthy": (lambda seed: drawn(seed)[1], "", "hold"),
    "merged": (lambda _: [128], "documents merged", "documents merged: O fits one sequence of all documents"),
    "border": (off_by_one, "border off by one|border is off by one", ""),
    "another batch": (lambda seed: drawn(seed + 1000)[1], "other borders|off by one|documents merged", ""),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_wrong_by_name(fault: str, causal: bool) -> None:
    """More seeds: benchmarks/study_layout_faults.py."""
    lengths, named, said = FAULTS[fault]
    for seed in range(4):
        inputs = {n: t for n, t in rounded_inputs(1, 128, seed=seed).items() if n in ("q", "k", "v")}
        outputs = computed(inputs, lengths(seed), causal=causal)
        c = capture(
            {**inputs, **outputs, "cu_seqlens": borders(drawn(seed)[1])}, causal="top-left" if causal else "none"
        )
        diagnosis = attn_diag.inspect_captures([c], device="cpu").captures[0]
        head = diagnosis.observations[0].heads[0]
        assert said in diagnosis.assumptions.message
        assert ("wrong" in some(head.verdict).labels) == (fault != "healthy")
        patterns = [p.words for q in head.quantities for p in q.patterns if p.kind == "documents"]
        if fault == "healthy":
            assert not patterns
        else:
            assert any(re.search(named, words) for words in patterns), patterns


def test_gradients_of_merged_documents_are_named() -> None:
    """Merged in the backward alone."""
    of = documents((30, 20, 46))
    whole = packed(of)
    other = documents((96,))[0] | {n: whole[n] for n in ("q", "k", "v", "do")}
    q, k, v = (other[n].double().requires_grad_() for n in "qkv")
    dq = torch.autograd.grad(true_o(q, k, v), q, other["do"].double())[0].bfloat16()
    (o,) = found(capture({**{n: t for n, t in whole.items() if n not in ("dk", "dv")}, "dq": dq}))
    verdicts = {q.quantity: q for q in o[0].heads[0].quantities}
    assert (verdicts["o"].answer, verdicts["dq"].answer) == ("good", "wrong")
    assert "documents merged" in verdicts["dq"].words


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_borders_are_read_off_o_without_a_causal_mask(softcap: float | None) -> None:
    inputs = {n: t for n, t in rounded_inputs(4, 160, seed=3, kv_heads=2).items() if n in ("q", "k", "v")}
    parts = []
    for q, k, v in zip(*(torch.split(inputs[n].double(), [17, 1, 90, 52], 2) for n in "qkv"), strict=True):
        scores = q @ k.repeat_interleave(2, 1).mT * q.shape[-1] ** -0.5
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        parts.append((scores.softmax(-1) @ v.repeat_interleave(2, 1)).bfloat16())
    given = {**inputs, "o": torch.cat(parts, 2), "cu_seqlens": borders([40, 60, 60])}
    seen = seen_in_out(capture(given, causal="none", softcap=softcap), "observed")
    assert [d.rows.start for d in some(seen).documents] == [0, 17, 18, 108]
    # One row that fits no documents, and nothing is read.
    broken = {**given, "o": given["o"].clone()}
    broken["o"][:, :, 18] *= 1.5
    assert seen_in_out(capture(broken, causal="none", softcap=softcap), "observed") is None
