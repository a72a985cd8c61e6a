"""The command ``prepare``: checks the request, prepares the corpus on Ray, and prints a summary."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ray_ulysses.commands.options import AsJson, Quiet
from ray_ulysses.commands.output import put
from ray_ulysses.errors import UserError
from ray_ulysses.report.words import as_text

if TYPE_CHECKING:
    from rich.console import Console

    from ray_ulysses.commands.display import PrepareView
    from ray_ulysses.config import Config
    from ray_ulysses.data.corpus.corpus import Corpus
    from ray_ulysses.data.prepare.preparation import PrepareRequest
    from ray_ulysses.storage.object_store import ObjectStore

EXAMPLE = "Example: ray-ulysses prepare docs/ --out corpus --tokenizer bytes"

_MOST_REASONS = 6
_MOST_CLASSES = 12
_Field = str | None


def _option(help_text: str, **settings: Any) -> Any:
    return typer.Option(help=help_text, **settings)


def prepare(
    sources: Annotated[list[str], typer.Argument(help="Files, source trees, or a `datasets` directory or hub name.")],
    out: Annotated[str, _option("Directory that every node can access, or s3://bucket/corpus.")],
    tokenizer: Annotated[str, _option("`bytes`, chars:ACGTN, kmer:6, or a Hugging Face directory or hub id.")],
    kind: Annotated[Literal["auto", "text", "jsonl", "parquet", "datasets"], _option("Kind of the sources.")] = "auto",
    pattern: Annotated[str, _option("In a directory, only files whose path matches this pattern.")] = "*",
    exclude: Annotated[list[str] | None, _option("Patterns of files to leave out, in addition to .* .")] = None,
    text_field: Annotated[_Field, _option("Text rows: the text.  [default: text]")] = None,
    tokens_field: Annotated[_Field, _option("Token rows: a list of token ids.")] = None,
    labels_field: Annotated[_Field, _option("Token rows: a list of labels, -100 or the token.")] = None,
    messages_field: Annotated[_Field, _option("Chat rows: {role, content} or {from, value}.")] = None,
    tools_field: Annotated[_Field, _option("Chat rows: the tools, or their JSON; may be null.")] = None,
    system_field: Annotated[_Field, _option("Chat rows: a separate system message.")] = None,
    prompt_field: Annotated[_Field, _option("The prompt (not learned), as text or messages.")] = None,
    input_field: Annotated[_Field, _option("Prompt rows: the input field of an Alpaca instruction.")] = None,
    completion_field: Annotated[_Field, _option("Prompt rows: the completion, learned.")] = None,
    chosen_field: Annotated[_Field, _option("Pairs: the better answer, as text or messages.")] = None,
    rejected_field: Annotated[_Field, _option("Pairs: the worse answer.")] = None,
    query_field: Annotated[_Field, _option("Pairs of texts: the query.")] = None,
    positive_field: Annotated[_Field, _option("Pairs of texts: the text that matches the query.")] = None,
    weight_field: Annotated[_Field, _option("Any row: the loss weight, 1 if missing.")] = None,
    label_field: Annotated[_Field, _option("Any row but pairs: the class; with prompts, true or false (KTO).")] = None,
    id_field: Annotated[_Field, _option("Any row: an id, stored in the corpus.")] = None,
    chat_template: Annotated[Path | None, _option("Chats: a template file, or `training` for TRL's.")] = None,
    turns: Annotated[Literal["auto", "marks", "split", "whole"], _option("Chats: how turns are found.")] = "auto",
    train_on: Annotated[Literal["all", "last"], _option("Chats: which assistant turns are learned.")] = "all",
    bos: Annotated[str, _option("Begins a text: tokenizer (its own), none, or a token.")] = "tokenizer",
    eos: Annotated[str, _option("Ends a document: tokenizer (its own), none, or a token.")] = "tokenizer",
    split: Annotated[str | None, _option("Split of the dataset, if it has several.")] = None,
    duplicates: Annotated[Literal["quarantine", "keep"], _option("How to treat repeated documents.")] = "quarantine",
    without: Annotated[list[str] | None, _option("Leave out documents of this corpus; can be repeated.")] = None,
    staging: Annotated[Path | None, _option("Working directory if --out is an object store.")] = None,
    address: Annotated[str | None, _option("Ray cluster; by default RAY_ADDRESS, else this machine.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Turn text, source trees, JSONL, Parquet or a `datasets` dataset into token shards. Resumable.

    Reads FASTA files and Megatron-LM, datatrove and MDS datasets too. Each text file is one document, as is
    each record of FASTA and each row of JSONL, Parquet or a dataset. The field options select one of six kinds of row:

    \b
    row     options                              what is learned
    text    --text-field                         everything
    tokens  --tokens-field [--labels-field]      everything, or by labels
    chat    --messages-field [--tools-field]     the assistant's turns
    prompt  --prompt-field --completion-field    the completion
    answer  the same with --label-field          the completion, by its label
    pair    --chosen-field --rejected-field      both answers
    query   --query-field --positive-field       vectors of both texts

    Sequences need no tokenizer files: ray-ulysses prepare genome.fa.gz --out corpus --tokenizer kmer:6

    Documents that can't be read are left out and listed in quarantine.jsonl with the reason.
    """  # noqa: D301 -- click's mark for text that is not to be rewrapped
    options = dict(locals())
    del options["as_json"], options["quiet"]
    from ray_ulysses.commands.display import PrepareView, open_console

    with PrepareView(open_console(stderr=as_json, quiet=quiet)) as view:
        view.phase("loading libraries")
        importlib.import_module("ray_ulysses.data.prepare.preparation")
        lines = prepare_corpus(view=view, **options)
    put(json.dumps(corpus_facts(out), indent=2) if as_json else as_text(lines), is_exact=as_json)


