"""How a function of linear attention is called, beside its tensors: with its defaults, or making its gates itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.captures.linear_gates import gates

# Of -log(decay) over that of A = 1, or of beta before its sigmoid: where a draw is centred, and what the biases add.
_CENTRE, _BIAS = -3.0, 0.5
# By operator, the gates that functions make on request, and what tells them to.
_SWITCHES = {
    "kda": ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel"),
    "gated_delta_rule": ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel"),
    "mamba2": ("dt_softplus",),
}
IN_KERNEL = tuple(_SWITCHES)


@dataclass(frozen=True)
class InKernel:
    """What a function makes its gates of, in fp32."""

    operator: str
    """Of ``IN_KERNEL``."""
    raw: Mapping[str, Tensor]
    """Instead of the gates: ``g`` and ``beta``, or ``dt``."""
    also: Mapping[str, Tensor]
    """Further arguments: ``A_log`` [H], ``dt_bias`` [H] (KDA: [H · K])."""

    @classmethod
    def draw(cls, operator: str, shape: tuple[int, int, int, int], make: torch.Generator) -> InKernel:
        """N(0, 1) about a centre.

        Args:
            operator: Of ``IN_KERNEL``.
            shape: B, T, H, K.
            make: Where random numbers come from.
        """
        b, t, h, k = shape
        step = (b, t, h, k) if operator == "kda" else (b, t, h)
        bias = torch.randn(h * (k if operator == "kda" else 1), generator=make) * _BIAS
        first = torch.randn(step, generator=make) + _CENTRE
        if operator == "mamba2":
            return cls(operator, {"dt": first}, {"dt_bias": bias})
        raw = {"g": first, "beta": torch.randn(b, t, h, generator=make)}
        return cls(operator, raw, {"A_log": torch.rand(h, generator=make), "dt_bias": bias})

    @property
    def options(self) -> dict[str, bool]:
        """The arguments that tell a function to."""
        return dict.fromkeys(_SWITCHES[self.operator], True)

    def missing(self, parameters: Mapping[str, inspect.Parameter]) -> str | None:
        """An argument that a function does not take; None: it takes all.

        fla's functions take some of them by ``**kwargs``, beside a switch that they name; others let these pass.
        """
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and any(n in parameters for n in self.options):
            return None
        return next((n for n in (*self.options, *self.also) if n not in parameters), None)

    def gates(self) -> dict[str, Tensor]:
        """The gates, by name."""
        with torch.no_grad():
            return gates(self.operator, {**self.raw, **self.also, **self.options}).tensors

    def of_gates(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gates' gradients, of those of what they are made of.

        Args:
            gradients: ``dg`` and ``dbeta``, or ``ddt``, with respect to ``raw``.
        """
        leaves = {name: x.detach().requires_grad_() for name, x in self.raw.items()}
        made = gates(self.operator, {**leaves, **self.also, **self.options}).tensors
        slopes = torch.autograd.grad([x.sum() for x in made.values()], [leaves[name] for name in made])
        return {f"d{n}": gradients[f"d{n}"].float() / x for n, x in zip(made, slopes, strict=True)}


@dataclass(frozen=True)
class How:
    """How a function is called."""

    in_kernel: InKernel | None = None
    """What it makes its gates of; None: it is given them."""
    defaults: bool = False
    """Whether the scale and the last state are left to its defaults (None, and none)."""
