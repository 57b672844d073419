"""``replay``: planted kernels are named by what they do, sound ones are not accused, and real captures are answered."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import foreign_kernels
import pytest
import torch
from builders import CAPTURES
from command_line import Run
from torch import Tensor

import attn_diag
from attn_diag import Capture, InputError, Replay
from attn_diag.captures.selection import Selection
from attn_diag.reference import AttentionHead, Masking, reference_head
from attn_diag.results.replay import ReplayedCapture, ReplayedKernel, ReplayedQuantity
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.libraries import LIBRARIES
from attn_diag.testing.regression.cases import case_of_capture
from attn_diag.testing.replaying.answer import answer
from attn_diag.testing.replaying.replay import kernels_named
from attn_diag.testing.target import Target, emulate

pytestmark = [
    pytest.mark.slow, pytest.mark.xdist_group("replay"), pytest.mark.usefixtures("forked_workers")
]  # fmt: skip

HERE = Path(__file__).parent
CPU = torch.device("cpu")
PLANTED = (
    "wrong_dq", "crashing", "crashing_backward", "exiting", "refusing", "raising", "uncausal", "nonfinite", "restless",
    "sound", "rows_first_alone", "overwriting", "transposed", "talkative",
)  # fmt: skip


def drawn(seed: int = 0, length: int = 160, dim: int = 32, heads: int = 2) -> Capture:
    """N(0,1) inputs and what a published recipe makes of them."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, heads, length, dim, generator=generator).bfloat16() for _ in range(4))
    capture = Capture.from_tensors({"q": q, "k": k, "v": v, "do": do}, causal="top-left")
    case = case_of_capture(capture)
    recipe = Target.of("fa2", dtype=torch.bfloat16, head_dim=dim, device=CPU).recipe
    assert recipe is not None
    return replace(capture, tensors={**capture.tensors, **emulate(recipe, case, CPU)})


@cache
def planted() -> ReplayedCapture:
    names = [f"replayed_kernels:{name}" for name in PLANTED]
    return attn_diag.replay(drawn(), against=names, device="cpu").captures[0]


def kernel(name: str) -> ReplayedKernel:
    return next(k for k in planted().kernels if k.name == f"replayed_kernels:{name}")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels' processes look for modules in the working directory."""
    monkeypatch.chdir(HERE)


@pytest.mark.parametrize(
    ("name", "outcome", "stage", "said"),
    [
        ("crashing", "crashed", "forward", "SIGSEGV"),
        ("crashing_backward", "crashed", "backward", "SIGSEGV"),
        ("exiting", "crashed", "forward", "exit code 7"),
        ("refusing", "refused", "forward", "not supported"),
        ("raising", "raised", "forward", "ZeroDivisionError"),
        ("uncausal", "other-function", None, "causal=none"),
        ("rows_first_alone", "ran", None, "as [B, T, H, D] in memory"),
        ("overwriting", "unusable", "forward", "it writes into its input q ("),
        ("transposed", "unusable", "forward", "must return o of shape"),
        ("talkative", "crashed", "forward", "SIGABRT: "),
    ],
)
def test_how_a_kernel_ended_is_named(name: str, outcome: str, stage: str | None, said: str) -> None:
    found = kernel(name)
    assert (found.outcome, found.stage) == (outcome, stage)
    assert said in (found.message or "")
    assert len(found.message or "") < 600
    assert found.name not in planted().culprits


def test_what_a_kernel_returned_before_it_died_is_judged() -> None:
    found = kernel("crashing_backward")
    assert {q.quantity: q.answer for q in found.quantities} == {"o": "good"}


def test_wrong_kernels_are_the_culprits_and_no_others() -> None:
    found = planted()
    assert found.cause == "kernel"
    assert set(found.culprits) == {"replayed_kernels:wrong_dq", "replayed_kernels:nonfinite"}
    assert {"captured", "replayed_kernels:sound"} <= set(found.right)
    assert kernel("wrong_dq").faults == ("dq",)
    assert "rows 64-159" in found.words
    assert "never written" in found.words


def test_a_capture_alone_is_no_replay() -> None:
    found = attn_diag.replay(drawn(), against=["replayed_kernels:nothing"], device="cpu")
    assert found.captures[0].cause == "undecided"
    assert found.report().startswith("UNDECIDED: nothing was compared: no other kernel could be run on it. As good as")
    assert "Not compared: replayed_kernels:nothing, which refused: cannot import" in found.captures[0].words


