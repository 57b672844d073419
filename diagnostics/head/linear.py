"""Linear attention's capture through the float64 reference, and through emulated chunked kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.linear import LinearCapture
from attn_diag.kernels.linear_chunked import run_linear_call
from attn_diag.kernels.linear_heads import LinearHeads
from attn_diag.kernels.linear_products import rounded_to
from attn_diag.kernels.linear_recipe import RELEASED, LinearFormat, LinearRecipe
from attn_diag.reference import format_of
from attn_diag.reference.linear import OF_HEADS, LinearReference, linear_reference

_FORMATS: dict[torch.dtype, LinearFormat] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Chunks that are tried where a kernel's own is not known.
CHUNKS = (16, 32, 64, 128)
# Outputs that are states, [N, H, K, V].
STATES = ("final_state", "dinitial_state")
Place = tuple[Any, ...]


@dataclass(frozen=True)
class LinearRun:
    """A capture's inputs on one device, its reference, and kernels emulated on them."""

    capture: LinearCapture
    """The capture."""
    device: torch.device
    """Where the reference and the emulations run."""

    @property
    def format(self) -> LinearFormat | None:
        """That of q, k and v where kernels have a published way to round; None: fp32, fp64 or FP8."""
        return _FORMATS.get(self.capture.tensors["q"].dtype)

    @property
    def unit(self) -> float:
        """The unit roundoff of the inputs' format."""
        return float(2.0 ** -format_of(self.capture.tensors["q"].dtype).precision)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Those of the yardstick; decays of every channel are too much work, and not published, in chunks of 128."""
        g = self.capture.tensors.get("g")
        return CHUNKS if g is None or g.ndim == 3 else CHUNKS[:-1]

    @property
    def recipe(self) -> LinearRecipe:
        """The well-rounded kernel's."""
        fmt = self.format or "fp32"
        out = _FORMATS.get(self.capture.tensors["v"].dtype, "fp32")
        return LinearRecipe(operands=fmt, out=out)

    def _moved(self, name: str) -> Tensor | None:
        tensor = self.capture.tensors.get(name)
        return None if tensor is None else tensor.to(self.device)

    @cached_property
    def reference(self) -> LinearReference:
        """What is true."""
        call = self.capture.call
        call = replace(call, tensors={name: t.to(self.device) for name, t in call.tensors.items()})
        return linear_reference(call, self._moved("do"), self._moved("dfinal_state"))

    def place(self, name: str, head: int) -> Place | None:
        """Where a head (of v's) is in a quantity's tensor; None where another head of its group has it."""
        if name in STATES:
            return slice(None), head
        if name[1:] in OF_HEADS:
            return (slice(head, head + 1),)
        tensors = self.capture.tensors
        like, count = tensors["v" if name == "o" else name[1:]], tensors["v"].shape[2]
        if like.shape[2] == count:
            return slice(None), slice(None), head
        group = count // tensors["q"].shape[2]
        return None if head % group else (slice(None), slice(None), head // group)

    @property
    def has_gradients(self) -> bool:
        """Whether the capture has what the backward starts from."""
        return "do" in self.capture.tensors or "dfinal_state" in self.capture.tensors

    @property
    def traits(self) -> frozenset[str]:
        """What a fault may need: tensors by name, and what ``LinearFaultKind.needs`` has besides."""
        capture, tensors = self.capture, self.capture.tensors
        (_, _, few, keys), (_, _, heads, values) = tensors["q"].shape, tensors["v"].shape
        own = {"g", "dt"} & {*tensors}
        true = {
            "decay": bool(own) or "g_gamma" in tensors or capture.operator == "retention",
            "decay_gradient": bool(own),
            "channels": "g" in tensors and tensors["g"].ndim == 4,
            "heads": heads > 1,
            "shared": few < heads,
            "square": keys == values,
            "sequences": len(capture.call.sequences) > 1,
            "lengths": capture.l2norm,
            "plain": not {"beta", "a"} & {*tensors},
            "free": "a" in tensors,
            "scale": capture.call.used_scale != 1,
        }
        return frozenset(tensors) | {name for name, there in true.items() if there}

    def has_site(self, site: str) -> bool:
        """Whether a kernel of the operator has the rounding site."""
        tensors = self.capture.tensors
        by_channel = "g" in tensors and tensors["g"].ndim == 4
        if site in ("score_gradients", "decay_sums", "decay_terms"):
            return ("g" in tensors or "dt" in tensors) and not (by_channel and site == "score_gradients")
        if site in ("parts", "new_values", "joined"):
            return "beta" in tensors or "a" in tensors
        if site in ("applied", "closing"):
            return "a" in tensors and (by_channel or site == "applied")
        if site in ("log_steps", "beta_keys"):
            return "g" in tensors and (site == "log_steps" or "beta" in tensors)
        if site in ("stepped", "score_weights"):
            return site == "score_weights" or "dt" in tensors
        if site in ("decayed", "state_gradient"):
            return not by_channel
        if site == "shared_scores":
            return not by_channel and tensors["q"].shape[2] < tensors["v"].shape[2]
        if site == "score_operands":
            return by_channel
        if "decay" in site:
            return any(name in tensors for name in ("g", "g_gamma", "dt")) or self.capture.operator == "retention"
        if site in ("inverse", "solved"):
            return "beta" in tensors or "a" in tensors
        if site == "elementwise":
            return by_channel
        return site != "normalizer" or self.capture.normalize

    def released(self) -> list[dict[str, LinearFormat]]:
        """What the operator's released kernels round otherwise than a well-rounded one, kernel by kernel."""
        sets = RELEASED.get(self.capture.operator, ())
        fmt = self.format or "fp32"
        return [{site: to or fmt for site, to in known.items() if self.has_site(site)} for known in sets]

    def emulated(self, recipe: LinearRecipe, fault: str | None = None, *, forward: bool = False) -> dict[str, Tensor]:
        """What a kernel returns for all sequences, by output, in the operator's layout; float64.

        Args:
            recipe: What it rounds.
            fault: What it gets wrong besides. Without states where sequences run on.
            forward: Leave the gradients out.
        """
        capture = self.capture
        do, dfinal = (None if forward else self._moved(name) for name in ("do", "dfinal_state"))
        call = capture.call
        inputs = {name: t.to(self.device).float() for name, t in capture.inputs.items()}
        another = fault == "initial_state_of_another"
        if another:
            inputs["initial_state"] = inputs["initial_state"].roll(1, 0)
        dfinal = None if fault == "no_last_gradient" else dfinal
        sequences = call.sequences
        if fault == "sequences_run_on":
            sequences, dfinal = [(0, slice(0, sequences[-1][1].stop))], None if dfinal is None else dfinal[-1:]
        elif fault in ("sequences_end_late", "sequences_end_early"):
            sequences = _moved(sequences, 1 if fault == "sequences_end_late" else -1)
        parts: list[tuple[int, slice, dict[str, Tensor]]] = []
        for n, (b, steps) in enumerate(sequences):
            own = {
                name: t if name in OF_HEADS else t[n] if name == "initial_state" else t[b, steps]
                for name, t in inputs.items()
            }
            found = run_linear_call(
                own, partial(self._prepared, fault=fault), recipe, fault=fault,
                do=None if do is None else do[b, steps].transpose(0, 1).float(),
                dfinal=None if dfinal is None else dfinal[n].float(),
            )  # fmt: skip
            parts.append((b, steps, found | {"o": found["o"].transpose(0, 1)}))
        made = self._joined(parts, recipe)
        if another and "dinitial_state" in made:
            made["dinitial_state"] = made["dinitial_state"].roll(-1, 0)
        # Of sequences that are one there is one state.
        return made if len(parts) == len(call.sequences) else {n: x for n, x in made.items() if n not in STATES}

    def _joined(self, parts: list[tuple[int, slice, dict[str, Tensor]]], recipe: LinearRecipe) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        tensors = self.capture.tensors
        for name in parts[0][2]:
            each = [part[name].double() for _, _, part in parts]
            if name in ("final_state", "dinitial_state"):
                found[name] = torch.stack(each)
            elif name[1:] in OF_HEADS:
                found[name] = torch.stack(each).sum(0)
            else:
                like = tensors["v" if name == "o" else name[1:]]
                whole = each[0].new_zeros(like.shape)
                for (b, steps, _), part in zip(parts, each, strict=True):
                    whole[b, steps] = part
                last = recipe.out if name == "o" else recipe.gradients
                fmt = last or _FORMATS.get(like.dtype, "fp32")
                found[name] = rounded_to(whole.float(), fmt).double()
        return found

    def _prepared(self, given: dict[str, Tensor], fault: str | None = None) -> LinearHeads:
        """One sequence's arguments, [T, H, D], as the kernel takes them, or one with a fault."""
        capture, v = self.capture, given["v"]
        heads = v.shape[1]

        def of(name: str) -> Tensor | None:
            if name not in given:
                return None
            x = given[name]
            x = x if x.ndim == 3 else x[..., None]
            group = heads // x.shape[1]
            spread = x.repeat(1, group, 1) if fault == "heads_in_turns" else x.repeat_interleave(group, 1)
            return spread.transpose(0, 1)

        q, k = of("q"), of("k")
        assert q is not None
        assert k is not None
        if capture.l2norm and fault != "not_normalized":
            # fla normalises in a kernel of its own, which returns its inputs' format.
            q, k = (
                x if fault == f"{name}_not_normalized" else x * _inverse_length(x, fault)
                for name, x in (("q", q), ("k", k))
            )
            fmt = self.format or "fp32"
            q, k = (x + (rounded_to(x.detach(), fmt) - x.detach()) for x in (q, k))
        values, g, steps = v.transpose(0, 1), of("g"), None
        skip = values * given["D"][:, None, None] if "D" in given else None
        if "dt" in given:
            steps = of("dt")
            assert steps is not None
            g = steps * given["A"][:, None, None]
        elif "g_gamma" in given:
            g = given["g_gamma"][:, None, None].expand(heads, len(v), 1)
        elif capture.operator == "retention":
            number = torch.arange(heads, device=v.device, dtype=torch.float32)
            g = torch.log1p(-torch.exp2(-5 - number))[:, None, None].expand(heads, len(v), 1)
        initial = given.get("initial_state")
        if initial is None:
            initial = v.new_zeros(heads, q.shape[2], v.shape[2])
        scale = capture.call.used_scale
        beta, a, b = of("beta"), of("a"), of("b")
        sharing = heads // given["q"].shape[1]
        return LinearHeads(
            q, k, values, g, beta, a, b, initial, scale, capture.normalize, skip, capture.l2norm, steps, sharing
        )


def recipe_name(recipe: LinearRecipe, run: LinearRun) -> str:
    """Text that ``--recipe`` reads: the chunk, and what differs from a well-rounded kernel's."""
    own = run.recipe
    changed = [f.name for f in fields(LinearRecipe) if getattr(recipe, f.name) != getattr(own, f.name)]
    return ",".join([f"chunk={recipe.chunk}", *(f"{n}={getattr(recipe, n)}" for n in changed if n != "chunk")])


def _inverse_length(x: Tensor, fault: str | None) -> Tensor:
    """1 over the length of every row of [heads, T, K], or what a fault takes for it."""
    squares = x.square()
    if fault == "normalized_over_heads":
        found = squares.sum(0, keepdim=True)
    else:
        found = squares.mean(2, keepdim=True) if fault == "normalized_in_mean" else squares.sum(2, keepdim=True)
    inverse = torch.rsqrt(found + 1e-6)
    return inverse.detach() if fault == "no_norm_gradient" else inverse


def _moved(sequences: list[tuple[int, slice]], by: int) -> list[tuple[int, slice]]:
    """Packed sequences whose borders are ``by`` steps later."""
    ends = [0, *(s.stop + by for _, s in sequences[:-1]), sequences[-1][1].stop]
    return [(0, slice(max(i, 0), max(i, j, 0))) for i, j in pairwise(ends)]
