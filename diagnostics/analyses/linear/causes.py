"""Which fault or rounding site makes an error of linear attention: each is emulated, what it explains measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.linear.boundaries import misfit
from attn_diag.analyses.linear.facts import fact_of, factor_in_words
from attn_diag.analyses.linear.noise import block_of, by_chance, with_rounded_decays
from attn_diag.analyses.linear.words import CAUSES, ONE_STEP, STEPWISE, Cause, in_words
from attn_diag.captures.linear import LINEAR_OUTPUTS
from attn_diag.head.linear import CHUNKS, LinearRun, Place
from attn_diag.head.quality import AS_GOOD, BEYOND, LOSSY
from attn_diag.kernels.linear_faults import FAULTS, OF_GRADIENTS
from attn_diag.kernels.linear_recipe import GRADIENT_SITES, LINEAR_SITES
from attn_diag.reference import format_of, ulp

# A fault's own error is all but the rounding; of a site, what another site of healthy kernels never explains.
FAULT_EXPLAINS, SITE_EXPLAINS = 0.8, 0.25
_FACTOR_EXPLAINS = 0.5
# With a fault that explains as much, no site is looked for. Where a fault leaves more than rounding, it must be all but
# this much: of decays that are the root of what they should be a clamp looks like 97 %.
_SURE, _WHOLE = 0.97, 0.997
# That is so many times a well-rounded kernel's error: 2.1 to 4 are left where decays that are 0.1 % too large look like
# 2^g, at most 1.2 where decays are of the step before.
_LEFT = 1.5
# An error of rounding's size is a fault's where the fault leaves no more than a well-rounded kernel, and makes this.
_SMALL = 0.6
# Decays near 1 all become 1 in 16 bits, as a clamp makes them too: of these sites nothing but rounding may be left.
_STEPS = ("decay_step", "log_decay_step", "decay_steps")
_DECAYS = ("decay", "log_decay", *_STEPS)
_OF_SIZES = (
    "decay_base_two", "decay_logarithm_to_base_two", "decay_twice", "decay_root", "decay_not_applied",
    "decay_of_mean_channel", "decay_of_first_channel",
)  # fmt: skip
# The coefficient of a site that is there.
_ONE = (0.6, 1.5)
# An output tells faults apart where it is off, or a fault changes it, by so many times a well-rounded kernel's error;
# then so much of that, squared, must not be left.
_PLAIN, _OTHER = 4.0, 0.5
# Of a head: the forward's other outputs, or the other gradients, and where the head is in them.
Beside = Mapping[str, tuple[Tensor, Place]]
# A factor so small says that nothing of the output is there; what that is, a fault may say.
_NOTHING = 0.05
# Kernels with these differ in what becomes of the last chunk, so that the last state does not tell.
_OF_BOUNDARY = ("boundary_write", "boundary_decay")
MOST_STEPWISE = 2**14
# Numbers of fp32 that all have the bits of a 16-bit format do so by no chance.
_TOLD = 32


class Causes:
    """Emulated faults and sites of one capture, each made once.

    A fault explains an error e where what the faulty kernel returns is what was observed: 1 - |observed - faulty|^2 /
    |e|^2. A site is looked for beside other roundings that are not known: d, what it changes in the emulated kernel,
    must be in e with a coefficient about 1, <e, d> / <d, d>, as it is only where the bits agree, and so must what of d
    is no multiple of the output; it explains <e, d>^2 / (|e|^2 |d|^2).
    """

    def __init__(self, run: LinearRun) -> None:
        self._run = run
        self._made: dict[tuple[str, int, bool], dict[str, Tensor]] = {}
        self._found: list[tuple[str, int]] = []
        self.gradients: Beside = {}  # of the head that is judged, as they were captured

    def of_wrong(
        self, name: str, observed: Tensor, place: Place, beside: Beside, only: frozenset[str] | None, *,
        backward: bool = False,
    ) -> Cause | None:  # fmt: skip
        """The fault that explains what no rounding makes.

        Args:
            name: The quantity.
            observed: The head's.
            place: Where the head is in the quantity's tensor.
            beside: The other outputs of the forward, or the other gradients, which a fault must have changed as it
                would.
            only: Of gradients behind a forward that is wrong the faults that this has; None: any.
            backward: Of a gradient behind a forward that is right.
        """
        observed, reference = observed.double(), self._run.reference.values[name][place]
        if (simple := self._simple(observed, reference)) is not None:
            return simple
        faults = [one for one in self._faults() if only is None or self._called(*one) in only]
        forward = name in LINEAR_OUTPUTS
        told_by = {n: x for n, x in beside.items() if n != "final_state"}

        def contradicted(one: tuple[str, int]) -> bool:
            told = self._contradicted(one, told_by if forward and one[0] in _OF_BOUNDARY else beside)
            return told or (forward and self._doubtful(one, name, observed, place))

        # Of what a backward may lack alone and what looks the same in this gradient, the former.
        alone = [one for one in faults if backward and one[0] in OF_GRADIENTS]
        fault = self._best(alone, name, observed, place, _WHOLE, contradicted)
        fault = fault or self._best(faults, name, observed, place, FAULT_EXPLAINS, contradicted)
        noise = float((self._outputs("", CHUNKS[-2], forward=forward)[name][place] - reference).square().sum())
        fact = fact_of(self._run, name, observed, place, noise)
        if fact is not None and (fault is None or (only is None and fact.explained > fault.explained)):
            return fact
        if fault is None and not forward:
            # A gradient with code of its own may have a fault that the others lack: then that is all of its error.
            known = [one for one in faults if one in self._found]
            for several, enough in ((known, _SURE), (alone, _WHOLE), (faults, _SURE)):
                fault = fault or self._best(several, name, observed, place, enough)
        if fault is not None and backward:
            fault = replace(fault, words=fault.words.replace(CAUSES[fault.name], in_words(fault.name, backward=True)))
        if fault is not None and fault.explained > _SURE:
            return fault
        # Decays that are rounded coarsely look like a boundary that is off by one.
        site = self._best(self._sites(), name, observed, place, SITE_EXPLAINS)
        scaled = self.factor(name, observed, place) if fault is None else None
        if scaled is not None and scaled.explained <= FAULT_EXPLAINS:
            scaled = None
        return max((c for c in (fault, site, scaled) if c is not None), key=lambda c: c.explained, default=None)

    def of_lossy(self, name: str, observed: Tensor, place: Place, allowed: float, by_bits: bool = True) -> Cause | None:
        """What explains too large an error: a rounding site, or a factor that no rounding of the output makes.

        Args:
            name: The quantity.
            observed: The head's, as it was captured.
            place: Where the head is in the quantity's tensor.
            allowed: The squared error that a sound kernel may have.
            by_bits: Whether to look for what the bits tell.
        """
        if not by_bits:
            return self._decay_sums(name, observed.double(), place)
        if (stored := self.stored(observed, self._run.reference.values[name][place], allowed)) is not None:
            return stored
        observed = observed.double()
        site = self._best(self._sites(), name, observed, place, SITE_EXPLAINS)
        if (factor := self.factor(name, observed, place)) is None:
            return site or self._decay_sums(name, observed, place)
        if site is not None:
            return max(site, factor, key=lambda c: c.explained)
        # A site may make an output larger, and too few bits tell so.
        like = (self._explained(one, name, observed, place, proven=False) for one in self._sites())
        return factor if max(like, default=0.0) <= factor.explained else None

    def _simple(self, observed: Tensor, reference: Tensor) -> Cause | None:
        """Zero, a turned sign, or a factor."""
        size, own = float(reference.square().sum()), float(observed.square().sum())
        if own == 0 and size > 0:
            return Cause("zero", 1.0, CAUSES["zero"])
        if size == 0 or not torch.isfinite(observed).all():
            return None
        factor = float((observed * reference).sum()) / size
        error = float((observed - reference).square().sum())
        left = float((observed - factor * reference).square().sum())
        if error == 0 or left > (1 - 0.98) * error or abs(factor) < _NOTHING:
            return None
        if abs(factor + 1) < 0.01:
            return Cause("sign", 1 - left / error, CAUSES["sign"])
        return Cause("factor", 1 - left / error, factor_in_words(factor, self._run))

    def factor(self, name: str, observed: Tensor, place: Place) -> Cause | None:
        """A factor that no rounding of the output makes, and that makes half of the error."""
        reference = self._run.reference.values[name][place]
        size, error = float(reference.square().sum()), float((observed - reference).square().sum())
        if not size or not error:
            return None
        factor = float((observed * reference).sum()) / size
        sound = self._outputs("", CHUNKS[-2], forward=name in LINEAR_OUTPUTS)[name][place]
        own = float((sound * reference).sum()) / size
        explained = 1 - float((observed - factor * reference).square().sum()) / error
        # Truncation moves a number by less than an ulp, which is 2^-p of it at most, p its explicit bits.
        ulp_of_one = 2.0 ** -format_of(self._run.capture.tensors["q"].dtype).precision
        if explained < _FACTOR_EXPLAINS or abs(factor - own) <= ulp_of_one:
            return None
        if by_chance(observed - reference, reference, block_of(name)):
            return None
        return Cause("factor", explained, factor_in_words(factor, self._run))

    def _decay_sums(self, name: str, observed: Tensor, place: Place) -> Cause | None:
        """Coarse sums over the state, which bits do not tell: by the size of what is one error in a chunk."""
        has = self._run.has_site
        # What is closed with leaves one error in a chunk as well.
        if name not in ("dg", "ddt") or not has("decay_sums") or has("closing") or self._run.format is None:
            return None
        true = self._run.reference.values[name][place]
        fits = []
        for chunk in self._run.chunks:
            sound, coarse = (self._outputs(c, chunk, forward=False)[name][place] - true for c in ("", "decay_sums"))
            if (apart := misfit(observed - true, sound, coarse, self._run, chunk)) is not None:
                fits.append((apart, float(sound.square().sum())))
        if not fits:
            return None
        _, left = min(fits)
        words = f"{CAUSES['decay_sums']} (by its size: one error in all steps of a chunk)"
        explained = 1 - left / float((observed - true).square().sum())
        return Cause("decay_sums", explained, words) if explained > SITE_EXPLAINS else None

    def stored(self, observed: Tensor, true: Tensor, allowed: float) -> Cause | None:
        """Whether it was rounded to the inputs' format where it was handed back in a wider one: its bits tell.

        Args:
            observed: The head's, as it was captured.
            true: The reference.
            allowed: The squared error that a sound kernel may have besides.
        """
        dtype = self._run.capture.tensors["q"].dtype
        told, wide = observed[observed != 0], observed.dtype.itemsize > dtype.itemsize
        if not wide or len(told) < _TOLD or not torch.equal(told.to(dtype).to(told), told):
            return None
        total = float((observed.double() - true).square().sum())
        stored = float((ulp(true, format_of(dtype)).square() / 12).sum())
        if not 0 < total <= AS_GOOD**2 * (allowed + stored):
            return None  # something else makes more
        return Cause("handed_back", min(1.0, stored / total), CAUSES["handed_back"])

    def as_stepwise(self, name: str, squared: float, place: Place) -> bool:
        """Whether a state that is rounded after every step leaves as much, as no kernel in chunks does.

        Args:
            name: The quantity.
            squared: The head's squared error.
            place: Where the head is in the quantity's tensor.
        """
        there = ("state_step", 1) in self._sites()
        made = self._outputs("state_step", 1, forward=name in LINEAR_OUTPUTS) if there else {}
        if name not in made:
            return False
        other = made[name][place] - self._run.reference.values[name][place]
        return squared <= BEYOND**2 * float(other.square().sum())

    def _doubtful(self, one: tuple[str, int], name: str, observed: Tensor, place: Place) -> bool:
        """Whether decays of another size, as many faults make them, are these: gradients tell, or all of the error."""
        if one[0] not in _OF_SIZES:
            return False
        of_gradients = self._contradicted(one, self.gradients) if self.gradients else None
        return self._explained(one, name, observed, place) < _WHOLE if of_gradients is None else of_gradients

    def _contradicted(self, one: tuple[str, int], beside: Beside) -> bool:
        """Whether another output is plainly not what the fault would make of it."""
        forward = set(beside) <= set(LINEAR_OUTPUTS)
        made, sound = (self._outputs(cause, one[1], forward=forward) for cause in (one[0], ""))
        for name, (observed, place) in beside.items():
            if name not in made:
                continue
            reference = self._run.reference.values[name][place]
            change, noise = made[name][place] - sound[name][place], sound[name][place] - reference
            moved = max(float(x.square().sum()) for x in (change, observed - reference))
            apart = float((observed - made[name][place]).square().sum())
            if moved > _PLAIN**2 * float(noise.square().sum()) and not apart < _OTHER * moved:
                return True
        return False

    def _best(
        self, tried: Iterable[tuple[str, int]], name: str, observed: Tensor, place: Place, enough: float,
        contradicted: Callable[[tuple[str, int]], bool] = lambda _: False,
    ) -> Cause | None:  # fmt: skip
        listed = list(tried)
        # What explained another quantity is likely to explain this one, and made already.
        known = [one for one in self._found if one in listed]
        for several in (known, listed):
            found = [(one, self._explained(one, name, observed, place)) for one in several]
            enough_of_it = sorted((f for f in found if f[1] > enough), key=lambda f: -f[1])
            best = next((f for f in enough_of_it if not contradicted(f[0])), None)
            if best is None:
                continue
            (cause, chunk), explained = best
            self._found = list(dict.fromkeys([*self._found, best[0]]))
            by_chunk = cause not in STEPWISE and (cause not in FAULTS or FAULTS[cause].by_chunk)
            named = self._called(cause, chunk)
            size = f" (step {chunk - 1})" if named != cause else f" (chunks of {chunk})" if by_chunk else ""
            return Cause(named, explained, f"{CAUSES[named]}{size}")
        return None

    def _called(self, cause: str, chunk: int) -> str:
        """A boundary is told from a step by there being several."""
        longest = max(steps.stop - steps.start for _, steps in self._run.capture.call.sequences)
        return ONE_STEP.get(cause, cause) if longest <= 2 * chunk else cause

    def _explained(
        self, one: tuple[str, int], name: str, observed: Tensor, place: Place, *, proven: bool = True,
    ) -> float:  # fmt: skip
        (cause, chunk), forward = one, name in LINEAR_OUTPUTS
        made = self._outputs(cause, chunk, forward=forward)
        if name not in made:
            return 0.0
        reference = self._run.reference.values[name][place]
        error = observed - reference
        total = float(error.square().sum())
        sound = self._outputs("", chunk, forward=forward)[name][place]
        if cause in FAULTS:
            left = float((observed - made[name][place]).square().sum())
            explained = 1 - left / total if total else 0.0
            # What a fault leaves is rounding; more is another one's.
            usual = self._outputs("", CHUNKS[-2], forward=forward)[name][place]
            noise = max(float((x - reference).square().sum()) for x in (sound, usual))
            plain = left > _LEFT**2 * noise
            return 0.0 if plain and explained < _WHOLE else explained
        change = made[name][place] - sound
        size, common = float(change.square().sum()), float((error * change).sum())
        if not size or not total or not _ONE[0] < common / size < _ONE[1]:
            return 0.0
        explained, noise = common**2 / size / total, float((sound - reference).square().sum())
        # Few numbers prove no site; one that another quantity has proved need not be proved by them, if it is most.
        proven &= one not in self._found or explained <= FAULT_EXPLAINS
        doubtful = cause in _DECAYS and (1 - explained) * total > BEYOND**2 * noise
        if cause == "decay_steps":  # not where one of both roundings leaves about as much
            ones = [self._explained((step, chunk), name, observed, place, proven=False) for step in _STEPS[:2]]
            doubtful |= LOSSY * (1 - explained) > 1 - max(ones)
        return 0.0 if doubtful or (proven and not self._in_bits(error, change, reference, name)) else explained

    def _in_bits(self, error: Tensor, change: Tensor, reference: Tensor, name: str) -> bool:
        """Whether a change is in an error by more than a factor of what is true, and by more than chance.

        Whatever makes an output larger agrees with decays that are all rounded up: bits are what is beside a factor.
        """
        own, rest = _beside(error, reference), _beside(change, reference)
        there = float((own * rest).sum()) > _ONE[0] / 2 * float(rest.square().sum())
        return there and not by_chance(own, rest, block_of(name))

    def of_small(self, name: str, observed: Tensor, place: Place, beside: Beside, noise: float) -> Cause | None:
        """The fault that makes an error of rounding's size, all but what a well-rounded kernel leaves.

        Of a gradient only those that another quantity has.

        Args:
            name: The quantity.
            observed: The head's.
            place: Where the head is in the quantity's tensor.
            beside: As of ``of_wrong``.
            noise: The squared error of a well-rounded kernel.
        """
        observed, reference = observed.double(), self._run.reference.values[name][place]
        error, forward = observed - reference, name in LINEAR_OUTPUTS
        faults = [one for one in self._faults() if forward or one in self._found]

        def other(one: tuple[str, int]) -> bool:
            made, sound = (self._outputs(c, one[1], forward=forward)[name][place] for c in (one[0], ""))
            left = float((observed - made).square().sum())
            small = left <= LOSSY**2 * noise and self._in_bits(error, made - sound, reference, name)
            return not small or self._contradicted(one, beside) or self._doubtful(one, name, observed, place)

        return self._best(faults, name, observed, place, _SMALL, other)

    def _faults(self) -> Iterator[tuple[str, int]]:
        capture, has = self._run.capture, self._run.traits
        steps = capture.tensors["q"].shape[1]
        for name, fault in FAULTS.items():
            # A decay's gradient that is dropped is zero.
            if name == "no_decay_gradient" or not has.issuperset(fault.needs):
                continue
            if not fault.by_chunk:
                # Where channels decay apart, short chunks are less work.
                yield name, CHUNKS[0] if "channels" in has else 64
            else:
                # An initial state is a state before the only chunk.
                short = name == "no_inter_chunk" and "initial_state" in has and steps <= CHUNKS[0]
                yield from ((name, chunk) for chunk in CHUNKS if chunk < steps or (short and chunk == CHUNKS[0]))

    def _sites(self) -> Iterator[tuple[str, int]]:
        capture = self._run.capture
        if self._run.format is None:
            return
        for site in LINEAR_SITES:
            if not self._run.has_site(site) or site in GRADIENT_SITES:
                continue
            yield from ((site, chunk) for chunk in CHUNKS)
        if "g" in capture.tensors:
            yield from ((step, 64) for step in _STEPS)
        if capture.tensors["q"].shape[1] * len(capture.call.sequences) <= MOST_STEPWISE:
            yield "state_step", 1

    def _outputs(self, cause: str, chunk: int, *, forward: bool) -> dict[str, Tensor]:
        if (cause, chunk, False) in self._made:
            forward = False
        key = cause, chunk, forward
        if key not in self._made:
            self._made[key] = self._emulated(cause, chunk, forward=forward)
        return self._made[key]

    def _emulated(self, cause: str, chunk: int, *, forward: bool) -> dict[str, Tensor]:
        run, fmt = self._run, self._run.format
        recipe = replace(run.recipe, chunk=chunk)
        if chunk == 1:
            # A kernel that goes step by step multiplies in fp32: only then the bits of its state can be met.
            recipe = replace(recipe, operands="fp32")
        if not cause or cause in FAULTS:
            return run.emulated(recipe, cause or None, forward=forward)
        assert fmt is not None
        if cause == "state_step":
            return run.emulated(replace(recipe, state=fmt), forward=forward)
        if cause in STEPWISE:
            return with_rounded_decays(run, cause).emulated(recipe, forward=forward)
        return run.emulated(replace(recipe, **{cause: fmt}), forward=forward)  # type: ignore[arg-type]


def _beside(x: Tensor, reference: Tensor) -> Tensor:
    """x without what is a multiple of the reference, in each batch item or sequence."""
    of_one = tuple(range(1, x.ndim))
    size = reference.square().sum(of_one, keepdim=True)
    return x - (x * reference).sum(of_one, keepdim=True) / size.clamp(min=1e-300) * reference
