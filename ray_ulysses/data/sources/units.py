"""Divides the user's files and data sets into units of work."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.sources.files import (
    FileListing,
    FileStamp,
    files_of_hub_data_sets,
    left_out,
    open_parquet,
    path_text,
    unreadable,
    without_foreign,
)
from ray_ulysses.data.sources.records import ONLY_JSONL, PACKED_SUFFIXES, byte_ranges, is_packed
from ray_ulysses.data.sources.rows import DEFAULT_TEXT_FIELD, Rejected, RowFields, fields_found, option
from ray_ulysses.errors import UserError
from ray_ulysses.storage.hub import hub_refusal, is_id
from ray_ulysses.storage.location import expand_home
from ray_ulysses.storage.retry import READ_ERRORS, transient_cause
from ray_ulysses.validation import parse_json

SourceKind = Literal["auto", "text", "jsonl", "parquet", "datasets"]
UnitKind = Literal["text", "json", "jsonl", "parquet", "datasets"]
DEFAULT_UNIT_BYTES = 16 << 20
DEFAULT_EXCLUDE = (".*", "__pycache__")
_JSONL_SUFFIXES = tuple(f"{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in ("", *PACKED_SUFFIXES))
_COMPRESSED_SUFFIXES = (*PACKED_SUFFIXES, ".bz2", ".xz")
_DATASET_MARKS = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """The sources of a corpus."""

    paths: tuple[str, ...]
    """Files, directories, or (``kind="datasets"``) a directory of ``save_to_disk`` or a hub name."""
    kind: SourceKind = "auto"
    """How to read them; ``auto`` decides by suffix: ``.parquet``, ``.jsonl`` (also ``.gz`` and ``.zst``), ``.json`` if
    it holds a list of rows or a row per line, else text. If a field is named, texts are left out, and every ``.json``
    file is read as rows."""
    pattern: str = "*"
    """Pattern of a file's path below its source directory; ``*`` also matches ``/``."""
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    """Patterns of files to leave out; a pattern without ``/`` also matches the name of any directory."""
    fields: RowFields = field(default_factory=RowFields)
    """The keys or columns of a row that are read."""
    split: str | None = None
    """Split of a data set that has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A unit of work that becomes one shard: some files, or a range of one.

    JSONL files are divided into ranges of bytes, Parquet into ranges of row groups, data sets into ranges of rows. A
    compressed file is one unit regardless of its size, since it can only be read from its beginning, and so is a text
    or JSON file.
    """

    index: int
    """Index in the list of units, which determines the order of the documents."""
    kind: UnitKind
    files: tuple[FileStamp, ...]
    """The files; for a data set, its directory or name."""
    first: int = 0
    """First byte (JSONL), row group (Parquet) or row (data set)."""
    last: int = 0
    """One past the last; 0 for files that are read whole."""
    num_bytes: int = 0
    """Bytes of input, as stored for files that are read whole, else uncompressed."""
    fields: RowFields = field(default_factory=RowFields)
    split: str | None = None
    """Split of a data set."""
    state: str = ""
    """For a data set on disk, a hash of its files when they were listed. It is not part of the signature, since the
    same data set may be saved again."""

    @property
    def signature(self) -> str:
        """Return a hash that changes when the unit's content may have changed."""
        content = asdict(self)
        del content["state"]
        return stable_hash(content)


def list_units(
    spec: SourceSpec, unit_bytes: int = DEFAULT_UNIT_BYTES, out: Path | None = None
) -> tuple[tuple[Unit, ...], tuple[Rejected, ...]]:
    """Divide the sources into units of about ``unit_bytes``, in an order that depends on the names alone.

    The directory of the corpus, ``out``, may be in a source and is left out of it.

    Returns:
        The units, and the files that are already left out (broken links, files that were listed twice).

    Raises:
        UserError: A source is missing, a Parquet file or data set can't be opened, or the fields are inconsistent or
            missing.
    """
    named = [f"{option(role)}={name!r}" for role, name in asdict(spec.fields).items() if name is not None]
    units: list[Unit] = []
    rejected: list[Rejected] = []
    # Files by how they are read, and texts that are left out because rows are read.
    groups: dict[tuple[UnitKind, RowFields], list[FileStamp]] = defaultdict(list)
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
        if spec.kind == "auto":
            files, foreign = without_foreign(source, files)
            rejected.extend(foreign)
            of_hub = files_of_hub_data_sets(files, lambda path: _kind_of(path, "auto") == "text")
        for file in files:
            kind = _kind_of(file.path, spec.kind)
            fields = spec.fields
            if file.path in of_hub and not fields.are_named:
                fields = RowFields(text=DEFAULT_TEXT_FIELD)
            if kind == "text" and fields.are_named:
                if file.path.lower().endswith(_COMPRESSED_SUFFIXES):
                    reason = ONLY_JSONL
                elif named:
                    reason = f"a text file: {named[0]} asks for rows"
                else:
                    reason = "a text file beside the rows of a data set of the hub"
                texts.append(left_out(file.path, reason))
            else:
                groups[kind, RowFields() if kind == "text" else fields].append(file)
    for kind in ("text", "json", "jsonl", "parquet"):
        for (of_group, fields), files in groups.items():
            if of_group == kind:
                units.extend(_units_of(of_group, files, fields, unit_bytes))
    if texts and not units and named:
        raise UserError(
            f"{named[0]}: no source has rows with fields (the first: {texts[0].source}, {texts[0].reason}); give "
            "JSONL, Parquet or a data set (or set --kind), or leave the option out"
        )
    rejected.extend(texts)
    if spec.split is not None and units and all(unit.split is None for unit in units):
        raise UserError(
            f"--split={spec.split}: applies only to data sets with splits, and no source has any; leave it out"
        )
    return tuple(replace(unit, index=index) for index, unit in enumerate(units)), tuple(rejected)


