"""The number of workers follows the nodes: what Ray Train is told, on nodes and a clock that the test sets."""

from __future__ import annotations

import inspect
import socket
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import ControllerError

from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster import controller, scaling
from ray_ulysses.cluster.controller import SupervisedController, WorkerGroupWatch
from ray_ulysses.cluster.failures import FailureJudge, is_resize, lacks_room
from ray_ulysses.cluster.scaling import WorkerScaling, reachable
from ray_ulysses.elastic import reform
from ray_ulysses.elastic.causes import RankError
from ray_ulysses.elastic.placement import LEAVE_S, SETTLE_S, WorkerRange
from ray_ulysses.run.requests import clear_stop, exclude_nodes, request_stop, stop_requested
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.tracking.events import RESIZED
from ray_ulysses.tracking.history import Pace
from tests.distributed.run_case import make_config

SESSION = "command"
PER_WORKER = {"CPU": 1.0, "GPU": 0.0}


class Nodes:
    """A cluster's nodes and a clock; installed in place of Ray's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, **cpus: float) -> None:
        self.cpus, self.free, self.time_s, self.run_dir = dict(cpus), dict(cpus), 0.0, run_dir
        self.draining: dict[str, float | None] = {}
        monkeypatch.setattr(scaling, "draining_nodes", lambda: self.draining)
        monkeypatch.setattr(scaling, "steady_nodes", self._steady)
        monkeypatch.setattr(scaling, "reachable", lambda nodes: dict(nodes))
        monkeypatch.setattr(scaling.time, "sleep", self._sleep)
        monkeypatch.setattr(scaling.state.state, "available_resources_per_node", lambda: {
            node: {"CPU": cpus} for node, cpus in self.free.items()
        })  # fmt: skip

    def _steady(self) -> dict[str, Any]:
        return {
            node: {"NodeManagerAddress": f"host-{node}", "Resources": {"CPU": cpus}} for node, cpus in self.cpus.items()
        }

    def _sleep(self, seconds: float) -> None:
        self.time_s += seconds

    def now(self) -> float:
        raise AssertionError("durations are measured by the clock that never goes back")

    def monotonic(self) -> float:
        return self.time_s


def alive(*nodes: str) -> dict[int, reform.Supervised]:
    """Return workers on these nodes; a capital letter stands for one that is lost."""
    places = [reform.Place(node=node.lower(), host="h", port=1) for node in nodes]
    return {
        number: reform.Supervised(place=place, is_lost=node.isupper())
        for number, (node, place) in enumerate(zip(nodes, places, strict=True))
    }


class Members:
    """A coordinator whose workers train where they were placed, until the test says otherwise."""

    def __init__(self) -> None:
        self.group: Any = None
        self.posted: list[reform.Event] = []
        self.announced: dict[str, float | None] = {}

    def begin(self, placed: dict[str, int]) -> None:
        self.posted = []
        self.group = SimpleNamespace(
            phase="training",
            num_placed=placed,
            status=None,
            workers=alive(*Counter(placed).elements()),
            unusable=frozenset(),
            silent=frozenset(),
            members=range(sum(placed.values())),
        )

    def announce(self, draining: dict[str, float | None]) -> None:
        self.announced = draining

    def post(self, event: reform.Event) -> None:
        self.posted.append(event)
        if isinstance(event, reform.NodesUnusable):
            self.group.unusable = event.nodes


class Joining:
    """Workers that join: they are there when the test says so."""

    def __init__(self) -> None:
        self.placed: dict[str, int] = {}
        self.vacant = Counter[str]()
        self.are_awaited = self.are_there = False

    @property
    def beside(self) -> Counter[str]:
        return Counter(self.placed) - self.vacant

    def begin(self, announcement: Any, seats: Any) -> None:
        pass

    def end(self) -> None:
        self.placed, self.are_awaited = {}, False

    def forget(self, lost: set[int]) -> None:
        pass

    def start(self, group: Any, places: dict[str, int], now: float) -> None:
        self.placed, self.are_awaited = dict(places), True

    def have_joined(self, group: Any, now: float) -> bool:
        self.are_awaited = not self.are_there
        return self.are_there


def policy_on(nodes: Nodes, tmp_path: Path, least: int = 2, most: int = 4) -> WorkerScaling:
    config = make_config(tmp_path, tmp_path, cluster__workers={"min": least, "max": most}, parallel__sp_size=2)
    config.run_dir.mkdir(exist_ok=True)
    of_ray: Any = ScalingConfig(num_workers=most, resources_per_worker={"CPU": 1.0})
    members: Any = Members()
    policy = WorkerScaling(
        resolve_run(config), {"session": SESSION}, of_ray, members, lambda addresses: None, clock=nodes
    )
    policy._joining = Joining()  # type: ignore[assignment]
    policy._maybe_send_resource_request = lambda: None  # type: ignore[method-assign]
    return policy


def start(policy: WorkerScaling, nodes: Nodes, *, starts: bool = True) -> list[str] | None:
    """Ask until workers are started; return the node of each of them, or None if that takes for ever."""
    for _ in range(30):
        decision = policy.make_decision_for_non_running_worker_group()
        if isinstance(decision, ResizeDecision):
            placed = [next(iter(selector.values())) for selector in policy.selectors()]
            assert len(placed) == decision.num_workers
            if starts:
                announcement: Any = None
                policy.begin(announcement, {})
                members: Any = policy._coordinator
                members.begin({node: placed.count(node) for node in placed})
                for node in placed:
                    nodes.free[node] -= 1
            return placed
        assert isinstance(decision, NoopDecision)
    return None


def poll(policy: WorkerScaling, *statuses: WorkerStatus) -> WorkerGroupPollStatus:
    status = WorkerGroupPollStatus(worker_statuses=dict(enumerate(statuses)))
    policy.polled(status)
    return status


RUNNING = WorkerStatus(running=True)


def test_ray_train_has_the_seams_that_are_used() -> None:
    """A canary of Ray Train 2.60: what `cluster.scaling` overrides and sets."""
    assert ScalingPolicy.__abstractmethods__ == {
        "make_decision_for_non_running_worker_group", "make_decision_for_running_worker_group",
        "_get_num_workers_for_resource_request",
    }  # fmt: skip
    assert not inspect.isabstract(WorkerScaling)
    assert issubclass(SupervisedController, TrainController)


def test_workers_are_put_on_the_chosen_nodes_in_the_order_of_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=1, b=3, c=2)
    assert start(policy_on(nodes, tmp_path), nodes) == ["b", "b", "c", "c"]


def test_a_lost_node_leaves_a_smaller_run_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path)
    assert start(policy, nodes) == ["a", "a", "b", "b"]
    del nodes.cpus["b"], nodes.free["b"]
    # The workers that are left still hold their places when Ray Train asks.
    assert start(policy, nodes) == ["a", "a"]
    assert nodes.time_s == 0.0


def test_too_few_places_start_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=1)
    policy = policy_on(nodes, tmp_path)
    assert start(policy, nodes) is None
    nodes.cpus["b"] = nodes.free["b"] = 2
    assert start(policy, nodes) == ["b", "b"]


def test_a_run_grows_onto_a_node_that_joins_once_the_workers_there_are_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where growth pays: the others train until then, and Ray restarts nothing."""
    nodes = Nodes(monkeypatch, tmp_path, a=2)
    policy = policy_on(nodes, tmp_path)
    run_dir = policy._config.run_dir
    assert start(policy, nodes) == ["a", "a"]
    nodes.cpus["b"] = nodes.free["b"] = 2
    pace = Pace(seconds_left=100.0, start_s=30.0)
    monkeypatch.setattr(scaling, "run_pace", lambda _: pace)
    for _ in range(2):
        poll(policy, RUNNING, RUNNING)
        nodes.time_s += SETTLE_S
    assert stop_requested(run_dir, SESSION) is None, "half of 100 s is not ten times 30 s"
    pace = Pace(seconds_left=1_000.0, start_s=30.0)
    nodes.time_s += policy._config.elastic.grow_interval_s
    members, joining = policy._coordinator, policy._joining
    used: list[Any] = []
    policy._use_nodes = used.append
    for _ in range(4):
        assert stop_requested(run_dir, SESSION) is None
        poll(policy, RUNNING, RUNNING)
        nodes.time_s += SETTLE_S
    assert joining.placed == {"b": 2} and used == [{"b": "host-b"}] and not members.posted
    joining.are_there = True
    poll(policy, RUNNING, RUNNING)
    assert stop_requested(run_dir, SESSION) == "resize" and members.posted == [reform.MoveAsked()]


