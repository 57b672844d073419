"""End to end: models run, their attention is captured, and the files say what an independent witness saw."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds, some
from tiny_models import HEADS, TRANSFORMERS, WIDTH, Tiny, captured, transformers_model, written
from torch import Tensor, nn

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import find_captures
from attn_diag.watching.live import spread_heads
from attn_diag.watching.live.spread_heads import SpreadHeads

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")


def witnessed(tiny: Tiny, implementation: str, *, autocast: bool = False) -> list[dict[str, Tensor]]:
    """q, k, v and o of each layer, with their gradients, by a function put in transformers' place by hand."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = implementation == "eager"
    home = vars(sys.modules[type(tiny.model).__module__]) if eager else ALL_ATTENTION_FUNCTIONS._global_mapping
    name = "eager_attention_forward" if eager else implementation
    seen: list[dict[str, Tensor]] = []

    def spy(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(module, query, key, value, *args, **kwargs)
        seen.append({"q": query, "k": key, "v": value, "o": result[0]})
        for t in seen[-1].values():
            t.retain_grad()
        return result

    original = home[name]
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patch.setitem(home, name, spy)
        loss = tiny.loss(tiny.model)
    torch.autograd.backward(loss)
    return seen


CASES = [(kind, how) for kind in TRANSFORMERS for how in ("sdpa", "eager")]


@pytest.mark.parametrize(("padded", "autocast"), [(False, False), (True, True)], ids=["full", "padded-autocast"])
@pytest.mark.parametrize(("kind", "how"), CASES, ids=["-".join(case) for case in CASES])
def test_transformers(kind: str, how: str, padded: bool, autocast: bool, tmp_path: Path) -> None:
    tiny = transformers_model(kind, how, padded=padded)
    witness = witnessed(tiny, how, autocast=autocast)
    captures = captured(transformers_model(kind, how, padded=padded), tmp_path / "captures", autocast=autocast)
    assert [c.metadata.extra["module"] for c in captures] == list(tiny.attentions)
    for layer, (capture, seen) in enumerate(zip(captures, witness, strict=True)):
        assert not disagreements(capture, seen)
        assert_metadata(capture, layer, masked=padded or kind == "mistral" or (how == "eager" and kind != "bert"))
        attention = tiny.model.get_submodule(tiny.attentions[layer])
        assert dw_q_error(capture, *query_weight(attention)) < (2**-7 if autocast else 1e-5)
        assert holds(capture)
        assert ("lse" in capture.tensors) == (how == "sdpa")


def disagreements(capture: Capture, seen: dict[str, Tensor]) -> list[str]:
    """Names of tensors, gradients too, that are not the witness's bit for bit."""
    wrong = []
    for name in ("q", "k", "v", "o"):
        for key, t in ((name, seen[name]), (f"d{name}", seen[name].grad)):
            assert t is not None
            # Autocast has products see what is cast; the witness stands before that.
            expected = (t.transpose(1, 2) if name == "o" else t).to(capture.tensors["q"].dtype)
            mine = capture.tensors[key][...]
            if mine.shape[1] > expected.shape[1]:
                # A kernel without GQA is given repeated keys.
                mine = mine.reshape(len(mine), expected.shape[1], -1, *mine.shape[2:])
                mine = mine.sum(2) if key[0] == "d" else mine[:, :, 0]
            if not torch.equal(mine, expected):
                wrong.append(key)
    return wrong


def assert_metadata(capture: Capture, layer: int, *, masked: bool) -> None:
    meta = capture.metadata
    assert (meta.layer, meta.step, meta.rank, meta.head_offset, meta.layout) == (layer, 0, 0, 0, "BHTD")
    assert meta.extra.items() >= {"call": "0", "batch_items": "0,1", "world_size": "1"}.items()
    assert len(meta.extra["run"]) == 8
    assert capture.scale == pytest.approx((WIDTH // HEADS) ** -0.5)
    assert (meta.device, meta.torch) == ("cpu", torch.__version__)
    bert = "bert" in meta.extra["module"]
    assert ("mask" in capture.tensors) or not masked
    assert meta.causal == ("none" if "mask" in capture.tensors or bert else "top-left")


def query_weight(attention: nn.Module) -> tuple[Tensor, Tensor]:
    """The rows of a projection's weight that make q, [H * D, C], and their gradient, by what is known of each kind."""
    name = next(n for n in ("q_proj", "query", "query_key_value", "c_attn") if hasattr(attention, n))
    layer: Any = getattr(attention, name)
    pair = (layer.weight.detach(), layer.weight.grad)
    if name == "query_key_value":
        rows = [t.view(HEADS, 3, -1, WIDTH)[:, 0].reshape(WIDTH, WIDTH) for t in pair]
    elif name == "c_attn":
        rows = [(t.T if type(layer).__name__ == "Conv1D" else t)[:WIDTH] for t in pair]
    else:
        rows = list(pair)
    return rows[0], rows[1]


def dw_q_error(capture: Capture, weight: Tensor, gradient: Tensor) -> float:
    """Of dW_Q as the sum of captured gradients times x, relative to autograd's; w_q must be the weight itself."""
    assert torch.equal(capture.tensors["w_q"][...], weight)
    pre = capture.tensors["dq_pre" if "dq_pre" in capture.tensors else "dq"][...].double()
    made = torch.einsum("bhtd,btc->hdc", pre, capture.tensors["x"][...].double()).flatten(0, 1)
    return float((made - gradient).norm() / gradient.norm())


MUTANTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "k and v exchanged": lambda t: t | {"k": t["v"], "v": t["k"]},
    "heads of q in another order": lambda t: t | {"q": t["q"].flip(1)},
    "do of the other sequence": lambda t: t | {"do": t["do"].flip(0)},
    "dq of the other sign": lambda t: t | {"dq": -t["dq"]},
    "dk off by one bit": lambda t: t | {"dk": t["dk"].view(torch.int32).bitwise_xor(1).view(torch.float32)},
    "dv doubled": lambda t: t | {"dv": 2 * t["dv"]},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Capture, dict[str, Tensor]]:
    """The model after its backward pass, its first layer's capture, and what the witness saw there."""
    tiny = transformers_model("llama", "sdpa")
    witness = witnessed(tiny, "sdpa")
    captures = captured(transformers_model("llama", "sdpa"), tmp_path_factory.mktemp("llama") / "captures")
    return tiny, captures[0], witness[0]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_rejects(mutant: str, llama: tuple[Tiny, Capture, dict[str, Tensor]]) -> None:
    _, capture, seen = llama
    tensors = {name: t[...] for name, t in capture.tensors.items()}
    assert not disagreements(capture, seen)
    assert disagreements(replace(capture, tensors=MUTANTS[mutant](tensors)), seen)


def test_the_gradient_before_rope_is_needed(llama: tuple[Tiny, Capture, dict[str, Tensor]]) -> None:
    tiny, capture, _ = llama
    assert (capture.q_heads, capture.kv_heads) == (4, 2), "grouped heads stay grouped"
    weight, gradient = query_weight(tiny.model.get_submodule(tiny.attentions[0]))
    assert dw_q_error(capture, weight, gradient) < 1e-5
    without = {name: t for name, t in capture.tensors.items() if name != "dq_pre"}
    assert dw_q_error(replace(capture, tensors=without), weight, gradient) > 0.5


def test_a_window_is_in_the_mask(tmp_path: Path) -> None:
    tiny = transformers_model("mistral", "sdpa")
    capture = captured(tiny, tmp_path / "captures")[0]
    assert holds(capture)
    mask = capture.tensors["mask"][...]
    rows, keys = torch.arange(20)[:, None], torch.arange(20)
    assert torch.equal(mask[0, 0], (keys <= rows) & (rows - keys < 7))
    # Without it the same figures must not pass.
    wrong = replace(capture, tensors=dict(capture.tensors) | {"mask": torch.ones(20, 20, dtype=torch.bool).tril()})
    assert not holds(wrong)


def test_inspect_reads_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    captured(transformers_model("gpt2", "sdpa"), folder, steps=2, batch=[1], layers={1}, heads=[2])
    captures = [attn_diag.load(path) for path in find_captures([folder])]
    assert [(c.metadata.step, c.metadata.layer) for c in captures] == [(0, 1), (1, 1)]
    diagnosis = attn_diag.inspect_captures(captures)
    for one in diagnosis.captures:
        assert one.assumptions.ok, one.assumptions.message
        head = one.observations[0].heads[0]
        assert (head.layer, head.head) == (1, 2)
        assert head.noise_factor is not None


def test_a_registered_implementation_keeps_its_name_and_mask(tmp_path: Path) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    masks: list[Tensor | None] = []

    # Transformers hands the first five by their places: a function may call them what it likes.
    def plain(
        layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        assert isinstance(layer, nn.Module)
        masks.append(mask)
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ keys.mT * options["scaling"]
        scores = scores.masked_fill(~some(mask), -torch.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2).contiguous(), None

    AttentionInterface.register("plain_for_this_test", plain)
    AttentionMaskInterface.register("plain_for_this_test", sdpa_mask)
    try:
        tiny = transformers_model("llama", "plain_for_this_test", padded=True)
        captures = captured(tiny, tmp_path / "captures")
    finally:
        del AttentionInterface._global_mapping["plain_for_this_test"]
        del AttentionMaskInterface._global_mapping["plain_for_this_test"]
    assert all(mask is not None for mask in masks)
    assert len(captures) == len(masks) == 2
    for capture, mask in zip(captures, masks, strict=True):
        assert capture.metadata.kernel == "transformers plain_for_this_test"
        assert capture.metadata.scale == pytest.approx(capture.head_dim**-0.5)
        assert mask is not None
        assert torch.equal(capture.tensors["mask"][...], mask)
        assert {"do", "dq", "dk", "dv", "dq_pre"} <= capture.tensors.keys()
        assert capture.kv_heads == 2
        assert holds(capture)


def test_generation_makes_a_step_of_every_token(tmp_path: Path) -> None:
    tiny = transformers_model("gpt2", "sdpa")
    model: Any = tiny.model.eval()
    with attn_diag.capture(model, tmp_path / "captures", layers={0}) as recorder:
        model.generate(torch.arange(5)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    captures = written(recorder)
    assert [(c.metadata.step, c.q_length, c.k_length) for c in captures] == [(0, 5, 5), (1, 1, 6), (2, 1, 7), (3, 1, 8)]
    for capture in captures:
        assert not {"do", "dq"} & capture.tensors.keys()
        assert holds(capture)


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile",
    "ignore:_compile flag on create_block",
    "ignore:`torch.jit.script_method` is deprecated",
)
def test_flex_attention_of_transformers(tmp_path: Path) -> None:
    # On the CPU FlexAttention has no backward.
    tiny = transformers_model("mistral", "flex_attention", padded=True)
    tiny.model.requires_grad_(False)
    with (
        torch.compiler.set_stance("force_eager"),
        torch.no_grad(),
        attn_diag.capture(tiny.model, tmp_path / "captures", batch=None) as recorder,
    ):
        tiny.loss(tiny.model)
    assert [holds(capture) for capture in written(recorder)] == [True, True]


class GatedQueries(nn.Module):
    """As Qwen3-Next's: each head's q, which is normalised, has a gate beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH // HEADS, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (HEADS, -1)).chunk(2, -1)
        k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        o = torch.nn.functional.scaled_dot_product_attention(self.norm(q).transpose(1, 2), k, v, is_causal=True)
        gated: Tensor = o.transpose(1, 2) * gate.sigmoid()
        return gated.flatten(2)


def test_a_query_with_a_gate_beside_it_is_found(tmp_path: Path) -> None:
    """Of Qwen3-Next and Qwen3.5 a file said: x and w_q are left out: no linear layer was found that makes q."""
    torch.manual_seed(0)
    attention = GatedQueries()
    model = nn.Sequential(attention)
    with attn_diag.capture(model, tmp_path) as recorder:
        model(torch.randn(1, 48, WIDTH)).square().sum().backward()
    (capture,) = map(attn_diag.load, recorder.written)
    whole: Tensor = attention.q_proj.weight
    assert whole.grad is not None
    weight, gradient = (t.view(HEADS, 2, -1, WIDTH)[:, 0].flatten(0, 1) for t in (whole.detach(), whole.grad))
    assert dw_q_error(capture, weight, gradient) < 1e-6


class HalvedQueries(nn.Module):
    """All heads' q, which is normalised and turned, then all gates; or what else is said of a double projection."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        places = torch.arange(2 * WIDTH)
        by_head = places.view(HEADS, 2, -1)
        layouts = {"q first": places[:WIDTH], "gates first": places[WIDTH:]}
        layouts |= {"beside": by_head[:, 0].flatten(), "gate beside": by_head[:, 1].flatten()}
        self.columns = layouts[layout]
        self.others = places[~torch.isin(places, self.columns)]
        self.q_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH // HEADS, eps=1e-6)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        made = self.q_proj(x)
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in (made[..., self.columns], self.k_proj(x), self.v_proj(x)))
        one, other = self.norm(q).transpose(1, 2).chunk(2, -1)
        angle = torch.arange(x.shape[1])[:, None] / 100 ** torch.linspace(0, 1, one.shape[-1])
        q = torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)
        attend = torch.nn.functional.scaled_dot_product_attention
        o = attend(q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        gated: Tensor = o.transpose(1, 2).flatten(2) * made[..., self.others].sigmoid()
        return gated


@pytest.mark.parametrize(("layout", "told"), [("q first", 1), ("beside", 1), ("gates first", 0), ("gate beside", 0)])
def test_of_a_double_projection_the_columns_that_made_q_are_taken(layout: str, told: bool, tmp_path: Path) -> None:
    """Whatever lay beside q, columns as Qwen3-Next's were taken by the layer's name: w_q was 121 to 143 % off."""
    torch.manual_seed(0)
    attention = HalvedQueries(layout)
    model = nn.Sequential(attention)
    with attn_diag.capture(model, tmp_path) as recorder:
        model(torch.randn(1, 48, WIDTH)).square().sum().backward()
    (capture,) = map(attn_diag.load, recorder.written)
    assert ("w_q" in capture.tensors) == told
    if told:
        weight: Tensor = attention.q_proj.weight
        assert weight.grad is not None
        assert dw_q_error(capture, weight.detach()[attention.columns], weight.grad[attention.columns]) < 1e-6


class NormalisedGroups(nn.Module):
    """One layer makes q, k and v, of each key head together, as in Megatron-LM; q has a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH // HEADS, eps=1e-6)
        nn.init.uniform_(self.norm.weight, 0.3, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x).unflatten(-1, (HEADS // 2, 4, -1))
        q = self.norm(made[..., :2, :].flatten(2, 3)).transpose(1, 2)
        k, v = (made[..., i, :].transpose(1, 2).repeat_interleave(2, 1) for i in (2, 3))
        o: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o.transpose(1, 2).flatten(2)


def test_the_queries_of_groups_are_found_behind_a_norm(tmp_path: Path) -> None:
    """The first columns were taken, which are k's and v's too."""
    torch.manual_seed(0)
    attention = NormalisedGroups()
    with attn_diag.capture(nn.Sequential(attention), tmp_path) as recorder:
        attention(torch.randn(1, 48, WIDTH)).square().sum().backward()
    (capture,) = map(attn_diag.load, recorder.written)
    whole: Tensor = attention.qkv.weight
    assert whole.grad is not None
    weight, gradient = (t.view(HEADS // 2, 4, -1, WIDTH)[:, :2].flatten(0, 2) for t in (whole.detach(), whole.grad))
    assert dw_q_error(capture, weight, gradient) < 1e-6


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Nested(nn.Module):
    """As DeepSpeed's Ulysses has it: attention is two modules below the one that projects."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.core = nn.ModuleDict({"local_attn": Inner()})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        o: Tensor = self.core["local_attn"](q, k, v)
        return o.transpose(1, 2).flatten(2)


def test_the_projection_of_a_core_two_modules_below_it_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    attention = Nested()
    model = nn.Sequential(attention)
    with attn_diag.capture(model, tmp_path) as recorder:
        model(torch.randn(1, 48, WIDTH)).square().sum().backward()
    (capture,) = map(attn_diag.load, recorder.written)
    assert capture.metadata.extra["module"] == "0.core.local_attn"
    weight: Tensor = attention.q_proj.weight
    assert weight.grad is not None
    assert dw_q_error(capture, weight.detach(), weight.grad) < 1e-6


def test_heads_that_are_spread_over_ranks_are_told_by_the_query_projection_of_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """v's ran last and is as wide; with DeepSpeed's Ulysses all ranks had the first heads."""
    generator = torch.Generator().manual_seed(0)
    q, v = (torch.randn(1, 8, HEADS * 4, generator=generator) for _ in range(2))
    monkeypatch.setattr(spread_heads, "world_size", lambda: 2)
    monkeypatch.setattr(spread_heads, "rank", lambda: 1)
    # This rank's eight rows are the second ones, and its heads the later half.
    here = q.view(1, 8, HEADS, 4).transpose(1, 2)[:, HEADS // 2 :]
    seen = torch.cat([torch.randn(here.shape, generator=generator), here], 2)
    assert SpreadHeads().first("", seen, seen, [v, q]) == (HEADS // 2, True)
