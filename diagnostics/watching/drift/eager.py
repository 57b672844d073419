"""While any trace runs, functions wrapped by torch.compile run eagerly.

Under a torch function mode Dynamo would break every graph into single operations, or refuse (``fullgraph=True``). The
stance is one for the whole process: the first trace sets it, and the last to end gives back what it found.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_LOCK = threading.Lock()
_STANCE = ExitStack()
_TRACES = 0


@contextmanager
def eagerly() -> Iterator[None]:
    """No compiled graph runs inside, in any thread. The first use imports torch._dynamo: a second or two."""
    global _TRACES
    with _LOCK:
        if _TRACES == 0:
            _STANCE.enter_context(torch.compiler.set_stance("force_eager"))
        _TRACES += 1
    try:
        yield
    finally:
        with _LOCK:
            _TRACES -= 1
            if _TRACES == 0:
                _STANCE.close()
