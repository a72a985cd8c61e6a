"""Puts values that a reader may not expect into a JSON or YAML file, whose checksums are right afterwards."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ray_ulysses.config.yaml_text import dump_yaml, read_yaml
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.tracking.journal_lines import with_checksum
from tests.unit.checkpoint.manifests import signed

_DEEP: Any = 1
for _ in range(300):
    _DEEP = [_DEEP]
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, float("nan"), float("inf")),
    *("", "\ud800", "\0", "x", "1", "x" * 5000, "../../x", "é", [], {}, [[]], {"a": 1}, [None], [1, "a"], _DEEP),
)
_TEXTS = (b"", b"null", b"[]", b"{}", b'"x"', b"1", b"NaN", b"[" * 3000, b'{"a":' * 3000, b"\xff", b"9" * 5000)


def damaged(file: Path, content: bytes, drawn: random.Random) -> bytes:
    """Return the content of a file with a value of another kind, without a member, or cut."""
    way = drawn.random()
    if way < 0.1:
        return drawn.choice((*_TEXTS, content[: drawn.randrange(len(content))]))
    if file.suffix == ".yaml":
        tree = read_yaml(file)[0]
        _replace(tree, drawn)
        return dump_yaml(tree).encode("utf-8", "surrogatepass")
    if file.suffix == ".jsonl":
        lines = content.splitlines(keepends=True)
        number = drawn.randrange(len(lines))
        lines[number] = _line(json.loads(lines[number]), drawn)
        return b"".join(lines)
    tree = json.loads(content)
    _replace(tree, drawn)
    return _sealed(file.name, tree)


def _line(tree: dict[str, Any], drawn: random.Random) -> bytes:
    del tree["crc32"]
    _replace(tree, drawn)
    return with_checksum(json.dumps(tree).encode() + b"\n")


def _sealed(name: str, tree: dict[str, Any]) -> bytes:
    if name == "manifest.json":
        return signed(tree)
    if name in ("corpus.json", "plan.json"):
        tree.pop("checksum", None)
        tree["checksum"] = stable_hash(tree)
    return json.dumps(tree).encode()


def _replace(tree: Any, drawn: random.Random) -> None:
    """Change one member somewhere in a tree: the deeper ones as often as the others."""
    holder, key = drawn.choice(_places(tree))
    way = drawn.random()
    if way < 0.1:
        del holder[key]
    elif way < 0.15 and isinstance(holder, dict):
        holder[drawn.choice(("", "\ud800", "x", "__class__"))] = drawn.choice(_VALUES)
    else:
        holder[key] = drawn.choice(_VALUES)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    members = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in members for place in ((tree, key), *_places(value))]
