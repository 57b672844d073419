"""On a GPU: FlexAttention inside compiled models, by its real kernels; the same bits as without capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds
from flex_models import BATCH, QUANTITIES, Layers, alibi, block_mask, documents, gradient_errors, near, train, x_of
from tiny_models import same, written
from torch import Tensor, nn

import attn_diag

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of the compiler
LENGTH = 333
MASKS: dict[str, Any] = {
    "plain": dict,
    "block mask": lambda: {"block_mask": block_mask(near, device="cuda", length=LENGTH)},
    "captured": lambda: {
        "block_mask": block_mask(documents("cuda", LENGTH), BATCH, device="cuda", length=LENGTH),
        "scale": 0.3,
    },
    "score_mod": lambda: {"score_mod": alibi, "block_mask": block_mask(near, device="cuda", length=LENGTH)},
}


def in_pieces(model: Layers) -> nn.Module:
    for block in model.blocks:
        block.compile(fullgraph=True)
    return model


WAYS: dict[str, Any] = {
    "whole": lambda model: torch.compile(model, fullgraph=True),
    "dynamic": lambda model: torch.compile(model, fullgraph=True, dynamic=True),
    "blocks": in_pieces,
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("way", "masks", "checkpointed", "key_heads"),
    [
        ("whole", "plain", False, 4), ("whole", "plain", True, 2), ("whole", "block mask", False, 4),
        ("whole", "block mask", True, 4), ("whole", "captured", False, 2), ("whole", "score_mod", False, 4),
        ("dynamic", "block mask", False, 2), ("blocks", "captured", False, 4), ("blocks", "plain", True, 4),
    ],
)  # fmt: skip
def test_a_compiled_model_is_captured_and_trains_as_it_did(
    way: str, masks: str, checkpointed: bool, key_heads: int, tmp_path: Path
) -> None:
    options = MASKS[masks]()

    def run(folder: Path | None) -> tuple[list[Tensor], Any]:
        torch._dynamo.reset()
        model = Layers(key_heads, checkpointed=checkpointed).cuda()
        recorder = None if folder is None else attn_diag.capture(model, folder, steps={1, 3}, batch=None)
        return train(model, WAYS[way](model), options, recorder, steps=5, length=LENGTH), recorder

    alone, _ = run(None)
    assert same(alone, run(None)[0]), "the run itself is not repeatable"
    watched, recorder = run(tmp_path)
    assert same(alone, watched)
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for capture in found:
        assert ("mask" in capture.tensors) == ("block_mask" in options)
        assert capture.metadata.extra["module"] == f"blocks.{capture.metadata.layer}"
        assert holds(capture)
        if checkpointed and way == "whole":  # its backward is left as it is
            assert not {"do", "dq"} & capture.tensors.keys()
            continue
        assert capture.tensors.keys() >= QUANTITIES
        errors = gradient_errors(capture)
        # exp2 and log2 of 2 ulp in fp32, of an LSE below 10; gradients of factors rounded to BF16 a few times.
        assert errors.pop("lse") < 1e-4
        assert max(errors.values()) < 2**-6, errors


def test_what_was_compiled_before_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = Layers().cuda()
    run = torch.compile(model)
    train(model, run, {}, steps=1)
    with attn_diag.capture(model, tmp_path) as recorder:
        train(model, run, {}, steps=1)
        assert "FlexAttention in a compiled graph is not seen" in caplog.text
        assert not recorder.written
        torch._dynamo.reset()
        train(model, run, {}, steps=1)
    assert len(recorder.written) == 2


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("masks", MASKS)
def test_cuda_graphs(masks: str, tmp_path: Path) -> None:
    options = MASKS[masks]()

    def run(folder: Path | None) -> tuple[list[Tensor], Any]:
        torch._dynamo.reset()
        model = Layers().cuda()
        recorder = None if folder is None else attn_diag.capture(model, folder, steps={0, 3, 5}, batch=(0,))
        compiled = torch.compile(model, mode="reduce-overhead")
        return train(model, compiled, options, recorder, steps=6, length=LENGTH), recorder

    alone, _ = run(None)
    assert same(alone, run(None)[0]), "the run itself is not repeatable"
    watched, recorder = run(tmp_path)
    assert same(alone, watched)
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(s, layer) for s in (0, 3, 5) for layer in (0, 1)]
    for capture in found:
        assert capture.tensors.keys() >= QUANTITIES
        assert holds(capture)
        errors = gradient_errors(capture)
        assert errors.pop("lse") < 1e-4
        assert max(errors.values()) < 2**-6, errors


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, attn_implementation="flex_attention",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(64, (2, 256), device="cuda")
    with attn_diag.capture(model, tmp_path, batch=None) as recorder:
        run: Any = torch.compile(model)
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(input_ids=ids, labels=ids).loss
            torch.autograd.backward(loss)
            optimizer.step()
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.extra["module"]) for c in found] == [
        (step, f"model.layers.{layer}.self_attn") for step in (0, 1) for layer in (0, 1)
    ]
    for capture in found:
        assert capture.tensors.keys() >= QUANTITIES
        assert holds(capture, "cuda")


def test_operators_launch_and_copy_nothing(tmp_path: Path) -> None:
    """While no call is wanted they are host calls alone."""
    model = Layers().cuda()
    run = torch.compile(model)
    kernels = []
    for watched in (False, True):
        torch._dynamo.reset()
        recorder = attn_diag.capture(model, tmp_path, steps=()) if watched else None
        if recorder is not None:
            recorder.start()
        train(model, run, {}, steps=2, length=LENGTH)
        x = x_of(0, LENGTH, "cuda")
        for _ in range(2):  # the profiler too has a first time
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                with torch.autocast("cuda", torch.bfloat16):
                    made = run(x, {})
                torch.autograd.backward(made.float().square().mean())
                torch.cuda.synchronize()
        found = ((event.key, event.count) for event in profile.key_averages())
        kernels.append(sorted(one for one in found if "Activity Buffer" not in one[0]))
        if recorder is not None:
            recorder.close()
    assert kernels[0] == kernels[1]
