"""What every rank does: save in turn with both sides, and load what was saved on half as many ranks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_sides import OurSaver, Size, Trained, load_ours
from benchmarks.dcp_side import DcpSaver, load_dcp
from benchmarks.fresh_process import forget_pages, run_fresh
from benchmarks.process_use import measured
from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.storage import LocalStore

BOUND_BYTES = 256 * 2**20
"""At most so much of a rank's state is taken for the bounds."""
BOUND_COPIES = 3
"""The fastest is the bound: other work must not make it longer than what it bounds."""
CHUNK_BYTES = 16 * 2**20
QUIET_STEPS = 2
CONVERSION_TIMEOUT_S = 300.0
SIDES = ("ours", "theirs")


def save_rank(rank: int, _: int, size: Size, folder: str, rounds: int) -> dict[str, Any]:
    """Save in rounds, each with both sides in turn; what the last round wrote stays."""
    root = Path(folder)
    trained = Trained(size)
    for _step in range(2):
        trained.step()
    ours = OurSaver(trained, root / "ours")
    with measured() as reserved:
        ours.reserve()
    dcp = DcpSaver(trained, root / "dcp")
    found = []
    for number in range(rounds):
        # The first saves come before any beside steps.
        parts: dict[str, Any] = {"beside": _beside_steps(trained, ours, 2 * number) if number else None}
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            _settle()
            if side == "ours":
                parts["ours"] = _alone(ours, 2 * number + 1)
            else:
                parts["theirs"] = _save_theirs(trained, root / "theirs", f"round-{number}")
        _settle()
        with measured() as use:
            saved = dcp.save()
        parts["dcp"] = {**use, **saved}
        found.append({**parts, "bounds": _bounds(root, rank, trained)})
        _keep_newest(root, rank, f"round-{number}", 2 * number + 1)
    parts = trained.parts
    return {
        "rounds": found,
        "reserved": reserved,
        "buffer_bytes": ours.buffer_bytes,
        "state_bytes": sum(part.tensor.nbytes for part in parts),
        "num_parts": len(parts),
        "num_parameters": sum(p.ds_numel for p in trained.engine.module.parameters()),
        "digest": trained.digest(),
        "weight_decays": trained.weight_decays,
    }


def load_rank(rank: int, world_size: int, size: Size, folder: str, rounds: int, cold_rounds: int) -> dict[str, Any]:
    """Load in rounds, each with both sides in turn, DeepSpeed's conversion before its own."""
    root = Path(folder)
    trained = Trained(size)
    stored = newest_committed(LocalStore(root / "ours"), "sizes").manifest
    assert stored is not None
    found = []
    for number in range(rounds + cold_rounds):
        is_cold = number >= rounds
        parts: dict[str, Any] = {"is_cold": is_cold, "bounds": _read_bound(root, rank)}
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            if side == "ours":
                parts["ours"] = _load(trained, root / "ours", is_cold, lambda: load_ours(trained, root / "ours"))
            else:
                parts |= _load_theirs(trained, root / "theirs", f"universal-{number}", is_cold)
        parts["dcp"] = _load(trained, root / "dcp", is_cold, lambda: load_dcp(trained, stored.state, root / "dcp"))
        found.append(parts)
    parts = [part for part in trained.parts if not part.key.startswith("model/")]
    return {"rounds": found, "needed_bytes": sum(part.tensor.nbytes for part in parts)}


def _beside_steps(trained: Trained, ours: OurSaver, step: int) -> dict[str, Any]:
    """Take steps without a save and then beside one."""
    _settle()
    quiet = [trained.step() for _ in range(QUIET_STEPS)]
    begun = ours.begin(step)
    beside = []
    while True:
        beside.append(trained.step())
        is_saving = torch.tensor(int(not ours.is_idle))
        dist.all_reduce(is_saving, op=dist.ReduceOp.MAX)
        if not is_saving:
            break
    after = [trained.step() for _ in range(QUIET_STEPS)]
    return {**ours.end(begun), "quiet_steps_s": quiet + after, "beside_steps_s": beside}


def _alone(ours: OurSaver, step: int) -> dict[str, Any]:
    """Save while training stands still."""
    with measured() as use:
        saved = ours.end(ours.begin(step))
    return {**saved, **use}


