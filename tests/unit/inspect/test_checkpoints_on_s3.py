"""What ``inspect`` says of checkpoints that lie on an object store, apart from the run's directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.storage.place import open_store, place_of
from tests.s3_server import S3Server, serve_s3
from tests.unit.inspect.saved import make_folder, save


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


def test_they_are_listed_and_verified_where_they_lie(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)

    def inspect(*options: object) -> tuple[int, str]:
        code = run_command(app, ["inspect", str(tmp_path / "demo"), *map(str, options)])
        return code, capsys.readouterr().out

    uri = server.uri("inspected")
    make_folder(tmp_path / "demo", checkpoint__storage=uri)
    place = str(place_of(uri) / "demo")
    store = open_store(place)
    for step in (10, 20):
        save(store, step)
    shard = "checkpoints/step-00000020/attempt-0001/rank-00001-of-00002.safetensors"
    content = bytearray(store.read_whole(shard))
    content[len(content) // 2] ^= 1
    store.replace(shard, [content])

    code, out = inspect("--checkpoints", "--json")
    fields = json.loads(out)
    assert (code, fields["location"], fields["resumes_from"]) == (0, place, 20)
    assert [(one["step"], one["condition"], one["world_size"]) for one in fields["checkpoints"]] == [
        (10, "whole", 2),
        (20, "whole", 2),
    ]
    assert inspect("--verify-checkpoint", 10)[0] == 0
    code, out = inspect("--verify-checkpoint", 20)
    assert code == 1
    assert "rank-00001-of-00002.safetensors: the checksum of fp32/weight is wrong (bytes " in out
    code, out = inspect("--json")
    assert [one["step"] for one in json.loads(out)["checkpoints"]] == [10, 20]
