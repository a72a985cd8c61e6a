"""Block checksums, which allow any byte range of a shard to be verified while it is read.

A shard stores a 64-bit XXH3 checksum (https://xxhash.com) for each block of each interval. An interval's first block
starts at the interval's first byte, and its last block may be short. A reader of a complete interval therefore reads no
other bytes, and a reader of part of an interval also reads the rest of that part's first and last blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from ray_ulysses.storage import Buffer

BLOCK_BYTES = 64 * 1024
SUM_BYTES = 8


def first_wrong(table: bytes, content: Buffer, first_block: int) -> int | None:
    """Return the index within `content` of the first block whose checksum is wrong, or None if all are correct.

    Args:
        table: Checksums of all blocks of the shard, in file order, as little-endian 64-bit integers.
        content: Consecutive complete blocks of one interval. The interval's last block may be short.
        first_block: Index in `table` of the first block of `content`.
    """
    expected = table[first_block * SUM_BYTES : (first_block + num_blocks(len(content))) * SUM_BYTES]
    found = block_sums(content)
    if found == expected:
        return None
    here, there = (np.frombuffer(sums, dtype="<u8") for sums in (found, expected))
    if len(here) != len(there):
        return min(len(here), len(there))
    return int(np.flatnonzero(here != there)[0])


def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks in an interval of `num_bytes` bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def table_bytes(sizes: Iterable[int]) -> int:
    """Return the size in bytes of the checksum table for intervals with the given sizes in bytes."""
    return SUM_BYTES * sum(num_blocks(size) for size in sizes)


def block_sums(content: Buffer) -> bytes:
    """Return the concatenated checksums of the blocks of `content`, which starts at a block boundary."""
    return b"".join(_sums(memoryview(content)))


def checksum(content: Buffer) -> int:
    """Return the checksum of `content` as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(content)


def _sums(content: memoryview) -> Iterator[bytes]:
    for start in range(0, len(content), BLOCK_BYTES):
        # The digest is big-endian; the table is little-endian, like all numbers in safetensors files.
        yield xxhash.xxh3_64_digest(content[start : start + BLOCK_BYTES])[::-1]
