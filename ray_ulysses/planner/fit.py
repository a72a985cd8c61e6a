"""Searches settings with which a run fits its devices and hosts, by the planner's own estimates of memory and time.

A candidate is a set of changes to a configuration. Each has a cost, which says how much the changes slow a run down or
weaken it, in a stated order (`COSTS`); the nearest candidate is that with the least cost.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.config.resume import setting
from ray_ulysses.config.rules import broken_rules
from ray_ulysses.config.running import MOST_WORKERS, WorkerLimits
from ray_ulysses.config.stages import stage_configs
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import automatic_ring_size
from ray_ulysses.planner.memory import MemoryEstimate, configured_memory, fits, run_memory
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm
from ray_ulysses.planner.settings import allowed_sp, fits_rows, pad_multiple, ring_size
from ray_ulysses.planner.throughput import StepTime, configured_time, full_rows

_STAGE = "memory.zero_stage"
COSTS: Mapping[str, Mapping[Any, int]] = {
    "memory.loss_tile": {"off": 0, "auto": 1},
    "model.compile": {True: 0, False: 2},
    "checkpoint.host_buffers": {2: 0, 1: 2},
    "memory.attention_output": {"auto": 0, "both": 0, "kernel": 2, "none": 16},
    "memory.mlp_tile": {"off": 0, "auto": 3},
    "elastic.peer_memory": {True: 0, False: 4},
    _STAGE: {1: 0, 2: 1, 3: 6},
    "memory.offload_activations": {
        (): 0,
        ("layer_inputs",): 5,
        ("attention_outputs",): 5,
        ("layer_inputs", "attention_outputs"): 6,
    },
    "memory.offload_optimizer": {"none": 0, "cpu": 8},
    "memory.offload_param": {"none": 0, "cpu": 10},
    "memory.gradient_checkpointing": {False: 0, True: 12},
}
"""Values of settings from the fastest to the leanest, with their cost: a stated order, for what the modelled time of a
step does not tell. Twice the chunks of attention cost 1, twice the ranks per row 6, and a ring 1."""
CHUNKS, _CHUNKS_COST = "memory.attention_chunks", 1
_RANKS_COST, _RING_COST = 6, 1
_TO_HOST = ("memory.offload_activations", "memory.offload_optimizer", "memory.offload_param")
_MOST_TIMES_WORKERS = 8
_WHOLE_OR_SHARDED = {"weights, whole": "weights", "weights, sharded": "weights"}

Settings = Mapping[str, Any]
"""Values by the dotted paths of their settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Changes to a configuration."""

    settings: Settings
    """The changed settings."""
    cost: int
    """Their cost, by `COSTS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One changed setting, and the term of memory that it makes smaller by the most."""

    path: str
    old: Any
    """Its configured value."""
    new: Any
    """Its new value."""
    term: str
    place: str
    """Where the term is allocated: ``device`` or ``host``."""
    before: int
    """The term's bytes with all changes before this one."""
    after: int
    """Its bytes with this one too."""

    def option(self) -> str:
        """Return the change as an option of the commands."""
        return f"--set {shlex.quote(f'{self.path}={yaml_value(self.new)}')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A configuration that a search has found."""

    config: Config
    """The configuration, changes included."""
    changes: tuple[Change, ...]
    """What was changed, with reasons."""
    memory: MemoryEstimate
    """Its memory, of stages in those that take the most."""
    time: StepTime | None
    """The time of a step whose rows are one document each; None where it is not modelled."""

    def options(self) -> str:
        """Return the changes as options of the commands."""
        return " ".join(change.option() for change in self.changes)


def with_settings(config: Config, settings: Settings) -> Config:
    """Return a configuration with changed settings, which are not checked."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def nearest(config: Config, shape: ModelShape) -> Found | None:
    """Return the cheapest changes with which a run fits, the configuration itself where it does; None if none fit.

    More workers are tried, up to eight times as many, only where nothing fits on the configured ones.
    """
    workers = config.cluster.workers
    for times in _powers(1, _MOST_TIMES_WORKERS):
        least = times * workers.min
        if least > MOST_WORKERS:
            break
        limits = WorkerLimits(min=least, max=max(least, workers.max))
        more = {} if times == 1 else {"cluster.workers": limits}
        for candidate in sorted(leaner(config, shape, more), key=lambda one: one.cost):
            if fits_with(config, shape, candidate.settings):
                return found(config, shape, candidate.settings)
    return None


def fastest(config: Config, shape: ModelShape, options: Mapping[str, Mapping[Any, int]]) -> Settings | None:
    """Return the settings that fit with the least modelled time, and of equal times the cheapest; None if none fit.

    Args:
        config: The configuration.
        shape: The model.
        options: Settings to choose, and for each value its cost.
    """
    work = full_rows(config)
    times: dict[tuple[int, tuple[tuple[str, Any], ...]], float] = {}
    for candidate in product(options):
        time = configured_time(with_settings(config, candidate.settings), shape, work)
        # Differences beyond the third digit are not what a model of the time can tell.
        times[candidate.cost, tuple(candidate.settings.items())] = 0.0 if time is None else float(f"{time.seconds:.3g}")
    for _, settings in sorted(times, key=lambda one: (times[one], one[0])):
        if fits_with(config, shape, dict(settings)):
            return dict(settings)
    return None


def leanest(config: Config, shape: ModelShape) -> Found:
    """Return the candidate on the configured workers that exceeds the configured limits by the least factor."""
    limits = config.memory.device_gib or math.inf, config.memory.host_gib or math.inf

    def excess(candidate: Candidate) -> float:
        changed = with_settings(config, candidate.settings)
        if not is_allowed(config, changed):
            return math.inf
        taken = [configured_memory(own, shape) for own in stage_configs(changed)]
        return max(max(one.device_bytes / GIB / limits[0], one.host_bytes / GIB / limits[1]) for one in taken)

    return found(config, shape, min(leaner(config, shape), key=lambda one: (excess(one), one.cost)).settings)


def found(config: Config, shape: ModelShape, settings: Settings) -> Found:
    """Return a configuration with changes, the reason for each of them, and its estimates."""
    changed = with_settings(config, settings)
    return Found(
        config=changed,
        changes=tuple(reasons(config, shape, settings)),
        memory=run_memory(changed, shape),
        time=configured_time(changed, shape, full_rows(changed)),
    )


def leaner(
    config: Config, shape: ModelShape, more: Settings | None = None, *, is_host_full: bool | None = None
) -> Iterator[Candidate]:
    """Return every candidate that is as lean as the configuration or leaner, setting by setting.

    Args:
        config: The configuration.
        shape: The model.
        more: Settings that every candidate has, such as more workers.
        is_host_full: Whether what is on the host may come back to the device; None if it is beyond its limit now.
    """
    more = more or {}
    host_gib = config.memory.host_gib
    if is_host_full is None:
        on_host = max(configured_memory(own, shape).host_bytes for own in stage_configs(config))
        is_host_full = host_gib is not None and on_host > host_gib * GIB
    of_settings = {
        path: _leaner_values(config, path, is_either_way=is_host_full and path in _TO_HOST) for path in COSTS
    }
    for layout in _layouts(with_settings(config, more), shape):
        changed = with_settings(config, {**more, **layout.settings})
        options = of_settings | {CHUNKS: attention_chunks(changed, shape)}
        for candidate in product(options):
            settings = {path: value for path, value in candidate.settings.items() if value != value_of(config, path)}
            yield Candidate(
                settings={**more, **layout.settings, **settings},
                cost=layout.cost + candidate.cost,
            )


def yaml_value(value: Any) -> str:
    """Return a setting's value as it is written in YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {yaml_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_value(one) for one in value) + "]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def fits_with(config: Config, shape: ModelShape, settings: Settings) -> bool:
    """Return whether a run fits, in each of its stages, with changes that its other settings allow."""
    changed = with_settings(config, settings)
    fit = all(fits(own, configured_memory(own, shape)) for own in stage_configs(changed))
    return fit and is_allowed(config, changed)


def is_allowed(config: Config, changed: Config) -> bool:
    """Return whether changed settings break no rule; what is wrong without the changes is said elsewhere."""
    known = {problem.path for problem in broken_rules(config)}
    return all(problem.path in known for problem in broken_rules(changed))


def product(options: Mapping[str, Mapping[Any, int]]) -> Iterator[Candidate]:
    """Return every combination of the values of settings."""
    for values in itertools.product(*(costs.items() for costs in options.values())):
        chosen = dict(zip(options, (value for value, _ in values), strict=True))
        yield Candidate(settings=chosen, cost=sum(cost for _, cost in values))


def _leaner_values(config: Config, path: str, *, is_either_way: bool) -> dict[Any, int]:
    """Return the configured value, and those that are leaner with what they cost beyond it.

    Args:
        config: The configuration.
        path: The setting.
        is_either_way: Whether values that take less of the host are wanted too; each costs 1, for it is a change.
    """
    now, costs = value_of(config, path), COSTS[path]
    means = config.zero_stage if path == _STAGE else now
    if means not in costs:
        # Tiles of a number of tokens may give way to automatic ones; an optimizer on NVMe has no leaner place.
        return {now: 0} | ({"auto": 1} if "auto" in costs else {})
    less = {value: 1 for value, cost in costs.items() if is_either_way and value != now and cost <= costs[now]}
    return {now: 0} | less | {value: cost - costs[means] for value, cost in costs.items() if cost > costs[means]}


def value_of(config: Config, path: str) -> Any:
    """Return the setting with a dotted path."""
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def attention_chunks(config: Config, shape: ModelShape) -> dict[Any, int]:
    """Return the configured chunks of attention, and twice as many up to the key-value heads of a rank."""
    now = config.memory.attention_chunks
    most = -(-shape.num_kv_heads // (config.parallel.sp_size // ring_size(config, shape)))
    return {now: 0} | {more: _CHUNKS_COST * n for n, more in enumerate(_powers(now, most)) if n}


def _layouts(config: Config, shape: ModelShape) -> Iterator[Candidate]:
    """Return the configured layout, and those that share a row among more ranks, without another data plan."""
    now, multiple = config.parallel.sp_size, pad_multiple(config, shape)
    yield Candidate(settings={}, cost=0)
    for size in allowed_sp(config, shape):
        if size < now or config.cluster.workers.min % size or config.cluster.workers.max % size:
            continue
        # Without copies of key-value heads, a ring may need less than the exchange of heads; a hybrid has none.
        rings = {automatic_ring_size(size, shape.num_heads), -(-size // shape.num_kv_heads)}
        for ring in {1} if shape.mixer_layers else rings:
            settings: dict[str, Any] = {} if size == now else {"parallel.sp_size": size}
            same = with_settings(config, settings)
            if size == now or config.parallel.ring_size is not None or ring != ring_size(same, shape, size):
                settings |= {"parallel.ring_size": ring}
            changed = with_settings(config, settings)
            is_same = size == now and ring == ring_size(config, shape)
            if is_same or size % ring or not fits_rows(changed, shape, multiple):
                continue
            doublings = round(math.log2(size / now))
            yield Candidate(settings=settings, cost=max(1, _RANKS_COST * doublings + _RING_COST * (ring > 1)))


def _powers(first: int, most: int) -> list[int]:
    """Return ``first``, and twice as much again and again up to ``most``."""
    return [first << n for n in range(max(1, (most // first).bit_length()))]


def reasons(config: Config, shape: ModelShape, settings: Settings) -> Iterator[Change]:
    """Apply changes one after the other, and return what each of them makes smaller."""
    before = run_memory(config, shape)
    for path, value in settings.items():
        old, config = setting(config, path), with_settings(config, {path: value})
        after = run_memory(config, shape)
        drops = [
            (was, is_, place)
            for place, olds, news in (("device", before.device, after.device), ("host", before.host, after.host))
            for was, is_ in _paired(olds, news)
            # What a model takes while it is loaded has other names in other ZeRO stages.
            if was.phase != "load"
        ]
        # On the host only what makes nothing on the device smaller.
        was, is_, place = max(
            drops,
            key=lambda drop: (drop[2] == "device" and drop[0].bytes > drop[1].bytes, drop[0].bytes - drop[1].bytes),
        )
        new = setting(config, path)
        yield Change(path=path, old=old, new=new, term=was.name, place=place, before=was.bytes, after=is_.bytes)
        before = after


def _paired(olds: Sequence[MemoryTerm], news: Iterable[MemoryTerm]) -> Iterator[tuple[MemoryTerm, MemoryTerm]]:
    """Return each old term with the new one of its name, which has no bytes if there is none."""
    by_name = {_WHOLE_OR_SHARDED.get(term.name, term.name): term for term in news}
    for was in olds:
        name = _WHOLE_OR_SHARDED.get(was.name, was.name)
        yield was, by_name.get(name, MemoryTerm(name=was.name, bytes=0, phase=was.phase, source=""))
