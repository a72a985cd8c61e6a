"""The command ``export``."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ray_ulysses.commands.options import AsJson, Quiet, RunDirectory, TrustRun, parse_step, shortened
from ray_ulysses.commands.output import Waiting, put
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.report.words import as_text, count, duration, facts

if TYPE_CHECKING:
    from ray_ulysses.export.report import ExportReport, ExportRequest

EXAMPLE = "Example: ray-ulysses export runs/llama-tiny --step best --out llama-tiny-hf --dtype bf16"
# Limited to 15 digits, since Python refuses to parse very long integers.
_SIZE = re.compile(r"^(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?i?b)$", re.IGNORECASE | re.ASCII)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def export(
    run: RunDirectory,
    step: Annotated[str, typer.Option(help="A committed step, latest, or best (lowest evaluation loss).")] = "latest",
    out: Annotated[
        Path | None, typer.Option(help="Directory to write.  [default: RUN/export/step-XXXXXXXX]", show_default=False)
    ] = None,
    dtype: Annotated[
        Literal["model", "fp32", "bf16", "fp16"], typer.Option(help="Type of the weights; model means as trained.")
    ] = "model",
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of one file, such as 5GB or 500MB.")] = "5GB",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer: directory or hub id.  [default: the corpus's]", show_default=False),
    ] = None,
    check: Annotated[bool, typer.Option(help="Load the export and compare logits with the trained model.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in the directory.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Write the full model instead of the adapter alone.")] = False,
    mlflow: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also register the model under this name in the run's MLflow.")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO", help="Also upload the directory to this repository on the hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public, not private.")] = False,
    average: Annotated[
        int, typer.Option(help="Average the weights of this many checkpoints, the last ones up to --step.", min=1)
    ] = 1,
    trust_run: TrustRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a committed checkpoint as a Hugging Face model directory.

    The directory appears only once it is complete. Checking the export needs CPU memory for the model in fp32; without
    the check, a few hundred MiB are enough for a model of any size.
    """
    from ray_ulysses.export.report import ExportRequest
    from ray_ulysses.run.run_files import check_run
    from ray_ulysses.storage.place import place_of

    if out is not None and re.match(r"^[a-z0-9+]+:/", str(out)):
        raise UserError(f"--out={str(out)!r}: is a URI; use a local directory")
    place = place_of(run)
    if push_to_hub is not None and not isinstance(out or place, Path):
        raise UserError(f"--push-to-hub={push_to_hub!r}: uploads a local directory; add --out DIR")
    if push_to_hub is None and public:
        raise UserError("--public: needs a repository; add --push-to-hub REPO")
    request = ExportRequest(
        run_dir=place,
        step=parse_step(step),
        out=out,
        weights=dtype,
        max_shard_bytes=parse_size(max_shard_size),
        tokenizer=tokenizer,
        check=check,
        overwrite=overwrite,
        merge=merge,
        average=average,
        trust_run=trust_run,
    )
    check_run(place)
    if push_to_hub is not None:
        _refuse_push(push_to_hub, request)
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        from ray_ulysses.export.export_run import export_run

        wait.phase("exporting")
        done = export_run(request, wait.say)
        registered = pushed = None
        if mlflow is not None:
            wait.phase("registering the model in MLflow")
            registered = _register(mlflow, request, done)
            wait.say(f"registered as {registered}")
        if push_to_hub is not None:
            wait.phase("uploading to the hub")
            pushed = _push(push_to_hub, done, private=not public)
            wait.say(f"uploaded: {pushed}")
    found = {**asdict(done), "mlflow_model": registered, "hub_commit": pushed}
    put(json.dumps(found, indent=2) if as_json else render_export(done), is_exact=as_json)


def _refuse_push(repo: str, request: ExportRequest) -> None:
    from ray_ulysses.run.secrets_file import stored_config
    from ray_ulysses.storage.hub import refuse_push

    # The secrets file of a trusted run may contain the token.
    stored_config(request.run_dir, trust_run=request.trust_run)
    refuse_push(repo, f"--push-to-hub={repo!r}")


