"""Settings of what is learned: run, model, data, optimizer and schedule."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ray_ulysses.config.reference_to_checkpoint import ReferenceProblem, parse_reference
from ray_ulysses.config.section import Section, refusal

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_MAX_SEED = 2**63 - 1


class RunSection(Section):
    """Which run this is, where it is kept, and how far it goes."""

    name: str = Field(pattern=_NAME, max_length=128)
    """Name of the run: letters, digits, `.`, `_` and `-`. `<storage>/<name>/` is its directory, and the same
    name and storage resume it."""

    storage: str = Field(min_length=1)
    """Directory that holds runs, on a path that every node sees. It has no default, since a cluster's shared
    path can't be guessed."""

    storage_kind: Literal["local", "nfs"] = "local"
    """What kind of path `storage` is. `nfs` stands for any network file system: MLflow then needs a server,
    since SQLite's locks are not safe there. Default `local`, which is right on one machine."""

    seed: int = Field(default=0, ge=0, le=_MAX_SEED)
    """Seed of the weights (with `model.init: random`), of the data plan and of everything else that is drawn.
    Default 0: runs repeat unless asked otherwise."""

    stop_step: int | None = Field(default=None, ge=1)
    """Optimizer step after which this call stops, in steps. It does not bend the learning rate: the horizon
    of the schedule is a setting of its own. Default null: stop where the planned data ends."""

    log_every_steps: int = Field(default=1, ge=1)
    """Steps between two progress lines and tracked points, in steps; the journal has every step anyway.
    Default 1, since a long-context step takes seconds."""

    self_test: bool = True
    """Whether each attempt first holds attention and gradients of its live process groups to one process, in
    about a second, and ends with what differs if they don't. Default true: a broken link or kernel shows at once,
    not after a week."""

    eval_every_steps: int | None = Field(default=None, ge=1)
    """Steps between two evaluations, in steps; needs `data.eval_fraction` above 0. Default null: none."""

    @field_validator("storage")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        if "://" in value:
            raise refusal(
                "object stores and other URIs are not supported in this version",
                "give a directory on a local path or a network file system",
            )
        return value


