"""One model on one device, in rings and under tensor parallelism on real ranks: what ``mismatch`` says of each.

Ranks that have a GPU each exchange by NCCL; more ranks than GPUs, and ranks on a CPU, by gloo (through the host). A
ring of n, and tensor parallelism of n, has the first n ranks. Rings are torch's own, balanced, with every hop captured;
each is compared with the same model on one rank. Faults are planted into the largest ring.

    torchrun --nproc-per-node 4 benchmarks/study_rings.py --json benchmarks/results/rings_cpu.json --device cpu
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import attn_diag
from attn_diag.watching.live.rings import positions

HEADS, DIM, LAYERS = 8, 64, 2
WIDTH = HEADS * DIM
Function: Any = torch.autograd.Function
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_aten: Any = torch.ops.aten


class Ring(Function):  # type: ignore[misc]
    """torch's ring attention, below autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        op = _aten._scaled_dot_product_flash_attention if q.is_cuda else _CPU
        o, lse, *rest = _attention._templated_ring_attention(
            group, 2, scaled(op, group), q, k, v, is_causal=True, dropout_p=0.0, scale=None
        )
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.group, ctx.rest = group, rest
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        op, more = _CPU_BACKWARD, {}
        if q.is_cuda:
            op = _aten._scaled_dot_product_flash_attention_backward
            names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
            more = dict(zip(names, ctx.rest, strict=False))
        found = _attention._templated_ring_attention_backward(
            ctx.group, 2, op, grad_out=do.contiguous(), grad_out_name="grad_out", query=q, key=k, value=v, out=o,
            logsumexp=lse, is_causal=True, dropout_p=0.0, scale=None, **more,
        )  # fmt: skip
        return *found[:3], None


_CPU: Any = _aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# What a planted fault makes of one hop's scale: which hop, on which rank, and the factor.
_other_scale: tuple[int, int, float] | None = None


def scaled(op: Any, group: Any) -> Any:
    """The operator, whose hop on one rank has another scale where that is planted."""
    count = itertools.count()

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        hop = next(count)
        if _other_scale is not None and (hop, distributed.get_rank(group)) == _other_scale[:2]:
            options["scale"] = query.shape[-1] ** -0.5 * _other_scale[2]
        return op(query, key, value, **options)

    return call


class ThroughTheHost:
    """Hands a buffer to the next rank by gloo, which has no such exchange for tensors on a GPU."""

    def __init__(self, group: Any, seq_dim: int, method: Any = None) -> None:  # noqa: ARG002 - torch's protocol
        self._group, self._kept = group, torch.empty(0)

    def exchange_buffers(self, buffer: Tensor) -> None:
        """Send and receive."""
        ranks = distributed.get_process_group_ranks(self._group)
        place = distributed.get_rank(self._group)
        mine = buffer.contiguous().cpu()
        self._kept, device = torch.empty_like(mine), buffer.device
        send = distributed.P2POp(distributed.isend, mine, ranks[(place + 1) % len(ranks)], self._group)
        receive = distributed.P2POp(distributed.irecv, self._kept, ranks[place - 1], self._group)
        for work in distributed.batch_isend_irecv([send, receive]):
            work.wait()
        self._kept = self._kept.to(device)

    def next_buffer(self) -> Tensor:
        """What came."""
        return self._kept


