"""What a run's later calls find in its cache, as transformers' quantised caches change it: healthy, and with faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from builders import some
from torch import Tensor

import attn_diag
from attn_diag import Capture
from attn_diag.results.mismatch import Mismatch

PROMPT, LENGTH = 48, 54


def _run(levels: int | None, fault: str = "") -> Mismatch:
    """A prompt and six decoded tokens; the cache is quantised behind the prompt, in groups of 16 with a zero point."""
    draw = torch.Generator().manual_seed(3)
    whole = {name: torch.randn(1, 2, LENGTH, 32, generator=draw).bfloat16() for name in "qkv"}
    attend = torch.nn.functional.scaled_dot_product_attention
    o = attend(whole["q"], whole["k"], whole["v"], is_causal=True)
    trainer = Capture.from_tensors({**whole, "o": o}, causal="top-left", layer=0)
    first = {name: t[:, :, :PROMPT] for name, t in {**whole, "o": o}.items()}
    calls = [Capture.from_tensors(first, causal="top-left", layer=0, step=0)]
    cache = {name: _stored(whole[name][:, :, :PROMPT], levels, fault) for name in "kv"}
    for token in range(PROMPT, LENGTH):
        at = slice(token, token + 1)
        held = {name: torch.cat([t, whole[name][:, :, PROMPT : token + 1]], 2) for name, t in cache.items()}
        q = whole["q"][:, :, at]
        step = {"q": q, **held, "o": attend(q, held["k"], held["v"])}
        calls.append(Capture.from_tensors(step, causal="bottom-right", layer=0, step=token - PROMPT + 1))
    return attn_diag.mismatch(trainer, calls)


def _stored(x: Tensor, levels: int | None, fault: str) -> Tensor:
    if levels is not None:
        groups = x.float().reshape(*x.shape[:3], -1, 16)
        zero = groups.amin(4, keepdim=True)
        width = (groups.amax(4, keepdim=True) - zero) / levels
        codes = ((groups - zero) / width).round()
        x = (codes * width + (0 if fault == "zero point" else zero)).flatten(3).bfloat16()
    if fault == "scale":
        x = x * torch.tensor([1.0, 1.25])[:, None, None].bfloat16()
    if fault == "wrong token":
        x = torch.cat([x[:, :, :20], x[:, :, 19:20], x[:, :, 21:]], 2)
    if fault == "lost key":
        x = torch.cat([x[:, :, :20], x[:, :, 21:]], 2)
    return x


@pytest.mark.parametrize("levels", [15, 3, 255])
def test_a_healthy_cache_of_few_bits_is_rounding(levels: int) -> None:
    found = _run(levels)
    # Eight bits leave half a per cent, no more than a rotation that is made again.
    assert [(c.kind, c.label) for c in found.causes] == [("storage", "rounding")] * (levels < 255)
    assert found.tokens == LENGTH


@pytest.mark.parametrize("levels", [15, 255])
def test_the_scale_of_one_head_is_named_and_no_rounding(levels: int) -> None:
    found = _run(levels, "scale")
    assert [(c.kind, c.label) for c in found.causes] == [("storage", "unnamed")]
    assert "k is 1.25 times what was put there in head 1: another scale" in found.headline


@pytest.mark.parametrize("levels", [15, 3])
def test_a_lost_zero_point_is_named_and_its_calls_are_compared(levels: int) -> None:
    """The calls were taken for other sequences': 'bit for bit the same', of the prompt alone."""
    found = _run(levels, "zero point")
    assert [(c.kind, c.label) for c in found.causes] == [("storage", "unnamed")]
    assert "in heads 0-1: a zero point that is lost or another" in found.headline
    assert found.tokens == LENGTH


def test_a_token_that_is_written_over_is_no_cache_of_few_bits() -> None:
    """Token 20 holds token 19's: it was "k is 18.3 % off …, as a cache below 16 bits makes it"."""
    found = _run(None, "wrong token")
    assert [(c.kind, c.label) for c in found.causes] == [("storage", "unnamed")]
    assert "k in 1 of 48 tokens and v in 1 of 48 tokens is another, and all else is as it was put" in found.headline


@pytest.mark.parametrize("levels", [None, 15])
def test_a_cache_that_lost_a_key_is_a_finding(levels: int | None) -> None:
    found = _run(levels, "lost key")
    first = some(found.causes)[0]
    assert (first.kind, first.side, first.label) == ("unnamed-input", "rollout", "unnamed")
    assert "47 where 48 were put, other ones from token 20 on, at step 1" in first.words


