"""Small records of failing runs, for the tests of benchmarks/failing_run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arms import ARMS
from runlog import WINDOW, Writer

from attn_diag.watching.monitoring.record import LayerCheck, MonitorCheck

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
# Forks start at START; unchanged the run leaves its trend at DEPARTURE.
START, END, DEPARTURE, NAN = 502, 1150, 749, 610
FORK: dict[str, Any] = {"first": START, "origin": "A_seed0"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def a_run(
    where: Path, arm: str, seed: int = 0, *, first: int = 0, end: int = END, origin: str | None = None,
    departs: int | None = None, nan: int | None = None, loss: float = 4.0, monitored: int = 0, share: float = 0.1,
    tag: str = "",
) -> None:  # fmt: skip
    """Write a run's log; a fork's has 100 steps of its parent before its own.

    ``departs``: its loss jumps; ``nan``: it has none any more. ``monitored``: every so often, with a ``share`` that is
    ten times as large from step 1,000 on.
    """
    name = f"{arm}_seed{seed}{tag}"
    base = next((ARMS[key] for key in (arm, arm.partition("+")[0]) if key in ARMS), ARMS["A"])
    assert base.forward is not None
    forward = base.forward.sites()
    if "stabilised-" in arm:
        forward = forward | {"softmax": f"stabilised (beta {float(arm.rpartition('-')[2])}, epsilon 0.001)"}
    stated = {
        "run": {"arm": arm, "seed": seed, "sequences": 40},
        "from": {"run": origin, "step": first} if origin else None,
        "forward": forward,
        "backward": base.backward.sites(),
        "words": base.words,
    }
    with Writer(where / f"{name}.jsonl") as log:
        log.write({"header": stated})
        for step in range(max(first - WINDOW, 0) if origin else first, end):
            value = loss + 0.01 * math.sin(step) + (3.0 if departs is not None and step >= departs else 0.0)
            bad = nan is not None and step >= nan
            row = {"step": step, "loss": math.nan if bad else value, "grad_norm": 1.0}
            log.write(row | {"lr": 1e-4, "seconds": 0.1})
    if monitored:
        shares = ((s, share * (10 if s >= 1000 else 1)) for s in range(first, end, monitored))
        checks = [a_check(s, 2 * math.exp(0.006 * s), of).to_json() + "\n" for s, of in shares]
        (where / "monitor").mkdir(exist_ok=True)
        (where / "monitor" / f"{name}.jsonl").write_text("".join(checks))


def a_check(step: int, max_logit: float, share: float = 0.1) -> MonitorCheck:
    """Of one layer with two heads; the second one is the worst."""
    values = {"max_logit": [0.5 * max_logit, max_logit], "dw_q_share": [share / 2, share], "w_q_norm": [1.0, 2.0],
              "dw_q_over_floor": [1.0, 20.0 if share > 0.05 else 1.0]}  # fmt: skip
    return MonitorCheck(step, (LayerCheck(1, None, {n: np.array(v) for n, v in values.items()}),))