def prepare_corpus(
    *, address: str | None, view: PrepareView, out: str, staging: Path | None = None, **options: Any
) -> list[str]:
    """Prepare a corpus unless it exists, and return a summary.

    A corpus for an object store is first prepared in a directory, and then copied.

    Args:
        address: Address of the Ray cluster.
        view: Shows the progress to the user.
        out: A directory, or the URI of a folder in an object store.
        staging: The directory in which a corpus for an object store is prepared, on a path that every node can
            access. If None, this node's cache is used, and only this node takes part.
        options: The other command-line options; `PrepareRequest` and its parts declare them.

    Raises:
        UserError: An option, a source, the tokenizer or the directory can't be used.
        RunError: The corpus can't be written to its storage.
    """
    from ray_ulysses.config.job_paths import refuse_relative_in_job
    from ray_ulysses.data.fingerprint import stable_hash
    from ray_ulysses.storage.block_cache import cache_folder
    from ray_ulysses.storage.location import parse_location
    from ray_ulysses.storage.object_store import ObjectStore
    from ray_ulysses.storage.place import open_folder

    where = parse_location(out)
    if isinstance(where, Path):
        if staging is not None:
            raise UserError(
                f"--staging={staging}: applies only to an object store, but --out={out} is a directory; omit --staging"
            )
        refuse_relative_in_job("--out", where)
        return _prepare(address, view, where, None, options)
    if staging is not None:
        refuse_relative_in_job("--staging", staging)
    folder = open_folder(out)
    assert isinstance(folder, ObjectStore)
    # Use a separate folder, since it is deleted with its content.
    directory = (staging or cache_folder("prepare")) / stable_hash(str(where))
    said = _prepare(address, view, directory, folder, options, here_only=staging is None)
    shutil.rmtree(directory, ignore_errors=True)
    return said


