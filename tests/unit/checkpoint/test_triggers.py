"""Triggers: why a checkpoint is due, the same on every rank."""

from __future__ import annotations

import pytest

from ray_ulysses.checkpoint.triggers import Agreed, Reason, Triggers, due, time_is_up

RULES = Triggers(every_steps=10, every_s=60.0, at_end=True)
SILENT = Triggers(every_steps=None, every_s=None, at_end=False)


@pytest.mark.parametrize(
    ("agreed", "step", "reason"),
    [
        (Agreed(), 10, "steps"),
        (Agreed(), 11, None),
        (Agreed(time_is_up=True), 11, "minutes"),
        (Agreed(asked=True), 11, "request"),
        (Agreed(asked=True), 10, "request"),
        (Agreed(notice=True), 11, "preemption"),
        (Agreed(notice=True, all_idle=False), 11, None),
        (Agreed(notice=True, all_idle=False), 20, "steps"),
        (Agreed(stop=True), 11, "stop"),
        (Agreed(stop=True, resize=True), 11, "resize"),
        (Agreed(), 99, "end"),
        (Agreed(failed=True), 11, "retry"),
        (Agreed(failed=True), 20, "steps"),
    ],
)
def test_what_is_due_has_a_reason(agreed: Agreed, step: int, reason: Reason | None) -> None:
    assert due(RULES, agreed, step=step, taken_step=0, last_step=99) == reason


@pytest.mark.parametrize("agreed", [Agreed(), Agreed(asked=True), Agreed(stop=True), Agreed(notice=True)])
def test_a_state_that_was_taken_is_not_taken_again(agreed: Agreed) -> None:
    assert due(RULES, agreed, step=20, taken_step=20, last_step=20) is None


def test_without_rules_a_request_still_saves_and_an_end_does_not() -> None:
    assert due(SILENT, Agreed(asked=True), step=5, taken_step=0, last_step=9) == "request"
    assert due(SILENT, Agreed(resize=True, stop=True), step=5, taken_step=0, last_step=9) == "resize"
    assert due(SILENT, Agreed(stop=True), step=5, taken_step=0, last_step=9) is None
    assert due(SILENT, Agreed(), step=9, taken_step=0, last_step=9) is None


def test_minutes_are_counted_from_the_last_state_taken() -> None:
    assert not time_is_up(RULES, last_save=100.0, now=159.9)
    assert time_is_up(RULES, last_save=100.0, now=160.0)
    assert not time_is_up(SILENT, last_save=0.0, now=1e9)
