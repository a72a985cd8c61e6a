"""Checks whether a run can start, before any worker starts, and writes its configuration and plan to its directory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from ray_ulysses.checkpoint.choice import any_is_committed
from ray_ulysses.config import Config
from ray_ulysses.config.job_paths import relative_path_problems
from ray_ulysses.config.resume import STAGES, branch_changes
from ray_ulysses.config.stages import corpus_paths, in_stage, stage_config
from ray_ulysses.data.corpus.corpus import Corpus, corpus_exists
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.drawing import longest_planned
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan_if_any, num_segments
from ray_ulysses.data.plan.planning import Remainder, build_segment
from ray_ulysses.data.plan.segment import Overlong
from ray_ulysses.data.plan.stages import NewSegment
from ray_ulysses.data.read.masking import Masking
from ray_ulysses.data.tokenize.tokenizers import files_fingerprint, load_tokenizer, tokenizer_folder
from ray_ulysses.engine.model import check_adapter_start, check_architecture, differs_from_stored
from ray_ulysses.engine.model_config import (
    check_described,
    disabled_noise,
    source_format,
    stored_quantization,
    trained_positions,
)
from ray_ulysses.engine.plugins import find_plugins
from ray_ulysses.engine.stored_weights import INDEX_FILE, SINGLE_FILE
from ray_ulysses.errors import ConfigError, Problem, RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.model_shape import ModelShape, read_model_config
from ray_ulysses.planner.problems import context_problems, local_bytes, position_problems, vocabulary_problems
from ray_ulysses.planner.report import PlanReport, build_report, report_run_of_stages, stage_facts
from ray_ulysses.planner.search import Chosen, chosen_settings
from ray_ulysses.planner.stages import stage_plans, stages_of, stand_in_documents
from ray_ulysses.run.checkpoint_store import checkpoint_location, run_dir_answers, storage_answers
from ray_ulysses.run.classes import class_problems, with_classes
from ray_ulysses.run.masks import read_masking, run_masking, store_masking
from ray_ulysses.run.objective_data import objective_problems
from ray_ulysses.run.origin import Origin, check_origin, find_origin, is_there, pin_origin, pinned_origin
from ray_ulysses.run.planning import plan_run, store_plan
from ray_ulysses.run.reference import pin_reference, reference_digest, reference_notes, reference_problems
from ray_ulysses.run.sample_prompts import read_prompts
from ray_ulysses.run.settings import ResolvedRun, last_step_of, model_shape, resolve_run
from ray_ulysses.run.start_point import committed_step
from ray_ulysses.run.stored_run import StoredRun, misfit, other_plan, read_stored_run
from ray_ulysses.run_names import CONFIG_FILE, MASKING_FILE, PLAN_FOLDER, REFERENCE_FILE
from ray_ulysses.storage.hub import is_id
from ray_ulysses.storage.place import is_file, open_store
from ray_ulysses.storage.probe import check_storage
from ray_ulysses.tracking.history import finished_step
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.mlflow_client import HTTPS, plain_http_problem

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run that is ready to start if its report contains no problems."""

    run: ResolvedRun
    corpora: CorpusSet
    plan: Plan
    """The run's data plan. Segments that are not stored yet have row statistics but no rows."""
    report: PlanReport
    """The report that the ``plan`` command prints."""
    new: tuple[NewSegment, ...]
    """The plan's segments that are not stored yet."""
    branch: bool
    """Whether the settings of data and learning rate may differ from the stored settings."""
    stored: StoredRun
    """The run's stored state when it was last read."""
    stored_plan: Plan | None
    """The stored plan; None before the first attempt, which may replace any stored plan."""
    local_bytes: int
    """Memory in bytes that a local Ray cluster with all workers would use on this machine."""
    origin: Origin | None = None
    """Another run's checkpoint that this run starts from."""
    masking: Masking | None = None
    """How tokens are masked, if the model is a masked language model."""
    reference: str | None = None
    """Digest of the reference model, if the objective has one."""

    def read_again(self) -> PreparedRun:
        """Read the stored state again. The state can no longer change once the caller holds the run's claim."""
        stored = read_stored_run(self.config)
        return replace(self, stored=stored, stored_plan=load_stored_plan(self.config, stored))

    @property
    def config(self) -> Config:
        """The configuration with absolute paths."""
        return self.run.config

    @property
    def branched(self) -> Remainder | None:
        """The state of the data plan at the branch point, or None if there is no branch."""
        if not self.new or len(self.new) == len(self.plan.segments):
            return None
        before, first = self.plan.segments[-len(self.new) - 1], self.new[0]
        # A new segment with another stage number starts the next stage and is not a branch.
        return first.remainder if first.segment.stage_number == before.stage_number else None

    @property
    def last_step(self) -> int:
        """The step after which the run stops."""
        return last_step_of(self.config, self.plan)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to print before the run starts: the report's notes, and notes about the branch."""
        began_with = self.stored.config if self.branch and self.stored.has_begun else None
        changes = () if began_with is None else branch_changes(began_with, self.config)
        changed = tuple(f"--branch: {change} after the newest saved state" for change in changes)
        if self.branched is None:
            unchanged = (
                "--branch: neither the data nor the learning rate nor the plugins change, so no branch is created"
            )
            is_unchanged = self.branch and not self.new and not changed
            return (*changed, *self.report.notes, *([unchanged] if is_unchanged else []))
        point, segment = self.branched.branch, self.plan.newest
        return (
            f"--branch: the run's data changes after step {point.step:,}, at row {point.row:,} in epoch "
            f"{point.epoch + 1}; plan {segment.plan_id} has {segment.train.num_rows:,} more rows, up to step "
            f"{segment.end_step:,}",
            *changed,
            *self.report.notes,
        )


