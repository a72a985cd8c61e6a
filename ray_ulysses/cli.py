"""The command line: registers the commands and maps errors to exit codes (0 success, 1 failure, 2 invalid input)."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, TextIO, cast

import typer

from ray_ulysses.commands import (
    check,
    demo,
    doctor,
    evaluate,
    export,
    generate,
    init,
    inspect,
    plan,
    prepare,
    reference,
    rehearse,
    report,
    submit,
    train,
)
from ray_ulysses.commands.output import SteadyStream, columns, put_line
from ray_ulysses.errors import INTERRUPTED, RunError, UserError
from ray_ulysses.logging import escaped_output, indented, one_line
from ray_ulysses.report.words import folded

_LONGEST_PATH = 4096  # PATH_MAX on Linux
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


app.command(epilog=prepare.EXAMPLE)(prepare.prepare)
app.command(epilog=reference.EXAMPLE)(reference.reference)
app.command(epilog=plan.EXAMPLE)(plan.plan)
app.command(epilog=train.EXAMPLE)(train.train)
app.command(epilog=inspect.EXAMPLE)(inspect.inspect)
app.command(epilog=rehearse.EXAMPLE)(rehearse.rehearse)
app.command(epilog=export.EXAMPLE)(export.export)
app.command(epilog=check.EXAMPLE)(check.check)
app.command(epilog=demo.EXAMPLE)(demo.demo)
app.command(epilog=evaluate.EXAMPLE)(evaluate.evaluate)
app.command(epilog=generate.EXAMPLE)(generate.generate)
app.command(epilog=init.EXAMPLE)(init.init)
app.command(epilog=report.EXAMPLE)(report.report)
submit.register(app)
app.command(epilog=doctor.EXAMPLE)(doctor.doctor)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; print user errors without a traceback."""
    with escaped_output():
        try:
            code = run(app, arguments)
        except Exception:
            SteadyStream("stderr").write(f"{indented(traceback.format_exc())}\n")
            code = 1
    if code == INTERRUPTED:
        # Skip the interpreter's shutdown, in which Ray's threads may crash if the start of Ray was interrupted.
        SteadyStream("stdout").flush()
        SteadyStream("stderr").flush()
        os._exit(code)
    sys.exit(code)


def run(command: Callable[..., Any], arguments: list[str] | None = None) -> int:
    """Run the command line with escaped output, and return the exit code."""
    with escaped_output():
        return _run(command, arguments)


def _run(command: Callable[..., Any], arguments: list[str] | None) -> int:
    from ray_ulysses.logging import configure_logging, quiet_libraries

    configure_logging()
    quiet_libraries()
    # If the reader has closed stderr, the error is lost, but the exit code does not change.
    errors = cast("TextIO", SteadyStream("stderr"))
    try:
        code = command(args=arguments, standalone_mode=False)
    except (UserError, RunError) as error:
        _tell(errors, str(error))
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    except typer.Abort:
        _tell(errors, "not confirmed; use --yes to skip the prompt")
        return 1
    except OSError as error:
        # Last resort: code that knows the file's purpose raises a more specific error.
        _tell(errors, indented(_of_the_system(error)))
        return 1
    except UnicodeEncodeError as error:
        _tell(errors, _of_the_locale(error))
        return 2
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show(errors)
            return int(error.exit_code)
        raise
    # Typer may also catch the interrupt and return this exit code.
    if code == INTERRUPTED:
        errors.write("interrupted; committed checkpoints are kept, and the same command resumes\n")
    return code if isinstance(code, int) else 0


def _tell(errors: TextIO, message: str) -> None:
    errors.write(f"{folded(f'error: {message}', columns(errors))}\n")


def _of_the_locale(error: UnicodeEncodeError) -> str:
    """Return the error message for text that the locale can't encode, such as a non-ASCII path in an ASCII locale."""
    return (
        f"{one_line(error.object[:_LONGEST_PATH])}: can't be encoded in {error.encoding}, the encoding of this "
        "shell's locale; set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
    )


def _of_the_system(error: OSError) -> str:
    """Return the message for a system error, including the path if known."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"
