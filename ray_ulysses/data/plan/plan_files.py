"""A plan on disk: one directory per segment, committed by its ``plan.json``, which is written last.

``plan.json`` carries a checksum of itself and the checksums of everything in the Parquet files. The plan's id follows
from all of it except the sources' paths, so no change of a plan goes unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.drawing import Fragments
from ray_ulysses.data.plan.mixture import PlannedSource
from ray_ulysses.data.plan.packing import Pieces
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_copies import fetch_segment, put_segment, remote_segments
from ray_ulysses.data.plan.planning import PlanInput, Remainder, StagePart, build_segment
from ray_ulysses.data.plan.row_checksums import Checksums, checksums_of, fragment_columns
from ray_ulysses.data.plan.row_files import (
    ColumnsWriter,
    FileFacts,
    FileRows,
    UnreadablePlanError,
    check_file,
    file_facts,
    unreadable_plan,
    write_stats,
)
from ray_ulysses.data.plan.rows import MemoryRows
from ray_ulysses.data.plan.segment import (
    PLANNER_VERSION,
    Branch,
    EpochInfo,
    PlannedStage,
    PlanSettings,
    Segment,
    Totals,
    segment_id,
)
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.storage.atomic import write_text
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.patience import READ_ERRORS
from ray_ulysses.storage.place import Place, RemotePath
from ray_ulysses.storage.regular import make_folder, read_regular, refuse_links, sync
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, ContentError, Whole, adapter, checked, read_json

PLAN_FILE = "plan.json"
_ROWS, _PIECES, _EVALUATION_ROWS, _EVALUATION_PIECES = (
    f"{name}.parquet" for name in ("rows", "pieces", "evaluation_rows", "evaluation_pieces")
)
_FRAGMENTS = "fragments.parquet"
_FRAGMENT_COLUMNS = ("document", "start", "length", "waits")
_CHECKSUM = "checksum"
_FOLDER = re.compile(r"^segment-(\d{4,})$")
log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    """The content of ``plan.json``, but for its checksum."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    planner_version: Whole
    plan_id: str
    settings: PlanSettings
    sources: tuple[PlannedSource, ...]
    branch: Branch | None
    stage: PlannedStage | None = None
    epochs: tuple[EpochInfo, ...]
    totals: Totals
    num_rows: Whole
    files: dict[str, FileFacts]

    def checksums(self) -> Checksums:
        """Return the checksums of the segment; KeyError where a file is missing."""
        return Checksums(**{name: self.files[f"{name}.parquet"].checksums for name in Checksums.__slots__})


def write_segment(
    directory: Place,
    number: int,
    documents: PlanInput,
    settings: PlanSettings,
    remainder: Remainder | None = None,
    stage: StagePart | None = None,
) -> Segment:
    """Plan a segment straight to disk; an existing one made from the same is left as it is.

    Args:
        directory: The plan's directory, on a path or in an object store.
        number: The segment's number.
        documents: The documents to plan.
        settings: Its settings.
        remainder: What the run has left to train; ``None`` for segment 0.
        stage: The stage that it belongs to; ``None`` in a run without stages.

    Returns:
        The segment, read back.

    Raises:
        UserError: Another segment of that number exists and is not overwritten, or no plan is possible.
    """
    folder = directory / f"segment-{number:04d}"
    if (folder / PLAN_FILE).is_file():
        found = _open_segment(folder)
        branch, length = remainder.branch if remainder else None, stage.length if stage else None
        if not found.is_made_of(settings, documents.sources, branch, length):
            raise UserError(
                f"{folder}: already holds plan {found.plan_id}, made from other data, settings or steps; nothing was "
                "overwritten. Data, seed and context may not change in a run: use another run.name, or "
                "`ray-ulysses train --branch`"
            )
        return found
    write = partial(_write_files, documents=documents, settings=settings, remainder=remainder, stage=stage)
    if isinstance(folder, RemotePath):
        return _read_segment(put_segment(folder.parent, folder.name, PLAN_FILE, write))
    # A folder without plan.json was left by a planner that was killed.
    run_dir = folder.parent.parent
    run_dir.mkdir(parents=True, exist_ok=True)
    LocalStore(run_dir).delete(f"{directory.name}/{folder.name}")
    make_folder(folder, run_dir)
    write(folder)
    return _read_segment(folder)


