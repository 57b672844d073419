"""Published kernels as recipes, by name; ``PRESETS`` have 16-bit operands, ``LOW_BIT`` fewer bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from attn_diag.kernels.formats import Format
from attn_diag.kernels.recipe import Recipe, Schedule, SoftmaxRule

_QIU2025 = Recipe(
    "qiu2025",
    "published code of Qiu & Yao (arXiv 2510.04212): scores, maximum, row sum and O accumulator in BF16",
    scores="bf16",
    alpha="after-rounding",
    difference="bf16",
    row_max="bf16",
    exp="exact",
    row_sum="bf16",
    row_sum_clamp=1e-10,
    range_pv="bf16",
    accumulator="bf16",
    lse_from="rounded-l",
    delta_products="bf16",
    backward_scores="as-forward",
    dprobs="bf16",
    alpha_in_backward="before-cast",
    gradient_accumulator="bf16",
    schedule=Schedule(query_block=512, key_tile=512),
)

_STABILISED = replace(
    _QIU2025,
    name="qiu2025-stabilised",
    summary="as qiu2025, with the published mitigation: a repeated maximum is multiplied by beta",
    softmax=SoftmaxRule("stabilised", beta=2.0),
)
_FA2 = Recipe(
    "fa2",
    "FlashAttention-2: fp32 scores and sums, keys descending, O rounded once",
    schedule=Schedule(order="descending"),
)

PRESETS = {
    recipe.name: recipe
    for recipe in (
        _FA2,
        Recipe(
            "cudnn",
            "cuDNN (torch SDPA's default on an H200): fp32 scores, 128-key tiles ascending, O rounded once",
            exp="exp2-scaled",
            alpha_in_backward="before-cast",
        ),
        Recipe(
            "efficient",
            "torch's memory-efficient SDPA: as cuDNN, 64-key tiles (128 above D = 64); its dS multiplies the cast P",
            alpha="before-rounding",
            exp="exp2-scaled",
            dropout_factor="bf16",
            mma_k=8,
            dscores_from="cast-probs",
            alpha_in_backward="before-cast",
            schedule=Schedule(query_block=64, key_tile=64),
        ),
        Recipe(
            "flex",
            "FlexAttention compiled: as cuDNN, but a causal query block's diagonal tile first, then ascending",
            schedule=Schedule(order="diagonal-first"),
        ),
        _QIU2025,
        _STABILISED,
        replace(
            _STABILISED,
            name="qiu2025-stabilised-unclamped",
            summary="as qiu2025-stabilised, without the lower limit on l",
            row_sum_clamp=None,
        ),
        Recipe(
            "bf16-forward",
            "scores, S - m, numerator, row sum and O in BF16, all keys at once; backward of FlashAttention-2",
            scores="bf16",
            alpha="before-rounding",
            difference="bf16",
            exp="exact",
            row_sum="bf16",
            accumulator="bf16",
            schedule=Schedule(key_tile=2**20),
        ),
        Recipe(
            "bf16-scores",
            "scores and S - m in BF16, everything else as FlashAttention-2, whose backward recomputes fp32 scores",
            scores="bf16",
            alpha="before-rounding",
            difference="bf16",
            exp="exact",
        ),
        replace(
            _FA2, name="delta-fp32", summary="as fa2, with delta from O before its last rounding", delta_from="fp32-o"
        ),
        replace(_FA2, name="delta-from-dp", summary="as fa2, with delta = rowsum(P o dP)", delta_from="dp"),
        replace(_FA2, name="lowp-row-sum", summary="as fa2, with l summing the cast P_bar", row_sum_of="cast-probs"),
    )
}

# SageAttention quantises 128 rows of q and 64 of k together (its Triton kernels: quant_per_block.py), ties away.
_INT8_ROWS = "int8 block={}rows arithmetic=fp32 ties=away"
# Its kernels divide amax by 127 and x by the scale, in Triton.
_TRITON_INT8_ROWS = "int8 block={}rows arithmetic=fp32-triton ties=away"
_SAGE1 = Recipe(
    "sage1",
    "SageAttention 1.0.6 (Triton): INT8 q and smoothed k, P_bar V in FP16 with FP16 sums",
    quantize_q=_TRITON_INT8_ROWS.format(128),
    quantize_k=_TRITON_INT8_ROWS.format(64),
    smooth_k="rounded-mean",
    alpha="in-q",
    exp="exp2",
    probs="fp16",
    pv_sums="fp16",
    pv_levels="two",
    accumulation="nvidia-tensor-core",
    schedule=Schedule(key_tile=64),
)
_SAGE2 = Recipe(
    "sage2",
    "SageAttention 2 (arXiv 2411.10958): INT8 q and smoothed k by warps, FP8 P_bar V, sums in FP22 and fp32 outside",
    quantize_q=_INT8_ROWS.format(32),
    quantize_k=_INT8_ROWS.format(64),
    smooth_k="mean",
    alpha="in-q",
    exp="exp2",
    probs="e4m3",
    probs_scale=448.0,
    quantize_v="fp8 block=column",
    pv_levels="two",
    accumulation="nvidia-tensor-core",
    schedule=Schedule(key_tile=64),
)
# As its kernels for Hopper have it (quant_per_thread.py, qk_int_sv_f8_cuda_sm90.cu): a scale for the 2 rows of q and 32
# of k that a thread of the tensor core's fragments holds. P_bar's offset is 8.807 in the exponent, not log2(448).
_THREADS_INT8 = "int8 block={} arithmetic=fp32-triton ties=away scale_offset=1e-7"
_SAGE2_HOPPER = replace(
    _SAGE2,
    name="sage2-hopper",
    summary="SageAttention 2.2 on Hopper: INT8 q and smoothed k by threads, FP8 P_bar V, FP22 sums of 128 keys",
    quantize_q=_THREADS_INT8.format("16rows/8"),
    quantize_k=_THREADS_INT8.format("128rows/4"),
    smooth_k="rounded-mean",
    alpha="in-exponent",
    exp="exp2-fma",
    probs_scale=2.0**8.807,
    quantize_v="fp8 block=column arithmetic=fp32-reciprocal",
    schedule=Schedule(64, 128),
)
_SAGE_BWD = replace(
    _SAGE1,
    name="sage-bwd",
    summary="SageBwd (arXiv 2505.11594, 2603.02170): INT8 forward and backward in blocks of 64, dO V^T in 16 bits",
    quantize_q=_INT8_ROWS.format(64),
    quantize_k=_INT8_ROWS.format(64),
    smooth_k="mean",
    probs="fp32",
    pv_sums="fp32",
    quantize_probs="int8 block=row",
    quantize_v="int8 block=64rows",
    accumulation="fp32-nearest",
    backward_scores="as-forward",
    quantize_do="int8 block=64rows",
    quantize_backward_probs="int8 block=64x64",
    quantize_dscores="int8 block=64x64",
    backward_operands="quantized",
    backward_probs="fp32",
    dscores="fp32",
)
# Codes are of x times the reciprocal of the stored scale (fp4_quantization_4d.cu).
_SAGE3 = "nvfp4 tensor_scale=false arithmetic=fp32-reciprocal"
_MX = Recipe(
    "mxfp8-attention",
    "MXFP8 (E4M3, blocks of 32) for q, k, P_bar and v, fp32 sums",
    quantize_q="mxfp8",
    quantize_k="mxfp8",
    # With a fused multiply-add the largest P_bar is now and then 1 - 2^-24: a scale rounded down clips that to 7/8.
    exp="exact",
    probs="fp32",
    quantize_probs="mxfp8",
    quantize_v="mxfp8 block=32x1",
)

# Kernels below 16 bits. Scales of a "tensor" are those of one head here. Backwards are FlashAttention-2's on the
# 16-bit inputs, but for SageBwd's.
LOW_BIT = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "fa3-fp8",
            "FlashAttention-3 in FP8 (E4M3): q, k, v with a scale a head, P_bar times 256, sums in FP22",
            quantize_q="fp8",
            quantize_k="fp8",
            probs="e4m3",
            probs_scale=256.0,
            quantize_v="fp8",
            accumulation="nvidia-tensor-core",
            schedule=Schedule(192, 160, "descending"),
        ),
        _SAGE1,
        _SAGE2,
        _SAGE2_HOPPER,
        replace(
            _SAGE2_HOPPER,
            name="sage2-ada",
            summary="SageAttention 2.2 on Ada, fp32+fp32 sums: as sage2-hopper in other groups, FP22 sums of 64 keys",
            quantize_q=_THREADS_INT8.format("32rows/8"),
            quantize_k=_THREADS_INT8.format("64rows/4"),
            schedule=Schedule(128, 64),
        ),
        replace(
            _SAGE2,
            name="sage2-int4",
            summary="as sage2, with INT4 q and k, both smoothed",
            quantize_q="int4 block=32rows",
            quantize_k="int4 block=64rows",
            smooth_q="block-mean",
        ),
        _SAGE_BWD,
        _MX,
        replace(
            _MX,
            name="mxfp4-attention",
            summary="MXFP4 (E2M1, blocks of 32) for q, k, P_bar and v, fp32 sums",
            quantize_q="mxfp4",
            quantize_k="mxfp4",
            quantize_probs="mxfp4",
            quantize_v="mxfp4 block=32x1",
        ),
        replace(
            _MX,
            name="nvfp4-attention",
            summary="NVFP4 (E2M1, E4M3 scales of 16) for q, smoothed k, P_bar times 2688 and v",
            quantize_q="nvfp4",
            quantize_k="nvfp4",
            smooth_k="mean",
            exp="exp2-fma",
            # 448 * 6: the largest scale times the largest element.
            probs_scale=2688.0,
            quantize_probs="nvfp4 tensor_scale=false",
            quantize_v="nvfp4 block=16x1",
        ),
        replace(
            _MX,
            name="sage3",
            summary="SageAttention 3 (arXiv 2505.11594): NVFP4 without a tensor's scale, q and k smoothed",
            quantize_q=_SAGE3,
            quantize_k=_SAGE3,
            smooth_q="rounded-block-mean",
            smooth_k="rounded-mean",
            exp="exp2-fma",
            probs_scale=2688.0,
            # Its codes are of P_bar over the scale that has not been rounded (softmax_fused.h).
            quantize_probs="nvfp4 tensor_scale=false divisor=unrounded arithmetic=fp32",
            quantize_v=f"{_SAGE3} block=16x1",
            schedule=Schedule(128, 128),
        ),
        replace(
            _FA2, name="kv-fp8", summary="as fa2, on k and v from an FP8 cache with a scale a head",
            quantize_k="fp8", quantize_v="fp8",
        ),
        replace(
            _FA2, name="kv-int8", summary="as fa2, on k and v from an INT8 cache with a scale a token",
            quantize_k="int8", quantize_v="int8",
        ),
    )
}  # fmt: skip
RECIPES = PRESETS | LOW_BIT
# FlashAttention-2 takes 64-key tiles from D = 65 on (measured on an H200: O agrees in 99.96 % at D 128, 85 % with 128).
_FA2_SCHEDULE = {name for name, recipe in PRESETS.items() if recipe.schedule == _FA2.schedule} | {"kv-fp8", "kv-int8"}


# FlashAttention-3's FP8 tiles (hopper/tile_size.h): rows and keys up to this head dimension.
_FA3_TILES = {64: (192, 160), 96: (192, 128), 128: (128, 224), 192: (128, 160), 256: (128, 128)}


def preset(name: str, input_format: Format = "bf16", head_dim: int = 64) -> Recipe:
    """A published kernel's recipe by name.

    Args:
        name: fa2, cudnn, efficient, flex, …
        input_format: bf16 or fp16: how q, k, v and dO are stored.
        head_dim: Features of a head, on which tile widths depend.

    Returns:
        The recipe, for inputs of this format.

    Raises:
        KeyError: There is no such recipe; it names those that there are.
    """
    if name not in RECIPES:
        raise KeyError(f"no recipe {name!r}; known: {', '.join(RECIPES)}")
    return _made(name, input_format, head_dim)


@cache  # A recipe is checked and written out as it is made, in a fifth of a millisecond.
def _made(name: str, input_format: Format, head_dim: int) -> Recipe:
    recipe = RECIPES[name].for_input(input_format)
    if name == "fa3-fp8":
        width = next((d for d in _FA3_TILES if head_dim <= d), 256)
        recipe = replace(recipe, schedule=Schedule(*_FA3_TILES[width], "descending"))
    if name == "efficient" and head_dim > 64:
        recipe = replace(recipe, schedule=Schedule(query_block=32, key_tile=128))
    if name in _FA2_SCHEDULE and head_dim > 64:
        recipe = replace(recipe, schedule=replace(recipe.schedule, key_tile=64))
    return recipe
