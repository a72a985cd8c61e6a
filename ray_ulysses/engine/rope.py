"""Puts the rotary positions of ``model.rope`` into a model's configuration, from which the model is then built.

In a model that is built already, Transformers 5 would ignore them: its frequencies are buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from ray_ulysses.config.learning import RopeSection

_FULL = "full_attention"
_ORIGINAL = "original_max_position_embeddings"
_OF_EVERY_TYPE = ("rope_theta", "partial_rotary_factor")
_TAKES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow"),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
"""What each scaling takes; the first one it needs, since it must not follow from the context."""


def stored_positions(hf_config: Any) -> int | None:
    """Return how many positions a model with rotary ones was made for, as its configuration says; None without.

    Args:
        hf_config: A ``PreTrainedConfig``; of a multimodal model, its text decoder counts.
    """
    text = hf_config.get_text_config(decoder=True)
    found = getattr(text, "max_position_embeddings", None)
    return found if getattr(text, "rope_parameters", None) and isinstance(found, int) else None


def set_rope(hf_config: Any, rope: RopeSection, context_tokens: int) -> None:
    """Change the rotary positions of a configuration, before a model is built from it.

    ``max_position_embeddings`` becomes the context where that is longer, so that the exported model says what it was
    trained on; with ``dynamic`` it stays, since that method takes it for the length before.

    Args:
        hf_config: A ``PreTrainedConfig``, which is changed; of a multimodal model, its text decoder.
        rope: What is given replaces what the configuration has.
        context_tokens: The context that is trained.

    Raises:
        UserError: The model has no rotary positions, or Transformers does not accept these.
    """
    text = hf_config.get_text_config(decoder=True)
    trained, stored = stored_positions(hf_config), getattr(text, "rope_parameters", None)
    if not isinstance(stored, Mapping) or not stored:
        raise UserError(f"model.rope: {text.model_type} has no rotary positions; leave it out")
    kinds = [name for name, value in stored.items() if isinstance(value, Mapping)]
    if kinds and _FULL not in kinds:
        raise UserError(f"model.rope: {text.model_type} has rotary positions for {', '.join(kinds)}, none for {_FULL}")
    changed = _merged(stored[_FULL] if kinds else stored, rope, trained)
    text.rope_parameters = {**stored, _FULL: changed} if kinds else changed
    if _ORIGINAL in changed and hasattr(text, _ORIGINAL):
        # Transformers takes this one where a configuration has both, as Phi 3 does.
        setattr(text, _ORIGINAL, changed[_ORIGINAL])
    if trained is not None and changed["rope_type"] != "dynamic":
        text.max_position_embeddings = max(trained, context_tokens)
    try:
        text.standardize_rope_params()
        text.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"model.rope: Transformers does not accept {changed}: {error}") from error


def _merged(stored: Mapping[str, Any], rope: RopeSection, trained: int | None) -> dict[str, Any]:
    given = {name: value for name, value in rope.model_dump().items() if value is not None}
    given |= {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
    own = str(stored.get("rope_type", "default"))
    kind = str(given.get("rope_type", own))
    if not given:
        raise UserError("model.rope: says nothing; give a rope_theta or a rope_type, or write `unchanged`")
    takes = _TAKES.get(kind, ())
    if unused := sorted(given.keys() - {"rope_type", "rope_theta", *takes}):
        raise UserError(
            f"model.rope: {', '.join(unused)} would change nothing with rope_type={kind}, which takes "
            f"{', '.join(('rope_theta', *takes))}; leave it out, or give another rope_type"
        )
    kept = {name: value for name, value in stored.items() if kind == own or name in _OF_EVERY_TYPE}
    if _ORIGINAL in takes and trained is not None:
        kept.setdefault(_ORIGINAL, trained)
    merged = {**kept, **given, "rope_type": kind}
    if takes and takes[0] not in merged:
        raise UserError(
            f"model.rope: rope_type={kind} needs factor; give the context over the positions that the model was "
            "trained on, such as 8.0"
        )
    return merged
