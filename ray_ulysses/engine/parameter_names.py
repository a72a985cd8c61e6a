"""Names of a model's parameters, and patterns that match them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ray_ulysses.config.optimizer import ParameterGroup
from ray_ulysses.engine.partition_view import shape_of
from ray_ulysses.errors import UserError
from ray_ulysses.trained_part import MatchedParameters

PREFIX = "base_model.model."
"""Prefix that PEFT adds to the base model's tensor names, in the model and in adapter files."""


def parameter_names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return the names of each parameter by its ``id``, without PEFT's prefix; a tied parameter has several names."""
    found: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)] = (*found.get(id(parameter), ()), name.removeprefix(PREFIX))
    return found


def first_match(settings: Sequence[Collection[str]], names: Collection[str]) -> int | None:
    """Return the index of the first entry of ``settings`` with a pattern that matches one of a parameter's names."""
    for number, patterns in enumerate(settings):
        if any(fnmatchcase(name, pattern) for pattern in patterns for name in names):
            return number
    return None


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern (setting ``model.freeze``).

    The input of each layer with trained parameters requires a gradient, even if everything before the layer is frozen:
    ZeRO-3 considers the backward pass of a leaf module, such as a layer's experts, finished before it starts if the
    module's input requires no gradient. Lower layers are not part of the backward pass.

    Raises:
        UserError: A pattern matches no parameter, or all parameters would be frozen.
    """
    names = parameter_names(model)
    _check_patterns("model.freeze", patterns, names.values())
    for parameter in model.parameters():
        if first_match([patterns], names[id(parameter)]) is not None:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"model.freeze={list(patterns)}: matches all parameters, so nothing would be trained; remove a pattern"
        )
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and any(one.requires_grad for one in module.parameters()):
            module.register_forward_pre_hook(_require_gradient)


def _require_gradient(module: nn.Module, args: tuple[Any, ...]) -> None:
    hidden = args[0] if args else None
    if torch.is_grad_enabled() and isinstance(hidden, torch.Tensor) and not hidden.requires_grad:
        hidden.requires_grad_(True)


def matched_parameters(model: nn.Module, groups: Sequence[ParameterGroup]) -> tuple[MatchedParameters, ...]:
    """Count the trained parameters of each entry of ``optimizer.groups``.

    Raises:
        UserError: A pattern matches no trained parameter, or an entry only parameters of earlier entries.
    """
    names = parameter_names(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    for number, group in enumerate(groups):
        setting = f"optimizer.groups.{number}.match"
        _check_patterns(setting, group.match, [names[id(one)] for one in trained], "trained ")
    numbers = [first_match([group.match for group in groups], names[id(one)]) for one in trained]
    found = []
    for number, group in enumerate(groups):
        sizes = [math.prod(shape_of(one)) for one, own in zip(trained, numbers, strict=True) if own == number]
        if not sizes:
            raise UserError(
                f"optimizer.groups.{number}.match={list(group.match)}: all matching parameters belong to earlier "
                "entries, and the first match applies; move the entry up, or remove it"
            )
        found.append(MatchedParameters(match=group.match, tensors=len(sizes), parameters=sum(sizes)))
    return tuple(found)


def _check_patterns(setting: str, patterns: Sequence[str], names: Collection[Collection[str]], kind: str = "") -> None:
    known = [name for found in names for name in found]
    for pattern in patterns:
        if first_match([[pattern]], known) is None:
            near = difflib.get_close_matches(pattern, known, n=2, cutoff=0.0)
            raise UserError(
                f"{setting}={pattern!r}: matches no {kind}parameter; names are compared as a whole, such as "
                f"{', '.join(dict.fromkeys([*near, known[0], known[-1]]))}; correct the pattern, or add * at its ends"
            )
