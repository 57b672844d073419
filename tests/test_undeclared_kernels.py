"""Published kernels below 16 bits that nobody declared are named by O's bits, with the command that judges them so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import Run
from torch import Tensor

from attn_diag import check, inspect, probe
from attn_diag.captures.capture import Capture
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking
from attn_diag.results.diagnosis import Diagnosis

T, D = 256, 64


def inputs(heads: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, T, D, generator=generator).bfloat16() for _ in range(4)]


def returned(names: list[str], *, backward: bool = False) -> dict[str, Tensor]:
    """What kernels return for a head each, and the inputs."""
    q, k, v, do = inputs(len(names))
    made = []
    for h, name in enumerate(names):
        q_, k_, v_, do_ = (t[0, h].double() for t in (q, k, v, do))
        head = AttentionHead(q_, k_, v_, do_ if backward else None, D**-0.5, Masking("none"))
        made.append(emulate_head(preset(name, "bf16", D), head))
    wanted = ("o", "lse", "dq", "dk", "dv") if backward else ("o",)
    outputs = {name: torch.stack([getattr(one, name) for one in made])[None] for name in wanted}
    found = {"q": q, "k": k, "v": v, **{n: t.float() if n == "lse" else t.bfloat16() for n, t in outputs.items()}}
    return found | ({"do": do} if backward else {})


def judged(made: dict[str, Tensor]) -> Diagnosis:
    q, k, v = (made.pop(name) for name in ("q", "k", "v"))
    return inspect(q, k, v, **made)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fa3-fp8", "sage2", "sage2-int4", "mxfp8-attention", "sage3"])
def test_it_is_named_whatever_its_error(name: str) -> None:
    """Of sage3 it was said that no known recipe reproduces its O, which no rounding makes."""
    found = judged(returned([name]))
    (finding,) = found.findings
    said = f"all rows have the bits of {name}, a kernel below 16 bits (100 % of those compared)."
    assert finding.words.endswith(said)
    assert finding.cause is not None
    assert finding.cause.kernel == name
    assert "p" in finding.formats
    text = " ".join(found.report().split())
    assert f'if it is meant to be {name}, hold it against that: inspect it with declared="{name}"' in text
    assert f"O as recipe {name} makes it" in text
    assert "no known recipe" not in text
    assert "rounding makes" not in text


def test_its_lse_and_gradients_too() -> None:
    found = judged(returned(["sage2"], backward=True))
    head = found.captures[0].observations[0].heads[0]
    named = {q.quantity: q.patterns[0].kernel for q in head.quantities if q.answer in ("lossy", "wrong")}
    assert named
    assert set(named.values()) == {"sage2"}


def test_another_head_is_not_said_to_be_that_kernels() -> None:
    (finding,) = judged(returned(["sage2", "sage2", "mxfp8-attention"])).findings
    assert finding.worst.head == 2
    assert finding.cause is not None
    assert finding.cause.kernel == "mxfp8-attention"
    assert [(cause.heads, "the bits of sage2" in cause.words) for cause in finding.otherwise] == [(2, True)]


def test_a_fault_beside_it_is_not_said_to_be_that_kernels() -> None:
    made = returned(["sage2"])
    made["o"] = 1.01 * made["o"]
    assert all(f.cause is None or f.cause.kernel is None for f in judged(made).findings)


def test_of_a_cache_more_is_told_by_its_format() -> None:
    (finding,) = judged(returned(["kv-int8"])).findings
    assert finding.cause is not None
    assert finding.cause.kernel is None
    assert finding.formats == {"k": "INT8", "v": "INT8"}


def test_the_next_command_judges_it_so(tmp_path: Path, run: Run) -> None:
    Capture(returned(["sage2"])).save(tmp_path / "call.safetensors")
    done = run("inspect", tmp_path / "call.safetensors", "--causal", "none", COLUMNS="200")
    following = next(line for line in done.out.splitlines() if line.startswith("Next"))
    assert following.split("attn-diag ")[1].split() == [
        "inspect", str(tmp_path / "call.safetensors"), "--head", "0", "--declared", "sage2",
    ]  # fmt: skip
    declared = run(*following.split("attn-diag ")[1].split(), "--causal", "none")
    assert declared.out.startswith("PASS")


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SageAttention 3, [B, H, T, D]."""
    recipe = preset("sage3", "bf16", q.shape[-1])
    heads = [
        AttentionHead(q_, k_, v_, None, q.shape[-1] ** -0.5, Masking("none"))
        for q_, k_, v_ in zip(*(t.double().flatten(0, 1) for t in (q, k, v)), strict=True)
    ]
    return torch.stack([emulate_head(recipe, head).o for head in heads]).reshape(q.shape).to(q.dtype)


def test_check_and_probe_say_how_to_declare_it() -> None:
    """It was "off softmax(scale Q K^T) V, which no rounding explains"."""
    checked, probed = check(kernel), probe(kernel, shape=(1, 1, 128, 64))
    for found in (checked, probed):
        text = " ".join(found.report().split())
        assert "it has the bits of sage3, a kernel below 16 bits" in text
        assert "Next: attn_diag.check(fn, declared='sage3'" in text
        assert "no rounding" not in text
