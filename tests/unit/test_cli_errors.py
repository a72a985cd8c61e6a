from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ray_ulysses import cli
from ray_ulysses.cli import run
from ray_ulysses.errors import INTERRUPTED, RunError, UserError


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied", "/runs/demo/plan"), 1, "error: /runs/demo/plan: Permission denied\n"),
        (ConnectionError("no cluster at 10.0.0.1:6379"), 1, "error: no cluster at 10.0.0.1:6379\n"),
        (UserError("model.path=x: no"), 2, "error: model.path=x: no\n"),
        (RunError("lost"), 1, "error: lost\n"),
    ],
    ids=["path", "text", "user", "run"],
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


@pytest.mark.parametrize(("error", "code"), [(UserError("no"), 2), (KeyboardInterrupt(), 130), (None, 2)])
def test_a_command_ends_with_its_code_though_nobody_reads_its_errors(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int
) -> None:
    command = typer.Typer(rich_markup_mode=None)

    @command.command()
    def fail() -> None:
        assert error is not None
        raise error

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert run(command, ["--unknown"] if error is None else []) == code


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_an_interrupted_command_ends_as_such_though_nobody_reads_what_it_printed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(cli, "run", lambda *_: INTERRUPTED)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        stream.write("a line that is still in the buffer\n")
        monkeypatch.setattr(sys, name, stream)
        with pytest.raises(SystemExit):
            cli.main([])
    assert ended == [130]


def test_a_path_that_the_locale_can_not_write_is_named_with_the_way_out(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "configs" / "llama-tiny_cpu_sp2-dp2_8k.yaml").read_text()
    config = tmp_path / "config.yaml"
    config.write_text(text.replace("storage: runs", f"storage: {tmp_path}/{'long' * 50}/datés"), encoding="utf-8")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    # It would stand above the locale for what is printed.
    ascii_only.pop("PYTHONIOENCODING", None)
    code = "import sys; from ray_ulysses.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "plan", str(config), "--quiet"]
    done = subprocess.run(command, env=ascii_only, capture_output=True, check=False, timeout=300)
    said = done.stderr.decode()
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert r"dat\xe9s" in said and "PYTHONUTF8=1" in said
