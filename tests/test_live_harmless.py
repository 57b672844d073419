"""A captured run is the same run, bit for bit, and nothing of ours is left in it, whatever its loop is like."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from command_line import Programs
from tiny_models import (
    LENGTH,
    TRANSFORMERS,
    Tiny,
    hooks_of,
    nano_gpt,
    next_token_loss,
    same,
    steps,
    tokens,
    train,
    transformer_encoder,
    transformers_model,
    written,
)
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward  # noqa: F401 - a name that is replaced
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attn_diag
from attn_diag.errors import InputError
from attn_diag.watching.live import intercept, linear_layers, pending, products, recorder, watch

KINDS: dict[str, Callable[[], Tiny]] = {
    "nano_gpt": nano_gpt,
    "checkpoint": lambda: nano_gpt(False),
    "reentrant": lambda: nano_gpt(True),
    "nn.TransformerEncoder": transformer_encoder,
}
_HUGGING_FACE = [(kind, how) for kind in TRANSFORMERS for how in ("sdpa", "eager")]


def is_wrapper(value: Any) -> bool:
    # Nothing is asked of other people's objects: some answer with a warning.
    return (
        type(value) is FunctionType
        and value.__code__.co_filename == intercept.__file__
        and value.__code__.co_name == "observed"
    )


def traces() -> list[str]:
    """Everything of ours that is in modules, tables, or torch's global hooks now."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    found = []
    for name, loaded in list(sys.modules.items()):
        space = getattr(loaded, "__dict__", None)
        for key, value in list(space.items()) if isinstance(space, dict) else []:
            if is_wrapper(value):
                found.append(f"{name}.{key}")
    table = sys.modules.get("transformers.modeling_utils")
    if table is not None:
        for key, value in vars(table)["AttentionInterface"]._global_mapping.items():
            if is_wrapper(value):
                found.append(f"AttentionInterface {key}")
    for holder in (module, optimizer):
        for key, value in vars(holder).items():
            if key.startswith("_global_") and "hooks" in key and value:
                found.append(key)
    found += [thread.name for thread in threading.enumerate() if "attn-diag" in thread.name]
    found += ["operators"] if intercept._overrides._kernels.there or products._kernels.there else []
    found += ["observer"] * len(intercept._observers) + ["open capture"] * len(recorder._open)
    return found


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert not traces()


def test_traces_are_found_while_it_runs(tmp_path: Path) -> None:
    """The guard of every other test here can fail."""
    model = nano_gpt().model
    with attn_diag.capture(model, tmp_path):
        while_running = traces()
        assert hooks_of(model)
    assert {"torch.nn.functional.multi_head_attention_forward", "attn-diag writer", "observer"} <= set(while_running)
    assert {f"{__name__}.multi_head_attention_forward", "operators"} <= set(while_running)
    assert "_global_optimizer_post_hooks" in while_running
    assert not hooks_of(model)


def check_same(make: Callable[[], Tiny], folder: Path, autocast: bool) -> None:
    alone = train(make(), contextlib.nullcontext(), autocast=autocast)
    assert same(alone, train(make(), contextlib.nullcontext(), autocast=autocast)), "the run itself is not repeatable"
    tiny = make()
    capture = attn_diag.capture(tiny.model, folder, batch=None, calls=None)
    assert same(alone, train(tiny, capture, autocast=autocast))
    assert len(capture.written) == 3 * 2 * len(tiny.attentions)
    assert not capture.dropped
    assert not hooks_of(tiny.model)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_stay(kind: str, autocast: bool, tmp_path: Path) -> None:
    check_same(KINDS[kind], tmp_path, autocast)


