"""Lays out tensors in safetensors files and writes the files.

Format: https://huggingface.co/docs/safetensors (8-byte header length, JSON header, data without gaps).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ray_ulysses.checkpoint.shards import safetensors_header
from ray_ulysses.errors import RunError
from ray_ulysses.export.stream import WeightReader, element_range
from ray_ulysses.export.tensors import PublishedTensor
from ray_ulysses.storage.atomic import write_all
from ray_ulysses.storage.regular import open_regular

INDEX_FILE = "model.safetensors.index.json"
_COPIED_BYTES = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """A safetensors file to write."""

    name: str
    tensors: tuple[PublishedTensor, ...]
    """The file's tensors in storage order."""

    @property
    def header(self) -> bytes:
        """The safetensors header, including its length prefix."""
        tensors = ((one.name, one.dtype, one.shape, one.num_bytes) for one in self.tensors)
        return safetensors_header(tensors, {"format": "pt"})

    @property
    def num_bytes(self) -> int:
        """File size in bytes."""
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor in the file."""
        sizes = (tensor.num_bytes for tensor in self.tensors[:-1])
        return tuple(itertools.accumulate(sizes, initial=len(self.header)))

    def begin(self, path: Path) -> None:
        """Create the file and write its header."""
        with path.open("xb") as stream:
            stream.write(self.header)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedFile:
    """A file to copy from the multimodal checkpoint, and the decoder's tensors to replace in the copy."""

    name: str
    source: Path
    num_bytes: int
    tensors: tuple[PublishedTensor, ...] = ()
    """The decoder's tensors in the file."""
    offsets: tuple[int, ...] = ()
    """Byte offset in the file of each tensor in ``tensors``."""

    def begin(self, path: Path) -> None:
        """Copy the file.

        Raises:
            RunError: The source file can't be read.
        """
        try:
            stream = open_regular(self.source)
        except OSError as error:
            raise RunError(
                f"model.path={str(self.source.parent)!r}: {self.name} can't be read ({error.strerror or error}); "
                "nothing was published. Restore the file"
            ) from error
        with stream, path.open("xb") as copy:
            shutil.copyfileobj(stream, copy, _COPIED_BYTES)


def lay_out(tensors: Sequence[PublishedTensor], max_bytes: int) -> tuple[WeightFile, ...]:
    """Distribute tensors over files of at most ``max_bytes`` tensor bytes. A larger tensor gets a separate file."""
    groups: list[list[PublishedTensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    names = ["model.safetensors"]
    if len(groups) != 1:
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number, _ in enumerate(groups, 1)]
    return tuple(WeightFile(name=name, tensors=aligned(group)) for name, group in zip(names, groups, strict=True))


def index_json(files: Sequence[WeightFile]) -> bytes:
    """Return the index file of a model that is split into several files."""
    tensors = [tensor for file in files for tensor in file.tensors]
    metadata = {
        "total_parameters": sum(tensor.num_elements for tensor in tensors),
        "total_size": sum(tensor.num_bytes for tensor in tensors),
    }
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True).encode() + b"\n"


def aligned(tensors: Sequence[PublishedTensor]) -> tuple[PublishedTensor, ...]:
    """Sort tensors by dtype width, widest first, so that every tensor begins at a multiple of its element size."""
    return tuple(sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize))


def write_files(
    folder: Path,
    files: Sequence[WeightFile | CopiedFile],
    weights: WeightReader,
    progress: Callable[[WeightFile | CopiedFile], None],
) -> None:
    """Write a model's files one after another, and flush each to disk.

    Raises:
        RunError: The run's checkpoint, or a file to copy, can't be read.
        OSError: A file can't be written.
    """
    for file in files:
        path = folder / file.name
        file.begin(path)
        if not file.tensors:
            continue
        places = [place for place in zip(file.tensors, file.offsets, strict=True) if place[0].num_bytes]
        with path.open("r+b", buffering=0) as stream:
            following, left = iter(places), 0
            for _, values in weights.read_ahead([element_range(tensor) for tensor, _ in places]):
                if left == 0:
                    tensor, offset = next(following)
                    stream.seek(offset)
                    left = tensor.num_bytes
                content = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
                write_all(stream, content)
                left -= len(content)
            assert left == 0, f"{file.name}: {left} bytes of a tensor were not written"
            os.fsync(stream.fileno())
        assert path.stat().st_size == file.num_bytes, f"{file.name}: {file.num_bytes} bytes expected"
        progress(file)
