"""What ``model.resume_from`` may say, and what it means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.config.reference_to_checkpoint import (
    MlflowReference,
    ReferenceProblem,
    RunReference,
    Which,
    parse_reference,
)


@pytest.mark.parametrize(
    ("text", "location", "which"),
    [
        ("runs/demo", "runs/demo", "latest"),
        ("runs/demo@latest", "runs/demo", "latest"),
        ("runs/demo@best", "runs/demo", "best"),
        ("runs/demo@200", "runs/demo", 200),
        ("runs/demo@00000200", "runs/demo", 200),
        ("runs/me@home@latest", "runs/me@home", "latest"),
        ("/mnt/a b/demo@7", "/mnt/a b/demo", 7),
        ("runs/demo/checkpoints/step-00000200", "runs/demo", 200),
        ("runs/demo/checkpoints/step-00000200/", "runs/demo", 200),
        ("s3://bucket/runs/demo", "s3://bucket/runs/demo", "latest"),
        ("s3://bucket/runs/demo@best", "s3://bucket/runs/demo", "best"),
        ("abfs://container@account/runs/demo", "abfs://container@account/runs/demo", "latest"),
        ("abfs://container@account/runs/demo@5", "abfs://container@account/runs/demo", 5),
        (
            "s3://b/demo?endpoint_override=127.0.0.1:9000&scheme=http@40",
            "s3://b/demo?endpoint_override=127.0.0.1:9000&scheme=http",
            40,
        ),
        ("s3://b/demo/checkpoints/step-00000040?scheme=http", "s3://b/demo?scheme=http", 40),
    ],
)
def test_a_run_is_named_by_where_it_lies(text: str, location: str, which: Which) -> None:
    assert parse_reference(text) == RunReference(location=location, which=which)


@pytest.mark.parametrize(
    ("text", "run", "which"),
    [
        ("mlflow:demo/latest", "demo", "latest"),
        ("mlflow:demo/best", "demo", "best"),
        ("mlflow:demo/40", "demo", 40),
        ("mlflow:demo", "demo", "latest"),
        ("mlflow:a run with spaces/40", "a run with spaces", 40),
        (f"mlflow:{'0f' * 16}/40", "0f" * 16, 40),
    ],
)
def test_a_run_is_named_by_what_mlflow_calls_it(text: str, run: str, which: Which) -> None:
    assert parse_reference(text) == MlflowReference(run=run, which=which)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must name a checkpoint"),
        (" runs/demo", "without blanks around it"),
        ("runs/demo@final", "'final' is no step, latest or best"),
        ("runs/demo@-1", "'-1' is no step"),
        ("runs/demo@²", "'²' is no step"),
        ("runs/demo@", "'' is no step"),
        ("runs/me@home", "where 'home' is the end of a directory's name, add @latest"),
        ("@latest", "names no run before @latest"),
        ("mlflow:", "'' is no id or name"),
        ("mlflow:/latest", "'' is no id or name"),
        ("mlflow:demo/first", "'first' is no step, latest or best"),
        ("mlflow:demo/", "'' is no step"),
        ("mlflow:demo@40", "'demo@40' is no id or name"),
        ("mlflow://demo/40", "'//demo' is no id or name"),
        ("mlflow:a/b/40", "'a/b' is no id or name"),
    ],
)
def test_what_names_none_is_refused_with_the_way_out(text: str, said: str) -> None:
    with pytest.raises(ReferenceProblem) as caught:
        parse_reference(text)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"model.resume_from={text!r}: ")
    assert caught.value.rule in str(caught.value) and "mlflow:RUN/200" in caught.value.way_out


@given(st.text("abz019./-_:", min_size=1), st.one_of(st.integers(0, 10**9), st.sampled_from(["latest", "best"])))
def test_what_is_written_is_read_back(place: str, which: Which) -> None:
    run = RunReference(location=place, which=which)
    if not place.startswith("mlflow:"):
        assert parse_reference(str(run)) == run
    if "/" not in place:
        assert parse_reference(str(MlflowReference(run=place, which=which))) == MlflowReference(run=place, which=which)
