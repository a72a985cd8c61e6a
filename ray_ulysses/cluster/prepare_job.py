"""Runs a preparation's units on a Ray cluster, each unit as a retryable Ray Data task."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import ray.data
import ray.exceptions

from ray_ulysses.cluster.stream import quiet
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import (
    Preparation,
    PrepareRequest,
    ProgressCallback,
    finish,
    progress_of,
)
from ray_ulysses.data.prepare.unit_writer import UnitResult, write_unit
from ray_ulysses.data.sources.files import path_text
from ray_ulysses.data.sources.units import Unit
from ray_ulysses.data.tokenize.encoding import DocumentEncoder, load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.errors import RunError, UlyssesError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.storage.retry import RetryPolicy, StorageAwayError

NUM_CPUS = 1.0
"""CPUs reserved by a unit's task; tokenizing keeps one CPU busy."""
log = get_logger(__name__)


def run_preparation(
    preparation: Preparation,
    *,
    progress: ProgressCallback | None = None,
    phase: Callable[[str], None] = lambda name: None,
    node: str | None = None,
) -> Corpus:
    """Run a preparation's remaining units on the connected Ray cluster, and finish the preparation.

    Finished units are kept, so a stopped preparation resumes when the request is repeated. The result is the same as if
    the units ran one after another.

    Args:
        preparation: Value of ``claimed``, inside its ``with`` block. Every node must be able to reach its directory.
        progress: Called after every finished unit.
        phase: Called with the name of each phase.
        node: Ray ID of this node if only this node can reach the directory, or None if all nodes can. If the node
            offers Ray too few CPUs for a task, as most cluster heads do, this process runs the units.

    Raises:
        UserError: Files are unreadable; the error lists all of them.
        RunError: A unit could not be written.
    """
    if preparation.is_complete:
        return Corpus.open(preparation.request.out)
    results = list(preparation.done)
    failures: list[UlyssesError] = []
    for answer in _run_units(preparation.pending, preparation.request, node, phase):
        if isinstance(answer, StorageAwayError):
            # All other units would wait just as long.
            raise RunError(str(answer))
        if isinstance(answer, UlyssesError):
            failures.append(answer)
            continue
        results.append(answer)
        if progress is not None:
            progress(progress_of(preparation, results))
    if failures:
        kind = UserError if all(isinstance(failure, UserError) for failure in failures) else RunError
        raise kind(*sorted({str(failure) for failure in failures}))
    phase("looking for repeated documents and writing the corpus")
    return finish(preparation, tuple(results))


def _run_units(
    units: tuple[Unit, ...], request: PrepareRequest, node: str | None, phase: Callable[[str], None]
) -> Iterator[UnitResult | UlyssesError]:
    """Yield each unit's result, or its error, as it arrives."""
    if not units:
        return
    usable = [one for one in ray.nodes() if one["Alive"] and node in (None, one["NodeID"])]
    has_cpus = any(one["Resources"].get("CPU", 0.0) >= NUM_CPUS for one in usable)
    if has_cpus:
        phase("reading and tokenizing")
    elif node is None:
        phase(f"reading and tokenizing, once a node offers Ray {NUM_CPUS:g} CPU")
    else:
        phase("reading and tokenizing in one process, because this node offers Ray no CPU (--staging uses other nodes)")
    run = functools.partial(_run_unit, out=request.out, tokenizer=request.tokenizer, options=request.encoding)
    if node is not None and not has_cpus:
        # Ray would wait silently forever for a task that no node can run.
        yield from map(run, units)
        return

    def task(item: dict[str, bytes]) -> dict[str, bytes]:
        return {"answer": pickle.dumps(run(pickle.loads(item["unit"])))}

    dataset = quiet(
        ray.data.from_items([{"unit": pickle.dumps(unit)} for unit in units], override_num_blocks=len(units))
    )
    there = None if node is None else {"ray.io/node-id": node}
    try:
        for row in quiet(dataset.map(task, num_cpus=NUM_CPUS, label_selector=there)).iter_rows():
            yield pickle.loads(row["answer"])
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"a preparation task failed repeatedly ({type(error).__name__}: {reason}); fix the cause, or "
            "give Ray more memory, and run the same command again to resume"
        ) from error


def _run_unit(unit: Unit, *, out: Path, tokenizer: str, options: EncodingOptions) -> UnitResult | UlyssesError:
    """Run one unit in a Ray task, and return errors, so that the other units continue and all errors are reported."""
    try:
        return write_unit(out, unit, _encoder(tokenizer, options))
    except (StorageAwayError, UserError) as error:
        return type(error)(str(error))
    except UlyssesError as error:
        return RunError(str(error))
    except Exception as error:
        # A bug: the unit's files help to reproduce it, and the worker's log has the traceback.
        log.exception("unit %d of %s", unit.index, out)
        files = path_text(unit.files[0].path) + (f" and {len(unit.files) - 1} more" if len(unit.files) > 1 else "")
        text = f"unit {unit.index} of {out} ({files}): {type(error).__name__}: {error}"
        return RunError(text.partition("\n")[0])


@functools.lru_cache(maxsize=2)
def _encoder(name: str, options: EncodingOptions) -> DocumentEncoder:
    """Return the encoder, cached per worker process because loading a large one takes a second."""
    return RetryPolicy().call_or_fail(name, lambda: load_encoder(name, options))
