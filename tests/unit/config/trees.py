"""The smallest configuration tree that is valid, for tests to change."""

from __future__ import annotations

import copy
from typing import Any

from ray_ulysses.config.schema import section_models

_TREE: dict[str, dict[str, Any]] = {
    "run": {"name": "first", "storage": "runs"},
    "model": {
        "init": "random",
        "dtype": "fp32",
        "config": {
            "model_type": "llama",
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "vocab_size": 320,
        },
    },
    "data": {"path": "runs/corpus", "context_tokens": 1024, "rows_per_step": 4},
    "optimizer": {"lr": 3e-4},
    "cluster": {"workers": 6},
}


def small_tree(**changes: Any) -> dict[str, dict[str, Any]]:
    """Return a valid tree, with changes such as ``data__epochs=2`` made to it."""
    tree = copy.deepcopy(_TREE)
    for path, value in changes.items():
        section, _, name = path.partition("__")
        tree.setdefault(section, {})[name] = value
    return tree


def setting_paths() -> tuple[str, ...]:
    """Return the dotted path of every setting, in schema order."""
    return tuple(f"{name}.{field}" for name, model in section_models().items() for field in model.model_fields)
