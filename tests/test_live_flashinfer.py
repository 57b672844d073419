"""FlashInfer's wrappers and functions are captured where they run, by what they planned; never guessed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import foreign_flashinfer
import pytest
import torch
from tiny_models import written
from torch import Tensor, nn

import attn_diag
from attn_diag.captures.capture import Capture

H, KV, D, SIZE = 4, 2, 16, 8
ROWS, PAGES, LAST = (torch.tensor(n, dtype=torch.int32) for n in ([0, 5, 8, 15], [0, 3, 4, 9], [5, 8, 2]))
KEYS = torch.tensor([0, 21, 29, 63], dtype=torch.int32)
PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return foreign_flashinfer.installed(monkeypatch)


class Layer(nn.Module):
    def __init__(self, run: Any, **options: Any) -> None:
        super().__init__()
        self.run, self.options = run, options

    def forward(self, *tensors: Any) -> Any:
        return getattr(self.run, "run", self.run)(*tensors, **self.options)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def numbers() -> Tensor:
    return torch.randperm(12, generator=torch.Generator().manual_seed(0))[:9].int()


def planned(package: ModuleType, name: str, layout: str = "NHD", **options: Any) -> tuple[Any, Any]:
    """A wrapper with pages in an order of chance, and its cache."""
    wrapper, cache = getattr(package, name)(layout), drawn(12, 2, SIZE, KV, D)
    wrapper.plan(PAGES, numbers(), LAST, ROWS, **options)
    return wrapper, cache.transpose(2, 3).contiguous() if layout == "HND" else cache


def captured(layer: nn.Module, folder: Path, *tensors: Any) -> tuple[list[Capture], dict[str, Any]]:
    with attn_diag.capture(layer, folder, batch=None) as recorder, torch.no_grad():
        layer(*tensors)
    return written(recorder), recorder.dropped


def verdicts(captures: list[Capture]) -> set[str]:
    found = attn_diag.inspect_captures(captures, device="cpu").captures
    heads = [h for c in found for o in c.observations for h in o.heads]
    return {label for h in heads if h.verdict for label in h.verdict.labels}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_wrapper_on_pages(layout: str, apart: bool, flashinfer: ModuleType, tmp_path: Path) -> None:
    stated = {"causal": True, "window_left": 12, "logits_soft_cap": 5.0, "sm_scale": 0.3}
    wrapper, cache = planned(flashinfer, PREFILL, layout, **stated)
    layer = Layer(wrapper, return_lse=True)
    (c,), dropped = captured(layer, tmp_path, drawn(15, H, D), tuple(cache.unbind(1)) if apart else cache)
    assert not dropped
    said = c.metadata
    assert (said.kernel, said.causal, said.window, said.softcap, said.scale) == (
        "FlashInfer", "bottom-right", (12, -1), 5.0, 0.3,
    )  # fmt: skip
    assert {"o", "lse"} <= set(c.tensors)
    assert [c.lengths(b) for b in range(3)] == [(5, 21), (3, 8), (7, 34)]
    assert verdicts([c]) == {"clean"}


def test_decoding(flashinfer: ModuleType, tmp_path: Path) -> None:
    wrapper, cache = planned(flashinfer, DECODE)
    (c,), dropped = captured(Layer(wrapper), tmp_path, drawn(3, H, D), cache)
    assert not dropped
    assert [c.lengths(b) for b in range(3)] == [(1, 21), (1, 8), (1, 34)]
    assert verdicts([c]) <= {"clean", "undecided"}


def test_a_wrong_page_is_wrong(flashinfer: ModuleType, tmp_path: Path) -> None:
    wrapper, cache = planned(flashinfer, DECODE)
    run = foreign_flashinfer._Wrapper._keys

    def stale(self: Any, cache: Any) -> Any:
        other = numbers()
        self._paged_kv_indices_buf, mine = torch.cat([other[1:], other[:1]]), self._paged_kv_indices_buf
        found, self._paged_kv_indices_buf = run(self, cache), mine
        return found

    type(wrapper)._keys = stale
    try:
        captures, _ = captured(Layer(wrapper), tmp_path, drawn(3, H, D), cache)
    finally:
        del type(wrapper)._keys
    assert verdicts(captures) == {"wrong"}


@pytest.mark.parametrize("natural", [False, True])
def test_packed_sequences(natural: bool, flashinfer: ModuleType, tmp_path: Path) -> None:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper()
    wrapper._qo_indptr_buf, wrapper._kv_indptr_buf, wrapper._causal = ROWS, KEYS, True
    options = {"lse_base": "ln", "lse_layout": "HN"} if natural else {}
    layer = Layer(wrapper, return_lse=True, **options)
    (c,), dropped = captured(layer, tmp_path, drawn(15, H, D), drawn(63, KV, D), drawn(63, KV, D))
    assert not dropped
    assert "lse" in c.tensors
    assert verdicts([c]) == {"clean"}


def test_functions_of_one_sequence(flashinfer: ModuleType, tmp_path: Path) -> None:
    k, v = drawn(KV, 30, D), drawn(KV, 31, D)[:, :30]
    mask = torch.rand(6, 30, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"kv_layout": "HND", "return_lse": True}

    def chunk(q: Tensor) -> Any:
        return flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, logits_soft_cap=3.0, **options)

    def step(q: Tensor) -> Any:
        return flashinfer.single_decode_with_kv_cache(q[0], k, v, **options)

    def masked(q: Tensor) -> Any:
        return flashinfer.single_prefill_with_kv_cache(q, k, v, kv_layout="HND", custom_mask=mask)

    # One row alone says little; the last looks at no mask.
    for run, verdict in ((chunk, "clean"), (step, "undecided"), (masked, "wrong")):
        (c,), dropped = captured(Layer(run), tmp_path / run.__name__, drawn(6, H, D))
        assert not dropped
        assert verdicts([c]) == {verdict}
        assert "lse" in c.tensors or run is masked
    assert torch.equal(c.tensors["mask"][0, 0], mask)


@pytest.mark.parametrize(
    ("plan", "options", "why"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, {}, "pos_encoding_mode ROPE_LLAMA"),
        ({"custom_mask_buf": torch.ones(3)}, {}, "custom mask"),
        ({"jit_module": object()}, {}, "a kernel of the caller's own"),
        ({}, {"k_scale": 0.5}, "k_scale"),
        ({"paged_kv_indptr_buf": None}, {}, "has not planned"),
    ],
)
def test_what_is_not_stated_is_refused(
    plan: dict[str, Any], options: dict[str, Any], why: str, flashinfer: ModuleType, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    wrapper, cache = planned(flashinfer, DECODE, **plan)
    monkeypatch.setattr(foreign_flashinfer._Wrapper, "_run", lambda *a, **_: a[1])
    monkeypatch.setattr(foreign_flashinfer._Wrapper, "_keys", lambda *_: [None] * 3)
    captures, dropped = captured(Layer(wrapper, **options), tmp_path, drawn(3, H, D), cache)
    assert not captures
    assert why in str(dropped)


def test_everything_is_put_back(flashinfer: ModuleType, tmp_path: Path) -> None:
    wrapper, cache = planned(flashinfer, DECODE, sm_scale=1.0)
    before = vars(type(wrapper))["run"], flashinfer.single_prefill_with_kv_cache
    captured(Layer(wrapper, k_scale=1.0), tmp_path, drawn(3, H, D), cache)
    assert (vars(type(wrapper))["run"], flashinfer.single_prefill_with_kv_cache) == before
