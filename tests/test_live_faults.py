"""What goes wrong while a run is captured: the run goes on, and what was complete stays readable."""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds, some
from command_line import Programs
from tiny_models import nano_gpt, steps, written
from torch import Tensor, nn

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.watching.live import recorder as recording
from attn_diag.watching.live.writer import Taken, Writer


def files(folder: Path) -> list[str]:
    """All but the marker of a run that goes on, or was killed."""
    names = sorted(path.name for path in folder.rglob("*") if path.is_file())
    return [name for name in names if not name.startswith(".attn-diag-rank")]


def size_of(captures: list[Capture]) -> int:
    """Bytes of their tensors."""
    return sum(t[...].nbytes for capture in captures for t in capture.tensors.values())


FULL = """
import logging, resource, signal, sys, attn_diag
from tiny_models import nano_gpt, steps
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logging.basicConfig(level=logging.WARNING)
tiny = nano_gpt()
with attn_diag.capture(tiny.model, sys.argv[1]) as recorder:
    for step in range(3):
        steps(tiny)
        recorder.drain()
        # From now on no file can grow beyond this.
        limit = 4096 if step == 0 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
print([path.name[:10] for path in recorder.written], list(recorder.dropped.values()))
"""


def test_a_full_disk_costs_its_step_alone(tmp_path: Path, programs: Programs) -> None:
    done = programs.run(FULL, tmp_path)
    assert done.code == 0, done.err
    assert done.out.strip() == "['step000000', 'step000000', 'step000002', 'step000002'] [2]", done.err
    assert "cannot write" in done.err
    assert "File too large" in done.err
    # Nothing half-written stays.
    assert len(list(tmp_path.iterdir())) == 4
    for path in tmp_path.iterdir():
        attn_diag.load(path).tensors["q"][...]


KILLED = """
import os, signal, sys, time, attn_diag
from attn_diag.captures import capture as captures
from tiny_models import nano_gpt, steps
write = captures.save_file
def half(tensors, path, metadata):
    write(tensors, path, metadata)
    if "step000002" in path:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
captures.save_file = half
tiny = nano_gpt()
with attn_diag.capture(tiny.model, sys.argv[1]):
    for step in range(50):
        steps(tiny)
        time.sleep(0.05)
"""


def test_killed_while_writing(tmp_path: Path, programs: Programs) -> None:
    done = programs.run(KILLED, tmp_path)
    assert done.code == -signal.SIGKILL, done.err
    whole = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name[:10] for path in whole] == ["step000000"] * 2 + ["step000001"] * 2
    # The file that was being written does not go by the name of a capture.
    assert len(files(tmp_path)) == 5
    assert all(holds(attn_diag.load(path)) for path in whole)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, file = nano_gpt(), tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(InputError, match=r"cannot capture into .*; choose another folder"):
            attn_diag.capture(tiny.model, folder).start()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="no permission to write"):
        attn_diag.capture(tiny.model, tmp_path / "locked").start()


def test_captures_of_an_earlier_run_are_not_mixed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path):
        steps(tiny)
    before = files(tmp_path)
    with pytest.raises(InputError, match=r"holds captures of an earlier run .*choose a new folder"):
        attn_diag.capture(tiny.model, tmp_path).start()
    # Another rank's are no obstacle.
    monkeypatch.setenv("RANK", "1")
    with attn_diag.capture(tiny.model, tmp_path):
        steps(tiny)
    assert files(tmp_path)[::2] == before


def test_the_byte_cap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path / "free", batch=None) as free:
        steps(tiny, 3)
    size = size_of(written(free)[:2])
    # The gradients of a call are counted before they come: one at the projection more than there is, at most.
    limit = size * 9 // 4
    with attn_diag.capture(tiny.model, tmp_path / "capped", batch=None, max_bytes=limit) as capped:
        steps(tiny, 3)
    assert [path.name for path in capped.written] == [path.name for path in free.written[:4]]
    assert size_of(written(capped)) <= limit
    assert "(max_bytes)" in caplog.text


