"""``attn_diag.quant``: what a fake quantiser does to a weight, and whether it is the one that it should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.machine import describe_tool
from attn_diag.kernels.elements import Integers
from attn_diag.kernels.formats import Mode
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import Quantizer
from attn_diag.results.quant import MeanOfErrors, Quant, QuantizerMatch
from attn_diag.results.wording import percent, runs_of
from attn_diag.statistics.means import require_level
from attn_diag.testing.quantizing.alternatives import alternatives
from attn_diag.testing.quantizing.blocks import beyond_ties, by_blocks
from attn_diag.testing.quantizing.candidates import identify
from attn_diag.testing.quantizing.engine import beside_engine
from attn_diag.testing.quantizing.figures import Means, QuantizationErrors, beyond_clipping, means_of
from attn_diag.testing.quantizing.functions import quantizer
from attn_diag.testing.quantizing.gradient import Values, notes_of, straight_through, with_gradient
from attn_diag.testing.quantizing.mistakes import UNCLIPPED
from attn_diag.testing.quantizing.possible import DECLARED, SAME, PossibleQuantizer, strays
from attn_diag.testing.quantizing.unscaled import of_a_cast
from attn_diag.work import Progress, part_of, silent

Declared = str | Quantizer | None
# Another quantiser is said to be near from this part of the values on; what differs is told by its place where that is
# at most this part of the rows or columns: each such line has four values and more, as single ones are no place.
_NEAR, _PLACE, _DENSE = 0.5, 0.25, 4
# From this part on drawn values have the declared grid.
_MOSTLY = 0.98


def quant(
    w: Tensor,
    by: Declared = None,
    *,
    observed: Tensor | Values | None = None,
    x: Tensor | None = None,
    dy: Tensor | None = None,
    engine: Tensor | str | Quantizer | None = None,
    amax: Tensor | float | None = None,
    level: float = 0.01,
    source: str = "tensors",
    progress: Progress | None = None,
) -> Quant:
    """What a fake quantiser does to a weight: its signed error, what that consists of, and what others would leave.

        found = attn_diag.quant(layer.weight, "int4", observed=my_fake_quant(layer.weight), x=activations)
        print(found.report())

    Where values are observed, it says first whether they are the declared quantiser's, and if not, which other one made
    them: other blocks, another rule or rounding of the scale or the elements, a zero point that is off by one, an amax
    that is not the data's.

    Args:
        w: The weight before, [out, in], float64, fp32, BF16 or FP16.
        by: The quantiser that should be: a name (see ``attn_diag.quantizer``), a Quantizer, or None where it is not
            known.
        observed: What became of ``w``: its dequantised values, [out, in], any float dtype; or the fake quantiser, a
            function of ``w``.
        x: Inputs of the layer, [N, in] (or [..., in]), for the error of its output.
        dy: The gradient of the layer's output, [N, out] (or [..., out]), for the straight-through gradient's own error.
        engine: What another program that is to run the same weights makes of ``w`` (an inference engine beside a
            trainer): its values, or its quantiser.
        amax: What the declared quantiser's scales are made of in place of w's own amax, a number or one a block: a
            history's (delayed scaling), or of learned scales (LSQ) those times the elements' largest number.
        level: Significance level of the tests.
        source: Where the tensors come from, for the report.
        progress: Called with (done, total) as the work goes on.

    Returns:
        A ``Quant``.

    Raises:
        InputError: Shapes, dtypes or values that cannot be, or neither a quantiser nor observed values.
    """
    require_level(level)
    searched, drawn, compared = (part_of(progress, number, 3) or silent for number in range(3))
    declared = quantizer(by) if by is not None else None
    if not isinstance(w, Tensor):
        raise InputError(f"w must be a tensor [out, in], got {type(w).__name__}; give a layer's weight")
    w = w.detach()
    function = None if observed is None or isinstance(observed, Tensor) else observed
    observed = observed if function is None else _called(function, w)
    assert observed is None or isinstance(observed, Tensor)
    _require(w, observed, x, declared)
    _require_rest(w, x, dy, engine)
    given = None if amax is None else _per_block(w, declared, amax)
    if observed is None:
        assert declared is not None
        matches: Sequence[QuantizerMatch] = ()
        made: PossibleQuantizer | None = PossibleQuantizer(declared, DECLARED, amax=given)
        values = None
    else:
        values = observed.detach().to(w.device, torch.float32 if observed.itemsize == 1 else observed.dtype)
        matches, made = identify(w, values, declared, searched, amax=given)
    shown = made.by if made is not None else declared
    exact = w.double()
    errors = _errors(exact, values, made)
    blocks = shown if shown is not None else quantizer("int8")  # rows, where nothing is known
    means = means_of(errors, blocks, level)
    rows = None if x is None else x.detach().reshape(-1, x.shape[-1]).to(w.device).double()
    beyond = means if made is None else means_of(beyond_clipping(errors, made.values(exact), made.by), blocks, level)
    outcome, headline, following = _verdict(declared, made, matches, beyond, level, observed is not None)
    if declared is not None and values is not None:
        meant = PossibleQuantizer(declared, DECLARED, amax=given)
        start = made if made is not None and made.words.startswith(DECLARED) else meant
        if made is None or (made.amax is not None and outcome == "fail"):
            headline, following = _with_place(beyond_ties(start, w, values), headline, following)
        outcome, headline, following = by_blocks(start, w, values, (outcome, headline, following), made)
    if values is not None and (made is None or outcome != "pass"):
        known = made is not None
        outcome, headline, following = of_a_cast(w, values, declared, (outcome, headline, following), known=known)
    if outcome == "pass" and made is not None and values is not None:
        outcome, headline, following = _without_strays(made, strays(made, w, values), (outcome, headline, following))
    scales, gradient = given if made is None else made.made_of(exact), None
    # Where nothing is known of what made the values, nor is how far apart its numbers are and where it clips.
    if rows is not None and dy is not None and shown is not None and (made is not None or function is None):
        by_rows = dy.detach().reshape(-1, dy.shape[-1]).to(w.device).double()
        own = _in_its_format(function, w.dtype) if function is not None else None if made is None else _values_of(made)
        gradient = straight_through(
            exact, replace(shown, search=()), rows, by_rows, values=own, progress=drawn, amax=scales
        )
        if function is not None and outcome == "pass":
            outcome, headline, following = with_gradient(gradient, (outcome, headline, following))
    other = None
    if engine is not None:
        other = beside_engine(w, exact + errors.error, shown, engine, rows, given)
        if not other.same:
            outcome, headline = "fail", f"{headline}; the engine runs other weights: {other.words}"
            following = following or "quantise alike in trainer and engine: blocks, scales and rounding"
    return Quant(
        tool=describe_tool(w.device),
        source=source,
        shape=(w.shape[0], w.shape[1]),
        dtype=str(w.dtype).removeprefix("torch."),
        declared=None if declared is None else declared.name,
        judged="observed" if observed is not None else blocks.name,
        outcome=outcome,  # type: ignore[arg-type]
        headline=headline,
        notes=(*_notes(means, level, made), *notes_of(gradient)),
        matches=tuple(matches),
        error=errors.rms,
        mean=means.mean,
        away=means.away,
        channels_tested=means.channels_tested,
        channels_biased=means.channels_biased,
        level=level,
        parts=tuple(errors.parts()),
        output=None if rows is None else errors.output(rows),
        alternatives=tuple(alternatives(exact, rows, shown, compared, scales is not None)) if shown is not None else (),
        next=following,
        gradient=gradient,
        engine=other,
    )


def _require(w: Tensor, observed: Tensor | None, x: Tensor | None, declared: Quantizer | None) -> None:
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if w.dim() != 2 or w.dtype not in floats or not w.numel():
        raise InputError(
            f"w must be [out, in] in float64, fp32, BF16 or FP16, got {list(w.shape)} in {w.dtype}; give one layer's "
            "weight"
        )
    if observed is None and declared is None:
        raise InputError(
            'neither a quantizer nor observed values: name one (--quantizer int4, by="int4") or give observed'
        )
    if observed is not None and (observed.shape != w.shape or not observed.is_floating_point()):
        raise InputError(
            f"observed must be w's dequantised values, floats of its shape {list(w.shape)}, got {list(observed.shape)} "
            f"in {observed.dtype}; multiply codes by their scales first, and lay them as w lies"
        )
    if x is not None and (x.dim() < 1 or x.shape[-1] != w.shape[1] or not x.is_floating_point() or not x.numel()):
        raise InputError(f"x must be [N, in] with in = {w.shape[1]}, floats, got {list(x.shape)} in {x.dtype}")
    for name, tensor in (("w", w), ("observed", observed), ("x", x)):
        if tensor is not None and not bool(tensor.double().isfinite().all()):
            why = "quantise finite values"
            if name == "observed":
                count = int((~tensor.double().isfinite()).sum())
                why = (
                    f"the quantiser made {count} of finite weights, as a cast does that overflows where it should clip"
                )
            raise InputError(f"{name} holds NaN or Inf; {why}")


def _require_rest(w: Tensor, x: Tensor | None, dy: Tensor | None, engine: Tensor | str | Quantizer | None) -> None:
    if dy is not None and x is None:
        raise InputError("dy is the gradient of x wᵀ: give x too")
    if dy is not None and x is not None:
        expected = [*x.shape[:-1], w.shape[0]]
        if list(dy.shape) != expected or not bool(dy.isfinite().all()):
            raise InputError(f"dy must be finite, {expected}, the gradient of x wᵀ, got {list(dy.shape)}")
    if isinstance(engine, Tensor) and (engine.shape != w.shape or not bool(engine.double().isfinite().all())):
        raise InputError(f"engine must be w's dequantised values, {list(w.shape)}, finite, got {list(engine.shape)}")


def _called(function: Values, w: Tensor) -> Tensor:
    with torch.no_grad():
        found = function(w)
    if not isinstance(found, Tensor):
        raise InputError(f"the fake quantiser must return a tensor, got {type(found).__name__}")
    return found


def _in_its_format(function: Values, dtype: torch.dtype) -> Values:
    """The fake quantiser called in fp32 unless w is float64: torchao's take no float64, and 16 bits hold no dither."""
    return lambda weight: function(weight.to(dtype if dtype == torch.float64 else torch.float32))


def _values_of(made: PossibleQuantizer) -> Values | None:
    """As the values were made, straight-through; None for the quantiser itself."""
    if made.declarable:
        return None

    def values(weight: Tensor) -> Tensor:
        return weight + (made.values(weight.detach()).values - weight).detach()

    return values


def _errors(w: Tensor, observed: Tensor | None, made: PossibleQuantizer | None) -> QuantizationErrors:
    own = made.values(w) if made is not None else None
    if observed is not None:
        values = observed.double()
    else:
        assert own is not None
        values = own.values
    clipped = own.clipped if own is not None else torch.zeros_like(w, dtype=torch.bool)
    return QuantizationErrors(w, values - w, (values == 0) & (w != 0), clipped)


def _verdict(
    declared: Quantizer | None,
    made: PossibleQuantizer | None,
    matches: Sequence[QuantizerMatch],
    means: Means,
    level: float,
    seen: bool,
) -> tuple[str, str, str | None]:
    """Outcome, headline, and what to do next."""
    if not seen:
        assert declared is not None
        return "undecided", f"what {declared.name} does to this weight; no observed values to judge", None
    if made is None:
        best = matches[0]
        near = f"the nearest, {best.quantizer} ({best.words}), gives {percent(best.equal, '.1f')} of the values"
        if declared is None:
            return "undecided", f"no quantizer that is known here made these values: {near}", None
        own = next(m for m in matches if m.words.startswith(DECLARED))
        if declared.parsed_elements.mode is Mode.STOCHASTIC and own.equal >= _MOSTLY:
            return (
                "fail",
                f"not {declared.name}: {percent(own.equal, '.2f')} of the values are one of the two numbers next to "
                "w, but the rest are other ones",
                "look at how draws are added: none takes w past the number next to it, or off a number of the grid",
            )
        return (
            "fail",
            f"not {declared.name}, which gives {percent(own.equal, '.1f')} of the values, nor one that is near it"
            + ("" if best is own or best.equal < _NEAR else f": {near}"),
            "declare the quantizer as it was meant, field by field: attn_diag.quantizer(…)",
        )
    drawn = made.by.parsed_elements.mode is Mode.STOCHASTIC
    if declared is not None and not made.words.startswith(DECLARED):
        own = next(m for m in matches if m.words.startswith(DECLARED))
        others = [m for m in matches if m.words not in (made.words, own.words)]
        # Of 8 bits hardly an element tells these two apart.
        alike = [m.words for m in others if (m.equal, m.words) == (matches[0].equal, UNCLIPPED)]
        alike = alike if made.by.scale_of == "extreme" else []
        # Powers of two more or less hardly change what floats can be: scales that are made in several ways fit.
        powers = made.by.scale.startswith("e8m0") and not isinstance(made.by.parsed_elements, Integers)
        if powers and made.by.parsed_elements == declared.parsed_elements:
            alike = [m.words for m in others if m.equal >= SAME and not m.words.startswith(DECLARED)][:1]
        said = " or ".join([made.words, *alike]) + ", or other powers of two" * (powers and bool(alike))
        said += ", or up and down as somebody learned it (AdaRound)" if drawn else ""
        return (
            "fail",
            f"not {declared.name}, which gives {percent(own.equal, '.1f')} of the values, but "
            f"{'' if said.startswith('with') else 'with '}{said}: {percent(matches[0].equal, '.2f')}",
            "look at how the scales are made: the values do not tell which"
            if powers and alike
            else _declaring(made) or _declaring_scales(made),
        )
    if drawn:
        for found, what in ((means.mean, "their mean error is"), (means.away, "away from zero their mean error is")):
            if found.p_value is not None and found.p_value <= level:
                return "fail", f"dithered values are biased: {what} {_signed(found)}", None
        return "pass", f"the values are {made.by.name}'s, each next to w, and no bias is found in them", None
    share = next(m.equal for m in matches if m.words == made.words)
    equal = percent(share, ".2f")
    if declared is None and not made.declarable:
        return (
            "fail" if made.at_fault else "undecided" if made.other_scales else "pass",
            f"the values are {made.by.name}'s with {made.words.partition(', ')[2] or made.words}: {equal}",
            _declaring_scales(made),
        )
    arithmetic = made.words.partition(DECLARED)[2]
    return "pass", f"the values are {made.by.name}'s{arithmetic}" + ("" if share == 1 else f": {equal}"), None


