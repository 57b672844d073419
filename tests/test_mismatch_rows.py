"""Trainer against engine where few rows are wrong, or O is cut, or nothing is: what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.analyses.mismatch.storage import format_below
from attn_diag.kernels import Recipe, preset
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import emulate

CPU, FA2 = torch.device("cpu"), preset("fa2")


def mismatch(
    folder: Path, case: CaseInputs, engine: Callable[[CaseInputs], Tensor], other: CaseInputs | None = None
) -> str:
    """The first sentence on a trainer that runs fa2, and an engine on the same inputs, or on others."""
    given = other or case
    for run, inputs, o in (("train", case, emulate(FA2, case, CPU)["o"]), ("rollout", given, engine(given))):
        (folder / run).mkdir()
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": o}
        attn_diag.Capture.from_tensors(tensors, causal="top-left", layer=0).save(folder / run / "layer0.safetensors")
    found = attn_diag.mismatch(folder / "train", folder / "rollout")
    return " ".join(found.report().partition("\n\n")[0].split())


def normal(seed: int, *, saturated: bool = False) -> CaseInputs:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 192, 32, generator=g) for _ in range(3))
    if saturated:
        k[:, :, 0] *= 4
        q = q + 0.4 * k[:, :, :1]
        v[:, :, 0] *= 0.01
    return CaseInputs("normal", q.bfloat16(), k.bfloat16(), v.bfloat16(), None, 32**-0.5, "top-left")


def _stale_row(case: CaseInputs) -> Tensor:
    o = emulate(FA2, case, CPU)["o"].clone()
    o[0, 1, 128] = o[0, 1, 127]
    return o


def _cut(case: CaseInputs) -> Tensor:
    return emulate(replace(FA2, out="bf16:toward-zero"), case, CPU)["o"]


def _other_tiles(case: CaseInputs) -> Tensor:
    return emulate(replace(FA2, schedule=replace(FA2.schedule, key_tile=32)), case, CPU)["o"]


@pytest.mark.parametrize("seed", range(2))
def test_one_stale_row_is_found(seed: int, tmp_path: Path) -> None:
    said = mismatch(tmp_path, normal(seed), _stale_row)
    assert "rollout's O is off in few rows, most at token 128 in head 1" in said


@pytest.mark.parametrize("spread", [1.0, 1.5])
def test_one_row_that_is_two_per_cent_too_large_is_found(spread: float, tmp_path: Path) -> None:
    def engine(given: CaseInputs) -> Tensor:
        o = emulate(FA2, given, CPU)["o"].clone()
        o[0, 1, 128] *= 1.02
        return o

    case = normal(0)
    said = mismatch(tmp_path, replace(case, q=spread * case.q), engine)
    assert "rollout's O is off in few rows, most at token 128 in head 1" in said
    assert said.endswith("a fault, or a coarser rounding than a well-rounded kernel's."), said


def _times(factor: float, *place: slice | int) -> Callable[[CaseInputs], Tensor]:
    """A kernel that multiplies a part of its O before it rounds that."""

    def engine(case: CaseInputs) -> Tensor:
        o = emulate(replace(FA2, out="fp32"), case, CPU)["o"].clone()
        o[(0, *place)] *= factor
        return o.bfloat16()

    return engine


def _of_scale(factor: float) -> Callable[[CaseInputs], Tensor]:
    return lambda case: emulate(FA2, replace(case, scale=factor * case.scale), CPU)["o"]


EVERY = slice(None)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (_times(1.005, 1, slice(64, 128)), "0.5 % (± 0.0"),
        (_times(1.003, EVERY, slice(96, None)), "too large, most clearly in head"),
        (_times(1.01, 1, EVERY, 5), "too large, most clearly in head 1 in feature 5; 1 of 2 heads show such"),
        (_times(0.998, 0), "too small, most clearly in head 0; 1 of 2 heads show such"),
        (_of_scale(1.002), "many elements share it: rollout's O is as a softmax scale 0.21 % (± 0."),
    ],
    ids=["64 rows", "half of the rows", "feature", "head", "scale"],
)
def test_what_many_elements_share_is_found_below_rounding(
    engine: Callable[[CaseInputs], Tensor], words: str, tmp_path: Path
) -> None:
    said = mismatch(tmp_path, normal(0), engine)
    assert said.startswith("FAIL the runs part in layer 0: rollout's O is"), said
    assert words in said, said


@pytest.mark.parametrize("scale", [0.0, 0.02, 4.0])
@pytest.mark.parametrize("recipe", [replace(FA2, row_sum_of="cast-probs"), replace(FA2, probs="fp32")])
def test_what_healthy_kernels_share_is_no_fault(recipe: Recipe, scale: float, tmp_path: Path) -> None:
    """Nearly equal scores: every P is rounded alike; a feature of one value, so is O."""
    case = normal(0)
    case = replace(case, q=scale * case.q, v=case.v.index_fill(3, torch.tensor([3]), 1.7))
    said = mismatch(tmp_path, case, lambda c: emulate(recipe, c, CPU)["o"])
    assert said.startswith(("OK nothing beyond rounding", "OK train and rollout are bit")), said


def test_what_is_too_small_to_be_seen_is_said(tmp_path: Path) -> None:
    said = mismatch(tmp_path, normal(0), _of_scale(1.0001))
    assert said.startswith("OK nothing beyond rounding and schedule is seen"), said
    assert "(not seen are errors below 0." in said
    assert "% of the softmax scale, and what only single elements or rows here and there have)" in said


@pytest.mark.parametrize("recipe", [replace(FA2, scores="bf16"), replace(FA2, row_sum="bf16")], ids=["scores", "l"])
def test_a_rounding_in_all_rows_is_none_of_few(recipe: Recipe, tmp_path: Path) -> None:
    case = normal(0)
    said = mismatch(tmp_path, replace(case, q=0.5 * case.q), lambda c: emulate(recipe, c, CPU)["o"])
    assert "few rows" not in said


@pytest.mark.parametrize("seed", range(2))
def test_truncation_is_no_other_scale(seed: int, tmp_path: Path) -> None:
    said = mismatch(tmp_path, normal(seed), _cut)
    assert said.startswith("FAIL")
    assert "softmax scale" not in said.partition(";")[0], said


@pytest.mark.parametrize("saturated", [False, True])
def test_other_tiles_are_rounding(tmp_path: Path, *, saturated: bool) -> None:
    said = mismatch(tmp_path, normal(510, saturated=saturated), _other_tiles)
    assert said.startswith(("OK nothing beyond rounding and schedule is seen", "OK train and rollout are bit")), said


def test_v_stored_in_fp8_is_no_rounding(tmp_path: Path) -> None:
    """The engine's capture holds what its cache does, and its kernel is well rounded on that."""
    case = normal(3)
    scale = float(case.v.abs().max()) / 448
    cached = replace(case, v=((case.v.float() / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16())
    said = mismatch(tmp_path, case, lambda c: emulate(FA2, c, CPU)["o"], cached)
    assert said.startswith("FAIL the runs part in layer 0: v of rollout holds numbers of FP8 (E4M3) alone (2."), said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": "bf16:toward-zero"}, "the last cast of O truncates"),
        ({"probs": "bf16:toward-zero"}, "the cast of P̄ truncates"),
        ({"accumulator": "bf16", "tile": 32}, "the accumulator of O in BF16 (32-key tiles descending)"),
        (
            {"accumulator": "bf16", "tile": 40},
            "no coarser rounding and no other semantics that was tried explains that",
        ),
    ],
)
def test_a_coarser_rounding_is_named_or_said_to_be_unknown(
    changes: dict[str, str | int], words: str, tmp_path: Path
) -> None:
    sites = {site: how for site, how in changes.items() if site != "tile"}
    schedule = replace(FA2.schedule, key_tile=int(changes.get("tile", FA2.schedule.key_tile)))
    recipe = replace(FA2, schedule=schedule, **sites)  # type: ignore[arg-type]
    said = mismatch(tmp_path, normal(0), lambda c: emulate(recipe, c, CPU)["o"])
    assert said.startswith("FAIL the runs part in layer 0: rollout's O is 1."), said
    assert words in said


