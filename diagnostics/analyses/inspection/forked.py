"""Captures shared out over processes forked from this one, as threads of one wait for Python's lock half the time."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from attn_diag.analyses.inspection.groups import takes_one_core
from attn_diag.analyses.inspection.ranks import Ranks
from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.head.machine import pick_device

# Heads for which a process is worth while, about a second of work; and how many there are at most, each of which needs
# some 200 MB of its own.
_HEADS, _MOST = 64, 16
# Of linux/prctl.h: the signal that a process is sent as its parent ends.
_PR_SET_PDEATHSIG = 1
# A message begins so: what a process has is in it, or what it failed with.
_HAS, _FAILED = b"+", b"-"
# How long a process may take to put away what it is writing.
_GRACE_S = 5.0


class _StoppedError(BaseException):
    """A forked process is to end, and to leave nothing half-written behind."""


def processes_worth(captures: Sequence[Capture], device: str) -> int:
    """Over how many processes a command shares captures out: one for each core, where there is enough for each.

    It is this one alone where heads are so long that each takes all cores, on a GPU, and where a fork is not safe:
    beside other threads, which may hold locks, and on other systems than Linux.

    Args:
        captures: The captures.
        device: auto, cpu or cuda.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or device not in ("auto", "cpu"):
        return 1
    if pick_device(device).type != "cpu" or not all(takes_one_core(capture) for capture in captures):
        return 1
    heads = sum(capture.q_heads * capture.batch for capture in captures)
    return max(min(torch.get_num_threads(), len(captures), heads // _HEADS, _MOST), 1)


@contextmanager
def forked_ranks(count: int) -> Iterator[Ranks]:
    """This process and ``count`` - 1 forked ones, each of which runs the block, on one core, and ends with it.

    What one of them fails with is raised in this one, where they ``gather``; none of them outlives this one. Where the
    system gives no such process, this one is alone.

    Raises:
        InputError: One of them was ended from outside.
    """
    if count < 2:
        yield Ranks()
        return
    threads, pipes = torch.get_num_threads(), [Pipe() for _ in range(count - 1)]
    # More would hang in a forked process: OpenMP's threads are not copied.
    torch.set_num_threads(1)
    children, parent = list[int](), os.getpid()
    try:
        for rank, (_, own) in enumerate(pipes, 1):
            if (child := _fork()) is None:
                break
            if child == 0:
                try:
                    _end_with(parent)
                    for end in (end for pipe in pipes for end in pipe if end is not own):
                        end.close()
                    yield Ranks(rank, count, partial(_of_child, own, rank, count))
                except _StoppedError:
                    pass
                except BaseException as error:
                    _tell(own, error)
                finally:
                    os._exit(0)
            children.append(child)
        for _, theirs in pipes:
            theirs.close()
        if len(children) < count - 1:
            _stop(children)
            torch.set_num_threads(threads)
            yield Ranks()
            return
        yield Ranks(0, count, partial(_of_parent, [ours for ours, _ in pipes]))
    except BaseException:
        _stop(children)
        raise
    finally:
        for ours, _ in pipes:
            ours.close()
        for child in children:
            os.waitpid(child, 0)
        torch.set_num_threads(threads)


def _fork() -> int | None:
    """As ``os.fork``; None where the system gives no further process."""
    with warnings.catch_warnings(), suppress(OSError):
        # Of OpenBLAS's threads, which it ends before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
    return None


def _end_with(parent: int) -> None:
    """In a forked process: SIGTERM, which also comes as the parent ends, unwinds it."""

    def stop(*_: object) -> None:
        raise _StoppedError

    signal.signal(signal.SIGTERM, stop)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        stop()


def _stop(children: list[int]) -> None:
    """Let processes put away what they write, and end those that do not; none is left in ``children``."""
    for child in children:
        os.kill(child, signal.SIGTERM)
    until = time.monotonic() + _GRACE_S
    while children:
        if os.waitpid(children[0], os.WNOHANG)[0]:
            del children[0]
        elif time.monotonic() < until:
            time.sleep(0.01)
        else:
            os.kill(children[0], signal.SIGKILL)
            os.waitpid(children.pop(0), 0)


def _of_child(parent: Connection, rank: int, count: int, own: Any) -> list[Any]:
    parent.send_bytes(_HAS + pickle.dumps(own))
    others = [pickle.loads(parent.recv_bytes()) for _ in range(count - 1)]
    return [*others[:rank], own, *others[rank:]]


def _of_parent(children: Sequence[Connection], own: Any) -> list[Any]:
    said = [pickle.dumps(own)]
    for child in children:
        with _while_it_lives():
            message = child.recv_bytes()
        said.append(message[1:])
        if message[:1] == _FAILED:
            raise pickle.loads(said[-1])
    # Passed on as they are: all put them together at the same time.
    for rank, child in enumerate(children, 1):
        with _while_it_lives():
            for one in (one for i, one in enumerate(said) if i != rank):
                child.send_bytes(one)
    return [own, *map(pickle.loads, said[1:])]


@contextmanager
def _while_it_lives() -> Iterator[None]:
    """A process that has ended is told of; a message that was cut off, or that nobody takes, is an OSError."""
    try:
        yield
    except (EOFError, OSError):
        raise InputError(
            "a process that inspected some of the captures was ended from outside (out of memory?); name fewer "
            "captures at a time, or set OMP_NUM_THREADS=1 for one process"
        ) from None


def _tell(parent: Connection, error: BaseException) -> None:
    """Tell of a failure, and where it was; a parent that is gone, or that fails as well, does not listen."""
    where = f"In a forked process:\n{traceback.format_exc()}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(where)
    with suppress(OSError):
        parent.send_bytes(_FAILED + pickle.dumps(error))
