"""From a capture to one float64 head: exact conversion, and the rows that NaN or Inf make unusable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.joined import equal_bits
from attn_diag.captures.sources import KEYED
from attn_diag.errors import InputError
from attn_diag.head.transfer import on_device
from attn_diag.reference import Alibi, AttentionHead, FloatFormat, Masking, RowBlock, format_of, round_nearest_even
from attn_diag.reference.heads import stacked


class NonFiniteCensus:
    """NaN and Inf met while reading: how many, and the first position, of every tensor."""

    def __init__(self) -> None:
        # (tensor, batch, head) -> (count, first position in the inner layout)
        self._heads: dict[tuple[str, int, int], tuple[int, tuple[int, ...]]] = {}

    def add(self, name: str, batch: int, head: int, values: Tensor) -> Tensor | None:
        """Record the non-finite values of one head; returns where ``values`` is not finite (bool), None for nowhere."""
        (finite,) = all_finite(values[None])
        return None if finite else self.add_broken(name, batch, head, values)

    def add_broken(self, name: str, batch: int, head: int, values: Tensor) -> Tensor:
        """Record the non-finite values of one head that has some; returns where they are, bool."""
        bad = ~values.isfinite()
        self.record(name, batch, head, bad)
        return bad

    def record(self, name: str, batch: int, head: int, bad: Tensor) -> None:
        """Record the values of one head that ``bad`` (bool, with at least one True) points out."""
        self._heads[name, batch, head] = int(bad.sum()), (batch, head, *bad.nonzero()[0].tolist())

    def merge(self, other: NonFiniteCensus) -> None:
        """Take over another census; a head that both have seen counts once."""
        self._heads |= other._heads

    def totals(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Count and first position by tensor."""
        found: dict[str, tuple[int, tuple[int, ...]]] = {}
        for (name, _, _), (count, first) in self._heads.items():
            before, earliest = found.get(name, (0, first))
            found[name] = before + count, min(earliest, first)
        return found


# Additive masks write numbers down to the format's lowest for a hidden key; no score of a head that runs is so low.
_HIDDEN = -1000.0


@dataclass
class HeadInputs:
    """One head of a capture in float64, non-finite values replaced by 0 and their rows marked."""

    head: AttentionHead
    """q, k, v and dO."""
    unusable: Tensor
    """Rows whose own q or dO is not finite, bool [Tq]; ``mark_rows`` adds those that attend to such a key."""
    bad_keys: Tensor
    """Indices of the keys with a NaN or Inf in k or v."""
    input_format: FloatFormat
    """The format of q as stored."""
    bad_mask: Tensor | None = None
    """Where an additive mask is NaN or +Inf, bool [Tq, Tk]; None for nowhere."""
    sound: bool = False
    """Whether all that was read is finite, so that no row is unusable."""
    nan_keys: Tensor | None = None
    """Indices of the keys with NaN in k, or NaN or Inf in v; None where there is none."""
    nan_rows: Tensor | None = None
    """Rows whose q holds NaN, bool [Tq]; ``mark_rows`` adds those that see one of ``nan_keys``. None: neither is."""

    @property
    def marks_rows(self) -> bool:
        """Whether single scores must tell which rows attend to NaN or Inf."""
        return bool(len(self.bad_keys)) or self.bad_mask is not None

    def mark_rows(self, block: RowBlock) -> None:
        """Mark the rows of ``block`` that attend to a bad key, or to any key by way of a bad mask."""
        if len(self.bad_keys):
            inside = self.bad_keys[(self.bad_keys >= block.keys.start) & (self.bad_keys < block.keys.stop)]
            self.unusable[block.rows] |= (block.scores[:, inside - block.keys.start] > -torch.inf).any(1)
        if self.nan_keys is not None and self.nan_rows is not None:
            inside = self.nan_keys[(self.nan_keys >= block.keys.start) & (self.nan_keys < block.keys.stop)]
            self.nan_rows[block.rows] |= (block.scores[:, inside - block.keys.start] > _HIDDEN).any(1)
        if self.bad_mask is not None:
            bad = self.bad_mask[block.rows, block.keys]
            self.unusable[block.rows] |= (bad & (block.scores > -torch.inf)).any(1)


def all_finite(several: Tensor) -> list[bool]:
    """Whether every value of each of N tensors [N, ...] is finite: by one sum, much cheaper than looking at each."""
    # An overflowing sum of finite values needs the second look.
    sums = several.flatten(1).sum(1).tolist()
    return [math.isfinite(s) or bool(one.isfinite().all()) for s, one in zip(sums, several, strict=True)]


