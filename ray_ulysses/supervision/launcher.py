"""A warm process that forks a child per attempt: all libraries are imported, and no GPU is in use.

A supervisor executes ``python -m ray_ulysses.supervision.launcher FD``, where FD is one end of a socket pair, or asks
this machine's image (`ray_ulysses.supervision.image`) to fork a launcher. No child spends seconds on importing PyTorch,
DeepSpeed and Transformers. The launcher is not forked from the supervisor, because the supervisor has Ray's threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from ray_ulysses.clock import SystemClock
from ray_ulysses.parallel.gpu_environment import expand_segments
from ray_ulysses.supervision.order import (
    Exited,
    Order,
    Ready,
    Result,
    Started,
    Stop,
    StopTimer,
    process_state,
    receive,
    send,
)
from ray_ulysses.supervision.shared_progress import SharedProgress

_LOOK_EVERY_S = 0.5
_STOPPED_S = 2.0
"""Seconds until a stopped supervisor is resumed; the coordinator gives up on it after five seconds of silence."""
_PR_SET_PDEATHSIG = 1
_DRIVER = "/dev/nvidiactl"
_CUDA_MEMORY = "/dev/nvidia-uvm"
"""File opened by the first CUDA call. NVML, which importing DeepSpeed initializes, opens only ``/dev/nvidiactl``."""
_LAZY = (
    "deepspeed",
    "transformers",
    "torch._inductor.compile_fx",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.comm.mori",
    "transformers.integrations.deepspeed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # imported by every decoder's file: more than a second
    "safetensors.torch",
    "pandas",  # imported by PyArrow for any column as an array
)
"""Modules that libraries import on first use. Modules that are not installed are skipped."""


@dataclass(kw_only=True, slots=True)
class _Child:
    """A running child: its process ID, a pidfd that becomes readable when the process ends, and the result pipe."""

    pid: int
    process: int
    result: Connection | None


def main(arguments: list[str]) -> None:
    """Import the libraries, and serve orders until the supervisor is gone."""
    supervisor = os.getppid()
    die_with_parent(supervisor)
    # Read the clock once for all children, because the wall clock may jump before a fork.
    SystemClock().now()
    warm_up()
    serve(socket.socket(fileno=int(arguments[0])), supervisor)


def serve(orders: socket.socket, supervisor: int) -> None:
    """Serve a supervisor's orders until it is gone; the libraries have been imported."""
    orders.set_inheritable(False)
    # The environment may have been replaced since the imports.
    _set_defaults()
    stopped, clock = StopTimer(_STOPPED_S), SystemClock()
    send(orders, Ready(pid=os.getpid()))
    child: _Child | None = None
    while True:
        watched = [orders, *(() if child is None else (child.process, child.result))]
        readable, _, _ = select.select([one for one in watched if one is not None], [], [], _LOOK_EVERY_S)
        if stopped.is_up(clock.monotonic(), is_stopped=process_state(supervisor) == "T"):
            os.kill(supervisor, signal.SIGCONT)
        if child is not None:
            if child.result in readable:
                _forward_result(orders, child)
            if child.process in readable:
                _reap(orders, child)
                child = None
                continue
        if orders not in readable:
            continue
        try:
            order, descriptors = receive(orders)
        except (EOFError, OSError):
            _kill(child)
            return
        if isinstance(order, Stop):
            _kill(child)
        elif isinstance(order, Order):
            child = _start(orders, order, descriptors)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that created it ends, even while this process is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent has already ended.
        os._exit(1)


def is_safe_to_fork(descriptors: Path = Path("/proc/self/fd")) -> bool:
    """Return whether this process has not used CUDA, which does not survive a fork."""
    for link in descriptors.iterdir():
        # The descriptor of this directory listing is closed by now.
        with contextlib.suppress(OSError):
            if os.readlink(link) == _CUDA_MEMORY:
                return False
    return True


def _set_defaults() -> None:
    # DeepSpeed's import counts GPUs, which does not initialize CUDA if NVML is used.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    expand_segments(os.environ)
    if not os.path.exists(_DRIVER):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def warm_up() -> None:
    """Import everything that a child needs."""
    _set_defaults()
    importlib.import_module("ray_ulysses.supervision.child")
    # DeepSpeed's unused autotuner would import MLflow, which takes a quarter of the total import time.
    modules: dict[str, Any] = sys.modules
    modules["mlflow"] = None
    _import(_LAZY)
    del modules["mlflow"]


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    # Modules are never garbage. Unless they are frozen, each collection in a child (DeepSpeed triggers several) would
    # visit all of them and copy every page that it touches.
    gc.collect()
    gc.freeze()


def _start(orders: socket.socket, order: Order, descriptors: list[int]) -> _Child:
    """Fork a child for an order; if forking is not safe, become the child and never return."""
    if order.job.config.get("model", {}).get("adapter") is not None and "peft" not in sys.modules:
        # Importing PEFT takes seconds; later children inherit the module.
        _import(("peft",))
    if not is_safe_to_fork():
        send(orders, Started(pid=os.getpid(), is_launcher=True))
        _run(order, descriptors, lambda result: send(orders, result))
    # A `Connection` delimits its messages: a process started by the child may keep the pipe open.
    reading, writing = Pipe(duplex=False)
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(launcher)
        orders.close()
        reading.close()
        # The child leads its own process group, so that all processes it starts end with it.
        os.setpgid(0, 0)
        _run(order, descriptors, lambda result: writing.send_bytes(pickle.dumps(result)))
    # The parent sets the group too, because an order to kill the group may follow immediately.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    writing.close()
    for descriptor in descriptors:
        os.close(descriptor)
    send(orders, Started(pid=pid))
    return _Child(pid=pid, process=os.pidfd_open(pid), result=reading)


def _run(order: Order, descriptors: list[int], deliver: Callable[[Result], None]) -> NoReturn:
    from ray_ulysses.supervision.child import run_child

    progress, stacks, listener, streams = descriptors
    result = run_child(order, SharedProgress(progress), stacks=stacks, listener=listener, streams=streams)
    deliver(result)
    sys.stdout.flush()
    sys.stderr.flush()
    while result.error is None:
        # Other ranks may still be communicating with this one; the supervisor ends all children after the last one is
        # done.
        signal.pause()
    os._exit(1)


def _forward_result(orders: socket.socket, child: _Child) -> None:
    assert child.result is not None
    reading, child.result = child.result, None
    with reading:
        try:
            result = reading.recv()
        except (EOFError, OSError):
            # The child ended while it was sending its result.
            return
    assert isinstance(result, Result)
    send(orders, result)


def _reap(orders: socket.socket, child: _Child) -> None:
    _, status = os.waitpid(child.pid, 0)
    os.close(child.process)
    if child.result is not None:
        child.result.close()
    # Kill the remaining processes that the child started.
    _kill(child)
    send(orders, Exited(code=os.waitstatus_to_exitcode(status)))


def _kill(child: _Child | None) -> None:
    if child is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
