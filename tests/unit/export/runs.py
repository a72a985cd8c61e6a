"""Minimal runs with a checkpoint, as input of an export, and functions that read exported files."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedConfig

from ray_ulysses.checkpoint import CheckpointMeta, ShardedState, StateDescription, save_checkpoint
from ray_ulysses.config.loading import parse_config
from ray_ulysses.export.export_run import export_run
from ray_ulysses.export.report import ExportReport, ExportRequest
from ray_ulysses.storage import LocalStore
from tests.unit.checkpoint.fakes import ThreadExchange, on_ranks, shard_of
from tests.unit.config.trees import small_tree

META = CheckpointMeta(
    sp_size=1, cursor={"next_row": 12}, digest="00000000000000ff", tokens=1200, versions={"torch": "2.13.0"}
)
TINY_LLAMA = LlamaConfig(
    vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def commands_on(run: Path, corpus: Path, *evaluation: str) -> dict[str, list[str]]:
    """Return the command lines of all commands that read a run; ``evaluation`` adds options to `evaluate`."""
    inspect = ["inspect", str(run)]
    return {
        "inspect": inspect,
        "inspect --json": [*inspect, "--json"],
        "inspect --checkpoints": [*inspect, "--checkpoints"],
        "inspect --verify": [*inspect, "--verify"],
        "inspect --verify-checkpoint": [*inspect, "--verify-checkpoint", "latest"],
        "inspect --row": [*inspect, "--row", "0"],
        "report": ["report", str(run), "-q"],
        "export": ["export", str(run), "-q", "--overwrite", "--no-check"],
        "evaluate": ["evaluate", str(run), "-q", "--data", str(corpus), "--task", "loss", *evaluation],
    }


def write_config(run_dir: Path, model_config: Mapping[str, Any], dtype: str = "fp32", **changes: Any) -> None:
    """Write the config.yaml of a run with an inline model configuration."""
    tree = small_tree(model__config=dict(model_config), model__dtype=dtype, **changes)
    tree["run"] |= {"name": run_dir.name, "storage": str(run_dir.parent)}
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(parse_config(tree).to_yaml())


def write_checkpoint(
    run_dir: Path, model: Any, *, dtype: str = "fp32", step: int = 4, world_size: int = 2,
    frozen: Collection[str] = (), base_fingerprint: str = "", with_model: bool = True, moments: bool = True,
    **meta: Any,
) -> None:  # fmt: skip
    """Save a checkpoint whose fp32 master weights are the model's parameters, on ``world_size`` threads.

    With ``dtype="bf16"`` and ``with_model``, the rounded weights are stored too. ``moments`` adds an optimizer moment.
    With ``base_fingerprint``, ``frozen`` weights are not stored. ``meta`` overrides fields of the checkpoint metadata.
    """
    tensors: dict[str, torch.Tensor] = {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if name in frozen:
            if not base_fingerprint:
                tensors[f"frozen/{name}"] = parameter.detach().to(_DTYPES[dtype])
            continue
        tensors[f"fp32/{name}"] = parameter.detach()
        if moments:
            tensors[f"exp_avg/{name}"] = torch.full_like(parameter, 7.0)
        if dtype == "bf16" and with_model:
            tensors[f"model/{name}"] = parameter.detach().bfloat16()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name not in parameters:
            tensors[f"buffer/{name}"] = tensor
    aliases = model.named_parameters(remove_duplicate=False)
    tied = {name: first[id(parameter)] for name, parameter in aliases if first[id(parameter)] != name}

    def save(rank: int, messenger: ThreadExchange) -> None:
        state = shard_of(tensors, rank, world_size)
        description = StateDescription(tensors=state.description.tensors, tied=tied, base_fingerprint=base_fingerprint)
        save_checkpoint(
            LocalStore(run_dir), step=step, attempt=1, rank=rank, world_size=world_size,
            state=ShardedState(parts=state.parts, description=description),
            meta=replace(META, run=run_dir.name, **meta), messenger=messenger,
        )  # fmt: skip

    assert on_ranks(world_size, save) == [None] * world_size


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    # GPT-2 and others have their own names for sizes that model.config must contain.
    sizes = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    return config.to_dict() | {name: getattr(config, name) for name in sizes}


def silent(line: str) -> None:
    del line


def export(run_dir: Path, **request: Any) -> ExportReport:
    return export_run(ExportRequest(run_dir=run_dir, **request), silent)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a directory with safetensors; no name may appear twice."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                assert name not in tensors
                tensors[name] = file.get_tensor(name)
    return tensors


def assert_same(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def word_tokenizer(folder: Path, words: int) -> Path:
    folder.mkdir()
    vocabulary = {f"w{number}": number for number in range(words)} | {"<end>": words}
    tokenizer = RustTokenizer(models.WordLevel(vocab=vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder
