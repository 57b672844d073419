"""selftest: its checks fail where a number is wrong; profiles are kept, found again and named in reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import rounded_inputs, some
from command_line import Run
from torch import Tensor

import attn_diag
from attn_diag import Capture, HardwareProfile, InputError
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures import hardware as store
from attn_diag.captures.hardware import profile_path, read_profile, save_profile
from attn_diag.head.machine import describe_tool
from attn_diag.kernels.accumulation import HOPPER, tensor_core_matmul
from attn_diag.kernels.formats import Mode, Rounding, round_to
from attn_diag.reference import AttentionHead, FloatFormat, reference_head, round_nearest_even
from attn_diag.results.hardware import CastProfile, Exp2Profile, SumProfile, summary_of
from attn_diag.results.selftest import Installation, InstallationCheck
from attn_diag.testing import selftest as installation
from attn_diag.testing.selftest import attention_checks, function_checks, rounding_checks

GPU, TORCH, TRITON = "Example GPU 9000 (80 GB)", "2.11.0+cu128", "3.6.0"


def profile() -> HardwareProfile:
    sums = SumProfile("bf16", "wgmma", 16, 25, "toward-zero", "toward-zero", "kept", True, 131_072, 0, True)
    odd = replace(
        sums, operands="fp16", fraction_bits=None, alignment=None, mismatches=None, fits=False, notes=("it is odd",)
    )
    exp2 = Exp2Profile(10**6, 1.08, -0.25, 0.011, 8.2e-10, 0.1, True, True, "kept")
    return HardwareProfile(
        gpu=GPU, backend="sm90", torch=TORCH, triton=TRITON, measured="2026-11-21", seconds=3.25, sums=(sums, odd),
        exp2=exp2, multiply_subnormals="kept",
        casts=(CastProfile("bf16", 900, "nearest-even", "kept", "infinite"), CastProfile("e4m3", 90, None, None, None)),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "attn-diag"


def failed(checks: Iterator[InstallationCheck]) -> set[str]:
    return {check.name for check in checks if not check.passed}


class TestInstallation:
    def test_this_one_passes_in_seconds(self) -> None:
        found = attn_diag.selftest()
        assert found.passed, [check for check in found.checks if not check.passed]
        assert len(found.checks) == 16
        assert all(check.cases > 0 for check in found.checks)
        assert found.seconds < 60

    @pytest.mark.parametrize("mode", [Mode.TOWARD_ZERO, Mode.UP, Mode.DOWN])
    def test_guard_other_roundings_fail(self, mode: Mode) -> None:
        def rounded(x: Tensor, rounding: Rounding | None) -> Tensor:
            return round_to(x, replace(some(rounding), mode=mode))

        names = {f"float64 to {fmt}, nearest-even" for fmt in ("bf16", "fp16", "e4m3", "e5m2")}
        assert failed(rounding_checks(site=rounded)) == names

    def test_guard_rounding_twice_fails(self) -> None:
        def twice(x: Tensor, fmt: FloatFormat) -> Tensor:
            return round_nearest_even(x.float().double(), fmt)

        # E4M3's and E5M2's ties lie far from fp32's, too: what is next to a tie in float64 becomes one.
        assert len(failed(rounding_checks(reference=twice))) == 4

    def test_guard_lost_signs_of_zeros_fail(self) -> None:
        assert len(failed(rounding_checks(reference=lambda x, fmt: round_nearest_even(x, fmt) + 0.0))) == 4

    @pytest.mark.parametrize("error", [2.0**-50, float("nan")])
    def test_guard_inaccurate_functions_fail(self, error: float) -> None:
        off = function_checks(exp=lambda x: torch.exp(x) * (1 + error), log=lambda x: torch.log(x) * (1 + error))
        assert failed(off) == {"float64 exp, largest error", "float64 log, largest error"}

    def test_guard_an_fp32_reference_fails(self) -> None:
        def single(head: AttentionHead) -> Any:
            found = reference_head(head)
            outputs = {name: getattr(found, name).float() for name in ("out", "lse", "delta", "dq")}
            return SimpleNamespace(**outputs, dsink=None)

        assert len(failed(attention_checks(single))) == 4

    def test_guard_nearest_sums_fail(self) -> None:
        core = replace(HOPPER, result=Mode.NEAREST_EVEN)
        found = failed(installation.sum_checks(matmul=lambda a, b: tensor_core_matmul(a, b, core=core)))
        assert found == {"tensor-core sums that an H200 returned"}
        single = failed(installation.sum_checks(exact=lambda a, b: (a.float() @ b.float()).double() * (1 + 2.0**-30)))
        assert single == {"float64 products of BF16 matrices"}


class TestCommand:
    def test_it_prints_figures_and_writes_json(self, run: Run, tmp_path: Path) -> None:
        target = tmp_path / "selftest.json"
        code, out, err = run("selftest", "--json", target)
        assert code == 0, err
        assert "all 16 checks passed" in out
        assert "float64 to bf16" in out
        written = json.loads(target.read_text())
        assert (written["schema"], written["schema_version"], written["passed"]) == ("attn-diag-selftest", 1, True)
        assert Installation.from_json(target.read_text()).passed

    def test_a_failed_check_is_exit_1(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = InstallationCheck("a wrong number", 3, "ulp", 2, 10)
        monkeypatch.setattr(installation, "GROUPS", (lambda: iter([wrong]),))
        code, out, _ = run("selftest")
        assert code == 1
        assert "1 of 1 checks failed" in out
        assert "FAILED" in out

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_hardware_without_a_gpu_is_exit_2(self, run: Run) -> None:
        code, _, err = run("selftest", "--hardware")
        assert code == 2
        assert "selftest --hardware needs a CUDA GPU" in err
        with pytest.raises(InputError, match="leave --hardware out to check this installation"):
            attn_diag.selftest(hardware=True)

    def test_it_measures_keeps_and_reports(self, run: Run, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        monkeypatch.setattr("attn_diag.testing.gpu.measure_hardware", profile)
        code, out, err = run("selftest", "--hardware")
        assert code == 0, err
        assert "kept in" in out + err
        assert [path.parent for path in cache.iterdir()] == [cache]
        assert read_profile(GPU, TORCH, TRITON) == profile()


class TestProfile:
    def test_json_round_trip(self) -> None:
        text = profile().to_json()
        assert HardwareProfile.from_json(text) == profile()
        assert json.loads(text)["schema"] == "attn-diag-hardware-profile"
        assert "sums" in HardwareProfile.json_schema()["properties"]

    def test_report_says_what_does_not_fit(self) -> None:
        text = profile().report(width=100)
        assert max(map(len, text.splitlines())) <= 100
        said = ("BF16, wgmma", "0 of 131072", "does not fit", "FP16, wgmma: it is odd", "exactly 1", "+0.011 ulp")
        assert [words for words in said if words not in text] == []

    def test_summary_and_note(self) -> None:
        found = profile()
        assert found.summary == (
            "BF16 sums (wgmma) of 16 products cut at 25 bits; FP16 sums (wgmma) fit no known model; exp2 max 1.1 ulp "
            "(measured 2026-11-21)"
        )
        assert summary_of(found.note()) == found.summary
        assert len(found.note()) < 800
        for broken in ("", "{", "[]", "{}", '{"summary": 3}'):
            assert summary_of(broken) is None


class TestStore:
    def test_nothing_stored_is_nothing(self, cache: Path) -> None:
        assert read_profile(GPU, TORCH, TRITON) is None
        assert not cache.exists(), "reading makes no folder"

    def test_kept_by_gpu_and_versions(self, cache: Path) -> None:
        path = save_profile(profile())
        assert path.parent == cache
        assert path.name == "hardware-Example_GPU_9000_80_GB_-2.11.0+cu128-3.6.0.json"
        assert read_profile(GPU, TORCH, TRITON) == profile()
        assert read_profile(GPU, TORCH, "3.7.1") is None
        assert read_profile("Example GPU 9000", TORCH, TRITON) is None

    def test_a_file_under_another_name_is_not_believed(self) -> None:
        profile_path("Other", TORCH, TRITON).parent.mkdir()
        save_profile(profile()).rename(profile_path("Other", TORCH, TRITON))
        assert read_profile("Other", TORCH, TRITON) is None

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"gpu": "x"}', "\0"])
    def test_a_broken_file_is_ignored_with_a_warning(self, content: str) -> None:
        path = save_profile(profile())
        path.write_text(content)
        store._parsed.cache_clear()
        with pytest.warns(UserWarning, match="not a hardware profile and is ignored"):
            assert read_profile(GPU, TORCH, TRITON) is None
        save_profile(profile())
        assert read_profile(GPU, TORCH, TRITON) == profile()

    @pytest.mark.parametrize("value", ["", "relative/folder"])
    def test_without_a_cache_home(self, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert profile_path("a", "b", "c") == tmp_path / ".cache" / "attn-diag" / "hardware-a-b-c.json"

    def test_a_folder_that_cannot_be_made(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(InputError, match="cannot write"):
            save_profile(profile())
        assert read_profile(GPU, TORCH, TRITON) is None
        monkeypatch.setattr("attn_diag.testing.gpu.measure_hardware", profile)
        with pytest.warns(UserWarning, match="measured but not kept: cannot write"):
            assert attn_diag.selftest(hardware=True) == profile()


@pytest.fixture
def on_example_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device is the example GPU with a stored profile."""
    save_profile(profile())
    for module in ("attn_diag.captures.capture", "attn_diag.head.machine"):
        monkeypatch.setattr(f"{module}.stored_profile", lambda _: read_profile(GPU, TORCH, TRITON))


