"""The first look, one capture at a time: every head inspected, which is worst; figure 3, the norms of W_Q by step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.results.diagnosis import (
    BiasEstimate,
    Diagnosis,
    Drift,
    GradientError,
    HeadDiagnosis,
    RowMaxima,
    severity,
)
from attn_diag.results.paper import Chosen, HeadNorms, SpectralNorms


@dataclass(frozen=True)
class HeadKey:
    """One head of a model and one observation of it: its captures differ in their step alone."""

    run: str | None
    module: str | None
    layer: int | None
    head: int
    observation: str


@dataclass(frozen=True)
class HeadAtStep:
    """What is kept of one head of one capture; ``capture`` its number. Running sums over rows are not kept."""

    key: HeadKey
    capture: int
    source: str
    step: int | None
    severity: tuple[int, float]
    rows: int
    row_maxima: RowMaxima
    delta: BiasEstimate | None
    delta_excess: BiasEstimate | None
    dw_q: GradientError | None
    emulated: bool


@dataclass
class Survey:
    """Gathers diagnoses, capture by capture. ``worst_drift``: delta's estimate of the worst head so far, whole."""

    entries: list[HeadAtStep] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    worst_drift: tuple[HeadAtStep, BiasEstimate | None] | None = None

    def add(self, number: int, capture: Capture, diagnosis: Diagnosis) -> None:
        """Take the diagnosis of capture ``number``. One whose metadata do not describe its outputs is refused."""
        (found,) = diagnosis.captures
        if found.assumptions.ok is False:
            self.refused.append(f"{capture.source}: {found.assumptions.message}")
            return
        for _, observation, head in diagnosis.entries():
            entry = _entry(number, capture, observation.name, head, emulated=not observation.outputs)
            self.entries.append(entry)
            if self.worst_drift is None or entry.severity < self.worst_drift[0].severity:
                self.worst_drift = entry, head.bias.delta

    def worst(self) -> HeadAtStep:
        """The worst entry by ``severity``, the first of equals. Raises InputError where there is none."""
        if self.worst_drift is None:
            raise InputError(self.refused[0] if self.refused else "no head could be inspected")
        return self.worst_drift[0]

    def of(self, key: HeadKey) -> list[HeadAtStep]:
        """One head's entries, in order of their steps; those without a step first."""
        found = [entry for entry in self.entries if entry.key == key]
        return sorted(found, key=lambda entry: -1 if entry.step is None else entry.step)

    def series(self, worst: HeadAtStep) -> list[HeadAtStep]:
        """The steps of the worst entry's head; it alone where it states no step: others need not be of the same run."""
        if worst.step is None:
            return [worst]
        return [entry for entry in self.of(worst.key) if entry.step is not None]

    def of_layer(self, key: HeadKey) -> list[HeadAtStep]:
        """The entries of all heads of the same layer and observation."""
        return [e for e in self.entries if replace(e.key, head=key.head) == key]


def choose(survey: Survey, *, captures: int, asked: bool) -> Chosen:
    """The worst head, with its steps; ``asked``: layer and head were named, so that only the capture was chosen."""
    worst = survey.worst()
    key, others = worst.key, len({entry.key for entry in survey.entries})
    if others == 1:
        reason = "as asked for" if asked else "the only head"
    else:
        reason = f"the worst of {others} heads and observations, by verdict, then by dQ's error"
    if captures > 1:
        reason += f"; shown where it is worst, in {worst.source}"
    return Chosen(
        layer=key.layer,
        head=key.head,
        observation=key.observation,
        module=key.module,
        run=key.run,
        source=worst.source,
        step=worst.step,
        reason=reason,
        steps=tuple(entry.step for entry in survey.series(worst) if entry.step is not None),
        emulated=worst.emulated,
    )


def _entry(number: int, capture: Capture, observation: str, head: HeadDiagnosis, *, emulated: bool) -> HeadAtStep:
    m = capture.metadata
    assert head.head is not None
    return HeadAtStep(
        key=HeadKey(m.extra.get("run"), m.extra.get("module"), m.layer, head.head, observation),
        capture=number,
        source=capture.source,
        step=m.step,
        severity=severity(head),
        rows=head.rows_all,
        row_maxima=head.row_maxima,
        delta=_light(head.bias.delta),
        delta_excess=_light(head.bias.delta_excess),
        dw_q=head.propagation.dw_q,
        emulated=emulated,
    )


def _light(estimate: BiasEstimate | None) -> BiasEstimate | None:
    """Without the running sum over rows, which a hundred steps of a hundred heads would fill memory with."""
    return None if estimate is None else replace(estimate, drift=Drift())


# Run, module (where the layer has no number), layer, head.
_Key = tuple[str | None, str | None, int | None, int]


@dataclass
class NormSeries:
    """Gathers norms capture by capture; a layer's w_q at one step counts once, whichever call it was captured with."""

    dtype: str = ""
    _found: dict[_Key, dict[int | None, tuple[float, float]]] = field(default_factory=dict)

    def add(self, capture: Capture, heads: frozenset[int] | None, device: torch.device) -> None:
        """Take w_q of one capture, of the ``heads`` asked for (the model's numbers; None: all that it holds)."""
        stored = capture.tensors.get("w_q")
        if stored is None:
            return
        weight, d, m = stored[...], capture.head_dim, capture.metadata
        self.dtype = str(stored.dtype).removeprefix("torch.")
        # w_q of the capture's own heads, or of the whole model.
        first = m.head_offset if len(weight) == capture.q_heads * d else 0
        for i in range(len(weight) // d):
            if heads is not None and first + i not in heads:
                continue
            part = weight[i * d : (i + 1) * d].to(device).double()
            if not bool(part.isfinite().all()):
                continue
            values = torch.linalg.svdvals(part)
            # Without a number of its own a layer is known by its module.
            module = m.extra.get("module") if m.layer is None else None
            series = self._found.setdefault((m.extra.get("run"), module, m.layer, first + i), {})
            series[m.step] = float(values[0]), float(values.square().sum().sqrt())

    def result(self, chosen: Chosen) -> SpectralNorms | None:
        """The figure, of the run of the head ``chosen``; None where no capture of it had a w_q."""
        kept = {k: v for k, v in self._found.items() if k[0] == chosen.run and k[1] in (None, chosen.module)}
        if not kept:
            return None
        order = sorted(kept, key=lambda key: (-1 if key[2] is None else key[2], key[3]))
        return SpectralNorms(tuple(_norms(key[2], key[3], kept[key]) for key in order), self.dtype)


def _norms(layer: int | None, head: int, by_step: dict[int | None, tuple[float, float]]) -> HeadNorms:
    steps = sorted(by_step, key=lambda step: -1 if step is None else step)
    spectral, frobenius = zip(*(by_step[step] for step in steps), strict=True)
    share = (spectral[-1] / frobenius[-1]) ** 2 if frobenius[-1] else None
    return HeadNorms(layer, head, tuple(steps), spectral, frobenius, share)
