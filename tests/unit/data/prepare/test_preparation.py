from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare import preparation, unit_writer
from ray_ulysses.data.prepare.merge import entropy_nats
from ray_ulysses.data.prepare.preparation import PrepareProgress, PrepareRequest, directory_lock
from ray_ulysses.data.prepare.unit_writer import UnitResult, write_unit
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec, Unit
from ray_ulysses.data.tokenize.encoding import DocumentEncoder, load_encoder
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.atomic import TEMPORARY_PREFIX
from ray_ulysses.storage.retry import RetryPolicy
from tests import local_preparation
from tests.local_preparation import prepare_local, preparing
from tests.unit.data.corpora import begin, check_content, varied_texts, write_texts
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer


def request_of(tmp_path: Path, texts: list[str], **changes: object) -> PrepareRequest:
    sources = write_texts(tmp_path / "texts", texts)
    base = PrepareRequest(sources=SourceSpec(paths=(str(sources),)), out=tmp_path / "corpus", unit_bytes=1000)
    return replace(base, **changes)


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_every_document_comes_back_byte_for_byte(tmp_path: Path) -> None:
    texts = varied_texts(60)
    corpus = prepare_local(request_of(tmp_path, texts))
    assert len(corpus.info.shards) > 5
    assert corpus.num_documents == 60
    for number, text in enumerate(texts):
        assert corpus.read(number, 0, int(corpus.lengths[number])).tolist() == [*text.encode(), 256]
        assert corpus.source(number) == (str(tmp_path / "texts" / f"text-{number:04d}.txt"), 0, "")
    assert corpus.info.num_tokens == sum(len(text.encode()) + 1 for text in texts)
    assert corpus.info.max_token_id == 256
    assert corpus.info.dtype == "uint16"
    assert sorted(p.name for p in corpus.path.iterdir()) == [
        "corpus.json",
        "documents.index",
        "documents.parquet",
        "quarantine.jsonl",
        "shards",
    ]


def test_progress_is_exact(tmp_path: Path) -> None:
    seen: list[PrepareProgress] = []
    corpus = prepare_local(request_of(tmp_path, varied_texts(30)), seen.append)
    assert [one.units_done for one in seen] == list(range(1, seen[0].num_units + 1))
    assert (seen[-1].documents, seen[-1].tokens) == (corpus.num_documents, corpus.info.num_tokens)
    total = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert {one.num_bytes for one in seen} == {total}
    assert [one.bytes_done for one in seen] == sorted({one.bytes_done for one in seen})
    assert seen[0].bytes_done < seen[-1].bytes_done == total


def test_progress_goes_on_where_a_killed_preparation_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(tmp_path, varied_texts(30))
    (tmp_path / "texts" / "link").symlink_to("nowhere")
    write_unit(request.out, begin(request).units[0], load_encoder("bytes"))
    seen: list[PrepareProgress] = []
    corpus = prepare_local(request, seen.append)
    assert (seen[0].units_done, seen[-1].rejected) == (2, 1)
    assert (seen[-1].documents, seen[-1].bytes_done) == (corpus.num_documents, seen[-1].num_bytes)


def test_entropy_is_that_of_the_bytes(tmp_path: Path) -> None:
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
    assert both.num_documents == 5


def test_a_hugging_face_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    directory = fast_tokenizer(tmp_path / "tokenizer")
    corpus = prepare_local(request_of(tmp_path, ["the quick fox", "the dog"], tokenizer=str(directory)))
    assert corpus.info.tokenizer.kind == "huggingface"
    assert corpus.info.byte_unigram_nats is None and corpus.info.token_unigram_nats is None
    assert [int(corpus.read(d, int(corpus.lengths[d]) - 1, 1)[0]) for d in (0, 1)] == [1, 1]


def test_the_content_alone_decides_the_fingerprint(tmp_path: Path) -> None:
    texts = varied_texts(20)
    one = prepare_local(request_of(tmp_path / "a", texts))
    two = prepare_local(request_of(tmp_path / "b", texts))
    other = prepare_local(request_of(tmp_path / "c", [*texts[:-1], texts[-1] + "!"]))
    assert one.fingerprint == two.fingerprint != other.fingerprint


class Killed(BaseException):
    """Stands for a process that dies between two units."""


