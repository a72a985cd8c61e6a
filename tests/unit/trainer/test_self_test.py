"""The self-test's attention settings, its warnings about links, and errors that keep it from running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from ray_ulysses.elastic.causes import raised
from ray_ulysses.engine.self_test import LinkTime
from ray_ulysses.errors import RunError
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.throughput import link_bandwidth
from ray_ulysses.trainer import self_test as module
from ray_ulysses.trainer.self_test import attention_settings, check_start, layer_windows, slow_links
from tests.unit.attention.models import SIZES
from tests.unit.planner.runs import LLAMA_3_8B, make_config

ALTERNATING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "llama"}, (None,)),
        ({"model_type": "mistral", "sliding_window": 6}, (6,)),
        ({"model_type": "mistral", "sliding_window": None}, (None,)),
        ({"model_type": "qwen2", "sliding_window": 6}, (None,)),
        ({"model_type": "gemma2", "sliding_window": 6, "layer_types": ALTERNATING}, (None, 6)),
        ({"model_type": "gpt_oss", "sliding_window": 6, "layer_types": ALTERNATING}, (None, 6)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_each_kind_of_layer_is_tested_with_its_window(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    fields = {**SIZES, **fields}
    assert layer_windows(AutoConfig.for_model(fields.pop("model_type"), **fields)) == windows


def run_of(model: dict[str, Any]) -> Any:
    return SimpleNamespace(config=make_config(model), shape=ModelShape.from_config_dict(model))


def test_the_model_s_heads_caps_and_dtype_are_tested() -> None:
    model = {**SIZES, "model_type": "gemma2", "head_dim": 8, "attn_logit_softcapping": 50.0, "sliding_window": 6}
    fields = dict(model)
    text_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    run = run_of(model)
    found = attention_settings(run.config, run.shape, text_config)
    assert (found.num_heads, found.num_kv_heads, found.head_size, found.value_size) == (4, 2, 8, 8)
    assert (found.dtype, found.softcap, found.windows) == (torch.bfloat16, 50.0, (None, 6))


NODES = ["node-1"] * 8 + ["node-2"] * 8


def cluster_run(**cluster: Any) -> Any:
    given = {"workers": 16, "gpus_per_worker": 1, "device": "H100", "network_gbps": 400.0} | cluster
    return make_config(LLAMA_3_8B, parallel={"sp_size": 8}, cluster=given)


def link(role: Any, ranks: int, gb_per_s: float, *transports: str) -> LinkTime:
    return LinkTime(
        role=role, ranks=ranks, sent_bytes=10**9, seconds=1 / gb_per_s, slowest_rank=9, transports=transports
    )


def test_a_link_far_slower_than_planned_is_named_with_its_transport() -> None:
    config = cluster_run()
    links = [link("ulysses", 8, 300.0, "P2P/CUMEM"), link("shard", 16, 2.5, "NET/Socket", "P2P/CUMEM")]
    (text,) = slow_links(links, config, NODES)
    for words in ("16 ranks reaches 2.5 GB/s", "assumes 75 ", "cluster.device=H100", "9 on node-2", "NET/Socket"):
        assert words in text


@pytest.mark.parametrize(("role", "ranks"), [("ulysses", 8), ("shard", 16), ("ring", 2)])
def test_half_of_what_the_plan_assumes_is_not_far_below_it(role: str, ranks: int) -> None:
    config = cluster_run()
    # A ring of two uses the links of all eight ranks that share a row.
    assumed = link_bandwidth(config, 8 if role == "ring" else ranks) / 1e9
    assert slow_links([link(role, ranks, 0.51 * assumed)], config, NODES) == []
    assert len(slow_links([link(role, ranks, 0.49 * assumed)], config, NODES)) == 1
    for nothing in (cluster_run(device=None), cluster_run(gpus_per_worker=0)):
        assert slow_links([link(role, ranks, 0.001)], nothing, NODES) == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (dist.DistBackendError("NCCL error, unhandled system error"), "consequence"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "device"),
        (RuntimeError("no kernel image is available for execution on the device"), "raised"),
    ],
    ids=["collective", "GPU", "kernel"],
)
def test_what_keeps_it_from_running(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str) -> None:
    monkeypatch.setattr(module, "run_self_test", Mock(side_effect=error))
    model = {**SIZES, "model_type": "llama", "max_position_embeddings": 64}
    worker: Any = SimpleNamespace(rank=3, node="n1", device=torch.device("cpu"), clock=None)
    anything: Any = SimpleNamespace()
    with pytest.raises(RunError, match="failed to run on rank 3") as caught:
        check_start(run_of(model), worker, anything, anything, [])
    found = raised(3, caught.value)
    assert found.kind == kind and str(error) in found.what
