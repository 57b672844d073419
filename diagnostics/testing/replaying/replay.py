"""``attn_diag.replay``: one capture's inputs through every kernel that is installed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from attn_diag.analyses.inspection.inspect import DEFAULT_LEVEL, inspect_captures
from attn_diag.captures.apart import alone
from attn_diag.captures.capture import Capture
from attn_diag.captures.dropout import KEPT
from attn_diag.captures.given import Array, CallTensors, Source, captures_of, require_captures
from attn_diag.captures.hardware import package_version
from attn_diag.captures.selection import Selection, select_heads, select_observations
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.errors import InputError
from attn_diag.head.assumptions import check_observation, judge_checks
from attn_diag.head.machine import backend_name, describe_tool, pick_device
from attn_diag.kernels import PRESETS, Recipe
from attn_diag.results.replay import Replay, ReplayedCapture, ReplayedKernel
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.libraries import LIBRARIES
from attn_diag.testing.regression.cases import case_of_capture, stored_outputs
from attn_diag.testing.replaying.answer import Judge, answer
from attn_diag.testing.replaying.processes import Ran, run_apart
from attn_diag.testing.target import Attention, Target, emulate
from attn_diag.work import Progress

INSTALLED = "installed"
DEFAULT_LIMIT_S = 300.0
_MOST_DOCUMENTS = 8
# Emulations of published kernels, and of what helps a head that amplifies the rounding of delta.
RECIPES = ("fa2", "cudnn", "efficient", "flex", "delta-fp32", "delta-from-dp")


def replay(
    source: Source,
    k: Array | None = None,
    v: Array | None = None,
    *,
    against: Iterable[str | Attention] | None = None,
    selection: Selection | None = None,
    limit_s: float = DEFAULT_LIMIT_S,
    level: float = DEFAULT_LEVEL,
    device: str = "auto",
    progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> Replay:
    """Run one call's inputs through every kernel that is installed: is it the kernel, or the head?

    Forward and backward of each run in a process of its own: a crash, a hang or a refusal is a result. What comes back
    is judged as ``attn_diag.inspect`` judges a capture, beside what was captured.

    Args:
        source: q of a call, [B, H, T, D]; or a Capture, a capture's file, a folder of them, or a list of these.
        k, v: Of the call.
        against: "installed" for all kernels here, a library's ("sdpa:flash", "flex_attention", "flash_attn_4", …), a
            recipe's name, "MODULE:FUNCTION" or a function of a module, fn(q, k, v) -> o with mask and scale of its own,
            [B, H, T, D] (given a dropout mask and sinks where it has parameters for them: ``testing.user_function``);
            None: all installed ones.
        selection: The observation that is compared, and the heads and batch items that are judged.
        limit_s: How long each kernel may take, in seconds.
        level: Significance after Benjamini-Hochberg.
        device: auto, cpu or cuda.
        progress: Called with (done, total) after each kernel.
        **call: What else the call had and returned, as ``attn_diag.inspect`` takes it.

    Returns:
        For each capture whether it is the kernel, the head or neither, and every kernel with its verdicts.

    Raises:
        InputError: Nothing can be replayed, or a kernel is not known; and as ``captures_of``.
    """
    captures = captures_of(source, k, v, call, function="replay")
    return replay_captures(
        captures, against=against, selection=selection, limit_s=limit_s, level=level, device=device, progress=progress
    )


def replay_captures(
    captures: Sequence[Capture],
    *,
    against: Iterable[str | Attention] | None = None,
    selection: Selection | None = None,
    limit_s: float = DEFAULT_LIMIT_S,
    level: float = DEFAULT_LEVEL,
    device: str = "auto",
    progress: Progress | None = None,
    unreadable: Sequence[str] = (),
    skip: Callable[[InputError], None] | None = None,
) -> Replay:
    """As ``replay``, of captures.

    Args:
        captures: The captures.
        against, selection, limit_s, level, device, progress: As for ``replay``.
        unreadable: Complaints about captures that could not be opened.
        skip: Called with what cannot be replayed where there is more; without it, that is raised.
    """
    if not limit_s > 0:
        raise InputError(f"the time limit must be above 0 seconds, got {limit_s}")
    where = pick_device(device)
    given = [INSTALLED] if against is None else [against] if isinstance(against, str) else list(against)
    names, not_here = kernels_named(given, where)
    asked_for = frozenset(_shown(x if isinstance(x, str) else importable(x)) for x in given if x != INSTALLED)
    left_out, found = list(unreadable), list[ReplayedCapture]()
    single = [
        part
        for capture in require_captures(captures, "replay")
        for part in _one_by_one(capture, selection or Selection())
    ]
    for number, (capture, chosen) in enumerate(single):
        job = _Job(capture, names, asked_for, chosen, where, limit_s, level)
        try:
            found.append(job.run(_after(progress, number * len(names), len(single) * len(names))))
        except InputError as error:
            if skip is None or len(single) == 1:
                raise
            skip(error)
            left_out.append(str(error))
    if not found:
        raise InputError("none of the captures could be replayed")
    return Replay(describe_tool(where), tuple(found), not_here, limit_s, tuple(left_out))


def _one_by_one(capture: Capture, selection: Selection) -> list[tuple[Capture, Selection]]:
    """A capture, or each of its packed or paged sequences that is chosen. Raises InputError for too many."""
    if capture.documents is None:
        return [(capture, selection)]
    batches = select_heads(capture, selection)[1]
    if len(batches) > _MOST_DOCUMENTS:
        raise InputError(
            f"{capture.source}: {len(batches)} packed or paged sequences, each of which is replayed by itself; choose "
            f"at most {_MOST_DOCUMENTS} of them, such as --batch 0-3"
        )
    return [(alone(capture, batch), replace(selection, batches=None)) for batch in batches]


def _after(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    """Counts kernels on after ``before`` of ``total``."""
    return lambda done: None if progress is None else progress(before + done, total)


def kernels_named(against: Iterable[str | Attention] | None, device: torch.device) -> tuple[list[str], tuple[str, ...]]:
    """The kernels that are asked for, as ``Target.of`` takes them; and known ones that are not here, with the reason.

    Raises InputError for a name that stands for no kernel, and a function that another process cannot import.
    """
    if isinstance(against, str):
        against = [against]
    names, not_here = list[str](), list[str]()
    for given in [INSTALLED] if against is None else against:
        name = given if isinstance(given, str) else importable(given)
        if name != INSTALLED:
            _require_known(name)
            names.append(name)
            continue
        for known, library in LIBRARIES.items():
            if known == "sdpa":
                continue  # one of its backends
            if package_version(library.package) is None:
                not_here.append(f"{known} (not installed)")
            elif library.cuda and device.type != "cuda":
                not_here.append(f"{known} (needs a GPU)")
            else:
                names.append(known)
        names += RECIPES
    if not names:
        raise InputError("name at least one kernel to replay the capture against")
    return list(dict.fromkeys(names)), tuple(not_here)


def _require_known(name: str) -> None:
    if name not in LIBRARIES and name not in PRESETS and (":" not in name or name.startswith("sdpa:")):
        known = ", ".join([INSTALLED, *LIBRARIES, *PRESETS])
        raise InputError(f"no kernel {name!r}; known: {known}; and MODULE:FUNCTION of fn(q, k, v) -> o")


def importable(given: Callable[..., Any]) -> str:
    """The name by which another process finds a function. Raises InputError where none does."""
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        raise InputError(
            "each kernel runs in a process of its own, which has to import it: put the function at the top of a module "
            f"and pass it, or 'MODULE:FUNCTION'; got {name or type(given).__name__} of {module}"
        )
    return f"{module}:{name}"


@dataclass
class _Job:
    """One capture through the kernels."""

    capture: Capture
    names: list[str]
    asked_for: frozenset[str]
    """Those among them that were named, as ``answer`` takes them."""
    selection: Selection
    device: torch.device
    limit_s: float
    level: float

    def run(self, done: Callable[[int], None]) -> ReplayedCapture:
        """Run them all, judge what came back, and answer."""
        select_heads(self.capture, self.selection)  # before any kernel runs: it raises for a head that is not there
        case = case_of_capture(self.capture)
        ran = self._captured()
        with tempfile.TemporaryDirectory(prefix="attn-diag-replay-") as folder:
            inputs = Path(folder) / "inputs.safetensors"
            self._of_outputs({}).save(inputs)

            def apart(name: str) -> Ran:
                own = Path(tempfile.mkdtemp(dir=folder))
                return run_apart(name, inputs, own, self.device.type, self.limit_s)

            for number, name in enumerate(self.names):
                ran[_shown(name)] = apart(name)
                done(number + 1)
            kernels = self._judged(ran, Published(case, self.device, ran, apart))
        return answer(self.capture, kernels, self.asked_for)

    def _captured(self) -> dict[str, Ran]:
        """The capture's own outputs, by what they are called beside the others."""
        found = {}
        for name in select_observations(self.capture, self.selection.observation):
            shown = "captured" if name == DEFAULT_OBSERVATION else f"captured {name}"
            found[shown] = Ran("captured", outputs=stored_outputs(self.capture, name, need_o=False))
        return found

    def _of_outputs(self, outputs: Mapping[str, Mapping[str, Tensor]]) -> Capture:
        """The capture's inputs with these observations."""
        c = self.capture
        tensors: dict[str, Any] = {}
        for name in ("q", "k", "v", "do", "x", "w_q", "mask", "q_positions", "sinks", "alibi_slopes", KEPT):
            if name in c.tensors:
                swap = c.metadata.layout == "BTHD" and name in ("q", "k", "v", "do")
                tensor = c.tensors[name][...]
                tensors[name] = tensor.transpose(1, 2) if swap else tensor
        tensors |= {f"{name}.{n}": x for name, found in outputs.items() for n, x in found.items()}
        return replace(
            c, tensors=tensors, metadata=replace(c.metadata, layout="BHTD", lse_base="e", lse_sink="included")
        )

    def _judged(self, ran: Mapping[str, Ran], published: Published) -> list[ReplayedKernel]:
        """Every kernel with its verdict. One of another function is left out of what is judged together."""
        outputs = {name: dict(one.outputs) for name, one in ran.items() if one.outputs}
        whole = self._of_outputs(outputs)
        others: dict[str, str] = {}
        for name in outputs:
            found = judge_checks(whole, [name], check_observation(whole, name, self.device))
            if found.refused:
                others[name] = found.message
        fitting = {name: found for name, found in outputs.items() if name not in others}
        judged = {}
        if fitting:
            selection = replace(self.selection, observation=None)
            diagnosis = inspect_captures(
                [self._of_outputs(fitting)], selection=selection, level=self.level, device=self.device.type
            )
            judge = Judge(diagnosis, self.capture.q_length, published.excuse)
            judged = {name: judge.of(name, outputs[name]) for name in fitting}
        return [self._kernel(name, one, judged.get(name, {}), others.get(name)) for name, one in ran.items()]

    def _kernel(self, name: str, ran: Ran, judged: Mapping[str, Any], other: str | None) -> ReplayedKernel:
        given: dict[str, Any] = {"labels": (), "quantities": (), "recipe": None, "agreement": None, "schedule": None}
        given |= {"finding": None, **judged}
        stated = self.capture.metadata
        captured, asked = ran.outcome == "captured", _asked(name)
        if captured:
            backend = stated.device or "not stated"
            version = stated.kernel
        else:
            emulated = "emulation on " if asked in PRESETS else ""
            backend, version = f"{emulated}{backend_name(self.device)}", version_of(asked)
        if other is not None:
            given["message"] = other
        return ReplayedKernel(
            name=name, captured=captured, version=version, backend=backend,
            outcome="other-function" if other is not None else ran.outcome,
            stage=ran.stage, deterministic=ran.deterministic, forward_ms=ran.forward_ms, backward_ms=ran.backward_ms,
            **({"message": ran.message} | given),
        )  # fmt: skip


