"""Attention of fields other than language models, in plain torch: it is seen, named, and not accused of what it does.

DETR's decoder, whose queries all hold the same at its beginning; WavLM's separate projections; DeBERTa-v2's and
Perceiver's own products; biases that T5, Swin and AlphaFold's triangles add to scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted_heads import inputs, named, rounded
from torch import Tensor, nn
from torch.nn import functional

import attn_diag
from attn_diag import Monitor
from attn_diag.reference import AttentionHead, Masking
from attn_diag.reports.opening import opening

WIDTH, HEADS = 32, 2


def split(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], HEADS, -1).transpose(1, 2)


class Projected(nn.Module):
    """What the modules below share: an output projection, and a loss that pulls its rows apart."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in (*names, "out"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def made(self, name: str, x: Tensor) -> Tensor:
        found: Tensor = self.get_submodule(name)(x)
        return found


class ObjectQueries(Projected):
    """DETR's first self-attention: q and k have the queries' positions, and v, of what they hold, is one row."""

    def __init__(self) -> None:
        super().__init__("q_proj", "k_proj", "v_proj")
        self.positions = nn.Parameter(torch.randn(10, WIDTH))

    def forward(self, held: Tensor) -> Tensor:
        placed = held + self.positions
        q, k, v = (split(self.made(f"{n}_proj", x)) for n, x in (("q", placed), ("k", placed), ("v", held)))
        return self.made("out", functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def train(model: nn.Module, x: Tensor, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    goal = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        torch.autograd.backward((model(x).float() - goal).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def test_a_gradient_that_vanishes_raises_no_alarm() -> None:
    torch.manual_seed(0)
    model = ObjectQueries().bfloat16()
    held = torch.randn(1, 1, WIDTH).expand(2, 10, WIDTH).bfloat16()
    with Monitor(model, every=1) as monitor:
        train(model, held)
        found = monitor.metrics(wait=True)
    assert not monitor.alarms  # it was off by 1e12 times its size
    assert found["attn/conditioning/max"] > 1e12
    assert not {f"attn/{name}/max" for name in ("dq_error", "dq_share", "dw_q_share")} & found.keys()
    assert found["attn/dv_error/max"] < 0.01
    table = monitor.table()
    assert "nan" not in table
    assert max(map(len, table.splitlines())) < 100


def test_no_size_is_given_of_a_gradient_that_vanishes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with attn_diag.capture(model := ObjectQueries().bfloat16(), tmp_path, batch=None):
        train(model, torch.randn(1, 1, WIDTH).expand(6, 10, WIDTH).bfloat16(), steps=1)
    told = [line.said for line in opening(attn_diag.inspect(tmp_path))]
    assert told
    assert not any("times its size" in line for line in told)  # "the gradient dQ is up to 6.47e+12 times its size off"


class Separate(Projected):
    """WavLM's: projections of its own through torch's function, with an empty packed weight, and a gated bias."""

    def __init__(self) -> None:
        super().__init__("q_proj", "k_proj", "v_proj")

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        q, k, v, out = (self.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj", "out"))
        found, _ = functional.multi_head_attention_forward(
            x, x, x, WIDTH, HEADS, torch.empty([0]), torch.cat([q.bias, k.bias, v.bias]),  # type: ignore[list-item]
            None, None, False, 0.0, out.weight, out.bias, self.training, need_weights=True,  # type: ignore[arg-type]
            use_separate_proj_weight=True, q_proj_weight=q.weight, k_proj_weight=k.weight,  # type: ignore[arg-type]
            v_proj_weight=v.weight,  # type: ignore[arg-type]
        )  # fmt: skip
        return found.transpose(0, 1)


def test_separate_projections_of_torchs_function_are_captured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Separate()
    with attn_diag.capture(model, tmp_path) as recorder:
        train(model, torch.randn(2, 12, WIDTH), steps=1)
    capture = attn_diag.load(recorder.written[0])  # it was: w_q must have shape [D * heads, C], got [0]
    tensors = {name: stored[...] for name, stored in capture.tensors.items()}
    assert not recorder.dropped
    # q is what torch's function multiplies with the scale, x w_q^T but for a bias, which is the same in all rows.
    q = tensors["q"][0].transpose(0, 1).flatten(1)
    constant = q - tensors["x"][0] @ tensors["w_q"].T
    torch.testing.assert_close(constant, constant[:1].expand_as(constant), atol=1e-6, rtol=1e-5)


class Disentangled(Projected):
    """DeBERTa-v2's names."""

    def __init__(self) -> None:
        super().__init__("query_proj", "key_proj", "value_proj")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(self.made(name, x)) for name in ("query_proj", "key_proj", "value_proj"))
        probs = functional.softmax(q @ k.mT / 4 + (q @ q.mT).roll(1, -1) / 7, -1)
        return self.made("out", (probs @ v).transpose(1, 2).flatten(2))


class Latents(Projected):
    """Perceiver's: its softmax is a module made in the forward."""

    def __init__(self) -> None:
        super().__init__("query", "key", "value")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(self.made(name, x)) for name in ("query", "key", "value"))
        probs = nn.Softmax(dim=-1)(q @ k.mT / 4)
        return self.made("out", (probs @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [Disentangled, Latents])
def test_their_own_products_are_named(
    kind: Callable[[], nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind())
    with attn_diag.capture(model, tmp_path):
        train(model, torch.randn(2, 12, WIDTH), steps=1)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "attn_diag"]
    assert f"not seen in these, which train: 0, 1 ({kind.__name__})" in said


def biased(scale: float = 32**-0.5, rows: int = 64) -> AttentionHead:
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(2 * rows - 1, generator=generator).bfloat16().double()
    at = torch.arange(rows)
    return inputs(rows=rows, masking=Masking("none", mask=bias[at[None] - at[:, None] + rows - 1]), scale=scale)


def words(head: AttentionHead, quantity: str, observed: Tensor) -> str:
    found, _ = named(head, quantity, rounded(observed))  # type: ignore[arg-type]
    return "" if found is None else found.words


@pytest.mark.parametrize(
    ("scores", "mask", "said"),
    [
        (1.0, 2.0, "a factor of 2 on the mask gives"),
        (1.0, 0.4, "a factor of 0.4 on the mask gives"),
        (0.1, 0.1, "a factor of 0.1 on scores and mask together gives"),
        (32**-0.5, 32**-0.5, "a factor of 0.177 (1/sqrt(D)) on scores and mask together gives"),
    ],
)
def test_a_factor_of_a_bias_is_named(scores: float, mask: float, said: str) -> None:
    head = biased(1.0 if scores == 32**-0.5 else 32**-0.5)
    assert head.masking.mask is not None
    added = scores * head.scale * head.q @ head.k.T + mask * head.masking.mask
    assert f"all rows are what {said}" in words(head, "o", added.softmax(-1) @ head.v)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_small_is_not_named_by_another_small_thing(seed: int) -> None:
    head = inputs(rows=40, width=16, seed=seed, masking=Masking("none"))
    assert head.do is not None
    head = replace(head, q=(0.3 * head.q).bfloat16().double(), do=(head.do[:1] + 0.3 * head.do).bfloat16().double())
    assert head.do is not None
    probs = (head.scale * head.q @ head.k.T).relu() / 40  # dV was "use L in base 2 as if it were natural"
    said = words(head, "dv", probs.T @ head.do)
    assert said.startswith("all keys are")
    assert "off" in said


class BiasedAttention(Projected):
    """T5's: in a graph a learned bias makes SDPA products; q is no linear layer's output, so that none tells whose."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__("q_proj", "k_proj", "v_proj")
        self.bias = nn.Parameter(torch.randn(1, HEADS, 12, 12)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(self.made(f"{n}_proj", x)) for n in "qkv")
        found = functional.scaled_dot_product_attention(q.square().cumsum(2), k, v, attn_mask=self.bias)
        return self.made("out", found.transpose(1, 2).flatten(2))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_of_fewer_calls_than_modules_names_none_of_them_wrongly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(BiasedAttention(bias=bias) for bias in (True, True, False, False)))
    with attn_diag.capture(model, tmp_path, steps=[0, 2]) as recorder:
        train(torch.compile(model, backend="aot_eager"), torch.randn(2, 12, WIDTH), steps=3)  # type: ignore[arg-type]
    found = [attn_diag.load(path).metadata for path in recorder.written]
    # They were 0 and 1, the ones with a bias, at step 0, and at step 2 4 and 0.
    assert sorted((one.step, one.layer) for one in found) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert not {one.extra.get("module") for one in found} & {"0", "1", "2", "3"}


@pytest.mark.usefixtures("fresh_compiler")
def test_what_a_compiled_function_runs_is_not_said_to_call_no_attention(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(BiasedAttention(bias=True))
    run = torch.compile(lambda x: model(x), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with attn_diag.capture(model, tmp_path):
        torch.autograd.backward(run(torch.randn(2, 12, WIDTH)).square().mean())
        optimizer.step()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "attn_diag"]
    assert "which train: 0 (BiasedAttention); in eager code it calls no attention function" in said
    assert "or, if what is compiled runs it, in a compiled graph SDPA is seen where a fused kernel does it" in said
