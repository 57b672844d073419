"""The suite of inputs: named, drawn from a seed on the CPU, 16 independent sequences each; a real head; and users'
captures."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.dropout import KEPT
from attn_diag.captures.loading import load
from attn_diag.captures.selection import select_observations
from attn_diag.errors import InputError
from attn_diag.head.machine import pick_device
from attn_diag.kernels import Recipe
from attn_diag.results.check import ARRANGED
from attn_diag.statistics.means import MIN_SEQUENCES
from attn_diag.testing.case_inputs import CaseInputs, fingerprint
from attn_diag.testing.names import choose_names
from attn_diag.testing.probing import inputs as drawn
from attn_diag.testing.stated import LIMITS, Stated, same_function, stated_words
from attn_diag.testing.target import DTYPES, Attention, MisfitError, Target

BUILDERS: dict[str, drawn.Builder] = {
    "normal": drawn.normal,
    "pairs": drawn.duplicate_keys,
    "sinks": drawn.sinks,
    "tails": drawn.long_tails,
    "outliers": drawn.outliers,
    "large-logits": drawn.large_logits,
    "one-hot": drawn.one_hot_rows,
    "ones": drawn.ones,
    "constant-rows": drawn.constant_rows,
    "ramp": drawn.ramp,
    "normaliser-down": drawn.normaliser_down,
    "normaliser-up": drawn.normaliser_up,
}
# A head of GPT-2 small, of layer 2 at step 500 of a training with rounded scores, 100 steps before that failed: its
# scores grow to 38 within these rows, and BF16 scores make 4 to 7 times a well-rounded kernel's error of it.
REAL_HEAD = "real-head"
# Probabilities are dropped by a mask that the case states, and every head has a learned sink; of functions that take
# these (see ``testing.user_function``).
DROPOUT, SINK_LOGITS = "dropout", "sink-logits"
NAMES = (*BUILDERS, REAL_HEAD)
# Of a function that has such a parameter.
OF_PARAMETERS = {DROPOUT: "dropout_mask", SINK_LOGITS: "sinks"}
# What a kernel below 16 bits is asked by default: on the others all rows share one number's rounding, which a scale a
# little larger moves by many times, and by arrangements its scales hold later tokens by design.
OF_DECLARED = ("normal", "pairs", "tails", "outliers", REAL_HEAD)
# With ALiBi all rows have one P there, and with sinks all keys one P_bar below 1: casts that do not average out.
_OF_LIKE_HEADS = ("constant-rows", "normaliser-down", "normaliser-up")
_REAL_HEAD_FILE = Path(str(files("attn_diag.data"))) / "failing_step500_L2H7_first_rows.safetensors"
SEQUENCES = 16  # independent, the clusters of the tests: t with 15 degrees of freedom
# What trainings drop. Its reciprocal is no number of 16 bits: a factor that is rounded to them shows.
_DROPPED = 0.1
# A sink of this logit takes a seventh of a row of 192 scores of N(0, 1).
_SINK = 4.0
# What a case is called whose second run on the same inputs returned other bits, which are judged as well.
SECOND = ", second run"
# Two 128-key tiles, the second half full: the order of keys matters, and so does what a kernel does at an edge.
LENGTH = 192
# A block of the tails' keys, each of which has a leader.
SHORTEST = 64


def choose(
    names: Iterable[str] | None, kernel: Target, declared: str | None, length: int = LENGTH,
    stated: Stated | None = None, dtype: torch.dtype = torch.bfloat16,
) -> list[str]:  # fmt: skip
    """These cases in the suite's order; None: all of such a length that tell something of such a kernel.

    Raises InputError for unknown names, for a str, and for a length that the cases' patterns do not fit.
    """
    if length < SHORTEST:
        raise InputError(f"length must be at least {SHORTEST}, got {length}")
    found = choose_names("case", names, (*NAMES, *OF_PARAMETERS, ARRANGED))
    if names is not None:
        return found
    found = [name for name in found if name != REAL_HEAD or length <= LENGTH]
    if declared is not None:
        return [name for name in found if name in OF_DECLARED]
    less = [*_OF_LIKE_HEADS] * bool(stated and stated.heads) + [SINK_LOGITS] * bool(stated and stated.sinks)
    # A P_bar that begins at a sink is below FP16's range in that head's rows of low scores, not below BF16's.
    less += [REAL_HEAD] * bool(stated and stated.sinks and dtype == torch.float16)
    told = [n for n in found if n not in less and (n not in OF_PARAMETERS or OF_PARAMETERS[n] in kernel.takes)]
    # An emulation takes one head after the other, wherever it lies.
    return [name for name in told if name != ARRANGED or kernel.recipe is None]


def draw(
    name: str, seed: int, *, dtype: torch.dtype, head_dim: int, stated: Stated, length: int = LENGTH
) -> CaseInputs:
    """A case of the suite; every (seed, name) has draws of its own. dO from N(0,1) in ``dtype``.

    The real head is one sequence, the same for every seed. Raises InputError where it has less rows than ``length``.
    """
    if name == REAL_HEAD:
        return _real_head(dtype, head_dim, stated, length)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    heads = stated.heads or 1
    how = drawn.Draw(max(SEQUENCES // heads, MIN_SEQUENCES), heads, length, head_dim, dtype, stated, generator)
    made = BUILDERS.get(name, drawn.normal)(how)
    case = stated.case(name, made.q, made.k, made.values[0], how.normal().to(dtype))
    if name == DROPOUT:
        kept = torch.rand(*case.q.shape[:3], case.k.shape[2], generator=generator) >= _DROPPED
        return replace(case, dropout_mask=kept, dropout_p=_DROPPED)
    if name == SINK_LOGITS and case.sinks is None:
        return replace(case, sinks=_SINK + torch.randn(case.q.shape[1], generator=generator) / 2)
    return case


def _real_head(dtype: torch.dtype, head_dim: int, stated: Stated, length: int) -> CaseInputs:
    """The head's first rows, which see one another alone; in its own 64 features bit for bit where BF16 is asked for.

    Fewer features are those of most energy, in q and k and in V and dO; more are a rotation into the larger space. Both
    keep the scores and dP, as far as they can be kept.
    """
    stored = load(_REAL_HEAD_FILE)
    if length > LENGTH:
        raise InputError(f"{REAL_HEAD} has {LENGTH} rows, and no {length}: leave it out")
    q, k, v, do = (stored.tensors[n][:, :, :length].double() for n in ("q", "k", "v", "do"))
    q = q * (stored.scale / stated.scale)
    if head_dim != q.shape[3]:
        (q, k), (v, do) = (_turned(pair, head_dim) for pair in ((q, k), (v, do)))
    q, k, v, do = (x.to(dtype).repeat(1, stated.heads or 1, 1, 1) for x in (q, k, v, do))
    return stated.case(REAL_HEAD, q, k, v, do)


def _turned(pair: tuple[Tensor, Tensor], features: int) -> list[Tensor]:
    """Two tensors [1, 1, T, D] whose inner products count, in so many features."""
    width = pair[0].shape[3]
    basis = torch.linalg.svd(torch.cat([x[0, 0] for x in pair]), full_matrices=False)[2][:features].T
    if features > width:
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(features, width, generator=generator, dtype=torch.float64)
        basis = basis @ torch.linalg.qr(wide)[0].T
    return [x @ basis for x in pair]


def of_captures(captures: Sequence[Capture]) -> list[CaseInputs]:
    """The inputs of users' captures, named by their files (by their paths where several files have one name).

    Raises InputError for what a callable fn(q, k, v) cannot be given: masks, chosen rows, FP8, packed sequences.
    """
    names = [Path(c.source).name for c in captures]
    if len(set(names)) < len(names):
        names = [c.source for c in captures]
    for capture in captures:
        _refuse_what_is_not_run(capture)
    return [replace(case_of_capture(c), name=name) for name, c in zip(names, captures, strict=True)]


def case_of_capture(capture: Capture) -> CaseInputs:
    """All inputs of a capture's call.

    Raises InputError for FP8, which no kernel here is given, for slopes that are not finite, and for several packed or
    paged sequences.
    """
    m, tensors = capture.metadata, capture.tensors
    if any(name.endswith("_descale") for name in tensors):
        raise InputError(f"{capture.source}: kernels are not run on FP8 inputs; leave this capture out")
    slopes = _slopes(capture)
    if slopes is not None and not bool(slopes.isfinite().all()):
        raise InputError(f"{capture.source}: an ALiBi slope is NaN or Inf; inspect judges what it holds")
    if capture.documents is not None:
        raise InputError(
            f"{capture.source}: kernels are run on one sequence, and this has {len(capture.documents)}, packed or in "
            "pages; save one by itself (attn_diag.captures.apart.alone)"
        )
    given = {n: _whole(capture, n) for n in ("q", "k", "v", "do") if n in tensors}
    more = {n: _whole(capture, n, swap=False) for n in ("mask", "q_positions", KEPT) if n in tensors}
    return CaseInputs(
        capture.source, given["q"], given["k"], given["v"], given.get("do"), capture.scale, m.causal, capture,
        m.window, m.softcap, more.get("mask"), more.get("q_positions"), _sinks(capture),
        slopes, m.alibi_origin, more.get(KEPT), m.dropout_p if KEPT in tensors else None,
    )  # fmt: skip


def _sinks(capture: Capture) -> Tensor | None:
    if not capture.has_sinks:
        return None
    return torch.tensor([capture.sink(head) for head in range(capture.q_heads)], dtype=torch.float32)


def _slopes(capture: Capture) -> Tensor | None:
    places = [(b, h) for b in range(capture.batch) for h in range(capture.q_heads)]
    found = [capture.alibi_slope(b, h) for b, h in places]
    if found[0] is None:
        return None
    return torch.tensor(found, dtype=torch.float32).view(capture.batch, capture.q_heads)


def stored_outputs(capture: Capture, observation: str, *, need_o: bool = True) -> dict[str, Tensor]:
    """What a capture holds of an observation. Raises InputError where that has no o and one is needed."""
    outputs = {}
    for name in capture.observations.get(observation, ()):
        if name in ("dq_pre", "dmask", "dkv"):
            continue
        if name == "lse" and (capture.metadata.lse_base == "2" or capture.metadata.lse_sink == "excluded"):
            continue
        outputs[name] = _whole(capture, capture.key(observation, name), swap=name not in ("lse", "delta", "dsinks"))
    if need_o and "o" not in outputs:
        raise InputError(f"{capture.source}: observation {observation!r} has no o to check")
    return outputs


@dataclass(frozen=True)
class Asked:
    """What the suite's inputs are, and what the kernel is said to compute of them."""

    dtype: torch.dtype
    """torch.bfloat16 or torch.float16."""
    stated: Stated
    """The function."""
    head_dim: int
    """D."""
    seed: int
    """Where the draws start."""
    length: int = LENGTH
    """T, of rows and keys."""

    def draw(self, name: str) -> CaseInputs:
        """A case of the suite."""
        return draw(name, self.seed, dtype=self.dtype, head_dim=self.head_dim, stated=self.stated, length=self.length)


