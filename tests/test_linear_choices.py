"""What kernels of linear attention round otherwise than a well-rounded one is named by its bits, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attn_diag
from attn_diag import LinearCapture
from attn_diag.analyses.linear.choices import FINER, Choices
from attn_diag.head.linear import LinearRun
from attn_diag.kernels.linear_inverse import inverse
from attn_diag.kernels.linear_products import rounded_to
from attn_diag.kernels.linear_recipe import CHOICES, RELEASED, LinearFormat, LinearRecipe
from attn_diag.results.linear import LinearQuantity
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded


def call(operator: str, steps: int = 256, size: int = 16) -> LinearRun:
    """A call with an initial state, without outputs."""
    given = rounded(linear_inputs(operator, (1, steps, 1, size, size), 3, kind=LONG))
    make = torch.Generator().manual_seed(1)
    given["initial_state"] = torch.randn(1, 1, size, size, generator=make) * 0.1
    given["do"] = torch.randn(1, steps, 1, size, generator=make).bfloat16()
    return LinearRun(LinearCapture.from_tensors(operator, given), torch.device("cpu"))


def judged(run: LinearRun, recipe: LinearRecipe) -> dict[str, LinearQuantity]:
    """What ``inspect_linear`` says of what a recipe returns for the first head, by quantity."""
    inputs = run.capture.tensors
    made = run.emulated(recipe)
    outputs = {n: made[n].to(inputs[n[1:]].dtype if n[1:] in inputs else torch.float32) for n in made}
    outputs["o"] = made["o"].to(inputs["v"].dtype)
    found = attn_diag.inspect_linear(replace(run.capture, tensors={**inputs, **outputs}), device="cpu")
    head = found.heads[0]
    return {q.quantity: q for q in head.quantities}


@pytest.mark.parametrize(
    ("operator", "changed", "quantity", "site"),
    [
        ("mamba2", {"stepped": "fp32"}, "o", "stepped"),
        ("gla", {"score_weights": "fp32"}, "dv", "score_weights"),
        ("simple_gla", {"decayed": "fp32", "state_gradient": "bf16"}, "dq", "decayed"),
        ("retention", {"operands": "fp32"}, "o", "operands"),
    ],
)
def test_what_is_kept_finer_is_named(operator: str, changed: dict[str, str], quantity: str, site: str) -> None:
    run = call(operator)
    found = judged(run, replace(run.recipe, chunk=64, **changed))  # type: ignore[arg-type]
    q = found[quantity]
    assert q.answer == "good"
    assert q.factor is not None
    assert q.factor < FINER
    assert q.cause is not None
    assert site in q.cause
    assert CHOICES[site] in q.words
    assert q.explained is not None
    assert q.explained > 0.9


def test_what_no_known_choice_makes_has_no_name() -> None:
    run = call("gla")
    # As if products were of 11 bits.
    q = judged(run, replace(run.recipe, operands="fp16"))["o"]
    assert q.factor is not None
    assert q.factor < FINER
    assert q.cause is None
    assert "its bits do not tell why" in q.words


def test_of_a_well_rounded_kernel_nothing_but_the_chunk_is_named() -> None:
    run = call("simple_gla")
    for q in judged(run, replace(run.recipe, chunk=32)).values():
        assert q.cause in (None, "chunk=32"), q.words


@pytest.mark.parametrize("operator", [*RELEASED])
def test_choices_change_roundings_alone(operator: str) -> None:
    """With nothing rounded each of them is the same mathematics."""
    run = call(operator, 96)
    exact = LinearRecipe(operands="fp32", out="fp32", gradients="fp32", chunk=32)
    fields = (
        "decayed", "state_gradient", "score_weights", "score_operands", "stepped", "new_values", "applied", "closing",
    )  # fmt: skip
    made = run.emulated(replace(exact, **dict.fromkeys(fields, "fp32")))  # type: ignore[arg-type]
    for name, true in run.reference.values.items():
        assert float((made[name] - true).norm() / true.norm()) < 2e-5, name


@pytest.mark.parametrize(
    ("given", "kept"), [(1 + 2**-10 + 2**-11, 1 + 2**-10), (-1 - 2**-10 - 2**-11, -1 - 2**-10), (1.5, 1.5), (0.0, 0.0)]
)
def test_tf32_is_cut_off(given: float, kept: float) -> None:
    assert rounded_to(torch.tensor([[given]]).mT, "tf32").item() == kept


@pytest.mark.parametrize("joined", ["tf32", "fp16"])
def test_an_inverse_of_rounded_blocks_is_one_but_for_rounding(joined: LinearFormat) -> None:
    lower = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)).tril(-1) * 0.1
    exact = (torch.eye(64) + lower.double()).inverse()
    formats: list[tuple[LinearFormat, float, float]] = [("fp32", 0.0, 1e-6), (joined, 1e-5, 2e-3)]
    for fmt, low, high in formats:
        made = inverse(lower, "fp32", fmt, False)
        assert low <= float((made - exact).norm() / exact.norm()) < high, fmt


@pytest.mark.parametrize("operator", ["rwkv7", "gated_delta_rule", "kda"])
def test_choices_are_sites_of_attribute_and_what_if(operator: str) -> None:
    run = call(operator, 96)
    known = run.released()[0]
    text = ",".join(["chunk=32", *(f"{site}={fmt}" for site, fmt in known.items())])
    (head,) = attn_diag.attribute_linear(run.capture, recipe=text, device="cpu").heads
    sites = {site.site: site for site in head.sites}
    coarse = {"rwkv7": {"log_steps", "closing"}, "gated_delta_rule": {"joined", "beta_keys"}}.get(operator, {"joined"})
    assert coarse <= set(sites)
    for quantity in head.totals:
        shares = sum(site.effects[quantity].share for site in head.sites)
        assert abs(shares + head.arithmetic[quantity] - 1) < 1e-6, quantity
        # With no site that rounds nothing is left but fp32's own.
        assert head.arithmetic[quantity] < 1e-3, quantity
    found = attn_diag.what_if_linear(run.capture, recipe=text, device="cpu")
    assert {f"{site}=fp32" for site in coarse} <= {one.name for one in found.candidates}


def test_a_step_that_is_off_is_not_put_down_to_roundings_that_are_there_too() -> None:
    given = rounded(linear_inputs("rwkv7", (1, 512, 1, 32, 32), 3))
    run = LinearRun(LinearCapture("rwkv7", given), torch.device("cpu"))
    o = run.emulated(replace(run.recipe, chunk=16, **run.released()[0]), forward=True)["o"]
    off = torch.zeros_like(o)
    off[0, 300, 0] = torch.randn(32, generator=torch.Generator().manual_seed(1))
    # A seventh of the squared error, so that the roundings are still the most of it.
    error = (o - run.reference.values["o"]).norm()
    spoilt = o + off / off.norm() * error * (0.14 / 0.86) ** 0.5
    for made, answer in ((o, "undecided"), (spoilt, "wrong")):
        found = attn_diag.inspect_linear(LinearCapture("rwkv7", {**given, "o": made.bfloat16()}), device="cpu")
        (q,) = found.heads[0].quantities
        assert q.answer == answer, q.words
        assert ("steps 300" in q.words) == (answer == "wrong")


def test_score_gradients_of_heads_that_share_keys_are_added_before_they_are_rounded() -> None:
    """mamba_ssm's own order: sum_h (do_h x_h^T) dt D in fp32, rounded once, times B."""
    given = rounded(linear_inputs("mamba2", (1, 32, 4, 16, 16), 5, key_heads=2))
    given["do"] = torch.randn(1, 32, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    run = LinearRun(LinearCapture("mamba2", given), torch.device("cpu"))
    known = run.released()[0]
    assert known["shared_scores"] == "bf16"
    q, k, v, do, dt = (given[n][0].transpose(0, 1).float() for n in ("q", "k", "v", "do", "dt"))
    log = (dt * given["A"][:, None]).cumsum(1)
    apart = (log[:, :, None] - log[:, None]).exp().tril()
    each = (do @ v.mT) * dt[:, None] * apart
    once = each.reshape(2, 2, 32, 32).sum(1).bfloat16().float()
    wanted = {"dq": once @ k, "dk": once.mT @ q}
    made = run.emulated(replace(run.recipe, chunk=32, **known))
    apart_each = run.emulated(replace(run.recipe, chunk=32, **{n: x for n, x in known.items() if n != "shared_scores"}))
    for name, value in wanted.items():
        bits = value.transpose(0, 1)[None].bfloat16()
        same, other = ((x[name] == bits.double()).double().mean() for x in (made, apart_each))
        assert same > 0.99
        assert other < 0.9
    # With nothing rounded it is the same mathematics; where it is, it is named.
    exact = LinearRecipe(operands="fp32", out="fp32", gradients="fp32", shared_scores="fp32", chunk=32)
    for name in wanted:
        true = run.reference.values[name]
        assert float((run.emulated(exact)[name] - true).norm() / true.norm()) < 2e-5, name
    assert "shared_scores=bf16" in str(judged(run, replace(run.recipe, chunk=32, **known))["dq"].cause)


@pytest.mark.parametrize(("explained", "named"), [(0.6, True), (0.999, False)])
def test_what_the_bits_tell_goes_before_a_factor_that_explains_less(explained: float, named: bool) -> None:
    run = call("gla", 96)
    made = run.emulated(replace(run.recipe, chunk=64, **run.released()[0]))["dv"]
    place, true = run.place("dv", 0), run.reference.values["dv"]
    assert place is not None
    off = made[place] + 0.02 * (made - true)[place]  # all but the emulation's bits: 99.96 % of the squared error
    words = "dV is 3 % off, which no rounding makes: it is 0.99 times what it should be, which explains 60 %."
    q = LinearQuantity("dv", "wrong", words, 0.03, 0.03, 1.2, (1.1, 1.3), "factor", explained, None, None)
    found = Choices(run).named(q, off, place)
    assert (found == q) == (not named), found.words
    if named:
        assert found.answer == "undecided"
        assert CHOICES["score_weights"] in found.words
        assert "0.99 times" not in found.words
        assert "which no rounding makes" not in found.words
