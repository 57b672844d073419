"""Linear attention called in every way: odd lengths, packed, long and short decays, wide heads; whole and with a fault.

    python benchmarks/study_linear_calls.py [--only CALL …] [--faults NAME …] [--seeds 2] [--first 0] [--json FILE]
    python benchmarks/study_linear_calls.py --device cuda …     # flash-linear-attention's chunked kernels

On a CPU the kernel is the recurrence step by step in float64, which returns its inputs' formats (``--emulated``: the
released kernel's roundings, without a fault). Faults are put around the kernel, so that they are the same in both: what
it is handed, what is done with the state between its calls, what it returns; gradients are autograd's.
Counted: calls with a fault that are accused, whose fault is named (where there is a name), and that have a wrong name;
and calls without a fault that are accused.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from linear_kernels import bf16, one_configuration, recurrent
from measuring import made_by, options_of, save

from attn_diag.analyses.linear.inspect import inspect_linear
from attn_diag.captures.linear import LinearCapture
from attn_diag.head.linear import LinearRun
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded

OPERATORS = ("rwkv7", "gated_delta_rule", "kda", "gla", "simple_gla")
ACCUSED = {"nonfinite", "wrong", "lossy", "biased"}
# Causes that say what the numbers are, and accuse nothing of having made them.
FACTS = ("zero", "factor", "transposed")
CHUNK = 64
Inputs = dict[str, Tensor]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Call:
    """How the operator is called."""

    steps: int = 200
    keys: int = 64
    values: int = 64
    kind: str = LONG
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = ()
    """Of packed sequences."""
    batch: int = 1
    heads: int = 1
    state: bool = True
    """Whether there is an initial state, and a gradient of the last."""
    mixed: str = ""
    """A tensor that stays fp32, as under autocast."""


CALLS: dict[str, Call] = {
    "64 features": Call(),
    "32 features": Call(keys=32, values=32),
    "128 features": Call(keys=128, values=128),
    "256 features": Call(keys=256, values=256, steps=130),
    "64 and 128 features": Call(values=128),
    "20 and 12 features": Call(keys=20, values=12),
    "1 step": Call(steps=1),
    "17 steps": Call(steps=17),
    "65 steps": Call(steps=65),
    "700 steps": Call(steps=700),
    "FP16": Call(dtype=torch.float16),
    "FP16, k in fp32": Call(dtype=torch.float16, mixed="k"),
    "decays as at first": Call(kind="normal"),
    "decays of e^-27": Call(kind="tiny_decay"),
    "no decay": Call(kind="no_decay"),
    "the same key": Call(kind="repeated"),
    "no state": Call(state=False),
    "a batch of 3": Call(batch=3, steps=100),
    "two heads": Call(heads=2),
    "packed": Call(lengths=(70, 64, 1, 65)),
    "packed, an empty one": Call(lengths=(70, 0, 64, 66)),
    "packed, the last empty": Call(lengths=(70, 64, 66, 0)),
    "packed, no state": Call(lengths=(70, 64, 1, 65), state=False),
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """The operator's function: one call of [B, T, H, D], or of packed sequences."""

    operator: str
    scale: float
    device: str
    ends: tuple[int, ...] = ()

    def __call__(self, x: Inputs, ends: tuple[int, ...] | None = None) -> Pair:
        """o and the last state, in the inputs' formats, for autograd.

        Args:
            x: The arguments by this project's names.
            ends: Where packed sequences end, from 0; None: the call's own.
        """
        ends = self.ends if ends is None else ends
        if self.device == "cuda":
            return self.released(x, ends)
        dtype = x["v"].dtype
        if not ends:
            o, last = recurrent(x, scale=self.scale)
            return o.to(dtype), last.float()
        each = [
            recurrent({n: t[i : i + 1] if n == "initial_state" else t[:, start:stop] for n, t in x.items()},
                      scale=self.scale) if stop > start else (x["v"][:, :0].double(), _first(x)[i : i + 1].double())
            for i, (start, stop) in enumerate(pairwise(ends))
        ]  # fmt: skip
        return torch.cat([o for o, _ in each], 1).to(dtype), torch.cat([s for _, s in each]).float()

    def released(self, x: Inputs, ends: tuple[int, ...]) -> Pair:
        function = getattr(import_module(f"fla.ops.{self.operator}"), f"chunk_{self.operator}")
        named = {"q": "r", "g": "w"} if self.operator == "rwkv7" else {}
        given: dict[str, Any] = {named.get(n, n): t for n, t in x.items()}
        if ends:
            given["cu_seqlens"] = torch.tensor(ends, device="cuda")
        o, last = function(**given, scale=self.scale, output_final_state=True)
        return o, last


