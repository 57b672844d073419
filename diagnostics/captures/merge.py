"""Captures that the ranks of one distributed run wrote of the same attention call, merged into one.

Data-parallel ranks hold other sequences of one batch: their batch items are stacked in the order of the ranks, packed
documents one after the other.
Context-parallel ranks (``sequence_ranks``) hold other rows of the same sequences: put in order, they are the whole.
Tensor-parallel ranks (another ``head_offset``) hold other heads of the same sequences: their heads are put side by
side. Nothing is read to merge but what must be equal on all ranks (w_q, shared masks, x of tensor-parallel ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from attn_diag.captures.alibi import SLOPES
from attn_diag.captures.capture import Capture
from attn_diag.captures.hops import without_hops
from attn_diag.captures.joined import JoinedSource, equal_bits
from attn_diag.captures.metadata import Metadata
from attn_diag.captures.sequence import joined_rows
from attn_diag.captures.sinks import OF_HEADS, summed
from attn_diag.captures.sources import CACHE, INPUTS, OBSERVED, PACKING, TensorSource
from attn_diag.captures.stacked import documents_axis, stacked_documents
from attn_diag.captures.sums import without_sums
from attn_diag.errors import InputError

# What may differ between the ranks of one call.
_OF_A_RANK = ("rank", "head_offset", "device", "hardware", "notes", "extra")
# Which have their heads second, whatever the layout.
_PER_ROW = ("lse", "delta", "dropout_mask")
_OF_ALL_SEQUENCES = ("w_q", "q_positions", "sinks")


def merged_over_ranks(captures: Iterable[Capture]) -> tuple[list[Capture], list[str]]:
    """Merge the captures that several ranks wrote of one call.

    Merged are captures of the same ``run``, ``module``, ``layer``, ``step`` and ``call`` that state different ranks,
    where everything but the batch (or, by ``head_offset``, the heads; by ``sequence_ranks`` and ``q_positions``, the
    rows) agrees. A capture without ``run`` never is, nor are those of different stages of a pipeline.

    Returns:
        The captures, merged ones at the place of the first; and what is to be said about it: ranks that are missing by
        ``world_size``, and captures that could not be merged, with the reason.
    """
    groups: dict[object, list[Capture]] = {}
    for capture in captures:
        groups.setdefault(_call_of(capture) or id(capture), []).append(capture)
    merged: list[Capture] = []
    said: list[str] = []
    for group in groups.values():
        if _call_of(group[0]) is None:
            merged += group
        elif len(group) == 1:
            merged.append(_alone(group[0]))
        else:
            results, words = _merge(group)
            merged += results
            said += words
    return merged, said


def ranks_of(merged: Capture) -> frozenset[str]:
    """Whose batch items a capture holds."""
    return frozenset(merged.metadata.extra.get("rank_of_items", str(merged.metadata.rank)).split(","))


def left_apart(merged: Iterable[Capture]) -> bool:
    """Whether ``merged_over_ranks`` could not merge all captures of some call."""
    calls = [call for call in map(_call_of, merged) if call is not None]
    return len(set(calls)) < len(calls)


def _call_of(capture: Capture) -> tuple[object, ...] | None:
    """What the captures of one call have in common; None where the run or the rank is not stated."""
    m = capture.metadata
    if "run" not in m.extra or m.rank is None:
        return None
    return m.extra["run"], m.extra.get("stage"), m.extra.get("module"), m.layer, m.step, m.extra.get("call")


def _world_size(capture: Capture) -> int:
    return _number(capture, "world_size", 0)


def _number(capture: Capture, name: str, default: int) -> int:
    stated = capture.metadata.extra.get(name, "")
    return int(stated) if stated.isdecimal() else default


def _sharing(capture: Capture) -> int:
    """How many ranks make the call: not those that have other stages of a pipeline."""
    return _world_size(capture) // max(1, _number(capture, "stage_ranks", 1))


def _alone(capture: Capture) -> Capture:
    if _sharing(capture) <= 1:
        return capture
    words = f"rank {capture.metadata.rank} alone, of {_world_size(capture)}"
    return replace(capture, assumed=(*capture.assumed, words))


def _merge(group: list[Capture]) -> tuple[list[Capture], list[str]]:
    """The captures of one call, merged as far as they agree, and the warnings."""
    group = sorted(group, key=_rank)
    group = [replace(capture, tensors=without_hops(without_sums(capture.tensors))) for capture in group]
    ranks = [_rank(capture) for capture in group]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        return group, [f"{_sources(group)}: not merged: several say rank {twice}; name only one of them"]
    # Which ranks have the same stage of a pipeline is not known, only how many.
    few = len(ranks) < _sharing(group[0])
    missing = [rank for rank in range(_world_size(group[0])) if rank not in ranks] if few else []
    said: list[str] = []
    if missing:
        said.append(f"{_sources(group)}: {_named(missing)} of {_world_size(group[0])} missing; the others are used")
    group, unjoined = _join_sequences(group)
    said += unjoined
    # The largest set of captures that agree comes first.
    alike: list[list[Capture]] = []
    for capture in group:
        matching = next((members for members in alike if _difference(members[0], capture) is None), None)
        if matching is None:
            alike.append([capture])
        else:
            matching.append(capture)
    alike.sort(key=len, reverse=True)
    for other in alike[1:]:
        why = _difference(alike[0][0], other[0])
        said.append(f"{_sources(other)}: not merged with {_named(map(_rank, alike[0]))}: {why}")
    results: list[Capture] = []
    for members in alike:
        try:
            results.append(_merge_alike(members, missing) if len(members) > 1 else members[0])
        except InputError as error:
            results += members
            said.append(f"{_sources(members)}: not merged: {error}")
    return results, said


def _join_sequences(group: list[Capture]) -> tuple[list[Capture], list[str]]:
    """With one capture for each group of ranks that share their sequences' rows, and what could not be joined."""
    by_ranks: dict[str, list[Capture]] = {}
    for capture in group:
        ranks = capture.metadata.extra.get("sequence_ranks")
        by_ranks.setdefault(f"{ranks} {capture.metadata.head_offset}" if ranks else f"alone {id(capture)}", []).append(
            capture
        )
    joined: list[Capture] = []
    said: list[str] = []
    for members in by_ranks.values():
        sharing = len(members[0].metadata.extra.get("sequence_ranks", "").split(","))
        if len(members) == 1:
            joined += members
            continue
        try:
            tensors, whole = joined_rows([c.tensors for c in members], members[0].metadata.layout, sharing)
            words = f"rows of {_named(map(_rank, members))} put together" + ("" if whole else ", others are missing")
            assumed = dict.fromkeys(note for capture in members for note in capture.assumed)
            metadata = replace(_metadata_of(members), rank=_rank(members[0]))
            joined.append(Capture(tensors, metadata, _sources(members), (*assumed, words)))
        except InputError as error:
            joined += members
            said.append(f"{_sources(members)}: rows not put together: {error}")
    return joined, said


