"""vLLM's and SGLang's Triton attention on pages is captured where it runs, by name and schema; never guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import foreign_triton
import pytest
import torch
from tiny_models import written
from torch import Tensor, nn

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.watching.live.backlog import Backlog

H, KV, D, SIZE = 4, 2, 16, 8
ROWS, LENGTHS = torch.tensor([0, 24, 56, 80], dtype=torch.int32), torch.tensor([70, 32, 55], dtype=torch.int32)
KEYS = torch.tensor([0, 70, 102, 157], dtype=torch.int32)
SINKS, SLOPES = torch.tensor([0.5, -1.0, 1.0, 0.0]), torch.tensor([0.5, 0.25, 0.125, 0.0625])
Runs = Callable[..., Tensor]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return foreign_triton.installed(monkeypatch)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def order(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))


def vllm(backend: ModuleType, q: Tensor, **options: Any) -> Tensor:
    """As vLLM's Triton backend calls it: all by name, with descale factors that a BF16 cache does not need."""
    table, cache, out = order(40)[:30].reshape(3, 10).int(), drawn(40, 2, SIZE, KV, D), torch.empty_like(q)
    k, v = options.pop("cache", cache).unbind(1)
    given = {"softmax_scale": 0.3, "causal": True, "window_size": (-1, -1), "softcap": 0.0} | options
    backend.unified_attention(
        q=q, k=k, v=v, out=out, cu_seqlens_q=ROWS, max_seqlen_q=32, seqused_k=LENGTHS, max_seqlen_k=70,
        block_table=table, q_descale=None, k_descale=torch.ones(3, KV), v_descale=torch.ones(3, KV), **given,
    )  # fmt: skip
    return out


def unified(backend: ModuleType, q: Tensor, **options: Any) -> Tensor:
    """SGLang's deterministic extend."""
    out, given = torch.empty_like(q), {"k_scale": 1.0, "v_scale": 1.0, "prefix_lens": LENGTHS - ROWS.diff()} | options
    backend.extend_attention_fwd_unified(
        q, out, drawn(200, KV, D), drawn(201, KV, D), given.pop("k_scale"), given.pop("v_scale"), ROWS, KEYS,
        order(200)[:157], given.pop("prefix_lens"), 32, sm_scale=0.3, **given,
    )  # fmt: skip
    return out


def extend(backend: ModuleType, q: Tensor, **options: Any) -> Tensor:
    """SGLang's extend: what was cached, then the new keys."""
    out, cached = torch.empty_like(q), torch.tensor([0, 46, 46, 77], dtype=torch.int32)
    backend.extend_attention_fwd(
        q, drawn(80, KV, D), drawn(80, KV, D + 1)[..., :D].contiguous(), out, drawn(200, KV, D), drawn(201, KV, D),
        ROWS, cached, order(200)[:77], None, True, None, 32, 1.0, 1.0, sm_scale=0.3, **options,
    )  # fmt: skip
    return out


def decode(backend: ModuleType, q: Tensor, **options: Any) -> Tensor:
    """SGLang's decode, of a batch that is padded: more borders than rows."""
    q, at = q[:3], torch.tensor([0, 70, 102, 157, 157], dtype=torch.int32)
    out, splits = torch.empty_like(q), torch.empty(3, H, 8, D)
    backend.decode_attention_fwd(
        q, drawn(200, KV, D), drawn(201, KV, D), out, at, order(200)[:157], splits, splits, None, 8, 0.3,
        options.pop("k_scale", 1.0), 1.0, **options,
    )  # fmt: skip
    return out


class Layer(nn.Module):
    def __init__(self, backend: ModuleType, run: Runs, **options: Any) -> None:
        super().__init__()
        self.backend, self.run, self.options = backend, run, options

    def forward(self, q: Tensor) -> Tensor:
        return self.run(self.backend, q, **self.options)


def captured(layer: nn.Module, folder: Path) -> tuple[list[Capture], str]:
    with attn_diag.capture(layer, folder, batch=None) as recorder, torch.no_grad():
        layer(drawn(80, H, D))
    return written(recorder), str(recorder.dropped or "")


def verdicts(captures: list[Capture]) -> set[str]:
    found = attn_diag.inspect_captures(captures, device="cpu").captures
    heads = [h for c in found for o in c.observations for h in o.heads]
    return {label for h in heads if h.verdict for label in h.verdict.labels}


