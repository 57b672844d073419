"""ALiBi slopes in captures: shapes, versions, ranks, what is refused; and the analyses of such a capture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import planted_pages
import pytest
import torch
from planted_slopes import Call, captured, computed, drawn
from safetensors import safe_open

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.errors import InputError
from attn_diag.reference import Masking
from attn_diag.reference.masking import AlibiOrigin
from attn_diag.testing.regression.cases import case_of_capture
from attn_diag.testing.replaying.replay import replay
from attn_diag.testing.target import Target

pytestmark = pytest.mark.slow

CAUSAL = Masking("bottom-right")


def call(**more: Any) -> Call:
    return drawn(3, rows=24, d=16, **more)


def whole(made: Call | None = None, **metadata: Any) -> Capture:
    made = made or call()
    outputs = computed(made, made.slopes, made.slopes, CAUSAL, origin="first-key")
    return captured(made, outputs, causal="bottom-right", alibi_origin="first-key", **metadata)


def answers(capture: Capture) -> set[str]:
    found = attn_diag.inspect_captures([capture], device="cpu").captures[0]
    return {q.answer for head in found.observations[0].heads for q in head.quantities}


def test_written_as_version_1_1_and_read_back(tmp_path: Path) -> None:
    capture = whole()
    path = capture.save(tmp_path / "c.safetensors")
    with safe_open(path, "pt") as file:
        assert file.metadata()["format_version"] == "1.1"
        assert file.metadata()["alibi_origin"] == "first-key"
        assert max(file.get_slice(name).get_shape()[-1] for name in capture.tensors) <= 24
    again = load(path)
    assert again.metadata == capture.metadata
    assert [again.alibi_slope(1, h) for h in range(4)] == call().slopes[1].tolist()
    row = replace(capture, metadata=replace(capture.metadata, alibi_origin="row"))
    with safe_open(row.save(tmp_path / "row.safetensors"), "pt") as file:
        assert "alibi_origin" not in file.metadata()


def test_each_sequence_may_have_its_own() -> None:
    made = call()
    made = replace(made, slopes=torch.stack([made.slopes[0], made.slopes[0].flip(0)]))
    assert "wrong" not in answers(whole(made))
    shared = replace(made, slopes=made.slopes[:1].expand(2, -1))
    assert "wrong" in answers(captured(shared, computed(made, made.slopes, made.slopes, CAUSAL), causal="bottom-right"))


@pytest.mark.parametrize(
    ("slopes", "why"),
    [
        (torch.ones(3), r"must have shape \[4\], one slope a query head, or \[2, 4\], got \[3\]"),
        (torch.ones(1, 4), r"got \[1, 4\]"),
        (torch.full((4,), 0.1, dtype=torch.float64), "float64 numbers that fp32 cannot hold"),
        (torch.ones(4, dtype=torch.int64), "expected floating point"),
    ],
)
def test_slopes_that_do_not_fit_are_refused(slopes: torch.Tensor, why: str) -> None:
    capture = whole()
    with pytest.raises(InputError, match=why):
        replace(capture, tensors={**capture.tensors, "alibi_slopes": slopes})


def test_an_origin_without_slopes_is_refused() -> None:
    capture = whole()
    with pytest.raises(InputError, match=r"alibi_origin=first-key says .* but there are no 'alibi_slopes'"):
        replace(capture, tensors={n: t for n, t in capture.tensors.items() if n != "alibi_slopes"})
    with pytest.raises(InputError, match="alibi_origin must be one of row, first-key, last-key"):
        replace(capture.metadata, alibi_origin="key")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_slopes_that_are_no_numbers_spoil_their_head_alone(bad: float) -> None:
    capture = whole()
    slopes = capture.tensors["alibi_slopes"][...].clone()
    slopes[1] = bad
    found = attn_diag.inspect_captures([replace(capture, tensors={**capture.tensors, "alibi_slopes": slopes})])
    assert {n.tensor for n in found.captures[0].nonfinite} == {"alibi_slopes"}
    heads = found.captures[0].observations[0].heads
    assert [h.rows_nonfinite for h in heads if h.head is not None] == [0, 48, 0, 0]


@pytest.mark.parametrize("how", ["batch", "heads"])
def test_ranks_are_merged(how: str) -> None:
    made, parts = call(), []
    for rank in range(2):

        def own(t: torch.Tensor, rank: int = rank) -> torch.Tensor:
            return t[rank : rank + 1] if how == "batch" else t[:, rank * (half := t.shape[1] // 2) : (rank + 1) * half]

        mine = Call(**{n: own(t) for n, t in vars(made).items()})
        parts.append(whole(mine, rank=rank, head_offset=2 * rank if how == "heads" else 0, step=1, layer=0,
                           extra={"run": "r", "world_size": "2", "call": "0"}))  # fmt: skip
    (capture,), said = merged_over_ranks(parts)
    assert not said
    assert [capture.alibi_slope(1, h) for h in range(4)] == made.slopes[1].tolist()
    assert (capture.batch, capture.q_heads) == (2, 4)
    assert "wrong" not in answers(capture)


def test_what_cannot_run_with_slopes_says_so() -> None:
    capture = whole()
    broken = replace(capture, tensors={**capture.tensors, "alibi_slopes": torch.tensor([0.5, torch.nan, 0.1, 0.2])})
    with pytest.raises(InputError, match="an ALiBi slope is NaN or Inf; inspect judges"):
        case_of_capture(broken)


def test_the_triton_kernels_run_with_slopes_as_the_emulation_does() -> None:
    found = [
        attn_diag.inspect_captures([whole()], recipes=["fa2"], engine=engine, device="cpu").captures[0].observations[0]
        for engine in ("emulation", "triton")
    ]
    for emulated, ran in zip(*(observation.heads for observation in found), strict=True):
        assert ran.verdict.labels == emulated.verdict.labels
        assert ran.noise_factor == pytest.approx(emulated.noise_factor, rel=0.05)


ORIGINS: dict[str, tuple[Masking, AlibiOrigin]] = {
    "causal, row": (CAUSAL, "row"),
    "causal, first key": (CAUSAL, "first-key"),
    "causal, last key": (CAUSAL, "last-key"),
    "top-left, window": (Masking("top-left", window=(9, 0)), "row"),
    "every key": (Masking(), "row"),
    "every key, from the first": (Masking(), "first-key"),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", ORIGINS)
def test_kernels_run_with_the_slopes(case: str) -> None:
    """In this process; the last ones by sequence, with more keys than rows."""
    masking, origin = ORIGINS[case]
    made = call(keys=24 if masking.causal == "top-left" else 30)
    made = replace(made, slopes=torch.stack([made.slopes[0], made.slopes[0].flip(0)]))
    outputs = computed(made, made.slopes, made.slopes, masking, origin=origin)
    stated: dict[str, Any] = {"causal": masking.causal, "window": masking.window, "alibi_origin": origin}
    inputs = case_of_capture(captured(made, outputs, **stated))
    for name in ("sdpa:math", "flex_attention", "fa2"):
        target = Target.of(name, dtype=torch.bfloat16, head_dim=16, device=torch.device("cpu"))
        returned, _ = target.run(inputs)
        own = captured(made, {n: t for n, t in returned.items() if n in outputs}, **stated)
        assert "wrong" not in answers(own), name
        off = captured(replace(made, slopes=made.slopes.roll(1, -1)), {"o": returned["o"]}, **stated)
        assert "wrong" in answers(off), name


def test_sdpa_refuses_slopes_whose_products_its_mask_cannot_hold() -> None:
    made = replace(call(), slopes=torch.full((2, 4), 0.3))
    inputs = case_of_capture(whole(made))
    target = Target.of("sdpa", dtype=torch.bfloat16, head_dim=16, device=torch.device("cpu"))
    with pytest.raises(InputError, match=r"additive mask in torch\.bfloat16, which cannot hold this one's numbers"):
        target.run(inputs)


def test_replay_says_which_kernels_are_right_with_slopes() -> None:
    found = replay(whole(call(batch=1)), against=["sdpa", "fa2", "attn_diag.attention"])
    by_name = {kernel.name: kernel for kernel in found.captures[0].kernels}
    for name in ("captured", "sdpa", "recipe fa2", "attn_diag.attention"):
        assert by_name[name].judged, by_name[name].message
        assert "wrong" not in by_name[name].labels
    dropped = computed(call(batch=1), None, None, CAUSAL)
    found = replay(captured(call(batch=1), dropped, causal="bottom-right", alibi_origin="first-key"), against=["fa2"])
    assert found.captures[0].cause == "kernel"
    assert found.captures[0].culprits == ("captured",)
    assert "no ALiBi slope (the bias dropped)" in found.captures[0].words


def test_analyses_run_on_what_the_kernel_added() -> None:
    capture = whole()
    found = attn_diag.identify(capture)
    assert "fa2" in found.recipes
    assert found.candidates[0].agreement == 1.0
    element = attn_diag.microscope(capture, recipe="fa2", row=20, feature=3, whole_head=False)
    assert element.bit_equal
    assert element.walked == float(capture.tensors["o"][...][0, 0, 20, 3])
    baseline = attn_diag.what_if(capture, recipe="fa2").baseline
    assert baseline.errors.o is not None
    assert baseline.errors.o < 0.005
    assert "cast" in attn_diag.attribute(capture, recipe="fa2").report()


@pytest.mark.parametrize("own", [False, True])
def test_slopes_with_a_cache_in_pages(own: bool) -> None:
    cache = planted_pages.drawn(lengths=(37, 20), rows=2, pages=8)
    slopes = 2.0 ** -torch.arange(1.0, 5)
    given = torch.stack([slopes, slopes.flip(0)]) if own else slopes
    o, lse = torch.empty_like(cache.q), torch.empty(cache.q.shape[:3])
    for b, length in enumerate(cache.lengths):
        keys, values = (x[cache.table[b]].flatten(0, 1)[:length].double() for x in (cache.k, cache.v))
        distance = torch.arange(length) - (torch.arange(2)[:, None] + length - 2)
        for h in range(4):
            slope = float(given[b, h] if own else given[h])
            scores = cache.q[b, h].double() @ keys[:, h // 2].T * planted_pages.D**-0.5 - slope * distance.abs()
            scores = scores.masked_fill(distance > 0, -torch.inf)
            lse[b, h] = scores.logsumexp(1).float()
            o[b, h] = (scores.softmax(1) @ values[:, h // 2]).to(o.dtype)
    capture = cache.capture({"o": o, "lse": lse, "alibi_slopes": given})
    assert capture.alibi_slope(1, 0) == (0.0625 if own else 0.5)
    assert answers(capture) <= {"good", "undecided"}
    assert "wrong" in answers(replace(capture, tensors={**capture.tensors, "alibi_slopes": given.roll(1, -1)}))
