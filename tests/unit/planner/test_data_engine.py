"""Which engine reads the rows of a run that leaves it open."""

from __future__ import annotations

import pytest

from ray_ulysses.planner.data_engine import data_engine, engine_reason
from tests.unit.planner.runs import make_config, make_corpus
from tests.unit.planner.test_report import report_of

STORE = "s3://bucket/corpus"


@pytest.mark.parametrize(
    ("data", "engine", "said"),
    [
        ({}, "local", "in the workers (data.engine=auto)"),
        ({"path": STORE}, "local", "in the workers (data.engine=auto)"),
        ({"engine": "local"}, "local", "in the workers (data.engine=local)"),
        ({"engine": "ray"}, "ray", "in tasks of Ray Data beside the workers (data.engine=ray)"),
    ],
    ids=["files", "store", "local", "ray"],
)
def test_rows_are_read_in_the_workers_unless_ray_data_is_asked_for(data: dict, engine: str, said: str) -> None:
    config = make_config(data=data)
    assert data_engine(config) == engine
    assert engine_reason(config) == said


def test_the_plan_says_it() -> None:
    report = report_of(make_config(), make_corpus([64] * 9))
    assert report.data.engine == engine_reason(make_config())
