"""The number of workers follows the nodes, and workers join; nodes, actors and the clock are the test's."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import ControllerError

from ray_ulysses.cluster import scaling
from ray_ulysses.cluster.capacity import Demand
from ray_ulysses.cluster.failures import FailureJudge, is_resize, lacks_room
from ray_ulysses.cluster.scaling import JoiningWorkers, Seat, WorkerScaling, reachable
from ray_ulysses.elastic import reform
from ray_ulysses.elastic.placement import LEAVE_S, SETTLE_S, WorkerRange
from ray_ulysses.run.requests import clear_stop, exclude_nodes, request_stop, stop_requested
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.supervision.supervisor import Announcement
from ray_ulysses.tracking.events import RESIZED
from ray_ulysses.tracking.history import Pace
from tests.distributed.run_case import make_config

SESSION = "command"
MOVE = reform.MoveAsked()


def alive(*nodes: str) -> dict[int, reform.Supervised]:
    """Return workers on these nodes; a capital letter stands for a lost one, a dot for one that has not joined."""
    places = [None if node == "." else reform.Place(node=node.lower(), host="h", port=1) for node in nodes]
    return {
        number: reform.Supervised(place=place, is_lost=nodes[number].isupper()) for number, place in enumerate(places)
    }


def unusable(*nodes: str, draining: bool = False) -> reform.NodesUnusable:
    return reform.NodesUnusable(nodes=frozenset(nodes), draining=frozenset(nodes if draining else ()))


class Members:
    """A coordinator whose workers train where they were placed, until the test says otherwise."""

    def __init__(self) -> None:
        self.group: Any = None
        self.posted: list[reform.Event] = []
        self.announced: dict[str, float | None] = {}

    def begin(self, placed: dict[str, int]) -> None:
        self.posted = []
        self.group = SimpleNamespace(
            phase="training", num_placed=placed, status=None, workers=alive(*Counter(placed).elements()),
            unusable=frozenset(), silent=frozenset(), members=range(sum(placed.values())),
        )  # fmt: skip

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


class Scaled:
    """The policy of a run, on nodes and a clock in place of Ray's."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, least: int = 2, most: int = 4, **cpus: float
    ) -> None:
        self.patch, self.time_s = monkeypatch, 0.0
        self.cpus, self.free = dict(cpus), dict(cpus)
        self.draining: dict[str, float | None] = {}
        self.used: list[Any] = []
        monkeypatch.setattr(scaling, "draining_nodes", lambda: self.draining)
        monkeypatch.setattr(scaling, "steady_nodes", self.steady)
        monkeypatch.setattr(scaling, "reachable", lambda nodes: dict(nodes))
        monkeypatch.setattr(scaling.time, "sleep", self._sleep)
        monkeypatch.setattr(scaling.state.state, "available_resources_per_node", lambda: {
            node: {"CPU": cpus} for node, cpus in self.free.items()
        })  # fmt: skip
        config = make_config(folder, folder, cluster__workers={"min": least, "max": most}, parallel__sp_size=2)
        self.run_dir, self.grow_interval_s = config.run_dir, config.elastic.grow_interval_s
        self.run_dir.mkdir(exist_ok=True)
        self.members, self.joining = Members(), Joining()
        of_ray: Any = ScalingConfig(num_workers=most, resources_per_worker={"CPU": 1.0})
        members: Any = self.members
        run, job = resolve_run(config), {"session": SESSION}
        self.policy = WorkerScaling(run, job, of_ray, members, self.used.append, clock=self)
        self.policy._joining = self.joining  # type: ignore[assignment]
        self.policy._maybe_send_resource_request = lambda: None  # type: ignore[method-assign]

    def steady(self) -> dict[str, Any]:
        return {one: {"NodeManagerAddress": f"host-{one}", "Resources": {"CPU": n}} for one, n in self.cpus.items()}

    def _sleep(self, seconds: float) -> None:
        self.time_s += seconds

    def now(self) -> float:
        raise AssertionError("durations are measured by the clock that never goes back")

    def monotonic(self) -> float:
        return self.time_s

    def place(self) -> list[str] | None:
        """Ask until workers are placed; return the node of each of them, or None if that takes for ever."""
        for _ in range(30):
            decision = self.policy.make_decision_for_non_running_worker_group()
            if isinstance(decision, ResizeDecision):
                placed = [next(iter(selector.values())) for selector in self.policy.selectors()]
                assert len(placed) == decision.num_workers
                return placed
            assert isinstance(decision, NoopDecision)
        return None

    def start(self) -> list[str] | None:
        """Place workers, and start them there."""
        placed = self.place()
        if placed is not None:
            announcement: Any = None
            self.policy.begin(announcement, {})
            self.members.begin(Counter(placed))
            for node in placed:
                self.free[node] -= 1
        return placed

    def end(self) -> None:
        self.policy.end()
        self.free = dict(self.cpus)

    def poll(self, *statuses: WorkerStatus) -> WorkerGroupPollStatus:
        status = WorkerGroupPollStatus(worker_statuses=dict(enumerate(statuses or [WorkerStatus(running=True)])))
        self.policy.polled(status)
        return status

    def polls(self, times: int, every_s: float = SETTLE_S, *, stops: bool = True) -> None:
        for _ in range(times):
            assert stops or self.requested is None
            self.poll()
            self.time_s += every_s

    @property
    def requested(self) -> str | None:
        return stop_requested(self.run_dir, SESSION)

    def pace(self, seconds_left: float) -> None:
        self.patch.setattr(scaling, "run_pace", lambda _: Pace(seconds_left=seconds_left, start_s=30.0))

    def train_on(self, phase: str, *workers: str, **vacant: int) -> None:
        """Start, and let members on node a train on or wait in this phase, while workers are as given."""
        self.start()
        group = self.members.group
        group.num_placed, group.members, group.phase = {"a": 2}, range(2), phase
        group.workers, self.joining.vacant = alive(*workers), Counter(vacant)


