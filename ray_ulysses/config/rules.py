"""Rules between settings, for constraints that involve more than one field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

from ray_ulysses.config.model import AdapterSection, RopeSection
from ray_ulysses.config.objective import SETTINGS_OF_KIND
from ray_ulysses.config.reference_to_checkpoint import MlflowReference, parse_reference
from ray_ulysses.config.running import mlflow_is_on
from ray_ulysses.config.schema import Config, problem_of, zero_stage
from ray_ulysses.config.stages import divisors, in_stage, stage_config, stage_configs, stage_problems
from ray_ulysses.errors import Problem, UserError
from ray_ulysses.model_shape import ModelShape

NO_CORPUS = "no corpus is specified"
"""The rule that only `plan` may break."""


def _profiled_steps_come(config: Config) -> Iterator[Problem]:
    profile, stop, most = config.run.profile, config.run.stop_step, config.cluster.workers.max
    if profile is None:
        return
    if stop is not None and profile.steps[-1] > stop:
        rule = f"run.stop_step={stop} ends the run before step {profile.steps[-1]}"
        yield problem_of(config, "run.profile.steps", rule, "use earlier steps, or increase run.stop_step")
    if profile.ranks[-1] >= most:
        rule = f"the ranks of {most} workers (cluster.workers) are 0 to {most - 1}"
        yield problem_of(config, "run.profile.ranks", rule, f"use ranks up to {most - 1}")


def _network_storage_has_a_server(config: Config) -> Iterator[Problem]:
    is_remote = not isinstance(config.run_dir, Path)
    if not (is_remote or config.run.storage_kind == "nfs") or not mlflow_is_on(config.tracking):
        return
    uri = config.tracking.uri
    if uri is None or not (uri == "databricks" or uri.startswith(("http://", "https://"))):
        rule = "run.storage_kind=nfs requires an MLflow server, since SQLite is not safe on network file systems"
        if is_remote:
            rule = f"run.storage={config.run.storage} requires an MLflow server: SQLite can't run in an object store"
        hint = "set the server's http:// or https:// address, or remove mlflow from tracking.trackers"
        yield problem_of(config, "tracking.uri", rule, hint)


def _event_files_have_a_path(config: Config) -> Iterator[Problem]:
    if "tensorboard" in config.trackers and not isinstance(config.run_dir, Path):
        rule = f"TensorBoard appends to event files, which run.storage={config.run.storage} does not support"
        hint = "remove tensorboard, or set run.storage to a path that every node can access"
        yield problem_of(config, "tracking.trackers", rule, hint)


def _mlflow_reference_has_a_server(config: Config) -> Iterator[Problem]:
    reference, tracking = config.model.resume_from, config.tracking
    if reference is None or mlflow_is_on(tracking) or not isinstance(parse_reference(reference), MlflowReference):
        return
    yield Problem(
        path="tracking.trackers",
        value=list(tracking.trackers) if tracking.enabled else [],
        rule=f"model.resume_from={reference!r} requires MLflow, which is not enabled",
        hint="track the run in MLflow too, or set model.resume_from to the other run's directory or checkpoint store",
    )


def broken_rules(config: Config) -> tuple[Problem, ...]:
    """Return a problem for each broken rule between settings, for a configuration that is valid in each field."""
    found = [problem for rule in (*_RULES, _tiles_are_shorter_than_rows) for problem in rule(config)]
    for number, stage in enumerate(config.stages):
        of_stage = [problem for rule in _RULES for problem in rule(stage_config(config, number))]
        found += [in_stage(problem, stage) for problem in of_stage if problem not in found]
    return (*found, *stage_problems(config))


def broken_rules_of_part(sections: Mapping[str, Mapping[str, object]], has_stages: bool) -> tuple[Problem, ...]:
    """Return a problem for each broken rule in a configuration in which some settings are invalid.

    Args:
        sections: The valid settings, by section and name. A rule that needs an invalid setting is skipped, so that one
            mistake is not reported again by every rule that involves the setting.
        has_stages: Whether there are stages. Settings inside stages are not checked.
    """
    usable = {name: _Part(values) for name, values in sections.items()}
    part = cast(Config, _Part({**usable, "stages": (None,) * has_stages}))
    problems: list[Problem] = []
    for rule in (*_RULES, *(() if has_stages else (_tiles_are_shorter_than_rows,))):
        try:
            problems.extend(rule(part))
        except _UnusableError:
            continue
    return tuple(problems)


class _UnusableError(Exception):
    """A rule read a setting that is invalid."""


class _Part:
    """Stand-in for a section or a configuration in which only some settings are valid."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> object:
        if name not in self._values:
            raise _UnusableError(name)
        value = self._values[name]
        # Entries of a list, such as data.sources, have settings of their own.
        return [_Part(one) if isinstance(one, Mapping) else one for one in value] if isinstance(value, list) else value


