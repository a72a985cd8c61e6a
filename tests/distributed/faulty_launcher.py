"""A launcher whose children fail where a test plants it: in the folder that ``FAULTS`` names, while they run.

A fault is a JSON object: its ``number``, the ``rank`` that it strikes, ``where`` and its ``kind``, and what that needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ray_ulysses.supervision import child, launcher
from ray_ulysses.trainer import resume, saving
from ray_ulysses.trainer.worker import Worker

PLANTED = "fault.json"
PLACES = ("start", "load", "step", "save", "memory")
"""Before a state is chosen, in the middle of loading a state, before a micro-batch, and before a state is saved."""
_START_BEATS = 2
_COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
                "all_gather", "gather")  # fmt: skip
_WAIT_S = 60.0
_COPY_TIMEOUT_S = 20.0


def plant(folder: Path, fault: dict[str, Any]) -> None:
    (folder / "new").write_text(json.dumps(fault))
    (folder / "new").rename(folder / PLANTED)


def struck_at(folder: Path, number: int) -> float | None:
    try:
        return float((folder / f"struck-{number}").read_text())
    except FileNotFoundError:
        return None


def _raise(fault: dict[str, Any]) -> None:
    raise ValueError(f"planted as number {fault['number']}")


def _kill_others(fault: dict[str, Any]) -> None:
    for pid in fault["pids"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _spoil(fault: dict[str, Any]) -> None:
    for pid in fault["pids"]:
        os.kill(pid, fault["signal"])
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(fault: dict[str, Any]) -> None:
    done = Path(os.environ["FAULTS"], f"done-{fault['number']}")
    deadline = time.monotonic() + _WAIT_S
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def _skip_collective(fault: dict[str, Any]) -> None:
    """Have training's thread pass its next collective by, as a rank does that takes another branch than the others."""
    training = threading.get_ident()
    real: dict[str, Any] = {name: getattr(dist, name) for name in _COLLECTIVES}

    def put(collectives: Mapping[str, Any]) -> None:
        for name, one in collectives.items():
            setattr(dist, name, one)
            setattr(distributed_c10d, name, one)

    def skipping(name: str) -> Callable[..., Any]:
        def skip(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != training:
                return real[name](*arguments, **options)
            put(real)
            return SimpleNamespace(wait=lambda: True) if options.get("async_op") else None

        return skip

    put({name: skipping(name) for name in _COLLECTIVES})


def _take_storage_away(fault: dict[str, Any]) -> None:
    """Put files where the checkpoints' folders were, for a while; whoever brings them back outlives this process."""
    script = "set -e; " + "".join(f"mv {name} {name}.away; : > {name}; " for name in ("checkpoints", "attempts"))
    subprocess.run(["sh", "-c", script], cwd=fault["run_dir"], check=True)
    if fault["seconds"] is not None:
        back = "".join(f"rm {name}; mv {name}.away {name}; " for name in ("checkpoints", "attempts"))
        subprocess.Popen(
            ["sh", "-c", f"sleep {fault['seconds']}; {back}"], cwd=fault["run_dir"], start_new_session=True
        )


def _abort(fault: dict[str, Any]) -> None:
    """End as PyTorch's watchdog of NCCL ends a process whose GPU has failed."""
    os.write(2, b"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  ")
    os.write(2, fault["text"].encode() + b"\nframe #0: c10::Error + 0x96 (0x7f in libc10.so)\n")
    os.abort()


ACTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "raise": _raise,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "abort": _abort,
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda _: os._exit(3),
    "hang": lambda _: time.sleep(3600),
    "late": lambda fault: time.sleep(fault["seconds"]),
    "skip": _skip_collective,
    "kill others": _kill_others,
    "spoil": _spoil,
    "wait": _wait,
    "storage away": _take_storage_away,
}


def faulty(worker: Worker, folder: Path, pace_s: float) -> Worker:
    starts = 0
    kept, states = threading.Condition(), {"memory": 0, "in memory": 0}

    def fail(where: str, step: int = 0) -> None:
        try:
            fault = json.loads((folder / PLANTED).read_text())
        except FileNotFoundError:
            return
        if (fault["where"], fault["rank"]) != (where, worker.rank) or step % fault.get("every", 1):
            return
        try:
            (folder / PLANTED).rename(folder / f"planted-{fault['number']}")
        except FileNotFoundError:
            return
        if fault.get("once_kept"):
            wait_for_copies()
        (folder / "striking").write_text(repr(time.time()))
        (folder / "striking").rename(folder / f"struck-{fault['number']}")
        ACTIONS[fault["kind"]](fault)

    def wait_for_copies() -> None:
        with kept:
            kept.wait_for(lambda: states["in memory"] >= states["memory"], _COPY_TIMEOUT_S)

    def beat(phase: Any, step: int) -> None:
        nonlocal starts
        worker.beat(phase, step)
        if phase == "step" and "WAITS_FOR_COPIES" in os.environ:
            wait_for_copies()
        starts += phase == "start"
        if phase == "step" or (phase == "start" and starts == _START_BEATS):
            fail(phase, step + 1)

    def wait_for_row(waits: bool) -> None:
        worker.wait_for_row(waits)
        if waits:
            fail("row")

    def on_event(name: str, step: int) -> None:
        if name in states:
            with kept:
                states[name] = step
                kept.notify()
        if name == "step":
            time.sleep(pace_s)
        elif name in PLACES:
            fail(name)

    load = resume.load_parts

    def load_parts(*arguments: Any, **options: Any) -> int:
        loaded = load(*arguments, **options)
        fail("load")
        return loaded

    resume.load_parts = load_parts
    return replace(worker, beat=beat, wait_for_row=wait_for_row, on_event=on_event)


def main(arguments: Sequence[str]) -> None:
    folder, pace_s = Path(os.environ["FAULTS"]), float(os.environ["PACE_S"])
    # Each node's workers would take all cores, and here all nodes share them.
    torch.set_num_threads(1)
    torch.set_num_threads = lambda _: None
    if "WAITS_FOR_COPIES" in os.environ:
        # These tests count lost steps. That slow copies are made less often has tests of its own.
        saving._ALLOWED_STALL_S = 1.0
    make_worker = child._worker
    child._worker = lambda *given: faulty(make_worker(*given), folder, pace_s)
    launcher.main([*arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
