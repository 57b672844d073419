"""Dumps in, captures out: what a dump does not state is tried, and the guesses are checked.

The layout, causal alignment or base of LSE is the one under which the dumped O (or LSE) agrees with attention
recomputed in float64. Every such choice is written to the capture's notes, and ``inspect`` checks it again before any
verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import torch

from attn_diag.captures.capture import Capture
from attn_diag.captures.dumps import flashinfer, sglang, torch_save
from attn_diag.captures.dumps.call import DumpedCall, Wanted
from attn_diag.captures.metadata import LseBase
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.errors import InputError
from attn_diag.head.output_fit import FitSubject, OutputFit, lse_fit, out_fit, times_coarse
from attn_diag.work import Progress

Kind = Literal["auto", "flashinfer", "sglang", "torch"]
# How the note begins of an output that does not fit q, k and v.
MISFIT = " does not agree with attention on q, k and v"
# And how one goes on of a guess that no output can confirm.
UNCONFIRMED = " assumed, and nothing confirms it: "
# How far an O may be off, in units of what is expected of a kernel that rounds all it stores to 16 bits: that is made
# to first order, and takes its roundings to be independent.
_TIMES = 2.0
_CPU = torch.device("cpu")
_SUFFIX = ".safetensors"
_Reader = Callable[[], Iterable[DumpedCall]]


def convert(
    path: str | Path,
    out: str | Path,
    *,
    kind: Kind = "auto",
    names: Mapping[str, str] | None = None,
    layout: str | None = None,
    causal: str | None = None,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    declared: str | None = None,
    lse_base: str | None = None,
    layer: int | None = None,
    head_dim: int | None = None,
    force: bool = False,
    skip: Callable[[InputError], None] | None = None,
    told: Callable[[Path, tuple[str, ...]], None] | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Convert another tool's dump of attention calls to captures (format 1).

    Nothing but tensors and plain values is ever unpickled.

    Args:
        path: A folder (every call in it is converted) or a file of FlashInfer's flight recorder, SGLang's dumper or
            ``torch.save``.
        out: A file ending in .safetensors for one call, else a folder, made if missing, which gets one file a call.
        kind: Which of these tools ``path`` is of, where that is not plain.
        names: Which tensor of the dump is which, such as {"q": "layers.*.query"}.
        layout, causal, scale, window, softcap, lse_base: Metadata instead of what the dump says or a check finds.
        declared: The recipe below 16 bits that the kernel is meant to be, kept as metadata.
        layer: Only calls of this layer; of a dump that states none, the layer of its only call.
        head_dim: D, where heads and features share one axis.
        force: Overwrite files.
        skip: Called with the error of a call that cannot be converted beside others that can; None: it is raised.
        told: Called with (file, notes): what was guessed and checked.
        progress: Called with the calls or files that are done and how many there are.

    Returns:
        The files written.

    Raises:
        InputError: Pickles that hold more, unsupported calls (packed, varlen, paged), tensors that cannot be told
            apart, files that exist, or nothing is converted.
    """
    path, out = Path(path), Path(out)
    if kind not in get_args(Kind):
        raise InputError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    wanted = Wanted(names or {}, layout, causal, scale, window, softcap, lse_base, layer, head_dim)
    readers = _readers(path, _detected(path) if kind == "auto" else kind, wanted)
    writer = _Writer(out, wanted, declared, force=force, told=told)
    errors: list[InputError] = []

    def failed(error: InputError) -> None:
        if skip is None:
            raise error
        errors.append(error)

    for done, reader in enumerate(readers):
        if progress is not None:
            progress(done, len(readers))
        try:
            for call in reader():
                try:
                    writer.add(call)
                except InputError as error:
                    failed(error)
        except InputError as error:
            failed(error)
    if len(errors) == 1 and not writer.taken:
        raise errors[0]
    for problem in errors:
        if skip is not None:
            skip(problem)
    return writer.finish()


