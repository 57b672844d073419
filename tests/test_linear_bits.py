"""A state or decays in 16 bits: told by their bits, whatever the size of the error; healthy kernels are not accused."""

from __future__ import annotations

from dataclasses import replace

import torch
from study_linear_states import forward_of

import attn_diag
from attn_diag.head.linear import LinearRun


def test_a_coarse_state_is_proven_by_its_bits_where_its_error_is_no_larger_than_a_sound_kernels() -> None:
    known = LinearRun(forward_of("kda", 101), torch.device("cpu")).released()[0]
    for sites, answer in (({"chunk": 64}, "good"), ({"chunk": 16, "state": "bf16"}, "lossy")):
        found = attn_diag.inspect_linear(forward_of("kda", 101, **known, **sites), device="cpu")
        q = next(q for q in found.heads[0].quantities if q.quantity == "final_state")
        assert q.factor is not None
        assert q.factor < 1.2
        assert (q.answer, q.cause == "state") == (answer, answer == "lossy"), q.words


def test_a_coarse_state_of_a_finer_kernel_is_named_and_not_accused() -> None:
    found = attn_diag.inspect_linear(forward_of("kda", 101, chunk=64, operands="fp32", state="bf16"), device="cpu")
    assert found.labels == {"clean"}
    o = found.heads[0].quantities[0]
    assert (o.quantity, o.cause) == ("o", "state"), o.words
    assert "the state between chunks in the inputs' format (chunks of 64)" in o.words


def test_a_last_state_in_16_bits_is_told_though_it_is_no_further_off() -> None:
    known = LinearRun(forward_of("mamba2", 1), torch.device("cpu")).released()[0]
    capture = forward_of("mamba2", 1, **known, chunk=64)
    sound = {n: x for n, x in capture.tensors.items() if n != "o"}
    coarse = {**sound, "final_state": sound["final_state"].bfloat16().float()}
    for tensors, answer, cause in ((sound, "good", None), (coarse, "lossy", "handed_back")):
        (q,) = attn_diag.inspect_linear(replace(capture, tensors=tensors), device="cpu").heads[0].quantities
        assert q.factor is not None
        assert q.factor < 1
        assert q.answer == answer, q.words
        assert cause in (None, q.cause)


def test_a_mean_that_is_small_beside_a_well_rounded_kernels_error_is_no_bias() -> None:
    # Tensor cores cut TF32 operands off: towards zero, by a third of an error that is half of a well-rounded kernel's.
    found = attn_diag.inspect_linear(forward_of("mamba2", 101, 192, chunk=64, operands="tf32"), device="cpu")
    o = found.heads[0].quantities[0]
    assert o.mean_away is not None
    assert o.mean_away < -0.25
    assert found.labels == {"clean"}, found.sentence
