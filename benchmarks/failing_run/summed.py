"""Whether a kernel's errors of dW_Q add up over the sequences of a batch: size and coherence, cure by cure.

    python benchmarks/failing_run/summed.py captures/A_seed0_alarm --arm A --cures fp32-scores delta-from-dp \\
        --out summed_A.json

what-if ranks by the size of dQ's error in one sequence; an optimizer sees the sum over all of them. Of the arm and of
each cure (a mitigation of what-if), emulated on the capture's sequences, with E_n the error of dW_Q in sequence n and
G_n the exact dW_Q, both [D, C]: (sum ||E_n||^2 / sum ||G_n||^2)^1/2, the error of the sum ||sum E_n|| / ||sum G_n||,
and the coherence ||sum E_n||^2 / sum ||E_n||^2, which is 1 in the mean under random signs; its p-value is exact, from
all signs of the sequences. Sums are float64; nothing here has seen how training went on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import ARMS, arm, whole
from runlog import plain
from torch import Tensor

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.captures.files import write_atomically
from attn_diag.captures.loading import find_captures
from attn_diag.head.machine import describe_tool
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.kernels.recipe import FORMATS

# All signs of more sequences are too many.
_MOST = 16


@dataclass(frozen=True)
class Summed:
    """One recipe's errors of dW_Q over the sequences. ``cosine``: of the summed error with the summed gradient;
    ``first_share``: of the summed error's square, what its first singular direction holds."""

    name: str
    sequences: int
    relative: float
    relative_of_sum: float
    coherence: float
    p_value: float
    cosine: float
    first_share: float


def exactly(recipe: Recipe) -> Recipe:
    """The recipe without any rounding, in float64."""
    sites: dict[str, Any] = {site: "fp32" for site in FORMATS if site != "input"}
    return replace(recipe, name="exact", arithmetic="fp64", exp="exact", **sites)


def gradients(capture: Capture, recipe: Recipe, sequences: int) -> Tensor:
    """dW_Q of the capture's one head by the emulated recipe, float64 [sequences, D, C]."""
    found = []
    for batch in range(sequences):
        head = read_head(capture, batch, 0, torch.device("cpu"), NonFiniteCensus()).head
        dq = emulate_head(recipe, head, key_gradients=False).dq
        assert dq is not None
        found.append(dq.double().T @ capture.tensors["x"][batch].double())
    return torch.stack(found)


def sign_p_value(errors: Tensor) -> float:
    """P(||sum s_n E_n||^2 is as large as with all signs alike) over all signs s of E [N, D, C]; exact."""
    flat = errors.flatten(1).numpy()
    gram = flat @ flat.T
    signs = np.array(list(product((1.0, -1.0), repeat=len(gram) - 1)))
    signs = np.hstack([np.ones((len(signs), 1)), signs])
    norms = np.einsum("ri,ij,rj->r", signs, gram, signs)
    return float(np.mean(norms >= gram.sum() * (1 - 1e-9)))


def summed(name: str, errors: Tensor, exact: Tensor) -> Summed:
    """``errors`` and ``exact`` gradients, [N, D, C]."""
    total, gradient = errors.sum(0), exact.sum(0)
    singular = torch.linalg.svdvals(total)
    return Summed(
        name=name,
        sequences=len(errors),
        relative=float(errors.norm() / exact.norm()),
        relative_of_sum=float(total.norm() / gradient.norm()),
        coherence=float(total.square().sum() / errors.square().sum()),
        p_value=sign_p_value(errors),
        cosine=float((total * gradient).sum() / (total.norm() * gradient.norm())),
        first_share=float(singular[0] ** 2 / singular.square().sum()),
    )


def compare(capture: Capture, name: str, cures: Sequence[str], sequences: int | None = None) -> dict[str, Any]:
    """The arm of that name and its ``cures``. Raises ValueError where the capture is not of one head, with dO and x."""
    if capture.q_heads != 1 or not {"do", "x"} <= set(capture.tensors):
        raise ValueError(f"{capture.source}: one head with do and x is expected, got {capture.q_heads} heads")
    count = min(capture.batch, _MOST, sequences or _MOST)
    exact = gradients(capture, exactly(whole(ARMS[name])), count)
    rows = [
        summed(full, gradients(capture, whole(arm(full)), count) - exact, exact)
        for full in (name, *(f"{name}+{cure}" for cure in cures))
    ]
    m = capture.metadata
    return {
        "arm": name,
        "source": Path(capture.source).name,
        "step": m.step,
        "layer": m.layer,
        "head": m.head_offset,
        "tool": asdict(describe_tool(torch.device("cpu"))),
        "backend": "emulation on cpu",
        "rows": [asdict(row) for row in rows],
    }


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| recipe | error of dW_Q, by sequence | of the sum | coherence | p |",
        "|---|---|---|---|---|",
    ]
    for r in found["rows"]:
        parts = f"{r['relative']:.2%} | {r['relative_of_sum']:.2%} | {r['coherence']:.2f} | {r['p_value']:.3f}"
        lines.append(f"| {r['name']} | {parts} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capture", type=Path, help="of one head and several sequences, or the folder that holds it")
    parser.add_argument("--arm", required=True, choices=[n for n, a in ARMS.items() if a.forward is not None])
    parser.add_argument("--cures", nargs="*", default=[], metavar="MITIGATION")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = compare(attn_diag.load(find_captures([options.capture])[0]), options.arm, options.cures)
    print(table(found))
    if options.out:
        text = json.dumps(plain(found), separators=(",", ":")) + "\n"
        write_atomically(options.out, lambda temporary: Path(temporary).write_text(text))


if __name__ == "__main__":
    main()
