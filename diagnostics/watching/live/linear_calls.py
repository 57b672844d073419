"""Calls of linear attention met where they run: released functions, by their names.

flash-linear-attention's ``chunk_kda``, ``fused_recurrent_rwkv7``, ``naive_recurrent_gla`` and their kin, and those of
transformers and mamba_ssm, are found in every module that has them under their own name, and put back afterwards. A
call is recorded in ``linear_records``. RWKV-LM's operators are met in torch's dispatcher (``rwkv_operators``).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attn_diag.captures.linear import LinearCapture
from attn_diag.errors import InputError
from attn_diag.printing import say
from attn_diag.reference.linear import LINEAR_OPERATORS
from attn_diag.watching.live.functions import namespaces_with
from attn_diag.watching.live.linear_records import ENDED, LinearRecorder
from attn_diag.watching.live.rwkv_operators import listen

_NAME = re.compile(r"(?:fused_|naive_)?(?:chunk|recurrent)_(\w+)")
_OPERATORS = {"dplr_delta_rule": "dplr", "iplr_delta_rule": "iplr"}
# Others', whose names say less.
_ELSEWHERE = {
    "torch_chunk_gated_delta_rule": "gated_delta_rule", "torch_recurrent_gated_delta_rule": "gated_delta_rule",
    "chunk_kimi_delta_attention": "kda", "recurrent_kimi_delta_attention": "kda",
    "mamba2_chunk_scan": "mamba2", "mamba_chunk_scan_combined": "mamba2",
}  # fmt: skip


class LinearCalls(list[LinearCapture]):
    """The calls captured so far, complete once their backward has run; and why others were not."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, int] = {}
        """Reasons, each with how many calls it kept out."""


@contextmanager
def capture_linear(
    folder: str | os.PathLike[str] | None = None,
    *,
    most: int = 64,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> Iterator[LinearCalls]:
    """Capture calls of linear attention: those that begin inside, complete when it ends.

    Args:
        folder: Where captures are written, call0.safetensors and so on; None: they are only kept.
        most: Calls that are kept; later ones run as ever.
        functions: Other functions to meet, by the operator whose arguments they have; they are called under the names
            that modules have for them now.

    Yields:
        The captures, which fill when the ``with`` ends.
    """
    calls = LinearCalls()
    recorder = LinearRecorder(lambda: True if len(recorder.calls) < most else None)
    put_back = replace_functions(recorder, functions)
    try:
        yield calls
    finally:
        put_back()
        _finish(recorder, calls, None if folder is None else Path(folder))


def _finish(recorder: LinearRecorder, calls: LinearCalls, folder: Path | None) -> None:
    for number, call in enumerate(recorder.calls):
        try:
            capture = call.capture()
        except InputError as error:
            recorder.refuse(f"{call.function}: {error}")
            continue
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            capture.save(folder / f"call{number}_{call.function}.safetensors")
        calls.append(capture)
    calls.refused.update(recorder.refused)
    for reason, count in recorder.refused.items():
        say(f"attn-diag: {count} calls of linear attention were not captured: {reason}")


def replace_functions(
    recorder: LinearRecorder, functions: Mapping[str, Callable[..., Any]] | None = None
) -> Callable[[], None]:
    """Have the operators' functions recorded under every name that loaded modules have for them.

    Args:
        recorder: By whom.
        functions: Other functions to meet, by the operator whose arguments they have.

    Returns:
        What puts them back.

    Raises:
        InputError: An operator is not known.
    """
    met = {id(f): (op, f) for op, f in (functions or {}).items()}
    for operator, _ in met.values():
        if operator not in LINEAR_OPERATORS:
            raise InputError(f"operator must be one of {', '.join(LINEAR_OPERATORS)}, got {operator!r}")
    met |= {id(f): (op, f) for op, f in _loaded()}
    end = listen(recorder)
    wrapped = {key: recorder.wrapped(operator, function) for key, (operator, function) in met.items()}
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for space in list(namespaces_with(wrapped)):
        for name, value in list(space.items()):
            if id(value) in wrapped and callable(value):
                changed.append((space, name, value))
                space[name] = wrapped[id(value)]

    def put_back() -> None:
        end()
        for wrapper in wrapped.values():
            vars(wrapper)[ENDED] = True
        for space, name, value in changed:
            # Another one may stand in front of ours, and goes on; or have stood behind, and have ended.
            if space.get(name) is wrapped[id(value)]:
                while getattr(value, ENDED, False):
                    value = value.__wrapped__
                space[name] = value

    return put_back


def operator_of(name: str) -> str | None:
    """The operator of a released function; None where it has no name of one."""
    found = _NAME.fullmatch(name)
    operator = _ELSEWHERE.get(name) if found is None or name in _ELSEWHERE else _OPERATORS.get(found[1], found[1])
    return operator if operator in LINEAR_OPERATORS else None


def _loaded() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Released functions in loaded modules, with their operators."""
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith(("fla.ops", "transformers.models.", "mamba_ssm.")):
            continue
        space = vars(module)
        if module_name.startswith("fla.ops"):
            for name, value in list(space.items()):
                if callable(value) and (operator := operator_of(name)) is not None:
                    yield operator, value
        else:
            yield from ((operator, space[name]) for name, operator in _ELSEWHERE.items() if callable(space.get(name)))
