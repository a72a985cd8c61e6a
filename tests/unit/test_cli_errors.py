"""The command line's last net: what the system refuses is said in a line, with the path, and exits with 1."""

from __future__ import annotations

import pytest
import typer

from ray_ulysses.cli import run
from ray_ulysses.errors import RunError, UserError


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied", "/runs/demo/plan"), 1, "error: /runs/demo/plan: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device\n"),
        (ConnectionError("no cluster at 10.0.0.1:6379"), 1, "error: no cluster at 10.0.0.1:6379\n"),
        (TimeoutError(), 1, "error: TimeoutError\n"),
        (UserError("model.path=x: no"), 2, "error: model.path=x: no\n"),
        (RunError("lost"), 1, "error: lost\n"),
    ],
    ids=["path", "no-path", "text", "nothing", "user", "run"],
)
def test_an_error_of_the_system_is_a_line_with_its_path(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, said: str
) -> None:
    def command(args: list[str] | None, standalone_mode: bool) -> None:
        raise error

    assert run(command) == code
    assert capsys.readouterr().err == said


def test_an_interrupt_is_told_whoever_of_typer_and_us_catches_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = typer.Typer()

    @command.command()
    def wait() -> None:
        raise KeyboardInterrupt

    assert run(command, []) == 130
    assert capsys.readouterr().err == "interrupted; committed checkpoints are kept, and the same command resumes\n"


def test_a_fault_of_the_program_is_not_hidden() -> None:
    def command(args: list[str] | None, standalone_mode: bool) -> None:
        raise KeyError("rank")

    with pytest.raises(KeyError):
        run(command)
