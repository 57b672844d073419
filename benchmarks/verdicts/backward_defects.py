"""Defects of the backward pass: roundings first, then wrong mathematics. O and LSE are a healthy kernel's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from verdicts.inputs import Inputs, in_blocks
from verdicts.kernels import LOG2_E, Hook, Plan, Seen
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
    EXP2_DEGREE_2,
    EXP2_DEGREE_3,
    FP16,
    exp2_polynomial,
    flush,
    nearest,
    stochastic,
    to_bits,
    to_fp8,
    truncate,
)

FLASH = "https://github.com/Dao-AILab/flash-attention"


def _site(
    name: str, site: str, quantities: str, hooks: dict[str, Hook], *, region: Region = every_row, needs: str = "",
) -> Defect:  # fmt: skip
    """A coarse rounding; with a region, only in its rows."""
    limited = region is not every_row
    return Defect(
        name, "backward", tuple(quantities.split()), site=site, needs=frozenset(needs.split()),
        hooks={n: on_rows(h, region) for n, h in hooks.items()} if limited else hooks,
        numbers=rows(region) if limited else lambda _: {}, extent="tile" if limited else "everywhere",
    )  # fmt: skip


def _pattern(
    name: str, pattern: str, quantities: str, hooks: dict[str, Hook] | None = None, *, numbers: Numbers | None = None,
    extent: Extent = "everywhere", needs: str = "", source: str = "", plan: Callable[[Plan], Plan] | None = None,
) -> Defect:  # fmt: skip
    """Wrong mathematics."""
    return Defect(
        name, "backward", tuple(quantities.split()), hooks or {}, pattern=pattern, numbers=numbers or (lambda _: {}),
        extent=extent, needs=frozenset(needs.split()), source=source, plans={} if plan is None else {"backward": plan},
    )  # fmt: skip


def _truncated(x: Tensor, s: Seen) -> Tensor:
    return truncate(x, s.inputs.q.dtype)


def _recast(before: str, f: Callable[[Tensor, Seen], Tensor]) -> Hook:
    """A cast that takes the value before the healthy one."""
    return lambda _, s: f(s[before], s)


def _stochastic(bias: float) -> Callable[[Tensor, Seen], Tensor]:
    return lambda x, s: stochastic(x, s.inputs.q.dtype, s.uniform(x), bias)


def _summed_in_format(_: Tensor, s: Seen) -> Tensor:
    """Delta with every product and every partial sum in the inputs' format."""
    products = s.cast(s["bwd_do"] * s["bwd_o"])
    total = torch.zeros_like(products[..., 0])
    for feature in products.unbind(-1):
        total = s.cast(total + feature)
    return total


def _group_sum_in_format(_: Tensor, s: Seen) -> Tensor:
    total = torch.zeros_like(s["dk_heads"][:, :: s.inputs.group])
    for head in in_blocks(s["dk_heads"], 1, s.inputs.group).unbind(2):
        total = s.cast(total + s.cast(head))
    return total


def _polynomial(coefficients: tuple[float, ...]) -> Hook:
    # log2 gives the exponent back to about 1e-7, far below the polynomials' error.
    return stored(lambda x: exp2_polynomial(x.log2(), coefficients))


