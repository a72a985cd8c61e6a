"""A command says what it is waiting for, from the second second on, and where nobody looks it stays out of the way."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.commands import output
from ray_ulysses.commands.output import Waiting
from tests.unit.commands.histories import HandClock

_ROOT = Path(__file__).parents[3]
_TINY = str(_ROOT / "configs" / "llama-tiny_cpu_sp2-dp2_8k.yaml")


@pytest.fixture
def only_the_test_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_INTERVAL_S", 600.0)


@pytest.mark.usefixtures("only_the_test_looks")
def test_each_phase_has_a_line_and_a_long_one_a_line_every_ten_seconds() -> None:
    clock, out = HandClock(), io.StringIO()
    with Waiting("loading libraries", stream=out, clock=clock) as wait:
        for at, phase in (
            (0.5, "loading libraries"),
            (1.5, "loading libraries"),
            (3.0, "planning"),
            (14.0, "planning"),
        ):
            clock.at = at
            wait.phase(phase)
            wait.look()
            wait.look()
        wait.say("half is done")
    assert out.getvalue().splitlines() == [
        "elapsed=2s phase: loading libraries",
        "elapsed=3s phase: planning",
        "elapsed=14s phase: planning, for 11s",
        "half is done",
    ]


def test_quiet_keeps_notes_and_warnings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_FIRST_S", 0.0)
    monkeypatch.setattr(output, "_INTERVAL_S", 0.001)
    out = io.StringIO()
    with Waiting("planning", is_quiet=True, stream=out) as wait:
        time.sleep(0.05)
        for line in ("half is done", "note: no corpus", "warning: a slow disk"):
            wait.say(line)
    assert out.getvalue() == "note: no corpus\nwarning: a slow disk\n"


def test_a_slow_command_says_what_it_waits_for_apart_from_its_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_FIRST_S", 0.0)
    monkeypatch.setattr(output, "_INTERVAL_S", 0.001)
    told = []
    for quiet in ((), ("--quiet",)):
        assert run(app, ["plan", _TINY, "--longest", "--json", "--set=memory.device_gib=79", *quiet]) == 0
        told.append(capsys.readouterr())
    # On a busy machine it takes so long that it is said again, and that a second has passed before the first time.
    assert re.match(r"elapsed=\d+s phase: planning\n", told[0].err) and told[1].err == ""
    assert told[0].out == told[1].out and told[0].out.startswith("{")


def test_the_shell_completes_commands_and_options() -> None:
    code = "import sys; sys.argv[0] = 'ray-ulysses'; from ray_ulysses.cli import main; main()"
    found = {}
    for words in ("ray-ulysses ins", "ray-ulysses train --br"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"_RAY_ULYSSES_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
            capture_output=True, text=True, timeout=60, cwd=_ROOT, check=False,
        )  # fmt: skip
        found[words] = re.findall(r"[\w-]+", done.stdout)
    assert found == {"ray-ulysses ins": ["inspect"], "ray-ulysses train --br": ["--branch"]}
