"""Builds a model with random or pretrained weights, and partitions parameters as they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ray_ulysses.attention.mixers import find_mixers, shared_sizes
from ray_ulysses.attention.probe import ProbeResult
from ray_ulysses.attention.recompute import KeptOutput, checkpoint_contexts
from ray_ulysses.attention.refusals import refuse_config, refuse_direction, refuse_inexact
from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.config import Config
from ray_ulysses.config.model import AdapterSection
from ray_ulysses.config.objective import Task
from ray_ulysses.engine.adapter import add_adapter, count_trained, find_adapted
from ray_ulysses.engine.adapter_start import load_adapter, refuse_other_adapter, refuse_other_tensors, unapplied
from ray_ulysses.engine.heads import pooling_of
from ray_ulysses.engine.load_weights import PretrainedWeights, find_weights, together
from ray_ulysses.engine.loss import refuse_own_loss
from ray_ulysses.engine.model_config import (
    as_user_error,
    described_config,
    planned_config,
    refuse_no_class,
    stored_quantization,
)
from ray_ulysses.engine.muon import orthogonalization_flops, working_elements
from ray_ulysses.engine.optimizer import muon_matrices
from ray_ulysses.engine.parameter_names import freeze_parameters, matched_parameters
from ray_ulysses.engine.partition_view import shape_of
from ray_ulysses.engine.quantized_base import quantize_layers, quantized_sizes, torchao
from ray_ulysses.engine.quantized_source import quantizer_of
from ray_ulysses.engine.router_health import refuse_no_bias
from ray_ulysses.engine.router_loss import router_loss_of, set_router_loss
from ray_ulysses.engine.text_part import Part, keep_text_part, model_class
from ray_ulysses.engine.zero_state import FP32, FROZEN, differing
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import HYBRID_LAYER_TYPES, ModelShape
from ray_ulysses.planner.settings import kept_attention
from ray_ulysses.trained_part import MuonPart, TrainedPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def torch_dtype(name: str) -> torch.dtype:
    """Return the ``torch.dtype`` for a value of ``model.dtype``."""
    return _DTYPES[name]


def build_model(
    config: Config, partition: Mapping[str, Any] | None = None, state: StateDescription | None = None
) -> PreTrainedModel:
    """Build a run's model. If ``partition`` is set, all ranks of the world must call this function.

    With ``init: random``, every rank initializes the full model on its host in fp32, seeded with ``run.seed``, so that
    weights do not depend on the world size. With ``init: pretrained``, weights are loaded, and dequantized if they are
    stored in FP8 or MXFP4. If ``partition`` is set, one rank reads each pretrained parameter and sends the other ranks
    their shares, so no host or device ever holds the full model. If ``state`` is set, parameters are neither
    initialized nor loaded before the state is imported; if ``partition`` is set as well, no host or device ever holds
    the full model. If ``model.adapter`` is set, the result is a ``PeftModel``. With a quantized base, ``state`` lacks
    the frozen weights, which are therefore loaded and quantized in any case.

    Args:
        config: The run's configuration.
        partition: DeepSpeed's ZeRO-3 configuration, or None to keep parameters unpartitioned.
        state: The stored state that will replace all weights, or None to start from initial weights.

    Raises:
        UserError: The model can't be found, lacks weights, or differs from ``model.config``.
    """
    dtype, weights = torch_dtype(config.model.dtype), None
    is_quantized = config.model.base_dtype != "bf16"
    if state is not None and not is_quantized:
        model = _empty_model(config, dtype, is_tied=bool(state.tied))
    elif config.model.init == "random":
        model = _random_model(config, dtype)
    elif partition is None:
        model, weights = _pretrained_model(config, dtype)
    else:
        model, weights = together(lambda: _pretrained_model(config, dtype))
    if config.model.part == "text":
        keep_text_part(model)
    # The KV cache is useful only for generation, and causes a warning with gradient checkpointing.
    model.config.use_cache = model.config.get_text_config(decoder=True).use_cache = False
    if config.memory.gradient_checkpointing:
        _checkpoint_layers(model, kept_attention(config))
    if is_quantized:
        quantize_base(model, config)
    if weights is not None:
        allocate_weights(model, dtype, partition)
        weights.load(model, is_partitioned=partition is not None)
    is_empty = state is not None and not is_quantized
    if config.model.adapter is not None:
        with without_weights() if is_empty else nullcontext():
            model = add_adapter(model, config.model.adapter, config.run.seed)
        if state is None and config.model.adapter.from_ is not None:
            load_adapter(model, config.model.adapter)
    if config.model.freeze:
        freeze_parameters(model, config.model.freeze)
    if is_empty:
        allocate_weights(model, dtype, partition)
    return model


def quantize_base(model: Any, config: Config) -> None:
    """Quantize the frozen weights of a decoder's layers, in place, before an adapter is added.

    Raises:
        UserError: torchao can't be imported, or the adapter does not fit.
    """
    model_settings = config.model
    assert model_settings.adapter is not None and model_settings.base_dtype != "bf16"
    adapted = find_adapted(model, model_settings.adapter)
    experts = [name for name in adapted.parameters if len(shape_of(model.get_parameter(name))) > 2]
    if experts:
        raise UserError(
            f"model.adapter.targets={experts[0]}: experts with an adapter can't be quantized, but model.base_dtype is "
            f"{model_settings.base_dtype}; remove the experts from the targets, or remove model.base_dtype"
        )
    quantize_layers(
        model, model_settings.base_dtype, adapted.whole, recomputes=not config.memory.gradient_checkpointing
    )


def _checkpoint_layers(model: PreTrainedModel, kept: KeptOutput) -> None:
    options: dict[str, Any] = {"use_reentrant": False}
    contexts = checkpoint_contexts(kept)
    if contexts is not None:
        options["context_fn"] = contexts
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        # Transformers before 5.23 does not have activation_checkpointing_enable.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def compile_layers(model: torch.nn.Module) -> None:
    """Compile each decoder layer in place with ``torch.compile`` on its first call. Module names do not change.

    Raises:
        UserError: No layer is an instance of Transformers' ``GradientCheckpointingLayer``.
    """
    for layer in _compilable_layers(model):
        layer.compile()


def _compilable_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    layers: list[torch.nn.Module] = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"model.compile=true: {type(model).__name__} has no layer of class GradientCheckpointingLayer, so nothing "
            "can be compiled; set model.compile: false"
        )
    return layers


def find_trained_part(config: Config) -> TrainedPart | None:
    """Return the number and kinds of parameters that a run's adapter trains, or None if the run has no adapter.

    Weights are not read.

    Raises:
        UserError: The model configuration can't be read, or the adapter does not fit the model.
    """
    return None if config.model.adapter is None else _adapted(config, config.model.adapter)[0]


def _adapted(config: Config, adapter: AdapterSection) -> tuple[TrainedPart, Any]:
    """Return the trained part of a run with an adapter, and the model on the meta device with the adapter."""
    model = planned_model(config)
    before = sum(one.numel() for one in model.parameters())
    with torch.device("meta"):
        adapted = add_adapter(model, adapter, seed=0)
    part = count_trained(model, added=sum(one.numel() for one in adapted.parameters()) - before)
    if config.model.base_dtype != "bf16":
        torchao()
        base = planned_model(config).to(torch_dtype(config.model.dtype))
        quantize_base(base, config)
        part = replace(part, **quantized_sizes(base))
    return part, model


def check_adapter_start(config: Config, adapter: AdapterSection) -> tuple[str, ...]:
    """Compare the existing adapter in ``model.adapter.from`` with the settings and the base model.

    A run needs this adapter only until it has committed a checkpoint. Weights are not read.

    Returns:
        Notes about settings of the adapter that training ignores.

    Raises:
        UserError: The adapter can't be read, has an unsupported kind, or differs from the settings or the base model.
    """
    model = planned_model(config)
    refuse_other_adapter(model, adapter, config.model.path)
    with torch.device("meta"):
        refuse_other_tensors(add_adapter(model, adapter, config.run.seed), adapter)
    return unapplied(adapter)


def with_training(config: Config, shape: ModelShape) -> ModelShape:
    """Return a model's shape with the numbers of parameters that are trained, by the settings that select them.

    Weights are not read.

    Raises:
        UserError: The model configuration can't be read, the adapter does not fit the model, or a pattern matches no
            parameter.
    """
    adapter, freeze, optimizer = config.model.adapter, config.model.freeze, config.optimizer
    if adapter is not None:
        part, model = _adapted(config, adapter)
        shape = replace(shape, part=part)
    else:
        model = planned_model(config)
    if freeze:
        freeze_parameters(model, freeze)
        shape = replace(shape, part=count_trained(model))
    if optimizer.kind == "muon":
        shape = replace(shape, muon=_muon_part(model))
    return replace(shape, matched=matched_parameters(model, optimizer.groups))


def _muon_part(model: Any) -> MuonPart:
    found = muon_matrices(model).values()
    if not found:
        raise UserError(
            "optimizer.kind=muon: no weight matrix of a linear layer is trained, so AdamW would train all parameters; "
            "use adamw, or remove the patterns of model.freeze that match linear layers"
        )
    return MuonPart(
        parameters=sum(one.count * one.rows * one.columns for one in found),
        matrices=sum(one.count for one in found),
        flops=sum(one.count * orthogonalization_flops(one.rows, one.columns) for one in found),
        working_elements=max(working_elements(one.rows, one.columns) for one in found),
    )


def with_mixers(config: Config, shape: ModelShape) -> ModelShape:
    """Return the shape of a hybrid model, measured on its modules; return any other model's ``shape`` unchanged.

    Weights are not read. Parameters are counted in all layers, attention heads only in attention layers.

    Raises:
        UserError: The model configuration can't be read, or the model can't be trained exactly.
    """
    hf_config = planned_config(config)
    if hf_config.get_text_config(decoder=True).model_type not in HYBRID_LAYER_TYPES:
        return shape
    model = meta_model(hf_config, config.model.part, config.objective.task)
    mixers = [(module, layout) for _, module, layout in find_mixers(model)]
    known = {id(module) for module, _ in mixers}
    # Count a module once per layer that uses it.
    used = [module for _, module in model.named_modules(remove_duplicate=False) if id(module) not in known]
    usual = shape.output_width // shape.num_layers
    widths = [_attention_widths(one, usual) for one in used if type(one).__name__.endswith("Attention")]
    experts, idle = shape.experts, 0
    if experts is not None:
        stacked = (one for name, one in model.named_parameters() if "experts." in name and one.dim() == 3)
        held = [one.numel() for one in stacked if one.shape[0] == experts.count]
        idle = sum(size - size * experts.active // experts.count for size in held)
        experts = experts if held else None
    beside = shape.hidden_size + (1 if shape.tied_embeddings else 2) * shape.embedding_parameters
    in_layers = sum(parameter.numel() for parameter in model.parameters()) - beside
    return replace(
        shape,
        attention_width=max(1, sum((queries + values) // 2 for queries, values in widths)),
        output_width=max(1, sum(values for _, values in widths)),
        layer_parameters=in_layers // shape.num_layers,
        other_parameters=in_layers % shape.num_layers,
        is_exact=True,
        experts=experts,
        counted_idle=idle,
        mixer_layers=len(mixers),
        mixer_width=sum(getattr(module, layout.output).in_features for module, layout in mixers),
        mixer_multiply_adds=sum(layout.multiply_adds for _, layout in mixers),
        repeated_parameters=_repeated_parameters(model),
        mixer_sp_sizes=shared_sizes(model),
    )


def _attention_widths(attention: Any, usual: int) -> tuple[int, int]:
    outputs = (getattr(attention, name, None) for name in ("o_proj", "out_proj", "dense"))
    values: int = next((output.in_features for output in outputs if output is not None), usual)
    of_latent: int | None = getattr(attention, "qk_head_dim", None)
    return (values if of_latent is None else attention.num_heads * of_latent), values


def _repeated_parameters(model: Any) -> int:
    """Count the elements of shared parameters once per use after the first. Tied output heads are excluded."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = {id(parameter) for end in ends for parameter in end.parameters()}
    # Each use of Zamba 2's shared blocks has its own adapters.
    uses: list[tuple[int, int]] = [
        (id(parameter), parameter.numel())
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) not in tied and "_adapter_list." not in name
    ]
    return sum(size for _, size in uses) - sum(dict(uses).values())


