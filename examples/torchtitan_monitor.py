"""attn-diag under torchtitan: its own trainer, watched. Nothing of torchtitan is changed.

    TRAIN_FILE=torchtitan_monitor PYTHONPATH=path/to/attn-diag/examples ./run_train.sh --metrics.enable_tensorboard

Written against torchtitan v0.2.2 (tag of 20 February 2026), whose Llama 3 attends by
``F.scaled_dot_product_attention``. At b5bcd76 (21 August 2026) ``Trainer`` lies in ``torchtitan.trainer``, has the
same ``train_step(data_iterator)``, ``step``, ``model_parts`` and ``metrics_processor``, and takes a configuration of
its own class; there language models attend by FlexAttention compiled, or packed, and CUDA graphs are on
(``--training.disable_cuda_graphs``): docs/watching.md says what of that is seen.

For data parallelism (DDP, FSDP, HSDP), with and without activation checkpointing; without ``--compile.enable``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.train import Trainer, main

import attn_diag

EVERY = 50


class WatchedTrainer(Trainer):
    """Trains the same bits; TensorBoard and W&B get "attn/…" beside "loss_metrics/…", W&B the alarms as alerts."""

    monitor: attn_diag.Monitor | None = None

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """One step of torchtitan's, accumulated micro-batches and all."""
        if self.monitor is None:
            # Here, as the checkpoint is loaded: ``step`` is 1 in a run's first step, and goes on in a resumed one.
            log = Path(self.job_config.job.dump_folder) / "attention.jsonl"
            history = list(attn_diag.read_log(log)) if log.is_file() else []
            self.monitor = attn_diag.Monitor(
                self.model_parts[0], EVERY, first_step=self.step, history=history, log=log, on_alarm=self.alert
            )
        before = self.newest
        super().train_step(data_iterator)
        # On a GPU a check is there some steps later; nothing waits for it.
        if self.newest != before:
            # On the ranks that do not log this does nothing.
            self.metrics_processor.logger.log(self.monitor.metrics(), self.step)

    @property
    def newest(self) -> int | None:
        """The step of the newest check."""
        return self.monitor.history[-1].step if self.monitor is not None and self.monitor.history else None

    def alert(self, alarm: object) -> None:
        """W&B's; in torchtitan's log it is in any case."""
        if self.job_config.metrics.enable_wandb:
            import wandb

            if wandb.run is not None:
                wandb.run.alert(title="attention alarm", text=str(alarm), level="WARN")

    def close(self) -> None:
        """Stop watching too."""
        if self.monitor is not None:
            self.monitor.close()
        super().close()


if __name__ == "__main__":
    main(WatchedTrainer)
