"""dK and dV of key heads that several query heads share: whose they are, and which mask the backward had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from planted_heads import Steps, inputs
from torch import Tensor

import attn_diag
from attn_diag.reference import AttentionHead, Masking

_GROUP = 2
Outputs = dict[str, Tensor]


def heads(batch: int = 1) -> list[AttentionHead]:
    """Four query heads of two key heads, item by item."""
    found = []
    for number in range(4 * batch):
        shared = inputs(seed=100 + number // _GROUP)
        found.append(replace(inputs(seed=number), k=shared.k, v=shared.v))
    return found


def returned(found: list[AttentionHead], backward: Callable[[Steps], None] = lambda _: None) -> Outputs:
    """What a kernel returns whose backward has other steps."""
    made = []
    for head in found:
        steps = Steps(head)
        backward(steps)
        made.append(steps.outputs() | {"o": Steps(head).outputs()["o"]})
    outputs = {n: torch.stack([m[n] for m in made]).unflatten(0, (-1, 4)) for n in ("o", "dq", "dk", "dv")}
    for name in ("dk", "dv"):
        outputs[name] = outputs[name].unflatten(1, (-1, _GROUP)).sum(2)
    return outputs


def words(found: list[AttentionHead], outputs: Outputs) -> dict[tuple[int, str], str]:
    """By query head of the first item and quantity: what is said of those that are wrong."""
    q, k, v, do = (torch.stack([getattr(h, n) for h in found]).unflatten(0, (-1, 4)) for n in ("q", "k", "v", "do"))
    given = {n: t.bfloat16() for n, t in outputs.items()} | {"do": do.bfloat16()}
    told = attn_diag.inspect(
        q.bfloat16(), k[:, ::_GROUP].bfloat16(), v[:, ::_GROUP].bfloat16(), causal=True, device="cpu", **given
    )
    judged = [h for h in told.captures[0].observations[0].heads if h.head is not None]
    return {(h.head, q.quantity): q.words for h in judged for q in h.quantities if q.answer == "wrong"}


def test_the_gradient_of_another_key_head_is_named_by_key_head() -> None:
    found = heads()
    outputs = returned(found)
    said = words(found, outputs | {"dk": outputs["dk"][:, [0, 0]]})
    assert set(said) == {(2, "dk"), (3, "dk")}
    expected = "all keys hold what belongs in key head 0, not in key head 1 (head 2 and head 3)"
    assert all(expected in one for one in said.values())


def test_the_gradient_of_another_sequence_is_named() -> None:
    found = heads(batch=2)
    outputs = returned(found)
    said = words(found, outputs | {"dv": outputs["dv"].flip(0)})
    assert {quantity for _, quantity in said} == {"dv"}
    assert all("hold what belongs in key head" in one and "of batch item" in one for one in said.values())


def test_what_is_added_to_the_key_head_before_is_named() -> None:
    found = heads()
    outputs = returned(found)
    said = words(found, outputs | {"dk": outputs["dk"].cumsum(1)})
    assert set(said) == {(2, "dk"), (3, "dk")}
    assert all("hold the parts of head 0 and head 1 besides their own" in one for one in said.values())


def test_dk_and_dv_that_are_swapped_are_named() -> None:
    found = heads()
    outputs = returned(found)
    said = words(found, outputs | {"dk": outputs["dv"], "dv": outputs["dk"]})
    assert "all keys hold dV" in said[0, "dk"]
    assert "all keys hold dK" in said[3, "dv"]


def _masked(visible: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Steps], None]:
    def change(steps: Steps) -> None:
        rows, keys = (torch.arange(n) for n in steps.p.shape)
        seen = visible(rows[:, None], keys)
        scores = steps.head.q @ steps.head.k.T * steps.scale
        lse = steps.m + steps.l.log()
        steps.p = (scores - lse).exp().masked_fill(~seen, 0.0)
        steps.ds = steps.p * (steps.dp - steps.delta)

    return change


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attention without the causal mask": lambda t, j: (t >= 0) & (j >= 0),
    "a causal border one key earlier": lambda t, j: j < t,
    "a diagonal tile of 64 keys without its causal mask": lambda t, j: j // 64 <= t // 64,
}


@pytest.mark.parametrize("mask", MASKS)
def test_another_mask_in_the_backward_alone_is_named_in_dk_and_dv(mask: str) -> None:
    found = heads()
    outputs = returned(found)
    faulty = returned(found, _masked(MASKS[mask]))
    said = words(found, outputs | {"dk": faulty["dk"], "dv": faulty["dv"]})
    assert {quantity for _, quantity in said} == {"dk", "dv"}
    assert all(f"are what {mask} in the backward alone gives" in one for one in said.values())


def test_right_gradients_are_not_accused() -> None:
    found = [replace(h, masking=Masking("top-left")) for h in heads(batch=2)]
    assert not words(found, returned(found))
