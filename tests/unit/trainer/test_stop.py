from __future__ import annotations

from pathlib import Path

from ray_ulysses.trainer.stop import STOP_FILE, clear_stop, request_stop, stop_requested


def test_a_request_stops_the_session_that_it_is_meant_for(tmp_path: Path) -> None:
    assert not stop_requested(tmp_path, "now")
    request_stop(tmp_path, "now")
    assert stop_requested(tmp_path, "now")


def test_a_request_left_over_from_an_earlier_session_stops_nothing(tmp_path: Path) -> None:
    request_stop(tmp_path, "earlier")
    assert not stop_requested(tmp_path, "now")
    assert not stop_requested(tmp_path, "")


def test_a_request_that_was_cleared_is_gone_and_clearing_again_is_no_error(tmp_path: Path) -> None:
    request_stop(tmp_path, "now")
    clear_stop(tmp_path)
    clear_stop(tmp_path)
    assert not stop_requested(tmp_path, "now")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_read_asks_for_nothing(tmp_path: Path) -> None:
    assert not stop_requested(tmp_path / "missing", "now")
    (tmp_path / STOP_FILE).mkdir()
    assert not stop_requested(tmp_path, "now")
