"""Describes a model for embeddings to the library ``sentence-transformers`` (formats of version 5)."""

from __future__ import annotations

import json
from typing import Any

from ray_ulysses.config import Config

MODULES_FILE = "modules.json"
_POOLING = "1_Pooling"


def sentence_files(config: Config, hidden_size: int) -> dict[str, bytes]:
    """Return the files that ``SentenceTransformer`` reads beside those of Transformers, by path, or none.

    Args:
        config: The run's configuration.
        hidden_size: Size of a vector.
    """
    if config.objective.kind != "embedding":
        return {}
    pooling = config.objective.pooling
    kinds = ("Transformer", ""), ("Pooling", _POOLING)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds)
    ]
    files: dict[str, Any] = {
        MODULES_FILE: modules,
        f"{_POOLING}/config.json": {
            "word_embedding_dimension": hidden_size,
            "pooling_mode_cls_token": pooling == "first",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_lasttoken": pooling == "last",
        },
        "sentence_bert_config.json": {"max_seq_length": config.data.context_tokens, "do_lower_case": False},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
    }
    return {name: json.dumps(content, indent=2).encode() + b"\n" for name, content in files.items()}
