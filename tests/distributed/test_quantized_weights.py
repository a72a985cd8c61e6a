"""Quantized weights reach every rank's partition bitwise, within its share of memory, or no rank goes on."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.base_fingerprint import model_fingerprint
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.zero import build_engine, partition_config
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory import configured_memory
from tests.breadth import fast_only
from tests.distributed.harness import run_calls
from tests.distributed.seam_case import zero_settings
from tests.unit.attention.models import tiny_model
from tests.unit.config.trees import small_tree
from tests.unit.engine.quantized_checkpoints import QUANTIZED, dequantized_by_transformers, write_checkpoint
from tests.unit.engine.test_quantized_weights import config_of


def gathered(rank: int, world_size: int, path: str, name: str, stage: int) -> dict[str, torch.Tensor]:
    import deepspeed

    model = build_model(config_of(Path(path), name), partition_config(zero_settings(stage=stage)))
    found: dict[str, torch.Tensor] = {}
    for key, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            found[key] = parameter.detach().clone()
    return found | {key: one for key, one in model.named_buffers() if key in model.state_dict()}


@pytest.mark.parametrize("world_size", fast_only([1, 2, 4], 2))
def test_every_rank_gets_the_weights_that_transformers_dequantizes(tmp_path: Path, world_size: int) -> None:
    names = QUANTIZED if world_size == 4 else ("qwen3_moe-fp8", "glm4_moe-fp8-static", "gpt_oss-mxfp4", "qwen3_vl-fp8")
    wanted = {}
    for name in names:
        write_checkpoint(tmp_path / name, name)
        wanted[name] = dequantized_by_transformers(tmp_path / name, name, torch.bfloat16)
    calls = {f"{name} {stage}": (gathered, str(tmp_path / name), name, stage) for name in names for stage in (1, 3)}
    for case, ranks in run_calls(world_size, calls, timeout_s=300).items():
        name = case.split()[0]
        for found in ranks:
            assert found and all(torch.equal(one, wanted[name][key]) for key, one in found.items()), case
            assert all(one.dtype == wanted[name][key].dtype for key, one in found.items()), case


def refused(rank: int, world_size: int, path: str, name: str) -> str:
    own = Path(path) / str(rank)
    try:
        build_model(config_of(own, name), partition_config(zero_settings(stage=3)))
    except UserError as error:
        return str(error)
    return ""


def test_all_ranks_fail_if_one_of_them_can_not_read_its_files(tmp_path: Path) -> None:
    name, calls = "qwen3-fp8", {}
    for fault in ("missing", "torn"):
        for rank in ("0", "1"):
            write_checkpoint(tmp_path / fault / rank, name)
        calls[fault] = (refused, str(tmp_path / fault), name)
    (tmp_path / "missing/1/model.safetensors").unlink()
    torn = tmp_path / "torn/1/model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    for fault, errors in run_calls(2, calls).items():
        assert len(set(errors)) == 1 and f"{fault}/1" in errors[0] and "weights can't be loaded" in errors[0], errors


def _over_nf4(path: str) -> Any:
    settings: dict[str, Any] = {"model__dtype": "bf16", "model__adapter": {"rank": 2}, "model__base_dtype": "nf4"}
    return parse_config(small_tree(model__init="pretrained", model__config=None, model__path=path, **settings))


def fingerprint(rank: int, world_size: int, path: str, stage: Any) -> str:
    settings = zero_settings(stage=stage, dtype="bf16")
    engine = build_engine(build_model(_over_nf4(path), partition_config(settings)), settings)
    found: str = engine.base_fingerprint
    engine.destroy()
    return found


def test_an_export_finds_the_fingerprint_of_a_base_with_parameters_in_fp32(tmp_path: Path) -> None:
    sizes = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "ernie4_5_moe", vocab_size=264, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, moe_layer_end_index=1, **sizes,
    ))  # fmt: skip
    # Values that bf16 rounds, in the router and its bias.
    for one in model.parameters():
        torch.nn.init.normal_(one, std=0.02)
    model.save_pretrained(tmp_path / "base")
    path = str(tmp_path / "base")
    found = run_calls(2, {f"{stage}": (fingerprint, path, stage) for stage in (1, 3)})
    assert {one for ranks in found.values() for one in ranks} == {model_fingerprint(build_model(_over_nf4(path)))}


_MIB = 1 << 20
_M_MMAP_THRESHOLD = -3


def _anonymous_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def peak_of_loading(rank: int, world_size: int, path: str) -> tuple[int, int, int, int]:
    """Return the growth of anonymous memory while a model is loaded, the rank's share, and the largest tensor, as it is
    and as planned."""
    tree = small_tree(model__init="pretrained", model__config=None, model__path=path, model__dtype="bf16")
    config, partition = parse_config(tree), partition_config(zero_settings(stage=3))
    # By default glibc keeps up to 64 MiB of freed memory; with a fixed threshold it returns tensors to the system.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MIB)
    before = peak = _anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        model = build_model(config, partition)
    finally:
        done.set()
        watcher.join()
    parameters: list[Any] = list(model.parameters())
    share = sum(one.ds_tensor.numel() * 2 for one in parameters)
    (planned,) = (one for one in configured_memory(config, ModelShape.from_path(path)).host if one.phase == "load")
    return peak - before, share, max(one.ds_numel * 2 for one in parameters), planned.bytes


EXPERTS = {
    "vocab_size": 2048, "hidden_size": 1024, "num_hidden_layers": 4, "head_dim": 128, "num_attention_heads": 8,
    "num_key_value_heads": 8,
}  # fmt: skip
_QWEN3_MOE = {**EXPERTS, "moe_intermediate_size": 256, "num_experts": 36, "num_local_experts": 36}
BIG: dict[str, dict[str, Any]] = {
    "qwen3-fp8": {**EXPERTS, "num_hidden_layers": 10, "intermediate_size": 2048},
    "qwen3-channel": {**EXPERTS, "num_hidden_layers": 10, "intermediate_size": 2048},
    "qwen3_moe-fp8": _QWEN3_MOE,
    "qwen3_moe-channel": _QWEN3_MOE,
    "gpt_oss-mxfp4": {**EXPERTS, "intermediate_size": 256, "num_local_experts": 36},
}
"""Sizes of models of some hundred MiB, by checkpoint."""


@pytest.mark.parametrize("world_size", fast_only([2, 4], 2))
@pytest.mark.parametrize("name", fast_only(["qwen3", "qwen3_moe", *BIG], "qwen3", "qwen3_moe-fp8"))
def test_a_rank_holds_its_share_and_one_tensor_while_it_loads(tmp_path: Path, name: str, world_size: int) -> None:
    path = str(tmp_path / "big")
    if name in BIG:
        write_checkpoint(tmp_path / "big", name, **BIG[name])
    else:
        tiny_model(name, **BIG[f"{name}-fp8"]).to(torch.bfloat16).save_pretrained(path)
    write_checkpoint(tmp_path / "warm", "qwen3-fp8")
    calls = {
        "warm": (gathered, str(tmp_path / "warm"), "qwen3-fp8", 3),
        "measured": (peak_of_loading, path),
    }
    for peak, share, largest, planned in run_calls(world_size, calls, timeout_s=300)["measured"]:
        print(f"{name}: peak {peak / _MIB:.0f} MiB, share {share / _MIB:.0f}, largest tensor {largest / _MIB:.0f}")
        assert share > 40 * _MIB and planned == largest
        assert peak <= 1.3 * share + largest
