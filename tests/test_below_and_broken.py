"""Kernels and stored results below 16 bits with a fault beside them: what is said of each, and of the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_diag import inspect
from attn_diag.kernels import emulate_head, preset
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import PRESETS, quantizer
from attn_diag.reference import AttentionHead, Masking
from attn_diag.reports.finding_words import about, sure, what
from attn_diag.results.findings import SharedFinding
from attn_diag.results.heads import HeadDiagnosis
from attn_diag.results.quality import QuantityVerdict

T, D = 256, 64
Change = Callable[[Tensor], Tensor]


def inputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, D, generator=generator).to(dtype) for _ in range(4)]


def made(name: str, tensors: list[Tensor], *, backward: bool = False) -> dict[str, Tensor]:
    """What a kernel returns of one head, [T, D]."""
    q, k, v, do = (t.double() for t in tensors)
    fmt = "fp16" if tensors[0].dtype == torch.float16 else "bf16"
    head = AttentionHead(q, k, v, do if backward else None, D**-0.5, Masking("none"))
    found = emulate_head(preset(name, fmt, D), head)
    names = ("o", "lse", "dq", "dk", "dv") if backward else ("o",)
    return {n: getattr(found, n).to(torch.float32 if n == "lse" else tensors[0].dtype) for n in names}


def judged(tensors: list[Tensor], **outputs: Tensor) -> tuple[HeadDiagnosis, SharedFinding, str]:
    """Of one head, [T, D]."""
    q, k, v, do = (t[None, None] for t in tensors)
    given = {name: t[None, None] for name, t in outputs.items()} | ({"do": do} if "dq" in outputs else {})
    found = inspect(q, k, v, **given)  # type: ignore[arg-type]
    return found.captures[0].observations[0].heads[0], found.findings[0], " ".join(found.report().split())


def swapped(x: Tensor) -> Tensor:
    """With two rows in each other's place."""
    return x[[*range(10), 11, 10, *range(12, len(x))]]


@pytest.mark.parametrize("name", ["sage2", "sage3"])
def test_rows_that_the_kernel_did_not_make_are_told(name: str) -> None:
    """It was "all rows have the bits of sage2 (99.21 % of those compared)", and the fault of 8 bits alone."""
    tensors = inputs(T)
    head, finding, _ = judged(tensors, o=swapped(made(name, tensors)["o"]))
    assert finding.label == "wrong"
    assert "rows 10-11 are 1" in finding.words
    assert finding.words.endswith(f"99.21 % of the numbers compared have the bits of {name}, a kernel below 16 bits.")
    assert not finding.formats
    assert sure(finding).startswith("certain: no rounding does that")
    assert head.quantities[0].patterns[0].rows == ((10, 11),)


def test_a_row_that_is_not_among_those_compared_is_told_too() -> None:
    tensors = inputs(1200)
    o = made("sage2", tensors)["o"]
    o[1] = 0
    _, finding, _ = judged(tensors, o=o)
    assert "row 1 is zero, as if never written" in finding.words


def test_zeros_are_no_kernels_bits() -> None:
    """Of a V whose scales underflow sage3 makes zeros, as a kernel that writes nothing does."""
    q, k, v, do = inputs(64)
    v = (v.double() * 1e-6).bfloat16()
    _, finding, _ = judged([q, k, v, do], o=torch.zeros_like(v))
    assert finding.cause is not None
    assert finding.cause.kernel is None
    assert "as if never written" in finding.words


def test_an_lse_that_the_kernel_does_not_make_is_another_fault() -> None:
    """It was "certain: the fault of a kernel below 16 bits" of all that is wrong."""
    tensors = inputs(T)
    outputs = made("sage3", tensors, backward=True)
    outputs["lse"][5] += 1
    head, finding, text = judged(tensors, **outputs)
    assert finding.unexplained == ("lse",)
    assert sure(finding) == (
        "certain: the fault of a kernel or cache below 16 bits, not the inputs'; of LSE it is another."
    )
    assert head.verdict is not None
    assert head.verdict.suggestions[0].endswith("That does not explain LSE: look there for another fault.")
    assert "LSE is wrong too" in text


def test_what_to_do_is_to_declare_the_kernel_that_is_known() -> None:
    """Of sage1, which holds q and k in INT8, it was to give them "code times scale"; beside a gradient that follows
    from its O, to look for scores and sums below fp32."""
    tensors = inputs(T)
    for outputs in (made("sage1", tensors), made("sage2", tensors, backward=True)):
        head, finding, _ = judged(tensors, **outputs)
        assert finding.cause is not None
        assert head.verdict is not None
        assert f"declare it (--declared {finding.cause.kernel})" in head.verdict.suggestions[0]


def test_a_large_factor_of_a_known_kernel_is_no_wrong_mathematics() -> None:
    tensors = inputs(T, dtype=torch.float16)
    head, _, _ = judged(tensors, o=made("sage2", tensors)["o"])
    assert "all rows have the bits of sage2" in head.quantities[0].words
    assert "wrong mathematics" not in head.quantities[0].words


@pytest.mark.parametrize("names", [("fa2", "sage2"), ("sage3", "sage2"), ("sage2", "sage2-hopper")])
def test_each_head_is_named_by_its_own_kernel(names: tuple[str, str]) -> None:
    """Only the first head's was looked for."""
    q, k, v, _ = inputs(1, 2, T)
    o = torch.stack([made(name, [t[0, h] for t in (q, k, v, v)])["o"] for h, name in enumerate(names)])[None]
    heads = inspect(q, k, v, o=o).captures[0].observations[0].heads
    shown = [next((p.kernel for p in h.quantities[0].patterns), "fa2") for h in heads if h.head is not None]
    assert shown == list(names)


