"""What a kernel's own test suite needs: the fixture ``attn_diag`` comes with the package."""

import torch
from attention import attention

from attn_diag_pytest.fixture import AttnDiag


def test_close_to_torch() -> None:
    """The usual test, which does not see the mistake."""
    q, k, v = torch.randn(3, 1, 2, 128, 64, generator=torch.Generator().manual_seed(0)).half().unbind()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v), expected, atol=2e-3, rtol=2e-3)


def test_as_good_as_a_well_rounded_kernel(attn_diag: AttnDiag) -> None:
    """Against float64, and against what a well-rounded kernel leaves on the same inputs."""
    attn_diag.check_attention(attention, cases=["normal"], causal="top-left", dtype=torch.float16, backward=False)
