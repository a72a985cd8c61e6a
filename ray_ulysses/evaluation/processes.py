"""Runs an evaluation on this machine: in this process, or in one process per rank of ``sp``."""

from __future__ import annotations

import os
import pickle
import tempfile
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from ray_ulysses.errors import RunError, UlyssesError, UserError
from ray_ulysses.evaluation.evaluate import Prepared, Say, evaluate, prepare_evaluation
from ray_ulysses.evaluation.report import EvaluationReport
from ray_ulysses.evaluation.request import EvaluationRequest
from ray_ulysses.logging import quiet_libraries
from ray_ulysses.parallel.allocator import expand_segments
from ray_ulysses.parallel.layout import automatic_ring_size
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.terminal import escape_output

_POLL_S = 0.25


def evaluate_locally(prepared: Prepared, say: Say) -> EvaluationReport:
    """Evaluate on this machine's GPUs, or on its CPU.

    Args:
        prepared: The evaluation; without ``sp_size`` it takes every GPU, or one process without GPUs.
        say: Called with one line per stage.

    Raises:
        UserError: There are not so many GPUs, or the model can't be computed exactly on so many processes.
        RunError: The weights can't be read, a loss is not finite, or a process died.
    """
    expand_segments(os.environ)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    size = prepared.request.sp_size or max(num_gpus, 1)
    if num_gpus and size > num_gpus:
        raise UserError(
            f"--sp-size={size}: needs a GPU for each process, and this machine has {num_gpus}; use at most {num_gpus}"
        )
    if size == 1:
        device = torch.device("cuda", 0) if num_gpus else torch.device("cpu")
        return evaluate(prepared, SequenceMesh.from_group(None), device, say)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as folder:
        try:
            _run_ranks(folder, prepared.request, size, say)
        except (ProcessRaisedException, ProcessExitedException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise _failure(Path(folder), size) or RunError(
                f"--sp-size={size}: process {error.error_index} ended without a result ({reason}); use fewer "
                "processes or shorter lengths if memory is short"
            ) from error
        report: EvaluationReport = pickle.loads((Path(folder) / "report").read_bytes())
        return report


def _run_ranks(folder: str, request: EvaluationRequest, size: int, say: Say) -> None:
    """Run all ranks, and pass on what the first one says."""
    said: SimpleQueue[str] = get_context("spawn").SimpleQueue()
    ranks = spawn(_run_rank, (size, folder, request, said), nprocs=size, join=False)
    is_done = False
    while not is_done:
        try:
            is_done = ranks.join(timeout=_POLL_S)
        finally:
            while not said.empty():
                say(said.get())


def _run_rank(rank: int, size: int, folder: str, request: EvaluationRequest, said: SimpleQueue[str]) -> None:
    quiet_libraries()
    escape_output()
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
        # Otherwise gloo resolves the host's name, which often fails in containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "nccl" if is_gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
        )
        prepared = prepare_evaluation(request)
        ring_size = automatic_ring_size(size, prepared.source.num_heads)
        mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
        report = evaluate(prepared, mesh, device, said.put if rank == 0 else lambda line: None)
    except UlyssesError as error:
        kind = UserError if isinstance(error, UserError) else RunError
        (Path(folder) / f"error-{rank}").write_bytes(pickle.dumps(kind(*map(str, error.args))))
        raise
    if rank == 0:
        (Path(folder) / "report").write_bytes(pickle.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def _failure(folder: Path, size: int) -> UlyssesError | None:
    """Return the error that the first rank raised on purpose."""
    for path in (folder / f"error-{rank}" for rank in range(size)):
        if path.is_file():
            found: UlyssesError = pickle.loads(path.read_bytes())
            return found
    return None
