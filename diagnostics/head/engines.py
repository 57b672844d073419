"""Who runs a recipe where no kernel's output was captured: the vectorised emulation, or the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.head.machine import backend_name
from attn_diag.kernels import (
    PRESETS,
    EmulatedHead,
    Recipe,
    RecipeNotSupportedError,
    check_supported,
    emulate_head,
    preset,
)
from attn_diag.reference import AttentionHead

Engine = Literal["emulation", "triton"]

DEFAULT_RECIPE = "fa2"
_INPUT_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def require_known(engine: str, recipes: Sequence[str | Recipe]) -> Engine:
    """The engine of that name. Raises InputError for an engine or a preset that does not exist."""
    if engine not in ("emulation", "triton"):
        raise InputError(f"engine must be emulation or triton, got {engine!r}")
    for name in recipes:
        if isinstance(name, str) and name not in PRESETS:
            raise InputError(f"no recipe {name!r}; known: {', '.join(PRESETS)}")
    return "emulation" if engine == "emulation" else "triton"


def select_recipes(
    capture: Capture, wanted: Sequence[str | Recipe], engine: Engine, *, needed: bool
) -> dict[str, Recipe]:
    """The recipes to run, by the name of the observation they become; the default one where one is ``needed``.

    Raises InputError for inputs that no recipe covers, and for recipes that the engine cannot run.
    """
    dtype = capture.tensors["q"].dtype
    chosen: dict[str, Recipe] = {}
    for item in list(wanted) or ([DEFAULT_RECIPE] if needed else []):
        if dtype not in _INPUT_FORMATS:
            named = str(dtype).removeprefix("torch.")
            raise InputError(
                f"{capture.source}: recipes are run for bfloat16 and float16 inputs, q is {named}; "
                "capture an observation (o) to inspect this input"
            )
        fmt: Any = _INPUT_FORMATS[dtype]
        recipe = preset(item, fmt, capture.head_dim) if isinstance(item, str) else item.for_input(fmt)
        try:
            _check(engine, recipe)
        except RecipeNotSupportedError as error:
            raise InputError(str(error)) from None
        chosen[f"{recipe.name} ({'emulated' if engine == 'emulation' else engine})"] = recipe
    return chosen


def run_recipe(engine: Engine, recipe: Recipe, head: AttentionHead) -> EmulatedHead:
    """What the recipe returns for one head. Raises InputError where the engine cannot run it here."""
    if engine == "emulation":
        return emulate_head(recipe, head)
    from attn_diag.kernels.backend import BackendError
    from attn_diag.kernels.triton_head import run_head

    try:
        return run_head(recipe, head)
    except (BackendError, ValueError) as error:
        raise InputError(f"--engine triton: {error}") from None


def engine_backend(engine: Engine, device: torch.device) -> str:
    """What a report calls the origin of the numbers."""
    if engine == "emulation":
        return f"emulation on {backend_name(device)}"
    from attn_diag.kernels.backend import describe_backend

    return describe_backend(device)


def _check(engine: Engine, recipe: Recipe) -> None:
    if engine == "emulation":
        check_supported(recipe)
        return
    from attn_diag.kernels.attention import check_kernels_support

    check_kernels_support(recipe)
