"""The fixture's object. ``attn_diag`` and torch are imported when a test uses it, not before."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, Unpack

import pytest

from attn_diag_pytest.baselines import baseline_path, numbered

if TYPE_CHECKING:
    import torch

    from attn_diag import Recipe
    from attn_diag.regression.result import CheckReport
    from attn_diag.regression.unbiased import Clusters, TensorBias

PROPERTY = "attn_diag_baseline"


class CheckOptions(TypedDict, total=False):
    """Options of ``attn_diag.check``; its docstring explains them, and its defaults hold."""

    cases: Sequence[str] | None
    captures: Sequence[str | Path]
    dtype: torch.dtype
    causal: bool | str
    head_dim: int
    scale: float | None
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

    def check_attention(self, fn: Callable[..., Any] | str | Recipe, **options: Unpack[CheckOptions]) -> CheckReport:
        """Fail the test unless ``attn_diag.check(fn, ...)`` passes; its report otherwise.

        fn: (q, k, v) -> o or (o, lse, ...), [B, H, T, D], differentiable where the backward is to be checked; or what
            else ``attn_diag.check`` takes, such as the name of a recipe.
        options: those of ``attn_diag.check``.

        In a test marked ``attn_diag_baseline`` it is compared with the test's baseline, which ``pytest
        --attn-diag-update`` writes. A second call in the same test has a file of its own.
        """
        __tracebackhide__ = True
        import attn_diag

        self._calls += 1
        base = baseline_path(self._item)
        path = None if base is None else numbered(base, self._calls)
        updating = path is not None and bool(self._request.config.getoption("--attn-diag-update"))
        if path is not None and not updating and not path.is_file():
            self._fail(
                "attn-diag: this test has no baseline yet",
                f"expected   {_shown(path)}",
                f"create it  {self._update_command()}",
                "and commit the file: later runs are compared with it.",
            )
        before = _bytes(path) if updating else None
        try:
            if path is None:
                report = attn_diag.check(fn, **options)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                report = attn_diag.check(fn, baseline=path, update=updating, **options)
        except attn_diag.InputError as error:
            self._fail(f"attn-diag: {error}")
        if path is not None and updating:
            self._record(path, before)
        if not report.passed:
            self._fail(*self._failure(report, accept=path is not None))
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
            self._fail(f"attn-diag: {error}")

    def _failure(self, report: CheckReport, *, accept: bool) -> list[str]:
        from attn_diag.reports.check_failure import failure_lines

        return failure_lines(report, accept=self._update_command() if accept else None)

    def _record(self, path: Path, before: bytes | None) -> None:
        """For the terminal's summary and JUnit; under pytest-xdist it travels with the test's report."""
        after = _bytes(path)
        what = "unchanged" if after == before else "created" if before is None else "updated"
        self._item.user_properties.append((PROPERTY, f"{what} {_shown(path)}"))

    def _update_command(self) -> str:
        node = self._request.config.cwd_relative_nodeid(self._item.nodeid)
        return f"pytest --attn-diag-update {shlex.quote(node)}"

    def _fail(self, *lines: str) -> NoReturn:
        __tracebackhide__ = True
        pytest.fail("\n".join(lines), pytrace=False)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _shown(path: Path) -> str:
    """From the working directory where that is shorter."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # another drive
        return str(path)
    return min(relative, str(path), key=len)
