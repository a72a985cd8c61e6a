"""The sizes that the house style asks for: small files, small functions, and an `__init__` that only re-exports."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FILES = tuple(sorted((_ROOT / "ray_ulysses").rglob("*.py")))
_IDS = [str(file.relative_to(_ROOT)) for file in _FILES]
_MAX_FILE_LINES, _MAX_FUNCTION_LINES, _MAX_INIT_LINES = 600, 80, 30
_MAX_LINES, _MAX_LINES_OF_CODE = 80_807, 54_303
"""Of the whole package; a feature that needs more raises them in its commit, with the reason."""


def lines_of_code(text: str) -> int:
    """Count the lines without blanks, comments and docstrings."""
    bodies = [body for node in ast.walk(ast.parse(text)) if isinstance(body := getattr(node, "body", None), list)]
    strings = [
        part
        for body in bodies
        for part in body
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)
    ]
    prose = {number for part in strings for number in range(part.lineno, (part.end_lineno or part.lineno) + 1)}
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in prose for number, line in lines)


def test_the_package_is_no_larger_than_it_was() -> None:
    texts = [file.read_text(encoding="utf-8") for file in _FILES]
    assert sum(text.count("\n") for text in texts) <= _MAX_LINES
    assert sum(map(lines_of_code, texts)) <= _MAX_LINES_OF_CODE


def test_no_file_is_a_drawer_for_everything() -> None:
    drawers = {"utils.py", "common.py", "helpers.py", "util.py", "misc.py"}
    assert [name for name, file in zip(_IDS, _FILES, strict=True) if file.name in drawers] == []


@pytest.mark.parametrize("file", _FILES, ids=_IDS)
def test_a_file_and_its_functions_are_short(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    limit = _MAX_INIT_LINES if file.name == "__init__.py" else _MAX_FILE_LINES
    assert len(text.splitlines()) <= limit
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > _MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("file", _FILES, ids=_IDS)
def test_what_a_command_prints_goes_through_what_escapes_it(file: Path) -> None:
    text, name = file.read_text(encoding="utf-8"), str(file.relative_to(_ROOT / "ray_ulysses"))
    if name not in ("commands/output.py", "report/publish.py"):
        assert re.findall(r"typer\.s?echo|click\.s?echo|std(?:out|err)\.(?:buffer|write)\b", text) == []
    if name != "commands/display.py":
        assert re.findall(r"\b(?:Console|Live)\(", text) == []
    if name.startswith("commands/") and name != "commands/init.py":
        assert '"\\n".join(' not in text, "as_text joins lines"


def test_no_job_hides_a_module_of_the_standard_library() -> None:
    # `python jobs/train.py` puts jobs/ first on the path: a jobs/inspect.py would be everybody's `import inspect`.
    names = {file.stem for file in (_ROOT / "jobs").glob("*.py")}
    assert names
    assert names & sys.stdlib_module_names == set()
