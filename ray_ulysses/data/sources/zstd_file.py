"""Reads files compressed with zstd as a stream, and detects truncated ones."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

# Four bytes may decompress to 128 KiB, so small blocks bound the memory.
_BLOCK_BYTES = 1 << 12
_READ_BYTES = 1 << 18


class _ZstdStream(io.RawIOBase):
    """The decompressed bytes of one or more frames; EOFError if the last frame is truncated."""

    def __init__(self, file: BinaryIO) -> None:
        # `ZstdDecompressor.stream_reader` of zstandard 0.25 does not report a truncated file.
        import zstandard

        # Files of `zstd --long=31` need a larger window than the default of 128 MiB.
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._file = file
        self._frame: Any = None
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            if not self._packed:
                self._packed = self._file.read(_BLOCK_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a zstd frame")
                return 0
            self._unpack()
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _unpack(self) -> None:
        import zstandard

        if self._frame is None:
            self._frame = self._unpacker.decompressobj()
        try:
            self._unpacked = memoryview(self._frame.decompress(self._packed))
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._packed = b""
        if self._frame.eof:
            self._packed = self._frame.unused_data
            self._frame = None


@contextmanager
def open_zstd(path: str) -> Iterator[io.BufferedReader]:
    """Open a ``.zst`` file for reading its decompressed bytes.

    Raises:
        OSError: It can't be opened, or (while reading) is not zstd.
        EOFError: While reading: it is truncated.
    """
    with open(path, "rb") as file:
        yield io.BufferedReader(_ZstdStream(file), _READ_BYTES)
