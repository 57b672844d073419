"""The bug report's script: plain torch and safetensors, and the kernel; it runs without attn_diag."""

from __future__ import annotations

import math
from pathlib import Path

from attn_diag.kernels import PRESETS
from attn_diag.results.hunt import HuntFinding
from attn_diag.testing.hunting.layouts import parse
from attn_diag.testing.libraries import SDPA

_SDPA = """from torch.nn.attention import SDPBackend, sdpa_kernel


def kernel(q, k, v):
    mask = None if CAUSAL == "none" else ~hidden(q.shape[2], k.shape[2], q.device)
    plain = CAUSAL != "none" and (CAUSAL == "top-left" or q.shape[2] == k.shape[2])
    with sdpa_kernel([{backends}]):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if plain else mask, is_causal=plain, scale=SCALE,
            enable_gqa=q.shape[1] != k.shape[1],
        )
"""
_FLEX = """from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def kernel(q, k, v):
    blocks = None
    if CAUSAL != "none":
        shift = k.shape[2] - q.shape[2] if CAUSAL == "bottom-right" else 0
        blocks = create_block_mask(
            lambda b, h, row, key: key <= row + shift, None, None, q.shape[2], k.shape[2], device=q.device
        )
    run = {run}
    return run(q, k, v, block_mask=blocks, scale=SCALE, enable_gqa=q.shape[1] != k.shape[1])
"""
_FLASH = """from {module} import flash_attn_func


def kernel(q, k, v):
    found = flash_attn_func(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=SCALE, causal=CAUSAL != "none"
    )
    return (found[0] if isinstance(found, (tuple, list)) else found).transpose(1, 2)
"""
_SAGE = """from sageattention import sageattn


def kernel(q, k, v):
    return sageattn(q, k, v, tensor_layout="HND", is_causal=CAUSAL != "none", sm_scale=SCALE)
"""
_XFORMERS = """from xformers.ops import fmha


def kernel(q, k, v):
    masks = {
        "none": lambda: None,
        "top-left": fmha.attn_bias.LowerTriangularMask,
        "bottom-right": fmha.attn_bias.LowerTriangularFromBottomRightMask,
    }
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return fmha.memory_efficient_attention(q, k, v, attn_bias=masks[CAUSAL](), scale=SCALE).transpose(1, 2)
"""
_FLA = """from fla.ops.attn import parallel_attn


def kernel(q, k, v):
    found = parallel_attn(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), scale=SCALE)
    return (found[0] if isinstance(found, (tuple, list)) else found).transpose(1, 2)
"""
_OWN = """import sys
from inspect import signature

sys.path.insert(0, {folder!r})
from {module} import {function}


def kernel(q, k, v):
    slopes = None if SLOPES is None else SLOPES.to(q.device)
    if slopes is not None and slopes.ndim == 2 and bool((slopes == slopes[:1]).all()):
        slopes = slopes[0]
    told = {{"dropout_mask": KEPT, "dropout_p": P or 0.0, "sinks": SINKS, "alibi_slopes": slopes}}
    takes = signature(getattr({function}, "forward", {function})).parameters
    known = [n for n in told if n in takes and (told[n] is not None or takes[n].default in (None, takes[n].empty))]
    found = {function}(q, k, v, **{{name: told[name] for name in known}})
    return found[0] if isinstance(found, (tuple, list)) else found
"""
# A recipe, or a library whose interface takes more than a call: through attn_diag.
_OURS = """from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import Target


def kernel(q, k, v):
    case = CaseInputs(
        "repro", q, k, v, None, SCALE, CAUSAL, None, WINDOW, SOFTCAP, alibi_slopes=SLOPES, alibi_origin=ORIGIN,
        dropout_mask=KEPT, dropout_p=P, sinks=SINKS,
    )
    target = Target.of({name!r}, dtype=q.dtype, head_dim=q.shape[3], device=q.device)
    if target.fn is None:
        raise SystemExit("a recipe is emulated, not called: attn-diag inspect shows it")
    found = target.fn(q, k, v, case)
    return found[0] if isinstance(found, (tuple, list)) else found
"""
LYING = {
    "transposed": "x.transpose(1, 2).contiguous().transpose(1, 2)",
    "heads first": "x.transpose(0, 1).contiguous().transpose(0, 1)",
    "packed": "torch.stack([torch.zeros_like(x), x, torch.zeros_like(x)]).permute(1, 3, 0, 2, 4).contiguous()[:, :, 1]"
    ".transpose(1, 2)",
    "shared key head": "x[:, :1].contiguous().expand(x.shape)",
    "one dO row": "x[:, :, :1].contiguous().expand(x.shape)",
    "sliced features": "torch.cat([x, torch.full_like(x[..., :1].expand(*x.shape[:3], 8), float('nan'))], 3)"
    "[..., : x.shape[3]]",
    "every second row": "torch.stack([x, torch.full_like(x, float('nan'))], 3).flatten(2, 3)[:, :, ::2]",
    "off alignment": "torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)",
}
_SCRIPT = '''"""{summary}

{how}
"""

import sys
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

SCALE, CAUSAL, SOFTCAP, WINDOW = {scale!r}, {causal!r}, {softcap!r}, {window!r}
WRONG = {outputs!r}
# How far off that was; of a kernel below 16 bits alone a sound one may be off by more than four roundings.
SEEN, BELOW_16_BITS = {seen!r}, {declared!r}
DEVICE = {device!r}


def hidden(rows, keys, device):
    """[Tq, Tk], which keys a row must not see."""
    row = torch.arange(rows, device=device)[:, None] + (0 if CAUSAL == "top-left" else keys - rows)
    key = torch.arange(keys, device=device)[None]
    found = (key > row) if CAUSAL != "none" else torch.zeros(rows, keys, dtype=torch.bool, device=device)
    if WINDOW is not None:
        left, right = WINDOW
        found = found | ((key < row - left) if left >= 0 else False) | ((key > row + right) if right >= 0 else False)
    return found


here = Path(__file__).resolve().parent
given = load_file(here / {capture!r})
# ALiBi's, if there are any: they multiply what is counted from the row, or from the first or last key.
SLOPES, ORIGIN = given.get("alibi_slopes"), {origin!r}
# Which probabilities a dropout keeps, if there is one, and how many are dropped in the mean.
KEPT, P = given.get("dropout_mask"), {dropout_p!r}
KEPT = None if KEPT is None else KEPT.to(DEVICE)
# The logits of attention sinks, if there are any: one more key of each head, of value 0.
SINKS = given["sinks"].to(DEVICE) if "sinks" in given else None


def distances(rows, keys, device):
    """[Tq, Tk], what ALiBi's slopes are multiplied by."""
    row = torch.arange(rows, device=device)[:, None] + (0 if CAUSAL == "top-left" else keys - rows)
    key = torch.arange(keys, device=device)[None]
    return {{"row": -(key - row).abs(), "first-key": key, "last-key": key - (keys - 1)}}[ORIGIN].double()


{kernel}

def exact(q, k, v, do):
    """O, dQ, dK and dV in float64."""
    q, k, v = (x.detach().double().contiguous().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * SCALE
    if SOFTCAP is not None:
        scores = SOFTCAP * (scores / SOFTCAP).tanh()
    if SLOPES is not None:
        scores = scores + SLOPES.to(q.device).double()[..., None, None] * distances(q.shape[2], k.shape[2], q.device)
    unseen = hidden(q.shape[2], k.shape[2], q.device)
    empty = unseen.all(1)[:, None]
    scores, leaves = scores.masked_fill(unseen & ~empty, -torch.inf), {{"dq": q, "dk": k, "dv": v}}
    if SINKS is not None:
        leaves["dsinks"] = SINKS.detach().double().requires_grad_()
        scores = torch.cat([scores, leaves["dsinks"][:, None, None].expand(*scores.shape[:3], 1)], -1)
    probs = scores.softmax(-1)[..., : k.shape[2]].masked_fill(empty, 0)
    if KEPT is not None:
        probs = probs * KEPT / (1 - P)
    o = probs @ v.repeat_interleave(group, 1)
    return {{"o": o, **dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), do.double())))}}


q, k, v, do = (given[name].to(DEVICE) for name in ("q", "k", "v", "do"))
true = {{name: x.detach() for name, x in exact(q, k, v, do).items()}}
{strides}
q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
leaves = {{"dq": q, "dk": k, "dv": v}} | ({{}} if SINKS is None else {{"dsinks": SINKS.requires_grad_()}})
o = kernel(q, k, v)
# Kernels think differently of rows that see no key.
empty = hidden(q.shape[2], k.shape[2], q.device).all(1)[:, None]
found = {{"o": o.detach().masked_fill(empty, 0)}}
if o.requires_grad:
    gradients = torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype), allow_unused=True)
    found |= {{name: x for name, x in zip(leaves, gradients) if x is not None}}
bad = []
print(f"q {{list(q.shape)}}, k {{list(k.shape)}}, {{q.dtype}}, causal {{CAUSAL}}, torch {{torch.__version__}}")
for name, value in found.items():
    error = float((value.double() - true[name]).norm() / true[name].norm().clamp(min=1e-300))
    finite = bool(value.isfinite().all())
    # One rounding of the inputs' format, to all numbers and one way, would leave this.
    rounding = torch.finfo(q.dtype).eps / 2
    least = 0.99 * SEEN[name] if name in SEEN else 4 * rounding
    odd = not finite or error > (least if BELOW_16_BITS else min(least, 4 * rounding))
    note = "NaN or Inf" if not finite else f"{{error:.3g}} off ({{error / rounding:.3g}} times one rounding)"
    seen_before = WRONG.get(name)
    print(f"{{name}}: {{note}}" + (f" <- {{seen_before}}" if seen_before else ""))
    if seen_before and odd:
        bad.append(name)
print("wrong: " + ", ".join(bad) if bad else "nothing is wrong here")
sys.exit(1 if bad else 0)
'''


