"""Compares the settings of a resume with those of the run: some may change, others identify the run.

A setting that determines which tokens a step trains, in which order, or what a step does with them must stay the same;
one that determines where, on how many workers, for how long or how verbosely may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ray_ulysses.config.difference import Difference, differences
from ray_ulysses.config.schema import Config
from ray_ulysses.config.stages import stage_config
from ray_ulysses.errors import NOT_GIVEN, Problem, shown

#: Settings that stay the same for the life of a run, with the reason.
FIXED: dict[str, str] = {
    "run.name": "it names the run",
    "run.seed": "it determines the weights and the order of the data",
    "model.path": "another model is another run",
    "model.init": "another model is another run",
    "model.config": "another model is another run",
    "model.part": "another model is another run",
    "model.rope": "other positions make another model",
    "model.adapter": "it determines which weights are trained",
    "model.dtype": "the precision of the weights shapes the loss curve",
    "data.eval_fraction": "it determines which documents are trained on",
    "parallel.allowed_sp": "it determines how rows are padded",
    "optimizer.lr": "it shapes the loss curve",
    "optimizer.betas": "they shape the loss curve",
    "optimizer.eps": "it shapes the loss curve",
    "optimizer.weight_decay": "it shapes the loss curve",
    "optimizer.max_grad_norm": "it shapes the loss curve",
    "optimizer.z_loss": "it shapes the loss curve",
    "optimizer.router_loss": "it shapes the loss curve",
    "schedule.kind": "it shapes the loss curve",
    "schedule.warmup_steps": "it shapes the loss curve",
    "schedule.horizon_steps": "it shapes the loss curve",
    "schedule.decay_steps": "it shapes the loss curve",
    "schedule.min_lr_ratio": "it shapes the loss curve",
    "tracking.experiment": "a run is one MLflow run for its whole life",
}

# The names of a run, here and in MLflow: its state may be continued under another name.
_NAMES = frozenset({"run.name", "tracking.experiment"})
_MOST_LISTED = 6

#: Settings of the data plan: they stay the same unless ``train --branch`` requests a branch of the plan.
BRANCHABLE: dict[str, str] = {
    "data.path": "it determines what is trained on",
    "data.sources": "they determine what is trained on",
    "data.context_tokens": "it determines how documents are packed into rows",
    "data.rows_per_step": "it determines the rows of every step",
    "data.packing": "it determines how rows are filled",
    "data.overlong": "it determines which tokens are trained on",
    "data.balance_steps": "it determines the rows of every step",
    "data.row_order": "it determines the rows of every step",
    "data.epochs": "it determines the plan and its length",
    "data.eval_rows": "evaluations must compare the same rows",
}

#: Settings that may change on resume, with a note.
FREE: dict[str, str] = {
    "run.storage": "if the directory was moved or is mounted elsewhere",
    "run.storage_kind": "",
    "run.stop_step": "a later step continues the run; the learning rate is not affected",
    "run.log_every_steps": "",
    "run.eval_every_steps": "",
    "run.self_test": "",
    "run.profile": "",
    "model.resume_from": "read only while the run has no checkpoint of its own",
    "model.resume_state": "read only while the run has no checkpoint of its own",
    "model.attention": "kernels agree within their tolerance",
    "model.compile": "compiled layers add in another order",
    "data.allow_other_tokenizer": "it changes no row",
    "data.engine": "both yield the same bytes",
    "data.prefetch_rows": "",
    "parallel.sp_size": "any value of `parallel.allowed_sp`",
    "parallel.ring_size": "any size that divides the rows, which are padded for `parallel.allowed_sp`",
    "memory.plan": "what was chosen is kept as long as it fits",
    "memory.gradient_checkpointing": "",
    "memory.attention_output": "",
    "memory.offload_activations": "",
    "memory.attention_chunks": "",
    "memory.loss_tile": "gradients agree within rounding",
    "memory.mlp_tile": "gradients agree within rounding",
    "memory.zero_stage": "a checkpoint of any stage loads at any other",
    "memory.offload_optimizer": "",
    "memory.offload_param": "",
    "memory.nvme_path": "",
    "memory.device_gib": "",
    "memory.host_gib": "",
    "checkpoint.storage": "if the checkpoints were moved there; a run that has saved does not restart from step 0 "
    "where its checkpoints are missing or all damaged, but ends with an error",
    "checkpoint.every_steps": "",
    "checkpoint.every_minutes": "",
    "checkpoint.keep_last": "",
    "checkpoint.keep_every_steps": "",
    "checkpoint.keep_best": "",
    "checkpoint.best_metric": "",
    "checkpoint.host_buffers": "",
    "checkpoint.save_timeout_s": "",
    "checkpoint.max_failed_saves": "",
    "checkpoint.failed_saves_patience_s": "",
    "checkpoint.save_at_end": "",
    "elastic.max_failures": "counted from the resume on",
    "elastic.failure_window_s": "failures are counted per command",
    "elastic.worker_start_timeout_s": "",
    "elastic.grow_interval_s": "",
    "elastic.hang_timeout_s": "",
    "elastic.start_hang_timeout_s": "",
    "elastic.peer_memory": "",
    "elastic.peer_memory_gib": "a limit is set when a node's memory is first used, and stays while that is in use",
    "elastic.collective_timeout_s": "",
    "elastic.bad_steps": "",
    "elastic.max_skipped_steps": "",
    "elastic.loss_spike_mads": "",
    "elastic.slow_ranks": "",
    "elastic.cloud_notices": "",
    "elastic.drain_on_rebalance": "",
    "elastic.cloud_metadata_url": "",
    "tracking.enabled": "",
    "tracking.trackers": "one that is added gets the steps from then on",
    "tracking.uri": "if the same server has moved",
    "tracking.allow_http": "",
    "tracking.tags": "",
    "tracking.system_metrics": "",
    "cluster.address": "",
    "cluster.workers": "any multiple of `parallel.sp_size`",
    "cluster.gpus_per_worker": "",
    "cluster.cpus_per_worker": "",
    "cluster.device": "",
    "cluster.gpus_per_node": "",
    "cluster.network_gbps": "",
    "cluster.secrets_file": "",
    "cluster.secrets_names": "",
    "cluster.data_cpus": "",
    "cluster.wait_for_nodes": "",
}


STAGES = "stages"
"""The stages of a run: those to come may change by a branch."""

_ADDED: dict[str, Any] = {
    "model.part": "whole",
    "model.rope": None,
    "model.adapter": None,
    "schedule.kind": "cosine",
    "schedule.decay_steps": None,
}
"""Settings that older checkpoints don't record, with the value they were written under, which is left out."""


