"""Captures in memory and in files, and the check of what they say about themselves."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from builders import some
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import attn_diag
from attn_diag import Capture, InputError, load
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.loading import find_captures
from attn_diag.captures.metadata import Metadata
from attn_diag.captures.selection import Selection
from attn_diag.captures.stored import StoredFile
from attn_diag.results.diagnosis import CaptureDiagnosis


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """O (BF16) and LSE (fp32) of [B, H, T, D] tensors by the textbook; ``hidden`` marks pairs that may not attend."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(repeat, 1), v.double().repeat_interleave(repeat, 1)
    scores = scale * q.double() @ k.mT
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).bfloat16(), scores.logsumexp(-1).float()


def inputs(
    heads: int = 2, kv_heads: int = 2, tq: int = 40, tk: int = 40, d: int = 16, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (heads, tq), "k": (kv_heads, tk), "v": (kv_heads, tk), "do": (heads, tq)}
    return {n: torch.randn(2, h, t, d, generator=generator).bfloat16() for n, (h, t) in shapes.items()}


def future(tq: int, tk: int, alignment: str) -> Tensor:
    return torch.ones(tq, tk, dtype=torch.bool).triu(1 if alignment == "top-left" else 1 + tk - tq)


def full(**options: Any) -> dict[str, Tensor]:
    """Causal attention with O and LSE."""
    tensors = inputs(**options)
    tq, tk, d = tensors["q"].shape[2], tensors["k"].shape[2], tensors["q"].shape[3]
    tensors["o"], tensors["lse"] = attention(
        tensors["q"], tensors["k"], tensors["v"], d**-0.5, future(tq, tk, "bottom-right")
    )
    return tensors


def diagnose(tensors: dict[str, Tensor], **metadata: Any) -> CaptureDiagnosis:
    return inspect_captures([Capture.from_tensors(tensors, **metadata)], device="cpu").captures[0]


def equal(a: Capture, b: Capture) -> bool:
    return (
        a.metadata == b.metadata
        and set(a.tensors) == set(b.tensors)
        and all(torch.equal(a.tensors[n][...], b.tensors[n][...]) for n in a.tensors)
        and all(a.tensors[n].dtype == b.tensors[n].dtype for n in a.tensors)
    )


METADATA = Metadata(
    causal="bottom-right", scale=0.3, window=(12, -1), softcap=7.5, lse_base="2", layer=3, head_offset=4, step=17,
    kernel="mine", notes="two\nlines", extra={"host": "x"},
)  # fmt: skip


