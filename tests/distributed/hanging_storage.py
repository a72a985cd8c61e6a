"""A directory whose file system stops to answer one process, as a network file system does whose server is away."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray_ulysses.config import Config
from tests.distributed.run_case import run_worker

_GATE_S = 20.0
_AUDITED = {"open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.link", "os.mkdir", "os.truncate"}


class HangingDirectory:
    """Calls of this process under a folder wait while the gate is closed; it stays for the life of the process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._gate = str(folder), threading.Event()
        self._gate.set()
        sys.addaudithook(self._audit)
        for name in ("pwrite", "fsync", "stat"):
            setattr(os, name, self._guarded(getattr(os, name)))

    def hang(self) -> None:
        """Answer nothing any more."""
        self._gate.clear()

    def answer(self) -> None:
        """Answer again."""
        self._gate.set()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _AUDITED and not self._gate.is_set():
            self._wait(arguments[0])

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(target: Any, *arguments: Any, **options: Any) -> Any:
            if not self._gate.is_set():
                self._wait(target)
            return call(target, *arguments, **options)

        return guarded

    def _wait(self, target: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fsdecode(target)
        if path.startswith(self._folder) and not self._gate.wait(_GATE_S):
            raise TimeoutError(f"{threading.current_thread().name} waited for {path}, and no step came meanwhile")


def run_worker_while_storage_hangs(
    rank: int, world_size: int, config: Config, session: str, steps: tuple[int, int], told: Path
) -> tuple[str, int]:
    """Be a worker of a run whose storage hangs on rank 0 from one step until another is done, not for some time."""
    storage = HangingDirectory(config.run_dir) if rank == 0 else None

    def watch(name: str, step: int) -> None:
        if storage is None:
            return
        with told.open("a") as stream:
            stream.write(f"{name} {step}\n")
        if (name, step) == ("step", steps[0]):
            storage.hang()
        elif (name, step) == ("step", steps[1]):
            storage.answer()

    return run_worker(rank, world_size, config, session, watch=watch)
