"""What the tool predicted from one capture beside what training did (``outcomes.json``), and what had to hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from page_limits import ahead
from page_record import Record
from values import at, listed, number, percent

from attn_diag.reports.charts import Axis, Chart, Section, Series, Tone
from attn_diag.reports.words import DASH

# What became of a fork.
ON, FAILS, EARLY = "trains on", "fails", "stopped too early to tell"
_WAITING = "not trained"
_TONES: dict[str, Tone] = {ON: "good", FAILS: "second", EARLY: "third", _WAITING: "accent"}
# How many of the best that were not trained are drawn beside the others.
_PROPOSED = 5
_HELD = {True: "yes", False: "no", None: "not known"}


def fate_of(departure: int | None, cut_off: bool) -> str:
    """What became of a fork. ``cut_off``: it ended before the unchanged run's departure; that says nothing."""
    if departure is not None:
        return FAILS
    return EARLY if cut_off else ON


def trained_words(departure: int | None, until: int, cut_off: bool) -> str:
    """The same with its step; ``until``: the last one."""
    words = {FAILS: f"fails at {departure or 0:,}", EARLY: f"stopped at {until:,}: too early to tell"}
    return words.get(fate_of(departure, cut_off), f"on its trend to {until:,} (ended)")


def trained_words_of(row: dict[str, Any]) -> str:
    """The same of a row of ``outcomes.json`` that was trained."""
    return trained_words(*_fork(row))


def _fork(row: dict[str, Any]) -> tuple[int | None, int, bool]:
    """A row's departure and last step, and whether it was cut off."""
    departure, until = number(at(row, "fork", "departure")), number(at(row, "fork", "until"))
    return None if departure is None else int(departure), int(until or 0), bool(at(row, "fork", "cut_off"))


def rows(record: Record, arm: str) -> list[dict[str, Any]]:
    """The arm's mitigations, the least predicted error first; empty where nothing was predicted."""
    found = at(record.documents.get("outcomes"), "chains", arm, "rows")
    return [row for row in found or () if isinstance(row, dict)]


def predicted(record: Record, arm: str, title: str) -> tuple[Section, ...]:
    """The mitigations that were trained, with what was predicted of them. Empty where nothing was predicted."""
    everything = rows(record, arm)
    trained = [row for row in everything if at(row, "fork") is not None]
    if all(row.get("mitigation") == "control" for row in trained):
        return ()
    chain = at(record.documents["outcomes"], "chains", arm)
    said = [
        "From the capture of the alarm alone, given the arm's recipe, what-if tried each change and measured the error "
        "of dQ that it leaves. The less is left, the longer a run should last."
    ]
    if words := at(chain, "site", "words"):
        said.append(f"{words}.")
    said += [f"Order, {a.get('of')}: {a['words']}." for a in at(chain, "agreement") or () if at(a, "words")]
    said += _separation(at(chain, "separation"))
    proposed = [row for row in everything if at(row, "fork") is None and number(at(row, "rank")) is not None]
    chart = _chart(arm, trained, proposed[:_PROPOSED])
    seen = (
        "Alarm: the first since the change, by checks every 50 steps with those before it behind them. Seen: the error "
        "of dW_Q over dW_Q by the monitor, in the head that was worst until the unchanged run failed; not always the "
        "one that was captured. Loss: mean of the 20 steps before that."
    )
    document = record.documents["outcomes"]
    # Of a run that was replayed at several spacings the widest comes last.
    alarms = {row["run"]: row["alarm"] for name in ("alarms", "fork_alarms") for row in at(document, name) or ()}
    table = _table(trained, alarms)
    return Section(title, tuple(said), charts=chart), Section(f"{title}: run by run", (seen,), table)


def _separation(found: Any) -> list[str]:
    most, least = (number(at(found, name, "left")) for name in ("kept_most", "failed_least"))
    if most is None or least is None:
        return []
    names = [at(found, name, "mitigation") for name in ("kept_most", "failed_least")]
    return [
        f"Of the changes with which training went on, {names[0]} was predicted to leave most, {percent(most)}; of "
        f"those with which it failed, {names[1]} least, {percent(least)}."
    ]


