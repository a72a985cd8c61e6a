"""Tests of the hub: what is missing is said at once, in our words; what is there is fetched."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

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


def test_a_missing_path_is_refused_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub({}) as (address, requests):
        use_hub(address, tmp_path, monkeypatch)
        for path in ("/mnt/models/none", "./none", "models/of/none"):
            with pytest.raises(UserError, match="no such directory"):
                stored_config(path)
        assert requests == []


@pytest.mark.parametrize("load", [stored_config, load_tokenizer], ids=["model", "tokenizer"])
@pytest.mark.parametrize("is_away", [True, False], ids=["away", "unknown-there"])
def test_an_id_that_the_hub_does_not_give_is_refused_at_once(
    load: Any, is_away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_hub({}) as (address, requests):
        use_hub(AWAY if is_away else address, tmp_path, monkeypatch)
        with pytest.raises(UserError, match="does not respond" if is_away else "has no model with this id"):
            load("models/mistyped")
    assert len(requests) == (0 if is_away else 1) and not caplog.records


def test_a_cached_model_is_read(
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


def test_a_hub_tokenizer_has_its_id_and_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = byte_tokenizer_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with serve_hub({"owner/name": {**files, "model.safetensors": b"0"}}) as (address, requests):
        use_hub(address, tmp_path / "cache", monkeypatch)
        found = load_tokenizer("owner/name").info
        assert not any("safetensors" in request for request in requests)
    assert (found.name, found.fingerprint) == ("owner/name", load_tokenizer(tmp_path).info.fingerprint)


def test_a_silent_hub_is_asked_once_and_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_ulysses.storage.hub._ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        use_hub(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
        for _ in range(3):
            assert "does not respond" in str(hub_refusal("owner/name"))
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_busy_hub_is_left_to_the_retries_of_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, is_refused in ((503, False), (400, True)):
        with serve_hub({"owner/name": {}}, status=status) as (address, _):
            use_hub(address, tmp_path, monkeypatch)
            assert (hub_refusal("owner/name") is not None) == is_refused
