"""Preparations with failing system calls: each ends with the complete corpus or an error, and can be resumed.

Run with ``storage_faults.c`` preloaded, as ``DIRECTORY KIND STRIDE``. With stride 1, every call fails in two ways;
otherwise, every STRIDEth call of each kind fails in a random way. Prints one JSON object per finding, then a summary.
"""

from __future__ import annotations

import ctypes
import errno
import gzip
import json
import logging
import os
import random
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from ray_ulysses.data.corpus.format import PREPARATION_FILE, UNITS_DIRECTORY
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import UlyssesError
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import varied_texts, write_texts
from tests.unit.data.sources.test_records import described
from tests.unit.storage.test_retry import SleepingClock, policy_of

AWAY = ("EIO", "ESTALE", "ETIMEDOUT", "ECONNRESET", "EHOSTUNREACH", "ENOTCONN", "EREMOTEIO", "EBUSY")
FINAL = ("EACCES", "EPERM", "ENOMEM", "ENOSPC", "EDQUOT", "EROFS", "ENODEV", "EMFILE", "EPROTO", "EBADMSG")
FOR_EVER = 1 << 40
# Waiting doubles from 0.1 s to 8 s within 60 s, and each try meets at least one fault.
SHORT = (1, 2, 3, 5, 8)
CALLS = ("open", "read", "pread", "write", "close", "fsync", "stat", "rename", "opendir", "readdir", "lstat", "flock")
ANY_CALL = b""

faults = ctypes.CDLL(os.environ["LD_PRELOAD"], use_errno=False)
faults.fault_arm.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long)
faults.fault_disarm.restype = faults.fault_calls.restype = ctypes.c_long
faults.fault_place.restype = ctypes.c_char_p


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    return [{"text": text} for text in varied_texts(count, seed=seed)]


def lines(count: int, seed: int) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows(count, seed)) + b"{broken\n"


def texts(directory: Path) -> PrepareRequest:
    write_texts(directory / "in" / "tree", varied_texts(7))
    write_texts(directory / "in" / "tree" / "inner", varied_texts(3, seed=5))
    (directory / "in" / "tree" / "latin.txt").write_bytes(b"latin \xe9")
    (directory / "in" / "tree" / "link.txt").symlink_to("inner/text-0001.txt")
    (directory / "in" / "tree" / "broken").symlink_to("nowhere")
    return PrepareRequest(sources=SourceSpec(paths=(str(directory / "in"),)), out=directory / "out", unit_bytes=700)


def json_lines(directory: Path) -> PrepareRequest:
    (directory / "in").mkdir(parents=True)
    (directory / "in" / "a.jsonl").write_bytes(lines(12, 1))
    (directory / "in" / "b.jsonl.gz").write_bytes(gzip.compress(lines(5, 2)))
    (directory / "in" / "d.json").write_text(json.dumps(rows(4, 7), indent=1))
    frames = [zstandard.ZstdCompressor().compress(lines(4, seed)) for seed in (3, 1)]
    (directory / "in" / "c.jsonl.zst").write_bytes(b"".join(frames))
    return PrepareRequest(sources=SourceSpec(paths=(str(directory / "in"),)), out=directory / "out", unit_bytes=1500)


def parquet(directory: Path) -> PrepareRequest:
    (directory / "in").mkdir(parents=True)
    table = pa.table({"text": [*varied_texts(9, seed=4), None, "0:again", "0:again"]})
    pq.write_table(table, directory / "in" / "rows.parquet", row_group_size=3)
    return PrepareRequest(sources=SourceSpec(paths=(str(directory / "in"),)), out=directory / "out", unit_bytes=1000)