def _called(ends: Sequence[tuple[int, int, int]], held: Callable[[Tensor], Tensor] = lambda x: x) -> Mismatch:
    """A forward of 76 tokens, beside calls on a cache: first row, end, and the first row of a rejected draft."""
    draw = torch.Generator().manual_seed(5)
    whole, draft = ({name: torch.randn(1, 2, 76, 32, generator=draw).bfloat16() for name in "qkv"} for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    o = attend(whole["q"], whole["k"], whole["v"], is_causal=True)
    calls = []
    for step, (begin, end, rejected) in enumerate(ends):
        new = {name: torch.cat([t[:, :, :rejected], draft[name][:, :, rejected:]], 2) for name, t in whole.items()}
        k, v = (torch.cat([held(new[name][:, :, :begin]), new[name][:, :, begin:end]], 2) for name in "kv")
        seen = torch.ones(end - begin, k.shape[2], dtype=torch.bool).tril(k.shape[2] - (end - begin))
        q = new["q"][:, :, begin:end]
        tensors = {"q": q, "k": k, "v": v, "o": attend(q, k, v, attn_mask=seen)}
        calls.append(Capture.from_tensors(tensors, causal="bottom-right", layer=0, step=step))
    return attn_diag.mismatch(Capture.from_tensors({**whole, "o": o}, causal="top-left", layer=0), calls)


def test_rejected_drafts_are_no_lost_keys_and_their_sequence_is_compared() -> None:
    """It was "68 where there should be 70, other ones from token 66 on", and of eight calls the last was compared."""
    found = _called(
        [(0, 64, 64), (64, 67, 66), (66, 69, 67), (67, 70, 68), *((n, n + 1, n + 1) for n in range(68, 76))]
    )
    assert not found.causes
    assert found.tokens == 76


def test_a_cache_that_lets_keys_go_is_told_without_saying_how_many_there_should_be() -> None:
    """The first four and the last twenty are kept; what repeats at the beginning of a window is no lost key."""
    found = _called(
        [(0, 40, 40), *((n, n + 1, n + 1) for n in range(40, 48))],
        lambda x: torch.cat([x[:, :, :4], x[:, :, -20:]], 2) if x.shape[2] > 24 else x,
    )
    assert "24 where 40 were put" in some(found.causes)[0].words


@pytest.mark.parametrize("later_weights", [False, True])
def test_fp8_with_other_scales_in_both_is_storage_and_other_weights_are_not(later_weights: bool) -> None:
    """It was "the projection (weights, bias, …) is another" of runs that have a scale for each call."""
    draw = torch.Generator().manual_seed(6)
    whole = {name: torch.randn(1, 2, 64, 32, generator=draw) for name in "qkv"}
    moved = whole["v"] + 0.3 * later_weights * torch.randn(whole["v"].shape, generator=draw)
    sides = []
    for factor, v in ((1.0, whole["v"]), (1.3, moved)):
        stored = {n: (t / factor).to(torch.float8_e4m3fn).float() * factor for n, t in (("k", whole["k"]), ("v", v))}
        x = {"q": whole["q"].bfloat16(), **{n: t.bfloat16() for n, t in stored.items()}}
        o = torch.nn.functional.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)
        sides.append(Capture.from_tensors({**x, "o": o}, causal="top-left", layer=0))
    found = attn_diag.mismatch(*sides)
    assert [c.kind for c in found.causes] == ["unnamed-input" if later_weights else "storage"]


def test_what_was_not_compared_is_said_where_nothing_was_found() -> None:
    """A sequence that the other run does not have."""
    draw = torch.Generator().manual_seed(4)

    def forward(names: str, step: int) -> list[Capture]:
        found: list[Capture] = []
        for name in names:
            draw.manual_seed(ord(name))
            q, k, v = (torch.randn(1, 1, 20, 32, generator=draw).bfloat16() for _ in range(3))
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            tensors = {"q": q, "k": k, "v": v, "o": o}
            found.append(Capture.from_tensors(tensors, causal="top-left", layer=0, step=step + len(found)))
        return found

    found = attn_diag.mismatch(forward("a", 0), forward("ab", 0))
    assert found.outcome == "identical"
    assert found.headline.endswith("(not compared: 1 of 2 sequences of rollout)")