@pytest.mark.parametrize(("kind", "how"), _HUGGING_FACE, ids=["-".join(case) for case in _HUGGING_FACE])
def test_bits_stay_in_transformers(kind: str, how: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check_same(lambda: transformers_model(kind, how), tmp_path, autocast=True)


def test_a_changed_bit_is_seen() -> None:
    tiny = nano_gpt()
    alone = train(nano_gpt(), contextlib.nullcontext())
    handle = tiny.model.get_submodule("h.1.attn.c_proj").register_forward_hook(lambda *given: given[2] * (1 + 2**-20))
    changed = train(tiny, contextlib.nullcontext())
    handle.remove()
    assert not same(alone, changed)


class _StopError(Exception):
    pass


@pytest.mark.parametrize("error", [_StopError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["model", "loop", "backward"])
def test_nothing_stays_after_an_exception(where: str, error: type[BaseException], tmp_path: Path) -> None:
    tiny = nano_gpt()

    def fail(*_: object) -> None:
        raise error

    if where == "model":
        tiny.model.get_submodule("h.1.mlp").register_forward_hook(fail)
    mine = hooks_of(tiny.model)
    recording = attn_diag.capture(tiny.model, tmp_path, batch=None)

    def run() -> None:
        with recording:
            loss = tiny.loss(tiny.model)
            if where == "backward":
                loss.register_hook(fail)  # type: ignore[no-untyped-call]
            if where != "loop":
                torch.autograd.backward(loss)
            fail()

    with pytest.raises(error):
        run()
    assert hooks_of(tiny.model) == mine
    # What was seen until then is written.
    assert recording.written


@pytest.mark.parametrize("part", ["Watch", "claim", "QueryProjections", "install"])
def test_nothing_stays_where_it_cannot_start(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise _StopError

    home: Any = {"Watch": recorder, "claim": recorder, "QueryProjections": watch, "install": intercept}[part]
    monkeypatch.setattr(home, part, fail)
    tiny = nano_gpt()
    with pytest.raises(_StopError), attn_diag.capture(tiny.model, tmp_path):
        pytest.fail("it must not start")
    assert not hooks_of(tiny.model)
    assert not list(tmp_path.iterdir())
    tiny.loss(tiny.model)


@pytest.mark.parametrize("order", ["nested", "crossed"])
def test_two_at_once(order: str, tmp_path: Path) -> None:
    tiny = nano_gpt()
    every = attn_diag.capture(tiny.model, tmp_path / "every", batch=None).start()
    steps(tiny)
    second = attn_diag.capture(tiny.model, tmp_path / "second", layers={1}).start()
    steps(tiny)
    for recording in (second, every) if order == "nested" else (every, second):
        recording.close()
        steps(tiny)
    assert [len(every.written), len(second.written)] == ([6, 1] if order == "nested" else [4, 2])
    mine, theirs = (attn_diag.load(folder.written[-1]) for folder in (every, second))
    assert mine.metadata.extra["run"] != theirs.metadata.extra["run"]
    assert not hooks_of(tiny.model)


def test_shapes_dtype_and_device_change_between_steps(tmp_path: Path) -> None:
    model = nano_gpt().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = (20, 13, 1, 17)
    with attn_diag.capture(model, tmp_path, layers={0}, batch=None) as recording:
        for number, length in enumerate(lengths):
            if number == 3:
                model.double()
            torch.autograd.backward(next_token_loss(model, tokens(number)[: 2 - number % 2, :length]))
            optimizer.step()
        model.to("meta")
        model(tokens().to("meta"))
    found = [(c.q_length, c.batch, c.tensors["q"].dtype) for c in written(recording)[:4]]
    single, double = torch.float32, torch.float64
    assert found == [(20, 2, single), (13, 1, single), (1, 2, single), (17, 1, double)]
    assert not hooks_of(model)


LISTENERS = [(recorder.Recorder, name) for name in ("wants", "wants_step", "forward", "backward", "step_ended")]
HOOKS = [(linear_layers.Projections, "find"), (pending.Pending, "_from_node"), (linear_layers, "_Seen")]


@pytest.mark.parametrize("broken", [*([one] for one in LISTENERS), HOOKS], ids=lambda b: " ".join(n for _, n in b))
def test_what_raises_of_ours_is_only_logged(
    broken: list[tuple[Any, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = train(nano_gpt(), contextlib.nullcontext())

    def fail(*_: object) -> None:
        raise RuntimeError("ours, not theirs")

    for owner, name in broken:
        monkeypatch.setattr(owner, name, fail)
    tiny = nano_gpt()
    assert same(alone, train(tiny, attn_diag.capture(tiny.model, tmp_path)))
    assert 1 <= caplog.text.count("ours, not theirs") <= 2 * len(broken)


def test_warnings_as_errors_do_not_stop_training(tmp_path: Path, programs: Programs) -> None:
    script = """
import sys, warnings
warnings.simplefilter("error")
import attn_diag
from tiny_models import nano_gpt, steps, transformer_encoder
for number, tiny in enumerate((nano_gpt(), nano_gpt(False), transformer_encoder())):
    with attn_diag.capture(tiny.model, f"{sys.argv[1]}/{number}", max_bytes=10_000) as recorder:
        steps(tiny, 2)
    assert recorder.dropped, "nothing to be warned of"
print("trained")
"""
    done = programs.run(script, tmp_path)
    assert done.out == "trained\n", done.err


@pytest.mark.usefixtures("fresh_heap")
def test_nothing_is_kept_alive(tmp_path: Path) -> None:
    """Neither by what was not chosen, nor by a step that is over, nor by a look at a loop's variables."""
    tiny = nano_gpt()
    seen: list[weakref.ref[Tensor]] = []
    for name in ("h.0.attn", "head"):
        tiny.model.get_submodule(name).register_forward_hook(lambda *given: seen.append(weakref.ref(given[2])))
    with attn_diag.capture(tiny.model, tmp_path, steps={0, 1}):
        for _ in range(3):
            steps(tiny)
            gc.collect()
            assert not [ref for ref in seen if ref() is not None]


class Loop:
    """A trainer: not a module, but with a self."""

    def frees(self, folder: Path) -> bool:
        x = torch.randn(1, 2, LENGTH, 8, requires_grad=True)
        with attn_diag.capture(None, folder):
            for _ in range(2):
                large = torch.ones(1000)
                sdpa(x, x, x)
            alive = weakref.ref(large)
            del large
            return alive() is None


def test_a_loop_that_frees_a_tensor_frees_it(tmp_path: Path) -> None:
    assert Loop().frees(tmp_path)


def test_logits_go_with_their_forward(tmp_path: Path) -> None:
    tiny = nano_gpt()
    with torch.no_grad(), attn_diag.capture(tiny.model, tmp_path):
        logits = tiny.model(tokens())
        alive = weakref.ref(logits)
        del logits
        assert alive() is None


# Loops that are not the plain one: copies and pickles of the model, two optimizers, checkpointing, forks.


def test_a_copy_or_pickle_of_the_model_has_nothing_of_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = nano_gpt().model, tokens()
    with attn_diag.capture(model, tmp_path), attn_diag.Monitor(model, every=1):
        assert hooks_of(model)
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        assert torch.equal(twin(ids), model(ids))
    assert not hooks_of(model)
    buffer.seek(0)
    for other in (twin, pickle.loads(pickle.dumps(twin)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(ids), model(ids))
    assert "not recorded" not in caplog.text


def test_another_models_optimizer_ends_no_step_of_ours(tmp_path: Path) -> None:
    model, critic, ids = nano_gpt().model, nn.Linear(4, 1), tokens()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, critic))
    with attn_diag.capture(model, tmp_path) as recording, attn_diag.Monitor(model, every=1) as monitor:
        for _ in range(3):
            loss = next_token_loss(model, ids)
            torch.autograd.backward(critic(torch.ones(2, 4)).mean())
            theirs.step()
            torch.autograd.backward(loss)
            ours.step()
        recording.drain()
        metrics = monitor.metrics(wait=True)
    # The first iteration does not know yet whose optimizer is whose.
    late = [capture for capture in written(recording) if capture.metadata.step]
    assert len(late) >= 4
    assert all("dq" in capture.tensors for capture in late)
    assert metrics["attn/dq_share/max"] > 0


@pytest.mark.usefixtures("fresh_heap")
def test_checkpointing_keeps_its_memory(tmp_path: Path) -> None:
    def held(checkpointing: bool | None, watched: bool) -> int:
        """Bytes of the tensors that are alive between forward and backward."""
        model, ids = nano_gpt(checkpointing).model, tokens().repeat(16, 1)
        gc.collect()
        before = {id(o) for o in gc.get_objects() if type(o) is Tensor}
        folder = tmp_path / f"{checkpointing} {watched}"
        with contextlib.ExitStack() as watching:
            if watched:
                watching.enter_context(attn_diag.capture(model, folder, heads=[0]))
                watching.enter_context(attn_diag.Monitor(model, every=1, rows=8))
            loss = next_token_loss(model, ids)
            gc.collect()
            new = [o.untyped_storage() for o in gc.get_objects() if type(o) is Tensor and id(o) not in before]
            torch.autograd.backward(loss)
        return sum({storage.data_ptr(): storage.nbytes() for storage in new}.values())

    plain, watched, without = held(False, False), held(False, True), held(None, True)
    # Of one of 32 sequences a copy is kept; without checkpointing the graph keeps all of them.
    assert watched - plain < 0.25 * (without - plain)


def test_frozen_projections_are_monitored_too() -> None:
    model, ids = nano_gpt().model, tokens()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith(("h.1", "head")))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with attn_diag.Monitor(model, every=1) as monitor:
        torch.autograd.backward(next_token_loss(model, ids))
        optimizer.step()
        monitor.metrics(wait=True)
        assert [layer.layer for layer in monitor.history[-1].layers] == [0, 1]


@pytest.mark.filterwarnings("ignore:This process")  # has several threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_captures_nothing(tmp_path: Path) -> None:
    model = nano_gpt().model
    with attn_diag.capture(model, tmp_path):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, str(len(intercept._observers)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 10) == b"0"
        assert len(intercept._observers) == 1
        os.close(read)
        os.close(write)


def test_starting_twice_is_refused(tmp_path: Path) -> None:
    recording = attn_diag.capture(nano_gpt().model, tmp_path)
    with recording, pytest.raises(InputError, match="running already"):
        recording.start()
    assert intercept._observers == []
    recording.close()
