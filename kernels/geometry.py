"""Shapes and launch parameters of the Triton kernels: which keys a row sees, and how a recipe's ranges become tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from attn_diag.kernels.recipe import Recipe

Causal = Literal["none", "top-left", "bottom-right"]
Level = Literal["none", "rows", "tiles", "full"]
Operands = Literal["given", "int8", "e4m3"]
"""Numbers as they are given, or codes with scales."""
AlibiOrigin = Literal["row", "first-key", "last-key"]

HEAD_DIMS = (16, 576)
MOST_VALUES = 512
_MANTISSA = {"bf16": 7, "fp16": 10}


@dataclass(frozen=True)
class Visibility:
    """Which keys query row t of Tq sees among Tk: position(t) - left <= j <= position(t) + right."""

    causal: Causal = "none"
    """As in ``attn_diag.reference.Masking``: position(t) = t + shift, shift = 0 for "top-left", else Tk - Tq."""
    window: tuple[int, int] | None = None
    """(left, right), inclusive, -1 for unlimited."""
    alibi_origin: AlibiOrigin = "row"
    """Where ALiBi counts distances from, as in ``attn_diag.reference.Alibi``."""

    def reach(self) -> tuple[int | None, int | None]:
        """(left, right) in keys; None for unlimited."""
        left, right = (None if n < 0 else n for n in self.window or (-1, -1))
        return left, 0 if self.causal != "none" else right

    def shift(self, q_length: int, k_length: int) -> int:
        """position(t) - t."""
        return 0 if self.causal == "top-left" else k_length - q_length

    def arguments(self, q_length: int, k_length: int) -> tuple[int, int, int]:
        """shift, left and right as the kernels take them: 0 where unlimited, which their Geometry says."""
        left, right = self.reach()
        return self.shift(q_length, k_length), left or 0, right or 0


@dataclass(frozen=True)
class Geometry:
    """Everything a kernel is compiled for besides its recipe."""

    head_dim: int
    """D."""
    block_d: int
    """head_dim, padded to a power of two, or the largest power of two in it: see ``chunks``."""
    block_m: int
    """Query rows of a tile."""
    block_n: int
    """Keys of a tile."""
    warps: int
    """Warps of a block."""
    stages: int
    """Stages of the software pipeline."""
    left: bool
    """Whether keys are hidden on the left."""
    right: bool
    """Whether keys are hidden on the right."""
    softcap: bool
    """Whether there is one."""
    mantissa: int
    """Explicit bits of q's format."""
    tma: bool
    """Whether tiles come through tensor descriptors."""
    value_dim: int
    """V's features: D, or another number (192 and 128 in DeepSeek's MLA)."""
    block_dv: int
    """value_dim, padded to a power of two."""
    rest_d: int = 0
    """The features of q and k behind those, padded likewise; 0: there are none."""
    latent: bool = False
    """Whether v is k's first block_d features, so that a tile of both is loaded once."""
    wanted: Literal["both", "dk", "dv"] = "both"
    """Which of a block of keys' gradients are summed."""
    range_tiles: int = 1
    """Tiles of a key range."""
    ranges: bool = False
    """Whether the recipe rounds once for each range, or rounds l, so that ranges are walked twice."""
    split: bool = False
    """Whether the keys are split."""
    unrounded: bool = False
    """Whether O is kept in fp32 too."""
    rows: bool = False
    """Instrumentation: row statistics."""
    dump: bool = False
    """Instrumentation: tiles of chosen rows."""
    dump_all: bool = False
    """Whether those are all rows, and a row's slot is its number in [B, Hq, Tq]."""
    track_near: bool = False
    """Whether scores within reach of the maximum are counted as they pass."""
    sink: bool = False
    """Whether each head has a sink in the softmax's denominator."""
    packed: bool = False
    """Whether 16-bit numbers are compared and made two at a time."""
    scores_of: Operands = "given"
    """What q k^T multiplies."""
    values_of: Operands = "given"
    """What P_bar V multiplies."""
    listed: bool = False
    """Whether only some blocks of rows are run, which are listed."""
    documents: int = 0
    """Of how many packed sequences a block of rows reads the borders at once; 0: rows of one sequence."""
    page_size: int = 0
    """Keys of a page, where the documents' keys lie in pages."""
    group: int = 1
    """Heads of q whose rows a tile has in turn, all those of one head of k; 1: the rows of one head."""
    alibi: Literal["none", "behind", "distance", "first-key", "last-key"] = "none"
    """What ALiBi's slopes are multiplied by: j - position(t), -|j - position(t)|, j, or j - (Tk - 1)."""

    @property
    def plain(self) -> bool:
        """Whether all rows of dense sequences are run through tensor descriptors, and nothing but O and L is kept."""
        special = self.documents or self.page_size or self.group > 1 or self.split or self.listed
        watched = self.rows or self.unrounded or self.dump
        return self.tma and not special and not watched

    @property
    def absorbed(self) -> bool:
        """Whether this is a plain call over absorbed MLA's latent, which ``triton_latent`` has kernels for."""
        return self.plain and self.latent and (self.head_dim, self.value_dim) == (576, 512)

    @property
    def in_warpgroups(self) -> bool:
        """Whether this is a plain call over as many features as ``triton_warpgroups`` has a kernel for."""
        wide = (self.block_d, self.rest_d, self.block_dv) in ((128, 0, 128), (256, 0, 256))
        codes = self.scores_of != "given" or self.values_of != "given"
        return self.plain and wide and not (self.latent or self.ranges or codes)


