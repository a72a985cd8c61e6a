"""Runs a function on several ranks, each a process forked from a server that holds the imports already.

The server is clean (it never ran a backward pass, a collective or a thread of ours), so that forking is safe
whatever the test process did before. The function and its arguments are pickled: use functions of a module,
not closures. Ranks on a GPU all share the first one, over NCCL, and are fresh processes: the server has chosen the CPU
as DeepSpeed's accelerator.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytest

from ray_ulysses.parallel.gpu_environment import shared_gpu_environment

Device = Literal["cpu", "cuda"]
DEFAULT_TIMEOUT_S = 90.0
# Longer than the 20 s for which a rank may complete a checkpoint after another has failed.
GRACE_S = 30.0
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._inductor.compile_fx",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "safetensors.torch",
    "pytest",
    "tests.distributed.checkpoint_layouts_case",
    "tests.distributed.run_case",
    "tests.distributed.seam_case",
    "tests.distributed.frozen_imports",  # the last one
)
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class RankFailure(AssertionError):
    """At least one rank raised, died or hung; the text holds what every rank said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    rank: int
    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    """Its exit code (minus the signal's number if a signal killed it), if it ended without a word."""
    stacks: str | None = None
    """Where its threads stood, if it was killed because it hung."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None and self.stacks is None

    def describe(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised:\n{self.error}"
        if self.stacks is not None:
            return f"rank {self.rank} hung and was killed; its threads stood at:\n{self.stacks}"
        if self.exit_code is not None:
            return f"rank {self.rank} died with exit code {self.exit_code}"
        return f"rank {self.rank} returned"


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on every rank and return what each returned, by rank.

    Args:
        fn: A function of a module (it is pickled by name).
        options: Those of `run_ranks_to_outcomes`, and keyword arguments of the function.

    Raises:
        RankFailure: A rank raised, died or hung.
    """
    outcomes = run_ranks_to_outcomes(fn, world_size, *args, **options)
    if not all(outcome.ok for outcome in outcomes):
        raise RankFailure("\n".join(outcome.describe() for outcome in outcomes))
    return [outcome.value for outcome in outcomes]


def run_calls(world_size: int, calls: Mapping[str, tuple[Any, ...]], **options: Any) -> dict[str, list[Any]]:
    """Call several functions one after the other on the same ranks, and return what each returned, by name and rank.

    Args:
        calls: By name a function of a module, and its arguments after ``rank`` and ``world_size``.
        options: Those of `run_ranks_to_outcomes`, for all calls together.
    """
    found = run_ranks(_call_each, world_size, dict(calls), **options)
    return {name: [one[name] for one in found] for name in calls}


