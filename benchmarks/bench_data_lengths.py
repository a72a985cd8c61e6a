"""CPU time per row by document length: our reader beside a flat file, ``datasets``, Megatron's and Mosaic's files."""

from __future__ import annotations

import argparse
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.runner import NOT_MEASURED, Benchmark, Record, columns, fresh, header, main, met, ratios, say, spread

ROW_TOKENS = 131_072
LENGTHS = (100, 300, 1_000, 20_000)
MOST_RATIO = 2.0
PEERS = ("datasets", "Mosaic", "Megatron")
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_UINT16 = 8

Read = Callable[[int], Any]


class FlatStore:
    """The tokens of a corpus in one memory-mapped file, without checksums: the least that reading can take."""

    has_weights = False

    def __init__(self, corpus: Any, path: Path) -> None:
        self._starts = np.concatenate([[0], np.cumsum(corpus.lengths, dtype=np.int64)]).tolist()
        with path.open("wb") as file:
            for document, length in enumerate(corpus.lengths.tolist()):
                corpus.read(document, 0, length).astype(corpus.info.dtype).tofile(file)
        self._tokens = np.memmap(path, dtype=corpus.info.dtype, mode="r")

    def read(self, document: int, start: int, length: int) -> Any:
        """Return ``length`` tokens of a document from ``start`` on."""
        first = self._starts[document] + start
        return self._tokens[first : first + length].astype(np.int64)

    def fetch(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Do nothing."""

    def label_weights(self, document: int, first: int, last: int) -> None:
        """Return None: every token may be a label, of weight 1."""


def our_seconds(corpus: Any, plan: Any, flat_file: Path, num_rows: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds per row of each round, from our files and the flat one in turn, after comparing rows."""
    from ray_ulysses.data.corpus.corpus import Corpus
    from ray_ulysses.data.plan.corpus_set import CorpusSet
    from ray_ulysses.data.read.reader import RowReader

    flat, rows = RowReader(FlatStore(corpus, flat_file), plan), range(min(num_rows, plan.num_rows))
    found: dict[str, list[float]] = {"first": [], "again": [], "flat": []}
    for _ in range(rounds):
        # A reader that has read nothing yet compares every block with its checksum.
        ours = RowReader(CorpusSet(plan.newest.sources, [Corpus.open(corpus.path)]), plan)
        for name, reader in (("first", ours), ("again", ours), ("flat", flat)):
            begin = time.process_time()
            for row in rows:
                reader.read("train", row, 0, 1)
            found[name].append((time.process_time() - begin) / len(rows))
        one, other = (reader.read("train", 0, 0, 1) for reader in (ours, flat))
        for array in ("input_ids", "labels", "position_ids"):
            assert np.array_equal(getattr(one, array), getattr(other, array))
    return found


def store_documents(folder: Path, tokens: Sequence[Any], num_rows: int) -> None:
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


def peer_seconds(peer: str, folder: str, rounds: int) -> list[float]:
    """Return a peer's CPU seconds per row of each round, after comparing a document."""
    make = {"datasets": hugging_face, "Megatron": megatron, "Mosaic": mosaic}[peer]
    read = make(Path(folder))
    assert np.array_equal(read(0), next(iter(documents(Path(folder)))))
    return row_seconds(Path(folder), read, rounds)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each length."""
    from benchmarks.bench_data import plan_rows, random_documents
    from ray_ulysses.data.plan.plan_files import load_plan
    from ray_ulysses.data.prepare.preparation import PrepareRequest
    from ray_ulysses.data.sources.units import SourceSpec
    from tests.local_preparation import prepare_local

    found = []
    with tempfile.TemporaryDirectory(prefix="bench-lengths-") as temporary:
        for length in LENGTHS:
            folder = Path(temporary) / str(length)
            texts = random_documents(folder, length, 3 * options.rows * ROW_TOKENS)
            spec = SourceSpec(paths=(str(texts),))
            corpus = prepare_local(PrepareRequest(sources=spec, out=folder / "corpus", duplicates="keep"))
            plan = load_plan(plan_rows(str(corpus.path), folder / "plan"))
            one = our_seconds(corpus, plan, folder / "flat.bin", options.rows, options.rounds)
            tokens = [corpus.read(number, 0, int(size)) for number, size in enumerate(corpus.lengths.tolist())]
            store_documents(folder / "peers", tokens, options.rows)
            for peer in PEERS:
                python = {"python": options.mosaic_python} if peer == "Mosaic" else {}
                if peer != "Mosaic" or options.mosaic_python:
                    one[peer] = fresh(peer_seconds, peer, folder / "peers", options.rounds, **python)
            found.append({"length": length, **one})
            say(f"documents of {length:,} tokens: {min(one['first']) / min(one['flat']):.1f} times the flat file")
    return {"found": found}


def page(record: Record) -> str:
    """Return the page."""
    text = (
        f"CPU time of one process per row of {ROW_TOKENS:,} tokens, by mean document length; documents are shuffled "
        "and packed as in training. **first** is a reader that has read nothing yet and compares each block with its "
        "checksum; **again** the same rows once more. **flat** is our reader on one memory-mapped file of the same "
        "tokens, without checksums. The peers read the same documents by number, in a random order, and join them; "
        "they give ids alone, ours gives labels and positions too. Mosaic runs in an environment of its own."
    )

    def ms(name: str) -> Callable[[Record], str]:
        return lambda one: spread([1e3 * s for s in one[name]], "{:.1f}") + " ms" if name in one else NOT_MEASURED

    def ratio(one: Record, name: str) -> float:
        return float(median(ratios(one[name], one["flat"])))

    lengths = columns(
        record["found"],
        mean_document=lambda one: f"{one['length']:,}",
        first=ms("first"),
        again=ms("again"),
        flat=ms("flat"),
        ratios=lambda one: f"{ratio(one, 'first'):.1f}, {ratio(one, 'again'):.1f}",
        at_most_2=lambda one: met(max(ratio(one, "first"), ratio(one, "again")) <= MOST_RATIO),
        **{peer: ms(peer) for peer in PEERS},
    )
    return "\n\n".join([header("Rows by document length", record, text), lengths])


BENCHMARK = Benchmark(
    name="data_lengths",
    about="CPU time per row by document length, beside other projects' files.",
    measure=measure,
    page=page,
    packages=("numpy", "pyarrow", "datasets"),
    hardware="one machine, files in its page cache",
    options={
        "rows": (8, "rows"),
        "rounds": (3, "rounds"),
        "mosaic_python": (None, "an interpreter that has mosaicml-streaming"),
    },
    quick={"rows": 2, "rounds": 1},
)

if __name__ == "__main__":
    main(BENCHMARK)
