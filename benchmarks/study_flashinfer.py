"""FlashInfer's own kernels on a GPU: what `capture` keeps of its wrappers, and what `inspect` and `identify` say of it.

Needs a GPU, nvcc and the wheel (`pip install flashinfer-python`), which compiles its kernels when first called.
Pages in an order of chance, prompts and decoding steps of several lengths, packed sequences, softcap, windows, GQA.

    python benchmarks/study_flashinfer.py --json benchmarks/results/flashinfer_h100.json
"""

from __future__ import annotations

import importlib
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor, nn

import attn_diag

HEADS, KEY_HEADS, WIDTH, PAGE = 8, 2, 128, 16
# Query rows and keys of each sequence.
PROMPTS = ((200, 200), (37, 500), (300, 1000))
STEPS = ((1, 900), (1, 2100), (1, 333), (1, 1024))


class Layer(nn.Module):
    """An attention layer that calls a function of ``owner``, a wrapper or the package, as engines do."""

    def __init__(self, owner: Any, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.owner, self.name, self.options = owner, name, options

    def forward(self, *tensors: Tensor) -> Any:
        return getattr(self.owner, self.name)(*tensors, **self.options)


def borders(lengths: list[int]) -> Tensor:
    """Sums of the lengths, from 0 on, int32."""
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0).int()


def pages(sequences: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor, Tensor, int]:
    """indptr, indices (of chance) and last_page_len of a cache for the sequences, and its number of pages."""
    counts = [-(-keys // PAGE) for _, keys in sequences]
    order = torch.randperm(sum(counts) + 5)[: sum(counts)].int().cuda()
    last = torch.tensor([(keys - 1) % PAGE + 1 for _, keys in sequences], dtype=torch.int32, device="cuda")
    return borders(counts), order, last, sum(counts) + 5


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], tuple[Layer, tuple[Tensor, ...]]]]]:
    """Each call by name: a layer, and its tensors."""
    package = importlib.import_module("flashinfer")
    heads = {"num_qo_heads": HEADS, "num_kv_heads": KEY_HEADS}

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    def space() -> Tensor:
        return torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")

    def paged(options: dict[str, Any], backend: str) -> tuple[Layer, tuple[Tensor, ...]]:
        indptr, order, last, count = pages(PROMPTS)
        wrapper = package.BatchPrefillWithPagedKVCacheWrapper(space(), "NHD", backend=backend)
        rows = borders([n for n, _ in PROMPTS])
        wrapper.plan(
            rows, indptr, order, last, HEADS, KEY_HEADS, WIDTH, PAGE, causal=True, q_data_type=dtype, **options
        )
        tensors = drawn(int(rows[-1]), HEADS, WIDTH), drawn(count, 2, PAGE, KEY_HEADS, WIDTH)
        return Layer(wrapper, "run", {"return_lse": True}), tensors

    def decoding(cores: bool) -> tuple[Layer, tuple[Tensor, ...]]:
        indptr, order, last, count = pages(STEPS)
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(space(), "NHD", use_tensor_cores=cores)
        wrapper.plan(indptr, order, last, HEADS, KEY_HEADS, WIDTH, PAGE, q_data_type=dtype, data_type=dtype)
        return Layer(wrapper, "run", {}), (drawn(len(STEPS), HEADS, WIDTH), drawn(count, 2, PAGE, KEY_HEADS, WIDTH))

    def ragged(backend: str) -> tuple[Layer, tuple[Tensor, ...]]:
        rows, keys = (borders([s[i] for s in PROMPTS]) for i in (0, 1))
        wrapper = package.BatchPrefillWithRaggedKVCacheWrapper(space(), "NHD", backend=backend)
        wrapper.plan(rows, keys, head_dim_qk=WIDTH, causal=True, q_data_type=dtype, **heads)
        k, v = (drawn(int(keys[-1]), KEY_HEADS, WIDTH) for _ in range(2))
        return Layer(wrapper, "run", {"return_lse": True}), (drawn(int(rows[-1]), HEADS, WIDTH), k, v)

    def one() -> tuple[Layer, tuple[Tensor, ...]]:
        k, v = (drawn(700, KEY_HEADS, WIDTH) for _ in range(2))
        return Layer(package, "single_prefill_with_kv_cache", {"causal": True}), (drawn(700, HEADS, WIDTH), k, v)

    yield "prompts in pages", lambda: paged({}, "fa2")
    yield "prompts in pages, window and softcap", lambda: paged({"window_left": 100, "logits_soft_cap": 30.0}, "fa2")
    yield "decoding, tensor cores", lambda: decoding(True)
    yield "decoding, no tensor cores", lambda: decoding(False)
    yield "packed", lambda: ragged("fa2")
    yield "one sequence", one
    yield "prompts in pages, FlashAttention 3's kernel", lambda: paged({}, "fa3")
    yield "packed, FlashAttention 3's kernel", lambda: ragged("fa3")


def look(make: Callable[[], tuple[Layer, tuple[Tensor, ...]]]) -> dict[str, Any]:
    """Capture one call, and say what the tool does of it."""
    layer, tensors = make()
    with tempfile.TemporaryDirectory() as folder:
        with attn_diag.capture(layer, folder, batch=None) as recorder, torch.no_grad():
            layer(*tensors)
        if not recorder.written:
            return {"not captured": str(recorder.dropped)}
        capture = attn_diag.load(recorder.written[0])
        found = attn_diag.inspect(capture, device="cuda").captures[0]
        heads = [h for o in found.observations for h in o.heads]
        best = attn_diag.identify(capture, device="cuda").best
        return {
            "kernel": capture.metadata.kernel,
            "tensors": {name: list(t.shape) for name, t in capture.tensors.items()},
            "verdicts": sorted({label for h in heads if h.verdict for label in h.verdict.labels}),
            "made as": None if best is None else f"{best.recipe}, {best.schedule}",
            "of O's bits": None if best is None else best.agreement,
        }


def main() -> None:
    """Look at every call, and save what was said."""
    options = options_of(__doc__).parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = made_by("cuda")
    result["flashinfer"] = importlib.import_module("flashinfer").__version__
    for dtype in (torch.bfloat16, torch.float16):
        for name, make in calls(dtype):
            try:
                said = look(make)
            except Exception as error:  # a kernel that does not compile here is a result too
                traceback.print_exc()
                said = {"raised": f"{type(error).__name__}: {error}"[:400]}
            result[f"{name}, {str(dtype).removeprefix('torch.')}"] = said
            print(name, dtype, said, flush=True)
            save(result, options.json)


if __name__ == "__main__":
    main()
