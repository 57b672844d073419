"""Calls that are recorded where they run and read later: their files have the same bits as of those that are not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Tiny, nano_gpt, same, steps, transformers_model
from torch import Tensor, nn
from torch.nn import functional

import attn_diag
from attn_diag.watching.live import backlog
from attn_diag.watching.live.backlog import Backlog
from attn_diag.watching.live.gradients_to_come import GradientToCome
from attn_diag.watching.live.recorder import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler
STEPS = 4
OWN = {"run", "capture"}  # metadata that no two runs share


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """How often a way of recording was taken, and how often not; pipelines' module is loaded, as by accelerate."""
    pytest.importorskip("torch.distributed.pipelining")
    counts: Counter[tuple[str, bool]] = Counter()
    for name in ("ran", "went_back"):
        whole = getattr(Backlog, name)

        def counted(self: Backlog, *args: Any, whole: Callable[..., bool] = whole, name: str = name) -> bool:
            done = whole(self, *args)
            counts[name, done] += 1
            return done

        monkeypatch.setattr(Backlog, name, counted)
    tell = GradientToCome.tell

    def told(self: GradientToCome) -> None:
        counts["gradient", bool(self.waiting)] += 1
        tell(self)

    monkeypatch.setattr(GradientToCome, "tell", told)
    return counts


class Masked(nn.Module):
    """Attention with a mask, its heads' features no multiple of 8, and x, which no backward needs, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(30, 90).requires_grad_(False), nn.Linear(30, 30)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        q, k, v = (t.unflatten(-1, (3, 10)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().expand(len(x), 1, -1, -1)
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
        o = o.transpose(1, 2).flatten(2)
        with torch.no_grad():
            x.zero_()
        result: Tensor = self.out(o)
        return result


def masked() -> Tiny:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30), Masked(), Masked())
    x = torch.randn(3, 24, 30)
    return Tiny(model, lambda run: run(x).square().mean(), ("1", "2"))


class NormedAttention(nn.Module):
    """Attention with a norm of each head's q and k behind the projection, and a factor, as in Qwen3 and OPT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(16, 48), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = self.norm(q) * 0.5, self.norm(k)
        return x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def normed() -> Tiny:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), NormedAttention(), NormedAttention())
    x = torch.randn(3, 12, 16)
    return Tiny(model, lambda run: run(x).square().mean(), ("1", "2"))


MODELS: dict[str, Callable[[], Tiny]] = {
    "nano": nano_gpt,
    "masked": masked,
    "gpt2": lambda: transformers_model("gpt2", "sdpa"),
    "llama": lambda: transformers_model("llama", "sdpa", padded=True),
    "normed": normed,
    "neox": lambda: transformers_model("gpt_neox", "sdpa"),
    "checkpoint": lambda: nano_gpt(checkpointing=False),
}


def run(tiny: Tiny, around: Any, *, compiled: bool, micro: int = 1, autocast: bool = False) -> list[Tensor]:
    """A few steps of training: losses and parameters."""
    torch._dynamo.reset()
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-2)
    model: Any = torch.compile(tiny.model) if compiled else tiny.model
    losses = []
    with around:
        for _ in range(STEPS):
            for _ in range(micro):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = tiny.loss(model)
                torch.autograd.backward(loss)
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *tiny.model.parameters()]


def held(recorder: Recorder) -> dict[str, Any]:
    assert not recorder.dropped, recorder.dropped
    found = {}
    for path in recorder.written:
        capture = attn_diag.load(path)
        about = {name: value for name, value in vars(capture.metadata).items() if name != "extra"}
        extra = {name: value for name, value in capture.metadata.extra.items() if name not in OWN}
        found[path.name] = {key: t[...] for key, t in capture.tensors.items()}, about, extra
    return found