class Layer(nn.Module):
    """Attention with its projections."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm, self.attend = nn.RMSNorm(WIDTH), attend

    def forward(self, x: Tensor) -> Tensor:
        """With the residual."""
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        result: Tensor = x + self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return result


class Model(nn.Module):
    """Some layers, of the same weights for everybody, whose scores differ by some units."""

    def __init__(self, attend: Attend, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.each = [Layer(attend) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(self.each)
        with torch.no_grad():
            for layer in self.each:
                for projection in (layer.q_proj, layer.k_proj):
                    projection.weight.mul_(2.5)

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = layer(x)
        return x


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention on one rank."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@contextlib.contextmanager
def planted(fault: str, group: Any) -> Iterator[None]:
    """One fault in the ring."""
    global _other_scale
    merger: Any = _attention._SDPAMerger
    step, to_fp32 = merger.step, _attention._cp_options.convert_to_f32

    def with_rounding(self: Any, out: Tensor, lse: Tensor, partial: bool) -> None:
        step(self, out, lse, partial)
        if fault == "merged O in BF16":
            self._out = self._out.bfloat16().float()
        else:
            self._lse = self._lse.bfloat16().float()

    def without_the_last(self: Any, out: Tensor, lse: Tensor, partial: bool) -> None:
        self.count = getattr(self, "count", 0) + 1
        if self.count < distributed.get_world_size(group):
            step(self, out, lse, partial)

    if fault in ("merged O in BF16", "LSE in BF16"):
        merger.step = with_rounding
    elif fault == "the last hop left out":
        merger.step = without_the_last
    elif fault == "gradients summed in BF16 (convert_to_f32=False)":
        _attention._cp_options.convert_to_f32 = False
    elif fault == "one hop's scale 2 % off":
        _other_scale = (1, 1, 1.02)
    try:
        yield
    finally:
        merger.step, _attention._cp_options.convert_to_f32, _other_scale = step, to_fp32, None


SIZES = (2**12, 2**16, 2**20, 2**24)
FAULTS = (
    "the last hop left out", "gradients summed in BF16 (convert_to_f32=False)", "one hop's scale 2 % off",
    "merged O in BF16", "LSE in BF16",
)  # fmt: skip


def run(model: Model, x: Tensor, do: Tensor, folder: Path) -> Tensor:
    """A forward and a backward, captured."""
    with attn_diag.capture(model, folder, batch=None, calls=None, hops=True):
        y: Tensor = model(x)
        torch.autograd.backward(y, do.to(y))
    return y.detach()


def compared(folder: Path, name: str, other: str, device: str) -> dict[str, Any]:
    """What mismatch says of a run beside that on one rank, or another, in figures and in words."""
    started = time.monotonic()
    found = attn_diag.mismatch(folder / other, folder / name, device=device)
    errors: dict[str, dict[str, Any]] = {}
    for one in found.merges:
        largest = errors.setdefault(f"layer {one.layer} {one.output}", {"error": 0.0})
        if one.error > largest["error"]:
            largest |= {k: v for k, v in asdict(one).items() if k not in ("run", "layer", "output")}
    layers = [{k: v for k, v in asdict(one).items() if k in ("layer", "difference", "errors")} for one in found.layers]
    row: dict[str, Any] = {
        "name": name if other == "one" else f"{name} beside {other}",
        "seconds": round(time.monotonic() - started, 1),
        "outcome": found.outcome,
        "headline": found.headline,
        "notes": [n.replace(f"{folder}/", "") for n in found.notes],
        "causes": [f"{c.layer} {c.kind}: {c.words}" for c in found.causes],
        "layers": layers,
        "errors": errors,
    }
    print(row["name"], row["headline"], *row["causes"], sep="\n  ", flush=True)
    return row


def inspected(folder: Path) -> dict[str, Any]:
    """Errors of O, dQ, dK and dV on one rank, largest head, by layer: inspect's."""
    rows: dict[str, float] = {}
    for path in sorted(folder.glob("*.safetensors")):
        (capture,) = attn_diag.inspect(path).captures
        for head in capture.observations[0].heads:
            for quantity in head.quantities:
                if quantity.quantity in ("o", "dq", "dk", "dv") and quantity.relative_error is not None:
                    of = f"layer {head.layer} {quantity.quantity}"
                    rows[of] = max(rows.get(of, 0.0), quantity.relative_error)
    return rows


def reduced(
    model: Model, x: Tensor, do: Tensor, folder: Path, group: Any, on_host: bool, keep_parts: Path | None = None
) -> list[dict[str, Any]]:
    """Run under tensor parallelism; how the output projections' parts were added up, and how far off the sum is.

    The first layer's parts and their sum are kept in a file ``keep_parts``.
    """
    held: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def keep(number: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, result: Tensor) -> None:
            o, weight = (t.to_local() if hasattr(t, "to_local") else t for t in (args[0], module.weight))
            o = o[..., : weight.shape[1]] if o.shape[-1] == weight.shape[1] else o
            y = result.to_local() if hasattr(result, "to_local") else result
            held[number] = (o.detach(), weight.detach(), y.detach())

        return hook

    for number, layer in enumerate(model.each):
        layer.o_proj.register_forward_hook(keep(number))
    run(model, x, do, folder)
    rows = []
    for number, (o, weight, y) in held.items():
        part = functional.linear(o, weight).flatten(0, -2)
        exact = (o.double() @ weight.double().T).flatten(0, -2)
        parts, exacts = (gathered(t.cpu() if on_host else t, group) for t in (part, exact))
        result = torch.empty_like(parts[0]).copy_(y.flatten(0, -2))  # it may be on its way still
        found = attn_diag.reduction_of(parts, result)
        truth = torch.stack(exacts).sum(0)
        once = torch.stack([p.double() for p in parts]).sum(0).to(result.dtype).double()
        rows.append({
            "layer": number, "way": found.words, "agreement": found.agreement,
            "error": float((result.double() - truth).norm() / truth.norm()),
            "in_fp32": float((once - truth).norm() / truth.norm()),
        })  # fmt: skip
        if number == 0 and distributed.get_rank(group) == 0 and keep_parts is not None:
            named = {f"part{i}": p.cpu() for i, p in enumerate(parts)}
            save_file(named | {"sum": result.cpu()}, keep_parts)
    return rows


