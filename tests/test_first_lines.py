"""The first lines of ``probe``, ``check`` and the other commands: OK or what is wrong, how sure, and what to run next.

Defects are planted in a float64 attention with one rounding at its end, which is otherwise right; snapshots hold what
is said of each at 80 and 120 columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from command_line import Run
from rich.cells import cell_len
from snapshots import require_unchanged
from torch import Tensor

import attn_diag
from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference import format_of, round_nearest_even
from attn_diag.results.base import Result
from attn_diag.testing.suspects import sound

pytestmark = pytest.mark.slow

SHAPE = (2, 8, 96, 32)
BLOCK = 32
Fn = Callable[[Tensor, Tensor, Tensor], Tensor]
Change = Callable[[Tensor], Tensor]


def nearest(x: Tensor) -> Tensor:
    return round_nearest_even(x.contiguous(), format_of(torch.bfloat16))


def truncated(x: Tensor) -> Tensor:
    return round_to(x, parse("bf16:toward-zero"), 0)


def kernel(
    *, scale: float | None = None, seen: Callable[[int], Tensor] | None = None, probs: Change = nearest,
    row_sum: Change = lambda p: p.sum(-1, keepdim=True), out: Change = nearest,
) -> Fn:  # fmt: skip
    """FlashAttention-2's roundings in float64: P_bar is cast for PV, l is not; ``seen(T)``: a mask [T, T]."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if seen is not None:
            scores = scores.masked_fill(~seen(q.shape[2]), -math.inf)
        p = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
        return out(probs(p) @ v.double() / row_sum(p).clamp(min=1e-30)).bfloat16()

    return attention


def summed_in_bf16(p: Tensor) -> Tensor:
    """Over tiles of 16 keys."""
    total = torch.zeros_like(p[..., :1])
    for tile in torch.split(p, 16, -1):
        total = nearest(total + tile.sum(-1, keepdim=True))
    return total


def band(behind: int, ahead: int) -> Callable[[int], Tensor]:
    return lambda t: torch.ones(t, t, dtype=torch.bool).triu(-behind).tril(ahead)


