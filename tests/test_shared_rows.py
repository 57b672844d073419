"""Rows that say nothing new are no evidence: copies, shared prompts, rows without gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import some
from torch import Tensor
from verdicts.inputs import Inputs, draw
from verdicts.kernels import PLAIN, attend

import attn_diag
from attn_diag.analyses.verdicts.means import rejects
from attn_diag.captures.capture import Capture
from attn_diag.captures.metadata import Causal
from attn_diag.head.counterfactual import same_keys, together
from attn_diag.head.shared import SharedRows, rows_alike, rows_differ, shared_rows
from attn_diag.kernels import Schedule, preset
from attn_diag.reference import AttentionHead, Masking
from attn_diag.results.diagnosis import HeadDiagnosis
from attn_diag.statistics.means import PRIMARY, SignedErrors, estimate_bias
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import emulate

SMALL: dict[str, Any] = {"t_q": 96, "d": 32}


def judged(x: Inputs, **more: Any) -> list[HeadDiagnosis]:
    """What ``inspect`` says of a healthy kernel, by head."""
    out = attend(x, PLAIN)
    found = attn_diag.inspect(
        x.q, x.k, x.v, do=x.do, **{"o": out.o, "lse": out.lse, "dq": out.dq, **more},
        causal=x.causal if x.causal != "none" else False, scale=x.scale, device="cpu",
    )  # fmt: skip
    return [head for head in found.captures[0].observations[0].heads if head.head is not None]


def reason(head: HeadDiagnosis, part: str) -> str:
    return next((r for r in some(head.verdict).reasons if part in r), "")


def capture(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **metadata: Any) -> Capture:
    return Capture.from_tensors({"q": q, "k": k, "v": v, "mask": mask}, **metadata)


def tensors(batch: int = 3, length: int = 10) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(batch, 2, length, 8, generator=g).bfloat16() for name in ("q", "k", "v")}


def test_a_shared_prompt_is_found_under_causal_masking_alone() -> None:
    x = tensors()
    for t in x.values():
        t[2, :, :6] = t[0, :, :6]
    causal = shared_rows(capture(**x, causal="top-left"), [0, 1, 2], head=1)
    assert causal[2].repeated.tolist() == [True] * 6 + [False] * 4
    assert causal[2].source == 0
    assert causal[2].keys.tolist() == [*range(6), *range(26, 30)]
    assert not causal[1].repeated.any()
    assert causal[1].source is None
    assert causal[1].keys.tolist() == list(range(10, 20))
    assert not shared_rows(capture(**x), [0, 1, 2], head=1)[2].repeated.any()


@pytest.mark.parametrize("changed", ["q", "k", "v", None])
def test_one_bit_makes_another_row(changed: str | None) -> None:
    x = tensors()
    for t in x.values():
        t[1] = t[0]
    if changed:
        x[changed][1, 0, 4, 3] *= -1
    found = shared_rows(capture(**x, causal="top-left"), [0, 1], head=0)[1].repeated.tolist()
    expected = [True] * 10
    if changed:
        # A row's own q concerns itself; k and v also all rows behind it.
        expected[4 : 5 if changed == "q" else None] = [False] * (1 if changed == "q" else 6)
    assert found == expected
    whole = shared_rows(capture(**x), [0, 1], head=0)[1].repeated
    assert int(whole.sum()) == {"q": 9, None: 10}.get(changed, 0)


def test_another_mask_makes_another_row() -> None:
    x = tensors(2)
    for t in x.values():
        t[1] = t[0]
    mask = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    mask[1, ..., 7] = False
    assert (
        shared_rows(capture(**x, mask=mask, causal="top-left"), [0, 1], 0)[1].repeated.tolist()
        == [True] * 7 + [False] * 3
    )
    assert shared_rows(capture(**x, mask=mask[:1], causal="top-left"), [0, 1], 0)[1].repeated.all()


def test_layouts_and_query_heads_of_one_key_head() -> None:
    x = tensors()
    x = {name: t.transpose(1, 2).contiguous() for name, t in x.items()}
    x["k"], x["v"] = x["k"][:, :, :1].contiguous(), x["v"][:, :, :1].contiguous()
    for t in x.values():
        t[1, :4] = t[0, :4]
    found = shared_rows(capture(**x, layout="BTHD", causal="top-left"), [0, 1, 2], head=1)
    assert [int(f.repeated.sum()) for f in found.values()] == [0, 4, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_wide_numbers_are_alike_where_they_are_copies(dtype: torch.dtype) -> None:
    """Numbers of 16 bits, widened, end in zeros; a hash that loses its upper bits took one row in 200 for a copy."""
    q = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0)).to(dtype).double()
    q[70] = q[3]
    (found,) = rows_alike([AttentionHead(q, q, q, q, 0.25, Masking())])
    assert np.flatnonzero(found != np.arange(4096)).tolist() == [70]
    assert found[70] == 3
    assert not rows_differ([q[None], q[None]])[0]
    q[70] = q[4]
    q[3], q[4] = 0.0, -0.0
    assert not rows_differ([q[None], q[None]])[0]
    assert rows_differ([q[None, 5:], q[None, 5:]])[0]


def test_copies_are_tested_as_the_one_sequence_that_they_are() -> None:
    x = draw("gaussian", "copies", heads=1, **SMALL)
    (found,) = judged(x)
    (alone,) = judged(replace(x, **{n: getattr(x, n)[:1] for n in ("q", "k", "v", "do")}))
    for name in ("delta", "delta_excess", "o_excess", "o_away_excess"):
        one, other = getattr(found.bias, name), getattr(alone.bias, name)
        assert one.p_value == pytest.approx(other.p_value, rel=1e-9), name
        assert one.n == other.n, name
    assert found.noise_factor_ci95 == pytest.approx(some(alone.noise_factor_ci95))
    assert "8 of 8 sequences are copies of others: 96 rows of each count once" in reason(found, "copies")
    # All else is over all rows: another sequence may have an error of its own.
    assert found.rows_all == 8 * alone.rows_all
    broken = attend(x, PLAIN).o.clone()
    broken[5, 0, 40] += 0.25
    (wrong,) = judged(x, o=broken)
    assert "wrong" in some(wrong.verdict).labels


ALIKE = ["shared_prompt", "some_copies", "independent"]


@pytest.mark.parametrize("setting", ALIKE)
def test_what_sequences_share_counts_once(setting: str) -> None:
    x = draw("gaussian", setting, heads=1, **SMALL)
    (found,) = judged(x)
    rows = {"shared_prompt": 72 + 8 * 24, "some_copies": 4 * 96, "independent": 8 * 96}[setting]
    words = {
        "shared_prompt": "8 of 8 sequences share the first 72 rows: they count once, as 1 independent sequence; with",
        "some_copies": "8 of 8 sequences are copies of others: 96 rows of each count once, as 4 independent sequences",
        "independent": "",
    }[setting]
    assert reason(found, "count once").startswith(words)
    assert some(found.bias.delta).n == rows
    assert some(found.bias.o_excess).n == rows * 32
    assert (some(found.bias.delta).n_clusters == 8) == (setting == "independent")


def nothing_shared(capture: Capture, batches: list[int], _: int) -> dict[int, SharedRows]:
    keys, none = capture.k_length, np.zeros(capture.q_length, dtype=bool)
    return {batch: SharedRows(none, np.arange(keys) + i * keys, None) for i, batch in enumerate(batches)}


@pytest.mark.parametrize("blind", [False, True])
def test_sequences_with_a_common_prompt_raise_no_alarm(blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blind:
        monkeypatch.setattr("attn_diag.analyses.inspection.capture_job.shared_rows", nothing_shared)
    found = [h for seed in (0, 1) for h in judged(draw("gaussian", "shared_prompt", seed=seed, heads=4, t_q=128, d=32))]
    # Means of which a test says that they differ from zero; those that a well-rounded kernel has too are no fault.
    alarms = sum(any(rejects(e, 0.01) for name in PRIMARY if (e := getattr(h.bias, name))) for h in found)
    assert (alarms >= 3) if blind else not alarms
    assert not any("biased" in some(h.verdict).labels for h in found)


def test_sequences_that_look_at_one_shared_key_are_one() -> None:
    x = draw("sinks", "independent", heads=1, **SMALL)
    shared = {n: getattr(x, n).clone() for n in ("q", "k", "v")}
    for t in shared.values():
        t[1:, :, :1] = t[:1, :, :1]
    # Every row looks at the first key, which is in all sequences.
    shared["q"] = (0.1 * x.q + 2 * shared["k"][:, :, :1]).bfloat16()
    (found,) = judged(replace(x, **shared))
    assert some(found.bias.delta).n_clusters != 8
    assert reason(found, "look at keys") == (
        "Sequences look at keys that they share: all 8 count as 1 independent sequence; with fewer than 8, means are "
        "tested over distinct rows, of these sequences only."
    )


@pytest.mark.parametrize("merged", [True, False])
def test_rows_that_copy_a_shared_key_share_its_rounding(merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is in two sequences, but the key is that all rows nearly copy; dO has a part that all rows share."""
    if not merged:
        monkeypatch.setattr("attn_diag.analyses.inspection.clusters._SHARED_FROM", math.inf)
    alarms, tested = 0, 0
    for seed in range(3):
        x, g = draw("gaussian", "independent", seed=seed, heads=3, t_q=96), torch.Generator().manual_seed(seed)
        key = torch.randn(1, 3, 1, 64, generator=g)
        key /= key.norm(dim=-1, keepdim=True)
        k, v = x.k.clone(), x.v.clone()
        k[:, :, :1], v[:, :, :1] = 22.6 * key, v[:1, :, :1]
        q = 3.7 * key + 0.5 * x.q.float()
        do = x.do.float() + torch.randn(1, 3, 1, 64, generator=g)
        for head in judged(replace(x, q=q.bfloat16(), k=k, v=v, do=do.bfloat16())):
            alarms += some(some(head.bias.delta).p_value) <= 0.01
            tested += 1
    assert (alarms <= 1) if merged else (alarms >= tested / 3), f"{alarms} of {tested}"


