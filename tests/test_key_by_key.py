"""Kernels that walk their keys one by one with O in 16 bits, as llama.cpp's does on a CPU where few rows ask."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from attn_diag import inspect
from attn_diag.results.diagnosis import HeadDiagnosis

ROWS, T, D = 32, 160, 64
WORDS = "as where O is kept in the inputs' format between one key and the next"


def inputs(kind: str, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, D, generator=generator) for n in (ROWS, T, T))
    if kind == "lowrank":
        basis = torch.randn(4, D, generator=generator)
        q, k = (torch.randn(n, 4, generator=generator) @ basis / 2 + 0.1 * x for n, x in ((ROWS, q), (T, k)))
        v = v + 1
    return [x.half().float() for x in (q, k, v)]


def key_by_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ggml_compute_forward_flash_attn_ext_f16_one_chunk, of a cache in FP16; O in FP32."""
    scores = (q.half().float() @ k.T * D**-0.5).masked_fill(torch.ones(ROWS, T).triu(T - ROWS + 1) > 0, -torch.inf)
    o, m, total = torch.zeros(ROWS, D).half(), torch.full((ROWS, 1), -torch.inf), torch.zeros(ROWS, 1)
    for key in range(T):
        s = scores[:, key, None]
        grown, before = s > m, m
        m = torch.maximum(m, s)
        o = torch.where(grown, (o.float() * (before - m).exp()).half(), o)
        total = total * (before - m).exp() + (s - m).exp()
        o = (o.float() + (s - m).exp() * v[key]).half()
    return o.float() * (1 / total)


def judged(inputs: Sequence[Tensor], o: Tensor) -> HeadDiagnosis:
    q, k, v = (x[None, None] for x in inputs)
    found = inspect(q, k, v, o=o[None, None], causal="bottom-right")
    return found.captures[0].observations[0].heads[0]


@pytest.mark.parametrize("kind", ["normal", "lowrank"])
@pytest.mark.parametrize("out", [torch.float32, torch.float16])
def test_it_has_a_name(kind: str, out: torch.dtype) -> None:
    """O was 13 to 55 times as far off as a well-rounded kernel's, and none of the roundings tried made it."""
    q, k, v = inputs(kind)
    (verdict,) = judged([x.half() for x in (q, k, v)], key_by_key(q, k, v).to(out)).quantities
    assert verdict.answer == "lossy"
    assert WORDS in verdict.words


def test_of_fp32_inputs_it_is_no_wrong_mathematics() -> None:
    """It was wrong: 0.157 % off, "which no 8-bit rounding makes"."""
    q, k, v = inputs("lowrank", 2)
    (verdict,) = judged([1.0001 * q, k, v], key_by_key(1.0001 * q, k, v)).quantities
    assert verdict.answer == "lossy"
    assert "with O's accumulator in FP16, the operands of all products too (key by key" in verdict.words


def test_a_row_at_fault_beside_it_is_wrong() -> None:
    q, k, v = inputs("normal", 2)
    o = key_by_key(q, k, v)
    o[9] *= 1.5
    (verdict,) = judged([x.half() for x in (q, k, v)], o).quantities
    assert verdict.answer == "wrong"
    assert "row 9" in verdict.words


def test_o_in_fp32_behind_a_cast_p_has_the_name_of_plain_torch() -> None:
    """llama.cpp without flash attention: P is normalised, cast to FP16, and O is in FP32; it had no name."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(T, D, generator=generator).half().float() for _ in range(3))
    o = (q @ k.T * D**-0.5).softmax(1).half().float() @ v
    found = inspect(*(x.half()[None, None] for x in (q, k, v)), o=o[None, None]).captures[0].observations[0].heads[0]
    (verdict,) = found.quantities
    assert verdict.site == "normalised"
