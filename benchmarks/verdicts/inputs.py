"""Inputs for planted kernels: named families of q, k, v and dO, in named settings of mask, shape and batch.

``draw("peaked", "gqa")`` returns one ``Inputs``; ``from_capture(path)`` reads a real one. Everything is seeded.

A family says what the numbers look like, a setting what the call looks like. ``Inputs.features`` lists in words what a
defect may need ("gqa", "window", "odd", …), so that a defect is planted only where it can act.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

Causal = Literal["none", "top-left", "bottom-right"]


def in_blocks(x: Tensor, axis: int, size: int) -> Tensor:
    """The axis, counted from the front, cut into blocks of ``size``: [..., n, ...] becomes [..., n/size, size, ...]."""
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one attention call is given, and the gradient of its output."""

    q: Tensor
    """[B, Hq, Tq, D], BF16 or FP16."""
    k: Tensor
    """[B, Hk, Tk, D]; Hq is a multiple of Hk."""
    v: Tensor
    """[B, Hk, Tk, D]."""
    do: Tensor
    """Gradient of O, [B, Hq, Tq, D]."""
    scale: float
    causal: Causal = "top-left"
    window: tuple[int, int] | None = None
    """Keys to the left and to the right of the diagonal that a row sees, both inclusive; -1: no limit."""
    softcap: float | None = None
    """c in S = c tanh(scale QK^T / c)."""
    key_mask: Tensor | None = None
    """[B, Tk], true: attend."""
    name: str = ""
    seed: int = 0

    @property
    def group(self) -> int:
        """Query heads to one key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def diagonal(self) -> int:
        """What a row's number lies below the number of the key on its diagonal."""
        return self.k.shape[2] - self.q.shape[2] if self.causal == "bottom-right" else 0

    def visible(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Which keys [..., Bk] each row [..., Bq] sees, bool [B or 1, 1, ..., Bq, Bk]; rows and keys past the end too.

        Args:
            rows (Tensor): Numbers of query rows; those past the end see what their number says.
            keys (Tensor): Numbers of keys; those past the end are never seen.
        """
        t_k = self.k.shape[2]
        row, key = rows[..., :, None] + self.diagonal, keys[..., None, :]
        seen = (key < t_k).expand(*key.shape[:-2], rows.shape[-1], keys.shape[-1])
        if self.causal != "none":
            seen = seen & (key <= row)
        if self.window is not None:
            left, right = self.window
            seen = seen & (key >= row - left) if left >= 0 else seen
            seen = seen & (key <= row + right) if right >= 0 else seen
        if self.key_mask is None:
            return seen[None, None]
        kept = self.key_mask[:, keys.clamp(max=t_k - 1)]
        return (seen & kept[..., None, :])[:, None]

    @cached_property
    def features(self) -> frozenset[str]:
        """What this call has that a defect may need."""
        batch, heads, t_q, d = self.q.shape
        t_k = self.k.shape[2]
        found = {
            "causal": self.causal != "none",
            "full": self.causal == "none" and self.window is None,
            "heads": heads > 1,
            "batch": batch > 1,
            "gqa": self.group > 1,
            "gqa-heads": self.group > 1 and self.k.shape[1] > 1,
            "window": self.window is not None and 0 <= self.window[0] < t_k - 1,
            "softcap": self.softcap is not None,
            "padding": self.key_mask is not None and not bool(self.key_mask.all()),
            "odd": bool(t_k % 64 and t_q % 64),
            "narrow-tail": bool(d % 32),
            "inexact-scale": self.scale != 2.0 ** round(torch.tensor(self.scale).log2().item()),
            "rectangular": t_q != t_k,
            "empty-rows": self.causal == "bottom-right" and t_q > t_k,
            "tiles": min(t_q, t_k) > 256,
            "bf16": self.q.dtype == torch.bfloat16,
        }
        return frozenset(name for name, there in found.items() if there)

    def to(self, device: torch.device | str) -> Inputs:
        moved: dict[str, Any] = {n: getattr(self, n).to(device) for n in ("q", "k", "v", "do")}
        mask = None if self.key_mask is None else self.key_mask.to(device)
        return replace(self, key_mask=mask, **moved)


@dataclass(frozen=True)
class Shape:
    """Sizes and formats of a call."""

    t_q: int = 512
    t_k: int | None = None
    d: int = 64
    batch: int = 1
    heads: int = 2
    kv_heads: int | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of q and of k."""
        keys = self.t_q if self.t_k is None else self.t_k
        return (
            (self.batch, self.heads, self.t_q, self.d),
            (self.batch, self.heads if self.kv_heads is None else self.kv_heads, keys, self.d),
        )


Draw = Callable[[torch.Generator, Shape], tuple[Tensor, Tensor, Tensor]]


def _normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator)


