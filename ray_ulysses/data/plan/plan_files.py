"""Stores a plan on disk: one directory per segment, committed by the ``plan.json`` file, which is written last.

``plan.json`` contains its own checksum and the checksums of all Parquet data. The plan id is a hash of everything in
``plan.json`` except the sources' paths, so every change to a plan is detected.

``rows.parquet`` stores the token counts of each row in training order. ``pieces.parquet`` stores the pieces, row by
row, in the order in which rows were closed. Both files have row groups of 65,536 entries, so an entry is located
without an index, and a row is read in about a millisecond. Each read verifies the checksum of the row group.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.corpus.row_groups import RowGroupReader, RowGroupWriter
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_copies import committed_segments, fetch_segment, put_segment
from ray_ulysses.data.plan.planning import Remainder, StagePart, build_segment
from ray_ulysses.data.plan.rows import (
    CHECKSUM_DIGITS,
    Columns,
    Fragments,
    Pieces,
    Rows,
    RowStats,
    checksums_of,
    fragment_columns,
)
from ray_ulysses.data.plan.segment import (
    PLANNER_VERSION,
    Branch,
    Checksums,
    EpochInfo,
    PlannedStage,
    PlanSettings,
    Segment,
    Totals,
)
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.storage.atomic import write_text
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.place import Place, is_file
from ray_ulysses.storage.regular import make_folder, open_regular, read_regular, sync
from ray_ulysses.storage.retry import READ_ERRORS, RETRY
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, ContentError, Whole, adapter, checked, read_json

PLAN_FILE = "plan.json"
_ROWS, _PIECES, _EVALUATION_ROWS, _EVALUATION_PIECES, _FRAGMENTS = (
    f"{name}.parquet" for name in ("rows", "pieces", "evaluation_rows", "evaluation_pieces", "fragments")
)
_FRAGMENT_COLUMNS = ("document", "start", "length", "waits")
_CHECKSUM = "checksum"
_MOSTLY_EQUAL = ("start", "has_next")
_TAIL_BYTES = 8
Entries = TypeVar("Entries", bound=Columns)
log = get_logger(__name__)


class UnreadablePlanError(UserError):
    """Error for a plan file that can't be read."""