Around = Callable[[Kernel, Inputs], Pair]


def _first(x: Inputs) -> Tensor:
    q, v = x["q"], x["v"]
    return x.get("initial_state", q.new_zeros(1, v.shape[2], q.shape[3], v.shape[3]).expand(64, -1, -1, -1))


def parts_of(x: Inputs, size: int) -> list[Inputs]:
    """The call in pieces of so many steps, without their states."""
    steps = x["q"].shape[1]
    return [
        {n: t[:, i : i + size] for n, t in x.items() if n != "initial_state"} for i in range(0, steps, size)
    ]  # fmt: skip


def unwritten(x: Inputs) -> Inputs:
    """The call with nothing written in its last step."""
    last = torch.arange(x["q"].shape[1], device=x["q"].device) == x["q"].shape[1] - 1
    return {n: t.masked_fill(last.view(1, -1, *[1] * (t.ndim - 2)), 0) if n in ("k", "b", "beta") else t
            for n, t in x.items()}  # fmt: skip


def in_pieces(kernel: Kernel, x: Inputs, size: int, after: Callable[[Inputs, Tensor], Tensor]) -> Pair:
    """Piece by piece, with what ``after`` makes of the piece and its last state."""
    outs, state = [], x.get("initial_state")
    for piece in parts_of(x, size):
        given = piece if state is None else {**piece, "initial_state": state}
        o, last = kernel(given)
        outs.append(o)
        state = after(given, last)
    assert state is not None
    return torch.cat(outs, 1), state


def alone(kernel: Kernel, x: Inputs) -> Pair:
    """Every piece from nothing; the last state is right."""
    return torch.cat([kernel(piece)[0] for piece in parts_of(x, CHUNK)], 1), kernel(x)[1]


def other_state(change: Callable[[Tensor], Tensor]) -> Around:
    return lambda kernel, x: kernel({**x, "initial_state": change(x["initial_state"])})


def tail_out(kernel: Kernel, x: Inputs) -> Pair:
    o, last = kernel(x)
    whole = torch.arange(o.shape[1], device=o.device) < o.shape[1] // CHUNK * CHUNK
    return o.masked_fill(~whole[None, :, None, None], 0), last


def returned(o: Callable[[Tensor], Tensor] = lambda o: o, last: Callable[[Tensor], Tensor] = lambda s: s) -> Around:
    """What it returns, changed."""

    def run(kernel: Kernel, x: Inputs) -> Pair:
        found = kernel(x)
        return o(found[0]), last(found[1])

    return run


def run_on(kernel: Kernel, x: Inputs) -> Pair:
    first = {"initial_state": x["initial_state"][:1]} if "initial_state" in x else {}
    return kernel({**x, **first}, ())[0], kernel(x)[1]


def unwritten_chunks(kernel: Kernel, x: Inputs) -> Pair:
    def after(piece: Inputs, last: Tensor) -> Tensor:
        return kernel(unwritten(piece))[1] if piece["q"].shape[1] == CHUNK else last

    return in_pieces(kernel, x, CHUNK, after)


def empty_zero(kernel: Kernel, x: Inputs) -> Pair:
    o, last = kernel(x)
    empty = torch.tensor([i == j for i, j in pairwise(kernel.ends)], device=last.device)
    return o, last.masked_fill(empty[:, None, None, None], 0)


def late(g: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1)


