"""A kernel that no recipe is like is known by a few rows; one that a search would find is never ruled out by them, and
what it adds up in 16 bits is found in any schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_diag import inspect
from attn_diag.captures.capture import Capture
from attn_diag.head.identification import identify_head, nothing_fits
from attn_diag.head.recipe_candidates import mixtures, variants
from attn_diag.head.recipe_search import SearchedHead, read_subject
from attn_diag.kernels import Schedule, emulate_rows_of_several
from attn_diag.kernels.formats import Format

CPU = torch.device("cpu")


def observation_of(capture: Capture) -> str:
    (name,) = capture.observations
    return name


def opened(causal: str, dtype: torch.dtype, o: Tensor | None = None) -> tuple[Capture, SearchedHead]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 96, 32, generator=generator).to(dtype) for _ in range(3))
    o = torch.zeros_like(q) if o is None else o.to(dtype)[None, None]
    capture = Capture.from_tensors({"q": 2 * q, "k": k, "v": v, "o": o}, causal=causal)
    subject = read_subject(capture, observation_of(capture), 0, 0, CPU)
    assert subject is not None
    return capture, subject


@pytest.mark.parametrize("causal", ["none", "top-left"])
@pytest.mark.parametrize(("fmt", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_it_is_told_by_few_rows(causal: str, fmt: Format, dtype: torch.dtype) -> None:
    head = replace(opened(causal, dtype)[1].inputs.head, do=None)
    coarse = mixtures(fmt, 32)
    # The coarsest, with another sum than is tried first, and one in a schedule that is not among the first.
    other = replace(coarse[8], schedule=Schedule(128, 32, "descending"))
    for made in (variants(coarse[-1])[1], other):
        (o,) = emulate_rows_of_several([made], head, torch.arange(96))
        noise = torch.randn(o.shape, generator=torch.Generator().manual_seed(0))
        for out, found in ((o, False), (o.float() * (1 + 0.01 * noise), True)):
            capture, _ = opened(causal, dtype, out)
            assert nothing_fits(capture, observation_of(capture), 0, 0, CPU) is found


@pytest.mark.parametrize(
    ("sites", "schedule", "variant"),
    [
        ("scores (also before alpha), maximum, row sum, PV of a range", Schedule(128, 64), 0),
        ("PV of a range, O's accumulator", Schedule(128, 32), 0),
        ("scores, row sum, PV of a range", Schedule(128, 16, "descending"), 3),
        ("row sum, PV of a range, O's accumulator", Schedule(128, 16), 2),
        ("O's accumulator", Schedule(128, 48, "descending"), 0),
        ("scores, row sum, PV of a range", Schedule(128, 80), 0),
    ],
)
def test_what_adds_up_in_16_bits_is_found_in_any_schedule(sites: str, schedule: Schedule, variant: int) -> None:
    """A fourth of such kernels were unknown: each of the three shows only where the others are right."""
    head = replace(opened("none", torch.bfloat16)[1].inputs.head, do=None)
    recipe = next(r for r in mixtures("bf16", 32) if r.name == f"fa2 with {sites} in bf16")
    made = [recipe, *variants(recipe)][variant]
    (o,) = emulate_rows_of_several([replace(made, schedule=schedule)], head, torch.arange(96))
    capture, _ = opened("none", torch.bfloat16, o)
    found = identify_head(capture, observation_of(capture), 0, 0, CPU)
    assert found is not None
    assert found.recipe is not None
    assert found.best.match.agreement > 0.995
    assert (found.recipe.row_sum, found.recipe.range_pv) == (recipe.row_sum, recipe.range_pv)


def test_where_one_of_two_sums_is_rounded_both_are_said() -> None:
    """In a single tile P V and O's accumulator are one number: inspect said that no rounding makes it."""
    q, k, v = (torch.randn(1, 1, 128, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    scores = q.float() @ k.float().mT / 8
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    o = ((probs.bfloat16().float() @ v.float()).bfloat16() / probs.sum(-1, keepdim=True)).bfloat16()
    report = " ".join(inspect(q, k, v, o=o).report().split())
    assert "PV of a range (or O's accumulator) in BF16" in report
    assert "None of the roundings" not in report
