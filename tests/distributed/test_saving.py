"""Saving in the loop: what makes it save, what a storage that is away or hangs costs, and starts from another run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.checkpoint import read_manifest
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.config import Config
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.run.checkpoint_store import checkpoint_store
from ray_ulysses.run.origin import find_tracked
from ray_ulysses.run.trackers import tracked
from ray_ulysses.run_names import SAVE_FILE
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from tests.breadth import fast_only
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.run_case import make_config, prepare_attempt, run_paced_worker, run_worker, train, train_to_death
from tests.unit.tracking.journals import read_events

_GATE_S = 20.0
_AUDITED = {"open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.link", "os.mkdir", "os.truncate"}


class HangingDirectory:
    """Calls of this process under a folder wait while the gate is closed, as those to a file server that is away do."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.gate = str(folder), threading.Event()
        self.gate.set()
        sys.addaudithook(self._audit)
        for name in ("pwrite", "fsync", "stat"):
            setattr(os, name, self._guarded(getattr(os, name)))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _AUDITED and not self.gate.is_set():
            self._wait(arguments[0])

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(target: Any, *arguments: Any, **options: Any) -> Any:
            if not self.gate.is_set():
                self._wait(target)
            return call(target, *arguments, **options)

        return guarded

    def _wait(self, target: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fsdecode(target)
        if path.startswith(self._folder) and not self.gate.wait(_GATE_S):
            raise TimeoutError(f"{threading.current_thread().name} waited for {path}, and no step came meanwhile")


def run_worker_while_storage_hangs(
    rank: int, world_size: int, config: Config, session: str, steps: tuple[int, int], told: Path
) -> tuple[str, int]:
    """Be a worker of a run whose storage hangs on rank 0 from one step until another is done, not for some time."""
    storage = HangingDirectory(config.run_dir) if rank == 0 else None

    def watch(name: str, step: int) -> None:
        if storage is None:
            return
        with told.open("a") as stream:
            stream.write(f"{name} {step}\n")
        if (name, step) == ("step", steps[0]):
            storage.gate.clear()
        elif (name, step) == ("step", steps[1]):
            storage.gate.set()

    return run_worker(rank, world_size, config, session, watch=watch)


WORLD = 2


def _config(storage: Path, corpus: Path, **changes: Any) -> Config:
    settings = {"cluster__workers": WORLD, "run__stop_step": 12, "checkpoint__keep_last": 99, "data__rows_per_step": 2}
    return make_config(storage, corpus, **{**settings, **changes})


def _run(config: Config, worker: Any = run_paced_worker, **options: Any) -> RunHistory:
    train(config, worker=worker, **options)
    return read_history(config.run_dir)


def _reasons(config: Config) -> dict[int, str]:
    store = LocalStore(config.run_dir)
    return {step: read_manifest(store, step).meta.reason for step in committed_steps(store)}


def _events(config: Config, kind: str) -> list[Any]:
    return [event for event in read_events(config.run_dir) if event.event == kind]


def test_the_next_attempt_serves_a_request_whose_attempt_died_before_the_commit(tmp_path: Path, corpus: Path) -> None:
    config = _config(tmp_path, corpus, checkpoint__every_steps=None)
    train_to_death(config, "one", (0, "save", 3), actions={2: "request save"})
    assert committed_steps(LocalStore(config.run_dir)) == ()
    train(config, "two")
    assert [reason for _, reason in sorted(_reasons(config).items())] == ["request", "end"]
    assert not (config.run_dir / SAVE_FILE).exists()


def test_every_trigger_saves_and_says_so(tmp_path: Path, corpus: Path) -> None:
    config = _config(tmp_path, corpus, checkpoint__every_steps=5, run__self_test=True)
    history = _run(config, actions={2: "request save", 7: "notice", 8: "notice over"})
    assert [(event.phase, event.part) for event in _events(config, "phase")] == [
        ("opening the data", "build"),
        ("looking for a checkpoint", "load"),
        ("self-test", "build"),
        ("building the model", "build"),
    ]
    spent = history.time_spent
    assert min(spent.starts.build_s, spent.starts.load_s, spent.startup_s, spent.steps_s, spent.saves_s) > 0
    reasons = _reasons(config)
    assert (reasons[3], reasons[5], reasons[12]) == ("request", "steps", "end")
    assert not (config.run_dir / SAVE_FILE).exists()
    # The notice stood for the steps 8 and perhaps 9, as the file is looked at while the step is taken.
    assert reasons[8] == "preemption"
    assert set(reasons) <= {3, 5, 8, 9, 10, 12}
    (notice,) = _events(config, "preemption_notice")
    assert notice.step == 8
    committed = _events(config, "checkpoint_committed")
    assert [event.step for event in committed] == sorted(reasons)
    assert all(event.seconds >= event.stall_seconds > 0 for event in committed)
    manifest = read_manifest(LocalStore(config.run_dir), 12)
    assert manifest.meta.metrics["loss"] > 0
    assert manifest.meta.run == "run"
    assert manifest.meta.extra["journal"]["attempt"] == 1 and manifest.meta.extra["journal"]["bytes"] > 0


@pytest.mark.slow
def test_a_storage_that_is_away_for_a_while_costs_checkpoints_and_not_the_run(tmp_path: Path, corpus: Path) -> None:
    config = _config(tmp_path, corpus, checkpoint__every_steps=4, checkpoint__max_failed_saves=9)
    history = _run(config, actions={5: "storage away", 9: "storage back"})
    assert history.status == "finished" and history.step == 12
    failed = _events(config, "checkpoint_failed")
    assert failed[0].step == 8 and "could not be written" in failed[0].reason
    reasons = _reasons(config)
    assert 8 not in reasons and (reasons[4], reasons[12]) == ("steps", "end")
    assert "retry" in reasons.values()


@pytest.mark.slow
def test_a_storage_that_stays_away_ends_the_run_and_says_why(tmp_path: Path, corpus: Path) -> None:
    config = _config(
        tmp_path, corpus, checkpoint__every_steps=4, checkpoint__max_failed_saves=1,
        checkpoint__failed_saves_patience_s=0.0,
    )  # fmt: skip
    with pytest.raises(RankFailure) as failure:
        _run(config, actions={5: "storage away"})
    text = str(failure.value)
    assert text.count("StorageFailedError: the checkpoint of step ") >= WORLD and "could not be saved" in text
    assert [event.step for event in _events(config, "checkpoint_committed")] == [4]


@pytest.mark.parametrize("is_elsewhere", fast_only([False, True], False), ids=["inside", "elsewhere"])
def test_a_run_directory_that_vanishes_is_an_error_and_is_not_made_anew(
    tmp_path: Path, corpus: Path, is_elsewhere: bool
) -> None:
    elsewhere = {"checkpoint__storage": str(tmp_path / "elsewhere")} if is_elsewhere else {}
    config = _config(tmp_path / "runs", corpus, checkpoint__every_steps=4, **elsewhere)
    with pytest.raises(RankFailure) as failure:
        _run(config, actions={5: "directory away"})
    text = str(failure.value)
    assert f"the run's directory {config.run_dir} was deleted or moved during training" in text
    assert not config.run_dir.exists()
    if is_elsewhere:
        saved = max(committed_steps(checkpoint_store(config)))
        assert saved > 5
        assert f"the state of step {saved} is saved" in text and "model.resume_from=" in text


def test_an_attempt_that_was_overtaken_ends_and_commits_nothing_more(tmp_path: Path, corpus: Path) -> None:
    config = _config(tmp_path, corpus, checkpoint__every_steps=4)
    with pytest.raises(RankFailure) as failure:
        # A save that is refused has no end that a paced worker could wait for.
        _run(config, worker=run_worker, actions={5: "overtaken"})
    assert "an attempt newer than attempt 1 has taken over the run" in str(failure.value)
    assert committed_steps(LocalStore(config.run_dir)) == (4,)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, corpus: Path, mlflow_tables: Path) -> tuple[Config, RunHistory]:
    storage = tmp_path_factory.mktemp("origin")
    shutil.copy(mlflow_tables, storage / "mlflow.db")
    config = _config(storage, corpus, checkpoint__every_steps=4, tracking__enabled=True)
    history = _run(config)
    with tracked(config, drain_s=120.0):
        pass
    return config, history


