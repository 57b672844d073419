"""Large tensors from pageable memory to a GPU, which the driver copies at a few GB/s: through pinned pieces."""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of a piece, of which two are held; and of how many a tensor is worth it. Not tuned.
_PIECE, _WORTH = 2**23, 2**24


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. What is pageable has been read once the call returns."""
    large = device.type == "cuda" and not tensor.is_cuda and tensor.numel() * tensor.element_size() >= _WORTH
    if not large or not tensor.is_contiguous() or tensor.is_pinned():
        return tensor.to(device, non_blocking=device.type == "cuda")
    with torch.cuda.device(device):
        try:
            pieces = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        except RuntimeError:  # no more memory can be pinned
            return tensor.to(device)
        found = torch.empty_like(tensor, device=device)
        source, target = (t.detach().view(-1).view(torch.uint8) for t in (tensor, found))
        gone = [torch.cuda.Event() for _ in pieces]  # type: ignore[no-untyped-call]
        both = (torch.split(t, _PIECE) for t in (source, target))
        for number, (some, there) in enumerate(zip(*both, strict=True)):
            piece = pieces[number % 2][: len(some)]
            gone[number % 2].synchronize()
            # By all of the host's threads, while the other piece travels.
            there.copy_(piece.copy_(some), non_blocking=True)
            gone[number % 2].record()
    return found
