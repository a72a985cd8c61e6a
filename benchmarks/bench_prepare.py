"""MB of text prepared per CPU second, beside ``datasets.map``.

The texts are the standard library's sources, cut at lines into documents of a mean length, a JSON line each. The BPE
tokenizer is trained on them, with the pattern of Llama 3.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner import Benchmark, Record, columns, fresh, header, main, met, ratios, say, spread

LENGTHS = (300, 2_000)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def library_texts() -> Iterator[str]:
    """Yield the standard library's sources."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="ignore")


def documents(mean_length: int) -> Iterator[str]:
    """Yield stretches of whole lines of at least the mean length, or a little less at the end of a file."""
    for text in library_texts():
        held: list[str] = []
        size = 0
        for line in text.splitlines(keepends=True):
            held.append(line)
            size += len(line)
            if size >= mean_length:
                yield "".join(held)
                held, size = [], 0


def write_rows(path: Path, mean_length: int, num_bytes: int) -> int:
    """Write documents as JSON lines, each with a number that keeps repeated ones apart; return their bytes."""
    written = number = 0
    with path.open("w") as file:
        while written < num_bytes:
            for text in documents(mean_length):
                number += 1
                content = f"{number}\n{text}"
                file.write(json.dumps({"text": content}) + "\n")
                written += len(content.encode())
                if written >= num_bytes:
                    break
    return written


def train_tokenizer(folder: Path, vocabulary: int) -> Path:
    """Train a byte-level BPE tokenizer on the texts and store it with its end token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(library_texts(), trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def prepare(side: str, source: str, tokenizer: str) -> dict[str, Any]:
    """Prepare a file in this process by ours or the peer's way, without counting the imports."""
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    import ray_ulysses.data.prepare.preparation  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as out:
        before = time.process_time()
        {"ours": _ours, "peer": _peer}[side](Path(source), Path(out), tokenizer)
        return {"cpu_s": time.process_time() - before}


def _ours(source: Path, out: Path, tokenizer: str) -> None:
    from ray_ulysses.data.prepare.preparation import PrepareRequest
    from ray_ulysses.data.sources.units import SourceSpec
    from tests.local_preparation import prepare_local

    prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(source),)), out=out / "corpus", tokenizer=tokenizer))


def _peer(source: Path, out: Path, tokenizer: str) -> int:
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare rows of each length by both sides in turn."""
    # One thread, as a task of a preparation has one CPU.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    record: dict[str, Any] = {"speed": []}
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as temporary:
        root = Path(temporary)
        bpe = train_tokenizer(root / "bpe", options.vocabulary)
        for kind, tokenizer, part in (("bytes", "bytes", 1), ("BPE", str(bpe), 4)):
            for length in LENGTHS:
                source = root / f"rows-{length}.jsonl"
                size = write_rows(source, length, (options.megabytes // part) << 20)
                found: dict[str, list[float]] = {"peer": [], "ours": []}
                for _ in range(options.rounds):
                    for side, speeds in found.items():
                        speeds.append(size / 1e6 / fresh(prepare, side, source, tokenizer)["cpu_s"])
                record["speed"].append({"tokenizer": kind, "length": length, "bytes": size, **found})
                say(
                    f"{kind}, {length}: peer {median(found['peer']):.1f}, ours {median(found['ours']):.1f} MB per CPU s"
                )
    return record


def page(record: Record) -> str:
    """Return the page."""
    text = (
        "Megabytes of text per CPU second of one process, from JSON lines of the standard library's sources to tokens "
        "on the disk, in turn. Ours compares, checks and looks for duplicates; `datasets.map` (batches of 1,000, one "
        "process) loads the lines, tokenizes and writes its table. The BPE tokenizer has 32,000 tokens and the "
        "pattern of Llama 3. Imports are not counted."
    )
    speed = columns(
        record["speed"],
        tokenizer=lambda one: one["tokenizer"],
        mean_document=lambda one: f"{one['length']:,}",
        texts=lambda one: f"{one['bytes'] / 1e6:.0f} MB",
        datasets_map=lambda one: spread(one["peer"], "{:.1f}"),
        ours=lambda one: spread(one["ours"], "{:.1f}"),
        ratio=lambda one: spread(ratios(one["ours"], one["peer"])),
        at_least_1=lambda one: met(median(ratios(one["ours"], one["peer"])) >= 1),
    )
    return "\n\n".join([header("Preparing text", record, text), speed])


BENCHMARK = Benchmark(
    name="prepare",
    about="Preparing text, beside datasets.map.",
    measure=measure,
    page=page,
    packages=("numpy", "pyarrow", "datasets", "tokenizers"),
    hardware="one machine, files in its page cache",
    options={
        "megabytes": (40, "texts of a case; BPE takes a quarter"),
        "vocabulary": (32_000, "tokens of the BPE tokenizer"),
        "rounds": (3, "runs of each side, in turn"),
    },
    quick={"megabytes": 4, "vocabulary": 1_000, "rounds": 1},
)

if __name__ == "__main__":
    main(BENCHMARK)
