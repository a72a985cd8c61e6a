"""Triggers: why a checkpoint is due, the same on every rank."""

from __future__ import annotations

import pytest

from ray_ulysses.config.running import CheckpointSection
from ray_ulysses.trainer.saving import Reason, due, retry_pause_s, steps_apart, time_is_up
from ray_ulysses.trainer.step import Flags

RULES = CheckpointSection(every_steps=10, every_minutes=1.0, save_at_end=True)
SILENT = CheckpointSection(every_steps=None, every_minutes=None, save_at_end=False)


@pytest.mark.parametrize(
    ("agreed", "step", "reason"),
    [
        (Flags(), 10, "steps"),
        (Flags(), 11, None),
        (Flags(time_is_up=True), 11, "minutes"),
        (Flags(save_requested=True), 11, "request"),
        (Flags(save_requested=True), 10, "request"),
        (Flags(notice=True), 11, None),
        (Flags(notice=True, notice_due=True), 11, "preemption"),
        (Flags(notice=True, notice_due=True, saving=True), 11, None),
        (Flags(notice=True, notice_due=True, saving=True), 20, "steps"),
        (Flags(stop=True), 11, "stop"),
        (Flags(stop=True, resize=True), 11, "resize"),
        (Flags(), 99, "end"),
        (Flags(failed=True), 11, None),
        (Flags(failed=True, retry_due=True), 11, "retry"),
        (Flags(failed=True), 20, "steps"),
        (Flags(failed=True, retry_due=True, saving=True), 11, None),
    ],
)
def test_what_is_due_has_a_reason(agreed: Flags, step: int, reason: Reason | None) -> None:
    assert due(RULES, agreed, step=step, taken_step=0, last_step=99) == reason


@pytest.mark.parametrize(
    "agreed", [Flags(), Flags(save_requested=True), Flags(stop=True), Flags(notice=True, notice_due=True)]
)
def test_a_state_that_was_taken_is_not_taken_again(agreed: Flags) -> None:
    assert due(RULES, agreed, step=20, taken_step=20, last_step=20) is None


def test_without_rules_a_request_still_saves_and_an_end_does_not() -> None:
    assert due(SILENT, Flags(save_requested=True), step=5, taken_step=0, last_step=9) == "request"
    assert due(SILENT, Flags(resize=True, stop=True), step=5, taken_step=0, last_step=9) == "resize"
    assert due(SILENT, Flags(stop=True), step=5, taken_step=0, last_step=9) is None
    assert due(SILENT, Flags(), step=9, taken_step=0, last_step=9) is None


def test_the_end_of_a_stage_is_saved_whatever_the_rules() -> None:
    assert due(SILENT, Flags(), step=9, taken_step=0, last_step=9, ends_stage=True) == "stage"
    assert due(SILENT, Flags(), step=8, taken_step=0, last_step=9, ends_stage=True) is None


def test_minutes_are_counted_from_the_last_state_taken() -> None:
    assert not time_is_up(RULES, last_save=100.0, now=159.9)
    assert time_is_up(RULES, last_save=100.0, now=160.0)
    assert not time_is_up(SILENT, last_save=0.0, now=1e9)


def test_saves_that_go_on_failing_are_tried_ever_less_often() -> None:
    assert [retry_pause_s(failures, 2) for failures in range(1, 10)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert retry_pause_s(10**6, 0) == 30


@pytest.mark.parametrize(
    ("step_s", "stall_s", "failures", "apart"),
    [
        pytest.param(1.0, 0.0, 0, 1, id="the-first"),
        pytest.param(1.0, 0.010, 0, 1, id="one-percent"),
        pytest.param(1.0, 0.011, 0, 2, id="more-than-one-percent"),
        pytest.param(0.05, 0.008, 0, 1, id="nobody-notices-ten-milliseconds"),
        pytest.param(300.0, 30.0, 0, 10, id="from-a-disk"),
        pytest.param(1.0, 0.0, 1, 1, id="after-one-failure"),
        pytest.param(1.0, 0.0, 3, 4, id="after-failures"),
        pytest.param(1.0, 0.0, 99, 5, id="at-least-every-five-seconds"),
        pytest.param(60.0, 0.0, 99, 1, id="after-every-long-step"),
        pytest.param(0.0, 0.0, 99, 65536, id="not-for-ever"),
        pytest.param(1.0, 0.3, 1, 30, id="the-rarer-of-both"),
    ],
)
def test_peer_memory_costs_a_hundredth_of_the_time_at_most(
    step_s: float, stall_s: float, failures: int, apart: int
) -> None:
    assert steps_apart(step_s, stall_s, failures) == apart
