from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare import preparation, unit_writer
from ray_ulysses.data.prepare.merge import entropy_nats
from ray_ulysses.data.prepare.preparation import LOCK_FILE, PrepareProgress, PrepareRequest, directory_lock
from ray_ulysses.data.prepare.unit_writer import UnitResult, write_unit
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec, Unit
from ray_ulysses.data.tokenize import dividing
from ray_ulysses.data.tokenize.encoding import DocumentEncoder, load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.atomic import TEMPORARY_PREFIX
from ray_ulysses.storage.retry import RetryPolicy
from tests import local_preparation
from tests.local_preparation import prepare_local, preparing
from tests.unit.data.corpora import begin, check_content, varied_texts, write_texts
from tests.unit.data.tokenize.test_encoding import bos_tokenizer
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer

BYTES = load_encoder("bytes")
TEXTS = varied_texts(10)


def source(path: Path, **options: Any) -> SourceSpec:
    return SourceSpec(paths=(str(path),), **options)


def request_of(tmp_path: Path, texts: list[str], **changes: Any) -> PrepareRequest:
    sources = write_texts(tmp_path / "texts", texts)
    return replace(PrepareRequest(sources=source(sources), out=tmp_path / "corpus", unit_bytes=1000), **changes)


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def files_of(corpus: Corpus) -> set[str]:
    shards = {f"shards/{shard.name}" for shard in corpus.info.shards}
    return {"corpus.json", "documents.index", "documents.parquet", "quarantine.jsonl", *shards}


def pending(request: PrepareRequest) -> list[int]:
    return [unit.index for unit in begin(request).pending]


def test_every_document_comes_back_byte_for_byte_and_progress_is_exact(tmp_path: Path) -> None:
    texts, seen = varied_texts(60), list[PrepareProgress]()
    corpus = prepare_local(request_of(tmp_path, texts), seen.append)
    assert len(corpus.info.shards) > 5
    assert corpus.num_documents == 60
    for number, text in enumerate(texts):
        assert corpus.read(number, 0, int(corpus.lengths[number])).tolist() == [*text.encode(), 256]
        assert corpus.source(number) == (str(tmp_path / "texts" / f"text-{number:04d}.txt"), 0, "")
    assert corpus.info.num_tokens == sum(len(text.encode()) + 1 for text in texts)
    assert (corpus.info.max_token_id, corpus.info.dtype) == (256, "uint16")
    assert snapshot(corpus.path).keys() == files_of(corpus)
    assert [one.units_done for one in seen] == list(range(1, seen[0].num_units + 1))
    assert (seen[-1].documents, seen[-1].tokens) == (corpus.num_documents, corpus.info.num_tokens)
    total = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert {one.num_bytes for one in seen} == {total}
    assert [one.bytes_done for one in seen] == sorted({one.bytes_done for one in seen})
    assert seen[0].bytes_done < seen[-1].bytes_done == total


def test_the_entropy_is_computed_from_the_bytes(tmp_path: Path) -> None:
    corpus = prepare_local(request_of(tmp_path, ["aab", "abb"]))
    assert corpus.info.byte_unigram_nats == pytest.approx(math.log(2))
    tokens = -(2 * 3 / 8 * math.log(3 / 8) + 2 / 8 * math.log(2 / 8))
    assert corpus.info.token_unigram_nats == pytest.approx(tokens)
    assert entropy_nats(np.array([5, 0, 0])) == 0.0


def test_repeated_texts_are_left_out_named_and_not_counted(tmp_path: Path) -> None:
    texts = ["one", "two " * 300, "one", "three", "two " * 300]
    kept = prepare_local(request_of(tmp_path / "a", texts))
    plain = prepare_local(request_of(tmp_path / "b", ["one", "two " * 300, "three"]))
    assert kept.lengths.tolist() == plain.lengths.tolist()
    assert kept.info.byte_unigram_nats == pytest.approx(plain.info.byte_unigram_nats)
    lines = [json.loads(line) for line in (kept.path / "quarantine.jsonl").read_text().splitlines()]
    assert [(Path(line["source"]).name, Path(line["reason"]).name) for line in lines] == [
        ("text-0002.txt", "text-0000.txt"),
        ("text-0004.txt", "text-0001.txt"),
    ]
    assert kept.info.num_quarantined == 2
    assert kept.read(2, 0, 5).tolist() == list(b"three")
    both = prepare_local(request_of(tmp_path / "c", texts, duplicates="keep"))
    assert both.num_documents == 5 and both.fingerprint != kept.fingerprint


