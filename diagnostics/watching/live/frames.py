"""What the frames of the stack are, to whoever looks for the module that runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn
from torch.fx import GraphModule

from attn_diag.watching.live.untraced import passed_by

MAX_FRAMES = 80
# Frames of torch's between a graph and an operator that it calls: some more when the graph runs for the first time.
_MAX_BETWEEN = 10
_TORCH = str(Path(torch.__file__).parent)
# The code of a graph; what the modules have that inductor writes; what calls graphs.
_GENERATED, _IN_INDUCTORS, _CALLS_GRAPHS = "<eval_with_key>", "extern_kernels", "runtime_wrappers.py"
# What runs a graph that is to become a CUDA graph.
_CUDA_GRAPHS_FILE = "cudagraph_trees.py"
# Where in the code of graphs a call stands, the innermost first: each code by its identity, and the instruction.
Site = tuple[tuple[int, int], ...]

# What the code of a frame is: read off it once.
GRAPH, CALLER_OF_GRAPHS, CUDA_GRAPHS, AUTOGRAD, METHOD = 1, 2, 4, 8, 16
kinds: dict[int, int] = {}
_codes: list[CodeType] = []
# Methods of what is no module.
_no_modules: set[int] = set()


def classified(frame: FrameType) -> int:
    """Say what the code of a frame is, and remember it."""
    code, found = frame.f_code, 0
    if code.co_filename.startswith(_GENERATED) or _IN_INDUCTORS in frame.f_globals:
        found |= GRAPH
    elif code.co_filename.endswith(_CALLS_GRAPHS):
        found |= CALLER_OF_GRAPHS
    elif code.co_filename.endswith(_CUDA_GRAPHS_FILE):
        found |= CUDA_GRAPHS
    first = code.co_varnames[:1]
    if first == ("ctx",) and code.co_name == "forward":
        found |= AUTOGRAD
    elif first == ("self",):
        found |= METHOD
    _codes.append(code)  # no other code gets its number
    kinds[id(code)] = found
    return found


def running(frame: FrameType | None) -> tuple[nn.Module | None, Site | None] | None:
    """The innermost module that runs and, in a compiled graph, the place of the call; None: that would not tell all.

    A quick look at what ``CallPlaces.caller`` reads: two calls with the same answer have the same caller.
    """
    site: list[tuple[int, int]] = []
    compiled = False
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        number = id(code)
        kind = kinds.get(number)
        if kind is None:
            kind = classified(frame)
        if kind:
            if kind & GRAPH:
                compiled = True
                site.append((number, frame.f_lasti))
            elif kind & CALLER_OF_GRAPHS:
                compiled = True
            elif kind & (CUDA_GRAPHS | AUTOGRAD):
                return None  # whether autograd asks for gradients, the function's context says
            if kind & METHOD and number not in _no_modules:
                owner = frame.f_locals.get("self")
                if not isinstance(owner, nn.Module):
                    _no_modules.add(number)
                elif not (compiled and isinstance(owner, GraphModule)):
                    return owner, tuple(site) if compiled else None
        frame = frame.f_back
    return None, tuple(site) if compiled else None


def graph_site(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """The code of a graph, and the place in it, where an operator is called that was called out of ``frame``."""
    for _ in range(_MAX_BETWEEN):
        if frame is None:
            return None
        kind = kinds.get(id(frame.f_code))
        if (classified(frame) if kind is None else kind) & GRAPH:
            return frame.f_code, frame.f_lasti
        if not frame.f_code.co_filename.startswith(_TORCH):
            return None  # somebody's own operator, that may call several
        frame = frame.f_back
    return None


def in_cuda_graphs_memory() -> bool:
    """Whether what is allocated now is a CUDA graph's: torch forbids that anything of ours stays there."""
    if "torch._inductor.cudagraph_trees" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe().f_back
    for _ in range(MAX_FRAMES):
        if frame is None:
            return False
        kind = kinds.get(id(frame.f_code))
        if (classified(frame) if kind is None else kind) & CUDA_GRAPHS:
            return True
        frame = frame.f_back
    return False


for _ours in (classified, running):
    passed_by(_ours.__code__)
