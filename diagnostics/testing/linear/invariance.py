"""``attn_diag.invariance_linear``: one call of linear attention in every arrangement that should not matter."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from attn_diag.analyses.linear.inspect import inspect_linear_captures
from attn_diag.analyses.linear.noise import cancelled, near
from attn_diag.captures.lent import written_words
from attn_diag.captures.linear import LinearCapture
from attn_diag.errors import InputError
from attn_diag.head.linear import LinearRun
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.reference import format_of, ulp
from attn_diag.reference.linear import OF_HEADS
from attn_diag.results.invariance import Invariance, OwnError, PathDifference, PathFinding, Status
from attn_diag.results.linear import LinearDiagnosis
from attn_diag.results.wording import listed
from attn_diag.testing.invariance.calls import own_noise
from attn_diag.testing.invariance.distance import Expected, difference, own_error
from attn_diag.testing.invariance.ruling import REPEATS, SAME_CALL, Rulings, seldom_words, until_told, words_of
from attn_diag.testing.linear.arrangements import (
    LINEAR_ARRANGEMENTS,
    STATES,
    LinearArrangement,
    LinearPath,
    LinearSetting,
    Outputs,
    handed_on,
)
from attn_diag.testing.linear.cases import SHAPE, draw, usable_length, with_outputs
from attn_diag.testing.linear.function import LinearFunction, LinearFunctionGiven
from attn_diag.testing.names import choose_names
from attn_diag.testing.target import DTYPES, RECIPE_DTYPES, MisfitError, NoGradientError
from attn_diag.work import Progress

# Three batch items, so that one has a neighbour on each side; T off the chunks.
_SHAPE = (3, SHAPE[2], 100, SHAPE[3])


def invariance_linear(
    kernel: LinearFunctionGiven | str,
    operator: str,
    *,
    recurrent: LinearFunctionGiven | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    shape: Sequence[int] | None = None,
    backward: bool | None = None,
    only: Sequence[str] | None = None,
    allow: Sequence[str] = (),
    repeats: int = REPEATS,
    seed: int = 0,
    device: str = "auto",
    name: str | None = None,
    progress: Progress | None = None,
) -> Invariance:
    """As ``attn_diag.invariance``, of linear attention: chunks, packed against alone, decoding, and the rest.

    Args:
        kernel: A function with flash-linear-attention's arguments, or what else ``check_linear`` runs.
        operator: Whose arguments it has.
        recurrent: Another function for the same mathematics, such as the one that decodes.
        dtype: torch.bfloat16 or torch.float16.
        shape: B, H, T, D of the call; None: 3, 2, 100, 32, or 256 steps of a function that takes whole chunks alone.
        backward: None compares gradients where autograd gives them, True demands them, False leaves them out.
        only: Names out of ``attn_diag.testing.linear.arrangements.LINEAR_ARRANGEMENTS``; None: all.
        allow: Arrangements that may change bits within the noise.
        repeats: How often the same call is made again.
        seed: Of the inputs.
        device: auto, cpu or cuda.
        name: What the report calls the kernel.
        progress: Called with (done, total) after each arrangement.

    Raises:
        InputError: Options cannot be used, or the kernel raises or returns another shape.
    """
    if dtype not in RECIPE_DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in RECIPE_DTYPES)
        raise InputError(f"dtype must be one of {known}, got {dtype}: differences are held to kernels known for these")
    if shape is not None and (len(shape) != 4 or min(shape) < 1 or shape[2] < 4 or shape[3] < 8):
        raise InputError(f"shape must be B, H, T, D with T of at least 4 and D of at least 8, got {shape}")
    chosen = [LINEAR_ARRANGEMENTS[n] for n in choose_names("arrangement", only, LINEAR_ARRANGEMENTS)]
    choose_names("arrangement", allow, LINEAR_ARRANGEMENTS)
    where = pick_device(device)
    function = LinearFunction.of(kernel, operator, name, device=where)
    other = None if recurrent is None else LinearFunction.of(recurrent, operator, device=where)
    notes = list[str]()
    if shape is None:
        length, notes = usable_length(function, operator, dtype, _SHAPE[3], seed)
        shape = (*_SHAPE[:2], length if notes else _SHAPE[2], _SHAPE[3])
    b, h, t, d = shape
    base = draw("initial-state", operator, seed, dtype=dtype, shape=(b, t, h, d))
    dropped = {"do", "dfinal_state"} if backward is False else set[str]()
    dropped |= set() if function.takes("initial_state") else {"initial_state", "dfinal_state"}
    base = replace(base, tensors={n: x for n, x in base.tensors.items() if n not in dropped}, source="invariance")
    generator = torch.Generator()
    run = _Run(
        LinearSetting(base, function, other, generator, repeats), Rulings(frozenset(allow)), notes, bool(backward)
    )
    return run.run(chosen, (b, h, t, d), seed, progress)


@dataclass
class _Run:
    setting: LinearSetting
    rulings: Rulings
    notes: list[str]
    demanded: bool
    overwritten: dict[str, str] = field(default_factory=dict)
    _first: dict[int, tuple[LinearCapture, Outputs, Expected]] = field(default_factory=dict)

    def run(
        self,
        chosen: Sequence[LinearArrangement],
        shape: tuple[int, int, int, int],
        seed: int,
        progress: Progress | None,
    ) -> Invariance:
        """Every path of every arrangement, and the report."""
        function = self.setting.function
        outputs, expected = self._base()
        errors = tuple(
            OwnError(n, own_error(x.double(), expected.truth[n], expected.variance[n]))
            for n, x in outputs.items()
            if n in expected.truth
        )
        found: list[PathFinding] = []
        for number, item in enumerate(chosen):
            self.setting.generator.manual_seed(zlib.crc32(f"{seed} {item.name}".encode()))
            found += self._arrangement(item)
            if progress is not None:
                progress(number + 1, len(chosen))
        found = self.rulings.with_once(found)
        found.sort(key=lambda p: p.arrangement != "uninitialised" or not any(d.nonfinite for d in p.differences))
        outcome, headline = self._judged(found, self._wrong(outputs))
        if outcome == "pass" and function.recipe is None:
            self.notes.append(seldom_words(found, outputs["o"].numel(), self.setting.repeats))
        base = self.setting.base
        return Invariance(
            tool=describe_tool(function.device), source=function.name, backend=function.backend,
            dtype=DTYPES[base.tensors["q"].dtype], shape=shape, causal="top-left", scale=base.call.used_scale,
            seed=seed, outcome=outcome, headline=headline, notes=(*self.notes, *self.rulings.notes()), schedule=None,
            errors=errors, paths=tuple(found), operator=base.operator,
        )  # fmt: skip

    def _base(self) -> tuple[Outputs, Expected]:
        """The call, without gradients where the function has none, without that of a state which it does not return."""
        s = self.setting
        try:
            outputs, _ = s.function.run(s.base)
        except NoGradientError as error:
            if self.demanded:
                raise InputError(f"{s.function.name}: {error}") from error
            self.notes.append(f"Gradients were not compared: {error}.")
            kept = {n: x for n, x in s.base.tensors.items() if n not in ("do", "dfinal_state")}
            self.setting = replace(s, base=replace(s.base, tensors=kept))
            return self._made_first(self.setting.base)
        except MisfitError as error:
            raise InputError(error.of(s.function.name)) from error
        if "final_state" not in outputs and "dfinal_state" in s.base.tensors:
            kept = {n: x for n, x in s.base.tensors.items() if n != "dfinal_state"}
            self.setting = replace(s, base=replace(s.base, tensors=kept))
        return self._made_first(self.setting.base)

    def _made_first(self, capture: LinearCapture) -> tuple[Outputs, Expected]:
        if id(capture) not in self._first:
            outputs = self._made(LinearPath("", capture))
            self._first[id(capture)] = capture, outputs, expected_linear(capture, outputs, self.setting.function.device)
        return self._first[id(capture)][1:]

    def _made(self, path: LinearPath) -> Outputs:
        function = path.function or self.setting.function
        with path.around():
            if path.before is not None:
                function.run(path.before)
            if path.steps:
                outputs, changed = handed_on(function, path)
            else:
                outputs, changed = function.run(path.capture, gradients=path.gradients, place=path.place)
        self.overwritten = {**changed, **self.overwritten}
        return {n: x.clone() for n, x in outputs.items()}

    def _arrangement(self, item: LinearArrangement) -> list[PathFinding]:
        paths = item.paths(self.setting)
        if isinstance(paths, str):
            return [PathFinding(item.name, item.shows, "", item.promise, "not-run", paths)]
        found = list(until_told(item, (self._path(item, path) for path in paths)))
        self.rulings.note(item, found)
        return found

    def _path(self, item: LinearArrangement, path: LinearPath) -> PathFinding:
        try:
            first, expected = self._made_first(path.against or self.setting.base)
            second = self._made(path)
            seen = _compared(path, first, second, expected)
            again = self._again(item, path, first, second, expected)
            differences = self.rulings.lasting(item, path.name, seen, again)
        except (MisfitError, InputError) as error:
            name = (path.function or self.setting.function).name
            words = error.of(name) if isinstance(error, MisfitError) else str(error)
            return PathFinding(item.name, item.shows, path.name, item.promise, "refused", words)
        status = self.rulings.status(item, differences)
        words = words_of(item, status, differences)
        if path.function is not None and path.function is self.setting.recurrent:
            status, words = self._split(item, status, words, path, second)
        return PathFinding(item.name, item.shows, path.name, item.promise, status, words, tuple(differences))

    def _again(
        self, item: LinearArrangement, path: LinearPath, first: Outputs, second: Outputs, expected: Expected
    ) -> Iterator[list[PathDifference]]:
        """Both calls of a path made again, one after the other, each compared with the other one's."""
        if item.name == SAME_CALL.name:
            return
        yield _compared(path, first, third := self._made(path), expected)
        if item.name != "other-calls":
            again = self._made(LinearPath("", path.against or self.setting.base))
            yield _compared(path, again, second, expected)
            yield _compared(path, again, third, expected)
        yield _compared(path, first, self._made(path), expected)

    def _split(
        self, item: LinearArrangement, status: Status, words: str, path: LinearPath, outputs: Outputs
    ) -> tuple[Status, str]:
        """Of another function what is wrong mathematics, however small, and what coarser rounding, however large."""
        found = self._inspected(path.capture, outputs)
        if status != "same" and found.labels & {"wrong", "nonfinite"}:
            return "fault", f"it {item.fault}: {found.findings[0].words.rstrip('.')}"
        if status == "fault":
            coarse = [f for f in found.findings if f.label == "lossy"]
            return "rounding", f"coarser rounding: {coarse[0].words.rstrip('.')}" if coarse else f"rounding: {words}"
        return status, words

    def _inspected(self, capture: LinearCapture, outputs: Outputs) -> LinearDiagnosis:
        return inspect_linear_captures([with_outputs(capture, outputs)], device=self.setting.function.device.type)

    def _wrong(self, outputs: Outputs) -> str | None:
        """What ``inspect`` calls wrong in the call itself."""
        found = self._inspected(self.setting.base, outputs)
        return found.findings[0].words.rstrip(".") if found.labels & {"wrong", "nonfinite"} else None

    def _judged(self, found: Sequence[PathFinding], wrong: str | None) -> tuple[Literal["pass", "fail"], str]:
        if self.overwritten:
            return "fail", written_words(self.overwritten)
        bad = [p for p in found if p.status in ("bits", "fault")]
        failed = list(dict.fromkeys(p.arrangement for p in bad))
        if failed:
            of_first = [p for p in bad if p.arrangement == failed[0]]
            worst = next((p for p in of_first if p.status == "fault"), of_first[0])
            also = f"; also {listed(failed[1:], 4)}" if len(failed) > 1 else ""
            if wrong is not None:
                self.notes.append(f"The call itself is wrong: {wrong}.")
            return "fail", f"{failed[0]}, {worst.path}: {worst.words}{also}"
        if wrong is not None:
            return "fail", f"the call itself: {wrong}"
        run = {p.arrangement for p in found if p.status not in ("not-run", "refused")}
        return "pass", f"nothing but rounding differs between {len(run)} arrangements"


