"""Twenty-four mistakes in a chunked gated delta rule, made up before most of their names.

    python benchmarks/study_linear_wrong.py [--seeds 2] [--only NAME …] [--json FILE]

The kernel is plain torch in float64, chunks of 64, packed sequences, normalising q and k on request; its backward is
autograd's, but where a mistake is one of the backward. Each mistake is judged by ``inspect_linear`` on one call of 190
steps (packed: 70, 64 and 56), with an initial state and a gradient of the last; without a mistake none is accused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor

from attn_diag.analyses.linear.inspect import inspect_linear
from attn_diag.captures.linear import LinearCapture
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded

CHUNK, STEPS, PACKED, D = 64, 190, (70, 64, 56), 16
ACCUSED = {"nonfinite", "wrong", "lossy", "biased"}
# What a mistake is, and the causes by which naming it is right; none: there is no name for it.
MISTAKES: dict[str, tuple[str, ...]] = {
    "the gate after the update": (), "erased from the state before its decay": (),
    "beta of the write missing": ("write_without_beta",), "beta of the erasure missing": ("erase_without_beta",),
    "o of the state before the step": ("diagonal_missing",), "exp2 of the natural log": ("decay_base_two",),
    "the chunk before's decay": (), "padding decays on": (), "padding writes on": (), "erases itself": (),
    "an inverse of three terms": (), "states transposed between chunks": ("state_transposed",), "sums of g go on": (),
    "inter-chunk term not scaled": ("inter_not_scaled",),
    "the state goes on between sequences": ("sequences_run_on",),
    "states of sequences turned": (),
    "initial state's gradient without decay": (), "k's gradient without the erasure's": (),
    "beta's gradient without the erasure's": ("beta_gradient_of_write",), "g's gradient without that within chunks": (),
    "the last state's gradient ignored": ("no_last_gradient",), "the norm's gradient left out": ("no_norm_gradient",),
    "another eps": (), "first state of another": ("initial_state_of_another",),
}  # fmt: skip
_PACKED = ("the state goes on between sequences", "states of sequences turned", "first state of another")
_NORMALISED = ("the norm's gradient left out", "another eps")


class _Undecayed(torch.autograd.Function):
    """A first state, whose gradient lacks what decays have done to it."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, decay: Tensor) -> Tensor:
        ctx.save_for_backward(decay)
        return state.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (decay,) = ctx.saved_tensors
        return gradients[0] / decay, None


_undecayed: Callable[[Tensor, Tensor], Tensor] = _Undecayed.apply


@dataclass(frozen=True)
class Kernel:
    """The chunked gated delta rule of one head, or with a mistake."""

    mistake: str = ""

    def has(self, name: str) -> bool:
        return self.mistake == name

    def run(self, x: Mapping[str, Tensor], ends: list[int], scale: float, *, l2norm: bool) -> tuple[Tensor, Tensor]:
        """o [T, D] and the last states [N, D, D].

        Args:
            x: q, k, v [T, D], g, beta [T], initial_state [N, D, D].
            ends: Where sequences begin and end.
            scale: Of o.
            l2norm: Whether q and k are normalised here.
        """
        q, k = (self.normalised(x[n]) if l2norm else x[n] for n in "qk")
        first, outs, lasts = x["initial_state"], [], []
        if self.has("first state of another"):
            first = first.roll(1, 0)
        before: Tensor | None = None
        for n, (i, j) in enumerate(pairwise(ends)):
            state = before if before is not None and self.has("the state goes on between sequences") else first[n]
            o, before = self.sequence(q[i:j], k[i:j], x["v"][i:j], x["g"][i:j], x["beta"][i:j], state, scale)
            outs.append(o)
            lasts.append(before)
        if self.has("states of sequences turned"):
            lasts = lasts[::-1]
        last = torch.stack(lasts)
        return torch.cat(outs), last.detach() if self.has("the last state's gradient ignored") else last

    def normalised(self, x: Tensor) -> Tensor:
        eps = 1e-3 if self.has("another eps") else 1e-6
        root = (x.square().sum(-1, keepdim=True) + eps).rsqrt()
        return x * (root.detach() if self.has("the norm's gradient left out") else root)

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        outs, gone = [], torch.zeros((), dtype=g.dtype)
        last_decay = torch.ones((), dtype=g.dtype)
        if self.has("initial state's gradient without decay"):
            state = _undecayed(state, g[:CHUNK].sum().exp())
        if self.has("exp2 of the natural log"):
            g = g * 0.6931471805599453
        for i in range(0, len(q), CHUNK):
            own = [t[i : i + CHUNK] for t in (q, k, v, g, beta)]
            missing = CHUNK - len(own[0])
            if missing and self.has("padding decays on"):
                own[3] = torch.cat([own[3], own[3][-1:].expand(missing)])
                own = [torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) if n != 3 else t for n, t in enumerate(own)]
            if missing and self.has("padding writes on"):
                own = [torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]) for t in own]
            rows = dict(zip(["q", "k", "v", "g", "beta"], own, strict=True))
            out, state, last_decay, gone = self.chunk(**rows, state=state, before=last_decay, gone=gone, scale=scale)
            outs.append(out[: len(q) - i])
            if self.has("states transposed between chunks") and i + CHUNK < len(q):
                state = state.mT
        return torch.cat(outs), state

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, before: Tensor, gone: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        log = g.cumsum(0)
        if self.has("sums of g go on"):
            log = log + gone
        within = log.detach() if self.has("g's gradient without that within chunks") else log
        apart = (within[:, None] - within).tril().exp().tril()
        shifted = (log - g) if self.has("erased from the state before its decay") else log
        # The gate of a step comes after its update: what is read has not decayed in it.
        read = log - g if self.has("the gate after the update") else log
        if self.has("the gate after the update"):
            apart = ((log - g)[:, None] - (log - g)).tril().exp().tril()
        of_erasure = torch.ones_like(beta) if self.has("beta of the erasure missing") else beta
        if self.has("beta's gradient without the erasure's"):
            of_erasure = beta.detach()
        of_write = torch.ones_like(beta) if self.has("beta of the write missing") else beta
        erasing = k.detach() if self.has("k's gradient without the erasure's") else k
        lower = ((erasing @ erasing.mT) * apart * of_erasure[:, None]).tril(0 if self.has("erases itself") else -1)
        one = torch.eye(len(q), dtype=q.dtype)
        if self.has("an inverse of three terms"):
            inverse = one - lower + lower @ lower
        else:
            inverse = torch.linalg.inv(one + lower)
        pulled = erasing * (of_erasure * shifted.exp())[:, None]
        new = inverse @ (v * of_write[:, None] - pulled @ state)
        scores = (q @ k.mT) * apart
        scores = scores.tril(-1) if self.has("o of the state before the step") else scores
        across = (q * read.exp()[:, None]) @ state
        decay = log[-1].exp()
        out = scores @ new * scale + across * (1.0 if self.has("inter-chunk term not scaled") else scale)
        after = (before if self.has("the chunk before's decay") else decay) * state
        rest = (log[-1] - (log - g if self.has("the gate after the update") else log)).exp()
        return out, after + (k * rest[:, None]).mT @ new, decay, log[-1]