Runs = Callable[..., Scaled]


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    return partial(Scaled, monkeypatch, tmp_path)


def ended(value: str | None = None, count: int = 2) -> list[WorkerStatus]:
    return [WorkerStatus(running=False, return_value=value) for _ in range(count)]


@pytest.mark.parametrize("started", [True, False], ids=["held-by-those-left", "never-started"])
def test_a_lost_node_leaves_a_smaller_run_at_once(scaled: Runs, started: bool) -> None:
    run = scaled(a=2, b=2)
    assert (run.start() if started else run.place()) == ["a", "a", "b", "b"]
    del run.cpus["b"], run.free["b"]
    assert run.start() == ["a", "a"] and run.time_s == 0.0


def test_a_run_grows_onto_a_node_that_joins_once_the_workers_there_are_ready(scaled: Runs) -> None:
    """Where growth pays: the others train until then, and Ray restarts nothing."""
    run = scaled(a=2)
    assert run.start() == ["a", "a"]
    run.cpus["b"] = run.free["b"] = 2
    run.pace(seconds_left=100.0)
    run.polls(2)
    assert run.requested is None and not run.joining.placed, "half of 100 s is not ten times 30 s"
    run.pace(seconds_left=1_000.0)
    run.time_s += run.grow_interval_s
    run.polls(4, stops=False)
    assert run.joining.placed == {"b": 2} and run.used == [{"b": "host-b"}] and not run.members.posted
    run.joining.are_there = True
    run.poll()
    assert run.requested == "resize" and run.members.posted == [MOVE]


def test_lost_workers_are_replaced_where_they_were_while_the_others_train(scaled: Runs) -> None:
    """Ray Train's group keeps their places; to start the complete group again takes most of a minute."""
    run = scaled(a=2, b=2)
    # One of a group's two is there and trains no more; another's place is on a node that is gone.
    run.train_on("training", "a", "a", "B", "b", "C", b=1, c=1)
    run.pace(seconds_left=1_000.0)
    run.polls(2, stops=False)
    assert run.joining.placed == {"b": 1} and run.requested is None
    run.joining.are_there = True
    run.poll()
    assert run.requested == "resize" and run.members.posted == [MOVE]
    # Workers that train no more, and suffice to grow, are members again.
    run = scaled(a=2, b=2)
    run.train_on("training", "a", "a", "b", "b")
    run.polls(2)
    assert run.members.posted == [MOVE] and not run.joining.placed


@pytest.mark.parametrize("seen_by", ["ray", "joined"])
def test_a_resize_that_all_have_ended_for_restarts_the_run(scaled: Runs, seen_by: str) -> None:
    """All of Ray's workers may be lost, and only those that joined have seen the end."""
    run = scaled(a=2)
    run.start()
    request_stop(run.run_dir, SESSION, "resize")
    if seen_by == "ray":
        assert not run.poll(WorkerStatus(running=True), *ended(RESIZED, 1)).errors, "not before all ended"
        status = run.poll(*ended(RESIZED))
    else:
        assert not run.poll(*ended()).errors, "the run has finished"
        run.members.group.status = RESIZED
        status = run.poll(*ended())
    assert is_resize(status.get_worker_group_error())
    run.end()
    assert run.start() == ["a", "a"] and run.requested is None


@pytest.mark.parametrize("excluded", [False, True], ids=["gone", "excluded"])
def test_a_node_that_goes_or_is_excluded_is_left_whatever_it_costs(scaled: Runs, excluded: bool) -> None:
    run = scaled(a=2, b=2)
    run.start()
    run.patch.setattr(scaling, "run_pace", lambda _: pytest.fail("growth is not the question"))
    if excluded:
        exclude_nodes(run.run_dir, SESSION, {"b": 2.5})
    else:
        del run.cpus["b"]
    run.polls(2, stops=False)
    assert run.requested == "resize" and run.members.posted == [unusable("b"), MOVE]
    run.end()
    assert run.start() == ["a", "a"], "and no worker is started there again"


