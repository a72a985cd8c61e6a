"""Reads the tensor layout of a model directory, and builds the corresponding Transformers model on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ray_ulysses.config.objective import Task
from ray_ulysses.engine.text_part import Part, model_class
from ray_ulysses.errors import UserError
from ray_ulysses.storage.hub import hub_refusal
from ray_ulysses.validation import parse_json

SOURCES = (
    "use a directory with config.json, a hub ID that is reachable from this machine, or an inline model.config with "
    "a model_type"
)
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
"""Exceptions that a damaged model directory can raise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileTensor:
    """The location of a tensor in a model directory."""

    file: str
    dtype: str
    """Dtype in safetensors notation, such as ``BF16``."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor's first byte in the file."""
    num_bytes: int


def file_tensors(directory: Path) -> dict[str, FileTensor]:
    """Return the tensors that Transformers would read from a model directory, by name, without reading tensor data.

    Raises:
        One of `UNREADABLE`: The directory has no safetensors files, or one of them is damaged.
    """
    found = {}
    for name in _weight_files(directory):
        # safe_open validates the header.
        with safe_open(directory / name, framework="pt"), (directory / name).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(length))
        for tensor, fields in header.items():
            if tensor != "__metadata__":
                start, stop = fields["data_offsets"]
                found[tensor] = FileTensor(
                    file=name,
                    dtype=fields["dtype"],
                    shape=tuple(fields["shape"]),
                    offset=8 + length + start,
                    num_bytes=stop - start,
                )
    return found


def open_tensors(directory: Path) -> dict[str, Any]:
    """Return the tensors that Transformers would read from a model directory, by name, as safetensors slices.

    Tensor data is read, through a memory map, when a slice is indexed.

    Raises:
        One of `UNREADABLE`: The directory has no safetensors files, or one of them is damaged.
    """
    files: Iterator[Any] = (safe_open(directory / name, framework="pt") for name in _weight_files(directory))
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


def _weight_files(directory: Path) -> list[str]:
    if (directory / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    index = parse_json((directory / INDEX_FILE).read_bytes())
    # Keep only the last path component, so that the index can't refer to files outside the directory.
    return sorted({Path(name).name for name in index["weight_map"].values()})


def model_without_data(hf_config: Any, part: Part, task: Task, tensors: Mapping[str, FileTensor]) -> Any:
    """Return the model that ``from_pretrained`` would build from a directory's tensors, on the meta device.

    The model records how tensor names were converted on loading, so that ``save_pretrained`` can convert them back.
    """
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    kind = model_class(hf_config, part, task)._model_mapping[type(hf_config)]
    with without_progress_bar():
        return kind.from_pretrained(None, config=deepcopy(hf_config), state_dict=shapes, device_map={"": "meta"})


def resolve_tie(hf_config: Any, part: Part, task: Task, path: str) -> None:
    """Untie the output head in a configuration if the stored head differs from the embedding.

    Transformers 5.23 does the same while loading. Under ZeRO-3, however, Transformers would compare empty placeholders,
    which are equal, and silently drop the head. If a directory's weights can't be read, this function does nothing, and
    the error is raised when the weights are loaded.

    Raises:
        UserError: A hub ID's weights can't be downloaded. Without this error, ranks could disagree on untying.
    """
    if task not in ("causal_lm", "masked_lm") or not getattr(hf_config, "tie_word_embeddings", False):
        return
    text = hf_config.get_text_config(decoder=True)
    directory = weights_directory(path)
    if directory is None:
        return
    try:
        tensors = file_tensors(directory)
        if sum(tensor.shape == (text.vocab_size, text.hidden_size) for tensor in tensors.values()) < 2:
            return
        model = model_without_data(hf_config, part, task, tensors)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        # On the meta device, Transformers does not tie the two tensors if both are stored.
        if head is embedding or torch.equal(*(_read(directory, model, tensors, one) for one in (embedding, head))):
            return
    except (*UNREADABLE, RuntimeError):
        return
    hf_config.tie_word_embeddings = False


def weights_directory(path: str) -> Path | None:
    """Return the directory of ``model.path``'s weights, downloaded if needed, or None if there are no safetensors."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    try:
        found = _fetched(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path={path!r}: the weights can't be downloaded ({error}); use a directory with config.json and "
            "safetensors files, or a hub ID that is reachable from this machine. Set HF_HUB_OFFLINE=1 to use only "
            "cached files"
        ) from error
    return None if found is None else Path(found).parent


def _fetched(path: str) -> str | None:
    """Download a hub ID's safetensors, and return the first file's path, or None if there are no safetensors.

    Raises:
        OSError: The hub is unreachable, and the cache does not show whether the files exist.
    """
    from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from transformers.utils.hub import get_checkpoint_shard_files

    refused = hub_refusal(path)
    away: OSError | None = None
    # Try the single file first, like Transformers. Its `cached_file` is not used, because that function can't
    # distinguish an unreachable hub from a missing file.
    for name in (SINGLE_FILE, INDEX_FILE):
        try:
            found = hf_hub_download(path, name, local_files_only=refused is not None)
        except LocalEntryNotFoundError as error:
            # The cache may record that the file does not exist on the hub.
            away = away if try_to_load_from_cache(path, name) is _CACHED_NO_EXIST else error
        except EntryNotFoundError:
            continue
        else:
            if name == INDEX_FILE:
                get_checkpoint_shard_files(path, found, local_files_only=refused is not None)
            return str(found)
    if away is not None and not constants.HF_HUB_OFFLINE:
        raise OSError((refused or "").removeprefix(", and ") or str(away)) from away
    return None


def _read(directory: Path, model: Any, tensors: Mapping[str, FileTensor], parameter: torch.Tensor) -> torch.Tensor:
    from transformers.core_model_loading import revert_weight_conversion

    own = next(name for name, one in model.named_parameters(remove_duplicate=False) if one is parameter)
    (name,) = revert_weight_conversion(model, {own: parameter})
    with safe_open(directory / tensors[name].file, framework="pt") as file:
        found: torch.Tensor = file.get_tensor(name)
    return found


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Disable Transformers' progress bars within a block."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
