"""Which tensor of a dump is which: names in use for q, k, v, O and the rest, and ``--map NAME=KEY``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from attn_diag.captures.metadata import refuse_unsupported
from attn_diag.captures.sources import INPUTS, OBSERVED, PACKING
from attn_diag.errors import InputError

# Names in use, also at the end of a longer one ("attn_q", "self_attn.query_states").
_ANYWHERE = {
    "q": ("q", "query", "queries", "query_states", "query_layer", "xq"),
    "k": ("k", "key", "keys", "key_states", "key_layer", "xk"),
    "v": ("v", "value", "values", "value_states", "value_layer", "xv"),
    "o": ("attn_output", "attn_out", "attention_output", "attn_context", "context_layer"),
    "lse": ("lse", "softmax_lse", "logsumexp", "log_sum_exp"),
    "do": ("do", "dout", "d_out", "d_o"),
    "dq": ("dq", "d_q", "dquery"),
    "dk": ("dk", "d_k", "dkey"),
    "dv": ("dv", "d_v", "dvalue"),
    "dq_pre": ("dq_pre",),
    "w_q": ("w_q", "wq"),
    "sinks": ("s_aux", "learnable_sink", "attention_sinks", "attn_sink", "softmax_offset"),
    "dsinks": ("dsinks", "ds_aux"),
    "alibi_slopes": ("alibi_slopes",),
}
# Too common as endings.
_ALONE = {
    "o": ("o", "out", "output", "context"),
    "delta": ("delta",),
    "x": ("x", "hidden_states"),
    "mask": ("mask", "attn_mask", "attn_bias", "attention_mask"),
    "sinks": ("sinks", "sink_bias"),
    **{name: (name,) for name in ("q_positions", "q_descale", "k_descale", "v_descale")},
}
_GRADIENT = re.compile(r"(?:grad_+(?P<after>.+)|(?P<before>.+?)_+grad)")
_GRADIENT_OF = {"o": "do", "q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "mask": "dmask"}
_PACKED = re.compile(r"cu_?seq_?lens?(_[a-z]+)*|(?:qo|kv|paged_kv|mask)_indptr(_buf)?", re.IGNORECASE)
_PAGED = re.compile(r"(?:paged_)?kv_indices|block_tables?|page_tables?|paged_kv_.*|kv_cache", re.IGNORECASE)
_LISTED = 24


@dataclass(frozen=True)
class Leaf:
    """A tensor in a dump."""

    path: str
    """What the user sees and maps."""
    name: str
    """The part that may say what it is."""
    call: tuple[str, ...]
    """What its call is told by."""
    read: Callable[[], Tensor]
    """Reads it."""


def refuse_packed(name: str) -> None:
    """Raise InputError if ``name`` belongs to packed sequences, a paged KV cache or another unsupported feature."""
    if _PAGED.fullmatch(name):
        raise InputError(
            f"'{name}': a paged KV cache is not supported: the dump holds pages, not the keys of one sequence; "
            "dump a call on contiguous k and v"
        )
    if _PACKED.fullmatch(name):
        raise InputError(
            f"'{name}': packed (varlen) sequences are not supported in other tools' dumps: make a capture of the "
            "call's tensors, cu_seqlens_q and cu_seqlens_k among them (attn_diag.Capture.from_tensors)"
        )
    if role_of(name) not in (("sinks", True), ("dsinks", True), ("alibi_slopes", True)):
        refuse_unsupported(name)


def parse_map(text: Iterable[str]) -> dict[str, str]:
    """``NAME=KEY`` options as a dict. Raises InputError for names that capture format 1 does not know."""
    names: dict[str, str] = {}
    for item in text:
        name, equals, key = item.partition("=")
        if not equals or not key:
            raise InputError(f"--map must be NAME=KEY, such as q=layers.0.query, got {item!r}")
        names[name] = key
    return names


def require_known(names: Iterable[str]) -> None:
    """Raise InputError for names that capture format 1 does not have (an observation's may carry its name)."""
    known = (*(name for name in INPUTS if name not in PACKING), *OBSERVED)
    for name in names:
        observation, _, base = name.rpartition(".")
        if base not in known or (observation and base not in OBSERVED):
            raise InputError(
                f"{name!r} is no tensor of a capture; known: {', '.join(known)}, and flash.o for flash's o"
            )


def role_of(name: str) -> tuple[str, bool] | None:
    """What a tensor of this name is in capture format 1, and whether it has just that name; None if unknown."""
    name = name.lower().replace("-", "_")
    if (gradient := _GRADIENT.fullmatch(name)) is not None:
        found = role_of(gradient["after"] or gradient["before"])
        return None if found is None or found[0] not in _GRADIENT_OF else (_GRADIENT_OF[found[0]], found[1])
    for role, aliases in (*_ANYWHERE.items(), *_ALONE.items()):
        if name in aliases:
            return role, True
    endings = [(len(a), role) for role, aliases in _ANYWHERE.items() for a in aliases if name.endswith("_" + a)]
    return (max(endings)[1], False) if endings else None


def choose(leaves: Sequence[Leaf], names: Mapping[str, str]) -> dict[str, Leaf]:
    """The tensors of one call by their names in capture format 1.

    ``names`` says which; the others are told by their own names, exact ones before endings. Raises InputError where
    two tensors have equal claims.
    """
    chosen: dict[str, Leaf] = {}
    for role, key in names.items():
        matching = [leaf for leaf in leaves if matches(leaf, key)]
        if len(matching) > 1:
            raise ambiguous(f"several tensors match {role}={key}", matching)
        if matching:
            chosen[role] = matching[0]
    told = [(role_of(leaf.name), leaf) for leaf in leaves if leaf not in chosen.values()]
    for role in dict.fromkeys(found[0] for found, _ in told if found is not None and found[0] not in names):
        exact, ending = ([leaf for found, leaf in told if found == (role, how)] for how in (True, False))
        best = exact or ending
        if len(best) > 1:
            raise ambiguous(f"several tensors may be {role}", best)
        chosen[role] = best[0]
    return chosen


def matches(leaf: Leaf, key: str) -> bool:
    """Whether ``key`` names the leaf: its path, the end of it, a pattern of it, or its path without numbers."""
    plain = ".".join(part for part in leaf.path.split(".") if not part.isdecimal())
    return key in (leaf.path, plain) or leaf.path.endswith(f".{key}") or fnmatchcase(leaf.path, key)


def require_matching(leaves: Sequence[Leaf], names: Mapping[str, str]) -> None:
    """Raise InputError for a mapping that no tensor matches."""
    for role, key in names.items():
        if not any(matches(leaf, key) for leaf in leaves):
            raise ambiguous(f"no tensor matches {role}={key}", leaves)


def ambiguous(what: str, leaves: Sequence[Leaf]) -> InputError:
    """An error that lists tensors with their shapes, and says how to map them."""
    listed = [f"{leaf.path} {_shape(leaf)}" for leaf in leaves[:_LISTED]]
    more = f", and {len(leaves) - _LISTED} more" if len(leaves) > _LISTED else ""
    return InputError(
        f"{what}; found {', '.join(listed) or 'no tensors'}{more}; say which is which with "
        "--map q=NAME --map k=NAME --map v=NAME --map o=NAME"
    )


def _shape(leaf: Leaf) -> str:
    try:
        tensor = leaf.read()
    except InputError:
        return "(unreadable)"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