def _chart(arm: str, trained: Sequence[dict[str, Any]], proposed: Sequence[dict[str, Any]]) -> tuple[Chart, ...]:
    """Predicted errors as bars, coloured by what training did; ``proposed``: not trained."""
    known = [
        (row, left)
        for row in (*trained, *proposed)
        if (left := number(at(row, "left"))) is not None and 0 < left < math.inf
    ]
    drawn = sorted(known, key=lambda pair: pair[1])
    absent = [str(row["mitigation"]) for row in trained if row not in [r for r, _ in drawn]]
    if not drawn:
        return ()
    series = []
    for name, tone in _TONES.items():
        bars = [(left, float(i)) for i, (row, left) in enumerate(drawn) if _fate(row) == name]
        if bars:
            series.append(Series(name, tuple(x for x, _ in bars), tuple(y for _, y in bars), "bars", tone=tone))
    more = f" Not drawn, as it is not finite or not known: {listed(absent)}." if absent else ""
    axes = Axis("predicted error of dQ"), Axis("", names=tuple(str(row["mitigation"]) for row, _ in drawn))
    caption = (
        "Length: ‖error of dQ‖ / ‖dQ‖ that what-if predicts, median over the capture's sequences. Colour: what "
        f"training did; of what was not trained the best {_PROPOSED} are shown.{more}"
    )
    return (Chart(f"{arm}-predicted", "Predicted error, and what training did", caption, *axes, tuple(series)),)


def _fate(row: dict[str, Any]) -> str:
    if at(row, "fork") is None:
        return _WAITING
    departure, _, cut_off = _fork(row)
    return fate_of(departure, cut_off)


def _table(trained: Sequence[dict[str, Any]], alarms: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """``alarms``: the step of each fork's first one, or None."""
    lines = [("change", "repairs", "predicted: error of dQ", "of dW_Q", "training", "alarm",
              "seen: of dW_Q", "loss, less fa2's")]  # fmt: skip
    for row in sorted(trained, key=lambda row: row.get("mitigation") != "control"):
        fork = row["fork"]
        gap, share = number(at(fork, "gap")), number(at(fork, "share"))
        source = f" ({row['left_by']})" if at(row, "left_by") == "attribute" else ""
        worst, reason, alarm = at(fork, "worst"), at(fork, "reason"), alarms.get(str(at(fork, "run")), "")
        lines.append((
            "none" if row.get("mitigation") == "control" else str(row.get("mitigation")),
            ", ".join(at(row, "sites") or ()) or DASH,
            percent(number(at(row, "left"))) + source, percent(number(at(row, "left_dw_q"))),
            trained_words_of(row) + (f", {reason}" if reason else ""),
            "silent" if alarm is None else f"{alarm:,}" if alarm else DASH,
            DASH if share is None else f"{share:.3g}" + (f", L{worst[0]}H{worst[1]}" if worst else ""),
            DASH if gap is None else f"{gap:+.4f}",
        ))  # fmt: skip
    return tuple(lines)


def _of_the_way(error: float | None) -> str:
    """Of the steps from the capture to the NaN; None where it came at once."""
    return " (of the steps ahead: it came at once)" if error is None else f" ({error:+.1%} of the steps ahead)"


def _limit_held(found: Any) -> list[dict[str, Any]]:
    """Whether the NaN came where it was forecast; runs past their limit at the capture had nothing to forecast."""
    runs = [run for run in at(found, "runs") or () if number(at(run, "error")) is not None and ahead(run)]
    if not runs:
        return []
    said = [f"{run['run']}: {run['error']:+.1%}{_of_the_way(number(at(run, 'error_ahead')))}" for run in runs]
    words = "the stabilised softmax: the step of its NaN is forecast within 20 % of"
    late = [number(at(run, "error_ahead")) for run in runs]
    return [
        {"words": f"{words} it", "held": all(abs(run["error"]) <= 0.2 for run in runs), "found": "; ".join(said)},
        {"words": f"{words} the steps ahead", "held": all(e is not None and abs(e) <= 0.2 for e in late),
         "found": "the same"},
    ]  # fmt: skip


def _repeats_held(found: Any) -> list[dict[str, Any]]:
    """Whether runs made twice fail at the same step, to 5 %; those that were ended before say nothing."""
    close, said = [], []
    for run in at(found, "repeats") or ():
        steps = sorted(step for step in run["departures"] if step is not None)
        ends = zip(run["departures"], run["ends"], strict=True)
        kept = sum(step is None and end >= steps[0] for step, end in ends if steps)
        if steps and len(steps) + kept > 1:
            close.append(not kept and steps[-1] <= 1.05 * steps[0])
            said.append(f"{run['run']}: {', '.join(map(str, [*steps, *['none'] * kept]))}")
    if not close:
        return []
    words = "a run made again fails within 5 % of the same step"
    return [{"words": words, "held": all(close), "found": "; ".join(said)}]


def held(record: Record, title: str) -> Section | None:
    """What the experiment had to show, and whether it did. None where nothing was judged."""
    found = [c for c in at(record.documents.get("outcomes"), "criteria") or () if isinstance(c, dict)]
    found += [*_limit_held(record.documents.get("stabilised")), *_repeats_held(record.documents.get("repeats"))]
    if not found:
        return None
    lines = [
        (str(c.get("words")), _HELD.get(c.get("held"), DASH), str(c.get("found") or "nothing was run")) for c in found
    ]
    return Section(title, (), (("what", "does it", "found"), *lines))
