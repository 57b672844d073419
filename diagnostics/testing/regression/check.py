"""``attn_diag.check``: a kernel on a suite of inputs, against a baseline or against published recipes."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.hardware import package_version
from attn_diag.captures.metadata import Causal
from attn_diag.captures.selection import select_observations
from attn_diag.errors import InputError
from attn_diag.head.baseline import DEFAULT_RECIPE
from attn_diag.head.machine import backend_name, describe_tool, pick_device
from attn_diag.kernels import PRESETS, Recipe, preset
from attn_diag.results.baseline import BaselineCase, BaselineEntry, BaselineSize
from attn_diag.results.check import CheckedCase, CheckReport, Failure
from attn_diag.statistics.means import MIN_SEQUENCES
from attn_diag.testing.regression import cases as suite
from attn_diag.testing.regression import judge, suspects
from attn_diag.testing.regression.baseline import nearest, read, refuse_to_overwrite, store
from attn_diag.testing.regression.cases import CaseInputs, fingerprint
from attn_diag.testing.regression.measure import Measured, measure_case
from attn_diag.testing.regression.subject import DTYPES, Attention, CheckedKernel, MisfitError, emulate, subject_of

if TYPE_CHECKING:
    from attn_diag.work import Progress

# So many failing cases are searched for what changed; the others are only asked about what was found there.
_SEARCHED = 2
# The suite's name of a case, where the probe that looks closer has another.
_PROBES = {"pairs": "duplicates"}


@dataclass
class _Ran:
    """A case with what came back: from the kernel (None: nothing that could be judged) and from the yardstick."""

    inputs: CaseInputs
    outputs: dict[str, Tensor] | None
    case: CheckedCase
    measured: Measured | None
    failures: list[Failure]


def check(
    target: Attention | str | Recipe | Capture | Sequence[Capture],
    *,
    baseline: Path | str | None = None,
    save: bool = False,
    update: bool = False,
    cases: Iterable[str] | None = None,
    captures: Sequence[Capture] = (),
    observation: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool | str = "none",
    head_dim: int = 64,
    scale: float | None = None,
    backward: bool | None = None,
    level: float = 0.01,
    exact: bool = False,
    seed: int = 0,
    device: str = "auto",
    name: str | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Run a kernel on a suite of inputs and say whether its errors are biased, too large, or no longer the baseline's.

        assert attn_diag.check(my_attention, baseline="attention.json", causal=True).passed

    ``target``: fn(q, k, v) -> o, or (o, lse, …), with q, k, v [B, H, T, D] in ``dtype`` (BF16 or FP16), differentiable
    where its gradients are to be checked; "sdpa", "sdpa:flash" (efficient, cudnn, math); a recipe or its name, which
    is emulated; or captures, whose stored ``observation`` is judged and nothing is run. ``causal``, ``scale`` (default
    1/sqrt(head_dim)): what fn computes. ``cases``: only these of the suite; ``captures``: inputs of these as well.
    ``backward``: None checks gradients where autograd gives them, True demands them.

    ``baseline``: a file that ``save`` adds this kernel's entry to, ``update`` replaces it in, and neither compares
    with: a mean that moved (at ``level``, Holm over the whole run), an error that grew, and, with ``exact`` (or where
    the entry was saved so), other bits. Without it errors are held to those of a published recipe on the same inputs.
    The suite has one head and Tq = Tk: GQA, several heads and other lengths are checked through ``captures``.
    The statistics are described in ``attn_diag.testing.regression``. ``progress(done, total)`` after every case.

    Raises InputError for what cannot be run or compared at all; what the kernel does wrong is a failure in the report.
    """
    run = _Check(
        target, baseline=None if baseline is None else Path(baseline), save=save, update=update, cases=cases,
        captures=captures, observation=observation, dtype=dtype, causal=causal, head_dim=head_dim, scale=scale,
        backward=backward, level=level, exact=exact, seed=seed, device=device, name=name,
    )  # fmt: skip
    return run.run(progress)


