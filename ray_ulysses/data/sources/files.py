"""Lists the sources' files in an order that depends only on the file names, and each file only once despite links.

Other tools' datasets are detected by their indexes. Formats that are not read are rejected, since they would otherwise
be read as text.
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import glob
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ray_ulysses.data.sources.rows import Rejected
from ray_ulysses.errors import UserError
from ray_ulysses.storage.retry import is_transient
from ray_ulysses.validation import parse_json

_LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_HEAD_BYTES = 1 << 16
_MEGATRON_MARK = b"MMIDIDX\x00\x00"
_IN_HUB_CACHE = re.compile(r"/(?:datasets|models|spaces)--[^/]+/(?:blobs|refs)/")
_DOCUMENTATION = ("readme", "license", "licence")
# The front matter that makes a README a dataset card on the Hugging Face Hub.
_CARD = re.compile(
    rb"\A---\s*\n(?:(?!---).*\n)*?"
    rb"(?:annotations_creators|configs|dataset_info|license|pretty_name|size_categories|task_categories):"
)


class _ForeignFormat(NamedTuple):
    """Another tool's data format, and how to convert its data."""

    name: str
    way_out: str


_STREAMING = _ForeignFormat(
    "a MosaicML Streaming dataset in a format other than MDS, or in MDS packed by other means than zstd or gzip",
    "write MDS with MDSWriter(compression='zstd')",
)
_LITDATA = _ForeignFormat(
    "a LitData dataset", "export the samples of litdata.StreamingDataset as JSON Lines or Parquet"
)
_MEGATRON_INDEX = _ForeignFormat(
    "the index of a tokenized Megatron-LM dataset", "keep the files .idx and .bin together"
)
_HUB_CACHE = _ForeignFormat("an internal Hub cache folder", "use a folder in snapshots/, or the dataset's Hub id")
_BY_SUFFIX = {
    (".mds", ".mds.zstd", ".mds.gz"): _ForeignFormat(
        "an MDS shard that no index.json lists", "add the index.json that its writer created"
    ),
    (".ds", ".ds.index", ".ds.loss", ".ds.metadata"): _ForeignFormat(
        "a part of a tokenized datatrove dataset", "keep the files .ds and .ds.index together"
    ),
    (".npy", ".npz"): _ForeignFormat(
        "a NumPy array", "export its documents as a Parquet column of token ids (--tokens-field)"
    ),
    (".tar", ".tar.gz", ".tgz", ".tar.zst"): _ForeignFormat(
        "a tar archive, such as a WebDataset shard",
        "unpack it, or convert it to Parquet: datasets.load_dataset('webdataset', data_files=...)['train']"
        ".to_parquet(...)",
    ),
    (".tar.bz2", ".tar.xz", ".zip", ".7z"): _ForeignFormat("an archive", "unpack it"),
    (".arrow",): _ForeignFormat(
        "an Arrow file",
        "use the save_to_disk directory, or convert it to Parquet: datasets.Dataset.from_file(...).to_parquet(...)",
    ),
    (".tfrecord", ".tfrecords"): _ForeignFormat("a TFRecord file", "export its examples as JSON Lines or Parquet"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStamp:
    """A file's path, and its size and modification time when the sources were listed."""

    path: str
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Folder:
    """A folder waiting to be listed."""

    path: str
    """Path of the folder, in which symbolic links are not resolved."""
    below: str
    """Path of the folder relative to the source directory, for patterns."""
    real: str
    """Path of the folder with all symbolic links resolved."""
    entered: frozenset[str]
    """Resolved paths of the folder and all its parents."""


class FileListing:
    """Lists the files of one source after another, and each file only once.

    Symbolic links are followed unless they lead to a parent folder of the link. Storage errors are raised, so a
    listing is either complete or retried.

    Args:
        pattern: Select only files whose path below their source directory matches; ``*`` also matches ``/``.
        exclude: Patterns of files and folders to skip.
        out: A folder to skip wherever it is found, or None.
    """

    def __init__(self, pattern: str, exclude: Sequence[str], out: Path | None = None) -> None:
        self._pattern, self._exclude = pattern, exclude
        self._out = None if out is None else os.path.realpath(out)
        self._listed: dict[str, str] = {}

    def files(self, source: Path) -> Iterator[FileStamp | Rejected]:
        """Yield a source's files sorted by name, with each folder's direct files before the files in subfolders.

        Each file that is skipped is represented by a `Rejected`.

        Raises:
            UserError: The source does not exist, or one of its files or folders can't be read.
        """
        path = str(source)
        try:
            status, real = os.stat(path), os.path.realpath(path, strict=True)
        except OSError as error:
            raise unreadable(path, error) from error
        if not stat.S_ISDIR(status.st_mode):
            yield self._file(path, real, status)
            return
        folders = [_Folder(path=path, below="", real=real, entered=frozenset([real]))]
        while folders:
            folder = folders.pop()
            inner: list[_Folder] = []
            for entry in _entries(folder.path):
                below = f"{folder.below}/{entry.name}" if folder.below else entry.name
                found = None if self._is_excluded(below) else self._entry(entry, below, folder)
                if isinstance(found, _Folder):
                    inner.append(found)
                elif found is not None:
                    yield found
            folders.extend(reversed(inner))

    def _is_excluded(self, below: str) -> bool:
        """Return whether a file or folder is excluded. A pattern without ``/`` also matches the base name."""
        name = below.rpartition("/")[2]
        return any(
            _matches(below, pattern) or ("/" not in pattern and fnmatch.fnmatchcase(name, pattern))
            for pattern in self._exclude
        )

    def _entry(self, entry: os.DirEntry[str], below: str, folder: _Folder) -> _Folder | FileStamp | Rejected | None:
        """Return the entry as a folder, a file or a rejection, or None if it does not match the pattern."""
        try:
            is_folder, is_link = entry.is_dir(), entry.is_symlink()
            if not is_folder and not _matches(below, self._pattern):
                return None
            status = entry.stat()
            real = os.path.realpath(entry.path, strict=True) if is_link else os.path.join(folder.real, entry.name)
        except OSError as error:
            if entry.is_symlink() and error.errno in _LEADS_NOWHERE:
                return left_out(entry.path, "a broken symbolic link")
            raise unreadable(entry.path, error) from error
        if not is_folder:
            return self._file(entry.path, real, status)
        if real == self._out:
            return None
        if real in folder.entered:
            return left_out(entry.path, "a symbolic link to one of its own parent folders")
        return _Folder(path=entry.path, below=below, real=real, entered=folder.entered | {real})

    def _file(self, path: str, real: str, status: os.stat_result) -> FileStamp | Rejected:
        if not stat.S_ISREG(status.st_mode):
            return left_out(path, "not a regular file")
        if real in self._listed:
            return left_out(path, f"the same file as {path_text(self._listed[real])}")
        self._listed[real] = path
        return FileStamp(path=path, num_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(folder, error) from error


def _matches(below: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(below, pattern) or (
        pattern.startswith("**/") and fnmatch.fnmatchcase(below, pattern[3:])
    )


@contextmanager
def open_parquet(path: str, **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file of any name, and verify its page checksums if it has any.

    The path is passed as bytes because pyarrow rejects a str path that is not valid UTF-8.

    Raises:
        OSError: The file can't be read. Any other error in ``READ_ERRORS`` may be raised too.
    """
    with (
        pa.OSFile(os.fsencode(path)) as file,
        pq.ParquetFile(file, page_checksum_verification=True, **options) as parquet,
    ):
        yield parquet


@functools.lru_cache(maxsize=64)
def path_text(path: str | Path) -> str:
    r"""Return a printable path: bytes that are not valid UTF-8 are shown as ``\xff``."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def left_out(path: str, reason: str, offset: int = 0) -> Rejected:
    """Return a `Rejected` for a file, or for the file's line or row number ``offset``."""
    return Rejected(source=path_text(path), offset=offset, reason=reason)


def unreadable(path: str, error: Exception, what: str = "") -> Exception:
    """Return the exception to raise for an unreadable source: ``error`` itself if transient, otherwise a UserError.

    Args:
        path: The file or folder.
        error: The exception raised by the read.
        what: The expected format, or an empty string if the format is not the problem.
    """
    if is_transient(error):
        return error
    if what:
        return UserError(f"source={path_text(path)}: the {what} file can't be read ({error}); restore or remove it")
    if getattr(error, "errno", None) in _LEADS_NOWHERE:
        return UserError(f"source={path_text(path)}: no such file or directory")
    reason = getattr(error, "strerror", None) or error
    return UserError(
        f"source={path_text(path)}: can't be read ({reason}); make it readable, or leave it out (--exclude)"
    )


def changed(path: str) -> UserError:
    """Return the error for a source that changed after it was listed."""
    return UserError(
        f"source={path_text(path)}: changed while it was being prepared; run prepare again once it no longer changes"
    )


def without_foreign(
    source: Path, files: Sequence[FileStamp], num_read_bytes: int = 0
) -> tuple[list[FileStamp], list[Rejected]]:
    """Return the source's files without those in formats that are not read, and a `Rejected` for each file left out.

    Args:
        source: The source.
        files: Its files, without the datasets of other tools that are read.
        num_read_bytes: Size of these datasets.

    Raises:
        UserError: Most of the source's bytes are in such a format.
    """
    formats = _foreign_formats([file.path for file in files])
    sizes: Counter[_ForeignFormat] = Counter()
    for file in files:
        if file.path in formats:
            sizes[formats[file.path]] += file.num_bytes
    if 2 * sizes.total() > num_read_bytes + sum(file.num_bytes for file in files):
        found = sizes.most_common(1)[0][0]
        example = max((file for file in files if formats.get(file.path) == found), key=lambda file: file.num_bytes).path
        raise UserError(
            f"source={path_text(source)}: is mostly {found.name} ({path_text(example)}), which can't be read; "
            f"{found.way_out}. To prepare only the other files, exclude these (--exclude)"
        )
    rejected = [left_out(path, f"{one.name}: {one.way_out}") for path, one in formats.items()]
    return [file for file in files if file.path not in formats], rejected


def _foreign_formats(paths: Sequence[str]) -> dict[str, _ForeignFormat]:
    """Return the paths of the files in other tools' formats, mapped to the formats."""
    known, found = set(paths), {}
    for path in paths:
        name = _name(path)
        by_suffix = next((one for suffixes, one in _BY_SUFFIX.items() if name.endswith(suffixes)), None)
        if by_suffix is not None:
            found[path] = by_suffix
        elif _IN_HUB_CACHE.search(path):
            found[path] = _HUB_CACHE
        elif name == "index.json":
            found |= {other: one for other, one in _indexed(path).items() if other in known}
        elif name.endswith(".idx") and _head(path).startswith(_MEGATRON_MARK):
            found[path] = _MEGATRON_INDEX
    return found


def _indexed(path: str) -> dict[str, _ForeignFormat]:
    """Map the paths of a dataset index and its listed files to their format; return {} if the file is not an index."""
    for key, mark, one in (("shards", "raw_data", _STREAMING), ("chunks", "chunk_bytes", _LITDATA)):
        if entries := _index_entries(path, key, mark):
            parts = [part for entry in entries for part in (entry, *entry.values()) if isinstance(part, dict)]
            names = [name for part in parts for name in part.values() if isinstance(name, str)]
            return dict.fromkeys([path, *(os.path.join(os.path.dirname(path), name) for name in names)], one)
    return {}


def _index_entries(path: str, key: str, mark: str) -> list[Any]:
    """Return the entries of a dataset's index, or [] unless it is an index whose entries have the key ``mark``."""
    try:
        index = parse_json(Path(path).read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError:
        return []
    entries = index.get(key) if isinstance(index, dict) else None
    is_index = isinstance(entries, list) and all(isinstance(entry, dict) and mark in entry for entry in entries)
    return entries if is_index and isinstance(entries, list) else []


class DataSetFiles(NamedTuple):
    """Files in another tool's format that is read: an MDS shard, or a token file with its index and other files."""

    kind: Literal["megatron", "datatrove", "mds"]
    files: tuple[FileStamp, ...]
    """The file with the documents first."""


def of_other_tools(files: Sequence[FileStamp]) -> tuple[list[DataSetFiles], list[FileStamp]]:
    """Separate the datasets of Megatron-LM, datatrove and MosaicML Streaming from the other files.

    Raises:
        UserError: A shard is missing or does not have the size stated in the index.
    """
    by_path = {file.path: file for file in files}
    found: list[DataSetFiles] = []
    taken: set[str] = set()
    for path, file in by_path.items():
        name = _name(path)
        if name == "index.json" and (shards := _mds_shards(path, by_path)):
            # The index of a folder may list the shards of its subfolders, which have an index too.
            found += [DataSetFiles("mds", (one,)) for one in shards if one.path not in taken]
            taken |= {path, *(one.path for one in shards)}
        elif name.endswith(".idx") and f"{path[:-4]}.bin" in by_path and _head(path).startswith(_MEGATRON_MARK):
            found.append(DataSetFiles("megatron", (by_path[f"{path[:-4]}.bin"], file)))
        elif name.endswith(".ds") and f"{path}.index" in by_path:
            parts = [f"{path}{suffix}" for suffix in (".index", ".loss", ".metadata")]
            found.append(DataSetFiles("datatrove", (file, *(by_path[part] for part in parts if part in by_path))))
    taken |= {file.path for one in found for file in one.files}
    return found, [file for file in files if file.path not in taken]


def _mds_shards(index: str, by_path: Mapping[str, FileStamp]) -> list[FileStamp]:
    """Return the selected shards that an index lists, or [] if it is not an index or a shard's format is not read."""
    shards = []
    for entry in _index_entries(index, "shards", "raw_data"):
        parts = [part for part in (entry["raw_data"], entry.get("zip_data")) if isinstance(part, dict)]
        sizes = {os.path.join(os.path.dirname(index), str(part.get("basename"))): part.get("bytes") for part in parts}
        if entry.get("format") != "mds" or not all(path.endswith((".mds", ".mds.zstd", ".mds.gz")) for path in sizes):
            return []
        path = next((path for path in sizes if path in by_path), None)
        if path is not None and by_path[path].num_bytes != sizes[path]:
            problem = f"has {by_path[path].num_bytes:,} bytes, but its index.json states {sizes[path]}; restore"
        elif path is None and not any(map(os.path.exists, sizes)):
            path, problem = [*sizes, index][0], "is missing, but its index.json lists it; add"
        else:
            shards += [] if path is None else [by_path[path]]
            continue
        raise UserError(f"source={path_text(path)}: {problem} the file, or exclude the dataset (--exclude)")
    return shards


def splits_by_card(files: Sequence[FileStamp], split: str | None) -> dict[str, str | None]:
    """Map each file of a Hub dataset whose card names its ``data_files`` to its split, or None for an unused file.

    Args:
        files: All files of a source.
        split: Split to read, or None if every dataset has only one.

    Raises:
        UserError: A card can't be read, has several subsets and no default, or lacks the split.
    """
    found: dict[str, str | None] = {}
    for card in (one.path for one in files if _name(one.path) == "readme.md"):
        if not (patterns := _card_patterns(card)):
            continue
        folder = os.path.dirname(card)
        chosen = split or (next(iter(patterns)) if len(patterns) == 1 else None)
        if chosen not in patterns:
            raise UserError(
                f"--split={split}: the dataset {path_text(folder)} has the splits {', '.join(sorted(patterns))}; "
                "set one of them"
            )
        matches = (glob.iglob(pattern, root_dir=folder, recursive=True) for pattern in patterns[chosen])
        data_files = {os.path.join(folder, path) for of_pattern in matches for path in of_pattern}
        below = [one.path for one in files if one.path.startswith(f"{folder}/")]
        if data_files.isdisjoint(below):
            raise UserError(
                f"source={path_text(card)}: no file matches the patterns that this card lists for split {chosen} "
                f"({', '.join(patterns[chosen])}); add the missing files"
            )
        found |= {path: chosen if path in data_files else None for path in below}
    return found


def _card_patterns(card: str) -> dict[str, list[str]]:
    """Return the patterns of the data files by split, or {} if a README names none."""
    if not _CARD.match(_head(card)):
        return {}
    patterns: dict[str, list[str]] = defaultdict(list)
    try:
        front = yaml.safe_load(re.split(rb"^---\s*$", Path(card).read_bytes(), maxsplit=2, flags=re.MULTILINE)[1])
        subsets = [one for one in front.get("configs") or () if {"data_files", "data_dir"} & one.keys()]
        named = {str(one["config_name"]): one for one in subsets}
        default = next((one for one in subsets if one.get("default") is True), named.get("default"))
        if len(subsets) > 1 and default is None:
            raise UserError(
                f"source={path_text(card)}: has the subsets {', '.join(named)} and no default; select the files of "
                "one (--pattern)"
            )
        for one in subsets if default is None else [default]:
            listed = one.get("data_files", "**")
            if not isinstance(listed, list) or not isinstance(listed[0], dict):
                listed = [{"split": "train", "path": listed}]
            for entry in listed:
                paths = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
                patterns[entry["split"]] += [os.path.join(one.get("data_dir", ""), path) for path in paths]
    except OSError as error:
        raise unreadable(card, error) from error
    except UserError:
        raise
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"source={path_text(card)}: its front matter can't be read ({error}); correct it") from error
    return dict(patterns)


def files_of_hub_data_sets(files: Sequence[FileStamp], is_text: Callable[[str], bool]) -> set[str]:
    """Return all file paths in local copies of Hub datasets: folders that contain rows and a dataset card as README.

    Args:
        files: All files of a source.
        is_text: Returns whether the file at a path is read as text.
    """
    cards = {os.path.dirname(one.path): one.path for one in files if _name(one.path) == "readme.md"}
    below: dict[str, list[FileStamp]] = defaultdict(list)
    for file in files if cards else ():
        for folder in map(str, Path(file.path).parents):
            if folder in cards:
                below[folder].append(file)
    return {
        one.path for folder, found in below.items() if _is_hub_data_set(cards[folder], found, is_text) for one in found
    }


def _is_hub_data_set(card: str, files: Sequence[FileStamp], is_text: Callable[[str], bool]) -> bool:
    sizes: Counter[str] = Counter()
    for one in files:
        if one.path != card:
            kind = "text" if is_text(one.path) else "json" if _name(one.path).endswith(".json") else "rows"
            sizes[kind] += one.num_bytes
    if _CARD.match(_head(card)):
        # A .json file may be a configuration file.
        return sizes["rows"] > 0 or 2 * sizes["json"] > sizes.total()
    # A project's README usually accompanies other text files, such as source code.
    texts = [one.path for one in files if is_text(one.path)]
    return 2 * sizes["rows"] > sizes.total() and all(_name(path).startswith(_DOCUMENTATION) for path in texts)


def _name(path: str) -> str:
    return os.path.basename(path).lower()


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
