"""How many bits of O a recipe has on long rows, with fp32 sums and with a tensor core's, and what is recognised.

Causal attention of N(0,1) inputs, by this project's kernel and by torch's flash, cuDNN and memory-efficient ones:
recipes on spread rows of the first head, the best first; and what ``inspect`` takes the kernel for.

    python benchmarks/bench_long_bits.py --device cuda --json benchmarks/results/long_bits_h200.json
"""

from __future__ import annotations

from typing import Any

import torch
from measuring import captured, made_by, normal, options_of, save
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_diag.head import recipe_search as search
from attn_diag.head.baseline import recognise
from attn_diag.head.recipe_rows import spread_rows
from attn_diag.kernels.attention import attention

SHAPES = [(8, 1024, 64), (8, 1024, 128), (8, 2048, 128), (8, 4096, 64), (8, 4096, 128), (4, 8192, 128), (2, 16384, 64)]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ROWS = 24


def outputs(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """O of every kernel."""
    found = {"attn_diag": attention(q, k, v, causal="top-left")}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            found[name] = scaled_dot_product_attention(q, k, v, is_causal=True)
    return found


def row_of(tensors: list[Tensor], o: Tensor, device: torch.device) -> dict[str, Any]:
    """What one kernel's O agrees with."""
    capture = captured(tensors, o=o.cpu())
    subject = search.read_subject(capture, "observed", 0, 0, device)
    assert subject is not None
    rows = spread_rows(len(subject.observed), ROWS, device)
    recipes = [r for r in search.known(subject) if r.scores == "fp32"]
    found: dict[str, Any] = {}
    for sums, cut_off in (("fp32 sums", False), ("a tensor core's", True)):
        best = search.ranked(subject.run(recipes, rows, cut_off=cut_off), subject.head_dim)[:2]
        found[sums] = {t.recipe.name: round(t.match.agreement, 5) for t in best}
        recipes = [t.recipe for t in best]
    known = recognise(capture, "observed", 0, 0)
    found["recognised"] = None if known is None else known.words
    return found


def main() -> None:
    arguments = options_of(__doc__, device="cuda").parse_args()
    device = torch.device(arguments.device)
    table = []
    for heads, length, width in SHAPES:
        tensors = normal(1, heads, length, width, seed=1)
        for kernel, o in outputs(*(t.to(device) for t in tensors[:3])).items():
            table.append({"T": length, "D": width, "heads": heads, "kernel": kernel, **row_of(tensors, o, device)})
            print(table[-1], flush=True)
            save(made_by(device) | {"rows": table}, arguments.json)


if __name__ == "__main__":
    main()
