"""Tiny trainings under Hugging Face's Trainer, Lightning and Accelerate, and what their loggers have on disk.

Nothing is imported before it is needed: the trainers and loggers take seconds.
"""

from __future__ import annotations

import math
import os
import struct
from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tiny_models import nano_gpt, next_token_loss, tokens, transformers_model
from torch import Tensor, nn

import attn_diag

# Six steps of two micro-batches of two sequences each.
STEPS = 6
# For programs: nobody is asked for an account, and nothing leaves the machine.
OFFLINE = {
    "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1", "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1",
}  # fmt: skip


class Tokens(torch.utils.data.Dataset[Any]):
    """As Hugging Face's trainers want it, or the token numbers alone."""

    def __init__(self, *, named: bool) -> None:
        self.named = named

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        ids = tokens(i)[0]
        return {"input_ids": ids, "labels": ids} if self.named else ids


def broken(model: nn.Module, parameter: str) -> nn.Module:
    """With NaN in the second layer's projection: alarms at its second check."""
    with torch.no_grad():
        model.get_parameter(parameter)[0, 0] = math.nan
    return model


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def hugging_face(folder: Path, callbacks: Sequence[Any], *, nan: bool = False, **options: Any) -> Any:
    """A Trainer, not yet started: it evaluates every second step, and saves after the third."""
    from transformers import Trainer, TrainingArguments

    model = transformers_model("gpt2", "sdpa").model
    if nan:
        broken(model, "transformer.h.1.attn.c_attn.weight")
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "logging_steps": 2,
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 3, "report_to": [], "use_cpu": True,
        "lr_scheduler_type": "constant", "disable_tqdm": True,
    } | options  # fmt: skip
    data = Tokens(named=True)
    arguments = TrainingArguments(str(folder), **chosen)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def lightning(
    package: str, folder: Path, callbacks: Sequence[Any], *, nan: bool = False, loggers: Any = False, **options: Any
) -> tuple[Any, Any, Any]:
    """A Trainer, its module and its data; not yet started. It validates every second step."""
    L = import_module(package)

    def step(self: Any, batch: Tensor, _: int) -> Tensor:
        loss = next_token_loss(self.net, batch)
        self.log("loss", loss)
        return loss

    def validation(self: Any, batch: Tensor, _: int) -> None:
        self.log("validation", next_token_loss(self.net, batch))

    def optimizer(self: Any) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    methods = {"training_step": step, "validation_step": validation, "configure_optimizers": optimizer}
    module = type("Module", (L.LightningModule,), methods)()
    module.net = broken(nano_gpt().model, "h.1.attn.c_attn.weight") if nan else nano_gpt().model
    chosen = {
        "max_steps": STEPS, "accumulate_grad_batches": 2, "val_check_interval": 4, "limit_val_batches": 2,
        "logger": loggers, "accelerator": "cpu", "devices": 1, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1,
        "default_root_dir": str(folder),
    } | options  # fmt: skip
    trainer = L.Trainer(callbacks=list(callbacks), **chosen)
    return trainer, module, torch.utils.data.DataLoader(Tokens(named=False), batch_size=2)


def accelerate(folder: Path, every: int | None, *, log_with: Any = None, nan: bool = False, **options: Any) -> Any:
    """A whole loop, which logs its own loss too: what watched it (None where ``every`` is), and the parameters."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=log_with, project_dir=str(folder))
    if log_with is not None:
        accelerator.init_trackers("tiny")
    net: Any = broken(nano_gpt().model, "h.1.attn.c_attn.weight") if nan else nano_gpt().model
    data: Any = torch.utils.data.DataLoader(Tokens(named=False), batch_size=2)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net, optimizer, data = accelerator.prepare(net, optimizer, data)
    watching = None
    if every is not None:
        watching = attn_diag.accelerate_monitor(accelerator, net, every, **options)
    done = options.get("first_step", 0)
    for batch in data:
        with accelerator.accumulate(net):
            loss = next_token_loss(net, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.log({"loss": loss.item()}, step=done)
            done += 1
        if done == STEPS:
            break
    if watching is not None:
        watching.close()
    accelerator.end_training()
    return watching, parameters(net)


# What there is on disk.

Logged = dict[str, list[tuple[int, float]]]


def tensorboard_of(folder: Path) -> tuple[Logged, dict[str, list[tuple[int, str]]]]:
    """Scalars and texts by name, with their steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars: Logged = defaultdict(list)
    texts: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            scalars[name] += [(e.step, e.value) for e in events.Scalars(name)]
        for name in events.Tags()["tensors"]:
            texts[name] += [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(name)]
    return scalars, texts


def wandb_of(folder: Path) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Rows of the history, and alerts (title, text), of the newest offline run."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    # Its server, a process of its own, writes behind finish() too.
    wandb.teardown()
    rows, alerts = [], []
    file = max(folder.rglob("*.wandb"), key=os.path.getmtime)
    for data in _leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({i.key or "/".join(i.nested_key): i.value_json for i in record.history.item})
        elif record.WhichOneof("record_type") == "alert":
            alerts.append((record.alert.title, record.alert.text))
    return rows, alerts


def _leveldb_records(data: bytes) -> list[bytes]:
    """The records of a log in LevelDB's format, which W&B writes behind 7 bytes of its own."""
    found, part, at = [], b"", 7
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        # 1: whole; 2, 3, 4: first, middle and last part.
        if kind in (1, 4):
            found.append(part)
            part = b""
    return found