def prepare_first(config: Config, base: Path, console: Console) -> None:
    """Prepare the corpus of a run from ``data.prepare`` if it is missing and nothing else prevents the run's start.

    Raises:
        UserError: The run can't start, or ``data.prepare`` can't be used.
        RunError: The corpus can't be written to its storage.
    """
    absolute = config.with_absolute_paths(base)
    section, out = absolute.data.prepare, absolute.data.path
    if section is None:
        # Importing the planner takes seconds, in which the command would show nothing.
        return
    from ray_ulysses.commands.display import PrepareView
    from ray_ulysses.run.preflight import needs_preparation, report_run

    if not needs_preparation(absolute):
        return
    assert out is not None
    options = section.model_dump()
    # The shell expands the home directory in options of the command.
    for name in ("sources", "without"):
        options[name] = [os.path.expanduser(one) for one in options[name]]
    options["tokenizer"] = os.path.expanduser(section.tokenizer)
    for name in ("chat_template", "staging"):
        options[name] = None if options[name] is None else Path(options[name]).expanduser()
    with PrepareView(console) as view:
        view.phase("planning")
        # A problem of the run is reported before a preparation that may take hours.
        report_run(config, base).raise_problems()
        view.phase("preparing the corpus")
        try:
            prepare_corpus(address=config.cluster.address, view=view, out=out, **options)
        except UserError as error:
            raise UserError(f"data.prepare: {error}") from error


def _prepare(
    address: str | None,
    view: PrepareView,
    out: Path,
    folder: ObjectStore | None,
    options: dict[str, Any],
    *,
    here_only: bool = False,
) -> list[str]:
    """Prepare a corpus in a directory, and copy it to the object store's folder if one is given."""
    from ray_ulysses.data.prepare.preparation import claimed, listed, progress_of
    from ray_ulysses.data.prepare.upload import CorpusUpload

    request = _request(out=out, **options)
    place = out if folder is None else folder
    view.phase("listing the sources")
    # All errors of the request are reported before Ray is imported and started.
    found = listed(request)
    upload = None if folder is None else CorpusUpload(folder, str(folder), found.signature)
    # Check the store before anything is written locally.
    if upload is not None and upload.is_complete():
        return [f"{place} already holds this corpus", *_result(place)]
    with claimed(found, is_scratch=upload is not None) as preparation:
        if preparation.is_complete and upload is None:
            return [f"{place} already holds this corpus", *_result(place)]
        if not preparation.is_complete:
            view.phase("loading libraries")
            from ray_ulysses.cluster.prepare_job import NUM_CPUS, run_preparation
            from ray_ulysses.cluster.session import own_node, ray_session

            view.phase("starting Ray, or connecting to it")
            with ray_session(address, cpus=4 * NUM_CPUS):
                view.progress(progress_of(preparation, preparation.done))
                node = own_node() if here_only else None
                run_preparation(preparation, progress=view.progress, phase=view.phase, node=node)
        if upload is not None:
            view.phase("copying the corpus")
            upload.run(request.out, view.phase)
    return _result(place)


def _request(
    *,
    sources: list[str],
    out: Path,
    exclude: list[str] | None,
    without: list[str] | None,
    chat_template: Path | None,
    **options: Any,
) -> PrepareRequest:
    from ray_ulysses.data.prepare.preparation import PrepareRequest
    from ray_ulysses.data.sources.rows import RowFields
    from ray_ulysses.data.sources.units import DEFAULT_EXCLUDE, SourceSpec
    from ray_ulysses.data.tokenize.options import EncodingOptions

    fields = {name: options.pop(name) for name in [*options] if name.endswith("_field")}
    spec = SourceSpec(
        paths=tuple(sources),
        exclude=(*DEFAULT_EXCLUDE, *(exclude or ())),
        fields=RowFields.from_options(fields),
        **{name: options.pop(name) for name in ("kind", "pattern", "split")},
    )
    encoding = EncodingOptions(
        chat_template=None if chat_template is None else _template_text(chat_template, options["tokenizer"]),
        **{name: options.pop(name) for name in ("bos", "eos", "turns", "train_on")},
    )
    return PrepareRequest(sources=spec, out=out, without=tuple(without or ()), encoding=encoding, **options)


def _template_text(path: Path, tokenizer: str) -> str:
    from ray_ulysses.data.tokenize.chat_template import TRAINING, training_template
    from ray_ulysses.data.tokenize.tokenizers import BYTES, tokenizer_folder

    if str(path) == TRAINING and not path.exists():
        return training_template(tokenizer if tokenizer == BYTES else tokenizer_folder(tokenizer))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--chat-template={path}: can't be read ({reason}); specify a Jinja file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--chat-template={path}: is not UTF-8 ({error}); save it as UTF-8") from error


