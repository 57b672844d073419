"""A kernel's process: takes one case after another, so that it starts, and compiles, once.

python -m attn_diag.testing.hunting.worker FOLDER KERNEL DEVICE

Each line on stdin is a case's number; FOLDER holds NUMBER.json (options) and NUMBER.safetensors (what is in
``CaseInputs.tensors``). Into it go NUMBER-forward.safetensors and NUMBER-backward.safetensors. On stdout go lines of
JSON: {"stage": …} where a pass begins, and the outcome last. What the kernel prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attn_diag.head.machine import pick_device
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.hunting.layouts import placed
from attn_diag.testing.replaying.worker import ended
from attn_diag.testing.target import GRADIENTS, Target


def main(folder: Path, name: str, device: str) -> None:
    """Run cases until stdin ends, or until the device can no longer be used."""
    # What kernels and compilers print must not be taken for answers.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    where = pick_device(device)

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=told, flush=True)

    tell(stage="start")
    for line in sys.stdin:
        number = line.strip()
        outcome: dict[str, Any] = {"outcome": "ran", "stage": None, "message": None}
        stage = "start"
        try:
            options = json.loads((folder / f"{number}.json").read_text())
            tensors: dict[str, Any] = {**load_file(folder / f"{number}.safetensors")}
            layout = options.pop("layout")
            if options["window"] is not None:
                options["window"] = tuple(options["window"])
            case = CaseInputs(number, **tensors, **options)
            target = Target.of(name, dtype=case.q.dtype, head_dim=case.q.shape[3], device=where)
            for stage in ("forward", "backward"):
                tell(stage=stage)
                outputs = _outputs(target, case, layout, gradients=stage == "backward")
                written = {n: x.cpu().contiguous().clone() for n, x in outputs.items()}
                save_file(written, folder / f"{number}-{stage}.safetensors")
        except Exception as error:
            outcome |= {"outcome": ended(error), "stage": stage, "message": _said(error)}
            if not _usable(where):
                # Nothing after this means anything: the parent starts another process.
                tell(outcome="crashed", stage=stage, message=_said(error))
                os._exit(1)
        tell(**outcome)


def _outputs(target: Target, case: CaseInputs, layout: str, *, gradients: bool) -> dict[str, Tensor]:
    _poison(case, target.device)
    found = target.call(case, gradients=gradients, place=partial(placed, layout))
    found.require_untouched()
    return {n: (x.float() if n == "lse" else x) for n, x in found.outputs.items() if gradients or n not in GRADIENTS}


def _poison(case: CaseInputs, device: torch.device) -> None:
    """Leave NaN where the next allocations lie, so that an output that is never written is no earlier call's."""
    shapes = [x.shape for x in (case.q, case.k, case.v)]
    held = [
        torch.full(shape, torch.nan, dtype=d, device=device) for shape in shapes for d in (case.q.dtype, torch.float)
    ]
    del held


def _usable(device: torch.device) -> bool:
    """Whether the device still works: after a CUDA error of a kernel nothing does in this process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device=device).item() == 1)
    except Exception:
        return False


def _said(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__)[:2000]


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[4])
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
