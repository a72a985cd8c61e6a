"""``prepare``: checks the request, connects to Ray, runs the job and says what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

from ray_ulysses.data.merge import Duplicates
from ray_ulysses.data.preparation import PrepareProgress, PrepareRequest, begin
from ray_ulysses.data.row_fields import RowFields
from ray_ulysses.data.sources import DEFAULT_EXCLUDE, SourceKind, SourceSpec
from ray_ulysses.errors import UserError

_MOST_REASONS = 6


def prepare_corpus(
    *,
    sources: tuple[str, ...],
    out: Path,
    tokenizer: str,
    kind: str,
    pattern: str,
    exclude: tuple[str, ...],
    fields: RowFields,
    split: str | None,
    duplicates: str,
    without: tuple[str, ...],
    address: str | None,
    say: Callable[[str], Any],
) -> None:
    """Prepare a corpus; what is complete already is said to be so.

    Raises:
        UserError: An option, a source, the tokenizer or the directory can't be used.
    """
    for name, value, choices in (
        ("kind", kind, get_args(SourceKind)),
        ("duplicates", duplicates, get_args(Duplicates)),
    ):
        if value not in choices:
            raise UserError(f"--{name}={value!r}: is unknown; use {', '.join(choices)}")
    spec = SourceSpec(
        paths=sources,
        kind=cast("SourceKind", kind),
        pattern=pattern,
        exclude=(*DEFAULT_EXCLUDE, *exclude),
        text_field=fields.text,
        tokens_field=fields.tokens,
        labels_field=fields.labels,
        messages_field=fields.messages,
        tools_field=fields.tools,
        prompt_field=fields.prompt,
        completion_field=fields.completion,
        id_field=fields.id,
        split=split,
    )
    request = PrepareRequest(
        sources=spec, out=out, tokenizer=tokenizer, duplicates=cast("Duplicates", duplicates), without=without
    )
    # Everything that is wrong with the request is said before Ray is imported and started.
    if not begin(request).is_complete:
        from ray_ulysses.cluster.prepare_job import DEFAULT_NUM_CPUS, prepare
        from ray_ulysses.cluster.session import ray_session

        with ray_session(address, cpus=4 * DEFAULT_NUM_CPUS):
            prepare(request, progress=lambda progress: say(_line(progress)))
    else:
        say(f"{out} holds this corpus already")
    _say_result(out, say)


def _line(progress: PrepareProgress) -> str:
    return (
        f"unit={progress.units_done}/{progress.num_units} documents={progress.documents} tokens={progress.tokens} "
        f"quarantined={progress.rejected} bytes={progress.bytes_done}/{progress.num_bytes}"
    )


def _say_result(out: Path, say: Callable[[str], Any]) -> None:
    from ray_ulysses.data.corpus import Corpus

    corpus = Corpus.open(out)
    info = corpus.info
    size = f"{corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens, longest {corpus.lengths.max():,}"
    say(f"corpus {out}: {size}")
    if info.spans is not None:
        say(f"supervised: {info.spans.num_supervised:,} of its tokens, in {info.spans.num_spans:,} spans")
    if info.byte_unigram_nats is not None:
        say(f"entropy of its bytes: {info.byte_unigram_nats:.4f} nats (unigram)")
    if info.num_quarantined:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in info.reasons[:_MOST_REASONS])
        say(f"left out: {info.num_quarantined:,} documents ({reasons}); {out / 'quarantine.jsonl'} names each")