def prepare_run(config: Config, base: Path, *, branch: bool = False, stored: StoredRun | None = None) -> PreparedRun:
    """Check a configuration against its model, corpora and stored run, and plan the run's rows, without writing files.

    Problems that prevent a start are listed in ``report.problems``, or in an error if no report can be created.

    Args:
        config: The loaded configuration.
        base: The directory to which relative paths in the configuration refer.
        branch: Whether an existing run's data may change after its newest committed checkpoint.
        stored: The run's stored state, if the caller has already read it.

    Raises:
        UserError: The model's configuration or a corpus can't be read, or the corpora contain no rows.
    """
    relative = relative_path_problems(config, base, os.environ)
    config = config.with_absolute_paths(base)
    stored = read_stored_run(config) if stored is None else stored
    config = with_classes(config, stored.config if stored.has_begun else None)
    problems = [*relative, *_tracking_problems(config), *stored.conflicts(config, branch=branch)]
    problems += _plugin_problems(config)
    try:
        with run_dir_answers(config):
            return _prepare(config, problems, stored, branch=branch)
    except UserError as error:
        if not problems:
            raise
        raise ConfigError(problems, source=f"run {config.run.name!r}", beside=error) from error


def _plugin_problems(config: Config) -> Iterator[Problem]:
    """Import the plugins before the model is read, because they may define it, and yield a problem for each misfit."""
    plugins, problems = find_plugins(config)
    yield from problems
    described = config.model.config
    if plugins.model_type is None or described is None or described["model_type"] == plugins.model_type:
        return
    yield Problem(
        path="model.config.model_type",
        value=described["model_type"],
        rule=f"differs from that of the plugins' model class, {plugins.model_type}, which would not be used",
        hint=f"set it to {plugins.model_type}, or remove the plugin",
    )