class TestProvenance:
    def test_a_cpu_has_none(self) -> None:
        save_profile(profile())
        assert describe_tool(torch.device("cpu")).hardware is None
        assert Capture.from_tensors(rounded_inputs()).metadata.hardware is None

    @pytest.mark.usefixtures("on_example_gpu")
    def test_reports_and_captures_name_it(self, tmp_path: Path) -> None:
        assert describe_tool(torch.device("cpu")).hardware == profile().summary
        saved = Capture.from_tensors(rounded_inputs(), causal="top-left", device=GPU).save(tmp_path / "x.safetensors")
        loaded = attn_diag.load(saved)
        assert loaded.metadata.hardware == profile().note()
        found = inspect_captures([loaded], device="cpu")
        text = " ".join(found.report(width=400).split())
        assert f"captured on {GPU} ({profile().summary})" in text
        assert text.count(profile().summary) == 2, "where it was captured, and where it was inspected"

    @pytest.mark.usefixtures("on_example_gpu")
    def test_what_is_given_wins(self) -> None:
        assert Capture.from_tensors(rounded_inputs(), hardware=None).metadata.hardware is None
        assert Capture.from_tensors(rounded_inputs(), hardware="{}").metadata.hardware == "{}"


@pytest.mark.gpu
def test_the_profile_of_this_gpu(cache: Path) -> None:
    """What an H200 was measured to do; elsewhere only that the profile is whole."""
    found = attn_diag.selftest(hardware=True)
    assert len(list(cache.iterdir())) == 1
    assert {s.operands for s in found.sums} == {"bf16", "fp16"}
    if "H200" not in found.gpu:
        return
    assert {s.instruction for s in found.sums} == {"wgmma", "mma.sync"}
    for s in found.sums:
        assert (s.block, s.fraction_bits, s.alignment, s.result) == (16, 25, "toward-zero", "toward-zero"), s
        assert (s.products_exact, s.subnormals, s.mismatches, s.fits) == (True, "kept", 0, True), s
        assert s.sums >= 100_000
    assert found.exp2.exact_at_zero
    assert found.exp2.max_error_ulp < 4
    assert {c.rounding for c in found.casts} == {"nearest-even"}
    on_gpu = {name: t.cuda() for name, t in rounded_inputs().items()}
    assert Capture.from_tensors(on_gpu).metadata.hardware == found.note()