class _Check:
    """One run: options checked first, then cases, judgement, culprits, and the file."""

    def __init__(
        self,
        target: Attention | str | Recipe | Capture | Sequence[Capture],
        *,
        baseline: Path | None, save: bool, update: bool, cases: Iterable[str] | None, captures: Sequence[Capture],
        observation: str | None, dtype: torch.dtype, causal: bool | str, head_dim: int, scale: float | None,
        backward: bool | None, level: float, exact: bool, seed: int, device: str, name: str | None,
    ) -> None:  # fmt: skip
        if not 0 < level < 1:
            raise InputError(f"level must lie between 0 and 1, got {level}; 0.01 is usual")
        if (save or update) and baseline is None:
            raise InputError("save and update need the baseline file to write to")
        if save and update:
            raise InputError("save adds an entry and update replaces one: ask for one of them")
        if dtype not in DTYPES:
            known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise InputError(f"dtype must be one of {known}, got {dtype}: errors are held to recipes known for these")
        self.causal: Causal = _causal(causal)
        self.level, self.exact, self.seed, self.backward = level, exact, seed, backward
        self.save, self.update, self.path = save, update, baseline
        self.where = pick_device(device)
        self.dtype, self.head_dim = dtype, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.notes: list[str] = []
        self.subject: CheckedKernel | None = None
        self.observation: str | None = observation
        self.source = self.backend = self.subject_key = ""
        self.inputs: list[CaseInputs] = []
        if isinstance(target, Capture) or (
            isinstance(target, Sequence) and not isinstance(target, str) and all(isinstance(c, Capture) for c in target)
        ):
            self._of_stored([target] if isinstance(target, Capture) else list(target), name, cases, captures)
        else:
            assert not isinstance(target, Capture | Sequence) or isinstance(target, str)
            self._of_kernel(target, name, cases, captures)
        # A file's name may hold bytes that are no text, which JSON cannot say.
        self.source, self.subject_key = (x.encode("utf-8", "replace").decode() for x in (self.source, self.subject_key))
        self.inputs = [replace(c, name=c.name.encode("utf-8", "replace").decode()) for c in self.inputs]
        self.key = " | ".join((self.subject_key, device_words(self.where), versions()))
        if save:
            assert baseline is not None
            refuse_to_overwrite(baseline, self.key)
        self.entry: BaselineEntry | None = None
        if baseline is not None and not save and not update:
            self.entry = nearest(read(baseline), self.subject_key, device_words(self.where), versions())
            self._say_which_entry(baseline)
        self.exact = exact or (self.entry is not None and self.entry.exact)

    def _of_stored(
        self, stored: list[Capture], name: str | None, cases: Iterable[str] | None, captures: Sequence[Capture]
    ) -> None:
        if not stored:
            raise InputError("no captures to check")
        if cases is not None or captures:
            raise InputError("stored observations are judged as they are: cases and captures need a kernel to run")
        names = {o for c in stored for o in select_observations(c, self.observation)}
        if len(names) != 1:
            listed = ", ".join(sorted(names)) or "none"
            raise InputError(f"name the one observation to check; the captures have {listed}")
        (self.observation,) = names
        self.inputs = suite.of_captures(stored)
        self.source, self.backend = name or f"stored observation '{self.observation}'", "stored"
        self.subject_key = self.source

    def _of_kernel(
        self, target: Attention | str | Recipe, name: str | None, cases: Iterable[str] | None,
        captures: Sequence[Capture],
    ) -> None:  # fmt: skip
        if self.observation is not None:
            raise InputError("observation is for captures whose stored outputs are judged; a kernel is run instead")
        if self.head_dim < 8:
            raise InputError(f"head_dim must be at least 8, got {self.head_dim}")
        self.subject = subject_of(
            target, name, dtype=self.dtype, head_dim=self.head_dim, device=self.where, backward=self.backward
        )
        self.source, self.backend = self.subject.name, self.subject.backend
        options = f"{DTYPES[self.dtype]}, D {self.head_dim}, causal {self.causal}, scale {self.scale:g}"
        self.subject_key = f"{self.source} ({options})"
        chosen = suite.choose(cases)
        self.inputs = [
            suite.draw(
                n, self.seed, dtype=self.dtype, causal=self.causal, head_dim=self.head_dim, scale=self.scale
            )
            for n in chosen
        ]  # fmt: skip
        for case in suite.of_captures(captures):
            same = case.causal == self.causal and abs(case.scale - self.scale) <= 1e-6 * self.scale
            if self.subject.fixed and not same:
                raise InputError(
                    f"{case.name} was made with causal {case.causal}, scale {case.scale:g}; fn is said to compute "
                    f"causal {self.causal}, scale {self.scale:g}: leave it out, or check it with those options"
                )
            self.inputs.append(case)
        names = [case.name for case in self.inputs]
        if len(set(names)) < len(names):
            raise InputError(f"cases must have names of their own, got {', '.join(names)}")
        if not names:
            raise InputError(f"cases must name at least one; known: {', '.join(suite.BUILDERS)}")

    def _say_which_entry(self, path: Path) -> None:
        if self.entry is None:
            self.notes.append(
                f"{path} has no entry for {self.subject_key}: errors are held to a published recipe's instead; add it "
                "with --save"
            )
        elif self.entry.key != self.key:
            self.notes.append(
                f"{path} has no entry for {self.key}: compared with that of {self.entry.key}, without bits"
            )

    def run(self, progress: Progress | None) -> CheckReport:
        """Everything, and the report."""
        ran = []
        for number, inputs in enumerate(self.inputs):
            ran.append(self._one(inputs))
            if progress is not None:
                progress(number + 1, len(self.inputs))
        adjusted, tests = judge.adjusted([r.case for r in ran])
        for r, case in zip(ran, adjusted, strict=True):
            r.case = case
            r.failures += judge.failures_of(case, self.level)
        self._name_culprits(ran)
        failures = [f for r in ran for f in r.failures]
        saved = None
        if self.save or self.update:
            failures, saved = self._store(ran, failures)
        return CheckReport(
            tool=describe_tool(self.where),
            source=self.source,
            backend=self.backend,
            key=self.key,
            level=self.level,
            seed=self.seed,
            exact=self.exact,
            baseline=None if self.path is None else str(self.path),
            baseline_key=None if self.entry is None else self.entry.key,
            cases=tuple(r.case for r in ran),
            failures=tuple(failures),
            notes=tuple(dict.fromkeys(self.notes)),
            tests=tests,
            saved=saved,
        )

    def _one(self, inputs: CaseInputs) -> _Ran:
        started = time.perf_counter()
        shape = tuple(inputs.q.shape)
        case = CheckedCase(inputs.name, shape, str(inputs.q.dtype).removeprefix("torch."))
        case = replace(case, inputs_fingerprint=inputs.fingerprint)
        try:
            outputs, deterministic = self._outputs(inputs)
            _require_finite(outputs)
        except MisfitError as error:
            message = f"{inputs.name}: {error}"
            return _Ran(inputs, None, case, None, [Failure("fit", inputs.name, "o", message)])
        recipe = preset(DEFAULT_RECIPE, DTYPES[inputs.q.dtype], inputs.q.shape[3])
        gradients = any(n in outputs for n in ("dq", "dk", "dv"))
        yardstick = emulate(recipe, inputs, self.where, with_gradients=gradients)
        if not gradients:
            yardstick = {n: x for n, x in yardstick.items() if n in ("o", "lse")}
        measured = measure_case(inputs, outputs, yardstick, recipe, self.where.type)
        bits = fingerprint(outputs)
        case = replace(
            case, outputs=tuple(outputs), fingerprint=bits, deterministic=deterministic, worst=measured.worst
        )
        if measured.misfit is not None:
            message = f"{inputs.name}: {measured.misfit}"
            failures = [Failure("fit", inputs.name, "o", message)]
            return _Ran(inputs, None, case, None, failures)
        known = None if self.entry is None else self.entry.cases.get(inputs.name)
        if self.entry is not None and known is None:
            self.notes.append(f"the baseline has no case {inputs.name}: it is held to a published recipe's errors")
        if not measured.biases:
            self.notes.append(
                f"{inputs.name}: bias is not tested with fewer than {MIN_SEQUENCES} sequences; "
                "attn-diag inspect --fail-on biased does"
            )
        case, failures = self._compared(case, known, bits)
        same_key = self.entry is not None and self.entry.key == self.key
        biases = judge.biases_of(measured, inputs.q.shape[2], known, same_key=same_key)
        same_inputs = known is not None and case.inputs_fingerprint == known.inputs_fingerprint
        if known is not None and same_inputs and bits == known.fingerprint:
            biases = {n: replace(b, p_value=None) for n, b in biases.items()}
        sizes = judge.sizes_of(measured, known, same_inputs=same_inputs)
        case = replace(case, biases=biases, sizes=sizes, seconds=time.perf_counter() - started)
        return _Ran(inputs, outputs, case, measured, failures)

    def _compared(self, case: CheckedCase, known: BaselineCase | None, bits: str) -> tuple[CheckedCase, list[Failure]]:
        """Determinism and bits."""
        failures = []
        if case.deterministic is False:
            words = f"{case.name}: two runs on the same inputs differ in their bits"
            if self.exact:
                failures.append(Failure("determinism", case.name, "o", f"{words}, although bits are demanded"))
            else:
                self.notes.append(f"{words}: bits cannot be compared; nothing else depends on them")
        if known is not None and known.outputs != case.outputs:
            words = f"{', '.join(known.outputs)} in the baseline, {', '.join(case.outputs)} now"
            failures.append(Failure("fit", case.name, "o", f"{case.name}: other outputs: {words}"))
            return case, failures
        same_key = self.entry is not None and self.entry.key == self.key
        if known is None or not same_key or case.deterministic is False:
            return case, failures
        if known.inputs_fingerprint != case.inputs_fingerprint:
            if self.exact:
                self.notes.append(f"{case.name}: other inputs than the baseline's (seed?): bits were not compared")
            return case, failures
        same = known.fingerprint == bits
        if not same:
            words = f"{case.name}: outputs differ in their bits from the baseline's on the same inputs"
            if self.exact:
                words = f"{words}, device and versions; {judge.worst_words(case)}"
                failures.append(Failure("bits", case.name, "o", words))
            else:
                self.notes.append(f"{words} (no failure without exact)")
        return replace(case, same_bits=same), failures

    def _outputs(self, inputs: CaseInputs) -> tuple[dict[str, Tensor], bool | None]:
        """What the kernel returns, and whether a second run returned the same bits; or what was stored."""
        if self.subject is None:
            assert inputs.capture is not None
            assert self.observation is not None
            return _stored(inputs.capture, self.observation), None
        outputs, notes = self.subject.run(inputs)
        again, _ = self.subject.run(inputs)
        _require_finite(again)
        self.notes += notes
        return outputs, fingerprint(outputs) == fingerprint(again)

    def _name_culprits(self, ran: list[_Ran]) -> None:
        """Fill in ``suspect`` and ``look_closer``."""
        found: str | None = None
        searched = 0
        for r in ran:
            if not r.failures:
                continue
            words = None
            if r.outputs is not None and (searched < _SEARCHED or found is not None):
                searched += 1
                named = self._suspect(r, found)
                found, words = (found, None) if named is None else named
            r.failures = [
                replace(f, suspect=None if f.kind == "fit" else words, look_closer=self._look_closer(r.inputs))
                for f in r.failures
            ]

    def _suspect(self, r: _Ran, only: str | None) -> tuple[str, str] | None:
        assert r.outputs is not None
        entry, head_dim, dtype = self.entry, r.inputs.q.shape[3], r.inputs.q.dtype
        known = None
        if entry is not None and entry.recipe is not None:
            known = suspects.by_name(entry.recipe, dtype, head_dim)
        unchanged = suspects.published(dtype, head_dim) if known is None else [known]
        backward = all(f.quantity in ("dq", "dk", "dv") for f in r.failures)
        expected = None if known is None or entry is None else entry.agreement
        output = "dq" if backward and "dq" in r.outputs else "o"
        return suspects.suspect(r.inputs, r.outputs, output, unchanged, expected, self.where, only)

    def _look_closer(self, inputs: CaseInputs) -> str:
        if inputs.capture is not None:
            return f"attn-diag {'identify' if self.subject is None else 'inspect'} {inputs.capture.source}"
        named = _PROBES.get(inputs.name, inputs.name)
        if self.source in PRESETS or (":" in self.source and not self.source.startswith("sdpa")):
            short = DTYPES[self.dtype]
            shape = f"--scale {self.scale:g} --shape 4,4,384,{self.head_dim}"
            return f"attn-diag probe {self.source} --probes {named} --dtype {short} --causal {self.causal} {shape}"
        shape = f"shape=(4, 4, 384, {self.head_dim}), scale={self.scale:g}"
        return f"attn_diag.probe(fn, probes=[{named!r}], dtype={self.dtype}, causal={self.causal!r}, {shape})"

    def _store(
        self, ran: list[_Ran], failures: list[Failure]
    ) -> tuple[list[Failure], Literal["saved", "updated"] | None]:
        """Write the entry; what is merely inaccurate is accepted thereby, what is broken is not."""
        assert self.path is not None
        broken = [f for f in failures if f.kind in ("fit", "determinism")]
        if broken:
            self.notes.append(f"nothing was written to {self.path}: what is broken cannot be a baseline")
            return failures, None
        self.notes += [f"accepted: {f.message}" for f in failures]
        first = next((r for r in ran if r.inputs.name == "normal"), ran[0])
        assert first.outputs is not None
        recipe = agreement = None
        if first.outputs["o"].dtype == first.inputs.q.dtype:
            options = suspects.published(first.inputs.q.dtype, first.inputs.q.shape[3])
            alike = suspects.closest(first.inputs, first.outputs["o"], options, self.where)
            recipe, agreement = alike.recipe.name, alike.agreement
        entry = BaselineEntry(
            subject=self.subject_key, device=device_words(self.where), versions=versions(), seed=self.seed,
            exact=self.exact, recipe=recipe, agreement=agreement,
            cases={r.case.name: _accepted(r) for r in ran},
        )  # fmt: skip
        replaced = store(self.path, entry, replace=self.update)
        return [], "updated" if replaced else "saved"