class Killed(BaseException):
    """Stands for the death of the process."""


@pytest.mark.parametrize("at", ["unit", "unit-00003.quarantine.jsonl", "unit-00003.json"])
def test_a_killed_preparation_is_resumed_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    request, seen = request_of(tmp_path, varied_texts(40)), list[PrepareProgress]()
    (tmp_path / "texts" / "link").symlink_to("nowhere")
    write_text = unit_writer.write_text

    def dying(out: Path, unit: Unit, encoder: DocumentEncoder, retry: RetryPolicy) -> UnitResult:
        if at == "unit" and unit.index == 3:
            raise Killed
        return write_unit(out, unit, encoder, retry)

    def dying_at_a_file(path: Path, text: str, within: Path) -> None:
        if path.name == at:
            raise Killed
        write_text(path, text, within)

    with monkeypatch.context() as patch:
        patch.setattr(local_preparation, "write_unit", dying)
        patch.setattr(unit_writer, "write_text", dying_at_a_file)
        with pytest.raises(Killed):
            prepare_local(request)
    # A dead process removes neither of these files.
    (request.out / LOCK_FILE).touch()
    (request.out / "shards" / f"{TEMPORARY_PREFIX}3").write_text("torn")
    with pytest.raises(UserError, match="the preparation is not finished"):
        Corpus.open(request.out)
    assert pending(request)[0] == 3
    corpus = prepare_local(request, seen.append)
    assert corpus.fingerprint == prepare_local(replace(request, out=tmp_path / "unbroken")).fingerprint
    check_content(corpus)
    assert snapshot(request.out).keys() == files_of(corpus)
    assert (seen[0].units_done, seen[-1].rejected) == (4, 1)
    assert (seen[-1].documents, seen[-1].bytes_done) == (corpus.num_documents, seen[-1].num_bytes)


def test_files_that_are_removed_before_a_resume_leave_no_shard_behind(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(40))
    started = begin(request)
    for unit in started.units[:-1]:
        write_unit(request.out, unit, BYTES)
    for number in range(15, 40):
        (tmp_path / "texts" / f"text-{number:04d}.txt").unlink()
    corpus = prepare_local(request)
    assert corpus.num_documents == 15
    assert len(corpus.info.shards) < len(started.units) - 1
    assert snapshot(request.out).keys() == files_of(corpus)


def test_a_process_that_is_killed_after_its_commit_leaves_nothing_for_good(tmp_path: Path) -> None:
    request = request_of(tmp_path, TEXTS)
    program = (
        "import os, shutil, sys; from pathlib import Path; from ray_ulysses.data.prepare.preparation import *\n"
        "from tests.local_preparation import prepare_local\n"
        "shutil.rmtree = lambda *_, **__: os._exit(9)\n"
        "spec = SourceSpec(paths=(sys.argv[1] + '/texts',))\n"
        "prepare_local(PrepareRequest(sources=spec, out=Path(sys.argv[1]) / 'corpus', unit_bytes=1000))"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[4], check=False)
    assert killed.returncode == 9
    assert (request.out / "corpus.json").is_file() and (request.out / LOCK_FILE).is_file()
    (request.out / "shards" / f"{TEMPORARY_PREFIX}1").write_text("torn")
    (request.out / "shards" / "shard-00077.tokens").write_text("of a file that is gone")
    with directory_lock(request.out):
        # Another process has the lock and may be removing the files.
        assert prepare_local(request).num_documents == 10
    assert (request.out / "units").is_dir()
    assert begin(request).is_complete
    assert snapshot(request.out).keys() == files_of(Corpus.open(request.out))


