"""States in peer memory: which are kept and dropped, and that no failure ends training."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ray_ulysses.trainer.peer_memory_keeper as module
from ray_ulysses.checkpoint import ShardedState
from ray_ulysses.checkpoint.choice import committed_steps
from ray_ulysses.checkpoint.errors import CheckpointError
from ray_ulysses.checkpoint.fence import claim_attempt, read_lineage
from ray_ulysses.checkpoint.messenger import SingleRankMessenger
from ray_ulysses.peer_memory import AgentAddresses, PeerMemoryAgent, PeerMemoryStore
from ray_ulysses.peer_memory.files import LentMemory
from ray_ulysses.run_names import ATTEMPT_FOLDER, CHECKPOINT_FOLDER
from ray_ulysses.storage import Buffer, Store
from ray_ulysses.trainer.context import PeerStore
from ray_ulysses.trainer.peer_memory_keeper import PeerMemoryKeeper
from ray_ulysses.trainer.step import Flags
from tests.stores import FaultyStore, MemoryStore, SlowStore
from tests.unit.checkpoint.fakes import META, TENSORS, save, shard_of
from tests.unit.trainer.conftest import HandClock


class Loop:
    """A one-rank loop around a keeper, with steps of 10 ms."""

    def __init__(self, memory: Store, *, attempt: int = 2, lent: LentMemory | None = None) -> None:
        self.events: list[tuple[str, int]] = []
        self.clock = HandClock()
        worker = SimpleNamespace(
            rank=0, world_size=1, device=torch.device("cpu"), clock=self.clock,
            on_event=lambda name, step: self.events.append((name, step)),
        )  # fmt: skip
        if not isinstance(memory, PeerMemoryStore):
            memory.close, memory.num_readmitted = lambda: None, 0  # type: ignore[attr-defined]
        peer_memory = PeerStore(store=memory, messenger=SingleRankMessenger(), lent=lent)  # type: ignore[arg-type]
        context: Any = SimpleNamespace(worker=worker, attempt=attempt, peer_memory=peer_memory)
        self.keeper = PeerMemoryKeeper(context, SimpleNamespace(sync=lambda: None))  # type: ignore[arg-type]

    def step(self, step: int, *, wait: bool = True) -> Flags:
        if wait:
            self.wait()
        self.clock.time += 0.01
        flags = self.keeper.flags(Flags())
        outcome: Any = SimpleNamespace(flags=flags, position=SimpleNamespace(step=step))
        self.keeper.after_step(None, outcome, None)  # type: ignore[arg-type]
        if wait:
            self.wait()
        return flags

    def wait(self) -> None:
        assert self.keeper._saver is not None and self.keeper._saver.wait(20.0)

    def steps(self, *steps: int) -> None:
        for step in steps:
            self.step(step)

    def kept(self) -> list[int]:
        return [step for name, step in self.events if name == "in memory"]


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    def source() -> ShardedState:
        shard = shard_of(TENSORS, 0, 1)
        return replace(shard, description=replace(shard.description, optimizer_step=1))

    monkeypatch.setattr(module, "StateReader", lambda _: SimpleNamespace(source=source))
    monkeypatch.setattr(module, "checkpoint_meta", lambda *_: META)


Loops = Callable[..., Loop]


@pytest.fixture
def loops() -> Iterator[Loops]:
    made: list[Loop] = []

    def make(memory: Store | None = None, *, start: int | None = 0, **options: Any) -> Loop:
        made.append(Loop(MemoryStore() if memory is None else memory, **options))
        if start is not None:
            made[-1].keeper.resumed(start, None)
        return made[-1]

    yield make
    for loop in made:
        loop.keeper.close()


def full(fail_at: int = 1) -> FaultyStore:
    error = OSError(errno.ENOSPC, "the peer memory of this node is full")
    return FaultyStore(MemoryStore(), fail_at=fail_at, error=error, kinds=("create",), lasting=True)


@pytest.mark.parametrize("start", [0, 4])
def test_every_step_is_kept_and_its_predecessor_dropped(loops: Loops, start: int) -> None:
    """The first step of a run is not kept, because it creates the optimizer's moments."""
    memory, first = MemoryStore(), max(start + 1, 2)
    loop = loops(memory, start=start)
    for step in range(start + 1, 9):
        loop.step(step)
        assert committed_steps(memory) == ((step,) if step >= first else ())
        assert loop.keeper.has_saved == (step >= first)
    assert loop.kept() == [*range(first, 9)]
    assert memory.list(CHECKPOINT_FOLDER) == [
        "checkpoints/step-00000008/attempt-0002/rank-00000-of-00001.safetensors",
        "checkpoints/step-00000008/manifest.json",
    ]


