"""What the tool predicted from one capture beside what training did (``outcomes.json``), and what had to hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from page_record import Record
from page_values import at, listed, number, percent

from attn_diag.reports.charts import Axis, Chart, Section, Series, Tone
from attn_diag.reports.words import DASH

# What became of a fork.
ON, FAILS, EARLY = "trains on", "fails", "stopped too early to tell"
_WAITING = "not trained"
_TONES: dict[str, Tone] = {ON: "good", FAILS: "second", EARLY: "third", _WAITING: "accent"}
# How many of the best that were not trained are drawn beside the others.
_PROPOSED = 5
_HELD = {True: "yes", False: "no", None: "not known"}


def fate_of(departure: int | None, until: int, last: int) -> str:
    """What became of a fork whose last step is ``until``. Where that is before ``last``, the last departure of them
    all, not to have failed says nothing."""
    if departure is not None:
        return FAILS
    return EARLY if until < last else ON


def trained_words(departure: int | None, until: int, last: int) -> str:
    """The same with its step."""
    words = {FAILS: f"fails at {departure or 0:,}", EARLY: f"stopped at {until:,}: too early to tell"}
    return words.get(fate_of(departure, until, last), f"on its trend to {until:,} (ended)")


def _fork(row: dict[str, Any]) -> tuple[int | None, int]:
    """A row's departure and last step."""
    departure, until = number(at(row, "fork", "departure")), number(at(row, "fork", "until"))
    return None if departure is None else int(departure), int(until or 0)


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
    return Section(title, tuple(said), charts=chart), Section(f"{title}: run by run", (), _table(trained))


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
    last, series = _last(trained), []
    for name, tone in _TONES.items():
        bars = [(left, float(i)) for i, (row, left) in enumerate(drawn) if _fate(row, last) == name]
        if bars:
            series.append(Series(name, tuple(x for x, _ in bars), tuple(y for _, y in bars), "bars", tone=tone))
    more = f" Not drawn, as it is not finite or not known: {listed(absent)}." if absent else ""
    axes = Axis("predicted error of dQ"), Axis("", names=tuple(str(row["mitigation"]) for row, _ in drawn))
    caption = (
        "Length: ‖error of dQ‖ / ‖dQ‖ that what-if predicts, median over the capture's sequences. Colour: what "
        f"training did; of what was not trained the best {_PROPOSED} are shown.{more}"
    )
    return (Chart(f"{arm}-predicted", "Predicted error, and what training did", caption, *axes, tuple(series)),)


def _fate(row: dict[str, Any], last: int) -> str:
    return _WAITING if at(row, "fork") is None else fate_of(*_fork(row), last)


def _last(trained: Sequence[dict[str, Any]]) -> int:
    """The last departure of them all."""
    return max((departure for departure, _ in map(_fork, trained) if departure is not None), default=-1)


def _table(trained: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], ...]:
    lines = [("change", "what-if's rank", "predicted: error of dQ", "of dW_Q", "in exact arithmetic", "repairs",
              "training", "by", "loss before 'none' fails", "minus fa2's")]  # fmt: skip
    for row in sorted(trained, key=lambda row: row.get("mitigation") != "control"):
        fork = row["fork"]
        rank, loss, gap = (number(at(source, name)) for source, name in ((row, "rank"), (fork, "loss"), (fork, "gap")))
        source = f" ({row['left_by']})" if at(row, "left_by") == "attribute" else ""
        lines.append((
            "none" if row.get("mitigation") == "control" else str(row.get("mitigation")),
            DASH if rank is None else f"{rank:g}",
            percent(number(at(row, "left"))) + source, percent(number(at(row, "left_dw_q"))),
            str(at(row, "equivalence") or DASH), ", ".join(at(row, "sites") or ()) or DASH,
            trained_words(*_fork(row), _last(trained)),
            str(at(fork, "reason") or DASH), DASH if loss is None else f"{loss:.4f}",
            DASH if gap is None else f"{gap:+.4f}",
        ))  # fmt: skip
    return tuple(lines)


def _limit_held(found: Any) -> list[dict[str, Any]]:
    """Whether the NaN came where it was forecast; runs past their limit at the capture had nothing to forecast."""
    ahead = [
        run
        for run in at(found, "runs") or ()
        if number(at(run, "error")) is not None and at(run, "forecast", "step") > at(run, "forecast", "at") + 1
    ]
    if not ahead:
        return []
    said = [f"{at(run, 'run')}: {at(run, 'error'):+.1%} ({at(run, 'error_ahead'):+.1%} ahead)" for run in ahead]
    words = "the stabilised softmax: the step of its NaN is forecast within 20 %"
    return [{"words": words, "held": all(abs(at(run, "error")) <= 0.2 for run in ahead), "found": "; ".join(said)}]


def _repeats_held(found: Any) -> list[dict[str, Any]]:
    """Whether runs made twice fail at the same step, to 5 %."""
    runs = [run for run in at(found, "repeats") or () if isinstance(run, dict)]
    failed = [run for run in runs if any(step is not None for step in run["departures"])]
    if not failed:
        return []
    close = [None not in r["departures"] and max(r["departures"]) <= 1.05 * min(r["departures"]) for r in failed]
    said = [f"{r['run']}: {', '.join(map(str, r['departures']))}" for r in failed]
    return [
        {"words": "a run made again fails within 5 % of the same step", "held": all(close), "found": "; ".join(said)}
    ]


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