def test_a_directory_that_is_being_prepared_or_can_not_be_made_is_refused(tmp_path: Path) -> None:
    request = request_of(tmp_path, TEXTS)
    with preparing(request):
        before = snapshot(request.out)
        for again in (prepare_local, begin):
            with pytest.raises(UserError, match=r"out=.*corpus: is already being prepared by process \d+ on host"):
                again(request)
        assert snapshot(request.out) == before
    assert prepare_local(request).num_documents == 10
    assert not (request.out / LOCK_FILE).exists()
    with pytest.raises(UserError, match="can't be written"):
        prepare_local(replace(request, out=tmp_path / "texts" / "text-0000.txt" / "out"))


def test_a_preparation_that_waited_finds_the_finished_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(tmp_path, TEXTS)
    lock = preparation.directory_lock

    @contextmanager
    def late(out: Path, retry: RetryPolicy) -> Iterator[None]:
        monkeypatch.undo()
        prepare_local(request)
        with lock(out, retry=retry):
            yield

    monkeypatch.setattr(preparation, "directory_lock", late)
    assert begin(request).is_complete


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    request = request_of(tmp_path, TEXTS)
    other = replace(request, sources=source(write_texts(tmp_path / "other", ["x"])))

    def refuse(rule: str, *requests: PrepareRequest) -> None:
        before = snapshot(request.out)
        for one in requests:
            with pytest.raises(UserError, match=rf"^--out={request.out}: {rule}"):
                prepare_local(one)
        assert snapshot(request.out) == before

    request.out.mkdir()
    (request.out / "thesis.tex").write_text("precious")
    refuse("is not empty", request)
    (request.out / "thesis.tex").unlink()
    # A preparation that was killed before its first shard does not block another one.
    begin(replace(request, unit_bytes=2000))
    assert (request.out / "preparation.json").is_file()
    write_unit(request.out, begin(request).units[0], BYTES)
    refuse("contains an unfinished preparation", replace(request, unit_bytes=2000), other)
    corpus, before = prepare_local(request), snapshot(request.out)
    assert begin(request).is_complete and prepare_local(request).fingerprint == corpus.fingerprint
    assert snapshot(request.out) == before
    (tmp_path / "texts" / "text-0003.txt").write_text("changed")
    refuse("contains a corpus made from other sources", request, other)


