"""The commands that README.md and docs/ tell a reader to type, as they stand there."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of a console block."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands(page: Path) -> Iterator[Command]:
    for fence in _FENCE.finditer(page.read_text(encoding="utf-8")):
        if fence["language"] != "console":
            continue
        for line in re.sub(r"\\\n\s*", "", fence["body"]).splitlines():
            if line.startswith("$ "):
                yield Command(page=page.name, text=re.split(r"\s+#\s", line.removeprefix("$ "))[0].strip())


def languages(page: Path) -> set[str]:
    return {fence["language"] for fence in _FENCE.finditer(page.read_text(encoding="utf-8"))}


def clone(folder: Path) -> Path:
    """Copy what git knows of into a folder, as a clone would have it."""
    options = ["--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(["git", "ls-files", *options], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder
