"""Valid and invalid forms of ``model.resume_from``."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ray_ulysses.config import parse_config
from ray_ulysses.config.reference_to_checkpoint import (
    MlflowReference,
    ReferenceProblem,
    RunReference,
    Which,
    parse_reference,
)
from ray_ulysses.errors import ConfigError
from tests.unit.config.trees import small_tree


@pytest.mark.parametrize(
    ("text", "run", "which"),
    [
        ("runs/demo", "runs/demo", "latest"),
        ("runs/demo@00000200", "runs/demo", 200),
        ("runs/me@home@best", "runs/me@home", "best"),
        ("runs/demo/checkpoints/step-00000200/", "runs/demo", 200),
        ("abfs://container@account/runs/demo@5", "abfs://container@account/runs/demo", 5),
        ("s3://b/demo?endpoint_override=127.0.0.1:9000@40", "s3://b/demo?endpoint_override=127.0.0.1:9000", 40),
        ("s3://b/demo/checkpoints/step-00000040?scheme=http", "s3://b/demo?scheme=http", 40),
        ("mlflow:demo", "demo", "latest"),
        ("mlflow:a run with spaces/40", "a run with spaces", 40),
    ],
)
def test_a_checkpoint_is_identified_by_location_or_through_mlflow(text: str, run: str, which: Which) -> None:
    is_mlflow = text.startswith("mlflow:")
    expected = MlflowReference(run=run, which=which) if is_mlflow else RunReference(location=run, which=which)
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", " runs/demo", "runs/demo@final", "runs/demo@-1", "runs/demo@²", "runs/demo@", "runs/me@home", "@latest"),
        *("mlflow:", "mlflow:/latest", "mlflow:demo/first", "mlflow:demo/", "mlflow:demo@40", "mlflow://demo/40"),
        "mlflow:a/b/40",
    ],
)
def test_an_invalid_reference_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(ReferenceProblem) as caught:
        parse_reference(text)
    assert str(caught.value).startswith(f"model.resume_from={text!r}: ")
    assert "mlflow:RUN/200" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://me:hunter2@bucket/runs@soon", "'soon' is not a step"),
        ("s3://me:hunter2@bucket/runs@latest", "credentials"),
        ("s3://me:hun/ter2@bucket/runs", "credentials"),
        ("s3://hunter2@bucket", "'bucket' is not a step"),
        ("s3:/me:hunter2@bucket/runs", "one slash"),
        ("s3://bucket/runs?secret_key=hunter2@40", "must not contain secret_key"),
        ("s3://bucket/runs?endpoint_override=me:hunter2@minio:9000@40", "credentials in endpoint_override"),
        ("ftp://me:hunter2@host/runs", "ftp:// is not a supported scheme"),
        ("s3://bucket/runs?endpoint_override=my host:9", "endpoint_override"),
    ],
)
def test_an_invalid_location_is_reported_for_the_setting_without_secrets(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(model__resume_from=text, cluster__workers=0))
    assert [problem.path for problem in caught.value.problems] == ["model.resume_from", "cluster.workers"]
    with pytest.raises(ReferenceProblem) as refused:
        parse_reference(text)
    for error in (caught.value, refused.value):
        assert "hunter2" not in str(error) and "ter2" not in str(error)
    assert said in str(caught.value)


@given(st.text("abz019./-_:", min_size=1), st.one_of(st.integers(0, 10**9), st.sampled_from(["latest", "best"])))
def test_a_reference_is_parsed_from_its_own_text(place: str, which: Which) -> None:
    run = RunReference(location=place, which=which)
    if not place.startswith("mlflow:"):
        assume(not place.partition(":")[2].startswith("/"))
        assert parse_reference(str(run)) == run
    if "/" not in place:
        assert parse_reference(f"mlflow:{place}/{which}") == MlflowReference(run=place, which=which)
