"""Checksums of blocks, so that any byte range of a shard can be verified while it is read.

A shard keeps one 64-bit XXH3 (https://xxhash.com) for each block of each of its intervals. The blocks of an
interval begin at its first byte and the last one is as short as it must be: an interval that is read whole needs no
byte beside it, and a part of one at most two partial blocks more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from ray_ulysses.storage import Buffer

BLOCK_BYTES = 64 * 1024
_SUM_BYTES = 8


def first_wrong(table: bytes, content: Buffer, first_block: int) -> int | None:
    """Return the index of the first block of a byte range that is not what was written, counted in the range.

    Args:
        table: Checksums of a shard's blocks, in the order of the file, 64 bits each, little-endian.
        content: Whole blocks of one interval, in order; the last may be the interval's short one.
        first_block: The shard's number of the first of them.
    """
    expected = table[first_block * _SUM_BYTES : (first_block + num_blocks(len(content))) * _SUM_BYTES]
    found = block_sums(content)
    if found == expected:
        return None
    here, there = (np.frombuffer(sums, dtype="<u8") for sums in (found, expected))
    if len(here) != len(there):
        return min(len(here), len(there))
    return int(np.flatnonzero(here != there)[0])


def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks of an interval of this size in bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def table_bytes(sizes: Iterable[int]) -> int:
    """Return the size of the table of checksums for intervals of these sizes, in bytes."""
    return _SUM_BYTES * sum(num_blocks(size) for size in sizes)


def block_sums(content: Buffer) -> bytes:
    """Return the checksum of each block of some bytes that begin on a block's border."""
    return b"".join(_sums(memoryview(content)))


def checksum(content: Buffer) -> int:
    """Return the checksum of a short text, such as a header."""
    return xxhash.xxh3_64_intdigest(content)


def _sums(content: memoryview) -> Iterator[bytes]:
    for start in range(0, len(content), BLOCK_BYTES):
        # Canonical form is big-endian; the table is little-endian like everything else in safetensors.
        yield xxhash.xxh3_64_digest(content[start : start + BLOCK_BYTES])[::-1]
