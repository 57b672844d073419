"""The first lines of the commands that look at one capture or compare two: what was found, where, and what to run next.

``probe`` and ``check`` have theirs in test_first_lines.py, ``inspect`` in test_opening.py and test_opening_steps.py.
Snapshots hold what is said of planted captures at 80 and 120 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import planted_folders
import pytest
from command_line import Run
from planted_folders import coarse_scores, healthy, truncating, unmasked
from rich.cells import cell_len
from snapshots import require_unchanged

from attn_diag import Capture

pytestmark = pytest.mark.slow

PLANTED: dict[str, Callable[[], Capture]] = {
    "sound": lambda: planted_folders.capture(healthy, layer=3, step=300),
    "coarse": lambda: planted_folders.capture(coarse_scores, layer=3, step=300),
    "biased": lambda: planted_folders.capture(truncating, layer=7, step=400),
    "fragile": lambda: planted_folders.capture(healthy, layer=2, step=700, v_mean=60.0),
    "unmasked": lambda: planted_folders.capture(unmasked, layer=6, step=100),
    "emulated": lambda: planted_folders.capture(healthy, layer=0, step=100, outputs=()),
    "two": lambda: planted_folders.two_observations()[0],
}
SCRIPT = """
import torch
import torch.nn.functional as F
x, w = torch.randn(1, 2, 16, 16), torch.nn.Linear(16, 16)
with torch.autocast("cpu", dtype=torch.bfloat16):
    q, k, v = w(x), w(x), w(x)
    F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q.float(), k.float(), v.float()) if WIDE else None
"""
# A command, the words that its first line begins with, and the next one that it tells; None: nothing is left to do.
SAID: dict[str, tuple[str, str, str | None]] = {
    "attribute-sound": ("attribute sound.safetensors --head 0", "NORMAL sound", "what-if sound.safetensors --head 0"),
    "attribute-coarse": ("attribute coarse.safetensors", "COARSE coarse", "what-if coarse.safetensors --head 0"),
    "attribute-biased": ("attribute biased.safetensors --head 1", "UNKNOWN biased", "what-if biased.safetensors"),
    "attribute-two": (
        "attribute two.safetensors --observation mine --head 1", "COARSE two",
        "what-if two.safetensors --head 1 --observation mine",
    ),
    "attribute-emulated": ("attribute emulated.safetensors", "NORMAL emulated", "what-if emulated.safetensors"),
    "what-if-coarse": (
        "what-if coarse.safetensors --head 1 --only fp32-scores", "coarse.safetensors: L3H1: fp32-scores leaves dQ",
        "attribute coarse.safetensors --head 1",
    ),
    "what-if-sound": (
        "what-if sound.safetensors --head 1 --only tile-64", "sound.safetensors: L3H1: nothing tried takes away",
        "attribute sound.safetensors --head 1",
    ),
    "what-if-fragile": (
        "what-if fragile.safetensors --head 3 --only fp32-o-delta --only delta-from-dp", "fragile.safetensors: L2H3: "
        "delta-from-dp leaves dQ", "attribute fragile.safetensors --head 3",
    ),
    "identify-sound": ("identify sound.safetensors", "OK sound.safetensors, observed, L3H0: made as", None),
    "identify-coarse": ("identify coarse.safetensors", "OK coarse", "inspect coarse.safetensors"),
    "identify-biased": ("identify biased.safetensors", "FAIL biased", "inspect biased.safetensors"),
    "identify-unmasked": (
        "identify unmasked.safetensors", "FAIL unmasked.safetensors, observed, L6H0: wrong mask",
        "identify unmasked.safetensors --causal none",
    ),
    "microscope-coarse": (
        "microscope coarse.safetensors --head 1", "coarse.safetensors: L3H1, O[",
        "attribute coarse.safetensors --head 1",
    ),
    "figures-sound": ("figures sound.safetensors", "OK L3H", None),
    "dtypes-wide": ("dtypes wide.py", "OK wide.py: autocast makes q, k and v bfloat16 inside 1 attention call", None),
    "dtypes-sound": ("dtypes sound.py", "OK sound.py: q, k and v agree in all of 1 attention call", None),
}  # fmt: skip
DIFFS = {
    "diff-worse": ("sound.safetensors coarse.safetensors", "FAIL: layer 3, all 4 heads, step 300: now lossy (O ",
                   "inspect coarse.safetensors --head"),
    "diff-better": ("coarse.safetensors sound.safetensors", "BETTER: layer 3, all 4 heads, step 300: no longer lossy",
                    None),
    "diff-same": ("sound.safetensors sound.safetensors", "OK: Nothing changed", None),
}  # fmt: skip


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    for name, made in PLANTED.items():
        made().save(folder / f"{name}.safetensors")
    (folder / "wide.py").write_text(SCRIPT.replace("WIDE", "True"))
    (folder / "sound.py").write_text(SCRIPT.replace("WIDE", "False"))
    return folder


def first_lines(text: str) -> list[str]:
    """Those above the first empty line; of ``diff`` above the two sides."""
    lines = text.splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.strip() or line.startswith("  A "))]


@pytest.mark.parametrize("name", [*SAID, *DIFFS])
def test_first_lines(name: str, planted: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(planted)
    if name in DIFFS:
        files, said, following = DIFFS[name]
        for file in files.split():
            saved = Path(file).with_suffix(".json")
            if not saved.exists():
                assert run("inspect", file, "--device", "cpu", "--json", saved).code == 0
        files = files.replace(".safetensors", ".json")
        command = f"diff {files}"
    else:
        command, said, following = SAID[name]
    device = [] if command.startswith(("dtypes", "diff")) else ["--device", "cpu"]
    for width in (80, 120):
        done = run(*command.split(), *device, COLUMNS=str(width))
        lines = first_lines(done.out)
        assert max(map(cell_len, done.out.splitlines())) <= width
        flat = " ".join(" ".join(lines).split())
        assert flat.startswith(said), f"{done.err}{flat}"
        assert (f"Next: attn-diag {following}" in flat) if following else "Next: " not in flat, flat
        require_unchanged(f"{name}-{width}", "\n".join(lines) + "\n")


def test_env_says_ok(run: Run) -> None:
    assert run("env").out.startswith("OK attn-diag ")


def test_what_is_told_next_runs(planted: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file with two observations too, where the command must name the one that it is about."""
    monkeypatch.chdir(planted)
    command = SAID["attribute-two"][2]
    assert command is not None
    done = run(*command.split(), "--only", "fp32-scores", "--device", "cpu")
    assert done.code == 0, done.err
    assert "two.safetensors: L4H1: fp32-scores leaves dQ" in " ".join(done.out.split())
