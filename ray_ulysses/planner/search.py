"""Searches for settings with which a run fits into memory, based on the planner's estimates of memory and time.

The search is used by ``plan --fit`` (`nearest`), ``plan --longest`` (`longest_contexts`), ``init``, ``memory.plan:
auto`` (`chosen_settings`), and the hints of memory problems. A candidate is a set of changes to a configuration. Its
cost ranks how much the changes slow the run down (`COSTS`). The nearest candidate has the lowest cost.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.config.resume import setting
from ray_ulysses.config.rules import broken_rules
from ray_ulysses.config.running import MOST_WORKERS, WorkerLimits
from ray_ulysses.config.schema import value_of, with_settings
from ray_ulysses.config.stages import stage_configs
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import automatic_ring_size
from ray_ulysses.planner.memory import MemoryEstimate, configured_memory, fits, run_memory
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm
from ray_ulysses.planner.settings import allowed_sp, fits_rows, pad_multiple, ring_size, run_layout
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
    "memory.zero_secondary": {"node": 0, "none": 1},
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
"""Cost of each setting's values, from the fastest value to the value that takes the least memory. The costs are a fixed
ranking, for differences that the time model does not cover. In addition, each doubling of the attention head
groups costs 1, each doubling of the ranks per row costs 6, and a ring costs 1."""
HEAD_GROUPS, _HEAD_GROUPS_COST = "memory.attention_head_groups", 1
_RANKS_COST, _RING_COST = 6, 1
_TO_HOST = ("memory.offload_activations", "memory.offload_optimizer", "memory.offload_param")
_MOST_TIMES_WORKERS = 8
_MOST_TOKENS = 1 << 32
_OUTPUT = "memory.attention_output"
_CHOSEN = (
    _OUTPUT,
    "memory.offload_activations",
    HEAD_GROUPS,
    "memory.offload_optimizer",
    "memory.offload_param",
    "memory.gradient_checkpointing",
)
"""Settings that ``memory.plan: auto`` chooses unless the configuration file sets them."""
_WHOLE_OR_SHARDED = {"weights, whole": "weights", "weights, sharded": "weights"}

Settings = Mapping[str, Any]
"""Values of settings, by dotted path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A set of changes to a configuration, with its cost."""

    settings: Settings
    cost: int
    """Total cost of the changes; see `COSTS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A setting that the planner has chosen, with the reason."""

    path: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.path}={yaml_value(self.value)}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A changed setting and the memory term that this change reduces the most."""

    path: str
    old: Any
    new: Any
    term: str
    place: str
    """Memory in which the term is allocated: ``device`` or ``host``."""
    before: int
    """Bytes of the term before this change, with all earlier changes applied."""
    after: int
    """Bytes of the term after this change."""

    def option(self) -> str:
        """Return the change as a command line option."""
        return f"--set {shlex.quote(f'{self.path}={yaml_value(self.new)}')}"

    def chosen(self) -> Chosen:
        """Return the change as a `Chosen` with the reduced term as its reason."""
        before, after = _apart(self.before / GIB, self.after / GIB)
        reason = (
            f"with {yaml_value(self.old)}, {self.term} would take {before} GiB per {self.place} instead of {after} GiB"
        )
        return Chosen(path=self.path, value=self.new, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result of a search: a configuration and its estimates."""

    config: Config
    changes: tuple[Change, ...]
    memory: MemoryEstimate
    """Estimated memory of one rank: the largest device and host memory of any stage."""
    time: StepTime | None
    """Predicted time of a step with one document per row, or None if there is no prediction for the device."""

    def options(self) -> str:
        """Return the changes as command line options."""
        return " ".join(change.option() for change in self.changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestContexts:
    """Longest contexts that fit, with and without changes to the settings."""

    configured: int
    """Longest context with the configured settings, in tokens; 0 if no context fits."""
    changed: Found | None
    """Longest context with any settings, and the cheapest settings for this context, or None if no context fits."""
    multiple: int
    """Granularity of the search in tokens; both contexts are multiples of this number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstConfig:
    """A first configuration that fits into memory, for ``init`` to write."""

    tree: Mapping[str, Any]
    """Sections of the configuration file, without settings that the planner has chosen."""
    config: Config
    chosen: tuple[Chosen, ...]
    """Settings that the planner has chosen, with reasons."""
    memory: MemoryEstimate
    time: StepTime | None
    """Predicted time of a step with one document per row, or None if there is no prediction for the device."""
    trained_positions: int | None
    """Number of positions that the model was trained on, or None for a model without rotary embeddings."""


def nearest(config: Config, shape: ModelShape) -> Found | None:
    """Return the cheapest changes with which a run fits (empty if it fits already), or None if no changes suffice.

    Up to eight times the configured workers are tried, but only if nothing fits on the configured workers.
    """
    workers = config.cluster.workers
    for times in _powers(1, _MOST_TIMES_WORKERS):
        least = times * workers.min
        if least > MOST_WORKERS:
            break
        limits = WorkerLimits(min=least, max=max(least, workers.max))
        more = {} if times == 1 else {"cluster.workers": limits}
        settings = cheapest(leaner(config, shape, more), lambda settings: fits_with(config, shape, settings))
        if settings is not None:
            return found(config, shape, settings)
    return None


def cheapest(candidates: Iterable[Candidate], fit: Callable[[Settings], bool]) -> Settings | None:
    """Return the settings of the cheapest candidate that fits, or None if no candidate fits."""
    ordered = sorted(candidates, key=lambda one: one.cost)
    return next((one.settings for one in ordered if fit(one.settings)), None)


def fastest(config: Config, shape: ModelShape, options: Mapping[str, Mapping[Any, int]]) -> Settings | None:
    """Return the settings that fit with the lowest predicted time, or None if no settings fit.

    Among settings with equal times, the cheapest are returned. ``options`` maps each setting to choose to its possible
    values and their costs.
    """
    work = full_rows(config)
    times: dict[tuple[int, tuple[tuple[str, Any], ...]], float] = {}
    for candidate in product(options):
        time = configured_time(with_settings(config, candidate.settings), shape, work)
        # Round to three digits, since the prediction is not more accurate.
        times[candidate.cost, tuple(candidate.settings.items())] = 0.0 if time is None else float(f"{time.seconds:.3g}")
    ordered = (dict(settings) for _, settings in sorted(times, key=lambda one: (times[one], one[0])))
    return next((settings for settings in ordered if fits_with(config, shape, settings)), None)


def leanest(config: Config, shape: ModelShape) -> Found:
    """Return the candidate, on the configured workers, that exceeds the memory limits by the smallest factor."""
    limits = config.device_gib or math.inf, config.memory.host_gib or math.inf

    def excess(candidate: Candidate) -> float:
        changed = with_settings(config, candidate.settings)
        if not is_allowed(config, changed):
            return math.inf
        taken = [configured_memory(own, shape) for own in stage_configs(changed)]
        return max(max(one.device_bytes / GIB / limits[0], one.host_bytes / GIB / limits[1]) for one in taken)

    return found(config, shape, min(leaner(config, shape), key=lambda one: (excess(one), one.cost)).settings)


def found(config: Config, shape: ModelShape, settings: Settings) -> Found:
    """Return the configuration with changed settings, the reason for each change, and the estimates."""
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
    """Yield all candidates in which no setting takes more memory than in the configuration.

    All candidates include the changes in ``more``, such as more workers. If ``is_host_full``, offloaded state may move
    back to the device. If that is None, it may only if the host exceeds its limit.
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
        options = of_settings | {HEAD_GROUPS: attention_head_groups(changed, shape)}
        for candidate in product(options):
            settings = {path: value for path, value in candidate.settings.items() if value != value_of(config, path)}
            yield Candidate(settings={**more, **layout.settings, **settings}, cost=layout.cost + candidate.cost)


def yaml_value(value: Any) -> str:
    """Format a setting's value as a single line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {yaml_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_value(one) for one in value) + "]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def fits_with(config: Config, shape: ModelShape, settings: Settings) -> bool:
    """Return whether changes to the settings are valid and all stages of the run fit with these changes."""
    changed = with_settings(config, settings)
    fit = all(fits(own, configured_memory(own, shape)) for own in stage_configs(changed))
    return fit and is_allowed(config, changed)


def is_allowed(config: Config, changed: Config) -> bool:
    """Return whether the changed configuration violates only rules that ``config`` already violates."""
    known = {problem.path for problem in broken_rules(config)}
    return all(problem.path in known for problem in broken_rules(changed))


def product(options: Mapping[str, Mapping[Any, int]]) -> Iterator[Candidate]:
    """Yield all combinations of the settings' values."""
    for values in itertools.product(*(costs.items() for costs in options.values())):
        chosen = dict(zip(options, (value for value, _ in values), strict=True))
        yield Candidate(settings=chosen, cost=sum(cost for _, cost in values))


def _leaner_values(config: Config, path: str, *, is_either_way: bool) -> dict[Any, int]:
    """Return the configured value and all values that take less memory, with their additional cost.

    If ``is_either_way``, values that take less host memory are included too, at a cost of 1 each.
    """
    now, costs = value_of(config, path), COSTS[path]
    means = config.zero_stage if path == _STAGE else now
    if means not in costs:
        # A fixed tile size may become automatic. An optimizer offloaded to NVMe can't be moved further, and compiled
        # MLPs exclude no other setting.
        return {now: 0} | ({"auto": 1} if "auto" in costs else {})
    less = {value: 1 for value, cost in costs.items() if is_either_way and value != now and cost <= costs[now]}
    return {now: 0} | less | {value: cost - costs[means] for value, cost in costs.items() if cost > costs[means]}


def attention_head_groups(config: Config, shape: ModelShape) -> dict[Any, int]:
    """Return numbers of head groups with their costs, doubling from the configured number up to a rank's KV heads."""
    now = config.memory.attention_head_groups
    most = -(-shape.num_kv_heads // (config.parallel.sp_size // ring_size(config, shape)))
    return {now: 0} | {more: _HEAD_GROUPS_COST * n for n, more in enumerate(_powers(now, most)) if n}


def layouts(config: Config, shape: ModelShape, multiple: int | None = None) -> Iterator[Settings]:
    """Yield the changes that lead to each layout to compare; empty for the configured layout.

    For each allowed ``sp`` size that divides the workers, up to three rings are compared: the automatic ring, the
    smallest that keeps the exchange of heads within a node, and the smallest with at most one Ulysses rank per KV head.
    For the configured size, the configured ring is added. Recurrent layers do not support a ring. ``multiple`` divides
    the length of every row; it is None if rows may still be padded to any multiple.
    """
    workers = config.cluster.workers
    for size in allowed_sp(config, shape):
        if workers.min % size or workers.max % size:
            continue
        of_size = {} if size == config.parallel.sp_size else {"parallel.sp_size": size}
        now = ring_size(with_settings(config, of_size), shape)
        rings = {automatic_ring_size(size, shape.num_heads)} | (set() if of_size else {now})
        rings |= {_smallest_ring(size, most) for most in (config.cluster.gpus_per_node, shape.num_kv_heads)}
        for ring in (1,) if shape.mixer_layers else sorted(rings):
            settings = of_size if ring == now else {**of_size, "parallel.ring_size": ring}
            fits_heads = size // ring <= shape.num_heads
            if fits_heads and (multiple is None or fits_rows(with_settings(config, settings), shape, multiple)):
                yield settings


def _smallest_ring(sp_size: int, most: int) -> int:
    return next(ring for ring in range(1, sp_size + 1) if sp_size % ring == 0 and sp_size // ring <= most)


def _layouts(config: Config, shape: ModelShape) -> Iterator[Candidate]:
    """Yield the layouts with at least as many ranks per row, whose rows are padded as in the configured layout."""
    now = config.parallel.sp_size
    yield Candidate(settings={}, cost=0)
    for settings in layouts(config, shape, pad_multiple(config, shape)):
        layout = run_layout(with_settings(config, settings), shape)
        if settings and layout.sp_size >= now:
            doublings = round(math.log2(layout.sp_size / now))
            cost = max(1, _RANKS_COST * doublings + _RING_COST * (layout.ring_size > 1))
            yield Candidate(settings=settings, cost=cost)


def _powers(first: int, most: int) -> list[int]:
    return [first << n for n in range(max(1, (most // first).bit_length()))]


def reasons(config: Config, shape: ModelShape, settings: Settings) -> Iterator[Change]:
    """Apply the changes one at a time, and yield for each change the term that it reduces the most."""
    before = run_memory(config, shape)
    for path, value in settings.items():
        old, config = setting(config, path), with_settings(config, {path: value})
        after = run_memory(config, shape)
        drops = [
            (was, is_, place)
            for place, olds, news in (("device", before.device, after.device), ("host", before.host, after.host))
            for was, is_ in _paired(olds, news)
            # Terms of the load phase have different names in different ZeRO stages, so they can't be compared.
            if was.phase != "load"
        ]
        # Prefer device terms; consider host terms only if no device term shrinks.
        was, is_, place = max(
            drops,
            key=lambda drop: (drop[2] == "device" and drop[0].bytes > drop[1].bytes, drop[0].bytes - drop[1].bytes),
        )
        new = setting(config, path)
        yield Change(path=path, old=old, new=new, term=was.name, place=place, before=was.bytes, after=is_.bytes)
        before = after


def _paired(olds: Sequence[MemoryTerm], news: Iterable[MemoryTerm]) -> Iterator[tuple[MemoryTerm, MemoryTerm]]:
    """Yield each old term with the new term of the same name, or with a term of 0 bytes if there is no such term."""
    by_name = {_WHOLE_OR_SHARDED.get(term.name, term.name): term for term in news}
    for was in olds:
        name = _WHOLE_OR_SHARDED.get(was.name, was.name)
        yield was, by_name.get(name, MemoryTerm(name=was.name, bytes=0, phase=was.phase, source=""))


def chosen_settings(config: Config, shape: ModelShape, stored: Config | None) -> tuple[Config, tuple[Chosen, ...]]:
    """Return the configuration with the planner's choices, and the reason for each choice.

    Settings in the configuration file are never changed. The choices of a stored run are reused if they still fit.
    """
    options = choices(config, shape)
    if not options:
        return config, ()
    kept = {} if stored is None else _stored(stored, options)
    if kept.keys() == options.keys() and fits_with(config, shape, kept):
        same = tuple(Chosen(path=path, value=value, reason="stored with the run") for path, value in kept.items())
        return with_settings(config, kept), same
    # If the host is too small or nothing fits, the memory problem proposes other changes.
    any_host = with_settings(config, {"memory.host_gib": None})
    last = {_OUTPUT: "kernel"} if _OUTPUT in options else {}
    found = fastest(config, shape, options) or fastest(any_host, shape, options) or last
    return with_settings(config, found), tuple(_explained(config, shape, options, found))


def choices(config: Config, shape: ModelShape) -> dict[str, Mapping[Any, int]]:
    """Return the settings that the planner may choose, with the cost of each value."""
    written, options = config.memory.model_fields_set, {}
    for path in _CHOSEN if config.memory.plan == "auto" else ():
        if path.partition(".")[2] not in written:
            options[path] = attention_head_groups(config, shape) if path == HEAD_GROUPS else COSTS[path]
    if _OUTPUT in options:
        options[_OUTPUT] = {value: cost for value, cost in COSTS[_OUTPUT].items() if value != "auto"}
    elif config.memory.attention_output == "auto":
        options[_OUTPUT] = {value: COSTS[_OUTPUT][value] for value in ("both", "kernel")}
    return options


def _stored(stored: Config, options: Mapping[str, Mapping[Any, int]]) -> dict[str, Any]:
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
        if config.device_gib is None:
            reason = "the fastest; memory.device_gib is not set"
        if value != first:
            (saved,) = reasons(with_settings(chosen, {path: first}), shape, {path: value})
            reason = replace(saved, old=first).chosen().reason
        yield Chosen(path=path, value=value, reason=reason)


def _apart(larger: float, smaller: float) -> tuple[str, str]:
    for digits in range(3, 9):
        texts = f"{larger:.{digits}g}", f"{smaller:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def longest_contexts(
    config: Config, shape: ModelShape, choices: Mapping[str, Mapping[Any, int]] | None = None
) -> LongestContexts:
    """Return the longest contexts that fit on the configured workers. The configured context is ignored.

    ``choices`` maps the settings that the planner may choose to their possible values and costs.
    """
    multiple = pad_multiple(config, shape)
    options = (with_settings(config, one.settings) for one in product(choices or {}))
    configured = max((longest_context(one, shape) for one in options if is_allowed(config, one)), default=0)
    least, most = _bounds(config, multiple)
    # At the longest context the host may be full, so offloaded state may move back to the device.
    best, is_host_full = configured, config.memory.host_gib is not None
    # Try the candidate with the least memory first, so that few other candidates allow a longer context.
    for candidate in sorted(leaner(config, shape, is_host_full=is_host_full), key=lambda one: -one.cost):
        longer = max(best + multiple, least * multiple)
        if longer > most * multiple:
            break
        if fits_with(config, shape, {**candidate.settings, "data.context_tokens": longer}):
            best = longest_context(with_settings(config, candidate.settings), shape, above=best)
    changed = nearest(with_settings(config, {"data.context_tokens": best}), shape) if best else None
    return LongestContexts(configured=configured, changed=changed, multiple=multiple)


def longest_context(config: Config, shape: ModelShape, *, above: int = 0) -> int:
    """Return the longest context with which all stages fit, in tokens, as a multiple of `pad_multiple`.

    ``data.context_tokens`` is ignored, but contexts set by stages are not. ``above`` is a context that is known to fit,
    or 0.
    """
    multiple = pad_multiple(config, shape)
    least, most = _bounds(config, multiple)

    def does_fit(number: int) -> bool:
        changed = with_settings(config, {"data.context_tokens": number * multiple})
        return all(fits(own, configured_memory(own, shape)) for own in stage_configs(changed))

    low = max(above // multiple, least - 1)
    high = low + 1
    while high <= most and does_fit(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does_fit(middle) else (low, middle)
    return low * multiple if low >= least else 0


def _bounds(config: Config, multiple: int) -> tuple[int, int]:
    """Return the context's bounds in units of ``multiple``. The lower bound covers every context that a stage sets."""
    own = [stage.context_tokens for stage in config.stages]
    least = -(-max((tokens for tokens in own if tokens is not None), default=0) // multiple)
    # If each stage has its own, a longer context would change nothing.
    return least, least if own and None not in own else _MOST_TOKENS // multiple
