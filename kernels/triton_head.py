"""One head through the Triton kernels, with the same face as the emulation of ``attn_diag.kernels.emulation``."""

from __future__ import annotations

import torch

from attn_diag.kernels.attention import check_kernels_support, check_tensors, sink_gradients
from attn_diag.kernels.backend import DTYPES
from attn_diag.kernels.emulation import EmulatedHead, RecipeNotSupportedError
from attn_diag.kernels.emulation_operands import HeadLike
from attn_diag.kernels.geometry import Visibility
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_backward import backward
from attn_diag.kernels.triton_forward import forward


def run_head(recipe: Recipe, head: HeadLike) -> EmulatedHead:
    """Run the recipe's kernels on one head, forward and (where dO is given) backward, on the head's device.

    The head's tensors may be of any float dtype; their values must be numbers of the recipe's input format.

    Raises RecipeNotSupportedError for a site the kernels lack, ALiBi, an explicit mask or chosen query positions;
    BackendError where nothing here can run them; ValueError for shapes that they do not take.
    """
    check_kernels_support(recipe)
    masking = getattr(head, "masking", None)
    if masking is not None and (masking.mask is not None or masking.positions is not None):
        raise RecipeNotSupportedError("the Triton kernels take no explicit mask and no q_positions; use the emulation")
    if getattr(masking, "alibi", None) is not None:
        raise RecipeNotSupportedError("the Triton kernels take no ALiBi slopes; use the emulation")
    visibility = Visibility() if masking is None else Visibility(masking.causal, masking.window)
    with torch.no_grad():
        q, k, v = (t.to(DTYPES[recipe.input])[None, None] for t in (head.q, head.k, head.v))
        check_tensors(q, k, v)
        sinks = None if head.sink is None else torch.tensor([head.sink], dtype=torch.float32, device=q.device)
        found = forward(q, k, v, recipe, visibility, scale=head.scale, softcap=head.softcap,
                        unrounded=recipe.delta_from == "fp32-o", sinks=sinks)  # fmt: skip
        result = EmulatedHead(o=found.o[0, 0], lse=found.lse[0, 0])
        if head.do is not None:
            do = head.do.to(DTYPES[recipe.input])[None, None]
            o = found.unrounded if recipe.delta_from == "fp32-o" else found.o
            back = backward(q, k, v, o, found.lse, do, recipe, visibility, scale=head.scale, softcap=head.softcap)
            result.delta = back.delta[0, 0]
            if sinks is not None:
                result.dsink = sink_gradients(sinks, found.lse, back.delta)[0]
            result.dq, result.dk, result.dv = back.dq[0, 0], back.dk[0, 0], back.dv[0, 0]
    return result
