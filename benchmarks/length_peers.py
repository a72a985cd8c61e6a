"""Readers of other projects of the same documents in the same order: what a row of 131,072 token ids takes of each.

Run as a script by a Python that has ``mosaicml-streaming``: ``FOLDER ROUNDS``, on what ``store`` has written.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROW_TOKENS = 131_072
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_UINT16 = 8

Read = Callable[[int], Any]


def store(folder: Path, tokens: Sequence[Any], num_rows: int) -> None:
    """Store documents, and a random order of as many as fill the rows, for all peers."""
    folder.mkdir(parents=True)
    lengths = np.array([one.size for one in tokens], dtype=np.int64)
    order = np.random.default_rng(0).permutation(lengths.size)
    order = order[: int(np.searchsorted(np.cumsum(lengths[order]), num_rows * ROW_TOKENS)) + 1]
    np.concatenate(tokens).astype(np.uint16).tofile(folder / "tokens.bin")
    np.savez(folder / "order.npz", lengths=lengths, order=order)


def documents(folder: Path) -> Iterator[Any]:
    """Yield the stored documents, uint16."""
    lengths = np.load(folder / "order.npz")["lengths"]
    tokens = np.fromfile(folder / "tokens.bin", dtype=np.uint16)
    start = 0
    for length in lengths.tolist():
        yield tokens[start : start + length]
        start += length


def row_seconds(folder: Path, read: Read, rounds: int) -> list[float]:
    """Return the CPU seconds per row of each round: documents in the order, joined as int64."""
    order = np.load(folder / "order.npz")["order"].tolist()
    found = []
    for _ in range(rounds):
        begin, num_tokens, held, size = time.process_time(), 0, [], 0
        for document in order:
            ids = read(document)
            held.append(ids)
            size += ids.size
            if size >= ROW_TOKENS:
                num_tokens += np.concatenate(held).astype(np.int64).size
                held, size = [], 0
        num_tokens += size
        found.append((time.process_time() - begin) * ROW_TOKENS / num_tokens)
    return found


def megatron(folder: Path) -> Read:
    """Write Megatron's ``.bin`` and ``.idx`` (``megatron/core/datasets/indexed_dataset.py``) and read as it does."""
    lengths = np.load(folder / "order.npz")["lengths"]
    with (folder / "megatron.idx").open("wb") as file:
        file.write(_MEGATRON_MAGIC + struct.pack("<Q", 1) + struct.pack("<B", _MEGATRON_UINT16))
        file.write(struct.pack("<QQ", lengths.size, lengths.size + 1))
        file.write(lengths.astype(np.int32).tobytes())
        file.write((2 * (np.cumsum(lengths) - lengths)).astype(np.int64).tobytes())
        file.write(np.arange(lengths.size + 1, dtype=np.int64).tobytes())
    with (folder / "megatron.idx").open("rb") as file:
        assert file.read(9) == _MEGATRON_MAGIC and struct.unpack("<QB", file.read(9)) == (1, _MEGATRON_UINT16)
        (count, _) = struct.unpack("<QQ", file.read(16))
        offset = file.tell()
    index = memoryview(np.memmap(folder / "megatron.idx", mode="r", order="C"))
    sizes = np.frombuffer(index, dtype=np.int32, count=count, offset=offset)
    pointers = np.frombuffer(index, dtype=np.int64, count=count, offset=offset + sizes.nbytes)
    data = memoryview(np.memmap(folder / "tokens.bin", mode="r", order="C"))

    def read(document: int) -> Any:
        return np.frombuffer(data, dtype=np.uint16, count=sizes[document], offset=pointers[document])

    return read


def hugging_face(folder: Path) -> Read:
    """Save a ``datasets`` table of the documents and read it as NumPy arrays."""
    import datasets

    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("uint16"))})
    rows = [{"input_ids": one} for one in documents(folder)]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(folder / "datasets"))
    found = datasets.load_from_disk(str(folder / "datasets")).with_format("numpy")
    return lambda document: found[document]["input_ids"]


def mosaic(folder: Path) -> Read:
    """Write Mosaic's shards and read them by number."""
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder / "mosaic"), columns={"tokens": "ndarray:uint16"}) as writer:
        for one in documents(folder):
            writer.write({"tokens": np.ascontiguousarray(one)})
    found = StreamingDataset(local=str(folder / "mosaic"), shuffle=False, batch_size=1)
    return lambda document: found[document]["tokens"]


def main() -> None:
    """Time Mosaic's reader, and print its seconds as one line of JSON."""
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    read = mosaic(folder)
    expected = next(iter(documents(folder)))
    assert np.array_equal(read(0), expected)
    sys.stdout.write("\n" + json.dumps({"seconds": row_seconds(folder, read, rounds)}) + "\n")


if __name__ == "__main__":
    main()
