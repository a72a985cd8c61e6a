"""The command ``evaluate``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ray_ulysses.commands.options import AsJson, Quiet, TrustRun, parse_step, shortened
from ray_ulysses.commands.output import Waiting, put
from ray_ulysses.errors import UlyssesError, UserError
from ray_ulysses.report.words import as_text, count, duration, facts, table

if TYPE_CHECKING:
    from ray_ulysses.evaluation.report import ClassReport, ContextGain, EvaluationReport, PairPreference, PositionLoss
    from ray_ulysses.storage.place import Place

EXAMPLE = "Example: ray-ulysses evaluate runs/llama-tiny --lengths 1k,4k --data held-out"
_LENGTH = re.compile(r"^(\d{1,9})([km]?)$", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_SHORTEST = 2


def evaluate(
    model: Annotated[str, typer.Argument(metavar="RUN|MODEL_DIR", help="A run's directory, or a model directory.")],
    step: Annotated[str, typer.Option(help="For a run: a committed step, latest or best.")] = "latest",
    task: Annotated[Literal["loss", "retrieval", "all"], typer.Option(help="The measurement to run.")] = "all",
    lengths: Annotated[
        str | None, typer.Option(help="Context lengths in tokens, such as 1k,16k.  [default: 1k, 4k, ... the model's]")
    ] = None,
    depths: Annotated[int, typer.Option(help="Number of depths at which facts are hidden.", min=1)] = 5,
    cases: Annotated[int, typer.Option(help="Questions per length and depth.", min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens of documents used for the loss by position.", min=1)] = 262144,
    data: Annotated[
        str | None, typer.Option(help="Prepared corpus of held-out documents.  [default: the run's own]")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer: directory, hub id or `bytes`.  [default: the corpus's]")
    ] = None,
    dtype: Annotated[
        Literal["model", "fp32", "bf16"], typer.Option(help="Type used for computation; model means the model's own.")
    ] = "model",
    sp_size: Annotated[
        int | None,
        typer.Option(help="Local processes that share a row.  [default: one per GPU, else 1]", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for choosing documents, facts and positions.", min=0)] = 0,
    out: Annotated[
        str | None, typer.Option(help="Directory for the results.  [default: RUN/evaluation/step-XXXXXXXX]")
    ] = None,
    trust_run: TrustRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure how well a model uses long contexts. Nothing is generated or downloaded.

    loss: held-out loss by position in the document, and of the same tokens with increasing context. With a corpus
    of pairs: how often the chosen answer is preferred. With a classifier: accuracy, and scores of each class.

    retrieval: facts hidden in held-out documents, by length and depth. An answer is correct if each of its
    tokens is the most probable token.

    Writes evaluation.json and a picture, logs them to the run's MLflow run, and updates the run's report.
    """
    options = dict(locals())
    del options["as_json"], options["quiet"], options["task"]
    from ray_ulysses.evaluation.report import TASKS, EvaluationRequest, names_run
    from ray_ulysses.storage.place import place_of

    place = place_of(model)
    is_run = names_run(place)
    if not is_run and step != "latest":
        raise UserError(f"--step={step}: applies only to a run, but {model} is a model directory; omit --step")
    options |= {
        "model": place,
        "is_run": is_run,
        "step": parse_step(step),
        "tasks": tuple(one for one in TASKS if task in (one, "all")),
        "lengths": () if lengths is None else parse_lengths(lengths),
        "data": None if data is None else place_of(data),
        "out": None if out is None else place_of(out),
    }
    request = EvaluationRequest(**options)
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        from ray_ulysses.evaluation.report import UnwrittenError
        from ray_ulysses.evaluation.run_evaluation import run_evaluation

        wait.phase("evaluating")
        problem, written = None, None
        try:
            report, written = run_evaluation(request, wait.say)
        except UnwrittenError as error:
            # The result may have taken hours: print it even if it can't be written.
            report, problem = error.report, error
        if request.is_run and problem is None:
            _draw_report(request.model, trust_run, wait)
    put(json.dumps(report.to_json(), indent=2) if as_json else render_evaluation(report, written), is_exact=as_json)
    if problem is not None:
        raise problem


