"""Packs a folder of runs into the record that is kept: logs, and the monitors' logs in five digits, each as .jsonl.xz.

    python benchmarks/failing_run/collect.py runs benchmarks/results/failing_chain

Needs no GPU. What the record holds of other runs stays.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path

from runlog import plain, rows_of

from attn_diag.captures.files import write_atomically

_DIGITS = 5


def pack(path: Path, folder: Path, digits: int) -> None:
    """One log, its numbers in so many digits."""
    text = "".join(json.dumps(plain(row, digits), separators=(",", ":")) + "\n" for row in rows_of(path))
    folder.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    write_atomically(folder / f"{path.name}.xz", lambda temporary: Path(temporary).write_bytes(packed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("record", type=Path)
    options = parser.parse_args()
    for path in sorted(options.runs.glob("*.jsonl")):
        pack(path, options.record, 6)
    for path in sorted((options.runs / "monitor").glob("*.jsonl")):
        pack(path, options.record / "monitor", _DIGITS)


if __name__ == "__main__":
    main()
