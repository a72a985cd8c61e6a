"""Reads a model configuration from ``model.config``, a directory or the hub, without running code from the hub."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ray_ulysses.attention.refusals import noise_settings
from ray_ulysses.config import Config
from ray_ulysses.config.model import RopeSection
from ray_ulysses.config.objective import Task
from ray_ulysses.engine.quantized_source import format_name, take_quantization
from ray_ulysses.engine.stored_weights import SOURCES, resolve_tie
from ray_ulysses.engine.text_part import auto_class
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import refuse_implausible
from ray_ulysses.storage.hub import hub_folder


def planned_config(config: Config) -> Any:
    """Return the ``PreTrainedConfig`` for planning: ``model.config``, or else the configuration at ``model.path``.

    ``model.config`` requires no hub access, and is compared with ``model.path`` when the model is loaded. Weights are
    not fetched from the hub, so it is unknown until loading whether a stored output head is tied.

    Raises:
        UserError: See `described_config`.
    """
    described = config.model.config
    if described is not None:
        return _as_trained(inline_config(described), config)
    return described_config(config, is_tied=None if Path(str(config.model.path)).expanduser().is_dir() else True)


def described_config(config: Config, is_tied: bool | None = None) -> Any:
    """Return a run's ``PreTrainedConfig``, from ``model.config`` for random weights and otherwise from ``model.path``.

    Raises:
        UserError: The configuration can't be read, has an unknown model type, requires code from the model's
            repository, or differs from ``model.config``.
    """
    if config.model.config is not None and config.model.init == "random":
        return _as_trained(inline_config(config.model.config), config)
    found = stored_config(str(config.model.path))
    # Compare before the tie and the positions are changed, because model.config describes the original model.
    check_described(config.model.config, found.to_dict(), str(config.model.path))
    if is_tied is False and getattr(found, "tie_word_embeddings", False):
        found.tie_word_embeddings = False
    elif is_tied is None and config.model.init == "pretrained":
        resolve_tie(found, config.model.part, config.objective.task, str(config.model.path))
    return _as_trained(found, config)


def trained_positions(config: Config) -> int | None:
    """Return the model's number of positions before applying ``model.rope``, or None if positions are not rotary.

    Raises:
        UserError: See `described_config`.
    """
    described, path = config.model.config, str(config.model.path)
    if described is not None and "max_position_embeddings" not in described.get("text_config", described):
        # The default value of the Transformers class would not describe this model.
        is_here = config.model.init == "pretrained" and Path(path).expanduser().is_dir()
        return stored_positions(stored_config(path)) if is_here else None
    before = config.model_copy(update={"model": config.model.model_copy(update={"rope": None})})
    return stored_positions(planned_config(before))


def _as_trained(hf_config: Any, config: Config) -> Any:
    if isinstance(config.model.rope, RopeSection):
        set_rope(hf_config, config.model.rope, config.data.context_tokens)
    if config.objective.task != "causal_lm":
        without_noise(hf_config)
    if config.objective.classes:
        # `num_labels` is their number.
        hf_config.id2label = dict(enumerate(config.objective.classes))
        hf_config.label2id = {name: number for number, name in enumerate(config.objective.classes)}
    return hf_config


def without_noise(hf_config: Any) -> dict[str, float]:
    """Set dropout and other noise to 0 in a configuration, and return the changed settings with their former values.

    Encoders' configurations enable dropout by default, with which training would depend on the world size.
    """
    found = noise_settings(hf_config.to_dict())
    for name in found:
        setattr(hf_config, name, 0.0)
    return found


def objective_of(hf_config: Any) -> str:
    """Return the value of ``objective.kind`` for which a stored model was trained, by the class that wrote it."""
    written = str((getattr(hf_config, "architectures", None) or [""])[0])
    kinds = {"ForMaskedLM": "mlm", "ForSequenceClassification": "classification"}
    return next((kind for name, kind in kinds.items() if written.endswith(name)), "next_token")


def disabled_noise(config: Config) -> dict[str, float]:
    """Return the settings of a run's model that `without_noise` changes, with their values in the configuration.

    Raises:
        UserError: See `described_config`.
    """
    if config.objective.task == "causal_lm":
        return {}
    described = config.model.config
    return without_noise(stored_config(str(config.model.path)) if described is None else inline_config(described))


def inline_config(described: Mapping[str, Any]) -> Any:
    """Return the ``PreTrainedConfig`` that ``model.config`` describes, without network access.

    Raises:
        UserError: The model type is unknown, a field has an invalid value, or the quantized format is not supported.
    """
    from transformers import AutoConfig

    fields = dict(described)
    refuse_implausible(fields, "model.config")
    _refuse_unknown_type(fields.get("model_type"), "model.config.model_type")
    found = as_user_error(lambda: AutoConfig.for_model(fields.pop("model_type"), **fields), "model.config")
    take_quantization(found, "model.config")
    return found


def stored_config(path: str, name: str = "model.path") -> Any:
    """Return the ``PreTrainedConfig`` for a directory or hub ID, without a ``quantization_config``.

    Errors report ``name`` as the setting.

    Raises:
        UserError: The configuration can't be read, has an unknown model type, requires code from the model's
            repository, or describes weights in a quantized format that is not supported.
    """
    return _read_config(path, name)[0]


def stored_quantization(path: str) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of the weights in a directory or hub ID, or None if they are not quantized.

    Raises:
        UserError: See `stored_config`.
    """
    return _read_config(path, "model.path")[1]


