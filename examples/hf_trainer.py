"""A Hugging Face Trainer, watched: one callback. A tiny Llama on random tokens, so that it runs on a CPU in seconds.

    python examples/hf_trainer.py

The callback checks every 5th step here (50 in a real run) and logs ``attn/…`` to whatever the trainer logs to; alarms
become its alerts. Nothing of the training changes, in any bit.
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attn_diag


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """32 sequences of 64 tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 256, (32, 64), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, attn_implementation="sdpa", **sizes))
watch = attn_diag.trainer_monitor(every=5)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=10, per_device_train_batch_size=4, bf16=True, use_cpu=True, report_to="none"
    )
    Trainer(model=model, args=arguments, train_dataset=RandomTokens(), callbacks=[watch]).train()
    print(watch.monitor.table())
    print(f"{len(watch.monitor.alarms)} alarms")
