"""A small model trained with attention and weights below 16 bits, and what one early capture foretold of it.

Byte-level text (this repository's sources), a GPT of --layers layers. Arms: BF16; attention whose q, k, v and P are
quantised in the forward as the recipes fa3-fp8, mxfp8-attention and nvfp4-attention quantise them (straight-through
gradients; sums are the device's, not FP22); INT4 weights of all linear layers in groups of 32 and of 128. At step
--capture-at of the BF16 arm one layer is captured; ``what_if`` says how far off O and dQ each recipe would be there,
``attribute`` which site is to blame, and ``quant`` the same of INT4's weights. Then two arms with the recipe of the
largest loss: what was blamed there is left whole, and what ``what_if`` says matters least. Every arm of a seed begins
with the same weights and sees the same batches, so that losses are compared seed by seed. Reported whatever comes out.

    for s in 0 1 2; do python benchmarks/study_low_bit_training.py --device cuda --seed $s --json seed$s.json & done
    python benchmarks/study_low_bit_training.py --join seed*.json --json benchmarks/results/low_bit_training_h100.json
    python benchmarks/study_low_bit_training.py --tiny        # on a CPU, whether it runs
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import attn_diag
from attn_diag.kernels import preset

ROOT = Path(__file__).parent.parent
NONE = "none"
# The forward's quantisers by recipe; what is left whole in a repaired arm has none.
SITES = ("quantize_q", "quantize_k", "quantize_v", "probs")


@dataclass(frozen=True)
class Arm:
    """How one run is quantised."""

    name: str
    recipe: str = ""
    """Of the attention; empty: BF16."""
    whole: tuple[str, ...] = ()
    """Sites of it that are left whole."""
    weights: str = ""
    """The linear layers' quantiser; empty: BF16."""
    group: str = "32"


@dataclass
class Run:
    """What became of an arm."""

    arm: str
    steps: int
    losses: list[float] = field(default_factory=list)
    """Mean training loss of every tenth of the run."""
    validation: float = math.nan
    seconds: float = 0.0


def text(limit: int = 4_000_000) -> Tensor:
    """Bytes of this repository's text, uint8 [n]."""
    files = [file for pattern in ("**/*.py", "**/*.md") for file in sorted(ROOT.glob(pattern))]
    parts = [file.read_bytes() for file in files if not _built(file.relative_to(ROOT).parts)]
    return torch.frombuffer(bytearray(b"\n".join(parts)[:limit]), dtype=torch.uint8)


def _built(parts: tuple[str, ...]) -> bool:
    return any(part.startswith(".") or part in ("build", "results") for part in parts)


def quantised_operand(x: Tensor, by: str) -> Tensor:
    """``x`` [..., T, D] as a recipe's text quantises it, straight-through."""
    if by == NONE:
        return x
    name, *parts = by.split()
    changes: dict[str, Any] = dict(part.split("=") for part in parts)
    if "tensor_scale" in changes:
        changes["tensor_scale"] = changes["tensor_scale"] == "true"
    chosen = attn_diag.quantizer(name, **changes)
    if chosen.block == "tensor":  # a scale a head
        flat = attn_diag.fake_quantize(x.flatten(-2)[..., None, :].float(), chosen, block="row")
        return flat.reshape(x.shape).to(x.dtype)
    return attn_diag.fake_quantize(x.float(), chosen).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with quantised operands; its last call can be captured."""

    def __init__(self, width: int, heads: int, arm: Arm) -> None:
        super().__init__()
        self.heads, self.arm = heads, arm
        self.qkv, self.out = linear(width, 3 * width, arm), linear(width, width, arm)
        self.kept: dict[str, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        if self.arm.recipe:
            with torch.autocast(x.device.type, enabled=False):  # it would multiply fp32 in BF16
                o = self.quantised(q, k, v)
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kept is not None:
            kept = self.kept
            o.register_hook(lambda grad: kept.update(do=grad.detach()))  # type: ignore[no-untyped-call]
            kept.update({n: z.detach() for n, z in (("q", q), ("k", k), ("v", v), ("o", o))})
        y: Tensor = self.out(o.transpose(1, 2).reshape(b, t, c))
        return y

    def quantised(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores and softmax in fp32."""
        recipe = preset(self.arm.recipe, "bf16", q.shape[-1])

        def by(site: str) -> str:
            return NONE if site in self.arm.whole else getattr(recipe, site)

        if recipe.smooth_k != "none":
            k = k - k.mean(-2, keepdim=True)
        q, k, v = (quantised_operand(x, by(f"quantize_{n}")) for n, x in (("q", q), ("k", k), ("v", v)))
        scores = (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
        total = weights.sum(-1, keepdim=True)
        if "probs" not in self.arm.whole:
            scaled = weights * recipe.probs_scale
            if recipe.quantize_probs != NONE:
                scaled = quantised_operand(scaled, recipe.quantize_probs)
            elif recipe.probs.startswith("e"):
                rounded = attn_diag.round_to(scaled.detach(), recipe.probs)
                scaled = scaled + (rounded - scaled).detach()
            weights = scaled / recipe.probs_scale
        return (weights @ v.float() / total).to(q.dtype)


class QuantisedLinear(nn.Linear):
    """INT4 weights in the forward, straight-through gradients."""

    def __init__(self, inputs: int, outputs: int, by: Any) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, attn_diag.fake_quantize(self.weight, self.by))


