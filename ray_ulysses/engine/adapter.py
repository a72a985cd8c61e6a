"""Adds trainable low-rank adapters to a frozen decoder, with PEFT.

Modules that are trained in full are trained in place, whereas PEFT would train a copy of each module. A tied embedding
therefore stays tied, and no weight is stored twice. The exported adapter lists these modules as PEFT's
``modules_to_save``.

The experts of most models share one parameter ``[experts, in, out]`` and are not linear layers. PEFT wraps the module
that holds the parameter in a ``ParamWrapper``. Several wrappers are nested if the module has several adapted
parameters.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from ray_ulysses.attention.mixers import find_mixers, read_linears
from ray_ulysses.config.model import ALL_LINEAR, AdapterSection
from ray_ulysses.engine.optimizer import is_norm
from ray_ulysses.engine.partition_view import shape_of
from ray_ulysses.errors import UserError
from ray_ulysses.trained_part import TrainedPart

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_SETTINGS_FILE = "adapter_config.json"
MAGNITUDE = "lora_magnitude_vector"
"""Name of DoRA's magnitudes in the model."""
ADAPTER_NAME = "default"
"""Name of the adapter in the model. Adapter files do not contain it."""
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """The weights and modules that an adapter configuration changes."""

    targets: tuple[str, ...]
    """Full names of the linear layers to which an adapter is added."""
    parameters: tuple[str, ...]
    """Full names of the other adapted parameters, such as experts that share a tensor, in model order."""
    target_modules: tuple[str, ...]
    """Last components of the targets' names, or the full names if a last component would match other modules too."""
    target_parameters: tuple[str, ...]
    """Last two components of the parameters' names, or the full names if these would match other parameters too."""
    whole: tuple[str, ...]
    """Modules whose own weights are trained in full."""
    ranks: Mapping[str, int]
    """Rank of each target and parameter, by full name."""
    alphas: Mapping[str, int]
    """Alpha of each target and parameter, by full name."""

    def matrices(self, name: str) -> str:
        """Return the name of the module that holds the two matrices of a target or parameter."""
        if name in self.targets:
            return name
        module = _holder(name)
        beside = [one for one in self.parameters if _holder(one) == module]
        # The first parameter's wrapper is the innermost.
        return module + ".base_layer" * (len(beside) - 1 - beside.index(name))


def add_adapter(model: Any, adapter: AdapterSection, seed: int) -> Any:
    """Freeze a model and add adapters to it. The adapters do not change the output until they are trained.

    Initial adapter weights are drawn from the seed on the host at full size, even for a sharded model. They are
    therefore identical on every rank and for every layout. With ``dora`` and a sharded model, all ranks must call this
    function, because the initial magnitudes are computed from the gathered weights.

    Returns:
        The ``peft.PeftModel``.

    Raises:
        UserError: PEFT is not installed, or the settings do not fit the model.
    """
    adapted = find_adapted(model, adapter)
    peft = _peft()
    torch.manual_seed(seed)
    with warnings.catch_warnings(), _without_conversion(model), _gathering(model):
        # PEFT 0.21 reads `is_gradient_checkpointing`, which is deprecated in Transformers 5.23, to decide whether the
        # embedding's output must require a gradient.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        # PEFT applies the patterns to experts, but searches for them only in the names of linear layers.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning)
        # Adapters need not be fp32, because the optimizer has fp32 master weights.
        adapted_model = peft.get_peft_model(model, lora_config(adapter, adapted), autocast_adapter_dtype=False)
    adapted_model.config = model.config
    if getattr(model, "_require_grads_hook", None) is None:
        # PEFT calls this only with gradient checkpointing. ZeRO-3 leaf modules need the call too: if a leaf module's
        # input requires no gradient, ZeRO-3 considers the module's backward pass finished before it starts.
        model.enable_input_require_grads()
    for name in adapted.whole:
        model.get_submodule(name).requires_grad_(True)
    for module in model.modules():
        if type(module).__name__ == _PARAMETER_WRAPPER:
            module.forward = MethodType(_forward_with_sum, module)
    return adapted_model


