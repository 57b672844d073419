"""Large tensors arrive on a GPU as they were."""

from __future__ import annotations

import pytest
import torch

from attn_diag.head.transfer import on_device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3,), (2**13 + 1, 2049), (2, 2**11, 2**12)])
def test_tensors_arrive_as_they_were(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = tensor.clone()
    for given in (tensor, tensor.pin_memory(), tensor.transpose(0, -1)):
        there = on_device(given, torch.device("cuda"))
        assert there.is_cuda
        assert torch.equal(there.contiguous().cpu().view(torch.uint8), given.contiguous().view(torch.uint8))
    there = on_device(tensor, torch.device("cuda"))
    tensor.zero_()  # its owner's again, once the call has returned
    assert torch.equal(there.cpu().view(torch.uint8), expected.view(torch.uint8))