def _compiled(scores: Tensor, alpha: float) -> Tensor:
    """As Inductor fuses plain torch: q k^T is stored, and what follows is in fp32 up to P."""
    return (scores.float() * alpha).masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)


def _in_steps(scores: Tensor, alpha: float) -> Tensor:
    """As JAX's softmax: every step of it in BF16."""
    hidden = (scores * alpha).masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    powers = (hidden - hidden.amax(-1, keepdim=True)).exp()
    return powers / powers.float().sum(-1, keepdim=True).bfloat16()


@pytest.mark.parametrize(
    ("probs", "words"),
    [(_compiled, "S and P are stored in the inputs' format"), (_in_steps, "every step of softmax is stored in")],
)
def test_the_ways_of_attention_that_is_not_fused_are_named(
    probs: Callable[[Tensor, float], Tensor], words: str, tmp_path: Path
) -> None:
    def engine(case: CaseInputs) -> Tensor:
        return probs(case.q @ case.k.mT, case.scale).bfloat16() @ case.v

    case = normal(4)
    said = mismatch(tmp_path, replace(case, q=3 * case.q), engine)
    assert f"kernel's: {words}" in said


def test_k_and_v_in_fp8_inside_the_kernel_are_named(tmp_path: Path) -> None:
    def engine(case: CaseInputs) -> Tensor:
        k, v = (x.to(torch.float8_e4m3fn).bfloat16() for x in (case.k, case.v))
        return emulate(FA2, replace(case, k=k, v=v), CPU)["o"]

    assert "kernel's: k and v in FP8 (E4M3)" in mismatch(tmp_path, normal(1), engine)


