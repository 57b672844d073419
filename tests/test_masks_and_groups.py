"""Of one head among several: whose mask it has, and whose parts its key head's gradients hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import some
from command_line import Run
from torch import Tensor

import attn_diag
from attn_diag.reports.opening import next_command
from attn_diag.results.quality import QuantityVerdict

ROWS, WIDTH = 40, 16
SCALE = WIDTH**-0.5


def given(*heads: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, n, ROWS, WIDTH, generator=generator).bfloat16() for n in heads]


def of(found: attn_diag.Diagnosis, head: int) -> dict[str, QuantityVerdict]:
    one = found.captures[0].observations[0].heads
    picked = next(h for h in one if h.head == head)
    some(picked.verdict)
    return {q.quantity: q for q in picked.quantities}


def test_a_mask_whose_true_hides_is_named() -> None:
    """As nn.MultiheadAttention has it: True is not attended to."""
    q, k, v = given(3, 3, 3)
    hides = torch.rand(1, 3, ROWS, ROWS, generator=torch.Generator().manual_seed(7)) > 0.6
    probs = (q.double() @ k.double().mT * SCALE).masked_fill(hides, -torch.inf).softmax(-1)
    found = attn_diag.inspect(q, k, v, o=(probs @ v.double()).bfloat16(), mask=hides, device="cpu")
    assert all("the mask with True and False exchanged" in of(found, h)["o"].words for h in range(3))


@pytest.mark.parametrize("size", [1.0, 0.01])
def test_a_mask_that_is_added_to_the_probabilities_is_named(size: float) -> None:
    """Small random numbers there look like dropout, which was said to be no fault."""
    q, k, v = given(3, 3, 3)
    mask = size * torch.randn(1, 3, ROWS, ROWS, generator=torch.Generator().manual_seed(7))
    mask[..., 33:] = -torch.inf
    bare = torch.zeros_like(mask).masked_fill(mask == -torch.inf, -torch.inf)
    probs = (q.double() @ k.double().mT * SCALE + bare).softmax(-1) + mask.masked_fill(mask == -torch.inf, 0.0)
    found = attn_diag.inspect(q, k, v, o=(probs @ v.double()).bfloat16(), mask=mask, device="cpu")
    assert all("the mask gives that is added to P, behind the softmax" in of(found, h)["o"].words for h in range(3))


def test_biases_by_distance_that_are_added_to_the_probabilities_are_named() -> None:
    q, k, v = given(3, 3, 3)
    slopes, at = torch.tensor([0.25, 0.0625, 0.015625]), torch.arange(ROWS)
    bias = slopes[:, None, None].double() * (at[None] - at[:, None])
    hidden = torch.ones(ROWS, ROWS).triu(1).bool()
    probs = (q.double() @ k.double().mT * SCALE).masked_fill(hidden, -torch.inf).softmax(-1)
    o = ((probs + bias.masked_fill(hidden, 0.0)) @ v.double()).bfloat16()
    found = attn_diag.inspect(q, k, v, o=o, alibi_slopes=slopes, causal=True, device="cpu")
    assert all("ALiBi's bias gives that is added to P, behind the softmax" in of(found, h)["o"].words for h in range(3))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda m: m.roll(-1, 1), "the mask of head 0"),
        (lambda m: m.flip(3), "the mask with its keys in reverse"),
        (lambda m: m * SCALE, "the mask multiplied by the scale"),
        (lambda m: -m, "the mask of the wrong sign"),
    ],
    ids=["another head", "reversed", "scaled", "sign"],
)
def test_the_mask_that_a_head_had_is_named(fault: Callable[[Tensor], Tensor], words: str) -> None:
    q, k, v = given(3, 3, 3)
    mask = torch.randn(1, 3, ROWS, ROWS, generator=torch.Generator().manual_seed(7))
    wrong = mask.clone()
    wrong[:, 2] = fault(mask)[:, 2]
    probs = (q.double() @ k.double().mT * SCALE + wrong).softmax(-1)
    found = attn_diag.inspect(q, k, v, o=(probs @ v.double()).bfloat16(), mask=mask, device="cpu")
    assert [of(found, h)["o"].answer for h in range(3)] == ["good", "good", "wrong"]
    assert f"are what {words} gives" in of(found, 2)["o"].words


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 2, 1, 3), "hold the parts of head 0 and head 2, not of head 0 and head 1"),
        ((2, 3, 0, 1), "hold what belongs in key head 1, not in key head 0 (head 0 and head 1)"),
        ((0, 1, 2, 3), None),
    ],
    ids=["mixed", "swapped", "right"],
)
def test_query_heads_summed_into_another_key_head_are_named(order: tuple[int, ...], words: str | None) -> None:
    q, k, v, do = given(4, 2, 2, 4)
    x, y = (t.double().repeat_interleave(2, 1) for t in (k, v))
    probs = (q.double() @ x.mT * SCALE).softmax(-1).bfloat16().double()
    o = (probs @ y).bfloat16()
    ds = probs * (do.double() @ y.mT - (do.double() * o.double()).sum(-1, keepdim=True))
    dk, dv = (
        t.bfloat16()[:, list(order)].double()
        for t in (ds.bfloat16().double().mT @ q.double() * SCALE, probs.mT @ do.double())
    )
    grads = {n: t.unflatten(1, (2, 2)).sum(2).bfloat16() for n, t in (("dk", dk), ("dv", dv))}
    found = of(attn_diag.inspect(q, k, v, o=o, do=do, device="cpu", **grads), 0)
    for name in ("dk", "dv"):
        assert (found[name].answer == "wrong") == (words is not None)
        assert words is None or words in found[name].words


def test_a_tile_that_one_head_of_a_group_lost_is_named() -> None:
    """It is spread over all keys, and was lossy: "something is rounded more coarsely"."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, n, 96, WIDTH, generator=generator).bfloat16() for n in (4, 2, 2, 4))
    probs = (q.double() @ k.repeat_interleave(2, 1).double().mT * SCALE).softmax(-1)
    o = (probs @ v.repeat_interleave(2, 1).double()).bfloat16()
    lost = probs.bfloat16().double()
    lost[:, 1, 80:] = 0
    dv = (lost.mT @ do.double()).unflatten(1, (2, 2)).sum(2)
    found = attn_diag.inspect(q, k, v, o=o, do=do, dv=dv.bfloat16(), device="cpu")
    assert [of(found, h)["dv"].answer for h in range(4)] == ["wrong", "wrong", "good", "good"]
    assert "all keys miss query rows 80-95 of head 1" in of(found, 0)["dv"].words


