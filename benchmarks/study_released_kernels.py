"""What ``inspect`` says of kernels that people run, on a GPU: SDPA's backends, FlexAttention, this project's own, and,
where they are installed, FlashAttention-4 and SageAttention 1 (forward alone).

Every kernel gets the same inputs (``verdicts.inputs``, and real captures).

    python benchmarks/study_released_kernels.py --json benchmarks/results/released_kernels.json
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from typing import Any

import torch
from measuring import CAPTURES, Keeper, made_by, options_of, save
from study_verdicts import DTYPES, inspected
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from verdicts.inputs import FAMILIES, Inputs, captures, draw
from verdicts.kernels import Outputs

import attn_diag

Attention = Callable[[Inputs, Tensor, Tensor, Tensor], Tensor]


def _sdpa(backend: SDPBackend, x: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=x.causal != "none", scale=x.scale, enable_gqa=x.group > 1
        )


@cache
def _compiled() -> Callable[..., Tensor]:
    # Beyond it torch falls back, silently, to an unfused kernel in the inputs' format.
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(flex_attention, dynamic=False)


def _flex(x: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = None
    if x.causal != "none":
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cuda")  # noqa: ARG005
    found = _compiled()(q, k, v, block_mask=mask, scale=x.scale, enable_gqa=x.group > 1)
    assert isinstance(found, Tensor)
    return found


def _own(x: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = attn_diag.attention(q, k, v, causal=x.causal, scale=x.scale, recipe="fa2", backward_recipe="fa2")
    return found if isinstance(found, Tensor) else found[0]


def _flash_attention_4(x: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    turned = (t.transpose(1, 2) for t in (q, k, v))
    found: Tensor = flash_attn_func(*turned, softmax_scale=x.scale, causal=x.causal != "none")[0]
    return found.transpose(1, 2)


def _sage(x: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from sageattention import sageattn  # type: ignore[import-not-found]

    # It subtracts the mean of k in place.
    copies = (t.detach().clone() for t in (q, k, v))
    found: Tensor = sageattn(*copies, is_causal=x.causal != "none", sm_scale=x.scale)
    return found


KERNELS: dict[str, Attention] = {
    "flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "math": partial(_sdpa, SDPBackend.MATH),
    "flex": _flex,
    "attn_diag.attention": _own,
    "flash-attn-4": _flash_attention_4,
    "sageattention": _sage,
}


@dataclass(frozen=True)
class Row:
    """One quantity of one head of one kernel."""

    inputs: str
    dtype: str
    head: int
    labels: tuple[str, ...]
    quantity: str
    answer: str
    factor: float | None
    ci95: tuple[float, float] | None
    site: str | None
    words: str


def run(kernel: Attention, x: Inputs) -> Outputs:
    """O and the gradients, on the GPU."""
    q, k, v = (t.cuda().requires_grad_() for t in (x.q, x.k, x.v))
    o = kernel(x, q, k, v)
    if not o.requires_grad:
        none = torch.empty(0)
        return Outputs(o=o, lse=none, dq=none, dk=none, dv=none)
    o.backward(x.do.cuda())  # type: ignore[no-untyped-call]
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return Outputs(o=o.detach(), lse=torch.empty(0), dq=q.grad, dk=k.grad, dv=v.grad)


def rows(name: str, x: Inputs) -> Iterator[Row]:
    """What is said of one kernel on one call."""
    outputs, dtype = run(KERNELS[name], x), str(x.q.dtype).removeprefix("torch.")
    on_gpu = replace(x, **{n: getattr(x, n).cuda() for n in ("q", "k", "v", "do")})
    found = inspected(
        on_gpu, outputs, device="cuda", without=[n for n, t in outputs.tensors().items() if not t.numel()]
    )
    for head in found.captures[0].observations[0].heads:
        if head.head is None:
            continue
        labels = ("no verdict",) if head.verdict is None else head.verdict.labels
        for q in head.quantities:
            yield Row(x.name, dtype, head.head, labels, q.quantity, q.answer, q.factor, q.factor_ci95, q.site, q.words)


def summary(kernel: str, found: Sequence[Row]) -> dict[str, Any]:
    """The labels of one kernel's heads, the range of each quantity's factor, and what is not good, in words."""
    heads = {(r.inputs, r.dtype, r.head): r.labels for r in found}
    factors = {}
    for quantity in ("o", "dq", "dk", "dv"):
        known = [r.factor for r in found if r.quantity == quantity and r.factor is not None]
        if known:
            factors[quantity] = {"least": min(known), "largest": max(known)}
    labels = Counter(" ".join(mine) for mine in heads.values())
    said = [vars(r) for r in found if r.answer not in ("good", "stated")]
    return {"version": _version(kernel), "heads": len(heads), "labels": dict(labels), "factors": factors, "said": said}


def _version(kernel: str) -> str:
    packages = {"flash-attn-4", "sageattention"}
    return version(kernel) if kernel in packages else "of torch" if kernel != "attn_diag.attention" else "this"


def main() -> None:
    """Run all kernels on all inputs and print what is not clean."""
    parser = options_of(__doc__)
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS))
    parser.add_argument("--families", nargs="*", default=[name for name in FAMILIES if name != "one_hot"])
    parser.add_argument("--settings", nargs="*", default=["plain", "full", "d128", "gqa", "d72", "d96", "d104"])
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--no-captures", action="store_true", help="leave out the inputs of real captures")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, calls drawn at random")
    options = parser.parse_args()
    places = product(options.families, options.settings, options.dtypes)
    calls = [draw(family, setting, dtype=DTYPES[dtype]) for family, setting, dtype in places]
    calls += [] if options.no_captures else list(captures(CAPTURES).values())
    found: dict[str, list[Row]] = {name: [] for name in options.kernels}
    refused: dict[str, set[str]] = {name: set() for name in options.kernels}
    made, todo, done = made_by("cuda"), list(product(calls, options.kernels)), 0
    if math.isfinite(options.seconds):
        random.Random(0).shuffle(todo)

    def write() -> dict[str, Any]:
        result = {name: summary(name, mine) for name, mine in found.items() if mine}
        counts = {"calls": done, "calls in all": len(todo)}
        save({**made, **counts, "kernels": result, "refused": {n: sorted(r) for n, r in refused.items()}}, options.json)
        return result

    keeper = Keeper(write, options.seconds)
    for x, name in todo:
        try:
            found[name] += rows(name, x)
        # A backend that refuses these inputs, or is not installed.
        except (RuntimeError, ValueError, AssertionError, ImportError) as error:
            refused[name].add(f"{x.name}: {[*str(error).splitlines(), ''][0][:100]}")
        done += 1
        if not keeper.goes_on():
            print(f"stopped after {done} of {len(todo)} calls")
            break
    result = write()
    for name, of_kernel in result.items():
        for row in of_kernel["said"]:
            print(f"{name:20} {row['inputs']:24} {row['dtype']} H{row['head']} {row['labels']} {row['words']}")
    for name, of_kernel in result.items():
        ranges = ", ".join(f"{q} {f['least']:.3f} to {f['largest']:.3f}" for q, f in of_kernel["factors"].items())
        print(f"{name}: {of_kernel['heads']} heads, {of_kernel['labels']}; factors: {ranges}")
    for name, why in refused.items():
        print(f"{name} refuses {len(why)} calls, for instance {sorted(why)[:1]}")


if __name__ == "__main__":
    main()