@pytest.mark.parametrize("start", [0, 4])
def test_training_does_not_wait_for_reserved_memory(loops: Loops, monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    loop, gate = loops(start=None), threading.Event()
    assert loop.keeper._staging is not None
    allocate = loop.keeper._staging._allocate

    def slow(number: int, num_bytes: int) -> torch.Tensor:
        assert gate.wait(20.0)
        return allocate(number, num_bytes)

    monkeypatch.setattr(loop.keeper._staging, "_allocate", slow)
    loop.keeper.resumed(start, None)
    assert all(loop.step(step, wait=False).memory_busy for step in (start + 1, start + 2))
    gate.set()
    loop.wait()
    assert not loop.step(start + 3).memory_busy and loop.kept() == [start + 3]


def test_a_step_that_ends_while_a_state_is_being_kept_passes_by(loops: Loops) -> None:
    gate = threading.Event()
    memory = SlowStore(MemoryStore(), gate=gate, kinds=("create",), only=lambda key: key.endswith("manifest.json"))
    loop = loops(memory)
    flags = [loop.step(1), *(loop.step(step, wait=False) for step in range(2, 5))]
    assert [flag.memory_busy for flag in flags] == [True, False, True, True]
    gate.set()
    loop.wait()
    assert loop.kept() == [2]
    loop.step(5)
    assert loop.kept() == [2, 5]


def test_copies_that_stall_training_are_made_less_often(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loops()
    slow: set[int] = {3}
    taken: list[int] = []

    def source() -> ShardedState:
        taken.append(len(taken))
        if len(taken) in slow:
            loop.clock.time += 0.05
        return shard_of(TENSORS, 0, 1)

    monkeypatch.setattr(module, "StateReader", lambda _: SimpleNamespace(source=source))
    due = [step for step in range(1, 9) if loop.step(step).memory_due]
    assert due[1:] == list(range(2, 9))
    slow.update(range(100))
    for step in range(9, 30):
        loop.step(step)
    # Saves are five steps apart: each copy takes 50 ms, of which 10 ms per step are allowed.
    assert sum(loop.step(step).memory_due for step in range(30, 40)) == 2


def test_the_state_that_an_attempt_started_from_is_kept_until_its_successor_is(loops: Loops) -> None:
    memory = MemoryStore()
    for step in (3, 4, 7):
        save(memory, step)
    memory.create(f"{CHECKPOINT_FOLDER}/step-00000008/attempt-0001/rank-00001-of-00002.safetensors", [b"torn"])
    loop = loops(memory, start=4)
    assert committed_steps(memory) == (4,)
    assert {key.split("/")[1] for key in memory.list(CHECKPOINT_FOLDER)} == {"step-00000004"}
    loop.step(5)
    assert committed_steps(memory) == (5,)
    assert read_lineage(memory).started_from == {2: 4}


def test_an_agent_that_answers_again_is_marked_and_cleared_of_what_it_missed(loops: Loops) -> None:
    memory = MemoryStore()
    loop = loops(memory, start=4)
    loop.steps(5, 6)
    for folder in ("attempts", CHECKPOINT_FOLDER):
        memory.delete(folder)
    for step in (3, 5):
        save(memory, step, attempt=1)
    assert committed_steps(memory) == (3, 5) and read_lineage(memory).started_from == {}
    memory.num_readmitted += 1  # type: ignore[attr-defined]
    loop.step(7)
    assert committed_steps(memory) == (7,)
    assert read_lineage(memory).started_from == {2: 4}
    save(memory, 3, attempt=2)
    loop.step(8)
    assert committed_steps(memory) == (3, 8)


def test_room_is_made_where_an_agent_has_missed_what_was_dropped(loops: Loops) -> None:
    class Full(MemoryStore):
        """A store with capacity for two states."""

        def create(self, key: str, chunks: Iterable[Buffer]) -> int:
            if len({key.split("/")[1] for key in self.list(CHECKPOINT_FOLDER)} - {key.split("/")[1]}) >= 2:
                raise OSError(errno.ENOSPC, "the peer memory of this node is full")
            return super().create(key, chunks)

    memory = Full()
    loop = loops(memory, start=4)
    loop.steps(5, 6)
    for step in (3, 9):
        MemoryStore.create(
            memory, f"{CHECKPOINT_FOLDER}/step-{step:08d}/attempt-0002/rank-00000-of-00001.safetensors", []
        )
    loop.steps(7, 8)
    assert loop.kept() == [5, 6, 8]
    assert committed_steps(memory) == (8,)


def test_what_a_newer_attempt_keeps_meanwhile_is_not_dropped(loops: Loops) -> None:
    class Overtaken(MemoryStore):
        """A store that a newer attempt takes over just after an older attempt has listed the claims."""

        is_due = False

        def list(self, prefix: str) -> list[str]:
            found = super().list(prefix)
            if self.is_due and prefix == ATTEMPT_FOLDER:
                self.is_due = False
                assert claim_attempt(self, 3)
                save(self, 12, attempt=3)
            return found

    memory = Overtaken()
    loop = loops(memory, start=4)
    loop.steps(5, 6)
    memory.is_due = True
    loop.keeper._on_failed(7, CheckpointError("full"))
    assert committed_steps(memory) == (6, 12)


def test_a_dead_attempt_changes_nothing_of_the_next(loops: Loops, said: pytest.LogCaptureFixture) -> None:
    memory = MemoryStore()
    loop = loops(memory)
    loop.steps(1, 2)
    assert claim_attempt(memory, 3)
    save(memory, 9, attempt=3)
    for step in (3, 4, 5):
        assert not loop.step(step).memory_due or step == 3
    assert loop.kept() == [2]
    assert committed_steps(memory) == (2, 9)
    assert not loop.keeper.has_saved
    (warning,) = [record.message for record in said.records if record.levelno == logging.WARNING]
    assert "the checkpoint of step 3 is not committed" in warning


def test_failures_are_reported_once_and_retried_more_rarely(loops: Loops, said: pytest.LogCaptureFixture) -> None:
    memory = full()
    loop = loops(memory)
    due = [step for step in range(1, 41) if loop.step(step).memory_due and step > 1]
    assert due == [2, 3, 5, 9, 17, 33]
    warnings = [record.message for record in said.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "step 2 " in warnings[0] and "is full" in warnings[0]
    memory._fail_at = 0
    for step in range(41, 70):
        loop.step(step)
    assert loop.kept()[-3:] == [67, 68, 69]


@pytest.mark.parametrize("dies", [True, False], ids=["with another rank", "without room"])
def test_the_previous_state_survives_a_failed_save(loops: Loops, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    memory = full(fail_at=0)
    loop = loops(memory)
    loop.steps(1, 2, 3)

    def gather(_: SingleRankMessenger, value: object) -> list[object]:
        raise RuntimeError("Connection closed by peer")

    if dies:
        monkeypatch.setattr(SingleRankMessenger, "gather", gather)
    else:
        memory._fail_at = 1
    loop.step(4)
    assert loop.kept() == [2, 3] and committed_steps(memory) == (3,)
    assert loop.keeper.has_saved == dies
    loop.step(5)
    assert not loop.keeper.has_saved


def test_without_answers_the_attempt_trains_without_peer_memory(loops: Loops, said: pytest.LogCaptureFixture) -> None:
    loop = loops(FaultyStore(MemoryStore(), fail_at=1, error=OSError(113, "no route"), lasting=True))
    assert not any(loop.step(step).memory_due for step in range(1, 10))
    assert "this attempt does not use peer memory: [Errno 113] no route" in said.text


def test_a_rank_without_memory_for_a_copy_keeps_all_ranks_from_taking_one(
    loops: Loops, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    loop = loops()

    def refuse(*_: Any) -> None:
        raise CheckpointError("no 9.0 GiB of host memory for a copy")

    assert loop.keeper._staging is not None
    reserve = loop.keeper._staging.reserve
    monkeypatch.setattr(loop.keeper._staging, "reserve", refuse)
    assert all(loop.step(step).memory_busy for step in range(1, 5))
    loop.clock.time += module._AGAIN_S
    assert all(loop.step(step).memory_busy for step in range(5, 8))
    assert said.text.count("no 9.0 GiB of host memory") == 1
    monkeypatch.setattr(loop.keeper._staging, "reserve", reserve)
    loop.clock.time += module._AGAIN_S
    assert loop.step(8).memory_busy and not loop.step(9).memory_busy
    assert loop.kept() == [9]


@pytest.fixture
def near() -> Iterator[tuple[PeerMemoryAgent, PeerMemoryStore]]:
    agent = PeerMemoryAgent("token")
    store = PeerMemoryStore(AgentAddresses(agents={"node": agent.start()}, node="node", partner=None, token="token"))
    yield agent, store
    store.close()
    agent.close()


def lent_parts(loop: Loop) -> dict[int, int]:
    assert loop.keeper._staging is not None
    return {number: parts[0].tensor.data_ptr() for number, (_, parts) in loop.keeper._staging._parts.items()}


def test_lent_states_alternate_between_two_buffers(loops: Loops, near: tuple[PeerMemoryAgent, PeerMemoryStore]) -> None:
    agent, store = near
    loop = loops(store, lent=store.lent_memory())
    sizes, addresses = [], []
    for step in range(1, 8):
        loop.step(step)
        sizes.append(agent.files.num_bytes)
        addresses.append(lent_parts(loop))
        assert list(committed_steps(store)) == ([step] if step > 1 else [])
    assert loop.kept() == [2, 3, 4, 5, 6, 7]
    assert [len(one) for one in addresses] == [1, 2, 2, 2, 2, 2, 2] and addresses[1] == addresses[-1]
    assert max(sizes[1:]) - min(sizes[1:]) < 100
