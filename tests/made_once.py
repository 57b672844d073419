"""What is made once in a run of tests, by whichever of pytest-xdist's processes needs it first."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
# The folder that the processes share; conftest.py sets it.
FOLDER = "ATTN_DIAG_MADE_ONCE"


def made_once(make: Callable[P, T]) -> Callable[P, T]:
    """``make`` of these arguments, which are numbers and names; the others wait while one makes it."""

    here: dict[str, T] = {}

    def shared(said: str, *arguments: P.args, **named: P.kwargs) -> T:
        folder = os.environ.get(FOLDER)
        if folder is None:
            return make(*arguments, **named)
        kept = Path(folder) / f"{make.__module__}.{make.__name__}({said})".replace(":", "-")
        with kept.with_name(f"{kept.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_bytes(pickle.dumps(make(*arguments, **named)))
        result: T = pickle.loads(kept.read_bytes())
        return result

    @wraps(make)
    def found(*arguments: P.args, **named: P.kwargs) -> T:
        said = ",".join([*map(str, arguments), *(f"{name}={value}" for name, value in sorted(named.items()))])
        if said not in here:
            here[said] = shared(said, *arguments, **named)
        return here[said]

    return found
