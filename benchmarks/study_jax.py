"""Attention in JAX on a GPU: which steps are rounded, is it named, and is a row at fault seen?

XLA with and without ``jax.jit``, cuDNN and Pallas, BF16 and FP16, with and without a causal mask. Of each call the way
of ``attn_diag.head.unfused``, or the recipe of ``attn_diag.head.counterfactual``, that makes most bits of a quantity,
how many, what ``inspect`` says of every head, and what it says once one row of a quantity in one head is 1.1 times the
true one.

    python benchmarks/study_jax.py [--forms NAME …] --json FILE
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from measuring import made_by, options_of, save
from study_compiled import ALPHA, DTYPES, FACTOR, ROW, drawn, said
from torch import Tensor

from attn_diag.head.counterfactual import BACKWARD, RECIPE, run_counterfactual
from attn_diag.head.unfused import ways
from attn_diag.reference import AttentionHead, Masking, format_of

SHAPE = (1, 2, 256, 64)
# Of q, k, v and whether a causal mask hides keys.
Form = Callable[[Any, Any, Any, bool], Any]


def forms() -> dict[str, Form]:
    """The ways to call it; q, k and v [B, H, T, D]."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu import attention as pallas

    def masked(scores: Any, causal: bool) -> Any:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jnp.where(seen, scores, jnp.finfo(scores.dtype).min) if causal else scores

    def swapped(run: Callable[..., Any]) -> Form:
        return lambda q, k, v, causal: run(*(x.swapaxes(1, 2) for x in (q, k, v)), causal).swapaxes(1, 2)

    def library(implementation: str) -> Form:
        call = jax.nn.dot_product_attention
        return swapped(lambda *qkv: call(*qkv[:3], scale=ALPHA, is_causal=qkv[3], implementation=implementation))

    return {
        "dot_product_attention, XLA": library("xla"),
        "dot_product_attention, cuDNN": library("cudnn"),
        "Pallas": swapped(lambda *qkv: pallas.mha(*qkv[:3], None, sm_scale=ALPHA, causal=qkv[3])),
        "alpha on q": lambda q, k, v, causal: jax.nn.softmax(masked(q * ALPHA @ k.mT, causal)) @ v,
        "q over a root": lambda q, k, v, causal: jax.nn.softmax(masked(q / (1 / ALPHA) @ k.mT, causal)) @ v,
        "softmax in fp32": lambda q, k, v, causal: (
            jax.nn.softmax(masked(q @ k.mT * ALPHA, causal).astype(jnp.float32)).astype(v.dtype) @ v
        ),
    }


def called(run: Form, given: list[Tensor], causal: bool, jitted: bool) -> dict[str, Tensor]:
    """O and its gradients."""
    import jax
    import jax.numpy as jnp

    dtype = {torch.bfloat16: jnp.bfloat16, torch.float16: jnp.float16}[given[0].dtype]

    def both(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        o, pulled = jax.vjp(lambda q, k, v: run(q, k, v, causal), q, k, v)
        return o, *pulled(do)

    # fp32 holds every number of 16 bits.
    found = (jax.jit(both) if jitted else both)(*(jnp.asarray(t.float().numpy(), dtype) for t in given[:4]))
    tensors = (torch.from_numpy(np.array(x.astype(jnp.float32))).to(given[0].dtype) for x in found)
    return dict(zip(("o", "dq", "dk", "dv"), tensors, strict=True))


def one_call(form: str, run: Form, dtype: torch.dtype, causal: bool, jitted: bool) -> dict[str, Any]:
    """Its bits, and what is said of it."""
    given = drawn(SHAPE, dtype, "cpu", 0)
    outputs = called(run, given, causal, jitted)
    q, k, v, do = (t[0, -1].double() for t in given[:4])
    head, fmt = AttentionHead(q, k, v, do, ALPHA, Masking("top-left" if causal else "none")), format_of(dtype)
    made = {way: run_counterfactual(head, fmt, {}, recipe=way) for way in (*ways(head), RECIPE, *BACKWARD)}
    bits = {
        n: max((round(float((one[n] == t[0, -1].double()).double().mean()), 4), way) for way, one in made.items())
        for n, t in outputs.items()
    }
    mask, planted = "causal" if causal else "no mask", Counter[str]()
    for n, t in outputs.items():
        wrong = t.clone()
        wrong[0, 0, ROW] *= FACTOR
        planted[n] = said(mask, given, outputs | {n: wrong})[n].get("wrong", 0)
    return {
        "form": form, "jit": jitted, "shape": list(SHAPE), "mask": mask, "dtype": str(dtype).removeprefix("torch."),
        "bits": bits, "said": said(mask, given, outputs), "wrong heads with a row at fault": dict(planted),
    }  # fmt: skip


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    parser = options_of(__doc__, device="cuda")
    parser.add_argument("--forms", nargs="*", choices=list(forms()))
    options = parser.parse_args()
    result: dict[str, Any] = made_by(options.device) | {"jax": jax.__version__}
    found, healthy = list[dict[str, Any]](), Counter[str]()
    for (form, run), dtype, causal, jitted in product(forms().items(), DTYPES.values(), (False, True), (True, False)):
        fused = form in ("dot_product_attention, cuDNN", "Pallas")
        if form not in (options.forms or forms()) or (fused and not jitted):
            continue
        found.append(one_call(form, run, dtype, causal, jitted))
        print(found[-1], flush=True)
        for counts in found[-1]["said"].values():
            healthy.update(counts)
        # Each time: a lent machine may be taken away.
        save(result | {"healthy heads": dict(healthy), "calls": found}, options.json)


if __name__ == "__main__":
    main()
