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
from tests.unit.checkpoint.manifests import MANIFEST
from tests.unit.config.trees import small_tree
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import Run, make_run
from tests.unit.mutations import NASTY, NASTY_YAML, mutated

_MOST_SECONDS = 5.0


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


Told = Callable[[Sequence[object]], tuple[int, str]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Runs a command, which may fail in words only, and in time; returns its code and what it says."""

    def call(arguments: Sequence[object]) -> tuple[int, str]:
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


def _refused(read: Callable[[], object], sound: object, kind: type[Exception]) -> str:
    """Return in which words a file is refused; none where it is read as what it was."""
    try:
        assert read() == sound
    except kind as error:
        return str(error)
    return ""


def _sizes(few: int, many: int) -> Any:
    """Run a search with few cases among the tests that every change must pass, and with many in the slow ones."""
    return pytest.mark.parametrize(
        ("count", "seed"),
        [pytest.param(few, 1, id=f"{few} cases"), pytest.param(many, 2, id="many", marks=pytest.mark.slow)],
    )


@pytest.mark.parametrize("segment", ["attempt-0001.jsonl", "attempt-0002.jsonl"])
@_sizes(20, 400)
def test_no_damage_to_a_journal_gives_a_wrong_step(run: Run, told: Told, segment: str, count: int, seed: int) -> None:
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
        code, out = told(["inspect", run.folder, "--json"])
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


@_sizes(20, 200)
def test_no_damage_to_a_journal_ends_a_verification_in_a_traceback(run: Run, told: Told, count: int, seed: int) -> None:
    for _ in _cases(run.folder / "journal/attempt-0002.jsonl", count, seed + 10):
        told(["inspect", run.folder, "--verify", "--no-read", "--json"])


@_sizes(15, 300)
def test_a_damaged_manifest_is_refused(run: Run, told: Told, count: int, seed: int) -> None:
    store = LocalStore(run.folder)
    sound = read_manifest(store, 7)
    for number, _ in enumerate(_cases(run.folder / "checkpoints/step-00000007/manifest.json", count, seed)):
        with contextlib.suppress(ManifestError):
            assert read_manifest(store, 7) == sound
        told(["inspect", run.folder, *(("--checkpoints",) if number % 2 else ()), "--json"])


@_sizes(15, 300)
def test_a_damaged_manifest_with_shards_is_refused(tmp_path: Path, count: int, seed: int) -> None:
    path = tmp_path / f"checkpoints/step-{MANIFEST.step:08d}/manifest.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(MANIFEST.to_bytes())
    sound = read_manifest(LocalStore(tmp_path), MANIFEST.step)
    for _ in _cases(path, 2 * count, seed):
        refused = _refused(lambda: read_manifest(LocalStore(tmp_path), MANIFEST.step), sound, ManifestError)
        assert len(refused) < 1000


@_sizes(15, 300)
def test_a_damaged_plan_is_refused(run: Run, told: Told, count: int, seed: int) -> None:
    def facts() -> list[object]:
        segments = load_plan(run.folder / "plan").segments
        return [(one.plan_id, one.settings, one.sources, one.epochs, one.totals) for one in segments]

    sound = facts()
    for number, _ in enumerate(_cases(run.folder / "plan/segment-0000/plan.json", count, seed)):
        assert len(_refused(facts, sound, UserError)) < 2000
        told(["inspect", run.folder, *(("--verify", "--no-read") if number % 2 else ()), "--json"])


@_sizes(50, 500)
def test_a_damaged_corpus_is_refused(corpus: Path, run: Run, told: Told, count: int, seed: int) -> None:
    sound = Corpus.open(corpus).info
    for number, _ in enumerate(_cases(corpus / "corpus.json", count, seed)):
        begun = time.process_time()
        refused = _refused(lambda: Corpus.open(corpus).info, sound, UserError)
        assert not refused or "corpus.json" in refused or "prepare it again" in refused
        assert len(refused) < 2000
        assert time.process_time() - begun < _MOST_SECONDS
        if number % 10 == 0:
            told(["inspect", run.folder, "--verify", "--json"])


@_sizes(60, 600)
def test_a_damaged_configuration_is_refused_or_read(tmp_path: Path, count: int, seed: int) -> None:
    tree = json.dumps(small_tree())
    path = tmp_path / "config.yaml"
    for text in (Path("configs/llama-tiny_cpu_sp2-dp2_8k.yaml").read_text(), tree):
        path.write_text(text)
        for damaged in _cases(path, count // 2, seed, NASTY + NASTY_YAML):
            _load(path, (), damaged)


@_sizes(60, 600)
def test_whatever_is_set_is_refused_or_taken(count: int, seed: int) -> None:
    path, drawn = Path("configs/llama-tiny_cpu_sp2-dp2_8k.yaml"), random.Random(seed)
    names = ("run.name", "run.seed", "model.config", "model.config.hidden_size", "data.sources", "data.epochs", "x.y")
    for _ in range(count):
        name, value = drawn.choice(names).encode(), drawn.choice(NASTY + NASTY_YAML + (b"1", b"a"))
        text = mutated(name + b"=" + value, drawn, NASTY + NASTY_YAML) if drawn.random() < 0.7 else name + b"=" + value
        # As Python gives arguments that are no UTF-8.
        _load(path, (text.decode("utf-8", "surrogateescape"),), text)


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
def test_plan_refuses_what_is_set_wrongly(
    tmp_path_factory: pytest.TempPathFactory, told: Told, count: int, seed: int
) -> None:
    folder, drawn = tmp_path_factory.mktemp("plan"), random.Random(seed)
    data = make_corpus(folder)
    for _ in range(count):
        value = drawn.choice(NASTY + NASTY_YAML).decode("utf-8", "surrogateescape").replace("\x00", "\\0")
        name = drawn.choice(("model.config.rope_parameters", "model.config.vocab_size", "data.epochs", "run.seed"))
        told(["plan", "configs/llama-tiny_cpu_sp2-dp2_8k.yaml", f"--set=data.path={data}", f"--set={name}={value}"])


@pytest.mark.parametrize(
    "file",
    [
        "journal/attempt-0002.jsonl",
        "checkpoints/step-00000007/manifest.json",
        "plan/segment-0000/plan.json",
        "config.yaml",
        "lock/holder-0000001.json",
    ],
)
def test_a_pipe_in_place_of_a_file_stops_nothing_for_ever(run: Run, told: Told, file: str, tmp_path: Path) -> None:
    path, aside = run.folder / file, tmp_path / "aside"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(aside)
    os.mkfifo(path)
    try:
        for question in ((), ("--checkpoints",), ("--verify", "--no-read")):
            told(["inspect", run.folder, *question, "--json"])
        told(["plan", run.folder / "config.yaml"])
    finally:
        path.unlink()
        if aside.exists():
            aside.rename(path)
