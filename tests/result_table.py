"""Tables of what the full matrices measured, stored beside the tests with date, commit and versions."""

from __future__ import annotations

import datetime
import platform
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(slots=True)
class ResultTable:
    """Rows of one table; written only by the full matrices."""

    rows: list[dict[str, str]] = field(default_factory=list)

    def add(self, row: dict[str, str]) -> None:
        """Add a row; every row has the same columns."""
        self.rows.append(row)

    def write(self, name: str, title: str, by: str = "make test-all") -> Path:
        """Write ``results/<name>.md``, as a command's result, and return its path."""
        columns = list(self.rows[0])
        lines = [
            f"# {title}",
            "",
            f"{datetime.date.today().isoformat()}, commit {_commit()}, {len(self.rows)} cases; Python "
            f"{platform.python_version()}, torch {version('torch')}, deepspeed {version('deepspeed')}, "
            f"transformers {version('transformers')}; CPU, gloo. Written by `{by}`.",
            "",
            "| " + " | ".join(columns) + " |",
            "|" + " --- |" * len(columns),
            *("| " + " | ".join(row[column] for column in columns) + " |" for row in self.rows),
            "",
        ]
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}.md"
        path.write_text("\n".join(lines))
        return path


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "(none)"
