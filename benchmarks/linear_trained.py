"""Small models of flash-linear-attention's own layers, trained on a GPU, and a call of their operator.

Two layers, width 256, four heads of 64 features, trained on the bytes of this repository's documentation in BF16
autocast. What the last layer handed its operator then, and dO, are kept; gates that the layer leaves to the kernel are
computed here in fp32, by fla's own reference of them, so that the call can be stated.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attn_diag import InputError, Monitor, capture_linear
from attn_diag.captures.linear import LinearCapture

WIDTH, HEAD, HEADS, LAYERS, BATCH = 256, 64, 4, 2, 4
# Operator -> fla's model, its options, and the module and name by which its layer calls the operator.
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "rwkv7": ("RWKV7", {"head_dim": HEAD}, "fla.layers.rwkv7", "chunk_rwkv7"),
    "gated_delta_rule": (
        "GatedDeltaNet", {"head_dim": HEAD, "num_heads": HEADS, "expand_v": 1.0},
        "fla.layers.gated_deltanet", "chunk_gated_delta_rule",
    ),
    "kda": ("KDA", {"head_dim": HEAD, "num_heads": HEADS}, "fla.layers.kda", "chunk_kda"),
    "gla": ("GLA", {"num_heads": HEADS, "expand_k": 1.0}, "fla.layers.gla", "chunk_gla"),
    "delta_rule": ("DeltaNet", {"num_heads": HEADS}, "fla.layers.delta_net", "chunk_delta_rule"),
    "retention": (
        "RetNet", {"num_heads": HEADS, "expand_v": 1.0}, "fla.layers.multiscale_retention", "chunk_retention",
    ),
    "mamba2": (
        "Mamba2", {"head_dim": HEAD, "expand": 1, "state_size": HEAD},
        "fla.layers.mamba2", "mamba_chunk_scan_combined",
    ),
}  # fmt: skip
# How a call is made, beside its tensors.
_HOW = ("safe_gate", "lower_bound", "chunk_size")
_ARGUMENTS = ("q", "r", "k", "v", "a", "b", "w", "x", "B", "C", "A")


@dataclass(frozen=True)
class Trained:
    """A model that was trained."""

    operator: str
    """Of ``MODELS``."""
    model: Any
    """fla's."""
    ids: Tensor
    """A sequence that it is called with, [1, T]."""
    steps: int
    """Of training."""
    loss: float
    """The last of training."""
    monitor: Monitor | None = None
    """What watched it."""

    @classmethod
    def of(cls, operator: str, steps: int, length: int, seed: int = 0, every: int | None = None) -> Trained:
        """Train a model.

        Args:
            operator: Of ``MODELS``.
            steps: Of training.
            length: T, of training and of the sequence.
            seed: Of the weights and of the text's places.
            every: Of so many steps the monitor looks at one; None: none.
        """
        name, options, _, _ = MODELS[operator]
        models: Any = import_module("fla.models")
        torch.manual_seed(seed)
        config = getattr(models, f"{name}Config")(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=256, fuse_cross_entropy=False, **options
        )
        model = getattr(models, f"{name}ForCausalLM")(config).cuda()
        # fla's Mamba-2 in training mode wants a convolution in CUDA; in the other it runs the same scan.
        model.train(operator != "mamba2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        text, make = _text(), torch.Generator().manual_seed(seed)
        loss = torch.zeros(())
        with nullcontext() if every is None else Monitor(model, every) as monitor:
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
                loss = _loss(model, _batch(text, BATCH, length, make))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            if monitor is not None:
                monitor.metrics(wait=True)
        return cls(operator, model, _batch(text, 1, length, make), steps, float(loss.detach()), monitor)

    def as_captured(self) -> LinearCapture:
        """The last layer's own call, by ``capture_linear``."""
        with capture_linear() as calls:
            self.model.zero_grad()
            _loss(self.model, self.ids).backward()  # type: ignore[no-untyped-call]
        if not calls:
            raise InputError(f"no call of {self.operator} was captured: {dict(calls.refused)}")
        return calls[-1]

    def inputs(self) -> tuple[LinearCapture, dict[str, Any]]:
        """What the last layer hands its operator, with dO, and how it has the kernel run."""
        _, _, module, function = MODELS[self.operator]
        calls: list[tuple[dict[str, Any], list[Tensor]]] = []
        space = vars(import_module(module))
        original = space[function]
        signature = inspect.signature(original)

        def met(*args: Any, **kwargs: Any) -> Any:
            result, gradient = original(*args, **kwargs), list[Tensor]()
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            given |= given.pop("kwargs", {})
            o = result[0] if isinstance(result, tuple) else result
            o.register_hook(gradient.append)
            calls.append(({k: v.detach() if isinstance(v, Tensor) else v for k, v in given.items()}, gradient))
            return result

        space[function] = met
        try:
            self.model.zero_grad()
            _loss(self.model, self.ids).backward()  # type: ignore[no-untyped-call]
        finally:
            space[function] = original
        given, gradient = calls[-1]
        capture = LinearCapture.from_tensors(
            self.operator, {**_stated(self.operator, given), "do": gradient[0]}, kernel=function,
            l2norm=bool(given.get("use_qk_l2norm_in_kernel")), scale=given.get("scale"), layer=LAYERS - 1,
            step=self.steps,
        )  # fmt: skip
        return capture, {n: given[n] for n in _HOW if given.get(n) is not None}


def _text() -> Tensor:
    files = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def _batch(text: Tensor, batch: int, length: int, make: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(text) - length, (batch,), generator=make).tolist()
    return torch.stack([text[s : s + length] for s in starts]).cuda()


def _loss(model: Any, ids: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def _stated(operator: str, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The operator's arguments, with the gates that the kernel would make."""
    found = {n: given[n] for n in _ARGUMENTS if isinstance(given.get(n), Tensor)}
    if operator == "mamba2":
        return found | {"dt": functional.softplus(given["dt"].float() + given["dt_bias"].float())}
    g, beta = given.get("g"), given.get("beta")
    if given.get("use_gate_in_kernel"):
        gate, name = ("kda", "naive_kda_gate") if operator == "kda" else ("gated_delta_rule", "naive_gdn_gate")
        g = getattr(import_module(f"fla.ops.{gate}.gate"), name)(g, given["A_log"], given.get("dt_bias"))
    if given.get("use_beta_sigmoid_in_kernel"):
        assert beta is not None
        beta = beta.sigmoid()
    return found | {n: t for n, t in (("g", g), ("beta", beta)) if t is not None}