def _write_files(
    folder: Path, *, documents: PlanInput, settings: PlanSettings, remainder: Remainder | None, stage: StagePart | None
) -> None:
    """Plan a segment straight into an empty folder."""
    writer = ColumnsWriter(folder / _PIECES, Pieces)
    segment = build_segment(documents, settings, remainder, stage, take_pieces=writer.add)
    writer.close(segment.checksums.pieces)
    _write_rows(folder, segment)
    for path in (*folder.iterdir(), folder):
        sync(path)
    write_text(folder / PLAN_FILE, _header_text(folder, segment))


def load_plan(directory: Place) -> Plan:
    """Open a plan without reading a row; one in an object store is copied to this node first.

    Raises:
        UserError: It is missing, of another version, unreadable, or its segments are not consecutive.
        RunError: An object store does not answer.
    """
    folders = _folders(directory)
    if not folders:
        raise UserError(f"{directory}: holds no plan ({PLAN_FILE} is missing)")
    segments: list[Segment] = []
    ends: list[tuple[int, int]] = []
    for folder in folders:
        found = _open_segment(folder)
        end, num_kept = segments[-1].end_step if segments else 0, len(segments)
        while segments and (found.branch is None or found.branch.plan_id != segments[-1].plan_id):
            # Stages to come are replaced by a branch; what was trained never is.
            last = segments[-1]
            if found.branch is None or last.stage_number == 0 or last.base_step < found.branch.step:
                raise unreadable_plan(folder / PLAN_FILE, f"it does not continue plan {segments[-1].plan_id}")
            segments.pop()
        if found.branch is not None and (len(segments) < num_kept or found.stage_number == segments[-1].stage_number):
            # What was trained before a branch keeps its learning rate, whose schedule may end with the run.
            step = found.branch.step
            ends = [*((min(last, step), earlier) for last, earlier in ends), (step, end)]
        segments.append(found)
    return Plan(segments=tuple(segments), earlier_ends=tuple(ends))


def num_segments(directory: Place) -> int:
    """Return the number of segments that have been committed in the directory, also of those that were replaced."""
    return len(_folders(directory))


def has_plan(directory: Place) -> bool:
    """Return whether a plan has been committed in the directory."""
    return bool(_folders(directory))


def _folders(directory: Place) -> list[Place]:
    """Return the folders of committed segments, in order."""
    folders: list[Place] = []
    if isinstance(directory, RemotePath):
        committed = remote_segments(directory, PLAN_FILE)
        while (name := committed.get(len(folders))) is not None:
            folders.append(directory / name)
        return folders
    refuse_links(directory, directory.parent)
    if not directory.is_dir():
        return []
    named = {int(match[1]): path for path in directory.iterdir() if (match := _FOLDER.match(path.name))}
    while (folder := named.get(len(folders))) is not None and (folder / PLAN_FILE).is_file():
        folders.append(folder)
    return folders


def _open_segment(folder: Place) -> Segment:
    """Return a segment, read from its folder or from this node's copy of it."""
    if not isinstance(folder, RemotePath):
        return _read_segment(folder)
    fetch = partial(fetch_segment, folder.parent, folder.name, PLAN_FILE)
    renew = partial(fetch, anew=True)
    try:
        return _read_segment(fetch(), renew)
    except UnreadablePlanError as error:
        log.warning("%s: this node's copy is made anew (%s)", folder, error)
    try:
        return _read_segment(renew(), renew)
    except UnreadablePlanError as error:
        raise UserError(f"{folder}: is damaged: {error}") from error


