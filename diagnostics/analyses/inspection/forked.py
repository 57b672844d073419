"""Captures shared out over processes forked from this one, as threads of one wait for Python's lock half the time."""

from __future__ import annotations

import os
import signal
import sys
import threading
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


class _FailedError(Exception):
    """What a process failed with is its argument."""


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

    What one of them fails with is raised in this one, where they ``gather``.

    Raises:
        InputError: One of them was ended from outside.
    """
    if count < 2:
        yield Ranks()
        return
    threads, pipes = torch.get_num_threads(), [Pipe() for _ in range(count - 1)]
    # More would hang in a forked process: OpenMP's threads are not copied.
    torch.set_num_threads(1)
    children: list[int] = []
    try:
        for rank, (_, own) in enumerate(pipes, 1):
            with warnings.catch_warnings():
                # Of OpenBLAS's threads, which it ends before a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                try:
                    for end in (end for pipe in pipes for end in pipe if end is not own):
                        end.close()
                    yield Ranks(rank, count, partial(_of_child, own, rank))
                except BaseException as error:
                    _tell(own, error)
                finally:
                    os._exit(0)
            children.append(child)
        for _, theirs in pipes:
            theirs.close()
        yield Ranks(0, count, partial(_of_parent, [ours for ours, _ in pipes]))
    except BaseException:
        for child in children:
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        for ours, _ in pipes:
            ours.close()
        for child in children:
            os.waitpid(child, 0)
        torch.set_num_threads(threads)


def _of_child(parent: Connection, rank: int, own: Any) -> list[Any]:
    parent.send(own)
    others: list[Any] = parent.recv()
    return [*others[:rank], own, *others[rank:]]


def _of_parent(children: Sequence[Connection], own: Any) -> list[Any]:
    found = [own]
    for child in children:
        try:
            found.append(child.recv())
        except EOFError:
            raise InputError(
                "a process that inspected some of the captures was ended from outside (out of memory?); name fewer "
                "captures at a time, or set OMP_NUM_THREADS=1 for one process"
            ) from None
        if isinstance(found[-1], _FailedError):
            raise found[-1].args[0]
    for rank, child in enumerate(children, 1):
        child.send([one for i, one in enumerate(found) if i != rank])
    return found


def _tell(parent: Connection, error: BaseException) -> None:
    """Tell of a failure; a parent that is gone, or that fails as well, does not listen."""
    with suppress(OSError):
        try:
            parent.send(_FailedError(error))
        except OSError:
            raise
        except Exception:  # what cannot be pickled
            parent.send(_FailedError(RuntimeError(f"{type(error).__name__}: {error}")))
