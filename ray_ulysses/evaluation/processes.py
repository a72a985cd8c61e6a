"""Runs an evaluation on this machine: in this process, or in one process per rank of ``sp``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.evaluation.evaluate import Prepared, Say, evaluate, prepare_evaluation
from ray_ulysses.evaluation.report import EvaluationReport
from ray_ulysses.evaluation.request import EvaluationRequest
from ray_ulysses.logging import escape_output, quiet_libraries
from ray_ulysses.parallel.gpu_environment import expand_segments
from ray_ulysses.parallel.layout import automatic_ring_size
from ray_ulysses.parallel.local_ranks import RankDiedError, run_local_ranks
from ray_ulysses.parallel.mesh import SequenceMesh


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
    try:
        report: EvaluationReport = run_local_ranks(_evaluate_rank, size, prepared.request, hear=say)
    except RankDiedError as error:
        raise RunError(
            f"--sp-size={size}: process {error.rank} ended without a result ({error.last_line}); use fewer processes "
            "or shorter lengths if memory is short"
        ) from error
    return report


def _evaluate_rank(device: torch.device, say: Say, request: EvaluationRequest) -> EvaluationReport:
    quiet_libraries()
    escape_output()
    prepared = prepare_evaluation(request)
    ring_size = automatic_ring_size(dist.get_world_size(), prepared.source.num_heads)
    return evaluate(prepared, SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size), device, say)
