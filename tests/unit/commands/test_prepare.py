"""`prepare`: its options, what it says, and its result in an object store, with the units in this process."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

from ray_ulysses.cli import app, run
from ray_ulysses.cluster import prepare_job, session
from ray_ulysses.commands import output
from ray_ulysses.commands import prepare as prepare_command
from ray_ulysses.commands.display import PrepareView
from ray_ulysses.commands.prepare import prepare_corpus, prepare_first
from ray_ulysses.config import Config, parse_config
from ray_ulysses.config.raw_data import PrepareSection
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare import preparation
from ray_ulysses.data.prepare.preparation import Preparation, PrepareProgress, finish
from ray_ulysses.data.prepare.unit_writer import write_unit
from ray_ulysses.data.sources.rows import RowFields, option
from ray_ulysses.errors import UserError
from ray_ulysses.run.preflight import report_run
from tests.s3_server import S3Server
from tests.unit.commands.histories import HandClock
from tests.unit.config.trees import small_tree
from tests.unit.data.corpora import text_corpus, varied_texts, write_texts

TEXTS = ["one", "two " * 300, "three"]
OPTIONS: dict[str, Any] = {
    "kind": "auto", "pattern": "*", "exclude": None, "split": None, "tokenizer": "bytes", "bos": "tokenizer",
    "eos": "tokenizer", "chat_template": None, "turns": "auto", "train_on": "all", "duplicates": "quarantine",
    "without": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run units in this process; return the folder of the node's cache."""

    def run(preparation: Preparation, **_: object) -> Corpus:
        out = preparation.request.out
        units = [write_unit(out, unit, preparation.encoder) for unit in preparation.pending]
        return finish(preparation, (*preparation.done, *units))

    @contextlib.contextmanager
    def connected(*_: object, **__: object) -> Iterator[bool]:
        yield True

    monkeypatch.setattr(prepare_job, "run_preparation", run)
    monkeypatch.setattr(session, "ray_session", connected)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: types.SimpleNamespace(get_node_id=lambda: "a node"))
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def prepare(sources: Path, out: str, **options: Any) -> list[str]:
    return prepare_corpus(address=None, view=PrepareView(), sources=[str(sources)], out=out, **{**OPTIONS, **options})


def test_a_corpus_that_is_named_for_staging_stays(tmp_path: Path, s3: S3Server, prefix: str) -> None:
    own = text_corpus(tmp_path, TEXTS)
    (own.path / "notes.txt").write_text("mine")
    prepare(tmp_path / "texts", s3.uri(prefix), staging=own.path)
    assert Corpus.open(own.path).fingerprint == Corpus.open(s3.uri(prefix)).fingerprint
    assert (own.path / "notes.txt").read_text() == "mine"
    assert not [path for path in own.path.iterdir() if path.is_dir() and path.name != "shards"]


def test_what_failed_before_does_not_block_the_right_command(tmp_path: Path, s3: S3Server, prefix: str) -> None:
    one, other = (write_texts(tmp_path / name, [name, *TEXTS]) for name in ("one", "other"))
    (one / "bad.parquet").write_bytes(b"")
    (one / "rows.jsonl").write_text("no JSON")
    with pytest.raises(UserError, match=r"rows\.jsonl: none of its 1 lines is a JSON object"):
        prepare(one, s3.uri(prefix), exclude=["*.parquet"])
    good: dict[str, Any] = {"exclude": ["*.parquet", "*.jsonl"]}
    prepare(one, s3.uri(prefix), **good)
    another = "contains a complete or partial corpus made from other sources, options or source files"
    with pytest.raises(UserError, match=another):
        prepare(other, s3.uri(prefix))
    said = prepare(one, s3.uri(prefix), **good)
    assert said[0].endswith(" already holds this corpus")
    assert not any((tmp_path / "cache" / "prepare").iterdir())