@pytest.mark.parametrize(
    ("names", "fmt", "words"),
    [
        ("kv", torch.float8_e5m2, "k and v in FP8 (E5M2)"),
        ("qk", torch.float8_e4m3fn, "q and k in FP8 (E4M3)"),
        ("o", torch.float8_e4m3fn, "O in FP8 (E4M3)"),
    ],
)
def test_fp8_inside_the_kernel_is_named(names: str, fmt: torch.dtype, words: str, tmp_path: Path) -> None:
    def engine(case: CaseInputs) -> Tensor:
        given = replace(case, **{name: getattr(case, name).to(fmt).bfloat16() for name in names if name != "o"})
        wide = emulate(replace(FA2, out="fp32"), given, CPU)["o"]
        return wide.to(fmt if names == "o" else torch.bfloat16).bfloat16()

    assert f"kernel's: {words}" in mismatch(tmp_path, normal(7), engine)


@pytest.mark.parametrize("times", [1.0, 1.05])
def test_an_o_stored_in_fp8_with_a_scale_is_said_to_be(times: float, tmp_path: Path) -> None:
    """It was "no coarser rounding … that was tried explains that"."""

    def engine(case: CaseInputs) -> Tensor:
        o = times * emulate(replace(FA2, out="fp32"), case, CPU)["o"]
        scale = o.abs().amax((2, 3), keepdim=True) / 448
        return ((o / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16()

    said = mismatch(tmp_path, normal(7), engine)
    assert "all of it are numbers of FP8 (E4M3), as it was stored below 16 bits" in said
    assert "explains" not in said


@pytest.mark.parametrize("zero", [False, True])
def test_a_row_that_a_coarse_kernel_never_wrote_is_told(zero: bool, tmp_path: Path) -> None:
    """It was "rounds more coarsely than its format" alone."""

    def engine(case: CaseInputs) -> Tensor:
        k, v = (x.float().to(torch.float8_e4m3fn).bfloat16() for x in (case.k, case.v))
        o = emulate(FA2, replace(case, k=k, v=v), CPU)["o"]
        o[0, 1, -1] *= 0 if zero else 1
        return o

    said = mismatch(tmp_path, normal(7), engine)
    assert ("rollout's O is zero at token 191 in head 1, as if never written" in said) == zero


def test_heads_in_each_others_place_are_not_said_to_be_too_small(tmp_path: Path) -> None:
    """It was "rollout's O is 99 % too small"."""
    said = mismatch(tmp_path, normal(7), lambda case: emulate(FA2, case, CPU)["o"].flip(1))
    assert "too small" not in said
    assert "rollout's O has a factor of " in said
    assert "it is something else (another head's or row's, or never written)" in said


def test_numbers_of_four_bits_inside_the_kernel_are_not_said_to_be_no_rounding(tmp_path: Path) -> None:
    def engine(case: CaseInputs) -> Tensor:
        step = case.k.float().abs().amax(-1, keepdim=True) / 7
        return emulate(FA2, replace(case, k=((case.k / step).round() * step).bfloat16()), CPU)["o"]

    assert "it rounds more coarsely than its format, or computes what was not tried" in mismatch(
        tmp_path, normal(8), engine
    )


def test_a_row_that_coarse_scores_could_make_is_not_said_to_be_no_rounding(tmp_path: Path) -> None:
    """Every step in BF16, with the keys in two parts; one row has large scores."""

    def engine(case: CaseInputs) -> Tensor:
        hidden = torch.ones(192, 192).triu(1).bool()
        scores = (case.q * case.scale @ case.k.mT).masked_fill(hidden, -1e30)
        parts = [(one.amax(-1, keepdim=True), one, at) for at, one in ((0, scores[..., :96]), (96, scores[..., 96:]))]
        top = torch.maximum(parts[0][0], parts[1][0])
        powers = [((one - own).exp(), (own - top).exp(), at) for own, one, at in parts]
        out = sum(((p @ case.v[:, :, at : at + 96]) * factor for p, factor, at in powers), torch.zeros(()))
        return out / sum((p.sum(-1, keepdim=True) * factor for p, factor, _ in powers), torch.zeros(()))

    case = normal(0)
    hot = torch.where((torch.arange(192) == 170)[:, None], 10 * case.q, case.q)
    said = mismatch(tmp_path, replace(case, q=hot), engine)
    assert "rollout's O is off in few rows, most at token 170 in head 0" in said
    assert "a fault, or scores rounded to 16 bits" in said


def test_numbers_of_16_bits_are_not_taken_for_fewer() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    for given in (x, torch.ones_like(x), torch.zeros_like(x), x[:0], x.sign() * x.abs().sqrt().bfloat16().double()):
        assert format_below(given) is None


@pytest.mark.parametrize("scale", [1.0, 0.0137])
def test_numbers_of_8_bits_are_known(scale: float) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for dtype, words in ((torch.float8_e4m3fn, "FP8 (E4M3)"), (torch.float8_e5m2, "FP8 (E5M2)")):
        assert format_below(((x / scale).to(dtype).float() * scale).bfloat16().double()) == words
    step = x.abs().amax(1, keepdim=True) / 127
    assert format_below(((x / step).round() * step).bfloat16().double()) == "INT8"


def _ring(case: CaseInputs) -> Tensor:
    """Hops of 32 keys, the first keys first; each one's O and the merged O are stored in BF16."""
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    scores = (q @ k.mT * case.scale).masked_fill(torch.ones(192, 192, dtype=torch.bool).triu(1), -torch.inf)
    total, running = torch.zeros_like(q), torch.full((*q.shape[:3], 1), -torch.inf)
    for begin in range(0, 192, 32):
        part = scores[..., begin : begin + 32]
        top = part.amax(-1, keepdim=True)
        probs = (part - top.masked_fill(top == -torch.inf, 0.0)).exp()
        size = probs.sum(-1, keepdim=True)
        o = (probs.bfloat16().float() @ v[..., begin : begin + 32, :] / size.clamp(min=1e-30)).bfloat16().float()
        both = torch.logaddexp(running, top + size.log())
        total = (total + (top + size.log() - both).exp().nan_to_num(0.0) * (o - total)).bfloat16().float()
        running = both
    return total.bfloat16()


def test_the_format_and_order_of_a_rings_merges_are_named(tmp_path: Path) -> None:
    said = mismatch(tmp_path, normal(1), _ring)
    assert "the O of each split of keys, and the merged O after each, in BF16 (splits of 32 keys)" in said


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (-3.0, "a mask that hides keys by adding -3 to their scores"),
        (0.0, "no causal mask: each row sees all keys after its own"),
    ],
)
def test_hidden_keys_are_no_sink(hidden: float, words: str, tmp_path: Path) -> None:
    def engine(case: CaseInputs) -> Tensor:
        scores = case.q.float() @ case.k.float().mT * case.scale + torch.full((192, 192), hidden).triu(1)
        return (scores.softmax(-1) @ case.v.float()).bfloat16()

    said = mismatch(tmp_path, normal(2), engine)
    assert said.startswith(f"FAIL the runs part in layer 0: rollout computes with {words}"), said