@pytest.mark.parametrize(
    ("name", "content", "options", "refused"),
    [
        ("a.txt", b"one", {"pattern": "*.py"}, "no file matches --pattern"),
        ("pipe", None, {}, r"all 1 files were left out \(the first: .*/pipe, not a regular file\)"),
        ("rows.jsonl", b"\n", {}, "the files are empty"),
        ("a.txt", b"\xff", {}, r"1 were left out \(not UTF-8 \(1\)\). The first is .*a\.txt"),
        ("bad.parquet", b"PAR1 not really", {}, r"bad\.parquet: the Parquet file can't be read"),
        ("rows.json", b'{"text": ""}', {"fields": RowFields(text="text")}, "no usable document"),
        ("rows.json", b'[{"text": "one"}', {"fields": RowFields(text="text")}, "can't be read"),
    ],
)
def test_a_preparation_without_documents_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, name: str, content: bytes | None, options: dict[str, Any], refused: str
) -> None:
    request = request_of(tmp_path, ["one"], out=tmp_path / "new" / "corpus")
    (tmp_path / "in").mkdir()
    if content is None:
        os.mkfifo(tmp_path / "in" / name)
    else:
        (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(UserError, match=refused):
        prepare_local(replace(request, sources=source(tmp_path / "in", **options)))
    assert not (tmp_path / "new").exists()
    request.out.mkdir(parents=True)
    with suppress(UserError):
        prepare_local(replace(request, sources=source(tmp_path / "in", **options)))
    assert list(request.out.iterdir()) == []
    with pytest.raises(UserError, match=r"tokenizer=.*nowhere: no such directory"):
        prepare_local(replace(request, tokenizer=str(tmp_path / "nowhere")))
    prepare_local(replace(request, out=tmp_path / "other"))
    with pytest.raises(UserError, match="no usable document"):
        prepare_local(replace(request, without=(str(tmp_path / "other"),)))
    assert list(request.out.iterdir()) == []
    assert prepare_local(request).num_documents == 1


@pytest.mark.parametrize("error", [RunError("the Ray cluster can't be reached"), KeyboardInterrupt()])
def test_a_preparation_that_ends_before_its_first_shard_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def written_then_failed(*arguments: Any) -> UnitResult:
        write_unit(*arguments)
        raise error

    request = request_of(tmp_path, ["one"], out=tmp_path / "new" / "corpus")
    with pytest.raises(type(error)), preparing(request):
        raise error
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(local_preparation, "write_unit", written_then_failed)
    with pytest.raises(type(error)):
        prepare_local(request)
    assert len(begin(request).done) == 1, "a finished unit was deleted"


def test_a_tokenizer_may_be_gone_once_the_texts_are_read(tmp_path: Path) -> None:
    tokenizer = fast_tokenizer(tmp_path / "tokenizer")
    request = request_of(tmp_path, ["the quick brown fox"], tokenizer=str(tokenizer))
    expected = prepare_local(replace(request, out=tmp_path / "other"))
    corpus = prepare_local(request, progress=lambda _: shutil.rmtree(tokenizer))
    assert corpus.fingerprint == expected.fingerprint
    assert corpus.info.byte_unigram_nats is None and corpus.info.token_unigram_nats is None


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    request = request_of(tmp_path, ["one"])
    unit = begin(request).units[0]
    (tmp_path / "texts" / "text-0000.txt").write_text("other")
    with pytest.raises(UserError, match=r"text-0000\.txt: changed while it was being prepared"):
        write_unit(request.out, unit, BYTES)
    assert not list((request.out / "shards").iterdir())


@pytest.mark.parametrize("case", ["other rows", "other rows of the hub", "the old fingerprint"])
def test_a_data_set_that_is_saved_again_during_a_preparation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    datasets = pytest.importorskip("datasets")
    if case == "other rows of the hub":
        # A dataset from the hub has no local files by which a change could be detected.
        for module in ("extraction", "units"):
            monkeypatch.setattr(f"ray_ulysses.data.sources.{module}.dataset_state", lambda path, opened: "")
    path = tmp_path / "set"
    datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(10)]}).save_to_disk(str(path))
    request = request_of(tmp_path, [], sources=source(path), unit_bytes=60)
    units = begin(request).units
    assert len(units) > 1
    write_unit(request.out, units[0], BYTES)
    fingerprint = (path / "state.json").read_bytes()
    num_rows = 10 if case == "the old fingerprint" else 5
    datasets.Dataset.from_dict({"text": [f"raw {number}" for number in range(num_rows)]}).save_to_disk(str(path))
    if case == "the old fingerprint":
        (path / "state.json").write_bytes(fingerprint)
    with pytest.raises(UserError, match=r"^source=.*/set: changed while it was being prepared"):
        write_unit(request.out, units[1], BYTES)
    if case == "the old fingerprint":
        # The same dataset may be saved again.
        assert [one.index for one in begin(request).done] == [0]


