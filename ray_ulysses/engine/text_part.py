"""The text decoder of a multimodal model, trained inside the model's own class without the rest of it.

The model's own forward, given text only, runs its decoder and its output head and nothing else. So the decoder that is
trained is the model itself, from which every part beside those two was cut: what it computes for a text is what the
whole model computes, whatever the architecture does around its decoder, and its weights keep the model's own names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from torch import nn

Part = Literal["whole", "text"]


def model_class(hf_config: Any, part: Part) -> Any:
    """Return the class of Transformers that builds and loads the model of which a part is trained.

    Args:
        hf_config: A ``PreTrainedConfig``, of the whole model.
        part: ``whole`` for a causal language model, ``text`` for the decoder of a multimodal model.

    Raises:
        UserError: The model has no such part.
    """
    is_multimodal = _is_multimodal(hf_config)
    if part == "whole" and is_multimodal:
        raise UserError(
            f"model_type={hf_config.model_type!r}: this is a multimodal model, of which the text decoder can be "
            "trained; set model.part: text (it is then exported back into the whole checkpoint)"
        )
    if part == "text" and not is_multimodal:
        raise UserError(
            f"model.part=text: a model with model_type={hf_config.model_type!r} has no text decoder beside other "
            "parts; leave model.part out for a model of text only"
        )
    return auto_class(part)


def auto_class(part: Part) -> Any:
    """Return the class of Transformers that chooses the model's own."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    return AutoModelForMultimodalLM if part == "text" else AutoModelForCausalLM


def _is_multimodal(hf_config: Any) -> bool:
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING

    return type(hf_config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and hf_config.get_text_config(decoder=True) != hf_config


def text_fields(hf_config: Any) -> dict[str, Any]:
    """Return the configuration of a multimodal model's decoder as a mapping, with the defaults of its type.

    Args:
        hf_config: A ``PreTrainedConfig``, of the whole model.
    """
    fields: dict[str, Any] = hf_config.get_text_config(decoder=True).to_dict()
    # The output head belongs to the whole, and so does the setting that ties it.
    return fields | {"tie_word_embeddings": bool(getattr(hf_config, "tie_word_embeddings", False))}


def cut_to_text(model: Any) -> None:
    """Take everything but the text decoder and the output head out of a multimodal model.

    Args:
        model: A ``PreTrainedModel`` on any device; what is cut out of it is freed.

    Raises:
        UserError: It has no decoder and head of its own.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    place = next((name for name, module in model.named_modules() if module is decoder), "")
    if not place or head is None:
        raise UserError(
            f"model.part=text: {type(model).__name__} does not say which of its modules are its text decoder and its "
            "output head, so they can't be trained alone; use another model"
        )
    around: nn.Module = model
    for name in place.split("."):
        inner = getattr(around, name)
        for other, child in list(around.named_children()):
            if child is not inner and child is not head:
                setattr(around, other, None)
        for other, _ in list(around.named_parameters(recurse=False)):
            setattr(around, other, None)
        around = inner
