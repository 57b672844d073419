"""The search for formats in which q, k and v were held passes over those alone that it would not take anyway."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_diag.head.low_bit_formats import formats_of
from attn_diag.head.low_bit_inputs import NAMES, _Search, held
from attn_diag.reference import AttentionHead, Masking, reference_rows

NUMBERS = 800.0


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_passed_over_has_no_part_in_the_error(name: str, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(96, 32, generator=generator).bfloat16().double() for _ in range(3))
    head = AttentionHead(q, k, v, None, 32**-0.5, Masking("top-left"), softcap=softcap)
    rows = torch.arange(5, 96, 3)
    chosen = next(one for one in formats_of(getattr(head, name), name) if one.by.block == "row")
    noise = torch.randn(len(rows), 32, generator=generator, dtype=torch.float64)
    observed = reference_rows(held(head, {name: chosen}), rows).out
    observed += noise * 0.3 * (observed - reference_rows(head, rows).out).square().mean().sqrt()
    search = _Search(head, observed, rows, NUMBERS)
    error = search._apart(observed - search._out({}))
    found = dict[str, list[float | None]]()
    for of in NAMES:
        formats = list(formats_of(getattr(head, of), of))
        found[of] = [search._part(of, one, error, len(formats)) for one in formats]
        looked_at = sum(1 for kept, _ in search._effects if kept == of)
        search._effects = {(of, one): search._apart(search._effect(of, one.of(getattr(head, of)))) for one in formats}
        assert found[of] == [search._part(of, one, error, len(formats)) for one in formats]
        assert looked_at < len(formats) // 2 or of == name, "nothing was passed over"
        search._effects = {}
    assert any(found[name])


def test_the_gradient_is_that_of_the_effect() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(48, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    head = AttentionHead(q, k, v, None, 0.25, Masking("bottom-right"), softcap=2.0)
    rows = torch.tensor([3, 40, 3, 17])  # one twice
    search = _Search(head, reference_rows(replace(head, v=v + 1e-3 * k), rows).out, rows, NUMBERS)
    error = search._apart(search._observed - search._out({}))
    for name in NAMES:
        x = getattr(head, name)
        other = x + 1e-3 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        effect = search._apart(search._effect(name, other))
        along = (search._gradient(name, error) * (other - x)).sum()
        assert float(along) == pytest.approx(float((effect * error).sum()), rel=1e-9)