def expected_linear(capture: LinearCapture, outputs: Outputs, device: torch.device) -> Expected:
    """The truth and the variances of a well-rounded kernel's error and of a coarse one's, like the outputs.

    A row's is the mean of its squared errors in the largest of the emulated kernels, or of the rows about it, where
    that is more: of one number a step there is no other estimate.

    Args:
        capture: The call.
        outputs: What a function returned for it.
        device: Where references and emulations run.
    """
    run = LinearRun(with_outputs(capture, outputs), device)
    fmt = run.format
    assert fmt is not None
    forward = not any(name.startswith("d") for name in outputs)
    kernels = [run.emulated(replace(run.recipe, chunk=chunk), forward=forward) for chunk in run.chunks]
    coarse = run.emulated(replace(run.recipe, state=fmt, decay=fmt, accumulator=fmt), forward=forward)
    truth: dict[str, Tensor] = {}
    variance: dict[str, Tensor] = {}
    sane: dict[str, Tensor] = {}
    for name, x in outputs.items():
        if name not in run.reference.values or name.removeprefix("d") in OF_HEADS:
            continue
        true = run.reference.values[name]
        squares = torch.stack([(made[name] - true).square() for made in kernels]).amax(0)
        variance[name] = _by_rows(squares + ulp(true, format_of(x.dtype)).square() / 12, name)
        sane[name] = torch.maximum(variance[name], _by_rows((coarse[name] - true).square(), name))
        for head in range(capture.tensors["v"].shape[2]):
            if (place := run.place(name, head)) is not None:
                sane[name][place] = sane[name][place] + cancelled(run, name, place)
        truth[name] = true
    return Expected(*({n: x.cpu() for n, x in found.items()} for found in (truth, variance, sane)))


