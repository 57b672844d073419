"""Inputs of linear attention's operators, ordinary and adversarial, by the operator's name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

KINDS = ("normal", "peaked", "tiny_decay", "no_decay", "growing", "repeated", "mixed_sizes")
# Decays of trained models, whose state lives for hundreds of steps.
LONG = "long"


def linear_inputs(
    operator: str,
    shape: tuple[int, int, int, int, int],
    seed: int,
    *,
    kind: str = "normal",
    key_heads: int | None = None,
) -> dict[str, Tensor]:
    """Arguments of an operator in fp32.

    Args:
        operator: A name of ``attn_diag.reference.linear.LINEAR_OPERATORS``.
        shape: B, T, H, K, V.
        seed: Of the random numbers.
        kind: One of ``KINDS``: repeated has the same key in every step, growing a state that explodes, mixed_sizes
            numbers of very different sizes.
        key_heads: Heads of q and k, where they are shared.
    """
    b, t, h, k, v = shape
    make = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=make)

    few = key_heads or h
    found = {"q": normal(b, t, few, k), "k": normal(b, t, few, k), "v": normal(b, t, h, v)}
    if kind == "repeated":
        found["k"] = found["k"][:, :1].expand(b, t, few, k).clone()
    if kind == "mixed_sizes":
        found = {
            name: x * torch.exp2(torch.randint(-12, 12, x.shape, generator=make).float()) for name, x in found.items()
        }
    delta = operator in ("delta_rule", "gated_delta_rule", "kda", "rwkv7", "dplr", "iplr")
    if delta and kind != "growing":
        found["k"] /= found["k"].norm(dim=-1, keepdim=True).clamp(min=1e-6)
    if operator in ("rwkv7", "dplr", "iplr"):
        found["a"] = -found["k"]
        found["b"] = found["k"] * torch.rand(b, t, h, k, generator=make) * (2.5 if kind == "growing" else 1.0)
    if operator in ("delta_rule", "gated_delta_rule", "kda"):
        found["beta"] = torch.rand(b, t, h, generator=make)
        if kind == "repeated":
            found["beta"] = torch.ones(b, t, h)
    if operator == "mamba2":
        found["dt"], found["A"] = torch.rand(b, t, h, generator=make) * 0.2 + 1e-3, -torch.rand(h, generator=make) * 8
    shift = {"tiny_decay": -30.0, "no_decay": 30.0, "peaked": 2.0, LONG: 6.0}.get(kind, 3.0)
    channels = (k,) if operator in ("rwkv7", "dplr", "kda", "gla") else ()
    if operator in ("rwkv7", "dplr", "kda", "gla", "gated_delta_rule", "simple_gla"):
        found["g"] = torch.nn.functional.logsigmoid(normal(b, t, h, *channels) + shift)
        if operator == "rwkv7" and kind in ("normal", "peaked"):
            found["g"] = -0.6065306597126334 * torch.sigmoid(normal(b, t, h, k))
    if kind == "peaked":
        found["q"] = found["q"] * 20
    if operator == "linear_attn":
        found["q"], found["k"] = found["q"].abs(), found["k"].abs()
    return found


def rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What a training run passes: everything in ``dtype`` but g, g_gamma, A, D, dt, and states, which stay fp32."""
    kept = ("g", "g_gamma", "A", "D", "dt", "initial_state")
    return {name: x if name in kept else x.to(dtype) for name, x in tensors.items()}
