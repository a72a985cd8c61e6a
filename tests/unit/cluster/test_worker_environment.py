"""What of the command's environment Ray is told, and what is kept back."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from ray_ulysses.cluster import worker_environment
from ray_ulysses.cluster.worker_environment import check_secrets, kept_back, passed_on
from ray_ulysses.config.loading import parse_config
from ray_ulysses.errors import UserError
from tests.unit.config.trees import small_tree

OTHERS = {"PATH": "/bin", "NCCL_HOSTID": "a", "NCCL_COMM_ID": "10.0.0.1:1", "LD_PRELOAD": "/x.so", "MY_NCCL_DEBUG": "1"}
"""With one NCCL_HOSTID for all, NCCL would look for the ranks of other nodes in its own shared memory."""
PLACES = {"HF_HOME": "/models", "AWS_REGION": "us-east-1"}
NETWORK = {
    "NCCL_IB_HCA": "mlx5_0,mlx5_1", "FI_PROVIDER": "efa", "GLOO_SOCKET_IFNAME": "eth0", "UCX_TLS": "rc,cuda_copy",
    "OFI_NCCL_PROTOCOL": "RDMA", "TORCH_NCCL_BLOCKING_WAIT": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:False",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
}  # fmt: skip
SECRETS = {
    "HF_TOKEN": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": "http://me:c@minio:9000",
    "AZURE_STORAGE_CONNECTION_STRING": "d", "GOOGLE_SERVICE_ACCOUNT_KEY": "e", "MLFLOW_TRACKING_PASSWORD": "f",
    "FI_OPX_AUTH_KEY": "a", "UCX_TOKEN": "b", "NCCL_NET_SECRET_FILE": "/c", "GLOO_PROXY": "http://me:d@proxy",
}  # fmt: skip


def test_workers_get_places_and_the_networks_settings_and_no_secret() -> None:
    environment, always = OTHERS | PLACES | NETWORK | SECRETS, {"TOKENIZERS_PARALLELISM": "false"}
    assert passed_on(environment, embedded=False) == PLACES | NETWORK | always
    assert set(kept_back(environment)) == set(SECRETS)
    assert passed_on(environment, embedded=True) == always, "an embedded Ray inherits all of it"


def answers(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], environment: dict[str, str]) -> list[str]:
    """Let nodes answer, and return what is said of it."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_STORAGE_", "GOOGLE_", "HF_TOKEN", "MLFLOW_", "PGPASSWORD", "RAY_JOB_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker_environment, "_ask_nodes", lambda names, path: found)
    said: list[str] = []
    check_secrets(parse_config(small_tree()), said.append)
    return said


def test_what_nodes_lack_is_said_by_name_and_node_and_an_unreadable_file_ends_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"10.0.0.2": (["HF_TOKEN"], None), "10.0.0.1": (["HF_TOKEN"], None), "10.0.0.3": ([], None)}
    (text,) = answers(monkeypatch, found, {"HF_TOKEN": "hunter2"})
    assert "HF_TOKEN" in text and "10.0.0.1, 10.0.0.2:" in text and "cluster.secrets_file" in text
    assert answers(monkeypatch, {"10.0.0.1": ([], None)}, {"HF_TOKEN": "hunter2"}) == []
    with pytest.raises(UserError, match="mode 0644"):
        answers(monkeypatch, {"10.0.0.1": ([], "mode 0644")}, {"HF_TOKEN": "hunter2"})


def test_a_secret_in_the_job_s_runtime_environment_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    job = json.dumps({"runtime_env": {"env_vars": {"HF_TOKEN": "hunter2", "HF_HOME": "/models"}}})
    (text,) = answers(monkeypatch, {}, {"HF_TOKEN": "hunter2", "RAY_JOB_CONFIG_JSON_ENV_VAR": job})
    assert text.startswith("warning: HF_TOKEN ") and "HF_HOME" not in text and "hunter2" not in text
    for other in ("", "[]", "{", json.dumps({"runtime_env": None})):
        assert answers(monkeypatch, {}, {"HF_TOKEN": "hunter2", "RAY_JOB_CONFIG_JSON_ENV_VAR": other}) == []
