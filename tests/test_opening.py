"""The first lines of a diagnosis: planted folders, of which these say what is wrong, where, since when, how sure, and
what to do next; and the findings behind them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import planted_folders
import pytest
import torch
from builders import CAPTURES, inspected, rounded_inputs, some, with_findings, with_heads
from command_line import Run
from planted_folders import FOLDERS, write
from rich.cells import cell_len
from snapshots import require_unchanged

import attn_diag
from attn_diag import Capture
from attn_diag.reports.finding_words import brief, matters, sure, what, when, where
from attn_diag.reports.following import command
from attn_diag.reports.opening import headline, next_command, opening
from attn_diag.reports.renderers import plain_text
from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis
from attn_diag.results.findings import SharedFinding
from attn_diag.results.wording import chance, in_units
from attn_diag.testing.regression.cases import case_of_capture
from attn_diag.testing.target import Target, emulate

pytestmark = pytest.mark.slow

LINES = 12
# In the first lines at 80 columns: what, where, since when, how sure, and the next command.
SAID = {
    "clean": (
        "PASS: O, dQ, dK and dV are as good as a well-rounded kernel's", "8 heads at 2 steps", "no bias was found",
        "at most 1.00 times", "none speaks against the kernel", "nothing to do here",
    ),
    "one_finding": (
        "LOSSY: layer 3, all 4 heads, from step 200 on (the kernel's fault: scores in BF16)", "not found at 100",
        "No clear trend",
        "times FlashAttention-2's (the well-rounded kernel's) error (95 % interval; lossy: above 1.25)",
        "dQ is up to", "dW_Q", "keep scores in fp32",
        "attn-diag what-if one_finding/step000300_layer03.safetensors --head 1 --only fp32-scores",
    ),
    "two_findings": (
        "LOSSY: layer 3, all 4 heads, from step 200 on (scores in BF16).",
        "BIASED: layer 7, all 4 heads, from step 300 on.", "Others (heads × steps): 26 pass, 2 undecided.",
        "Since step 200 (not 100). Sure: 1.50 to 2.30 times at 95 %; the kernel's fault. Matters little: dQ",
        "attn-diag what-if two_findings/step000300_layer03.safetensors --head 1 --only fp32-scores",
        "|O| is 0.095 of its last bit too small on average (L7H0). Since step 300 (not 200). Sure: chance makes it in "
        "less than 1 of a million runs; the kernel's fault. Matters little: dQ",
        "attn-diag attribute two_findings/step000400_layer07.safetensors --head 0",
    ),
    "growing": (
        "WRONG: layer 2, head 1, at step 500, the last looked at (lossy from step 200 on)",
        "step 200 as lossy, 500 as wrong (not found at 100", "It grows",
        "certain: FP8 in all rows makes less; kernel or capture is at fault", "Runs that blew up",
        "attn-diag inspect growing/step000500_layer02.safetensors --head 1 --html",
    ),
    "one_rank": (
        "LOSSY: layer 2, all 4 heads, step 500, on rank 2 alone; not found in the same heads on ranks 0, 1 and 3 (the "
        "kernel's fault: scores in BF16)", "95 % interval", "only step 500 was looked at; inspect an earlier step too",
        "judge each rank by itself, which shows its heads alone: attn-diag inspect one_rank --no-merge-ranks --layer 2",
    ),
    "one_tensor_rank": (
        "LOSSY: layer 2, heads 4-5, step 500; rank 2 alone holds these heads (the kernel's fault: scores in BF16)",
        "95 % interval",
        "attn-diag inspect one_tensor_rank",
    ),
    "mixed_kernels": (
        "LOSSY: layers 0-1, all 4 heads, from step 300 on (the kernel's fault: scores in BF16, kernel "
        "my_triton_attention)", "not found at 200", "95 % interval", "attn-diag what-if mixed_kernels/step000300",
    ),
    "two_observations": (
        "LOSSY in 'mine': layer 4, all 4 heads (the kernel's fault: scores in BF16). The same heads pass in 'flash'.",
        "no step is stated", "95 % interval", "--observation mine --only fp32-scores",
    ),
    "nan_at_a_step": (
        "NaN OR INF: layer 5, head 1, at step 300, the last", "row 64 holds NaN or Inf", "not found at 200",
        "certain: the exact result is finite there. The kernel is at fault",
        "attn-diag inspect nan_at_a_step/step000300_layer05.safetensors --head 1",
    ),
    "wrong_mask": (
        "MASK OR SCALE NOT AS STATED: layer 6, all 4 heads, step 100 (judged as causal=top-left, O fits causal=none)",
        "86.2 % off",
        "certain: metadata or kernel are wrong",
        "much if the kernel is not what was meant; not at all if the metadata alone are wrong",
        "attn-diag inspect wrong_mask/step000100_layer06.safetensors --causal none",
    ),
    "leak": (
        "WRONG: layer 6, all 4 heads, step 100", "what a causal border one key further on gives", "certain",
        "the model computes another function than meant",
        "attn-diag inspect leak/step000100_layer06.safetensors --head",
    ),
    "ill_conditioned": (
        "ILL-CONDITIONED: layer 2, all 4 heads, step 700 (no fault of the kernel)", "amplify ordinary rounding",
        "a well-rounded kernel was run on the same inputs: this one is not at fault",
        "without O's rounding; what that gains:",
        "attn-diag what-if ill_conditioned/step000700_layer02.safetensors --head 3 --only fp32-o-delta --only delta-",
    ),
    "undecided": (
        "NOTHING FOUND, BUT TOO LITTLE TO DECIDE: the only head", "too few independent rows", "capture more rows",
        "of nothing: no fault was shown, nor that there is none",
    ),
    "emulated": (
        "NO KERNEL JUDGED, as no output of one was captured: recipe fa2 (FlashAttention-2), emulated on these inputs, "
        "is clean", "capture what the kernel returns", "nothing to date: no kernel's output was looked at",
        "of your kernel nothing is known", "with these roundings the gradient dQ is up to",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


@pytest.fixture
def found(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """The diagnosis of a planted folder, made once by the command line."""
    monkeypatch.chdir(folder)

    def of(name: str) -> Path:
        saved = folder / f"{name}.json"
        if not saved.exists():
            write(folder, name)
            done = run("inspect", name, "--device", "cpu", "--json", saved)
            assert done.code == (2 if name == "wrong_mask" else 0), done.err
        return saved

    return of


def flat(text: str) -> str:
    return " ".join(text.split())


def test_every_planted_folder_is_asked_for() -> None:
    assert SAID.keys() == FOLDERS.keys()


@pytest.mark.parametrize("name", SAID)
def test_the_first_lines_say_it_all(name: str, found: Callable[[str], Path], run: Run) -> None:
    text = run("report", found(name), COLUMNS="80").out
    first = flat("\n".join(text.splitlines()[:LINES]))
    for words in SAID[name]:
        assert words in first, f"{words!r} is not in:\n{first}"
    for other, said in SAID.items():
        # The first of two findings is that of "one_finding".
        assert other in (name, "one_finding") or said[other == "two_findings"] not in first
    assert not first.startswith("UNDECIDED")


@pytest.mark.parametrize("name", SAID)
def test_every_finding_is_dated_weighed_and_followed_up(name: str, found: Callable[[str], Path], run: Run) -> None:
    """Since when, how sure, how much it matters, and the whole command, for each finding, in the first lines."""
    diagnosis = read(found(name))
    first = flat("\n".join(run("report", found(name), COLUMNS="80").out.splitlines()[:LINES]))
    asked = {"Since", "Sure", "Matters", "Next"} - ({"Since"} if name in ("clean", "undecided") else set())
    for word in asked:
        assert len(re.findall(rf"\b{word}\b", first)) >= max(len(diagnosis.findings) * (name != "emulated"), 1), word
    for finding in diagnosis.findings if name != "emulated" else ():
        assert command(diagnosis, finding) in first
    unstated = "no step is stated" in first
    assert unstated == all("step" not in c.metadata for c in diagnosis.captures), "a step that is stated is known"


@pytest.mark.parametrize("width", [80, 120])
def test_openings_are_as_they_were(width: int, found: Callable[[str], Path], run: Run) -> None:
    parts = []
    for name in SAID:
        lines = run("report", found(name), COLUMNS=str(width)).out.splitlines()
        assert max(map(cell_len, lines)) <= width
        parts += [f"$ attn-diag inspect {name}", *lines[:LINES], ""]
    require_unchanged(f"openings_{width}", "\n".join(parts))


@pytest.mark.parametrize("width", [80, 120])
def test_a_whole_report_is_as_it_was(width: int, found: Callable[[str], Path], run: Run) -> None:
    text = run("report", found("two_findings"), COLUMNS=str(width)).out.partition("Where the numbers come from")[0]
    require_unchanged(f"report_two_findings_{width}", text)


def read(path: Path) -> Diagnosis:
    return Diagnosis.from_json(path.read_bytes())


def of_720(model: Diagnosis) -> Diagnosis:
    """12 layers of 12 heads at 5 steps: layer 3 lossy from step 200 on, layer 7 biased from step 300 on."""
    heads = {(c.metadata["layer"], c.metadata["step"]): (c, c.observations[0].heads[0]) for c in model.captures}
    captures = []
    for step in range(0, 500, 100):
        for layer in range(12):
            planted = (layer == 3 and step >= 200) or (layer == 7 and step >= 300)
            whole, head = heads[(str(layer), "300") if planted else ("5", "300")]
            twelve = tuple(replace(head, layer=layer, head=n) for n in range(12))
            made = replace(whole.observations[0], heads=(*twelve, replace(head, layer=layer, head=None)))
            stated = whole.metadata | {"layer": str(layer), "step": str(step)}
            source = f"run/step{step:06d}_layer{layer:02d}.safetensors"
            captures.append(replace(whole, source=source, metadata=stated, observations=(made,)))
    return with_findings(model, captures)


def test_720_heads_are_two_findings(found: Callable[[str], Path]) -> None:
    diagnosis = of_720(read(found("two_findings")))
    lossy, biased = diagnosis.findings
    assert (lossy.label, lossy.layers, lossy.onset, lossy.heads, lossy.of) == ("lossy", (3,), 200, 36, 720)
    assert (biased.label, biased.layers, biased.onset, biased.heads) == ("biased", (7,), 300, 24)
    assert lossy.places[0].all_heads
    assert lossy.site == "scores in BF16"
    assert not diagnosis.undecided
    lines = diagnosis.report(80).splitlines()
    first = flat("\n".join(lines[:3]))
    assert first.startswith(
        "LOSSY: layer 3, all 12 heads, from step 200 on (scores in BF16). "
        "BIASED: layer 7, all 12 heads, from step 300 on. 660 others (heads × steps) pass."
    )
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("head ")) + 1 :]
    rows = [line.split()[0] for line in table if line.startswith("L") and " step " in line and "(" not in line]
    assert rows == ["L3H0", "L3H1", "L3H2", "L7H0", "L7H1", "L7H2", "L0H0", "L0H1", "L0H2"]


def test_undecided_is_never_the_headline(found: Callable[[str], Path]) -> None:
    """24 heads, one of them undecided: the run passes, and says so of the one."""
    model = read(found("two_findings"))
    small = read(found("undecided"))
    healthy = next(c for c in model.captures if c.metadata["layer"] == "5")
    head, open_ = healthy.observations[0].heads[0], small.captures[0].observations[0].heads[0]
    heads = (*(replace(head, head=n, layer=2) for n in range(23)), replace(open_, head=23, layer=2))
    capture = replace(healthy, observations=(replace(healthy.observations[0], heads=heads),))
    diagnosis = with_findings(model, [capture])
    assert diagnosis.findings == ()
    assert diagnosis.labels == {"clean", "undecided"}
    assert headline(diagnosis).startswith("PASS: ")
    assert "Of 24 heads 1 is undecided: L2H23 step" in headline(diagnosis)
    assert [line.about for line in opening(diagnosis)][:2] == ["Next", "Open"]


def test_without_an_output_no_kernel_passes() -> None:
    given = rounded_inputs()
    q, k, v = (given[name] for name in "qkv")
    only = attn_diag.inspect(q, k, v, causal=True, device="cpu")
    assert headline(only).startswith("NO KERNEL JUDGED")
    assert "CLEAN" not in headline(only)
    beside = attn_diag.inspect(q, k, v, o=given["o"], causal=True, device="cpu", recipes=["qiu2025"])
    said = headline(beside)
    assert "Emulated beside it, not captured: recipe qiu2025" in said
    assert not said.startswith(("LOSSY", "BIASED", "NO KERNEL"))
    assert all(not finding.captured for finding in beside.findings)


def test_nonfinite_figures_are_the_largest() -> None:
    """A gradient that is NaN is no small one."""

    def broken(head: HeadDiagnosis) -> HeadDiagnosis:
        dq = replace(some(head.propagation.dq), relative_error=float("nan"))
        return replace(head, propagation=replace(head.propagation, dq=dq))

    model = with_heads(inspected("kernels_pair_T512"), broken)
    diagnosis = with_findings(model, list(model.captures))
    assert [str(f.dq_error) for f in diagnosis.findings] == ["nan"] * len(diagnosis.findings)
    assert "nan" in diagnosis.report(80)


def test_fragile_heads_are_one_finding_whatever_the_kernel() -> None:
    """flash and FlexAttention on the same inputs: the head is fragile, not either of them."""
    findings = inspected("kernels_pair_T512").findings
    assert [(f.label, f.observations) for f in findings] == [
        ("lossy", ("paper",)), ("lossy", ("stable",)), ("ill_conditioned", ("flash", "flex")),
    ]  # fmt: skip


def test_findings_are_in_the_json_and_follow_from_older_documents(found: Callable[[str], Path]) -> None:
    path = found("two_findings")
    document = json.loads(path.read_text())
    assert next(iter(document)) == "findings"
    assert [f["label"] for f in document["findings"]] == ["lossy", "biased"]
    del document["findings"], document["undecided"]
    assert Diagnosis.from_json(json.dumps(document)).findings == read(path).findings


def test_plain_lines_say_it_too(found: Callable[[str], Path]) -> None:
    lines = plain_text(read(found("growing"))).splitlines()
    assert lines[0].startswith("verdict      WRONG: layer 2, head 1")
    about = [line.split()[1] for line in lines if line.startswith("opening ")]
    assert about == ["Next:", "What:", "Since:", "Sure:", "Matters:"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("one_finding", "fp32-scores leaves dQ 0.29 % off instead of 0.321 %, and O 0.197 % instead of 0.366 %"),
        ("two_findings", "fp32-scores leaves dQ"),
        ("mixed_kernels", "fp32-scores leaves dQ"),
        ("ill_conditioned", "delta-from-dp leaves dQ 0.259 % off instead of 12.9 %"),
        ("wrong_mask", "PASS"),
        ("one_rank", "scores in BF16"),
        ("two_observations", "fp32-scores leaves dQ"),
    ],
)
def test_the_next_commands_run(name: str, shown: str, found: Callable[[str], Path], run: Run) -> None:
    """As they stand, in the folder where inspect ran; the first shows what its line promises."""
    diagnosis = read(found(name))
    for number, finding in enumerate(diagnosis.findings):
        arguments = command(diagnosis, finding).split()
        assert arguments.pop(0) == "attn-diag"
        done = run(*arguments, "--device", "cpu")
        assert done.code == 0, done.err
        assert number or shown in flat(done.out)[:400]


def test_what_recognised_bits_do_not_show_is_not_advised(found: Callable[[str], Path]) -> None:
    """Where the worst head's own recipe is another one there is nothing to try that what-if would know."""
    diagnosis = read(found("one_finding"))
    (finding,) = diagnosis.findings
    captures = [
        replace(c, observations=tuple(replace(o, coarse=None) for o in c.observations)) for c in diagnosis.captures
    ]
    other = with_findings(diagnosis, captures)
    assert command(other, finding).startswith("attn-diag attribute ")


