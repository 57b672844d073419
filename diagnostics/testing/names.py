"""What users name: functions to import, and names out of known ones."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from importlib import import_module
from typing import Any

from attn_diag.errors import InputError


def imported(target: str) -> Any:
    """What MODULE:FUNCTION names, also in the working directory. Raises InputError where it cannot be imported."""
    module, _, name = target.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # a module of others may raise anything
        plain = isinstance(error, ImportError | AttributeError | ValueError)
        why = str(error) if plain else f"{type(error).__name__}: {error}"
        advice = (
            f"; name the module, not its file: {module.removesuffix('.py')}:{name}" if module.endswith(".py") else ""
        )
        raise InputError(f"cannot import {target}: {why}{advice}") from error
    finally:
        sys.path.remove("")


def choose_names(noun: str, names: Iterable[str] | None, known: Collection[str]) -> list[str]:
    """These of the ``known`` names, in their order; all for None. Raises InputError for unknown ones, and for a str."""
    if isinstance(names, str):
        raise InputError(f"{noun}s must be a list of names, got the string {names!r}; pass [{names!r}]")
    wanted = list(known if names is None else names)
    if unknown := [name for name in wanted if name not in known]:
        raise InputError(f"no {noun} {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    return [name for name in known if name in wanted]
