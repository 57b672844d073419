"""The main job: captures in, a Diagnosis out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Literal, cast

from attn_diag.analyses.inspection.capture_job import CaptureJob, Runs
from attn_diag.analyses.inspection.details import with_details
from attn_diag.analyses.inspection.joint import alike, run_alike
from attn_diag.analyses.inspection.pooling import adjust_family
from attn_diag.analyses.inspection.ranks import Ranks
from attn_diag.analyses.several import require_by_name
from attn_diag.analyses.verdicts.verdict import summarise
from attn_diag.captures.capture import Capture
from attn_diag.captures.given import Array, CallTensors, Source, captures_of, require_captures
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.captures.selection import Selection, select_place
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.captures.validity import unused_words
from attn_diag.errors import InputError
from attn_diag.head.baseline import require_known
from attn_diag.head.certification import Certify
from attn_diag.head.machine import describe_tool, pick_device, pick_devices, working_on
from attn_diag.head.read import read_head
from attn_diag.head.row_maxima import DEFINITIONS, Repeats, collector_of
from attn_diag.kernels import Recipe
from attn_diag.reference import reference_head
from attn_diag.results.diagnosis import Diagnosis, Family, NonFinite
from attn_diag.results.wording import listed
from attn_diag.statistics.means import require_level
from attn_diag.work import Progress, full_collections_later, map_in_order

if TYPE_CHECKING:
    from attn_diag.kernels.dump import Dump


DEFAULT_LEVEL = 0.01
# What inspecting a head leaves behind for its details, of all captures: 146 heads of T = 512 and D = 64, or one of
# T = 32k and D = 128. Heads beyond it are streamed once more.
_KEPT_BYTES = 2**28


def inspect(
    q: Source,
    k: Array | None = None,
    v: Array | None = None,
    *,
    o: Array | None = None,
    lse: Array | None = None,
    delta: Array | None = None,
    do: Array | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dkv: Array | None = None,
    x: Array | None = None,
    w_q: Array | None = None,
    dq_pre: Array | None = None,
    mask: Array | None = None,
    dmask: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    position_ids: Array | None = None,
    page_table: Array | None = None,
    cache_seqlens: Array | None = None,
    sinks: Array | None = None,
    dsinks: Array | None = None,
    alibi_slopes: Array | None = None,
    dropout_mask: Array | None = None,
    causal: bool | str | None = None,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    softmax_offset: float | None = None,
    alibi_origin: str | None = None,
    dropout_p: float | None = None,
    declared: str | None = None,
    layout: str | None = None,
    dump: Dump | None = None,
    recipes: Sequence[str | Recipe] = (),
    engine: str = "emulation",
    level: float = DEFAULT_LEVEL,
    device: str = "auto",
    certify: int | Certify | None = None,
    details: int | Literal["all"] = 0,
) -> Diagnosis:
    """Diagnose one attention call from its tensors, at a breakpoint or in a notebook; or captures of calls.

    Args:
        q, k, v: [B, H, T, D] and twice [B, Hk, Tk, D], in the dtype the kernel saw (BF16, FP16, FP32, FP64), as tensors
            of torch, NumPy or JAX. Or, in place of q alone, a Capture, a capture's file, a folder of them, or a list of
            these: options below then stand in place of what they state.
        o, do, dq: Like q.
        dk, dv: Like k.
        dkv: Like k, of a latent that is k and, in its first features, v (absorbed MLA): dk + [dv, 0].
        lse, delta: [B, H, T] fp32; lse in the natural logarithm.
        x, w_q: [B, T, C] and [D * H, C], the query projection's input and weight.
        dq_pre: Like q, the gradient of the projection's output: dW_Q is known also where RoPE or QK-norm follow it.
        mask, dmask, scale, window, softcap: The call's own; dmask, the gradient of an additive mask, of its shape.
        cu_seqlens_q, cu_seqlens_k: Of packed (varlen) sequences, integers [documents + 1]: where documents begin, and
            the last one ends; the second only where it is another. q, k, v, o and their gradients are [total, H, D]
            then, lse and delta [H, total] (or all with a batch of 1). Every document is a sequence of its own.
        position_ids: Instead of these, integers [total] that begin again at 0 with every document.
        page_table, cache_seqlens: Of a cache in pages: [B, pages of a sequence] and [B], with k and v [pages, page
            size, Hk, D]; the second alone: how much of k and v is used.
        sinks, dsinks: [H], the logits of attention sinks (as gpt-oss: one more key of value 0), and their gradient.
        softmax_offset: Instead of these, the logit that all heads have: 0 is the off-by-one softmax.
        alibi_slopes: [H] or [B, H], ALiBi's: -slope |t - j| is added to the scores, aligned as the causal mask is.
        alibi_origin: "row"; or "first-key" or "last-key", where slope j, or slope (j - Tk + 1), is added instead.
        dropout_mask, dropout_p: Of dropout: which probabilities were kept, bool [B, H, Tq, Tk], and how many are
            dropped in the mean; what was kept was multiplied by 1 / (1 - dropout_p).
        causal: True where Tq = Tk, else "top-left" or "bottom-right"; None: no mask.
        declared: The recipe below 16 bits ("fa3-fp8", "sage2", …) that the kernel is meant to be, and is held against.
        layout: "BTHD" for tensors with heads and time swapped; None: "BHTD".
        dump: What ``attn_diag.attention`` returned beside O, for the same q, k and v: its O, L, delta, recipe and
            options are taken from there.
        recipes: Run and judged beside the output; without any output, instead of it (default fa2).
        engine: What runs recipes: "emulation" or "triton".
        level: Significance after Benjamini-Hochberg.
        device: auto, cpu or cuda; or GPUs, "cuda:0,cuda:1" or "cuda:all": the reference of long heads is dealt out over
            them, all else runs on the first.
        certify: Recompute so many rows of every head (or those of a ``Certify``) in mpmath: is the reference right?
        details: Of so many heads, the worst, or "all", also find each rounding site's part (``attribution``) and follow
            one element of O (``microscope``): as long again as inspecting a head takes, or a few times that.

    Raises:
        InputError: As ``captures_of``.
    """
    require_by_name("inspect", k)
    given = {"o": o, "lse": lse, "delta": delta, "do": do, "dq": dq, "dk": dk, "dv": dv, "dkv": dkv, "x": x, "w_q": w_q,
             "dq_pre": dq_pre, "mask": mask, "dmask": dmask, "cu_seqlens_q": cu_seqlens_q,
             "cu_seqlens_k": cu_seqlens_k, "position_ids": position_ids, "page_table": page_table,
             "cache_seqlens": cache_seqlens, "sinks": sinks, "dsinks": dsinks, "alibi_slopes": alibi_slopes,
             "dropout_mask": dropout_mask, "dropout_p": dropout_p,
             "softmax_offset": softmax_offset, "alibi_origin": alibi_origin, "declared": declared, "causal": causal,
             "scale": scale, "window": window, "softcap": softcap, "layout": layout}  # fmt: skip
    call = cast(CallTensors, {name: value for name, value in given.items() if value is not None})
    if dump is None:
        captures, made_by = captures_of(q, k, v, call, function="inspect"), {}
    else:
        captures, made_by = [_dumped(dump, q, k, v, call)], {DEFAULT_OBSERVATION: dump.recipe}
    return inspect_captures(
        captures, recipes=recipes, engine=engine, made_by=made_by, level=level, device=device, certify=certify,
        details=details,
    )  # fmt: skip


def _dumped(dump: Dump, q: Source, k: Array | None, v: Array | None, call: CallTensors) -> Capture:
    """The capture of a call whose output ``attn_diag.attention`` dumped."""
    window = None if dump.window == (-1, -1) else dump.window
    o = dump.o.transpose(1, 2) if call.get("layout") == "BTHD" else dump.o
    if getattr(q, "ndim", 4) == 3:  # packed, [total, H, D]
        o = dump.o[0].transpose(0, 1)
    made: CallTensors = {"o": o, "lse": dump.lse}
    made |= {"causal": dump.causal, "scale": dump.scale, "window": window, "softcap": dump.softcap}
    made |= {} if dump.delta is None else {"delta": dump.delta}
    made |= {} if dump.sinks is None else {"sinks": dump.sinks}
    made |= {} if dump.alibi_slopes is None else {"alibi_slopes": dump.alibi_slopes}
    if dump.v is not None:  # in pages: the dump's rows are those of packed sequences, whatever was given
        q, k, v, made["o"] = dump.q, dump.k.transpose(1, 2), dump.v.transpose(1, 2), dump.o
        made |= {"page_table": dump.page_table, "cache_seqlens": dump.cache_seqlens, "layout": "BHTD"}
        made |= {"cu_seqlens_q": dump.cu_seqlens_q}
    elif dump.cu_seqlens_q is not None:
        made |= {"cu_seqlens_q": dump.cu_seqlens_q, "cu_seqlens_k": dump.cu_seqlens_k}
    (capture,) = captures_of(q, k, v, {**call, **made}, function="inspect")
    return replace(capture, metadata=replace(capture.metadata, kernel="attn_diag.attention", device=dump.backend))


@full_collections_later()
def inspect_captures(
    captures: Iterable[Capture],
    *,
    selection: Selection | None = None,
    recipes: Sequence[str | Recipe] = (),
    engine: str = "emulation",
    made_by: Mapping[str, Recipe] | None = None,
    level: float = DEFAULT_LEVEL,
    device: str = "auto",
    progress: Progress | None = None,
    unreadable: Sequence[str] = (),
    skip: Callable[[InputError], None] | None = None,
    certify: int | Certify | None = None,
    merge_ranks: bool = True,
    details: int | Literal["all"] = 0,
    ranks: Ranks | None = None,
) -> Diagnosis:
    """Diagnose captures; all their primary tests form one Benjamini-Hochberg family.

    Args:
        captures: The captures.
        selection: The observation, heads and batch items to look at.
        recipes: Names or Recipes, run beside the captured observations; where a capture has none, "fa2" is run.
        engine: By the "emulation", or by the "triton" kernels (CUDA, or interpreted).
        made_by: The recipes of captured observations, where they are known and need not be recognised.
        level, device, certify, details: As for ``inspect``.
        progress: Called with (done, total) after every head.
        unreadable: Inputs that could not be read, for the summary.
        skip: Called with the error of a capture among several that lacks what is selected, whose dtype no recipe
            covers, which changes while it is read, or on which the program fails; it is listed as unreadable too.
        merge_ranks: Captures that differ only in their rank become one (see ``attn_diag.captures.merge``), whose batch
            items (or heads) are those of all ranks.
        ranks: The processes among which captures are shared out; each is given all of them, and returns the diagnosis
            of all. None: this one alone.

    Raises:
        InputError: Unknown recipes, a level or number of details out of range, rows or a precision that cannot be
            certified and, without ``skip`` or where no capture is left, what it would skip.
    """
    require_level(level)
    if details != "all" and (not isinstance(details, int) or details < 0):
        raise InputError(f"details must be how many heads to look at closely, 0 or more, or 'all'; got {details!r}")
    details = sys.maxsize if details == "all" else details
    ranks = ranks or Ranks()
    runner = require_known(engine, recipes)
    certified = Certify.of(certify)
    where, *others = pick_devices(device)
    if others and ranks.count > 1:
        raise InputError("each process of torchrun has a GPU of its own: leave out --device, or torchrun")
    chosen, skipped, told = require_captures(captures, "inspect"), list(unreadable), list[str]()
    unused = _unused(chosen)
    if merge_ranks:
        chosen, told = merged_over_ranks(chosen)
    told += unused

    def leave_out(error: InputError) -> None:
        """One of several captures, which cannot be used; every rank does, and one says so."""
        assert skip is not None
        if ranks.rank == 0:
            skip(error)
        skipped.append(str(error))

    jobs: list[CaptureJob] = []
    for capture in chosen:
        runs = Runs(tuple(recipes), runner, dict(made_by or {}))
        keep = _KEPT_BYTES // len(chosen) if details else 0
        try:
            jobs.append(CaptureJob(capture, selection or Selection(), runs, where, level, certified, keep))
        except Exception as error:
            if skip is None or len(chosen) == 1:
                raise
            leave_out(_in_words(capture.source, error))
    costs = [job.head_count * job.capture.q_length * job.capture.k_length for job in jobs]
    places = ranks.share(costs)
    if ranks.count > 1 and where.type == "cuda":
        others = ranks.idle_devices(costs)
    devices = [where, *others]
    numbers = {id(jobs[place]): place for place in places}
    mine = [jobs[place] for place in places]
    for job in mine:
        job.patterns.beside = chosen
    counted = _Counted(progress, sum(job.head_count for job in mine))
    work = partial(run_alike, alone=skip is None or len(chosen) == 1, done=counted.add)
    ran, failed, taken_alone = dict[int, CaptureJob](), dict[int, InputError](), list[str]()
    with working_on(devices):
        for some in map_in_order(work, list(alike(mine)), parallel=all(job.takes_one_core for job in mine)):
            taken_alone += some.told
            failed |= {numbers[id(job)]: _in_words(job.capture.source, failure) for job, failure in some.failed}
            ran |= {numbers[id(job)]: job for job in some.ran}
    tested = [entry for job in ran.values() for entry in job.tested_entries()]
    adjusted, size = adjust_family(tested, ranks)
    judged = {id(e): e.judged(p, level) for e, p in zip(tested, adjusted, strict=True)}
    results = tuple(ranks.in_order([job.result(judged) for job in ran.values()], list(ran)))
    kept = ranks.in_order(list(ran), list(ran))
    told += chain.from_iterable(ranks.gather(taken_alone))
    for why in ranks.in_order(list(failed.values()), list(failed)):
        leave_out(why)
    if chosen and not results:
        raise InputError("none of the captures could be used")
    entries = [(c.source, o.name, h) for c in results for o in c.observations for h in o.heads if h.head is not None]
    warnings = tuple(told)
    warnings += tuple(_nonfinite_words(c.source, n) for c in results for n in c.nonfinite)
    warnings += tuple(
        f"{source}: {name} H{head.head}: {head.verdict.reasons[0]}"
        for source, name, head in entries
        if head.certificate is not None and not head.certificate.held and head.verdict is not None
    )
    diagnosis = Diagnosis(
        tool=describe_tool(where, len(others)),
        family=Family(size, level),
        captures=results,
        summary=summarise(entries, tuple(skipped), warnings),
    )
    if not details:
        return diagnosis
    with working_on(devices):
        done = {kept.index(place): job for place, job in ran.items()}
        return with_details(diagnosis, done, details, ranks, _after(progress, counted.total))


def _unused(captures: Iterable[Capture]) -> list[str]:
    """What is said of tensors of unknown names, once of captures that have the same."""
    found: dict[str, list[str]] = {}
    for capture in captures:
        if (said := unused_words(capture.tensors)) is not None:
            found.setdefault(said, []).append(capture.source)
    return [f"{listed(sources, 1)}: {said}" for said, sources in found.items()]


def _in_words(source: str, error: Exception) -> InputError:
    """Why one of many captures is left out; a failure of the program is not to cost the report of the others."""
    if isinstance(error, InputError):
        return error
    what = f"{type(error).__name__}: {error}"
    return InputError(f"{source}: left out by an internal error ({what}); inspect it alone with --debug to see where")


class _Counted:
    """Tells a listener how many heads of all are done, whichever thread did them."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.total, self._progress, self._done, self._lock = total, progress, 0, Lock()

    def add(self, count: int) -> None:
        """So many more."""
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self.total)