@dataclass(frozen=True)
class Fault:
    """What is wrong, what it may be called, and what a call must have for it."""

    run: Around
    names: tuple[str, ...] = ()
    needs: str = ""
    delta: bool = True
    """Whether it has a name in operators that erase what they overwrite."""


STATE = "state"
FAULTS: dict[str, Fault] = {
    "none": Fault(lambda kernel, x: kernel(x)),
    "state in BF16 every 16 steps": Fault(
        lambda kernel, x: in_pieces(kernel, x, 16, lambda _, s: bf16(s).float()),
        ("state", "state_step", "handed_back"), "dense",
    ),
    "decays in BF16": Fault(
        lambda kernel, x: kernel({**x, "g": bf16(x["g"].exp()).log()}), ("decay", "decay_step"), "decays"
    ),
    "last step of a chunk not written": Fault(unwritten_chunks, ("boundary_write", "lost_write"), "chunks"),
    # The delta rule's new values lack the state then too, for which there is no name.
    "no inter-chunk term": Fault(alone, ("no_inter_chunk",), "chunks", delta=False),
    "initial state ignored": Fault(other_state(lambda s: s * 0), ("no_initial_state",), STATE),
    "initial state transposed": Fault(
        other_state(lambda s: s.mT.contiguous()), ("initial_state_transposed",), "square"
    ),
    "initial state of another": Fault(other_state(lambda s: s.roll(1, 0)), ("initial_state_of_another",), "several"),
    "decay's gradient dropped": Fault(lambda kernel, x: kernel({**x, "g": x["g"].detach()}), ("zero",)),
    "initial state's gradient dropped": Fault(other_state(lambda s: s.detach()), ("zero",), STATE),
    "last state's gradient ignored": Fault(returned(last=lambda s: s.detach()), ("no_last_gradient",), STATE),
    "sequences run on": Fault(run_on, ("sequences_run_on",), "packed"),
    "tail left out": Fault(tail_out, (), "tail"),
    "last states of others": Fault(returned(last=lambda s: s.roll(1, 0)), (), "several"),
    "an empty sequence's last state is zero": Fault(empty_zero, ("zero",), "empty"),
    "decays a step late": Fault(lambda kernel, x: kernel({**x, "g": late(x["g"])}), (), "decays"),
    "o 1 % too large": Fault(returned(o=lambda o: o * 1.01), ("factor",)),
    "last state transposed": Fault(returned(last=lambda s: s.mT), ("transposed",), "square"),
}  # fmt: skip


def applies(fault: Fault, call: Call) -> bool:
    """Whether a call has what a fault needs."""
    several = call.batch > 1 or len(call.lengths) > 1
    has = {
        "": True, STATE: call.state, "dense": not call.lengths, "packed": bool(call.lengths),
        "decays": call.kind not in ("no_decay", "tiny_decay"),
        "chunks": not call.lengths and call.steps > CHUNK and call.kind != "tiny_decay",
        "square": call.state and call.keys == call.values, "several": call.state and several,
        "tail": not call.lengths and call.steps % CHUNK > 0, "empty": call.state and 0 in call.lengths,
    }  # fmt: skip
    return has[fault.needs]


def inputs_of(operator: str, call: Call, seed: int) -> Inputs:
    """The arguments, with dO and the last state's gradient."""
    make = torch.Generator().manual_seed(seed)
    shape = (call.batch, call.steps, call.heads, call.keys, call.values)
    given = rounded(linear_inputs(operator, shape, seed, kind=call.kind), call.dtype)
    if call.mixed:
        given[call.mixed] = given[call.mixed].float()
    if call.state:
        of_states = (len(call.lengths) or call.batch, call.heads, call.keys, call.values)
        given["initial_state"] = torch.randn(of_states, generator=make) * 0.3
        given["dfinal_state"] = torch.randn(of_states, generator=make) * 0.3
    given["do"] = torch.randn(given["v"].shape, generator=make).to(call.dtype)
    return given


