"""What preparing text takes: MB per CPU second beside ``datasets.map``, and memory of one huge document.

The texts are the standard library's sources, cut at lines into documents of a mean length, a JSON line each. The BPE
tokenizer is trained on them, with the pattern of Llama 3.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fresh_process import run_fresh
from benchmarks.stored_result import (
    MIB,
    REPOSITORY,
    RESULTS,
    command,
    met,
    origin,
    provenance,
    say,
    spread,
    store,
    table,
)

SIDE = Path(__file__).with_name("prepare_sides.py")
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


def write_huge(path: Path, num_bytes: int) -> int:
    """Write one document as one JSON line; return its bytes."""
    text = "".join(library_texts())
    text = (text * (num_bytes // len(text) + 1))[:num_bytes]
    path.write_text(json.dumps({"text": text}) + "\n")
    return len(text.encode())


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


def side(name: str, source: Path, folder: Path, tokenizer: str, tree: Path) -> dict[str, Any]:
    """Run one side in a fresh process."""
    shutil.rmtree(folder, ignore_errors=True)
    # One thread, as a task of a preparation has one CPU.
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(tree), "TOKENIZERS_PARALLELISM": "false"}):
        return run_fresh([str(SIDE), name, str(source), str(folder), tokenizer], 900.0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of everything that the options ask for."""
    record: dict[str, Any] = {
        **provenance(("numpy", "pyarrow", "datasets", "tokenizers"), "one machine, files in its page cache"),
        "command": command("bench_prepare.py"),
        "load_before": os.getloadavg(),
        "speed": [],
        "huge": [],
    }
    trees = {"ours": REPOSITORY} | ({"before": options.before} if options.before else {})
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as temporary:
        root = Path(temporary)
        bpe = train_tokenizer(root / "bpe", 1_000 if options.quick else 32_000)
        for kind, tokenizer in (("bytes", "bytes"), ("BPE", str(bpe))):
            for length in LENGTHS:
                source = root / f"rows-{length}.jsonl"
                size = write_rows(
                    source, length, (options.megabytes if kind == "bytes" else options.megabytes // 4) << 20
                )
                found: dict[str, list[float]] = {}
                for _ in range(options.rounds):
                    for name in ("peer", *trees):
                        run = side(
                            "peer" if name == "peer" else "ours", source, root / "out", tokenizer,
                            trees.get(name, REPOSITORY),
                        )  # fmt: skip
                        found.setdefault(name, []).append(size / 1e6 / run["cpu_s"])
                record["speed"].append({"tokenizer": kind, "length": length, "bytes": size, "mb_per_cpu_s": found})
                say(f"{kind}, {length}: " + ", ".join(f"{name} {median(one):.1f}" for name, one in found.items()))
            source = root / "huge.jsonl"
            size = write_huge(source, options.huge if kind == "bytes" else options.huge // 10)
            for name, tree in trees.items():
                run = side("ours", source, root / "out", tokenizer, tree)
                record["huge"].append({"tokenizer": kind, "bytes": size, "side": name, **run})
                say(f"{kind}, {size / 1e6:.0f} MB at once: {name} {run['peak_rss_bytes'] / MIB:,.0f} MiB")
    return record | {"load_average": os.getloadavg()}


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    rows = []
    for one in record["speed"]:
        speeds = one["mb_per_cpu_s"]
        ratios = [ours / peer for ours, peer in zip(speeds["ours"], speeds["peer"], strict=True)]
        before = spread(speeds["before"], "{:.1f}") if "before" in speeds else "-"
        rows.append(
            [
                one["tokenizer"], f"{one['length']:,}", f"{one['bytes'] / 1e6:.0f} MB",
                spread(speeds["peer"], "{:.1f}"), before, spread(speeds["ours"], "{:.1f}"),
                spread(ratios), met(median(ratios) >= 1),
            ]
        )  # fmt: skip
    head = ("tokenizer", "mean document", "texts", "datasets.map", "before", "ours", "ratio", "at least 1")
    huge = [
        [
            one["tokenizer"], f"{one['bytes'] / 1e6:.0f} MB", one["side"], f"{one['peak_rss_bytes'] / MIB:,.0f} MiB",
            f"{one['peak_rss_bytes'] / one['bytes']:.1f}", f"{one['cpu_s']:.1f} s",
        ]
        for one in record["huge"]
    ]  # fmt: skip
    return "\n\n".join(
        [
            "# Preparing text",
            origin(record),
            "Megabytes of text per CPU second of one process, in turn: from JSON lines of the standard library's "
            "sources to tokens on the disk. Ours compares, checks and looks for duplicates; `datasets.map` (batches of "
            "1,000, one process) loads the lines, tokenizes and writes its table, and finds no duplicates. The BPE "
            "tokenizer has the pattern of Llama 3 and 32,000 tokens. Imports are not counted.",
            table(head, rows),
            "## One huge document",
            "Peak of resident memory of the whole process, imports included, for one JSON line.",
            table(("tokenizer", "line", "tree", "peak", "bytes per byte", "CPU"), huge),
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    parser = argparse.ArgumentParser(description="Preparing text, beside datasets.map.")
    parser.add_argument("--megabytes", type=int, default=40, help="texts per case; BPE: a quarter of it (default: 40)")
    parser.add_argument("--huge", type=int, default=200_000_000, help="bytes of the huge line; BPE: a tenth of it")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turn (default: 3)")
    parser.add_argument("--before", type=Path, help="another tree of this project, measured too")
    parser.add_argument("--quick", action="store_true", help="1 MB, one run each; writes nothing")
    parser.add_argument("--out", type=Path, help="folder for prepare.md and .json (default: results; --quick: none)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.megabytes, options.huge, options.rounds = 4, 4_000_000, 1
    elif options.out is None:
        options.out = RESULTS
    record = measure(options)
    page = markdown(record)
    say(page)
    if options.out is not None:
        say("\n".join(f"written: {path.name}" for path in store("prepare", page, record, options.out)))


if __name__ == "__main__":
    main()
