"""The queue of storage calls: calls run in order, a hung call blocks its caller only once, and errors are raised."""

from __future__ import annotations

import threading
import time

import pytest

from ray_ulysses.storage import background
from ray_ulysses.storage.background import BackgroundCalls


def test_calls_are_made_in_order_and_one_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, gate, made = BackgroundCalls("test"), threading.Event(), list[int]()

    def ask(number: int) -> None:
        calls.ask(lambda: made.append(number), 10)
        calls.wait_promptly()

    monkeypatch.setattr(background, "PROMPT_S", 60.0)
    for number in range(100):
        ask(number)
        assert made == [*range(number + 1)] and calls.is_idle and calls.waiting_bytes == 0
    monkeypatch.setattr(background, "PROMPT_S", 0.2)
    calls.ask(lambda: gate.wait(60.0), 10)
    began = time.monotonic()
    for number in range(100, 1100):
        ask(number)
    assert time.monotonic() - began < 60.0 and len(made) == 100
    assert not calls.is_idle and calls.waiting_bytes == 10_010 and calls.hangs_for_s >= 0.2
    assert not calls.wait(0.01)
    gate.set()
    assert calls.wait(20.0) and made == [*range(1100)] and calls.hangs_for_s == 0.0
    calls.close()


def test_what_a_call_raises_is_raised_to_those_who_ask_and_wait() -> None:
    calls, made = BackgroundCalls("test"), list[int]()
    calls.ask(lambda: 1 // 0)
    for ask in (lambda: calls.wait(20.0), lambda: calls.ask(lambda: made.append(1)), calls.wait_promptly):
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
