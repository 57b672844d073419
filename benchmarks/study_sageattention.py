"""SageAttention 1.0.6's own kernels beside the recipe ``sage1``: which part of O's elements has the same bits.

The recipe is run twice: emulated, and by this project's own Triton kernel with the GPU's INT8 products.

Needs a GPU and the wheel (`pip install sageattention==1.0.6`). Kinds of inputs, head dimensions, lengths and masks; of
lengths that are no multiple of 64 without a causal mask also how far O is from float64: the released kernel does not
mask the keys beyond the end (``attn_qk_int8_per_block.py`` masks their loads alone), so that they join the row sum.

    python benchmarks/study_sageattention.py --json benchmarks/results/sageattention_h100.json --capture s.safetensors
    python benchmarks/study_sageattention.py --kept --json benchmarks/results/sageattention_kept_cpu.json   # no GPU

``--kept`` looks at the capture that was kept, on a CPU: the part of O's elements with the recipe's bits, head by head,
and the same of two other ways to divide.
"""

from __future__ import annotations

import importlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save
from safetensors.torch import load_file
from torch import Tensor

import attn_diag
from attn_diag.head.machine import pick_device
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking, reference_head

KINDS = ("gaussian", "k with a mean", "outliers", "large scores")
HEADS = 4
# Of these so many are emulated.
EMULATED = 2


@dataclass(frozen=True)
class Row:
    """One shape and kind."""

    kind: str
    length: int
    width: int
    causal: bool
    equal: float
    """The part of O's elements with the recipe's bits, emulated."""
    ours: float
    """The part with the bits of this project's own kernel."""
    ours_emulated: float
    """The part of our kernel's elements with the emulation's bits."""
    without: dict[str, float]
    """As ``equal``, of recipes with one thing less; of 512 keys alone."""
    error: float
    """Of the kernel's O against float64, relative."""
    emulated_error: float
    """Of the recipe's."""


CHANGES: dict[str, dict[str, Any]] = {
    "sums of PV in fp32": {"pv_sums": "fp32", "accumulation": "fp32-nearest"},
    "k not smoothed": {"smooth_k": "none"},
    "k's mean not rounded": {"smooth_k": "mean"},
    "ties to even": {"quantize_q": "int8 block=128rows", "quantize_k": "int8 block=64rows"},
    "exact divisions": {
        "quantize_q": "int8 block=128rows arithmetic=fp32 ties=away",
        "quantize_k": "int8 block=64rows arithmetic=fp32 ties=away",
    },
}


def inputs(kind: str, length: int, width: int, seed: int) -> tuple[Tensor, ...]:
    """q, k, v [1, H, T, D] BF16."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, length, width, generator=generator) for _ in range(3))
    if kind == "k with a mean":
        k += 4 * torch.randn(1, HEADS, 1, width, generator=generator)
    if kind == "outliers":
        k[..., 3] *= 20
        q[..., 7] *= 20
    if kind == "large scores":
        q *= 4
    return tuple(x.bfloat16() for x in (q, k, v))


DIVISIONS = {
    "exact divisions": "fp32",
    "the nearest reciprocals": "fp32-reciprocal",
    "Hopper's reciprocals, as the recipe has them": "fp32-triton",
}
KEPT = Path(__file__).parent / "results" / "sageattention_h200.safetensors"


def of_kept(number: int) -> dict[str, float]:
    """Of one head of the kept capture, the part of O's elements with the bits of three ways to divide."""
    read = load_file(KEPT)
    q, k, v, got = (read[name][0, number] for name in ("q", "k", "v", "sage.o"))
    head = AttentionHead(q.double(), k.double(), v.double(), None, q.shape[1] ** -0.5, Masking("top-left"))
    recipe = preset("sage1", head_dim=q.shape[1])
    found = {}
    for said, arithmetic in DIVISIONS.items():
        changed = {n: getattr(recipe, n).replace("fp32-triton", arithmetic) for n in ("quantize_q", "quantize_k")}
        found[said] = float((emulate_head(replace(recipe, **changed), head).o == got).double().mean())
    print(number, found, flush=True)
    return found


def look(kind: str, length: int, width: int, causal: bool, seed: int, capture: Path | None) -> Row:
    """Call the wheel's kernel and ours once, and emulate them; the call is saved to ``capture`` where there is one."""
    device = pick_device("cuda")
    sageattn = importlib.import_module("sageattention.core").sageattn
    q, k, v = (x.to(device) for x in inputs(kind, length, width, seed))
    got = sageattn(q, k.clone(), v, is_causal=causal)  # it takes k's mean off in place
    recipe = preset("sage1", head_dim=width)
    masking = Masking("top-left" if causal else "none")
    ours = attn_diag.attention(q, k, v, recipe=recipe, causal=masking.causal)
    counts = dict.fromkeys(("", *(CHANGES if length == 512 else ())), 0.0)
    ours_emulated = 0.0
    errors = torch.zeros(2, dtype=torch.float64)
    size = 0.0
    for h in range(EMULATED):
        one = [x[0, h].double() for x in (q, k, v)]
        head = AttentionHead(one[0], one[1], one[2], None, width**-0.5, masking)
        truth = reference_head(head).out
        for name in counts:
            made = emulate_head(replace(recipe, **CHANGES.get(name, {})), head).o
            counts[name] += float((made == got[0, h]).double().mean()) / EMULATED
            if not name:
                ours_emulated += float((made == ours[0, h]).double().mean()) / EMULATED
                errors[1] += float((made.double() - truth).square().sum())
        errors[0] += float((got[0, h].double() - truth).square().sum())
        size += float(truth.square().sum())
    if capture:
        tensors = {n: x.cpu() for n, x in (("q", q), ("k", k), ("v", v), ("sage.o", got))}
        attn_diag.Capture.from_tensors(tensors, causal=masking.causal, kernel="sageattention 1.0.6").save(capture)
    own, by_kernel = counts.pop(""), float((ours == got).double().mean())
    relative = (errors / size).sqrt().tolist()
    return Row(kind, length, width, causal, own, by_kernel, ours_emulated, counts, *relative)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--kept", action="store_true", help="look at the kept capture, without a GPU")
    parser.add_argument("--capture", type=Path, metavar="FILE", help="save one call there")
    parser.add_argument("--processes", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.kept:
        save(made_by() | {"heads": [of_kept(head) for head in range(HEADS)]}, arguments.json)
        return
    made = made_by(pick_device("cuda"))
    rows: list[Row] = []
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        calls = []
        # The longest first.
        for length, kind, width, causal in product((1024, 512, 200), KINDS, (64, 128), (True, False)):
            kept = (kind, length, width, causal) == ("k with a mean", 512, 64, True)
            file = arguments.capture if kept else None
            calls.append(pool.submit(look, kind, length, width, causal, arguments.seed, file))
        for call in as_completed(calls):
            rows.append(call.result())
            save(made | {"seed": arguments.seed, "rows": [asdict(row) for row in rows]}, arguments.json)
            print(rows[-1], flush=True)
    whole = [row for row in rows if row.length % 64 == 0 or row.causal]
    for name in ("equal", "ours", "ours_emulated"):
        shares = [getattr(row, name) for row in whole]
        print(f"{name}: least {min(shares):.4%}, mean {sum(shares) / len(shares):.4%} of O's elements")


if __name__ == "__main__":
    main()
