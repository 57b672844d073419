"""Ring attention: a rank's rows against the keys of all ranks, one hop for each rank's keys, merged by their LSE.

A hop is a call of a fused operator, and right for its own keys alone. Told of is the whole: the rank's rows with the
merged O and LSE, and the keys and values that the hops saw, put in the order of the sequence. The ring's backward
returns the rank's own dK and dV, which are sums over the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.results.wording import plural
from attn_diag.watching.live.call import OwnRows
from attn_diag.watching.live.hops import RingHops
from attn_diag.watching.live.operator_calls import OperatorBackward, OperatorCall
from attn_diag.watching.live.sites import AttentionSite, Fields, LayOut, turned, unchanged
from attn_diag.watching.live.tap import Tap

# Which rows of a sequence a rank has: a run of them; one from the front and one from the back, so that causal work is
# shared evenly; or every n-th.
Order = Literal["contiguous", "zigzag", "striped"]

# Tensors with numbers in them; the last is still on its way.
_REAL = ("Tensor", "Parameter", "AsyncCollectiveTensor")
WINDOW = "a window in ring attention: each hop counts it from its own first key"
# What ring functions call their arguments -> what we do.
_NAMES = {
    "query": "q", "key": "k", "value": "v", "out": "o", "logsumexp": "lse", "softmax_lse": "lse", "grad_out": "do",
    "dout": "do", "is_causal": "causal", "softmax_scale": "scale", "process_group": "group",
}  # fmt: skip


@dataclass(frozen=True)
class RingBackward(AttentionSite):
    """The function that does a ring's backward."""

    lay_out: LayOut = unchanged

    def back(
        self, a: Mapping[str, Any], result: Sequence[Tensor], hops: Sequence[OperatorBackward]
    ) -> OperatorBackward:
        """What a fused operator's backward would have told of it, and of its hops."""
        given = _named(a)
        o, do = self.lay_out(given["o"]), self.lay_out(given["do"])
        found = OperatorBackward.known(o, given["lse"], do, [self.lay_out(t) for t in result[:3]])
        found.hops = hops
        return found


@dataclass(frozen=True)
class _Ring:
    """Two functions of a module, below autograd: one does the forward, the other the backward."""

    module: str
    forward: str
    backward: str
    order: Callable[[bool], Order]
    lay_out: LayOut


def ring_functions(modules: Mapping[str, Any]) -> list[tuple[AttentionSite, Callable[..., Any]]]:
    """The functions of known rings among the loaded ``modules``."""
    found: list[tuple[AttentionSite, Callable[..., Any]]] = []
    for ring in _RINGS:
        space = vars(modules[ring.module]) if ring.module in modules else {}
        if ring.forward in space and ring.backward in space:
            found.append((AttentionSite(ring.forward, _reader(ring), ring=True), space[ring.forward]))
            found.append((RingBackward(ring.backward, _nothing, lay_out=ring.lay_out), space[ring.backward]))
    return found


def is_traced(site: AttentionSite, arguments: Iterable[Any]) -> bool:
    """Whether a ring is given stand-ins for tensors, as it is traced into a graph."""
    ours = site.ring or isinstance(site, RingBackward)
    return ours and any(isinstance(t, Tensor) and type(t).__name__ not in _REAL for t in arguments)


def positions(order: Order, place: int, ranks: int, rows: int) -> Tensor:
    """The places in the sequence of the ``rows`` rows of the rank at ``place`` of a ring, int64 [rows]."""
    if order == "striped":
        return torch.arange(rows) * ranks + place
    if order == "contiguous":
        return torch.arange(rows) + place * rows
    half = rows // 2
    return torch.cat([torch.arange(half) + place * half, torch.arange(half) + (2 * ranks - 1 - place) * half])