def test_a_kernel_that_is_not_there_is_unusable_input(run: Run, tmp_path: Path) -> None:
    drawn().save(tmp_path / "one.safetensors")
    given = ("replay", tmp_path / "one.safetensors", "--device", "cpu", "--against")
    done = run(*given, "replayed_kernels:nothing", "--fail-on", "undecided")
    assert (done.code, done.out.split(":")[0]) == (2, "UNDECIDED")
    beside = run(*given, "fa2,replayed_kernels:nothing")
    assert (beside.code, beside.out.split(":")[0]) == (0, "PASS")
    assert "Not compared: replayed_kernels:nothing" in " ".join(beside.out.split())


def test_other_bits_at_the_second_call_are_told() -> None:
    assert kernel("restless").deterministic is False
    assert kernel("sound").deterministic is True


def test_a_hanging_kernel_is_stopped_with_its_children() -> None:
    found = attn_diag.replay(drawn(), against=["replayed_kernels:hanging"], limit_s=10, device="cpu").captures[0]
    (_, hung) = found.kernels
    assert hung.outcome == "timed-out"
    assert "10 s" in (hung.message or "")
    assert found.cause == "undecided"
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"replayed_kernels:hanging" in _read(p)]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_captured_kernel_that_is_coarser_is_the_culprit() -> None:
    import replayed_kernels

    capture = drawn()
    leaves = [capture.tensors[n][...].clone().requires_grad_() for n in ("q", "k", "v")]
    # Scores up to some dozens, whose rounding to BF16 shows.
    leaves[0].data *= 8
    o = replayed_kernels.coarse(*leaves)
    dq, dk, dv = torch.autograd.grad(o, leaves, capture.tensors["do"][...])
    q, k, v = (x.detach() for x in leaves)
    found = attn_diag.replay(
        q, k, v, do=capture.tensors["do"][...], o=o.detach(), dq=dq, dk=dk, dv=dv, causal=True,
        against=["replayed_kernels:sound", "sdpa:flash"], device="cpu",
    ).captures[0]  # fmt: skip
    assert (found.cause, found.culprits) == ("kernel", ("captured",))
    assert "replayed_kernels:sound" in found.right


def test_a_capture_of_another_mask_is_its_metadata() -> None:
    capture = drawn()
    stated = replace(capture, metadata=replace(capture.metadata, causal="none"))
    found = attn_diag.replay(stated, against=["sdpa:math"], device="cpu").captures[0]
    assert (found.cause, found.culprits) == ("metadata", ())
    assert "sdpa:math" in found.words


@pytest.mark.parametrize("seed", range(2))
def test_sound_kernels_pass(seed: int) -> None:
    found = attn_diag.replay(drawn(seed, 96 + 37 * seed), against=["sdpa:flash", "sdpa:math", "fa2"], device="cpu")
    assert found.captures[0].cause == "pass", found.captures[0].words


@pytest.mark.parametrize(
    ("name", "cause", "culprits", "helps"),
    [
        ("gpt2_step731_L2H4", "head", (), "sdpa:math"),
        ("pair_T256", "head", (), "sdpa:math"),
        ("failing_step500_L2H7", "kernel", ("captured",), None),
        ("gqa_T200", "pass", (), None),
    ],
)
def test_real_captures(name: str, cause: str, culprits: tuple[str, ...], helps: str | None) -> None:
    found = attn_diag.replay(
        CAPTURES / f"{name}.safetensors", against=["sdpa:flash", "sdpa:math"], device="cpu"
    ).captures[0]
    assert (found.cause, found.culprits) == (cause, culprits), found.words
    assert (found.helps[0].name if found.helps else None) == helps
    if name == "gpt2_step731_L2H4":
        assert 40 < found.helps[0].times_less < 70
        assert found.dq_error == pytest.approx(0.0803785, rel=1e-3)


def verdict(name: str, *answers: tuple[str, str], captured: bool = False, labels: tuple[str, ...] = ()) -> Any:
    quantities = tuple(ReplayedQuantity(q, a, None, None, f"{q} is {a}") for q, a in answers)  # type: ignore[arg-type]
    return ReplayedKernel(
        name=name, captured=captured, version=None, backend="cpu", outcome="captured" if captured else "ran",
        stage=None, message=None, labels=labels or ("clean",),  # type: ignore[arg-type]
        quantities=quantities, recipe=None, agreement=None, schedule=None, deterministic=None, forward_ms=None,
        backward_ms=None, finding=None,
    )  # fmt: skip


