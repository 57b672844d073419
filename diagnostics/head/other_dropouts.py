"""Other dropout than a capture states: what a kernel computes that forgets it, takes another mask, or errs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from attn_diag.captures.capture import Capture
from attn_diag.captures.dropout import KEPT
from attn_diag.head.mistakes import Mistake
from attn_diag.reference import AttentionHead, Dropout

_MOST_HEADS = 8


def other_dropouts(capture: Capture, batch: int, head: int) -> list[Mistake]:
    """The mistakes that a faulty kernel may have made in a head's dropout.

    Args:
        capture: The capture.
        batch: Index of the batch item.
        head: Index of the query head in the capture.

    Returns:
        None at all, another mask, another factor, a row sum of what is kept alone; nothing where there is no dropout.
    """
    if capture.dropout(batch, head) is None:
        return []
    number = capture.metadata.head_offset
    nearest = sorted((h for h in range(capture.q_heads) if h != head), key=lambda h: abs(h - head))[:_MOST_HEADS]
    masks = [(f"the dropout mask of head {h + number}", "the dropout masks of other heads", batch, h) for h in nearest]
    others = sorted((b for b in range(capture.batch) if b != batch), key=lambda b: abs(b - batch))[:_MOST_HEADS]
    masks += [(words := f"the dropout mask of batch item {b}", words, b, head) for b in others]
    found = [_mistake(words, partial(_of_head, capture, b, h), several) for words, several, b, h in masks]
    return found + [_mistake(words, made) for words, made in _MISTAKES.items()]


def with_other_dropouts(capture: Capture) -> Iterator[tuple[str, Capture]]:
    """The capture with other dropout in all its heads, and what is to be said where its O fits it.

    Args:
        capture: The capture.

    Yields:
        Words and capture.
    """
    if KEPT not in capture.tensors:
        return
    kept, stated = capture.tensors[KEPT][...], capture.metadata
    bare = replace(
        capture, tensors={n: t for n, t in capture.tensors.items() if n != KEPT},
        metadata=replace(stated, dropout_p=None),
    )  # fmt: skip
    yield "dropout forgotten: O fits attention without it", bare
    others = {"inverted": ~kept}
    if kept.shape[1] > 1:
        others |= {"of the head before": kept.roll(1, 1), "of the head further on": kept.roll(-1, 1)}
    if kept.shape[0] > 1:
        others["of the batch item before"] = kept.roll(1, 0)
    for words, other in others.items():
        yield (
            f"another dropout mask: O fits the one {words}",
            replace(capture, tensors={**capture.tensors, KEPT: other}),
        )


def _mistake(words: str, made: Callable[[AttentionHead], AttentionHead], several: str | None = None) -> Mistake:
    return Mistake("dropout", words, made, several or words, "O has the right one")


def _of_head(capture: Capture, batch: int, which: int, head: AttentionHead) -> AttentionHead:
    dropout = capture.dropout(batch, which)
    assert dropout is not None
    return replace(head, dropout=replace(dropout, kept=dropout.kept.to(head.q.device)))


def _changed(change: Callable[[Dropout], Dropout], head: AttentionHead) -> AttentionHead:
    assert head.dropout is not None
    return replace(head, dropout=change(head.dropout))


def _transposed(dropout: Dropout) -> Dropout:
    square = dropout.kept.shape[0] == dropout.kept.shape[1]
    return replace(dropout, kept=dropout.kept.T) if square else dropout


def _renormalised(head: AttentionHead) -> AttentionHead:
    """What is dropped is masked: the row sum is that of what is kept."""
    assert head.dropout is not None
    kept, mask = head.dropout.kept, head.masking.mask
    if mask is not None:
        kept = mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, -torch.inf)
    return replace(head, dropout=None, masking=replace(head.masking, mask=kept))


_MISTAKES: dict[str, Callable[[AttentionHead], AttentionHead]] = {
    "no dropout (the mask forgotten)": lambda head: replace(head, dropout=None),
    "dropout without the factor 1/(1-p)": partial(_changed, lambda d: replace(d, p=0.0)),
    # 1 / (1 - p)^2 is the factor of another p.
    "dropout with the factor 1/(1-p) twice": partial(_changed, lambda d: replace(d, p=1 - (1 - d.p) ** 2)),
    "dropout with the factor 1/p": partial(_changed, lambda d: replace(d, p=1 - d.p)),
    "the dropout mask inverted (what is dropped kept)": partial(_changed, lambda d: replace(d, kept=~d.kept)),
    "the dropout mask transposed": partial(_changed, _transposed),
    "the dropout mask of the row before": partial(_changed, lambda d: replace(d, kept=d.kept.roll(1, 0))),
    "the dropout mask of the next row": partial(_changed, lambda d: replace(d, kept=d.kept.roll(-1, 0))),
    "the dropout mask of the key before": partial(_changed, lambda d: replace(d, kept=d.kept.roll(1, 1))),
    "the dropout mask of the next key": partial(_changed, lambda d: replace(d, kept=d.kept.roll(-1, 1))),
    "dropout before the row sum (what is kept sums to 1)": _renormalised,
}