def test_the_help_shows_the_six_kinds_of_rows_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(app, ["prepare", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    begin = lines.index("  row     options                              what is learned")
    assert [line.split()[:2] for line in lines[begin + 1 : begin + 7]] == [
        ["text", "--text-field"],
        ["tokens", "--tokens-field"],
        ["chat", "--messages-field"],
        ["prompt", "--prompt-field"],
        ["answer", "the"],
        ["pair", "--chosen-field"],
    ]


def test_every_option_reaches_the_request_and_the_result_comes_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(preparation, "listed", lambda request: given.update(request=request))
    monkeypatch.setattr(preparation, "claimed", lambda found, is_scratch: _Complete())
    monkeypatch.setattr(prepare_command, "_result", lambda out: [f"made {out.name}"])
    roles = list(asdict(RowFields()))
    options = [word for role in roles for word in (option(role), f"the {role}")]
    options += ["--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--without", "one", "--without", "two"]
    assert run(app, ["prepare", "rows.jsonl", *options]) == 0
    assert asdict(given["request"].sources.fields) == {role: f"the {role}" for role in roles}
    assert given["request"].without == ("one", "two")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" phase: loading libraries") and lines[-1] == "made out"


class _Complete:
    is_complete = True

    def __enter__(self) -> _Complete:
        return self

    def __exit__(self, *error: object) -> None: ...


ROOT = Path(__file__).parents[3]


def progress(units: int, num_bytes: int) -> PrepareProgress:
    return PrepareProgress(
        units_done=units, num_units=8, documents=10 * units, tokens=100 * units, rejected=1, bytes_done=num_bytes,
        num_bytes=8 << 20,
    )  # fmt: skip


def test_each_phase_has_a_line_at_once_and_units_have_one_every_other_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_INTERVAL_S", 600.0)  # Only the test looks.
    clock, out = HandClock(), io.StringIO()
    with PrepareView(Console(file=out, width=200), clock) as view:
        view.phase("listing the sources")
        clock.at = 3.0
        view.phase("reading and tokenizing")
        view.progress(progress(0, 0))
        # The first unit waits for workers to start.
        clock.at = 5.0
        for units in range(1, 9):
            view.progress(progress(units, units << 20))
            clock.at += 1.0
        clock.at = 15.0
        view.phase("writing the corpus")
        clock.at = 30.0
        view.look()
    lines = out.getvalue().splitlines()
    assert [line.split(" ")[0] if line.startswith("unit") else line for line in lines] == [
        "elapsed=0s phase: listing the sources",
        "elapsed=3s phase: reading and tokenizing",
        "unit=0/8",
        "unit=1/8",
        "unit=3/8",
        "unit=5/8",
        "unit=7/8",
        "unit=8/8",
        "elapsed=15s phase: writing the corpus",
        "elapsed=30s phase: writing the corpus, for 15s",
    ]


def test_the_first_word_comes_before_anything_large_is_imported() -> None:
    """Ray, pyarrow and the rest take seconds on a slow disk, and said nothing."""
    program = (
        "import sys\n"
        "from ray_ulysses.cli import app, run\n"
        "from ray_ulysses.commands import display\n"
        "def phase(view, name):\n"
        "    print(name, [m for m in ('ray', 'torch', 'pyarrow', 'transformers') if m in sys.modules])\n"
        "display.PrepareView.phase = phase\n"
        "run(app, ['prepare', 'nowhere', '--out', 'out', '--tokenizer', 'bytes'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0] == "loading libraries []"
    assert lines[1].startswith("listing the sources [") and "'ray'" not in lines[1] and "'torch'" not in lines[1]
    assert "error: source=nowhere: no such file or directory" in done.stderr


def raw_run(folder: Path, **changes: Any) -> Config:
    """Return a run that prepares its corpus from raw texts."""
    write_texts(folder / "raw", [*TEXTS, *varied_texts(30)])
    raw = {"sources": [str(folder / "raw")], "tokenizer": "bytes"} | changes.pop("data__prepare", {})
    small = {"parallel__sp_size": 1, "cluster__workers": 1, "data__context_tokens": 256, "tracking__enabled": False}
    places = {"run__storage": str(folder / "runs"), "data__path": str(folder / "corpus")}
    return parse_config(small_tree(data__prepare=raw, **places, **small, **changes))


def test_the_configuration_has_the_options_of_the_command() -> None:
    named = inspect.signature(prepare_command.prepare).parameters
    options = {name: one.default for name, one in named.items() if name not in ("out", "address", "as_json", "quiet")}
    fields = PrepareSection.model_fields
    assert [*options] == [*fields]
    for name, default in options.items():
        is_required = default is inspect.Parameter.empty
        assert fields[name].is_required() == is_required
        assert is_required or (default or None) == (fields[name].default or None)


def test_a_run_prepares_its_corpus_first_and_only_once(tmp_path: Path) -> None:
    config = raw_run(tmp_path)
    report = report_run(config, tmp_path)
    (note,) = (one for one in report.notes if "prepares it first" in one)
    assert str(tmp_path / "raw") in note and not report.problems and not (tmp_path / "corpus").exists()
    prepare_first(config, tmp_path, Console(file=io.StringIO()))
    corpus = Corpus.open(tmp_path / "corpus")
    assert corpus.num_documents == 33
    (tmp_path / "raw" / "more.txt").write_text("added later")
    prepare_first(config, tmp_path, Console(file=io.StringIO()))
    assert Corpus.open(tmp_path / "corpus").fingerprint == corpus.fingerprint
    assert not [one for one in report_run(config, tmp_path).notes if "prepares it first" in one]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__prepare": {"sources": ["nothing-there"]}}, "data.prepare: "),
        ({"data__prepare": {"turns": "whole"}}, "data.prepare: --turns"),
        ({"data__prepare": {"chat_template": "none.jinja"}}, "none.jinja"),
        ({"memory__device_gib": 0.001}, "memory"),
    ],
    ids=str,
)
def test_a_run_that_cannot_start_prepares_nothing(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = raw_run(tmp_path, **changes)
    with pytest.raises(UserError, match=re.escape(said)):
        prepare_first(config, tmp_path, Console(file=io.StringIO()))
    assert not (tmp_path / "corpus").exists()
