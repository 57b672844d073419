"""A pass over what inductor is to compile, beside the user's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.fx import Graph


def behind(theirs: Any, mark: Callable[[Graph], None], source: str) -> Any:
    """Inductor's setting of a pass, with one of ours behind what the user has set already.

    Args:
        theirs: The setting as it is; None: nothing is set.
        mark: Ours.
        source: The file that it stands in: what inductor keeps on disk is kept by it.
    """
    passes: Any = import_module("torch._inductor.custom_graph_pass")
    name = hashlib.sha256(Path(source).read_bytes()).hexdigest()

    class Marking(passes.CustomGraphPass):  # type: ignore[misc]
        """Ours alone."""

        def __call__(self, graph: Graph) -> None:
            mark(graph)

        def uuid(self) -> Any:
            # It is part of the key of what inductor keeps on disk.
            return f"attn_diag {name}"

    if theirs is None:
        return Marking()
    if hasattr(passes, "get_custom_graph_passes"):
        return (*passes.get_custom_graph_passes(theirs), Marking())
    # Before torch 2.13 there is one pass, which may want to know whether the graph is for inference.
    aware = getattr(passes, "CustomInferenceAwareGraphPass", None)
    informed = aware is not None and isinstance(theirs, aware)

    class Chained(aware if informed else passes.CustomGraphPass):  # type: ignore[misc]
        """Theirs, then ours."""

        def __call__(self, graph: Graph, *more: Any, **options: Any) -> None:
            theirs(graph, *more, **options)
            mark(graph)

        def uuid(self) -> Any:
            # Without a name of its own theirs keeps inductor from keeping anything.
            own = theirs.uuid() if isinstance(theirs, passes.CustomGraphPass) else None
            return (name, own) if own else None

    return Chained()