def test_saved_and_loaded_is_identical(tmp_path: Path) -> None:
    capture = Capture(full(), METADATA)
    again = load(capture.save(tmp_path / "capture.safetensors"))
    assert equal(capture, again)
    assert again.assumed == ()
    assert [p.name for p in tmp_path.iterdir()] == ["capture.safetensors"]


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("Error: IoError(No space left on device)")],
    ids=lambda error: type(error).__name__,
)
def test_failed_save_leaves_nothing(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(_tensors: object, path: str, _metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr("attn_diag.captures.capture.save_file", full_disk)
    with pytest.raises(InputError, match=r"cannot write .*No space left on device"):
        Capture(full()).save(tmp_path / "capture.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="choose a folder that exists"):
        Capture(full()).save(tmp_path / "no" / "capture.safetensors")


@pytest.mark.parametrize("how", ["pt", "pt-nested-metadata", "pt-tensors-in-metadata", "npz-uint16", "npz-ml_dtypes"])
def test_other_formats_hold_the_same(how: str, tmp_path: Path) -> None:
    tensors = full()
    expected = Capture(tensors, Metadata(causal="bottom-right", scale=0.25))
    scale = torch.tensor([0.25]) if how == "pt-tensors-in-metadata" else 0.25
    stated = {"causal": "bottom-right", "scale": scale}
    path = tmp_path / f"capture.{how[:3].rstrip('-')}"
    if path.suffix == ".pt":
        torch.save({**tensors, **(stated if how == "pt" else {"metadata": stated})}, path)
    else:
        arrays: dict[str, Any] = {"lse": tensors["lse"].numpy(), **stated}
        for name in ("q", "k", "v", "do", "o"):
            words = tensors[name].view(torch.int16).numpy().view(np.uint16)
            arrays[name] = words if how == "npz-uint16" else words.view(ml_dtypes.bfloat16)
        np.savez(path, **arrays)
    loaded = load(path)
    assert equal(expected, loaded)
    if path.suffix == ".npz":
        assert "q: 16-bit words taken as BF16" in loaded.assumed


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("q", np.ones((1, 2, 3, 4), np.longdouble), "q holds float128; expected numbers that torch has"),
        ("o", np.ones((1, 2, 3, 4), np.clongdouble), "o holds complex256; expected numbers that torch has"),
        ("k", np.ones((1, 2, 3, 4), "m8[s]"), "k holds timedelta64[s]; expected numbers"),
        ("extra", np.array(["2026-11-23"], "M8[D]"), "extra holds datetime64[D]; expected numbers"),
        ("v", np.array(["a", "b"]), "v holds text; expected numbers"),
        ("scale", np.ones(3), "scale is metadata, one number (two for window), got a tensor [3]"),
        ("scale", np.empty(0), "scale is metadata, one number (two for window), got a tensor [0]"),
        ("scale", np.array("half"), "metadata scale='half' cannot be read as a number"),
        ("window", np.array([np.inf, -1.0]), "metadata window='inf,-1.0' cannot be read as 'left,right'"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_arrays_that_are_refused(name: str, array: Any, why: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"q": np.ones((1, 2, 3, 4)), "k": np.ones((1, 2, 3, 4)), "v": np.ones((1, 2, 3, 4))}
    np.savez(tmp_path / "a.npz", **{**arrays, name: array})
    with pytest.raises(InputError, match=re.escape(f"a.npz: {why}")):
        load(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.ones(3), "scale is metadata, one number (two for window), got a tensor [3]"),
        (torch.eye(2).to_sparse(), "scale is sparse, nested or without data"),
        (torch.tensor(1j), "metadata scale='1j' cannot be read as a number"),
    ],
    ids=["three", "sparse", "complex"],
)
def test_tensors_in_metadata_that_are_refused(value: Tensor, why: str, tmp_path: Path) -> None:
    torch.save({**full(), "metadata": {"scale": value}}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=re.escape(why)):
        load(tmp_path / "a.pt")


def test_only_the_head_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Capture(full(heads=4, kv_heads=4), Metadata(causal="bottom-right")).save(tmp_path / "capture.safetensors")
    read: list[int] = []
    original = StoredFile.read

    def spy(file: StoredFile, start: int, count: int) -> Tensor:
        read.append(count)
        return original(file, start, count)

    capture = load(path)
    monkeypatch.setattr(StoredFile, "read", spy)
    found = capture.read("q", 1, 2)
    assert found is not None
    assert read == [found.nbytes]
    with pytest.raises(InputError, match="no batch item 5"):
        inspect_captures([capture], selection=Selection(batches=frozenset({5})))
    inspect_captures([capture], selection=Selection(heads=frozenset({2})))
    assert max(read) == max(tensor[0, 0][...].nbytes for tensor in capture.tensors.values())


@pytest.mark.parametrize("block", [2**24, 40])
@pytest.mark.parametrize(
    "index", [..., 1, -1, (1, 2), (-1, 0, 3), (1, slice(None), 2), (slice(None), 1), (0, slice(1, 3)), (0, 1, 2, 3)]
)
def test_parts_of_a_stored_tensor_are_torchs(
    index: Any, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_diag.captures.stored._BLOCK", block)
    tensors = full(heads=4, kv_heads=4)
    capture = load(Capture(tensors).save(tmp_path / "capture.safetensors"))
    assert torch.equal(capture.tensors["q"][index], tensors["q"][index])
    with pytest.raises(IndexError, match=r"of shape \[2, 4,"):
        capture.tensors["q"][0, 4]


def _replace(path: Path) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").replace(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: os.truncate(path, 700), "cut off or overwritten since"),
        (lambda path: path.unlink(), "No such file"),
        (_replace, "cut off or overwritten since"),
    ],
    ids=["cut off", "removed", "replaced"],
)
def test_a_file_that_changes_while_open_is_an_error_and_takes_no_other_with_it(
    change: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    paths = [Capture(full(), Metadata(causal="bottom-right")).save(tmp_path / f"{i}.safetensors") for i in range(3)]
    captures = [load(path) for path in paths]
    change(paths[1])
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    with pytest.raises(InputError, match=words):
        captures[1].read("q", 0, 0)
    said: list[InputError] = []
    found = inspect_captures(captures, skip=said.append)
    assert [c.source for c in found.captures] == [str(paths[0]), str(paths[2])]
    assert [str(error) for error in said] == list(found.summary.unreadable)
    assert words in str(said[0])


def test_layouts_give_the_same_figures() -> None:
    tensors = full()
    swapped = {n: t.transpose(1, 2).contiguous() if t.ndim == 4 else t for n, t in tensors.items()}
    one = diagnose(tensors, causal="bottom-right")
    other = diagnose(swapped, causal="bottom-right", layout="BTHD")
    assert one.observations == other.observations


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 1)], ids=["gqa", "mqa"])
def test_shared_key_heads(heads: int, kv_heads: int) -> None:
    found = diagnose(full(heads=heads, kv_heads=kv_heads), causal="bottom-right")
    assert found.assumptions.ok, found.assumptions.message
    assert [h.head for h in found.observations[0].heads] == [*range(heads), None]
    tensors = full(heads=heads, kv_heads=kv_heads)
    spread = {n: tensors[n].repeat_interleave(heads // kv_heads, 1).contiguous() for n in ("k", "v")}
    assert diagnose({**tensors, **spread}, causal="bottom-right").observations == found.observations


@pytest.mark.parametrize("shape", [(30, 50), (1, 1, 30, 50), (2, 1, 30, 50), (2, 2, 30, 50), (2, 1, 1, 50)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_broadcast(shape: tuple[int, ...], kind: str) -> None:
    tensors = inputs(tq=30, tk=50)
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    hidden = ~allowed.expand(2, 2, 30, 50)
    # Full size for the textbook; what is stored is broadcast by the product.
    bias = 3 * torch.rand(shape, generator=torch.Generator().manual_seed(2)) * (kind == "additive")
    scores = 0.25 * tensors["q"].double() @ tensors["k"].double().mT + bias.double()
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0)
    tensors["o"] = (probs @ tensors["v"].double()).bfloat16()
    tensors["mask"] = allowed if kind == "bool" else bias.masked_fill(~allowed, -torch.inf)
    found = diagnose(tensors, scale=0.25)
    assert found.assumptions.ok, found.assumptions.message
    assert found.observations[0].pooled.rows_fully_masked == int(hidden.all(-1).sum())


def test_additive_mask_in_fp8() -> None:
    mask = (torch.arange(40) % 3 - 1.0).expand(40, 40)
    biased = {**inputs(), "mask": mask}
    other = {**biased, "mask": mask.to(torch.float8_e5m2)}
    assert diagnose(biased).observations == diagnose(other).observations


@pytest.mark.parametrize(
    ("value", "ok", "words"),
    [
        (0.5, False, "O of 'observed' is not 0, as it must be under the stated metadata: every sampled row is fully"),
        (0.0, True, "hold: O agrees within 0"),
        (math.nan, None, "not checked: no sampled row could be compared"),
    ],
)
def test_fully_masked_capture(value: float, ok: bool | None, words: str) -> None:
    tensors = {**inputs(), "mask": torch.zeros(40, 40, dtype=torch.bool)}
    found = diagnose({**tensors, "o": torch.full_like(tensors["q"], value)})
    assert found.assumptions.ok is ok
    assert words in found.assumptions.message
    assert "inf" not in found.assumptions.message
    if ok is False:
        assert "no other causal alignment" in found.assumptions.message


def test_reference_that_overflows_is_said_to() -> None:
    found = diagnose({n: t.double() * 1e200 for n, t in full().items() if n != "lse"}, causal="bottom-right")
    assert found.assumptions.ok is False
    assert "the float64 reference itself overflows" in found.assumptions.message
    assert "nan" not in found.assumptions.message


def test_nothing_to_compare_is_not_called_agreement() -> None:
    tensors = full()
    found = diagnose({**tensors, "q": torch.full_like(tensors["q"], math.nan)}, causal="bottom-right")
    assert found.assumptions.ok is None
    assert "not checked: no sampled row could be compared" in found.assumptions.message
    del tensors["o"]
    assert diagnose(tensors, causal="bottom-right").assumptions.message.startswith("hold: LSE agrees within")
    del tensors["lse"]
    assert diagnose(tensors, causal="bottom-right").assumptions.ok is None


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize(
    ("shape", "place", "count", "left_out"),
    [
        # One row of every sequence and head; every row that sees key 4 (causal: not the first four); one head's row.
        ((40, 40), (0, 0, 7, 4), 1, 4),
        ((2, 1, 1, 40), (1, 0, 0, 4), 1, 2 * 36),
        ((2, 2, 40, 40), (1, 1, 7, 4), 1, 1),
        # A key that causality hides anyway.
        ((40, 40), (0, 0, 7, 8), 1, 0),
    ],
    ids=["shared", "by-key", "full", "hidden"],
)
def test_mask_that_is_no_number(
    shape: tuple[int, ...], place: tuple[int, int, int, int], count: int, left_out: int, value: float
) -> None:
    tensors = full()
    hidden = future(40, 40, "bottom-right") | (torch.arange(40) == 2)
    tensors["o"], tensors["lse"] = attention(tensors["q"], tensors["k"], tensors["v"], 0.25, hidden)
    mask = torch.zeros((1,) * (4 - len(shape)) + shape)
    mask[..., 2] = -math.inf  # the way to leave a key out
    mask[place] = value
    diagnosis = inspect_captures(
        [Capture.from_tensors({**tensors, "mask": mask.reshape(shape)}, causal="bottom-right")], device="cpu"
    )
    found = diagnosis.captures[0]
    assert [(n.tensor, n.count, n.first) for n in found.nonfinite] == [("mask", count, place)]
    assert found.assumptions.ok, found.assumptions.message
    pooled = found.observations[0].pooled
    assert (pooled.rows_nonfinite, pooled.rows_fully_masked) == (left_out, 0)
    assert pooled.bias.o is not None
    assert some(pooled.bias.o.rms) < 2e-3
    assert f"{count} NaN or +Inf in mask, first at {list(place)}" in diagnosis.summary.warnings[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_precisions(dtype: torch.dtype) -> None:
    tensors = {n: t.to(dtype) for n, t in full().items()}
    head = diagnose(tensors, causal="bottom-right").observations[0].pooled
    assert head.bias.o is not None
    assert head.noise_factor is not None


def test_fp8_inputs_with_their_factors() -> None:
    tensors = {n: t.to(torch.float8_e4m3fn) for n, t in inputs().items() if n in ("q", "k", "v")}
    factors = {"q": torch.tensor(0.5), "k": torch.rand(2, 2) + 0.5, "v": torch.tensor([2.0])}
    true = {
        n: t.float().double()
        * (factors[n].double() if factors[n].numel() == 1 else factors[n].double()[:, :, None, None])
        for n, t in tensors.items()
    }
    tensors["o"], _ = attention(true["q"], true["k"], true["v"], 0.25)
    tensors |= {f"{n}_descale": f for n, f in factors.items()}
    found = diagnose(tensors, scale=0.25)
    assert found.assumptions.ok, found.assumptions.message
    for name in ("q", "k", "v"):
        rest = {n: t for n, t in tensors.items() if n != f"{name}_descale"}
        with pytest.raises(InputError, match=f"{name} is float8_e4m3fn without descale factors: add '{name}_descale'"):
            Capture.from_tensors(rest)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [1.0, 0.01], ids=["ordinary", "small"])
def test_fp8_o_that_is_correctly_rounded_holds(dtype: torch.dtype, size: float) -> None:
    tensors = inputs(tq=64, tk=64, seed=1)
    tensors["v"] = tensors["v"] * size
    truth = attention(tensors["q"], tensors["k"], tensors["v"], 0.25, future(64, 64, "top-left"))[0]
    # Through BF16: the nearest FP8 number all the same but at ties.
    tensors["o"] = truth.to(dtype)
    found = diagnose(tensors, causal="top-left")
    assert found.assumptions.ok, found.assumptions.message
    explained = "correct rounding to O's own format, or scores" in found.assumptions.message
    assert explained == (found.assumptions.checks[0].relative_error > 0.05)
    assert found.observations[0].pooled.verdict is not None
    wrong = diagnose(tensors, causal="none")
    assert "causal=top-left fits" in wrong.assumptions.message


def test_o_past_the_range_of_its_format_was_clamped() -> None:
    tensors = inputs()
    tensors["v"] = tensors["v"] * 4096
    truth = attention(tensors["q"], tensors["k"], tensors["v"], 0.25)[0]
    tensors["o"] = truth.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert diagnose(tensors).assumptions.ok


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.06), (torch.float8_e5m2, 1.25)], ids=["bf16", "e5m2"])
def test_what_rounding_does_not_explain_still_fails(dtype: torch.dtype, factor: float) -> None:
    tensors = full()
    tensors["o"] = (tensors["o"].double() * factor).to(dtype)
    assert diagnose(tensors, causal="bottom-right").assumptions.ok is False


