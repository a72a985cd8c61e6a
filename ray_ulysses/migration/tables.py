"""Tables of other tools' options, and recognition of a file by them.

A table gives the fate of each option: carried over as a fact that `write` knows, left out with the replacement, or
refused with the reason. A table may extend another one, as TRL's arguments extend Transformers'.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from ray_ulysses.config.yaml_text import parse_yaml
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.storage.regular import open_regular

TOOLS = ("transformers", "trl", "deepspeed", "accelerate", "axolotl", "llamafactory", "ms_swift", "torchtitan")
"""Names of the tables. Of two tools that know equally many options of a file, the first is its owner."""
_MOST_BYTES = 2**20
_OUR_SECTIONS = ("run", "data", "schedule", "cluster")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The fate of one option."""

    kind: Literal["carried", "left out", "refused"]
    text: str
    """Name of the fact, or the reason with the replacement."""
    harmless: tuple[object, ...] = ()
    """Values with which a refused option has no effect, in addition to null, false, zero and empty values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Options of one tool."""

    tool: str
    """Display name."""
    version: str
    """Version whose reference the table covers."""
    marks: tuple[str, ...]
    """Options by which a file of this tool is recognized."""
    entries: Mapping[str, Entry]
    """Each option by its dotted name."""
    defaults: Mapping[str, object]
    """Facts that hold if the file does not state them."""
    sections: frozenset[str]
    """Options that have options of their own."""

    def entry(self, option: str) -> Entry | None:
        """Return the entry of an option, or of the section that contains it. None if neither is known."""
        while option not in self.entries:
            option = option.rpartition(".")[0]
            if not option:
                return None
        return self.entries[option]

    def options(self, tree: Mapping[Any, object], within: str = "") -> Iterator[tuple[str, object]]:
        """Yield each option of a file with its value; sections with options of their own are entered."""
        for key, value in tree.items():
            option = f"{within}{key}"
            parts = value if isinstance(value, list) else [value]
            own = [part for part in parts if isinstance(part, Mapping) and part]
            if option in self.sections and own and len(own) == len(parts):
                for part in own:
                    yield from self.options(part, f"{option}.")
            else:
                yield option, value


@cache
def load_table(name: str) -> Table:
    """Load a table of the package."""
    text = (files("ray_ulysses.migration") / "tables" / f"{name}.yaml").read_text(encoding="utf-8")
    tree: Any = parse_yaml(text, name)[0]
    base = load_table(tree["extends"]) if "extends" in tree else None
    entries = dict(base.entries) if base is not None else {}
    for group in tree.get("left out", ()):
        entries |= {option: Entry(kind="left out", text=group["why"]) for option in group["options"]}
    for group in tree.get("refused", ()):
        options = group["options"]
        harmless = options if isinstance(options, Mapping) else dict.fromkeys(options, ())
        entries |= {
            option: Entry(kind="refused", text=group["why"], harmless=tuple(values))
            for option, values in harmless.items()
        }
    entries |= {option: Entry(kind="carried", text=fact) for option, fact in tree["carried"].items()}
    defaults = {**(base.defaults if base is not None else {}), **tree.get("defaults", {})}
    return Table(
        tool=tree["tool"],
        version=str(tree["version"]),
        marks=tuple(tree["marks"]),
        entries=entries,
        defaults=defaults,
        sections=frozenset(name[: dot.start()] for name in entries for dot in re.finditer(r"\.", name)),
    )


def owner_of(tree: object) -> Table | None:
    """Return the table of the tool to which a file's content belongs, or None."""
    if not isinstance(tree, Mapping) or any(isinstance(tree.get(name), Mapping) for name in _OUR_SECTIONS):
        return None
    best, most = None, 0
    for table in map(load_table, TOOLS):
        names = [name for name, _ in table.options(tree)]
        has_mark = any(name == mark or name.startswith(f"{mark}.") for name in names for mark in table.marks)
        known = sum(table.entry(name) is not None for name in names)
        if has_mark and known > most:
            best, most = table, known
    return best


def read_foreign(path: Path) -> object:
    """Return the content of a JSON, TOML or YAML file.

    Raises:
        UserError: The file can't be read.
    """
    try:
        with open_regular(path) as stream:
            text = stream.read(_MOST_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"--from={str(path)!r}: can't be read ({reason}); use a YAML, JSON or TOML file") from error
    if len(text) > _MOST_BYTES:
        raise UserError(f"--from={str(path)!r}: is larger than {_MOST_BYTES:,} bytes; use a configuration file")
    try:
        if path.suffix.lower() == ".toml":
            return tomllib.loads(text)
        if path.suffix.lower() in (".json", ".jsonc"):
            return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--from={str(path)!r}: is not valid ({error}); correct the file's syntax") from error
    tree, problems = parse_yaml(text, path.name)
    if problems:
        raise ConfigError(problems, str(path))
    return tree


def foreign_tool(path: Path) -> str | None:
    """Return the name of the tool to which a file belongs, or None if it is unknown or the file can't be read."""
    try:
        owner = owner_of(read_foreign(path))
    except UserError:
        return None
    return None if owner is None else owner.tool