_SAME: dict[str, dict[str, Any]] = {"model.rope": {"unchanged": None}}
"""Values that say the same as another one, which they are compared as."""


def resume_conflicts(old: Config, new: Config, *, branch: bool = False) -> tuple[Problem, ...]:
    """Return a problem for each setting that contradicts the run, in the order of the table.

    Args:
        old: The configuration stored in the run's directory.
        new: The configuration to resume with.
        branch: Whether settings of the data plan may change.
    """
    paths = {**({} if branch else BRANCHABLE), **FIXED}
    changed = [(path, reason, differences(setting(old, path), setting(new, path))) for path, reason in paths.items()]
    if not branch:
        before, now = ([stage.model_dump(mode="json") for stage in config.stages] for config in (old, new))
        changed.append((STAGES, "they determine what is trained when", differences(before, now)))
    return tuple(_conflict(old.run.name, path, reason, found) for path, reason, found in changed if found)


def stage_conflicts(old: Config, new: Config, num_begun: int) -> tuple[Problem, ...]:
    """Return a problem for each setting of a stage that has begun which no branch may change.

    Args:
        old: The configuration stored in the run's directory.
        new: The configuration to resume with.
        num_begun: Stages that have begun; 1 for a run without stages.
    """
    if max(1, len(new.stages)) < num_begun:
        rule = f"run '{old.run.name}' has begun {num_begun} stages"
        return (Problem(path=STAGES, value=len(new.stages), rule=rule, hint="restore the stages that have begun"),)
    problems: list[Problem] = []
    for number, (was, is_now) in enumerate(zip(old.stages[:num_begun], new.stages, strict=False)):
        # Checkpoints say by its name of which stage they are.
        for name in ("name", "optimizer", *(() if number == num_begun - 1 else ("steps", "tokens"))):
            if found := differences(getattr(was, name), getattr(is_now, name)):
                problems.append(_conflict(old.run.name, f"{STAGES}.{number}.{name}", "the stage has begun", found))
    for number in range(num_begun):
        before, now = stage_config(old, number), stage_config(new, number)
        # What is behind the run has happened; of the stage that it is in, the data may change.
        fixed = FIXED if number == num_begun - 1 else {**FIXED, **BRANCHABLE}
        for path, reason in fixed.items():
            if path not in _NAMES and (found := differences(setting(before, path), setting(now, path))):
                problems.append(_conflict(old.run.name, f"{STAGES}.{number}: {path}", reason, found))
        if (had_own := _has_own_schedule(old, number)) != _has_own_schedule(new, number):
            has = "a schedule of its own" if had_own else "the run's schedule"
            rule = f"the stage has begun with {has}, and the steps of the other are counted differently"
            hint = f"{'restore' if had_own else 'remove'} it"
            problems.append(Problem(path=f"{STAGES}.{number}.schedule", rule=rule, hint=hint))
    return tuple(problems)


