"""Captures shared out over processes: what is shared how, and the same diagnosis as from one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from command_line import Run
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.analyses.inspection.forked import processes_worth
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.analyses.inspection.ranks import Ranks
from attn_diag.errors import InputError
from attn_diag.head.machine import pick_devices

pytestmark = pytest.mark.slow


def drawn(seed: int, length: int) -> attn_diag.Capture:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, 2, length, 16, generator=generator).bfloat16() for _ in range(4))
    o = scaled_dot_product_attention(q, k, v, is_causal=True)
    return attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": o, "do": do}, causal="top-left", step=seed)


def test_everything_is_done_once_and_the_dear_ones_first() -> None:
    costs = [1.0, 9.0, 2.0, 8.0, 3.0, 7.0]
    shares = [Ranks(rank, 3).share(costs) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == list(range(6))
    assert [sum(costs[i] for i in share) for share in shares] == [10.0, 10.0, 10.0]
    assert Ranks(3, 4).share([1.0]) == []


def test_gpus_of_processes_without_a_capture_help_with_the_dearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [d.index for d in Ranks(0, 4).idle_devices([1.0, 5.0])] == [2, 3]
    assert Ranks(1, 4).idle_devices([1.0, 5.0]) == Ranks(0, 4).idle_devices([1.0] * 4) == []
    # Another machine's, and GPUs that this process does not see.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Ranks(0, 4).idle_devices([1.0]) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Ranks(0, 8).idle_devices([1.0]) == []


def test_gpus_of_one_kind_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index == 1 else (9, 0))
    assert [d.index for d in pick_devices("cuda:all")] == [0, 2]
    assert [d.index for d in pick_devices("cuda:2, cuda:0")] == [2, 0]
    for wrong, words in (
        ("cuda:0,cuda:1", "of one kind, got sm_90, sm_80"),
        ("cuda:0,cuda:0", "once"),
        ("cuda:3", "here: cuda:0"),
    ):
        with pytest.raises(InputError, match=words):
            pick_devices(wrong)


def test_a_process_of_several_has_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(InputError, match="leave out --device, or torchrun"):
        inspect_captures([drawn(0, 32)], device="cuda:all", ranks=Ranks(0, 2))


def test_two_processes_find_what_one_finds(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    for seed, length in enumerate((32, 64, 48)):
        drawn(seed, length).save(folder / f"step{seed}.safetensors")
    (folder / "broken.safetensors").write_bytes(b"nothing")
    alone = run("inspect", folder, "--json", tmp_path / "alone.json", "--html", tmp_path / "alone.html")
    options = ["--json", str(tmp_path / "shared.json"), "--html", str(tmp_path / "shared.html")]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "attn_diag", "inspect", str(folder)]
    done = subprocess.run([sys.executable, *launcher, *options], capture_output=True, text=True, check=False)
    for kind in ("json", "html"):
        assert (tmp_path / f"shared.{kind}").read_bytes() == (tmp_path / f"alone.{kind}").read_bytes()
    assert done.stdout == alone.out
    assert done.stderr.count("broken.safetensors: truncated or damaged") == 1
    # torchrun's own, for whatever code a process ends with; that was 2, as of one process.
    assert (done.returncode, alone.code) == (1, 2)
    assert "exitcode  : 2" in done.stderr


def many(folder: Path) -> Path:
    """Two captures of 64 heads each, one with a head of NaN."""
    generator = torch.Generator().manual_seed(7)
    for layer in range(2):
        q, k, v, do = (torch.randn(1, 64, 16, 16, generator=generator).bfloat16() for _ in range(4))
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
        o[0, 5] = torch.nan if layer else o[0, 5]
        tensors = {"q": q, "k": k, "v": v, "o": o, "do": do}
        attn_diag.Capture.from_tensors(tensors, causal="top-left", layer=layer).save(
            folder / f"layer{layer}.safetensors"
        )
    return folder


# The command, which marks in a file how often it forks.
COUNTED = """
import os
from attn_diag.cli import main
fork = os.fork
def counted():
    with open(os.environ["FORKS"], "a") as file:
        file.write("x")
    return fork()
os.fork = counted
main()
"""


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", COUNTED, "inspect", *map(str, arguments)]
    environment = {"FORKS": os.devnull, **environment}
    return subprocess.run(line, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked there")
def test_forked_processes_find_and_write_what_one_does(tmp_path: Path) -> None:
    (folder := tmp_path / "captures").mkdir()
    many(folder)
    # A head that only some have: what cannot be used is said once, and by exit code 2.
    drawn(0, 32).save(folder / "small.safetensors")
    found: dict[str, tuple[str, str, int, list[bytes]]] = {}
    for threads in "12":
        written = [tmp_path / f"{threads}.{kind}" for kind in ("json", "html", "csv")]
        options = [part for file in written for part in (f"--{file.suffix[1:]}", file)]
        forks = tmp_path / f"forks{threads}"
        done = command(folder, "--head", "0-40", *options, OMP_NUM_THREADS=threads, FORKS=str(forks))
        assert forks.exists() == (threads == "2")
        found[threads] = done.stdout, done.stderr, done.returncode, [file.read_bytes() for file in written]
    assert found["1"] == found["2"]
    assert found["2"][1].count("small.safetensors") == 1
    assert found["2"][2] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked there")
def test_a_table_that_cannot_be_written_costs_no_page_whoever_writes_it(tmp_path: Path) -> None:
    (folder := tmp_path / "captures").mkdir()
    page = tmp_path / "page.html"
    done = command(many(folder), "--html", page, "--csv", "/dev/full", OMP_NUM_THREADS="2")
    assert (done.returncode, done.stderr.count("cannot write /dev/full: No space left on device")) == (2, 1)
    assert page.read_bytes().rstrip().endswith(b"</html>")
    assert {path.name for path in tmp_path.iterdir()} == {"captures", "page.html"}


FAILURES = """
import os, pathlib, signal, sys, tempfile, threading, time, torch
from attn_diag.analyses.inspection.forked import forked_ranks
from attn_diag.captures.files import write_atomically
from attn_diag.errors import InputError
torch.set_num_threads(2)