def _save_theirs(trained: Trained, folder: Path, tag: str) -> dict[str, Any]:
    """Save as DeepSpeed does, and then, apart, bring its files to the disk as ours are."""
    with measured() as use:
        trained.engine.save_checkpoint(str(folder), tag=tag)
    dist.barrier()
    start = time.perf_counter()
    if dist.get_rank() == 0:
        for path in (folder / tag).iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_s = time.perf_counter() - start
    return {**use, "sync_s": sync_s, "num_bytes": _size(folder / tag) if dist.get_rank() == 0 else 0}


def _load_theirs(trained: Trained, folder: Path, tag: str, is_cold: bool) -> dict[str, Any]:
    """Convert in a process of its own while the ranks wait, and load."""
    converted: dict[str, Any] = {}
    if dist.get_rank() == 0:
        native = next(path for path in folder.iterdir() if path.name.startswith("round-"))
        for old in folder.glob("universal-*"):
            shutil.rmtree(old)
        os.sync()
        if is_cold:
            forget_pages(native)
        script = str(Path(__file__).with_name("bench_checkpoint.py"))
        try:
            converted = run_fresh([script, "--convert", str(native), str(folder / tag)], CONVERSION_TIMEOUT_S)
            converted["num_bytes"] = _size(folder / tag)
        except RuntimeError as failure:
            converted = {"failure": str(failure)}
    box = [converted]
    dist.broadcast_object_list(box, src=0)
    if "failure" in box[0]:
        return {"conversion": box[0], "theirs": None}
    loaded = _load(
        trained, folder / tag, is_cold, lambda: trained.engine.load_checkpoint(str(folder), tag=tag) and None
    )
    return {"conversion": box[0], "theirs": loaded}


def _load(trained: Trained, folder: Path, is_cold: bool, load: Callable[[], tuple[int, int] | None]) -> dict[str, Any]:
    """Load into the engine, whose state was forgotten, and say what is in it then."""
    trained.forget()
    if dist.get_rank() == 0:
        os.sync()
        if is_cold:
            forget_pages(folder)
    dist.barrier()
    with measured() as use:
        returned = load() or (None, None)
    return {
        **use,
        "returned_bytes": returned[0],
        "verified_bytes": returned[1],
        "digest": trained.digest(),
        "weight_decays": trained.weight_decays,
    }


def _bounds(root: Path, rank: int, trained: Trained) -> dict[str, float]:
    """Return the seconds that all ranks at once need to copy, and to write durably, as much as each of them saves."""
    num_bytes = min(BOUND_BYTES, sum(part.tensor.nbytes for part in trained.parts))
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    _settle()
    copy_s = min(_seconds(lambda: target.copy_(source)) for _ in range(BOUND_COPIES))
    fresh_s = _seconds(lambda: torch.empty(num_bytes, dtype=torch.uint8).copy_(source))
    _settle()
    path = root / f"bound-{rank}"
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for offset in range(0, num_bytes, CHUNK_BYTES):
            file.write(source[offset : offset + CHUNK_BYTES].numpy().data)
        os.fsync(file.fileno())
    write_s = time.perf_counter() - begin
    return {"num_bytes": num_bytes, "copy_s": copy_s, "fresh_copy_s": fresh_s, "write_s": write_s}


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _read_bound(root: Path, rank: int) -> dict[str, float]:
    """Return the seconds that all ranks at once need to read so many bytes from the page cache."""
    path = root / f"bound-{rank}"
    num_bytes, seconds = path.stat().st_size, 0.0
    target = torch.empty(num_bytes, dtype=torch.uint8).numpy().data
    # Once more than needed, so that the memory is there.
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            for offset in range(0, num_bytes, CHUNK_BYTES):
                file.readinto(target[offset : offset + CHUNK_BYTES])
        seconds = time.perf_counter() - start
    return {"num_bytes": num_bytes, "read_s": seconds}


def _settle() -> None:
    """Let no side pay for what the other left: what was written before goes to the disk first."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def _keep_newest(root: Path, rank: int, tag: str, step: int) -> None:
    """Delete the rounds before."""
    dist.barrier()
    if rank == 0:
        for path in (root / "theirs").glob("round-*"):
            if path.name != tag:
                shutil.rmtree(path)
        for path in (root / "ours" / "checkpoints").glob("step-*"):
            if path.name != f"step-{step:08d}":
                shutil.rmtree(path)
    dist.barrier()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