def _tracking_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for a missing tracking client, and for credentials that would be sent in clear text."""
    if "wandb" in config.trackers and importlib.util.find_spec("wandb") is None:
        yield Problem(
            path="tracking.trackers",
            value=list(config.trackers),
            rule="the Weights & Biases client is not installed on this machine",
            hint="install it with `pip install wandb`, or remove wandb",
        )
    uri = config.tracking_uri
    if uri is not None and not config.tracking.allow_http and (rule := plain_http_problem(uri)) is not None:
        yield Problem(path="tracking.uri", value=uri, rule=rule, hint=HTTPS)


def _prepare(config: Config, problems: list[Problem], stored_run: StoredRun, *, branch: bool) -> PreparedRun:
    """Return the prepared run, and append problems to ``problems`` as they are found."""
    _check_model_path(config)
    run = resolve_run(config)
    config, chosen = chosen_settings(config, run.shape, stored_run.config if stored_run.has_begun else None)
    run, shape = replace(run, config=config), run.shape
    num_positions = check_architecture(config).num_positions
    model_notes = (*_adapter_start(config), *_noise_notes(config))
    stored = load_stored_plan(config, stored_run)
    problems += misfit(run, stored)
    corpora, validation, plan, new = plan_run(run, stored, stored_run, branch=branch)
    problems += () if problems else other_plan(config, stored, plan, len(new))
    known = 0 if stored is None else max(segment.settings.capacity for segment in stored.segments)
    for stage in stages_of(config, plan):
        own, so_far = stage.config, stage.plan
        capacity = so_far.settings.capacity
        longest = min(_longest_planned(own, (*corpora.corpora, *validation.corpora), so_far), capacity)
        if num_positions is not None:
            problems += position_problems(own, longest, num_positions)
        if capacity > known:
            problems += context_problems(own, longest, trained_positions(own))
        problems += _sample_problems(own, corpora.corpora[0])
    masking, mask_problems = _masking(config, corpora.corpora[0], stored_run, shape.vocab_size)
    problems += mask_problems
    documents = (*corpora.corpora, *validation.corpora)
    problems += (*objective_problems(config, documents, partial(_setting_of, config)), *class_problems(config))
    digest = reference_digest(config, has_begun=stored_run.has_begun) if not problems else None
    problems += reference_problems(config, digest, documents, partial(_setting_of, config))
    for corpus in validation.corpora:
        problems += vocabulary_problems(
            corpus.info.max_token_id, shape.vocab_size, str(corpus.folder), "data.validation"
        )
    others, notes = compare_tokenizers(config, corpora.corpora[0])
    settled = None if stored is None else stored.settings
    report = report_run_of_stages(config, shape, corpora, plan, (*problems, *others), chosen, settled)
    notes = (*report.notes, *model_notes, *reference_notes(config), *notes)
    report = replace(report, notes=notes, source_format=source_format(config))
    problems[:] = report.problems
    return PreparedRun(
        run=run,
        corpora=corpora,
        plan=plan,
        report=report,
        new=new,
        branch=branch,
        stored=stored_run,
        stored_plan=stored,
        local_bytes=local_bytes(config, shape),
        origin=_origin(run, plan),
        masking=masking,
        reference=digest,
    )


def load_stored_plan(config: Config, stored: StoredRun) -> Plan | None:
    """Return the plan of a run that has begun, or None before the first attempt, which may replace any stored plan."""
    with run_dir_answers(config):
        return load_plan_if_any(config.run_dir / PLAN_FOLDER) if stored.has_begun else None


def _noise_notes(config: Config) -> tuple[str, ...]:
    noise = ", ".join(f"{name}={value:g}" for name, value in disabled_noise(config).items())
    return (f"model.config: {noise} is replaced by 0, because noise would depend on the layout",) if noise else ()


def _masking(
    config: Config, corpus: Corpus, stored_run: StoredRun, vocab_size: int
) -> tuple[Masking | None, tuple[Problem, ...]]:
    """Return the run's masking, if its model is a masked language model, or the problem that prevents it."""
    if config.objective.task != "masked_lm":
        return None, ()
    try:
        stored = read_masking(config.run_dir) if stored_run.has_begun else None
        masking = stored or run_masking(config, corpus.info.tokenizer)
        if masking is not None:
            masking.refuse_small(vocab_size)
    except (UserError, OSError) as error:
        path, (reason, _, hint) = str(corpus.folder), str(error).partition("; ")
        rule = f"can't be masked for objective.kind={config.objective.kind}: {reason}"
        return None, (Problem(path=_setting_of(config, path), value=path, rule=rule, hint=hint),)
    return masking, ()


def _longest_planned(config: Config, corpora: Sequence[Corpus], plan: Plan) -> int:
    """Return the length in tokens of the longest document that may be packed into a row, or 0 without documents."""
    overlong, row_tokens = get_args(Overlong).index(plan.settings.overlong), plan.settings.capacity
    planned = (*plan.newest.sources, *plan.newest.validation)
    used = {source.fingerprint for source in planned if source.is_used}
    there = [corpus for corpus in corpora if corpus.fingerprint in used]
    if config.objective.uses_pairs:
        # Both texts have positions of their own.
        most = row_tokens + (not config.objective.needs_whole_documents)
        fits = [corpus.text_lengths[corpus.lengths <= most] for corpus in there if corpus.info.are_pairs]
        return max((int(lengths.max(initial=0)) for lengths in fits), default=0)
    return max((int(longest_planned(corpus.lengths, row_tokens, overlong)) for corpus in there), default=0)


