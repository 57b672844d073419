"""``attn_diag.hunt``: which inputs break a kernel, and the smallest of them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from typing_extensions import Unpack

from attn_diag.captures.capture import Capture
from attn_diag.captures.files import write_atomically
from attn_diag.captures.given import Array, CallTensors, Source, captures_of
from attn_diag.errors import InputError
from attn_diag.head.declared import require_declarable
from attn_diag.head.machine import backend_name, describe_tool, pick_device
from attn_diag.kernels import PRESETS
from attn_diag.results.hunt import FAULTS, Fault, Hunt, HuntedKernel, HuntFinding, Variant
from attn_diag.results.wording import SYMBOLS, plural, together
from attn_diag.testing.hunting.axes import FIELDS, law, level_words
from attn_diag.testing.hunting.inputs import Material
from attn_diag.testing.hunting.judging import CaseJudge, CaseVerdict
from attn_diag.testing.hunting.run import Runner, same
from attn_diag.testing.hunting.script import script
from attn_diag.testing.hunting.search import Rule, Search
from attn_diag.testing.hunting.shrinking import shrink
from attn_diag.testing.hunting.workers import Workers, workers
from attn_diag.testing.libraries import LIBRARIES
from attn_diag.testing.names import choose_names
from attn_diag.testing.replaying.replay import RECIPES, kernels_named, version_of
from attn_diag.testing.stated import Stated
from attn_diag.testing.target import Attention
from attn_diag.work import Progress

DEFAULT_BUDGET_S, DEFAULT_LIMIT_S = 300.0, 120.0
# What can be said of a call whose inputs are drawn.
_DRAWN = {"causal", "scale", "window", "softcap", "alibi_slopes", "sinks", "dropout_p", "declared"}
_MOST_WORKERS = 8
# The first case is no longer, and of no more heads: hundreds of its kind are judged.
_LENGTH, _HEADS, _DIM = 128, 8, 64
# Levels that are named of those that are refused.
_NAMED = 8


def hunt(
    kernels: Attention | str | Iterable[Attention | str],
    source: Source | None = None,
    k: Array | None = None,
    v: Array | None = None,
    *,
    folder: Path | str | None = None,
    only: Iterable[str] | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    limit_s: float = DEFAULT_LIMIT_S,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> Hunt:
    """Change a call's inputs until a kernel gets one wrong, and shrink that to the smallest case.

        attn_diag.hunt("flash_attn_4", "capture.safetensors", folder="found").report()

    Head size, lengths, groups, mask, dtype, strides, values and batch are changed one at a time, then together. Every
    case runs in a worker process (a crash or a hang is a finding, a refusal is listed), forward and backward, and is
    judged as ``attn_diag.inspect`` judges a capture.

    Args:
        kernels: A library's name ("sdpa:flash", "flash_attn_4", …), a recipe's, "MODULE:FUNCTION", a function of a
            module with mask and scale of its own, "installed", or several of these.
        source: q of a call, [B, H, T, D]; or a Capture, a capture's file, a folder of them, or a list of these; None:
            normal numbers, D 64, with ``causal``, ``scale``, ``window``, ``softcap``, ``alibi_slopes``, ``sinks`` and
            ``dropout_p`` of the call (and a mask for that).
        k, v: Of the call.
        folder: Where the smallest cases go, each a capture and a script that runs it; None: nowhere.
        only: Only these axes: head size, group, mask, length, values, layout, dtype, batch, key heads.
        budget_s: How long the search takes at most for each kernel and capture; what was found by then is shrunk.
        limit_s: How long each case may take, with what the kernel compiles.
        seed: Of what is drawn.
        device: auto, cpu or cuda.
        progress: Called with (done, total) after each case; what is planned grows.
        **call: What else the call had, as ``attn_diag.inspect`` takes it; ``declared`` is what the kernels are meant to
            be, unless they are libraries or recipes of 16 bits.

    Returns:
        For each kernel and capture what is wrong, what the failing cases have in common, and the smallest of them.

    Raises:
        InputError: A kernel is not known, or a capture's shapes cannot be changed; and as ``captures_of``.
    """
    if source is None:
        if unused := sorted(set(call) - _DRAWN):
            raise InputError(
                f"without inputs hunt() takes {', '.join(sorted(_DRAWN))}, got {', '.join(unused)}: captures are its "
                f"second argument (source), and of a call's tensors q, k and v go with the others"
            )
        stated = Stated.of(
            call.get("causal") or "none", call.get("scale"), _DIM, call.get("window"), call.get("softcap"),
            call.get("alibi_slopes"), call.get("sinks"),
        )  # fmt: skip
        drawn = drawn_capture(stated, seed=seed, dropout_p=call.get("dropout_p"))
        captures = [declaring(drawn, call.get("declared"))]
    else:
        captures = captures_of(source, k, v, call, function="hunt")
    return hunt_captures(
        kernels, captures, folder=folder, only=only, budget_s=budget_s, limit_s=limit_s, seed=seed, device=device,
        progress=progress,
    )  # fmt: skip


def drawn_capture(
    stated: Stated | None = None, *, dtype: torch.dtype = torch.bfloat16, head_dim: int = _DIM, seed: int = 0,
    dropout_p: float | None = None,
) -> Capture:  # fmt: skip
    """N(0,1) inputs of two heads, or as many as are stated, where there is no capture to start from; with dropout also
    which are kept."""
    stated = stated or Stated.of(False, None, head_dim)
    generator = torch.Generator().manual_seed(seed)
    heads = stated.heads or 2
    q, k, v, do = (torch.randn(1, heads, _LENGTH, head_dim, generator=generator).to(dtype) for _ in range(4))
    kept = torch.rand(1, heads, _LENGTH, _LENGTH, generator=generator) >= dropout_p if dropout_p else None
    case = stated.case("normal numbers", q, k, v, do, dropout_mask=kept, dropout_p=dropout_p or None)
    return replace(case.captured({}), source=case.name)


def declaring(capture: Capture, declared: str | None) -> Capture:
    """The capture with what its kernels are declared to be. Raises InputError where there is no such recipe."""
    require_declarable(declared)
    return replace(capture, metadata=replace(capture.metadata, declared=declared))


def hunt_captures(
    kernels: Attention | str | Iterable[Attention | str] | None,
    captures: Sequence[Capture],
    *,
    folder: Path | str | None = None,
    only: Iterable[str] | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    limit_s: float = DEFAULT_LIMIT_S,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
    unreadable: Sequence[str] = (),
) -> Hunt:
    """As ``hunt``, of captures: it returns and raises the same.

    Args:
        kernels, captures: Each kernel is run on the inputs of each capture, changed.
        folder, only, budget_s, limit_s, seed, device, progress: As for ``hunt``.
        unreadable: Complaints about captures that could not be opened.
    """
    for name, value in (("the time limit", limit_s), ("the budget", budget_s)):
        if not value > 0:
            raise InputError(f"{name} must be above 0 seconds, got {value}")
    where = pick_device(device)
    given = [kernels] if isinstance(kernels, str) or callable(kernels) else kernels
    named = kernels_named(given, where)[0]
    if given is None or list(given) == ["installed"]:
        named = [name for name in named if name not in RECIPES]
    axes = choose_names("axis", only, tuple(FIELDS)) if only is not None else list(FIELDS)
    target = None if folder is None else Path(folder)
    found = []
    for capture in captures:
        material = Material.of(capture)
        for name in named:
            job = _Job(name, material.of_kernel(name, where), axes, where, budget_s, limit_s, seed, target, progress)
            found.append(job.run())
    kept = str(target) if target is not None and any(f.capture for h in found for f in h.findings) else None
    return Hunt(describe_tool(where), tuple(found), limit_s, budget_s, kept, tuple(unreadable))


@dataclass
class _Job:
    """One kernel and one capture."""

    name: str
    material: Material
    axes: list[str]
    device: torch.device
    budget_s: float
    limit_s: float
    seed: int
    folder: Path | None
    progress: Progress | None

    def run(self) -> HuntedKernel:
        """Search, shrink, and tell."""
        started = time.monotonic()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = max(1, min(_MOST_WORKERS, cores // 2))
        with _one_thread(), workers(self.name, self.device.type, count, self.limit_s) as pool:
            runner = Runner(self.material, pool, self._judge, started + self.budget_s, self.budget_s, self.progress)
            search = Search(runner, self.axes, self.device.type == "cuda", self._judge.fixed, self.seed)
            search.run(self._wanted())
            findings = [self._finding(rule, runner, pool) for rule in search.rules]
        findings.sort(key=lambda f: (FAULTS.index(f.fault), len(f.conditions)))
        if self.folder is not None:
            findings = [self._saved(number + 1, finding) for number, finding in enumerate(findings)]
        verdicts = list(runner.known.values())
        cases = sum(v.passed or bool(v.faults) for v in verdicts)
        emulated = "emulation on " if self.name in PRESETS else ""
        return HuntedKernel(
            name=self.name, version=version_of(self.name), backend=f"{emulated}{backend_name(self.device)}",
            capture=self.material.capture.source, first=search.first, cases=cases,
            refused=sum(v.refused and not v.passed and not v.faults for v in verdicts), not_run=search.not_run,
            seconds=time.monotonic() - started, findings=tuple(findings), axes=search.by_axis(),
            refusals=(*_refusals(search), *search.notes), documented=_documented(verdicts),
            words=_words(findings, cases, search),
        )  # fmt: skip

    def _wanted(self) -> Variant:
        """The capture with fewer heads and rows."""
        whole = self.material.as_captured
        group = min(whole.group, _HEADS)
        key_heads = min(whole.key_heads, 2 if group == 1 else 1)
        if self.material.heads:  # which are then as they are
            group, key_heads = whole.group, whole.key_heads
        return replace(
            whole, batch=1, group=group, key_heads=key_heads,
            rows=min(whole.rows, _LENGTH), keys=min(whole.keys, _LENGTH),
        )  # fmt: skip

    def _finding(self, rule: Rule, runner: Runner, pool: Workers) -> HuntFinding:
        """Shrink what a rule says, and run the smallest case in a process that has run nothing else."""
        fault = min(rule.outputs.values(), key=FAULTS.index)
        here = runner.verdict(rule.example)
        output = next((n for n, f in rule.outputs.items() if f == fault and same(here, n, f)), next(iter(rule.outputs)))
        smallest = shrink(runner, rule.example, output, here.faults.get(output, fault))
        verdict = runner.verdict(smallest)
        case = self.material.build(smallest)
        again = runner.judge.of(case, pool.run(case, smallest.layout, alone=True))
        alone = same(again, output, verdict.faults.get(output, fault))
        told = again if alone else verdict
        words = _sentence(rule, smallest, runner.known.values(), alone=alone)
        found = HuntFinding(
            fault=fault, outputs=rule.outputs, conditions=rule.conditions(), smallest=smallest,
            relative_errors=dict(told.errors), details=" ".join(told.words.values()), alone=alone, words=words,
        )  # fmt: skip
        if self.folder is not None:
            self._outputs[words] = {} if again.ran is None else dict(again.ran.outputs)
        return found

    def __post_init__(self) -> None:
        self._outputs: dict[str, dict[str, torch.Tensor]] = {}
        fixed = ":" in self.name and self.name not in LIBRARIES
        self._judge = CaseJudge.for_capture(self.name, self.material.capture, self.device, fixed=fixed)

    def _saved(self, number: int, finding: HuntFinding) -> HuntFinding:
        """The finding with its capture and its script."""
        assert self.folder is not None
        case = self.material.build(finding.smallest)
        outputs = self._outputs[finding.words]
        capture = case.captured(
            outputs, kernel=self.name, notes=f"attn-diag hunt: {finding.words}", declared=self._judge.declared
        )
        plain = re.sub(r"[^A-Za-z0-9]+", "_", self.name).strip("_")[:60]
        stem = f"{plain}_{number}_{'_'.join(finding.outputs)}_D{finding.smallest.head_dim}"
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = capture.save(self.folder / f"{stem}.safetensors")
        text = script(
            self.name, version_of(self.name), finding, capture=saved.name, folder=Path.cwd(), scale=case.scale,
            device=self.device.type, window=case.window, softcap=case.softcap,
            alibi_origin=None if case.alibi_slopes is None else case.alibi_origin,
            dropout_p=case.dropout_p, declared=self._judge.declared is not None,
        )  # fmt: skip
        target = self.folder / f"{stem}.py"
        write_atomically(target, lambda path: Path(path).write_text(text, encoding="utf-8"))
        return replace(finding, capture=str(saved), script=str(target))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Cases are judged side by side, each in a thread of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_SAID: dict[Fault, Callable[[str, bool], str]] = {
    "crashed": lambda what, _: f"its {what} crashes",
    "timed-out": lambda what, _: f"its {what} hangs",
    "raised": lambda what, _: f"its {what} fails with an error",
    "nonfinite": lambda what, several: f"{what} {'hold' if several else 'holds'} NaN or Inf",
    "wrong": lambda what, several: f"{what} {'are' if several else 'is'} wrong",
    "lossy": lambda what, several: f"{what} {'are' if several else 'is'} too coarse",
}


def _sentence(rule: Rule, smallest: Variant, known: Iterable[CaseVerdict], *, alone: bool) -> str:
    """Such as "dQ is wrong at head sizes 72, 88 (D mod 16 = 8); smallest case: 1 head, T=3, D=72"."""
    by_fault = {fault: [SYMBOLS.get(n, n) for n, f in rule.outputs.items() if f == fault] for fault in FAULTS}
    said = [_SAID[fault](together(names), len(names) > 1) for fault, names in by_fault.items() if names]
    conditions = [c.words for c in rule.conditions()]
    where = f" at {together(conditions)}" if conditions else f" in {_how_many(rule, known)} tried"
    only = "" if alone else " (only after other calls in the same process, or by chance)"
    return f"{' and '.join(said)}{where}; smallest case: {smallest.words}{only}"


def _how_many(rule: Rule, known: Iterable[CaseVerdict]) -> str:
    """Of the cases that ran, how many fail so."""
    failing = [bool(rule.outputs.keys() & v.faults.keys()) for v in known if v.passed or v.faults]
    return "every case" if all(failing) else f"{sum(failing)} of {plural(len(failing), 'case')}"


def _words(findings: Sequence[HuntFinding], cases: int, search: Search) -> str:
    """The answer."""
    if search.first is None:
        return f"the kernel takes none of the cases it was offered{f': {search.notes[0]}' if search.notes else ''}"
    left = f"; {plural(search.not_run, 'case')} were not run" if search.not_run else ""
    if not findings:
        return f"no wrong result in {plural(cases, 'case')}{left}"
    more = f" ({plural(len(findings) - 1, 'more finding')})" if len(findings) > 1 else ""
    return f"{findings[0].words}{more}"


def _refusals(search: Search) -> Iterator[str]:
    """Levels that a kernel does not take, in words."""
    judged = [v for v in search.runner.known.values() if v.ran_in_part]
    forward_alone = bool(judged) and all(v.refused for v in judged)
    if forward_alone:
        yield f"refuses every backward: {(judged[0].message or '').splitlines()[0]}"
    for axis, tried in search.tried.items():
        ran = [(level, verdict) for level, verdict in tried if verdict is not None]
        for stage, whole in (("", True), (" the backward at", False)):
            refused = [(x, v) for x, v in ran if v.refused and (v.ran_in_part != whole)]
            if not refused or (forward_alone and not whole):
                continue
            levels = [x for x, _ in refused]
            common = law(axis, levels, [x for x, _ in ran if x not in levels])
            more = f" and {len(levels) - _NAMED} more" if len(levels) > _NAMED else ""
            named = common or ", ".join(level_words(axis, x) for x in levels[:_NAMED]) + more
            message = refused[0][1].message
            yield f"refuses{stage} {axis} {named}" + (f": {message.splitlines()[0]}" if message else "")


def _documented(verdicts: Sequence[CaseVerdict]) -> tuple[str, ...]:
    found: dict[str, dict[str, int]] = {}
    for verdict in verdicts:
        for output, why in verdict.documented.items():
            counts = found.setdefault(why, {})
            counts[output] = counts.get(output, 0) + 1
    return tuple(
        ", ".join(f"{SYMBOLS[n]} in {plural(count, 'case')}" for n, count in counts.items()) + f": {why}"
        for why, counts in found.items()
    )