def _call_each(rank: int, world_size: int, calls: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    found = {}
    for name, (fn, *arguments) in calls.items():
        try:
            found[name] = fn(rank, world_size, *arguments)
        except Exception as error:
            error.add_note(f"in the call {name!r}")
            raise
    return found


def run_ranks_to_outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    process_group: bool = True,
    device: Device = "cpu",
    **kwargs: Any,
) -> list[RankOutcome]:
    """Run like `run_ranks`, but return what became of each rank; for tests in which a rank has to die.

    Args:
        timeout_s: All of them together may take this long; then they are killed. Also the timeout of collectives.
        process_group: Whether a group over all ranks is made before and destroyed after.
        device: Whether ranks are on the CPU with gloo, or all on the first GPU with NCCL.
    """
    context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _environment(device):
        processes: list[Any] = []
        connections: list[Connection] = []
        port = free_port()
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            call = partial(_call, folder, rank, world_size, timeout_s, process_group, partial(fn, **kwargs), args)
            variables = environment_of(rank, world_size, port, device)
            stacks = os.path.join(folder, f"stacks-{rank}")
            process = context.Process(target=_rank_main, args=(sender, stacks, variables, call), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            connections.append(receiver)
        try:
            return _collect(processes, connections, Path(folder), timeout_s)
        finally:
            for process, connection in zip(processes, connections, strict=True):
                if process.is_alive():
                    process.kill()
                process.join()
                connection.close()


def free_port() -> int:
    """Return a TCP port that nobody listens on, and that the system gives to nobody until the caller does.

    The system takes the ports of outgoing connections and of ``bind(0)`` from the ephemeral range (32768 and above on
    Linux), so that a port of that range may be gone by the time its server starts. Ray's workers take 10002 to 19999.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment_of(rank: int, world_size: int, port: int, device: Device) -> dict[str, str]:
    variables = {
        **ENVIRONMENT,
        "DS_ACCELERATOR": device,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if device == "cuda":
        # Each is alone on a host of its own, as NCCL sees it.
        variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **shared_gpu_environment(f"rank-{rank}")}
    return variables


@contextmanager
def _environment(device: Device) -> Iterator[None]:
    """Set what the server must inherit when it starts; the test process gets its own values back."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "DS_ACCELERATOR": device}.items():
            patch.setenv(name, value)
        yield


def _collect(processes: list[Any], connections: list[Connection], folder: Path, timeout_s: float) -> list[RankOutcome]:
    """Wait for every rank; after the first failure the others have `GRACE_S`, then they are killed."""
    outcomes: dict[int, RankOutcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(outcomes) < len(processes):
        pending = [rank for rank in range(len(processes)) if rank not in outcomes]
        left = deadline - time.monotonic()
        ready = wait([connections[rank] for rank in pending], timeout=max(left, 0.0)) if left > 0 else []
        if not ready:
            for rank in pending:
                outcomes[rank] = RankOutcome(rank=rank, stacks=_stacks_of(processes[rank], folder, rank))
            break
        for rank in pending:
            if connections[rank] not in ready:
                continue
            outcomes[rank] = _receive(processes[rank], connections[rank], rank)
            if not outcomes[rank].ok:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return [outcomes[rank] for rank in range(len(processes))]


def _receive(process: Any, connection: Connection, rank: int) -> RankOutcome:
    """Read what a rank sent; a pipe that closed without a word is a death."""
    try:
        kind, value = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(GRACE_S)
        return RankOutcome(rank=rank, exit_code=process.exitcode if process.exitcode is not None else -1)
    return RankOutcome(rank=rank, value=value) if kind == "value" else RankOutcome(rank=rank, error=value)


def _stacks_of(process: Any, folder: Path, rank: int) -> str:
    path = folder / f"stacks-{rank}"
    if process.is_alive() and path.exists():
        os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        while not (said := path.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return said or "(no answer)"
    return "(not started)"


def _rank_main(sender: Connection, stacks_path: str, variables: dict[str, str], call: Callable[[], Any]) -> None:
    with open(stacks_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        os.environ.update(variables)
        try:
            # Plain pickle: a Connection's own would pass tensors as handles of a process about to end.
            answer = pickle.dumps(("value", call()))
        except BaseException:
            answer = pickle.dumps(("error", traceback.format_exc()))
        sender.send_bytes(answer)
        sender.close()
    # The interpreter's shutdown would wait for threads of a group whose peers are gone.
    os._exit(0)


def _call(
    folder: str, rank: int, world_size: int, timeout_s: float, process_group: bool, fn: Callable[..., Any], args: Any
) -> Any:
    import torch
    import torch.distributed as dist

    backend: dict[str, Any] = {"backend": "gloo"}
    torch.set_num_threads(1)
    if os.environ["DS_ACCELERATOR"] == "cuda":
        from ray_ulysses.supervision.child import backend_of

        torch.cuda.set_device(0)
        backend = backend_of(torch.device("cuda", 0))
        # Law 1 is about fp32.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    else:
        import deepspeed.ops

        # DeepSpeed 0.19.8 builds a C++ communication op at start (30 s) unless it believes that none is
        # compatible.
        deepspeed.ops.__compatible_ops__ = {}
    if not process_group:
        return fn(rank, world_size, *args)
    dist.init_process_group(
        **backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )  # fmt: skip
    value = fn(rank, world_size, *args)
    dist.barrier()
    dist.destroy_process_group()
    return value
