"""Two installations on the same captures: do all figures of their JSON agree, to the last bit?

    python benchmarks/same_figures.py --before OLD/bin/python --after NEW/bin/python tests/captures/*.safetensors

Runs ``attn-diag inspect --json -`` (or the command of ``--command``, with its options) with both, with equal numbers of
threads, and prints every key whose value differs, or that only one of them has. What a run says of itself (versions,
device) is not compared. Exit code 1 where a value differs or is lost; keys that are new are listed and allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OF_THE_RUN = {"tool"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", nargs="+", type=Path)
    parser.add_argument("--before", required=True, help="the Python of one installation")
    parser.add_argument("--after", required=True, help="the Python of the other")
    parser.add_argument("--command", default="inspect", help='such as "inspect --details 2" or "what-if"')
    parser.add_argument("--threads", default="1")
    options = parser.parse_args()
    failed = False
    for capture in options.captures:
        before, after = (_document(python, options, capture) for python in (options.before, options.after))
        new: set[str] = set()
        wrong = []
        for place, one, other in differences(before, after):
            if one is _MISSING:
                new.add(place.rpartition(".")[2])
            else:
                wrong.append(f"  {place}: {one!r} became {'nothing' if other is _MISSING else repr(other)}")
        failed |= bool(wrong)
        verdict = f"{len(wrong)} values differ" if wrong else "equal"
        print(f"{capture.name}: {verdict}" + (f"; new keys: {', '.join(sorted(new))}" if new else ""))
        print("\n".join(wrong[:20]), end="\n" if wrong else "")
    return int(failed)


_MISSING = object()


def differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every place at which two JSON values differ, with both values; ``_MISSING`` where one has none."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (*one, *(key for key in other if key not in one)):
            if place or key not in _OF_THE_RUN:
                yield from differences(one.get(key, _MISSING), other.get(key, _MISSING), f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}[{index}]")
    elif one is _MISSING or other is _MISSING or one != other:
        yield place, one, other


def _has_short_form(python: str) -> bool:
    """Whether what an installation writes of a diagnosis is short unless all of it is asked for."""
    shown = subprocess.run([python, "-m", "attn_diag", "inspect", "--help"], capture_output=True, text=True, check=True)
    return "--json-full" in shown.stdout


def _document(python: str, options: argparse.Namespace, capture: Path) -> Any:
    file = capture.resolve()
    named = [*shlex.split(options.command), str(file)]
    command = [python, "-m", "attn_diag", *named, "--json", "-", "--device", "cpu"]
    if named[0] == "inspect" and _has_short_form(python):
        command.append("--json-full")
    environment = {**os.environ, "OMP_NUM_THREADS": options.threads, "MKL_NUM_THREADS": options.threads}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=file.parent)
    if done.returncode not in (0, 1, 2) or not done.stdout:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    raise SystemExit(main())