def check_architecture(config: Config) -> ProbeResult:
    """Raise an error if a run's model can't be trained exactly. This check needs neither weights nor a GPU.

    Returns:
        The result of probing the model's forward.

    Raises:
        UserError: The model configuration can't be read, or a layer or setting does not support exact training.
    """
    hf_config = set_router_loss(planned_config(config), config.optimizer.router_loss)
    return refuse_architecture(
        hf_config,
        config.model.part,
        config.objective.task,
        checkpointed=config.memory.gradient_checkpointing,
        compiled=config.model.compile is True,
        router_bias_rate=config.optimizer.router_bias_rate,
        dtype=config.model.dtype,
        counts=config.objective.counts,
    )


def refuse_architecture(
    hf_config: Any,
    part: Part = "whole",
    task: Task = "causal_lm",
    *,
    checkpointed: bool = False,
    compiled: bool = False,
    router_bias_rate: float | None = None,
    dtype: str | None = None,
    counts: str = "tokens",
) -> ProbeResult:
    """Build a model on the meta device, and raise an error if the decoder can't be trained exactly.

    If ``dtype`` is set, experts that can't be multiplied in this precision are refused too. A router
    loss is refused unless ``counts``, what the loss is a mean over, is tokens.

    Returns:
        The result of probing the model's forward.

    Raises:
        UserError: Training would be inexact. The error contains the architecture or setting, the reason and a solution.
    """
    model = meta_model(hf_config, part, task)
    if checkpointed and not model.supports_gradient_checkpointing:
        raise UserError(
            f"memory.gradient_checkpointing=true: {type(model).__name__} does not support gradient checkpointing in "
            "Transformers; set memory.gradient_checkpointing: false"
        )
    if compiled:
        _compilable_layers(model)
    if dtype is not None:
        _refuse_unaligned_experts(model, dtype)
    result = refuse_inexact(model, model.config.get_text_config(decoder=True), None)
    if task in ("causal_lm", "masked_lm"):
        refuse_direction(result, model.config.model_type, is_causal=task == "causal_lm")
    if router_loss_of(model) is not None and counts != "tokens":
        raise UserError(
            "optimizer.router_loss: the model has a router loss, a mean over tokens, which does not fit a mean over "
            f"{counts} (objective.kind); set it to 0"
        )
    if task == "sequence_classification":
        pooling_of(model)
    if task == "embedding" and getattr(model, "pooler", None) is not None:
        raise UserError(
            f"model_type={model.config.model_type!r}: the model has a pooler, which objective.kind=embedding would not "
            "train; use a model without one, such as llama, qwen3 or modernbert"
        )
    refuse_no_bias(model, router_bias_rate)
    refuse_own_loss(model)
    return result


