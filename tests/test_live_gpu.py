"""On a GPU: what SDPA's backends and FlexAttention give, streams, graphs, devices; the same bits as without capture."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds, some
from tiny_models import nano_gpt, next_token_loss, only, same, tokens, train, train_watched, written
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

import attn_diag
from attn_diag.captures.capture import Capture

pytestmark = pytest.mark.gpu
LENGTH = 333
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# In a variable of this module, where it is looked for.
compiled_flex: Any = None


def inputs(key_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim)
    shapes = [(2, heads, LENGTH, dim) for heads in (4, key_heads, key_heads)]
    q, k, v = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for shape in shapes)
    return q, k, v


def exact_lse(capture: Capture) -> Tensor:
    q, k = (capture.tensors[name][...].double() for name in "qk")
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * capture.scale
    if capture.metadata.causal != "none":
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.logsumexp(-1)


# Why a backend does not take some inputs comes as warnings.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("key_heads", [4, 2], ids=["", "grouped"])
@pytest.mark.parametrize("dim", [64, 72, 80, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(backend: str, dim: int, key_heads: int, tmp_path: Path) -> None:
    q, k, v = inputs(key_heads, dim)
    upstream = torch.randn(2, 4, LENGTH, dim, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(BACKENDS[backend]):
        try:
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=key_heads < 4)
        except RuntimeError as error:
            pytest.skip(f"{backend} does not take these inputs here: {error}")
        with attn_diag.capture(None, tmp_path, batch=None) as recorder:
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=key_heads < 4)
            torch.autograd.backward(o, upstream)
    capture = only(recorder)
    assert capture.metadata.kernel == f"torch SDPA {backend}"
    assert holds(capture, "cuda")
    tensors = {name: t[...] for name, t in capture.tensors.items()}
    assert torch.equal(tensors["o"], o.detach().cpu())
    assert torch.equal(tensors["do"], upstream.cpu())
    assert torch.equal(tensors["q"], q.detach().cpu())
    for name, t in (("dq", q), ("dk", k), ("dv", v)):
        mine, theirs = tensors[name], some(t.grad).cpu()
        if mine.shape == theirs.shape:
            assert torch.equal(mine, theirs), name
        else:
            # A backend without grouped heads is given repeated keys; their gradients are summed afterwards, in BF16.
            summed = mine.double().reshape(2, theirs.shape[1], -1, LENGTH, dim).sum(2)
            assert float((summed - theirs).norm() / summed.norm()) < 2**-7
    assert ("lse" in tensors) == (backend != "math")
    if "lse" in tensors:
        assert tensors["lse"].shape == (2, 4, LENGTH)
        assert tensors["lse"].dtype == torch.float32
        # exp and log of the fused kernels are approximations of 2 ulp in fp32; LSE is below 10.
        torch.testing.assert_close(tensors["lse"].double(), exact_lse(capture), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "block mask"])
def test_compiled_flex_attention(masked: bool, tmp_path: Path) -> None:
    global compiled_flex
    compiled_flex = torch.compile(flex_attention.flex_attention)
    q, k, v = inputs(2, 64)
    block_mask = None
    if masked:
        block_mask = flex_attention.create_block_mask(
            lambda _b, _h, row, key: (row >= key) & (row - key < 100), None, None, LENGTH, LENGTH, device="cuda"
        )
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        o, lse = compiled_flex(q, k, v, block_mask=block_mask, enable_gqa=True, return_lse=True)
        torch.autograd.backward(o, torch.ones_like(o))
    capture = only(recorder)
    assert holds(capture, "cuda")
    assert torch.equal(capture.tensors["lse"][...], lse.detach().cpu())
    for name, t in (("dq", q), ("dk", k), ("dv", v)):
        assert torch.equal(capture.tensors[name][...], some(t.grad).cpu()), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("how", "compiled"),
    [("sdpa", False), ("eager", False), ("flex_attention", False), ("sdpa", True), ("flex_attention", True)],
)
def test_transformers(how: str, compiled: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, attn_implementation=how,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.randint(64, (2, 256), device="cuda")
    with attn_diag.capture(model, tmp_path, steps={1}, batch=None) as recorder:
        run: Any = torch.compile(model) if compiled else model
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(input_ids=ids, labels=ids).loss
            torch.autograd.backward(loss)
            optimizer.step()
    captures = written(recorder)
    assert len(captures) == 2
    for layer, capture in enumerate(captures):
        assert holds(capture, "cuda")
        assert {"do", "dq", "dk", "dv", "x", "w_q", "dq_pre"} <= capture.tensors.keys()
        tensors = {name: capture.tensors[name][...].double() for name in ("dq_pre", "x")}
        made = torch.einsum("bhtd,btc->hdc", tensors["dq_pre"], tensors["x"]).flatten(0, 1)
        exact = model.get_submodule(f"model.layers.{layer}.self_attn.q_proj").weight.grad.cpu()
        # The product of BF16 factors is rounded to BF16 once.
        assert float((made - exact).norm() / made.norm()) < 2**-8


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_bits_stay(checkpointing: bool | None, backend: str, tmp_path: Path) -> None:
    def run(folder: Path | None) -> Any:
        tiny = nano_gpt(checkpointing)
        tiny.model.cuda()
        around: Any = contextlib.nullcontext()
        if folder is not None:
            around = attn_diag.capture(tiny.model, folder, batch=None, calls=None)
        with sdpa_kernel(list({BACKENDS[backend]: None, SDPBackend.MATH: None}), set_priority=True):
            return train(tiny, around, autocast=True)

    alone = run(None)
    assert same(alone, run(None)), "the run itself is not repeatable"
    assert same(alone, run(tmp_path))
    assert len(list(tmp_path.iterdir())) == 12


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("backend", ["flash", "efficient", "cuDNN"])
@pytest.mark.parametrize(
    ("checkpointing", "mode"),
    [(None, None), (False, None), (None, "max-autotune-no-cudagraphs")],
    ids=["", "checkpointed", "autotuned"],
)
def test_a_compiled_model_is_captured_and_trains_as_it_did(
    backend: str, checkpointing: bool | None, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which backend was allowed is no part of their keys.
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)

    def run(folder: Path | None) -> tuple[list[Tensor], Any]:
        torch._dynamo.reset()
        tiny = nano_gpt(checkpointing)
        tiny.model.cuda()
        compiled: Any = torch.compile(tiny.model, fullgraph=True, mode=mode)
        optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-3)
        bits: list[Tensor] = []
        recorder = None if folder is None else attn_diag.capture(tiny.model, folder, steps={1, 3}, batch=None)
        for number in range(5):
            if number == 1 and recorder is not None:
                recorder.start()
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(BACKENDS[backend]):
                loss = tiny.loss(compiled)
            torch.autograd.backward(loss)
            optimizer.step()
            bits += [loss.detach().clone(), *(some(p.grad).clone() for p in tiny.model.parameters())]
        if recorder is not None:
            recorder.close()
        return bits, recorder

    alone, _ = run(None)
    assert same(alone, run(None)[0]), "the run itself is not repeatable"
    with torch._dynamo.config.patch(error_on_recompile=True):
        watched, recorder = run(tmp_path)
    assert same(alone, watched)
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for capture in found:
        assert {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"} <= capture.tensors.keys()
        assert backend in str(capture.metadata.kernel)
        assert holds(capture)
    heads = [h for c in attn_diag.inspect_captures(found).captures for h in c.observations[0].heads]
    for head in heads:
        if backend != "efficient":  # which rounds once more
            assert some(some(head.propagation.dq).unexplained_with_casts) < 0.05


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_autograd_of_a_compiled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)

    def run(folder: Path | None) -> tuple[list[Tensor], Any]:
        torch._dynamo.reset()
        tiny = nano_gpt()
        tiny.model.cuda()
        optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
        bits: list[Tensor] = []
        around: Any = contextlib.nullcontext()
        if folder is not None:
            around = attn_diag.capture(tiny.model, folder, steps={1, 3}, batch=None)

        @torch.compile
        def train_step() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                loss = tiny.loss(tiny.model)
            torch.autograd.backward(loss)
            return loss.detach()

        with around as recorder, torch._dynamo.config.patch(compiled_autograd=True), sdpa_kernel(BACKENDS["flash"]):
            for _ in range(4):
                optimizer.zero_grad()
                bits.append(train_step().clone())
                bits += [some(p.grad).clone() for p in tiny.model.parameters()]
                optimizer.step()
        return bits, recorder

    alone, _ = run(None)
    assert same(alone, run(None)[0]), "the run itself is not repeatable"
    watched, recorder = run(tmp_path)
    assert same(alone, watched)
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for capture in found:
        assert {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"} <= capture.tensors.keys()
        assert holds(capture, "cuda")


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_cuda_graph_of_a_compiled_model_says_so_and_runs_as_it_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    tiny = nano_gpt()
    tiny.model.cuda()
    compiled: Any = torch.compile(tiny.model, mode="reduce-overhead")
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = tiny.loss(compiled)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach().clone()

    for _ in range(5):
        step()
    with attn_diag.capture(tiny.model, tmp_path, steps={1}) as recorder:
        for _ in range(3):
            step()
    assert not recorder.written
    assert "CUDA graph" in caplog.text
    assert recorder.step == 3


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The CUDA graphs that are replayed, one by one."""
    found: list[Any] = []
    theirs = torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        found.append(graph)
        theirs(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    return found


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize(
    ("checkpointing", "micro_batches", "mode"),
    [
        *((c, m, "reduce-overhead") for c in (None, False) for m in (1, 2)),
        (None, 1, "max-autotune"),
    ],
)
def test_cuda_graphs_of_a_compiled_model_are_seen(
    checkpointing: bool | None, micro_batches: int, mode: str, tmp_path: Path, replays: list[Any]
) -> None:
    def run(folder: Path | None) -> tuple[list[Tensor], Any]:
        torch._dynamo.reset()
        tiny = nano_gpt(checkpointing)
        tiny.model.cuda()
        compiled: Any = torch.compile(tiny.model, mode=mode, fullgraph=True)

        def loss(number: int) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return next_token_loss(compiled, tokens(seed=number).cuda())

        return train_watched(tiny, loss, folder, count=8, micro_batches=micro_batches, steps={5, 7}, every=3)

    alone, _ = run(None)
    assert same(alone, run(None)[0]), "the run itself is not repeatable"
    before = len(replays)
    watched, recorder = run(tmp_path)
    assert same(alone, watched)
    assert len(replays) - before >= 8
    found = written(recorder)
    where = [(c.metadata.step, c.metadata.layer, int(c.metadata.extra["call"])) for c in found]
    assert sorted(where) == [(s, layer, m) for s in (5, 7) for layer in (0, 1) for m in range(micro_batches)]
    for capture in found:
        assert {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"} <= capture.tensors.keys()
        assert capture.metadata.extra["module"] == f"h.{capture.metadata.layer}.attn"
        assert holds(capture)
        assert all(not torch.equal(capture.tensors["q"][...], c.tensors["q"][...]) for c in found if c is not capture)
    heads = [h for c in attn_diag.inspect_captures(found).captures for h in c.observations[0].heads]
    for head in heads:
        assert some(some(head.propagation.dq).unexplained_with_casts) < 0.05


@pytest.mark.parametrize("mode", ["thread_local", "global"])
@pytest.mark.usefixtures("replays")
def test_a_graph_of_ones_own(mode: str, tmp_path: Path) -> None:
    q, k, v = (t.detach().requires_grad_() for t in inputs(4, 64))
    upstream = torch.randn_like(q)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def work() -> tuple[Tensor, ...]:
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o, *torch.autograd.grad(o, (q, k, v), upstream)

    with attn_diag.capture(None, tmp_path, batch=None, calls=None) as recorder:
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            results = work()
        for number in range(3):
            with torch.no_grad():
                q.copy_(torch.randn_like(q))
            graph.replay()
            expected = [r.clone() for r in results]
            recorder.drain()
            assert len(recorder.written) == 2 + number
            capture = written(recorder)[-1]
            for name, result in zip(("o", "dq", "dk", "dv"), expected, strict=True):
                assert torch.equal(capture.tensors[name][...], result.cpu())
            assert torch.equal(capture.tensors["q"][...], q.detach().cpu())


def test_other_streams(tmp_path: Path) -> None:
    """Two calls at once on two streams, whose tensors are freed and overwritten as soon as they may be."""
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    expected: dict[int, tuple[Tensor, Tensor]] = {}
    with attn_diag.capture(None, tmp_path, batch=None, calls=None) as recorder:
        for number in range(8):
            stream = streams[number % 2]
            with torch.cuda.stream(stream):
                base = torch.full((2, 4, 1024, 64), 0.25 * number, device="cuda", dtype=torch.bfloat16)
                noise = torch.randn_like(base)
                q, k, v = ((base + noise * scale).requires_grad_() for scale in (0.1, 0.2, 0.3))
                o = functional.scaled_dot_product_attention(q, k, v)
                torch.autograd.backward(o, noise)
                expected[number] = (q.detach().cpu(), some(k.grad).cpu())
                del q, k, v, o, base, noise
                torch.full((64, 1024, 1024), torch.nan, device="cuda")
    found = {int(c.metadata.extra["call"]): c for c in written(recorder)}
    assert sorted(found) == sorted(expected)
    for number, (q, dk) in expected.items():
        assert torch.equal(found[number].tensors["q"][...], q)
        assert torch.equal(found[number].tensors["dk"][...], dk)


def test_a_graph_without_gradients(tmp_path: Path) -> None:
    q, k, v = (t.detach() for t in inputs(4, 64))
    expected = functional.scaled_dot_product_attention(q, k, v)
    before, during = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(before):
        functional.scaled_dot_product_attention(q, k, v)
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        with torch.cuda.graph(during):
            o = functional.scaled_dot_product_attention(q, k, v)
        before.replay()
        during.replay()
    assert torch.equal(only(recorder).tensors["o"][...], expected.cpu())
    assert torch.equal(o, expected)
    during.replay()
    assert torch.equal(o, expected)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore")  # of torch, about streams
def test_a_whole_step_of_ones_own_steps_when_it_is_replayed(tmp_path: Path) -> None:
    def run(folder: Path | None) -> tuple[list[Tensor], Any]:
        tiny = nano_gpt()
        tiny.model.cuda()
        ids = tokens().cuda()
        optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-3, capturable=True)
        recorder = None if folder is None else attn_diag.capture(tiny.model, folder, steps={4, 6}, batch=None).start()
        monitor = None if folder is None else attn_diag.Monitor(tiny.model, every=2)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                loss = next_token_loss(tiny.model, ids)
            torch.autograd.backward(loss)
            optimizer.step()
            return loss

        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            loss = step()
        losses = []
        for _ in range(5):
            graph.replay()
            losses.append(loss.detach().clone())
        if recorder is not None and monitor is not None:
            recorder.close()
            monitor.close()
            assert recorder.step == monitor.step == 8
            assert [check.step for check in monitor.history] == [0, 2, 4, 6]
        return losses + [p.detach().clone() for p in tiny.model.parameters()], recorder

    alone, _ = run(None)
    assert same(alone, run(None)[0]), "the run itself is not repeatable"
    watched, recorder = run(tmp_path)
    assert same(alone, watched)
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(4, 0), (4, 1), (6, 0), (6, 1)]
    for capture in found:
        assert {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"} <= capture.tensors.keys()
        assert holds(capture, "cuda")


def test_a_model_that_moves(tmp_path: Path) -> None:
    model = nano_gpt().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attn_diag.capture(model, tmp_path, layers={0}) as recorder:
        for device in ("cpu", "cuda", "cpu"):
            model.to(device)
            torch.autograd.backward(next_token_loss(model, tokens().to(device)))
            optimizer.step()
            optimizer.zero_grad()
    assert [c.metadata.device for c in written(recorder)] == ["cpu", torch.cuda.get_device_name(), "cpu"]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_steps_that_are_not_captured_do_not_wait(tmp_path: Path) -> None:
    model = nano_gpt().model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tokens().cuda()

    def step() -> None:
        torch.autograd.backward(next_token_loss(model, ids))
        optimizer.step()
        optimizer.zero_grad()

    step()
    with attn_diag.capture(model, tmp_path, steps={0, 3}) as recorder:
        step()
        assert recorder.drain(60)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
            step()
            # The mode itself works.
            with pytest.raises(RuntimeError, match="synchroniz"):
                ids.sum().item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step()
    assert len(recorder.written) == 4
