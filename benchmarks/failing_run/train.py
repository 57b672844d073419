"""Trains a GPT-2-shaped model whose attention rounds as the chosen arm says, until it has failed or the steps are done.

    python benchmarks/failing_run/train.py --arm A --tokens tokens.npy.xz --out runs
    torchrun --nproc-per-node 4 benchmarks/failing_run/train.py --arm A --tokens tokens.npy.xz --out runs

GPT-2 small without biases: 12 layers, 12 heads, width 768, context 1024, learned positions, tied embeddings. BF16
autocast, fp32 weights, AdamW (0.9, 0.95) without weight decay, gradients clipped at 1.0, linear warm-up over 2,000
steps to 1e-3, 160 sequences a step. Initial weights and the sequences of step n depend on the seed and on n alone:
neither on the arm, nor on the number of processes, nor on where a run was resumed.

One log per arm and seed, OUT/ARM_seedSEED.jsonl (``runlog``). A run stops ``--stop-after`` steps after it has left its
trend (``departure``), and cleanly, at the end of a step, on SIGTERM or SIGINT; with ``--checkpoint-every`` it is then
saved, and ``--resume`` goes on from there.

Without CUDA it runs on the CPU, the recipes' kernels interpreted by Triton: tiny sizes only.
"""

from __future__ import annotations

import argparse
import lzma
import math
import os
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

# Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from arms import ARMS, Attend
from departure import Watch
from runlog import RunLog, Writer
from torch.nn.parallel import DistributedDataParallel

import attn_diag
from attn_diag.provenance import describe_tool


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        out: Tensor = self.c_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=False)
        self.attn = Attention(width, heads, attend)
        self.ln_2 = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 4 * width, bias=False))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(4 * width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, attend: Attend) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads, attend) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> [B, T, C]."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        out: Tensor = self.ln_f(x)
        return out


class GPT(nn.Module):
    """GPT-2 without biases and dropout; names and initialisation as in nanoGPT."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, attend: Attend) -> None:
        super().__init__()
        self.transformer = Transformer(vocabulary, context, layers, heads, width, attend)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # Each of the 2 * layers residual branches adds its variance to the stream.
                shrink = math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(weight, std=0.02 / shrink)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of ``targets`` [B, T] after ``tokens`` [B, T], both int64."""
        return self.loss(self.transformer(tokens), targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    def compile_all_but_attention(self) -> None:
        """torch.compile what stands between the attentions; module names and hooks on them stay."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign, no-untyped-call]
            elif isinstance(module, Block):
                module.compile(dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Place:
    """This process among those of the run."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def here(cls, device: str) -> Place:
        """From torchrun's environment, or alone; ``device`` "auto": CUDA where there is one."""
        cuda = device != "cpu" and torch.cuda.is_available()
        rank, world, local = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        place = cls(rank, world, torch.device("cuda", local) if cuda else torch.device("cpu"))
        if cuda:
            torch.cuda.set_device(place.device)
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if cuda else "gloo")
        return place

    def share(self, starts: Tensor) -> Tensor:
        """This process's part of a step's sequences."""
        if len(starts) % self.world:
            raise ValueError(f"{len(starts)} sequences a step cannot be shared by {self.world} processes")
        return starts.chunk(self.world)[self.rank]

    def mean(self, values: Tensor) -> list[float]:
        """Means over the processes; waits for the device."""
        if self.world > 1:
            dist.all_reduce(values)
            values /= self.world
        found: list[float] = values.tolist()
        return found


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
    """Model, optimizer and data of one process; ``step`` counts the optimizer's steps done."""

    def __init__(self, options: argparse.Namespace, place: Place, tokens: np.ndarray[Any, np.dtype[Any]]) -> None:
        self.options, self.place, self.step = options, place, 0
        torch.manual_seed(options.seed)  # on the CPU: the same weights on every device
        self.model = GPT(
            options.vocabulary, options.context, options.layers, options.heads, options.width, ARMS[options.arm].attend
        ).to(place.device)
        if options.compile:
            self.model.compile_all_but_attention()
        self.wrapped: nn.Module = self.model
        if place.world > 1:
            self.wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=place.device.type == "cuda"
        )
        # The whole corpus lives on the device: nothing is copied in a step but the starts.
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(place.device)
        self.offsets = torch.arange(options.context + 1, device=place.device)

    @property
    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then constant."""
        rate: float = self.options.learning_rate * min(1.0, (self.step + 1) / self.options.warmup)
        return rate

    def micro_batches(self) -> Iterator[Tensor]:
        """This process's sequences of the next step, int64 [at most micro-batch, context + 1]."""
        o = self.options
        starts = self.place.share(sequence_starts(o.seed, self.step, o.sequences, len(self.tokens), o.context))
        for part in torch.split(starts.to(self.place.device, non_blocking=True), o.micro_batch):
            yield self.tokens[part[:, None] + self.offsets].long()

    def train_step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns this process's loss and the gradient norm before clipping, on the device."""
        batches = list(self.micro_batches())
        sequences = sum(map(len, batches))
        total = torch.zeros((), device=self.place.device)
        for batch in batches:
            last = batch is batches[-1]
            with nullcontext() if last or self.place.world == 1 else self.wrapped.no_sync():  # type: ignore[operator]
                with torch.autocast(self.place.device.type, torch.bfloat16):
                    loss = self.wrapped(batch[:, :-1], batch[:, 1:]) * (len(batch) / sequences)
                loss.backward()
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
        if self.place.rank:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        cuda = self.place.device.type == "cuda"
        torch.save(
            {
                "run": run_identity(self.options),
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "rng_cuda": torch.cuda.get_rng_state() if cuda else None,
            },
            partial,
        )
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises ValueError where it is another run's."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["run"] != run_identity(self.options):
            raise ValueError(f"{path.name} is of the run {state['run']}, not of {run_identity(self.options)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"])
        if state["rng_cuda"] is not None and self.place.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng_cuda"])


