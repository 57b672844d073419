"""Faults of linear attention by name: kernels with other arguments, other states between chunks, other gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from linear_kernels import recurrent
from torch import Tensor

import attn_diag
from attn_diag.analyses.linear.causes import _beside
from attn_diag.captures.linear import LinearCapture
from attn_diag.kernels.linear_faults import FAULTS
from attn_diag.results.linear import LinearDiagnosis
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded

STEPS, HEADS, SIZE, CHUNK = 96, 2, 16, 32
Inputs = dict[str, Tensor]
Pair = tuple[Tensor, Tensor]
ACCUSED = {"nonfinite", "wrong", "lossy", "biased"}


def other(**changes: Callable[[Tensor], Tensor]) -> Callable[[Inputs, float], Pair]:
    """A kernel that computes with other arguments."""
    return lambda x, scale: recurrent(x | {n: change(x[n]) for n, change in changes.items()}, scale=scale)


def late(x: Tensor, by: int = 1) -> Tensor:
    none = torch.zeros_like(x[:, :1])
    return torch.cat([none, x[:, :-1]] if by > 0 else [x[:, 1:], none], 1)


def in_chunks(
    between: Callable[[Tensor], Tensor] = lambda s: s,
    seen: Callable[[Inputs, Tensor], Tensor] | None = None,
) -> Callable[[Inputs, float], Pair]:
    """A kernel that hands its state from chunk to chunk, changed, or whose o sees it otherwise."""

    def run(x: Inputs, scale: float) -> Pair:
        outs, state = [], x["initial_state"].double()
        for i in range(0, STEPS, CHUNK):
            piece = {n: t[:, i : i + CHUNK] for n, t in x.items() if n != "initial_state"}
            state = between(state) if i else state
            o, last = recurrent(piece | {"initial_state": state}, scale=scale)
            if seen is not None:
                own, _ = recurrent(piece, scale=scale)
                o = own + scale * seen(piece, state)
            outs.append(o)
            state = last
        return torch.cat(outs, 1), state

    return run


def undecayed(x: Inputs, state: Tensor) -> Tensor:
    return torch.einsum("bthk,bhkv->bthv", x["q"].double(), state)


# The cause, the operator, and a kernel that has it.
KERNELS: dict[str, tuple[str, Callable[[Inputs, float], Pair]]] = {
    "decay_of_another_head": ("gla", other(g=lambda g: g.roll(1, 2))),
    "decay_base_two": ("gated_delta_rule", other(g=lambda g: g * math.log(2))),
    "decay_twice": ("simple_gla", other(g=lambda g: 2 * g)),
    "decay_late": ("simple_gla", other(g=late)),
    "decay_of_next_channel": ("rwkv7", other(g=lambda g: g.roll(1, 3))),
    "beta_early": ("kda", other(beta=lambda b: late(b, -1))),
    "beta_sigmoid": ("gated_delta_rule", other(beta=torch.sigmoid)),
    "a_sign": ("rwkv7", other(a=torch.neg)),
    "keys_of_another_head": ("simple_gla", other(k=lambda k: k.roll(1, 2))),
    "state_transposed": ("gated_delta_rule", in_chunks(lambda s: s.mT)),
    "inter_not_decayed": ("gla", in_chunks(seen=undecayed)),
}


def call_of(operator: str, seed: int) -> tuple[Inputs, Inputs, float]:
    """Arguments, with an initial state; what the backward begins with; the scale."""
    make = torch.Generator().manual_seed(seed)
    given = rounded(linear_inputs(operator, (1, STEPS, HEADS, SIZE, SIZE), seed, kind=LONG))
    given["initial_state"] = torch.randn(1, HEADS, SIZE, SIZE, generator=make) * 0.3
    back = {"dfinal_state": torch.randn(1, HEADS, SIZE, SIZE, generator=make) * 0.3}
    back["do"] = torch.randn(1, STEPS, HEADS, SIZE, generator=make).bfloat16()
    return given, back, LinearCapture(operator, given).call.used_scale


def capture_of(operator: str, kernel: Callable[[Inputs, float], Pair], seed: int = 0) -> LinearCapture:
    given, back, scale = call_of(operator, seed)
    leaves = {n: t.double().requires_grad_() for n, t in given.items()}
    o, last = kernel(leaves, scale)
    loss = (o * back["do"].double()).sum() + (last * back["dfinal_state"].double()).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    made = {f"d{n}": g.to(given[n].dtype) for n, g in zip(leaves, found, strict=True)}
    return LinearCapture(
        operator, {**given, **back, **made, "o": o.detach().bfloat16(), "final_state": last.detach().float()}
    )


def causes_of(capture: LinearCapture) -> dict[str, set[str | None]]:
    return causes_in(attn_diag.inspect_linear(capture, device="cpu"))


def causes_in(verdict: LinearDiagnosis) -> dict[str, set[str | None]]:
    """Of every accused quantity."""
    found: dict[str, set[str | None]] = {}
    for head in verdict.heads:
        for q in head.quantities:
            if q.answer in ACCUSED:
                found.setdefault(q.quantity, set()).add(q.cause)
    return found


@pytest.mark.parametrize("cause", KERNELS)
def test_faults_are_named_where_o_is_off(cause: str) -> None:
    operator, kernel = KERNELS[cause]
    found = causes_of(capture_of(operator, kernel))
    assert found["o"] == {cause}, found
    named = {name for names in found.values() for name in names}
    # A gradient may be zeros, or a multiple, too.
    assert named <= {cause, None, "zero", "factor"}, found


def test_gradients_with_a_fault_of_their_own_are_named() -> None:
    sound = capture_of("gated_delta_rule", other())
    assert causes_of(sound) == {}
    cut = capture_of("gated_delta_rule", in_chunks(torch.detach))
    beta = call_of("gated_delta_rule", 0)[0]["beta"].double()

    def of_write_alone(x: Inputs, scale: float) -> Pair:
        erased = x["beta"].detach()
        return recurrent(x | {"v": x["v"] * (x["beta"] / erased)[..., None], "beta": erased}, scale=scale)

    of_write = capture_of("gated_delta_rule", of_write_alone)
    made = sound.tensors
    changes = {
        "no_state_gradient": ("dk", cut.tensors["dk"], "does not pass from one chunk"),
        "beta_gradient_of_write": ("dbeta", of_write.tensors["dbeta"], "lacks what comes from erasing"),
        "of_another_step": ("dg", late(made["dg"]), "each step has that of the step before it"),
        "of_another_head": ("dq", made["dq"].roll(1, 2), "that of head"),
        "transposed": ("dinitial_state", made["dinitial_state"].mT.contiguous(), "transposed"),
        "without_beta": ("dv", (made["dv"].double() / beta[..., None]).bfloat16(), "not multiplied by beta"),
    }
    found = attn_diag.inspect_linear(
        replace(sound, tensors={**made, **{name: x for name, x, _ in changes.values()}}), device="cpu"
    )
    assert causes_in(found) == {name: {cause} for cause, (name, _, _) in changes.items()}
    said = {q.quantity: q.words for q in found.heads[0].quantities}
    for name, _, words in changes.values():
        assert words in said[name]


def test_decays_that_are_clamped_are_not_called_roots_or_rounded() -> None:
    # The square root of every decay makes 97 % of this error, and what BF16 makes of them is in it by chance.
    found = causes_of(capture_of("gla", other(g=partial(torch.clamp, min=-0.01)), 101))
    assert {c for causes in found.values() for c in causes} <= {None, "factor"}, found


def test_what_is_a_multiple_in_each_sequence_is_no_bit_of_a_site() -> None:
    true = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = true * torch.tensor([0.01, -0.02])[:, None, None]
    assert _beside(error, true).abs().max() < 1e-12
    assert torch.equal(_beside(error, torch.zeros_like(true)), error)


def test_scales_and_logarithms_are_told_by_their_factor() -> None:
    sound = capture_of("gla", other())
    for change, words in ((SIZE**-0.5, "applied twice"), (SIZE**0.5, "without the scale"), (math.log(2), "ln 2 once")):
        changed = {"dq": (sound.tensors["dq"].double() * change).bfloat16()}
        report = attn_diag.inspect_linear(replace(sound, tensors={**sound.tensors, **changed}), device="cpu").report()
        assert words in report.replace("\n  ", " ")


def test_decays_a_little_too_large_are_not_called_powers_of_two() -> None:
    # 2^g for e^g makes as much of them on average, and 77 to 95 % of the squared error.
    found = causes_of(capture_of("gated_delta_rule", other(g=lambda g: g + 2.0**-10), 9))
    assert {c for causes in found.values() for c in causes} <= {None, "factor"}, found


def test_every_fault_has_words_of_its_own() -> None:
    words = [fault.words for fault in FAULTS.values()]
    assert len(set(words)) == len(words)
