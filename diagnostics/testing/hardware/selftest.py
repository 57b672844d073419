"""``selftest``: checks of this installation, or the measurement of this machine's GPU."""

from __future__ import annotations

import warnings
from typing import Literal, overload

from attn_diag.errors import InputError
from attn_diag.results.hardware import HardwareProfile
from attn_diag.results.selftest import Installation
from attn_diag.testing.hardware.installation import check_installation


@overload
def selftest(*, hardware: Literal[False] = False) -> Installation: ...
@overload
def selftest(*, hardware: Literal[True]) -> HardwareProfile: ...
@overload
def selftest(*, hardware: bool) -> Installation | HardwareProfile: ...
def selftest(*, hardware: bool = False) -> Installation | HardwareProfile:
    """Check this installation's numbers against independent ones on the CPU, in a few seconds.

    ``hardware``: measure the present GPU's sums of products, exp2 and casts instead, and keep the profile in the user's
    cache folder, from which later reports and captures on this GPU name it.

    Raises InputError, with ``hardware``, where there is no CUDA device or Triton. Warns where the profile cannot
    be kept.
    """
    if not hardware:
        return check_installation()
    from attn_diag.captures.hardware import save_profile
    from attn_diag.testing.hardware.measure import measure_hardware

    profile = measure_hardware()
    try:
        save_profile(profile)
    except InputError as error:
        warnings.warn(f"the profile is measured but not kept: {error}", stacklevel=2)
    return profile
