"""Kernels in plain torch: clean ones, and one for every way in which a call may depend on what should not matter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Fn = Callable[[Tensor, Tensor, Tensor], Tensor]
TILE = 32


def repeated(q: Tensor, x: Tensor) -> Tensor:
    """Key heads for every query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, order: list[slice] | None = None) -> Tensor:
    """In fp32; P_bar V is added in the tiles of keys given, one after the other."""
    k, v = repeated(q, k), repeated(q, v)
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros(q.shape[:3] + v.shape[3:])
    for tile in order or [slice(None)]:
        total = total + exponentials[..., tile].bfloat16().float() @ v.float()[:, :, tile]
    o: Tensor = (total / exponentials.sum(-1, keepdim=True)).to(q.dtype)
    return o


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


def plain_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, causal=True)


def rounded_everywhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every intermediate in BF16, as the operators return it."""
    k, v = repeated(q, k), repeated(q, v)
    o: Tensor = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    return o


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def tiles(keys: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, keys)) for start in range(0, keys, size)]


def split_kv(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Independent splits of the keys, merged through L, as FlashAttention-2 does it where there are few heads."""
    k, v = repeated(q, k), repeated(q, v)
    total, each = torch.zeros(q.shape[:3] + v.shape[3:]), tiles(k.shape[2], size)
    parts = [q.float() @ k[:, :, tile].float().mT * q.shape[-1] ** -0.5 for tile in each]
    sums = [scores.logsumexp(-1, keepdim=True) for scores in parts]
    whole = torch.cat(sums, -1).logsumexp(-1, keepdim=True)
    for tile, scores, own in zip(each, parts, sums, strict=True):
        probs = (scores - scores.amax(-1, keepdim=True)).exp()
        part = probs.bfloat16().float() @ v[:, :, tile].float() / probs.sum(-1, keepdim=True)
        total = total + part * (own - whole).exp()
    return total.to(q.dtype)


def batch_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence alone has its keys split."""
    return split_kv(q, k, v, 64) if len(q) == 1 else attend(q, k, v)


def with_splits(q: Tensor, k: Tensor, v: Tensor, num_splits: int = 1) -> Tensor:
    return attend(q, k, v, order=tiles(k.shape[2], -(-k.shape[2] // num_splits)))


def losing_splits(q: Tensor, k: Tensor, v: Tensor, num_splits: int = 1) -> Tensor:
    """The last of several splits is not added."""
    each = tiles(k.shape[2], -(-k.shape[2] // num_splits))
    return attend(q, k, v, order=each[:-1] or each)


def leaking_padding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys are filled up to a tile with zeros, which are not masked."""
    more = -k.shape[2] % TILE
    return attend(q, *(torch.nn.functional.pad(x, [0, 0, 0, more]) for x in (k, v)))


def unwritten_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only whole tiles of rows are written."""
    o = torch.empty_like(q)
    whole = q.shape[2] // TILE * TILE
    with torch.no_grad():
        o[:, :, :whole] = attend(q[:, :, :whole], k, v)
    return o


def unwritten_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys are filled up to a tile with what is in memory; their P is 0, which NaN survives."""
    keys = k.shape[2]
    k, v = repeated(q, k), repeated(q, v)
    wide = torch.empty(*v.shape[:2], keys - keys % -TILE, v.shape[3])
    if not torch.are_deterministic_algorithms_enabled():
        # NaN there is the tool's alone, not what an earlier test left.
        wide.zero_()
    wide[:, :, :keys] = v.float()
    probs = torch.nn.functional.pad((q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1), [0, -keys % TILE])
    return (probs @ wide).to(q.dtype)


def future_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """V in 8 bits, with one scale for all tokens of a head."""
    scale = v.detach().abs().amax((2, 3), keepdim=True) / 127
    coarse = (v / scale).round() * scale
    return attend(q, k, v + (coarse - v).detach(), causal=True)


def shared_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """V in 8 bits, with one scale for the batch."""
    scale = v.detach().abs().amax() / 127
    return attend(q, k, v + ((v / scale).round() * scale - v).detach())


def next_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Under GQA each group takes the next group's key head."""
    if q.shape[1] != k.shape[1]:
        at = (torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1]) + 1) % k.shape[1]
        k, v = k[:, at], v[:, at]
    return attend(q, k, v)


def interleaved_key_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query head h takes key head h mod Hk."""
    at = torch.arange(q.shape[1]) % k.shape[1]
    return attend(q, k[:, at], v[:, at])


def atomics(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tiles of keys are added in an order of the moment's."""
    each, total = tiles(k.shape[2], 8), torch.zeros_like(q)
    probs = (q.float() @ repeated(q, k).float().mT * q.shape[-1] ** -0.5).softmax(-1)
    for i in torch.randperm(len(each)).tolist():
        total = (total + probs[..., each[i]] @ repeated(q, v).float()[:, :, each[i]]).to(q.dtype)
    return total


class _UnsteadyBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return (grad.double() * (1 + 2**-7 * torch.rand(grad.shape).sub(0.5))).to(grad.dtype)


def unsteady_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """dQ alone is another each time."""
    return attend(_UnsteadyBackward.apply(q), k, v)  # type: ignore[no-untyped-call]


