"""The Gluon kernel for absorbed MLA gives the bits of the Triton kernel, and is taken where it is made for."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_diag.kernels import preset, triton_forward
from attn_diag.kernels.geometry import Visibility, forward_geometry
from attn_diag.kernels.triton_forward import forward
from attn_diag.kernels.triton_sequences import Sequences

BEHIND = Visibility("bottom-right")


def drawn(rows: int, keys: int, *, heads: int = 3, k_heads: int = 1, dtype: torch.dtype = torch.bfloat16) -> Any:
    """q and the latent, which lies in memory as a cache does, [B, T, H, D]."""
    g = torch.Generator("cuda").manual_seed(rows + keys)
    q = torch.randn(2, heads, rows, 576, device="cuda", generator=g).to(dtype)
    latent = torch.randn(2, keys, k_heads, 576, device="cuda", generator=g).to(dtype)
    return q, latent.transpose(1, 2)


CASES: dict[str, tuple[dict[str, Any], Visibility, dict[str, Any]]] = {
    "causal": ({"rows": 200, "keys": 1000}, BEHIND, {}),
    "no mask": ({"rows": 128, "keys": 640}, Visibility(), {}),
    "fp16": ({"rows": 333, "keys": 333, "dtype": torch.float16}, Visibility("top-left"), {}),
    "a window": ({"rows": 500, "keys": 700}, Visibility("none", (150, 40)), {}),
    "rows that see no key": ({"rows": 300, "keys": 100}, BEHIND, {}),
    "two key heads": ({"rows": 100, "keys": 400, "heads": 4, "k_heads": 2}, BEHIND, {}),
    "softcap": ({"rows": 100, "keys": 400}, BEHIND, {"softcap": 5.0}),
    "sinks": ({"rows": 100, "keys": 400}, BEHIND, {"sinks": [-2.0, 1.0, 9.0]}),
    "ALiBi": ({"rows": 100, "keys": 400}, BEHIND, {"slopes": [0.5, 0.1, 0.01]}),
    "ascending": ({"rows": 100, "keys": 400}, BEHIND, {"order": "ascending"}),
    "scores in BF16": ({"rows": 100, "keys": 400}, BEHIND, {"scores": "bf16"}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_it_has_the_triton_kernels_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's products")
    sizes, visibility, given = CASES[case]
    q, latent = drawn(**sizes)
    options, given = {"scale": 576**-0.5, "softcap": given.get("softcap")}, dict(given)
    recipe = preset("fa2", "fp16" if q.dtype == torch.float16 else "bf16", 576)
    recipe = replace(recipe, scores=given.get("scores", "fp32"))
    recipe = replace(recipe, schedule=replace(recipe.schedule, order=given.get("order", "descending")))
    if "sinks" in given:
        options["sinks"] = torch.tensor(given["sinks"], device="cuda")
    if "slopes" in given:
        options["sequences"] = Sequences(slopes=torch.tensor(given["slopes"], device="cuda"))
    taken: list[bool] = []
    decides = triton_forward._runs_in_gluon
    monkeypatch.setattr(triton_forward, "_runs_in_gluon", lambda *a: taken.append(decides(*a)) or taken[-1])
    found = forward(q, latent, latent[..., :512], recipe, visibility, **options)
    assert taken == [True]
    monkeypatch.setattr(triton_forward, "_runs_in_gluon", lambda *_: False)
    expected = forward(q, latent, latent[..., :512], recipe, visibility, **options)
    assert torch.equal(found.o.view(torch.int16), expected.o.view(torch.int16))
    assert torch.equal(found.lse.view(torch.int32), expected.lse.view(torch.int32))


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    recipe, q = preset("fa2", "bf16", 576), torch.empty(0)
    options: dict[str, Any] = {"softcap": False, "level": "none", "tma": True, "value_dim": 512}
    plain = forward_geometry(recipe, 576, BEHIND, alike=True, **options)
    taken = triton_forward._runs_in_gluon
    assert taken(plain, recipe, q)
    others = {"documents": 32, "page_size": 64, "group": 16, "split": True, "rows": True, "unrounded": True}
    others |= {"tma": False, "latent": False}
    assert not any(taken(replace(plain, **{name: value}), recipe, q) for name, value in others.items())
    assert not taken(forward_geometry(recipe, 320, BEHIND, alike=True, **{**options, "value_dim": 256}), recipe, q)
    for change in ({"accumulator": "bf16"}, {"range_pv": "bf16"}, {"row_sum_clamp": 1e-10}, {"probs": "fp32"}):
        assert not taken(plain, replace(recipe, **change), q)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (10, 0))
    assert not taken(plain, recipe, q)  # Blackwell has none of Hopper's products


COMPILES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *_: 0
    get_active_torch_device = lambda self: torch.device("cpu")

driver.set_active(Hopper())
made, run = [], JITFunction.run
JITFunction.run = lambda self, *a, grid, warmup, **k: made.append(run(self, *a, grid=grid, warmup=True, **k))

from attn_diag.kernels import preset
from attn_diag.kernels.geometry import Visibility, forward_geometry
from attn_diag.kernels.triton_latent import latent_forward
from attn_diag.kernels.triton_sequences import DENSE

recipe, visibility = preset("fa2", "bf16", 576), Visibility("bottom-right")
geometry = forward_geometry(recipe, 576, visibility, softcap=False, level="none", tma=True, value_dim=512, alike=True)
q, k, o = (torch.empty(1, h, 128, d, dtype=torch.bfloat16) for h, d in ((2, 576), (1, 576), (2, 512)))
latent_forward(q, k, o, torch.empty(1, 2, 128), recipe, visibility, geometry, scale=0.04, softcap=None, sinks=None,
               sequences=DENSE)
print(made[0].metadata.shared, made[0].asm["ptx"].count("wgmma.mma_async"))
"""


def test_it_compiles_for_hopper_without_one() -> None:
    """Shared memory has room for it, and scores and sums are tensor cores' products: 36 + 4 of a warpgroup."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    shared, products = map(int, done.stdout.split())
    assert shared <= 227 * 1024
    assert products == 2 * (36 + 4)
