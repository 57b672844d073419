"""Trains a GPT-2-shaped model whose attention rounds as the chosen arm says, until it has failed or the steps are done.

    python benchmarks/failing_run/train.py --arm A --tokens tokens.npy.xz --out runs

GPT-2 small without biases: 12 layers, 12 heads, width 768, context 1024, learned positions, tied embeddings. BF16
autocast, fp32 weights, AdamW (0.9, 0.95) without weight decay, gradients clipped at 1.0, linear warm-up over 2,000
steps to 1e-3, 40 sequences a step. Initial weights and the sequences of step n depend on the seed and on n alone:
neither on the arm nor on where a run was resumed. Without a token file: ``make_tokens.py``.

One log per arm and seed, OUT/ARM_seedSEED.jsonl (``runlog``). A run stops ``--stop-after`` steps after it has left its
trend (``runlog``), and cleanly, at the end of a step, on SIGTERM or SIGINT; with ``--checkpoint-every`` it is then
saved, and ``--resume`` goes on from there. With ``--at-alarm`` the first alarm of the monitor keeps a checkpoint, and
captures the head in the next step; ``--start-from`` that checkpoint another arm goes on: the cure, put in at the alarm.

Without CUDA it runs on the CPU, the recipes' kernels interpreted by Triton: tiny sizes only.
"""

from __future__ import annotations

import argparse
import lzma
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from arms import ARMS, GPT, arm
from observe import Observer, steps_of
from runlog import WINDOW, RunLog, Watch, Writer, run_name

from attn_diag.head.machine import describe_tool, pick_device


def load_tokens(path: Path, vocabulary: int) -> np.ndarray[Any, np.dtype[Any]]:
    """A 1-D array of token ids from .npy or .npy.xz. Raises ValueError for ids beyond the vocabulary."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        tokens = np.load(file)
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ValueError(f"tokens must be a 1-D array of integers, got {tokens.dtype} {list(tokens.shape)}")
    if tokens.max() >= vocabulary:
        raise ValueError(f"token {tokens.max()} is beyond the vocabulary of {vocabulary}; give --vocabulary")
    return np.asarray(tokens)


def sequence_starts(seed: int, step: int, sequences: int, tokens: int, context: int) -> Tensor:
    """Where a step's sequences start in the token file: int64 [sequences], on the CPU, from seed and step alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(tokens - context, (sequences,), generator=generator)


class Trainer:
    """Model, optimizer and data; ``step`` counts the optimizer's steps done."""

    def __init__(self, options: argparse.Namespace, tokens: np.ndarray[Any, np.dtype[Any]]) -> None:
        self.options, self.device, self.step = options, pick_device(options.device), 0
        torch.manual_seed(options.seed)  # on the CPU: the same weights on every device
        o = options
        self.model = GPT(o.vocabulary, o.context, o.layers, o.heads, o.width, arm(o.arm).attend).to(self.device)
        self.run: Callable[..., Tensor] = self.model
        if options.compile == "whole":
            # Inductor's embedding adds its gradients up in no order of its own otherwise.
            torch.use_deterministic_algorithms(True)
            self.run = torch.compile(self.model, dynamic=False)
        elif options.compile:
            self.model.compile_all_but_attention()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=self.device.type == "cuda"
        )
        # The whole corpus lives on the device: nothing is copied in a step but the starts.
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(self.device)
        self.offsets = torch.arange(options.context + 1, device=self.device)

    @property
    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then constant."""
        rate: float = self.options.learning_rate * min(1.0, (self.step + 1) / self.options.warmup)
        return rate

    def micro_batches(self) -> Iterator[Tensor]:
        """The sequences of the next step, int64 [at most micro-batch, context + 1]."""
        o = self.options
        starts = sequence_starts(o.seed, self.step, o.sequences, len(self.tokens), o.context)
        for part in torch.split(starts.to(self.device, non_blocking=True), o.micro_batch):
            yield self.tokens[part[:, None] + self.offsets].long()

    def train_step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns the loss and the gradient norm before clipping, on the device."""
        batches = list(self.micro_batches())
        sequences = sum(map(len, batches))
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.run(batch[:, :-1], batch[:, 1:]) * (len(batch) / sequences)
            torch.autograd.backward(loss)
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total, norm

    def save(self, path: Path) -> None:
        """A checkpoint, complete or not there at all. The data's position is the step."""
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "run": run_identity(self.options),
                "name": name_of(self.options),
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
            partial,
        )
        partial.replace(path)

    def load(self, path: Path, but: tuple[str, ...] = ()) -> str:
        """Go on from a checkpoint; returns the name of its run. Raises ValueError where that is another one, except in
        what ``but`` names."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        own, run = run_identity(self.options), dict(state["run"])
        if own | {name: run[name] for name in but} != run:
            raise ValueError(f"{path.name} is of the run {run}, not of {own}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return str(state["name"])


def run_identity(options: argparse.Namespace) -> dict[str, Any]:
    """What makes a run this run: two with the same do the same steps."""
    return {name: getattr(options, name) for name in ("arm", "seed", "compile", *SIZES)}


def name_of(options: argparse.Namespace) -> str:
    """The stem of a run's files."""
    return run_name(options.arm, options.seed, options.tag)