def kernel_source(name: str, folder: Path, *, options: bool) -> str:
    """Python that defines kernel(q, k, v), [B, H, T, D]; from CAUSAL and SCALE, without ``options``."""
    backend = name.partition(":")[2]
    if name in PRESETS or options:
        own = ":" in name and name.partition(":")[0] not in ("sdpa", "flex_attention")
        if not own:
            return _OURS.format(name=name)
    if name == "sdpa" or (name.startswith("sdpa:") and backend in SDPA):
        chosen = [SDPA[backend]] if backend else list(SDPA.values())
        return _SDPA.format(backends=", ".join(f"SDPBackend.{x}" for x in chosen))
    if name.startswith("flex_attention"):
        return _FLEX.format(run="torch.compile(flex_attention, dynamic=False)" if backend else "flex_attention")
    modules = {
        "flash_attn_2": "flash_attn",
        "flash_attn_3": "flash_attn_interface",
        "flash_attn_4": "flash_attn.cute",
    }
    if name in modules:
        return _FLASH.format(module=modules[name])
    others = {"sageattention": _SAGE, "xformers": _XFORMERS, "flash-linear-attention": _FLA}
    if name in others:
        return others[name]
    if ":" in name:
        module, _, function = name.partition(":")
        return _OWN.format(folder=str(folder), module=module, function=function)
    return _OURS.format(name=name)


