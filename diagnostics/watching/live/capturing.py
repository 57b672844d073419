"""``attn_diag.capture``: what is chosen of a running model's attention."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable

from torch import nn

from attn_diag.watching.live.claim import IfTaken
from attn_diag.watching.live.recorder import Recorder, Steps

_GIB = 2**30


def capture(
    model: nn.Module | None,
    path: str | os.PathLike[str],
    *,
    steps: Steps | None = None,
    layers: Container[int] | None = None,
    heads: Iterable[int] | None = None,
    batch: Iterable[int] | None = (0,),
    calls: Container[int] | None = (0,),
    ring: int = 0,
    max_bytes: int = _GIB,
    first_step: int = 0,
    if_taken: IfTaken = "stop",
    hops: bool = False,
    sums: bool = False,
) -> Recorder:
    """Capture the attention calls of a model while it runs, as files that ``inspect`` reads.

        with attn_diag.capture(model, "captures/", steps=range(0, 10_000, 500), layers={2}):
            train(model)

    Seen are F.scaled_dot_product_attention (also by way of nn.MultiheadAttention and Hugging Face transformers),
    FlexAttention, transformers' own implementations (eager and registered ones), ``attn_diag.attention`` and the
    kernels of flash_attn, FlashAttention-4, xformers, SageAttention and Transformer Engine; of each q, k, v, o, the
    LSE where its kernel gives one, after the backward pass dO, dQ, dK, dV and, where the query projection is found,
    x, w_q and the gradient at its output. Outputs and gradients stay the same bits. In models that torch.compile
    compiled, whole or in part, the fused operators are seen (SDPA's, ``attn_diag.attention``'s and those that the
    packages register), and x, w_q and that gradient where the projection is a matrix product of the graph's; layers
    are named by the order of their calls then, which the file's notes say as well as what is missing, and nothing is
    compiled anew unless a function around the model is what was compiled. FlexAttention is seen in graphs that are
    compiled after this, what a CUDA graph replays where that was recorded after this; math in a graph is not
    (docs/watching.md). A function or operator of your own is seen with ``attn_diag.observe``. Ring attention is one
    call: the rank's rows with the merged O and LSE, and all keys that they may see, from its hops; its ``own_dk`` and
    ``own_dv`` are judged together with the other ranks' files. Where a
    kernel has no autograd node of its own (math, eager, FlexAttention), gradients are what the call's nodes send; of
    more than 128 nodes the tensors' own: the totals, where q, k or v is used elsewhere too; the file's notes say so.

    Args:
        model: whose calls; None: all calls of the process, without layers' names, x and w_q.
        path: a folder, or its URL (s3://…); one file for every step, layer, call and rank.
        steps: which (a container of numbers, or a function of one); None: all. A step ends with an optimizer's
            ``step()``; without any, every forward of the model is one; see ``Recorder.end_step``. Once a loop trains,
            evaluation without gradients is passed over: it neither counts nor is captured. A step that a loss scaler
            skips is none: its calls count to the next.
        layers: their numbers (as in the module's name).
        heads: query heads; the smallest range of whole key groups that holds them is taken.
        batch: which items of the batch; None: all.
        calls: which calls of a layer within a step (0: the first micro-batch); None: all.
        ring: keep the last so many captured steps in memory, and write them only on a trigger: ``attn_diag.last()``,
            ``dump()``, an alarm of ``attn_diag.Monitor``, NaN or Inf in what was captured, an exception.
        max_bytes: stop at so many bytes of captures (of the ring: forget older steps).
        first_step: the number of the first step.
        if_taken: where another run captures into the folder, or has (this one before it was killed, perhaps): "stop"
            with an InputError, or take "another": <path>-2, <path>-3 and so on, the same for all ranks of a run.
        hops: of ring attention keep what every hop returned too, so that ``mismatch`` tells which merge errs.
        sums: of output projections keep what this rank gives to the sum over ranks and what it gets (and, of any
            model, what the projection returns), so that ``mismatch`` tells how it is added up. The sum is torch's, made
            while the projection or a hook on it runs: tensor parallelism of DTensor, or of a module that does it.

    Returns:
        A context manager (also ``start()`` and ``close()``).

    Raises:
        InputError: on entering, the folder cannot be written or is taken. Later nothing is raised: what goes wrong is
            logged (logger "attn_diag"), once, and counted in ``dropped``. A forked child captures nothing.
    """
    return Recorder(
        model, path, steps=steps, layers=layers, heads=heads, batch=batch, calls=calls, ring=ring,
        max_bytes=max_bytes, first_step=first_step, if_taken=if_taken, hops=hops, sums=sums,
    )  # fmt: skip
