"""Checkpoint shards: one safetensors file per rank, with 1-D tensors and a checksum for each block.

Format: https://huggingface.co/docs/safetensors (8-byte header length, JSON header, data). Shards are written part by
part and read by byte range, so that a reader fetches only the bytes that it needs. The last tensor, ``block_sums``,
contains the checksums of all preceding blocks. The manifest contains the checksums of ``block_sums`` and of the header.
Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ray_ulysses.checkpoint.checksums import BLOCK_BYTES, block_sums, checksum, first_wrong, num_blocks, table_bytes
from ray_ulysses.checkpoint.intervals import Interval
from ray_ulysses.checkpoint.state import TensorPart, dtype_name
from ray_ulysses.storage import Buffer, Store
from ray_ulysses.storage.store import StoredFile

if TYPE_CHECKING:
    import torch

SUMS_KEY = "block_sums"
CHUNK_BYTES = 16 * 2**20
assert CHUNK_BYTES % BLOCK_BYTES == 0


class ShardDamage(ValueError):
    """A stored shard is damaged; the message specifies the file, tensor and byte range."""


class StoredInterval(NamedTuple):
    """Position of an interval in its shard."""

    interval: Interval
    offset: int
    """Byte offset of the interval in the file."""
    num_bytes: int
    first_block: int
    """Index of the interval's first block in the shard's checksum table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """A shard, with the checksums from the manifest; `shard_table.ShardRecord` is the manifest's form of it."""

    file: str
    """Key of the shard, relative to the checkpoint's folder."""
    num_bytes: int
    header_bytes: int
    """Size of the header, including the length field; the data starts at this offset."""
    header_sum: int
    """Checksum of the header, including the length field."""
    sums_sum: int
    """Checksum of the table of block checksums at the end of the file."""
    intervals: Sequence[StoredInterval]
    """Intervals in the shard, in file order."""

    @property
    def sums_offset(self) -> int:
        """Byte offset of the table of block checksums."""
        return self.intervals[-1].offset + self.intervals[-1].num_bytes if self.intervals else self.header_bytes


def place_intervals(intervals: Sequence[tuple[Interval, int]], header_bytes: int) -> tuple[StoredInterval, ...]:
    """Return the positions of intervals that follow the header one after another, given their sizes in bytes."""
    sizes = [size for _, size in intervals]
    offsets = accumulate(sizes, initial=header_bytes)
    blocks = accumulate((num_blocks(size) for size in sizes), initial=0)
    return tuple(
        StoredInterval(interval, offset, size, block)
        for (interval, size), offset, block in zip(intervals, offsets, blocks, strict=False)
    )


def write_shard(store: Store, folder: str, file: str, parts: Sequence[TensorPart]) -> ShardEntry:
    """Write a rank's 1-D parts with distinct keys to a new, durable shard and return its manifest entry.

    Empty parts are skipped. `file` is the key of the shard, relative to the checkpoint's `folder`.

    Raises:
        OSError: The write failed, and no file was created.
    """
    parts = [part for part in parts if part.tensor.numel() > 0]
    held = tuple((part.key, part.start, part.tensor.numel(), part.tensor.dtype) for part in parts)
    header, intervals = shard_layout(held)
    sums = bytearray()
    num_bytes = store.create(f"{folder}/{file}", _file_chunks(header, parts, sums))
    entry = ShardEntry(
        file=file,
        num_bytes=num_bytes,
        header_bytes=len(header),
        header_sum=checksum(header),
        sums_sum=checksum(sums),
        intervals=intervals,
    )
    written = len(header) + sum(stored.num_bytes for stored in intervals) + len(sums)
    assert num_bytes == written, f"{file}: {num_bytes} bytes written, {written} expected"
    return entry


def read_sums(store: Store, folder: str, entry: ShardEntry) -> bytes:
    """Read a shard's table of block checksums.

    Raises:
        ShardDamage: The file has the wrong size, or the table is damaged.
        OSError: The file can't be read.
    """
    with store.open(f"{folder}/{entry.file}") as file:
        _check_size(file, entry)
        values = bytes(file.read_at(entry.sums_offset, entry.num_bytes - entry.sums_offset))
    if checksum(values) != entry.sums_sum:
        raise ShardDamage(f"{entry.file}: the checksum table at byte {entry.sums_offset} is damaged")
    return values


