"""Settings of the profiler: which steps are traced, on which ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from ray_ulysses.config.section import Section, refusal


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