def test_a_killed_preparation_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(tmp_path, varied_texts(40))
    written: list[int] = []

    def dying(out: Path, unit: Unit, encoder: DocumentEncoder, retry: RetryPolicy) -> UnitResult:
        if len(written) == 3:
            raise Killed
        written.append(unit.index)
        return write_unit(out, unit, encoder, retry)

    monkeypatch.setattr(local_preparation, "write_unit", dying)
    with pytest.raises(Killed):
        prepare_local(request)
    with pytest.raises(UserError, match=r"its preparation is not finished; run the same `ray-ulysses prepare` again"):
        Corpus.open(request.out)
    assert begin(request).pending[0].index == 3
    monkeypatch.setattr(local_preparation, "write_unit", write_unit)
    resumed = prepare_local(request)
    unbroken = prepare_local(replace(request, out=tmp_path / "unbroken"))
    assert resumed.fingerprint == unbroken.fingerprint
    assert not [p for p in request.out.rglob("*") if p.name.startswith(TEMPORARY_PREFIX)]


def test_a_unit_that_was_killed_between_its_shard_and_its_notes_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(tmp_path, varied_texts(40))
    write_text = unit_writer.write_text
    killed: list[str] = []

    def dying(path: Path, text: str, within: Path) -> None:
        if path.name in {"unit-00002.quarantine.jsonl", "unit-00003.json"} - set(killed):
            killed.append(path.name)
            monkeypatch.undo()
            raise Killed
        write_text(path, text)

    for _ in range(2):
        monkeypatch.setattr(unit_writer, "write_text", dying)
        with pytest.raises(Killed):
            prepare_local(request)
    assert killed == ["unit-00002.quarantine.jsonl", "unit-00003.json"]
    assert (request.out / "shards" / "shard-00003.tokens").is_file()
    assert begin(request).pending[0].index == 3
    resumed = prepare_local(request)
    assert resumed.fingerprint == prepare_local(replace(request, out=tmp_path / "unbroken")).fingerprint
    check_content(resumed)


def test_a_process_that_is_killed_leaves_a_directory_that_can_be_gone_on_with(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(40))
    program = (
        "import os, sys; from tests import local_preparation\n"
        "from tests.unit.data.prepare.test_preparation import *\n"
        "from pathlib import Path; write = local_preparation.write_unit\n"
        "def dying(out, unit, *rest):\n"
        "    if unit.index == 3: (out / 'shards' / '.writing-3').write_text('torn'); os._exit(9)\n"
        "    return write(out, unit, *rest)\n"
        "local_preparation.write_unit = dying; tmp_path = Path(sys.argv[1])\n"
        "local_preparation.prepare_local(request_of(tmp_path, varied_texts(40)))"
    )
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "texts").iterdir()}
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[4], check=False)
    assert killed.returncode == 9
    assert (request.out / ".prepare.lock").is_file()
    # The program wrote the same texts again.
    for path, stamp in stamps.items():
        assert path.stat().st_mtime_ns != stamp
    assert begin(request).pending[0].index == 3
    corpus = prepare_local(request)
    assert sorted(snapshot(request.out)) == sorted(
        [
            "corpus.json",
            "documents.index",
            "documents.parquet",
            "quarantine.jsonl",
            *(f"shards/{s.name}" for s in corpus.info.shards),
        ]
    )


def test_files_that_are_removed_before_a_resume_leave_no_shard_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(tmp_path, varied_texts(40))
    started = begin(request)
    for unit in started.units[:-1]:
        write_unit(request.out, unit, load_encoder("bytes"))
    for number in range(15, 40):
        (tmp_path / "texts" / f"text-{number:04d}.txt").unlink()
    corpus = prepare_local(request)
    assert corpus.num_documents == 15
    assert len(corpus.info.shards) < len(started.units) - 1
    assert sorted(p.name for p in (request.out / "shards").iterdir()) == [shard.name for shard in corpus.info.shards]


def killed_after_its_commit(tmp_path: Path) -> PrepareRequest:
    """Prepare in a process that dies when it begins to remove its working files."""
    request = request_of(tmp_path, varied_texts(10))
    program = (
        "import os, shutil, sys; from pathlib import Path; from ray_ulysses.data.prepare.preparation import *\n"
        "from tests.local_preparation import prepare_local\n"
        "shutil.rmtree = lambda *_, **__: os._exit(9)\n"
        "spec = SourceSpec(paths=(sys.argv[1] + '/texts',))\n"
        "prepare_local(PrepareRequest(sources=spec, out=Path(sys.argv[1]) / 'corpus', unit_bytes=1000))"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[4], check=False)
    assert killed.returncode == 9
    assert (request.out / "corpus.json").is_file() and (request.out / ".prepare.lock").is_file()
    return request


