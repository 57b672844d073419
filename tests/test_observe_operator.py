"""Operators that users declare by name: captured in eager code and in compiled graphs; what is wrong is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds
from tiny_models import same, written
from torch import Tensor, nn

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.watching.live import kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler
QUANTITIES = {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv", "x", "w_q"}
HEADS, WIDTH, LENGTH = 4, 32, 20
RAN: list[list[Tensor]] = []


def hidden(queries: Tensor, keys: Tensor) -> Tensor:
    return (
        torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool)
        .tril(keys.shape[1] - queries.shape[1])
        .logical_not()
    )


@torch.library.custom_op("attn_diag_tests::attention", mutates_args=())
def attention(queries: Tensor, keys: Tensor, values: Tensor, triangular: bool, alpha: float) -> tuple[Tensor, Tensor]:
    """[B, T, H, D]; O comes second."""
    q, k, v = (t.transpose(1, 2) for t in (queries, keys, values))
    scores = q @ k.mT * alpha
    if triangular:
        scores = scores.masked_fill(hidden(queries, keys), -torch.inf)
    lse = scores.logsumexp(-1)
    return lse, ((scores - lse[..., None]).exp() @ v).transpose(1, 2).contiguous()


@attention.register_fake
def _(queries: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _width = queries.shape
    return queries.new_empty(batch, heads, rows), torch.empty_like(queries)


@torch.library.custom_op("attn_diag_tests::attention_grad", mutates_args=())
def attention_grad(
    upstream: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    o: Tensor,
    lse: Tensor,
    triangular: bool,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dV comes first."""
    q, k, v, out, do = (t.transpose(1, 2) for t in (queries, keys, values, o, upstream))
    probs = (q @ k.mT * alpha - lse[..., None]).exp()
    if triangular:
        probs = probs.masked_fill(hidden(queries, keys), 0.0)
    ds = probs * (do @ v.mT - (do * out).sum(-1, keepdim=True))
    found = [t.transpose(1, 2).contiguous() for t in (probs.mT @ do, alpha * ds @ k, alpha * ds.mT @ q)]
    RAN.append([t.clone() for t in (upstream, *found)])
    return found[0], found[1], found[2]


@attention_grad.register_fake
def _(_: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(queries), torch.empty_like(keys)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], output[1], output[0])
    ctx.options = inputs[3:]


