"""Checks an exported directory against the live model: the same tokens must give the same logits.

The live model is built as in training and filled from the checkpoint by parameter name. It processes both documents in
one row with Ulysses attention. The exported model is loaded with `from_pretrained` and processes one document at a time
with Transformers' own attention. Both compute in fp32 on the CPU from the published (rounded) weights. They differ only
in the order of additions, so the fp32 bound applies to any weight type. Only one model is in memory at a time.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ray_ulysses.attention.batch import shard_batch, unshard
from ray_ulysses.attention.ulysses import apply_ulysses
from ray_ulysses.config import Config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.engine.heads import document_logits
from ray_ulysses.engine.model import build_model, quantize_base, torch_dtype
from ray_ulysses.engine.model_config import stored_quantization
from ray_ulysses.engine.quantized_base import dequantize_layers
from ray_ulysses.engine.stored_weights import without_progress_bar
from ray_ulysses.engine.text_part import auto_class, keep_text_part
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.report import CheckResult
from ray_ulysses.export.stream import WeightReader, live_model
from ray_ulysses.export.tensors import Stored
from ray_ulysses.inspect.run_data import DATA_ERRORS, planned_data, unreadable_plan
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.storage.hub import hub_refusal
from ray_ulysses.storage.place import Place

BOUND = 1e-5
"""Maximum logit difference in fp32, relative to the largest logit (law 1)."""

_MEMORY_FILE = Path("/proc/meminfo")
_NUM_DOCUMENTS = 2
_MOST_TOKENS = 256
_LEAST_TOKENS = 2
_MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Token prefixes of two documents."""

    documents: tuple[tuple[int, ...], ...]
    origin: str
    """Description of the documents' source."""


def take_sample(run_dir: Place, vocab_size: int, max_positions: int | None, *, trust_run: bool = False) -> Sample:
    """Return two documents from the run's first training rows, or seeded random tokens if the rows can't be read."""
    most = min(_MOST_TOKENS, max_positions or _MOST_TOKENS)
    try:
        documents = _first_documents(run_dir, most, trust_run)
        return Sample(documents=documents, origin="the run's first training rows")
    except UserError as error:
        draw = random.Random(0)
        documents = tuple(tuple(draw.randrange(vocab_size) for _ in range(most)) for _ in range(_NUM_DOCUMENTS))
        return Sample(documents=documents, origin=f"seeded tokens, since {error}")


def _first_documents(run_dir: Place, most: int, trust_run: bool) -> tuple[tuple[int, ...], ...]:
    """Return the prefixes of the first documents that are long enough. Raise `UserError` if there are too few."""
    few = "the run has no data plan, or too few documents"
    data = planned_data(run_dir, trust_run=trust_run)
    if data is None:
        raise UserError(few)
    pieces: list[Piece] = []
    try:
        for row in range(min(data.plan.num_rows, _MOST_ROWS)):
            pieces += [piece for piece in data.plan.pieces(row) if piece.length >= _LEAST_TOKENS]
            if len(pieces) >= _NUM_DOCUMENTS:
                break
    except DATA_ERRORS as error:
        raise unreadable_plan(error) from error
    if len(pieces) < _NUM_DOCUMENTS:
        raise UserError(few)
    corpora = CorpusSet(data.sources)
    try:
        read = [corpora.read(one.document, one.start, min(one.length, most)) for one in pieces[:_NUM_DOCUMENTS]]
    except DATA_ERRORS as error:
        raise UserError(f"the run's corpus can't be read ({error})") from error
    return tuple(tuple(tokens.tolist()) for tokens in read)


