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
    """Low-rank adapters (LoRA), added by PEFT; all other weights are frozen, except those named here.

    Dropout is not supported: its masks depend on the layout, so the run would depend on its world size.
    """

    kind: Literal["lora"] = "lora"
    """Kind of adapter. Default `lora`, https://arxiv.org/abs/2106.09685."""

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rank of the two matrices that each target gets. Default 16."""

    alpha: int = Field(default=32, ge=1)
    """The product of the two matrices is scaled by `alpha / rank`. Default 32: by 2 at the default rank."""

    rslora: bool = False
    """Whether to scale by `alpha / sqrt(rank)` instead (https://arxiv.org/abs/2312.03732), so that high ranks keep
    learning. Default false."""

    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False)] = ALL_LINEAR
    """Linear layers that get an adapter: full names, or the part after a dot, such as `[q_proj, v_proj]`. Default
    `all-linear`: every linear layer but the output head, and `x_proj` and `dt_proj` of Mamba 1, which are used without
    a call."""

    modules_to_save: tuple[str, ...] = Field(default=(), strict=False)
    """Names of other modules that are trained in full and saved with the adapter. Default: none."""

    train_embeddings: bool = False
    """Whether the token embedding is trained in full. With `train_norms`, this closes most of LoRA's gap to full
    training when a context is extended (https://arxiv.org/abs/2309.12307). Default false, which suits fine-tuning
    within the trained context."""

    train_norms: bool = False
    """Whether all norms are trained in full. Default false."""

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
            raise refusal("contains an empty or duplicate name", "name each module once")
        return value

    @field_validator("targets")
    @classmethod
    def _has_targets(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise refusal("names no layer, so nothing would be adapted", "use all-linear, or leave model.adapter out")
        return value


class ProfileSection(Section):
    """Steps to trace with PyTorch's profiler. Traced steps are slower, and a trace takes tens of MB."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, strict=False)
    """Steps of the run, one trace each. Avoid the first step of an attempt, which is slower than the rest."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1, strict=False)
    """Ranks to trace. Default `[0]`."""

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
    `s3://bucket/runs`, which then holds all files of a run except those that only one node needs. Credentials come from
    the environment of every node, or from `cluster.secrets_file`. Required, since a cluster's shared path can't be
    guessed."""

    storage_kind: Literal["local", "nfs"] = "local"
    """Kind of file system of `storage`. `nfs` means any network file system: MLflow then needs a server, since SQLite's
    locks are not safe there. Default `local`, which is right on one machine."""

    seed: Annotated[int, fixed("it determines the weights and the order of the data")] = Field(
        default=0, ge=0, le=_MAX_SEED
    )
    """Seed of the weights (with `model.init: random`), the data plan and every other random choice. Default 0:
    runs are reproducible unless you change it."""

    stop_step: Annotated[int | None, free("a later step continues the run; the learning rate is not affected")] = Field(
        default=None, ge=1
    )
    """Optimizer step at which this command stops. It does not affect the learning rate, since `schedule.horizon_steps`
    is a separate setting. Default null: stop at the end of the planned data."""

    log_every_steps: int = Field(default=1, ge=1)
    """Steps between two progress lines and tracked points; the journal always records every step. Default 1, since
    a long-context step takes seconds."""

    self_test: bool = True
    """Whether workers compare attention and gradients over their live process groups with those of a single process,
    and stop if they differ. The test takes about a second, and runs when workers start, when a stage begins, and when a
    worker joins. Default true: a broken link or kernel shows at once instead of after a week."""

    eval_every_steps: int | None = Field(default=None, ge=1)
    """Steps between two evaluations; needs `data.eval_fraction` above 0. Default null: no evaluations."""

    profile: ProfileSection | None = None
    """Steps to trace with PyTorch's profiler, such as `{steps: [10, 11], ranks: [0, 8]}`; the traces are files for
    Perfetto in `diagnostics/` of the run's directory. Default null: none."""

    @field_validator("storage")
    @classmethod
    def _is_a_directory(cls, value: str) -> str:
        where = parse_location(value)
        if isinstance(where, Path) and any(where.is_relative_to(root) for root in _KERNEL_FILES):
            raise refusal("is on a file system of the kernel, which can't store files", "give a directory on a disk")
        return value


class RopeSection(Section):
    """Rotary positions that replace the model's own; the names are those of Transformers' `rope_parameters`.

    An omitted value is the model's own if `rope_type` does not change, else Transformers' default.
    """

    rope_type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] | None = None
    """Method that scales the frequencies; `default` does not scale them. Default null: the model's own."""

    rope_theta: float | None = Field(default=None, gt=1.0)
    """Base of the frequencies; a longer context needs a larger base. Default null: the model's own."""

    factor: float | None = Field(default=None, ge=1.0)
    """Factor by which the trained positions are extended, such as 8 from 4,096 to 32,768; required by every scaling
    method. Default null: the model's own."""

    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """Positions that the model was trained on, for `yarn`, `longrope` and `llama3`. Default null: the model's own."""

    attention_factor: float | None = Field(default=None, gt=0.0)
    """Factor on the rotated queries and keys, for `yarn` and `longrope`. Default null: by the method's rule."""

    beta_fast: float | None = Field(default=None, gt=0.0)
    """Rotations above which `yarn` leaves a frequency as it is. Default null: 32."""

    beta_slow: float | None = Field(default=None, gt=0.0)
    """Rotations below which `yarn` divides a frequency by `factor`. Default null: 1."""

    low_freq_factor: float | None = Field(default=None, gt=0.0)
    """Required by `llama3`. Default null: the model's own."""

    high_freq_factor: float | None = Field(default=None, gt=0.0)
    """Required by `llama3`. Default null: the model's own."""

    short_factor: tuple[float, ...] | None = Field(default=None, strict=False)
    """Divisor of each frequency in short documents, required by `longrope`. Default null: the model's own."""

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
    """Rotary positions of the trained and exported model; where layers have different ones, those of full attention.
    Required, if only as `unchanged`, for a new run whose documents are longer than a pretrained model's positions.
    Default null: as in the model's configuration."""

    adapter: Annotated[AdapterSection | None, fixed("it determines which weights are trained")] = None
    """Low-rank adapters to train instead of all weights (`docs/fine-tune.md`): `rank`, `alpha`, `rslora`, `targets`,
    `modules_to_save`, `train_embeddings`, `train_norms`. Default null: all weights are trained."""

    dtype: Annotated[Literal["bf16", "fp32"], fixed("the precision of the weights shapes the loss curve")] = "bf16"
    """Data type in which weights and activations are computed; for bf16, the optimizer keeps fp32 master weights.
    Default `bf16`, the fast type on all supported GPUs; use `fp32` on CPU."""

    attention: Annotated[
        Literal["auto", "flash_attn_3", "flash_attn", "cudnn", "varlen", "sdpa", "math"],
        free("kernels agree within their tolerance"),
    ] = "auto"
    """Attention kernel; the table in `docs/how-it-works.md` lists the requirements and limits of each. Default `auto`:
    the fastest available kernel that computes a layer exactly."""

    compile: Annotated[bool, free("compiled layers sum in another order")] = False
    """Whether `torch.compile` compiles each decoder layer, which is meant for short rows of large layers. Measure the
    gain: a small model on a CPU gains next to nothing, and GPUs are not yet measured. Needs
    `memory.gradient_checkpointing: false`, `memory.zero_stage` 1 or 2, and a compiler on each node; the first step of
    each attempt waits for compilation. Default false."""

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
                "changes the text decoder's positions, but model.part=text exports into a copy of the whole "
                "checkpoint, which keeps its config.json",
                "change config.json of model.path instead, and set model.rope: unchanged",
            )
        return value

    @field_validator("adapter")
    @classmethod
    def _is_of_a_whole_model(cls, value: AdapterSection | None, info: ValidationInfo) -> AdapterSection | None:
        if value is not None and info.data.get("part") == "text":
            raise refusal(
                "adapts a whole model, but model.part=text exports into a copy of a multimodal checkpoint",
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
    """Directory of a prepared corpus: a path that every node can access, or its URI in an object store, such as
    `s3://bucket/corpus`."""

    weight: float | None = Field(default=None, ge=0.0, allow_inf_nan=False, le=1e9)
    """Share of an epoch's tokens, relative to the other sources. Default null: take all of it."""


class DataSection(Section):
    """The corpora, and how they become rows and steps."""

    on_resume: ClassVar[OnResume] = by_branch("it determines what is trained on")

    path: PlacePath | None = None
    """Directory of a corpus that `ray-ulysses prepare` wrote: a path that every node can access, or its URI in an
    object store, such as `s3://bucket/corpus`, with credentials as for `checkpoint.storage`. Default null, which is
    valid only with `sources`, or if each of the `stages` has its own corpora."""

    sources: Annotated[tuple[SourceSection, ...] | None, by_branch("they determine what is trained on")] = Field(
        default=None, strict=False, min_length=1
    )
    """Several corpora in place of `path`, each with a `path` and, for all or none of them, a `weight`. Without weights,
    an epoch takes every document of each. With weights, it takes all of the source that is smallest relative to its
    weight, and from each other source the number of tokens that follows from its weight. Default null."""

    allow_other_tokenizer: Annotated[bool, free("rows do not change")] = False
    """Whether pretrained weights may be trained on a corpus prepared with a tokenizer other than the one in
    `model.path`. Default false: such a corpus is refused, since the weights were trained on other ids. With
    `model.init: random` it is allowed, and `plan` notes it."""

    context_tokens: Annotated[int, by_branch("it determines how documents are packed into rows")] = Field(ge=2)
    """Maximum length of a row, in tokens, rounded down to the padding that `parallel.allowed_sp` requires. By default,
    longer documents are split without losing a target (`overlong`)."""

    rows_per_step: Annotated[int, _ROWS_OF_STEPS] = Field(ge=1, le=65_536)
    """Global batch size of an optimizer step, in rows. The rows of a step are the same on any number of workers."""

    packing: Annotated[
        Literal["best_fit", "wide_fit", "concat", "none"], by_branch("it determines how rows are filled")
    ] = "best_fit"
    """How rows are filled: `best_fit` puts each document where it leaves the least room among 64 open rows, and never
    splits one that fits in a row; `wide_fit` uses 1,024 open rows, for documents of a third to two thirds of a row;
    `concat` splits the stream of documents wherever a row is full; `none` gives each document its own row. Default
    `best_fit`, which fills rows nearly as well as `concat` and keeps documents whole; `plan` reports where `wide_fit`
    would fill them better."""

    overlong: Annotated[
        Literal["split", "truncate", "drop", "error"], by_branch("it determines which tokens are trained on")
    ] = "split"
    """Treatment of a document longer than a row: `split` trains on all of it, in pieces that lose no target; `truncate`
    trains only on its beginning; `drop` omits it; `error` refuses the corpus. Default `split`; `plan` prints how many
    tokens the others lose."""

    balance_steps: Annotated[int, _ROWS_OF_STEPS] = Field(default=1, ge=1, le=1024)
    """Number of consecutive steps within which rows may move, so that rows of similar cost share a micro-batch.
    A higher value balances data-parallel groups better at very long context, but moves rows by up to that many steps.
    Default 1: rows stay in their step and are sorted by cost within it."""

    row_order: Annotated[Literal["shuffled", "costliest"], _ROWS_OF_STEPS] = "shuffled"
    """Order of an epoch's rows: `shuffled` by the seed, or with the `costliest` ones in the first step and the others
    shuffled, as in `ray-ulysses check`. Default `shuffled`."""

    epochs: Annotated[int, by_branch("it determines the plan and its length")] = Field(default=1, ge=1, le=10_000)
    """Passes over the training documents, each in a different order. Default 1, since long documents are rarely scarce
    enough to be repeated."""

    eval_fraction: Annotated[float, fixed("it determines which documents are trained on")] = Field(
        default=0.0, ge=0.0, le=0.5
    )
    """Fraction of the documents held out for evaluation, from 0 to 0.5, chosen by a seeded hash of the document and
    never trained on. Default 0: no documents are held out."""

    eval_rows: Annotated[int, by_branch("evaluations must compare the same rows")] = Field(default=8, ge=1)
    """Maximum number of rows per evaluation. Default 8: at long context, a few rows hold many tokens."""

    engine: Annotated[Literal["ray", "local"], free("both yield the same bytes")] = "ray"
    """How rows reach a worker: `ray` streams their tokens from Ray Data tasks, and `local` reads them in the worker.
    Both yield the same bytes. Default `ray`, which takes no time from the workers; `local` needs no CPUs
    (`cluster.data_cpus`) besides the workers'."""

    prefetch_rows: Annotated[int, free()] = Field(default=2, ge=1)
    """Rows that each worker keeps ready. Default 2: one in use, one in transit."""


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
    keeps logits from drifting (https://arxiv.org/abs/2204.02311 uses 1e-4). It is trained on, but reported separately
    from the loss. Default 0.0: none."""

    router_loss: float | None = Field(default=None, ge=0.0)
    """Coefficient of the load-balancing loss of a mixture of experts, which is trained on, but reported separately from
    the loss; 0.0 for none. Default null: from `output_router_logits` and `router_aux_loss_coef` of the model's
    configuration."""


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
    stopping and resuming does not change the curve. Default null: all steps of the data plan."""

    decay_steps: int | None = Field(default=None, ge=1)
    """Steps of the decay of `kind: wsd`, which ends at `horizon_steps`. Default null: a tenth of the horizon."""

    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Floor of the learning rate, as a fraction of the peak. Default 0.1."""

    @field_validator("decay_steps")
    @classmethod
    def _is_of_wsd(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("kind", "wsd") != "wsd":
            raise refusal("requires schedule.kind=wsd", "set schedule.kind: wsd, or remove it")
        return value


class StageSection(Section):
    """One stage; settings that it omits are taken from the other sections."""

    name: str = Field(pattern=_NAME, max_length=64)
    """Name of the stage, in reports, the journal and MLflow."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the stage. Every stage but the last needs this or `tokens`. Default null: the last stage
    trains on the rest of the planned data."""

    tokens: int | None = Field(default=None, ge=1)
    """Number of document tokens after which the stage ends, with the step that reaches it. Default null."""

    context_tokens: int | None = Field(default=None, ge=2)
    """Maximum length of a row, at most `data.context_tokens`. Default null: `data.context_tokens`."""

    rows_per_step: int | None = Field(default=None, ge=1, le=65_536)
    """Global batch size of a step, in rows. Default null: `data.rows_per_step`."""

    sp_size: int | None = Field(default=None, ge=1)
    """Ranks that share a row, a divisor of `parallel.sp_size`. Default null: `parallel.sp_size`."""

    path: PlacePath | None = None
    """The stage's corpus, in place of `data.path` and `data.sources`. Default null: the run's corpora."""

    sources: tuple[SourceSection, ...] | None = Field(default=None, strict=False, min_length=1)
    """The stage's corpora and their weights, in place of `data.path` and `data.sources`. Default null: the run's
    corpora."""

    rope: RopeSection | Literal["unchanged"] | None = None
    """Rotary positions, as in `model.rope`. Default null: `model.rope`."""

    lr: float | None = Field(default=None, gt=0.0)
    """Peak learning rate. Default null: `optimizer.lr`."""

    schedule: ScheduleSection | None = None
    """Schedule for this stage alone: its steps count from the stage's first, and its horizon is by default the stage's
    last step. Default null: the run's `schedule`, which continues across stages."""

    optimizer: Literal["keep", "reset"] = "keep"
    """Whether AdamW's moments are kept from the previous stage or reset to zero. Default `keep`."""
