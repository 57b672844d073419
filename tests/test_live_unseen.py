"""What is not seen of a model's attention is said by name, once, with a line that works, and nothing of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LENGTH, WIDTH, Tiny, nano_gpt, tokens, transformer_encoder, transformers_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import attn_diag
from attn_diag.watching.live.recorder import Recorder
from attn_diag.watching.live.unseen import IN_A_FUNCTION

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler

WAYS = ("eager", "whole", "blocks")
SEEN = ("gpt2", "llama", "qwen3", "gemma", "olmo", "phi", "bert", "albert", "gpt_neox", "mistral")
CROSS = [f"decoder.block.{block}.layer.1.EncDecAttention" for block in (0, 1)]
SELF = [f"{part}.block.{block}.layer.0.SelfAttention" for part in ("encoder", "decoder") for block in (0, 1)]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, way: str) -> Any:
    if way == "whole":
        return torch.compile(model, backend="aot_eager")
    for layers in model.modules() if way == "blocks" else ():
        if isinstance(layers, nn.ModuleList):
            for block in layers:
                block.compile(backend="aot_eager")
    return model


def watched(model: nn.Module, loss: Callable[[Any], Tensor], run: Any, folder: Path, steps: int = 2) -> Recorder:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attn_diag.capture(model, folder) as recorder:
        for _ in range(steps):
            torch.autograd.backward(loss(run))
            optimizer.step()
            optimizer.zero_grad()
    return recorder


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "attn_diag"]


def modules(recorder: Recorder, step: int = 0) -> list[str]:
    found = [attn_diag.load(path).metadata for path in recorder.written]
    return sorted(c.extra["module"] for c in found if c.step == step)


def t5(encoder_alone: bool = False) -> Tiny:
    import transformers

    shape: dict[str, Any] = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    ids: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(**shape, **ids, dropout_rate=0.0)
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)

    def loss(run: Any) -> Tensor:
        if encoder_alone:
            states: Tensor = run.encoder(input_ids=tokens()).last_hidden_state
            return states.square().mean()
        result: Tensor = run(input_ids=tokens(), labels=tokens()).loss
        return result

    return Tiny(model, loss, (*SELF, *CROSS))


@pytest.fixture
def _attention_of_t5() -> Iterator[None]:
    """The class is as it was afterwards."""
    from transformers.models.t5.modeling_t5 import T5Attention

    before = T5Attention.forward
    yield
    T5Attention.forward = before  # type: ignore[method-assign]


@pytest.mark.usefixtures("_attention_of_t5")
@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_four_of_six_are_named_and_the_line_shows_them(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T5's bias needs a gradient: SDPA is taken apart then."""
    tiny = t5()
    recorder = watched(tiny.model, tiny.loss, compiled(tiny.model, way), tmp_path / "before", steps=3)
    (said,) = words(caplog)
    names = said.split("train: ")[1].split(" (T5Attention)")[0]
    assert sorted(names.split(", ")) == sorted(SELF)
    # The two that are seen have their own names from the first step on, not those of the first two modules.
    assert modules(recorder) == modules(recorder, 2) == CROSS
    caplog.clear()
    torch._dynamo.reset()
    tiny = t5()
    exec(said.rsplit(": ", 1)[1], {"model": tiny.model, "torch": torch})
    recorder = watched(tiny.model, tiny.loss, compiled(tiny.model, way), tmp_path / "after")
    assert modules(recorder) == sorted([*SELF, *CROSS])
    assert not words(caplog)


