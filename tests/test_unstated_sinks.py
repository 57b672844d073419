"""A sink or a key of zeros that adds less to a row sum than O's rounding shows, but not less than LSE's fp32 does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.head.effects import _unstated_sink

ROWS = 200


def call(rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, rows, 32, generator=generator) for _ in range(3))
    return (2 * q).bfloat16(), k.bfloat16(), v.bfloat16()


def scores(q: Tensor, k: Tensor) -> Tensor:
    found: Tensor = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    return found


def labels_and_words(lse: Callable[[Tensor], Tensor], sinks: Tensor | None = None) -> tuple[frozenset[str], str]:
    """Of a call whose LSE, and O as it follows from that, come from a function of the scores."""
    q, k, v = call()
    s = scores(q, k)
    found = lse(s)
    o = ((s - found[..., None]).exp() @ v.double()).bfloat16()
    diagnosis = attn_diag.inspect(q, k, v, o=o, lse=found.float(), sinks=sinks)
    words = "; ".join(p.words for h in diagnosis.heads for one in h.quantities for p in one.patterns)
    return frozenset(diagnosis.labels), words


def counted(s: Tensor, logit: float = 0.0, first: int = 0) -> Tensor:
    """LSE with one more key of that score, in rows from the first on."""
    lse = s.logsumexp(-1)
    extra = torch.where(torch.arange(s.shape[-2]) >= first, logit, -torch.inf)
    return torch.logaddexp(lse, extra.double())


def of_cast_probs(s: Tensor) -> Tensor:
    m = s.amax(-1, keepdim=True)
    return m[..., 0] + (s - m).exp().bfloat16().double().sum(-1).log()


@pytest.mark.parametrize("first", [0, 192], ids=["all rows", "the last tile's rows"])
def test_one_key_of_zeros_is_wrong_and_named(first: int) -> None:
    """Of 200 rows it adds some 3e-4 to a row sum: O's error grew by less than a tenth, and the head passed."""
    labels, words = labels_and_words(lambda s: counted(s, first=first))
    assert "wrong" in labels
    assert "an unstated sink of logit 0 (or one key of zeros that is not masked) gives" in words
    assert ("rows 192-199" in words) == (first == 192)


def test_a_second_sink_beside_the_stated_one_is_named() -> None:
    sinks = torch.tensor([2.0, 2.0])
    assert "wrong" not in labels_and_words(lambda s: counted(s, 2.0), sinks)[0]
    labels, words = labels_and_words(lambda s: torch.logaddexp(counted(s, 2.0), torch.zeros(()).double()), sinks)
    assert "wrong" in labels
    assert "a sink of logit 2.127, not 2, gives" in words


COARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "l sums cast P": of_cast_probs,
    "LSE in BF16": lambda s: s.logsumexp(-1).bfloat16().double(),
    "LSE in FP16": lambda s: s.logsumexp(-1).half().double(),
    "scores in FP16": lambda s: s.half().double().logsumexp(-1),
    "LSE a little too large": lambda s: s.logsumexp(-1) + 1e-3,
    "l a little too large": lambda s: s.amax(-1) + ((s - s.amax(-1, keepdim=True)).exp().sum(-1) + 1e-3).log(),
}


@pytest.mark.parametrize("lse", COARSE.values(), ids=COARSE)
def test_coarse_ones_have_no_sink(lse: Callable[[Tensor], Tensor]) -> None:
    assert "sink" not in labels_and_words(lse)[1]
    q, k, _ = call()
    s = scores(q, k)
    for h in range(2):
        true, largest = s[0, h].logsumexp(-1), s[0, h].amax(-1).abs()
        assert _unstated_sink(lse(s)[0, h] - true, true, largest) is None
        assert _unstated_sink(counted(s)[0, h] - true, true, largest) == pytest.approx(0.0, abs=1e-6)


def test_rows_that_are_all_alike_show_no_sink() -> None:
    """Any error that they share is that of some sink."""
    lse = torch.full((200,), 5.3, dtype=torch.float64)
    assert _unstated_sink(torch.full_like(lse, 1e-3), lse, lse) is None
