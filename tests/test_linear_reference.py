"""The float64 reference of linear attention: its bound against mpmath, other definitions, lengths, packing, heads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from mpmath import mpf
from torch import Tensor

from attn_diag.reference.linear import LINEAR_OPERATORS, OF_HEADS, LinearCall, linear_reference
from attn_diag.reference.linear_oracle import linear_oracle
from attn_diag.reference.recurrence import run_recurrence, spectral_norm
from attn_diag.testing.linear.inputs import KINDS, linear_inputs

NAMES = tuple(LINEAR_OPERATORS)


def flat(tree: Any) -> list[Any]:
    return [x for part in tree for x in flat(part)] if isinstance(tree, list) else [tree]


def largest_ratio(
    operator: str, tensors: Mapping[str, Tensor], *, seed: int = 0, **options: Any
) -> tuple[float, float]:
    """The largest error of the reference over its bound in units of the bound, and the part that has a bound."""
    make = torch.Generator().manual_seed(seed)
    v = tensors["v"]
    do = torch.randn(v.shape, generator=make)
    dfinal = torch.randn(v.shape[0], v.shape[2], tensors["q"].shape[3], v.shape[3], generator=make)
    dfinal = dfinal if not options.get("normalize") else torch.zeros_like(dfinal)
    call = LinearCall(LINEAR_OPERATORS[operator], tensors, **options)
    found = linear_reference(call, do, dfinal)
    options.pop("scale", None)
    worst, known, total = 0.0, 0, 0
    for b in range(v.shape[0]):
        for h in range(v.shape[2]):
            one = {
                name: x[h].item() if name in OF_HEADS else (x[b, h] if name == "initial_state" else x[b, :, h]).tolist()
                for name, x in tensors.items()
            }
            given: dict[str, Any] = {"do": do[b, :, h].tolist(), "dfinal": dfinal[b, h].tolist()}
            true = linear_oracle(operator, one, scale=call.used_scale, head=h, **options, **given)
            for name, whole in found.values.items():
                if name[1:] in OF_HEADS:
                    continue  # a sum over sequences
                states = name in ("final_state", "dinitial_state")
                value, bound = (
                    (x[b, h] if states else x[b, :, h]).flatten().tolist() for x in (whole, found.bounds[name])
                )
                for one_value, one_bound, exact in zip(value, bound, flat(true[name]), strict=True):
                    total += 1
                    if one_bound < float("inf"):
                        known += 1
                        worst = max(worst, float(abs(mpf(one_value) - exact) / one_bound))
    return worst, known / total


@pytest.mark.parametrize("operator", NAMES)
def test_the_bound_holds_against_mpmath(operator: str) -> None:
    for seed, kind in enumerate(KINDS):
        tensors = linear_inputs(operator, (1, 9, 1, 3, 2), seed, kind=kind)
        tensors["initial_state"] = torch.randn(1, 1, 3, 2, generator=torch.Generator().manual_seed(seed))
        worst, known = largest_ratio(operator, tensors, seed=seed)
        assert worst <= 1
        assert known == 1


@pytest.mark.parametrize(("operator", "options"), [("kda", {"l2norm": True}), ("linear_attn", {"normalize": True})])
def test_the_bound_holds_with_normalisations(operator: str, options: dict[str, bool]) -> None:
    for seed, kind in enumerate(("normal", "mixed_sizes", "repeated")):
        worst, known = largest_ratio(operator, linear_inputs(operator, (1, 9, 1, 3, 2), seed, kind=kind), **options)
        assert worst <= 1
        assert known > 0.9


def test_the_bound_holds_with_a_skip_connection() -> None:
    for seed, kind in enumerate(("normal", "mixed_sizes")):
        tensors = linear_inputs("mamba2", (1, 9, 2, 3, 2), seed, kind=kind)
        tensors["D"] = torch.randn(2, generator=torch.Generator().manual_seed(seed))
        assert largest_ratio("mamba2", tensors)[0] <= 1
        do = torch.randn(1, 9, 2, 2, generator=torch.Generator().manual_seed(seed))
        found = linear_reference(LinearCall(LINEAR_OPERATORS["mamba2"], tensors), do)
        assert torch.allclose(found.values["dD"], (do.double() * tensors["v"].double()).sum((0, 1, 3)), rtol=1e-6)


def test_the_bound_stays_small_over_a_thousand_steps() -> None:
    # Each step may add some (K + 10) u of the state, and both directions have them: 1000 * 26 * 2**-53 = 3e-12.
    for operator in ("delta_rule", "kda", "rwkv7"):
        tensors = linear_inputs(operator, (1, 1000, 1, 16, 8), 0)
        found = linear_reference(LinearCall(LINEAR_OPERATORS[operator], tensors), torch.randn(1, 1000, 1, 8))
        for name, value in found.values.items():
            assert found.bounds[name].max() < 5e-11 * value.abs().max(), name


def test_a_wrong_reference_is_outside_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    right = run_recurrence

    def wrong(r: Any, *rest: Any) -> Any:
        found = right(r, *rest)
        found.o.value[0, -1, 0] *= 1 + 2.0**-36
        return found

    monkeypatch.setattr("attn_diag.reference.linear.run_recurrence", wrong)
    assert largest_ratio("kda", linear_inputs("kda", (1, 5, 1, 3, 2), 0))[0] > 1


def test_the_spectral_norm_is_tight_and_never_too_small() -> None:
    make = torch.Generator().manual_seed(0)
    for size in (1.0, 1e-3, 30.0):
        w = torch.rand(200, 6, generator=make, dtype=torch.float64)
        a, b = (torch.randn(200, 6, generator=make, dtype=torch.float64) * size for _ in range(2))
        w[:50], b[:50] = 1.0, -a[:50] / a[:50].square().sum(1, keepdim=True)
        found = spectral_norm(w, a, b)
        true = torch.linalg.matrix_norm(torch.diag_embed(w) + b[:, :, None] * a[:, None], 2)
        assert (found >= true * (1 - 1e-15)).all()
        assert (found <= torch.maximum(true, w.amax(1)) * (1 + 2.0**-29)).all()


@pytest.mark.parametrize("operator", ["rwkv7", "gated_delta_rule", "mamba2"])
def test_sequences_in_one_pack_are_sequences_alone(operator: str) -> None:
    tensors = linear_inputs(operator, (1, 150, 2, 4, 3), 1)
    starts = (0, 1, 66, 66, 150)
    tensors["initial_state"] = torch.randn(4, 2, 4, 3)
    do = torch.randn(1, 150, 2, 3)
    packed = linear_reference(LinearCall(LINEAR_OPERATORS[operator], tensors, cu_seqlens=starts), do)
    for n, (i, j) in enumerate(pairwise(starts)):
        if i == j:
            assert torch.equal(packed.values["final_state"][n], tensors["initial_state"][n].double())
            continue
        alone = {
            x: t if x in OF_HEADS else t[n : n + 1] if x == "initial_state" else t[:, i:j] for x, t in tensors.items()
        }
        found = linear_reference(LinearCall(LINEAR_OPERATORS[operator], alone), do[:, i:j])
        for name, value in found.values.items():
            if name[1:] in OF_HEADS:
                continue
            other = packed.values[name]
            assert torch.equal(value, other[n : n + 1] if name.endswith("state") else other[:, i:j]), name


def test_shared_heads_are_repeated_heads_and_their_gradients_add_up() -> None:
    tensors = linear_inputs("kda", (2, 40, 4, 4, 3), 2, key_heads=2)
    do = torch.randn(2, 40, 4, 3)
    shared = linear_reference(LinearCall(LINEAR_OPERATORS["kda"], tensors), do)
    repeated = tensors | {name: tensors[name].repeat_interleave(2, 2) for name in "qk"}
    found = linear_reference(LinearCall(LINEAR_OPERATORS["kda"], repeated), do)
    assert torch.equal(shared.values["o"], found.values["o"])
    for name in ("dq", "dk"):
        both = found.values[name].reshape(2, 40, 2, 2, 4).sum(3)
        torch.testing.assert_close(shared.values[name], both, rtol=1e-14, atol=1e-14)


def test_autocast_leaves_the_reference_alone() -> None:
    tensors = linear_inputs("delta_rule", (1, 20, 1, 4, 3), 0)
    plain = linear_reference(LinearCall(LINEAR_OPERATORS["delta_rule"], tensors))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            linear_reference(LinearCall(LINEAR_OPERATORS["delta_rule"], tensors)).values["o"], plain.values["o"]
        )


@pytest.mark.gpu
def test_the_gpu_computes_the_same() -> None:
    for operator in NAMES:
        tensors = linear_inputs(operator, (1, 100, 2, 16, 16), 0)
        do = torch.randn(1, 100, 2, 16)
        one = linear_reference(LinearCall(LINEAR_OPERATORS[operator], tensors), do)
        other = linear_reference(
            LinearCall(LINEAR_OPERATORS[operator], {n: t.cuda() for n, t in tensors.items()}), do.cuda()
        )
        for name, value in one.values.items():
            apart = (value - other.values[name].cpu()).abs()
            assert (apart <= one.bounds[name] + other.bounds[name].cpu()).all(), (operator, name)