def call(seed: int, *, packed: bool, l2norm: bool) -> tuple[dict[str, Tensor], list[int], float]:
    """A call's tensors, where its sequences begin and end, and the scale."""
    make = torch.Generator().manual_seed(seed)
    given = rounded(linear_inputs("gated_delta_rule", (1, STEPS, 1, D, D), seed, kind=LONG))
    if l2norm:
        # Of ordinary length, and every tenth row as short as where an eps counts.
        sizes = torch.full((1, STEPS, 1, 1), 2.0)
        sizes[:, ::10] = 0.02
        given |= {n: (given[n].float() * sizes).bfloat16() for n in "qk"}
    ends = [0, *torch.tensor(PACKED).cumsum(0).tolist()] if packed else [0, STEPS]
    count = len(ends) - 1
    given["initial_state"] = torch.randn(count, 1, D, D, generator=make) * 0.3
    given["dfinal_state"] = torch.randn(count, 1, D, D, generator=make) * 0.3
    given["do"] = torch.randn(1, STEPS, 1, D, generator=make).bfloat16()
    return given, ends, D**-0.5


def judged(mistake: str, seed: int) -> dict[str, Any]:
    """What ``inspect`` says of the kernel with it."""
    packed, l2norm = mistake in _PACKED, mistake in _NORMALISED
    given, ends, scale = call(seed, packed=packed, l2norm=l2norm)
    leaves = {n: x.double().requires_grad_() for n, x in given.items() if n not in ("do", "dfinal_state")}
    one = {n: x[:, 0] if n == "initial_state" else x[0, :, 0] for n, x in leaves.items()}
    o, last = Kernel(mistake).run(one, ends, scale, l2norm=l2norm)
    loss = (o * given["do"][0, :, 0].double()).sum() + (last * given["dfinal_state"][:, 0].double()).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    kept = {f"d{n}": x.to(given[n].dtype) for n, x in zip(leaves, found, strict=True)}
    kept |= {"o": o.detach().bfloat16()[None, :, None], "final_state": last.detach().float()[:, None]}
    if packed:
        kept["cu_seqlens"] = torch.tensor(ends)
    verdict = inspect_linear(LinearCapture("gated_delta_rule", {**given, **kept}, l2norm=l2norm), device="cpu")
    quantities = verdict.captures[0].observations[0].heads[0].quantities
    causes = {q.quantity: q.cause for q in quantities if q.answer in ACCUSED and q.cause}
    return {
        "found": bool(verdict.labels & ACCUSED),
        "accused": [q.quantity for q in quantities if q.answer in ACCUSED],
        "causes": causes,
        "words": verdict.sentence,
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(MISTAKES))
    options = parser.parse_args()
    kept: dict[str, Any] = made_by()
    healthy = [judged("", seed) for seed in range(options.seeds)]
    kept["none"] = healthy
    print("none:", [one["accused"] for one in healthy], flush=True)
    for mistake in options.only or MISTAKES:
        begun = time.perf_counter()
        kept[mistake] = several = [judged(mistake, seed) for seed in range(options.seeds)]
        seconds = time.perf_counter() - begun
        print(f"{mistake}: found {sum(one['found'] for one in several)} of {len(several)} ({seconds:.0f} s)")
        for one in several:
            print(f"    {one['accused']}, named {one['causes']}\n    {one['words'][:220]}", flush=True)
        save(kept, options.json)


if __name__ == "__main__":
    main()
