"""Which run, and which of its ranks, this process is."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections import Counter

import torch

from attn_diag.errors import InputError

_log = logging.getLogger("attn_diag")
_begun: Counter[str] = Counter()


def rank() -> int:
    """This process's rank: of the process group, else of the launcher's environment, else 0.

    Raises:
        InputError: ``RANK`` is no whole number.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return _number("RANK", "0")


def world_size() -> int:
    """How many processes there are: likewise, else 1.

    Raises:
        InputError: ``WORLD_SIZE`` is no whole number.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return _number("WORLD_SIZE", "1")


def _number(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InputError(f"the environment's {name} must be a whole number, such as {default}, or unset, got {text!r}")
    return int(text)


def run_id(folder: str) -> str:
    """Agree on eight hex digits, the same on all ranks that capture: the first to come says which.

    Nobody waits for anybody, as not every rank need capture; a capture is told from others by its folder's name and
    by how many of that name this rank has begun.
    """
    mine = secrets.token_hex(4)
    if world_size() == 1:
        return mine
    key = f"attn_diag/{folder}/{_begun[folder]}"
    _begun[folder] += 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        try:
            store = torch.distributed.distributed_c10d._get_default_store()
            return str(store.compare_set(key, "", mine).decode())
        except Exception as error:  # a store of another kind
            _log.info("no run number from the process group's store: %s", error)
    agreed = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    return hashlib.sha256("\n".join([*agreed, key]).encode()).hexdigest()[:8]