SITES: tuple[Defect, ...] = (
    _site("delta_16bit", "delta", "dq dk", {"delta": low}),
    _site("delta_bf16", "delta", "dq dk", {"delta": stored(lambda x: nearest(x, BF16))}),
    _site("delta_truncated", "delta", "dq dk", {"delta": _truncated}),
    _site("delta_summed_in_16bit", "delta", "dq dk", {"delta": _summed_in_format}),
    _site("delta_of_fp8_o", "delta", "dq dk", {"bwd_o": stored(to_fp8)}),
    _site("bwd_scores_16bit", "scores", "dq dk dv", {"bwd_scores": low}),
    _site("bwd_scores_16bit_one_tile", "scores", "dq dk dv", {"bwd_scores": low}, region=last_tile),
    _site("bwd_lse_16bit", "LSE", "dq dk dv", {"bwd_lse": low}),
    _site("bwd_exp_degree_3", "exp", "dq dk dv", {"bwd_probs": _polynomial(EXP2_DEGREE_3)}),
    _site("bwd_exp_degree_2", "exp", "dq dk dv", {"bwd_probs": _polynomial(EXP2_DEGREE_2)}),
    _site("bwd_exp_7_bits", "exp", "dq dk dv", {"bwd_probs": stored(lambda x: to_bits(x, 7))}),
    _site("bwd_exp_10_bits", "exp", "dq dk dv", {"bwd_probs": stored(lambda x: to_bits(x, 10))}),
    _site("bwd_probs_flushed_below_2^-14", "exp", "dq dk dv", {"bwd_probs": stored(lambda x: flush(x, 2.0**-14))}),
    _site("bwd_probs_truncated", "P", "dv", {"bwd_probs_cast": _recast("bwd_probs", _truncated)}),
    _site("bwd_probs_fp8", "P", "dv", {"bwd_probs_cast": _recast("bwd_probs", lambda x, _: to_fp8(x))}),
    _site("bwd_probs_stochastic", "P", "dv", {"bwd_probs_cast": _recast("bwd_probs", _stochastic(0))}),
    _site("dp_16bit", "dP", "dq dk", {"dp": low}),
    _site("dp_truncated", "dP", "dq dk", {"dp": _truncated}),
    _site("dp_6_bits", "dP", "dq dk", {"dp": stored(lambda x: to_bits(x, 6))}),
    _site("ds_truncated", "dS", "dq dk", {"ds_cast": _recast("ds", _truncated)}),
    _site("ds_truncated_one_tile", "dS", "dq dk", {"ds_cast": _recast("ds", _truncated)}, region=last_tile),
    _site("ds_fp8", "dS", "dq dk", {"ds_cast": _recast("ds", lambda x, _: to_fp8(x))}),
    _site("ds_7_bits", "dS", "dq dk", {"ds_cast": _recast("ds", lambda x, _: to_bits(x, 7))}),
    _site("ds_stochastic", "dS", "dq dk", {"ds_cast": _recast("ds", _stochastic(0))}),
    _site("ds_stochastic_biased", "dS", "dq dk", {"ds_cast": _recast("ds", _stochastic(0.2))}),
    _site("ds_flushed_below_2^-14", "dS", "dq dk", {"ds_cast": stored(lambda x: flush(x, 2.0**-14))}),
    _site("dq_tile_16bit", "dQ accumulator", "dq", {"dq_tile": low}),
    _site("dq_acc_16bit", "dQ accumulator", "dq", {"dq_acc": low}),
    _site("dq_acc_16bit_one_tile", "dQ accumulator", "dq", {"dq_acc": low}, region=last_tile),
    _site("dq_acc_truncated", "dQ accumulator", "dq", {"dq_acc": _truncated}),
    _site("dk_acc_16bit", "dK accumulator", "dk", {"dk_acc": low}),
    _site("dv_acc_16bit", "dV accumulator", "dv", {"dv_acc": low}),
    _site("dv_acc_truncated", "dV accumulator", "dv", {"dv_acc": _truncated}),
    _site("dq_truncated", "dQ", "dq", {"dq_out": _truncated}),
    _site("dq_stochastic", "dQ", "dq", {"dq_out": _stochastic(0)}),
    _site("dk_truncated", "dK", "dk", {"dk_heads": _truncated}),
    _site("dv_truncated", "dV", "dv", {"dv_heads": _truncated}),
    _site("dv_stochastic_biased", "dV", "dv", {"dv_heads": _stochastic(0.2)}),
    _site("dk_summed_in_16bit", "group sum", "dk", {"dk_sum": _group_sum_in_format}, needs="gqa"),
    _site("cap_slope_16bit", "softcap", "dq dk", {"cap_slope": low}, needs="softcap"),
)


