"""How large the HTML report of 12 layers of 12 heads is, and what building it takes.

python benchmarks/bench_report.py --json benchmarks/results/report_cpu.json
"""

from __future__ import annotations

import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import made_by, options_of, save, timed

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from synthetic_reports import synthetic

from attn_diag.reports import html_document

REPEATS = 3


def peak() -> float:
    """The most memory this process has held so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def measured() -> dict[str, Any]:
    diagnosis, before = synthetic(), peak()
    clocks = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
    times = {
        name: [round(timed(lambda: html_document(diagnosis), clock), 3) for _ in range(REPEATS)]
        for name, clock in clocks.items()
    }
    return {
        "heads": 144,
        "bytes": len(html_document(diagnosis).encode()),
        **times,
        "peak_mb": round(peak(), 1),
        "added_mb": round(peak() - before, 1),
        "versions": {name: version(name) for name in ("jinja2", "pydantic", "numpy")},
    }


if __name__ == "__main__":
    options = options_of(__doc__).parse_args()
    found = made_by() | measured()
    print(found)
    save(found, options.json)
