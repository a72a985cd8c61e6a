"""Locations: what opens which store, what is refused with a way out, and that no secret is repeated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from pydantic import ValidationError

from ray_ulysses.config.loading import problems_of
from ray_ulysses.config.running import CheckpointSection
from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocationError, open_store, parse_location
from ray_ulysses.storage.object_client import connect
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import UnnamedServerError, place_of, refuse_server
from tests.unit.foreign_servers import stores

_BOTH = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:2"}
_ENDPOINT = "endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("runs/demo", "runs/demo"),
        (Path("/mnt/runs"), "/mnt/runs"),
        ("file:///mnt/my%20runs", "/mnt/my runs"),
        ("file://localhost/mnt/runs", "/mnt/runs"),
        ("C:colon", "C:colon"),
        ("s3://bucket/", ("s3", "bucket", "", None)),
        ("S3://bucket/a/b/", ("s3", "bucket", "a/b", None)),
        ("s3a://bucket/a%20b", ("s3", "bucket", "a b", None)),
        ("gcs://bucket/a", ("gs", "bucket", "a", None)),
        ("abfs://container@account.dfs.core.windows.net/a", ("az", "container", "a", "account")),
        ("az://container/a?account_name=me", ("az", "container", "a", None)),
    ],
)
def test_a_path_is_a_path_and_a_uri_is_taken_apart(location: str | Path, expected: object) -> None:
    found = parse_location(location)
    if isinstance(expected, str):
        assert found == Path(expected) and open_store(location).root == Path(expected).absolute()
    else:
        assert (found.provider, found.bucket, found.prefix, found.account) == expected
        assert parse_location(str(found)) == found


def test_a_location_is_joined_before_its_options() -> None:
    assert str(place_of("file:///mnt/runs") / "demo") == "/mnt/runs/demo"
    joined = str(place_of(f"s3://bucket/a?{_ENDPOINT}") / "demo/x")
    assert joined == "s3://bucket/a/demo/x?endpoint_override=127.0.0.1%3A9000&scheme=http&region=us-east-1"
    assert str(place_of("abfs://c@account.dfs.core.windows.net/a") / "demo") == "abfs://c@account/a/demo"


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("", "is empty"),
        ("http://host/runs", "http:// is not a supported scheme"),
        ("s3:/bucket/runs", "one slash"),
        (Path("s3://bucket/runs"), "as a string"),
        ("s3:///runs", "contains no bucket"),
        ("s3://bucket/a/../b", "folder"),
        ("s3://bucket/a#b", "'#'"),
        ("s3://bucket/a?colour=red", "'colour'"),
        ("s3://bucket/a?scheme=ftp", "scheme"),
        ("s3://bucket/a?region=us-east-1%0A", "region"),
        ("s3://bucket/a?region=a&region=b", "twice"),
        ("gs://bucket/a?region=a", "'region'"),
        ("file://host/runs", "'host'"),
        ("file:///runs?a=b", "file URI"),
        ("s3://b%20ucket/a", "bucket"),
        ("abfs://container@my account/a", "account"),
        ("az://container/a?account_name=a%20b", "account_name"),
        ("s3://bucket/a?endpoint_override=[::1]:9000&force_virtual_addressing=true", "address"),
        # Credentials travel in clear text only if the URI sets scheme=http.
        ("s3://bucket/a?endpoint_override=http://minio:9000", "clear text"),
        ("s3://bucket/a?endpoint_override=http://minio&scheme=https", "clear text"),
    ],
)
def test_anything_else_is_refused_with_a_hint(location: str | Path, text: str) -> None:
    with pytest.raises(LocationError) as refused:
        open_store(location)
    assert text in str(refused.value) and refused.value.rule in str(refused.value)
    assert refused.value.hint in str(refused.value)


def test_a_host_that_is_none_is_refused_before_the_library_panics() -> None:
    wrong = "my host:9,127.0.0.1:99999,127.0.0.1:x,http://,ftp://minio:9,256.1.1.1,a..b,[::g]:9,minio:9/a b,:9"
    for host in wrong.split(","):
        for location in (
            f"s3://bucket/a?endpoint_override={host}",
            f"gs://bucket/a?scheme=http&endpoint_override={host}",
            f"az://container/a?account_name=me&blob_storage_authority={host}",
        ):
            with pytest.raises(LocationError, match="is not a host"):
                parse_location(location)


def test_a_host_may_be_a_name_or_an_address_and_plain_http_if_explicit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    named = "minio,minio:9000,127.0.0.1:9000,[::1]:9000,http://[::1]:9000,https://s3.a-b.org/,a_b:1"
    plain = "http://minio:9000&scheme=http,minio&scheme=http,http://localhost:1,http://127.0.0.1:9000"
    for host in (*named.split(","), *plain.split(",")):
        assert isinstance(open_store(f"s3://bucket/a?endpoint_override={host}&region=us-east-1"), ObjectStore), host


def test_an_endpoint_of_the_environment_without_encryption_needs_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    with pytest.raises(UserError, match=r"AWS_ENDPOINT_URL=http://minio:9000 .*AWS_ALLOW_HTTP"):
        open_store("s3://bucket/a")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert _config("s3://bucket/a")[0]["endpoint"] == "http://minio:9000"


@pytest.mark.parametrize(
    "location",
    [
        "s3://me:hunter2@bucket/runs",
        "s3://bucket/runs?access_key=me&secret_key=hunter2",
        "az://container/runs?account_key_base64=hunter2",
        "gs://bucket/runs?credential_json=hunter2",
        "abfs://container@account/runs?sig=hunter2",
        "s3://me:hun/ter2/hunter2@bucket/runs",
        "s3://me:hun@hunter2@bucket/runs",
        "s3://bucket/runs?endpoint_override=http://me:hunter2@minio:9000",
        "az://container/runs?blob_storage_authority=hunter2@.blob.local",
    ],
)
def test_a_secret_is_refused_and_not_repeated(location: str) -> None:
    with pytest.raises(LocationError, match=r"must not contain .* set [A-Z]+_") as refused:
        open_store(location)
    assert "hunter2" not in str(refused.value)


def test_a_secret_is_not_repeated_where_something_else_is_wrong() -> None:
    unknown = (f"s3://bucket/runs?{name}=hunter2" for name in ("SharedAccessSignature", "session_tokens", "colour"))
    wrong = ("ftp://me:hunter2@host/a", "file://me:hunter2@host/a", "s3:///me:hunter2@bucket/runs")
    for location in (*unknown, *wrong, Path("s3://me:hunter2@bucket/a")):
        with pytest.raises(LocationError) as refused:
            open_store(location)
        assert "hunter2" not in str(refused.value)
    with pytest.raises(ValidationError) as invalid:
        CheckpointSection(storage="s3://me:hunter2@bucket/runs")
    (problem,) = problems_of(invalid.value)
    assert str(problem).startswith("storage='s3://***@bucket/runs': ")


def _config(location: str) -> tuple[dict[str, object], dict[str, object]]:
    client = connect(parse_location(location))
    return dict(client.config), dict(client.client_options or {})


@pytest.mark.parametrize(
    ("location", "variables", "endpoint", "region"),
    [
        (f"s3://bucket/a?{_ENDPOINT}", {}, "http://127.0.0.1:9000", "us-east-1"),
        ("s3://bucket/a", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "http://127.0.0.1:1", "eu-west-3"),
        # The variable for S3 alone comes before the general one, and the URI before both.
        ("s3://bucket/a", _BOTH, "http://127.0.0.1:2", "eu-west-3"),
        ("s3://bucket/a?endpoint_override=127.0.0.1:3&region=us-east-2", _BOTH, "https://127.0.0.1:3", "us-east-2"),
        # Plain HTTP is only spoken where it was written out.
        ("s3://bucket/a?region=us-east-1", {}, None, "us-east-1"),
    ],
    ids=["URI", "variable", "for S3", "URI first", "none"],
)
def test_the_uri_and_the_environment_name_endpoint_and_region(
    monkeypatch: pytest.MonkeyPatch, location: str, variables: dict[str, str], endpoint: str | None, region: str
) -> None:
    for name, value in {**variables, "AWS_REGION": "eu-west-3"}.items():
        monkeypatch.setenv(name, value)
    config, options = _config(location)
    assert (config.get("endpoint"), config["region"]) == (endpoint, region)
    assert (str(options["allow_http"]).lower() == "true") == (endpoint or "").startswith("http:")


def test_azure_and_google_open(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = ("127.0.0.1:10000&enable_tls=false", "http://127.0.0.1:10000/devstore")
    for authority, endpoint in (emulator, (".blob.local", "https://devstore.blob.local")):
        azure, _ = _config(f"abfs://container@devstore/a?blob_storage_authority={authority}")
        assert (azure["account_name"], azure["endpoint"]) == ("devstore", endpoint)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:4443")
    google, _ = _config("gs://bucket/a")
    assert '"gcs_base_url": "http://127.0.0.1:4443"' in google["service_account_key"]
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    google, _ = _config("gs://bucket/a?endpoint_override=127.0.0.1:4443&scheme=http")
    assert google["base_url"] == "http://127.0.0.1:4443"
    for location in ("abfs://container@devstore/a", "gs://bucket/a"):
        assert isinstance(open_store(location), ObjectStore)
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such.pem")
    for location, reason in (("az://container/a", "[Aa]ccount"), ("s3://bucket", "No such file")):
        with pytest.raises(UserError, match=reason):
            open_store(location)


MINIO = "s3://bucket/runs?endpoint_override=minio:9000&scheme=http"
AZURE = "abfs://container@account/runs"


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
        ({"AWS_ENDPOINT_URL": "https://minio:9000"}, MINIO, False),
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
    ways_out = {MINIO: "AWS_ENDPOINT_URL_S3=http://minio:9000", AZURE: "AZURE_STORAGE_ACCOUNT_NAME=account"}
    for location, variable in ways_out.items():
        with pytest.raises(UnnamedServerError, match=f"; set {variable}, or do that$"):
            refuse_server(location, "here", (), "do that")
        monkeypatch.setenv(*variable.split("="))
        refuse_server(location, "here", ())
