"""The Gluon kernel for long plain calls gives the bits of the Triton kernel, and is taken where it is made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gluon import told_of_compiled, written_for
from torch import Tensor

from attn_diag.kernels import Recipe, preset, triton_forward
from attn_diag.kernels.geometry import Geometry, Level, Visibility, forward_geometry
from attn_diag.kernels.triton_forward import forward
from attn_diag.kernels.triton_sequences import Sequences

CAUSAL = Visibility("bottom-right")

CASES: dict[str, tuple[dict[str, Any], Visibility, dict[str, Any]]] = {
    "causal": ({"rows": 2100, "keys": 2100}, CAUSAL, {}),
    "three warpgroups": ({"rows": 4096, "keys": 4096, "heads": 52}, CAUSAL, {}),
    "no mask, a tile of keys that is not full": ({"rows": 2048, "keys": 2500}, Visibility(), {}),
    "fp16": ({"rows": 2048, "keys": 2333, "dtype": torch.float16}, Visibility("top-left"), {}),
    "rows that see no key": ({"rows": 3000, "keys": 2100}, CAUSAL, {}),
    "groups of heads": ({"rows": 2048, "keys": 2048, "heads": 6, "k_heads": 2}, CAUSAL, {}),
    "a softcap": ({"rows": 2048, "keys": 2048}, CAUSAL, {"softcap": 5.0}),
    "sinks": ({"rows": 2048, "keys": 2048}, CAUSAL, {"sinks": [-2.0, 1.0, 9.0]}),
    "ALiBi": ({"rows": 2048, "keys": 2048}, CAUSAL, {"slopes": [0.5, 0.1, 0.01]}),
    "scores in BF16": ({"rows": 2048, "keys": 2048}, CAUSAL, {"scores": "bf16"}),
    "96 features": ({"rows": 2048, "keys": 2048, "width": 96}, CAUSAL, {}),
    "256 features": ({"rows": 1100, "keys": 1500, "width": 256}, CAUSAL, {}),
    "tiles of 128 keys": ({"rows": 600, "keys": 1000}, CAUSAL, {"preset": "cudnn"}),
    "tiles of 128 keys, no mask": ({"rows": 600, "keys": 1000, "heads": 40}, Visibility(), {"preset": "cudnn"}),
}


def drawn(rows: int, keys: int, *, heads: int = 3, k_heads: int | None = None, width: int = 128,
          dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:  # fmt: skip
    """q, k and v, which lie in memory as [B, T, H, D]."""
    g = torch.Generator("cuda").manual_seed(rows + keys)
    sizes = ((rows, heads), (keys, k_heads or heads), (keys, k_heads or heads))
    return [torch.randn(2, t, h, width, device="cuda", generator=g).to(dtype).transpose(1, 2) for t, h in sizes]


@pytest.mark.gpu
@written_for
@pytest.mark.parametrize("case", CASES)
def test_it_has_the_triton_kernels_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's products")
    sizes, visibility, given = CASES[case]
    q, k, v = drawn(**sizes)
    recipe = preset(given.get("preset", "fa2"), "fp16" if q.dtype == torch.float16 else "bf16", q.shape[-1])
    recipe = replace(recipe, scores=given.get("scores", "fp32"))
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "softcap": given.get("softcap")}
    if "slopes" in given:
        options["sequences"] = Sequences(slopes=torch.tensor(given["slopes"], device="cuda"))
    sinks = torch.tensor(given["sinks"], device="cuda") if "sinks" in given else None
    decides = triton_forward._runs_in_gluon
    taken: list[bool] = []

    def run() -> tuple[Tensor, Tensor]:
        found = forward(q, k, v, recipe, visibility, sinks=sinks, **options)
        return found.o, found.lse

    def asked(*call: Any) -> bool:
        taken.append(decides(*call))
        return taken[-1]

    monkeypatch.setattr(triton_forward, "_runs_in_gluon", asked)
    runs = [run() for _ in range(5)]
    assert all(taken)
    monkeypatch.setattr(triton_forward, "_runs_in_gluon", lambda *_: False)
    o, lse = run()
    for ours, ours_lse in runs:
        assert torch.equal(ours.view(torch.int16), o.view(torch.int16))
        assert torch.equal(ours_lse.view(torch.int32), lse.view(torch.int32))


@written_for
def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    decides = triton_forward._runs_in_gluon
    q = torch.empty(1, 1, 4096, 128)

    def made(
        name: str = "fa2", width: int = 128, visibility: Visibility = CAUSAL, level: Level = "none"
    ) -> tuple[Geometry, Recipe]:
        recipe = preset(name, "bf16", width)
        return forward_geometry(recipe, width, visibility, softcap=False, level=level, tma=True, packed=True), recipe

    plain, recipe = made()
    assert decides(plain, recipe, q, 4096)
    assert decides(*made(width=80), q, 4096)
    assert not decides(plain, recipe, q, 1024)
    assert not decides(plain, recipe, q[:, :, :1024], 4096)
    assert decides(*made("cudnn"), q[:, :, :512], 512)
    assert not decides(*made("cudnn"), q[:, :, :300], 512)
    assert decides(*made(width=256), q[:, :, :1024], 1024)
    window = Visibility("none", (64, 64))
    for others in (made(width=64), made(width=192), made(width=320), made(level="rows"), made(visibility=window)):
        assert not decides(*others, q, 4096)
    special: dict[str, Any] = {"documents": 32, "page_size": 64, "group": 16, "tma": False, "scores_of": "int8"}
    special |= dict.fromkeys(("split", "rows", "unrounded", "dump", "listed", "latent", "ranges"), True)
    for name, value in special.items():
        assert not decides(replace(plain, **{name: value}), recipe, q, 4096), name
    changes: list[dict[str, Any]]
    changes = [{"accumulator": "bf16"}, {"range_pv": "bf16"}, {"row_sum_clamp": 1e-10}, {"probs": "fp32"}]
    changes += [{"pv_levels": "two"}, {"schedule": replace(recipe.schedule, order="diagonal-first")}]
    assert not any(decides(plain, replace(recipe, **change), q, 4096) for change in changes)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (10, 0))
    assert not decides(plain, recipe, q, 4096)  # Blackwell has none of Hopper's products


COMPILES = """
from attn_diag.kernels import preset
from attn_diag.kernels.geometry import Visibility, forward_geometry
from attn_diag.kernels.triton_sequences import DENSE
from attn_diag.kernels.triton_warpgroups import warpgroups_forward