def _by_rows(squares: Tensor, name: str) -> Tensor:
    """Each row's mean square, or that of the rows about it; rows follow each other along the steps (or a state's)."""
    rows = squares.mean(3) if squares.ndim == 4 else squares
    dim = 2 if name.removeprefix("d") in STATES else 1
    moved = rows.movedim(dim, -1)
    smooth = torch.stack([near(line) for line in moved.reshape(-1, moved.shape[-1])]).view(moved.shape).movedim(-1, dim)
    return (smooth[..., None] if squares.ndim == 4 else smooth).expand(squares.shape).clone()


def _compared(path: LinearPath, first: Outputs, second: Outputs, expected: Expected) -> list[PathDifference]:
    found = []
    for name in (n for n in expected.truth if n in first and n in second):
        parts = [
            path.select(name, x)
            for x in (first[name], *(e[name] for e in (expected.truth, expected.variance, expected.sane)))
        ]
        other = path.align(name, second[name])
        if other is None or any(p is None for p in parts):
            continue
        of_first, truth, variance, sane = (_items_heads_rows(name, p) for p in parts if p is not None)
        of_second = _items_heads_rows(name, other)
        # Of a kernel that is wrong in one of the two calls, the other tells its noise.
        own = min(own_noise(of_first, truth, sane), own_noise(of_second, truth, sane))
        fmt = format_of(other.dtype)
        found.append(difference(name, of_first.to(other.dtype), of_second, variance, own**2 * sane, fmt))
    return found


def _items_heads_rows(name: str, x: Tensor) -> Tensor:
    """[B, H, T, …], or of a state [N, H, K, V]."""
    return x if name.removeprefix("d") in STATES else x.transpose(1, 2)
