"""Whether what a converted dump holds agrees with attention on its q, k and v, and what the notes say where not."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from foreign_dumps import QKVO, attention, converted, inputs, named

from attn_diag import load
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("output", ["o", "lse"])
def test_an_output_that_does_not_fit_is_no_ok(tmp_path: Path, run: Run, output: str) -> None:
    q, k, v = inputs(heads=12, kv_heads=12, rows=48, keys=48)
    o, lse = attention(q, k, v, "top-left")
    content = {**named((q, k, v, o), *QKVO), "lse": lse}
    for wrong, word in ((False, "OK"), (True, "UNDECIDED")):
        if wrong:
            content[output] = content[output].clone()
            content[output][:, :, 9:21] += 20
        torch.save(content, tmp_path / "dump.pt")
        done = run("convert", tmp_path / "dump.pt", tmp_path / "one.safetensors", "--force")
        assert (done.code, done.out.split()[0]) == (0, word)
        assert ("does not agree" in done.out.splitlines()[0]) is wrong
        # Of an O that is so far off no reading is near; then none is guessed.
        expected = "none" if wrong and output == "o" else "top-left"
        assert load(tmp_path / "one.safetensors").metadata.causal == expected


STATED: dict[str, Any] = {"layout": "BHTD", "causal": "top-left"}


def notes_of(folder: Path, content: Any, **options: Any) -> str:
    return str(converted(folder, content, **options).metadata.notes)


@pytest.mark.parametrize("stated", [STATED, {}], ids=["stated", "open"])
@pytest.mark.parametrize("fault", ["larger", "smaller", "of another step"])
def test_an_o_that_rounding_does_not_make_is_not_passed(tmp_path: Path, fault: str, stated: dict[str, Any]) -> None:
    q, k, v = inputs(rows=96, keys=96)
    o, lse = attention(q, k, v, "top-left")
    if fault == "of another step":
        moved = (q + 0.05 * torch.randn(q.shape, generator=torch.Generator().manual_seed(0))).bfloat16()
        o = attention(moved, k, v, "top-left")[0]
    else:
        o = (o.float() * (1.05 if fault == "larger" else 0.97)).bfloat16()
    said = notes_of(tmp_path, {**named((q, k, v, o), *QKVO), "lse": lse}, **stated)
    assert "O does not agree with attention on q, k and v to rounding: it is off by 0.0" in said
    assert "O agrees" not in said
    assert ("layout=BHTD and causal=top-left: O is off by" in said) is (not stated)


def test_how_far_outputs_agree_is_said_where_all_is_stated(tmp_path: Path) -> None:
    q, k, v = inputs()
    o, lse = attention(q, k, v, "top-left")
    content = {**named((q, k, v, o), *QKVO), "lse": lse}
    said = notes_of(tmp_path, content, **STATED, lse_base="e")
    assert re.search(r"O agrees within 0\.00\d+; .*LSE agrees within \d", said)
    del content["o"]
    assert notes_of(tmp_path, content, **STATED, lse_base="e").count("LSE agrees within") == 1


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_an_lse_that_is_off_by_a_constant_is_not_passed(tmp_path: Path, stored: torch.dtype) -> None:
    q, k, v = inputs(rows=96, keys=96)
    o, lse = attention(q, k, v, "top-left")
    for off, agrees in ((0.0, True), (0.1, False)):
        content = {**named((q, k, v, o), *QKVO), "lse": (lse + off).to(stored)}
        said = notes_of(tmp_path, content, **STATED, lse_base="e")
        assert ("LSE agrees" in said) is agrees, said
        assert ("LSE does not agree with attention on q, k and v to rounding: it is off by +0.1" in said) is not agrees


def test_rows_of_o_that_are_zero_are_named(tmp_path: Path) -> None:
    q, k, v = inputs(rows=96, keys=96)
    v[:, :, 0] = 0.0  # what row 0 sees: its O is rightly zero
    o, _ = attention(q, k, v, "top-left")
    assert "zero" not in notes_of(tmp_path, named((q, k, v, o), *QKVO), **STATED)
    o[0, 1, 50] = 0.0
    said = notes_of(tmp_path, named((q, k, v, o), *QKVO), **STATED)
    assert "row 50 of head 1 is zero in every element (1 of 2 rows of zeros that were tried)" in said
    assert "0, " not in said.partition("O does not agree")[2].partition("of head")[0]


def test_a_gradient_of_another_output_is_told_by_dq(tmp_path: Path) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(heads=2, kv_heads=2, rows=96, keys=96))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    do, other = (torch.randn(o.shape, generator=torch.Generator().manual_seed(n)).to(o) for n in (1, 2))
    (dq,) = torch.autograd.grad(o, [q], do)
    content = {**named(tuple(x.detach() for x in (q, k, v, o)), *QKVO), "dq": dq, "do": do}
    assert "dQ is within 0.0" in notes_of(tmp_path, content, **STATED)
    for wrong in (other, do.transpose(1, 2).reshape(do.shape)):
        said = notes_of(tmp_path, {**content, "do": wrong}, **STATED)
        assert "dQ does not agree with attention on q, k and v with dO (off by 1." in said
    del content["dq"]
    assert "dO is held against nothing" in notes_of(tmp_path, {**content, "do": other}, **STATED)


def test_what_rounding_may_make_of_lse_is_of_keys_that_count_and_of_16_bits(tmp_path: Path) -> None:
    q, k, v = inputs(rows=96, keys=96)
    lowest = torch.zeros(96, 96).masked_fill(torch.ones(96, 96).triu(1) > 0, torch.finfo(torch.float32).min)
    o, lse = attention(q, k, v, "top-left")
    masked = {**named((q, k, v, o), *QKVO), "lse": lse + 0.1, "mask": lowest}
    said = notes_of(tmp_path, masked, layout="BHTD", causal="none", lse_base="e")
    assert "it is off by +0.1 in the middle row" in said
    wide = [x.float() + 1e-4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) for x in (8 * q, k, v)]
    q, k, v = (x.bfloat16() for x in wide)  # in FP32, through BF16
    o, lse = attention(q, k, v, "top-left")
    assert "LSE agrees" in notes_of(tmp_path, {**named((*wide, o.float()), *QKVO), "lse": lse}, **STATED)


def test_zeros_that_a_cast_of_p_makes_are_no_lost_rows(tmp_path: Path) -> None:
    q, k, v = (x.to(torch.float16) for x in inputs(heads=1, kv_heads=1, rows=96, keys=96))
    q[..., 0], k[..., 0] = 16.0, 0.0
    k[:, :, 0], v[:, :, 0] = 0.0, 0.0
    k[:, :, 0, 0] = 5.25  # P of all others is about exp(-21), and 0 in FP16; V of this key is 0
    v = 1e4 * v
    o = torch.zeros_like(v)
    assert (attention(q, k, v, "top-left")[0][:, :, 50:].abs().amax(3) > 2.0**-14).any()
    bf16 = {n: x.bfloat16() for n, x in named((q, k, v, o), *QKVO).items()}
    assert "zero in every element" not in notes_of(tmp_path, named((q, k, v, o), *QKVO), **STATED)
    assert "zero in every element" in notes_of(tmp_path, bf16, **STATED)


def test_do_is_blamed_of_no_dq_that_is_rounding_or_of_a_wrong_o(tmp_path: Path) -> None:
    q, k, v = inputs(heads=2, kv_heads=2, rows=96, keys=96)
    do, dq = v.flip(2), k.flip(2)
    q_hot = 1000 * k
    one_hot = named((q_hot, k, v, attention(q_hot, k, v, "none")[0]), *QKVO)
    said = notes_of(tmp_path, {**one_hot, "do": do, "dq": dq}, layout="BHTD", causal="none")
    assert "dO is held against nothing: rounding is expected to leave" in said
    content = named((q, k, v, (1.3 * attention(q, k, v, "top-left")[0].float()).bfloat16()), *QKVO)
    said = notes_of(tmp_path, {**content, "do": do, "dq": dq}, **STATED)
    assert "O does not agree" in said
    assert "dQ" not in said
    wide = {n: x.float() for n, x in {**content, "o": attention(q, k, v, "top-left")[0], "do": do, "dq": dq}.items()}
    assert "that is done of kernels in 16 bits alone" in notes_of(tmp_path, wide, **STATED)


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0, 15.0])
@pytest.mark.parametrize("kernel", ["plain", "qiu2025", "bf16-forward"])
def test_kernels_that_round_everything_to_16_bits_agree(tmp_path: Path, kernel: str, spread: float) -> None:
    q, k, v = inputs(heads=2, rows=96, keys=96)
    q = spread * q
    if kernel == "plain":
        hidden = torch.ones(96, 96, dtype=torch.bool).triu(1)
        o = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(hidden, -math.inf).softmax(-1) @ v
    else:
        wide, masking = [x[0].double() for x in (q, k, v)], Masking("top-left")
        heads = [AttentionHead(q_, k_, v_, None, q.shape[3] ** -0.5, masking) for q_, k_, v_ in zip(*wide, strict=True)]
        o = torch.stack([emulate_head(preset(kernel, "bf16", 16), head).o for head in heads])[None].bfloat16()
    assert "O agrees within" in notes_of(tmp_path, named((q, k, v, o), *QKVO), **STATED)


def test_a_kernel_below_16_bits_agrees_where_it_is_declared(tmp_path: Path) -> None:
    q, k, v = (torch.cat([x] * 4, 3) for x in inputs(heads=1, kv_heads=1, rows=96, keys=96))
    q = 0.25 * q
    head = AttentionHead(q[0, 0].double(), k[0, 0].double(), v[0, 0].double(), None, 64**-0.5, Masking("top-left"))
    o = emulate_head(preset("fa3-fp8", "bf16", 64), head).o[None, None].bfloat16()
    content = named((q, k, v, o), *QKVO)
    assert "or a kernel below 16 bits (--declared)?" in notes_of(tmp_path, content, **STATED)
    assert "O agrees within" in notes_of(tmp_path, content, **STATED, declared="fa3-fp8")


@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_without_o_lse_tells_the_reading(tmp_path: Path, run: Run, causal: str) -> None:
    q, k, v = inputs(heads=12, kv_heads=12, rows=12, keys=18)
    content = {**named((q, k, v), "q", "k", "v"), "lse": attention(q, k, v, causal)[1] / math.log(2)}
    torch.save(content, tmp_path / "dump.pt")
    done = run("convert", tmp_path / "dump.pt", tmp_path / "one.safetensors")
    assert done.out.startswith("OK 1 capture")
    assert f"causal={causal}: LSE agrees" in done.out
    metadata = load(tmp_path / "one.safetensors").metadata
    assert (metadata.causal, metadata.lse_base) == (causal, "2")


def test_the_nearest_reading_is_taken_of_an_o_that_is_wrong_in_some_rows(tmp_path: Path) -> None:
    q, k, v = inputs(heads=12, kv_heads=12, rows=48, keys=48)
    o = attention(q, k, v, "top-left")[0].clone()
    o[:, :, 20:32] = o[:, :, 8:20]
    found = converted(tmp_path, named((q, k, v, o), *QKVO))
    assert found.metadata.causal == "top-left"
    assert "layout=BHTD and causal=top-left is nearest" in str(found.metadata.notes)
    shuffled = converted(tmp_path, named((q, k, v, o.flip(2)), *QKVO))
    assert "layout=BHTD and causal=none is assumed" in str(shuffled.metadata.notes)


def test_an_o_that_cannot_be_compared_is_not_called_missing(tmp_path: Path, run: Run) -> None:
    q, k, v = inputs(heads=2)
    torch.save({"q": q * math.nan, "k": k, "v": v, "o": q}, tmp_path / "dump.pt")
    code, out, _ = run("convert", tmp_path / "dump.pt", tmp_path / "captures")
    assert code == 0
    assert "assumed, and nothing confirms it: in no row can O be compared (NaN, Inf or no key)" in out