def test_rows_without_a_gradient_are_no_evidence() -> None:
    x = draw("gaussian", "loss_5_percent", heads=1, t_q=256, d=32)
    (found,) = judged(x)
    (all_rows,) = judged(replace(x, do=torch.randn(x.do.shape, generator=torch.Generator().manual_seed(1)).bfloat16()))
    assert some(found.bias.delta).n == 13
    assert some(found.bias.dq).n == 13 * 32
    assert some(found.bias.o_excess).n == 256 * 32
    assert all(row.error != 0 and bool(x.do[0, 0, row.row].any()) for row in found.top_rows)
    assert reason(found, "dO is zero") == "dO is zero in 243 of 256 rows: delta and dQ are tested over the other 13."
    low, high = some(found.noise_factor_ci95)
    near, far = some(all_rows.noise_factor_ci95)
    assert low < some(found.noise_factor) < high
    assert high / low > 1.5 * far / near
    assert not reason(all_rows, "dO is zero")


def test_the_noise_factors_interval_covers() -> None:
    """It covers the factor of much more data, of the same kind."""
    whole = [some(h.noise_factor) for h in judged(draw("gaussian", heads=4, t_q=384, d=32))]
    truth = math.sqrt(np.mean(np.square(whole)))
    few = [h for seed in range(4) for h in judged(draw("gaussian", seed=seed, heads=4, t_q=384, d=32))]
    inside = sum(low <= truth <= high for low, high in (some(h.noise_factor_ci95) for h in few))
    assert inside >= 12, f"{inside} of 16"  # 95 % each; at most once in 1000 fewer