def _unreadable(path: Place, reason: object) -> UnreadablePlanError:
    return UnreadablePlanError(
        f"{path}: the plan can't be read ({reason}); restore the file, or start a new run under another run.name"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileFacts:
    """Entry for a plan file in ``plan.json``."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_bytes: Whole
    footer_crc32: Whole
    """CRC-32 of the footer, which locates all other data in the file."""
    checksums: str
    """Row group checksums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    """Content of ``plan.json``, except the file's own checksum."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    planner_version: Whole
    plan_id: str
    settings: PlanSettings
    sources: tuple[PlannedSource, ...]
    validation: tuple[PlannedSource, ...] = ()
    branch: Branch | None
    stage: PlannedStage | None = None
    epochs: tuple[EpochInfo, ...]
    totals: Totals
    num_rows: Whole
    files: dict[str, _FileFacts]

    def checksums(self) -> Checksums:
        """Return the segment's checksums; raise KeyError if a file is missing from ``files``."""
        return Checksums(**{name: self.files[f"{name}.parquet"].checksums for name in Checksums.__slots__})


def write_segment(
    directory: Place,
    number: int,
    documents: PlanInput,
    settings: PlanSettings,
    remainder: Remainder | None = None,
    stage: StagePart | None = None,
) -> Segment:
    """Plan a segment directly to disk, and return it as read from disk. A segment with the same inputs is reused.

    Args:
        directory: The plan's directory, as a local path or in an object store.
        number: The segment's number.
        documents: The documents to plan.
        settings: The settings of the segment.
        remainder: The run's untrained remainder; ``None`` for segment 0.
        stage: The part of a stage to plan; ``None`` in a run without stages.

    Raises:
        UserError: The segment exists but was planned from different inputs, or no plan is possible.
    """
    folder = directory / f"segment-{number:04d}"
    if is_file(folder / PLAN_FILE):
        found = _open_segment(folder)
        branch, length = remainder.branch if remainder else None, stage.length if stage else None
        if not found.is_made_of(settings, documents.sources, branch, length, documents.validation_sources):
            raise UserError(
                f"{folder}: contains plan {found.plan_id}, which was made from different data or settings, or for a "
                "different branch or stage; nothing was overwritten. Data, seed and context can't change in a run: use "
                "another run.name, or branch the run with `ray-ulysses train --branch`"
            )
        return found
    write = partial(_write_files, documents=documents, settings=settings, remainder=remainder, stage=stage)
    if isinstance(folder, ObjectLocation):
        return _read_segment(put_segment(folder.parent, folder.name, PLAN_FILE, write))
    # A folder without plan.json was left behind by a planner that was killed.
    run_dir = folder.parent.parent
    run_dir.mkdir(parents=True, exist_ok=True)
    LocalStore(run_dir).delete(f"{directory.name}/{folder.name}")
    make_folder(folder, run_dir)
    write(folder)
    return _read_segment(folder)


def _write_files(
    folder: Path, *, documents: PlanInput, settings: PlanSettings, remainder: Remainder | None, stage: StagePart | None
) -> None:
    writer = _ColumnsWriter(folder / _PIECES, Pieces)
    segment = build_segment(documents, settings, remainder, stage, take_pieces=writer.add)
    checksums = segment.checksums
    writer.close(checksums.pieces)
    for file, kind, blocks, text in (
        (_ROWS, RowStats, segment.train.stats_blocks(), checksums.rows),
        (_EVALUATION_ROWS, RowStats, segment.evaluation.stats_blocks(), checksums.evaluation_rows),
        (_EVALUATION_PIECES, Pieces, [segment.evaluation.closed_pieces()], checksums.evaluation_pieces),
    ):
        writer = _ColumnsWriter(folder / file, kind)
        for block in blocks:
            writer.add(block)
        writer.close(text)
    columns = fragment_columns(segment.fragments, segment.waiting)
    table = pa.table(dict(zip(_FRAGMENT_COLUMNS, columns, strict=True)))
    pq.write_table(table, folder / _FRAGMENTS, compression="lz4", write_page_checksum=True)
    for path in (*folder.iterdir(), folder):
        sync(path)
    files = {}
    for name, text in asdict(checksums).items():
        path = folder / f"{name}.parquet"
        files[path.name] = _FileFacts(num_bytes=path.stat().st_size, footer_crc32=_footer_crc32(path), checksums=text)
    header = _Header(
        planner_version=PLANNER_VERSION,
        plan_id=segment.plan_id,
        settings=segment.settings,
        sources=segment.sources,
        validation=segment.validation,
        branch=segment.branch,
        stage=segment.stage,
        epochs=segment.epochs,
        totals=segment.totals,
        num_rows=segment.train.num_rows,
        files=files,
    )
    fields = asdict(header)
    write_text(folder / PLAN_FILE, json.dumps({**fields, _CHECKSUM: stable_hash(fields)}, indent=2) + "\n")


class _ColumnsWriter:
    """Writes a table's entries to a Parquet file, block by block."""

    def __init__(self, path: Path, kind: type[Columns]) -> None:
        self._schema = _schema(kind)
        # Numbers in random order hardly compress, and trying would take as long as planning.
        compression = {name: "lz4" if name in _MOSTLY_EQUAL else "none" for name in self._schema.names}
        self._writer = RowGroupWriter(path, self._schema, compression=compression, use_dictionary=False)

    def add(self, entries: Columns) -> None:
        columns = [pa.array(column) for column in entries.stored()]
        self._writer.add(pa.Table.from_arrays(columns, schema=self._schema))

    def close(self, checksums: str) -> None:
        """Write the pending entries, and a footer that includes a checksum of ``checksums``."""
        self._writer.close(zlib.crc32(checksums.encode()))


def load_plan(directory: Place) -> Plan:
    """Open a plan without reading its rows. A plan in an object store is first copied to this node.

    Raises:
        UserError: The plan is missing, unreadable or of another version, or its segments are not consecutive.
        RunError: The object store does not respond.
    """
    plan = load_plan_if_any(directory)
    if plan is None:
        raise UserError(f"{directory}: contains no plan ({PLAN_FILE} is missing)")
    return plan


def load_plan_if_any(directory: Place) -> Plan | None:
    """Open a plan like `load_plan`, or return None if the directory contains no committed segment."""
    folders = _folders(directory)
    if not folders:
        return None
    segments: list[Segment] = []
    ends: list[tuple[int, int]] = []
    for folder in folders:
        found = _open_segment(folder)
        end, num_kept = segments[-1].end_step if segments else 0, len(segments)
        while segments and (found.branch is None or found.branch.plan_id != segments[-1].plan_id):
            # A branch may replace planned stages that have not begun, but never trained steps.
            last = segments[-1]
            if found.branch is None or last.stage_number == 0 or last.base_step < found.branch.step:
                raise _unreadable(folder / PLAN_FILE, f"the segment does not continue plan {segments[-1].plan_id}")
            segments.pop()
        if found.branch is not None and (len(segments) < num_kept or found.stage_number == segments[-1].stage_number):
            # Steps before a branch keep their learning rate, and the schedule may depend on the run's original end.
            step = found.branch.step
            ends = [*((min(last, step), earlier) for last, earlier in ends), (step, end)]
        segments.append(found)
    return Plan(segments=tuple(segments), earlier_ends=tuple(ends))


def num_segments(directory: Place) -> int:
    """Return the number of committed segments in the directory, including replaced ones."""
    return len(_folders(directory))


def _folders(directory: Place) -> list[Place]:
    folders: list[Place] = []
    committed = committed_segments(directory, PLAN_FILE)
    while (name := committed.get(len(folders))) is not None:
        folders.append(directory / name)
    return folders


def _open_segment(folder: Place) -> Segment:
    """Read a segment from its folder, or from this node's copy if the folder is in an object store."""
    if not isinstance(folder, ObjectLocation):
        return _read_segment(folder)
    fetch = partial(fetch_segment, folder.parent, folder.name, PLAN_FILE)
    renew = partial(fetch, anew=True)
    try:
        return _read_segment(fetch(), renew)
    except UnreadablePlanError as error:
        log.warning("%s: copying it to this node again (%s)", folder, error)
    try:
        return _read_segment(renew(), renew)
    except UnreadablePlanError as error:
        raise UserError(f"{folder}: the stored segment is damaged: {error}") from error


def _read_segment(folder: Path, renew: Callable[[], object] | None = None) -> Segment:
    header = _read_header(folder)
    files = header.files
    fragments, waits = _read_fragments(folder / _FRAGMENTS, files[_FRAGMENTS])

    def table(name: str, kind: type[Entries]) -> _GroupFile[Entries]:
        return _GroupFile(folder / name, files[name], kind, renew)

    segment = Segment(
        settings=header.settings,
        sources=header.sources,
        validation=header.validation,
        branch=header.branch,
        stage=header.stage,
        epochs=header.epochs,
        fragments=fragments.take(~waits),
        waiting=fragments.take(waits),
        totals=header.totals,
        checksums=header.checksums(),
        train=Rows(entries=table(_ROWS, RowStats), all_pieces=table(_PIECES, Pieces)),
        evaluation=Rows(entries=table(_EVALUATION_ROWS, RowStats), all_pieces=table(_EVALUATION_PIECES, Pieces)),
    )
    if segment.plan_id != header.plan_id:
        raise UserError(
            f"{folder}: {PLAN_FILE} records plan {header.plan_id}, but its fields hash to {segment.plan_id}, so it has "
            "been edited since the plan was made; restore the file, or start a new run under another run.name"
        )
    return segment


def _read_header(folder: Path) -> _Header:
    path = folder / PLAN_FILE
    try:
        fields = read_json(adapter(dict[str, Any]), read_regular(path, path.parents[2]))
        version = fields.get("planner_version")
        if version != PLANNER_VERSION:
            raise UserError(
                f"{folder}: the plan was made by planner version {version}, but this version of ray-ulysses reads only "
                f"version {PLANNER_VERSION}; use the version of ray-ulysses that made the plan, or start a new run "
                "under another run.name"
            )
        if fields.pop(_CHECKSUM, None) != stable_hash(fields):
            raise ContentError("the checksum is wrong: the file has been edited since the plan was made")
        header = checked(adapter(_Header), fields)
        header.checksums()
    except KeyError as error:
        raise _unreadable(path, f"files.{error.args[0]} is missing") from error
    except (OSError, ContentError) as error:
        raise _unreadable(path, error) from error
    return header


def _read_fragments(path: Path, facts: _FileFacts) -> tuple[Fragments, NDArray[np.bool_]]:
    """Return all fragments, and a mask of the waiting fragments."""
    try:
        _check_file(path, facts)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        document, start, length, waits = columns = [table.column(name).to_numpy() for name in _FRAGMENT_COLUMNS]
        if checksums_of([columns]) != facts.checksums:
            raise OSError("the content does not match the checksums")
    except (*READ_ERRORS, KeyError) as error:
        raise _unreadable(path, error) from error
    return Fragments(document=document, start=start, length=length), waits


class _GroupFile(Generic[Entries]):
    """A file of entries, read by row group. Each group is verified, and recently used groups are cached.

    Opening the file reads only the footer. ``renew`` replaces the segment's files if the files are this node's copies.
    """

    def __init__(self, path: Path, facts: _FileFacts, kind: type[Entries], renew: Callable[[], object] | None) -> None:
        self._path, self._renew = path, renew
        self._checksums = facts.checksums
        self._kind, self._schema = kind, _schema(kind)
        try:
            RETRY.call(path, lambda: _check_file(path, facts))
            self._reader = RowGroupReader(path, lambda: path, self._schema.names, RETRY, check=self._check)
        except READ_ERRORS as error:
            raise _unreadable(path, error) from error
        self.size = self._reader.num_rows

    def _check(self, number: int, table: pa.Table) -> None:
        is_whole = table.schema.equals(self._schema) and not any(column.null_count for column in table.columns)
        planned = self._checksums[number * CHECKSUM_DIGITS : (number + 1) * CHECKSUM_DIGITS]
        if not is_whole or checksums_of([[column.to_numpy() for column in table.columns]]) != planned:
            raise OSError(f"row group {number} does not match its checksum")

    def take(self, places: slice) -> Entries:
        """Return the entries in a slice, which may extend past the end."""
        parts: list[Entries] = []
        first, stop = places.start, min(places.stop, self.size)
        try:
            while first < stop:
                number, at = self._reader.group_of(first)
                columns = [column.to_numpy() for column in self._group(number).columns]
                parts.append(self._kind.make(columns).take(slice(at, at + stop - first)))
                first += parts[-1].size
        except READ_ERRORS as error:
            raise _unreadable(self._path, error) from error
        return self._kind.join(parts)

    def _group(self, number: int) -> pa.Table:
        try:
            return self._reader.group(number)
        except READ_ERRORS as error:
            if self._renew is None:
                raise
            log.warning("%s: copying it to this node again (%s)", self._path, error)
        self._renew()
        try:
            return self._reader.group(number)
        except READ_ERRORS as error:
            raise OSError(f"{error}, even after the file was copied again") from error


def _check_file(path: Path, facts: _FileFacts) -> None:
    """Raise OSError if a plan file was replaced or truncated. Only the footer is read."""
    with open_regular(path, path.parents[2]) as file:
        found = os.fstat(file.fileno()).st_size
    if found != facts.num_bytes:
        raise OSError(f"the file has {found} bytes, expected {facts.num_bytes}")
    if _footer_crc32(path) != facts.footer_crc32:
        raise OSError("the footer does not match its checksum")


def _footer_crc32(path: Path) -> int:
    """Return the CRC-32 of a Parquet file's footer, footer length and magic number."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - _TAIL_BYTES - length))
        return zlib.crc32(file.read())


def _schema(kind: type[Columns]) -> pa.Schema:
    types = ((name, pa.from_numpy_dtype(kind.STORED[name])) for name in kind.STORED.names or ())
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in types])
