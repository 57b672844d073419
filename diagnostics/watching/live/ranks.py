"""Which process of how many this is, and the number that all captures of one run share."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections import Counter

import torch

_log = logging.getLogger("attn_diag")
_begun: Counter[str] = Counter()


def rank() -> int:
    """Of the process group, else of the launcher's environment, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Likewise, else 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def run_id(folder: str) -> str:
    """Eight hex digits, the same on all ranks that capture: the first to come says which.

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
