"""Detects, before any worker starts, problems that would keep a run from working. Each comes with a hint.

`shortage` proposes settings after a step has run out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from ray_ulysses.config import Config
from ray_ulysses.config.rules import ring_problems
from ray_ulysses.config.running import WorkerLimits
from ray_ulysses.config.schema import problem_of, with_settings
from ray_ulysses.config.stages import in_stage, stage_config, stage_configs
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.errors import Problem
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory import MemoryEstimate, at_peak, configured_memory, fits
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm
from ray_ulysses.planner.search import (
    Settings,
    cheapest,
    found,
    is_allowed,
    leaner,
    leanest,
    longest_context,
    nearest,
)
from ray_ulysses.planner.settings import allowed_sp, pad_multiple

_LESS = 0.9
"""Fraction of the planned memory that proposed settings may take if the estimate was too low."""

MemoryPlace = Literal["device", "host", "process"]
"""Location where memory ran out: a device, a device's host, or a process that trains on the CPU."""
RAY_BYTES = 2 * GIB
"""Memory of the Ray, Ray Train and data stream processes: 2.0 GiB of unshared pages with Ray 2.60."""
WORKER_BYTES = GIB // 2
"""Memory of a worker process with a tiny model: 0.50 GiB of unshared pages with torch 2.13 on a CPU."""


