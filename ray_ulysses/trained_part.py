"""Numbers of parameters that a run trains, by the settings that select them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPart:
    """The trained part of a model with adapters or frozen parameters."""

    added: int
    """Number of adapter parameters; 0 without adapters."""
    trained: int
    """Number of trained parameters, including the adapters'."""
    has_embedding: bool
    has_head: bool
    summed: int = 0
    """Number of frozen parameters to which the adapter's product is added before use, such as adapted experts."""
    largest_sum: int = 0
    """Number of these parameters in the module that has the most."""
    largest_in_sum: int = 0
    """Number of elements of the largest of these parameters."""
    added_to_sums: int = 0
    """Number of adapter parameters in these products. They are not multiplied with tokens."""
    quantized: int = 0
    """Number of frozen parameters that are quantized."""
    packed_bytes: int = 0
    """Size of the quantized parameters with their scales, in bytes."""
    largest_quantized: int = 0
    """Largest number of quantized parameters in one linear layer or one layer's experts."""
    largest_tiled: int = 0
    """Largest number of quantized parameters in one MLP or attention. Over tiles, an MLP uses its weights together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchedParameters:
    """The trained parameters of an entry of ``optimizer.groups``."""

    match: tuple[str, ...]
    """The entry's patterns."""
    tensors: int
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonPart:
    """The matrices that Muon updates."""

    parameters: int
    """Total number of elements."""
    matrices: int
    flops: int
    """Number of floating-point operations that orthogonalize all matrices once."""
    working_elements: int
    """Largest number of elements in the temporaries that orthogonalize a matrix."""
