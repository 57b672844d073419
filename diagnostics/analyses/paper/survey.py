"""The first look, one capture at a time: every head inspected, and which is worst."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.results.diagnosis import BiasEstimate, Diagnosis, Drift, HeadDiagnosis, severity
from attn_diag.results.estimates import Bias
from attn_diag.results.paper import Chosen


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
    """What is kept of one head of one capture."""

    key: HeadKey
    capture: int
    """Number of the capture."""
    source: str
    """Its source."""
    step: int | None
    """Its step."""
    head: HeadDiagnosis
    """Without figures, and of the biases only delta's, without running sums over rows."""
    emulated: bool
    """Whether no kernel's outputs were captured."""


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
            m = capture.metadata
            assert head.head is not None
            key = HeadKey(m.extra.get("run"), m.extra.get("module"), m.layer, head.head, observation.name)
            entry = HeadAtStep(key, number, capture.source, m.step, _light(head), emulated=not observation.outputs)
            self.entries.append(entry)
            if self.worst_drift is None or severity(head) < severity(self.worst_drift[0].head):
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


def _light(head: HeadDiagnosis) -> HeadDiagnosis:
    """Without what a hundred steps of a hundred heads would fill memory with."""
    delta, excess = (e and replace(e, drift=Drift()) for e in (head.bias.delta, head.bias.delta_excess))
    return replace(head, bias=Bias(delta=delta, delta_excess=excess), figures=None)