def _weights_have_a_source(config: Config) -> Iterator[Problem]:
    if config.model.path is not None:
        return
    if config.model.init == "pretrained":
        hint = "set model.path to a local directory or a hub id, or set model.init=random"
        yield problem_of(config, "model.path", "model.init=pretrained requires the weights of a model", hint)
    elif config.model.part == "text":
        rule = "model.part=text exports the decoder into a copy of the complete checkpoint"
        yield problem_of(config, "model.path", rule, "set model.path to the directory of the complete checkpoint")
    elif config.model.config is None:
        hint = "add the configuration inline under model.config, or set model.path to a directory with a config.json"
        yield problem_of(config, "model.config", "model.init=random requires a model configuration", hint)


def _pretrained_weights_have_a_rate(config: Config) -> Iterator[Problem]:
    if config.model.init == "pretrained" and "lr" not in config.optimizer.model_fields_set:
        yield Problem(
            path="optimizer.lr",
            rule="model.init=pretrained requires a learning rate: a high one destroys what the model has learned",
            hint="set it; 1e-5 to 3e-5 is usual for all weights, 1e-4 to 2e-4 for an adapter",
        )


def _biases_are_exported(config: Config) -> Iterator[Problem]:
    if config.optimizer.router_bias_rate is not None and config.model.adapter is not None:
        rule = "changes buffers of the model, which the export of an adapter does not contain"
        hint = "remove it, or remove model.adapter to train all weights"
        yield problem_of(config, "optimizer.router_bias_rate", rule, hint)


def _data_has_a_source(config: Config) -> Iterator[Problem]:
    path, sources = config.data.path, config.data.sources
    if path is None and sources is None and not config.stages:
        # Each stage may have its own corpora, and this rule is applied to each stage too.
        hint = "set data.path to a directory written by `ray-ulysses prepare`, or list corpora under data.sources"
        yield problem_of(config, "data.path", NO_CORPUS, hint)
    elif path is not None and sources is not None:
        hint = "list every corpus under data.sources, and remove data.path"
        yield problem_of(config, "data.path", "data.sources is also set", hint)


def _prepared_corpus_has_a_place(config: Config) -> Iterator[Problem]:
    if config.data.prepare is not None and config.data.path is None:
        hint = "set data.path to the directory of the corpus, or remove data.prepare"
        yield problem_of(config, "data.path", "data.prepare writes the corpus to data.path, which is not set", hint)


def _weights_decide(config: Config) -> Iterator[Problem]:
    weights = [source.weight for source in config.data.sources or ()]
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        rule, hint = "some sources have a weight and some have none", "set the weight of every source, or of none"
    elif given and sum(given) == 0:
        rule, hint = "the weights sum to zero, so no source is used", "set at least one weight above 0"
    else:
        return
    yield Problem(path="data.sources", value=weights, rule=rule, hint=hint)


def _best_has_a_metric(config: Config) -> Iterator[Problem]:
    wants_evaluations = config.checkpoint.keep_best > 0 and config.checkpoint.best_metric == "eval_loss"
    if wants_evaluations and config.run.eval_every_steps is None:
        rule = "checkpoint.best_metric=eval_loss requires evaluations, but run.eval_every_steps is null"
        hint = "set run.eval_every_steps to a divisor or a multiple of checkpoint.every_steps, or set "
        yield problem_of(config, "checkpoint.keep_best", rule, hint + "checkpoint.best_metric: loss")


def _nvme_has_a_place(config: Config) -> Iterator[Problem]:
    memory = config.memory
    if memory.offload_optimizer != "nvme":
        return
    if memory.nvme_path is None:
        hint = "use a directory on a local NVMe disk of each node, or set memory.offload_optimizer: cpu"
        yield problem_of(config, "memory.nvme_path", "memory.offload_optimizer=nvme requires a swap directory", hint)
    if memory.zero_stage in (1, 2):
        rule = f"memory.zero_stage={memory.zero_stage} keeps the optimizer state in memory"
        hint = "set memory.zero_stage: 3, or memory.offload_optimizer: cpu"
        yield problem_of(config, "memory.offload_optimizer", rule, hint)
    if config.checkpoint.host_buffers == 0:
        rule = "memory.offload_optimizer=nvme requires a host buffer, from which checkpoints are written"
        yield problem_of(config, "checkpoint.host_buffers", rule, "set checkpoint.host_buffers to 1 or 2")


