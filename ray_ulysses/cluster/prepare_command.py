"""The ``prepare`` command: checks the request, connects to Ray, runs the job and reports the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from ray_ulysses.config.job_paths import refuse_relative_in_job
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.merge import Duplicates
from ray_ulysses.data.prepare.preparation import PrepareRequest, preparing, progress_of
from ray_ulysses.data.sources.row_fields import RowFields
from ray_ulysses.data.sources.units import DEFAULT_EXCLUDE, SourceKind, SourceSpec
from ray_ulysses.errors import UserError
from ray_ulysses.views.prepare_progress import PrepareView

_MOST_REASONS = 6


def prepare_corpus(*, address: str | None, view: PrepareView, **options: Any) -> list[str]:
    """Prepare a corpus, unless it exists, and return a summary as lines.

    Args:
        address: The Ray cluster.
        view: Shows the progress to the user.
        options: The options of the command line, which `PrepareRequest` and its parts declare.

    Raises:
        UserError: An option, a source, the tokenizer or the directory can't be used.
    """
    request, said = _request(**options), []
    out = request.out
    view.phase("listing the sources")
    # All errors of the request are reported before Ray is imported and started.
    with preparing(request) as preparation:
        if preparation.is_complete:
            said.append(f"{out} already holds this corpus")
        else:
            view.phase("loading libraries")
            from ray_ulysses.cluster.prepare_job import DEFAULT_NUM_CPUS, run_preparation
            from ray_ulysses.cluster.session import ray_session

            view.phase("starting Ray, or connecting to it")
            with ray_session(address, cpus=4 * DEFAULT_NUM_CPUS):
                view.progress(progress_of(preparation, preparation.done))
                run_preparation(preparation, progress=view.progress, phase=view.phase)
    return [*said, *_result(out)]


def _request(
    *, sources: list[str], out: Path, exclude: list[str] | None, without: list[str] | None, **options: Any
) -> PrepareRequest:
    refuse_relative_in_job("--out", out)
    for name, choices in (("kind", get_args(SourceKind)), ("duplicates", get_args(Duplicates))):
        if options[name] not in choices:
            raise UserError(f"--{name}={options[name]!r}: is unknown; use {', '.join(choices)}")
    fields = {name: options.pop(name) for name in [*options] if name.endswith("_field")}
    spec = SourceSpec(
        paths=tuple(sources),
        exclude=(*DEFAULT_EXCLUDE, *(exclude or ())),
        fields=RowFields.from_options(fields),
        **{name: options.pop(name) for name in ("kind", "pattern", "split")},
    )
    return PrepareRequest(sources=spec, out=out, without=tuple(without or ()), **options)


def _result(out: Path) -> list[str]:
    corpus = Corpus.open(out)
    info = corpus.info
    size = f"{corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens, longest {corpus.lengths.max():,}"
    said = [f"corpus {out}: {size}"]
    if info.spans is not None:
        said.append(f"supervised: {info.spans.num_supervised:,} of its tokens, in {info.spans.num_spans:,} spans")
        if info.spans.weights is not None:
            said.append("loss weights from {:g} to {:g}".format(*info.spans.weights))
    if info.byte_unigram_nats is not None:
        said.append(f"entropy of its bytes: {info.byte_unigram_nats:.4f} nats (unigram)")
    if info.num_quarantined:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in info.reasons[:_MOST_REASONS])
        said.append(f"left out: {info.num_quarantined:,} documents ({reasons}); see {out / 'quarantine.jsonl'}")
    return said