_PARAMETER_WRAPPER = "ParamWrapper"
"""Class name of PEFT's wrapper of a module with an adapted parameter."""


def reads_others(module: nn.Module) -> bool:
    """Return whether a module is an adapter that reads weights of its submodules without calling the submodules."""
    is_dora = bool(getattr(module, "lora_magnitude_vector", None))
    return is_dora or type(module).__name__ == _PARAMETER_WRAPPER


def _forward_with_sum(wrapper: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the wrapped module with the sum of its parameter and the adapter's product.

    PEFT 0.21 registers a torch parametrization in each call instead. This computes the sum twice, and changes the
    module's class and the order of its parameters.
    """
    module, name = wrapper.get_base_layer(), wrapper.parameter_name
    weight = getattr(module, name)
    if wrapper.num_experts == 1:
        total = weight + wrapper.get_delta_weight(ADAPTER_NAME)
    else:
        left, right, scale = wrapper.get_delta_factors(ADAPTER_NAME)
        total = torch.baddbmm(weight, left, right, alpha=scale)
    # An attribute of the instance takes precedence over a parameter.
    vars(module)[name] = total
    try:
        return wrapper.base_layer(hidden, *args, **kwargs)
    finally:
        del vars(module)[name]


@contextmanager
def _without_conversion(model: Any) -> Iterator[None]:
    """Hide a model's configuration from PEFT.

    In models with experts, PEFT 0.21 mistakes dense layers called `gate_proj`, `up_proj` or `down_proj` for the experts
    of an older Transformers, and would adapt the experts instead.
    """
    config, model.config = model.config, {"model_type": "custom"}
    try:
        yield
    finally:
        model.config = config


@contextmanager
def _gathering(model: nn.Module) -> Iterator[None]:
    """Make PEFT gather weights that are partitioned by ZeRO-3 before it computes their norms."""
    enabled = None
    if any(hasattr(one, "ds_id") for one in model.parameters()):
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        # PEFT gathers weights while such an object exists.
        enabled = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    yield
    del enabled


def file_name(name: str) -> str:
    """Return the name of one of the model's tensors in PEFT's files."""
    published = name.replace(f".{ADAPTER_NAME}.", ".")
    return published.removesuffix(".weight") if published.endswith(f".{MAGNITUDE}.weight") else published


def lora_config(adapter: AdapterSection, adapted: Adapted, **options: Any) -> Any:
    """Return the ``peft.LoraConfig`` for an adapter."""
    targets = {"target_modules": list(adapted.target_modules), "target_parameters": list(adapted.target_parameters)}
    return _peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=0.0,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        rank_pattern=_pattern(adapted.ranks, adapter.rank),
        alpha_pattern=_pattern(adapted.alphas, adapter.alpha),
        **{**targets, **options},
    )


def _pattern(values: Mapping[str, int], usual: int) -> dict[str, int]:
    """Return PEFT's ``rank_pattern`` or ``alpha_pattern``, whose keys are regular expressions for ends of names."""
    of_end: dict[str, set[int]] = {}
    for name, value in values.items():
        of_end.setdefault(_last(name), set()).add(value)
    short = {_last(name) if len(of_end[_last(name)]) == 1 else name: value for name, value in values.items()}
    return {re.escape(name): value for name, value in short.items() if value != usual}


def find_adapted(model: Any, adapter: AdapterSection) -> Adapted:
    """Find the weights and modules of a model that an adapter configuration changes.

    Raises:
        UserError: A name matches nothing, or matches a module that can't be adapted.
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
        return _adapted(model, adapter, names, set(), whole)
    stacked = _stacked_parameters(model, linear)
    parameters = {one for name in adapter.targets for one in stacked if _is_named(one, name)}
    holders = {_holder(one) for one in parameters}
    targets = {module for name in adapter.targets for module in _matching(modules, "targets", name, stacked)}
    names = {name for name, module in modules.items() if module in targets} - holders
    _refuse_targets(
        names - linear, "only linear layers and experts can have an adapter", "list other modules in modules_to_save"
    )
    _refuse_targets(
        names & read, "the parent layer reads the weight directly and ignores an adapter", "use modules_to_save instead"
    )
    within = {name for name in names | parameters for one in whole if f"{name}.".startswith(f"{one}.")}
    _refuse_targets(within, "already trained in full", "list each module in targets or in modules_to_save, not both")
    tied = {name for name in names if head is not None and modules[name] is head and head.weight is embedding.weight}
    _refuse_targets(
        tied,
        "the output head shares its weights with the token embedding, which an adapter on the head would not change",
        "set model.adapter.train_embeddings: true to train both in full",
    )
    return _adapted(model, adapter, names, parameters, whole)


def _stacked_parameters(model: Any, linear: Collection[str]) -> list[str]:
    """Return the full names of matrices outside linear layers that PEFT can adapt: experts and routers."""
    mixers = {one for _, mixer, _ in find_mixers(model) for one in mixer.modules()}
    found = []
    for name, module in model.named_modules():
        is_other = isinstance(module, nn.Embedding | nn.Conv1d) or is_norm(module) or module in mixers
        if name not in linear and not is_other:
            for own, parameter in module.named_parameters(recurse=False):
                if len(shape := shape_of(parameter)) == 3 or (len(shape) == 2 and own == "weight"):
                    found.append(f"{name}.{own}")
    return found


def _adapted(
    model: Any, adapter: AdapterSection, targets: set[str], parameters: set[str], whole: tuple[str, ...]
) -> Adapted:
    modules = [name for name, _ in model.named_modules() if name]
    weights = [name for name, _ in model.named_parameters()]
    ordered = [*sorted(targets), *(name for name in weights if name in parameters)]
    if adapter.dora and (refused := [*parameters, *_converted(model, targets)]):
        raise UserError(
            f"model.adapter.dora=true: PEFT has no DoRA for experts, routers and, in this model, dense layers with the "
            f"names of experts ({', '.join(sorted(set(map(_last, refused))))}); remove these from "
            "model.adapter.targets, or set model.adapter.dora: false"
        )
    return Adapted(
        targets=tuple(sorted(targets)),
        parameters=tuple(ordered[len(targets) :]),
        target_modules=_short(targets, modules, 1),
        target_parameters=_short(parameters, weights, 2),
        whole=whole,
        ranks=_values("ranks", adapter.rank, adapter.ranks, ordered, parameters),
        alphas=_values("alphas", adapter.alpha, adapter.alphas, ordered, parameters),
    )


def in_adapter_file(model: Any, adapted: Adapted, *, is_part: bool) -> Adapted:
    """Return the targets as they must be written for PEFT to load the adapter on the complete base model.

    PEFT 0.21 mistakes some linear layers for experts; see `_without_conversion`. These are written as parameters, for
    which PEFT creates the same tensors. If the trained model is only a part of the base model (``is_part``), a short
    name could match other modules, so full names are written.
    """
    moved = _converted(model, adapted.targets)
    weights = {name: f"{name}.weight" for name in moved}
    modules = [name for name, _ in model.named_modules()]
    parameters = [*adapted.parameters, *weights.values()]
    targets = [name for name in adapted.targets if name not in weights]
    known = [name for name, _ in model.named_parameters()]
    return replace(
        adapted,
        targets=tuple(targets),
        parameters=tuple(parameters),
        target_modules=tuple(targets) if is_part else _short(targets, modules, 1),
        target_parameters=tuple(parameters) if is_part else _short(parameters, known, 2),
        ranks={weights.get(name, name): rank for name, rank in adapted.ranks.items()},
        alphas={weights.get(name, name): alpha for name, alpha in adapted.alphas.items()},
    )


def _converted(model: Any, targets: Collection[str]) -> list[str]:
    """Return the linear layers that PEFT mistakes for experts when it loads an adapter on a model."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_converted(end: str) -> bool:
        config = _peft().LoraConfig(target_modules=[end])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # some layers with such a name are adapted, and others are not
            return True
        return not config.target_modules

    ends = {end for end in map(_last, targets) if is_converted(end)}
    return [name for name in targets if _last(name) in ends]


def _short(names: Collection[str], known: Iterable[str], components: int) -> tuple[str, ...]:
    """Return the last components of names, or the full names if the last components would match other names too."""
    ends = {".".join(name.split(".")[-components:]) for name in names}
    is_exact = {name for name in known if ".".join(name.split(".")[-components:]) in ends} == set(names)
    return tuple(sorted(ends if is_exact else names))


def _values(
    setting: str, usual: int, given: Mapping[str, int], targets: Collection[str], parameters: Collection[str]
) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, value in given.items():
        matching = [name for name in targets if _ends(name, key) or (name in parameters and _is_named(name, key))]
        if not matching:
            ends = ", ".join(dict.fromkeys(map(_last, targets)))
            raise UserError(f"model.adapter.{setting}: {key!r} matches none of the targets; choose from {ends}")
        for name in matching:
            if found.setdefault(name, value) != value:
                raise UserError(
                    f"model.adapter.{setting}: two names with different values match {name}; write longer names, so "
                    "that each target is matched once"
                )
    return {name: found.get(name, usual) for name in targets}


def _ends(name: str, wanted: str) -> bool:
    return f".{name}".endswith(f".{wanted}")


def _is_named(parameter: str, wanted: str) -> bool:
    """Return whether a name stands for a parameter: the end of its name, or of the name of the parameter's module."""
    return _ends(parameter, wanted) or _ends(_holder(parameter), wanted)


def _holder(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def count_trained(model: Any, added: int = 0) -> TrainedPart:
    """Return the number and kinds of a model's trained parameters, of which ``added`` are adapters'."""
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    summed, largest, added_to_sums = Counter[int](), 0, 0
    for module in model.modules():
        if type(module).__name__ == _PARAMETER_WRAPPER:
            size = module.get_param().numel()
            summed[id(module.get_base_layer())] += size
            largest = max(largest, size)
            added_to_sums += _count([*module.lora_A.parameters(), *module.lora_B.parameters()])
    return TrainedPart(
        added=added,
        trained=_count(one for one in model.parameters() if one.requires_grad),
        has_embedding=model.get_input_embeddings().weight.requires_grad,
        has_head=head is not None and head.weight.requires_grad,
        summed=summed.total(),
        largest_sum=max(summed.values(), default=0),
        largest_in_sum=largest,
        added_to_sums=added_to_sums,
    )


def whole_names(model: Any, adapted: Adapted, *, is_part: bool) -> list[str]:
    """Return PEFT's ``modules_to_save``: name suffixes that match exactly the modules trained in full.

    If the trained model is only a part of the base model (``is_part``), full names are returned.
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
    short = set(map(_last, wanted))
    found = {name for name in modules if any(name.endswith(end) for end in short)}
    return sorted(short if found == wanted and not is_part else wanted)


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(math.prod(shape_of(one)) for one in parameters)


def _matching(
    modules: dict[str, nn.Module], setting: str, wanted: str, parameters: Collection[str] = ()
) -> list[nn.Module]:
    """Return the modules whose dotted name is ``wanted`` or ends with the components of ``wanted``.

    The list may be empty if one of the ``parameters`` has such a name.
    """
    found = [module for name, module in modules.items() if _ends(name, wanted)]
    is_known = any(True for module in found for _ in module.parameters())
    if not is_known and not any(_is_named(one, wanted) for one in parameters):
        ends = [_last(name) for name, module in modules.items() if _has_weights(module)]
        ends += [_last(name) for name in parameters if not name.endswith(".weight")]
        raise UserError(
            f"model.adapter.{setting}: the model has no module {wanted!r} with weights; choose from "
            f"{', '.join(dict.fromkeys(ends))}" + (", or use all-linear" if setting == "targets" else "")
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
