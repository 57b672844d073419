"""Variants for ``study_probe`` alone, written after ``attn_diag.testing.probing.pointers`` was fixed.

Half of them imitate what a pointer is about without being it: factors of the size of a truncation, truncated rescaling,
splits and weights, a P_bar that goes the other way, an l that is exact while 1/l is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verdicts.kernels import Hook, Seen
from verdicts.planting import Defect, row_maxima, stored
from verdicts.roundings import BF16, FP16, nearest, stochastic, to_bits, truncate


def _away(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Away from zero."""
    return stochastic(x, dtype, torch.zeros_like(x), 1.0)


def _ties_away(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To nearest, ties away from zero."""
    return stochastic(x, dtype, torch.full_like(x, 0.5), 2.0**-20)


def _up(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(x < 0, truncate(x, dtype), _away(x, dtype))


@dataclass(frozen=True)
class _Rounded:
    """A value, rounded in some way to the inputs' format."""

    how: str
    bias: float = 0.0

    def __call__(self, x: Tensor, s: Seen) -> Tensor:
        dtype = s.inputs.q.dtype
        if self.how == "stochastic":
            return stochastic(x, dtype, s.uniform(x), self.bias)
        ways = {"truncated": truncate, "away": _away, "ties away": _ties_away, "up": _up}
        return ways[self.how](x, dtype)


def _o(how: Hook) -> dict[str, Hook]:
    """At O's last cast."""
    return {"o": lambda _, s: how(s["out"], s).to(s.inputs.q.dtype)}


def _probs(how: Hook) -> dict[str, Hook]:
    """At the cast of P_bar for the second product."""
    return {"probs_cast": lambda _, s: how(s["probs"], s)}


def _times(factor: float) -> Hook:
    return stored(lambda x: x * factor)


def _inverse_of_truncated(x: Tensor, s: Seen) -> Tensor:
    return 1 / truncate(1 / x, s.inputs.q.dtype)


def _site(name: str, site: str, hooks: dict[str, Hook], *, splits: int = 1, **schedule: object) -> Defect:
    kernel: dict[str, object] = {**schedule, **({"splits": splits} if splits > 1 else {})}
    return Defect(f"held out: {name}", "forward", ("o", "lse"), hooks, site=site, kernel=kernel)


HELD_OUT = (
    _site("O up", "O", _o(_Rounded("up"))),
    _site("O away from zero", "O", _o(_Rounded("away"))),
    _site("O nearest, ties away", "O", _o(_Rounded("ties away"))),
    _site("O stochastic, -0.1", "O", _o(_Rounded("stochastic", -0.1))),
    _site("O stochastic, +0.02", "O", _o(_Rounded("stochastic", 0.02))),
    _site(
        "O cut to 9 bits before", "O", {"out": stored(lambda x: (x.view(torch.int32) & ~0x7FFF).view(torch.float32))}
    ),
    _site("O times 1 - 0.0027", "factor", {"out": _times(1 - 0.0027)}),
    _site("O times 1 - 0.0004", "factor", {"out": _times(1 - 0.0004)}),
    _site("O times 1 + 0.0002", "factor", {"out": _times(1.0002)}),
    _site("old sum's factor truncated", "rescale", {"rescale": _Rounded("truncated")}),
    _site("old accumulator's factor truncated", "rescale", {"acc_rescale": _Rounded("truncated")}),
    _site("splits truncated", "split merge", {"split_out": _Rounded("truncated")}, splits=2),
    _site("splits' weights truncated", "split merge", {"merge_weights": _Rounded("truncated")}, splits=2),
    _site("P away from zero", "P̄", _probs(_Rounded("away"))),
    _site("P nearest, ties away", "P̄ to nearest", _probs(_Rounded("ties away"))),
    _site("P stochastic, -0.2", "P̄", _probs(_Rounded("stochastic", -0.2))),
    _site("P not cast", "P̄ not cast", _probs(lambda x, _: x)),
    _site(
        "P cut to 11 bits, then cast",
        "P̄",
        _probs(lambda x, s: s.cast((x.view(torch.int32) & ~0x1FFF).view(torch.float32))),
    ),
    _site("P times 1.001 for PV", "P̄", _probs(lambda x, s: s.cast(x * 1.001))),
    _site("l plus 0.02", "row sum", {"row_sum": stored(lambda x: x + 0.02)}),
    _site("l times 0.998", "row sum", {"inverse": _times(1 / 0.998), "lse": stored(lambda x: x - 0.002002)}),
    _site("l away from zero", "row sum", {"row_sum": _Rounded("away")}),
    _site("l stochastic, +0.1", "row sum", {"row_sum": _Rounded("stochastic", 0.1)}),
    _site("1/l of a truncated l", "1/l", {"inverse": _inverse_of_truncated}),
    _site("1/l away from zero", "1/l", {"inverse": _Rounded("away")}),
    _site("1/l times 1 - 0.003", "1/l", {"inverse": _times(0.997)}),
    _site("V cut to 7 bits", "V", {"v": stored(lambda x: (x.view(torch.int32) & ~0x1FFFF).view(torch.float32))}),
    _site("Q truncated to 7 bits", "q·scale", {"q": stored(lambda x: to_bits(x, 7))}),
    _site("scores truncated", "scores", {"scores": _Rounded("truncated")}),
    _site("scores in 14 bits", "scores", {"scores": stored(lambda x: to_bits(x, 14))}),
    _site("row maximum truncated", "row max", {"row_max": _Rounded("truncated")}),
    _site("S - m truncated", "exp argument", {"exp_argument": _Rounded("truncated")}),
    _site("exp times 1.001", "exp", {"probs": _times(1.001)}),
    _site("accumulator away from zero", "O accumulator", {"acc": _Rounded("away")}),
    _site("PV stochastic, -0.1", "PV", {"pv": _Rounded("stochastic", -0.1)}),
    _site("L truncated to BF16", "LSE", {"lse": stored(lambda x: truncate(x, BF16))}),
    _site("L in FP16", "LSE", {"lse": stored(lambda x: nearest(x, FP16))}),
    _site("L plus 0.001", "LSE offset", {"lse": stored(lambda x: x + 0.001)}),
    _site("splits' L truncated", "split merge", {"split_lse": _Rounded("truncated")}, splits=2),
)
"""Names and sites; "P̄ to nearest" and "P̄ not cast" are no defects. "splits truncated" was taken for O's own cast."""


def _in_last_rows(how: Hook) -> Hook:
    """[B, H, T, ...], from row 256 on."""

    def act(x: Tensor, s: Seen) -> Tensor:
        y = x.clone()
        y[:, :, 256:] = how(x, s)[:, :, 256:]
        return y

    return act


def _lse_of_truncated_max(x: Tensor, s: Seen) -> Tensor:
    top = row_maxima(s, "scores", "mask") * s.natural
    return x - top + truncate(top, BF16)


_TRUNCATED, _AWAY = _Rounded("truncated"), _Rounded("away")
_FP16_FIRST = stored(lambda x: truncate(x.clamp(-6e4, 6e4), FP16))
SECOND = (
    _site("three splits truncated", "split merge", {"split_out": _TRUNCATED}, splits=3),
    _site("splits away from zero", "split merge", {"split_out": _AWAY}, splits=2),
    _site("splits stochastic, +0.1", "split merge", {"split_out": _Rounded("stochastic", 0.1)}, splits=2),
    _site("splits up, tiles of 64", "split merge", {"split_out": _Rounded("up")}, splits=2, tile_k=64),
    _site("one tile, PV truncated", "PV", {"pv": _TRUNCATED}, tile_k=512),
    _site("one tile, accumulator truncated", "O accumulator", {"acc": _TRUNCATED}, tile_k=512),
    _site("one tile, accumulator stochastic", "O accumulator", {"acc": _Rounded("stochastic", 0.1)}, tile_k=512),
    _site("one tile, 1/l truncated", "1/l", {"inverse": _TRUNCATED}, tile_k=512),
    _site("one tile, l truncated", "row sum", {"row_sum": _TRUNCATED}, tile_k=512),
    _site("tiles of 64, l truncated", "row sum", {"row_sum": _TRUNCATED}, tile_k=64, tile_q=64),
    _site("l times 1.0005 each tile", "row sum", {"row_sum": _times(1.0005)}),
    _site("l without a thousandth, L right", "1/l", {"inverse": _times(1.001)}),
    _site("O truncated, l plus 0.02", "O and row sum", {**_o(_TRUNCATED), "row_sum": stored(lambda x: x + 0.02)}),
    _site("O truncated from row 256 on", "O in some rows", {"o": _in_last_rows(_o(_TRUNCATED)["o"])}),
    _site("O down", "O", _o(lambda x, s: -_Rounded("up")(-x, s))),
    _site("O stochastic, +0.3", "O", _o(_Rounded("stochastic", 0.3))),
    _site("O cut to FP16 first", "O", {"out": _FP16_FIRST}),
    _site("O times 1 - 0.00034", "factor", {"out": _times(1 - 0.00034)}),
    _site("O times 1 + 0.004", "factor", {"out": _times(1.004)}),
    _site("descending, P truncated", "P̄", _probs(_TRUNCATED), order="descending"),
    _site("tiles of 64, P truncated", "P̄", _probs(_TRUNCATED), tile_k=64, tile_q=64),
    _site("exp2, P truncated", "P̄", _probs(_TRUNCATED), exp="exp2 of an FMA"),
    _site("P times 1 - 2^-9", "P̄", _probs(lambda x, s: s.cast(x * (1 - 2.0**-9)))),
    _site("V times 0.998", "V", {"v": _times(0.998)}),
    _site("V truncated to 6 bits", "V", {"v": stored(lambda x: (x.view(torch.int32) & ~0x3FFFF).view(torch.float32))}),
    _site("K to 7 bits", "scores", {"k": stored(lambda x: to_bits(x, 7))}),
    _site("exp argument plus 2^-10", "exp argument", {"exp_argument": stored(lambda x: x * (1 + 2.0**-10))}),
    _site("L in BF16 from row 256 on", "LSE in some rows", {"lse": _in_last_rows(stored(lambda x: nearest(x, BF16)))}),
    _site("L truncated to FP16", "LSE", {"lse": stored(lambda x: truncate(x, FP16))}),
    _site("L of a truncated maximum", "row max in L", {"lse": _lse_of_truncated_max}),
    _site("L times 1.0001", "LSE factor", {"lse": _times(1.0001)}),
)
"""Written after that; names as above, with more schedules."""
