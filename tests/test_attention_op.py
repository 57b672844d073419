"""The public attention: registration, autograd, compilation, autocast, layouts, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from builders import some
from command_line import Programs
from torch import Tensor
from torch.library import opcheck

import attn_diag
from attn_diag.kernels import RecipeNotSupportedError, Schedule, SoftmaxRule, preset
from attn_diag.kernels.attention import attention
from attn_diag.kernels.backend import BackendError


def make(device: str, *, grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, 2, 40, 32, generator=generator).to(device, dtype).requires_grad_(grad) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.15's own look at it
@pytest.mark.parametrize(("level", "backward"), [("none", "fa2"), ("rows", "fa2"), ("full", "delta-fp32")])
def test_opcheck(level: str, backward: str, device: str) -> None:
    q, k, v = make(device, grad=True)
    slots = torch.arange(80, dtype=torch.int32, device=device).view(1, 2, 40) if level == "full" else None
    recipes = preset("fa2").json, preset(backward).json
    arguments = (q, k, v, slots, 80 if level == "full" else 0, *recipes, "top-left", -1, -1, 0.125, None, level, 0)
    opcheck(torch.ops.attn_diag.attention_forward.default, arguments)


def test_opcheck_of_the_backward(device: str) -> None:
    q, k, v = make(device)
    lse = torch.ones(1, 2, 40, device=device)
    recipes = preset("fa2").json, preset("fa2").json
    arguments = (q, k, v, q, lse, q, None, 0, *recipes, "none", -1, -1, 0.125, None, "none", 0)
    opcheck(torch.ops.attn_diag.attention_backward.default, arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch 2.11's own, when it imports Inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("instrument", ["none", "rows"])
def test_compiles_as_one_graph(instrument: str, backend: str, device: str) -> None:
    q, k, v = make(device, grad=True)
    recipe = preset("cudnn")

    def work(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q * 2, k, v, causal="top-left", recipe=recipe, instrument=instrument)  # type: ignore[call-overload]

    compiled = torch.compile(work, fullgraph=True, backend=backend)
    got, expected = compiled(q, k, v), work(q, k, v)
    if instrument == "rows":
        assert torch.equal(got[1].multiplicity("exact"), expected[1].multiplicity("exact"))
        got, expected = got[0], expected[0]
    assert torch.equal(got, expected)
    (a,), (b,) = (torch.autograd.grad(o.float().square().sum(), q) for o in (got, expected))
    assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("instrument", ["rows", "full"])
def test_no_host_synchronisation(instrument: Literal["rows", "full"], device: str) -> None:
    q, k, v = make(device, grad=True)

    def work() -> None:
        out, dump = attention(q, k, v, causal="top-left", instrument=instrument)
        dump.multiplicity("exact")
        torch.autograd.grad(out, q, torch.ones_like(out))

    work()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_autocast_casts_like_sdpa(device: str) -> None:
    q, k, v = make(device, dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_layouts_and_strides_change_nothing(device: str) -> None:
    q, k, v = make(device)
    expected = attention(q, k, v, causal="top-left")
    swapped = attention(*(t.transpose(1, 2).contiguous() for t in (q, k, v)), causal="top-left", layout="BTHD")
    assert torch.equal(swapped.transpose(1, 2), expected)

    # Features in steps of two, rows in steps of three, heads from the middle of a fused projection.
    def strided(t: Tensor) -> Tensor:
        base = torch.full((1, 4, 120, 64), torch.nan, dtype=t.dtype, device=device)
        view = base[:, 1:3, ::3, ::2]
        view.copy_(t)
        return view

    views = [strided(t).requires_grad_() for t in (q, k, v)]
    out = attention(*views, causal="top-left")
    assert torch.equal(out, expected)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    plain = torch.autograd.grad(attention(*leaves, causal="top-left").float().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.float().sum(), views), plain, strict=True))


def test_tiles_come_from_the_chosen_rows_alone(device: str) -> None:
    q, k, v = make(device)
    chosen = torch.zeros(2, 40, dtype=torch.bool)
    chosen[1, [3, 30]] = True
    _, some = attention(q, k, v, causal="top-left", instrument="tiles", dump_rows=chosen)
    _, full = attention(q, k, v, causal="top-left", instrument="full")
    assert some.chosen.tolist() == [[0, 1, 3], [0, 1, 30]]
    assert torch.equal(some.scores, full.scores[[43, 70]])
    assert torch.equal(some.probs, full.probs[[43, 70]])
    assert (some.scores[0, 4:] == -torch.inf).all()


WRONG = [
    ({"q": torch.float32}, TypeError, "q in torch.float32, k in torch.bfloat16"),
    ({"q": torch.float32, "k": torch.float32, "v": torch.float32}, TypeError, "cast them, or run under torch.autocast"),
    ({"q": torch.float16}, TypeError, "q in torch.float16"),
]


@pytest.mark.parametrize(("dtypes", "error", "message"), WRONG)
def test_dtypes_are_named(dtypes: dict[str, torch.dtype], error: type[Exception], message: str, device: str) -> None:
    named = dict(zip("qkv", make(device), strict=True))
    with pytest.raises(error, match=message):
        attention(*(t.to(dtypes.get(n, t.dtype)) for n, t in named.items()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": "yes"}, "causal must be none, top-left or bottom-right"),
        ({"scale": 0.0}, "scale must be a finite number above 0"),
        ({"scale": float("nan")}, "scale must be a finite number above 0"),
        ({"softcap": -1.0}, "softcap must be a finite number above 0"),
        ({"instrument": "all"}, "instrument must be none, rows, tiles or full"),
        ({"instrument": "tiles"}, "dump_rows belongs to instrument='tiles'"),
        ({"instrument": "tiles", "dump_rows": torch.ones(3, dtype=torch.bool)}, "must broadcast to"),
        ({"layout": "THD"}, "layout must be BHTD or BTHD"),
        ({"recipe": "fa9"}, "no recipe 'fa9'"),
    ],
)
def test_options_are_checked(change: dict[str, Any], message: str, device: str) -> None:
    with pytest.raises((ValueError, KeyError), match=message):
        attention(*make(device), **change)


@pytest.mark.parametrize(
    ("recipe", "site"),
    [
        (replace(preset("fa2"), arithmetic="fp64"), "arithmetic=fp64"),
        (replace(preset("fa2"), probs="e4m3"), "probs=e4m3"),
        (replace(preset("fa2"), exp="polynomial"), "exp=polynomial"),
        (replace(preset("fa2"), accumulation="exact"), "accumulation=exact"),
        (replace(preset("fa2"), schedule=Schedule(key_tile=100)), "key_tile=100"),
        (replace(preset("fa2"), schedule=Schedule(key_tile=128, split_keys=200)), "split_keys=200"),
        (replace(preset("fa2"), softmax=SoftmaxRule("stabilised")), "stabilised without beta"),
    ],
)
def test_a_recipe_that_cannot_run_says_so_by_name(recipe: Any, site: str, device: str) -> None:
    with pytest.raises(RecipeNotSupportedError, match=site):
        attention(*make(device), recipe=recipe)


def test_shapes_and_devices_are_checked(device: str) -> None:
    q, k, v = make(device)
    with pytest.raises(ValueError, match=r"must have shape \[B, H, T, D\]"):
        attention(q[0], k, v)
    with pytest.raises(ValueError, match="Hq be a multiple of Hk"):
        attention(torch.cat([q, q[:, :1]], 1), k, v)
    with pytest.raises(ValueError, match="v's head dimension must be 16 to 512, got 544"):
        attention(q, k, v.repeat(1, 1, 1, 17))
    with pytest.raises(ValueError, match="head dimension must be 16 to 576, got 8"):
        attention(q[..., :8], k[..., :8], v[..., :8])
    with pytest.raises(ValueError, match="must not be empty"):
        attention(q[:, :, :0], k, v)
    with pytest.raises(BackendError, match="on one device"):
        attention(q, k.to("meta"), v)
    with pytest.raises(TypeError, match="for fp16 inputs"):
        attention(q, k, v, recipe=preset("fa2", "fp16"))


def test_without_gpu_and_interpreter_it_says_what_to_do(programs: Programs) -> None:
    script = """
