"""The command ``reference``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from ray_ulysses.commands.options import Quiet
from ray_ulysses.commands.output import Waiting, put
from ray_ulysses.report.words import as_text, facts

EXAMPLE = "Example: ray-ulysses reference corpora/pairs --model models/Qwen3-8B"


def reference(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="A prepared corpus of pairs of answers.")],
    model: Annotated[str, typer.Option(help="The reference model: a directory, or a hub id.")],
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Type used for computation: the run's.")] = "bf16",
    sp_size: Annotated[
        int | None,
        typer.Option(help="Processes that share a row and the model.  [default: the GPUs of a node, else 1]", min=1),
    ] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster; by default RAY_ADDRESS, else this machine.")] = None,
    quiet: Quiet = False,
) -> None:
    """Compute log-probabilities of pairs under a reference model, for DPO and IPO. Resumable.

    They are stored in the corpus's folder, 16 bytes for each pair, under a key of corpus, model and
    dtype. A run with objective.kind=dpo or ipo then needs no second model in memory.
    """
    from ray_ulysses.config.job_paths import refuse_relative_in_job
    from ray_ulysses.data.corpus.corpus import Corpus
    from ray_ulysses.storage.location import expand_home
    from ray_ulysses.storage.place import place_of

    place = place_of(corpus)
    if isinstance(place, Path):
        refuse_relative_in_job("CORPUS", place)
        place = place.absolute()
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        # A missing corpus is reported before torch and Ray are imported.
        Corpus.open(str(place))
        from ray_ulysses.cluster.address import cluster_address
        from ray_ulysses.cluster.reference_job import run_reference
        from ray_ulysses.cluster.session import ray_session
        from ray_ulysses.cluster.worker_environment import passed_on
        from ray_ulysses.evaluation.reference import ReferenceRequest, prepare_reference

        directory = expand_home(model)
        request = ReferenceRequest(
            corpus=str(place), model=str(directory.absolute()) if directory.is_dir() else model, dtype=dtype
        )
        wait.phase("checking the corpus and the model")
        prepared = prepare_reference(request)
        was_complete = prepared.is_complete
        if not was_complete:
            wait.phase("starting Ray, or connecting to it")
            environment = passed_on(os.environ, embedded=cluster_address(address) is None)
            with ray_session(address, cpus=sp_size or 1, environment=environment):
                run_reference(prepared, sp_size, wait.phase)
    head = f"{corpus}: {'already has' if was_complete else 'has'} the log-probabilities of its pairs under {model}"
    found = [("pairs", f"{prepared.corpus.num_documents:,}"), ("stored", f"{prepared.reference.folder}, {dtype}")]
    put(as_text([head, *facts(found)]))
