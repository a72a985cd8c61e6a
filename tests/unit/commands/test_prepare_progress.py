"""What a person sees of a preparation."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ray_ulysses.commands import output
from ray_ulysses.commands.display import PrepareView
from ray_ulysses.data.prepare.preparation import PrepareProgress
from tests.unit.commands.histories import HandClock

ROOT = Path(__file__).parents[3]


def progress(units: int, num_bytes: int) -> PrepareProgress:
    return PrepareProgress(
        units_done=units, num_units=8, documents=10 * units, tokens=100 * units, rejected=1, bytes_done=num_bytes,
        num_bytes=8 << 20,
    )  # fmt: skip


def test_each_phase_has_a_line_at_once_and_units_have_one_every_other_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_INTERVAL_S", 600.0)  # Only the test looks.
    clock, out = HandClock(), io.StringIO()
    with PrepareView(Console(file=out, width=200), clock) as view:
        view.phase("listing the sources")
        clock.at = 3.0
        view.phase("reading and tokenizing")
        view.progress(progress(0, 0))
        # The first unit waits for workers to start.
        clock.at = 5.0
        for units in range(1, 9):
            view.progress(progress(units, units << 20))
            clock.at += 1.0
        clock.at = 15.0
        view.phase("writing the corpus")
        clock.at = 30.0
        view.look()
    lines = out.getvalue().splitlines()
    assert [line.split(" ")[0] if line.startswith("unit") else line for line in lines] == [
        "elapsed=0s phase: listing the sources",
        "elapsed=3s phase: reading and tokenizing",
        "unit=0/8",
        "unit=1/8",
        "unit=3/8",
        "unit=5/8",
        "unit=7/8",
        "unit=8/8",
        "elapsed=15s phase: writing the corpus",
        "elapsed=30s phase: writing the corpus, for 15s",
    ]


def test_the_first_word_comes_before_anything_large_is_imported() -> None:
    """Ray, pyarrow and the rest take seconds on a slow disk, and said nothing."""
    program = (
        "import sys\n"
        "from ray_ulysses.cli import app, run\n"
        "from ray_ulysses.commands import display\n"
        "def phase(view, name):\n"
        "    print(name, [m for m in ('ray', 'torch', 'pyarrow', 'transformers') if m in sys.modules])\n"
        "display.PrepareView.phase = phase\n"
        "run(app, ['prepare', 'nowhere', '--out', 'out', '--tokenizer', 'bytes'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0] == "loading libraries []"
    assert lines[1].startswith("listing the sources [") and "'ray'" not in lines[1] and "'torch'" not in lines[1]
    assert "error: source=nowhere: no such file or directory" in done.stderr
