"""Sinks in captures: names, shapes, versions, ranks, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import labels_of
from planted_sinks import Call, captured, computed, drawn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.errors import InputError
from attn_diag.reference import Masking
from attn_diag.results.diagnosis import CaptureDiagnosis

CAUSAL = Masking("top-left")


def call(**more: Any) -> Call:
    return drawn(3, rows=24, d=16, **more)


def whole(**more: Any) -> Capture:
    made = call(**more)
    return captured(made, computed(made, made.sinks, made.sinks, CAUSAL))


def found(capture: Capture) -> CaptureDiagnosis:
    return attn_diag.inspect_captures([capture], device="cpu").captures[0]


def tensors(capture: Capture) -> dict[str, Tensor]:
    return {name: t[...] for name, t in capture.tensors.items()}


def test_written_as_version_1_1_and_read_back(tmp_path: Path) -> None:
    capture = whole()
    path = capture.save(tmp_path / "c.safetensors")
    with safe_open(path, "pt") as file:
        assert file.metadata()["format_version"] == "1.1"
        assert "lse_sink" not in file.metadata()
    again = load(path)
    assert all(torch.equal(tensors(again)[n], t) for n, t in tensors(capture).items())
    assert [again.sink(h) for h in range(4)] == capture.tensors["sinks"][...].tolist()
    assert found(again).observations[0].heads == found(capture).observations[0].heads


def test_without_sinks_version_1_stays(tmp_path: Path) -> None:
    made = call()
    plain = captured(made, computed(made, None, None, CAUSAL), sinks=False)
    with safe_open(plain.save(tmp_path / "c.safetensors"), "pt") as file:
        assert file.metadata()["format_version"] == "1"


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz"])
@pytest.mark.parametrize("name", ["s_aux", "learnable_sink", "softmax_offset", "attention_sinks"])
def test_other_names_and_shapes_are_taken(name: str, suffix: str, tmp_path: Path) -> None:
    capture = whole()
    made = {k: t for k, t in tensors(capture).items() if k not in ("sinks", "dsinks")} | {
        name: capture.tensors["sinks"][...].reshape(1, 4, 1, 1), "d_sinks": capture.tensors["dsinks"][...],
    }  # fmt: skip
    path = tmp_path / f"c.{suffix}"
    if suffix == "safetensors":
        save_file(made, path, {"causal": "top-left"})
    elif suffix == "pt":
        torch.save({**made, "causal": "top-left"}, path)
    else:
        wide: dict[str, Any] = {k: t.float().numpy() for k, t in made.items()}
        np.savez(path, **wide, causal=np.array("top-left"))
    again = load(path)
    assert torch.equal(again.tensors["sinks"][...].float(), capture.tensors["sinks"][...].float())
    assert {"sinks", "dsinks"} <= again.tensors.keys()
    assert "wrong" not in labels_of(found(again))


def test_the_off_by_one_softmax_is_an_offset_of_0(tmp_path: Path) -> None:
    made = replace(call(), sinks=torch.zeros(4))
    outputs = computed(made, made.sinks, made.sinks, CAUSAL)
    capture = captured(made, {n: t for n, t in outputs.items() if n != "dsinks"}, sinks=False, softmax_offset=0.0)
    path = capture.save(tmp_path / "c.safetensors")
    assert load(path).metadata.softmax_offset == 0.0
    assert load(path).format_version == "1.1"
    assert labels_of(found(load(path))) <= {"clean", "undecided"}
    assert "wrong" in labels_of(found(replace(capture, metadata=replace(capture.metadata, softmax_offset=None))))
    t = tensors(capture)
    given = attn_diag.inspect(t["q"], t["k"], t["v"], o=t["o"], causal=True, softmax_offset=0.0)
    assert "wrong" not in labels_of(given.captures[0])


def test_an_lse_without_the_sink_is_said_to_be_one() -> None:
    capture = whole()
    bare = capture.tensors["lse"][...].double()
    keys = (bare.exp() - capture.tensors["sinks"][...].double().exp()[None, :, None]).log().float()
    without = replace(capture, tensors={**capture.tensors, "lse": keys})
    assert "wrong" in labels_of(found(without))
    stated = replace(without, metadata=replace(capture.metadata, lse_sink="excluded"))
    assert "wrong" not in labels_of(found(stated))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"sinks": torch.ones(3)}, r"sinks must have shape \[4\], one number a query head, got \[3\]"),
    "gradient's shape": ({"dsinks": torch.ones(2, 4)}, r"dsinks must have shape \[4\]"),
    "integers": ({"sinks": torch.ones(4, dtype=torch.int64)}, "sinks has dtype int64; expected floating point"),
    "two names": ({"s_aux": torch.ones(4)}, "'s_aux' and 'sinks' are one thing"),
    "two aliases": ({"sinks": None, "s_aux": torch.ones(4), "learnable_sink": torch.ones(4)}, "two tensors stand for"),
    "no sinks": ({"sinks": None}, "dsinks is there but 'sinks' are missing"),
    "no dO": ({"do": None, "dq": None, "dk": None, "dv": None}, "dsinks is there but 'do' is missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_contradictions_are_refused(case: str) -> None:
    changes, message = WRONG[case]
    given = {n: t for n, t in {**tensors(whole()), **changes}.items() if t is not None}
    with pytest.raises(InputError, match=message):
        Capture.from_tensors(given, causal="top-left")


def test_contradicting_metadata_are_refused(tmp_path: Path) -> None:
    given = tensors(whole())
    with pytest.raises(InputError, match="sinks and softmax_offset both state"):
        Capture.from_tensors(given, softmax_offset=0.0)
    with pytest.raises(InputError, match="softmax_offset must be a finite logit, got nan"):
        Capture.from_tensors(given, softmax_offset=math.nan)
    bare = {n: t for n, t in given.items() if n not in ("sinks", "dsinks")}
    with pytest.raises(InputError, match="lse_sink=excluded says that LSE leaves the sink out"):
        Capture.from_tensors(bare, lse_sink="excluded")
    path = tmp_path / "c.safetensors"
    save_file({n: given[n].contiguous() for n in "qkv"}, path, {"sinks": "0.1"})
    with pytest.raises(InputError, match=r"'sinks': expected a tensor 'sinks' of logits, \[Hq\]"):
        load(path)


@pytest.mark.parametrize(("value", "words"), [(math.nan, "NaN"), (math.inf, "Inf")])
def test_a_sink_that_is_no_number_is_told_of(value: float, words: str) -> None:
    capture = whole()
    sinks = capture.tensors["sinks"][...].clone()
    sinks[1] = value
    diagnosis = found(replace(capture, tensors={**capture.tensors, "sinks": sinks}))
    assert [n.tensor for n in diagnosis.nonfinite] == ["sinks"], words


def test_a_sink_of_minus_infinity_is_none() -> None:
    made = call()
    outputs = computed(made, None, None, CAUSAL)
    diagnosis = found(captured(replace(made, sinks=torch.full((4,), -math.inf)), {**outputs, "dsinks": torch.zeros(4)}))
    assert labels_of(diagnosis) <= {"clean", "undecided"}
    assert not diagnosis.nonfinite


def ranked(capture: Capture, rank: int, **more: Any) -> Capture:
    extra = {"run": "r", "world_size": "2", "call": "0"}
    return replace(capture, metadata=replace(capture.metadata, rank=rank, layer=0, step=1, extra=extra, **more))


def test_data_parallel_ranks_add_their_gradients() -> None:
    both, halves = call(), [call(), call()]
    for i, half in enumerate(halves):
        cut = {n: getattr(both, n)[i : i + 1] for n in ("q", "k", "v", "do")}
        halves[i] = replace(half, **cut, sinks=both.sinks)
    parts = [ranked(captured(h, computed(h, h.sinks, h.sinks, CAUSAL)), r) for r, h in enumerate(halves)]
    (merged,), said = merged_over_ranks(parts)
    assert not said
    together = computed(both, both.sinks, both.sinks, CAUSAL)["dsinks"]
    assert torch.allclose(merged.tensors["dsinks"][...], together, rtol=1e-5)
    assert labels_of(found(merged)) <= {"clean", "undecided"}
    odd = replace(parts[1], tensors={**parts[1].tensors, "sinks": both.sinks + 1})
    assert "sinks of rank 1 differs" in merged_over_ranks([parts[0], odd])[1][0]


def test_tensor_parallel_ranks_put_sinks_side_by_side() -> None:
    capture = whole(kv_heads=4)
    parts = []
    for r in range(2):
        cut = {n: t[2 * r : 2 * r + 2] if n in ("sinks", "dsinks") else t[:, 2 * r : 2 * r + 2]
               for n, t in tensors(capture).items()}  # fmt: skip
        parts.append(ranked(replace(capture, tensors=cut), r, head_offset=2 * r))
    (merged,), said = merged_over_ranks(parts)
    assert not said
    assert all(torch.equal(merged.tensors[n][...], capture.tensors[n][...]) for n in ("sinks", "dsinks"))
    assert labels_of(found(merged)) <= {"clean", "undecided"}


def test_documents_of_packed_sequences_share_sinks() -> None:
    made = call(batch=1)
    halves = [replace(made, **{n: getattr(made, n)[:, :, part] for n in ("q", "k", "v", "do")})
              for part in (slice(0, 9), slice(9, 24))]  # fmt: skip
    outputs = [computed(h, h.sinks, h.sinks, CAUSAL) for h in halves]
    packed = {n: outputs[0][n] + outputs[1][n] if n == "dsinks" else torch.cat([o[n] for o in outputs], 2)
              for n in outputs[0]}  # fmt: skip
    capture = captured(made, {**packed, "cu_seqlens": torch.tensor([0, 9, 24])})
    diagnosis = found(capture)
    assert labels_of(diagnosis) <= {"clean", "undecided"}
    wrong = found(replace(capture, tensors={**capture.tensors, "dsinks": outputs[0]["dsinks"]}))
    words = [q.words for h in wrong.observations[0].heads for q in h.quantities if q.quantity == "dsinks"]
    assert any("batch item 0 alone" in w or "leaves out batch item 1" in w for w in words), words


def test_json_has_it() -> None:
    diagnosis = attn_diag.inspect_captures([whole()], device="cpu")
    text = json.loads(diagnosis.to_json())
    head = text["captures"][0]["observations"][0]["heads"][0]
    assert "dsinks" in {q["quantity"] for q in head["quantities"]}


@pytest.mark.parametrize("options", [{"masking": Masking("bottom-right", window=(6, 0))}, {"softcap": 4.0}])
def test_windows_and_softcaps_go_with_sinks(options: dict[str, Any]) -> None:
    made = call()
    masking = options.get("masking", CAUSAL)
    outputs = computed(made, made.sinks, made.sinks, masking, softcap=options.get("softcap"))
    stated = {"window": masking.window, "softcap": options.get("softcap")}
    assert "wrong" not in labels_of(found(captured(made, outputs, **stated)))
    lost = computed(made, made.sinks, None, masking, softcap=options.get("softcap"))
    diagnosis = found(captured(made, {n: t for n, t in lost.items() if n != "dsinks"}, **stated))
    words = [p.words for h in diagnosis.observations[0].heads for q in h.quantities for p in q.patterns]
    assert any("no sink (the sink dropped) in the backward alone" in w for w in words), words
