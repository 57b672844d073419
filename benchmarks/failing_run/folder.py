"""What lies in a folder of results: logs of runs, their monitors' logs, and JSON; and tables in Markdown.

    FOLDER/NAME.jsonl[.xz]             log of a run (``runlog``); NAME = ARM_seedN, or ARM_seedN_TAG
    FOLDER/monitor/NAME.jsonl[.xz]     its monitor's log, every head
    FOLDER/chain_ARM.json              what the tool said of the capture at the first alarm (``predictions``)

A run whose first header has "from": {"run", "step"} is a fork: it starts from that run's weights at that step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from runlog import RunLog, begun, plain

from attn_diag.captures.files import write_atomically
from attn_diag.watching.monitoring.record import MonitorCheck, read_log

# Arms that round O once, at the end.
HEALTHY = ("fa2", "healthy")


def read_runs(folder: Path) -> dict[str, RunLog]:
    """All logs of a folder that hold at least one step, by name."""
    found = {_stem(path): RunLog.read(path) for path in sorted(folder.glob("*.jsonl*")) if begun(path)}
    return {name: log for name, log in found.items() if log.steps}


def monitor_logs(folder: Path) -> dict[str, Path]:
    """The monitors' logs of a folder, by run."""
    return {_stem(path): path for path in sorted((folder / "monitor").glob("*.jsonl*"))}


def read_checks(folder: Path, name: str) -> list[MonitorCheck] | None:
    """The checks of a run's monitor, every head; None where it was not monitored."""
    path = monitor_logs(folder).get(name)
    return None if path is None else list(read_log(path))


def read_chains(folder: Path) -> dict[str, dict[str, Any]]:
    """What the tool said of the captures at the alarm, by arm; numbers that are not finite are floats again."""
    found = {}
    for path in sorted(folder.glob("chain_*.json")):
        found[path.stem.removeprefix("chain_")] = json.loads(path.read_text(), object_hook=_with_floats)
    return found


def write_json(path: Path, value: Any) -> None:
    """Write to six digits, complete or not at all; raises InputError where that cannot be."""
    text = json.dumps(plain(value), separators=(",", ":"), allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: Path(temporary).write_text(text))


def command(doc: str | None, file: str, make: Callable[[Path], Any], shown: Callable[[Any], str]) -> None:
    """A script's main: what ``make`` finds in a folder is printed and, with --json, written to ``file`` in it."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, nargs="?", const=Path(), metavar="FILE", help="default: in FOLDER")
    options = parser.parse_args()
    found = make(options.folder)
    print(shown(found))
    if options.json is not None:
        write_json(options.folder / file if options.json == Path() else options.json, found)


def arm_of(log: RunLog) -> str:
    """The arm of a run."""
    return str(log.headers[0]["run"]["arm"])


def start_of(log: RunLog) -> tuple[str, int] | None:
    """The run and the step from which a fork goes on; None where the run began at step 0."""
    origin = log.headers[0].get("from")
    return None if origin is None else (str(origin["run"]), int(origin["step"]))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _stem(path: Path) -> str:
    # Names may hold dots: A+stabilised-1.5_seed0.
    return path.name.partition(".jsonl")[0]


def _with_floats(found: dict[str, Any]) -> dict[str, Any]:
    return {key: _float(value) for key, value in found.items()}


def _float(value: Any) -> Any:
    if isinstance(value, list):
        return [_float(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
