"""Output projections under tensor parallelism: how their sum is named, and faults planted into it, over seeds.

A model of three layers (attention, MLP, residuals) on real ranks, two steps of other tokens, captured with
``sums=True`` and compared with the same model on one rank. Faults are of one rank, in one layer, in the second step:
below the all-reduce (what it returns lacks a part, has it twice, or has that of the step before), in what the rank
gives, and in the format. Ranks that have a GPU each exchange by NCCL, others by gloo. From this folder:

    torchrun --nproc-per-node 4 study_output_sums.py --seeds 20 --json results/output_sums_cpu.json
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

import attn_diag

LAYERS, STEPS = 3, 2
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# What is planted -> the dtypes in which it can be, and what the report has to say of the rank.
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "a part is left out of the sum": (("bfloat16", "float16", "float32"), "the sum is without rank {}'s part"),
    "a part is added twice": (("bfloat16", "float16", "float32"), "the sum is with rank {}'s part twice"),
    "a part of the step before is added": (("bfloat16", "float16", "float32"), "rank {}'s part of step 0 in place"),
    "a rank gives zeros": (("bfloat16", "float16", "float32"), "rank {} gives zeros"),
    "a rank gives twice its part": (("bfloat16", "float16", "float32"), "rank {} gives 2 times its O"),
    "a rank gives its part of the step before": (
        ("bfloat16", "float16", "float32"), "rank {} gives its part of step 0 again",
    ),
    "parts are cast to BF16": (("float16", "float32"), "cast to BF16 before it is added up"),
    "parts are added up in BF16": (("float16", "float32"), "parts cast to BF16 first"),
}  # fmt: skip
BELOW = {"a part is left out of the sum": 0.0, "a part is added twice": 2.0, "a part of the step before is added": None}


class OutputProjection(nn.Module):
    """A rank's columns of it, with the all-reduce; a fault where one is planted."""

    def __init__(self, weight: Tensor, group: Any) -> None:
        super().__init__()
        self.weight, self.group = nn.Parameter(weight), group
        self.fault, self.at, self.before = "", 0, torch.empty(0)

    def forward(self, o: Tensor) -> Tensor:
        """The sum over ranks."""
        part = functional.linear(o, self.weight)
        own, mine = part.detach().clone(), distributed.get_rank(self.group) == self.at
        if self.fault == "a rank gives zeros" and mine:
            part = part * 0
        if self.fault == "a rank gives twice its part" and mine:
            part = part * 2
        if self.fault == "a rank gives its part of the step before" and mine:
            part = self.before.clone()
        cast = self.fault == "parts are cast to BF16"
        y = part.bfloat16() if cast else part.clone()
        distributed.all_reduce(y, group=self.group)
        with _disable_current_modes():
            if self.fault in BELOW:
                factor = BELOW[self.fault]
                other = self.before if factor is None else own * factor
                y.copy_(self._summed(other if mine else own))
            if self.fault == "parts are added up in BF16":
                y.copy_(self._summed(own.bfloat16()))
        self.before = own
        return y.to(o.dtype)

    def _summed(self, part: Tensor) -> Tensor:
        total = part.clone()
        distributed.all_reduce(total, group=self.group)
        return total


class Layer(nn.Module):
    """Attention and an MLP, with residuals."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        width, self.dim = heads * dim, dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C]."""
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(o.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(functional.silu(self.up(self.norm_2(x))))
        return found


def model_of(options: Any, seed: int, dtype: torch.dtype) -> nn.Sequential:
    """The same weights for everybody."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer(options.heads, options.dim) for _ in range(LAYERS))).to(options.device, dtype)


def sharded(model: nn.Sequential, group: Any, kind: str, *, ours: bool) -> nn.Sequential:
    """Under tensor parallelism of DTensor, or with output projections of our own."""
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    if not ours:
        plan: dict[str, Any] = {f"*.{p}_proj": ColwiseParallel() for p in "qkv"} | {"*.o_proj": RowwiseParallel()}
        mesh = DeviceMesh.from_group(group, kind)
        parallelize_module(model, mesh, plan, src_data_rank=None)
        return model
    for layer in model:
        for name in "qkv":
            linear: Any = getattr(layer, f"{name}_proj")
            linear.weight = nn.Parameter(linear.weight.detach().chunk(ranks, 0)[rank].contiguous())
        own: Any = layer.o_proj
        layer.o_proj = OutputProjection(own.weight.detach().chunk(ranks, 1)[rank].contiguous(), group)
    return model


def run(model: nn.Sequential, inputs: list[Tensor], folder: Path, fault: str = "", layer: int = 0, at: int = 0) -> None:
    """Two steps without gradients, captured; the fault in the second one."""
    with torch.no_grad(), attn_diag.capture(model, folder, batch=None, calls=None, sums=True) as recorder:
        for step, x in enumerate(inputs):
            if step and fault:
                module: Any = model[layer].o_proj
                module.fault, module.at = fault, at
            model(x)
    assert not recorder.dropped, recorder.dropped


def told(folder: Path, name: str, other: str, device: str) -> dict[str, Any]:
    """What mismatch says."""
    started = time.monotonic()
    found = attn_diag.mismatch(folder / other, folder / name, device=device)
    return {
        "name": name, "other": other, "headline": found.headline,
        "notes": [note.replace(f"{folder}/", "") for note in found.notes],
        "causes": [{"layer": c.layer, "kind": c.kind, "words": c.words} for c in found.causes],
        "ways": sorted({f"{s.run}: {len(s.ranks)} ranks, {s.dtype}, {s.by}: {s.way}" for s in found.sums}),
        "sums": [
            {"layer": s.layer, "run": s.run, "error": s.error, "in_fp32": s.in_fp32, "agreement": s.agreement}
            for s in found.sums if len(s.ranks) > 1
        ],
        "outputs": [
            {"layer": one.layer, "difference": one.difference}
            | {p.name: [p.size, p.share, p.away, p.away_error] for p in one.parts}
            for one in found.outputs
        ],
        "repairs": [[r.what, r.removes, r.left] for r in found.repairs if r.measure == "output"],
        "seconds": round(time.monotonic() - started, 2),
    }  # fmt: skip


def right(row: dict[str, Any], layer: int, words: str) -> bool:
    """Whether the fault is named, in its layer, and nothing else is; without words: nothing is."""
    causes = row["causes"]
    return bool(causes) == bool(words) and all(
        c["layer"] == layer and c["kind"] == "sum" and words in c["words"] for c in causes
    )


def main() -> None:
    parser = options_of(__doc__, device="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--healthy", action="store_true", help="plant no faults")
    parser.add_argument("--only", nargs="+", default=["DTensor", "module"], help="healthy tensor parallelism of these")
    parser.add_argument("--compare-on", default=None, help="the device of mismatch, if it is another")
    options = parser.parse_args()
    started, kind = time.monotonic(), options.device
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    by_nccl = kind == "cuda" and ranks <= torch.cuda.device_count()
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    sizes = [n for n in (2, 4, 8) if n <= ranks]
    groups = {n: distributed.new_group(range(n), backend="nccl" if by_nccl else "gloo") for n in sizes}
    counts: Counter[tuple[str, bool]] = Counter()
    wrong: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    most: dict[str, list[float]] = {}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        names: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
        distributed.broadcast_object_list(names)
        folder = Path(names[0])
        expected: list[tuple[str, str, str, int, str]] = []
        for number, name in enumerate(options.dtypes):
            dtype, generator = DTYPES[name], torch.Generator().manual_seed(seed)
            shape = 1, options.length, options.heads * options.dim
            inputs = [torch.randn(shape, generator=generator).to(kind, dtype) for _ in range(STEPS)]
            if rank == 0:
                run(model_of(options, seed, dtype), inputs, folder / f"{name} one")
            for n in sizes:
                for how in options.only:
                    run_name = f"{name} {n} {how}"
                    if rank < n:
                        model = sharded(model_of(options, seed, dtype), groups[n], kind, ours=how == "module")
                        run(model, inputs, folder / run_name)
                    expected.append((run_name, f"{name} one", "none", 0, ""))
            if len(sizes) > 1:
                how = options.only[0]
                expected.append((f"{name} {sizes[-1]} {how}", f"{name} {sizes[0]} {how}", "none", 0, ""))
            for place, (fault, (dtypes, words)) in enumerate(FAULTS.items()):
                if options.healthy or name not in dtypes:
                    continue
                n = sizes[(seed + place) % len(sizes)]
                layer, at = (seed + place + number) % LAYERS, (seed + number) % n
                run_name = f"{name} {n} {fault}"
                if rank < n:
                    model = sharded(model_of(options, seed, dtype), groups[n], kind, ours=True)
                    run(model, inputs, folder / run_name, fault, layer, at)
                expected.append((run_name, f"{name} one", fault, layer, words.format(at)))
            distributed.barrier()
        if rank == 0:
            print(f"seed {seed}: run after {time.monotonic() - started:.0f} s", flush=True)
        # Those without a fault first.
        expected.sort(key=lambda one: one[2] != "none")
        own = {}
        for i in range(rank, len(expected), ranks):
            row = told(folder, expected[i][0], expected[i][1], options.compare_on or kind)
            own[i] = row | {"right": right(row, *expected[i][3:])}
            if options.seeds == 1:
                print(
                    own[i]["right"], *(row[n] for n in ("name", "other", "seconds", "headline")), sep=" | ", flush=True
                )
                print(*row["ways"], *row["repairs"], row["outputs"], sep="\n  ", flush=True)
        every: list[Any] = [None] * ranks
        distributed.all_gather_object(every, own)
        for i, row in sorted((i, row) for one in every for i, row in one.items()):
            fault = expected[i][2]
            counts[fault, row["right"]] += 1
            for one in row["outputs"]:
                total = sum(one[part][1] for part in ("inputs", "weights", "products", "sum") if part in one)
                most.setdefault("shares add up to", []).append(total)
            if rank == 0 and not row["right"]:
                wrong.append({"seed": seed, "fault": fault, **row})
                print(seed, fault, row["name"], expected[i][3:], row["causes"], row["notes"], flush=True)
            if seed == options.first_seed:
                kept.append({"fault": fault, **row})
    if rank == 0:
        table = {f: f"{counts[f, True]} of {counts[f, True] + counts[f, False]}" for f in ("none", *FAULTS)}
        shares = most.get("shares add up to", [])
        captured = {"length": options.length, "heads": options.heads, "head_dim": options.dim, "layers": LAYERS}
        how = {"ranks": ranks, "backend": "nccl" if by_nccl else "gloo", "seeds": options.seeds}
        print(table, min(shares), max(shares), f"{time.monotonic() - started:.0f} s", flush=True)
        for row in kept:
            print(row["name"], "|", row["headline"], "|", *row["ways"], flush=True)
        save(
            {**made_by(kind), **captured, **how, "first_seed": options.first_seed, "right": table,
             "shares_add_up_to": [min(shares), max(shares)], "wrong": wrong, "first": kept,
             "seconds": round(time.monotonic() - started)},
            options.json,
        )  # fmt: skip
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