def _refuse_unaligned_experts(model: Any, dtype: str) -> None:
    """Raise an error if rows of fused experts have a size for which torch has no grouped product.

    ``torch.nn.functional.grouped_mm`` of torch 2.13 requires 16-byte rows on CPUs and GPUs alike.
    """
    values = 16 // torch_dtype(dtype).itemsize
    is_grouped = model.config.get_text_config(decoder=True)._experts_implementation == "grouped_mm"
    for name, parameter in model.named_parameters():
        is_expert = is_grouped and "experts." in name and parameter.dim() == 3
        if is_expert and any(size % values for size in parameter.shape[1:]):
            fits_fp32 = dtype != "fp32" and not any(size % 4 for size in parameter.shape[1:])
            raise UserError(
                f"model.dtype={dtype}: {name} is {list(parameter.shape)}, but grouped products of experts require "
                f"widths that are multiples of 16 bytes, which are {values} values in {dtype}, on CPUs and GPUs; "
                + ("set model.dtype: fp32, or " if fits_fp32 else "")
                + "use a model with other widths"
            )


def differs_from_stored(config: Config, state: StateDescription) -> str | None:
    """Describe differences in parameter names or shapes between a run's model and a stored state; None if equal.

    Weights are not read.

    Raises:
        UserError: The model configuration can't be read.
    """
    model = adapted_meta_model(config, is_tied=bool(state.tied))
    is_stored = config.model.base_dtype == "bf16"
    named = model.named_parameters()
    here = {name: tuple(parameter.shape) for name, parameter in named if is_stored or parameter.requires_grad}
    keys = ((key.partition("/"), spec) for key, spec in state.tensors.items())
    stored = {name: tuple(spec.shape) for (kind, _, name), spec in keys if kind in (FP32, FROZEN)}
    found = differing(here, stored, lambda shape: str(list(shape)))
    more = f", and {len(found) - 2} more" if len(found) > 2 else ""
    return "; ".join(found[:2]) + more if found else None


