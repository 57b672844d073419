"""One line in Hugging Face's Trainer, TRL, Lightning and Accelerate, each with the real package on a tiny model."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import pickle
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Programs, loaded_by
from framework_runs import OFFLINE, STEPS, accelerate, hugging_face, lightning, parameters, tensorboard_of
from tiny_models import nano_gpt, next_token_loss, same, tokens
from torch import distributed

import attn_diag
from attn_diag.watching.frameworks import session as session_module
from attn_diag.watching.frameworks.session import MonitorOptions, Session
from attn_diag.watching.monitoring.alarm import Alarm
from attn_diag.watching.monitoring.record import MonitorCheck, read_log

FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "transformers", "trl", "wandb", "mlflow", "trackio")
LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")
# What other people's packages warn of is theirs; we log, and the tests read it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def steps(monitor: attn_diag.Monitor | None) -> list[int]:
    assert monitor is not None
    return [check.step for check in monitor.history]


def figures(check: MonitorCheck) -> list[float]:
    return [x for layer in check.layers for name in ("max_logit", "dw_q_share") for x in layer.values[name]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What attn-diag warned of."""
    caplog.set_level(logging.WARNING, logger="attn_diag")
    monkeypatch.setattr(session_module, "_told", set())
    return lambda: "\n".join(r.getMessage() for r in caplog.records if r.name == "attn_diag")


# What holds for all.


def test_no_framework_is_imported_before_it_is_asked_for() -> None:
    names = "trainer_monitor, attn_diag.lightning_monitor, attn_diag.accelerate_monitor"
    assert not loaded_by(f"import attn_diag; attn_diag.{names}", *FRAMEWORKS)
    assert "accelerate" in loaded_by("import accelerate", *FRAMEWORKS), "the check above can fail"


