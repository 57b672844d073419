"""The forward kernel against its emulation, the float64 reference, and its own dump; on a GPU or interpreted."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_inputs import head_of, kernel_inputs, options
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_diag.captures.loading import load
from attn_diag.kernels import PRESETS, Recipe, Schedule, SoftmaxRule, emulate_head, preset
from attn_diag.kernels.attention import attention
from attn_diag.kernels.backend import DTYPES
from attn_diag.kernels.dump import Dump
from attn_diag.kernels.geometry import Visibility, anonymous, forward_geometry
from attn_diag.kernels.triton_forward import forward
from attn_diag.kernels.triton_math import as_operand, dot_add, product
from attn_diag.reference import format_of, reference_head, round_nearest_even

# Interpreted, numpy says so where inputs hold infinities; a GPU does not.
quiet = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

CUDNN = preset("cudnn")
SHAPES: dict[str, dict[str, Any]] = {
    "causal": {"T": 200, "causal": "top-left"},
    "32-more": {"T": 40, "D": 288, "Dv": 32, "causal": "top-left"},
    "absorbed": {"T": 20, "Tk": 170, "D": 576, "Dv": 512, "causal": "bottom-right"},
    "wider": {"T": 70, "D": 300, "Dv": 272},
    "none-63": {"T": 63},
    "cross-top-left": {"T": 77, "Tk": 333, "causal": "top-left"},
    "cross-bottom-right": {"T": 63, "Tk": 333, "D": 80, "causal": "bottom-right"},
    "more-queries": {"T": 333, "Tk": 63, "D": 96, "causal": "bottom-right"},
    "window": {"T": 300, "window": (50, 20)},
    "causal-window": {"T": 300, "causal": "top-left", "window": (50, -1)},
    "softcap": {"T": 150, "causal": "top-left", "softcap": 2.0},
    "gqa": {"T": 130, "H": 4, "Hk": 2, "D": 16, "causal": "top-left"},
    "wide": {"T": 70, "D": 256, "causal": "top-left"},
    "mla": {"T": 70, "D": 192, "Dv": 128, "causal": "top-left"},
    "wider-values": {"T": 90, "Tk": 63, "D": 24, "Dv": 80, "H": 4, "Hk": 2, "causal": "bottom-right"},
}


def tensors(device: str, **case: Any) -> tuple[Tensor, Tensor, Tensor]:
    return kernel_inputs(device, **case)[:3]


def agreement(out: Tensor, q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, case: dict[str, Any]) -> float:
    """Fraction of O's elements with the emulation's bits."""
    same = [emulate_head(recipe, head_of(q, k, v, h, case)).o == out[0, h].cpu() for h in range(q.shape[1])]
    return float(torch.stack(same).float().mean())


def test_splits_of_every_length_share_a_compiled_kernel() -> None:
    fa2 = preset("fa2", "bf16", 64)
    first, second = (replace(fa2, schedule=replace(fa2.schedule, split_keys=n)) for n in (256, 512))
    assert anonymous(first) == anonymous(second)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", SHAPES)
def test_agrees_with_the_emulation_on_every_shape(case: str, device: str) -> None:
    q, k, v = tensors(device, **SHAPES[case])
    out = attention(q, k, v, recipe=CUDNN, **options(SHAPES[case]))
    assert out.isfinite().all()
    assert agreement(out, q, k, v, CUDNN, SHAPES[case]) > 0.995


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *((name, "causal-window") for name in ("fa2", "cudnn", "flex", "lowp-row-sum", "splits")),
        *(("fa2", case) for case in ("cross-bottom-right", "more-queries", "softcap", "absorbed", "gqa")),
    ],
)
def test_rows_alone_have_the_bits_of_all_and_only_their_blocks_are_run(name: str, case: str, device: str) -> None:
    shape = SHAPES[case]
    recipe = replace(CUDNN, schedule=Schedule(key_tile=64, split_keys=128)) if name == "splits" else preset(name)
    q, k, v = tensors(device, **shape)
    rows = torch.tensor([1, q.shape[2] - 1], device=device)
    view = Visibility(shape.get("causal", "none"), shape.get("window"))
    run = partial(forward, q, k, v, recipe, view, scale=q.shape[3] ** -0.5, softcap=shape.get("softcap"))
    found, every = run(wanted=rows), run()
    assert torch.equal(found.o[:, :, rows], every.o[:, :, rows])
    assert torch.equal(found.lse[:, :, rows], every.lse[:, :, rows])
    block = 128  # of rows, at most
    assert not found.o[:, :, block : (q.shape[2] - 1) // block * block].isfinite().any()


VARIANTS = {
    **{name: preset(name) for name in PRESETS},
    "diagonal-first": replace(CUDNN, schedule=Schedule(order="diagonal-first")),
    "splits": replace(CUDNN, schedule=Schedule(key_tile=64, split_keys=128)),
    "stale": replace(CUDNN, softmax=SoftmaxRule("stale", threshold=2.0)),
    "probs-fp32": replace(CUDNN, probs="fp32"),
    "row-max-bf16": replace(CUDNN, row_max="bf16"),
    "fp16": preset("cudnn", "fp16"),
    "qiu2025-fp16": preset("qiu2025", "fp16"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_agrees_with_the_emulation_on_every_recipe(name: str, device: str) -> None:
    recipe = VARIANTS[name]
    case: dict[str, Any] = {"T": 150 if name != "splits" else 300, "causal": "top-left"}
    q, k, v = tensors(device, dtype=DTYPES[recipe.input], **case)
    out = attention(q, k, v, recipe=recipe, **options(case))
    assert out.dtype == DTYPES[recipe.out]
    assert agreement(out, q, k, v, recipe, case) > 0.99


@pytest.mark.parametrize("name", VARIANTS)
def test_error_against_float64_is_that_of_the_recipe(name: str, device: str) -> None:
    """At most twice the error of the same roundings in plain torch, plus one rounding; the mean error likewise."""
    recipe = VARIANTS[name]
    case: dict[str, Any] = {"T": 150, "causal": "top-left"}
    q, k, v = tensors(device, dtype=DTYPES[recipe.input], H=1, **case)
    out = attention(q, k, v, recipe=recipe, **options(case))[0, 0].cpu().double()
    head = head_of(q, k, v, 0, case)
    truth = reference_head(head).out
    plain = emulate_head(recipe, head).o.double() - truth
    rounding = round_nearest_even(truth, format_of(DTYPES[recipe.out])) - truth
    error = out - truth
    assert error.norm() <= 2 * plain.norm() + rounding.norm()
    standard_error = error.std() / math.sqrt(error.numel())
    assert abs(error.mean()) <= abs(plain.mean()) + 4 * standard_error


@pytest.mark.parametrize("name", ["fa2", "qiu2025"])
def test_instrumentation_changes_no_bit(name: str, device: str) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(device, T=150, D=32))
    chosen = torch.zeros(2, 150, dtype=torch.bool)
    chosen[1, 40:100:7] = True
    plain = attention(q, k, v, causal="top-left", recipe=name)
    expected = torch.autograd.grad(plain.float().square().sum(), (q, k, v))
    with torch.no_grad():
        found = forward(q, k, v, preset(name), Visibility("top-left"), scale=32**-0.5, softcap=None)
    for level in ("rows", "tiles", "full"):
        rows = chosen if level == "tiles" else None
        out, dump = attention(q, k, v, causal="top-left", recipe=name, instrument=level, dump_rows=rows)
        assert torch.equal(out, plain)
        got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert torch.equal(dump.lse, found.lse)


FULL: dict[str, dict[str, Any]] = {
    "tail": {"T": 100, "H": 2, "causal": "top-left"},
    "decoding": {"T": 3, "Tk": 80, "H": 4, "Hk": 2, "D": 16, "causal": "bottom-right"},
    "ranges": {"T": 70},
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", FULL)
def test_a_full_dump_has_every_row_where_its_number_is(case: str, device: str) -> None:
    recipe = preset("qiu2025" if case == "ranges" else "fa2")
    q, k, v = tensors(device, **FULL[case])
    seen = Visibility(FULL[case].get("causal", "none"))
    slots = torch.arange(q[..., 0].numel(), dtype=torch.int32, device=device).view(q.shape[:3])
    run = partial(forward, q, k, v, recipe, seen, scale=0.125, softcap=None, n_slots=slots.numel())
    full, tiles = run(level="full"), run(level="tiles", slots=slots)
    for name in ("o", "lse", "rows", "scores", "probs", "tile_max"):
        a, b = getattr(full, name), getattr(tiles, name)
        assert torch.equal(a.isnan(), b.isnan()), name
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
        assert not a.isnan().all(), name


@triton.jit
def replay_kernel(p_ptr, m_ptr, v_ptr, l_ptr, o_ptr, order_ptr, n_tiles, rows, keys, factor, EXP: tl.constexpr,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """O from dumped P_bar, tile maxima and l, in the kernel's own tile order, for a block of rows of one head."""
    offs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = offs < rows
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for i in range(0, n_tiles):
        tile = tl.load(order_ptr + i)
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = cols < keys
        p = tl.load(p_ptr + offs[:, None] * keys + cols[None, :], mask=here[:, None] & seen[None, :], other=0.0)
        v = tl.load(v_ptr + cols[:, None] * D + dims[None, :], mask=seen[:, None] & (dims < D)[None, :], other=0.0)
        m_tile = tl.load(m_ptr + offs * tl.cdiv(keys, BLOCK_N) + tile, mask=here, other=0.0)
        m_new = tl.where(m_tile == m_tile, m_tile, m)  # a tile that the block never saw was not written
        top, c = tl.where(m_new == float("-inf"), 0.0, m_new), factor * 1.4426950408889634
        rescale = tl.exp2((m - top) * c)
        if EXP == "exp2-scaled":
            rescale = tl.exp2(product(m, c) - product(top, c))
        acc = dot_add(as_operand(p.to(tl.float32), "bf16"), v, acc * rescale[:, None], "bf16")
        m = m_new
    l = tl.load(l_ptr + offs, mask=here, other=1.0)
    o = acc * tl.div_rn(1.0, l)[:, None]
    tl.store(o_ptr + offs[:, None] * D + dims[None, :], as_operand(o, "bf16"), mask=here[:, None] & (dims < D)[None, :])


