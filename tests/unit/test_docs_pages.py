from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from mkdocs.config import load_config

from ray_ulysses import run_names
from tests.notebook import NOTEBOOK, code_cells, load

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "ray_ulysses"
_DOCS = _ROOT / "docs"
_GUIDE = _ROOT / "CONTRIBUTING.md"
_MOST_WORDS = {"AGENTS.md": 300, "CONTRIBUTING.md": 1_400, "SECURITY.md": 1_000, "benchmarks/README.md": 1_000}
_BENCHMARKS = _ROOT / "benchmarks"
_PAGES = (*_DOCS.glob("*.md"), *_ROOT.glob("*.md"), _BENCHMARKS / "README.md")
_CODE = re.compile(r"`([A-Za-z0-9_./]+\.py)(?::(\w+))?`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
_SOURCES = {file: file.read_text(encoding="utf-8") for file in sorted(_PACKAGE.rglob("*.py"))}


def _cells(page: Path, column: int = 0) -> list[str]:
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [row.split(" | ")[column].removeprefix("| ") for row in rows if not row.startswith("| word |")]


def test_every_file_and_name_of_the_walk_exists() -> None:
    found = _CODE.findall(_GUIDE.read_text(encoding="utf-8"))
    assert len(found) > 40
    missing = []
    for path, name in found:
        file = next((root / path for root in (_PACKAGE, _ROOT) if (root / path).is_file()), None)
        if file is None or (name and not re.search(rf"^(?:def|class) {name}\b", file.read_text(), re.MULTILINE)):
            missing.append(f"{path}:{name}")
    assert missing == []


def test_every_name_of_a_run_directory_is_in_its_map() -> None:
    text = _GUIDE.read_text(encoding="utf-8")
    names = {value for name, value in vars(run_names).items() if name.endswith(("_FILE", "_FOLDER"))}
    assert len(names) > 15
    assert {name for name in names if not re.search(rf"`[^`]*\b{re.escape(name)}\b", text)} == set()


def test_every_error_of_the_troubleshooting_page_is_raised_somewhere() -> None:
    nodes = (node for source in _SOURCES.values() for node in ast.walk(ast.parse(source)))
    texts = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    quoted = [cell.strip("`") for cell in _cells(_DOCS / "troubleshooting.md") if cell.startswith("`")]
    assert len(quoted) >= 25
    assert [fragment for fragment in quoted if fragment not in texts] == []


def test_the_map_names_every_room_and_no_other() -> None:
    rooms = {f"{folder.name}/" for folder in _PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    table = _GUIDE.read_text(encoding="utf-8").partition("## The map")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+/)`", table)) == rooms | {"jobs/", "ray_ulysses/"}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = _LINK.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_page_on_benchmarks_names_every_benchmark_and_no_other() -> None:
    named = set(re.findall(r"\b(?:gpu/)?bench_\w+\.py", (_BENCHMARKS / "README.md").read_text(encoding="utf-8")))
    assert named == {str(file.relative_to(_BENCHMARKS)) for file in _BENCHMARKS.rglob("bench_*.py")}


def test_pages_for_developers_are_short_and_readme_starts_with_what_is_not_tested() -> None:
    words = {page: len((_ROOT / page).read_text(encoding="utf-8").split()) for page in _MOST_WORDS}
    assert {page: count for page, count in words.items() if count > _MOST_WORDS[page]} == {}
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 135
    top = text[: text.index("![The report")]
    assert "Not yet tested:" in top and "](docs/report.png)" in text


def _site_hook() -> Any:
    spec = importlib.util.spec_from_file_location("site_links", _ROOT / "docs" / "site_links.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "without", "with_repository"),
    [
        (
            "[Dockerfile](../infra/Dockerfile)",
            "`infra/Dockerfile`",
            "[Dockerfile](https://g/r/blob/HEAD/infra/Dockerfile)",
        ),
        ("[jobs/](../jobs)", "`jobs`", "[jobs/](https://g/r/blob/HEAD/jobs)"),
        ("the [steps](../C.md#a-b).", "the steps (`C.md`).", "the [steps](https://g/r/blob/HEAD/C.md#a-b)."),
        ("[runs](recover.md#secrets)", "[runs](recover.md#secrets)", "[runs](recover.md#secrets)"),
        ("[a](https://b/../c)", "[a](https://b/../c)", "[a](https://b/../c)"),
    ],
)
def test_a_link_out_of_the_docs_leads_to_the_repository_or_is_a_path(
    text: str, without: str, with_repository: str
) -> None:
    change = _site_hook().on_page_markdown
    assert change(text, config={"repo_url": ""}, page=None, files=None) == without
    assert change(text, config={"repo_url": "https://g/r/"}, page=None, files=None) == with_repository


def test_every_page_has_one_place_in_the_site() -> None:
    def pages(entries: Any) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        values = entries.values() if isinstance(entries, dict) else entries
        return [page for entry in values for page in pages(entry)]

    config = load_config(str(_ROOT / "mkdocs.yml"))
    assert sorted(pages(config["nav"])) == sorted(file.name for file in (_ROOT / "docs").glob("*.md"))


def test_the_notebook_is_stored_with_outputs_that_name_no_place_of_a_machine() -> None:
    notebook = load()
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell["outputs"]) for cell in cells) > len(cells) / 2
    assert re.findall(r"/(?:tmp|root|home|work)/", NOTEBOOK.read_text(encoding="utf-8")) == []
    links = [link for cell in notebook["cells"] for link in _LINK.findall("".join(cell["source"]))]
    assert links and [link for link in links if not (NOTEBOOK.parent / link).exists()] == []
