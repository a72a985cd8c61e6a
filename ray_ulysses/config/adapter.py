"""Settings of adapters: small trained weights beside those of a decoder, which stay as they are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ray_ulysses.config.section import Section, refusal

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