@pytest.mark.parametrize("by", fast_only(["path", "mlflow"], "mlflow"))
def test_a_run_goes_on_from_another_directory_with_nothing_but_its_checkpoint(
    origin: tuple[Config, RunHistory], tmp_path: Path, corpus: Path, by: str
) -> None:
    """Bitwise what the first run did; through MLflow alone, the reference names no directory."""
    source, wanted = origin
    reference = f"{source.run_dir}@8" if by == "path" else "mlflow:run/8"
    tracking = {"tracking__enabled": by == "mlflow", "tracking__uri": source.tracking_uri}
    config = _config(tmp_path, corpus, model__resume_from=reference, **tracking)
    history = _run(config)
    assert [(s.step, s.loss) for s in history.steps] == [(s.step, s.loss) for s in wanted.steps if s.step > 8]
    assert _events(config, "attempt_started")[0].resumed_from == f"{source.run_dir}@8"
    # What was taken over counts, as if this had been one run all along.
    assert (history.step, history.tokens, history.rows_consumed) == (12, wanted.tokens, wanted.rows_consumed)
    assert history.data_digest == wanted.data_digest and history.missing_steps == ()
    verification = verify_run(config.run_dir, other=source.run_dir)
    assert verification.holds, verification.findings
    last = read_manifest(LocalStore(config.run_dir), 12)
    assert last.meta.digest == read_manifest(LocalStore(source.run_dir), 12).meta.digest
    assert last.meta.tokens == read_manifest(LocalStore(source.run_dir), 12).meta.tokens


