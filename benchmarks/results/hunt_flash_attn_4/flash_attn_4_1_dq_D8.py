"""flash_attn_4 4.0.0b36: dQ is wrong at head sizes 8, 16, 40, 48, 72, 80, 104, 112; smallest case: 1 head, T=65, D=8

Found by attn-diag hunt. Needs torch, safetensors and the kernel; exits with 1 where it is wrong.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

SCALE, CAUSAL, SOFTCAP, WINDOW = 0.3535533905932738, 'none', None, None
WRONG = {'dq': 'wrong'}
DEVICE = 'cuda'


def hidden(rows, keys, device):
    """[Tq, Tk], which keys a row must not see."""
    row = torch.arange(rows, device=device)[:, None] + (keys - rows if CAUSAL == "bottom-right" else 0)
    key = torch.arange(keys, device=device)[None]
    found = (key > row) if CAUSAL != "none" else torch.zeros(rows, keys, dtype=torch.bool, device=device)
    if WINDOW is not None:
        left, right = WINDOW
        found = found | ((key < row - left) if left >= 0 else False) | ((key > row + right) if right >= 0 else False)
    return found


from flash_attn.cute import flash_attn_func


def kernel(q, k, v):
    found = flash_attn_func(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=SCALE, causal=CAUSAL != "none"
    )
    return (found[0] if isinstance(found, (tuple, list)) else found).transpose(1, 2)


def exact(q, k, v, do):
    """O, dQ, dK and dV in float64."""
    q, k, v = (x.detach().double().contiguous().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * SCALE
    if SOFTCAP is not None:
        scores = SOFTCAP * (scores / SOFTCAP).tanh()
    unseen = hidden(q.shape[2], k.shape[2], q.device)
    empty = unseen.all(1)[:, None]
    probs = scores.masked_fill(unseen & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0)
    o = probs @ v.repeat_interleave(group, 1)
    return dict(zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, (q, k, v), do.double()))))


here = Path(__file__).resolve().parent
given = load_file(here / 'flash_attn_4_1_dq_D8.safetensors')
q, k, v, do = (given[name].to(DEVICE) for name in ("q", "k", "v", "do"))
true = {name: x.detach() for name, x in exact(q, k, v, do).items()}

q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
o = kernel(q, k, v)
# Kernels think differently of rows that see no key.
empty = hidden(q.shape[2], k.shape[2], q.device).all(1)[:, None]
found = {"o": o.detach().masked_fill(empty, 0)}
if o.requires_grad:
    found |= zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do.to(o.dtype)))
bad = []
print(f"q {list(q.shape)}, k {list(k.shape)}, {q.dtype}, causal {CAUSAL}, torch {torch.__version__}")
for name, value in found.items():
    error = float((value.double() - true[name]).norm() / true[name].norm().clamp(min=1e-300))
    finite = bool(value.isfinite().all())
    # One rounding of the inputs' format, to all numbers and one way, would leave this.
    rounding = torch.finfo(q.dtype).eps / 2
    odd = not finite or error > 4 * rounding
    note = "NaN or Inf" if not finite else f"{error:.3g} off ({error / rounding:.3g} times one rounding)"
    seen_before = WRONG.get(name)
    print(f"{name}: {note}" + (f" <- {seen_before}" if seen_before else ""))
    if seen_before and odd:
        bad.append(name)
print("wrong: " + ", ".join(bad) if bad else "nothing is wrong here")
sys.exit(1 if bad else 0)
