from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_ulysses.data.corpus.row_groups import GROUP_ROWS
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, num_segments, write_segment
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.errors import UserError
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


def assert_same_rows(one: Segment, other: Segment) -> None:
    for ours, theirs in ((one.train, other.train), (one.evaluation, other.evaluation)):
        assert ours.num_rows == theirs.num_rows
        for row in range(ours.num_rows):
            assert ours.pieces(row) == theirs.pieces(row)
        left, right = ours.stats(0, ours.num_rows), theirs.stats(0, theirs.num_rows)
        for name in type(left).__slots__:
            assert np.array_equal(getattr(left, name), getattr(right, name)), name


def test_a_plan_is_the_same_on_disk(tmp_path: Path) -> None:
    loaded, made = write(tmp_path).newest, in_memory()
    assert loaded.plan_id == made.plan_id
    assert (loaded.settings, loaded.sources, loaded.branch) == (made.settings, made.sources, made.branch)
    assert (loaded.epochs, loaded.totals) == (made.epochs, made.totals)
    assert_same_rows(loaded, made)


def test_rows_beyond_one_row_group_are_read_back(tmp_path: Path) -> None:
    """Two tokens a document and one document a row: more rows and more pieces than a group holds."""
    num_documents = GROUP_ROWS + 1000
    documents = PlanInput(
        sources=(PlannedSource(path="p", fingerprint="f", num_documents=num_documents),),
        lengths=np.full(num_documents, 3),
    )
    settings = replace(SETTINGS, context_tokens=8, pad_multiple=4, packing="none", epochs=1, eval_fraction=0.0)
    loaded, made = write(tmp_path, settings, documents).newest, in_memory(settings, documents)
    for row in (0, GROUP_ROWS - 1, GROUP_ROWS, num_documents - 1):
        assert loaded.train.pieces(row) == made.train.pieces(row)
    border = (GROUP_ROWS - 3, GROUP_ROWS + 3)
    assert np.array_equal(loaded.train.stats(*border).first_piece, made.train.stats(*border).first_piece)


def test_a_row_whose_pieces_lie_in_two_row_groups_is_read_back(tmp_path: Path) -> None:
    num_documents = GROUP_ROWS + 5000
    documents = PlanInput(
        sources=(PlannedSource(path="p", fingerprint="f", num_documents=num_documents),),
        lengths=np.full(num_documents, 2),
    )
    settings = replace(SETTINGS, context_tokens=600, pad_multiple=8, epochs=1, eval_fraction=0.0)
    loaded, made = write(tmp_path, settings, documents).newest, in_memory(settings, documents)
    assert_same_rows(loaded, made)


def test_writing_again_changes_nothing_and_another_plan_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    write(tmp_path)
    with pytest.raises(UserError, match=r"contains plan .*; nothing was overwritten"):
        write(tmp_path, replace(SETTINGS, seed=4))
    assert {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()} == before


def test_what_a_killed_planner_left_is_written_anew(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / FOLDER / "plan.json").unlink()
    (tmp_path / FOLDER / "pieces.parquet").write_bytes(b"torn")
    assert not num_segments(tmp_path)
    assert_same_rows(write(tmp_path).newest, in_memory())


@pytest.mark.parametrize("name", ["rows.parquet", "pieces.parquet", "evaluation_rows.parquet"])
def test_a_file_of_another_plan_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "other", replace(SETTINGS, seed=4, eval_rows=2))
    write(tmp_path / "plan")
    shutil.copy(tmp_path / "other" / FOLDER / name, tmp_path / "plan" / FOLDER / name)
    with pytest.raises(
        UserError, match=rf"{name}: the plan can't be read \((the footer does not match|the file has \d+ bytes)"
    ):
        load_plan(tmp_path / "plan")


def test_a_plan_of_another_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / FOLDER / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "planner_version": 99}))
    with pytest.raises(UserError, match=r"made by planner version 99, but this is version 4"):
        load_plan(tmp_path)


def test_a_missing_plan_is_said(tmp_path: Path) -> None:
    assert not num_segments(tmp_path)
    with pytest.raises(UserError, match=r"contains no plan"):
        load_plan(tmp_path)