def _back(ctx: Any, _: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
    dv, dq, dk = attention_grad(upstream.contiguous(), *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, None, None


attention.register_autograd(_back, setup_context=_keep)


@torch.library.custom_op("attn_diag_tests::scores", mutates_args=())
def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


@torch.library.custom_op("attn_diag_tests::forward_alone", mutates_args=())
def forward_alone(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None = None) -> Tensor:
    scores = query @ key.mT * 0.5
    return (scores if slopes is None else scores * slopes).softmax(-1) @ value


_library: Any = torch.library.Library("attn_diag_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("taken_apart(Tensor q, Tensor k, Tensor v) -> Tensor")
_library.impl("taken_apart", lambda q, k, v: (q @ k.mT).softmax(-1) @ v, "CompositeImplicitAutograd")


@pytest.fixture(autouse=True)
def _nobodys() -> Iterator[None]:
    """Declarations end with their test."""
    torch._dynamo.reset()
    before = dict(kernels._declared)
    RAN.clear()
    yield
    kernels._declared.clear()
    kernels._declared.update(before)


def declare(**changed: Any) -> None:
    options: dict[str, Any] = {
        "backward": "attn_diag_tests::attention_grad",
        "arguments": {
            "q": "queries", "k": "keys", "v": "values", "causal": "triangular", "scale": "alpha", "do": "upstream",
        },
        "returns": ("lse", "o"),
        "backward_returns": ("dv", "dq", "dk"),
        "layout": "BTHD",
        "causal": "bottom-right",
    }  # fmt: skip
    attn_diag.observe("attn_diag_tests::attention", **options | changed)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        _, o = attention(q, k, v, True, 0.4)
        result: Tensor = x + self.proj(o.flatten(2))
        return result


def train(watched: bool, compiled: bool, folder: Path) -> tuple[list[Tensor], list[Capture]]:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    x = torch.randn(2, LENGTH, WIDTH)
    run: Any = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = attn_diag.capture(model, folder, batch=None)
    bits = []
    if watched:
        recorder.start()
    for _ in range(3):
        loss = run(x).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        bits += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.zero_grad()
    if watched:
        recorder.close()
        assert not recorder.dropped
    return [*bits, *(p.detach().clone() for p in model.parameters())], written(recorder)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
def test_it_is_captured_and_trains_as_it_did(compiled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone, _ = train(False, compiled, tmp_path / "alone")
    declare()
    torch._dynamo.reset()
    RAN.clear()
    bits, found = train(True, compiled, tmp_path / "watched")
    assert same(alone, bits)
    assert [(c.metadata.step, c.metadata.extra["module"]) for c in found] == [(n, m) for n in range(3) for m in "01"]
    # The last layer goes back first.
    backwards = [RAN[at] for step in range(3) for at in (2 * step + 1, 2 * step)]
    for capture, (do, dv, dq, dk) in zip(found, backwards, strict=True):
        assert capture.tensors.keys() >= QUANTITIES
        assert capture.metadata.kernel == "attn_diag_tests::attention"
        assert (capture.metadata.causal, capture.metadata.scale) == ("bottom-right", 0.4)
        assert holds(capture)
        for name, theirs in {"do": do, "dq": dq, "dk": dk, "dv": dv}.items():
            assert torch.equal(capture.tensors[name][...], theirs.transpose(1, 2)), name
    assert not [record for record in caplog.records if record.name == "attn_diag"]


def test_a_capture_that_runs_sees_it_from_the_next_step_on(tmp_path: Path) -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        forward_alone(q, k, v)
        attn_diag.observe("attn_diag_tests::forward_alone", scale=0.5)
        recorder.end_step()
        forward_alone(q, k, v)
    (capture,) = written(recorder)
    assert capture.metadata.step == 1
    assert capture.metadata.scale == 0.5
    assert capture.metadata.causal == "none"
    assert capture.tensors.keys() >= {"q", "k", "v", "o"}
    assert holds(capture)


def test_what_is_not_known_of_it_is_refused_by_name(tmp_path: Path) -> None:
    attn_diag.observe("attn_diag_tests::forward_alone", scale=0.5)
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    with attn_diag.capture(None, tmp_path) as recorder:
        forward_alone(q, k, v, torch.ones(8, 8))
    assert list(recorder.dropped) == ["attention: slopes not supported"]


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no namespace": ("attention", {}, 'such as "namespace::name"'),
    "unknown": ("attn_diag_tests::nothing", {}, "no operator attn_diag_tests::nothing is registered: import"),
    "no v": ("attn_diag_tests::scores", {}, r"scores has no argument v; it has q, k: say which is v"),
    "no q": ("attn_diag_tests::attention", {}, r"no argument q; it has queries, keys, .*arguments=\{\"q\": "),
    "wrong q": (
        "attn_diag_tests::forward_alone", {"arguments": {"q": "queries"}}, "no argument queries; it has query, key",
    ),
    "wrong scale": (
        "attn_diag_tests::forward_alone", {"arguments": {"scale": "alpha"}}, "no argument alpha; there are query, key",
    ),
    "unknown word": (
        "attn_diag_tests::forward_alone", {"arguments": {"bias": "slopes"}}, "may say which argument is .*; got bias",
    ),
    "too few results": (
        "attn_diag_tests::forward_alone", {"returns": (None, "o")}, "returns 1 results, not None, o: say returns",
    ),
    "unknown result": (
        "attn_diag_tests::forward_alone", {"returns": ("o", "p")}, "returns must name results",
    ),
    "no o": ("attn_diag_tests::forward_alone", {"returns": ("lse",)}, 'returns must say which result is "o"'),
    "no backward": (
        "attn_diag_tests::forward_alone", {"backward": "attn_diag_tests::nothing"}, "no operator .*nothing",
    ),
    "a backward without o": (
        "attn_diag_tests::forward_alone", {"backward": "attn_diag_tests::scores"}, "scores has no argument o; it has",
    ),
    "taken apart": ("attn_diag_tests::taken_apart", {}, "taken apart into other operators"),
    "known": ("aten::_scaled_dot_product_flash_attention", {}, "known already"),
    "a ring": ("attn_diag_tests::forward_alone", {"ring": "zigzag"}, "ring is of functions"),
    "layout": ("attn_diag_tests::forward_alone", {"layout": "THD"}, "layout must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    name, options, message = WRONG[case]
    with pytest.raises(attn_diag.InputError, match=message):
        attn_diag.observe(name, **options)
    assert not kernels._declared


def test_a_function_has_no_backward_to_name() -> None:
    with pytest.raises(attn_diag.InputError, match="backward are of operators"):
        attn_diag.observe(backward="attn_diag_tests::attention_grad")  # type: ignore[call-overload]