def chats(directory: Path) -> PrepareRequest:
    from tests.unit.data.tokenize.test_chat import CONVERSATION, chat_tokenizer

    tokenizer = chat_tokenizer(directory / "in" / "tokenizer")
    chat = [{"chat": [*CONVERSATION, {"role": "user", "content": f"dog {n}"}]} for n in range(6)]
    (directory / "in" / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    spec = SourceSpec(paths=(str(directory / "in" / "chats.jsonl"),), fields=RowFields(messages="chat"))
    return PrepareRequest(sources=spec, out=directory / "out", unit_bytes=1000, tokenizer=str(tokenizer))


def data_set(directory: Path) -> PrepareRequest:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows(8, 6)).save_to_disk(str(directory / "in" / "set"))
    spec = SourceSpec(paths=(str(directory / "in" / "set"),))
    return PrepareRequest(sources=spec, out=directory / "out", unit_bytes=1000)


Kind = Callable[[Path], PrepareRequest]
KINDS: dict[str, Kind] = {make.__name__: make for make in (texts, json_lines, parquet, chats, data_set)}


def prepared(request: PrepareRequest) -> dict[str, Any]:
    """Prepare a corpus, and return its content and files."""
    clock = SleepingClock()
    corpus = prepare_local(request, retry=policy_of(clock))
    faults.fault_disarm()
    files = sorted(str(path.relative_to(request.out)) for path in request.out.rglob("*"))
    return {**described(corpus), "files": files}


def without_leftovers(found: dict[str, Any]) -> dict[str, Any]:
    """Ignore working files that could not be removed; the next preparation removes them."""
    own = (UNITS_DIRECTORY, PREPARATION_FILE, ".prepare.lock")
    files = [name for name in found["files"] if not name.startswith(own) and ".writing-" not in name]
    return {**found, "files": files}


def findings_of(
    request: PrepareRequest, whole: dict[str, Any], number: int, call: bytes, skip: int, times: int
) -> list[str]:
    """Return the problems of a preparation with faults, and of its repetition without faults."""
    found = []
    faults.fault_arm(str(request.out.parent).encode(), call, number, skip, times)
    try:
        result = prepared(request)
        if without_leftovers(result) != whole:
            found.append("it ended as success with another corpus")
    except UlyssesError as error:
        if "\n" in str(error):
            found.append(f"its error is of many lines: {error}")
        if errno.errorcode[number] in AWAY and times in SHORT:
            found.append(f"what passes was not waited for: {error}")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found.append(f"it ended with {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
    faults.fault_disarm()
    try:
        if prepared(request) != whole:
            found.append("begun again, it is another corpus")
    except UlyssesError as error:
        found.append(f"begun again, it ended with {error}")
    return found


def main(directory: Path, make: Kind, stride: int) -> None:
    """Let each call fail in turn: once, like storage that is away, and from then on, like a full disk."""
    logging.disable(logging.WARNING)
    first, rng = make(directory / "kind"), random.Random(stride)
    faults.fault_arm(str(first.out.parent).encode(), ANY_CALL, errno.EIO, FOR_EVER, 0)
    prepare_local(first)
    num_calls = faults.fault_disarm()
    calls = {call: faults.fault_calls(call.encode()) for call in CALLS}
    cases = [(ANY_CALL, skip, *fault) for skip in range(num_calls) for fault in (("EIO", 1), ("ENOSPC", FOR_EVER))]
    if stride > 1:
        cases = [
            (call.encode(), skip, rng.choice(AWAY + FINAL), rng.choice((*SHORT, FOR_EVER)))
            for call, number in calls.items()
            for skip in range(rng.randrange(min(stride, number)) if number else 0, number, stride)
        ]
    whole, met = prepared(first), Counter[str]()
    for number, (call, skip, name, times) in enumerate(cases):
        request = replace(first, out=first.out.parent / f"out-{number}")
        found = findings_of(request, whole, getattr(errno, name), call, skip, times)
        place = faults.fault_place().decode()
        met[place] += 1
        case = {"kind": make.__name__, "errno": name, "place": place, "skip": skip, "times": times}
        for text in found:
            print(json.dumps({**case, "finding": text.replace(str(directory), "")}), flush=True)
        shutil.rmtree(request.out, ignore_errors=True)
    print(json.dumps({"cases": len(cases), "calls": num_calls, "met": dict(met)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), KINDS[sys.argv[2]], int(sys.argv[3]))
