"""What docs/scale.md shows is what the benchmarks stored, and what `plan` predicts today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.runner import RESULTS
from benchmarks.scale.capacity import CONTEXTS, capacity_table, longest_table, network_table, row_of

_PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
_STORED = json.loads((RESULTS / "scale_capacity.json").read_text())


@pytest.mark.parametrize("table", [capacity_table, network_table, longest_table])
def test_the_tables_of_the_page_are_those_that_were_stored(table: object) -> None:
    assert callable(table)
    assert table(_STORED) in _PAGE


@pytest.mark.parametrize("gpus", [8, 1024])
def test_plan_still_predicts_what_was_stored(gpus: int) -> None:
    case = ("Llama-3-8B", gpus, CONTEXTS[1])
    (stored,) = [row for row in _STORED["rows"] if (row["model"], row["gpus"], row["context_tokens"]) == case]
    found = row_of(*case, price=_STORED["price"])
    assert {name: value for name, value in found.items() if isinstance(value, str | int)} == {
        name: value for name, value in stored.items() if isinstance(value, str | int)
    }
    assert found["seconds"] == pytest.approx(stored["seconds"], rel=1e-6)
    assert found["device_gib"] == pytest.approx(stored["device_gib"], rel=1e-6)