def free_memory_bytes() -> int | None:
    """Return this machine's free memory in bytes, or None if it is unknown."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY_FILE.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def refuse_small_memory(num_parameters: int) -> None:
    """Refuse the check if the model does not fit into the free memory in fp32. If free memory is unknown, do nothing.

    Raises:
        RunError: The model does not fit.
    """
    free, needed = free_memory_bytes(), 4 * num_parameters
    if free is not None and needed > free:
        raise RunError(
            f"the check loads the model in fp32, which takes {needed / 2**30:.1f} GiB, but only "
            f"{free / 2**30:.1f} GiB of memory is free; export on a larger machine, or skip the check with --no-check"
        )


def check_export(
    folder: Path,
    config: Config,
    model_config: Mapping[str, Any],
    stored: Mapping[str, Stored],
    weights: WeightReader,
    sample: Sample,
    *,
    merged_dtype: torch.dtype | None = None,
) -> CheckResult:
    """Compare an exported directory's logits with the live model's logits.

    ``merged_dtype`` is the dtype that the weights were rounded to after adapters were merged; None without a merge.

    Raises:
        RunError: The directory can't be loaded completely, or the live model's logits are not finite.
    """
    live = _live_logits(config, model_config, stored, weights, sample, merged_dtype)
    # Hooks and modules form reference cycles that would keep the live model in memory.
    gc.collect()
    is_adapter = config.model.adapter is not None and merged_dtype is None
    exported = _logits(_with_adapter(folder, config) if is_adapter else _exported(folder, config), sample)
    if live.shape != exported.shape:
        raise RunError(
            f"the export failed its check: its logits have the shape {list(exported.shape)}, but the live model's have "
            f"{list(live.shape)}"
        )
    return CheckResult(
        tokens=live.shape[0],
        documents=len(sample.documents),
        origin=sample.origin,
        difference=float((live - exported).abs().max()),
        scale=float(live.abs().max()),
        bound=BOUND,
    )


@torch.no_grad()
def _live_logits(
    config: Config,
    model_config: Mapping[str, Any],
    stored: Mapping[str, Stored],
    weights: WeightReader,
    sample: Sample,
    merged_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return the concatenated logits of all documents: ``[T, V]``, or of a classifier ``[D * C]``.

    Of a model for embeddings, return the hidden states ``[T, H]``.
    """
    model, not_finite = live_model(config, model_config, stored, weights)
    if merged_dtype is not None:
        model = model.merge_and_unload()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(merged_dtype).float()
    mesh = SequenceMesh.from_group(None)
    apply_ulysses(model.eval(), mesh, attention="math")
    tokens = torch.tensor([[token for document in sample.documents for token in document]])
    lengths = [[len(document) for document in sample.documents]]
    batch = shard_batch(tokens, tokens, lengths, mesh)
    if config.objective.task == "sequence_classification":
        logits = document_logits(model, batch).flatten()
    else:
        logits = unshard(_scores(model(**batch.model_inputs())), batch)[0]
    if not bool(logits.isfinite().all()):
        where = f"and neither are {len(not_finite)} weights ({not_finite[0]})" if not_finite else "but its weights are"
        raise RunError(
            f"the export failed its check: the live model's logits are not finite, {where}; training had already "
            "diverged. Nothing was published; export an earlier --step, or skip the check with --no-check"
        )
    return logits


def _exported(folder: Path, config: Config) -> Any:
    try:
        with without_progress_bar():
            loaded: Any = auto_class(config.model.part, config.objective.task).from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _not_loaded("from_pretrained", error) from error
    model, info = loaded
    problems = [f"{kind.replace('_', ' ')} {sorted(map(str, names))[:3]}" for kind, names in info.items() if names]
    if problems:
        raise RunError(f"the export failed its check: from_pretrained reports {', '.join(problems)}")
    return model


def _with_adapter(folder: Path, config: Config) -> Any:
    """Load the base model in the training precision, with the exported adapter."""
    from peft import PeftModel
    from transformers import AutoConfig

    path = str(config.model.path)
    place = folder if (folder / "config.json").is_file() else path
    is_cached = hub_refusal(path) is not None
    try:
        with without_progress_bar():
            hf_config = AutoConfig.from_pretrained(place, local_files_only=is_cached)
            base: Any = (
                auto_class(config.model.part, config.objective.task).from_pretrained(
                    path, config=hf_config, dtype=torch.float32, local_files_only=is_cached
                )
                if stored_quantization(path) is None
                else build_model(with_settings(config, {"model.adapter": None, "model.base_dtype": "bf16"}))
            )
            # Round the base weights as in training, but neither buffers nor adapter weights.
            for parameter in base.parameters():
                parameter.data = parameter.data.to(torch_dtype(config.model.dtype))
            if config.model.base_dtype != "bf16":
                # The adapter was trained on the quantized weights.
                if config.model.part == "text":
                    keep_text_part(base)
                quantize_base(base, config)
                dequantize_layers(base)
            for parameter in base.parameters():
                parameter.data = parameter.data.float()
            return PeftModel.from_pretrained(base, folder)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise _not_loaded("PeftModel.from_pretrained", error) from error


def _not_loaded(loader: str, error: Exception) -> RunError:
    return RunError(f"the export failed its check: {loader} can't load it ({error}); nothing was published")


@torch.no_grad()
def _logits(model: Any, sample: Sample) -> torch.Tensor:
    model.eval()
    return torch.cat(
        [_scores(model(input_ids=torch.tensor([document]), use_cache=False))[0] for document in sample.documents]
    )


def _scores(output: Any) -> torch.Tensor:
    """Return the logits of a model's output, or the hidden states of a model without a head."""
    scores: torch.Tensor = output.logits if "logits" in output else output.last_hidden_state
    return scores