def tried(work):
    try:
        with forked_ranks(3) as ranks:
            return work(ranks)
    except Exception as error:
        notes = getattr(error, "__notes__", [""])
        return f"{type(error).__name__}: {error} {notes[0].count('in ' + work.__name__)}"

def unlike(ranks):
    class Local(Exception):
        pass
    if ranks.rank == 2:
        raise Local("of no module")
    return ranks.gather([])

class Two(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def of_two(ranks):
    if ranks.rank == 1:
        raise Two("is not", "loaded")
    return ranks.gather([])

def raising(ranks):
    if ranks.rank == 1:
        raise InputError("of the second")
    return ranks.gather([])

def killed(ranks):
    if ranks.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return ranks.gather([])

def cut_off(ranks):
    if ranks.rank == 2:
        os.write(ranks.exchange.args[0].fileno(), bytes([0, 0, 0, 100, 1]))
        os.kill(os.getpid(), signal.SIGKILL)
    return ranks.gather([])

folder = pathlib.Path(tempfile.mkdtemp())

def first_fails(ranks):
    if ranks.rank:
        write_atomically(folder / str(ranks.rank), lambda _: signal.pause())
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    raise InputError("of the first")

print(tried(lambda ranks: (ranks.gather([ranks.rank, torch.get_num_threads()]), ranks.gather([-ranks.rank]))))
for work in (raising, unlike, of_two, killed, cut_off, first_fails):
    print(tried(work))
print(list(folder.iterdir()))
folder.rmdir()
fork, forks = os.fork, []
def refused():
    if forks:
        raise BlockingIOError("too many processes")
    forks.append(1)
    return fork()
os.fork = refused
print(tried(lambda ranks: ranks.gather([ranks.count, torch.get_num_threads()])))
print(torch.get_num_threads(), threading.active_count())
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no process is left")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked there")
def test_a_forked_process_that_fails_is_told_of_and_none_is_left() -> None:
    done = subprocess.run([sys.executable, "-c", FAILURES], capture_output=True, text=True, check=True, timeout=100)
    together, *failed, written, alone, left, none = done.stdout.splitlines()
    assert together == "([[0, 1], [1, 1], [2, 1]], [[0], [-1], [-2]])"
    # With where it was.
    assert failed[:2] == ["InputError: of the second 1", "RuntimeError: Local: of no module 1"]
    assert failed[2] == "RuntimeError: Two: is not 1"
    for ended in failed[3:5]:
        assert ended.startswith("InputError: a process that inspected some of the captures was ended from outside")
    assert failed[5:] == ["InputError: of the first 0"]
    assert written == "[]"
    assert alone == "[[1, 2]]"
    assert (left, none) == ("2 1", "no process is left")
    assert done.stderr == ""


ORPHANS = """
import os, signal
from attn_diag.analyses.inspection.forked import forked_ranks
with forked_ranks(3) as ranks:
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked there")
def test_forked_processes_end_with_their_parent() -> None:
    # Else they would hold the pipes of the output, for whose end this waits.
    done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


LEFT_OUT = """
from attn_diag.analyses.inspection.capture_job import CaptureJob
from attn_diag.analyses.inspection.forked import forked_ranks
from attn_diag.analyses.inspection.inspect import inspect_captures
from test_inspect_ranks import drawn
captures = [drawn(seed, 16 + 8 * seed) for seed in range(5)]
begin = CaptureJob.begin
def failing(job):
    if job.capture.metadata.step != 2:
        raise RuntimeError(f"of step {job.capture.metadata.step}")
    begin(job)
CaptureJob.begin = failing
for count in (1, 3):
    said = []
    with forked_ranks(count) as ranks:
        found = inspect_captures(captures, skip=said.append, ranks=ranks).summary.unreadable
    assert list(found) == list(map(str, said))
    print(*(text.split("of step ")[1][0] for text in found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked there")
def test_what_is_left_out_is_listed_in_the_order_of_the_captures() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OUT], capture_output=True, text=True, check=True, timeout=100,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout == "0 1 3 4\n0 1 3 4\n"


def test_processes_are_forked_only_where_that_is_safe_and_worth_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def heads(count: int, length: int = 32) -> attn_diag.Capture:
        q = torch.zeros(1, count, length, 16, dtype=torch.bfloat16)
        return attn_diag.Capture.from_tensors({"q": q, "k": q, "v": q}, causal="none")

    assert processes_worth([heads(64)] * 5, "auto") == 4
    assert processes_worth([heads(64)] * 3, "cpu") == 3
    assert processes_worth([heads(16)] * 9, "auto") == 2
    for few in ([heads(512)], [heads(4)] * 20, [heads(64), heads(64, 2**17)]):
        assert processes_worth(few, "auto") == 1
    assert processes_worth([heads(64)] * 5, "cuda") == 1
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert processes_worth([heads(64)] * 5, "auto") == 1
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes_worth([heads(64)] * 5, "auto") == 1