def adapted_meta_model(config: Config, *, is_tied: bool) -> Any:
    """Build a run's model on the meta device, with its adapter if it has one, and without quantized weights.

    Raises:
        UserError: The model configuration can't be read.
    """
    model = meta_model(described_config(config, is_tied=is_tied), config.model.part, config.objective.task)
    if config.model.adapter is not None:
        with torch.device("meta"):
            model = add_adapter(model, config.model.adapter, config.run.seed)
    return model


def planned_model(config: Config) -> Any:
    """Build a run's model on the meta device, from the configuration for planning; see `meta_model`."""
    return meta_model(planned_config(config), config.model.part, config.objective.task)


def meta_model(hf_config: Any, part: Part, task: Task = "causal_lm") -> Any:
    """Build a model on the meta device, without weights.

    Raises:
        UserError: The architecture has no model for the task that ray-ulysses can build.
    """
    # Check first, so that architectures that can't be built for the task get a specific error.
    refuse_config(hf_config)
    builder = model_class(hf_config, part, task)
    if part == "whole":
        refuse_no_class(hf_config, task)
    with torch.device("meta"):
        model: Any = as_user_error(
            lambda: builder.from_config(deepcopy(hf_config), trust_remote_code=False), "model.config"
        )
    if part == "text":
        keep_text_part(model)
    return model


