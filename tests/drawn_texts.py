"""Draws docstrings, error messages and paragraphs of docs at random, to be read by a reviewer who knows none of them.

``python -m tests.drawn_texts SEED`` prints 40 docstrings, 40 error messages and 10 paragraphs, with their places.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ("configuration.md", "journal.md", "architectures.md")
_MIN_WORDS = 4

Text = tuple[str, str]
"""``file:line``, with the name of what a docstring documents, and the text."""


def docstrings(file: Path) -> Iterator[Text]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        documented = getattr(node, "name", "the module")
        for one in body if isinstance(body, list) else []:
            match one:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield f"{_place(file, one.lineno)} ({documented})", text
                case ast.AnnAssign(target=target) | ast.Assign(targets=[target]):
                    documented = ast.unparse(target)


def errors(file: Path) -> Iterator[Text]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = [_rendered(one) for one in node.exc.args]
            text = "; ".join(one for one in texts if one is not None)
            if len(text.split()) >= _MIN_WORDS:
                yield _place(file, node.lineno), text


def paragraphs(page: Path) -> Iterator[Text]:
    is_code, line = False, 1
    for block in page.read_text(encoding="utf-8").split("\n\n"):
        is_text = not is_code and block.lstrip()[:1] not in ("#", "|", "`", "!", "<", "-")
        if is_text and len(block.split()) >= 2 * _MIN_WORDS:
            yield _place(page, line), block
        is_code ^= block.count("```") % 2 == 1
        line += block.count("\n") + 2


def _rendered(node: ast.expr) -> str | None:
    """Return a string expression's text, with ``{...}`` for its values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_rendered(part) or f"{{{ast.unparse(part)}}}" for part in parts)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{_rendered(left) or ''}{_rendered(right) or ''}"
    return None


def _place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def drawn(seed: int) -> list[Text]:
    chance = random.Random(seed)
    files = sorted((ROOT / "ray_ulysses").rglob("*.py"))
    pages = [ROOT / "README.md", *(one for one in sorted((ROOT / "docs").glob("*.md")) if one.name not in GENERATED)]
    kinds = ((docstrings, files, 40), (errors, files, 40), (paragraphs, pages, 10))
    return [
        text for find, where, count in kinds for text in chance.sample([one for at in where for one in find(at)], count)
    ]


if __name__ == "__main__":
    for number, (place, text) in enumerate(drawn(int(sys.argv[1])), 1):
        print(f"## {number}. {place}\n\n{text.strip()}\n")
