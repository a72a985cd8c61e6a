"""One preparation in a process of its own: ours, or ``datasets.map`` with the same tokenizer; prints its record.

It imports the ``ray_ulysses`` that ``PYTHONPATH`` names, so that an earlier tree can be measured beside this one.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any


def ours(source: Path, out: Path, tokenizer: str) -> int:
    """Prepare a corpus, checks and the search for duplicates included; return its tokens."""
    from ray_ulysses.data.prepare.preparation import PrepareRequest
    from ray_ulysses.data.sources.units import SourceSpec

    # Trees before 2026-11-26 have it in the package.
    is_here = importlib.util.find_spec("tests.local_preparation") is not None
    module = importlib.import_module("tests.local_preparation" if is_here else PrepareRequest.__module__)
    request = PrepareRequest(sources=SourceSpec(paths=(str(source),)), out=out / "corpus", tokenizer=tokenizer)
    return int(module.prepare_local(request).info.num_tokens)


def peer(source: Path, out: Path, tokenizer: str) -> int:
    """Tokenize by ``datasets.map`` in batches of 1,000 and write what it writes; return the tokens."""
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    if tokenizer == "bytes":

        def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            texts = (np.frombuffer(text.encode(), dtype=np.uint8) for text in batch["text"])
            return {"input_ids": [np.append(text.astype(np.uint16), np.uint16(256)) for text in texts]}
    else:
        from transformers import PreTrainedTokenizerFast

        loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
        end = loaded.eos_token_id

        def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            found = loaded(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
            return {"input_ids": [[*ids, end] for ids in found]}

    rows = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out / "cache"))
    found = rows.map(encode, batched=True, remove_columns=rows.column_names, cache_file_name=str(out / "tokens.arrow"))
    return sum(len(chunk.values) for chunk in found.data.column("input_ids").chunks)


def main() -> None:
    """Run the side that the arguments name, and print its record as one line of JSON."""
    side, source, out, tokenizer = sys.argv[1:]
    Path(out).mkdir(parents=True)
    # What both import is not counted.
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    import ray_ulysses.data.prepare.preparation  # noqa: F401

    before, start = time.process_time(), time.perf_counter()
    tokens = {"ours": ours, "peer": peer}[side](Path(source), Path(out), tokenizer)
    record = {"tokens": tokens, "cpu_s": time.process_time() - before, "seconds": time.perf_counter() - start}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            record["peak_rss_bytes"] = int(line.split()[1]) * 1024
    sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
