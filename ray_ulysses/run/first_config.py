"""Chooses an initial configuration for a model, context length and number of GPUs, based on the planner's estimates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_ulysses.config import parse_config
from ray_ulysses.config.devices import DEVICES
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import ModelShape, read_model_config
from ray_ulysses.planner.memory import configured_memory, fits
from ray_ulysses.planner.search import FirstConfig, nearest
from ray_ulysses.planner.throughput import configured_time, full_rows
from ray_ulysses.run.preflight import planned_memory
from ray_ulysses.storage.location import absolute_location

STORAGE, CORPORA = "/mnt/shared/runs", "/mnt/shared/corpora"
_TOKENS_PER_STEP, _TOKENS_PER_STEP_ON_CPU = 1 << 21, 1 << 14
_FEWEST_STEPS = 100
_FEWEST_HELD_OUT, _FEWEST_DOCUMENTS = 8, 80
"""Documents held out on average, so that a hash very rarely holds out none, and those that allow an evaluation."""
_GPUS_PER_NODE = 8
_NOT_USABLE_GIB = 1
"""Memory that the driver reserves on each GPU, in GiB."""
_DEVICES = {32: "RTX 5090", 40: "A100", 48: "L40S", 80: "H100", 141: "H200", 180: "B200"}
"""The GPU model that is assumed for a nominal memory in GB."""
_NOISE = frozenset((
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "pad_token_id",
    "torch_dtype", "transformers_version", "use_cache",
))  # fmt: skip
"""Fields of ``config.json`` that do not affect training."""


def first_configs(
    model: str, context: int, gpus: int, gpu_memory: float, host_memory: float, data: str | None = None
) -> list[FirstConfig]:
    """Return one configuration for each value of ``parallel.sp_size`` that fits into memory, fastest first.

    Args:
        model: A local model directory or a hub id.
        context: Row length in tokens.
        gpus: Total number of GPUs, assuming eight per node, or 0 for one worker on the CPU of this machine.
        gpu_memory: Nominal memory per GPU in GB, for example 80 for an H100.
        host_memory: Host memory per GPU in GiB.
        data: Directory or URI of a prepared corpus, from whose size the batch is chosen.

    Raises:
        UserError: The model or the corpus can't be read, or the model does not fit with any ``sp_size``.
    """
    described = _described(model)
    data = None if data is None else absolute_location(data, Path.cwd())
    corpus = None if data is None else _corpus(data)
    workers = max(1, gpus)
    found: list[FirstConfig] = []
    too_large: list[tuple[FirstConfig, ModelShape]] = []
    refused: list[UserError] = []
    for sp_size in (size for size in range(1, workers + 1) if workers % size == 0):
        tree = _tree(model, described, context, gpus, sp_size, corpus)
        if data is not None:
            tree["data"]["path"] = data
        usable_gib = gpu_memory - _NOT_USABLE_GIB
        if gpus and (device := _DEVICES.get(round(gpu_memory))) is not None:
            tree["cluster"]["device"] = device
            usable_gib = min(usable_gib, DEVICES[device].gib)
        if gpus:
            tree["memory"] = {"plan": "auto", "device_gib": usable_gib, "host_gib": host_memory}
        try:
            one, shape = _completed(tree)
        except UserError as error:
            # For example, the model does not support this sp_size.
            refused.append(error)
            continue
        if fits(one.config, one.memory):
            found.append(one)
        else:
            too_large.append((one, shape))
    if found:
        return sorted(found, key=_seconds_per_row)
    if not too_large:
        raise refused[0]
    # `nearest` may also change settings that the automatic plan does not, such as peer memory.
    one, shape = too_large[-1]
    near = nearest(one.config, shape)
    if near is not None and near.config.cluster.workers.min == gpus:
        changed = {change.path: change.chosen() for change in near.changes}
        chosen = {**{choice.path: choice for choice in one.chosen}, **changed}
        return [replace(one, config=near.config, chosen=tuple(chosen.values()), memory=near.memory, time=near.time)]
    more = "" if near is None else f"--gpus {near.config.cluster.workers.min}, "
    raise UserError(
        f"--gpus={gpus}: {model} with {context:,} tokens per row does not fit in any layout with {gpu_memory:g} GB "
        f"of GPU and {host_memory:g} GiB of host memory per GPU; use {more}a larger --gpu-memory or a smaller --context"
    )


def _completed(tree: dict[str, Any]) -> tuple[FirstConfig, ModelShape]:
    """Return a configuration completed with position and memory settings, and the model's shape."""
    trained = _extend_positions(tree)
    config, shape, chosen = planned_memory(parse_config(tree), Path("/"))
    return FirstConfig(
        tree=tree,
        config=config,
        chosen=chosen,
        memory=configured_memory(config, shape),
        time=configured_time(config, shape, full_rows(config)),
        trained_positions=trained,
    ), shape


