"""A model's decoding beside its own forward, and the callback that logs their split under TRL's GRPOTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import transformers_model

import attn_diag
from attn_diag.errors import InputError

pytest.importorskip("transformers")


def test_decoding_is_split_and_all_of_the_difference_is_told() -> None:
    """Prompts padded on the left, completions on the right; the shares of all places add up to what is observed."""
    model: Any = transformers_model("llama", "sdpa").model.bfloat16().train()
    ids = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[1, :3], real[0, -2:] = 0, 0
    found = attn_diag.explain_decoding(model, ids, real, 12)
    assert found.causes == ()
    split = found.logprobs
    assert split is not None
    assert split.tokens == 8 + 6
    rest = next(share for share in split.shares if share.place == "rest")
    # What is not told is of second order in roundings of one part in 256.
    assert abs(rest.share) < 0.1
    assert {o.place for o in split.outside} == {"stream", "projection", "head"}
    assert model.training
    with pytest.raises(InputError, match="between 1 and 19"):
        attn_diag.explain_decoding(model, ids, real, 20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_grpo_logs_the_split_under_the_trainers_names(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    plain = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, 61)}))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=plain, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    data = Dataset.from_dict({"prompt": [" ".join(f"w{3 + (i + j) % 50}" for j in range(4 + i % 3)) for i in range(8)]})
    model: Any = transformers_model("llama", "sdpa").model
    options: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 6,
        "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1,
    }  # fmt: skip

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(one)) for one in completions]

    class Logger(TrainerCallback):
        """A logger, as of W&B."""

        logged: list[dict[str, float]] = []  # noqa: RUF012

        def on_log(self, *_: Any, logs: Any = None, **given: Any) -> None:
            del given
            self.logged.append(logs)

    trainer = GRPOTrainer(
        model, reward_funcs=reward, args=GRPOConfig(str(tmp_path), **options), train_dataset=data,
        processing_class=tokenizer, callbacks=[Logger()],
    )  # fmt: skip
    callback = attn_diag.mismatch_callback(trainer, every=2, sequences=2, tokens=4)
    trainer.add_callback(callback)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "rollout_corr/kl" in row]
    assert row["step"] == 2
    assert callback.result is not None
    assert row["attn_diag/mismatch/causes"] == 0.0
    assert "attn_diag/mismatch/layer_1/rounding" in row
    assert any("train/train_rollout_logprob_abs_diff" in logs for logs in Logger.logged)


def test_the_engines_own_log_probabilities_come_first() -> None:
    """As TRL keeps them with vLLM: micro-batches that are padded to other lengths."""
    from attn_diag.watching.frameworks.trl_mismatch import engine_metrics

    batches = [
        {
            "old_per_token_logps": torch.full((2, width), -1.0),
            "sampling_per_token_logps": torch.full((2, width), -1.5),
            "completion_mask": torch.arange(width)[None] < torch.tensor([[width], [1]]),
        }
        for width in (3, 5)
    ]  # fmt: skip
    found = engine_metrics(batches)
    assert found["rollout_corr/kl"] == pytest.approx(-0.5)
    assert found["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.5)
    assert engine_metrics([{"completion_mask": torch.ones(1, 1)}]) == {}


def test_metrics_are_a_property_for_loops_of_ones_own() -> None:
    """What verl's loop has: old_log_probs, rollout_log_probs, response_mask."""
    found = attn_diag.Logprobs(np.log([[0.5, 0.25]]), np.log([[0.4, 0.5]]), np.array([[True, False]])).metrics
    assert found["rollout_corr/kl"] == pytest.approx(np.log(0.4 / 0.5))
