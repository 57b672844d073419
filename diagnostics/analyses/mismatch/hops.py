"""One rank of a ring: its hops as they were captured, and what each of them should have returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.merges import HopPart, Way, merges_of, sums_of
from attn_diag.analyses.mismatch.own_keys import own_bias
from attn_diag.captures.capture import Capture
from attn_diag.captures.hops import hop_keys, hop_name
from attn_diag.head.read import read_float64, read_head
from attn_diag.reference import FloatFormat, format_of, ulp

# dP and delta are sums of D products in fp32, off by some units of 2^-24 of their size where dS cancels to nothing.
_FP32_SUM = 2.0**-20

Put = tuple["PutTogether", list[HopPart], list[Way], torch.dtype]
"""A result, its parts, the ways that are tried, and the result's dtype."""


@dataclass(frozen=True)
class PutTogether:
    """One head's result with what it was made of; float64."""

    result: Tensor
    """What was captured, [n, D]."""
    truth: Tensor
    """What is right."""
    merged: Tensor
    """The parts, put together exactly."""
    fed: Tensor
    """What exact hops would add up to, from the captured O and LSE; ``truth`` for O itself."""
    errors: Sequence[float]
    """By hop the square of its error."""
    noise: Sequence[float]
    """And of what rounding at every site leaves; 0 where that is not known."""
    sizes: Sequence[float]
    """And of what is right."""
    sources: Sequence[int]
    """By hop the rank whose keys it saw (of dK and dV: whose rows)."""


@dataclass(frozen=True)
class RankHops:
    """A rank's capture of one call."""

    capture: Capture
    hops: tuple[tuple[int, Tensor], ...]
    """By hop whose keys it saw, and which of the sequence, int64."""
    device: torch.device

    @classmethod
    def of(cls, capture: Capture, device: torch.device) -> RankHops | None:
        """Of a capture that holds its hops; else None."""
        m = capture.metadata
        if hop_name(0, "o") not in capture.tensors or "hops" not in m.extra or "o" not in capture.tensors:
            return None
        if m.softcap is not None or capture.has_sinks:
            return None  # what a hop does with these is not known
        hops = tuple((rank, keys.to(device)) for rank, keys in hop_keys(m.extra["hops"]))
        return cls(capture, hops, device)

    @property
    def call(self) -> tuple[object, ...]:
        """What the captures of one call have in common."""
        m = self.capture.metadata
        names = ("run", "module", "call", "sequence_ranks")
        return m.layer, m.step, m.head_offset, *(m.extra.get(name) for name in names)

    @property
    def rank(self) -> int:
        """Its number."""
        return self.capture.metadata.rank or 0

    @property
    def layer(self) -> int:
        """The layer's."""
        return self.capture.metadata.layer or 0

    @property
    def sharing(self) -> int:
        """How many ranks there are."""
        return len(self.capture.metadata.extra.get("sequence_ranks", "").split(","))

    @property
    def row_outputs(self) -> list[str]:
        """Which outputs of its own rows are there with their hops."""
        tensors = self.capture.tensors
        found = ["o"] if self._held("o") and self._held("lse") else []
        return found + (["dq"] if "lse" in tensors and "dq" in tensors and self._held("dq") else [])

    @property
    def key_outputs(self) -> list[str]:
        """And of its own keys; none where a ring gives its hops every key head several times."""
        tensors, heads = self.capture.tensors, self.capture.kv_heads
        found = [n for n in ("dk", "dv") if f"own_{n}" in tensors and "lse" in tensors and self._held(n)]
        return [n for n in found if tensors[hop_name(0, n)].shape[1] == heads]

    def _held(self, name: str) -> bool:
        return all(hop_name(number, name) in self.capture.tensors for number in range(len(self.hops)))

    def some_heads(self, most: int) -> list[tuple[int, int]]:
        """Batch items and key heads, spread."""
        every = [(b, h) for b in range(self.capture.batch) for h in range(self.capture.kv_heads)]
        at = torch.linspace(0, len(every) - 1, min(len(every), most)).long().tolist()
        return [every[i] for i in dict.fromkeys(at)]

    def query_heads(self, key_head: int) -> range:
        """Those of a key head."""
        group = self.capture.q_heads // self.capture.kv_heads
        return range(key_head * group, (key_head + 1) * group)

    def tensor(self, number: int, name: str, item: int, head: int) -> Tensor:
        """What a hop returned of one head, fp32."""
        return self.capture.tensors[hop_name(number, name)][item, head].to(self.device).float()

    def dtype(self, number: int, name: str) -> torch.dtype:
        """In which dtype."""
        return self.capture.tensors[hop_name(number, name)].dtype

    def own(self, name: str, item: int, head: int) -> tuple[Tensor, torch.dtype]:
        """dk or dv of its own keys, fp32, and the dtype that it has."""
        source = self.capture.tensors[f"own_{name}"]
        return source[item, head].to(self.device).float(), source.dtype

    def head(self, item: int, head: int) -> OfHead:
        """One query head."""
        return OfHead(self, item, head)


