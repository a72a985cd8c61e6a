"""Settings of the run, the data and the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from ray_ulysses.config.model import RopeSection
from ray_ulysses.config.optimizer import ScheduleSection
from ray_ulysses.config.raw_data import PrepareSection
from ray_ulysses.config.section import (
    OnResume,
    PlacePath,
    Section,
    StoragePlace,
    by_branch,
    fixed,
    free,
    refusal,
)
from ray_ulysses.storage.location import parse_location


class ProfileSection(Section):
    """Steps to trace with the PyTorch profiler. Traced steps are slower, and each trace takes tens of MB."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, strict=False)
    """Optimizer steps to trace, with one trace per step. Avoid the first step of an attempt, which is unusually
    slow."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1, strict=False)
    """Ranks to trace. Default `[0]`."""

    @field_validator("steps", "ranks")
    @classmethod
    def _is_ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise refusal("must list distinct numbers in ascending order", "use a list such as [10, 11]")
        return value


class EarlyStoppingSection(Section):
    """When to end a run whose validation loss no longer improves."""

    patience: int = Field(ge=1)
    """Number of consecutive evaluations without a lower loss after which the run ends. Required."""

    corpus: str | None = None
    """Name of the evaluation set to watch: `NAME` in the metric `eval/NAME/loss`. Default null: the mean over all
    evaluation rows (`eval/loss`)."""

    min_delta: float = Field(default=0.0, ge=0)
    """A loss counts as lower if it is more than this amount below the last one that counted, in nats. Default 0."""


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_OBJECT = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
_MAX_SEED = 2**63 - 1
_ROWS_OF_STEPS = by_branch("a change would put different rows into each step")
_KERNEL_FILES = (Path("/proc"), Path("/sys"))


class RunSection(Section):
    """Name and storage of the run, how long it trains, and how often it reports."""

    on_resume: ClassVar[OnResume] = free()

    name: Annotated[str, fixed("the name identifies the run")] = Field(pattern=_NAME, max_length=128)
    """Name of the run: letters, digits, `.`, `_` and `-`. The run's directory is `<storage>/<name>/`; the same name and
    storage resume the run."""

    storage: Annotated[StoragePlace, free("if the directory was moved or is mounted elsewhere")]
    """Directory for runs: a path that every node can access, or the URI of a folder in an object store, such as
    `s3://bucket/runs`, which then stores all files of a run except node-local ones. Credentials come from the
    environment of every node, or from `cluster.secrets_file`. Required: there is no sensible default for a cluster's
    shared path."""

    storage_kind: Literal["local", "nfs"] = "local"
    """File system type of `storage`; use `nfs` for any network file system. With `nfs`, MLflow requires a server, since
    SQLite's locks are not safe on network file systems. Default `local`, which is right for a single machine."""

    seed: Annotated[int, fixed("a change would alter the initial weights and the data order")] = Field(
        default=0, ge=0, le=_MAX_SEED
    )
    """Seed of the weights (with `model.init: random`), the data plan, and every other random choice. Default 0, so that
    runs are reproducible."""

    stop_step: Annotated[int | None, free("a later step continues the run; the learning rate is not affected")] = Field(
        default=None, ge=1
    )
    """Optimizer step after which the command stops. It does not affect the learning rate, which follows
    `schedule.horizon_steps`. Default null: stop at the end of the planned data."""

    log_every_steps: int = Field(default=1, ge=1)
    """Number of steps between progress lines, and between data points sent to the trackers. The journal records every
    step. Default 1, since a long-context step takes seconds."""

    self_test: bool = True
    """Whether workers compare attention and gradients, computed over the live process groups, with a single-process
    reference, and stop if they differ. The test takes about a second. It runs when workers start, when a stage begins,
    and when a worker joins. Default true: a broken link or kernel is found immediately instead of after a week."""

    eval_every_steps: int | None = Field(default=None, ge=1)
    """Steps between evaluations, which begin before the first step. Requires `data.validation`, or `data.eval_fraction`
    above 0. Default null: no evaluations."""

    early_stopping: EarlyStoppingSection | None = None
    """When the run ends early, such as `{patience: 3}`: after that many evaluations in a row without a lower loss. The
    last state is saved as at the end of a run. A branch with other data starts a new count. Requires
    `eval_every_steps`; not possible with `stages`, because losses of different stages are not comparable. Default null:
    the run continues to its last step."""

    sample_every_steps: int | None = Field(default=None, ge=1)
    """Steps between samples: the model continues each of `sample_prompts` with its most probable tokens, and the text
    is recorded for `inspect`, `report` and the trackers. Each token takes a forward pass over the text so far by all
    workers; the training is unaffected. Default null: no samples."""

    sample_prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=("The most important thing is",), min_length=1, strict=False
    )
    """Texts for the model to continue as plain text, without a chat template. Default: `The most important thing
    is`."""

    sample_tokens: int = Field(default=64, ge=1)
    """Maximum number of tokens to add to each of `sample_prompts`. Default 64."""

    plugins: Annotated[
        tuple[Annotated[str, Field(pattern=_OBJECT)], ...], by_branch("a change may alter the loss curve")
    ] = Field(default=(), strict=False)
    """Plugins of the run, as `module:object`: classes or instances of `ray_ulysses.Plugin`, with
    [callbacks, a loss or a model class](extend.md#plugins). The module is imported by the command and by every worker,
    from `PYTHONPATH` or the `working_dir` of the submitted job. Default: none."""

    profile: ProfileSection | None = None
    """Steps and ranks to trace with the PyTorch profiler, such as `{steps: [10, 11], ranks: [0, 8]}`. Traces are
    written to `diagnostics/` in the run's directory and open in Perfetto. Default null: no traces."""

    @field_validator("plugins")
    @classmethod
    def _are_different(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise refusal("lists a plugin twice", "list each plugin once")
        return value

    @field_validator("storage")
    @classmethod
    def _is_a_directory(cls, value: str) -> str:
        where = parse_location(value)
        if isinstance(where, Path) and any(where.is_relative_to(root) for root in _KERNEL_FILES):
            raise refusal("is on a virtual file system, which can't store files", "use a directory on a disk")
        return value


class SourceSection(Section):
    """One of several corpora, with its weight."""

    path: PlacePath
    """Directory of a prepared corpus: a path that every node can access, or a URI in an object store, such as
    `s3://bucket/corpus`."""

    weight: float | None = Field(default=None, ge=0.0, allow_inf_nan=False, le=1e9)
    """Share of an epoch's tokens, relative to the other sources. Default null: every document is used."""


class DataSection(Section):
    """The corpora, and how their documents are packed into rows and steps."""

    on_resume: ClassVar[OnResume] = by_branch("a change would alter the training data")

    path: PlacePath | None = None
    """Directory of a corpus written by `ray-ulysses prepare`: a path that every node can access, or a URI in an object
    store, such as `s3://bucket/corpus`, with the same credentials as `checkpoint.storage`. Default null, which is valid
    only with `sources`, or if each of the `stages` sets its own corpora."""

    sources: Annotated[tuple[SourceSection, ...] | None, by_branch("a change would alter the training data")] = Field(
        default=None, strict=False, min_length=1
    )
    """Several corpora instead of `path`, each with a `path` and a `weight`; either all or none of them have a weight.
    Without weights, an epoch uses every document of every source. With weights, an epoch uses every document of the
    source that is smallest relative to its weight, and tokens of the others in proportion to their weights. Default
    null."""

    prepare: Annotated[PrepareSection | None, free("it is read only while `data.path` holds no corpus")] = None
    """Raw data from which `train` prepares `data.path` first if no corpus is there, with the options of `ray-ulysses
    prepare`; `sources` and `tokenizer` are required. Default null: the corpus must exist."""

    allow_other_tokenizer: Annotated[bool, free("rows do not change")] = False
    """Whether pretrained weights may be trained on a corpus prepared with a tokenizer other than that of `model.path`.
    Default false: such a corpus is refused, since its token ids have different meanings. With `model.init: random`, any
    tokenizer is allowed, and `plan` reports a difference."""

    context_tokens: Annotated[int, by_branch("a change would repack the documents into rows")] = Field(ge=2)
    """Maximum length of a row in tokens, rounded down to a multiple that `parallel.allowed_sp` determines. By default,
    longer documents are split without losing training targets (see `overlong`)."""

    rows_per_step: Annotated[int, _ROWS_OF_STEPS] = Field(ge=1, le=65_536)
    """Global batch size in rows per optimizer step. A step trains on the same rows with any number of workers."""

    packing: Annotated[
        Literal["best_fit", "wide_fit", "concat", "none"], by_branch("a change would repack the documents into rows")
    ] = "best_fit"
    """How documents are packed into rows. `best_fit` puts each document into the fullest of 64 open rows that has space
    for it, and splits only documents that are longer than a row. `wide_fit` uses 1,024 open rows, for documents that
    fill a third to two thirds of a row. `concat` splits the stream of documents wherever a row is full. `none` gives
    each document its own row. Default `best_fit`, which fills rows almost as well as `concat` without splitting
    documents; `plan` reports if `wide_fit` would fill them better."""

    overlong: Annotated[
        Literal["split", "truncate", "drop", "error"], by_branch("a change would alter which tokens are trained on")
    ] = "split"
    """Treatment of documents longer than a row. `split` trains on the complete document, in pieces, without losing
    training targets; `truncate` trains on the beginning only; `drop` leaves the document out; `error` refuses the
    corpus. Default `split`; `plan` prints the number of tokens that the other options would lose."""

    balance_steps: Annotated[int, _ROWS_OF_STEPS] = Field(default=16, ge=1, le=1024)
    """Number of consecutive steps that may exchange rows, so that rows of similar cost share a micro-batch. A larger
    value balances data-parallel ranks better at very long context, but moves rows by up to that many steps. 1: rows
    stay in their step and are sorted by cost within it. Default 16: at 1M tokens, 256 rows per step and 64 groups of
    ranks, steps take at most 1.07 times as long as with perfectly balanced ranks, instead of up to 2.5 times."""

    row_order: Annotated[Literal["shuffled", "costliest"], _ROWS_OF_STEPS] = "shuffled"
    """Order of an epoch's rows: `shuffled` with the seed, or `costliest`, which puts the most expensive rows into the
    first step and shuffles the others, as `ray-ulysses check` does. Default `shuffled`."""

    epochs: Annotated[int, by_branch("a change would alter the plan's length")] = Field(default=1, ge=1, le=10_000)
    """Passes over the training documents, each in a different order. Default 1: repeating long documents is rarely
    necessary."""

    eval_fraction: Annotated[float, fixed("a change would alter which documents are held out")] = Field(
        default=0.0, ge=0.0, le=0.5
    )
    """Fraction of the documents that is held out for evaluation, from 0 to 0.5. Held-out documents are selected by a
    seeded hash and never trained on. Default 0: no documents are held out."""

    validation: Annotated[
        tuple[PlacePath, ...],
        by_branch("evaluations are comparable only on the same rows"),
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value, str | tuple[str, ...]),
    ] = Field(default=(), strict=False)
    """Prepared corpus for evaluations, or a list of them, each with a loss of its own. They are never trained on, and
    may be combined with `eval_fraction`. Default `[]`."""

    eval_rows: Annotated[int, by_branch("evaluations are comparable only on the same rows")] = Field(default=8, ge=1)
    """Maximum number of rows per evaluation of held-out documents and of each validation corpus. Default 8: at long
    context, a few rows have many tokens."""

    engine: Annotated[Literal["ray", "local"], free("both yield the same bytes")] = "ray"
    """How rows reach a worker: `ray` streams the tokens from Ray Data tasks, `local` reads them in the worker. Both
    deliver the same bytes. Default `ray`, which does not slow down the workers; `local` needs no additional CPUs (see
    `cluster.data_cpus`)."""

    prefetch_rows: Annotated[int, free()] = Field(default=2, ge=1)
    """Number of rows that each worker reads ahead. Default 2: one in use, one in transit."""


