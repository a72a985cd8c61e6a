"""Resume by skipping, with ``datasets``: ``skip_resume.py FOLDER skip|state COUNT``; prints one JSON object.

``skip`` makes a streamed data set and skips the first documents; ``state`` gives it the state that an iterator had
after them (made by the first call, which goes there document by document).
"""

from __future__ import annotations

import json
import os
import sys
import time

_STARTED = time.perf_counter()

from pathlib import Path  # noqa: E402

from datasets import IterableDataset, load_dataset  # noqa: E402

_IMPORTED = time.perf_counter()


def main() -> None:
    """Time the first document after the skipped ones."""
    folder, way, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    start = time.perf_counter()
    dataset = _open(folder)
    if way == "skip":
        first = next(iter(dataset.skip(count)))
    else:
        state = folder / f"state-{count}.json"
        if not state.exists():
            state.write_text(json.dumps(_state_after(_open(folder), count)))
            start = time.perf_counter()
            dataset = _open(folder)
        dataset.load_state_dict(json.loads(state.read_text()))
        first = next(iter(dataset))
    seconds = time.perf_counter() - start
    result = {"seconds": seconds, "import_s": _IMPORTED - _STARTED, "document": first["number"]}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    # datasets 5.2 with pyarrow 25 aborts in the interpreter's end when a stream is left half-way.
    os._exit(0)


def _open(folder: Path) -> IterableDataset:
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    return load_dataset("parquet", data_files=files, split="train", streaming=True)


def _state_after(dataset: IterableDataset, count: int) -> dict:
    iterator = iter(dataset)
    for _ in range(count):
        next(iterator)
    return dataset.state_dict()


if __name__ == "__main__":
    main()
