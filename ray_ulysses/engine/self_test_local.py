"""Runs the self-test in a few local processes, without a cluster or configuration, for ``ray-ulysses doctor``.

Each process is ``python -m ray_ulysses.engine.self_test_local RANK PROCESSES FOLDER``, since a process that has
initialized CUDA can't be forked.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ray_ulysses.engine.self_test import SelfTestReport, run_self_test
from ray_ulysses.engine.self_test_attention import AttentionSettings
from ray_ulysses.engine.zero import ZeroSettings, prepare_process
from ray_ulysses.errors import UlyssesError
from ray_ulysses.parallel.allocator import expand_segments
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.parallel.nccl_log import keep_nccl_log

_LIMIT_S = 90.0
"""Time limit, after which processes are killed; the processes take 5 to 15 s on an idle machine, mostly for imports."""

_GRACE_S = 5.0
_MOST_PROCESSES = 2
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSelfTest:
    """The outcome."""

    ok: bool
    text: str
    """Its measurements, or the problem."""
    hint: str = ""
    """The remedy; empty if it passed."""


def run_local_self_test() -> LocalSelfTest:
    """Run the self-test in two processes on NCCL, in one if there is one GPU, or in two on gloo without GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world_size = min(gpus or _MOST_PROCESSES, _MOST_PROCESSES)
    place = f"{world_size} process{'es' if world_size > 1 else ''} on {'NCCL' if gpus else 'gloo'}"

    def command(rank: int, folder: Path) -> list[str]:
        return [sys.executable, "-m", __name__, str(rank), str(world_size), str(folder)]

    result = watch_processes(command, world_size, _LIMIT_S)
    return LocalSelfTest(ok=result.ok, text=f"{result.text}; {place}", hint=result.hint)


def watch_processes(command: Callable[[int, Path], Sequence[str]], world_size: int, limit_s: float) -> LocalSelfTest:
    """Start one process per rank, wait for all, and return the first failure or the result of rank 0.

    Args:
        command: Returns the command of a rank, which writes ``result-RANK.json`` into the given folder.
        world_size: Number of processes.
        limit_s: Time limit in seconds. After the first failure, the others have a few seconds left.
    """
    with tempfile.TemporaryDirectory(prefix="self-test-") as name:
        folder = Path(name)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                with (folder / f"log-{rank}").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            command(rank, folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment()
                        )
                    )
            in_time = _wait(processes, limit_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return _verdict(folder, [process.returncode for process in processes], in_time, limit_s)


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return False
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
    return True


def _verdict(folder: Path, exit_codes: Sequence[int], in_time: bool, limit_s: float) -> LocalSelfTest:
    results = {rank: _result(folder / f"result-{rank}.json") for rank in range(len(exit_codes))}
    found = {rank: result for rank, result in results.items() if result is not None}
    for ok, text, hint in found.values():
        if not ok:
            return LocalSelfTest(ok=False, text=text, hint=hint)
    dead = [rank for rank, code in enumerate(exit_codes) if code > 0 or (code < 0 and in_time)]
    if dead:
        text = f"process {dead[0]} ended with exit code {exit_codes[dead[0]]}: {_last_line(folder / f'log-{dead[0]}')}"
        return LocalSelfTest(ok=False, text=text, hint="fix the cause: every run starts like this")
    if not in_time or len(found) < len(exit_codes):
        return LocalSelfTest(
            ok=False,
            text=f"not done in {limit_s:.0f} s: processes on this machine can't reach each other, or it is busy",
            hint="check the machine's load, its firewall, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
        )
    return LocalSelfTest(ok=True, text=found[0][1])


def _result(path: Path) -> tuple[bool, str, str] | None:
    try:
        ok, text, hint = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return bool(ok), str(text), str(hint)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _environment() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    package = str(Path(__file__).parents[2])
    expand_segments(environment)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    if sys.platform == "linux":
        # Otherwise gloo resolves the host's name, which often fails in containers.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _settings(device: torch.device) -> tuple[AttentionSettings, ZeroSettings]:
    """Return an attention whose KV groups are shared between ranks, in the device's usual dtype."""
    is_gpu = device.type == "cuda"
    attention = AttentionSettings(
        num_heads=8,
        num_kv_heads=2,
        head_size=128 if is_gpu else 64,
        value_size=128 if is_gpu else 64,
        dtype=torch.bfloat16 if is_gpu else torch.float32,
    )
    zero = ZeroSettings(
        dtype="bf16" if is_gpu else "fp32",
        accumulation=2,
        max_grad_norm=1.0,
        learning_rate=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
    )
    return attention, zero


def _run(rank: int, world_size: int, folder: Path) -> SelfTestReport:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        keep_nccl_log(os.environ)
    prepare_process(rank, device.type)
    # Imported by every run, and not counted as the test's time.
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("transformers.models.llama.modeling_llama")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    mesh = SequenceMesh.from_layout(ParallelLayout(world_size=world_size, sp_size=world_size))
    return run_self_test(mesh, device, *_settings(device))


def _main(arguments: Sequence[str]) -> int:
    rank, world_size, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    try:
        result = (True, _run(rank, world_size, folder).in_words().removeprefix("self-test "), "")
    except UlyssesError as error:
        result = (False, str(error), "a run would train wrongly here; follow the text above")
    except RuntimeError as error:
        text = f"a kernel or a collective failed: {str(error).strip().splitlines()[0]}"
        result = (False, text, "check the driver and the builds of torch, NCCL and flash-attn")
    path = folder / f"result-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)
    return 0 if result[0] else 1


if __name__ == "__main__":
    _code = _main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's shutdown would wait for the threads of a group whose peers are gone.
    os._exit(_code)
