"""Runs one attempt in a child process: joins the other ranks, and runs the training loop."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ray_ulysses.checkpoint import FencedError
from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.config.loading import parse_config
from ray_ulysses.data.read.row_source import ROW_SHARE, DirectSource
from ray_ulysses.data.read.streamed_source import StreamedSource
from ray_ulysses.elastic.causes import kind_of, one_line
from ray_ulysses.errors import FinalError, RunError, UserError
from ray_ulysses.logging import configure_logging, get_logger
from ray_ulysses.parallel.device import choose_device
from ray_ulysses.parallel.gpu_environment import keep_nccl_log
from ray_ulysses.run.requests import clear_stop, stop_requested
from ray_ulysses.run.secrets_file import use_secrets
from ray_ulysses.run.takeover import leave_refusal, takeover
from ray_ulysses.supervision.order import MOST_BYTES, Order, Result
from ray_ulysses.supervision.remote_streams import RemoteStreams
from ray_ulysses.supervision.shared_progress import HangDump, SharedProgress
from ray_ulysses.trainer.diagnostics import is_out_of_memory
from ray_ulysses.trainer.loop import run_attempt
from ray_ulysses.trainer.worker import Worker

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.data.read.reader import RowReader
    from ray_ulysses.parallel.layout import ParallelLayout

WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Environment variable that keeps PyTorch's NCCL watchdog from ending a process whose peer is gone, which would look
like another lost process (the supervisors end all children), and from aborting communicators, whose kernels would then
return partial results."""
_log = get_logger(__name__)


def run_child(order: Order, progress: SharedProgress, *, stacks: int, listener: int, streams: int) -> Result:
    """Run an attempt and return how it ended; never raises."""
    configure_logging()
    dump = HangDump(stacks)
    # Ctrl-C also reaches the command, which requests an orderly end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    progress.beat("start", 0)
    config = parse_config(order.job.config)
    try:
        use_secrets(config)
        if order.rank == 0 and stop_requested(config.run_dir, order.job.session) == "resize":
            # The resize request was meant for the previous generation.
            clear_stop(config.run_dir)
        _join(order, config, listener)
        end = run_attempt(config, _worker(order, config, progress, streams, dump))
        progress.beat("save", end.step)
        return Result(status=end.status)
    except BaseException as error:
        # A failure to report, such as a full disk, must not replace the error being reported.
        with contextlib.suppress(Exception):
            traceback.print_exc()
        with contextlib.suppress(Exception):
            _refuse(config, order.job.session, error)
        return Result(
            error=_portable(error),
            kind=kind_of(error, order.rank),
            what=one_line(error),
            is_final=isinstance(error, UserError | FinalError),
        )


def _join(order: Order, config: Config, listener: int) -> None:
    os.environ.update(
        RANK=str(order.rank),
        WORLD_SIZE=str(order.world_size),
        LOCAL_RANK=str(order.job.local_rank),
        LOCAL_WORLD_SIZE=str(order.local_world_size),
        MASTER_ADDR=order.host,
        MASTER_PORT=str(order.port),
    )
    device = torch.device(order.job.device)
    if device.type == "cuda":
        prepare_gpu(device, order.end_s, os.environ)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // order.local_world_size))
    if (interface := interface_towards(order.host, order.port)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=config.elastic.collective_timeout_s)
    store = TCPStore(
        order.host,
        order.port,
        order.world_size,
        is_master=order.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener if order.rank == 0 else None,
    )
    dist.init_process_group(
        **backend_of(device),
        store=store,
        rank=order.rank,
        world_size=order.world_size,
        timeout=timeout,
    )


def prepare_gpu(
    device: torch.device,
    within_s: float,
    environment: MutableMapping[str, str],
    *,
    memory: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info,
) -> None:
    """Select a free GPU, as `choose_free_device` does, and configure NCCL unless the user has done so."""
    choose_free_device(device, within_s, memory=memory)
    keep_nccl_log(environment)
    for name, value in WATCHDOG.items():
        environment.setdefault(name, value)


def backend_of(device: torch.device) -> dict[str, Any]:
    """Return the device-dependent arguments of ``init_process_group``."""
    if device.type != "cuda":
        return {"backend": "gloo"}
    # With `device_id`, this group and its subgroups create their communicators immediately, so that a broken link fails
    # at the start of an attempt instead of in the first step.
    return {"backend": "nccl", "device_id": device}