class HeadTensors:
    """Tensors of some heads of a capture as float64 on a device; those of one name are copied, and looked at, at once.

    Query heads that share a key head share its tensors: they are not to be changed.
    """

    def __init__(
        self,
        capture: Capture,
        places: Sequence[tuple[int, int]],
        device: torch.device,
        together: Sequence[str] = (),
    ) -> None:
        """``places``: indices of the batch item and the query head of each. ``together``: names that are all copied
        once one of them is asked for."""
        self.capture, self.device, self.places = capture, device, frozenset(places)
        self._group = capture.q_heads // capture.kv_heads
        self._places, self._together = places, [name for name in together if name in capture.tensors]
        self._found: dict[str, dict[tuple[int, int], tuple[Tensor, bool]]] = {}

    @cached_property
    def no_keys(self) -> Tensor:
        """Indices of no keys."""
        return torch.zeros(0, dtype=torch.int64, device=self.device)

    def kv_head(self, head: int) -> int:
        """The key head of a query head."""
        return head // self._group

    def read(self, name: str, batch: int, head: int) -> tuple[Tensor, bool] | None:
        """As ``read_float64``, of a query head, and whether all of it is finite; None where the capture lacks it."""
        if name not in self.capture.tensors:
            return None
        if name not in self._found:
            self._read(self._together if name in self._together else [name])
        return self._found[name][batch, self.kv_head(head) if _by_key_head(name) else head]

    def _read(self, names: Sequence[str]) -> None:
        stored: dict[tuple[str, int, int], Tensor] = {}
        for name in names:
            self._found[name] = {}
            for batch, head in self._places:
                place = batch, self.kv_head(head) if _by_key_head(name) else head
                if (name, *place) not in stored and (tensor := self.capture.read(name, *place)) is not None:
                    stored[name, *place] = tensor
        alike: dict[object, list[tuple[str, int, int]]] = {}  # documents differ in length
        for key, tensor in stored.items():
            is_lse = key[0].rpartition(".")[2] == "lse"
            alike.setdefault((tensor.shape, tensor.dtype, is_lse), []).append(key)
        for (*_, is_lse), keys in alike.items():  # type: ignore[misc]
            # Each name lies in memory as it was captured, and goes to the device from there.
            by_name = groupby(keys, key=itemgetter(0))
            parts = [stacked([stored[key] for key in of_name]) for _, of_name in by_name]
            values = _as_float64(parts, self.device)
            if is_lse:
                values = stacked([_natural(x, self.capture, h) for x, (_, _, h) in zip(values, keys, strict=True)])
            for (name, batch, head), one, finite in zip(keys, values.unbind(), all_finite(values), strict=True):
                self._found[name][batch, head] = one, finite


def _by_key_head(name: str) -> bool:
    return name.rpartition(".")[2] in ("k", "v", *KEYED)


def read_float64(capture: Capture, name: str, batch: int, head: int, device: torch.device) -> Tensor | None:
    """One head of a tensor as float64 on ``device``; None where the capture lacks it.

    Exactly as stored, but for an LSE to base 2, which becomes a natural logarithm, and one that lacks the sink.
    """
    stored = capture.read(name, batch, head)
    if stored is None:
        return None
    values = _as_float64([stored], device)
    return _natural(values, capture, head) if name.rpartition(".")[2] == "lse" else values