def _base_e_taken_as_base_2(case: CaseInputs) -> Tensor:
    """Two splits whose natural LSE is put into exp2."""
    hidden = torch.ones(192, 192, dtype=torch.bool).triu(1)
    scores = (case.q.double() @ case.k.double().mT * case.scale).masked_fill(hidden, -torch.inf)
    outs, logs = [], []
    for keys in (slice(0, 64), slice(64, 128), slice(128, 192)):
        logs.append(scores[..., keys].logsumexp(-1, keepdim=True))
        outs.append((scores[..., keys] - logs[-1]).exp().nan_to_num(0.0) @ case.v[..., keys, :].double())
    weights = torch.exp2(torch.stack(logs))
    return ((torch.stack(outs) * weights).sum(0) / weights.sum(0)).bfloat16()


def test_a_natural_lse_put_into_exp2_is_named(tmp_path: Path) -> None:
    said = mismatch(tmp_path, normal(4), _base_e_taken_as_base_2)
    assert "merged through an LSE to base e that is taken as one to base 2" in said


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_o_that_is_not_finite_is_no_rounding(value: float, tmp_path: Path) -> None:
    def engine(case: CaseInputs) -> Tensor:
        return emulate(FA2, case, CPU)["o"].index_fill(2, torch.tensor([100, 101]), value)

    said = mismatch(tmp_path, normal(5), engine)
    assert "layer 0: rollout's O is NaN or infinite in 4 of 384 rows of its heads, first at token 100 in head 0" in said


