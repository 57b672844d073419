"""``hunt``: planted faults are found, named by what they take and shrunk; sound kernels are not accused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hunted_kernels
import pytest
import torch
from builders import CAPTURES
from command_line import Programs, Run
from torch import Tensor

import attn_diag
from attn_diag import Hunt, InputError
from attn_diag.captures.loading import load
from attn_diag.results.hunt import Fault, Variant
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.hunting.axes import FIELDS, at, covering, law, level_of, levels
from attn_diag.testing.hunting.hunt import _sentence, drawn_capture
from attn_diag.testing.hunting.inputs import CHANGES, Material
from attn_diag.testing.hunting.judging import CaseJudge, CaseVerdict
from attn_diag.testing.hunting.layouts import LAYOUTS, fitted, parse, placed, restricted
from attn_diag.testing.hunting.run import Runner
from attn_diag.testing.hunting.script import LYING, kernel_source
from attn_diag.testing.hunting.search import Rule, Search
from attn_diag.testing.hunting.shrinking import shrink
from attn_diag.testing.libraries import LIBRARIES
from attn_diag.testing.replaying.processes import Ran
from attn_diag.testing.replaying.worker import ended
from attn_diag.testing.stated import Stated
from attn_diag.testing.target import Target

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

HERE = Path(__file__).parent
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels' processes look for modules in the working directory."""
    monkeypatch.chdir(HERE)


@dataclass
class InProcess:
    """In place of worker processes: a planted kernel that knows the call's mask."""

    change: hunted_kernels.Change
    causal: str | None = None
    """A mask of its own."""
    count = 1
    limit_s = 60.0

    def run(self, case: CaseInputs, layout: str, **_: Any) -> Ran:
        def fn(q: Tensor, k: Tensor, v: Tensor, options: CaseInputs) -> Tensor:
            return hunted_kernels.attend(q, k, v, self.change, self.causal or options.causal, options.scale)

        target = Target("planted", "cpu", CPU, fn=fn)
        try:
            return Ran("ran", outputs=target.call(case, gradients=True, place=partial(placed, layout)).outputs)
        except Exception as error:
            return Ran(ended(error), "forward", str(error))


def searched(name: str, *axes: str, fixed: bool = False, causal: str | None = None, **first: Any) -> Search:
    material = Material.of(drawn_capture(Stated.of(first.pop("mask", "none"), None, 64)))
    pool = cast("Any", InProcess(hunted_kernels.PLANTED[name], causal))
    runner = Runner(material, pool, CaseJudge("planted", fixed, CPU), time.monotonic() + 3000, 1000)
    search = Search(runner, axes, cuda=False, fixed=fixed, seed=0)
    search.run(replace(material.as_captured, **{"rows": 64, "keys": 64, **first}))
    return search


def smallest(search: Search, rule: Rule) -> Variant:
    output, fault = next(iter(rule.outputs.items()))
    return shrink(search.runner, rule.example, output, search.runner.verdict(rule.example).faults.get(output, fault))


