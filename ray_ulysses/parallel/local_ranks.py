"""Runs a function on several local ranks, each in its own process, with a process group."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from ray_ulysses.errors import RunError, UlyssesError, UserError
from ray_ulysses.logging import quiet_libraries
from ray_ulysses.parallel.gpu_environment import expand_segments

_POLL_S = 0.25
_GRACE_S = 5.0
"""Seconds to wait for the other ranks after a rank fails: another rank may raise the error that caused the failure."""


@dataclass(eq=False)
class RankDiedError(Exception):
    """Raised if a rank exits without a result or a ``UlyssesError``. Contains its exit status and last output line."""

    rank: int
    how: str
    last_line: str


def run_local_ranks(
    work: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    limit_s: float = math.inf,
    hear: Callable[[Any], object] | None = None,
) -> Any:
    """Run a function on local ranks, and return rank 0's result.

    Args:
        work: Picklable function, called on every rank with the rank's device, a function that sends a value to
            ``hear``, and ``arguments``. The default process group is initialized: NCCL with GPUs, otherwise gloo.
        world_size: Number of ranks. With GPUs, at most the number of GPUs.
        arguments: Further arguments for ``work``; must be picklable.
        limit_s: Time limit for all ranks, in seconds.
        hear: Called in this process with each value that rank 0 sends. If None, the ranks' output is hidden.

    Raises:
        UlyssesError: The error that a rank raised; if several ranks failed, the error of the lowest rank.
        RankDiedError: A rank exited in any other way.
        TimeoutError: The ranks did not finish within ``limit_s``.
    """
    said = get_context("spawn").SimpleQueue()
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        start = (pickle.dumps((work, arguments)), world_size, folder, said, limit_s, hear is None)
        errors = [folder / f"error-{rank}" for rank in range(world_size)]
        ranks = spawn(_run_rank, start, nprocs=world_size, join=False)
        try:
            is_done = False
            while not is_done:
                try:
                    is_done = ranks.join(timeout=_POLL_S, grace_period=_GRACE_S)
                finally:
                    while hear is not None and not said.empty():
                        hear(said.get())
                if any(error.exists() for error in errors):
                    # Some ranks may hang instead of exiting.
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                if not is_done and time.monotonic() > deadline:
                    raise TimeoutError
        except (ProcessRaisedException, ProcessExitedException, TimeoutError) as error:
            for path in errors:
                if path.exists():
                    raise pickle.loads(path.read_bytes()) from error
            if isinstance(error, TimeoutError):
                raise
            raise _died(folder, error) from error
        finally:
            for process in ranks.processes:
                process.kill()
            # The processes write to the folder until they exit.
            for process in ranks.processes:
                process.join()
        return pickle.loads((folder / "result").read_bytes())


def _run_rank(
    rank: int,
    pickled: bytes,
    world_size: int,
    folder: Path,
    said: Any,
    limit_s: float,
    is_quiet: bool,
) -> None:
    if is_quiet:
        with (folder / f"log-{rank}").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    # Unpickling imports the function's module, and Transformers with it.
    quiet_libraries()
    work, arguments = pickle.loads(pickled)
    expand_segments(os.environ)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
        # By default gloo resolves the host name, which often fails in containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=None if math.isinf(limit_s) else timedelta(seconds=limit_s),
        )
        result = work(device, said.put if rank == 0 else lambda value: None, *arguments)
    except UlyssesError as error:
        kind = UserError if isinstance(error, UserError) else RunError
        part = folder / f"part-{rank}"
        part.write_bytes(pickle.dumps(kind(*map(str, error.args))))
        part.rename(folder / f"error-{rank}")
        raise
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _died(folder: Path, error: ProcessRaisedException | ProcessExitedException) -> RankDiedError:
    how, text = "an error", str(error)
    if isinstance(error, ProcessExitedException):
        how, text = error.signal_name or f"exit code {error.exit_code}", ""
        with suppress(OSError):
            text = (folder / f"log-{error.error_index}").read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return RankDiedError(error.error_index, how, lines[-1] if lines else "no output")