def report_run(config: Config, base: Path, *, branch: bool = False, synthetic: bool = False) -> PlanReport:
    """Return the report of the ``plan`` command. If a corpus is missing or not set, document lengths are assumed.

    Arguments and exceptions are the same as for `prepare_run`, except that a missing corpus is a problem of the report,
    or none with ``synthetic`` or if ``train`` prepares it first.
    """
    absolute = config.with_absolute_paths(base)
    named, is_first = corpus_paths(absolute), needs_preparation(absolute)
    paths = [path for path in named if not corpus_exists(path) and not (is_first and path == absolute.data.path)]
    if named and not is_first and (not paths or num_segments(absolute.run_dir / PLAN_FOLDER)):
        return prepare_run(config, base, branch=branch).report
    hint = "prepare it with `ray-ulysses prepare`, correct the path, or use --synthetic to assume documents"
    missing = [
        Problem(path=_setting_of(absolute, path), value=path, rule="there is no corpus", hint=hint)
        for path in paths
        if not synthetic
    ]
    stored = read_stored_run(absolute)
    problems, facts = [*missing, *stored.conflicts(absolute, branch=branch), *_plugin_problems(absolute)], []
    absolute, shape, chosen = planned_memory(config, base, stored)
    num_positions = check_architecture(absolute).num_positions
    model_notes = (*_adapter_start(absolute), *_noise_notes(absolute))
    begun = load_stored_plan(absolute, stored)
    settled = None if begun is None else begun.settings
    for number, planned in enumerate(stage_plans(absolute, shape, settled)):
        # Without documents, the leftover rows of the previous stage are unknown, so each stage is planned on its own.
        documents, own = stand_in_documents(planned.settings), stage_config(absolute, number)
        plan = Plan(segments=(build_segment(documents, planned.settings),))
        report = build_report(own, shape, documents, plan, (), chosen, None, absolute, settled)
        found = [*context_problems(own, planned.settings.capacity, trained_positions(own)), *report.problems]
        if absolute.stages:
            stage, corpora = absolute.stages[number], tuple(path for path, _ in own.data_sources)
            facts.append(stage_facts(stage, own, report, number, None, stage.tokens, corpora))
            found = [in_stage(one, stage) for one in found]
        problems += found
    notes = (*report.notes, *model_notes, *reference_notes(absolute))
    if is_first and absolute.data.prepare is not None:
        sources = ", ".join(absolute.data.prepare.sources)
        notes += (f"data.path={absolute.data.path}: there is no corpus; train prepares it first from {sources}",)
    if num_positions is not None and absolute.data.context_tokens > num_positions:
        notes += (
            f"data.context_tokens={absolute.data.context_tokens}: the model has only {num_positions} positions; a "
            "corpus with a longer document will be refused",
        )
    return replace(
        report, problems=tuple(problems), stages=tuple(facts), notes=notes, source_format=source_format(absolute)
    )


def needs_preparation(config: Config) -> bool:
    """Return whether ``train`` prepares the corpus first: ``data.prepare`` is set, and the corpus is not complete.

    Raises:
        UserError: The location of the corpus can't be used.
        RunError: The storage does not respond.
    """
    path = config.data.path
    return config.data.prepare is not None and path is not None and not corpus_exists(path, is_complete=True)


def _setting_of(config: Config, path: str) -> str:
    if path == config.data.path:
        return "data.path"
    if path in config.data.validation:
        return "data.validation"
    return "data.sources" if any(path == source.path for source in config.data.sources or ()) else STAGES


