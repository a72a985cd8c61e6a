"""Merges a trained text decoder into a copy of its multimodal checkpoint. Only the decoder's bytes change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.config import Config
from ray_ulysses.engine.model_config import described_config
from ray_ulysses.engine.stored_weights import INDEX_FILE, UNREADABLE, FileTensor, file_tensors, model_without_data
from ray_ulysses.engine.text_part import keep_text_part
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.directory import RECORD_FILE
from ray_ulysses.export.files import CopiedFile
from ray_ulysses.export.report import ExportRequest, WeightType
from ray_ulysses.export.tensors import PublishedTensor, Stored, published_tensors, reverted_name, stored_tensors

_TYPES: Mapping[str, WeightType] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
# Weights in formats that Transformers does not read would still contain the untrained decoder.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderMerge:
    """Plan for merging a decoder into a multimodal checkpoint."""

    directory: Path
    model: Any
    """The decoder on the meta device."""
    stored: dict[str, Stored]
    """Location of each decoder tensor in the run's checkpoint, by model tensor name."""
    files: tuple[CopiedFile, ...]
    left_out: tuple[str, ...]
    """Names of the files and folders that are not copied: folders, and weights that Transformers does not read."""
    num_elements: int
    """Number of elements in all tensors of the multimodal checkpoint."""
    has_tokenizer: bool


def refuse_options(request: ExportRequest) -> None:
    """Refuse options that would change more than the decoder.

    Raises:
        UserError: Such an option is set.
    """
    usual = ExportRequest(run_dir=request.run_dir)
    options = {"--dtype": "weights", "--max-shard-size": "max_shard_bytes", "--tokenizer": "tokenizer"}
    given = [option for option, name in options.items() if getattr(request, name) != getattr(usual, name)]
    if given:
        raise UserError(
            f"{', '.join(given)}: the run trained the text decoder of a multimodal checkpoint (model.part=text). The "
            "export copies that checkpoint and replaces only the decoder's weights; remove the option"
        )


def plan_merge(config: Config, state: StateDescription) -> DecoderMerge:
    """Locate every decoder tensor in the checkpoint at ``model.path``, without writing anything.

    Raises:
        UserError: The multimodal checkpoint can't be read.
        RunError: The multimodal checkpoint does not match the decoder's tensors.
    """
    directory = Path(str(config.model.path)).expanduser()
    try:
        tensors = file_tensors(directory)
        model = model_without_data(described_config(config), config.model.part, config.objective.task, tensors)
    except (*UNREADABLE, RuntimeError) as error:
        raise UserError(
            f"model.path={str(directory)!r}: the decoder's multimodal checkpoint can't be read ({error}); restore the "
            "checkpoint from which the run was started"
        ) from error
    keep_text_part(model)
    # Transformers 5.23 does not tie two data-less tensors that are both stored.
    model.tie_weights()
    stored, placed = _placed(model, state, config.model.dtype, tensors, directory)
    used = {tensor.file for tensor in tensors.values()}
    files, left_out = [], []
    for path in sorted(directory.iterdir()):
        is_other = path.name.endswith(_OTHER_WEIGHTS) and path.name not in (*used, INDEX_FILE)
        if is_other or not path.is_file():
            left_out.append(path.name)
        elif path.name != RECORD_FILE:
            own = sorted((tensors[one.name].offset, one) for one in placed if tensors[one.name].file == path.name)
            files.append(
                CopiedFile(
                    name=path.name,
                    source=path,
                    num_bytes=path.stat().st_size,
                    tensors=tuple(one for _, one in own),
                    offsets=tuple(offset for offset, _ in own),
                )
            )
    return DecoderMerge(
        directory=directory,
        model=model,
        stored=stored,
        files=tuple(files),
        left_out=tuple(left_out),
        num_elements=sum(torch.Size(tensor.shape).numel() for tensor in tensors.values()),
        has_tokenizer=(directory / "tokenizer_config.json").is_file(),
    )


def _placed(
    model: Any, state: StateDescription, dtype: str, tensors: Mapping[str, FileTensor], directory: Path
) -> tuple[dict[str, Stored], list[PublishedTensor]]:
    """Return the decoder's tensors with the dtypes of the files: by model tensor name, and as published tensors."""
    stored = stored_tensors(model, state, "model", dtype)
    own_name = {place.key: name for name, place in stored.items()}
    published = [*published_tensors(model, stored), *_tied(model, stored, tensors)]
    problems = []
    for one in published:
        there = tensors.get(one.name)
        if there is None:
            problems.append(f"{one.name} is missing")
        elif there.shape != one.shape:
            problems.append(f"{one.name} is {list(there.shape)} in the files and {list(one.shape)} in the run")
        elif there.dtype not in _TYPES:
            problems.append(f"{one.name} is {there.dtype}, but only F32, BF16 and F16 are supported")
    if problems:
        more = f", and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise RunError(
            f"model.path={str(directory)!r}: the decoder does not fit into this checkpoint: "
            f"{'; '.join(problems[:_MOST_NAMED])}{more}; restore the checkpoint from which the run was started"
        )
    types = {own_name[one.stored.key]: _TYPES[tensors[one.name].dtype] for one in published}
    in_type = {kind: stored_tensors(model, state, kind, dtype) for kind in sorted(set(types.values()))}
    settled = {name: in_type[types[name]][name] for name in stored}
    return settled, [
        replace(one, stored=settled[own_name[one.stored.key]], dtype=settled[own_name[one.stored.key]].published)
        for one in published
    ]


def _tied(model: Any, stored: Mapping[str, Stored], tensors: Mapping[str, FileTensor]) -> list[PublishedTensor]:
    # The files also store these tied tensors under a second name, with the same elements.
    first = {id(parameter): name for name, parameter in model.state_dict(keep_vars=True).items() if name in stored}
    found = []
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in stored or id(parameter) not in first:
            continue
        place, there = stored[first[id(parameter)]], reverted_name(model, name, tuple(parameter.shape))
        if there in tensors:
            found.append(PublishedTensor(name=there, shape=place.shape, dtype=place.published, stored=place, start=0))
    return found
