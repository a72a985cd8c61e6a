"""Who trains after a fault: the coordinator's reducer, event by event and on random histories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.elastic.causes import RankError
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.elastic.reform import (
    CAUSE_S,
    END_S,
    MOST_FAILED_FORMS,
    Action,
    ChildEnded,
    Event,
    Finish,
    GiveUp,
    Group,
    Joined,
    Judge,
    Judged,
    MoveAsked,
    NodesUnusable,
    NoReplacement,
    Place,
    RanksHung,
    Report,
    Start,
    Stop,
    Supervised,
    Tick,
    WorkerLost,
    end_bound_s,
    reduce,
)
from tests.breadth import examples

KILLED = RankError(rank=0, kind="lost", what="killed by signal 9")
PEER = RankError(rank=0, kind="consequence", what="RuntimeError: Connection closed by peer")
BUG = RankError(rank=0, kind="raised", what="ValueError: boom")
ECC = RankError(rank=0, kind="device", what="AcceleratorError: CUDA error: unspecified launch failure")
NCCL = RankError(rank=0, kind="consequence", what="DistBackendError: NCCL error, unhandled system error")


class Coordinated:
    """A group on nodes of two workers each, sp_size 2, and a clock that the test moves."""

    def __init__(self, workers: int = 4, least: int = 2, most: int | None = None) -> None:
        self.now = 0.0
        wanted = WorkerRange(least=least, most=most or workers, sp_size=2)
        self.group = Group(wanted=wanted, workers={number: Supervised() for number in range(workers)})

    def see(self, event: Event) -> tuple[Action, ...]:
        self.group, actions = reduce(self.group, event, self.now)
        return actions

    def join_all(self) -> tuple[Action, ...]:
        actions: tuple[Action, ...] = ()
        for worker in self.group.workers:
            actions = self.see(Joined(worker=worker, place=place(worker)))
        return actions

    def end(self, worker: int, *, error: RankError | None = None, status: str | None = None, **report: Any
            ) -> tuple[Action, ...]:  # fmt: skip
        event = ChildEnded(
            worker=worker, generation=self.group.generation, port=9000 + worker,
            report=Report(error=error, status=status, **report),
        )  # fmt: skip
        return self.see(event)

    def stop_rest(self, *, stepped: bool = True) -> tuple[Action, ...]:
        actions: tuple[Action, ...] = ()
        for worker in self.group.members:
            if self.group.workers[worker].is_there and self.group.workers[worker].report is None:
                actions += self.end(worker, stepped=stepped)
        return actions


def place(worker: int) -> Place:
    return Place(node="abcdefgh"[worker // 2], host=f"10.0.0.{worker // 2}", port=8000 + worker)


def training(**options: Any) -> Coordinated:
    one = Coordinated(**options)
    one.join_all()
    return one


def test_children_start_when_all_workers_have_joined_in_rays_order() -> None:
    one = Coordinated()
    for worker in (3, 0, 2):
        assert one.see(Joined(worker=worker, place=place(worker))) == ()
    (start,) = one.see(Joined(worker=1, place=place(1)))
    assert start == Start(generation=1, members=(0, 1, 2, 3), host="10.0.0.0", port=8000)


def test_a_child_that_is_killed_stops_all_and_the_same_workers_form_again() -> None:
    one = training()
    assert one.end(1, error=KILLED, step=7, stepped=True) == (Stop(generation=1),)
    judge = one.stop_rest()
    assert judge == (Judge(generation=1, errors=(replace(KILLED, rank=1),), is_final=False),)
    (start,) = one.see(Judged(generation=1, may_continue=True))
    # Each supervisor listens at another port for each generation.
    assert start == Start(generation=2, members=(0, 1, 2, 3), host="10.0.0.0", port=9000, is_tested=True)
    assert one.group.failed_forms == 0


def test_a_lost_node_leaves_the_whole_groups_of_the_others() -> None:
    one = training()
    assert one.see(WorkerLost(worker=0, what="its process is gone")) == (Stop(generation=1),)
    one.see(WorkerLost(worker=1, what="its process is gone"))
    (judge,) = one.stop_rest()
    assert isinstance(judge, Judge) and [error.rank for error in judge.errors] == [0, 1]
    (start,) = one.see(Judged(generation=1, may_continue=True))
    assert isinstance(start, Start) and start.members == (2, 3) and (start.host, start.port) == ("10.0.0.1", 9002)


def test_half_a_group_is_left_out_and_is_a_spare_for_the_next_time() -> None:
    one = training(workers=6)
    one.see(WorkerLost(worker=0, what="gone"))
    one.stop_rest()
    (start,) = one.see(Judged(generation=1, may_continue=True))
    assert isinstance(start, Start) and start.members == (2, 3, 4, 5)
    # Now another half is lost: the two halves that are left are on different nodes, which serves as a last resort.
    one.see(WorkerLost(worker=2, what="gone"))
    one.stop_rest()
    (start,) = one.see(Judged(generation=2, may_continue=True))
    assert isinstance(start, Start) and start.members == (4, 5)


def test_too_few_workers_are_left_to_ray_where_none_can_be_started() -> None:
    one = training(least=4)
    one.see(WorkerLost(worker=0, what="gone"))
    one.stop_rest()
    assert one.see(Judged(generation=1, may_continue=True)) == () and one.group.phase == "short"
    (action,) = one.see(NoReplacement())
    assert isinstance(action, GiveUp) and one.group.gave_up and one.group.phase == "ended"
    assert one.see(Tick()) == () and one.see(WorkerLost(worker=1, what="gone")) == ()


def test_too_few_workers_wait_for_those_that_take_the_places_of_lost_ones() -> None:
    """All workers need not start again, which takes most of a minute."""
    one = training(least=4)
    one.group = replace(one.group, gather_s=60.0)
    one.see(WorkerLost(worker=0, what="gone"))
    one.see(WorkerLost(worker=2, what="gone"))
    one.stop_rest()
    one.see(Judged(generation=1, may_continue=True))
    one.now += 59.0
    assert one.see(Joined(worker=4, place=place(0))) == () and one.see(Tick()) == ()
    (start,) = one.see(Joined(worker=5, place=place(2)))
    assert isinstance(start, Start) and start.generation == 2 and sorted(start.members) == [1, 3, 4, 5]
    # They are waited for once more, but not for ever.
    one.see(WorkerLost(worker=5, what="gone"))
    one.stop_rest()
    one.see(Judged(generation=2, may_continue=True))
    one.now += 59.0
    assert one.see(Tick()) == ()
    one.now += 2.0
    (action,) = one.see(Tick())
    assert isinstance(action, GiveUp) and "whole sequence-parallel groups" in action.reason


def test_nobody_comes_only_where_somebody_is_waited_for() -> None:
    one = training()
    assert one.see(NoReplacement()) == () and one.group.phase == "training"


def test_a_node_that_drains_serves_again_where_the_others_are_lost() -> None:
    """It is alive until its deadline, and whoever joins needs longer."""
    one = training()
    one.see(NodesUnusable(nodes=frozenset({"a"}), draining=frozenset({"a"})))
    for worker in (2, 3):
        one.see(WorkerLost(worker=worker, what="gone"))
    one.stop_rest()
    one.see(NodesUnusable(nodes=frozenset({"a", "b"}), draining=frozenset({"a"})))
    (start,) = one.see(Judged(generation=1, may_continue=True))
    assert isinstance(start, Start) and start.members == (0, 1)
    # Its loss was announced all the same.
    assert one.see(WorkerLost(worker=0, what="gone"))[0] == Stop(generation=2)
    assert one.group.lost[0].kind == "preempted"


def test_a_node_that_is_dead_does_not_serve_again() -> None:
    one = training()
    for worker in (2, 3):
        one.see(WorkerLost(worker=worker, what="gone"))
    one.stop_rest()
    one.see(NodesUnusable(nodes=frozenset({"a", "b"})))
    assert one.see(Judged(generation=1, may_continue=True)) == () and one.group.phase == "short"


def test_a_node_is_silent_once_its_last_worker_falls_silent_until_another_joins() -> None:
    one = training(workers=6)
    for worker, silent_s in enumerate((0.0, 5.0, 5.0, 0.0, 5.0)):
        one.see(WorkerLost(worker=worker, what="gone", silent_s=silent_s))
    assert one.group.silent == {"a"}, "of b the last one was lost with a sign, and of c one is left"
    one.see(Joined(worker=6, place=place(0)))
    assert not one.group.silent
    one.see(WorkerLost(worker=6, what="its process is gone"))
    assert not one.group.silent, "the node has answered since"


def test_workers_that_join_complete_the_groups_of_a_node_that_drains() -> None:
    one = training(least=4)
    one.see(NodesUnusable(nodes=frozenset({"a"}), draining=frozenset({"a"})))
    for worker in (2, 3):
        one.see(WorkerLost(worker=worker, what="gone"))
    one.stop_rest()
    assert one.see(Judged(generation=1, may_continue=True)) == () and one.group.phase == "short"
    one.see(Joined(worker=4, place=place(2)))
    (start,) = one.see(Joined(worker=5, place=place(3)))
    assert isinstance(start, Start) and sorted(start.members) == [0, 1, 4, 5]


def test_a_failure_that_may_not_continue_is_left_to_ray() -> None:
    one = training()
    one.end(2, error=BUG, is_final=True)
    (judge,) = one.stop_rest()
    assert isinstance(judge, Judge) and judge.is_final
    assert isinstance(one.see(Judged(generation=1, may_continue=False))[0], GiveUp)


def test_an_error_at_the_same_step_twice_is_final_and_at_another_step_is_not() -> None:
    one = training()
    finals = []
    for step, gib in ((5, 78.25), (6, 78.25), (6, 78.5)):
        # Measured numbers in its text differ.
        error = replace(BUG, what=f"OutOfMemoryError: step {step} ran out of memory: {gib} GiB were allocated")
        one.end(1, error=error, step=step, stepped=True)
        (judge,) = one.stop_rest()
        assert isinstance(judge, Judge)
        finals.append(judge.is_final)
        one.see(Judged(generation=one.group.generation, may_continue=True))
    assert finals == [False, False, True]


def fail(one: Coordinated, error: RankError, *workers: int, step: int = 5) -> Judge:
    for worker in workers:
        one.end(worker, error=error, step=step, stepped=step > 1)
    actions = one.stop_rest(stepped=step > 1)
    if not actions:
        one.now += CAUSE_S
        actions = one.see(Tick())
    (judge,) = actions
    assert isinstance(judge, Judge)
    return judge


def go_on(one: Coordinated) -> Action:
    (action,) = one.see(Judged(generation=one.group.generation, may_continue=True))
    return action


@pytest.mark.parametrize("step", [0, 5])
def test_a_node_whose_gpu_has_failed_is_left_and_its_rows_are_not_at_fault(step: int) -> None:
    one = training(workers=6)
    judge = fail(one, ECC, 3, step=step)
    assert judge.errors == (replace(ECC, rank=3),) and not judge.is_final
    start = go_on(one)
    assert isinstance(start, Start) and start.members == (0, 1, 4, 5) and one.group.broken == {"b"}
    # Of all later generations.
    fail(one, KILLED, 4)
    start = go_on(one)
    assert isinstance(start, Start) and start.members == (0, 1, 4, 5)


def test_a_device_error_that_returns_at_the_same_step_on_another_node_is_the_rows_or_the_programs() -> None:
    one = training(workers=6)
    fail(one, ECC, 3)
    go_on(one)
    judge = fail(one, ECC, 4)
    assert judge.is_final and judge.errors == (replace(ECC, rank=2, kind="raised"),) and one.group.broken == {"b"}


def test_a_device_error_at_another_step_leaves_one_more_node() -> None:
    one = training(workers=6)
    fail(one, ECC, 3)
    go_on(one)
    assert not fail(one, ECC, 4, step=6).is_final and one.group.broken == {"b", "c"}


def test_device_errors_on_several_nodes_at_once_leave_none_of_them() -> None:
    one = training()
    finals = []
    for _ in range(2):
        judge = fail(one, ECC, 1, 2)
        assert {error.kind for error in judge.errors} == {"raised"} and not one.group.broken
        finals.append(judge.is_final)
        go_on(one)
    assert finals == [False, True]


def test_a_device_that_fails_beside_a_lost_process_is_not_blamed() -> None:
    one = training()
    one.end(0, error=KILLED, step=5, stepped=True)
    fail(one, ECC, 3)
    assert not one.group.broken


def test_a_run_that_needs_the_broken_node_waits_for_another() -> None:
    one = training(least=4)
    one.group = replace(one.group, gather_s=60.0)
    fail(one, ECC, 0)
    # That it drains too, and could serve until it goes, changes nothing.
    one.see(NodesUnusable(nodes=frozenset({"a"}), draining=frozenset({"a"})))
    assert one.see(Judged(generation=1, may_continue=True)) == () and one.group.phase == "short"
    one.see(Joined(worker=4, place=place(4)))
    (start,) = one.see(Joined(worker=5, place=place(5)))
    assert isinstance(start, Start) and sorted(start.members) == [2, 3, 4, 5]


@pytest.mark.parametrize("step", [0, 1, 5], ids=["forming", "first step", "later"])
def test_an_error_of_one_nodes_network_that_returns_leaves_that_node(step: int) -> None:
    one = training(workers=6)
    judge = fail(one, NCCL, 2, step=step)
    assert judge.errors == (replace(NCCL, rank=2),) and not judge.is_final and not one.group.broken
    start = go_on(one)
    assert isinstance(start, Start) and start.members == (0, 1, 2, 3, 4, 5)
    judge = fail(one, NCCL, 3, step=step)
    assert judge.errors == (replace(NCCL, rank=3, kind="device"),) and one.group.broken == {"b"}
    start = go_on(one)
    assert isinstance(start, Start) and start.members == (0, 1, 4, 5)


def test_an_error_of_the_network_that_changes_its_node_is_bounded() -> None:
    one = training()
    for worker in (0, 2):
        fail(one, NCCL, worker, step=0)
        assert not one.group.broken
        action = go_on(one)
    assert isinstance(action, GiveUp)


def test_workers_are_tested_again_with_one_that_has_joined() -> None:
    one = training(most=6)
    starts = []
    for joined in ((), (4, 5), ()):
        for worker in joined:
            one.see(Joined(worker=worker, place=place(worker)))
        fail(one, KILLED, 0)
        starts.append(go_on(one))
    assert [start.is_tested for start in starts if isinstance(start, Start)] == [True, False, True]


def test_workers_whose_generation_has_trained_no_step_are_tested_again() -> None:
    one = training()
    fail(one, KILLED, 0, step=0)
    start = go_on(one)
    assert isinstance(start, Start) and not start.is_tested


def test_two_generations_without_a_step_are_left_to_ray() -> None:
    one = training()
    for attempt in range(MOST_FAILED_FORMS):
        one.end(1, error=KILLED)
        one.stop_rest(stepped=False)
        (action,) = one.see(Judged(generation=attempt + 1, may_continue=True))
    assert isinstance(action, GiveUp) and "2 attempts in a row" in action.reason


def test_the_cause_of_consequences_is_waited_for_and_not_for_ever() -> None:
    one = training()
    one.end(0, error=PEER)
    assert one.stop_rest() == (), "a node that died is noticed a moment later"
    one.now = CAUSE_S - 0.1
    assert one.see(Tick()) == ()
    (judge,) = one.see(WorkerLost(worker=3, what="gone"))
    assert isinstance(judge, Judge) and {error.kind for error in judge.errors} == {"consequence", "lost"}
    two = training()
    two.end(0, error=PEER)
    two.stop_rest()
    two.now = CAUSE_S
    (judge,) = two.see(Tick())
    assert isinstance(judge, Judge) and [error.kind for error in judge.errors] == ["consequence"]


def test_ranks_that_hang_are_ended_and_their_workers_stay() -> None:
    one = training()
    assert one.see(RanksHung(generation=0, ranks=(1,), what="late")) == ()
    assert one.see(RanksHung(generation=1, ranks=(1,), what="not moved")) == (Stop(generation=1),)
    (judge,) = one.stop_rest()
    assert isinstance(judge, Judge) and judge.errors == (RankError(rank=1, kind="lost", what="not moved"),)
    (start,) = one.see(Judged(generation=1, may_continue=True))
    assert isinstance(start, Start) and start.members == (0, 1, 2, 3)


def test_a_supervisor_that_does_not_stop_its_child_is_lost() -> None:
    one = training()
    one.end(0, error=KILLED)
    for worker in (1, 2):
        one.end(worker)
    one.now = 2 * END_S - 0.1
    assert one.see(Tick()) == ()
    one.now = 2 * END_S
    (judge,) = one.see(Tick())
    assert isinstance(judge, Judge) and judge.errors[-1].what == "its supervisor does not answer"
    (start,) = one.see(Judged(generation=1, may_continue=True))
    assert isinstance(start, Start) and start.members == (0, 1)


def test_a_child_that_holds_much_memory_may_take_longer_to_end() -> None:
    """A rank of a million tokens has 72 GiB of activations in host memory, which the kernel takes back page by page."""
    one = training()
    one.group = replace(one.group, end_s=end_bound_s(72 << 30))
    one.end(0, error=KILLED)
    for worker in (1, 2):
        one.end(worker)
    one.now = 50.0
    assert one.see(Tick()) == ()
    (judge,) = one.end(3)
    assert isinstance(judge, Judge) and [error.rank for error in judge.errors] == [0]


def test_reports_of_a_generation_that_is_over_change_nothing() -> None:
    one = training()
    one.end(1, error=KILLED, stepped=True)
    one.stop_rest()
    one.see(Judged(generation=1, may_continue=True))
    late = ChildEnded(worker=0, generation=1, report=Report(error=BUG), port=1)
    assert one.see(late) == () and one.see(Judged(generation=1, may_continue=False)) == ()
    assert one.group.phase == "training" and one.group.generation == 2


def test_an_attempt_ends_when_every_member_has() -> None:
    one = training()
    for worker in (0, 1, 2):
        assert one.end(worker, status="finished") == ()
    assert one.end(3, status="finished") == (Finish(status="finished"),)


def test_members_that_were_asked_to_move_go_on_without_the_node_that_leaves() -> None:
    one = training()
    one.see(NodesUnusable(nodes=frozenset({"a"})))
    one.see(MoveAsked())
    for worker in (0, 1, 2):
        one.end(worker, status="resized")
    stop, start = one.end(3, status="resized")
    assert stop == Stop(generation=1), "whoever stays behind holds no memory"
    assert isinstance(start, Start) and start.members == (2, 3)
    # Asked to grow, they end: Ray starts workers on the nodes that have joined.
    one.end(2, status="resized")
    assert one.end(3, status="resized") == (Finish(status="resized"),)


def test_the_end_of_a_stage_begins_the_next_on_the_same_workers() -> None:
    one = training()
    for worker in (0, 1, 2):
        assert one.end(worker, status="stage") == ()
    stop, start = one.end(3, status="stage")
    assert stop == Stop(generation=1)
    assert isinstance(start, Start) and (start.generation, start.members) == (2, (0, 1, 2, 3))
    for worker in (0, 1, 2):
        one.end(worker, status="finished")
    assert one.end(3, status="finished") == (Finish(status="finished"),)


def test_a_stage_that_was_trained_ends_the_failures_in_a_row() -> None:
    one = training()
    one.end(1, error=BUG)
    one.stop_rest(stepped=False)
    one.see(Judged(generation=1, may_continue=True))
    assert one.group.failed_forms == 1
    for worker in range(4):
        one.end(worker, status="stage")
    assert (one.group.generation, one.group.failed_forms, one.group.last_raised) == (3, 0, None)


def test_a_stage_ends_no_run_whose_nodes_are_all_to_go() -> None:
    """Its workers are there, and train until they are taken away."""
    one = training()
    one.see(NodesUnusable(nodes=frozenset({"a", "b"})))
    for worker in (0, 1, 2):
        one.end(worker, status="stage")
    stop, start = one.end(3, status="stage")
    assert stop == Stop(generation=1)
    assert isinstance(start, Start) and start.members == (0, 1, 2, 3)


def test_workers_that_join_later_are_members_of_the_next_generation() -> None:
    one = training(most=8)
    for worker in (4, 5, 6):
        assert one.see(Joined(worker=worker, place=place(worker))) == () and one.group.members == (0, 1, 2, 3)
    one.see(MoveAsked())
    actions = [one.end(worker, status="resized") for worker in range(4)]
    stop, start = actions[-1]
    assert stop == Stop(generation=1)
    assert isinstance(start, Start) and start.members == (0, 1, 2, 3, 4, 5), "whole groups only"
    # Whatever makes the next generation; and they fail as any other does.
    one.see(Joined(worker=7, place=place(7)))
    one.see(WorkerLost(worker=4, what="gone"))
    one.stop_rest()
    (start,) = one.see(Judged(generation=2, may_continue=True))
    assert isinstance(start, Start) and start.members == (0, 1, 2, 3, 6, 7)


def test_a_stop_that_overtakes_a_move_ends_the_run() -> None:
    one = training()
    one.see(NodesUnusable(nodes=frozenset({"a"})))
    one.see(MoveAsked())
    for worker in (0, 1, 2):
        one.end(worker, status="stopped")
    assert one.end(3, status="stopped") == (Finish(status="stopped"),)


def test_a_draining_node_that_dies_is_a_preemption() -> None:
    one = training()
    one.see(NodesUnusable(nodes=frozenset({"b"})))
    one.see(WorkerLost(worker=2, what="gone"))
    one.see(WorkerLost(worker=3, what="gone"))
    (judge,) = one.stop_rest()
    assert isinstance(judge, Judge) and {error.kind for error in judge.errors} == {"preempted"}


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
    one = training(workers=8, most=12)
    running: set[int] = set(range(8))
    """Workers whose children may be alive, as only their supervisors know."""
    for event in history:
        generation, actions = one.group.generation, []
        match event:
            case ("end", worker, error, status, past):
                report = Report(error=error, status=None if error else status)
                actions += one.see(ChildEnded(worker=worker, generation=generation + past, report=report, port=1))
                if past == 0:
                    running.discard(worker)
            case ("join", worker):
                actions += one.see(Joined(worker=worker, place=place(worker)))
            case ("lost", worker):
                actions += one.see(WorkerLost(worker=worker, what="gone"))
                running.discard(worker)
            case ("unusable", nodes, draining):
                actions += one.see(NodesUnusable(nodes=nodes, draining=draining))
            case ("nobody",):
                actions += one.see(NoReplacement())
            case ("move",):
                actions += one.see(MoveAsked())
            case ("tick", seconds):
                one.now += seconds
                actions += one.see(Tick())
            case (verdict,):
                actions += one.see(Judged(generation=generation, may_continue=verdict == "yes"))
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
    # Whatever happened: supervisors that answer, and a judge that does, lead to an end or to children that train.
    if one.group.phase == "stopping":
        one.stop_rest()
        one.now += 2 * END_S + CAUSE_S
        one.see(Tick())
    if one.group.phase == "judging":
        one.see(Judged(generation=one.group.generation, may_continue=True))
    one.see(NoReplacement())
    assert one.group.phase in ("training", "ended")


@pytest.mark.parametrize("phase", ["training", "stopping", "judging"])
def test_a_move_is_only_asked_of_members_that_train(phase: str) -> None:
    one = training()
    if phase != "training":
        one.end(1, error=KILLED, stepped=True)
    if phase == "judging":
        one.stop_rest()
    one.see(MoveAsked())
    assert one.group.phase == phase and one.group.moves is (phase == "training")


def test_workers_that_never_join_are_given_up() -> None:
    one = Coordinated()
    one.group = replace(one.group, gather_until=300.0)
    one.see(Joined(worker=0, place=place(0)))
    one.now = 299.0
    assert one.see(Tick()) == ()
    one.now = 300.0
    (action,) = one.see(Tick())
    assert isinstance(action, GiveUp) and "joined" in action.reason and one.group.gave_up


def test_the_same_error_before_the_first_step_is_not_final_at_once() -> None:
    """A storage that is away for a while gives it twice; the number of attempts without a step bounds it."""
    one = training()
    for generation in (1, 2):
        one.end(1, error=BUG, step=0)
        (judge,) = one.stop_rest(stepped=False)
        assert isinstance(judge, Judge) and not judge.is_final
        one.see(Judged(generation=generation, may_continue=True))
