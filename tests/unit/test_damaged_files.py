"""Whatever a file of a run or a ``--set`` holds: it is read or refused in words and in time, and no step is wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.checkpoint.manifest import ManifestError, read_manifest
from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.config import load_config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.history import read_history
from tests.distributed.run_case import make_corpus
from tests.unit.config.trees import small_tree
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import Run, make_run
from tests.unit.mutations import NASTY, NASTY_YAML, mutated

_MOST_SECONDS = 5.0
_MANIFEST, _PLAN = "checkpoints/step-00000007/manifest.json", "plan/segment-0000/plan.json"
_TINY = Path("configs/llama-tiny_cpu_sp2-dp2_8k.yaml")
_LETTERS = NASTY + NASTY_YAML


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_corpus(tmp_path_factory.mktemp("corpus"), varied_texts(60)).path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """A run of two attempts, the first of which lost a step, with a checkpoint that holds tensors."""
    made = make_run(tmp_path_factory.mktemp("runs") / "demo", [corpus])
    made.attempt([made.started(), *made.steps(1, 3), made.committed(3), *made.steps(4, 5)])
    end = [{"event": "attempt_ended", "reason": "finished"}, {"event": "run_finished", "step": 7}]
    made.attempt([made.started(4), *made.steps(5, 7), made.committed(7), *end])
    made.checkpoint(3)
    made.checkpoint(7)
    return made


Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command, which may fail in words only, and in time; returns its code and what it says."""

    def call(*arguments: object) -> tuple[int, str]:
        # The handler of an earlier test's command writes to that test's stream, which is closed.
        logging.getLogger("ray_ulysses").handlers.clear()
        begun = time.process_time()
        code = run_command(app, [str(argument) for argument in arguments])
        seconds = time.process_time() - begun
        said = capsys.readouterr()
        assert code in (0, 1, 2) and "Traceback" not in said.err, said.err
        assert seconds < _MOST_SECONDS, f"{arguments} took {seconds:.1f} s of CPU time"
        assert len(said.err) < 50_000, said.err[:1000]
        return code, said.out

    return call


def _cases(path: Path, count: int, seed: int, nasty: tuple[bytes, ...] = NASTY) -> Iterator[bytes]:
    """Put mutations of a file in its place, one after the other, and the file back at the end."""
    content, drawn = path.read_bytes(), random.Random(seed)
    try:
        for _ in range(count):
            damaged = mutated(content, drawn, nasty)
            path.write_bytes(damaged)
            yield damaged
    finally:
        path.write_bytes(content)


def _sizes(few: int, many: int) -> Any:
    """Run a search with few cases among the tests that every change must pass, and with many in the slow ones."""
    return pytest.mark.parametrize(
        ("count", "seed"),
        [pytest.param(few, 1, id=f"{few} cases"), pytest.param(many, 2, id="many", marks=pytest.mark.slow)],
    )


@pytest.mark.parametrize("segment", ["attempt-0001.jsonl", "attempt-0002.jsonl"])
@_sizes(20, 400)
def test_no_damage_to_a_journal_gives_a_wrong_step(run: Run, ask: Ask, segment: str, count: int, seed: int) -> None:
    sound = {step.step: step for step in read_history(run.folder).steps}
    number = int(segment[8:12])
    # What each line of a step that counts says; the other attempt's file is whole.
    own = {}
    for line in (run.folder / "journal" / segment).read_bytes().splitlines():
        record = json.loads(line)
        if record["event"] == "step" and sound[record["step"]].attempt == number:
            own[line] = record["step"]
    assert len(own) >= 3
    for damaged in _cases(run.folder / "journal" / segment, count, seed):
        code, out = ask("inspect", run.folder, "--json")
        assert code == 0
        history = read_history(run.folder)
        assert json.loads(out)["step"] == history.step
        for step in history.steps:
            expected = sound[step.step]
            assert (step.tokens, step.rows, step.loss) == (expected.tokens, expected.rows, expected.loss)
        whole = {own[line] for line in damaged.splitlines() if line in own}
        assert whole <= {step.step for step in history.steps if step.loss == sound[step.step].loss}
        num_missing = sum(last - first + 1 for first, last in history.missing_steps)
        assert history.damaged_records or len(history.steps) + num_missing == history.step


