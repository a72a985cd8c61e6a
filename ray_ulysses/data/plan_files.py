"""A plan on disk: a directory a segment, whose ``plan.json`` is written last, names the files and commits them."""

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

from ray_ulysses.data.atomic import sync, write_text
from ray_ulysses.data.drawing import Fragments
from ray_ulysses.data.mixture import PlannedSource
from ray_ulysses.data.patience import READ_ERRORS
from ray_ulysses.data.plan import (
    PLANNER_VERSION,
    Branch,
    EpochInfo,
    Plan,
    PlanSettings,
    Segment,
    Totals,
    segment_id,
)
from ray_ulysses.data.planning import PlanInput, Remainder, build_segment
from ray_ulysses.data.row_files import FileRows, PieceWriter, unreadable_plan, write_weights
from ray_ulysses.data.rows import MemoryRows
from ray_ulysses.errors import UserError

PLAN_FILE = "plan.json"
PLAN_FOLDER = "plan"
"""Where a run keeps its plan, below its directory."""
_ROWS, _PIECES, _EVALUATION_ROWS, _EVALUATION_PIECES = (
    f"{name}.parquet" for name in ("rows", "pieces", "evaluation_rows", "evaluation_pieces")
)
_FRAGMENTS = "fragments.parquet"
_STRETCH = ("document", "start", "length")
_FOLDER = re.compile(r"^segment-(\d{4,})$")


def write_segment(
    directory: Path,
    number: int,
    documents: PlanInput,
    settings: PlanSettings,
    remainder: Remainder | None = None,
) -> Segment:
    """Plan a segment straight to disk; one that is there already with the same id is left as it is.

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
    plan_id = segment_id(settings, documents.sources, remainder.branch if remainder else None)
    if (folder / PLAN_FILE).is_file():
        found = _read_header(folder).get("plan_id")
        if found != plan_id:
            raise UserError(
                f"{folder}: already holds plan {found}, not {plan_id}; nothing was written over. "
                "Data, seed and context may not change in a run: use another run.name, or `ray-ulysses train --branch`"
            )
        return _read_segment(folder)
    # What a planner that was killed has left is no plan.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writer = PieceWriter(folder / _PIECES, plan_id)
    segment = build_segment(documents, settings, writer, remainder)
    writer.close()
    _write_rows(folder, segment)
    for path in (*folder.iterdir(), folder):
        sync(path)
    write_text(folder / PLAN_FILE, json.dumps(_header(segment), indent=2) + "\n")
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


def _header(segment: Segment) -> dict[str, Any]:
    return {
        "planner_version": PLANNER_VERSION,
        "plan_id": segment.plan_id,
        "settings": asdict(segment.settings),
        "sources": [asdict(source) for source in segment.sources],
        "branch": None if segment.branch is None else asdict(segment.branch),
        "epochs": [asdict(info) for info in segment.epochs],
        "totals": asdict(segment.totals),
        "num_rows": segment.train.num_rows,
    }


def _read_segment(folder: Path) -> Segment:
    header = _read_header(folder)
    version = header.get("planner_version")
    if version != PLANNER_VERSION:
        raise UserError(
            f"{folder}: the plan was made by planner version {version}, this is version {PLANNER_VERSION}; "
            "go on with the version that made it, or start a new run under another run.name"
        )
    try:
        settings = PlanSettings(**header["settings"])
        sources = tuple(_source(source) for source in header["sources"])
        branch = None if header["branch"] is None else Branch(**header["branch"])
        epochs = tuple(EpochInfo(**info) for info in header["epochs"])
        plan_id, totals = str(header["plan_id"]), Totals(**header["totals"])
        num_rows = int(header["num_rows"])
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable_plan(folder / PLAN_FILE, error) from error
    found = segment_id(settings, sources, branch)
    if found != plan_id:
        raise UserError(
            f"{folder}: {PLAN_FILE} names plan {plan_id}, but its fields give {found}: they were changed since the "
            "plan was made; restore the file, or start a new run under another run.name"
        )
    fragments, waits = _read_fragments(folder / _FRAGMENTS)
    train = FileRows(folder / _ROWS, folder / _PIECES, plan_id)
    if train.num_rows != num_rows:
        raise unreadable_plan(folder / _ROWS, f"{train.num_rows} rows where {PLAN_FILE} says {num_rows}")
    return Segment(
        plan_id=plan_id,
        settings=settings,
        sources=sources,
        branch=branch,
        epochs=epochs,
        fragments=fragments.take(~waits),
        waiting=fragments.take(waits),
        totals=totals,
        train=train,
        evaluation=FileRows(folder / _EVALUATION_ROWS, folder / _EVALUATION_PIECES, plan_id),
    )


def _source(fields: dict[str, Any]) -> PlannedSource:
    return PlannedSource(**{**fields, "end_tokens": tuple(fields["end_tokens"])})


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / PLAN_FILE
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable_plan(path, error) from error
    if not isinstance(header, dict):
        raise unreadable_plan(path, "not a JSON object")
    return header


def _write_rows(folder: Path, segment: Segment) -> None:
    train, evaluation = segment.train, segment.evaluation
    assert isinstance(train, MemoryRows) and isinstance(evaluation, MemoryRows)
    write_weights(folder / _ROWS, train, segment.plan_id)
    write_weights(folder / _EVALUATION_ROWS, evaluation, segment.plan_id)
    writer = PieceWriter(folder / _EVALUATION_PIECES, segment.plan_id)
    writer.add(evaluation.all_pieces)
    writer.close()
    fragments, waiting = segment.fragments, segment.waiting
    columns = {name: np.concatenate([getattr(one, name) for one in (fragments, waiting)]) for name in _STRETCH}
    waits = np.arange(fragments.size + waiting.size) >= fragments.size
    pq.write_table(
        pa.table({**columns, "waits": waits}), folder / _FRAGMENTS, compression="lz4", write_page_checksum=True
    )


def _read_fragments(path: Path) -> tuple[Fragments, NDArray[np.bool_]]:
    """Return what earlier segments left, and which of it waits."""
    try:
        # Not `read_table`, which imports pandas first: a quarter of a second of every resume.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        columns = {name: table.column(name).to_numpy() for name in (*_STRETCH, "waits")}
    except (*READ_ERRORS, KeyError) as error:
        raise unreadable_plan(path, error) from error
    waits = columns.pop("waits")
    return Fragments(**columns), waits
