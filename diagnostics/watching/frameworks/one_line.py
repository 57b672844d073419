"""The one line for each framework. None of them is imported before its function is called."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Unpack

from attn_diag.errors import InputError
from attn_diag.watching.frameworks.session import CaptureOptions, MonitorOptions, Session

if TYPE_CHECKING:
    from torch import nn

    from attn_diag.watching.frameworks.accelerator import AccelerateMonitor
    from attn_diag.watching.frameworks.hugging_face import TrainerMonitor
    from attn_diag.watching.frameworks.lightning_callback import LightningMonitor
    from attn_diag.watching.frameworks.trl_mismatch import MismatchCallback


def trainer_monitor(
    every: int = 50, *, capture: CaptureOptions | None = None, **options: Unpack[MonitorOptions]
) -> TrainerMonitor:
    """Make the callback that watches attention under transformers' ``Trainer``, and TRL's.

        Trainer(model, args, train_dataset=data, callbacks=[attn_diag.trainer_monitor(every=50)]).train()

    A step is the trainer's: however many micro-batches it accumulates, whether or not a loss scaler skips it, and a
    resumed training goes on at its ``global_step``. What a check finds goes at once to every logger that the trainer
    has (``report_to``), as its own metrics do ("train/attn/max_logit/max"), and to ``state.log_history``; not to the
    console. Alarms are an alert in W&B and trackio, a text in TensorBoard, a tag of the run in MLflow, and a warning of
    Python's logger "attn_diag". The process of rank 0 logs. Training keeps its bits.

    A run that is resumed with the same ``log``, or by the same callback, has its alarms go on as if nothing had
    happened.

    Args:
        every: steps between checks; the first step's number is 0 (``global_step`` while it is made).
        capture: also write captures: a folder, or a mapping of all arguments of ``attn_diag.capture``:
            ``{"path": "captures/", "ring": 4}``. Later trainings write to <path>-2, if not told otherwise.
        options: of ``attn_diag.Monitor``.

    Returns:
        A ``transformers.TrainerCallback``, with ``monitor`` and ``recorder`` to look at while it trains and afterwards,
        and ``close()`` for trainings that end by an exception.

    Raises:
        InputError: transformers is not installed; or, when training begins, an option cannot be used. Later nothing is
            raised: what goes wrong is logged (logger "attn_diag").
        TypeError: an option has no such name.
    """
    _require("trainer_monitor", "transformers", "transformers[torch]")
    from attn_diag.watching.frameworks.hugging_face import TrainerMonitor

    return TrainerMonitor(Session(every, capture, options))


def mismatch_callback(trainer: Any, every: int = 50, *, sequences: int = 2, tokens: int = 64) -> MismatchCallback:
    """Make the callback that splits the mismatch of sampling and training under TRL's ``GRPOTrainer`` and its kin.

        trainer = GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=data)
        trainer.add_callback(attn_diag.mismatch_callback(trainer, every=50))

    Every so many steps some of the sampled sequences are run again with the weights of that step, as one forward and
    token by token from a cache, and the difference of their log-probabilities is split by layer and place
    (``attn_diag/mismatch/layer_3/rounding``, of the squared difference). Where an engine sampled (``use_vllm``), what
    its log-probabilities really differed by is logged under verl's and slime's names (``rollout_corr/kl``,
    ``train/train_rollout_logprob_abs_diff``); else those are of the two runs. The figures go to the trainer's loggers
    and ``state.log_history``. The process of rank 0 runs and logs: parameters that are spread over processes (FSDP,
    ZeRO-3) cannot be run so.

    Args:
        trainer: The trainer that it is added to.
        every: Steps between splits.
        sequences: So many sampled sequences of a step.
        tokens: Of each, the first so many after the prompt.

    Returns:
        A ``transformers.TrainerCallback``, whose ``result`` is the newest split.

    Raises:
        InputError: transformers is not installed, or a number is below 1. While training nothing is raised: what goes
            wrong is logged (logger "attn_diag").
    """
    _require("mismatch_callback", "transformers", "transformers[torch]")
    from attn_diag.watching.frameworks.trl_mismatch import MismatchCallback

    return MismatchCallback(trainer, every, sequences, tokens)


def lightning_monitor(
    every: int = 50, *, capture: CaptureOptions | None = None, **options: Unpack[MonitorOptions]
) -> LightningMonitor:
    """Make the callback that watches attention under Lightning (``lightning`` and ``pytorch_lightning``).

        L.Trainer(callbacks=[attn_diag.lightning_monitor(every=50)]).fit(model, data)

    A step is the trainer's (``global_step``), with accumulated gradients and resumed runs too; the sanity check and
    validation are passed over. What a check finds goes at once to every logger of the trainer, whatever
    ``log_every_n_steps`` is. Alarms are an alert in W&B, a text in TensorBoard, a tag of the run in MLflow, and a
    warning of Python's logger "attn_diag". The process of rank 0 logs. Training keeps its bits.

    Args:
        every: steps between checks; the first step's number is 0.
        capture: also write captures; see ``trainer_monitor``.
        options: of ``attn_diag.Monitor``.

    Returns:
        A Lightning ``Callback``, with ``monitor``, ``recorder`` and ``close()``.

    Raises:
        InputError: Lightning is not installed; or, when training begins, an option cannot be used. Later nothing is
            raised: what goes wrong is logged (logger "attn_diag").
        TypeError: an option has no such name.
    """
    from attn_diag.watching.frameworks.lightning_callback import lightning_callback

    return lightning_callback(Session(every, capture, options))


def accelerate_monitor(
    accelerator: Any,
    model: nn.Module,
    every: int = 50,
    *,
    first_step: int = 0,
    capture: CaptureOptions | None = None,
    **options: Unpack[MonitorOptions],
) -> AccelerateMonitor:
    """Watch attention in a loop that is written with Accelerate, from now until ``close()``.

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        monitor = attn_diag.accelerate_monitor(accelerator, model, every=50)

    A step is the optimizer's; the micro-batches that ``accelerator.accumulate`` makes are none. What a check finds goes
    to the trackers by ``accelerator.log``, under the number of the optimizer's step, from ``first_step`` on. A loop
    that logs under other numbers (epochs, tokens) takes ``attn_diag.Monitor(accelerator.unwrap_model(model))`` and logs
    its ``metrics()`` itself. Alarms are an alert in W&B and trackio, a text in TensorBoard, a tag of the run in MLflow,
    and a warning of Python's logger "attn_diag". The main process logs. Training keeps its bits.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: as ``accelerator.prepare`` returned it, or as it was before.
        every: steps between checks.
        first_step: the number of the first step, where a run is resumed; with the same ``log`` its alarms go on as if
            nothing had happened.
        capture: also write captures; see ``trainer_monitor``.
        options: of ``attn_diag.Monitor``.

    Returns:
        A context manager (also ``close()``), with ``monitor``, ``recorder`` and ``end_step()`` for optimizers that are
        not of torch.optim.

    Raises:
        InputError: Accelerate is not installed, or ``accelerator`` is none; or an option cannot be used. Later nothing
            is raised: what goes wrong is logged (logger "attn_diag").
        TypeError: an option has no such name.
    """
    _require("accelerate_monitor", "accelerate", "accelerate")
    from accelerate import Accelerator

    if not isinstance(accelerator, Accelerator):
        raise InputError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}")
    from attn_diag.watching.frameworks.accelerator import AccelerateMonitor

    return AccelerateMonitor(accelerator, model, Session(every, capture, options), first_step)


def _require(who: str, package: str, install: str) -> None:
    if find_spec(package) is None:
        raise InputError(f"{who} needs {package}, which is not installed: pip install {install}")
