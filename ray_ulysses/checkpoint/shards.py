"""One rank's shard: a safetensors file of 1-D parts with a checksum for each block, written from front to back.

Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, data). It is written
here part by part, and read by byte range, so that nothing but what is wanted is read. The last tensor,
``block_sums``, holds the checksums of all blocks before it; the manifest holds the checksums of it and of the
header. Nothing is pickled.
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
    """A stored shard is not what was written; the text names file, tensor and bytes."""


class StoredInterval(NamedTuple):
    """The place of an interval in its shard; a tuple as an `Interval` is."""

    interval: Interval
    offset: int
    """Its first byte, counted from the file's beginning."""
    num_bytes: int
    first_block: int
    """The shard's number of its first block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """The manifest's entry of one shard."""

    file: str
    """Its key, relative to the checkpoint's folder."""
    num_bytes: int
    header_bytes: int
    """Where the data begin."""
    header_sum: int
    """Checksum of the header and its length field."""
    sums_sum: int
    """Checksum of the table of block checksums, which ends the file."""
    intervals: tuple[StoredInterval, ...]
    """What it holds, in the order of the file."""

    @property
    def sums_offset(self) -> int:
        """Return where the table of block checksums begins."""
        return self.num_bytes - table_bytes(stored.num_bytes for stored in self.intervals)


def place_intervals(intervals: Sequence[tuple[Interval, int]], header_bytes: int) -> tuple[StoredInterval, ...]:
    """Return the places of intervals of given sizes in bytes, one after the other behind the header (pure)."""
    sizes = [size for _, size in intervals]
    offsets = accumulate(sizes, initial=header_bytes)
    blocks = accumulate((num_blocks(size) for size in sizes), initial=0)
    return tuple(
        StoredInterval(interval, offset, size, block)
        for (interval, size), offset, block in zip(intervals, offsets, blocks, strict=False)
    )


def write_shard(store: Store, folder: str, file: str, parts: Sequence[TensorPart]) -> ShardEntry:
    """Write one rank's parts durably and return the shard's entry.

    Args:
        store: Where to.
        folder: The checkpoint's folder.
        file: The shard's key, relative to it; it must be new.
        parts: 1-D parts with different keys; empty ones are left out.

    Raises:
        OSError: It could not be written; then nothing appears under its name.
    """
    parts = [part for part in parts if part.tensor.numel() > 0]
    header, intervals = _layout(tuple((part.key, part.start, part.tensor.numel(), part.tensor.dtype) for part in parts))
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
        ShardDamage: The file has another size or the table is not what was written.
        OSError: It can't be read.
    """
    with store.open(f"{folder}/{entry.file}") as file:
        _check_size(file, entry)
        values = bytes(file.read_at(entry.sums_offset, entry.num_bytes - entry.sums_offset))
    if checksum(values) != entry.sums_sum:
        raise ShardDamage(f"{entry.file}: the table of checksums is wrong (from byte {entry.sums_offset} on)")
    return values


def find_damage(store: Store, folder: str, entry: ShardEntry, *, read_content: bool) -> str | None:
    """Return what is wrong with a stored shard, or None if it is whole.

    Args:
        store: Where it is.
        folder: The checkpoint's folder.
        entry: What the manifest says about it.
        read_content: Read every byte and compare checksums; otherwise the size alone is compared.

    Raises:
        OSError: It can't be read, which does not mean that it is damaged.
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
    """Read a whole shard and verify every byte; yield how many were read, chunk by chunk.

    Raises:
        ShardDamage: It is not what was written.
        OSError: It can't be read.
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
                    raise ShardDamage(f"{entry.file} ends too early, in {stored.interval.key}")
                check_blocks(entry, stored, sums, content, start)
                yield len(content)


def check_header(file: StoredFile, entry: ShardEntry) -> int:
    """Read the header at the beginning of a shard, verify its checksum, and return its size in bytes.

    Raises:
        ShardDamage: It is not what was written.
        OSError: It can't be read.
    """
    header = file.read(entry.header_bytes)
    if checksum(header) != entry.header_sum:
        raise ShardDamage(f"{entry.file}: the header's checksum is wrong (bytes 0 to {entry.header_bytes - 1})")
    return len(header)


def check_blocks(entry: ShardEntry, stored: StoredInterval, sums: bytes, content: Buffer, start: int) -> None:
    """Verify bytes of an interval against their checksums.

    Args:
        entry: The shard.
        stored: The interval.
        sums: The shard's checksums.
        content: What was read: whole blocks.
        start: Where they begin, in bytes from the interval's first.

    Raises:
        ShardDamage: They are not what was written; the text names the first wrong block.
    """
    assert start % BLOCK_BYTES == 0
    wrong = first_wrong(sums, content, stored.first_block + start // BLOCK_BYTES)
    if wrong is not None:
        first = stored.offset + start + wrong * BLOCK_BYTES
        last = min(first + BLOCK_BYTES, stored.offset + stored.num_bytes) - 1
        raise ShardDamage(f"{entry.file}: the checksum of {stored.interval.key} is wrong (bytes {first} to {last})")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in host memory; a copy only if it lives elsewhere."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy 2 arrays are buffers


def _check_size(file: StoredFile, entry: ShardEntry) -> None:
    if file.size != entry.num_bytes:
        raise ShardDamage(f"{entry.file} has {file.size} bytes instead of {entry.num_bytes}")


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the length field and the JSON header of a safetensors file, padded with spaces to align the data (pure).

    Args:
        tensors: Name, dtype, shape and size in bytes of each tensor, in the order of the file.
        metadata: Other facts.
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
def _layout(held: tuple[tuple[str, int, int, torch.dtype], ...]) -> tuple[bytes, tuple[StoredInterval, ...]]:
    """Return a shard's header, and where its intervals are; a rank's are the same after every step.

    Args:
        held: Key, start, number of elements and dtype of each interval.
    """
    import torch

    starts = {key: start for key, start, _, _ in held}
    assert len(starts) == len(held), "a shard holds one interval of a tensor at most"
    sizes = [num_elements * dtype.itemsize for _, _, num_elements, dtype in held]
    tensors = [(key, dtype, [count], size) for (key, _, count, dtype), size in zip(held, sizes, strict=True)]
    sums = table_bytes(sizes)
    metadata = {"format": "ray-ulysses", "starts": json.dumps(starts)}
    header = safetensors_header([*tensors, (SUMS_KEY, torch.uint8, [sums], sums)], metadata)
    intervals = [Interval(key=key, start=start, stop=start + count) for key, start, count, _ in held]
    return header, place_intervals(list(zip(intervals, sizes, strict=True)), len(header))


def _file_chunks(header: bytes, parts: Sequence[TensorPart], sums: bytearray) -> Iterator[Buffer]:
    """Yield the file from front to back and note each block's checksum as it goes by."""
    yield header
    for part in parts:
        assert part.tensor.dim() == 1, f"{part.key} is not flat"
        content = bytes_of(part.tensor)
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            sums += block_sums(chunk)
            yield chunk
    yield sums
