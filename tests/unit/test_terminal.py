"""Foreign text on a terminal is shown and not obeyed, starts no line, and stays readable in all languages."""

from __future__ import annotations

import io
import json
import logging
import pickle
import sys
import unicodedata

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ray_ulysses.cli import main, run
from ray_ulysses.commands.display import open_console, start_live
from ray_ulysses.commands.output import Waiting, put
from ray_ulysses.errors import ConfigError, Problem, UserError
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


def test_the_list_of_an_error_is_its_own_and_a_line_feed_in_it_is_marked() -> None:
    error = UserError("a\nb", "c\nd", "e")
    assert str(error) == "a\n  | b\n  - c\n  | d\n  - e"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    problems = [Problem(path="a", rule="r\nx", hint="h"), Problem(path="b", value="\x1b\n", rule="r", hint="h")]
    assert str(ConfigError(problems)) == ("configuration: 2 problems\n  - a: r\n  | x; h\n  - b='\\x1b\\n': r; h")


@pytest.mark.parametrize("error", [UserError(ATTACK), OSError(2, ATTACK, ATTACK), OSError(ATTACK)])
def test_an_error_is_printed_escaped(capsysbinary: pytest.CaptureFixture[bytes], error: Exception) -> None:
    def command(args: list[str] | None, standalone_mode: bool) -> None:
        raise error

    run(command)
    assert faults_of(capsysbinary.readouterr().err) == []


def test_a_traceback_is_printed_escaped(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(args: list[str] | None, standalone_mode: bool) -> None:
        raise KeyError(ATTACK) from RuntimeError(ATTACK)

    monkeypatch.setattr("ray_ulysses.cli.app", command)
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


def test_a_log_record_is_one_line_and_what_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    logger = get_logger("tests_of_terminal")
    root = logging.getLogger("ray_ulysses")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging()
    logger.warning("a path %s", ATTACK)
    assert faults_of(stream.getvalue().encode()) == []


def test_a_letter_that_the_encoding_lacks_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    with escaped_output():
        put("é中")
    assert raw.getvalue() == b"\\xe9\\u4e2d\n"


def test_json_stays_valid_and_has_the_true_value(capsys: pytest.CaptureFixture[str]) -> None:
    every = "".join(map(chr, range(0x20))) + "\x7f\x80\x9b\u202e"
    with escaped_output():
        put(json.dumps({every: every}))
    out = capsys.readouterr().out
    assert json.loads(out) == {every: every}
    assert out.isascii() and out[:-1].isprintable()


@pytest.mark.parametrize("is_live", [True, False])
def test_a_console_shows_markup_links_and_escapes_as_they_are(monkeypatch: pytest.MonkeyPatch, is_live: bool) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
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


def test_the_line_of_a_wait_shows_a_foreign_phase_and_moves_only_its_own_cursor() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Late:
        def monotonic(self) -> float:
            self.now = getattr(self, "now", -5.0) + 5.0
            return self.now

        def now_(self) -> float:
            return 0.0

    stream = Terminal()
    wait = Waiting(ATTACK, stream=stream, clock=Late())  # type: ignore[arg-type]
    wait.look()
    wait.say(ATTACK)
    said = stream.getvalue().replace("\r\x1b[K", "")
    assert r"\x1b]52" in said
    assert faults_of(said.encode()) == []