@pytest.mark.parametrize("state", fast_only(["weights", "optimizer"], "weights"))
def test_a_run_of_another_context_length_starts_from_the_weights(
    origin: tuple[Config, RunHistory], tmp_path: Path, corpus: Path, state: str
) -> None:
    source, _ = origin
    own = {"weight_decay": 0.03, "betas": [0.8, 0.99], "eps": 1e-7}
    changes: dict[str, Any] = {"data__context_tokens": 512, "run__stop_step": 3, "optimizer__lr": 1e-4}
    changes |= {f"optimizer__{name}": value for name, value in own.items()}
    warm = _config(
        tmp_path / "warm", corpus, model__resume_from=f"{source.run_dir}@latest", model__resume_state=state, **changes
    )
    history = _run(warm)
    cold = _run(_config(tmp_path / "cold", corpus, **changes))
    assert [step.step for step in history.steps] == [1, 2, 3]
    assert history.rows_consumed == cold.rows_consumed and history.data_digest == cold.data_digest
    # Trained weights know the text better from the first step on.
    assert history.steps[0].loss < cold.steps[0].loss - 0.01
    saved = read_manifest(LocalStore(warm.run_dir), 3).state
    assert saved.optimizer_step == (3 if state == "weights" else 15)
    assert saved.counters["global_steps"] == 3
    # The rate is this run's own, at its own step, and so are the optimizer's other settings.
    assert saved.groups[0]["lr"] == pytest.approx(1e-4 * 3 / 4)
    assert {name: saved.groups[0][name] for name in own} == own
    pin = json.loads((warm.run_dir / "resumed-from.json").read_text())
    assert pin["step"] == 12