@dataclass(frozen=True)
class Judged:
    """What is judged: a kernel that is run on inputs, or stored observations."""

    source: str
    """What the report calls it."""
    backend: str
    """What it calls the origin of the numbers."""
    key: str
    """Its part of the baseline's key."""
    inputs: list[CaseInputs]
    """The cases."""
    outputs: Callable[[CaseInputs], tuple[list[dict[str, Tensor]], bool | None, list[str]]]
    """Outputs of a case, and of a second run where that returned other bits; whether it returned the same (None:
    nothing is run); and notes."""
    stored: bool = False
    """Nothing is run."""
    kernel: Target | None = None
    """What is run; None where nothing is."""


def captures_of(target: object) -> list[Capture] | None:
    """The captures whose stored outputs are to be judged; None where ``target`` is something that is run."""
    if isinstance(target, Capture):
        return [target]
    if isinstance(target, Sequence) and not isinstance(target, str) and all(isinstance(c, Capture) for c in target):
        return list(target)
    return None


def stored(captures: list[Capture], name: str | None, observation: str | None) -> Judged:
    """The stored outputs of one observation. Raises InputError where there are none, or several to choose from."""
    if not captures:
        raise InputError("no captures to check")
    names = {o for c in captures for o in select_observations(c, observation)}
    if len(names) != 1:
        listed = ", ".join(sorted(names)) or "none"
        raise InputError(f"name the one observation to check; the captures have {listed}")
    (chosen,) = names

    def outputs(case: CaseInputs) -> tuple[list[dict[str, Tensor]], bool | None, list[str]]:
        assert case.capture is not None
        return [stored_outputs(case.capture, chosen)], None, []

    source = _text(name or f"stored observation '{chosen}'")
    return Judged(source, "stored", source, _named(of_captures(captures)), outputs, stored=True)


