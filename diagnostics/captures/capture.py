"""A capture: what went into one attention call and what came out of it, in memory or in a file (format 1)."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from attn_diag.captures.alibi import SLOPES
from attn_diag.captures.documents import Document, read_documents
from attn_diag.captures.dropout import KEPT
from attn_diag.captures.files import write_atomically
from attn_diag.captures.hardware import stored_profile
from attn_diag.captures.mask_gradient import GRADIENT
from attn_diag.captures.metadata import FORMAT_VERSION, PACKED_VERSION, Metadata
from attn_diag.captures.packed import is_packed, may_be_packed, with_cu_seqlens
from attn_diag.captures.paged import PagedKeys, stored, with_pages
from attn_diag.captures.places import place
from attn_diag.captures.shapes import require_fitting
from attn_diag.captures.sinks import with_sinks
from attn_diag.captures.sources import DEFAULT_OBSERVATION, KEYED, OBSERVED, TensorSource
from attn_diag.captures.tensors import as_tensor
from attn_diag.captures.validity import require_inputs, short
from attn_diag.errors import InputError
from attn_diag.printing import printable
from attn_diag.reference import Dropout
from attn_diag.results.wording import between, plural

# Tensors of a capture, beside what kernels returned, that hold nothing but what belongs to its heads.
_PLAIN = {"q", "k", "v", "do", "x", "w_q", "dq_pre"}


@dataclass(frozen=True, repr=False)
class Capture:
    """Inputs and observations of one attention layer.

    Raises InputError where tensors are missing, contradict each other, or are of a kind that is not supported.
    """

    tensors: Mapping[str, TensorSource]
    """Tensors, or lazy sources of them, by their names in capture format 1.

    ``q k v`` are required, [B, H, T, D] (or [B, T, H, D] with ``metadata.layout`` "BTHD"), k and v with Hk heads, Hq a
    multiple of Hk; v and o may have other features, Dv, than q and k (MLA). FP8 ones need ``q_descale``, ``k_descale``
    and ``v_descale``, [B, heads] or one number each. ``do`` like o; ``x`` [B, Tq, C]; ``w_q`` [D * heads, C]; ``mask``
    broadcastable to [B, H, Tq, Tk]; ``q_positions`` [Tq] (where other ranks have other rows, ``own_dk`` and ``own_dv``
    are the sums of the rank's own keys, [B, Hk, Tq, D]).
    ``o dq dk dv`` are laid out like the inputs, so is ``dq_pre``, the gradient of the query projection's output (before
    RoPE and QK-norm); ``lse delta`` are [B, Hq, Tq] in either layout. A bare output belongs to the observation
    "observed", "flash.o" to "flash".

    Attention sinks (format 1.1): ``sinks`` [Hq], a logit a head in the softmax's denominator (``s_aux``,
    ``learnable_sink`` and [1, Hq, 1, 1] are taken too), and their gradient ``dsinks`` [Hq], summed over rows and batch.

    The gradient of an additive mask (format 1.1): ``dmask`` of its shape, summed over the axes along which it is
    broadcast, a batch item's and head's of the whole call.

    ALiBi (format 1.1): ``alibi_slopes`` [Hq], or [B, Hq] ([documents, Hq] of packed sequences), in fp32 or less;
    ``metadata.alibi_origin`` says what the distance is counted from.

    Of a latent that k and v share (format 1.1; absorbed MLA, v = k[..., :Dv]): ``dkv`` like k, dk + [dv, 0].

    Dropout (format 1.1): ``dropout_mask``, bool [B, Hq, Tq, Tk], True where a probability was kept; the kernel
    multiplied what it kept by 1 / (1 - ``metadata.dropout_p``).

    Packed sequences (format 1.1): with ``cu_seqlens_q`` and ``cu_seqlens_k``, integers [documents + 1], documents lie
    one after the other along T of tensors whose B is 1 (or q, k, v, o and their gradients are [total, H, D], x is
    [total, C], lse and delta [H, total]). ``cu_seqlens`` is both, ``position_ids`` [total] that begin again at 0 with
    every document too. The documents are the batch items then, those without rows or keys left out, and so is padding
    behind the last; ``causal`` and ``window`` are each document's.

    A cache in pages (format 1.1): with ``page_table`` [B, pages of a sequence] (``block_table``) and ``cache_seqlens``
    [B] (``seqused_k``), k and v are [pages, page size, Hk, D], whatever the layout of q, [B, Hq, Tq, D] (or packed by
    ``cu_seqlens_q``, or [B, Hq, D]). ``cache_seqlens`` alone say how much of k and v [B, Hk, T, D] is used. The
    sequences become packed ones. k and v may be FP8 beside a wider q, with ``k_descale`` and ``v_descale``.
    """
    metadata: Metadata = field(default_factory=Metadata)
    """What it says about itself."""
    source: str = "memory"
    """Its file, or "memory"."""
    assumed: tuple[str, ...] = ()
    """What it does not state and was assumed, and how it was put together."""
    documents: tuple[Document, ...] | None = field(init=False, default=None, compare=False)
    """Of packed sequences: where each batch item lies; None where every sequence has its own place in B."""

    def __post_init__(self) -> None:
        tokens_first = "q" in self.tensors and len(self.tensors["q"].shape) == 3 and may_be_packed(self.tensors)
        if tokens_first:
            object.__setattr__(self, "metadata", replace(self.metadata, layout="BTHD"))
        tensors = with_pages(with_sinks(self.tensors), self.metadata.layout)
        object.__setattr__(self, "tensors", with_cu_seqlens(tensors))
        require_inputs(self.tensors, self.metadata)
        if is_packed(self.tensors):
            totals = (self.tensors[name].shape[3 - self._head_axis] for name in "qk")
            found, said = read_documents(self.tensors, *totals)
            object.__setattr__(self, "documents", found)
            object.__setattr__(self, "assumed", tuple(dict.fromkeys((*self.assumed, *said))))
        require_fitting(self.tensors, self.metadata)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any], **metadata: Any) -> Capture:
        """A capture in memory.

        Where ``selftest --hardware`` has measured the GPU that q is on, its note becomes part of the metadata.

        Args:
            tensors: By name, as ``Capture.tensors``, of torch, NumPy or JAX; None is left out.
            **metadata: The fields of ``Metadata``.
        """
        given = {name: as_tensor(name, t).detach() for name, t in tensors.items() if t is not None}
        if "q" in given and "hardware" not in metadata:
            profile = stored_profile(given["q"].device)
            metadata["hardware"] = None if profile is None else profile.note()
        return cls(given, Metadata(**metadata))

    def __repr__(self) -> str:
        m, q = self.metadata, self.tensors["q"]
        parts = [f"{name} {value}" for name in ("step", "layer") if (value := getattr(m, name)) is not None]
        parts += [m.extra["module"]] if m.extra.get("module") else []
        parts += [f"call {m.extra['call']}"] if m.extra.get("call", "0") != "0" else []
        parts += [f"rank {m.rank}"] if m.rank else []
        parts += [f"{plural(self.batch, 'document')}"] if self.documents else []
        parts += [f"q {m.layout} {list(q.shape)} {short(q.dtype)}", " ".join(n for n in self.tensors if n != "q")]
        return printable(f"<Capture {', '.join(parts)}; {self.source}>")

    @property
    def batch(self) -> int:
        """B, the number of sequences; of packed ones that of the documents."""
        return self.tensors["q"].shape[0] if self.documents is None else len(self.documents)

    @property
    def q_heads(self) -> int:
        """Hq, the number of query heads."""
        return self.tensors["q"].shape[self._head_axis]

    @property
    def kv_heads(self) -> int:
        """Hk, the number of key and value heads."""
        return self.tensors["k"].shape[self._head_axis]

    @property
    def q_length(self) -> int:
        """Tq, the number of query rows; of packed sequences that of the longest (see ``lengths``)."""
        return max(d.lengths[0] for d in self.documents) if self.documents else self._total("q")

    @property
    def k_length(self) -> int:
        """Tk, the number of keys; of packed sequences that of the longest (see ``lengths``)."""
        return max(d.lengths[1] for d in self.documents) if self.documents else self._total("k")

    def lengths(self, batch: int) -> tuple[int, int]:
        """Tq and Tk of one sequence.

        Args:
            batch: Index of the batch item.

        Returns:
            The number of its query rows, and of its keys.
        """
        return self.documents[batch].lengths if self.documents else (self._total("q"), self._total("k"))

    @property
    def head_dim(self) -> int:
        """D of q and k."""
        return self.tensors["q"].shape[3]

    @property
    def value_dim(self) -> int:
        """Dv, the features of v and o: D, or another number (128 beside a D of 192 in DeepSeek's MLA)."""
        return self.tensors["v"].shape[3]

    def sizes(self, batch: int | None = None) -> dict[str, int]:
        """B, Hq, Hk, Tq, Tk, D, and Dv where it is another.

        Args:
            batch: The sequence whose Tq and Tk they are; None: the longest of all.

        Returns:
            The sizes by name.
        """
        q_length, k_length = (self.q_length, self.k_length) if batch is None else self.lengths(batch)
        found = {"B": self.batch, "Hq": self.q_heads, "Hk": self.kv_heads, "Tq": q_length, "Tk": k_length}
        other = {} if self.value_dim == self.head_dim else {"Dv": self.value_dim}
        return {**found, "D": self.head_dim, **other}

    @property
    def scale(self) -> float:
        """alpha: as stated, else 1/sqrt(D)."""
        return self.metadata.scale if self.metadata.scale is not None else self.head_dim**-0.5

    @cached_property
    def observations(self) -> dict[str, tuple[str, ...]]:
        """The names of the observations, in a stable order, each with the outputs it holds."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            observation, _, output = name.rpartition(".")
            if output in OBSERVED:
                found.setdefault(observation or DEFAULT_OBSERVATION, []).append(output)
        return {name: tuple(sorted(outputs)) for name, outputs in sorted(found.items())}

    @property
    def is_plain(self) -> bool:
        """Whether its heads may be looked at beside another capture's: a mask, say, belongs to one capture alone."""
        outputs = {self.key(name, output) for name, found in self.observations.items() for output in found}
        return set(self.tensors) <= _PLAIN | outputs

    def key(self, observation: str, output: str) -> str:
        """The tensor name of an observation's output."""
        bare = observation == DEFAULT_OBSERVATION and output in self.tensors
        return output if bare else f"{observation}.{output}"

    def read(self, name: str, batch: int, head: int) -> Tensor | None:
        """One head of a tensor as stored.

        Args:
            name: As in ``tensors``; see ``key`` for an observation's output.
            batch: Index of the batch item.
            head: Index of the head in the capture (for k, v, dk and dv that of the key head).

        Returns:
            [T, D] ([T] for lse and delta); None where the capture lacks it.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        base = name.rpartition(".")[2]
        by_head = base in ("lse", "delta") or self._head_axis == 1
        if self.documents is None:
            return tensor[batch, head] if by_head else tensor[batch, :, head]
        where = self.documents[batch]
        part = where.keys if base in ("k", "v", *KEYED) else where.rows
        return tensor[0, head, part] if by_head else tensor[0, part, head]

    def read_x(self, batch: int) -> Tensor:
        """x of one sequence as stored.

        Args:
            batch: Index of the batch item.

        Returns:
            [Tq, C].

        Raises:
            KeyError: The capture lacks it.
        """
        x = self.tensors["x"]
        return x[batch] if self.documents is None else x[0, self.documents[batch].rows]

    def q_positions(self, batch: int) -> Tensor | None:
        """The positions of one sequence's query rows as stored.

        Args:
            batch: Index of the batch item.

        Returns:
            [Tq]; None where the rows are all of the sequence's.
        """
        positions = self.tensors.get("q_positions")
        if positions is None:
            return None
        return positions[...] if self.documents is None else positions[self.documents[batch].rows]

    def descale(self, name: str, batch: int, head: int) -> float:
        """The factor by which stored FP8 values of q, k or v are multiplied; 1 where none is stated."""
        factor = self.tensors.get(f"{name}_descale")
        if factor is None:
            return 1.0
        values = factor[...].double()
        if values.numel() == 1:
            return float(values)
        number = batch if self.documents is None else self.documents[batch].number
        return float(values[number if len(values) > 1 else 0, head])

    def sink(self, head: int) -> float | None:
        """The logit of one head's sink as stored, NaN and Inf included.

        Args:
            head: Index of the query head in the capture.

        Returns:
            The logit; None where there is no sink.
        """
        sinks = self.tensors.get("sinks")
        return self.metadata.softmax_offset if sinks is None else float(sinks[head].double())

    def alibi_slope(self, batch: int, head: int) -> float | None:
        """The slope of one head's ALiBi bias as stored, NaN and Inf included; None where there is none."""
        slopes = self.tensors.get(SLOPES)
        if slopes is None:
            return None
        number = batch if self.documents is None else self.documents[batch].number
        return float(slopes[head] if len(slopes.shape) == 1 else slopes[number, head])

    @property
    def has_sinks(self) -> bool:
        """Whether every head has a sink."""
        return "sinks" in self.tensors or self.metadata.softmax_offset is not None

    def mask(self, batch: int, head: int) -> tuple[Tensor, tuple[int, int]] | None:
        """The mask of one head as stored, [Tq or 1, Tk or 1], and which (batch, head) of the tensor it is.

        A mask that all sequences or heads share is their number 0. None where there is no mask.
        """
        mask = self.tensors.get("mask")
        if mask is None:
            return None
        lead = (1,) * (4 - len(mask.shape)) + tuple(mask.shape)
        index = (batch if lead[0] > 1 else 0, head if lead[1] > 1 else 0)
        place = index[4 - len(mask.shape) :] if len(mask.shape) > 2 else ()
        if self.documents is None:
            return (mask[place] if place else mask[...]), index
        where = self.documents[batch]
        part = mask[(*place, where.rows if lead[2] > 1 else slice(None))]
        return part[:, where.keys if lead[3] > 1 else slice(None)], index

    def dropout(self, batch: int, head: int) -> Dropout | None:
        """Which probabilities of one query head were kept, [Tq, Tk]; None without dropout."""
        kept, p = self.tensors.get(KEPT), self.metadata.dropout_p
        return None if kept is None or p is None else Dropout(kept[batch, head], p)

    @property
    def format_version(self) -> str:
        """That of the capture format which its tensors need."""
        newer = self.documents is not None or self.has_sinks or SLOPES in self.tensors or KEPT in self.tensors
        newer = newer or any(name.rpartition(".")[2] in (GRADIENT, "dkv") for name in self.tensors)
        return PACKED_VERSION if newer else FORMAT_VERSION

    def in_text(self) -> dict[str, str]:
        """Its metadata as text by key, with its dtype and, of packed sequences, how many documents there are.

        Returns:
            Text by key.
        """
        found = {**self.metadata.to_text(self.format_version), "dtype": short(self.tensors["q"].dtype)}
        if self.documents is not None:
            lengths = [d.lengths[0] for d in self.documents]
            found["documents"] = f"{len(lengths)} of {between(min(lengths), max(lengths))} rows"
        if isinstance(k := self.tensors["k"], PagedKeys):
            used = [page for pages in k.pages for page in pages]
            shared = f", {len(used) - len(set(used))} of them again" if len(set(used)) < len(used) else ""
            found["cache"] = f"{between(*k.span)} keys in pages of {k.page_size}; {len(used)}{shared}"
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the capture as safetensors, complete or not at all, to a path or a URL; return where it is.

        Raises:
            InputError: The folder cannot be written, or the disk is full.
        """
        target, text = place(path), self.metadata.to_text(self.format_version)
        tensors = {name: tensor[...].contiguous().cpu() for name, tensor in stored(self.tensors).items()}
        # safetensors refuses tensors that share memory, as views of one buffer or k passed as v do.
        storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
        for name, tensor in tensors.items():
            if storages.count(tensor.untyped_storage().data_ptr()) > 1:
                tensors[name] = tensor.clone()
        try:
            write_atomically(target, lambda temporary: save_file(tensors, temporary, text))
        except (SafetensorError, UnicodeEncodeError) as error:  # its own, also for a full disk; a name not in UTF-8
            raise InputError(f"cannot write {target}: {error}") from None
        return target

    def _total(self, name: str) -> int:
        return self.tensors[name].shape[3 - self._head_axis]

    @property
    def _head_axis(self) -> int:
        return 1 if self.metadata.layout == "BHTD" else 2


class Captures(list[Capture]):
    """A list that reads well at a prompt: one line a capture, at most 25 lines of 80 columns."""

    def __repr__(self) -> str:
        if not self:
            return "0 captures: nothing was captured yet"
        lines = [_one_line(repr(capture)) for capture in self[:_LISTED]]
        if len(self) > _LISTED:
            lines.append(f"… and {len(self) - _LISTED} more")
        lines.append("attn_diag.inspect_captures(…) judges them; [i].save(path) keeps one.")
        return "\n".join([f"{plural(len(self), 'capture')}:", *lines])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


_LISTED, _WIDTH = 20, 80


def _one_line(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
