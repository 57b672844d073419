"""``attn-diag selftest``: this installation's numbers, or this GPU's arithmetic."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli import common


def selftest(
    hardware: Annotated[
        bool, typer.Option("--hardware", help="Measure this GPU's sums, exp2 and casts, and keep the profile.")
    ] = False,
    json: common.Json = None,
    plain: common.Plain = False,
    debug: common.Debug = False,  # noqa: ARG001
) -> None:
    """Check this installation's numbers against independent ones, or measure the GPU's arithmetic."""
    import sys

    from attn_diag.captures.hardware import save_profile
    from attn_diag.testing.hardware.installation import check_installation
    from attn_diag.testing.hardware.measure import measure_hardware

    common.require_apart([t for t in [common.json_target(json)] if t is not None], [])
    if hardware:
        profile = measure_hardware()
        common.deliver(profile, json, plain=plain)
        print(f"kept in {save_profile(profile)}", file=sys.stderr)
        return
    found = check_installation()
    common.deliver(found, json, plain=plain)
    raise typer.Exit(0 if found.passed else 1)