def test_workers_that_are_lost_are_replaced_where_they_were_while_the_others_train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray Train's group keeps their places; to start the whole group again takes most of a minute."""
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path)
    run_dir = policy._config.run_dir
    assert start(policy, nodes) == ["a", "a", "b", "b"]
    members: Any = policy._coordinator
    members.group.num_placed, members.group.members = {"a": 2}, range(2)
    # One of a whole group's two, whose other is there and trains no more; another's place is on a node that is gone.
    members.group.workers = alive("a", "a", "B", "b", "C")
    policy._joining.vacant = Counter(b=1, c=1)
    monkeypatch.setattr(scaling, "run_pace", lambda _: Pace(seconds_left=1_000.0, start_s=30.0))
    for _ in range(2):
        poll(policy, RUNNING, RUNNING)
        nodes.time_s += SETTLE_S
    assert policy._joining.placed == {"b": 1} and stop_requested(run_dir, SESSION) is None
    policy._joining.are_there = True
    poll(policy, RUNNING, RUNNING)
    assert stop_requested(run_dir, SESSION) == "resize" and members.posted == [reform.MoveAsked()]


def test_workers_that_train_no_more_and_suffice_to_grow_are_members_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path)
    assert start(policy, nodes) == ["a", "a", "b", "b"]
    members: Any = policy._coordinator
    members.group.num_placed, members.group.members = {"a": 2}, range(2)
    monkeypatch.setattr(scaling, "run_pace", lambda _: Pace(seconds_left=1_000.0, start_s=30.0))
    for _ in range(2):
        assert not members.posted
        poll(policy, RUNNING, RUNNING)
        nodes.time_s += SETTLE_S
    assert members.posted == [reform.MoveAsked()] and not policy._joining.placed


