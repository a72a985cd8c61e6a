"""TensorBoard and W&B as trackers; the tests parse the files that these trackers write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from ray_ulysses.run_names import TENSORBOARD_FOLDER
from ray_ulysses.tracking.tensorboard_sink import TensorBoardSink
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, SampleText, StepMetrics
from ray_ulysses.tracking.wandb_sink import WandbSink
from tests.polling import wait_until
from tests.unit.tracking.checkpoints import committed
from tests.unit.tracking.tails import ScriptedTracker
from tests.wandb_server import serve_wandb


def tensorboard(run_dir: Path, **options: Any) -> ScriptedTracker:
    sink = TensorBoardSink(run_dir / TENSORBOARD_FOLDER)
    return ScriptedTracker(sink, run_dir, "tensorboard", retry_s=(0.05, 0.1), **options)


def events_of(run_dir: Path) -> Iterator[Event]:
    """Read event files as TensorBoard does: a length, its checksum, the event, its checksum."""
    for path in sorted((run_dir / TENSORBOARD_FOLDER).iterdir(), key=lambda one: one.stat().st_mtime_ns):
        content, place = path.read_bytes(), 0
        while place < len(content):
            size = int.from_bytes(content[place : place + 8], "little")
            record = content[place + 12 : place + 12 + size]
            assert int.from_bytes(content[place + 12 + size : place + 16 + size], "little") == masked_crc32c(record)
            yield Event.FromString(record)
            place += 16 + size


def values(run_dir: Path) -> list[tuple[int, Any]]:
    return [(event.step, value) for event in events_of(run_dir) for value in event.summary.value]


def points(run_dir: Path, name: str) -> list[tuple[int, float]]:
    return [(step, value.simple_value) for step, value in values(run_dir) if value.tag == name]


def texts(run_dir: Path) -> dict[str, str]:
    found = [(value.tag.removesuffix("/text_summary"), value.tensor.string_val) for _, value in values(run_dir)]
    return {tag: text[0].decode() for tag, text in found if text}


def train(tracker: ScriptedTracker, steps: range, attempt: int = 1) -> None:
    files = {"README.md": "# Run", "plan.txt": "a | b"}
    tracker.start({"optimizer.lr": 0.5}, {"attempt": attempt, "sp_size": 2}, files)
    for step in steps:
        tracker.log_step(step, {"train/loss": 1.0 / step, "train/tokens_per_s": 10.0 * step})
        if step % 2 == 0:
            tracker.log_step(step, {"eval/loss": 2.0 / step})
            tracker.log(committed(step))
            tracker.log(SampleText(time=1.0, step=step, text=f"> Once\n\nupon {step}"))


def train_twice(make: Callable[[Path], ScriptedTracker], run_dir: Path) -> None:
    """Track two attempts; step 5 is lost with the first and trained again."""
    one, again = make(run_dir), make(run_dir)
    train(one, range(1, 6))
    one.finish("failed", 5, {"time/goodput": 0.5})
    train(again, range(5, 9), attempt=2)
    again.finish("finished", 8, {"time/goodput": 0.75})


def test_tensorboard_shows_every_step_once_over_all_attempts(tmp_path: Path) -> None:
    train_twice(tensorboard, tmp_path)
    assert points(tmp_path, "train/loss") == [(step, pytest.approx(1.0 / step)) for step in range(1, 9)]
    assert points(tmp_path, "eval/loss") == [(step, pytest.approx(2.0 / step)) for step in (2, 4, 6, 8)]
    assert points(tmp_path, "time/goodput") == [(5, 0.5), (8, 0.75)]
    shown = texts(tmp_path)
    assert "| optimizer.lr | 0.5 |" in shown["settings"] and "| attempt | 2 |" in shown["attempt"]
    assert shown["README.md"] == "# Run" and shown["plan.txt"] == "```\na | b\n```"
    assert shown["samples"] == "> Once\n\nupon 8"
    assert "| step | 8 |" in shown["checkpoints"] and "| state | finished |" in shown["state"]
    assert len(list((tmp_path / TENSORBOARD_FOLDER).iterdir())) == 2
    losses = [value for _, value in values(tmp_path) if value.tag == "train/loss"]
    assert any("nats: mean over a step" in value.metadata.summary_description for value in losses)
    # TensorBoard's readers select curves by the plugin.
    assert {value.metadata.plugin_data.plugin_name for value in losses} == {"scalars"}
    first = next(event.wall_time for event in events_of(tmp_path) if event.summary.value)
    assert abs(first - os.stat(tmp_path).st_ctime) < 60


def test_a_full_disk_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboardX.event_file_writer import EventsWriter

    flush, failures = EventsWriter.flush, [OSError(28, "No space left on device")] * 3

    def full(self: EventsWriter) -> bool:
        if failures:
            raise failures.pop()
        return bool(flush(self))

    monkeypatch.setattr(EventsWriter, "flush", full)
    tracker = tensorboard(tmp_path)
    train(tracker, range(1, 4))
    tracker.finish("finished", 3)
    assert failures == []
    assert {step for step, _ in points(tmp_path, "train/loss")} == {1, 2, 3}


def wandb_tracker(run_dir: Path, sink: type[WandbSink] = WandbSink, drain_s: float = 60.0) -> ScriptedTracker:
    to = sink(project="tests", run_name="demo", run_id="abc123", directory=run_dir)
    return ScriptedTracker(to, run_dir, "wandb", drain_s=drain_s, retry_s=(0.1, 0.2))


def wandb_records(run_dir: Path, folders: str = "offline-run-*") -> list[Any]:
    """Read the files for ``wandb sync``: a LevelDB log after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    for path in sorted((run_dir / "wandb").glob(f"{folders}/*.wandb"), key=lambda one: one.stat().st_mtime_ns):
        content, place, record = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            if place % 32768 > 32768 - 7:
                place += -place % 32768
                continue
            size, part = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
            record += content[place + 7 : place + 7 + size]
            place += 7 + size
            if part in (1, 4):
                records.append(Record.FromString(record))
                record = b""
    return records


