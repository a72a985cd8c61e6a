from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.commands import prepare
from ray_ulysses.data.prepare import preparation
from ray_ulysses.data.sources.rows import RowFields, option


def test_the_help_shows_the_four_kinds_of_rows_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(app, ["prepare", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    begin = lines.index("  row     options                              what is learned")
    assert [line.split()[:2] for line in lines[begin + 1 : begin + 5]] == [
        ["text", "--text-field"],
        ["tokens", "--tokens-field"],
        ["chat", "--messages-field"],
        ["prompt", "--prompt-field"],
    ]


def test_every_field_has_an_option_that_reaches_the_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(preparation, "listed", lambda request: given.update(request=request))
    monkeypatch.setattr(preparation, "claimed", lambda found, is_scratch: _Complete())
    monkeypatch.setattr(prepare, "_result", lambda out: [f"made {out.name}"])
    roles = list(asdict(RowFields()))
    options = [word for role in roles for word in (option(role), f"the {role}")]
    assert run(app, ["prepare", "rows.jsonl", "--out", str(tmp_path / "out"), "--tokenizer", "bytes", *options]) == 0
    assert asdict(given["request"].sources.fields) == {role: f"the {role}" for role in roles}


def test_a_corpus_to_leave_out_reaches_the_request_and_the_result_comes_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(preparation, "listed", lambda request: given.update(request=request))
    monkeypatch.setattr(preparation, "claimed", lambda found, is_scratch: _Complete())
    monkeypatch.setattr(prepare, "_result", lambda out: [f"made {out.name}"])
    options = ["--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--without", "one", "--without", "two"]
    assert run(app, ["prepare", "rows.jsonl", *options]) == 0
    assert given["request"].without == ("one", "two")
    # How long each takes says how busy the machine is.
    assert re.sub(r"elapsed=\d+s ", "", capsys.readouterr().out).splitlines() == [
        "phase: loading libraries",
        "phase: listing the sources",
        f"{tmp_path / 'out'} already holds this corpus",
        "made out",
    ]


class _Complete:
    is_complete = True

    def __enter__(self) -> _Complete:
        return self

    def __exit__(self, *error: object) -> None: ...
