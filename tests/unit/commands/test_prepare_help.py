from __future__ import annotations

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


def test_every_option_reaches_the_request_and_the_result_comes_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(preparation, "listed", lambda request: given.update(request=request))
    monkeypatch.setattr(preparation, "claimed", lambda found, is_scratch: _Complete())
    monkeypatch.setattr(prepare, "_result", lambda out: [f"made {out.name}"])
    roles = list(asdict(RowFields()))
    options = [word for role in roles for word in (option(role), f"the {role}")]
    options += ["--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--without", "one", "--without", "two"]
    assert run(app, ["prepare", "rows.jsonl", *options]) == 0
    assert asdict(given["request"].sources.fields) == {role: f"the {role}" for role in roles}
    assert given["request"].without == ("one", "two")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" phase: loading libraries") and lines[-1] == "made out"


class _Complete:
    is_complete = True

    def __enter__(self) -> _Complete:
        return self

    def __exit__(self, *error: object) -> None: ...