def test_a_resize_that_all_have_ended_for_restarts_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the workers that were left after it were too few, say."""
    nodes = Nodes(monkeypatch, tmp_path, a=2)
    policy = policy_on(nodes, tmp_path)
    assert start(policy, nodes) == ["a", "a"]
    request_stop(policy._config.run_dir, SESSION, "resize")
    assert not poll(policy, RUNNING, WorkerStatus(running=False, return_value=RESIZED)).errors, "not before all ended"
    ended = poll(policy, *(WorkerStatus(running=False, return_value=RESIZED) for _ in range(2)))
    assert is_resize(ended.get_worker_group_error())
    policy.end()
    nodes.free = dict(nodes.cpus)
    assert start(policy, nodes) == ["a", "a"]
    assert stop_requested(policy._config.run_dir, SESSION) is None, "the next attempt is not to stop"


def test_a_run_whose_groups_span_nodes_grows_to_whole_groups_on_nodes_that_have_room_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two workers that join would be a whole group on each of two nodes, beside workers that then train no more."""
    nodes = Nodes(monkeypatch, tmp_path, a=1, b=1, c=1, d=1)
    policy = policy_on(nodes, tmp_path, most=6)
    assert start(policy, nodes) == ["a", "b", "c", "d"]
    nodes.cpus, nodes.free = dict.fromkeys("abcd", 2), dict.fromkeys("abcd", 1)
    monkeypatch.setattr(scaling, "run_pace", lambda _: Pace(seconds_left=10_000.0, start_s=30.0))
    for _ in range(2):
        poll(policy, RUNNING)
        nodes.time_s += SETTLE_S
    assert (
        policy._joining.placed == {"a": 1, "b": 1, "c": 1} and stop_requested(policy._config.run_dir, SESSION) is None
    )


def test_a_run_whose_groups_are_larger_than_a_node_grows_onto_nodes_that_join(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=1, b=1)
    policy = policy_on(nodes, tmp_path, most=6)
    assert start(policy, nodes) == ["a", "b"]
    nodes.cpus |= {"c": 1, "d": 1}
    nodes.free |= {"c": 1, "d": 1}
    monkeypatch.setattr(scaling, "run_pace", lambda _: Pace(seconds_left=1_000.0, start_s=30.0))
    for _ in range(2):
        poll(policy, RUNNING)
        nodes.time_s += SETTLE_S
    assert policy._joining.placed == {"c": 1, "d": 1} and stop_requested(policy._config.run_dir, SESSION) is None


def test_a_draining_node_is_left_whatever_it_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path)
    start(policy, nodes)
    monkeypatch.setattr(scaling, "run_pace", lambda _: pytest.fail("growth is not the question"))
    del nodes.cpus["b"]
    for _ in range(2):
        assert stop_requested(policy._config.run_dir, SESSION) is None
        poll(policy, RUNNING)
        nodes.time_s += SETTLE_S
    assert stop_requested(policy._config.run_dir, SESSION) == "resize"
    members: Any = policy._coordinator
    assert members.posted == [reform.NodesUnusable(nodes=frozenset({"b"})), reform.MoveAsked()]


def test_a_node_that_the_run_is_to_do_without_is_left_as_one_that_is_drained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path)
    start(policy, nodes)
    exclude_nodes(policy._config.run_dir, SESSION, {"b": 2.5})
    for _ in range(2):
        assert stop_requested(policy._config.run_dir, SESSION) is None
        poll(policy, RUNNING)
        nodes.time_s += SETTLE_S
    assert stop_requested(policy._config.run_dir, SESSION) == "resize"
    members: Any = policy._coordinator
    assert members.posted == [reform.NodesUnusable(nodes=frozenset({"b"})), reform.MoveAsked()]
    # And no worker is started there again.
    nodes.free = dict(nodes.cpus)
    policy._placed = {}
    assert start(policy, nodes) == ["a", "a"]


def test_a_node_whose_gpu_has_failed_gets_workers_only_where_the_others_are_too_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=8)
    policy = policy_on(nodes, tmp_path, most=8)
    policy.leave_out(frozenset({"b"}))
    # It was slow before.
    exclude_nodes(policy._config.run_dir, SESSION, {"b": 1.5})
    assert start(policy, nodes, starts=False) == ["a", "a"]
    nodes.cpus = nodes.free = {"b": 8.0}
    assert start(policy, nodes) == ["b"] * 8


def test_a_node_that_was_left_is_not_taken_back_when_another_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2, c=2, d=2)
    policy = policy_on(nodes, tmp_path, most=8)
    start(policy, nodes)
    members: Any = policy._coordinator
    for slow in ("b", "d"):
        exclude_nodes(policy._config.run_dir, SESSION, {slow: 5.0})
        for _ in range(2):
            poll(policy, RUNNING)
            nodes.time_s += SETTLE_S
        del members.group.num_placed[slow]
        clear_stop(policy._config.run_dir)
    assert members.group.unusable == {"b", "d"}
    moves = len(members.posted)
    for _ in range(4):
        poll(policy, RUNNING)
        nodes.time_s += SETTLE_S
    assert len(members.posted) == moves


def test_a_node_that_others_use_replaces_no_slow_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2, c=2)
    nodes.free["c"] = 0
    policy = policy_on(nodes, tmp_path, least=4)
    policy._config.run_dir.mkdir(exist_ok=True)
    exclude_nodes(policy._config.run_dir, SESSION, {"b": 9.0})
    assert start(policy, nodes) == ["a", "a", "b", "b"]


