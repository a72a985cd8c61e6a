"""Builds a model whose parameters have memory but no values, for a stored state that fills every one of them.

Nothing is drawn and no weights are read. Everything that is not a parameter, such as the tables of rotary embeddings,
is computed as for a model with initial weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def without_weights() -> Iterator[None]:
    """Put every parameter of a model that is built in this context on the meta device, where nothing is initialized.

    Unlike accelerate's ``init_empty_weights``, it keeps parameters that share their weights the same.
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
    """Replace every parameter on the meta device by one in memory, uninitialized.

    With ``partition``, each is partitioned before the next is allocated, so that no rank ever holds more than one whole
    parameter, and buffers are moved to the device of the parameters.

    Args:
        model: A model that was built `without_weights`.
        dtype: Type of the parameters.
        partition: DeepSpeed's configuration of ZeRO-3, or ``None`` to keep parameters whole.
    """
    partitioner = None if partition is None else _partitioner(partition)
    device = torch.device("cpu") if partitioner is None else partitioner.local_device
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in allocated:
                fresh = nn.Parameter(_memory(parameter, dtype, device), requires_grad=parameter.requires_grad)
                fresh.__dict__.update(vars(parameter))
                if partitioner is not None:
                    partitioner._convert_to_zero_parameters([fresh])
                allocated[parameter] = fresh
            setattr(module, name, allocated[parameter])
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _memory(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory for a parameter."""
    dtype = dtype if parameter.is_floating_point() else parameter.dtype
    return torch.empty(parameter.shape, dtype=dtype, device=device)


def _partitioner(partition: Mapping[str, Any]) -> Any:
    """Return an object that partitions parameters as ZeRO-3 does, without sending rank 0's values to every rank."""
    import deepspeed

    class WithoutBroadcast(deepspeed.zero.Init):  # type: ignore[misc]
        def _zero_init_param(self, parameter: Any) -> None:
            # As in DeepSpeed 0.19.8, which broadcasts every parameter in between.
            self._convert_to_deepspeed_param(parameter)
            parameter.partition()

    return WithoutBroadcast(module=nn.Module(), config_dict_or_path=dict(partition))
