"""Strangers on the network change nothing of a run, and cost it no attempt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_ulysses.peer_memory.client import AgentClient
from ray_ulysses.peer_memory.wire import split_address
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.distributed.run_case import make_config, make_corpus
from tests.distributed.supervised import SupervisedRun
from tests.polling import wait_until
from tests.stranger import disturbing
from tests.wire_recorder import Recorder

SECONDS = int(os.environ.get("GARBAGE_S", "20"))
"""How long a run is disturbed at least: a step takes a second."""
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600 + 3 * SECONDS)]


@pytest.mark.slow
def test_garbage_on_every_port_and_replayed_requests_change_nothing_of_a_run(tmp_path: Path) -> None:
    disturbed = _train(tmp_path / "disturbed", is_disturbed=True)
    undisturbed = _train(tmp_path / "undisturbed", is_disturbed=False)
    assert [attempt.reason for attempt in disturbed.attempts] == ["finished"]
    assert disturbed.steps and [step.loss for step in disturbed.steps] == [step.loss for step in undisturbed.steps]
    assert disturbed.data_digest == undisturbed.data_digest
    assert disturbed.rows_consumed == undisturbed.rows_consumed


def _train(folder: Path, *, is_disturbed: bool) -> RunHistory:
    folder.mkdir()
    config = make_config(
        folder / "runs", make_corpus(folder), run__stop_step=SECONDS, data__epochs=25, parallel__sp_size=1,
        cluster__workers={"min": 1, "max": 2}, checkpoint__every_steps=50,
    )  # fmt: skip
    with SupervisedRun(config, {0: "a", 1: "b"}, folder, pace_s=1.0 if is_disturbed else 0.0) as run:
        if is_disturbed:
            wait_until(lambda: len(run.agents) == 2, "agents", timeout_s=240.0, said=run.logs)
            with disturbing(os.getpid(), 3600.0, [_recorded(run)]) as accepted:
                _wait_for_end(run)
            for kind in ("pytest", "agent_process", "supervisor_process", "launcher"):
                assert any(kind in one for one in accepted), accepted
        else:
            _wait_for_end(run)
        assert not run.judged, run.logs()
    return read_history(config.run_dir)


def _wait_for_end(run: SupervisedRun) -> None:
    def have_ended() -> bool:
        return all(process.poll() is not None for process in run.processes.values())

    wait_until(have_ended, "the end", timeout_s=300.0 + 2 * SECONDS, said=run.logs)
    assert [process.poll() for process in run.processes.values()] == [0, 0], run.logs()


def _recorded(run: SupervisedRun) -> bytes:
    recorder = Recorder(split_address(run.agents["a"].address))
    client = AgentClient(f"127.0.0.1:{recorder.address[1]}", "token")
    client.delete("checkpoints")
    client.close()
    return bytes(recorder.sent)
