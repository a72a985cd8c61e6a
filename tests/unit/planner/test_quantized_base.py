"""The memory of a quantized base in the guide is the plan's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.memory_terms import GIB
from ray_ulysses.run.settings import model_shape

_GUIDE = Path(__file__).parents[3] / "docs" / "fine-tune.md"
_LLAMA: dict[str, Any] = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256}
_SIZES: dict[str, dict[str, Any]] = {
    "8B, one": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B, two": {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


@pytest.mark.parametrize(("size", "workers", "tokens"), [("8B, one", 1, 65_536), ("70B, two", 2, 131_072)])
def test_the_table_of_the_guide_is_planned(size: str, workers: int, tokens: int) -> None:
    row = next(line for line in _GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| Llama {size}, "))
    assert f"{tokens:,} tokens" in row
    for base_dtype, written in zip(("bf16", "int8", "nf4"), row.strip(" |").split(" | ")[1:], strict=True):
        model = {"config": _LLAMA | _SIZES[size], "path": "/model", "adapter": {}, "base_dtype": base_dtype}
        config = Config.model_validate(
            {
                "run": {"name": "planned", "storage": "/runs"},
                "model": model,
                "optimizer": {"lr": 1e-4},
                "data": {"path": "/corpus", "context_tokens": tokens, "rows_per_step": 1},
                "parallel": {"sp_size": workers},
                "memory": {"offload_activations": ["layer_inputs", "attention_outputs"]},
                "elastic": {"peer_memory": False},
                "checkpoint": {"host_buffers": 1},
                "cluster": {"workers": workers, "gpus_per_worker": 1},
            }
        )
        memory = configured_memory(config, model_shape(config))
        planned = [one / GIB for one in (memory.device_bytes, memory.host_bytes)]
        assert [float(one) for one in re.findall(r"[0-9.]+", written)] == pytest.approx(planned, abs=0.051)