def _with_place(apart: Tensor, headline: str, following: str | None) -> tuple[str, str | None]:
    """Headline and what to do next, with the few rows or columns where all values are that are not as declared."""
    for noun, dim in (("row", 1), ("column", 0)):
        lines = apart.any(dim)
        if 0 < float(lines.double().mean()) <= _PLACE and int(apart.sum()) >= _DENSE * int(lines.sum()):
            where = runs_of(noun, lines.nonzero().flatten().tolist())
            return f"{headline}; what differs is all in {where}", f"look at {where}: the scales or zero points there"
    return headline, following


def _without_strays(
    made: PossibleQuantizer, far: Tensor, verdict: tuple[str, str, str | None]
) -> tuple[str, str, str | None]:
    """The verdict, unless some values are nowhere near the quantiser's."""
    count = int(far.sum())
    if not count:
        return verdict
    rows = far.any(1).nonzero().flatten().tolist()
    where = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows, the first {rows[0]}"
    return (
        "fail",
        f"all but {count} of {far.numel()} values are {made.by.name}'s; these (in {where}) are more than one of its "
        "numbers away",
        "look at these rows: scales of theirs alone that are not the data's",
    )


def _declaring(made: PossibleQuantizer) -> str | None:
    """How to say what it is; None where no declaration can."""
    if not made.declarable:
        return None
    name, *changes = made.by.name.split(" ")
    told = " ".join([f"--quantizer {name}", *(f"--set {change}" for change in changes)])
    return f"make the fake quantiser what was declared, or declare what it is: {told}"


