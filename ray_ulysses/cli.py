"""The command line: parses options, calls, prints, and maps errors to exit codes (0 done, 1 failed, 2 user input)."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from ray_ulysses import (
    check_command,
    demo_command,
    evaluate_command,
    init_command,
    prepare_command,
    report_command,
    submit_commands,
)
from ray_ulysses.clock import SystemClock
from ray_ulysses.command_options import AsJson, Branch, ConfigPath, Overrides, Quiet, TrustRun, load_run_config
from ray_ulysses.errors import INTERRUPTED, RunError, UserError
from ray_ulysses.terminal import escaped_output, indented, one_line
from ray_ulysses.views.streams import SteadyStream, put, put_line
from ray_ulysses.views.waiting import Waiting

if TYPE_CHECKING:
    from ray_ulysses.doctor import Check

# Of Linux.
_LONGEST_PATH = 4096
app = typer.Typer(
    help="Train Hugging Face decoders at very long context, exactly, on clusters that may lose nodes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from ray_ulysses import __version__

        put_line(f"ray-ulysses {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


app.command(epilog=prepare_command.EXAMPLE)(prepare_command.prepare)


@app.command(epilog="Example: ray-ulysses plan configs/llama-tiny_cpu_sp2-dp2_8k.yaml --set cluster.workers=8")
def plan(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    branch: Branch = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    price: Annotated[float | None, typer.Option(help="Price per GPU and hour, for the run's cost.", min=0.0)] = None,
    longest: Annotated[bool, typer.Option("--longest", help="Instead: the longest context that fits.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Instead: the nearest settings that fit, and why.")] = False,
) -> None:
    """Print what a run will do: layout, rows, padding, time and memory. Exits with 2 if it can't start.

    Starts nothing and needs no GPU and no network. Without a corpus, documents of made-up lengths are assumed.
    """
    loaded = load_run_config(config, overrides)
    with Waiting("planning", is_quiet=quiet):
        from ray_ulysses.plan_command import answer

        text, can_start = answer(
            loaded, Path.cwd(), branch=branch, price=price, longest=longest, fit=fit, as_json=as_json
        )
    put(text)
    if not can_start:
        raise typer.Exit(2)


@app.command(epilog="Example: ray-ulysses train configs/llama-tiny_cpu_sp2-dp2_8k.yaml --set run.stop_step=20")
def train(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    branch: Branch = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train, or resume the run with the same name and storage. Uses the cluster of RAY_ADDRESS, else this machine."""
    started = SystemClock().now()
    loaded = load_run_config(config, overrides)
    from ray_ulysses.run.contradictions import refuse_changed

    absolute = loaded.with_absolute_paths(Path.cwd())
    refuse_changed(absolute, branch=branch)
    from ray_ulysses.views.console import open_console
    from ray_ulysses.views.progress import ProgressView

    every = loaded.run.log_every_steps
    console = open_console(stderr=as_json)
    with ProgressView(
        absolute.run_dir, name=loaded.run.name, console=console, log_every_steps=every, is_quiet=quiet
    ) as view:
        view.phase("loading libraries")
        from ray_ulysses.run.preflight import prepare_run

        view.phase("planning")
        prepared = prepare_run(loaded, Path.cwd(), branch=branch)
        prepared.report.raise_problems()
        # Ray, only once nothing is left to refuse.
        from ray_ulysses.cluster.train_job import train as run_training
        from ray_ulysses.tracking.mlflow_tracker import is_tracked
        from ray_ulysses.views.summary import memory_in_words, render_summary

        for note in prepared.notes:
            put_line(f"note: {note}", stderr=True)
        view.expect(prepared.last_step)
        result = run_training(prepared, view, started)
    if as_json:
        put(json.dumps(result.history.to_json(), indent=2))
        return
    if result.was_complete:
        put_line(
            f"run {result.history.name!r} is complete at step {result.history.step:,}; nothing was started. "
            "Raise run.stop_step to continue, or choose another run.name for a new run"
        )
    summary = render_summary(
        result.history,
        run_dir=prepared.config.run_dir,
        location=prepared.run.location,
        config_path=str(config),
        overrides=tuple(overrides),
        planned_steps=prepared.plan.num_steps,
        elapsed_s=result.seconds,
        tracking_uri=prepared.config.tracking_uri,
        trackers=prepared.config.trackers,
        is_heard=is_tracked(prepared.config.run_dir),
        unigram_nats=prepared.report.corpus.unigram_nats,
        memory=memory_in_words(prepared.report, view.state.peak_memory_gib, has_gpu=loaded.cluster.gpus_per_worker > 0),
    )
    put(summary)


