"""The callback of TRL's online trainers (GRPO and its kin): how far the engine's log-probabilities are, and why."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from attn_diag.analyses.mismatch.logprobs import Logprobs
from attn_diag.errors import InputError
from attn_diag.results.mismatch import Mismatch
from attn_diag.watching.frameworks.session import complain, harmless
from attn_diag.watching.own_decoding import explain_decoding


class MismatchCallback(TrainerCallback):
    """See ``attn_diag.mismatch_callback``, which makes it."""

    def __init__(self, trainer: Any, every: int, sequences: int, tokens: int) -> None:
        for name, value in (("every", every), ("sequences", sequences), ("tokens", tokens)):
            if value < 1:
                raise InputError(f"{name} must be 1 or more, got {value}")
        self._trainer, self._every, self._sequences, self._tokens = trainer, every, sequences, tokens
        self.result: Mismatch | None = None
        """The newest split; None before the first."""

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Log the figures of every ``every`` steps."""
        if state.global_step % self._every or not state.is_world_process_zero:
            return
        batches = getattr(self._trainer, "_buffered_inputs", None) or []
        if not batches or "completion_ids" not in batches[0]:
            raise InputError("the trainer keeps no sampled completions (_buffered_inputs): expected TRL's GRPOTrainer")
        metrics = engine_metrics(batches)
        self.result = self._split(batches[0])
        metrics = {**split_metrics(self.result), **metrics}
        state.log_history.append({**metrics, "step": state.global_step})
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, PrinterCallback | ProgressCallback | MismatchCallback):
                continue
            try:
                callback.on_log(args, state, copy.copy(control), logs=dict(metrics), **given)
            except Exception as error:
                complain(error)

    def _split(self, batch: dict[str, Tensor]) -> Mismatch:
        """Of some of the sampled sequences, with the model as it is now."""
        some = slice(0, self._sequences)
        parts = [batch[name][some] for name in ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")]
        prompt, completion, seen, sampled = parts
        completion, sampled = completion[:, : self._tokens], sampled[:, : self._tokens]
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        return explain_decoding(
            model, torch.cat([prompt, completion], 1), torch.cat([seen, sampled], 1).long(), prompt.shape[1]
        )


def engine_metrics(batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """What the engine's own log-probabilities differ by, where the trainer has them (TRL with vLLM); else empty."""
    both = [
        (b["old_per_token_logps"], b["sampling_per_token_logps"], b["completion_mask"])
        for b in batches
        if b.get("old_per_token_logps") is not None and b.get("sampling_per_token_logps") is not None
    ]
    if not both:
        return {}
    # Micro-batches may be padded to other lengths: all counted tokens of each, one sequence a row.
    width = max(mask.shape[1] for _, _, mask in both)
    padded = [
        torch.cat([torch.nn.functional.pad(one[i].double().cpu(), (0, width - one[i].shape[1])) for one in both])
        for i in range(3)
    ]
    return Logprobs(padded[0].numpy(), padded[1].numpy(), padded[2].bool().numpy()).metrics


def split_metrics(found: Mismatch) -> dict[str, float]:
    """A split as figures for a logger: verl's and slime's names, and each place's share of the squared difference."""
    split = found.logprobs
    assert split is not None
    shares = {
        f"attn_diag/mismatch/{'behind' if share.layer is None else f'layer_{share.layer}'}/{share.place}": share.share
        for share in split.shares
    }
    figures = {"attn_diag/mismatch/rms": split.noise, "attn_diag/mismatch/causes": float(len(found.causes))}
    return {**split.metrics, **figures, **shares}