def test_the_answer_of_all_overflowing_kernels_is_the_head() -> None:
    broken = [verdict(n, ("o", "nonfinite"), labels=("nonfinite",)) for n in "ab"]
    assert answer(drawn(), broken).cause == "head"
    assert answer(drawn(), [*broken, verdict("c", ("o", "good"))]).cause == "kernel"
    assert answer(drawn(), broken[:1]).cause == "kernel"


def test_a_coarse_kernel_that_nobody_named_does_not_answer_for_a_sound_captured_one() -> None:
    fragile = verdict("captured", ("o", "good"), ("dq", "good"), captured=True, labels=("ill_conditioned",))
    clean = verdict("captured", ("o", "good"), ("dq", "good"), captured=True)
    coarse, wrong = verdict("a", ("dq", "lossy"), labels=("lossy",)), verdict("a", ("dq", "wrong"), labels=("wrong",))
    for captured, cause in ((fragile, "head"), (clean, "pass")):
        found = answer(drawn(), [captured, coarse])
        assert (found.cause, found.culprits) == (cause, ("a",))
        assert "Not as good: a: dQ is too coarse" in found.words
        assert answer(drawn(), [captured, coarse], {"a"}).cause == "kernel"
        assert answer(drawn(), [captured, wrong]).cause == "kernel"
    assert answer(drawn(), [verdict("b", ("dq", "good")), coarse]).cause == "kernel"
    lossy = verdict("captured", ("dq", "lossy"), captured=True, labels=("lossy",))
    assert answer(drawn(), [lossy, coarse]).cause == "kernel"


def test_the_answer_of_undecided_captures_is_undecided() -> None:
    open_ = verdict("captured", ("o", "undecided"), captured=True, labels=("undecided",))
    assert answer(drawn(), [open_, verdict("a", ("o", "good"))]).cause == "undecided"
    assert answer(drawn(), []).cause == "undecided"


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-left": {"causal": "top-left"},
    "bottom-right": {"causal": "bottom-right"},
    "window": {"causal": "bottom-right", "window": (9, 0)},
    "window both ways": {"window": (9, 4)},
    "softcap": {"softcap": 2.0},
    "bool mask": {"mask": "bool"},
    "additive mask": {"mask": "additive", "causal": "top-left"},
    "chosen rows": {"causal": "top-left", "positions": True},
}


def asked(options: dict[str, Any], heads: int = 4, keys: int = 56) -> CaseInputs:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, heads, 40, 16, generator=generator).bfloat16()
    k, v = (torch.randn(2, 2, keys, 16, generator=generator).bfloat16() for _ in range(2))
    given = {"causal": "none", **options}
    if "mask" in given:
        mask = torch.randn(2, 1, 40, keys, generator=generator)
        given["mask"] = mask > -1 if given["mask"] == "bool" else mask.bfloat16()
    if "positions" in given:
        given["positions"] = torch.arange(40) + 7
    return CaseInputs("case", q, k, v, None, 0.3, **given)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["sdpa:math", "sdpa:flash", "flex_attention", "fa2"])
def test_kernels_compute_what_is_asked_or_refuse(name: str, options: dict[str, Any]) -> None:
    case = asked(options)
    target = Target.of(name, dtype=torch.bfloat16, head_dim=16, device=CPU)
    if name.startswith("sdpa") and "softcap" in options:
        with pytest.raises(InputError, match=r"SDPA.* has no softcap"):
            target.call(case)
        return
    require_right(case, target.call(case).outputs["o"])


def require_right(case: CaseInputs, o: Tensor) -> None:
    for b in range(2):
        for h in range(case.q.shape[1]):
            kv = h // (case.q.shape[1] // case.k.shape[1])
            masking = Masking(case.causal, case.window, case.head_mask(b, h, CPU), case.positions)
            q, k, v = (x.double() for x in (case.q[b, h], case.k[b, kv], case.v[b, kv]))
            true = reference_head(AttentionHead(q, k, v, None, case.scale, masking, case.softcap)).out
            torch.testing.assert_close(o[b, h].double(), true, rtol=0.02, atol=0.02)


def fake(name: str, **functions: Any) -> dict[str, ModuleType]:
    """A module of that name, and its packages."""
    found = {}
    for end in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        found[part] = ModuleType(part)
    vars(found[name]).update(functions)
    return found


def bthd(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: str, left: int, right: int, softcap: float) -> Any:
    o, lse, _, _ = foreign_kernels.attend(q, k, v, scale, causal, left, right, softcap)
    return o, lse


