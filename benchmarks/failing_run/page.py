"""The record of a failing run as one page: what failed, the alarm before it, the guilty rounding, the cure. Needs no GPU.

    python benchmarks/failing_run/page.py benchmarks/results/failing_chain --out reports/gallery/failing_run.html

From whatever is in the folder; what is not is listed at the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from page_cure import cure
from page_record import Record, read_record
from page_runs import failing, monitor

from attn_diag.monitoring.alarm import AlarmRule
from attn_diag.reports.charts import Gallery
from attn_diag.reports.gallery import gallery_document


def gallery(record: Record) -> Gallery:
    rule = AlarmRule()
    sections = [
        failing(record, "A", "The run that fails", "GPT-2 small."),
        monitor(record, "A", "What the monitor saw", rule),
        cure(record, "A", "The cure"),
    ]
    return Gallery("t", "lead", tuple(s for s in sections if s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the record, such as benchmarks/results/failing_chain")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(gallery_document(gallery(read_record(options.folder))), encoding="utf-8")


if __name__ == "__main__":
    main()