def test_a_slow_node_is_better_than_too_few_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path, least=4)
    start(policy, nodes)
    exclude_nodes(policy._config.run_dir, SESSION, {"b": 2.5})
    for _ in range(3):
        poll(policy, RUNNING)
        nodes.time_s += SETTLE_S
    assert stop_requested(policy._config.run_dir, SESSION) is None
    members: Any = policy._coordinator
    assert not members.posted
    nodes.free = dict(nodes.cpus)
    policy._placed = {}
    assert start(policy, nodes) == ["a", "a", "b", "b"]


def test_a_node_that_goes_before_the_others_have_left_it_was_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its loss is not charged to the run then, however short the notice was."""
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path)
    start(policy, nodes)
    members: Any = policy._coordinator
    del nodes.cpus["b"]
    poll(policy, RUNNING)
    assert not members.posted, "a node that is lost without notice was not announced"
    nodes.draining, nodes.time_s = {"b": 70.0}, scaling._LOOK_EVERY_S
    poll(policy, RUNNING)
    assert members.posted == [reform.NodesUnusable(nodes=frozenset({"b"}), draining=frozenset({"b"}))]
    assert stop_requested(policy._config.run_dir, SESSION) is None


def test_a_group_that_is_short_of_workers_gets_those_that_are_missing_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy, used = policy_on(nodes, tmp_path, least=4), list[Any]()
    assert start(policy, nodes) == ["a", "a", "b", "b"]
    members, joining = policy._coordinator, policy._joining
    policy._use_nodes = used.append
    members.group.phase, members.group.workers = "short", alive("a", "a", "b", "B")
    joining.vacant = Counter(b=1)
    for _ in range(3):
        poll(policy, RUNNING)
        nodes.time_s += 1.0
    assert joining.placed == {"b": 1} and used == [{"b": "host-b"}] and not members.posted
    # They have failed, or don't suffice.
    joining.are_there, joining.vacant = True, Counter()
    poll(policy, RUNNING)
    assert members.posted == [reform.NoReplacement()]


def test_missing_workers_start_on_a_node_that_fell_silent_only_where_no_other_has_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stopped node takes connections, and a worker that is placed there starts when it goes on, if ever."""
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2, c=2)
    policy = policy_on(nodes, tmp_path, least=4)
    start(policy, nodes)
    members, joining = policy._coordinator, policy._joining
    members.group.phase, members.group.workers, members.group.silent = "short", alive("a", "a", "B", "B"), {"b"}
    nodes.free, joining.vacant = {"a": 0, "b": 0, "c": 2}, Counter(b=2)
    poll(policy, RUNNING)
    assert joining.placed == {"c": 2} and not members.posted
    joining.are_awaited, nodes.free["c"] = False, 0
    nodes.time_s += 1.0
    poll(policy, RUNNING)
    assert joining.placed == {"b": 2} and not members.posted


@pytest.mark.parametrize("has_spare", [False, True])
def test_a_fixed_number_of_workers_leaves_a_drained_node_for_a_spare_one_and_saves_on_it_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_spare: bool
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path, least=4)
    start(policy, nodes)
    members, joining = policy._coordinator, policy._joining
    nodes.draining = {"b": 70.0}
    del nodes.cpus["b"]
    if has_spare:
        nodes.cpus["c"] = nodes.free["c"] = 2
    for _ in range(3):
        poll(policy, RUNNING)
        nodes.time_s += LEAVE_S
        assert stop_requested(policy._config.run_dir, SESSION) is None
    assert members.announced == {"b": 70.0}, "whose workers save before that"
    assert members.posted[0] == reform.NodesUnusable(nodes=frozenset({"b"}), draining=frozenset({"b"}))
    assert joining.placed == ({"c": 2} if has_spare else {})


def test_a_group_that_is_short_of_workers_hears_where_none_can_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path, least=4)
    start(policy, nodes)
    members = policy._coordinator
    members.group.phase, members.group.workers = "short", alive("a", "a", "B", "B")
    policy._joining.vacant = Counter(b=2)
    del nodes.cpus["b"], nodes.free["b"]
    poll(policy, RUNNING)
    assert members.posted == [reform.NoReplacement()] and not policy._joining.placed


