"""Credentials in a configuration are refused, never shown, and the error says where they belong."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.config.loading import parse_config
from ray_ulysses.errors import ConfigError, without_secret
from tests.unit.config.trees import small_tree

AWS, MLFLOW = "set AWS_ACCESS_KEY_ID", "set MLFLOW_TRACKING_USERNAME"


@pytest.mark.parametrize(
    ("path", "value", "shown", "hint"),
    [
        ("tracking.uri", "http://me:hunter2@mlflow:5000", "http://***@mlflow:5000", MLFLOW),
        ("tracking.uri", "https://hunter2@mlflow", "https://***@mlflow", MLFLOW),
        ("tracking.uri", "https://me:hun/ter2@hunter2@mlflow", "https://***@mlflow", MLFLOW),
        ("tracking.uri", "https://mlflow?api_key=hunter2", "https://mlflow?api_key=***", MLFLOW),
        ("tracking.uri", "postgresql://me:hunter2@db/mlflow", "postgresql://***@db/mlflow", "PGPASSWORD"),
        ("tracking.uri", "mysql://me:hunter2@db/mlflow", "mysql://***@db/mlflow", "an MLflow server in front of"),
        ("checkpoint.storage", "s3://me:hunter2@bucket/runs", "s3://***@bucket/runs", AWS),
        ("model.resume_from", "s3://me:hunter2@bucket/runs@latest", "s3://***@", AWS),
        ("data.path", "s3://me:hunter2@bucket/corpus", "s3://***@bucket/corpus", AWS),
        ("cluster.address", "ray://me:hunter2@host:10001", "ray://***@host:10001", "leave them out"),
        ("tracking.tags.code", "at https://me:hunter2@host/a.git", "at https://***@host/a.git", "leave them out"),
        ("trakcing.uri", "http://me:hunter2@mlflow", "http://***@mlflow", "did you mean 'tracking'?"),
    ],
)
def test_credentials_are_refused_and_not_shown(path: str, value: str, shown: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(), [f"{path}={value}"])
    text = str(caught.value)
    assert len(caught.value.problems) == 1
    assert "ter2" not in text and path.partition(".")[0] in text and shown in text and hint in text


def test_credentials_in_a_list_are_reported_with_other_problems() -> None:
    sources: list[Any] = [{"path": "a"}, {"path": "gs://me:hunter2@bucket/b"}]
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(data__path=None, data__sources=sources, cluster__workers=0))
    assert [problem.path for problem in caught.value.problems] == ["cluster.workers", "data.sources.1.path"]


@pytest.mark.parametrize(
    "text",
    [
        *("http://mlflow:5000/a@b", "http://[::1]:5000/x", "postgresql://me@db/mlflow"),
        *("sqlite:////home/me@corp/mlflow.db", "s3://bucket/runs@latest", "abfs://container@account/runs"),
        *("s3://bucket/runs?endpoint_override=127.0.0.1:9000@40", "https://host/?tokens=5&design=key"),
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert without_secret(text) == text
    parse_config(small_tree(tracking__tags={"place": text}))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://host/db?sslkey=hunter2&sslmode=x", "postgresql://host/db?sslkey=***&sslmode=x"),
        ("at https://me:hunter2@host/a.git, or http://hunter2@b", "at https://***@host/a.git, or http://***@b"),
        ("s3://hunter2@bucket/runs", "s3://***@bucket/runs"),
        ("S3://me:hun/ter2@hunter2@bucket/runs", "S3://***@bucket/runs"),
        ("abfs://container:hunter2@account/runs?sig=hunter2", "abfs://***@account/runs?sig=***"),
        ("s3://b/r?endpoint_override=me:1234@minio:9000&SessionToken=hunter2", "s3://b/r?endpoint_override=***@minio:9000&SessionToken=***"),
    ],
)  # fmt: skip
def test_a_secret_is_replaced_in_a_uri_and_in_a_sentence(text: str, shown: str) -> None:
    assert without_secret(text) == shown


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("run.storage", "${SCRATCH}/runs", "${SCRATCH}"),
        ("run.storage", "/mnt/$USER", "$USER"),
        ("run.storage", "/mnt/${oc.env:USER,me}/runs", "${oc.env:USER,me}"),
        ("data.path", "s3://bucket/${USER:-me}/corpus", "${USER:-me}"),
    ],
)
def test_an_environment_variable_is_refused_with_its_setting(path: str, value: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(small_tree(), [f"{path}={value}"])
    (problem,) = [one for one in caught.value.problems if "expanded" in one.rule]
    assert (problem.path, problem.value) == (path, value)
    assert name in problem.rule


# `$web` is Azure's container for a static web site.
@pytest.mark.parametrize("path", ["/mnt/a$b/$1/c$", "az://$web/corpus"])
def test_a_dollar_sign_without_a_variable_name_is_allowed(path: str) -> None:
    assert parse_config(small_tree(data__path=path)).data.path == path
