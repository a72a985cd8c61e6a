"""Quantizes the frozen weights of a decoder's layers, which adapters leave unchanged.

A quantized weight is stored as two frozen parameters: ``<name>_packed`` contains the values' bytes, and
``<name>_scales`` one scale per block. Both are 1-D and have the model's dtype, as which the bytes are only
reinterpreted. DeepSpeed therefore partitions, gathers and offloads them like any other frozen parameter, and casts
nothing. NF4 (https://arxiv.org/abs/2305.14314) has blocks of 64 consecutive elements, without the paper's second
quantization of the scales; int8 and fp8 (e4m3) have one block per row. torchao encodes the values.

A quantized module dequantizes its weights in each forward and backward pass, and frees them afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ray_ulysses.attention.mixers import read_linears
from ray_ulysses.engine.partition_view import shape_of
from ray_ulysses.errors import UserError

QuantizedDtype = Literal["fp8", "nf4", "int8"]
PACKED, SCALES = "_packed", "_scales"
_NF4_BLOCK = 64
"""Number of elements per block in NF4. A weight is quantized only if its number of elements is a multiple."""
# The values of torchao's NF4Tensor.
_NF4_VALUES = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
_ENCODED_ELEMENTS = 2**20
"""Maximum number of elements to encode at once, which bounds the temporaries in fp32."""
_LEAST_VALUE = 1e-12
"""Least maximum of a row from which an fp8 scale is computed, so that rows of zeros do not become NaN."""


@torch.no_grad()
def quantize(weight: torch.Tensor, dtype: QuantizedDtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight of any shape, on its device, which may be the meta device.

    Returns:
        The packed values and the scales, both 1-D with the weight's dtype; see the module's docstring.

    Raises:
        UserError: torchao can't be imported.
    """
    block = _NF4_BLOCK if dtype == "nf4" else weight.shape[-1]
    if weight.is_meta:
        num_bytes = weight.numel() // 2 if dtype == "nf4" else weight.numel()
        return weight.new_empty(num_bytes // weight.element_size()), weight.new_empty(weight.numel() // block)
    packed, scales = [], []
    for part_NB in weight.reshape(-1, block).split(max(1, _ENCODED_ELEMENTS // block)):
        values, scale_N = _encoded(part_NB.float(), dtype, weight.dtype)
        packed.append(values.flatten().view(torch.uint8))
        scales.append(scale_N.flatten().to(weight.dtype))
    return torch.cat(packed).view(weight.dtype), torch.cat(scales)


def _encoded(blocks_NB: torch.Tensor, dtype: QuantizedDtype, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and the scales of fp32 blocks ``[N, B]``; the scales will be rounded to ``stored``."""
    ao = torchao()
    if dtype == "nf4":
        table = torch.tensor(_NF4_VALUES, device=blocks_NB.device)
        values = ao.NF4Tensor.convert_to_norm_float_weight(blocks_NB, len(blocks_NB), _NF4_BLOCK, table)
        return values, blocks_NB.abs().amax(dim=1)
    if dtype == "int8":
        scale_N1 = ao.Int8Tensor.from_hp(blocks_NB, ao.PerRow()).scale.to(stored)
        # Encode with the rounded scale: otherwise the rounding would add half a step to the largest values.
        zero_N1 = torch.zeros_like(scale_N1, dtype=torch.int8)
        encoded = ao.Int8Tensor.from_hp(blocks_NB, ao.PerRow(), scale=scale_N1.float(), zero_point=zero_N1)
        return encoded.qdata, scale_N1
    from torchao.quantization.quantize_.common import KernelPreference

    # Not the kernels of mslk, so that the values do not depend on what is installed.
    kernels = KernelPreference.TORCH
    encoded = ao.Float8Tensor.from_hp(blocks_NB, hp_value_lb=_LEAST_VALUE, kernel_preference=kernels)
    return encoded.qdata, encoded.scale


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], dtype: QuantizedDtype
) -> torch.Tensor:
    """Return a quantized weight with its shape, in the dtype of its scales."""
    codes = packed.view(torch.uint8)
    if dtype == "nf4":
        values = _nf4_pairs(scales.dtype, scales.device).index_select(0, codes.int())
    else:
        values = codes.view(torch.int8 if dtype == "int8" else torch.float8_e4m3fn).to(scales.dtype)
    return values.view(len(scales), -1).mul_(scales[:, None]).view(shape)


@cache
def _nf4_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the two values of each byte, ``[256, 2]``; the high half of a byte is the first value."""
    values = torch.tensor(_NF4_VALUES, dtype=dtype, device=device)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)


class Quantized(nn.Module):
    """A module with quantized weights. Existing modules are changed to a subclass in place; see `quantize_layers`."""

    base_dtype: QuantizedDtype
    quantized: Mapping[str, tuple[int, ...]]
    """Shape of each quantized weight, by the name of the parameter that it replaces."""
    plain: type[nn.Module]
    """The module's class before it was quantized."""
    held: Mapping[str, torch.Tensor] | None
    """Dequantized weights, while `held_weights` is active."""
    recomputes: bool
    """Whether the backward pass must dequantize again, because no outer gradient checkpointing does."""

    def dequantized(self, name: str) -> torch.Tensor:
        """Return a weight's dequantized values. With ZeRO-3, the module's parameters must be gathered."""
        if self.held is not None:
            return self.held[name]
        packed, scales = (getattr(self, name + end) for end in (PACKED, SCALES))
        return dequantize(packed, scales, self.quantized[name], self.base_dtype)

    def encoded(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantize a weight that was read from a file, and return the module's parameters by name."""
        dtype = getattr(self, name + SCALES).dtype
        parts = _quantized_on_device(weight.to(dtype), self.base_dtype)
        return {name + end: part for end, part in zip((PACKED, SCALES), parts, strict=True)}

    def packed_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of quantized weights."""
        return (getattr(self, name + end) for name in self.quantized for end in (PACKED, SCALES))

    def make_plain(self, parameter_of: Callable[[Quantized, str], nn.Parameter]) -> None:
        """Restore the module's class, with the parameters that a function returns for each quantized weight."""
        parameters = {name: parameter_of(self, name) for name in self.quantized}
        self.__class__ = self.plain  # type: ignore[assignment]
        for name, parameter in parameters.items():
            del self._parameters[name + PACKED], self._parameters[name + SCALES]
            self.register_parameter(name, parameter)


class QuantizedLinear(Quantized, nn.Linear):
    """A linear layer with a quantized weight, to which PEFT can add an adapter."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dequantized weight; NaN while ZeRO-3 has partitioned it, when PEFT reads only its device and dtype."""
        scales: Any = self.weight_scales
        if shape_of(scales) == tuple(scales.shape) and not scales.is_meta:
            return self.dequantized("weight")
        return torch.full((), torch.nan, dtype=scales.dtype, device=scales.device).expand(self.quantized["weight"])

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply the input ``[..., in_features]`` by the dequantized weight."""
        result: torch.Tensor = _Product.apply(input, self.bias, self)  # type: ignore[no-untyped-call]
        return result


class _Product(torch.autograd.Function):
    """A product with a quantized weight. The backward pass dequantizes the weight again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, bias: torch.Tensor | None, module: QuantizedLinear) -> torch.Tensor:
        # Not `save_for_backward`: with ZeRO-3, the module's hooks gather the parameters again before the backward pass.
        ctx.module = module
        return nn.functional.linear(input, module.dequantized("weight"), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient @ ctx.module.dequantized("weight"), None, None


class QuantizedExperts(Quantized):
    """Experts whose weights are stacked in quantized parameters ``[experts, ..., ...]``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts' own forward with dequantized weights."""
        if torch.is_grad_enabled() and self.recomputes and self.held is None:
            # Otherwise autograd would save the dequantized weights of every layer.
            return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        stand_in = object.__new__(self.plain)
        # An instance attribute takes precedence over a parameter.
        stand_in.__dict__ = {**self.__dict__, **{name: self.dequantized(name) for name in self.quantized}}
        return self.plain.forward(stand_in, *args, **kwargs)


@cache
def _quantized_experts(plain: Any) -> type[QuantizedExperts]:
    return type(f"Quantized{plain.__name__}", (QuantizedExperts, plain), {})


def quantizable(model: nn.Module, whole: Collection[str]) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Yield the modules in a decoder's layers whose weights can be quantized, and the names of those weights.

    These are linear layers and stacked experts, except modules that are trained in full (named in ``whole``), routers,
    weights that the model keeps in fp32, and weights that another module reads.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    skipped = {one for name in whole for one in model.get_submodule(name).modules()}
    skipped |= {module for _, module in read_linears(model)}
    patterns = [getattr(model, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")]
    in_fp32 = {one for pattern in patterns for one in pattern}
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for name, module in layer.named_modules(prefix=layer_name):
            if module not in skipped and not in_fp32 & set(name.split(".")):
                found = ((own, torch.Size(shape_of(module._parameters[own]))) for own in _weights(module, name))
                names = tuple(own for own, shape in found if shape.numel() % _NF4_BLOCK == 0)
                if names:
                    skipped.add(module)
                    yield module, names


def _weights(module: nn.Module, name: str) -> Iterator[str]:
    if type(module) is nn.Linear:
        # Routers are small, and the choice of experts is sensitive to them.
        if not name.endswith(("gate", "router")) and ".router." not in name:
            yield "weight"
    elif type(module).__name__.endswith("Experts"):
        for own, parameter in module._parameters.items():
            if parameter is not None and len(shape_of(parameter)) == 3 and parameter.is_floating_point():
                yield own


def quantize_layers(
    model: nn.Module,
    dtype: QuantizedDtype,
    whole: Collection[str],
    *,
    recomputes: bool,
) -> None:
    """Replace the frozen weights of a decoder's layers by quantized parameters, in place.

    On the meta device, the quantized parameters have no values yet; `Quantized.encoded` computes them.

    Args:
        model: A decoder without adapters.
        dtype: Type of the quantized weights.
        whole: Names of the modules that are trained in full.
        recomputes: Whether no gradient checkpointing surrounds the layers.
    """
    known: dict[nn.Parameter, tuple[nn.Parameter, ...]] = {}
    for module, names in list(quantizable(model, whole)):
        plain: Any = type(module)
        shapes = {}
        for name in names:
            parameter = module._parameters.pop(name)
            assert parameter is not None
            shapes[name] = shape_of(parameter)
            # Layers may share a weight.
            if parameter not in known:
                parts = _quantized_on_device(parameter.data, dtype)
                known[parameter] = tuple(nn.Parameter(part, requires_grad=False) for part in parts)
            for end, part in zip((PACKED, SCALES), known[parameter], strict=True):
                module.register_parameter(name + end, part)
        module.__class__ = QuantizedLinear if plain is nn.Linear else _quantized_experts(plain)
        module.__dict__.update(base_dtype=dtype, quantized=shapes, plain=plain, held=None, recomputes=recomputes)


def _quantized_on_device(weight: torch.Tensor, dtype: QuantizedDtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight on the GPU if there is one: a CPU encodes only a few million elements of NF4 per second."""
    is_on_host = weight.device.type == "cpu" and torch.cuda.is_available()
    packed, scales = quantize(weight.cuda() if is_on_host else weight, dtype)
    return packed.to(weight.device), scales.to(weight.device)


def quantized_modules(model: nn.Module) -> Iterator[Quantized]:
    """Yield the modules of a model that have quantized weights."""
    return (module for module in model.modules() if isinstance(module, Quantized))


def quantized_sizes(model: nn.Module) -> dict[str, Any]:
    """Return the sizes of a model's quantized weights, as fields of `TrainedPart`."""
    packed = {one for module in quantized_modules(model) for one in module.packed_parameters()}
    modules, sublayers = [0], Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, Quantized):
            size = sum(torch.Size(shape).numel() for shape in module.quantized.values())
            modules.append(size)
            sublayers[name.rpartition(".")[0]] += size
    largest = {"largest_quantized": max(modules), "largest_tiled": max(sublayers.values(), default=0)}
    return {"quantized": sum(modules), "packed_bytes": sum(one.nbytes for one in packed), **largest}


def dequantize_layers(model: nn.Module) -> None:
    """Replace quantized weights by frozen parameters with the same values, in place; not with ZeRO-3."""
    for module in list(quantized_modules(model)):
        module.make_plain(lambda one, name: nn.Parameter(one.dequantized(name), requires_grad=False))


def weight_shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all weights of a module, with the shapes that quantized weights have when dequantized."""
    for inner in module.modules():
        shapes: Mapping[str, tuple[int, ...]] = inner.quantized if isinstance(inner, Quantized) else {}
        yield from shapes.values()
        packed = set(inner.packed_parameters()) if isinstance(inner, Quantized) else ()
        yield from (shape_of(one) for one in inner.parameters(recurse=False) if one not in packed)


@contextmanager
def held_weights(module: nn.Module) -> Iterator[None]:
    """Dequantize a module's weights once for all uses within the block."""
    inside = [one for one in quantized_modules(module) if one.held is None]
    for one in inside:
        one.held = {name: one.dequantized(name) for name in one.quantized}
    try:
        yield
    finally:
        for one in inside:
            one.held = None


@cache
def torchao() -> Any:
    """Import torchao's tensors.

    Raises:
        UserError: torchao can't be imported.
    """
    try:
        from torchao import quantization
    except ImportError as error:
        raise UserError(
            f"model.base_dtype requires torchao, which can't be imported ({error}); install it on every node: "
            "pip install 'ray-ulysses[quantized]'"
        ) from error
    return quantization
