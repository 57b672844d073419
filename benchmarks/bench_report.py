"""How large the HTML reports of 144 and of 4,096 heads are, and what building and opening them takes.

python benchmarks/bench_report.py --json benchmarks/results/report_cpu.json
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import made_by, options_of, save, timed

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from synthetic_reports import synthetic

from attn_diag.reports import html_document

REPEATS = 3


def peak() -> float:
    """The most memory this process has held so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def measured(layers: int, heads: int) -> dict[str, Any]:
    diagnosis, before = synthetic(layers, heads), peak()
    clocks = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
    times = {
        name: [round(timed(lambda: html_document(diagnosis), clock), 3) for _ in range(REPEATS)]
        for name, clock in clocks.items()
    }
    document = html_document(diagnosis)
    return {
        "heads": layers * heads,
        "bytes": len(document.encode()),
        **times,
        "open_seconds": opened(document),
        "peak_mb": round(peak(), 1),
        "added_mb": round(peak() - before, 1),
    }


def opened(document: str) -> list[float] | None:
    """Seconds until a browser has shown the page and waits for a click; None without Chromium."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return None
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "page.html"
        page_file.write_text(document, encoding="utf-8")
        program = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        found = []
        for _ in range(REPEATS):
            page = program.new_page()
            found.append(round(timed(partial(_open, page, page_file.as_uri())), 3))
            page.close()
        program.close()
    return found


def _open(page: Any, address: str) -> None:
    page.goto(address)
    # Two frames later everything that scripts wanted to draw at first is drawn.
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


if __name__ == "__main__":
    options = options_of(__doc__).parse_args()
    versions = {name: version(name) for name in ("jinja2", "pydantic", "numpy")}
    found = made_by() | {"pages": [measured(12, 12), measured(64, 64)], "versions": versions}
    print(found)
    save(found, options.json)