def _worker(order: Order, config: Config, progress: SharedProgress, streams: int, dump: HangDump) -> Worker:
    job = order.job

    def make_source(plan: Plan, reader: RowReader, layout: ParallelLayout, rank: int) -> DirectSource:
        options: dict[str, Any] = {
            "dp_rank": layout.dp_rank(rank),
            "dp_size": layout.dp_size,
            "sp_rank": layout.sp_rank(rank),
            "sp_size": layout.sp_size,
            "ring_size": layout.ring_size,
            "prefetch_rows": config.data.prefetch_rows,
            "timeout_s": ROW_SHARE * config.elastic.collective_timeout_s,
        }
        if config.data.engine == "local":
            return DirectSource(reader, plan, **options)
        return StreamedSource(reader, plan, streams=RemoteStreams(streams), **options)

    return Worker(
        rank=order.rank,
        local_rank=job.local_rank,
        world_size=order.world_size,
        node=job.node,
        device=torch.device(job.device),
        session=job.session,
        command_started=job.command_started,
        workers_asked=job.workers_asked,
        make_source=make_source,
        notice=progress.notice,
        clock=SystemClock(order.ahead_s),
        is_watched=True,
        is_tested=order.is_tested,
        peer_memory=order.memory,
        cluster_nodes=order.rank_nodes,
        beat=progress.beat,
        wait_for_row=progress.wait_for_row,
        on_hang=dump.on_hang,
    )


def _refuse(config: Config, session: str, error: BaseException) -> None:
    """Record a refusal for the command to find if another attempt would be futile."""
    if isinstance(error, UserError):
        # Another attempt would get the same input.
        leave_refusal(config.run_dir, session, str(error))
    elif isinstance(error, FencedError) and (text := takeover(config, session)) is not None:
        # Another command fenced this run, not a newer attempt of this session.
        leave_refusal(config.run_dir, session, text)


def _portable(error: BaseException) -> BaseException:
    """Return the error if it can be sent to the supervisor, else a substitute with the error's type and text.

    Unpickling another library's error would import that library, and thus silence the supervisor for seconds.
    """
    try:
        if type(error).__module__.partition(".")[0] not in ("builtins", "ray_ulysses"):
            raise TypeError(f"{type(error)} belongs to another library")
        content = pickle.dumps(error)
        if len(content) <= MOST_BYTES // 2:
            pickle.loads(content)
            return error
    except Exception as unfit:
        _log.debug("an error is replaced, because it can't be sent: %s", unfit)
    return RunError(f"{type(error).__name__}: {error}"[: MOST_BYTES // 8])


_LOOK_EVERY_S = 0.2
_FREE_PART = 1 / 16
"""A device is free if at most this fraction of its memory is in use: starting processes occupy about half a GiB."""


def choose_free_device(
    device: torch.device,
    within_s: float,
    *,
    memory: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info,
    clock: Clock | None = None,
) -> None:
    """Select a GPU once no other process occupies its memory, which the driver may free with a delay.

    If other processes still occupy memory after the wait, a warning is logged, because training may still fit.

    Args:
        device: The GPU.
        within_s: Longest wait, in seconds.
        memory: Returns the device's free bytes and total bytes.
        clock: Time source.

    Raises:
        RunError: Not even this process's CUDA context fits on the device.
    """
    clock = clock or SystemClock()
    began = clock.monotonic()
    while True:
        no_context, held = None, "nearly all"
        try:
            choose_device(device)
            free, total = memory(device)
            if total - free <= total * _FREE_PART:
                return
            held = f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            no_context = error
        if clock.monotonic() - began >= within_s:
            break
        clock.sleep(_LOOK_EVERY_S)
    text = (
        f"other processes still occupy {held} of the memory of {device} after a wait of {within_s:.0f} s for an "
        "earlier training process to end; find them with nvidia-smi, and end those that are not needed"
    )
    if no_context is not None:
        raise RunError(text) from no_context
    _log.warning("%s, or this worker may run out of memory", text)


def interface_towards(host: str, port: int) -> str | None:
    """Return the name of this node's network interface towards another node, or None if it is unknown.

    Without this name, gloo resolves the node's own host name, which Debian and many images map to 127.0.0.1 or
    127.0.1.1, where no other node can reach this one.

    Args:
        host: Name or address of the other node, which may be this node.
        port: Any port; nothing is sent to it.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            # Connecting a UDP socket only looks up the route.
            towards.connect(address)
            own: str = towards.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == family and one.address.partition("%")[0] == own for one in addresses):
            return str(name)
    return None
