"""What the ZeRO-3 state's door refuses, and the canary of DeepSpeed's private tables."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ulysses.engine.zero_state import _PRIVATE_TABLES, export_state
from ray_ulysses.errors import RunError, UserError


def _engine(stage: int = 3, **optimizer: Any) -> SimpleNamespace:
    tables = dict.fromkeys(_PRIVATE_TABLES, None)
    tables |= {"fp16_partitioned_groups_flat": [], "swap_optimizer": False, **optimizer}
    return SimpleNamespace(zero_optimization_stage=lambda: stage, optimizer=SimpleNamespace(**tables))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_another_zero_stage_is_refused(stage: int) -> None:
    with pytest.raises(UserError, match=f"zero_stage={stage}: checkpoints hold the state of ZeRO stage 3 only; use"):
        export_state(_engine(stage))


@pytest.mark.parametrize("swapped", [{"swap_optimizer": True}, {"fp16_partitioned_groups_flat": [None]}])
def test_state_on_nvme_is_refused(swapped: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"memory\.offload_optimizer: .* NVMe can't be .*; use 'none' or 'cpu'"):
        export_state(_engine(**swapped))


def test_a_deepspeed_without_the_private_tables_is_refused() -> None:
    engine = _engine()
    del engine.optimizer.grad_position
    with pytest.raises(RunError, match=r"optimizer lacks grad_position; install the version .* pins \(0\.19\)"):
        export_state(engine)


def test_the_installed_deepspeed_still_has_the_private_tables() -> None:
    """Read from its source, since importing it takes seconds and a distributed test does that anyway."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "runtime/zero/stage3.py").read_text()
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert set(_PRIVATE_TABLES) <= names
