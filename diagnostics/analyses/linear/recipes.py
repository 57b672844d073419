"""Recipes of linear attention's kernels: their names, their sites, and their errors on a capture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from torch import Tensor

from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.errors import InputError
from attn_diag.head.linear import LinearRun
from attn_diag.head.machine import pick_device
from attn_diag.kernels.linear_recipe import CHOICES, LINEAR_SITES, LinearFormat, LinearRecipe

SITES: dict[str, str] = {
    "operands": "operands of products within a chunk",
    "inter": "operands of products with the state",
    "stored": "what is handed on between products",
    "inverse": "the triangular inverse",
    "score_gradients": "the scores' gradients that the decay's gradient takes",
    **LINEAR_SITES,
    "log_steps": "the logarithms of the decays before their sums",
    "joined": "the products that put the triangular inverse together",
    "applied": "the products of the triangular inverse and scores",
    "score_operands": "decayed operands of the products that make scores",
    "beta_keys": "beta times k before its decays",
    "parts": "the parts of gradients",
    "decay_terms": "the products of states and their gradients that the decay's gradient sums",
    "closing": "the keys at a chunk's end, and their gradients, in the decay's gradient",
    "out": "the last rounding, of o and of gradients",
}
# A well-rounded kernel has no such rounding.
_RELEASED_ALONE = frozenset(
    ("log_steps", "joined", "applied", "score_operands", "beta_keys", "parts", "decay_terms", "closing")
)


def parse_recipe(text: str, run: LinearRun) -> LinearRecipe:
    """A well-rounded kernel's recipe with changes, such as "chunk=32,state=bf16".

    Raises:
        InputError: It names another field or format.
    """
    changes: dict[str, int | str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        if name == "chunk" and value.isascii() and value.isdecimal() and int(value) > 0:
            changes[name] = int(value)
        elif name in (*SITES, *CHOICES, "gradients") and value in get_args(LinearFormat):
            changes[name] = value
        else:
            sites, formats = ", ".join({**SITES, **CHOICES}), " or ".join(get_args(LinearFormat))
            raise InputError(f"--recipe takes chunk=N and {sites} = {formats}, got {part!r}")
    return replace(run.recipe, **changes)  # type: ignore[arg-type]


def recipe_words(recipe: LinearRecipe, run: LinearRun) -> str:
    """It in words."""
    own = run.recipe
    said = ["step by step" if recipe.chunk == 1 else f"chunks of {recipe.chunk}"]
    for site, words in SITES.items():
        fmt = getattr(recipe, site)
        if site == "operands" and recipe.inter is None:
            words = "operands of all products"
        if fmt != getattr(own, site) and fmt is not None:
            said.append(f"{words} in {fmt.upper()}")
    for choice, words in CHOICES.items():
        if choice not in SITES and getattr(recipe, choice) != getattr(own, choice):
            said.append(words)
    return ", ".join(said)


def opened(source: LinearCapture | str | Path, device: str) -> tuple[LinearRun, LinearCapture]:
    """A capture, and its reference."""
    capture = source if isinstance(source, LinearCapture) else load_linear(source)
    run = LinearRun(capture, pick_device(device))
    if run.format is None:
        raise InputError(
            f"{capture.source}: inputs are {capture.tensors['q'].dtype}; recipes are known for BF16 and FP16"
        )
    return run, capture


def head_index(capture: LinearCapture, head: int | None) -> int:
    """The index of a head that is given by the model's number."""
    offset, count = capture.metadata.head_offset, capture.tensors["v"].shape[2]
    index = 0 if head is None else head - offset
    if not 0 <= index < count:
        raise InputError(f"{capture.source}: no such head: it has {offset} to {offset + count - 1}")
    return index


def site_formats(recipe: LinearRecipe, run: LinearRun) -> dict[str, LinearFormat]:
    """What each site of the operator's kernel rounds to."""
    stored = recipe.stored or recipe.operands
    resolved: dict[str, LinearFormat] = {
        "inter": recipe.inter or recipe.operands, "stored": stored, "inverse": recipe.inverse or stored,
        "score_gradients": recipe.score_gradients or recipe.operands,
    }  # fmt: skip
    absent = {site for site in _RELEASED_ALONE if getattr(recipe, site) in (None, "fp32")}
    return {
        site: resolved.get(site, getattr(recipe, site)) for site in SITES if run.has_site(site) and site not in absent
    }


def with_sites(recipe: LinearRecipe, formats: Mapping[str, LinearFormat], rounding: frozenset[str]) -> LinearRecipe:
    """The recipe with these sites rounding, and all others in fp32."""
    chosen: dict[str, LinearFormat] = {s: f if s in rounding else "fp32" for s, f in formats.items()}
    if chosen["out"] == "fp32":
        chosen["gradients"] = "fp32"
    stored = chosen["stored"]
    like = dict.fromkeys(("inter", "stored", "score_gradients"), chosen["operands"]) | {"inverse": stored}
    plain: dict[str, LinearFormat | None] = {site: None for site, fmt in like.items() if chosen.get(site) == fmt}
    # Without these a kernel computes what they round otherwise, and exactly.
    plain |= {s: None for s in ("applied", "score_operands", "decay_terms", "closing") if chosen.get(s) == "fp32"}
    if chosen["operands"] == "fp32":
        # These round operands too.
        plain |= {"state_gradient": None, "score_weights": None, "new_values": None, "shared_scores": None}
    return replace(recipe, **(chosen | plain))  # type: ignore[arg-type]


def squares_of(run: LinearRun, outputs: Mapping[str, Tensor], heads: Iterable[int]) -> dict[int, dict[str, float]]:
    """||error||^2 / ||reference||^2 by head and quantity; Infinity where it is not finite."""
    found: dict[int, dict[str, float]] = {}
    for head in heads:
        own = found.setdefault(head, {})
        for name, value in outputs.items():
            place = run.place(name, head)
            if name not in run.reference.values or place is None:
                continue
            true = run.reference.values[name][place]
            size, missed = float(true.square().sum()), float((value[place] - true).square().sum())
            if size > 0:
                own[name] = missed / size if math.isfinite(missed) else math.inf
    return found
