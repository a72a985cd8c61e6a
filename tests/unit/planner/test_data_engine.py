"""Which engine reads the rows of a run that leaves it open."""

from __future__ import annotations

import pytest

from ray_ulysses.config import Config
from ray_ulysses.planner.data_engine import data_engine, engine_reason
from tests.unit.planner.runs import make_config, make_corpus
from tests.unit.planner.test_report import report_of

STORE = "s3://bucket/corpus"


@pytest.mark.parametrize(
    ("data", "engine", "said"),
    [
        ({}, "local", "in the workers (data.engine=auto: all corpora lie in file systems)"),
        (
            {"path": STORE},
            "ray",
            "in tasks of Ray Data beside the workers (data.engine=auto: a corpus lies on an object",
        ),
        ({"path": STORE, "engine": "local"}, "local", "in the workers (data.engine=local)"),
        ({"engine": "ray"}, "ray", "in tasks of Ray Data beside the workers (data.engine=ray)"),
        ({"path": None, "sources": [{"path": "/corpus"}, {"path": STORE}]}, "ray", "an object store"),
        ({"path": None, "sources": [{"path": "/corpus"}, {"path": "/other"}]}, "local", "file systems"),
    ],
    ids=["files", "store", "store local", "files ray", "one of two", "two files"],
)
def test_files_are_read_in_the_workers_and_object_stores_beside_them(data: dict, engine: str, said: str) -> None:
    config = make_config(data=data)
    assert data_engine(config) == engine
    assert said in engine_reason(config)


def test_a_corpus_of_any_stage_counts() -> None:
    tree = make_config().model_dump(exclude_unset=True)
    first = {"name": "short", "steps": 2}
    for last, engine in (({"name": "long", "path": STORE}, "ray"), ({"name": "long"}, "local")):
        assert data_engine(Config.model_validate({**tree, "stages": (first, last)})) == engine


def test_the_plan_says_it() -> None:
    report = report_of(make_config(), make_corpus([64] * 9))
    assert report.data.engine == engine_reason(make_config())