def taken(number: int, size: int = 1000) -> Taken:
    tensors = {name: torch.zeros(1, 1, size // 4, 1) for name in "qkv"}
    return Taken(tensors, {}, number, f"step{number}")


def test_a_slow_disk_fills_no_memory() -> None:
    release, kept = threading.Event(), []

    def keep(one: Taken) -> None:
        release.wait(10)
        kept.append(one.step)

    writer = Writer(keep, limit=10_000)
    writer.start()
    accepted = [number for number in range(20) if writer.submit(taken(number))]
    # 3,000 bytes each; one more may already be in the thread's hands.
    assert 3 <= len(accepted) <= 4
    release.set()
    assert writer.drain(10)
    assert kept == accepted
    assert writer.submit(taken(99))
    writer.close()
    assert kept[-1] == 99


@dataclass
class Disk:
    """One that writes nothing until it is released."""

    entered: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found, save = Disk(), Capture.save

    def wait(self: Capture, path: Path) -> Path:
        found.entered.set()
        assert found.released.wait(30)
        return save(self, path)

    monkeypatch.setattr(Capture, "save", wait)
    return found


def test_a_slow_disk_is_named(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "_IN_FLIGHT", 150_000)
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path, batch=None) as recorder:
        steps(tiny, 5)
        disk.released.set()
    assert "the disk is slower than the captures" in caplog.text
    assert recorder.written
    assert len(recorder.written) + sum(recorder.dropped.values()) == 10


def test_training_never_waits_for_the_disk(tmp_path: Path, disk: Disk) -> None:
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path) as recorder:
        # It would wait for ever: only what comes after lets the disk go on.
        steps(tiny, 3)
        assert disk.entered.wait(10)
        assert not recorder.drain(0.05)
        assert not recorder.written
        disk.released.set()
    assert len(recorder.written) == 6


# The ring.


def test_the_ring_on_demand(tmp_path: Path) -> None:
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path, ring=2) as recorder:
        steps(tiny, 5)
        assert recorder.drain(10)
        assert not files(tmp_path), "nothing is written without a trigger"
        recorder.dump("I wanted to see it")
        recorder.drain()
        found = written(recorder)
        steps(tiny)
    # Older steps are forgotten, and the later one was not asked for.
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert len(files(tmp_path)) == 4
    assert all(c.metadata.notes == "written because I wanted to see it" for c in found)


def test_last(tmp_path: Path) -> None:
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path, ring=2, batch=None):
        steps(tiny, 3)
        captures = attn_diag.last()
        again = attn_diag.last()
    assert {(c.metadata.step, c.metadata.layer) for c in captures} == {(2, 0), (2, 1)}
    assert [c.metadata.step for c in captures] == [c.metadata.step for c in again] == [2, 2]
    assert len(files(tmp_path)) == 4
    assert all({"o", "do", "dq", "x", "w_q"} <= c.tensors.keys() for c in captures)
    diagnosis = attn_diag.inspect_captures(captures)
    assert all(one.assumptions.ok for one in diagnosis.captures)


def test_last_without_a_ring(tmp_path: Path) -> None:
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path, layers={1}) as recorder:
        steps(tiny, 2)
        (capture,) = attn_diag.last()
        assert (capture.metadata.step, capture.metadata.layer) == (1, 1)
        steps(tiny)
        (capture,) = attn_diag.last()
        assert capture.metadata.step == 2
        assert re.fullmatch(r"<capture into .*: step 3, 3 files written>", repr(recorder))
    assert re.fullmatch(r"<capture into .*: closed at step 3, 3 files written>", repr(recorder))


def test_what_a_capture_says_of_itself_is_so(tmp_path: Path) -> None:
    tiny = nano_gpt()
    recorder = attn_diag.capture(tiny.model, tmp_path / "ring", ring=2)
    assert repr(recorder) == f"<capture into {tmp_path / 'ring'}: not started, a ring of 2 steps>"
    with recorder:
        steps(tiny, 1)
        assert "ring: step 1, 0 files written, a ring of 2 steps>" in repr(recorder)
        attn_diag.last()
        assert "ring: step 1, 2 files written" in repr(recorder)
    assert "ring: closed at step 1, 2 files written" in repr(recorder)


