"""Finds the part of a model that computes one vector per token."""

from __future__ import annotations

from typing import Any


def trunk_of(model: Any) -> Any:
    """Return the part of a model that computes a result for each token.

    This is the model without PEFT and, if it classifies documents, without the head. Such a head reads one vector per
    document, and does not run on slices.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.base_model if classifies(base) else base


def classifies(model: Any) -> bool:
    """Return whether a model is one of Transformers' ``*ForSequenceClassification``."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    return kind is not None and isinstance(model, kind)
