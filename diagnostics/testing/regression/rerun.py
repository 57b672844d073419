"""A case of a check as a capture: what looks closer at a failure starts from a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from attn_diag.captures.capture import Capture
from attn_diag.captures.metadata import Causal
from attn_diag.errors import InputError
from attn_diag.head.machine import pick_device
from attn_diag.kernels import Recipe
from attn_diag.testing.regression import cases as suite
from attn_diag.testing.regression.subject import Attention, MisfitError, subject_of


def capture_of_case(
    target: Attention | str | Recipe | Capture | Sequence[Capture],
    case: str,
    *,
    captures: Sequence[Capture] = (),
    dtype: torch.dtype = torch.bfloat16,
    causal: bool | str = "none",
    head_dim: int = 64,
    scale: float | None = None,
    backward: bool | None = None,
    seed: int = 0,
    device: str = "auto",
    name: str | None = None,
    **_: Any,
) -> Capture | None:
    """The inputs of ``case`` and what the kernel returns for them once more.

    Arguments as those of ``attn_diag.check``, whose other options change no output. None where there is nothing to
    inspect: the kernel raises, or returns no attention's shape; or ``target`` is captures, which are files already.
    """
    if isinstance(target, Capture) or not (callable(target) or isinstance(target, str | Recipe)):
        return None
    where = pick_device(device)
    # Options that check has taken.
    mask = cast("Causal", causal if isinstance(causal, str) else "top-left" if causal else "none")
    alpha = head_dim**-0.5 if scale is None else scale
    try:
        subject = subject_of(target, name, dtype=dtype, head_dim=head_dim, device=where, backward=backward)
        if case in suite.BUILDERS:
            inputs = suite.draw(case, seed, dtype=dtype, causal=mask, head_dim=head_dim, scale=alpha)
        else:
            (inputs,) = (c for c in suite.of_captures(captures) if c.name == case)
        outputs, _notes = subject.run(inputs)
    except (MisfitError, InputError):
        return None
    return Capture.from_tensors(
        {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": inputs.do, **outputs},
        causal=inputs.causal,
        scale=inputs.scale,
        kernel=subject.name,
        notes=f"case {case} of attn-diag check, seed {seed}",
    )
