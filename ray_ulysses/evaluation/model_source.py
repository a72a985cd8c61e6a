"""Finds the model to evaluate or to generate with, a run's checkpoint or a model directory, and loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ray_ulysses.attention.ulysses import apply_ulysses
from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model, refuse_architecture
from ray_ulysses.engine.model_config import described_config, objective_of, stored_positions
from ray_ulysses.engine.text_part import is_multimodal
from ray_ulysses.errors import RunError
from ray_ulysses.evaluation.report import DType, ModelRequest
from ray_ulysses.export.adapters import adapted_tensors, base_state
from ray_ulysses.export.architecture import describe
from ray_ulysses.export.decoder_merge import plan_merge
from ray_ulysses.export.frozen_base import open_checkpoint, weight_reader
from ray_ulysses.export.stream import live_model
from ray_ulysses.export.tensors import stored_tensors
from ray_ulysses.model_shape import read_model_config
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.storage import Store


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelSource:
    """A model that has been found and checked but not loaded yet."""

    config: Config
    """The run's configuration at the checkpoint's step. For a model directory, a configuration that loads the model."""
    checkpoint: tuple[Store, Manifest] | None
    """Store and manifest of a run's checkpoint; None for a model directory."""
    dtype: str
    """Dtype in which the model is computed."""
    weights: DType
    """Precision to which the checkpoint's weights are converted."""
    context_tokens: int
    """Context length in training, in tokens, if known; otherwise the model's number of positions. At most
    ``num_positions``."""
    rotary_positions: int | None
    """Number of positions that the rotary embedding was trained for; None if the model has no such embedding."""
    num_positions: int | None
    """Size of the model's position table; None if the model has no such table."""
    num_heads: int
    vocab_size: int

    @property
    def classifies(self) -> bool:
        """Whether the model predicts the class of a document instead of tokens."""
        return self.config.objective.task == "sequence_classification"

    @property
    def step(self) -> int | None:
        """Step of the checkpoint; None for a model directory."""
        return None if self.checkpoint is None else self.checkpoint[1].step

    def load(self, mesh: SequenceMesh, device: torch.device) -> Any:
        """Load the model onto a device in evaluation mode, prepared for a mesh. All ranks must call this method.

        Raises:
            UserError: The model can't be computed exactly on this mesh.
            RunError: The checkpoint is damaged, or does not fit the model.
        """
        model = self.build().eval().to(device)
        return apply_ulysses(model, mesh)

    def build(self) -> Any:
        """Build the model on the CPU with Transformers' own attention, which supports a KV cache.

        Raises:
            UserError: The weights can't be loaded.
            RunError: The checkpoint is damaged, does not fit the model, or has weights that are not finite.
        """
        config = self.config
        if self.checkpoint is None:
            return build_model(config)
        store, manifest = self.checkpoint
        if config.model.part == "text":
            state = manifest.state if config.model.adapter is None else base_state(manifest.state)
            meta = plan_merge(config, state).model
        else:
            meta = describe(config, "model", is_tied=bool(manifest.state.tied)).model
        dtype = config.model.dtype
        if config.model.adapter is None:
            # An export of a multimodal model uses the files' dtypes; an evaluation uses the requested weights.
            stored = stored_tensors(meta, manifest.state, self.weights, dtype)
        else:
            stored = adapted_tensors(manifest.state, self.weights, dtype)
        model, not_finite = live_model(
            config, meta.config.to_dict(), stored, weight_reader(config, store, manifest), self.dtype
        )
        if not_finite:
            raise RunError(
                f"{len(not_finite)} weights in the checkpoint of step {manifest.step} have NaN or infinite values "
                f"(first: {not_finite[0]}), so training had already diverged; use an earlier step with --step"
            )
        return model


def find_model(request: ModelRequest) -> ModelSource:
    """Find a model, without reading weights.

    Raises:
        UserError: The checkpoint does not exist, or the model can't be evaluated exactly.
        RunError: The checkpoint is damaged, or its storage does not respond.
    """
    checkpoint = None
    if request.is_run:
        config, store, manifest = open_checkpoint(request.model, request.step, trust_run=request.trust_run)
        checkpoint = store, manifest
    else:
        assert isinstance(request.model, Path)
        config = directory_config(request.model, request.dtype)
    hf_config = described_config(config, None if checkpoint is None else bool(checkpoint[1].state.tied))
    num_positions = refuse_architecture(hf_config, config.model.part, config.objective.task).num_positions
    text = hf_config.get_text_config(decoder=True)
    rotary = stored_positions(hf_config)
    if request.is_run:
        # Use the setting, because documents may be shorter than the rows that they are packed into.
        context_tokens = min(config.data.context_tokens, num_positions or config.data.context_tokens)
    else:
        context_tokens = num_positions or rotary or getattr(text, "max_position_embeddings", None) or 2**13
    return ModelSource(
        config=config,
        checkpoint=checkpoint,
        dtype=config.model.dtype if request.dtype == "model" or not request.is_run else request.dtype,
        weights=request.dtype,
        context_tokens=context_tokens,
        rotary_positions=rotary,
        num_positions=num_positions,
        num_heads=int(text.num_attention_heads),
        vocab_size=int(text.vocab_size),
    )


def directory_config(path: Path | str, dtype: DType) -> Config:
    """Return a configuration with which the engine loads a model as it does at the start of a run.

    Args:
        path: A model directory, or an id on the hub.
        dtype: Dtype of the computation; ``model`` requires a directory.
    """
    fields = read_model_config(path, f"MODEL={str(path)!r}") if isinstance(path, Path) else {}
    if dtype == "model":
        # The engine does not support fp16, so fp16 weights are computed in fp32.
        stored = str(fields.get("dtype") or fields.get("torch_dtype"))
        dtype = "bf16" if stored.removeprefix("torch.") == "bfloat16" else "fp32"
    part, objective = _trained(path)
    tree = {
        "run": {"name": "evaluation", "storage": str(path)},
        "model": {"path": str(path), "init": "pretrained", "dtype": dtype, "part": part},
        "data": {"path": str(path), "context_tokens": 1024, "rows_per_step": 1, "overlong": "drop"},
        "optimizer": {"lr": 1e-5},  # required with pretrained weights, and not used
        "memory": {"gradient_checkpointing": False},
        "objective": objective,
        "cluster": {"workers": 1},
    }
    return parse_config(tree)


def _trained(path: Path | str) -> tuple[str, dict[str, Any]]:
    """Return the values of ``model.part`` and ``objective`` for which a stored model was trained."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception:
        # Transformers may raise any exception here. Loading the model later reports the cause.
        return "whole", {}
    kind = objective_of(found)
    classes = {"classes": [str(found.id2label[number]) for number in range(found.num_labels)]}
    return "text" if is_multimodal(found) else "whole", {"kind": kind, **(classes if kind == "classification" else {})}
