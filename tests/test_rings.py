"""What mismatch says of rings whose captures hold the hops: merges and sums in narrow formats, and hops that err."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import attn_diag
from attn_diag.analyses.mismatch.rings import ring_merges, with_rings
from attn_diag.captures.capture import Capture
from attn_diag.captures.hops import hop_keys
from attn_diag.errors import InputError

RANKS, LENGTH, HEADS, DIM = 4, 96, 2, 32
ROWS = LENGTH // RANKS
Cast = Callable[[Tensor], Tensor]


def same(t: Tensor) -> Tensor:
    return t


def low(t: Tensor) -> Tensor:
    return t.bfloat16().float()


def given(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, LENGTH, DIM, generator=generator).bfloat16() for _ in range(4)]


def repeated(seed: int = 0) -> list[Tensor]:
    """Keys and values of one token: dS is the difference of two numbers that are the same."""
    q, k, v, do = ordinary(seed)
    return [q, k[:, :, :1].expand_as(k).contiguous(), v[:, :, :1].expand_as(v).contiguous(), do]


ordinary = given


def ring(
    merged: Cast = same, lse_as: Cast = same, summed: Cast = same, *, other_scale: bool = False, swapped: bool = False
) -> list[Capture]:
    """A ring of contiguous rows, each rank from its own keys down, forward and backward."""
    q, k, v, do = given()
    scale, found, sums = DIM**-0.5, [], [torch.zeros(2, 1, HEADS, ROWS, DIM) for _ in range(RANKS)]
    for rank in range(RANKS):
        rows = slice(rank * ROWS, (rank + 1) * ROWS)
        hops = list(range(rank, -1, -1))
        o, lse = torch.zeros(1, HEADS, ROWS, DIM), torch.full((1, HEADS, ROWS, 1), -torch.inf)
        tensors: dict[str, Tensor] = {}
        for number, source in enumerate(hops):
            keys = slice(source * ROWS, (source + 1) * ROWS)
            off = 1.05 if other_scale and (rank, source) == (2, 1) else 1.0
            s = hidden(q[:, :, rows].float() @ k[:, :, keys].float().mT * scale * off, rank, source)
            own = s.logsumexp(-1, keepdim=True)
            part = low((s - own).exp()) @ v[:, :, keys].float()
            tensors |= {f"hop{number}_o": part.bfloat16(), f"hop{number}_lse": own[..., 0]}
            part, step = low(part), torch.sigmoid(own - lse)
            step = torch.where(lse.isinf(), 1.0, step)
            o = merged(o - step * (o - part))
            lse = lse_as(torch.where(lse.isinf(), own, lse - functional.logsigmoid(lse - own)))
        o = low(o)
        delta = (do[:, :, rows].float() * o).sum(-1, keepdim=True)
        dq = torch.zeros_like(o)
        for number, source in enumerate(hops):
            keys = slice(source * ROWS, (source + 1) * ROWS)
            s = hidden(q[:, :, rows].float() @ k[:, :, keys].float().mT * scale, rank, source)
            p = (s - lse).exp()
            ds = low(p * (do[:, :, rows].float() @ v[:, :, keys].float().mT - delta))
            new = [low(ds @ k[:, :, keys].float() * scale), low(ds.mT @ q[:, :, rows].float() * scale)]
            new.append(low(low(p).mT @ do[:, :, rows].float()))
            if swapped and (rank, source) == (3, 0):
                new[1] = new[1].flip(1)
            tensors |= {f"hop{number}_{name}": t.bfloat16() for name, t in zip(("dq", "dk", "dv"), new, strict=True)}
            dq = summed(dq + new[0])
            sums[source] = summed(sums[source] + torch.stack(new[1:]))
        seen = slice(0, (rank + 1) * ROWS)
        tensors |= {"q": q[:, :, rows], "k": k[:, :, seen], "v": v[:, :, seen], "do": do[:, :, rows]}
        tensors |= {"o": o.bfloat16(), "lse": lse[..., 0], "dq": dq.bfloat16()}
        tensors["q_positions"] = torch.arange(rank * ROWS, (rank + 1) * ROWS)
        told = "; ".join(f"rank {s}: {s * ROWS}-{(s + 1) * ROWS - 1}" for s in hops)
        extra = {"run": "a", "call": "0", "sequence_ranks": "0,1,2,3", "hops": told, "world_size": str(RANKS)}
        found.append((tensors, {"causal": "top-left", "layer": 0, "step": 0, "rank": rank, "extra": extra}))
    for rank, (tensors, _) in enumerate(found):
        tensors |= {"own_dk": sums[rank][0].bfloat16(), "own_dv": sums[rank][1].bfloat16()}
    return [Capture.from_tensors(tensors, **said) for tensors, said in found]


def hidden(scores: Tensor, rank: int, source: int) -> Tensor:
    later = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf) if rank == source else scores


def one_device() -> Capture:
    q, k, v, _ = given()
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return Capture.from_tensors({"q": q, "k": k, "v": v, "o": o}, causal="top-left", layer=0)


def test_a_ring_in_fp32_is_no_cause() -> None:
    found = attn_diag.mismatch(one_device(), ring())
    assert found.outcome == "rounding"
    assert {(m.output, m.rank) for m in found.merges} == set(product(("o", "dq", "dk", "dv"), range(RANKS)))
    for merge in found.merges:
        assert merge.way == "in fp32, cast once"
        assert merge.agreement > 0.999
        # What is added up exactly is what was captured: the parts make the whole.
        assert merge.error <= merge.from_merge + merge.from_hops + (merge.from_forward or 0.0) + 1e-12
    assert "in fp32, cast once" in found.report(100)


def test_gradients_that_cancel_to_nothing_accuse_no_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "given", repeated)
    found = ring_merges(ring(), "rollout", torch.device("cpu"))
    assert {m.output for m in found} == {"o", "dq", "dk", "dv"}
    assert not with_rings([], found)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (
            {"merged": low},
            "ring",
            "O of 4 hops together with the merged O in BF16 after each hop, in the order in which",
        ),
        ({"lse_as": low}, "ring", "O of 4 hops together with the LSE in BF16 after each hop"),
        ({"summed": low}, "ring", "dQ of 4 hops together with the sum in BF16 after each hop, in the order in which"),
        ({"other_scale": True}, "hop", "O of rank 2 for rank 1's keys (hop 1)"),
        ({"swapped": True}, "hop", "dK of rank 0 for rank 3's rows (hop 3)"),
    ],
    ids=["merged O", "LSE", "sums", "a hop's scale", "a hop's dK"],
)
def test_what_errs_is_named(changes: dict[str, object], kind: str, words: str) -> None:
    found = attn_diag.mismatch(one_device(), ring(**changes))  # type: ignore[arg-type]
    assert found.outcome == "finding"
    assert {cause.kind for cause in found.causes} == {kind}
    assert words in " ".join(cause.words for cause in found.causes)
    assert {cause.side for cause in found.causes} == {"rollout"}


def test_missing_ranks_leave_out_the_sums_over_rows() -> None:
    found = attn_diag.mismatch(one_device(), ring()[1:])
    assert {m.output for m in found.merges} == {"o", "dq"}


def added(parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """One part after the other, cast to BF16 after each."""
    total = parts[order[0]].float()
    for number in order[1:]:
        total = low(total + parts[number].float())
    return total.bfloat16()


@pytest.mark.parametrize(
    ("way", "words"),
    {
        "fp32": "in fp32, cast once",
        "tree": "in BF16 after each addition, in pairs of ranks 0, 2, 1, 3",
        "chain": "in BF16 after each addition, ranks 1, 3, 0, 2",
        "ring": "in BF16 after each addition, ranks 1, 2, 3, 0 in 25 % of it, ranks 2, 3, 0, 1 in 25 % of it, "
        "ranks 3, 0, 1, 2 in 25 % of it, ranks 0, 1, 2, 3 in 25 % of it",
        "a rank left out": "without rank 2",
        "something else": "",
    }.items(),
)
def test_an_all_reduce_is_told_by_its_bits(way: str, words: str) -> None:
    parts = list(torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    wide = torch.stack(parts).double()
    result = {
        "fp32": lambda: wide.sum(0).bfloat16(),
        "tree": lambda: added([added(parts, (0, 2)), added(parts, (1, 3))], (0, 1)),
        "chain": lambda: added(parts, (1, 3, 0, 2)),
        "ring": lambda: torch.cat([added([p[8 * n : 8 * n + 8] for p in parts], [(n + 1 + i) % 4 for i in range(4)])
                                   for n in range(4)]),
        "a rank left out": lambda: wide[[0, 1, 3]].sum(0).bfloat16(),
        "something else": lambda: (1.01 * wide.sum(0)).bfloat16(),
    }[way]()  # fmt: skip
    found = attn_diag.reduction_of(parts, result)
    assert found.words == words
    assert found.in_fp32 == (way == "fp32")
    assert (found.agreement == 1) == bool(words)


def test_parts_of_an_all_reduce_that_do_not_fit_are_refused() -> None:
    part = torch.zeros(4, 4)
    for parts in ([part], [part, part[:2]], [part, part.half()], [part.int()] * 2):
        with pytest.raises(InputError, match="one shape and one dtype of float32, bfloat16 and float16, got"):
            attn_diag.reduction_of(parts, parts[0])


def test_hops_are_read_from_the_metadata() -> None:
    (own, first), (other, second) = hop_keys("rank 1: 6-7,10-11; rank 0: 1-7 by 3")
    assert (own, other) == (1, 0)
    assert (first.tolist(), second.tolist()) == ([6, 7, 10, 11], [1, 4, 7])
    with pytest.raises(InputError, match="expected hops such as"):
        hop_keys("everything")