def _gaussian(g: torch.Generator, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1) throughout."""
    of_q, of_k = s.sizes
    return _normal(g, of_q), _normal(g, of_k), _normal(g, of_k)


def _pair(g: torch.Generator, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in identical pairs, so that every maximum is there twice, and V in a small range of one sign."""
    of_q, of_k = s.sizes
    q, k = 2 * _normal(g, of_q), _normal(g, of_k)
    k[..., 1::2, :] = k[..., 0 : 2 * (k.shape[2] // 2) : 2, :]
    return q, k, -1 - 0.25 * torch.rand(of_k, generator=g)


def _low_rank(g: torch.Generator, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of rank 4, V of rank 2 around a common row."""
    of_q, of_k = s.sizes
    lead = of_k[:2]
    basis = _normal(g, (*lead, 4, s.d)) / 2
    q = _normal(g, (*of_q[:3], 4)) @ basis.repeat_interleave(of_q[1] // of_k[1], 1)
    k = _normal(g, (*of_k[:3], 4)) @ basis
    v = _normal(g, (*lead, 1, s.d)) + 0.3 * (_normal(g, (*of_k[:3], 2)) @ _normal(g, (*lead, 2, s.d)))
    return q, k, v


def _peaked(g: torch.Generator, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Logits up to about 80: a few keys share a row's mass."""
    of_q, of_k = s.sizes
    return 4.5 * _normal(g, of_q), 4.5 * _normal(g, of_k), _normal(g, of_k)


def _sinks(g: torch.Generator, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """The first key takes most of the mass of every row, and its V is small, as in trained language models."""
    q, k, v = _gaussian(g, s)
    sink = _normal(g, (*k.shape[:2], 1, s.d))
    sink = sink / sink.norm(dim=-1, keepdim=True)
    q += 8 * sink.repeat_interleave(q.shape[1] // k.shape[1], 1)
    k[..., :1, :] = sink * s.d**0.5 * 1.1
    v[..., 0, :] *= 0.05
    return q, k, v


def _near_uniform(g: torch.Generator, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """A fresh model: logits of size 0.02, so that a row is the mean of V."""
    q, k, v = _gaussian(g, s)
    return 0.02 * q, k, v


def _one_hot(g: torch.Generator, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Each row has one key to itself: its own, or the one 17 back for every third row."""
    of_q, of_k = s.sizes
    k = _normal(g, of_k)
    k = k / k.norm(dim=-1, keepdim=True) * s.d**0.5
    target = torch.arange(s.t_q) % of_k[2]
    target = torch.where((target % 3 == 0) & (target >= 17), target - 17, target)
    q = 6 * k[..., target, :].repeat_interleave(of_q[1] // of_k[1], 1) + 0.2 * _normal(g, of_q)
    return q, k, _normal(g, of_k)


def _outliers(g: torch.Generator, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Two channels of q and k are 20 and 12 times as large as the others, with a common sign."""
    q, k, v = (x.clone() for x in _gaussian(g, s))
    for x in (q, k):
        x[..., 3] = 12 + x[..., 3]
        x[..., s.d // 2 + 1] = -6 + x[..., s.d // 2 + 1]
    return q, k, v


FAMILIES: dict[str, Draw] = {
    "gaussian": _gaussian,
    "pair": _pair,
    "low_rank": _low_rank,
    "peaked": _peaked,
    "sinks": _sinks,
    "near_uniform": _near_uniform,
    "one_hot": _one_hot,
    "outliers": _outliers,
}


@dataclass(frozen=True)
class Setting:
    """What a call looks like: sizes, mask, and how its sequences and gradients relate."""

    shape: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    after: Callable[[Inputs, torch.Generator], Inputs] | None = None


def share_prompt(x: Inputs, _: torch.Generator) -> Inputs:
    """Every sequence begins with three quarters of the first one's tokens; the loss is on what differs."""
    cut = x.q.shape[2] * 3 // 4
    shared: dict[str, Any] = {n: getattr(x, n).clone() for n in ("q", "k", "v", "do")}
    for name in ("q", "k", "v"):
        shared[name][1:, :, :cut] = shared[name][:1, :, :cut]
    return replace(x, **shared)


def copy_sequences(x: Inputs, _: torch.Generator) -> Inputs:
    """All sequences are copies of the first, gradients too."""
    return replace(x, **{n: getattr(x, n)[:1].expand_as(getattr(x, n)).contiguous() for n in ("q", "k", "v", "do")})


def copy_some(x: Inputs, _: torch.Generator) -> Inputs:
    """The second half of the sequences repeats the first half, with gradients of their own."""
    half = x.q.shape[0] // 2
    repeated: dict[str, Any] = {n: torch.cat([getattr(x, n)[:half]] * 2) for n in ("q", "k", "v")}
    return replace(x, **repeated)


def _loss_on(share: float) -> Callable[[Inputs, torch.Generator], Inputs]:
    def keep(x: Inputs, g: torch.Generator) -> Inputs:
        """DO is zero but in a few rows, the same ones in every head."""
        count = max(1, round(share * x.q.shape[2]))
        kept = torch.zeros(x.q.shape[0], 1, x.q.shape[2], 1, dtype=torch.bool)
        for row in kept[:, 0, :, 0]:
            row[torch.randperm(x.q.shape[2], generator=g)[:count]] = True
        return replace(x, do=x.do * kept)

    return keep


def pad_end(x: Inputs, g: torch.Generator) -> Inputs:
    """Each sequence ends early: later keys are masked, later rows of dO are zero."""
    t = x.k.shape[2]
    lengths = torch.randint(t // 2, t - 3, (x.q.shape[0],), generator=g)
    kept = torch.arange(t) < lengths[:, None]
    return replace(x, key_mask=kept, do=x.do * kept[:, None, : x.q.shape[2], None])


def scale_gradients(x: Inputs, g: torch.Generator) -> Inputs:
    """Gradients as training has them: small, and rows of very different size."""
    rows = torch.exp(1.5 * torch.randn((*x.do.shape[:3], 1), generator=g))
    return replace(x, do=(x.do.float() * rows * 2.0**-6).to(x.do.dtype))


SETTINGS: dict[str, Setting] = {
    "plain": Setting(),
    "full": Setting(call={"causal": "none"}),
    "odd": Setting({"t_q": 333}),
    "odd_full": Setting({"t_q": 333}, {"causal": "none"}),
    "small": Setting({"t_q": 63, "d": 32}),
    "tile": Setting({"t_q": 128}),
    "d32": Setting({"d": 32}),
    "d72": Setting({"d": 72}),
    "d72_odd": Setting({"d": 72, "t_q": 401}),
    "d96": Setting({"d": 96}),
    "d104": Setting({"d": 104}),
    "d128": Setting({"d": 128}),
    "long": Setting({"t_q": 1024, "heads": 1}),
    "long_keys": Setting({"t_q": 300, "t_k": 460}, {"causal": "bottom-right"}),
    "long_keys_top_left": Setting({"t_q": 300, "t_k": 460}, {"causal": "top-left"}),
    "empty_rows": Setting({"t_q": 460, "t_k": 300}, {"causal": "bottom-right"}),
    "window": Setting(call={"window": (100, 0)}),
    "window_both": Setting(call={"causal": "none", "window": (70, 40)}),
    "softcap": Setting(call={"softcap": 8.0}),
    "gqa": Setting({"heads": 8, "kv_heads": 2, "t_q": 384}),
    "gqa8": Setting({"heads": 16, "kv_heads": 2, "t_q": 256}),
    "mqa_odd": Setting({"heads": 4, "kv_heads": 1, "t_q": 321}),
    "batch": Setting({"batch": 3, "t_q": 320}),
    "padded": Setting({"batch": 2, "t_q": 384}, after=pad_end),
    "padded_full": Setting({"batch": 2, "t_q": 384}, {"causal": "none"}, pad_end),
    "independent": Setting({"batch": 8, "heads": 1, "t_q": 256}),
    "shared_prompt": Setting({"batch": 8, "heads": 1, "t_q": 256}, after=share_prompt),
    "copies": Setting({"batch": 8, "heads": 1, "t_q": 256}, after=copy_sequences),
    "some_copies": Setting({"batch": 8, "heads": 1, "t_q": 256}, after=copy_some),
    "loss_2_percent": Setting(after=_loss_on(0.02)),
    "loss_5_percent": Setting(after=_loss_on(0.05)),
    "loss_two_rows": Setting(after=_loss_on(0.004)),
    "training_gradients": Setting(after=scale_gradients),
}


def draw(
    family: str, setting: str = "plain", *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **shape: int
) -> Inputs:
    """One call's inputs, the same on every machine.

    Args:
        family (str): A name of ``FAMILIES``.
        setting (str): A name of ``SETTINGS``.
        seed (int): Another seed, other numbers of the same kind.
        dtype (torch.dtype): BF16 or FP16.
        **shape (int): Sizes instead of the setting's own: t_q, t_k, d, batch, heads, kv_heads.
    """
    # crc32: Python's own hash of a string changes from run to run.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{family}/{setting}/{seed}".encode()))
    chosen = SETTINGS[setting]
    sizes = Shape(**{**chosen.shape, **shape}, dtype=dtype)
    q, k, v = FAMILIES[family](generator, sizes)
    do = _normal(generator, tuple(q.shape))
    inputs = Inputs(
        q.to(dtype), k.to(dtype), v.to(dtype), do.to(dtype),
        scale=sizes.d**-0.5, name=f"{family}/{setting}", seed=seed, **chosen.call,
    )  # fmt: skip
    return inputs if chosen.after is None else chosen.after(inputs, generator)


def from_capture(path: Path) -> Inputs:
    """The inputs of a real call; where dO was not captured, one of N(0, 1) takes its place."""
    with safe_open(str(path), "pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        stored = set(file.keys())
        tensors = {name: file.get_tensor(name) for name in ("q", "k", "v", "do") if name in stored}
    if metadata.get("layout") == "BTHD":
        tensors = {name: x.transpose(1, 2).contiguous() for name, x in tensors.items()}
    if "do" not in tensors:
        tensors["do"] = _normal(torch.Generator().manual_seed(0), tuple(tensors["q"].shape)).to(tensors["q"].dtype)
    scale = float(metadata.get("scale", tensors["q"].shape[-1] ** -0.5))
    causal: Any = metadata.get("causal", "none")
    window: Any = tuple(int(w) for w in metadata["window"].split(",")) if "window" in metadata else None
    softcap = float(metadata["softcap"]) if "softcap" in metadata else None
    return Inputs(**tensors, scale=scale, causal=causal, window=window, softcap=softcap, name=path.stem)


def captures(folder: Path) -> dict[str, Inputs]:
    """The inputs of a folder's captures in BF16 or FP16, by name."""
    found = {path.stem: from_capture(path) for path in sorted(folder.glob("*.safetensors"))}
    return {name: x for name, x in found.items() if x.q.dtype in (torch.bfloat16, torch.float16)}
