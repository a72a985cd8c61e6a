"""Settings of the training itself: run, model, data, optimizer and schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

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
    """Low-rank adapters (LoRA), which PEFT adds; all other weights are frozen, except those that are named here.

    There is no dropout: its masks would depend on the layout, and so the run on its world size.
    """

    kind: Literal["lora"] = "lora"
    """Kind of adapter. Default `lora`, https://arxiv.org/abs/2106.09685."""

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rank of the two matrices beside each target. Default 16."""

    alpha: int = Field(default=32, ge=1)
    """Their product is multiplied by `alpha / rank`. Default 32: by 2 at the default rank."""

    rslora: bool = False
    """Whether it is multiplied by `alpha / sqrt(rank)` instead (https://arxiv.org/abs/2312.03732), which keeps high
    ranks learning. Default false."""

    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False)] = ALL_LINEAR
    """Linear layers that get an adapter: their names, whole or the end after a dot, such as `[q_proj, v_proj]`.
    Default `all-linear`: every one but the output head, and the two of Mamba 1 layers whose weights are not called
    (`x_proj`, `dt_proj`)."""

    modules_to_save: tuple[str, ...] = Field(default=(), strict=False)
    """Names of further modules that are trained whole, and saved with the adapter. Default: none."""

    train_embeddings: bool = False
    """Whether the token embedding is trained whole. With `train_norms` it closes most of LoRA's gap to full training
    when a context is extended (https://arxiv.org/abs/2309.12307). Default false, for fine-tuning at a trained
    context."""

    train_norms: bool = False
    """Whether all norms are trained whole. Default false."""

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
            raise refusal("has an empty name, or one twice", "name each module once")
        return value

    @field_validator("targets")
    @classmethod
    def _has_targets(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise refusal("names no layer, so nothing would be adapted", "use all-linear, or leave model.adapter out")
        return value


class ProfileSection(Section):
    """Steps that PyTorch's profiler traces. It makes them slower, and a trace takes tens of MB."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, strict=False)
    """Steps of the run, each of which gives a trace: not the first one of an attempt, which is slower than the rest."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1, strict=False)
    """Ranks that are traced. Default `[0]`."""

    @field_validator("steps", "ranks")
    @classmethod
    def _is_ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise refusal("must be different numbers in ascending order", "write it as [10, 11]")
        return value


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_MAX_SEED = 2**63 - 1
_OF_A_NEW_RUN = free("read only while the run has no checkpoint of its own")
_ROWS_OF_STEPS = by_branch("it determines the rows of every step")
_KERNEL_FILES = (Path("/proc"), Path("/sys"))


class RunSection(Section):
    """The run's name, where it is stored, and how far it trains."""

    on_resume: ClassVar[OnResume] = free()

    name: Annotated[str, fixed("it names the run")] = Field(pattern=_NAME, max_length=128)
    """Name of the run: letters, digits, `.`, `_` and `-`. Its directory is `<storage>/<name>/`; training again with the
    same name and storage resumes it."""

    storage: Annotated[StoragePlace, free("if the directory was moved or is mounted elsewhere")]
    """Directory that holds runs: a path that every node can access, or the URI of a folder of an object store, such as
    `s3://bucket/runs`, where everything of a run is stored but what only one node needs. Credentials come from the
    environment of every node, or from `cluster.secrets_file`. There is no default, since a cluster's shared path can't
    be guessed."""

    storage_kind: Literal["local", "nfs"] = "local"
    """Kind of file system of `storage`. `nfs` stands for any network file system: MLflow then needs a server, since
    SQLite's locks are not safe there. Default `local`, which is right on one machine."""

    seed: Annotated[int, fixed("it determines the weights and the order of the data")] = Field(
        default=0, ge=0, le=_MAX_SEED
    )
    """Seed of the weights (with `model.init: random`), of the data plan and of every other random choice. Default 0:
    runs are reproducible unless you change it."""

    stop_step: Annotated[int | None, free("a later step continues the run; the learning rate is not affected")] = Field(
        default=None, ge=1
    )
    """Optimizer step at which this command stops. It does not change the learning rate: the horizon of the schedule is
    a separate setting. Default null: stop at the end of the planned data."""

    log_every_steps: int = Field(default=1, ge=1)
    """Steps between two progress lines and tracked points; the journal records every step in any case. Default 1, since
    a long-context step takes seconds."""

    self_test: bool = True
    """Whether workers first compare attention and gradients on their live process groups with a single process, which
    takes about a second, and stop with the differences if there are any: when they start, when a stage begins, and when
    a worker has joined them. Default true: a broken link or kernel shows at once instead of after a week."""

    eval_every_steps: int | None = Field(default=None, ge=1)
    """Steps between two evaluations; needs `data.eval_fraction` above 0. Default null: no evaluations."""

    profile: ProfileSection | None = None
    """Steps that PyTorch's profiler traces, as files for Perfetto in the run's directory (`diagnostics/`), such as
    `{steps: [10, 11], ranks: [0, 8]}`. Default null: none."""

    @field_validator("storage")
    @classmethod
    def _is_a_directory(cls, value: str) -> str:
        where = parse_location(value)
        if isinstance(where, Path) and any(where.is_relative_to(root) for root in _KERNEL_FILES):
            raise refusal("is part of the kernel's own file system, which stores nothing", "give a directory on a disk")
        return value


class RopeSection(Section):
    """Rotary positions in place of those in the model's own configuration, by Transformers' names of `rope_parameters`.

    A value that is not given is the model's own where `rope_type` does not change, else Transformers' default.
    """

    rope_type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] | None = None
    """How frequencies are scaled: not at all (`default`), or as in the method of that name. Default null: as the model
    has it."""

    rope_theta: float | None = Field(default=None, gt=1.0)
    """Base of the frequencies; a longer context wants a larger one. Default null: the model's own."""

    factor: float | None = Field(default=None, ge=1.0)
    """By how much the trained positions are extended, such as 8 from 4,096 to 32,768; every scaling needs it. Default
    null: the model's own."""

    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """Positions that the model was trained on, for `yarn`, `longrope` and `llama3`. Default null: the model's own."""

    attention_factor: float | None = Field(default=None, gt=0.0)
    """Factor on the rotated queries and keys, for `yarn` and `longrope`. Default null: by the method's rule."""

    beta_fast: float | None = Field(default=None, gt=0.0)
    """Rotations above which `yarn` leaves a frequency as it is. Default null: 32."""

    beta_slow: float | None = Field(default=None, gt=0.0)
    """Rotations below which `yarn` divides a frequency by `factor`. Default null: 1."""

    low_freq_factor: float | None = Field(default=None, gt=0.0)
    """Of `llama3`, which needs it. Default null: the model's own."""

    high_freq_factor: float | None = Field(default=None, gt=0.0)
    """Of `llama3`, which needs it. Default null: the model's own."""

    short_factor: tuple[float, ...] | None = Field(default=None, strict=False)
    """Of `longrope`, which needs it: a divisor for each frequency in short documents. Default null: the model's own."""

    long_factor: tuple[float, ...] | None = Field(default=None, strict=False)
    """The same in documents longer than `original_max_position_embeddings`. Default null: the model's own."""


class ModelSection(Section):
    """The decoder to train, its initial weights, and how its attention is computed."""

    on_resume: ClassVar[OnResume] = fixed("another model is another run")

    path: NamedPlace | None = None
    """Local directory in Hugging Face's layout, or the id of a model on the hub. Default null, which is valid only with
    `init: random` and an inline `config`."""

    init: Literal["pretrained", "random"] = "pretrained"
    """Initial weights: `pretrained` loads them from `path`, `random` draws them from `run.seed`. Default `pretrained`,
    since most long-context runs extend a base model."""

    config: dict[str, Any] | None = None
    """Hugging Face model configuration as a mapping with `model_type`. With `init: random` it defines the model; with
    `init: pretrained`, `plan` uses it when there is no network, and the loaded model is checked against it. Default
    null: read from `path`."""

    part: Literal["whole", "text"] = "whole"
    """Part of the model that is trained: `text` is the text decoder of a multimodal checkpoint (`docs/fine-tune.md`).
    `path` is then the directory of the whole checkpoint, and `export` writes the decoder into a copy of it. Default
    `whole`, for text-only models."""

    rope: Annotated[RopeSection | Literal["unchanged"] | None, fixed("other positions make another model")] = None
    """Rotary positions of the model that is trained and exported; of a model whose layers have several kinds, those of
    full attention. A new run whose documents are longer than a pretrained model's positions needs it, if only as
    `unchanged`. Default null: as in the model's configuration."""

    adapter: Annotated[AdapterSection | None, fixed("it determines which weights are trained")] = None
    """Trains low-rank adapters beside frozen weights instead of all weights (`docs/fine-tune.md`): `rank`, `alpha`,
    `rslora`, `targets`, `modules_to_save`, `train_embeddings`, `train_norms`. Default null: all weights are trained."""

    dtype: Annotated[Literal["bf16", "fp32"], fixed("the precision of the weights shapes the loss curve")] = "bf16"
    """Data type of weights and activations in compute; the optimizer keeps fp32 master weights for bf16. Default
    `bf16`, the fast type on all supported GPUs; use `fp32` on CPU."""

    attention: Annotated[
        Literal["auto", "flash_attn_3", "flash_attn", "cudnn", "varlen", "sdpa", "math"],
        free("kernels agree within their tolerance"),
    ] = "auto"
    """Attention kernel; the table in `docs/how-it-works.md` lists the requirements and limits of each. Default `auto`:
    the fastest available kernel that computes a layer exactly."""

    compile: Annotated[bool, free("compiled layers add in another order")] = False
    """Whether `torch.compile` compiles each decoder layer, for short rows of large layers: measure it
    (a small model gains next to nothing on a CPU, GPUs were not measured). Needs
    `memory.gradient_checkpointing: false` and `memory.zero_stage` 1 or 2, and a compiler on each node; the first step
    of each attempt waits for it. Default false."""

    resume_from: Annotated[NamedPlace | None, _OF_A_NEW_RUN] = None
    """Checkpoint of another run to start from while this run has none of its own: `RUN[@STEP]` with a run's directory
    or checkpoint store, or `mlflow:RUN/STEP` with the id or name of a tracked run; STEP is a number, `latest` (default)
    or `best`. Default null: start from the weights that `init` selects."""

    resume_state: Annotated[Literal["all", "optimizer", "weights"], _OF_A_NEW_RUN] = "all"
    """State to take from `resume_from`: `all` continues that run at its step and position in the data, under the same
    settings; `optimizer` takes weights and optimizer moments and starts at step 0 with its own data; `weights` takes
    the weights alone, as for the next stage of context extension. Default `all`: recovery."""

    @field_validator("path")
    @classmethod
    def _is_absolute_if_a_directory(cls, value: str | None, info: ValidationInfo) -> str | None:
        base = base_of(info)
        if base is None or value is None or not (base / Path(value).expanduser()).is_dir():
            # An id on the hub is not a path.
            return value
        return absolute_location(value, base)

    @field_validator("rope")
    @classmethod
    def _is_exported(cls, value: RopeSection | str | None, info: ValidationInfo) -> RopeSection | str | None:
        if isinstance(value, RopeSection) and info.data.get("part") == "text":
            raise refusal(
                "changes positions of the text decoder, and model.part=text exports into a copy of the whole "
                "checkpoint, whose config.json stays as it is",
                "change config.json of model.path instead, and set model.rope: unchanged",
            )
        return value

    @field_validator("adapter")
    @classmethod
    def _is_of_a_whole_model(cls, value: AdapterSection | None, info: ValidationInfo) -> AdapterSection | None:
        if value is not None and info.data.get("part") == "text":
            raise refusal(
                "adapts a whole model, and model.part=text exports into a copy of a multimodal checkpoint",
                "leave model.adapter out to train the text decoder",
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
                "add the model_type of its config.json, such as llama, qwen3 or mistral",
            )
        return value


class SourceSection(Section):
    """One of several corpora."""

    path: PlacePath
    """Directory of a prepared corpus, on a path that every node can access, or its URI on an object store, such as
    `s3://bucket/corpus`."""

    weight: float | None = Field(default=None, ge=0.0, allow_inf_nan=False, le=1e9)
    """Share of an epoch's tokens, relative to the other sources. Default null: take all of it."""


class DataSection(Section):
    """The corpora, and how they become rows and steps."""

    on_resume: ClassVar[OnResume] = by_branch("it determines what is trained on")

    path: PlacePath | None = None
    """Directory of a prepared corpus, as `ray-ulysses prepare` writes it, on a path that every node can access, or its
    URI on an object store, such as `s3://bucket/corpus`, with credentials as for `checkpoint.storage`. Default null,
    which is valid only with `sources`, or where every one of the `stages` has corpora of its own."""

    sources: Annotated[tuple[SourceSection, ...] | None, by_branch("they determine what is trained on")] = Field(
        default=None, strict=False, min_length=1
    )
    """Several corpora in place of `path`, each with a `path` and, for all or none of them, a `weight`. Without weights
    an epoch takes every document of each. With weights it takes all of the source that is scarcest for its weight, and
    from the others as many tokens as their weights call for. Default null."""

    allow_other_tokenizer: Annotated[bool, free("it changes no row")] = False
    """Whether pretrained weights may be trained on a corpus prepared with a tokenizer other than the one in
    `model.path`. Default false: such a corpus is refused, since its ids mean other text to the weights. With
    `model.init: random` it is allowed, and `plan` notes it."""

    context_tokens: Annotated[int, by_branch("it determines how documents are packed into rows")] = Field(ge=2)
    """Maximum length of a row, in tokens, rounded down to the padding that `parallel.allowed_sp` requires. Longer
    documents are split without losing a target."""

    rows_per_step: Annotated[int, _ROWS_OF_STEPS] = Field(ge=1, le=65_536)
    """Global batch of one optimizer step, in rows. It belongs to the run and not to the cluster: the rows of a step are
    the same on any number of workers."""

    packing: Annotated[
        Literal["best_fit", "wide_fit", "concat", "none"], by_branch("it determines how rows are filled")
    ] = "best_fit"
    """How rows are filled: `best_fit` puts each document where it leaves the least room among 64 open rows and never
    splits one that fits in a row; `wide_fit` does so among 1,024, for documents of a third to two thirds of a row;
    `concat` splits the stream of documents wherever a row is full; `none` gives each document its own row. Default
    `best_fit`, which fills rows nearly as well as `concat` and keeps documents whole; `plan` says where `wide_fit`
    would fill them better."""

    overlong: Annotated[
        Literal["split", "truncate", "drop", "error"], by_branch("it determines which tokens are trained on")
    ] = "split"
    """Treatment of a document longer than a row: `split` trains all of it, in pieces that lose no target; `truncate`
    trains only its beginning; `drop` leaves it out; `error` refuses the corpus. Default `split`, which loses nothing;
    `plan` prints how many tokens the others lose."""

    balance_steps: Annotated[int, _ROWS_OF_STEPS] = Field(default=1, ge=1, le=1024)
    """Number of consecutive steps among which rows may be exchanged, so that rows of similar cost share a micro-batch.
    A higher value balances data-parallel groups better at very long context, but moves rows by up to that many steps.
    Default 1: rows stay in their step and are sorted by cost within it."""

    row_order: Annotated[Literal["shuffled", "costliest"], _ROWS_OF_STEPS] = "shuffled"
    """Order of an epoch's rows: `shuffled` by the seed; or with the `costliest` in its first step and the others
    shuffled, as `ray-ulysses check` trains them. Default `shuffled`."""

    epochs: Annotated[int, by_branch("it determines the plan and its length")] = Field(default=1, ge=1, le=10_000)
    """Passes over the training documents, each in a different order. Default 1: long documents are rarely so scarce
    that repeating them is the first choice."""

    eval_fraction: Annotated[float, fixed("it determines which documents are trained on")] = Field(
        default=0.0, ge=0.0, le=0.5
    )
    """Fraction of the documents held out for evaluation, from 0 to 0.5, chosen by a seeded hash of the document and
    never trained on. Default 0: no documents are held out."""

    eval_rows: Annotated[int, by_branch("evaluations must compare the same rows")] = Field(default=8, ge=1)
    """Maximum number of rows per evaluation. Default 8: at long context a few rows are many tokens."""

    engine: Annotated[Literal["ray", "local"], free("both yield the same bytes")] = "ray"
    """How rows reach a worker: in tasks of Ray Data, which stream their tokens (`ray`), or read in the worker itself
    (`local`). Both yield the same bytes. Default `ray`: reading takes no time of the workers; `local` needs no
    CPUs (`cluster.data_cpus`) besides the workers'."""

    prefetch_rows: Annotated[int, free()] = Field(default=2, ge=1)
    """Rows that are kept ready on each worker. Default 2: one in use, one on its way."""


class OptimizerSection(Section):
    """AdamW, with decoupled weight decay and clipping by the global norm."""

    on_resume: ClassVar[OnResume] = fixed("it shapes the loss curve")

    lr: float = Field(default=3e-4, gt=0.0)
    """Peak learning rate. Default 3e-4, usual for models below 10B parameters; continued training often uses 1e-5 to
    1e-4."""

    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default=(0.9, 0.95), strict=False
    )
    """Decay rates of the two moments. Default 0.9 and 0.95, the usual values for large language models."""

    eps: float = Field(default=1e-8, gt=0.0)
    """Term in the denominator that keeps the update finite. Default 1e-8, as in AdamW."""

    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled weight decay of projections and embeddings; norms, biases and other vectors are exempt. Default 0.1,
    the usual value for decoders."""

    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Maximum norm of the whole gradient, over all ranks; null turns clipping off. Default 1.0."""

    z_loss: float = Field(default=0.0, ge=0.0)
    """Coefficient of the z-loss, `z_loss * log(Z)**2` per supervised token with `Z` the softmax's denominator, which
    keeps logits from drifting (https://arxiv.org/abs/2204.02311 uses 1e-4). It is trained on, and reported beside the
    loss and not in it. Default 0.0: none."""

    router_loss: float | None = Field(default=None, ge=0.0)
    """Coefficient of the load-balancing loss of a mixture's routers, trained on and reported beside the
    loss; 0.0 for none. Default null: as the model's configuration says, by `output_router_logits` and
    `router_aux_loss_coef`."""