def declared_by(captures: list[Capture]) -> str | None:
    """What captures declare their kernel to be. Raises InputError where they do not agree."""
    names = {c.metadata.declared for c in captures}
    if len(names) > 1:
        listed = ", ".join(sorted(name or "nothing" for name in names))
        raise InputError(f"the captures declare several kernels ({listed}): check each kernel's by themselves")
    return names.pop()


def run_by(kernel: Target, asked: Asked, names: list[str], captures: list[CaseInputs], backward: bool | None) -> Judged:
    """A kernel, run on cases of the suite and on captures' inputs.

    Raises InputError for captures of another function than fn is said to be, for two cases of one name, and for none.
    """
    own = [asked.draw(n) for n in names if n != ARRANGED]
    for case in captures:
        if kernel.fixed and not same_function(case, asked.stated, kernel.takes):
            raise InputError(
                f"{case.name} was made with {stated_words(case)}; fn is said to compute {stated_words(asked.stated)}: "
                "leave it out, or check it with those options"
            )
    inputs = [*own, *captures]
    called = [case.name for case in inputs]
    if len(set(called)) < len(called):
        raise InputError(f"cases must have names of their own, got {', '.join(called)}")
    if not called and ARRANGED not in names:
        raise InputError(f"cases must name at least one; known: {', '.join((*NAMES, *OF_PARAMETERS, ARRANGED))}")

    def outputs(case: CaseInputs) -> tuple[list[dict[str, Tensor]], bool | None, list[str]]:
        first, notes = kernel.run(case, backward=backward)
        try:
            again, _ = kernel.run(case, backward=backward)
        except MisfitError as error:
            raise MisfitError(f"on its second call {error}") from None
        same = fingerprint(first) == fingerprint(again)
        return [first] if same else [first, again], same, notes

    options = f"{DTYPES[asked.dtype]}, D {asked.head_dim}, {stated_words(asked.stated)}"
    options += "" if asked.length == LENGTH else f", T {asked.length}"
    source = _text(kernel.name)
    return Judged(source, kernel.backend, f"{source} ({options})", _named(inputs), outputs, kernel=kernel)