def test_what_does_not_run_is_not_called_unseen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The decoder is there, and nobody calls it."""
    tiny = t5(encoder_alone=True)
    recorder = watched(tiny.model, tiny.loss, tiny.model, tmp_path / "eager")
    assert modules(recorder) == SELF[:2]
    assert not words(caplog)
    tiny = t5(encoder_alone=True)
    watched(tiny.model, tiny.loss, compiled(tiny.model, "blocks"), tmp_path / "blocks")
    (said,) = words(caplog)
    assert "no attention call was seen" in said
    assert all(name in said for name in SELF[:2])
    assert "decoder" not in said


# Blocks of all these are compiled alike.
@pytest.mark.parametrize(
    ("kind", "way"), [(kind, way) for kind in SEEN for way in WAYS if way != "blocks" or kind in ("gpt2", "bert")]
)
def test_nothing_is_said_where_all_are_seen(
    kind: str, way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = transformers_model(kind, "sdpa")
    recorder = watched(tiny.model, tiny.loss, compiled(tiny.model, way), tmp_path)
    assert recorder.written
    assert not words(caplog)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [nano_gpt, transformer_encoder])
def test_nor_of_torchs_own(
    make: Callable[[], Tiny], way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = make()
    assert watched(tiny.model, tiny.loss, compiled(tiny.model, way), tmp_path).written
    assert not words(caplog)


@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_eager_attention_in_a_graph(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = transformers_model("gpt2", "eager")
    watched(tiny.model, tiny.loss, compiled(tiny.model, way), tmp_path / "before")
    (said,) = words(caplog)
    assert all(name in said for name in tiny.attentions)
    caplog.clear()
    torch._dynamo.reset()
    tiny = transformers_model("gpt2", "eager")
    exec(said.rsplit(": ", 1)[1], {"model": tiny.model})
    recorder = watched(tiny.model, tiny.loss, compiled(tiny.model, way), tmp_path / "after")
    assert modules(recorder) == list(tiny.attentions)
    assert not words(caplog)


# Models of our own: of each layer's attention it is said how it attends.


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o: Tensor = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    return o


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


class OwnAttention(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(WIDTH, 3 * WIDTH), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


class PlainAttention(OwnAttention):
    """A class of its own, whose code says that it attends."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: plain(q, k, v))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + plain(q, k, v).transpose(1, 2).flatten(2)


class ChannelAttention(nn.Module):
    """Weighs features: none of ours, whatever its name."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gates: Tensor = self.excite(self.squeeze(x.mean(1, keepdim=True)).relu()).softmax(-1)
        return x * gates


class LinearAttention(OwnAttention):
    """Without a softmax over keys."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: q.sigmoid() @ (k.sigmoid().mT @ v))


class AttentionBlock(nn.Module):
    """Attention only where it is asked for."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.qkv, self.mlp, self.attends = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), attends

    def forward(self, x: Tensor) -> Tensor:
        if self.attends:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = x + fused(q, k, v).transpose(1, 2).flatten(2)
        result: Tensor = self.mlp(x)
        return result


def stack(*layers: nn.Module) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH)
    return nn.Sequential(*layers), lambda run: run(x).square().mean()


def test_own_attention_beside_one_that_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, loss = stack(OwnAttention(fused), PlainAttention(), OwnAttention(plain))
    recorder = watched(model, loss, model, tmp_path, steps=4)
    assert modules(recorder) == ["0"]
    said = sorted(words(caplog))
    assert len(said) == 2
    assert "train: 1 (PlainAttention)" in said[0]
    assert "train: 2 (OwnAttention)" in said[1]
    assert all("@attn_diag.observe" in one and "compile" not in one for one in said)


class Softmax(nn.Module):
    """As vit-pytorch has it: a fused projection, and softmax is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.attend = nn.Linear(WIDTH, 3 * WIDTH), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))
        result: Tensor = (self.attend(q @ k.mT) @ v).transpose(1, 2).flatten(2)
        return result


class Attend(nn.Module):
    """As x-transformers has it: without parameters, fused or not."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash = flash

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused(q, k, v) if self.flash else (q @ k.mT).softmax(-1) @ v


class Projecting(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attend = Attend(flash)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        result: Tensor = self.attend(q, k, v).transpose(1, 2).flatten(2)
        return result


@pytest.mark.parametrize("way", ["eager", "whole"])
def test_a_class_of_another_name_and_a_core_without_parameters(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, loss = stack(OwnAttention(fused), Softmax(), Projecting(True), Projecting(False))
    watched(model, loss, compiled(model, way), tmp_path)
    said = words(caplog)
    if way == "eager":
        assert [one.split("train: ")[1].split(";")[0] for one in said] == ["3 (Projecting)", "1 (Softmax)"]
    else:
        assert all("seen in 1 alone of these" in one for one in said)
        assert {"1 (Softmax)", "2, 3 (Projecting)"} == {one.split("train: ")[1].split(";")[0] for one in said}


@pytest.mark.parametrize("way", ["eager", "whole"])
def test_observe_shows_it(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, loss = stack(OwnAttention(fused), OwnAttention(plain))
    watched(model, loss, compiled(model, way), tmp_path / "before")
    (said,) = words(caplog)
    caplog.clear()
    torch._dynamo.reset()
    observed = attn_diag.observe(plain)
    if way == "whole":
        assert "@torch.compiler.disable above @attn_diag.observe" in said
        observed = torch.compiler.disable(observed)  # type: ignore[no-untyped-call]
    model, loss = stack(OwnAttention(fused), OwnAttention(observed))
    assert modules(watched(model, loss, compiled(model, way), tmp_path / "after")) == ["0", "1"]
    assert not words(caplog)


def test_one_of_blocks_that_are_compiled_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their class says nothing; the graph of the other one does."""
    model, loss = stack(OwnAttention(fused), OwnAttention(plain))
    for block in model:  # type: ignore[attr-defined]
        block.compile(backend="aot_eager")
    watched(model, loss, model, tmp_path)
    (said,) = words(caplog)
    assert "train: 1 (OwnAttention)" in said
    assert "@torch.compiler.disable above @attn_diag.observe" in said