def _declaring_scales(made: PossibleQuantizer) -> str | None:
    """What to do about scales that are not the data's."""
    if made.at_fault:
        return "correct that in the fake quantiser"
    if not made.other_scales:
        return None
    return "if the scales are meant so (learned, searched, of earlier steps), declare them: amax=…; else make them anew"


def _per_block(w: Tensor, declared: Quantizer | None, amax: Tensor | float) -> Tensor:
    """amax for each block. Raises InputError."""
    if declared is None:
        raise InputError("amax is what a declared quantizer's scales are made of: name the quantizer too")
    shape = quantize(w, declared).scale.shape
    try:
        given = torch.as_tensor(amax, dtype=torch.float64, device=w.device)
        if not bool((given.isfinite() & ((given >= 0) | (declared.scale_of == "extreme"))).all()):
            raise InputError("amax must be finite and 0 or more")
        given = given.detach().reshape(given.shape or (1, 1)).expand(shape)
        quantize(w, declared, amax=given)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"amax must be a number or one for each block, {list(shape)}: {error}") from error
    return given


def _signed(found: MeanOfErrors) -> str:
    return f"{found.mean:+.2e} of w's root mean square (p = {found.p_value:.1g})"


def _notes(means: Means, level: float, made: PossibleQuantizer | None) -> Iterator[str]:
    drawn = made is not None and made.by.parsed_elements.mode is Mode.STOCHASTIC
    for found, words in ((means.mean, "error"), (means.away, "error away from zero")):
        if found.p_value is None:
            why = "the errors are all alike" if found.clusters >= 8 else f"{found.clusters} clusters are too few"
            yield f"the mean {words} has no test: {why}"
        elif found.p_value <= level and not drawn:
            yield (
                f"the mean {words} is not 0: {_signed(found)}; rounding that does not draw has the mean that the "
                "weight gives it"
            )