def _header_text(folder: Path, segment: Segment) -> str:
    checksums = {f"{name}.parquet": text for name, text in asdict(segment.checksums).items()}
    header = asdict(
        _Header(
            planner_version=PLANNER_VERSION,
            plan_id=segment.plan_id,
            settings=segment.settings,
            sources=segment.sources,
            branch=segment.branch,
            stage=segment.stage,
            epochs=segment.epochs,
            totals=segment.totals,
            num_rows=segment.train.num_rows,
            files={name: file_facts(folder / name, text) for name, text in checksums.items()},
        )
    )
    header["settings"] = segment.settings.content()
    if segment.stage is None:
        # Versions that know no stages read a plan without them.
        del header["stage"]
    return json.dumps({**header, _CHECKSUM: stable_hash(header)}, indent=2) + "\n"


def _read_segment(folder: Path, renew: Callable[[], object] | None = None) -> Segment:
    header = _read_header(folder)
    files, checksums = header.files, header.checksums()
    found = segment_id(
        header.settings, header.sources, header.branch, header.stage, header.epochs, header.totals, checksums
    )
    if found != header.plan_id:
        raise UserError(
            f"{folder}: {PLAN_FILE} names plan {header.plan_id}, but its fields give {found}: they were changed since "
            "the plan was made; restore the file, or start a new run under another run.name"
        )
    fragments, waits = _read_fragments(folder / _FRAGMENTS, files[_FRAGMENTS])
    rows = partial(FileRows, renew=renew)
    return Segment(
        plan_id=header.plan_id,
        settings=header.settings,
        sources=header.sources,
        branch=header.branch,
        stage=header.stage,
        epochs=header.epochs,
        fragments=fragments.take(~waits),
        waiting=fragments.take(waits),
        totals=header.totals,
        checksums=checksums,
        train=rows(folder / _ROWS, folder / _PIECES, files[_ROWS], files[_PIECES]),
        evaluation=rows(
            folder / _EVALUATION_ROWS, folder / _EVALUATION_PIECES, files[_EVALUATION_ROWS], files[_EVALUATION_PIECES]
        ),
    )


def _read_header(folder: Path) -> _Header:
    path = folder / PLAN_FILE
    try:
        fields = read_json(adapter(dict[str, Any]), read_regular(path, path.parents[2]))
        version = fields.get("planner_version")
        if version != PLANNER_VERSION:
            raise UserError(
                f"{folder}: the plan was made by planner version {version}, this is version {PLANNER_VERSION}; "
                "continue with the version that made it, or start a new run under another run.name"
            )
        if fields.pop(_CHECKSUM, None) != stable_hash(fields):
            raise ContentError("its checksum is wrong: it was changed since the plan was made")
        header = checked(adapter(_Header), fields)
        header.checksums()
    except KeyError as error:
        raise unreadable_plan(path, f"files.{error.args[0]} is missing") from error
    except (OSError, ContentError) as error:
        raise unreadable_plan(path, error) from error
    return header


def _write_rows(folder: Path, segment: Segment) -> None:
    train, evaluation = segment.train, segment.evaluation
    assert isinstance(evaluation, MemoryRows) and evaluation.all_pieces is not None
    write_stats(folder / _ROWS, train, segment.checksums.rows)
    write_stats(folder / _EVALUATION_ROWS, evaluation, segment.checksums.evaluation_rows)
    writer = ColumnsWriter(folder / _EVALUATION_PIECES, Pieces)
    writer.add(evaluation.all_pieces)
    writer.close(segment.checksums.evaluation_pieces)
    columns = fragment_columns(segment.fragments, segment.waiting)
    table = pa.table(dict(zip(_FRAGMENT_COLUMNS, columns, strict=True)))
    pq.write_table(table, folder / _FRAGMENTS, compression="lz4", write_page_checksum=True)


def _read_fragments(path: Path, facts: FileFacts) -> tuple[Fragments, NDArray[np.bool_]]:
    """Return all fragments, and which of them wait."""
    try:
        check_file(path, facts)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        document, start, length, waits = columns = [table.column(name).to_numpy() for name in _FRAGMENT_COLUMNS]
        if checksums_of(columns) != facts.checksums:
            raise OSError("its content is not what was planned")
    except (*READ_ERRORS, KeyError) as error:
        raise unreadable_plan(path, error) from error
    return Fragments(document=document, start=start, length=length), waits
