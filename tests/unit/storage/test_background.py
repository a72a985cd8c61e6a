"""Calls of a storage in a thread: in order, without a wait for one that hangs, and with an error that is seen."""

from __future__ import annotations

import threading
import time

import pytest

from ray_ulysses.storage import background
from ray_ulysses.storage.background import BackgroundCalls


def test_calls_are_made_in_order_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PROMPT_S", 60.0)
    calls, made = BackgroundCalls("test"), list[int]()
    for number in range(100):
        calls.ask(lambda number=number: made.append(number), 10)  # type: ignore[misc]
        calls.wait_promptly()
        assert made == [*range(number + 1)] and calls.is_idle and calls.waiting_bytes == 0
    calls.close()


def test_a_call_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PROMPT_S", 0.2)
    calls, gate, made = BackgroundCalls("test"), threading.Event(), list[int]()
    calls.ask(lambda: gate.wait(60.0), 10)
    began = time.monotonic()
    for number in range(1000):
        calls.ask(lambda number=number: made.append(number), 10)  # type: ignore[misc]
        calls.wait_promptly()
    assert time.monotonic() - began < 60.0 and not made
    assert not calls.is_idle and calls.waiting_bytes == 10_010 and calls.hangs_for_s >= 0.2
    assert not calls.wait(0.01)
    gate.set()
    assert calls.wait(20.0) and made == [*range(1000)] and calls.hangs_for_s == 0.0
    calls.close()


def test_what_a_call_raises_is_raised_to_those_who_ask_and_wait() -> None:
    calls, made = BackgroundCalls("test"), list[int]()
    calls.ask(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        calls.wait(20.0)
    for ask in (lambda: calls.ask(lambda: made.append(1)), calls.wait_promptly):
        with pytest.raises(ZeroDivisionError):
            ask()
    assert not made


def test_it_ticks_where_nothing_is_asked_and_ends_when_it_is_closed() -> None:
    ticked, thread = threading.Semaphore(0), list[threading.Thread]()
    calls = BackgroundCalls("test", tick=ticked.release, every_s=0.01)
    assert ticked.acquire(timeout=20.0) and ticked.acquire(timeout=20.0)
    calls.ask(lambda: thread.append(threading.current_thread()))
    calls.close()
    assert calls.wait(20.0)
    thread[0].join(20.0)
    assert not thread[0].is_alive()
