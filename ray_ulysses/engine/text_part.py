"""Removes all parts of a multimodal model except the text decoder and output head.

For text-only input, a multimodal model's forward runs only the decoder and the output head. The trained model is
therefore the multimodal model with all other parts removed. For text, this model computes the same result as the full
model, regardless of the code around the decoder, and tensor names do not change.
"""

from __future__ import annotations

from typing import Any, Literal

from ray_ulysses.config.objective import Task
from ray_ulysses.errors import UserError

Part = Literal["whole", "text"]


def model_class(hf_config: Any, part: Part, task: Task = "causal_lm") -> Any:
    """Return the Transformers auto class that builds and loads a model.

    Raises:
        UserError: ``part`` is ``whole`` for a multimodal model, or ``text`` for any other model or task.
    """
    has_parts = is_multimodal(hf_config)
    if part == "text" and task != "causal_lm":
        raise UserError(
            "model.part=text: the text decoder of a multimodal model predicts the next token; remove model.part, or "
            "set objective.kind: next_token"
        )
    if part == "whole" and has_parts:
        raise UserError(
            f"model_type={hf_config.model_type!r}: only the text decoder of this multimodal model can be trained; set "
            "model.part: text (exports contain the full model with the trained decoder)"
        )
    if part == "text" and not has_parts:
        raise UserError(
            f"model.part=text: model_type={hf_config.model_type!r} is not multimodal; remove model.part to train a "
            "text model"
        )
    return auto_class(part, task)


def auto_class(part: Part, task: Task = "causal_lm") -> Any:
    """Return the Transformers auto class for a value of ``model.part`` and a task."""
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForMultimodalLM,
        AutoModelForSequenceClassification,
    )

    if part == "text":
        return AutoModelForMultimodalLM
    return {
        "causal_lm": AutoModelForCausalLM,
        "masked_lm": AutoModelForMaskedLM,
        "sequence_classification": AutoModelForSequenceClassification,
        "embedding": AutoModel,
    }[task]


def is_multimodal(hf_config: Any) -> bool:
    """Return whether a model has parts other than a text decoder."""
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING

    return type(hf_config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and hf_config.get_text_config(decoder=True) != hf_config


def text_fields(hf_config: Any) -> dict[str, Any]:
    """Return the fields of a multimodal model's decoder configuration, including default values."""
    fields: dict[str, Any] = hf_config.get_text_config(decoder=True).to_dict()
    # The output head and tie_word_embeddings belong to the multimodal model, not to its decoder.
    return fields | {"tie_word_embeddings": bool(getattr(hf_config, "tie_word_embeddings", False))}


def keep_text_part(model: Any) -> None:
    """Remove everything but the text decoder and the output head from a multimodal model.

    Raises:
        UserError: The model does not expose its decoder and output head.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    place = next((name for name, module in model.named_modules() if module is decoder), "")
    if not place or head is None:
        raise UserError(
            f"model.part=text: {type(model).__name__} does not expose its text decoder and output head, so they can't "
            "be trained separately; use another model"
        )
    around = model
    for name in place.split("."):
        inner = getattr(around, name)
        for other, child in list(around.named_children()):
            if child is not inner and child is not head:
                setattr(around, other, None)
        for other, _ in list(around.named_parameters(recurse=False)):
            setattr(around, other, None)
        around = inner
