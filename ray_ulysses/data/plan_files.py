"""A plan on disk: the rows as Parquet, and ``plan.json``, written last, which names and commits them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_ulysses.data.atomic import atomic_file, write_text
from ray_ulysses.data.plan import PLANNER_VERSION, Plan, PlanSettings, plan_id_of
from ray_ulysses.data.rows import RowTable
from ray_ulysses.data.shard import READ_ERRORS
from ray_ulysses.errors import UserError

PLAN_FILE = "plan.json"
TRAIN_FILE = "train.parquet"
EVALUATION_FILE = "evaluation.parquet"
_GROUP_ROWS = 1 << 20

_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("document", pa.int64(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("has_next_label", pa.bool_(), nullable=False),
    ]
)


def save_plan(plan: Plan, directory: Path) -> None:
    """Write a plan; a directory that holds the same plan already is left as it is.

    Raises:
        UserError: The directory holds another plan, which is not written over.
    """
    if (directory / PLAN_FILE).is_file():
        found = _read_header(directory).get("plan_id")
        if found == plan.plan_id:
            return
        raise UserError(
            f"{directory}: already holds plan {found}, not {plan.plan_id}; nothing was written over. "
            "Data, seed and context may not change in a run: use another run.name"
        )
    _write_rows(directory / TRAIN_FILE, plan.train)
    _write_rows(directory / EVALUATION_FILE, plan.evaluation)
    header = {
        "planner_version": PLANNER_VERSION,
        "plan_id": plan.plan_id,
        "fingerprint": plan.fingerprint,
        "settings": asdict(plan.settings),
        "num_documents": plan.num_documents,
        "held_out_documents": plan.held_out_documents,
        "skipped_documents": plan.skipped_documents,
        "num_rows": plan.num_rows,
        "num_evaluation_rows": plan.evaluation.num_rows,
    }
    write_text(directory / PLAN_FILE, json.dumps(header, indent=2) + "\n")


def load_plan(directory: Path) -> Plan:
    """Read a plan and check that its rows give its id.

    Raises:
        UserError: It is missing, of another version, unreadable, or changed since it was written.
    """
    header = _read_header(directory)
    version = header.get("planner_version")
    if version != PLANNER_VERSION:
        raise UserError(
            f"{directory}: the plan was made by planner version {version}, this is version "
            f"{PLANNER_VERSION}; "
            "go on with the version that made it, or start a new run under another run.name"
        )
    try:
        settings = PlanSettings(**header["settings"])
        counts = {name: int(header[name]) for name in ("num_documents", "held_out_documents", "skipped_documents")}
        plan_id, fingerprint = str(header["plan_id"]), str(header["fingerprint"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(directory / PLAN_FILE, error) from error
    train = _read_rows(directory / TRAIN_FILE, settings.pad_multiple)
    evaluation = _read_rows(directory / EVALUATION_FILE, settings.pad_multiple)
    found = plan_id_of(settings, fingerprint, train, evaluation)
    if found != plan_id:
        raise UserError(
            f"{directory}: {PLAN_FILE} names plan {plan_id}, but its files give {found}: they were changed "
            "since the "
            "plan was made; restore them, or start a new run under another run.name"
        )
    return Plan(
        plan_id=plan_id,
        settings=settings,
        fingerprint=fingerprint,
        train=train,
        evaluation=evaluation,
        **counts,
    )


def has_plan(directory: Path) -> bool:
    """Return whether a plan has been committed in the directory."""
    return (directory / PLAN_FILE).is_file()


def _read_header(directory: Path) -> dict[str, Any]:
    path = directory / PLAN_FILE
    if not path.is_file():
        raise UserError(f"{directory}: holds no plan ({PLAN_FILE} is missing)")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(header, dict):
        raise _unreadable(path, "not a JSON object")
    return header


def _write_rows(path: Path, rows: RowTable) -> None:
    sizes = np.diff(rows.offsets)
    table = pa.table(
        {
            "row": np.repeat(np.arange(rows.num_rows, dtype=np.int64), sizes),
            "epoch": np.repeat(rows.epoch, sizes),
            "document": rows.document,
            "start": rows.start,
            "length": rows.length,
            "has_next_label": rows.has_next_label,
        }
    ).cast(_SCHEMA)
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=_GROUP_ROWS)


def _read_rows(path: Path, pad_multiple: int) -> RowTable:
    try:
        table = pq.read_table(path, schema=_SCHEMA)
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error
    columns = {name: table.column(name).to_numpy() for name in _SCHEMA.names}
    # Rows are numbered from 0 without a gap and lie in order: each begins where the number changes.
    row = columns["row"]
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    if not np.array_equal(row[starts], np.arange(starts.size)):
        raise _unreadable(path, "its rows are not in order")
    return RowTable.build(
        offsets=np.append(starts, row.size).astype(np.int64),
        document=columns["document"].copy(),
        start=columns["start"].copy(),
        length=columns["length"].copy(),
        has_next_label=columns["has_next_label"].copy(),
        epoch=columns["epoch"][starts].astype(np.int32),
        pad_multiple=pad_multiple,
    )


def _unreadable(path: Path, reason: object) -> UserError:
    return UserError(
        f"{path}: the plan can't be read ({reason}); restore the file, or start a new run under another run.name"
    )