def _masked(decoding: Callable[[int], Tensor], layers: int = 1, prefill: float = -torch.inf) -> Mismatch:
    """A prompt and decoded tokens, with a window of 24 keys; ``decoding`` says which keys a decoded token sees."""
    draw = torch.Generator().manual_seed(3)
    attend = torch.nn.functional.scaled_dot_product_attention
    place = torch.arange(LENGTH)
    seen = (place <= place[:, None]) & (place > place[:, None] - 24)
    trainer, calls = [], []
    for layer in range(layers):
        q, k, v = (torch.randn(1, 2, LENGTH, 32, generator=draw).bfloat16() for _ in range(3))
        tensors = {"q": q, "k": k, "v": v, "mask": seen[None, None], "o": attend(q, k, v, seen)}
        trainer.append(Capture.from_tensors(tensors, layer=layer))
        mask = torch.zeros(PROMPT, PROMPT).masked_fill(~seen[:PROMPT, :PROMPT], prefill)[None, None]
        first = {name: tensors[name][:, :, :PROMPT] for name in "qkvo"}
        calls.append(Capture.from_tensors({**first, "mask": mask}, layer=layer, step=0))
        for token in range(PROMPT, LENGTH):
            kept = decoding(token)[: token + 1][None, None, None] if layer == layers - 1 else seen[None, None, token]
            kept = kept[..., None, : token + 1] if kept.dim() == 3 else kept
            one = {"q": q[:, :, token : token + 1], "k": k[:, :, : token + 1], "v": v[:, :, : token + 1]}
            one |= {"mask": kept, "o": attend(one["q"], one["k"], one["v"], kept)}
            calls.append(Capture.from_tensors(one, layer=layer, step=token - PROMPT + 1))
    return attn_diag.mismatch(trainer, calls)


def _window(size: int, ends: int = 0) -> Callable[[int], Tensor]:
    place = torch.arange(LENGTH)
    return lambda token: (place <= token + ends) & (place > token + ends - size)


def test_a_window_that_is_short_in_decoding_alone_is_told_by_its_size_there() -> None:
    """It said "a window of 24 keys in train, a window of 24 keys in rollout": the prompt's rows had the right one."""
    (cause,) = _masked(_window(23)).causes
    assert cause.kind == "window"
    assert cause.words.startswith("a window of 24 keys in train, a window of 23 keys in rollout (12 of 108 rows)")


@pytest.mark.parametrize("layers", [1, 2])
def test_decoding_without_the_rows_own_key_is_a_mask(layers: int) -> None:
    """It said that the cache no longer holds what was put there, that something outside attention is another, or OK."""
    (cause,) = _masked(_window(24, -1), layers).causes
    assert (cause.layer, cause.kind) == (layers - 1, "mask")
    assert cause.words.startswith("masks: in 12 of 108 rows train sees 12 keys that rollout does not, and rollout 12")


@pytest.mark.parametrize(("value", "kinds"), [(-1e4, []), (-1e9, []), (-10.0, ["mask"])])
def test_what_is_added_to_hide_keys_hides_them(value: float, kinds: list[str]) -> None:
    """-1e4 and -1e9 leave nothing of a key; "rollout sees 828 keys that train does not"."""
    assert [cause.kind for cause in _masked(_window(24), prefill=value).causes][:1] == kinds


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(("ends", "words"), [(0, ""), (1, "rollout 10 that train"), (-1, "train sees 12 keys that")])
def test_a_mask_that_is_one_key_off_in_a_cache_of_fixed_size(ends: int, words: str, everywhere: bool) -> None:
    """It was an error, "q differs by 49.6 %: the projection … is another", or OK of the second layer alone."""
    draw = torch.Generator().manual_seed(3)
    attend = torch.nn.functional.scaled_dot_product_attention
    place = torch.arange(LENGTH + 8)
    trainer, calls = [], []
    for layer in range(2):
        q, k, v = (torch.randn(1, 2, LENGTH, 32, generator=draw).bfloat16() for _ in range(3))
        whole = {"q": q, "k": k, "v": v, "o": attend(q, k, v, is_causal=True)}
        trainer.append(Capture.from_tensors(whole, causal="top-left", layer=layer))
        slots = torch.zeros(2, 1, 2, LENGTH + 8, 32).bfloat16()
        for step, rows in enumerate([slice(0, PROMPT), *(slice(t, t + 1) for t in range(PROMPT, LENGTH))]):
            slots[0][:, :, rows], slots[1][:, :, rows] = k[:, :, rows], v[:, :, rows]
            off = ends if step and (everywhere or layer) else 0
            mask = (place <= torch.arange(LENGTH)[rows, None] + off)[None, None]
            one = {"q": q[:, :, rows], "k": slots[0].clone(), "v": slots[1].clone(), "mask": mask}
            one["o"] = attend(one["q"], one["k"], one["v"], mask)
            calls.append(Capture.from_tensors(one, layer=layer, step=step))
    found = attn_diag.mismatch(trainer, calls).causes
    assert [(cause.layer, cause.kind) for cause in found] == [(i, "mask") for i in range(1 - everywhere, 2) if ends]
    assert all(words in cause.words for cause in found)
