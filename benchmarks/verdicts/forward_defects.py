"""Defects that begin in the forward pass: roundings first, then wrong mathematics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from verdicts.inputs import Inputs, in_blocks
from verdicts.kernels import LOG2_E, QUANTITIES, Hook, Plan, Seen
from verdicts.planting import (
    Defect,
    Extent,
    Numbers,
    Region,
    edit,
    every_row,
    fill_features,
    fill_rows,
    last_tile,
    low,
    on_rows,
    one_row,
    row_maxima,
    rows,
    second_tile,
    shift_rows,
    stored,
    swap_heads,
)
from verdicts.roundings import (
    BF16,
    E4M3,
    E5M2,
    EXP2_DEGREE_2,
    EXP2_DEGREE_3,
    FP16,
    exp2_polynomial,
    flush,
    nearest,
    stochastic,
    to_bits,
    to_fp8,
    to_int8,
    truncate,
)

FLASH = "https://github.com/Dao-AILab/flash-attention"
_TWO_SPLITS: dict[str, object] = {"splits": 2}


def _site(
    name: str, site: str, quantities: str, hooks: dict[str, Hook], *, region: Region = every_row, needs: str = "",
    kernel: dict[str, object] | None = None,
) -> Defect:  # fmt: skip
    """A coarse rounding; with a region, only in its rows."""
    limited = region is not every_row
    return Defect(
        name, "forward", tuple(quantities.split()), site=site, kernel=kernel or {},
        hooks={n: on_rows(h, region) for n, h in hooks.items()} if limited else hooks, needs=frozenset(needs.split()),
        numbers=rows(region) if limited else lambda _: {}, extent="tile" if limited else "everywhere",
    )  # fmt: skip


def _truncated(x: Tensor, s: Seen) -> Tensor:
    return truncate(x, s.inputs.q.dtype)


def _stochastic(bias: float) -> Hook:
    return lambda x, s: stochastic(x, s.inputs.q.dtype, s.uniform(x), bias)


def _polynomial(coefficients: tuple[float, ...]) -> Hook:
    def act(_: Tensor, s: Seen) -> Tensor:
        return exp2_polynomial(s["exp_argument"] * (LOG2_E if s.kernel.exp == "exp" else 1), coefficients)

    return act


def _stored_lse(change: Callable[[Tensor, Seen], Tensor]) -> dict[str, Hook]:
    return {"lse": lambda x, s: torch.where(x == -math.inf, x, change(x, s))}


def _scores_in_fp16_before_scale(x: Tensor, s: Seen) -> Tensor:
    unit = s.inputs.scale / s.natural
    return nearest(x / unit, FP16) * unit


def _scaled_q(x: Tensor, s: Seen) -> Tensor:
    unit = s.inputs.scale * LOG2_E
    return s.cast(x * unit) / unit


SITES = (
    _site("scores_16bit", "scores", "o lse", {"scores": low}),
    _site("scores_16bit_one_tile", "scores", "o lse", {"scores": low}, region=last_tile),
    _site("scores_fp16", "scores", "o lse", {"scores": stored(lambda x: nearest(x, FP16))}),
    _site("scores_fp16_before_scale", "scores", "o lse", {"scores": _scores_in_fp16_before_scale}),
    _site("scores_tf32", "scores", "o lse", {"scores": stored(lambda x: to_bits(x, 11))}),
    _site("qk_int8", "scores", "o lse", {"q": stored(to_int8), "k": stored(to_int8)}),
    _site("qk_fp8", "scores", "o lse", {"q": stored(to_fp8), "k": stored(to_fp8)}),
    _site("scaled_q_16bit", "q·scale", "o lse", {"q": _scaled_q}),
    _site("row_max_16bit", "row max", "o lse", {"row_max": low}),
    _site("row_max_16bit_in_rescale", "row max", "o lse", {
        "rescale": lambda x, s: x * (s["row_max"] - s.cast(s["row_max"])).nan_to_num().mul(s.natural).exp(),
    }),
    _site("exp_argument_16bit", "exp argument", "o lse", {"exp_argument": low}),
    _site("exp_argument_fp16", "exp argument", "o lse", {"exp_argument": stored(lambda x: nearest(x, FP16))}),
    _site("exp_degree_3", "exp", "o lse", {"probs": _polynomial(EXP2_DEGREE_3)}),
    _site("exp_degree_2", "exp", "o lse", {"probs": _polynomial(EXP2_DEGREE_2)}),
    _site("exp_degree_2_one_tile", "exp", "o lse", {"probs": _polynomial(EXP2_DEGREE_2)}, region=last_tile),
    _site("exp_fp16", "exp", "o lse", {"probs": stored(lambda x: nearest(x, FP16))}),
    _site("exp_7_bits", "exp", "o lse", {"probs": stored(lambda x: to_bits(x, 7))}),
    _site("exp_flushed_below_e-6", "exp", "o lse", {"probs": stored(lambda x: flush(x, math.exp(-6)))}),
    _site("rescale_16bit", "rescale", "o lse", {"rescale": low}),
    _site("acc_rescale_16bit", "rescale", "o", {"acc_rescale": low}),
    _site("row_sum_16bit", "row sum", "o lse", {"row_sum": low}),
    _site("row_sum_16bit_one_tile", "row sum", "o lse", {"row_sum": low}, region=last_tile),
    _site("row_sum_truncated", "row sum", "o lse", {"row_sum": _truncated}),
    _site("row_sum_fp16", "row sum", "o lse", {"row_sum": stored(lambda x: nearest(x, FP16))}),
    _site("acc_16bit", "O accumulator", "o", {"acc": low}),
    _site("acc_16bit_one_tile", "O accumulator", "o", {"acc": low}, region=last_tile),
    _site("acc_truncated", "O accumulator", "o", {"acc": _truncated}),
    _site("acc_fp16", "O accumulator", "o", {"acc": stored(lambda x: nearest(x, FP16))}),
    _site("pv_16bit", "PV", "o", {"pv": low}),
    _site("pv_truncated", "PV", "o", {"pv": _truncated}),
    _site("v_fp8", "V", "o", {"v": stored(to_fp8)}),
    _site("probs_truncated", "P̄", "o", {"probs_cast": lambda _, s: truncate(s["probs"], s.inputs.q.dtype)}),
    _site("probs_truncated_one_tile", "P̄", "o",
          {"probs_cast": lambda _, s: truncate(s["probs"], s.inputs.q.dtype)}, region=last_tile),
    _site("probs_e4m3", "P̄", "o", {"probs_cast": lambda _, s: nearest(s["probs"], E4M3)}),
    _site("probs_e4m3_times_256", "P̄", "o", {"probs_cast": lambda _, s: nearest(s["probs"] * 256, E4M3) / 256}),
    _site("probs_e5m2", "P̄", "o", {"probs_cast": lambda _, s: nearest(s["probs"], E5M2)}),
    _site("probs_int8", "P̄", "o", {"probs_cast": lambda _, s: (s["probs"] * 127).round() / 127}),
    _site("probs_flushed_below_2^-14", "P̄", "o", {"probs_cast": stored(lambda x: flush(x, 2.0**-14))}),
    _site("probs_stochastic", "P̄", "o",
          {"probs_cast": lambda _, s: stochastic(s["probs"], s.inputs.q.dtype, s.uniform(s["probs"]))}),
    _site("probs_stochastic_biased", "P̄", "o",
          {"probs_cast": lambda _, s: stochastic(s["probs"], s.inputs.q.dtype, s.uniform(s["probs"]), 0.2)}),
    _site("inverse_16bit", "1/l", "o", {"inverse": low}),
    _site("inverse_truncated", "1/l", "o", {"inverse": _truncated}),
    _site("inverse_12_bits", "1/l", "o", {"inverse": stored(lambda x: to_bits(x, 12))}),
    _site("inverse_without_newton", "1/l", "o", {"inverse": stored(lambda x: x * (1 - 2.0**-9))}),
    _site("split_out_16bit", "split merge", "o", {"split_out": low}, kernel=_TWO_SPLITS, needs="tiles"),
    _site("split_lse_16bit", "split merge", "o lse", {"split_lse": low}, kernel=_TWO_SPLITS, needs="tiles"),
    _site("merge_weights_16bit", "split merge", "o", {"merge_weights": low}, kernel=_TWO_SPLITS, needs="tiles"),
    _site("out_truncated", "O", "o", {"o": lambda _, s: _truncated(s["out"], s).to(s.inputs.q.dtype)}),
    _site("out_stochastic", "O", "o", {"o": lambda _, s: _stochastic(0)(s["out"], s).to(s.inputs.q.dtype)}),
    _site("out_stochastic_biased", "O", "o", {"o": lambda _, s: _stochastic(0.1)(s["out"], s).to(s.inputs.q.dtype)}),
    _site("out_rounded_twice", "O", "o", {"out": stored(lambda x: to_bits(x, 12))}),
    _site("out_e4m3", "O", "o", {"out": stored(to_fp8)}),
    _site("lse_16bit", "LSE", "lse", {"lse": low}),
    _site("lse_bf16", "LSE", "lse", {"lse": stored(lambda x: nearest(x, BF16))}),
    _site("lse_12_bits_of_log", "LSE", "lse", _stored_lse(lambda x, _: (x * 2**10).round() / 2**10)),
)  # fmt: skip


def _pattern(
    name: str, pattern: str, quantities: str, hooks: dict[str, Hook] | None = None, *, numbers: Numbers | None = None,
    extent: Extent = "everywhere", needs: str = "", source: str = "", kernel: dict[str, object] | None = None,
    plan: Callable[[Plan], Plan] | None = None,
    reads: Callable[[Inputs], Inputs] | None = None,
) -> Defect:  # fmt: skip
    """Wrong mathematics."""
    plans = {} if plan is None else {"forward": plan}
    return Defect(
        name, "forward", tuple(quantities.split()), hooks or {}, pattern=pattern, numbers=numbers or (lambda _: {}),
        extent=extent, plans=plans, reads=reads, kernel=kernel or {}, needs=frozenset(needs.split()), source=source,
    )  # fmt: skip


ALL = " ".join(QUANTITIES)


def _both(mask: Hook) -> dict[str, Hook]:
    return {"mask": mask, "bwd_mask": mask}


def _ahead(by: int, region: Region = every_row) -> Hook:
    """Rows of a region see the key that lies ``by`` after their diagonal, if its tile is visited."""

    def act(x: Tensor, s: Seen) -> Tensor:
        row, key = s.rows[..., :, None], s.keys[..., None, :]
        first, last = region(s.inputs)
        more = (key == row + s.inputs.diagonal + by) & (row >= first) & (row <= last) & (key < s.inputs.k.shape[2])
        return x | more

    return act


def _without_diagonal(x: Tensor, s: Seen) -> Tensor:
    return x & (s.keys[..., None, :] != s.rows[..., :, None] + s.inputs.diagonal)


def _without_key(key: Callable[[Inputs], int]) -> Hook:
    return lambda x, s: x & (s.keys[..., None, :] != key(s.inputs))


def _unmasked_last_tile(x: Tensor, s: Seen) -> Tensor:
    """The last query tile sees all of every key tile that it visits."""
    first, _ = last_tile(s.inputs)
    return x | ((s.rows >= first)[..., :, None] & (s.keys < s.inputs.k.shape[2])[..., None, :])


def _padding_off_by_one(x: Tensor, s: Seen) -> Tensor:
    assert s.inputs.key_mask is not None
    length = s.inputs.key_mask.sum(-1)[:, None, None, None, None]
    causal = replace(s.inputs, key_mask=None).visible(s.rows, s.keys)
    return x | (causal & (s.keys[None, None, :, None, :] == length))


def _drop_middle(plan: Plan) -> Plan:
    tiles = plan[-1]
    return [*plan[:-1], [j for i, j in enumerate(sorted(tiles)) if i != len(tiles) // 2]]


def _dropped_keys(x: Inputs) -> dict[str, object]:
    """Where ``_drop_middle`` acts on a call without window, in key tiles of 128."""
    first, last = last_tile(x)
    end = x.k.shape[2] - 1 if x.causal == "none" else min(last + x.diagonal, x.k.shape[2] - 1)
    tile = (end // 128 + 1) // 2
    return {"rows": (first, last), "keys": (tile * 128, min(tile * 128 + 127, end))}


def _all_tiles(plan: Plan) -> Plan:
    most = max(j for tiles in plan for j in tiles)
    return [list(range(most + 1)) for _ in plan]


def _no_rescale(x: Tensor, s: Seen) -> Tensor:
    return torch.ones_like(x) if s.step else x


def _no_rescale_once(x: Tensor, s: Seen) -> Tensor:
    return torch.ones_like(x) if s.step == 1 else x


def _neighbouring_values(x: Tensor, s: Seen) -> Tensor:
    """The last query tile multiplies its second tile of P_bar with the V tile before it (stale shared memory)."""
    if s.step != 1:
        return x
    stale = s["v"][:, :, (s.keys - 128).clamp(0, s.inputs.k.shape[2] - 1)]
    chosen = (s.rows[:, 0] >= last_tile(s.inputs)[0])[:, None, None]
    return torch.where(chosen, stale, x)


def _stale_scores(x: Tensor, s: Seen) -> Tensor:
    """The last query tile uses the scores of its first key tile for its second one as well."""
    pairs = (s.rows[:, 0] == s.rows[:, 0].max()).nonzero().flatten().tolist()
    y = x.clone()
    y[:, :, pairs[1]] = x[:, :, pairs[0]]
    return y


def _dropped_adds(x: Tensor, s: Seen) -> Tensor:
    """One row's share of a tile in five hundred is lost."""
    return torch.where(s.uniform(x[..., :1]) < 0.002, x - s["pv"], x)


