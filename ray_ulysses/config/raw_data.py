"""Settings that name raw data, from which `train` prepares a corpus."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ray_ulysses.config.section import LocalPath, NamedPlace, Section


class PrepareSection(Section):
    """Raw data and the options of `ray-ulysses prepare` by which `train` prepares `data.path` if it is missing."""

    sources: tuple[NamedPlace, ...] = Field(min_length=1, strict=False)
    """Files, source trees, or a `datasets` directory or hub name, which every node can read."""

    tokenizer: NamedPlace
    """`bytes`, `chars:LETTERS`, `kmer:K`, or the directory or hub id of a Hugging Face tokenizer."""

    kind: Literal["auto", "text", "jsonl", "parquet", "datasets"] = "auto"
    """Kind of the sources. Default `auto`."""

    pattern: str = "*"
    """Pattern of the files to read in a directory. Default `*`."""

    exclude: tuple[str, ...] = Field(default=(), strict=False)
    """Patterns of files to leave out, in addition to hidden files. Default `[]`."""

    text_field: str | None = None
    """Field with the text of a row. Default null: `text`."""

    tokens_field: str | None = None
    """Field with a list of token ids. Default null."""

    labels_field: str | None = None
    """Field with a list of labels: the token, or -100 for a token that is not learned. Default null."""

    messages_field: str | None = None
    """Field with the messages of a chat. Default null."""

    tools_field: str | None = None
    """Field with the tools of a chat. Default null."""

    system_field: str | None = None
    """Field with a separate system message. Default null."""

    prompt_field: str | None = None
    """Field with the prompt, which is not learned. Default null."""

    input_field: str | None = None
    """Field with the input of an Alpaca instruction. Default null."""

    completion_field: str | None = None
    """Field with the completion, which is learned. Default null."""

    chosen_field: str | None = None
    """Field with the better answer of a pair. Default null."""

    rejected_field: str | None = None
    """Field with the worse answer of a pair. Default null."""

    query_field: str | None = None
    """Field with the query of a pair of texts. Default null."""

    positive_field: str | None = None
    """Field with the text that matches the query. Default null."""

    weight_field: str | None = None
    """Field with the loss weight. Default null: 1."""

    label_field: str | None = None
    """Field with the class of a document, an integer or a string, or with `completion_field`, whether the completion is
    desirable. Default null: documents have no classes."""

    id_field: str | None = None
    """Field with an id to store in the corpus. Default null."""

    chat_template: NamedPlace | None = None
    """Template file, or `training` for TRL's templates. Default null: the tokenizer's."""

    turns: Literal["auto", "marks", "split", "whole"] = "auto"
    """How the turns of a chat are found (`docs/data.md`). Default `auto`."""

    train_on: Literal["all", "last"] = "all"
    """Assistant turns that are learned. Default `all`."""

    bos: str = "tokenizer"
    """Token that begins a text: `tokenizer`, `none`, or a token. Default `tokenizer`."""

    eos: str = "tokenizer"
    """Token that ends a document: `tokenizer`, `none`, or a token. Default `tokenizer`."""

    split: str | None = None
    """Split of the dataset. Default null: its only split."""

    duplicates: Literal["quarantine", "keep"] = "quarantine"
    """How to treat repeated documents. Default `quarantine`."""

    without: tuple[NamedPlace, ...] = Field(default=(), strict=False)
    """Corpora whose documents are left out. Default `[]`."""

    staging: LocalPath | None = None
    """Working directory that every node can access, if `data.path` is in an object store. Default null: this node."""