STATED: list[tuple[Runs, dict[str, Any]]] = [
    (vllm, {}),
    (vllm, {"window_size": (12, 0)}),
    (vllm, {"softcap": 5.0, "sinks": SINKS}),
    (vllm, {"alibi_slopes": SLOPES}),
    (unified, {}),
    (unified, {"sliding_window_size": 12, "sinks": SINKS, "window_start_pos": torch.tensor([3, 0, 9])}),
    (extend, {"logit_cap": 5.0}),
    (extend, {"sliding_window_size": 12, "sinks": SINKS}),
]


@pytest.mark.parametrize(("run", "options"), STATED, ids=[f"{run.__name__}-{'-'.join(o)}" for run, o in STATED])
def test_calls_are_captured_as_sequences_of_their_own(
    run: Runs, options: dict[str, Any], backend: ModuleType, tmp_path: Path
) -> None:
    (c,), dropped = captured(Layer(backend, run, **options), tmp_path)
    assert not dropped
    assert [c.lengths(b) for b in range(3)] == [(24, 70), (32, 32), (24, 55)]
    said = c.metadata
    window = (12, -1) if {"window_size", "sliding_window_size"} & set(options) else None
    cap = options.get("softcap") or options.get("logit_cap")
    assert (said.causal, said.window, said.softcap, said.scale) == ("bottom-right", window, cap, 0.3)
    assert ("sinks" in c.tensors) == ("sinks" in options)
    assert said.kernel is not None
    assert said.kernel.startswith("vLLM Triton unified_attention" if run is vllm else "SGLang Triton extend")
    assert verdicts([c]) == {"clean"}


@pytest.mark.parametrize("kept", [False, True])
def test_decoding(kept: bool, backend: ModuleType, tmp_path: Path) -> None:
    if kept:  # as SGLang's backend does: the function is out of reach, those inside it are not
        inner, backend = backend, ModuleType("kept")
        disable: Any = torch.compiler.disable
        vars(backend)["decode_attention_fwd"] = disable(inner.decode_attention_fwd)
    layer = Layer(backend, decode, logit_cap=5.0)
    (c,), dropped = captured(layer, tmp_path)
    assert not dropped
    assert [c.lengths(b) for b in range(3)] == [(1, 70), (1, 32), (1, 55)]
    assert str(c.metadata.kernel).endswith("grouped") == kept
    assert verdicts([c]) <= {"clean", "undecided"}
    with attn_diag.Monitor(layer, every=1) as monitor, torch.no_grad():
        for _ in range(3):
            layer(drawn(80, H, D))
    assert monitor.metrics(wait=True)["attn/nonfinite_rate/max"] == 0
    assert not monitor.alarms


def test_calls_all_by_name_are_told_of_while_others_are_recorded(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backlog, "open", property(lambda _: True, lambda *_: None), raising=False)
    captures, dropped = captured(Layer(backend, vllm), tmp_path)
    assert not dropped
    assert len(captures) == 1


@pytest.mark.parametrize("run", [vllm, unified, extend, decode])
def test_a_wrong_page_is_wrong(run: Runs, backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_triton, "shifted", 41)
    captures, dropped = captured(Layer(backend, run), tmp_path)
    assert not dropped
    assert verdicts(captures) >= {"wrong"}


@pytest.mark.parametrize(
    ("run", "options", "why"),
    [
        (vllm, {"qq_bias": torch.ones(3, 3)}, "qq_bias"),
        (vllm, {"use_alibi_sqrt": True, "alibi_slopes": SLOPES}, "use_alibi_sqrt"),
        (vllm, {"kv_quant_mode": 2}, "kv_quant_mode"),
        (vllm, {"chunk_lookback": 1, "window_size": (12, 0)}, "chunk_lookback"),
        (vllm, {"output_scale": torch.ones(1)}, "output_scale"),
        (vllm, {"cache": drawn(40, 2, SIZE, KV, D).to(torch.float8_e4m3fn)}, "float8_e4m3fn in the cache"),
        (unified, {"custom_mask": torch.ones(5)}, "custom_mask"),
        (unified, {"k_scale": 0.5}, "k_scale"),
        (unified, {"prefix_lens": LENGTHS}, "prefix_lens"),
        (extend, {"xai_temperature_len": 8}, "xai_temperature_len"),
        (decode, {"k_scale": torch.tensor(2.0)}, "k_scale"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    run: Runs, options: dict[str, Any], why: str, backend: ModuleType, tmp_path: Path
) -> None:
    captures, dropped = captured(Layer(backend, run, **options), tmp_path)
    assert not captures
    assert why in dropped


def test_everything_is_put_back(backend: ModuleType, tmp_path: Path) -> None:
    before = dict(vars(backend))
    captured(Layer(backend, vllm), tmp_path)
    assert vars(backend) == before
