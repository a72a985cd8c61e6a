"""Settings of the model: its weights, adapters, positions and attention kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from ray_ulysses.config.reference_to_checkpoint import ReferenceProblem, RunReference, parse_reference
from ray_ulysses.config.section import NamedPlace, OnResume, Section, base_of, fixed, free, refusal
from ray_ulysses.storage.location import absolute_location

_OF_A_NEW_RUN = free("read only while the run has no checkpoint of its own")
ALL_LINEAR: Literal["all-linear"] = "all-linear"
BaseDtype = Literal["bf16", "fp8", "nf4", "int8"]


def _absolute_directory(value: str | None, info: ValidationInfo) -> str | None:
    base = base_of(info)
    if base is None or value is None or not (base / Path(value).expanduser()).is_dir():
        # A hub id is not a path.
        return value
    return absolute_location(value, base)


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
    """Weights that get an adapter: full names or their last parts, such as `[q_proj, v_proj]`. In a model whose experts
    share one tensor, `experts` stands for all of the experts' matrices, `gate_up_proj` or `down_proj` for one of them
    in each layer, and the router's name (`gate` or `router`) for the router. Default `all-linear`: every linear layer
    except the output head, and except `x_proj` and `dt_proj` of Mamba 1, whose weights are used without calling the
    layer. Experts that share a tensor are not linear layers, so by default they stay frozen."""

    dora: bool = False
    """Whether to train the magnitude of each weight's rows separately from their direction (DoRA,
    https://arxiv.org/abs/2402.09353). Not supported for experts. Default false."""

    ranks: dict[str, Annotated[int, Field(ge=1, le=65_536)]] = Field(default_factory=dict)
    """Ranks of single targets instead of `rank`, by name as in `targets`, such as `{q_proj: 32}`. Default: none."""

    alphas: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Values of `alpha` for single targets, by name as in `targets`. Default: none."""

    modules_to_save: tuple[str, ...] = Field(default=(), strict=False)
    """Names of other modules that are fully trained and saved with the adapter. Default: none."""

    from_: NamedPlace | None = Field(default=None, alias="from")
    """Existing LoRA adapter of PEFT whose weights training starts from: a directory with `adapter_config.json` and
    `adapter_model.safetensors`, or a hub id. The other settings must be equal to the adapter's; an error names each
    difference. Dropout that the adapter was trained with is not applied. Default null: new adapters."""

    train_embeddings: bool = False
    """Whether to train the token embedding in full. Together with `train_norms`, this closes most of the gap between
    LoRA and full training when the context is extended (https://arxiv.org/abs/2309.12307). Default false, which suits
    fine-tuning without a longer context."""

    train_norms: bool = False
    """Whether to train all norms in full. Default false."""

    @field_validator("from_")
    @classmethod
    def _is_absolute_if_a_directory(cls, value: str | None, info: ValidationInfo) -> str | None:
        return _absolute_directory(value, info)

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
    """The model to train, its initial weights, and its attention kernel."""

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
    """Low-rank adapters to train instead of all weights (`docs/fine-tune.md`): `rank`, `alpha`, `rslora`, `dora`,
    `targets`, `ranks`, `alphas`, `modules_to_save`, `from`, `train_embeddings`, `train_norms`. Default null: all
    weights are trained."""

    base_dtype: Annotated[BaseDtype, fixed("a change would alter the frozen weights")] = "bf16"
    """Type in which the frozen weights of the layers are stored when adapters are trained (`docs/fine-tune.md`): `nf4`,
    `int8` or `fp8`, quantized with torchao while the model is loaded, and dequantized to `dtype` in each pass.
    Checkpoints then contain the trained weights, and a fingerprint of the others. Default `bf16`: not quantized; all
    weights have the type `dtype`."""

    freeze: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], fixed("a change would alter which weights are trained")
    ] = Field(default=(), strict=False)
    """Shell-style patterns of the names of parameters that are not trained, such as `*.embed_tokens.*` or
    `model.layers.[0-7].*`. Frozen parameters have no optimizer state, and are exported unchanged. Every pattern must
    match at least one parameter; a tied output head is frozen together with the embedding. Default: none."""

    dtype: Annotated[Literal["bf16", "fp32"], fixed("a change would alter the loss curve")] = "bf16"
    """Data type of the computation. With bf16, the optimizer keeps fp32 master weights. Default `bf16`, which is fast
    on all supported GPUs; use `fp32` on CPU."""

    attention: Annotated[
        Literal["auto", "flash_attn_4", "flash_attn_3", "flash_attn", "cudnn", "varlen", "sdpa", "math"],
        free("kernels agree within their tolerance"),
    ] = "auto"
    """Attention kernel. The table in `docs/how-it-works.md` lists each kernel's requirements and limits. Default
    `auto`: for each layer, the fastest available kernel that computes it exactly."""

    fused_norms: Annotated[bool, free("both kinds agree within rounding")] = True
    """Whether RMS norms on a GPU run in PyTorch's fused kernel, which reads its input once, makes no fp32 copies, and
    in bf16 rounds once instead of twice. Norms that multiply by `1 + weight`, such as Gemma's, and all norms on a CPU
    run as in Transformers. Default true. Not yet tested on a GPU."""

    compile: Annotated[bool | Literal["mlp"], free("compiled layers sum in a different order")] = False
    """What to compile with `torch.compile`; each node needs a compiler, and the first step of each attempt includes the
    compilation. `true` compiles each decoder layer, which helps with short rows and large layers, and requires
    `memory.gradient_checkpointing: false` and `memory.zero_stage` 1 or 2. `mlp` compiles the recomputation and backward
    pass of full tiles of dense MLPs (`memory.mlp_tile`), where the activation and its product then take one pass.
    Measure the gain: on a CPU it is small, and on GPUs it is not measured. Default false."""

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
        return _absolute_directory(value, info)

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
    def _has_its_base(cls, value: AdapterSection | None, info: ValidationInfo) -> AdapterSection | None:
        if value is not None and value.from_ is not None and info.data.get("init") == "random":
            raise refusal(
                "continues from an adapter of pretrained weights, but model.init=random draws the base weights",
                "set model.init: pretrained, or remove model.adapter.from",
                value.from_,
            )
        return value

    @field_validator("freeze")
    @classmethod
    def _is_without_adapter(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value and info.data.get("adapter") is not None:
            rule = "model.adapter already freezes all weights except those that it selects"
            raise refusal(rule, "remove model.freeze, or remove model.adapter")
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
