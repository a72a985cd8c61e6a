"""Settings of the optimizer and of the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from ray_ulysses.config.section import OnResume, Section, by_branch, fixed, refusal

Pattern = Annotated[str, Field(min_length=1)]
"""A shell-style pattern of parameter names."""
OptimizerKind = Literal["adamw", "adamw_bf16_moments", "muon"]

_WARMUP_STEPS = 100


class ParameterGroup(Section):
    """Optimizer settings of the parameters whose names match a pattern."""

    on_resume: ClassVar[OnResume] = fixed("a change would alter the loss curve")

    match: tuple[Pattern, ...] = Field(min_length=1, strict=False)
    """Shell-style patterns that are compared with complete parameter names, such as `model.layers.[0-7].*` or
    `*.embed_tokens.*`. A parameter belongs to the first entry with a matching pattern. Every pattern must match at
    least one trained parameter. With `model.adapter`, names are those of PEFT without its prefix `base_model.model.`,
    such as `model.layers.0.self_attn.q_proj.lora_A.default.weight`."""

    lr_scale: float = Field(default=1.0, gt=0.0)
    """Factor applied to the learning rate at every step. Default 1.0. Set `model.freeze` to freeze parameters."""

    weight_decay: float | None = Field(default=None, ge=0.0)
    """Decoupled weight decay of all matching parameters, including norms, biases and other vectors. Default null:
    `optimizer.weight_decay`, from which these are exempt."""


class OptimizerSection(Section):
    """Optimizer, with decoupled weight decay and gradient clipping by the global norm."""

    on_resume: ClassVar[OnResume] = fixed("a change would alter the loss curve")

    kind: OptimizerKind = "adamw"
    """Optimizer (`docs/optimizers.md`). `adamw` stores two fp32 moments per parameter. `adamw_bf16_moments` stores them
    in bf16 with stochastic rounding, which saves 4 bytes per parameter. `muon` orthogonalizes the updates of weight
    matrices, which have one fp32 moment, and uses AdamW for embeddings, the output head and vectors. Default
    `adamw`."""

    groups: tuple[ParameterGroup, ...] = Field(default=(), strict=False)
    """Settings of parameters by name: each entry has `match`, `lr_scale` and `weight_decay`. Default: none."""

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

    router_bias_rate: float | None = Field(default=None, gt=0.0)
    """Rate that balances the experts of a mixture without a loss (https://arxiv.org/abs/2408.15664): after each step,
    the router's bias of an expert grows by this rate if the expert received fewer of the step's tokens than the mean
    over experts, and shrinks by the rate if it received more. Requires a model whose routers have such a bias, a buffer
    named `e_score_correction_bias` or `expert_bias` (DeepSeek-V3, GLM-4.5 and others), and no adapter. DeepSeek-V3 used
    1e-3. Default null: the biases do not change."""

    @property
    def is_by_parameter(self) -> bool:
        """Whether the settings depend on the parameter."""
        return bool(self.groups) or self.kind == "muon"


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
