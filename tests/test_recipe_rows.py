"""Rows that rule recipes out before they are run on all: not the recipe of a kernel that is flawed in these."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import some
from test_recognition import made_by

from attn_diag.captures.capture import Capture
from attn_diag.head.recipe_rows import spread_rows
from attn_diag.head.recipe_search import SearchedHead, first_trials, fits, known, low_bit_trials, read_subject
from attn_diag.kernels import emulate_rows, preset
from attn_diag.kernels.emulation import NO_BLOCK
from attn_diag.reference import AttentionHead, Masking

CPU = torch.device("cpu")


def subject_of(capture: Capture, rows: slice, others: torch.Tensor) -> SearchedHead:
    """The head with some rows of another's O."""
    o = capture.tensors["o"][...].clone()
    o[..., rows, :] = others
    return some(read_subject(replace(capture, tensors={**capture.tensors, "o": o}), "observed", 0, 0, CPU))


@pytest.mark.parametrize("start", [64, 70])
def test_a_few_wrong_early_rows_do_not_hide_a_kernel_below_16_bits(start: int) -> None:
    capture = made_by(preset("kv-int8", "bf16", 16), length=300)
    subject = subject_of(capture, slice(start, start + 3), torch.zeros(3, 16))
    found, tried = low_bit_trials(subject, torch.arange(300))
    assert found[0].recipe.name == "kv-int8"
    assert found[0].match.agreement == pytest.approx(0.99, abs=1e-4)
    assert tried > 10


def test_guard_more_wrong_rows_than_any_kernel_may_miss_rule_it_out() -> None:
    capture = made_by(preset("kv-int8", "bf16", 16), length=300)
    assert low_bit_trials(subject_of(capture, slice(64, 72), torch.zeros(8, 16)), torch.arange(300))[0] == []


def test_a_late_block_of_another_kernel_does_not_hide_an_order_of_the_keys() -> None:
    flex, cudnn = (made_by(preset(name, "bf16", 16), length=512) for name in ("flex", "cudnn"))
    late = slice(384, 512)
    subject = subject_of(flex, late, cudnn.tensors["o"][..., late, :])
    trials = first_trials(subject, known(subject), spread_rows(512, 512, CPU))
    assert trials[0].recipe.name == "flex"
    assert not fits(subject, trials[0])


@pytest.mark.parametrize("name", ["mxfp8-attention", "nvfp4-attention", "fa2"])
def test_late_rows_behind_a_window_have_the_scales_of_all_rows(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(400, 32, generator=generator).bfloat16().double() for _ in range(3))
    head = AttentionHead(q, k, v, None, 32**-0.5, Masking("top-left", window=(100, 0)))
    recipe = preset(name, "bf16", 32)
    recipe = replace(recipe, schedule=replace(recipe.schedule, query_block=NO_BLOCK))
    rows = torch.arange(251, 400)
    equal = emulate_rows(recipe, head, rows) == emulate_rows(recipe, head, torch.arange(400))[rows]
    assert float(equal.double().mean()) > 0.999  # products add in another order
