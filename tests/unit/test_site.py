from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from mkdocs.config import load_config

_ROOT = Path(__file__).parents[2]


def _hook() -> Any:
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
    change = _hook().on_page_markdown
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