def all_reduces(groups: dict[int, Any], device: str) -> list[dict[str, Any]]:
    """Sums of N(0,1) over ranks, of some sizes: how they were added up."""
    rows = []
    for ranks, group in groups.items():
        if distributed.get_rank() >= ranks:
            continue
        for dtype, size in itertools.product((torch.bfloat16, torch.float16, torch.float32), SIZES):
            generator = torch.Generator().manual_seed(distributed.get_rank())
            part = torch.randn(size, generator=generator).to(device, dtype)
            result = part.clone()
            distributed.all_reduce(result, group=group)
            found = attn_diag.reduction_of(gathered(part, group), result)
            rows.append({"ranks": ranks, "dtype": str(dtype)[6:], "elements": size, **asdict(found)})
    return rows


def gathered(t: Tensor, group: Any) -> list[Tensor]:
    """One of each rank."""
    found = [torch.empty_like(t) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, t.contiguous(), group=group)
    return found


def main() -> None:
    parser = options_of(__doc__, device="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--healthy", action="store_true", help="plant no faults")
    parser.add_argument("--parts", type=Path, metavar="FOLDER", help="keep the parts of all-reduces there")
    options = parser.parse_args()
    started, kind = time.monotonic(), options.device
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    distributed.init_process_group("gloo")  # to agree on a folder; and for tensors on a CPU
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    by_nccl = 0 < ranks <= gpus
    if kind == "cuda":
        torch.cuda.set_device(rank % gpus)
        if not by_nccl:
            _attention._create_rotater = ThroughTheHost  # type: ignore[assignment]
    names: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(names)
    folder = Path(names[0])
    generator = torch.Generator().manual_seed(options.seed)
    x, do = (torch.randn(1, options.length, WIDTH, generator=generator) for _ in range(2))
    sizes = [n for n in (2, 4, 8) if n <= ranks]
    backend = "nccl" if by_nccl else "gloo"
    groups = {n: distributed.new_group(range(n), backend=backend) for n in sizes}

    def model_of(attend: Attend) -> Model:
        return Model(attend, options.seed).to(kind, torch.bfloat16)

    if rank == 0:
        run(model_of(whole), x.to(kind, torch.bfloat16), do.to(kind), folder / "one")
        errors_of_one = inspected(folder / "one")
    _attention._cp_options.enable_load_balance = True

    runs: list[str] = []

    def ring(n: int, fault: str) -> None:
        name = f"ring of {n}" if fault == "none" else f"ring of {n}, {fault}"
        runs.append(name)
        if rank < n:
            rows = positions("zigzag", rank, n, options.length // n)
            with planted(fault, groups[n]):
                model = model_of(lambda q, k, v: Ring.apply(q, k, v, groups[n]))
                run(model, x[:, rows].to(kind, torch.bfloat16), do[:, rows].to(kind), folder / name)
        distributed.barrier()

    for n in sizes:
        ring(n, "none")
    sums: dict[str, list[dict[str, Any]]] = {}
    for n in sizes:
        name = f"tensor parallel {n}"
        if rank < n:
            mesh = DeviceMesh.from_group(groups[n], kind)
            model = model_of(whole)
            plan: dict[str, Any] = {f"layers.*.{p}_proj": ColwiseParallel() for p in "qkv"}
            parallelize_module(model, mesh, plan | {"layers.*.o_proj": RowwiseParallel()}, src_data_rank=None)
            file = options.parts / f"parts_{n}.safetensors" if options.parts else None
            inputs = x.to(kind, torch.bfloat16), do.to(kind)
            sums[name] = reduced(model, *inputs, folder / name, groups[n], not by_nccl, file)
        distributed.barrier()
    sums["all-reduces"] = [] if kind == "cuda" and not by_nccl else all_reduces(groups, kind)
    for fault in () if options.healthy else FAULTS:
        ring(sizes[-1], fault)
    if rank == 0:
        print(*itertools.chain(*sums.values()), f"{time.monotonic() - started:.0f} s to run", sep="\n", flush=True)
    # Each rank compares some of the runs, on its own device.
    sharded = [f"tensor parallel {n}" for n in sizes]
    pairs = [(name, "one") for name in [*runs, *sharded]] + [(b, a) for a, b in itertools.pairwise(sharded)]
    told: list[Any] = [pairs]
    distributed.broadcast_object_list(told)
    pairs = told[0]
    own = {place: compared(folder, pairs[place][0], pairs[place][1], kind) for place in range(rank, len(pairs), ranks)}
    every: list[Any] = [None] * ranks
    distributed.all_gather_object(every, own)
    if rank == 0:
        by_place = {place: row for one in every for place, row in one.items()}
        rows = [by_place[place] for place in range(len(pairs))]
        shape = {"heads": HEADS, "head_dim": DIM, "length": options.length, "layers": LAYERS, "seed": options.seed}
        how = {"ranks": ranks, "gpus": gpus, "backend": backend, "seconds": round(time.monotonic() - started)}
        found = {"one": errors_of_one, "rings": rows[: len(runs)], "tensor_parallel": rows[len(runs) :], "sums": sums}
        save({**made_by(kind), **shape, **how, **found}, options.json)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
