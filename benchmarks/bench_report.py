"""How large the HTML report of 12 layers of 12 heads is, and what building it takes.

python benchmarks/bench_report.py [benchmarks/results/report_cpu.json]
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from synthetic_reports import synthetic

from attn_diag.reports import html_document

REPEATS = 3


def peak() -> float:
    """The most memory this process has held so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def measured() -> dict[str, object]:
    diagnosis, before = synthetic(), peak()
    seconds, cpu_seconds = [], []
    for _ in range(REPEATS):
        start, cpu = time.perf_counter(), time.process_time()
        page = html_document(diagnosis)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
    return {
        "heads": 144,
        "bytes": len(page.encode()),
        "seconds": [round(s, 3) for s in seconds],
        "cpu_seconds": [round(s, 3) for s in cpu_seconds],
        "peak_mb": round(peak(), 1),
        "added_mb": round(peak() - before, 1),
        "versions": {name: version(name) for name in ("attn-diag", "jinja2", "pydantic", "numpy")},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


if __name__ == "__main__":
    found = json.dumps(measured(), indent=1)
    print(found)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(found + "\n")
