"""The command ``doctor``: checks this machine, its cluster or a model, and gives a hint for each problem."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ray_ulysses.commands.options import AsJson, Quiet
from ray_ulysses.commands.output import Waiting, put
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.report.words import as_text

if TYPE_CHECKING:
    from ray_ulysses.attention.probe import ProbeResult
    from ray_ulysses.cluster.node_watch import CloudSetting

EXAMPLE = "Example: ray-ulysses doctor --storage /mnt/shared/runs"
Level = Literal["ok", "warn", "fail"]

_GIB = 1 << 30
_SUPPORTED_PYTHON = ((3, 11), (3, 13))
_REQUIRED = ("torch", "ray", "deepspeed", "transformers", "mlflow", "pyarrow", "safetensors")
_LEAST_SHARED_MEMORY_GIB = 1.0
_LEAST_DISK_GIB = 10.0
_NAME_WIDTH = len("shared memory")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    level: Level
    """``ok``, ``warn`` (a run may fail or be slow) or ``fail`` (a run can't start)."""
    detail: str
    hint: str = ""
    """How to solve the problem; empty if the level is ``ok``."""


def doctor(
    storage: Annotated[str | None, typer.Option(help="Directory for runs, or a s3://, gs:// or abfs:// URI.")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to check; by default RAY_ADDRESS, if set.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Check only whether this model can be trained exactly; a directory or hub id.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check whether this machine and its Ray cluster are ready, or whether a model can be trained exactly."""
    checks: list[Check] = []
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        if model is None:
            importlib.import_module("ray_ulysses.cluster.session")
        wait.phase("checking this machine" if model is None else "checking the model")
        for check in _checks(storage=storage, address=address, model=model):
            checks.append(check)
            if not (as_json or (quiet and check.level == "ok")):
                wait.show(render_check(check))
    put(
        json.dumps({"checks": [asdict(one) for one in checks]}, indent=2) if as_json else render_sum(checks),
        is_exact=as_json,
    )
    if exit_code(checks):
        raise typer.Exit(1)


def _checks(*, storage: str | None, address: str | None, model: str | None) -> Iterator[Check]:
    """Check the machine and the cluster, or only a model; yield each result as soon as it is known."""
    if model is not None:
        yield from check_model(model)
        return
    if address is not None or os.environ.get("RAY_ADDRESS"):
        # The cluster comes first, since an unreachable cluster is detected within seconds.
        yield _check_cluster(address)
        yield from check_token(address)
    yield from check_machine(storage)
    yield check_cloud()


def check_cloud(url: str | None = None, setting: CloudSetting = "auto") -> Check:
    """Check whether the cloud offers preemption notices and has issued none. Outside a cloud, no request is sent.

    Args:
        url: Value of ``elastic.cloud_metadata_url``.
        setting: Value of ``elastic.cloud_notices``.
    """
    from ray_ulysses.cluster import node_watch
    from ray_ulysses.elastic.notices import PROVIDER_NAMES, UnexpectedAnswerError, reach_hint

    provider = node_watch.found_provider(setting)
    if provider is None:
        detail = "none detected in the firmware, so runs expect no preemption notices (elastic.cloud_notices)"
        return Check(name="cloud", level="ok", detail=detail)
    name = PROVIDER_NAMES[provider]
    try:
        notice = node_watch.MetadataService(provider, url=url, hints=True).notice()
    except (OSError, UnexpectedAnswerError) as error:
        detail = f"{name}, but its metadata service provides no preemption notices ({error})"
        return Check(name="cloud", level="warn", detail=detail, hint=reach_hint(provider))
    if notice is not None:
        detail = f"{name} is about to reclaim this machine: {notice.what}"
        return Check(name="cloud", level="warn", detail=detail, hint="use another machine")
    return Check(name="cloud", level="ok", detail=f"{name}, with preemption notices")


def _check_cluster(address: str | None) -> Check:
    from ray_ulysses.cluster.session import cluster_size, ray_session

    try:
        with ray_session(address, cpus=0):
            nodes, cpus, gpus = cluster_size()
    except (RunError, UserError) as error:
        return Check(name="cluster", level="fail", detail=str(error))
    return Check(name="cluster", level="ok", detail=f"{nodes} nodes, {cpus:g} CPUs, {gpus:g} GPUs")


def check_token(address: str | None) -> Iterator[Check]:
    """Check whether the cluster requires a token; yields nothing if no cluster answers."""
    from ray_ulysses.cluster.address import cluster_address
    from ray_ulysses.cluster.ray_access import asks_for_token

    target = cluster_address(address)
    if target is None:
        return
    try:
        asks = asks_for_token(target)
    except (RunError, UserError):
        # The cluster's own check reports this.
        return
    if asks:
        yield Check(name="token", level="ok", detail="the cluster requires a token")
        return
    detail = "the cluster runs jobs without a token, for anyone who can reach it over the network"
    hint = "start Ray on each node with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN (docs/scale-out.md)"
    yield Check(name="token", level="warn", detail=detail, hint=hint)


def check_machine(storage: Path | str | None = None) -> Iterator[Check]:
    """Check this machine without a cluster. Large packages are imported one by one.

    Args:
        storage: Location to check for runs or checkpoints: a directory, created if missing, or an object store URI.

    Yields:
        Each result as soon as it is known; on a slow machine, all checks together take half a minute.
    """
    yield check_python(sys.version_info[:2])
    is_complete = True
    for name in _REQUIRED:
        check = check_import(name)
        is_complete &= check.level != "fail"
        yield check
    yield from check_accelerator()
    yield check_flash_attention()
    yield check_shared_memory(Path("/dev/shm"))
    yield from check_locked_memory(Path("/dev/infiniband"), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    if is_complete:
        # The self-test needs these packages; missing packages are already reported.
        yield check_exactness()
    if storage is not None:
        yield check_run_storage(storage)
        from ray_ulysses.storage import parse_location

        with contextlib.suppress(UserError):
            # An object store has no free space to check, and an invalid location is already reported.
            if isinstance(location := parse_location(storage), Path):
                yield check_free_disk(location)


def exit_code(checks: Iterable[Check]) -> int:
    """Return 1 if any check failed, else 0."""
    return 1 if any(check.level == "fail" for check in checks) else 0


def render_check(check: Check) -> str:
    """Return a check's line, followed by its hint if there is one."""
    line = f"{check.level:<4}  {check.name:<{_NAME_WIDTH}}  {check.detail}"
    return as_text([line, f"{'':<{_NAME_WIDTH + 8}}-> {check.hint}"] if check.hint else [line])


def render_sum(checks: Sequence[Check]) -> str:
    """Return the closing line: the verdict, and the numbers of failures, warnings and checks."""
    failed, warned = (sum(check.level == level for check in checks) for level in ("fail", "warn"))
    state = "not ready" if failed else "ready"
    return f"{state}: {failed} failed, {warned} warning{'' if warned == 1 else 's'}, {len(checks)} checked"


def check_python(version: tuple[int, ...]) -> Check:
    """Check Python's version, given as (major, minor)."""
    lowest, highest = _SUPPORTED_PYTHON
    detail = f"{'.'.join(str(part) for part in version)} on {platform.system()} {platform.machine()}"
    if lowest <= version <= highest:
        return Check(name="python", level="ok", detail=detail)
    return Check(name="python", level="fail", detail=detail, hint="use Python 3.11, 3.12 or 3.13")


def check_import(name: str) -> Check:
    """Check that a package can be imported; its output on import is suppressed."""
    noise = io.StringIO()
    try:
        with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        hint = "install ray-ulysses with its dependencies: pip install ray-ulysses"
        return Check(name=name, level="fail", detail=f"not installed ({error})", hint=hint)
    except Exception as error:  # a broken package may raise anything
        detail = f"can't be imported: {type(error).__name__}: {error}"
        return Check(name=name, level="fail", detail=detail, hint=f"reinstall {name} for this Python and CUDA")
    return Check(name=name, level="ok", detail=_version(name))


def check_accelerator() -> list[Check]:
    """Check the devices and their collective backend."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [Check(name="accelerator", level="fail", detail=f"torch can't be imported: {error}", hint="see above")]
    if torch.cuda.is_available():
        from ray_ulysses.config.devices import device_of
        from ray_ulysses.planner.flops import peak_bf16_flops

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        gib = torch.cuda.get_device_properties(0).total_memory / _GIB
        known = device_of(names[0])
        is_known = known is not None and peak_bf16_flops(names[0]) == known.tflops * 1e12
        setting = f" (cluster.device: {known.name})" if known is not None and is_known else ""
        detail = f"{len(names)} x {names[0]}, {gib:.0f} GiB each{setting}"
        devices = Check(name="accelerator", level="ok", detail=detail)
        return [devices, *gpu_versions(torch, dist, _DRIVER)]
    devices = Check(
        name="accelerator",
        level="warn",
        detail="no GPU: training runs on CPU",
        hint="sufficient for a trial; for real runs, use CUDA GPUs and cluster.gpus_per_worker=1",
    )
    return [devices, _backend("gloo", dist.is_gloo_available())]


def gpu_versions(torch: Any, dist: Any, driver_file: Path) -> Iterator[Check]:
    """Check the versions of the GPU driver, cuDNN and NCCL. Not yet tested on a GPU.

    Args:
        torch: The module ``torch``.
        dist: The module ``torch.distributed``.
        driver_file: File with the version of the driver's kernel module.
    """
    try:
        found = re.search(r"Module .*?(\d+\.[\d.]+)", driver_file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    driver = found[1] if found else "of unknown version"
    yield Check(name="driver", level="ok", detail=f"{driver}, and PyTorch is built for CUDA {torch.version.cuda}")
    if (number := torch.backends.cudnn.version()) is None:
        hint = "install a build of torch with cuDNN, which has torch's fastest attention kernel"
        yield Check(name="cudnn", level="warn", detail="torch was built without cuDNN", hint=hint)
    else:
        # 9.19.0 is 91900.
        yield Check(name="cudnn", level="ok", detail=f"{number // 10_000}.{number // 100 % 100}.{number % 100}")
    has_nccl = dist.is_nccl_available()
    yield _backend(f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}" if has_nccl else "nccl", has_nccl)


def check_flash_attention() -> Check:
    """Check whether flash-attn is installed; without it, torch's attention kernels are used."""
    if importlib.util.find_spec("flash_attn") is not None:
        return Check(name="flash-attn", level="ok", detail=_version("flash-attn"))
    try:
        import torch

        has_gpu = torch.cuda.is_available()
    except ImportError:
        has_gpu = False
    if not has_gpu:
        return Check(name="flash-attn", level="ok", detail="not installed, and not needed on CPU")
    hint = "pip install 'ray-ulysses[gpu]'"
    return Check(name="flash-attn", level="warn", detail="not installed: torch's attention kernels are used", hint=hint)


def check_exactness() -> Check:
    """Check that several local processes compute the same attention and gradients as one process."""
    from ray_ulysses.engine.self_test_local import run_local_self_test

    result = run_local_self_test()
    return Check(name="self-test", level="ok" if result.ok else "fail", detail=result.text, hint=result.hint)


def check_shared_memory(path: Path) -> Check:
    """Check the shared memory that Ray's object store and NCCL use."""
    if not path.is_dir():
        return Check(name="shared memory", level="warn", detail=f"{path} does not exist", hint="Ray will use /tmp")
    free = shutil.disk_usage(path).free / _GIB
    detail = f"{free:.1f} GiB free in {path}"
    if free >= _LEAST_SHARED_MEMORY_GIB:
        return Check(name="shared memory", level="ok", detail=detail)
    hint = f"give the container at least {_LEAST_SHARED_MEMORY_GIB:g} GiB (docker run --shm-size=8g)"
    return Check(name="shared memory", level="warn", detail=detail, hint=hint)


def check_locked_memory(devices: Path, limit: int) -> Iterator[Check]:
    """Check that processes may lock memory if the machine has InfiniBand or EFA; yields nothing without such devices.

    Args:
        devices: Directory that contains the devices.
        limit: Bytes that a process may lock (``resource.getrlimit``).
    """
    if not devices.is_dir():
        return
    if limit == resource.RLIM_INFINITY:
        yield Check(name="locked memory", level="ok", detail="unlimited")
        return
    detail = f"limited to {limit / _GIB:.3g} GiB, but the devices in {devices} transfer only locked memory"
    hint = "use docker run --ulimit memlock=-1:-1, or set LimitMEMLOCK=infinity for the node's container runtime"
    yield Check(name="locked memory", level="warn", detail=detail, hint=hint)


def check_run_storage(storage: Path | str) -> Check:
    """Check that a location is suitable for runs: writable, readable, and with atomic creation of files."""
    from ray_ulysses.storage import check_storage, parse_location

    try:
        location = parse_location(storage)
        check_storage(storage, setting="run.storage")
    except UserError as error:
        return Check(name="storage", level="fail", detail=str(error), hint="see above")
    shown = location.absolute() if isinstance(location, Path) else location.display_name
    return Check(name="storage", level="ok", detail=f"{shown} is writable, with atomic creation")


def check_free_disk(path: Path) -> Check:
    """Check the free space for checkpoints."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free / _GIB
    detail = f"{free:.1f} GiB free at {existing}"
    if free >= _LEAST_DISK_GIB and os.access(existing, os.W_OK):
        return Check(name="disk", level="ok", detail=detail)
    hint = "a checkpoint takes 12 bytes per parameter, and up to checkpoint.keep_last + 1 checkpoints exist at a time"
    return Check(name="disk", level="warn", detail=detail, hint=hint)


def _backend(name: str, is_there: bool) -> Check:
    if is_there:
        return Check(name="collectives", level="ok", detail=name)
    hint = f"install a build of torch with {name}"
    return Check(name="collectives", level="fail", detail=f"torch was built without {name}", hint=hint)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def check_model(path: str) -> Iterator[Check]:
    """Check whether a model can be trained exactly on rows that are split across ranks.

    Args:
        path: Model directory or hub id; only the model's configuration is read.

    Yields:
        Whether the model can be trained; then its layers, its positions, and each suitable ``sp_size``.
    """
    from ray_ulysses.config import parse_config
    from ray_ulysses.engine.model import refuse_architecture
    from ray_ulysses.engine.model_config import objective_of, stored_config, stored_positions
    from ray_ulysses.run.settings import model_shape

    model: dict[str, str] = {"path": path, "init": "random"}
    try:
        hf_config = stored_config(path, "--model")
        if hf_config.get_text_config(decoder=True) is not hf_config:
            model["part"] = "text"
        needed = {"run": {"name": "doctor", "storage": "."}, "cluster": {"workers": 1}}
        data = {"path": "corpus", "context_tokens": 1024, "rows_per_step": 1, "overlong": "drop"}
        objective = {"kind": objective_of(hf_config)}
        config = parse_config({"model": model, "data": data, "objective": objective, **needed})
        result = refuse_architecture(hf_config, config.model.part, config.objective.task)
        shape = model_shape(config)
    except UserError as error:
        reason, _, hint = str(error).partition("; ")
        yield Check(name="model", level="fail", detail=reason, hint=hint)
        return
    detail = f"{shape.model_type} can be trained exactly" + (" with model.part: text" if "part" in model else "")
    yield Check(name="model", level="ok", detail=detail)
    yield Check(name="layers", level="ok", detail=_layers(result))
    if (positions := stored_positions(hf_config)) is not None:
        yield Check(
            name="positions", level="ok", detail=f"trained up to {positions:,} positions; model.rope extends them"
        )
    sizes = ", ".join(map(str, shape.level_sp_sizes()))
    detail = f"{sizes} divide the {shape.num_heads} heads evenly"
    yield Check(name="sp_size", level="ok", detail=detail)


def _layers(result: ProbeResult) -> str:
    """Describe the model's layers: the number with each kind of attention, and the number of recurrent layers."""
    kinds = Counter(
        f"in local spans of {layer.local_span:,} tokens" if layer.local_span
        else f"with a window of {layer.window:,} tokens" if layer.window
        else "over whole documents"
        for layer in result.layers.values()
    )  # fmt: skip
    said = [f"{count} with attention {kind}" for kind, count in kinds.most_common()]
    return ", ".join([*said, *([f"{len(result.mixers)} recurrent"] if result.mixers else [])])