def find_damage(store: Store, folder: str, entry: ShardEntry, *, read_content: bool) -> str | None:
    """Describe the damage to a stored shard, or return None if the shard is intact.

    `read_content` means that every byte is read and checksums are compared. Otherwise only the size is compared.

    Raises:
        OSError: The shard can't be read, which does not mean that it is damaged.
    """
    try:
        if read_content:
            for _ in verified_chunks(store, folder, entry):
                pass
        else:
            with store.open(f"{folder}/{entry.file}") as file:
                _check_size(file, entry)
    except FileNotFoundError:
        return f"{entry.file} is missing"
    except ShardDamage as damage:
        return str(damage)
    return None


def verified_chunks(store: Store, folder: str, entry: ShardEntry) -> Iterator[int]:
    """Read a shard completely, verify every byte, and yield the number of bytes in each chunk.

    Raises:
        ShardDamage: The shard is damaged.
        OSError: The shard can't be read.
    """
    sums = read_sums(store, folder, entry)
    yield len(sums)
    with store.open(f"{folder}/{entry.file}") as file:
        yield check_header(file, entry)
        chunk = memoryview(bytearray(min(CHUNK_BYTES, entry.num_bytes)))
        for stored in entry.intervals:
            for start in range(0, stored.num_bytes, CHUNK_BYTES):
                content = chunk[: stored.num_bytes - start]
                if file.readinto(content) < len(content):
                    raise ShardDamage(f"{entry.file} is truncated within {stored.interval.key}")
                check_blocks(entry, stored, sums, content, start)
                yield len(content)


def check_header(file: StoredFile, entry: ShardEntry) -> int:
    """Read and verify the header at the start of a shard, and return the header's size in bytes.

    Raises:
        ShardDamage: The header is damaged.
        OSError: The shard can't be read.
    """
    header = file.read(entry.header_bytes)
    if checksum(header) != entry.header_sum:
        raise ShardDamage(f"{entry.file}: the header's checksum is wrong (bytes 0 to {entry.header_bytes - 1})")
    return len(header)


def check_blocks(entry: ShardEntry, stored: StoredInterval, sums: bytes, content: Buffer, start: int) -> None:
    """Verify blocks of an interval with the shard's table of checksums.

    `content` consists of complete blocks and begins at byte `start` of the interval.

    Raises:
        ShardDamage: A block is damaged; the message specifies the first damaged block.
    """
    assert start % BLOCK_BYTES == 0
    wrong = first_wrong(sums, content, stored.first_block + start // BLOCK_BYTES)
    if wrong is not None:
        first = stored.offset + start + wrong * BLOCK_BYTES
        last = min(first + BLOCK_BYTES, stored.offset + stored.num_bytes) - 1
        raise ShardDamage(f"{entry.file}: the checksum of {stored.interval.key} is wrong (bytes {first} to {last})")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor; a contiguous tensor in host memory is not copied."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy 2 arrays are buffers


def _check_size(file: StoredFile, entry: ShardEntry) -> None:
    if file.size != entry.num_bytes:
        raise ShardDamage(f"{entry.file} has {file.size} bytes instead of {entry.num_bytes}")


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the length field and JSON header of a safetensors file, padded with spaces to align the data.

    `tensors` contains the name, dtype, shape and size in bytes of each tensor, in file order.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        offsets = [offset, offset + num_bytes]
        fields[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": offsets}
        offset += num_bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@lru_cache(maxsize=4)
def shard_layout(held: tuple[tuple[str, int, int, torch.dtype], ...]) -> tuple[bytes, tuple[StoredInterval, ...]]:
    """Return a shard's header and the positions of its intervals; cached, because all of a rank's shards are alike.

    `held` contains the key, start, number of elements and dtype of each interval.
    """
    import torch

    starts = {key: start for key, start, _, _ in held}
    assert len(starts) == len(held), "a shard has two intervals of the same tensor"
    sizes = [num_elements * dtype.itemsize for _, _, num_elements, dtype in held]
    tensors = [(key, dtype, [count], size) for (key, _, count, dtype), size in zip(held, sizes, strict=True)]
    sums = table_bytes(sizes)
    metadata = {"format": "ray-ulysses", "starts": json.dumps(starts)}
    header = safetensors_header([*tensors, (SUMS_KEY, torch.uint8, [sums], sums)], metadata)
    intervals = [Interval(key=key, start=start, stop=start + count) for key, start, count, _ in held]
    return header, place_intervals(list(zip(intervals, sizes, strict=True)), len(header))


def _file_chunks(header: bytes, parts: Sequence[TensorPart], sums: bytearray) -> Iterator[Buffer]:
    """Yield the content of a shard in file order, and append the checksum of each block to `sums`."""
    yield header
    for part in parts:
        assert part.tensor.dim() == 1, f"{part.key} is not flat"
        content = bytes_of(part.tensor)
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            sums += block_sums(chunk)
            yield chunk
    yield sums
