"""Finds settings that are valid but may be unintended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.packing import NUM_OPEN_ROWS, WIDE_OPEN_ROWS
from ray_ulysses.data.plan.segment import Segment
from ray_ulysses.data.plan.steps import balance_windows, step_times
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.stages import Stage

_WANTED_FILL = 0.995
_MOST_EMPTY = 0.05
_SHARE_TOLERANCE = 0.01
_WANTED_IMBALANCE = 1.1
_BALANCE_STEPS = (4, 16, 64)


def plan_notes(
    config: Config, shape: ModelShape, stage: Stage | None, corpora: Sequence[Corpus] = ()
) -> tuple[str, ...]:
    """Return notes on settings of a stage that may be unintended.

    A run without stages has one ``stage``; it is ``None`` if there is no corpus yet.
    """
    notes = [*_config_notes(config), *_encoding_notes(corpora)]
    if stage is not None:
        notes += [
            *_data_notes(config, stage),
            *_fill_notes(stage.plan.newest),
            *_balance_notes(config, stage.plan.newest),
            *_checkpoint_notes(config, stage),
        ]
    if not shape.is_exact:
        notes.append(f"the parameter count of model_type {shape.model_type!r} is an estimate")
    if shape.mixer_layers:
        notes.append(
            f"{shape.mixer_layers} of {shape.num_layers} layers carry state along the sequence: their parameters and "
            "FLOPs are counted, but their activations are estimated like those of attention (without their kernels' "
            "packages, steps took 1.0 to 11.5 times as much, depending on the kind of layer), and their time like that "
            "of matrix products; measure both with `ray-ulysses check`"
        )
    return tuple(notes)


def _config_notes(config: Config) -> Iterator[str]:
    rows, dp_size = config.data.rows_per_step, config.dp_size
    if rows % dp_size:
        slots = -(-rows // dp_size) * dp_size
        yield (
            f"{dp_size} data-parallel groups do not divide data.rows_per_step={rows}: {slots - rows} of "
            f"{slots} row slots per step are idle; the loss is not affected"
        )
    model = config.model
    if model.resume_from is None and model.resume_state != "all":
        yield (
            f"model.resume_state={model.resume_state} is ignored, because model.resume_from is null: the run starts "
            f"from model.init={model.init}"
        )


def _data_notes(config: Config, stage: Stage) -> Iterator[str]:
    plan = stage.plan
    horizon = config.schedule.horizon_steps or stage.schedule_end(plan.num_steps) - stage.schedule_start
    if config.schedule.warmup_steps >= horizon:
        yield (
            f"{stage.schedule}.warmup_steps={config.schedule.warmup_steps} reaches the horizon of {horizon} steps: "
            "the learning rate never decays"
        )
    yield from _share_notes(plan.newest)
    num_unlabelled = plan.newest.totals.unlabelled_rows
    if num_unlabelled:
        yield (
            f"{num_unlabelled:,} rows are left out of the plan, because none of their tokens has a label; "
            f"{plan.newest.train.num_rows:,} rows remain"
        )
    if plan.newest.branch is not None and plan.newest.stage is None and config.schedule.horizon_steps is None:
        before = plan.segments[-2].end_step
        yield (
            f"schedule.horizon_steps is null, so the learning rate's horizon moves from step {before:,} to "
            f"{plan.num_steps:,} at step {plan.newest.base_step:,}, and the rate jumps with it"
        )


def _share_notes(segment: Segment) -> Iterator[str]:
    """Report the share of an epoch's tokens that comes from each source, if it differs from its weight."""
    weights = [source.weight or 0.0 for source in segment.sources]
    for info, tokens in zip(segment.epochs, segment.source_tokens, strict=False):
        asked = [weight / sum(weights) for weight in weights]
        found = [taken / max(1, sum(tokens)) for taken in tokens]
        if any(abs(one - other) > _SHARE_TOLERANCE for one, other in zip(asked, found, strict=True)):
            said = ", ".join(
                f"{one:.0%} are from {source.path} ({other:.0%} by weight)"
                for source, one, other in zip(segment.sources, found, asked, strict=True)
                if source.is_used
            )
            yield (
                f"of the tokens planned for epoch {info.epoch + 1}, {said}: a document is never cut to match the "
                "weights, and a document in progress is trained to its end"
            )
            return