def run_identity(options: argparse.Namespace) -> dict[str, Any]:
    """What makes a run this run: two with the same do the same steps."""
    return {name: getattr(options, name) for name in ("arm", "seed", "compile", *SIZES)}


def header(trainer: Trainer, corpus: dict[str, Any]) -> dict[str, Any]:
    options, arm = trainer.options, ARMS[trainer.options.arm]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": run_identity(options),
        "words": arm.words,
        "forward": "SDPA flash" if arm.forward is None else arm.forward.sites(),
        "backward": "SDPA flash" if arm.forward is None else arm.backward.sites(),
        "tool": describe_tool(trainer.place.device).__dict__,
        "world": trainer.place.world,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "tokens": corpus,
        "first_step": trainer.step,
        "monitor_every": options.monitor_every,
    }


class Record:
    """Writes what a step brought to the log, and knows when the run has left its trend. Without a log it only asks the
    monitor, whose answer may be a reduction over all processes."""

    def __init__(self, log: Writer | None, monitor: Any, options: argparse.Namespace) -> None:
        self.log, self.monitor, self.options, self.watch = log, monitor, options, Watch()
        self._metrics, self._alarms = "", 0

    def step(self, row: dict[str, Any]) -> None:
        if self.log is not None:
            self.watch.update(row["step"], row["loss"], row["grad_norm"])
            self.log.write(row)
        if self.monitor is not None:
            self._read_monitor(row["step"])

    def _read_monitor(self, step: int) -> None:
        # A check of an earlier step may come late.
        if step % self.options.monitor_every in (0, self.options.monitor_every - 1):
            metrics = self.monitor.metrics()
            if metrics and repr(metrics) != self._metrics and self.log is not None:
                self.log.write_monitor(step, metrics)
            self._metrics = repr(metrics)
        for alarm in self.monitor.alarms[self._alarms :]:
            if self.log is not None:
                named = {name: getattr(alarm, name) for name in ("kind", "step", "layer", "head", "reason")}
                self.log.write({"alarm": named | {"seen": step}})
        self._alarms = len(self.monitor.alarms)

    def enough(self, step: int) -> bool:
        """Whether the run left its trend so long ago that ``step`` need not be done."""
        first = self.watch.first
        return first is not None and step > first.step + self.options.stop_after


