"""A trainer's fake-quantised weight beside the one that an engine runs: are they the same, and if not, how not."""

from __future__ import annotations

from torch import Tensor

from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import Quantizer
from attn_diag.results.quant import EngineWeights
from attn_diag.testing.quantizing.candidates import identify
from attn_diag.testing.quantizing.functions import quantizer
from attn_diag.testing.quantizing.possible import DECLARED, SAME


def beside_engine(
    w: Tensor,
    trained: Tensor,
    trainer: Quantizer | None,
    engine: Tensor | str | Quantizer,
    x: Tensor | None,
    amax: Tensor | None = None,
) -> EngineWeights:
    """Compare them.

    Args:
        w: The weight before, [R, C].
        trained: What the trainer multiplies with, [R, C] float64.
        trainer: Its quantiser; None: not known.
        engine: The engine's values, [R, C], or its quantiser.
        x: Inputs, [N, C] float64; None: none.
        amax: What the trainer's scales are made of, for each block; None: w's own.
    """
    made = None
    if isinstance(engine, Tensor):
        values = engine.detach().to(w.device).double()
        _, found = identify(w, engine.detach().to(w.device), trainer, amax=amax)
        if found is not None:
            made, words = found.by.name, found.words
            if words.startswith(DECLARED):
                words = "as the trainer"
            elif trainer is not None and found.declarable:
                words = _differing(trainer, found.by)
        else:
            words = "by no quantizer that is known here"
    else:
        by = quantizer(engine)
        values, made = quantize(w.double(), by).values.double(), by.name
        words = by.name if trainer is None else _differing(trainer, by)
    exact = w.double()
    apart = values - trained
    equal = float((values.to(w.dtype) == trained.to(w.dtype)).double().mean())
    size, total = float(exact.norm()) or 1.0, float(exact.abs().sum()) or 1.0
    output = None
    if x is not None:
        output = float((x @ apart.T).norm()) / (float((x @ exact.T).norm()) or 1.0)
    return EngineWeights(
        quantizer=made,
        words=words,
        equal=equal,
        difference=float(apart.norm()) / size,
        away=float((apart * exact.sign()).sum()) / total,
        output=output,
        same=equal >= SAME,
    )


def _differing(trainer: Quantizer, engine: Quantizer) -> str:
    """Field by field."""
    names = ("elements", "scale", "target", "symmetric", "narrow", "tensor_scale")
    pairs = [(n, getattr(engine, n), getattr(trainer, n)) for n in names]
    said = [f"{n} {a}, the trainer's {b}" for n, a, b in pairs if a != b]
    if trainer.block != engine.block:
        said.insert(0, f"blocks of {engine.block}, the trainer's are {trainer.block}")
    return "; ".join(said) or "as the trainer"