def merged(
    q: Tensor, k: Tensor, v: Tensor, hops: Sequence[OperatorCall], order: Order, group: Any, *, causal: bool
) -> tuple[Tensor, Tensor, OwnRows]:
    """K and V of all hops in the order of the sequence, and which rows of it the rank has.

    Args:
        q: The rank's rows, [B, Hq, T, D].
        k: The rank's keys, [B, Hk, T, D]; hops may have each of their heads several times.
        v: Likewise.
        hops: What ran, in its order: the rank's own keys first, then those of the rank before it, and so on.
        order: Which rows each rank has.
        group: The ring's process group.
        causal: Whether a row sees no later ones.

    Raises:
        InputError: The hops are not those of such a ring.
    """
    distributed = torch.distributed
    ranks, place, rows = distributed.get_process_group_ranks(group), distributed.get_rank(group), q.shape[2]
    if not hops:
        raise InputError("a ring ran no fused operator that is known here, so that its keys are not known")
    if any(hop.given.get("packed") for hop in hops):
        raise InputError("packed sequences in a ring are not put together")
    if any(hop.given.get("sinks") is not None for hop in hops):
        raise InputError("attention sinks in a ring: each hop would count them, which is not put together")
    if any(hop.given.get("alibi_slopes") is not None for hop in hops):
        raise InputError("ALiBi slopes in a ring: each hop counts distances from its own keys; not put together")
    if order == "zigzag" and rows % 2:
        raise InputError(f"a ring in zigzag order needs an even number of rows a rank, got {rows}")
    seen, told = [], []
    for number, hop in enumerate(hops):
        # Some hops leave out the last keys of a rank, which none of these rows may see.
        keys = positions(order, (place - number) % len(ranks), len(ranks), rows)[: hop.inputs[1].shape[2]]
        seen.append(keys)
        told.append(f"rank {ranks[(place - number) % len(ranks)]}: {_ranges(keys)}")
    mine = positions(order, place, len(ranks), rows)
    at = torch.cat(seen)
    whole = int(mine.max()) + 1 if causal else rows * len(ranks)
    into_order = at.argsort()
    if not torch.equal(at[into_order][:whole], torch.arange(whole)) or len(at) < whole:
        raise InputError(f"the {len(hops)} hops of a ring in {order} order saw {len(at)} keys, not the {whole} needed")
    index = into_order[:whole].to(q.device)
    parts = [[_unrepeated(hop.inputs[i], own) for hop in hops] for i, own in ((1, k), (2, v))]
    if parts[0][0].shape[1] != hops[0].inputs[1].shape[1] and not torch.equal(parts[0][0], k.to(parts[0][0].dtype)):
        raise InputError("a ring put its key heads in another order before its hops")
    keys, values = (torch.cat(those, 2).index_select(2, index) for those in parts)
    return keys, values, OwnRows(mine, tuple(ranks), "; ".join(told))


def _unrepeated(given: Tensor, own: Tensor) -> Tensor:
    """Without copies of heads, and what pads D."""
    return given[:, :: max(1, given.shape[1] // own.shape[1]), :, : own.shape[-1]]


def _reader(ring: _Ring) -> Callable[[Mapping[str, Any], Any, Tap], Fields]:
    def read(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields:
        given, hops = _named(a), tap.hops
        causal = bool(given["causal"])
        q, k, v = (ring.lay_out(given[name]) for name in "qkv")
        k, v, own = merged(q, k, v, hops, ring.order(causal), given["group"], causal=causal)
        whole = hops[0].of_others(q, k, v, ring.lay_out(result[0]), result[1])
        dropout = given.get("dropout_p") or 0.0
        refused = f"attention dropout {dropout:g} is on: run with dropout 0 to analyse it" if dropout else None
        if tuple(given.get("window_size") or (-1, -1)) != (-1, -1):
            refused = refused or WINDOW
        return whole.fused(q.shape[-1], v.shape[-1], q.shape[2]) | {
            "kernel": f"{ring.forward.strip('_')} of {whole.kernel}, {plural(len(hops), 'hop')}",
            "causal": "top-left" if causal else "none",
            "scale": given.get("scale"),
            "own": own,
            "hops": RingHops.forward(hops, v.shape[-1]),
            "refused": refused,
            "operator": whole,
        }

    return read


def _nothing(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:  # noqa: ARG001 - one protocol
    return None


def _named(a: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by our names, those that a function takes as ``**kwargs`` included."""
    given = {**(a.get("kwargs") or {}), **{name: value for name, value in a.items() if name != "kwargs"}}
    return {_NAMES.get(name, name): value for name, value in given.items()}


def _ranges(keys: Tensor) -> str:
    """Keys as first-last, one for each run; of stripes the first, the last and their distance."""
    steps = keys.diff()
    if len(keys) > 2 and int(steps[0]) > 1 and bool((steps == steps[0]).all()):
        return f"{int(keys[0])}-{int(keys[-1])} by {int(steps[0])}"
    ends = [0, *(int(i) + 1 for i in (steps != 1).nonzero()[:, 0]), len(keys)]
    return ",".join(f"{int(keys[i])}-{int(keys[j - 1])}" for i, j in pairwise(ends))


def _of_torch(causal: bool) -> Order:
    from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options

    return "zigzag" if causal and _cp_options.enable_load_balance else "contiguous"


def _of_package(name: str, function: str, order: Order) -> _Ring:
    def fixed(causal: bool) -> Order:  # noqa: ARG001 - as torch's
        return order

    return _Ring(f"ring_flash_attn.{name}", f"{function}_forward", f"{function}_backward", fixed, turned)


TORCH_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
_RINGS = (
    _Ring(TORCH_RING, "_templated_ring_attention", "_templated_ring_attention_backward", _of_torch, unchanged),
    _of_package("ring_flash_attn", "ring_flash_attn", "contiguous"),
    _of_package("zigzag_ring_flash_attn", "zigzag_ring_flash_attn", "zigzag"),
    _of_package("stripe_flash_attn", "stripe_flash_attn", "striped"),
)
RING_HOMES = tuple(ring.module for ring in _RINGS)