def test_three_findings_each_have_their_next_command(found: Callable[[str], Path]) -> None:
    model, broken = read(found("two_findings")), read(found("nan_at_a_step"))
    captures = [c for c in broken.captures if c.metadata["layer"] == "5"]
    kept = [c for c in model.captures if c.metadata["layer"] in "37"]
    diagnosis = with_findings(model, [*kept, *captures])
    assert [f.label for f in diagnosis.findings] == ["nonfinite", "lossy", "biased"]
    first = flat("\n".join(diagnosis.report(80).splitlines()[:LINES]))
    for finding in diagnosis.findings:
        assert command(diagnosis, finding) in first
    for words in ("Sure: certain, and the kernel's fault", "Matters: training stops", "Since step 300 (not 200)"):
        assert words in first


def test_a_mask_that_did_fit_before_has_its_onset() -> None:
    made = [
        planted_folders.capture(kernel, layer=6, step=step)
        for step, kernel in ((100, planted_folders.healthy), (200, planted_folders.unmasked))
    ]
    (finding,) = attn_diag.inspect_captures(made, device="cpu").findings
    assert (finding.label, finding.onset, finding.places[0].steps_looked) == ("unjudged", 200, (100, 200))
    assert when(finding) == "step 200 (not found at 100, 2 steps looked at)."
    assert where(finding) == "layer 6, all 4 heads, at step 200, the last looked at"
    assert [(s.step, s.label) for s in finding.by_step] == [(100, None), (200, "unjudged")]