def test_members_on_a_draining_node_train_on_until_enough_others_have_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To start Ray Train's group on the other node instead takes most of a minute, in which nobody trains."""
    nodes = Nodes(monkeypatch, tmp_path, a=2)
    policy = policy_on(nodes, tmp_path)
    assert start(policy, nodes) == ["a", "a"]
    members, joining = policy._coordinator, policy._joining
    members.group.workers = alive("a", "a")
    nodes.cpus, nodes.free, nodes.draining = {"b": 2, "c": 2}, {"b": 2, "c": 2}, {"a": None}
    # Of the end of that one the cluster's head does not know yet.
    monkeypatch.setattr(scaling, "reachable", lambda found: {node: found[node] for node in found if node != "b"})
    for _ in range(5):
        poll(policy, RUNNING)
        nodes.time_s += LEAVE_S
        assert stop_requested(policy._config.run_dir, SESSION) is None
    assert joining.placed == {"c": 2}
    joining.are_there, members.group.workers = True, alive("a", "a", "c", "c")
    for _ in range(2):
        poll(policy, RUNNING)
        nodes.time_s += LEAVE_S
    assert stop_requested(policy._config.run_dir, SESSION) == "resize" and members.posted[-1] == reform.MoveAsked()


def test_workers_that_do_not_train_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their coordinator replaces a generation that failed by itself."""
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path)
    start(policy, nodes)
    members: Any = policy._coordinator
    members.group.phase = "judging"
    del nodes.cpus["b"]
    for _ in range(3):
        poll(policy, RUNNING)
        nodes.time_s += SETTLE_S
    assert stop_requested(policy._config.run_dir, SESSION) is None
    # It continues on the node that is left: nothing leaves.
    members.group = SimpleNamespace(
        phase="training", status=None, num_placed={"a": 2}, workers={}, unusable=frozenset()
    )
    for _ in range(3):
        poll(policy, RUNNING)
        nodes.time_s += SETTLE_S
    assert stop_requested(policy._config.run_dir, SESSION) is None and not members.posted


def test_a_request_of_the_user_is_never_replaced_or_cleared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path)
    start(policy, nodes)
    run_dir = policy._config.run_dir
    request_stop(run_dir, SESSION)
    del nodes.cpus["b"]
    for _ in range(3):
        poll(policy, RUNNING)
        nodes.time_s += SETTLE_S
    assert stop_requested(run_dir, SESSION) == "stop"
    assert start(policy, nodes) == ["a", "a"] and stop_requested(run_dir, SESSION) == "stop"


def test_workers_that_finish_or_fail_are_left_to_ray_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2)
    policy = policy_on(nodes, tmp_path)
    start(policy, nodes)
    assert not poll(policy, *(WorkerStatus(running=False, return_value="finished") for _ in range(2))).errors
    failure = RuntimeError("boom")
    status = poll(policy, WorkerStatus(running=False, return_value=RESIZED), WorkerStatus(running=False, error=failure))
    assert status.errors[1] is failure
    assert not is_resize(status.get_worker_group_error())


def test_a_resize_and_a_lack_of_room_are_not_judged_as_failures(tmp_path: Path) -> None:
    config = make_config(tmp_path, tmp_path, cluster__workers={"min": 2, "max": 4})
    book: Any = SimpleNamespace(config=config)
    statuses = {0: WorkerStatus(running=False, error=scaling.Resized("again"))}
    error = WorkerGroupPollStatus(worker_statuses=statuses).get_worker_group_error()
    assert FailureJudge(book).make_decision(error) is FailureDecision.RETRY
    timeout = ControllerError(WorkerGroupStartupTimeoutError(num_workers=2))
    assert lacks_room(timeout) and FailureJudge(book).make_decision(timeout) is FailureDecision.RETRY
    assert not lacks_room(ControllerError(ValueError())) and not is_resize(timeout)


def test_places_of_workers_that_could_not_start_are_counted_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2, b=2)
    policy = policy_on(nodes, tmp_path)
    assert start(policy, nodes, starts=False) == ["a", "a", "b", "b"]
    del nodes.cpus["b"], nodes.free["b"]
    assert start(policy, nodes) == ["a", "a"]


def test_a_head_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2)
    policy = policy_on(nodes, tmp_path)

    def away() -> dict[str, Any]:
        if nodes.time_s < 3.0:
            raise ConnectionError("the head is away")
        return nodes._steady()

    monkeypatch.setattr(scaling, "steady_nodes", away)
    assert start(policy, nodes) == ["a", "a"] and nodes.time_s == 3.0


def test_a_node_whose_ray_takes_no_connection_is_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.create_server(("127.0.0.1", 0)) as dead:
        ports = {"alive": alive.getsockname()[1], "dead": dead.getsockname()[1]}
        dead.close()
        entries = {node: {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port} for node, port in ports.items()}
        assert list(reachable(entries)) == ["alive"]
    assert reachable({}) == {}


GONE = RuntimeError("its process is gone")


@pytest.mark.parametrize(
    ("error", "phase", "is_lost", "running"),
    [
        (GONE, "training", False, True), (GONE, "training", True, False), (GONE, "stopping", True, True),
        (GONE, "judging", True, True), (GONE, "ended", False, False), (GONE, "ended", True, False),
        # Ray knows nothing for minutes of one whose supervisor is stopped.
        (None, "training", True, True), (None, "stopping", True, True), (None, "ended", True, False),
        (None, "ended", False, True),
    ],
)  # fmt: skip
def test_a_worker_that_failed_counts_as_ended_only_once_that_is_decided(
    error: Exception | None, phase: str, is_lost: bool, running: bool
) -> None:
    """One that dies after the attempt has ended well must not keep Ray waiting for ever."""
    watch: Any = WorkerGroupWatch.__new__(WorkerGroupWatch)
    watch._memory, watch._addresses, watch._gone = SimpleNamespace(keep=lambda nodes: None), {}, frozenset()
    watch.scaling = SimpleNamespace(polled=lambda status: None)
    members: Any = Members()
    workers = {0: SimpleNamespace(is_lost=False), 1: SimpleNamespace(is_lost=is_lost)}
    members.group = SimpleNamespace(phase=phase, gave_up=False, workers=workers)
    watch.coordinator = members
    status = WorkerStatus(running=True, error=error)
    watch.after_worker_group_poll_status(
        WorkerGroupPollStatus(worker_statuses={0: WorkerStatus(running=phase != "ended"), 1: status})
    )
    assert (status.running, status.error) == (running, None)
    assert bool(members.posted) is (error is not None and not is_lost)


def test_after_a_failure_slow_nodes_stay_left_and_one_that_was_out_of_reach_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch: Any = WorkerGroupWatch.__new__(WorkerGroupWatch)
    watch._addresses, watch._gone, watch._clock = {}, frozenset(), SystemClock()
    watch._memory = SimpleNamespace(prepare=lambda nodes: None, newest_step=lambda gone: None)
    watch._judge = SimpleNamespace(judge=lambda cause, noticed: True)
    left_out: list[frozenset[str]] = []
    watch.scaling = SimpleNamespace(leave_out=left_out.append)
    workers = {
        number: reform.Supervised(place=reform.Place(node=node, host="h", port=1))
        for number, node in enumerate(("fast", "slow", "shy"))
    }
    question = reform.Judge(generation=1, errors=(RankError(rank=0, kind="lost", what="x"),), is_final=False)
    nodes = [{"NodeID": node, "Alive": True} for node in ("fast", "slow", "shy")]
    monkeypatch.setattr(controller, "ray", SimpleNamespace(nodes=lambda: nodes))
    unusable = frozenset({"slow"})
    for in_reach in ({"fast", "slow"}, {"fast", "slow", "shy"}):
        entries = {node: {} for node in in_reach}
        monkeypatch.setattr(controller, "reachable", lambda found, entries=entries: entries)
        monkeypatch.setattr(controller, "steady_nodes", lambda entries=entries: entries)
        group = reform.Group(
            wanted=WorkerRange(least=1, most=3, sp_size=1), workers=workers, unusable=unusable, broken=frozenset({"x"})
        )
        left, _ = watch._decide(question, group)
        unusable = left.nodes
        assert unusable == {"slow"} | ({"fast", "slow", "shy"} - in_reach) and left.draining == {"slow"}
    assert left_out == [{"x"}] * 2, "nor does Ray start workers on a broken one"


def test_the_memory_of_a_node_of_which_every_worker_fell_silent_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent takes connections and never answers: each wait for it holds up the recovery by ten seconds."""
    watch: Any = WorkerGroupWatch.__new__(WorkerGroupWatch)
    asked: list[Any] = []
    watch._addresses, watch._gone, watch._clock = {"well": "h", "stopped": "h"}, frozenset(), SystemClock()
    watch._memory = SimpleNamespace(prepare=asked.append, newest_step=asked.append)
    watch.scaling = SimpleNamespace(leave_out=lambda nodes: None)
    watch._judge = SimpleNamespace(judge=lambda cause, noticed: True)
    entries = {node: {"NodeID": node, "Alive": True} for node in watch._addresses}
    monkeypatch.setattr(controller, "ray", SimpleNamespace(nodes=lambda: [*entries.values()]))
    monkeypatch.setattr(controller, "reachable", lambda found: entries)
    monkeypatch.setattr(controller, "steady_nodes", lambda: entries)
    workers = {
        number: reform.Supervised(place=reform.Place(node=node, host="h", port=1), is_lost=node == "stopped")
        for number, node in enumerate(entries)
    }
    silent = frozenset({"stopped"})
    group = reform.Group(wanted=WorkerRange(least=1, most=5, sp_size=1), workers=workers, silent=silent)
    question = reform.Judge(generation=1, errors=(RankError(rank=0, kind="lost", what="x"),), is_final=False)
    left, _ = watch._decide(question, group)
    assert asked == [{"well": "h"}, {"stopped"}]
    assert not left.nodes, "workers may start there"
    watch._use_nodes({"stopped": "h"})
    assert asked[-1] == watch._addresses and not watch._gone