def _empty_model(config: Config, dtype: torch.dtype, *, is_tied: bool | None = None) -> PreTrainedModel:
    """Return the model as it would be after initializing or loading weights, but with meta-device parameters."""
    hf_config = _trained_config(config, is_tied=is_tied)
    if config.model.init == "random":
        dtype = torch.float32
    refuse_config(hf_config)
    with without_weights():
        model: PreTrainedModel = model_class(hf_config, config.model.part, config.objective.task).from_config(
            hf_config, dtype=dtype, trust_remote_code=False
        )
    _keep_in_fp32(model, dtype)
    return model


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Convert tensors to fp32 that the architecture computes in fp32 in every precision, as ``from_pretrained`` does.

    ZeRO trains parameters in the run's precision, so only buffers stay in fp32 during training.
    """
    from transformers.core_model_loading import build_glob_alternation

    names = list(model._get_dtype_plan(dtype))
    if names:
        pattern, *_ = build_glob_alternation(names)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if pattern.search(name):
                tensor.data = tensor.data.to(torch.float32)


def _trained_config(config: Config, is_tied: bool | None = None) -> Any:
    """Return the configuration for training. Exports keep the original configuration's router-loss settings."""
    return set_router_loss(described_config(config, is_tied=is_tied), config.optimizer.router_loss)


