"""Secrets reach the workers that need them and stand in no file and no output of a run, Ray's own logs included.

Those that an embedded Ray inherits are looked for in `tests.cluster.test_train_job`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from ray_ulysses.cluster.ray_access import private_session
from ray_ulysses.tracking.history import read_history
from tests.cluster.planted_secrets import NAMES, files_with, plant
from tests.cluster.test_train_job import train
from tests.distributed.run_case import make_config, make_corpus
from tests.s3_server import S3Server, serve_s3

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.mark.slow
def test_on_a_cluster_secrets_come_from_the_file_and_what_workers_lack_is_said(
    corpus: Path, tmp_path: Path, ray_folder: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets, file = plant(), tmp_path / "apart" / "secrets.env"
    in_file = [name for name in NAMES if name.startswith("AWS_")]
    file.parent.mkdir()
    file.touch(mode=0o600)
    file.write_text("# keys of the storage\n" + "".join(f"{name}='{secrets[name]}'\n" for name in in_file))
    # Without keys, a worker would ask the machine for its role, and fail.
    places = {"AWS_REGION": "us-east-1", "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"}
    environment = places | {name: value for name, value in secrets.items() if name not in in_file}
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets["RAY_AUTH_TOKEN"])
    with private_session():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_ip_address": "127.0.1.1"})
    try:
        config = make_config(
            tmp_path / "runs", corpus, run__stop_step=2, parallel__sp_size=1, cluster__workers=1,
            cluster__cpus_per_worker=0.25, cluster__address=cluster.address, cluster__secrets_file=str(file),
            tracking__enabled=True, checkpoint__storage=s3.uri("secrets"),
        )  # fmt: skip
        file.chmod(0o640)
        code, text = train(config, tmp_path / "refused", environment)
        assert code == 2
        assert f"cluster.secrets_file='{file}'" in text and "mode 0640" in text
        file.chmod(0o600)
        code, text = train(config, tmp_path / "command", environment)
        assert code == 0, text
        assert read_history(config.run_dir).step == 2
        assert "HF_TOKEN, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_USERNAME are set for this command" in text
    finally:
        cluster.shutdown()
    found = files_with(secrets, tmp_path, ray_folder)
    assert found == {str(file): set(in_file)}