@pytest.mark.parametrize(
    ("call", "missing", "install"),
    [
        (lambda: attn_diag.trainer_monitor(), ["transformers"], r"pip install transformers\[torch\]"),
        (lambda: attn_diag.lightning_monitor(), LIGHTNINGS, "pip install lightning"),
        (lambda: attn_diag.accelerate_monitor(None, nano_gpt().model), ["accelerate"], "pip install accelerate"),
    ],
)
def test_a_missing_package_is_named(
    call: Callable[[], object], missing: list[str], install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(attn_diag.InputError, match=f"not installed: {install}"):
        call()


def test_options_are_the_monitor_s_and_wrong_names_are_found_at_once() -> None:
    ours = {"model", "every", "first_step", "history"}
    assert MonitorOptions.__annotations__.keys() == inspect.signature(attn_diag.Monitor).parameters.keys() - ours
    with pytest.raises(TypeError, match=r"Monitor takes no row here; it takes .*rows"):
        attn_diag.trainer_monitor(row=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="capture takes no first_step here"):
        attn_diag.lightning_monitor(capture={"path": "captures", "first_step": 3})
    with pytest.raises(TypeError, match='needs a "path"'):
        attn_diag.trainer_monitor(capture={"ring": 3})


def test_a_step_that_no_optimizer_ended_is_counted_all_the_same(tmp_path: Path) -> None:
    """A loss scaler skips it, or the optimizer is not of torch.optim."""
    model = nano_gpt().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = Session(1, tmp_path / "captures", {})
    watching.begin(model, 7)
    for step in range(8, 11):
        torch.autograd.backward(next_token_loss(model, tokens(step)))
        assert watching.step_ended(step - 1) is None, "gradients are accumulated"
        if step != 9:
            optimizer.step()
        news = watching.step_ended(step)
        assert news is not None
        assert news.metrics["attn/step"] == step - 1
        assert watching.step_ended(step) is None, "it is told once"
    watching.close()
    assert steps(watching.monitor) == [7, 8, 9]
    assert {path.name[:10] for path in (tmp_path / "captures").glob("*.safetensors")} == {
        "step000007", "step000008", "step000009"
    }  # fmt: skip


def test_what_is_sampled_before_the_first_step_is_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of TRL's GRPOTrainer each token of the first completion was a step: 16 in a run of four."""
    model = nano_gpt().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = Session(1, tmp_path / "captures", {})
    watching.begin(model, 0)
    for step in range(2):
        for _ in range(30):
            with torch.no_grad():
                next_token_loss(model, tokens(step))
        torch.autograd.backward(next_token_loss(model, tokens(step)))
        optimizer.step()
        watching.step_ended(step + 1)
    watching.close()
    assert steps(watching.monitor) == [0, 1]
    assert {path.name[:10] for path in (tmp_path / "captures").glob("*.safetensors")} == {"step000000", "step000001"}
    assert not caplog.text


def test_alarms_go_on_where_the_run_before_stopped() -> None:
    """By the same callback; without the history the second check alone would be the first that is not finite."""
    watching = Session(1, None, {})
    model = nano_gpt().model
    with torch.no_grad():
        model.get_parameter("h.1.attn.c_attn.weight")[0, 0] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alarms = []
    for first in (0, 1, 0):
        watching.begin(model, first)
        torch.autograd.backward(next_token_loss(model, tokens()))
        optimizer.step()
        news = watching.step_ended(first + 1)
        assert news is not None
        alarms.append(len(news.alarms))
    watching.close()
    assert alarms == [0, 8, 0]


# Hugging Face.


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulated gradients, evaluation in between, TensorBoard; the bits stay the same."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    bare = hugging_face(tmp_path / "bare", [])
    bare.train()
    callback = attn_diag.trainer_monitor(every=2, capture=tmp_path / "captures", layers={1})
    trainer = hugging_face(tmp_path / "watched", [callback], report_to=["tensorboard"])
    trainer.train()
    assert same(parameters(bare.model), parameters(trainer.model))
    assert callback.monitor is not None
    assert steps(callback.monitor) == [0, 2, 4]
    assert {layer.layer for check in callback.monitor.history for layer in check.layers} == {1}
    # Two layers in each of six steps: the capture has options of its own.
    assert len(list((tmp_path / "captures").glob("*.safetensors"))) == 2 * STEPS

    def own(history: list[dict[str, Any]]) -> list[Any]:
        return [(row["step"], row["loss"]) for row in history if "loss" in row]

    assert own(trainer.state.log_history) == own(bare.state.log_history)
    found = [row for row in trainer.state.log_history if "attn/step" in row]
    assert [(row["step"], row["attn/step"]) for row in found] == [(1, 0), (3, 2), (5, 4)]
    scalars, texts = tensorboard_of(tmp_path / "tensorboard")
    assert scalars["train/attn/step"] == [(1, 0.0), (3, 2.0), (5, 4.0)]
    last = callback.monitor.metrics()
    for name, value in last.items():
        assert scalars[f"train/{name}"][-1][1] == pytest.approx(value, rel=1e-6)
    assert "attn/alarms/text_summary" not in texts


def test_trainer_resumes_and_trains_again(tmp_path: Path, told: Callable[[], str]) -> None:
    log = tmp_path / "monitor.jsonl"
    whole = attn_diag.trainer_monitor(every=2)
    hugging_face(tmp_path / "whole", [whole]).train()
    first = attn_diag.trainer_monitor(every=2, log=log)
    # Killed in the fourth step, with a checkpoint after the third.
    hugging_face(tmp_path / "run", [first], max_steps=4).train()
    second = attn_diag.trainer_monitor(every=2, log=log)
    trainer = hugging_face(tmp_path / "run", [second])
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert steps(second.monitor) == [0, 2, 4]
    assert whole.monitor is not None
    assert second.monitor is not None
    for a, b in zip(whole.monitor.history, second.monitor.history, strict=True):
        assert figures(a) == pytest.approx(figures(b), rel=1e-6)
    assert [c.step for c in read_log(log)] == [0, 2, 4]
    assert [r["attn/step"] for r in trainer.state.log_history if "attn/step" in r] == [0, 2, 4]
    # Again, from the beginning: another monitor.
    before = second.monitor
    trainer.train()
    assert second.monitor is not before
    assert steps(second.monitor) == [0, 2, 4]
    assert "not watched" not in told()


def test_nothing_of_ours_is_raised_into_training(
    tmp_path: Path, told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainerCallback

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    class Greedy(TrainerCallback):
        """Knows no logs but losses."""

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            assert "train_runtime" in logs or "eval_loss" in logs or logs["loss"] > 0

    heard: list[Alarm] = []
    watching = attn_diag.trainer_monitor(every=2, on_alarm=heard.append)
    trainer = hugging_face(tmp_path, [Greedy(), watching], nan=False)
    trainer.train()
    assert "KeyError: 'loss'" in told()
    monkeypatch.setattr(Session, "news", fail)
    bare = hugging_face(tmp_path, [])
    bare.train()
    trainer = hugging_face(tmp_path, [watching])
    trainer.train()
    assert "RuntimeError: planted" in told()
    assert same(parameters(bare.model), parameters(trainer.model))
    monkeypatch.setattr(Session, "_begin", fail)
    trainer.train()
    assert not watching._session.running
    # An option that cannot be used is the user's to know, before the first step.
    monkeypatch.undo()
    with pytest.raises(attn_diag.InputError, match="every must be a whole number"):
        hugging_face(tmp_path, [attn_diag.trainer_monitor(every=0)]).train()


def test_a_training_that_fails_leaves_nothing_behind_that_the_next_would_meet(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    callback = attn_diag.trainer_monitor(every=1)
    with pytest.raises(KeyboardInterrupt):
        hugging_face(tmp_path, [callback, Stop()]).train()
    before = callback.monitor
    trainer = hugging_face(tmp_path, [callback], max_steps=2)
    trainer.train()
    assert callback.monitor is not before
    assert steps(before) == [0]
    assert steps(callback.monitor) == [0, 1]
    callback.close()


def test_trl(tmp_path: Path) -> None:
    """Its trainers log averages since their last log: ours does not come in between."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<unk>", "<pad>", "<eos>", *(f"w{i}" for i in range(50))]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=plain, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    data = Dataset.from_dict({"text": [" ".join(f"w{i * j % 50}" for j in range(1, 19)) for i in range(32)]})

    def train(callbacks: list[Any]) -> Any:
        options: dict[str, Any] = {
            "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 3,
            "report_to": [], "use_cpu": True, "bf16": False, "max_length": 20, "save_strategy": "no",
            "disable_tqdm": True,
        }  # fmt: skip
        model = hugging_face(tmp_path, []).model
        arguments = SFTConfig(str(tmp_path / "sft"), **options)
        trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)
        trainer.train()
        return trainer

    def own(trainer: Any) -> list[Any]:
        rows = [row for row in trainer.state.log_history if "attn/step" not in row and "train_runtime" not in row]
        assert any("mean_token_accuracy" in row for row in rows)
        return rows

    callback = attn_diag.trainer_monitor(every=2)
    bare, watched = train([]), train([callback])
    assert steps(callback.monitor) == [0, 2]
    assert same(parameters(bare.model), parameters(watched.model))
    assert own(bare) == own(watched)


def two_ranks(folder: Path) -> None:
    """Of trainings by two processes under all three; each process has made its own monitor."""
    places = {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    os.environ |= places | {"TORCHELASTIC_RUN_ID": "tests", "TENSORBOARD_LOGGING_DIR": str(folder / "hugging_face")}
    callback = attn_diag.trainer_monitor(every=2)
    hugging_face(folder, [callback], report_to=["tensorboard"], ddp_backend="gloo").train()
    assert distributed.get_world_size() == 2
    watching, _ = accelerate(folder / "accelerate", 2, log_with="tensorboard")
    lightning_s = attn_diag.lightning_monitor(every=2)
    logger = import_module("lightning.pytorch.loggers").TensorBoardLogger(str(folder / "lightning"))
    options: dict[str, Any] = {"loggers": logger, "strategy": "ddp", "devices": 2}
    trainer, module, data = lightning("lightning.pytorch", folder, [lightning_s], **options)
    trainer.fit(module, data, data)
    mine = [monitor and monitor.metrics() for monitor in (callback.monitor, watching.monitor, lightning_s.monitor)]
    both: list[Any] = [None, None]
    distributed.all_gather_object(both, mine)
    assert both[0] == both[1] == mine, "both have the sums over both"


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
def test_the_first_of_two_processes_logs(tmp_path: Path, programs: Programs) -> None:
    programs.ranks(__file__, tmp_path)
    for framework, name, first in (("hugging_face", "train/", 1), ("accelerate", "", 0), ("lightning", "", 0)):
        scalars, _ = tensorboard_of(tmp_path / framework)
        assert scalars[f"{name}attn/step"] == [(first, 0.0), (first + 2, 2.0), (first + 4, 4.0)], framework


# Lightning.


@pytest.mark.parametrize("package", LIGHTNINGS)
def test_lightning(package: str, tmp_path: Path) -> None:
    import_module(package)
    bare, module, data = lightning(package, tmp_path, [])
    bare.fit(module, data, data)
    loggers = import_module(f"{package}.loggers")
    callback = attn_diag.lightning_monitor(every=2, capture={"path": tmp_path / "captures", "steps": [3]})
    logger = loggers.TensorBoardLogger(str(tmp_path / "tensorboard"))
    trainer, watched, data = lightning(package, tmp_path, [callback], loggers=logger)
    trainer.fit(watched, data, data)
    assert same(parameters(module), parameters(watched))
    assert steps(callback.monitor) == [0, 2, 4]
    assert len(list((tmp_path / "captures").glob("step000003*.safetensors"))) == 2
    scalars, _ = tensorboard_of(tmp_path / "tensorboard")
    assert scalars["attn/step"] == [(0, 0.0), (2, 2.0), (4, 4.0)]
    assert callback.monitor is not None
    for name, value in callback.monitor.metrics().items():
        assert scalars[name][-1][1] == pytest.approx(value, rel=1e-6)


def test_lightning_resumes_and_fits_again(tmp_path: Path) -> None:
    whole = attn_diag.lightning_monitor(every=2)
    trainer, module, data = lightning("lightning.pytorch", tmp_path, [whole])
    trainer.fit(module, data)
    first = attn_diag.lightning_monitor(every=2, log=tmp_path / "monitor.jsonl")
    trainer, module, data = lightning("lightning.pytorch", tmp_path, [first], max_steps=3)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    second = attn_diag.lightning_monitor(every=2, log=tmp_path / "monitor.jsonl")
    trainer, module, data = lightning("lightning.pytorch", tmp_path, [second])
    trainer.fit(module, data, ckpt_path=str(tmp_path / "three.ckpt"), weights_only=False)
    assert steps(second.monitor) == [0, 2, 4]
    assert [c.step for c in read_log(tmp_path / "monitor.jsonl")] == [0, 2, 4]
    # The same trainer goes on, with its own count.
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(module, data)
    assert steps(second.monitor) == [0, 2, 4, 6]


def test_lightning_s_callback_can_be_pickled_and_stops_at_an_exception(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")  # whatever other tests have imported: that of its names is served
    callback: Any = pickle.loads(pickle.dumps(attn_diag.lightning_monitor(every=3, rows=7)))
    bases = {base.__module__.partition(".")[0] for base in type(callback).__mro__ if base.__name__ == "Callback"}
    assert bases >= {"lightning"}
    trainer, module, _ = lightning("lightning.pytorch", tmp_path, [callback])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, iter(tokens(i) if i < 4 else 1 / 0 for i in range(9)))
    assert steps(callback.monitor) == [0]
    assert not callback._session.running


# Accelerate.


def test_accelerate(tmp_path: Path) -> None:
    _, bare = accelerate(tmp_path, None)
    log = tmp_path / "monitor.jsonl"
    watching, bits = accelerate(tmp_path, 2, log_with="tensorboard", log=log, capture=tmp_path / "captures")
    assert same(bare, bits)
    assert steps(watching.monitor) == [0, 2, 4]
    scalars, _ = tensorboard_of(tmp_path)
    assert scalars["attn/step"] == [(0, 0.0), (2, 2.0), (4, 4.0)]
    assert [step for step, _ in scalars["loss"]] == list(range(STEPS))
    assert len(watching.recorder.written) == 2 * STEPS
    # Resumed, behind step 3.
    watching, _ = accelerate(tmp_path / "resumed", 2, log_with="tensorboard", log=log, first_step=3)
    assert steps(watching.monitor) == [0, 2, 4]
    scalars, _ = tensorboard_of(tmp_path / "resumed")
    assert scalars["attn/step"] == [(4, 4.0)]
    with pytest.raises(attn_diag.InputError, match=r"must be an accelerate\.Accelerator, got NoneType"):
        attn_diag.accelerate_monitor(None, nano_gpt().model)
    with pytest.raises(attn_diag.InputError, match="every must be"):
        accelerate(tmp_path, 0)


def test_accelerate_without_torch_s_optimizers(told: Callable[[], str]) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), nano_gpt().model
    with attn_diag.accelerate_monitor(accelerator, model, every=1) as watching:
        for step in range(3):
            accelerator.backward(next_token_loss(model, tokens(step)))
            watching.end_step()
    assert steps(watching.monitor) == [0, 1, 2]
    assert not told()


# W&B, MLflow and trackio, in processes of their own: each starts threads, servers and runs that are global.


@pytest.mark.parametrize("framework", ["hugging_face", "lightning", "accelerate"])
def test_metrics_and_alarms_arrive_in_every_logger(framework: str, tmp_path: Path, programs: Programs) -> None:
    places = {
        "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
    }  # fmt: skip
    source = "import sys\nfrom pathlib import Path\nimport framework_runs\n"
    source += f"framework_runs.{framework}_loggers(Path(sys.argv[1]))"
    done = programs.run(source, tmp_path, **OFFLINE, **places)
    assert done.code == 0, done.err[-4000:]


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
    # What is in cycles still holds DDP's reducer, which hangs where its group is gone.
    gc.collect()
    distributed.destroy_process_group()