def _drop_middle(plan: Plan) -> Plan:
    tiles = sorted(plan[-1])
    return [*plan[:-1], [j for i, j in enumerate(tiles) if i != len(tiles) // 2]]


def _future_key(x: Tensor, s: Seen) -> Tensor:
    row, key = s.rows[..., :, None], s.keys[..., None, :]
    return x | ((key == row + s.inputs.diagonal + 1) & (key < s.inputs.k.shape[2]) & (row < s.inputs.q.shape[2]))


def _unmasked_last_tile(x: Tensor, s: Seen) -> Tensor:
    row, key = s.rows[..., :, None], s.keys[..., None, :]
    inside = (row < s.inputs.q.shape[2]) & (key < s.inputs.k.shape[2])
    return x | ((row >= last_tile(s.inputs)[0]) & inside)


def _without_padding(x: Tensor, s: Seen) -> Tensor:
    return replace(s.inputs, key_mask=None).visible(s.rows, s.keys).expand_as(x)


def _wider_window(_: Tensor, s: Seen) -> Tensor:
    assert s.inputs.window is not None
    return replace(s.inputs, window=(s.inputs.window[0] + 1, s.inputs.window[1])).visible(s.rows, s.keys)


def _unnormalised(x: Tensor, s: Seen) -> Tensor:
    """exp(S - m) where exp(S - LSE) is meant: each row l times too large."""
    highest = row_maxima(s, "bwd_scores", "bwd_mask")
    total = (s["bwd_lse"] - highest).exp()
    by_row = torch.nn.functional.pad(total, (0, int(s.rows.max()) + 1 - total.shape[-1]), value=1.0)
    return x * by_row[:, :, s.rows][..., None].nan_to_num(1.0)


def _two_tiles_of_delta(x: Tensor, s: Seen) -> Tensor:
    """Every tile but the first reads the delta of the tile before it."""
    y = x.clone()
    y[..., 128:] = x[..., : x.shape[-1] - 128]
    return y if s.inputs.q.shape[2] > 128 else x


def _partial_features(_: Tensor, s: Seen) -> Tensor:
    return (s["bwd_do"] * s["bwd_o"])[..., :64].sum(-1)


def _transposed_tiles(_: Tensor, s: Seen) -> Tensor:
    """Each tile's dS transposed before it multiplies K."""
    keys = s["bwd_k"][:, :, s.keys.clamp(max=s.inputs.k.shape[2] - 1)]
    keys = keys * (s.keys < s.inputs.k.shape[2])[..., None]
    ds = s["ds_cast"]
    return ds.mT @ keys if ds.shape[-1] == ds.shape[-2] else ds.flip(-1) @ keys


def _dropped_adds(name: str, share: float) -> Hook:
    """A row's share of a tile is lost now and then."""

    def act(x: Tensor, s: Seen) -> Tensor:
        return x.masked_fill(s.uniform(x[..., :1]) < share, 0)

    assert name.endswith("_tile")
    return act


def _lost_first_add(x: Tensor, s: Seen) -> Tensor:
    """What an earlier call left in the accumulator is still there: 2 % of the rows begin with it."""
    if s.step:
        return x
    stale = s.normal(x) * x.std()
    return torch.where(s.uniform(x[..., :1]) < 0.02, x + stale, x)


def _not_zeroed(x: Tensor, s: Seen) -> Tensor:
    """The accumulator of the last tile was never cleared."""
    return x + s.normal(x) * x.std() if s.step == 0 else x


def _last_tile_of_pairs_missing(x: Tensor, s: Seen) -> Tensor:
    """The last query tile adds nothing."""
    return x.masked_fill((s.rows[:, 0] >= last_tile(s.inputs)[0])[:, None, None], 0)


def _first_of_pairs_missing(x: Tensor, s: Seen) -> Tensor:
    """The first key tile adds nothing to the last query tile."""
    lost = (s.rows[:, 0] >= last_tile(s.inputs)[0]) & (s.keys[:, 0] == 0)
    return x.masked_fill(lost[:, None, None], 0)


def _first_of_pairs_twice(x: Tensor, s: Seen) -> Tensor:
    twice = (s.rows[:, 0] >= last_tile(s.inputs)[0]) & (s.keys[:, 0] == 0)
    return torch.where(twice[:, None, None], 2 * x, x)


def _members(x: Tensor, s: Seen, keep: Callable[[int, int], float]) -> Tensor:
    """Each query head's share times what ``keep`` gives for its number in the group and the group's size."""
    group = s.inputs.group
    factors = torch.tensor([keep(h % group, group) for h in range(x.shape[1])], device=x.device)
    return x * factors[:, None, None]


def _only_last(x: Tensor, s: Seen) -> Tensor:
    return _members(x, s, lambda h, group: float(h == group - 1))


def _first_twice(x: Tensor, s: Seen) -> Tensor:
    return _members(x, s, lambda h, _: 2.0 if h == 0 else 1.0)


def _mean(x: Tensor, s: Seen) -> Tensor:
    return _members(x, s, lambda _, group: 1 / group)


def _heads_of_another_group(x: Tensor, _: Seen) -> Tensor:
    """Each key head takes its neighbour's query heads."""
    return x.roll(1, 1)


def _unrelated_then_zero(y: Tensor, _: Inputs) -> None:
    """What flash-attn-4 returns for D = 72: the first 64 rows right, others mixed up, the last 64 never written."""
    t = y.shape[2]
    order = torch.randperm(t - 128, generator=torch.Generator().manual_seed(3)).to(y.device)
    y[:, :, 64 : t - 64] = y[:, :, 64 : t - 64][:, :, order].flip(-1)
    y[:, :, t - 64 :] = 0


def _stale_columns(y: Tensor, x: Inputs) -> None:
    """Features past the last multiple of 16 carry another row's values."""
    first = x.q.shape[3] // 16 * 16
    y[..., first:] = y[..., first:].roll(7, 2) * 1.5


def _columns_misplaced(y: Tensor, _: Inputs) -> None:
    half = y.shape[-1] // 2
    y[..., half:] = y[..., half:].roll(half // 2, -1)


def _last_head_negated(y: Tensor, _: Inputs) -> None:
    y[:, -1] = -y[:, -1]


def _element_times_256(y: Tensor, _: Inputs) -> None:
    y[-1, -1, 200, 17] *= 256


def _element_zero(y: Tensor, _: Inputs) -> None:
    y[-1, -1, 200, 17] = 0


def _nan_from_empty_rows(y: Tensor, x: Inputs) -> None:
    y[:, :, : x.q.shape[2] - x.k.shape[2]] = math.nan


def _element_at(x: Inputs) -> dict[str, object]:
    return {"heads": (x.q.shape[1] - 1,) * 2, "rows": (200, 200), "features": (17, 17)}


def _element_of_dv(x: Inputs) -> dict[str, object]:
    return {"heads": (x.k.shape[1] - 1,) * 2, "keys": (200, 200), "features": (17, 17)}


def _empty_rows(x: Inputs) -> dict[str, object]:
    return {"rows": (0, x.q.shape[2] - x.k.shape[2] - 1)}


def _tail_features(x: Inputs) -> dict[str, object]:
    return {"features": (64, x.q.shape[3] - 1)}


def _factor(value: float) -> Numbers:
    return lambda _: {"factor": value}


def _times(value: float) -> Hook:
    return stored(lambda x: x * value)


def _unscale(x: Tensor, s: Seen) -> Tensor:
    return x / s.inputs.scale


def _scale_again(x: Tensor, s: Seen) -> Tensor:
    return x * s.inputs.scale


def _by_scale(power: int) -> Numbers:
    return lambda x: {"factor": x.scale**power}


def _dk_instead(_: Tensor, s: Seen) -> Tensor:
    return s["dk"]


def _key_tile(_: Inputs) -> dict[str, object]:
    return {"keys": (128, 255)}


PATTERNS = (
    _pattern("delta_zero", "delta", "dq dk", {"delta": stored(torch.zeros_like)}, numbers=_factor(0.0)),
    _pattern("delta_negated", "delta", "dq dk", {"delta": stored(torch.neg)}, numbers=_factor(-1.0)),
    _pattern("delta_scaled", "delta", "dq dk", {"delta": _scale_again}, numbers=_by_scale(1)),
    _pattern("delta_twice", "delta", "dq dk", {"delta": _times(2)}, numbers=_factor(2.0)),
    _pattern("delta_of_the_next_row", "delta", "dq dk", {"delta": stored(lambda x: x.roll(-1, -1))}),
    _pattern("delta_of_the_tile_before", "delta", "dq dk", {"delta": _two_tiles_of_delta}, needs="tiles"),
    _pattern("delta_of_another_head", "delta", "dq dk", {"delta": edit(swap_heads)}, needs="heads", extent="heads",
             numbers=lambda _: {"heads": (0, 1)}),
    _pattern("delta_last_tile_zero", "delta", "dq dk", {"delta": fill_rows(last_tile, 0.0)}, extent="tile",
             numbers=rows(last_tile), source=f"{FLASH}/pull/2481"),
    _pattern("delta_one_row_zero", "delta", "dq dk", {"delta": fill_rows(one_row(200), 0.0)}, extent="row",
             needs="tiles", numbers=rows(one_row(200))),
    _pattern("delta_without_last_features", "delta", "dq dk", {"delta": _partial_features}, needs="narrow-tail",
             numbers=_tail_features),
    _pattern("do_last_tile_zero", "rows", "dq dk dv", {"bwd_do": fill_rows(last_tile, 0.0)}, extent="tile",
             numbers=rows(last_tile)),
    _pattern("do_row_copied", "copy", "dq dk dv", {"bwd_do": shift_rows(one_row(200), 1)}, extent="row", needs="tiles",
             numbers=rows(one_row(200))),
    _pattern("bwd_q_tile_copied", "copy", "dq dk dv", {"bwd_q": shift_rows(second_tile, 128)}, extent="tile",
             needs="tiles", numbers=rows(second_tile)),
    _pattern("bwd_k_tile_copied", "copy", "dq dk dv", {"bwd_k": shift_rows(second_tile, 128)}, extent="tile",
             needs="tiles", numbers=_key_tile),
    _pattern("bwd_v_tile_copied", "copy", "dq dk", {"bwd_v": shift_rows(second_tile, 128)}, extent="tile",
             needs="tiles", numbers=_key_tile),
    _pattern("bwd_v_without_last_features", "features", "dq dk", {"bwd_v": fill_features(64, 0.0)},
             needs="narrow-tail", numbers=_tail_features,
             source="https://github.com/XunhaoLai/native-sparse-attention-triton/issues/27"),
    _pattern("bwd_o_of_the_next_row", "delta", "dq dk", {"bwd_o": stored(lambda x: x.roll(-1, 2))}),
    _pattern("bwd_missing_tile", "keys missing", "dq dk dv", plan=_drop_middle, extent="tile", needs="tiles",
             numbers=rows(last_tile)),
    _pattern("bwd_future_key_seen", "mask", "dq dk dv", {"bwd_mask": _future_key}, needs="causal"),
    _pattern("bwd_causal_unmasked_last_tile", "mask", "dq dk dv", {"bwd_mask": _unmasked_last_tile}, extent="tile",
             needs="causal tiles", numbers=rows(last_tile)),
    _pattern("bwd_padding_ignored", "key padding", "dq dk dv", {"bwd_mask": _without_padding}, needs="padding full"),
    _pattern("bwd_window_one_wider", "window", "dq dk dv", {"bwd_mask": _wider_window}, needs="window",
             source="https://github.com/meta-pytorch/MSLK/pull/263"),
    _pattern("bwd_scale_of_d_plus_1", "scale", "dq dk dv",
             {"bwd_scale": lambda x, s: torch.full_like(x, (s.inputs.q.shape[3] + 1) ** -0.5)},
             numbers=lambda x: {"factor": (x.q.shape[3] + 1) ** -0.5 / x.scale}),
    _pattern("bwd_lse_in_base_2", "LSE base", "dq dk dv", {"bwd_lse": _times(LOG2_E)}, numbers=_factor(LOG2_E)),
    _pattern("bwd_lse_of_the_next_row", "rows", "dq dk dv", {"bwd_lse": stored(lambda x: x.roll(-1, -1))}),
    _pattern("softcap_derivative_forgotten", "softcap", "dq dk", {"cap_slope": stored(torch.ones_like)},
             needs="softcap"),
    _pattern("softcap_slope_squared", "softcap", "dq dk", {"cap_slope": stored(torch.square)}, needs="softcap"),
    _pattern("dv_not_normalised", "factor", "dv", {"bwd_probs_cast": _unnormalised}),
    _pattern("ds_negated", "sign", "dq dk", {"ds": stored(torch.neg)}, numbers=_factor(-1.0)),
    _pattern("ds_without_probs", "factor", "dq dk", {"ds": lambda x, s: x / s["bwd_probs"].clamp(min=1e-6)}),
    _pattern("ds_transposed", "transpose", "dq", {"dq_tile": _transposed_tiles}),
    _pattern("dq_without_scale", "scale", "dq", {"dq_out": _unscale}, numbers=_by_scale(-1)),
    _pattern("dq_scaled_twice", "scale", "dq", {"dq_out": _scale_again}, numbers=_by_scale(1)),
    _pattern("dk_without_scale", "scale", "dk", {"dk_heads": _unscale}, numbers=_by_scale(-1)),
    _pattern("dk_in_base_2", "factor", "dk", {"dk_heads": _times(LOG2_E)}, numbers=_factor(LOG2_E)),
    _pattern("dq_five_percent_too_large", "factor", "dq", {"dq_out": _times(1.05)}, numbers=_factor(1.05)),
    _pattern("dv_one_percent_too_large", "factor", "dv", {"dv_heads": _times(1.01)}, numbers=_factor(1.01)),
    _pattern("dq_negated", "sign", "dq", {"dq": stored(torch.neg)}, numbers=_factor(-1.0)),
    _pattern("dq_last_head_negated", "sign", "dq", {"dq": edit(_last_head_negated)}, extent="heads", needs="heads",
             numbers=lambda x: {"heads": (x.q.shape[1] - 1,) * 2}),
    _pattern("dq_zero", "zeros", "dq", {"dq": stored(torch.zeros_like)}, numbers=_factor(0.0)),
    _pattern("dk_zero", "zeros", "dk", {"dk": stored(torch.zeros_like)}, numbers=_factor(0.0)),
    _pattern("dv_zero", "zeros", "dv", {"dv": stored(torch.zeros_like)}, numbers=_factor(0.0)),
    _pattern("dq_last_tile_zero", "zeros", "dq", {"dq": fill_rows(last_tile, 0.0)}, extent="tile",
             numbers=rows(last_tile)),
    _pattern("dq_row_zero", "zeros", "dq", {"dq": fill_rows(one_row(200), 0.0)}, extent="row", needs="tiles",
             numbers=rows(one_row(200))),
    _pattern("dk_row_zero", "zeros", "dk", {"dk": fill_rows(one_row(200), 0.0)}, extent="row", needs="tiles",
             numbers=lambda _: {"keys": (200, 200)}),
    _pattern("dv_second_tile_zero", "zeros", "dv", {"dv": fill_rows(second_tile, 0.0)}, extent="tile", needs="tiles",
             numbers=_key_tile),
    _pattern("dq_features_zero", "zeros", "dq", {"dq": fill_features(64, 0.0)}, needs="narrow-tail",
             extent="features", numbers=_tail_features),
    _pattern("dq_unrelated_then_zero", "unwritten", "dq", {"dq": edit(_unrelated_then_zero)}, extent="rows",
             needs="tiles narrow-tail", source=f"{FLASH}/pull/2896",
             numbers=lambda x: {"rows": (64, x.q.shape[2] - 1), "zeros": (x.q.shape[2] - 64, x.q.shape[2] - 1)}),
    _pattern("dq_stale_features", "features", "dq", {"dq": edit(_stale_columns)}, extent="features",
             needs="narrow-tail", numbers=_tail_features, source=f"{FLASH}/pull/2896"),
    _pattern("dv_columns_misplaced", "features", "dv", {"dv": edit(_columns_misplaced)}, extent="features",
             numbers=lambda x: {"features": (x.q.shape[3] // 2, x.q.shape[3] - 1)}, source=f"{FLASH}/issues/2552"),
    _pattern("dq_tile_missing", "keys missing", "dq", {"dq_tile": _first_of_pairs_missing}, extent="tile",
             needs="tiles", numbers=lambda x: {"rows": last_tile(x), "keys": (0, 127)}),
    _pattern("dq_tile_counted_twice", "keys counted twice", "dq", {"dq_tile": _first_of_pairs_twice}, extent="tile",
             needs="tiles", numbers=lambda x: {"rows": last_tile(x), "keys": (0, 127)}),
    _pattern("dk_last_query_tile_missing", "rows missing", "dk", {"dk_tile": _last_tile_of_pairs_missing},
             numbers=rows(last_tile)),
    _pattern("dv_last_query_tile_missing", "rows missing", "dv", {"dv_tile": _last_tile_of_pairs_missing},
             numbers=rows(last_tile)),
    _pattern("dq_dropped_adds", "race", "dq", {"dq_tile": _dropped_adds("dq_tile", 0.002)}, extent="rows",
             source=f"{FLASH}/issues/359"),
    _pattern("dk_dropped_adds", "race", "dk", {"dk_tile": _dropped_adds("dk_tile", 0.002)}, extent="rows"),
    _pattern("dv_dropped_adds", "race", "dv", {"dv_tile": _dropped_adds("dv_tile", 0.002)}, extent="rows"),
    _pattern("dq_accumulator_not_cleared", "unwritten", "dq", {"dq_acc": on_rows(_not_zeroed, last_tile)},
             extent="tile", numbers=rows(last_tile), source=f"{FLASH}/pull/2896"),
    _pattern("dq_accumulator_partly_stale", "unwritten", "dq", {"dq_acc": _lost_first_add}, extent="rows"),
    _pattern("dk_accumulator_not_cleared", "unwritten", "dk", {"dk_acc": _lost_first_add}, extent="rows"),
    _pattern("dq_heads_swapped", "heads", "dq", {"dq": edit(swap_heads)}, extent="heads", needs="heads",
             numbers=lambda _: {"heads": (0, 1)}),
    _pattern("dk_of_last_query_head_alone", "group", "dk", {"dk_heads": _only_last}, needs="gqa",
             source="https://github.com/marin-community/levanter/pull/449"),
    _pattern("dv_of_last_query_head_alone", "group", "dv", {"dv_heads": _only_last}, needs="gqa",
             source="https://github.com/marin-community/levanter/pull/449"),
    _pattern("dk_first_query_head_twice", "group", "dk", {"dk_heads": _first_twice}, needs="gqa"),
    _pattern("dv_mean_over_group", "group", "dv", {"dv_heads": _mean}, needs="gqa",
             numbers=lambda x: {"factor": 1 / x.group}),
    _pattern("dk_heads_of_another_group", "group", "dk", {"dk_heads": _heads_of_another_group}, needs="gqa-heads"),
    _pattern("dv_is_dk", "gradient of another tensor", "dv", {"dv": _dk_instead}),
    _pattern("dk_of_the_next_key", "rows", "dk", {"dk": stored(lambda x: x.roll(-1, 2))}),
    _pattern("dq_row_copied", "copy", "dq", {"dq": shift_rows(one_row(200), 1)}, extent="row", needs="tiles",
             numbers=rows(one_row(200))),
    _pattern("dq_tile_copied", "copy", "dq", {"dq": shift_rows(second_tile, 128)}, extent="tile", needs="tiles",
             numbers=rows(second_tile)),
    _pattern("dv_other_batch_item", "batch", "dv", {"dv": lambda x, _: torch.cat((x[:1], x[:1], x[2:]))},
             extent="heads", needs="batch", numbers=lambda _: {"batch": (1, 1), "from": 0}),
    _pattern("dq_element_times_256", "element", "dq", {"dq": edit(_element_times_256)}, extent="element",
             needs="tiles", numbers=_element_at),
    _pattern("dv_element_zero", "element", "dv", {"dv": edit(_element_zero)}, extent="element", needs="tiles",
             numbers=_element_of_dv),
    _pattern("dq_empty_rows_nan", "NaN", "dq", {"dq": edit(_nan_from_empty_rows)}, extent="rows", needs="empty-rows",
             numbers=_empty_rows),
    _pattern("dk_nan", "NaN", "dk", {"dk": fill_rows(one_row(200), math.nan)}, extent="row", needs="tiles",
             numbers=lambda _: {"keys": (200, 200)}),
    _pattern("dp_fp16_overflow", "NaN", "dq dk", {"dp": stored(lambda x: nearest(x * 2.0**12, FP16) / 2.0**12)}),
)  # fmt: skip

BACKWARD = (*SITES, *PATTERNS)
