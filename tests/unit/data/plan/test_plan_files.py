"""Stored plans: any damage is reported with the damaged file, and a plan with other rows is never loaded."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.corpus.row_groups import GROUP_ROWS
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, num_segments, write_segment
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.data.plan.stages import remainder_after
from ray_ulysses.errors import UserError
from tests.breadth import examples
from tests.unit.data.plan.test_branches import Corpora, corpus
from tests.unit.data.plans import segment_in_memory

SETTINGS = PlanSettings(
    seed=3, context_tokens=50, pad_multiple=8, rows_per_step=6, epochs=2, eval_fraction=0.2, eval_rows=3
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
    with pytest.raises(UserError, match=r"planner version 99, but this version of ray-ulysses reads only version 5"):
        load_plan(tmp_path)


NUM_FLIPS = examples(400)


def write_plan(directory: Path) -> Plan:
    """Write a plan of two segments, the second of which has fragments."""
    rng = np.random.default_rng(0)
    corpora = Corpora((corpus(rng, 15), corpus(rng, 10)), (1.0, 1.0))
    write_segment(directory, 0, corpora.documents, SETTINGS)
    changed = replace(corpora, weights=(0.0, 1.0)).documents
    remainder = remainder_after(load_plan(directory), 2, changed.sources, SETTINGS)
    write_segment(directory, 1, changed, replace(SETTINGS, context_tokens=70), remainder)
    return load_plan(directory)


def content_of(plan: Plan) -> list[Any]:
    return [segment_content(segment) for segment in plan.segments]


def segment_content(segment: Segment) -> list[Any]:
    rows = []
    for split in (segment.train, segment.evaluation):
        weights = split.stats(0, split.num_rows)
        rows.append([getattr(weights, name).tolist() for name in type(weights).__slots__])
        rows.append([split.pieces(row) for row in range(split.num_rows)])
    fragments = [
        getattr(one, name).tolist()
        for one in (segment.fragments, segment.waiting)
        for name in ("document", "start", "length")
    ]
    header = [segment.plan_id, segment.settings, segment.sources, segment.branch, segment.epochs, segment.totals]
    return [*header, fragments, *rows]


def problem_of(directory: Path, whole: list[Any]) -> str:
    """Return the error of loading a plan, or an empty string if the plan is loaded unchanged."""
    try:
        found = content_of(load_plan(directory))
    except UserError as error:
        return str(error)
    assert found == whole, "the plan changed unnoticed"
    return ""


def test_every_flipped_bit_is_named_or_changes_nothing(tmp_path: Path) -> None:
    whole = content_of(write_plan(tmp_path))
    assert any(any(fragments) for *_, fragments, _, _, _, _ in whole), "there are fragments to damage"
    rng = np.random.default_rng(1)
    paths = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(paths) == 12
    num_named = dict.fromkeys((path.suffix for path in paths), 0)
    for number in range(NUM_FLIPS):
        # Every file in turn; half of the flips are in plan.json, which has the most fields.
        headers = [path for path in paths if path.suffix == ".json"]
        path = headers[number // 2 % 2] if number % 2 else paths[number // 2 % len(paths)]
        content = path.read_bytes()
        place, bit = int(rng.integers(len(content))), int(rng.integers(8))
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :])
        problem = problem_of(tmp_path, whole)
        assert not problem or str(path) in problem or f"{path.parent}:" in problem
        num_named[path.suffix] += bool(problem)
        path.write_bytes(content)
    assert content_of(load_plan(tmp_path)) == whole
    assert min(num_named.values()) > NUM_FLIPS // 3


@pytest.mark.parametrize("size", [0, 7, -1, -9])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, size: int) -> None:
    write_plan(tmp_path)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(content[:size])
        if size == -1 and path.suffix == ".json":
            load_plan(tmp_path)  # The line feed at the end.
        else:
            with pytest.raises(UserError, match=re.escape(f"{path}: the plan can't be read (")):
                load_plan(tmp_path)
        path.write_bytes(content)


def stored_header(directory: Path) -> tuple[Path, dict[str, Any]]:
    write_plan(directory)
    path = directory / "segment-0001/plan.json"
    return path, json.loads(path.read_text())


def seal(path: Path, header: dict[str, Any]) -> None:
    """Write a header with the checksum that its fields give."""
    fields = {name: value for name, value in header.items() if name != "checksum"}
    path.write_text(json.dumps({**fields, "checksum": stable_hash(fields)}))


@pytest.mark.parametrize(
    "edit",
    [
        lambda header: header["epochs"][0].update(num_rows=header["epochs"][0]["num_rows"] - 1),
        lambda header: header["totals"].update(supervised=header["totals"]["supervised"] + 1),
        lambda header: header["settings"].update(context_tokens=64),
        lambda header: header["branch"].update(step=header["branch"]["step"] + 1),
        lambda header: header["sources"][1].update(weight=2.0),
        lambda header: header["files"]["rows.parquet"].update(checksums="00000000"),
    ],
    ids=["epoch", "totals", "context", "branch", "weight", "checksums"],
)
def test_an_edited_plan_is_refused_even_with_a_matching_checksum(tmp_path: Path, edit: Any) -> None:
    """A new checksum does not help, since the plan id is a hash of the same content."""
    path, header = stored_header(tmp_path)
    edit(header)
    path.write_text(json.dumps(header))
    with pytest.raises(UserError, match=r"plan\.json: .*the checksum is wrong"):
        load_plan(tmp_path)
    seal(path, header)
    with pytest.raises(UserError, match=r"plan\.json records plan [0-9a-f]{16}, but its fields hash to [0-9a-f]{16}"):
        load_plan(tmp_path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda header: header["settings"].update(rows_per_step="12"), "settings.rows_per_step is '12'"),
        (lambda header: header["settings"].update(packing="tight"), "settings.packing is 'tight'"),
        (lambda header: header["totals"].pop("tokens"), "totals.tokens is missing"),
        (lambda header: header["files"].pop("rows.parquet"), "files.rows.parquet is missing"),
        (lambda header: header.update(extra=1), "extra is 1"),
        (lambda header: header["epochs"][0].update(num_rows=-1), r"epochs\[0\].num_rows is -1"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path: Path, change: Any, field: str) -> None:
    path, header = stored_header(tmp_path)
    change(header)
    seal(path, header)
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}: the plan can't be read \({field}"):
        load_plan(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '"\\ud800"', '{"planner_version": 1e999}'])
def test_other_text_in_place_of_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    write_plan(tmp_path)
    (tmp_path / "segment-0000/plan.json").write_text(text)
    with pytest.raises(UserError, match=r"segment-0000"):
        load_plan(tmp_path)


def test_the_id_of_a_plan_does_not_depend_on_the_paths_of_its_sources(tmp_path: Path) -> None:
    path, header = stored_header(tmp_path)
    before = load_plan(tmp_path).plan_id
    header["sources"][0]["path"] = "/elsewhere"
    seal(path, header)
    assert load_plan(tmp_path).plan_id == before
