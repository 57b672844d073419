"""Pipeline parallelism (torch.distributed.pipelining): which stage runs, and whether it runs in earnest."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

_STAGES = "torch.distributed.pipelining.stage"
# Before the first step a stage runs once on made-up numbers, to learn its shapes; with gradients since torch 2.13.
_REHEARSALS = ("_forward_metadata_inference", "_shape_inference")
# Between a stage and attention lie the frames of a whole model; between those of one stage only few.
_MAX_FRAMES, _BETWEEN = 200, 6


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline."""

    number: int
    count: int
    """How many stages there are."""
    ranks: int
    """On how many ranks."""
    rehearses: bool
    """Whether it only learns its shapes."""


def pipelines() -> bool:
    """Whether there may be any: their module is loaded (accelerate does so for everybody), and there are ranks."""
    return _STAGES in sys.modules and torch.distributed.is_available() and torch.distributed.is_initialized()


def stage_running() -> Stage | None:
    """The stage that makes the call; None outside of pipelines."""
    if (module := sys.modules.get(_STAGES)) is None:
        return None
    frame: FrameType | None = sys._getframe().f_back
    stage: Any = None
    rehearses, left = False, _MAX_FRAMES
    while frame is not None and left:
        code, left = frame.f_code, left - 1
        if code.co_filename == module.__file__:
            rehearses |= code.co_name in _REHEARSALS
            # Before Python 3.13 a look at a frame's variables keeps them alive: of one frame, that ends soon.
            stage = frame.f_locals.get("self") if stage is None else stage
            left = min(left, _BETWEEN)
        frame = frame.f_back
    if not hasattr(stage, "stage_index"):
        return None
    return Stage(stage.stage_index, stage.num_stages, stage.group_size, rehearses)
