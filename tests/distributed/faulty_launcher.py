"""A launcher whose children fail where the test planted it: ``FAULTS`` holds one fault per generation, as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.supervision import child, launcher
from ray_ulysses.supervision.order import Order
from ray_ulysses.supervision.shared_progress import SharedProgress
from ray_ulysses.trainer.worker import Worker


def _raise(text: str) -> None:
    raise ValueError(text)


ACTIONS: dict[str, Callable[[str], object]] = {
    "raise": _raise,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda _: os._exit(3),
    "hang": lambda _: time.sleep(3600),
}


def plant(worker: Worker, fault: dict[str, Any], generation: int) -> Worker:
    """Return the worker with its fault: at the n-th sign of life of the start, or at an event from a step on."""
    starts = 0

    def fail(name: str, step: int) -> None:
        if name == fault["where"] and step >= fault["at"]:
            ACTIONS[fault["kind"]](f"planted in generation {generation}")

    def beat(phase: Any, step: int) -> None:
        nonlocal starts
        worker.beat(phase, step)
        starts += phase == "start"
        if phase == "start":
            fail("start", starts)

    return replace(worker, beat=beat, on_event=fail)


def main(arguments: list[str]) -> None:
    """Serve orders as the launcher does, with the faults of the environment."""
    faults = json.loads(os.environ["FAULTS"])
    make_worker = child._worker

    def make_faulty(order: Order, config: Config, progress: SharedProgress, streams: tuple[int, int]) -> Worker:
        worker = make_worker(order, config, progress, streams)
        fault = faults[order.generation - 1] if order.generation <= len(faults) else None
        return plant(worker, fault, order.generation) if fault and fault["rank"] == order.rank else worker

    child._worker = make_faulty
    launcher.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
