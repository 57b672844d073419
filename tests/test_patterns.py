"""Where and how a quantity is wrong: planted defects are named, coarse and healthy kernels are not accused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from builders import stored
from planted_heads import BF16, FAMILIES, Steps, evidence_of, inputs, named, rounded
from torch import Tensor

import attn_diag
from attn_diag.analyses.patterns.find import find_patterns
from attn_diag.analyses.patterns.gather import HeadTruths
from attn_diag.analyses.patterns.numbers import factors, in_words
from attn_diag.analyses.patterns.worded import with_patterns
from attn_diag.head.read import HeadInputs
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking, format_of
from attn_diag.results.quality import Pattern, Quantity, QuantityVerdict
from attn_diag.results.wording import singular

EVERY = [(family, causal) for family in FAMILIES for causal in ("top-left", "none")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Heads this small are faster in one thread, several times so where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def every_head(seed: int = 0, **more: object) -> list[AttentionHead]:
    return [inputs(family, seed, masking=Masking(causal), **more) for family, causal in EVERY]  # type: ignore[arg-type]


def words_of(head: AttentionHead, quantity: Quantity, observed: Tensor) -> str:
    found, _ = named(head, quantity, observed)
    return "" if found is None else found.words


# What is done to a right tensor, and what must be said of rows or keys.
PLACES: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "last rows unwritten": (lambda t: t[128:].zero_(), "s 0-127 are right; {unit}s 128-191 are zero, as if never"),
    "a tile of another": (
        lambda t: t[64:128].copy_(t[0:64].clone()),
        "64-127 hold what belongs 64 {unit}s before; {unit}s 128-191 are right",
    ),
    "sign": (lambda t: t.neg_(), "all {unit}s have the wrong sign"),
    "sign of some rows": (lambda t: t[64:128].neg_(), "{unit}s 64-127 have the wrong sign"),
    "factor": (lambda t: t.mul_(1.25), "all {unit}s are 1.25 times the true ones"),
    "every 16th row": (lambda t: t[::16].mul_(2), "every 16th {unit} from 0 is 2 times the true one"),
    "first rows of every 64": (lambda t: [t[a : a + 16].zero_() for a in (0, 64, 128)], "{unit}s 0-15 of every 64"),
    "features": (lambda t: t[:, 8:12].zero_(), "features 8-11 are zero, as if never written; all other"),
    "features shifted": (lambda t: t.copy_(t.roll(1, 1)), "all {unit}s have their features moved on by 1"),
    "NaN": (lambda t: t[9].fill_(math.nan), "{unit} 9 holds NaN or Inf"),
}  # fmt: skip


@pytest.mark.parametrize("quantity", ["o", "dq", "dk"])
@pytest.mark.parametrize("defect", PLACES)
def test_places_are_named(quantity: Quantity, defect: str) -> None:
    plant, expected = PLACES[defect]
    head = inputs("gaussian", masking=Masking("none"))
    observed = Steps(head).outputs()[quantity].clone()
    plant(observed)
    assert expected.format(unit="key" if quantity == "dk" else "row") in words_of(head, quantity, observed)


@pytest.mark.parametrize("family", FAMILIES)
def test_unrelated_rows_between_right_ones_and_zeros(family: str) -> None:
    head = inputs(family)
    observed = Steps(head).outputs()["dq"].clone()
    generator = torch.Generator().manual_seed(3)
    observed[32:160] = torch.randn(128, 32, generator=generator, dtype=torch.float64) * observed.std()
    observed[160:] = 0
    words = words_of(head, "dq", observed)
    assert words.startswith("rows 0-31 are right; rows 32-159")
    assert "unrelated to the gradient" in words
    assert "are zero, as if never written" in words


def test_single_elements_are_named_with_their_values() -> None:
    head = inputs()
    observed = Steps(head).outputs()["o"].clone()
    true = float(observed[5, 3])
    observed[5, 3] = 3.0
    assert words_of(head, "o", observed).startswith(f"row 5, feature 3 is 3 instead of {true:.2g}")


def seen(head: AttentionHead, change: Callable[[Tensor], object]) -> Steps:
    visible = Steps(head).visible.clone()
    change(visible)
    return Steps(head, visible=visible)


def test_another_scale_is_fitted_and_named() -> None:
    for family, causal in EVERY:
        for value, name in ((33**-0.5, "(1/sqrt(33))"), (0.3, "instead of"), (32**-0.5 / math.log(2), "log2(e))")):
            head = inputs(family, 1, masking=Masking(causal))  # type: ignore[arg-type]
            words = words_of(head, "o", Steps(head, scale=value).outputs()["o"])
            assert "are what the scale" in words, (family, causal, value)
            assert name in words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_scale_is_named_under_an_additive_mask_that_only_hides(dtype: torch.dtype) -> None:
    """As transformers hands it to eager and registered attention functions."""
    for factor in (1.1, 0.98):
        head = inputs("normal", 2, masking=Masking("top-left"))
        observed = Steps(head, scale=factor * head.scale).outputs()["o"]
        later = torch.ones(len(head.q), len(head.k), dtype=torch.bool).triu(1)
        hiding = torch.zeros(later.shape, dtype=dtype).masked_fill(later, torch.finfo(dtype).min)
        words = words_of(replace(head, masking=Masking(mask=hiding)), "o", observed)
        assert f"are what the scale {factor * head.scale:.3g}" in words
        biased = hiding.masked_fill(~later, -1.0)
        assert "the scale" not in words_of(replace(head, masking=Masking(mask=biased)), "o", observed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantity", ["o", "dq", "dk", "dv"])
def test_another_mask_is_named(family: str, quantity: Quantity) -> None:
    head = inputs(family, 2)
    off_by_one = seen(head, lambda mask: mask.logical_or_(torch.ones_like(mask).tril(1)))
    assert "a causal border one key further on" in words_of(head, quantity, off_by_one.outputs()[quantity])
    ignored = seen(head, lambda mask: mask.fill_(True))
    assert "attention without the causal mask" in words_of(head, quantity, ignored.outputs()[quantity])


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize(("window", "more", "words"), [(18, 1, "the window 19,0"), (18, -1, "the window 17,0")])
def test_a_window_that_is_stated_by_a_mask_is_named(kind: str, window: int, more: int, words: str) -> None:
    """As transformers hands sliding windows to eager and registered attention functions."""
    head = inputs("normal", 2, masking=Masking("top-left", (window, 0)))
    mask = torch.ones(len(head.q), len(head.k)).tril().triu(-window).bool()
    if kind == "additive":
        mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, torch.finfo(torch.bfloat16).min)
    masked = replace(head, masking=Masking(mask=mask))
    other = Steps(replace(head, masking=Masking("top-left", (window + more, 0)))).outputs()
    assert all(words in words_of(masked, name, other[name]) for name in ("o", "dq", "dk", "dv"))


def test_a_causal_border_that_is_stated_by_a_mask_is_named() -> None:
    head = inputs("normal", 2)
    masked = replace(head, masking=Masking(mask=torch.ones(len(head.q), len(head.k)).tril().bool()))
    off_by_one = seen(head, lambda mask: mask.logical_or_(torch.ones_like(mask).tril(1))).outputs()
    assert all("border one key further on" in words_of(masked, name, off_by_one[name]) for name in ("o", "dq", "dv"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lost_tile_of_keys_is_named(family: str) -> None:
    head = inputs(family, 3, masking=Masking("none"))
    lost = seen(head, lambda mask: mask[:, 64:96].fill_(False)).outputs()
    assert "miss keys 64-95" in words_of(head, "o", lost["o"])
    assert "miss keys 64-95 in forward and backward alike" in words_of(head, "dq", lost["dq"])
    steps = Steps(head)
    steps.ds[:, 64:128] *= 2
    assert "count keys 64-127 twice" in words_of(head, "dq", steps.outputs()["dq"])
    steps = Steps(head)
    steps.p[:, 64:128] *= 2
    assert "count keys 64-127 twice in P V, though not in the row sum" in words_of(head, "o", rounded(steps.p @ head.v))


@pytest.mark.parametrize("family", ["gaussian", "peaked"])
def test_tiles_that_lost_different_parts_are_told_apart(family: str) -> None:
    head = inputs(family, 3, masking=Masking("none"))
    steps = Steps(head)
    steps.ds[64:128, :64] = 0
    steps.ds[128:192, 64:128] *= 2
    words = words_of(head, "dq", steps.outputs()["dq"])
    assert "rows 0-63 are right; rows 64-127" in words
    assert "miss keys 0-63; rows 128-191" in words
    assert words.endswith("count keys 64-127 twice")


def test_rows_of_which_one_tile_alone_is_explained_leave_the_others_open() -> None:
    head = inputs(seed=3, masking=Masking("none"))
    steps = Steps(head)
    steps.ds[64:128, :64] = 0
    steps.ds[128:192] += steps.ds[128:192].roll(5, 1)
    words = words_of(head, "dq", steps.outputs()["dq"])
    assert "rows 64-127 miss keys 0-63; rows 128-191 are" in words
    assert words.endswith(" % off")


@pytest.mark.parametrize("left", [31, 64])
def test_a_window_that_is_not_stated_is_named_where_the_backward_has_it(left: int) -> None:
    head = inputs(seed=3)
    steps = Steps(head)
    hidden = torch.arange(192) < torch.arange(192)[:, None] - left
    steps.ds, steps.p = steps.ds.masked_fill(hidden, 0.0), steps.p.masked_fill(hidden, 0.0)
    for quantity in ("dq", "dk", "dv"):
        words = words_of(head, quantity, steps.outputs()[quantity])
        assert f"are what the window {left},0 in the backward alone gives" in words


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lost_tile_of_query_rows_is_named(family: str) -> None:
    head, steps = inputs(family, 4), Steps(inputs(family, 4))
    steps.ds[64:96] = 0
    steps.p[128:192] = 0
    assert "miss query rows 64-95" in words_of(head, "dk", steps.outputs()["dk"])
    assert "miss query rows 128-191" in words_of(head, "dv", steps.outputs()["dv"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantity", ["dq", "dk", "dv"])
def test_a_tile_whose_accumulator_was_not_cleared_is_named(family: str, quantity: Quantity) -> None:
    head = inputs(family, 5, masking=Masking("none"))
    true = Steps(head).outputs()[quantity]
    unit = "row" if quantity == "dq" else "key"
    one = true.clone()
    one[64:128] += true[:64]
    words = words_of(head, quantity, rounded(one))
    assert f"{unit}s 64-127" in words
    assert f"hold their own sum and that of 64 {unit}s before, as where an accumulator is not cleared" in words
    every = rounded(true.unflatten(0, (-1, 32)).cumsum(0).flatten(0, 1))
    assert f"those of all tiles of 32 {unit}s before" in words_of(head, quantity, every)


def test_one_key_too_many_in_one_row() -> None:
    head = inputs()
    head.q[100] = 4 * head.k[150]
    found = seen(head, lambda mask: mask[100, 150].fill_(True)).outputs()
    assert "row 100 sees key 150, which is masked" in words_of(head, "o", found["o"])


def test_no_normalisation() -> None:
    for head in every_head():
        steps = Steps(head)
        assert "not divided by the row sum" in words_of(head, "o", rounded(steps.p_bar @ head.v))
        assert "use P before its division" in words_of(head, "dv", rounded(steps.p_bar.T @ steps.do))


DELTAS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "none": (torch.zeros_like, "without delta"),
    "sign": (torch.neg, "delta with the wrong sign"),
    "next row": (lambda d: d.roll(-1, 0), "delta of the next row"),
    "factor": (lambda d: 0.7 * d, "delta multiplied by 0.7"),
}


@pytest.mark.parametrize("defect", DELTAS)
def test_a_wrong_delta_is_named(defect: str) -> None:
    change, expected = DELTAS[defect]
    for head in every_head(5):
        steps = Steps(head)
        dscores = steps.p_bar / steps.l * (steps.dp - change(steps.delta))
        assert expected in words_of(head, "dq", rounded(head.scale * dscores @ head.k))


def test_a_factor_of_two_is_no_root_of_a_scale() -> None:
    assert not {2.0, 0.5} & {*factors(16**-0.5, scaled=False).values()}
    assert factors(64**-0.5, scaled=True)["1/sqrt(scale)"] == 8**0.5


def test_factors_of_gradients_and_tensors_in_the_wrong_place() -> None:
    for head in every_head(6):
        steps, found = Steps(head), Steps(head).outputs()
        assert "(the scale is missing)" in words_of(head, "dq", rounded(steps.ds @ head.k))
        assert "(the scale is applied twice)" in words_of(head, "dk", rounded(head.scale * found["dk"]))
        assert "have dS transposed" in words_of(head, "dq", rounded(head.scale * steps.ds.T @ head.k))
        assert "have P transposed" in words_of(head, "dv", rounded(steps.p @ steps.do))
        assert "hold dV" in words_of(head, "dk", found["dv"])


LSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "ln 2": (lambda lse, _: lse - math.log(2), "are off by -0.693 (-ln 2)"),
    "base 2": (lambda lse, _: lse / math.log(2), "1.44 times the true ones (log2(e))"),
    "row max": (lambda _, row_max: row_max, "hold the row maximum alone"),
    "row before": (lambda lse, _: lse.roll(1), "hold what belongs 1 row before"),
}


@pytest.mark.parametrize("defect", LSES)
def test_a_wrong_lse_is_named(defect: str) -> None:
    change, expected = LSES[defect]
    for head in every_head(7):
        steps = Steps(head)
        lse = change(steps.outputs()["lse"], steps.m[:, 0])
        assert expected in words_of(head, "lse", lse.float().double())


def test_a_wrong_delta_captured_is_named() -> None:
    head, steps = inputs(seed=8), Steps(inputs(seed=8))
    delta = steps.delta[:, 0]
    for observed, expected in ((-delta, "wrong sign"), (delta.roll(-1), "1 row further on"), (0 * delta, "zero")):
        assert expected in words_of(head, "delta", observed.float().double())


def test_tensors_of_another_head_are_named() -> None:
    for family in FAMILIES:
        head, other = inputs(family, 9), inputs(family, 10)
        others = (("head 3", lambda other=other: other),)
        for quantity in ("o", "dq", "dk", "dv"):
            found, _ = named(head, quantity, Steps(other).outputs()[quantity], others)
            assert found is not None
            assert found.words.endswith("are what head 3 gives")
        mixed = Steps(replace(head, v=other.v)).outputs()["o"]
        found, _ = named(head, "o", mixed, others)
        assert found is not None
        assert found.words.endswith("are what V of head 3 gives")


@pytest.mark.parametrize("family", ["gaussian", "low rank"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("l", "use L of head 3"), ("l of a tile", "use L of 64 rows before"), ("delta", "have the delta of head 3"),
        ("first half", "have a delta of the first half of the features alone"),
        ("unnormalised", "have a delta of O before its division by the row sum"),
    ],
)  # fmt: skip
def test_a_row_sum_of_another_row_or_head_is_named(family: str, what: str, words: str) -> None:
    """What dQ is with an L or a delta that belongs elsewhere."""
    head = inputs(family, 14, masking=Masking("none"))
    other = replace(head, q=inputs(family, 15).q, do=inputs(family, 15).do)
    steps, theirs = Steps(head), Steps(other)
    lse, delta = steps.m + steps.l.log(), steps.delta.clone()
    if what == "l of a tile":
        lse[64:128] = lse[:64].clone()
    elif what == "l":
        lse = theirs.m + theirs.l.log()
    elif what == "delta":
        delta = theirs.delta
    elif what == "first half":
        delta = (steps.do * steps.o)[:, :16].sum(1, keepdim=True)
    else:
        delta = delta * steps.l
    scores = head.q @ head.k.T * head.scale
    steps.ds = ((scores - lse).exp() * (steps.dp - delta)).bfloat16().double()
    found, _ = named(head, "dq", steps.outputs()["dq"], (("head 3", lambda: other),))
    assert found is not None
    assert words in found.words


def test_a_query_head_left_out_of_its_group() -> None:
    heads = [inputs(seed=11)]
    heads.append(replace(heads[0], q=inputs(seed=12).q, do=inputs(seed=12).do))
    unusable = torch.zeros(192, dtype=torch.bool)
    truths = HeadTruths.of(
        [HeadInputs(h, unusable, torch.zeros(0, dtype=torch.int64), BF16) for h in heads], {}, ["head 4", "head 5"]
    )
    observed = Steps(heads[1]).outputs()["dk"]
    found = find_patterns(truths.evidence("dk", observed, BF16, outlying=range(192)))
    assert found[0].words == "all keys hold head 5's part alone"


def test_gradients_of_a_wrong_forward_are_said_to_follow_from_it() -> None:
    head = inputs(seed=13)
    steps = Steps(head)
    steps.o[64:] *= 1.5
    steps.delta = (steps.do * rounded(steps.o)).sum(1, keepdim=True)
    steps.ds = (steps.p_bar / steps.l * (steps.dp - steps.delta)).bfloat16().double()
    evidence, _ = evidence_of(head, "dq", steps.outputs()["dq"])
    found = find_patterns(replace(evidence, captured=[{"o": rounded(steps.o)}]))
    assert "follow from the O that the kernel returned" in found[0].words


COARSE = {
    "paper": lambda: preset("qiu2025", "bf16", 32),
    "efficient": lambda: preset("efficient", "bf16", 32),
    "BF16 scores": lambda: replace(preset("fa2", "bf16", 32), scores="bf16"),
    "BF16 scores throughout": lambda: preset("bf16-scores", "bf16", 32),
    "truncated scores": lambda: replace(preset("fa2", "bf16", 32), scores="bf16:toward-zero"),
    "BF16 accumulator": lambda: replace(preset("fa2", "bf16", 32), accumulator="bf16", row_sum="bf16"),
    "P truncated": lambda: replace(preset("fa2", "bf16", 32), probs="bf16:toward-zero"),
    "P rounded stochastically": lambda: replace(preset("fa2", "bf16", 32), probs="bf16:stochastic"),
    "P in E4M3": lambda: replace(preset("fa2", "bf16", 32), probs="e4m3"),
    "delta truncated": lambda: replace(preset("fa2", "bf16", 32), delta="bf16:toward-zero"),
    "dS truncated": lambda: replace(preset("fa2", "bf16", 32), dscores="bf16:toward-zero"),
    "fa2": lambda: preset("fa2", "bf16", 32),
    "cudnn": lambda: preset("cudnn", "bf16", 32),
}


@pytest.mark.parametrize("recipe", COARSE)
def test_no_culprit_is_named_where_a_kernel_merely_rounds(recipe: str) -> None:
    for family, causal in EVERY:
        head = inputs(family, 20, rows=128, masking=Masking(causal))  # type: ignore[arg-type]
        outputs = emulate_head(COARSE[recipe](), head)
        for quantity in ("o", "dq", "dk", "dv"):
            evidence, _ = evidence_of(head, quantity, getattr(outputs, quantity).double())
            # Asked even where the verdict is good.
            found = find_patterns(evidence)
            assert all(p.kind in ("off", "elements") for p in found), (family, causal, quantity, found)


@pytest.mark.parametrize(("rows", "scale"), [(8, 0.2), (1, 0.2), (40, -0.2)])
def test_short_heads_and_negative_scales_are_searched(rows: int, scale: float) -> None:
    head = inputs("gaussian", 5, rows=rows, scale=scale)
    outputs = Steps(head).outputs()
    for quantity in ("o", "dq", "dk", "dv"):
        pattern, answer = named(head, quantity, 3 + 7 * outputs[quantity].flip(0))
        assert answer == "wrong"
        assert pattern is not None


def test_rows_in_words() -> None:
    assert in_words([5], 64) == "row 5"
    assert in_words(list(range(64)), 64) == "all rows"
    assert in_words(list(range(3, 512, 128)), 512) == "every 128th row from 3"
    assert in_words([0, 2, 4, 6, 8, 10], 12, "keys") == "every second key from 0"
    assert in_words([1, 2, 9, 10, 17, 18, 25, 26], 32) == "rows 1-2 of every 8"
    assert in_words([1, 2, 7], 32) == "rows 1-2, 7"
    # A row that cannot be told may be the missing first one.
    assert in_words([16, 32, 48], 64, either=[0]) == "every 16th row from 0"


def test_a_pattern_turns_a_lossy_quantity_wrong_unless_it_is_only_a_place() -> None:
    lossy = QuantityVerdict("o", "lossy", "O has 3 times …", relative_error=0.01)
    scale = Pattern("scale", "all rows are what the scale 0.124 (1/sqrt(65)) instead of 0.125 gives")
    changed = with_patterns(lossy, [scale])
    assert changed.answer == "wrong"
    assert changed.words == f"O is 1 % off, which no rounding makes: {scale.words}."
    assert with_patterns(lossy, [Pattern("off", "all rows are 1 % off")]) == lossy
    blamed = with_patterns(lossy, [Pattern("forward", "all rows follow from the O that the kernel returned")])
    assert blamed.answer == "lossy"
    assert blamed.patterns


def test_inspect_names_the_pattern_and_what_is_right_beside_it() -> None:
    capture = stored("gqa_T200")
    tensors = {name: t[...] for name, t in capture.tensors.items()}
    key = capture.key(next(iter(capture.observations)), "dq")
    tensors[key] = tensors[key].clone()
    tensors[key][:, 2, 150:] = 0
    found = attn_diag.inspect_captures([replace(capture, tensors=tensors)], device="cpu")
    broken = next(h for _, _, h in found.entries() if h.head == 2)
    assert broken.verdict is not None
    assert broken.verdict.labels == ("wrong",)
    assert "rows 0-149 are right; rows 150-199 are zero, as if never written." in broken.verdict.reasons[0]
    assert broken.verdict.reasons[-1].startswith("O, dK and dV are right")


def test_fp32_formats_are_known() -> None:
    assert format_of(torch.float32).precision > BF16.precision


@pytest.mark.parametrize(
    ("several", "one"),
    [
        ("are 114 times the true ones", "is 114 times the true one"),
        (
            "are the true ones times a factor of their own (1 to 2)",
            "is the true one times a factor of its own (1 to 2)",
        ),
        ("were never written (zero)", "was never written (zero)"),
        ("have the wrong sign", "has the wrong sign"),
        ("have their features moved on by 1", "has its features moved on by 1"),
        ("miss all keys from 128 on", "misses all keys from 128 on"),
        ("leave out head 1 and count twice head 2", "leaves out head 1 and counts twice head 2"),
        ("lack the LSE: they are delta - L", "lacks the LSE: it is delta - L"),
        ("are sums of exp(S) V, never normalised", "is a sum of exp(S) V, never normalised"),
        (
            "follow from the O that the kernel returned: its forward is to blame, not its backward",
            "follows from the O that the kernel returned: its forward is to blame, not its backward",
        ),
    ],
)
def test_what_is_said_of_one_row(several: str, one: str) -> None:
    assert singular(several) == one


def test_a_single_key_is_told_in_the_singular() -> None:
    """Also in the pattern beside the sentence, and of every nth row."""
    head = inputs("gaussian", masking=Masking("none"))
    observed = Steps(head).outputs()["dk"].clone()
    observed[37] *= 114
    observed[90:] = 0
    found = find_patterns(evidence_of(head, "dk", observed)[0])
    said = {p.words for p in found[1:]}
    assert "key 37 is 114 times the true one" in said
    assert "keys 90-191 are zero, as if never written" in said
    assert "key 37 is 114 times the true one; " in found[0].words


def test_each_observation_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many quantities of one kernel are, however many others there are."""
    monkeypatch.setattr("attn_diag.analyses.patterns.of_capture._MOST_QUANTITIES", 1)
    q, k, v = torch.randn(3, 1, 1, 64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    o = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    kernels = {f"kernel{i}.o": (0.9 * o).bfloat16() for i in range(2)}
    capture = attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, **kernels}, causal="none")
    found = attn_diag.inspect_captures([capture], device="cpu").captures[0].observations
    assert len(found) == 2
    assert all("0.9 times the true one" in observation.heads[0].quantities[0].words for observation in found)


@pytest.mark.parametrize("value", [-3.0, -7.0])
def test_keys_hidden_by_a_number_are_no_sink(value: float) -> None:
    head = inputs("gaussian", masking=Masking("top-left"))
    scores = head.scale * head.q @ head.k.T
    scores = scores + torch.full_like(scores, value).triu(1)
    observed = rounded(scores.softmax(1) @ head.v)
    words = words_of(head, "o", observed)
    assert f"hiding keys by adding {value:g} to their scores" in words
    assert "sink" not in words


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_their_neighbours_are_no_rounding_though_few_carry_the_error(seed: int) -> None:
    """Near-uniform attention: the first rows are far from each other, the others hardly."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, 64, 16, generator=g) for _ in range(3))
    q, k, v = (0.02 * q).bfloat16(), k.bfloat16(), v.bfloat16()
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    answers = []
    for out in (o, o.roll(1, 2)):
        capture = attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": out}, causal="top-left")
        head = attn_diag.inspect_captures([capture]).captures[0].observations[0].heads[0]
        answers.append(head.verdict.labels if head.verdict is not None else ())
    assert "wrong" not in answers[0]
    assert answers[1] == ("wrong",)


@pytest.mark.parametrize(("factor", "seed"), [(1e3, 2), (1e3, 5), (1e4, 4)])
def test_a_hair_of_error_shows_no_other_scale(factor: float, seed: int) -> None:
    """Every row attends to one key: O is V's row, and a scale that fits it better by 1e-9 says nothing."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, 64, 16, generator=g) for _ in range(3))
    q, k, v = (factor * q).bfloat16(), k.bfloat16(), v.bfloat16()
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    capture = attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": o}, causal="top-left")
    found = attn_diag.inspect_captures([capture], device="cpu").captures[0]
    assert [check.better for check in found.assumptions.checks] == [None]


