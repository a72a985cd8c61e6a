"""What a directory says of itself is read only as far as it is what this version wrote."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.export.directory import RECORD_FILE, Record, read_record
from ray_ulysses.export.report import ExportReport
from tests.unit.export.runs import IDENTITY, REPORT


def with_fields(folder: Path, fields: Any) -> Path:
    (folder / RECORD_FILE).write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    "report",
    [REPORT, replace(REPORT, check=None, max_positions=2048, seconds=1.5)],
    ids=["checked", "unchecked"],
)
def test_a_record_is_read_back_as_it_was_written(tmp_path: Path, report: ExportReport) -> None:
    record = Record(identity=IDENTITY, report=report)
    (tmp_path / RECORD_FILE).write_bytes(record.to_bytes())
    assert read_record(tmp_path) == record


def test_a_field_that_only_another_version_reports_is_passed_over(tmp_path: Path) -> None:
    fields = asdict(Record(identity=IDENTITY, report=REPORT))
    fields["report"] |= {"carbon": 1.0}
    fields["report"]["check"] |= {"device": "cpu"}
    assert read_record(with_fields(tmp_path, fields)) == Record(identity=IDENTITY, report=REPORT)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("identity", {"adapter": "x"}),
        ("identity", {"max_shard_bytes": "5"}),
        ("identity", {"checked": 1}),
        ("identity", None),
        ("report", {"step": True}),
        ("report", {"check": {"tokens": 8}}),
        ("report", {"versions": ["torch"]}),
        ("report", {"files": ["file"]}),
        ("report", {"files": {"file": "3"}}),
    ],
)
def test_a_record_with_a_field_of_another_kind_is_none(tmp_path: Path, place: str, value: Any) -> None:
    fields = asdict(Record(identity=IDENTITY, report=REPORT))
    fields[place] = value if value is None else fields[place] | value
    assert read_record(with_fields(tmp_path, fields)) is None


@pytest.mark.parametrize("fields", [[], {}, {"report": []}, {"report": {"step": 4}}], ids=str)
def test_a_directory_without_a_whole_record_is_no_export(tmp_path: Path, fields: Any) -> None:
    assert read_record(tmp_path) is None
    assert read_record(with_fields(tmp_path, fields)) is None
    (tmp_path / RECORD_FILE).write_bytes(Record(identity=IDENTITY, report=REPORT).to_bytes()[:-20])
    assert read_record(tmp_path) is None
