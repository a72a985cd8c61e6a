"""Lays out tensors in safetensors files (pure).

Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, data without gaps).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ray_ulysses.checkpoint.shards import safetensors_header
from ray_ulysses.export.tensors import PublishedTensor

INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """One weight file."""

    name: str
    tensors: tuple[PublishedTensor, ...]
    """Its tensors, in the order of the file."""

    @property
    def header(self) -> bytes:
        """Return its first bytes, up to the data."""
        tensors = ((one.name, one.dtype, one.shape, one.num_bytes) for one in self.tensors)
        return safetensors_header(tensors, {"format": "pt"})

    @property
    def num_bytes(self) -> int:
        """Return its size."""
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


def lay_out(tensors: Sequence[PublishedTensor], max_bytes: int) -> tuple[WeightFile, ...]:
    """Return the files of a model, each with at most ``max_bytes`` of tensors unless a single tensor is larger."""
    groups: list[list[PublishedTensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    return tuple(
        WeightFile(name=_file_name(number, len(groups)), tensors=aligned(group))
        for number, group in enumerate(groups, 1)
    )


def index_json(files: Sequence[WeightFile]) -> bytes:
    """Return the index of a model of several files."""
    tensors = [tensor for file in files for tensor in file.tensors]
    metadata = {
        "total_parameters": sum(tensor.num_elements for tensor in tensors),
        "total_size": sum(tensor.num_bytes for tensor in tensors),
    }
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True).encode() + b"\n"


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def aligned(tensors: Sequence[PublishedTensor]) -> tuple[PublishedTensor, ...]:
    """Return the widest types first, so that every tensor begins at a multiple of its element size."""
    return tuple(sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize))
