"""Inputs without a published recipe are asked whether it is the mathematics, and nothing more."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.results.diagnosis import HeadDiagnosis

Outputs = dict[str, Tensor]


def inputs(family: str = "gaussian", rows: int = 192, width: int = 32, seed: int = 7) -> Outputs:
    """q, k, v and dO of two heads, [1, 2, T, D] fp32."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, 2, rows, width, generator=generator) for _ in range(4))
    if family == "peaked":
        q, k = 5 * q, 5 * k
    if family == "one key":
        q = 6 * k
    if family == "common row":
        v = 0.05 * v + v[:, :, :1]
    return {"q": q, "k": k, "v": v, "do": do}


def cut(x: Tensor) -> Tensor:
    """As tl.dot reads fp32: all but 10 bits dropped."""
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def nearest(x: Tensor) -> Tensor:
    return cut((x.contiguous().view(torch.int32) + (1 << 12)).view(torch.float32))


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def attend(x: Outputs, operand: Callable[[Tensor], Tensor] = torch.clone, ahead: int = 0) -> Outputs:
    """A causal attention in fp32 whose products read their operands through ``operand``.

    Every 64th row sees ``ahead`` keys too many.
    """
    q, k, v, do = (operand(x[name]) for name in ("q", "k", "v", "do"))
    rows = torch.arange(q.shape[2])
    reach = rows + ahead * (rows % 64 == 63)
    alpha = q.shape[3] ** -0.5
    scores = (q @ k.mT * alpha).masked_fill(rows[None, :] > reach[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    o = (operand(probs) @ v) / probs.sum(-1, keepdim=True)
    probs = (scores - lse[..., None]).exp()
    delta = (x["do"] * o).sum(-1, keepdim=True)
    ds = operand(probs * (do @ v.mT - delta))
    return {"o": o, "lse": lse, "dq": ds @ k * alpha, "dk": ds.mT @ q * alpha, "dv": operand(probs).mT @ do}


def heads(x: Outputs, outputs: Outputs) -> tuple[HeadDiagnosis, ...]:
    found = attn_diag.inspect(x["q"], x["k"], x["v"], do=x["do"], causal="top-left", **outputs)  # type: ignore[arg-type]
    return tuple(h for h in found.captures[0].observations[0].heads if h.head is not None)


def words(head: HeadDiagnosis, quantity: str) -> str:
    assert head.verdict is not None
    assert head.verdict.labels == ("wrong",)
    return next(q.words for q in head.quantities if q.quantity == quantity and q.answer == "wrong")


def called_cut_off(head: HeadDiagnosis) -> bool:
    assert head.verdict is not None
    return any("cut fp32 operands off to TF32" in said for said in head.verdict.suggestions)


@pytest.mark.parametrize("operand", [torch.clone, nearest, cut], ids=["fp32", "tf32", "tf32 cut"])
@pytest.mark.parametrize("family", ["gaussian", "peaked", "one key", "common row"])
def test_healthy_kernels_are_not_accused(family: str, operand: Callable[[Tensor], Tensor]) -> None:
    x = inputs(family)
    for head in heads(x, attend(x, operand)):
        assert head.verdict is not None
        assert not {"wrong", "nonfinite", "lossy"} & set(head.verdict.labels), head.verdict
        assert {q.answer for q in head.quantities} == {"stated"}
        assert "How well they are rounded was not asked" in " ".join(head.verdict.reasons)
        assert any("no well-rounded kernel of this format" in said for said in head.not_judged)


DEFECTS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "dQ = 0": ("dq", torch.zeros_like, "are zero, as if never written"),
    "-dQ": ("dq", torch.neg, "have the wrong sign"),
    "1.05 dQ": ("dq", lambda t: 1.05 * t, "are 1.05 times the true ones"),
    "dK = 0": ("dk", torch.zeros_like, "all keys are zero, as if never written"),
    "keys of dK": ("dk", lambda t: t.index_fill(2, torch.arange(64, 128), 0.0), "keys 64-127 are zero"),
    "dV of the other head": ("dv", lambda t: t.flip(1), "all keys are what head 1 gives"),
    "last tile of O": ("o", lambda t: t.index_fill(2, torch.arange(128, 192), 0.0), "rows 128-191 are zero"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_what_no_rounding_makes_is_wrong(defect: str) -> None:
    name, plant, expected = DEFECTS[defect]
    x = inputs()
    outputs = attend(x)
    outputs[name] = plant(outputs[name])
    assert expected in words(heads(x, outputs)[0], name)


def test_a_key_too_many_in_some_rows() -> None:
    x = inputs()
    assert "row 63 is what a causal border one key further on gives" in words(heads(x, attend(x, ahead=1))[0], "o")


@pytest.mark.parametrize("widened", [True, False], ids=["inputs of BF16 numbers", "O in BF16"])
def test_a_kernel_that_ran_in_bf16_is_held_to_that(widened: bool) -> None:
    """A capture that was widened, and inputs that autocast narrowed."""
    x = inputs()
    if widened:
        x = {name: bf16(t) for name, t in x.items()}
    outputs = attend(x, bf16)
    for name in ("o", "dq", "dk", "dv"):
        outputs[name] = bf16(outputs[name]) if widened else outputs[name].bfloat16()
    assert {q.answer for head in heads(x, outputs) for q in head.quantities} == {"stated"}
    assert "all rows" in words(heads(x, outputs | {"dq": 0 * outputs["dq"]})[0], "dq")


def test_several_sequences_of_which_none_stands_out_are_not_called_coarse() -> None:
    x = {name: torch.cat([inputs(seed=seed, rows=64)[name] for seed in (1, 2)]) for name in ("q", "k", "v", "do")}
    for head in heads(x, attend(x)):
        assert {q.answer for q in head.quantities} == {"stated"}


@pytest.mark.parametrize("family", ["gaussian", "peaked", "common row"])
def test_a_kernel_that_multiplies_in_bf16_is_lossy_by_that(family: str) -> None:
    """Neither inputs nor outputs say that it did; its error does."""
    x = inputs(family)
    for head in heads(x, attend(x, bf16)):
        assert head.verdict is not None
        assert head.verdict.labels[0] == "lossy"
        said = [q.words for q in head.quantities if q.answer == "lossy"]
        assert said
        assert all("leaves with the operands of all products in BF16" in words for words in said)


def summed(x: Outputs, *, o: Callable[[Tensor], Tensor], row_sum: Callable[[Tensor], Tensor], tile: int) -> Outputs:
    """O and LSE of causal attention whose sums are rounded after every ``tile`` keys."""
    q, k, v = (x[name] for name in "qkv")
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -math.inf)
    row_max = scores.amax(-1, keepdim=True)
    out, total = torch.zeros_like(v), torch.zeros_like(row_max)
    for p, values in zip(torch.split((scores - row_max).exp(), tile, 3), torch.split(v, tile, 2), strict=True):
        out, total = o(out + p @ values), row_sum(total + p.sum(3, keepdim=True))
    return {"o": out / total, "lse": (row_max + total.log())[..., 0]}


SUMS = {
    "O": ({"o": bf16, "row_sum": torch.clone, "tile": 1}, "the accumulator of O in BF16 (1-key tiles ascending)"),
    "l": ({"o": torch.clone, "row_sum": bf16, "tile": 1}, "the row sum l in BF16 (1-key tiles ascending)"),
    "both": (
        {"o": bf16, "row_sum": bf16, "tile": 16},
        "the accumulator of O and the row sum l in BF16 (16-key tiles ascending)",
    ),
}


@pytest.mark.parametrize("sums", SUMS)
def test_sums_in_bf16_are_named_by_their_bits(sums: str) -> None:
    how, words = SUMS[sums]
    x = inputs(width=64)
    for head in heads(x, summed(x, **how)):  # type: ignore[arg-type]
        assert {q.answer for q in head.quantities} <= {"lossy", "stated"}
        assert words in head.quantities[0].words


@pytest.mark.parametrize("where", ["row", "feature", "scale"])
def test_an_error_of_bf16s_size_in_an_fp32_kernel_is_wrong(where: str) -> None:
    """Which a kernel that multiplies in BF16 is as far off as; but not there alone, nor along alpha."""
    x = inputs()
    o = attend(x)["o"]
    if where == "row":
        o[:, :, 40] *= 1.05
    elif where == "feature":
        o[..., 7] *= 1.015
    else:
        o = attend({**x, "q": 1.006 * x["q"]})["o"]
    said = words(heads(x, {"o": o})[0], "o")
    assert {"row": "row 40 is 5 % off", "feature": "feature 7", "scale": "what the scale"}[where] in said


@pytest.mark.parametrize(("operand", "biased"), [(nearest, 0), (bf16, 0), (cut, 4)])
def test_a_mean_that_operands_rounded_to_nearest_have_is_no_fault(
    operand: Callable[[Tensor], Tensor], biased: int
) -> None:
    # V's rounding is the same in all rows, so that a mean of O differs from zero far beyond what rows scatter.
    found = [head for seed in (0, 1) for x in [inputs(seed=seed)] for head in heads(x, {"o": attend(x, operand)["o"]})]
    assert sum("biased" in head.verdict.labels for head in found if head.verdict is not None) == biased
    assert sum(called_cut_off(head) for head in found) == biased


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


@pytest.mark.parametrize("rows", [130, 300])
def test_a_mean_of_torchs_tf32_is_no_fault(rows: int) -> None:
    """SDPA's math rounds root(alpha) q and root(alpha) k, not q and k: 12 of 32 such heads were biased."""
    found: list[HeadDiagnosis] = []
    for seed in (1, 2):
        x = inputs(rows=rows, width=64, seed=seed)
        q, k, v = (nearest(x[name] * a) for name, a in (("q", 64**-0.25), ("k", 64**-0.25), ("v", 1.0)))
        found += heads(x, {"o": nearest(causal(q @ k.mT).softmax(-1)) @ v})
    assert not any("biased" in head.verdict.labels for head in found if head.verdict is not None)


def in_parts(x: Tensor, y: Tensor) -> Tensor:
    """x y of two TF32 parts each, the first cut off, without the product of the smaller ones (3xTF32)."""
    (x1, x2), (y1, y2) = ((cut(t), nearest(t - cut(t))) for t in (x, y))
    return x2 @ y1 + x1 @ y2 + x1 @ y1


@pytest.mark.parametrize(
    ("family", "factor", "biased"),
    [
        ("gaussian", 1.0, False),
        ("gaussian", 1 - 2.0**-22, False),  # a tensor core's sums are cut off, too
        ("gaussian", 1 - 2.0**-19, True),
        ("peaked", 1.0, False),
    ],
)
def test_a_mean_of_products_in_tf32_parts_is_no_fault(family: str, factor: float, *, biased: bool) -> None:
    """Torch's memory-efficient SDPA of FP32 on a GPU, 4e-7 nearer to zero, was "BIASED: the kernel's fault"."""
    x = inputs(family, rows=512, width=64)
    scores = causal(factor * in_parts(x["q"], x["k"].mT) * 0.125)
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    o = factor * in_parts(probs, x["v"]) / probs.sum(-1, keepdim=True)
    found = heads(x, {"o": o})
    assert ["biased" in h.verdict.labels for h in found if h.verdict is not None] == [biased] * 2
    # No number is given for a kernel that nobody ran.
    assert not any(
        "a well-rounded kernel has" in why for h in found if h.verdict is not None for why in h.verdict.reasons
    )


def softmax_in_fp32(x: Outputs, scores: Tensor, last_bits: int = 0) -> Tensor:
    """O, of a P without its last bits."""
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    kept = (probs.view(torch.int32) & -(1 << last_bits)).view(torch.float32)
    return kept @ x["v"] / probs.sum(-1, keepdim=True)


def test_a_p_that_is_cut_off_is_not_taken_for_parts() -> None:
    """Its errors follow those of parts; O is 7.6e-7 nearer to zero, as no tensor core's sums make it: was clean."""
    x = inputs(rows=128, width=64, seed=192)
    found = heads(x, {"o": softmax_in_fp32(x, causal(x["q"] @ x["k"].mT * 0.125), 5)})
    assert ["biased" in h.verdict.labels for h in found if h.verdict is not None] == [True] * 2


def test_rows_that_share_their_errors_tell_no_more_than_one() -> None:
    """Of uniform attention less a constant, which was clean in both heads: 4 standard errors over alike rows."""
    generator = torch.Generator().manual_seed(96)
    q, k, v = (torch.randn(1, 2, 64, 32, generator=generator) for _ in range(3))
    x = {"q": 0.01 * q, "k": k, "v": v}
    o = softmax_in_fp32(x, x["q"] @ k.mT * 32**-0.5)
    found = (
        attn_diag.inspect(x["q"], k, v, o=o - o.abs().mean() * 2.0**-20, device="cpu").captures[0].observations[0].heads
    )
    assert all("biased" in h.verdict.labels for h in found if h.head is not None and h.verdict is not None)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("family", ["gaussian", "peaked"])
@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize(("rows", "width"), [(130, 64), (512, 64), (1024, 128)])
def test_torchs_own_on_a_gpu(
    backend: SDPBackend, rows: int, width: int, family: str, monkeypatch: pytest.MonkeyPatch, *, tf32: bool
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    x = {name: t.cuda() for name, t in inputs(family, rows, width, seed=1).items()}
    q, k, v = (x[name].requires_grad_() for name in "qkv")
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
        gradients = torch.autograd.grad(o, (q, k, v), x["do"])
    made = {name: t.detach() for name, t in zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=True)}
    found = heads({name: t.detach() for name, t in x.items()}, made)
    assert not any({"biased", "wrong", "lossy"} & {*h.verdict.labels} for h in found if h.verdict is not None)


def test_a_mean_of_fp32_products_is_the_kernels() -> None:
    x = inputs()
    o = attend(x)["o"] * (1 - 2.0**-18)
    found = heads(x, {"o": o})
    assert all(h.verdict is not None and "biased" in h.verdict.labels for h in found)
    assert not any(map(called_cut_off, found))


def test_operands_cut_off_are_named_beside_gradients_and_not_where_o_has_a_factor_as_biased() -> None:
    x = inputs("peaked", seed=5)
    made = attend(x, cut)
    assert all(map(called_cut_off, heads(x, made)))
    assert not any(map(called_cut_off, heads(x, {"o": attend(x)["o"] * 0.9997})))


@pytest.mark.parametrize("scale", [48**-0.5, 96**-0.5, -(48**-0.5)])
def test_a_mean_that_alpha_in_fp32_makes_is_no_fault(scale: float) -> None:
    """Every kernel has alpha in fp32, or its root on q and on k, which moves all of O alike; SDPA's math the latter."""
    x = inputs(width=48, seed=3)
    root = torch.tensor(abs(scale)).sqrt()
    scores = (root * x["q"] * (1 if scale > 0 else -1)) @ (root * x["k"]).mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    o = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ x["v"]
    found = inspected(x, o, scale)
    assert not any("biased" in h.verdict.labels for h in found if h.verdict is not None)
    assert all("biased" in h.verdict.labels for h in inspected(x, o * (1 - 2.0**-22), scale) if h.verdict is not None)


def inspected(x: dict[str, torch.Tensor], o: torch.Tensor, scale: float) -> list[HeadDiagnosis]:
    capture = attn_diag.Capture.from_tensors({**x, "o": o}, causal="top-left", scale=scale)
    return list(attn_diag.inspect_captures([capture]).captures[0].observations[0].heads)


@pytest.mark.parametrize("p", [0.1, 0.2, 0.4])
def test_a_mean_that_dropouts_factor_in_fp32_makes_is_no_fault(p: float) -> None:
    """1 / (1 - p) moves all of O alike where it is rounded to fp32: by 4.8e-8 of itself at p = 0.1."""
    x = inputs(seed=3)
    hidden = torch.ones(x["q"].shape[2], x["k"].shape[2], dtype=torch.bool).triu(1)
    probs = (x["q"] @ x["k"].mT * x["q"].shape[3] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(probs, p)

    def biased(o: Tensor) -> list[bool]:
        kept = {"dropout_mask": (dropped != 0) | hidden}
        capture = attn_diag.Capture.from_tensors({**x, **kept, "o": o}, causal="top-left", dropout_p=p)
        found = attn_diag.inspect_captures([capture]).captures[0].observations[0].heads
        return ["biased" in h.verdict.labels for h in found if h.verdict is not None]

    o = dropped @ x["v"]
    assert not any(biased(o))
    assert all(biased(o * (1 - 2.0**-22)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8(dtype: torch.dtype) -> None:
    """P is cast to the inputs' format, O returned in BF16."""

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype).float()

    def found() -> HeadDiagnosis:
        capture = attn_diag.Capture.from_tensors(given, causal="top-left")
        return attn_diag.inspect_captures([capture]).captures[0].observations[0].heads[0]

    x = {name: cast(t) for name, t in inputs().items()}
    given = {name: t.to(dtype) for name, t in x.items() if name != "do"}
    given |= {f"{name}_descale": torch.tensor(1.0) for name in given}
    given["o"] = attend(x, cast)["o"].bfloat16()
    assert [q.answer for q in found().quantities] == ["stated"]
    given["o"][:, :, 100:] = 0
    assert "rows 100-191 are zero" in words(found(), "o")