def test_a_process_that_is_killed_after_its_commit_leaves_nothing_for_good(tmp_path: Path) -> None:
    request = killed_after_its_commit(tmp_path)
    (request.out / "shards" / ".writing-1").write_text("torn")
    (request.out / "shards" / "shard-00077.tokens").write_text("of a file that is gone")
    with directory_lock(request.out):
        # Another process is at it: what it removes need not be removed here.
        assert prepare_local(request).num_documents == 10
    assert (request.out / "units").is_dir()
    with preparing(request) as found:
        assert found.is_complete
    left = ["corpus.json", "documents.index", "documents.parquet", "quarantine.jsonl"]
    assert sorted(snapshot(request.out)) == [*left, *(f"shards/{s.name}" for s in Corpus.open(request.out).info.shards)]


def test_a_directory_is_prepared_by_one_process_at_a_time(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(10))
    with preparing(request):
        before = snapshot(request.out)
        for again in (prepare_local, begin):
            with pytest.raises(
                UserError, match=r"out=.*corpus: is already being prepared by process \d+ on host .* UTC; w"
            ):
                again(request)
        assert snapshot(request.out) == before
    assert prepare_local(request).num_documents == 10
    assert not (request.out / ".prepare.lock").exists()


def test_a_preparation_that_waited_finds_what_the_other_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(tmp_path, varied_texts(10))
    lock = preparation.directory_lock

    @contextmanager
    def late(out: Path, retry: RetryPolicy) -> Iterator[None]:
        monkeypatch.undo()
        prepare_local(request)
        with lock(out, retry=retry):
            yield

    monkeypatch.setattr(preparation, "directory_lock", late)
    with preparing(request) as found:
        assert found.is_complete


def test_a_unit_that_is_done_is_done_again_when_its_file_or_shard_changed(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(40))
    started = begin(request)
    for unit in started.units:
        write_unit(request.out, unit, load_encoder("bytes"))
    assert begin(request).pending == ()
    (request.out / "shards" / "shard-00001.tokens").unlink()
    assert [unit.index for unit in begin(request).pending] == [1]


def test_prepared_again_a_corpus_is_left_as_it_is(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(10))
    first = prepare_local(request)
    before = snapshot(request.out)
    assert begin(request).is_complete
    assert prepare_local(request).fingerprint == first.fingerprint
    assert snapshot(request.out) == before


def test_another_corpus_in_the_directory_is_not_written_over(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(10))
    prepare_local(request)
    before = snapshot(request.out)
    other = replace(request, sources=SourceSpec(paths=(str(write_texts(tmp_path / "other", ["x"])),)))
    with pytest.raises(UserError, match=r"already holds a corpus of other sources.*; nothing was overwritten"):
        prepare_local(other)
    (tmp_path / "texts" / "text-0003.txt").write_text("changed")
    with pytest.raises(UserError, match=r"already holds a corpus of other sources, options or source files"):
        prepare_local(request)
    assert snapshot(request.out) == before


def test_another_unfinished_preparation_is_not_written_over(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(10))
    write_unit(request.out, begin(request).units[0], load_encoder("bytes"))
    before = snapshot(request.out)
    with pytest.raises(UserError, match=r"holds an unfinished preparation with other sources or options"):
        begin(replace(request, unit_bytes=2000))
    assert snapshot(request.out) == before


def test_a_directory_with_foreign_files_is_not_touched(tmp_path: Path) -> None:
    request = request_of(tmp_path, ["one"])
    request.out.mkdir()
    (request.out / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"is not empty and holds no corpus; choose another directory"):
        prepare_local(request)
    assert snapshot(request.out) == {"thesis.tex": b"precious"}


def test_sources_without_a_matching_file_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    request = request_of(tmp_path, ["one"])
    request = replace(request, sources=replace(request.sources, pattern="*.py"))
    with pytest.raises(UserError, match=r"no file matches --pattern='\*\.py' .*, or none that does has rows; nothing"):
        prepare_local(request)
    assert not request.out.exists()


