"""Digests of the model's inputs: 64-bit sums that do not depend on order, restarts or layout.

A slice's checksum is a sum over its positions, so the checksums of a row's slices add up to the row's, regardless of
their number. A row's digest combines that sum with the row's number, and the digests of rows add up to the run's. All
sums are modulo 2**64; unlike XOR, a sum does not cancel a row that was trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import mix, mix_int
from ray_ulysses.data.read.reader import RowSlice

MODULUS = 1 << 64
_SIGN = 1 << 63
_WEIGHTS = np.uint64(0x77656967687473)


def checksum(
    first_position: int,
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    position_ids: NDArray[np.int64],
) -> int:
    """Return the checksum of a contiguous part of a row, from the model's input arrays [tokens].

    The part begins at ``first_position`` of the row. The checksums of a row's parts add up modulo 2**64.
    """
    places = np.arange(first_position, first_position + input_ids.size, dtype=np.uint64)
    # Mixing after each value detects a token and a label that were swapped.
    mixed = mix(places)
    for values in (input_ids, labels, position_ids):
        mixed = mix(mixed ^ values.astype(np.int64, copy=False).view(np.uint64))
    return int(mixed.sum(dtype=np.uint64))


def slice_checksum(row_slice: RowSlice) -> int:
    """Return the checksum of a slice; a row's slices add up to the same sum for any split."""
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
    """Return the checksum of the ranges ``(start, stop)`` of a row, whose tokens are concatenated in the arrays.

    Weights of 1 add nothing, so an array of ones gives the same sum as no array.
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
    """Return the checksum of the weights other than 1 and their positions in the row."""
    places = np.flatnonzero(weights != 1)
    bits = weights[places].astype("<f4").view(np.uint32).astype(np.uint64)
    mixed = mix(mix((places + first_position).astype(np.uint64) ^ _WEIGHTS) ^ bits)
    return int(mixed.sum(dtype=np.uint64))


def row_digest(row: int, row_checksum: int) -> int:
    """Return a row's digest from the sum of its slices' checksums; 0 for a filler."""
    if row < 0:
        return 0
    return mix_int(mix_int(row) ^ (row_checksum % MODULUS))


def add_digests(*digests: int) -> int:
    """Return the sum modulo 2**64."""
    return sum(digests) % MODULUS


def to_int64(value: int) -> int:
    """Return the signed integer with the same 64 bits; int64 sums of such integers wrap to the same digest."""
    return value - MODULUS if value >= _SIGN else value


def from_int64(value: int) -> int:
    """Return the digest with the same 64 bits as a signed integer."""
    return value % MODULUS
