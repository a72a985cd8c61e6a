"""What is spooled survives its writer, comes out in order, and is gone once it was delivered."""

import errno
import json
import shutil
from types import SimpleNamespace

import pytest

from ray_ulysses.tracking.spool import Spool


def numbers(spool, limit=100):
    return [entry.event.get("n") for entry in spool.peek(limit)]


def test_events_come_out_in_order_and_stay_until_acknowledged(tmp_path):
    spool = Spool(tmp_path / "spool")
    for n in range(5):
        assert spool.append({"n": n})
    assert numbers(spool) == [0, 1, 2, 3, 4]
    entries = spool.peek(2)
    spool.acknowledge(entries[-1].end, {"m": 1})
    assert numbers(spool) == [2, 3, 4]
    assert not spool.is_empty
    spool.acknowledge(spool.peek(100)[-1].end, {"m": 4})
    assert spool.is_empty
    assert spool.peek(100) == ()


def test_a_folder_that_was_deleted_while_events_were_delivered_is_not_made_anew(tmp_path):
    spool = Spool(tmp_path / "run" / "tracking")
    spool.append({"n": 0})
    (entry,) = spool.peek(1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        spool.acknowledge(entry.end, {})
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_full_when_a_file_ends_costs_no_later_event(tmp_path, monkeypatch):
    spool = Spool(tmp_path, file_bytes=1)
    spool.append({"n": 0})

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ray_ulysses.tracking.spool.open", refuse, raising=False)
        with pytest.raises(OSError, match="no space left"):
            spool.append({"n": 1})
    full, closed = spool._out, []
    # What a full file could not flush is refused again when it is closed.
    spool._out = SimpleNamespace(tell=full.tell, close=lambda: closed.append(full.close()) or refuse())
    assert spool.append({"n": 2}) and spool.append({"n": 3})
    assert closed == [None]
    assert numbers(spool) == [0, 2, 3]


def test_a_state_that_can_not_be_written_delivers_again_only_in_the_next_process(tmp_path, monkeypatch):
    spool = Spool(tmp_path, file_bytes=1)
    spool.append({"n": 0})
    spool.append({"n": 1})

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ray_ulysses.tracking.spool.LocalStore.replace", refuse)
        with pytest.raises(OSError, match="no space left"):
            spool.acknowledge(spool.peek(2)[-1].end, {"m": 1})
    assert spool.is_empty and numbers(spool) == [] and spool.marks == {"m": 1}
    assert numbers(Spool(tmp_path)) == [0, 1]
    spool.append({"n": 2})
    spool.acknowledge(spool.peek(1)[-1].end, {"m": 2})
    assert numbers(Spool(tmp_path)) == [] and Spool(tmp_path).marks == {"m": 2}


def test_a_spool_is_closed_on_a_full_disk_too(tmp_path):
    spool = Spool(tmp_path)
    spool.append({"n": 0})

    def refuse():
        raise OSError(errno.ENOSPC, "no space left on device")

    spool._out = SimpleNamespace(tell=spool._out.tell, close=refuse)
    spool.close()
    assert numbers(Spool(tmp_path)) == [0]


def test_a_new_process_goes_on_after_what_was_delivered(tmp_path):
    dead = Spool(tmp_path)
    for n in range(4):
        dead.append({"n": n})
    dead.acknowledge(dead.peek(1)[-1].end, {"m": 7})
    spool = Spool(tmp_path)
    assert spool.marks == {"m": 7}
    spool.append({"n": 4})
    assert numbers(spool) == [1, 2, 3, 4]


def test_a_late_write_of_a_dead_process_touches_no_other_file(tmp_path):
    late = Spool(tmp_path)
    late.append({"n": 0})
    spool = Spool(tmp_path)
    spool.append({"n": 2})
    late.append({"n": 1})
    assert numbers(spool) == [0, 1, 2]


def test_a_torn_line_is_passed_over(tmp_path):
    dead = Spool(tmp_path)
    dead.append({"n": 0})
    (file,) = tmp_path.glob("*.jsonl")
    with file.open("a") as stream:
        stream.write('{"n": 1')
    spool = Spool(tmp_path)
    spool.append({"n": 2})
    assert numbers(spool) == [0, None, 2]
    spool.acknowledge(spool.peek(100)[-1].end, {})
    assert spool.is_empty


def test_a_line_that_is_being_written_is_waited_for(tmp_path):
    spool = Spool(tmp_path)
    spool.append({"n": 0})
    (file,) = tmp_path.glob("*.jsonl")
    with file.open("a") as stream:
        stream.write('{"n": 1')
        stream.flush()
        assert numbers(spool) == [0]
        stream.write("}\n")
    assert numbers(spool) == [0, 1]


def test_files_are_rolled_and_deleted_when_delivered(tmp_path):
    spool = Spool(tmp_path, file_bytes=30)
    for n in range(20):
        spool.append({"n": n})
    assert len(list(tmp_path.glob("*.jsonl"))) > 3
    assert numbers(spool) == list(range(20))
    assert numbers(spool, 7) == list(range(7))
    spool.acknowledge(spool.peek(20)[-1].end, {})
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_a_full_spool_refuses_and_takes_again_after_delivery(tmp_path):
    spool = Spool(tmp_path, max_bytes=40)
    taken = [spool.append({"n": n}) for n in range(10)]
    assert taken == [True] * 5 + [False] * 5
    spool.acknowledge(spool.peek(100)[-1].end, {})
    assert spool.append({"n": 10})
    assert numbers(spool) == [10]


def test_a_damaged_state_delivers_again(tmp_path):
    dead = Spool(tmp_path)
    dead.append({"n": 0})
    dead.acknowledge(dead.peek(1)[-1].end, {"m": 1})
    (tmp_path / "state.json").write_text("{")
    spool = Spool(tmp_path)
    assert spool.marks == {}
    assert numbers(spool) == [0]


def test_the_state_on_disk_is_json(tmp_path):
    spool = Spool(tmp_path)
    spool.append({"n": 0})
    spool.acknowledge(spool.peek(1)[-1].end, {"metric:loss": 3})
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["marks"] == {"metric:loss": 3}


def test_a_file_that_goes_while_one_counts_counts_nothing(tmp_path, monkeypatch):
    """The thread that gave up closes the spool, whose last file is empty, while `catch_up` counts what is left."""
    earlier = Spool(tmp_path)
    earlier.append({"n": 0})
    spool = Spool(tmp_path)
    listed = spool._numbers()
    spool.close()
    monkeypatch.setattr(spool, "_numbers", lambda: listed)
    assert listed == [1, 2] and not (tmp_path / "00000002.jsonl").exists()
    assert spool.num_waiting() == 1


def test_a_file_that_its_writer_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    """The writer before may still be ending when the next one begins."""
    dead = Spool(tmp_path)
    dead.append({"n": 1})
    listed = Spool._numbers
    monkeypatch.setattr(Spool, "_numbers", lambda self: [*listed(self), 99])
    spool = Spool(tmp_path)
    assert not spool.is_empty
    spool.acknowledge(spool.peek(100)[-1].end, {})
    assert spool.is_empty