def _difference(one: Capture, other: Capture) -> str | None:
    """Why two captures of a call cannot be merged, as far as can be told without reading them; None if they can."""
    for item in fields(Metadata):
        mine, yours = getattr(one.metadata, item.name), getattr(other.metadata, item.name)
        if item.name not in _OF_A_RANK and mine != yours:
            return f"{item.name} is {yours}, not {mine}"
    if lacking := set(one.tensors) ^ set(other.tensors):
        name = min(lacking)
        return f"only {_named([_rank(one if name in one.tensors else other)])} has {name}"
    for name in ("q", "k", "v", *one.tensors):
        mine, yours = one.tensors[name], other.tensors[name]
        if mine.dtype != yours.dtype and name not in PACKING:
            return f"{name} is {yours.dtype}, not {mine.dtype}"
        # Masks and descale factors may be shared by all sequences: their first axis tells nothing.
        free: int | None = None if name in _OF_ALL_SEQUENCES or name.rpartition(".")[2] in OF_HEADS else 0
        if one.documents is not None:
            free = documents_axis(name, one.metadata.layout)
        sizes = [[n for axis, n in enumerate(t.shape) if axis != free] for t in (mine, yours)]
        if len(mine.shape) != len(yours.shape) or sizes[0] != sizes[1]:
            return f"{name} has shape {list(yours.shape)}, not {list(mine.shape)}"
    return None