@pytest.mark.parametrize("way", ["eager", "whole"])
def test_what_only_sounds_like_attention_is_left_alone(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, loss = stack(
        OwnAttention(fused), ChannelAttention(), LinearAttention(), AttentionBlock(True), AttentionBlock(False)
    )
    watched(model, loss, compiled(model, way), tmp_path, steps=4)
    assert not words(caplog)


def test_a_gradient_that_was_there_before_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor one of zeros: both are there for what did not run."""
    model, loss = stack(OwnAttention(fused), OwnAttention(plain))
    first = nn.Sequential(model[0])  # type: ignore[index]
    torch.autograd.backward(loss(model))
    watched(model, lambda _: loss(first), model, tmp_path / "stale", steps=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    watched(model, lambda _: loss(first), model, tmp_path / "zeros", steps=1)
    assert not words(caplog)
    watched(model, loss, model, tmp_path / "new", steps=1)
    assert "train: 1 (OwnAttention)" in caplog.text


def test_one_module_called_often_is_not_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Layers that share all weights, and two names of one module."""
    shared = OwnAttention(fused)
    model, loss = stack(shared, shared, shared)
    watched(model, loss, compiled(model, "whole"), tmp_path)
    assert not words(caplog)


class Recomputed(torch.autograd.Function):
    """Attention that keeps q, k and v alone, and is called once more in the backward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.save_for_backward(*given)
        return functional.scaled_dot_product_attention(*given)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            o = functional.scaled_dot_product_attention(*given)
        return torch.autograd.grad(o, given, do)


class RecomputedAttention(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv, self.function = nn.Linear(WIDTH, 3 * WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        o: Tensor = self.function(*(t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)))
        return o.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("seen", [False, True], ids=["a function", "a checkpoint"])
def test_an_attention_whose_backward_calls_another_is_named(
    seen: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def checkpointed(*given: Tensor) -> Any:
        return checkpoint(functional.scaled_dot_product_attention, *given, use_reentrant=False)

    model = nn.Sequential(*(RecomputedAttention(checkpointed if seen else Recomputed.apply) for _ in range(2)))
    recorder = watched(model, lambda run: run(torch.ones(2, LENGTH, WIDTH)).sum(), model, tmp_path)
    assert all(("dq" in attn_diag.load(path).tensors) == seen for path in recorder.written)
    assert words(caplog).count(f"0: {IN_A_FUNCTION}") == (not seen)
    assert caplog.text.count(IN_A_FUNCTION) == (not seen)


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return v * (q * k).sum(-1, keepdim=True) * g.exp()


def parallel_forgetting_attn(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return chunk_gla(q, k, v, g)


class Gated(nn.Module):
    """As flash-linear-attention's layers: no softmax, and a kernel of another module by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def given(self, x: Tensor) -> list[Tensor]:
        return [p(x).unflatten(-1, (4, -1)) for p in (self.q_proj, self.k_proj, self.v_proj, self.g_proj)]


class GatedLinear(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + chunk_gla(*self.given(x)).flatten(2)


class Forgetting(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + parallel_forgetting_attn(*self.given(x)).flatten(2)


def mamba2_chunk_scan(hidden_states: Tensor, B: Tensor, C: Tensor) -> Tensor:
    return hidden_states * (B * C).sum(-1, keepdim=True)


class Scanning(nn.Module):
    """As a Mamba-2 layer: no projection of queries, and a scan that is known by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_qkvz = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + mamba2_chunk_scan(*self.in_proj_qkvz(x).chunk(3, -1))


def chunk_rwkv6(r: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v * (r * k).sum(-1, keepdim=True)


class TimeMixing(nn.Module):
    """As a layer of RWKV: its queries are receptances."""

    def __init__(self) -> None:
        super().__init__()
        self.r_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + chunk_rwkv6(self.r_proj(x), self.k_proj(x), self.v_proj(x))


def run_rwkv6(r: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v * (r * k).sum(-1, keepdim=True)


def scripted() -> nn.Module:
    """As RWKV-LM's layers, whose forward TorchScript compiles."""

    script: Any = vars(torch.jit)["script_method"]

    class Scripted(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.receptance, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + run_rwkv6(self.receptance(x), self.key(x), self.value(x))

        forward = script(forward)

    return Scripted()


def mamba_selective_scan(hidden_states: Tensor, dt: Tensor) -> Tensor:
    return hidden_states * dt


class Selective(nn.Module):
    """As a Mamba-1 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + mamba_selective_scan(*self.in_proj(x).chunk(2, -1))


class Method(nn.Module):
    """As mambapy's, whose scan is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 2 * WIDTH)

    def selective_scan(self, x: Tensor, dt: Tensor) -> Tensor:
        return x * dt

    def forward(self, x: Tensor) -> Tensor:
        return x + self.selective_scan(*self.in_proj(x).chunk(2, -1))


class Lightning(OwnAttention):
    """As MiniMax's, whose own code is linear attention with decays."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: q @ (k.mT @ (v * self.decay)))
        self.decay = 0.5

    def forward(self, x: Tensor) -> Tensor:
        assert self.decay
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_layers_without_queries_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, loss = stack(Scanning(), TimeMixing(), scripted(), Selective(), Lightning(), Method())
    watched(model, loss, model, tmp_path)
    (said,) = set(words(caplog))
    assert f"0 (Scanning); it calls {__name__}.mamba2_chunk_scan (linear attention): attn_diag.capture_linear" in said
    neither = "a recurrence that is neither captured nor judged here"
    assert f"1 (TimeMixing); it calls {__name__}.chunk_rwkv6: {neither}" in said
    assert f"2 (Scripted); it calls {__name__}.run_rwkv6: {neither}" in said
    assert f"3 (Selective); it calls {__name__}.mamba_selective_scan: {neither}" in said
    assert "4 (Lightning); it has decays, and calls no function that is known" in said
    assert "5 (Method); it has decays, and calls no function that is known" in said


def test_a_kernel_that_is_not_known_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, loss = stack(GatedLinear(), Forgetting())
    watched(model, loss, model, tmp_path)
    (said,) = set(words(caplog))
    assert said.startswith("no attention call was seen")
    assert f"0 (GatedLinear); it calls {__name__}.chunk_gla (linear attention): attn_diag.capture_linear" in said
    assert f"1 (Forgetting); it calls {__name__}.parallel_forgetting_attn: not known here." in said
    assert "fast path" not in said  # no guesses where the modules are known


class Capped(nn.Module):
    """Its attention is a method of its class, as litgpt's is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * q.shape[-1] ** -0.5 / 50).tanh() * 50
        o: Tensor = functional.softmax(scores, dim=-1) @ v
        return o

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_method_of_q_k_and_v_is_named_and_can_be_observed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss = stack(Capped())
    watched(model, loss, model, tmp_path / "before")
    (said,) = words(caplog)
    assert f"0 (Capped); it calls {__name__}.Capped.scaled_dot_product_attention: not known here." in said
    observed = attn_diag.observe(softcap=50.0)(Capped.scaled_dot_product_attention)
    monkeypatch.setattr(Capped, "scaled_dot_product_attention", observed)
    assert modules(watched(model, loss, model, tmp_path / "after")) == ["0"]


def test_linear_attention_in_a_graph_makes_none_of_its_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Qwen3-Next, compiled: "attention is seen in 1 alone of these … self_attn" of a layer that is captured."""
    model, loss = stack(GatedLinear(), AttentionBlock(attends=True), GatedLinear())
    recorder = watched(model, loss, compiled(model, "whole"), tmp_path)
    (said,) = words(caplog)
    assert said.startswith("attention is not seen in these, which train: 0, 2 (GatedLinear); it calls ")
    assert modules(recorder) == ["1"]