def planned_memory(
    config: Config, base: Path, stored: StoredRun | None = None
) -> tuple[Config, ModelShape, tuple[Chosen, ...]]:
    """Return the configuration with absolute paths and planned settings, the model's shape, and the planner's choices.

    The function reads only the model's configuration and, unless ``stored`` is given, the run's stored state.

    Raises:
        UserError: The model's configuration or the stored state can't be read.
        RunError: The run's storage does not respond.
    """
    config = config.with_absolute_paths(base)
    # A plugin may define the model.
    problems = tuple(_plugin_problems(config))
    _check_model_path(config)
    try:
        shape = model_shape(config)
    except UserError as error:
        if not problems:
            raise
        raise ConfigError(problems, source=f"run {config.run.name!r}", beside=error) from error
    stored = read_stored_run(config) if stored is None else stored
    config, chosen = chosen_settings(config, shape, stored.config if stored.has_begun else None)
    return config, shape, chosen


def _adapter_start(config: Config) -> tuple[str, ...]:
    """Check ``model.adapter.from`` and return notes, unless a committed checkpoint contains the adapter's weights."""
    if config.model.adapter is None or config.model.adapter.from_ is None:
        return ()
    with storage_answers(location := checkpoint_location(config)):
        is_stored = any_is_committed(open_store(location))
    return () if is_stored else check_adapter_start(config, config.model.adapter)


def _origin(run: ResolvedRun, plan: Plan) -> Origin | None:
    """Return the other run's checkpoint to start from, if any; None if this run already has a checkpoint."""
    config = run.config
    if config.model.resume_from is None:
        return None
    finished = finished_step(read_entries(config.run_dir, ends_only=True))
    if (finished is not None and finished >= last_step_of(config, plan)) or committed_step(run) > 0:
        return None
    origin = pinned_origin(config)
    if origin is not None:
        with storage_answers(origin.location):
            if not is_there(origin):
                _log.warning("checkpoint %s no longer exists; looking up model.resume_from again", origin)
                origin = None
    if origin is None:
        origin = find_origin(config)
    if origin is not None:
        found = check_origin(origin, config, plan)
        other = None if config.model.resume_state == "all" else differs_from_stored(config, found.state)
        if other is not None:
            raise UserError(
                f"model.resume_from={origin.reference!r}: the checkpoint of step {found.step} of run "
                f"{found.meta.run!r} belongs to a different model: {other}; use that run's model.path or model.config, "
                "or export that run and set model.path to the exported directory"
            )
    return origin


def check_resume(prepared: PreparedRun) -> None:
    """Refuse to resume a run with a configuration or corpus that conflicts with its stored state.

    Raises:
        ConfigError: Settings that are fixed for the run's lifetime have changed.
        UserError: The run has continued past the branch point since the branch was planned.
    """
    config = prepared.config
    if not prepared.stored.has_begun:
        return
    stored = prepared.stored_plan
    problems = prepared.stored.conflicts(config, branch=prepared.branch) or other_plan(
        config, stored, prepared.plan, len(prepared.new)
    )
    if problems:
        raise ConfigError(problems, source=f"resume of run {config.run.name!r} in {config.run.storage}")
    stored_ids = {segment.plan_id for segment in stored.segments} if stored else set()
    if stored is not None and prepared.new and prepared.new[0].segment.plan_id not in stored_ids:
        step, branched = committed_step(prepared.run), prepared.new[0].segment.base_step
        # Rows after the branch point would be trained twice.
        if step > branched:
            raise UserError(
                f"run {config.run.name!r} advanced to step {step} while a branch from step {branched} was being "
                "planned; stop the run and start the same command again"
            )


def claim_directory(prepared: PreparedRun) -> None:
    """Write the configuration, plan and origin to the run's directory. The caller must hold the run's claim."""
    config = prepared.config
    if not prepared.stored.has_begun and num_segments(config.run_dir / PLAN_FOLDER):
        # An earlier command failed before its first attempt and left its plan behind.
        for name in (PLAN_FOLDER, MASKING_FILE, REFERENCE_FILE):
            open_store(config.run_dir).delete(name)
    store_plan(config, prepared.new, prepared.stored_plan)
    pin_origin(config, prepared.origin)
    if prepared.masking is not None:
        store_masking(config.run_dir, prepared.masking)
    if prepared.reference is not None:
        pin_reference(config.run_dir, prepared.reference)
    open_store(config.run_dir).replace(CONFIG_FILE, [config.to_yaml().encode()])