@pytest.mark.parametrize(("which", "rows"), [("q", "q"), ("k", "k or v"), ("v", "k or v")])
def test_inputs_that_are_not_finite_come_from_before_attention(which: str, rows: str, tmp_path: Path) -> None:
    case = normal(6)
    broken = replace(case, **{which: getattr(case, which).index_fill(2, torch.tensor([100]), torch.nan)})

    def engine(_: CaseInputs) -> Tensor:
        o = emulate(FA2, case, CPU)["o"]
        return o.index_fill(2, torch.arange(100, 101 if which == "q" else 192), torch.nan)

    said = mismatch(tmp_path, case, engine, broken)
    assert f"layer 0: {rows} of rollout is NaN or infinite in 2 of 384 rows of its heads: that comes from" in said
    assert "rollout's O" not in said


def test_dropout_is_refused_with_what_to_do() -> None:
    case = normal(5)
    tensors = {"q": case.q, "k": case.k, "v": case.v, "o": emulate(FA2, case, CPU)["o"]}
    plain = attn_diag.Capture.from_tensors(tensors, causal="top-left", layer=0)
    kept = torch.ones(1, 2, 192, 192, dtype=torch.bool)
    dropping = attn_diag.Capture.from_tensors(
        {**tensors, "dropout_mask": kept}, causal="top-left", layer=0, dropout_p=0.1
    )
    for pair in ((plain, dropping), (dropping, plain)):
        with pytest.raises(attn_diag.InputError, match=r"attention dropout \(p = 0.1\).*model.eval\(\)"):
            attn_diag.mismatch(*pair)


def test_a_small_jump_outside_attention_is_told_and_no_cause() -> None:
    """x of layer 1 differs by 2 %, and nothing before it."""
    case, runs = normal(6), []
    x = torch.randn(1, 192, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for off in (0.0, 0.02):
        other = x + off * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        tensors = {"q": case.q, "k": case.k, "v": case.v, "o": emulate(FA2, case, CPU)["o"]}
        layers = [{**tensors, "x": x}, {**tensors, "x": other}]
        runs.append([attn_diag.Capture.from_tensors(t, causal="top-left", layer=n) for n, t in enumerate(layers)])
    found = attn_diag.mismatch(*runs)
    assert not found.causes
    assert any("Layer 1: x differs by 2" in note and "explain_logprobs" in note for note in found.notes)


def three_bits(t: Tensor) -> Tensor:
    """From -3 to 3, a scale a token and head."""
    step = t.float().abs().amax(-1, keepdim=True) / 3
    return ((t.float() / step).round() * step).bfloat16()


@pytest.mark.parametrize(
    ("fault", "said"), [("", ""), ("v 5 % larger", "v differs by 5"), ("tokens of v", "v differs")]
)
def test_a_quantiser_of_few_bits_in_both_runs_makes_no_cause(fault: str, said: str) -> None:
    """x of layer 1 is a rounding away, and k and v that are quantised by whole steps."""
    generator = torch.Generator().manual_seed(0)
    weights = [[torch.randn(64, 64, generator=generator) / 8 for _ in range(3)] for _ in range(2)]
    x = torch.randn(1, 96, 64, generator=generator).bfloat16()
    rounded = (x.float() * (1 + 2**-9 * torch.randn(x.shape, generator=generator))).bfloat16()

    def captures(of_layers: list[Tensor]) -> list[attn_diag.Capture]:
        found = []
        for layer, (given, of_layer) in enumerate(zip(of_layers, weights, strict=True)):
            q, k, v = ((given.float() @ w).bfloat16().view(1, 96, 2, 32).transpose(1, 2) for w in of_layer)
            if layer == 1 and given is rounded:
                v = 1.05 * v if fault == "v 5 % larger" else v
                v = torch.cat([v[:, :, :40], v[:, :, 41:47], v[:, :, 46:]], 2) if fault == "tokens of v" else v
            k, v = three_bits(k), three_bits(v)
            o = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
            tensors = {"q": q, "k": k, "v": v, "o": o.bfloat16(), "x": given}
            found.append(attn_diag.Capture.from_tensors(tensors, causal="top-left", layer=layer))
        return found

    found = attn_diag.mismatch(captures([x, x]), captures([x, rounded]))
    assert found.layers[1].v > 8 / 256  # more than roundings make
    assert [cause.layer for cause in found.causes] == [1] * bool(fault)
    assert said in "".join(cause.words for cause in found.causes)
