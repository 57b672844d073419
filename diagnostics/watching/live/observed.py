"""``attn_diag.observe``: an attention function that nobody knows is seen as the known ones are."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args, overload

import torch
from torch import Tensor

from attn_diag.captures.metadata import Causal
from attn_diag.errors import InputError
from attn_diag.results.wording import plural
from attn_diag.watching.live import intercept
from attn_diag.watching.live.axes import mask_with_four_axes, with_four_axes
from attn_diag.watching.live.declared import declare_operator
from attn_diag.watching.live.hops import RingHops
from attn_diag.watching.live.rings import WINDOW, Order, merged
from attn_diag.watching.live.sites import AttentionSite, Fields, LayOut, gradients, turned, unchanged
from attn_diag.watching.live.tap import Tap

Given = ParamSpec("Given")
Result = TypeVar("Result")
Layout = Literal["BHTD", "BTHD"]
_LAYOUTS: dict[Layout, LayOut] = {"BHTD": unchanged, "BTHD": turned}
_log = logging.getLogger("attn_diag")
INSIDE = (
    "%s is observed, and calls attention that is known: that is captured and judged, with what it was given, and not "
    "what %s does around it, which attn-diag probe tries (with as many heads of k as of q)"
)
_RETURNS, _GRADIENTS = ("o", "lse"), ("dq", "dk", "dv")
# What functions call these -> what we do.
_NAMES: dict[str, tuple[str, ...]] = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "mask": ("mask", "attn_mask", "attention_mask"),
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "window": ("window", "window_size", "sliding_window"),
    "softcap": ("softcap",),
    "group": ("group", "process_group"),
}


@overload
def observe(function: Callable[Given, Result], /) -> Callable[Given, Result]: ...
@overload
def observe(
    operator: str, /, *, backward: str = ..., arguments: Mapping[str, str] | None = ...,
    returns: Sequence[str | None] = ..., backward_returns: Sequence[str | None] = ..., layout: Layout = ...,
    causal: Causal | bool | None = ..., scale: float | None = ..., window: tuple[int, int] | None = ...,
    softcap: float | None = ...,
) -> None: ...  # fmt: skip
@overload
def observe(
    *, layout: Layout = ..., returns_layout: Layout | None = ..., causal: Causal | bool | None = ...,
    scale: float | None = ..., window: tuple[int, int] | None = ..., softcap: float | None = ...,
    ring: Order | None = ...,
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]: ...  # fmt: skip
def observe(
    function: Callable[Given, Result] | str | None = None,
    /,
    *,
    backward: str = "",
    arguments: Mapping[str, str] | None = None,
    returns: Sequence[str | None] = _RETURNS,
    backward_returns: Sequence[str | None] = _GRADIENTS,
    layout: Layout = "BHTD",
    returns_layout: Layout | None = None,
    causal: Causal | bool | None = None,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    ring: Order | None = None,
) -> Any:
    """Have an attention function or operator of your own seen by ``capture``, ``Monitor``, ``break_if`` and ``last``.

        @attn_diag.observe(causal=True)
        def my_attention(q, k, v): ...

    Its arguments q, k and v (or query, key and value) are the operands, and it returns O, or a tuple that begins
    with O, its heads apart or side by side ([B, Tq, H * Dv]); an LSE [B, H, Tq] in fp32 may follow. What it is
    given under their usual names (mask or attn_mask, causal or is_causal, scale, softmax_scale or sm_scale, window,
    softcap) is read off each call; what it fixes itself is stated here. Where several fused operators or known
    functions run inside, those are told of instead. The function and its gradients keep their bits; while nothing
    listens a call costs a microsecond. Inside a compiled graph it is a part of that graph, and not seen. Of a function
    or operator that writes into its q, k, v, mask or dO it is told, and held is what it was given (copies of wanted
    calls); keys that it puts into a cache are its own. Where O is that of what it left there, the call is not judged.

    A registered operator (``torch.library.custom_op``) is seen there too, by its name:

        attn_diag.observe("mylib::attention", backward="mylib::attention_backward")

    Its arguments are known by the same names, those of the backward also as o (or out), lse (logsumexp, softmax_lse)
    and do (dout, grad_out, grad), or by what ``arguments`` says. What else is a tensor is refused by its name. While
    nothing listens a call costs nothing. The backward is the operator that the autograd formula calls: it must be
    given O, by which it is known as its forward's; without one no gradients are captured.

    Args:
        function: Of q, k and v; or the name of an operator, "namespace::name".
        backward: Of an operator: the name of the one that does its backward.
        arguments: Of an operator: which argument is "q", "k", "v", "o", "lse", "do", "mask", "causal", "scale",
            "window", "softcap" or "dropout_p", where it has another name: {"q": "queries"}.
        returns: Of an operator: its results in their order, by name ("o", "lse") or None; the LSE may be left out.
        backward_returns: Of its backward: likewise, of "dq", "dk" and "dv".
        layout: Of q, k, v and O: "BHTD" or "BTHD"; of a function's, three axes [N, T, D] are N sequences of one head.
        returns_layout: Of a function's O, where it has another: "BTHD" of one that is given "BHTD", say.
        causal: "none", "top-left" or "bottom-right"; True is "top-left". Of an operator with an argument for it also
            what True means there.
        scale: alpha; None: 1 / sqrt(D).
        window: How many keys to the left and to the right a row sees.
        softcap: c of c tanh(S / c).
        ring: For ring attention: q, k and v are this rank's rows, and the function calls a fused operator for each
            rank's keys, its own first, then those of the rank before it, and so on. Told of is the whole, with all
            keys, not a hop. Which rows each rank has: "contiguous" (the first ones rank 0), "zigzag" (of twice as many
            pieces as ranks, rank 0 has the first and the last) or "striped" (rank 0 has every n-th). The ring's process
            group is read off the argument ``group`` or ``process_group``; else all ranks are one ring.

    Returns:
        The function, observed; without ``function`` what makes it so; None for an operator.

    Raises:
        InputError: The function or operator has no arguments for q, k and v; there is no such operator, or it lacks an
            argument or result that is named; or an option is not one of those.
    """
    of_operators = {"backward": backward, "arguments": arguments}
    if isinstance(function, str) and returns_layout:
        raise InputError("returns_layout is of functions: an operator's layout is that of its O too")
    if given := [name for name, value in of_operators.items() if value and not isinstance(function, str)]:
        raise InputError(f"{' and '.join(given)} are of operators, which are observed by name")
    if function is None:
        return functools.partial(
            observe,
            **{"layout": layout, "returns_layout": returns_layout, "causal": causal, "scale": scale, "window": window,
               "softcap": softcap, "ring": ring},
        )  # fmt: skip
    for name, stated_layout in (("layout", layout), ("returns_layout", returns_layout or layout)):
        if stated_layout not in get_args(Layout):
            raise InputError(f'{name} must be "BHTD" or "BTHD", got {stated_layout!r}')
    if ring is not None and ring not in get_args(Order):
        raise InputError(f"ring must be one of {', '.join(get_args(Order))}, or None, got {ring!r}")
    stated = {"causal": _alignment(causal), "scale": scale, "window": window, "softcap": softcap}
    if isinstance(function, str):
        if ring is not None:
            raise InputError("ring is of functions: observe the one that calls the operator for each rank's keys")
        results = {"returns": returns, "backward_returns": backward_returns}
        return declare_operator(
            function, backward=backward, arguments=arguments or {}, layout=layout, stated=stated, **results
        )
    names = _names_of(function)
    label = f"{function.__module__}.{function.__qualname__}"

    def read(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:
        given = {name: a[theirs] for name, theirs in names.items() if a.get(theirs) is not None}
        o, *more = result if isinstance(result, tuple) else (result,)
        q, k, v = (given.pop(name) for name in "qkv")
        group = given.pop("group", None)
        lay_out = _of_operands(label, q, layout)
        rows = lay_out(q).shape[:3]
        lay_out_result = _of_result(label, o, q, rows, returns_layout or layout)
        lse = next((t for t in more if isinstance(t, Tensor) and t.shape == rows and t.dtype == torch.float32), None)
        if "causal" in given:
            given["causal"] = _alignment(given["causal"])
        if "mask" in given:
            given["mask"] = mask_with_four_axes(given["mask"], q)
        options = {name: value for name, value in (stated | given).items() if value is not None}
        tensors = {"q": lay_out(q), "k": lay_out(k), "v": lay_out(v), "o": lay_out_result(o), "lse": lse}
        graph = gradients(o, q, k, v, lay_out) | {"do": (o, lay_out_result)}
        found = {"kernel": label, "graph": graph} | tensors | options
        if ring is not None:
            causal = options.get("causal", "none") != "none"
            refused = WINDOW if "window" in options else "a mask in ring attention" if "mask" in options else None
            keys, values, own = merged(lay_out(q), lay_out(k), lay_out(v), tap.hops, ring, group, causal=causal)
            # The first hop sees all rows, in the dtype to which the function may have cast them.
            found["q"] = found["q"].to(keys.dtype)
            parts = RingHops.forward(tap.hops, values.shape[-1])
            found |= {"k": keys, "v": values, "own": own, "refused": refused, "hops": parts}
            found["kernel"] = f"{label} of {tap.hops[0].kernel}, {plural(len(tap.hops), 'hop')}"
        return found

    around = functools.cache(lambda: _log.warning(INSIDE, label, function.__name__))
    holds = tuple(names[n] for n in ("q", "k", "v", "mask") if n in names)
    site = AttentionSite(label, read, ring=ring is not None, holds=holds, around=None if ring else around)

    @functools.wraps(function)
    def observed(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return cast(Result, intercept.passed_on(site, function, args, kwargs))

    return observed


def _of_operands(label: str, q: Tensor, layout: Layout) -> LayOut:
    """What makes [B, H, T, D] of q, k and v; InputError where nothing does."""
    if q.dim() == 4:
        return _LAYOUTS[layout]
    if layout == "BTHD":
        raise InputError(f"{label} was given q of shape {list(q.shape)}; expected [B, T, H, D]")
    return with_four_axes


def _of_result(label: str, o: Tensor, q: Tensor, rows: torch.Size, layout: Layout) -> LayOut:
    """What makes [B, H, Tq, Dv] of a function's O; InputError where nothing does. ``rows``: B, H and Tq."""
    batch, heads, length = rows
    if q.dim() != 4 and o.shape[:-1] == q.shape[:-1]:
        return with_four_axes
    if o.dim() == 3 and o.shape[:2] == (batch, length) and o.shape[2] % heads == 0:
        return lambda t: t.view(*t.shape[:2], heads, -1).transpose(1, 2)
    fitting = [name for name, lay_out in _LAYOUTS.items() if o.dim() == 4 and lay_out(o).shape[:3] == rows]
    if layout in fitting:
        return _LAYOUTS[layout]
    expected = "B, H, Tq, Dv" if layout == "BHTD" else "B, Tq, H, Dv"
    raise InputError(
        f"{label} returned O of shape {list(o.shape)} for q of {list(q.shape)}; expected [{expected}] or "
        "[B, Tq, H * Dv]" + (f'; state returns_layout="{fitting[0]}"' if fitting else "")
    )


def _names_of(function: Callable[..., Any]) -> dict[str, str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of C, as torch's own and a library's bound kernels
        raise InputError(
            f"{function!r} does not say which arguments it has, so that it cannot be observed: wrap it in a function "
            "of q, k and v"
        ) from None
    found = {ours: next((n for n in theirs if n in parameters), None) for ours, theirs in _NAMES.items()}
    if missing := [name for name in "qkv" if found[name] is None]:
        raise InputError(
            f"{function.__qualname__} must have arguments q, k and v (or query, key and value) to be observed; it has "
            f"{', '.join(parameters) or 'none'}, and none for {', '.join(missing)}: wrap it in a function that has"
        )
    return {ours: theirs for ours, theirs in found.items() if theirs is not None}


def _alignment(causal: Causal | bool | None) -> Causal | None:
    if isinstance(causal, bool):
        return "top-left" if causal else "none"
    if causal is not None and causal not in get_args(Causal):
        raise InputError(f"causal must be True, False or one of {', '.join(get_args(Causal))}, got {causal!r}")
    return causal
