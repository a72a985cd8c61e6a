from __future__ import annotations

import ast
from pathlib import Path

from tests.long_tests import found_long, long_tests

_ROOT = Path(__file__).parents[2]


def _names_in(file: Path) -> set[str]:
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    imported = {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported | {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_listed_exists() -> None:
    listed = sorted(one.split("::") for one in long_tests())
    gone = ["::".join((file, name)) for file, name in listed if name not in _names_in(_ROOT / file)]
    assert gone == [], "rename or remove these in tests/unit/long.txt"


def test_a_test_is_long_by_one_case_or_by_all_of_them() -> None:
    assert found_long({"b": [0.1, 0.4], "quick": [0.2, 0.2], "a": [0.2] * 8}) == ("a", "b")
