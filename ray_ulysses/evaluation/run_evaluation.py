"""Runs the command ``evaluate``: checks, measures, writes the files and logs them to MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.config.job_paths import refuse_relative_in_job
from ray_ulysses.evaluation.evaluate import Say, prepare_evaluation
from ray_ulysses.evaluation.processes import evaluate_locally
from ray_ulysses.evaluation.report import EvaluationReport, refuse_unwritable
from ray_ulysses.run_names import EVALUATION_FOLDER, step_folder
from ray_ulysses.storage.place import Place
from ray_ulysses.storage.regular import refuse_links
from ray_ulysses.tracking.mlflow_results import track_evaluation

if TYPE_CHECKING:
    from ray_ulysses.evaluation.request import EvaluationRequest


def run_evaluation(request: EvaluationRequest, say: Say) -> tuple[EvaluationReport, Place]:
    """Evaluate a model, write the result, and add it to the run's MLflow run if there is one.

    Returns:
        The report, and the directory of its files.

    Raises:
        UserError: An option can't be satisfied.
        RunError: The weights can't be read, a loss is not finite, or the directory of the result can't be written.
        UnwrittenError: It could be written before the model was evaluated, and can't be now.
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