def test_workers_that_joined_later_train_on_when_all_of_rays_are_lost() -> None:
    """Otherwise Ray would take the run for finished."""
    watch: Any = WorkerGroupWatch.__new__(WorkerGroupWatch)
    watch._memory, watch._addresses, watch._gone = SimpleNamespace(keep=lambda nodes: None), {}, frozenset()
    watch.scaling, watch.coordinator = SimpleNamespace(polled=lambda status: None), Members()
    for phase in ("training", "ended"):
        workers = {0: SimpleNamespace(is_lost=True), 1: SimpleNamespace(is_lost=False)}
        watch.coordinator.group = SimpleNamespace(phase=phase, gave_up=False, workers=workers)
        status = WorkerStatus(running=True, error=RuntimeError("its process is gone"))
        polled = WorkerGroupPollStatus(worker_statuses={0: status})
        watch.after_worker_group_poll_status(polled)
        assert polled.finished is (phase == "ended") and not polled.errors


def test_a_resize_that_only_joined_workers_have_seen_restarts_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2)
    policy = policy_on(nodes, tmp_path)
    start(policy, nodes)
    members: Any = policy._coordinator
    gone = [WorkerStatus(running=False) for _ in range(2)]
    assert not poll(policy, *gone).errors, "the run has finished"
    members.group.status = RESIZED
    assert is_resize(poll(policy, *gone).get_worker_group_error())


def test_a_look_at_the_nodes_that_fails_ends_no_controller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(monkeypatch, tmp_path, a=2)
    policy = policy_on(nodes, tmp_path)
    start(policy, nodes)
    monkeypatch.setattr(policy, "_look", lambda now: {}["a key of a later Ray"])
    assert not poll(policy, RUNNING, RUNNING).errors and "a key of a later Ray" in caplog.text
