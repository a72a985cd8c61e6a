"""Chooses the settings of memory that a configuration leaves to the planner: `memory.plan` and `auto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.fit import (
    CHUNKS,
    COSTS,
    attention_chunks,
    fastest,
    fits_with,
    reasons,
    value_of,
    with_settings,
    yaml_value,
)
from ray_ulysses.planner.memory_terms import GIB

_OUTPUT = "memory.attention_output"
_CHOSEN = (
    _OUTPUT,
    "memory.offload_activations",
    CHUNKS,
    "memory.offload_optimizer",
    "memory.offload_param",
    "memory.gradient_checkpointing",
)
"""What ``memory.plan: auto`` chooses where the file does not write it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A setting that the planner has chosen."""

    path: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.path}={yaml_value(self.value)}: {self.reason}"


def chosen_settings(config: Config, shape: ModelShape, stored: Config | None) -> tuple[Config, tuple[Chosen, ...]]:
    """Return the configuration with what the planner chooses, and the reason for each choice (pure).

    Args:
        config: The configuration as it was loaded: what it writes is never changed.
        shape: The model.
        stored: The run's stored configuration, whose choices are kept as long as they fit; None for a new run.
    """
    options = choices(config, shape)
    if not options:
        return config, ()
    kept = {} if stored is None else _stored(stored, options)
    if kept.keys() == options.keys() and fits_with(config, shape, kept):
        same = tuple(Chosen(path=path, value=value, reason="as the run has stored it") for path, value in kept.items())
        return with_settings(config, kept), same
    # Where the host is too small, or nothing fits, the refusal proposes what else to change.
    any_host = with_settings(config, {"memory.host_gib": None})
    last = {_OUTPUT: "kernel"} if _OUTPUT in options else {}
    found = fastest(config, shape, options) or fastest(any_host, shape, options) or last
    return with_settings(config, found), tuple(_explained(config, shape, options, found))


def choices(config: Config, shape: ModelShape) -> dict[str, Mapping[Any, int]]:
    """Return the settings that are left to the planner, and for each value its cost."""
    written, options = config.memory.model_fields_set, {}
    for path in _CHOSEN if config.memory.plan == "auto" else ():
        if path.partition(".")[2] not in written:
            options[path] = attention_chunks(config, shape) if path == CHUNKS else COSTS[path]
    if _OUTPUT in options:
        options[_OUTPUT] = {value: cost for value, cost in COSTS[_OUTPUT].items() if value != "auto"}
    elif config.memory.attention_output == "auto":
        options[_OUTPUT] = {value: COSTS[_OUTPUT][value] for value in ("both", "kernel")}
    return options


def _stored(stored: Config, options: Mapping[str, Mapping[Any, int]]) -> dict[str, Any]:
    """Return what the planner has chosen before, as far as it could choose it again."""
    were_chosen = [path for path in options if path == _OUTPUT or stored.memory.plan == "auto"]
    values = {path: value_of(stored, path) for path in were_chosen}
    return {path: value for path, value in values.items() if value in options[path]}


def _explained(
    config: Config, shape: ModelShape, options: Mapping[str, Mapping[Any, int]], found: Mapping[str, Any]
) -> Iterator[Chosen]:
    chosen = with_settings(config, found)
    for path, value in found.items():
        first = next(iter(options[path]))
        reason = "the fastest" + (" that fits" if fits_with(config, shape, found) else "")
        if config.memory.device_gib is None:
            reason = "the fastest; memory.device_gib is not given"
        if value != first:
            (saved,) = reasons(with_settings(chosen, {path: first}), shape, {path: value})
            before, after = _apart(saved.before / GIB, saved.after / GIB)
            reason = (
                f"with {yaml_value(first)}, {saved.term} would take {before} GiB per {saved.place} instead of "
                f"{after} GiB"
            )
        yield Chosen(path=path, value=value, reason=reason)


def _apart(larger: float, smaller: float) -> tuple[str, str]:
    """Return two numbers with as many digits, from three on, as tell them apart."""
    for digits in range(3, 9):
        texts = f"{larger:.{digits}g}", f"{smaller:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts
