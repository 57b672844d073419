"""A folder for one run alone: a marker for each rank, whose lock the system takes back when the process dies."""

from __future__ import annotations

import logging
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from attn_diag.captures.places import is_remote, reached
from attn_diag.errors import InputError
from attn_diag.printing import printable

_log = logging.getLogger("attn_diag")
# Locks of some network file systems are the process's, not the open file's: they do not part its own recorders.
_mine: set[Path] = set()

IfTaken = Literal["stop", "another"]


@dataclass(frozen=True)
class Claim:
    """A folder that no other run of this rank captures into."""

    folder: Path
    _marker: Path
    _handle: int

    def lost(self) -> bool:
        """Whether the folder was removed, and made anew by another run."""
        return self._marker.exists() and not _same(self._marker, self._handle)

    def release(self) -> None:
        """Remove the marker."""
        if _same(self._marker, self._handle):
            with suppress(OSError):
                self._marker.unlink()
        self.leave()

    def leave(self) -> None:
        """Let go of it in a forked child: marker and lock are the parent's."""
        _mine.discard(self._marker)
        os.close(self._handle)


@dataclass(frozen=True)
class RemoteClaim:
    """A folder of an object store, marked as this run's by an object: a store has no locks."""

    folder: Path
    _marker: Path

    def lost(self) -> bool:
        """Never: nothing is written under another name than this run's."""
        return False

    def release(self) -> None:
        """Remove the marker."""
        with suppress(Exception):
            self._marker.unlink()

    def leave(self) -> None:
        """Let go of it in a forked child: the marker is the parent's."""


def claim(folder: Path, rank: int, run: str, if_taken: IfTaken) -> Claim | RemoteClaim:
    """Make a folder and mark it as this run's.

    The marker, ".attn-diag-rank<rank>", says which run captures, on which host and in which process. One that a killed
    process left behind is taken over, unless that was on another host or the folder's file system has no locks, as an
    object store: then nobody can tell whether its run is over.

    Args:
        folder: The one asked for.
        rank: Each of a run's ranks has a marker of its own.
        run: What the ranks of one run agree on; see ``run.run_id``.
        if_taken: Where another run captures into the folder, or has: "stop", or take "another": the first of
            <folder>-2, <folder>-3, … that is new or that another rank of this run has taken.

    Raises:
        InputError: The folder cannot be written; or it is taken, and ``if_taken`` is "stop".
    """
    place, numbers = folder, count(2)
    found: Claim | RemoteClaim | str
    while True:
        try:
            if is_remote(place):
                found = _try_remote(place, rank, run, alone=if_taken == "another")
            else:
                place.mkdir(parents=True, exist_ok=True)
                found = _try(place, rank, run, alone=if_taken == "another")
        except OSError as error:
            raise InputError(f"cannot capture into {place}: {error.strerror}; choose another folder") from None
        if not isinstance(found, str):
            if place != folder:
                _log.warning("%s is another run's: capturing into %s", folder, place)
            return found
        if if_taken == "stop":
            raise InputError(f'{found}; choose a new folder, or have one chosen by if_taken="another"')
        place = folder.absolute().with_name(f"{folder.absolute().name}-{next(numbers)}")


def _try(folder: Path, rank: int, run: str, *, alone: bool) -> Claim | str:
    """The claim, or by whom the folder is taken; ``alone``: by any rank of another run."""
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot capture into {folder}: no permission to write; choose another folder")
    marker, whose = folder.resolve() / f".attn-diag-rank{rank}", str(rank)
    if marker in _mine:
        return f"this process captures into {folder} already, as rank {rank}"
    if alone:
        held = [_held(other) for other in folder.resolve().glob(".attn-diag-rank*")]
        if run not in held:
            whose = "*"
            if any(held):
                return f"{folder} is marked by another run"
    if there := next(folder.glob(f"step*_rank{whose}.safetensors"), None):
        return f"{folder} holds captures of an earlier run ({there.name}, …)"
    while True:
        new = not os.path.lexists(marker)
        try:
            handle = _open(marker, os.O_CREAT | os.O_EXCL if new else 0)
        except PermissionError:
            return f"{folder} is marked by another user's run"
        except (FileExistsError, FileNotFoundError):
            if not folder.exists():
                raise
            continue  # its owner has just made or removed it
        try:
            why = _taken(marker, handle, new=new)
            if why is None and _same(marker, handle):
                os.truncate(handle, 0)
                os.write(handle, f"{run}\n{platform.node()}\n{os.getpid()}\n".encode())
                _mine.add(marker)
                return Claim(folder, marker, handle)
        except OSError:
            os.close(handle)
            raise
        os.close(handle)
        if why is not None:
            return f"{folder} is taken: {why}"


def _try_remote(folder: Path, rank: int, run: str, *, alone: bool) -> RemoteClaim | str:
    """As ``_try``, by what the store lists."""
    with reached(folder, "captured into"):
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        markers = {name for name in names if name.startswith(".attn-diag-rank")}
        runs = {(folder / name).read_text() for name in markers}
        marker = folder / f".attn-diag-rank{rank}"
        if marker.name in markers or (alone and runs - {run}):
            return f"{folder} is another run's, or was until it was killed: delete its .attn-diag-rank* if it is over"
        mine = "" if alone and run not in runs else f"_rank{rank}"
        there = next((n for n in names if n.startswith("step") and n.endswith(f"{mine}.safetensors")), None)
        if there is not None:
            return f"{folder} holds captures of an earlier run ({there}, …)"
        marker.write_text(run)
    return RemoteClaim(folder, marker)


def _held(marker: Path) -> str | None:
    """The run that holds a marker, or may hold it; None: nobody."""
    try:
        handle = _open(marker)
    except FileNotFoundError:
        return None
    except PermissionError:
        return "another user's"
    try:
        return None if _taken(marker, handle) is None else _read(handle)[0] or "unknown"
    finally:
        os.close(handle)


def _open(marker: Path, how: int = 0) -> int:
    """Open a file that may be anything: neither a link's target nor a pipe is waited for."""
    how |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(marker, os.O_RDWR | how, 0o666)


def _taken(marker: Path, handle: int, *, new: bool = False) -> str | None:
    """By whom a marker is held, or may be; None: nobody."""
    locked = _locked(handle)
    _, host, process = _read(handle)
    whose = f"process {process or 'unknown'} on {host or 'an unknown host'} captures there as {marker.name[11:]}"
    if locked is False:
        return f"{whose} (processes of one run need RANK, or an initialised process group, before they capture)"
    if new or (locked and host in ("", platform.node())):
        return None
    return f"{whose}, or did until it was killed: delete {marker} if it is over"


def _locked(handle: int) -> bool | None:
    """Lock an open file until it is closed; False where somebody else has, None where there are no locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


def _same(marker: Path, handle: int) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(marker.stat(), os.fstat(handle))
    except OSError:
        return False


def _read(handle: int) -> list[str]:
    """Run, host and process of a marker; empty where it does not say."""
    os.lseek(handle, 0, os.SEEK_SET)
    lines = os.read(handle, 1000).decode(errors="replace").split("\n")
    return [printable(line) for line in [*lines, "", "", ""][:3]]
