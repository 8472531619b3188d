"""Seconds of one kernel on a GPU, from its shape and a few figures of the device.

A matrix product is cut into tiles of its result, which the multiprocessors take in waves::

    waves   = ceil(batch * ceil(m / tile_m) * ceil(n / tile_n) * parts / units)
    compute = waves * 2 * tile_m * tile_n * (k / parts + start) / (rate / units * tile_rate)

The last wave counts whole, though it rarely is ("wave quantisation"), and every tile pays for
filling and emptying its pipeline. That is a latency of so many cycles, so that a wider
multiprocessor loses more steps of k to it: ``start`` is ``k_start`` for each 1,024 FLOP that one
does in a cycle. The library is taken to choose the best of the tiles and of the parts that it may
cut k into. Traffic is hidden behind arithmetic, nearly: the two are joined by a norm of order
``overlap``. What fits in the last-level cache is moved faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (16, 64))
"""Rows and columns of a block's result, out of those that cuBLAS has (``cublasLtMatmulTile_t``)."""

PARTS = (1, 2, 3, 4, 6, 8, 16)
"""Into how many parts a kernel may cut k, each of which sums its own (split-k)."""

ATTENTION_ROWS = 128
"""Queries of a block of FlashAttention-2 (``kBlockM`` of its ``flash_fwd_launch_template.h``)."""

COLUMN_ROWS = 4096
"""Rows of a product for which `KernelConstants.columns` is stated."""

LARGEST_TILE, SMALLEST_SCALED = 256 * 128, 64 * 64


@dataclass(frozen=True)
class ChipFigures:
    """A device at one precision: data-sheet figures times the shares its table gives.

    Attributes:
        rate_flops_per_s: That large products sustain.
        bandwidth_bytes_per_s: That copies sustain.
        cache_bytes: Its last-level cache.
        num_units: Its multiprocessors.
        clock_hz: Their boost clock.
        walks_columns: Whether its library's products fall back for many columns (see
            `column_slowdown`).
    """

    rate_flops_per_s: float
    bandwidth_bytes_per_s: float
    cache_bytes: float
    num_units: int
    clock_hz: float
    walks_columns: bool = False


@dataclass(frozen=True)
class KernelConstants:
    """Constants of all devices for one kind of arithmetic; fitted, in the tables.

    Attributes:
        k_start: Steps of k that a tile's start and end are worth on a multiprocessor that does
            1,024 FLOP in a cycle.
        half_tile: Rate of a tile of half the largest area, against the largest's.
        small_tile: Factor on the rate each time the area halves again.
        cache_unit_rate: Bytes a second that one multiprocessor draws from the last-level cache.
        overlap: Order of the norm that joins arithmetic and traffic.
        start_s: From one kernel's end to the next one's first block, on the device.
        columns: Columns of the result up to which devices that walk columns do not fall back.
        column_exponent: Power of columns with which they do beyond that.
    """

    k_start: float
    half_tile: float
    small_tile: float
    cache_unit_rate: float
    overlap: float
    start_s: float
    columns: float = 4096.0
    column_exponent: float = 0.0

    def tile_start(self, chip: ChipFigures) -> float:
        """Return the steps of k that a tile's start and end are worth on a device."""
        return self.k_start * chip.rate_flops_per_s / chip.num_units / chip.clock_hz / 1024


def traffic_seconds(moved: Array, chip: ChipFigures, cache_unit_rate: float) -> Array:
    """Return the time to move bytes once, part of them in the cache if they nearly fit.

    A cache serves every multiprocessor at a rate of its own, so that it helps where memory is slow
    for their number (GDDR), and does not where it is fast (HBM).
    """
    # A working set above the cache streams through it and evicts itself: nothing of it is hit.
    fits = np.clip(2.5 - 2.0 * moved / max(chip.cache_bytes, 1.0), 0.0, 1.0)
    slow = chip.bandwidth_bytes_per_s
    fast = max(slow, cache_unit_rate * chip.num_units)
    time_s: Array = moved / (slow + (fast - slow) * fits)
    return time_s


def product_seconds(
    shapes: Array, flops: Array, moved: Array, chip: ChipFigures, constants: KernelConstants
) -> Array:
    """Return the time of products of shapes (batch, m, n, k), without their start.

    ``flops`` scales the arithmetic where it is not 2 batch m n k: a convolution's backward is two
    products, Winograd's algorithm saves multiplications.
    """
    batch, m, n, k = shapes.T
    best = np.full(len(shapes), np.inf)
    for tile_m, tile_n in TILES:
        area = tile_m * tile_n
        rate = chip.rate_flops_per_s / chip.num_units * _tile_rate(area, constants)
        tiles = batch * np.ceil(m / tile_m) * np.ceil(n / tile_n)
        for parts in PARTS:
            waves = np.ceil(tiles * parts / chip.num_units)
            steps = np.ceil(k / parts / 32) * 32 + constants.tile_start(chip)
            time_s = waves * 2 * area * steps / rate
            if parts > 1:
                # Partial sums in float32 are written and read, mostly in the cache.
                sums = 8.0 * parts * batch * m * n
                time_s = time_s + sums / (2 * chip.bandwidth_bytes_per_s) + constants.start_s
            best = np.minimum(best, time_s)
    arithmetic = best * flops / (2 * batch * m * n * k)
    if chip.walks_columns:
        arithmetic = arithmetic * column_slowdown(m, n, constants)
    traffic = traffic_seconds(moved, chip, constants.cache_unit_rate)
    order = constants.overlap
    joined: Array = (arithmetic**order + traffic**order) ** (1 / order)
    return joined


def column_slowdown(rows: Array, columns: Array, constants: KernelConstants) -> Array:
    """Return the factor on products of many columns where tiles are taken row after row.

    A wave then reaches over all columns and shares no operand but a few rows, and a small cache
    keeps nothing until the next row of tiles; the more rows, the less. Libraries since Volta take
    tiles in squares.
    """
    reach = columns * np.sqrt(rows / COLUMN_ROWS)
    found: Array = np.maximum(1.0, reach / constants.columns) ** constants.column_exponent
    return found


def attention_seconds(
    shapes: Array, flops: Array, moved: Array, chip: ChipFigures, constants: KernelConstants
) -> Array:
    """Return the time of fused attention, whose blocks are rows of queries of one head."""
    heads, queries, keys, _ = shapes.T
    blocks = heads * np.ceil(queries / ATTENTION_ROWS)
    # Blocks of causal attention differ in length, so that a wave's end is not felt: what remains
    # of quantisation is a device that is not full.
    filled = np.minimum(1.0, blocks / chip.num_units)
    padded = np.ceil(queries / ATTENTION_ROWS) * ATTENTION_ROWS / queries
    padded = padded * (keys + constants.tile_start(chip)) / keys
    arithmetic = flops * padded / (chip.rate_flops_per_s * filled)
    traffic = traffic_seconds(moved, chip, constants.cache_unit_rate)
    longer: Array = np.maximum(arithmetic, traffic)
    return longer


def _tile_rate(area: int, constants: KernelConstants) -> float:
    """Return a tile's rate against the largest's: smaller ones reuse less of what they load."""
    if area >= LARGEST_TILE:
        return 1.0
    halvings = np.log2(LARGEST_TILE / max(area, SMALLEST_SCALED)) - 1
    rate = constants.half_tile * constants.small_tile**halvings
    # Below 64 x 64 the tensor cores' own shape leaves rows empty.
    return float(rate * min(1.0, area / SMALLEST_SCALED))
