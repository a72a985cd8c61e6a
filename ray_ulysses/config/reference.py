"""The reference of every setting, made from the schema: ``python -m ray_ulysses.config.reference``.

``docs/configuration.md`` is its output, and a test holds the two together.
"""

from __future__ import annotations

import sys
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic.fields import FieldInfo

from ray_ulysses.config.resume import BRANCHABLE, FIXED, FREE
from ray_ulysses.config.schema import section_models
from ray_ulysses.config.section import Section

_HEAD = """# Configuration

<!-- Made by `python -m ray_ulysses.config.reference`; `make docs` writes it anew. -->

A run is one YAML file with the sections below. `--set section.setting=value` changes a setting from the
command line; the value is read as YAML, so `--set parallel.allowed_sp=[1,2,4]` gives a list and `--set
run.stop_step=` gives null. The resolved configuration, defaults included, is kept as `config.yaml` in the
run's directory.

Everything that can be checked from the file alone is checked before a worker starts, and every problem is
reported at once: unknown and misspelt keys, duplicate keys, types, ranges and the rules between settings.
Nothing is converted or guessed: `workers: "4"` is refused. Numbers may be written as `3e-4` or `131_072`;
only `true` and `false` are truth values, so `no` is text.

A setting without a default is required. "Resume" says whether a run may go on with another value: see [the
table at the end](#what-may-change-on-resume).
"""

_RESUME = """## What may change on resume

`ray-ulysses train` with the same `run.name` and `run.storage` resumes the run. Its stored configuration is
compared with the one given. A fixed setting that differs is refused, by name and before a worker starts; to
train with another value, choose another `run.name`. A setting that changes by branch needs
`train --branch`: the run then goes on from its newest committed checkpoint with a [new segment of its
plan](data.md#change-the-data-of-a-running-job).

| setting | on resume | |
|---|---|---|
"""

_BOUNDS = {Ge: ("ge", "≥ {}"), Gt: ("gt", "> {}"), Le: ("le", "≤ {}"), Lt: ("lt", "< {}")}


def render_reference() -> str:
    """Return the reference of every setting as Markdown."""
    parts = [_HEAD, *(_section(name, model) for name, model in section_models().items()), _RESUME]
    rows = [f"| `{path}` | fixed | {reason} |" for path, reason in FIXED.items()]
    rows += [f"| `{path}` | by branch | {reason} |" for path, reason in BRANCHABLE.items()]
    rows += [f"| `{path}` | may change | {note} |" for path, note in FREE.items()]
    return "\n".join(parts) + "\n".join(rows) + "\n"


def _section(name: str, model: type[Section]) -> str:
    lines = [f"## {name}", "", (model.__doc__ or "").strip(), ""]
    lines += ["| setting | type | default | resume | meaning |", "|---|---|---|---|---|"]
    for field, info in model.model_fields.items():
        path = f"{name}.{field}"
        meaning = " ".join((info.description or "").split()).replace("|", "\\|")
        resume = "fixed" if path in FIXED else "by branch" if path in BRANCHABLE else "may change"
        lines.append(f"| `{path}` | {_type(info)} | {_default(info)} | {resume} | {meaning} |")
    return "\n".join([*lines, ""])


def _type(info: FieldInfo) -> str:
    bounds = [
        form.format(getattr(item, attribute))
        for item in info.metadata
        for kind, (attribute, form) in _BOUNDS.items()
        if isinstance(item, kind)
    ]
    bounds += ["not empty" for item in info.metadata if isinstance(item, MinLen)]
    bounds += [f"at most {item.max_length} characters" for item in info.metadata if isinstance(item, MaxLen)]
    return ", ".join([_type_name(info.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " \\| ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " \\| ".join(_type_name(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "mapping of " + ", ".join(f"`{name}`" for name in annotation.model_fields)
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[annotation]


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    sys.stdout.write(render_reference())