def _merged_in_base_2(_: Tensor, s: Seen) -> Tensor:
    lses = s["split_lse"]
    return ((lses - lses.amax(0).nan_to_num(neginf=0)) * math.log(2)).softmax(0).nan_to_num(0)


def _equal_weights(_: Tensor, s: Seen) -> Tensor:
    there = (s["split_lse"] > -math.inf).float()
    return there / there.sum(0).clamp(min=1)


def _lost_split(x: Tensor, _: Seen) -> Tensor:
    y = x.clone()
    y[-1] = -math.inf
    return y


def _heads_tiled(x: Tensor, s: Seen) -> Tensor:
    """Query head h takes key head h % Hk where it should take h // group."""
    of_keys = x[:, :: s.inputs.group]
    return of_keys[:, torch.arange(x.shape[1], device=x.device) % of_keys.shape[1]]


def _blocks_transposed(x: Tensor, _: Seen) -> Tensor:
    """Every block of 8 rows by 8 features is transposed; what does not fill a block stays."""
    y, t, d = x.clone(), x.shape[2] // 8 * 8, x.shape[3] // 8 * 8
    blocks = in_blocks(in_blocks(x[:, :, :t, :d], 3, 8), 2, 8)
    y[:, :, :t, :d] = blocks.transpose(3, 5).flatten(2, 3).flatten(3, 4)
    return y