visibility = Visibility("bottom-right")
for name, heads, width in (("fa2", 1, 128), ("fa2", 48, 128), ("cudnn", 1, 128), ("fa2", 1, 256)):
    recipe = preset(name, "bf16", width)
    geometry = forward_geometry(recipe, width, visibility, softcap=False, level="none", tma=True, packed=True)
    q, k, v, o = (torch.empty(1, heads, 4096, width, dtype=torch.bfloat16) for _ in range(4))
    warpgroups_forward(q, k, v, o, torch.empty(1, heads, 4096), recipe, visibility, geometry, scale=0.1, softcap=None,
                       sinks=None, sequences=DENSE)
for kernel in made:
    print(kernel.metadata.shared, kernel.metadata.num_warps, ".local" in kernel.asm["ptx"],
          *(kernel.asm["ptx"].count(f"m64n{n}k16") for n in (64, 128, 256)))
"""


@written_for
def test_it_compiles_for_hopper_without_one() -> None:
    """Shared memory has room for the tiles, and all products are of whole warpgroups: of a block's first tile, of
    those in the loop, and behind it."""
    counts = told_of_compiled(COMPILES)
    assert all(int(shared) <= 227 * 1024 for shared, *_ in counts)
    scores, sums = 2 * 128 // 16, 2 * 64 // 16
    assert [line[1:] for line in counts] == [
        ["12", "False", str(2 * scores), str(2 * sums), "0"],
        ["16", "False", str(3 * scores), str(3 * sums), "0"],
        ["12", "False", "0", str(2 * (scores + 2 * sums)), "0"],
        ["12", "False", str(2 * 2 * scores), "0", str(2 * sums)],
    ]
