"""Which accumulation model reproduces this GPU's FP8 (E4M3) products bit for bit? Searched, then counted.

By ``torch._scaled_mm`` with and without ``use_fast_accum`` and by Triton's ``tl.dot`` (wgmma, mma.sync, and with its
own promotion every 128 products), on random positive, Gaussian and adversarial operands, K = 32 to 4096. The search
tries, in ``attn_diag.kernels.accumulation.TensorCore``: products added at a time, fractional bits, how terms and sums
are rounded, bits of the sum, and after how many products sums are added in fp32 outside. About a minute on an H200.

    python benchmarks/bench_fp8_products.py --json benchmarks/results/fp8_products_h200.json
    python benchmarks/bench_fp8_products.py --planted       # without a GPU: does the search find planted models again?
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from measuring import made_by, options_of, save
from torch import Tensor
from torch.nn.functional import pad

from attn_diag.head.machine import pick_device
from attn_diag.kernels.accumulation import HOPPER_FP8, HOPPER_FP8_PROMOTED, TensorCore, tensor_core_matmul
from attn_diag.kernels.formats import Mode

M, N = 64, 64
LENGTHS = (32, 64, 96, 128, 256, 512, 1024, 2048, 4096)
KINDS = ("positive", "gaussian", "bit patterns", "wide", "cancelling", "subnormal", "one large")
# What is known to be Hopper's is among these.
BLOCKS, BITS, SUMS = (16, 32, 64), (12, 13, 14, 25), ("e8m12", "e8m13", "e8m14", "e8m23")
MODES = (Mode.TOWARD_ZERO, Mode.NEAREST_EVEN, Mode.DOWN)
PROMOTIONS = (None, 32, 64, 128, 256, 512, 1024)
# How many models are carried from one stage of the search to the next, beside those that miss as little.
KEPT = 4

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One path, kind and length under the model that fits best."""

    path: str
    kind: str
    length: int
    sums: int
    mismatches: int
    relative_error: float
    """Mean signed error of the path over the mean of |exact|."""