def _seconds_per_row(one: FirstConfig) -> float:
    """Return the estimated time per row, rounded to three digits so that nearly equal estimates sort as ties."""
    return 0.0 if one.time is None else float(f"{one.time.seconds / one.config.data.rows_per_step:.3g}")


def _described(model: str) -> dict[str, Any]:
    """Return the fields of the model's ``config.json`` that affect training."""
    file = Path(model).expanduser() / "config.json"
    if not file.parent.is_dir():
        from ray_ulysses.engine.model_config import stored_config

        fields: Any = stored_config(model, "--model").to_dict()
    else:
        fields = read_model_config(file.parent, f"--model={model!r}")
    return {name: value for name, value in fields.items() if name not in _NOISE and value is not None}


def _corpus(data: str) -> Corpus:
    try:
        return Corpus.open(data)
    except UserError as error:
        raise UserError(f"--data{str(error).removeprefix('data.path')}") from error


def _tree(
    model: str, described: Mapping[str, Any], context: int, gpus: int, sp_size: int, corpus: Corpus | None
) -> dict[str, Any]:
    """Return a configuration tree without memory settings, which the planner chooses later."""
    directory = Path(model).expanduser()
    is_local = directory.is_dir()
    name = re.sub(r"[^a-z0-9.]+", "-", (directory.resolve().name if is_local else model.rpartition("/")[2]).lower())
    eval_fraction = 0.01 if corpus is None else max(0.01, _FEWEST_HELD_OUT / corpus.num_documents)
    if corpus is not None and corpus.num_documents < _FEWEST_DOCUMENTS:
        eval_fraction = 0.0
    rows = (_TOKENS_PER_STEP if gpus else _TOKENS_PER_STEP_ON_CPU) // context
    if corpus is not None:
        # Twice the average share is left out, since the documents that are held out may be long.
        rows = min(rows, int(corpus.info.num_tokens * (1 - 2 * eval_fraction)) // (_FEWEST_STEPS * context))
    groups = max(1, gpus) // sp_size
    path = f"{CORPORA}/{name.strip('-.')}" if gpus else "corpus"
    section: dict[str, Any] = {"path": str(directory.resolve()) if is_local else model}
    if not is_local:
        section["config"] = dict(described)
    elif any(isinstance(value, Mapping) and "hidden_size" in value for value in described.values()):
        section["part"] = "text"
    if not gpus:
        section["dtype"] = "fp32"
    is_nfs = gpus > _GPUS_PER_NODE
    return {
        "run": {"name": f"{name.strip('-.') or 'run'}-{_length(context)}", "storage": STORAGE if gpus else "runs"}
        | ({"storage_kind": "nfs"} if is_nfs else {})
        | ({"eval_every_steps": 50} if eval_fraction else {}),
        "model": section,
        "data": {
            "path": path,
            "context_tokens": context,
            "rows_per_step": max(1, rows // groups) * groups,
            "eval_fraction": round(eval_fraction, 4),
        },
        "parallel": {"sp_size": sp_size},
        "optimizer": {"lr": 2e-5},
        "schedule": {"warmup_ratio": 0.05},
        "checkpoint": {"every_steps": 50},
        # On network storage, MLflow needs a server.
        "tracking": {"trackers": ["tensorboard"]} if is_nfs else {"enabled": True},
        "cluster": {"workers": max(1, gpus), "gpus_per_worker": min(1, gpus)},
    }


def _extend_positions(tree: dict[str, Any]) -> int | None:
    """Add RoPE scaling if the context exceeds the number of trained positions, and return that number."""
    from ray_ulysses.engine.model_config import planned_config, trained_positions

    config = parse_config(tree)
    trained, context = trained_positions(config), config.data.context_tokens
    if trained is None or context <= trained:
        return trained
    text = planned_config(config).get_text_config(decoder=True)
    stored = text.rope_parameters.get("full_attention", text.rope_parameters)
    # Keep a model's own RoPE scaling. For model.part=text, positions come from the full checkpoint's config.json.
    is_plain = stored.get("rope_type", "default") == "default" and config.model.part == "whole"
    factor = float(math.ceil(context / trained))
    tree["model"]["rope"] = {"rope_type": "yarn", "factor": factor} if is_plain else "unchanged"
    try:
        planned_config(parse_config(tree))
    except UserError:
        # Some model types support only scaling methods that require more parameters than a factor.
        tree["model"]["rope"] = "unchanged"
    return trained


def _length(context: int) -> str:
    """Format a context length for a run name: ``128k``, ``1m``, ``1000``."""
    for unit, scale in (("m", 1 << 20), ("k", 1 << 10)):
        if context % scale == 0:
            return f"{context // scale}{unit}"
    return str(context)
