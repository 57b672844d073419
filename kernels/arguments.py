"""What ``attn_diag.attention`` takes: checked once, before any kernel runs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_diag.kernels.backend import BackendError, check_backend
from attn_diag.kernels.formats import Format
from attn_diag.kernels.geometry import HEAD_DIMS, MOST_VALUES, Causal, Level

INPUTS: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, one_batch: bool = True) -> None:
    """Raise TypeError, ValueError or BackendError unless the kernels can take q, k and v; see ``attention``.

    ``one_batch``: k and v have the batch of q; not so where they are pages.
    """
    named = {"q": q, "k": k, "v": v}
    if any(t.ndim != 4 for t in named.values()):
        raise ValueError("q, k and v must have shape [B, H, T, D], got " + _shapes(named))
    if len({t.device for t in named.values()}) > 1:
        raise BackendError(
            "q, k and v must be on one device, got " + ", ".join(f"{n} on {t.device}" for n, t in named.items())
        )
    if len({t.dtype for t in named.values()}) > 1 or q.dtype not in INPUTS:
        raise TypeError(
            "q, k and v must all be torch.bfloat16 or all torch.float16, got "
            + ", ".join(f"{n} in {t.dtype}" for n, t in named.items())
            + "; cast them, or run under torch.autocast"
        )
    (batch, heads, _, dim), (k_batch, k_heads, _, k_dim) = q.shape, k.shape
    if k.shape[:3] != v.shape[:3] or (one_batch and k_batch != batch) or k_dim != dim or not k_heads or heads % k_heads:
        raise ValueError(
            "k [B, Hk, Tk, D] must have q's B and D, v [B, Hk, Tk, Dv] k's B, H and T, and Hq be a multiple of Hk, got "
            + _shapes(named)
        )
    for name, width, most in (
        ("the head dimension", dim, HEAD_DIMS[1]),
        ("v's head dimension", v.shape[3], MOST_VALUES),
    ):
        if not HEAD_DIMS[0] <= width <= most:
            advice = "pad q, k and v with zeros" if width < HEAD_DIMS[0] else "use attn_diag.kernels.emulate_head"
            raise ValueError(f"{name} must be {HEAD_DIMS[0]} to {most}, got {width}; {advice}")
    if not q.numel() or not k.numel():
        raise ValueError("q, k and v must not be empty, got " + _shapes(named))
    check_backend(q.device)


def checked_sinks(sinks: Tensor, q: Tensor) -> Tensor:
    """In fp32. Raises ValueError, TypeError or BackendError unless the kernels can take them."""
    if tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(
            f"sinks must have shape [Hq] = [{q.shape[1]}], one logit a query head, got {list(sinks.shape)}"
        )
    if not sinks.is_floating_point():
        raise TypeError(f"sinks must be floating-point logits, got {sinks.dtype}")
    if sinks.device != q.device:
        raise BackendError(f"sinks must be where q is, on {q.device}, got {sinks.device}")
    return sinks.float()


def check_options(causal: Causal, scale: float, softcap: float | None, level: Level) -> None:
    """Raise ValueError unless these are among what ``attention`` knows."""
    if causal not in ("none", "top-left", "bottom-right"):
        raise ValueError(f"causal must be none, top-left or bottom-right, got {causal!r}")
    if not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"scale must be a finite number above 0, got {scale}")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a finite number above 0, or None, got {softcap}")
    if level not in ("none", "rows", "tiles", "full"):
        raise ValueError(f"instrument must be none, rows, tiles or full, got {level!r}")


def _shapes(named: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(t.shape)}" for name, t in named.items())


def slots_of(q: Tensor, level: Level, dump_rows: Tensor | None) -> tuple[Tensor | None, int]:
    """Where the tile dump puts every row ([B, Hq, Tq] int32, -1 for nowhere), and how many it holds."""
    if (dump_rows is not None) != (level == "tiles"):
        raise ValueError("dump_rows belongs to instrument='tiles': give both or neither")
    shape = q.shape[:3]
    if level == "full":
        return torch.arange(shape.numel(), dtype=torch.int32, device=q.device).view(shape), shape.numel()
    if dump_rows is None:
        return None, 0
    try:
        chosen = dump_rows.broadcast_to(shape)
    except RuntimeError:
        raise ValueError(
            f"dump_rows must broadcast to [B, Hq, Tq] = {list(shape)}, got {list(dump_rows.shape)}"
        ) from None
    if dump_rows.dtype != torch.bool:
        raise TypeError(f"dump_rows must be bool, got {dump_rows.dtype}")
    slots = torch.where(chosen, chosen.flatten().cumsum(0).view(shape) - 1, -1)
    return slots.to(device=q.device, dtype=torch.int32), int(chosen.sum())


def checked_slopes(slopes: Tensor, q: Tensor, sequences: int) -> Tensor:
    """ALiBi's slopes in fp32, of a call with ``sequences`` batch items or documents.

    Raises ValueError, TypeError or BackendError unless the kernels can take them.
    """
    if tuple(slopes.shape) not in ((q.shape[1],), (sequences, q.shape[1])):
        raise ValueError(
            f"alibi_slopes must have shape [Hq] = [{q.shape[1]}] or [B, Hq] (packed: [documents, Hq]) = "
            f"{[sequences, q.shape[1]]}, got {list(slopes.shape)}"
        )
    if not slopes.is_floating_point():
        raise TypeError(f"alibi_slopes must be floating-point numbers, got {slopes.dtype}")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes get no gradient here: pass alibi_slopes.detach()")
    if slopes.device != q.device:
        raise BackendError(f"alibi_slopes must be where q is, on {q.device}, got {slopes.device}")
    return slopes.float()


def checked_borders(cu_q: Tensor, cu_k: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Borders of packed documents as the kernels take them: int32, contiguous.

    Their numbers are looked at where that makes no device wait: on the CPU. Raises ValueError, TypeError or
    BackendError.
    """
    named = {"cu_seqlens_q": (cu_q, q), "cu_seqlens_k": (cu_k, k)}
    if q.shape[0] != 1:
        raise ValueError(
            "packed q, k and v must have shape [total, H, D], or [B, H, T, D] with B = 1 (see layout), got B = "
            f"{q.shape[0]}"
        )
    if cu_q.ndim != 1 or cu_q.shape != cu_k.shape or len(cu_q) < 2:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have shape [documents + 1], got "
            + _shapes({name: cu for name, (cu, _) in named.items()})
        )
    for name, (cu, rows) in named.items():
        if cu.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 (or int64), got {cu.dtype}")
        if cu.device != q.device:
            raise BackendError(f"{name} must be where q is, on {q.device}, got {cu.device}")
        if cu.device.type != "cpu" or torch.compiler.is_compiling():
            continue
        if int(cu[0]) != 0 or bool((cu.diff() < 0).any()) or int(cu[-1]) > rows.shape[2]:
            raise ValueError(
                f"{name} must begin at 0, not fall, and end at {rows.shape[2]}, the number of rows, or before, got "
                f"{cu.tolist()}"
            )
    return cu_q.int().contiguous(), cu_k.int().contiguous()
