"""Tests of the hub: what is missing is said at once, in our words; what is there is fetched."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path

import pytest

from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from ray_ulysses.engine.model_config import stored_config
from ray_ulysses.errors import UserError
from ray_ulysses.export.tokenizer_files import byte_tokenizer_files
from ray_ulysses.storage.hub import hub_refusal
from tests.hub_server import AWAY, refuse_waits, serve_hub, use_hub
from tests.unit.config.trees import small_tree

INLINE = small_tree()["model"]["config"]


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_waits(monkeypatch)


@pytest.mark.parametrize("path", ["/mnt/models/none", "./none", "models/of/none"])
def test_a_path_that_does_not_exist_is_refused_without_a_request(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub({}) as (address, requests):
        use_hub(address, tmp_path, monkeypatch)
        with pytest.raises(UserError, match="no such directory"):
            stored_config(path)
        assert requests == []


@pytest.mark.parametrize("load", [stored_config, load_tokenizer], ids=["model", "tokenizer"])
@pytest.mark.parametrize("is_away", [True, False], ids=["away", "unknown-there"])
def test_an_id_that_the_hub_does_not_give_is_refused_at_once(
    load: object, is_away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(load)
    with serve_hub({}) as (address, requests):
        use_hub(AWAY if is_away else address, tmp_path, monkeypatch)
        with caplog.at_level(logging.WARNING), pytest.raises(UserError) as refused:
            load("models/mistyped")
    assert ("does not answer" if is_away else "has no model with this id") in str(refused.value)
    assert len(requests) == (0 if is_away else 1) and not caplog.records


def test_a_model_of_the_hub_is_read_and_then_found_in_its_cache_while_the_hub_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps(INLINE).encode()
    with serve_hub({"owner/name": {"config.json": config, "model.safetensors": b"0" * 64}}) as (address, requests):
        use_hub(address, tmp_path, monkeypatch)
        assert stored_config("owner/name").model_type == INLINE["model_type"]
        assert not any("safetensors" in request for request in requests)
    assert capfd.readouterr().err == "", "no progress bar"
    use_hub(AWAY, tmp_path, monkeypatch)
    assert stored_config("owner/name").name_or_path == "owner/name"


def test_a_tokenizer_of_the_hub_is_named_by_its_id_and_has_the_fingerprint_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = byte_tokenizer_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with serve_hub({"owner/name": {**files, "model.safetensors": b"0"}}) as (address, requests):
        use_hub(address, tmp_path / "cache", monkeypatch)
        found = load_tokenizer("owner/name").info
        assert not any("safetensors" in request for request in requests)
    assert found.name == "owner/name"
    assert found.fingerprint == load_tokenizer(tmp_path).info.fingerprint


def test_a_hub_that_takes_requests_without_an_answer_is_asked_once_and_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_ulysses.storage.hub._ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        use_hub(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
        for _ in range(3):
            assert "does not answer" in str(hub_refusal("owner/name"))
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.mark.parametrize(("status", "is_refused"), [(503, False), (400, True)])
def test_a_hub_that_is_busy_for_a_moment_is_left_to_the_retries_of_its_library(
    status: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub({"owner/name": {}}, status=status) as (address, _):
        use_hub(address, tmp_path, monkeypatch)
        assert (hub_refusal("owner/name") is not None) == is_refused