def _as_float64(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors of one dtype, one after the other."""
    # FP8 has no direct conversion to float64; both steps are exact.
    stored = [part.float() if part.dtype.itemsize == 1 else part for part in parts]
    # A narrow tensor travels faster than its float64 copy; who owns pinned memory is answered after all that waits for
    # it.
    there = [on_device(part, device) for part in stored]
    return (there[0] if len(there) == 1 else torch.cat(there)).double().contiguous()


def _natural(lse: Tensor, capture: Capture, head: int) -> Tensor:
    """An LSE as stored, in the natural logarithm and with the sink."""
    lse = lse * math.log(2) if capture.metadata.lse_base == "2" else lse
    sink = capture.sink(head) if capture.metadata.lse_sink == "excluded" else None
    return lse if sink is None else torch.logaddexp(lse, lse.new_tensor(sink))


def read_outputs(
    capture: Capture, observation: str, batch: int, head: int, device: torch.device, census: NonFiniteCensus
) -> tuple[dict[str, Tensor], dict[str, FloatFormat]]:
    """What an observation holds of one query head: o, lse (natural logarithm), delta and dq, as far as captured.

    Returns:
        The tensors in float64 and the formats in which they were stored, both by name.
    """
    outputs, formats, _ = outputs_of(HeadTensors(capture, [(batch, head)], device), observation, batch, head, census)
    return outputs, formats


def outputs_of(
    tensors: HeadTensors, observation: str, batch: int, head: int, census: NonFiniteCensus
) -> tuple[dict[str, Tensor], dict[str, FloatFormat], frozenset[str]]:
    """As ``read_outputs``, of one of several heads; and the names of the outputs that are finite."""
    capture, finite = tensors.capture, set[str]()
    outputs: dict[str, Tensor] = {}
    formats: dict[str, FloatFormat] = {}
    for output in capture.observations[observation]:
        if output not in ("o", "lse", "delta", "dq"):
            continue
        key = capture.key(observation, output)
        found = tensors.read(key, batch, head)
        assert found is not None
        tensor, sound = found
        if sound:
            finite.add(output)
        # A fully masked row's LSE is rightly -inf, and is left out with its row.
        elif output != "lse":
            census.add_broken(key, batch, head, tensor)
        outputs[output], formats[output] = tensor, _made_in(tensor, capture, key)
    return outputs, formats, frozenset(finite)


def _made_in(values: Tensor, capture: Capture, key: str) -> FloatFormat:
    """The format in which a kernel made an output: that of its tensor, or its inputs' where a wider tensor (such as
    ``o.float()``) holds numbers of that alone."""
    stored, inputs = format_of(capture.tensors[key].dtype), capture.tensors["q"].dtype
    if inputs not in (torch.bfloat16, torch.float16) or stored.precision <= format_of(inputs).precision:
        return stored
    rounded = round_nearest_even(values, format_of(inputs))
    return format_of(inputs) if bool(((rounded == values) | ~values.isfinite()).all()) else stored


def read_key_outputs(
    capture: Capture, observation: str, batch: int, kv_head: int, device: torch.device, census: NonFiniteCensus
) -> tuple[dict[str, Tensor], dict[str, FloatFormat], dict[str, int]]:
    """What an observation holds of one key head: dk, dv and dkv, as far as captured and finite.

    Returns:
        The tensors in float64, the formats in which they were stored, and of tensors that are not finite the number of
        keys with NaN or Inf, all by name.

    Raises:
        InputError: There is a dkv, and v is not k in its first features.
    """
    outputs: dict[str, Tensor] = {}
    formats: dict[str, FloatFormat] = {}
    broken: dict[str, int] = {}
    for output in KEYED:
        key = capture.key(observation, output)
        tensor = read_float64(capture, key, batch, kv_head, device)
        if tensor is None:
            continue
        if output == "dkv":
            require_shared(capture, batch, kv_head)
        if (bad := census.add(key, batch, kv_head, tensor)) is not None:
            broken[output] = int(bad.any(1).sum())
        else:
            outputs[output], formats[output] = tensor, _made_in(tensor, capture, key)
    return outputs, formats, broken


def require_shared(capture: Capture, batch: int, kv_head: int) -> None:
    """Raise InputError where v is not k in its first features: a sum of both gradients is nobody's then."""
    k, v = (capture.read(name, batch, kv_head) for name in "kv")
    assert k is not None
    assert v is not None
    if not equal_bits(k[:, : v.shape[1]], v):
        raise InputError(
            f"{capture.source}: dkv is the gradient of one latent, but v is not k[..., :{v.shape[1]}]; give dk and dv"
        )


def _read_mask(
    capture: Capture, batch: int, head: int, device: torch.device, census: NonFiniteCensus
) -> tuple[Tensor | None, Tensor | None]:
    """The mask of one head, NaN and +Inf replaced by 0, and where those were (None: nowhere); [Tq, Tk], expanded.

    -Inf is how an additive mask leaves a key out. +Inf has no meaning: it makes NaN of every probability.
    """
    found = capture.mask(batch, head)
    if found is None:
        return None, None
    mask, index = found[0].to(device), found[1]
    if mask.dtype.itemsize == 1 and mask.dtype != torch.bool:
        mask = mask.float()  # torch adds no FP8 numbers
    shape = capture.lengths(batch)
    # NaN and +Inf are what keeps the maximum from lying below +Inf.
    if mask.dtype == torch.bool or bool(mask.amax() < torch.inf):
        return mask.expand(shape), None
    bad = mask.isnan() | (mask == torch.inf)
    census.record("mask", *index, bad)
    return mask.masked_fill(bad, 0.0).expand(shape), bad.expand(shape)


