"""Computes a digest that identifies a stored model, without reading all of its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ray_ulysses.engine.load_weights import unreadable
from ray_ulysses.engine.stored_weights import UNREADABLE, file_tensors
from ray_ulysses.storage.hub import hub_folder

_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 16


def model_digest(path: str) -> str:
    """Return a digest of the model in a directory, or of the commit of a repository on the hub.

    For a directory, the digest covers ``config.json`` and each tensor's name, dtype, shape, and 4 KiB at 16 places of
    it. Training changes them: it changes nearly all elements of every tensor that it trains.

    Raises:
        UserError: The model can't be read.
    """
    folder = hub_folder(path, f"model.path={path!r}", ["config.json"], "correct the path")
    if not Path(path).expanduser().is_dir():
        # The cache names a snapshot's folder after its commit.
        return folder.name
    try:
        found = hashlib.sha256((folder / "config.json").read_bytes())
        for name, tensor in sorted(file_tensors(folder).items()):
            found.update(repr((name, tensor.dtype, tensor.shape)).encode())
            with (folder / tensor.file).open("rb") as stream:
                for place in sorted({tensor.num_bytes * number // _NUM_SAMPLES for number in range(_NUM_SAMPLES)}):
                    stream.seek(tensor.offset + place)
                    found.update(stream.read(min(_SAMPLE_BYTES, tensor.num_bytes - place)))
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    return found.hexdigest()[:32]