@pytest.mark.parametrize(("side", "words"), [(0, "left"), (1, "right")])
def test_one_side_of_a_window_that_is_ignored_is_named(side: int, words: str) -> None:
    q, k, v = given(2, 2, 2)
    ahead = torch.arange(ROWS)[None, :] - torch.arange(ROWS)[:, None]
    hidden = (ahead > 6) if side == 0 else (ahead < -6)
    o = (q.double() @ k.double().mT * SCALE).masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
    o[:, 0] = (q.double() @ k.double().mT * SCALE).masked_fill(ahead.abs() > 6, -torch.inf).softmax(-1)[:, 0] @ v[
        :, 0
    ].double()
    found = attn_diag.inspect(q, k, v, o=o.bfloat16(), window=(6, 6), device="cpu")
    assert f"are what a window without its {words} border gives" in of(found, 1)["o"].words


def test_the_last_keys_that_a_load_cuts_off_are_named() -> None:
    q, k, v = given(2, 2, 2)
    cut = v.clone()
    cut[:, :, 37:] = 0
    o = (q.double() @ k.double().mT * SCALE).softmax(-1) @ cut.double()
    found = attn_diag.inspect(q, k, v, o=o.bfloat16(), device="cpu")
    assert "all rows miss keys 37-39 in P V, though not in the row sum" in of(found, 1)["o"].words


