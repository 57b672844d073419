"""``attn_diag.replay_linear``: a call of linear attention through other functions for the same mathematics."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from attn_diag.analyses.linear.inspect import inspect_linear_captures
from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.captures.loading import find_captures
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.errors import InputError
from attn_diag.head.machine import backend_name, describe_tool, pick_device
from attn_diag.results.linear import LinearObservation
from attn_diag.results.replay import Replay, ReplayedCapture, ReplayedKernel, ReplayedQuantity
from attn_diag.statistics.means import require_level
from attn_diag.testing.linear.cases import inputs_alone, with_outputs
from attn_diag.testing.linear.check import gravest_of
from attn_diag.testing.linear.function import RECIPE, LinearFunctionGiven
from attn_diag.testing.replaying.answer import answer
from attn_diag.testing.replaying.processes import Ran, run_apart
from attn_diag.testing.replaying.replay import DEFAULT_LIMIT_S, INSTALLED, importable, version_of
from attn_diag.work import Progress

# flash-linear-attention's functions for training and for decoding.
_FLA = ("chunk", "fused_recurrent")
# Where an operator's functions are, if not in fla.ops.OPERATOR under its name.
_ELSEWHERE = {
    "dplr": ("fla.ops.generalized_delta_rule", "dplr_delta_rule"),
    "iplr": ("fla.ops.generalized_delta_rule", "iplr_delta_rule"),
}
_MAMBA2 = "mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined"


def replay_linear(
    source: LinearCapture | str | os.PathLike[str] | Sequence[LinearCapture | str | os.PathLike[str]],
    *,
    against: Iterable[str | LinearFunctionGiven] | None = None,
    level: float = 0.01,
    limit_s: float = DEFAULT_LIMIT_S,
    device: str = "auto",
    progress: Progress | None = None,
    unreadable: Sequence[str] = (),
) -> Replay:
    """As ``attn_diag.replay``, of linear attention: is it the function that ran, or what it was given?

    Args:
        source: A capture, its file, a folder of them, or a list of these.
        against: "installed" for flash-linear-attention's chunked and recurrent function of the operator and the
            emulated well-rounded kernel, "recipe" for that one alone ("recipe:16" in chunks of 16), "MODULE:FUNCTION"
            with flash-linear-attention's arguments, or a function of a module; None: what is installed.
        level: Significance of the means of O, after Benjamini-Hochberg.
        limit_s: How long each function may take, in seconds.
        device: auto, cpu or cuda.
        progress: Called with (done, total) after each function.
        unreadable: Inputs that could not be read, for the result.

    Returns:
        For each capture whether it is the function, the inputs or neither, and every function with its verdicts.

    Raises:
        InputError: Nothing can be replayed, or a function is not known or cannot be imported by another process.
    """
    require_level(level)
    if not limit_s > 0:
        raise InputError(f"the time limit must be above 0 seconds, got {limit_s}")
    where = pick_device(device)
    captures = _captures(source)
    if not captures:
        raise InputError("nothing to replay: name at least one capture of linear attention")
    given = [INSTALLED] if against is None else [against] if isinstance(against, str) else list(against)
    asked = frozenset(_name(one) for one in given) - {INSTALLED}
    jobs = [
        _Job(capture, *_functions(given, capture.operator, where), asked, where, limit_s, level) for capture in captures
    ]
    total, done, found = sum(len(job.names) for job in jobs), 0, list[ReplayedCapture]()
    for job in jobs:
        before = done

        def told(number: int, before: int = before) -> None:
            if progress is not None:
                progress(before + number, total)

        found.append(job.run(told))
        done += len(job.names)
    not_here = tuple(dict.fromkeys(name for job in jobs for name in job.not_here))
    return Replay(describe_tool(where), tuple(found), not_here, limit_s, tuple(unreadable))


def _captures(
    source: LinearCapture | str | os.PathLike[str] | Sequence[LinearCapture | str | os.PathLike[str]],
) -> list[LinearCapture]:
    if isinstance(source, LinearCapture):
        return [source]
    given = [source] if isinstance(source, str | os.PathLike) else source
    found: list[LinearCapture] = []
    for one in given:
        found += [one] if isinstance(one, LinearCapture) else map(load_linear, find_captures([one]))
    return found


def _name(given: str | LinearFunctionGiven) -> str:
    name = given if isinstance(given, str) else importable(given)
    if name != INSTALLED and name.partition(":")[0] != RECIPE and ":" not in name:
        raise InputError(
            f"no function {name!r} of linear attention; known: {INSTALLED}, {RECIPE}, {RECIPE}:16, and MODULE:FUNCTION "
            "with flash-linear-attention's arguments"
        )
    return name


def _functions(
    given: Sequence[str | LinearFunctionGiven], operator: str, where: torch.device
) -> tuple[list[str], list[str]]:
    """The functions that are asked for, and known ones that are not here, with the reason."""
    names, not_here = list[str](), list[str]()
    for name in map(_name, given):
        if name != INSTALLED:
            names.append(name)
            continue
        names.append(RECIPE)
        for known in _known(operator):
            if not _here(known.partition(":")[0]):
                not_here.append(f"{known} (not installed)")
            elif where.type != "cuda":
                not_here.append(f"{known} (needs a GPU)")
            else:
                names.append(known)
    return list(dict.fromkeys(names)), not_here


def _known(operator: str) -> tuple[str, ...]:
    """Released functions of an operator, MODULE:FUNCTION."""
    if operator == "mamba2":
        return (_MAMBA2,)
    module, name = _ELSEWHERE.get(operator, (f"fla.ops.{operator}", operator))
    return tuple(f"{module}:{how}_{name}" for how in _FLA)


def _here(module: str) -> bool:
    """Whether a module is installed; a package that cannot be imported itself is not."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