class ModelSection(Section):
    """Which decoder is trained, where its weights come from, and how its attention is computed."""

    path: str | None = None
    """Local directory in Hugging Face's layout, or the id of a model on the hub. Default null, which is only
    right with `init: random` and an inline `config`."""

    init: Literal["pretrained", "random"] = "pretrained"
    """Where the weights come from: `pretrained` loads them from `path`, `random` draws them from `run.seed`.
    Default `pretrained`, since most long-context runs extend a base model."""

    config: dict[str, Any] | None = None
    """Hugging Face model configuration as a mapping with `model_type`. With `init: random` it is the model;
    with `init: pretrained` it is what `plan` uses without a network, and the loaded model is checked against
    it. Default null: read from `path`."""

    part: Literal["whole", "text"] = "whole"
    """Which part of the model is trained: `text` is the text decoder of a multimodal checkpoint (`docs/multimodal.md`),
    with `path` the directory of the whole, into a copy of which the decoder is exported. Default `whole`: a model of
    text only."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of weights and activations in compute; the optimizer keeps fp32 masters of bf16 weights. Default
    `bf16`, the fast type of every GPU that this is meant for; use `fp32` on CPU."""

    attention: Literal["auto", "flash_attn_3", "flash_attn", "cudnn", "varlen", "sdpa", "math"] = "auto"
    """Attention kernel of a rank's heads; `docs/attention.md` has the table of what each needs and does. Default
    `auto`: the fastest that is there and does exactly what a layer asks for."""

    resume_from: str | None = Field(default=None, min_length=1)
    """Checkpoint of another run that this one starts from, while it has none of its own: `RUN[@STEP]` with a run's
    directory or store, or `mlflow:RUN/STEP` with the id or name of a tracked run; STEP is a number, `latest`
    (default) or `best`. Default null: the weights that `init` names."""

    resume_state: Literal["all", "optimizer", "weights"] = "all"
    """What is taken from `resume_from`: `all` goes on with that run at its step and place in the data, under the same
    settings; `optimizer` takes weights and the optimizer's moments and begins at step 0 with data of its own, and
    `weights` the weights alone, as for the next stage of context extension. Default `all`: recovery."""

    @field_validator("resume_from")
    @classmethod
    def _names_a_checkpoint(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_reference(value)
            except ReferenceProblem as error:
                raise refusal(error.rule, error.hint, error.shown) from error
        return value

    @field_validator("config")
    @classmethod
    def _names_its_type(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and not isinstance(value.get("model_type"), str):
            raise refusal(
                "an inline model configuration must have a model_type",
                "add the model_type of its config.json, such as llama, qwen3 or mistral",
            )
        return value


class SourceSection(Section):
    """One corpus of several."""

    path: str = Field(min_length=1)
    """Directory of a prepared corpus, on a path that every node sees."""

    weight: float | None = Field(default=None, ge=0.0, allow_inf_nan=False, le=1e9)
    """Its share of an epoch's tokens, relative to the other sources. Default null: all of it."""


class DataSection(Section):
    """Which corpora are read, and how they become rows and steps."""

    path: str | None = Field(default=None, min_length=1)
    """Directory of a prepared corpus, as `ray-ulysses prepare` writes it, on a path that every node sees. Default
    null, which is only right with `sources`."""

    sources: tuple[SourceSection, ...] | None = Field(default=None, strict=False, min_length=1)
    """Several corpora in place of `path`, each with its `path` and, all or none, a `weight`. Without weights an epoch
    takes every document of each; with weights it takes the one that is scarcest for its weight whole, and of the
    others as many tokens as their weight asks for. Default null."""

    context_tokens: int = Field(ge=2)
    """Longest row, in tokens. Rows are packed up to it, rounded down to the row padding that
    `parallel.allowed_sp` asks for; longer documents are split without losing a target."""

    rows_per_step: int = Field(ge=1, le=65_536)
    """Global batch of one optimizer step, in rows. It is a number of the run, not of the cluster: the rows of
    a step are the same on any number of workers."""

    packing: Literal["best_fit", "concat", "none"] = "best_fit"
    """How rows are filled: `best_fit` puts each document where it leaves the least room and cuts none that fits a
    row, `concat` cuts the stream of documents wherever a row is full, `none` gives each document its own row. Default
    `best_fit`, which fills nearly as well as `concat` and keeps documents whole."""

    overlong: Literal["split", "truncate", "drop", "error"] = "split"
    """What becomes of a document longer than a row: `split` trains all of it in pieces that lose no target,
    `truncate` trains its beginning, `drop` leaves it out, `error` refuses the corpus. Default `split`, which loses
    nothing; what the others lose is counted and printed."""

    balance_steps: int = Field(default=1, ge=1, le=1024)
    """Steps among which rows are exchanged so that rows of like cost meet in a micro-batch. More levels data-parallel
    groups at very long context, and lets rows move within so many steps. Default 1: a step's rows stay as shuffled,
    and are sorted by cost within the step."""

    epochs: int = Field(default=1, ge=1, le=10_000)
    """Passes over the training documents, each in an order of its own. Default 1: long documents are rarely
    so scarce that repeating them is the first choice."""

    eval_fraction: float = Field(default=0.0, ge=0.0, le=0.5)
    """Share of the documents that is held out for evaluation, from 0 to 0.5, chosen by a seeded hash of the
    document and never trained on. Default 0: nothing is held out unasked."""

    eval_rows: int = Field(default=8, ge=1)
    """Most rows that one evaluation reads. Default 8: at long context a few rows are many tokens."""

    engine: Literal["ray", "local"] = "ray"
    """How rows reach a worker: `ray` streams them through Ray Data, `local` reads them in the worker. Both
    give the same bytes. Default `ray`, which keeps reading off the training workers."""

    prefetch_rows: int = Field(default=2, ge=1)
    """Rows that are kept ready on each worker. Default 2: one in use, one on its way."""


class OptimizerSection(Section):
    """AdamW, with decoupled weight decay and clipping by the global norm."""

    lr: float = Field(default=3e-4, gt=0.0)
    """Peak learning rate. Default 3e-4, usual for models below 10B; continued training often takes 1e-5 to
    1e-4."""

    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default=(0.9, 0.95), strict=False
    )
    """Decay rates of the two moments. Default 0.9 and 0.95, as large language models are usually trained."""

    eps: float = Field(default=1e-8, gt=0.0)
    """Term that keeps the update finite. Default 1e-8, AdamW's own."""

    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled weight decay; vectors such as norms and biases are exempt. Default 0.1, the usual value for
    decoders."""

    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Largest norm of the whole gradient, over all ranks; null switches clipping off. Default 1.0."""


class ScheduleSection(Section):
    """Learning rate over steps: a linear warm-up, then a cosine down to a floor."""

    warmup_steps: int = Field(default=100, ge=0)
    """Steps from 0 up to the peak learning rate, in steps. Default 100."""

    horizon_steps: int | None = Field(default=None, ge=1)
    """Step at which the cosine reaches its floor, in steps; the rate stays there afterwards. It is apart from
    `run.stop_step`, so that stopping and going on does not bend the curve. Default null: all steps of the
    data plan."""

    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Floor of the learning rate, as a share of the peak. Default 0.1."""
