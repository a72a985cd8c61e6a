"""Compares the traffic of ZeRO-3 for a mixture's experts with that of expert parallelism, which is not implemented."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory_terms import FP32_BYTES
from ray_ulysses.planner.state_memory import StateSharing

_GATHERS = 2
"""Number of times that ZeRO-3 gathers a layer's weights per micro-batch: in the forward and in the backward pass."""
_EXCHANGES = 4
"""Number of times that expert parallelism moves a token to each of its experts or back per micro-batch: twice in each
pass. Repetitions in recomputed layers are not counted, in favor of expert parallelism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTraffic:
    """Bytes that a rank receives for one layer's routed experts per micro-batch, when the world is large."""

    zero_bytes: int
    """Traffic of ZeRO-3: the experts' weights are gathered twice and, if trained, their gradients are reduced in fp32.
    The traffic does not depend on the number of tokens."""
    token_bytes: int
    """Traffic of expert parallelism per token: the hidden state moves to each chosen expert and back, in both
    passes."""
    tokens: int
    """Number of tokens per rank of a full row."""

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> Self | None:
        """Return the traffic of a run, or None for a dense model or a ZeRO stage that does not gather weights."""
        sharing, experts = StateSharing.of(config), shape.experts
        if experts is None or sharing.stage != 3:
            return None
        weights = experts.count * 3 * shape.hidden_size * experts.width
        # An adapter's gradients are small enough to be ignored.
        reduced = 0 if shape.has_adapter else FP32_BYTES
        return cls(
            zero_bytes=weights * (_GATHERS * sharing.value_bytes + reduced),
            token_bytes=_EXCHANGES * experts.active * shape.hidden_size * sharing.value_bytes,
            tokens=-(-config.data.context_tokens // config.parallel.sp_size),
        )

    @property
    def break_even_tokens(self) -> int:
        """Number of tokens per rank above which ZeRO-3 moves fewer bytes than expert parallelism."""
        return self.zero_bytes // self.token_bytes
