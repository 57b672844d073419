"""How q, k and v of a declared kernel may be quantised otherwise than its recipe says, one change after the other.

A scale may be shared by wider blocks, or be made by other blocks (what is quantised and multiplied back with it then
agrees), or be another block's where codes are multiplied back alone. Each way is said in words and is the fields of a
recipe that make it, so that O's bits can be asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.head.declared_beside import BesideRecipe
from attn_diag.kernels.elements import Integers
from attn_diag.kernels.formats import Mode, base, parse
from attn_diag.kernels.quantizers import Quantizer, parse_quantizer

Way = tuple[str, dict[str, str]]
"""In words, and the fields of a recipe."""

# So many blocks, each of which may have another scale alone, are looked through; and so many all together.
_BLOCKS, _TOGETHER = 32, 4096
_MODES = {Mode.TOWARD_ZERO: "toward zero", Mode.DOWN: "down"}
_MODES_SAID = _MODES | {Mode.UP: "up", Mode.NEAREST_EVEN: "to the nearest"}
_MODES_OF_SCALES = {
    "e8m0": (Mode.UP, Mode.DOWN, Mode.NEAREST_EVEN), "e4m3": (Mode.UP, Mode.DOWN),
}  # fmt: skip
# Formats that are taken for another.
_OTHER_ELEMENTS = {"e4m3": ("e5m2",), "int8": ("int4",)}


@dataclass(frozen=True)
class Ways:
    """Every way that is tried."""

    beside: BesideRecipe

    def all(self) -> Iterator[Way]:
        """The ways."""
        recipe = self.beside.recipe
        for name, text, by in self.beside.quantizers():
            yield from self._wider(name, text, by)
            yield from _rounded(name, text, by)
            yield from _shifted(name, text, by)
            if by.symmetric and not by.search:
                yield from self._reaching(name, text, by)
                yield from self._of_others(name, text, by)
        if recipe.smooth_k != "none":
            yield "k's mean is not taken off before it is quantised", {"smooth_k": "none"}
        if (probs := parse(recipe.probs)) is not None and probs.mode is Mode.NEAREST_EVEN:
            said = f"P_bar is rounded {_MODES[Mode.TOWARD_ZERO]}, not to the nearest"
            yield said, {"probs": f"{base(recipe.probs)}:{Mode.TOWARD_ZERO}"}
        if (blocks := parse_quantizer(recipe.quantize_probs)) is not None:
            text = f"{recipe.quantize_probs} elements={base(blocks.elements)}:{Mode.TOWARD_ZERO} ties=even"
            yield f"P_bar is rounded {_MODES[Mode.TOWARD_ZERO]}, not to the nearest", {"quantize_probs": text}
            yield from self._wider_probs(blocks)
            text = f"{recipe.quantize_probs} masked=true"
            yield "the scales of P_bar's blocks are those of keys that are masked as well", {"quantize_probs": text}

    def _wider_probs(self, by: Quantizer) -> Iterator[Way]:
        """One scale of P_bar for more of a row's keys, at most those of a key tile."""
        recipe = self.beside.recipe
        for block in _wider_than(by.block, recipe.schedule.key_tile) if by.block.isdigit() else ():
            if block == "row" or int(block) < recipe.schedule.key_tile:
                of = "a key tile" if block == "row" else block_words(block)
                said = f"P_bar has a scale for {of}, not for {block_words(by.block)}"
                yield said, {"quantize_probs": f"{recipe.quantize_probs} block={block}"}

    def _wider(self, name: str, text: str, by: Quantizer) -> Iterator[Way]:
        """One scale for all, or for two or four blocks."""
        x = getattr(self.beside.head, name)
        shapes = {by.block_shape((len(x), x.shape[1]))}
        for block in _wider_than(by.block, len(x)):
            rows, columns = replace(by, block=block).block_shape((len(x), x.shape[1]))
            if (shape := (min(rows, len(x)), min(columns, x.shape[1]))) not in shapes:
                said = f"{name} has a scale for {block_words(block)}, not for {block_words(by.block)}"
                yield said, {f"quantize_{name}": f"{text} block={block}"}
            shapes.add(shape)

    def _reaching(self, name: str, text: str, by: Quantizer) -> Iterator[Way]:
        """Scales that the numbers of blocks of other rows make, as a quantiser's ``stale``."""
        for smooth in self._smoothings(name):
            amax, apart = self.beside.amax(name, by, smooth), by.row_groups
            x = getattr(self.beside.head, name)
            across = -(-x.shape[1] // by.block_shape((len(x), x.shape[1]))[1])
            # Blocks of one row of them, side by side; those of the next rows below.
            grid = amax.view(-1, apart * across)
            if not len(grid) > 1 or amax.numel() > _TOGETHER:
                return
            # A block of zeros has any scale.
            own = torch.where(amax > 0, amax, torch.inf)
            below = torch.cat([grid[1:], grid[-1:]])
            after = _parts(torch.maximum(grid, below).flatten() / own)
            so_far = _parts(grid.cummax(0).values.flatten() / own)
            to_come = _parts(grid.flip(0).cummax(0).values.flip(0).flatten() / own)
            alone = by.whole_rows and len(amax) <= _BLOCKS
            largest = (amax.max() / own).tolist() if alone else []
            whole = {f"{block}:{part!r}": block for block, part in enumerate(largest) if part > 1}
            words = dict[str, str]()
            if after and after not in whole:
                all_of_them = ", or all after it" if to_come == after else ""
                words[after] = (
                    f"{name} has scales of {block_words(by.block)} and the block after it{all_of_them} (later ones)"
                )
            if so_far and so_far not in whole:
                words[so_far] = f"{name} has scales of the largest number so far (a running amax)"
            if to_come and to_come not in whole and to_come != after:
                words[to_come] = f"{name} has scales of the largest number from there on (later ones)"
            for stale, block in whole.items():
                of = "head"
                of = "block after it, which is the head's" if stale == after else of
                of = "blocks before it, which is the head's (a running amax)" if stale == so_far else of
                words[stale] = f"{name} in {self.beside.place(name, by, block)} has the scale of the {of}"
            for stale, said in words.items():
                yield said, {f"quantize_{name}": f"{text} stale={stale}"} | smooth

    def _of_others(self, name: str, text: str, by: Quantizer) -> Iterator[Way]:
        """Scales that are another block's, another tensor's, or off by a power of two."""
        if by.scale.startswith("e8m0") and by.target is not None:
            yield (
                f"all scales of {name} are half of what they should be, and what lies beyond is clipped",
                {f"quantize_{name}": f"{text} target={2 * by.target!r}"},
            )
            yield (
                f"all scales of {name} are twice what they should be",
                {f"quantize_{name}": f"{text} target={by.target / 2!r}"},
            )
        for smooth in self._smoothings(name):
            scales = self.beside.scales(name, by, smooth)
            count = scales.numel()
            if not 1 < count <= _TOGETHER:
                return
            field = f"quantize_{name}"
            for of, others in self._sources(name, by, scales):
                # Blocks of zeros have any scale.
                ratio = torch.where((others > 0) & (scales > 0), others / scales, 1.0).flatten()
                if not (factors := _parts(ratio)):
                    continue
                yield f"{name} is multiplied back with {of}", {field: f"{text} descale={factors}"} | smooth
                if of.startswith("its"):
                    continue
                yield f"{name} has {of}", {field: f"{text} stale={factors}"} | smooth
                yield (
                    f"{name} is divided by {of} and multiplied back with its own",
                    {field: f"{text} stale={factors} descale={_parts(1 / ratio)}"} | smooth,
                )

    def of_blocks(self) -> Iterator[Way]:
        """Blocks whose scale alone is off by a power of two."""
        for name, text, by in self.beside.quantizers():
            for smooth in self._smoothings(name) if by.symmetric and not by.search else ():
                count = self.beside.scales(name, by, smooth).numel()
                for block in range(count) if 1 < count <= _BLOCKS else ():
                    where, field = f"{name} in {self.beside.place(name, by, block)}", f"quantize_{name}"
                    yield f"{where} has twice its scale", {field: f"{text} stale={block}:2.0"} | smooth
                    for factor, much in ((2.0, "twice"), (0.5, "half")):
                        said = f"{where} is multiplied back with {much} its scale"
                        yield said, {field: f"{text} descale={block}:{factor}"} | smooth

    def _sources(self, name: str, by: Quantizer, scales: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Whose scales they may be, in words, and these, in the shape of its own [R, C]."""
        flat, what, step = scales.flatten(), "feature" if by.block == "column" else "block", by.row_groups
        # At the ends there is the other end's, or its own.
        for before in (flat.roll(step), torch.cat([flat[:step], flat[:-step]])):
            yield f"the scale of the {what} before", before.view_as(scales)
        for after in (flat.roll(-step), torch.cat([flat[step:], flat[-step:]])):
            yield f"the scale of the {what} after", after.view_as(scales)
        yield f"the scale of the first {what} throughout", flat[:1].expand_as(flat).view_as(scales)
        if min(scales.shape) > 1:
            for transposed in (scales.T.reshape(scales.shape), scales.reshape(scales.shape[::-1]).T):
                yield "its scales transposed", transposed
        if name == "v" and self.beside.head.k.shape == self.beside.head.v.shape:
            yield "k's scales", self.beside.scales("k", by, {})
            own = parse_quantizer(self.beside.recipe.quantize_k)
            if own is not None and (of_k := self.beside.scales("k", own, {})).numel() == scales.numel():
                yield "k's scales", of_k.reshape(scales.shape)

    def _smoothings(self, name: str) -> tuple[dict[str, str], ...]:
        rounded = name == "k" and self.beside.recipe.smooth_k == "rounded-mean"
        return ({}, {"smooth_k": "mean"}) if rounded else ({},)


def _rounded(name: str, text: str, by: Quantizer) -> Iterator[Way]:
    """Other roundings and formats."""
    field, elements = f"quantize_{name}", base(by.elements)
    for mode in (Mode.TOWARD_ZERO, Mode.DOWN):
        said = f"{name} is rounded {_MODES[mode]}, not to the nearest"
        yield said, {field: f"{text} elements={elements}:{mode} ties=even"}
    scale, colon, used = by.scale.partition(":")
    for mode in _MODES_OF_SCALES.get(scale, ()) if by.symmetric else ():
        if mode != (Mode(used) if colon else Mode.NEAREST_EVEN):
            yield f"{name}'s scales are rounded {_MODES_SAID[mode]}", {field: f"{text} scale={scale}:{mode}"}
    for other in _OTHER_ELEMENTS.get(elements, ()):
        yield f"{name} is in {other}, not in {elements}", {field: f"{text} elements={other}"}


def _shifted(name: str, text: str, by: Quantizer) -> Iterator[Way]:
    """Integers that are multiplied back one too large or too small, as by a zero point."""
    if isinstance(by.parsed_elements, Integers):
        for by_one, said in ((1, "large"), (-1, "small")):
            yield (
                f"{name}'s integers are multiplied back one too {said} (a zero point off by one)",
                {f"quantize_{name}": f"{text} code_offset={by_one}"},
            )


def _parts(of_blocks: Tensor) -> str:
    """Blocks whose number is not 1, as ``stale`` and ``descale`` of a quantiser have them."""
    return ",".join(f"{block}:{part!r}" for block, part in enumerate(of_blocks.tolist()) if part not in (0.0, 1.0))


def _wider_than(block: str, rows: int) -> list[str]:
    """The blocks that are tried instead of one of so many rows: all in one, twice and four times as large."""
    found = re.fullmatch(r"(\d+)(rows(?:/\d)?|x1)?", block)
    if found is None:
        more = {"column": [f"{rows}x2", f"{rows}x4"], "row": [f"{2**n}rows" for n in range(1, 8)]}
        return ["tensor", *more.get(block, [])] if block in more else []
    size, kind = int(found[1]), found[2] or ""
    whole = {"": ["row"], "x1": ["column"]}.get(kind, ["tensor"])
    return whole + [f"{n * size}{kind}" for n in (2, 4)]


def block_words(block: str) -> str:
    """What shares a scale, in words."""
    words = {"tensor": "the head", "row": "a row", "column": "a feature"}
    if block in words:
        return words[block]
    if found := re.fullmatch(r"\d+x([2-9])", block):
        return f"{found[1]} features"
    return re.sub(r"^(\d+)(rows.*|x1)?$", lambda m: f"{m[1]} {'rows' if m[2] else 'of a row'}", block)
