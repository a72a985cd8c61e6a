"""Selects environment variables for workers, and detects missing secrets, which are never sent through Ray.

Ray writes a runtime environment's variables to logs that everybody on a node can read. An embedded Ray inherits this
process's environment; on a cluster, secrets come from each node's environment or from ``cluster.secrets_file``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.clock import CLOCK_START
from ray_ulysses.cluster.session import answers_in_time
from ray_ulysses.config import Config
from ray_ulysses.config.credentials import CREDENTIALS
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.gpu_environment import ALLOCATOR
from ray_ulysses.run.secrets_file import SETTING, SecretsFile, read_secrets

PASSED = frozenset(
    {
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "AWS_ALLOW_HTTP",
        "AWS_CA_BUNDLE",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_METADATA_ENDPOINT",
        "AWS_REGION",
        "AZURE_STORAGE_ACCOUNT_NAME",
        "WANDB_BASE_URL",
        "WANDB_ENTITY",
        "WANDB_MODE",
        "RAY_ULYSSES_CACHE_DIR",
        "RAY_ULYSSES_CACHE_GIB",
        CLOCK_START,
    }
)
"""Variables that locate models, object stores, the cache and trackers, or set the time; none of them is a secret."""
_NETWORK_PREFIXES = ("NCCL_", "FI_", "GLOO_", "UCX_", "OFI_NCCL_", "TORCH_NCCL_", "TORCH_FR_")
"""Prefixes of variables that configure the libraries for communication between workers."""
_OF_ONE_PROCESS = frozenset({"NCCL_HOSTID", "NCCL_COMM_ID"})
"""Variables with a prefix in `_NETWORK_PREFIXES` that apply to only one process or group."""
_SECRET = re.compile(r"(^|_)(AUTH|CREDENTIALS?|KEY|PASSWORD|PASSWD|SECRET|TOKEN)(_|$)")
_STORAGE_PREFIXES = ("AWS_", "AZURE_STORAGE_", "GOOGLE_")
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_ALWAYS = {"TOKENIZERS_PARALLELISM": "false"}
_PATIENCE_S = 60.0


def passed_on(environment: Mapping[str, str], *, embedded: bool) -> dict[str, str]:
    """Return the variables that Ray sets in each worker.

    Args:
        environment: Environment variables of this process.
        embedded: Whether Ray is embedded. The processes of an embedded Ray inherit all other variables.
    """
    found = {} if embedded else {name: environment[name] for name in environment if _is_passed(name, environment)}
    return found | _ALWAYS


def network_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that configure communication and PyTorch's allocator, which apply to all workers."""
    return {
        name: value for name, value in environment.items() if _is_of_network(name) and _is_passed(name, environment)
    }


def kept_back(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables that a run may need but that may be secrets, and are therefore withheld."""
    may_be_needed = (*_STORAGE_PREFIXES, *_NETWORK_PREFIXES)
    names = (name for name in environment if name in CREDENTIALS or name.startswith(may_be_needed))
    return tuple(sorted(name for name in names if name not in _OF_ONE_PROCESS and not _is_passed(name, environment)))


def check_secrets(config: Config, say: Callable[[str], Any]) -> None:
    """Check, before workers start, that every node of the connected cluster has this command's secrets.

    Raises:
        UserError: A node can't read ``cluster.secrets_file``.
    """
    names, file = kept_back(os.environ), SecretsFile.of(config)
    if shown := sorted(_of_the_job(os.environ).intersection(names)):
        say(
            f"warning: {', '.join(shown)} {_are(shown)} in the runtime environment of this job, which Ray writes into "
            f"logs that others can read. Remove {_it(shown)} there, and {_hint(shown)}; then replace the secrets that "
            "Ray has logged"
        )
    if not names and file is None:
        return
    lacking: dict[str, list[str]] = {}
    for node, (missing, problem) in _ask_nodes(names, file).items():
        if problem is not None:
            raise UserError(problem)
        for name in missing:
            lacking.setdefault(name, []).append(node)
    if lacking:
        nodes = sorted({node for where in lacking.values() for node in where})
        say(
            f"note: {', '.join(lacking)} {_are(lacking)} set for this command but not on {', '.join(nodes)}: workers "
            f"there lack {_it(lacking)}, because secrets are not sent through Ray. If the run needs "
            f"{_it(lacking)}, {_hint(lacking)}"
        )


def _ask_nodes(names: Collection[str], file: SecretsFile | None) -> dict[str, tuple[list[str], str | None]]:
    """Query the nodes that can run a worker; nodes that do not respond are left out."""
    requests: dict[Any, str] = {}
    look: Any = ray.remote(_look)
    for node in ray.nodes():
        if node["Alive"] and (node["Resources"].get("CPU") or node["Resources"].get("GPU")):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            on_node = look.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            requests[on_node.remote(list(names), file)] = str(node["NodeManagerAddress"])
    return answers_in_time(requests, _PATIENCE_S)


def _look(names: list[str], file: SecretsFile | None) -> tuple[list[str], str | None]:
    """Return the variables that this node's workers lack, and the secrets file's error (None if usable)."""
    try:
        there = set(os.environ).union(() if file is None else read_secrets(file.path, file.names))
    except FileNotFoundError as error:
        return [], f"{SETTING}={error.filename!r} does not exist on {os.uname().nodename}; create it on every node"
    except UserError as error:
        return [], str(error)
    return [name for name in names if name not in there], None


def _is_passed(name: str, environment: Mapping[str, str]) -> bool:
    # An address may contain a password.
    return (name in PASSED or _is_of_network(name)) and "@" not in environment[name]


def _is_of_network(name: str) -> bool:
    if name in ALLOCATOR:
        return True
    return name.startswith(_NETWORK_PREFIXES) and name not in _OF_ONE_PROCESS and not _SECRET.search(name)


def _of_the_job(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the variables in the runtime environment of this process's Ray job."""
    try:
        job = json.loads(environment.get(_JOB, "{}"))
        return frozenset(job["runtime_env"]["env_vars"])
    except (ValueError, KeyError, TypeError):
        return frozenset()


def _are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _hint(names: Collection[str]) -> str:
    it = _it(names)
    return f"set {it} on every node before Ray starts there, or set {SETTING} to a file that contains {it}"


def _it(names: Collection[str]) -> str:
    return "it" if len(names) == 1 else "them"