@dataclass
class _Job:
    """One capture through the functions."""

    capture: LinearCapture
    names: list[str]
    not_here: list[str]
    asked_for: frozenset[str]
    device: torch.device
    limit_s: float
    level: float

    def run(self, done: Callable[[int], None]) -> ReplayedCapture:
        """Run them all, judge what came back, and answer."""
        ran: dict[str, Ran] = {}
        for name, outputs in self.capture.observations.items():
            ran["captured" if name == DEFAULT_OBSERVATION else f"captured {name}"] = Ran("captured", outputs=outputs)
        with tempfile.TemporaryDirectory(prefix="attn-diag-replay-") as folder:
            inputs = inputs_alone(self.capture).save(Path(folder) / "inputs.safetensors")
            for number, name in enumerate(self.names):
                own = Path(tempfile.mkdtemp(dir=folder))
                ran[name] = run_apart(name, inputs, own, self.device.type, self.limit_s)
                done(number + 1)
        judged = self._judged(ran)
        kernels = [self._kernel(name, one, judged.get(name)) for name, one in ran.items()]
        return answer(self.capture, kernels, self.asked_for)

    def _judged(self, ran: Mapping[str, Ran]) -> dict[str, LinearObservation]:
        """What ``inspect`` says of each, all tested together."""
        alone = inputs_alone(self.capture)
        made = {n: replace(with_outputs(alone, dict(r.outputs)), source=n) for n, r in ran.items() if r.outputs}
        if not made:
            return {}
        found = inspect_linear_captures(list(made.values()), level=self.level, device=self.device.type)
        return {name: c.observations[0] for name, c in zip(made, found.captures, strict=True)}

    def _kernel(self, name: str, ran: Ran, found: LinearObservation | None) -> ReplayedKernel:
        captured, stated = ran.outcome == "captured", self.capture.metadata
        heads = () if found is None else found.heads
        gravest = gravest_of([q for head in heads for q in head.quantities]).values()
        if captured:
            backend, version = stated.device or "not stated", stated.kernel
        else:
            emulated = name.partition(":")[0] == RECIPE
            backend = f"emulation on {backend_name(self.device)}" if emulated else backend_name(self.device)
            version = version_of("attn_diag:" if emulated else name)
        return ReplayedKernel(
            name=name, captured=captured, version=version, backend=backend, outcome=ran.outcome, stage=ran.stage,
            message=ran.message, labels=tuple(dict.fromkeys(label for head in heads for label in head.labels)),
            quantities=tuple(
                ReplayedQuantity(q.quantity, q.answer, q.factor, q.relative_error, q.words) for q in gravest
            ),
            recipe=None, agreement=None, schedule=None, deterministic=ran.deterministic, forward_ms=None,
            backward_ms=None, finding=None, biased=any("biased" in head.labels for head in heads),
        )  # fmt: skip
