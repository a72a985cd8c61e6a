"""A plan on disk: a directory a segment, whose ``plan.json`` is written last, names the files and commits them.

``plan.json`` is covered by a checksum of its own, and holds the checksums of everything in the Parquet files; the
plan's id follows from all of it but where the sources lie. So nothing of a plan changes unnoticed.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.drawing import Fragments
from ray_ulysses.data.plan.mixture import PlannedSource
from ray_ulysses.data.plan.plan import (
    PLANNER_VERSION,
    Branch,
    EpochInfo,
    Plan,
    PlanSettings,
    Segment,
    Totals,
    segment_id,
)
from ray_ulysses.data.plan.planning import PlanInput, Remainder, build_segment
from ray_ulysses.data.plan.row_checksums import Checksums, checksums_of, fragment_columns
from ray_ulysses.data.plan.row_files import (
    FileFacts,
    FileRows,
    PieceWriter,
    check_file,
    file_facts,
    unreadable_plan,
    write_weights,
)
from ray_ulysses.data.plan.rows import MemoryRows
from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import sync, write_text
from ray_ulysses.storage.patience import READ_ERRORS
from ray_ulysses.validation import ContentError, read_json

PLAN_FILE = "plan.json"
_ROWS, _PIECES, _EVALUATION_ROWS, _EVALUATION_PIECES = (
    f"{name}.parquet" for name in ("rows", "pieces", "evaluation_rows", "evaluation_pieces")
)
_FRAGMENTS = "fragments.parquet"
_FRAGMENT_COLUMNS = ("document", "start", "length", "waits")
_CHECKSUM = "checksum"
_OBJECT = TypeAdapter(dict[str, Any])
_FOLDER = re.compile(r"^segment-(\d{4,})$")


def write_segment(
    directory: Path,
    number: int,
    documents: PlanInput,
    settings: PlanSettings,
    remainder: Remainder | None = None,
) -> Segment:
    """Plan a segment straight to disk; one that is there already and made of the same is left as it is.

    Args:
        directory: The plan's directory.
        number: The segment's number.
        documents: What it is made from.
        settings: What it is made with.
        remainder: What the run has trained already; ``None`` for segment 0.

    Returns:
        The segment, read back.

    Raises:
        UserError: Another segment of that number is there, which is not written over; or no plan is possible.
    """
    folder = directory / f"segment-{number:04d}"
    if (folder / PLAN_FILE).is_file():
        found = _read_segment(folder)
        if not found.is_made_of(settings, documents.sources, remainder.branch if remainder else None):
            raise UserError(
                f"{folder}: already holds plan {found.plan_id}, which other data, settings or steps made; nothing was "
                "written over. Data, seed and context may not change in a run: use another run.name, or "
                "`ray-ulysses train --branch`"
            )
        return found
    # What a planner that was killed has left is no plan.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writer = PieceWriter(folder / _PIECES)
    segment = build_segment(documents, settings, writer, remainder)
    writer.close(segment.checksums.pieces)
    _write_rows(folder, segment)
    for path in (*folder.iterdir(), folder):
        sync(path)
    write_text(folder / PLAN_FILE, _header_text(folder, segment))
    return _read_segment(folder)


def load_plan(directory: Path) -> Plan:
    """Open a plan; reads no row.

    Raises:
        UserError: It is missing, of another version, unreadable, or its segments do not follow one another.
    """
    folders = _folders(directory)
    if not folders:
        raise UserError(f"{directory}: holds no plan ({PLAN_FILE} is missing)")
    segments = [_read_segment(folder) for folder in folders]
    for folder, before, after in zip(folders[1:], segments, segments[1:], strict=False):
        if after.branch is None or after.branch.plan_id != before.plan_id:
            raise unreadable_plan(folder / PLAN_FILE, f"it does not go on from plan {before.plan_id}")
    return Plan(segments=tuple(segments))


def has_plan(directory: Path) -> bool:
    """Return whether a plan has been committed in the directory."""
    return bool(_folders(directory))


def _folders(directory: Path) -> list[Path]:
    """Return the folders of committed segments, in order."""
    if not directory.is_dir():
        return []
    named = {int(match[1]): path for path in directory.iterdir() if (match := _FOLDER.match(path.name))}
    folders: list[Path] = []
    while (folder := named.get(len(folders))) is not None and (folder / PLAN_FILE).is_file():
        folders.append(folder)
    return folders


def _header_text(folder: Path, segment: Segment) -> str:
    files = {name: asdict(file_facts(folder / name, text)) for name, text in _checksums_by_file(segment).items()}
    header = {
        "planner_version": PLANNER_VERSION,
        "plan_id": segment.plan_id,
        "settings": asdict(segment.settings),
        "sources": [asdict(source) for source in segment.sources],
        "branch": None if segment.branch is None else asdict(segment.branch),
        "epochs": [asdict(info) for info in segment.epochs],
        "totals": asdict(segment.totals),
        "num_rows": segment.train.num_rows,
        "files": files,
    }
    return json.dumps({**header, _CHECKSUM: stable_hash(header)}, indent=2) + "\n"


def _checksums_by_file(segment: Segment) -> dict[str, str]:
    return {f"{name}.parquet": text for name, text in asdict(segment.checksums).items()}


def _read_segment(folder: Path) -> Segment:
    header = _read_header(folder)
    version = header.get("planner_version")
    if version != PLANNER_VERSION:
        raise UserError(
            f"{folder}: the plan was made by planner version {version}, this is version {PLANNER_VERSION}; "
            "go on with the version that made it, or start a new run under another run.name"
        )
    if header.pop(_CHECKSUM, None) != stable_hash(header):
        raise unreadable_plan(folder / PLAN_FILE, "its checksum is wrong: it was changed since the plan was made")
    try:
        settings = PlanSettings(**header["settings"])
        sources = tuple(_source(source) for source in header["sources"])
        branch = None if header["branch"] is None else Branch(**header["branch"])
        epochs = tuple(EpochInfo(**info) for info in header["epochs"])
        plan_id, totals = str(header["plan_id"]), Totals(**header["totals"])
        files = {name: FileFacts(**facts) for name, facts in header["files"].items()}
        checksums = Checksums(**{path.removesuffix(".parquet"): facts.checksums for path, facts in files.items()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable_plan(folder / PLAN_FILE, error) from error
    found = segment_id(settings, sources, branch, epochs, totals, checksums)
    if found != plan_id:
        raise UserError(
            f"{folder}: {PLAN_FILE} names plan {plan_id}, but its fields give {found}: they were changed since the "
            "plan was made; restore the file, or start a new run under another run.name"
        )
    fragments, waits = _read_fragments(folder / _FRAGMENTS, files[_FRAGMENTS])
    train = FileRows(folder / _ROWS, folder / _PIECES, files[_ROWS], files[_PIECES])
    return Segment(
        plan_id=plan_id,
        settings=settings,
        sources=sources,
        branch=branch,
        epochs=epochs,
        fragments=fragments.take(~waits),
        waiting=fragments.take(waits),
        totals=totals,
        checksums=checksums,
        train=train,
        evaluation=FileRows(
            folder / _EVALUATION_ROWS, folder / _EVALUATION_PIECES, files[_EVALUATION_ROWS], files[_EVALUATION_PIECES]
        ),
    )


def _source(fields: dict[str, Any]) -> PlannedSource:
    return PlannedSource(**{**fields, "end_tokens": tuple(fields["end_tokens"])})


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / PLAN_FILE
    try:
        return read_json(_OBJECT, path.read_bytes())
    except (OSError, ContentError) as error:
        raise unreadable_plan(path, error) from error


def _write_rows(folder: Path, segment: Segment) -> None:
    train, evaluation = segment.train, segment.evaluation
    assert isinstance(train, MemoryRows) and isinstance(evaluation, MemoryRows)
    write_weights(folder / _ROWS, train, segment.checksums.rows)
    write_weights(folder / _EVALUATION_ROWS, evaluation, segment.checksums.evaluation_rows)
    writer = PieceWriter(folder / _EVALUATION_PIECES)
    writer.add(evaluation.all_pieces)
    writer.close(segment.checksums.evaluation_pieces)
    columns = fragment_columns(segment.fragments, segment.waiting)
    table = pa.table(dict(zip(_FRAGMENT_COLUMNS, columns, strict=True)))
    pq.write_table(table, folder / _FRAGMENTS, compression="lz4", write_page_checksum=True)


def _read_fragments(path: Path, facts: FileFacts) -> tuple[Fragments, NDArray[np.bool_]]:
    """Return what earlier segments left, and which of it waits."""
    try:
        check_file(path, facts)
        # Not `read_table`, which imports pandas first: a quarter of a second of every resume.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        document, start, length, waits = columns = [table.column(name).to_numpy() for name in _FRAGMENT_COLUMNS]
        if checksums_of(columns) != facts.checksums:
            raise OSError("its content is not what was planned")
    except (*READ_ERRORS, KeyError) as error:
        raise unreadable_plan(path, error) from error
    return Fragments(document=document, start=start, length=length), waits
