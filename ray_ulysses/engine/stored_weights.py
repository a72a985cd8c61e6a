"""The tensors of a model directory as they lie in its files, and the model that Transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ray_ulysses.engine.text_part import Part, model_class

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
"""What reading a damaged model directory raises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileTensor:
    """Where a tensor lies in the files of a model directory.

    Attributes:
        file: Name of the file.
        dtype: Its type, as safetensors names it: ``BF16``.
        shape: Its shape.
        offset: Its first byte in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def file_tensors(directory: Path) -> dict[str, FileTensor]:
    """Return the tensors that Transformers reads from a model directory, by their names there; reads no data.

    Raises:
        One of `UNREADABLE`: The directory holds no safetensors, or they are damaged.
    """
    found = {}
    for name in _weight_files(directory):
        # Opened by the library first, which checks the header.
        with safe_open(directory / name, framework="pt"), (directory / name).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for tensor, fields in header.items():
            if tensor != "__metadata__":
                found[tensor] = FileTensor(
                    file=name,
                    dtype=fields["dtype"],
                    shape=tuple(fields["shape"]),
                    offset=8 + length + fields["data_offsets"][0],
                )
    return found


def _weight_files(directory: Path) -> list[str]:
    if (directory / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    index = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))
    # A name only: no file outside of the directory is read.
    return sorted({Path(name).name for name in index["weight_map"].values()})


def model_without_data(hf_config: Any, part: Part, tensors: Mapping[str, FileTensor]) -> Any:
    """Return what ``from_pretrained`` makes of the tensors of a directory, on the meta device and whole.

    It knows how the names in the files became its own, which ``save_pretrained`` would revert.

    Args:
        hf_config: The model's ``PreTrainedConfig``; left as it is.
        part: Which part of it is trained.
        tensors: What the files hold.
    """
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    kind = model_class(hf_config, part)._model_mapping[type(hf_config)]
    with without_progress_bar():
        return kind.from_pretrained(None, config=deepcopy(hf_config), state_dict=shapes, device_map={"": "meta"})


def settle_tie(hf_config: Any, part: Part, directory: Path) -> None:
    """Untie the output head in a configuration whose stored weights have a head other than the embedding.

    Transformers 5.23 does so while it loads. Under ZeRO-3 it compares empty placeholders there, which are equal, and
    would drop the head in silence.

    Args:
        hf_config: The model's ``PreTrainedConfig``.
        part: Which part of it is trained.
        directory: Where its weights lie; where they can't be read, loading them says so.
    """
    if not getattr(hf_config, "tie_word_embeddings", False):
        return
    text = hf_config.get_text_config(decoder=True)
    try:
        tensors = file_tensors(directory)
        if sum(tensor.shape == (text.vocab_size, text.hidden_size) for tensor in tensors.values()) < 2:
            return
        model = model_without_data(hf_config, part, tensors)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        # Transformers ties no two tensors without data that are both stored.
        if head is embedding or torch.equal(*(_read(directory, model, tensors, one) for one in (embedding, head))):
            return
    except (*UNREADABLE, RuntimeError):
        return
    hf_config.tie_word_embeddings = False


def _read(directory: Path, model: Any, tensors: Mapping[str, FileTensor], parameter: torch.Tensor) -> torch.Tensor:
    from transformers.core_model_loading import revert_weight_conversion

    own = next(name for name, one in model.named_parameters(remove_duplicate=False) if one is parameter)
    (name,) = revert_weight_conversion(model, {own: parameter})
    with safe_open(directory / tensors[name].file, framework="pt") as file:
        found: torch.Tensor = file.get_tensor(name)
    return found


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Keep Transformers from drawing a bar for what takes no time."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
