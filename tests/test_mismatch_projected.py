"""q, k or v that are apart where what is projected is not: few tokens, a cache in INT4, weights of another step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag import Capture
from attn_diag.results.mismatch import Mismatch

TOKENS, WIDTH, HEADS, KV_HEADS, CHANNELS = 128, 64, 4, 2, 256
Changed = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _side(layer: int, change: Changed = lambda q, k, v: (q, k, v), moved: float = 0.0) -> Capture:
    """A layer of one sequence; ``moved``: the size of a step that its weights are away."""
    x = _draw(layer, 1, TOKENS, CHANNELS).bfloat16()
    found = []
    for number, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)):
        weight = _draw(10 + number, heads * WIDTH, CHANNELS) / CHANNELS**0.5
        weight = (weight + moved * _draw(20 + number, *weight.shape).sign()).bfloat16()
        found.append((x.float() @ weight.float().T).bfloat16().view(1, TOKENS, heads, WIDTH).transpose(1, 2))
    q, k, v = change(*(t.clone() for t in found))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return Capture.from_tensors({"q": q, "k": k, "v": v, "o": o, "x": x}, causal="top-left", layer=layer)


def _run(change: Changed = lambda q, k, v: (q, k, v), moved: float = 0.0) -> Mismatch:
    return attn_diag.mismatch([_side(0), _side(1)], [_side(0), _side(1, change, moved)])


def _written(x: Tensor, token: int, other: int | None) -> Tensor:
    x[:, :, token] = 0 if other is None else x[:, :, other]
    return x


def _int4(x: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True) / 7
    return ((x.float() / scale).round() * scale).bfloat16()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda q, k, v: (q, _written(k, 40, 90), v),
            "k is another in token 40 (1 of 128) alone, where rollout has what train has in token 90",
        ),
        (
            lambda q, k, v: (q, _written(k, 40, 90), _written(v, 40, 90)),
            "k and v are another in token 40 (1 of 128) alone, where rollout has what train has in token 90",
        ),
        (
            lambda q, k, v: (q, _written(k, 50, None), _written(v, 50, None)),
            "k and v are another in token 50 (1 of 128) alone, where rollout has zeros",
        ),
        (lambda q, k, v: (q, k, _written(v, 3, 2).mul_(1.0)), "v is another in token 3 (1 of 128) alone, where"),
        (
            lambda q, k, v: (q, k[:, :, [*range(20), 21, 20, *range(22, 128)]], v),
            "k is another in tokens 20-21 (2 of 128) alone, where rollout has what train has in tokens 21 and 20",
        ),
    ],
    ids=["k", "both", "never written", "the token before", "two by turns"],
)
def test_a_token_that_is_another_is_told_with_its_place(change: Changed, said: str) -> None:
    """It was "the projection (weights, bias, …) is another" of a cache's entry that was written over."""
    found = _run(change)
    assert [(c.kind, c.label, c.place) for c in found.causes] == [("unnamed-input", "unnamed", "projection")]
    assert said in found.headline
    assert "weights" not in found.headline


def test_of_several_sequences_no_token_is_said() -> None:
    """They have other numbers of rows."""

    def shorter(layer: int) -> Capture:
        capture = _side(layer, lambda q, k, v: (q.flip(3), k.flip(3), v.flip(3)))
        part = {n: t[:, :90] if n == "x" else t[:, :, :90] for n, t in capture.tensors.items()}
        return Capture.from_tensors(part, causal="top-left", layer=layer)

    first, second = _side(0), _side(1, lambda q, k, v: (q, _written(k, 40, 90), v))
    other = [shorter(layer) for layer in (0, 1)]
    found = attn_diag.mismatch([first, other[0], _side(1), other[1]], [first, other[0], second, other[1]])
    assert [c.kind for c in found.causes] == ["unnamed-input"]
    assert ": the projection (weights, bias, " in found.headline


def test_tokens_that_are_the_same_again_are_told() -> None:
    """Of the first layer, whose v tells tokens, it was "the same tokens only up to number 40"."""

    def written(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, _written(k, 40, 90), _written(v, 40, 90)

    found = attn_diag.mismatch(_side(0), _side(0, written))
    assert "(not compared: 88 tokens from one on that is another)" in found.headline  # else "bit for bit the same"
    (note,) = (n for n in found.notes if "number 40" in n)
    assert "up to number 40, another v there and 87 of 87 the same again after it (another token, or an entry" in note


def test_a_cache_in_int4_is_storage() -> None:
    """It was "the projection (weights, bias, …) is another"."""
    found = _run(lambda q, k, v: (q, _int4(k), _int4(v)))
    assert [(c.kind, c.label) for c in found.causes] == [("storage", "rounding")]
    assert "k and v of rollout hold numbers of INT4 alone" in found.headline


def test_numbers_of_two_sizes_are_no_int4() -> None:
    """Ternary numbers are whole multiples too."""
    found = _run(lambda q, k, v: (q, k, v.sign()))
    assert [c.kind for c in found.causes] == ["unnamed-input"]
    assert "or a cache below 16 bits behind it" in found.headline


def test_another_k_is_told_beside_a_v_in_fp8() -> None:
    """What v is stored in was all that was said."""
    found = _run(lambda q, k, v: (q, k.flip(1), v.to(torch.float8_e4m3fn).bfloat16()))
    assert [c.kind for c in found.causes] == ["storage", "unnamed-input"]
    assert found.causes[1].words.startswith("k differs by ")


def test_weights_of_another_step_are_no_rounding() -> None:
    """O was 2.5 % apart, "nothing beyond rounding", from one and the same x."""
    found = _run(moved=1e-3)
    assert [(c.kind, c.place) for c in found.causes] == [("unnamed-input", "projection")]
    assert ", x by 0 %: the projection (weights, bias," in found.headline


@pytest.mark.parametrize("scale", [1.0, 1.03])
def test_what_is_wrong_beside_a_window_is_told(scale: float) -> None:
    """The window explains 99.2 % of the square, and that was all that was said of a scale 3 % too large."""
    train, rollout = (_side(0) for _ in range(2))
    q, k, v = (torch.as_tensor(rollout.tensors[name]).float() for name in "qkv")
    t = torch.arange(TOKENS)
    hidden = (t > t[:, None]) | (t <= t[:, None] - 64)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    o = ((q @ k.mT * (scale * WIDTH**-0.5)).masked_fill(hidden, -torch.inf).softmax(-1) @ v).bfloat16()
    other = Capture.from_tensors({**rollout.tensors, "o": o}, causal="top-left", layer=0)
    (cause,) = attn_diag.mismatch(train, other).causes
    assert cause.kind == "window"
    assert (", and more is wrong, or rounded coarsely, there: that leaves " in cause.words) == (scale != 1)


@pytest.mark.parametrize("moved", [0.0, 1e-5])
def test_the_same_weights_are(moved: float) -> None:
    assert not _run(moved=moved).causes
