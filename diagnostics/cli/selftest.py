"""``attn-diag selftest``: this installation's numbers, or this GPU's arithmetic."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli.delivery import Delivery
from attn_diag.cli.options import command
from attn_diag.printing import say


@command
def selftest(
    *,
    hardware: Annotated[
        bool, typer.Option("--hardware", help="Measure this GPU's sums, exp2 and casts, and keep the profile.")
    ] = False,
    delivery: Delivery,
) -> int:
    """Check this installation's numbers against independent ones, or measure the GPU's arithmetic."""
    from attn_diag.captures.hardware import save_profile
    from attn_diag.testing.gpu import measure_hardware
    from attn_diag.testing.selftest import check_installation

    delivery.require_apart([])
    if hardware:
        profile = measure_hardware()
        delivery.deliver(profile)
        say(f"kept in {save_profile(profile)}")
        return 0
    found = check_installation()
    delivery.deliver(found)
    return 0 if found.passed else 1