def _draw_report(run: Place, trust_run: bool, wait: Waiting) -> None:
    from ray_ulysses.report.publish import redraw
    from ray_ulysses.tracking.mlflow_results import ArtifactError

    wait.phase("drawing the report")
    try:
        redraw(run, trust_run=trust_run)
    except (ArtifactError, OSError, UlyssesError) as error:
        wait.say(f"note: the run's report was not updated ({' '.join(str(error).split())})")


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parse ``--lengths`` into sorted, distinct numbers of tokens: ``1k,4k`` is 1024 and 4096.

    Raises:
        UserError: A length is not a number of tokens, or is too small.
    """
    found = set()
    for part in text.split(","):
        match = _LENGTH.match(part.strip())
        value = int(match[1]) * _UNITS[match[2].lower()] if match else 0
        if value < _SHORTEST:
            raise UserError(
                f"--lengths={shortened(text)}: {part.strip()[:20]!r} is not a token count of {_SHORTEST} or more; "
                "write lengths as 1024 or 1k, separated by commas, such as 1k,4k,16k"
            )
        found.add(value)
    return tuple(sorted(found))


def render_evaluation(report: EvaluationReport, out: Place | None) -> str:
    """Return the lines that ``ray-ulysses evaluate`` prints.

    Args:
        report: The result.
        out: Directory of the result's files, or None if they could not be written.
    """
    from ray_ulysses.evaluation.report import KINDS

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
    if report.preference is not None:
        lines += _pair_lines(report.preference)
    if report.classes is not None:
        lines += _class_lines(report.classes)
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


def _pair_lines(found: PairPreference) -> list[str]:
    total = found.total
    rows = [
        (
            "all" if one is total else f"{one.first:,} - {one.last:,}",
            count(one.pairs),
            f"{one.summed / one.pairs:.1%}",
            f"{one.averaged / one.pairs:.1%}",
            f"{one.margin_sum / one.pairs:.4f}",
        )
        for one in (*found.bins, total)
    ]
    return [
        "",
        "how often the chosen answer has the larger log-probability, by length of the longer text:",
        *table(("tokens", "pairs", "summed", "per token", "margin per token"), rows),
    ]


def _class_lines(found: ClassReport) -> list[str]:
    rows = []
    for number, (name, confusion) in enumerate(zip(found.classes, found.confusion, strict=True)):
        precision, recall, f1 = found.scores(number)
        shown = (f"{precision:.1%}", f"{recall:.1%}", f"{f1:.1%}")
        rows.append((name, count(sum(confusion)), *shown, " ".join(map(str, confusion))))
    return [
        "",
        f"accuracy {found.accuracy:.1%}, macro F1 {found.macro_f1:.1%}, loss {found.loss_sum / found.documents:.4f}:",
        *table(("class", "documents", "precision", "recall", "F1", "predicted as, in the same order"), rows),
    ]


def _gain_lines(found: ContextGain) -> list[str]:
    rows = []
    for one in found.contexts:
        error = "" if one.standard_error is None else f" ± {one.standard_error:.4f}"
        gain = "" if one is found.contexts[0] else f"{one.gain:.4f}{error}"
        rows.append((f"{one.context_tokens:,}", count(one.tokens), f"{one.loss:.4f}", gain))
    return [
        "",
        f"loss of the same {found.spans:,} spans of {found.documents:,} documents by context length:",
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
        f"retrieval, {kind}: correct answers out of {cases} per length and depth "
        f"(chance {next(iter(grids.values()))[0].chance:.0e})",
        *table(("length", *depths, "all", "chance among the numbers shown"), rows),
    ]