def _encoding_notes(corpora: Sequence[Corpus]) -> Iterator[str]:
    """Report corpora whose documents begin or end with different tokens, or whose chat templates differ."""
    tokens = {
        ("bos", "begin"): [corpus.info.encoding.bos_token_id for corpus in corpora],
        ("eos", "end"): [corpus.info.encoding.eos_token_id for corpus in corpora],
    }
    for (which, does), of_corpora in tokens.items():
        # The first corpus with each token.
        found = {token: corpora[of_corpora.index(token)] for token in of_corpora}
        if len(found) > 1:
            where = ", ".join(
                f"in {corpus.folder} with {'no token' if token is None else f'token {token}'}"
                for token, corpus in found.items()
            )
            yield (f"documents {does} differently: {where}. If unintended, prepare them alike (prepare --{which})")
    templates = [corpus.info.encoding.chat_template for corpus in corpora]
    writers = {text: corpora[templates.index(text)] for text in templates if text is not None}
    if len(writers) > 1:
        yield (
            f"conversations in {' and '.join(str(corpus.folder) for corpus in writers.values())} were written with "
            "different chat templates, but an export publishes only the first. If unintended, prepare them alike "
            "(prepare --chat-template)"
        )


def _fill_notes(segment: Segment) -> Iterator[str]:
    """Report poorly filled rows, and the packing that would fill them better."""
    packing, num_rows, epochs = segment.settings.packing, segment.train.num_rows, len(segment.epochs)
    empty_rows = num_rows * (1 - segment.fill)
    # Rows that are still open at an epoch's end say little about the packing, unless most rows are.
    num_open = epochs * (WIDE_OPEN_ROWS if packing == "wide_fit" else NUM_OPEN_ROWS)
    is_poor = empty_rows - epochs > _MOST_EMPTY * num_rows
    if not is_poor and empty_rows - num_open <= (1 - _WANTED_FILL) * num_rows:
        return
    # Documents that each fill a whole row do not fit better into others.
    num_pieces = int(segment.train.stats(0, num_rows).num_pieces.sum(dtype=np.int64))
    if packing == "none":
        why = ", because each document has its own row; best_fit puts several into a row"
    elif packing == "best_fit" and num_rows > num_open and num_pieces > 1.5 * num_rows:
        why = (
            f"; wide_fit chooses among {WIDE_OPEN_ROWS:,} open rows instead of {NUM_OPEN_ROWS}, which suits documents "
            "of a third to two thirds of a row better"
        )
    else:
        why = (
            ", because the documents do not add up to whole rows; concat fills rows by splitting documents, and "
            "another data.context_tokens may suit their lengths"
        )
    yield f"data.packing={packing} leaves {1 - segment.fill:.1%} of the rows empty{why}"


def _balance_notes(config: Config, segment: Segment) -> Iterator[str]:
    """Report how much better balanced the steps could be."""
    settings = segment.settings
    rows, dp_size = settings.rows_per_step, config.dp_size
    if settings.balance_steps > 1 or dp_size == 1:
        return
    now = segment.step_times(dp_size).imbalance
    if now <= _WANTED_IMBALANCE:
        return
    costs = segment.costs()
    for num_steps in _BALANCE_STEPS:
        level = []
        for epoch in segment.epochs:
            part = costs[epoch.first_row : epoch.first_row + epoch.num_rows]
            level.append(part[balance_windows(part, rows, num_steps, epoch.first_row)])
        then = step_times(np.concatenate(level), rows, dp_size).imbalance
        if then - 1 <= (now - 1) / 2:
            yield (
                f"data.balance_steps=1: with {dp_size} data-parallel groups, steps take {now:.2f}x the time of "
                f"perfectly balanced ranks; data.balance_steps={num_steps} makes it {then:.2f}x"
            )
            return


def _checkpoint_notes(config: Config, stage: Stage) -> Iterator[str]:
    checkpoint, evaluation = config.checkpoint, config.run.eval_every_steps
    every, last_step = checkpoint.every_steps, stage.plan.num_steps
    last_step = min(config.run.stop_step or last_step, last_step)
    # A run or stage that is shorter than the interval is fine if it saves at its end, as a stage before another does.
    saves_at_end = checkpoint.save_at_end or not stage.ends_the_run
    is_rare = every is None or (not saves_at_end and last_step // every == stage.first_step // every)
    if checkpoint.every_minutes is None and is_rare:
        what = "stage" if stage.name else "run"
        when = "only at its end" if saves_at_end else "only on demand"
        yield (
            f"checkpoint.every_steps={every if every is not None else 'null'} and checkpoint.every_minutes=null up to "
            f"step {last_step:,}: the {what} saves {when}, and a failure before that loses all progress"
            f"{f' since step {stage.first_step:,}' if stage.first_step else ''}"
        )
    if checkpoint.keep_best == 0 or checkpoint.best_metric != "eval_loss" or evaluation is None:
        return
    if every is None or (every % evaluation and evaluation % every):
        meet = "only by chance" if every is None else f"every {math.lcm(every, evaluation):,} steps"
        yield (
            f"run.eval_every_steps={evaluation} and checkpoint.every_steps={every if every is not None else 'null'} "
            f"coincide {meet}: checkpoint.keep_best={checkpoint.keep_best} chooses only among those checkpoints; make "
            "one interval a multiple of the other"
        )