@pytest.mark.parametrize(
    "made",
    [
        attn_diag.Monitor,
        lambda model: attn_diag.capture(model, "folder"),
        lambda model: attn_diag.break_if(nonfinite=True, model=model),
    ],
    ids=["Monitor", "capture", "break_if"],
)
def test_what_is_no_model_is_refused(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = "model must be a torch.nn.Module, or None for all calls of the process, got "
    with pytest.raises(attn_diag.InputError) as refused:
        made("gpt2")
    assert str(refused.value).startswith(f"{expected}the text 'gpt2': load it first")
    with pytest.raises(attn_diag.InputError, match=f"{expected}list"):
        made([nn.Linear(1, 1)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", ["o", "do"])
def test_the_ring_on_a_nan(broken: str, tmp_path: Path) -> None:
    tiny = nano_gpt()

    def spoil(_: nn.Module, given: Any, __: Any) -> Any:
        return tuple(g * torch.nan for g in given)

    with attn_diag.capture(tiny.model, tmp_path, ring=2) as recorder:
        steps(tiny, 3)
        assert recorder.drain(10)
        assert not files(tmp_path)
        if broken == "o":
            with torch.no_grad():
                weight: Any = tiny.model.get_submodule("h.1.attn.c_attn").weight
                weight[-1] = torch.nan
        else:
            tiny.model.get_submodule("h.1.mlp").register_full_backward_hook(spoil)
        steps(tiny)
        assert recorder.drain(10)
        names = files(tmp_path)
    # The steps that led there, and the one itself.
    assert {name[:10] for name in names} >= {"step000002", "step000003"}
    notes = [attn_diag.load(tmp_path / name).metadata.notes for name in names]
    assert all(note is not None and "is not finite" in note for note in notes)


class _LoopError(Exception):
    pass


def test_the_ring_on_an_exception(tmp_path: Path) -> None:
    tiny = nano_gpt()
    recorder = attn_diag.capture(tiny.model, tmp_path, ring=2)

    def run() -> None:
        with recorder:
            steps(tiny, 3)
            tiny.loss(tiny.model)
            raise _LoopError

    with pytest.raises(_LoopError):
        run()
    found = written(recorder)
    # The forward that was under way too, as far as it came.
    assert [c.metadata.step for c in found] == [2, 2, 3, 3]
    assert "do" not in found[-1].tensors
    assert all("_LoopError was raised" in str(c.metadata.notes) for c in found)


def test_the_ring_keeps_within_its_bytes(tmp_path: Path) -> None:
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path / "one", batch=None) as one:
        steps(tiny)
    size = size_of(written(one))
    with attn_diag.capture(tiny.model, tmp_path / "ring", ring=10, batch=None, max_bytes=size * 5 // 2) as ring:
        steps(tiny, 5)
        ring.dump("look")
    assert {c.metadata.step for c in written(ring)} == {3, 4}
    # A single step beyond the limit is not kept whole either.
    with attn_diag.capture(tiny.model, tmp_path / "small", ring=10, batch=None, max_bytes=size - 1) as small:
        steps(tiny, 2)
        small.dump("look")
    assert 0 < size_of(written(small)) < size
    assert small.dropped


@pytest.mark.parametrize(
    "options",
    [
        {"steps": "all"}, {"steps": 500}, {"layers": 2}, {"calls": 0}, {"heads": [-1]}, {"heads": 1}, {"batch": {-2}},
        {"batch": []}, {"ring": -1}, {"max_bytes": 0},
    ],
    ids=str,
)  # fmt: skip
def test_choices_that_cannot_be_are_refused_before_the_run(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        attn_diag.capture(nano_gpt().model, tmp_path, **options)
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        attn_diag.capture("model", tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": {7}}, "no call fitted steps, layers and calls; seen were layers 0, 1"),
        ({"steps": range(100, 200)}, "no call fitted"),
        ({"heads": {9}}, r"heads \[9\], but the call has 0 to 3"),
        ({"batch": {5}}, r"batch \[5\], but the call has 0 to 1"),
    ],
)
def test_choices_that_fit_nothing_are_told(
    options: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path, **options):
        steps(tiny, 2)
    assert files(tmp_path) == []
    assert re.search(words, caplog.text)


class Fails(nn.Module):
    """Before it attends, if it ever does."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.weight, self.passes = nn.Parameter(torch.ones(())), after

    def forward(self) -> Tensor:
        if not self.passes:
            raise ZeroDivisionError
        self.passes -= 1
        return self.weight


@pytest.mark.parametrize("watch", [attn_diag.Monitor, attn_diag.capture])
def test_a_model_that_fails_is_not_said_to_have_no_attention(
    watch: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def watched(after: int, number: int) -> None:
        folder = () if watch is attn_diag.Monitor else (tmp_path / str(number),)
        model = Fails(after)
        with suppress(ZeroDivisionError), watch(model, *folder):
            model()
            model()

    watched(0, 0)
    assert not caplog.records
    watched(1, 1)  # a whole pass without attention
    assert "no attention call was seen" in caplog.text
    caplog.clear()
    try:
        tmp_path.joinpath("missing").read_bytes()
    except FileNotFoundError:  # an exception of before is none of the model's
        watched(2, 2)
    assert "no attention call was seen" in caplog.text


STARTED = """
import sys, attn_diag
from tiny_models import nano_gpt, steps
tiny = nano_gpt()
attn_diag.capture(tiny.model, sys.argv[1], ring=2).start()
steps(tiny, 6)
if len(sys.argv) == 2:
    raise RuntimeError("of the user's")
"""


def test_the_ring_on_an_exception_after_start(tmp_path: Path, programs: Programs) -> None:
    done = programs.run(STARTED, tmp_path / "fails")
    assert "RuntimeError: of the user's" in done.err
    assert [name[:10] for name in files(tmp_path)] == ["step000004", "step000004", "step000005", "step000005"]
    notes = some(attn_diag.load(next(tmp_path.glob("fails/*"))).metadata.notes)
    assert "RuntimeError was raised" in notes
    done = programs.run(STARTED, tmp_path / "ends", "well")
    assert done.code == 0, done.err
    assert files(tmp_path / "ends") == []
