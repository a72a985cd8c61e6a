"""Runs the cells of examples/quickstart.ipynb.

``STORE_NOTEBOOK=1 python -m pytest tests/cluster/test_notebook.py`` stores what they print.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
_COMMAND = re.compile(r"^!(.*)$", re.MULTILINE)


def load() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return notebook


def store(notebook: dict[str, Any]) -> None:
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells in this process and the current directory, and return the variables that they leave.

    Standard output has no descriptor, as in a notebook. ``!`` runs a command, in which ``{}`` holds an expression.
    """
    variables: dict[str, Any] = {"_shell": _shell}
    for number, cell in enumerate(code_cells(notebook), 1):
        source = _COMMAND.sub(lambda found: f"_shell(f{found[1]!r})", "".join(cell["source"]))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, f"cell {number}", "exec"), variables)
        lines = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return variables


def _shell(command: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", command], env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, end="")
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}")