def replayed(dump: Dump, v: Tensor, h: int, head_dim: int) -> Tensor:
    """O of head ``h`` from a full dump."""
    length, keys = dump.q.shape[2], dump.k.shape[2]
    geometry = forward_geometry(
        dump.recipe, head_dim, dump.visibility, softcap=False, level="full", tma=False, packed=False
    )
    tiles = -(-keys // geometry.block_n)
    order = torch.arange(tiles, dtype=torch.int32, device=v.device)
    if dump.recipe.schedule.order == "descending":
        order = order.flip(0)
    rows = slice(h * length, (h + 1) * length)
    # Interpreted, everything is in fp32.
    dtype = torch.float32 if v.device.type == "cpu" else v.dtype
    out = torch.full((length, head_dim), torch.nan, dtype=dtype, device=v.device)
    probs, values = dump.probs[rows].to(dtype), v[0, h * v.shape[1] // dump.q.shape[1]].contiguous().to(dtype)
    replay_kernel[(-(-length // geometry.block_m),)](
        probs.contiguous(), dump.tile_max[rows].contiguous(), values, dump.row_sum[0, h].contiguous(), out, order,
        tiles,
        length, keys, dump.factor, EXP=dump.recipe.exp, D=head_dim, BLOCK_M=geometry.block_m, BLOCK_N=geometry.block_n,
        BLOCK_D=geometry.block_d, num_warps=geometry.warps,
    )  # fmt: skip
    return out


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["fa2", "cudnn", "efficient"])
def test_dumped_values_are_the_ones_used(name: str, device: str) -> None:
    q, k, v = tensors(device, T=200)
    out, dump = attention(q, k, v, causal="top-left", recipe=name, instrument="full")
    for h in range(2):
        assert torch.equal(replayed(dump, v, h, 64).cpu().float(), out[0, h].cpu().float())
    # In float64, with P_bar all taken from the last maximum: within the bound of n fp32 additions and products.
    tiles = dump.tile_max.cpu().double() * dump.factor
    width = -(-dump.k.shape[2] // tiles.shape[1])
    columns = torch.arange(200) // (64 if name == "efficient" else 128)
    assert width <= 128
    shift = torch.exp(tiles.nan_to_num(-torch.inf)[:, columns] - dump.row_max.cpu().double().view(-1, 1))
    terms = dump.probs.cpu().double() * shift.nan_to_num(0.0)
    exact = (terms @ v[0, 0].cpu().double()) / dump.row_sum.cpu().double().view(-1, 1)
    size = (terms @ v[0, 0].cpu().double().abs()) / dump.row_sum.cpu().double().view(-1, 1)
    # On a tensor core an addition truncates (one ulp, 2**-23); each rescaling costs an exp2 of 2 ulp and a product.
    unit = (200 + 4 * tiles.shape[1]) * 2.0**-23
    bound = size * unit / (1 - unit) + exact.abs() * 2.0**-8
    assert ((out.cpu().double().view(-1, 64) - exact).abs() <= bound).all()


def tied_inputs(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Four heads: no ties, keys in pairs, all keys equal, and a staircase."""
    q, k, v = tensors(device, T=200, H=4, Hk=4, D=32)
    k[:, 1, 1::2] = k[:, 1, ::2]
    k[:, 2] = k[:, 2, :1]
    # The maximum rises by less than any definition's reach, tile after tile.
    q[:, 3], k[:, 3] = 0, 0
    q[:, 3, :, 0], k[:, 3, :, 0], k[:, 3, :, 1] = 1, 1, torch.arange(200, device=device) // 20 * 2.0**-8
    q[:, 3, :, 1] = 2.0**-2
    return q, k, v


@pytest.mark.parametrize("name", ["fa2", "qiu2025", "qiu2025-stabilised", "splits", "row-max-bf16"])
def test_multiplicities_equal_a_count_over_dumped_scores(name: str, device: str) -> None:
    recipe = VARIANTS[name]
    q, k, v = tied_inputs(device)
    _, dump = attention(q, k, v, causal="top-left", recipe=recipe, instrument="full")
    raw = dump.scores.float().cpu()
    scores = raw * torch.tensor(dump.factor, dtype=torch.float32)
    top = scores.amax(1, keepdim=True)
    below = top - scores
    seen = raw > -torch.inf
    expected = {
        "exact": scores.bfloat16() == top.bfloat16(),
        "as_run": raw == raw.amax(1, keepdim=True),
        "window": below <= 1e-3,
        "unit": below <= -math.log1p(-(2.0**-9)),
    }
    for definition, repeats in expected.items():
        count = (repeats & seen).sum(1).view(1, 4, -1).int()
        assert torch.equal(dump.multiplicity(definition).cpu(), count), definition
        assert (count[0, 1:3] > 1).any(1).all(), "ties, or the check cannot fail"
    with pytest.raises(ValueError, match="known: exact, as_run, window, unit"):
        dump.multiplicity("ties")


def test_row_statistics_are_what_they_say(device: str) -> None:
    case: dict[str, Any] = {"T": 150, "causal": "top-left"}
    q, k, v = tensors(device, **case)
    out, dump = attention(q, k, v, causal="top-left", recipe="cudnn", instrument="full")
    reference = reference_head(head_of(q, k, v, 1, case))
    torch.testing.assert_close(dump.row_max[0, 1].cpu().double(), reference.row_max, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dump.lse[0, 1].cpu().double(), reference.lse, rtol=1e-5, atol=1e-5)
    tiles = dump.tile_max.cpu().double()[:, torch.arange(150) // 128] * dump.factor
    shift = torch.exp(tiles - dump.row_max.cpu().double().view(-1, 1)).nan_to_num(0.0)
    cast_sum = (dump.probs.cpu().double() * shift).sum(1)
    defect = cast_sum / dump.row_sum.cpu().double().flatten() - 1
    torch.testing.assert_close(dump.unity_defect.cpu().double().flatten(), defect, rtol=0, atol=150 * 2.0**-23)
    assert defect.abs().max() > 1e-4
    ones, observed = attention(q, k, torch.ones_like(v), causal="top-left", recipe="cudnn", instrument="rows")
    assert torch.equal(ones[..., 0].float(), (1 + observed.unity_defect).to(ones.dtype).float())
    # O's rounding errors, summed over features: within half an ulp each.
    assert dump.out_rounding.abs().max() <= 64 * out.float().abs().max() * 2.0**-8


@quiet
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_and_inf_spread_as_in_sdpa(bad: float, where: str, device: str) -> None:
    q, k, v = tensors(device, T=140, H=1)
    {"q": q, "k": k, "v": v}[where][0, 0, 70, 3] = bad
    out = attention(q, k, v, causal="top-left", recipe="fa2")
    # On a GPU 0 times NaN spoils rows that do not see the key but share its tile: compare with the same tiles.
    inputs = (q, k, v) if device == "cuda" else (q.float(), k.float(), v.float())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isfinite(), expected.isfinite())


def test_rows_without_keys_give_zero(device: str) -> None:
    q, k, v = tensors(device, T=100, Tk=40)
    out, dump = attention(q, k, v, causal="bottom-right", instrument="rows")
    assert not out[:, :, :60].any()
    assert (dump.lse[:, :, :60] == -torch.inf).all()
    assert (dump.multiplicity("exact")[:, :, :60] == 0).all()
    assert out[:, :, 60:].abs().amax(-1).gt(0).all()


def exact_inputs(recipe: Recipe, device: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Inputs whose every sum is exact in fp32, in any order, and so is every exponential: powers of two, or 1 and 0."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randint(-1, 2, (1, 2, 140, 16), generator=generator).bfloat16().to(device) for _ in range(2))
    v = torch.randint(-8, 9, (1, 2, 140, 16), generator=generator).bfloat16().to(device)
    scale = math.log(2)
    if recipe.exp == "exact":
        q[:], k[..., 1:], k[..., 0], scale = 1, 0, -512 * (k[..., 0] > 0), 1.0
    return q, k, v, {"scale": scale, "causal": "top-left"}


@pytest.mark.parametrize("name", [n for n, r in VARIANTS.items() if r.input == "bf16" and n != "stale"])
def test_exact_sums_leave_every_rounding_site_bit_equal(name: str, device: str) -> None:
    """Where sums and exponentials are exact, kernel and emulation can differ in a rounding site alone, and do not.

    On a CPU this compares the interpreter with the emulation, on a GPU the GPU: so both have the same roundings.
    """
    recipe = VARIANTS[name]
    q, k, v, more = exact_inputs(recipe, device)
    out = attention(q, k, v, recipe=recipe, **more)
    for h in range(2):
        head = replace(head_of(q, k, v, h, {"causal": "top-left"}), scale=more["scale"])
        assert torch.equal(emulate_head(recipe, head).o, out[0, h].cpu())


REAL = {
    ("pair_T256", "flash"): preset("fa2"),
    ("pair_T256", "cudnn"): preset("cudnn"),
    ("pair_T256", "efficient"): preset("efficient"),
    ("gqa_T200", "observed"): preset("cudnn"),
    ("kernels_gauss_T512", "flash"): replace(preset("fa2"), schedule=Schedule(key_tile=256, split_keys=256)),
    ("gpt2_step731_L2H4", "observed"): preset("cudnn"),
}


@pytest.mark.parametrize(("file", "observation"), REAL)
def test_reproduces_real_kernels(file: str, observation: str, captures: Path, device: str) -> None:
    """Bit-equal to what SDPA's backends returned on an H200 in at least 99.5 % of O's elements."""
    capture = load(captures / f"{file}.safetensors")
    q, k, v, real = (capture.tensors[name][...] for name in ("q", "k", "v", capture.key(observation, "o")))
    causal = capture.metadata.causal
    if device == "cpu":
        # Interpreted, the heads of one key head, and rows that see none of the keys left out.
        assert causal == "top-left"
        heads, rows = q.shape[1] // k.shape[1], 384
        q, real, k, v = q[:, :heads, :rows], real[:, :heads, :rows], k[:, :1, :rows], v[:, :1, :rows]
    q, k, v = (x.contiguous().to(device) for x in (q, k, v))
    out = attention(q, k, v, recipe=REAL[file, observation], causal=causal, scale=capture.scale)
    assert (out.cpu() == real).float().mean() >= 0.995


@pytest.mark.parametrize("recipe", ["qiu2025-stabilised", "qiu2025-stabilised-unclamped", "cudnn"])
def test_masked_tiles_are_no_repeated_maximum(recipe: str, device: str) -> None:
    """Under the stabilised rule a tile that a row does not see leaves its (negative) maximum alone."""
    stabilised = replace(
        preset(recipe), softmax=SoftmaxRule("stabilised", beta=2.0), schedule=Schedule(query_block=64, key_tile=16),
        gradient_accumulator="fp32",
    )  # fmt: skip
    q = torch.ones(1, 1, 64, 16, device=device, dtype=torch.bfloat16)
    # S = -4 - t / 16 at key t: every maximum is negative, and unique.
    k = -(1 + torch.arange(64, device=device) / 64).bfloat16()[None, None, :, None].expand(1, 1, 64, 16).contiguous()
    v = tensors(device, T=64, D=16, H=1)[2]
    case: dict[str, Any] = {"causal": "top-left", "window": (40, -1)}
    out, dump = attention(q, k, v, recipe=stabilised, instrument="rows", **case)
    first = -4 - (torch.arange(64) - 40).clamp(min=0) / 16
    # What slid out of the window stays in m only where the row saw it; no row did.
    assert torch.equal(dump.row_max[0, 0].cpu(), first)
    assert agreement(out, q, k, v, stabilised, case) > 0.99
    # Rows past the window of the last key see nothing at all.
    unseen, dump = attention(q, k[:, :, :16].contiguous(), v[:, :, :16].contiguous(), recipe=stabilised,
                             instrument="rows", causal="top-left", window=(8, -1))  # fmt: skip
    assert not unseen[:, :, 24:].any()
    assert (dump.row_max[:, :, 24:] == -torch.inf).all()