def test_several_observations() -> None:
    tensors = full()
    tensors["mine.o"], tensors["mine.lse"] = tensors.pop("o"), tensors.pop("lse")
    tensors["theirs.o"] = tensors["mine.o"] * 1.01
    found = diagnose(tensors, causal="bottom-right")
    assert [o.name for o in found.observations] == ["mine", "theirs"]
    assert [o.outputs for o in found.observations] == [("lse", "o"), ("o",)]


def wrong(case: str) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Tensors, metadata that contradict them, and the words that name what fits."""
    if case == "alignment":
        return full(tq=30, tk=70), {"causal": "top-left"}, "causal=bottom-right fits"
    if case == "no-mask":
        return full(), {"causal": "none"}, "causal=top-left fits"
    if case == "scale":
        return full(), {"causal": "bottom-right", "scale": 1.0}, "scale=0.25 (1/sqrt(D)) fits"
    if case == "layout":
        return full(heads=32, kv_heads=32, tq=32, tk=32), {"causal": "top-left", "layout": "BTHD"}, "layout=BHTD fits"
    if case == "base-2":
        tensors = full()
        tensors["lse"] = tensors["lse"] / math.log(2)
        return tensors, {"causal": "bottom-right"}, "lse_base=2 fits"
    if case == "window":
        return full(), {"causal": "bottom-right", "window": (3, 0)}, "window=-1,-1 fits"
    if case == "missing-window":
        tensors = inputs(tq=64, tk=64)
        hidden = future(64, 64, "top-left") | ~torch.ones(64, 64, dtype=torch.bool).triu(-15)
        tensors["o"], _ = attention(tensors["q"], tensors["k"], tensors["v"], 0.25, hidden)
        return tensors, {"causal": "top-left", "scale": 0.25}, "window=15,0 fits"
    assert case == "nothing"
    tensors = full()
    return {**tensors, "o": torch.randn_like(tensors["o"])}, {"causal": "bottom-right"}, "no other causal alignment"


@pytest.mark.parametrize(
    "case", ["alignment", "no-mask", "scale", "layout", "base-2", "window", "missing-window", "nothing"]
)
def test_wrong_assumption_is_named_and_no_verdict_given(case: str) -> None:
    tensors, metadata, words = wrong(case)
    found = diagnose(tensors, **metadata)
    assert found.assumptions.ok is False
    assert words in found.assumptions.message
    verdicts = [h.verdict for o in found.observations for h in o.heads]
    if case == "nothing":  # no metadata explain it: kernel or capture is wrong
        assert all(some(verdict).labels == ("wrong",) for verdict in verdicts)
    else:
        assert verdicts == [None] * len(verdicts)


def test_correct_base_2_holds() -> None:
    tensors = full()
    tensors["lse"] = tensors["lse"] / math.log(2)
    found = diagnose(tensors, causal="bottom-right", lse_base="2")
    assert found.assumptions.ok
    head = found.observations[0].pooled
    assert head.bias.lse is not None
    assert some(head.bias.lse.rms) < 1e-6


def test_options_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "capture.safetensors"
    save_file(full(), path)
    assert load(path).assumed == ("layout=BHTD (default)", "causal=none (default)", "scale=1/sqrt(D) (default)")
    capture = load(path, causal="bottom-right", scale=0.25)
    assert capture.assumed == ("layout=BHTD (default)",)
    assert replace(capture, assumed=()).metadata == Metadata(causal="bottom-right", scale=0.25)


def test_chosen_rows_keep_their_positions() -> None:
    tensors = full()
    rows = torch.arange(3, 40, 7)
    cut = {n: t[:, :, rows].contiguous() if n in ("q", "do", "o", "lse") else t for n, t in tensors.items()}
    found = diagnose({**cut, "q_positions": rows}, causal="top-left")
    assert found.assumptions.ok, found.assumptions.message
    assert found.observations[0].pooled.rows_all == 2 * 2 * len(rows)


def test_tensors_that_share_memory_can_be_saved(tmp_path: Path) -> None:
    tensors = inputs()
    capture = Capture({**tensors, "v": tensors["k"]})
    assert equal(capture, load(capture.save(tmp_path / "capture.safetensors")))


def irregular(kind: str, path: Path) -> Path:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        # Bound by its name alone: the whole path may be longer than a socket's may be.
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory"])
def test_what_is_no_regular_file_is_not_opened(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = irregular(kind, tmp_path / "capture.safetensors")
    with pytest.raises(InputError, match=f"expected a regular file, this is a {kind}; save the capture to a file"):
        load(path)


def test_pipe_of_a_shell_is_no_regular_file() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb"), pytest.raises(InputError, match="this is a pipe"):  # noqa: PTH123
        load(f"/dev/fd/{reading}")


def test_path_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 300 + ".safetensors")
    with pytest.raises(InputError, match="cannot be opened: File name too long"):
        find_captures([long])
    path = Capture(inputs()).save(tmp_path / "capture.safetensors")
    # Not by chmod: root may read everything.
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match="cannot be opened: no permission to read it"):
        load(path)


def test_directories_named_like_captures_are_walked(tmp_path: Path) -> None:
    (tmp_path / "step.pt").mkdir()
    path = Capture(inputs()).save(tmp_path / "step.pt" / "capture.safetensors")
    assert find_captures([tmp_path]) == [path]


def test_metadata_kept_as_tensors_are_not_overlooked(tmp_path: Path) -> None:
    path = tmp_path / "capture.pt"
    torch.save({**inputs(), "scale": torch.tensor(0.25), "window": [7, 0]}, path)
    assert load(path).metadata == Metadata(scale=0.25, window=(7, 0))
    torch.save({**inputs(), "scale": torch.ones(3)}, path)
    with pytest.raises(InputError, match="scale is metadata"):
        load(path)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_without_dense_data_are_refused(kind: str, tmp_path: Path) -> None:
    path, tensors = tmp_path / "capture.pt", inputs()
    tensors["k"] = tensors["k"].to_sparse() if kind == "sparse" else tensors["k"].to("meta")
    torch.save(tensors, path)
    with pytest.raises(InputError, match="k is sparse, nested or without data"):
        load(path)


def test_big_endian_arrays_hold_the_same(tmp_path: Path) -> None:
    tensors = {n: t.float() for n, t in inputs().items()}
    arrays: dict[str, Any] = {n: t.numpy().astype(">f4") for n, t in tensors.items()}
    np.savez(tmp_path / "capture.npz", **arrays)
    assert equal(Capture(tensors), load(tmp_path / "capture.npz"))


@pytest.mark.parametrize("name", ["dropout_p", "dropout"])
@pytest.mark.parametrize("how", ["tensor", "list", "metadata"])
def test_unsupported_features_are_refused_by_name(name: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "capture.pt"
    extra: Any = {"tensor": {name: torch.ones(2)}, "list": {name: [0, 5]}, "metadata": {"metadata": {name: "0.1"}}}
    torch.save({**inputs(), **extra[how]}, path)
    with pytest.raises(InputError, match=r"dropout_mask|dropout_p.*cannot be read as a number"):
        load(path)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("dK", "dk"), ("observed.dk ", "observed.dk"), ("do_", "do"), ("dO", "do"), ("flash.loss", None), ("w_k", "w_q")],
)
def test_tensors_of_unknown_names_are_told(name: str, meant: str | None) -> None:
    q, k, v = (torch.randn(1, 1, 8, 4).bfloat16() for _ in range(3))
    capture = Capture.from_tensors({"q": q, "k": k, "v": v, "o": v, name: v})
    (said,) = attn_diag.inspect(capture, device="cpu").summary.warnings
    assert f"not used, as no such name is known: {name!r}" in said
    assert (f"(meant for {meant!r}?)" in said) is (meant is not None)
    assert ("known are q, k, v, do" in said) is (meant is None)


def test_tensors_that_other_commands_use_are_no_unknown_ones() -> None:
    q, k, v = (torch.randn(1, 1, 8, 4).bfloat16() for _ in range(3))
    others = {"hop0_o": v, "sum_part": q, "w_o": q, "position_ids": torch.arange(8)}
    capture = Capture.from_tensors({"q": q, "k": k, "v": v, "o": v, **others})
    assert attn_diag.inspect(capture, device="cpu").summary.warnings == ()
