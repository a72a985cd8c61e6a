"""The animated picture of a terminal, and the terminal that it is made with."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.recording import COLUMNS, PICTURE, Frame, Terminal, frames, picture, sampled

_SVG = "{http://www.w3.org/2000/svg}"


def test_a_terminal_rewrites_lines_and_keeps_what_is_above_them() -> None:
    terminal = Terminal()
    terminal.write("first\r\n\x1b[?25lone\r\ntwo")
    terminal.write("\r\x1b[2K\x1b[1A\x1b[2K\x1b[1mONE\x1b[0m\r\nTWO")
    assert terminal.screen() == ("first", "\x1b[1mONE\x1b[0m", "TWO")
    terminal.write("\r\x1b[Kthree\r\n")
    assert terminal.screen() == ("first", "\x1b[1mONE\x1b[0m", "three")
    terminal.write("\x1b[2m" + "a" * (COLUMNS + 1) + "\x1b[0m\r\n")
    assert terminal.screen()[-2:] == ("\x1b[2m" + "a" * COLUMNS, "a\x1b[0m")


def test_a_recording_shows_each_command_and_the_newest_screen_of_each_moment() -> None:
    found = frames([("a", [(0.0, "1\r\n"), (4.0, "2\r\n")]), ("b", [(8.0, "3\r\n")])])
    assert [frame.time for frame in found] == [0.0, 0.0, 4.0, 5.0, 13.0]
    shown = sampled(found, 1.3)
    assert [round(frame.time, 3) for frame in shown] == [0.0, 0.375, 0.5, 1.25]
    assert shown[0].lines[-1] == "1" and shown[-1].lines[-1] == "3"


def test_styles_are_kept_and_text_is_escaped() -> None:
    text = picture([Frame(time=0.0, lines=("\x1b[1ma<b\x1b[0m c",))], "t", 1.0)
    spans = ElementTree.fromstring(text).findall(f".//{_SVG}tspan")
    assert [(span.text, span.get("class")) for span in spans] == [("a<b", "b"), (" c", None)]


def test_the_stored_recording_is_small_takes_twenty_seconds_and_names_no_place_of_a_machine() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert "animation:film 20s" in text
    tree = ElementTree.fromstring(text)
    said = "\n".join("".join(one.itertext()) for one in tree.iter(f"{_SVG}text"))
    for command in ("prepare Lib", "plan demo.yaml", "train demo.yaml"):
        assert f"ray-ulysses {command}" in said
    assert re.findall(r"/(?:tmp|root|home|work)/", said) == []