def test_gradients_that_underflow_are_not_judged_by_what_was_flushed() -> None:
    """What is small of dV is zero: nothing is said at 1e-38, where terms are flushed; at 1e-30 it is wrong."""
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 48, 16, generator=g).bfloat16() for _ in range(4))
    for size, answer in ((1e-38, "good"), (1e-30, "wrong")):
        small = (size * do).bfloat16()
        value = v.clone().requires_grad_()
        o = torch.nn.functional.scaled_dot_product_attention(q, k, value, is_causal=True)
        (dv,) = torch.autograd.grad(o, value, small)
        dv = torch.where(dv.abs() < size, 0.0, dv.float()).bfloat16()
        tensors = {"q": q, "k": k, "v": v, "do": small, "o": o.detach(), "dv": dv}
        capture = attn_diag.Capture.from_tensors(tensors, causal="top-left")
        head = attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads[0]
        answers = {x.quantity: x.answer for x in head.quantities}
        assert answers["dv"] == answer


def test_what_explains_the_last_of_some_rows_is_not_said_of_all() -> None:
    """Of one-hot rows the last zero row would be what losing the last keys makes; the others would not."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 512, 64, generator=g)
    k = 8 * k / k.norm(dim=-1, keepdim=True)
    q, k, v = (6 * k).bfloat16(), k.bfloat16(), torch.randn(1, 1, 512, 64, generator=g).bfloat16()
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    o[:, :, 127::128] = 0
    capture = attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": o}, causal="top-left")
    head = attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads[0]
    assert "every 128th row from 127 is zero" in head.quantities[0].words
