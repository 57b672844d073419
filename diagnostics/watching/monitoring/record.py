"""One check of the model, on the host: a line of the monitor's log, flat names for a logger, a table for people."""

from __future__ import annotations

import json
import lzma
import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attn_diag.errors import InputError
from attn_diag.printing import inert
from attn_diag.results.wording import percent, times

Values = npt.NDArray[np.float64]

_COLUMNS = (
    ("dw_q_share", "dW_Q err", ".2%"), ("dq_share", "dQ err", ".2%"), ("dw_q_over_floor", "x floor", ".2f"),
    ("noise_factor", "noise", ".2f"), ("conditioning", "condit.", ".1f"), ("coherence", "coher.", ".2f"),
    ("max_logit", "logit", ".1f"), ("w_q_norm", "|W_Q|", ".2f"),
)  # fmt: skip
# Of softmax attention, what each check measures against float64.
MEASURED = ("o", "dq", "dk", "dv")
# From here on a figure is written with an exponent.
_LONG = 1e6
_ALARMS = 3
# Of the verdict on linear and declared attention, by label: the metric that is 1 where a head has it.
JUDGED_FLAGS = {"nonfinite": "nonfinite_rate", "wrong": "wrong", "lossy": "lossy", "biased": "biased"}


@dataclass(frozen=True)
class LayerCheck:
    """The metrics of one layer's heads."""

    layer: int
    module: str | None
    """Its dotted name; None outside a model."""
    values: Mapping[str, Values]
    """Metric name -> one value a head, [Hq]; NaN where unknown. Of linear attention, and of a recipe that is declared,
    "o_error" (relative), "o_factor" (over a well-rounded kernel's, or the recipe's) and so on of each gradient, and 1
    or 0 for "wrong", "lossy", "biased"."""
    words: tuple[str | None, ...] = ()
    """Of these, one a head: why it is wrong, lossy or biased; None where it is not."""
    declared: str | None = None
    """The recipe below 16 bits that it is held against."""
    again: bool = False
    """Whether it was looked at again, some heads alone (NaN for others), because they stood out at a check."""

    @property
    def is_judged(self) -> bool:
        """Whether heads have verdicts: it is linear attention, or declared, or was looked at again."""
        return "lossy" in self.values

    @property
    def heads(self) -> int:
        """How many query heads the layer has."""
        return len(next(iter(self.values.values())))


