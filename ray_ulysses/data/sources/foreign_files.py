"""Recognizes the files of other tools among the sources, which would be read as texts beside the data they hold."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_ulysses.data.sources.file_listing import FileStamp, path_text, unreadable
from ray_ulysses.data.sources.quarantine import Rejected
from ray_ulysses.errors import UserError

_HEAD_BYTES = 1 << 16
_MEGATRON_MARK = b"MMIDIDX\x00\x00"
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


def is_hub_snapshot(source: Path, files: Sequence[FileStamp], row_files: Sequence[FileStamp]) -> bool:
    """Return whether a folder is a copy of a data set of the hub: rows beside a README, which is the data set's card.

    Args:
        source: The folder.
        files: All files in it.
        row_files: The files in it that may hold rows.
    """
    card = next((one.path for one in files if one.path.lower() == f"{source}/readme.md".lower()), None)
    if card is None or not row_files:
        return False
    num_bytes = sum(one.num_bytes for one in row_files if not one.path.lower().endswith(".json"))
    return 2 * num_bytes > sum(one.num_bytes for one in files) or _CARD.match(_head(card)) is not None


def _formats(files: Sequence[FileStamp]) -> Mapping[str, ForeignFormat]:
    """Return the format of each file that is of another tool, by its path."""
    paths = {file.path: None for file in files}
    suffixes, found = tuple(_BY_SUFFIX), {}
    for path in paths:
        folder, name = os.path.split(path)
        if path.lower().endswith(suffixes):
            found[path] = next(one for suffix, one in _BY_SUFFIX.items() if path.lower().endswith(suffix))
        elif name == "index.json" and (one := _index_format(path)) is not None:
            found |= {other: one for other in paths if os.path.dirname(other) == folder}
        elif name.endswith(".idx") and _head(path).startswith(_MEGATRON_MARK):
            found |= {other: _MEGATRON for other in (path, f"{path[:-4]}.bin") if other in paths}
    return found


def _index_format(path: str) -> ForeignFormat | None:
    try:
        index = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError):
        return None
    for key, mark, one in (("shards", "raw_data", _MDS), ("chunks", "chunk_bytes", _LITDATA)):
        entries = index.get(key) if isinstance(index, dict) else None
        if isinstance(entries, list) and entries and isinstance(entries[0], dict) and mark in entries[0]:
            return one
    return None


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
