"""docs/journal.md is up to date, documents the output of `inspect --json`, and its code reads journal lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.cli import app, run
from tests.journal_page import PAGE, render_journal
from tests.unit.inspect.runs import Run, make_run

_PAGE = PAGE.read_text(encoding="utf-8")


def _documented(section: str) -> dict[str, bool]:
    """Return the fields of a section's table, and whether each may be missing."""
    parts = re.split(r"^#{2,4} (.*)$", _PAGE, flags=re.MULTILINE)
    sections = dict(zip((title.strip("`") for title in parts[1::2]), parts[2::2], strict=True))
    rows = re.findall(r"^\| `(\w+)`(°?) \|", sections[section], flags=re.MULTILINE)
    assert len(rows) == len(dict(rows)), f"{section}: a field stands twice"
    return {name: bool(mark) for name, mark in rows}


def test_the_committed_page_is_up_to_date() -> None:
    assert render_journal() == _PAGE, "run `make docs`"


def test_the_page_reads_lines_as_the_journal_writes_them(tmp_path: Path, corpus: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", _PAGE, flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code[0], namespace)
    run_ = make_run(tmp_path / "run", [corpus])
    run_.trained(3)
    lines = (run_.folder / "journal/attempt-0001.jsonl").read_bytes().splitlines(keepends=True)
    (example,) = re.findall(r'^\{"crc32".*\n', _PAGE, flags=re.MULTILINE)
    for line in [*lines, example.encode()]:
        assert namespace["read_line"](line)["attempt"] == 1
        assert namespace["read_line"](line.replace(b'"attempt": 1', b'"attempt": 2')) is None


def test_the_page_has_the_fields_of_inspect(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained: Run = make_run(tmp_path / "run", [corpus])
    failed = {"event": "run_failed", "session": "s", "reason": "lost worker 1", "restarts": False}
    trained.attempt([trained.started(), *trained.steps(1, 3), trained.committed(3), failed])
    (trained.folder / "checkpoints/step-00000003").mkdir(parents=True)
    (trained.folder / "checkpoints/step-00000003/manifest.json").write_text("{}")
    assert run(app, ["inspect", str(trained.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name for name, optional in _documented("The run").items() if not optional} == set(found)
    (segment,) = found["plan"]
    parts = {
        "steps[]": found["steps"][0],
        "attempts[]": found["attempts"][0],
        "checkpoints[]": found["checkpoints"][0],
        "time_spent": found["time_spent"],
        "time_spent.starts": found["time_spent"]["starts"],
        "failure": found["failure"],
        "plan[]": segment,
        "plan[].sources[]": segment["sources"][0],
    }
    assert list(found["time_spent"]["recovery"]) == list(found["time_spent"]["starts"])
    for section, part in parts.items():
        assert list(_documented(section)) == list(part), section