def heads_problems(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Refuse parallel sizes for which ranks can't share the attention heads or the recurrent layers' heads."""
    if not shape.mixer_layers:
        yield from ring_problems(config, shape)
        return
    valid = [size for size in shape.mixer_sp_sizes if size <= shape.num_heads]
    hint = f"use {', '.join(map(str, valid))}"
    why = f"can't evenly divide the heads of the {shape.mixer_layers} recurrent layers"
    parallel = config.parallel
    if parallel.ring_size is not None and parallel.ring_size > 1:
        rule = (
            f"splits rows over a ring, but {shape.mixer_layers} layers of model_type {shape.model_type!r} are "
            "recurrent and need complete rows"
        )
        yield problem_of(config, "parallel.ring_size", rule, "use 1 or null")
    if parallel.sp_size not in valid:
        yield problem_of(config, "parallel.sp_size", why, hint)
    if wrong := [size for size in parallel.allowed_sp or () if size not in valid]:
        yield problem_of(config, "parallel.allowed_sp", f"{wrong} {why}", hint)


def vocabulary_problems(
    max_token_id: int, vocab_size: int, corpus_path: str, setting: str = "data.path"
) -> Iterator[Problem]:
    """Refuse a corpus with a token id outside the model's vocabulary."""
    if max_token_id >= vocab_size:
        rule = f"contains token id {max_token_id}, but the model's vocab_size={vocab_size} is too small"
        hint = "prepare the corpus with the model's own tokenizer, or use a model whose vocab_size is at least "
        yield Problem(path=setting, value=corpus_path, rule=rule, hint=f"{hint}{max_token_id + 1}")


def position_problems(config: Config, longest_document: int, num_positions: int) -> Iterator[Problem]:
    """Refuse documents that are longer than the model's position table."""
    if longest_document > num_positions:
        rule = f"allows documents of up to {longest_document} tokens, but the model's position table has "
        hint = f"use at most {num_positions}, or a model with rotary embeddings"
        yield problem_of(config, "data.context_tokens", f"{rule}{num_positions} entries", hint)


def context_problems(config: Config, longest_document: int, trained_positions: int | None) -> Iterator[Problem]:
    """Refuse documents longer than a pretrained model's training context, unless ``model.rope`` is set.

    ``trained_positions`` is None for a model without rotary embeddings.
    """
    model = config.model
    if model.init != "pretrained" or model.rope is not None or trained_positions is None:
        return
    if longest_document > trained_positions:
        factor = math.ceil(longest_document / trained_positions)
        rule = (
            f"allows documents of up to {longest_document:,} tokens, but model.path was trained on "
            f"{trained_positions:,} positions (max_position_embeddings) and model.rope is not set"
        )
        hint = (
            f"set model.rope, for example to {{rope_theta: ...}} with a larger base or to {{rope_type: yarn, "
            f"factor: {factor}.0}}, or set model.rope: unchanged"
        )
        yield problem_of(config, "data.context_tokens", rule, hint)


def plan_problems(config: Config, plan: Plan) -> Iterator[Problem]:
    """Refuse a ``run.stop_step`` beyond the planned data, evaluations without rows, and an unknown evaluation set."""
    stop = config.run.stop_step
    # A plan that excludes the rows of a bad step may end before the configured stop.
    if stop is not None and stop > plan.num_steps and not plan.leaves_out_rows:
        rows_per_epoch = max(1, plan.newest.train.num_rows // max(1, len(plan.newest.epochs)))
        missing = (stop - plan.num_steps) * plan.settings.rows_per_step
        epochs = plan.settings.epochs - (-missing // rows_per_epoch)
        rule = (
            f"is beyond the planned data, which ends after {plan.num_steps} steps "
            f"({plan.num_rows} rows, {plan.settings.rows_per_step} per step)"
        )
        hint = f"use at most {plan.num_steps}, or data.epochs={epochs} (if the run has started, with --branch)"
        yield problem_of(config, "run.stop_step", rule, hint)
    if config.run.eval_every_steps is not None and plan.evaluation.num_rows == 0:
        rule = "holds out no document with labels, but run.eval_every_steps is set"
        yield problem_of(config, "data.eval_fraction", rule, "use a larger fraction, or set run.eval_every_steps=null")
    stopping, names = config.run.early_stopping, [one.name for one in plan.evaluation_sets]
    if stopping is not None and stopping.corpus is not None and stopping.corpus not in names:
        hint = f"use one of {', '.join(names)}, or null for all evaluation rows"
        yield problem_of(config, "run.early_stopping.corpus", "is not an evaluation set of this run", hint)


def corpus_problems(config: Config, plan: Plan) -> Iterator[Problem]:
    """Refuse a corpus with fewer rows than a step takes."""
    num_rows = plan.newest.train.num_rows
    if num_rows < plan.settings.rows_per_step and plan.newest.branch is None:
        rule = f"exceeds the corpus, which has only {num_rows} rows, so no step would be full"
        hint = f"use at most {num_rows}, reduce data.context_tokens, increase data.epochs or add documents"
        yield problem_of(config, "data.rows_per_step", rule, hint)


def memory_problems(
    config: Config, shape: ModelShape, memory: MemoryEstimate, run: Config | None = None
) -> Iterator[Problem]:
    """Refuse a run that does not fit into the configured memory, and propose the nearest settings that fit.

    If ``config`` is a stage's configuration, ``run`` must be the run's configuration, to which the proposals apply.
    """
    device = "cluster.device" if config.memory.device_gib is None else "memory.device_gib"
    limits = (
        (device, config.device_gib, memory.device_bytes, memory.device),
        ("memory.host_gib", config.memory.host_gib, memory.host_bytes, memory.host),
    )
    exceeded = [
        (path, limit, needed, terms)
        for path, limit, needed, terms in limits
        if limit is not None and needed > limit * GIB
    ]
    hint = fit_hint(run or config, shape) if exceeded else ""
    for path, limit, needed, terms in exceeded:
        rule = (
            f"each rank is estimated to take {needed / GIB:.1f} of {limit:g} GiB ({memory.note}), mostly for "
            f"{_largest(terms)}"
        )
        yield problem_of(config, path, rule, hint)


def memory_problems_of_run(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Refuse a run if any of its stages does not fit into the configured memory."""
    for number, own in enumerate(stage_configs(config)):
        for problem in memory_problems(own, shape, configured_memory(own, shape), config):
            yield in_stage(problem, config.stages[number]) if config.stages else problem


def fit_hint(config: Config, shape: ModelShape) -> str:
    """Describe the nearest settings with which all stages fit, or the lowest memory use if no settings fit."""
    near, shorter = nearest(config, shape), _shorter_contexts(config, shape)
    if near is not None:
        settings = f"by this estimate, the nearest settings that fit are {near.options()}"
        return f"{settings} (see `plan --fit`); or use {shorter}"
    least = leanest(config, shape)
    device, host = least.memory.device_bytes / GIB, least.memory.host_bytes / GIB
    options = f", with {least.options()}" if least.changes else ""
    return (
        "by this estimate, no settings fit, even with 8 times the workers; the configured workers need at least "
        f"{device:.1f} GiB per device and {host:.1f} GiB per host{options}; use {shorter}"
    )


def _shorter_contexts(config: Config, shape: ModelShape) -> str:
    found = []
    for number, own in enumerate(stage_configs(config)):
        if fits(own, configured_memory(own, shape)):
            continue
        tokens = longest_context(own, shape)
        if not tokens:
            return "a smaller model"
        found.append(f"{entry(config, number)}.context_tokens={tokens} at most")
    return " and ".join(found)


def entry(config: Config, number: int) -> str:
    """Return the path of the section with a stage's ``context_tokens``. For a run without stages, this is ``data``."""
    if not config.stages:
        return "data"
    name = config.stages[number].name
    # `--set` splits paths at dots, so use the stage's number if its name contains a dot.
    return f"stages.{number if '.' in name else name}"


def _largest(terms: tuple[MemoryTerm, ...]) -> str:
    ordered = sorted(at_peak(terms), key=lambda term: term.bytes, reverse=True)
    return " and ".join(f"{term.name} ({term.bytes / GIB:.1f} GiB)" for term in ordered[:2])


def local_bytes(config: Config, shape: ModelShape) -> int:
    """Estimate the memory of a local Ray cluster with all of the run's workers, in the most demanding stage."""
    has_gpu = config.cluster.gpus_per_worker > 0
    memories = [configured_memory(own, shape) for own in stage_configs(config)]
    most = max(memory.host_bytes + (0 if has_gpu else memory.device_bytes) for memory in memories)
    return RAY_BYTES + config.cluster.workers.max * (WORKER_BYTES + most)


def local_problem(config: Config, shape: ModelShape, free_bytes: int) -> Problem | None:
    """Return the problem if this machine has too little memory for the run's workers, or None."""
    needed, workers = local_bytes(config, shape), config.cluster.workers.max
    if needed <= free_bytes:
        return None
    each = (needed - RAY_BYTES) / workers
    rule = (
        f"needs an estimated {needed / GIB:.1f} GiB of memory ({RAY_BYTES / GIB:.1f} for Ray and {each / GIB:.2f} for "
        f"each worker), but this machine has {max(0, free_bytes) / GIB:.1f} GiB free"
    )
    fitting = _most_that_fit(config, shape, free_bytes)
    if fitting:
        hint = f"use {fitting} (a run can resume with any number of workers), or a cluster (cluster.address)"
    else:
        hint = "free up memory, use a smaller model or context, or use a cluster (cluster.address)"
    return Problem(path="cluster.workers", value=workers, rule=rule, hint=hint)


def gpu_problem(config: Config, num_gpus: int) -> Problem | None:
    """Return the problem if this machine has too few GPUs for the run's workers, or None."""
    least, sp_size = config.cluster.workers.min, config.parallel.sp_size
    if config.cluster.gpus_per_worker == 0 or least <= num_gpus:
        return None
    fitting = num_gpus // sp_size * sp_size
    fewer = f"use cluster.workers={fitting} (a run can resume with any number)," if fitting else "use 0 (CPU training),"
    rule = f"requires {least} GPUs for cluster.workers={least}, but torch finds {num_gpus} on this machine"
    return problem_of(config, "cluster.gpus_per_worker", rule, f"{fewer} or use a cluster (cluster.address)")


def _most_that_fit(config: Config, shape: ModelShape, free_bytes: int) -> int:
    sp_size = config.parallel.sp_size
    # An upper bound: this many processes fit without a model.
    most = min(config.cluster.workers.max - 1, max(0, free_bytes - RAY_BYTES) // WORKER_BYTES)
    for workers in range(most // sp_size * sp_size, 0, -sp_size):
        limits = WorkerLimits(min=workers, max=workers)
        fewer = config.model_copy(update={"cluster": config.cluster.model_copy(update={"workers": limits})})
        if local_bytes(fewer, shape) <= free_bytes:
            return workers
    return 0


def shortage(
    config: Config, shape: ModelShape, peak_gib: float, what: str, *, stage: int = 0, place: MemoryPlace = "device"
) -> str:
    """Describe planned and measured memory, the largest terms, and the nearest settings that take less memory.

    The measured peak is taken as the memory that is available. Proposed settings must fit into the peak in the failed
    stage. If the estimate was below the peak, they must also take a tenth less than planned. ``what`` is a participle
    that describes the measured memory, such as ``allocated``.
    """
    terms, needed = _needed(configured_memory(stage_config(config, stage), shape), place)
    planned_gib = needed / GIB
    largest = sorted(terms, key=lambda one: -one.bytes)[:3]
    said = ", ".join(f"{one.name} {one.bytes / GIB:.3g}" for one in largest)
    most_bytes = min(peak_gib, _LESS * planned_gib) * GIB
    return (
        f"{peak_gib:.3g} GiB were {what} at the peak, and {planned_gib:.3g} GiB were planned (largest: {said} GiB); "
        f"{_way_out(config, shape, stage, place, most_bytes)}"
    )


def _needed(memory: MemoryEstimate, place: MemoryPlace) -> tuple[tuple[MemoryTerm, ...], int]:
    """Return the terms that are allocated at the peak in ``place``, and the bytes that a measurement would show."""
    if place == "device":
        return at_peak(memory.device), memory.device_bytes
    if place == "host":
        return at_peak(memory.host), memory.host_bytes
    # The same sum as in `local_bytes`.
    return (*at_peak(memory.device), *at_peak(memory.host)), WORKER_BYTES + memory.device_bytes + memory.host_bytes


def _way_out(config: Config, shape: ModelShape, stage: int, place: MemoryPlace, most_bytes: float) -> str:
    """Describe the nearest settings with which a stage takes at most ``most_bytes`` on the configured workers.

    More ranks per row in this stage are proposed only if no other change suffices.
    """

    def options_of(config: Config) -> str | None:
        def does_fit(settings: Settings) -> bool:
            changed = with_settings(config, settings)
            own = stage_config(changed, stage)
            memory = configured_memory(own, shape)
            is_enough = fits(own, memory) and _needed(memory, place)[1] <= most_bytes
            return is_enough and is_allowed(config, changed)

        # If memory ran out on the host, offloaded state may move back to the device.
        candidates = leaner(config, shape, is_host_full=None if place == "device" else True)
        settings = cheapest(candidates, does_fit)
        return None if settings is None else found(config, shape, settings).options()

    if (options := options_of(config)) is not None:
        return f"the nearest settings that take less memory: {options}"
    where = entry(config, stage)
    for size, wider in _wider(config, shape, stage):
        if (options := options_of(wider)) is not None:
            options = f"--set {where}.sp_size={size} {options}".rstrip()
            return f"the nearest settings that take less memory, on a branch of the run (--branch): {options}"
    return (
        "no settings would save a tenth of the memory with these workers; use more workers, reduce "
        f"{where}.context_tokens, or use a smaller model"
    )


def _wider(config: Config, shape: ModelShape, number: int) -> Iterator[tuple[int, Config]]:
    """Yield each larger ``sp_size`` that a stage can use with the same data plan, and the changed configuration."""
    own = config.stages[number].sp_size if config.stages else None
    for size in allowed_sp(config, shape):
        if own is None or size <= own:
            continue
        stages = list(config.stages)
        stages[number] = stages[number].model_copy(update={"sp_size": size})
        changed = config.model_copy(update={"stages": tuple(stages)})
        if pad_multiple(changed, shape) == pad_multiple(config, shape) and is_allowed(config, changed):
            yield size, changed
