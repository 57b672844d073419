"""A model's decoding from a cache beside its own training forward, on the same tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_diag.analyses.mismatch.logprobs import Logprobs
from attn_diag.errors import InputError
from attn_diag.results.mismatch import Mismatch
from attn_diag.watching.live.capturing import capture
from attn_diag.watching.propagation import explain_logprobs


def explain_decoding(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, prompt: int) -> Mismatch:
    """Split the difference of log-probabilities between decoding token by token and one forward of the whole.

    Both run in eval mode and without gradients; the model is as before afterwards.

    Args:
        model: A Hugging Face transformers model for causal language modelling.
        input_ids: Prompts, padded on the left, and what was sampled, padded on the right, [B, T].
        attention_mask: 1 for tokens, 0 for padding, [B, T].
        prompt: How many of the T are of the prompt: they are one call, each later one its own.

    Returns:
        As of ``explain_logprobs``, over the tokens after the prompt.

    Raises:
        InputError: There is no token behind the prompt, or as of ``explain_logprobs``.
    """
    length = input_ids.shape[1]
    if not 0 < prompt < length:
        raise InputError(f"prompt must be between 1 and {length - 1}, the tokens of input_ids but one; got {prompt}")
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    whole = [(0, length)]
    steps = [(0, prompt), *((t, t + 1) for t in range(prompt, length))]
    was_training = model.training
    model.eval()
    try:
        with tempfile.TemporaryDirectory() as folder:
            runs, found = [], []
            for name, calls in (("train", whole), ("rollout", steps)):
                with capture(model, Path(folder) / name, batch=None, calls=None), _entering_head(model) as hidden:
                    logits = _forwards(model, input_ids, attention_mask, positions, calls)
                runs.append(torch.cat(hidden, 1) if hidden else None)
                every = logits[:, :-1].double().log_softmax(-1)
                found.append(every.gather(2, input_ids[:, 1:, None])[..., 0].cpu())
            counted = attention_mask[:, 1:].bool().cpu() & (torch.arange(1, length) >= prompt)
            both = None if runs[0] is None or runs[1] is None else (runs[0], runs[1])
            return explain_logprobs(
                model, input_ids, Path(folder) / "train", Path(folder) / "rollout",
                logprobs=Logprobs(found[0].numpy(), found[1].numpy(), counted.numpy()), hidden=both,
                attention_mask=attention_mask, position_ids=positions,
            )  # fmt: skip
    finally:
        model.train(was_training)


def _forwards(model: Any, ids: Tensor, mask: Tensor, positions: Tensor, calls: list[tuple[int, int]]) -> Tensor:
    """Logits of these calls, one after the other on one cache, [B, T, vocabulary]."""
    cache, logits = None, []
    with torch.no_grad():
        for begin, end in calls:
            cached = {"use_cache": False} if len(calls) == 1 else {"use_cache": True, "past_key_values": cache}
            out = model(
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                **cached,
            )
            cache = out.past_key_values if len(calls) > 1 else None
            logits.append(out.logits.float())
    return torch.cat(logits, 1)


@contextmanager
def _entering_head(model: nn.Module) -> Iterator[list[Tensor]]:
    """What enters the LM head meanwhile, call by call; empty where the model names none."""
    found: list[Tensor] = []
    get: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    head = get()
    hook = None if head is None else head.register_forward_pre_hook(lambda _, args: found.append(args[0].detach()))
    try:
        yield found
    finally:
        if hook is not None:
            hook.remove()
