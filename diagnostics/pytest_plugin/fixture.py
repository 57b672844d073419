"""The fixture's object. ``attn_diag`` and torch are imported when a test uses it, not before."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import pytest

from attn_diag_pytest.baselines import baseline_path, full_name, numbered, safe

if TYPE_CHECKING:
    import torch

    from attn_diag import Capture, LinearCapture, Recipe
    from attn_diag.results.check import CheckReport
    from attn_diag.testing.linear.function import LinearFunctionGiven
    from attn_diag.testing.target import Attention
    from attn_diag.testing.unbiased import Clusters, TensorBias

PROPERTY = "attn_diag_baseline"


class CheckOptions(TypedDict, total=False):
    """Options of ``attn_diag.check``; its docstring explains them, and its defaults hold."""

    cases: Iterable[str] | None
    captures: Sequence[Capture]
    observation: str | None
    dtype: torch.dtype
    causal: bool | str
    window: Sequence[int] | None
    softcap: float | None
    alibi_slopes: Sequence[float] | torch.Tensor | None
    sinks: Sequence[float] | torch.Tensor | None
    head_dim: int
    length: int
    scale: float | None
    backward: bool | None
    level: float
    exact: bool
    seed: int
    device: str
    declared: str | None
    name: str | None


class LinearOptions(TypedDict, total=False):
    """Options of ``attn_diag.check_linear``, likewise."""

    cases: Iterable[str] | None
    captures: Sequence[LinearCapture]
    observation: str | None
    dtype: torch.dtype
    head_dim: int
    backward: bool | None
    level: float
    exact: bool
    seed: int
    device: str
    name: str | None


class AttnDiag:
    """What the fixture ``attn_diag`` gives a test."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._item: pytest.Item = request.node
        self._calls = 0

    def check_attention(
        self, target: Attention | str | Recipe | Capture | Sequence[Capture], **options: Unpack[CheckOptions]
    ) -> CheckReport:
        """Fail the test unless ``attn_diag.check(target, ...)`` passes; return its report.

        In a test marked ``attn_diag_baseline`` it is compared with the test's baseline, which ``pytest
        --attn-diag-update`` writes. A second call in the same test has a file of its own.

        Args:
            target: fn(q, k, v) -> o or (o, lse, ...), [B, H, T, D], differentiable where the backward is to be checked;
                or what else ``attn_diag.check`` takes, such as "sdpa" or the name of a recipe.
            options: Those of ``attn_diag.check``.
        """
        __tracebackhide__ = True
        import attn_diag
        from attn_diag.testing.regression.cases import capture_of_case

        return self._checked(
            lambda path, update: attn_diag.check(target, baseline=path, update=update, **options),
            lambda case: capture_of_case(target, case, **options),
        )

    def check_linear(
        self,
        target: LinearFunctionGiven | str | LinearCapture | Sequence[LinearCapture],
        operator: str | None = None,
        **options: Unpack[LinearOptions],
    ) -> CheckReport:
        """Fail the test unless ``attn_diag.check_linear(target, operator, ...)`` passes; as ``check_attention``.

        Args:
            target: A function with flash-linear-attention's arguments, or what else ``check_linear`` takes.
            operator: Whose arguments it has: "gated_delta_rule", "kda", "mamba2", …
            options: Those of ``attn_diag.check_linear``.
        """
        __tracebackhide__ = True
        import attn_diag
        from attn_diag.testing.linear.check import capture_of_linear_case

        return self._checked(
            lambda path, update: attn_diag.check_linear(target, operator, baseline=path, update=update, **options),
            lambda case: capture_of_linear_case(target, operator, case, **options),
        )

    def _checked(
        self,
        check: Callable[[Path | None, bool], CheckReport],
        failed: Callable[[str], Capture | LinearCapture | None],
    ) -> CheckReport:
        """Check against the test's baseline; ``failed`` runs a failing case once more, for a closer look."""
        __tracebackhide__ = True
        import attn_diag

        self._calls += 1
        base = baseline_path(self._item)
        path = None if base is None else numbered(base, self._calls)
        before = path.read_bytes() if path is not None and path.is_file() else None
        update = path is not None and bool(self._request.config.getoption("--attn-diag-update"))
        if path is not None and before is None and not update:
            raise self._without_baseline("this test has no baseline yet", path)
        try:
            report = check(path, update)
        except attn_diag.InputError as error:
            raise _failed(f"attn-diag: {error}") from None
        if path is not None and report.baseline_key is None and not update:
            raise self._without_baseline(f"this test's baseline has no entry for {report.key}", path)
        if path is not None and report.passed and update:
            self._tell_of_update(path, before)
        if not report.passed:
            raise _failed(*self._failure(report, path, failed))
        return report

    def assert_unbiased(
        self,
        observed: torch.Tensor,
        reference: torch.Tensor,
        *,
        clusters: Clusters | None = None,
        level: float = 0.01,
        name: str = "tensor",
    ) -> TensorBias:
        """Fail the test if ``observed`` is biased against ``reference``; see ``attn_diag.assert_unbiased``."""
        __tracebackhide__ = True
        import attn_diag

        try:
            return attn_diag.assert_unbiased(observed, reference, clusters=clusters, level=level, name=name)
        except (AssertionError, attn_diag.InputError) as error:
            raise _failed(f"attn-diag: {error}") from None

    def _tell_of_update(self, path: Path, before: bytes | None) -> None:
        """For the terminal's summary and JUnit; under pytest-xdist the test's report carries it."""
        from attn_diag.printing import printable

        what = "created" if before is None else "unchanged" if path.read_bytes() == before else "updated"
        self._item.user_properties.append((PROPERTY, f"{what} {printable(self._shown(path))}"))

    def _without_baseline(self, words: str, path: Path) -> BaseException:
        return _failed(
            f"attn-diag: {words}",
            f"expected    {self._shown(path)}",
            f"create it   {self._update_command()}",
            "and commit the file: later runs are compared with it.",
        )

    def _failure(
        self, report: CheckReport, path: Path | None, failed: Callable[[str], Capture | LinearCapture | None]
    ) -> list[str]:
        from attn_diag.reports.ci import failure_lines, gravest
        from attn_diag.results.check import BROKEN

        closer = None
        if (capture := failed(gravest(report).case)) is not None:
            file = self._request.getfixturevalue("tmp_path") / f"{safe(gravest(report).case)}.{self._calls}.safetensors"
            capture.save(file)
            closer = f"attn-diag inspect {shlex.quote(str(file))}"
        if path is None:
            return failure_lines(report, look_closer=closer)
        # What is broken cannot be made a baseline.
        accept = None if any(f.kind in BROKEN for f in report.failures) else self._update_command()
        return failure_lines(replace(report, baseline=self._shown(path)), look_closer=closer, accept=accept)

    def _update_command(self) -> str:
        return f"pytest --attn-diag-update {shlex.quote(f'{self._shown(self._item.path)}::{full_name(self._item)}')}"

    def _shown(self, path: Path) -> str:
        """Seen from where pytest was started, if that is shorter."""
        try:
            relative = os.path.relpath(path, self._request.config.invocation_params.dir)
        except ValueError:  # another drive
            return str(path)
        return min(relative, str(path), key=len)


def _failed(*said: str) -> BaseException:
    from attn_diag.printing import printable_lines

    return pytest.fail.Exception(printable_lines("\n".join(said)), pytrace=False)