def _result(place: Path | ObjectStore) -> list[str]:
    import numpy as np

    from ray_ulysses.data.corpus.corpus import Corpus
    from ray_ulysses.data.corpus.format import QUARANTINE_FILE

    corpus = Corpus.open(place if isinstance(place, Path) else str(place.location))
    info = corpus.info
    size = f"{corpus.num_documents:,} documents, {info.num_tokens:,} tokens, longest {corpus.lengths.max():,}"
    said = [f"corpus {place}: {size}"]
    if info.spans is not None:
        said.append(f"supervised: {info.spans.num_supervised:,} tokens in {info.spans.num_spans:,} spans")
        if info.spans.weights is not None:
            said.append("loss weights from {:g} to {:g}".format(*info.spans.weights))
    if info.classes:
        counts = np.bincount(corpus.labels, minlength=len(info.classes)).tolist()
        named = [f"{name} ({count:,})" for name, count in zip(info.classes, counts, strict=True)]
        more = f" and {len(named) - _MOST_CLASSES:,} more" if len(named) > _MOST_CLASSES else ""
        said.append(f"{len(named):,} classes: {', '.join(named[:_MOST_CLASSES])}{more}")
    said += _encoding(corpus)
    if info.byte_unigram_nats is not None:
        said.append(f"unigram entropy: {info.byte_unigram_nats:.4f} nats per byte")
    if info.num_quarantined:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in info.reasons[:_MOST_REASONS])
        said.append(
            f"left out: {info.num_quarantined:,} documents ({reasons}); see {corpus.folder.named(QUARANTINE_FILE)}"
        )
    return said


def corpus_facts(out: str) -> dict[str, Any]:
    """Return a description of a prepared corpus, for ``--json``."""
    from ray_ulysses.data.corpus.corpus import Corpus

    corpus = Corpus.open(out)
    info = corpus.info
    return {
        "corpus": out,
        "fingerprint": corpus.fingerprint,
        "documents": corpus.num_documents,
        "tokens": info.num_tokens,
        "longest_document": int(corpus.lengths.max()),
        "supervised_tokens": info.num_tokens if info.spans is None else info.spans.num_supervised,
        "classes": list(info.classes),
        "quarantined": info.num_quarantined,
        "reasons": dict(info.reasons),
    }


def _encoding(corpus: Corpus) -> list[str]:
    """Describe how documents were encoded, if that is not obvious."""
    encoding, own = corpus.info.encoding, corpus.info.tokenizer.eos_token_id
    said = []
    if encoding.chats is not None:
        became = f"{encoding.num_chats:,} conversations"
        if encoding.num_chat_documents > encoding.num_chats:
            became += (
                f" as {encoding.num_chat_documents:,} documents, since the chat template renders turns differently "
                "once the conversation continues"
            )
        said.append(f"chats: {encoding.chats}; {became}")
    if encoding.num_open_turns:
        said.append(
            f"warning: {encoding.num_open_turns:,} learned turns end without a special token, so a model does not "
            "learn to stop there; use a chat template that ends each turn with one (--chat-template), or end documents "
            "with one (--eos)"
        )
    if encoding.num_unknown:
        said.append(
            f"warning: {encoding.num_unknown:,} tokens ({encoding.num_unknown / corpus.info.num_tokens:.2%}) stand for "
            "text that the vocabulary does not have"
        )
    if encoding.bos_token_id is not None:
        said.append(f"texts begin with {_token(corpus, encoding.bos_token_id)}")
    if encoding.eos_token_id is None:
        said.append("documents have no end token")
    elif encoding.eos_token_id != own:
        said.append(f"documents end with {_token(corpus, encoding.eos_token_id)}")
    return said


def _token(corpus: Corpus, token_id: int) -> str:
    import numpy as np

    from ray_ulysses.data.tokenize.tokenizers import load_tokenizer

    return f"{load_tokenizer(corpus.info.tokenizer.name).decode(np.array([token_id]))} (token {token_id})"