def test_a_node_whose_gpu_has_failed_gets_workers_only_where_the_others_are_too_few(scaled: Runs) -> None:
    run = scaled(most=8, a=2, b=8)
    run.policy.leave_out(frozenset({"b"}))
    # It was slow before.
    exclude_nodes(run.run_dir, SESSION, {"b": 1.5})
    assert run.place() == ["a", "a"]
    run.cpus = run.free = {"b": 8.0}
    assert run.start() == ["b"] * 8


def test_a_node_that_was_left_is_not_taken_back_when_another_is_left(scaled: Runs) -> None:
    run = scaled(most=8, a=2, b=2, c=2, d=2)
    run.start()
    for slow in ("b", "d"):
        exclude_nodes(run.run_dir, SESSION, {slow: 5.0})
        run.polls(2)
        del run.members.group.num_placed[slow]
        clear_stop(run.run_dir)
    assert run.members.group.unusable == {"b", "d"}
    moves = len(run.members.posted)
    run.polls(4)
    assert len(run.members.posted) == moves


def test_a_slow_node_is_better_than_too_few_workers_and_a_node_that_others_use_replaces_none(scaled: Runs) -> None:
    run = scaled(least=4, a=2, b=2, c=2)
    run.free["c"] = 0
    run.start()
    exclude_nodes(run.run_dir, SESSION, {"b": 2.5})
    run.polls(3)
    assert run.requested is None and not run.members.posted
    run.end()
    run.free["c"] = 0
    assert run.start() == ["a", "a", "b", "b"]


def test_a_node_that_goes_before_the_others_have_left_it_was_announced(scaled: Runs) -> None:
    """Its loss is not charged to the run then, however short the notice was."""
    run = scaled(a=2, b=2)
    run.start()
    del run.cpus["b"]
    run.polls(1, every_s=1.0)
    assert not run.members.posted, "a node that is lost without notice was not announced"
    run.draining = {"b": 70.0}
    run.poll()
    assert run.members.posted == [unusable("b", draining=True)] and run.requested is None


def test_a_group_that_is_short_of_workers_gets_the_missing_ones_or_hears_that_none_can_start(scaled: Runs) -> None:
    run = scaled(least=4, a=2, b=2)
    run.train_on("short", "a", "a", "b", "B", b=1)
    run.polls(3, every_s=1.0)
    assert run.joining.placed == {"b": 1} and run.used == [{"b": "host-b"}] and not run.members.posted
    # They have failed, or don't suffice, and no other can be started.
    run.joining.are_there, run.joining.vacant = True, Counter()
    run.poll()
    assert run.members.posted == [reform.NoReplacement()]
    run = scaled(least=4, a=2, b=2)
    run.train_on("short", "a", "a", "B", "B", b=2)
    del run.cpus["b"], run.free["b"]
    run.poll()
    assert run.members.posted == [reform.NoReplacement()] and not run.joining.placed


def test_missing_workers_start_on_a_silent_node_only_if_no_other_has_room(scaled: Runs) -> None:
    """A stopped node accepts connections, and a worker that is placed there starts when it goes on, if ever."""
    run = scaled(least=4, a=2, b=2, c=2)
    run.train_on("short", "a", "a", "B", "B", b=2)
    run.members.group.silent, run.free = {"b"}, {"a": 0, "b": 0, "c": 2}
    run.polls(1, every_s=1.0)
    assert run.joining.placed == {"c": 2} and not run.members.posted
    run.joining.are_awaited, run.free["c"] = False, 0
    run.poll()
    assert run.joining.placed == {"b": 2} and not run.members.posted


@pytest.mark.parametrize("has_spare", [False, True])
def test_a_fixed_number_of_workers_leaves_a_drained_node_for_a_spare_one(scaled: Runs, has_spare: bool) -> None:
    run = scaled(least=4, a=2, b=2)
    run.start()
    run.draining = {"b": 70.0}
    del run.cpus["b"]
    if has_spare:
        run.cpus["c"] = run.free["c"] = 2
    run.polls(3, LEAVE_S)
    assert run.requested is None
    assert run.members.announced == {"b": 70.0}, "whose workers save before that"
    assert run.members.posted[0] == unusable("b", draining=True)
    assert run.joining.placed == ({"c": 2} if has_spare else {})


