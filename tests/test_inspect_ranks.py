"""Captures shared out over processes: what is shared how, and the same diagnosis as from one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import Run
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
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


def test_details_are_one_processs() -> None:
    with pytest.raises(InputError, match="details are made by one process"):
        inspect_captures([drawn(0, 32)], details=1, ranks=Ranks(0, 2))


def test_two_processes_find_what_one_finds(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    for seed, length in enumerate((32, 64, 48)):
        drawn(seed, length).save(folder / f"step{seed}.safetensors")
    (folder / "broken.safetensors").write_bytes(b"nothing")
    alone = run("inspect", folder, "--json", tmp_path / "alone.json")
    options = ["--json", str(tmp_path / "shared.json")]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "attn_diag", "inspect", str(folder)]
    done = subprocess.run([sys.executable, *launcher, *options], capture_output=True, text=True, check=False)
    assert (tmp_path / "shared.json").read_bytes() == (tmp_path / "alone.json").read_bytes()
    assert done.stdout == alone.out
    assert done.stderr.count("broken.safetensors: truncated or damaged") == 1
    # torchrun's own, for whatever code a process ends with; that was 2, as of one process.
    assert (done.returncode, alone.code) == (1, 2)
    assert "exitcode  : 2" in done.stderr
