"""Which workers train after a fault: the coordinator's reducer, event by event and on random histories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.elastic import reform
from ray_ulysses.elastic.causes import RankError
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.elastic.reform import CAUSE_S, END_S, Action, Event, Finish, GiveUp, Joined, Judge, Start, Stop, Tick
from tests.breadth import examples

KILLED = RankError(rank=0, kind="lost", what="killed by signal 9")
PEER = RankError(rank=0, kind="consequence", what="RuntimeError: Connection closed by peer")
BUG = RankError(rank=0, kind="raised", what="ValueError: boom")
ECC = RankError(rank=0, kind="device", what="AcceleratorError: CUDA error: unspecified launch failure")
NCCL = RankError(rank=0, kind="consequence", what="DistBackendError: NCCL error, unhandled system error")
Workers = tuple[int, ...] | None


class Coordinated:
    """A group on nodes a, b, ... of two workers each, sp_size 2, and a clock that the test moves."""

    def __init__(
        self, workers: int = 4, least: int = 2, most: int | None = None, *, joined: bool = True, **fields: Any
    ) -> None:
        self.now = 0.0
        wanted = WorkerRange(least=least, most=most or workers, sp_size=2)
        self.group = reform.Group(wanted=wanted, workers=dict.fromkeys(range(workers), reform.Supervised()), **fields)
        if joined:
            self.join(*range(workers))

    def see(self, event: Event) -> tuple[Action, ...]:
        self.group, actions = reform.reduce(self.group, event, self.now)
        return actions

    def see_all(self, events: Iterable[Event]) -> tuple[Action, ...]:
        return tuple(action for event in events for action in self.see(event))

    def join(self, *workers: int) -> tuple[Action, ...]:
        return self.see_all(Joined(worker=worker, place=place(worker)) for worker in workers)

    def end(self, *workers: int, **fields: Any) -> tuple[Action, ...]:
        report = reform.Report(**fields)
        return self.see_all(
            reform.ChildEnded(worker=worker, generation=self.group.generation, port=9000 + worker, report=report)
            for worker in workers
        )

    def lose(self, *workers: int, silent_s: float = 0.0) -> tuple[Action, ...]:
        return self.see_all(reform.WorkerLost(worker=worker, what="gone", silent_s=silent_s) for worker in workers)

    def drain(self, nodes: str, dead: str = "") -> None:
        self.see(reform.NodesUnusable(nodes=frozenset(nodes + dead), draining=frozenset(nodes)))

    def tick(self, seconds: float) -> tuple[Action, ...]:
        self.now += seconds
        return self.see(Tick())

    def stop_rest(self, *, stepped: bool = True) -> tuple[Action, ...]:
        supervised = self.group.workers
        running = (one for one in self.group.members if supervised[one].is_there and supervised[one].report is None)
        return self.end(*running, stepped=stepped)

    def judge(self, *, stepped: bool = True, wait_s: float = 0.0) -> Judge:
        """Stop the other children, wait for a cause, and return the question to the judge."""
        (judge,) = self.stop_rest(stepped=stepped) or self.tick(wait_s)
        assert isinstance(judge, Judge)
        return judge

    def fail(self, error: RankError, *workers: int, step: int = 5) -> Judge:
        """End workers with an error in a step."""
        self.end(*workers, error=error, step=step, stepped=step > 1)
        return self.judge(stepped=step > 1, wait_s=CAUSE_S)

    def go_on(self, *, may_continue: bool = True) -> tuple[Action, ...]:
        return self.see(reform.Judged(generation=self.group.generation, may_continue=may_continue))

    def recover(self) -> Workers:
        self.judge()
        return members(self.go_on())


def place(worker: int) -> reform.Place:
    return reform.Place(node="abcdefgh"[worker // 2], host=f"10.0.0.{worker // 2}", port=8000 + worker)


def members(actions: tuple[Action, ...]) -> Workers:
    """Return the workers that were started, sorted, or None."""
    return next((tuple(sorted(action.members)) for action in actions if isinstance(action, Start)), None)


def test_children_start_in_rays_order_when_all_workers_have_joined() -> None:
    one = Coordinated(joined=False)
    assert one.join(3, 0, 2) == ()
    assert one.join(1) == (Start(generation=1, members=(0, 1, 2, 3), host="10.0.0.0", port=8000),)


def test_workers_that_never_join_are_given_up() -> None:
    one = Coordinated(joined=False, gather_until=300.0)
    assert one.join(0) == one.tick(299.0) == ()
    (action,) = one.tick(1.0)
    assert isinstance(action, GiveUp) and "elastic.worker_start_timeout_s" in action.reason and one.group.gave_up


def test_a_killed_child_stops_all_and_the_same_workers_form_again() -> None:
    one = Coordinated()
    assert one.end(1, error=KILLED, step=7, stepped=True) == (Stop(generation=1),)
    assert one.judge() == Judge(generation=1, errors=(replace(KILLED, rank=1),), is_final=False)
    (start,) = one.go_on()
    # Each supervisor listens at another port for each generation.
    assert start == Start(generation=2, members=(0, 1, 2, 3), host="10.0.0.0", port=9000, is_tested=True)
    assert one.group.failed_forms == 0
    late = reform.ChildEnded(worker=0, generation=1, report=reform.Report(error=BUG), port=1)
    assert one.see(late) == one.see(reform.Judged(generation=1, may_continue=False)) == ()
    assert one.group.phase == "training" and one.group.generation == 2


@pytest.mark.parametrize(
    ("workers", "losses", "left"),
    [
        pytest.param(4, [(0, 1)], (2, 3), id="a node"),
        pytest.param(6, [(0,)], (2, 3, 4, 5), id="half a group"),
        # The two halves that are left are on different nodes, which serves as a last resort.
        pytest.param(6, [(0,), (2,)], (4, 5), id="two halves"),
    ],
)
def test_the_next_generation_has_the_complete_groups_of_the_remaining_workers(
    workers: int, losses: list[tuple[int, ...]], left: tuple[int, ...]
) -> None:
    one = Coordinated(workers=workers)
    for lost in losses:
        assert one.lose(*lost)[0] == Stop(generation=one.group.generation)
        assert len(one.judge().errors) == len(lost)
        started = one.go_on()
    assert members(started) == left


def test_too_few_workers_are_left_to_ray_if_no_replacement_can_start() -> None:
    one = Coordinated(least=4)
    assert one.see(reform.NoReplacement()) == () and one.group.phase == "training"
    one.lose(0)
    assert one.recover() is None and one.group.phase == "short"
    (action,) = one.see(reform.NoReplacement())
    assert isinstance(action, GiveUp) and one.group.gave_up and one.group.phase == "ended"
    assert one.see(Tick()) == one.lose(1) == ()


def test_too_few_workers_wait_for_replacements_within_a_limit() -> None:
    one = Coordinated(least=4, gather_s=60.0)
    one.lose(0, 2)
    assert one.recover() is None
    assert one.see(Joined(worker=4, place=place(0))) == one.tick(59.0) == ()
    assert members(one.see(Joined(worker=5, place=place(2)))) == (1, 3, 4, 5)
    one.lose(5)
    assert one.recover() is None and one.tick(59.0) == ()
    (action,) = one.tick(2.0)
    assert isinstance(action, GiveUp)


@pytest.mark.parametrize(("draining", "dead", "left"), [("a", "b", (0, 1)), ("", "ab", None)], ids=["drains", "dead"])
def test_a_draining_node_serves_again_if_the_others_are_lost(draining: str, dead: str, left: Workers) -> None:
    """It is alive until its deadline, which comes later than replacements need to join."""
    one = Coordinated()
    one.drain("a")
    one.lose(2, 3)
    one.judge()
    one.drain(draining, dead)
    assert members(one.go_on()) == left
    if left:
        one.lose(0)
        assert one.group.errors[0].kind == "preempted", "its loss was announced all the same"


def test_a_node_is_silent_once_its_last_worker_falls_silent_until_another_joins() -> None:
    one = Coordinated(workers=6)
    for worker, silent_s in enumerate((0.0, 5.0, 5.0, 0.0, 5.0)):
        one.lose(worker, silent_s=silent_s)
    assert one.group.silent == {"a"}, "the last worker of b was lost with a sign, and a worker of c is left"
    one.see(Joined(worker=6, place=place(0)))
    assert not one.group.silent
    one.lose(6)
    assert not one.group.silent, "the node has answered since"


def test_workers_that_join_complete_the_groups_of_a_draining_node() -> None:
    one = Coordinated(least=4)
    one.drain("a")
    one.lose(2, 3)
    assert one.recover() is None and one.group.phase == "short"
    one.see(Joined(worker=4, place=place(2)))
    assert members(one.see(Joined(worker=5, place=place(3)))) == (0, 1, 4, 5)


def test_a_final_failure_is_left_to_ray() -> None:
    one = Coordinated()
    one.end(2, error=BUG, is_final=True)
    assert one.judge().is_final and isinstance(one.go_on(may_continue=False)[0], GiveUp)


def test_an_error_is_final_if_it_returns_at_the_same_step() -> None:
    one = Coordinated()
    finals = []
    for step, gib in ((5, 78.25), (6, 78.25), (6, 78.5)):
        # Measured numbers in the text differ.
        error = replace(BUG, what=f"OutOfMemoryError: step {step} ran out of memory: {gib} GiB were allocated")
        finals.append(one.fail(error, 1, step=step).is_final)
        one.go_on()
    assert finals == [False, False, True]


def test_generations_that_fail_before_their_first_step_are_bounded() -> None:
    """An unreachable storage fails two attempts in the same way, and an error of the network may change its node."""
    for error, workers in ((BUG, (1, 1)), (NCCL, (0, 2))):
        one = Coordinated()
        assert len(workers) == reform.MOST_FAILED_FORMS
        for worker in workers:
            assert not one.fail(error, worker, step=0).is_final and not one.group.broken
            (action,) = one.go_on()
        assert isinstance(action, GiveUp)


@pytest.mark.parametrize("step", [0, 5])
def test_a_node_whose_gpu_has_failed_is_left_for_good(step: int) -> None:
    one = Coordinated(workers=6)
    judge = one.fail(ECC, 3, step=step)
    assert judge.errors == (replace(ECC, rank=3),) and not judge.is_final
    assert members(one.go_on()) == (0, 1, 4, 5) and one.group.broken == {"b"}
    one.fail(KILLED, 4)
    assert members(one.go_on()) == (0, 1, 4, 5)


def test_a_device_error_that_returns_on_another_node_is_the_programs_if_at_the_same_step() -> None:
    for step, is_final, broken in ((5, True, "b"), (6, False, "bc")):
        one = Coordinated(workers=6)
        one.fail(ECC, 3)
        one.go_on()
        judge = one.fail(ECC, 4, step=step)
        assert judge.is_final is is_final and one.group.broken == {*broken}
        assert judge.errors == (replace(ECC, rank=2, kind="raised" if is_final else "device"),)


def test_device_errors_on_several_nodes_or_beside_a_lost_process_exclude_no_node() -> None:
    one = Coordinated()
    finals = []
    for _ in range(2):
        judge = one.fail(ECC, 1, 2)
        assert {error.kind for error in judge.errors} == {"raised"} and not one.group.broken
        finals.append(judge.is_final)
        one.go_on()
    assert finals == [False, True]
    one = Coordinated()
    one.end(0, error=KILLED, step=5, stepped=True)
    one.fail(ECC, 3)
    assert not one.group.broken


def test_a_run_that_needs_the_broken_node_waits_for_another() -> None:
    one = Coordinated(least=4, gather_s=60.0)
    one.fail(ECC, 0)
    # That it drains too, and could serve until it goes, changes nothing.
    one.drain("a")
    assert one.go_on() == () and one.group.phase == "short"
    assert members(one.join(4, 5)) == (2, 3, 4, 5)


@pytest.mark.parametrize("step", [0, 1, 5], ids=["forming", "first step", "later"])
def test_a_node_whose_network_fails_twice_is_left(step: int) -> None:
    one = Coordinated(workers=6)
    judge = one.fail(NCCL, 2, step=step)
    assert judge.errors == (replace(NCCL, rank=2),) and not judge.is_final and not one.group.broken
    assert members(one.go_on()) == (0, 1, 2, 3, 4, 5)
    judge = one.fail(NCCL, 3, step=step)
    assert judge.errors == (replace(NCCL, rank=3, kind="device"),) and one.group.broken == {"b"}
    assert members(one.go_on()) == (0, 1, 4, 5)


def test_workers_are_tested_again_with_a_new_one_and_until_they_have_trained_a_step() -> None:
    one = Coordinated(most=6)
    starts = []
    for joined, step in (((), 0), ((), 5), ((4, 5), 5), ((), 5)):
        one.join(*joined)
        one.fail(KILLED, 0, step=step)
        starts += one.go_on()
    assert [start.is_tested for start in starts if isinstance(start, Start)] == [False, True, False, True]


def test_the_cause_of_consequences_is_waited_for_within_a_limit() -> None:
    one = Coordinated()
    one.end(0, error=PEER)
    assert one.stop_rest() == (), "a node that died is noticed a moment later"
    assert one.tick(CAUSE_S - 0.1) == ()
    (judge,) = one.lose(3)
    assert isinstance(judge, Judge) and {error.kind for error in judge.errors} == {"consequence", "lost"}
    assert [error.kind for error in Coordinated().fail(PEER, 0).errors] == ["consequence"]


def test_ranks_that_hang_are_ended_and_their_workers_stay() -> None:
    one = Coordinated()
    assert one.see(reform.RanksHung(generation=0, ranks=(1,), what="late")) == ()
    assert one.see(reform.RanksHung(generation=1, ranks=(1,), what="not moved")) == (Stop(generation=1),)
    assert one.judge().errors == (RankError(rank=1, kind="lost", what="not moved"),)
    assert members(one.go_on()) == (0, 1, 2, 3)


def test_a_supervisor_that_does_not_stop_its_child_is_lost() -> None:
    one = Coordinated()
    one.end(0, error=KILLED)
    one.end(1, 2)
    assert one.tick(2 * END_S - 0.1) == ()
    (judge,) = one.tick(0.1)
    assert isinstance(judge, Judge) and [error.rank for error in judge.errors] == [0, 3]
    assert members(one.go_on()) == (0, 1)
    # A rank of a million tokens has 72 GiB of activations in host memory, which the kernel takes back page by page.
    one = Coordinated(end_s=reform.end_bound_s(72 << 30))
    one.end(0, error=KILLED)
    one.end(1, 2)
    assert one.tick(50.0) == ()
    (judge,) = one.end(3)
    assert isinstance(judge, Judge) and [error.rank for error in judge.errors] == [0]


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_an_attempt_ends_when_every_member_has_even_after_a_request_to_move(status: str) -> None:
    one = Coordinated()
    one.drain("a")
    one.see(reform.MoveAsked())
    assert one.end(0, 1, 2, status=status) == ()
    assert one.end(3, status=status) == (Finish(status=status),)


def test_members_that_were_asked_to_move_go_on_without_the_draining_node() -> None:
    one = Coordinated()
    one.drain("a")
    one.see(reform.MoveAsked())
    stop, start = one.end(0, 1, 2, 3, status="resized")
    assert stop == Stop(generation=1), "a worker that stays behind holds no memory"
    assert members((start,)) == (2, 3)
    # Asked to grow, they end: Ray starts workers on the nodes that have joined.
    assert one.end(2, 3, status="resized") == (Finish(status="resized"),)


@pytest.mark.parametrize("unusable", ["", "ab"], ids=["usable", "all nodes are to go"])
def test_the_next_stage_begins_on_the_same_workers_and_forgets_failures(unusable: str) -> None:
    one = Coordinated()
    one.fail(BUG, 1, step=0)
    one.go_on()
    one.drain("", unusable)
    assert one.group.failed_forms == 1
    assert one.end(0, 1, 2, status="stage") == ()
    stop, start = one.end(3, status="stage")
    assert stop == Stop(generation=2) and members((start,)) == (0, 1, 2, 3)
    assert (one.group.generation, one.group.failed_forms, one.group.last_raised) == (3, 0, None)
    assert one.end(0, 1, 2, 3, status="finished") == (Finish(status="finished"),)


def test_workers_that_join_later_are_members_of_the_next_generation() -> None:
    one = Coordinated(most=8)
    assert one.join(4, 5, 6) == () and one.group.members == (0, 1, 2, 3)
    one.see(reform.MoveAsked())
    stop, start = one.end(0, 1, 2, 3, status="resized")
    assert stop == Stop(generation=1)
    assert members((start,)) == (0, 1, 2, 3, 4, 5), "complete groups only"
    one.join(7)
    one.lose(4)
    assert one.recover() == (0, 1, 2, 3, 6, 7)


def test_a_draining_node_that_dies_is_a_preemption() -> None:
    one = Coordinated()
    one.drain("b")
    one.lose(2, 3)
    assert {error.kind for error in one.judge().errors} == {"preempted"}


@pytest.mark.parametrize("phase", ["training", "stopping", "judging"])
def test_only_members_that_train_are_asked_to_move(phase: str) -> None:
    one = Coordinated()
    if phase != "training":
        one.end(1, error=KILLED, stepped=True)
    if phase == "judging":
        one.stop_rest()
    one.see(reform.MoveAsked())
    assert one.group.phase == phase and one.group.moves is (phase == "training")


_EVENTS = st.one_of(
    st.builds(lambda w, e, s, g: ("end", w, e, s, g), st.integers(0, 7),
              st.sampled_from([KILLED, PEER, BUG, ECC, NCCL, None]),
              st.sampled_from(["finished", "resized", None]), st.integers(-1, 0)),
    st.builds(lambda w: ("lost", w), st.integers(0, 7)),
    st.builds(lambda w: ("join", w), st.integers(8, 11)),
    st.builds(lambda n, d: ("unusable", n, n & d), *[st.frozensets(st.sampled_from("abcd"), max_size=2)] * 2),
    st.sampled_from([("move",), ("nobody",), ("tick", 0.1), ("tick", 2.0), ("tick", 6.0), ("yes",), ("no",)]),
)  # fmt: skip


@given(st.lists(_EVENTS, max_size=60))
@example([("end", 0, KILLED, None, 0), ("yes",), ("tick", 0.1)])
@settings(max_examples=examples(300), deadline=None)
def test_on_any_history_one_generation_trains_and_it_is_never_stuck(history: list[tuple[Any, ...]]) -> None:
    one = Coordinated(workers=8, most=12)
    running: set[int] = set(range(8))
    """Workers whose children may be alive, as only their supervisors know."""
    for event in history:
        generation, actions = one.group.generation, []
        match event:
            case ("end", worker, error, status, past):
                report = reform.Report(error=error, status=None if error else status)
                actions += one.see(
                    reform.ChildEnded(worker=worker, generation=generation + past, report=report, port=1)
                )
                if past == 0:
                    running.discard(worker)
            case ("join", worker):
                actions += one.see(Joined(worker=worker, place=place(worker)))
            case ("lost", worker):
                actions += one.see(reform.WorkerLost(worker=worker, what="gone"))
                running.discard(worker)
            case ("unusable", nodes, draining):
                actions += one.see(reform.NodesUnusable(nodes=nodes, draining=draining))
            case ("nobody",):
                actions += one.see(reform.NoReplacement())
            case ("move",):
                actions += one.see(reform.MoveAsked())
            case ("tick", seconds):
                actions += one.tick(seconds)
            case (verdict,):
                actions += one.see(reform.Judged(generation=generation, may_continue=verdict == "yes"))
        for action in actions:
            if isinstance(action, Start):
                assert action.generation == generation + 1
                # Nobody of the generation before still trains, but for workers that are lost to all.
                lost = {number for number, worker in one.group.workers.items() if worker.is_lost}
                assert running <= lost
                assert len(action.members) % 2 == 0 and len(set(action.members)) == len(action.members)
                nodes = [one.group.workers[member].place for member in action.members]
                assert not lost & set(action.members)
                dead = (one.group.unusable - one.group.draining) | one.group.broken
                assert all(at is not None and at.node not in dead for at in nodes)
                running = set(action.members)
    # Supervisors that answer, and a judge that does, lead to an end or to children that train.
    if one.group.phase == "stopping":
        one.stop_rest()
        one.tick(2 * END_S + CAUSE_S)
    if one.group.phase == "judging":
        one.see(reform.Judged(generation=one.group.generation, may_continue=True))
    one.see(reform.NoReplacement())
    assert one.group.phase in ("training", "ended")
