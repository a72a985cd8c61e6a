"""Law 2 and law 3 over kills, stops and resizes, from storage and from peer memory, and what proves them afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.checkpoint.manifest import read_facts
from ray_ulysses.config import Config
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import AttemptStarted
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.journal_lines import with_checksum
from tests.breadth import fast_only
from tests.distributed.conftest import Addresses, Agents
from tests.distributed.run_case import assert_same_run, make_config, make_corpus, train, train_to_death
from tests.unit.tracking.journals import read_events

ROWS = 3
"""Rows per step: two data parallel groups, and four, take a filler."""
STEPS = 10


@pytest.fixture(scope="module")
def unbroken(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunHistory]:
    config = config_for(tmp_path_factory.mktemp("unbroken"), corpus)
    train(config, "unbroken")
    return config, read_history(config.run_dir)


def config_for(storage: Path, corpus: Path, **overrides: Any) -> Config:
    settings = {"data__rows_per_step": ROWS, "run__stop_step": STEPS, "checkpoint__every_steps": 3}
    return make_config(storage, corpus, **{**settings, **overrides})


def test_a_run_that_was_killed_stopped_and_resized_is_the_run_that_was_not(
    corpus: Path, unbroken: tuple[Config, RunHistory], tmp_path: Path
) -> None:
    wanted = unbroken[1]
    config = config_for(tmp_path, corpus)

    # 4 workers, sp=2: rank 2 is killed in the middle of the save of step 6, when others have written their shards.
    # Step 3's is committed by then, as it is where steps last longer than a save.
    train_to_death(config, "first", (2, "save", 6))
    assert not (config.run_dir / "checkpoints/step-00000006/manifest.json").exists()

    # 2 workers, sp=2, stopped by a request; 4 with sp=4; 4 with sp=1.
    assert train(config_for(tmp_path, corpus, cluster__workers=2), "second", stop_at=7) == ("stopped", 8)
    four = config_for(tmp_path, corpus, parallel__sp_size=4, run__stop_step=9)
    assert train(four, "third") == ("finished", 9)
    assert train(config_for(tmp_path, corpus, parallel__sp_size=1), "fourth") == ("finished", STEPS)

    ours = read_history(config.run_dir)
    assert_same_run(ours, wanted)
    assert [step.rows[0] for step in ours.steps] == [ROWS * index for index in range(STEPS)]
    assert ours.lost_steps == 3
    assert [(a.world_size, a.sp_size, a.dp_size) for a in ours.attempts] == [(4, 2, 2), (2, 2, 1), (4, 4, 1), (4, 1, 4)]
    assert [(a.first_step, a.last_step) for a in ours.attempts] == [(1, 6), (4, 8), (9, 9), (10, 10)]


@pytest.mark.slow
def test_the_last_step_may_be_short_and_every_row_is_trained_on_once(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, ("bisect.py", "cmd.py"))
    config = make_config(tmp_path, corpus, data__rows_per_step=30, run__stop_step=None, checkpoint__every_steps=None)
    assert train(config, "all")[0] == "finished"
    history = read_history(config.run_dir)
    plan = json.loads((config.run_dir / "plan/segment-0000/plan.json").read_text())
    assert history.rows_consumed == plan["num_rows"]
    *whole, last = [step.rows[1] - step.rows[0] for step in history.steps]
    assert set(whole) == {30} and 0 < last < 30


def starts(config: Config) -> list[tuple[int, str | None]]:
    started = [one for one in read_events(config.run_dir) if isinstance(one, AttemptStarted)]
    return [(one.resumed_step, one.resumed_from) for one in started]


@pytest.mark.parametrize("layout", fast_only([(4, 2), (3, 1)], (4, 2)), ids=str)
def test_a_killed_run_goes_on_from_peer_memory_at_any_size_and_loses_at_most_a_step(
    corpus: Path,
    unbroken: tuple[Config, RunHistory],
    tmp_path: Path,
    peer_memory: Addresses,
    agents: Agents,
    layout: tuple[int, int],
) -> None:
    config = config_for(tmp_path, corpus, cluster__workers=2, checkpoint__every_steps=100)
    train_to_death(config, "first", (1, "in memory", 4), peer_memory=peer_memory)
    assert not (config.run_dir / "checkpoints").exists()
    size = {"cluster__workers": layout[0], "parallel__sp_size": layout[1]}
    other = config_for(tmp_path, corpus, checkpoint__every_steps=100, **size)
    assert train(other, "second", peer_memory=peer_memory) == ("finished", STEPS)
    history = read_history(config.run_dir)
    assert_same_run(history, unbroken[1])
    _, (step, source) = starts(config)
    assert step >= 4 and source == f"peer memory, step {step}"
    assert history.lost_steps <= 1
    # The state at the end is on storage, and in memory is one state at most.
    assert (config.run_dir / f"checkpoints/step-{STEPS:08d}/manifest.json").is_file()
    folders = [{key.split("/")[1] for key in agent.files.sizes("checkpoints")} for agent in agents.values()]
    assert folders[0] == folders[1] and len(folders[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node-1", "node-2", "both"])
def test_a_lost_node_leaves_the_state_in_its_partners_memory_and_two_leave_the_checkpoint_on_storage(
    corpus: Path, unbroken: tuple[Config, RunHistory], tmp_path: Path, peer_memory: Addresses, agents: Agents, lost: str
) -> None:
    config = config_for(tmp_path, corpus, cluster__workers=2, checkpoint__every_steps=4)
    train_to_death(config, "first", (0, "in memory", 6), peer_memory=peer_memory)
    for node in agents if lost == "both" else (lost,):
        agents[node].close()
    assert train(config, "second", peer_memory=peer_memory) == ("finished", STEPS)
    assert_same_run(read_history(config.run_dir), unbroken[1])
    _, (step, source) = starts(config)
    if lost == "both":
        assert (step, source) == (4, "checkpoints/step-00000004")
    else:
        assert step >= 6 and source == f"peer memory, step {step}"


@pytest.mark.slow
def test_neither_an_older_state_nor_that_of_a_fenced_attempt_is_taken_from_peer_memory(
    corpus: Path, unbroken: tuple[Config, RunHistory], tmp_path: Path, peer_memory: Addresses
) -> None:
    two = {"cluster__workers": 2, "checkpoint__every_steps": 4}
    config = config_for(tmp_path, corpus, **two)
    train_to_death(config, "first", (0, "in memory", 6), peer_memory=peer_memory)
    # This one knows nothing of peer memory, starts from storage, and so excludes what is in memory.
    train_to_death(config, "second", (0, "step", 5))
    train_to_death(config, "third", (0, "in memory", 6), peer_memory=peer_memory)
    # The newer state is on storage now.
    assert train(config_for(tmp_path, corpus, run__stop_step=8, **two), "fourth") == ("finished", 8)
    assert train(config, "fifth", peer_memory=peer_memory) == ("finished", STEPS)
    assert_same_run(read_history(config.run_dir), unbroken[1])
    assert [source for _, source in starts(config)] == [
        None, *["checkpoints/step-00000004"] * 3, "checkpoints/step-00000008",
    ]  # fmt: skip


def test_what_ranks_received_is_found_again_in_plan_and_corpus(
    corpus: Path, unbroken: tuple[Config, RunHistory], tmp_path: Path
) -> None:
    config = config_for(tmp_path, corpus, cluster__workers=2)
    train_to_death(config, "first", (1, "step", 5))
    # A record is damaged while nobody trains.
    damaged = config.run_dir / "journal/attempt-0001.jsonl"
    whole = damaged.read_bytes()
    place = whole.index(b'"tokens": ', whole.index(b'"step": 2, ')) + 11
    damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    train(config_for(tmp_path, corpus, cluster__workers=1, parallel__sp_size=1), "second")

    # The run went on from its checkpoint's sums, which hold each planned token once; the damaged step isn't proved.
    (undisturbed, sound), history = unbroken, read_history(config.run_dir, is_held=False)
    _, last = read_facts(LocalStore(config.run_dir), STEPS)
    assert (last.digest, last.tokens) == (sound.data_digest, sound.tokens)
    assert (history.missing_steps, len(history.damaged_records), len(history.steps)) == (((2, 2),), 1, STEPS - 1)
    findings = verify_run(config.run_dir).findings
    assert [(finding.kind, finding.where) for finding in findings] == [("missing_steps", "step 2")]

    # Without the damage everything is proved.
    damaged.write_bytes(whole)
    found = verify_run(config.run_dir, other=undisturbed.run_dir)
    assert found.holds, found.findings
    assert (found.status, found.steps, found.rows) == ("finished", STEPS, STEPS * ROWS)
    assert found.num_manifests > 0 and found.num_commits == 4
    assert found.reading is not None and f"{found.reading.digest:016x}" == found.data_digest
    assert found.comparison is not None and found.comparison.answer == "same"

    # One bit of what step 7 received.
    journal = config.run_dir / "journal/attempt-0002.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records:
        # With its checksum, the change itself would be found.
        del record["crc32"]
        if record["event"] == "step" and record["step"] == 7:
            record["digest"] = f"{int(record['digest'], 16) ^ 1:016x}"
    journal.write_bytes(b"".join(with_checksum(json.dumps(record).encode()) + b"\n" for record in records))
    kinds = [(finding.kind, finding.step) for finding in verify_run(config.run_dir, other=undisturbed.run_dir).findings]
    assert set(kinds) == {("checkpoint_digest", 9), ("comparison", 7), ("digest", 7)}
