"""pytest plugin of attn-diag: the fixture ``attn_diag``, baselines beside the tests, ``--attn-diag-update``.

    import pytest
    from my_kernels import attention                    # fn(q, k, v) -> o or (o, lse), [B, H, T, D]

    @pytest.mark.attn_diag_baseline                     # attn_diag_baselines/<this module>/test_attention.json
    def test_attention(attn_diag):
        attn_diag.check_attention(attention, causal="top-left")

    def test_layer_norm(attn_diag):
        attn_diag.assert_unbiased(layer_norm(x), layer_norm(x.double()), name="layer norm")

Once: ``pytest --attn-diag-update``, and commit the files it names. From then on a kernel whose error grows or becomes
biased fails its test, and the text says in which case, head and row, what is suspected, and how to look closer. Where a
change is meant, run ``pytest --attn-diag-update path::test`` and commit the new file; its diff is what a reviewer sees.
On another device or other versions than the baseline's, the statistical tests count alone. In GitHub Actions:

    - run: pip install "attn-diag" pytest
    - run: pytest -n auto --basetemp=pytest-tmp --junitxml=pytest.xml
    - uses: actions/upload-artifact@v4
      if: failure()
      with: {name: attn-diag, path: "pytest-tmp/**/*.safetensors"}

pytest imports this module at every start, so it imports neither torch nor ``attn_diag``; it is a package of its own.
``-p no:attn_diag_pytest`` switches it off.
"""

from __future__ import annotations

import pytest

if __name__ != "attn_diag_pytest":
    # An editable install of attn_diag has this folder inside that package, too; a second copy would define everything
    # twice, and import attn_diag.
    raise ImportError(f"import attn_diag_pytest instead of {__name__}")

from attn_diag_pytest.fixture import PROPERTY, AttnDiag

__all__ = ["AttnDiag"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--attn-diag-update``."""
    parser.getgroup("attn-diag", "numerical regression of attention kernels").addoption(
        "--attn-diag-update",
        action="store_true",
        help="write or update the baseline of every test run that is marked attn_diag_baseline",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker."""
    config.addinivalue_line(
        "markers",
        "attn_diag_baseline(path=None): attn_diag.check_attention compares with a baseline; path: a folder, or a file "
        "ending in .json, seen from the test's folder (default: attn_diag_baselines/<module>)",
    )


@pytest.fixture(name="attn_diag")
def _attn_diag(request: pytest.FixtureRequest) -> AttnDiag:
    """check_attention(fn, ...) and assert_unbiased(observed, reference): numerical regression tests by attn-diag."""
    return AttnDiag(request)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What ``--attn-diag-update`` wrote, also by workers of pytest-xdist."""
    written = {
        str(value): None
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == PROPERTY
    }
    if written:
        terminalreporter.section("attn-diag baselines")
        for line in sorted(written):
            terminalreporter.line(line)
