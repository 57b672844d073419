"""Runs in other formats, and runs whose first v differs: compared, and no rounding taken for a fault."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attn_diag
from attn_diag.results.mismatch import Mismatch

WIDTH, HEADS, LENGTH = 64, 4, 48
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Attention(nn.Module):
    """Two key heads; ``spread`` gives them to the query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.spread: Callable[[Tensor], Tensor] = lambda t: t.repeat_interleave(2, 1)
        self.scale = (WIDTH // HEADS) ** -0.5
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = functional.scaled_dot_product_attention(
            q, self.spread(k), self.spread(v), attn_mask=self.mask, is_causal=self.mask is None, scale=self.scale
        )
        made: Tensor = x + self.o_proj(o.transpose(1, 2).flatten(2))
        return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        for layer in self.attentions:
            layer.q_proj.weight.data.mul_(4)

    @property
    def attentions(self) -> list[Attention]:
        return [layer for layer in self.layers if isinstance(layer, Attention)]

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(48, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def run(
    folder: Path, dtype: torch.dtype = BF16, change: Callable[[list[Attention]], None] | None = None,
    *, autocast: bool = False, ids: Tensor | None = None,
) -> Path:  # fmt: skip
    model = Model().to(dtype)
    if change is not None:
        change(model.attentions)
    cast = torch.autocast("cpu", BF16) if autocast else nullcontext()
    with torch.no_grad(), cast, attn_diag.capture(model, folder, batch=None):
        model(tokens() if ids is None else ids)
    return folder


def compared(a: Path, b: Path) -> Mismatch:
    return attn_diag.mismatch(a, b)


@pytest.mark.parametrize("formats", [(FP32, BF16), (FP16, BF16)], ids=str)
def test_another_format_is_rounding(formats: tuple[torch.dtype, torch.dtype], tmp_path: Path) -> None:
    found = compared(run(tmp_path / "a", formats[0]), run(tmp_path / "b", formats[1]))
    assert (found.outcome, found.causes) == ("rounding", ())


def test_weights_that_autocast_rounds_are_the_engines(tmp_path: Path) -> None:
    found = compared(run(tmp_path / "a", FP32, autocast=True), run(tmp_path / "b"))
    assert (found.outcome, found.causes) == ("rounding", ())


def _scale(layers: list[Attention]) -> None:
    layers[1].scale *= 1.05


def _weights(layers: list[Attention]) -> None:
    # By more than BF16 rounds, in one row.
    layers[1].q_proj.weight.data[3] *= 1.02


@pytest.mark.parametrize(("change", "kind"), [(_scale, "scale"), (_weights, "weights")])
def test_a_fault_in_another_format_is_found(
    change: Callable[[list[Attention]], None], kind: str, tmp_path: Path
) -> None:
    found = compared(run(tmp_path / "a", FP32), run(tmp_path / "b", BF16, change))
    assert [(cause.layer, cause.kind) for cause in found.causes] == [(1, kind)]


def _first_epsilon(layers: list[Attention]) -> None:
    layers[0].norm.eps = 3.0


def _first_values(layers: list[Attention]) -> None:
    layers[0].v_proj.weight.data.copy_(layers[1].v_proj.weight.data)


def _spread(layers: list[Attention]) -> None:
    for layer in layers:
        layer.spread = lambda t: t.repeat(1, 2, 1, 1)


@pytest.mark.parametrize(
    ("change", "kind"), [(_first_epsilon, "norm"), (_first_values, "unnamed-input"), (_spread, "unnamed-input")]
)
def test_tokens_are_the_same_though_the_first_v_is_not(
    change: Callable[[list[Attention]], None], kind: str, tmp_path: Path
) -> None:
    found = compared(run(tmp_path / "a"), run(tmp_path / "b", change=change, ids=tokens().flip(0)))
    assert (found.begins, found.causes[0].kind) == (0, kind)
    assert found.tokens == 2 * LENGTH


def test_other_tokens_are_told(tmp_path: Path) -> None:
    with pytest.raises(attn_diag.InputError, match="share no sequence of tokens"):
        compared(run(tmp_path / "a"), run(tmp_path / "b", change=_first_values, ids=tokens(1)))


def packed(lengths: tuple[int, ...]) -> Tensor:
    """The causal mask of documents that lie one after the other."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (of[:, None] == of).tril()


def test_documents_that_a_mask_keeps_apart_are_sequences(tmp_path: Path) -> None:
    """Without the mask their rows see keys that the other run lacks: of what O differs by then is told, too."""
    ids = tokens()

    def apart(layers: list[Attention]) -> None:
        for layer in layers:
            layer.mask = packed((LENGTH, LENGTH))

    alone = run(tmp_path / "alone", ids=ids)
    found = compared(run(tmp_path / "packed", change=apart, ids=ids.reshape(1, -1)), alone)
    assert found.tokens == 2 * LENGTH
    assert not found.causes
    assert not found.notes
    # Both round a little more than a well-rounded kernel in FP16: merges of splits are tried, of a document that begins
    # behind the first key of its cache.
    found = compared(run(tmp_path / "a", FP16, apart, ids=ids.reshape(1, -1)), run(tmp_path / "b", FP16, ids=ids))
    assert not found.causes
    mixed = compared(run(tmp_path / "mixed", ids=ids[[1, 0]].reshape(1, -1)), run(tmp_path / "one", ids=ids[:1]))
    assert [(cause.layer, cause.kind) for cause in mixed.causes] == [(0, "mask"), (1, "mask")]
    assert mixed.layers[0].difference > 0.5