def _optimizer_fits(config: Config) -> Iterator[Problem]:
    kind, offload = config.optimizer.kind, config.memory.offload_optimizer
    if kind == "muon" and config.model.adapter is not None:
        rule = "orthogonalizes updates of complete weights, and the two factors of an adapter are not weights"
        yield problem_of(config, "optimizer.kind", rule, "use adamw or adamw_bf16_moments, or remove model.adapter")
    if kind == "muon" and offload != "none":
        rule = f"orthogonalizes matrices on the device, but memory.offload_optimizer={offload} updates them on the host"
        yield problem_of(config, "optimizer.kind", rule, "set memory.offload_optimizer: none, or use adamw")
    if kind == "adamw_bf16_moments" and offload == "nvme":
        rule = "memory.offload_optimizer=nvme swaps only fp32 moments"
        yield problem_of(config, "optimizer.kind", rule, "set memory.offload_optimizer: none or cpu, or use adamw")


def _offloaded_weights_are_sharded(config: Config) -> Iterator[Problem]:
    memory = config.memory
    if memory.offload_param != "none" and (memory.zero_stage in (1, 2) or memory.offload_optimizer != "cpu"):
        rule = (
            "requires memory.zero_stage=auto or 3 and memory.offload_optimizer=cpu, but they are "
            f"{memory.zero_stage} and {memory.offload_optimizer}"
        )
        yield problem_of(config, "memory.offload_param", rule, "set both, or memory.offload_param: none")


def _secondary_shards_have_peers(config: Config) -> Iterator[Problem]:
    memory, most, per_node = config.memory, config.cluster.workers.max, config.cluster.gpus_per_node
    if memory.zero_secondary == "none":
        return
    if memory.zero_stage in (1, 2):
        rule = f"requires memory.zero_stage=3, but memory.zero_stage={memory.zero_stage} does not shard the weights"
        yield problem_of(config, "memory.zero_secondary", rule, "set memory.zero_stage: 3, or zero_secondary: none")
    if memory.offload_param != "none":
        rule = "is not supported for weights in host memory (memory.offload_param=cpu)"
        yield problem_of(config, "memory.zero_secondary", rule, "set one of the two to none")
    if most > per_node == 1:
        rule = "needs nodes with at least two workers, but cluster.gpus_per_node=1"
        hint = "set memory.zero_secondary: none, or cluster.gpus_per_node to the number of GPUs per node"
        yield problem_of(config, "memory.zero_secondary", rule, hint)
    elif most > per_node and math.gcd(most, per_node) == 1:
        rule = (
            f"needs groups of at least two workers that never cross nodes, but cluster.workers={most} and "
            f"cluster.gpus_per_node={per_node} have no common divisor above 1"
        )
        hint = f"use a multiple of {per_node} workers, or memory.zero_secondary: none"
        yield problem_of(config, "memory.zero_secondary", rule, hint)


def _offloaded_activations_are_kept(config: Config) -> Iterator[Problem]:
    offloaded = config.memory.offload_activations
    if offloaded and not config.memory.gradient_checkpointing:
        rule = "requires gradient checkpointing, but memory.gradient_checkpointing is false"
        hint = "set memory.gradient_checkpointing: true, or memory.offload_activations: []"
        yield problem_of(config, "memory.offload_activations", rule, hint)
    elif "attention_outputs" in offloaded and config.memory.attention_output == "none":
        rule = "includes attention_outputs, but memory.attention_output=none keeps no outputs"
        hint = "set memory.attention_output: kernel, or remove attention_outputs"
        yield problem_of(config, "memory.offload_activations", rule, hint)


def _compiled_layers_are_whole(config: Config) -> Iterator[Problem]:
    memory, stage = config.memory, zero_stage(config)
    if config.model.compile == "mlp" and not memory.tiles_mlps:
        rule = "compiles tiles of MLPs, but MLPs are not tiled"
        yield problem_of(config, "model.compile", rule, "set memory.mlp_tile to a number, or model.compile: false")
    elif config.model.compile is True and (memory.gradient_checkpointing or stage == 3):
        rule = (
            "requires memory.gradient_checkpointing=false and memory.zero_stage=1 or 2, but they are "
            f"{str(memory.gradient_checkpointing).lower()} and {stage}"
        )
        yield problem_of(config, "model.compile", rule, "set both, or model.compile: false")


