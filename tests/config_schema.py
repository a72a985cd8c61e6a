"""Renders ray_ulysses/config.schema.json, by which editors check a configuration file; ``make docs`` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray_ulysses.config.devices import DEVICES
from ray_ulysses.config.schema import Config, section_models

FILE = Path(__file__).parents[1] / "ray_ulysses" / "config.schema.json"
_REFERENCE = {
    "type": "string",
    "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^{}]*)?\}",
    "description": "A reference to an environment variable.",
}
_EXTENDS = {"type": "string", "description": "Path of a configuration file whose settings this file changes."}


def render_schema() -> str:
    schema = Config.model_json_schema()
    # WorkerLimits also takes one number, by a validator that pydantic can't describe.
    limits = schema["$defs"]["WorkerLimits"]
    schema["$defs"]["WorkerLimits"] = {"anyOf": [{"type": "integer", "minimum": 1}, limits]}
    # DeviceSection also takes a name.
    schema["$defs"]["DeviceSection"] = {"anyOf": [{"enum": list(DEVICES)}, schema["$defs"]["DeviceSection"]]}
    for name, model in section_models().items():
        # An extended file or --set may give what this file lacks, and an empty section counts as a missing one.
        schema["$defs"][model.__name__].pop("required", None)
        section = {"$ref": f"#/$defs/{model.__name__}"}
        schema["properties"][name] = {
            "anyOf": [section, {"type": "null"}],
            "description": (model.__doc__ or "").strip(),
        }
    del schema["required"]
    schema = _with_references(schema)
    schema["$defs"]["Reference"] = _REFERENCE
    schema["properties"]["extends"] = _EXTENDS
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Configuration of ray-ulysses"}
    return json.dumps({**head, **schema}, indent=1, ensure_ascii=False) + "\n"


def _with_references(node: Any) -> Any:
    """Return a schema without titles, in which a reference may replace each number, boolean and restricted text."""
    if isinstance(node, list):
        return [_with_references(one) for one in node]
    if not isinstance(node, dict):
        return node
    node = {
        key: value if key in ("default", "enum", "required") else _with_references(value)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str))
    }
    is_plain = node.get("type") in ("integer", "number", "boolean")
    if not (is_plain or "const" in node or isinstance(node.get("enum"), list) or isinstance(node.get("pattern"), str)):
        return node
    around = {key: node.pop(key) for key in ("description", "default") if key in node}
    return {"anyOf": [node, {"$ref": "#/$defs/Reference"}], **around}


if __name__ == "__main__":
    FILE.write_text(render_schema(), encoding="utf-8")
