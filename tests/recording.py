"""Records the demo in a terminal as an animated picture.

``python -m tests.recording "two CPU cores"`` writes docs/demo.svg, with this description of the machine in its title.

The commands run in a terminal of 100 columns, with the demo's configuration and fewer steps. The picture shows their
screens at a multiple of the real speed, which its title states.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import time
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "demo.svg"
COLUMNS, ROWS = 100, 26
_LENGTH_S, _LAST_S, _FRAME_S = 17.0, 3.0, 0.125
_COMMANDS = (
    ["prepare", "Lib", "--pattern", "*.py", "--tokenizer", "bytes", "--out", "runs/corpus-stdlib"],
    ["plan", "demo.yaml"],
    ["train", "demo.yaml", "--set", "run.stop_step=12", "--set", "tracking.enabled=false"],
)
_SHOWN_FOLDER = "/data/demo"
_CONTROL = re.compile(r"(\r)|(\n)|\x1b\[(\d*)([AK])|(\x1b\[\?\d+[hl])|(\x1b\[[\d;]*m)|([^\x1b\r\n]+)")
_GROUND, _INK = "#292929", "#c5c8c6"
_X, _Y, _WIDTH, _HEIGHT = 14, 52, 8.4, 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A screen, and the time in seconds at which it appears."""

    time: float
    lines: tuple[str, ...]


class Terminal:
    """The lines of a terminal, for programs that always rewrite whole lines, as Rich does."""

    def __init__(self) -> None:
        """Start with an empty screen."""
        self.lines = [""]
        self._row = 0
        self._is_at_start = True

    def write(self, text: str) -> None:
        for found in _CONTROL.finditer(text):
            start, end, count, move, _, style, plain = found.groups()
            if start:
                self._is_at_start = True
            elif end:
                self._row, self._is_at_start = self._row + 1, True
                self.lines += [""] * (self._row + 1 - len(self.lines))
            elif move == "A":
                self._row -= int(count or 1)
            elif move == "K":
                # From the cursor, which stands at the start of the line or behind its text.
                self.lines[self._row] = "" if count == "2" or self._is_at_start else self.lines[self._row]
            elif style or plain:
                before = "" if self._is_at_start else self.lines[self._row]
                self.lines[self._row] = before + (style or plain)
                self._is_at_start = False

    def screen(self) -> tuple[str, ...]:
        lines = self.lines[:-1] if self.lines[-1] == "" else self.lines
        return tuple(row for line in lines for row in _wrapped(line))[-ROWS:]


def _wrapped(line: str) -> list[str]:
    rows, width = [""], 0
    for part in re.findall(r"\x1b\[[\d;]*m|.", line):
        if len(part) == 1:
            if width == COLUMNS:
                rows, width = [*rows, ""], 0
            width += 1
        rows[-1] += part
    return rows


def run(command: list[str], folder: Path) -> list[tuple[float, str]]:
    """Run a command in a terminal, and return what it wrote with the seconds since its start."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "NO_COLOR": ""}
    started = time.monotonic()
    child = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = []
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the last process has closed the terminal
            break
        written.append((time.monotonic() - started, data.decode(errors="replace").replace(str(folder), _SHOWN_FOLDER)))
    os.close(ours)
    if child.wait() != 0:
        raise SystemExit("".join(text for _, text in written))
    return written


def frames(sessions: Iterable[tuple[str, list[tuple[float, str]]]]) -> list[Frame]:
    """Return every screen of commands that run one after another, from their texts and `run`'s output."""
    terminal, now, found = Terminal(), 0.0, []
    for typed, written in sessions:
        terminal.write(f"\r\x1b[1;32m$\x1b[0m \x1b[1m{typed}\x1b[0m\r\n")
        found.append(Frame(time=now, lines=terminal.screen()))
        for seconds, text in written:
            terminal.write(text)
            found.append(Frame(time=now + seconds, lines=terminal.screen()))
        now = found[-1].time + 1.0
        terminal.write("\r\x1b[0m\r\n")
    return found


def sampled(found: list[Frame], length_s: float) -> list[Frame]:
    """Return the newest frame of each eighth of a second, if all of them are shown within ``length_s``."""
    speed = found[-1].time / length_s
    newest = {int(one.time / speed / _FRAME_S): one.lines for one in found}
    kept = [Frame(time=number * _FRAME_S, lines=lines) for number, lines in sorted(newest.items())]
    return kept[:1] + [now for before, now in pairwise(kept) if now.lines != before.lines]