def train(options: argparse.Namespace, place: Place, received: list[int]) -> str:
    """The run; returns how it ended. ``received``: signals; with one in it the run ends after the step at work."""
    if options.compile and (options.capture_steps or options.monitor_every):
        raise ValueError("hooks are not put into compiled modules: choose --compile, or the monitor and captures")
    tokens = load_tokens(options.tokens, options.vocabulary)
    corpus = {"file": options.tokens.name, "count": len(tokens), "crc32": zlib.crc32(tokens.tobytes())}
    trainer = Trainer(options, place, tokens)
    name = f"{options.arm}_seed{options.seed}"
    path, checkpoint = options.out / f"{name}.jsonl", (options.checkpoints or options.out) / f"{name}.pt"
    if options.resume and checkpoint.exists():
        trainer.load(checkpoint)
    with ExitStack() as stack:
        log = None
        if place.rank == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(Writer(path, trainer.step if options.resume else None))
        record = Record(log, watching(stack, trainer, name), options)
        if log is not None:
            for done in RunLog.read(path).steps if trainer.step else ():
                record.watch.update(*done)
            log.write({"header": header(trainer, corpus)})
        end = "finished"
        while trainer.step < options.steps:
            began, step, rate = time.perf_counter(), trainer.step, trainer.learning_rate
            loss, norm = trainer.train_step()
            # One wait for the device a step. The wish to stop travels with the loss: all processes stop together.
            wish = torch.tensor(float(bool(received) or record.enough(trainer.step)), device=place.device)
            mean_loss, grad_norm, stop = place.mean(torch.stack([loss, norm, wish]))
            seconds = time.perf_counter() - began
            record.step({"step": step, "loss": mean_loss, "grad_norm": grad_norm, "lr": rate, "seconds": seconds})
            if place.rank == 0 and step % options.print_every == 0:
                print(f"{name} {step}: loss {mean_loss:.4f}, norm {grad_norm:.3g}, {seconds * 1e3:.0f} ms", flush=True)
            if options.checkpoint_every and trainer.step % options.checkpoint_every == 0:
                trainer.save(checkpoint)
            if stop:
                end = "stopped by a signal" if received else "departed"
                break
        if options.checkpoint_every:
            trainer.save(checkpoint)
        if log is not None:
            log.write({"end": end, "step": trainer.step})
    return end


def watching(stack: ExitStack, trainer: Trainer, name: str) -> Any:
    """Enters the monitor (returned) and the capture that the options ask for, until the stack closes.

    The monitor's own log, with every head, is OUT/monitor/ARM_seedSEED.jsonl; captures are in
    OUT/captures/ARM_seedSEED_fromSTEP, since a folder takes those of one piece of a run.
    """
    options, first = trainer.options, trainer.step
    if options.capture_steps:
        folder = options.out / "captures" / f"{name}_from{first}"
        steps, layers = options.capture_steps, options.capture_layers
        stack.enter_context(attn_diag.capture(trainer.model, folder, steps=steps, layers=layers, first_step=first))
    if not options.monitor_every:
        return None
    log = options.out / "monitor" / f"{name}.jsonl"
    return stack.enter_context(attn_diag.Monitor(trainer.model, every=options.monitor_every, first_step=first, log=log))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arm", choices=ARMS, required=True, metavar="NAME", help=", ".join(ARMS))
    p.add_argument("--tokens", type=Path, required=True, metavar="FILE", help="1-D integers, .npy or .npy.xz")
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the log and captures")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--steps", type=int, default=1100, help="in all, those before a resume included")
    p.add_argument("--stop-after", type=int, default=30, metavar="STEPS", help="go on so long after the departure")
    p.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS", help="0: no checkpoints")
    p.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="where, if not in --out")
    p.add_argument("--resume", action="store_true", help="from the checkpoint, if there is one")
    p.add_argument("--monitor-every", type=int, default=0, metavar="STEPS", help="0: no monitor")
    p.add_argument("--capture-steps", type=int, nargs="*", metavar="STEP")
    p.add_argument("--capture-layers", type=int, nargs="*", metavar="LAYER", help="default: all")
    p.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    p.add_argument("--device", choices=("auto", "cpu"), default="auto")
    p.add_argument("--compile", action="store_true", help="all but the attention; without monitor and captures")
    sizes = p.add_argument_group("sizes and rates")
    for name, default in SIZES.items():
        sizes.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return p


# Of the runs that failed (micro_batch: sequences of one forward, on each process).
SIZES: dict[str, int | float] = {
    "layers": 12, "heads": 12, "width": 768, "context": 1024, "vocabulary": 16384, "sequences": 160,
    "micro_batch": 32, "warmup": 2000, "learning_rate": 1e-3, "clip": 1.0,
}  # fmt: skip


def main() -> None:
    options = parser().parse_args()
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)  # the second one ends the process

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    torch.set_float32_matmul_precision("high")
    place = Place.here(options.device)
    try:
        train(options, place, received)
    finally:
        if place.world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
