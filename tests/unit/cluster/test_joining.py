"""Workers that join a run that trains, with actors that the test plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from ray_ulysses.cluster import scaling
from ray_ulysses.cluster.capacity import Demand
from ray_ulysses.cluster.scaling import JoiningWorkers, Seat
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.elastic.reform import Group, Place, Supervised
from ray_ulysses.supervision.supervisor import Announcement

WANTED = WorkerRange(least=2, most=8, sp_size=2)
DEMAND = Demand(wanted=WANTED, cpus=1.0, gpus=0, data_cpus=0.0)
ANNOUNCEMENT = Announcement(host="127.0.0.1", port=1, token="t", group=1)


@dataclass
class Cluster:
    """Ray, as far as workers that join need it: answers are lists, empty while there is none."""

    actors: list[Actor] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    def remote(self, *classes: Any, **options: Any) -> Any:
        return self if classes else lambda _: _Options(self)

    def wait(self, asked: Sequence[list[Any]], num_returns: int = 1, timeout: float = 0) -> Any:
        return [one for one in asked if one], [one for one in asked if not one]

    def get(self, answers: Sequence[list[Any]]) -> list[Any]:
        for (answer,) in answers:
            if isinstance(answer, Exception):
                raise answer
        return [answer for (answer,) in answers]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.node)


@dataclass
class _Options:
    cluster: Cluster

    def options(self, label_selector: dict[str, str] | None = None, scheduling_strategy: str = "") -> Any:
        actor = Actor(node=next(iter((label_selector or {"": scheduling_strategy}).values())))
        self.cluster.actors.append(actor)
        return SimpleNamespace(remote=lambda: actor)


class Actor:
    """An actor whose answers the test gives."""

    def __init__(self, node: str) -> None:
        self.node, self.gpu_answer, self.end, self.supervised = node, [[]], [], ()  # type: tuple[Any, ...]
        self.gpus = SimpleNamespace(remote=lambda: self.gpu_answer)
        self.supervise = SimpleNamespace(remote=self._supervise)

    def _supervise(self, *arguments: Any) -> list[Any]:
        self.supervised = arguments
        return self.end


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(scaling, "ray", cluster)
    return cluster


def group(*nodes: str, members: int = 2) -> Group:
    """Workers by number on their nodes; a dot stands for one that has not joined."""
    places = [None if node == "." else Place(node=node, host=node, port=1) for node in nodes]
    workers = {number: Supervised(place=place) for number, place in enumerate(places)}
    return Group(wanted=WANTED, workers=workers, phase="training", members=tuple(range(members)))


def joiners(seats: dict[int, Seat] | None = None) -> JoiningWorkers:
    one = JoiningWorkers({"session": "s"}, DEMAND, patience_s=300.0)
    one.begin(ANNOUNCEMENT, seats or {})
    return one


def test_workers_supervise_once_all_have_their_places_and_join_together(ray: Cluster) -> None:
    one, before = joiners(), group("a", "b")
    one.start(before, {"b": 1, "c": 1}, 0.0)
    assert one.beside == {"b": 1, "c": 1} and one.are_awaited
    ray.actors[1].gpu_answer.clear()
    assert not one.have_joined(before, 1.0) and not ray.actors[0].supervised
    ray.actors[1].gpu_answer.append([])
    assert not one.have_joined(before, 2.0)
    # Number and local rank follow those of the workers that are there.
    assert [actor.supervised[2:4] for actor in ray.actors] == [(2, 1), (3, 0)]
    assert not one.have_joined(group("a", "b", "b", "."), 3.0)
    assert one.have_joined(group("a", "b", "b", "c"), 4.0) and not one.are_awaited and not ray.killed


@pytest.mark.parametrize("way", ["time", "death"])
def test_workers_that_do_not_come_are_ended_but_not_those_that_train_already(ray: Cluster, way: str) -> None:
    one, before = joiners(), group("a", "a")
    one.start(before, {"b": 2, "c": 2}, 0.0)
    one.have_joined(before, 1.0)
    if way == "death":
        ray.actors[3].end.append(ActorDiedError())
    # A fault has made members of the first two.
    present = group("a", "a", "b", "b", ".", ".", members=4)
    assert not one.have_joined(present, 301.0 if way == "time" else 2.0)
    assert ray.killed == ["c", "c"] and one.beside == {"b": 2} and not one.are_awaited
    # One that was cut off may come back under its number.
    one.start(present, {"d": 1}, 400.0)
    one.have_joined(present, 401.0)
    assert ray.actors[-1].supervised[2] == 6


def test_lost_workers_and_those_of_a_group_that_ended_are_forgotten(ray: Cluster) -> None:
    one = joiners()
    one.start(group("a", "a"), {"b": 2}, 0.0)
    assert not one.have_joined(group("a", "a"), 1.0)
    assert one.have_joined(group("a", "a", "b", "b"), 2.0)
    one.forget({0, 2})
    assert one.beside == {"b": 1} and ray.killed == ["b"]
    one.start(group("a", "a", "b", "b"), {"c": 2}, 3.0)
    one.end()
    assert sorted(ray.killed) == ["b", "b", "c", "c"] and one.beside == {} and not one.are_awaited


def test_the_place_of_a_worker_that_is_lost_is_taken_by_one_that_joins(ray: Cluster) -> None:
    """Ray Train's group keeps it reserved, and a process that is only stopped keeps it occupied until it is killed."""
    seats = {
        rank: Seat(node=node, actor=Actor(f"ray {rank}"), strategy=f"seat {rank}") for rank, node in enumerate("ab")
    }
    one, present = joiners(seats), group("a", "b")
    one.forget({1})
    one.forget({1})
    assert ray.killed == ["ray 1"] and one.vacant == {"b": 1} and one.beside == {}
    one.start(present, {"b": 2}, 0.0)
    assert [actor.node for actor in ray.actors] == ["seat 1", "b"]
    assert one.beside == {"b": 1} and not one.vacant
    one.have_joined(present, 1.0)
    assert one.have_joined(group("a", "b", "b", "b"), 2.0)
    # The same place again, for the one that takes it after this one.
    one.forget({1, 2})
    assert ray.killed == ["ray 1", "seat 1"] and one.vacant == {"b": 1} and one.beside == {"b": 1}
    one.end()
    assert ray.killed == ["ray 1", "seat 1", "b"] and not one.vacant, "Ray Train ends its own workers"