def reads_beyond(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Takes a tile of V's rows whatever their number is, where memory allows, and masks their P alone."""
    keys, (b, h, t, d) = v.shape[2], v.stride()
    wide = keys - keys % -TILE
    last = v.storage_offset() + (v.shape[0] - 1) * b + (v.shape[1] - 1) * h + (wide - 1) * t + (v.shape[3] - 1) * d
    if last >= v.untyped_storage().nbytes() // v.element_size():
        return attend(q, k, v)
    seen = v.as_strided((*v.shape[:2], wide, v.shape[3]), v.stride()).float()
    probs = (q.float() @ repeated(q, k).float().mT * q.shape[-1] ** -0.5).softmax(-1)
    return (torch.nn.functional.pad(probs, [0, wide - keys]) @ repeated(q, seen)).to(q.dtype)


def misread_layout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Takes V as if it were contiguous."""
    return attend(q, k, v if v.is_contiguous() else v.as_strided(v.shape, torch.empty(v.shape).stride()))


def first_item(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Later batch items take the first one's last key."""
    k = torch.cat([k[:, :, :-1], k[:1, :, -1:].expand(len(k), -1, -1, -1)], 2)
    return attend(q, k, v)


def place_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch items but the first have their keys split."""
    whole = attend(q[:1], k[:1], v[:1])
    return torch.cat([whole, split_kv(q[1:], k[1:], v[1:], 16)])


_KEPT: dict[tuple[int, ...], Tensor] = {}


def kept_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O's memory is allocated once a shape, and handed out at every call."""
    o = _KEPT.setdefault(tuple(q.shape), torch.zeros_like(q.detach()))
    with torch.no_grad():
        return o.copy_(attend(q, k, v))


def kept_workspace(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """V's last tile holds what the longest call before left there, which counts a little."""
    keys, more = k.shape[2], -k.shape[2] % TILE
    workspace = _KEPT.setdefault((*q.shape[:2], q.shape[3]), torch.zeros(*q.shape[:2], 1024, q.shape[3]))
    with torch.no_grad():
        workspace[:, :, :keys] = repeated(q, v).float()
    values = torch.cat([repeated(q, v).float(), workspace[:, :, keys : keys + more].clone()], 2)
    scores = q.float() @ repeated(q, k).float().mT * q.shape[-1] ** -0.5
    return (torch.nn.functional.pad(scores, [0, more], value=-20.0).softmax(-1) @ values).to(q.dtype)


def coarse_inference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without autograd another kernel is taken, with another scale."""
    return attend(q, k, v) if torch.is_grad_enabled() else attend(q * 0.875, k, v)


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return grad if any(grad.stride()) else torch.zeros_like(grad)


def misread_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """dO of one number lies in one element of memory; others are read."""
    return _ContiguousGradient.apply(attend(q, k, v))  # type: ignore[no-untyped-call, no-any-return]


def fourth_item(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch items from the fourth on take each other's heads."""
    return attend(q, k, torch.cat([v[:3], v[3:].flip(1)]))


class _NormedGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        # 1 for a whole dO.
        whole = grad.abs().amax((2, 3), keepdim=True).clamp(min=2.0**-100)
        half = grad.shape[2] > 1 and bool((grad[:, :, : grad.shape[2] // 2] == 0).all())
        return grad / whole if half else grad


def normed_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A dO whose first rows are 0 is scaled to 1, and not back."""
    return _NormedGradient.apply(attend(q, k, v))  # type: ignore[no-untyped-call, no-any-return]


def changed_input(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scales q where it is."""
    with torch.no_grad():
        q.mul_(q.shape[-1] ** -0.5)
    return torch.softmax(q.float() @ repeated(q, k).float().mT, -1).to(q.dtype) @ repeated(q, v)


CLEAN: dict[str, tuple[Fn | str, str]] = {
    "sdpa": ("sdpa", "none"),
    "sdpa-causal": (sdpa_causal, "top-left"),
    "plain": (plain, "none"),
    "plain-causal": (plain_causal, "top-left"),
    "rounded-everywhere": (rounded_everywhere, "none"),
    "with-splits": (with_splits, "none"),
    "fa2": ("fa2", "top-left"),
    "cudnn": ("cudnn", "none"),
}
# Kernel, mask, and the arrangement that is named.
PLANTED: dict[str, tuple[Fn, str, str]] = {
    "batch-split": (batch_split, "none", "batch-size"),
    "leaking-padding": (leaking_padding, "none", "padding"),
    "unwritten-tile": (unwritten_tile, "none", "uninitialised"),
    "unwritten-keys": (unwritten_keys, "none", "uninitialised"),
    "future-scale": (future_scale, "top-left", "future-token"),
    "shared-scale": (shared_scale, "none", "other-items"),
    "next-key-head": (next_key_head, "none", "gqa"),
    "interleaved-key-heads": (interleaved_key_heads, "none", "gqa"),
    "atomics": (atomics, "none", "run-to-run"),
    "unsteady-gradient": (unsteady_gradient, "none", "run-to-run"),
    "losing-splits": (losing_splits, "none", "splits"),
    "reads-beyond": (reads_beyond, "none", "memory"),
    "misread-layout": (misread_layout, "none", "strides"),
    "first-item": (first_item, "none", "other-items"),
    "place-split": (place_split, "none", "batch-position"),
    "kept-output": (kept_output, "none", "other-calls"),
    "kept-workspace": (kept_workspace, "none", "other-calls"),
    "coarse-inference": (coarse_inference, "none", "no-grad"),
    "misread-gradient": (misread_gradient, "none", "strides"),
    "fourth-item": (fourth_item, "none", "batch-size"),
    "normed-gradient": (normed_gradient, "none", "accumulation"),
}