def test_members_on_a_draining_node_train_on_until_enough_others_have_joined(scaled: Runs) -> None:
    """To start Ray Train's group on the other node instead takes most of a minute, in which nobody trains."""
    run = scaled(a=2)
    run.start()
    run.cpus, run.free, run.draining = {"b": 2, "c": 2}, {"b": 2, "c": 2}, {"a": None}
    # The head does not know yet that b is gone.
    run.patch.setattr(scaling, "reachable", lambda found: {node: found[node] for node in found if node != "b"})
    run.polls(5, LEAVE_S)
    assert run.joining.placed == {"c": 2} and run.requested is None
    run.joining.are_there, run.members.group.workers = True, alive("a", "a", "c", "c")
    run.polls(2, LEAVE_S)
    assert run.requested == "resize" and run.members.posted[-1] == MOVE


def test_workers_that_do_not_train_are_left_alone(scaled: Runs) -> None:
    """Their coordinator replaces a generation that failed."""
    run = scaled(a=2, b=2)
    run.start()
    run.members.group.phase = "judging"
    del run.cpus["b"]
    run.polls(3)
    assert run.requested is None
    # It continues on the node that is left: nothing leaves.
    run.members.begin({"a": 2})
    run.polls(3)
    assert run.requested is None and not run.members.posted


def test_a_request_of_the_user_is_never_replaced_or_cleared(scaled: Runs) -> None:
    run = scaled(a=2, b=2)
    run.start()
    request_stop(run.run_dir, SESSION)
    del run.cpus["b"]
    run.polls(3)
    assert run.requested == "stop"
    assert run.start() == ["a", "a"] and run.requested == "stop"


def test_workers_that_finish_or_fail_are_left_to_ray_train_and_a_resize_or_lack_of_room_is_no_failure(
    scaled: Runs, tmp_path: Path
) -> None:
    run = scaled(a=2)
    run.start()
    assert not run.poll(*ended("finished")).errors
    failure = RuntimeError("boom")
    status = run.poll(*ended(RESIZED, 1), WorkerStatus(running=False, error=failure))
    assert status.errors[1] is failure and not is_resize(status.get_worker_group_error())
    book: Any = SimpleNamespace(config=make_config(tmp_path, tmp_path))
    statuses = {0: WorkerStatus(running=False, error=scaling.Resized("again"))}
    resized = WorkerGroupPollStatus(worker_statuses=statuses).get_worker_group_error()
    timeout = ControllerError(WorkerGroupStartupTimeoutError(num_workers=2))
    for error in (resized, timeout):
        assert FailureJudge(book).make_decision(error) is FailureDecision.RETRY
    assert not lacks_room(ControllerError(ValueError())) and not is_resize(timeout)


def test_a_head_that_does_not_answer_is_asked_again_and_an_error_ends_no_controller(
    scaled: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    run = scaled(a=2)

    def away() -> dict[str, Any]:
        if run.time_s < 3.0:
            raise ConnectionError("the head is away")
        return run.steady()

    run.patch.setattr(scaling, "steady_nodes", away)
    assert run.start() == ["a", "a"] and run.time_s == 3.0
    run.patch.setattr(scaling, "steady_nodes", lambda: {}["a key of a later Ray"])
    assert not run.poll().errors and "a key of a later Ray" in caplog.text


def test_a_node_whose_ray_takes_no_connection_is_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.create_server(("127.0.0.1", 0)) as dead:
        ports = {"alive": alive.getsockname()[1], "dead": dead.getsockname()[1]}
        dead.close()
        entries = {node: {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port} for node, port in ports.items()}
        assert list(reachable(entries)) == ["alive"]


WANTED = WorkerRange(least=2, most=8, sp_size=2)
DEMAND = Demand(wanted=WANTED, cpus=1.0, gpus=0, data_cpus=0.0)
ANNOUNCEMENT = Announcement(host="127.0.0.1", port=1, token="t", group=1)


class Cluster:
    """Ray, as far as workers that join need it: answers are lists, empty while there is none."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.killed: list[str] = []

    def remote(self, **resources: Any) -> Any:
        return lambda _: SimpleNamespace(options=self.options)

    def options(self, label_selector: dict[str, str] | None = None, scheduling_strategy: str = "") -> Any:
        actor = Actor(node=next(iter((label_selector or {"": scheduling_strategy}).values())))
        self.actors.append(actor)
        return SimpleNamespace(remote=lambda: actor)

    def wait(self, asked: Sequence[list[Any]], num_returns: int = 1, timeout: float = 0) -> Any:
        return [one for one in asked if one], [one for one in asked if not one]

    def get(self, answers: Sequence[list[Any]]) -> list[Any]:
        for (answer,) in answers:
            if isinstance(answer, Exception):
                raise answer
        return [answer for (answer,) in answers]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.node)


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


def group(*nodes: str, members: int = 2) -> reform.Group:
    return reform.Group(wanted=WANTED, workers=alive(*nodes), phase="training", members=tuple(range(members)))


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