class TestKernels:
    """The launchers, where Triton runs (fp32 is right in the interpreter too)."""

    @pytest.fixture
    def kernels(self) -> Any:
        from attn_diag.kernels import triton_probes

        return triton_probes

    @pytest.mark.parametrize("tile", [0, 1])
    @pytest.mark.parametrize("shape", [(1, 1, 1), (5, 33, 70), (65, 16, 17)], ids=str)
    def test_dot_pads_to_tiles(self, kernels: Any, device: str, tile: int, shape: tuple[int, int, int]) -> None:
        m, k, n = shape
        generator = torch.Generator().manual_seed(0)
        sizes = ((m, k), (k, n), (m, n))
        a, b, c = (torch.randint(-8, 9, size, generator=generator).float().to(device) for size in sizes)
        got, instruction = kernels.dot(a, b, c, tile)
        assert torch.equal(got, a @ b + c), "small integers: every order is exact"
        assert not torch.equal(got, a @ b - c)
        assert (instruction == "interpreter") == (device == "cpu")

    @pytest.mark.parametrize("n", [1, 1024, 2500])
    def test_elementwise(self, kernels: Any, device: str, n: int) -> None:
        x = torch.linspace(-20, 0, n, device=device)
        exact = torch.exp2(x.double())
        assert ((kernels.exp2(x).double() / exact - 1).abs() <= 4 * 2.0**-23).all()
        assert torch.equal(kernels.multiply(x, x - 1), x * (x - 1))
        assert torch.equal(kernels.cast(x, torch.float16), x.half())

    def test_profiles_run_on_the_kernels(self, kernels: Any, device: str) -> None:
        from attn_diag.testing.gpu import profile_exp2, profile_multiply

        found = profile_exp2(kernels.exp2, torch.device(device), per_binade=2**8)
        assert found.exact_at_zero
        assert found.max_error_ulp < 4
        assert profile_multiply(kernels.multiply, torch.device(device)) is not None

    def test_interpreted_16_bit_operands_are_refused(self, kernels: Any, device: str) -> None:
        if device != "cpu":
            pytest.skip("compiled here")
        with pytest.raises(TypeError, match="right for fp32 alone"):
            kernels.dot(*(torch.ones(16, 16).bfloat16() for _ in range(2)), torch.ones(16, 16))