def _push(repo: str, done: ExportReport, *, private: bool) -> str:
    from ray_ulysses.export.directory import RECORD_FILE
    from ray_ulysses.storage.hub import push_folder

    average = f", mean of {len(done.averaged_steps)} checkpoints" if done.averaged_steps else ""
    message = f"{done.run}, step {done.step:,}{average}"
    files, setting = {*done.files, RECORD_FILE}, f"--push-to-hub={repo!r}"
    try:
        return push_folder(Path(done.out), files, repo, setting, private=private, message=message)
    except RunError as error:
        raise RunError(f"{error}. The export in {done.out} is complete; the same command uploads it") from error


def _register(name: str, request: ExportRequest, done: ExportReport) -> str:
    from ray_ulysses.run.secrets_file import stored_config
    from ray_ulysses.tracking.mlflow_results import ArtifactError, register_model

    missing = "" if done.has_tokenizer else "a tokenizer; use --tokenizer"
    missing = "a complete model; use --merge" if done.adapter else missing
    if missing:
        raise UserError(f"--mlflow={name!r}: the export in {done.out} is complete, but MLflow needs {missing}")
    allow_http = stored_config(request.run_dir, trust_run=request.trust_run).tracking.allow_http
    try:
        return register_model(
            request.run_dir, done.step, Path(done.out), name, trust_run=request.trust_run, allow_http=allow_http
        )
    except ArtifactError as error:
        raise RunError(f"--mlflow={name!r}: the export in {done.out} is complete, but {error}") from error


def parse_size(text: str) -> int:
    """Parse a size in bytes: ``5GB`` is 5e9, as in Hugging Face libraries, and ``5GiB`` is 5 x 2^30.

    Raises:
        UserError: The text is not a size, or the size is below one byte.
    """
    match = _SIZE.match(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise UserError(f"--max-shard-size={shortened(text)}: must be a number and a unit, such as 5GB, 500MB or 2GiB")
    return size


def render_export(report: ExportReport) -> str:
    """Return the lines that ``ray-ulysses export`` prints."""
    from ray_ulysses.export.report import average_words, context_words, python_lines, serve_line

    done = "already exported" if report.was_there else f"exported in {duration(report.seconds)}"
    rows = [
        ("directory", report.out),
        ("model", f"{report.architecture}, {count(report.parameters)} parameters"),
        ("weights", report.weights),
        *([("average", average_words(report))] if report.averaged_steps else []),
        ("files", _files(report)),
        ("context", context_words(report)),
        ("tokenizer", report.tokenizer),
        ("check", report.check.words if report.check is not None else "skipped (--no-check)"),
    ]
    serve = serve_line(report, report.out)
    lines = [
        f"run {report.run!r}, step {report.step:,} (attempt {report.attempt}, {count(report.trained_tokens)} trained "
        f"tokens): {done}",
        *facts(rows),
        *_warnings(report),
        "",
        *python_lines(report, report.out),
        serve if serve.startswith("#") else f"# or: {serve}",
    ]
    return as_text(lines)


def _files(report: ExportReport) -> str:
    from ray_ulysses.export.report import decimal_size

    single = "adapter_model.safetensors" if report.adapter else "model.safetensors"
    files = f"{report.weight_files} of safetensors" if report.weight_files > 1 else single
    others = len(report.files) - report.weight_files
    return f"{files} and {others} other files, {decimal_size(report.num_bytes)}"


def _warnings(report: ExportReport) -> list[str]:
    if report.max_positions is None or report.max_positions >= report.context_tokens:
        return []
    return [
        f"  note: the run trained on rows longer than max_position_embeddings={report.max_positions:,}, which is "
        "exported as trained; raise it in config.json if the model is to use longer contexts"
    ]
