from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.corpus.row_groups import GROUP_ROWS
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, num_segments, write_segment
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.errors import UserError
from tests.unit.data.plan.test_plan_damage import segment_content
from tests.unit.data.plans import segment_in_memory

SETTINGS = PlanSettings(
    seed=3, context_tokens=50, pad_multiple=8, rows_per_step=6, epochs=2, eval_fraction=0.1, eval_rows=3
)
FOLDER = "segment-0000"


def documents_of(num_documents: int = 100) -> PlanInput:
    lengths = np.random.default_rng(0).integers(1, 160, num_documents).astype(np.int64)
    return PlanInput(sources=(PlannedSource(path="p", fingerprint="f", num_documents=num_documents),), lengths=lengths)


def in_memory(settings: PlanSettings = SETTINGS, documents: PlanInput | None = None) -> Segment:
    return segment_in_memory(documents or documents_of(), settings)


def write(directory: Path, settings: PlanSettings = SETTINGS, documents: PlanInput | None = None) -> Plan:
    write_segment(directory, 0, documents or documents_of(), settings)
    return load_plan(directory)


@pytest.mark.parametrize(
    "change", [{"context_tokens": 8, "packing": "none"}, {"context_tokens": 600}], ids=["rows", "pieces of a row"]
)
def test_rows_and_pieces_in_several_row_groups_are_read_back(tmp_path: Path, change: dict[str, Any]) -> None:
    num_documents = GROUP_ROWS + 5000
    documents = PlanInput(
        sources=(PlannedSource(path="p", fingerprint="f", num_documents=num_documents),),
        lengths=np.full(num_documents, 2),
    )
    settings = replace(SETTINGS, epochs=1, eval_fraction=0.0, **change)
    loaded, made = write(tmp_path, settings, documents).newest, in_memory(settings, documents)
    num_rows = made.train.num_rows
    for row in {GROUP_ROWS - 1, GROUP_ROWS, *range(0, num_rows, 1 + num_rows // 1000)} & {*range(num_rows)}:
        assert loaded.train.pieces(row) == made.train.pieces(row)
    border = (GROUP_ROWS - 3, GROUP_ROWS + 3)
    assert np.array_equal(loaded.train.stats(*border).first_piece, made.train.stats(*border).first_piece)


def test_a_stored_plan_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    write(tmp_path)
    with pytest.raises(UserError, match=r"contains plan .*; nothing was overwritten"):
        write(tmp_path, replace(SETTINGS, seed=4))
    assert {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()} == before


def test_a_stored_plan_is_the_one_in_memory_even_after_a_planner_was_killed(tmp_path: Path) -> None:
    expected = segment_content(in_memory())
    assert segment_content(write(tmp_path).newest) == expected
    (tmp_path / FOLDER / "plan.json").unlink()
    (tmp_path / FOLDER / "pieces.parquet").write_bytes(b"torn")
    assert not num_segments(tmp_path)
    assert segment_content(write(tmp_path).newest) == expected


def test_a_missing_plan_and_one_with_foreign_files_or_of_another_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"contains no plan"):
        load_plan(tmp_path)
    write(tmp_path)
    write(tmp_path / "other", replace(SETTINGS, seed=4))
    rows = tmp_path / FOLDER / "rows.parquet"
    own = rows.read_bytes()
    shutil.copy(tmp_path / "other" / FOLDER / rows.name, rows)
    with pytest.raises(UserError, match=rf"{rows.name}: the plan can't be read \(the (footer does not|file has \d+)"):
        load_plan(tmp_path)
    rows.write_bytes(own)
    path = rows.with_name("plan.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "planner_version": 99}))
    with pytest.raises(UserError, match=r"made by planner version 99, but this is version 4"):
        load_plan(tmp_path)
