"""The self-test over a few processes of this machine: what ``doctor`` runs, with no cluster and no configuration.

Each process is ``python -m ray_ulysses.engine.self_test_local RANK PROCESSES FOLDER SECONDS``, since a process that has
touched a GPU can't be forked.
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
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.mesh import SequenceMesh

LIMIT_S = 90.0
"""Processes that are not done by then are ended; they take 5 to 15 s on a quiet machine, mostly for imports."""

_GRACE_S = 5.0
_MOST_PROCESSES = 2
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSelfTest:
    """What became of it.

    Attributes:
        ok: Whether it passed.
        text: What it measured, or what is wrong.
        hint: What to do about it; empty if it passed.
    """

    ok: bool
    text: str
    hint: str = ""


def run_local_self_test(limit_s: float = LIMIT_S) -> LocalSelfTest:
    """Run the self-test over two processes, on NCCL where there are two GPUs, else on gloo; on one GPU alone.

    Args:
        limit_s: Longest that it may take, in seconds; processes that are not done by then are ended.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world_size = min(gpus or _MOST_PROCESSES, _MOST_PROCESSES)
    place = f"{world_size} process{'es' if world_size > 1 else ''} on {'NCCL' if gpus else 'gloo'}"

    def command(rank: int, folder: Path) -> list[str]:
        return [sys.executable, "-m", __name__, str(rank), str(world_size), str(folder), str(limit_s)]

    result = watch_processes(command, world_size, limit_s)
    return LocalSelfTest(ok=result.ok, text=f"{result.text}; {place}", hint=result.hint)


def watch_processes(command: Callable[[int, Path], Sequence[str]], world_size: int, limit_s: float) -> LocalSelfTest:
    """Start a process a rank, wait for all within a bound, and say what the first that has something to say says.

    Args:
        command: Returns what to run for a rank, which leaves ``result-RANK.json`` in the folder it is given.
        world_size: Processes.
        limit_s: Bound of it all, in seconds. After the first failure the others have a few seconds.
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
        return LocalSelfTest(ok=False, text=text, hint="mend what the line says: every run starts like this")
    if not in_time or len(found) < len(exit_codes):
        return LocalSelfTest(
            ok=False,
            text=f"not done in {limit_s:.0f} s: processes of this machine do not reach one another, or it is busy",
            hint="look at what else runs here, and at firewall and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
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
    return lines[-1] if lines else "it said nothing"


def _environment() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    package = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    if sys.platform == "linux":
        # Else gloo asks for the address of the host's name, which containers often can't tell.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _settings(device: torch.device) -> tuple[AttentionSettings, ZeroSettings]:
    """Return an attention that is on both sides of a KV group's border, in the dtype that the device is for."""
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


def _run(rank: int, world_size: int, folder: Path, limit_s: float) -> SelfTestReport:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    prepare_process(rank, device.type)
    # What every run imports as well, so that it does not count as the test's own time.
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("transformers.models.llama.modeling_llama")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit_s),
    )
    mesh = SequenceMesh.from_layout(ParallelLayout(world_size=world_size, sp_size=world_size))
    return run_self_test(mesh, device, *_settings(device))


def _main(arguments: Sequence[str]) -> int:
    rank, world_size, folder, limit_s = int(arguments[0]), int(arguments[1]), Path(arguments[2]), float(arguments[3])
    try:
        result = (True, _run(rank, world_size, folder, limit_s).in_words().removeprefix("self-test "), "")
    except UlyssesError as error:
        result = (False, str(error), "a run would train wrongly here; the text says what to look at")
    except RuntimeError as error:
        text = f"a kernel or a collective failed: {str(error).strip().splitlines()[0]}"
        result = (False, text, "look at the driver, and at the builds of torch, NCCL and flash-attn")
    path = folder / f"result-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)
    return 0 if result[0] else 1


if __name__ == "__main__":
    _code = _main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's shutdown would wait for threads of a group whose peers are gone.
    os._exit(_code)
