"""What a watch costs the host for each attention call: a part of ``bench_live``, on tiny tensors, for CPU and GPU.

A stack of layers (a projection, SDPA, a sum) runs forward and backward; a call is one layer's share of that. Between
projection and SDPA is nothing, RoPE, or a norm and RoPE.

- idle: nothing is installed.
- floor: functions that only pass on and back stand where a capture's do: in front of SDPA, the fused operator, its
  backward and, where the model is compiled, matrix products.
- not looked at: a capture is installed that wants another step.
- listening: it looks at this step, and wants another layer.
- told: it wants the call; a listener is told of all tensors, and keeps none.
- wanted: it captures the call into a ring in memory; above that of a run that clones the same tensors in the loop,
  and of one that does so on the floor.

What was recorded of calls is read at the end of the step: that is measured apart, as the optimizer's ``step()`` and
what hangs on it, for each call of the step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import attn_diag
from attn_diag.watching.live.call import AttentionCall, CallPlace
from attn_diag.watching.live.kernels import OPERATORS
from attn_diag.watching.live.operators import SCALED_DOT_PRODUCT, Kernels
from attn_diag.watching.live.products import PRODUCTS
from attn_diag.watching.live.watch import Watch

LAYERS, HEADS, WIDTH, LENGTH = 8, 4, 64, 32
# A capture holds these of each call: cloned, they are what it must cost.
_HELD = {"q": HEADS, "k": HEADS, "v": HEADS, "o": HEADS, "do": HEADS, "dq": HEADS, "dk": HEADS, "dv": HEADS}


class Attention(nn.Module):
    """One layer: q is what its projection makes, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def between(self, t: Tensor) -> Tensor:
        """What q and k go through between projection and attention."""
        return t

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = self.between(q), self.between(k)
        return x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class RotatedAttention(Attention):
    """With RoPE, as in Llama."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        d = WIDTH // HEADS
        angles = torch.arange(LENGTH)[:, None] * 1e4 ** (-torch.arange(0, d, 2) / d)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def between(self, t: Tensor) -> Tensor:
        one, other = t.chunk(2, -1)
        return t * self.cos + torch.cat((-other, one), -1) * self.sin


class NormedAttention(RotatedAttention):
    """With QK-norm and RoPE, as in Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH // HEADS)

    def between(self, t: Tensor) -> Tensor:
        return super().between(self.norm(t))


LIKE = {"like GPT-2": Attention, "like Llama (RoPE)": RotatedAttention, "like Qwen3 (QK-norm, RoPE)": NormedAttention}


class Told:
    """A listener that wants every call, and keeps nothing."""

    sequences = 1
    may_be_late = may_wait = True

    def wants(self, place: CallPlace) -> bool:  # noqa: ARG002 - the protocol
        return True

    def wants_step(self, step: int) -> bool:  # noqa: ARG002 - the protocol
        return True

    def forward(self, call: AttentionCall) -> None:
        call.let_go()

    def backward(self, call: AttentionCall) -> None: ...

    def step_ended(self, step: int) -> None: ...

    def failed(self, error: Exception) -> None:
        raise error

    def forked(self) -> None: ...


@contextmanager
def _told(model: nn.Module) -> Iterator[None]:
    watch = Watch(model, Told()).start()
    try:
        yield
    finally:
        watch.stop()


def _passes_on(kernel: Any, arguments: Any) -> Callable[..., Any]:  # noqa: ARG001 - as ours
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(keys, *args, **kwargs)

    return run


@contextmanager
def _floor(device: str, *, compiled: bool) -> Iterator[None]:
    key = {"cpu": "CPU", "cuda": "CUDA"}[device]
    names = [name for one in OPERATORS if key in one.devices for name in (one.name, one.backward)]
    kernels = Kernels()
    kernels.put([(SCALED_DOT_PRODUCT, f"Autograd{key}", _passes_on), *((name, key, _passes_on) for name in names)])
    kernels.put([(name, key, _passes_on) for name in PRODUCTS] if compiled else [])
    try:
        yield
    finally:
        kernels.remove()