import attn_diag
import torch
from attn_diag.kernels.attention import attention
q = torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16)
attention(q, q, q)
"""
    done = programs.run(script, TRITON_INTERPRET="0")
    assert "set TRITON_INTERPRET=1 before triton is first imported" in done.err


def test_inspect_takes_a_dump(device: str) -> None:
    q, k, v = (t.requires_grad_() for t in make(device))
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).to(device, q.dtype)
    out, dump = attn_diag.attention(q, k, v, causal="top-left", recipe="qiu2025", instrument="rows")
    (dq,) = torch.autograd.grad(out, q, do)
    found = attn_diag.inspect(q, k, v, do=do, dq=dq, dump=dump, device="cpu")
    (observation,) = found.captures[0].observations
    assert observation.recipe == "qiu2025"
    assert dump.backend in observation.backend
    head = observation.heads[0]
    assert head.delta_source == "captured"
    counted = int((dump.multiplicity("as_run")[0, 0] > 1).sum())
    # The kernel's scores are sums in fp32, the report's in float64: a rounding may fall the other way now and then.
    assert abs(some(head.row_maxima.as_run).rows - counted) <= 1


def test_inspect_runs_recipes_on_the_kernels(device: str) -> None:
    q, k, v = make(device)
    emulated, ran = (
        attn_diag.inspect(q, k, v, do=q, causal=True, engine=engine, device=device)
        for engine in ("emulation", "triton")
    )
    (observation,) = ran.captures[0].observations
    assert observation.name == "fa2 (triton)"
    assert observation.backend.startswith("triton ")
    for a, b in zip(emulated.captures[0].observations[0].heads, observation.heads, strict=True):
        assert a.noise_factor == pytest.approx(b.noise_factor, rel=0.05)
    ran = attn_diag.inspect(
        q, k, v, do=q, causal=True, engine="triton", device=device, alibi_slopes=torch.tensor([0.5, 0.0])
    )
    assert {some(head.verdict).labels for head in ran.captures[0].observations[0].heads} == {("clean",)}
    with pytest.raises(attn_diag.InputError, match="no explicit mask"):
        attn_diag.inspect(q, k, v, mask=torch.ones(40, 40, dtype=torch.bool), engine="triton", device=device)
    wide = [torch.cat([t, torch.randn(1, 2, 40, 256).to(t)], -1) for t in (q, k)]
    ran = attn_diag.inspect(wide[0], wide[1], v, do=v, causal=True, engine="triton", device=device)
    labels = {label for head in ran.captures[0].observations[0].heads for label in some(head.verdict).labels}
    assert not labels & {"wrong", "lossy", "biased"}
    with pytest.raises(attn_diag.InputError, match="engine must be emulation or triton"):
        attn_diag.inspect(q, k, v, engine="cuda", device=device)
