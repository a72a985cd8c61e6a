from __future__ import annotations

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


class _Drawn:
    """Counts how often the page is drawn, and fails on demand."""

    def __init__(self) -> None:
        self.count, self.is_away = 0, False

    def __call__(self, run_dir: Path, beside: Path | None = None, *, refresh_s: int | None = None) -> str:
        if self.is_away:
            raise OSError("the storage is away")
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


def test_a_storage_that_is_away_fails_one_request_only(url: str, drawn: _Drawn) -> None:
    drawn.is_away = True
    with pytest.raises(urllib.error.HTTPError, match="503"):
        _get(f"{url}/")
    drawn.is_away = False
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
