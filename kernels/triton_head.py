"""One head through the Triton kernels, with the same face as the emulation of ``attn_diag.kernels.emulation``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from attn_diag.kernels.arguments import check_tensors
from attn_diag.kernels.attention import check_kernels_support, sink_gradients
from attn_diag.kernels.backend import DTYPES
from attn_diag.kernels.emulation import EmulatedHead, RecipeNotSupportedError
from attn_diag.kernels.emulation_operands import HeadLike
from attn_diag.kernels.geometry import Visibility
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_backward import backward
from attn_diag.kernels.triton_forward import forward
from attn_diag.kernels.triton_sequences import Sequences


def run_head(recipe: Recipe, head: HeadLike) -> EmulatedHead:
    """As ``run_heads``, of one head."""
    return run_heads(recipe, [head])[0]


def run_heads(recipe: Recipe, heads: Sequence[HeadLike], rows: Tensor | None = None) -> list[EmulatedHead]:
    """``run_stack``, head by head."""
    found = run_stack(recipe, heads, rows)
    outputs = {f.name: t for f in fields(found) if (t := getattr(found, f.name)) is not None}
    return [EmulatedHead(**{name: tensor[i] for name, tensor in outputs.items()}) for i in range(len(heads))]


def run_stack(recipe: Recipe, heads: Sequence[HeadLike], rows: Tensor | None = None) -> EmulatedHead:
    """Run the recipe's kernels on H heads, forward and (where dO is given) backward, on their device, in one launch.

    The heads are of one shape, scale, softcap and masking, but for ALiBi's slopes; all have a sink, or none. Their
    tensors may be of any float dtype; their values must be numbers of the recipe's input format. What they return is of
    all heads, [H, ...]. ``rows`` (int64 [R], without dO): the only ones whose O and L are wanted; others may hold
    anything.

    Raises RecipeNotSupportedError for a site the kernels lack, dropout, an explicit mask or chosen query positions;
    BackendError where nothing here can run them; ValueError for shapes that they do not take.
    """
    check_kernels_support(recipe)
    head = heads[0]
    masking = getattr(head, "masking", None)
    if masking is not None and (masking.mask is not None or masking.positions is not None):
        raise RecipeNotSupportedError("the Triton kernels take no explicit mask and no q_positions; use the emulation")
    if heads[0].dropout is not None:
        raise RecipeNotSupportedError("the Triton kernels have no dropout; use the emulation")
    visibility = Visibility() if masking is None else Visibility(masking.causal, masking.window)
    alibi = [getattr(getattr(h, "masking", None), "alibi", None) for h in heads]
    origins = {a.origin for a in alibi if a is not None}
    if origins:
        visibility = replace(visibility, alibi_origin=min(origins))

    def stacked(tensors: Sequence[Tensor | None]) -> Tensor:
        """[1, H, T, D]."""
        return torch.stack([t for t in tensors if t is not None]).to(DTYPES[recipe.input])[None]

    with torch.no_grad():
        q, k, v = (stacked([getattr(h, name) for h in heads]) for name in ("q", "k", "v"))
        check_tensors(q, k, v)
        logits = [h.sink for h in heads if h.sink is not None]
        sinks = torch.tensor(logits, dtype=torch.float32, device=q.device) if logits else None
        slopes = q.new_tensor([0.0 if a is None else a.slope for a in alibi], dtype=torch.float32)
        sequences = Sequences(slopes=slopes if origins else None)
        found = forward(q, k, v, recipe, visibility, scale=head.scale, softcap=head.softcap,
                        unrounded=recipe.delta_from == "fp32-o", sinks=sinks, sequences=sequences,
                        wanted=rows)  # fmt: skip
        made = EmulatedHead(o=found.o[0], lse=found.lse[0])
        if head.do is not None:
            o = found.unrounded if recipe.delta_from == "fp32-o" else found.o
            back = backward(q, k, v, o, found.lse, stacked([h.do for h in heads]), recipe, visibility,
                            scale=head.scale, softcap=head.softcap, sequences=sequences)  # fmt: skip
            made.delta, made.dq, made.dk, made.dv = (t[0] for t in (back.delta, back.dq, back.dk, back.dv))
            made.dsink = None if sinks is None else sink_gradients(sinks, found.lse, back.delta)
    return made