def _heads_allow_sp(config: Config) -> Iterator[Problem]:
    if config.model.config is None or config.model.part == "text":
        # The sizes of a decoder inside another model depend on the defaults of its model type, which `plan` reads.
        return
    try:
        shape = ModelShape.from_config_dict(config.model.config)
    except UserError as error:
        path, _, rule = str(error).partition(": ")
        yield Problem(path=path, rule=rule, hint="correct the model's configuration")
        return
    yield from ring_problems(config, shape)


def ring_problems(config: Config, shape: ModelShape) -> Iterator[Problem]:
    """Yield a problem if a ring leaves more ranks to share the query heads than there are heads."""
    sp_size, ring_size, heads = config.parallel.sp_size, config.parallel.ring_size, shape.num_heads
    # A ring that does not divide the ranks is refused by another rule.
    if ring_size is None or sp_size % ring_size or sp_size // ring_size <= heads:
        return
    rings = [str(ring) for ring in range(1, sp_size + 1) if sp_size % ring == 0 and sp_size // ring <= heads]
    shared = sp_size // ring_size
    rule = f"leaves {heads} attention heads for {shared} ranks (parallel.sp_size={sp_size}), which need one head each"
    yield problem_of(config, "parallel.ring_size", rule, f"use {', '.join(rings)}, or null to choose automatically")


def _ring_divides_sp(config: Config) -> Iterator[Problem]:
    sp_size, ring_size = config.parallel.sp_size, config.parallel.ring_size
    if ring_size is not None and sp_size % ring_size:
        hint = f"use {divisors(sp_size)}, or null to choose automatically"
        yield problem_of(config, "parallel.ring_size", f"does not divide parallel.sp_size={sp_size}", hint)


def _sp_divides_workers(config: Config) -> Iterator[Problem]:
    sp_size, limits = config.parallel.sp_size, config.cluster.workers
    of_limits = {"cluster.workers.min": limits.min, "cluster.workers.max": limits.max}
    for setting, workers in {"cluster.workers": limits.min}.items() if limits.is_fixed else of_limits.items():
        if workers % sp_size:
            below, above = workers // sp_size * sp_size, (workers // sp_size + 1) * sp_size
            counts = f"{below} or {above}" if below else f"{above}"
            hint = f"use an sp_size of {divisors(workers)}, or {counts} workers (a multiple of {sp_size})"
            yield problem_of(config, "parallel.sp_size", f"does not divide {setting}={workers}", hint)
    if limits.min > limits.max:
        hint = f"write {{min: {limits.max}, max: {limits.min}}}"
        yield problem_of(config, "cluster.workers.min", f"is more than cluster.workers.max={limits.max}", hint)


def _sp_is_allowed(config: Config) -> Iterator[Problem]:
    sp_size, allowed = config.parallel.sp_size, config.parallel.allowed_sp
    if allowed is not None and sp_size not in allowed:
        rule = f"is not in parallel.allowed_sp ({', '.join(str(size) for size in allowed)})"
        yield problem_of(config, "parallel.sp_size", rule, "use one of these, or start a new run that allows it")


def _context_holds_the_padding(config: Config) -> Iterator[Problem]:
    sizes = config.parallel.allowed_sp or (config.parallel.sp_size,)
    multiple = math.lcm(*(_least_multiple(config, size) for size in sizes))
    if config.data.context_tokens < multiple:
        rule = f"is below {multiple}, the multiple to which rows are padded"
        yield problem_of(config, "data.context_tokens", rule, f"use {multiple} or more")


def _least_multiple(config: Config, sp_size: int) -> int:
    """Return the number that must divide row lengths with an ``sp_size``, as far as the file determines it."""
    ring_size = config.parallel.ring_size if sp_size == config.parallel.sp_size else None
    num_heads = (config.model.config or {}).get("num_attention_heads")
    takes_ring = isinstance(num_heads, int) and sp_size > num_heads if ring_size is None else ring_size > 1
    return 2 * sp_size if takes_ring else sp_size


def _tiles_are_shorter_than_rows(config: Config) -> Iterator[Problem]:
    """Yield a problem if a tile is longer than every row. In a stage with shorter rows, each row is one tile."""
    of_stages = stage_configs(config) if config.stages else (config,)
    longest, context, sp_size = max(
        (-(-own.data.context_tokens // own.parallel.sp_size), own.data.context_tokens, own.parallel.sp_size)
        for own in of_stages
    )
    for path, tile in (("memory.loss_tile", config.memory.loss_tile), ("memory.mlp_tile", config.memory.mlp_tile)):
        if isinstance(tile, int) and tile > longest:
            rule = (
                f"exceeds the {longest} tokens that a rank has of the longest row "
                f"(data.context_tokens={context} / parallel.sp_size={sp_size}), so nothing would be tiled"
            )
            yield problem_of(config, path, rule, f"use at most {longest}, auto or off")


def _planned_memory_has_a_limit(config: Config) -> Iterator[Problem]:
    if config.memory.plan == "auto" and config.memory.device_gib is None and config.cluster.device is None:
        rule = "memory.plan=auto requires a memory limit"
        hint = "set cluster.device or the memory of one GPU in GiB, such as 79, or set memory.plan: off"
        yield problem_of(config, "memory.device_gib", rule, hint)


def _warmup_ends_before_the_horizon(config: Config) -> Iterator[Problem]:
    ratio, warmup, horizon = config.schedule.warmup_ratio, config.schedule.warmup_steps, config.schedule.horizon_steps
    if horizon is not None and ratio is None and warmup >= horizon:
        hint = f"use at most {horizon - 1}, or increase schedule.horizon_steps"
        yield problem_of(config, "schedule.warmup_steps", f"must be below schedule.horizon_steps={horizon}", hint)


def _evaluation_has_documents(config: Config) -> Iterator[Problem]:
    has_documents = config.data.eval_fraction > 0.0 or config.data.validation
    if config.run.eval_every_steps is not None and not has_documents:
        rule = "requires data.validation, or data.eval_fraction above 0"
        hint = "list corpora, set a fraction such as 0.01, or remove run.eval_every_steps"
        yield problem_of(config, "run.eval_every_steps", rule, hint)


def _early_stopping_has_losses(config: Config) -> Iterator[Problem]:
    if config.run.early_stopping is None:
        return
    if config.run.eval_every_steps is None:
        hint = "set the number of steps between evaluations, or remove run.early_stopping"
        yield problem_of(config, "run.eval_every_steps", "must be set, because run.early_stopping is set", hint)
    if config.stages:
        rule = "compares validation losses, but losses of different stages are not comparable"
        yield problem_of(config, "run.early_stopping", rule, "remove it or the stages")


def _objective_fits(config: Config) -> Iterator[Problem]:
    kind = config.objective.kind
    for name in config.objective.foreign_settings():
        others = " or ".join(one for one, names in SETTINGS_OF_KIND.items() if name in names)
        rule = f"is not a setting of objective.kind={kind}"
        yield problem_of(config, f"objective.{name}", rule, f"remove it; it applies to objective.kind={others}")
    if config.objective.task != "causal_lm" and config.run.sample_every_steps is not None:
        rule = f"generates text, which a model trained with objective.kind={kind} can't do"
        yield problem_of(config, "run.sample_every_steps", rule, "remove it")
    if config.objective.task in ("masked_lm", "embedding") and config.model.adapter is not None:
        rule = f"adapters are for models that predict the next token, and objective.kind={kind} trains another"
        yield problem_of(config, "model.adapter", rule, "remove it; model.freeze can freeze parameters")


def _documents_stay_whole(config: Config) -> Iterator[Problem]:
    kind, unit = config.objective.kind, config.objective.counts
    if unit == "tokens":
        return
    if config.data.overlong != "drop":
        rule = f"would divide {unit}, which objective.kind={kind} needs whole"
        yield problem_of(config, "data.overlong", rule, f"use drop, which leaves out {unit} that are longer than a row")
    if config.data.packing == "concat":
        rule = f"would divide {unit}, which objective.kind={kind} needs whole"
        yield problem_of(config, "data.packing", rule, "use best_fit or wide_fit")
    if config.optimizer.z_loss:
        yield problem_of(
            config, "optimizer.z_loss", f"is a mean over tokens, but the loss of objective.kind={kind} is not", "use 0"
        )
    if unit == "documents" and config.model.adapter is not None:
        rule = f"would leave the head frozen, which objective.kind={kind} trains"
        yield problem_of(config, "model.adapter", rule, "remove it; model.freeze can freeze other parameters")
    if len(config.objective.classes) == 1:
        yield problem_of(config, "objective.classes", "has a single class", "name at least two classes")


def _start_is_the_reference(config: Config) -> Iterator[Problem]:
    kind, adapter = config.objective.kind, config.model.adapter
    if not config.objective.needs_reference:
        return
    if config.model.init == "random":
        rule = f"would start from random weights, but objective.kind={kind} compares with the model in model.path"
        yield problem_of(config, "model.init", rule, "use pretrained")
    if isinstance(config.model.rope, RopeSection):
        rule = f"changes the positions, but objective.kind={kind} compares with the model in model.path as it is stored"
        yield problem_of(config, "model.rope", rule, "set model.path to an export of the model with these positions")
    starts = {"model.base_dtype": config.model.base_dtype if config.model.base_dtype != "bf16" else None,
              "model.resume_from": config.model.resume_from,
              "model.adapter.from": None if adapter is None else adapter.from_}  # fmt: skip
    for name, value in starts.items():
        if value is not None:
            rule = f"changes the model at the start, but the reference of objective.kind={kind} is model.path as stored"
            hint = "remove it; a model with these weights can be exported and set as model.path"
            yield Problem(path=name, value=str(value), rule=rule, hint=hint)


def _kernel_suits_the_device(config: Config) -> Iterator[Problem]:
    kernel = config.model.attention
    has_gpu = config.cluster.gpus_per_worker > 0
    needs_gpu = kernel in ("flash_attn_4", "flash_attn_3", "flash_attn", "cudnn", "varlen")
    if needs_gpu and not has_gpu:
        rule, hint = "the kernel requires a GPU, but cluster.gpus_per_worker is 0", "use auto or sdpa"
    elif kernel == "cudnn" and config.objective.task == "masked_lm":
        rule, hint = "the kernel is not used for bidirectional attention", "use auto, flash_attn or varlen"
    elif needs_gpu and config.model.dtype == "fp32":
        rule, hint = "the kernel does not support fp32, but model.dtype is fp32", "use auto or math"
    elif kernel == "sdpa" and has_gpu:
        rule = f"the kernel runs on CPU only, but cluster.gpus_per_worker is {config.cluster.gpus_per_worker:g}"
        hint = "use auto"
    else:
        return
    yield problem_of(config, "model.attention", rule, hint)


def _quantized_base_is_frozen(config: Config) -> Iterator[Problem]:
    if config.model.base_dtype == "bf16":
        return
    if config.model.adapter is None:
        rule = "quantized weights can't be trained, but without model.adapter all weights are trained"
        yield problem_of(config, "model.base_dtype", rule, "add model.adapter, or remove model.base_dtype")
    elif isinstance(config.model.adapter, AdapterSection) and config.model.adapter.dora:
        # If another setting is invalid, a section within a section is still a dict.
        rule = "DoRA reads the norms of the frozen weights, which is not supported for quantized weights"
        yield problem_of(config, "model.base_dtype", rule, "set model.adapter.dora: false, or remove model.base_dtype")
    if config.model.compile:
        rule = (
            f"layers with quantized weights can't be compiled, but model.compile is {str(config.model.compile).lower()}"
        )
        yield problem_of(config, "model.base_dtype", rule, "set model.compile: false, or remove model.base_dtype")


_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _weights_have_a_source,
    _pretrained_weights_have_a_rate,
    _biases_are_exported,
    _data_has_a_source,
    _prepared_corpus_has_a_place,
    _weights_decide,
    _sp_divides_workers,
    _heads_allow_sp,
    _ring_divides_sp,
    _sp_is_allowed,
    _context_holds_the_padding,
    _planned_memory_has_a_limit,
    _warmup_ends_before_the_horizon,
    _evaluation_has_documents,
    _early_stopping_has_losses,
    _objective_fits,
    _documents_stay_whole,
    _start_is_the_reference,
    _best_has_a_metric,
    _nvme_has_a_place,
    _optimizer_fits,
    _offloaded_weights_are_sharded,
    _secondary_shards_have_peers,
    _offloaded_activations_are_kept,
    _compiled_layers_are_whole,
    _quantized_base_is_frozen,
    _kernel_suits_the_device,
    _network_storage_has_a_server,
    _event_files_have_a_path,
    _mlflow_reference_has_a_server,
    _profiled_steps_come,
)