def _merge_alike(members: list[Capture], missing: list[int]) -> Capture:
    """One capture of all ``members``. Raises InputError where what they must share differs."""
    by_offset: dict[int, list[Capture]] = {}
    for capture in members:
        by_offset.setdefault(capture.metadata.head_offset, []).append(capture)
    for group in by_offset.values():
        _require_other_sequences(group)
    parts = [_stack_batches(by_offset[offset]) for offset in sorted(by_offset)]
    tensors = parts[0] if len(parts) == 1 else _join_heads(members[0], sorted(by_offset), parts)
    how = "batch items" if len(parts) == 1 else "heads" if len(parts) == len(members) else "batch items and heads"
    gone = f", {_named(missing)} missing" if missing else ""
    assumed = dict.fromkeys(note for capture in members for note in capture.assumed)
    words = f"{how} of {_named(map(_rank, members))} put together in this order{gone}"
    metadata = _metadata_of(members)
    owners: dict[str, list[int]] = {}
    if how == "batch items":
        owners["rank_of_items"] = [_rank(c) for c in members for _ in range(c.batch)]
    if how == "heads":
        in_order = sorted(members, key=lambda c: c.metadata.head_offset)
        owners["rank_of_heads"] = [_rank(c) for c in in_order for _ in range(c.q_heads)]
    extra = {name: ",".join(map(str, ranks)) for name, ranks in owners.items()}
    metadata = replace(metadata, extra={**metadata.extra, **extra})
    return Capture(tensors, metadata, _sources(members), (*assumed, words))


def _require_other_sequences(members: list[Capture]) -> None:
    """Raise InputError where two ranks saw the same sequences: they then hold other heads, and do not say which."""
    first = [capture.tensors["x"][0] for capture in members if "x" in capture.tensors]
    if any(equal_bits(a, b) for i, a in enumerate(first) for b in first[:i]):
        raise InputError("x is the same on two ranks (tensor parallelism?): state head_offset in the metadata")


def _stack_batches(members: list[Capture]) -> dict[str, TensorSource]:
    """The tensors of data-parallel ranks: batch items after each other."""
    tensors: dict[str, TensorSource] = {}
    if members[0].documents is not None and len(members) > 1:
        tensors = stacked_documents([capture.tensors for capture in members], members[0].metadata.layout)
        for name in {"w_q", "sinks", SLOPES} & members[0].tensors.keys() - tensors.keys():
            _require_equal(name, members)
            tensors[name] = members[0].tensors[name]
        for name in [n for n in members[0].tensors if n.rpartition(".")[2] == "dsinks"]:
            tensors[name] = summed([capture.tensors[name] for capture in members])
        return tensors
    for name in members[0].tensors:
        if name.rpartition(".")[2] not in INPUTS + OBSERVED:
            continue  # nobody reads it, and nobody knows which of its axes counts sequences
        sources = [capture.tensors[name] for capture in members]
        if len(members) == 1:
            tensors[name] = sources[0]
        elif name in _OF_ALL_SEQUENCES:
            _require_equal(name, members)
            tensors[name] = sources[0]
        elif name.rpartition(".")[2] == "dsinks" or _adds_up(name, sources[0], 4):
            tensors[name] = summed(sources)
        elif name in ("mask", SLOPES) or name.endswith("_descale"):
            tensors[name] = _stack_shared(name, members)
        else:
            tensors[name] = JoinedSource(tuple(sources), 0)
    return tensors


def _adds_up(name: str, source: TensorSource, axis: int) -> bool:
    """Whether a tensor is the gradient of a mask that all share along the axis so many from the last."""
    if name.rpartition(".")[2] != "dmask":
        return False
    return len(source.shape) < axis or source.shape[-axis] == 1