def inputs(kind: str, length: int, seed: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """a [M, K], b [K, N] in E4M3, without NaN."""
    rng = np.random.default_rng([seed, KINDS.index(kind), length])

    def draw(*shape: int) -> Any:
        if kind == "positive":
            return rng.random(shape)
        if kind == "gaussian":
            return rng.standard_normal(shape)
        if kind == "wide":
            return rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 7, shape)
        if kind == "subnormal":
            return rng.integers(-15, 16, shape) * 2.0**-9
        if kind == "one large":
            return np.where(rng.random(shape) < 1 / length, 256.0, 2.0 ** rng.integers(-9, 2, shape))
        patterns = torch.from_numpy(rng.integers(0, 256, shape).astype(np.uint8)).view(torch.float8_e4m3fn)
        return patterns.float().nan_to_num(0.0).numpy()

    a, b = draw(M, length), draw(length, N)
    if kind == "cancelling":
        a[:, length // 2 :], b[length // 2 :] = -a[:, : length // 2], b[: length // 2]
        b = np.where(rng.random(b.shape) < 0.05, b * 1.25, b)
    return tuple(torch.from_numpy(np.clip(x, -448, 448)).float().to(torch.float8_e4m3fn).to(device) for x in (a, b))  # type: ignore[return-value]


def paths() -> dict[str, Product]:
    """What multiplies, by name."""
    from attn_diag.kernels import triton_probes

    def scaled(fast: bool) -> Product:
        def call(a: Tensor, b: Tensor) -> Tensor:
            one = torch.ones((), device=a.device)
            columns = b.T.contiguous().T
            return torch._scaled_mm(a, columns, one, one, out_dtype=torch.float32, use_fast_accum=fast)

        return call

    def triton(tile: int, promoted: bool) -> Product:
        def call(a: Tensor, b: Tensor) -> Tensor:
            # Products of zeros behind the others change no sum.
            more = -a.shape[1] % 128 if promoted else 0
            a, b = (pad(x.view(torch.uint8), (0, more)).view(x.dtype) for x in (a, b.T))
            return triton_probes.fp8_dot(a, b.T, torch.zeros(M, N, device=a.device), tile, promoted=promoted)[0]

        return call

    found = {"_scaled_mm, fast": scaled(True), "_scaled_mm": scaled(False)}
    zeros = torch.zeros(M, 128, device="cuda").to(torch.float8_e4m3fn)
    for tile, promoted in ((0, False), (1, False), (0, True)):
        name = triton_probes.fp8_dot(zeros, zeros.T, torch.zeros(M, N, device="cuda"), tile, promoted=promoted)[1]
        found[f"tl.dot {name}{', promoted at 128' if promoted else ''}"] = triton(tile, promoted)
    return found


def planted() -> dict[str, Product]:
    """Models in place of hardware: Hopper's two, and three that are not."""
    cores = {
        "fast": HOPPER_FP8,
        "promoted": HOPPER_FP8_PROMOTED,
        "16 products, 12 bits": TensorCore(block=16, fraction_bits=12, sums="e8m23"),
        "nearest": replace(HOPPER_FP8, alignment=Mode.NEAREST_EVEN, result=Mode.NEAREST_EVEN),
        "promoted at 64": replace(HOPPER_FP8, promotion=64),
    }
    return {
        name: lambda a, b, core=core: tensor_core_matmul(a, b, core=core).float()  # type: ignore[misc]
        for name, core in cores.items()
    }


# An mma.sync's operands: E4M3's subnormals are normal numbers in FP16.
WIDENED = "mma.sync of fp16"


def missed(got: Tensor, core: TensorCore, a: Tensor, b: Tensor, operands: str = "e4m3") -> int:
    """Sums in which the model has other bits; a zero of the other sign is not counted."""
    model = tensor_core_matmul(a, b, core=core, operands=operands).float()
    return int(((got != model) & ~(got.isnan() & model.isnan())).sum())


def _simplest_first(core: TensorCore) -> tuple[Any, ...]:
    """Among models that miss as little the first is shown."""
    return core.promotion is not None, -(core.promotion or 0), MODES.index(core.alignment), MODES.index(core.result)


class Search:
    """Models of one path, narrowed down over longer and longer sums."""

    def __init__(self, path: Product, seed: int, device: torch.device | str, operands: str = "e4m3") -> None:
        self._path, self._seed, self._device, self._operands = path, seed, device, operands

    def narrowed(self, cores: list[TensorCore], lengths: tuple[int, ...]) -> list[tuple[int, TensorCore]]:
        """The models that miss least at these lengths, with their misses; ties all stay."""
        cases = [inputs(kind, length, self._seed, self._device) for kind in KINDS for length in lengths]
        outputs = [self._path(a, b) for a, b in cases]
        by = self._operands
        counts = [
            sum(missed(out, core, a, b, by) for out, (a, b) in zip(outputs, cases, strict=True)) for core in cores
        ]
        order = sorted(range(len(cores)), key=counts.__getitem__)
        last = counts[order[min(KEPT, len(order)) - 1]]
        return [(counts[i], cores[i]) for i in order if counts[i] <= last][: 16 * KEPT]

    def run(self, longest: int) -> list[tuple[int, TensorCore]]:
        """One instruction's parameters from K = 32, its width and the promotion from more, all from the longest."""
        one = [
            TensorCore(block=32, fraction_bits=bits, alignment=align, result=result, sums=kept)
            for bits, align, result, kept in product(BITS, MODES, MODES, SUMS)
        ]
        ways = [(16, False), (32, False)] + [(16, True)] * (self._operands == "fp16")
        single = [replace(core, block=block, pairs=pairs) for block, pairs in ways for core in one]
        best = [core for _, core in self.narrowed(single, (32,))]
        wide = {
            replace(core, block=block, promotion=every)
            for core in best
            for block in ({core.block, 64} if core.block == 32 else {core.block})
            for every in PROMOTIONS
            if every is None or every % block == 0
        }
        best = [core for _, core in self.narrowed(sorted(wide, key=_simplest_first), (64, 128, 256))]
        return self.narrowed(best, (min(1024, longest), longest))


def words(core: TensorCore) -> str:
    """A model in a line."""
    outside = "never added outside" if core.promotion is None else f"added in fp32 every {core.promotion}"
    by = " by pairs of every four" if core.pairs else ""
    return (
        f"{core.block} products at a time{by}, {core.fraction_bits} bits beside the largest ({core.alignment}), sum to "
        f"{core.sums} ({core.result}), {outside}"
    )


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--planted", action="store_true", help="search models again that are planted, on the CPU")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="the longest sums")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.planted else pick_device("cuda")
    started = time.monotonic()
    rows: list[Row] = []
    fits: dict[str, Any] = {}
    for name, path in (planted() if arguments.planted else paths()).items():
        try:
            operands = "fp16" if WIDENED in name else "e4m3"
            found = Search(path, arguments.seed, device, operands).run(arguments.longest)
        except Exception as error:  # a path that this GPU or version does not have
            fits[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            print(f"{name}: {fits[name]['failed']}")
            continue
        best = found[0][1]
        alike = sum(count == found[0][0] for count, _ in found)
        fits[name] = {"best": asdict(best), "operands": operands, "equally good": alike}
        print(f"{name}: {words(best)}")
        for count, core in found[1:3]:
            print(f"    next, {count} missed against {found[0][0]}: {words(core)}")
        for kind, length in product(KINDS, LENGTHS):
            if length > arguments.longest:
                continue
            a, b = inputs(kind, length, arguments.seed + 1, device)
            got, exact = path(a, b), a.double() @ b.double()
            signed = float((got.double() - exact).mean() / exact.abs().mean())
            rows.append(Row(name, kind, length, got.numel(), missed(got, best, a, b, operands), signed))
        mine = [row for row in rows if row.path == name]
        total, bad = sum(row.sums for row in mine), [row for row in mine if row.mismatches]
        print(
            f"    {sum(row.mismatches for row in bad)} of {total} sums missed on operands that the search did not see"
        )
        for row in bad[:6]:
            print(f"    {row}")
        errors = {row.length: row.relative_error for row in mine if row.kind == "positive"}
        print("    on positive data", ", ".join(f"K {k}: {e:.2e}" for k, e in errors.items() if k >= 256))
    seconds = time.monotonic() - started
    print(f"{seconds:.0f} s")
    result = {"seed": arguments.seed, "seconds": seconds, "fits": fits, "rows": [asdict(row) for row in rows]}
    save(made_by(device) | result, arguments.json)


if __name__ == "__main__":
    main()