def header(trainer: Trainer, corpus: dict[str, Any], parent: str | None) -> dict[str, Any]:
    options, attention = trainer.options, arm(trainer.options.arm)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": run_identity(options),
        "from": None if parent is None else {"run": parent, "step": trainer.step},
        "words": attention.words,
        "forward": "SDPA flash" if attention.forward is None else attention.forward.sites(),
        "backward": "SDPA flash" if attention.forward is None else attention.backward.sites(),
        "tool": describe_tool(trainer.device).__dict__,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "tokens": corpus,
        "first_step": trainer.step,
        "monitor_every": options.monitor_every,
    }


def train(options: argparse.Namespace, received: list[int]) -> str:
    """The run; returns how it ended. ``received``: signals; with one in it the run ends after the step at work."""
    tokens = load_tokens(options.tokens, options.vocabulary)
    corpus = {"file": options.tokens.name, "count": len(tokens), "crc32": zlib.crc32(tokens.tobytes())}
    if len(tokens) <= options.context:
        raise ValueError(
            f"{options.tokens.name} has {len(tokens)} tokens, more than the context of {options.context} are needed"
        )
    trainer = Trainer(options, tokens)
    name = name_of(options)
    path, checkpoint, at_alarm = (options.out / f"{name}{end}" for end in (".jsonl", ".pt", "_alarm.pt"))
    parent, resumed = None, options.resume and checkpoint.exists()
    if resumed:
        trainer.load(checkpoint)
    elif options.start_from is not None:
        parent = trainer.load(options.start_from, but=("arm",))
    with ExitStack() as stack:
        options.out.mkdir(parents=True, exist_ok=True)
        # Of an earlier piece that left no checkpoint nothing is kept.
        kept_until = trainer.step if resumed else 0
        log = stack.enter_context(Writer(path, kept_until if options.resume else None))
        log.write({"header": header(trainer, corpus, parent)})
        if not resumed:
            at_alarm.unlink(missing_ok=True)  # of an earlier run: nothing may start from it any more
        alarmed = resumed and at_alarm.exists()
        observer = Observer(stack, log, trainer.model, options, name, trainer.step, parent=parent, alarmed=alarmed)
        watch = Watch()
        if parent is not None:
            before = options.out / f"{parent}.jsonl"
            if before.exists():
                log.write_history(before, trainer.step - WINDOW, trainer.step)
            else:
                print(f"{name}: no log {before}; a departure in the first {WINDOW} steps may go unnoticed", flush=True)
        for done in RunLog.read(path).steps:
            watch.update(*done)
        end = "finished"
        while trainer.step < options.steps:
            began, step, rate = time.perf_counter(), trainer.step, trainer.learning_rate
            loss, grad_norm = torch.stack(trainer.train_step()).tolist()  # one wait for the device a step
            seconds = time.perf_counter() - began
            watch.update(step, loss, grad_norm)
            log.write({"step": step, "loss": loss, "grad_norm": grad_norm, "lr": rate, "seconds": seconds})
            if alarming := observer.first_alarm(trainer.step):
                trainer.save(at_alarm)
            if step % options.print_every == 0:
                print(f"{name} {step}: loss {loss:.4f}, norm {grad_norm:.3g}, {seconds * 1e3:.0f} ms", flush=True)
            if options.checkpoint_every and trainer.step % options.checkpoint_every == 0:
                trainer.save(checkpoint)
            failed = watch.first is not None and trainer.step > watch.first.step + options.stop_after
            if (received or failed) and not alarming:  # else the next step is still to be captured
                end = "stopped by a signal" if received else "departed"
                break
        if options.checkpoint_every:
            trainer.save(checkpoint)
        log.write({"end": end, "step": trainer.step})
    return end


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arm", required=True, metavar="NAME", help=f"{', '.join(ARMS)}, or NAME+MITIGATION of what-if")
    p.add_argument("--tokens", type=Path, required=True, metavar="FILE", help="1-D integers, .npy or .npy.xz")
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the log and captures")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tag", default="", metavar="TEXT", help="added to the run's name")
    p.add_argument("--steps", type=int, default=1100, help="in all, those before a resume included")
    p.add_argument("--stop-after", type=int, default=30, metavar="STEPS", help="go on so long after the departure")
    p.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS", help="0: no checkpoints")
    p.add_argument("--resume", action="store_true", help="from the checkpoint, if there is one")
    p.add_argument("--start-from", type=Path, metavar="FILE", help="a checkpoint, also another arm's")
    p.add_argument("--monitor-every", type=int, default=0, metavar="STEPS", help="0: no monitor")
    p.add_argument("--at-alarm", action="store_true", help="at the first: keep a checkpoint, and capture the head")
    p.add_argument("--capture-steps", type=steps_of, metavar="FIRST:END", help="one step, or a range of them")
    p.add_argument("--capture-layers", type=int, nargs="*", metavar="LAYER", help="default: all")
    p.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    p.add_argument("--device", choices=("auto", "cpu"), default="auto")
    p.add_argument(
        "--compile", nargs="?", choices=("whole",), const=True, default=False,
        help="torch.compile all but the attention, or the whole model, attention included",
    )  # fmt: skip
    sizes = p.add_argument_group("sizes and rates")
    for name, default in SIZES.items():
        sizes.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return p


# micro_batch: sequences of one forward.
SIZES: dict[str, int | float] = {
    "layers": 12, "heads": 12, "width": 768, "context": 1024, "vocabulary": 16384, "sequences": 40,
    "micro_batch": 40, "warmup": 2000, "learning_rate": 1e-3, "clip": 1.0,
}  # fmt: skip


def main() -> None:
    options = parser().parse_args()
    arm(options.arm)
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)  # the second one ends the process

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    torch.set_float32_matmul_precision("high")
    train(options, received)


if __name__ == "__main__":
    main()
