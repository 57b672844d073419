"""``attn_diag.QuantMonitor``: watches a model's fake quantisers while it trains.

For each quantiser and check: the signed mean of Q(w) - w and of its part away from zero with a standard error over
blocks, the dead zone, what is saturated, and, where the quantiser is declared, codes that flipped since the last check
and how many of these flips took back the last one (oscillating weights, Nagel et al., arXiv 2203.11086).

The alarm is of drift, not of a level: rounding that does not draw has the mean that the weights give it. With b_t the
error away from zero, b_0 its mean over the first ``_WARM`` checks, and s_t, s_0 their standard errors, the alarm is
raised where |b_t - b_0| > z sqrt(s_t^2 + s_0^2) in two checks on end. Errors of successive checks are of nearly the
same weights, so that s_0 is not made smaller by their number. z is the normal quantile of ``level`` over 1,000 checks
of all quantisers.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from attn_diag.errors import InputError
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import Quantizer, quantizer

_log = logging.getLogger("attn_diag")
_WARM, _CHECKS, _HISTORY = 5, 1000, 1000
# Columns that count as one cluster where no quantiser with blocks is declared.
_CLUSTER = 32
# |w| past the block's largest number by more than a rounding of it to BF16 makes.
_BEYOND = 1 + 2.0**-7

FakeQuantizer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class QuantCheck:
    """One fake quantiser at one step."""

    step: int
    """The step."""
    name: str
    """The module's name, or the function's."""
    error: float
    """Root mean square of Q(w) - w over that of w."""
    bias: float
    """Mean of Q(w) - w over w's root mean square."""
    away: float
    """Mean of (Q(w) - w) sign(w) over the mean of |w|: below 0 the weight shrinks."""
    away_error: float
    """Its standard error, over blocks."""
    dead_zone: float
    """The part of the elements that became 0 and were not."""
    saturated: float
    """The part of them past their block's largest number."""
    flips: float | None
    """The part whose code differs from the last check's; None at the first, of activations, and without a declared
    quantiser."""
    oscillating: float | None
    """Of these flips, the part that took back the last one; None as ``flips``."""


@dataclass(frozen=True)
class QuantAlarm:
    """The error away from zero has left what it was at the start."""

    check: QuantCheck
    """Where it was seen."""
    before: float
    """``away`` at the start."""
    z: float
    """The difference in standard errors."""

    def __str__(self) -> str:
        return (
            f"step {self.check.step}: {self.check.name}: the quantiser's error away from zero has drifted from "
            f"{self.before:+.2e} to {self.check.away:+.2e} of |w| ({abs(self.z):.1f} standard errors); "
            "compare the quantiser's scales and rounding with those of the start: attn_diag.quant"
        )


@dataclass
class _State:
    """What is kept of a quantiser."""

    seen: int = -1
    first: list[QuantCheck] = field(default_factory=list)
    codes: Tensor | None = None
    direction: Tensor | None = None
    outside: int = 0
    alarmed: bool = False


