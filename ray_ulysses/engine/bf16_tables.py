"""The tables of ``BF16_Optimizer``: what DeepSpeed 0.19.8 makes of ZeRO-1 with bf16 weights and fp32 gradients.

It is another class than that of ZeRO-1 in fp32 or with offload, with other names for the same cut: each group is one
flat tensor in the order of its parameters, padded at its end and cut evenly over the world.
"""

from __future__ import annotations

from typing import Any

from ray_ulysses.engine.state_tables import require_tables
from ray_ulysses.engine.zero12_tables import GroupPlace, GroupTables, group_tables

BF16_TABLES = (
    "bf16_groups",
    "bf16_groups_flat",
    "fp32_groups_flat_partition",
    "real_dp_process_group",
    "update_lp_params",
    "_hp_optimizer_states_linked",
)
"""What is read of ``BF16_Optimizer`` in runtime/bf16_optimizer.py."""


def bf16_tables(optimizer: Any) -> GroupTables:
    """Return the tables of a ``BF16_Optimizer``.

    Raises:
        RunError: It is another DeepSpeed's.
    """
    require_tables(optimizer, BF16_TABLES)
    places = {}
    for number, parameters in enumerate(optimizer.bf16_groups):
        offset = 0
        for parameter in parameters:
            places[id(parameter)] = GroupPlace(group=number, offset=offset)
            offset += parameter.numel()
    return group_tables(
        optimizer, flats=optimizer.fp32_groups_flat_partition, wholes=optimizer.bf16_groups_flat, places=places
    )
