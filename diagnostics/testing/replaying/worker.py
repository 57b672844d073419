"""One kernel on one capture's inputs, of softmax or linear attention, in a process of its own.

python -m attn_diag.testing.replaying.worker FOLDER KERNEL DEVICE

FOLDER holds ``inputs.safetensors``; into it go ``stage`` (what was begun last), ``outputs-forward.safetensors`` and
``outputs-backward.safetensors`` as soon as they are there, and last ``outcome.json``. What is not there when the
process has died tells where it died.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from attn_diag.captures.files import write_atomically
from attn_diag.captures.linear import linear_among, load_linear
from attn_diag.captures.loading import load
from attn_diag.errors import InputError
from attn_diag.head.machine import pick_device
from attn_diag.results.replay import Outcome
from attn_diag.testing.case_inputs import CaseInputs, fingerprint
from attn_diag.testing.invariance.layouts import as_it_is, rows_first
from attn_diag.testing.linear.function import LinearFunction
from attn_diag.testing.regression.cases import case_of_capture
from attn_diag.testing.target import GRADIENTS, MisfitError, NoGradientError, Place, Returned, Target

# What a kernel says that does not take these inputs, where its exception's type does not say so.
_REFUSES = re.compile(
    r"no (available kernel|viable backend|kernel image)|support|must (be|match)|should be|requires?\b|expected|"
    r"not implemented|not compiled|please (upgrade|install)|out of (memory|resource)|too (large|many resources)|"
    r"invalid configuration",
    re.IGNORECASE,
)
_REFUSALS = (InputError, NotImplementedError, ImportError, AssertionError, ValueError, TypeError)
# Calls that are timed, in at most so many seconds.
_CALLS, _SECONDS = 3, 5.0


def main(folder: Path, name: str, device: str) -> None:
    """Run the kernel and leave what it returned."""
    file = folder / "inputs.safetensors"
    of_kernel = _linear if linear_among([file])[0] else _softmax
    outcome: dict[str, Any] = {"outcome": "ran", "stage": None, "message": None}
    stage = "start"
    place: Place = as_it_is
    try:
        where = pick_device(device)
        called, times, stages = of_kernel(file, name, where)
        for stage in stages:
            (folder / "stage").write_text(stage)
            run = partial(called, gradients=stage == "backward")
            if stage == "forward":
                outputs, place = _placed(run)
                outcome["message"] = None if place is as_it_is else "it takes these only as [B, T, H, D] in memory"
            else:
                outputs = run(place)
            written = {n: x.cpu().contiguous().clone() for n, x in outputs.items()}
            write_atomically(folder / f"outputs-{stage}.safetensors", partial(save_file, written))
            # A second call may crash too, and is told as part of this one.
            again = run(place)
            same = fingerprint(written) == fingerprint({n: x.cpu() for n, x in again.items()})
            outcome["deterministic"] = outcome.get("deterministic", True) and same
            outcome |= times(stage, place)
    except Exception as error:
        outcome |= {"outcome": ended(error), "stage": stage, "message": str(error)}
    write_atomically(folder / "outcome.json", lambda path: Path(path).write_text(json.dumps(outcome)))


_Opened = tuple[Callable[..., dict[str, Tensor]], Callable[[str, Place], dict[str, float]], tuple[str, ...]]
_STAGES = ("forward", "backward")


def _softmax(file: Path, name: str, where: torch.device) -> _Opened:
    """How the kernel is called, and timed, and which passes there are."""
    case = case_of_capture(load(file))
    target = Target.of(name, dtype=case.q.dtype, head_dim=case.q.shape[3], device=where)
    stages = _STAGES[: 1 if case.do is None else 2]
    return partial(_outputs, target, case), partial(_times, target, case), stages


def _linear(file: Path, name: str, where: torch.device) -> _Opened:
    capture = load_linear(file)
    function = LinearFunction.of(name, capture.operator, device=where)
    stages = _STAGES[: 2 if {"do", "dfinal_state"} & capture.tensors.keys() else 1]

    def called(place: Place, *, gradients: bool) -> dict[str, Tensor]:
        found = Returned(*function.run(capture, gradients=gradients, place=place))
        found.require_untouched()
        return found.outputs

    return called, lambda *_: {}, stages


def _placed(run: Callable[[Place], dict[str, Tensor]]) -> tuple[dict[str, Tensor], Place]:
    """A kernel's outputs, and where its inputs lie: where it refuses contiguous [B, H, T, D], as [B, T, H, D]."""
    try:
        return run(as_it_is), as_it_is
    except Exception as error:
        if ended(error) != "refused":
            raise
        try:
            return run(rows_first), rows_first
        except Exception:
            # What it says of the usual layout is what counts.
            raise error from error.__cause__


def _outputs(target: Target, case: CaseInputs, place: Place, *, gradients: bool) -> dict[str, Tensor]:
    found = target.call(case, gradients=gradients, place=lambda _, x: place(x))
    found.require_untouched()
    return {n: (x.float() if n == "lse" else x) for n, x in found.outputs.items() if gradients or n not in GRADIENTS}


def ended(error: Exception) -> Outcome:
    """Whether a kernel does not take these inputs, returned what cannot be used, or failed."""
    cause = error.__cause__ if isinstance(error, MisfitError) else error
    if isinstance(error, NoGradientError) or isinstance(cause, _REFUSALS):
        return "refused"
    if cause is None:
        return "unusable"
    return "refused" if _REFUSES.search(str(cause)) else "raised"


def _times(target: Target, case: CaseInputs, stage: str, place: Place) -> dict[str, float]:
    """Milliseconds of the pass, the best of a few calls; none of an emulation, whose time says nothing."""
    if (fn := target.fn) is None:
        return {}
    on: dict[str, Any] = {
        n: place(x.to(target.device)) for n in ("q", "k", "v", "do") if (x := getattr(case, n)) is not None
    }
    here = replace(case, **on)
    leaves = [x.requires_grad_(stage == "backward") for x in (here.q, here.k, here.v)]
    best, started = float("inf"), time.monotonic()
    for _ in range(_CALLS):
        with torch.set_grad_enabled(stage == "backward"):
            o, took = _timed(partial(fn, leaves[0], leaves[1], leaves[2], here), target.device)
        if stage == "backward":
            first = o[0] if isinstance(o, tuple | list) else o
            do = here.do
            assert do is not None
            _, took = _timed(partial(torch.autograd.grad, first, leaves, do.to(first.dtype)), target.device)
        best = min(best, took)
        if time.monotonic() - started > _SECONDS:
            break
    return {f"{stage}_ms": 1e3 * best}


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    found = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - started


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[4])
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