def linear(inputs: int, outputs: int, arm: Arm) -> nn.Linear:
    if not arm.weights:
        return nn.Linear(inputs, outputs, bias=False)
    return QuantisedLinear(inputs, outputs, attn_diag.quantizer(arm.weights, block=arm.group))


class Block(nn.Module):
    """Attention and a feed-forward."""

    def __init__(self, width: int, heads: int, arm: Arm) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads, arm)
        self.up, self.down = linear(width, 4 * width, arm), linear(4 * width, width, arm)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return y


class Model(nn.Module):
    """Bytes to bytes."""

    def __init__(self, width: int, heads: int, layers: int, length: int, arm: Arm) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, arm) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def train(arm: Arm, data: Tensor, options: Any, said: Callable[[Model, dict[str, Tensor]], None] | None) -> Run:
    """One arm; ``said`` is given the model and a layer's call at the step of the capture."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    model = Model(options.width, options.heads, options.layers, options.length, arm).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0)
    draw = torch.Generator().manual_seed(options.seed)
    split = int(0.95 * len(data))
    run, started, recent = Run(arm.name, 0), time.monotonic(), []

    def batch(low: int, high: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(low, high - options.length - 1, (options.batch,), generator=draw)
        rows = torch.stack([data[s : s + options.length + 1] for s in starts.tolist()]).long().to(device)
        return rows[:, :-1], rows[:, 1:]

    def loss_of(rows: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(model(rows[0]).flatten(0, 1).float(), rows[1].flatten())

    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / max(1, options.steps // 10))
        watched: Any = model.blocks[len(model.blocks) // 2].attention
        look = said is not None and step == options.capture_at
        if look:
            watched.kept = {}
        loss = loss_of(batch(0, split))
        torch.autograd.backward(loss)
        if look:
            assert said is not None
            said(model, watched.kept)
            watched.kept = None
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        run.steps = step + 1
        if len(recent) == max(1, options.steps // 10):
            run.losses.append(float(torch.stack(recent).mean()))
            recent = []
        if time.monotonic() - started > options.seconds:
            break
    with torch.no_grad():
        held_out = [float(loss_of(batch(split, len(data)))) for _ in range(8)]
    run.validation, run.seconds = sum(held_out) / len(held_out), time.monotonic() - started
    return run


def foresee(call: dict[str, Tensor], weight: Tensor, recipes: Iterable[str]) -> dict[str, Any]:
    """What the tool says of one layer's call under each recipe, and of INT4's weights."""
    tensors = {n: x[:1, :1].bfloat16().cpu().contiguous() for n, x in call.items()}
    capture = attn_diag.Capture.from_tensors(tensors, causal="top-left")
    found: dict[str, Any] = {}
    for recipe in recipes:
        tried = attn_diag.what_if(capture, recipe=recipe, seeds=0, betas=(), only=["whole-*"])
        (head,) = attn_diag.attribute(capture, recipe=recipe).heads
        found[recipe] = {
            "o": tried.baseline.errors.o,
            "dq": tried.baseline.errors.dq,
            "guilty": dict(head.guilty),
            "left": {c.name: c.errors.o for c in tried.candidates if c.name.startswith("whole-")},
            "underflow": [asdict(u) for u in tried.underflow],
        }
    for group in ("32", "128"):
        said = attn_diag.quant(weight.detach().float().cpu(), attn_diag.quantizer("int4", block=group))
        found[f"int4 {group}"] = {"error": said.error, "away": said.away.mean, "parts": [asdict(p) for p in said.parts]}
    return found


# What ``attribute`` and ``what_if`` call the sites.
_SITES = {"quantize_probs": "probs", "whole-probs": "probs"} | {f"whole-{n}": f"quantize_{n}" for n in "qkv"}


def repaired(worst: Arm, foreseen: dict[str, Any]) -> list[Arm]:
    """What is blamed for O's error under its recipe is left whole; and what leaves most of the error, if whole."""
    found = foreseen[worst.recipe]
    least = max(found["left"], key=found["left"].__getitem__)
    chosen = {"blamed": found["guilty"].get("o", ""), "least": least}
    sites = {why: _SITES.get(name, name) for why, name in chosen.items()}
    return [Arm(f"{worst.name}, {why}: {s} whole", worst.recipe, (s,)) for why, s in sites.items() if s in SITES]


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several seeds: each arm's losses less those of BF16 of the same seed, mean and standard error."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for one in results:
        plain = one["runs"][0]
        for run in one["runs"][1:]:
            if run["steps"] == plain["steps"]:
                more = run["validation"] - plain["validation"], run["losses"][-1] - plain["losses"][-1]
                # Which site was blamed may differ by seed.
                name = run["arm"].split(":")[0]
                rows.setdefault(name, []).append(more)
    table = []
    for name, found in rows.items():
        spread = [statistics.stdev(x) / len(x) ** 0.5 if len(x) > 1 else math.nan for x in zip(*found, strict=True)]
        means = [statistics.fmean(x) for x in zip(*found, strict=True)]
        table.append({"arm": name, "seeds": len(found), "validation": means[0], "validation_error": spread[0],
                      "training": means[1], "training_error": spread[1]})  # fmt: skip
    return {"beside BF16": table, "seeds": results}


