"""Divides the user's files and datasets into units of work."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.sources.files import (
    DataSetFiles,
    FileListing,
    FileStamp,
    files_of_hub_data_sets,
    left_out,
    of_other_tools,
    open_parquet,
    path_text,
    splits_by_card,
    unreadable,
    without_foreign,
)
from ray_ulysses.data.sources.records import FASTA_SUFFIXES, ONLY_JSONL, PACKED_SUFFIXES, byte_ranges, is_packed
from ray_ulysses.data.sources.rows import DEFAULT_TEXT_FIELD, Rejected, RowFields, fields_found, option
from ray_ulysses.data.sources.token_files import damaged, mds_header, refuse_mds_columns, token_documents
from ray_ulysses.errors import UserError
from ray_ulysses.storage.hub import hub_refusal, is_id
from ray_ulysses.storage.location import expand_home
from ray_ulysses.storage.retry import READ_ERRORS, transient_cause
from ray_ulysses.validation import parse_json

SourceKind = Literal["auto", "text", "jsonl", "parquet", "datasets"]
UnitKind = Literal["text", "json", "jsonl", "parquet", "fasta", "datasets", "megatron", "datatrove", "mds"]
TOKENIZED = ("megatron", "datatrove", "mds")
"""Kinds of units in other tools' formats, which may be tokenized already."""
DEFAULT_UNIT_BYTES = 16 << 20
DEFAULT_EXCLUDE = (".*", "__pycache__")
_JSONL_SUFFIXES = tuple(f"{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in ("", *PACKED_SUFFIXES))
_COMPRESSED_SUFFIXES = (*PACKED_SUFFIXES, ".bz2", ".xz")
_DATASET_MARKS = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """The sources of a corpus, and how to read them."""

    paths: tuple[str, ...]
    """Files, directories, or with ``kind="datasets"`` ``save_to_disk`` directories or Hub ids."""
    kind: SourceKind = "auto"
    """Format of the sources. ``auto`` decides by suffix: ``.parquet``; ``.jsonl`` (also ``.gz`` and ``.zst``);
    ``.json`` if the file is a list of rows or has one row per line; ``.fa``, ``.fasta``, ``.fna`` and ``.faa`` (also
    ``.gz`` and ``.zst``). All other files are text. If a field option is set, text and FASTA files are rejected and
    every ``.json`` file is read as rows."""
    pattern: str = "*"
    """Pattern for a file's path below its source directory; ``*`` also matches ``/``. A pattern other than ``*``
    overrides the ``data_files`` of a Hub dataset's card."""
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    """Patterns of files to skip. A pattern without ``/`` also matches directory names."""
    fields: RowFields = field(default_factory=RowFields)
    """The keys or columns to read from each row."""
    split: str | None = None
    """Name of the split to read, for datasets with several splits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A unit of work that becomes one shard: several files, or a range of one file.

    JSONL and FASTA files are divided into byte ranges, Parquet files into ranges of row groups, and datasets, token
    files and MDS shards into ranges of rows. Text files, JSON files and compressed files are never divided.
    """

    index: int = 0
    """Index in the list of units, whose order determines the document order."""
    kind: UnitKind
    files: tuple[FileStamp, ...]
    """Files to read, or the directory or Hub id of a dataset. A token file precedes its index and other files."""
    first: int = 0
    """Start of the range: a byte (JSONL, FASTA), row group (Parquet), or row (any other kind)."""
    last: int = 0
    """End of the range, exclusive; 0 if files are read completely."""
    num_bytes: int = 0
    """Input size in bytes: the stored size if files are read completely, otherwise the uncompressed size."""
    fields: RowFields = field(default_factory=RowFields)
    split: str | None = None
    """Split of the dataset; None for files and for datasets without splits."""
    is_windows: bool = False
    """Whether the rows are windows of equal length from a sequence of concatenated documents."""
    state: str = ""
    """Hash of the file sizes and times when a dataset on disk was listed. The hash is not part of the signature,
    because the same dataset may be saved again."""

    @property
    def signature(self) -> str:
        """Hash that changes whenever the unit's content may have changed."""
        content = asdict(self)
        del content["state"]
        return stable_hash(content)


def list_units(
    spec: SourceSpec, unit_bytes: int = DEFAULT_UNIT_BYTES, out: Path | None = None
) -> tuple[tuple[Unit, ...], tuple[Rejected, ...]]:
    """Divide the sources into units of about ``unit_bytes`` bytes, in an order that depends only on the names.

    A source may contain the corpus directory ``out``, which is skipped.

    Returns:
        The units, and a `Rejected` for each skipped file, such as a broken link or a file that was listed twice.

    Raises:
        UserError: A source is missing, a Parquet file or dataset can't be opened, or the fields are inconsistent or
            missing.
    """
    named = [f"{option(role)}={name!r}" for role, name in asdict(spec.fields).items() if name is not None]
    units: list[Unit] = []
    rejected: list[Rejected] = []
    # Files grouped by reader, and text files that are rejected because rows are expected.
    groups: dict[tuple[UnitKind, RowFields, str | None], list[FileStamp]] = defaultdict(list)
    tool_units: list[Unit] = []
    texts: list[Rejected] = []
    listing = FileListing(spec.pattern, spec.exclude, out)
    for path in spec.paths:
        if spec.kind == "datasets" or (spec.kind == "auto" and _is_dataset(path)):
            units.extend(_dataset_units(path, spec, unit_bytes))
            continue
        source = expand_home(path)
        found = list(listing.files(source))
        rejected.extend(one for one in found if isinstance(one, Rejected))
        files = [one for one in found if isinstance(one, FileStamp)]
        of_hub: set[str] = set()
        splits: dict[str, str | None] = {}
        if spec.kind == "auto":
            found_sets, files = of_other_tools(files)
            tool_units.extend(_tool_units(found_sets, spec.fields, unit_bytes))
            files, foreign = without_foreign(source, files, sum(one.files[0].num_bytes for one in found_sets))
            rejected.extend(foreign)
            splits = splits_by_card(files, spec.split) if spec.pattern == "*" else {}
            unused = "not among the data files of this split on the dataset's card"
            rejected.extend(left_out(path, unused) for path, split in splits.items() if split is None)
            files = [file for file in files if splits.get(file.path, "") is not None]
            of_hub = splits.keys() | files_of_hub_data_sets(files, lambda path: _kind_of(path, "auto") == "text")
        for file in files:
            kind = _kind_of(file.path, spec.kind)
            fields = spec.fields
            if file.path in of_hub and not fields.are_named:
                fields = RowFields(text=DEFAULT_TEXT_FIELD)
            if kind == "text" and splits.get(file.path) is not None:
                raise UserError(
                    f"source={path_text(file.path)}: this data file of the dataset's card is neither Parquet, JSON "
                    "Lines nor JSON; set --kind=datasets, which reads other formats, or exclude the file (--exclude)"
                )
            if kind in ("text", "fasta") and fields.are_named:
                if kind == "text" and file.path.lower().endswith(_COMPRESSED_SUFFIXES):
                    reason = ONLY_JSONL
                elif named:
                    reason = f"a text file, but {named[0]} requires rows"
                else:
                    reason = "a text file in a Hub dataset that has rows"
                texts.append(left_out(file.path, reason))
            else:
                groups[kind, fields, splits.get(file.path)].append(file)
    for kind in ("text", "json", "jsonl", "parquet", "fasta"):
        for (of_group, fields, split), files in groups.items():
            if of_group == kind:
                units.extend(replace(unit, split=split) for unit in _units_of(of_group, files, fields, unit_bytes))
    units.extend(tool_units)
    if texts and not units and named:
        raise UserError(
            f"{named[0]}: applies only to rows with named fields, but no source has any (first file: "
            f"{texts[0].source}, {texts[0].reason}); use JSONL, Parquet or a dataset, set --kind, or remove the option"
        )
    rejected.extend(texts)
    if spec.split is not None and units and all(unit.split is None for unit in units):
        raise UserError(
            f"--split={spec.split}: applies only to datasets with splits, but no source has any; omit the option"
        )
    return tuple(replace(unit, index=index) for index, unit in enumerate(units)), tuple(rejected)


def open_dataset(path: str, split: str | None) -> tuple[Any, str | None]:
    """Open one split of a ``datasets`` dataset that was saved to disk or is on the Hub.

    Returns:
        The dataset, and ``split`` or, if the dataset has no split information, None.

    Raises:
        UserError: The dataset can't be opened, lacks the split, or has several splits although ``split`` is None.
    """
    is_saved = _is_saved_dataset(Path(path))
    if not Path(path).exists() and (refused := hub_refusal(path, "dataset")) is not None and not _is_cached(path):
        raise UserError(
            f"source={path_text(path)}: no such file or directory{refused}; correct the path, or use the id of a "
            "dataset that this machine can reach"
        )
    import datasets

    # Progress bars would ignore --quiet and mix with our own progress line.
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(path) if is_saved else datasets.load_dataset(path)
    except Exception as error:
        # The library raises a dozen unrelated exception types, including its HTTP client's.
        if (away := transient_cause(error)) is not None:
            raise away from error
        if isinstance(error, FileNotFoundError) and error.errno is None and _is_whole_dataset(Path(path)):
            # The library raises FileNotFoundError without an errno when an intact dataset's storage does not respond.
            raise OSError(errno.EAGAIN, str(error), path) from error
        raise UserError(
            f"source={path_text(path)}: can't be loaded as a `save_to_disk` directory or from the Hub "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(loaded, dict):
        if loaded.split is None:
            return loaded, None
        if split not in (None, str(loaded.split)):
            raise UserError(
                f"--split={split}: the dataset {path_text(path)} has only the split {loaded.split}; set that split, "
                "or remove the option"
            )
        return loaded, split
    names = sorted(loaded)
    chosen = split or (names[0] if len(names) == 1 else None)
    if chosen not in names:
        raise UserError(
            f"--split={split}: the dataset {path_text(path)} has the splits {', '.join(names)}; set one of them"
        )
    return loaded[chosen], split


def _is_cached(path: str) -> bool:
    """Return whether the ``datasets`` cache contains a Hub dataset.

    The cache folders, named ``OWNER___NAME`` with NAME in snake case, are searched here because importing the library
    takes a second, which is too long for refusing a misspelt path.
    """
    from huggingface_hub import constants

    def plain(name: str) -> str:
        return name.replace("_", "").lower()

    cache = Path(os.getenv("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    folders = cache.iterdir() if is_id(path) and cache.is_dir() else ()
    return any(plain(folder.name) == plain(path.replace("/", "")) for folder in folders)


def _is_saved_dataset(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _DATASET_MARKS)


def _is_dataset(path: str) -> bool:
    """Return whether a path is a saved dataset, or does not exist and is a valid Hub id outside every local folder."""
    if _is_saved_dataset(Path(path)):
        return True
    is_within = "/" in path and Path(path).parent.exists()
    return not is_within and not expand_home(path).exists() and is_id(path)


def _is_whole_dataset(path: Path) -> bool:
    splits = path / "dataset_dict.json"
    if not splits.is_file():
        return all((path / mark).is_file() for mark in ("state.json", "dataset_info.json"))
    try:
        names = list(parse_json(splits.read_bytes())["splits"])
    except (ValueError, KeyError, TypeError):
        return False
    return all(_is_whole_dataset(path / name) for name in names)


def _kind_of(path: str, kind: SourceKind) -> UnitKind:
    if kind != "auto":
        return kind
    name = path.lower()
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(_JSONL_SUFFIXES):
        return "jsonl"
    if name.endswith(FASTA_SUFFIXES):
        return "fasta"
    return "json" if name.endswith(".json") else "text"


def _ranges(sizes: Sequence[int], unit_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield the start, end and size of ranges of at most ``unit_bytes`` bytes. A larger item gets a separate range."""
    first, held = 0, 0
    for place, size in enumerate(sizes):
        if place > first and held + size > unit_bytes:
            yield first, place, held
            first, held = place, 0
        held += size
    if sizes:
        yield first, len(sizes), held


def _units_of(kind: UnitKind, files: Sequence[FileStamp], fields: RowFields, unit_bytes: int) -> Iterator[Unit]:
    if kind in ("text", "json"):
        for first, last, num_bytes in _ranges([file.num_bytes for file in files], unit_bytes):
            yield Unit(kind=kind, files=tuple(files[first:last]), num_bytes=num_bytes, fields=fields)
        return
    for file in files:
        whole = Unit(kind=kind, files=(file,), num_bytes=file.num_bytes, fields=fields)
        if kind == "parquet":
            for first, last, num_bytes in _ranges(_row_group_bytes(file, fields), unit_bytes):
                yield replace(whole, first=first, last=last, num_bytes=num_bytes)
        elif len(ranges := byte_ranges(file.num_bytes, unit_bytes)) == 1 or is_packed(file.path):
            yield whole
        else:
            for first, last in ranges:
                yield replace(whole, first=first, last=last, num_bytes=last - first)


def _tool_units(found: Sequence[DataSetFiles], fields: RowFields, unit_bytes: int) -> Iterator[Unit]:
    shards = {one.files[0].path: mds_header(one.files[0].path) for one in found if one.kind == "mds"}
    sizes = {int(size) for header in shards.values() for size in np.diff(header.offsets)}
    num_samples = sum(header.offsets.size - 1 for header in shards.values())
    for one in found:
        first_file = one.files[0]
        whole = Unit(kind=one.kind, files=one.files, num_bytes=first_file.num_bytes)
        if one.kind != "mds":
            documents = token_documents(one.files)
            row_bytes = np.diff(documents.borders) * documents.dtype.itemsize
        else:
            header = shards[first_file.path]
            of_shard = fields
            if not fields.are_named and DEFAULT_TEXT_FIELD not in header.encodings and "tokens" in header.encodings:
                of_shard = RowFields(tokens="tokens")
            _check_columns(of_shard, [*header.encodings], path_text(first_file.path))
            refuse_mds_columns(header, of_shard, first_file.path)
            is_windows = of_shard == RowFields(tokens=of_shard.tokens) and len(sizes) == 1 < num_samples
            whole = replace(whole, fields=of_shard, is_windows=is_windows)
            if is_packed(first_file.path):
                yield whole
                continue
            if header.offsets[-1] != first_file.num_bytes:
                raise damaged(first_file.path, first_file.num_bytes, f"the samples end at byte {header.offsets[-1]:,}")
            row_bytes = np.diff(header.offsets)
        for first, last, num_bytes in _ranges(row_bytes.tolist(), unit_bytes):
            yield replace(whole, first=first, last=last, num_bytes=num_bytes)


def _row_group_bytes(file: FileStamp, fields: RowFields) -> list[int]:
    """Return each row group's uncompressed size in bytes. Refuse a Parquet file that lacks a required column."""
    try:
        with open_parquet(file.path) as parquet:
            columns = parquet.schema_arrow.names
            metadata = parquet.metadata
            sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    except READ_ERRORS as error:
        raise unreadable(file.path, error, "Parquet") from error
    _check_columns(fields, columns, path_text(file.path))
    return sizes


def _check_columns(fields: RowFields, columns: Sequence[str], source: str) -> None:
    for role, name in fields.by_role.items():
        if name not in columns:
            raise UserError(f"{option(role)}={name}: {source} has no such column; {fields_found(columns)}")
        if list(columns).count(name) > 1:
            raise UserError(f"{option(role)}={name}: {source} has several columns named {name}; rename all but one")


def _dataset_units(path: str, spec: SourceSpec, unit_bytes: int) -> Iterator[Unit]:
    dataset, split = open_dataset(path, spec.split)
    _check_columns(spec.fields, dataset.column_names, f"the dataset {path_text(path)}")
    num_rows = len(dataset)
    rows_per_unit = max(1, int(num_rows * unit_bytes / max(1, dataset.data.nbytes)))
    stamp, state = dataset_stamp(path, dataset), dataset_state(path, dataset)
    for first in range(0, num_rows, rows_per_unit):
        last = min(first + rows_per_unit, num_rows)
        yield Unit(
            kind="datasets",
            files=(stamp,),
            first=first,
            last=last,
            num_bytes=dataset.data.nbytes * last // num_rows - dataset.data.nbytes * first // num_rows,
            fields=spec.fields,
            split=split,
            state=state,
        )


def dataset_stamp(path: str, dataset: Any) -> FileStamp:
    """Return the stamp of an open dataset: its number of rows, and a hash of the library's fingerprint."""
    number = int(stable_hash(str(dataset._fingerprint))[:12], 16)
    return FileStamp(path=path, num_bytes=len(dataset), modified_ns=number)


def dataset_state(path: str, dataset: Any) -> str:
    """Return a hash of the file sizes and times of a dataset, or an empty string if no file is below ``path``.

    The fingerprint alone is not enough: while a dataset is being saved again, the library still reports the old
    fingerprint, because it writes the new one last.

    Raises:
        UserError: A file is missing or can't be read.
    """
    files = [one["filename"] for one in dataset.cache_files if Path(one["filename"]).is_relative_to(path)]
    try:
        found = [(file, (status := os.stat(file)).st_size, status.st_mtime_ns) for file in files]
    except OSError as error:
        raise unreadable(path, error) from error
    return stable_hash(sorted(found)) if found else ""
