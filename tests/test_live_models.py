"""End to end: models run, their attention is captured, and the files say what an independent witness saw."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attn_diag
from attn_diag.captures import Capture
from tiny_models import HEADS, TRANSFORMERS, WIDTH, Tiny, transformers_model

pytest.importorskip("transformers")


def captured(tiny: Tiny, folder: Path, *, autocast: bool = False, steps: int = 1, **options: Any) -> list[Capture]:
    """The files of a short training run, in order of step and layer."""
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.0)
    with attn_diag.capture(tiny.model, folder, **{"batch": None, **options}) as recorder:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = tiny.loss(tiny.model)
            loss.backward()
            optimizer.step()
    assert not recorder.dropped
    return [attn_diag.load(path) for path in sorted(recorder.written)]


class Witness:
    """q, k, v and o of transformers' attention functions, with their gradients, by functions put in by hand."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    @contextlib.contextmanager
    def watching(self, model: nn.Module, implementation: str) -> Iterator[None]:
        import sys

        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        homes = [vars(sys.modules[type(model).__module__])]
        names = ["eager_attention_forward"]
        if implementation != "eager":
            homes, names = [ALL_ATTENTION_FUNCTIONS._global_mapping], [implementation]
        (home,), (name,) = homes, names
        original = home[name]

        def spy(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(module, query, key, value, *args, **kwargs)
            record = {"q": query, "k": key, "v": value, "o": result[0]}
            for t in record.values():
                t.retain_grad()
            self.seen.append(record)
            return result

        home[name] = spy
        try:
            yield
        finally:
            home[name] = original


CASES = [(kind, how) for kind in TRANSFORMERS for how in ("sdpa", "eager")]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("kind", "how"), CASES, ids=["-".join(case) for case in CASES])
def test_transformers(kind: str, how: str, padded: bool, autocast: bool, tmp_path: Path) -> None:
    tiny, witness = transformers_model(kind, how, padded=padded), Witness()
    with witness.watching(tiny.model, how), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = tiny.loss(tiny.model)
    loss.backward()
    weights = {name: p.grad.clone() for name, p in tiny.model.named_parameters() if p.grad is not None}
    again = transformers_model(kind, how, padded=padded)
    captures = captured(again, tmp_path / "captures", autocast=autocast)
    assert [c.metadata.extra["module"] for c in captures] == list(tiny.attentions)
    for layer, (capture, seen) in enumerate(zip(captures, witness.seen, strict=True)):
        agree(capture, seen)
        meta = capture.metadata
        print(kind, how, meta.kernel, meta.causal, capture.tensors.keys())
        assert (meta.layer, meta.step, meta.rank, meta.extra["call"]) == (layer, 0, 0, "0")
        assert meta.extra["batch_items"] == "0,1"
        assert_projection(capture, again.model.get_submodule(tiny.attentions[layer]), weights, autocast)
    diagnosis = attn_diag.inspect_captures(captures)
    for one in diagnosis.captures:
        assert one.assumptions.ok, one.assumptions.message


def agree(capture: Capture, seen: dict[str, Tensor]) -> None:
    """Bit for bit, gradients too, where the kernel was given what the attention function was."""
    dtype = capture.tensors["q"].dtype
    for name in ("q", "k", "v", "o"):
        for key, t in ((name, seen[name]), (f"d{name}", seen[name].grad)):
            assert t is not None
            expected = (t.transpose(1, 2) if name == "o" else t).to(dtype)
            mine = capture.tensors[key][...]
            if name in "kv" and mine.shape[1] != expected.shape[1]:
                mine = mine.unflatten(1, (expected.shape[1], -1))
                mine = mine.sum(2) if key[0] == "d" else mine[:, :, 0]
            assert mine.shape == expected.shape
            assert torch.equal(mine, expected), (key, (mine - expected).abs().max())


def assert_projection(capture: Capture, attention: nn.Module, gradients: dict[str, Tensor], autocast: bool) -> None:
    pass
