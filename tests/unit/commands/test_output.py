"""A command says what it waits for; who reads its lines may go away; an option that means nothing is named."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.commands import output
from ray_ulysses.commands.export import parse_size
from ray_ulysses.commands.output import Waiting, put
from ray_ulysses.run.requests import stop_requested
from tests.breadth import fast_only
from tests.unit.commands.histories import HandClock

_ROOT = Path(__file__).parents[3]
_TINY = str(_ROOT / "configs" / "llama-tiny_cpu_sp2-dp2_8k.yaml")


def test_each_phase_has_a_line_and_a_long_one_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_INTERVAL_S", 600.0)  # Only the test looks.
    clock, out = HandClock(), io.StringIO()
    with Waiting("loading libraries", stream=out, clock=clock) as wait:
        first, second = "loading libraries", "planning"
        for clock.at, phase in ((0.5, first), (1.5, first), (3.0, second), (14.0, second)):
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


_RUN = textwrap.dedent("""
    import signal, sys, time
    from pathlib import Path
    from ray_ulysses.cluster.signals import StopSignals
    from ray_ulysses.tracking.journal import claim_journal
    from ray_ulysses.commands.progress import ProgressView
    from ray_ulysses.commands.display import open_console
    from tests.unit.cluster.test_signals import STARTED, STEP, received, say

    folder = Path(sys.argv[1])
    journal = claim_journal(folder)
    with ProgressView(folder, name="run", console=open_console(), interval_s=0.01) as view:
        with StopSignals(folder, "session", view.console) as signals:
            signals.workers_start()
            say(journal, STARTED, STEP)
            signals.check(workers_are_whole=True)
            received(signal.SIGTERM)
            say(journal, {**STEP, "step": 2, "rows": (1, 2)})
            deadline = time.monotonic() + 30
            while view.state.step < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert view.state.step == 2 and view._thread.is_alive()
    (folder / "through").touch()
""")


@pytest.mark.parametrize("gone", fast_only(["pipe", "disk", "closed"], "pipe", "closed"))
def test_a_run_goes_on_where_nothing_takes_its_lines(tmp_path: Path, gone: str) -> None:
    if gone == "disk" and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    command = [sys.executable, "-c", _RUN, str(tmp_path)]
    if gone == "closed":
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full" if gone == "disk" else os.devnull, "w") as file:
        out = writing if gone == "pipe" else file
        # What is buffered fails when it is flushed, as it does for a person.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=120, check=False, env=environment)
    os.close(writing)
    assert (tmp_path / "through").exists(), done.stderr.decode()
    assert stop_requested(tmp_path, "session") is not None, "the signal has left its request"


def test_a_command_whose_output_is_cut_off_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(args: list[str] | None, standalone_mode: bool) -> None:
        put("a line")

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            run(command)
    assert ended.value.code == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("width", [80, 120, 200])
def test_only_a_terminal_breaks_long_lines_between_words_and_below_their_column(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a" * 35
    lines = ["word " * 90, f"  name    {'value ' * 90}", f"  name    {path} {path} end", "1234567890" * 30]
    text = "\n".join(line.rstrip() for line in lines)
    put(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    put(text)
    *folded, unbroken, _ = capsys.readouterr().out.split("\n")
    assert unbroken == "1234567890" * 30 and max(map(len, folded)) <= width
    assert " ".join(folded).split() == text.split()[:-1]
    assert all(line.startswith(" " * 10 + "value") for line in folded if line.startswith("   ") and "value" in line)
    put(text, is_exact=True)
    assert capsys.readouterr().out == f"{text}\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("2GiB", 2 * 2**30), ("500 MB", 5 * 10**8), ("1.5gb", 1_500_000_000), ("64kib", 65536)],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "option",
    [
        *(f"--step={step}" for step in ("newest", "-1", "7" * 5000, "٣")),
        *(f"--max-shard-size={size}" for size in ("9" * 400 + "GB", "5", "0GB")),
        "--dtype=int8",
        "--out=s3://bucket/out",
    ],
    ids=lambda option: option[:24],
)
def test_an_option_that_can_not_be_understood_is_named(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["export", str(tmp_path), option]) == 2
    error = capsys.readouterr().err
    assert option.partition("=")[0] in error and len(error) < 2000
