"""One run in one folder; nothing lost without being counted, or said twice; forks, kills and interrupts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Programs
from safetensors.torch import save_file
from tiny_models import nano_gpt, steps
from torch.nn import functional

import attn_diag
from attn_diag.captures import capture as captures
from attn_diag.captures.capture import Capture
from attn_diag.captures.files import write_atomically
from attn_diag.errors import InputError
from attn_diag.watching.live import claim as claims
from attn_diag.watching.live import recorder as recording
from attn_diag.watching.live.call import AttentionCall
from attn_diag.watching.live.claim import claim
from attn_diag.watching.live.watch import Watch
from attn_diag.watching.live.writer import Taken

pytestmark = pytest.mark.slow

# One run in one folder.

HOLDER = """
import sys, time
from pathlib import Path
from attn_diag.watching.live.claim import claim
from attn_diag.watching.live.writer import Taken
claim(Path(sys.argv[1]), 0, "first", "stop")
print("claimed", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which captures into the folder "run"."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "claimed\n"
        yield child
        child.kill()


def test_a_second_process_says_so_and_stops_or_takes_another(
    tmp_path: Path, other: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, tiny = tmp_path / "run", nano_gpt()
    with pytest.raises(
        InputError, match=rf"process {other.pid} on .* captures there .*need RANK.*if_taken=\"another\""
    ):
        attn_diag.capture(tiny.model, folder).start()
    for number in (2, 3):
        with attn_diag.capture(tiny.model, folder, if_taken="another") as recorder:
            steps(tiny)
        assert recorder.folder == tmp_path / f"run-{number}"
        assert [path.parent for path in recorder.written] == [recorder.folder] * 2
    assert f"capturing into {recorder.folder}" in caplog.text
    # The other one goes on undisturbed; once it is killed its marker holds nobody up.
    assert [path.name for path in folder.iterdir()] == [".attn-diag-rank0"]
    other.kill()
    other.wait()
    with attn_diag.capture(tiny.model, folder) as recorder:
        steps(tiny)
    assert sorted(folder.iterdir()) == sorted(recorder.written)


def test_two_in_one_process(tmp_path: Path) -> None:
    tiny = nano_gpt()
    with (
        attn_diag.capture(tiny.model, tmp_path, steps={0}),
        pytest.raises(InputError, match=r"this process captures into .* already, as rank 0"),
    ):
        attn_diag.capture(tiny.model, tmp_path).start()
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="if_taken must be"):
        attn_diag.capture(tiny.model, tmp_path, if_taken="ask")  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_a_marker_is_believed(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems: whether a run is over cannot be asked there, so the user is."""

    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuses)
    claim(tmp_path, 0, "first", "stop").release()
    claim(tmp_path, 0, "first", "stop").leave()  # killed
    with pytest.raises(InputError, match=r"or did until it was killed: delete .*/\.attn-diag-rank0 if it is over"):
        claim(tmp_path, 0, "second", "stop")
    another = claim(tmp_path, 0, "second", "another")
    assert another.folder.name == f"{tmp_path.name}-2"
    another.release()


def test_another_hosts_marker_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks may hold on one host alone."""
    claim(tmp_path, 0, "first", "stop").leave()
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    with pytest.raises(InputError, match="delete"):
        claim(tmp_path, 0, "second", "stop")
    (tmp_path / ".attn-diag-rank0").write_text("")  # killed before it said who it was
    claim(tmp_path, 0, "second", "stop").release()


def test_ranks_share_a_folder_and_agree_on_another(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = [claim(folder, rank, "first", "another") for rank in (0, 1)]
    assert {one.folder for one in first} == {folder}
    (folder / "step000000_layer00_call0_rank1.safetensors").touch()
    for one in first:
        one.release()
    # Resumed: of rank 0 there is no capture, and yet it goes where rank 1 must go; then rank 1 writes before rank 2.
    resumed = [claim(folder, rank, "resumed", "another") for rank in (0, 1)]
    (tmp_path / "run-2" / "step000000_layer00_call0_rank1.safetensors").touch()
    resumed.append(claim(folder, 2, "resumed", "another"))
    assert {one.folder.name for one in resumed} == {"run-2"}
    stranger = claim(folder, 3, "stranger", "another")
    assert stranger.folder.name == "run-3"
    for one in (*resumed, stranger):
        one.release()
    # A killed run that wrote nothing leaves its folder to others.
    claim(tmp_path / "new", 1, "killed", "another").leave()
    taken_over = claim(tmp_path / "new", 0, "next", "another")
    assert taken_over.folder.name == "new"
    taken_over.release()


def test_a_marker_that_is_none_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    for name, make in (
        ("link", lambda marker: marker.symlink_to("nowhere")),
        ("folder", Path.mkdir),
        ("pipe", os.mkfifo),
    ):
        folder = tmp_path / name
        folder.mkdir()
        make(folder / ".attn-diag-rank0")
        for if_taken in ("stop", "another"):
            with pytest.raises(InputError, match="choose another folder"):
                claim(folder, 0, "run", if_taken)


def test_a_folder_that_became_another_runs_is_left_alone(tmp_path: Path) -> None:
    tiny, folder = nano_gpt(), tmp_path / "run"
    with attn_diag.capture(tiny.model, folder) as recorder:
        shutil.rmtree(folder)
        claims._mine.clear()
        theirs = claim(folder, 0, "theirs", "stop")
        steps(tiny)
    assert recorder.dropped == {f"{folder} was removed, and is another run's now": 2}
    assert [path.name for path in folder.iterdir()] == [".attn-diag-rank0"]
    theirs.release()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["abc", "-1", "", "1.0", "²", "9" * 5000])
def test_a_rank_that_is_none(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match=f"{name} must be a whole number"):
        attn_diag.capture(nano_gpt().model, tmp_path).start()


# What is lost is counted, and said once.


def test_a_removed_folder_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny, folder = nano_gpt(), tmp_path / "run"
    with attn_diag.capture(tiny.model, folder) as recorder:
        steps(tiny)
        recorder.drain()
        shutil.rmtree(folder)
        steps(tiny, 20)
    assert list(recorder.dropped.values()) == [40]
    assert len(caplog.records) == 1
    assert f"cannot write into {folder}: No such file or directory" in caplog.text


class _DiskError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [(MemoryError(), "out of memory"), (torch.OutOfMemoryError("tried to allocate {} MiB"), "out of memory"),
     (RuntimeError("DefaultCPUAllocator: can't allocate memory: {} bytes"), "out of memory"),
     (_DiskError("of a kind of its own"), "_DiskError: of a kind of its own")],
    ids=["host", "device", "torch's host", "unknown"],
)  # fmt: skip
@pytest.mark.parametrize("where", ["forward", "backward", "hand over", "thread", "disk"])
def test_other_losses_are_counted_too(
    error: Exception, reason: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    tiny, place, calls = nano_gpt(), tmp_path / "run", iter(range(1000))

    def fails(*_: object, **__: object) -> Any:
        raise type(error)(*(str(text).format(next(calls)) for text in error.args))

    recorder = attn_diag.capture(tiny.model, place)
    if where == "forward":
        monkeypatch.setattr(recorder, "_part", SimpleNamespace(missing=fails, sequences=None))
    elif where == "backward":
        whole = AttentionCall.tensors
        monkeypatch.setattr(AttentionCall, "tensors", lambda call: fails() if call.dq is not None else whole(call))
    else:
        places = {"hand over": (Taken, "seal"), "thread": (Capture, "from_tensors"), "disk": (captures, "save_file")}
        monkeypatch.setattr(*places[where], fails)
    with recorder:
        steps(tiny, 10)
    assert recorder.dropped == {reason: 20}
    assert not recorder.written
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_reasons_that_are_new_each_time_are_not_kept_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny, numbers = nano_gpt(), iter(range(1000))

    def fails(*_: object) -> None:
        raise _DiskError(next(numbers))

    monkeypatch.setattr(captures, "save_file", fails)
    with attn_diag.capture(tiny.model, tmp_path) as recorder:
        steps(tiny, 30)
    assert sum(recorder.dropped.values()) == 60
    assert recorder.dropped["other reasons"] == 40
    assert len(caplog.records) == 21


def test_a_ring_whose_one_capture_cannot_be_written_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = nano_gpt()

    def fails(tensors: Any, path: str, metadata: Any) -> None:
        if "step000001_layer00" in path:
            raise MemoryError
        save_file(tensors, path, metadata)

    monkeypatch.setattr(captures, "save_file", fails)
    with attn_diag.capture(tiny.model, tmp_path, ring=3) as recorder:
        steps(tiny, 3)
        recorder.dump("asked")
    assert (len(recorder.written), recorder.dropped) == (5, {"out of memory": 1})


def in_threads(folder: Path, *work: Callable[[], None]) -> int:
    """How many calls of all that runs at a time are accounted for: written, each to a file of its own, or dropped."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with attn_diag.capture(None, folder, calls=None) as recorder:
            threads = [threading.Thread(target=one) for one in work]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(recorder.written) == len(list(folder.iterdir()))
    return len(recorder.written) + sum(recorder.dropped.values())


def test_calls_of_several_threads_are_all_accounted_for(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 8, 8)

    def attend() -> None:
        for _ in range(200):
            functional.scaled_dot_product_attention(x, x, x)

    assert in_threads(tmp_path, *[attend] * 4) == 800


def test_so_are_those_of_models_that_train_in_two_threads(tmp_path: Path) -> None:
    assert in_threads(tmp_path, *[partial(steps, nano_gpt(), 6) for _ in range(2)]) == 24


def test_a_call_that_comes_while_another_thread_ends_the_step_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each layer one call is open when the other model's optimizer steps, and another one comes meanwhile."""
    one, other = nano_gpt(), nano_gpt()
    with attn_diag.capture(None, tmp_path, calls=None) as recorder:
        steps(one)
        look, losses = Watch._look, [one.loss(one.model)]

        def interrupted(watch: Watch) -> None:
            monkeypatch.setattr(Watch, "_look", look)
            losses.append(one.loss(one.model))
            look(watch)

        monkeypatch.setattr(Watch, "_look", interrupted)
        steps(other)
    assert len(losses) == 2
    assert len(recorder.written) == len(list(tmp_path.iterdir())) == 8
    assert not recorder.dropped


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    """A new one has the umask's, which is never changed meanwhile: other threads' files would be open to everybody."""

    def write(name: str) -> None:
        Path(name).write_text("new")
        (tmp_path / "beside").touch()

    before = os.umask(0o027)
    try:
        for number, mode in enumerate((None, 0o600, 0o664, 0o444)):
            file = tmp_path / f"{number}.json"
            if mode is not None:
                file.touch()
                file.chmod(mode)
            write_atomically(file, write)
            assert file.read_text() == "new"
            assert file.stat().st_mode & 0o777 == (mode or 0o640)
    finally:
        os.umask(before)
    assert (tmp_path / "beside").stat().st_mode & 0o777 == 0o640


# Forks, kills, interrupts.

# Whoever forks while a lock is held leaves its child one that never opens.
FORKED = """
import multiprocessing, os, sys, time, attn_diag
from torch.utils.data import DataLoader
from attn_diag.watching.live import intercept, recorder as recording
from safetensors.torch import save_file
from tiny_models import nano_gpt, steps
tiny = nano_gpt()
monitor = attn_diag.Monitor(tiny.model, every=1, log=sys.argv[1] + "/log.jsonl")
recorder = attn_diag.capture(tiny.model, sys.argv[1] + "/run", ring=4).start()
broken = attn_diag.break_if(nonfinite=True, model=tiny.model, hook=print).start()
steps(tiny)
locks = (recording._lock, recorder._writer._lock, recorder._losses._lock, intercept._lock, recorder._watch._lock)
for how in ("exit", "raise", "train", "dump", "close"):
    for lock in locks:
        lock.acquire()
    child = os.fork()
    if child == 0:
        break
    for lock in locks:
        lock.release()
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    print(how, os.waitstatus_to_exitcode(ended[1]), flush=True)
else:
    assert len(list(DataLoader(range(8), num_workers=2))) == 8
    worker = multiprocessing.get_context("fork").Process(target=steps, args=(tiny,))
    worker.start()
    worker.join(20)
    assert worker.exitcode == 0
    steps(tiny)
    recorder.dump("asked")
    for one in (recorder, monitor, broken):
        one.close()
    print([path.name[:10] for path in recorder.written], flush=True)
    sys.exit()
if how == "raise":
    raise RuntimeError("of the child's")
if how == "train":
    steps(tiny, 2)
elif how == "dump":
    recorder.dump("of the child's")
    assert recorder.drain(1)
    attn_diag.last()
elif how == "close":
    for one in (recorder, monitor, broken):
        one.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_closes_what_watches(tmp_path: Path, programs: Programs) -> None:
    done = programs.run(FORKED, tmp_path)
    assert done.code == 0, done.err
    assert done.out.split("\n")[:5] == ["exit 0", "raise 1", "train 0", "dump 0", "close 0"], done.err
    assert done.out.split("\n")[5] == str(["step000000"] * 2 + ["step000001"] * 2), done.err
    assert len(list((tmp_path / "run").iterdir())) == 4
    # The log is the parent's alone.
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [0, 1]


BENCHMARK = """
import sys
sys.path.append(sys.argv[1])
import bench_recording
sys.argv = ["bench_recording", "--kills", "12", "--interrupts", "6", "--steps", "12", "--json", sys.argv[2]]
bench_recording.main()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_kills_interrupts_and_all_that(tmp_path: Path, programs: Programs) -> None:
    """A small run of the benchmark, whose thousand kills are in benchmarks/results."""
    benchmarks = Path(__file__).parent.parent / "benchmarks"
    done = programs.run(BENCHMARK, benchmarks, tmp_path / "result.json")
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["wrong in all"] == 0, done.out + done.err
    assert (result["killed"]["runs"], result["interrupted"]["runs"]) == (12, 6)
    assert min(result[name]["announced"] for name in ("killed", "interrupted", "disk full", "fork")) > 0
    assert result["disk full"]["dropped"] > 0
    assert result["folder removed"]["dropped"] > 0


def test_the_benchmark_sees_what_it_looks_for(tmp_path: Path) -> None:
    """A lost file, one of another run, half a file under a capture's name, another loss, and a taken folder."""
    from captured_runs import Told, Undisturbed, bits, judged

    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path) as recorder:
        steps(tiny, 2)
    names = [path.name for path in recorder.written]
    right = Undisturbed(["1.0", "0.5"], {path.name: bits(path) for path in recorder.written}, 1.0)
    told = Told(["1.0"], names)

    def wrong() -> dict[str, int]:
        return {name: n for name, n in judged(tmp_path, told, right).items() if n and name.startswith("wrong")}

    assert not wrong()
    shutil.copy(recorder.written[0], recorder.written[2])
    recorder.written[1].unlink()
    os.truncate(recorder.written[3], 1000)
    told.losses[0] = "1.5"
    assert wrong() == {
        "wrong: announced and lost": 1,
        "wrong: other bits in a file": 1,
        "wrong: unreadable": 1,
        "wrong: other loss than without capture": 1,
    }


def test_a_signal_handler_may_dump_while_the_loop_enqueues(tmp_path: Path) -> None:
    """As on a scheduler's warning before it ends a job; a lock that the loop holds must not be waited for."""
    tiny = nano_gpt()

    def warned(*_: object) -> None:
        recorder.dump("warned")
        recording.trigger("warned")

    with attn_diag.capture(tiny.model, tmp_path, ring=2) as recorder:
        before = signal.signal(signal.SIGALRM, warned)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            steps(tiny, 20)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert recorder.written