def _manifest(run: Run) -> object:
    return read_manifest(LocalStore(run.folder), 7)


def _plan(run: Run) -> object:
    segments = load_plan(run.folder / "plan").segments
    return [(one.plan_id, one.settings, one.sources, one.epochs, one.totals) for one in segments]


def _corpus(run: Run) -> object:
    return Corpus.open(run.plan.newest.sources[0].path).info


@pytest.mark.parametrize(
    ("file", "read", "error"),
    [(_MANIFEST, _manifest, ManifestError), (_PLAN, _plan, UserError), ("corpus.json", _corpus, UserError)],
    ids=["manifest", "plan", "corpus"],
)
@_sizes(15, 400)
def test_a_damaged_file_is_refused_or_read_as_what_it_was(
    run: Run, ask: Ask, file: str, read: Callable[[Run], object], error: type[Exception], count: int, seed: int
) -> None:
    sound, folder = read(run), Path(run.plan.newest.sources[0].path) if file == "corpus.json" else run.folder
    for number, _ in enumerate(_cases(folder / file, count, seed)):
        with contextlib.suppress(error):
            assert read(run) == sound
        ask("inspect", run.folder, *((), ("--checkpoints",), ("--verify",))[number % 3], "--json")


@_sizes(60, 600)
def test_a_damaged_configuration_is_refused_or_read(tmp_path: Path, count: int, seed: int) -> None:
    path = tmp_path / "config.yaml"
    for text in (_TINY.read_text(), json.dumps(small_tree())):
        path.write_text(text)
        for damaged in _cases(path, count // 2, seed, _LETTERS):
            _load(path, (), damaged)


@_sizes(60, 600)
def test_whatever_is_set_is_refused_or_taken(count: int, seed: int) -> None:
    drawn = random.Random(seed)
    names = ("run.name", "run.seed", "model.config", "model.config.hidden_size", "data.sources", "data.epochs", "x.y")
    for _ in range(count):
        text = drawn.choice(names).encode() + b"=" + drawn.choice((*_LETTERS, b"1", b"a"))
        text = mutated(text, drawn, _LETTERS) if drawn.random() < 0.7 else text
        # As Python gives arguments that are no UTF-8.
        _load(_TINY, (text.decode("utf-8", "surrogateescape"),), text)


def _load(path: Path, overrides: Sequence[str], damaged: bytes) -> None:
    begun = time.process_time()
    try:
        load_config(path, overrides)
    except ConfigError as error:
        said = str(error)
        assert len(said) < 40_000, damaged
        said.encode()
    assert time.process_time() - begun < _MOST_SECONDS, damaged


@_sizes(6, 60)
def test_plan_refuses_what_is_set_wrongly(tmp_path: Path, ask: Ask, count: int, seed: int) -> None:
    data, drawn = make_corpus(tmp_path), random.Random(seed)
    for _ in range(count):
        value = drawn.choice(_LETTERS).decode("utf-8", "surrogateescape").replace("\x00", "\\0")
        name = drawn.choice(("model.config.rope_parameters", "model.config.vocab_size", "data.epochs", "run.seed"))
        ask("plan", _TINY, f"--set=data.path={data}", f"--set={name}={value}")


@pytest.mark.parametrize(
    "file", ["journal/attempt-0002.jsonl", _MANIFEST, _PLAN, "config.yaml", "lock/holder-0000001.json"]
)
def test_a_pipe_in_place_of_a_file_stops_nothing_for_ever(run: Run, ask: Ask, file: str, tmp_path: Path) -> None:
    path, aside = run.folder / file, tmp_path / "aside"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(aside)
    os.mkfifo(path)
    try:
        for question in ((), ("--checkpoints",), ("--verify", "--no-read")):
            ask("inspect", run.folder, *question, "--json")
        ask("plan", run.folder / "config.yaml")
    finally:
        path.unlink()
        if aside.exists():
            aside.rename(path)
