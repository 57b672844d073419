"""``attn_diag.explain``: a diagnosis of one head, in words."""

from __future__ import annotations

from attn_diag.analyses.explanation.paragraphs import paragraphs
from attn_diag.errors import InputError
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.explanation import Explanation

_Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]
# So many heads are named where the one asked for does not exist.
_NAMED = 12


def explain(
    diagnosis: Diagnosis, head: int | None = None, layer: int | None = None, observation: str | None = None
) -> Explanation:
    """Say in plain English what was found for one head, and what was not.

    ``head`` and ``layer``: the model's numbers; ``observation``: its name; None: any. Of several entries that fit
    (other captures, observations) the worst is explained: by label, then by dQ's error. Made of the diagnosis alone:
    the same diagnosis gives the same words.

    Raises InputError, naming what exists, where nothing fits.
    """
    entries = diagnosis.ranked()
    fitting = [
        (capture, made, entry)
        for capture, made, entry in entries
        if head in (None, entry.head) and layer in (None, entry.layer) and observation in (None, made.name)
    ]
    if not fitting:
        raise InputError(_missing(entries, head, layer, observation))
    capture, made, entry = fitting[0]
    assert entry.head is not None
    return Explanation(
        source=capture.source,
        observation=made.name,
        layer=entry.layer,
        batch=entry.batch,
        head=entry.head,
        labels=None if entry.verdict is None else entry.verdict.labels,
        others=len(fitting) - 1,
        paragraphs=tuple(paragraphs(diagnosis, capture, made, entry, others=len(fitting) - 1)),
    )


def _missing(entries: list[_Entry], head: int | None, layer: int | None, observation: str | None) -> str:
    asked = {"head": head, "layer": layer, "observation": observation}
    wanted = ", ".join(f"{name} {value!r}" for name, value in asked.items() if value is not None)
    if not entries:
        return "the diagnosis holds no head: inspect a capture first"
    places = sorted({(-1 if h.layer is None else h.layer, h.head or 0, made.name) for _, made, h in entries})
    named = [f"{'' if at < 0 else f'layer {at} '}head {number} ({name})" for at, number, name in places]
    more = f", … ({len(named)} in all)" if len(named) > _NAMED else ""
    return f"the diagnosis holds no {wanted}; it holds {', '.join(named[:_NAMED])}{more}"