FAULTS: dict[str, tuple[tuple[str, ...], dict[str, Fault], dict[str, str], dict[str, Any]]] = {
    # name: axes that are changed; outputs; by axis the law, or the only levels; what the smallest case is
    "odd sizes": (
        ("head size",), {"dq": "wrong"}, {"head size": "D no multiple of 16"}, {"head_dim": 8, "key_heads": 1},
    ),
    "group of three": (("group",), {"dk": "wrong", "dv": "wrong"}, {"group": "3"}, {"group": 3, "key_heads": 1}),
    "one row over": (("length",), {"o": "wrong"}, {"length": "Tq mod 64 = 1"}, {"rows": 1, "head_dim": 8}),
    "strided k": (("layout",), {"dk": "wrong"}, {"layout": "*"}, {"layout": "* of k"}),
    "hot row": (("values",), {"o": "nonfinite"}, {"values": "hot row"}, {"values": "hot row"}),
    "repeated keys": (("values",), {"dv": "wrong"}, {"values": "repeated keys, equal keys"}, {"keys": 2}),
    "three together": (
        ("head size", "group", "mask"),
        {"dv": "wrong"},
        {"head size": "96", "group": "group ≥ 2", "mask": "top-left, bottom-right"},
        {"head_dim": 96, "group": 2, "key_heads": 1},
    ),
    "second item": (("batch",), {"dq": "wrong"}, {"batch": "B ≥ 2"}, {"batch": 2, "key_heads": 1}),
    "last key": (("length",), {"dv": "wrong"}, {"length": "Tk no multiple of 32"}, {"keys": 1, "rows": 1}),
    "fp16 and large": (
        ("head size", "dtype"), {"dk": "nonfinite"}, {"head size": "D ≥ 136", "dtype": "fp16"},
        {"head_dim": 136, "dtype": "fp16"},
    ),
    "head mapping": (("group", "key heads"), {"o": "wrong"}, {"group": "group ≥ 2"}, {"key_heads": 2, "group": 2}),
    "coarse": (("head size",), {"dq": "lossy"}, {"head size": "D ≥ 136"}, {"head_dim": 136}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_named_and_shrunk(name: str) -> None:
    axes, outputs, conditions, small = FAULTS[name]
    search = searched(name, *axes)
    found = [rule for rule in search.rules if outputs.keys() <= rule.outputs.keys()]
    assert len(found) == 1, [(r.outputs, r.conditions()) for r in search.rules]
    if name not in ("head mapping", "hot row", "last key", "one row over"):
        # What is wrong with O is so with gradients.
        assert found[0].outputs == outputs
        assert len(search.rules) == 1
    assert {c.axis for c in found[0].conditions()} == set(conditions)
    for condition in found[0].conditions():
        wanted = conditions[condition.axis]
        assert wanted in ("*", condition.law, ", ".join(condition.failing)), condition
    case = smallest(search, found[0])
    for field, value in small.items():
        seen = getattr(case, field)
        assert seen.endswith(value[1:]) if str(value).startswith("*") else seen == value, case


@pytest.mark.slow
def test_what_the_first_case_has_is_a_condition_where_a_fault_needs_it() -> None:
    search = searched("grouped at odd sizes", "head size", "group", group=4, key_heads=1)
    found = {tuple(sorted(rule.outputs)): {c.axis: c for c in rule.conditions()} for rule in search.rules}
    assert found.keys() == {("dq",), ("dk", "dv")}
    assert found["dq",].keys() == {"head size"}
    assert found["dk", "dv"]["group"].law == "group ≥ 2"
    assert {c["head size"].law for c in found.values()} == {"D no multiple of 16"}


@pytest.mark.parametrize(
    "axes", [("head size",), ("length",), ("values", "dtype"), ("layout", "batch", "key heads"), ("group", "mask")]
)
def test_a_sound_kernel_is_not_accused(axes: tuple[str, ...]) -> None:
    search = searched("sound", *axes)
    assert not search.rules, [(r.outputs, r.example.words) for r in search.rules]
    assert all(verdict.passed for verdict in search.runner.known.values())
    assert search.not_run == 0


def test_the_cheapest_lengths_are_run_first_equal_or_not() -> None:
    """A hunt whose time ends early has seen some where rows and keys differ."""
    run: list[Variant] = []

    def many(variants: list[Variant], _: Any) -> list[None]:
        run.extend(variants)
        return [None] * len(variants)

    runner = cast("Any", SimpleNamespace(known={}, many=many))
    first = Material.of(drawn_capture(Stated.of("none", None, 64))).as_captured
    search = Search(runner, ("length",), cuda=False, fixed=False, seed=0)
    search._sweep(first)
    work = [v.rows * v.keys for v in run]
    assert work == sorted(work)
    assert sum(v.rows != v.keys for v in run[: len(run) // 2]) >= 5
    # The table has them as they were.
    assert [level for level, _ in search.tried["length"]][:3] == [(1, 1), (2, 2), (3, 3)]


def test_what_a_kernel_refuses_is_no_fault() -> None:
    search = searched("refusing", "head size")
    assert not search.rules
    by_level = {level.level: level for level in search.by_axis()[0].levels}
    assert {by_level[str(d)].outcome for d in range(136, 257, 8)} == {"refused"}
    assert {by_level[str(d)].outcome for d in range(8, 129, 8)} == {"passed"}
    assert "not supported" in (by_level["136"].message or "")


@pytest.mark.parametrize("stated", ["top-left", "bottom-right"])
def test_a_mask_of_its_own_may_be_aligned_either_way(stated: str) -> None:
    search = searched("sound", "length", "mask", fixed=True, causal="bottom-right", mask=stated)
    assert not search.rules, [(r.outputs, r.example.words) for r in search.rules]


def test_the_smallest_case_keeps_a_mask_of_the_kernels_own() -> None:
    search = searched("odd sizes", "head size", fixed=True, causal="top-left", mask="top-left")
    (rule,) = search.rules
    # Without the mask every case is wrong, at every head size and in O too.
    case = smallest(search, rule)
    assert case.causal == "top-left"
    assert search.runner.verdict(case).faults.keys() == {"dq"}


def test_a_first_case_that_fails_is_compared_with_a_plain_one() -> None:
    search = searched("odd sizes", "batch", head_dim=72)
    (rule,) = search.rules
    assert search.first is not None
    assert search.first.head_dim == 64
    assert [c.axis for c in rule.conditions()] == ["head size"]
    assert "72" in rule.conditions()[0].failing


def test_a_kernel_that_is_always_wrong() -> None:
    search = searched("second item", "head size", batch=2)
    assert [c.axis for c in search.rules[0].conditions()] == ["batch"]
    always = Search(search.runner, (), cuda=False, fixed=False, seed=0)
    always.runner.pool = cast("Any", InProcess(lambda name, x, *_: 2 * x if name == "dv" else x))
    always.runner.known.clear()
    always.run(search.runner.material.as_captured)
    (rule,) = always.rules
    assert (rule.outputs, rule.conditions()) == ({"dv": "wrong"}, ())


def test_what_the_first_case_has_wrong_is_bound_by_the_levels_that_are_right() -> None:
    """Not "in every case tried" beside a table of cases that passed."""
    first = Material.of(drawn_capture()).as_captured
    wrong, right = CaseVerdict(faults={"o": "wrong"}), CaseVerdict(passed=True)
    rule = Rule({"o": "wrong"}, {}, {}, first)
    search = Search(cast("Any", None), ("length", "batch"), cuda=False, fixed=False, seed=0, rules=[rule])
    search.tried = {
        "length": [((n, n), wrong if n >= 64 else right) for n in (1, 32, 63, 64, 65, 128)] + [((256, 256), None)],
        "batch": [((1,), wrong), ((2,), wrong)],
    }
    known = [verdict for tried in search.tried.values() for _, verdict in tried if verdict is not None]
    assert "O is wrong in 5 of 8 cases tried" in _sentence(rule, first, known, alone=True)
    assert "O is wrong in every case tried" in _sentence(rule, first, [wrong, wrong], alone=True)
    search._bound()
    assert [(c.axis, c.law) for c in rule.conditions()] == [("length", "Tq ≥ 64")]


def test_a_search_that_runs_out_of_time_tells_how_much_it_left() -> None:
    material = Material.of(drawn_capture())
    pool = cast("Any", InProcess(hunted_kernels.PLANTED["odd sizes"]))
    runner = Runner(material, pool, CaseJudge("planted", fixed=False, device=CPU), time.monotonic() + 1, 0)
    search = Search(runner, list(FIELDS), cuda=False, fixed=False, seed=0)
    search.run(replace(material.as_captured, rows=64, keys=64))
    assert search.first is not None
    assert search.not_run > 100
    assert len(runner.known) < 50


def test_laws() -> None:
    sizes = [(d,) for d in range(8, 257, 8)]

    def found(axis: str, wrong: Any, every: Any) -> str | None:
        return law(axis, [x for x in every if wrong(*x)], [x for x in every if not wrong(*x)])

    assert found("head size", lambda d: d > 128, sizes) == "D ≥ 136"
    assert found("head size", lambda d: d % 16, sizes) == "D no multiple of 16"
    assert found("head size", lambda d: 64 < d < 96, sizes) == "D from 72 to 88"
    assert found("head size", lambda d: d in (72, 104), sizes) is None
    lengths = list(levels("length", Variant(1, 1, 1, 64, 64, 64, "none"), cuda=False, fixed=False))
    assert found("length", lambda q, k: q != k, lengths) == "Tq ≠ Tk"
    assert found("length", lambda q, k: 1 in (q % 64, k % 64), lengths) == "Tq or Tk mod 64 = 1"
    assert found("length", lambda _, k: k % 128, lengths) == "Tk no multiple of 128"
    assert law("length", [(1, 1)], lengths[1:]) is None


def test_pairs_and_triples_are_covered() -> None:
    first = Variant(1, 2, 1, 64, 64, 64, "none")
    choices: dict[str, Any] = {
        "head size": [(d,) for d in (16, 64, 72, 96)], "group": [(1,), (2,)], "mask": [("none",), ("top-left",)],
        "dtype": [("bf16",), ("fp16",)], "batch": [(1,), (2,), (3,)],
    }  # fmt: skip
    few = {"head size": [(64,), (72,)]}
    made = list(covering(first, choices, few, 0))
    small = {**choices, **few}
    for one, other in combinations(choices, 2):
        seen = {(level_of(v, one), level_of(v, other)) for v in made}
        assert seen >= set(product(small[one], small[other]))
    triples = {tuple(level_of(v, axis) for axis in ("head size", "group", "mask")) for v in made}
    assert triples >= set(product(*(choices[axis] for axis in ("head size", "group", "mask"))))
    assert len(made) < 30
    assert made == list(covering(first, choices, few, 0))


CASE = Variant(2, 2, 2, 6, 5, 8, "none")


@pytest.mark.parametrize("layout", [*LAYOUTS, *(one for name in LAYOUTS for one in restricted(name))])
def test_layouts_keep_values_and_the_script_lays_them_alike(layout: str) -> None:
    material = Material.of(drawn_capture())
    case = material.build(replace(CASE, layout=layout))
    name, which = parse(layout)
    for tensor in ("q", "k", "v", "do"):
        x = getattr(case, tensor)
        found = placed(layout, tensor, x)
        assert torch.equal(found, x)
        assert (found.stride() == x.stride()) == (tensor not in which or name == "off alignment")
        if tensor in which:
            of_script = eval(LYING[name], {"torch": torch, "x": x})
            assert torch.equal(of_script, x)
            assert (of_script.stride(), of_script.storage_offset() % 8) == (found.stride(), found.storage_offset() % 8)
    assert fitted("contiguous", {}) == {}


@pytest.mark.parametrize("values", CHANGES)
def test_values_of_all_shapes(values: str) -> None:
    material = Material.of(load(CAPTURES / "gqa_T200.safetensors"))
    for variant in (replace(CASE, values=values), replace(CASE, rows=1, keys=1, values=values, head_dim=96)):
        case = material.build(variant)
        assert tuple(case.q.shape) == (2, 4, variant.rows, variant.head_dim)
        assert all(bool(x.isfinite().all()) for x in (case.q, case.k, case.v, case.do) if x is not None)
    plain, again = (material.build(replace(material.as_captured, rows=64, keys=64)) for _ in range(2))
    assert torch.equal(plain.q, material.case.q[:, :, :64])
    assert plain.fingerprint == again.fingerprint


def test_captures_that_cannot_be_changed_are_refused() -> None:
    q = torch.randn(1, 1, 8, 8).bfloat16()
    mask = torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(InputError, match="mask cannot follow"):
        attn_diag.hunt("sdpa:math", q, q, q, mask=mask, device="cpu")
    with pytest.raises(InputError, match="no kernel"):
        attn_diag.hunt("nothing", device="cpu")
    with pytest.raises(InputError, match="no axis"):
        attn_diag.hunt("sdpa:math", only=["nothing"], device="cpu")
    with pytest.raises(InputError, match="above 0"):
        attn_diag.hunt("sdpa:math", budget_s=0, device="cpu")
    for ignored in ({"capture": "layer3.safetensors"}, {"mask": mask}):
        with pytest.raises(InputError, match="without inputs hunt"):
            attn_diag.hunt("sdpa:math", device="cpu", **ignored)


def test_what_overflows_in_the_format_itself_is_no_fault() -> None:
    material = Material.of(drawn_capture())
    judge = CaseJudge("sdpa:math", fixed=False, device=CPU)
    case = material.build(replace(CASE, rows=16, keys=16, dtype="fp16"))
    assert case.do is not None
    large = replace(case, v=case.v * 2000, do=case.do * 2000)
    target = Target.of("sdpa:math", dtype=torch.float16, head_dim=8, device=CPU)
    outputs = target.call(large, gradients=True).outputs
    assert not outputs["dq"].isfinite().all()
    assert "dq" not in judge.of(large, Ran("ran", outputs=outputs)).faults
    fine = target.call(case, gradients=True).outputs
    assert judge.of(case, Ran("ran", outputs={**fine, "dq": outputs["dq"]})).faults == {"dq": "nonfinite"}


def hunted(name: str, *only: str, **options: Any) -> Any:
    (found,) = attn_diag.hunt(f"hunted_kernels:{name}", only=only, device="cpu", **options).kernels
    return found


def test_a_crash_ends_no_hunt(tmp_path: Path, programs: Programs) -> None:
    found = hunted("crashing", "head size", folder=tmp_path)
    (finding,) = found.findings
    assert (finding.fault, dict(finding.outputs)) == ("crashed", {"forward": "crashed"})
    assert finding.conditions[0].law == "D ≥ 136"
    assert (finding.smallest.head_dim, finding.smallest.rows, finding.alone) == (136, 1, True)
    assert "SIGSEGV" in finding.details
    assert {x.level for x in found.axes[0].levels if x.outcome == "passed"} == {str(d) for d in range(8, 129, 8)}
    assert finding.script is not None
    assert programs.run_file(finding.script).code == -11


@pytest.mark.slow
def test_a_hang_ends_no_hunt() -> None:
    found = hunted("hanging", "length", limit_s=3)
    (finding,) = found.findings
    assert (finding.fault, finding.conditions[0].law) == ("timed-out", "Tq ≠ Tk")
    assert finding.smallest.rows != finding.smallest.keys
    assert {"8", "128"} <= {x.level for x in found.axes[0].levels if x.outcome == "passed"}


def test_what_depends_on_earlier_calls_is_said_to() -> None:
    found = hunted("remembering", "batch", "head size", budget_s=10)
    assert found.findings
    assert not any(f.alone for f in found.findings)
    assert "only after other calls in the same process" in found.words


def test_the_command_saves_a_case_that_runs_alone(run: Run, tmp_path: Path) -> None:
    document, out = tmp_path / "found.json", tmp_path / "found"
    done = run(
        "check", "hunted_kernels:odd_sizes", "--hunt", "--axes", "batch", "--head-dim", "72", "--out", out, "--json",
        document, "--device", "cpu",
    )  # fmt: skip
    assert done.code == 1, done.err
    assert done.out.startswith("WRONG hunted_kernels:odd_sizes: dQ is wrong at head sizes"), done.out
    assert max(map(len, done.out.splitlines())) <= 80
    found = Hunt.from_json(document.read_text())
    assert json.loads(found.to_json()) == json.loads(document.read_text())
    (finding,) = found.kernels[0].findings
    assert finding.capture is not None
    assert finding.script is not None
    # In a folder of its own, as it is sent.
    alone = subprocess.run([sys.executable, "-P", finding.script], capture_output=True, text=True, cwd="/", check=False)
    assert alone.returncode == 1, alone.stderr
    assert "dq: 1 off" in alone.stdout
    assert "attn_diag" not in Path(finding.script).read_text()
    verdict = attn_diag.inspect(finding.capture, device="cpu")
    assert any("dQ" in f.words for f in verdict.findings)


def test_the_command_on_a_capture(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(
        "replay", CAPTURES / "gqa_T200.safetensors", "--hunt", "--against", "sdpa:math", "--axes", "batch,dtype",
        "--out", tmp_path / "found", "--html", page, "--device", "cpu", "--fail-on", "kernel",
    )  # fmt: skip
    assert (done.code, done.out.splitlines()[0][:4]) == (0, "PASS"), done.out + done.err
    assert "no wrong result in" in " ".join(done.out.split())
    assert not (tmp_path / "found").exists()
    assert "no wrong result in" in page.read_text()
    assert run("check", "sdpa:math", "--hunt", "--baseline", "x.json").code == 2


@pytest.mark.parametrize("name", ["sdpa:flash", "sdpa:math", "fa2"])
def test_healthy_kernels_pass(name: str) -> None:
    found = attn_diag.hunt(
        name, CAPTURES / "gqa_T200.safetensors", only=["mask", "layout", "dtype"], device="cpu", budget_s=60
    )
    assert found.passed, found.findings


@pytest.mark.parametrize("name", [*LIBRARIES, "fa2", "hunted_kernels:sound"])
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_every_kernel_has_its_source(name: str, window: tuple[int, int] | None) -> None:
    source = kernel_source(name, HERE, options=window is not None)
    compile(source, name, "exec")
    public = name.split(":")[0] in ("sdpa", "flex_attention") or name.startswith(("flash", "sage", "xformers"))
    if public and window is None and name != "flashinfer":
        assert "attn_diag" not in source


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["sdpa:math", "sdpa:flash", "flex_attention"])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_the_script_calls_a_kernel_as_the_hunt_does(name: str, causal: Any) -> None:
    case = Material.of(drawn_capture()).build(replace(CASE, causal=causal, rows=5, keys=9))
    space: dict[str, Any] = {"torch": torch, "CAUSAL": causal, "SCALE": case.scale}

    def hidden(rows: int, keys: int, _: torch.device) -> Tensor:
        shift = keys - rows if causal == "bottom-right" else 0
        found = torch.ones(rows, keys, dtype=torch.bool).triu(1 + shift)
        return found if causal != "none" else torch.zeros_like(found)

    space["hidden"] = hidden
    exec(kernel_source(name, HERE, options=False), space)
    found = space["kernel"](case.q, case.k, case.v)
    wanted = Target.of(name, dtype=torch.bfloat16, head_dim=8, device=CPU).call(case).outputs["o"]
    assert torch.equal(found, wanted)


def test_every_axis_has_the_first_case() -> None:
    first = Variant(1, 2, 1, 100, 100, 60, "none")
    for axis, fields in FIELDS.items():
        found = levels(axis, first, cuda=False, fixed=False)
        assert len(set(found)) == len(found)
        assert level_of(first, axis) in found
        assert all(at(first, axis, x) == first or len(fields) for x in found)
    assert levels("mask", first, cuda=False, fixed=True) == [("none",)]
