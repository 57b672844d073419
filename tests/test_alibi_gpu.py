"""ALiBi of real kernels on a GPU: their LSE, and how many bits of O the emulation has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.watching.live.kernels import alibi_origin

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SLOPES = 2.0 ** -torch.arange(1.0, 5)


def drawn(rows: int = 512, keys: int = 512) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 4, n, 64, generator=g).bfloat16().cuda() for n in (rows, keys, keys)]


def judged(tensors: dict[str, Any], **metadata: Any) -> float:
    """How many of O's bits the best recipe has; everything that was captured is right."""
    capture = Capture.from_tensors({**tensors, "alibi_slopes": SLOPES}, **metadata)
    found = attn_diag.inspect_captures([capture]).captures[0]
    assert found.assumptions.ok, found.assumptions.message
    assert not any("wrong" in h.verdict.labels for h in found.observations[0].heads if h.verdict)
    return float(attn_diag.identify(capture).candidates[0].agreement)


@pytest.mark.parametrize("window", [(-1, -1), (99, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attn_2(causal: bool, window: tuple[int, int]) -> None:
    flash_attn = pytest.importorskip("flash_attn")
    q, k, v = drawn(448)
    o, lse, _ = flash_attn.flash_attn_func(
        *(t.transpose(1, 2) for t in (q, k, v)), causal=causal, window_size=window, alibi_slopes=SLOPES.cuda(),
        return_attn_probs=True,
    )  # fmt: skip
    bits = judged(
        {"q": q, "k": k, "v": v, "o": o.transpose(1, 2), "lse": lse}, causal="bottom-right" if causal else "none",
        window=None if window == (-1, -1) else window, alibi_origin=alibi_origin(causal, window, 512),
    )  # fmt: skip
    assert bits >= 0.998


def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = drawn()
    slopes = SLOPES.cuda()

    def bias(score: Tensor, _b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (row - key).abs()

    mask = create_block_mask(lambda _b, _h, row, key: row >= key, None, None, 512, 512, device="cuda")
    o = torch.compile(flex_attention)(q, k, v, score_mod=bias, block_mask=mask)
    assert judged({"q": q, "k": k, "v": v, "o": o}, causal="top-left") >= 0.998
