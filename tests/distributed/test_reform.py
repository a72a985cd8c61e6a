"""Workers form again after a fault of any kind, without Ray: what is trained does not notice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from ray_ulysses.config import Config
from ray_ulysses.elastic.causes import root_cause
from ray_ulysses.run.requests import request_stop
from ray_ulysses.tracking.events import StepDone
from ray_ulysses.tracking.history import AttemptRecord, RunHistory, read_history
from tests.distributed.faulty_launcher import plant
from tests.distributed.run_case import make_config
from tests.distributed.supervised import SupervisedRun, children, training_child
from tests.polling import wait_until
from tests.unit.tracking.journals import read_events

TIMEOUT_S = 120.0


@pytest.fixture
def run(tmp_path: Path, corpus: Path, request: pytest.FixtureRequest) -> Iterator[SupervisedRun]:
    """Two nodes that hold one sequence-parallel group each, of so many ranks; steps may wait for copies."""
    sp_size, waits_for_copies = getattr(request, "param", (2, False))
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=4000, data__epochs=25, parallel__sp_size=sp_size,
        cluster__workers={"min": sp_size, "max": 2 * sp_size}, checkpoint__every_steps=1000,
        memory__gradient_checkpointing=False,
    )  # fmt: skip
    nodes = {worker: "ab"[worker // sp_size] for worker in range(2 * sp_size)}
    # A pause after each step: others may compute meanwhile.
    with SupervisedRun(config, nodes, tmp_path, waits_for_copies=waits_for_copies, pace_s=0.1) as run:
        yield run


def _attempts(config: Config) -> list[AttemptRecord]:
    return [one for one in read_history(config.run_dir).attempts if one.first_step is not None]


def _wait_for_steps(run: SupervisedRun, attempts: int, steps: int = 3) -> None:
    """Wait until so many attempts have trained, the last one so many steps."""

    def have_trained() -> bool:
        found = _attempts(run.config)
        return len(found) >= attempts and (found[-1].last_step or 0) - (found[-1].first_step or 0) >= steps - 1

    wait_until(have_trained, f"{attempts} attempts", timeout_s=TIMEOUT_S, every_s=0.1, said=run.logs)


def _stop(run: SupervisedRun, workers: tuple[int, ...]) -> RunHistory:
    """Stop the run, and return its history once these workers have ended well and left nothing."""
    launchers = [child for worker in workers for child in children(run.processes[worker].pid)]
    request_stop(run.config.run_dir, "session")
    run.wait_until_ended(workers, timeout_s=TIMEOUT_S)
    wait_until(lambda: not any(Path(f"/proc/{one}").exists() for one in launchers), "no process left", timeout_s=10.0)
    return read_history(run.config.run_dir)


def _child(run: SupervisedRun, worker: int) -> int:
    supervisor = run.processes[worker].pid
    wait_until(lambda: training_child(supervisor), "a child", timeout_s=TIMEOUT_S)
    child = training_child(supervisor)
    assert child is not None
    return child


def _libraries(process: int) -> set[str]:
    return {one.path for one in psutil.Process(process).memory_maps() if ".so" in one.path and "python" in one.path}


_TOLD = {
    signal.SIGKILL: "killed by signal 9",
    signal.SIGSEGV: "killed by signal 11",
    signal.SIGSTOP: "the process was stopped (SIGSTOP)",
}


@pytest.mark.parametrize(
    ("run", "signals"),
    [((1, True), (signal.SIGSTOP,)), pytest.param((2, True), tuple(_TOLD), marks=pytest.mark.slow)],
    indirect=["run"],
    ids=["sp1-stopped", "sp2"],
)
def test_children_that_die_or_stop_and_a_lost_node_cost_at_most_a_step(
    run: SupervisedRun, signals: tuple[signal.Signals, ...]
) -> None:
    world, sp_size = len(run.nodes), run.config.parallel.sp_size
    last = world - 1
    _wait_for_steps(run, 1)
    # What a child imports costs each recovery that time again: the launcher has it all.
    own = _libraries(_child(run, last)) - _libraries(psutil.Process(_child(run, last)).ppid())
    assert not own
    agent = run.agents["b"].process.pid
    num_descriptors = psutil.Process(agent).num_fds()
    workers = [0 if how is signal.SIGSEGV else last for how in signals]
    for number, (how, worker) in enumerate(zip(signals, workers, strict=True), 2):
        os.kill(_child(run, worker), how)
        _wait_for_steps(run, number)
        group = run.coordinator.group
        assert group is not None and group.members == tuple(range(world)) and group.generation == number
    for judge, how, worker in zip(run.judged, signals, workers, strict=True):
        # A crash is told with what the process has said last.
        assert root_cause(judge.errors).reason.startswith(f"lost worker {worker} ({_TOLD[how]}")
    # States that are being written hold some for a moment.
    wait_until(
        lambda: psutil.Process(agent).num_fds() <= num_descriptors, f"{num_descriptors} descriptors of the agent",
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    run.kill_node("a")
    _wait_for_steps(run, len(signals) + 2)
    left = tuple(range(sp_size, world))
    group = run.coordinator.group
    assert group is not None and group.members == left
    history = _stop(run, left)
    assert history.status == "stopped"
    assert [one.world_size for one in history.attempts] == [*[world] * (len(signals) + 1), sp_size]
    assert [step.step for step in history.steps] == list(range(1, history.step + 1))
    assert history.rows_consumed == history.step * run.config.data.rows_per_step
    # Steps that were trained by more than one attempt have the same loss in each.
    losses: dict[int, list[float]] = {}
    for event in read_events(run.config.run_dir):
        if isinstance(event, StepDone):
            losses.setdefault(event.step, []).append(event.loss)
    repeated = [values for values in losses.values() if len(values) > 1]
    assert all(abs(value / values[0] - 1.0) <= 1e-5 for values in repeated for value in values)
    assert len(repeated) == history.lost_steps
    # Nothing was saved to storage in between: each attempt continued from peer memory, at most a step behind.
    lost = [(one.last_step or 0) - (other.first_step or 0) + 1 for one, other in pairwise(history.attempts)]
    assert all(steps <= 1 for steps in lost), lost


@pytest.mark.slow
@pytest.mark.parametrize("run", [(1, True)], indirect=True, ids=["sp1"])
def test_a_node_whose_gpu_has_failed_is_left_and_the_others_train_on(run: SupervisedRun) -> None:
    _wait_for_steps(run, 1)
    text = "[Rank 1] watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered"
    plant(run.folder, {"number": 1, "rank": 1, "where": "step", "kind": "abort", "text": text})
    _wait_for_steps(run, 2)
    (judge,) = run.judged
    cause = root_cause(judge.errors)
    assert (cause.kind, cause.rank, judge.is_final) == ("device", 1, False)
    assert text in cause.reason and cause.node
    assert text in run.logs(), "what a child writes to stderr is in its worker's log"
    assert run.coordinator.group is not None and run.coordinator.group.broken == {"b"}
    history = _stop(run, (0, 1))
    assert [one.world_size for one in history.attempts] == [2, 1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("run", [(1, False)], indirect=True, ids=["sp1"])
def test_fifty_generations_leave_a_supervisor_as_it_was(run: SupervisedRun) -> None:
    """Memory within 5%, and equally many descriptors, threads and processes after each generation."""
    measured: list[tuple[int, int, int, int]] = []
    for generation in range(1, 52):
        # It has trained a step, and others have not come in between.
        wait_until(
            lambda generation=generation: (
                len(_attempts(run.config)) >= generation and len(run.judged) == generation - 1
            ),
            f"generation {generation}", timeout_s=TIMEOUT_S, every_s=0.1, said=run.logs,
        )  # fmt: skip
        process = psutil.Process(run.processes[1].pid)
        if generation >= 6:
            # One of the first ones pays for what is imported late.
            size = process.memory_info().rss
            # The least of a few: it opens a file of the kernel now and then, to see how its child does.
            num_fds = min(process.num_fds() for _ in range(5))
            measured.append((size, num_fds, process.num_threads(), len(process.children(recursive=True))))
        if generation <= 50:
            os.kill(_child(run, generation % 2), signal.SIGKILL)
    sizes = [size for size, *_ in measured]
    assert max(sizes) <= 1.05 * min(sizes), sizes
    assert len({counts for _, *rest in measured for counts in [tuple(rest)]}) == 1, measured
    history = _stop(run, (0, 1))
    assert [step.step for step in history.steps] == list(range(1, history.step + 1)) and len(history.attempts) >= 51


@pytest.mark.slow
@pytest.mark.parametrize("verdict", [False, True], ids=["final", "hopeless"])
def test_what_can_not_be_recovered_is_raised_where_it_happened(run: SupervisedRun, verdict: bool) -> None:
    """A broken directory: each generation fails before its first step."""
    _wait_for_steps(run, 1)
    run.verdicts = [verdict, verdict, False]
    (run.config.run_dir / "plan").rename(run.config.run_dir / "elsewhere")
    os.kill(_child(run, 1), signal.SIGKILL)
    run.wait_until_ended(well=False, timeout_s=TIMEOUT_S)
    assert all(process.returncode == 1 for process in run.processes.values())
    logs = run.logs()
    assert ("ChildLostError: killed by signal 9" in logs) is not verdict
    assert ("UserError" in logs) is verdict