def _after(progress: Progress | None, before: int) -> Progress | None:
    """For work that counts on after ``before`` heads; None without a listener."""
    if progress is None:
        return None
    return lambda done, total: progress(before + done, before + total)


def repeated_maxima(
    capture: Capture, batch: int = 0, head: int | None = None, *, recipe: Recipe | None = None, device: str = "auto"
) -> dict[str, Repeats | None]:
    """Where one head's row maxima are repeated, row by row.

    Args:
        capture: The capture.
        batch: Index of the batch item.
        head: The model's number of the head; None: the capture's first.
        recipe: Needed for "as_run", which is None without it.
        device: auto, cpu or cuda.

    Returns:
        Multiplicities [Tq] and positions by definition; ``Repeats.values``: sign and exponent of V at the positions.

    Raises:
        InputError: The capture lacks the head or batch item.
    """
    batch, index = select_place(capture, batch, head)
    inputs = read_head(capture, batch, index, pick_device(device))
    collector = collector_of(inputs, recipe)
    reference_head(replace(inputs.head, do=None), collector.add)
    return {definition: collector.repeats(definition) for definition in DEFINITIONS}


def _nonfinite_words(source: str, found: NonFinite) -> str:
    where = f"in {found.tensor}, first at {list(found.first)}"
    if found.tensor == "mask":
        return f"{source}: {found.count} NaN or +Inf {where}: leave a key out with -Inf; rows that see it are left out"
    return f"{source}: {found.count} NaN or Inf {where}"
