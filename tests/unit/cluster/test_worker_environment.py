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

ENVIRONMENT = {
    "PATH": "/bin",
    "HF_HOME": "/models",
    "HF_TOKEN": "a",
    "AWS_REGION": "us-east-1",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_ENDPOINT_URL": "http://me:c@minio:9000",
    "AZURE_STORAGE_CONNECTION_STRING": "d",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "e",
    "MLFLOW_TRACKING_PASSWORD": "f",
}


def test_ray_is_told_where_things_are_and_no_secret() -> None:
    told = {"HF_HOME": "/models", "AWS_REGION": "us-east-1", "TOKENIZERS_PARALLELISM": "false"}
    assert passed_on(ENVIRONMENT, embedded=False) == told
    assert set(kept_back(ENVIRONMENT)) == set(ENVIRONMENT) - set(told) - {"PATH"}


NETWORK = {
    "NCCL_IB_HCA": "mlx5_0,mlx5_1",
    "NCCL_DEBUG": "INFO",
    "FI_PROVIDER": "efa",
    "GLOO_SOCKET_IFNAME": "eth0",
    "UCX_TLS": "rc,cuda_copy",
    "OFI_NCCL_PROTOCOL": "RDMA",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:False",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
}


def test_settings_of_the_network_and_of_the_allocator_reach_the_workers() -> None:
    assert passed_on(NETWORK, embedded=False) == NETWORK | {"TOKENIZERS_PARALLELISM": "false"}
    assert kept_back(NETWORK) == ()


def test_a_secret_among_the_settings_of_the_network_is_kept_back() -> None:
    secrets = {
        "FI_OPX_AUTH_KEY": "a",
        "UCX_TOKEN": "b",
        "NCCL_NET_SECRET_FILE": "/c",
        "GLOO_PROXY": "http://me:d@proxy",
    }
    assert passed_on(secrets, embedded=False) == {"TOKENIZERS_PARALLELISM": "false"}
    assert set(kept_back(secrets)) == set(secrets)


def test_what_names_one_process_or_a_foreign_variable_is_not_passed_on() -> None:
    """With one NCCL_HOSTID for all, NCCL would look for the ranks of other nodes in its own shared memory."""
    others = {
        "NCCL_HOSTID": "a",
        "NCCL_COMM_ID": "10.0.0.1:1",
        "LD_PRELOAD": "/x.so",
        "FINAL": "1",
        "MY_NCCL_DEBUG": "1",
    }
    assert passed_on(others, embedded=False) == {"TOKENIZERS_PARALLELISM": "false"}
    assert kept_back(others) == ()


def test_an_embedded_ray_inherits_all_of_it() -> None:
    assert passed_on(ENVIRONMENT, embedded=True) == {"TOKENIZERS_PARALLELISM": "false"}


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


def test_what_nodes_lack_is_said_by_name_and_node(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"10.0.0.2": (["HF_TOKEN"], None), "10.0.0.1": (["HF_TOKEN"], None), "10.0.0.3": ([], None)}
    assert answers(monkeypatch, found, {"HF_TOKEN": "hunter2"}) == [
        "note: HF_TOKEN is set for this command and not on 10.0.0.1, 10.0.0.2: workers there lack it, since secrets "
        "are not sent through Ray. If the run needs it, set it on every node before Ray starts there, or name a file "
        "that holds it in cluster.secrets_file"
    ]
    assert answers(monkeypatch, {"10.0.0.1": ([], None)}, {"HF_TOKEN": "hunter2"}) == []


def test_a_file_that_a_node_can_not_read_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="mode 0644"):
        answers(monkeypatch, {"10.0.0.1": ([], "mode 0644")}, {"HF_TOKEN": "hunter2"})


def test_a_secret_in_the_job_s_runtime_environment_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    job = json.dumps({"runtime_env": {"env_vars": {"HF_TOKEN": "hunter2", "HF_HOME": "/models"}}})
    (text,) = answers(monkeypatch, {}, {"HF_TOKEN": "hunter2", "RAY_JOB_CONFIG_JSON_ENV_VAR": job})
    assert text.startswith("warning: HF_TOKEN is in the runtime environment of this job, which Ray writes into logs")
    assert "Remove it there, and set it on every node" in text and "hunter2" not in text
    for other in ("", "[]", "{", json.dumps({"runtime_env": None})):
        assert answers(monkeypatch, {}, {"HF_TOKEN": "hunter2", "RAY_JOB_CONFIG_JSON_ENV_VAR": other}) == []