class QuantMonitor:
    """Watches fake quantisers on every ``every``-th step, from now until ``close()``.

        monitor = attn_diag.QuantMonitor(model, quantizer="int4", every=10)
        train(model)                                    # an optimizer's step() ends a step
        print(monitor.table()); monitor.alarms

    Args:
        model: Its fake quantisers are watched: modules whose class has FakeQuant in its name (torchao's, torch.ao's),
            and parametrizations; None: none, see ``wrap``.
        modules: Names of modules of ``model`` instead, any that take a tensor and return one of its shape.
        quantizer: What they should be, for flips and for the blocks of the standard errors; a name or a Quantizer.
        every: Steps between checks.
        level: False alarms to expect in 1,000 checks of all quantisers.
        on_alarm: Called with each ``QuantAlarm``.

    Raises:
        InputError: Modules that are not there, a quantiser that cannot be, or options that cannot be.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        modules: Iterable[str] | None = None,
        quantizer: str | Quantizer | None = None,
        every: int = 1,
        level: float = 0.01,
        on_alarm: Callable[[QuantAlarm], object] | None = None,
    ) -> None:
        if every < 1 or not 0 < level < 1:
            raise InputError(f"every must be at least 1 and level between 0 and 1, got {every} and {level}")
        self.checks: deque[QuantCheck] = deque(maxlen=_HISTORY)
        self.alarms: list[QuantAlarm] = []
        self.step = 0
        self._by = _declared(quantizer)
        self._every, self._level, self._on_alarm = every, level, on_alarm
        self._states: dict[str, _State] = {}
        self._handles: list[RemovableHandle] = []
        if model is not None:
            for name, module in _chosen(model, modules).items():
                self._states[name] = _State()
                self._handles.append(module.register_forward_hook(self._hook(name)))
        self._handles.append(register_optimizer_step_post_hook(self._advance))

    def wrap(self, function: FakeQuantizer, name: str) -> FakeQuantizer:
        """A plain function that is a fake quantiser, watched under ``name``; gradients and bits stay the same.

        A name is one weight's: of several calls in a step the first is looked at. Wrap once for each layer.
        """
        self._states.setdefault(name, _State())

        def watched(w: Tensor) -> Tensor:
            values = function(w)
            self._look(name, w, values)
            return values

        return watched

    def metrics(self) -> dict[str, float]:
        """The last check of every quantiser as flat numbers, for any logger."""
        last = {check.name: check for check in self.checks}
        names = ("error", "bias", "away", "dead_zone", "saturated", "flips", "oscillating")
        return {
            f"quant/{name}/{figure}": value
            for name, check in last.items()
            for figure in names
            if (value := getattr(check, figure)) is not None
        }

    def table(self) -> str:
        """The last check of every quantiser, one a line."""
        last = {check.name: check for check in self.checks}
        width = max(map(len, last), default=4)
        lines = [f"{'':{width}}  step   error  away from zero       dead  satur.  flips  back"]
        for name, c in last.items():
            flips = "" if c.flips is None else f"{c.flips:6.2%} {c.oscillating or 0.0:5.0%}"
            lines.append(
                f"{name:{width}}  {c.step:4d}  {c.error:6.2%}  {c.away:+.2e} ± {c.away_error:.0e}  {c.dead_zone:5.1%}  "
                f"{c.saturated:6.2%} {flips}"
            )
        return "\n".join([*lines, *map(str, self.alarms)])

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self, *_: Any) -> None:
        self.step += 1

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, given: tuple[Any, ...], values: Any) -> None:
            if given and isinstance(given[0], Tensor) and isinstance(values, Tensor):
                self._look(name, given[0], values)

        return hook

    @torch.no_grad()
    def _look(self, name: str, w: Tensor, values: Tensor) -> None:
        state = self._states[name]
        if self.step % self._every or state.seen == self.step or w.shape != values.shape or not w.numel():
            return
        state.seen = self.step
        # Activations are others at every step: their codes do not flip.
        of_activations = "activation" in name.lower() or not w.is_leaf
        check = self._checked(name, state, w.detach(), values.detach(), of_activations)
        if not math.isfinite(check.away):
            return
        self.checks.append(check)
        self._judge(state, check)

    def _checked(self, name: str, state: _State, w: Tensor, values: Tensor, of_activations: bool) -> QuantCheck:
        matrix = w.double().reshape(-1, w.shape[-1])
        made = values.double().reshape(matrix.shape)
        error, size = made - matrix, float(matrix.abs().sum()) or 1.0
        away = error * matrix.sign()
        mean = float(away.sum()) / size
        # The ratio's standard error by blocks: their residuals from it.
        residual = _blocks(away - mean * matrix.abs(), self._by)
        largest = _blocks(made.abs(), self._by, torch.amax)
        beyond = _blocks(matrix.abs(), self._by, torch.amax) > _BEYOND * largest
        flips, oscillating = (None, None) if of_activations else self._flips(state, w)
        return QuantCheck(
            step=self.step,
            name=name,
            error=float(error.norm()) / (float(matrix.norm()) or 1.0),
            bias=float(error.mean()) / (float(matrix.square().mean().sqrt()) or 1.0),
            away=mean,
            away_error=float(residual.square().sum().sqrt()) / size,
            dead_zone=float(((made == 0) & (matrix != 0)).double().mean()),
            saturated=_saturated(matrix, largest, self._by) if bool(beyond.any()) else 0.0,
            flips=flips,
            oscillating=oscillating,
        )

    def _flips(self, state: _State, w: Tensor) -> tuple[float | None, float | None]:
        if self._by is None:
            return None, None
        codes = quantize(w.float(), self._by).codes
        before, state.codes = state.codes, codes.to(torch.float16)
        if before is None or before.shape != codes.shape:
            return None, None
        moved = torch.sign(codes - before.float()).to(torch.int8)
        last = torch.zeros_like(moved) if state.direction is None else state.direction
        count = int((moved != 0).sum())
        back = int(((moved != 0) & (moved == -last)).sum())
        state.direction = torch.where(moved != 0, moved, last)
        return count / codes.numel(), back / count if count else 0.0

    def _judge(self, state: _State, check: QuantCheck) -> None:
        if len(state.first) < _WARM:
            state.first.append(check)
            return
        before = sum(c.away for c in state.first) / _WARM
        own = math.sqrt(sum(c.away_error**2 for c in state.first) / _WARM)
        error = math.hypot(own, check.away_error)
        if not error:
            return
        z = (check.away - before) / error
        tail = self._level / _CHECKS / max(len(self._states), 1) / 2
        limit = float(-torch.special.ndtri(torch.tensor(tail, dtype=torch.float64)))
        state.outside = state.outside + 1 if abs(z) > limit else 0
        if state.outside < 2 or state.alarmed:
            return
        state.alarmed = True
        alarm = QuantAlarm(check, before, z)
        self.alarms.append(alarm)
        _log.warning("attn-diag: %s", alarm)
        if self._on_alarm is not None:
            self._on_alarm(alarm)


def _declared(given: str | Quantizer | None) -> Quantizer | None:
    if given is None:
        return None
    try:
        return quantizer(given)
    except ValueError as error:
        raise InputError(str(error)) from error


def _chosen(model: nn.Module, wanted: Iterable[str] | None) -> dict[str, nn.Module]:
    """The modules to be watched, by name."""
    every = dict(model.named_modules())
    if wanted is not None:
        names = list(wanted)
        if missing := [name for name in names if name not in every]:
            raise InputError(f"the model has no module {', '.join(missing)}")
        return {name: every[name] for name in names}
    found = {name: m for name, m in every.items() if "FakeQuant" in type(m).__name__ and not _holds_one(m)}
    for name, module in every.items():
        if isinstance(module, ParametrizationList):
            found |= {f"{name}.{i}": m for i, m in enumerate(module)}
    if not found:
        raise InputError(
            "the model has no fake quantisers (modules named …FakeQuant…, or parametrizations); name its modules, or "
            "leave the model out and wrap its function: QuantMonitor(…).wrap(fake_quantize, 'name')"
        )
    return found


def _holds_one(module: nn.Module) -> bool:
    """Whether it is a layer that calls fake quantisers, as torchao's FakeQuantizedLinear."""
    return any("FakeQuant" in type(m).__name__ for name, m in module.named_modules() if name)


def _shape(matrix: Tensor, by: Quantizer | None) -> tuple[int, int]:
    rows, columns = matrix.shape
    if by is None:
        return 1, min(_CLUSTER, columns)
    r, c = by.block_shape((rows, columns))
    # One scale for all leaves no clusters: rows are.
    return (1, columns) if r * c >= rows * columns else (r, c)


def _blocks(matrix: Tensor, by: Quantizer | None, how: Callable[..., Tensor] = torch.sum) -> Tensor:
    """A figure of every block, [R / r, C / c]; what is missing of the last counts as 0."""
    r, c = _shape(matrix, by)
    filled = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % c, 0, -matrix.shape[0] % r))
    return how(filled.reshape(filled.shape[0] // r, r, filled.shape[1] // c, c), dim=(1, 3))


def _saturated(matrix: Tensor, largest: Tensor, by: Quantizer | None) -> float:
    r, c = _shape(matrix, by)
    limit = largest.repeat_interleave(r, 0).repeat_interleave(c, 1)[: matrix.shape[0], : matrix.shape[1]]
    return float((matrix.abs() > _BEYOND * limit).double().mean())
