"""The command ``evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_ulysses.commands.options import AsJson, Quiet, TrustRun
from ray_ulysses.commands.output import Waiting, put
from ray_ulysses.errors import UlyssesError
from ray_ulysses.report.words import as_text, count, duration, facts, table

if TYPE_CHECKING:
    from ray_ulysses.evaluation.report import EvaluationReport
    from ray_ulysses.evaluation.results import ContextGain, PositionLoss
    from ray_ulysses.storage.place import Place

EXAMPLE = "Example: ray-ulysses evaluate runs/llama-tiny --lengths 1k,4k --data held-out"


def evaluate(
    model: Annotated[str, typer.Argument(metavar="RUN|MODEL_DIR", help="A run's directory, or a model directory.")],
    step: Annotated[str, typer.Option(help="Of a run: a committed step, latest, or best.")] = "latest",
    task: Annotated[str, typer.Option(help="loss, retrieval or all.")] = "all",
    lengths: Annotated[
        str | None, typer.Option(help="Context lengths in tokens, such as 1k,16k.  [default: 1k, 4k, ... the model's]")
    ] = None,
    depths: Annotated[int, typer.Option(help="Number of depths at which facts are hidden.")] = 5,
    cases: Annotated[int, typer.Option(help="Questions per length and depth.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens of documents for the loss by position.")] = 262144,
    data: Annotated[
        str | None, typer.Option(help="Prepared corpus of held-out documents.  [default: the run's own]")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer: directory, hub id or `bytes`.  [default: the corpus's]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="What the model computes in: model (its own), fp32 or bf16.")] = "model",
    sp_size: Annotated[
        int | None, typer.Option(help="Processes of this machine that share a row.  [default: one per GPU, else 1]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of documents, facts and places.")] = 0,
    out: Annotated[
        str | None, typer.Option(help="Directory of the results.  [default: RUN/evaluation/step-XXXXXXXX]")
    ] = None,
    trust_run: TrustRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure what a model makes of long contexts: held-out loss and retrieval. Generates and downloads nothing.

    loss: by position in the document, and of the same tokens given more and more of what stands before them.

    retrieval: facts hidden in held-out documents, by length and depth; an answer counts if each of its
    tokens is the most probable one.

    Writes evaluation.json and a picture, adds them to the run's MLflow run, and draws the run's report again.
    """
    options = dict(locals())
    del options["as_json"], options["quiet"]
    from ray_ulysses.evaluation.request import EvaluationRequest
    from ray_ulysses.storage.place import place_of

    request = EvaluationRequest.from_options(place_of(options.pop("model")), **options)
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        from ray_ulysses.evaluation.report import UnwrittenError
        from ray_ulysses.evaluation.run_evaluation import run_evaluation
        from ray_ulysses.report.publish import redraw
        from ray_ulysses.tracking.mlflow_results import ArtifactError

        wait.phase("evaluating")
        problem, written = None, None
        try:
            report, written = run_evaluation(request, wait.say)
        except UnwrittenError as error:
            # Its numbers took hours, perhaps: they are printed all the same.
            report, problem = error.report, error
        if request.is_run and problem is None:
            wait.phase("drawing the report")
            try:
                redraw(request.model, trust_run=trust_run)
            except (ArtifactError, OSError, UlyssesError) as error:
                wait.say(f"note: the run's report was not drawn again ({' '.join(str(error).split())})")
    put(json.dumps(report.to_json(), indent=2) if as_json else render_evaluation(report, written))
    if problem is not None:
        raise problem


def render_evaluation(report: EvaluationReport, out: Place | None) -> str:
    """Return the lines that ``ray-ulysses evaluate`` prints.

    Args:
        report: The result.
        out: Directory of its files; None if they could not be written.
    """
    from ray_ulysses.evaluation.results import KINDS

    step = "" if report.step is None else f", step {report.step:,}"
    processes = f"{report.sp_size} process{'es' if report.sp_size > 1 else ''} per row"
    files = [] if out is None else [("files", str(out))]
    lines = [
        f"{report.model}{step}: evaluated in {duration(report.seconds)}",
        *facts([("data", report.data), ("model", f"{report.dtype}, {processes}"), *files]),
    ]
    if report.position_loss is not None:
        lines += _position_lines(report.position_loss)
    if report.context_gain is not None:
        lines += _gain_lines(report.context_gain)
    for kind in KINDS:
        lines += _grid_lines(report, kind)
    return as_text([*lines, *(f"  note: {note}" for note in report.notes)])


def _position_lines(found: PositionLoss) -> list[str]:
    rows = [(f"{one.first:,} - {one.last:,}", count(one.tokens), f"{one.loss:.4f}") for one in found.bins]
    return [
        "",
        f"loss by position, nats per token, {found.documents:,} documents:",
        *table(("tokens before", "tokens", "loss"), [*rows, ("all", count(found.tokens), f"{found.loss:.4f}")]),
    ]


def _gain_lines(found: ContextGain) -> list[str]:
    rows = []
    for one in found.contexts:
        error = "" if one.standard_error is None else f" ± {one.standard_error:.4f}"
        gain = "" if one is found.contexts[0] else f"{one.gain:.4f}{error}"
        rows.append((f"{one.context_tokens:,}", count(one.tokens), f"{one.loss:.4f}", gain))
    return [
        "",
        f"loss of the same {found.spans:,} spans of {found.documents:,} documents with more context:",
        *table(("context", "tokens", "loss", "gain ± standard error"), rows),
    ]


def _grid_lines(report: EvaluationReport, kind: str) -> list[str]:
    grids = {length: cells for (one, length), cells in report.grids().items() if one == kind}
    if not grids:
        return []
    depths = [f"depth {cell.depth:.0%}" for cell in next(iter(grids.values()))]
    rows = []
    for length, cells in grids.items():
        correct, cases = sum(cell.correct for cell in cells), sum(cell.cases for cell in cells)
        shown = sum(cell.chance_shown * cell.cases for cell in cells) / cases
        rows.append(
            (f"{length:,}", *(f"{cell.accuracy:.0%}" for cell in cells), f"{correct / cases:.0%}", f"{shown:.1%}")
        )
    cases = next(iter(grids.values()))[0].cases
    return [
        "",
        f"retrieval, {kind}: right answers of {cases} per length and depth "
        f"(chance {next(iter(grids.values()))[0].chance:.0e})",
        *table(("length", *depths, "all", "chance among the numbers shown"), rows),
    ]
