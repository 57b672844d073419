"""The Gluon kernels for absorbed MLA give the bits of the Triton kernels, and are taken where they are made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from gluon import told_of_compiled, written_for
from torch import Tensor

from attn_diag.kernels import preset, triton_backward, triton_forward
from attn_diag.kernels.geometry import Visibility, dkdv_geometry, dq_geometry, forward_geometry
from attn_diag.kernels.triton_backward import backward
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
    "more blocks than fit at once": ({"rows": 1000, "keys": 3000, "heads": 16}, BEHIND, {}),
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
    "exp2 of rounded products": ({"rows": 100, "keys": 400}, BEHIND, {"exp": "exp2-scaled"}),
}


@pytest.mark.gpu
@written_for
@pytest.mark.parametrize("case", CASES)
def test_they_have_the_triton_kernels_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's products")
    sizes, visibility, given = CASES[case]
    q, latent = drawn(**sizes)
    v, g = latent[..., :512], torch.Generator("cuda").manual_seed(1)
    do = torch.randn(*q.shape[:3], 512, device="cuda", generator=g).to(q.dtype)
    recipe = preset("fa2", "fp16" if q.dtype == torch.float16 else "bf16", 576)
    recipe = replace(recipe, scores=given.get("scores", "fp32"), exp=given.get("exp", recipe.exp))
    recipe = replace(recipe, schedule=replace(recipe.schedule, order=given.get("order", "descending")))
    options: dict[str, Any] = {"scale": 576**-0.5, "softcap": given.get("softcap")}
    if "slopes" in given:
        options["sequences"] = Sequences(slopes=torch.tensor(given["slopes"], device="cuda"))
    sinks = torch.tensor(given["sinks"], device="cuda") if "sinks" in given else None
    taken: list[bool] = []

    def run() -> list[Tensor]:
        found = forward(q, latent, v, recipe, visibility, sinks=sinks, **options)
        if case in ("ascending", "scores in BF16"):  # of these the backward is another one's
            return [found.o, found.lse]
        back = backward(q, latent, v, found.o, found.lse, do, recipe, visibility, **options)
        return [found.o, found.lse, back.dq, back.dk, back.dv]

    def asked(decides: Callable[..., bool], *call: Any) -> bool:
        taken.append(decides(*call))
        return taken[-1]

    for module in (triton_forward, triton_backward):
        monkeypatch.setattr(module, "_runs_in_gluon", partial(asked, module._runs_in_gluon))
    runs = [run() for _ in range(10 if case == "more blocks than fit at once" else 1)]
    assert taken == [True, *[case != "softcap"] * (len(runs[0]) > 2)] * len(runs)
    for module in (triton_forward, triton_backward):
        monkeypatch.setattr(module, "_runs_in_gluon", lambda *_: False)
    expected = run()
    for ours in runs:
        for name, found, right in zip(("O", "L", "dQ", "dK", "dV"), ours, expected, strict=False):
            bits = torch.int32 if found.dtype == torch.float32 else torch.int16
            assert torch.equal(found.view(bits), right.view(bits)), name


@written_for
def test_where_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    recipe, q = preset("fa2", "bf16", 576), torch.empty(1, 1, 128, 576)
    options: dict[str, Any] = {"softcap": False, "tma": True, "value_dim": 512, "alike": True}
    plain = forward_geometry(recipe, 576, BEHIND, level="none", **options)
    rows = dq_geometry(recipe, 576, BEHIND, level="none", **options)
    columns = dkdv_geometry(recipe, 576, BEHIND, **options)
    taken, back_taken = partial(triton_forward._runs_in_gluon, k_length=128), triton_backward._runs_in_gluon
    assert taken(plain, recipe, q)
    assert back_taken(rows, columns, recipe, q)
    others: dict[str, Any] = {"documents": 32, "page_size": 64, "group": 16, "tma": False, "latent": False}
    others |= dict.fromkeys(("split", "rows", "unrounded", "dump"), True)
    for name, value in others.items():
        assert not taken(replace(plain, **{name: value}), recipe, q)
        assert not back_taken(replace(rows, **{name: value}), columns, recipe, q)
    narrow = forward_geometry(recipe, 320, BEHIND, level="none", **{**options, "value_dim": 256})
    assert not taken(narrow, recipe, q)
    changes: list[dict[str, Any]]
    changes = [{"accumulator": "bf16"}, {"range_pv": "bf16"}, {"row_sum_clamp": 1e-10}, {"probs": "fp32"}]
    assert not any(taken(plain, replace(recipe, **change), q) for change in changes)
    changes = [{"gradient_accumulator": "bf16"}, {"dscores": "fp32"}, {"backward_probs": "fp32"}]
    assert not any(back_taken(rows, columns, replace(recipe, **change), q) for change in changes)
    capped = dq_geometry(recipe, 576, BEHIND, level="none", **{**options, "softcap": True})
    assert taken(replace(plain, softcap=True), recipe, q)
    assert not back_taken(capped, columns, recipe, q)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (10, 0))
    assert not taken(plain, recipe, q)  # Blackwell has none of Hopper's products
    assert not back_taken(rows, columns, recipe, q)


COMPILES = """
from attn_diag.kernels import preset
from attn_diag.kernels.geometry import Visibility, anonymous, dkdv_geometry, dq_geometry, forward_geometry
from attn_diag.kernels.triton_latent import latent_forward
from attn_diag.kernels.triton_latent_gradients import latent_gradients
from attn_diag.kernels.triton_sequences import DENSE

recipe, visibility = anonymous(preset("fa2", "bf16", 576)), Visibility("bottom-right")
options = {"softcap": False, "tma": True, "value_dim": 512, "alike": True}
forward = forward_geometry(recipe, 576, visibility, level="none", **options)
rows = dq_geometry(recipe, 576, visibility, level="none", **options)
columns = dkdv_geometry(recipe, 576, visibility, **options)
q, k, o = (torch.empty(1, h, 128, d, dtype=torch.bfloat16) for h, d in ((2, 576), (1, 576), (2, 512)))
lse = torch.empty(1, 2, 128)
more = {"scale": 0.04, "softcap": None}
if sys.argv[1] == "forward":
    latent_forward(q, k, o, lse, recipe, visibility, forward, sinks=None, sequences=DENSE, **more)
else:
    gradients, statistics = (q, k, k[..., :512].contiguous()), (lse, lse, torch.empty(1, 2, 4, 32, 2))
    seen = DENSE.arguments(recipe, visibility, q, k, **more)
    latent_gradients(q, k, o, gradients, statistics, recipe, rows, columns, seen, **more)
for kernel in made:
    print(kernel.metadata.shared, *(kernel.asm["ptx"].count(f"m64n{n}k16") for n in (32, 64, 256)))
"""
# Products of S or S and dP, and of sums: in the loop by each warpgroup, behind it by one; twice, and once.
OF_DS = [3 * (576 + 512) // 16 + 6 * 32 // 16, 0, 6 * 32 // 16]
PRODUCTS = {
    "forward": [[0, 3 * 576 // 16, 6 * 64 // 16]],
    "gradients": [OF_DS, OF_DS, [3 * 576 // 16, 0, 6 * 32 // 16]],
}


@written_for
@pytest.mark.parametrize("what", PRODUCTS)
def test_they_compile_for_hopper_without_one(what: str) -> None:
    """Shared memory has room for them, and all products are of whole warpgroups."""
    counts = [list(map(int, line)) for line in told_of_compiled(COMPILES, what)]
    assert all(shared <= 227 * 1024 for shared, *_ in counts)
    assert [products for _, *products in counts] == PRODUCTS[what]