def _random_model(config: Config, dtype: torch.dtype) -> PreTrainedModel:
    hf_config = _trained_config(config)
    refuse_architecture(hf_config, config.model.part, config.objective.task)
    torch.manual_seed(config.run.seed)
    model: PreTrainedModel = model_class(hf_config, config.model.part, config.objective.task).from_config(
        hf_config, dtype=torch.float32
    )
    for parameter in model.parameters():
        # Buffers stay in fp32, because rounded rotary frequencies would be wrong at large positions.
        parameter.data = parameter.data.to(dtype)
    return model


def _pretrained_model(config: Config, dtype: torch.dtype) -> tuple[PreTrainedModel, PretrainedWeights]:
    """Return the model without weights, and its stored weights."""
    path = str(config.model.path)
    refuse_architecture(_trained_config(config), config.model.part, config.objective.task)
    quantization = stored_quantization(path)
    model = _empty_model(config, dtype)
    quantizer = None if quantization is None else quantizer_of(quantization)
    head_seed = config.run.seed if config.objective.task == "sequence_classification" else None
    return model, find_weights(model, path, quantizer, head_seed)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build models within this context with uninitialized parameters on the meta device.

    Unlike accelerate's ``init_empty_weights``, this context keeps tied parameters tied.
    """
    register = nn.Module.register_parameter

    def register_without_data(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_without_data  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def allocate_weights(model: nn.Module, dtype: torch.dtype, partition: Mapping[str, Any] | None) -> None:
    """Replace every parameter on the meta device with an uninitialized parameter in memory.

    The model must have been built within `without_weights`. If ``partition`` is set, each parameter is partitioned
    before the next one is allocated, so that no rank ever holds more than one unpartitioned parameter. Buffers are
    moved to the parameters' device.
    """
    partitioner = None if partition is None else _partitioner(partition)
    device = torch.device("cpu") if partitioner is None else partitioner.local_device
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in allocated:
                own = dtype if parameter.is_floating_point() else parameter.dtype
                memory = torch.empty(parameter.shape, dtype=own, device=device)
                fresh = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                fresh.__dict__.update(vars(parameter))
                if partitioner is not None:
                    partitioner._convert_to_zero_parameters([fresh])
                allocated[parameter] = fresh
            setattr(module, name, allocated[parameter])
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _partitioner(partition: Mapping[str, Any]) -> Any:
    """Return a ZeRO-3 partitioner that does not broadcast rank 0's values."""
    import deepspeed
    from deepspeed.utils.groups import _get_zero_param_intra_parallel_group

    class WithoutBroadcast(deepspeed.zero.Init):  # type: ignore[misc]
        def _zero_init_param(self, parameter: Any) -> None:
            # DeepSpeed 0.19.8 broadcasts the parameter between these two calls.
            self._convert_to_deepspeed_param(parameter)
            parameter.partition()
            # `partition` also makes a secondary shard (hpZ), here of uninitialized memory, which gathers would prefer.
            parameter.ds_secondary_tensor = None

    # DeepSpeed 0.19.8 would create the group of secondary shards again, and fails if the self-test has created it.
    group = _get_zero_param_intra_parallel_group()
    return WithoutBroadcast(module=nn.Module(), config_dict_or_path=dict(partition), zero_param_parallel_group=group)