@pytest.mark.parametrize(
    ("model", "compiled", "chosen"),
    [
        ("nano", False, {"batch": None, "calls": None, "micro": 2}),
        ("nano", False, {"layers": {1}, "heads": [1], "autocast": True}),
        ("nano", True, {"calls": None, "micro": 2}),
        ("nano", True, {"layers": {1}, "batch": (1,), "heads": [0]}),
        ("masked", False, {"batch": (0, 2)}),
        ("gpt2", False, {}),
        ("llama", False, {"layers": {1}}),
        ("neox", False, {"heads": [1]}),
        ("normed", False, {"batch": None, "calls": None, "micro": 2, "autocast": True}),
        ("normed", True, {"batch": (0,), "calls": None, "micro": 2}),
        ("checkpoint", False, {}),
    ],
    ids=lambda value: "-".join(map(str, value)) or "all" if isinstance(value, dict) else str(value),
)
def test_the_same_bits(
    model: str, compiled: bool, chosen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    recorded: Counter[tuple[str, bool]],
) -> None:  # fmt: skip
    how = {name: chosen.pop(name) for name in ("micro", "autocast") if name in chosen}
    tiny = MODELS[model]()
    late = attn_diag.capture(tiny.model, tmp_path / "late", **chosen)
    bits = run(tiny, late, compiled=compiled, **how)
    assert recorded["ran", True], "nothing was recorded: this test shows nothing"
    assert bool(recorded["gradient", True]) == (model in ("llama", "neox", "normed"))
    monkeypatch.setattr(Recorder, "may_be_late", False)
    tiny = MODELS[model]()
    at_once = attn_diag.capture(tiny.model, tmp_path / "at once", **chosen)
    before = recorded["ran", True]
    same_bits = run(tiny, at_once, compiled=compiled, **how)
    assert recorded["ran", True] == before
    assert same(bits, same_bits)
    found, wanted = held(late), held(at_once)
    assert found
    assert found.keys() == wanted.keys()
    for name, (tensors, about, extra) in wanted.items():
        assert found[name][0].keys() == tensors.keys(), name
        for key, t in tensors.items():
            assert found[name][0][key].dtype == t.dtype, (name, key)
            assert torch.equal(found[name][0][key], t), (name, key)
        assert found[name][1:] == (about, extra)


def test_of_two_threads_at_one_place_the_chosen_call_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are asked for before either runs, and neither would be the second one."""
    tiny = nano_gpt(layers=1)
    together = threading.Barrier(2, timeout=20)
    begins = Backlog.begins

    def waits(self: Backlog, *args: Any) -> bool:
        found = begins(self, *args)
        if threading.current_thread() is not threading.main_thread():
            together.wait()
        return found

    def of_two() -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.stack([one.result() for one in [pool.submit(tiny.loss, tiny.model) for _ in range(2)]]).sum()

    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
    with attn_diag.capture(tiny.model, tmp_path, calls={1}) as recorder:
        for step in range(5):
            if step == 3:  # by then it is known what makes q
                monkeypatch.setattr(Backlog, "begins", waits)
            torch.autograd.backward(of_two() if step >= 3 else tiny.loss(tiny.model) + tiny.loss(tiny.model))
            optimizer.step()
    assert not recorder.dropped
    assert {path.name[:10] for path in recorder.written} == {f"step{step:06d}" for step in range(5)}
    assert all({"dq", "do"} <= attn_diag.load(path).tensors.keys() for path in recorder.written)


def test_of_a_step_that_breaks_what_was_recorded_is_written(
    tmp_path: Path, recorded: Counter[tuple[str, bool]]
) -> None:
    tiny = nano_gpt()
    recorder = attn_diag.capture(tiny.model, tmp_path, ring=1)

    def breaks() -> None:
        with recorder:
            steps(tiny, 2)
            torch.autograd.backward(tiny.loss(tiny.model))
            raise KeyError("in the third")

    with pytest.raises(KeyError, match="in the third"):
        breaks()
    assert recorded["ran", True] == 2  # of two layers, in the third step
    assert {path.name[:11] for path in recorder.written} == {"step000002_"}
    assert all("dq" in attn_diag.load(path).tensors for path in recorder.written)


def test_a_layer_that_comes_to_be_wanted_is_read_as_ever(tmp_path: Path, recorded: Counter[tuple[str, bool]]) -> None:
    """Of a place whose calls nobody wanted it is not known what makes its q."""
    tiny, layers = nano_gpt(), {1}
    with attn_diag.capture(tiny.model, tmp_path, layers=layers) as recorder:
        for step in range(6):
            if step == 3:
                layers.add(0)
            steps(tiny)
    assert not recorder.dropped
    assert sorted(path.name[:18] for path in recorder.written) == sorted(
        f"step{step:06d}_layer{layer:02d}"[:18] for step in range(6) for layer in (0, 1) if layer or step > 2
    )
    assert all({"dq", "do"} <= attn_diag.load(path).tensors.keys() for path in recorder.written)
    assert recorded["ran", True] > recorded["ran", False]


def test_copies_wait_no_longer_than_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Counter[tuple[str, bool]]
) -> None:
    told: list[int] = []
    tell = Backlog.tell

    def counted(self: Backlog) -> None:
        told.append(len(self._records))
        tell(self)

    monkeypatch.setattr(Backlog, "tell", counted)
    monkeypatch.setattr(backlog, "_MOST_BYTES", 1)
    tiny = nano_gpt(layers=4)
    with attn_diag.capture(tiny.model, tmp_path) as recorder:
        steps(tiny, 4)
    assert recorded["ran", True] >= 8
    assert max(told) < 8, "a step's records, forward and backward, waited for its end"
    assert len(recorder.written) == 16
    assert not recorder.dropped
