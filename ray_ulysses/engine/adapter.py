"""Adds trainable low-rank adapters to a frozen decoder, with PEFT.

Modules that are trained in full are trained in place, whereas PEFT would train a copy of each module. A tied embedding
therefore stays tied, and no weight is stored twice. The exported adapter lists these modules as PEFT's
``modules_to_save``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ray_ulysses.attention.mixers import read_linears
from ray_ulysses.config.model import ALL_LINEAR, AdapterSection
from ray_ulysses.engine.optimizer import is_norm
from ray_ulysses.engine.partition_view import shape_of
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import TrainedPart

PREFIX = "base_model.model."
"""Prefix that PEFT adds to the base model's tensor names, in the model and in adapter files."""
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """Names of the modules that an adapter configuration changes."""

    targets: tuple[str, ...]
    """Linear layers to which an adapter is added."""
    names: tuple[str, ...]
    """Last components of the targets' names, or the full names if a last component would match other modules too."""
    whole: tuple[str, ...]
    """Modules whose own weights are trained in full."""


def add_adapter(model: Any, adapter: AdapterSection, seed: int) -> Any:
    """Freeze a model and add adapters to it. The adapters do not change the output until they are trained.

    Initial adapter weights are drawn from the seed on the host at full size, even for a sharded model. They are
    therefore identical on every rank and for every layout.

    Returns:
        The ``peft.PeftModel``.

    Raises:
        UserError: PEFT is not installed, or the settings do not fit the model.
    """
    adapted = find_adapted(model, adapter)
    peft = _peft()
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # PEFT 0.21 reads `is_gradient_checkpointing`, which is deprecated in Transformers 5.23, to decide whether the
        # embedding's output must require a gradient.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        # Adapters need not be fp32, because the optimizer has fp32 master weights.
        adapted_model = peft.get_peft_model(model, lora_config(adapter, adapted), autocast_adapter_dtype=False)
    if getattr(model, "_require_grads_hook", None) is None:
        # PEFT calls this only with gradient checkpointing. ZeRO-3 leaf modules need the call too: if a leaf module's
        # input requires no gradient, ZeRO-3 considers the module's backward pass finished before it starts.
        model.enable_input_require_grads()
    for name in adapted.whole:
        model.get_submodule(name).requires_grad_(True)
    return adapted_model


def lora_config(adapter: AdapterSection, adapted: Adapted, **options: Any) -> Any:
    """Return the ``peft.LoraConfig`` for an adapter."""
    return _peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=0.0,
        use_rslora=adapter.rslora,
        target_modules=list(adapted.names),
        **options,
    )


def find_adapted(model: Any, adapter: AdapterSection) -> Adapted:
    """Find the modules of a model that an adapter configuration changes.

    Raises:
        UserError: A name matches no module, or matches a module that can't be adapted.
    """
    from transformers.pytorch_utils import Conv1D

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if name}
    wanted = {module for name in adapter.modules_to_save for module in _matching(modules, "modules_to_save", name)}
    if adapter.train_embeddings:
        wanted.add(embedding)
    if adapter.train_norms:
        wanted |= {module for module in modules.values() if is_norm(module) and _has_weights(module)}
    whole = tuple(name for name, module in modules.items() if module in wanted)
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)}
    read = {name for name, _ in read_linears(model)}
    if adapter.targets == ALL_LINEAR:
        inside = {one for module in wanted for one in module.modules()}
        names = {name for name in linear - read if modules[name] is not head and modules[name] not in inside}
        return _adapted(names, whole, modules)
    targets = {module for name in adapter.targets for module in _matching(modules, "targets", name)}
    names = {name for name, module in modules.items() if module in targets}
    _refuse_targets(names - linear, "only linear layers can have an adapter", "list other modules in modules_to_save")
    _refuse_targets(
        names & read, "the parent layer reads the weight directly and ignores an adapter", "use modules_to_save instead"
    )
    within = {name for name in names for one in whole if f"{name}.".startswith(f"{one}.")}
    _refuse_targets(within, "already trained in full", "list each module in targets or in modules_to_save, not both")
    tied = {name for name in names if head is not None and modules[name] is head and head.weight is embedding.weight}
    _refuse_targets(
        tied,
        "the output head shares its weights with the token embedding, which an adapter on the head would not change",
        "set model.adapter.train_embeddings: true to train both in full",
    )
    return _adapted(names, whole, modules)


def _adapted(targets: set[str], whole: tuple[str, ...], modules: Collection[str]) -> Adapted:
    ends = {name.rpartition(".")[2] for name in targets}
    is_exact = {name for name in modules if name.rpartition(".")[2] in ends} == targets
    names = ends if is_exact else targets
    return Adapted(targets=tuple(sorted(targets)), names=tuple(sorted(names)), whole=whole)


def trained_part(model: Any, adapter: AdapterSection) -> TrainedPart:
    """Return the number and kinds of parameters that an adapter trains. The meta-device ``model`` is modified.

    Raises:
        UserError: The adapter settings do not fit the model; see `add_adapter`.
    """
    before = _count(model.parameters())
    with torch.device("meta"):
        adapted = add_adapter(model, adapter, seed=0)
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    return TrainedPart(
        added=_count(adapted.parameters()) - before,
        trained=_count(one for one in adapted.parameters() if one.requires_grad),
        has_embedding=model.get_input_embeddings().weight.requires_grad,
        has_head=head is not None and head.weight.requires_grad,
    )


def whole_names(model: Any, adapted: Adapted) -> list[str]:
    """Return PEFT's ``modules_to_save``: name suffixes that match exactly the modules trained in full.

    Modules that share weights with these modules are included, because PEFT trains and loads a copy of each module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    inside = {one for name in adapted.whole for one in modules[name].modules()}
    trained = {id(one) for module in inside for one in module.parameters()}
    tied = {
        name
        for name, module in modules.items()
        if module not in inside and any(id(one) in trained for one in module.parameters(recurse=False))
    }
    wanted = {*adapted.whole, *tied}
    short = {name.rpartition(".")[2] for name in wanted}
    found = {name for name in modules if any(name.endswith(end) for end in short)}
    return sorted(short if found == wanted else wanted)


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(math.prod(shape_of(one)) for one in parameters)


def _matching(modules: dict[str, nn.Module], setting: str, wanted: str) -> list[nn.Module]:
    """Return the modules whose dotted name is ``wanted`` or ends with the components of ``wanted``."""
    found = [module for name, module in modules.items() if f".{name}".endswith(f".{wanted}")]
    if not any(True for module in found for _ in module.parameters()):
        ends = list(dict.fromkeys(name.rpartition(".")[2] for name, module in modules.items() if _has_weights(module)))
        raise UserError(
            f"model.adapter.{setting}: the model has no module {wanted!r} with weights; choose from "
            f"{', '.join(ends)}" + (", or use all-linear" if setting == "targets" else "")
        )
    return found


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _refuse_targets(names: Collection[str], rule: str, hint: str) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
        raise UserError(f"model.adapter.targets={shown}: {rule}; {hint}")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"model.adapter requires PEFT, which can't be imported ({error}); install it on every node: "
            "pip install 'ray-ulysses[adapters]'"
        ) from error
    return peft
