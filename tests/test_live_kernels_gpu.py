"""Real packages of attention kernels on a GPU, each where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds, some
from tiny_models import only
from torch import Tensor

import attn_diag
from attn_diag.captures.capture import Capture

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of the packages
LENGTH, DIM = 333, 64


def tensors(key_heads: int = 4, keys: int = LENGTH, *, grad: bool = True) -> list[Tensor]:
    """q, k and v, [B, T, H, D]."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(2, LENGTH, 4, DIM), (2, keys, key_heads, DIM), (2, keys, key_heads, DIM)]
    made = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes)
    return [t.requires_grad_(grad) for t in made]


def captured(call: Callable[..., Any], given: list[Tensor], folder: Path) -> Capture:
    """One call with its backward: the same bits as without, and those of what is captured."""
    weights = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(9)).to("cuda", torch.bfloat16)

    def run() -> Tensor:
        for t in given:
            t.grad = None
        result = call(*given)
        o: Tensor = result[0] if isinstance(result, tuple) else result
        torch.autograd.backward((o * weights).sum())
        return o

    expected = run()
    with attn_diag.capture(None, folder, batch=None) as recorder:
        o = run()
    capture = only(recorder)
    assert torch.equal(o, expected)
    assert torch.equal(capture.tensors["o"][...], o.cpu().transpose(1, 2))
    for name, t in zip(("dq", "dk", "dv"), given, strict=True):
        assert torch.equal(capture.tensors[name][...], some(t.grad).cpu().transpose(1, 2)), name
    assert torch.equal(capture.tensors["do"][...], weights.cpu().transpose(1, 2))
    return capture


def judged(capture: Capture) -> None:
    assert holds(capture, "cuda")
    found = attn_diag.inspect_captures([capture])
    labels = {head.verdict.labels for head in found.captures[0].observations[0].heads if head.verdict is not None}
    assert labels <= {("clean",), ("undecided",)}, labels


OPTIONS: dict[str, tuple[dict[str, Any], int, int]] = {
    "plain": ({}, 4, LENGTH),
    "causal, grouped, more keys": ({"causal": True, "softmax_scale": 0.1}, 2, LENGTH + 50),
    "window": ({"window_size": (64, 0), "causal": True}, 4, LENGTH),
    "softcap": ({"softcap": 20.0}, 4, LENGTH),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("package", ["flash_attn", "flash_attn_interface", "flash_attn.cute"])
def test_flash_attention(package: str, case: str, compiled: bool, tmp_path: Path) -> None:
    module = pytest.importorskip(package, exc_type=ImportError)
    if not hasattr(module, "flash_attn_func"):
        pytest.skip(f"{package} has no flash_attn_func")
    options, key_heads, keys = OPTIONS[case]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return module.flash_attn_func(q, k, v, **options)

    # FlashAttention-4 cannot be traced.
    run = torch.compile(call, fullgraph=package == "flash_attn") if compiled else call
    capture = captured(run, tensors(key_heads, keys), tmp_path)
    names = {
        "flash_attn": "flash_attn 2",
        "flash_attn_interface": "flash_attn 3",
        "flash_attn.cute": "FlashAttention-4",
    }
    assert capture.metadata.kernel == names[package]
    assert capture.metadata.causal == ("bottom-right" if options.get("causal") else "none")
    assert "lse" in capture.tensors
    judged(capture)


def test_flash_attention_4_in_the_place_of_torchs(tmp_path: Path) -> None:
    """Its functions run inside torch's operator, which is told of, once."""
    pytest.importorskip("flash_attn.cute", exc_type=ImportError)
    attention: Any = torch.nn.attention
    attention.activate_flash_attention_impl("FA4")
    try:

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                o: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            return o

        try:
            call(*tensors())
        except ValueError as error:
            pytest.skip(f"this torch and this FlashAttention-4 do not go together: {error}")
        capture = captured(call, tensors(), tmp_path)
    finally:
        attention.restore_flash_attention_impl()
    assert capture.metadata.kernel == "torch SDPA flash (FA4)"
    judged(capture)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operator", ["flash", "cutlass", "flash3"])
def test_xformers(operator: str, causal: bool, tmp_path: Path) -> None:
    ops = pytest.importorskip("xformers.ops", exc_type=ImportError)
    which = getattr(ops.fmha, operator)
    if not which.FwOp.is_available():
        pytest.skip(f"{operator} is not there")
    bias = ops.LowerTriangularMask() if causal else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ops.memory_efficient_attention(q, k, v, attn_bias=bias, op=(which.FwOp, which.BwOp))

    try:
        call(*tensors())
    except ValueError as error:
        pytest.skip(f"{operator} does not take these inputs here: {str(error).splitlines()[0]}")
    capture = captured(call, tensors(), tmp_path)
    names = {"flash": "xformers flash", "cutlass": "xformers cutlass", "flash3": "xformers flash 3"}
    assert capture.metadata.kernel == names[operator]
    assert (capture.metadata.causal == "none") == (not causal)
    judged(capture)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_sage_attention(layout: str, tmp_path: Path) -> None:
    package = pytest.importorskip("sageattention", exc_type=ImportError)
    q, k, v = (t if layout == "NHD" else t.transpose(1, 2).contiguous() for t in tensors(grad=False))
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        o = package.sageattn(q, k, v, tensor_layout=layout, is_causal=True)
    capture = only(recorder)
    assert capture.metadata.kernel == "SageAttention sageattn"
    assert torch.equal(capture.tensors["o"][...], (o.transpose(1, 2) if layout == "NHD" else o).cpu())
    assert holds(capture, "cuda")


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_transformer_engine(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    attention = package.DotProductAttention(4, DIM, attn_mask_type="causal", qkv_format=layout, attention_dropout=0.0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = (t if layout == "bshd" else t.transpose(0, 1).contiguous() for t in (q, k, v))
        o: Tensor = attention(*given).unflatten(-1, (4, DIM))
        return o if layout == "bshd" else o.transpose(0, 1)

    capture = captured(call, tensors(), tmp_path)
    assert capture.metadata.kernel == "Transformer Engine fused"
    assert capture.metadata.causal == "top-left"
    judged(capture)