def _read_sink(capture: Capture, batch: int, head: int, census: NonFiniteCensus, bad_rows: Tensor) -> float | None:
    """The logit of a head's sink; None without one, as -Inf is. NaN and +Inf spoil every row."""
    sink = capture.sink(head)
    if sink is None or sink == -math.inf:
        return None
    if math.isfinite(sink):
        return sink
    census.record("sinks", batch, head, bad_rows.new_ones(1))
    bad_rows.fill_(True)
    return None


# Distances up to it times a slope of fp32 are exact in float64.
_FARTHEST = 2**29


def _read_alibi(capture: Capture, batch: int, head: int, census: NonFiniteCensus, bad_rows: Tensor) -> Alibi | None:
    """The bias by distance of a head; None without one, as with a slope of 0. NaN and Inf spoil every row."""
    slope = capture.alibi_slope(batch, head)
    if not slope:
        return None
    if not math.isfinite(slope):
        census.record("alibi_slopes", batch, head, bad_rows.new_ones(1))
        bad_rows.fill_(True)
        return None
    positions = capture.q_positions(batch)
    if positions is not None and int(positions.abs().max()) > _FARTHEST:
        raise InputError(f"{capture.source}: q_positions beyond {_FARTHEST} are too far for ALiBi; correct them")
    return Alibi(slope, capture.metadata.alibi_origin)


def read_head(
    capture: Capture, batch: int, head: int, device: torch.device, census: NonFiniteCensus | None = None
) -> HeadInputs:
    """Read q, k, v and dO of one query head, its key head included; NaN and Inf are added to ``census``."""
    tensors = HeadTensors(capture, [(batch, head)], device, ("q", "k", "v", "do"))
    return inputs_of(tensors, batch, head, census or NonFiniteCensus())


def inputs_of(tensors: HeadTensors, batch: int, head: int, census: NonFiniteCensus) -> HeadInputs:
    """As ``read_head``, of one of several heads."""
    capture, device, kv_head = tensors.capture, tensors.device, tensors.kv_head(head)
    values: dict[str, Tensor] = {}
    bad: dict[str, Tensor] = {}
    nan: dict[str, Tensor] = {}
    for name, index in (("q", head), ("k", kv_head), ("v", kv_head), ("do", head)):
        found = tensors.read(name, batch, head)
        if found is None:
            continue
        factor, (one, finite) = capture.descale(name, batch, index), found
        one = one if factor == 1.0 else one * factor
        # An infinite or an overflowing factor makes finite numbers what they were not.
        if not finite or (factor != 1.0 and not all_finite(one[None])[0]):
            where = census.add_broken(name, batch, index, one)
            nan[name] = (where if name == "v" else one.isnan()).any(1)
            bad[name], one = where.any(1), one.masked_fill(where, 0.0)
        values[name] = one
    q, k, v = (values[name] for name in ("q", "k", "v"))
    unusable = torch.zeros(len(q), dtype=torch.bool, device=device)
    for name in bad.keys() & {"q", "do"}:
        unusable |= bad[name]
    keys = [bad[name] for name in ("k", "v") if name in bad]
    bad_keys = torch.stack(keys).any(0).nonzero()[:, 0] if keys else tensors.no_keys
    nan_keys = [nan[name].nonzero()[:, 0] for name in ("k", "v") if name in nan]
    sink = _read_sink(capture, batch, head, census, unusable)
    mask, bad_mask = _read_mask(capture, batch, head, device, census)
    masking = Masking(
        causal=capture.metadata.causal,
        window=capture.metadata.window,
        mask=mask,
        positions=capture.q_positions(batch),
        alibi=_read_alibi(capture, batch, head, census, unusable),
    )
    dropout = capture.dropout(batch, head)
    if dropout is not None:
        dropout = replace(dropout, kept=dropout.kept.to(device))
    return HeadInputs(
        AttentionHead(q, k, v, values.get("do"), capture.scale, masking, capture.metadata.softcap, sink, dropout),
        unusable=unusable,
        bad_keys=bad_keys,
        input_format=format_of(capture.tensors["q"].dtype),
        bad_mask=bad_mask,
        sound=not bad
        and bad_mask is None
        and math.isfinite(capture.sink(head) or 0.0)
        and math.isfinite(capture.alibi_slope(batch, head) or 0.0),
        nan_keys=torch.cat(nan_keys) if nan_keys else None,
        nan_rows=nan.get("q", torch.zeros_like(unusable)) if nan.keys() & {"q", "k", "v"} else None,
    )