class _Loop:
    """Steps of a tiny model, and how long the host took for a call of each."""

    def __init__(self, device: str, layer: type[Attention], *, compiled: bool) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = nn.Sequential(*(layer() for _ in range(LAYERS))).to(device, dtype)
        # An embedding would make it: it needs a gradient.
        self._x = torch.randn(1, LENGTH, WIDTH, device=device, dtype=dtype, requires_grad=True)
        self._upstream = torch.randn_like(self._x)
        self._run: Any = torch.compile(self.model, fullgraph=True) if compiled else self.model
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        head = torch.randn(1, HEADS, LENGTH, WIDTH // HEADS, device=device, dtype=dtype)
        # With x, w_q and the LSE, and with the gradient at the projection where that is another than dq.
        more = [] if layer is Attention else [head]
        held = [
            *(head for _ in _HELD),
            *more,
            self._x,
            torch.randn(WIDTH, WIDTH, device=device, dtype=dtype),
            head[..., 0],
        ]
        self._held: list[Tensor] = held
        self._device = device
        # On a CPU everything runs in this thread; on a GPU another one goes back.
        self._clock = time.perf_counter if device == "cuda" else time.thread_time

    def step(self, clones: bool = False) -> None:
        self._run(self._x).backward(self._upstream)
        for _ in range(LAYERS if clones else 0):
            for t in self._held:
                t.clone()

    def us_a_call(
        self, around: Callable[[nn.Module], Any], repeats: int, *, clones: bool = False
    ) -> tuple[float, float]:
        """Of the host, in the median step, without the optimizer and for that alone."""
        found, ends = [], []
        with around(self.model):
            for number in range(repeats + 8):
                self._wait()
                began = self._clock()
                self.step(clones)
                took = self._clock() - began
                self._wait()
                began = self._clock()
                self._optimizer.step()
                ended = self._clock() - began
                self._optimizer.zero_grad()
                if number >= 8:
                    found.append(took / LAYERS * 1e6)
                    ends.append(ended / LAYERS * 1e6)
        return median(found), median(ends)

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def bench_calls(device: str, repeats: int = 200) -> dict[str, Any]:
    """Microseconds of host time for a call, forward and backward, eager and compiled, of each kind of layer."""
    return {like: _bench_layer(device, layer, repeats) for like, layer in LIKE.items()}


def _bench_layer(device: str, layer: type[Attention], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("eager", "compiled"):
        torch._dynamo.reset()
        loop = _Loop(device, layer, compiled=name == "compiled")
        with tempfile.TemporaryDirectory() as folder, ExitStack() as captures:

            def capture(where: str, **chosen: Any) -> Callable[[nn.Module], Any]:
                return lambda model: attn_diag.capture(model, Path(folder) / where, ring=1, **chosen)

            def floor(model: nn.Module, compiled: bool = name == "compiled") -> Any:  # noqa: ARG001 - as others
                return _floor(device, compiled=compiled)

            # In turn, as a machine's clock changes.
            ways: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {
                "idle": (lambda _: nullcontext(), False),
                "cloning": (lambda _: nullcontext(), True),
                "floor": (floor, False),
                "floor, cloning": (floor, True),
                "not looked at": (capture("none", steps=[-1]), False),
                "listening": (capture("other", layers=[-1]), False),
                "told": (_told, False),
                "wanted": (capture("all"), False),
            }
            rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            loop.us_a_call(ways["idle"][0], repeats)
            for _ in range(5):
                for way, (around, clones) in ways.items():
                    rounds[way].append(loop.us_a_call(around, repeats // 5, clones=clones))
            captures.close()
        us = {way: min(call for call, _ in those) for way, those in rounds.items()}
        ends = {way: min(end for _, end in those) for way, those in rounds.items()}
        found[name] = {
            "us a call": {way: round(value, 1) for way, value in us.items()},
            "above idle": {way: round(us[way] - us["idle"], 1) for way in ("not looked at", "listening", "told")},
            "listening, above the floor": round(us["listening"] - us["floor"], 1),
            "wanted, above cloning": round(us["wanted"] - us["cloning"], 1),
            "wanted, above cloning on the floor": round(us["wanted"] - us["floor, cloning"], 1),
            "wanted, over cloning on the floor": round(us["wanted"] / us["floor, cloning"], 3),
            "us a call at the step's end, above idle": {
                way: round(ends[way] - ends["idle"], 1) for way in ("not looked at", "listening", "told", "wanted")
            },
        }
    return found
