"""torch's own attention under the plugin: the fixture used as a project uses it, against committed baselines.

On other processors or versions than the baselines' the bits may be others; there the statistical tests count alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_diag_pytest import AttnDiag


@pytest.mark.attn_diag_baseline
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sdpa_on_the_cpu_in_bf16(attn_diag: AttnDiag, causal: bool) -> None:
    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    cases = ["normal", "pairs", "normaliser-up"]
    report = attn_diag.check_attention(sdpa, causal=causal, cases=cases, head_dim=32, device="cpu")
    assert [case.name for case in report.cases] == cases
    assert all("dq" in case.outputs for case in report.cases)


def test_softmax_in_bf16_is_unbiased(attn_diag: AttnDiag) -> None:
    scores = torch.randn(4, 4, 64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = attn_diag.assert_unbiased(scores.softmax(-1), scores.double().softmax(-1), name="softmax")
    # One cast of an fp32 result: its excess is all but zero, and a bias of a hundredth of an ulp would be seen.
    assert found.minimum_detectable_ulp is None or found.minimum_detectable_ulp < 0.01


def test_a_truncated_softmax_is_not(attn_diag: AttnDiag) -> None:
    scores = torch.randn(4, 4, 64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    truncated = (scores.float().softmax(-1).view(torch.int32) & -65536).view(torch.float32).bfloat16()
    with pytest.raises(pytest.fail.Exception, match="softmax is biased"):
        attn_diag.assert_unbiased(truncated, scores.double().softmax(-1), name="softmax")