@app.command(epilog="Example: ray-ulysses inspect runs/llama-tiny --json; ... --verify; ... --checkpoints")
def inspect(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's directory: <run.storage>/<run.name>.")],
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="With --verify: another run to compare the data with.")
    ] = None,
    row: Annotated[int | None, typer.Option(help="Show this training row: documents, files, offsets, text.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Prove that every planned row was trained on once; exits with 1 if not.")
    ] = False,
    no_read: Annotated[
        bool, typer.Option("--no-read", help="With --verify: do not read the trained rows again from the corpus.")
    ] = False,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Current location of a corpus of the run; may be given several times.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="With --row: cut (default), full or none.")] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="List every checkpoint: state, layout, size, metrics, why it is kept.")
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option("--verify-checkpoint", metavar="STEP", help="Read every byte of this or the latest checkpoint."),
    ] = None,
    trust_run: TrustRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Print what happened in a run: attempts, checkpoints, data consumed, goodput. Show and verify its data."""
    from ray_ulysses.forensics.request import check_request, check_run, parse_checkpoint
    from ray_ulysses.storage.place import place_of

    to_verify = None if checkpoint is None else parse_checkpoint(checkpoint)
    corpora = tuple(map(place_of, corpus or ()))
    place, beside = place_of(run), None if other is None else place_of(other)
    mode = check_request(
        row=row,
        verify=verify,
        other=beside,
        no_read=no_read,
        corpora=corpora,
        text=text,
        checkpoints=checkpoints,
        checkpoint=to_verify,
    )
    check_run(place)
    from ray_ulysses import inspect_command as show

    holds = True
    if row is not None:
        show.show_row(place, row, corpora, mode, as_json, quiet, trust_run)
    elif verify:
        holds = show.verify(place, beside, not no_read, corpora, as_json, quiet, trust_run)
    elif checkpoints:
        show.show_checkpoints(place, as_json, quiet, trust_run)
    elif to_verify is not None:
        holds = show.check_checkpoint(place, to_verify, as_json, quiet, trust_run)
    else:
        show.show_history(place, as_json, quiet, trust_run)
    if not holds:
        raise typer.Exit(1)


@app.command(epilog="Example: ray-ulysses rehearse config.yaml --faults '40s kill-node, 90s drain-node, 2m add-node'")
def rehearse(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    faults: Annotated[str | None, typer.Option(help="Times and kinds of faults, or a file that lists them.")] = None,
    every: Annotated[
        str | None, typer.Option(help="Instead: random faults at this mean distance, such as 60s.")
    ] = None,
    lasts: Annotated[str | None, typer.Option("--for", help="Train for so long at least, such as 30m.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random faults, and of the processes they happen to.")] = 0,
    kinds: Annotated[str | None, typer.Option(help="Kinds of random faults, separated by commas.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes to start on this machine.  [default: 2]", min=1)] = None,
    drain: Annotated[str, typer.Option(help="Time from a drain to the node's end.")] = "30s",
    compare: Annotated[
        int | None, typer.Option(help="Most steps to train again without faults.  [default: all]", min=0)
    ] = None,
    min_ettr: Annotated[
        float | None, typer.Option(help="Percentage of the time that has to go into steps that count.", min=0, max=100)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Store the report as this .md file, and as .json beside it.")] = None,
    note: Annotated[str | None, typer.Option(help="A line for the report, such as a commit.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before faults happen on a cluster.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a copy of a run while faults happen to it, and prove that no row was lost or repeated.

    On the cluster of RAY_ADDRESS or of the configuration, else on several nodes that are started on this machine.
    The faults are said first. Times count from the run's first step. Exits with 1 if anything does not hold.

    \b
    kill-worker, crash-worker, stop-worker   a training process gets SIGKILL, SIGSEGV or SIGSTOP
    kill-agent                               an agent of peer memory is killed
    kill-driver                              the command is killed, and started again
    kill-node, drain-node                    a node is lost without notice, or drained first
    add-node                                 a node takes the place of a lost one (on this machine only)
    """  # noqa: D301 -- click's mark for text that is not to be rewrapped
    options = dict(locals())
    for name in ("config", "overrides", "out", "yes", "quiet"):
        del options[name]
    loaded = load_run_config(config, overrides)
    with Waiting("loading libraries", is_quiet=quiet):
        from ray_ulysses.cluster.rehearse_command import RehearseOptions, run_rehearsal, store_report
        from ray_ulysses.views.rehearsal import render_report

    def say(line: str) -> None:
        if not quiet:
            put_line(line)

    def confirm(name: str, intent: str) -> bool:
        if not (yes and quiet):
            put(intent)
        return yes or bool(typer.prompt(f"Type {name} to start", default="", show_default=False) == name)

    report = run_rehearsal(loaded, RehearseOptions(**options), confirm=confirm, say=say)
    say("")
    put(render_report(report))
    store_report(report, out)
    if not report.holds:
        raise typer.Exit(1)


