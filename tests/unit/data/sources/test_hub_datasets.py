"""Data sets given by Hub id are found without an option, and an unknown id is refused at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.data.sources.units import SourceSpec, list_units
from ray_ulysses.errors import UserError
from tests.hub_server import AWAY, refuse_waits, serve_hub, use_hub

ROWS = b"".join(json.dumps({"text": f"row {number}"}).encode() + b"\n" for number in range(5))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_hub_data_set_is_found_by_its_id_and_later_in_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "Owner/MyRows_2k"
    with serve_hub({f"datasets/{name}": {"README.md": b"", "train.jsonl": ROWS}}) as (address, _):
        use_hub(address, cache, monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", address)
        found = list_units(SourceSpec(paths=(name,)))
    (unit,), rejected = found
    assert (unit.kind, unit.first, unit.last, rejected) == ("datasets", 0, 5, ())
    assert "Generating" not in capfd.readouterr().err, "no progress bar"
    refuse_waits(monkeypatch)
    use_hub(AWAY, cache, monkeypatch)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", AWAY)
    assert list_units(SourceSpec(paths=(name,))) == found


@pytest.mark.parametrize(
    ("kind", "path", "requests"),
    [
        ("auto", "owner/none", 1),
        ("auto", "none.jsonl", 1),
        ("auto", "here/none", 0),
        ("datasets", "/none/of/these", 0),
    ],
)
def test_a_source_that_is_neither_here_nor_on_the_hub_is_refused_after_one_request_at_most(
    kind: Any, path: str, requests: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    with serve_hub({}) as (address, asked):
        use_hub(address, cache, monkeypatch)
        with pytest.raises(UserError, match="no such file or directory") as refused:
            list_units(SourceSpec(paths=(path,), kind=kind))
        assert len(asked) == requests
    assert ("has no data set with this id" in str(refused.value)) == (requests > 0)


def test_an_unreachable_hub_is_reported_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_waits(monkeypatch)
    use_hub(AWAY, cache, monkeypatch)
    with pytest.raises(UserError, match="does not respond"):
        list_units(SourceSpec(paths=("owner/rows",), kind="datasets"))