def source_format(config: Config) -> str | None:
    """Return the quantized format of the weights from which a run starts, or None if they are not quantized.

    Like planning, this requires no hub access if ``model.config`` is set.

    Raises:
        UserError: See `stored_config`.
    """
    path, described = config.model.path, config.model.config
    if path is None or config.model.init == "random":
        return None
    is_described = described is not None and not Path(path).expanduser().is_dir()
    found = (described or {}).get("quantization_config") if is_described else stored_quantization(path)
    return None if found is None else format_name(found)


def _read_config(path: str, name: str) -> tuple[Any, dict[str, Any] | None]:
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    setting = f"{name}={path!r}"
    folder = hub_folder(path, setting, ["config.json"], SOURCES)
    fields, _ = as_user_error(lambda: PreTrainedConfig.get_config_dict(folder, local_files_only=True), setting)
    refuse_implausible(fields, setting)
    kind = fields.get("model_type")
    if kind is None and "auto_map" not in fields:
        raise UserError(f"{setting}: no config.json with a model_type was found; {SOURCES}")
    if "auto_map" in fields and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
        raise UserError(
            f"{setting}: model_type {kind!r} is defined by Python code in the model's own repository. ray-ulysses "
            "never runs such code (trust_remote_code is not supported): it would run on every worker, and the "
            "model's attention can't be replaced exactly. Use a model whose architecture is part of Transformers"
        )
    _refuse_unknown_type(kind, f"{setting}: model_type")
    found = as_user_error(
        lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True), setting
    )
    found.name_or_path = path
    return found, take_quantization(found, setting)


def _refuse_unknown_type(kind: object, setting: str) -> None:
    from transformers import CONFIG_MAPPING, __version__

    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return
    near = difflib.get_close_matches(str(kind).lower(), CONFIG_MAPPING.keys(), n=1, cutoff=0.6)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise UserError(
        f"{setting}={kind!r}: Transformers {__version__} does not support this model type; use the model_type from "
        f"the model's config.json on the hub, such as llama, mistral or qwen3{hint}; or import the plugin that "
        "defines it (run.plugins; evaluate and export need --trust-run)"
    )


def refuse_no_class(hf_config: Any, task: Task) -> None:
    """Raise a ``UserError`` if Transformers has no class for a configuration's model type and a task."""
    from transformers import __version__

    kind, instead = {
        "causal_lm": ("causal language model", "a decoder such as llama, mistral or qwen3"),
        "masked_lm": ("masked language model", "an encoder such as modernbert, bert or esm"),
        "sequence_classification": ("classifier of texts", "a model such as llama, modernbert or bert"),
        "embedding": ("model of texts", "a model such as llama, qwen3 or modernbert"),
    }[task]
    if type(hf_config) not in auto_class("whole", task)._model_mapping:
        raise UserError(
            f"model_type={hf_config.model_type!r}: Transformers {__version__} has no {kind} for this type; use "
            f"{instead}"
        )


