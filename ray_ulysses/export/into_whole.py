"""A trained text decoder put back into its multimodal checkpoint: a copy of it in which the decoder's bytes are new."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ray_ulysses.engine.model_config import described_config
from ray_ulysses.engine.stored_weights import INDEX_FILE, UNREADABLE, FileTensor, file_tensors, model_without_data
from ray_ulysses.engine.text_part import keep_text_part
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.record import RECORD_FILE
from ray_ulysses.export.request import ExportRequest, WeightType
from ray_ulysses.export.stream import Stretch, Weights
from ray_ulysses.export.tensors import PublishedTensor, Stored, published_tensors, reverted_name, stored_tensors
from ray_ulysses.storage.atomic import write_all
from ray_ulysses.storage.regular import open_regular

if TYPE_CHECKING:
    from ray_ulysses.checkpoint.state import StateDescription
    from ray_ulysses.config import Config

_TYPES: Mapping[str, WeightType] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
# Weights that Transformers does not read would be those of the decoder as it was.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_MOST_NAMED = 3
_COPIED_BYTES = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedFile:
    """One file of the whole checkpoint.

    Attributes:
        name: Its name.
        num_bytes: Its size.
        tensors: Those of the decoder that lie in it.
        offsets: The first byte of each of them.
    """

    name: str
    num_bytes: int
    tensors: tuple[PublishedTensor, ...] = ()
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IntoWhole:
    """A decoder and the whole checkpoint that it goes into.

    Attributes:
        directory: The whole checkpoint.
        model: The decoder on the meta device.
        stored: Where each of its tensors lies in the run's checkpoint, by its name in the model.
        files: All files of the directory that are copied.
        left_out: What is not copied: folders, and weights that Transformers does not read.
        num_elements: Elements of all tensors of the whole.
        has_tokenizer: Whether the whole has a tokenizer.
    """

    directory: Path
    model: Any
    stored: dict[str, Stored]
    files: tuple[CopiedFile, ...]
    left_out: tuple[str, ...]
    num_elements: int
    has_tokenizer: bool


def refuse_options(request: ExportRequest) -> None:
    """Refuse what would change more of the whole checkpoint than its decoder.

    Raises:
        UserError: Names the option.
    """
    usual = ExportRequest(run_dir=request.run_dir)
    options = {"--dtype": "weights", "--max-shard-size": "max_shard_bytes", "--tokenizer": "tokenizer"}
    given = [option for option, name in options.items() if getattr(request, name) != getattr(usual, name)]
    if given:
        raise UserError(
            f"{', '.join(given)}: the run trained the text decoder of a multimodal checkpoint (model.part=text), which "
            "goes into a copy of the whole; its files, types and tokenizer stay as they are. Leave it out"
        )


def into_whole(config: Config, state: StateDescription) -> IntoWhole:
    """Find the place of every tensor of a decoder in the whole checkpoint of ``model.path``; writes nothing.

    Args:
        config: The run's configuration.
        state: What the run's checkpoint holds.

    Raises:
        UserError: The whole checkpoint can't be read.
        RunError: It is not the one of this run, or has no place for one of the decoder's tensors.
    """
    directory = Path(str(config.model.path)).expanduser()
    try:
        tensors = file_tensors(directory)
        model = model_without_data(described_config(config), config.model.part, tensors)
    except (*UNREADABLE, RuntimeError) as error:
        raise UserError(
            f"model.path={str(directory)!r}: the whole checkpoint that the decoder goes into can't be read ({error}); "
            "bring it back to where it was when the run was started"
        ) from error
    keep_text_part(model)
    # Transformers 5.23 ties no two tensors without data that are both stored.
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
                    num_bytes=path.stat().st_size,
                    tensors=tuple(one for _, one in own),
                    offsets=tuple(offset for offset, _ in own),
                )
            )
    return IntoWhole(
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
    """Return the decoder's tensors in the types that the files have, by the model's names and by those of the files."""
    stored = stored_tensors(model, state, "model", dtype)
    own_name = {place.key: name for name, place in stored.items()}
    published = [*published_tensors(model, stored), *_tied(model, stored, tensors)]
    problems = []
    for one in published:
        there = tensors.get(one.name)
        if there is None:
            problems.append(f"{one.name} is not there")
        elif there.shape != one.shape:
            problems.append(f"{one.name} is {list(there.shape)} there and {list(one.shape)} in the run")
        elif there.dtype not in _TYPES:
            problems.append(f"{one.name} is {there.dtype} there, and only F32, BF16 and F16 are written")
    if problems:
        more = f", and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise RunError(
            f"model.path={str(directory)!r}: the decoder can't be put into this checkpoint: "
            f"{'; '.join(problems[:_MOST_NAMED])}{more}; bring back the one that the run was started with"
        )
    types = {own_name[one.stored.key]: _TYPES[tensors[one.name].dtype] for one in published}
    in_type = {kind: stored_tensors(model, state, kind, dtype) for kind in sorted(set(types.values()))}
    settled = {name: in_type[types[name]][name] for name in stored}
    return settled, [
        replace(one, stored=settled[own_name[one.stored.key]], dtype=settled[own_name[one.stored.key]].published)
        for one in published
    ]


def _tied(model: Any, stored: Mapping[str, Stored], tensors: Mapping[str, FileTensor]) -> list[PublishedTensor]:
    """Return the second names of tied tensors that the files hold as well: the same elements go there."""
    first = {id(parameter): name for name, parameter in model.state_dict(keep_vars=True).items() if name in stored}
    found = []
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in stored or id(parameter) not in first:
            continue
        place, there = stored[first[id(parameter)]], reverted_name(model, name, tuple(parameter.shape))
        if there in tensors:
            found.append(PublishedTensor(name=there, shape=place.shape, dtype=place.published, stored=place, start=0))
    return found


def _copy(source: Path, target: Path) -> None:
    try:
        stream = open_regular(source)
    except OSError as error:
        raise RunError(
            f"model.path={str(source.parent)!r}: {source.name} can't be read ({error.strerror or error}); nothing was "
            "published. Bring the file back"
        ) from error
    with stream, target.open("xb") as copy:
        shutil.copyfileobj(stream, copy, _COPIED_BYTES)


def write_copies(
    folder: Path,
    directory: Path,
    files: Sequence[CopiedFile],
    weights: Weights,
    progress: Callable[[CopiedFile], None],
) -> None:
    """Copy the files of a whole checkpoint durably, and write the decoder's tensors over those that were there.

    Args:
        folder: Where to; the files must be new.
        directory: The whole checkpoint.
        files: Its files.
        weights: Where the decoder's elements come from.
        progress: Is told of each file of weights when it is there.

    Raises:
        RunError: The checkpoint, or a file of the whole, can't be read.
        OSError: A file can't be written.
    """
    for file in files:
        _copy(directory / file.name, folder / file.name)
        if not file.tensors:
            continue
        stretches = [
            Stretch(stored=one.stored, start=one.start, stop=one.start + one.num_elements) for one in file.tensors
        ]
        with (folder / file.name).open("r+b", buffering=0) as stream:
            places, left = iter(zip(file.tensors, file.offsets, strict=True)), 0
            for _, values in weights.read_ahead(stretches):
                if left == 0:
                    tensor, offset = next(places)
                    stream.seek(offset)
                    left = tensor.num_bytes
                content = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
                write_all(stream, content)
                left -= len(content)
            assert left == 0, f"{file.name}: {left} bytes of a tensor were not written"
            os.fsync(stream.fileno())
        progress(file)
