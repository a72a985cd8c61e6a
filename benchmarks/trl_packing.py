"""TRL's packing by ``bfd`` on a file of lengths, in an interpreter that has TRL: ``trl_packing.py FILE CONTEXT``.

``trl.pack_dataset`` is called as ``SFTTrainer`` calls it, with the default batch of ``datasets.map`` (1,000 documents),
in one process. A document is a list of bytes, all zero: an eighth of the ids of 64 bits that TRL moves, and no labels
beside them. Prints one JSON object.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time

import numpy as np
import pyarrow as pa
from datasets import Dataset, disable_progress_bars
from trl import pack_dataset

BATCH = 1000


def main() -> None:
    """Pack the documents of the file."""
    disable_progress_bars()
    lengths, context = np.load(sys.argv[1]).astype(np.int64), int(sys.argv[2])
    # Compiled code, imports and the writer's start-up are no part of the rate.
    _pack(lengths[:BATCH], context)
    start, cpu_start = time.perf_counter(), time.process_time()
    packed = _pack(lengths, context)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    kept = sum(
        int(batch["seq_lengths"].combine_chunks().flatten().to_numpy().sum())
        for batch in packed.select_columns(["seq_lengths"]).with_format("arrow").iter(10_000)
    )
    result = {
        "num_documents": int(lengths.size),
        "num_rows": len(packed),
        "tokens": int(lengths.sum()),
        "kept_tokens": kept,
        "wall_s": seconds,
        "cpu_s": cpu_seconds,
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "datasets", "pyarrow")},
    }
    sys.stdout.write(json.dumps(result) + "\n")


def _pack(lengths: np.ndarray, context: int) -> Dataset:
    return pack_dataset(_documents(lengths), context, "bfd")


def _documents(lengths: np.ndarray) -> Dataset:
    chunks = []
    for first in range(0, lengths.size, BATCH):
        offsets = np.concatenate([[0], np.cumsum(lengths[first : first + BATCH])]).astype(np.int32)
        tokens = pa.array(np.zeros(int(offsets[-1]), dtype=np.uint8))
        chunks.append(pa.ListArray.from_arrays(pa.array(offsets), tokens))
    return Dataset(pa.table({"input_ids": pa.chunked_array(chunks)}))


if __name__ == "__main__":
    main()