@app.command(epilog="Example: ray-ulysses export runs/llama-tiny --step best --out llama-tiny-hf --dtype bf16")
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's directory: <run.storage>/<run.name>.")],
    step: Annotated[str, typer.Option(help="A committed step, latest, or best (lowest evaluation loss).")] = "latest",
    out: Annotated[
        Path | None, typer.Option(help="Directory to write.  [default: RUN/export/step-XXXXXXXX]", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="Weights: model (as trained), fp32, bf16 or fp16.")] = "model",
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of one file, such as 5GB or 500MB.")] = "5GB",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer: directory or hub id.  [default: the corpus's]", show_default=False),
    ] = None,
    check: Annotated[bool, typer.Option(help="Load the export and compare its logits with the live model's.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another export in the directory.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Write a whole model, not the adapter alone.")] = False,
    trust_run: TrustRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a committed checkpoint as a Hugging Face model directory, streamed in bounded memory.

    The directory appears complete or not at all. The check needs CPU memory for the model in fp32;
    without it, a few hundred MiB are enough for any model.
    """
    options = dict(locals())
    del options["as_json"], options["quiet"]
    from ray_ulysses.export.request import ExportRequest
    from ray_ulysses.forensics.request import check_run
    from ray_ulysses.storage.place import place_of

    place = place_of(options.pop("run"))
    request = ExportRequest.from_options(place, **options)
    check_run(place)
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        from ray_ulysses.export.export_run import export_run
        from ray_ulysses.views.export import render_export

        wait.phase("exporting")
        done = export_run(request, wait.say)
    put(json.dumps(asdict(done), indent=2) if as_json else render_export(done))


app.command(epilog=check_command.EXAMPLE)(check_command.check)
app.command(epilog=demo_command.EXAMPLE)(demo_command.demo)
app.command(epilog=evaluate_command.EXAMPLE)(evaluate_command.evaluate)
app.command(epilog=init_command.EXAMPLE)(init_command.init)
app.command(epilog=report_command.EXAMPLE)(report_command.report)
submit_commands.register(app)


@app.command(epilog="Example: ray-ulysses doctor --storage /mnt/shared/runs")
def doctor(
    storage: Annotated[
        str | None, typer.Option(help="Directory of runs, or s3://, gs:// or abfs:// location of runs.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to check; by default RAY_ADDRESS, if set.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Instead: whether this model can be trained exactly; a directory or a hub id.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check whether this machine, and the cluster if there is one, are ready; or whether a model can be trained."""
    checks: list[Check] = []
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        from ray_ulysses.cluster.doctor_command import doctor_checks
        from ray_ulysses.doctor import exit_code, render_check, render_sum

        wait.phase("checking this machine" if model is None else "checking the model")
        for check in doctor_checks(storage=storage, address=address, model=model):
            checks.append(check)
            if not (as_json or (quiet and check.level == "ok")):
                wait.show(render_check(check))
    put(json.dumps({"checks": [asdict(one) for one in checks]}, indent=2) if as_json else render_sum(checks))
    if exit_code(checks):
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; errors for users are printed without a traceback."""
    with escaped_output():
        try:
            code = run(app, arguments)
        except Exception:
            SteadyStream("stderr").write(f"{indented(traceback.format_exc())}\n")
            code = 1
    if code == INTERRUPTED:
        # Interrupted in the middle of a start, Ray's threads may crash while the interpreter shuts down.
        SteadyStream("stdout").flush()
        SteadyStream("stderr").flush()
        os._exit(code)
    sys.exit(code)


def run(command: Callable[..., Any], arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; what it prints is escaped."""
    with escaped_output():
        return _run(command, arguments)


def _run(command: Callable[..., Any], arguments: list[str] | None) -> int:
    from ray_ulysses.logging import configure_logging, quiet_libraries

    configure_logging()
    quiet_libraries()
    # Its reader may be gone, which changes no exit code.
    errors = cast("TextIO", SteadyStream("stderr"))
    try:
        code = command(args=arguments, standalone_mode=False)
    except (UserError, RunError) as error:
        errors.write(f"error: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    except typer.Abort:
        errors.write("error: not confirmed; --yes starts without a question\n")
        return 1
    except OSError as error:
        # The last resort: code that knows the file raises a better error.
        errors.write(f"error: {indented(_of_the_system(error))}\n")
        return 1
    except UnicodeEncodeError as error:
        errors.write(f"error: {_of_the_locale(error)}\n")
        return 2
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show(errors)
            return int(error.exit_code)
        raise
    # Typer turns an interrupt into an exit code.
    if code == INTERRUPTED:
        errors.write("interrupted; committed checkpoints are kept, and the same command resumes\n")
    return code if isinstance(code, int) else 0


def _of_the_locale(error: UnicodeEncodeError) -> str:
    """Return the text that an encoding lacks, which is a path in an ASCII locale, and the way out."""
    return (
        f"{one_line(error.object[:_LONGEST_PATH])}: can't be written in {error.encoding}, the encoding of this "
        "shell's locale; set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
    )


def _of_the_system(error: OSError) -> str:
    """Return the path and the reason of a system error, as far as it has them."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"
