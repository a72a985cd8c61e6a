"""Runs the ``evaluate`` command: checks and evaluates the model, writes the result files and logs them to MLflow."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from ray_ulysses.config.job_paths import refuse_relative_in_job
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.evaluation.evaluate import Prepared, Say, evaluate, prepare_evaluation
from ray_ulysses.evaluation.report import EvaluationReport, EvaluationRequest, refuse_unwritable
from ray_ulysses.logging import escape_output
from ray_ulysses.parallel.gpu_environment import expand_segments
from ray_ulysses.parallel.layout import automatic_ring_size
from ray_ulysses.parallel.local_ranks import RankDiedError, run_local_ranks
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.run_names import EVALUATION_FOLDER, step_folder
from ray_ulysses.storage.place import Place
from ray_ulysses.storage.regular import refuse_links
from ray_ulysses.tracking.mlflow_results import track_evaluation


def run_evaluation(request: EvaluationRequest, say: Say) -> tuple[EvaluationReport, Place]:
    """Evaluate a model, write the result, and log it to the run's MLflow run if there is one.

    Returns:
        The report, and the directory of the result files.

    Raises:
        UserError: An option can't be satisfied.
        RunError: The weights can't be read, a loss is not finite, or the result directory can't be written.
        UnwrittenError: The result directory was writable before the evaluation but not after it.
    """
    if isinstance(place := request.out or request.model, Path):
        refuse_relative_in_job("--out", place)
    prepared = prepare_evaluation(request)
    for note in prepared.notes:
        say(f"note: {note}")
    out, step = request.out, prepared.source.step
    if out is None and step is not None:
        out = request.model / EVALUATION_FOLDER / Path(step_folder(step)).name
    elif out is None:
        out = Path(EVALUATION_FOLDER) / Path(str(request.model)).resolve().name
    if isinstance(out, Path) and isinstance(request.model, Path):
        refuse_links(out.absolute(), request.model.absolute())
    refuse_unwritable(out)
    report = evaluate_locally(prepared, say)
    report.write(out)
    if request.is_run and report.step is not None:
        problem = track_evaluation(
            request.model,
            report.step,
            report.metrics(),
            {f"{EVALUATION_FOLDER}/{out.name}/{name}": text for name, text in report.files().items()},
            trust_run=request.trust_run,
            allow_http=prepared.source.config.tracking.allow_http,
        )
        if problem:
            say(f"note: the results were not logged to MLflow ({problem}); the files are complete")
    return report, out


def evaluate_locally(prepared: Prepared, say: Say) -> EvaluationReport:
    """Evaluate on this machine's GPUs, or on its CPU if it has none.

    Args:
        prepared: The evaluation. If ``sp_size`` is None, every GPU is used, or a single process on the CPU.
        say: Called with one line per stage.

    Raises:
        UserError: There are fewer GPUs than processes, or the model can't be computed exactly with this many processes.
        RunError: The weights can't be read, a loss is not finite, or a process died.
    """
    expand_segments(os.environ)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    size = prepared.request.sp_size or max(num_gpus, 1)
    if num_gpus and size > num_gpus:
        raise UserError(
            f"--sp-size={size}: requires one GPU per process, but this machine has {num_gpus}; use at most {num_gpus}"
        )
    if size == 1:
        device = torch.device("cuda", 0) if num_gpus else torch.device("cpu")
        return evaluate(prepared, SequenceMesh.from_group(None), device, say)
    try:
        report: EvaluationReport = run_local_ranks(_evaluate_rank, size, prepared.request, hear=say)
    except RankDiedError as error:
        raise RunError(
            f"--sp-size={size}: process {error.rank} ended without a result ({error.last_line}); use fewer "
            "processes, or shorter lengths if it ran out of memory"
        ) from error
    return report


def _evaluate_rank(device: torch.device, say: Say, request: EvaluationRequest) -> EvaluationReport:
    escape_output()
    prepared = prepare_evaluation(request)
    ring_size = automatic_ring_size(dist.get_world_size(), prepared.source.num_heads)
    return evaluate(prepared, SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size), device, say)