def mlflow_of(uri: str) -> tuple[Logged, dict[str, str]]:
    """Metrics and tags of the newest run."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]
    run = max(runs, key=lambda r: r.info.start_time)
    metrics = {n: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, n)] for n in run.data.metrics}
    return metrics, dict(run.data.tags)


def trackio_of(project: str) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Rows of the history, and alerts (title, text), of the newest run."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = list(trackio.Api().runs(project))[-1]
    rows: list[dict[str, Any]] = SQLiteStorage.get_logs(project, run.name)
    return rows, [(alert["title"], alert["text"]) for alert in run.alerts()]


# Programs: all loggers of a framework at once, on a model that alarms at its second check, step 2.

TITLE = "attn-diag: 8 attention alarms at step "
TEXT = "step 2, layer 0 head 0"


def hugging_face_loggers(folder: Path) -> None:
    """The Trainer logs a step under the number that ``global_step`` has after it."""
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    loggers = ["tensorboard", "wandb", "mlflow", "trackio"]
    trainer = hugging_face(folder, [attn_diag.trainer_monitor(2)], nan=True, report_to=loggers, project="tiny")
    trainer.train()
    # "epoch" and evaluation's rows are among what the Trainer itself logs.
    steps = [1, 3, 5]
    scalars, texts = tensorboard_of(folder / "tensorboard")
    assert scalars["train/attn/step"] == [(1, 0.0), (3, 2.0), (5, 4.0)]
    assert scalars["train/attn/alarm"] == [(1, 0.0), (3, 8.0), (5, 0.0)]
    assert [step for step, _ in scalars["train/loss"]] == [2, 4, 6], "its own log is as before"
    ((step, text),) = texts["attn/alarms/text_summary"]
    assert step == 3
    assert TEXT in text

    rows, alerts = wandb_of(folder)
    found = [row for row in rows if "train/attn/step" in row]
    assert [float(row["train/attn/step"]) for row in found] == [0, 2, 4]
    assert [int(row["train/global_step"]) for row in found] == steps
    assert len([row for row in rows if "train/loss" in row]) == 3
    _one_alert(alerts, step=3)

    metrics, tags = mlflow_of(os.environ["MLFLOW_TRACKING_URI"])
    assert metrics["attn/step"] == [(1, 0.0), (3, 2.0), (5, 4.0)]
    assert TEXT in tags["attn/alarms/step3"]

    rows, alerts = trackio_of("tiny")
    assert [(row["train/global_step"], row["train/attn/step"]) for row in rows if "train/attn/step" in row] == [
        (1, 0), (3, 2), (5, 4)
    ]  # fmt: skip
    _one_alert(alerts, step=3)


def lightning_loggers(folder: Path) -> None:
    """Lightning logs a step under its number from 0."""
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    loggers = [
        TensorBoardLogger(str(folder / "tensorboard")),
        WandbLogger(save_dir=str(folder), offline=True),
        MLFlowLogger(tracking_uri=os.environ["MLFLOW_TRACKING_URI"]),
        CSVLogger(str(folder / "csv")),
    ]
    callback = attn_diag.lightning_monitor(2)
    trainer, module, data = lightning("lightning.pytorch", folder, [callback], nan=True, loggers=loggers)
    trainer.fit(module, data, data)
    same = [(0, 0.0), (2, 2.0), (4, 4.0)]
    scalars, texts = tensorboard_of(folder / "tensorboard")
    assert scalars["attn/step"] == same
    assert [step for step, _ in scalars["loss"]] == list(range(STEPS)), "its own log is as before"
    ((step, text),) = texts["attn/alarms/text_summary"]
    assert step == 2
    assert TEXT in text

    rows, alerts = wandb_of(folder)
    found = [row for row in rows if "attn/step" in row]
    assert [(int(row["trainer/global_step"]), float(row["attn/step"])) for row in found] == same
    _one_alert(alerts, step=2)

    metrics, tags = mlflow_of(os.environ["MLFLOW_TRACKING_URI"])
    assert metrics["attn/step"] == same
    assert TEXT in tags["attn/alarms/step2"]
    (table,) = (folder / "csv").rglob("metrics.csv")
    assert "attn/alarms" in table.read_text().splitlines()[0]


def accelerate_loggers(folder: Path) -> None:
    """The number of the optimizer's step, from 0."""
    accelerate(folder, 2, log_with=["tensorboard", "wandb", "mlflow", "trackio"], nan=True)
    same = [(0, 0.0), (2, 2.0), (4, 4.0)]
    scalars, texts = tensorboard_of(folder)
    assert scalars["attn/step"] == same
    assert len(scalars["loss"]) == STEPS
    ((step, text),) = texts["attn/alarms/text_summary"]
    assert step == 2
    assert TEXT in text

    rows, alerts = wandb_of(folder)
    found = [row for row in rows if "attn/step" in row]
    assert [(int(row["_step"]), float(row["attn/step"])) for row in found] == same
    assert len([row for row in rows if "loss" in row]) == STEPS, "W&B has dropped none of the loop's own"
    _one_alert(alerts, step=2)

    metrics, tags = mlflow_of(os.environ["MLFLOW_TRACKING_URI"])
    assert metrics["attn/step"] == same
    assert TEXT in tags["attn/alarms/step2"]

    rows, alerts = trackio_of("tiny")
    assert [(row["step"], row["attn/step"]) for row in rows if "attn/step" in row] == same
    _one_alert(alerts, step=2)


def _one_alert(alerts: list[tuple[str, str]], step: int) -> None:
    ((title, text),) = alerts
    assert title == f"{TITLE}{step}"
    assert text.startswith(TEXT)
    assert len(text.splitlines()) == 8
