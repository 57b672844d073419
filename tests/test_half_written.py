"""A process killed while it writes: every complete file is read, and the broken one is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import rounded_inputs, some
from command_line import Run

from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import find_captures, half_written
from attn_diag.errors import InputError

# Writes half of a capture's bytes, says so, and waits to be killed; {writer} is how.
WRITER = """
import sys, time
from pathlib import Path
from attn_diag.captures.files import write_atomically

source, target = map(Path, sys.argv[1:])

def slowly(name):
    data = source.read_bytes()
    with open(name, "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        print("half", flush=True)
        time.sleep(600)
        file.write(data[len(data) // 2 :])

{writer}
"""
ATOMIC, IN_PLACE = "write_atomically(target, slowly)", "slowly(target)"


CAPTURE = Capture.from_tensors(rounded_inputs(causal=False), causal="none", scale=0.25)


def killed_while_writing(source: Path, target: Path, writer: str = ATOMIC) -> None:
    command = [sys.executable, "-c", WRITER.format(writer=writer), str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert some(child.stdout).readline() == "half\n"
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


def test_killed_writer_is_named_and_the_rest_is_read(tmp_path: Path, run: Run) -> None:
    first = CAPTURE.save(tmp_path / "step000001_layer02.safetensors")
    second = CAPTURE.save(tmp_path / "step000002_layer02.safetensors")
    assert run("inspect", tmp_path, "--json", "-")[0] == 0
    killed_while_writing(first, tmp_path / "step000003_layer02.safetensors")
    (left,) = tmp_path.glob(".*")
    assert left.name.startswith(".step000003_layer02.safetensors.")
    assert left.suffix == ".partial"
    code, out, _ = run("inspect", tmp_path, "--json", "-")
    document = json.loads(out)
    assert code == 2
    assert [c["source"] for c in document["captures"]] == [str(first), str(second)]
    (named,) = document["summary"]["unreadable"]
    assert named.startswith(f"{left}: step000003_layer02.safetensors was being written when the process died")
    assert named.endswith("this capture is lost, the other files are complete")
    assert "step000003_layer02.safetensors was being" in " ".join(run("inspect", tmp_path).out.split())


def test_a_writer_that_is_not_atomic_leaves_a_damaged_capture(tmp_path: Path, run: Run) -> None:
    """What the atomic writer prevents: half a file under the final name."""
    first = CAPTURE.save(tmp_path / "a.safetensors")
    killed_while_writing(first, tmp_path / "b.safetensors", IN_PLACE)
    assert not half_written([tmp_path])
    code, out, _ = run("inspect", tmp_path, "--json", "-")
    document = json.loads(out)
    assert (code, len(document["captures"])) == (2, 1)
    assert document["summary"]["unreadable"][0].startswith(f"{tmp_path / 'b.safetensors'}: truncated or damaged")


def test_completed_later_is_no_longer_missed(tmp_path: Path) -> None:
    first = CAPTURE.save(tmp_path / "a.safetensors")
    killed_while_writing(first, tmp_path / "b.safetensors")
    assert len(half_written([tmp_path, tmp_path])) == 1
    (left,) = tmp_path.glob(".*")
    complete = CAPTURE.save(tmp_path / "b.safetensors")
    assert not half_written([tmp_path])
    # An older complete file does not hide the loss of a newer one.
    long_ago = time.time() - 60
    os.utime(complete, (long_ago, long_ago))
    assert len(half_written([tmp_path])) == 1
    left.unlink()
    assert not half_written([tmp_path])


@pytest.mark.parametrize(
    "name", [".report.json.x1y2.partial", ".a.safetensors", "a.safetensors.x1.partial", ".x.partial"]
)
def test_other_hidden_files_are_no_lost_captures(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert not half_written([tmp_path])
    (tmp_path / ".a.safetensors.x1y2.partial").touch()
    assert len(half_written([tmp_path])) == 1


def test_a_folder_with_nothing_but_a_half_written_capture(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / ".a.safetensors.x1y2.partial").touch()
    with pytest.raises(InputError, match=r"no captures in this directory .* a.safetensors was being written when"):
        find_captures([tmp_path])
