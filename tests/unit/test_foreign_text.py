"""No text of a run, a corpus, a configuration, a model, a file's name or a cluster acts, or starts a line.

Every command of the program is called with each of its options, and over files in which one text after another attacks.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from http.server import ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import ray
import typer
import yaml
from ray.job_submission import JobDetails, JobStatus, JobType

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.cluster import job_client, local_cluster, prepare_job
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.prepare.preparation import Preparation, PrepareRequest, finish
from ray_ulysses.data.prepare.unit_writer import write_unit
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.engine import self_test_local
from ray_ulysses.engine.self_test_local import LocalSelfTest
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.events import AttemptStarted, CheckpointCommitted, CheckpointsFound, Event
from ray_ulysses.tracking.journal_lines import with_checksum
from tests.local_preparation import prepare_local
from tests.unit.checkpoint.manifests import signed
from tests.unit.config.trees import small_tree
from tests.unit.data.corpora import varied_texts, write_texts
from tests.unit.foreign_text import ATTACK, faults_of
from tests.unit.inspect.runs import Run, make_run
from tests.unit.inspect.saved import save

_PROGRAM: Any = typer.main.get_command(app)
_ARGUMENT = ATTACK.replace("\0", "")
"""An attack as the system passes it to a command."""
_NAME = _ARGUMENT.replace("/", "") + ".txt"
"""An attack that a file may have as its name."""


@dataclass(frozen=True)
class World:
    """What somebody else may have sent: a run with a checkpoint, its configuration, files for a corpus, a model."""

    folder: Path
    run: Run
    config: Path
    sources: Path
    model: Path

    def values(self) -> dict[str, str]:
        """The value of each parameter that makes a command do its work; any other is given the attack."""
        run = str(self.run.folder)
        paths = {"run": run, "other": run, "config": self.config, "sources": self.sources, "model": self.model}
        texts = {"tokenizer": "bytes", "context": 1024, "gpus": 2, "row": 0, "checkpoint": 3, "step": "latest"}
        values = {**paths, **texts, "out": self.folder / "out", "id_field": "id"}
        return {name: str(value) for name, value in values.items()}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("foreign")
    sources = write_texts(folder / "sources", varied_texts(60))
    (sources / _NAME).write_text(f"{ATTACK} a text whose file has a name that attacks")
    corpus = folder / "corpus"
    prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(sources),)), out=corpus))
    for name, content in ({"id": ATTACK, "text": ATTACK}, "{"), ({"id": ATTACK, ATTACK: 1}, '{"text": "x"}'):
        (sources / f"rows-{len(name)}{_NAME}.jsonl").write_text(f"{json.dumps(name)}\n{content}\n")
    (sources / f"broken{_NAME}.parquet").write_bytes(b"PAR1" + ATTACK.encode())
    run = make_run(folder / "runs/demo", [corpus])
    run.attempt([run.started(resumed_from=ATTACK, stage=ATTACK, nodes=[ATTACK]), *run.steps(1, 3), run.committed(3)])
    run.attempt([run.started(3), *run.steps(4, 5), *_every_event()])
    save(LocalStore(run.folder), 3, reason=ATTACK, run=ATTACK)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(small_tree(run__name="demo", run__storage=str(folder / "runs"))))
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(small_tree()["model"]["config"]))
    return World(folder, run, config, sources, folder / "model")


def _every_event() -> list[dict[str, Any]]:
    """Return an event of each kind that has a free text, in which every text attacks."""
    plain = {int: 1, float: 1.0, bool: False}
    events = []
    for kind in get_args(Event):
        hints = get_type_hints(kind)
        free = {one.name for one in fields(kind) if hints[one.name] in (str, str | None)} - {"session"}
        needed = [one for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
        values = {
            one.name: plain.get(hints[one.name], (0, 4) if get_origin(hints[one.name]) is tuple else {"0": ATTACK})
            for one in needed
            if one.name not in ("time", "attempt")
        }
        if free and kind not in (AttemptStarted, CheckpointCommitted, CheckpointsFound):
            name = next(one.default for one in fields(kind) if one.name == "event")
            events.append({**values, **dict.fromkeys(free - {"event"}, ATTACK), "event": name})
    return events


class Cluster:
    """A Ray cluster whose every text attacks."""

    def _details(self, status: JobStatus) -> JobDetails:
        names = {"ray_ulysses_run": _ARGUMENT, "ray_ulysses_run_dir": ATTACK, "ray_ulysses_number": "1"}
        return JobDetails(
            type=JobType.SUBMISSION, submission_id=ATTACK, status=status, entrypoint=ATTACK, metadata=names,
            message=ATTACK, start_time=5000, driver_exit_code=1,
        )  # fmt: skip

    def list_jobs(self) -> list[JobDetails]:
        return [self._details(JobStatus.RUNNING)]

    def get_job_info(self, job: str) -> JobDetails:
        return self._details(JobStatus.FAILED)

    def get_job_logs(self, job: str) -> str:
        # The lines of a log are its own.
        return ATTACK.replace("\n", " ") + "\nstep=3/9 loss=1.0\n"

    async def tail_job_logs(self, job: str) -> Any:
        yield self.get_job_logs(job)

    def stop_job(self, job: str) -> None: ...

    def submit_job(self, **options: Any) -> str:
        raise RuntimeError(ATTACK)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace what a command would start or serve; Ray answers with an attack."""

    def fails(*_: object, **__: object) -> None:
        raise ConnectionError(ATTACK)

    def prepare(preparation: Preparation, **_: object) -> Corpus:
        units = [write_unit(preparation.request.out, unit, preparation.encoder) for unit in preparation.pending]
        return finish(preparation, (*preparation.done, *units))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setattr(local_cluster, "Cluster", fails)
    monkeypatch.setattr(prepare_job, "run_preparation", prepare)
    monkeypatch.setattr(job_client, "connect", lambda *_: Cluster())
    monkeypatch.setattr(subprocess, "run", fails)
    monkeypatch.setattr(os, "execv", fails)
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda _: None)
    monkeypatch.setattr(
        self_test_local, "run_local_self_test", lambda: LocalSelfTest(ok=False, text=ATTACK, hint=ATTACK)
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


Faults = Callable[[list[str]], list[str]]


@pytest.fixture
def faults(capfdbinary: pytest.CaptureFixture[bytes]) -> Faults:
    """Runs a command, and returns what has reached the terminal as it is; JSON must be valid."""

    def call(arguments: list[str]) -> list[str]:
        code = run_command(app, arguments)
        said = capfdbinary.readouterr()
        if "--json" in arguments and code == 0:
            json.loads(said.out)
        return faults_of(said.out) + faults_of(said.err)

    return call


def _calls(name: str, values: dict[str, str]) -> Iterator[list[str]]:
    """Yield calls of a command: with each of its parameters, and with the attack in place of each value."""

    def call(attacked: Any = None, *more: str) -> list[str]:
        found, arguments = [name], []
        for one in _PROGRAM.commands[name].params:
            if one.required or (one is attacked and not getattr(one, "is_flag", False)):
                value = _ARGUMENT if one is attacked and not more else values.get(one.name, _ARGUMENT)
                (arguments if one.param_type_name == "argument" else found).extend(
                    [value] if one.param_type_name == "argument" else [one.opts[0], value]
                )
        return [*found, *(flag for flag in more if flag), "--", *arguments]

    yield call()
    for one in _PROGRAM.commands[name].params:
        if getattr(one, "is_flag", False):
            yield call(None, one.opts[0])
            yield from (call(None, flag) for flag in one.secondary_opts)
        else:
            yield call(one)
            if one.name in values:
                yield call(one, "")
                if any(other.name == "as_json" for other in _PROGRAM.commands[name].params):
                    yield call(one, "--json")


@pytest.mark.parametrize(
    "most", [2, pytest.param(None, marks=(pytest.mark.slow, pytest.mark.timeout(1800)))], ids=["few", "all"]
)
@pytest.mark.parametrize("name", sorted(_PROGRAM.commands))
def test_no_command_obeys_or_forges(world: World, faults: Faults, name: str, most: int | None) -> None:
    own = {"run": _ARGUMENT} if name in ("status", "logs", "stop") else {}
    for arguments in islice(_calls(name, world.values() | own), most):
        assert faults(arguments) == [], arguments


def _planted(value: Any) -> Iterator[Any]:
    """Yield a value with the attack in place of one of its texts after the other, keys included."""
    if isinstance(value, str):
        yield ATTACK
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from ({**value, key: planted} for planted in _planted(child))
            yield {**{name: other for name, other in value.items() if name != key}, ATTACK: child}
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from ([*value[:number], planted, *value[number + 1 :]] for planted in _planted(child))


def _sealed(fields: dict[str, Any]) -> bytes:
    """Return the file of a plan or a manifest with the checksum that their reader expects."""
    if "checksum" in fields:
        rest = {name: value for name, value in fields.items() if name != "checksum"}
        return json.dumps({**rest, "checksum": stable_hash(rest)}).encode()
    return signed(fields) if "crc32" in fields else json.dumps(fields).encode()


def _attacked(file: Path) -> Iterator[bytes]:
    """Yield the contents of a file in each of which one text attacks, with right checksums."""
    text = file.read_text()
    if file.suffix == ".jsonl":
        lines = text.splitlines()
        for number, line in enumerate(lines):
            fields = {name: value for name, value in json.loads(line).items() if name != "crc32"}
            for planted in _planted(fields):
                new = with_checksum(json.dumps(planted).encode()).decode()
                yield "\n".join([*lines[:number], new, *lines[number + 1 :], ""]).encode()
    elif file.suffix == ".json":
        yield from (_sealed(planted) for planted in _planted(json.loads(text)))
    else:
        yield from (yaml.safe_dump(planted).encode() for planted in _planted(yaml.safe_load(text)))


_RUN = "runs/demo"
_LOOKS = {
    f"{_RUN}/config.yaml": ["inspect", "report", "export", "evaluate", "checkpoints", "row"],
    f"{_RUN}/journal/attempt-0001.jsonl": ["inspect", "inspect-json", "verify", "checkpoints", "report"],
    f"{_RUN}/journal/attempt-0002.jsonl": ["inspect", "inspect-json", "verify", "report"],
    f"{_RUN}/checkpoints/step-00000003/manifest.json": ["checkpoints", "checkpoint", "export", "evaluate", "report"],
    f"{_RUN}/plan/segment-0000/plan.json": ["inspect", "verify", "row", "report"],
    "corpus/corpus.json": ["row", "verify", "evaluate"],
    "config.yaml": ["plan", "plan-json", "train", "check", "submit", "rehearse"],
    "model/config.json": ["init", "doctor"],
}


_ALL = (pytest.mark.slow, pytest.mark.timeout(1800))
_CASES = [(file, look) for file, looks in _LOOKS.items() for look in looks]


@pytest.mark.parametrize(
    ("file", "look", "most"),
    [
        *(pytest.param(file, looks[0], 2, id=f"{file}-{looks[0]}-few") for file, looks in _LOOKS.items()),
        *(pytest.param(file, look, None, id=f"{file}-{look}-all", marks=_ALL) for file, look in _CASES),
    ],
)
def test_no_text_of_a_file_acts(world: World, faults: Faults, file: str, look: str, most: int | None) -> None:
    run, config, model = str(world.run.folder), str(world.config), str(world.model)
    looks = {
        **{name: [name, run] for name in ("inspect", "report", "export", "evaluate")},
        **{name: [name, config] for name in ("plan", "train", "check", "submit", "rehearse")},
        "inspect-json": ["inspect", run, "--json"],
        "verify": ["inspect", run, "--verify"],
        "row": ["inspect", run, "--row", "0"],
        "checkpoints": ["inspect", run, "--checkpoints"],
        "checkpoint": ["inspect", run, "--verify-checkpoint", "latest"],
        "plan-json": ["plan", config, "--json"],
        "init": ["init", "--model", model, "--context", "1024", "--gpus", "2", "--out", "out.yaml"],
        "doctor": ["doctor", "--model", model],
    }
    path = world.folder / file
    before, attacks = path.read_bytes(), list(_attacked(path))
    assert len(attacks) > 5
    try:
        for content in attacks if most is None else random.Random(file).sample(attacks, most):
            path.write_bytes(content)
            assert faults(looks[look]) == [], content
    finally:
        path.write_bytes(before)
