"""What a score_mod of FlexAttention does is read off its graph: captured as what it is, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flex_models import alibi, block_mask
from tiny_models import only, tokens, transformers_model, written
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.watching.live import score_mods
from attn_diag.watching.live.score_mods import read_score_mod

pytestmark = pytest.mark.filterwarnings("ignore")  # of FlexAttention that is not compiled, and of the compiler
BATCH, HEADS, LENGTH, DIM = 2, 4, 96, 32
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OF_BATCH = torch.stack([SLOPES, SLOPES.flip(0)])
BIASES = torch.randn(HEADS, 2 * LENGTH, generator=torch.Generator().manual_seed(5)).bfloat16()
DOCUMENT = torch.arange(LENGTH) // 40
WHOLE, SHARED = (1, HEADS, LENGTH, LENGTH), (1, 1, LENGTH, LENGTH)
Mod = Callable[..., Tensor]

# What is read of each: names of tensors, and metadata. "causal" beside a block mask of row >= key.
READ: dict[str, tuple[Mod, dict[str, Any]]] = {
    "nothing": (lambda s, *_: s, {}),
    "ALiBi": (lambda s, _b, h, q, k: s - SLOPES[h] * (q - k).abs(), {"alibi_slopes": SLOPES, "alibi_origin": "row"}),
    "ALiBi, causal": (lambda s, _b, h, q, k: s + (k - q) * SLOPES[h], {"alibi_slopes": SLOPES, "alibi_origin": "row"}),
    "slopes of exp2, causal": (alibi, {"alibi_slopes": 2.0 ** -torch.arange(1.0, 5), "alibi_origin": "row"}),
    "ALiBi by key": (
        lambda s, _b, h, _q, k: s + SLOPES[h] * k, {"alibi_slopes": SLOPES, "alibi_origin": "first-key"}
    ),
    "ALiBi by key from the last": (
        lambda s, _b, h, _q, k: s + SLOPES[h] * (k - (LENGTH - 1)),
        {"alibi_slopes": SLOPES, "alibi_origin": "last-key"},
    ),
    "slopes of each sequence": (
        lambda s, b, h, q, k: s - OF_BATCH[b, h] * (k - q).abs(), {"alibi_slopes": OF_BATCH, "alibi_origin": "row"}
    ),
    # Beyond the diagonal it grows, and nothing hides that.
    "ALiBi that is not symmetric": (lambda s, _b, h, q, k: s + (k - q) * SLOPES[h], {"mask": WHOLE}),
    "q - 2k, causal": (lambda s, _b, h, q, k: s - SLOPES[h] / 8 * torch.sub(q, k, alpha=2), {"mask": WHOLE}),
    "relative": (lambda s, _b, h, q, k: s + BIASES[h, k - q + LENGTH], {"mask": WHOLE}),
    "relative, twice indexed": (lambda s, _b, h, q, k: BIASES[h][k - q + LENGTH] + s, {"mask": WHOLE}),
    "by key": (lambda s, _b, h, _q, k: s + BIASES[h, k], {"mask": (1, HEADS, 1, LENGTH)}),
    "by row": (lambda s, b, _h, q, _k: s - (b + 1) * q.float().sqrt(), {"mask": (BATCH, 1, LENGTH, 1)}),
    "relative, causal": (lambda s, _b, _h, q, k: s + BIASES[0, q - k + LENGTH], {"mask": SHARED}),
    "hidden": (
        lambda s, _b, _h, q, k: torch.where(DOCUMENT[q] == DOCUMENT[k], s, -math.inf), {"mask": SHARED}
    ),
    "hidden, causal": (
        lambda s, _b, _h, q, k: s.masked_fill(DOCUMENT[q] != DOCUMENT[k], -3e38), {"mask": SHARED}
    ),
    "hidden and biased": (
        lambda s, _b, h, q, k: torch.where(q >= k, s + SLOPES[h] * (k - q), -math.inf), {"mask": WHOLE}
    ),
    "softcap": (lambda s, *_: 3 * torch.tanh(s / 3), {"softcap": 3.0}),
    "softcap by a reciprocal": (lambda s, *_: torch.tanh(s * (1 / 7)) * 7.0, {"softcap": 7.0}),
    "softcap of a scale": (lambda s, *_: torch.tanh(s) * 2, {"softcap": 2.0, "scale": 2 * DIM**-0.5}),
    "softcap and ALiBi": (
        lambda s, _b, h, q, k: 3 * torch.tanh(s / 3) - SLOPES[h] * (q - k).abs(),
        {"softcap": 3.0, "alibi_slopes": SLOPES, "alibi_origin": "row"},
    ),
    "factor": (lambda s, *_: s * torch.tensor(2.5), {"scale": 2.5 * DIM**-0.5}),
    "factor of a bias": (
        lambda s, _b, h, _q, k: (s + BIASES[h, k]) / 2, {"mask": (1, HEADS, 1, LENGTH), "scale": 0.5 * DIM**-0.5}
    ),
    "cast": (lambda s, *_: s.double() + 1, {"mask": (1, 1, 1, 1)}),
}  # fmt: skip
REFUSED: dict[str, tuple[Mod, str]] = {
    "clamped": (lambda s, *_: s.clamp(-9, 9), "gives the score to aten.clamp.default"),
    "a factor a head": (
        lambda s, _b, h, _q, _k: s * SLOPES[h], "to aten.mul.Tensor with what depends on the head"
    ),
    "a factor a row": (lambda s, _b, _h, q, _k: s * q.float().log1p(), "with what depends on the row"),
    "negative": (lambda s, *_: -2 * s, "multiplies the score by -2"),
    "subtracted": (lambda s, _b, _h, q, _k: q - s, "gives the score to aten.sub.Tensor"),
    "zero": (lambda s, _b, _h, q, k: torch.where(q >= k, s, 0.0), "puts 0 in a score's place"),
    "hidden, and halved": (
        lambda s, _b, _h, q, k: torch.where(q >= k, s, -2e38) * 0.5, "puts -1e+38 in a score's place"
    ),
    "hidden, and shown again": (
        lambda s, _b, _h, q, k: torch.where(q >= k, s, -2e38) + torch.where(q >= k, 0.0, 2e38),
        "puts 0 in a score's place",
    ),
    "two branches": (lambda s, _b, _h, q, k: torch.where(q >= k, s, 2 * s), "the score twice in aten.where.self"),
    "squared": (lambda s, *_: s * s, "the score twice in aten.mul.Tensor"),
    "capped bias": (lambda s, _b, _h, q, k: torch.tanh(s + k - q), "gives the score to aten.tanh.default"),
    "by itself": (lambda s, _b, _h, q, k: torch.where(s > 0, s, q - k), "the score twice in aten.where.self"),
    "rounded": (lambda s, *_: s.bfloat16().float(), "gives the score to aten._to_copy.default"),
    "of no score": (lambda s, _b, _h, q, k: (q - k).to(s.dtype), "leaves nothing of the score"),
    "untraceable": (lambda s, _b, _h, q, k: s if q >= k else 2 * s, "torch cannot trace"),
}  # fmt: skip


def drawn() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, h, LENGTH, DIM, generator=g).bfloat16() for h in (HEADS, 2, 2)]


def captured(mod: Mod, folder: Path, *, causal: bool) -> Capture:
    blocks = block_mask(lambda _b, _h, q, k: q >= k, length=LENGTH) if causal else None
    q, k, v = drawn()
    with torch.no_grad(), attn_diag.capture(None, folder, batch=None) as recorder:
        flex.flex_attention(q, k, v, score_mod=mod, block_mask=blocks, enable_gqa=True)
    return only(recorder)


@pytest.mark.parametrize("case", READ)
def test_what_is_read_is_what_the_kernel_did(case: str, tmp_path: Path) -> None:
    mod, expected = READ[case]
    capture = captured(mod, tmp_path, causal="causal" in case)
    m = capture.metadata
    found: dict[str, Any] = {name: getattr(m, name) for name in ("softcap", "scale") if getattr(m, name) is not None}
    if "alibi_slopes" in capture.tensors:
        found |= {"alibi_slopes": capture.tensors["alibi_slopes"][...], "alibi_origin": m.alibi_origin}
    if "mask" in capture.tensors and not ("causal" in case and "alibi_slopes" in found):
        found["mask"] = tuple(capture.tensors["mask"].shape)
        assert (capture.tensors["mask"].dtype == torch.bool) == (case in ("hidden", "hidden, causal"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == pytest.approx(value)
        assert same, (name, found[name])
    # FlexAttention that is not compiled rounds P as it is in no fused kernel, and nothing else.
    diagnosis = attn_diag.inspect_captures([capture], device="cpu").captures[0]
    assert diagnosis.assumptions.ok
    labels = {label for h in diagnosis.observations[0].heads if h.verdict for label in h.verdict.labels}
    assert labels <= {"clean", "undecided"}, labels


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(case: str) -> None:
    mod, words = REFUSED[case]
    q, k, _ = drawn()
    found = read_score_mod(mod, q, k, None)
    assert found["refused"].startswith("a score_mod that ")
    assert words in found["refused"]
    assert found["refused"].endswith("are read")


def test_a_refusal_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = drawn()
    with torch.no_grad(), attn_diag.capture(None, tmp_path) as recorder:
        flex.flex_attention(q, k, v, score_mod=REFUSED["clamped"][0], enable_gqa=True)
    assert not recorder.written
    assert "a score_mod that gives the score to aten.clamp.default" in caplog.text


@pytest.mark.parametrize("slope", [0.3, 2.0**-8])
@pytest.mark.parametrize("off", [0.0, 2.0**-20])
def test_slopes_are_alibis_to_the_last_bit_or_none(slope: float, off: float) -> None:
    """One number that is 4 roundings off makes it a bias like any other."""
    q, k, _ = drawn()
    table = -torch.tensor(slope) * torch.arange(LENGTH)
    table[50] *= 1 + off
    found = read_score_mod(lambda s, _b, _h, q, k: s + table[(q - k).abs()], q, k, None)
    assert ("alibi_slopes" in found) == (off == 0)


def test_long_sequences_have_slopes_and_no_written_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.empty(1, 8, 20000, 1), torch.empty(1, 8, 20000, 1)
    slopes = 2.0 ** -torch.arange(1.0, 9)
    found = read_score_mod(lambda s, _b, h, q, k: s - slopes[h] * (q - k).abs(), q, k, None)
    assert torch.equal(found["alibi_slopes"], slopes)
    assert found["mask"] is None
    refused = read_score_mod(lambda s, _b, h, q, k: s - slopes[h] * (q - k + 1).abs(), q, k, None)["refused"]
    assert "adds a bias of more than 16,777,216 numbers" in refused
    monkeypatch.setattr(score_mods, "_MOST_SCORES", 100)
    many = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    short = torch.empty(1, 8, 20, 1)
    found = read_score_mod(lambda s, _b, _h, _q, k: s + k.float().sqrt(), short, short, many)
    assert "adds a bias of more than" in found["refused"]


# The others were run by hand: as here, and `clean`.
COMPILED = ("ALiBi, causal", "softcap by a reciprocal")


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_it_is_read_alike(case: str, tmp_path: Path) -> None:
    """By inductor, whose forward runs on a CPU."""
    mod, expected = READ[case]
    blocks = block_mask(lambda _b, _h, q, k: q >= k, length=LENGTH) if "causal" in case else None
    q, k, v = drawn()
    torch._dynamo.reset()
    with torch.no_grad(), attn_diag.capture(None, tmp_path, batch=None) as recorder:
        torch.compile(flex.flex_attention)(q, k, v, score_mod=mod, block_mask=blocks, enable_gqa=True)
    torch._dynamo.reset()
    capture = only(recorder)
    assert capture.metadata.softcap == expected.get("softcap")
    assert capture.scale == pytest.approx(DIM**-0.5)
    slopes = expected.get("alibi_slopes")
    assert (slopes is None) == ("alibi_slopes" not in capture.tensors)
    if slopes is not None:
        assert torch.equal(capture.tensors["alibi_slopes"][...], slopes)
    diagnosis = attn_diag.inspect_captures([capture], device="cpu").captures[0]
    assert diagnosis.assumptions.ok
    assert {label for h in diagnosis.observations[0].heads if h.verdict for label in h.verdict.labels} == {"clean"}


@pytest.mark.slow
def test_a_compiled_gemma_2_by_flex_attention_has_its_softcap(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tiny = transformers_model("gemma2", "flex_attention")
    model = tiny.model.to(torch.bfloat16).eval()
    torch._dynamo.reset()
    with torch.no_grad(), attn_diag.capture(model, tmp_path, batch=None) as recorder:
        torch.compile(model)(tokens())
    torch._dynamo.reset()
    assert not recorder.dropped
    captures = written(recorder)
    assert [c.metadata.softcap for c in captures] == [2.0, 2.0]
    for diagnosis in attn_diag.inspect_captures(captures, device="cpu").captures:
        assert diagnosis.assumptions.ok
        assert not any("wrong" in h.verdict.labels for h in diagnosis.observations[0].heads if h.verdict)