def without_last_block(t: int) -> Tensor:
    return (torch.arange(t) < (t - 1) // BLOCK * BLOCK).expand(t, t)


def with_nan_in_row_3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = kernel()(q, k, v)
    o[:, :, 3] = math.nan
    return o


def without_row_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp of scores in FP16 overflows at 11.1."""
    p = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).exp().half().float()
    o: Tensor = (p @ v.float() / p.sum(-1, keepdim=True)).bfloat16()
    return o


def of_heads_and_rows_swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o: Tensor = kernel()(q, k, v).transpose(1, 2).contiguous()
    return o


def of_mixed_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).reshape(x.shape) for x in (q, k, v))
    return kernel()(q, k, v)


def hiding_by(value: float) -> Fn:
    """Causal, with a mask that adds a number."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        s = s + torch.full_like(s[0, 0], value).triu(1)
        return round_nearest_even((s.softmax(-1) @ v.double()).contiguous(), format_of(q.dtype)).to(q.dtype)

    return attention


# Planted kernel, the outcome, and what the first line must say.
PLANTED: dict[str, tuple[Fn, str, str]] = {
    "healthy": (kernel(), "ok", "it rounds as a sound kernel does"),
    "causal": (kernel(seen=band(10**6, 0)), "other-function", "it uses a causal mask (top-left) where none was asked"),
    "causal-off-by-one": (kernel(seen=band(10**6, 1)), "fail", "row t see keys 0 to t+1, a causal mask shifted ahead"),
    "scale-1-over-D": (kernel(scale=1 / SHAPE[3]), "other-function", "it scales by 0.03125 (1/D), not 0.176777"),
    "scale-1-over-root-33": (kernel(scale=33**-0.5), "fail", "it scales by 0.174078 (1/sqrt(33)), not 0.176777"),
    "window": (kernel(seen=band(31, 0)), "other-function", "sees a window: 31 keys back"),
    "window-shifted": (kernel(seen=band(32, -1)), "fail", "keys t-32 to t-1, a window of 32 keys shifted back by one"),
    "last-block-dropped": (kernel(seen=without_last_block), "fail", "it never sees keys 64-95 of 96"),
    "layout": (of_heads_and_rows_swapped, "other-function", "takes q, k, v as [B, T, H, D], not [B, H, T, D]"),
    "heads-mixed": (of_mixed_heads, "fail", "it mixes heads"),
    "probs-truncated": (kernel(probs=truncated), "fail", "the cast of P̄ truncates"),
    "out-truncated": (kernel(out=truncated), "fail", "the last cast of O truncates"),
    "row-sum-bf16": (kernel(row_sum=summed_in_bf16), "fail", "the row sum l"),
    "nan-in-a-row": (with_nan_in_row_3, "fail", "NaN or Inf in row 3"),
    "nan-everywhere": (lambda q, k, v: q * math.nan, "fail", "NaN or Inf in every element"),  # noqa: ARG005
    "no-row-maximum": (without_row_maximum, "fail", "NaN or Inf"),
    "zeros": (lambda q, k, v: q * 0, "fail", "all rows are zero, as if never written"),  # noqa: ARG005
}  # fmt: skip


def named(name: str) -> Fn:
    """It is called its name in the report."""
    return PLANTED[name][0]


@cache
def probed(name: str) -> attn_diag.ProbeReport:
    return attn_diag.probe(named(name), shape=SHAPE, device="cpu", name=f"planted:{name}")


@cache
def checked(name: str) -> attn_diag.CheckReport:
    cases = ["normal", "large-logits"]
    return attn_diag.check(named(name), cases=cases, head_dim=SHAPE[3], device="cpu", backward=False,
                            name=f"planted:{name}")  # fmt: skip


def first_lines(found: Result, width: int) -> list[str]:
    """The lines above the report's first empty one."""
    lines = found.report(width).splitlines()
    assert max(map(cell_len, lines)) <= width
    return lines[: next(i for i, line in enumerate(lines) if not line.strip())]


def sentences(lines: list[str]) -> list[str]:
    """Wrapped lines joined: what begins further to the left begins a sentence of its own."""
    joined = " ".join(" ".join(lines).split())
    return joined.split(" Next: ")


@pytest.mark.parametrize("name", PLANTED)
def test_probe_says_what_is_wrong_how_sure_and_what_next(name: str) -> None:
    _, outcome, words = PLANTED[name]
    found = probed(name)
    assert found.outcome == outcome, found.report()
    for width in (80, 120):
        lines = first_lines(found, width)
        first = sentences(lines)[0]
        assert first.startswith("OK planted:" if outcome == "ok" else f"FAIL planted:{name} ({found.certainty}): ")
        assert words.partition(" (")[0] in first or words in first, first
        assert len(sentences(lines)) == 2, "one command to run next"
        require_unchanged(f"probe-{name}-{width}", "\n".join(lines) + "\n")
    # Beyond a wrong function nothing is probed, and 40 lines about another one are not printed.
    if found.assumptions.words is not None:
        assert not found.findings
        assert len(found.report(80).splitlines()) < 20
    assert attn_diag.ProbeReport.from_json(found.to_json()) == found


@pytest.mark.parametrize("name", [n for n in PLANTED if n not in ("layout", "heads-mixed")])
def test_check_says_what_is_wrong_how_sure_and_what_next(name: str) -> None:
    """(Its suite has one head, of which rows and heads cannot be mixed up.)"""
    _, outcome, words = PLANTED[name]
    found = checked(name)
    assert found.passed == (outcome == "ok"), found.report()
    words = {"healthy": "as good as a well-rounded kernel", "last-block-dropped": "never sees keys 160-191"}.get(
        name, words
    )
    for width in (80, 120):
        lines = first_lines(found, width)
        first = sentences(lines)[0]
        assert first.startswith("OK planted:" if outcome == "ok" else f"FAIL planted:{name} (")
        assert words.split(" in ")[0].partition(" (")[0] in first, first
        require_unchanged(f"check-{name}-{width}", "\n".join(lines) + "\n")


def test_the_command_that_is_printed_is_right() -> None:
    """What a wrong function is told to run next probes it as what it is."""
    for name, options in (("causal", {"causal": "top-left"}), ("scale-1-over-D", {"scale": 1 / SHAPE[3]})):
        told = str(probed(name).next)
        for option, value in options.items():
            assert f"--{option} {value}" in told or f"{option}={value!r}" in told, told
        found = attn_diag.probe(named(name), shape=SHAPE, device="cpu", probes=["normal", "ramp"], **options)
        assert found.outcome == "ok", found.report()
    near = attn_diag.probe(named("scale-1-over-root-33"), shape=SHAPE, device="cpu", scale=33**-0.5, probes=["normal"])
    assert near.outcome == "ok"


@pytest.mark.parametrize("value", [-0.3, -9.0, -20.0])
def test_a_mask_that_adds_a_number_is_no_sink(value: float) -> None:
    """Of -9 a few first rows look like a sink's; of -20 O is right but in probes with a V of unit vectors."""
    few = ["unit-vectors", "normal"]
    found = attn_diag.probe(hiding_by(value), shape=SHAPE, causal="top-left", device="cpu", probes=few)
    assert found.suspect is not None
    assert found.suspect.startswith(f"it hides keys by adding {value:g} to their scores"), found.report()


def test_hidden_keys_are_told_from_a_shifted_mask() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.double() @ k.double().mT * q.shape[-1] ** -0.5 + torch.full_like(q[0, 0] @ k[0, 0].mT, -5.0).triu(2)
        return nearest(s.softmax(-1) @ v.double()).to(q.dtype)

    found = attn_diag.probe(both, shape=SHAPE, causal="top-left", device="cpu", probes=["normal"])
    assert "one key" not in str(found.suspect)
    assert "keys 0 to t+1" in str(found.suspect)
    assert "hides keys by adding -5 to their scores" in str(found.suspect)


def test_a_change_that_makes_no_kernel_worse_is_known() -> None:
    assert all(sound(words, 384) for words in ("P̄ is not cast", "tiles of 32 keys", "keys in reversed order"))
    assert not any(sound(words, 384) for words in ("the cast of P̄ truncates", "l sums the cast P̄"))


def test_an_uncast_p_is_no_culprit() -> None:
    """In FP16 a mask of -20 shows in no O that can be asked for, and P is rightly not cast."""
    fn = hiding_by(-20.0)
    found = attn_diag.probe(fn, causal="top-left", dtype=torch.float16, device="cpu", probes=["outliers"])
    assert found.outcome == "fail"
    assert str(found.suspect).startswith("O is further off than its roundings allow"), found.report()


@pytest.mark.parametrize("target", ["sdpa", "sdpa:math", "fa2", "cudnn", "flex", "lowp-row-sum"])
@pytest.mark.parametrize("causal", ["none", "top-left"])
def test_healthy_kernels_are_ok(target: str, causal: str) -> None:
    found = attn_diag.probe(target, shape=SHAPE, causal=causal, device="cpu")
    assert found.outcome == "ok", found.report()
    assert found.suspect is None
    if target == "fa2":
        assert any(said.startswith("Normal: l sums P̄ before its cast") for said in found.normal)


MODULE = """
import torch
def causal(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
def nan(q, k, v):
    return torch.full_like(q, float("nan"))
def nan_in_a_row(q, k, v):
    o = causal(q, k, v).clone()
    o[:, :, 3] = float("nan")
    return o
def broken(q, k, v):
    return -causal(q, k, v)
def raises(q, k, v):
    return {}[0]
"""


def test_exit_codes_and_targets(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first_lines_kernels.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def probe(target: str, *options: str) -> tuple[int, str, str]:
        small = ("--shape", "2,8,48,16", "--probes", "normal,ramp,sign", "--device", "cpu")
        return run("probe", target, *small, *options)

    code, out, _ = probe("sdpa:flash")
    assert (code, out.splitlines()[0][:14]) == (0, "OK sdpa:flash:")
    assert probe("sdpa:nothing")[0] == 2
    code, out, err = probe("first_lines_kernels:causal")
    assert code == 2
    assert "--causal top-left" in " ".join(out.split())
    assert "no verdict" in err
    assert probe("first_lines_kernels:causal", "--causal", "top-left")[0] == 0
    for target in ("nan", "nan_in_a_row"):
        code, out, _ = probe(f"first_lines_kernels:{target}", "--causal", "top-left")
        assert (code, "NaN or Inf" in out.splitlines()[0]) == (1, True), out
    code, out, _ = probe("first_lines_kernels:broken", "--causal", "top-left", "--plain")
    assert (code, out.splitlines()[0]) == (1, "FAIL first_lines_kernels:broken (certain): it returns an O of which all "
                                              "rows have the wrong sign")  # fmt: skip
    assert probe("first_lines_kernels:raises")[0] == 2
    check = ("--cases", "normal,pairs", "--no-backward", "--device", "cpu")
    code, out, _ = run("check", "first_lines_kernels:causal", *check)
    assert code == 1
    assert "Next: attn-diag check first_lines_kernels:causal --causal top-left" in " ".join(out.split())
    assert run("check", "first_lines_kernels:causal", *check, "--causal", "top-left")[0] == 0
    code, out, _ = run("check", "first_lines_kernels:causal", *check, "--json", "-")
    assert [case["name"] for case in json.loads(out)["cases"]] == ["normal"], "beyond a wrong function it stops"
