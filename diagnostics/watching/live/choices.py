"""What a user chooses to watch, checked when it is said, not in the middle of a training run."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from attn_diag.errors import InputError


def require_container(name: str, chosen: object) -> None:
    """Check a choice of numbers (of steps, layers, calls).

    Raises:
        InputError: it is one number, or a text.
    """
    if isinstance(chosen, (str, bytes)) or not (chosen is None or isinstance(chosen, Container)):
        raise InputError(f"{name} must be a set, list or range of numbers, such as {{2}}, got {chosen!r}")


def require_model(model: object) -> None:
    """Check what is to be watched.

    Raises:
        InputError: it is neither a model nor None.
    """
    if model is None or isinstance(model, nn.Module):
        return
    got = f"the text {model!r}" if isinstance(model, str) else type(model).__name__
    load = ": load it first, as AutoModelForCausalLM.from_pretrained(…) does" if isinstance(model, str) else ""
    raise InputError(f"model must be a torch.nn.Module, or None for all calls of the process, got {got}{load}")