@pytest.mark.parametrize("few", [True, False])
def test_two_rows_make_no_head_lossy(few: bool) -> None:
    """FP32 inputs have no well-rounded kernel beside them: the noise factor is stated, and accuses no kernel."""
    g = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, 1, 64, 16, generator=g) for _ in range(4))
    if few:
        do[:, :, torch.arange(64) % 32 != 31] = 0
    scores = (q.double() @ k.double().mT / 4).masked_fill(~torch.ones(64, 64).tril().bool(), -torch.inf)
    o = scores.softmax(-1) @ v.double()
    o = (o + 2.5 * 2**-24 * o.abs() * torch.randn(o.shape, generator=g)).float()
    (found,) = (h for h in attn_diag.inspect(q, k, v, o=o, do=do, causal=True).captures[0].observations[0].heads[:1])
    assert some(found.noise_factor) > 2
    assert "lossy" not in some(found.verdict).labels
    assert "no more than rounding can make" in reason(found, "no more than rounding")


def signed(rows: np.ndarray) -> SignedErrors:
    return SignedErrors(rows, float(np.square(rows).sum()), 1, len(rows), 0.0, 1.0, 1)


def test_an_error_that_is_the_same_everywhere_is_as_certain_as_so_many_equal_signs() -> None:
    # 0.1 is no float64: sums of it are rounded, and the standard error is next to 0 instead of 0.
    for value in (0.25, 0.1):
        found = estimate_bias(signed(np.full(20, value)), None, 0.01)
        assert found.p_value == 2.0**-19
        assert some(found.standard_error) < 1e-16
        assert (found.t, found.ci95, found.minimum_detectable) == (None, None, None)
    assert some(estimate_bias(signed(np.full(5000, 0.25)), None, 0.01).p_value) > 0