def nonfinite(outputs: dict[str, Tensor]) -> tuple[str, str] | None:
    """The first output that holds NaN or Inf, and where; None where none does."""
    for name, tensor in outputs.items():
        bad = ~tensor.isfinite()
        if bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            return name, f"{int(bad.sum())} of {bad.numel()} elements of {name} are NaN or Inf, first at {first}"
    return None


def capture_of_case(
    target: Attention | str | Recipe | Capture | Sequence[Capture],
    case: str,
    *,
    captures: Sequence[Capture] = (),
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    length: int = LENGTH,
    backward: bool | None = None,
    seed: int = 0,
    device: str = "auto",
    declared: str | None = None,
    name: str | None = None,
    **more: Any,
) -> Capture | None:
    """The inputs of ``case`` and what the kernel returns for them once more: where a closer look at a failure starts.

    Args:
        target: As for ``attn_diag.check``, and so are all options, of which the others change no output.
        case: The name of the failing case.

    Returns:
        None where there is nothing to inspect: the kernel raises, or returns no attention's shape; the case is two
        calls that differ; or ``target`` is captures, which are files already.
    """
    if isinstance(target, Capture) or not (callable(target) or isinstance(target, str | Recipe)) or case == ARRANGED:
        return None
    stated = Stated.of(more.get("causal") or "none", more.get("scale"), head_dim, **{n: more.get(n) for n in LIMITS})
    case = case.removesuffix(SECOND)
    try:
        kernel = Target.of(target, name, dtype=dtype, head_dim=head_dim, device=pick_device(device))
        if case in (*NAMES, *OF_PARAMETERS):
            inputs = Asked(dtype, stated, head_dim, seed, length).draw(case)
        else:
            (inputs,) = (c for c in of_captures(captures) if c.name == case)
        outputs, _ = kernel.run(inputs, backward=backward)
    except (MisfitError, InputError):
        return None
    words = f"case {case} of attn-diag check, seed {seed}"
    return inputs.captured(outputs, kernel=kernel.name, declared=declared, notes=words)


def _refuse_what_is_not_run(capture: Capture) -> None:
    """Raise InputError for a mask of the capture's own, a softmax_offset, FP8, packed sequences and rows left out."""
    m = capture.metadata
    given: dict[str, Any] = {"softmax_offset": m.softmax_offset}
    names = ("mask", "q_positions", "q_descale", "k_descale", "page_table", "cu_seqlens_q")
    given |= {n: capture.tensors.get(n) for n in names}
    if odd := [n for n, value in given.items() if value is not None]:
        raise InputError(f"{capture.source}: check knows no {', '.join(odd)}; leave this capture out")


def _whole(capture: Capture, name: str, *, swap: bool = True) -> Tensor:
    """A tensor of a capture in memory; [B, H, T, D] with ``swap``."""
    tensor = capture.tensors[name][...].cpu()
    return tensor.transpose(1, 2).contiguous() if swap and capture.metadata.layout == "BTHD" else tensor


def _named(inputs: list[CaseInputs]) -> list[CaseInputs]:
    return [replace(case, name=_text(case.name)) for case in inputs]


def _text(name: str) -> str:
    """A file's name may hold bytes that are no text, which JSON cannot say."""
    return name.encode("utf-8", "replace").decode()
