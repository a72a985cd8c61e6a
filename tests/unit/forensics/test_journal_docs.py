"""docs/journal.md names every field of the journal's events and of ``inspect --json``, and no other."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.tracking.events import CommandEvent, EndEvent, Event, InheritedSteps
from ray_ulysses.tracking.journal_lines import parse_line
from tests.unit.forensics.runs import Run, make_run

_PAGE = (Path(__file__).parents[3] / "docs/journal.md").read_text()
_FOR_INFORMATION = {"versions", "tokens_per_s", "world_size"}
"""Fields that are written and that no reader needs; ``world_size`` is one in a step."""
_EVENTS = {next(field.default for field in fields(kind) if field.name == "event"): kind for kind in get_args(Event)}
_SAME_AS = {"start_failed": "attempt_ended", "run_failed": "attempt_ended"}


def _sections() -> dict[str, str]:
    parts = re.split(r"^#{2,4} (.*)$", _PAGE, flags=re.MULTILINE)
    return dict(zip((title.strip("`") for title in parts[1::2]), parts[2::2], strict=True))


def _documented(section: str) -> dict[str, bool]:
    """Return the fields of a section's tables, and whether each may be missing."""
    rows = re.findall(r"^\| `(\w+)`(°?) \|", _sections()[section], flags=re.MULTILINE)
    assert len(rows) == len(dict(rows)), f"{section}: a field stands twice"
    return {name: bool(mark) for name, mark in rows}


def _declared(kind: type[Any]) -> dict[str, bool]:
    return {
        field.name: not (field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
        if field.name != "event"
    }


@pytest.mark.parametrize("event", sorted(_EVENTS))
def test_the_page_has_the_fields_of_every_event(event: str) -> None:
    common = _documented("Events")
    of_command = set(_declared(CommandEvent)) - {"time", "attempt"}
    assert set(common) == {"event", "time", "attempt"} | of_command
    expected = {name: optional for name, optional in _declared(_EVENTS[event]).items() if name not in common}
    found = _documented(_SAME_AS.get(event, event))
    if event in _SAME_AS:
        only_of_attempts = {"saving_seconds", "fault_at", "detected_at"}
        assert set(found) - only_of_attempts == set(expected) == set(_declared(EndEvent)) - set(common)
        return
    assert {name: found[name] for name in expected} == expected
    assert set(found) - set(expected) <= _FOR_INFORMATION
    assert (event in _PAGE.partition("also have:")[0].rpartition("Events that")[2]) == issubclass(
        _EVENTS[event], CommandEvent
    )


def test_the_page_has_the_fields_of_inherited_steps() -> None:
    assert _documented("taken_over") == _declared(InheritedSteps)


def test_the_page_has_an_intact_example_of_every_event() -> None:
    lines = re.findall(r'^\{"crc32".*$', _PAGE, flags=re.MULTILINE)
    events = [parse_line(line.encode(), json.loads(line)["attempt"]) for line in lines]
    assert [type(event) for event in events if event is not None] == [
        _EVENTS[title] for title in _sections() if title in _EVENTS
    ]
    assert len(events) == len(_EVENTS)
    for line in lines:
        example = json.loads(line)
        known = set(_documented("Events")) | set(_documented(_SAME_AS.get(example["event"], example["event"])))
        assert set(example) - known == {"crc32"}


def test_the_page_reads_lines_as_the_journal_writes_them(tmp_path: Path, corpus: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", _PAGE, flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code[0], namespace)
    run_ = make_run(tmp_path / "run", [corpus])
    run_.trained(3)
    for line in (run_.folder / "journal/attempt-0001.jsonl").read_bytes().splitlines(keepends=True):
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
