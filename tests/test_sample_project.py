"""A project outside this repository: the wheel, a baseline, a broken kernel, and what its failure says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KERNEL = '''
import torch

def attention(q, k, v):
    """softmax(Q K^T / sqrt(D)) V in BF16: fp32 scores and sums, P cast for PV, one cast of O."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    l = p.sum(-1, keepdim=True)
    o = p.bfloat16().float() @ v.float() / l
    return o.bfloat16()
'''
TEST = """
import pytest
from kernel import attention

@pytest.mark.attn_diag_baseline
@pytest.mark.parametrize("head_dim", [16, 32])
def test_attention(attn_diag, head_dim):
    attn_diag.check_attention(attention, cases=["normal"], head_dim=head_dim, backward=False, device="cpu")
"""
BROKEN = {
    "the last cast of O truncates": (
        16,
        ("o.bfloat16()", "(o.contiguous().view(torch.int32) & -65536).view(torch.float32).bfloat16()"),
    ),
    "the row sum l in BF16": (32, ("keepdim=True)\n    o =", "keepdim=True).bfloat16().float()\n    o =")),
}


class Project:
    """A folder with a kernel, its test and a virtual environment that holds the wheel."""

    def __init__(self, root: Path, wheel: Path) -> None:
        self.root, self.environment = root / "project", root / "venv"
        venv.create(self.environment, symlinks=os.name != "nt")
        scripts = self.environment / ("Scripts" if os.name == "nt" else "bin")
        self.python = scripts / f"python{'.exe' if os.name == 'nt' else ''}"
        # The wheel's dependencies are this environment's; as plain folders, whose own .pth files (such as an editable
        # install of ours) do not count.
        ours = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
        (self._site_packages() / "dependencies.pth").write_text("\n".join(ours))
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
        self.root.mkdir()
        (self.root / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
        (self.root / "kernel.py").write_text(KERNEL)
        (self.root / "test_kernel.py").write_text(TEST)

    def _site_packages(self) -> Path:
        ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        return Path(subprocess.check_output([str(self.python), "-c", ask], text=True).strip())

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """pytest in the project, with one thread, as the machine is shared with this test's session."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV_", "PYTHON"))}
        environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        command = [str(self.python), "-m", "pytest", "-p", "no:cacheprovider", "--basetemp=../tmp", *arguments]
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, check=False, timeout=300
        )


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("sample"), wheel)


def failures(output: str) -> list[list[str]]:
    """The texts of the failed tests, line by line."""
    body = output.partition("= FAILURES =")[2].partition("= short test summary")[0]
    body = body.rstrip("= \n")
    return [part.strip().splitlines() for part in re.split(r"\n_{3,} .* _{3,}\n", body)[1:]]


def test_a_kernel_team_saves_breaks_and_sees(project: Project) -> None:
    done = project.run("-k", "16")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "this test has no baseline yet" in done.stdout
    assert "create it   pytest --attn-diag-update 'test_kernel.py::test_attention[16]'" in done.stdout
    assert str(project.environment) in subprocess.check_output(
        [str(project.python), "-c", "import attn_diag; print(attn_diag.__file__)"], text=True, cwd=project.root
    ), "not the wheel's package"

    done = project.run("--attn-diag-update")
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted((project.root / "attn_diag_baselines" / "test_kernel").iterdir())
    assert [re.sub("-[0-9a-f]{8}", "", f.name) for f in files] == ["test_attention-16.json", "test_attention-32.json"]
    assert all(f"created {f.relative_to(project.root)}" in done.stdout for f in files)

    done = project.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    before = [f.read_bytes() for f in files]

    # Broken in one way for one head dimension, in another for the other.
    broken = KERNEL
    for dim, (old, new) in BROKEN.values():
        assert old in KERNEL
        broken += KERNEL.replace(old, new).replace("def attention", f"def attention_{dim}")
    broken += "\ndef attention(q, k, v):\n    return globals()[f'attention_{q.shape[-1]}'](q, k, v)\n"
    (project.root / "kernel.py").write_text(broken)
    done = project.run()
    assert done.returncode == 1, done.stdout + done.stderr
    for suspect, (dim, _), text in zip(BROKEN, BROKEN.values(), failures(done.stdout), strict=True):
        assert re.match(r"attn-diag: attention fails 1 of 1 case \(cpu, level 0.01\)", text[0])
        assert [line.startswith(f"suspect     {suspect}") for line in text].count(True) == 1, "\n".join(text)
        assert len(text) <= 25
        assert re.search(r"normal: .* batch item \d+, head 0, row \d+", " ".join(" ".join(text).split()))
        assert text[-1] == f"accept      pytest --attn-diag-update 'test_kernel.py::test_attention[{dim}]'"
        closer = re.fullmatch(r"look closer attn-diag inspect (\S+\.safetensors)", text[-2])
        assert closer is not None, text[-2]
        assert Path(closer[1]).is_file()
        # Only commands are wider, to be copied whole.
        assert all(len(line) <= 80 for line in text[:-2]), "\n".join(text)
    assert before == [f.read_bytes() for f in files]
