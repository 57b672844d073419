"""``invariance``: planted dependences are named with their arrangement, clean kernels pass, and the faces agree."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command_line import Run
from invariance_kernels import CLEAN, PLANTED, batch_split, changed_input, plain, plain_causal, repeated, unwritten_tile
from torch import Tensor

import attn_diag
from attn_diag.errors import InputError
from attn_diag.reference import format_of
from attn_diag.results.invariance import Invariance
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.invariance.arrangements import ARRANGEMENTS
from attn_diag.testing.invariance.distance import difference
from attn_diag.testing.libraries import LIBRARIES

pytestmark = pytest.mark.slow

SHAPE = (2, 4, 45, 16)
# Another order of adding reaches few elements.
LONGER = (2, 4, 77, 32)
# Compiling takes seconds.
QUICK = [name for name in ARRANGEMENTS if name != "compiled"]
BF16 = format_of(torch.bfloat16)


def run(kernel: object, causal: str = "none", **options: object) -> Invariance:
    given: dict[str, object] = {"shape": SHAPE, "only": QUICK, "schedules": False, "device": "cpu"} | options
    found: Invariance = attn_diag.invariance(kernel, causal=causal, **given)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_kernel_depends_on_is_named_first(name: str) -> None:
    kernel, causal, arrangement = PLANTED[name]
    found = run(kernel, causal, shape=LONGER, name=name)
    assert found.outcome == "fail"
    assert found.failed[0] == arrangement
    assert found.report().startswith(f"FAIL {name}: {arrangement}, ")


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("seed", range(3))
def test_clean_kernels_pass(name: str, seed: int) -> None:
    kernel, causal = CLEAN[name]
    found = run(kernel, causal, seed=seed, dtype=(torch.bfloat16, torch.float16)[seed % 2])
    assert found.passed, found.report()
    assert found.failed == ()
    ran = {p.arrangement for p in found.paths if p.status != "not-run"}
    assert {"run-to-run", "batch-size", "gqa", "padding", "other-items"} <= ran
    assert ("future-token" in ran) == (causal != "none")


def test_an_input_changed_in_place_is_told_first() -> None:
    found = run(changed_input, shape=LONGER)
    assert not found.passed
    assert found.headline.startswith("it writes into its input q (100 % of its ")


def test_a_kernel_whose_own_call_is_wrong_is_no_pass() -> None:
    def half_dq(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q / 2 + (q / 2).detach(), k, v)

    found = run(half_dq)
    assert not found.passed
    assert found.failed == ()
    assert found.headline.startswith("the call itself: dQ is ")


def test_what_the_same_call_changes_is_blamed_on_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)

    def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = torch.rand(v.shape, generator=generator) > 0.1
        return plain(q, k, v * kept / 0.9)

    found = run(dropping)
    assert found.failed == ("run-to-run",)
    assert "it gives something else for the same call" in found.headline
    assert "rounding alone" not in found.headline
    assert {p.status for p in found.paths if p.arrangement == "batch-size"} == {"unsteady"}


@pytest.mark.parametrize("seed", range(3))
def test_what_happens_once_is_blamed_on_no_arrangement(seed: int) -> None:
    calls = 0

    def flaky(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(q, k, v) * (1.25 if calls in (8, 25 + 3 * seed) else 1)

    found = run(flaky, seed=seed)
    assert found.failed == ("run-to-run",)
    assert found.headline.startswith("run-to-run, once in other-calls (its outputs kept during another): it gives ")


def test_a_first_call_that_is_another_one_is_told() -> None:
    calls = 0

    def warming(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(q, k, v) * (1.5 if calls == 1 else 1)

    found = run(warming)
    assert found.failed == ("run-to-run",)
    assert found.headline.startswith("run-to-run, the first call beside those after it, which agree: it gives ")
    # The others are compared with a later call, and nothing is excused.
    assert "unsteady" not in {p.status for p in found.paths}


def test_a_mask_that_is_wrong_where_a_tile_begins_is_seen() -> None:
    def next_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        hidden[63::64, 64::64] &= ~torch.eye(*hidden[63::64, 64::64].shape, dtype=torch.bool)
        scores = (q.float() @ repeated(q, k).float().mT * q.shape[3] ** -0.5).masked_fill(hidden, -torch.inf)
        o: Tensor = (scores.softmax(-1) @ repeated(q, v).float()).to(q.dtype)
        return o

    found = run(next_tile, "top-left", shape=(2, 4, 140, 16))
    assert found.failed[0] == "future-token"
    assert "tokens from 64 on: it lets later tokens change earlier rows" in found.headline


def test_what_one_head_is_off_by_is_no_noise_of_the_others() -> None:
    def one_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = torch.ones(q.shape[1], 1, 1, dtype=q.dtype)
        factor[-1] = 1.015625
        return plain(q * factor, k, v)

    found = run(one_scale, shape=LONGER)
    assert found.failed[0] == "head-order"
    assert "rounding alone" not in found.headline


def test_gradients_are_compared_as_the_forward_is() -> None:
    found = run(PLANTED["unsteady-gradient"][0])
    moved = {d.quantity for p in found.paths if p.arrangement == "run-to-run" for d in p.differences if d.differing}
    assert moved == {"dq"}
    assert run(PLANTED["unsteady-gradient"][0], backward=False).passed
    # What the same call changes is told once, not of every arrangement.
    assert found.failed == ("run-to-run",)


def test_a_kernel_without_gradients_is_compared_forward_unless_they_are_demanded() -> None:
    def forward_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q.detach(), k.detach(), v.detach())

    found = run(forward_alone)
    assert found.passed
    assert {d.quantity for p in found.paths for d in p.differences} == {"o"}
    assert "Gradients were not compared" in found.notes[0]
    with pytest.raises(InputError, match="not differentiable"):
        run(forward_alone, backward=True)


def test_gradients_that_autograd_does_not_reach_are_said_in_a_sentence() -> None:
    def query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        del k, v
        return q * 1

    with pytest.raises(InputError, match=r"^query gives no dk, dv by autograd \(the call has B=2 "):
        run(query, name="query")


def test_rounding_may_be_allowed_by_name_but_no_fault() -> None:
    assert not run(batch_split, shape=LONGER).passed
    allowed = run(batch_split, shape=LONGER, allow=["batch-size"])
    assert allowed.passed
    assert "batch-size" in allowed.headline
    assert not run(unwritten_tile, allow=list(ARRANGEMENTS)).passed


def test_the_schedules_of_both_paths_are_named() -> None:
    found = run(batch_split, only=["batch-size"], shape=(2, 2, 256, 32), schedules=True, backward=False)
    paths = {p.path: p for p in found.paths}
    assert found.failed == ("batch-size",)
    assert paths["1 item"].status == "bits"
    assert "splits of 64 keys" in str(paths["1 item"].schedule)
    assert "splits" not in str(found.schedule)
    assert paths["4 items"].status == "same"


def test_a_compiled_call_is_compared() -> None:
    found = run(plain, only=["compiled"], shape=(2, 2, 45, 16))
    assert [p.status for p in found.paths] in (["same"], ["rounding"]), found.report()


def test_a_call_that_ends_the_gpus_context_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unaligned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.data_ptr() % 16:
            raise RuntimeError("CUDA error: misaligned address\nand more")
        return plain(q, k, v)

    monkeypatch.setattr("attn_diag.testing.invariance.calls._usable", lambda _: False)
    found = run(unaligned)
    assert found.headline.startswith("strides, off alignment: it ends the GPU's context (")
    assert "CUDA error: misaligned address" in found.headline
    later = [p for p in found.paths if p.arrangement == "accumulation"]
    assert [(p.status, p.words) for p in later] == [("not-run", "after strides the GPU could not be used")]
    assert any("--only" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_compiled_flex_attention_is_never_the_uncompiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_diag.testing.libraries._COMPILATIONS", 1)
    call, normal = LIBRARIES["flex_attention:compiled"].call, torch.randn(3, 1, 1, 16, 16).bfloat16()
    options = CaseInputs("case", normal[0], normal[1], normal[2], None, 0.25, "none")
    call(*normal, options)
    with pytest.raises(Exception, match="fullgraph"):
        call(*(x[:, :, :15] for x in normal), options)


def test_another_function_is_told_how_to_ask(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    small = ("--shape", "2,2,45,16", "--device", "cpu", "--only", "run-to-run,batch-size")
    code, out, _ = run("invariance", "invariance_kernels:plain_causal", *small)
    assert code == 2
    assert "--causal top-left" in out
    page, document = tmp_path / "page.html", tmp_path / "found.json"
    told = ("--json", document, "--html", page)
    code, out, _ = run("invariance", "invariance_kernels:plain_causal", "--causal", "top-left", *small, *told)
    assert code == 0
    assert out.startswith("OK invariance_kernels:plain_causal: the same bits in 2 arrangements")
    assert Invariance.from_json(document.read_text()).passed
    assert json.loads(document.read_text())["schema"] == "attn-diag-invariance"
    assert "batch-size" in page.read_text()
    code, out, _ = run("invariance", "invariance_kernels:atomics", *small)
    assert code == 1
    assert out.startswith("FAIL invariance_kernels:atomics: run-to-run, ")
    for option in (("--only", "nothing"), ("--allow", "nothing"), ("--dtype", "fp32"), ("--shape", "1,2")):
        assert run("invariance", "sdpa", *option)[0] == 2


def test_what_is_refused_is_said_and_is_no_failure() -> None:
    def equal_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] != k.shape[1]:
            raise ValueError("no GQA here")
        return plain_causal(q, k, v)

    found = run(equal_heads, "top-left")
    assert found.passed
    assert {p.words for p in found.paths if p.arrangement == "gqa"} == {
        "equal_heads raised ValueError on q, k, v [2, 4, 45, 16] torch.bfloat16: no GQA here"
    }


def test_nothing_compared_is_no_pass() -> None:
    found = run(plain, only=["future-token"], backward=False)
    assert not found.passed
    assert found.headline == "nothing was compared: every row sees every key"


def test_memory_modes_are_put_back() -> None:
    run(plain, only=["uninitialised"])
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_the_limits_of_a_difference(times: float) -> None:
    """An element, a row and all of it, each at half and at twice its limit: 8, 8 and 2.5 deviations of a difference."""
    first, variance = torch.ones(1, 2, 8, 16, dtype=torch.float64), torch.full((1, 2, 8, 16), 1e-4).double()
    deviation = math.sqrt(2e-4)
    for part, limit in (((0, 1, 3, 5), 8.0), ((0, 1, 3), 8.0), ((0,), 2.5)):
        second = first.clone()
        second[part] += times * limit * deviation
        found = difference("o", first, second, variance, variance, BF16)
        assert found.of_limit is not None
        # All at twice the limit of all are an element's at 5 of 8.
        assert math.isclose(found.of_limit, times, rel_tol=1e-6)
    second[0, 1, 6, 2] = torch.nan
    broken = difference("o", first, second, variance, variance, BF16)
    assert (broken.nonfinite, broken.first) == (1, (0, 1, 6))
    same = difference("o", second, second, variance, variance, BF16)
    assert (same.differing, same.nonfinite, same.first) == (0, 0, None)


def test_a_librarys_splits_are_asked_for_by_its_own_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 and 4 take num_splits; SDPA takes none."""
    asked: list[int] = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, num_splits: int = 1, **_: object) -> Tensor:
        asked.append(num_splits)
        return plain(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    for name in ("flash_attn", "flash_attn.cute"):
        module = ModuleType(name)
        vars(module)["flash_attn_func"] = flash_attn_func
        monkeypatch.setitem(sys.modules, name, module)
    found = run("flash_attn_4", only=["splits"])
    assert found.passed, found.report()
    assert asked == [1, 1, 2, 4]
    (path,) = run("flex_attention", only=["run-to-run", "splits"], backward=False).paths[-1:]
    assert (path.status, path.words) == ("not-run", "no option num_splits")


def test_what_goes_wrong_now_and_then_is_found_with_enough_repeats() -> None:
    """A run says how seldom a fault may be: 1 - 0.05^(1/n) of the calls where n were compared."""
    calls = 0

    def flaky(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(q, k, v) * (1.25 if calls % 20 == 0 else 1)

    def of_repeats(count: int) -> Invariance:
        return attn_diag.invariance(flaky, shape=(1, 1, 16, 16), repeats=count, only=["run-to-run"], backward=False)

    short = of_repeats(2)
    assert short.passed
    assert "The whole O of 3 calls was compared" in short.notes[-1]
    assert "in 63 % of a kernel's calls shows in 95 % of such runs" in short.notes[-1]
    assert "(--repeats 100: 2.9 %)" in short.notes[-1]
    long = of_repeats(58)
    assert long.failed == ("run-to-run",)
    # One that is found is enough.
    assert len(long.paths) < 20
    with pytest.raises(InputError, match="repeats must be a positive integer"):
        of_repeats(0)
