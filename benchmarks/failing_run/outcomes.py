"""What the tool predicted from one capture beside what training did; needs no GPU.

    python benchmarks/failing_run/outcomes.py benchmarks/results/failing_chain [--json [FILE]]

For every arm with a ``chain_ARM.json``: each mitigation of what-if with the error of dQ that it was predicted to leave
(median and range over the capture's sequences), and the fork that trained with it from the alarm's weights on: when it
left its trend, or that it did not until its last step. What was not run says so. Then how well the two orders agree
(``agreement``), whether the site that ``attribute`` blamed is the one whose repair removes the failure while that of
another does not (``beside``), and when the alarms came (``criteria``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from agreement import agreements
from alarms import SPACINGS, Replay, alarm_rows, fork_alarms
from alarms import table as alarm_table
from beside import rows_of, separation, site_check
from criteria import criteria, of_chains
from folder import command, markdown, read_chains, read_checks, read_runs
from forks import forks_of
from values import percent

from attn_diag.captures.hardware import package_version
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.watching.monitoring.alarm import AlarmRule


def outcomes(folder: Path) -> dict[str, Any]:
    """Everything of a folder, as plain numbers."""
    runs, rule = read_runs(folder), AlarmRule()
    replays, without = alarm_rows(folder, runs, rule)
    chains = {}
    for arm, chain in read_chains(folder).items():
        checks = {name: c for name in runs if (c := read_checks(folder, name)) is not None}
        forks = forks_of(runs, chain["run"], checks)
        headers = {name: runs[fork.run].headers[0] for name, fork in forks.items()}
        rows = rows_of(chain, forks, headers)
        chains[arm] = {
            "run": chain["run"], "step": chain["step"], "layer": chain["layer"], "head": chain["head"],
            "sequences": chain["sequences"],
            "rows": [asdict(row) for row in rows],
            "not_run": [row.mitigation for row in rows if row.fork is None],
            "agreement": [asdict(a) for a in agreements(rows, chain)],
            "separation": separation(rows),
            "site": asdict(site_check(chain, rows)),
        }  # fmt: skip
    tool = asdict(describe_tool(pick_device("cpu")))
    return {
        "tool": tool | {name: package_version(name) for name in ("numpy", "scipy")},
        "rule": asdict(rule),
        "alarms": [asdict(r) for r in replays],
        "not_monitored": without,
        "fork_alarms": [asdict(r) for r in fork_alarms(folder, runs, rule, max(SPACINGS))],
        "criteria": [asdict(c) for c in [*criteria(replays, runs), *of_chains(chains)]],
        "chains": chains,
    }


def tables(found: Mapping[str, Any]) -> str:
    """Markdown."""
    return "\n\n".join([_alarms(found), _criteria_table(found), *(_chain(a, c) for a, c in found["chains"].items())])


def _chain(arm: str, chain: Mapping[str, Any]) -> str:
    rows = [row for row in chain["rows"] if row["fork"] is not None]
    healthy = next((row["fork"]["gap_to"] for row in rows if row["fork"]["gap_to"]), "a healthy run")
    absent = [f"{r['mitigation']} ({percent(r['left'])})" for r in chain["rows"] if r["fork"] is None]
    head = ["mitigation", "rank", "dQ's error left", "range over sequences", "dW_Q's", "site repaired: left",
            "trained", "loss", f"to {healthy}", "largest dW_Q share"]  # fmt: skip
    lines = [f"{arm}: capture of step {chain['step']}, layer {chain['layer']}, head {chain['head']}, "
             f"{chain['sequences']} sequences"]  # fmt: skip
    lines += ["", markdown(head, [_chain_row(row) for row in rows]), ""]
    lines += [f"Not run (predicted to leave): {', '.join(absent)}.", "", f"Site: {chain['site']['words']}."]
    lines += [f"Order, {a['of']}: {a['words']}." for a in chain["agreement"]]
    apart = chain["separation"]
    if apart["separated"] is not None:
        most, least = apart["kept_most"], apart["failed_least"]
        lines.append(
            f"Of those that kept their trend {most['mitigation']} was predicted to leave most, "
            f"{percent(most['left'])}; of those that failed {least['mitigation']} least, {percent(least['left'])}."
        )
    return "\n".join(lines)


def _chain_row(row: Mapping[str, Any]) -> list[str]:
    fork = row["fork"]
    sites = ", ".join(row["sites"])
    repaired = f"{sites}: {percent(row['repaired'])}" if row["repaired"] is not None else sites or "–"
    return [
        row["mitigation"],
        "–" if row["rank"] is None else f"{row['rank']:g}",
        percent(row["left"]) + (" (attribute)" if row["left_by"] == "attribute" else ""),
        "–" if row["low"] is None else f"{percent(row['low'])} to {percent(row['high'])}",
        percent(row["left_dw_q"]),
        repaired,
        _trained(fork),
        "–" if fork["loss"] is None else f"{fork['loss']:.4f}",
        "–" if fork["gap"] is None else f"{fork['gap']:+.4f}",
        "–" if fork["share"] is None else f"{fork['share']:.3g}" + _head(fork["worst"]),
    ]


def _head(place: Sequence[int] | None) -> str:
    return "" if place is None else f" (L{place[0]}H{place[1]})"


def _trained(fork: Mapping[str, Any]) -> str:
    if fork["departure"] is None:
        return f"cut off at {fork['until']}" if fork["cut_off"] else f"none until {fork['until']}"
    return f"{fork['departure']} ({fork['reason']})"


def _alarms(found: Mapping[str, Any]) -> str:
    shown, forks = (alarm_table([Replay(**row) for row in found[name]]) for name in ("alarms", "fork_alarms"))
    absent = "".join(f"\n\n{name}: not monitored" for name in found["not_monitored"])
    return f"{shown}{absent}\n\nForks, with their parent's checks behind them:\n\n{forks}"


def _criteria_table(found: Mapping[str, Any]) -> str:
    words: dict[bool | None, Literal["yes", "no", "not known"]] = {True: "yes", False: "no", None: "not known"}
    rows = [[c["words"], words[c["held"]], c["found"] or "nothing was run"] for c in found["criteria"]]
    return markdown(["must hold", "does", "found"], rows)


def main() -> None:
    command(__doc__, "outcomes.json", outcomes, tables)


if __name__ == "__main__":
    main()