def _stack_shared(name: str, members: list[Capture]) -> TensorSource:
    """A mask, slopes, descale factors: one for all sequences where all ranks have the same one, else one a sequence."""
    sources = [capture.tensors[name] for capture in members]
    whole = 4 if name == "mask" else 2
    per_item = len(sources[0].shape) == whole
    shared = all(not per_item or source.shape[0] == 1 for source in sources)
    if shared and all(equal_bits(sources[0][...], source[...]) for source in sources[1:]):
        return sources[0]
    if not per_item:
        raise InputError(f"{name} differs between the ranks and has no batch axis ({list(sources[0].shape)})")
    parts: list[TensorSource] = []
    for source, capture in zip(sources, members, strict=True):
        # One that all batch items share is that of each of them.
        parts += [source] * (capture.batch // source.shape[0])
    return JoinedSource(tuple(parts), 0)


def _join_heads(
    first: Capture, offsets: Sequence[int], parts: Sequence[dict[str, TensorSource]]
) -> dict[str, TensorSource]:
    """The tensors of tensor-parallel ranks: heads side by side. ``parts``: one for each of ``offsets``."""
    heads = first.q_heads
    expected = list(range(offsets[0], offsets[0] + heads * len(parts), heads))
    if list(offsets) != expected:
        raise InputError(
            f"tensor-parallel ranks with {heads} heads each start at heads {_listed(offsets)}; expected "
            f"{_listed(expected)}: a rank between them is missing"
        )
    if len({part["q"].shape[0] for part in parts}) > 1:
        raise InputError(
            f"tensor-parallel ranks hold {_listed(part['q'].shape[0] for part in parts)} sequences; expected as many"
        )
    head_axis = 1 if first.metadata.layout == "BHTD" else 2
    tensors: dict[str, TensorSource] = {}
    for name in parts[0]:
        sources, base = tuple(part[name] for part in parts), name.rpartition(".")[2]
        if base in CACHE:  # the keys are read side by side then, as packed ones
            _same(name, sources)
            continue
        shape = sources[0].shape
        axis: int | None = 1 if base in _PER_ROW else head_axis
        if base == "w_q":
            axis = 0 if shape[0] == heads * first.head_dim else None
        elif _adds_up(name, sources[0], 3):
            tensors[name] = summed(sources)
            continue
        elif base in ("mask", "dmask"):
            axis = len(shape) - 3 if len(shape) > 2 and shape[-3] > 1 else None
        elif base.endswith("_descale"):
            axis = 1 if len(shape) == 2 else None
        elif base in (SLOPES, *OF_HEADS):
            axis = len(shape) - 1
        elif base in ("x", "q_positions", *PACKING):
            axis = None
        tensors[name] = _same(name, sources) if axis is None else JoinedSource(sources, axis)
    return tensors


def _same(name: str, sources: Sequence[TensorSource]) -> TensorSource:
    """The one tensor that tensor-parallel ranks must all hold. Raises InputError where they do not."""
    # By sequence: x of the whole batch may be large.
    pieces = range(sources[0].shape[0]) if name == "x" else (Ellipsis,)
    for source in sources[1:]:
        if not all(equal_bits(sources[0][piece], source[piece]) for piece in pieces):
            raise InputError(f"{name} differs between ranks that hold different heads of the same sequences")
    return sources[0]


def _require_equal(name: str, members: list[Capture]) -> None:
    first = members[0].tensors[name][...]
    for capture in members[1:]:
        if not equal_bits(first, capture.tensors[name][...]):
            raise InputError(
                f"{name} of rank {_rank(capture)} differs from that of rank {_rank(members[0])}, though both say "
                f"head_offset {capture.metadata.head_offset}: state head_offset if they hold different heads"
            )


def _metadata_of(members: list[Capture]) -> Metadata:
    """What all ranks say; what only each says of itself is kept with its rank."""
    all_metadata = [capture.metadata for capture in members]
    keys = dict.fromkeys(key for m in all_metadata for key in m.extra)
    extra = {key: _together([m.extra.get(key) for m in all_metadata], members) or "" for key in keys}
    hardware = {m.hardware for m in all_metadata}
    return replace(
        all_metadata[0],
        rank=None,
        head_offset=min(m.head_offset for m in all_metadata),
        device=", ".join(dict.fromkeys(m.device for m in all_metadata if m.device)) or None,
        hardware=hardware.pop() if len(hardware) == 1 else None,
        notes=_together([m.notes for m in all_metadata], members),
        extra={**extra, "ranks": ",".join(str(_rank(capture)) for capture in members)},
    )


def _together(values: list[str | None], members: list[Capture]) -> str | None:
    if len(set(values)) == 1:
        return values[0]
    return "; ".join(f"rank {_rank(c)}: {value}" for c, value in zip(members, values, strict=True) if value is not None)


def _rank(capture: Capture) -> int:
    assert capture.metadata.rank is not None
    return capture.metadata.rank


def _sources(members: Sequence[Capture]) -> str:
    """The first capture's source, and how many more there are."""
    rest = [_rank(capture) for capture in members[1:]]
    return members[0].source + (f" (and {_named(rest)})" if rest else "")


def _named(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {_listed(numbers)}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