class ScheduleSection(Section):
    """Learning rate over steps: a linear warm-up, then a decay to a floor."""

    on_resume: ClassVar[OnResume] = fixed("it shapes the loss curve")

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Curve after the warm-up: half a `cosine` or a `linear` decay from the peak to the floor, `constant` at the peak,
    or `wsd` (warm-up, stable, decay): constant, then linear to the floor in the last `decay_steps`. Default
    `cosine`."""

    warmup_steps: int = Field(default=100, ge=0)
    """Steps in which the learning rate rises from 0 to its peak. Default 100."""

    horizon_steps: int | None = Field(default=None, ge=1)
    """Step at which the decay reaches its floor, where the rate then stays. It is independent of `run.stop_step`, so
    that stopping and resuming does not change the curve. Default null: all steps of the data plan."""

    decay_steps: int | None = Field(default=None, ge=1)
    """Steps of the decay of `kind: wsd`, which ends at `horizon_steps`. Default null: a tenth of the horizon."""

    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Floor of the learning rate, as a fraction of the peak. Default 0.1."""

    @field_validator("decay_steps")
    @classmethod
    def _is_of_wsd(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("kind", "wsd") != "wsd":
            raise refusal("is of schedule.kind=wsd, and another kind is set", "set schedule.kind: wsd, or remove it")
        return value


class StageSection(Section):
    """One stage; what it does not set is as in the other sections."""

    name: str = Field(pattern=_NAME, max_length=64)
    """Name of the stage, in reports, the journal and MLflow."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the stage. Every stage but the last needs this or `tokens`. Default null: the last stage
    trains what is left of the planned data."""

    tokens: int | None = Field(default=None, ge=1)
    """Tokens of documents after which the stage ends, with the step that reaches them. Default null."""

    context_tokens: int | None = Field(default=None, ge=2)
    """Maximum length of a row, at most `data.context_tokens`, which is the longest of the run. Default null: that
    one."""

    rows_per_step: int | None = Field(default=None, ge=1, le=65_536)
    """Global batch of one step, in rows. Default null: `data.rows_per_step`."""

    sp_size: int | None = Field(default=None, ge=1)
    """Ranks that share a row: a divisor of `parallel.sp_size`, which is the largest of the run. Default null: that
    one."""

    path: PlacePath | None = None
    """The stage's corpus, in place of `data.path` and `data.sources`. Default null: those."""

    sources: tuple[SourceSection, ...] | None = Field(default=None, strict=False, min_length=1)
    """The stage's corpora and their weights, in place of `data.path` and `data.sources`. Default null: those."""

    rope: RopeSection | Literal["unchanged"] | None = None
    """Rotary positions, as in `model.rope`. Default null: `model.rope`."""

    lr: float | None = Field(default=None, gt=0.0)
    """Peak learning rate. Default null: `optimizer.lr`."""

    schedule: ScheduleSection | None = None
    """A schedule of the stage's own: its steps are counted from the stage's first, and its horizon is the stage's last
    step unless it says another. Default null: the run's `schedule`, which goes on over the stages."""

    optimizer: Literal["keep", "reset"] = "keep"
    """AdamW's moments at the beginning of the stage: those of the stage before, or zero. Default `keep`."""
