"""One rank's shard: a safetensors file of 1-D pieces, a checksum for its header and for each piece.

Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, data). It is written
here piece by piece, so that a piece leaves the accelerator only when its turn comes, and read by byte range,
so that nothing but what is wanted is read. Nothing is pickled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ray_ulysses.checkpoint.intervals import Interval
from ray_ulysses.checkpoint.state import Piece, dtype_name
from ray_ulysses.storage import Buffer, Store

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredInterval:
    """Where an interval lies in its shard.

    Attributes:
        interval: The elements.
        offset: Its first byte, counted from the file's beginning.
        num_bytes: Its size.
        crc32: Checksum of its bytes.
    """

    interval: Interval
    offset: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """What the manifest says about one shard.

    Attributes:
        file: Its key, relative to the checkpoint's folder.
        num_bytes: Its size.
        header_crc32: Checksum of the header and its length field.
        intervals: What it holds, in the order of the file.
    """

    file: str
    num_bytes: int
    header_crc32: int
    intervals: tuple[StoredInterval, ...]

    @property
    def header_bytes(self) -> int:
        """Return where the data begin."""
        return self.intervals[0].offset if self.intervals else self.num_bytes


def write_shard(store: Store, folder: str, file: str, pieces: Sequence[Piece]) -> ShardEntry:
    """Write one rank's pieces durably and say what was written.

    Args:
        store: Where to.
        folder: The checkpoint's folder.
        file: The shard's key, relative to it; it must be new.
        pieces: 1-D pieces with different keys; empty ones are left out.

    Raises:
        OSError: It could not be written; then nothing appears under its name.
    """
    pieces = [piece for piece in pieces if piece.tensor.numel() > 0]
    keys = [piece.key for piece in pieces]
    assert len(set(keys)) == len(keys), "a shard holds one interval of a tensor at most"
    header = _header(pieces)
    checksums: list[int] = []
    num_bytes = store.create(f"{folder}/{file}", _file_chunks(header, pieces, checksums))
    intervals = []
    offset = len(header)
    for piece, crc32 in zip(pieces, checksums, strict=True):
        size = piece.tensor.numel() * piece.tensor.element_size()
        intervals.append(StoredInterval(interval=piece.interval, offset=offset, num_bytes=size, crc32=crc32))
        offset += size
    assert offset == num_bytes, f"{file}: {num_bytes} bytes written, {offset} expected"
    return ShardEntry(file=file, num_bytes=num_bytes, header_crc32=zlib.crc32(header), intervals=tuple(intervals))


def find_damage(store: Store, folder: str, entry: ShardEntry, *, read_content: bool) -> str | None:
    """Return what is wrong with a stored shard, or None if it is whole.

    Args:
        store: Where it is.
        folder: The checkpoint's folder.
        entry: What the manifest says about it.
        read_content: Read every byte and compare checksums; otherwise only the size is compared.
    """
    try:
        with store.open(f"{folder}/{entry.file}") as stream:
            size = stream.seek(0, 2)
            if size != entry.num_bytes:
                return f"{entry.file} has {size} bytes instead of {entry.num_bytes}"
            if not read_content:
                return None
            stream.seek(0)
            if zlib.crc32(stream.read(entry.header_bytes)) != entry.header_crc32:
                return f"{entry.file}: the header's checksum is wrong"
            for stored in entry.intervals:
                crc32, left = 0, stored.num_bytes
                while left > 0:
                    chunk = stream.read(min(left, _CHUNK_BYTES))
                    if not chunk:
                        return f"{entry.file} ends too early"
                    crc32, left = zlib.crc32(chunk, crc32), left - len(chunk)
                if crc32 != stored.crc32:
                    return f"{entry.file}: the checksum of {stored.interval.key} is wrong"
    except FileNotFoundError:
        return f"{entry.file} is missing"
    except OSError as error:
        return f"{entry.file} can't be read ({error.strerror or error})"
    return None


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in host memory; a copy only if it lives elsewhere."""
    flat = tensor.detach().to("cpu").contiguous().view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy 2 arrays are buffers


def _header(pieces: Sequence[Piece]) -> bytes:
    """Return the length field and the JSON header, padded with spaces so that the data are aligned."""
    starts = {piece.key: piece.start for piece in pieces}
    tensors: dict[str, object] = {"__metadata__": {"format": "ray-ulysses", "starts": json.dumps(starts)}}
    offset = 0
    for piece in pieces:
        assert piece.tensor.dim() == 1, f"{piece.key} is not flat"
        size = piece.tensor.numel() * piece.tensor.element_size()
        tensors[piece.key] = {
            "dtype": dtype_name(piece.tensor.dtype),
            "shape": [piece.tensor.numel()],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _file_chunks(header: bytes, pieces: Sequence[Piece], checksums: list[int]) -> Iterator[Buffer]:
    """Yield the file from front to back and note each piece's checksum as it goes by."""
    yield header
    for piece in pieces:
        content = bytes_of(piece.tensor)
        crc32 = 0
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            crc32 = zlib.crc32(chunk, crc32)
            yield chunk
        checksums.append(crc32)