def as_user_error(read: Callable[[], Any], setting: str) -> Any:
    """Call ``read``, and convert any exception from Transformers into a ``UserError`` about ``setting``."""
    try:
        return read()
    except Exception as error:
        # Catch everything: Transformers validates little, so invalid input can raise any exception.
        reason = f"unknown value {error}" if isinstance(error, KeyError) else str(error)
        hint = "correct model.config" if setting == "model.config" else SOURCES
        raise UserError(f"{setting}: Transformers rejects the configuration ({reason}); {hint}") from error


def _differing(described: Mapping[str, Any], loaded: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for name, value in described.items():
        found = loaded.get(name)
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            # A section of a multimodal model's configuration: compare only fields that model.config contains.
            yield from _differing(value, found, f"{section}{name}.")
        elif name in loaded and found != value:
            yield f"{section}{name} is {found!r} in model.path and {value!r} in model.config"


def check_described(described: Mapping[str, Any] | None, loaded: Mapping[str, Any], path: str) -> None:
    """Raise an error if a loaded model differs from ``model.config``, on which the plan is based.

    Raises:
        UserError: At least one field differs. The error lists all differing fields.
    """
    differing = list(_differing(described or {}, loaded))
    if differing:
        raise UserError(
            f"model.path={path!r} does not match model.config: {'; '.join(differing)}. Correct or remove model.config"
        )


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
"""Parameters of each RoPE scaling type. The first is required: it must not be derived from the context length."""


def stored_positions(hf_config: Any) -> int | None:
    """Return a configuration's number of positions, or None if positions are not rotary."""
    text = hf_config.get_text_config(decoder=True)
    found = getattr(text, "max_position_embeddings", None)
    return found if getattr(text, "rope_parameters", None) and isinstance(found, int) else None


def set_rope(hf_config: Any, rope: RopeSection, context_tokens: int) -> None:
    """Apply ``model.rope`` to a configuration. Call this function before building the model.

    If the context is longer than ``max_position_embeddings``, that field is set to the context length, so that the
    exported configuration shows the trained length. With ``dynamic``, the field is not changed, because this scaling
    type uses it as the original length. For a multimodal model, the text decoder's positions are changed.

    Raises:
        UserError: The model has no rotary positions, or Transformers does not accept ``rope``.
    """
    text = hf_config.get_text_config(decoder=True)
    trained, stored = stored_positions(hf_config), getattr(text, "rope_parameters", None)
    if not isinstance(stored, Mapping) or not stored:
        raise UserError(f"model.rope: {text.model_type} has no rotary embeddings; remove model.rope")
    kinds = [name for name, value in stored.items() if isinstance(value, Mapping)]
    if kinds and _FULL not in kinds:
        raise UserError(f"model.rope: {text.model_type} has rotary embeddings only for {', '.join(kinds)}, not {_FULL}")
    changed = _merged(stored[_FULL] if kinds else stored, rope, trained)
    text.rope_parameters = {**stored, _FULL: changed} if kinds else changed
    if _ORIGINAL in changed and hasattr(text, _ORIGINAL):
        # Phi 3's configuration stores this value twice, and Transformers prefers this copy.
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
        raise UserError("model.rope: no field is set; set rope_theta or rope_type, or use model.rope: unchanged")
    takes = _TAKES.get(kind, ())
    if unused := sorted(given.keys() - {"rope_type", "rope_theta", *takes}):
        raise UserError(
            f"model.rope: {', '.join(unused)} has no effect with rope_type={kind}, which accepts "
            f"{', '.join(('rope_theta', *takes))}; remove {', '.join(unused)}, or use another rope_type"
        )
    kept = {name: value for name, value in stored.items() if kind == own or name in _OF_EVERY_TYPE}
    if _ORIGINAL in takes and trained is not None:
        kept.setdefault(_ORIGINAL, trained)
    merged = {**kept, **given, "rope_type": kind}
    if takes and takes[0] not in merged:
        raise UserError(
            f"model.rope: rope_type={kind} requires factor; set it to the context length divided by the number of "
            "positions that the model was trained on, such as 8.0"
        )
    return merged
