"""The command ``prepare``; `cli` registers it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ray_ulysses.command_options import AsJson, Quiet
from ray_ulysses.report.words import as_text
from ray_ulysses.views.streams import put

EXAMPLE = "Example: ray-ulysses prepare docs/ --out corpus --tokenizer bytes"

_Field = str | None


def _option(help_text: str, **settings: Any) -> Any:
    return typer.Option(help=help_text, **settings)


def prepare(
    sources: Annotated[list[str], typer.Argument(help="Files, source trees, or a `datasets` directory or hub name.")],
    out: Annotated[str, _option("Directory of the corpus, which every node can access, or s3://bucket/corpus.")],
    tokenizer: Annotated[str, _option("`bytes`, or a Hugging Face tokenizer: directory or hub id.")],
    kind: Annotated[str, _option("auto, text, jsonl, parquet or datasets.")] = "auto",
    pattern: Annotated[str, _option("Only files of a directory whose path matches this pattern.")] = "*",
    exclude: Annotated[list[str] | None, _option("Patterns of files to leave out, beside .* .")] = None,
    text_field: Annotated[_Field, _option("Text rows: the text.  [default: text]")] = None,
    tokens_field: Annotated[_Field, _option("Token rows: a list of token ids.")] = None,
    labels_field: Annotated[_Field, _option("Token rows: a list of labels, -100 or the token.")] = None,
    messages_field: Annotated[_Field, _option("Chat rows: {role, content} or {from, value}.")] = None,
    tools_field: Annotated[_Field, _option("Chat rows: the tools, or their JSON; may be null.")] = None,
    system_field: Annotated[_Field, _option("Chat rows: the system message, a column of its own.")] = None,
    prompt_field: Annotated[_Field, _option("The prompt, not learned; of chats: messages.")] = None,
    input_field: Annotated[_Field, _option("Prompt rows: the input of an Alpaca instruction.")] = None,
    completion_field: Annotated[_Field, _option("Prompt rows: the completion, learned.")] = None,
    weight_field: Annotated[_Field, _option("Any row: the weight of its loss, 1 if missing.")] = None,
    id_field: Annotated[_Field, _option("Any row: its id, which is kept.")] = None,
    chat_template: Annotated[Path | None, _option("Chats: another template, or `training`: TRL's.")] = None,
    turns: Annotated[str, _option("Chats: how turns are found: auto, marks, split, whole.")] = "auto",
    train_on: Annotated[str, _option("Chats: learn all turns of the assistant, or the last.")] = "all",
    bos: Annotated[str, _option("Begins a text: tokenizer (its own), none, or a token.")] = "tokenizer",
    eos: Annotated[str, _option("Ends a document: tokenizer (its own), none, or a token.")] = "tokenizer",
    split: Annotated[str | None, _option("Split of a data set that has several.")] = None,
    duplicates: Annotated[str, _option("quarantine or keep repeated documents.")] = "quarantine",
    without: Annotated[list[str] | None, _option("Leave out what this corpus holds; may be repeated.")] = None,
    staging: Annotated[Path | None, _option("Where it is made before it goes to an object store.")] = None,
    address: Annotated[str | None, _option("Ray cluster; by default RAY_ADDRESS, else this machine.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Turn text, source trees, JSONL, Parquet or a `datasets` dataset into token shards. Resumable.

    A text file is one document, and so is a row of JSONL, Parquet or a data set. The options that name
    its keys or columns select one of four kinds of row:

    \b
    row     options                              what is learned
    text    --text-field                         everything
    tokens  --tokens-field [--labels-field]      everything, or by labels
    chat    --messages-field [--tools-field]     the assistant's turns
    prompt  --prompt-field --completion-field    the completion

    Documents that can't be read are left out and listed, with the reason, in quarantine.jsonl.
    """  # noqa: D301 -- click's mark for text that is not to be rewrapped
    options = dict(locals())
    del options["as_json"], options["quiet"]
    from ray_ulysses.views.console import open_console
    from ray_ulysses.views.prepare_progress import PrepareView

    with PrepareView(open_console(stderr=as_json, quiet=quiet)) as view:
        view.phase("loading libraries")
        from ray_ulysses.cluster.prepare_command import corpus_facts, prepare_corpus

        lines = prepare_corpus(view=view, **options)
    put(json.dumps(corpus_facts(out), indent=2) if as_json else as_text(lines))