def test_a_start_that_can_not_be_is_refused_before_a_worker_starts(
    origin: tuple[Config, RunHistory], tmp_path: Path, corpus: Path
) -> None:
    source, _ = origin

    def refusal(**changes: Any) -> str:
        with pytest.raises(UserError) as refused:
            prepare_attempt(_config(tmp_path, corpus, **changes), "one")
        return str(refused.value)

    assert "use one of 4, 8, 12" in refusal(model__resume_from=f"{source.run_dir}@7")
    assert "the run has no checkpoint" in refusal(model__resume_from=str(tmp_path / "nowhere"))
    for change in ({"optimizer__lr": 1e-5}, {"data__context_tokens": 512}):
        assert "model.resume_state" in refusal(model__resume_from=str(source.run_dir), **change)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_steps_go_on_while_the_storage_hangs_and_nothing_is_committed_or_lost(tmp_path: Path, corpus: Path) -> None:
    # Longer than there are copies of the state: a checkpoint is postponed.
    until = 20
    config = _config(tmp_path / "runs", corpus, checkpoint__every_steps=4, run__stop_step=30, data__epochs=4)
    prepare_attempt(config, "one")
    told = tmp_path / "told"
    run_ranks(run_worker_while_storage_hangs, WORLD, config, "one", (5, until), told, timeout_s=120)
    history = read_history(config.run_dir)
    assert history.status == "finished" and [step.step for step in history.steps] == [*range(1, 31)]
    events = [tuple(line.split()) for line in told.read_text().splitlines()]
    hung = events[events.index(("step", "5")) : events.index(("step", str(until)))]
    assert not [step for name, step in hung if name == "saved" and int(step) > 5]
    # Each checkpoint counts on the steps before it.
    order = [(event.event, event.step) for event in read_events(config.run_dir) if hasattr(event, "step")]
    committed = [step for name, step in order if name == "checkpoint_committed"]
    assert committed[-1] == 30
    for step in committed:
        assert order.index(("step", step)) < order.index(("checkpoint_committed", step))


@pytest.mark.slow
def test_an_outage_longer_than_the_failed_saves_of_fast_steps_is_waited_for(tmp_path: Path, corpus: Path) -> None:
    config = _config(tmp_path, corpus, checkpoint__every_steps=4, checkpoint__max_failed_saves=0, run__stop_step=16)
    history = _run(config, actions={5: "storage away", 15: "storage back"})
    assert history.status == "finished"
    assert _reasons(config)[16] == "end"
    assert len(_events(config, "checkpoint_failed")) > 1


@pytest.mark.slow
def test_mlflow_shows_the_checkpoints_that_there_are_whatever_died_before_it_could_log_them(
    tmp_path: Path, corpus: Path
) -> None:
    given = {"cluster__workers": WORLD, "run__stop_step": 20, "checkpoint__keep_last": 2, "data__rows_per_step": 2}
    # No tracker hears of the first attempt's commits before the second has ended.
    silent = make_config(tmp_path, corpus, **given)
    train_to_death(silent, "one", (0, "step", 13))
    store = LocalStore(silent.run_dir)
    assert committed_steps(store) == (5, 10)
    shard = store.path(f"checkpoints/step-00000010/{read_manifest(store, 10).shards[0].file}")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    config = make_config(tmp_path, corpus, **given, tracking__enabled=True)
    train(config, "two")
    with tracked(config, drain_s=120.0):
        pass
    client = open_client(str(config.tracking_uri))
    identity: Any = TrackingIdentity.load(config.run_dir)
    experiment = client.get_run(identity.run_id).info.experiment_id
    models = client.search_logged_models([experiment])
    shown = sorted((int(model.tags["step"]), model.tags["attempt"], model.tags["state"]) for model in models)
    assert shown == [
        *((5, "1", "deleted"), (10, "1", "damaged"), (10, "2", "deleted")),
        (15, "2", "committed"),
        (20, "2", "committed"),
    ]

    assert committed_steps(store) == (15, 20)
    for step in (15, 20):
        found, manifest = find_tracked("run", step, uri=config.tracking_uri), read_manifest(store, step)
        (tags,) = [model.tags for model in models if model.tags["step"] == str(step)]
        assert (found.store, tags["digest"]) == (str(config.run_dir), manifest.meta.digest)
        assert found.cursor == json.loads(json.dumps(manifest.meta.cursor))
        assert json.loads(tags["topology"]) == {"world_size": 2, "sp_size": 2, "ring_size": 1, "dp_size": 1}
        assert found.metrics["loss"] == pytest.approx(manifest.meta.metrics["loss"], rel=1e-12)
    (last,) = [model for model in models if model.tags["step"] == "20"]
    assert (last.tags["parent"], last.tags["reason"]) == ("checkpoints/step-00000005", "end")