def _accepted(r: _Ran) -> BaselineCase:
    assert r.measured is not None
    sizes = {n: BaselineSize(s.error, s.yardstick, s.log_ratio) for n, s in r.measured.sizes.items()}
    c = r.case
    return BaselineCase(c.inputs_fingerprint, c.fingerprint, c.outputs, c.deterministic, r.measured.biases, sizes)


def _stored(capture: Capture, observation: str) -> dict[str, Tensor]:
    outputs = {}
    for name in capture.observations.get(observation, ()):
        if name == "dq_pre" or (name == "lse" and capture.metadata.lse_base == "2"):
            continue
        tensor = capture.tensors[capture.key(observation, name)][...].cpu()
        swapped = capture.metadata.layout == "BTHD" and name not in ("lse", "delta")
        outputs[name] = tensor.transpose(1, 2).contiguous() if swapped else tensor
    if "o" not in outputs:
        raise InputError(f"{capture.source}: observation {observation!r} has no o to check")
    return outputs


def _require_finite(outputs: dict[str, Tensor]) -> None:
    for name, tensor in outputs.items():
        bad = ~tensor.isfinite()
        if bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            raise MisfitError(f"{int(bad.sum())} of {bad.numel()} elements of {name} are NaN or Inf, first at {first}")


def _causal(causal: bool | str) -> Causal:
    chosen = causal if isinstance(causal, str) else ("top-left" if causal else "none")
    if chosen not in get_args(Causal):
        raise InputError(f"causal must be one of {', '.join(get_args(Causal))}, got {causal!r}")
    return chosen  # type: ignore[return-value]


def device_words(device: torch.device) -> str:
    """The part of a key that bits depend on: the GPU, or the CPU with its vector instructions (threads do not matter:
    torch's SDPA on 1 and 2 threads and the emulation return the same bits)."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {backend_name(device)}"
    return f"{platform.machine()} CPU {torch.backends.cpu.get_cpu_capability()}"


def versions() -> str:
    """The versions that bits depend on."""
    triton = package_version("triton")
    return f"torch {torch.__version__}, {f'triton {triton}, ' if triton else ''}attn-diag {version('attn-diag')}"