def test_zeros_that_fill_a_tile_are_told_beside_the_sink_that_they_look_like() -> None:
    q, k, v = given(2, 2, 2)
    filled = [torch.cat([t, torch.zeros(1, 2, 24, WIDTH)], 2).double() for t in (k, v)]
    o = (q.double() @ filled[0].mT * SCALE).softmax(-1) @ filled[1]
    found = attn_diag.inspect(q, k, v, o=o.bfloat16(), device="cpu")
    for words in (of(found, 1)["o"].words, found.captures[0].assumptions.message):
        assert "(or 24 keys of zeros that fill a tile of 32 and are not masked)" in words


def test_features_that_the_scores_leave_out_are_named() -> None:
    """As a tutorial's kernel of 64 features does, called with 128, or MLA's without the rotated part."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, ROWS, 48, generator=generator).bfloat16() for _ in range(3))
    scores = q[..., :32].double() @ k[..., :32].double().mT / 48**0.5
    o, lse = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    found = attn_diag.inspect(q, k, v, o=o.bfloat16(), lse=lse.float(), device="cpu")
    for name in ("o", "lse"):
        assert "what a Q Kᵀ of the first 32 features alone gives" in of(found, 1)[name].words


def test_the_next_command_reads_all_heads_of_a_group_whose_dv_is_wrong(tmp_path: Path, run: Run) -> None:
    """With one of them dV is not judged, and the page said that nothing was found."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, n, ROWS, WIDTH, generator=generator).bfloat16() for n in (4, 2, 2, 4))
    probs = (q.double() @ k.repeat_interleave(2, 1).double().mT * SCALE).softmax(-1)
    o = (probs @ v.repeat_interleave(2, 1).double()).bfloat16()
    dv = (probs.mT @ do.double()).unflatten(1, (2, 2)).sum(2)
    dv[:, 1] = 0
    file = tmp_path / "one.safetensors"
    given = {"q": q, "k": k, "v": v, "do": do, "o": o, "dv": dv.bfloat16()}
    attn_diag.Capture.from_tensors(given, head_offset=4).save(file)
    found = attn_diag.inspect_captures([attn_diag.load(file)], device="cpu")
    said = next_command(found).said
    assert said.endswith("one.safetensors --head 6-7 --html page.html")
    assert run("inspect", file, "--head", "6-7", "--fail-on", "wrong").code == 1


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "key head"])
def test_a_sum_with_a_wrong_head_is_not_put_down_to_the_right_one(forward: bool) -> None:
    """O of head 0 is 5 % too large, and dK and dV follow; a dV that alone is wrong is both heads'."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, n, 96, WIDTH, generator=generator).bfloat16() for n in (4, 2, 2, 4))
    x, y = (t.double().repeat_interleave(2, 1) for t in (k, v))
    probs = (q.double() @ x.mT * SCALE).softmax(-1)
    size = torch.tensor([1.05 if forward else 1.0, 1.0, 1.0, 1.0])[:, None, None].double()
    o = (probs @ y * size).bfloat16()
    given_do = do.double() * size
    ds = (probs * (given_do @ y.mT - (do.double() * o.double()).sum(-1, keepdim=True))).bfloat16().double()
    dq, dk, dv = ds @ x * SCALE, ds.mT @ q.double() * SCALE, probs.bfloat16().double().mT @ given_do
    dk, dv = (t.unflatten(1, (2, 2)).sum(2).bfloat16() for t in (dk, dv))
    dv[:, 0] *= 1.0 if forward else 1.05
    diagnosis = attn_diag.inspect(q, k, v, o=o, do=do, dq=dq.bfloat16(), dk=dk, dv=dv, device="cpu")
    labels = [one.verdict.labels for one in diagnosis.heads if one.verdict is not None]
    assert labels[0] == ("wrong",)
    assert ("wrong" in labels[1]) is not forward
    assert not {"wrong", "lossy"} & {*labels[2], *labels[3]}
    beside = of(diagnosis, 1)["dv"]
    assert beside.answer == ("stated" if forward else "wrong"), beside.words
    assert not forward or "a sum with head 0, at fault in O and dQ: O and dQ of this head are right" in beside.words
