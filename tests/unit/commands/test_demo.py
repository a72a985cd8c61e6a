"""``demo`` runs what README's demo runs, from the package alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.cli import app, run
from tests.docs_commands import ROOT


class Started(Exception):
    """The last command took the place of this process."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that the demo has run, in an empty directory; they succeed."""
    commands: list[list[str]] = []

    def start(command: list[str], check: bool) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    def replace(path: str, command: list[str]) -> None:
        assert path == sys.executable
        commands.append(command)
        raise Started

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(os, "execv", replace)
    monkeypatch.chdir(tmp_path)
    return commands


def test_the_demo_prepares_plans_and_trains_what_make_demo_does(ran: list[list[str]], tmp_path: Path) -> None:
    recipe = subprocess.Popen(
        ["make", "-n", "-o", ".venv/.installed", "demo"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    ).communicate()[0]  # fmt: skip
    with pytest.raises(Started):
        run(app, ["demo"])
    assert [command[:3] for command in ran] == [[sys.executable, "-m", "ray_ulysses"]] * 3
    prepare, plan, train = (command[3:] for command in ran)
    assert prepare[:2] == ["prepare", sysconfig.get_path("stdlib")]
    said = " ".join(recipe.replace("'", "").replace("\\\n", " ").split())
    assert f"--pattern {' '.join(prepare[3:])}" in said
    assert (plan, train) == (["plan", "demo.yaml"], ["train", "demo.yaml"])
    shipped = ROOT / "configs/llama-tiny_cpu_sp2-dp2_8k.yaml"
    assert (tmp_path / "demo.yaml").read_text() == shipped.read_text()
    assert f"plan configs/{shipped.name}" in said and f"train configs/{shipped.name}" in said


def test_a_quiet_demo_runs_quiet_commands_and_keeps_a_configuration_that_was_edited(
    ran: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo.yaml").write_text("edited")
    with pytest.raises(Started):
        run(app, ["demo", "--quiet"])
    assert [command[-1] for command in ran] == ["--quiet"] * 3 and capsys.readouterr().out == ""
    assert (tmp_path / "demo.yaml").read_text() == "edited"


def test_the_demo_ends_with_the_first_command_that_fails(
    ran: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 2))
    assert run(app, ["demo"]) == 2
    assert ran == [] and capsys.readouterr().out.count("$ ray-ulysses ") == 1