def _flash_2(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    del dropout_p, deterministic
    assert return_attn_probs
    assert alibi_slopes is None
    right = "bottom-right" if causal else "none"
    return *bthd(q, k, v, softmax_scale or 0.0, right, *window_size, softcap), None


def _flash_4(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None), softcap: float = 0.0,
) -> Any:  # fmt: skip
    left, right = (-1 if n is None else n for n in window_size)
    return bthd(q, k, v, softmax_scale or 0.0, "bottom-right" if causal else "none", left, right, softcap)


def _sage(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str, is_causal: bool, sm_scale: float) -> Tensor:
    assert tensor_layout == "HND"
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o: Tensor = bthd(q, k, v, sm_scale, "bottom-right" if is_causal else "none", -1, -1, 0.0)[0]
    return o.transpose(1, 2)


def _flashinfer(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, logits_soft_cap: float | None) -> Any:
    mask = "bottom-right" if causal else "none"
    return bthd(q[None], k[None], v[None], sm_scale, mask, -1, -1, logits_soft_cap or 0.0)[0][0]


MODULES = {
    "flash_attn_2": fake("flash_attn", flash_attn_func=_flash_2),
    "flash_attn_3": fake("flash_attn_interface", flash_attn_func=_flash_4),
    "flash_attn_4": fake("flash_attn.cute", flash_attn_func=_flash_4),
    "sageattention": fake("sageattention", sageattn=_sage),
    "flashinfer": fake("flashinfer", single_prefill_with_kv_cache=_flashinfer),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", MODULES)
def test_libraries_are_called_as_they_are_documented(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, there in MODULES[name].items():
        monkeypatch.setitem(sys.modules, module, there)
    case = asked(options)
    target = Target.of(name, dtype=torch.bfloat16, head_dim=16, device=CPU)
    known = {"window", "softcap"} if name.startswith("flash_attn") else {"softcap"} if name == "flashinfer" else set()
    if options.get("causal") == "top-left" or options.keys() - known - {"causal"}:
        with pytest.raises(InputError, match=r"has no|bottom-right"):
            target.call(case)
        return
    require_right(case, target.call(case).outputs["o"])


def test_names_of_kernels() -> None:
    names, not_here = kernels_named(None, CPU)
    assert {"sdpa:flash", "sdpa:math", "flex_attention", "flex_attention:compiled", "fa2"} <= set(names)
    told = {entry.partition(" (")[0] for entry in not_here}
    assert told | set(names) >= set(LIBRARIES) - {"sdpa"}
    assert kernels_named(["installed", "a:b"], CPU)[0][-1] == "a:b"
    for unknown in ("nothing", "sdpa:nothing"):
        with pytest.raises(InputError, match="no kernel"):
            kernels_named([unknown], CPU)
    with pytest.raises(InputError, match="top of a module"):
        kernels_named([lambda *tensors: tensors[0]], CPU)
    with pytest.raises(InputError, match="at least one"):
        kernels_named([], CPU)


def test_the_command(run: Run, tmp_path: Path) -> None:
    capture, page, document = tmp_path / "c.safetensors", tmp_path / "page.html", tmp_path / "found.json"
    drawn().save(capture)
    names = "replayed_kernels:wrong_dq,replayed_kernels:crashing"
    done = run(
        "replay", capture, "--against", names, "--against", "sdpa:math", "--fail-on", "kernel", "--device", "cpu",
        "--json", document, "--html", page,
    )  # fmt: skip
    assert done.code == 1
    assert done.out.startswith("KERNEL: replayed_kernels:wrong_dq: dQ is wrong in both heads")
    assert "crashed in its forward" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    header = next(line.split() for line in done.out.splitlines() if line.lstrip().startswith("kernel "))
    assert header == ["kernel", "verdict", "O", "LSE", "dQ", "dK", "dV"]
    assert "wrong: dQ" in done.out
    found = Replay.from_json(document.read_text())
    assert found.failed == ("replayed_kernels:crashing",)
    assert json.loads(found.to_json()) == json.loads(document.read_text())
    assert "replayed_kernels:wrong_dq" in page.read_text()
    assert run("replay", capture, "--against", "sdpa:math", "--fail-on", "nonsense").code == 2
    assert run("replay", capture, "--against", "nonsense").code == 2


def test_a_head_that_is_not_there_is_refused_before_any_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a kernel was run")

    monkeypatch.setattr("attn_diag.testing.replaying.replay.run_apart", never)
    with pytest.raises(InputError, match=r"no head 9; the capture has 0 to 1"):
        attn_diag.replay(drawn(), selection=Selection(heads=frozenset({9})), device="cpu")
