"""inspect by the fused kernels says what it says when it streams: small heads interpreted, real ones on a GPU."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SHARED, some, stored

from attn_diag.analyses.inspection import capture_job, groups, joint, pooled_errors
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.head import fused_backward, output_fit, streaming
from attn_diag.head.baseline import recognise
from attn_diag.head.by_kernels import recognise_by_kernels, worth_kernels
from attn_diag.head.counterfactual import Counterfactuals
from attn_diag.head.opened import nearly_uniform
from attn_diag.head.read import HeadTensors, inputs_of, read_head
from attn_diag.kernels import emulate_head, preset
from attn_diag.kernels.attention import attention
from attn_diag.reference import AttentionHead, Masking, fused_inputs
from attn_diag.reference.fused import SWITCH, FusedHeads
from attn_diag.reference.fused_products import RowProduct
from attn_diag.results.diagnosis import Diagnosis

# What a counterfactual with other fp32 sums may change: factors and the intervals of its draw.
DRAWN = ("factor", "well_rounded", "/quantities/", "reasons", "words")


def capture(
    *,
    softcap: float | None = None,
    scale: float = 0.25,
    window: tuple[int, int] | None = None,
    broken: bool = False,
    size: float = 1.0,
    repeated: bool = False,
    sink: float | None = None,
    still: int = 1,
) -> Capture:
    """Four query heads and two key heads, as a kernel of recipe fa2 returns them."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 4, 48, 16), (1, 2, 48, 16), (1, 2, 48, 16), (1, 4, 48, 16))
    q, k, v, do = (torch.randn(s, generator=generator).bfloat16() for s in sizes)
    q *= size
    # The first sees one key: dQ is 0, but for float64's roundings, which need not be the same.
    do[:, :, :still] = 0.0
    k[:, :, 9] = k[:, :, 5]  # a repeated maximum, here and there
    if repeated:
        k[:, :, :38], k[:, :, 38:42] = k[:, :, :1], k[:, :, 38:39]
    masking = Masking("top-left", window)
    recipe, found = preset("fa2", "bf16", 16), []
    for h in range(4):
        one, *kv, gradient = (t.double() for t in (q[0, h], k[0, h // 2], v[0, h // 2], do[0, h]))
        head = AttentionHead(one, kv[0], kv[1], gradient, scale, masking, softcap, sink)
        found.append(emulate_head(recipe, head))
    if broken:
        k[0, 0, 3, 2] = torch.nan

    def of(name: str, heads: int) -> torch.Tensor:
        parts = torch.stack([getattr(one, name) for one in found])
        # A key head's gradient is the sum of its query heads'.
        return parts[None] if heads == 4 else parts.double().view(2, 2, *parts.shape[1:]).sum(1).bfloat16()[None]

    tensors = {"q": q, "k": k, "v": v, "do": do, "o": of("o", 4), "lse": of("lse", 4).float(), "dq": of("dq", 4)}
    tensors |= {"dk": of("dk", 2), "dv": of("dv", 2)}
    tensors |= {} if sink is None else {"sinks": torch.full((4,), sink)}
    return Capture.from_tensors(tensors, causal="top-left", softcap=softcap, scale=scale, window=window)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads of a capture go through the kernels together, however small they are."""
    monkeypatch.setattr(streaming, "fuses", lambda *_: True)
    monkeypatch.setattr(groups, "_heads_at_once", lambda *_: 8)
    monkeypatch.setattr(output_fit, "_at_once", lambda *_: 8)


def leaves(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else None
    if items is None:
        yield path, found
    else:
        for key, value in items:
            yield from leaves(value, f"{path}/{key}")


def differences(
    one: Diagnosis, other: Diagnosis, tolerance: float, *, drawn: bool, shares: float = 1e-12
) -> list[tuple[str, Any, Any]]:
    """Where two diagnoses differ, but for how far the reference may be off and, with ``drawn``, by a counterfactual.

    ``shares``: by how much an unexplained share may, which is 0 but for ties where a cast tells all.
    """
    a, b = (dict(leaves(json.loads(d.to_json()))) for d in (one, other))
    found = []
    for path in sorted({*a, *b}):
        x, y = a.get(path), b.get(path)
        skipped = "reference_bound" in path or (drawn and any(word in path for word in DRAWN) and "answer" not in path)
        least = shares if "unexplained" in path else 1e-12
        close = isinstance(x, float) and isinstance(y, float) and math.isclose(x, y, rel_tol=tolerance, abs_tol=least)
        if x != y and not close and not skipped:
            found.append((path, x, y))
    return found


CAPTURES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "saturated": {"softcap": 2.0, "size": 12.0},
    "window": {"window": (20, 0)},
    # Some rows have their maximum at more keys than the kernels keep, and all together at more than figures show.
    "repeated": {"repeated": True},
    # The variance of dQ is what underflow leaves: with 1/l as small as e^-150, or 0, and in rows whose dO is 0.
    "sink": {"sink": 150.0},
    "great sink": {"sink": 400.0},
    "still": {"still": 30},
}


@pytest.mark.usefixtures("deterministic", "fused")
@pytest.mark.parametrize("variances", ["float64", "BF16"])
@pytest.mark.parametrize("name", CAPTURES)
def test_figures_and_verdicts_are_those_of_the_stream(
    name: str, variances: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same counterfactual for both: its kernels have tests of their own.
    monkeypatch.setattr(Counterfactuals, "_run_kernels", lambda *_: None)
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", 0 if variances == "BF16" else math.inf)
    taken = capture(**CAPTURES[name])
    by_kernels = inspect_captures([taken], device=device)
    monkeypatch.setattr(streaming, "fuses", lambda *_: False)
    streamed = inspect_captures([taken], device=device)
    # What a cast of dS makes of dQ is summed in fp32 then, which breaks ties of dQ's own rounding in another way.
    tolerance, shares = (1e-5, 1e-5) if variances == "BF16" else (1e-6, 1e-12)
    assert not differences(streamed, by_kernels, tolerance, drawn=False, shares=shares)
    # Nothing else would show that the comparison can fail.
    assert differences(inspect_captures([capture(scale=0.2)], device=device), by_kernels, tolerance, drawn=True)


@pytest.mark.parametrize("size", [1.0, 512.0])
def test_scores_whose_products_cancel_are_left_to_float64(
    size: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of q.k in fp32 lose what is left of them."""
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", 0)
    head = read_head(capture(), 0, 0, torch.device(device)).head
    head.q[:, :2] = head.k[:, 0] = size
    head.k[:, 1] = -size
    fused = FusedHeads([head])
    assert (fused.through(fused.finite_max) is None) == (size > 1)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("worth", [0, math.inf])
def test_all_that_is_launched_is_compiled_ahead(worth: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha dS may be cast, or dS, as the scale is no power of two: both are compiled."""
    monkeypatch.setattr(fused_inputs, "WORTH_NARROW", worth)
    compiled, launched, launch = set[object](), set[object](), FusedHeads._launch

    def seen(self: FusedHeads, kernel: Any, grid: Any, tiling: Any, *arguments: Any) -> None:
        (compiled if self._ahead else launched).add((kernel.fn.__name__, tiling))
        if not self._ahead:
            launch(self, kernel, grid, tiling, *arguments)

    monkeypatch.setattr(FusedHeads, "_launch", seen)
    monkeypatch.setattr(FusedHeads, "compile_ahead", FusedHeads._rehearse)
    inspect_captures([capture(scale=0.3)], device=device)
    assert len(launched) > 8
    assert launched <= compiled


@pytest.mark.usefixtures("deterministic", "fused")
@pytest.mark.parametrize("fault", ["", "reading", "memory", "program", "testing"])
def test_captures_that_are_alike_are_measured_together(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of one recipe, one of an unknown one, one with another scale: each has the words that it has alone, also
    where one of them cannot be measured, or not together; a failure of the program is told of."""
    monkeypatch.setattr(streaming, "fuses", lambda *_: False)
    one, other = capture(), capture(size=0.5)
    unknown = torch.stack([some(other.read("o", 0, h)) for h in range(4)])[None] * (1 + 2.0**-6)
    taken = [one, other, replace(other, tensors={**other.tensors, "o": unknown}), capture(scale=0.2)]
    taken = [replace(c, source=f"capture {i}") for i, c in enumerate(taken)]
    alone = [json.loads(inspect_captures([c], device="cpu").to_json())["captures"][0] for c in taken]
    sizes: list[int] = []
    entries: list[int] = []
    for name in ("jobs_recognised", "jobs_at_once"):
        monkeypatch.setattr(joint, name, lambda *_: 3)
    measure = joint.measured

    def counted(work: Any) -> Any:
        sizes.append(len(work))
        if fault == "memory" and len(work) > 1:
            raise torch.OutOfMemoryError
        if fault == "program" and len(work) > 1:
            raise IndexError("out of range")
        return measure(work)

    def broken(tensors: HeadTensors, *options: Any) -> Any:
        if fault == "reading" and tensors.capture.source == "capture 1":
            raise InputError("changed while it was read")
        return inputs_of(tensors, *options)

    def tested(several: Any, level: float) -> Any:
        entries.append(len(several))
        if fault == "testing":
            raise IndexError("out of range")
        return pooled_errors.tests(several, level)

    for module in (joint, capture_job):
        monkeypatch.setattr(module, "measured", counted)
    monkeypatch.setattr(joint, "tests", tested)
    monkeypatch.setattr("attn_diag.analyses.inspection.capture_job.inputs_of", broken)
    complaints: list[InputError] = []
    found = inspect_captures(taken, device="cpu", skip=complaints.append)
    assert len(complaints) == (fault == "reading")
    assert max(sizes) == 2
    # Four heads and all of them, of each capture that could be read.
    assert entries == [10 if fault == "reading" else 15]
    told = ["capture 0 and those like it were taken one by one: internal error (IndexError: out of range)"]
    assert list(found.summary.warnings) == (told if fault in ("program", "testing") else [])
    if fault in ("program", "testing"):
        with pytest.raises(IndexError, match="out of range"):
            inspect_captures(taken, device="cpu")
    kept = [c for i, c in enumerate(alone) if not (i == 1 and fault == "reading")]
    together = json.loads(found.to_json())["captures"]
    assert [c["source"] for c in together] == [c["source"] for c in kept]
    apart = [
        (path, x, y)
        for a, b in zip(kept, together, strict=True)
        for (path, x), (_, y) in zip(leaves(a), leaves(b), strict=True)
        # Adjusted p-values are those of the whole run.
        if x != y and not any(word in path for word in ("p_adjusted", "verdict", "reasons"))
    ]
    assert not apart


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic", "fused")
def test_a_few_rows_tell_which_cast_a_long_head_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scale that is no power of two alpha dS may be cast, or dS: once known, one of them is computed alone."""
    taken, made, make = capture(scale=0.3), list[str](), FusedHeads.make_rows

    def counted(self: FusedHeads, asked: Sequence[RowProduct], *fed: Any) -> None:
        if not self._ahead:
            made.extend(one.weight.name for one in asked)
        make(self, asked, *fed)

    monkeypatch.setattr(Counterfactuals, "_run_kernels", lambda *_: None)
    monkeypatch.setattr(FusedHeads, "make_rows", counted)
    by_all = inspect_captures([taken], device="cuda")
    assert made.count("dscores_cast") == 2
    monkeypatch.setattr(fused_backward, "_LONG", 0)
    by_few = inspect_captures([taken], device="cuda")
    assert made.count("dscores_cast") == 3
    assert not differences(by_all, by_few, 1e-12, drawn=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa2", "cudnn", "efficient", "flex"])
def test_the_kernels_recognise_what_the_search_does(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 3072, 64, generator=generator).bfloat16() for _ in range(3))
    o = attention(*(t.cuda() for t in (q, k, v)), causal="top-left", recipe=name).cpu()
    taken = Capture.from_tensors({"q": q, "k": k, "v": v, "o": o}, causal="top-left")
    places = [(taken, "observed", 0, h) for h in range(2)]
    assert worth_kernels(places, torch.device("cuda"))
    found = [one.recognised for one in recognise_by_kernels(places, torch.device("cuda"))]
    assert all(name in some(one).name for one in found)
    # With sums in fp32 the search may find none; of few rows with a tensor core's it may find others too.
    searched = [recognise(*place) for place in places]
    print(name, [some(one).name for one in found], [two and two.name for two in searched])
    names = [
        (set(some(one).name.split(" or ")), two.name.split(" or "))
        for one, two in zip(found, searched, strict=True)
        if two
    ]
    assert all(own <= set(others) for own, others in names)
    assert all((some(one).agreement or 0.0) > 0.9999 for one in found)
    (observation,) = inspect_captures([taken], device="cuda").captures[0].observations
    assert observation.recipe == some(found[0]).words


@pytest.mark.usefixtures("fused")
def test_well_rounded_kernels_run_together_and_leave_what_the_emulation_leaves(device: str) -> None:
    taken = capture()
    found = inspect_captures([taken], device=device)
    (observation,) = found.captures[0].observations
    factors = [q.factor for head in observation.heads for q in head.quantities if q.factor is not None]
    assert factors
    # It is fa2's own output; sums of another order change it here and there.
    assert all(0.9 < factor < 1.1 for factor in factors)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("size", [1.0, 2.0**-6])
def test_rows_that_attend_to_their_keys_nearly_alike_are_known(size: float, device: str) -> None:
    inputs = read_head(capture(size=size), 0, 0, torch.device(device))
    passed = streaming.StreamedHead(inputs, [streaming.ObservedHead("seen", {}, {})], None)
    streaming.stream_heads([passed])
    of_rows = (passed.visible, passed.truth.reference.row_sum, passed.truth.usable)
    assert nearly_uniform(*(t.cpu().numpy() for t in of_rows)) == (size < 1)


@pytest.mark.usefixtures("fused")
def test_what_heads_were_held_against_goes_without_a_garbage_collection(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counterfactuals, "_run_kernels", lambda *_: None)
    gc.collect()
    gc.disable()
    try:
        inspect_captures([capture()], device=device)
        assert not [one for one in gc.get_objects() if type(one) is Counterfactuals]
    finally:
        gc.enable()


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("broken", [False, True])
def test_heads_with_nan_in_a_key_are_streamed(broken: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = capture(broken=broken)
    made: list[int] = []

    def fuse(passes: list[streaming.StreamedHead]) -> None:
        made.append(len(passes))
        for one in passes:
            one.stream()

    monkeypatch.setattr(streaming, "_fuse", fuse)
    inspect_captures([taken], device=device)
    # Two of the four query heads see that key.
    assert made == [2 if broken else 4]


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic", "fused")
@pytest.mark.parametrize("name", SHARED)
def test_figures_and_verdicts_of_real_captures_are_those_of_the_stream(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernels = inspect_captures([stored(name)], device="cuda")
    monkeypatch.undo()
    monkeypatch.setenv(SWITCH, "0")
    streamed = inspect_captures([stored(name)], device="cuda")
    assert not differences(streamed, by_kernels, 1e-6, drawn=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic", "fused")
def test_several_gpus_leave_the_document_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    monkeypatch.setattr(fused_inputs, "_WORTH_DEALING", 0)
    taken = capture(scale=0.3)
    one, all_of_them, second = (
        json.loads(inspect_captures([taken], device=d).to_json()) for d in ("cuda:0", "cuda:all", "cuda:1")
    )
    assert all_of_them["tool"].pop("device").endswith("more")
    for document in (one, second):
        assert not document["tool"].pop("device").endswith("more")
    assert one == all_of_them == second