class _Writer:
    """Writes calls as they come; a single file, or calls without a layer of their own, only once all are known."""

    def __init__(
        self,
        out: Path,
        wanted: Wanted,
        declared: str | None,
        *,
        force: bool,
        told: Callable[[Path, tuple[str, ...]], None] | None,
    ) -> None:
        self.out, self.wanted, self.declared, self.force, self.told = out, wanted, declared, force, told
        self.one_file = out.suffix == _SUFFIX and not out.is_dir()
        # Of the calls left out because they are of another layer.
        self.other_layers: set[int] = set()
        self.held: list[DumpedCall] = []
        self.written: list[Path] = []

    @property
    def taken(self) -> bool:
        """Whether there is a call that was, or is to be, written or left out."""
        return bool(self.held or self.written or self.other_layers)

    def add(self, call: DumpedCall) -> None:
        """Take a call: write it, keep it for later, or leave it out because it is of another layer."""
        layer = call.stated.get("layer")
        if self.wanted.layer is not None and layer not in (None, self.wanted.layer):
            self.other_layers.add(layer)
        elif self.one_file or (self.wanted.layer is not None and layer is None):
            self.held.append(call)
        else:
            self._write(call)

    def finish(self) -> list[Path]:
        """Write what was kept. Raises InputError where nothing was or is to be written."""
        if len(self.held) > 1:
            what = "the dump holds several calls" if self.one_file else "several calls state no layer"
            hint = "name a folder to write to" if self.one_file else "--layer can name that of one call only"
            raise InputError(f"{what} ({self.held[0].source}, {self.held[1].source}, …): {hint}")
        for call in self.held:
            layer = call.stated.get("layer", self.wanted.layer)
            self._write(replace(call, stated={**call.stated, "layer": layer}))
        if not self.written and self.other_layers:
            known = ", ".join(map(str, sorted(self.other_layers)))
            raise InputError(f"no call is of layer {self.wanted.layer}: they are of {known}")
        if not self.written:
            raise InputError("none of the calls could be converted")
        return self.written

    def _write(self, call: DumpedCall) -> None:
        target = self.out if self.one_file else self.out / f"{call.name}{_SUFFIX}"
        if target in self.written:
            raise InputError(f"{call.source}: {target} was written from another call of this dump already")
        try:
            exists = target.exists()
        except OSError as error:  # a name too long
            raise InputError(
                f"{call.source}: cannot write {target}: {error.strerror}; convert it alone, to a .safetensors file"
            ) from None
        if exists and not self.force:
            raise InputError(f"{target} exists; choose another place, or say --force to overwrite it")
        capture, notes = _captured(call, self.wanted, self.declared)
        if not self.one_file:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"cannot make the folder {self.out}: {error.strerror}") from None
        self.written.append(capture.save(target))
        if self.told is not None:
            self.told(target, notes)


def _captured(call: DumpedCall, wanted: Wanted, declared: str | None) -> tuple[Capture, tuple[str, ...]]:
    """The capture, and the notes that it carries. Raises InputError where the tensors do not fit each other."""
    try:
        readings = call.readings(wanted)
        captures = readings.captures
        if declared is not None:
            captures = [replace(c, metadata=c.metadata.override(declared=declared)) for c in captures]
        capture, chosen = _settled(captures, readings.bases, readings.layout_open, readings.causal_open)
        capture, based = _with_base(capture, readings.bases)
    except InputError as error:
        raise InputError(f"{call.source}: {error}") from None
    if readings.layout_by_shape:
        chosen.insert(0, f"layout={capture.metadata.layout}: no other fits the shapes")
    if capture.metadata.scale is None:
        chosen.append("scale=1/sqrt(D) (default)")
    notes = tuple(dict.fromkeys((*call.notes, *capture.assumed, *chosen, *based)))
    metadata = replace(capture.metadata, notes="; ".join(notes))
    return replace(capture, metadata=metadata, assumed=()), notes


def _settled(
    readings: list[Capture], bases: tuple[LseBase, ...], layout_open: bool, causal_open: bool
) -> tuple[Capture, list[str]]:
    """The reading under which O (or LSE) is what attention gives, with what was found out; the first if none tells."""
    fits = {}
    for index, capture in enumerate(readings):
        if "o" in capture.tensors and (fit := out_fit(capture, DEFAULT_OBSERVATION, _CPU)) is not None:
            fits[index] = fit
    told_by = "O"
    if not fits:
        told_by, fits = "LSE", _fits_of_lse(readings, bases)
    good = [index for index, fit in fits.items() if fit.ok]
    place = min(good, key=lambda index: fits[index].error) if good else 0
    chosen = readings[place]
    m = chosen.metadata
    words = [w for w, is_open in ((f"layout={m.layout}", layout_open), (f"causal={m.causal}", causal_open)) if is_open]
    if good:
        error, few = fits[place].error, fits[place].few
        times = times_coarse(FitSubject(chosen, DEFAULT_OBSERVATION), _CPU) if told_by == "O" else None
        rounded = times is None or few or times <= _TIMES
        found = f"{told_by} {'agrees within' if rounded else 'is off by'} {error:.2g}"
        found += " (few rows have most of it)" if few else ""
        said = [f"{' and '.join(words)}: {found}, tried {len(readings)}" if words else found]
        if not rounded:
            misfit = (
                f"O{MISFIT} to rounding: it is off by {error:.2g}, {times:.2g} times what is expected of a kernel "
                "that rounds all it stores to 16 bits; O times a factor, tensors of two steps, or a kernel below 16 "
                "bits (--declared)?"
            )
            said = [*(said if words else ()), misfit]
        return chosen, said
    if fits:
        nearest = min(fits, key=lambda index: fits[index].error)
        least, taken = fits[nearest].error, "is assumed"
        # An O that has nothing to do with it is off by 1 and more.
        if least < min(1.0, fits.get(0, fits[nearest]).error / 2) and words:
            chosen, taken = readings[nearest], "is nearest"
            words = [f"{w.partition('=')[0]}={getattr(chosen.metadata, w.partition('=')[0])}" for w in words]
        return chosen, [
            f"O{MISFIT} (off by {least:.2g} or more"
            + (f"; {' and '.join(words)} {taken}" if words else "")
            + "): q or k from before RoPE or a norm, another scale, keys that are not in the dump, or heads and "
            "features in one axis (--head-dim)?"
        ]
    why = "in no row can O be compared (NaN, Inf or no key)" if "o" in chosen.tensors else "no O to check with"
    return chosen, [f"{' and '.join(words)}{UNCONFIRMED}{why}"] if words else []