@dataclass
class Published:
    """What published kernels that round once more make of these inputs: their errors are no fault."""

    case: CaseInputs
    device: torch.device
    ran: Mapping[str, Ran]
    apart: Callable[[str], Ran]

    def __post_init__(self) -> None:
        self.made: dict[str, Mapping[str, Tensor]] = {}

    def outputs(self, name: str) -> Mapping[str, Tensor]:
        """A published kernel's outputs; none where it does not run here."""
        if name not in self.made:
            alike = {"sdpa": "sdpa:flash", "efficient": "recipe efficient"}.get(name, name)
            if alike in self.ran:
                self.made[name] = self.ran[alike].outputs
            elif name in PRESETS:
                target = Target.of(name, dtype=self.case.q.dtype, head_dim=self.case.q.shape[3], device=self.device)
                assert isinstance(target.recipe, Recipe)
                self.made[name] = emulate(target.recipe, self.case, self.device)
            else:
                self.made[name] = self.apart(name).outputs
        return self.made[name]

    def excuse(self, name: str, quantities: Sequence[Any], outputs: Mapping[str, Tensor]) -> dict[str, str]:
        """By quantity: the published kernel that makes the same error, or what a library rounds so on purpose."""
        from attn_diag.testing.regression.documented import explained

        library = LIBRARIES.get(name)
        if library is not None and library.by_design is not None:
            return {q.quantity: f"by design: {library.by_design}" for q in quantities if q.answer == "lossy"}
        lossy = [q for q in quantities if q.answer == "lossy"]
        return explained(lossy, self.case, dict(outputs), self.device, self.outputs)


def _shown(name: str) -> str:
    return f"recipe {name}" if name in PRESETS else name


def _asked(shown: str) -> str:
    return shown.removeprefix("recipe ")


def version_of(name: str) -> str | None:
    """Of the package that a kernel comes in; None where it is not known."""
    if name in PRESETS:
        return package_version("attn-diag")
    if name in LIBRARIES:
        return torch.__version__ if LIBRARIES[name].package == "torch" else package_version(LIBRARIES[name].package)
    return package_version(name.partition(":")[0].partition(".")[0])
