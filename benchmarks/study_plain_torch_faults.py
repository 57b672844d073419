"""Faults in attention of plain torch, from one step of a healthy training on: does the monitor alarm?

The models of ``study_healthy_layouts`` with eager attention, and their own roundings; the fault comes at step 120.

    python benchmarks/study_plain_torch_faults.py --first 40 --seeds 2 --json …
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from measuring import made_by, options_of, save
from study_healthy_layouts import model_of, trained
from torch import Tensor

AT, STEPS, EVERY = 120, 200, 5
# Model, mode and learning rate; the first two are those in which healthy runs came nearest to an alarm.
SETTINGS = (("deepseek-v3 eager", "autocast", 1e-3), ("gemma-2", "bf16", 3e-3), ("packed llama eager", "bf16", 1e-3))


class _Value(torch.autograd.Function):
    """Another x, and its gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return change(x.double()).to(x.dtype)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _to_zero(x: Tensor, bits: int) -> Tensor:
    """Significands of ``bits`` bits, cut off."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(mantissa * 2**bits) / 2**bits, exponent)


def _delta(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """softmax whose backward has another delta."""

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: Tensor) -> Tensor:
            probs = scores.softmax(-1)
            ctx.save_for_backward(probs)
            return probs

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (probs,) = ctx.saved_tensors
            delta = (probs * gradients[0]).sum(-1, keepdim=True)
            found: Tensor = probs * (gradients[0] - change(delta))
            return found

    def softmax(scores: Tensor) -> Tensor:
        found: Tensor = Softmax.apply(scores)  # type: ignore[no-untyped-call]
        return found

    return softmax


def _same(x: Tensor) -> Tensor:
    return x


# What happens to q's gradient, to the scores, and in the softmax.
FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "none": (_same, _same, lambda s: s.softmax(-1)),
    "dQ times 1.05": (lambda g: 1.05 * g, _same, lambda s: s.softmax(-1)),
    "scores to zero, 7 bits": (_same, lambda s: _to_zero(s, 7), lambda s: s.softmax(-1)),
    "scores to zero, 5 bits": (_same, lambda s: _to_zero(s, 5), lambda s: s.softmax(-1)),
    "P to zero, 4 bits": (_same, _same, lambda s: _Value.apply(s.softmax(-1), lambda p: _to_zero(p, 4))),  # type: ignore[no-untyped-call]
    "delta times 1.05": (_same, _same, _delta(lambda d: 1.05 * d)),
    "delta to zero, 4 bits": (_same, _same, _delta(lambda d: _to_zero(d, 4))),
    "delta and a constant": (_same, _same, _delta(lambda d: d + 0.05 * d.square().mean().sqrt())),
    "delta and a constant, smaller": (_same, _same, _delta(lambda d: d + 0.02 * d.square().mean().sqrt())),
}


class Fault:
    """Attention with one of ``FAULTS`` from a step on; before it, and but for it, the model's own in its own dtypes."""

    def __init__(self, name: str) -> None:
        self.gradient, self.scores, self.softmax = FAULTS[name]
        self.step = 0

    def begins(self, step: int) -> None:
        """Take the step that begins."""
        self.step = step

    def attention(
        self, _module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float,
        softcap: float | None = None, **_options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As ``eager_attention_forward`` of transformers."""
        faulty = self.step >= AT
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        if faulty and q.requires_grad:
            q = q.view_as(q)
            q.register_hook(lambda g: self.gradient(g.double()).to(g.dtype))  # type: ignore[no-untyped-call]
        scores = q @ k.mT * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = _Value.apply(scores, self.scores) if faulty else scores  # type: ignore[no-untyped-call]
        scores = (scores if mask is None else scores + mask[..., : k.shape[2]]).float()
        probs = (self.softmax(scores) if faulty else scores.softmax(-1)).to(q.dtype)
        return (probs @ v).transpose(1, 2).contiguous(), probs


@contextmanager
def planted(model: torch.nn.Module, fault: Fault) -> Iterator[None]:
    """The model's class of attention has the fault."""
    home = vars(sys.modules[type(model).__module__])
    inner, home["eager_attention_forward"] = home["eager_attention_forward"], fault.attention
    try:
        yield
    finally:
        home["eager_attention_forward"] = inner


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=40)
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        runs = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    seeds = range(options.first, options.first + options.seeds)
    for seed, (name, mode, rate), which in product(seeds, SETTINGS, options.faults):
        fault = Fault(which)
        with planted(model_of(name, seed), fault):
            found = trained(name, mode, seed, STEPS, EVERY, rate, fault.begins)
        runs = [r for r in runs if (r["fault"], r["model"], r["seed"]) != (which, name, seed)]
        runs.append({"fault": which, **found})
        print(
            {key: runs[-1][key] for key in ("fault", "model", "seed", "counted", "off", "whole", "alarms")}, flush=True
        )
        save({**made_by(), "runs": runs}, options.json)


if __name__ == "__main__":
    main()
