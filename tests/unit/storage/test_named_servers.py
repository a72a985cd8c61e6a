"""A location that a run's files give is refused where only they name its server."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytest

from ray_ulysses.storage.place import UnnamedServerError, place_of, refuse_server
from tests.unit.foreign_servers import stores

MINIO = "s3://bucket/runs?endpoint_override=minio:9000&scheme=http"
AZURE = "abfs://container@account/runs"


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)


@pytest.mark.parametrize("location", [*stores("127.0.0.1:9"), MINIO, AZURE, "az://container?account_name=account"])
def test_every_form_of_a_server_is_refused_unless_the_user_names_it(location: str) -> None:
    for named in ((), ("/runs", "s3://other"), ("s3://bucket?endpoint_override=another:9000&scheme=http",)):
        with pytest.raises(UnnamedServerError, match=r"here=.*--trust-run"):
            refuse_server(location, "here", named)
    refuse_server(location, "here", ("/runs", place_of(location)))


def test_a_path_and_a_bucket_of_the_cloud_itself_are_not_refused() -> None:
    for location in ("/runs", "relative", "file:///runs", "s3://bucket/runs?region=eu-west-1", "gs://a"):
        refuse_server(location, "here", ())


@pytest.mark.parametrize(
    ("environment", "location", "is_named"),
    [
        ({"AWS_ENDPOINT_URL": "http://minio:9000/"}, MINIO, True),
        ({"AWS_ENDPOINT_URL_S3": "http://MINIO:9000"}, MINIO, True),
        # Otherwise a run could have the credentials sent without encryption.
        ({"AWS_ENDPOINT_URL": "https://minio:9000"}, MINIO, False),
        ({"AWS_ENDPOINT_URL": "http://minio"}, MINIO, False),
        ({"AWS_ENDPOINT_URL": "http://minio:9000.example"}, MINIO, False),
        ({"STORAGE_EMULATOR_HOST": "minio:9000"}, MINIO, False),
        ({"AWS_ENDPOINT_URL": "https://minio"}, "s3://bucket?endpoint_override=minio:443", True),
        ({"STORAGE_EMULATOR_HOST": "localhost:4443"}, "gs://a?endpoint_override=localhost:4443&scheme=http", True),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "account"}, AZURE, True),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "another"}, AZURE, False),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "account"}, f"{AZURE}?blob_storage_authority=.evil.example", False),
    ],
)
def test_the_environment_names_servers_by_scheme_host_and_port(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], location: str, is_named: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with nullcontext() if is_named else pytest.raises(UnnamedServerError):
        refuse_server(location, "here", ())


def test_the_way_out_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for location, variable in (
        (MINIO, "AWS_ENDPOINT_URL_S3=http://minio:9000"),
        (AZURE, "AZURE_STORAGE_ACCOUNT_NAME=account"),
    ):
        with pytest.raises(UnnamedServerError, match=f"; set {variable}, or do that$"):
            refuse_server(location, "here", (), "do that")
        monkeypatch.setenv(*variable.split("="))
        refuse_server(location, "here", ())
