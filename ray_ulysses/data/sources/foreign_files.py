"""Recognizes the files of other tools among the sources, which would be read as texts beside the data they hold."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_ulysses.data.sources.file_listing import FileStamp, path_text, unreadable
from ray_ulysses.data.sources.quarantine import Rejected
from ray_ulysses.errors import UserError
from ray_ulysses.validation import parse_json

_HEAD_BYTES = 1 << 16
_MEGATRON_MARK = b"MMIDIDX\x00\x00"
_IN_HUB_CACHE = re.compile(r"/(?:datasets|models|spaces)--[^/]+/(?:blobs|refs)/")
_DOCUMENTATION = ("readme", "license", "licence")
# The front matter of a README that the hub reads as the card of a data set.
_CARD = re.compile(
    rb"\A---\s*\n(?:(?!---).*\n)*?"
    rb"(?:annotations_creators|configs|dataset_info|license|pretty_name|size_categories|task_categories):"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignFormat:
    """A format of another tool, and how its data can be prepared."""

    name: str
    way_out: str


_MDS = ForeignFormat(
    name="an MDS data set of MosaicML Streaming",
    way_out="write the samples of streaming.StreamingDataset as JSON Lines or Parquet",
)
_LITDATA = ForeignFormat(
    name="a data set of LitData", way_out="write the samples of litdata.StreamingDataset as JSON Lines or Parquet"
)
_DATATROVE = ForeignFormat(
    name="a tokenized data set of datatrove",
    way_out="give the documents that it was made from, as datatrove's JsonlWriter or ParquetWriter stores them",
)
_MEGATRON = ForeignFormat(
    name="a tokenized data set of Megatron-LM",
    way_out="give the JSON Lines that it was made from, or write the documents of megatron.core's IndexedDataset as a "
    "Parquet column of token ids (--tokens-field)",
)
_NUMPY = ForeignFormat(
    name="a NumPy array", way_out="write its documents as a Parquet column of token ids (--tokens-field)"
)
_TAR = ForeignFormat(
    name="a tar archive, as WebDataset has them",
    way_out="unpack it, or write it as Parquet: datasets.load_dataset('webdataset', data_files=...)['train']"
    ".to_parquet(...)",
)
_ARROW = ForeignFormat(
    name="an Arrow file",
    way_out="name its directory of save_to_disk, or write it as Parquet: datasets.Dataset.from_file(...)"
    ".to_parquet(...)",
)
_ARCHIVE = ForeignFormat(name="an archive", way_out="unpack it")
_HUB_CACHE = ForeignFormat(
    name="a folder of the hub's cache", way_out="name a folder in its snapshots/, or give the data set's id"
)
_TFRECORD = ForeignFormat(name="a TFRecord file", way_out="write its examples as JSON Lines or Parquet")
_BY_SUFFIX = {
    ".mds": _MDS,
    ".mds.zstd": _MDS,
    ".ds": _DATATROVE,
    ".ds.index": _DATATROVE,
    ".ds.loss": _DATATROVE,
    ".ds.metadata": _DATATROVE,
    ".npy": _NUMPY,
    ".npz": _NUMPY,
    ".tar": _TAR,
    ".tar.gz": _TAR,
    ".tgz": _TAR,
    ".tar.zst": _TAR,
    ".tar.bz2": _ARCHIVE,
    ".tar.xz": _ARCHIVE,
    ".zip": _ARCHIVE,
    ".7z": _ARCHIVE,
    ".arrow": _ARROW,
    ".tfrecord": _TFRECORD,
    ".tfrecords": _TFRECORD,
}


def without_foreign(source: Path, files: Sequence[FileStamp]) -> tuple[list[FileStamp], list[Rejected]]:
    """Return the files of a source without those of other tools, and a `Rejected` for each of these.

    Raises:
        UserError: Most bytes of the source belong to a format of another tool.
    """
    formats = _formats(files)
    sizes: Counter[ForeignFormat] = Counter()
    for file in files:
        if file.path in formats:
            sizes[formats[file.path]] += file.num_bytes
    if 2 * sizes.total() > sum(file.num_bytes for file in files):
        found = sizes.most_common(1)[0][0]
        example = max((file for file in files if formats.get(file.path) == found), key=lambda file: file.num_bytes).path
        raise UserError(
            f"source={path_text(source)}: holds {found.name} ({path_text(example)}), which can't be read; "
            f"{found.way_out}. To prepare the other files alone, leave these out with --exclude"
        )
    left_out = [
        Rejected(source=path_text(path), offset=0, reason=f"{one.name}: {one.way_out}") for path, one in formats.items()
    ]
    return [file for file in files if file.path not in formats], left_out


def files_of_hub_data_sets(files: Sequence[FileStamp], is_text: Callable[[str], bool]) -> set[str]:
    """Return the paths of the files in copies of data sets of the hub: folders with rows and a README, their card.

    Args:
        files: All files of a source.
        is_text: Whether the file of a path is read as a text.
    """
    cards = {os.path.dirname(one.path): one.path for one in files if _name(one.path) == "readme.md"}
    below: dict[str, list[FileStamp]] = defaultdict(list)
    for file in files if cards else ():
        folder, inner = os.path.dirname(file.path), ""
        while folder != inner:
            if folder in cards:
                below[folder].append(file)
            folder, inner = os.path.dirname(folder), folder
    return {
        one.path for folder, found in below.items() if _is_hub_data_set(cards[folder], found, is_text) for one in found
    }


def _is_hub_data_set(card: str, files: Sequence[FileStamp], is_text: Callable[[str], bool]) -> bool:
    texts = [one.path for one in files if is_text(one.path)]
    sizes: Counter[str] = Counter()
    for one in files:
        if one.path != card:
            sizes["text" if is_text(one.path) else "json" if _name(one.path).endswith(".json") else "rows"] += (
                one.num_bytes
            )
    if _CARD.match(_head(card)):
        # A .json file may be a configuration.
        return sizes["rows"] > 0 or 2 * sizes["json"] > sizes.total()
    # The README of a project has other texts beside it.
    return 2 * sizes["rows"] > sizes.total() and all(_name(path).startswith(_DOCUMENTATION) for path in texts)


def _name(path: str) -> str:
    return os.path.basename(path).lower()


def _formats(files: Sequence[FileStamp]) -> Mapping[str, ForeignFormat]:
    """Return the format of each file that is of another tool, by its path."""
    paths = {file.path: None for file in files}
    suffixes, found = tuple(_BY_SUFFIX), {}
    for path in paths:
        name = _name(path)
        if name.endswith(suffixes):
            found[path] = next(one for suffix, one in _BY_SUFFIX.items() if name.endswith(suffix))
        elif _IN_HUB_CACHE.search(path):
            found[path] = _HUB_CACHE
        elif name == "index.json":
            found |= {other: one for other, one in _indexed(path).items() if other in paths}
        elif name.endswith(".idx") and _head(path).startswith(_MEGATRON_MARK):
            found |= {other: _MEGATRON for other in (path, f"{path[:-4]}.bin") if other in paths}
    return found


def _indexed(path: str) -> dict[str, ForeignFormat]:
    """Return the format of an index and of the files that it names, by their paths; empty for any other file."""
    try:
        index = parse_json(Path(path).read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError:
        return {}
    for key, mark, one in (("shards", "raw_data", _MDS), ("chunks", "chunk_bytes", _LITDATA)):
        entries = index.get(key) if isinstance(index, dict) else None
        if isinstance(entries, list) and entries and isinstance(entries[0], dict) and mark in entries[0]:
            parts = [part for entry in entries for part in (entry, *entry.values()) if isinstance(part, dict)]
            names = [name for part in parts for name in part.values() if isinstance(name, str)]
            return dict.fromkeys([path, *(os.path.join(os.path.dirname(path), name) for name in names)], one)
    return {}


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
