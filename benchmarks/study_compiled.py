"""Attention of plain torch under torch.compile: which steps are rounded, is it named, and is a row at fault seen?

Eight ways to write it, several shapes, BF16 and FP16, fixed and changing lengths. Of each call the way of
``attn_diag.head.unfused`` that makes most bits of a quantity, how many, what ``inspect`` says of every head, and what
it says once one row of a quantity in one head is 1.1 times the true one.

    python benchmarks/study_compiled.py [--device cuda] [--processes 6] [--forms NAME …] --json FILE
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor
from torch.nn.functional import softmax

import attn_diag
from attn_diag.head.unfused import unfused, ways
from attn_diag.reference import AttentionHead, Masking, format_of

ALPHA, CAP, ROW, FACTOR = 0.1, 20.0, 77, 1.1
SHAPES = ((1, 1, 128, 64), (1, 2, 200, 64), (2, 4, 384, 64))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Of q, k, v, a causal mask (True: seen), and the same as what is added.
Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _cast(scores: Tensor, v: Tensor) -> Tensor:
    """Softmax in fp32, whose P is cast."""
    return softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


FORMS: dict[str, Form] = {
    "no mask": lambda q, k, v, _, __: _cast(q @ k.mT * ALPHA, v),
    "masked": lambda q, k, v, seen, _: _cast((q @ k.mT * ALPHA).masked_fill(~seen, torch.finfo(q.dtype).min), v),
    "masked, softmax in 16 bits": lambda q, k, v, seen, _: (
        softmax((q @ k.mT * ALPHA).masked_fill(~seen, -torch.inf), -1) @ v
    ),
    "mask added": lambda q, k, v, _, bias: _cast(q @ k.mT * ALPHA + bias, v),
    "mask added, softmax in 16 bits": lambda q, k, v, _, bias: softmax(q @ k.mT * ALPHA + bias, -1) @ v,
    "alpha on q": lambda q, k, v, _, bias: _cast((q * ALPHA) @ k.mT + bias, v),
    "scores in fp32": lambda q, k, v, _, bias: _cast((q @ k.mT).float() * ALPHA + bias.float(), v),
    "softcap": lambda q, k, v, _, bias: _cast(torch.tanh(q @ k.mT * ALPHA / CAP) * CAP + bias, v),
}


def drawn(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    """q, k, v, dO, the mask and what is added for it."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    seen = torch.ones(shape[2], shape[2], dtype=torch.bool).tril()
    bias = torch.zeros(shape[2], shape[2]).masked_fill(~seen, torch.finfo(dtype).min)
    return [t.to(device, dtype) for t in (q * 3, k, v, do)] + [seen.to(device), bias.to(device, dtype)]


def called(run: Form, given: list[Tensor]) -> dict[str, Tensor]:
    """O and its gradients."""
    leaves = [t.clone().requires_grad_() for t in given[:3]]
    o = run(*leaves, *given[4:])
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, leaves, given[3])), strict=True))


def said(form: str, given: list[Tensor], outputs: dict[str, Tensor]) -> dict[str, dict[str, int]]:
    """Quantity -> how many heads have each answer, with its site."""
    tensors: dict[str, Any] = dict(zip(("q", "k", "v", "do"), given, strict=False)) | outputs
    options: dict[str, Any] = {"softcap": CAP} if form == "softcap" else {}
    diagnosis = attn_diag.inspect(
        **tensors, **options, scale=ALPHA, causal=form != "no mask", device=str(given[0].device)
    )
    found: dict[str, Counter[str]] = {}
    for one in (x for head in diagnosis.heads for x in head.quantities):
        found.setdefault(one.quantity, Counter())[f"{one.answer}, {one.site}" if one.site else one.answer] += 1
    return {name: dict(counts) for name, counts in found.items()}


def calls(form: str, device: str) -> list[dict[str, Any]]:
    """All calls of one way to write it."""
    warnings.simplefilter("ignore")
    found: list[dict[str, Any]] = []
    for shape, (name, dtype), lengths in product(SHAPES, DTYPES.items(), ("fixed", "changing")):
        torch._dynamo.reset()
        run: Form = torch.compile(FORMS[form], dynamic=False if lengths == "fixed" else None)
        given = drawn(shape, dtype, device, 0)
        outputs = called(run, given)
        if lengths == "changing":
            given = drawn((*shape[:2], shape[2] - 8, shape[3]), dtype, device, 1)
            outputs = called(run, given)
        q, k, v, do = (t[0, -1].double() for t in given[:4])
        masking = Masking("none" if form == "no mask" else "top-left")
        head = AttentionHead(q, k, v, do, ALPHA, masking, CAP if form == "softcap" else None)
        made = {way: unfused(head, format_of(dtype), way) for way in ways(head)}
        bits = {
            n: max((float((one[n] == t[0, -1].double()).double().mean()), way) for way, one in made.items())
            for n, t in outputs.items()
        }
        planted = Counter[str]()
        for n, t in outputs.items():
            wrong = t.clone()
            wrong[0, 0, ROW] *= FACTOR
            planted[n] = said(form, given, outputs | {n: wrong})[n].get("wrong", 0)
        found.append(
            {
                "form": form, "shape": list(given[0].shape), "dtype": name, "lengths": lengths,
                "bits": {n: [round(share, 4), way] for n, (share, way) in bits.items()},
                "said": said(form, given, outputs), "wrong heads with a row at fault": dict(planted),
            }
        )  # fmt: skip
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = options_of(__doc__, device="cuda")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--processes", type=int, default=6)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        found = [one for some in pool.map(calls, options.forms, [options.device] * len(options.forms)) for one in some]
    healthy = Counter[str]()
    for one in found:
        for counts in one["said"].values():
            healthy.update(counts)
    save(made_by(options.device) | {"healthy heads": dict(healthy), "calls": found}, options.json)


if __name__ == "__main__":
    main()