def _other_layout(x: Tensor, _: Seen) -> Tensor:
    """Written as [B, T, H, D] into memory that is read as [B, H, T, D]."""
    return x.transpose(1, 2).reshape(x.shape)


def _from_row_unwritten(y: Tensor, x: Inputs) -> None:
    y[:, :, 300:] = x.q[:, :, 300:]


def _last_head(value: Callable[[Tensor], Tensor]) -> Hook:
    def change(y: Tensor, _: Inputs) -> None:
        y[:, -1] = value(y[:, -1])

    return edit(change)


def _element(value: Callable[[Tensor], Tensor]) -> Hook:
    """One element, row 200, feature 17, of the last head."""

    def change(y: Tensor, _: Inputs) -> None:
        y[-1, -1, 200, 17] = value(y[-1, -1, 200, 17])

    return edit(change)


def _next_exponent_bit(x: Tensor) -> Tensor:
    """The top bit of the mantissa flipped."""
    bit = 1 << (6 if x.dtype == BF16 else 9)
    return (x.view(torch.int16) ^ bit).view(x.dtype)


def _every_128th(y: Tensor, _: Inputs) -> None:
    y[:, :, 127::128] = 0


def _empty_rows(x: Inputs) -> tuple[int, int]:
    return 0, x.q.shape[2] - x.k.shape[2] - 1