@pytest.mark.parametrize("place", ["texts/corpus", "texts/link/corpus"])
def test_a_corpus_inside_its_source_folder_is_not_read(tmp_path: Path, place: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    texts = write_texts(tmp_path / "texts", TEXTS)
    (texts / "link").symlink_to(tmp_path / "elsewhere")
    # Working files match the pattern too.
    request = request_of(tmp_path, [], out=tmp_path / place)
    first = begin(request)
    write_unit(first.request.out, first.units[0], BYTES)
    again = begin(request)
    assert (again.signature, [one.index for one in again.done]) == (first.signature, [0])
    corpus = prepare_local(request)
    assert corpus.num_documents == 10 and corpus.info.num_quarantined == 0
    assert begin(request).is_complete


def test_preparing_deletes_nothing_behind_a_linked_folder(tmp_path: Path) -> None:
    request, elsewhere = request_of(tmp_path, TEXTS), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("canary")
    request.out.mkdir()
    (request.out / "preparation.json").write_text('{"options": {}}')
    (request.out / "units").symlink_to(elsewhere)
    prepare_local(request)
    assert snapshot(elsewhere) == {"file": b"canary"}
    shutil.copytree(request.out / "shards", elsewhere, dirs_exist_ok=True)
    shutil.rmtree(request.out / "shards")
    (request.out / "shards").symlink_to(elsewhere)
    for name in ("shard-00099.tokens", f"{TEMPORARY_PREFIX}1"):
        (elsewhere / name).write_text("canary")
    before = snapshot(elsewhere)
    assert begin(request).is_complete
    assert snapshot(elsewhere) == before


def test_a_file_of_a_unit_that_is_gone_or_a_link_or_a_pipe_is_written_again_and_not_read(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(40))
    units = begin(request).units
    for unit in units:
        write_unit(request.out, unit, BYTES)
    assert pending(request) == []
    paths = sorted(request.out.glob("[us]*/*-00001.*"))
    assert len(paths) == 4
    for path in paths:
        for replacement in ("nothing", "link", "pipe"):
            path.replace(tmp_path / path.name)
            if replacement == "pipe":
                os.mkfifo(path)
            elif replacement == "link":
                path.symlink_to(tmp_path / path.name)
            assert pending(request) == [1], (path, replacement)
            write_unit(request.out, units[1], BYTES)
            assert not path.is_symlink() and pending(request) == []


ROWS: list[Any] = [
    {"text": "the quick brown fox"},
    {"text": ""},
    {"text": "x"},
    {"text": "weighted", "w": 2},
    {"text": "the fox\njumps over\nthe dog " * 40},
    {"text": 7},
    {"text": "é漢🙂 and\nmore"},
    {"text": "the quick brown fox"},
    {"text": "y"},
    {"text": "last\none"},
]


def prepared(root: Path, tokenizer: str, options: EncodingOptions) -> tuple[Corpus, list[Any]]:
    root.mkdir()
    path = root.parent / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = SourceSpec(paths=(str(path),), fields=RowFields(text="text", weight="w"))
    corpus = prepare_local(PrepareRequest(sources=spec, out=root / "corpus", tokenizer=tokenizer, encoding=options))
    lines = (corpus.path / "quarantine.jsonl").read_text().splitlines()
    left_out = [(one["offset"], one["reason"]) for one in map(json.loads, lines)]
    return corpus, left_out


@pytest.mark.parametrize("options", [EncodingOptions(), EncodingOptions(eos="none")], ids=["ends", "no end"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_corpus_is_the_same_however_texts_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: EncodingOptions
) -> None:
    tokenizer = "bytes" if kind == "bytes" else str(bos_tokenizer(tmp_path / "bpe", None))
    monkeypatch.setattr(dividing, "PART_CHARACTERS", 30)
    found = {}
    for name, limits in {
        "many at once": {},
        "by two": {"_BATCH_TEXTS": 2},
        "one by one": {"_BATCH_CHARACTERS": 1},
        "in parts": {"_LONG_CHARACTERS": 0},
    }.items():
        with monkeypatch.context() as patch:
            for limit, value in limits.items():
                patch.setattr(unit_writer, limit, value)
            corpus, left_out = prepared(tmp_path / name, tokenizer, options)
        files = {path.name: path.read_bytes() for path in corpus.path.rglob("*") if path.suffix in (".tokens", ".bin")}
        found[name] = (corpus.fingerprint, left_out, files, corpus.digests().tobytes())
        assert corpus.info.spans is not None and corpus.has_weights
    assert len({(one[0], str(one[1])) for one in found.values()}) == 1
    assert all(one == found["many at once"] for one in found.values())
    singles = [3, 9] if options.eos == "none" else []
    assert sorted(offset for offset, _ in found["by two"][1]) == sorted([2, 6, 8, *singles])

    encoder = load_encoder(tokenizer, options)
    texts = [row["text"] for number, row in enumerate(ROWS, start=1) if number not in (2, 6, 8, *singles)]
    assert corpus.num_documents == len(texts)
    for number, text in enumerate(texts):
        (expected,) = encoder.encode(text)
        assert np.array_equal(corpus.read(number, 0, int(corpus.lengths[number])), expected.ids)


def test_a_long_document_is_never_held_as_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    add = unit_writer.FlatWriter.add

    def watched(writer: Any, ids: Any) -> Any:
        nonlocal most
        most = max(most, ids.nbytes)
        return add(writer, ids)

    monkeypatch.setattr(unit_writer.FlatWriter, "add", watched)
    path = tmp_path / "long.txt"
    path.write_text("0123456789abcdef" * 500_000)
    corpus = prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(path),)), out=tmp_path / "corpus"))
    assert corpus.lengths.tolist() == [8_000_001] and 0 < most <= 8 << 18
    assert corpus.read(0, 7_999_999, 2).tolist() == [ord("f"), 256]