def main() -> None:
    parser = options_of(__doc__, device="cpu")
    for name, default in (
        ("width", 384), ("heads", 6), ("layers", 6), ("length", 256), ("batch", 32), ("steps", 600),
        ("capture-at", 100), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, default=55.0, help="of an arm, at most")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="results of several seeds")
    options = parser.parse_args()
    if options.join:
        found = joined([json.loads(file.read_text()) for file in options.join])
        for row in found["beside BF16"]:
            print(row)
        save(found, options.json)
        return
    if options.tiny:
        options.width, options.heads, options.layers, options.length, options.batch = 64, 2, 2, 64, 4
        options.steps, options.capture_at = 20, 10
    data = text()
    arms = [Arm(r, recipe=r) for r in ("fa3-fp8", "mxfp8-attention", "nvfp4-attention")]
    foreseen: dict[str, Any] = {}

    def said(model: Model, call: dict[str, Tensor]) -> None:
        first: Any = model.blocks[0]
        foreseen.update(foresee(call, first.up.weight, [arm.recipe for arm in arms]))

    runs = [train(Arm("bf16"), data, options, said)]
    print(runs[0])
    for name, told in foreseen.items():
        print(f"  one head at step {options.capture_at}, {name}: {told}")
    weights = [Arm(f"INT4 weights, groups of {g}", weights="int4", group=g) for g in ("32", "128")]
    for arm in (*arms, *weights):
        runs.append(train(arm, data, options, None))
        print(runs[-1])
    worst = max(arms, key=lambda arm: next(r.validation for r in runs if r.arm == arm.name))
    for arm in repaired(worst, foreseen):
        runs.append(train(arm, data, options, None))
        print(runs[-1])
    result = {"options": {k: v for k, v in vars(options).items() if k not in ("json", "join")}, "foreseen": foreseen}
    save(made_by(options.device) | result | {"runs": [asdict(run) for run in runs]}, options.json)


if __name__ == "__main__":
    main()
