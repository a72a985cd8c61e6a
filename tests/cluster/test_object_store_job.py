"""A whole job without any path that nodes share: everything of it is in an object store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from ray_ulysses.config import Config
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.cluster.commands import check_against_unbroken, start
from tests.distributed.run_case import STDLIB_FILES, make_config
from tests.polling import wait_until
from tests.s3_server import S3Server, serve_s3

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]
TIMEOUT_S = 400.0
# Long enough for the first command to be met in the middle, although its records come every few seconds.
LAST_STEP = 160
# Whatever goes wrong, no test asks a real machine for its role.
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def cluster(ray_folder: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes that train, each with a folder of its own for what it keeps, and without any credentials."""
    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.1.1"})
    try:
        for number in (2, 3):
            own = {"RAY_ULYSSES_CACHE_DIR": str(tmp_path / f"node-{number}"), "AWS_METADATA_ENDPOINT": NOWHERE}
            running.add_node(num_cpus=2, node_ip_address=f"127.0.1.{number}", env_vars=own)
        yield running
    finally:
        running.shutdown()


@pytest.fixture
def s3(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """A server that the environment of the commands names; workers find it by the secrets file."""
    with serve_s3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        # Not by RAY_ULYSSES_CACHE_DIR, which a command passes on to its workers.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "command"))
        (tmp_path / "secrets.env").touch(mode=0o600)
        (tmp_path / "secrets.env").write_text("".join(f"{n}='{v}'\n" for n, v in server.environment().items()))
        yield server


def ask(*arguments: object) -> tuple[int, str, str]:
    """Run a command to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "ray_ulysses", *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return done.returncode, done.stdout, done.stderr


def test_a_whole_job_in_an_object_store_is_the_job_of_a_disk(s3: S3Server, cluster: Cluster, tmp_path: Path) -> None:
    stdlib = Path(os.__file__).parent
    corpus = s3.uri("corpora/stdlib")
    files = [stdlib / name for name in STDLIB_FILES]
    code, out, err = ask("prepare", *files, "--out", corpus, "--tokenizer", "bytes")
    assert code == 0, out + err

    def config_for(workers: int, storage: str) -> Config:
        return make_config(
            storage, corpus, run__stop_step=LAST_STEP, parallel__sp_size=1, cluster__workers=workers,  # type: ignore[arg-type]
            cluster__cpus_per_worker=2.0, cluster__address=cluster.address, checkpoint__every_steps=20,
            data__rows_per_step=4, data__epochs=4, cluster__secrets_file=str(tmp_path / "secrets.env"),
            cluster__secrets_names=["AWS_REGION", "AWS_ENDPOINT_URL", "AWS_METADATA_ENDPOINT"],
        )  # fmt: skip

    config = config_for(2, s3.uri("runs"))
    (tmp_path / "plan.yaml").write_text(config.to_yaml())
    code, out, err = ask("plan", tmp_path / "plan.yaml")
    assert code == 0, out + err

    first = start(config, tmp_path / "first")
    try:
        wait_until(
            lambda: first.process.poll() is not None or read_history(config.run_dir, is_held=False).step >= 8,
            "step 8", timeout_s=TIMEOUT_S, every_s=1.0,
        )  # fmt: skip
        assert first.process.poll() is None, first.text
    finally:
        first.kill()

    # By another command, on one worker instead of two.
    again = start(config_for(1, s3.uri("runs")), tmp_path / "second")
    assert again.wait() == 0, again.text
    assert "took over the run from process" in again.text

    history = read_history(config.run_dir)
    assert (history.status, history.step) == ("finished", LAST_STEP)
    assert {attempt.world_size for attempt in history.attempts} == {1, 2}
    check_against_unbroken(history, config_for(1, str(tmp_path / "disk")))
    check_commands(str(config.run_dir), history, tmp_path)
    # Nodes hold copies of the plan and of the corpus, and Ray's own files; nothing of the run was written elsewhere.
    for number in (2, 3):
        kept = {path.name for path in (tmp_path / f"node-{number}").iterdir()}
        assert kept <= {"plans", "blocks", "runs"}, kept


def check_commands(run: str, history: RunHistory, tmp_path: Path) -> None:
    code, out, err = ask("inspect", run, "--json")
    assert code == 0, err
    assert json.loads(out)["data_digest"] == history.data_digest
    for arguments in (
        ("inspect", run, "--verify"),
        ("inspect", run, "--verify-checkpoint", "latest"),
        ("evaluate", run, "--task", "loss", "--lengths", "64", "--max-tokens", "4096"),
        ("report", run),
    ):
        code, out, err = ask(*arguments)
        assert code == 0, out + err
    code, out, err = ask("export", run)
    assert code == 0 and "copying to s3://" in err, out + err
    code, out, err = ask("export", run)
    assert code == 0 and "copying to" not in err, "it is there already"
    code, out, err = ask("report", run, "--out", tmp_path / "report.html")
    assert code == 0 and "nats" in (tmp_path / "report.html").read_text(), out + err