def test_ranks_that_hold_the_same_heads_are_named_and_no_others(found: Callable[[str], Path]) -> None:
    (data,), (tensor,) = (read(found(name)).findings for name in ("one_rank", "one_tensor_rank"))
    assert (data.ranks, data.other_ranks) == (("2",), ("0", "1", "3"))
    assert (tensor.ranks, tensor.other_ranks) == (("2",), ())


def test_the_rule_that_is_stated_is_the_one_that_decided(found: Callable[[str], Path]) -> None:
    (finding,) = read(found("one_finding")).findings
    assert "1.50 to 2.30 times" in sure(finding)
    assert "lossy: above 1.25" in sure(finding)
    few = replace(finding, factor_ci95=(0.9, 3.0), typical_factor_ci95=(1.4, 1.8))
    assert "1.40 to 1.80 times" in sure(few)
    assert "with all rows weighted alike (95 % interval; lossy: above 1.25)" in sure(few)
    # Beside another finding too, where "1.21 times" was followed by "Sure: 1.26 to 1.50 times at 95 %".
    assert "Sure: 1.40 to 1.80 times at 95 %, all rows weighted alike; the kernel's fault" in brief(few).said
    lse = replace(few, factors={"lse": 3.2}, factor_ci95=(1.1, 5.0), typical_factor_ci95=None)
    assert "lossy: a factor above 1.25" in sure(lse)
    assert what(lse).startswith("the error of LSE alone makes dQ 3.20 times as wrong as that of a well-rounded kernel")
    assert "the fault of these roundings, not the inputs'" in sure(replace(finding, captured=False))


