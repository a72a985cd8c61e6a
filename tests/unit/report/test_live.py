from __future__ import annotations

import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.errors import UserError
from ray_ulysses.report.live import LiveReport, open_server
from ray_ulysses.storage import run_hold


class _Drawn:
    """Counts how often the page is drawn, and fails on demand."""

    def __init__(self) -> None:
        self.count = 0
        self.failure: Exception | None = None

    def __call__(self, run_dir: Path, beside: Path | None = None, *, refresh_s: int | None = None) -> str:
        if self.failure is not None:
            raise self.failure
        self.count += 1
        return f"page {self.count}, again after {refresh_s} s"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    file = tmp_path / "run" / "journal" / "attempt-0001.jsonl"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"{}\n")
    return file


@pytest.fixture
def drawn() -> _Drawn:
    return _Drawn()


@pytest.fixture
def url(journal: Path, drawn: _Drawn) -> Iterator[str]:
    with open_server(LiveReport(journal.parents[1], render=drawn), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_the_page_is_drawn_again_only_when_the_journal_has_grown(url: str, journal: Path) -> None:
    assert [_get(f"{url}/") for _ in range(2)] == ["page 1, again after 15 s"] * 2
    with journal.open("ab") as stream:
        stream.write(b"{}\n")
    assert [_get(f"{url}/") for _ in range(2)] == ["page 2, again after 15 s"] * 2
    journal.with_name("attempt-0002.jsonl").write_bytes(b"")
    assert _get(f"{url}/").startswith("page 3")


def test_the_page_of_a_run_whose_command_ended_without_a_word_is_drawn_again(url: str, journal: Path) -> None:
    with run_hold(journal.parents[1]):
        assert [_get(f"{url}/")[:6] for _ in range(2)] == ["page 1", "page 1"]
    assert [_get(f"{url}/")[:6] for _ in range(2)] == ["page 2", "page 2"]


def test_a_browser_that_goes_away_is_not_worth_a_word(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_asked, is_gone = threading.Event(), threading.Event()

    def render(*_: object, **__: object) -> str:
        is_asked.set()
        is_gone.wait(30)
        return "page" * 1000

    with open_server(LiveReport(journal.parents[1], render=render), "127.0.0.1", 0) as server:
        # So that the request has ended when the server has.
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        with socket.create_connection(("127.0.0.1", server.server_address[1])) as browser:
            # It is closed without waiting for anything.
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            browser.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert is_asked.wait(30)
        is_gone.set()
        server.shutdown()
        thread.join()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("failure", [OSError("the storage is away"), UserError("give the bucket's region")])
def test_a_storage_that_is_away_fails_one_request_only(url: str, drawn: _Drawn, failure: Exception) -> None:
    drawn.failure = failure
    with pytest.raises(urllib.error.HTTPError, match="503"):
        _get(f"{url}/")
    drawn.failure = None
    assert _get(f"{url}/").startswith("page 1")


def test_no_file_of_the_run_is_served(url: str) -> None:
    for path in ("/config.yaml", "/journal/attempt-0001.jsonl", "/../config.yaml"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            _get(f"{url}{path}")


def test_a_name_of_another_site_that_means_this_machine_reads_nothing(url: str) -> None:
    for name in ("evil.example:80", "evil.example"):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(url, headers={"Host": name}), timeout=10)
    for name in (url.rpartition("/")[2], f"localhost:{url.rpartition(':')[2]}"):
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": name}), timeout=10) as answer:
            assert answer.status == 200


def test_an_address_in_use_is_refused(url: str, journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = int(url.rpartition(":")[2])
    with pytest.raises(
        UserError, match=rf"--host='127.0.0.1' --port={port}: can't be listened on .*give another --port"
    ):
        open_server(LiveReport(journal.parents[1]), "127.0.0.1", port)
    assert run_command(app, ["report", str(journal.parents[1]), "--watch", "--out", "r.html"]) == 2
    assert "--watch writes no file" in capsys.readouterr().err