def captured(
    operator: str, call: Call, fault: Fault, seed: int, device: str, *, emulated: bool = False
) -> LinearCapture:
    """The call, with what came of it."""
    given = inputs_of(operator, call, seed)
    ends = tuple(torch.tensor([0, *call.lengths]).cumsum(0).tolist()) if call.lengths else ()
    also = {"cu_seqlens": torch.tensor(ends)} if ends else {}
    capture = LinearCapture(operator, {**given, **also})
    if emulated:
        run = LinearRun(capture, torch.device("cpu"))
        recipe = replace(run.recipe, chunk=16 if operator == "rwkv7" else CHUNK, **run.released()[0])
        like = {"o": call.dtype, "final_state": torch.float32}
        made = {n: x.to(like[n] if n in like else given[n[1:]].dtype) for n, x in run.emulated(recipe).items()}
    else:
        names = capture.inputs
        leaves = {n: x.to(device).clone().requires_grad_() for n, x in names.items()}
        o, last = fault.run(Kernel(operator, capture.call.used_scale, device, ends), leaves)
        loss = (o.double() * given["do"].to(device).double()).sum()
        if call.state:
            loss = loss + (last.double() * given["dfinal_state"].to(device).double()).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        made = {f"d{n}": x.to(names[n].dtype).cpu() for n, x in zip(leaves, found, strict=True)}
        made |= {"o": o.detach().cpu(), "final_state": last.detach().cpu()}
    return replace(capture, tensors={**capture.tensors, **made})


def row(verdict: Any, fault: Fault) -> dict[str, Any]:
    """Of one call: accused quantities, causes, and which of them are wrong."""
    heads = verdict.captures[0].observations[0].heads
    accused = [q for h in heads for q in h.quantities if q.answer in ACCUSED]
    labels = {label for h in heads for label in h.labels}
    causes = {q.quantity: q.cause for q in accused if q.cause}
    return {
        "accused": sorted({q.quantity for q in accused} | (labels & {"biased"})),
        "undecided": sorted({q.quantity for h in heads for q in h.quantities if q.answer == "undecided"}),
        "named": bool(set(causes.values()) & {*fault.names}),
        "misnamed": {q: c for q, c in causes.items() if c not in (*fault.names, *FACTS)},
        "words": verdict.sentence,
    }


def main() -> None:
    parser = options_of(__doc__, "cpu")
    parser.add_argument("--only", nargs="*", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--operators", nargs="*", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--emulated", action="store_true", help="the released kernel's roundings, without a fault")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the calls that are judged wrongly there")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    if options.device == "cuda":
        from study_linear_kernels import lift_the_refusal

        lift_the_refusal()
        one_configuration()
    kept: dict[str, Any] = made_by(options.device)
    begun = time.perf_counter()
    for name in options.only:
        for kind in ["none"] if options.emulated else options.faults:
            if not applies(FAULTS[kind], CALLS[name]):
                continue
            for operator in options.operators:
                for seed in range(options.first, options.first + options.seeds):
                    key = f"{name}; {kind}; {operator}; {seed}"
                    try:
                        call = captured(operator, CALLS[name], FAULTS[kind], seed, options.device,
                                        emulated=options.emulated)  # fmt: skip
                        kept[key] = row(inspect_linear(call, device=options.device), FAULTS[kind])
                    except Exception as error:
                        kept[key] = {"raised": f"{type(error).__name__}: {str(error)[:300]}"}
                    one = kept[key]
                    bad = "raised" in one or bool(one["accused"]) == (kind == "none") or one["misnamed"]
                    named = bool(FAULTS[kind].names) and (FAULTS[kind].delta or operator in ("gla", "simple_gla"))
                    unnamed = named and not one.get("named")
                    if bad and "raised" not in one and options.keep is not None:
                        call.save(options.keep / f"{key.replace('; ', '-').replace(' ', '_')}.safetensors")
                    if bad or unnamed:
                        print(f"{key}: {'BAD' if bad else 'unnamed'} {one}", flush=True)
            print(f"{name}; {kind}: {time.perf_counter() - begun:.0f} s", flush=True)
            save(kept, options.json)


if __name__ == "__main__":
    main()
