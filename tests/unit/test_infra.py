from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from ray_ulysses.config import Config, load_config
from ray_ulysses.run.preflight import report_run
from ray_ulysses.run_names import SAVE_FILE
from tests.polling import wait_until

_ROOT = Path(__file__).parents[2]
_INFRA = _ROOT / "infra"
_CONFIGS = tuple(sorted((_ROOT / "configs").glob("*xh100*.yaml")))
_KUBERNETES = "1.34"
_IN_IMAGE = "/opt/ray-ulysses/"
_SIZES = (8, 16, 32, 64, 128, 256)
_NETWORKS = ("efa", "infiniband")
_KUSTOMIZATIONS = (
    "kuberay",
    *(f"overlays/gpus-{size}" for size in _SIZES),
    *(f"overlays/gpus-64-{network}" for network in _NETWORKS),
)


_JOB_TYPES = {
    "entrypoint": str, "rayClusterSpec": dict, "runtimeEnvYAML": str, "submissionMode": str, "backoffLimit": int,
    "shutdownAfterJobFinishes": bool, "ttlSecondsAfterFinished": int,
}  # fmt: skip
_CLUSTER_TYPES = {"headGroupSpec": dict, "rayVersion": str, "authOptions": dict, "workerGroupSpecs": list}
_GROUP_TYPES = {
    "rayStartParams": dict, "template": dict, "groupName": str, "minReplicas": int, "maxReplicas": int, "replicas": int
}  # fmt: skip
"""Fields of KubeRay's RayJob and their types in ray-operator/apis/ray/v1 (KubeRay 1.5.1): no Python package has its
schema."""


def _documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((_INFRA / path).read_text(encoding="utf-8")))


def _constraint(name: str) -> str:
    (version,) = re.findall(rf"(?m)^{name}==(.+)$", (_ROOT / "constraints.txt").read_text(encoding="utf-8"))
    return str(version)


def _rendered(folder: str) -> list[dict[str, Any]]:
    """Return the documents of a kustomization, whose patches replace single values."""
    place = _INFRA / folder
    content = yaml.safe_load((place / "kustomization.yaml").read_text(encoding="utf-8"))
    documents: list[dict[str, Any]] = []
    for name in content["resources"]:
        resource = (place / name).resolve()
        relative = str(resource.relative_to(_INFRA))
        documents += _rendered(relative) if resource.is_dir() else _documents(relative)
    components = [(place / name / "kustomization.yaml").resolve() for name in content.get("components", [])]
    of_components = [yaml.safe_load(component.read_text(encoding="utf-8"))["patches"] for component in components]
    for patch in (*content.get("patches", []), *itertools.chain(*of_components)):
        kind, name = patch["target"]["kind"], patch["target"].get("name")
        (document,) = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
        for operation in yaml.safe_load(patch["patch"]):
            replaces = {"add": False, "replace": True}[operation["op"]]
            _put(document, operation["path"], operation["value"], replaces=replaces)
    return documents


def _put(document: Any, path: str, value: Any, *, replaces: bool) -> None:
    names = [part.replace("~1", "/") for part in path.strip("/").split("/")]
    *parents, last = [int(name) if name.isdigit() else name for name in names]
    for part in parents:
        document = document[part]
    # There is a value to replace, and none where one is added.
    assert (last in document if isinstance(document, dict) else last < len(document)) == replaces
    document[last] = value


@pytest.fixture(params=_KUSTOMIZATIONS)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return _rendered(request.param)


