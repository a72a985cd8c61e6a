"""A power failure at any moment of a preparation leaves a complete corpus, or files from which it can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import check_content

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