def refuse_vanished(config: Config) -> None:
    """Raise an error if the run's directory has disappeared, so that the run is not reported as complete.

    Raises:
        RunError: The directory was deleted or moved during training.
    """
    if not is_file(config.run_dir / CONFIG_FILE):
        raise RunError(
            f"the run's directory {config.run_dir} was deleted or moved during training; move or copy it back; "
            "otherwise the run's files are lost"
        )


def check_writable(prepared: PreparedRun) -> None:
    """Check that the run's storage locations are writable and support atomic creation; see `check_storage`."""
    config, stored = prepared.config, prepared.stored.config if prepared.stored.has_begun else None
    check_storage(config.run.storage, is_known=stored is not None and stored.run.storage == config.run.storage)
    if (place := config.checkpoint.storage) is not None:
        is_known = stored is not None and stored.checkpoint.storage == place
        check_storage(place, setting="checkpoint.storage", is_known=is_known)


def _check_model_path(config: Config) -> None:
    path = config.model.path
    if path is None:
        return
    directory = Path(path).expanduser()
    if not directory.is_dir():
        if config.model.part == "text":
            raise UserError(
                f"model.path={path!r}: no such directory; model.part=text requires a local directory, since an export "
                "copies the full checkpoint; download the model and set model.path to its directory"
            )
        if not is_id(path):
            raise UserError(
                f"model.path={path!r}: no such directory; use a directory with config.json and safetensors files, or a "
                "hub model id (owner/name)"
            )
        return
    has_weights = any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    if (directory / "adapter_config.json").is_file() and not has_weights:
        raise UserError(
            f"model.path={path!r} contains only an adapter; use the directory of a complete model, for example one "
            "written by `ray-ulysses export --merge`"
        )
    if not (directory / "config.json").is_file():
        raise UserError(f"model.path={path!r} contains no config.json; use a Hugging Face model directory")
    if config.model.part == "text" and stored_quantization(path) is not None:
        raise UserError(
            f"model.path={path!r}: the weights are quantized, and model.part=text exports into a copy of the "
            "checkpoint, which can't have quantized weights; dequantize the model, save it, and set model.path to its "
            "directory"
        )
    if (config.model.init == "pretrained" or config.model.part == "text") and not has_weights:
        raise UserError(
            f"model.path={path!r} contains no safetensors weights ({SINGLE_FILE}, or {INDEX_FILE} and its files); "
            "convert the model with save_pretrained, or set model.init: random"
        )
    check_described(config.model.config, read_model_config(directory, f"model.path={path!r}"), path)


def _sample_problems(config: Config, corpus: Corpus) -> Iterator[Problem]:
    if (every := config.run.sample_every_steps) is not None:
        try:
            read_prompts(config, corpus.info)
        except (UserError, OSError) as error:
            hint = "correct run.sample_prompts, make the tokenizer readable, or set null"
            yield Problem(
                path="run.sample_every_steps", value=every, rule=f"can't tokenize prompts: {error}", hint=hint
            )


def compare_tokenizers(config: Config, corpus: Corpus) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """Return problems and notes if the corpora were prepared with a tokenizer that differs from the model's tokenizer.

    Args:
        config: The run's configuration.
        corpus: One of the run's corpora. All of them have the same tokenizer.
    """
    path, init = config.model.path, config.model.init
    if path is None:
        return (), ()
    try:
        directory = tokenizer_folder(path)
        if files_fingerprint(directory) == corpus.info.tokenizer.fingerprint:
            return (), ()
        difference = load_tokenizer(directory).tokens.difference_from(corpus.info.vocabulary)
    except (UserError, OSError) as error:
        unknown = f"can't compare the corpus's tokenizer with the tokenizer in model.path={path!r} ({error})"
        return (), (unknown,) if init == "pretrained" else ()
    if difference is None:
        return (), ()
    rule = (
        f"was prepared with the tokenizer {corpus.info.tokenizer.name}, which differs from the tokenizer in "
        f"model.path={path!r}: {difference}"
    )
    if init == "pretrained" and not config.data.allow_other_tokenizer:
        problem = Problem(
            path="data.path",
            value=str(corpus.folder),
            rule=rule,
            hint=f"prepare the corpus again with --tokenizer {path}, or set data.allow_other_tokenizer: true to train "
            "with token ids whose meaning differs from pretraining",
        )
        return (problem,), ()
    return (), (f"data.path={corpus.folder}: {rule}; exports will contain the corpus's tokenizer",)
