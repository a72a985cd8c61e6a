"""The history of a run's data plan: one record per segment, or a problem."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.inspect import run_data
from ray_ulysses.inspect.run_data import PlanHistory, planned_data, read_plan_history
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import SETTINGS, Run


def test_each_edit_of_a_run_is_a_segment(run: Run, corpus: Path, tmp_path: Path) -> None:
    more = text_corpus(tmp_path / "more", varied_texts(20, seed=5)).path
    first = run.plan.plan_id
    run.branch(5, replace(SETTINGS, context_tokens=256, rows_per_step=3, packing="concat"), [corpus, more])
    one, two = json.loads(json.dumps(read_plan_history(run.folder).to_json()))["plan"]
    sources = [{"path": str(path), "weight": None} for path in (corpus, more)]
    fields = {"segment": 0, "base_step": 0, "base_row": 0, "context_tokens": 128, "rows_per_step": 4}
    assert one == {"plan_id": first, **fields, "packing": "best_fit", "sources": sources[:1], "stage": None}
    fields = {"segment": 1, "base_step": 5, "base_row": 20, "context_tokens": 256, "rows_per_step": 3}
    assert two == {"plan_id": run.plan.plan_id, **fields, "packing": "concat", "sources": sources, "stage": None}


@pytest.mark.parametrize("error", [RunError("the store is away"), UserError("it is damaged"), OSError("gone")])
def test_a_plan_that_can_not_be_read_is_a_problem(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(directory: Path) -> None:
        raise error

    monkeypatch.setattr(run_data, "load_plan_if_any", fail)
    assert read_plan_history(run.folder) == PlanHistory(problem=str(error))
    with pytest.raises(UserError, match=rf"^the run's data plan can't be read \((plan: )?{error}\)"):
        planned_data(run.folder)
