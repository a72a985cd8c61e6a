from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import MUTANTS, ROOT, Mutant


def test_each_bug_can_be_planted() -> None:
    assert {mutant.name: why for mutant in MUTANTS if (why := _no_bug(mutant)) is not None} == {}
    assert all(sum(mutant.law == law for mutant in MUTANTS) >= 10 for law in (1, 2, 3, 4))
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def _no_bug(mutant: Mutant) -> str | None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    try:
        planted = ast.dump(ast.parse(mutant.planted(text)))
    except (ValueError, SyntaxError) as error:
        return str(error)
    return "it changes nothing" if planted == ast.dump(ast.parse(text)) else None


def test_the_tests_that_must_turn_red_exist() -> None:
    pairs = [(mutants.killer_function(one), _functions_in(mutants.killer_file(one))) for one in MUTANTS]
    assert [name for name, functions in pairs if name not in functions] == []


@cache
def _functions_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_the_copy_has_all_that_the_tests_import() -> None:
    folders = {one.name for one in ROOT.iterdir() if one.is_dir()}
    imported = set()
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name.partition(".")[0] for name in names}
    assert imported & folders <= set(mutants.PARTS)


TEXT = """
class Reader:
    def read(self, start: int) -> int:
        if start > 3:
            start = self.skip(start)  # a comment
        self.seen.append(start)
        return self.at(start) + (
            1
        )

def write() -> None: ...
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("self.at(start) + 1", "self.at(start)", "return self.at(start)"),
        ("if start > 3: ...", "if start > 4: ...", "if start > 4:"),
        ("start = self.skip(start)", "start = 0; self.skip(start)", "start = 0"),
    ],
)
def test_a_bug_is_planted_by_syntax(old: str, new: str, line: str) -> None:
    mutant = Mutant(1, "odd", "a.py:Reader.read", old, new, "t.py::test")
    before, after = ast.unparse(ast.parse(TEXT)).splitlines(), mutant.planted(TEXT).splitlines()
    assert line in [one.strip() for one in after if one not in before]


@pytest.mark.parametrize(
    ("place", "old", "message"),
    [
        ("a.py:Reader.read", "start", "'start' occurs 4 times in a.py:Reader.read, not once"),
        ("a.py:Reader.write", "start", "0 definitions of write for a.py:Reader.write, not one"),
    ],
)
def test_a_bug_without_one_place_is_refused(place: str, old: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"mutant 'odd': {message}"):
        Mutant(1, "odd", place, old, "0", "t.py::test").planted(TEXT)


def test_only_a_test_that_ran_and_failed_has_killed_a_bug() -> None:
    assert [mutants.verdict_of(code) for code in (0, 1, 2, 4, 5, -1)] == ["SURVIVED", "killed", *["BROKEN"] * 4]


def test_bugs_are_planted_in_a_copy_and_taken_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = mutants.Workshop(tmp_path)
    mutant = MUTANTS[0]
    original, copy = (root / mutant.file for root in (ROOT, workshop.root))
    before = original.read_text()

    def instead_of_pytest(ids: list[str], *, slow: bool) -> tuple[int, str]:
        assert copy.read_text() == mutant.planted(before) and ids == [mutant.killer_id] and not slow
        return 1, ""

    monkeypatch.setattr(workshop, "tests_exit", instead_of_pytest)
    assert workshop.judge(mutant, slow=False) == ("killed", "")
    assert copy.read_text() == original.read_text() == before
