"""A check as flat names for a logger, and as a table for people."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import numpy as np

from attn_diag.watching.monitoring.alarm import Alarm
from attn_diag.watching.monitoring.record import LayerCheck, MonitorCheck

_COLUMNS = (
    ("dw_q_share", "dW_Q err", ".2%"), ("dq_share", "dQ err", ".2%"), ("dw_q_over_floor", "x floor", ".2f"),
    ("noise_factor", "noise", ".2f"), ("conditioning", "condit.", ".1f"), ("coherence", "coher.", ".2f"),
    ("max_logit", "logit", ".1f"), ("w_q_norm", "|W_Q|", ".2f"),
)  # fmt: skip


_ALARMS = 3
_WIDTH = 80


def flat_metrics(check: MonitorCheck, alarms: int, total: int, *, per_head: bool) -> dict[str, float]:
    """ "attn/NAME/max" and "/mean" over the heads of which NAME is known, "attn/alarm", "attn/alarms", "attn/step"."""
    found: dict[str, float] = {}
    names = dict.fromkeys(name for layer in check.layers for name in layer.values)
    for name in names:
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
                for head, value in enumerate(row):
                    if not math.isnan(value):
                        found[f"attn/layer{layer.layer:02d}/head{head:02d}/{name}"] = float(value)
    return found | {"attn/alarm": float(alarms), "attn/alarms": float(total), "attn/step": float(check.step)}


def table(check: MonitorCheck | None, alarms: Sequence[Alarm]) -> str:
    """Each layer's head with the largest predicted error, one line each, then the first alarms; 80 columns."""
    if check is None:
        return "no check yet"
    shown = [c for c in _COLUMNS if any(np.isfinite(layer.values[c[0]]).any() for layer in check.layers)]
    rows = [["layer", "head", *(title for _, title, _ in shown)]]
    for layer in check.layers:
        head = _worst(layer)
        cells = [format(v, form) if math.isfinite(v := layer.values[name][head]) else "-" for name, _, form in shown]
        rows.append([str(layer.layer), str(head), *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"step {check.step}, the worst head of each layer"]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for alarm in alarms[:_ALARMS]:
        lines += textwrap.wrap(f"ALARM {alarm}", _WIDTH, subsequent_indent="  ")
    if len(alarms) > _ALARMS:
        lines.append(f"… and {len(alarms) - _ALARMS} more: monitor.alarms")
    return "\n".join(lines)


def _worst(layer: LayerCheck) -> int:
    for name in ("dw_q_share", "dq_share", "max_logit"):
        if np.isfinite(layer.values[name]).any():
            return int(np.nanargmax(layer.values[name]))
    return 0