def picture(found: list[Frame], title: str, length_s: float) -> str:
    """Return an SVG that shows one frame after another, or only the last one if the reader prefers no motion.

    The frames are side by side on a strip, which moves by whole frames.
    """
    decoder, known = AnsiDecoder(), dict[str, int]()
    width, height = COLUMNS * _WIDTH + 2 * _X, ROWS * _HEIGHT + _Y + 8
    strip = []
    for number, frame in enumerate(found):
        uses = (
            f'<use href="#l{known.setdefault(line, len(known))}" y="{row * _HEIGHT}"/>'
            for row, line in enumerate(frame.lines)
            if line
        )
        strip.append(f'<g transform="translate({number * width:g})">{"".join(uses)}</g>')
    lines = "".join(f'<text id="l{number}">{_spans(decoder, line)}</text>' for line, number in known.items())
    steps = "".join(
        f"{100 * one.time / length_s:.2f}%{{transform:translateX({-number * width:g}px)}}"
        for number, one in enumerate(found)
    )
    last = -(len(found) - 1) * width
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height}"
viewBox="0 0 {width:g} {height}">
<title>{escape(title)}</title>
<style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:{_INK};white-space:pre}}
.b{{font-weight:bold}}.d{{opacity:.6}}
#strip{{animation:film {length_s:g}s step-end infinite}}
@media(prefers-reduced-motion:reduce){{#strip{{animation:none;transform:translateX({last:g}px)}}}}
@keyframes film{{{steps}100%{{transform:translateX({last:g}px)}}}}
</style>
<defs>{lines}<clipPath id="screen"><rect width="{width:g}" height="{height}"/></clipPath></defs>
<rect width="{width:g}" height="{height}" rx="8" fill="{_GROUND}"/>
<circle cx="20" cy="17" r="6" fill="#f38ba8"/><circle cx="40" cy="17" r="6" fill="#f9e2af"/>
<circle cx="60" cy="17" r="6" fill="#a6e3a1"/>
<text x="{width / 2:g}" y="22" text-anchor="middle" class="d">{escape(title)}</text>
<g clip-path="url(#screen)"><g transform="translate({_X} {_Y})"><g id="strip">
{"".join(strip)}
</g></g></g></svg>
"""


def _spans(decoder: AnsiDecoder, line: str) -> str:
    text = decoder.decode_line(line)
    plain = text.plain.rstrip()
    styles: list[Style] = [Style()] * len(plain)
    for span in text.spans:
        for at in range(span.start, min(span.end, len(plain))):
            styles[at] += span.style if isinstance(span.style, Style) else Style.parse(span.style)
    borders = [0, *(at for at in range(1, len(plain)) if styles[at] != styles[at - 1]), len(plain)]
    return "".join(_span(plain[a:b], styles[a], a) for a, b in pairwise(borders) if b > a)


def _span(text: str, style: Style, column: int) -> str:
    names = " ".join(name for name, is_set in (("b", style.bold), ("d", style.dim)) if is_set)
    marks = f' class="{names}"' if names else ""
    if style.color is not None and not style.color.is_default:
        marks += f' fill="{style.color.get_truecolor(SVG_EXPORT_THEME).hex}"'
    # A length keeps columns in line with any font.
    return f'<tspan x="{column * _WIDTH:g}" textLength="{len(text) * _WIDTH:g}"{marks}>{escape(text)}</tspan>'


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-ulysses-recording-") as name:
        folder = Path(name).resolve()
        ignored = shutil.ignore_patterns("site-packages", "dist-packages", "__pycache__")
        shutil.copytree(sysconfig.get_path("stdlib"), folder / "Lib", ignore=ignored)
        shutil.copy(ROOT / "ray_ulysses" / "demo.yaml", folder)
        program = str(Path(sys.executable).with_name("ray-ulysses"))
        sessions = [(f"ray-ulysses {shlex.join(words)}", run([program, *words], folder)) for words in _COMMANDS]
    found = frames(sessions)
    title = f"ray-ulysses on {sys.argv[1]}, shown {found[-1].time / _LENGTH_S:.1f} times as fast"
    PICTURE.write_text(picture(sampled(found, _LENGTH_S), title, _LENGTH_S + _LAST_S), encoding="utf-8")


if __name__ == "__main__":
    main()
