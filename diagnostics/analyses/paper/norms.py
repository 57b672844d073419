"""Figure 3: the spectral norms of W_Q by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attn_diag.captures.capture import Capture
from attn_diag.results.paper import Chosen, HeadNorms, SpectralNorms

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