def _mean_of_v(y: Tensor, x: Inputs) -> None:
    y[:, :, : _empty_rows(x)[1] + 1] = x.v.float().repeat_interleave(x.group, 1).mean(2, keepdim=True)


def _partial_tile_shifted(y: Tensor, x: Inputs) -> None:
    first, _ = last_tile(x)
    y[:, :, first:] = y[:, :, first:].roll(1, 2)


def _overflowing_offset(y: Tensor, _: Inputs) -> None:
    """Offsets of the last head wrap from row 256 on: it reads the rows before."""
    y[:, -1, 256:] = y[:, -1, : y.shape[2] - 256].clone()


def _unwritten_partial_tile(x: Inputs) -> tuple[int, int]:
    t = x.q.shape[2]
    return t // 64 * 64, t - 1


def _rescaled_twice(x: Tensor, s: Seen) -> Tensor:
    return x.square() if s.step else x


def _element_at(x: Inputs) -> dict[str, object]:
    return {"heads": (x.q.shape[1] - 1,) * 2, "rows": (200, 200), "features": (17, 17)}


def _of_last_head(x: Inputs) -> dict[str, object]:
    return {"heads": (x.q.shape[1] - 1,) * 2}


def _scale(change: Callable[[Inputs], float]) -> Callable[[Inputs], Inputs]:
    return lambda x: replace(x, scale=change(x))