def wandb_rows(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.history.item
    ]


@pytest.fixture
def wandb_client() -> Iterator[None]:
    """Restart W&B's client, which reads the environment only once."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.timeout(180)
def test_wandb_offline_has_one_run_for_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_client: None
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    train_twice(wandb_tracker, tmp_path)
    records = wandb_records(tmp_path)
    assert {record.run.run_id for record in records if record.run.run_id} == {"abc123"}
    rows = wandb_rows(records)
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(step, 1.0 / step) for step in range(1, 9)], "every step once"
    assert [row["step"] for row in rows if "eval/loss" in row] == [2, 4, 6, 8]
    assert [(row["step"], row["time/goodput"]) for row in rows if "time/goodput" in row] == [(5, 0.5), (8, 0.75)]
    summary = {item.key or ".".join(item.nested_key): item.value_json for r in records for item in r.summary.update}
    assert json.loads(summary["state"]) == "finished" and json.loads(summary["checkpoint.step"]) == 8
    config = {item.key: item.value_json for record in records for item in record.config.update}
    assert json.loads(config["optimizer.lr"]) == 0.5 and json.loads(config["attempt"])["attempt"] == 2
    files = [path.name for path in tmp_path.glob("wandb/offline-run-*/files/*")]
    assert files.count("samples-step-00000004.md") == 1
    assert files.count("plan.txt") == 2 and files.count("README.md") == 2


def test_wandb_shows_the_newest_attempts_checkpoint(tmp_path: Path) -> None:
    sink = WandbSink(project="p", run_name="r", run_id="i", directory=tmp_path)
    summary = {"checkpoint.step": 30, "checkpoint.path": "of a version without attempts"}
    sink._run = cast("Any", SimpleNamespace(summary=summary))
    shown = []
    for attempt, step in ((1, 20), (1, 10), (2, 15), (1, 20), (2, 20)):
        sink.deliver([committed(step, attempt)])
        shown.append((summary["checkpoint.attempt"], summary["checkpoint.step"]))
    assert shown == [(1, 20), (1, 20), (2, 15), (2, 15), (2, 20)]
    assert summary["checkpoint.path"] == committed(20, 2).path


@pytest.mark.timeout(180)
def test_wandb_without_an_account_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_client: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    tracker = wandb_tracker(tmp_path, drain_s=3.0)
    train(tracker, range(1, 4))
    said = "wandb is unavailable; updates wait in the run's journal"
    wait_until(lambda: said in caplog.text, said)
    tracker.finish("stopped", 3)
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_tracker(tmp_path).catch_up()
    assert any(record.history.item for record in wandb_records(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_wandb_outage_delays_the_exit_briefly_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
import sys
from pathlib import Path
from tests.polling import wait_until
from tests.unit.tracking.test_other_trackers import train, wandb_tracker
tracker = wandb_tracker(Path({str(tmp_path)!r}), drain_s=2.0)
train(tracker, range(1, 6))
wait_until(lambda: tracker.is_delivered(), "all is delivered", timeout_s=60)
print("delivered", flush=True)
sys.stdin.readline()
tracker.log_step(6, {{"train/loss": 0.5}})
tracker.finish("finished", 6)
"""
    with serve_wandb() as server:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.port}")
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "delivered\n"
        server.is_away.set()
        begun = time.monotonic()
        child.communicate("go\n", timeout=100)
        took_s = time.monotonic() - begun
    assert child.returncode == 0
    assert took_s < 20.0, "2 s for what waits, and 5 s for the client's service"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_tracker(tmp_path).catch_up()
    rows = wandb_rows([*wandb_records(tmp_path, "run-*"), *wandb_records(tmp_path)])
    assert sorted({row["step"] for row in rows if "train/loss" in row}) == [1, 2, 3, 4, 5, 6]


def test_a_batch_that_fails_halfway_repeats_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    failures = [2]

    class Failing(WandbSink):
        def connect(self) -> str:
            self._run = object()  # type: ignore[assignment]
            return "one"

        def _hand_over(self, run: Any, update: Any) -> None:
            if len(taken) in (3, 5) and failures[0]:
                failures[0] -= 1
                raise OSError("the client failed")
            taken.append((type(update), getattr(update, "step", None)))

    tracker = wandb_tracker(tmp_path, Failing)
    tracker.start({}, {})
    for step in (*range(1, 6), 3, *range(6, 9)):
        tracker.log_step(step, {"train/loss": 1.0 / step})
    tracker.finish("finished", 8)
    assert failures == [0]
    assert taken == [(AttemptBegan, None), *((StepMetrics, step) for step in range(1, 9)), (AttemptOver, 8)]


def test_texts_for_wandb_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from types import SimpleNamespace
from ray_ulysses.tracking.wandb_sink import WandbSink
sink = WandbSink(project="p", run_name="r", run_id="i", directory=Path("."))
run = SimpleNamespace(dir={str(tmp_path)!r}, notes="", save=lambda *_, **__: None)
sink._store(run, {{"README.md": "a \\u2264 b"}})
"""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-X", "utf8=0", "-c", code], env=environment, timeout=90, check=True)
    assert (tmp_path / "README.md").read_bytes() == "a \u2264 b".encode()
