"""``attn_diag.observe("mylib::attention", …)``: an operator of somebody's own, one more beside those that are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attn_diag.errors import InputError
from attn_diag.watching.live.kernels import NAMES, OPERATORS, FusedOperator, Given, declare

_DEVICES = ("CPU", "CUDA", "XPU", "PrivateUse1")
# What an argument may be said to be. One of these words has another name among ours.
_WORDS = ("q", "k", "v", "o", "lse", "do", "mask", "causal", "scale", "window", "softcap", "dropout_p")
_OURS = {"causal": "is_causal"}
# Without these nothing can be made of a call; a backward is known as its forward's by O.
_FORWARD, _BACKWARD = ("q", "k", "v"), ("o", "do")
_RESULTS, _GRADIENTS = ("o", "lse"), ("dq", "dk", "dv")
_NOWHERE = 1_000

Returns = Sequence[str | None]


def declare_operator(
    name: str,
    *,
    backward: str,
    arguments: Mapping[str, str],
    returns: Returns,
    backward_returns: Returns,
    layout: str,
    stated: Mapping[str, Any],
) -> None:
    """Have an operator seen in the steps that are looked at from now on; see ``observe`` for what is to be given.

    Raises:
        InputError: There is no such operator; it or its backward lacks an argument that is needed or named; or it
            returns less than it is said to.
    """
    if any(name in (known.name, known.backward) for known in OPERATORS):
        raise InputError(f"{name} is known already, and need not be observed")
    if unknown := [word for word in arguments if word not in _WORDS]:
        raise InputError(f"arguments may say which argument is {', '.join(_WORDS)}; got {', '.join(unknown)}")
    if "o" not in returns:
        raise InputError(f'returns must say which result is "o", got {tuple(returns)}')
    names = {_OURS.get(word, word): theirs for word, theirs in arguments.items()}
    there = _checked(name, names, _FORWARD, returns, _RESULTS, "returns")
    if backward:
        there += _checked(backward, names, _BACKWARD, backward_returns, _GRADIENTS, "backward_returns")
    if absent := [theirs for theirs in names.values() if theirs not in there]:
        raise InputError(f"{name} has no argument {', '.join(absent)}; there are {', '.join(dict.fromkeys(there))}")
    causal = stated.get("causal") or "none"
    declare(
        FusedOperator(
            name,
            name,
            backward,
            _DEVICES,
            lse=_place(returns, "lse"),
            causal="top-left" if causal == "none" else causal,
            layout=layout,
            reads=_reader(names, stated),
            o=_place(returns, "o"),
            gradients=tuple(_place(backward_returns, gradient) for gradient in _GRADIENTS),
            holds=True,
        )
    )


def _reader(names: Mapping[str, str], stated: Mapping[str, Any]) -> Callable[[Given], Given]:
    """What its arguments say in our words; where none says it, what was stated."""

    def reads(given: Given) -> Given:
        # What has a name of ours is no argument that nobody knows.
        read: dict[str, Any] = {theirs: None for theirs in names.values() if theirs in given and theirs not in names}
        read |= {ours: given[theirs] for ours, theirs in names.items() if theirs in given}
        found = {**given, **read}
        for ours, word in (("is_causal", "causal"), ("scale", "scale"), ("softcap", "softcap")):
            if found.get(ours) is None and stated.get(word) is not None:
                read[ours] = stated[word]
        window = stated.get("window") if found.get("window") is None else found["window"]
        if window is not None:
            read["left"], read["right"] = window
        return read

    return reads


def _checked(
    name: str, names: Mapping[str, str], needed: Sequence[str], returns: Returns, results: Sequence[str], what: str
) -> list[str]:
    """The names of an operator's arguments; those that are needed are among them, and it returns enough."""
    schema = _schema(name)
    there = [argument.name for argument in schema.arguments]
    for word in needed:
        usual = [names[word]] if word in names else [word, *(theirs for theirs, ours in NAMES.items() if ours == word)]
        if not any(one in there for one in usual):
            raise InputError(
                f"{name} has no argument {names.get(word, word)}; it has {', '.join(there) or 'none'}: say which is "
                f'{word} by arguments={{"{word}": "…"}}'
            )
    if isinstance(returns, str) or any(one not in (*results, None) for one in returns):
        raise InputError(f"{what} must name results in their order, by {', '.join(results)} or None, got {returns!r}")
    # Whoever returns no LSE need not say so.
    last = max((number + 1 for number, one in enumerate(returns) if one not in (None, "lse")), default=0)
    several = [str(result.type) for result in schema.returns] == ["List[Tensor]"]
    if len(schema.returns) < last and not several:
        raise InputError(
            f"{name} returns {len(schema.returns)} results, not {', '.join(map(str, returns))}: say {what}"
        )
    return there


def _schema(name: str) -> Any:
    whole, _, overload = name.partition(".")
    if not all(whole.partition("::")):
        raise InputError(f'an operator has a name such as "namespace::name", got {name!r}')
    try:
        schema = torch._C._get_schema(whole, overload)
    except RuntimeError:
        raise InputError(
            f"no operator {name} is registered: import what registers it (by torch.library.custom_op, say) before"
        ) from None
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        raise InputError(f"{name} is taken apart into other operators: observe a function that calls it instead")
    return schema


def _place(results: Returns, name: str) -> int:
    """Which of the results it is; one that nobody has where it is none."""
    return list(results).index(name) if name in results else _NOWHERE
