"""Renders docs/configuration.md from the schema of the settings; ``make docs`` writes it."""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic.fields import FieldInfo

from ray_ulysses.config.learning import StageSection
from ray_ulysses.config.resume import BRANCHABLE, FIXED, FREE, STAGES
from ray_ulysses.config.schema import section_models
from ray_ulysses.config.section import Section

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
_HEAD = """# Configuration

<!-- Generated from `ray_ulysses/config`; run `make docs` to update it. -->

A run is one YAML file with the sections below. `--set section.setting=value` changes a setting from the
command line; the value is read as YAML, so `--set parallel.allowed_sp=[1,2,4]` gives a list and `--set
run.stop_step=` gives null. `--set stages.0.lr=1e-5` reaches into a list, and `--set stages.long.lr=1e-5` does by the
name of the entry, which counts first where a name is a number. The resolved configuration, defaults included, is stored
as `config.yaml` in the run's directory.

`extends: base.yaml`, a path relative to the file, takes the settings of another file. Sections are merged setting by
setting; a setting, and the list of stages, replaces that of the extended file.

Values in a file and in `--set` may refer to environment variables: `${NAME}`, which must be set, or `${NAME:-default}`.
A reference that is a whole value may become a number; in quotation marks it stays text, and inside `[]` or `{}` it
needs them. Variables that look like secrets are refused; use a [secrets file](recover.md#secrets). The stored
`config.yaml` has the final values, so a resumed run does not depend on the environment.

Everything that can be checked from the file alone is checked before a worker starts, and every problem is
reported at once: unknown and misspelled keys, duplicate keys, types, ranges and the rules between settings.
Nothing is converted or guessed: `workers: "4"` is refused. Numbers may be written as `3e-4` or `131_072`;
only `true` and `false` are booleans, so `no` is text.

Names that other tools use, such as `learning_rate` or `max_seq_length`, are refused with ours.

Editors complete and check a file by the JSON schema that `ray-ulysses init --schema` prints. A first line
`# yaml-language-server: $schema=FILE`, which `init` writes, names it.

Each setting has a link, such as `#optimizer-lr`. The line below its name has its type, its default, and whether a run
may be resumed with another value; [the table at the end](#what-may-change-on-resume) has the reasons.
"""

_RESUME = """## What may change on resume

`ray-ulysses train` with the same `run.name` and `run.storage` resumes the run. Its stored configuration is
compared with the given one. A fixed setting that differs is refused by name before a worker starts; to train with
another value, choose another `run.name`. A setting marked "by branch" needs `train --branch`: the run then continues
from its newest committed checkpoint with a [new segment of its plan](data.md#change-the-data-of-a-running-job), or
with another learning rate.

| setting | on resume | |
|---|---|---|
"""

_BOUNDS = {Ge: ("ge", "≥ {}"), Gt: ("gt", "> {}"), Le: ("le", "≤ {}"), Lt: ("lt", "< {}")}


def render_reference() -> str:
    parts = [_HEAD, *(_section(name, model) for name, model in section_models().items()), _stages(), _RESUME]
    rows = [f"| {_link(path)} | fixed | {reason} |" for path, reason in FIXED.items()]
    rows += [f"| {_link(path)} | by branch | {reason} |" for path, reason in BRANCHABLE.items()]
    rows.append(f"| {_link(STAGES)} | by branch | stages that have started keep the settings that are fixed above |")
    rows += [f"| {_link(path)} | may change | {note} |" for path, note in FREE.items()]
    return "\n".join(parts) + "\n".join(rows) + "\n"


def anchor(path: str) -> str:
    return path.replace("[]", "").replace(".", "-")


def _link(path: str) -> str:
    return f"[`{path}`](#{anchor(path)})"


def cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _section(name: str, model: type[Section]) -> str:
    lines = [f"## {name}", "", (model.__doc__ or "").strip(), ""]
    for field, info in model.model_fields.items():
        path = f"{name}.{field}"
        resume = "fixed" if path in FIXED else "by branch" if path in BRANCHABLE else "may change"
        lines += _setting(path, info, f" · {resume}")
        for part in _mappings(info.annotation):
            below = f"{path}{'[]' * _is_list(info)}"
            lines += [
                f"    {line}"
                for one in part.model_fields.items()
                for line in _setting(f"{below}.{one[1].alias or one[0]}", one[1])
            ]
    return "\n".join(lines)


def _stages() -> str:
    lines = ["## stages", "", "A list of stages, one after the other; without it a run is one stage.", ""]
    lines += [line for field, info in StageSection.model_fields.items() for line in _setting(f"stages[].{field}", info)]
    return "\n".join(lines)


def _setting(path: str, info: FieldInfo, resume: str = "") -> list[str]:
    facts = f"{_type(info)} · {_default(info)}{resume}".replace("\\|", "|")
    meaning = " ".join((info.description or "").split())
    return [f'* <a id="{anchor(path)}"></a>**{_link(path)}**<br>{facts}<br>{meaning}', ""]


def _mappings(annotation: Any) -> list[type[Section]]:
    """Return the groups of settings that a setting may consist of."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _mappings(argument)]


def _is_list(info: FieldInfo) -> bool:
    return any(get_origin(argument) is tuple for argument in (info.annotation, *get_args(info.annotation)))


def _type(info: FieldInfo) -> str:
    bounds = [
        form.format(getattr(item, attribute))
        for item in info.metadata
        for kind, (attribute, form) in _BOUNDS.items()
        if isinstance(item, kind)
    ]
    bounds += ["not empty" for item in info.metadata if isinstance(item, MinLen)]
    bounds += [f"at most {item.max_length} characters" for item in info.metadata if isinstance(item, MaxLen)]
    return ", ".join([type_name(info.annotation), *bounds])


def type_name(annotation: Any, named: Sequence[tuple[Any, str]] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    for kind, name in named:
        if annotation == kind:
            return name
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return type_name(arguments[0], named)
    if origin is Literal:
        return " \\| ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " \\| ".join(type_name(argument, named) for argument in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0], named)}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"{annotation.short_form}mapping"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[annotation]


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "default `null`"
    if isinstance(value, bool):
        return f"default `{str(value).lower()}`"
    return f"default `{list(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    PAGE.write_text(render_reference(), encoding="utf-8")