class StageSection(Section):
    """One stage of a run. Omitted settings are taken from the other sections."""

    name: str = Field(pattern=_NAME, max_length=64)
    """Name of the stage in reports, the journal and MLflow."""

    steps: int | None = Field(default=None, ge=1)
    """Length of the stage in optimizer steps. Every stage except the last requires `steps` or `tokens`. Default null:
    the last stage trains on the rest of the planned data."""

    tokens: int | None = Field(default=None, ge=1)
    """Length of the stage in document tokens. The stage ends with the step that reaches this number. Default null."""

    context_tokens: int | None = Field(default=None, ge=2)
    """Maximum length of a row in tokens, at most `data.context_tokens`. Default null: `data.context_tokens`."""

    rows_per_step: int | None = Field(default=None, ge=1, le=65_536)
    """Global batch size in rows per step. Default null: `data.rows_per_step`."""

    sp_size: int | None = Field(default=None, ge=1)
    """Number of ranks that share a row, a divisor of `parallel.sp_size`. Default null: `parallel.sp_size`."""

    path: PlacePath | None = None
    """Corpus of the stage, instead of `data.path` and `data.sources`. Default null: the run's corpora."""

    sources: tuple[SourceSection, ...] | None = Field(default=None, strict=False, min_length=1)
    """Corpora of the stage and their weights, instead of `data.path` and `data.sources`. Default null: the run's
    corpora."""

    rope: RopeSection | Literal["unchanged"] | None = None
    """Rotary position embeddings, see `model.rope`. Default null: `model.rope`."""

    lr: float | None = Field(default=None, gt=0.0)
    """Peak learning rate. Default null: `optimizer.lr`."""

    schedule: ScheduleSection | None = None
    """Learning rate schedule of this stage. Steps are counted from the start of the stage, and the default horizon is
    the end of the stage. Default null: the run's `schedule`, which continues across stages."""

    optimizer: Literal["keep", "reset"] = "keep"
    """Whether to `keep` AdamW's moments from the previous stage or `reset` them to zero. Default `keep`."""