def test_a_source_that_is_left_out_says_why(tmp_path: Path) -> None:
    request = request_of(tmp_path, [])
    os.mkfifo(tmp_path / "pipe")
    request = replace(request, sources=replace(request.sources, paths=(str(tmp_path / "pipe"),)))
    with pytest.raises(UserError, match=r"all 1 files were left out \(the first: .*/pipe, not a regular file\)"):
        prepare_local(request)
    assert not request.out.exists()


def test_empty_files_of_rows_are_called_empty(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    request = request_of(tmp_path, [])
    request = replace(request, sources=replace(request.sources, paths=(str(tmp_path / "rows.jsonl"),)))
    with pytest.raises(UserError, match=r"^the sources hold no document: their files are empty$"):
        prepare_local(request)


def test_sources_without_a_usable_document_say_why_and_make_no_corpus(tmp_path: Path) -> None:
    request = request_of(tmp_path, ["", ""])
    (tmp_path / "texts" / "z").write_bytes(b"\xff")
    with pytest.raises(
        UserError,
        match=r"no usable document: 3 were left out: empty \(2\); not UTF-8 \(1\); the first is .*0000\.txt: empty$",
    ):
        prepare_local(request)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("case", ["left out", "repeated", "torn"])
def test_a_preparation_without_output_leaves_nothing_and_does_not_block_the_next(
    tmp_path: Path, case: str, exists: bool
) -> None:
    request = request_of(tmp_path, ["one"], out=tmp_path / "new" / "corpus")
    prepare_local(replace(request, out=tmp_path / "other"))
    failing = request
    if case == "repeated":
        failing = replace(request, without=(str(tmp_path / "other"),))
    else:
        rows = {"left out": '{"text": ""}', "torn": '[{"text": "one"}'}[case]
        (tmp_path / "rows.json").write_text(rows)
        fields = RowFields(text="text")
        failing = replace(request, sources=SourceSpec(paths=(str(tmp_path / "rows.json"),), fields=fields))
    if exists:
        request.out.mkdir(parents=True)
    with pytest.raises(UserError, match=r"no usable document|can't be read"):
        prepare_local(failing)
    assert request.out.exists() == (tmp_path / "new").exists() == exists
    assert not exists or snapshot(request.out) == {}
    assert prepare_local(request).num_documents == 1


@pytest.mark.parametrize("error", [RunError("the Ray cluster can't be reached"), KeyboardInterrupt()])
def test_a_preparation_that_ends_before_a_unit_begins_leaves_nothing(
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
    with preparing(request) as preparation:
        assert len(preparation.done) == 1, "a finished unit was deleted"


def test_a_tokenizer_may_be_gone_once_the_texts_are_read(tmp_path: Path) -> None:
    tokenizer = fast_tokenizer(tmp_path / "tokenizer")
    request = request_of(tmp_path, ["the quick brown fox"], tokenizer=str(tokenizer))
    expected = prepare_local(replace(request, out=tmp_path / "other"))
    corpus = prepare_local(request, progress=lambda _: shutil.rmtree(tokenizer))
    assert corpus.fingerprint == expected.fingerprint


def test_a_preparation_that_was_killed_before_its_first_shard_does_not_block_another(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(10))
    begin(replace(request, unit_bytes=2000))
    assert (request.out / "preparation.json").is_file()
    assert prepare_local(request).num_documents == 10


def test_a_missing_tokenizer_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    request = request_of(tmp_path, ["one"], tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"tokenizer=.*nowhere: no such directory"):
        prepare_local(request)
    assert not request.out.exists()


def test_an_unreadable_parquet_source_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "good.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    request = request_of(tmp_path, ["one"])
    spec = SourceSpec(paths=(str(tmp_path / "good.parquet"), str(tmp_path / "bad.parquet")))
    with pytest.raises(UserError, match=r"bad\.parquet: the Parquet file can't be read"):
        prepare_local(replace(request, sources=spec))
    assert not request.out.exists()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    request = request_of(tmp_path, ["one"])
    unit = begin(request).units[0]
    (tmp_path / "texts" / "text-0000.txt").write_text("other")
    with pytest.raises(UserError, match=r"text-0000\.txt: changed while it was being prepared"):
        write_unit(request.out, unit, load_encoder("bytes"))
    assert not list((request.out / "shards").iterdir())


@pytest.mark.parametrize("has_files", [True, False], ids=["of files", "of the hub"])
def test_a_data_set_that_is_saved_again_during_a_preparation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_files: bool
) -> None:
    if not has_files:
        # One of the hub has no files of its own, by which to tell that it has changed.
        for module in ("extraction", "units"):
            monkeypatch.setattr(f"ray_ulysses.data.sources.{module}.dataset_state", lambda path, opened: "")
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "set"
    datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(10)]}).save_to_disk(str(path))
    request = request_of(tmp_path, [], sources=SourceSpec(paths=(str(path),)), unit_bytes=60)
    units = begin(request).units
    assert len(units) > 1
    write_unit(request.out, units[0], load_encoder("bytes"))
    shutil.rmtree(path)
    datasets.Dataset.from_dict({"text": [f"other {number}" for number in range(5)]}).save_to_disk(str(path))
    with pytest.raises(UserError, match=r"^source=.*/set: changed while it was being prepared; run prepare again"):
        write_unit(request.out, units[1], load_encoder("bytes"))


