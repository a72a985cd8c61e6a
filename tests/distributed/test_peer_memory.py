"""A run whose processes are all killed goes on from the memory of its nodes, as the run that was not killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.peer_memory import PeerMemoryAgent
from ray_ulysses.tracking.events import AttemptStarted
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.breadth import fast_only
from tests.distributed.run_case import assert_same_run, make_config, make_corpus, train, train_to_death
from tests.unit.tracking.journals import read_events

pytestmark = pytest.mark.distributed

TOKEN, STEPS = "secret", 10
Agents = dict[str, PeerMemoryAgent]
Addresses = tuple[dict[str, str], str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunHistory:
    config = config_for(tmp_path_factory.mktemp("unbroken"), corpus, checkpoint__every_steps=100)
    train(config, "unbroken")
    return read_history(config.run_dir)


@pytest.fixture
def agents() -> Iterator[Agents]:
    running = {node: PeerMemoryAgent(TOKEN) for node in ("node-1", "node-2")}
    yield running
    for agent in running.values():
        agent.close()


@pytest.fixture
def peer_memory(agents: Agents) -> Addresses:
    return {node: agent.start() for node, agent in agents.items()}, TOKEN


def config_for(storage: Path, corpus: Path, **overrides: Any) -> Config:
    settings = {"data__rows_per_step": 2, "run__stop_step": STEPS, "cluster__workers": 2, "checkpoint__every_steps": 4}
    return make_config(storage, corpus, **{**settings, **overrides})


def starts(config: Config) -> list[tuple[int, str | None]]:
    started = [one for one in read_events(config.run_dir) if isinstance(one, AttemptStarted)]
    return [(one.resumed_step, one.resumed_from) for one in started]


@pytest.mark.parametrize("layout", fast_only([(4, 2), (3, 1)], (4, 2)), ids=str)
def test_a_killed_run_goes_on_from_peer_memory_at_any_size_and_loses_at_most_a_step(
    corpus: Path, unbroken: RunHistory, tmp_path: Path, peer_memory: Addresses, agents: Agents, layout: tuple[int, int]
) -> None:
    config = config_for(tmp_path, corpus, checkpoint__every_steps=100)
    train_to_death(config, "first", (1, "in memory", 4), peer_memory=peer_memory)
    assert not (config.run_dir / "checkpoints").exists()
    size = {"cluster__workers": layout[0], "parallel__sp_size": layout[1]}
    other = config_for(tmp_path, corpus, checkpoint__every_steps=100, **size)
    assert train(other, "second", peer_memory=peer_memory) == ("finished", STEPS)
    history = read_history(config.run_dir)
    assert_same_run(history, unbroken)
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
    corpus: Path, unbroken: RunHistory, tmp_path: Path, peer_memory: Addresses, agents: Agents, lost: str
) -> None:
    config = config_for(tmp_path, corpus)
    train_to_death(config, "first", (0, "in memory", 6), peer_memory=peer_memory)
    for node in agents if lost == "both" else (lost,):
        agents[node].close()
    assert train(config, "second", peer_memory=peer_memory) == ("finished", STEPS)
    assert_same_run(read_history(config.run_dir), unbroken)
    _, (step, source) = starts(config)
    if lost == "both":
        assert (step, source) == (4, "checkpoints/step-00000004")
    else:
        assert step >= 6 and source == f"peer memory, step {step}"


@pytest.mark.slow
def test_neither_an_older_state_nor_that_of_a_fenced_attempt_is_taken_from_peer_memory(
    corpus: Path, unbroken: RunHistory, tmp_path: Path, peer_memory: Addresses
) -> None:
    config = config_for(tmp_path, corpus)
    train_to_death(config, "first", (0, "in memory", 6), peer_memory=peer_memory)
    # This one knows nothing of peer memory, starts from storage, and so excludes what is in memory.
    train_to_death(config, "second", (0, "step", 5))
    train_to_death(config, "third", (0, "in memory", 6), peer_memory=peer_memory)
    # The newer state is on storage now.
    assert train(config_for(tmp_path, corpus, run__stop_step=8), "fourth") == ("finished", 8)
    assert train(config, "fifth", peer_memory=peer_memory) == ("finished", STEPS)
    assert_same_run(read_history(config.run_dir), unbroken)
    assert [source for _, source in starts(config)] == [
        None, *["checkpoints/step-00000004"] * 3, "checkpoints/step-00000008",
    ]  # fmt: skip