@pytest.fixture
def ray_job(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (document,) = [one for one in manifests if one["kind"] == "RayJob"]
    return document


@pytest.fixture(
    params=["ray-cluster.yaml", "ray-cluster-gcp.yaml", "ray-cluster-efa.yaml", "ray-cluster-infiniband.yaml"]
)
def ray_cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    (document,) = _documents(request.param)
    return document


def _groups(ray_job: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    cluster = ray_job["spec"]["rayClusterSpec"]
    yield "head", cluster["headGroupSpec"]
    yield from ((group["groupName"], group) for group in cluster["workerGroupSpecs"])


def _trained_config(command: str) -> Config:
    """Return the configuration that a command of the image trains; its script and file exist in the repository."""
    python, script, file, *options = shlex.split(command)
    assert options[::2] == ["--set"] * (len(options) // 2)
    assert python == "python"
    assert script.startswith(_IN_IMAGE)
    assert (_ROOT / script.removeprefix(_IN_IMAGE)).is_file()
    return load_config(_ROOT / file.removeprefix(_IN_IMAGE), options[1::2], environment={})


@pytest.mark.parametrize(
    "path", ["kuberay/shared-storage.yaml", "kuberay/disruption-budget.yaml", "mlflow/kubernetes.yaml"]
)
def test_a_kubernetes_manifest_is_valid_by_the_schema_of_kubernetes(path: str) -> None:
    for document in _documents(path):
        kubernetes_validate.validate(document, _KUBERNETES, strict=True)


def test_the_ray_job_has_known_fields_and_valid_pods(ray_job: dict[str, Any]) -> None:
    assert set(ray_job) == {"apiVersion", "kind", "metadata", "spec"} and ray_job["apiVersion"] == "ray.io/v1"
    specs = [(ray_job["spec"], _JOB_TYPES), (ray_job["spec"]["rayClusterSpec"], _CLUSTER_TYPES)]
    for spec, types in (*specs, *((group, _GROUP_TYPES) for _, group in _groups(ray_job))):
        assert {name: value for name, value in spec.items() if type(value) is not types.get(name)} == {}
    assert ray_job["spec"]["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode")
    for name, group in _groups(ray_job):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **group["template"]}
        kubernetes_validate.validate(pod, _KUBERNETES, strict=True)


@pytest.mark.parametrize("folder", _KUSTOMIZATIONS)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kustomize_makes_the_same_of_it(folder: str) -> None:
    done = subprocess.run(["kubectl", "kustomize", folder], cwd=_INFRA, capture_output=True, text=True, check=True)
    made, own = (
        {(one["kind"], one["metadata"]["name"]): one for one in documents}
        for documents in (yaml.safe_load_all(done.stdout), _rendered(folder))
    )
    assert made == own


def _job(overlay: str) -> dict[str, Any]:
    (job,) = [one for one in _rendered(f"overlays/{overlay}") if one["kind"] == "RayJob"]
    return job


@pytest.mark.parametrize("size", _SIZES)
def test_an_overlay_has_the_gpus_of_its_name(size: int) -> None:
    job = _job(f"gpus-{size}")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert {group[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {size // 8}
    config = _trained_config(job["spec"]["entrypoint"])
    assert job["metadata"]["name"] == config.run.name
    assert config.data.rows_per_step % (size // config.parallel.sp_size) == 0, "a part of the ranks would idle"


@pytest.mark.slow
@pytest.mark.parametrize("size", _SIZES)
def test_the_run_of_an_overlay_fits_its_gpus(size: int) -> None:
    assert report_run(_trained_config(_job(f"gpus-{size}")["spec"]["entrypoint"]), _ROOT, synthetic=True).problems == ()


def test_voluntary_disruptions_wait_for_the_head_and_take_one_worker_at_a_time(manifests: list[dict[str, Any]]) -> None:
    (job,) = [one for one in manifests if one["kind"] == "RayJob"]
    budgets = [one["spec"] for one in manifests if one["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == 2
    for name, group in _groups(job):
        labels = group["template"]["metadata"]["labels"].items()
        (budget,) = [one for one in budgets if one["selector"]["matchLabels"].items() <= labels]
        # Of pods that belong to a kind of its own, Kubernetes takes no percentage and no maxUnavailable.
        assert budget["minAvailable"] == (1 if name == "head" else group["replicas"] - 1)
        assert set(budget) == {"minAvailable", "selector"}


def test_the_head_asks_for_a_checkpoint_before_it_ends(ray_job: dict[str, Any]) -> None:
    config = _trained_config(ray_job["spec"]["entrypoint"])
    spec = ray_job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    shell = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    ask, wait = shell[2].split(" && ")
    assert (shell[:2], ask) == (["sh", "-c"], f"touch {config.run_dir / SAVE_FILE}")
    assert int(wait.removeprefix("sleep ")) < spec["terminationGracePeriodSeconds"]


def test_the_ray_job_has_the_workers_that_its_configuration_asks_for(ray_job: dict[str, Any]) -> None:
    config = _trained_config(ray_job["spec"]["entrypoint"])
    gpus = cpus = 0
    for _, group in _groups(ray_job):
        for container in group["template"]["spec"]["containers"]:
            gpus += int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) * group.get("replicas", 0)
            cpus += int(container["resources"]["limits"]["cpu"]) * group.get("replicas", 0)
    assert gpus == config.cluster.workers.max * config.cluster.gpus_per_worker
    assert cpus > config.cluster.workers.max * config.cluster.cpus_per_worker, "the data stream needs CPUs too"


def test_a_workers_pod_drains_its_node_before_it_ends(ray_job: dict[str, Any]) -> None:
    # Imports the whole of Ray Serve.
    from ray.scripts.scripts import drain_node

    (spec,) = [group["template"]["spec"] for name, group in _groups(ray_job) if name == "h100-spot"]
    shell = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert shell[:2] == ["sh", "-c"]
    drain, wait = shell[2].split(" && ")
    assert shlex.split(drain)[:2] == ["ray", "drain-node"]
    # A canary of Ray 2.60: the command is hidden.
    options = drain_node.make_context("ray drain-node", shlex.split(drain)[2:]).params
    assert (options["reason"], options["node_id"]) == ("DRAIN_NODE_REASON_PREEMPTION", None)
    # The hook's time is part of the grace period: SIGTERM ends Ray at once.
    assert wait == f"sleep {options['deadline_remaining_seconds']}"
    assert 60 <= options["deadline_remaining_seconds"] <= spec["terminationGracePeriodSeconds"] - 10


def test_the_ray_cluster_is_valid_by_rays_own_schema(ray_cluster: dict[str, Any]) -> None:
    schema = (Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8")
    jsonschema.validate(ray_cluster, json.loads(schema))
    # What `ray up` does before it asks a cloud for anything.
    validate_config(prepare_config(ray_cluster))


@pytest.mark.parametrize(("network", "device"), [("efa", "vpc.amazonaws.com/efa"), ("infiniband", "rdma/")])
def test_a_pod_on_a_fast_network_has_its_libraries_and_devices_and_may_lock_memory(network: str, device: str) -> None:
    (group,) = _job(f"gpus-64-{network}")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["image"].endswith(f"-{network}")
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert any(name.startswith(device) for name in limits) and requests == limits
    plain = _job("gpus-64")
    assert group["replicas"] == plain["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"]
    assert "vpc.amazonaws.com/efa" not in str(plain)


def test_every_cluster_asks_for_a_token_and_no_file_holds_one(
    ray_job: dict[str, Any], ray_cluster: dict[str, Any]
) -> None:
    assert ray_job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    # KubeRay sets the mode and the token in the pods: a variable of ours would come before it.
    for _, group in _groups(ray_job):
        names = [one["name"] for container in group["template"]["spec"]["containers"] for one in container["env"]]
        assert not [name for name in names if name.startswith("RAY_AUTH")]
    assert "--env RAY_AUTH_MODE=token" in ray_cluster["docker"]["run_options"]
    assert ray_cluster["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert "\nENV RAY_AUTH_MODE=token\n" in (_INFRA / "Dockerfile").read_text(encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for path in _INFRA.rglob("*") if path.is_file()]
    assert not [text for text in texts if re.search(r"RAY_AUTH_(MODE[=:, value]*disabled|TOKEN=)", text)]


def test_versions_are_those_of_the_constraints(ray_job: dict[str, Any]) -> None:
    assert ray_job["spec"]["rayClusterSpec"]["rayVersion"] == _constraint("ray")
    image = f"ghcr.io/mlflow/mlflow:v{_constraint('mlflow')}"
    (compose,) = _documents("mlflow/compose.yaml")
    deployment = next(d for d in _documents("mlflow/kubernetes.yaml") if d["kind"] == "Deployment")
    assert compose["services"]["mlflow"]["image"] == image
    assert [c["image"] for c in deployment["spec"]["template"]["spec"]["containers"]] == [image]


def test_the_mlflow_service_answers_by_the_name_that_the_configurations_use() -> None:
    documents = {document["kind"]: document for document in _documents("mlflow/kubernetes.yaml")}
    service, deployment = documents["Service"], documents["Deployment"]
    (port,) = service["spec"]["ports"]
    address = f"{service['metadata']['name']}:{port['port']}"
    assert {load_config(path, environment={}).tracking.uri for path in _CONFIGS} == {f"http://{address}"}
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (allowed,) = [argument for argument in container["args"] if argument.startswith("--allowed-hosts=")]
    assert address in allowed.partition("=")[2].split(",")
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_lost_nodes_are_noticed_soon_wherever_a_head_is_started(
    ray_job: dict[str, Any], ray_cluster: dict[str, Any]
) -> None:
    container = ray_job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    in_pod = {variable["name"]: variable["value"] for variable in container["env"]}
    command = " ".join(ray_cluster["head_start_ray_commands"])
    on_machine = dict(re.findall(r"(RAY_health_check_\w+)=(\d+)", command))
    assert on_machine == {name: value for name, value in in_pod.items() if name.startswith("RAY_health_check_")}
    assert len(on_machine) == 4
    for name in ("slurm.sbatch", "skypilot.yaml"):
        text = (_INFRA / name).read_text(encoding="utf-8")
        assert dict(re.findall(r"(RAY_health_check_\w+)=(\d+)", text)) == on_machine, name
        assert "export RAY_AUTH_MODE=token\n" in text, name


def _handles_sigterm(pid: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    assert caught
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_slurm_job_starts_a_ray_node_on_each_of_its_nodes_and_passes_the_signal_to_the_run(tmp_path: Path) -> None:
    """Slurm's and our commands are played; ``sbatch`` signals only the script's shell."""
    programs = {
        "scontrol": "echo n1; echo n2; echo n3",
        "srun": 'echo "srun $*" >> calls; while [[ $1 == -* ]]; do shift; done; "$@"',
        # The three nodes are up once `status` answers, as a real head's node is.
        "ray": """[[ $1 != status ]] || exec test "$(grep -c '^ray start' calls)" = 3
            echo "ray $*" >> calls; exec sleep 60""",
        "ray-ulysses": 'trap "exit 7" TERM; echo "$RAY_ADDRESS $*" >> calls; sleep 60 & wait',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-3]"}
    job = subprocess.Popen(
        ["bash", str(_INFRA / "slurm.sbatch"), "c.yaml"], cwd=tmp_path, env=environment, start_new_session=True
    )
    try:
        calls = tmp_path / "calls"
        wait_until(lambda: calls.exists() and "train" in calls.read_text(), "the run starts")
        wait_until(lambda: _handles_sigterm(job.pid), "the script passes SIGTERM on")
        job.terminate()
        assert job.wait(60) == 7
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    lines = calls.read_text().splitlines()
    assert "n1:6379 train c.yaml --set cluster.wait_for_nodes=true" in lines
    started = {line.split("--nodelist=")[1].split()[0]: line for line in lines if line.startswith("srun")}
    assert started.keys() == {"n1", "n2", "n3"}
    assert "--head" in started["n1"]
    assert all("--address=n1:6379 --block" in started[node] for node in ("n2", "n3"))


def test_the_image_has_one_cudnn() -> None:
    """PyTorch's own; of two, the dynamic loader may choose the other one."""
    text = (_INFRA / "Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"(?m)^ARG CUDA_IMAGE=(.+)$", text)
    assert "cudnn" not in base and not re.search(r"(?m)^[^#]*cudnn", text)


def test_the_image_copies_what_exists() -> None:
    text = (_INFRA / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    copied = [source for line in re.findall(r"(?m)^COPY (?!--from)(.+)$", text) for source in line.split()[:-1]]
    assert {"ray_ulysses", "configs", "jobs", "constraints.txt"} <= set(copied)
    assert [source for source in copied if not (_ROOT / source).exists()] == []
    kept = (_INFRA / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in kept if line.startswith("!")} == set(copied)