@dataclass(frozen=True)
class MonitorCheck:
    """All layers that were seen at ``step``, in order."""

    step: int
    layers: tuple[LayerCheck, ...]

    @property
    def again(self) -> bool:
        """Whether it is nothing but second looks, at heads that stood out at the check before."""
        return bool(self.layers) and all(layer.again for layer in self.layers)

    @property
    def heads(self) -> int:
        """How many heads were looked at."""
        return sum(layer.heads for layer in self.layers)

    def to_json(self) -> str:
        """One line: {"step", "layers": [{"layer", "module", "metrics": {name: [a number a head, null: unknown]}}]}.

        Layers with verdicts have "words" too, a sentence a head or null; declared ones "declared", and such as were
        looked at again "again".
        """
        layers = [
            {"layer": c.layer, "module": c.module, "metrics": {n: [_plain(x) for x in v] for n, v in c.values.items()}}
            | ({"words": c.words} if c.words else {})
            | ({"declared": c.declared} if c.declared else {})
            | ({"again": True} if c.again else {})
            for c in self.layers
        ]
        return json.dumps({"step": self.step, "layers": layers}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> MonitorCheck:
        """Read what ``to_json`` wrote."""
        found, layers = json.loads(text), []
        for c in found["layers"]:
            # numpy reads null as NaN, and "Infinity".
            metrics = {name: np.array(values, dtype=np.float64) for name, values in c["metrics"].items()}
            words = tuple(c.get("words", ()))
            layers.append(LayerCheck(c["layer"], c["module"], metrics, words, c.get("declared"), c.get("again", False)))
        return cls(found["step"], tuple(layers))


def read_log(path: str | os.PathLike[str]) -> Iterator[MonitorCheck]:
    """Read the checks of a monitor's log, in order.

    Args:
        path: The log, or one packed with xz (``.xz``).

    Yields:
        Every check; a last line that was cut off is left out.
    """
    with lzma.open(path, "rt") if Path(path).suffix == ".xz" else Path(path).open() as file:
        for line in file:
            if line.endswith("\n"):
                yield MonitorCheck.from_json(line)


class LogFile:
    """The monitor's log, as it is written.

    Args:
        log: Where; None: nowhere.

    Raises:
        InputError: It cannot be written.
    """

    def __init__(self, log: str | os.PathLike[str] | None) -> None:
        self._path = None if log is None else Path(log)
        # Where the lines start that were written here, by step.
        self._starts: dict[int, int] = {}
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch()
            except OSError as error:
                raise InputError(
                    f"cannot write the monitor's log {log!s}: {error.strerror}; choose another file"
                ) from None

    def write(self, check: MonitorCheck) -> OSError | None:
        """Append a check; returns why it is not written, nor any more."""
        if self._path is not None:
            try:
                with self._path.open("a") as file:
                    self._starts.setdefault(check.step, file.tell())
                    file.write(check.to_json() + "\n")
            except OSError as error:
                self._path = None
                return error
        return None

    def take_back(self, step: int) -> None:
        """Take what was written back, from a step on."""
        starts = [start for written, start in self._starts.items() if written >= step]
        if starts and self._path is not None:
            with suppress(OSError):
                os.truncate(self._path, min(starts))
        self._starts.clear()


def _plain(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.9g}")


def with_growth(check: MonitorCheck, before: MonitorCheck | None) -> MonitorCheck:
    """The check with "max_logit_growth" and "dw_q_share_growth": of the logarithm, per step since ``before``."""
    steps = 0 if before is None else check.step - before.step
    known = {(c.layer, c.module, c.heads): c.values for c in before.layers} if before is not None and steps > 0 else {}
    layers = []
    for layer in check.layers:
        if layer.is_judged:
            layers.append(layer)
            continue
        old, unknown = known.get((layer.layer, layer.module, layer.heads), {}), np.full(layer.heads, math.nan)
        values = dict(layer.values)
        for name in ("max_logit", "dw_q_share"):
            with np.errstate(invalid="ignore", divide="ignore"):
                ratio = layer.values.get(name, unknown) / old.get(name, unknown)
                values[f"{name}_growth"] = np.log(np.where(ratio > 0, ratio, math.nan)) / max(steps, 1)
        layers.append(replace(layer, values=values))
    return replace(check, layers=tuple(layers))


def flat_metrics(check: MonitorCheck, alarms: int, total: int, *, per_head: bool) -> dict[str, float]:
    """ "attn/NAME/max" and "/mean" over the heads of which NAME is known, "attn/alarm", "attn/alarms", "attn/step"."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for layer in check.layers for name in layer.values):
        values = np.concatenate([layer.values[name] for layer in check.layers if name in layer.values])
        known = values[~np.isnan(values)]
        if len(known):
            found[f"attn/{name}/max"] = float(known.max())
            found[f"attn/{name}/mean"] = float(known.mean())
            if name in ("entropy", "unity_defect", "delta_bias", "delta_bias_sigma"):
                found[f"attn/{name}/min"] = float(known.min())
    if per_head:
        for layer in check.layers:
            for name, row in layer.values.items():
                for head in np.flatnonzero(~np.isnan(row)):
                    found[f"attn/layer{layer.layer:02d}/head{head:02d}/{name}"] = float(row[head])
    return found | {"attn/alarm": float(alarms), "attn/alarms": float(total), "attn/step": float(check.step)}


def table(check: MonitorCheck | None, alarms: Sequence[object]) -> str:
    """Each layer's head with the largest error of dW_Q, and the quantity that is rounded worst; then the first alarms.

    One line each; 80 columns.
    """
    if check is None:
        return "no check yet"
    softmax = [layer for layer in check.layers if not layer.is_judged]
    shown = [c for c in _COLUMNS if any(np.isfinite(layer.values[c[0]]).any() for layer in softmax)]
    rows = [["layer", "head", *(title for _, title, _ in shown)]] if softmax else []
    for layer in softmax:
        head = _worst(layer)
        known = ((layer.values[name][head], form) for name, _, form in shown)
        cells = [_cell(v, ".1e" if v >= _LONG and form[-1] == "f" else form) for v, form in known]
        rows.append([str(layer.layer), str(head), *cells])
    lines = [f"step {check.step}, the worst head of each layer", *_aligned(rows), *_aligned(_of_measured(softmax))]
    lines += _aligned(_of_judged([layer for layer in check.layers if layer.is_judged]))
    for alarm in alarms[:_ALARMS]:
        lines += textwrap.wrap(f"ALARM {alarm}", 80, subsequent_indent="  ")
    if len(alarms) > _ALARMS:
        lines.append(f"… and {len(alarms) - _ALARMS} more: monitor.alarms")
    return inert("\n".join(lines))


def _cell(value: float, form: str) -> str:
    return format(value, form).replace("%", " %") if math.isfinite(value) else "-"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _of_measured(layers: Sequence[LayerCheck]) -> list[list[str]]:
    """Each layer's quantity with the largest error beside a well-rounded kernel's, as ``_of_judged``."""
    rows = [["layer", "head", "measured", "error", "x well-rounded"]]
    for layer in layers:
        known = [(name, layer.values.get(f"{name}_factor", np.full(layer.heads, math.nan))) for name in MEASURED]
        ranked = [(factors[h], name, h) for name, factors in known for h in np.flatnonzero(np.isfinite(factors))]
        if ranked:
            factor, name, head = max(ranked, key=lambda one: float(one[0]))
            error = layer.values[f"{name}_error"][head]
            off = percent(error, ".2g") if math.isfinite(error) else "-"  # there is no dQ to be off of
            rows.append([str(layer.layer), str(head), name, off, times(factor)])
    return rows if len(rows) > 1 else []


def _of_judged(layers: Sequence[LayerCheck]) -> list[list[str]]:
    """Each layer's quantity with the largest error beside its yardstick's, or the largest where none is."""
    declared = next((layer.declared for layer in layers if layer.declared), None)
    heads = ["linear", "error", "x well-rounded"] if declared is None else ["declared", "error", f"x {declared}"]
    rows = [["layer", "head", *heads, "found"]] if layers else []
    for layer in layers:
        errors = [name for name in layer.values if name.endswith("_error")]
        ranked = []
        for number, name in enumerate(errors):
            factors = layer.values[name.removesuffix("error") + "factor"]
            best = factors if np.isfinite(factors).any() else layer.values[name]
            if np.isfinite(best).any():
                head = int(np.nanargmax(best))
                ranked.append((np.isfinite(factors).any(), best[head], -number, head, factors[head]))
        if ranked:
            _, _, number, head, factor = max(ranked)
            name = errors[-number]
            found = [label for label, flag in JUDGED_FLAGS.items() if layer.values[flag][head]]
            beside = times(factor) if math.isfinite(factor) else "-"
            error, labels = percent(layer.values[name][head], ".2g"), ", ".join(found) or "-"
            rows.append([str(layer.layer), str(head), name.removesuffix("_error"), error, beside, labels])
    return rows


def _worst(layer: LayerCheck) -> int:
    for name in ("dw_q_share", "dq_share", "max_logit"):
        if np.isfinite(layer.values[name]).any():
            return int(np.nanargmax(layer.values[name]))
    return 0