def test_a_bias_that_chance_makes_now_and_then_is_not_put_down_to_the_kernel_alone(
    found: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    diagnosis = read(found("two_findings"))
    finding = next(f for f in diagnosis.findings if f.label == "biased")
    assert sure(finding).endswith("the kernel's fault, not the inputs'.")
    weak = replace(finding, p_adjusted=0.008)
    assert sure(weak).endswith(
        "(adjusted p = 0.008): the kernel's fault, or chance, not the inputs'. Another batch tells which."
    )
    (saved := tmp_path / "weak.json").write_text(replace(diagnosis, findings=(weak,)).to_json())
    first = flat("\n".join(run("report", saved, COLUMNS="80").out.splitlines()[:LINES]))
    assert "(the kernel's fault, or chance)" in first


def test_what_is_far_off_beside_a_good_dq_matters_much(found: Callable[[str], Path]) -> None:
    (finding,) = read(found("one_finding")).findings
    assert set(finding.errors or ()) == set(finding.quantities)
    dv = replace(finding, label="wrong", quantities=("dv",), errors={"dv": 0.3}, dq_error=0.002, dw_q_error=None)
    assert matters(dv) == "much: the gradient dV is up to 30 % off, dQ 0.2 %."
    assert matters(replace(dv, dq_error=None, gradients=None)) == "much: the gradient dV is up to 30 % off."
    assert matters(replace(dv, errors=None)).startswith("little: the gradient dQ is up to 0.2 % off")


def test_in_memory_no_step_is_known() -> None:
    capture = planted_folders.capture(planted_folders.coarse_scores, layer=1)
    (finding,) = attn_diag.inspect_captures([capture], device="cpu").findings
    assert when(finding).startswith("not known: no step is stated")


def test_a_capture_in_memory_is_explained_next() -> None:
    capture = planted_folders.capture(planted_folders.coarse_scores, layer=1, step=5)
    diagnosis = attn_diag.inspect_captures([capture], device="cpu")
    assert next_command(diagnosis).said.startswith("print(attn_diag.explain(found, ")
    assert ", layer=1))" in next_command(diagnosis).said


def test_captures_that_cannot_be_judged_are_grouped_by_what_fits(found: Callable[[str], Path]) -> None:
    (finding,) = read(found("wrong_mask")).findings
    assert isinstance(finding, SharedFinding)
    assert (finding.label, finding.layers, finding.worst.head) == ("unjudged", (6,), None)


def test_nothing_could_be_judged() -> None:
    capture = attn_diag.load(CAPTURES / "gqa_T200.safetensors", causal="none")
    diagnosis = attn_diag.inspect_captures([capture], device="cpu")
    assert headline(diagnosis).startswith(
        "MASK OR SCALE NOT AS STATED: all 8 heads (judged as causal=none, O fits causal=top-left"
    )


def test_what_fits_is_said_of_lse_and_has_an_option(run: Run, tmp_path: Path) -> None:
    tensors = rounded_inputs(1, 32)
    scores = (tensors["q"].double() @ tensors["k"].double().mT / 4).masked_fill(
        torch.ones(32, 32).triu(1) > 0, -torch.inf
    )
    lse = scores.logsumexp(-1) / math.log(2)
    file = tmp_path / "base2.safetensors"
    Capture.from_tensors({**tensors, "lse": lse.float()}, causal="top-left", step=1).save(file)
    diagnosis = attn_diag.inspect_captures([attn_diag.load(file)], device="cpu")
    assert headline(diagnosis).endswith("(judged as lse_base=e, LSE fits lse_base=2).")
    assert next_command(diagnosis).said.endswith("base2.safetensors --lse-base 2")
    assert run("inspect", file).code == 2
    assert run("inspect", file, "--lse-base", "2").code == 0


def test_nothing_fits_is_said_only_where_that_is_so() -> None:
    capture = Capture.from_tensors(rounded_inputs(1, 32), causal="top-left", window=(3, 0), step=1)
    diagnosis = attn_diag.inspect_captures([capture], device="cpu")
    assert "window=-1,-1 fits" in diagnosis.findings[0].words
    assert "tried fits" not in headline(diagnosis)


@pytest.mark.parametrize(("stated", "option"), [((3, 0), "--window -1,-1"), (None, "--window 15,0")])
def test_a_window_that_fits_is_an_option_of_the_next_command(
    run: Run, tmp_path: Path, stated: tuple[int, int] | None, option: str
) -> None:
    tensors = rounded_inputs(1, 64)
    hidden = torch.ones(64, 64).triu(1) + (0 if stated else torch.ones(64, 64).tril(-16))
    scores = (tensors["q"].double() @ tensors["k"].double().mT / 4).masked_fill(hidden > 0, -torch.inf)
    o = (scores.softmax(-1) @ tensors["v"].double()).bfloat16()
    file = tmp_path / "window.safetensors"
    Capture.from_tensors({**tensors, "o": o}, causal="top-left", window=stated, step=1).save(file)
    diagnosis = attn_diag.inspect_captures([attn_diag.load(file)], device="cpu")
    assert next_command(diagnosis).said.endswith(f"window.safetensors {option}")
    assert f"fits {option[2:].replace(' ', '=')}" in headline(diagnosis)
    assert run("inspect", file, *option.split(), "--fail-on", "wrong").code == 0


def test_numbers_in_plain_words() -> None:
    assert chance(0.002) == "by chance in 1 of 500 runs (adjusted p = 0.002)"
    assert chance(1e-9) == "by chance in less than 1 of a million runs (adjusted p = 1e-09)"
    assert chance(0.0) == "by chance in less than 1 of a million runs (adjusted p = 0)"
    assert chance(0.64, "p") == "by chance in 64 % of runs (p = 0.64)"
    assert chance(None) == "whether by chance was not tested"
    assert in_units(-0.1, floors=False) == "-0.1 ulp, spacings of O's format"
    assert in_units(2.0, floors=True) == "+2 noise floors, of which one correct rounding of O makes 1"


@pytest.mark.parametrize("name", ["two_findings"])
def test_reasons_say_what_a_p_value_means(name: str, found: Callable[[str], Path]) -> None:
    said = [r for _, _, h in read(found(name)).entries() for r in some(h.verdict).reasons if "p = " in r]
    assert said
    assert all("by chance in" in reason for reason in said)


def test_of_two_ranks_that_agree_none_is_named() -> None:
    """The same kernel on all ranks is no one rank's fault."""
    captures: list[Capture] = [
        planted_folders.capture(
            planted_folders.coarse_scores, layer=2, step=5, seed=rank, rank=rank,
            extra=planted_folders.RUN | {"world_size": "2"},
        )
        for rank in range(2)
    ]  # fmt: skip
    diagnosis = attn_diag.inspect_captures(captures, device="cpu")
    (finding,) = diagnosis.findings
    assert finding.ranks == ()
    assert torch.is_tensor(captures[0].tensors["q"])


@pytest.mark.parametrize("level", [0.01, 0.02, 0.05])
def test_noise_is_no_rounding(level: float) -> None:
    """It is as large as roundings are, and none of those that are known makes it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 160, 32, generator=generator).bfloat16() for _ in range(4))
    capture = Capture.from_tensors({"q": q, "k": k, "v": v, "do": do}, causal="top-left")
    case, cpu = case_of_capture(capture), torch.device("cpu")
    recipe = Target.of("fa2", dtype=torch.bfloat16, head_dim=32, device=cpu).recipe
    assert recipe is not None
    made = emulate(recipe, case, cpu)
    noise = torch.randn(made["dq"].shape, generator=generator) * made["dq"].float().square().mean().sqrt()
    made = {**made, "dq": (made["dq"].float() + level * noise).bfloat16()}
    report = attn_diag.inspect(replace(capture, tensors={**capture.tensors, **made}), device="cpu").report()
    said = " ".join(report.split())
    assert "times the error of a well-rounded kernel. None of the roundings that were tried makes it." in said
    assert "more coarsely" not in said


def test_a_quantity_whose_cause_is_known_comes_first() -> None:
    """Of a backward whose exponent has another scale, and dV, which is further off and shared by two query heads."""
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randn(1, 4, 128, 32, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 2, 128, 32, generator=generator).bfloat16() for _ in range(2))
    wide_q, wide_do = q.double(), do.double()
    wide_k, wide_v = (t.double().repeat_interleave(2, 1) for t in (k, v))
    scores = wide_q @ wide_k.mT * 32**-0.5
    o = (scores.softmax(-1) @ wide_v).bfloat16()
    probs = (1.02 * scores - scores.logsumexp(-1, keepdim=True)).exp()
    dscores = probs * (wide_do @ wide_v.mT - (wide_do * o.double()).sum(-1, keepdim=True))
    dq = (dscores @ wide_k * 32**-0.5).bfloat16()
    dv = 1.5 * (probs.mT @ wide_do).reshape(1, 2, 2, 128, 32).sum(2)
    found = attn_diag.inspect(q, k, v, o=o, do=do, dq=dq, dv=dv.bfloat16(), device="cpu")
    assert found.findings[0].quantities == ("dq", "dv")
    assert "the scale 0.1803 instead of 0.17678 in the backward's exponent alone" in found.findings[0].words
