"""Training loops that are not the plain one: copies and pickles of the model, two optimizers, checkpointing, forks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from tiny_models import hooks_of, nano_gpt, next_token_loss, tokens
from torch import Tensor, nn
from torch.autograd import backward

import attn_diag
from attn_diag.errors import InputError
from attn_diag.watching.live import intercept


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
    with attn_diag.capture(model, tmp_path) as recorder, attn_diag.Monitor(model, every=1) as monitor:
        for _ in range(3):
            loss = next_token_loss(model, ids)
            backward(critic(torch.ones(2, 4)).mean())
            theirs.step()
            backward(loss)
            ours.step()
        recorder.drain()
        metrics = monitor.metrics(wait=True)
    # The first iteration does not know yet whose optimizer is whose.
    late = [attn_diag.load(path) for path in sorted(recorder.written) if "step000000" not in path.name]
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
            backward(loss)
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
        backward(next_token_loss(model, ids))
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
    recorder = attn_diag.capture(nano_gpt().model, tmp_path)
    with recorder, pytest.raises(InputError, match="running already"):
        recorder.start()
    assert intercept._observers == []
    recorder.close()
