"""What reads the lines of a command may go away; the command does not notice."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ray_ulysses.cli import run
from ray_ulysses.commands.output import put
from ray_ulysses.run.requests import stop_requested

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


@pytest.mark.parametrize("gone", ["pipe", "disk", "closed"])
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