def _ratio(change: Callable[[Inputs], float]) -> Numbers:
    return lambda x: {"factor": change(x) / x.scale}


def _wider(x: Inputs) -> Inputs:
    assert x.window is not None
    return replace(x, window=(x.window[0] + 1, x.window[1]))


def _narrower(x: Inputs) -> Inputs:
    assert x.window is not None
    return replace(x, window=(x.window[0] - 1, x.window[1]))


def _aligned_otherwise(x: Inputs) -> Inputs:
    return replace(x, causal="top-left" if x.causal == "bottom-right" else "bottom-right")


PATTERNS = (
    _pattern("missing_tile", "keys missing", "o lse", plan=_drop_middle, numbers=_dropped_keys, extent="tile",
             needs="tiles"),
    _pattern("last_visited_tile_missing", "keys missing", "o lse", plan=lambda p: [t[:-1] or t for t in p],
             needs="tiles"),
    _pattern("first_visited_tile_missing", "keys missing", "o lse", plan=lambda p: [t[1:] or t for t in p],
             needs="tiles", numbers=lambda _: {"keys": (0, 127)}),
    _pattern("tile_counted_twice", "keys counted twice", "o lse", plan=lambda p: [*p[:-1], [*p[-1], p[-1][0]]],
             numbers=lambda x: {"rows": last_tile(x)}, extent="tile", needs="tiles"),
    _pattern("partial_key_tile_missing", "keys missing", "o lse", needs="odd full",
             plan=lambda p: [[j for j in t if j < max(t)] for t in p],
             numbers=lambda x: {"keys": (x.k.shape[2] // 128 * 128, x.k.shape[2] - 1)}),
    _pattern("keys_past_the_end_seen", "mask", "o lse", needs="odd full",
             hooks={"mask": lambda x, s: x | (s.keys >= s.inputs.k.shape[2])[..., None, :]}),
    _pattern("future_key_seen", "mask", ALL, _both(_ahead(1)), needs="causal", source=f"{FLASH}/pull/436"),
    _pattern("future_key_seen_forward_only", "mask", "o lse", {"mask": _ahead(1)}, needs="causal"),
    _pattern("future_key_seen_one_tile", "mask", "o lse", {"mask": _ahead(1, last_tile)}, needs="causal tiles",
             numbers=rows(last_tile), extent="tile"),
    _pattern("future_key_seen_one_row", "mask", "o lse", {"mask": _ahead(1, one_row(200))}, needs="causal tiles",
             numbers=rows(one_row(200)), extent="row"),
    _pattern("future_key_seen_every_128th_row", "mask", "o lse",
             {"mask": lambda x, s: torch.where(s.rows[..., None] % 128 == 126, _ahead(1)(x, s), x)}, extent="rows",
             needs="causal tiles", numbers=lambda _: {"rows": (126, 126), "every": 128}),
    _pattern("diagonal_hidden", "mask", ALL, _both(_without_diagonal), needs="causal"),
    _pattern("causal_unmasked_last_tile", "mask", "o lse", {"mask": _unmasked_last_tile}, needs="causal tiles",
             numbers=rows(last_tile), extent="tile"),
    _pattern("causal_ignored", "mask", ALL, reads=lambda x: replace(x, causal="none"), needs="causal"),
    _pattern("causal_ignored_forward_only", "mask", "o lse", plan=_all_tiles, needs="causal",
             hooks={"mask": lambda _, s: replace(s.inputs, causal="none").visible(s.rows, s.keys)}),
    _pattern("other_causal_alignment", "mask alignment", ALL, reads=_aligned_otherwise, needs="causal rectangular",
             source=f"{FLASH}/pull/436"),
    _pattern("window_one_wider", "window", ALL, reads=_wider, needs="window"),
    _pattern("window_one_narrower", "window", ALL, reads=_narrower, needs="window"),
    _pattern("window_ignored", "window", ALL, reads=lambda x: replace(x, window=None), needs="window",
             source="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4308"),
    _pattern("padding_ignored", "key padding", ALL, reads=lambda x: replace(x, key_mask=None), needs="padding full"),
    _pattern("padding_one_key_too_many", "key padding", "o lse", {"mask": _padding_off_by_one}, needs="padding"),
    _pattern("key_lost", "keys missing", "o lse", {"mask": _without_key(lambda _: 100)}, extent="keys",
             numbers=lambda _: {"keys": (100, 100)}),
    _pattern("first_key_lost", "keys missing", "o lse", {"mask": _without_key(lambda _: 0)}, extent="keys",
             numbers=lambda _: {"keys": (0, 0)}),
    _pattern("last_key_lost", "keys missing", "o lse", {"mask": _without_key(lambda x: x.k.shape[2] - 1)},
             extent="keys", needs="full", numbers=lambda x: {"keys": (x.k.shape[2] - 1,) * 2}),
    _pattern("rescale_missing", "rescale", "o lse", {"rescale": _no_rescale}, needs="tiles"),
    _pattern("rescale_missing_once", "rescale", "o lse", {"rescale": on_rows(_no_rescale_once, last_tile)},
             needs="tiles", numbers=rows(last_tile), extent="tile"),
    _pattern("rescale_missing_one_row", "rescale", "o lse", {"rescale": on_rows(_no_rescale, one_row(300))},
             needs="tiles", numbers=rows(one_row(300)), extent="row"),
    _pattern("acc_rescale_missing", "rescale", "o", {"acc_rescale": _no_rescale}, needs="tiles"),
    _pattern("acc_rescaled_twice", "rescale", "o", {"acc_rescale": _rescaled_twice}, needs="tiles"),
    _pattern("stale_value_tile", "copy", "o", {"value_tile": _neighbouring_values}, needs="tiles",
             numbers=rows(last_tile), extent="tile", source="https://github.com/HKUSTDial/flash-sparse-attention/pull/145"),
    _pattern("stale_score_tile", "copy", "o lse", {"scores": _stale_scores}, needs="tiles", numbers=rows(last_tile),
             extent="tile"),
    _pattern("dropped_adds", "race", "o", {"acc": _dropped_adds}, extent="rows", source=f"{FLASH}/issues/359"),
    _pattern("split_lost", "split merge", "o lse", {"split_lse": _lost_split}, kernel=_TWO_SPLITS, needs="tiles",
             numbers=lambda x: {"keys": (-(-x.k.shape[2] // 128) // 2 * 128, x.k.shape[2] - 1)}),
    _pattern("merged_in_base_2", "split merge", "o", {"merge_weights": _merged_in_base_2}, kernel=_TWO_SPLITS,
             needs="tiles", source="https://github.com/sgl-project/sglang/issues/33064"),
    _pattern("merged_with_equal_weights", "split merge", "o", {"merge_weights": _equal_weights}, kernel=_TWO_SPLITS,
             needs="tiles"),
    _pattern("scale_of_padded_d", "scale", ALL, reads=_scale(lambda x: (-(-x.q.shape[3] // 128) * 128) ** -0.5),
             needs="narrow-tail", numbers=_ratio(lambda x: (-(-x.q.shape[3] // 128) * 128) ** -0.5)),
    _pattern("scale_of_d_plus_1", "scale", ALL, reads=_scale(lambda x: (x.q.shape[3] + 1) ** -0.5),
             numbers=_ratio(lambda x: (x.q.shape[3] + 1) ** -0.5)),
    _pattern("scale_missing", "scale", ALL, reads=_scale(lambda _: 1.0), numbers=_ratio(lambda _: 1.0)),
    _pattern("scale_twice", "scale", ALL, reads=_scale(lambda x: x.scale**2), numbers=_ratio(lambda x: x.scale**2)),
    _pattern("scale_forward_only", "scale", "o lse", {"scale": stored(lambda x: x * 0.98)},
             numbers=lambda _: {"factor": 0.98}),
    _pattern("softcap_ignored", "softcap", ALL, reads=lambda x: replace(x, softcap=None), needs="softcap",
             source="https://github.com/sgl-project/sglang/issues/33915"),
    _pattern("qk_without_last_features", "features", "o lse", {"q": fill_features(64, 0.0)}, needs="narrow-tail",
             numbers=lambda x: {"features": (64, x.q.shape[3] - 1)}),
    _pattern("q_offset_overflows", "copy", "o lse", {"q": edit(_overflowing_offset)}, needs="tiles", extent="heads",
             numbers=lambda x: {**_of_last_head(x), "rows": (256, x.q.shape[2] - 1)},
             source="https://github.com/thu-ml/SageAttention/issues/386"),
    _pattern("k_offset_overflows", "copy", "o lse", {"k": edit(_overflowing_offset)}, needs="tiles", extent="heads",
             numbers=lambda x: {**_of_last_head(x), "keys": (256, x.k.shape[2] - 1)},
             source="https://github.com/fla-org/flash-linear-attention/issues/1080"),
    _pattern("key_heads_tiled", "heads", ALL, dict.fromkeys(("k", "v", "bwd_k", "bwd_v"), _heads_tiled),
             needs="gqa-heads", extent="heads", source="https://github.com/ekzhang/jax-js/pull/180"),
    _pattern("value_heads_tiled_forward_only", "heads", "o", {"v": _heads_tiled}, needs="gqa-heads", extent="heads"),
    _pattern("not_normalised_one_tile", "factor", "o", {
        "inverse": lambda x, _: torch.cat((torch.ones_like(x[:, :, :1]), x[:, :, 1:]), 2)}, extent="tile",
        numbers=lambda x: {"rows": (0, min(127, x.q.shape[2] - 1))}),
    _pattern("row_sum_of_the_next_row", "rows", "o", {"inverse": stored(lambda x: x.roll(-1, -1))}),
    _pattern("row_copied", "copy", "o", {"o": shift_rows(one_row(200), 1)}, extent="row",
             numbers=lambda _: {"rows": (200, 200), "from": 199}, needs="tiles"),
    _pattern("tile_copied", "copy", "o", {"o": shift_rows(second_tile, 128)}, extent="tile", needs="tiles",
             numbers=lambda _: {"rows": (128, 255), "from": 0}),
    _pattern("partial_tile_shifted", "rows", "o", {"o": edit(_partial_tile_shifted)}, extent="tile", needs="odd tiles",
             numbers=rows(last_tile)),
    _pattern("last_tile_zero", "zeros", "o", {"o": fill_rows(last_tile, 0.0)}, extent="tile", numbers=rows(last_tile)),
    _pattern("partial_tile_zero", "zeros", "o", {"o": fill_rows(_unwritten_partial_tile, 0.0)}, extent="tile",
             needs="odd", numbers=rows(_unwritten_partial_tile)),
    _pattern("row_zero", "zeros", "o", {"o": fill_rows(one_row(200), 0.0)}, extent="row", needs="tiles",
             numbers=rows(one_row(200))),
    _pattern("every_128th_row_zero", "zeros", "o", {"o": edit(_every_128th)}, extent="rows", needs="tiles",
             numbers=lambda _: {"rows": (127, 127), "every": 128}),
    _pattern("features_zero", "zeros", "o", {"o": fill_features(64, 0.0)}, needs="narrow-tail", extent="features",
             numbers=lambda x: {"features": (64, x.q.shape[3] - 1)}),
    _pattern("head_zero", "zeros", "o", {"o": _last_head(torch.zeros_like)}, extent="heads", needs="heads",
             numbers=_of_last_head),
    _pattern("rows_from_300_unwritten", "unwritten", "o", {"o": edit(_from_row_unwritten)}, extent="rows",
             needs="tiles", numbers=lambda x: {"rows": (300, x.q.shape[2] - 1)}),
    _pattern("heads_swapped", "heads", "o", {"o": edit(swap_heads)}, extent="heads", needs="heads",
             numbers=lambda _: {"heads": (0, 1)}),
    _pattern("other_batch_item", "batch", "o", {"o": lambda x, _: torch.cat((x[:1], x[:1], x[2:]))}, extent="heads",
             needs="batch", numbers=lambda _: {"batch": (1, 1), "from": 0}),
    _pattern("negated", "sign", "o", {"o": stored(torch.neg)}, numbers=lambda _: {"factor": -1.0}),
    _pattern("five_percent_too_large", "factor", "o", {"out": stored(lambda x: x * 1.05)},
             numbers=lambda _: {"factor": 1.05}),
    _pattern("one_percent_too_large", "factor", "o", {"out": stored(lambda x: x * 1.01)},
             numbers=lambda _: {"factor": 1.01}),
    _pattern("head_ten_percent_too_large", "factor", "o", {"out": _last_head(lambda x: x * 1.1)}, extent="heads",
             needs="heads", numbers=lambda x: {**_of_last_head(x), "factor": 1.1}),
    _pattern("blocks_transposed", "transpose", "o", {"o": _blocks_transposed}, source=f"{FLASH}/pull/2553"),
    _pattern("other_layout", "layout", "o", {"o": _other_layout}, needs="heads"),
    _pattern("element_zero", "element", "o", {"o": _element(torch.zeros_like)}, extent="element", needs="tiles",
             numbers=_element_at),
    _pattern("element_bit_flipped", "element", "o", {"o": _element(_next_exponent_bit)}, extent="element",
             needs="tiles", numbers=_element_at),
    _pattern("element_nan", "NaN", "o", {"o": _element(lambda x: torch.full_like(x, math.nan))}, extent="element",
             needs="tiles", numbers=_element_at),
    _pattern("element_inf", "NaN", "o", {"o": _element(lambda x: torch.full_like(x, math.inf))}, extent="element",
             needs="tiles", numbers=_element_at),
    _pattern("empty_rows_nan", "NaN", "o", {"out": fill_rows(_empty_rows, math.nan)}, extent="rows",
             needs="empty-rows", numbers=rows(_empty_rows), source="https://github.com/pytorch/pytorch/issues/41508"),
    _pattern("empty_rows_mean_of_v", "rows", "o", {"out": edit(_mean_of_v)}, extent="rows", needs="empty-rows",
             numbers=rows(_empty_rows)),
    _pattern("lse_base_2", "LSE base", "lse", _stored_lse(lambda x, _: x * LOG2_E),
             numbers=lambda _: {"factor": LOG2_E}, source="https://github.com/flashinfer-ai/flashinfer/issues/2113"),
    _pattern("lse_times_ln_2", "LSE base", "lse", _stored_lse(lambda x, _: x * math.log(2)),
             numbers=lambda _: {"factor": math.log(2)}, source="https://github.com/pytorch/pytorch/issues/181645"),
    _pattern("lse_of_unscaled_maximum", "LSE scale", "lse", _stored_lse(
        lambda x, s: x + row_maxima(s, "scores", "mask") * (s.natural / s.inputs.scale - s.natural))),
    _pattern("lse_without_maximum", "LSE maximum", "lse",
             _stored_lse(lambda x, s: x - row_maxima(s, "scores", "mask") * s.natural)),
    _pattern("lse_maximum_alone", "LSE row sum", "lse",
             _stored_lse(lambda _, s: row_maxima(s, "scores", "mask") * s.natural)),
    _pattern("lse_of_the_next_row", "rows", "lse", {"lse": stored(lambda x: x.roll(-1, -1))}),
    _pattern("lse_heads_swapped", "heads", "lse", {"lse": edit(swap_heads)}, extent="heads", needs="heads",
             numbers=lambda _: {"heads": (0, 1)}, source="https://github.com/vllm-project/flash-attention/pull/87"),
    _pattern("lse_off_by_ln_2", "LSE offset", "lse", {"lse": stored(lambda x: x + math.log(2))},
             numbers=lambda _: {"offset": math.log(2)}),
    _pattern("lse_one_row_off", "rows", "lse", {"lse": shift_rows(one_row(200), 1)}, extent="row", needs="tiles",
             numbers=rows(one_row(200))),
    _pattern("lse_last_tile_zero", "zeros", "lse", {"lse": fill_rows(last_tile, 0.0)}, extent="tile",
             numbers=rows(last_tile), source="https://github.com/flagos-ai/FlagGems/issues/5235"),
    _pattern("maximum_of_first_tile_alone", "row max", "o lse",
             {"tile_max": lambda x, s: x if s.step == 0 else torch.full_like(x, -math.inf)}, needs="tiles"),
)  # fmt: skip

FORWARD = (*SITES, *PATTERNS)