def _has_own_schedule(config: Config, number: int) -> bool:
    """Return whether a stage's schedule is its own, even if it says the same as the run's."""
    return bool(config.stages) and config.stages[number].schedule is not None


def _conflict(run: str, path: str, reason: str, found: tuple[Difference, ...]) -> Problem:
    may_branch = path in BRANCHABLE or path == STAGES
    instead = "make it a branch of the run with `ray-ulysses train --branch`, " if may_branch else ""
    hint = f"restore {path} to resume, {instead}or choose another run.name to start a new run"
    if found[0].name:
        rule = f"differs from the one that run '{run}' was started with ({_listed(found)}), and {reason}"
        return Problem(path=path, rule=rule, hint=hint)
    rule = f"run '{run}' was started with {shown(found[0].old)}, and {reason}"
    return Problem(path=path, value=found[0].new, rule=rule, hint=hint)


def _listed(found: tuple[Difference, ...]) -> str:
    said = [f"{one.name}: {_or_nothing(one.new)}, the run has {_or_nothing(one.old)}" for one in found[:_MOST_LISTED]]
    more = len(found) - len(said)
    return "; ".join(said) + (f"; and {more} more" if more else "")


def _or_nothing(value: object) -> str:
    return "nothing" if value is NOT_GIVEN else shown(value)


def resume_settings(config: Config) -> dict[str, Any]:
    """Return the settings that a saved state depends on, by path, as JSON values: equal for all attempts of a run."""
    settings = {path: setting(config, path) for path in FIXED if path not in _NAMES}
    return {path: value for path, value in settings.items() if path not in _ADDED or value != _ADDED[path]}


def settings_that_differ(stored: Mapping[str, Any], config: Config) -> str:
    """Describe how a configuration differs from the one under which a state was written.

    Args:
        stored: `resume_settings` of that one.
        config: The present configuration.
    """
    now = _ADDED | resume_settings(config)
    before = _ADDED | dict(stored)
    found = [(path, one) for path in now if path in before for one in differences(before[path], now[path])]
    said = [
        f"{path}{'.' if one.name else ''}{one.name} is {_or_nothing(one.new)} and was {_or_nothing(one.old)}"
        for path, one in found
    ]
    return "; ".join(said)


def resume_fingerprint(config: Config) -> str:
    """Return a hash of `resume_settings`."""
    text = json.dumps(resume_settings(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def setting(config: Config, path: str) -> Any:
    """Return the setting with a dotted path as a JSON value, as a file holds it."""
    section, _, name = path.partition(".")
    value = getattr(config, section).model_dump(mode="json", include={name})[name]
    if path == "model.rope" and isinstance(value, dict):
        # What is not given may get company in later versions.
        return {name: given for name, given in value.items() if given is not None}
    return _SAME.get(path, {}).get(value, value) if isinstance(value, str) else value
