"""Settings that affect what the model learns: run, model, data, optimizer and schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ray_ulysses.config.raw_data import PrepareSection
from ray_ulysses.config.reference_to_checkpoint import ReferenceProblem, RunReference, parse_reference
from ray_ulysses.config.section import (
    NamedPlace,
    OnResume,
    PlacePath,
    Section,
    StoragePlace,
    base_of,
    by_branch,
    fixed,
    free,
    refusal,
)
from ray_ulysses.storage.location import absolute_location, parse_location

ALL_LINEAR: Literal["all-linear"] = "all-linear"


class AdapterSection(Section):
    """Low-rank adapters (LoRA), added by PEFT. All other weights are frozen, except those selected in this section.

    Dropout is not supported: its masks depend on the layout, so the result would depend on the world size.
    """

    kind: Literal["lora"] = "lora"
    """Type of adapter. Default `lora` (https://arxiv.org/abs/2106.09685)."""

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rank of the two matrices added to each target. Default 16."""

    alpha: int = Field(default=32, ge=1)
    """Scale of the adapters: the product of the two matrices is multiplied by `alpha / rank`. Default 32, which gives a
    factor of 2 at the default rank."""

    rslora: bool = False
    """Whether to scale by `alpha / sqrt(rank)` instead of `alpha / rank`, which stabilizes training at high ranks
    (https://arxiv.org/abs/2312.03732). Default false."""

    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False)] = ALL_LINEAR
    """Linear layers that get an adapter: full module names or their last parts, such as `[q_proj, v_proj]`. Default
    `all-linear`: every linear layer except the output head, and except `x_proj` and `dt_proj` of Mamba 1, whose weights
    are used without calling the layer."""

    modules_to_save: tuple[str, ...] = Field(default=(), strict=False)
    """Names of other modules that are fully trained and saved with the adapter. Default: none."""

    train_embeddings: bool = False
    """Whether to train the token embedding in full. Together with `train_norms`, this closes most of the gap between
    LoRA and full training when the context is extended (https://arxiv.org/abs/2309.12307). Default false, which suits
    fine-tuning without a longer context."""

    train_norms: bool = False
    """Whether to train all norms in full. Default false."""

    @field_validator("targets", mode="before")
    @classmethod
    def _is_no_pattern(cls, value: object) -> object:
        if isinstance(value, str) and value != ALL_LINEAR:
            raise refusal("must be all-linear or a list of names", f"write [{value}]")
        return value

    @field_validator("targets", "modules_to_save")
    @classmethod
    def _names_modules(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(value, tuple) and (not all(value) or len(set(value)) < len(value)):
            raise refusal("contains an empty or duplicate name", "list each module once")
        return value

    @field_validator("targets")
    @classmethod
    def _has_targets(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise refusal("is empty, so no layer would be adapted", "use all-linear, or omit model.adapter")
        return value


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


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_OBJECT = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
_MAX_SEED = 2**63 - 1
_WARMUP_STEPS = 100
_OF_A_NEW_RUN = free("read only while the run has no checkpoint of its own")
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


class RopeSection(Section):
    """Rotary position embeddings that replace the model's own. Names follow `rope_parameters` in Transformers.

    If `rope_type` stays the same, omitted values are taken from the model; otherwise, from Transformers' defaults.
    """

    rope_type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] | None = None
    """Method that scales the frequencies; `default` does not scale them. Default null: the model's method."""

    rope_theta: float | None = Field(default=None, gt=1.0)
    """Base of the frequencies; a longer context needs a larger base. Default null: the model's base."""

    factor: float | None = Field(default=None, ge=1.0)
    """Factor by which the trained positions are extended, such as 8 to extend 4,096 to 32,768. Required by every
    scaling method. Default null: the model's factor."""

    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """Number of positions that the model was trained on, for `yarn`, `longrope` and `llama3`. Default null: the model's
    value."""

    attention_factor: float | None = Field(default=None, gt=0.0)
    """Factor applied to the rotated queries and keys, for `yarn` and `longrope`. Default null: computed by the
    method."""

    beta_fast: float | None = Field(default=None, gt=0.0)
    """Number of rotations above which `yarn` does not change a frequency. Default null: 32."""

    beta_slow: float | None = Field(default=None, gt=0.0)
    """Number of rotations below which `yarn` divides a frequency by `factor`. Default null: 1."""

    low_freq_factor: float | None = Field(default=None, gt=0.0)
    """`llama3` divides frequencies by `factor` if their wavelength is above `original_max_position_embeddings /
    low_freq_factor`. Required by `llama3`. Default null: the model's value."""

    high_freq_factor: float | None = Field(default=None, gt=0.0)
    """`llama3` does not change frequencies whose wavelength is below `original_max_position_embeddings /
    high_freq_factor`. Required by `llama3`. Default null: the model's value."""

    short_factor: tuple[float, ...] | None = Field(default=None, strict=False)
    """Divisor of each frequency in short documents; required by `longrope`. Default null: the model's values."""

    long_factor: tuple[float, ...] | None = Field(default=None, strict=False)
    """Divisor of each frequency in documents longer than `original_max_position_embeddings`; required by `longrope`.
    Default null: the model's values."""


class ModelSection(Section):
    """The decoder to train, its initial weights, and its attention kernel."""

    on_resume: ClassVar[OnResume] = fixed("a change would make it a different model")

    path: NamedPlace | None = None
    """Local directory in Hugging Face layout, or a model id on the hub. Default null, which is valid only with
    `init: random` and an inline `config`."""

    init: Literal["pretrained", "random"] = "pretrained"
    """Initial weights: `pretrained` loads them from `path`, `random` draws them with `run.seed`. Default `pretrained`,
    since most long-context runs extend a base model."""

    config: dict[str, Any] | None = None
    """Hugging Face model configuration: a mapping with a `model_type`. With `init: random`, it defines the model. With
    `init: pretrained`, `plan` uses it when there is no network, and the loaded model must match it. Default null: read
    from `path`."""

    part: Literal["whole", "text"] = "whole"
    """Part of the model to train. `text` is the text decoder of a multimodal checkpoint (`docs/fine-tune.md`): `path`
    is then the directory of the complete checkpoint, and `export` writes the decoder into a copy of it. Default
    `whole`, for text-only models."""

    rope: Annotated[RopeSection | Literal["unchanged"] | None, fixed("a change would alter the positions")] = None
    """Rotary position embeddings of the trained and exported model. If layers differ, the setting applies to layers
    with full attention. A new run with documents longer than a pretrained model supports must set it, even if only to
    `unchanged`. Default null: as in the model's configuration."""

    adapter: Annotated[AdapterSection | None, fixed("a change would alter which weights are trained")] = None
    """Low-rank adapters to train instead of all weights (`docs/fine-tune.md`): `rank`, `alpha`, `rslora`, `targets`,
    `modules_to_save`, `train_embeddings`, `train_norms`. Default null: all weights are trained."""

    dtype: Annotated[Literal["bf16", "fp32"], fixed("a change would alter the loss curve")] = "bf16"
    """Data type of the computation. With bf16, the optimizer keeps fp32 master weights. Default `bf16`, which is fast
    on all supported GPUs; use `fp32` on CPU."""

    attention: Annotated[
        Literal["auto", "flash_attn_3", "flash_attn", "cudnn", "varlen", "sdpa", "math"],
        free("kernels agree within their tolerance"),
    ] = "auto"
    """Attention kernel. The table in `docs/how-it-works.md` lists each kernel's requirements and limits. Default
    `auto`: for each layer, the fastest available kernel that computes it exactly."""

    compile: Annotated[bool, free("compiled layers sum in a different order")] = False
    """Whether to compile each decoder layer with `torch.compile`, which helps with short rows and large layers. Measure
    the gain: a small model on a CPU gains almost nothing, and the gain on GPUs has not been measured. Requires
    `memory.gradient_checkpointing: false`, `memory.zero_stage` 1 or 2, and a compiler on each node. The first step of
    each attempt includes the compilation. Default false."""

    resume_from: Annotated[NamedPlace | None, _OF_A_NEW_RUN] = None
    """Checkpoint of another run to start from while this run has no checkpoint: `RUN[@STEP]`, where RUN is a run's
    directory or checkpoint store, or `mlflow:RUN/STEP`, where RUN is the id or name of a tracked run. STEP is a number,
    `latest` (default) or `best`. Default null: start from the weights selected by `init`."""

    resume_state: Annotated[Literal["all", "optimizer", "weights"], _OF_A_NEW_RUN] = "all"
    """State to load from `resume_from`. `all` continues the other run at its step and data position, with the same
    settings. `optimizer` loads weights and optimizer moments, and starts at step 0 with this run's data. `weights`
    loads only the weights, as for the next stage of a context extension. Default `all`, for recovery."""

    @field_validator("path")
    @classmethod
    def _is_absolute_if_a_directory(cls, value: str | None, info: ValidationInfo) -> str | None:
        base = base_of(info)
        if base is None or value is None or not (base / Path(value).expanduser()).is_dir():
            # A hub id is not a path.
            return value
        return absolute_location(value, base)

    @field_validator("rope")
    @classmethod
    def _is_exported(cls, value: RopeSection | str | None, info: ValidationInfo) -> RopeSection | str | None:
        if isinstance(value, RopeSection) and info.data.get("part") == "text":
            raise refusal(
                "changes the text decoder's positions, but model.part=text exports into a copy of the complete "
                "checkpoint, whose config.json is not changed",
                "edit the config.json in model.path instead, and set model.rope: unchanged",
            )
        return value

    @field_validator("adapter")
    @classmethod
    def _is_of_a_whole_model(cls, value: AdapterSection | None, info: ValidationInfo) -> AdapterSection | None:
        if value is not None and info.data.get("part") == "text":
            raise refusal(
                "adapts a complete model, but model.part=text exports into a copy of a multimodal checkpoint",
                "remove model.adapter to train the text decoder",
                value.kind,
            )
        return value

    @field_validator("resume_from")
    @classmethod
    def _names_a_checkpoint(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        try:
            reference = parse_reference(value)
        except ReferenceProblem as error:
            raise refusal(error.rule, error.hint, error.shown) from error
        base = base_of(info)
        if base is None or not isinstance(reference, RunReference):
            return value
        moved = replace(reference, location=absolute_location(reference.location, base))
        return value if moved == reference else str(moved)

    @field_validator("config")
    @classmethod
    def _names_its_type(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and not isinstance(value.get("model_type"), str):
            raise refusal(
                "an inline model configuration must have a model_type",
                "add the model_type from the model's config.json, such as llama, qwen3 or mistral",
            )
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

    balance_steps: Annotated[int, _ROWS_OF_STEPS] = Field(default=1, ge=1, le=1024)
    """Number of consecutive steps that may exchange rows, so that rows of similar cost share a micro-batch. A larger
    value balances data-parallel ranks better at very long context, but moves rows by up to that many steps. Default 1:
    rows stay in their step and are sorted by cost within it."""

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


class OptimizerSection(Section):
    """AdamW, with decoupled weight decay and gradient clipping by the global norm."""

    on_resume: ClassVar[OnResume] = fixed("a change would alter the loss curve")

    lr: Annotated[float, by_branch("a change would alter the loss curve")] = Field(default=3e-4, gt=0.0)
    """Peak learning rate. Required with `model.init: pretrained`, since a high rate destroys what the model has
    learned: 1e-5 to 3e-5 is usual for all weights, 1e-4 to 2e-4 for an adapter. Default 3e-4 with `model.init: random`,
    a usual value for models below 10B parameters."""

    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default=(0.9, 0.95), strict=False
    )
    """Decay rates of the two moment estimates. Default 0.9 and 0.95, the usual values for large language models."""

    eps: float = Field(default=1e-8, gt=0.0)
    """Term added to the denominator of the update, which keeps it finite. Default 1e-8, as in AdamW."""

    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled weight decay of projections and embeddings. Norms, biases and other vectors are exempt. Default 0.1,
    the usual value for decoders."""

    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Maximum norm of the complete gradient, over all ranks; null disables clipping. Default 1.0."""

    z_loss: float = Field(default=0.0, ge=0.0)
    """Coefficient of the z-loss, `z_loss * log(Z)**2` per supervised token, where `Z` is the denominator of the
    softmax. The z-loss prevents logits from drifting (https://arxiv.org/abs/2204.02311 uses 1e-4). It contributes to
    the gradient, but is reported separately from the loss. Default 0.0: no z-loss."""

    router_loss: float | None = Field(default=None, ge=0.0)
    """Coefficient of the load-balancing loss of a mixture of experts, which contributes to the gradient but is reported
    separately from the loss; 0.0 disables it. Default null: `output_router_logits` and `router_aux_loss_coef` in the
    model's configuration decide."""


class ScheduleSection(Section):
    """Learning rate schedule: a linear warm-up, followed by a decay to a floor."""

    on_resume: ClassVar[OnResume] = by_branch("a change would alter the loss curve")

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Curve after the warm-up: a half `cosine` or a `linear` decay from the peak to the floor, `constant` at the peak,
    or `wsd` (warm-up, stable, decay), which is constant until a linear decay to the floor over the last `decay_steps`.
    Default `cosine`."""

    warmup_steps: int = Field(default=_WARMUP_STEPS, ge=0)
    """Number of steps in which the learning rate rises from 0 to its peak. Default 100."""

    warmup_ratio: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Length of the warm-up as a fraction of the schedule's steps, rounded up, instead of `warmup_steps`. Default null:
    `warmup_steps`."""

    horizon_steps: int | None = Field(default=None, ge=1)
    """Step at which the learning rate reaches the floor, where it stays. The horizon is independent of `run.stop_step`,
    so stopping and resuming does not change the curve. Default null: the last step of the data plan."""

    decay_steps: int | None = Field(default=None, ge=1)
    """Number of decay steps with `kind: wsd`; the decay ends at `horizon_steps`. Default null: a tenth of the
    horizon."""

    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Floor of the learning rate, as a fraction of the peak. Default 0.1."""

    def warmup(self, horizon: int) -> int:
        """Return the number of warm-up steps of a schedule that ends at step `horizon`."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * horizon)

    @field_validator("warmup_ratio")
    @classmethod
    def _is_the_only_length(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("warmup_steps", _WARMUP_STEPS) != _WARMUP_STEPS:
            raise refusal("schedule.warmup_steps is set as well", "remove one of the two")
        return value

    @field_validator("decay_steps")
    @classmethod
    def _is_of_wsd(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("kind", "wsd") != "wsd":
            raise refusal("requires schedule.kind=wsd", "set schedule.kind: wsd, or remove it")
        return value


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