CORPUS = "corpus.json"


class Disk:
    """Records the syncs and renames of a process, to determine what a power failure would leave of a directory.

    A file's content is durable once the file is synced, and its name once the folder is synced after the rename. A
    rename that is not synced yet may or may not be durable.
    """

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        self.contents: dict[int, bytes] = {}
        self.names: dict[Path, dict[str, int]] = {}
        self.moments: list[tuple[str, dict[str, bytes], bytes | None]] = []
        fsync, replace_name = os.fsync, os.replace

        def recorded_fsync(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_dir():
                self.names[path] = {name: (path / name).stat().st_ino for name in os.listdir(path)}
            else:
                self.contents[path.stat().st_ino] = path.read_bytes()
            self.record(f"sync {path.name}")

        def recorded_replace(source: str, target: str, **folders: int) -> None:
            replace_name(source, target, **folders)
            self.record(f"rename {Path(target).name}")

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(os, "replace", recorded_replace)

    def record(self, what: str) -> None:
        commit = self.top / CORPUS
        named = self.contents.get(commit.stat().st_ino, b"") if commit.exists() else None
        self.moments.append((what, dict(self._durable(self.top)), named))

    def _durable(self, folder: Path) -> Iterator[tuple[str, bytes]]:
        for name, inode in self.names.get(folder, {}).items():
            path = folder / name
            if path in self.names or path.is_dir():
                yield from self._durable(path)
            else:
                yield str(path.relative_to(self.top)), self.contents.get(inode, b"")


def test_a_power_cut_at_any_moment_leaves_a_whole_corpus_or_one_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{number}?", "answer": "yes" * (1 + number)} for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = SourceSpec(paths=(str(tmp_path / "rows.jsonl"),), fields=RowFields(prompt="prompt", completion="answer"))
    request = PrepareRequest(sources=spec, out=tmp_path / "some" / "where" / "corpus", unit_bytes=120)
    with monkeypatch.context() as patched:
        disk = Disk(request.out, patched)
        corpus = prepare_local(request)
    assert len(corpus.info.shards) > 2 and corpus.info.spans is not None
    num_committed, tried = 0, []
    for number, (what, durable, commit) in enumerate(disk.moments):
        named = durable if commit is None else {**durable, CORPUS: commit}
        # The name of corpus.json may be durable even if its folder was not synced after the rename.
        for kind, files in (("synced", durable), ("named", named)):
            if files in tried:
                continue
            tried.append(files)
            left = replace(request, out=tmp_path / f"{number}-{kind}")
            for name, content in files.items():
                (left.out / name).parent.mkdir(parents=True, exist_ok=True)
                (left.out / name).write_bytes(content)
            if CORPUS in files:
                num_committed += 1
                check_content(Corpus.open(left.out))
            found = prepare_local(left)
            check_content(found)
            assert found.fingerprint == corpus.fingerprint, (number, what, kind)
    assert num_committed > 0 and len(tried) > 3
    # In the end, corpus.json is durable, and so are its parent folders.
    assert disk.moments[-1][1][CORPUS] == (request.out / CORPUS).read_bytes()
    for folder in (request.out, *request.out.parents[:2]):
        assert folder.name in disk.names[folder.parent]
