"""Digests of the model's inputs: 64-bit sums that do not depend on the row order, on restarts, or on the layout.

A slice's checksum is a sum over token positions, so the checksum of a row is the sum over its slices, for any number of
slices. A row's digest combines the checksum with the row's number, and a run's digest is the sum over its rows. All
sums are modulo 2**64. Unlike XOR, a sum does not cancel a row that was trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import mix, mix_int
from ray_ulysses.data.read.reader import RowSlice

MODULUS = 1 << 64
_WEIGHTS = np.uint64(0x77656967687473)


def checksum(
    first_position: int,
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    position_ids: NDArray[np.int64],
) -> int:
    """Return the checksum of a contiguous part of a row, computed from the model's input arrays [tokens].

    ``first_position`` is the position of the part in the row. The checksums of a row's parts add up modulo 2**64.
    """
    places = np.arange(first_position, first_position + input_ids.size, dtype=np.uint64)
    # Mixing after each array detects a token and a label that were swapped.
    mixed = mix(places)
    for values in (input_ids, labels, position_ids):
        mixed = mix(mixed ^ values.astype(np.int64, copy=False).view(np.uint64))
    return int(mixed.sum(dtype=np.uint64))


def slice_checksum(row_slice: RowSlice) -> int:
    """Return the checksum of a slice. The sum over a row's slices is the same however the row is sliced."""
    return ranges_checksum(
        row_slice.ranges, row_slice.input_ids, row_slice.labels, row_slice.position_ids, row_slice.label_weights
    )


def ranges_checksum(
    ranges: Sequence[tuple[int, int]],
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    label_weights: NDArray[np.float32] | None = None,
) -> int:
    """Return the checksum of a row's ranges ``(start, stop)``, whose tokens are concatenated in the arrays.

    Label weights of 1 contribute nothing, so an array of ones gives the same checksum as no array.
    """
    total, place = 0, 0
    for start, stop in ranges:
        part = slice(place, place + stop - start)
        total += checksum(start, input_ids[part], labels[part], position_ids[part])
        if label_weights is not None:
            total += _weights_checksum(start, label_weights[part])
        place = part.stop
    return total % MODULUS


def _weights_checksum(first_position: int, weights: NDArray[np.float32]) -> int:
    """Return the checksum of all weights other than 1 and their positions in the row."""
    places = np.flatnonzero(weights != 1)
    bits = weights[places].astype("<f4").view(np.uint32).astype(np.uint64)
    mixed = mix(mix((places + first_position).astype(np.uint64) ^ _WEIGHTS) ^ bits)
    return int(mixed.sum(dtype=np.uint64))


def row_digest(row: int, row_checksum: int) -> int:
    """Return the digest of a row, given the sum of its slices' checksums modulo 2**64; 0 for a filler row."""
    if row < 0:
        return 0
    return mix_int(mix_int(row) ^ (row_checksum % MODULUS))


def add_digests(*digests: int) -> int:
    """Return the sum of digests modulo 2**64."""
    return sum(digests) % MODULUS


def to_int64(value: int) -> int:
    """Return the signed integer with the same 64 bits. int64 sums of such integers wrap to the same digest."""
    return value - MODULUS if value >= MODULUS // 2 else value
