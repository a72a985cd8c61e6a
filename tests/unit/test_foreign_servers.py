"""A command that reads a run connects to no server that only the run's files name, and says how to allow it."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from tests.breadth import fast_only
from tests.s3_server import S3Server
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.export.runs import TINY_LLAMA, write_checkpoint, write_config
from tests.unit.foreign_servers import ENVIRONMENT, SECRETS, STEERING, ForeignRun, Listener, listening, mutations
from tests.unit.inspect.runs import make_run

QUICK = ("--task", "loss", "--lengths", "32", "--max-tokens", "200", "--cases", "1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_corpus(tmp_path_factory.mktemp("corpus"), varied_texts(40)).path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run that every command can read to its end."""
    folder = tmp_path_factory.mktemp("runs") / "foreign"
    made = make_run(folder, [corpus])
    made.trained(4)
    fields = TINY_LLAMA.to_diff_dict() | {"model_type": "llama"}
    write_config(folder, fields, data__path=str(corpus))
    write_checkpoint(folder, AutoModelForCausalLM.from_config(TINY_LLAMA))
    return folder


@pytest.fixture
def run(made: Path) -> Iterator[ForeignRun]:
    run = ForeignRun(made)
    yield run
    run.restore()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """A server that only the run names, while credentials are in the environment."""
    for name in (*STEERING, "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with listening() as found:
        yield found


class Ask:
    """Runs a command in this process; returns its exit code and what it wrote."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = run_command(app, [*map(str, arguments)])
        said = self._capsys.readouterr()
        assert "Traceback" not in said.err, said.err
        return code, said.out, said.err


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    # A handler of an earlier test writes to the stream that the test had.
    monkeypatch.setattr(logging.getLogger("ray_ulysses"), "handlers", [])
    return Ask(capsys)


def commands(folder: Path, corpus: Path, out: Path, number: int) -> list[tuple[object, ...]]:
    """Return every command that reads a run, those that take a second last."""
    return [
        ("inspect", folder),
        ("inspect", folder, "--json"),
        ("inspect", folder, "--verify"),
        ("inspect", folder, "--row", 0),
        ("inspect", folder, "--checkpoints"),
        ("inspect", folder, "--verify-checkpoint", "latest"),
        ("export", folder, "--no-check", "--out", out / f"export-{number}"),
        ("export", folder, "--out", out / f"export-{number}"),
        ("report", folder, "--out", out / "report.html"),
        ("report", folder, "--beside", folder, "--out", out / "report.html"),
        ("evaluate", folder, "--data", corpus, "--out", out / "evaluation", *QUICK),
        ("evaluate", folder, "--out", out / "evaluation", *QUICK),
    ]


@pytest.mark.parametrize(
    ("count", "num_commands", "seed"),
    [
        pytest.param(28, 7, 1, id="28 cases"),
        *(pytest.param(100, 12, seed, id=f"100 cases, seed {seed}", marks=pytest.mark.slow) for seed in range(2, 8)),
    ],
)
def test_no_command_connects_to_a_server_that_only_the_run_names(
    run: ForeignRun,
    listener: Listener,
    corpus: Path,
    tmp_path: Path,
    ask: Ask,
    count: int,
    num_commands: int,
    seed: int,
) -> None:
    canary = tmp_path / "canary.db"
    sqlite3.connect(canary).execute("CREATE TABLE canary (a)").connection.close()
    before, drawn = canary.read_bytes(), random.Random(seed)
    changes = mutations(run, listener.port, canary)
    kinds = sorted(changes)
    for number in range(count):
        names = [kinds[number % len(kinds)], *drawn.sample(kinds, drawn.randrange(3))]
        command = drawn.choice(commands(run.folder, corpus, tmp_path, number)[:num_commands])
        for name in names:
            changes[name](drawn)
        code, out, err = ask(*command)
        case = f"{names} {command}: {code} {err[-1000:]}"
        assert listener.received == [], case
        assert code in (0, 1, 2) and "problem" not in err, case
        assert not any(value in out + err for value in SECRETS.values()), case
        assert all(name not in os.environ for name in STEERING), case
        assert {name: os.environ[name] for name in SECRETS} == SECRETS, case
        assert canary.read_bytes() == before and not (run.folder.parent / "mlflow.db").exists(), case
        run.restore()


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "--checkpoints"),
        ("inspect", "--verify"),
        ("report",),
        ("export", "--no-check"),
        ("evaluate", *QUICK),
    ],
    ids=" ".join,
)
def test_checkpoints_on_a_server_that_only_the_run_names_are_an_error_with_the_way_out(
    run: ForeignRun, listener: Listener, ask: Ask, command: tuple[str, ...]
) -> None:
    run.set("checkpoint.storage", f"s3://bucket/runs?endpoint_override=127.0.0.1:{listener.port}&scheme=http")
    code, _, err = ask(command[0], run.folder, *command[1:])
    assert code == 2 and listener.received == []
    server = f"http://127.0.0.1:{listener.port}"
    assert "checkpoint.storage" in err and f"set AWS_ENDPOINT_URL_S3={server}, or add --trust-run" in err


@pytest.mark.parametrize("way", ["--trust-run", "environment"])
def test_a_store_that_the_user_allows_is_read(
    run: ForeignRun, s3: S3Server, ask: Ask, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    run.set("checkpoint.storage", s3.uri("foreign"))
    assert ask("inspect", run.folder, "--checkpoints")[0] == 2
    if way == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{s3.port}")
    code, out, err = ask("inspect", run.folder, "--checkpoints", *(["--trust-run"] if way == "--trust-run" else []))
    assert code == 0 and "s3://bucket/foreign/foreign" in out, err


def test_a_corpus_on_a_server_that_only_the_plan_names_is_an_error_unless_it_is_given(
    run: ForeignRun, listener: Listener, corpus: Path, ask: Ask
) -> None:
    run.move_corpus(f"s3://bucket/corpus?endpoint_override=127.0.0.1:{listener.port}&scheme=http")
    run.set("data.path", "/nowhere")
    for options in (("--row", 0), ("--verify",)):
        code, _, err = ask("inspect", run.folder, *options)
        assert code == 2 and "add --trust-run" in err, err
        code, out, err = ask("inspect", run.folder, *options, "--corpus", corpus)
        assert code in (0, 1) and out and "error:" not in err, err
    code, out, err = ask("export", run.folder, "--no-check")
    assert code == 0 and "only the run's files specify the server" in out and "--trust-run" in out, out
    assert listener.received == []


@pytest.mark.parametrize("way", fast_only(["none", "--trust-run", "environment", "another"], "none", "--trust-run"))
def test_results_go_only_to_an_mlflow_server_that_the_user_names(
    run: ForeignRun, listener: Listener, corpus: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    uri = f"http://127.0.0.1:{listener.port}"
    run.track(uri)
    if way in ("environment", "another"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri if way == "environment" else "http://127.0.0.1:9")
    options = ["--trust-run"] if way == "--trust-run" else []
    code, out, err = ask("evaluate", run.folder, "--data", corpus, "--json", "--quiet", *QUICK, *options)
    assert code == 0 and '"position_loss"' in out, err
    assert "note: the results were not logged to MLflow" in err
    if way in ("none", "another"):
        assert listener.received == []
        assert f"tracking.json: uri='{uri}': only the run's files specify the server; set MLFLOW_TRACKING_URI" in err
        assert "add --trust-run" in err
    else:
        assert any(b"canary-mlflow" in one for one in listener.received)


def test_a_file_of_secrets_of_a_run_is_read_only_if_it_is_trusted(
    run: ForeignRun, listener: Listener, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    for text in ("HF_TOKEN=theirs\n", "PYTHONPATH=/tmp\n"):
        run.hide_secrets(text)
        assert ask("inspect", run.folder)[0] == 0
        assert os.environ["HF_TOKEN"] == "mine" and os.environ.get("PYTHONPATH") != "/tmp"
    code, _, err = ask("inspect", run.folder, "--trust-run")
    assert code == 2 and "sets PYTHONPATH" in err
    run.hide_secrets("HF_TOKEN=theirs\n")
    assert ask("inspect", run.folder, "--trust-run")[0] == 0
    assert os.environ["HF_TOKEN"] == "theirs"


def test_a_resume_does_not_ask_a_server_that_only_the_stored_configuration_names(
    run: ForeignRun, listener: Listener, tmp_path: Path, ask: Ask, made: Path
) -> None:
    own = tmp_path / "config.yaml"
    own.write_text((run.folder / "config.yaml").read_text())
    store = f"s3://bucket/runs?endpoint_override=127.0.0.1:{listener.port}&scheme=http"
    run.set("checkpoint.storage", store)
    code, _, err = ask("plan", own)
    assert code == 2 and "set the same checkpoint.storage if the run is yours" in err, err
    run.restore()
    for asked in (made, f"{tmp_path / 'link'}"):
        if not Path(asked).exists():
            (tmp_path / "link").symlink_to(made)
        run.set("checkpoint.storage", store)
        changed: Any = ("--set", "run.name=another", "--set", f"model.resume_from={asked}")
        code, _, err = ask("plan", own, *changed)
        assert code == 2 and "name the store itself in model.resume_from" in err, err
    assert listener.received == []