def test_a_data_set_that_is_being_saved_again_is_refused_though_its_fingerprint_is_the_old_one(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "set"
    datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(10)]}).save_to_disk(str(path))
    request = request_of(tmp_path, [], sources=SourceSpec(paths=(str(path),)), unit_bytes=60)
    units = begin(request).units
    write_unit(request.out, units[0], load_encoder("bytes"))
    fingerprint = (path / "state.json").read_bytes()
    datasets.Dataset.from_dict({"text": [f"raw {number}" for number in range(10)]}).save_to_disk(str(path))
    (path / "state.json").write_bytes(fingerprint)
    with pytest.raises(UserError, match=r"^source=.*/set: changed while it was being prepared; run prepare again"):
        write_unit(request.out, units[1], load_encoder("bytes"))
    assert [one.signature for one in begin(request).units] == [one.signature for one in units]
    assert [one.index for one in begin(request).done] == [0]


@pytest.mark.parametrize("place", ["texts/corpus", "texts/link/corpus"])
def test_a_corpus_inside_its_source_is_no_source(tmp_path: Path, place: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    texts = write_texts(tmp_path / "texts", varied_texts(10))
    (texts / "link").symlink_to(tmp_path / "elsewhere")
    # Working files match the pattern too.
    request = request_of(tmp_path, [], out=tmp_path / place)
    first = begin(request)
    write_unit(first.request.out, first.units[0], load_encoder("bytes"))
    again = begin(request)
    assert (again.signature, [one.index for one in again.done]) == (first.signature, [0])
    corpus = prepare_local(request)
    assert corpus.num_documents == 10 and corpus.info.num_quarantined == 0
    assert begin(request).is_complete


def test_preparing_deletes_nothing_behind_a_linked_folder_of_shards(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(10))
    prepare_local(request)
    shutil.move(request.out / "shards", tmp_path / "elsewhere")
    (request.out / "shards").symlink_to(tmp_path / "elsewhere")
    for name in ("shard-00099.tokens", f"{TEMPORARY_PREFIX}1"):
        (tmp_path / "elsewhere" / name).write_text("canary")
    before = snapshot(tmp_path / "elsewhere")
    assert begin(request).is_complete
    assert snapshot(tmp_path / "elsewhere") == before


def test_a_link_or_a_pipe_among_the_files_of_a_unit_is_replaced_and_not_read(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(40))
    units = begin(request).units
    for unit in units:
        write_unit(request.out, unit, load_encoder("bytes"))
    names = sorted(str(path.relative_to(request.out)) for path in request.out.glob("[us]*/*-00001.*"))
    assert len(names) == 4
    kept = tmp_path / "kept"
    kept.mkdir()
    for number, name in enumerate(names):
        for replacement in ("link", "pipe"):
            (request.out / name).replace(kept / str(number))
            if replacement == "pipe":
                os.mkfifo(request.out / name)
            else:
                (request.out / name).symlink_to(kept / str(number))
            assert [one.index for one in begin(request).pending] == [1], (name, replacement)
            write_unit(request.out, units[1], load_encoder("bytes"))
            assert not (request.out / name).is_symlink() and begin(request).pending == ()


def test_a_linked_folder_in_an_unfinished_corpus_is_unlinked_where_all_begins_anew(tmp_path: Path) -> None:
    request = request_of(tmp_path, varied_texts(10))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("canary")
    request.out.mkdir()
    (request.out / "preparation.json").write_text('{"options": {}}')
    (request.out / "units").symlink_to(tmp_path / "elsewhere")
    prepare_local(request)
    assert snapshot(tmp_path / "elsewhere") == {"file": b"canary"}
    assert begin(request).is_complete
