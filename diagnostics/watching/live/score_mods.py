"""What a score_mod of FlexAttention does to scores, read off its traced graph.

Scores may be multiplied by a number, go through a softcap, have something added that does not depend on them, and be
hidden. Anything else that happens to a score is refused by its operator's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from attn_diag.reference import Alibi, hides

# Arguments of a score_mod, and of a bias [B, H, Tq, Tk] the axes.
_SCORE, _BATCH, _HEAD, _ROW, _KEY = range(5)
# So many numbers of a bias are written out.
_MOST_SCORES = 2**24
# Two roundings to fp32: of a slope's product, or of a number and its reciprocal.
_CLOSE = 2.0**-22
_SAME = ("aten.alias.default", "aten.clone.default", "aten.detach.default")
_CASTS = ("aten._to_copy.default", "prims.convert_element_type.default")
_WIDE = (None, torch.float32, torch.float64)
_READ = "only positive factors, a softcap, added biases and hidden keys are read"
_LARGE = f"adds a bias of more than {_MOST_SCORES:,} numbers"

Fields = dict[str, Any]


class _UnreadError(Exception):
    """What a score_mod does that is not read, in words that follow "a score_mod that"."""


def read_score_mod(score_mod: Callable[..., Tensor], q: Tensor, k: Tensor, mask: Tensor | None) -> Fields:
    """The fields of an ``AttentionCall`` that follow from a score_mod, and "factor", by which alpha is multiplied.

    Args:
        score_mod: FlexAttention's.
        q: [B, Hq, Tq, D].
        k: [B, Hk, Tk, D].
        mask: Which keys the call's block mask leaves, bool, broadcastable to [B, Hq, Tq, Tk].
    """
    try:
        with torch.no_grad():
            return _Read(score_mod, (*q.shape[:3], k.shape[2]), q.device).fields(mask)
    except _UnreadError as why:
        return {"mask": mask, "refused": f"a score_mod that {why}; {_READ}"}


class _Read:
    def __init__(self, score_mod: Callable[..., Tensor], sizes: tuple[int, ...], device: torch.device) -> None:
        # Whoever uses FlexAttention has loaded these, which takes a second.
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
        from torch.fx.experimental.proxy_tensor import make_fx

        self._sizes, self._device = sizes, device
        at = [torch.zeros((), dtype=torch.int32, device=device) for _ in sizes]
        self._zero = torch.zeros((), device=device)
        try:
            with TransformGetItemToIndex():
                self._made: GraphModule = make_fx(score_mod)(self._zero, *at)
        except Exception as error:
            raise _UnreadError(f"torch cannot trace ({type(error).__name__})") from error
        self._given = [node for node in self._made.graph.nodes if node.op == "placeholder"]
        self._depends: dict[Node, frozenset[int]] = {n: frozenset([i]) for i, n in enumerate(self._given)}
        for node in self._made.graph.nodes:
            if node not in self._depends:
                of = (self._depends[given] for given in node.all_input_nodes)
                self._depends[node] = frozenset[int]().union(*of)
        out: Any = next(node for node in self._made.graph.nodes if node.op == "output").args[0]
        if not isinstance(out, Node) or _SCORE not in self._depends[out]:
            raise _UnreadError("leaves nothing of the score")
        self._axes = self._depends[out] - {_SCORE}
        # What the score is multiplied by, after a tanh where there was one; "inside": before it.
        self._factor, self._adds, self._hides = 1.0, False, False
        self._inside: float | None = None
        self._follow(out)

    def _follow(self, node: Node) -> None:
        """Go through what happens to the score, first things first."""
        if node is self._given[_SCORE]:
            return
        scored = [i for i, a in enumerate(node.args) if isinstance(a, Node) and _SCORE in self._depends[a]]
        name = str(node.target)
        if len(scored) != 1 or any(_SCORE in self._depends[n] for n in node.kwargs.values() if isinstance(n, Node)):
            raise _UnreadError(f"has the score twice in {name}")
        place = scored[0]
        before: Any = node.args[place]
        self._follow(before)
        args: Sequence[Any] = node.args
        if name in _SAME or (name in _CASTS and (node.kwargs.get("dtype") or [*args, None][1]) in _WIDE):
            return
        added = name == "aten.add.Tensor" and (place == 0 or node.kwargs.get("alpha", 1) == 1)
        if added or (name == "aten.sub.Tensor" and place == 0):
            self._adds = True
        elif name == "aten.mul.Tensor" or (name == "aten.div.Tensor" and place == 0):
            self._multiply(args[1 - place], -1 if name == "aten.div.Tensor" else 1, name)
        elif name == "aten.tanh.default" and not (self._adds or self._hides) and self._inside is None:
            self._inside, self._factor = self._factor, 1.0
        elif (name == "aten.where.self" and place) or (name.startswith("aten.masked_fill.") and place == 0):
            instead = self._number(args[3 - place] if name == "aten.where.self" else args[2], name)
            if not bool(hides(torch.tensor(instead, dtype=torch.float32))):
                raise _UnreadError(f"puts {instead:g} in a score's place")
            self._hides = True
        else:
            raise _UnreadError(f"gives the score to {name}")

    def _multiply(self, by: Any, power: int, name: str) -> None:
        number = self._number(by, name) ** power
        if not 0 < number < math.inf:
            raise _UnreadError(f"multiplies the score by {number:g}")
        self._factor *= number

    def _number(self, of: Any, name: str) -> float:
        if isinstance(of, Node) and self._depends[of]:
            raise _UnreadError(f"gives the score to {name} with what depends on {self._words(self._depends[of])}")
        return float(self._constant(of))

    def _constant(self, of: Any) -> Any:
        if not isinstance(of, Node):
            return of
        if of.op == "get_attr":
            return getattr(self._made, str(of.target))
        target: Any = of.target
        return target(*map_arg(of.args, self._constant), **map_arg(of.kwargs, self._constant))

    @staticmethod
    def _words(axes: frozenset[int]) -> str:
        return " and ".join(("", "the sequence", "the head", "the row", "the key")[axis] for axis in sorted(axes))

    def fields(self, mask: Tensor | None) -> Fields:
        """See ``read_score_mod``."""
        outer = self._factor
        factor = outer if self._inside is None else self._inside * outer
        found: Fields = {
            "mask": mask, "softcap": None if self._inside is None else outer,
            "factor": 1.0 if math.isclose(factor, 1.0, rel_tol=_CLOSE) else factor,
        }  # fmt: skip
        if self._adds and not self._hides and (slopes := self._slopes(mask)):
            return found | slopes
        if not (self._adds or self._hides):
            return found
        sizes = [n for axis, n in enumerate(self._sizes, 1) if axis in self._axes]
        if math.prod(sizes) > _MOST_SCORES:
            raise _UnreadError(_LARGE)
        at = {axis: torch.arange(self._sizes[axis - 1]) for axis in sorted(self._axes)}
        bias = self._values(at)
        if self._hides:
            # What was put in a score's place must still hide its key after all that followed.
            shown = bias[~(hides(bias) | self._values(at, score=math.nan).isnan())]
            if shown.numel():
                raise _UnreadError(f"puts {float(shown[0]):g} in a score's place")
        for axis in range(4):
            bias = bias if axis + 1 in self._axes else bias.unsqueeze(axis)
        if not self._adds:
            seen = ~hides(bias)
            return found | {"mask": seen if mask is None else seen & mask}
        if mask is None:
            return found | {"mask": bias}
        if math.prod(map(max, bias.shape, mask.shape)) > _MOST_SCORES:
            raise _UnreadError(_LARGE)
        return found | {"mask": torch.where(mask, bias, -math.inf)}

    def _values(self, at: dict[int, Tensor], together: tuple[int, ...] = (), *, score: float = 0.0) -> Tensor:
        """What becomes of a score at these places, fp32, an axis each; ``together``: share the last one."""

        def call(*places: Tensor) -> Tensor:
            made: Tensor = self._made(self._zero + score, *places)
            return made

        mapped: Any = call
        alone = [(axis,) for axis in at if axis not in together]
        for axes in reversed([*alone, together] if together else alone):
            mapped = torch.vmap(mapped, in_dims=tuple(0 if axis in axes else None for axis in range(1, 5)))
        zero = torch.zeros((), dtype=torch.int32)
        values: Tensor = mapped(*(at.get(axis, zero).to(self._device, torch.int32) for axis in range(1, 5)))
        return values.float()

    def _slopes(self, mask: Tensor | None) -> Fields | None:
        """ALiBi's, where that is what is added: exactly, but for the rounding of each product to fp32."""
        (rows, keys), heads = self._sizes[2:], {a: torch.arange(n) for a, n in enumerate(self._sizes, 1)}
        heads = {axis: heads[axis] for axis in (_BATCH, _HEAD) if axis in self._axes}
        if keys < 2:
            return None
        if _ROW not in self._axes:
            values = self._values(heads | {_KEY: torch.arange(keys)})
            slope = values[..., 1] - values[..., 0]
            for origin in ("first-key", "last-key"):
                distance = Alibi(0.0, origin).distances(torch.zeros(1), slice(0, keys), keys)[0]
                if _are(values, slope, distance):
                    return self._of_heads(slope, origin)
            return None
        ends = self._given[_ROW], self._given[_KEY]
        differ = all(
            u.target is torch.ops.aten.sub.Tensor and {*u.args} == {*ends} and not u.kwargs
            for n in ends
            for u in n.users
        )
        if not differ or rows != keys:
            return None
        distance = torch.arange(1 - rows, keys)
        at = heads | {_ROW: (-distance).clamp(min=0), _KEY: distance.clamp(min=0)}
        values = self._values(at, together=(_ROW, _KEY))
        slope = -values[..., rows - 2]
        causal = mask is not None and not bool(mask.triu(1).any())
        seen = distance <= 0 if causal else distance < keys
        return self._of_heads(slope, "row") if _are(values[..., seen], slope, -distance[seen].abs()) else None

    def _of_heads(self, slope: Tensor, origin: str) -> Fields:
        for axis in (_BATCH, _HEAD):
            slope = slope if axis in self._axes else slope.unsqueeze(axis - 1)
        slope = slope.expand(self._sizes[0] if _BATCH in self._axes else 1, self._sizes[1])
        return {"alibi_slopes": slope if _BATCH in self._axes else slope[0], "alibi_origin": origin}


def _are(values: Tensor, slope: Tensor, distance: Tensor) -> bool:
    """Whether ``values`` [..., n] are ``slope`` [...] times ``distance`` [n], a rounding or two aside."""
    exact = slope.double()[..., None] * distance.to(slope.device)
    return bool(((values.double() - exact).abs() <= _CLOSE * exact.abs()).all())