def script(
    name: str, version: str | None, finding: HuntFinding, *, capture: str, folder: Path, scale: float, device: str,
    window: tuple[int, int] | None = None, softcap: float | None = None, alibi_origin: str | None = None,
    dropout_p: float | None = None, declared: bool = False,
) -> str:  # fmt: skip
    """The script's text.

    Args:
        name: The kernel, as it was asked for.
        version: Its version.
        finding: What it shows.
        capture: The capture's file name, in the script's own folder.
        folder: Where a user's module is imported from.
        scale: alpha of the case.
        device: cpu or cuda.
        window, softcap: Of the case.
        alibi_origin: Likewise; None where there are no slopes.
        dropout_p: Likewise; None where there is no dropout.
        declared: Whether the kernel is declared to be one below 16 bits, whose error says nothing by its size.
    """
    layout, tensors = parse(finding.smallest.layout)
    lying = LYING.get(layout)
    names = f"{', '.join(tensors)},"
    strides = "" if lying is None else f"{names} = ({lying} for x in ({names}))"
    options = any(x is not None for x in (window, softcap, alibi_origin, dropout_p))
    source = kernel_source(name, folder, options=options)
    needs = "torch, safetensors and attn-diag" if "attn_diag" in source else "torch, safetensors and the kernel"
    said = f"{name}{f' {version}' if version else ''}: {finding.words}"
    return _SCRIPT.format(
        summary=_quoted(said), how=f"Found by attn-diag hunt. Needs {needs}; exits with 1 where it is wrong.",
        scale=scale, causal=finding.smallest.causal, softcap=softcap, window=window,
        outputs=dict(finding.outputs), device=device, kernel=source, capture=capture,
        strides=strides, origin=alibi_origin or "row", dropout_p=dropout_p,
        seen={n: e for n, e in finding.relative_errors.items() if math.isfinite(e)}, declared=declared,
    )  # fmt: skip


def _quoted(text: str) -> str:
    """As it can stand in a docstring."""
    return text.encode("unicode_escape").decode().replace('"""', "'''")
