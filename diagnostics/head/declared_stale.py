"""A stale amax in a declared kernel: scales of q, k or v that do not reach its largest numbers, which are clipped.

Or, as the amax of a history leaves them, scales that reach further, and leave codes unused: those of all alike. They
show in O's bits alone, so that every scale is tried that rounds otherwise.

All scales of one of them, or those of some blocks alone: a block whose scale is stale is looked for along what O is off
with each block's scale too small, one after the other, and its part of amax is then searched as that of all is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from attn_diag.head.declared_beside import BesideRecipe
from attn_diag.kernels.elements import Integers
from attn_diag.kernels.quantizers import Quantizer
from attn_diag.results.wording import number, together

# Parts of amax that are tried first, and the steps, and how many each way, in which others are about the best one. What
# is clipped shows from afar; of FP8 a scale that is 1 % off is as good as any other, as every number rounds elsewhere.
_PARTS, _SCANS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), ((0.01, 10), (0.002, 5))
# Parts above 1, up to 4: a scale that is half of 1 % off leaves most of 8 bits' codes as they are. Floats have the same
# digits with twice the scale.
_WIDER = tuple(1.01**n for n in range(3, 140))
_OCTAVE = 2.0
# A part that is nearer to 1 clips next to nothing.
_WHOLE = 0.97
# What explains more of what is left by less than this is not there.
_LESS = 0.9
# A block has another part than the rest where that leaves so much of what is left without.
_OTHER = 0.5
# So many blocks of one tensor are looked through, with this part of amax, and so many named. The two that O's error
# lies along most are tried.
_BLOCKS, _ABOUT, _NAMED, _TRIED = 128, 0.5, 8, 2

Where = tuple[str, int | None]
"""q, k or v, and the number of a block of it; None: all of them."""


@dataclass(frozen=True)
class StaleSearch:
    """By how much less than amax scales reach."""

    beside: BesideRecipe
    wraps: bool = False
    """Integers that pass the largest wrap around instead of becoming it."""
    level: Literal["", "tensor", "blocks"] = ""
    """Of two levels of scales: the tensor's alone, or the blocks' alone."""
    wider: bool = False
    """Scales that reach further than amax."""

    def others(self) -> Iterator[StaleSearch]:
        """Searches of integers that wrap, and of one of two levels of scales."""
        every = [replace(self, wraps=True), replace(self, level="blocks"), replace(self, level="tensor")]
        yield from (one for one in every if one._tensors())

    def named(self) -> dict[Where, float]:
        """The parts of amax that the scales of q, k and v reach, or of their blocks, where O has been clipped so."""
        wholes: list[Where] = [(name, None) for name, _, _ in self._tensors()]
        return self._but_for_blocks(self._found(lambda found: [one for one in wholes if one not in found], len(wholes)))

    def named_blocks(self) -> dict[Where, float]:
        """The same of single blocks."""
        shapes = dict(self._shapes())
        if not shapes:
            return {}

        def suspects(found: Mapping[Where, float]) -> list[Where]:
            off = min((x for x, _ in self.beside.off(self.changed(found))), key=lambda x: float(x.square().sum()))
            along = {
                where: float((off * shape).sum().square() / shape.square().sum().clamp(min=1e-300))
                for where, shape in shapes.items() if where not in found
            }  # fmt: skip
            return sorted(along, key=along.__getitem__)[-_TRIED:]

        return self._found(suspects, _NAMED)

    def changed(self, parts: Mapping[Where, float]) -> dict[str, str]:
        """The recipe's fields with scales of so many times amax."""
        changed = dict[str, str]()
        for name, text, by in self.beside.symmetric():
            largest = by.mapped
            of_all = parts.get((name, None), 1.0)
            # A second level is made for as large numbers as the first reaches.
            whole = "" if self.level == "tensor" else f" target={largest / of_all!r}"
            whole += {"tensor": f" level={of_all!r}", "blocks": f" level={1 / of_all!r}", "": ""}[self.level]
            whole = whole + " wraps=true" * self.wraps if (name, None) in parts else ""
            some = [
                f"{block}:{part / of_all!r}" for (of, block), part in parts.items() if of == name and block is not None
            ]
            blocks = f" stale={','.join(some)}" if some else ""
            if whole or blocks:
                changed[f"quantize_{name}"] = text + whole + blocks
        return changed

    def words(self, parts: Mapping[Where, float]) -> str:
        """In words: "the largest number of k is taken for 0.6 times what it is, …"."""
        by = {name: found for name, _, found in self.beside.symmetric()}
        said = []
        last = max((block for _, block in parts if block is not None), default=0) + 1
        for (name, block), part in sorted(
            parts.items(), key=lambda item: (item[0][0], last if item[0][1] is None else item[0][1])
        ):
            rest = " elsewhere" if sum(of == name for of, _ in parts) > 1 else ""
            rest = {"": rest, "tensor": " as a whole", "blocks": "'s blocks"}[self.level]
            where = rest if block is None else f" in {self.beside.place(name, by[name], block)}"
            said.append(f"{name}{where} is taken for {number(part, 2)} times what it is")
        if self.wider:
            return f"the largest number of {together(said)} (a stale amax)"
        beyond = "wraps around" if self.wraps else "is clipped (a stale amax)"
        return f"the largest number of {together(said)}, and what lies beyond {beyond}"

    def _tensors(self) -> list[tuple[str, str, Quantizer]]:
        every = list(self.beside.symmetric())
        if self.level:
            return [one for one in every if one[2].tensor_scale]
        return [one for one in every if isinstance(one[2].parsed_elements, Integers)] if self.wraps else every

    def _found(self, suspects: Callable[[Mapping[Where, float]], list[Where]], most: int) -> dict[Where, float]:
        best = self.beside.left({})
        found = dict[Where, float]()
        while len(found) < most:
            tried = [(where, part) for where in suspects(found) for part in self._parts_of(where)]
            left = self.beside.left_of_several([self.changed(found | {where: part}) for where, part in tried])
            if not left or min(left) > _LESS * best:
                break
            where, part = tried[left.index(min(left))]
            found[where] = part
            for step, count in _SCANS:
                best = self._scan(found, where, step, count)
        if len(found) > 1:
            # What was found first was so beside all the others.
            for where in found:
                for step, count in _SCANS:
                    best = self._scan(found, where, step, count)
        other = {where: part for where, part in found.items() if self.wider or part < (1.0 if self.wraps else _WHOLE)}
        if not other:
            return {}
        return other if (self.beside.explains(best) or self._moved({}, found)) and self._clips(found) else {}

    def _moved(self, here: Mapping[Where, float], found: Mapping[Where, float]) -> bool:
        return self.beside.moved(self.beside.off(self.changed(here)), self.beside.off(self.changed(found)))

    def _clips(self, found: Mapping[Where, float]) -> bool:
        """Whether it is not a wider scale that nothing passes: floats have the same digits with twice the scale."""
        if self.wraps or self.wider:
            return True
        twice = {where: 2 * part for where, part in found.items()}
        left, other = (self.beside.left(self.changed(parts)) for parts in (found, twice))
        return left < _OTHER * other or self._moved(twice, found)

    def _parts_of(self, where: Where) -> tuple[float, ...]:
        if self.wider:
            whole = isinstance({name: by for name, _, by in self._tensors()}[where[0]].parsed_elements, Integers)
            return tuple(part for part in _WIDER if whole or part < _OCTAVE)
        # An amax that is divided by 128, not 127, has a code of 128.
        return (127 / 128, *_PARTS) if self.wraps else _PARTS

    def _but_for_blocks(self, found: dict[Where, float]) -> dict[Where, float]:
        """The same, and the blocks of tensors with few that have another part than the rest."""
        for name, _, by in self._tensors() if found else ():
            count = int(self.beside.blocks(name, by).max()) + 1
            for block in range(count) if (name, None) in found and 1 < count <= _NAMED else ():
                best, where = self.beside.left(self.changed(found)), (name, block)
                left = self.beside.left_of_several([self.changed(found | {where: part}) for part in _PARTS])
                if min(left) <= _OTHER * best:
                    found[where] = _PARTS[left.index(min(left))]
                    for step, steps in _SCANS:
                        self._scan(found, where, step, steps)
        return found

    def _scan(self, parts: dict[Where, float], where: Where, step: float, count: int) -> float:
        """Move one part to the best one about it; returns what is left."""
        near = [parts[where] + i * step for i in range(-count, count + 1)]
        near = [part for part in near if 0 < part != 1 and (part > 1) == self.wider]
        left = self.beside.left_of_several([self.changed(parts | {where: part}) for part in near])
        parts[where] = near[left.index(min(left))]
        return min(left)

    def _shapes(self) -> Iterator[tuple[Where, Tensor]]:
        """What O is off in the beside's rows with one block's scale too small, [R, Dv], of every block."""
        plain = self.beside.off({})[0].out
        for name, _, by in self.beside.from_amax():
            each = self.beside.blocks(name, by)
            count = int(each.max()) + 1
            if not 1 < count <= _BLOCKS:
                continue
            every = [self.changed({(name, block): _ABOUT}) for block in range(count)]
            for block, off in enumerate(self.beside.off_of_several(every)):
                shape = off[0].out - plain
                if shape.any():
                    yield (name, block), shape
