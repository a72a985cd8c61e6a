from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import unicodedata

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ray_ulysses.cli import main, run
from ray_ulysses.commands.display import PlainConsole, open_console, start_live
from ray_ulysses.logging import (
    EscapingStream,
    configure_logging,
    escaped_output,
    get_logger,
    indented,
    one_line,
    printable,
)
from ray_ulysses.report.words import as_text, facts, table
from tests.unit.foreign_text import ATTACK, faults_of

# Arabic, Syriac and Kaithi signs that stand before numbers: format characters that are visible.
_VISIBLE = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"


def test_every_control_and_format_character_of_unicode_is_shown_as_an_escape() -> None:
    unseen = [
        chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]
    kept = [letter for letter in unseen if printable(letter) == letter]
    assert set(kept) == {"\t", "\n", *_VISIBLE}
    assert all(printable(f"a{letter}b").isascii() for letter in unseen if letter not in kept)
    assert printable("\x1b]0;x\x07\x9b\u202e\udc9b") == r"\x1b]0;x\x07\x9b\u202e\udc9b"


@pytest.mark.parametrize(
    "text",
    ["é ü ñ", "中文 かな", "שלום עולם", "العربية", "می‌خواهم", "क्‍ष", "👩‍⚕️ 👨‍👩‍👧 ❤️‍🔥 👍🏽", "⟦ ± ×", "a\tb\nc"],
)
def test_texts_of_all_languages_and_emoji_stay_as_they_are(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("text", ["a\u200db", "\u200dx", "x\u200c", "中\u200d", "\U000e0041\u200d中", "中\u200d\u202e"])
def test_a_joiner_that_joins_nothing_is_shown(text: str) -> None:
    assert not set(printable(text)) & {"\u200c", "\u200d", "\U000e0041", "\u202e"}


def test_line_feeds_in_a_text_are_escaped_or_marked() -> None:
    assert one_line("a\nerror: b\r\n") == r"a\nerror: b\r\n"
    assert indented("a\nerror: b\n\nc\n") == "a\n  | error: b\n  | \n  | c"
    assert indented(indented("a\nb")) == indented("a\nb")
    assert as_text(["a\nerror: b", "c"]) == "a\n  | error: b\nc"
    assert facts([("name", "a\nb"), ("b", "c")]) == [r"  name  a\nb", "  b     c"]
    assert table(("x", "y"), [("\u202e\n", "1")]) == ["         x  y", r"  \u202e\n  1"]


def test_a_traceback_is_printed_escaped(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(args: list[str] | None, standalone_mode: bool) -> None:
        raise KeyError(ATTACK) from RuntimeError(ATTACK)

    monkeypatch.setattr("ray_ulysses.cli.app", command)
    with pytest.raises(KeyError):
        run(command)
    with pytest.raises(SystemExit) as caught:
        main([])
    said = capsysbinary.readouterr().err
    assert caught.value.code == 1 and b"Traceback" in said and b"RuntimeError" in said
    assert faults_of(said) == []


def test_what_libraries_print_and_log_is_escaped(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    with escaped_output():
        print(ATTACK.replace("\n", ""))
        logging.StreamHandler().emit(logging.makeLogRecord({"msg": ATTACK.replace("\n", "")}))
        sys.stderr.write(ATTACK.replace("\n", ""))
    said = capsysbinary.readouterr()
    assert faults_of(said.out) == faults_of(said.err) == []
    assert not isinstance(sys.stdout, EscapingStream)


@pytest.mark.parametrize("is_live", [True, False])
def test_a_console_shows_markup_links_and_escapes_as_they_are(monkeypatch: pytest.MonkeyPatch, is_live: bool) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_live, raising=False)
    monkeypatch.setattr(stream, "isatty", lambda: is_live, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    with escaped_output():
        console = open_console()
        hostile = f"[red]x[/red] [link=http://a]:smile: {ATTACK}"
        console.print(hostile)
        grid = Table.grid()
        grid.add_row(Text(hostile, style="bold"))
        if is_live:
            live = start_live(Group(grid, Text(hostile)), console, transient=True)
            sys.stdout.write(f"{hostile}\n".replace("\n", " ") + "\n")
            sys.stderr.write("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n")
            live.stop()
        else:
            console.print(grid)
    said = stream.getvalue()
    assert "[red]x[/red] [link=http://a]:smile:" in said
    assert "\x1b]" not in said and "\u202e" not in said and "\x9b" not in said and "\x07" not in said
    assert ("\x1b[1m" in said) == is_live, "our own style acts in a terminal"
    assert r"\x1b]8;;http://a" in said or not is_live
    if not is_live:
        assert "\x1b" not in said


def test_no_library_resets_colors_at_the_end_of_a_command() -> None:
    # The escaping output would show the sequence.
    text = "from ray_ulysses.logging import quiet_libraries; quiet_libraries(); import numba; "
    text += "numba.njit(lambda x: x)(1); from colorama import initialise; print(initialise.atexit_done)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("is_redirected", [False, True])
def test_a_warning_appears_above_a_live_display_or_in_the_file_of_stderr(
    is_redirected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(errors, "isatty", lambda: not is_redirected, raising=False)
    monkeypatch.setattr(sys, "stderr", errors)
    configure_logging()
    live = start_live(Text("the bar"), PlainConsole(terminal, force_terminal=True), transient=True)
    get_logger("ray_ulysses.test").warning("took long")
    live.stop()
    assert ("took long" in terminal.getvalue(), "took long" in errors.getvalue()) == (not is_redirected, is_redirected)
