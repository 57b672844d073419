"""How many operations inspect makes on a GPU, and how often its host waits there: counted without one.

    python benchmarks/as_gpu.py [--captures N] [--heads N] [--length T] [--before PYTHON] [--json FILE]

Everything is computed on a CPU, but in the order of a GPU: heads of all captures side by side, by the fused kernels,
whose results are put in by plain products that are not counted (causal heads without a mask, a softcap or sinks); the
recipes' kernels are emulated, once. Counted are torch's operations without views, and what makes a GPU's host wait:
numbers and arrays handed to Python, and looks at which elements of a mask are set. Some waits would be none: bits that
the host compares are on it already. ``--before`` names the Python of another installation, which is counted too;
its kernels must take the same arguments.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from measuring import captured, made_by, normal, options_of, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from attn_diag.analyses.inspection import capture_job, groups, joint
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.head import opened, output_fit, row_maxima, streaming
from attn_diag.head.read import HeadTensors
from attn_diag.kernels import Recipe, emulate_head, preset, triton_head
from attn_diag.reference import AttentionHead, Masking, fused_inputs, magnitudes, reference_head
from attn_diag.reference.fused import FusedHeads
from attn_diag.reference.fused_products import TileWeight
from attn_diag.reference.triton_tiles import Tiling

MANY = 2**20
# Parts of an inspection, by the function that does them.
PARTS = ("recognise_ahead", "check_ahead", "begin", "open_heads", "stream_heads", "measure_heads", "_pool")
WAITING = ("aten.nonzero", "aten._unique2", "aten.unique_dim", "aten.masked_select", "aten._local_scalar_dense")


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and waits, of all and by part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.waits = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        by_mask = name.startswith("aten.index.Tensor") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if by_mask or name.startswith(WAITING):
            self.waits.update(parts_of(sys._getframe(1)))
        if not func.is_view and not name.startswith("aten._local_scalar_dense"):
            self.operations.update(parts_of(sys._getframe(1)))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def on(self) -> Iterator[None]:
        """While it counts; what CPU tensors hand over without an operation too."""

        def counting(read: Any) -> Any:
            def counted(tensor: Tensor, *arguments: Any) -> Any:
                if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                    self.waits.update(parts_of(sys._getframe(1)))
                return read(tensor, *arguments)

            return counted

        with ExitStack() as stack:
            for name in ("tolist", "numpy"):
                stack.enter_context(patch.object(Tensor, name, counting(getattr(Tensor, name))))
            stack.enter_context(self)
            yield


def parts_of(frame: FrameType | None) -> Iterator[str]:
    """All of it, and the part that is being done."""
    yield "all"
    while frame is not None and frame.f_code.co_name not in PARTS:
        frame = frame.f_back
    if frame is not None:
        yield frame.f_code.co_name


def launch(
    _heads: FusedHeads, kernel: Any, _grid: object, tiling: Tiling, given: Any, made: Any, _numbers: object
) -> None:
    """What a kernel of ``triton_attention`` stores, by plain products."""
    with _disable_current_modes():
        name, (q, k), filled = kernel.fn.__name__, given[:2], [one.tensor for one in made]
        at = {"forward_kernel": 4, "scores_kernel": 5, "rows_kernel": 7, "keys_kernel": 8}[name]
        owners, numbers = given[at : at + 2]
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
        for h, owner in enumerate(owners.tolist()):
            scores = (q[h] @ k[owner].T * float(numbers[0])).masked_fill_(hidden, -torch.inf)
            if name == "scores_kernel":
                rows = given[2][h][given[2][h] < q.shape[1]]
                above = scores[rows] > given[3][h, : len(rows), None]
                filled[2][h, : len(rows)] = above.sum(1)
                number, key = above.nonzero(as_tuple=True)
                slot = (above.cumsum(1) - 1)[number, key]
                few = slot < filled[0].shape[2]
                filled[0][h, number[few], slot[few]] = key[few].int()
                filled[1][h, number[few], slot[few]] = scores[rows][number, key][few]
                continue
            v = given[2]
            if name == "forward_kernel":
                out, rows, places = filled
                row_max, top_key = scores.max(1)
                probs = torch.exp(scores - row_max[:, None])
                out[h] = probs @ v[owner]
                places[:, h] = torch.stack([top_key, (scores > -torch.inf).sum(1), torch.zeros_like(top_key)])
                second = scores.scatter_(1, top_key[:, None], -torch.inf).amax(1)
                sums = probs.sum(1), second, probs.square().sum(1), torch.zeros_like(row_max)
                rows[:, h] = torch.stack([row_max, *sums])
                continue
            row_max, delta, numbers_of = given[-3:]
            factors, out = given[4 : at - 1], filled[0]
            probs, do = torch.exp(scores - row_max[h][:, None]), given[3][h]
            centred, numbers_of = do @ v[owner].T - delta[h][:, None], numbers_of.view(-1, 3, *row_max.shape)
            for i, chosen in enumerate(tiling.weights):
                a, b, c = numbers_of[i, :, h, :, None].unbind()
                weight = weight_of(probs, centred, a, b, c, chosen, float(numbers[0]))
                x = factors[min(i, len(factors) - 1)]
                out[i, h] = weight @ x[owner] if name == "rows_kernel" else weight.T @ x[h]
                if tiling.details and chosen.name == "dscores":
                    filled[1][:, h] = torch.stack([weight.sum(1), weight.square().sum(1)])


def weight_of(
    probs: Tensor, centred: Tensor, a: Tensor, b: Tensor, c: Tensor, chosen: TileWeight, alpha: float
) -> Tensor:
    """W of ``triton_attention``."""

    def cast(x: Tensor) -> Tensor:
        return x.float().to(torch.bfloat16 if chosen.cast == "bf16" else torch.float16).double()

    found = probs if chosen.name.startswith("probs") or chosen.name == "sloped" else probs * centred
    if chosen.name == "probs_squared":
        found = a * probs.square() + b * (probs > 0)
    elif chosen.name == "probs_cast":
        found = cast(a * probs)
    elif chosen.name == "dscores_squared":
        found = a * found.square() + b * (probs > 0) + c * probs.square()
    elif chosen.name == "dscores_cast":
        found = a * (found - b * probs)
        found = cast(found * alpha) if chosen.alpha_first else cast(found) * alpha
    return found


_RUNS: dict[object, Any] = {}


def run_stack(recipe: Recipe, heads: Sequence[Any], _: Any = None) -> Any:
    """As ``triton_head.run_stack``, by the emulation; each once."""
    with _disable_current_modes():
        key = recipe, heads[0].do is None, tuple(float(head.q.sum()) for head in heads)
        if key not in _RUNS:
            made = [emulate_head(recipe, head) for head in heads]
            names = [f.name for f in fields(made[0]) if getattr(made[0], f.name) is not None]
            _RUNS[key] = type(made[0])(**{name: torch.stack([getattr(one, name) for one in made]) for name in names})
        return _RUNS[key]


def read_together(
    capture: Capture, device: torch.device, batches: Sequence[int], heads: Sequence[int], names: Sequence[str]
) -> HeadTensors:
    """As that of ``groups``, on a GPU."""
    outputs = [capture.key(name, output) for name in names for output in ("o", "lse", "delta", "dq")]
    return HeadTensors(capture, [(b, h) for b in batches for h in heads], device, ("q", "k", "v", "do", *outputs))


def on_host(tensors: Sequence[Tensor]) -> list[Any]:
    """As that of ``stacks``, on a GPU."""
    alike: dict[object, list[int]] = {}
    for i, t in enumerate(tensors):
        alike.setdefault((t.shape, t.dtype), []).append(i)
    found: dict[int, Any] = {}
    for places in alike.values():
        found |= zip(places, torch.stack([tensors[i] for i in places]).numpy(), strict=True)
    return [found[i] for i in range(len(tensors))]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """What asks for the device is answered as there."""
    many = lambda *_: MANY  # noqa: E731 - as short as the others
    replaced: list[tuple[Any, str, Any]] = [
        (streaming, "fuses", lambda *_: True), (FusedHeads, "_launch", launch), (triton_head, "run_stack", run_stack),
        (FusedHeads, "compile_ahead", lambda *_: None), (joint, "worth_kernels", lambda places, _: bool(places)),
        (groups, "_heads_at_once", many), (joint, "jobs_at_once", many), (joint, "jobs_recognised", many),
        (joint, "key_heads_at_once", many),
        (output_fit, "_at_once", many), (capture_job, "read_together", read_together), (opened, "on_host", on_host),
        (row_maxima, "on_host", on_host), (magnitudes, "_PART_ELEMENTS", 2**40),
        (fused_inputs, "WORTH_NARROW", math.inf),
    ]  # fmt: skip
    with ExitStack() as stack:
        for module, name, value in replaced:
            if hasattr(module, name):  # another installation may lack it
                stack.enter_context(patch.object(module, name, value))
        yield


def counts_of(captures: int, heads: int, length: int, width: int = 64) -> dict[str, Any]:
    """Of captures whose O is fa2's, and dQ the true one, rounded."""
    found = []
    for seed in range(captures):
        inputs = normal(1, heads, length, width, seed=seed)
        o, dq = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
        for h in range(heads):
            q, k, v, do = (t[0, h].double() for t in inputs)
            head = AttentionHead(q, k, v, do, width**-0.5, Masking("top-left"))
            o[0, h], true = emulate_head(preset("fa2", "bf16", width), head).o, reference_head(head).dq
            assert true is not None
            dq[0, h] = true.bfloat16()
        found.append(captured(inputs, o=o, dq=dq))
    with as_on_a_gpu():
        inspect_captures(found, device="cpu")
        counted = Counted()
        with counted.on():
            inspect_captures(found, device="cpu")
    return {part: {"operations": counted.operations[part], "waits": counted.waits[part]} for part in ("all", *PARTS)}


def main() -> None:
    parser = options_of(__doc__)
    for name, usual in (("captures", 12), ("heads", 12), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--before", metavar="PYTHON", help="the Python of an installation to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = made_by() | {"captures": [options.captures, options.heads, options.length, 64]}
    result["now"] = counts_of(options.captures, options.heads, options.length)
    if options.before:
        words = ("--captures", options.captures, "--heads", options.heads, "--length", options.length)
        command = [options.before, __file__, *map(str, words)]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result["before"] = json.loads(told)["now"]
    print(json.dumps(result, indent=1))
    save(result, options.json)


if __name__ == "__main__":
    main()
