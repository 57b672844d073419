"""Linear attention's recipes: told by O's bits, taken apart, changed; two kernels compared; other commands refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from linear_kernels import observed
from test_linear_captures import captured, emulated
from torch import Tensor

import attn_diag
from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.head.linear import LinearRun
from attn_diag.kernels.linear_products import summed
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded


@pytest.mark.parametrize(
    ("operator", "sites", "name"),
    [
        ("simple_gla", {"chunk": 64}, "chunk=64"),
        ("gated_delta_rule", {"chunk": 32, "stored": "fp32"}, "chunk=32,stored=fp32"),
        ("gated_delta_rule", {"chunk": 16, "state": "bf16"}, "chunk=16,state=bf16"),
    ],
)
def test_a_recipe_is_told_by_its_bits(operator: str, sites: dict[str, Any], name: str) -> None:
    found = attn_diag.identify_linear(emulated(operator, **sites))
    assert found.outcome == "identified"
    assert found.recipes == (name,)
    assert found.candidates[0].bits == 1


def test_fp32_kernels_are_told_from_others_but_not_from_each_other() -> None:
    found = attn_diag.identify_linear(captured("simple_gla", 0))
    assert found.outcome == "ambiguous"
    assert {"chunk=1,operands=fp32", "chunk=16,operands=fp32"} <= set(found.recipes)
    assert all("operands=fp32" in name and "=bf16" not in name for name in found.recipes)
    wrong = attn_diag.identify_linear(captured("simple_gla", 0, "no_inter_chunk"))
    assert wrong.outcome == "unknown"


def test_shares_add_up_and_the_site_that_was_made_coarse_leads() -> None:
    capture = emulated("simple_gla", chunk=32, decay="bf16")
    found = attn_diag.attribute_linear(capture)
    head = found.heads[0]
    assert found.recipe == "chunk=32,decay=bf16"
    assert found.recipe_from == "recognised"
    for quantity, total in head.totals.items():
        shares = [site.effects[quantity].share for site in head.sites]
        assert sum(shares) + head.arithmetic[quantity] == pytest.approx(1)
        assert head.captured[quantity] == pytest.approx(total, rel=1e-6)
    assert head.guilty["final_state"] == "decay"
    assert "decays" in found.report()
    coarser = replace(capture, tensors={**capture.tensors, "final_state": capture.tensors["final_state"] * 1.01})
    told = attn_diag.attribute_linear(coarser)
    assert "final_state" not in told.heads[0].guilty
    assert "errs more than the recipe" in " ".join(told.reasons)
    changed = attn_diag.what_if_linear(capture)
    effect = next(site for site in head.sites if site.site == "decay").effects["final_state"]
    assert changed["decay=fp32"].errors["final_state"] == pytest.approx(effect.repaired)
    assert effect.repaired < 0.9 * head.totals["final_state"]
    assert changed["chunk=64"].state_bytes == changed.baseline.state_bytes / 2
    assert [c.left for c in changed.candidates] == sorted(c.left for c in changed.candidates)
    with pytest.raises(attn_diag.InputError, match="--recipe takes chunk=N"):
        attn_diag.what_if_linear(capture, recipe="tiles=3")


def test_chunk_sizes_differ_by_rounding_and_a_fault_by_semantics() -> None:
    same = attn_diag.diff_linear(emulated("gated_delta_rule", 32), emulated("gated_delta_rule", 64))
    assert same.answers == {"rounding"}, same.sentence
    assert all(q.beside is not None and q.beside < 1.1 for q in same.heads[0].quantities)
    chunked, recurrent = emulated("gated_delta_rule", 32), captured("gated_delta_rule", 0)
    assert attn_diag.diff_linear(chunked, recurrent).answers <= {"rounding", "undecided"}
    fault = attn_diag.diff_linear(recurrent, captured("gated_delta_rule", 0, "boundary"))
    o = next(q for q in fault.heads[0].quantities if q.quantity == "o")
    assert o.answer == "semantics"
    assert o.semantics == pytest.approx(1, abs=0.02)
    assert "chunk boundary is off by one" in fault.sentence
    assert attn_diag.diff_linear(recurrent, recurrent).answers == {"same bits"}


def packed(lengths: Sequence[int], *, leak: bool = False) -> tuple[LinearCapture, LinearCapture]:
    """Sequences of KDA in one call, and the last of them alone; ``leak``: the state is carried from one to the next."""
    tensors = rounded(linear_inputs("kda", (1, sum(lengths), 1, 16, 16), 0, kind=LONG))
    do = torch.randn(1, sum(lengths), 1, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    ends = torch.tensor([0, *lengths]).cumsum(0)

    def run(start: int, end: int) -> dict[str, Tensor]:
        own = {name: t[:, start:end] for name, t in tensors.items()}
        return {**own, "do": do[:, start:end], **observed(own, do[:, start:end], scale=0.25)}

    each = [run(0, sum(lengths))] if leak else [run(int(a), int(b)) for a, b in pairwise(ends)]
    whole = {name: torch.cat([part[name] for part in each], 1) for name in each[0] if name != "final_state"}
    alone = LinearCapture("kda", run(int(ends[-2]), int(ends[-1])), 0.25)
    return LinearCapture("kda", {**whole, "cu_seqlens": ends}, 0.25), alone


def test_packed_and_alone() -> None:
    whole, alone = packed((40, 56))
    found = attn_diag.diff_linear(whole, alone)
    assert found.sequence == 1
    assert found.answers == {"same bits"}
    leaking, alone = packed((40, 56), leak=True)
    assert "semantics" in attn_diag.diff_linear(leaking, alone).answers
    other = replace(alone, tensors={**alone.tensors, "k": alone.tensors["k"] * 2})
    with pytest.raises(attn_diag.InputError, match="k differs by"):
        attn_diag.diff_linear(whole, other)


def test_commands_read_linear_captures_or_refuse_them(tmp_path: Path, run: Run) -> None:
    file, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    emulated("simple_gla", 64).save(file)
    emulated("simple_gla", 32).save(other)
    identified = run("identify", file, "--json", tmp_path / "found.json")
    assert identified.code == 0, identified.err
    assert identified.out.startswith("OK Chunks of 64")
    assert run("what-if", file, "--recipe", "chunk=64").out.startswith("FOUND")
    assert run("attribute", file, "--recipe", "chunk=64").code == 0
    compared = run("diff", file, other, "--fail-on", "semantics", "--html", tmp_path / "page.html")
    assert compared.code == 0
    assert compared.out.startswith("OK")
    assert "x two well-rounded" in (tmp_path / "page.html").read_text()
    for refused in (
        ("identify", file, "--rows", 3),
        ("what-if", file, "--beta", 2),
        ("attribute", file, "--window", "1,1"),
        ("attribute", file, "--level", 0.05),
        ("what-if", file, "--level", 0.05),
    ):
        done = run(*refused)
        assert done.code == 2
        assert "captures of linear attention take no" in done.err
    mixed = run("diff", file, "tests/captures/pair_T256.safetensors")
    assert mixed.code == 2
    assert "the other side is not" in mixed.err
    for name in ("microscope", "figures"):
        done = run(name, file)
        assert done.code == 2, name
        assert "a capture of linear attention" in done.err
        assert "`attn-diag inspect`, identify, attribute, what-if, diff and replay read it" in done.err
    hunted = run("check", "sdpa:math", "--hunt", "--capture", file)
    assert hunted.code == 2
    assert "a capture of linear attention" in hunted.err
    capture = attn_diag.load_linear(file)
    with pytest.raises(attn_diag.InputError, match="identify_linear"):
        attn_diag.identify(capture)  # type: ignore[call-overload]
    with pytest.raises(attn_diag.InputError, match="hunt\\(\\) looks at softmax attention"):
        attn_diag.hunt("sdpa:math", capture, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(attn_diag.InputError, match="microscope\\(\\) looks at softmax attention"):
        attn_diag.microscope(capture, row=3)  # type: ignore[call-overload]


RWKV7 = Path(__file__).parent / "data" / "fla_rwkv7_T512.safetensors"
"""chunk_rwkv7 of flash-linear-attention 0.6.0 on an H100."""


def test_the_released_rwkv7_kernel_is_emulated_bit_for_bit() -> None:
    run = LinearRun(load_linear(RWKV7), torch.device("cpu"))
    (outputs,) = run.capture.observations.values()
    made = run.emulated(replace(run.recipe, chunk=16, **run.released()[0]))
    for name, truth in run.reference.values.items():
        error, missed = (float((outputs[name].double() - x).norm()) for x in (truth, made[name]))
        assert (missed / error) ** 2 < 0.05, name
        assert 0.99 < error / float((made[name] - truth).norm()) < 1.01, name


def test_the_released_rwkv7_kernels_choices_are_named() -> None:
    capture = load_linear(RWKV7)
    answers = {q.quantity: q for head in attn_diag.inspect_linear(capture).heads for q in head.quantities}
    assert {q.answer for q in answers.values()} <= {"good", "undecided"}
    assert "log_steps=tf32" in str(answers["o"].cause)
    assert "closing=bf16" in str(answers["dg"].cause)
    assert "log_steps=tf32" in attn_diag.identify_linear(capture).recipes[0]


@pytest.mark.parametrize("sums", ["fp32", "bf16"])
def test_coarse_sums_over_the_state_are_told_by_an_error_that_jumps_with_chunks(sums: Any) -> None:
    given = rounded(linear_inputs("simple_gla", (1, 448, 1, 16, 16), 2, kind=LONG))
    given["do"] = torch.randn(1, 448, 1, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    run = LinearRun(LinearCapture("simple_gla", given), torch.device("cpu"))
    # Another kernel than the yardstick: what products hand on is fp32.
    made = run.emulated(replace(run.recipe, chunk=32, decay_sums=sums, stored="fp32"))
    kept = {"o": made["o"].bfloat16()} | {f"d{n}": made[f"d{n}"].to(given[n].dtype) for n in "qkvg"}
    found = attn_diag.inspect_linear(LinearCapture("simple_gla", {**given, **kept}), device="cpu")
    by_name = {q.quantity: q for q in found.captures[0].observations[0].heads[0].quantities}
    assert found.labels == ({"clean"} if sums == "fp32" else {"undecided"})
    assert by_name["dg"].cause == (None if sums == "fp32" else "decay_sums")
    assert sums == "fp32" or "(by its size: one error in all steps of a chunk)" in by_name["dg"].words
    assert all(q.cause is None for name, q in by_name.items() if name != "dg")


def test_sums_are_rounded_on_the_way() -> None:
    terms = torch.full((1, 4096), 1.0)
    terms[0, 0] = 256.0
    # 256 + 1 is a tie of BF16 that goes to the even 256: the thread of the first 32 adds nothing to it.
    assert summed(terms, "bf16").item() == 256 + 4096 - 32
    assert summed(terms, "fp32").item() == 256 + 4095
    assert torch.equal(summed(terms[:, :5], "bf16"), torch.tensor([256.0]))
