"""``attn_diag.invariance``: runs every path, and says what may differ and what may not."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from attn_diag.captures.lent import written_words
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.errors import InputError
from attn_diag.head.identification import identify_head
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.head.recipe_candidates import describe_schedule
from attn_diag.kernels import Recipe
from attn_diag.results.invariance import ITSELF, Invariance, OwnError, PathDifference, PathFinding
from attn_diag.results.wording import SYMBOLS, listed, percent, plural, times, together
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.invariance.arrangements import ARRANGEMENTS, MOVES, Arrangement, Path, Setting
from attn_diag.testing.invariance.calls import Calls, LostDeviceError, Outputs, alike, beyond_rounding, compared
from attn_diag.testing.invariance.distance import Expected, own_error
from attn_diag.testing.invariance.ruling import REPEATS, SAME_CALL, Rulings, seldom_words, until_told, words_of
from attn_diag.testing.libraries import LIBRARIES
from attn_diag.testing.names import choose_names, imported
from attn_diag.testing.next_command import Again
from attn_diag.testing.other_function import OtherFunction, as_counted, fit_of, origin_words
from attn_diag.testing.stated import PER_HEAD, PerHead, Stated, fitting
from attn_diag.testing.target import DTYPES, RECIPE_DTYPES, Attention, MisfitError, NoGradientError, Target
from attn_diag.work import Progress

# Three batch items, so that one has a neighbour on each side; a length off the tiles of every kernel we know.
DEFAULT_SHAPE = (3, 4, 333, 64)
# A well-rounded kernel's error is so much larger before the call itself is worth a word.
LARGE = 2.5
# Fewer rows do not tell schedules apart.
_FEWEST_ROWS = 16
# A recipe that shares fewer of the bits is not near.
_NEAR = 0.75
_MOVED = ("allowed", "bits", "fault")


def invariance(
    kernel: Attention | str | Recipe,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shape: Sequence[int] | None = None,
    causal: bool | str = "none",
    window: Sequence[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: PerHead = None,
    sinks: PerHead = None,
    scale: float | None = None,
    backward: bool | None = None,
    only: Sequence[str] | None = None,
    allow: Sequence[str] = (),
    repeats: int = REPEATS,
    schedules: bool = True,
    seed: int = 0,
    device: str = "auto",
    name: str | None = None,
    progress: Progress | None = None,
) -> Invariance:
    """Make one call in every arrangement that should not matter, and say which of them does.

        assert attn_diag.invariance(my_attention, causal=True).passed

    What may differ and what may not is described in ``attn_diag.testing.invariance``.

    Args:
        kernel: fn(q, k, v) -> o, or (o, lse, ...), with q, k, v [B, H, T, D] in ``dtype``; a library's
            ("sdpa:flash", "flex_attention", "flash_attn_4", …); "MODULE:FUNCTION"; a recipe or its name, which is
            emulated. A kernel with an option ``num_splits`` is called with several.
        dtype: torch.bfloat16 or torch.float16.
        shape: B, H, T, D of the call; by default 3, 4, 333, 64, with as many heads as there are slopes or sinks.
        causal: What the kernel masks: "none" or False; "top-left" or True; "bottom-right".
        window: (left, right): of row t it sees the keys t - left to t + right alone; -1: all on that side.
        softcap: c, where its scores are c tanh(alpha q.k / c).
        alibi_slopes: Of a kernel with ALiBi, one slope a head: what it adds to the score of query i and key j is
            -slope |i - j|. A function with a parameter of that name is given them, another has these of its own.
        sinks: Likewise of a kernel with attention sinks, one logit a head, which joins the softmax's sum.
        scale: What it multiplies scores by; by default 1/sqrt(D).
        backward: None compares gradients where autograd gives them, True demands them, False leaves them out.
        only: Names out of ``attn_diag.testing.invariance.arrangements.ARRANGEMENTS``; by default all.
        allow: Arrangements that may change bits within the noise, such as "batch-size" of a kernel that splits the keys
            by how much there is to do.
        repeats: How often the same call is made again; more find what goes wrong now and then.
        schedules: Name the recipe and order of keys of the call, and of every path with other bits.
        seed: Of the inputs.
        device: auto, cpu or cuda.
        name: What the report calls the kernel.
        progress: Called with (done, total) after each arrangement.

    Returns:
        Whether it passed, and of every path which bits moved, by how many ulp and how much of the expected noise.

    Raises:
        InputError: Options cannot be used, or the kernel raises or returns another shape or dtype.
    """
    if dtype not in RECIPE_DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in RECIPE_DTYPES)
        raise InputError(f"dtype must be one of {known}, got {dtype}: differences are held to recipes known for these")
    shape = shape or fitting(DEFAULT_SHAPE, alibi_slopes, sinks)
    if len(shape) != 4 or any(not isinstance(n, int) or n < 1 for n in shape) or shape[2] < 4 or shape[3] < 8:
        raise InputError(f"shape must be B, H, T, D with T of at least 4 and D of at least 8, got {shape}")
    chosen = [ARRANGEMENTS[n] for n in choose_names("arrangement", only, ARRANGEMENTS)]
    choose_names("arrangement", allow, ARRANGEMENTS)
    stated = Stated.of(causal, scale, shape[3], window, softcap, alibi_slopes, sinks, heads=shape[1])
    where = pick_device(device)
    target = Target.of(kernel, name, dtype=dtype, head_dim=shape[3], device=where)
    generator = torch.Generator().manual_seed(zlib.crc32(f"invariance {seed}".encode()))
    q, k, v, do = (torch.randn(tuple(shape), generator=generator).to(dtype) for _ in range(4))
    base = stated.case("invariance", q, k, v, None if backward is False else do)
    options = _options(kernel, target, partial(Target.of, name=name, dtype=dtype, head_dim=shape[3], device=where))
    b, h, t, d = shape
    again = Again(kernel if isinstance(kernel, str) else None, DTYPES[dtype], stated, (b, h, t, d))
    setting = Setting(base, target, options, generator, repeats)
    run = _Run(target, setting, frozenset(allow), schedules, again, demanded=bool(backward))
    return run.run(chosen, seed, progress)


def _options(
    kernel: Attention | str | Recipe, target: Target, made: Callable[..., Target]
) -> Callable[[str, int], Target] | None:
    """The kernel with an option; None where it has none."""
    if target.recipe is not None:
        return None
    if isinstance(kernel, str) and (library := LIBRARIES.get(kernel)) is not None:
        call = library.call
        return (lambda option, value: replace(target, fn=partial(call, **{option: value}))) if library.splits else None
    fn = imported(kernel) if isinstance(kernel, str) else kernel
    called: Any = fn
    try:
        known = callable(fn) and "num_splits" in inspect.signature(fn).parameters
    except ValueError:
        return None
    return (lambda option, value: made(partial(called, **{option: value}))) if known else None


@dataclass
class _Run:
    target: Target
    setting: Setting
    allowed: frozenset[str]
    schedules: bool
    again: Again
    demanded: bool
    notes: list[str] = field(default_factory=list)
    lost: str = ""
    """The arrangement that ended the GPU's context; empty: none."""

    def __post_init__(self) -> None:
        self.calls, self.rulings = Calls(self.target), Rulings(self.allowed)

    def run(self, chosen: Sequence[Arrangement], seed: int, progress: Progress | None) -> Invariance:
        """Every path of every arrangement, and the report."""
        base = self._base()
        counted = as_counted(base, self.calls.first(base)[0], self.target.device)
        base, self.setting = counted, replace(self.setting, base=counted)
        self.notes += [f"{words}." for words in origin_words([base])]
        outputs, expected = self.calls.first(base)
        one = replace(base, q=base.q[:1], k=base.k[:1], v=base.v[:1], do=None)
        other = fit_of(one, outputs["o"][:1], self.target, self.target.device, patterns=False)[1]
        asked = other is None or not other.known
        errors = tuple(
            OwnError(n, own_error(outputs[n].double(), expected.truth[n], expected.variance[n]))
            for n in expected.truth if n in outputs
        )  # fmt: skip
        tool, schedule = describe_tool(self.target.device), self._schedule(base, outputs, (0, 0, 0)) if asked else None
        found: list[PathFinding] = []
        for number, item in enumerate(chosen if asked else []):
            # What replaces what must not matter does not depend on which others run.
            self.setting.generator.manual_seed(zlib.crc32(f"{seed} {item.name}".encode()))
            found += self._arrangement(item)
            if progress is not None:
                progress(number + 1, len(chosen))
        found = self.rulings.with_once(found)
        # NaN there tells more than that the same call gives something else.
        found.sort(key=lambda p: p.arrangement != "uninitialised" or not any(d.nonfinite for d in p.differences))
        wrong = beyond_rounding(outputs, expected)
        outcome, headline = self._judged(found, other, wrong)
        if outcome == "pass" and self.target.recipe is None:
            self.notes.append(seldom_words(found, outputs["o"].numel(), self.setting.repeats))
        return Invariance(
            tool=tool,
            source=self.target.name,
            backend=self.target.backend,
            dtype=DTYPES[base.q.dtype],
            shape=self.again.shape,
            causal=base.causal,
            scale=base.scale,
            window=base.window,
            softcap=base.softcap,
            alibi_slopes=self.again.stated.alibi_slopes,
            sinks=self.again.stated.sinks,
            seed=seed,
            outcome=outcome,
            headline=headline,
            notes=(*self.notes, *self._further(errors, other if asked else None, wrong if asked else [])),
            schedule=schedule,
            errors=errors,
            paths=tuple(found),
            next=self._next(found, None if asked else other),
        )

    def _base(self) -> CaseInputs:
        """The call, without dO where the kernel has no gradients."""
        base = self.setting.base
        try:
            self.calls.first(base)
        except NoGradientError as error:
            if self.demanded:
                raise InputError(f"{self.target.name}: {error}") from error
            self.notes.append(f"Gradients were not compared: {error}.")
            base = replace(base, do=None)
            self.setting = replace(self.setting, base=base)
            self.calls.first(base)
        except MisfitError as error:
            b, h, t, d = base.q.shape
            hint = f" (the call has B={b} H={h} T={t} D={d}; another shape can be asked for)"
            raise InputError(f"{error.of(self.target.name)}{hint}") from error
        return base

    def _arrangement(self, item: Arrangement) -> list[PathFinding]:
        paths = f"after {self.lost} the GPU could not be used" if self.lost else item.paths(self.setting)
        if isinstance(paths, str):
            return [PathFinding(item.name, item.shows, "", item.promise, "not-run", paths)]
        found = list(until_told(item, (self._path(item, path) for path in paths if not self.lost)))
        if item.name == SAME_CALL.name and (first := self._of_first_call(found)) is not None:
            return [first]
        self.rulings.note(item, found)
        return found

    def _of_first_call(self, found: Sequence[PathFinding]) -> PathFinding | None:
        """Where all calls after the first agree, what that one differs by; others are then compared with theirs."""
        if self.lost or not all(p.status in _MOVED and p.differences == found[0].differences for p in found):
            return None
        fourth, fifth = (self.calls.made(Path("", self.setting.base)) for _ in range(2))
        if not alike(fourth, fifth):
            return None
        self.calls.take(self.setting.base, fifth)
        return replace(found[0], path="the first call beside those after it, which agree")

    def _path(self, item: Arrangement, path: Path) -> PathFinding:
        try:
            first, expected = self.calls.first(path.against or self.setting.base)
            second = self.calls.made(path)
            seen = compared(path, first, second, expected)
            again = self._again(item, path, first, second, expected)
            differences = self.rulings.lasting(item, path.name, seen, again)
        except LostDeviceError as error:
            self.lost = item.name
            return PathFinding(item.name, item.shows, path.name, item.promise, "fault", str(error))
        except (MisfitError, InputError) as error:
            words = error.of(self.target.name) if isinstance(error, MisfitError) else str(error)
            return PathFinding(item.name, item.shows, path.name, item.promise, "refused", words)
        status = self.rulings.status(item, differences)
        schedule, moved = None, next((d for d in differences if d.quantity == "o" and d.differing), None)
        if moved is not None and moved.first is not None and status in ("rounding", "allowed", "bits"):
            schedule = self._schedule(path.inputs, second, moved.first)
        words = words_of(item, status, differences)
        return PathFinding(item.name, item.shows, path.name, item.promise, status, words, tuple(differences), schedule)

    def _again(
        self, item: Arrangement, path: Path, first: Outputs, second: Outputs, expected: Expected
    ) -> Iterator[list[PathDifference]]:
        """Both calls of a path made again, one after the other, each compared with the other one's."""
        # Memory that was filled with NaN is not given out again each time.
        if item.name in (SAME_CALL.name, "uninitialised"):
            return
        yield compared(path, first, third := self.calls.made(path), expected)
        # After others the call itself may be another one.
        if item.name != "other-calls":
            again = self.calls.made(Path("", path.against or self.setting.base))
            yield compared(path, again, second, expected)
            yield compared(path, again, third, expected)
        yield compared(path, first, self.calls.made(path), expected)

    def _schedule(self, inputs: CaseInputs, outputs: Outputs, at: tuple[int, int, int]) -> str | None:
        """The recipe and order of keys of one head, in words; None where the bits do not name them."""
        if not self.schedules or inputs.q.shape[2] < _FEWEST_ROWS:
            return None
        batch, head = min(at[0], len(inputs.q) - 1), min(at[1], inputs.q.shape[1] - 1)
        group = inputs.q.shape[1] // inputs.k.shape[1]
        item, kv = slice(batch, batch + 1), head // group
        one, key = (item, slice(head, head + 1)), (item, slice(kv, kv + 1))
        own: dict[str, Any] = {n: None if (x := getattr(inputs, n)) is None else x[head : head + 1] for n in PER_HEAD}
        alone = replace(inputs, q=inputs.q[one], k=inputs.k[key], v=inputs.v[key], do=None, **own)
        capture = alone.captured({"o": outputs["o"][one]})
        found = identify_head(capture, DEFAULT_OBSERVATION, 0, 0, self.target.device)
        if found is None:
            return None
        if found.recipe is None or found.outcome == "flawed":
            near = found.best.match.agreement >= _NEAR
            return f"not named; nearest: {found.nearest}" if near else None
        if found.outcome == "unnamed":
            return found.name
        return f"{listed(found.names, 2)}: {describe_schedule(found.recipe.schedule)}"

    def _judged(
        self, found: Sequence[PathFinding], other: OtherFunction | None, wrong: Sequence[str]
    ) -> tuple[Literal["pass", "fail", "other-function"], str]:
        """The outcome, and the sentence that names the arrangement."""
        if other is not None and other.known:
            return "other-function", f"it {other.words}"
        if self.calls.overwritten:
            return "fail", written_words(self.calls.overwritten)
        failed = list(dict.fromkeys(p.arrangement for p in found if p.status in ("bits", "fault")))
        if other is not None and other.of_mask and "run-to-run" not in failed:
            # Keys that the call by itself does not see come back in arrangements.
            also = f"; it moves in {listed(failed, 4)}" if failed else ""
            return "fail", f"{ITSELF}: it {other.words}{also}"
        if failed:
            of_first = [p for p in found if p.arrangement == failed[0] and p.status in ("bits", "fault")]
            worst = next((p for p in of_first if p.status == "fault"), of_first[0])
            also = f"; also {listed(failed[1:], 4)}" if len(failed) > 1 else ""
            return "fail", f"{failed[0]}, {worst.path}: {worst.words}{also}"
        if other is not None:
            return "fail", f"{ITSELF}: it {other.words}"
        if wrong:
            return "fail", f"{ITSELF}: {together(wrong)}"
        ran = [p for p in found if p.status not in ("not-run", "refused")]
        if not ran:
            return "fail", f"nothing was compared: {found[0].words}" if found else "nothing was compared"
        moved = list(dict.fromkeys(p.arrangement for p in ran if p.status != "same"))
        refused = list(dict.fromkeys(p.arrangement for p in found if p.status == "refused"))
        arranged = plural(len({p.arrangement for p in ran}), "arrangement")
        also = f"; it refuses {listed(refused, 4)}" if refused else ""
        if not moved:
            return "pass", f"the same bits in {arranged}{also}"
        return "pass", f"nothing but rounding in {arranged}; other bits in {listed(moved, 4)}{also}"

    def _next(self, found: Sequence[PathFinding], other: OtherFunction | None) -> str | None:
        """The command, or the call in Python, to run next."""
        if other is not None:
            return other.again("invariance", self.again)
        failed = {p.status: p.arrangement for p in reversed(found) if p.status in ("bits", "fault")}
        if failed.keys() != {"bits"} or self.calls.overwritten or failed["bits"] not in MOVES:
            return None
        allowed = dict.fromkeys(p.arrangement for p in found if p.status == "bits")
        command = self.again.command("invariance", [f"--allow {','.join(allowed)}"])
        return f"{command} (if it may choose its order of adding by that)"

    def _further(self, errors: Sequence[OwnError], other: OtherFunction | None, wrong: Sequence[str]) -> list[str]:
        """What else is to be known."""
        said = []
        if self.lost:
            said.append(f"After {self.lost} the GPU could not be used: the other arrangements can be run with --only.")
        if other is not None:
            far = percent(other.relative_error) if other.relative_error < 1 else "far"
            said.append(f"The call itself is wrong: O is {far} off softmax(scale Q K^T) V.")
        elif wrong:
            said.append(f"The call itself is wrong: {together(wrong)}.")
        elif large := [e for e in errors if e.of_noise is not None and e.of_noise > LARGE]:
            named = together([f"{SYMBOLS[e.quantity]} {times(e.of_noise)}" for e in large])
            said.append(
                f"The call itself is further off than a well-rounded kernel ({named} times its error), and its noise "
                "is held to be so much larger; attn-diag check judges that."
            )
        return [*said, *self.rulings.notes()]