def forward_geometry(
    recipe: Recipe, head_dim: int, visibility: Visibility, *, softcap: bool, level: Level,
    tma: bool = False, packed: bool = False, value_dim: int | None = None, alike: bool = False,
) -> Geometry:  # fmt: skip
    """Tile sizes for the recipe's key ranges. ``tma``, ``packed``: whether the device can; ``value_dim``: else D;
    ``alike``: whether v begins where k does, as a latent that both share.

    The query block is free: it changes no rounding (unless the order is diagonal-first).
    """
    tile = recipe.schedule.key_tile
    block_d = padded(max(head_dim, value_dim or 0))
    block_n = min(tile, 64 if block_d > 128 else 128)
    ranges = tile > block_n or recipe.row_sum != "fp32"
    if ranges:
        block_n = min(block_n, 64)
    wide = block_d * block_n > 64 * 128  # 64 rows of it would not leave registers for a second block on the core
    block_m, warps, stages = (128, 8, 2) if wide else (64, 4, 3 if block_n <= 64 else 2)
    if block_d > 256:  # two stages are more than shared memory holds
        block_m, stages = 64, 1
    if recipe.schedule.order == "diagonal-first":
        block_m = recipe.schedule.query_block
        warps = 8 if block_m >= 128 else 4
    watched = level != "none"
    geometry = _geometry(recipe, head_dim, visibility, (block_m, block_n, warps, stages), softcap, tma, value_dim)
    return replace(
        _with_latent(geometry, alike and not ranges),
        range_tiles=-(-tile // block_n),
        ranges=ranges,
        split=recipe.schedule.split_keys is not None,
        rows=watched,
        dump=level in ("tiles", "full"),
        dump_all=level == "full",
        track_near=watched and not ranges and recipe.subtracts_maximum,
        packed=packed and recipe.probs in ("bf16", "fp16"),
    )


def dq_geometry(
    recipe: Recipe, head_dim: int, visibility: Visibility, *, softcap: bool, level: Level, tma: bool,
    value_dim: int | None = None, alike: bool = False,
) -> Geometry:  # fmt: skip
    """Tiles of the dQ kernel: they change no rounding, only the order of sums. ``alike`` as in ``forward_geometry``."""
    tiles = _DQ_TILES[_width(head_dim, value_dim)]
    geometry = _with_latent(_geometry(recipe, head_dim, visibility, tiles, softcap, tma, value_dim), alike)
    return replace(geometry, dump=level in ("tiles", "full"))


def dkdv_geometry(
    recipe: Recipe, head_dim: int, visibility: Visibility, *, softcap: bool, tma: bool, value_dim: int | None = None,
    alike: bool = False,
) -> Geometry:  # fmt: skip
    """Tiles of the dK/dV kernel."""
    tiles = _DKDV_TILES[_width(head_dim, value_dim)]
    return _with_latent(_geometry(recipe, head_dim, visibility, tiles, softcap, tma, value_dim), alike)


# Query rows, keys, warps and stages by ``_width``: the fastest of some that were timed, up to 128 on an H200, of 192
# beside 128 and of 256 on an H100. A single stage fetches a tile through registers, which then spill, but two of the
# widest tiles are more than shared memory holds.
_DQ_TILES = ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 8, 1))
_DKDV_TILES = ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2), (64, 64, 8, 2), (32, 64, 8, 1))


def _width(head_dim: int, value_dim: int | None) -> int:
    """0 to 4: features up to 64, up to 128, up to 192 beside 128, up to 256, more."""
    widest, both = max(head_dim, value_dim or 0), sum(chunks(head_dim)) + padded(value_dim or head_dim)
    return [widest <= 64, widest <= 128, both <= 320, widest <= 256, True].index(True)


def _with_latent(geometry: Geometry, alike: bool) -> Geometry:
    """With k and v as one tile where they are, which leaves room for the next one."""
    if not alike or not geometry.value_dim == geometry.block_dv == geometry.block_d:
        return geometry
    return replace(geometry, latent=True, stages=max(geometry.stages, 2))


def _geometry(
    recipe: Recipe, head_dim: int, visibility: Visibility, tiles: tuple[int, int, int, int], softcap: bool, tma: bool,
    value_dim: int | None,
) -> Geometry:  # fmt: skip
    """What all kernels have in common; ``tiles``: query rows, keys, warps, stages."""
    left, right = (reach is not None for reach in visibility.reach())
    mantissa = _MANTISSA[recipe.input]
    value_dim = value_dim or head_dim
    block_d, rest_d = chunks(head_dim)
    if rest_d and max(head_dim, value_dim) > 256:
        # Triton 3.6 compiles the product of 32 more features wrongly there: D = 288 was 20 % off, or out of bounds.
        rest_d = max(rest_d, 64)
    blocks = (value_dim, padded(value_dim), rest_d)
    return Geometry(head_dim, block_d, *tiles, left, right, softcap, mantissa, tma, *blocks)


def chunks(head_dim: int) -> tuple[int, int]:
    """The features of q and k as a power of two, and beyond 128 a second one where both together are less than the next
    power: 576 = 512 + 64, which is not 1024, and 192 = 128 + 64."""
    whole = padded(head_dim)
    first, rest = whole // 2, padded(head_dim - whole // 2)
    return (whole, 0) if head_dim <= 128 or first + rest >= whole else (first, rest)


def padded(head_dim: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def anonymous(recipe: Recipe) -> Recipe:
    """The recipe without its name, without the length of its splits, which kernels are given as a number, and without
    what a GPU's instructions decide: so that equal roundings share one compiled kernel."""
    return replace(recipe, name="", summary="", mma_k=16, schedule=replace(recipe.schedule, split_keys=None))