def _fits_of_lse(readings: list[Capture], bases: tuple[LseBase, ...]) -> dict[int, OutputFit]:
    """The readings whose LSE is what attention gives in some base, by their place."""
    fits = dict[int, OutputFit]()
    for index, base in product(range(len(readings)), bases):
        capture = readings[index]
        if "lse" not in capture.tensors:
            continue
        fit = lse_fit(replace(capture, metadata=replace(capture.metadata, lse_base=base)), DEFAULT_OBSERVATION, _CPU)
        if fit is not None and fit.ok and (index not in fits or fit.error < fits[index].error):
            fits[index] = fit
    return fits


def _with_base(capture: Capture, bases: tuple[LseBase, ...]) -> tuple[Capture, list[str]]:
    """The capture with the base under which its LSE fits best, and what is to be said about it."""
    if "lse" not in capture.tensors:
        return capture, []
    readings = [replace(capture, metadata=replace(capture.metadata, lse_base=base)) for base in bases]
    fits = [lse_fit(reading, DEFAULT_OBSERVATION, _CPU) for reading in readings]
    known = [(fit.error, index) for index, fit in enumerate(fits) if fit is not None]
    best = readings[min(known)[1] if known else 0]
    if known and not any(fit.ok for fit in fits if fit is not None):
        base = f"; lse_base={best.metadata.lse_base} is assumed" if len(bases) > 1 else ""
        return best, [f"LSE{MISFIT} (off by {min(known)[0]:.2g} or more{base})"]
    if len(bases) == 1:
        return best, [f"LSE agrees within {min(known)[0]:.2g}"] if known else []
    how = f": LSE agrees within {min(known)[0]:.2g}" if known else f"{UNCONFIRMED}no row to check with"
    return best, [f"lse_base={best.metadata.lse_base}{how}"]


def _detected(path: Path) -> Kind:
    """What kind of dump ``path`` is. Raises InputError where it is none that is known."""
    if path.is_dir():
        if next(path.rglob(flashinfer.METADATA), None) is not None:
            return "flashinfer"
        return "sglang" if sglang.groups_of(path) else "torch"
    if path.name == flashinfer.METADATA or (path.parent / flashinfer.METADATA).is_file():
        return "flashinfer"
    if sglang.parse(path) is not None:
        raise InputError(f"{path}: a file of SGLang's dumper holds one tensor; name its folder")
    return "torch"


def _readers(path: Path, kind: Kind, wanted: Wanted) -> list[_Reader]:
    """What reads each call, forward pass or file of the dump; nothing is opened yet."""
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    if kind == "flashinfer":
        return _flashinfer_readers(path, wanted)
    if kind == "sglang":
        return _sglang_readers(path, wanted)
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in torch_save.SUFFIXES and not p.name.startswith("."))
        if not files:
            raise InputError(f"{path}: no dump in this directory (looked for {flashinfer.METADATA}, *.pt, *.pth)")
    elif path.suffix not in torch_save.SUFFIXES:
        raise InputError(f"{path}: expected a file ending in {', '.join(torch_save.SUFFIXES)}, or a folder of a dump")
    inside = [file.stem if file == path else "_".join(file.relative_to(path).with_suffix("").parts) for file in files]
    return [partial(torch_save.read_calls, *where, wanted.names) for where in zip(files, inside, strict=True)]


def _flashinfer_readers(path: Path, wanted: Wanted) -> list[_Reader]:
    if wanted.names:
        raise InputError("--map is of no use here: FlashInfer's dumps say which tensor is which")
    folders = flashinfer.call_folders(path)
    attention = [folder for folder in folders if flashinfer.is_attention(folder)]
    if not attention:
        raise InputError(f"{path}: no attention call among the {len(folders)} calls dumped there")
    return [partial(_flashinfer_call, folder) for folder in attention]


def _flashinfer_call(folder: Path) -> list[DumpedCall]:
    return [flashinfer.read_call(folder)]


def _sglang_readers(path: Path, wanted: Wanted) -> list[_Reader]:
    groups = sglang.groups_of(path)
    if not groups:
        raise InputError(f"{path}: no file of SGLang's dumper in this directory (name=…___rank=…___dump_index=….pt)")
    sglang.require_matches(groups, wanted.names)
    # Forward passes without any attention are passed over; where there are no others, the reader says why.
    groups = [files for files in groups if sglang.holds_call(files, wanted.names)] or groups
    parents = [files[0].path.parent for files in groups]
    prefixes = [parent.name if len(set(parents)) > 1 else "" for parent in parents]
    return [partial(sglang.read_calls, *group, wanted.names) for group in zip(groups, prefixes, strict=True)]