def test_heads_of_two_kernels_with_the_same_formats_are_not_alike() -> None:
    q, k, v, _ = inputs(1, 2, T)
    kernels = ("sage2", "sage2-hopper")
    o = torch.stack([made(name, [t[0, h] for t in (q, k, v, v)])["o"] for h, name in enumerate(kernels)])[None]
    (finding,) = inspect(q, k, v, o=o).findings
    assert finding.alike == 1
    assert len(finding.otherwise) == 1


@pytest.mark.parametrize(("names", "said"), [(("sage2", "fa2"), "batch item 0 alone: "), (("sage2", "sage2"), "")])
def test_a_kernel_of_one_sequence_is_not_said_of_all(names: tuple[str, str], said: str) -> None:
    q, k, v, _ = inputs(2, 1, T)
    o = torch.stack([made(name, [t[b, 0] for t in (q, k, v, v)])["o"] for b, name in enumerate(names)])[:, None]
    (finding,) = inspect(q, k, v, o=o).findings
    assert f"; {said}all rows have the bits of sage2" in finding.words
    assert f"O: {said}all rows have the bits of sage2" in what(finding)


def fp8(x: Tensor, scale: float = 1.0) -> Tensor:
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def int4(x: Tensor) -> Tensor:
    return quantize(x, quantizer(PRESETS["int4"], block="row")).values


def stored(change: Change, dtype: torch.dtype = torch.bfloat16) -> tuple[QuantityVerdict, SharedFinding]:
    """Of an O in 16 bits that was changed so."""
    tensors = inputs(192, dtype=dtype)
    q, k, v, _ = (t.double() for t in tensors)
    o = ((q @ k.T * D**-0.5).softmax(-1) @ v).to(dtype).double()
    head, finding, _ = judged(tensors, o=change(o).to(dtype))
    return head.quantities[0], finding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_a_cast_clips_are_told(dtype: torch.dtype) -> None:
    """It was that "8 bits in all rows make less"."""
    verdict, finding = stored(lambda x: fp8((x / 5e-4).clamp(-448, 448)) * 5e-4, dtype)
    assert "as in FP8 (E4M3, a scale for the head), " in verdict.words
    assert "of their numbers clipped at 0.224, and but for that as good as" in verdict.words
    assert finding.formats == {"o": "FP8 (E4M3)"}


@pytest.mark.parametrize(
    "change", [lambda x: (3 * x).round(), lambda x: int4(1.1 * x), lambda x: fp8(1.05 * x)],
    ids=["three times, as integers", "1.1 times, in INT4", "1.05 times, in FP8"],
)  # fmt: skip
def test_another_fault_is_not_that_of_the_last_cast(change: Change) -> None:
    """It was "certain: the fault of a last cast below 16 bits", 519 times a well-rounded kernel's error off that."""
    _, finding = stored(change)
    assert not finding.formats
    assert "last cast" not in sure(finding)


@pytest.mark.parametrize(("change", "words"), [(fp8, "as in FP8 (E4M3, scale 1"), (int4, "in INT4 (a scale for each")])
def test_rows_beyond_what_storing_makes_are_told(change: Change, words: str) -> None:
    """It was lossy, of which "none of the roundings that were tried makes it", or the fault of the last cast."""
    verdict, finding = stored(lambda x: swapped(change(x)))
    assert finding.label == "wrong"
    assert "rows 10-11 are 1" in verdict.words
    assert "more than storing makes; all rows are stored " in verdict.words
    assert words in verdict.words
    assert verdict.patterns[0].rows == ((10, 11),)


def test_fp8_in_fp16_whose_smallest_codes_are_subnormal() -> None:
    verdict, _ = stored(lambda x: quantize(x, quantizer(PRESETS["fp8-row"], block="row")).values / 64, torch.float16)
    assert verdict.answer == "wrong"
    verdict, _ = stored(lambda x: quantize(x, quantizer(PRESETS["fp8-row"], block="row")).values, torch.float16)
    assert "as in FP8 (E4M3, a scale for each row), and but for that as good as" in verdict.words


def test_one_sequence_that_was_stored_below_is_told_alone() -> None:
    q, k, v, _ = inputs(2, 1, T)
    o = ((q.double() @ k.double().mT * D**-0.5).softmax(-1) @ v.double()).bfloat16()
    o[1] = fp8(o[1].double()).bfloat16()
    (finding,) = inspect(q, k, v, o=o).findings
    assert "batch item 1 alone: all rows are stored with 3 bits" in finding.words


def test_other_heads_sites_are_not_said_of_the_worst_one() -> None:
    """ "all rows are what v held in FP8 gives. Its bits show scores in BF16", which another head's did."""
    q, k, v, _ = (t[0].double() for t in inputs(1, 4, T, seed=5))
    v[2] = fp8(v[2])
    scores = q @ k.mT * D**-0.5
    scores[3] = scores[3].bfloat16()
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    o = (probs.bfloat16().double() @ v / probs.sum(-1, keepdim=True)).bfloat16()
    given = inputs(1, 4, T, seed=5)[:3]
    (finding,) = inspect(*given, o=o[None], causal=True).findings
    assert finding.formats == {"v": "FP8 (E4M3)"}
    assert "Its bits show" not in next(about(finding)).said
    assert ["its bits show scores in BF16" in other.words for other in finding.otherwise] == [True]
