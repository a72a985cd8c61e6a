"""What a rank waits for rows from an object store that answers late, by both engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.data_sides import Consumption, Engine, own_ray
from benchmarks.document_length_cost import random_documents
from benchmarks.stored_result import origin, say, spread, table
from ray_ulysses.data.plan.corpus_set import open_sources, plan_input
from ray_ulysses.data.plan.plan_files import write_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.prepare.upload import CorpusUpload
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.storage.block_cache import SIZE_VARIABLE
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_folder
from tests.local_preparation import prepare_local
from tests.s3_server import faulty_proxy, serve_s3

CONTEXT_TOKENS = 131_072
DOCUMENTS = {300: 4 << 10, 20_000: 128 << 10}
"""Mean lengths, and the bytes of text of a shard, so that the documents of a row lie in about as many shards."""
DELAYS_S = (0.02, 0.05)
_ROWS_PER_STEP = 2


def plan_in_store(folder: Path, location: str, mean_length: int, num_rows: int) -> Path:
    """Prepare documents of random letters, copy the corpus to the store, and plan it from there."""
    path = random_documents(folder, mean_length, num_rows * CONTEXT_TOKENS)
    sources = SourceSpec(paths=(str(path),))
    request = PrepareRequest(
        sources=sources, out=folder / "corpus", duplicates="keep", unit_bytes=DOCUMENTS[mean_length]
    )
    corpus = prepare_local(request)
    store = open_folder(location)
    assert isinstance(store, ObjectStore)
    CorpusUpload(store, str(store), corpus.info.signature).run(corpus.path, say)
    settings = PlanSettings(
        seed=0, context_tokens=CONTEXT_TOKENS, pad_multiple=256, rows_per_step=_ROWS_PER_STEP, balance_steps=1
    )
    write_segment(folder / "plan", 0, plan_input(open_sources([(location, None)])), settings)
    return folder / "plan"


def receive(engine: Engine, plan: Path, num_steps: int, work_s: float) -> dict[str, Any]:
    """Receive rows in this process as a rank does that works so long on each."""
    consumption = Consumption(engine, str(plan), 0, 1)
    try:
        # The first step is read directly by both; Ray Data starts after it.
        first = consumption.take(range(1, 2), work_s)
        later = consumption.take(range(2, num_steps + 1), work_s)
    finally:
        consumption.close()
    return {"engine": engine, "first_s": first["waits_s"][0], **later}


def measure(root: Path, num_steps: int, work_s: float) -> list[dict[str, Any]]:
    """Return a case for each mean length and each delay; nothing is kept between rows on the node's disk."""
    found = []
    with serve_s3() as s3, faulty_proxy(s3) as proxy:
        environment = {**s3.environment(), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", SIZE_VARIABLE: "0"}
        with mock.patch.dict(os.environ, environment), own_ray(num_cpus=2):
            for length in DOCUMENTS:
                proxy.delay_s = 0.0
                location = s3.uri(f"corpora/{length}", proxy.port)
                plan = plan_in_store(root / str(length), location, length, num_steps * _ROWS_PER_STEP + 1)
                for delay_s in DELAYS_S:
                    proxy.delay_s = delay_s
                    engines: tuple[Engine, ...] = ("direct", "ray")
                    runs = [receive(engine, plan, num_steps, work_s) for engine in engines]
                    found.append({"mean_length": length, "delay_s": delay_s, "work_s": work_s, "runs": runs})
                    waits = ", ".join(f"{one['engine']} {max(one['waits_s']):.2f} s" for one in runs)
                    say(f"documents of {length:,}, {delay_s * 1e3:.0f} ms per request: longest wait {waits}")
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    rows = []
    for case in record["cases"]:
        for run in case["runs"]:
            waits, num_rows = run["waits_s"], len(run["waits_s"])
            rows.append(
                [
                    f"{case['mean_length']:,}",
                    f"{1e3 * case['delay_s']:.0f} ms",
                    {"direct": "local", "ray": "ray"}[run["engine"]],
                    f"{run['first_s']:.2f} s",
                    spread(waits) + " s",
                    f"{sum(waits) / (num_rows * case['work_s']):.1%}",
                    f"{1e3 * run['cpu_s'] / num_rows:.0f} ms",
                ]
            )
    work_s = median(case["work_s"] for case in record["cases"])
    about = (
        f"One rank receives rows of {CONTEXT_TOKENS:,} tokens and works {work_s:g} s on each. The corpus lies in an "
        "object store (moto's, behind a proxy that lets every request wait so long); nothing is kept on the node's "
        "disk, as in the first pass over a corpus; the documents of a row lie in as many shards as the corpus has, a "
        "request each. The store, its proxy, Ray and the rank share the cores. **First row** is read in the rank's "
        "process by both engines; waits are those of the steps after the first, so of Ray Data the start of its tasks "
        "is among them; CPU is that of the rank's process."
    )
    head = ("mean document", "delay", "data.engine", "first row", "wait per later row",
            "waiting/working", "CPU of the rank per row")  # fmt: skip
    return "\n\n".join(["# Rows from an object store", origin(record), about, table(head, rows)])