def open_dataset(path: str, split: str | None) -> tuple[Any, str | None]:
    """Open one split of a ``datasets`` data set, saved on disk or by hub name.

    Returns:
        The data set, and ``split``; None in its place if the data set has no splits and is not a split.

    Raises:
        UserError: It can't be opened, has several splits and none was chosen, or is a single other split.
    """
    if find_spec("datasets") is None:
        raise UserError("--kind=datasets: needs the package `datasets`; install it, or give Parquet files")
    is_saved = _is_saved_dataset(Path(path))
    if not Path(path).exists() and (refused := hub_refusal(path, "dataset")) is not None and not _is_cached(path):
        raise UserError(
            f"source={path_text(path)}: no such file or directory{refused}; correct it, or give the id of a data "
            "set that this machine can reach"
        )
    import datasets

    # Progress bars would appear despite --quiet, and next to our line of progress.
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(path) if is_saved else datasets.load_dataset(path)
    except Exception as error:
        # The library raises a dozen unrelated types, including those of its HTTP client.
        if (away := transient_cause(error)) is not None:
            raise away from error
        if isinstance(error, FileNotFoundError) and error.errno is None and _is_whole_dataset(Path(path)):
            # The library also raises this when the storage of a whole data set does not answer.
            raise OSError(errno.EAGAIN, str(error), path) from error
        raise UserError(
            f"source={path_text(path)}: is neither a `save_to_disk` directory nor a hub name that can be loaded "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(loaded, dict):
        if loaded.split is None:
            return loaded, None
        if split not in (None, str(loaded.split)):
            raise UserError(
                f"--split={split}: the data set {path_text(path)} holds only the split {loaded.split}; choose "
                "it, or leave the option out"
            )
        return loaded, split
    names = sorted(loaded)
    chosen = split or (names[0] if len(names) == 1 else None)
    if chosen not in names:
        raise UserError(
            f"--split={split}: the data set {path_text(path)} has the splits {', '.join(names)}; choose one of them"
        )
    return loaded[chosen], split


def _is_cached(path: str) -> bool:
    """Return whether the cache of ``datasets`` has a data set of the hub.

    Its folders are found here, since the library takes a second to import: too long to refuse a misspelt path. They
    are named ``OWNER___NAME``, with the name in snake case.
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
    """Return whether a path is a saved data set, or missing and the id of one on the hub: not within a local folder."""
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
    return "json" if name.endswith(".json") else "text"


def _ranges(sizes: Sequence[int], unit_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield the first, the end and the bytes of ranges of at most ``unit_bytes``, or of a single larger one."""
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
            yield Unit(index=0, kind=kind, files=tuple(files[first:last]), num_bytes=num_bytes, fields=fields)
        return
    for file in files:
        whole = Unit(index=0, kind=kind, files=(file,), num_bytes=file.num_bytes, fields=fields)
        if kind == "parquet":
            for first, last, num_bytes in _ranges(_row_group_bytes(file, fields), unit_bytes):
                yield replace(whole, first=first, last=last, num_bytes=num_bytes)
            continue
        ranges = byte_ranges(file.num_bytes, unit_bytes)
        if len(ranges) == 1 or is_packed(file.path):
            yield whole
            continue
        for first, last in ranges:
            yield replace(whole, first=first, last=last, num_bytes=last - first)


def _row_group_bytes(file: FileStamp, fields: RowFields) -> list[int]:
    """Return the uncompressed bytes of each row group of a Parquet file, which must have the columns."""
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
            raise UserError(f"{option(role)}={name}: {source} has several columns of that name; rename all but one")


def _dataset_units(path: str, spec: SourceSpec, unit_bytes: int) -> Iterator[Unit]:
    dataset, split = open_dataset(path, spec.split)
    _check_columns(spec.fields, dataset.column_names, f"the data set {path_text(path)}")
    num_rows = len(dataset)
    rows_per_unit = max(1, int(num_rows * unit_bytes / max(1, dataset.data.nbytes)))
    stamp, state = dataset_stamp(path, dataset), dataset_state(path, dataset)
    for first in range(0, num_rows, rows_per_unit):
        last = min(first + rows_per_unit, num_rows)
        yield Unit(
            index=0,
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
    """Return the stamp of an open data set: its rows, and the library's fingerprint, which changes with them."""
    number = int(stable_hash(str(dataset._fingerprint))[:12], 16)
    return FileStamp(path=path, num_bytes=len(dataset), modified_ns=number)


def dataset_state(path: str, dataset: Any) -> str:
    """Return a hash of size and time of an open data set's own files; empty if it has none, like a data set of the Hub.

    The library writes the fingerprint after them, so that it is still the old one while a data set is saved again.

    Raises:
        UserError: A file is missing or can't be read.
    """
    files = [one["filename"] for one in dataset.cache_files if Path(one["filename"]).is_relative_to(path)]
    try:
        found = [(file, (status := os.stat(file)).st_size, status.st_mtime_ns) for file in files]
    except OSError as error:
        raise unreadable(path, error) from error
    return stable_hash(sorted(found)) if found else ""
