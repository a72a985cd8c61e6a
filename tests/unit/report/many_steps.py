"""Writes the journal of a run with a fault, a resume on fewer ranks and a loss spike."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from ray_ulysses.tracking.journal_lines import encode_event

REPLAYED = 3
"""Steps that the second attempt trains again."""
SPIKE = 99.5
"""The loss of one step."""


def write_run(run_dir: Path, num_steps: int, *, added_losses: bool = True) -> Path:
    """Write a run of ``num_steps`` steps, one of which has a loss spike, and return its directory.

    Without ``added_losses`` it has neither a z-loss nor a router loss.
    """
    journal = run_dir / "journal"
    journal.mkdir(parents=True)
    half = num_steps // 2
    _write(journal, 1, 4, 1, half + REPLAYED, 0, num_steps)
    _write(journal, 2, 2, half + 1, num_steps, half, num_steps)
    if not added_losses:
        for path in journal.iterdir():
            events = re.findall(r'^{"crc32": "\w+", (.*)$', path.read_text(), re.MULTILINE)
            lines = [_line("{" + re.sub(r'"(z|router)_loss": [^,]+, ', "", event)) for event in events]
            path.write_bytes(b"".join(lines))
    return run_dir


def loss_of(step: int, attempt: int, num_steps: int) -> float:
    """Return the loss that `write_run` gives a step."""
    return SPIKE if (step, attempt) == (num_steps * 2 // 3, 2) else round(2 + 3 / (1 + step / 1000) + attempt / 8, 6)


def _write(journal: Path, attempt: int, ranks: int, first: int, last: int, resumed: int, num_steps: int) -> None:
    begin = 1.7e9 + 2.0 * first + 600.0 * attempt
    started = {
        "event": "attempt_started",
        "time": begin,
        "attempt": attempt,
        "session": f"s{attempt}",
        "command_started": begin - 30.0,
        "world_size": ranks,
        "sp_size": 2,
        "dp_size": ranks // 2,
        "nodes": ["a"],
        "rank_nodes": ["a"] * ranks,
        "last_step": num_steps,
        "plan_ids": ["p"],
        "resumed_step": resumed,
        "resumed_from": None,
        "versions": {"torch": "2.13.0"},
    }
    with (journal / f"attempt-{attempt:04}.jsonl").open("wb") as file:
        file.write(_line(encode_event(started)))
        for step in range(first, last + 1):
            loss = loss_of(step, attempt, num_steps)
            time = begin + 2.0 * (step - first + 1)
            text = (
                f'{{"event": "step", "time": {time}, "attempt": {attempt}, "step": {step}, "loss": {loss}, '
                f'"tokens": 4096, "rows": [{2 * step - 2}, {2 * step}], "digest": "{step:016x}", "seconds": 1.5, '
                f'"z_loss": {round(0.01 / step, 9)}, "router_loss": {round(0.02 + loss / 100, 9)}, '
                f'"learning_rate": 0.001, "grad_norm": {1 + step % 7}, "mfu": 0.5, "peak_memory_gib": 12.5}}'
            )
            file.write(_line(text.encode()))


def _line(event: bytes | str) -> bytes:
    rest = (event if isinstance(event, bytes) else event.encode()).strip()[1:] + b""
    return b'{"crc32": "%08x", ' % zlib.crc32(rest) + rest + b"\n"
