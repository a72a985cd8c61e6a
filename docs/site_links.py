"""A hook of MkDocs: links from docs/ to other files of the repository lead to it, or are shown as paths."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<path>\.\./[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Return a page's text, in which every link is one that the site can follow."""
    repository = str(config["repo_url"] or "").rstrip("/")

    def led(match: re.Match[str]) -> str:
        text, path = match["text"], posixpath.normpath(match["path"].removeprefix("../"))
        if repository:
            return f"[{text}]({repository}/blob/HEAD/{path}{match['anchor'] or ''})"
        if path.endswith(text.strip("`/")):
            return f"`{path}`"
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(led, markdown)