def test_errors_that_cancel_in_every_cluster_are_no_test() -> None:
    rows = np.tile([0.1, -0.1], 10)
    found = estimate_bias(signed(rows), np.repeat(np.arange(10), 2), 0.01)
    assert found.rms == pytest.approx(0.1)
    assert found.p_value is None
    almost = estimate_bias(
        signed(rows + np.repeat(np.linspace(-1, 1, 10), 2) * 1e-6), np.repeat(np.arange(10), 2), 0.01
    )
    assert almost.p_value is not None


def test_a_constant_error_of_independent_rows_is_a_bias() -> None:
    x = draw("gaussian", heads=1, t_q=64, d=32)
    hidden = ~torch.ones(64, 64, dtype=torch.bool).tril()
    scores = (x.q.double() @ x.k.double().mT * x.scale).masked_fill(hidden, -math.inf)
    o = (scores.softmax(-1) @ x.v.double()).bfloat16()
    delta = (x.do.double() * o.double()).sum(-1) + 0.01
    (found,) = judged(x, o=o, delta=delta)
    assert "biased" in some(found.verdict).labels
    assert some(found.bias.delta_excess).p_value == 2.0**-63
    assert "it is the same everywhere, and p the chance that 64 signs agree" in reason(found, "same everywhere")


def test_nearly_uniform_attention_is_explained_and_accuses_nobody() -> None:
    """V of one sign, as a bias makes it: O is the same number in all rows but for its last bits."""
    said = 0
    for seed in range(3):
        x = draw("near_uniform", "full", seed=seed, heads=2)
        for head in judged(replace(x, v=(0.02 * x.v.float() + 0.7).bfloat16())):
            assert "biased" not in some(head.verdict).labels
            said += bool(reason(head, "Attention is nearly uniform here"))
    assert said >= 3
    assert not any(reason(h, "nearly uniform") for h in judged(draw("gaussian", "full", heads=2, **SMALL)))


@pytest.mark.parametrize(("causal", "seed"), [("top-left", 102), ("none", 301)])
def test_a_sequence_of_equal_tokens_accuses_nobody(causal: Causal, seed: int) -> None:
    """32 equal keys share the rounding of P, and equal rows say the same 32 times: no fault, and no bias.

    Without either O was wrong or delta biased in every one of these seeds.
    """
    g = torch.Generator().manual_seed(seed)
    equal = torch.arange(256) // 32 * 32
    q, k, v, do = (torch.randn(1, 2, 256, 64, generator=g).bfloat16() for _ in range(4))
    k, v = k[:, :, equal], v[:, :, equal]
    if causal == "none":
        q, do = q[:, :, equal], do[:, :, equal]
    case = CaseInputs("equal", q, k, v, do, 0.125, causal)
    made = emulate(replace(preset("fa2"), schedule=Schedule(key_tile=64)), case, torch.device("cpu"))
    outputs: dict[str, Any] = {name: made[name] for name in ("o", "lse", "dq", "dk", "dv")}
    found = attn_diag.inspect(case.q, case.k, case.v, do=case.do, causal=causal, device="cpu", **outputs)
    labels = {label for head in found.heads for label in some(head.verdict).labels}
    assert not labels & {"wrong", "lossy", "biased"}, found.report()


def test_equal_keys_share_a_rounding() -> None:
    q, v = torch.randn(4, 8, dtype=torch.float64), torch.ones(6, 8, dtype=torch.float64)
    k = torch.tensor([0, 1, 0, 2, 0, 1.0]).double()[:, None].expand(6, 8).contiguous()
    head = AttentionHead(q=q, k=k, v=v, do=None, scale=1.0)
    alike = some(same_keys(head))
    visible = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0.0]])
    assert together(alike, visible)[:, :3].tolist() == [[3, 2, 3], [2, 1, 2]]
    assert same_keys(replace(head, v=torch.arange(6.0).double()[:, None].expand(6, 8).contiguous())) is None
    bias = torch.zeros(4, 6, dtype=torch.float64)
    assert same_keys(replace(head, masking=Masking(mask=bias))) is None
