"""A run whose processes are all killed goes on from the memory of its nodes, as the run that was not killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.peer_memory import PeerMemoryAgent
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.apart import losses_apart
from tests.breadth import fast_only
from tests.distributed.harness import run_ranks, run_ranks_to_outcomes
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt, run_paced_worker, run_worker

pytestmark = pytest.mark.distributed

TOKEN = "secret"
STEPS = 10
TIMEOUT_S = 120.0
Agents = dict[str, PeerMemoryAgent]
Vault = tuple[dict[str, str], str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunHistory:
    config = config_for(tmp_path_factory.mktemp("unbroken"), corpus, checkpoint__every_steps=100)
    run(config, "unbroken")
    return read_history(config.run_dir)


@pytest.fixture
def agents() -> Iterator[Agents]:
    running = {node: PeerMemoryAgent(TOKEN) for node in ("node-1", "node-2")}
    yield running
    for agent in running.values():
        agent.close()


@pytest.fixture
def peer_memory(agents: Agents) -> Vault:
    return {node: agent.start() for node, agent in agents.items()}, TOKEN


def config_for(storage: Path, corpus: Path, **overrides: Any) -> Config:
    return make_config(
        storage,
        corpus,
        data__rows_per_step=2,
        **{"run__stop_step": STEPS, "run__name": "run", "cluster__workers": 2, **overrides},
    )


def run(config: Config, session: str, **options: Any) -> tuple[str, int]:
    prepare_attempt(config, session)
    ends = run_ranks(run_worker, config.cluster.workers.max, config, session, timeout_s=TIMEOUT_S, **options)
    assert len(set(ends)) == 1
    end: tuple[str, int] = ends[0]
    return end


def run_to_death(config: Config, session: str, kill: tuple[int, str, int], **options: Any) -> None:
    """Run until one rank is killed, which ends the others.

    Without a pace, this model's steps are shorter than a copy, and a busy machine takes several during one.
    """
    prepare_attempt(config, session)
    workers = config.cluster.workers.max
    outcomes = run_ranks_to_outcomes(
        run_paced_worker, workers, config, session, kill=kill, timeout_s=TIMEOUT_S, **options
    )
    assert outcomes[kill[0]].exit_code == -9
    assert not any(outcome.ok for outcome in outcomes)


def starts(config: Config) -> list[tuple[int, str | None]]:
    found = []
    for path in sorted((config.run_dir / "journal").glob("attempt-????.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        found += [(e["resumed_step"], e["resumed_from"]) for e in events if e["event"] == "attempt_started"]
    return found


def assert_same_run(config: Config, wanted: RunHistory) -> RunHistory:
    ours = read_history(config.run_dir)
    assert losses_apart(ours, wanted) <= 1e-5
    assert [step.rows for step in ours.steps] == [step.rows for step in wanted.steps]
    assert ours.data_digest == wanted.data_digest
    return ours


@pytest.mark.parametrize("layout", fast_only([(4, 2), (3, 1)], (4, 2)), ids=str)
def test_a_killed_run_goes_on_from_peer_memory_at_any_size_and_loses_at_most_a_step(
    corpus: Path, unbroken: RunHistory, tmp_path: Path, peer_memory: Vault, agents: Agents, layout: tuple[int, int]
) -> None:
    config = config_for(tmp_path, corpus, checkpoint__every_steps=100)
    run_to_death(config, "first", (1, "in memory", 4), peer_memory=peer_memory)
    assert not (config.run_dir / "checkpoints").exists()
    workers, sp_size = layout
    other = config_for(
        tmp_path, corpus, checkpoint__every_steps=100, cluster__workers=workers, parallel__sp_size=sp_size
    )
    assert run(other, "second", peer_memory=peer_memory) == ("finished", STEPS)
    history = assert_same_run(other, unbroken)
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
    corpus: Path, unbroken: RunHistory, tmp_path: Path, peer_memory: Vault, agents: Agents, lost: str
) -> None:
    config = config_for(tmp_path, corpus, checkpoint__every_steps=4)
    run_to_death(config, "first", (0, "in memory", 6), peer_memory=peer_memory)
    for node in agents if lost == "both" else (lost,):
        agents[node].close()
    assert run(config, "second", peer_memory=peer_memory) == ("finished", STEPS)
    assert_same_run(config, unbroken)
    _, (step, source) = starts(config)
    if lost == "both":
        assert (step, source) == (4, "checkpoints/step-00000004")
        said = (config.run_dir / "journal/attempt-0002.jsonl").read_text()
        assert "none of the 2 agents of the peer memory answers" in said
        assert "the checkpoints on storage are used" in said
    else:
        assert step >= 6 and source == f"peer memory, step {step}"


@pytest.mark.slow
def test_neither_an_older_state_nor_that_of_a_fenced_attempt_is_taken_from_peer_memory(
    corpus: Path, unbroken: RunHistory, tmp_path: Path, peer_memory: Vault
) -> None:
    config = config_for(tmp_path, corpus, checkpoint__every_steps=4)
    run_to_death(config, "first", (0, "in memory", 6), peer_memory=peer_memory)
    # This one knows nothing of peer memory, starts from storage, and so excludes what is in memory.
    run_to_death(config, "second", (0, "step", 5))
    run_to_death(config, "third", (0, "in memory", 6), peer_memory=peer_memory)
    # The newer state is on storage now.
    assert run(config_for(tmp_path, corpus, checkpoint__every_steps=4, run__stop_step=8), "fourth") == ("finished", 8)
    assert run(config, "fifth", peer_memory=peer_memory) == ("finished", STEPS)
    assert_same_run(config, unbroken)
    assert [source for _, source in starts(config)] == [
        None, *["checkpoints/step-00000004"] * 3, "checkpoints/step-00000008",
    ]  # fmt: skip