@dataclass(frozen=True)
class OfHead:
    """One query head of a rank, in float64."""

    rank: RankHops
    item: int
    head: int

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, float]:
        """q, k, v, dO, the scores [rows, keys] and alpha."""
        h = read_head(self.rank.capture, self.item, self.head, self.rank.device).head
        bias = own_bias(self.rank.capture, self.item, self.head, h)
        return h.q, h.k, h.v, h.do, h.scale * h.q @ h.k.mT + bias, h.scale

    @cached_property
    def _format(self) -> FloatFormat:
        return format_of(self.rank.capture.tensors["q"].dtype)

    @cached_property
    def _truth(self) -> tuple[Tensor, Tensor]:
        """O and L."""
        _, _, v, _, scores, _ = self.inputs
        lse = scores.logsumexp(1, keepdim=True)
        return (scores - lse).exp() @ v, lse

    def _captured(self, name: str) -> Tensor:
        found = read_float64(self.rank.capture, name, self.item, self.head, self.rank.device)
        assert found is not None
        return found

    @cached_property
    def _fed(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """P and dS from the captured O and LSE, and what is right."""
        _, _, v, do, scores, _ = self.inputs
        assert do is not None
        both = []
        for o, lse in ((self._captured("o"), self._captured("lse")[:, None]), self._truth):
            probs = (scores - lse).exp()
            both.append((probs, probs * (do @ v.mT - (do * o).sum(1, keepdim=True))))
        return both[0], both[1]

    def _relative_noise(self) -> float:
        # E[(RN(x) - x)^2 / x^2]; of fp32 kernels the sums, not the casts, are what errs.
        return 0.0 if self._format.name == "fp32" else 2.0 ** (-2 * self._format.precision) / 24

    @cached_property
    def _differences(self) -> Tensor:
        """By how much dS is off in fp32, [rows, keys]."""
        _, _, v, do, scores, _ = self.inputs
        assert do is not None
        probs = (scores - self._captured("lse")[:, None]).exp()
        return _FP32_SUM * probs * (do.abs() @ v.abs().mT + (do * self._captured("o")).abs().sum(1, keepdim=True))

    def _noise(
        self, weights: Tensor, factor: Tensor, exact: Tensor, dtype: torch.dtype, more: Tensor | None = None
    ) -> float:
        """The square that rounding ``weights`` before a product leaves, with the result's own rounding.

        ``more`` is what the weights are off by besides.
        """
        relative = self._relative_noise()
        if not relative:
            return 0.0
        last = float(ulp(exact, format_of(dtype)).square().sum()) / 12
        variance = relative * weights.square() + (0.0 if more is None else more.square())
        return float((variance @ factor.square()).sum()) + last

    def of_keys(self, number: int, name: str) -> tuple[Tensor, Tensor, float]:
        """What a hop adds to dk or dv: from the captured O and LSE, what is right, and the square of its noise."""
        q, _, _, do, _, scale = self.inputs
        keys, dtype = self.rank.hops[number][1], self.rank.dtype(number, name)
        assert do is not None
        (probs, dscores), (true_probs, true_dscores) = self._fed
        more = None
        if name == "dk":
            weights, right, factor = dscores[:, keys], true_dscores[:, keys], scale * q
            more = self._differences[:, keys].mT
        else:
            weights, right, factor = probs[:, keys], true_probs[:, keys], do
        fed = weights.mT @ factor
        return fed, right.mT @ factor, self._noise(weights.mT, factor, fed, dtype, more)

    def put_together(self, name: str) -> Put:
        """O or dQ of its rows."""
        return self._merged() if name == "o" else self._summed()

    def _rows(self, values: Tensor) -> Tensor:
        """A hop that leaves rows out leaves out the first."""
        count = len(self.inputs[0])
        return torch.arange(count - len(values), count, device=values.device)

    def _merged(self) -> Put:
        rank, (_, _, v, _, scores, _) = self.rank, self.inputs
        truth, true_lse = self._truth
        parts: list[HopPart] = []
        errors, noise, sizes = [], [], []
        exact = torch.zeros_like(truth)
        lse = truth.new_full((len(truth), len(rank.hops)), -torch.inf)
        for number, (_, keys) in enumerate(rank.hops):
            values = rank.tensor(number, "o", self.item, self.head)
            part = HopPart(
                self._rows(values), values.nan_to_num(0.0), rank.tensor(number, "lse", self.item, self.head),
                int(keys.min()), rank.dtype(number, "o"),
            )  # fmt: skip
            parts.append(part)
            assert part.lse is not None
            lse[part.rows, number] = part.lse.double()
            own = scores[:, keys]
            own_lse = own.logsumexp(1, keepdim=True)
            share = (own_lse - true_lse).exp()
            probs = (own - own_lse).exp().nan_to_num(0.0)
            right = probs @ v[keys]
            got = torch.zeros_like(right)
            got[part.rows] = part.values.double()
            got_share = torch.zeros_like(share)
            got_share[part.rows] = (part.lse.double()[:, None] - true_lse[part.rows]).exp()
            # What it adds to O, its LSE's error included.
            errors.append(float((got_share * got - share * right).square().sum()))
            sizes.append(float((share * right).square().sum()))
            noise.append(self._noise(share * probs, v[keys], share * right, torch.float32))
            if noise[-1]:
                last = ulp(right, format_of(part.dtype)).square().sum(1, keepdim=True) / 12
                noise[-1] += float((share.square() * last).sum())
        total = lse.logsumexp(1, keepdim=True)
        for number, part in enumerate(parts):
            exact[part.rows] += (lse[part.rows, number, None] - total[part.rows]).exp() * part.values.double()
        result, out = self._captured("o"), rank.capture.tensors["o"].dtype
        sources = [source for source, _ in rank.hops]
        put = PutTogether(result, truth, exact, truth, errors, noise, sizes, sources)
        return put, parts, list(merges_of(parts, len(result), out)), out

    def _summed(self) -> Put:
        rank, (_, k, _, _, _, scale) = self.rank, self.inputs
        (_, dscores), (_, true_dscores) = self._fed
        parts: list[HopPart] = []
        errors, noise, sizes = [], [], []
        merged, fed = torch.zeros_like(self.inputs[0]), torch.zeros_like(self.inputs[0])
        for number, (_, keys) in enumerate(rank.hops):
            values = rank.tensor(number, "dq", self.item, self.head)
            part = HopPart(self._rows(values), values, None, int(keys.min()), rank.dtype(number, "dq"))
            parts.append(part)
            exact = dscores[:, keys] @ (scale * k[keys])
            got = torch.zeros_like(exact)
            got[part.rows] = values.double()
            errors.append(float((got - exact).square().sum()))
            sizes.append(float(exact.square().sum()))
            more = self._differences[:, keys]
            noise.append(self._noise(dscores[:, keys], scale * k[keys], exact, part.dtype, more))
            fed, merged = fed + exact, merged + got
        result, out = self._captured("dq"), rank.capture.tensors["dq"].dtype
        truth = true_dscores @ (scale * k)
        sources = [source for source, _ in rank.hops]
        put = PutTogether(result, truth, merged, fed, errors, noise, sizes, sources)
        return put, parts, list(sums_of(parts, len(result), out)), out
