"""Makes every table and figure again from a record of runs, without a GPU: outcomes, forecasts, the page, the picture.

    python benchmarks/failing_run/remake.py benchmarks/results/failing_chain [--gallery reports/gallery] [--no-picture]

What needs captures is left as it is in the record: ``chain_ARM.json`` (predictions.py), ``summed_ARM.json`` (summed.py)
and ``accumulation.json`` (accumulation.py). The picture needs playwright and Chromium in PATH.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import outcomes
import stabilised
from folder import write_json
from page import gallery, steps_gallery
from page_picture import picture, take
from page_record import read_record

from attn_diag.reports import gallery_document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--gallery", type=Path, default=Path("reports/gallery"), metavar="FOLDER")
    parser.add_argument("--no-picture", action="store_true")
    options = parser.parse_args()
    trained = outcomes.outcomes(options.record)
    write_json(options.record / "outcomes.json", trained)
    print(outcomes.tables(trained))
    if (options.record / "chain_A.json").exists():
        limits = stabilised.outcomes(options.record)
        write_json(options.record / "stabilised.json", limits)
        print(stabilised.table(limits))
    record = read_record(options.record)
    options.gallery.mkdir(parents=True, exist_ok=True)
    for name, page in (("failing_run", gallery(record)), ("failing_run_steps", steps_gallery(record))):
        if page is not None:
            (options.gallery / f"{name}.html").write_text(gallery_document(page), encoding="utf-8")
    if not options.no_picture:
        take(picture(record), options.gallery / "failing_run.png")


if __name__ == "__main__":
    main()
